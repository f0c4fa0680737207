//! The host's monotonic clock: one for all processes of a host.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds on the clock that windows and emulated devices use.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

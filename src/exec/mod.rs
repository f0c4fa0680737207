//! Moves the bytes: one file per executor, each preparing, launching and timing its samples.

pub mod batch;
pub mod bulk;
pub mod copy_engine;
pub mod cpu;
pub mod kernel;
mod mapped;

use crate::error::Error;
use crate::memory::rotating::Rotating;
use crate::place::Executor;
use crate::plan::split::Share;
use crate::units::Bytes;

/// A span on the host's monotonic clock, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Window {
    pub start_ns: u64,
    pub end_ns: u64,
}

impl Window {
    /// The span from the earliest start to the latest end, or `None` of nothing.
    pub fn around(windows: impl IntoIterator<Item = Window>) -> Option<Window> {
        windows
            .into_iter()
            .reduce(|a, b| Window { start_ns: a.start_ns.min(b.start_ns), end_ns: a.end_ns.max(b.end_ns) })
    }

    pub fn ns(self) -> f64 {
        self.end_ns.saturating_sub(self.start_ns) as f64
    }
}

/// What took a transfer's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clock {
    Host,
    DeviceEvent,
    DeviceClock,
}

/// The executions of one sample: number `first` to `first + count - 1`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Executions {
    pub first: u64,
    /// At least one.
    pub count: u32,
}

impl Executions {
    /// The last execution on each slice, oldest first: those whose data are still there.
    pub fn last_on_each(self, slices: u64) -> std::ops::Range<u64> {
        let end = self.first + u64::from(self.count);
        end - u64::from(self.count).min(slices)..end
    }
}

/// One transfer of one executor with its memory bound.
#[derive(Clone, Debug)]
pub struct BoundTransfer {
    /// Position in its test.
    pub index: u32,
    pub bytes: Bytes,
    pub srcs: Vec<Rotating>,
    pub dsts: Vec<Rotating>,
    /// One per busy sub-executor.
    pub shares: Vec<Share>,
}

/// What an executor is made of.
#[derive(Clone, Debug)]
pub struct Work {
    pub exe: Executor,
    pub transfers: Vec<BoundTransfer>,
}

/// Time of one transfer in one sample: of all its executions together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransferTime {
    pub duration_ns: f64,
    pub window: Window,
}

/// Times of one executor in one sample.
#[derive(Clone, Debug)]
pub struct SampleTimes {
    pub executor: Window,
    /// In the order of `Work::transfers`.
    pub transfers: Vec<TransferTime>,
}

/// An executor ready to run samples.
///
/// A sample is `arm` (untimed), common start, `go`, `wait`, `times` (untimed).
pub enum Ready {
    Cpu(cpu::Ready),
    Kernel(kernel::Ready),
    CopyEngine(copy_engine::Ready),
}

impl Ready {
    /// Rotates: says which executions, back to back, the next sample is made of.
    pub fn arm(&mut self, sample: Executions) -> Result<(), Error> {
        match self {
            Ready::Cpu(ready) => ready.arm(sample),
            Ready::Kernel(ready) => ready.arm(sample),
            Ready::CopyEngine(ready) => ready.arm(sample),
        }
    }

    /// Starts the sample and returns at once.
    pub fn go(&mut self) -> Result<(), Error> {
        match self {
            Ready::Cpu(ready) => ready.go(),
            Ready::Kernel(ready) => ready.go(),
            Ready::CopyEngine(ready) => ready.go(),
        }
    }

    /// Returns when every transfer of the sample has written its last byte.
    pub fn wait(&mut self) -> Result<(), Error> {
        match self {
            Ready::Cpu(ready) => ready.wait(),
            Ready::Kernel(ready) => ready.wait(),
            Ready::CopyEngine(ready) => ready.wait(),
        }
    }

    /// Times of the sample that `wait` ended.
    pub fn times(&mut self) -> Result<SampleTimes, Error> {
        match self {
            Ready::Cpu(ready) => ready.times(),
            Ready::Kernel(ready) => ready.times(),
            Ready::CopyEngine(ready) => ready.times(),
        }
    }

    /// The clock behind the transfers' durations.
    pub fn clock(&self) -> Clock {
        match self {
            Ready::Cpu(_) => Clock::Host,
            Ready::Kernel(ready) => ready.clock(),
            Ready::CopyEngine(ready) => ready.clock(),
        }
    }
}

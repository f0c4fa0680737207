//! Turns `src_rotate_bytes` and `dst_rotate_bytes`, once, into the stride and slice count of each buffer.

use serde::{Deserialize, Serialize};

use crate::config::options::{RotateBytes, RotateScope};
use crate::place::{ExeKind, Executor, Place};
use crate::units::Bytes;
use crate::world::World;

/// Every slice starts with the alignment of its buffer, so vector loads stay legal at every size.
pub const STRIDE_ALIGN: u64 = 256;

/// Bytes around every destination that nobody may write; checked by `verify`.
pub const GUARD: Bytes = Bytes::kib(4);

/// Shape of a buffer: a lead, then `slices` slices that start `stride` bytes apart, then a tail.
///
/// ```text
/// |lead|bytes..gap|bytes..gap|bytes..gap|tail|
///       <-stride->
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Guard zone and `byte_offset`.
    pub lead: Bytes,
    pub bytes: Bytes,
    pub stride: Bytes,
    pub slices: u64,
    pub tail: Bytes,
}

impl Layout {
    /// Slices for one side of a transfer: `stride` = bytes rounded up to 256,
    /// K = max(1, ceil(rotate / stride)); 0 disables.
    ///
    /// # Errors
    /// Where a size leaves 64 bits.
    pub fn new(bytes: Bytes, rotate: Bytes, byte_offset: Bytes, guard: Bytes) -> Result<Layout, String> {
        let overflow =
            || format!("{bytes} with rotation over {rotate} and offset {byte_offset} does not fit in 64 bits");
        let stride = bytes.round_up(STRIDE_ALIGN).ok_or_else(overflow)?;
        let layout = Layout {
            lead: guard.0.checked_add(byte_offset.0).map(Bytes).ok_or_else(overflow)?,
            bytes,
            stride,
            slices: rotate.0.div_ceil(stride.0.max(1)).max(1),
            tail: guard,
        };
        stride
            .0
            .checked_mul(layout.slices)
            .and_then(|body| body.checked_add(layout.lead.0))
            .and_then(|body| body.checked_add(guard.0))
            .ok_or_else(overflow)?;
        Ok(layout)
    }

    /// Bytes from the start of the buffer to slice `n mod K`.
    pub fn slice_offset(&self, n: u64) -> u64 {
        self.lead.0 + (n % self.slices) * self.stride.0
    }

    /// All bytes of the buffer.
    pub fn total(&self) -> Bytes {
        Bytes(self.lead.0 + self.stride.0 * self.slices + self.tail.0)
    }

    /// Bytes that rotation walks through: what a cache would have to hold.
    pub fn footprint(&self) -> Bytes {
        Bytes(self.stride.0 * self.slices)
    }
}

/// Whether the sources of a transfer are rotated: all of them, since they share one shape.
pub fn in_scope(scope: RotateScope, srcs: &[Place], exe: Executor) -> bool {
    match (scope, exe.kind) {
        // A NIC registers a fixed address.
        (_, ExeKind::Nic | ExeKind::NicNear) => false,
        (RotateScope::All, _) => true,
        (RotateScope::Gpu, ExeKind::Kernel | ExeKind::CopyEngine | ExeKind::Batch | ExeKind::Bulk) => {
            srcs.iter().all(|place| !place.kind.is_host())
        }
        (RotateScope::Gpu, ExeKind::Cpu | ExeKind::Mpi) => false,
    }
}

/// What the destinations rotate over, where the sources rotate over `src` (0 = not at all).
///
/// `auto` follows the sources where all ends of a transfer are memory of its executor's own device:
/// there a small destination stays in the very cache that rotation keeps the source out of. A write
/// to anywhere else has to leave that cache, and nothing is rotated.
pub fn dst_rotate_bytes(rotate: RotateBytes, src: Bytes, srcs: &[Place], exe: Executor, dsts: &[Place]) -> Bytes {
    match rotate {
        RotateBytes::Size(bytes) => bytes,
        RotateBytes::Auto if is_local(srcs, exe, dsts) => src,
        RotateBytes::Auto => Bytes::ZERO,
    }
}

/// Whether a device moves data within its own memory.
fn is_local(srcs: &[Place], exe: Executor, dsts: &[Place]) -> bool {
    let device = matches!(exe.kind, ExeKind::Kernel | ExeKind::CopyEngine | ExeKind::Batch | ExeKind::Bulk);
    let own = |place: &Place| !place.kind.is_host() && (place.rank, place.index) == (exe.rank, exe.index);
    device && srcs.iter().chain(dsts).all(own)
}

/// The least that `auto` rotates over: the default of the fixed setting.
const AUTO_MIN: Bytes = Bytes::mib(256);

/// Footprint over largest cache from which on a steady stream of fresh slices misses it (an H200
/// with 60 MB of L2 reads at its plateau from 100 MB on).
const AUTO_CACHES: u64 = 4;

/// The footprint of a transfer's sources, with `auto` resolved: max(256 MiB, 4 x the largest cache
/// on the path), capped at a quarter of the free memory of every owner.
pub fn rotate_bytes(rotate: RotateBytes, srcs: &[Place], exe: Executor, world: &World) -> Bytes {
    if let RotateBytes::Size(bytes) = rotate {
        return bytes;
    }
    let device_cache = |rank, index: u32| {
        world.inventory(rank).and_then(|i| i.devices.get(index as usize)).map_or(Bytes::ZERO, |device| device.cache)
    };
    let host_cache =
        |rank| world.inventory(rank).map_or(Bytes::ZERO, |inventory| inventory.caches.l3.max(inventory.caches.l2));
    let mut cache = match exe.kind {
        ExeKind::Cpu | ExeKind::Mpi | ExeKind::Nic | ExeKind::NicNear => host_cache(exe.rank),
        ExeKind::Kernel | ExeKind::CopyEngine | ExeKind::Batch | ExeKind::Bulk => device_cache(exe.rank, exe.index),
    };
    let mut free = Bytes(u64::MAX);
    for place in srcs {
        let Some(inventory) = world.inventory(place.rank) else { continue };
        if place.kind.is_host() {
            cache = cache.max(host_cache(place.rank));
            free = free.min(inventory.memory_free);
        } else {
            cache = cache.max(device_cache(place.rank, place.index));
            free = free.min(inventory.devices.get(place.index as usize).map_or(Bytes::ZERO, |d| d.memory_total));
        }
    }
    let wanted = AUTO_MIN.max(Bytes(cache.0.saturating_mul(AUTO_CACHES)));
    wanted.min(Bytes(free.0 / 4))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::MemKind;
    use crate::units::Rank;

    fn slices(bytes: u64, rotate: u64) -> u64 {
        Layout::new(Bytes(bytes), Bytes(rotate), Bytes::ZERO, Bytes::ZERO).unwrap().slices
    }

    #[test]
    fn slice_counts_follow_the_source_document() {
        assert_eq!(slices(4 << 20, 256 << 20), 64);
        assert_eq!(slices(256 << 20, 256 << 20), 1);
        assert_eq!(slices(512 << 20, 256 << 20), 1);
        assert_eq!(slices(4 << 20, 0), 1);
    }

    #[test]
    fn memory_stays_below_the_rotation_plus_one_stride() {
        for bytes in [4u64, 252, 256, 260, 4096, (1 << 20) + 4, 255 << 20, 256 << 20] {
            let layout = Layout::new(Bytes(bytes), Bytes::mib(256), Bytes::ZERO, Bytes::ZERO).unwrap();
            assert!(layout.total().0 < (256 << 20) + layout.stride.0, "{bytes}");
            assert!(layout.stride.0.is_multiple_of(STRIDE_ALIGN));
        }
    }

    fn ends(text: &str) -> (Vec<Place>, Executor, Vec<Place>) {
        let parts: Vec<&str> = text.split(" -> ").collect();
        let number = |at: u8| u32::from(at - b'0');
        let place = |text: &[u8]| Place {
            rank: Rank(number(text[1])),
            kind: MemKind::from_letter(text[2].into()).unwrap(),
            index: number(text[3]),
        };
        let side = |text: &str| if text == "N" { Vec::new() } else { text.as_bytes().chunks(4).map(place).collect() };
        let exe = parts[1].as_bytes();
        let kind = ExeKind::from_letter(exe[2].into()).unwrap();
        let exe = Executor { rank: Rank(number(exe[1])), kind, index: number(exe[3]), sub_index: None };
        (side(parts[0]), exe, side(parts[2]))
    }

    #[test]
    fn destinations_follow_the_sources_within_one_device_and_nowhere_else() {
        let of = |text: &str, rotate, src| {
            let (srcs, exe, dsts) = ends(text);
            dst_rotate_bytes(rotate, Bytes(src), &srcs, exe, &dsts)
        };
        for local in
            ["R0G0 -> R0G0 -> R0G0", "R1G2 -> R1D2 -> R1F2", "R0G0R0U0 -> R0G0 -> R0G0R0G0", "N -> R0G0 -> R0G0"]
        {
            assert_eq!(of(local, RotateBytes::Auto, 512), Bytes(512), "{local}");
            // A fixed source leaves the destination fixed too.
            assert_eq!(of(local, RotateBytes::Auto, 0), Bytes::ZERO, "{local}");
            assert_eq!(of(local, RotateBytes::Size(Bytes::ZERO), 512), Bytes::ZERO, "{local}");
        }
        for other in [
            "R0G0 -> R0G0 -> R1G0",
            "R1G0 -> R0G0 -> R0G0",
            "R0G0 -> R0G0 -> R0G1",
            "R0G1 -> R0G0 -> R0G1",
            "R0G0 -> R0G0 -> R0G0R1G0",
            "R0C0 -> R0G0 -> R0G0",
            "R0G0 -> R0G0 -> R0C0",
            "R0C0 -> R0C0 -> R0C0",
            "R0G0 -> R0C0 -> R0G0",
        ] {
            assert_eq!(of(other, RotateBytes::Auto, 512), Bytes::ZERO, "{other}");
            assert_eq!(of(other, RotateBytes::Size(Bytes(64)), 512), Bytes(64), "{other}");
        }
    }

    #[test]
    fn sizes_beyond_64_bits_are_refused() {
        assert!(Layout::new(Bytes(u64::MAX - 3), Bytes::mib(256), Bytes::ZERO, Bytes::ZERO).is_err());
        assert!(Layout::new(Bytes(4), Bytes::mib(256), Bytes(u64::MAX), Bytes::ZERO).is_err());
        assert!(Layout::new(Bytes(1 << 20), Bytes(u64::MAX), Bytes::ZERO, GUARD).is_err());
    }
}

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
pub fn is_local(srcs: &[Place], exe: Executor, dsts: &[Place]) -> bool {
    let device = matches!(exe.kind, ExeKind::Kernel | ExeKind::CopyEngine | ExeKind::Batch | ExeKind::Bulk);
    let own = |place: &Place| !place.kind.is_host() && (place.rank, place.index) == (exe.rank, exe.index);
    device && srcs.iter().chain(dsts).all(own)
}

/// The least that `auto` rotates over: the default of the fixed setting.
const AUTO_MIN: Bytes = Bytes::mib(256);

/// Footprint over largest cache from which on a steady stream of fresh slices misses it (an H200
/// with 60 MB of L2 reads at its plateau from 100 MB on).
const AUTO_CACHES: u64 = 4;

/// The part of the free memory that `auto` takes at most.
const AUTO_MEMORY_PARTS: u64 = 4;

/// The footprint of a transfer's sources, with `auto` resolved: max(256 MiB, 4 x `cache`, the largest
/// on the path), capped at a quarter of the free memory of every owner. Also what to say of a cap.
pub fn rotate_bytes(rotate: RotateBytes, cache: Bytes, srcs: &[Place], world: &World) -> (Bytes, Option<String>) {
    if let RotateBytes::Size(bytes) = rotate {
        return (bytes, None);
    }
    let free = |place: &Place| {
        let inventory = world.inventory(place.rank)?;
        if place.kind.is_host() { Some(inventory.memory_free) } else { inventory.device_free(place.index) }
    };
    let wanted = AUTO_MIN.max(Bytes(cache.0.saturating_mul(AUTO_CACHES)));
    // Whole MiB, to be read and to be set.
    const MIB: u64 = Bytes::mib(1).0;
    let cap = srcs.iter().filter_map(free).min().map(|free| Bytes(free.0 / AUTO_MEMORY_PARTS / MIB * MIB));
    match cap {
        Some(cap) if cap < wanted => {
            let warning = format!(
                "src_rotate_bytes = \"auto\" is {cap}, a quarter of the free memory: {wanted} would outgrow every cache"
            );
            (cap, Some(warning))
        }
        _ => (wanted, None),
    }
}

/// What to say where sources rotate and yet fit into the largest cache on their path.
pub fn too_small(src: &Layout, sources: usize, cache: Bytes) -> Option<String> {
    let footprint = Bytes(src.footprint().0.saturating_mul(sources as u64));
    let enough = AUTO_MIN.max(Bytes(cache.0.saturating_mul(AUTO_CACHES)));
    (footprint <= cache).then(|| {
        format!(
            "sources rotate over {footprint}, which the largest cache on the path ({cache}) holds: \
             src_rotate_bytes = \"auto\" takes {enough}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::DeviceInfo;
    use crate::place::MemKind;
    use crate::plan::caches::on_path;
    use crate::report::fixtures::{device, world};
    use crate::units::Rank;
    use crate::world::Caches;

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
    fn auto_takes_four_times_the_largest_cache_up_to_a_quarter_of_the_memory() {
        let mut world = world(&[0, 0]);
        world.ranks[0].memory_free = Bytes::gib(64);
        world.ranks[1].memory_free = Bytes::gib(3);
        let (srcs, ..) = ends("R0C0R1C0 -> R0C0 -> R0C0");
        let of = |cache: u64, srcs: &[Place]| rotate_bytes(RotateBytes::Auto, Bytes::mib(cache), srcs, &world);
        assert_eq!(of(0, &srcs[..1]), (Bytes::mib(256), None));
        assert_eq!(of(64, &srcs[..1]), (Bytes::mib(256), None));
        assert_eq!(of(65, &srcs[..1]), (Bytes::mib(260), None));
        assert_eq!(of(256, &srcs[..1]), (Bytes::gib(1), None));
        // The owner with less memory decides, and a cap is told.
        let (capped, warning) = of(256, &srcs);
        assert_eq!(capped, Bytes::mib(768));
        assert!(warning.unwrap().contains("1 GiB"));
        // Without a source there is nobody to ask.
        assert_eq!(of(256, &[]), (Bytes::gib(1), None));
        let given = RotateBytes::Size(Bytes(7));
        assert_eq!(rotate_bytes(given, Bytes::gib(1), &srcs, &world), (Bytes(7), None));
    }

    #[test]
    fn a_quarter_of_a_devices_free_memory_counts() {
        let mut world = world(&[0]);
        let inventory = &mut world.ranks[0];
        inventory.devices = vec![device(), device()];
        inventory.devices_free = vec![Bytes::mib(803), Bytes::gib(80)];
        let of = |text: &str| rotate_bytes(RotateBytes::Auto, Bytes::ZERO, &ends(text).0, &world).0;
        assert_eq!(of("R0G0 -> R0G0 -> R0G0"), Bytes::mib(200));
        assert_eq!(of("R0G1 -> R0G0 -> R0G0"), Bytes::mib(256));
    }

    #[test]
    fn the_largest_cache_of_reader_and_owners_counts() {
        let mut world = world(&[0, 0]);
        let real = |architecture: &str, cache| DeviceInfo {
            architecture: architecture.to_owned(),
            cache: Bytes::mib(cache),
            ..device()
        };
        world.ranks[0].devices = vec![real("sm_90", 60), real("gfx942:sramecc+:xnack-", 4)];
        world.ranks[1].devices = vec![real("sm_100", 126), device()];
        world.ranks[1].caches = Caches { l3: Bytes::mib(32), l3_total: Bytes::mib(384), ..Caches::default() };
        for (text, cache) in [
            ("R0G0 -> R0G0 -> R0G0", 60),
            ("R1G0 -> R0G0 -> R0G0", 126),
            ("R0G0 -> R1G0 -> R0G0", 126),
            // A destination is not read.
            ("R0G0 -> R0G0 -> R1G0", 60),
            ("R0G1 -> R0G0 -> R0G0", 256),
            ("R0C0 -> R0G0 -> R0G0", 60),
            ("R1C0 -> R0G0 -> R0G0", 384),
            ("R0G0 -> R1C0 -> R1C0", 384),
            // An emulated device is its host.
            ("R1G1 -> R1G1 -> R1G1", 384),
            ("N -> R0G0 -> R0G0", 60),
        ] {
            let (srcs, exe, _) = ends(text);
            assert_eq!(on_path(&srcs, exe, &world), Bytes::mib(cache), "{text}");
        }
    }

    #[test]
    fn a_rotation_that_fits_into_a_cache_is_told() {
        let layout = |rotate| Layout::new(Bytes::mib(4), Bytes::mib(rotate), Bytes::ZERO, Bytes::ZERO).unwrap();
        assert_eq!(too_small(&layout(260), 1, Bytes::mib(256)), None);
        let warning = too_small(&layout(256), 1, Bytes::mib(256)).unwrap();
        assert!(warning.contains("256 MiB") && warning.contains("takes 1 GiB"), "{warning}");
        assert_eq!(too_small(&layout(256), 2, Bytes::mib(256)), None);
        assert_eq!(too_small(&layout(4), 1, Bytes::ZERO), None);
    }

    #[test]
    fn sizes_beyond_64_bits_are_refused() {
        assert!(Layout::new(Bytes(u64::MAX - 3), Bytes::mib(256), Bytes::ZERO, Bytes::ZERO).is_err());
        assert!(Layout::new(Bytes(4), Bytes::mib(256), Bytes(u64::MAX), Bytes::ZERO).is_err());
        assert!(Layout::new(Bytes(1 << 20), Bytes(u64::MAX), Bytes::ZERO, GUARD).is_err());
    }
}

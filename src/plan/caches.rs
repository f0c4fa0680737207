//! The caches that reads of a transfer pass: what its rotation has to outgrow.

use crate::gpu::DeviceInfo;
use crate::place::{ExeKind, Executor, Place};
use crate::units::{Bytes, Rank};
use crate::world::{Inventory, World};

/// Caches between a device's L2 and its memory, by architecture: no runtime reports them. Where an
/// architecture has several sizes, the largest.
///
/// Sizes as in AMD's "GPU specifications", column "L3" or "Infinity Cache"
/// (<https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html>). That of gfx1250 is not
/// published: reads between two partitions of one device were inflated at 64 MiB and no longer at
/// 128 MiB.
const MEMORY_SIDE: &[(&str, Bytes)] = &[
    ("gfx942", Bytes::mib(256)),
    ("gfx950", Bytes::mib(256)),
    ("gfx1250", Bytes::mib(128)),
    ("gfx1030", Bytes::mib(128)),
    ("gfx1100", Bytes::mib(96)),
    ("gfx1101", Bytes::mib(64)),
    ("gfx1200", Bytes::mib(32)),
    ("gfx1201", Bytes::mib(64)),
];

/// The largest cache that reads of a device's memory pass there; 0 = unknown. An emulated device
/// has its host's.
pub fn of_device(info: &DeviceInfo, inventory: &Inventory) -> Bytes {
    if info.architecture == "emulated" {
        return of_host(inventory);
    }
    // `gfx942:sramecc+:xnack-`
    let name = info.architecture.split(':').next().unwrap_or_default();
    let memory_side = MEMORY_SIDE.iter().find(|(architecture, _)| *architecture == name);
    info.cache.max(memory_side.map_or(Bytes::ZERO, |(_, bytes)| *bytes))
}

/// The caches of a rank's CPUs together; 0 = unknown.
pub fn of_host(inventory: &Inventory) -> Bytes {
    let caches = &inventory.caches;
    caches.l3_total.max(caches.l3).max(caches.l2)
}

/// The largest cache on the way from the sources to the executor: the reader's or an owner's;
/// 0 = unknown.
pub fn on_path(srcs: &[Place], exe: Executor, world: &World) -> Bytes {
    let reader = match exe.kind {
        ExeKind::Cpu | ExeKind::Mpi | ExeKind::Nic | ExeKind::NicNear => host(exe.rank, world),
        ExeKind::Kernel | ExeKind::CopyEngine | ExeKind::Batch | ExeKind::Bulk => device(exe.rank, exe.index, world),
    };
    let owner = |place: &Place| match place.kind.is_host() {
        true => host(place.rank, world),
        false => device(place.rank, place.index, world),
    };
    srcs.iter().map(owner).fold(reader, Bytes::max)
}

fn host(rank: Rank, world: &World) -> Bytes {
    world.inventory(rank).map_or(Bytes::ZERO, of_host)
}

fn device(rank: Rank, index: u32, world: &World) -> Bytes {
    let Some(inventory) = world.inventory(rank) else { return Bytes::ZERO };
    inventory.devices.get(index as usize).map_or(Bytes::ZERO, |info| of_device(info, inventory))
}

//! The caches that a transfer passes: what its rotation has to outgrow, and a flush to overwrite.

use std::collections::BTreeSet;
use std::fmt;

use super::Transfer;
use crate::gpu::DeviceInfo;
use crate::place::{ExeKind, Executor, MemKind, Place};
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

/// Where a rank has caches that a flush overwrites.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Site {
    /// A device of the rank.
    Device(u32),
    /// CPUs of a NUMA node.
    Node(u32),
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Site::Device(index) => write!(f, "device {index}"),
            Site::Node(index) => write!(f, "NUMA node {index}"),
        }
    }
}

/// A scratch memory is so many times the largest cache at its site: one pass over it leaves little
/// of what was there, also where any line may make room.
const SCRATCH_CACHES: u64 = 2;

/// The largest cache where nobody tells: no device and few hosts have more.
const CACHE_ASSUMED: Bytes = Bytes::mib(256);

/// The sites of a rank that executors of `transfers`, or owners of their memory, are at.
pub fn sites(transfers: &[Transfer], rank: Rank, inventory: &Inventory) -> BTreeSet<Site> {
    let node_near = |device: u32| {
        let near = inventory.devices.get(device as usize)?.numa;
        let position = inventory.numa.iter().position(|node| Some(node.os_index) == near)?;
        Some(Site::Node(position as u32))
    };
    let of_place = |place: &Place| match place.kind {
        MemKind::PinnedNear => node_near(place.index),
        kind if kind.is_host() => Some(Site::Node(place.index)),
        _ => Some(Site::Device(place.index)),
    };
    let mut sites = BTreeSet::new();
    for transfer in transfers {
        let exe = transfer.exe;
        if exe.rank == rank {
            sites.extend(match exe.kind {
                ExeKind::Cpu => Some(Site::Node(exe.index)),
                ExeKind::Kernel | ExeKind::CopyEngine | ExeKind::Batch | ExeKind::Bulk => Some(Site::Device(exe.index)),
                ExeKind::Mpi | ExeKind::Nic | ExeKind::NicNear => None,
            });
        }
        let own = transfer.srcs.iter().chain(&transfer.dsts).filter(|place| place.rank == rank);
        sites.extend(own.filter_map(of_place));
    }
    // Memory may lie on a node without CPUs of ours: nothing of it is cached here.
    let has_cpus = |index: u32| inventory.numa.get(index as usize).is_some_and(|node| !node.cpus_allowed.is_empty());
    sites.retain(|site| !matches!(site, Site::Node(index) if !has_cpus(*index)));
    sites
}

/// What a flush reads at a site: twice its largest cache, and at a node twice what each of its CPUs
/// has for itself.
pub fn scratch(site: Site, inventory: &Inventory) -> Bytes {
    let known = |cache: Bytes| if cache == Bytes::ZERO { CACHE_ASSUMED } else { cache };
    let cache = match site {
        Site::Device(index) => {
            let info = inventory.devices.get(index as usize);
            known(info.map_or(Bytes::ZERO, |info| of_device(info, inventory))).0
        }
        Site::Node(index) => {
            let cpus = inventory.numa.get(index as usize).map_or(0, |node| node.cpus_allowed.len() as u64);
            known(of_host(inventory)).0 + inventory.caches.l2.0.saturating_mul(cpus)
        }
    };
    Bytes(cache.saturating_mul(SCRATCH_CACHES).next_multiple_of(1 << 20))
}

//! Checks transfers against the world: what exists, who can reach it, whether it fits.

use std::collections::BTreeMap;

use super::caches::{self, Site};
use super::expand::Expanded;
use super::{PlannedTest, Transfer};
use crate::config::options::{Gfx, SubExecutorType};
use crate::gpu::{DeviceInfo, MAX_SIDES};
use crate::place::{ExeKind, Executor, MemKind, Place};
use crate::units::{Bytes, Rank};
use crate::world::{Inventory, World};

/// Everything that keeps a transfer from running. Ranks and indices exist: expansion has checked.
pub fn transfer(parts: &Expanded, world: &World) -> Vec<String> {
    let Expanded { srcs, exe, dsts } = parts;
    if srcs.is_empty() && dsts.is_empty() {
        return vec![format!("{exe} has neither source nor destination: it would do nothing")];
    }
    let mut problems: Vec<String> = executor(*exe, srcs.len(), dsts.len(), world).into_iter().collect();
    let mut places: Vec<Place> = srcs.iter().chain(dsts).copied().collect();
    places.sort();
    places.dedup();
    for place in places {
        let problem = allocation(place, world).or_else(|| reach(*exe, place, world));
        problems.extend(problem);
    }
    problems
}

fn device(rank: Rank, index: u32, world: &World) -> Option<&DeviceInfo> {
    world.inventory(rank)?.devices.get(index as usize)
}

fn executor(exe: Executor, srcs: usize, dsts: usize, world: &World) -> Option<String> {
    let rank = exe.rank;
    match exe.kind {
        ExeKind::Cpu => {
            if exe.sub_index.is_some() {
                return Some(format!("{exe}: a CPU executor has no sub-index"));
            }
            let node = &world.inventory(rank)?.numa[exe.index as usize];
            node.cpus_allowed.is_empty().then(|| {
                format!(
                    "{exe}: NUMA node {} (system node {}) has no CPU that rank {rank} may run on",
                    exe.index, node.os_index
                )
            })
        }
        ExeKind::Kernel | ExeKind::CopyEngine | ExeKind::Batch | ExeKind::Bulk => {
            if exe.sub_index.is_some() && matches!(exe.kind, ExeKind::Batch | ExeKind::Bulk) {
                return Some(format!("{exe}: executor {} has no sub-index", exe.kind.letter()));
            }
            let info = device(rank, exe.index, world)?;
            match exe.kind {
                ExeKind::Kernel if srcs.max(dsts) > MAX_SIDES => {
                    Some(format!("{exe}: {} on one side, a kernel takes at most {MAX_SIDES}", srcs.max(dsts)))
                }
                ExeKind::Kernel => {
                    info.kernels_absent.as_ref().map(|why| format!("{exe}: kernels cannot run on {}: {why}", info.name))
                }
                ExeKind::Bulk if (srcs, dsts) != (1, 1) => Some(format!(
                    "{exe}: the tensor data mover takes 1 source and 1 destination, not {srcs} and {dsts}"
                )),
                ExeKind::Bulk => info.bulk_absent.as_ref().map(|why| unavailable(exe, why)),
                _ if srcs != 1 || dsts == 0 => Some(format!(
                    "{exe}: a copy engine takes 1 source and at least 1 destination, not {srcs} and {dsts}"
                )),
                ExeKind::Batch => info.batch_absent.as_ref().map(|why| unavailable(exe, why)),
                _ => None,
            }
        }
        ExeKind::Mpi => Some(unavailable(exe, "this version has no MPI executor")),
        ExeKind::Nic | ExeKind::NicNear => Some(unavailable(exe, "this version has no NIC executor")),
    }
}

fn unavailable(exe: Executor, why: &str) -> String {
    format!("{exe}: executor {} is not available here: {why}", exe.kind.letter())
}

/// Why memory of that kind cannot be had there.
fn allocation(place: Place, world: &World) -> Option<String> {
    let inventory = world.inventory(place.rank)?;
    let on_node = |index: usize| {
        let node = &inventory.numa[index];
        (!node.memory_allowed).then(|| {
            format!(
                "{place}: rank {} may not allocate on NUMA node {index} (system node {})",
                place.rank, node.os_index
            )
        })
    };
    match place.kind {
        MemKind::Pinned | MemKind::Host => on_node(place.index as usize),
        MemKind::PinnedNear => match inventory.nearest_node(place.index) {
            Some(index) => on_node(index),
            None => Some(format!(
                "{place}: the NUMA node nearest to device {} is not known: name a node of the {}, such as R{}C0",
                place.index,
                inventory.numa.len(),
                place.rank
            )),
        },
        MemKind::Coherent | MemKind::NonCoherent | MemKind::Uncached => {
            on_node(place.index as usize).or_else(|| runtime_host(place, inventory))
        }
        MemKind::Device | MemKind::DeviceFine | MemKind::DeviceUncached | MemKind::Managed => {
            let info = device(place.rank, place.index, world)?;
            (!info.memory_kinds.contains(&place.kind)).then(|| {
                let kinds: String = info.memory_kinds.iter().map(|kind| kind.letter()).collect();
                let (name, letter) = (&info.name, place.kind.letter());
                match lacks(&info.runtime, place.kind) {
                    Some(why) => format!("{place}: {name} has no memory of kind {letter} (it has: {kinds}): {why}"),
                    None => format!("{place}: {name} has no memory of kind {letter} (it has: {kinds})"),
                }
            })
        }
    }
}

/// Why no device runtime of the rank allocates host memory of that kind.
fn runtime_host(place: Place, inventory: &Inventory) -> Option<String> {
    let letter = place.kind.letter();
    let Some(first) = inventory.devices.first() else {
        let why = inventory.devices_absent.as_deref().unwrap_or("no device was found");
        return Some(format!(
            "{place}: memory of kind {letter} is allocated by a device runtime, and rank {} has no device: {why}",
            place.rank
        ));
    };
    if inventory.devices.iter().any(|info| info.host_kinds.contains(&place.kind)) {
        return None;
    }
    let why = lacks(&first.runtime, place.kind).unwrap_or("its runtime allocates none");
    Some(format!("{place}: {} offers no host memory of kind {letter}: {why}", first.name))
}

/// What the vendor's runtime does not have.
fn lacks(runtime: &str, kind: MemKind) -> Option<&'static str> {
    Some(match (runtime, kind) {
        ("cuda", MemKind::Coherent) => "page-locked memory is always coherent under CUDA: use C",
        ("cuda", MemKind::NonCoherent) => "CUDA has no non-coherent host memory",
        ("cuda", MemKind::Uncached) => "CUDA has no uncached host memory",
        ("cuda", MemKind::DeviceFine) => "CUDA has no fine-grained device memory",
        ("cuda", MemKind::DeviceUncached) => "CUDA has no uncached device memory",
        ("hip", MemKind::Uncached) => "that needs HIP 7",
        _ => return None,
    })
}

/// Why the executor cannot load and store there.
fn reach(exe: Executor, place: Place, world: &World) -> Option<String> {
    let is_cpu = exe.kind == ExeKind::Cpu;
    if exe.rank == place.rank {
        let info = device(place.rank, place.index, world).filter(|_| !place.kind.is_host());
        return info.filter(|info| is_cpu && !info.cpu_access).map(|info| {
            format!("{exe} cannot reach {place}: the CPU cannot load and store the memory of {}", info.name)
        });
    }
    if !world.same_host(exe.rank, place.rank) {
        return Some(format!(
            "{exe} cannot reach {place}: rank {} is on {}, rank {} on {}, and they share no memory; only the executors M, I and N cross hosts",
            exe.rank,
            world.host(exe.rank).label,
            place.rank,
            world.host(place.rank).label
        ));
    }
    if place.kind.is_runtime_host() {
        return Some(format!(
            "{exe} cannot reach {place}: a device runtime allocates it, and none can share host memory with another process; use C"
        ));
    }
    if place.kind.is_host() {
        return None;
    }
    let info = device(place.rank, place.index, world)?;
    if is_cpu {
        return Some(format!("{exe} cannot reach {place}: a CPU executor reaches device memory of its own rank only"));
    }
    if place.kind == MemKind::Managed {
        return Some(format!("{exe} cannot reach {place}: managed memory cannot be shared between processes"));
    }
    (!info.exportable)
        .then(|| format!("{exe} cannot reach {place}: memory of {} cannot be shared between processes", info.name))
}

/// Sub-executors that an executor offers: CPUs of the node, or one block a compute unit, which as
/// warps are as many as the block has.
pub fn width(exe: Executor, gfx: &Gfx, world: &World) -> u32 {
    let inventory = world.inventory(exe.rank);
    match exe.kind {
        ExeKind::Cpu => inventory.map_or(1, |i| i.numa[exe.index as usize].cpus_allowed.len() as u32),
        ExeKind::Kernel | ExeKind::Bulk => device(exe.rank, exe.index, world).map_or(1, |info| match gfx.se_type {
            SubExecutorType::Warp if exe.kind == ExeKind::Kernel => {
                info.compute_units * (gfx.block_size / info.warp_size.max(1)).max(1)
            }
            _ => info.compute_units,
        }),
        _ => 1,
    }
    .max(1)
}

/// Executors that are asked for more than they have.
pub fn crowding(transfers: &[Transfer], gfx: &Gfx, world: &World) -> Vec<String> {
    let mut asked: BTreeMap<Executor, u64> = BTreeMap::new();
    for transfer in transfers {
        *asked.entry(transfer.exe).or_default() += u64::from(transfer.sub_executors);
    }
    asked
        .into_iter()
        .filter(|(exe, asked)| exe.kind == ExeKind::Cpu && *asked > u64::from(width(*exe, gfx, world)))
        .map(|(exe, asked)| {
            let cpus = width(exe, gfx, world);
            format!("{exe}: {asked} threads share the {cpus} CPUs that the rank may use on that node")
        })
        .collect()
}

/// Places where a test needs more memory than is free.
pub fn memory(test: &PlannedTest, world: &World) -> Vec<String> {
    let mut host_need: BTreeMap<u32, u128> = BTreeMap::new();
    let mut device_need: BTreeMap<(Rank, u32), u128> = BTreeMap::new();
    for (_, place, layout) in test.transfers.iter().flat_map(Transfer::buffers) {
        let bytes = u128::from(layout.total().0);
        if place.kind.is_host() {
            *host_need.entry(world.host_of[place.rank.0 as usize]).or_default() += bytes;
        } else {
            *device_need.entry((place.rank, place.index)).or_default() += bytes;
            // The memory of an emulated device is its host's.
            if device(place.rank, place.index, world).is_some_and(|info| info.architecture == "emulated") {
                *host_need.entry(world.host_of[place.rank.0 as usize]).or_default() += bytes;
            }
        }
    }
    // What cold samples flush with.
    for (rank, inventory) in (0..).map(Rank).zip(&world.ranks).filter(|_| test.options.cold_iterations > 0) {
        for site in caches::sites(&test.transfers, rank, inventory) {
            let bytes = u128::from(caches::scratch(site, inventory).0);
            match site {
                Site::Node(_) => *host_need.entry(world.host_of[rank.0 as usize]).or_default() += bytes,
                Site::Device(index) => *device_need.entry((rank, index)).or_default() += bytes,
            }
        }
    }
    let too_much = |what: String, need: u128, free: Bytes| {
        (need > u128::from(free.0)).then(|| {
            format!(
                "test \"{}\" at {} needs {} on {what}, {} are free: lower bytes, src_rotate_bytes or dst_rotate_bytes",
                test.name,
                test.bytes,
                gibibytes(need),
                gibibytes(u128::from(free.0))
            )
        })
    };
    let hosts = host_need.into_iter().filter_map(|(host, need)| {
        let group = &world.hosts[host as usize];
        let free = group.ranks.iter().filter_map(|rank| world.inventory(*rank)).map(|i| i.memory_free).min()?;
        too_much(format!("host {}", group.label), need, free)
    });
    let devices = device_need.into_iter().filter_map(|((rank, index), need)| {
        let inventory = world.inventory(rank)?;
        let info = inventory.devices.get(index as usize)?;
        too_much(format!("device {index} of rank {rank} ({})", info.name), need, inventory.device_free(index)?)
    });
    hosts.chain(devices).collect()
}

fn gibibytes(bytes: u128) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

//! Allocates what a rank owns, shares it with the ranks that need it, releases it in the safe order.

pub mod map;
pub mod rotating;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::comm::{Communicator, wire};
use crate::error::Error;
use crate::gpu::ExportHandle;
use crate::gpu::owner::{Buffer, ImportedBuffer};
use crate::place::{MemKind, Place};
use crate::plan::local::{BufferId, LocalPlan, OwnBuffer};
use crate::region::Region;
use crate::units::{Bytes, Rank};
use crate::world::NumaNode;
use crate::world::machine::Machine;
use map::{HostMap, SharedHandle};

/// How another rank opens a buffer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Handle {
    Host(SharedHandle),
    Device(ExportHandle),
}

enum Owned {
    Host(Arc<HostMap>),
    /// Of a driver: device memory, or host memory that its runtime allocated.
    Device(Buffer),
}

enum Imported {
    Host(Arc<HostMap>),
    Device(ImportedBuffer),
}

/// All memory of a rank for one test. Ended by `release`, on the failure path too: freeing memory
/// that another rank still has open is undefined behaviour in HIP.
#[derive(Default)]
pub struct Memory {
    owned: BTreeMap<BufferId, Owned>,
    imports: BTreeMap<BufferId, Imported>,
    /// What placing the buffers found: pages by node, locks refused.
    notes: BTreeMap<BufferId, String>,
}

/// Own buffers, with handles for those that others use.
pub struct Allocated {
    plan: LocalPlan,
    memory: Memory,
    handles: Vec<(Rank, BufferId, Handle)>,
}

/// Every buffer that this rank's executors touch is mapped here.
pub struct Linked {
    pub plan: LocalPlan,
    pub memory: Memory,
}

impl From<Linked> for Memory {
    fn from(linked: Linked) -> Memory {
        linked.memory
    }
}

/// Allocates and exports this rank's buffers. Local; nothing is open elsewhere yet, so a failure
/// frees what it had.
///
/// # Errors
/// Names the buffer, the bytes asked and the bytes free.
pub fn allocate(plan: LocalPlan, machine: &Machine) -> Result<Allocated, Error> {
    let mut memory = Memory::default();
    let mut handles = Vec::new();
    for buffer in &plan.own {
        let (owned, note) = allocate_one(buffer, machine)
            .map_err(|err| err.context(format!("{} ({}, {})", buffer.id, buffer.place, buffer.layout.total())))?;
        if let Some(user) = buffer.used_by {
            let handle = match &owned {
                Owned::Host(map) => Handle::Host(map.export_handle(&machine.faults)?),
                Owned::Device(device) => Handle::Device(device.export()?),
            };
            handles.push((user, buffer.id, handle));
        }
        memory.owned.insert(buffer.id, owned);
        memory.notes.extend(note.map(|note| (buffer.id, note)));
    }
    Ok(Allocated { plan, memory, handles })
}

fn allocate_one(buffer: &OwnBuffer, machine: &Machine) -> Result<(Owned, Option<String>), Error> {
    let Place { kind, index, .. } = buffer.place;
    let bytes = buffer.layout.total();
    let shared = buffer.used_by.is_some();
    if !kind.is_host() {
        return Ok((Owned::Device(machine.device(index).allocate(kind, bytes, shared)?), None));
    }
    let (faults, node) = (&machine.faults, host_node(buffer.place, machine));
    if kind.is_runtime_host() {
        let device = machine.devices.iter().find(|device| device.info().host_kinds.contains(&kind));
        let device = device.expect("planning has found a device whose runtime allocates it");
        let (owner, placed) = map::allocate_on(node, bytes, faults, || {
            let buffer = device.allocate(kind, bytes, shared)?;
            let region = buffer.region();
            Ok((buffer, region))
        })?;
        return Ok((Owned::Device(owner), Some(placed)));
    }
    let mut map = if shared {
        HostMap::shared(bytes, machine.via(), Some(node), faults)?
    } else {
        HostMap::private(bytes, Some(node), faults)?
    };
    let pinned = kind != MemKind::Host;
    if pinned {
        map.lock(faults)?;
    }
    map.check_placement(node, pinned)?;
    let notes = [vec![map.placement().to_string()], map.notes().to_vec()].concat();
    Ok((Owned::Host(Arc::new(map)), Some(notes.join("; "))))
}

/// The NUMA node behind a place.
fn host_node(place: Place, machine: &Machine) -> &NumaNode {
    let nodes = &machine.inventory.numa;
    match place.kind {
        MemKind::PinnedNear => {
            let near = machine.inventory.nearest_node(place.index);
            near.map(|near| &nodes[near]).expect("planning has found the node")
        }
        _ => &nodes[place.index as usize],
    }
}

/// Collective: sends every handle to the rank that uses the buffer, and to no other.
pub fn exchange_handles(comm: &dyn Communicator, allocated: &mut Allocated) -> BTreeMap<BufferId, Handle> {
    let mut outgoing: BTreeMap<Rank, Vec<(BufferId, Handle)>> = BTreeMap::new();
    for (user, id, handle) in allocated.handles.drain(..) {
        outgoing.entry(user).or_default().push((id, handle));
    }
    let outgoing: Vec<_> = outgoing.into_iter().collect();
    let mut from: Vec<Rank> = allocated.plan.imports.iter().map(|import| import.place.rank).collect();
    from.sort();
    from.dedup();
    wire::exchange(comm, &outgoing, &from).into_iter().flatten().collect()
}

/// Opens the buffers of other ranks that this rank's executors use. Local.
///
/// # Errors
/// Names the buffer and its owner, and returns the memory for its collective release.
pub fn link(
    allocated: Allocated,
    mut handles: BTreeMap<BufferId, Handle>,
    machine: &Machine,
) -> Result<Linked, (Error, Memory)> {
    let Allocated { plan, mut memory, .. } = allocated;
    for import in &plan.imports {
        let bytes = import.layout.total();
        let handle = handles.remove(&import.id).expect("the owner sends what the plan says");
        let opened = match handle {
            Handle::Host(handle) => {
                HostMap::import(&handle, bytes, &machine.faults).map(|map| Imported::Host(Arc::new(map)))
            }
            Handle::Device(handle) => machine.device(import.exe.index).import(&handle, bytes).map(Imported::Device),
        };
        match opened {
            Ok(imported) => {
                memory.imports.insert(import.id, imported);
            }
            Err(err) => {
                let what = format!("open {} of rank {} ({})", import.id, import.place.rank, import.place);
                return Err((err.context(what), memory));
            }
        }
    }
    Ok(Linked { plan, memory })
}

impl Memory {
    /// Where a buffer of the plan is mapped in this process.
    pub fn region(&self, id: BufferId) -> Region {
        match (self.owned.get(&id), self.imports.get(&id)) {
            (Some(Owned::Host(map)), _) | (_, Some(Imported::Host(map))) => map.region(),
            (Some(Owned::Device(buffer)), _) => buffer.region(),
            (_, Some(Imported::Device(buffer))) => buffer.region(),
            (None, None) => unreachable!("{id} is owned or imported by the rank that asks"),
        }
    }

    /// Where the pages of an own buffer lie.
    pub fn note(&self, id: BufferId) -> Option<&str> {
        self.notes.get(&id).map(String::as_str)
    }

    /// Everyone has opened what it uses: names and descriptors that only served that are closed.
    pub fn close_exports(&self) {
        for owned in self.owned.values() {
            if let Owned::Host(map) = owned {
                map.close_export();
            }
        }
    }

    /// Bytes mapped by this rank, its own and others'.
    pub fn mapped(&self) -> Bytes {
        let ids = self.owned.keys().chain(self.imports.keys());
        Bytes(ids.map(|id| self.region(*id).bytes().0).sum())
    }
}

/// Collective: imports are closed everywhere before any owner frees.
pub fn release(comm: &dyn Communicator, memory: Memory) {
    let Memory { owned, imports, .. } = memory;
    drop(imports);
    comm.barrier();
    drop(owned);
}

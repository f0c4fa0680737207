//! Pushes data out of caches: what a cold sample does first.

use std::sync::Arc;

use crate::error::Error;
use crate::exec::{BoundTransfer, Executions, Work, cpu};
use crate::gpu::owner::{Buffer, Device, Stream};
use crate::memory::map::HostMap;
use crate::memory::rotating::Rotating;
use crate::place::{ExeKind, Executor, MemKind};
use crate::plan::PlannedTest;
use crate::plan::caches::{self, Site};
use crate::plan::rotation::Layout;
use crate::plan::split::shares;
use crate::region::Address;
use crate::units::{Bytes, Rank};
use crate::world::machine::Machine;

/// Parts that a device's scratch memory is read in: each overwrites the one before it, so that what
/// the flush leaves behind is nearly all clean, and no sample has to write it back.
const PARTS: u64 = 16;

/// What the scratch memory is filled with: a device may serve memory that was never written from
/// nowhere.
const FILL: u8 = 0x5a;

/// Scratch memory next to every cache that this rank's part of a test goes through.
pub struct Flush {
    devices: Vec<DeviceFlush>,
    hosts: Vec<cpu::Ready>,
}

impl Flush {
    /// # Errors
    /// Names where the scratch memory could not be had.
    pub fn new(test: &PlannedTest, rank: Rank, machine: &Machine) -> Result<Flush, Error> {
        let mut flush = Flush { devices: Vec::new(), hosts: Vec::new() };
        for site in caches::sites(&test.transfers, rank, &machine.inventory) {
            let bytes = caches::scratch(site, &machine.inventory);
            let context = |err: Error| err.context(format!("scratch memory for cold_iterations ({bytes} at {site})"));
            match site {
                Site::Device(index) => {
                    flush.devices.push(DeviceFlush::new(machine.device(index), bytes).map_err(context)?);
                }
                Site::Node(index) => flush.hosts.push(readers(rank, index, bytes, machine).map_err(context)?),
            }
        }
        Ok(flush)
    }

    /// Reads all scratch memory; returns when that is done.
    ///
    /// # Errors
    /// What a driver says.
    pub fn run(&mut self) -> Result<(), Error> {
        let queued = self.devices.iter().try_for_each(DeviceFlush::start);
        let read = self.hosts.iter_mut().try_for_each(|readers| {
            readers.arm(Executions { first: 0, count: 1 })?;
            readers.go()?;
            readers.wait()
        });
        // Also after a failure: what is queued uses memory that is about to be freed.
        let waited = self.devices.iter().map(DeviceFlush::wait).fold(Ok(()), Result::and);
        queued.and(read).and(waited).map_err(|err| err.context("flush the caches"))
    }
}

/// Scratch memory of one device, copied part by part onto its last part.
pub struct DeviceFlush {
    /// First, so that it is waited for before its memory is freed.
    stream: Stream,
    scratch: Buffer,
    part: Bytes,
}

impl DeviceFlush {
    /// # Errors
    /// What the driver says.
    pub fn new(device: &Arc<Device>, bytes: Bytes) -> Result<DeviceFlush, Error> {
        let part = Bytes((bytes.0 / PARTS).next_multiple_of(256));
        let scratch = device.allocate(MemKind::Device, Bytes(part.0 * PARTS), false)?;
        let stream = device.stream()?;
        stream.fill(scratch.address(), FILL, scratch.bytes())?;
        stream.wait()?;
        Ok(DeviceFlush { stream, scratch, part })
    }

    /// Queues the copies.
    ///
    /// # Errors
    /// What the driver says.
    pub fn start(&self) -> Result<(), Error> {
        let part = |number: u64| Address(self.scratch.address().0 + number * self.part.0);
        (0..PARTS - 1).try_for_each(|number| self.stream.copy(part(PARTS - 1), part(number), self.part))
    }

    /// # Errors
    /// What the driver says.
    pub fn wait(&self) -> Result<(), Error> {
        self.stream.wait()
    }
}

/// A thread on every CPU of the node that the rank may use, each reading its share of the scratch
/// memory: also the caches that are a CPU's own are overwritten.
fn readers(rank: Rank, node: u32, bytes: Bytes, machine: &Machine) -> Result<cpu::Ready, Error> {
    let cpus = machine.cpus_for_threads(node);
    let map = HostMap::private(bytes, machine.inventory.numa.get(node as usize), &machine.faults)?;
    let layout = Layout::new(bytes, Bytes::ZERO, Bytes::ZERO, Bytes::ZERO).map_err(Error::new)?;
    let transfer = BoundTransfer {
        index: 0,
        bytes,
        srcs: vec![Rotating::new(Arc::new(map).region(), layout)],
        dsts: Vec::new(),
        shares: shares(bytes, cpus.len() as u32, Bytes::kib(4)),
    };
    let exe = Executor { rank, kind: ExeKind::Cpu, index: node, sub_index: None };
    cpu::Ready::new(Work { exe, transfers: vec![transfer] }, &cpus, false, &machine.faults)
}

//! Devices emulated on the CPU, for trying, teaching and testing: every output says EMULATED.
//!
//! Memory is shared memory, so that another rank of the host really imports it; each stream is a
//! thread. What real runtimes leave undefined (freed twice, out of bounds, not registered, freed
//! while imported) is an error here.

mod kernels;
mod ledger;
mod queue;
mod segment;

use std::collections::HashMap;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::peaks::Peaks;
use super::{
    BulkVariant, CheckArgs, CopyBatch, DeviceId, DeviceInfo, Driver, EventId, ExportHandle, KernelId, KernelSpec,
    LatchArgs, StreamId, TransferArgs, TransferVariant, checks,
};
use crate::error::Error;
use crate::place::MemKind;
use crate::region::Address;
use crate::units::Bytes;
use ledger::{Ledger, Owner, Via};
use queue::{Mark, Operation, Queue};
use segment::Locator;

/// Sub-executors that an emulated device claims. Blocks run one after the other, so the number
/// only has to be big enough to split a transfer.
const COMPUTE_UNITS: u32 = 8;
const WARP_SIZE: u32 = 32;
/// Dies that it claims: blocks go to them in turn, as on real devices.
const XCCS: u32 = 2;

/// A driver of `devices` emulated devices.
pub struct HostDriver {
    devices: u32,
    memory: Bytes,
    /// Tells the drivers of one process apart.
    instance: u64,
    serial: AtomicU64,
    ledger: Arc<RwLock<Ledger>>,
    streams: RwLock<HashMap<u64, Arc<Queue>>>,
    events: RwLock<HashMap<u64, Arc<Mark>>>,
    /// By `KernelId`.
    kernels: RwLock<Vec<(DeviceId, KernelSpec)>>,
}

impl HostDriver {
    /// `memory` is what each device has.
    pub fn new(devices: u32, memory: Bytes) -> HostDriver {
        static INSTANCES: AtomicU64 = AtomicU64::new(0);
        HostDriver {
            devices,
            memory,
            instance: INSTANCES.fetch_add(1, Ordering::Relaxed),
            serial: AtomicU64::new(1),
            ledger: Arc::new(RwLock::new(Ledger::new(devices, memory))),
            streams: RwLock::default(),
            events: RwLock::default(),
            kernels: RwLock::default(),
        }
    }

    fn info(&self, device: u32) -> DeviceInfo {
        // Every driver has devices of its own: ranks must not take them for shared ones.
        let identity = format!("emulated-{}-{}-{device}", std::process::id(), self.instance);
        DeviceInfo {
            name: "emulated device".to_owned(),
            runtime: "host (EMULATED)".to_owned(),
            uuid: identity.clone(),
            pci: identity,
            architecture: "emulated".to_owned(),
            memory_total: self.memory,
            cache: Bytes::ZERO,
            compute_units: COMPUTE_UNITS,
            warp_size: WARP_SIZE,
            numa: first_node(),
            // All alike here: the letters are for plans and tests.
            memory_kinds: vec![MemKind::Device, MemKind::DeviceFine, MemKind::DeviceUncached, MemKind::Managed],
            host_kinds: vec![MemKind::Coherent, MemKind::NonCoherent, MemKind::Uncached],
            cpu_access: true,
            exportable: true,
            xccs: XCCS,
            cu_masks: true,
            no_cu_copies: true,
            kernels_absent: None,
            batch_absent: None,
            bulk_absent: None,
            peaks: Peaks::default(),
        }
    }

    fn ledger(&self) -> RwLockReadGuard<'_, Ledger> {
        self.ledger.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn ledger_mut(&self) -> RwLockWriteGuard<'_, Ledger> {
        self.ledger.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn stream(&self, stream: StreamId) -> Result<Arc<Queue>, Error> {
        let streams = self.streams.read().unwrap_or_else(PoisonError::into_inner);
        streams.get(&stream.0).cloned().ok_or_else(|| Error::new(format!("stream {} does not exist", stream.0)))
    }

    fn event(&self, event: EventId) -> Result<Arc<Mark>, Error> {
        let events = self.events.read().unwrap_or_else(PoisonError::into_inner);
        events.get(&event.0).cloned().ok_or_else(|| Error::new(format!("event {} does not exist", event.0)))
    }

    /// Waits until no queued operation can touch memory that has just left the ledger.
    fn drain(&self) {
        let streams = self.streams.read().unwrap_or_else(PoisonError::into_inner);
        let queues: Vec<Arc<Queue>> = streams.values().cloned().collect();
        drop(streams);
        queues.iter().for_each(|queue| queue.drain());
    }

    fn next(&self) -> u64 {
        self.serial.fetch_add(1, Ordering::Relaxed)
    }
}

/// Emulated devices sit at the system's first NUMA node, where it tells.
fn first_node() -> Option<u32> {
    let online = std::fs::read_to_string("/sys/devices/system/node/online").ok()?;
    online.trim().split(['-', ',']).next()?.parse().ok()
}

impl Driver for HostDriver {
    fn name(&self) -> &'static str {
        "host"
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, Error> {
        Ok((0..self.devices).map(|device| self.info(device)).collect())
    }

    fn memory_free(&self, device: DeviceId) -> Result<Bytes, Error> {
        self.ledger().free_bytes(device)
    }

    fn enable_peer(&self, device: DeviceId, peer: DeviceId) -> Result<(), Error> {
        self.ledger_mut().enable_peer(device, peer)
    }

    fn allocate(&self, device: DeviceId, kind: MemKind, bytes: Bytes, shareable: bool) -> Result<Address, Error> {
        self.ledger().check(device)?;
        checks::kind(device, &self.info(device.0), kind, shareable)?;
        let owner = if kind.is_host() { Owner::Host } else { Owner::Device };
        self.ledger_mut().allocate(device, owner, bytes, shareable).map(Address)
    }

    fn free(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        let segment = self.ledger_mut().take_allocation(device, address.0)?;
        self.drain();
        if segment.is_open_elsewhere() {
            return Err(Error::new(format!(
                "{:#x} of device {} was freed while another rank still has it imported",
                address.0, device.0
            )));
        }
        Ok(())
    }

    fn export(&self, device: DeviceId, address: Address) -> Result<ExportHandle, Error> {
        self.ledger().locator(device, address.0).map(Locator::encode)
    }

    fn import(&self, device: DeviceId, handle: &ExportHandle, bytes: Bytes) -> Result<Address, Error> {
        let locator = Locator::decode(handle)?;
        self.ledger_mut().import(device, &locator, bytes).map(Address)
    }

    fn close_import(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        let segment = self.ledger_mut().take_import(device, address.0)?;
        self.drain();
        drop(segment);
        Ok(())
    }

    fn register_host(&self, device: DeviceId, address: Address, bytes: Bytes) -> Result<Address, Error> {
        self.ledger_mut().register(device, address.0, bytes)?;
        Ok(address)
    }

    fn unregister_host(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.ledger_mut().unregister(device, address.0)?;
        self.drain();
        Ok(())
    }

    fn stream_create(&self, device: DeviceId) -> Result<StreamId, Error> {
        self.ledger().check(device)?;
        let serial = self.next();
        let queue = Arc::new(Queue::new(device, serial, Arc::clone(&self.ledger))?);
        self.streams.write().unwrap_or_else(PoisonError::into_inner).insert(serial, queue);
        Ok(StreamId(serial))
    }

    fn stream_create_masked(&self, device: DeviceId, mask: &[u32]) -> Result<StreamId, Error> {
        let on = |unit: u32| mask.get(unit as usize / 32).is_some_and(|word| word >> (unit % 32) & 1 == 1);
        if !(0..COMPUTE_UNITS).any(on) {
            return Err(Error::new(format!("a mask without one of the {COMPUTE_UNITS} compute units")));
        }
        self.stream_create(device)
    }

    fn stream_destroy(&self, stream: StreamId) -> Result<(), Error> {
        let queue = self.stream(stream)?;
        // Closed before it is forgotten: `drain` must not miss what it still runs.
        let result = queue.close();
        self.streams.write().unwrap_or_else(PoisonError::into_inner).remove(&stream.0);
        result
    }

    fn stream_wait(&self, stream: StreamId) -> Result<(), Error> {
        self.stream(stream)?.wait()
    }

    fn event_create(&self, device: DeviceId) -> Result<EventId, Error> {
        self.ledger().check(device)?;
        let serial = self.next();
        self.events.write().unwrap_or_else(PoisonError::into_inner).insert(serial, Arc::new(Mark::new(device)));
        Ok(EventId(serial))
    }

    fn event_destroy(&self, event: EventId) -> Result<(), Error> {
        let removed = self.events.write().unwrap_or_else(PoisonError::into_inner).remove(&event.0);
        removed.map(|_| ()).ok_or_else(|| Error::new(format!("event {} does not exist", event.0)))
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> Result<(), Error> {
        let (mark, queue) = (self.event(event)?, self.stream(stream)?);
        if mark.device != queue.device() {
            return Err(Error::new(format!(
                "an event of device {} cannot be recorded in a stream of device {}",
                mark.device.0,
                queue.device().0
            )));
        }
        queue.push(Operation::Mark(mark))
    }

    fn event_elapsed_ns(&self, start: EventId, stop: EventId) -> Result<f64, Error> {
        let passed = |event: EventId| {
            let passed = self.event(event)?.passed_ns();
            passed.ok_or_else(|| Error::new(format!("event {} has not happened: wait for its stream", event.0)))
        };
        Ok(passed(stop)? as f64 - passed(start)? as f64)
    }

    fn copy(&self, stream: StreamId, dst: Address, src: Address, bytes: Bytes) -> Result<(), Error> {
        let queue = self.stream(stream)?;
        // Held until the operation is queued, so that whoever gives the memory up drains it.
        let ledger = self.ledger();
        ledger.reach(queue.device(), src.0, bytes.0, Via::Copy).map_err(|err| err.context("copy from"))?;
        ledger.reach(queue.device(), dst.0, bytes.0, Via::Copy).map_err(|err| err.context("copy to"))?;
        queue.push(Operation::Copy { dst: dst.0, src: src.0, bytes: bytes.0 as usize })
    }

    fn copy_batch(&self, stream: StreamId, copies: &CopyBatch) -> Result<(), Error> {
        let CopyBatch { dsts, srcs, sizes } = copies;
        let parts = dsts.iter().zip(srcs).zip(sizes);
        parts
            .into_iter()
            .try_for_each(|((dst, src), size)| self.copy(stream, Address(*dst), Address(*src), Bytes(*size as u64)))
    }

    fn copy_no_cu(&self, stream: StreamId, dst: Address, src: Address, bytes: Bytes) -> Result<(), Error> {
        self.copy(stream, dst, src, bytes)
    }

    fn fill(&self, stream: StreamId, dst: Address, byte: u8, bytes: Bytes) -> Result<(), Error> {
        let queue = self.stream(stream)?;
        // Held until the operation is queued, as in `copy`.
        let ledger = self.ledger();
        ledger.reach(queue.device(), dst.0, bytes.0, Via::Copy).map_err(|err| err.context("fill"))?;
        queue.push(Operation::Fill { dst: dst.0, byte, bytes: bytes.0 as usize })
    }

    fn write(&self, device: DeviceId, dst: Address, src: &[u8]) -> Result<(), Error> {
        let ledger = self.ledger();
        let into = ledger.reach(device, dst.0, src.len() as u64, Via::Copy).map_err(|err| err.context("write"))?;
        // SAFETY: the ledger proved the range and is held, so the memory stays mapped; it may overlap `src`.
        unsafe { ptr::copy(src.as_ptr(), into, src.len()) };
        Ok(())
    }

    fn read(&self, device: DeviceId, src: Address, dst: &mut [u8]) -> Result<(), Error> {
        let ledger = self.ledger();
        let from = ledger.reach(device, src.0, dst.len() as u64, Via::Copy).map_err(|err| err.context("read"))?;
        // SAFETY: the ledger proved the range and is held, so the memory stays mapped; it may overlap `dst`.
        unsafe { ptr::copy(from, dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    fn load_kernel(&self, device: DeviceId, kernel: &KernelSpec) -> Result<KernelId, Error> {
        self.ledger().check(device)?;
        let mut kernels = self.kernels.write().unwrap_or_else(PoisonError::into_inner);
        let known = kernels.iter().position(|known| *known == (device, *kernel));
        let id = known.unwrap_or_else(|| {
            kernels.push((device, *kernel));
            kernels.len() - 1
        });
        Ok(KernelId(id as u64))
    }

    fn launch(&self, stream: StreamId, kernel: KernelId, blocks: u32, threads: u32, args: &[u8]) -> Result<(), Error> {
        let queue = self.stream(stream)?;
        let kernels = self.kernels.read().unwrap_or_else(PoisonError::into_inner);
        let loaded = kernels.get(kernel.0 as usize).filter(|(device, _)| *device == queue.device());
        let Some(&(_, spec)) = loaded else {
            return Err(Error::new(format!("kernel {} was not loaded for device {}", kernel.0, queue.device().0)));
        };
        drop(kernels);
        if blocks == 0 || threads == 0 {
            return Err(Error::new(format!(
                "a launch of {blocks} blocks of {threads} threads: both must be at least 1"
            )));
        }
        let wrong_size = |_| Error::new(format!("a kernel was launched with {} bytes of arguments", args.len()));
        let for_threads = |expected| match threads == expected {
            true => Ok(()),
            false => {
                Err(Error::new(format!("a launch of blocks of {threads} threads, and the kernel is for {expected}")))
            }
        };
        queue.push(match spec {
            KernelSpec::Transfer(variant) => {
                for_threads(variant.block_threads)?;
                let args = TransferArgs::from_bytes(args.try_into().map_err(wrong_size)?);
                Operation::Transfer { variant, args, blocks }
            }
            KernelSpec::Bulk(_) => {
                for_threads(BulkVariant::BLOCK_THREADS)?;
                let args = TransferArgs::from_bytes(args.try_into().map_err(wrong_size)?);
                Operation::Transfer { variant: TransferVariant::default(), args, blocks }
            }
            KernelSpec::Check => Operation::Check { args: CheckArgs::from_bytes(args.try_into().map_err(wrong_size)?) },
            KernelSpec::Latch => Operation::Latch { args: LatchArgs::from_bytes(args.try_into().map_err(wrong_size)?) },
        })
    }

    fn ns_per_tick(&self, device: DeviceId) -> Result<f64, Error> {
        self.ledger().check(device)?;
        Ok(1.0)
    }
}

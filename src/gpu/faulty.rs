//! Wraps any driver and fails, delays, drops or corrupts a chosen call.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::{
    CheckArgs, CopyBatch, DeviceId, DeviceInfo, Driver, EventId, ExportHandle, KernelId, KernelName, KernelSpec,
    StreamId, SubExecutorRecord, TransferArgs,
};
use crate::error::Error;
use crate::fault::{Faults, Hit};
use crate::place::MemKind;
use crate::region::Address;
use crate::units::Bytes;

/// A driver whose every fallible call passes `Faults::hit` under its own name.
///
/// `drop` and `corrupt` act on what moves data (`copy`, `fill`, `write`, `launch`); other calls
/// then work as usual. What frees something frees it even when it is made to fail.
pub struct Faulty<D> {
    inner: D,
    faults: Faults,
    streams: Mutex<HashMap<StreamId, DeviceId>>,
    kernels: Mutex<HashMap<KernelId, KernelName>>,
}

impl<D: Driver> Faulty<D> {
    pub fn new(inner: D, faults: Faults) -> Faulty<D> {
        Faulty { inner, faults, streams: Mutex::default(), kernels: Mutex::default() }
    }

    /// Frees in any case, then reports the injected failure or the driver's own.
    fn freeing(&self, call: &'static str, free: impl FnOnce(&D) -> Result<(), Error>) -> Result<(), Error> {
        let injected = self.faults.hit(call);
        let freed = free(&self.inner);
        injected.and(freed)
    }

    /// Flips the lowest bit of one byte when everything queued before is done. Waiting keeps the
    /// order of the stream: what is queued later sees the flipped bit.
    fn flip(&self, stream: StreamId, address: u64) -> Result<(), Error> {
        self.inner.stream_wait(stream)?;
        let device = self.device(stream)?;
        let mut byte = [0];
        self.inner.read(device, Address(address), &mut byte)?;
        self.inner.write(device, Address(address), &[byte[0] ^ 1])
    }

    fn device(&self, stream: StreamId) -> Result<DeviceId, Error> {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.get(&stream).copied().ok_or_else(|| Error::new(format!("stream {} does not exist", stream.0)))
    }

    /// The first byte that a launch writes last: of destination 0 of record 0, or of a check's result.
    fn written_by(&self, stream: StreamId, kernel: KernelId, args: &[u8]) -> Result<Option<u64>, Error> {
        let name = self.kernels.lock().unwrap_or_else(PoisonError::into_inner).get(&kernel).copied();
        match name {
            Some(KernelName::Check) => Ok(args.try_into().ok().map(|args| CheckArgs::from_bytes(args).result)),
            Some(KernelName::Transfer | KernelName::Bulk) => {
                let Ok(args) = args.try_into().map(TransferArgs::from_bytes) else { return Ok(None) };
                let mut bytes = [0; SubExecutorRecord::SIZE];
                self.inner.read(self.device(stream)?, Address(args.records), &mut bytes)?;
                let record = SubExecutorRecord::from_bytes(bytes);
                let last = args.first.wrapping_add(u64::from(args.executions.saturating_sub(1)));
                let slice = last.checked_rem(record.dst_slices).unwrap_or(0);
                Ok((record.dst_count > 0).then(|| record.dst[0] + slice * record.dst_stride))
            }
            Some(KernelName::Latch) | None => Ok(None),
        }
    }
}

impl<D: Driver> Driver for Faulty<D> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, Error> {
        self.faults.hit("devices")?;
        self.inner.devices()
    }

    fn memory_free(&self, device: DeviceId) -> Result<Bytes, Error> {
        self.faults.hit("memory_free")?;
        self.inner.memory_free(device)
    }

    fn enable_peer(&self, device: DeviceId, peer: DeviceId) -> Result<(), Error> {
        self.faults.hit("enable_peer")?;
        self.inner.enable_peer(device, peer)
    }

    fn allocate(&self, device: DeviceId, kind: MemKind, bytes: Bytes, shareable: bool) -> Result<Address, Error> {
        self.faults.hit("allocate")?;
        self.inner.allocate(device, kind, bytes, shareable)
    }

    fn free(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.freeing("free", |inner| inner.free(device, address))
    }

    fn export(&self, device: DeviceId, address: Address) -> Result<ExportHandle, Error> {
        self.faults.hit("export")?;
        self.inner.export(device, address)
    }

    fn import(&self, device: DeviceId, handle: &ExportHandle, bytes: Bytes) -> Result<Address, Error> {
        self.faults.hit("import")?;
        self.inner.import(device, handle, bytes)
    }

    fn close_import(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.freeing("close_import", |inner| inner.close_import(device, address))
    }

    fn register_host(&self, device: DeviceId, address: Address, bytes: Bytes) -> Result<Address, Error> {
        self.faults.hit("register_host")?;
        self.inner.register_host(device, address, bytes)
    }

    fn unregister_host(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.freeing("unregister_host", |inner| inner.unregister_host(device, address))
    }

    fn stream_create(&self, device: DeviceId) -> Result<StreamId, Error> {
        self.faults.hit("stream_create")?;
        let stream = self.inner.stream_create(device)?;
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).insert(stream, device);
        Ok(stream)
    }

    fn stream_create_masked(&self, device: DeviceId, mask: &[u32]) -> Result<StreamId, Error> {
        self.faults.hit("stream_create")?;
        let stream = self.inner.stream_create_masked(device, mask)?;
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).insert(stream, device);
        Ok(stream)
    }

    fn stream_destroy(&self, stream: StreamId) -> Result<(), Error> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).remove(&stream);
        self.freeing("stream_destroy", |inner| inner.stream_destroy(stream))
    }

    fn stream_wait(&self, stream: StreamId) -> Result<(), Error> {
        self.faults.hit("stream_wait")?;
        self.inner.stream_wait(stream)
    }

    fn event_create(&self, device: DeviceId) -> Result<EventId, Error> {
        self.faults.hit("event_create")?;
        self.inner.event_create(device)
    }

    fn event_destroy(&self, event: EventId) -> Result<(), Error> {
        self.freeing("event_destroy", |inner| inner.event_destroy(event))
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> Result<(), Error> {
        self.faults.hit("event_record")?;
        self.inner.event_record(event, stream)
    }

    fn event_elapsed_ns(&self, start: EventId, stop: EventId) -> Result<f64, Error> {
        self.faults.hit("event_elapsed_ns")?;
        self.inner.event_elapsed_ns(start, stop)
    }

    fn copy(&self, stream: StreamId, dst: Address, src: Address, bytes: Bytes) -> Result<(), Error> {
        let hit = self.faults.hit("copy")?;
        if hit == Hit::Drop {
            return Ok(());
        }
        self.inner.copy(stream, dst, src, bytes)?;
        if hit == Hit::Corrupt && bytes > Bytes::ZERO { self.flip(stream, dst.0) } else { Ok(()) }
    }

    fn copy_batch(&self, stream: StreamId, copies: &CopyBatch) -> Result<(), Error> {
        let hit = self.faults.hit("copy_batch")?;
        if hit == Hit::Drop {
            return Ok(());
        }
        self.inner.copy_batch(stream, copies)?;
        match copies.dsts.first() {
            Some(dst) if hit == Hit::Corrupt => self.flip(stream, *dst),
            _ => Ok(()),
        }
    }

    fn copy_no_cu(&self, stream: StreamId, dst: Address, src: Address, bytes: Bytes) -> Result<(), Error> {
        let hit = self.faults.hit("copy")?;
        if hit == Hit::Drop {
            return Ok(());
        }
        self.inner.copy_no_cu(stream, dst, src, bytes)?;
        if hit == Hit::Corrupt && bytes > Bytes::ZERO { self.flip(stream, dst.0) } else { Ok(()) }
    }

    fn fill(&self, stream: StreamId, dst: Address, byte: u8, bytes: Bytes) -> Result<(), Error> {
        let hit = self.faults.hit("fill")?;
        if hit == Hit::Drop {
            return Ok(());
        }
        self.inner.fill(stream, dst, byte, bytes)?;
        if hit == Hit::Corrupt && bytes > Bytes::ZERO {
            self.inner.fill(stream, dst, byte ^ 1, Bytes(1))
        } else {
            Ok(())
        }
    }

    fn write(&self, device: DeviceId, dst: Address, src: &[u8]) -> Result<(), Error> {
        let hit = self.faults.hit("write")?;
        if hit == Hit::Drop {
            return Ok(());
        }
        self.inner.write(device, dst, src)?;
        match src.first() {
            Some(first) if hit == Hit::Corrupt => self.inner.write(device, dst, &[first ^ 1]),
            _ => Ok(()),
        }
    }

    fn read(&self, device: DeviceId, src: Address, dst: &mut [u8]) -> Result<(), Error> {
        self.faults.hit("read")?;
        self.inner.read(device, src, dst)
    }

    fn load_kernel(&self, device: DeviceId, spec: &KernelSpec) -> Result<KernelId, Error> {
        self.faults.hit("load_kernel")?;
        let kernel = self.inner.load_kernel(device, spec)?;
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner).insert(kernel, spec.name());
        Ok(kernel)
    }

    fn launch(&self, stream: StreamId, kernel: KernelId, blocks: u32, threads: u32, args: &[u8]) -> Result<(), Error> {
        let hit = self.faults.hit("launch")?;
        if hit == Hit::Drop {
            return Ok(());
        }
        self.inner.launch(stream, kernel, blocks, threads, args)?;
        if hit != Hit::Corrupt {
            return Ok(());
        }
        self.inner.stream_wait(stream)?;
        self.written_by(stream, kernel, args)?.map_or(Ok(()), |address| self.flip(stream, address))
    }

    fn ns_per_tick(&self, device: DeviceId) -> Result<f64, Error> {
        self.faults.hit("ns_per_tick")?;
        self.inner.ns_per_tick(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Action;
    use crate::gpu::host::HostDriver;

    const D0: DeviceId = DeviceId(0);
    const MEMORY: Bytes = Bytes::mib(1);

    fn faulty(call: &str, nth: u64, action: Action) -> Faulty<HostDriver> {
        Faulty::new(HostDriver::new(1, MEMORY), Faults::nth_of(call, nth, action))
    }

    /// Writes 8 bytes of 3, copies, fills the second half of the copy with 9, and reads it.
    fn write_copy_fill(driver: &dyn Driver) -> Result<[u8; 8], Error> {
        let a = driver.allocate(D0, MemKind::Device, Bytes(8), false)?;
        let b = driver.allocate(D0, MemKind::Device, Bytes(8), false)?;
        let stream = driver.stream_create(D0)?;
        driver.write(D0, a, &[3; 8])?;
        driver.copy(stream, b, a, Bytes(8))?;
        driver.fill(stream, Address(b.0 + 4), 9, Bytes(4))?;
        driver.stream_wait(stream)?;
        let mut seen = [0; 8];
        driver.read(D0, b, &mut seen)?;
        let frees = [driver.stream_destroy(stream), driver.free(D0, a), driver.free(D0, b)];
        frees.into_iter().collect::<Result<(), Error>>().map(|()| seen)
    }

    #[test]
    fn dropped_and_corrupted_calls_change_the_data_and_nothing_else() {
        for (call, action, expected) in [
            ("none", Action::Drop, [3, 3, 3, 3, 9, 9, 9, 9]),
            ("write", Action::Drop, [0, 0, 0, 0, 9, 9, 9, 9]),
            ("copy", Action::Drop, [0, 0, 0, 0, 9, 9, 9, 9]),
            ("fill", Action::Drop, [3, 3, 3, 3, 3, 3, 3, 3]),
            ("write", Action::Corrupt, [2, 3, 3, 3, 9, 9, 9, 9]),
            ("copy", Action::Corrupt, [2, 3, 3, 3, 9, 9, 9, 9]),
            ("fill", Action::Corrupt, [3, 3, 3, 3, 8, 9, 9, 9]),
            ("stream_wait", Action::Drop, [3, 3, 3, 3, 9, 9, 9, 9]),
        ] {
            assert_eq!(write_copy_fill(&faulty(call, 0, action)), Ok(expected), "{call} {action:?}");
        }
    }

    #[test]
    fn every_call_can_be_failed_and_is_named() {
        let counting = Faults::counting();
        write_copy_fill(&Faulty::new(HostDriver::new(1, MEMORY), counting.clone())).unwrap();
        assert_eq!(counting.calls(), 11);
        for nth in 0..counting.calls() {
            let driver = Faulty::new(HostDriver::new(1, MEMORY), Faults::nth(nth, Action::Fail));
            let err = write_copy_fill(&driver).unwrap_err();
            assert!(err.message().contains("injected fault"), "{err}");
        }
    }

    #[test]
    fn a_failed_free_still_frees() {
        let driver = faulty("free", 0, Action::Fail);
        let address = driver.allocate(D0, MemKind::Device, Bytes(8), false).unwrap();
        assert!(driver.free(D0, address).is_err());
        assert_eq!(driver.memory_free(D0), Ok(MEMORY));
    }

    #[test]
    fn a_corrupted_launch_flips_a_bit_of_the_slice_written_last() {
        let driver = faulty("launch", 0, Action::Corrupt);
        let data = driver.allocate(D0, MemKind::Device, Bytes(512), false).unwrap();
        let records = driver.allocate(D0, MemKind::Device, Bytes(SubExecutorRecord::SIZE as u64), false).unwrap();
        let record = SubExecutorRecord {
            elements: 1,
            src_count: 0,
            dst_count: 1,
            team_size: 1,
            team_index: 0,
            src: [0; 8],
            dst: [data.0; 8],
            src_stride: 0,
            src_slices: 1,
            dst_stride: 256,
            dst_slices: 2,
            start_ticks: 0,
            stop_ticks: 0,
        };
        driver.write(D0, records, &record.to_bytes()).unwrap();
        let stream = driver.stream_create(D0).unwrap();
        let kernel = driver.load_kernel(D0, &KernelName::Transfer.into()).unwrap();
        let args = TransferArgs { records: records.0, first: 0, executions: 2, count: 1 };
        driver.launch(stream, kernel, 1, 256, &args.to_bytes()).unwrap();
        driver.stream_wait(stream).unwrap();
        let mut seen = [0; 257];
        driver.read(D0, data, &mut seen).unwrap();
        assert_eq!((seen[0], seen[256]), (75, 74));
    }
}

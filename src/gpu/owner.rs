//! Owners of what a driver hands out: each keeps its device alive and frees itself when dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{CopyBatch, DeviceId, DeviceInfo, Driver, EventId, ExportHandle, KernelId, KernelSpec, StreamId};
use crate::error::Error;
use crate::place::MemKind;
use crate::region::{Address, Region, Space};
use crate::units::Bytes;

/// One device of this rank.
pub struct Device {
    driver: Arc<dyn Driver>,
    id: DeviceId,
    info: DeviceInfo,
}

impl Device {
    /// Every device of a driver, by number.
    pub fn all(driver: &Arc<dyn Driver>) -> Result<Vec<Arc<Device>>, Error> {
        let devices = driver.devices()?.into_iter().enumerate();
        Ok(devices
            .map(|(id, info)| Arc::new(Device { driver: Arc::clone(driver), id: DeviceId(id as u32), info }))
            .collect())
    }

    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    pub fn id(&self) -> DeviceId {
        self.id
    }

    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    pub fn memory_free(&self) -> Result<Bytes, Error> {
        self.driver.memory_free(self.id)
    }

    /// Lets kernels of this device touch memory of `peer`.
    pub fn enable_peer(&self, peer: DeviceId) -> Result<(), Error> {
        self.driver.enable_peer(self.id, peer)
    }

    /// `shareable`: another process will open it.
    pub fn allocate(self: &Arc<Device>, kind: MemKind, bytes: Bytes, shareable: bool) -> Result<Buffer, Error> {
        let address = self.driver.allocate(self.id, kind, bytes, shareable)?;
        let space = if kind.is_host() { Space::Host } else { self.space() };
        Ok(Buffer(Arc::new(Allocation { device: Arc::clone(self), address, bytes, space })))
    }

    /// Opens memory that another rank has exported.
    pub fn import(self: &Arc<Device>, handle: &ExportHandle, bytes: Bytes) -> Result<ImportedBuffer, Error> {
        let address = self.driver.import(self.id, handle, bytes)?;
        Ok(ImportedBuffer(Arc::new(Import { device: Arc::clone(self), address, bytes })))
    }

    /// Makes host memory usable by this device.
    pub fn register(self: &Arc<Device>, region: &Region) -> Result<Registration, Error> {
        let there = self.driver.register_host(self.id, region.address(), region.bytes())?;
        Ok(Registration { device: Arc::clone(self), region: region.clone(), there })
    }

    pub fn stream(self: &Arc<Device>) -> Result<Stream, Error> {
        Ok(Stream { device: Arc::clone(self), id: self.driver.stream_create(self.id)?, busy: AtomicBool::new(false) })
    }

    /// A stream whose kernels run on some compute units only: bit by bit, in words of 32.
    pub fn masked_stream(self: &Arc<Device>, mask: &[u32]) -> Result<Stream, Error> {
        let id = self.driver.stream_create_masked(self.id, mask)?;
        Ok(Stream { device: Arc::clone(self), id, busy: AtomicBool::new(false) })
    }

    pub fn event(self: &Arc<Device>) -> Result<Event, Error> {
        Ok(Event { device: Arc::clone(self), id: self.driver.event_create(self.id)? })
    }

    /// A `KernelName` stands for its default variant.
    pub fn load_kernel(&self, kernel: impl Into<KernelSpec>) -> Result<KernelId, Error> {
        self.driver.load_kernel(self.id, &kernel.into())
    }

    pub fn ns_per_tick(&self) -> Result<f64, Error> {
        self.driver.ns_per_tick(self.id)
    }

    /// Copies from this process's memory, and returns when it is there.
    pub fn write(&self, dst: Address, src: &[u8]) -> Result<(), Error> {
        self.driver.write(self.id, dst, src)
    }

    /// Copies to this process's memory, and returns when it is there.
    pub fn read(&self, src: Address, dst: &mut [u8]) -> Result<(), Error> {
        self.driver.read(self.id, src, dst)
    }

    fn space(&self) -> Space {
        Space::Device { device: self.id.0, cpu: self.info.cpu_access }
    }

    /// Drops cannot return an error, and a failing free must not hide what came before it.
    fn log_failure(&self, what: &str, result: Result<(), Error>) {
        if let Err(err) = result {
            tracing::warn!("{what} of device {}: {err}", self.id.0);
        }
    }
}

/// Memory of a device, or host memory that its runtime allocated. It is freed with the last of the buffer and its regions.
#[derive(Clone)]
pub struct Buffer(Arc<Allocation>);

struct Allocation {
    device: Arc<Device>,
    address: Address,
    bytes: Bytes,
    space: Space,
}

impl Buffer {
    pub fn address(&self) -> Address {
        self.0.address
    }

    pub fn bytes(&self) -> Bytes {
        self.0.bytes
    }

    pub fn device(&self) -> &Arc<Device> {
        &self.0.device
    }

    pub fn region(&self) -> Region {
        Region::new(self.0.address, self.0.bytes, self.0.space, Arc::clone(&self.0) as _)
    }

    /// Lets another rank open the buffer, which was allocated shareable. It must close its import
    /// before the buffer is freed.
    pub fn export(&self) -> Result<ExportHandle, Error> {
        self.0.device.driver.export(self.0.device.id, self.0.address)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.device.log_failure("free memory", self.device.driver.free(self.device.id, self.address));
    }
}

/// Memory that another rank owns. It is closed with the last of the buffer and its regions.
#[derive(Clone)]
pub struct ImportedBuffer(Arc<Import>);

struct Import {
    device: Arc<Device>,
    address: Address,
    bytes: Bytes,
}

impl ImportedBuffer {
    pub fn region(&self) -> Region {
        Region::new(self.0.address, self.0.bytes, self.0.device.space(), Arc::clone(&self.0) as _)
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        self.device.log_failure("close an import", self.device.driver.close_import(self.device.id, self.address));
    }
}

/// Host memory that a device may use until this is dropped.
pub struct Registration {
    device: Arc<Device>,
    /// Keeps the memory mapped while it is registered.
    region: Region,
    there: Address,
}

impl Registration {
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Where the device finds the region's first byte.
    pub fn address(&self) -> Address {
        self.there
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let result = self.device.driver.unregister_host(self.device.id, self.region.address());
        self.device.log_failure("unregister host memory", result);
    }
}

/// An in-order queue of a device. Dropping it waits for what is queued.
pub struct Stream {
    device: Arc<Device>,
    id: StreamId,
    /// Something was queued since the last wait.
    busy: AtomicBool,
}

impl Stream {
    pub fn id(&self) -> StreamId {
        self.id
    }

    /// Waits for everything queued; reports the first failure of it.
    pub fn wait(&self) -> Result<(), Error> {
        self.busy.store(false, Ordering::Relaxed);
        self.device.driver.stream_wait(self.id)
    }

    /// The driver, for a call that queues something.
    fn queue(&self) -> &dyn Driver {
        self.busy.store(true, Ordering::Relaxed);
        &*self.device.driver
    }

    /// Queues a copy by the copy engine.
    pub fn copy(&self, dst: Address, src: Address, bytes: Bytes) -> Result<(), Error> {
        self.queue().copy(self.id, dst, src, bytes)
    }

    /// Queues several copies by the copy engine in one call.
    pub fn copy_batch(&self, copies: &CopyBatch) -> Result<(), Error> {
        self.queue().copy_batch(self.id, copies)
    }

    /// Queues a copy that compute units never do instead.
    pub fn copy_no_cu(&self, dst: Address, src: Address, bytes: Bytes) -> Result<(), Error> {
        self.queue().copy_no_cu(self.id, dst, src, bytes)
    }

    /// Queues a fill.
    pub fn fill(&self, dst: Address, byte: u8, bytes: Bytes) -> Result<(), Error> {
        self.queue().fill(self.id, dst, byte, bytes)
    }

    /// Queues a kernel; `args` is the bytes of its argument struct.
    pub fn launch(&self, kernel: KernelId, blocks: u32, threads: u32, args: &[u8]) -> Result<(), Error> {
        self.queue().launch(self.id, kernel, blocks, threads, args)
    }

    /// Queues the event.
    pub fn record(&self, event: &Event) -> Result<(), Error> {
        self.queue().event_record(event.id, self.id)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Destroying a stream does not wait for it on real devices, and what it uses is freed next.
        if *self.busy.get_mut() {
            self.device.log_failure("last work in a stream", self.device.driver.stream_wait(self.id));
        }
        self.device.log_failure("destroy a stream", self.device.driver.stream_destroy(self.id));
    }
}

/// A time stamp in a stream.
pub struct Event {
    device: Arc<Device>,
    id: EventId,
}

impl Event {
    pub fn id(&self) -> EventId {
        self.id
    }

    /// Nanoseconds from `start` to this event, both of which have happened.
    pub fn ns_since(&self, start: &Event) -> Result<f64, Error> {
        self.device.driver.event_elapsed_ns(start.id, self.id)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.device.log_failure("destroy an event", self.device.driver.event_destroy(self.id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::host::HostDriver;

    fn device() -> Arc<Device> {
        let driver: Arc<dyn Driver> = Arc::new(HostDriver::new(1, Bytes::mib(1)));
        Device::all(&driver).unwrap().remove(0)
    }

    #[test]
    fn memory_is_freed_with_the_last_region_and_not_before() {
        let device = device();
        let buffer = device.allocate(MemKind::Device, Bytes::kib(4), false).unwrap();
        let part = buffer.region().part(4, Bytes(8));
        drop(buffer);
        assert_eq!(device.memory_free(), Ok(Bytes(Bytes::mib(1).0 - 4096)));
        device.write(part.address(), &[1; 8]).unwrap();
        drop(part);
        assert_eq!(device.memory_free(), Ok(Bytes::mib(1)));
    }

    #[test]
    fn a_registration_ends_when_it_is_dropped() {
        let device = device();
        let memory = Arc::new(vec![7u8; 64]);
        let address = Address(memory.as_ptr().expose_provenance() as u64);
        let region = Region::new(address, Bytes(64), Space::Host, memory);
        let registration = device.register(&region).unwrap();
        let mut seen = [0; 64];
        device.read(registration.address(), &mut seen).unwrap();
        assert_eq!(seen, [7; 64]);
        drop(registration);
        assert!(device.read(address, &mut seen).is_err());
    }

    #[test]
    fn a_failing_free_does_not_panic() {
        let device = device();
        let buffer = device.allocate(MemKind::Device, Bytes(4), false).unwrap();
        device.driver().free(device.id(), buffer.address()).unwrap();
        drop(buffer);
    }
}

//! The driver of real devices, written once over the calls of a vendor's runtime.

pub mod calls;
mod memory;

use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

use self::calls::{Calls, Raw, Shape};
use super::held::Held;
use super::library::Refusal;
use super::slots::Slots;
use super::{
    CopyBatch, DeviceId, DeviceInfo, Driver, EventId, ExportHandle, KernelId, KernelSpec, StreamId, checks, images, ipc,
};
use crate::error::{Error, ExitCode};
use crate::place::MemKind;
use crate::region::Address;
use crate::units::Bytes;

/// The devices of one vendor that this process sees.
pub struct RuntimeDriver<C: Calls> {
    calls: &'static C,
    devices: Vec<Slot<C>>,
    streams: Slots,
    events: Slots,
    kernels: Slots,
    /// Each kernel is loaded once for a device.
    loaded: Mutex<HashMap<(DeviceId, KernelSpec), Module>>,
    held: Held,
    /// Tells the drivers of one process apart.
    instance: u64,
}

/// A device, and what is made on it when it is first needed.
struct Slot<C: Calls> {
    info: DeviceInfo,
    raw: C::Device,
    context: OnceLock<Result<C::Context, Error>>,
    /// For what must be there when a call returns.
    stream: OnceLock<Result<Raw, Error>>,
}

struct Module {
    raw: Raw,
    kernel: KernelId,
}

impl<C: Calls> RuntimeDriver<C> {
    /// # Errors
    /// If there is no library or no device (exit code 7), or a device cannot be described.
    pub fn open() -> Result<RuntimeDriver<C>, Error> {
        let calls = C::open().map_err(|err| err.with_exit(ExitCode::NothingRan))?;
        let nothing = |refusal| {
            let what = format_args!("{} finds no device", calls.library()).to_string();
            calls.explain(refusal, &what).with_exit(ExitCode::NothingRan)
        };
        let count = calls.count().map_err(nothing)?;
        if count < 1 {
            return Err(nothing(Refusal { call: C::COUNT, status: Some(C::NO_DEVICE) }));
        }
        let devices = (0..count).map(|ordinal| {
            let described = calls.describe(ordinal);
            let (info, raw) =
                described.map_err(|refusal| calls.explain(refusal, &format!("describe device {ordinal}")))?;
            Ok(Slot { info, raw, context: OnceLock::new(), stream: OnceLock::new() })
        });
        Ok(RuntimeDriver {
            calls,
            devices: devices.collect::<Result<_, Error>>()?,
            streams: Slots::new("stream"),
            events: Slots::new("event"),
            kernels: Slots::new("kernel"),
            loaded: Mutex::default(),
            held: Held::default(),
            instance: ipc::serial(),
        })
    }

    fn slot(&self, device: DeviceId) -> Result<&Slot<C>, Error> {
        self.devices.get(device.0 as usize).ok_or_else(|| {
            let count = self.devices.len();
            Error::new(format!("device {} does not exist: {} sees {count}, numbered from 0", device.0, C::TITLE))
        })
    }

    /// Makes the device the current one of this thread.
    fn enter(&self, device: DeviceId) -> Result<(&Slot<C>, &C::Context), Error> {
        let slot = self.slot(device)?;
        let make = || self.told(self.calls.context(&slot.raw), || format!("make a context on device {}", device.0));
        let context = slot.context.get_or_init(make).as_ref().map_err(Error::clone)?;
        self.told(self.calls.enter(&slot.raw, context), || format!("{} device {}", C::ENTER, device.0))?;
        Ok((slot, context))
    }

    /// On the current device.
    fn new_stream(&self, device: DeviceId) -> Result<Raw, Error> {
        self.told(self.calls.stream_create(), || format!("create a stream on device {}", device.0))
    }

    /// The driver's own stream of a device, which becomes the current one.
    fn own_stream(&self, device: DeviceId) -> Result<Raw, Error> {
        let (slot, _) = self.enter(device)?;
        slot.stream.get_or_init(|| self.new_stream(device)).clone()
    }

    /// Numbers a stream that was just created.
    fn add_stream(&self, device: DeviceId, raw: Raw) -> Result<StreamId, Error> {
        self.streams.insert(device, raw.0).map(StreamId).inspect_err(|_| {
            // SAFETY: the stream was just created, and nobody else knows it.
            let _ = unsafe { self.calls.stream_destroy(raw) };
        })
    }

    /// Puts into words what did not succeed.
    fn told<T, W: fmt::Display>(&self, result: Result<T, Refusal>, what: impl FnOnce() -> W) -> Result<T, Error> {
        result.map_err(|refusal| self.calls.explain(refusal, &what()))
    }

    fn stream(&self, stream: StreamId) -> Result<(DeviceId, Raw), Error> {
        let (device, raw) = self.streams.get(stream.0)?;
        self.enter(device)?;
        Ok((device, Raw(raw)))
    }

    fn load(&self, device: DeviceId, slot: &Slot<C>, spec: KernelSpec) -> Result<Module, Error> {
        let image = images::get(C::NAME, C::VENDOR, C::target(&slot.info, &slot.raw), spec)?;
        let what = || format!("load kernel {} on device {}", image.entry, device.0);
        // SAFETY: the bytes are a whole image (PTX with its final zero).
        let module = self.told(unsafe { self.calls.module_load(&image.bytes) }, what)?;
        let entry = CString::new(image.entry.as_str()).map_err(|_| Error::new("a kernel's name holds a zero"))?;
        // SAFETY: the module was just loaded.
        let function = self.told(unsafe { self.calls.module_function(module, &entry) }, what);
        let kernel = function.and_then(|function| {
            if spec.shared_bytes() > 0 {
                // SAFETY: the function is of the module that was just loaded.
                let allowed = unsafe { self.calls.allow_shared(function, spec.shared_bytes()) };
                self.told(allowed, || format!("{} with {} bytes of shared memory", what(), spec.shared_bytes()))?;
            }
            self.kernels.insert(device, function.0)
        });
        let kernel = kernel.inspect_err(|_| {
            // SAFETY: nobody knows the module yet.
            let _ = unsafe { self.calls.module_unload(module) };
        })?;
        Ok(Module { raw: module, kernel: checks::kernel_id(kernel, spec) })
    }
}

impl<C: Calls> Driver for RuntimeDriver<C> {
    fn name(&self) -> &'static str {
        C::NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, Error> {
        Ok(self.devices.iter().map(|slot| slot.info.clone()).collect())
    }

    fn memory_free(&self, device: DeviceId) -> Result<Bytes, Error> {
        self.enter(device)?;
        let free = self.told(self.calls.memory_free(), || format!("ask for the free memory of device {}", device.0))?;
        Ok(Bytes(free))
    }

    fn enable_peer(&self, device: DeviceId, peer: DeviceId) -> Result<(), Error> {
        let (here, there) = (self.slot(device)?, self.slot(peer)?);
        let what = || format!("let device {} reach memory of device {}", device.0, peer.0);
        if !self.told(self.calls.can_access_peer(&here.raw, &there.raw), what)? {
            return Err(Error::new(format!("{}: they have no peer access to each other", what())));
        }
        let (_, context) = self.enter(peer)?;
        self.enter(device)?;
        match self.calls.enable_peer(&there.raw, context) {
            Err(Refusal { status: Some(status), .. }) if status == C::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            enabled => self.told(enabled, what),
        }
    }

    fn allocate(&self, device: DeviceId, kind: MemKind, bytes: Bytes, shareable: bool) -> Result<Address, Error> {
        self.allocate_memory(device, kind, bytes, shareable)
    }

    fn free(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.free_memory(device, address)
    }

    fn export(&self, device: DeviceId, address: Address) -> Result<ExportHandle, Error> {
        self.export_memory(device, address)
    }

    fn import(&self, device: DeviceId, handle: &ExportHandle, bytes: Bytes) -> Result<Address, Error> {
        self.import_memory(device, handle, bytes)
    }

    fn close_import(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.close_memory(device, address)
    }

    fn register_host(&self, device: DeviceId, address: Address, bytes: Bytes) -> Result<Address, Error> {
        self.register_memory(device, address, bytes)
    }

    fn unregister_host(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.unregister_memory(device, address)
    }

    fn stream_create(&self, device: DeviceId) -> Result<StreamId, Error> {
        self.enter(device)?;
        let raw = self.new_stream(device)?;
        self.add_stream(device, raw)
    }

    fn stream_create_masked(&self, device: DeviceId, mask: &[u32]) -> Result<StreamId, Error> {
        let (slot, _) = self.enter(device)?;
        if !slot.info.cu_masks {
            return Err(Error::new(format!("device {} ({}) has no masks of compute units", device.0, slot.info.name)));
        }
        let created = self.calls.stream_create_masked(mask);
        let raw = self.told(created, || format!("create a stream on some compute units of device {}", device.0))?;
        self.add_stream(device, raw)
    }

    fn stream_destroy(&self, stream: StreamId) -> Result<(), Error> {
        let (device, raw) = self.streams.remove(stream.0)?;
        self.enter(device)?;
        // SAFETY: it was live until now, and its number is gone.
        let destroyed = unsafe { self.calls.stream_destroy(Raw(raw)) };
        self.told(destroyed, || format!("destroy a stream of device {}", device.0))
    }

    fn stream_wait(&self, stream: StreamId) -> Result<(), Error> {
        let (device, raw) = self.stream(stream)?;
        // SAFETY: the stream is live.
        self.told(unsafe { self.calls.stream_wait(raw) }, || format!("wait for a stream of device {}", device.0))
    }

    fn event_create(&self, device: DeviceId) -> Result<EventId, Error> {
        self.enter(device)?;
        let raw = self.told(self.calls.event_create(), || format!("create an event on device {}", device.0))?;
        self.events.insert(device, raw.0).map(EventId).inspect_err(|_| {
            // SAFETY: the event was just created, and nobody else knows it.
            let _ = unsafe { self.calls.event_destroy(raw) };
        })
    }

    fn event_destroy(&self, event: EventId) -> Result<(), Error> {
        let (device, raw) = self.events.remove(event.0)?;
        self.enter(device)?;
        // SAFETY: it was live until now, and its number is gone.
        let destroyed = unsafe { self.calls.event_destroy(Raw(raw)) };
        self.told(destroyed, || format!("destroy an event of device {}", device.0))
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> Result<(), Error> {
        let (owner, event) = self.events.get(event.0)?;
        let (device, stream) = self.stream(stream)?;
        checks::one_device(owner, device)?;
        // SAFETY: both are live and of one device.
        let recorded = unsafe { self.calls.event_record(Raw(event), stream) };
        self.told(recorded, || format!("record an event on device {}", device.0))
    }

    fn event_elapsed_ns(&self, start: EventId, stop: EventId) -> Result<f64, Error> {
        let (device, start) = self.events.get(start.0)?;
        let (_, stop) = self.events.get(stop.0)?;
        self.enter(device)?;
        // SAFETY: both events are live.
        let asked = unsafe { self.calls.event_elapsed_ms(Raw(start), Raw(stop)) };
        let milliseconds = self.told(asked, || format!("take the time between two events of device {}", device.0))?;
        Ok(f64::from(milliseconds) * 1e6)
    }

    fn copy(&self, stream: StreamId, dst: Address, src: Address, bytes: Bytes) -> Result<(), Error> {
        let (device, stream) = self.stream(stream)?;
        // SAFETY: the owners of the ranges keep them mapped until the stream has been waited for.
        let queued = unsafe { self.calls.copy(stream, dst.0, src.0, bytes.0 as usize) };
        self.told(queued, || format!("copy {bytes} by device {} from {:#x} to {:#x}", device.0, src.0, dst.0))
    }

    fn copy_batch(&self, stream: StreamId, copies: &CopyBatch) -> Result<(), Error> {
        let (device, stream) = self.stream(stream)?;
        // SAFETY: the owners of the ranges keep them mapped until the stream has been waited for.
        let queued = unsafe { self.calls.copy_batch(stream, copies) };
        self.told(queued, || format!("copy a batch of {} by device {}", copies.sizes.len(), device.0))
    }

    fn copy_no_cu(&self, stream: StreamId, dst: Address, src: Address, bytes: Bytes) -> Result<(), Error> {
        let (device, stream) = self.stream(stream)?;
        let info = &self.slot(device)?.info;
        if !info.no_cu_copies {
            let name = &info.name;
            return Err(Error::new(format!(
                "copies by device {} ({name}) cannot be kept from compute units",
                device.0
            )));
        }
        // SAFETY: as for `copy`.
        let queued = unsafe { self.calls.copy_no_cu(stream, dst.0, src.0, bytes.0 as usize) };
        let what = || format!("copy {bytes} by device {} alone from {:#x} to {:#x}", device.0, src.0, dst.0);
        self.told(queued, what)
    }

    fn fill(&self, stream: StreamId, dst: Address, byte: u8, bytes: Bytes) -> Result<(), Error> {
        let (device, stream) = self.stream(stream)?;
        // SAFETY: as for `copy`.
        let queued = unsafe { self.calls.fill(stream, dst.0, byte, bytes.0 as usize) };
        self.told(queued, || format!("fill {bytes} at {:#x} of device {}", dst.0, device.0))
    }

    fn write(&self, device: DeviceId, dst: Address, src: &[u8]) -> Result<(), Error> {
        let stream = self.own_stream(device)?;
        // SAFETY: `src` is borrowed until the copy has been waited for; its owner keeps `dst` mapped.
        let queued = unsafe { self.calls.copy_in(stream, dst.0, src) };
        // A copy from pageable memory may return before the last byte is there.
        // SAFETY: the stream lives as long as the driver.
        let waited = unsafe { self.calls.stream_wait(stream) };
        let what = || format!("write {} bytes to {:#x} of device {}", src.len(), dst.0, device.0);
        self.told(queued.and(waited), what)
    }

    fn read(&self, device: DeviceId, src: Address, dst: &mut [u8]) -> Result<(), Error> {
        let stream = self.own_stream(device)?;
        // SAFETY: `dst` is borrowed until the copy has been waited for; its owner keeps `src` mapped.
        let queued = unsafe { self.calls.copy_out(stream, dst, src.0) };
        // SAFETY: the stream lives as long as the driver.
        let waited = unsafe { self.calls.stream_wait(stream) };
        let what = || format!("read {} bytes from {:#x} of device {}", dst.len(), src.0, device.0);
        self.told(queued.and(waited), what)
    }

    fn load_kernel(&self, device: DeviceId, kernel: &KernelSpec) -> Result<KernelId, Error> {
        let (slot, _) = self.enter(device)?;
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = loaded.get(&(device, *kernel)) {
            return Ok(module.kernel);
        }
        let module = self.load(device, slot, *kernel)?;
        Ok(loaded.entry((device, *kernel)).or_insert(module).kernel)
    }

    fn launch(&self, stream: StreamId, kernel: KernelId, blocks: u32, threads: u32, args: &[u8]) -> Result<(), Error> {
        let (device, stream) = self.stream(stream)?;
        let (owner, function) = self.kernels.get(checks::launchable(kernel, blocks, threads, args)?)?;
        checks::loaded_for(owner, device)?;
        let shape = Shape { blocks, threads, shared_bytes: checks::shared_bytes(kernel) };
        // SAFETY: the kernel takes one struct by value, of the size that was checked; what the struct
        // points to is kept by the owners until the stream has been waited for.
        let launched = unsafe { self.calls.launch(stream, Raw(function), shape, args) };
        self.told(launched, || {
            format!("launch a kernel on device {} with {blocks} blocks of {threads} threads", device.0)
        })
    }

    fn ns_per_tick(&self, device: DeviceId) -> Result<f64, Error> {
        self.slot(device).map(|slot| C::ns_per_tick(&slot.raw))
    }
}

impl<C: Calls> Drop for RuntimeDriver<C> {
    /// Nothing is left here but what nobody gave back. A failure is not reported: it repeats what
    /// the run has said already.
    fn drop(&mut self) {
        for (address, allocation) in self.held.leftovers() {
            tracing::warn!("{} of device {} were not freed", allocation.bytes, allocation.device.0);
            if self.enter(allocation.device).is_ok() {
                ipc::Export::forget(address);
                // SAFETY: it was allocated here and not freed.
                let _ = unsafe { self.calls.free(allocation.kind, address) };
            }
        }
        let loaded = std::mem::take(self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner));
        for (device, slot) in self.devices.iter().enumerate() {
            let Some(Ok(context)) = slot.context.get() else { continue };
            if self.calls.enter(&slot.raw, context).is_err() {
                continue;
            }
            for module in loaded.iter().filter(|((owner, _), _)| owner.0 as usize == device).map(|(_, module)| module) {
                // SAFETY: nothing launches it any more.
                let _ = unsafe { self.calls.module_unload(module.raw) };
            }
            if let Some(Ok(stream)) = slot.stream.get() {
                // SAFETY: nothing uses it any more.
                let _ = unsafe { self.calls.stream_destroy(*stream) };
            }
            // SAFETY: made once by this driver, and nothing of it is used any more.
            unsafe { self.calls.release(&slot.raw, context) };
        }
    }
}

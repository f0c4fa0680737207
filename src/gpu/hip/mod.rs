//! AMD devices, by the HIP runtime.

mod ffi;
mod memory;

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use self::ffi::{
    Api, hipDeviceAttribute_t, hipEvent_t, hipFunction_t, hipMemcpyKind, hipModule_t, hipStream_t,
    hipStreamNonBlocking, hipUUID,
};
use self::memory::pointer;
use super::held::Held;
use super::library::{self, Refusal};
use super::rtc::Vendor;
use super::slots::Slots;
use super::{
    DeviceId, DeviceInfo, Driver, EventId, ExportHandle, KernelId, KernelName, KernelSpec, StreamId, checks, images,
    ipc,
};
use crate::error::{Error, ExitCode};
use crate::place::MemKind;
use crate::region::Address;
use crate::units::Bytes;

const NAME: &str = "hip";

/// Rate of the wall clock that kernels read, where the runtime cannot tell: `s_memrealtime` counts a
/// constant 100 MHz on the devices of that time (LLVM, "User Guide for AMDGPU Backend", readsteadycounter).
const WALL_CLOCK_KHZ: u32 = 100_000;

/// The AMD devices that this process sees.
pub struct HipDriver {
    api: &'static Api,
    devices: Vec<Slot>,
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
struct Slot {
    info: DeviceInfo,
    /// With its features, as the compiler takes it: `gfx90a:sramecc+:xnack-`.
    target: String,
    ns_per_tick: f64,
    /// For what must be there when a call returns.
    stream: OnceLock<Result<Stream, Error>>,
}

struct Stream(hipStream_t);

struct Module {
    raw: hipModule_t,
    kernel: KernelId,
}

// SAFETY: the handles are names of objects that the runtime itself guards; any thread may use them.
unsafe impl Send for Stream {}
// SAFETY: as for Send.
unsafe impl Sync for Stream {}
// SAFETY: as for Stream.
unsafe impl Send for Module {}

impl HipDriver {
    /// # Errors
    /// If there is no driver library or no device (exit code 7), or a device cannot be described.
    pub fn open() -> Result<HipDriver, Error> {
        let api = Api::open().map_err(|err| err.with_exit(ExitCode::NothingRan))?;
        let nothing = |refusal| {
            api.explain(refusal, format_args!("{} finds no device", api.library())).with_exit(ExitCode::NothingRan)
        };
        let mut count = 0;
        // SAFETY: it writes one integer.
        unsafe { api.table.hipGetDeviceCount(&mut count) }.map_err(nothing)?;
        if count < 1 {
            return Err(nothing(Refusal { call: "hipGetDeviceCount", status: Some(ffi::NO_DEVICE) }));
        }
        let devices = (0..count).map(|ordinal| {
            describe(api, ordinal).map_err(|refusal| api.explain(refusal, format_args!("describe device {ordinal}")))
        });
        Ok(HipDriver {
            api,
            devices: devices.collect::<Result<_, _>>()?,
            streams: Slots::new("stream"),
            events: Slots::new("event"),
            kernels: Slots::new("kernel"),
            loaded: Mutex::default(),
            held: Held::default(),
            instance: ipc::serial(),
        })
    }

    fn slot(&self, device: DeviceId) -> Result<&Slot, Error> {
        self.devices.get(device.0 as usize).ok_or_else(|| {
            let count = self.devices.len();
            Error::new(format!("device {} does not exist: HIP sees {count}, numbered from 0", device.0))
        })
    }

    /// Makes the device the current one of this thread.
    fn enter(&self, device: DeviceId) -> Result<&Slot, Error> {
        let slot = self.slot(device)?;
        // SAFETY: it takes any number, and changes this thread's device only.
        let entered = unsafe { self.api.table.hipSetDevice(device.0 as c_int) };
        self.told(entered, || format!("choose device {}", device.0))?;
        Ok(slot)
    }

    /// On the current device.
    fn new_stream(&self, device: DeviceId) -> Result<hipStream_t, Error> {
        let mut stream = ptr::null_mut();
        // SAFETY: it writes one handle.
        let created = unsafe { self.api.table.hipStreamCreateWithFlags(&mut stream, hipStreamNonBlocking) };
        self.told(created, || format!("create a stream on device {}", device.0))?;
        Ok(stream)
    }

    /// The driver's own stream of a device, which becomes the current one.
    fn own_stream(&self, device: DeviceId) -> Result<hipStream_t, Error> {
        let stream = self.enter(device)?.stream.get_or_init(|| self.new_stream(device).map(Stream));
        stream.as_ref().map(|stream| stream.0).map_err(Error::clone)
    }

    /// Copies and waits until the last byte is there.
    ///
    /// # Safety
    /// Both sides are `bytes` long and stay mapped until it returns.
    unsafe fn copy_now(
        &self,
        stream: hipStream_t,
        dst: *mut c_void,
        src: *const c_void,
        bytes: usize,
        kind: hipMemcpyKind,
    ) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        let queued = unsafe { self.api.table.hipMemcpyAsync(dst, src, bytes, kind, stream) };
        // A copy from pageable memory may return before the last byte is there.
        // SAFETY: the stream is the driver's own.
        let waited = unsafe { self.api.table.hipStreamSynchronize(stream) };
        queued.and(waited)
    }

    /// Puts into words what did not succeed.
    fn told<W: fmt::Display>(&self, result: Result<(), Refusal>, what: impl FnOnce() -> W) -> Result<(), Error> {
        result.map_err(|refusal| self.api.explain(refusal, what()))
    }

    fn stream(&self, stream: StreamId) -> Result<(DeviceId, hipStream_t), Error> {
        let (device, raw) = self.streams.get(stream.0)?;
        self.enter(device)?;
        Ok((device, raw))
    }

    fn load(&self, device: DeviceId, slot: &Slot, spec: KernelSpec) -> Result<Module, Error> {
        let image = images::get(NAME, Vendor::Hip, &slot.target, spec)?;
        let what = || format!("load kernel {} on device {}", image.entry, device.0);
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the bytes are a whole image, which the runtime copies.
        self.told(unsafe { self.api.table.hipModuleLoadData(&mut module, image.bytes.as_ptr().cast()) }, what)?;
        let entry = CString::new(image.entry.as_str()).map_err(|_| Error::new("a kernel's name holds a zero"))?;
        // SAFETY: the module was just loaded, the name ends with a zero.
        let found = unsafe { self.api.table.hipModuleGetFunction(&mut function, module, entry.as_ptr()) };
        let kernel = self.told(found, what).and_then(|()| self.kernels.insert(device, function));
        let kernel = kernel.inspect_err(|_| {
            // SAFETY: nobody knows the module yet.
            let _ = unsafe { self.api.table.hipModuleUnload(module) };
        })?;
        Ok(Module { raw: module, kernel: checks::kernel_id(kernel, spec.name) })
    }
}

/// Facts of a device.
fn describe(api: &Api, ordinal: c_int) -> Result<Slot, Refusal> {
    let table = &api.table;
    let attribute = |which: hipDeviceAttribute_t| {
        let mut value = 0;
        // SAFETY: it writes one integer.
        unsafe { table.hipDeviceGetAttribute(&mut value, which, ordinal) }.ok().map(|()| value)
    };
    let mut name = [0u8; 256];
    // SAFETY: it writes at most as many bytes as it is told.
    unsafe { table.hipDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, ordinal) }?;
    let mut pci = [0u8; 64];
    // SAFETY: as above.
    unsafe { table.hipDeviceGetPCIBusId(pci.as_mut_ptr().cast(), pci.len() as c_int, ordinal) }?;
    // Lower case, as in /sys.
    let pci = library::text(&pci).to_lowercase();
    let mut uuid = hipUUID { bytes: [0; 16] };
    // SAFETY: it writes one UUID.
    let uuid = match unsafe { table.hipDeviceGetUuid(&mut uuid, ordinal) } {
        Ok(()) if uuid.bytes != [0; 16] => library::uuid(uuid.bytes.map(|byte| byte as u8)),
        _ => pci.clone(),
    };
    let mut total = 0;
    // SAFETY: it writes one size.
    unsafe { table.hipDeviceTotalMem(&mut total, ordinal) }?;
    let target = api.architecture(ordinal)?;
    let clock = library::count(attribute(hipDeviceAttribute_t::hipDeviceAttributeWallClockRate));
    let khz = if clock == 0 { WALL_CLOCK_KHZ } else { clock };
    let info = DeviceInfo {
        name: library::text(&name),
        runtime: NAME.to_owned(),
        uuid,
        numa: library::numa_node(&pci),
        pci,
        architecture: target.split(':').next().unwrap_or(&target).to_owned(),
        memory_total: Bytes(total as u64),
        cache: Bytes(library::count(attribute(hipDeviceAttribute_t::hipDeviceAttributeL2CacheSize)).into()),
        compute_units: library::count(attribute(hipDeviceAttribute_t::hipDeviceAttributeMultiprocessorCount)),
        warp_size: library::count(attribute(hipDeviceAttribute_t::hipDeviceAttributeWarpSize)),
        memory_kinds: memory::kinds(api, ordinal, attribute(hipDeviceAttribute_t::hipDeviceAttributeManagedMemory)),
        cpu_access: attribute(hipDeviceAttribute_t::hipDeviceAttributeIsLargeBar) == Some(1),
        exportable: true,
        kernels_absent: images::get(NAME, Vendor::Hip, &target, KernelName::Transfer.into())
            .err()
            .map(|err| err.to_string()),
    };
    Ok(Slot { info, target, ns_per_tick: 1e6 / f64::from(khz), stream: OnceLock::new() })
}

impl Driver for HipDriver {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, Error> {
        Ok(self.devices.iter().map(|slot| slot.info.clone()).collect())
    }

    fn memory_free(&self, device: DeviceId) -> Result<Bytes, Error> {
        self.enter(device)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: it writes two sizes.
        let asked = unsafe { self.api.table.hipMemGetInfo(&mut free, &mut total) };
        self.told(asked, || format!("ask for the free memory of device {}", device.0))?;
        Ok(Bytes(free as u64))
    }

    fn enable_peer(&self, device: DeviceId, peer: DeviceId) -> Result<(), Error> {
        self.enter(device)?;
        self.slot(peer)?;
        let what = || format!("let device {} reach memory of device {}", device.0, peer.0);
        let (here, there) = (device.0 as c_int, peer.0 as c_int);
        let mut can = 0;
        // SAFETY: it writes one integer.
        self.told(unsafe { self.api.table.hipDeviceCanAccessPeer(&mut can, here, there) }, what)?;
        if can == 0 {
            return Err(Error::new(format!("{}: they have no peer access to each other", what())));
        }
        // SAFETY: it takes numbers only.
        match unsafe { self.api.table.hipDeviceEnablePeerAccess(there, 0) } {
            Err(Refusal { status: Some(ffi::PEER_ACCESS_ALREADY_ENABLED), .. }) => Ok(()),
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
        self.streams.insert(device, raw).map(StreamId).inspect_err(|_| {
            // SAFETY: the stream was just created, and nobody else knows it.
            let _ = unsafe { self.api.table.hipStreamDestroy(raw) };
        })
    }

    fn stream_destroy(&self, stream: StreamId) -> Result<(), Error> {
        let (device, raw) = self.streams.remove(stream.0)?;
        self.enter(device)?;
        // SAFETY: it was live until now, and its number is gone.
        let destroyed = unsafe { self.api.table.hipStreamDestroy(raw) };
        self.told(destroyed, || format!("destroy a stream of device {}", device.0))
    }

    fn stream_wait(&self, stream: StreamId) -> Result<(), Error> {
        let (device, raw) = self.stream(stream)?;
        // SAFETY: the stream is live.
        let waited = unsafe { self.api.table.hipStreamSynchronize(raw) };
        self.told(waited, || format!("wait for a stream of device {}", device.0))
    }

    fn event_create(&self, device: DeviceId) -> Result<EventId, Error> {
        self.enter(device)?;
        let mut raw: hipEvent_t = ptr::null_mut();
        // SAFETY: it writes one handle.
        let created = unsafe { self.api.table.hipEventCreate(&mut raw) };
        self.told(created, || format!("create an event on device {}", device.0))?;
        self.events.insert(device, raw).map(EventId).inspect_err(|_| {
            // SAFETY: the event was just created, and nobody else knows it.
            let _ = unsafe { self.api.table.hipEventDestroy(raw) };
        })
    }

    fn event_destroy(&self, event: EventId) -> Result<(), Error> {
        let (device, raw) = self.events.remove(event.0)?;
        self.enter(device)?;
        // SAFETY: it was live until now, and its number is gone.
        let destroyed = unsafe { self.api.table.hipEventDestroy(raw) };
        self.told(destroyed, || format!("destroy an event of device {}", device.0))
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> Result<(), Error> {
        let (owner, event) = self.events.get(event.0)?;
        let (device, stream) = self.stream(stream)?;
        checks::one_device(owner, device)?;
        // SAFETY: both are live and of one device.
        let recorded = unsafe { self.api.table.hipEventRecord(event, stream) };
        self.told(recorded, || format!("record an event on device {}", device.0))
    }

    fn event_elapsed_ns(&self, start: EventId, stop: EventId) -> Result<f64, Error> {
        let (device, start) = self.events.get(start.0)?;
        let (_, stop) = self.events.get(stop.0)?;
        self.enter(device)?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are live; it writes one float.
        let asked = unsafe { self.api.table.hipEventElapsedTime(&mut milliseconds, start, stop) };
        self.told(asked, || format!("take the time between two events of device {}", device.0))?;
        Ok(f64::from(milliseconds) * 1e6)
    }

    fn copy(&self, stream: StreamId, dst: Address, src: Address, bytes: Bytes) -> Result<(), Error> {
        let (device, stream) = self.stream(stream)?;
        // SAFETY: the owners of the ranges keep them mapped until the stream has been waited for.
        let queued = unsafe {
            self.api.table.hipMemcpyAsync(
                pointer(dst.0),
                pointer(src.0),
                bytes.0 as usize,
                hipMemcpyKind::hipMemcpyDefault,
                stream,
            )
        };
        self.told(queued, || format!("copy {bytes} by device {} from {:#x} to {:#x}", device.0, src.0, dst.0))
    }

    fn fill(&self, stream: StreamId, dst: Address, byte: u8, bytes: Bytes) -> Result<(), Error> {
        let (device, stream) = self.stream(stream)?;
        // SAFETY: as for `copy`.
        let queued = unsafe { self.api.table.hipMemsetAsync(pointer(dst.0), byte.into(), bytes.0 as usize, stream) };
        self.told(queued, || format!("fill {bytes} at {:#x} of device {}", dst.0, device.0))
    }

    fn write(&self, device: DeviceId, dst: Address, src: &[u8]) -> Result<(), Error> {
        let stream = self.own_stream(device)?;
        let kind = hipMemcpyKind::hipMemcpyHostToDevice;
        // SAFETY: `src` is borrowed, and the owner of the memory keeps it mapped.
        let copied = unsafe { self.copy_now(stream, pointer(dst.0), src.as_ptr().cast(), src.len(), kind) };
        self.told(copied, || format!("write {} bytes to {:#x} of device {}", src.len(), dst.0, device.0))
    }

    fn read(&self, device: DeviceId, src: Address, dst: &mut [u8]) -> Result<(), Error> {
        let stream = self.own_stream(device)?;
        let kind = hipMemcpyKind::hipMemcpyDeviceToHost;
        // SAFETY: `dst` is borrowed, and the owner of the memory keeps it mapped.
        let copied = unsafe { self.copy_now(stream, dst.as_mut_ptr().cast(), pointer(src.0), dst.len(), kind) };
        self.told(copied, || format!("read {} bytes from {:#x} of device {}", dst.len(), src.0, device.0))
    }

    fn load_kernel(&self, device: DeviceId, kernel: &KernelSpec) -> Result<KernelId, Error> {
        self.enter(device)?;
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = loaded.get(&(device, *kernel)) {
            return Ok(module.kernel);
        }
        let module = self.load(device, self.slot(device)?, *kernel)?;
        Ok(loaded.entry((device, *kernel)).or_insert(module).kernel)
    }

    fn launch(&self, stream: StreamId, kernel: KernelId, blocks: u32, threads: u32, args: &[u8]) -> Result<(), Error> {
        let (device, stream) = self.stream(stream)?;
        let (owner, function): (_, hipFunction_t) =
            self.kernels.get(checks::launchable(kernel, blocks, threads, args)?)?;
        checks::loaded_for(owner, device)?;
        let mut argument: *mut c_void = args.as_ptr().cast_mut().cast();
        // SAFETY: the kernel takes one struct by value, of the size that was checked, which the
        // driver copies before it returns; what the struct points to is kept by the owners until
        // the stream has been waited for.
        let launched = unsafe {
            self.api.table.hipModuleLaunchKernel(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                &mut argument,
                ptr::null_mut(),
            )
        };
        self.told(launched, || {
            format!("launch a kernel on device {} with {blocks} blocks of {threads} threads", device.0)
        })
    }

    fn ns_per_tick(&self, device: DeviceId) -> Result<f64, Error> {
        self.slot(device).map(|slot| slot.ns_per_tick)
    }
}

impl Drop for HipDriver {
    /// Nothing is left here but what nobody gave back. A failure is not reported: it repeats what
    /// the run has said already.
    fn drop(&mut self) {
        for (address, allocation) in self.held.leftovers() {
            tracing::warn!("{} of device {} were not freed", allocation.bytes, allocation.device.0);
            if self.enter(allocation.device).is_ok() {
                ipc::Export::forget(address);
                // SAFETY: it was allocated here and not freed.
                let _ = unsafe { self.api.table.hipFree(pointer(address)) };
            }
        }
        let loaded = std::mem::take(self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner));
        for (device, slot) in self.devices.iter().enumerate() {
            if self.enter(DeviceId(device as u32)).is_err() {
                continue;
            }
            for module in loaded.iter().filter(|((owner, _), _)| owner.0 as usize == device).map(|(_, module)| module) {
                // SAFETY: nothing launches it any more.
                let _ = unsafe { self.api.table.hipModuleUnload(module.raw) };
            }
            if let Some(Ok(stream)) = slot.stream.get() {
                // SAFETY: nothing uses it any more.
                let _ = unsafe { self.api.table.hipStreamDestroy(stream.0) };
            }
        }
    }
}

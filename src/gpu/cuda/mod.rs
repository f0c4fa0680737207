//! NVIDIA devices, by the CUDA driver API.

mod ffi;
mod memory;

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use self::ffi::{
    Api, CUcontext, CUdevice, CUdevice_attribute, CUevent, CUfunction, CUmodule, CUstream, CUstream_flags, CUuuid,
};
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

const NAME: &str = "cuda";

/// `%globaltimer` counts nanoseconds (PTX ISA, special registers).
const NS_PER_TICK: f64 = 1.0;

/// The NVIDIA devices that this process sees.
pub struct CudaDriver {
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
    raw: CUdevice,
    info: DeviceInfo,
    context: OnceLock<Result<Context, Error>>,
}

/// The primary context, shared with every other user of the device in this process.
struct Context {
    raw: CUcontext,
    /// For what must be there when a call returns.
    stream: CUstream,
}

struct Module {
    raw: CUmodule,
    kernel: KernelId,
}

// SAFETY: the handles are names of objects that the driver itself guards; any thread may use them
// (CUDA driver API: contexts may be current to several threads at once).
unsafe impl Send for Context {}
// SAFETY: as for Send.
unsafe impl Sync for Context {}
// SAFETY: as for Context.
unsafe impl Send for Module {}

impl CudaDriver {
    /// # Errors
    /// If there is no driver library or no device (exit code 7), or a device cannot be described.
    pub fn open() -> Result<CudaDriver, Error> {
        let api = Api::open().map_err(|err| err.with_exit(ExitCode::NothingRan))?;
        let nothing = |refusal| {
            api.explain(refusal, format_args!("{} finds no device", api.library())).with_exit(ExitCode::NothingRan)
        };
        // SAFETY: flags must be 0; it may be called again.
        unsafe { api.table.cuInit(0) }.map_err(nothing)?;
        let mut count = 0;
        // SAFETY: it writes one integer.
        unsafe { api.table.cuDeviceGetCount(&mut count) }.map_err(nothing)?;
        if count < 1 {
            return Err(nothing(Refusal { call: "cuDeviceGetCount", status: Some(ffi::NO_DEVICE) }));
        }
        let devices = (0..count).map(|ordinal| {
            describe(api, ordinal).map_err(|refusal| api.explain(refusal, format_args!("describe device {ordinal}")))
        });
        Ok(CudaDriver {
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
            Error::new(format!("device {} does not exist: CUDA sees {count}, numbered from 0", device.0))
        })
    }

    /// Makes the device's context the one of this thread.
    fn enter(&self, device: DeviceId) -> Result<&Context, Error> {
        let slot = self.slot(device)?;
        let context = slot.context.get_or_init(|| self.context(device, slot.raw)).as_ref().map_err(Error::clone)?;
        // SAFETY: the context is retained until the driver is dropped.
        let entered = unsafe { self.api.table.cuCtxSetCurrent(context.raw) };
        self.told(entered, || format!("enter the context of device {}", device.0))?;
        Ok(context)
    }

    fn context(&self, device: DeviceId, raw: CUdevice) -> Result<Context, Error> {
        let what = || format!("make a context on device {}", device.0);
        let mut context = ptr::null_mut();
        // SAFETY: it writes one handle; `drop` releases it.
        self.told(unsafe { self.api.table.cuDevicePrimaryCtxRetain(&mut context, raw) }, what)?;
        // SAFETY: the context was just retained.
        self.told(unsafe { self.api.table.cuCtxSetCurrent(context) }, what)?;
        Ok(Context { raw: context, stream: self.new_stream(device)? })
    }

    /// In the current context.
    fn new_stream(&self, device: DeviceId) -> Result<CUstream, Error> {
        let mut stream = ptr::null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: it writes one handle.
        let created = unsafe { self.api.table.cuStreamCreate(&mut stream, flags) };
        self.told(created, || format!("create a stream on device {}", device.0))?;
        Ok(stream)
    }

    /// Puts into words what did not succeed.
    fn told<W: fmt::Display>(&self, result: Result<(), Refusal>, what: impl FnOnce() -> W) -> Result<(), Error> {
        result.map_err(|refusal| self.api.explain(refusal, what()))
    }

    fn stream(&self, stream: StreamId) -> Result<(DeviceId, CUstream), Error> {
        let (device, raw) = self.streams.get(stream.0)?;
        self.enter(device)?;
        Ok((device, raw))
    }

    fn load(&self, device: DeviceId, slot: &Slot, spec: KernelSpec) -> Result<Module, Error> {
        let image = images::get(NAME, Vendor::Cuda, &slot.info.architecture, spec)?;
        let what = || format!("load kernel {} on device {}", image.entry, device.0);
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the bytes are a whole image (PTX with its final zero), which the driver copies.
        self.told(unsafe { self.api.table.cuModuleLoadData(&mut module, image.bytes.as_ptr().cast()) }, what)?;
        let entry = CString::new(image.entry.as_str()).map_err(|_| Error::new("a kernel's name holds a zero"))?;
        // SAFETY: the module was just loaded, the name ends with a zero.
        let found = unsafe { self.api.table.cuModuleGetFunction(&mut function, module, entry.as_ptr()) };
        let kernel = self.told(found, what).and_then(|()| self.kernels.insert(device, function));
        let kernel = kernel.inspect_err(|_| {
            // SAFETY: nobody knows the module yet.
            let _ = unsafe { self.api.table.cuModuleUnload(module) };
        })?;
        Ok(Module { raw: module, kernel: checks::kernel_id(kernel, spec.name) })
    }
}

/// Facts of a device; makes no context.
fn describe(api: &Api, ordinal: c_int) -> Result<Slot, Refusal> {
    let table = &api.table;
    let mut raw = 0;
    // SAFETY: it writes one device.
    unsafe { table.cuDeviceGet(&mut raw, ordinal) }?;
    let attribute = |which: CUdevice_attribute| {
        let mut value = 0;
        // SAFETY: it writes one integer.
        unsafe { table.cuDeviceGetAttribute(&mut value, which, raw) }.ok().map(|()| value)
    };
    let mut name = [0u8; 256];
    // SAFETY: it writes at most as many bytes as it is told.
    unsafe { table.cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, raw) }?;
    let mut pci = [0u8; 32];
    // SAFETY: as above.
    unsafe { table.cuDeviceGetPCIBusId(pci.as_mut_ptr().cast(), pci.len() as c_int, raw) }?;
    // Lower case, as in /sys.
    let pci = library::text(&pci).to_lowercase();
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: it writes one UUID.
    let uuid = match unsafe { table.cuDeviceGetUuid_v2(&mut uuid, raw) } {
        Ok(()) => library::uuid(uuid.bytes.map(|byte| byte as u8)),
        Err(_) => pci.clone(),
    };
    let mut total = 0;
    // SAFETY: it writes one size.
    unsafe { table.cuDeviceTotalMem_v2(&mut total, raw) }?;
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    let architecture = format!("sm_{}{}", library::count(major), library::count(minor));
    let mut memory_kinds = vec![MemKind::Device];
    if attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY) == Some(1) {
        memory_kinds.push(MemKind::Managed);
    }
    let info = DeviceInfo {
        name: library::text(&name),
        runtime: NAME.to_owned(),
        uuid,
        numa: library::numa_node(&pci),
        pci,
        memory_total: Bytes(total as u64),
        cache: Bytes(library::count(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)).into()),
        compute_units: library::count(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)),
        warp_size: library::count(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)),
        memory_kinds,
        cpu_access: false,
        // Integrated devices (Tegra) have no IPC handles for memory.
        exportable: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED) == Some(0),
        kernels_absent: images::get(NAME, Vendor::Cuda, &architecture, KernelName::Transfer.into())
            .err()
            .map(|err| err.to_string()),
        architecture,
    };
    Ok(Slot { raw, info, context: OnceLock::new() })
}

impl Driver for CudaDriver {
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
        let asked = unsafe { self.api.table.cuMemGetInfo_v2(&mut free, &mut total) };
        self.told(asked, || format!("ask for the free memory of device {}", device.0))?;
        Ok(Bytes(free as u64))
    }

    fn enable_peer(&self, device: DeviceId, peer: DeviceId) -> Result<(), Error> {
        let (here, there) = (self.slot(device)?.raw, self.slot(peer)?.raw);
        let what = || format!("let device {} reach memory of device {}", device.0, peer.0);
        let mut can = 0;
        // SAFETY: it writes one integer.
        self.told(unsafe { self.api.table.cuDeviceCanAccessPeer(&mut can, here, there) }, what)?;
        if can == 0 {
            return Err(Error::new(format!("{}: they have no peer access to each other", what())));
        }
        let there = self.enter(peer)?.raw;
        self.enter(device)?;
        // SAFETY: the context is retained until the driver is dropped.
        match unsafe { self.api.table.cuCtxEnablePeerAccess(there, 0) } {
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
            let _ = unsafe { self.api.table.cuStreamDestroy_v2(raw) };
        })
    }

    fn stream_destroy(&self, stream: StreamId) -> Result<(), Error> {
        let (device, raw) = self.streams.remove(stream.0)?;
        self.enter(device)?;
        // SAFETY: it was live until now, and its number is gone.
        let destroyed = unsafe { self.api.table.cuStreamDestroy_v2(raw) };
        self.told(destroyed, || format!("destroy a stream of device {}", device.0))
    }

    fn stream_wait(&self, stream: StreamId) -> Result<(), Error> {
        let (device, raw) = self.stream(stream)?;
        // SAFETY: the stream is live.
        let waited = unsafe { self.api.table.cuStreamSynchronize(raw) };
        self.told(waited, || format!("wait for a stream of device {}", device.0))
    }

    fn event_create(&self, device: DeviceId) -> Result<EventId, Error> {
        self.enter(device)?;
        let mut raw: CUevent = ptr::null_mut();
        // SAFETY: it writes one handle; flags 0 keep the time.
        let created = unsafe { self.api.table.cuEventCreate(&mut raw, 0) };
        self.told(created, || format!("create an event on device {}", device.0))?;
        self.events.insert(device, raw).map(EventId).inspect_err(|_| {
            // SAFETY: the event was just created, and nobody else knows it.
            let _ = unsafe { self.api.table.cuEventDestroy_v2(raw) };
        })
    }

    fn event_destroy(&self, event: EventId) -> Result<(), Error> {
        let (device, raw) = self.events.remove(event.0)?;
        self.enter(device)?;
        // SAFETY: it was live until now, and its number is gone.
        let destroyed = unsafe { self.api.table.cuEventDestroy_v2(raw) };
        self.told(destroyed, || format!("destroy an event of device {}", device.0))
    }

    fn event_record(&self, event: EventId, stream: StreamId) -> Result<(), Error> {
        let (owner, event) = self.events.get(event.0)?;
        let (device, stream) = self.stream(stream)?;
        checks::one_device(owner, device)?;
        // SAFETY: both are live and of one device.
        let recorded = unsafe { self.api.table.cuEventRecord(event, stream) };
        self.told(recorded, || format!("record an event on device {}", device.0))
    }

    fn event_elapsed_ns(&self, start: EventId, stop: EventId) -> Result<f64, Error> {
        let (device, start) = self.events.get(start.0)?;
        let (_, stop) = self.events.get(stop.0)?;
        self.enter(device)?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are live; it writes one float.
        let asked = unsafe { self.api.table.cuEventElapsedTime(&mut milliseconds, start, stop) };
        self.told(asked, || format!("take the time between two events of device {}", device.0))?;
        Ok(f64::from(milliseconds) * 1e6)
    }

    fn copy(&self, stream: StreamId, dst: Address, src: Address, bytes: Bytes) -> Result<(), Error> {
        let (device, stream) = self.stream(stream)?;
        // SAFETY: the owners of the ranges keep them mapped until the stream has been waited for.
        let queued = unsafe { self.api.table.cuMemcpyAsync(dst.0, src.0, bytes.0 as usize, stream) };
        self.told(queued, || format!("copy {bytes} by device {} from {:#x} to {:#x}", device.0, src.0, dst.0))
    }

    fn fill(&self, stream: StreamId, dst: Address, byte: u8, bytes: Bytes) -> Result<(), Error> {
        let (device, stream) = self.stream(stream)?;
        // SAFETY: as for `copy`.
        let queued = unsafe { self.api.table.cuMemsetD8Async(dst.0, byte, bytes.0 as usize, stream) };
        self.told(queued, || format!("fill {bytes} at {:#x} of device {}", dst.0, device.0))
    }

    fn write(&self, device: DeviceId, dst: Address, src: &[u8]) -> Result<(), Error> {
        let stream = self.enter(device)?.stream;
        let what = || format!("write {} bytes to {:#x} of device {}", src.len(), dst.0, device.0);
        // SAFETY: `src` outlives the copy, which is waited for below.
        let queued = unsafe { self.api.table.cuMemcpyHtoDAsync_v2(dst.0, src.as_ptr().cast(), src.len(), stream) };
        // A copy from pageable memory may return before the last byte is there.
        // SAFETY: the stream lives as long as the context.
        let waited = unsafe { self.api.table.cuStreamSynchronize(stream) };
        self.told(queued.and(waited), what)
    }

    fn read(&self, device: DeviceId, src: Address, dst: &mut [u8]) -> Result<(), Error> {
        let stream = self.enter(device)?.stream;
        let what = format_args!("read {} bytes from {:#x} of device {}", dst.len(), src.0, device.0).to_string();
        // SAFETY: `dst` is borrowed until the copy has been waited for.
        let queued = unsafe { self.api.table.cuMemcpyDtoHAsync_v2(dst.as_mut_ptr().cast(), src.0, dst.len(), stream) };
        // SAFETY: the stream lives as long as the context.
        let waited = unsafe { self.api.table.cuStreamSynchronize(stream) };
        self.told(queued.and(waited), || what)
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
        let (owner, function): (_, CUfunction) =
            self.kernels.get(checks::launchable(kernel, blocks, threads, args)?)?;
        checks::loaded_for(owner, device)?;
        let mut argument: *mut c_void = args.as_ptr().cast_mut().cast();
        // SAFETY: the kernel takes one struct by value, of the size that was checked, which the
        // driver copies before it returns; what the struct points to is kept by the owners until
        // the stream has been waited for.
        let launched = unsafe {
            self.api.table.cuLaunchKernel(
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
        self.slot(device).map(|_| NS_PER_TICK)
    }
}

impl Drop for CudaDriver {
    /// Nothing is left here but what nobody gave back. A failure is not reported: it repeats what
    /// the run has said already.
    fn drop(&mut self) {
        for (address, allocation) in self.held.leftovers() {
            tracing::warn!("{} of device {} were not freed", allocation.bytes, allocation.device.0);
            if self.enter(allocation.device).is_ok() {
                ipc::Export::forget(address);
                // SAFETY: it was allocated here and not freed.
                let _ = unsafe { self.api.table.cuMemFree_v2(address) };
            }
        }
        let loaded = std::mem::take(self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner));
        for (device, slot) in self.devices.iter().enumerate() {
            let Some(Ok(context)) = slot.context.get() else { continue };
            // SAFETY: the context is retained until below.
            let _ = unsafe { self.api.table.cuCtxSetCurrent(context.raw) };
            for module in loaded.iter().filter(|((owner, _), _)| owner.0 as usize == device).map(|(_, module)| module) {
                // SAFETY: nothing launches it any more.
                let _ = unsafe { self.api.table.cuModuleUnload(module.raw) };
            }
            // SAFETY: nothing uses it any more.
            let _ = unsafe { self.api.table.cuStreamDestroy_v2(context.stream) };
            // SAFETY: a thread without a context is fine.
            let _ = unsafe { self.api.table.cuCtxSetCurrent(ptr::null_mut()) };
            // SAFETY: retained once, and nothing of it is used any more.
            let _ = unsafe { self.api.table.cuDevicePrimaryCtxRelease_v2(slot.raw) };
        }
    }
}

//! NVIDIA devices, by the CUDA driver API.

mod ffi;

use std::ffi::{CStr, c_int, c_void};
use std::path::Path;
use std::{fmt, ptr};

use self::ffi::{
    Api, CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CUcontext, CUdevice, CUdevice_attribute,
    CUfunction_attribute, CUipcMem_flags, CUipcMemHandle, CUmemAttach_flags, CUmemLocation, CUmemLocationType,
    CUmemcpyAttributes, CUmemcpySrcAccessOrder, CUstream_flags, CUuuid,
};
use super::images;
use super::ipc::IPC_BYTES;
use super::library::{self, Refusal};
use super::nvml::Nvml;
use super::peaks::{self, Peaks, memory_gbps};
use super::rtc::Vendor;
use super::runtime::RuntimeDriver;
use super::runtime::calls::{Calls, Raw, Shape};
use super::{CopyBatch, DeviceInfo, KernelName};
use crate::error::Error;
use crate::place::MemKind;
use crate::units::Bytes;

/// The NVIDIA devices that this process sees.
pub type CudaDriver = RuntimeDriver<Api>;

const NAME: &str = "cuda";

/// Double data rate (CUDA samples, deviceQuery: 2 × clock × bus width).
const TRANSFERS_PER_CLOCK: u32 = 2;

/// `%globaltimer` counts nanoseconds (PTX ISA, special registers).
const NS_PER_TICK: f64 = 1.0;

/// The primary context of a device, shared with every other user of it in this process.
pub struct Context(CUcontext);

// SAFETY: a context is the name of an object that the driver itself guards; it may be current to
// several threads at once (CUDA driver API).
unsafe impl Send for Context {}
// SAFETY: as for Send.
unsafe impl Sync for Context {}

impl Calls for Api {
    const NAME: &'static str = NAME;
    const TITLE: &'static str = "CUDA";
    const VENDOR: Vendor = Vendor::Cuda;
    const COUNT: &'static str = "cuDeviceGetCount";
    const ENTER: &'static str = "enter the context of";
    const NO_DEVICE: u32 = ffi::NO_DEVICE;
    const OUT_OF_MEMORY: u32 = ffi::OUT_OF_MEMORY;
    const PEER_ACCESS_ALREADY_ENABLED: u32 = ffi::PEER_ACCESS_ALREADY_ENABLED;

    type Device = CUdevice;
    type Context = Context;

    fn open() -> Result<&'static Api, Error> {
        Api::load_once()
    }

    fn library(&self) -> &str {
        self.library_name()
    }

    fn explain(&self, refusal: Refusal, what: &dyn fmt::Display) -> Error {
        self.in_words(refusal, what)
    }

    fn count(&self) -> Result<i32, Refusal> {
        // SAFETY: flags must be 0; it may be called again.
        unsafe { self.table.cuInit(0) }?;
        let mut count = 0;
        // SAFETY: it writes one integer.
        unsafe { self.table.cuDeviceGetCount(&mut count) }?;
        Ok(count)
    }

    fn describe(&self, ordinal: i32) -> Result<(DeviceInfo, CUdevice), Refusal> {
        describe(self, ordinal)
    }

    fn target<'a>(info: &'a DeviceInfo, _: &'a CUdevice) -> &'a str {
        &info.architecture
    }

    fn ns_per_tick(_: &CUdevice) -> f64 {
        NS_PER_TICK
    }

    fn context(&self, device: &CUdevice) -> Result<Context, Refusal> {
        let mut context = ptr::null_mut();
        // SAFETY: it writes one handle; `release` gives it back.
        unsafe { self.table.cuDevicePrimaryCtxRetain(&mut context, *device) }?;
        Ok(Context(context))
    }

    fn enter(&self, _: &CUdevice, context: &Context) -> Result<(), Refusal> {
        // SAFETY: a context is retained until the driver is dropped.
        unsafe { self.table.cuCtxSetCurrent(context.0) }
    }

    unsafe fn release(&self, device: &CUdevice, _: &Context) {
        // SAFETY: a thread without a context is fine.
        let _ = unsafe { self.table.cuCtxSetCurrent(ptr::null_mut()) };
        // SAFETY: retained once, and the caller uses nothing of it any more.
        let _ = unsafe { self.table.cuDevicePrimaryCtxRelease_v2(*device) };
    }

    fn wait_device(&self) -> Result<(), Refusal> {
        // SAFETY: it waits for the current context.
        unsafe { self.table.cuCtxSynchronize() }
    }

    fn can_access_peer(&self, device: &CUdevice, peer: &CUdevice) -> Result<bool, Refusal> {
        let mut can = 0;
        // SAFETY: it writes one integer.
        unsafe { self.table.cuDeviceCanAccessPeer(&mut can, *device, *peer) }?;
        Ok(can != 0)
    }

    fn enable_peer(&self, _: &CUdevice, context: &Context) -> Result<(), Refusal> {
        // SAFETY: a context is retained until the driver is dropped.
        unsafe { self.table.cuCtxEnablePeerAccess(context.0, 0) }
    }

    fn memory_free(&self) -> Result<u64, Refusal> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: it writes two sizes.
        unsafe { self.table.cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok(free as u64)
    }

    fn allocate(&self, kind: MemKind, bytes: usize) -> Result<u64, Refusal> {
        let mut address = 0;
        let global = CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
        match kind {
            // SAFETY: it writes one address.
            MemKind::Managed => unsafe { self.table.cuMemAllocManaged(&mut address, bytes, global) },
            // SAFETY: it writes one address.
            _ => unsafe { self.table.cuMemAlloc_v2(&mut address, bytes) },
        }?;
        Ok(address)
    }

    unsafe fn free(&self, _: MemKind, address: u64) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuMemFree_v2(address) }
    }

    unsafe fn allocation_start(&self, address: u64) -> Result<u64, Refusal> {
        let (mut start, mut length) = (0, 0);
        // SAFETY: it writes an address and a size; the rest is passed on to the caller.
        unsafe { self.table.cuMemGetAddressRange_v2(&mut start, &mut length, address) }?;
        Ok(start)
    }

    unsafe fn ipc_handle(&self, address: u64) -> Result<[u8; IPC_BYTES], Refusal> {
        let mut handle = CUipcMemHandle { reserved: [0; _] };
        // SAFETY: it writes one handle; the rest is passed on to the caller.
        unsafe { self.table.cuIpcGetMemHandle(&mut handle, address) }?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    fn ipc_open(&self, handle: [u8; IPC_BYTES]) -> Result<u64, Refusal> {
        let handle = CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        let lazy = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut start = 0;
        // SAFETY: it writes one address, and checks the handle.
        unsafe { self.table.cuIpcOpenMemHandle_v2(&mut start, handle, lazy) }?;
        Ok(start)
    }

    unsafe fn ipc_close(&self, start: u64) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuIpcCloseMemHandle(start) }
    }

    unsafe fn host_register(&self, host: *mut c_void, bytes: usize) -> Result<(), Refusal> {
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuMemHostRegister_v2(host, bytes, flags) }
    }

    unsafe fn host_address(&self, host: *mut c_void) -> Result<u64, Refusal> {
        let mut there = 0;
        // SAFETY: it writes one address; the rest is passed on to the caller.
        unsafe { self.table.cuMemHostGetDevicePointer_v2(&mut there, host, 0) }?;
        Ok(there)
    }

    unsafe fn host_unregister(&self, host: *mut c_void) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuMemHostUnregister(host) }
    }

    fn stream_create(&self) -> Result<Raw, Refusal> {
        let mut stream = ptr::null_mut();
        // SAFETY: it writes one handle.
        unsafe { self.table.cuStreamCreate(&mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32) }?;
        Ok(Raw(stream.cast()))
    }

    unsafe fn stream_destroy(&self, stream: Raw) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuStreamDestroy_v2(stream.0.cast()) }
    }

    unsafe fn stream_wait(&self, stream: Raw) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuStreamSynchronize(stream.0.cast()) }
    }

    fn event_create(&self) -> Result<Raw, Refusal> {
        let mut event = ptr::null_mut();
        // SAFETY: it writes one handle; flags 0 keep the time.
        unsafe { self.table.cuEventCreate(&mut event, 0) }?;
        Ok(Raw(event.cast()))
    }

    unsafe fn event_destroy(&self, event: Raw) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuEventDestroy_v2(event.0.cast()) }
    }

    unsafe fn event_record(&self, event: Raw, stream: Raw) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuEventRecord(event.0.cast(), stream.0.cast()) }
    }

    unsafe fn event_elapsed_ms(&self, start: Raw, stop: Raw) -> Result<f32, Refusal> {
        let mut milliseconds = 0.0;
        // SAFETY: it writes one float; the rest is passed on to the caller.
        unsafe { self.table.cuEventElapsedTime(&mut milliseconds, start.0.cast(), stop.0.cast()) }?;
        Ok(milliseconds)
    }

    unsafe fn copy(&self, stream: Raw, dst: u64, src: u64, bytes: usize) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuMemcpyAsync(dst, src, bytes, stream.0.cast()) }
    }

    unsafe fn copy_batch(&self, stream: Raw, copies: &CopyBatch) -> Result<(), Refusal> {
        let nowhere = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        // One set of attributes, from the first copy on: the sources are read in the order of the stream.
        let mut attributes = CUmemcpyAttributes {
            srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let (mut first, mut failed) = (0, usize::MAX);
        let CopyBatch { dsts, srcs, sizes } = copies;
        // SAFETY: it reads the arrays before it returns; the rest is passed on to the caller.
        unsafe {
            self.table.cuMemcpyBatchAsync(
                dsts.as_ptr().cast_mut(),
                srcs.as_ptr().cast_mut(),
                sizes.as_ptr().cast_mut(),
                sizes.len(),
                &mut attributes,
                &mut first,
                1,
                &mut failed,
                stream.0.cast(),
            )
        }
    }

    unsafe fn copy_in(&self, stream: Raw, dst: u64, src: &[u8]) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuMemcpyHtoDAsync_v2(dst, src.as_ptr().cast(), src.len(), stream.0.cast()) }
    }

    unsafe fn copy_out(&self, stream: Raw, dst: &mut [u8], src: u64) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuMemcpyDtoHAsync_v2(dst.as_mut_ptr().cast(), src, dst.len(), stream.0.cast()) }
    }

    unsafe fn fill(&self, stream: Raw, dst: u64, byte: u8, bytes: usize) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuMemsetD8Async(dst, byte, bytes, stream.0.cast()) }
    }

    unsafe fn module_load(&self, image: &[u8]) -> Result<Raw, Refusal> {
        let mut module = ptr::null_mut();
        // SAFETY: it writes one handle; the rest is passed on to the caller.
        unsafe { self.table.cuModuleLoadData(&mut module, image.as_ptr().cast()) }?;
        Ok(Raw(module.cast()))
    }

    unsafe fn module_unload(&self, module: Raw) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuModuleUnload(module.0.cast()) }
    }

    unsafe fn module_function(&self, module: Raw, name: &CStr) -> Result<Raw, Refusal> {
        let mut function = ptr::null_mut();
        // SAFETY: it writes one handle; the rest is passed on to the caller.
        unsafe { self.table.cuModuleGetFunction(&mut function, module.0.cast(), name.as_ptr()) }?;
        Ok(Raw(function.cast()))
    }

    unsafe fn allow_shared(&self, function: Raw, bytes: u32) -> Result<(), Refusal> {
        let largest = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: passed on to the caller.
        unsafe { self.table.cuFuncSetAttribute(function.0.cast(), largest, bytes as c_int) }
    }

    unsafe fn launch(&self, stream: Raw, function: Raw, shape: Shape, args: &[u8]) -> Result<(), Refusal> {
        let Shape { blocks, threads, shared_bytes } = shape;
        let mut argument: *mut c_void = args.as_ptr().cast_mut().cast();
        let (function, stream, extra) = (function.0.cast(), stream.0.cast(), ptr::null_mut());
        // SAFETY: passed on to the caller.
        unsafe {
            self.table.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, &mut argument, extra)
        }
    }
}

/// Facts of a device; makes no context.
fn describe(api: &Api, ordinal: c_int) -> Result<(DeviceInfo, CUdevice), Refusal> {
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
        memory_total: Bytes(total as u64),
        cache: Bytes(library::count(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)).into()),
        compute_units: library::count(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)),
        warp_size: library::count(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE)),
        memory_kinds,
        // Page-locked host memory is coherent on every device (CUDA driver API, unified addressing).
        host_kinds: Vec::new(),
        cpu_access: false,
        // Integrated devices (Tegra) have no IPC handles for memory.
        exportable: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED) == Some(0),
        // Of AMD alone.
        xccs: 0,
        cu_masks: false,
        no_cu_copies: false,
        kernels_absent: images::get(NAME, Vendor::Cuda, &architecture, KernelName::Transfer.into())
            .err()
            .map(|err| err.to_string()),
        batch_absent: (!table.has("cuMemcpyBatchAsync"))
            .then(|| "the NVIDIA driver is older than CUDA 12.8, which brought copies in batches".to_owned()),
        bulk_absent: match library::count(major) {
            ..9 => Some(format!("bulk asynchronous copies came with sm_90, and this is {architecture}")),
            _ => {
                images::get(NAME, Vendor::Cuda, &architecture, KernelName::Bulk.into()).err().map(|err| err.to_string())
            }
        },
        peaks: peaks(attribute, &pci),
        pci,
        architecture,
    };
    Ok((info, raw))
}

fn peaks(attribute: impl Fn(CUdevice_attribute) -> Option<c_int>, pci: &str) -> Peaks {
    let clock = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE);
    let bus = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
    // Where the device uses the host's page tables, NVLink leads to the host (Grace, POWER9).
    let coherent = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
    let nvml = Nvml::open();
    Peaks {
        memory_gbps: memory_gbps(clock, bus, Some(TRANSFERS_PER_CLOCK)),
        pcie: peaks::pcie(Path::new("/"), pci).filter(|_| coherent == Some(0)),
        links: nvml.as_ref().ok().and_then(|nvml| nvml.links(pci)),
        absent: nvml.err().map(|err| err.to_string()),
    }
}

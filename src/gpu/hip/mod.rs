//! AMD devices, by the HIP runtime.

mod ffi;

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::path::Path;
use std::{fmt, ptr};

use self::ffi::{
    Api, hipDeviceAttribute_t, hipDeviceMallocFinegrained, hipHostMallocCoherent, hipHostMallocMapped,
    hipHostMallocNonCoherent, hipHostMallocNumaUser, hipHostMallocPortable, hipHostRegisterMapped,
    hipHostRegisterPortable, hipIpcMemHandle_t, hipMemAttachGlobal, hipMemcpyKind, hipStreamNonBlocking, hipUUID,
};
use super::images;
use super::ipc::IPC_BYTES;
use super::kfd;
use super::library::{self, Refusal};
use super::peaks::{self, Peaks, memory_gbps};
use super::rtc::Vendor;
use super::runtime::RuntimeDriver;
use super::runtime::calls::{Calls, Raw, Shape, pointer};
use super::{CopyBatch, DeviceInfo, KernelName};
use crate::error::Error;
use crate::place::MemKind;
use crate::units::Bytes;

/// The AMD devices that this process sees.
pub type HipDriver = RuntimeDriver<Api>;

const NAME: &str = "hip";

/// Rate of the wall clock that kernels read, where the runtime cannot tell: `s_memrealtime` counts a
/// constant 100 MHz on the devices of that time (LLVM, "User Guide for AMDGPU Backend", readsteadycounter).
const WALL_CLOCK_KHZ: u32 = 100_000;

/// What is allocated to see whether it can be.
const PROBE_BYTES: usize = 4096;

/// What the driver keeps of a device.
pub struct Device {
    ordinal: c_int,
    /// With its features, as the compiler takes it: `gfx90a:sramecc+:xnack-`.
    target: String,
    ns_per_tick: f64,
}

impl Calls for Api {
    const NAME: &'static str = NAME;
    const TITLE: &'static str = "HIP";
    const VENDOR: Vendor = Vendor::Hip;
    const COUNT: &'static str = "hipGetDeviceCount";
    const ENTER: &'static str = "choose";
    const NO_DEVICE: u32 = ffi::NO_DEVICE;
    const OUT_OF_MEMORY: u32 = ffi::OUT_OF_MEMORY;
    const PEER_ACCESS_ALREADY_ENABLED: u32 = ffi::PEER_ACCESS_ALREADY_ENABLED;

    type Device = Device;
    /// A device has one context for the whole process.
    type Context = ();

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
        let mut count = 0;
        // SAFETY: it writes one integer.
        unsafe { self.table.hipGetDeviceCount(&mut count) }?;
        Ok(count)
    }

    fn describe(&self, ordinal: i32) -> Result<(DeviceInfo, Device), Refusal> {
        describe(self, ordinal)
    }

    fn target<'a>(_: &'a DeviceInfo, device: &'a Device) -> &'a str {
        &device.target
    }

    fn ns_per_tick(device: &Device) -> f64 {
        device.ns_per_tick
    }

    fn context(&self, _: &Device) -> Result<(), Refusal> {
        Ok(())
    }

    fn enter(&self, device: &Device, (): &()) -> Result<(), Refusal> {
        // SAFETY: it takes any number, and changes this thread's device only.
        unsafe { self.table.hipSetDevice(device.ordinal) }
    }

    unsafe fn release(&self, _: &Device, (): &()) {}

    fn wait_device(&self) -> Result<(), Refusal> {
        // SAFETY: it waits for the current device.
        unsafe { self.table.hipDeviceSynchronize() }
    }

    fn can_access_peer(&self, device: &Device, peer: &Device) -> Result<bool, Refusal> {
        let mut can = 0;
        // SAFETY: it writes one integer.
        unsafe { self.table.hipDeviceCanAccessPeer(&mut can, device.ordinal, peer.ordinal) }?;
        Ok(can != 0)
    }

    fn enable_peer(&self, peer: &Device, (): &()) -> Result<(), Refusal> {
        // SAFETY: it takes numbers only.
        unsafe { self.table.hipDeviceEnablePeerAccess(peer.ordinal, 0) }
    }

    fn memory_free(&self) -> Result<u64, Refusal> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: it writes two sizes.
        unsafe { self.table.hipMemGetInfo(&mut free, &mut total) }?;
        Ok(free as u64)
    }

    fn allocate(&self, kind: MemKind, bytes: usize) -> Result<u64, Refusal> {
        let table = &self.table;
        let mut address = ptr::null_mut();
        match kind {
            // SAFETY: it writes one address.
            MemKind::DeviceFine => unsafe {
                table.hipExtMallocWithFlags(&mut address, bytes, hipDeviceMallocFinegrained)
            },
            // SAFETY: it writes one address.
            MemKind::DeviceUncached => unsafe {
                table.hipExtMallocWithFlags(&mut address, bytes, ffi::DEVICE_MALLOC_UNCACHED)
            },
            // SAFETY: it writes one address.
            kind if kind.is_host() => unsafe { table.hipHostMalloc(&mut address, bytes, host_flags(kind)) },
            // SAFETY: it writes one address.
            MemKind::Managed => unsafe { table.hipMallocManaged(&mut address, bytes, hipMemAttachGlobal) },
            // SAFETY: it writes one address.
            _ => unsafe { table.hipMalloc(&mut address, bytes) },
        }?;
        Ok(address.expose_provenance() as u64)
    }

    unsafe fn free(&self, kind: MemKind, address: u64) -> Result<(), Refusal> {
        if kind.is_host() {
            // SAFETY: passed on to the caller.
            return unsafe { self.table.hipHostFree(pointer(address)) };
        }
        // SAFETY: passed on to the caller.
        unsafe { self.table.hipFree(pointer(address)) }
    }

    unsafe fn allocation_start(&self, address: u64) -> Result<u64, Refusal> {
        let (mut start, mut length) = (ptr::null_mut(), 0);
        // SAFETY: it writes an address and a size; the rest is passed on to the caller.
        unsafe { self.table.hipMemGetAddressRange(&mut start, &mut length, pointer(address)) }?;
        Ok(start.addr() as u64)
    }

    unsafe fn ipc_handle(&self, address: u64) -> Result<[u8; IPC_BYTES], Refusal> {
        let mut handle = hipIpcMemHandle_t { reserved: [0; _] };
        // SAFETY: it writes one handle; the rest is passed on to the caller.
        unsafe { self.table.hipIpcGetMemHandle(&mut handle, pointer(address)) }?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    fn ipc_open(&self, handle: [u8; IPC_BYTES]) -> Result<u64, Refusal> {
        let handle = hipIpcMemHandle_t { reserved: handle.map(|byte| byte as _) };
        let mut start = ptr::null_mut();
        // SAFETY: it writes one address, and checks flag and handle.
        let mut open = |flag| unsafe { self.table.hipIpcOpenMemHandle(&mut start, handle, flag) };
        let [new, old] = ffi::IPC_LAZY_PEER_ACCESS;
        match open(new) {
            Err(Refusal { status: Some(ffi::INVALID_VALUE), .. }) => open(old),
            opened => opened,
        }?;
        Ok(start.expose_provenance() as u64)
    }

    unsafe fn ipc_close(&self, start: u64) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.hipIpcCloseMemHandle(pointer(start)) }
    }

    unsafe fn host_register(&self, host: *mut c_void, bytes: usize) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.hipHostRegister(host, bytes, hipHostRegisterPortable | hipHostRegisterMapped) }
    }

    unsafe fn host_address(&self, host: *mut c_void) -> Result<u64, Refusal> {
        let mut there = ptr::null_mut();
        // SAFETY: it writes one address; the rest is passed on to the caller.
        unsafe { self.table.hipHostGetDevicePointer(&mut there, host, 0) }?;
        Ok(there.expose_provenance() as u64)
    }

    unsafe fn host_unregister(&self, host: *mut c_void) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.hipHostUnregister(host) }
    }

    fn stream_create(&self) -> Result<Raw, Refusal> {
        let mut stream = ptr::null_mut();
        // SAFETY: it writes one handle.
        unsafe { self.table.hipStreamCreateWithFlags(&mut stream, hipStreamNonBlocking) }?;
        Ok(Raw(stream.cast()))
    }

    fn stream_create_masked(&self, mask: &[u32]) -> Result<Raw, Refusal> {
        let mut stream = ptr::null_mut();
        // SAFETY: it writes one handle, and reads as many words as it is told.
        unsafe { self.table.hipExtStreamCreateWithCUMask(&mut stream, mask.len() as u32, mask.as_ptr()) }?;
        Ok(Raw(stream.cast()))
    }

    unsafe fn stream_destroy(&self, stream: Raw) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.hipStreamDestroy(stream.0.cast()) }
    }

    unsafe fn stream_wait(&self, stream: Raw) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.hipStreamSynchronize(stream.0.cast()) }
    }

    fn event_create(&self) -> Result<Raw, Refusal> {
        let mut event = ptr::null_mut();
        // SAFETY: it writes one handle.
        unsafe { self.table.hipEventCreate(&mut event) }?;
        Ok(Raw(event.cast()))
    }

    unsafe fn event_destroy(&self, event: Raw) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.hipEventDestroy(event.0.cast()) }
    }

    unsafe fn event_record(&self, event: Raw, stream: Raw) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.hipEventRecord(event.0.cast(), stream.0.cast()) }
    }

    unsafe fn event_elapsed_ms(&self, start: Raw, stop: Raw) -> Result<f32, Refusal> {
        let mut milliseconds = 0.0;
        // SAFETY: it writes one float; the rest is passed on to the caller.
        unsafe { self.table.hipEventElapsedTime(&mut milliseconds, start.0.cast(), stop.0.cast()) }?;
        Ok(milliseconds)
    }

    unsafe fn copy(&self, stream: Raw, dst: u64, src: u64, bytes: usize) -> Result<(), Refusal> {
        let (dst, src, kind) = (pointer(dst), pointer(src), hipMemcpyKind::hipMemcpyDefault);
        // SAFETY: passed on to the caller.
        unsafe { self.table.hipMemcpyAsync(dst, src, bytes, kind, stream.0.cast()) }
    }

    unsafe fn copy_batch(&self, stream: Raw, copies: &CopyBatch) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.copy_many(stream.0.cast(), copies) }
    }

    unsafe fn copy_no_cu(&self, stream: Raw, dst: u64, src: u64, bytes: usize) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { Api::copy_no_cu(self, pointer(dst), pointer(src), bytes, stream.0.cast()) }
    }

    unsafe fn copy_in(&self, stream: Raw, dst: u64, src: &[u8]) -> Result<(), Refusal> {
        let (from, kind) = (src.as_ptr().cast(), hipMemcpyKind::hipMemcpyHostToDevice);
        // SAFETY: passed on to the caller.
        unsafe { self.table.hipMemcpyAsync(pointer(dst), from, src.len(), kind, stream.0.cast()) }
    }

    unsafe fn copy_out(&self, stream: Raw, dst: &mut [u8], src: u64) -> Result<(), Refusal> {
        let (into, kind) = (dst.as_mut_ptr().cast(), hipMemcpyKind::hipMemcpyDeviceToHost);
        // SAFETY: passed on to the caller.
        unsafe { self.table.hipMemcpyAsync(into, pointer(src), dst.len(), kind, stream.0.cast()) }
    }

    unsafe fn fill(&self, stream: Raw, dst: u64, byte: u8, bytes: usize) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.hipMemsetAsync(pointer(dst), byte.into(), bytes, stream.0.cast()) }
    }

    unsafe fn module_load(&self, image: &[u8]) -> Result<Raw, Refusal> {
        let mut module = ptr::null_mut();
        // SAFETY: it writes one handle; the rest is passed on to the caller.
        unsafe { self.table.hipModuleLoadData(&mut module, image.as_ptr().cast()) }?;
        Ok(Raw(module.cast()))
    }

    unsafe fn module_unload(&self, module: Raw) -> Result<(), Refusal> {
        // SAFETY: passed on to the caller.
        unsafe { self.table.hipModuleUnload(module.0.cast()) }
    }

    unsafe fn module_function(&self, module: Raw, name: &CStr) -> Result<Raw, Refusal> {
        let mut function = ptr::null_mut();
        // SAFETY: it writes one handle; the rest is passed on to the caller.
        unsafe { self.table.hipModuleGetFunction(&mut function, module.0.cast(), name.as_ptr()) }?;
        Ok(Raw(function.cast()))
    }

    /// A launch takes all that a compute unit has (`hipFuncSetAttribute` is for kernels that are linked in).
    unsafe fn allow_shared(&self, _: Raw, _: u32) -> Result<(), Refusal> {
        Ok(())
    }

    unsafe fn launch(&self, stream: Raw, function: Raw, shape: Shape, args: &[u8]) -> Result<(), Refusal> {
        let Shape { blocks, threads, shared_bytes } = shape;
        let mut argument: *mut c_void = args.as_ptr().cast_mut().cast();
        let (function, stream, extra) = (function.0.cast(), stream.0.cast(), ptr::null_mut());
        // SAFETY: passed on to the caller.
        unsafe {
            self.table.hipModuleLaunchKernel(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared_bytes,
                stream,
                &mut argument,
                extra,
            )
        }
    }
}

/// Facts of a device.
fn describe(api: &Api, ordinal: c_int) -> Result<(DeviceInfo, Device), Refusal> {
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
    let architecture = target.split(':').next().unwrap_or(&target).to_owned();
    let clock = library::count(attribute(hipDeviceAttribute_t::hipDeviceAttributeWallClockRate));
    let khz = if clock == 0 { WALL_CLOCK_KHZ } else { clock };
    // Devices of several dies have them since gfx940, and how many depends on the partition.
    let one = !["gfx94", "gfx95", "gfx125"].iter().any(|several| target.starts_with(several));
    let xccs = api.xccs(ordinal).unwrap_or(one.into());
    let info = DeviceInfo {
        name: library::text(&name),
        runtime: NAME.to_owned(),
        uuid,
        numa: library::numa_node(&pci),
        memory_total: Bytes(total as u64),
        cache: Bytes(library::count(attribute(hipDeviceAttribute_t::hipDeviceAttributeL2CacheSize)).into()),
        compute_units: library::count(attribute(hipDeviceAttribute_t::hipDeviceAttributeMultiprocessorCount)),
        warp_size: library::count(attribute(hipDeviceAttribute_t::hipDeviceAttributeWarpSize)),
        memory_kinds: kinds(api, ordinal, attribute(hipDeviceAttribute_t::hipDeviceAttributeManagedMemory)),
        host_kinds: host_kinds(api, ordinal),
        cpu_access: attribute(hipDeviceAttribute_t::hipDeviceAttributeIsLargeBar) == Some(1),
        exportable: true,
        xccs,
        cu_masks: xccs > 0 && api.has_cu_masks(),
        no_cu_copies: api.has_no_cu_copies(),
        kernels_absent: images::get(NAME, Vendor::Hip, &target, KernelName::Transfer.into())
            .err()
            .map(|err| err.to_string()),
        batch_absent: (!api.has_batches())
            .then(|| "the HIP runtime is older than 7.1, which brought copies in batches".to_owned()),
        bulk_absent: Some(format!(
            "only gfx1250 has a tensor data mover, and there is no kernel for it yet: this is {architecture}"
        )),
        peaks: peaks(attribute, &pci, &architecture),
        pci,
        architecture,
    };
    Ok((info, Device { ordinal, target, ns_per_tick: 1e6 / f64::from(khz) }))
}

fn peaks(attribute: impl Fn(hipDeviceAttribute_t) -> Option<c_int>, pci: &str, architecture: &str) -> Peaks {
    let clock = attribute(hipDeviceAttribute_t::hipDeviceAttributeMemoryClockRate);
    let bus = attribute(hipDeviceAttribute_t::hipDeviceAttributeMemoryBusWidth);
    let root = Path::new("/");
    let around = kfd::neighbourhood(root, pci, architecture);
    Peaks {
        memory_gbps: memory_gbps(clock, bus, kfd::memory_transfers(architecture)),
        pcie: peaks::pcie(root, pci).filter(|_| around.as_ref().is_some_and(|around| around.host_by_pcie)),
        absent: around.is_none().then(|| format!("/sys/class/kfd does not tell of the device at {pci}")),
        links: around.map(|around| around.links),
    }
}

/// The kinds of memory that a device has; found by allocating a little of each, since attributes and
/// allocations do not agree between releases.
fn kinds(api: &Api, device: c_int, managed: Option<c_int>) -> Vec<MemKind> {
    let flagged = |flags| {
        let mut address = ptr::null_mut();
        // SAFETY: it takes any number, and changes this thread's device only.
        let chosen = unsafe { api.table.hipSetDevice(device) };
        // SAFETY: it writes one address.
        let allocated = chosen.and(unsafe { api.table.hipExtMallocWithFlags(&mut address, PROBE_BYTES, flags) });
        // SAFETY: it was just allocated.
        allocated.is_ok() && unsafe { api.table.hipFree(address) }.is_ok()
    };
    let mut kinds = vec![MemKind::Device];
    kinds.extend(flagged(hipDeviceMallocFinegrained).then_some(MemKind::DeviceFine));
    kinds.extend(flagged(ffi::DEVICE_MALLOC_UNCACHED).then_some(MemKind::DeviceUncached));
    kinds.extend((managed == Some(1)).then_some(MemKind::Managed));
    kinds
}

/// Page-locked host memory of a kind, for every device, on the nodes of the calling thread's policy.
fn host_flags(kind: MemKind) -> c_uint {
    let cached = match kind {
        MemKind::NonCoherent => hipHostMallocNonCoherent,
        MemKind::Uncached => ffi::HOST_MALLOC_UNCACHED,
        _ => hipHostMallocCoherent,
    };
    hipHostMallocPortable | hipHostMallocMapped | hipHostMallocNumaUser | cached
}

/// The kinds of host memory that the runtime allocates; found like those of a device.
fn host_kinds(api: &Api, device: c_int) -> Vec<MemKind> {
    let recent = api.version() >= ffi::HOST_MALLOC_UNCACHED_SINCE;
    let allocates = |kind: &MemKind| {
        let mut address = ptr::null_mut();
        // SAFETY: it takes any number, and changes this thread's device only.
        let chosen = unsafe { api.table.hipSetDevice(device) };
        // SAFETY: it writes one address.
        let allocated = chosen.and(unsafe { api.table.hipHostMalloc(&mut address, PROBE_BYTES, host_flags(*kind)) });
        // SAFETY: it was just allocated.
        allocated.is_ok() && unsafe { api.table.hipHostFree(address) }.is_ok()
    };
    let kinds = [MemKind::Coherent, MemKind::NonCoherent, MemKind::Uncached];
    kinds.into_iter().filter(|kind| *kind != MemKind::Uncached || recent).filter(allocates).collect()
}

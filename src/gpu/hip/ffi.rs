//! The functions of `libamdhip64.so`, by hip-sys's signatures and constants and our own loading.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::OnceLock;

use hip_sys::hiprt;
pub use hip_sys::hiprt::{
    hipDevice_t, hipDeviceAttribute_t, hipDeviceMallocFinegrained, hipDeviceProp_t, hipDeviceptr_t, hipEvent_t,
    hipFunction_t, hipHostMallocCoherent, hipHostMallocMapped, hipHostMallocNonCoherent, hipHostMallocNumaUser,
    hipHostMallocPortable, hipHostRegisterMapped, hipHostRegisterPortable, hipIpcMemHandle_t, hipMemAttachGlobal,
    hipMemcpyKind, hipModule_t, hipStream_t, hipStreamNonBlocking, hipUUID,
};

use crate::error::Error;
use crate::gpu::CopyBatch;
use crate::gpu::library::{Library, Refusal, functions, text};

functions! {
    /// The HIP runtime, as far as it is used.
    Table {
        fn hipRuntimeGetVersion(version: *mut c_int);
        fn hipGetDeviceCount(count: *mut c_int);
        fn hipSetDevice(device: c_int);
        fn hipDeviceSynchronize();
        fn hipDeviceGetName(name: *mut c_char, length: c_int, device: hipDevice_t);
        fn hipDeviceGetUuid(uuid: *mut hipUUID, device: hipDevice_t);
        fn hipDeviceGetPCIBusId(id: *mut c_char, length: c_int, device: c_int);
        fn hipDeviceTotalMem(bytes: *mut usize, device: hipDevice_t);
        fn hipDeviceGetAttribute(value: *mut c_int, attribute: hipDeviceAttribute_t, device: c_int);
        fn hipGetDeviceProperties(properties: *mut hipDeviceProp_t, device: c_int);
        fn hipDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
        fn hipDeviceEnablePeerAccess(peer: c_int, flags: c_uint);

        fn hipMemGetInfo(free: *mut usize, total: *mut usize);
        fn hipMalloc(address: *mut *mut c_void, bytes: usize);
        fn hipExtMallocWithFlags(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        fn hipMallocManaged(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        fn hipFree(address: *mut c_void);
        fn hipMemGetAddressRange(base: *mut hipDeviceptr_t, bytes: *mut usize, address: hipDeviceptr_t);
        fn hipIpcGetMemHandle(handle: *mut hipIpcMemHandle_t, address: *mut c_void);
        fn hipIpcOpenMemHandle(address: *mut *mut c_void, handle: hipIpcMemHandle_t, flags: c_uint);
        fn hipIpcCloseMemHandle(address: *mut c_void);
        fn hipHostMalloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
        fn hipHostFree(address: *mut c_void);
        fn hipHostRegister(host: *mut c_void, bytes: usize, flags: c_uint);
        fn hipHostGetDevicePointer(address: *mut *mut c_void, host: *mut c_void, flags: c_uint);
        fn hipHostUnregister(host: *mut c_void);

        fn hipStreamCreateWithFlags(stream: *mut hipStream_t, flags: c_uint);
        fn hipExtStreamCreateWithCUMask(stream: *mut hipStream_t, words: u32, mask: *const u32);
        fn hipStreamDestroy(stream: hipStream_t);
        fn hipStreamSynchronize(stream: hipStream_t);
        fn hipEventCreate(event: *mut hipEvent_t);
        fn hipEventDestroy(event: hipEvent_t);
        fn hipEventRecord(event: hipEvent_t, stream: hipStream_t);
        fn hipEventElapsedTime(milliseconds: *mut f32, start: hipEvent_t, stop: hipEvent_t);
        fn hipMemcpyAsync(dst: *mut c_void, src: *const c_void, bytes: usize, kind: hipMemcpyKind, stream: hipStream_t);
        fn hipMemsetAsync(dst: *mut c_void, byte: c_int, bytes: usize, stream: hipStream_t);

        fn hipModuleLoadData(module: *mut hipModule_t, image: *const c_void);
        fn hipModuleUnload(module: hipModule_t);
        fn hipModuleGetFunction(function: *mut hipFunction_t, module: hipModule_t, name: *const c_char);
        fn hipModuleLaunchKernel(
            function: hipFunction_t,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint,
            stream: hipStream_t,
            arguments: *mut *mut c_void,
            extra: *mut *mut c_void,
        );
    }
}

/// Never called: the compiler compares the table with hip-sys's functions.
#[allow(dead_code)]
fn signatures_are_those_of_hip_sys() {
    same_signatures!(hiprt, hiprt::hipError_t);
    let _: unsafe extern "C" fn(hiprt::hipError_t) -> *const c_char = hiprt::hipGetErrorString;
}

pub const NO_DEVICE: u32 = hiprt::hipError_t::hipErrorNoDevice as u32;
pub const OUT_OF_MEMORY: u32 = hiprt::hipError_t::hipErrorOutOfMemory as u32;
pub const PEER_ACCESS_ALREADY_ENABLED: u32 = hiprt::hipError_t::hipErrorPeerAccessAlreadyEnabled as u32;

/// `hipIpcMemLazyEnablePeerAccess`: 1 since ROCm 6, and 0 before, as hip-sys has it. Each runtime
/// takes its own value only (`hipIpcOpenMemHandle` answers with "invalid value").
pub const IPC_LAZY_PEER_ACCESS: [c_uint; 2] = [1, hiprt::hipIpcMemLazyEnablePeerAccess];
pub const INVALID_VALUE: u32 = hiprt::hipError_t::hipErrorInvalidValue as u32;

/// `hipHostMallocUncached`: newer than hip-sys (HIP 7.0's `hip_runtime_api.h` and its release notes).
pub const HOST_MALLOC_UNCACHED: c_uint = 0x1000_0000;
/// The version that brought it, as `hipRuntimeGetVersion` counts: an older one may pass over the flag.
pub const HOST_MALLOC_UNCACHED_SINCE: c_int = 70_000_000;

/// Newer than hip-sys (HIP 5.5's `hip_runtime_api.h`).
pub const DEVICE_MALLOC_UNCACHED: c_uint = 3;

/// After these the device answers every further call with an error.
const BREAKING: [hiprt::hipError_t; 6] = [
    hiprt::hipError_t::hipErrorDeinitialized,
    hiprt::hipError_t::hipErrorECCNotCorrectable,
    hiprt::hipError_t::hipErrorIllegalAddress,
    hiprt::hipError_t::hipErrorContextIsDestroyed,
    hiprt::hipError_t::hipErrorAssert,
    hiprt::hipError_t::hipErrorLaunchFailure,
];

/// `hipDeviceAttributeNumberOfXccs`, newer than hip-sys (HIP 7.0's `hip_runtime_api.h`).
const NUMBER_OF_XCCS: u32 = 10_018;
/// `hipMemcpyDeviceToDeviceNoCU`, newer than hip-sys (HIP 6.0's `hip_runtime_api.h`).
const COPY_NO_CU: u32 = 1024;
/// The version that brought it, as `hipRuntimeGetVersion` counts.
const COPY_NO_CU_SINCE: c_int = 60_000_000;

type ErrorText = unsafe extern "C" fn(u32) -> *const c_char;
/// `hipMemcpyBatchAsync(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, stream)`, of
/// HIP 7.1's `hip_runtime_api.h`; null and 0 stand for no attributes.
type CopyBatchAsync = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut *mut c_void,
    *mut usize,
    usize,
    *mut c_void,
    *mut usize,
    usize,
    *mut usize,
    hipStream_t,
) -> u32;
/// As in the header, with numbers for enums: a value that hip-sys does not list is none of its enum.
type GetAttribute = unsafe extern "C" fn(*mut c_int, u32, c_int) -> u32;
type CopyAsync = unsafe extern "C" fn(*mut c_void, *const c_void, usize, u32, hipStream_t) -> u32;
type GetProperties = unsafe extern "C" fn(*mut c_void, c_int) -> u32;

/// The runtime's library, opened once for the process.
pub struct Api {
    pub table: Table,
    library: String,
    error_text: Option<ErrorText>,
    /// Newer than hip-sys: the properties in the layout of ROCm 6.
    properties: Option<GetProperties>,
    /// Newer than hip-sys.
    copy_batch: Option<CopyBatchAsync>,
    attribute: Option<GetAttribute>,
    copy_async: Option<CopyAsync>,
}

impl Api {
    /// # Errors
    /// If the library is not on this machine.
    pub fn load_once() -> Result<&'static Api, Error> {
        static API: OnceLock<Result<Api, Error>> = OnceLock::new();
        API.get_or_init(Api::load).as_ref().map_err(Error::clone)
    }

    fn load() -> Result<Api, Error> {
        let rocm = std::env::var("ROCM_PATH").ok().map(|path| format!("{path}/lib/libamdhip64.so"));
        let plain = [".so.7", ".so.6", ".so.5", ".so"].map(|end| format!("libamdhip64{end}"));
        let library = Library::open(&rocm.into_iter().chain(plain).collect::<Vec<_>>())?;
        // SAFETY: the type is that of the header, with the status as the integer that it is.
        let error_text = unsafe { library.symbol("hipGetErrorString") };
        // SAFETY: the type is that of ROCm 6's header, with an untyped place to write to.
        let properties = unsafe { library.symbol("hipGetDevicePropertiesR0600") };
        // SAFETY: the type is that of HIP 7.1's header, with the attributes untyped.
        let copy_batch = unsafe { library.symbol("hipMemcpyBatchAsync") };
        // SAFETY: the type is that of the header, with numbers for the enums that it takes and gives.
        let attribute = unsafe { library.symbol("hipDeviceGetAttribute") };
        // SAFETY: as above.
        let copy_async = unsafe { library.symbol("hipMemcpyAsync") };
        let name = library.name().to_owned();
        Ok(Api {
            table: Table::load(&library),
            library: name,
            error_text,
            properties,
            copy_batch,
            attribute,
            copy_async,
        })
    }

    pub fn library_name(&self) -> &str {
        &self.library
    }

    /// The architecture with its features, as compilers take it: `gfx90a:sramecc+:xnack-`.
    ///
    /// No attribute gives it, so it is read from the properties, whose layout changed with ROCm 6:
    /// 1472 bytes with the name at 1160. The symbol without a suffix has kept the layout of 792
    /// bytes with the name at 396.
    pub fn architecture(&self, device: c_int) -> Result<String, Refusal> {
        /// More than either layout takes.
        #[repr(C, align(16))]
        struct Room([u8; 4096]);
        let mut room = Room([0; 4096]);
        if let Some(properties) = self.properties {
            // SAFETY: it writes the properties, which are smaller than the room.
            let status = unsafe { properties((&raw mut room.0).cast(), device) };
            if status == 0 {
                return Ok(text(&room.0[1160..1160 + 256]));
            }
        }
        // SAFETY: as above.
        unsafe { self.table.hipGetDeviceProperties((&raw mut room.0).cast(), device) }?;
        let at = std::mem::offset_of!(hipDeviceProp_t, gcnArchName);
        Ok(text(&room.0[at..at + 256]))
    }

    pub fn has_batches(&self) -> bool {
        self.copy_batch.is_some()
    }

    /// Copies in one call.
    ///
    /// # Safety
    /// Stream and ranges have to be live until the copies are done.
    pub unsafe fn copy_many(&self, stream: hipStream_t, copies: &CopyBatch) -> Result<(), Refusal> {
        let call = "hipMemcpyBatchAsync";
        let function = self.copy_batch.ok_or(Refusal { call, status: None })?;
        let CopyBatch { dsts, srcs, sizes } = copies;
        let mut failed = usize::MAX;
        let (no_attributes, no_starts) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: it reads the arrays before it returns, and an address is as wide as a pointer; the
        // rest is passed on to the caller.
        let status = unsafe {
            function(
                dsts.as_ptr().cast_mut().cast(),
                srcs.as_ptr().cast_mut().cast(),
                sizes.as_ptr().cast_mut(),
                sizes.len(),
                no_attributes,
                no_starts,
                0,
                &mut failed,
                stream,
            )
        };
        if status == 0 { Ok(()) } else { Err(Refusal { call, status: Some(status) }) }
    }

    /// As the runtime counts: 7.0.0 is 70000000.
    pub fn version(&self) -> c_int {
        let mut version = 0;
        // SAFETY: it writes one integer.
        let asked = unsafe { self.table.hipRuntimeGetVersion(&mut version) };
        asked.map_or(0, |()| version)
    }

    /// Dies of compute units of a device, where the runtime tells.
    pub fn xccs(&self, device: c_int) -> Option<u32> {
        let mut count = 0;
        // SAFETY: it writes one integer, and refuses an attribute that it does not know.
        let status = unsafe { self.attribute?(&mut count, NUMBER_OF_XCCS, device) };
        u32::try_from(count).ok().filter(|count| status == 0 && *count > 0)
    }

    pub fn has_cu_masks(&self) -> bool {
        self.table.hipExtStreamCreateWithCUMask.is_some()
    }

    pub fn has_no_cu_copies(&self) -> bool {
        self.copy_async.is_some() && self.version() >= COPY_NO_CU_SINCE
    }

    /// `hipMemcpyAsync` by copy engines alone.
    ///
    /// # Safety
    /// As for `hipMemcpyAsync`.
    pub unsafe fn copy_no_cu(
        &self,
        dst: *mut c_void,
        src: *const c_void,
        bytes: usize,
        stream: hipStream_t,
    ) -> Result<(), Refusal> {
        let call = "hipMemcpyAsync";
        let function = self.copy_async.ok_or(Refusal { call, status: None })?;
        // SAFETY: passed on to the caller.
        match unsafe { function(dst, src, bytes, COPY_NO_CU, stream) } {
            0 => Ok(()),
            status => Err(Refusal { call, status: Some(status) }),
        }
    }

    fn text(&self, status: u32) -> String {
        // SAFETY: it takes any number, and returns a constant string or null.
        let said = self.error_text.map(|call| unsafe { call(status) }).filter(|text| !text.is_null());
        let Some(said) = said else { return "unknown error".to_owned() };
        // SAFETY: the runtime gave a string that lives as long as it does.
        unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned()
    }

    /// What went wrong with what was being done.
    pub fn in_words(&self, refusal: Refusal, what: impl fmt::Display) -> Error {
        let error = refusal.explain(&self.library, what, |status| self.text(status));
        let breaks = refusal.status.is_some_and(|status| BREAKING.iter().any(|known| *known as u32 == status));
        if breaks { error.broken() } else { error }
    }
}

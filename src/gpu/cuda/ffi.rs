//! The functions of `libcuda.so.1`, by cudarc's signatures and constants and our own loading.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::fmt;
use std::sync::OnceLock;

use cudarc::driver::sys;
pub use cudarc::driver::sys::{
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr,
    CUevent, CUfunction, CUfunction_attribute, CUipcMem_flags, CUipcMemHandle, CUmemAttach_flags, CUmemLocation,
    CUmemLocationType, CUmemcpyAttributes, CUmemcpySrcAccessOrder, CUmodule, CUstream, CUstream_flags, CUuuid,
};

use crate::error::Error;
use crate::gpu::library::{Library, Refusal, functions};

functions! {
    /// The CUDA driver API, as far as it is used.
    Table {
        fn cuInit(flags: c_uint);
        fn cuDeviceGetCount(count: *mut c_int);
        fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
        fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice);
        fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
        fn cuDeviceGetPCIBusId(id: *mut c_char, length: c_int, device: CUdevice);
        fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
        fn cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice);

        fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
        fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
        fn cuCtxSetCurrent(context: CUcontext);
        fn cuCtxSynchronize();
        fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint);

        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
        fn cuMemAllocManaged(address: *mut CUdeviceptr, bytes: usize, flags: c_uint);
        fn cuMemFree_v2(address: CUdeviceptr);
        fn cuMemGetAddressRange_v2(base: *mut CUdeviceptr, bytes: *mut usize, address: CUdeviceptr);
        fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, address: CUdeviceptr);
        fn cuIpcOpenMemHandle_v2(address: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
        fn cuIpcCloseMemHandle(address: CUdeviceptr);
        fn cuMemHostRegister_v2(host: *mut c_void, bytes: usize, flags: c_uint);
        fn cuMemHostGetDevicePointer_v2(address: *mut CUdeviceptr, host: *mut c_void, flags: c_uint);
        fn cuMemHostUnregister(host: *mut c_void);

        fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
        fn cuStreamDestroy_v2(stream: CUstream);
        fn cuStreamSynchronize(stream: CUstream);
        fn cuEventCreate(event: *mut CUevent, flags: c_uint);
        fn cuEventDestroy_v2(event: CUevent);
        fn cuEventRecord(event: CUevent, stream: CUstream);
        fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, stop: CUevent);
        fn cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream);
        fn cuMemcpyBatchAsync(
            dsts: *mut CUdeviceptr,
            srcs: *mut CUdeviceptr,
            sizes: *mut usize,
            count: usize,
            attributes: *mut CUmemcpyAttributes,
            attribute_starts: *mut usize,
            attribute_count: usize,
            failed: *mut usize,
            stream: CUstream,
        );
        fn cuMemcpyHtoDAsync_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream);
        fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize, stream: CUstream);
        fn cuMemsetD8Async(dst: CUdeviceptr, byte: c_uchar, bytes: usize, stream: CUstream);

        fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
        fn cuModuleUnload(module: CUmodule);
        fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
        fn cuFuncSetAttribute(function: CUfunction, attribute: CUfunction_attribute, value: c_int);
        fn cuLaunchKernel(
            function: CUfunction,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint,
            stream: CUstream,
            arguments: *mut *mut c_void,
            extra: *mut *mut c_void,
        );
    }
}

/// Never called: the compiler compares the table with cudarc's functions.
#[allow(dead_code)]
fn signatures_are_those_of_cudarc() {
    same_wrappers!(sys, sys::CUresult);
    let _: unsafe fn(sys::CUresult, *mut *const c_char) -> sys::CUresult = sys::cuGetErrorString;
}

/// The status that means "no device".
pub const NO_DEVICE: u32 = sys::CUresult::CUDA_ERROR_NO_DEVICE as u32;
pub const OUT_OF_MEMORY: u32 = sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;
pub const PEER_ACCESS_ALREADY_ENABLED: u32 = sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as u32;

/// After these the context answers every further call with the same error (CUDA driver API, CUresult:
/// "this leaves the process in an inconsistent state").
const BREAKING: [sys::CUresult; 12] = [
    sys::CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
    sys::CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
    sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
    sys::CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
    sys::CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    sys::CUresult::CUDA_ERROR_ASSERT,
    sys::CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
    sys::CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
    sys::CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
    sys::CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
    sys::CUresult::CUDA_ERROR_INVALID_PC,
    sys::CUresult::CUDA_ERROR_LAUNCH_FAILED,
];

type ErrorText = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;

/// The driver's library, opened once for the process.
pub struct Api {
    pub table: Table,
    library: String,
    error_text: Option<ErrorText>,
}

impl Api {
    /// # Errors
    /// If the library is not on this machine.
    pub fn load_once() -> Result<&'static Api, Error> {
        static API: OnceLock<Result<Api, Error>> = OnceLock::new();
        API.get_or_init(Api::load).as_ref().map_err(Error::clone)
    }

    fn load() -> Result<Api, Error> {
        let library = Library::open(&["libcuda.so.1".to_owned()])?;
        // SAFETY: the type is that of cuda.h, with the status as the integer that it is.
        let error_text = unsafe { library.symbol("cuGetErrorString") };
        Ok(Api { table: Table::load(&library), library: library.name().to_owned(), error_text })
    }

    pub fn library_name(&self) -> &str {
        &self.library
    }

    fn text(&self, status: u32) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: it takes any number, and writes the address of a constant string or null.
        let known = self.error_text.is_some_and(|call| unsafe { call(status, &mut text) } == 0);
        if !known || text.is_null() {
            return "unknown error".to_owned();
        }
        // SAFETY: the driver gave a string that lives as long as it does.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }

    /// What went wrong with what was being done.
    pub fn in_words(&self, refusal: Refusal, what: impl fmt::Display) -> Error {
        let error = refusal.explain(&self.library, what, |status| self.text(status));
        let breaks = refusal.status.is_some_and(|status| BREAKING.iter().any(|known| *known as u32 == status));
        if breaks { error.broken() } else { error }
    }
}

//! What a vendor's runtime is asked for: raw handles, raw addresses, one call each.

use std::ffi::{CStr, c_void};
use std::{fmt, ptr};

use crate::error::Error;
use crate::gpu::ipc::IPC_BYTES;
use crate::gpu::library::Refusal;
use crate::gpu::rtc::Vendor;
use crate::gpu::{CopyBatch, DeviceInfo};
use crate::place::MemKind;

/// A handle of the runtime: a stream, an event, a module or a function of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Raw(pub *mut c_void);

// SAFETY: a handle is the name of an object that the runtime itself guards: any thread may use it
// (CUDA driver API and HIP: streams, events and modules belong to a device, not to a thread).
unsafe impl Send for Raw {}
// SAFETY: as for Send.
unsafe impl Sync for Raw {}

/// The shape of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub blocks: u32,
    pub threads: u32,
    /// Shared memory of a block, beyond what the kernel declares.
    pub shared_bytes: u32,
}

/// The calls that the driver of real devices is made of.
///
/// All but `count`, `describe` and `context` are for the device that `enter` made the current one of
/// the thread. Raw handles come from the same `Calls`, of a live object; addresses and lengths are
/// those of live allocations, imports or registrations: the promise behind every `unsafe` here.
#[allow(clippy::missing_safety_doc)]
pub trait Calls: Send + Sync + 'static {
    /// `cuda`: in messages and as `Driver::name`.
    const NAME: &'static str;
    /// `CUDA`.
    const TITLE: &'static str;
    const VENDOR: Vendor;
    /// The call that counts devices, for a count of none.
    const COUNT: &'static str;
    /// What entering a device is called in a message, before "device 0".
    const ENTER: &'static str;
    const NO_DEVICE: u32;
    const OUT_OF_MEMORY: u32;
    const PEER_ACCESS_ALREADY_ENABLED: u32;

    /// What the runtime needs to know of a device beside `DeviceInfo`.
    type Device: Send + Sync;
    /// What is made on a device before its first use.
    type Context: Send + Sync;

    /// The runtime's library, opened once for the process.
    fn open() -> Result<&'static Self, Error>;
    fn library(&self) -> &str;
    /// What went wrong with what was being done.
    fn explain(&self, refusal: Refusal, what: &dyn fmt::Display) -> Error;

    fn count(&self) -> Result<i32, Refusal>;
    /// Facts of a device.
    fn describe(&self, ordinal: i32) -> Result<(DeviceInfo, Self::Device), Refusal>;
    /// The architecture as the kernel compiler takes it.
    fn target<'a>(info: &'a DeviceInfo, device: &'a Self::Device) -> &'a str;
    fn ns_per_tick(device: &Self::Device) -> f64;

    fn context(&self, device: &Self::Device) -> Result<Self::Context, Refusal>;
    /// Makes the device the current one of this thread.
    fn enter(&self, device: &Self::Device, context: &Self::Context) -> Result<(), Refusal>;
    unsafe fn release(&self, device: &Self::Device, context: &Self::Context);
    fn wait_device(&self) -> Result<(), Refusal>;
    fn can_access_peer(&self, device: &Self::Device, peer: &Self::Device) -> Result<bool, Refusal>;
    fn enable_peer(&self, peer: &Self::Device, context: &Self::Context) -> Result<(), Refusal>;

    fn memory_free(&self) -> Result<u64, Refusal>;
    fn allocate(&self, kind: MemKind, bytes: usize) -> Result<u64, Refusal>;
    unsafe fn free(&self, kind: MemKind, address: u64) -> Result<(), Refusal>;
    /// Where the allocation that an address is part of starts, as an IPC handle opens it.
    unsafe fn allocation_start(&self, address: u64) -> Result<u64, Refusal>;
    unsafe fn ipc_handle(&self, address: u64) -> Result<[u8; IPC_BYTES], Refusal>;
    fn ipc_open(&self, handle: [u8; IPC_BYTES]) -> Result<u64, Refusal>;
    unsafe fn ipc_close(&self, start: u64) -> Result<(), Refusal>;
    unsafe fn host_register(&self, host: *mut c_void, bytes: usize) -> Result<(), Refusal>;
    /// Where the device finds registered host memory.
    unsafe fn host_address(&self, host: *mut c_void) -> Result<u64, Refusal>;
    unsafe fn host_unregister(&self, host: *mut c_void) -> Result<(), Refusal>;

    /// A stream that does not wait for the default one.
    fn stream_create(&self) -> Result<Raw, Refusal>;
    /// The same for some compute units; called where `DeviceInfo::cu_masks` says so.
    fn stream_create_masked(&self, _mask: &[u32]) -> Result<Raw, Refusal> {
        Err(Refusal { call: "stream_create_masked", status: None })
    }
    unsafe fn stream_destroy(&self, stream: Raw) -> Result<(), Refusal>;
    unsafe fn stream_wait(&self, stream: Raw) -> Result<(), Refusal>;
    /// An event that keeps the time.
    fn event_create(&self) -> Result<Raw, Refusal>;
    unsafe fn event_destroy(&self, event: Raw) -> Result<(), Refusal>;
    unsafe fn event_record(&self, event: Raw, stream: Raw) -> Result<(), Refusal>;
    unsafe fn event_elapsed_ms(&self, start: Raw, stop: Raw) -> Result<f32, Refusal>;

    unsafe fn copy(&self, stream: Raw, dst: u64, src: u64, bytes: usize) -> Result<(), Refusal>;
    /// Copies in one call, in no order among themselves.
    unsafe fn copy_batch(&self, stream: Raw, copies: &CopyBatch) -> Result<(), Refusal>;
    /// Called where `DeviceInfo::no_cu_copies` says so.
    unsafe fn copy_no_cu(&self, _stream: Raw, _dst: u64, _src: u64, _bytes: usize) -> Result<(), Refusal> {
        Err(Refusal { call: "copy_no_cu", status: None })
    }
    unsafe fn copy_in(&self, stream: Raw, dst: u64, src: &[u8]) -> Result<(), Refusal>;
    /// `dst` is written until the stream has been waited for.
    unsafe fn copy_out(&self, stream: Raw, dst: &mut [u8], src: u64) -> Result<(), Refusal>;
    unsafe fn fill(&self, stream: Raw, dst: u64, byte: u8, bytes: usize) -> Result<(), Refusal>;

    /// `image` is a whole one, which the runtime copies.
    unsafe fn module_load(&self, image: &[u8]) -> Result<Raw, Refusal>;
    unsafe fn module_unload(&self, module: Raw) -> Result<(), Refusal>;
    unsafe fn module_function(&self, module: Raw, name: &CStr) -> Result<Raw, Refusal>;
    /// Lets launches of a function ask for so much shared memory.
    unsafe fn allow_shared(&self, function: Raw, bytes: u32) -> Result<(), Refusal>;
    /// `args` is the one struct that the kernel takes; the runtime copies it before it returns.
    unsafe fn launch(&self, stream: Raw, function: Raw, shape: Shape, args: &[u8]) -> Result<(), Refusal>;
}

/// An address as a pointer of this process.
pub fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

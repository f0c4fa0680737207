//! Device runtimes behind one trait, and the owners that free what they hold.

mod checks;
pub mod cuda;
pub mod faulty;
mod held;
#[cfg(feature = "hip")]
pub mod hip;
pub mod host;
mod images;
mod ipc;
#[cfg_attr(not(feature = "hip"), allow(dead_code))]
mod kfd;
mod layout;
mod library;
mod nvml;
pub mod owner;
pub mod peaks;
pub mod rtc;
mod runtime;
pub mod sensors;
mod slots;
mod spec;

use serde::{Deserialize, Serialize};

use self::peaks::Peaks;
use crate::error::Error;
use crate::place::MemKind;
use crate::region::Address;
use crate::units::Bytes;
pub use spec::{ANY_XCC, BulkVariant, KernelName, KernelSpec, Ticket, TransferVariant};

/// Position of a device among those of its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct DeviceId(pub u32);

/// A stream of one driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId(pub u64);

/// An event of one driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventId(pub u64);

/// A kernel loaded for one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelId(pub u64);

/// Lets another process open device memory; what the bytes mean is the driver's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportHandle(pub Vec<u8>);

/// What a device is and can do: facts, checked when planning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceInfo {
    pub name: String,
    /// `hip`, `cuda`, or `host (EMULATED)`.
    pub runtime: String,
    pub uuid: String,
    pub pci: String,
    /// `gfx942`, `sm_90`, `emulated`.
    pub architecture: String,
    pub memory_total: Bytes,
    /// Last-level cache that device reads pass; 0 = unknown.
    pub cache: Bytes,
    pub compute_units: u32,
    pub warp_size: u32,
    /// NUMA node of the system, where known.
    pub numa: Option<u32>,
    /// Kinds of memory that can be allocated on it.
    pub memory_kinds: Vec<MemKind>,
    /// Kinds of host memory that its runtime allocates (of `B D K`), beside those that a rank maps itself.
    pub host_kinds: Vec<MemKind>,
    /// The CPU may load and store its memory.
    pub cpu_access: bool,
    /// Its memory can be opened by another process of the host.
    pub exportable: bool,
    /// Dies of compute units (XCCs), which a mask or a sub-index counts; 0 = it has none, or nobody tells.
    pub xccs: u32,
    /// A stream can be kept to some of its compute units.
    pub cu_masks: bool,
    /// Copies can be kept from its compute units.
    pub no_cu_copies: bool,
    /// Why kernels cannot run, if so (no runtime compiler, unknown architecture).
    pub kernels_absent: Option<String>,
    /// Why there are no copies in batches, if so.
    pub batch_absent: Option<String>,
    /// Why there are no bulk copies through shared memory, if so.
    pub bulk_absent: Option<String>,
    /// What its memory and links can carry at most.
    pub peaks: Peaks,
}

/// One sub-executor's part, in device memory as an array; the same layout in `kernels/`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubExecutorRecord {
    /// Elements (float32) of this part.
    pub elements: u64,
    pub src_count: u32,
    pub dst_count: u32,
    /// Sub-executors that share these elements, word by word in turn (1 = all are its own), and
    /// which of them this one is. Read by the variant `single_team` alone.
    pub team_size: u32,
    pub team_index: u32,
    /// Start of this part in slice 0 of each source and destination.
    pub src: [u64; MAX_SIDES],
    pub dst: [u64; MAX_SIDES],
    pub src_stride: u64,
    pub src_slices: u64,
    pub dst_stride: u64,
    pub dst_slices: u64,
    /// Written by the kernel: device clock at the start and after a system-scope fence.
    pub start_ticks: u64,
    pub stop_ticks: u64,
}

/// Sources or destinations of one transfer that a kernel takes (TransferBench's limit).
pub const MAX_SIDES: usize = 8;

/// Arguments of `KernelName::Transfer`, passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TransferArgs {
    /// Device address of `SubExecutorRecord`s, one per block (or warp, in the variant `warps`).
    pub records: u64,
    /// Number of the first execution.
    pub first: u64,
    pub executions: u32,
    /// Records; blocks or warps beyond them do nothing.
    pub count: u32,
}

/// Arguments of `KernelName::Check`, passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CheckArgs {
    pub actual: u64,
    pub expected: u64,
    pub bytes: u64,
    /// Device address of two u64: mismatching bytes (added to), first mismatching offset (minimum).
    pub result: u64,
}

/// Arguments of `KernelName::Latch`, passed by value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LatchArgs {
    /// Device address of a u32, on this device or a peer.
    pub flag: u64,
    /// Device address of a u64 that gets the device clock of the release, 0 if none came in time.
    pub released: u64,
    pub max_ticks: u64,
    /// The flag is set when it has come this far, counting round.
    pub value: u32,
    pub _pad: u32,
}

/// Copies for one call, side by side as the runtimes take them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopyBatch {
    pub dsts: Vec<u64>,
    pub srcs: Vec<u64>,
    pub sizes: Vec<usize>,
}

/// What a device runtime can do: the intersection of HIP and the CUDA driver API, flat.
///
/// Errors carry the runtime's own text. All addresses are unified: copies and fills take device
/// addresses and host addresses that the runtime knows.
pub trait Driver: Send + Sync {
    /// `host`, `hip`, `cuda`.
    fn name(&self) -> &'static str;
    /// By `DeviceId`.
    fn devices(&self) -> Result<Vec<DeviceInfo>, Error>;
    fn memory_free(&self, device: DeviceId) -> Result<Bytes, Error>;
    fn enable_peer(&self, device: DeviceId, peer: DeviceId) -> Result<(), Error>;

    /// Memory of the device, or host memory of one of its `host_kinds`, which the CPU and every device
    /// of the driver find at the same address. `shareable`: another process will open it.
    fn allocate(&self, device: DeviceId, kind: MemKind, bytes: Bytes, shareable: bool) -> Result<Address, Error>;
    fn free(&self, device: DeviceId, address: Address) -> Result<(), Error>;
    /// `address` is the start of an allocation made `shareable`.
    fn export(&self, device: DeviceId, address: Address) -> Result<ExportHandle, Error>;
    /// Opens memory of another process (or of another driver of this process).
    fn import(&self, device: DeviceId, handle: &ExportHandle, bytes: Bytes) -> Result<Address, Error>;
    fn close_import(&self, device: DeviceId, address: Address) -> Result<(), Error>;
    /// Makes host memory usable by the device; the result is its address there.
    fn register_host(&self, device: DeviceId, address: Address, bytes: Bytes) -> Result<Address, Error>;
    fn unregister_host(&self, device: DeviceId, address: Address) -> Result<(), Error>;

    fn stream_create(&self, device: DeviceId) -> Result<StreamId, Error>;
    /// A stream whose kernels run on some compute units only: bit by bit, in words of 32.
    fn stream_create_masked(&self, device: DeviceId, _mask: &[u32]) -> Result<StreamId, Error> {
        Err(Error::new(format!("device {} has no masks of compute units", device.0)))
    }
    fn stream_destroy(&self, stream: StreamId) -> Result<(), Error>;
    /// Waits for everything queued; reports the first failure of it.
    fn stream_wait(&self, stream: StreamId) -> Result<(), Error>;

    fn event_create(&self, device: DeviceId) -> Result<EventId, Error>;
    fn event_destroy(&self, event: EventId) -> Result<(), Error>;
    fn event_record(&self, event: EventId, stream: StreamId) -> Result<(), Error>;
    /// Nanoseconds between two events that have happened.
    fn event_elapsed_ns(&self, start: EventId, stop: EventId) -> Result<f64, Error>;

    /// Queues a copy by the copy engine.
    fn copy(&self, stream: StreamId, dst: Address, src: Address, bytes: Bytes) -> Result<(), Error>;
    /// Queues several copies by the copy engine in one call; they have no order among themselves.
    fn copy_batch(&self, stream: StreamId, copies: &CopyBatch) -> Result<(), Error>;
    /// Queues a copy that the compute units never do instead.
    fn copy_no_cu(&self, _stream: StreamId, _dst: Address, _src: Address, _bytes: Bytes) -> Result<(), Error> {
        Err(Error::new(format!("the {} runtime cannot keep copies from compute units", self.name())))
    }
    /// Queues a fill.
    fn fill(&self, stream: StreamId, dst: Address, byte: u8, bytes: Bytes) -> Result<(), Error>;
    /// Copies from this process's memory, and returns when it is there.
    fn write(&self, device: DeviceId, dst: Address, src: &[u8]) -> Result<(), Error>;
    /// Copies to this process's memory, and returns when it is there.
    fn read(&self, device: DeviceId, src: Address, dst: &mut [u8]) -> Result<(), Error>;

    fn load_kernel(&self, device: DeviceId, kernel: &KernelSpec) -> Result<KernelId, Error>;
    /// Queues `blocks` blocks of `threads` threads (a transfer kernel's `block_threads`); `args` is the argument struct's bytes.
    fn launch(&self, stream: StreamId, kernel: KernelId, blocks: u32, threads: u32, args: &[u8]) -> Result<(), Error>;
    /// Nanoseconds per tick of the clock that kernels read.
    fn ns_per_tick(&self, device: DeviceId) -> Result<f64, Error>;
}

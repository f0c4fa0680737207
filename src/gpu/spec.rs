//! Which kernel is meant, and the constants that specialise it when it is compiled.

/// The kernels every driver can load, by name in `kernels/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelName {
    /// Copies or adds, rotating by itself: arguments `TransferArgs`.
    Transfer,
    /// Compares with expected bytes: arguments `CheckArgs`.
    Check,
    /// Copies by bulk asynchronous copies through shared memory, rotating by itself: arguments `TransferArgs`.
    Bulk,
    /// One thread that waits for a flag in device memory: arguments `LatchArgs`.
    Latch,
}

/// A kernel as it is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelSpec {
    Transfer(TransferVariant),
    Bulk(BulkVariant),
    Check,
    Latch,
}

impl KernelSpec {
    pub fn name(self) -> KernelName {
        match self {
            KernelSpec::Transfer(_) => KernelName::Transfer,
            KernelSpec::Bulk(_) => KernelName::Bulk,
            KernelSpec::Check => KernelName::Check,
            KernelSpec::Latch => KernelName::Latch,
        }
    }

    /// Shared memory of a block that a launch has to ask for.
    pub fn shared_bytes(self) -> u32 {
        match self {
            KernelSpec::Bulk(variant) => variant.stages * variant.stage_bytes,
            _ => 0,
        }
    }
}

/// The default variant.
impl From<KernelName> for KernelSpec {
    fn from(name: KernelName) -> KernelSpec {
        match name {
            KernelName::Transfer => KernelSpec::Transfer(TransferVariant::default()),
            KernelName::Bulk => KernelSpec::Bulk(BulkVariant::default()),
            KernelName::Check => KernelSpec::Check,
            KernelName::Latch => KernelSpec::Latch,
        }
    }
}

/// Constants of the transfer kernel; `kernels/transfer.h` says what each does. The result is the
/// same for all of them: a driver that cannot express one may leave it out, but for `warps`, which
/// changes what a launch means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferVariant {
    /// Threads of a block: every launch has to have just as many.
    pub block_threads: u32,
    /// Words that a thread has in flight: 1 to 8, 16 or 32.
    pub unroll: u32,
    /// Floats of a word: 1, 2 or 4.
    pub word: u32,
    /// Past the caches: 1 loads, 2 stores, 3 both.
    pub temporal: u32,
    /// TransferBench's `GFX_WAVE_ORDER`, 0 to 5.
    pub wave_order: u32,
    /// Records have a `team_size` other than 1.
    pub single_team: bool,
    /// A record belongs to a warp, and a block has `block_threads / warp_size` of them.
    pub warps: bool,
    /// Every record has exactly one source.
    pub copy: bool,
    /// Records are followed by a `Ticket` each: a block of the wanted XCC takes one after the other, so a
    /// launch has as many blocks for each XCC as it would have otherwise. Tickets are new for each launch.
    pub xcc: bool,
}

/// What a record wants, behind all records: the wanted XCC or `ANY_XCC`, and 0 until it is taken.
pub type Ticket = [u32; 2];

pub const ANY_XCC: u32 = u32::MAX;

/// Blocks of 256 threads with 8 words of 4 floats each in flight: what TransferBench launches, and
/// enough to fill the memory of an H200 with one block on each multiprocessor.
impl Default for TransferVariant {
    fn default() -> TransferVariant {
        TransferVariant {
            block_threads: 256,
            unroll: 8,
            word: 4,
            temporal: 0,
            wave_order: 0,
            single_team: false,
            warps: false,
            copy: false,
            xcc: false,
        }
    }
}

impl TransferVariant {
    /// Whether a kernel can tell on which XCC it runs: a register of gfx940 and later gfx9 devices (LLVM,
    /// "Syntax of AMDGPU Instruction Operands", hwreg). Devices of one XCC need none.
    pub fn tells_xcc(architecture: &str, xccs: u32) -> bool {
        let known = ["gfx940", "gfx941", "gfx942", "gfx950", "emulated"];
        xccs == 1 || known.contains(&architecture.split(':').next().unwrap_or(architecture))
    }

    /// The words in flight for an architecture where nobody asked for a number: TransferBench's
    /// choice for AMD (its `GFX_UNROLL`), and what measured best on an H200.
    pub fn unroll_for(architecture: &str) -> u32 {
        match architecture.split(':').next().unwrap_or(architecture) {
            "gfx906" | "gfx90a" => 8,
            "gfx1250" => 32,
            gfx if gfx.starts_with("gfx") => 4,
            _ => 8,
        }
    }
}

/// Constants of the bulk kernel: a ring of `stages` pieces of shared memory. The result is the same
/// for all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BulkVariant {
    /// 2 or more: half of them hold what is on its way in, half what is on its way out.
    pub stages: u32,
    /// A multiple of 128.
    pub stage_bytes: u32,
}

impl BulkVariant {
    /// One thread issues the copies; the others move what is left at the ends.
    pub const BLOCK_THREADS: u32 = 64;
}

/// 128 KiB on their way for each multiprocessor: more than latency times bandwidth of any device so far
/// (an H200's 4.8 TB/s and one microsecond are 36 KiB for each of 132).
impl Default for BulkVariant {
    fn default() -> BulkVariant {
        BulkVariant { stages: 8, stage_bytes: 16 << 10 }
    }
}

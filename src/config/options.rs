//! What a setting is, and every setting typed; the rows are in `table`.

use serde::{Deserialize, Serialize};

pub use super::table::OPTIONS;
use crate::place::ExeKind;
use crate::units::Bytes;

/// Which device runtime a run uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backend {
    /// Whatever real runtime is there; none is fine. Never the emulated one.
    Auto,
    Hip,
    Cuda,
    /// Devices emulated on the CPU.
    Host,
}

/// Which sources are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RotateScope {
    /// Device memory read by kernel and copy-engine executors.
    Gpu,
    /// Host memory and CPU executors too.
    All,
}

/// A rotation footprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RotateBytes {
    /// max(256 MiB, 4 x the largest cache on the path), capped at a quarter of the free memory.
    Auto,
    Size(Bytes),
}

/// Which of the devices that a rank sees it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gpus {
    /// Those that ranks of one host see in common are shared out evenly, in rank order.
    Split,
    /// Every rank takes all that it sees.
    All,
    /// The one whose number is the rank's position on its host.
    LocalRank,
}

/// How the executors of a sample start together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Start {
    Barrier,
}

/// When destinations are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Validate {
    Never,
    AtEnd,
    EveryIteration,
}

/// Whether CPU executors store past the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Streaming {
    /// Where the data outgrow the cache.
    Auto,
    Always,
    Never,
}

/// The order of sub-executors in a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BlockOrder {
    /// Transfer by transfer.
    Sequential,
    /// Number 0 of each transfer, then number 1 of each, and so on.
    Interleaved,
    /// Shuffled, the same in every run.
    Random,
}

/// What a sub-executor of a kernel executor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SubExecutorType {
    Block,
    Warp,
}

/// How the kernel executor moves data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gfx {
    /// Threads of a block: a multiple of 64 up to 1024.
    pub block_size: u32,
    /// Words in flight for each thread; none = by architecture.
    pub unroll: Option<u32>,
    /// Floats of a word.
    pub word_size: u32,
    /// Past the caches: 1 loads, 2 stores, 3 both.
    pub temporal: u32,
    /// TransferBench's orders 0 to 5.
    pub wave_order: u32,
    pub block_order: BlockOrder,
    /// None: `auto`, decided when the executor is prepared.
    pub single_team: Option<bool>,
    pub se_type: SubExecutorType,
    /// Compute units of each XCC that it may run on, ascending; empty = all.
    pub cu_mask: Vec<u32>,
    /// XCC to run on, by device of the executor (row) and of the destination (column); empty = any.
    pub xcc_preference: Vec<u32>,
}

/// How the bulk executor moves data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tdm {
    /// Of each block, over all stages.
    pub shared_bytes: Bytes,
    pub stages: u32,
}

/// Every setting, typed. A test has its own copy with its own keys laid over it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Options {
    pub backend: Backend,
    pub gpus: Gpus,

    pub iterations: u64,
    /// Timed seconds of a test; replaces `iterations`.
    pub seconds: Option<f64>,
    pub warmups: u64,
    /// Samples after a flush, and as many warm ones beside them.
    pub cold_iterations: u64,
    /// Repeats what rotates with twice the footprint.
    pub rotation_check: bool,
    pub sub_iterations: u32,
    pub start: Start,
    /// An implausible rate ends the run with the code of a missed expectation.
    pub strict: bool,
    pub deadline_seconds: f64,
    /// Sub-executors of each transfer; none = all that its executor has, shared evenly.
    pub sub_executors: Option<u32>,

    /// At least one size, none 0, all multiples of 4.
    pub bytes: Vec<Bytes>,
    /// At least one.
    pub src_rotate_bytes: Vec<RotateBytes>,
    pub src_rotate_scope: RotateScope,
    pub src_rotate_distinct: bool,
    /// `Auto` = as the sources, where a copy stays in the memory of its executor's device, else 0.
    pub dst_rotate_bytes: RotateBytes,
    pub fill_pattern: Vec<f32>,
    /// Percentages of 64-byte lines: random, 1B0, 2B0, 4B0, 32B0; empty or summing to 100.
    pub fill_compress: Vec<u8>,
    pub byte_offset: Bytes,
    pub block_bytes: Bytes,

    pub always_validate: Validate,
    pub validate_direct: bool,
    pub validate_source: bool,

    pub cpu_streaming: Streaming,

    pub gfx: Gfx,
    pub tdm: Tdm,

    /// Copy engines never fall back to compute units.
    pub dma_no_cu: bool,

    /// Emulated devices of each rank, and the memory of each.
    pub host_devices: u32,
    pub host_memory: Bytes,

    pub output_json: Option<String>,
    pub output_csv: Option<String>,
    pub output_iterations: bool,
}

/// What a setting looks like in TOML; the text forms are `value`'s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One of these words (a number may be written as one).
    Choice(&'static [&'static str]),
    /// True or false, or the word for neither.
    Switch(Option<&'static str>),
    /// A whole number, or the word for an absent one.
    Count(Option<&'static str>),
    /// A number of seconds, or the word for an absent one.
    Seconds(Option<&'static str>),
    Size,
    /// A size, a list of sizes, or `{ from, to, per_octave }`.
    Sizes,
    /// A size or `auto`.
    Rotation,
    /// A size or `auto`, or a list of them.
    Rotations,
    Percentages,
    /// Hex digits or a list of numbers.
    Pattern,
    /// Whole numbers in a list, or in a text such as `5, 10-12`.
    Numbers,
    /// Relative to the config file when written there.
    Path,
    /// A memory in the notation of transfers.
    Place,
}

/// Whose value of a setting counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settle {
    /// Every rank must have the same.
    Same,
    /// Rank 0's, whatever the others have.
    RankZero,
}

/// One setting.
pub struct Opt {
    /// Dotted TOML key.
    pub key: &'static str,
    pub kind: Kind,
    /// Read like any other value of the setting.
    pub default: &'static str,
    /// Name in the environment; TransferBench's where it has one.
    pub env: &'static str,
    /// Executors that honour it; empty = all.
    pub honoured_by: &'static [ExeKind],
    /// Whether a `[[test]]` may have its own.
    pub per_test: bool,
    pub settle: Settle,
    pub help: &'static str,
    /// Reads a text into the options.
    pub set: fn(&mut Options, &str) -> Result<(), String>,
    /// The text that `set` reads back to the same value.
    pub get: fn(&Options) -> String,
}

impl Opt {
    /// The key without its section, as a `[[test]]` writes it.
    pub fn short(&self) -> &'static str {
        self.key.rsplit_once('.').map_or(self.key, |(_, short)| short)
    }

    /// The section of the key, if it has one.
    pub fn section(&self) -> Option<&'static str> {
        self.key.rsplit_once('.').map(|(section, _)| section)
    }

    /// The text in the form that `get` prints, so that equal values have equal texts.
    ///
    /// # Errors
    /// What is wrong with the value, without the key.
    pub fn canonical(&self, text: &str) -> Result<String, String> {
        let mut options = Options::blank();
        (self.set)(&mut options, text)?;
        Ok((self.get)(&options))
    }
}

/// The row of a dotted key.
pub fn find(key: &str) -> Option<&'static Opt> {
    OPTIONS.iter().find(|opt| opt.key == key)
}

impl Options {
    /// A place to read values into; what it holds means nothing, since every default is in the table.
    fn blank() -> Options {
        Options {
            backend: Backend::Auto,
            gpus: Gpus::Split,
            iterations: 0,
            seconds: None,
            warmups: 0,
            cold_iterations: 0,
            rotation_check: false,
            sub_iterations: 0,
            start: Start::Barrier,
            strict: false,
            deadline_seconds: 0.0,
            sub_executors: None,
            bytes: Vec::new(),
            src_rotate_bytes: Vec::new(),
            src_rotate_scope: RotateScope::Gpu,
            src_rotate_distinct: false,
            dst_rotate_bytes: RotateBytes::Size(Bytes::ZERO),
            fill_pattern: Vec::new(),
            fill_compress: Vec::new(),
            byte_offset: Bytes::ZERO,
            block_bytes: Bytes::ZERO,
            always_validate: Validate::Never,
            validate_direct: false,
            validate_source: false,
            cpu_streaming: Streaming::Auto,
            gfx: Gfx {
                block_size: 0,
                unroll: None,
                word_size: 0,
                temporal: 0,
                wave_order: 0,
                block_order: BlockOrder::Sequential,
                single_team: None,
                se_type: SubExecutorType::Block,
                cu_mask: Vec::new(),
                xcc_preference: Vec::new(),
            },
            tdm: Tdm { shared_bytes: Bytes::ZERO, stages: 0 },
            dma_no_cu: false,
            host_devices: 0,
            host_memory: Bytes::ZERO,
            output_json: None,
            output_csv: None,
            output_iterations: false,
        }
    }
}

/// The defaults of the table.
impl Default for Options {
    fn default() -> Options {
        let mut options = Options::blank();
        for opt in OPTIONS {
            (opt.set)(&mut options, opt.default).expect("the table's defaults are valid");
        }
        options
    }
}

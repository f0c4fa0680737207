//! The one table of settings: key, type, default, environment name, who honours it, help.

use super::options::{
    Backend, BlockOrder, Gpus, Kind, Opt, RotateScope, Settle, Start, Streaming, SubExecutorType, Validate,
};
use super::{numbers, value};
use crate::place::ExeKind;

fn put<T>(place: &mut T, read: Result<T, String>) -> Result<(), String> {
    *place = read?;
    Ok(())
}

const BACKENDS: &[(&str, Backend)] =
    &[("auto", Backend::Auto), ("hip", Backend::Hip), ("cuda", Backend::Cuda), ("host", Backend::Host)];
const GPUS: &[(&str, Gpus)] = &[("split", Gpus::Split), ("all", Gpus::All), ("local_rank", Gpus::LocalRank)];
const STARTS: &[(&str, Start)] = &[("barrier", Start::Barrier)];
const SCOPES: &[(&str, RotateScope)] = &[("gpu", RotateScope::Gpu), ("all", RotateScope::All)];
const VALIDATES: &[(&str, Validate)] =
    &[("-1", Validate::Never), ("0", Validate::AtEnd), ("1", Validate::EveryIteration)];
const STREAMINGS: &[(&str, Streaming)] =
    &[("auto", Streaming::Auto), ("always", Streaming::Always), ("never", Streaming::Never)];

const BLOCK_ORDERS: &[(&str, BlockOrder)] =
    &[("0", BlockOrder::Sequential), ("1", BlockOrder::Interleaved), ("2", BlockOrder::Random)];
const SE_TYPES: &[(&str, SubExecutorType)] = &[("block", SubExecutorType::Block), ("warp", SubExecutorType::Warp)];
const WORD_SIZES: &[(&str, u32)] = &[("1", 1), ("2", 2), ("4", 4)];
const TEMPORALS: &[(&str, u32)] = &[("0", 0), ("1", 1), ("2", 2), ("3", 3)];
const WAVE_ORDERS: &[(&str, u32)] = &[("0", 0), ("1", 1), ("2", 2), ("3", 3), ("4", 4), ("5", 5)];

/// No rank needs more emulated devices than the largest real hosts have real ones.
const HOST_DEVICES_MAX: u32 = 64;

/// A row that every executor honours, a test may override, and ranks must agree on.
const ROW: Opt = Opt {
    key: "",
    kind: Kind::Switch(None),
    default: "",
    env: "",
    honoured_by: &[],
    per_test: true,
    settle: Settle::Same,
    help: "",
    set: |_, _| Ok(()),
    get: |_| String::new(),
};

/// Every setting there is.
pub static OPTIONS: &[Opt] = &[
    Opt {
        key: "backend",
        kind: Kind::Choice(&["auto", "hip", "cuda", "host"]),
        default: "auto",
        env: "TB_BACKEND",
        per_test: false,
        help: "device runtime; host = devices emulated on the CPU, never chosen by auto",
        set: |o, text| put(&mut o.backend, value::choice(text, BACKENDS)),
        get: |o| value::word(&o.backend, BACKENDS),
        ..ROW
    },
    Opt {
        key: "ranks.gpus",
        kind: Kind::Choice(&["split", "all", "local_rank"]),
        default: "split",
        env: "TB_RANKS_GPUS",
        per_test: false,
        help: "GPUs that ranks of a host see in common: shared out, all to each, or one to each",
        set: |o, text| put(&mut o.gpus, value::choice(text, GPUS)),
        get: |o| value::word(&o.gpus, GPUS),
        ..ROW
    },
    Opt {
        key: "run.iterations",
        kind: Kind::Count(None),
        default: "10",
        env: "NUM_ITERATIONS",
        help: "timed samples of a test; in the environment -n means n seconds",
        set: |o, text| put(&mut o.iterations, value::iterations(text)),
        get: |o| o.iterations.to_string(),
        ..ROW
    },
    Opt {
        key: "run.seconds",
        kind: Kind::Seconds(Some(value::NONE)),
        default: "none",
        env: "TB_SECONDS",
        help: "timed seconds of a test, in place of iterations",
        set: |o, text| put(&mut o.seconds, value::optional(text, value::NONE, value::seconds)),
        get: |o| value::print_optional(&o.seconds, value::NONE),
        ..ROW
    },
    Opt {
        key: "run.warmups",
        kind: Kind::Count(None),
        default: "3",
        env: "NUM_WARMUPS",
        help: "untimed samples before the timed ones",
        set: |o, text| put(&mut o.warmups, value::count(text, 0..=value::ITERATIONS_MAX)),
        get: |o| o.warmups.to_string(),
        ..ROW
    },
    Opt {
        key: "run.cold_iterations",
        kind: Kind::Count(None),
        default: "0",
        env: "TB_COLD_ITERATIONS",
        help: "extra samples after a flush of the caches, and as many warm ones in turn with them",
        set: |o, text| put(&mut o.cold_iterations, value::count(text, 0..=value::ITERATIONS_MAX)),
        get: |o| o.cold_iterations.to_string(),
        ..ROW
    },
    Opt {
        key: "run.rotation_check",
        kind: Kind::Switch(None),
        default: "false",
        env: "TB_ROTATION_CHECK",
        help: "repeats a test with twice its footprint, and marks rates that fall by more than 2 %",
        set: |o, text| put(&mut o.rotation_check, value::switch(text)),
        get: |o| o.rotation_check.to_string(),
        ..ROW
    },
    Opt {
        key: "run.sub_iterations",
        kind: Kind::Count(None),
        default: "1",
        env: "NUM_SUBITERATIONS",
        help: "repetitions inside one sample, whose time is divided by it",
        set: |o, text| put(&mut o.sub_iterations, value::count(text, 1..=u32::MAX)),
        get: |o| o.sub_iterations.to_string(),
        ..ROW
    },
    Opt {
        key: "run.start",
        kind: Kind::Choice(&["barrier"]),
        default: "barrier",
        env: "TB_START",
        per_test: false,
        help: "how the executors of a sample start together",
        set: |o, text| put(&mut o.start, value::choice(text, STARTS)),
        get: |o| value::word(&o.start, STARTS),
        ..ROW
    },
    Opt {
        key: "run.strict",
        kind: Kind::Switch(None),
        default: "false",
        env: "TB_STRICT",
        help: "a rate above what the hardware can do is a missed expectation (exit 6)",
        set: |o, text| put(&mut o.strict, value::switch(text)),
        get: |o| o.strict.to_string(),
        ..ROW
    },
    Opt {
        key: "run.deadline_seconds",
        kind: Kind::Seconds(None),
        default: "300",
        env: "TB_DEADLINE_SECONDS",
        per_test: false,
        help: "longest time of a phase before the run is aborted",
        set: |o, text| put(&mut o.deadline_seconds, value::seconds(text)),
        get: |o| o.deadline_seconds.to_string(),
        ..ROW
    },
    Opt {
        key: "run.sub_executors",
        kind: Kind::Count(Some("all")),
        default: "all",
        env: "TB_SUB_EXECUTORS",
        help: "threads or blocks of each transfer; all = those of its executor, shared evenly",
        set: |o, text| put(&mut o.sub_executors, value::optional(text, "all", value::sub_executors)),
        get: |o| value::print_optional(&o.sub_executors, "all"),
        ..ROW
    },
    Opt {
        key: "data.bytes",
        kind: Kind::Sizes,
        default: "256 MiB",
        env: "TB_BYTES",
        help: "payload of a transfer: a size, a list or a sweep; multiples of 4",
        set: |o, text| put(&mut o.bytes, value::sizes(text)),
        get: |o| value::join(&o.bytes),
        ..ROW
    },
    Opt {
        key: "data.src_rotate_bytes",
        kind: Kind::Rotations,
        default: "256 MiB",
        env: "SRC_ROTATE_BYTES",
        help: "bytes that source slices rotate over; 0 = off, auto = 4 x the largest cache on the path",
        set: |o, text| put(&mut o.src_rotate_bytes, value::rotations(text)),
        get: |o| value::join(&o.src_rotate_bytes),
        ..ROW
    },
    Opt {
        key: "data.src_rotate_scope",
        kind: Kind::Choice(&["gpu", "all"]),
        default: "gpu",
        env: "SRC_ROTATE_SCOPE",
        help: "sources that rotate: device memory read by devices, or host memory and CPUs too",
        set: |o, text| put(&mut o.src_rotate_scope, value::choice(text, SCOPES)),
        get: |o| value::word(&o.src_rotate_scope, SCOPES),
        ..ROW
    },
    Opt {
        key: "data.src_rotate_distinct",
        kind: Kind::Switch(None),
        default: "false",
        env: "SRC_ROTATE_DISTINCT",
        help: "other data in every slice: proves the rotation",
        set: |o, text| put(&mut o.src_rotate_distinct, value::switch(text)),
        get: |o| o.src_rotate_distinct.to_string(),
        ..ROW
    },
    Opt {
        key: "data.dst_rotate_bytes",
        kind: Kind::Rotation,
        default: "auto",
        env: "DST_ROTATE_BYTES",
        help: "for destinations; 0 = off, auto = as the sources in copies within a device",
        set: |o, text| put(&mut o.dst_rotate_bytes, value::rotation(text)),
        get: |o| o.dst_rotate_bytes.to_string(),
        ..ROW
    },
    Opt {
        key: "data.fill_pattern",
        kind: Kind::Pattern,
        default: "none",
        env: "FILL_PATTERN",
        help: "source data: hex digits or float32 numbers, repeated; none = the numbered reference",
        set: |o, text| put(&mut o.fill_pattern, value::pattern(text)),
        get: |o| value::print_pattern(&o.fill_pattern),
        ..ROW
    },
    Opt {
        key: "data.fill_compress",
        kind: Kind::Percentages,
        default: "none",
        env: "FILL_COMPRESS",
        help: "source data: percentages of 64-byte lines random, 1B0, 2B0, 4B0, 32B0",
        set: |o, text| put(&mut o.fill_compress, value::percentages(text)),
        get: |o| value::print_percentages(&o.fill_compress),
        ..ROW
    },
    Opt {
        key: "data.byte_offset",
        kind: Kind::Size,
        default: "0 B",
        env: "BYTE_OFFSET",
        help: "start of the data inside each buffer; a multiple of 4",
        set: |o, text| put(&mut o.byte_offset, value::element_size(text)),
        get: |o| o.byte_offset.to_string(),
        ..ROW
    },
    Opt {
        key: "data.block_bytes",
        kind: Kind::Size,
        default: "256 B",
        env: "BLOCK_BYTES",
        help: "sub-executors share a transfer in multiples of this; a multiple of 4",
        set: |o, text| put(&mut o.block_bytes, value::payload_size(text)),
        get: |o| o.block_bytes.to_string(),
        ..ROW
    },
    Opt {
        key: "validate.always_validate",
        kind: Kind::Choice(&["-1", "0", "1"]),
        default: "0",
        env: "ALWAYS_VALIDATE",
        help: "destinations are verified: -1 never, 0 at the end, 1 after every iteration",
        set: |o, text| put(&mut o.always_validate, value::choice(text, VALIDATES)),
        get: |o| value::word(&o.always_validate, VALIDATES),
        ..ROW
    },
    Opt {
        key: "validate.validate_direct",
        kind: Kind::Switch(None),
        default: "false",
        env: "VALIDATE_DIRECT",
        help: "the host reads device memory where it can, instead of a check on the device",
        set: |o, text| put(&mut o.validate_direct, value::switch(text)),
        get: |o| o.validate_direct.to_string(),
        ..ROW
    },
    Opt {
        key: "validate.validate_source",
        kind: Kind::Switch(None),
        default: "false",
        env: "VALIDATE_SOURCE",
        help: "sources are verified too, right after they are prepared",
        set: |o, text| put(&mut o.validate_source, value::switch(text)),
        get: |o| o.validate_source.to_string(),
        ..ROW
    },
    Opt {
        key: "cpu.streaming",
        kind: Kind::Choice(&["auto", "always", "never"]),
        default: "auto",
        env: "TB_CPU_STREAMING",
        honoured_by: &[ExeKind::Cpu],
        help: "stores past the cache; auto = where the data outgrow it",
        set: |o, text| put(&mut o.cpu_streaming, value::choice(text, STREAMINGS)),
        get: |o| value::word(&o.cpu_streaming, STREAMINGS),
        ..ROW
    },
    Opt {
        key: "gfx.block_size",
        kind: Kind::Count(None),
        default: "256",
        env: "GFX_BLOCK_SIZE",
        honoured_by: &[ExeKind::Kernel],
        help: "threads of a block: a multiple of 64 from 64 to 1024",
        set: |o, text| put(&mut o.gfx.block_size, value::block_size(text)),
        get: |o| o.gfx.block_size.to_string(),
        ..ROW
    },
    Opt {
        key: "gfx.unroll",
        kind: Kind::Count(Some("auto")),
        default: "auto",
        env: "GFX_UNROLL",
        honoured_by: &[ExeKind::Kernel],
        help: "words that a thread has in flight: 1 to 8, 16 or 32; auto = by architecture",
        set: |o, text| put(&mut o.gfx.unroll, value::optional(text, "auto", value::unroll)),
        get: |o| value::print_optional(&o.gfx.unroll, "auto"),
        ..ROW
    },
    Opt {
        key: "gfx.word_size",
        kind: Kind::Choice(&["1", "2", "4"]),
        default: "4",
        env: "GFX_WORD_SIZE",
        honoured_by: &[ExeKind::Kernel],
        help: "elements of one load or store, where addresses allow more than one",
        set: |o, text| put(&mut o.gfx.word_size, value::choice(text, WORD_SIZES)),
        get: |o| value::word(&o.gfx.word_size, WORD_SIZES),
        ..ROW
    },
    Opt {
        key: "gfx.temporal",
        kind: Kind::Choice(&["0", "1", "2", "3"]),
        default: "0",
        env: "GFX_TEMPORAL",
        honoured_by: &[ExeKind::Kernel],
        help: "past the caches: 1 loads, 2 stores, 3 both (a hint; NVIDIA: evict first)",
        set: |o, text| put(&mut o.gfx.temporal, value::choice(text, TEMPORALS)),
        get: |o| value::word(&o.gfx.temporal, TEMPORALS),
        ..ROW
    },
    Opt {
        key: "gfx.wave_order",
        kind: Kind::Choice(&["0", "1", "2", "3", "4", "5"]),
        default: "0",
        env: "GFX_WAVE_ORDER",
        honoured_by: &[ExeKind::Kernel],
        help: "unroll, wave, team, nearest first: 0 UWC 1 UCW 2 WUC 3 WCU 4 CUW 5 CWU",
        set: |o, text| put(&mut o.gfx.wave_order, value::choice(text, WAVE_ORDERS)),
        get: |o| value::word(&o.gfx.wave_order, WAVE_ORDERS),
        ..ROW
    },
    Opt {
        key: "gfx.block_order",
        kind: Kind::Choice(&["0", "1", "2"]),
        default: "0",
        env: "GFX_BLOCK_ORDER",
        honoured_by: &[ExeKind::Kernel, ExeKind::Bulk],
        help: "sub-executors: 0 transfer by transfer, 1 interleaved, 2 shuffled (seed 75)",
        set: |o, text| put(&mut o.gfx.block_order, value::choice(text, BLOCK_ORDERS)),
        get: |o| value::word(&o.gfx.block_order, BLOCK_ORDERS),
        ..ROW
    },
    Opt {
        key: "gfx.single_team",
        kind: Kind::Switch(Some("auto")),
        default: "auto",
        env: "GFX_SINGLE_TEAM",
        honoured_by: &[ExeKind::Kernel],
        help: "sub-executors stride over all of a transfer together; auto: within one device",
        set: |o, text| put(&mut o.gfx.single_team, value::optional(text, "auto", value::switch)),
        get: |o| value::print_optional(&o.gfx.single_team, "auto"),
        ..ROW
    },
    Opt {
        key: "gfx.se_type",
        kind: Kind::Choice(&["block", "warp"]),
        default: "block",
        env: "GFX_SE_TYPE",
        honoured_by: &[ExeKind::Kernel],
        help: "what a sub-executor is; in the environment also 0 and 1",
        set: |o, text| put(&mut o.gfx.se_type, value::numbered(text, SE_TYPES)),
        get: |o| value::word(&o.gfx.se_type, SE_TYPES),
        ..ROW
    },
    Opt {
        key: "gfx.cu_mask",
        kind: Kind::Numbers,
        default: "none",
        env: "CU_MASK",
        honoured_by: &[ExeKind::Kernel],
        help: "compute units of each XCC to run on, such as 5,10-12; none = all (AMD)",
        set: |o, text| put(&mut o.gfx.cu_mask, numbers::set(text)),
        get: |o| numbers::print_set(&o.gfx.cu_mask),
        ..ROW
    },
    Opt {
        key: "gfx.xcc_preference",
        kind: Kind::Numbers,
        default: "none",
        env: "XCC_PREF_TABLE",
        honoured_by: &[ExeKind::Kernel],
        help: "XCC to run on: rows are the executors' devices, columns the destinations' (AMD)",
        set: |o, text| put(&mut o.gfx.xcc_preference, numbers::table(text)),
        get: |o| numbers::print_table(&o.gfx.xcc_preference),
        ..ROW
    },
    Opt {
        key: "tdm.shared_bytes",
        kind: Kind::Size,
        default: "128 KiB",
        env: "TDM_LDS_BYTES",
        honoured_by: &[ExeKind::Bulk],
        help: "shared memory of each block that data pass, 4 KiB to 224 KiB",
        set: |o, text| put(&mut o.tdm.shared_bytes, value::shared_bytes(text)),
        get: |o| o.tdm.shared_bytes.to_string(),
        ..ROW
    },
    Opt {
        key: "tdm.stages",
        kind: Kind::Count(None),
        default: "8",
        env: "TB_TDM_STAGES",
        honoured_by: &[ExeKind::Bulk],
        help: "pieces of it: half fill while the others drain, 2 to 16",
        set: |o, text| put(&mut o.tdm.stages, value::count(text, 2..=16)),
        get: |o| o.tdm.stages.to_string(),
        ..ROW
    },
    Opt {
        key: "dma.no_cu",
        kind: Kind::Switch(None),
        default: "false",
        env: "TB_DMA_NO_CU",
        honoured_by: &[ExeKind::CopyEngine],
        help: "copies by copy engines alone, never by compute units instead (AMD, HIP 6)",
        set: |o, text| put(&mut o.dma_no_cu, value::switch(text)),
        get: |o| o.dma_no_cu.to_string(),
        ..ROW
    },
    Opt {
        key: "host.devices",
        kind: Kind::Count(None),
        default: "2",
        env: "TB_HOST_DEVICES",
        per_test: false,
        help: "emulated devices of each rank, with backend host",
        set: |o, text| put(&mut o.host_devices, value::count(text, 0..=HOST_DEVICES_MAX)),
        get: |o| o.host_devices.to_string(),
        ..ROW
    },
    Opt {
        key: "host.memory",
        kind: Kind::Size,
        default: "2 GiB",
        env: "TB_HOST_MEMORY",
        per_test: false,
        help: "memory of each emulated device",
        set: |o, text| put(&mut o.host_memory, value::payload_size(text)),
        get: |o| o.host_memory.to_string(),
        ..ROW
    },
    Opt {
        key: "output.json",
        kind: Kind::Path,
        default: "none",
        env: "TB_OUTPUT_JSON",
        per_test: false,
        settle: Settle::RankZero,
        help: "file for the results as JSON",
        set: |o, text| put(&mut o.output_json, value::path(text)),
        get: |o| value::print_optional(&o.output_json, value::NONE),
        ..ROW
    },
    Opt {
        key: "output.csv",
        kind: Kind::Path,
        default: "none",
        env: "TB_OUTPUT_CSV",
        per_test: false,
        settle: Settle::RankZero,
        help: "file for the results as CSV",
        set: |o, text| put(&mut o.output_csv, value::path(text)),
        get: |o| value::print_optional(&o.output_csv, value::NONE),
        ..ROW
    },
    Opt {
        key: "output.iterations",
        kind: Kind::Switch(None),
        default: "false",
        env: "SHOW_ITERATIONS",
        per_test: false,
        settle: Settle::RankZero,
        help: "a row for each iteration in the text output",
        set: |o, text| put(&mut o.output_iterations, value::switch(text)),
        get: |o| o.output_iterations.to_string(),
        ..ROW
    },
];

#[cfg(test)]
mod tests;

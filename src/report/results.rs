//! The one structure behind text, JSON and CSV.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::exec::Clock;
use crate::measure::circumstances::Circumstances;
pub use crate::plan::PatternStep;
pub use crate::stats::Summary;

/// Version of the JSON layout; changes are in CHANGELOG.md.
pub const SCHEMA: u32 = 1;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    pub schema: u32,
    pub tool: Tool,
    pub job: Job,
    /// Every setting by its dotted key.
    pub settings: BTreeMap<String, SettingEntry>,
    /// By rank.
    pub world: Vec<RankEntry>,
    pub warnings: Vec<String>,
    /// Of the run so far.
    pub exit_code: i32,
    /// False until the run has ended in order.
    pub complete: bool,
    pub tests: Vec<TestResult>,
}

impl Results {
    /// The text of a setting, by its dotted key.
    pub fn setting(&self, key: &str) -> Option<&str> {
        self.settings.get(key).map(|entry| entry.value.as_str())
    }

    /// Whether text and CSV show every sample.
    pub fn iterations_wanted(&self) -> bool {
        self.setting("output.iterations") == Some("true")
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tool {
    pub version: String,
    pub git: String,
    pub features: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Job {
    pub ranks: u32,
    /// Labels of the host groups.
    pub hosts: Vec<String>,
    /// Library version text, or "threads of one process".
    pub mpi: String,
    pub launcher: String,
    pub command: Vec<String>,
    /// UTC, RFC 3339.
    pub started: String,
    /// Devices are emulated on the CPU: no figure of a device means anything.
    pub emulated: bool,
    /// `hip`, `cuda`, `host`, or none.
    pub backend: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SettingEntry {
    pub value: String,
    /// "default", "cfg.toml:7", "environment SRC_ROTATE_BYTES", "--set".
    pub from: String,
    pub is_default: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankEntry {
    pub host: String,
    pub host_name: String,
    pub cpu_model: String,
    pub kernel: String,
    pub cpus_allowed: Vec<u32>,
    pub numa: Vec<crate::world::NumaNode>,
    pub caches: crate::world::Caches,
    pub memory_free: u64,
    pub devices: Vec<crate::gpu::DeviceInfo>,
}

/// How a test ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Passed,
    /// Some destination held wrong data.
    Mismatch,
    /// A rate was outside `expect`, or implausible in a strict run.
    OutsideExpectation,
    /// A phase failed; `failure` says which.
    Failed,
    /// Given up because an earlier test broke a device or stopped the run.
    NotRun,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TestResult {
    pub name: String,
    /// Where it stands in the pattern that it comes of.
    pub pattern: Option<PatternStep>,
    pub bytes: u64,
    pub src_rotate_bytes: u64,
    /// What the test sets for itself, by dotted key; all else is as `Results::settings` says.
    pub settings: BTreeMap<String, String>,
    pub outcome: Outcome,
    /// The agreed failure, word for word.
    pub failure: Option<String>,
    pub start: String,
    pub warmups: u64,
    pub iterations: u64,
    pub sub_iterations: u32,
    /// Latest start minus earliest start over the executors.
    pub start_spread_us: Option<Summary>,
    /// One execution: latest end minus earliest start, over sub-iterations.
    pub time_us: Option<Summary>,
    /// Sum of payload over `time_us.median`.
    pub rate_gbps: Option<f64>,
    /// `time_us.median` minus the median of the slowest executor.
    pub overhead_us: Option<f64>,
    pub executors: Vec<ExecutorResult>,
    pub transfers: Vec<TransferResult>,
    pub warnings: Vec<String>,
    /// One line for each violation of `expect`.
    pub violations: Vec<String>,
    /// By rank: what else went on meanwhile.
    pub circumstances: Vec<Circumstances>,
    /// Wall time of set-up (allocate, share, prepare), of the loop, and of verification, in seconds.
    pub setup_seconds: f64,
    pub run_seconds: f64,
    pub verify_seconds: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExecutorResult {
    pub rank: u32,
    pub exe: String,
    pub bytes: u64,
    pub time_us: Option<Summary>,
    pub rate_gbps: Option<f64>,
    pub clock: Clock,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verified {
    Passed,
    Failed,
    Unverified,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransferResult {
    pub index: u32,
    pub src: Vec<String>,
    pub exe: String,
    pub dst: Vec<String>,
    pub bytes: u64,
    /// Busy sub-executors.
    pub sub_executors: u32,
    /// K of the sources in force; 1 = not rotated.
    pub slices: u64,
    /// Bytes that the sources' rotation walks through, over all sources.
    pub footprint_bytes: u64,
    pub dst_slices: u64,
    /// Largest cache that its reads pass, which `footprint_bytes` has to outgrow; 0 = unknown.
    pub cache_bytes: u64,
    /// None where nothing was measured.
    pub clock: Option<Clock>,
    /// Of one execution, in sample order.
    pub samples_us: Vec<f64>,
    pub time_us: Option<Summary>,
    /// Payload over the median time.
    pub rate_gbps: Option<f64>,
    /// Payload over the mean time, as TransferBench prints it.
    pub rate_mean_gbps: Option<f64>,
    /// Read plus written, for transfers within one memory.
    pub traffic_gbps: Option<f64>,
    /// Payload over the median time of one execution after a flush.
    pub cold_gbps: Option<f64>,
    /// The same of the warm samples taken in turn with the cold ones.
    pub warm_gbps: Option<f64>,
    /// `warm_gbps` over `cold_gbps`.
    pub warm_over_cold: Option<f64>,
    pub cold_samples_us: Vec<f64>,
    pub warm_samples_us: Vec<f64>,
    /// What came of twice the footprint; none where that was not tried.
    pub rotation_check: Option<RotationCheck>,
    /// Median rate of the sizes of at least half the largest of its sweep; none where it is not one
    /// of several sizes.
    pub plateau_gbps: Option<f64>,
    /// The payload rate that the slowest thing on the path allows, where it is known.
    pub limit_gbps: Option<f64>,
    /// That thing: "memory of R0G0", "PCIe 5.0 x16 of R0G0".
    pub limit_by: Option<String>,
    /// `rate_gbps` over `limit_gbps`.
    pub of_limit: Option<f64>,
    pub verified: Verified,
    pub mismatch: Option<MismatchEntry>,
    pub marks: Vec<String>,
    /// Where threads ran and pages lay, as queried.
    pub placement: Vec<String>,
}

/// A transfer measured with twice its footprint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RotationCheck {
    pub slices: u64,
    pub footprint_bytes: u64,
    pub dst_slices: u64,
    pub rate_gbps: Option<f64>,
    /// Its rate over that of the footprint in force, less 1.
    pub change: Option<f64>,
}

impl TransferResult {
    /// `R0C0 -> R0C0 -> R1C0`, with `N` for no source or no destination.
    pub fn notation(&self) -> String {
        let side = |places: &[String]| if places.is_empty() { "N".to_owned() } else { places.concat() };
        format!("{} -> {} -> {}", side(&self.src), self.exe, side(&self.dst))
    }
}

/// The first wrong element of a destination.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MismatchEntry {
    /// Position among the destinations.
    pub destination: u32,
    pub place: String,
    pub rank: u32,
    pub host: String,
    /// Iteration after which it was seen; the last one is the verified extra sample.
    pub execution: u64,
    /// Element (float32) of the destination; none if only a guard zone was written.
    pub element: Option<u64>,
    pub expected: Option<String>,
    pub actual: Option<String>,
    pub wrong_bytes: u64,
    pub what: String,
}

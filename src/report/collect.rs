//! Turns what the ranks measured into the result of one test.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::figure::{counted, distinct};
use super::results::{ExecutorResult, MismatchEntry, Outcome, Summary, TestResult, TransferResult, Verified};
use super::{circumstances, limits};
use crate::config::Expect;
use crate::config::options::{Start, Validate};
use crate::exec::{Clock, Window};
use crate::measure::circumstances::Circumstances;
use crate::place::Executor;
use crate::plan::split::shares;
use crate::plan::{PlannedTest, Transfer};
use crate::stats::summarise;
use crate::units::{Bytes, Rank, rate_gbps};
use crate::world::World;

/// What one rank measured and checked in a test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    pub rank: u32,
    pub executors: Vec<ExecutorMeasure>,
    pub verdicts: Vec<Verdict>,
    /// Checks that were done another way than asked for.
    pub warnings: Vec<String>,
    pub circumstances: Circumstances,
}

/// The timed samples of one executor, warm-ups left out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExecutorMeasure {
    pub exe: Executor,
    /// Of its transfers' durations.
    pub clock: Clock,
    /// By sample, on the clock that the ranks of a host share.
    pub windows: Vec<Window>,
    pub transfers: Vec<TransferMeasure>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransferMeasure {
    pub index: u32,
    /// By sample: time of all its executions together.
    pub durations_ns: Vec<f64>,
    /// Of one execution each, after a flush; as many warm ones.
    pub cold_ns: Vec<f64>,
    pub warm_ns: Vec<f64>,
    pub placement: Vec<String>,
    pub marks: Vec<String>,
}

/// What the owner of a destination found there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    pub transfer: u32,
    /// Position among the destinations.
    pub destination: u32,
    pub mismatch: Option<MismatchEntry>,
}

/// Wall time of a test's parts, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PartSeconds {
    pub setup: f64,
    pub run: f64,
    pub verify: f64,
}

/// Mark of a transfer that was timed once.
pub(super) const SINGLE_SAMPLE: &str = "single sample";

/// The result of a test that ran on every rank.
///
/// # Panics
/// If a transfer was measured not exactly once, sample counts differ, or a verdict comes from a
/// rank that does not own the destination: the ranks follow one plan, so that is our mistake.
pub fn collect(test: &PlannedTest, world: &World, reports: &[RankReport], seconds: PartSeconds) -> TestResult {
    let executors = executors_in_order(reports);
    let samples = sample_count(&executors);
    let per_execution_us = |ns: f64| ns / f64::from(test.options.sub_iterations) / 1e3;

    let executor_results: Vec<ExecutorResult> =
        executors.iter().map(|exe| executor_result(test, exe, per_execution_us)).collect();
    let mut transfers = transfer_results(test, &executors, samples, per_execution_us);
    verify(test, reports, &mut transfers);
    let circumstances: Vec<Circumstances> = reports.iter().map(|report| report.circumstances.clone()).collect();
    circumstances::mark(test, &circumstances, &mut transfers);
    let above_limits = limits::apply(test, world, &mut transfers);

    let hosts = by_host(world, &executors);
    let spans: Vec<f64> = (0..samples).map(|i| per_execution_us(longest(&hosts, i, span_ns))).collect();
    let spreads: Vec<f64> = (0..samples).map(|i| longest(&hosts, i, spread_ns) / 1e3).collect();
    let time_us = summarise(&spans);
    let slowest = executor_results.iter().filter_map(|exe| Some(exe.time_us.as_ref()?.median)).reduce(f64::max);

    let mut result = skeleton(test, seconds);
    if hosts.len() > 1 {
        result.warnings.push(format!(
            "the executors are on {} hosts without a common clock: test time and start spread are the largest of any one host",
            hosts.len()
        ));
    }
    result.violations = test.expect.map_or_else(Vec::new, |expect| violations(&transfers, expect));
    result.violations.extend(above_limits);
    for warning in reports.iter().flat_map(|report| &report.warnings) {
        if !result.warnings.contains(warning) {
            result.warnings.push(warning.clone());
        }
    }
    result.outcome = if transfers.iter().any(|transfer| transfer.verified == Verified::Failed) {
        Outcome::Mismatch
    } else if result.violations.is_empty() {
        Outcome::Passed
    } else {
        Outcome::OutsideExpectation
    };
    result.circumstances = circumstances;
    result.iterations = samples as u64;
    result.start_spread_us = summarise(&spreads);
    // The aggregate is all bytes over the time of the test; rates of transfers are never added.
    let bytes = total_bytes(&test.transfers);
    result.rate_gbps = time_us.as_ref().and_then(|time| rate_gbps(bytes, time.median));
    result.overhead_us = time_us.as_ref().zip(slowest).map(|(time, slowest)| time.median - slowest);
    result.time_us = time_us;
    result.executors = executor_results;
    result.transfers = transfers;
    result
}

/// The result of a test without figures: a phase failed, or it was given up before it began.
pub fn unmeasured(test: &PlannedTest, outcome: Outcome, failure: Option<String>, seconds: PartSeconds) -> TestResult {
    let transfers = test.transfers.iter().map(|transfer| planned_transfer(test, transfer)).collect();
    TestResult { outcome, failure, transfers, ..skeleton(test, seconds) }
}

/// Everything that the plan alone tells.
fn skeleton(test: &PlannedTest, seconds: PartSeconds) -> TestResult {
    TestResult {
        name: test.name.clone(),
        pattern: test.pattern.clone(),
        bytes: test.bytes.0,
        src_rotate_bytes: test.src_rotate_bytes.0,
        settings: test.own_settings.iter().cloned().collect(),
        outcome: Outcome::Passed,
        failure: None,
        start: match test.options.start {
            Start::Barrier => "barrier".to_owned(),
        },
        warmups: test.options.warmups,
        iterations: 0,
        sub_iterations: test.options.sub_iterations,
        start_spread_us: None,
        time_us: None,
        rate_gbps: None,
        overhead_us: None,
        executors: Vec::new(),
        transfers: Vec::new(),
        warnings: test.warnings.clone(),
        violations: Vec::new(),
        circumstances: Vec::new(),
        setup_seconds: seconds.setup,
        run_seconds: seconds.run,
        verify_seconds: seconds.verify,
    }
}

fn planned_transfer(test: &PlannedTest, transfer: &Transfer) -> TransferResult {
    let busy = shares(transfer.bytes, transfer.sub_executors, test.options.block_bytes).len();
    let (no_src, no_dst) = (transfer.srcs.is_empty(), transfer.dsts.is_empty());
    TransferResult {
        index: transfer.index,
        src: transfer.srcs.iter().map(ToString::to_string).collect(),
        exe: transfer.exe.to_string(),
        dst: transfer.dsts.iter().map(ToString::to_string).collect(),
        bytes: transfer.bytes.0,
        sub_executors: busy as u32,
        slices: if no_src { 1 } else { transfer.src.slices },
        footprint_bytes: transfer.src.footprint().0 * transfer.srcs.len() as u64,
        dst_slices: if no_dst { 1 } else { transfer.dst.slices },
        cache_bytes: transfer.cache.0,
        clock: None,
        samples_us: Vec::new(),
        time_us: None,
        rate_gbps: None,
        rate_mean_gbps: None,
        traffic_gbps: None,
        cold_gbps: None,
        warm_gbps: None,
        warm_over_cold: None,
        cold_samples_us: Vec::new(),
        warm_samples_us: Vec::new(),
        rotation_check: None,
        plateau_gbps: None,
        limit_gbps: None,
        limit_by: None,
        of_limit: None,
        verified: Verified::Unverified,
        mismatch: None,
        marks: Vec::new(),
        placement: Vec::new(),
    }
}

fn total_bytes<'a>(transfers: impl IntoIterator<Item = &'a Transfer>) -> Bytes {
    Bytes(transfers.into_iter().map(|transfer| transfer.bytes.0).sum())
}

fn executors_in_order(reports: &[RankReport]) -> Vec<&ExecutorMeasure> {
    for report in reports {
        for measure in &report.executors {
            assert_eq!(measure.exe.rank, Rank(report.rank), "a rank reports its own executors");
        }
    }
    let mut executors: Vec<&ExecutorMeasure> = reports.iter().flat_map(|report| &report.executors).collect();
    executors.sort_by_key(|measure| measure.exe);
    executors
}

fn sample_count(executors: &[&ExecutorMeasure]) -> usize {
    let samples = executors.first().map_or(0, |measure| measure.windows.len());
    for measure in executors {
        assert_eq!(measure.windows.len(), samples, "{} took as many samples as the others", measure.exe);
    }
    samples
}

fn executor_result(test: &PlannedTest, measure: &ExecutorMeasure, us: impl Fn(f64) -> f64) -> ExecutorResult {
    let bytes = total_bytes(measure.transfers.iter().map(|part| &test.transfers[part.index as usize]));
    let times: Vec<f64> = measure.windows.iter().map(|window| us(window.ns())).collect();
    let time_us = summarise(&times);
    ExecutorResult {
        rank: measure.exe.rank.0,
        exe: measure.exe.to_string(),
        bytes: bytes.0,
        rate_gbps: time_us.as_ref().and_then(|time| rate_gbps(bytes, time.median)),
        time_us,
        clock: measure.clock,
    }
}

fn transfer_results(
    test: &PlannedTest,
    executors: &[&ExecutorMeasure],
    samples: usize,
    us: impl Fn(f64) -> f64,
) -> Vec<TransferResult> {
    let mut measures: BTreeMap<u32, (&ExecutorMeasure, &TransferMeasure)> = BTreeMap::new();
    for exe in executors {
        for measure in &exe.transfers {
            assert_eq!(measure.durations_ns.len(), samples, "transfer {} was timed in every sample", measure.index);
            let earlier = measures.insert(measure.index, (exe, measure));
            assert!(earlier.is_none(), "transfer {} was measured once", measure.index);
        }
    }
    let results = test.transfers.iter().map(|transfer| {
        let (exe, measure) = measures.remove(&transfer.index).expect("every transfer of the plan was measured");
        assert_eq!(exe.exe, transfer.exe, "transfer {} ran on its executor", transfer.index);
        measured_transfer(planned_transfer(test, transfer), transfer, exe.clock, measure, &us)
    });
    let results = results.collect();
    assert!(measures.is_empty(), "only transfers of the plan were measured");
    results
}

fn measured_transfer(
    planned: TransferResult,
    transfer: &Transfer,
    clock: Clock,
    measure: &TransferMeasure,
    us: impl Fn(f64) -> f64,
) -> TransferResult {
    // A clock that failed or stepped back measured nothing.
    let measured = |ns: &&f64| ns.is_finite() && **ns >= 0.0;
    let samples_us: Vec<f64> = measure.durations_ns.iter().filter(measured).map(|ns| us(*ns)).collect();
    let time_us = summarise(&samples_us);
    let mut marks = measure.marks.clone();
    let lost = measure.durations_ns.len() - samples_us.len();
    if lost > 0 {
        marks.push(format!("{} without a time", counted(lost, "sample")));
    }
    if let Some(time) = &time_us {
        marks.extend(marks_of(time));
    }
    let alone =
        |durations_ns: &[f64]| -> Vec<f64> { durations_ns.iter().filter(measured).map(|ns| ns / 1e3).collect() };
    let (cold_samples_us, warm_samples_us) = (alone(&measure.cold_ns), alone(&measure.warm_ns));
    let of_median = |samples_us: &[f64]| summarise(samples_us).and_then(|time| rate_gbps(transfer.bytes, time.median));
    let (cold_gbps, warm_gbps) = (of_median(&cold_samples_us), of_median(&warm_samples_us));
    let rate = |bytes: Bytes, time_us: Option<f64>| time_us.and_then(|time_us| rate_gbps(bytes, time_us));
    let median = time_us.as_ref().map(|time| time.median);
    TransferResult {
        clock: Some(clock),
        rate_gbps: rate(transfer.bytes, median),
        rate_mean_gbps: rate(transfer.bytes, time_us.as_ref().map(|time| time.mean)),
        traffic_gbps: local_traffic(transfer).and_then(|traffic| rate(traffic, median)),
        samples_us,
        time_us,
        cold_gbps,
        warm_gbps,
        warm_over_cold: warm_gbps.zip(cold_gbps).map(|(warm, cold)| warm / cold),
        cold_samples_us,
        warm_samples_us,
        marks,
        placement: measure.placement.clone(),
        ..planned
    }
}

fn marks_of(time: &Summary) -> Vec<String> {
    let mut marks = Vec::new();
    if time.n == 1 {
        marks.push(SINGLE_SAMPLE.to_owned());
    }
    if time.median == 0.0 {
        marks.push("no time passed on its clock".to_owned());
    }
    if time.outliers > 0 {
        marks.push(outlier_mark(time.outliers));
    }
    marks
}

pub(super) fn outlier_mark(outliers: u64) -> String {
    counted(outliers as usize, "outlier")
}

/// Bytes read and written, where one memory serves both sides.
fn local_traffic(transfer: &Transfer) -> Option<Bytes> {
    let mut places = transfer.srcs.iter().chain(&transfer.dsts);
    let first = places.next()?;
    let sides = (transfer.srcs.len() + transfer.dsts.len()) as u64;
    places.all(|place| place == first).then_some(Bytes(transfer.bytes.0.checked_mul(sides)?))
}

/// Lays the verdicts of the destinations' owners over the results.
fn verify(test: &PlannedTest, reports: &[RankReport], results: &mut [TransferResult]) {
    let mut verdicts: BTreeMap<(u32, u32), Vec<&Verdict>> = BTreeMap::new();
    for report in reports {
        for verdict in &report.verdicts {
            let place = test
                .transfers
                .get(verdict.transfer as usize)
                .and_then(|transfer| transfer.dsts.get(verdict.destination as usize))
                .expect("a verdict is about a destination of the plan");
            assert_eq!(place.rank, Rank(report.rank), "the owner of a destination checks it");
            verdicts.entry((verdict.transfer, verdict.destination)).or_default().push(verdict);
        }
    }
    for (transfer, result) in test.transfers.iter().zip(results) {
        let found: Vec<_> = (0..transfer.dsts.len() as u32).map(|d| verdicts.get(&(transfer.index, d))).collect();
        let mut wrong: Vec<&MismatchEntry> = found
            .iter()
            .flatten()
            .flat_map(|list| list.iter().filter_map(|verdict| verdict.mismatch.as_ref()))
            .collect();
        wrong.sort_by_key(|entry| (entry.execution, entry.destination));
        if let Some(first) = wrong.first() {
            result.verified = Verified::Failed;
            result.mismatch = Some((*first).clone());
            let places = wrong.iter().map(|entry| entry.destination).collect::<BTreeSet<_>>().len();
            if places > 1 {
                result.marks.push(format!("{places} destinations are wrong"));
            }
        } else if test.options.always_validate == Validate::Never {
            // Said once, in the header.
        } else if found.is_empty() {
            result.marks.push("nothing to verify".to_owned());
        } else if let Some(unchecked) = found.iter().position(Option::is_none) {
            result.marks.push(format!("destination {unchecked} was not checked"));
        } else {
            result.verified = Verified::Passed;
        }
    }
}

fn by_host<'a>(world: &World, executors: &[&'a ExecutorMeasure]) -> Vec<Vec<&'a ExecutorMeasure>> {
    let mut hosts: BTreeMap<u32, Vec<&ExecutorMeasure>> = BTreeMap::new();
    for measure in executors {
        hosts.entry(world.host_of[measure.exe.rank.0 as usize]).or_default().push(measure);
    }
    hosts.into_values().collect()
}

/// Largest figure of sample `i` over the hosts: their clocks cannot be compared.
fn longest(hosts: &[Vec<&ExecutorMeasure>], i: usize, figure_ns: impl Fn(&[Window]) -> f64) -> f64 {
    hosts
        .iter()
        .map(|host| figure_ns(&host.iter().map(|measure| measure.windows[i]).collect::<Vec<_>>()))
        .fold(0.0, f64::max)
}

/// Latest end minus earliest start.
fn span_ns(windows: &[Window]) -> f64 {
    Window::around(windows.iter().copied()).map_or(0.0, Window::ns)
}

/// Latest start minus earliest start.
fn spread_ns(windows: &[Window]) -> f64 {
    let starts = windows.iter().map(|window| window.start_ns);
    starts.clone().max().zip(starts.min()).map_or(0.0, |(latest, earliest)| (latest - earliest) as f64)
}

fn violations(transfers: &[TransferResult], Expect { min_gbps: min, max_gbps: max }: Expect) -> Vec<String> {
    let line = |transfer: &TransferResult| {
        let name = format!("transfer {} ({})", transfer.index, transfer.notation());
        let Some(rate) = transfer.rate_gbps else { return Some(format!("{name}: no rate was measured")) };
        let (bound, side, key) = match (min, max) {
            (Some(min), _) if rate < min => (min, "below", "min_gbps"),
            (_, Some(max)) if rate > max => (max, "above", "max_gbps"),
            _ => return None,
        };
        let (rate, bound) = distinct(rate, bound);
        Some(format!("{name}: {rate} GB/s is {side} {key} = {bound}"))
    };
    if min.is_none() && max.is_none() { Vec::new() } else { transfers.iter().filter_map(line).collect() }
}

#[cfg(test)]
mod tests;

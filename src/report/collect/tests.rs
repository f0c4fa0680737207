//! Checks the rules by which measurements become a result.

use super::*;
use crate::report::fixtures::*;
use crate::units::Rank;

const NO_TIME: PartSeconds = PartSeconds { setup: 0.0, run: 0.0, verify: 0.0 };

fn window(start_us: u64, end_us: u64) -> Window {
    Window { start_ns: start_us * 1000, end_ns: end_us * 1000 }
}

/// An executor of `rank` with one transfer whose durations fill the windows.
fn measure(rank: u32, index: u32, windows: &[Window]) -> ExecutorMeasure {
    let durations_ns = windows.iter().map(|window| window.ns()).collect();
    ExecutorMeasure {
        exe: cpu(rank),
        clock: Clock::Host,
        windows: windows.to_vec(),
        transfers: vec![TransferMeasure {
            index,
            durations_ns,
            cold_ns: Vec::new(),
            warm_ns: Vec::new(),
            placement: Vec::new(),
            marks: Vec::new(),
        }],
    }
}

fn report(rank: u32, executors: Vec<ExecutorMeasure>, good: &[(u32, u32)]) -> RankReport {
    let verdicts = good.iter().map(|(transfer, destination)| Verdict {
        transfer: *transfer,
        destination: *destination,
        mismatch: None,
    });
    RankReport {
        rank,
        executors,
        verdicts: verdicts.collect(),
        warnings: Vec::new(),
        circumstances: Circumstances { rank, ..Circumstances::default() },
    }
}

/// Two ranks, each pushing to the other, one sample: rank 0 in 0..100 us, rank 1 in 20..150 us.
fn two_ranks() -> (PlannedTest, Vec<RankReport>) {
    let test = planned(vec![transfer(0, &[0], 0, &[1]), transfer(1, &[1], 1, &[0])]);
    let reports = vec![
        report(0, vec![measure(0, 0, &[window(0, 100)])], &[(1, 0)]),
        report(1, vec![measure(1, 1, &[window(20, 150)])], &[(0, 0)]),
    ];
    (test, reports)
}

fn median(summary: &Option<Summary>) -> f64 {
    summary.as_ref().unwrap().median
}

fn expecting(test: &PlannedTest, min_gbps: Option<f64>, max_gbps: Option<f64>) -> PlannedTest {
    PlannedTest { expect: Some(crate::config::Expect { min_gbps, max_gbps }), ..test.clone() }
}

#[test]
fn the_test_spans_earliest_start_to_latest_end() {
    let (test, reports) = two_ranks();
    let result = collect(&test, &world(&[0, 0]), &reports, NO_TIME);
    assert_eq!(median(&result.time_us), 150.0);
    assert_eq!(median(&result.start_spread_us), 20.0);
    assert_eq!(result.overhead_us, Some(20.0));
    assert_eq!(result.transfers.iter().map(|t| median(&t.time_us)).collect::<Vec<_>>(), [100.0, 130.0]);
    assert_eq!(result.executors.iter().map(|e| e.exe.as_str()).collect::<Vec<_>>(), ["R0C0", "R1C0"]);
    assert_eq!((result.iterations, result.outcome), (1, Outcome::Passed));
    assert!(result.warnings.is_empty());
}

#[test]
fn the_aggregate_is_all_bytes_over_the_time_of_the_test() {
    let (test, reports) = two_ranks();
    let result = collect(&test, &world(&[0, 0]), &reports, NO_TIME);
    let sum: f64 = result.transfers.iter().map(|t| t.rate_gbps.unwrap()).sum();
    assert_eq!(result.rate_gbps, rate_gbps(Bytes::mib(2), 150.0));
    assert!(result.rate_gbps.unwrap() < sum);
}

#[test]
fn hosts_without_a_common_clock_are_timed_each_by_itself() {
    let (test, mut reports) = two_ranks();
    // The clock of the other host is ahead by a second.
    reports[1].executors[0] = measure(1, 1, &[window(1_000_020, 1_000_150)]);
    let result = collect(&test, &world(&[0, 1]), &reports, NO_TIME);
    assert_eq!(median(&result.time_us), 130.0);
    assert_eq!(median(&result.start_spread_us), 0.0);
    assert_eq!(result.warnings.len(), 1);
    assert!(result.warnings[0].contains("2 hosts"), "{}", result.warnings[0]);
}

#[test]
fn times_are_of_one_execution_and_the_start_spread_is_not_divided() {
    let (mut test, reports) = two_ranks();
    test.options.sub_iterations = 10;
    let result = collect(&test, &world(&[0, 0]), &reports, NO_TIME);
    assert_eq!(median(&result.time_us), 15.0);
    assert_eq!(median(&result.executors[0].time_us), 10.0);
    assert_eq!(result.transfers[0].samples_us, [10.0]);
    assert_eq!(median(&result.start_spread_us), 20.0);
}

#[test]
fn an_executor_is_timed_over_all_its_transfers() {
    let test = planned(vec![transfer(0, &[0], 0, &[1]), transfer(1, &[0], 0, &[1])]);
    let mut exe = measure(0, 0, &[window(0, 100)]);
    exe.transfers.extend(measure(0, 1, &[window(0, 40)]).transfers);
    let reports = [report(0, vec![exe], &[]), report(1, Vec::new(), &[(0, 0), (1, 0)])];
    let result = collect(&test, &world(&[0, 0]), &reports, NO_TIME);
    assert_eq!((result.executors.len(), result.executors[0].bytes), (1, 2 * MIB));
    assert_eq!(result.executors[0].rate_gbps, rate_gbps(Bytes::mib(2), 100.0));
    assert_eq!(result.transfers[1].rate_gbps, rate_gbps(Bytes::mib(1), 40.0));
}

fn verify_one(test: &PlannedTest, verdicts: Vec<Verdict>) -> TestResult {
    let mut reports = vec![report(0, vec![measure(0, 0, &[window(0, 100); 3])], &[]), report(1, Vec::new(), &[])];
    reports[1].verdicts = verdicts;
    collect(test, &world(&[0, 0]), &reports, NO_TIME)
}

fn verdict(destination: u32, mismatch: Option<MismatchEntry>) -> Verdict {
    Verdict { transfer: 0, destination, mismatch }
}

#[test]
fn passed_needs_a_good_verdict_of_every_destination() {
    let test = planned(vec![transfer(0, &[0], 0, &[1, 1])]);
    let both = verify_one(&test, vec![verdict(0, None), verdict(1, None)]);
    assert_eq!(both.transfers[0].verified, Verified::Passed);
    let one = verify_one(&test, vec![verdict(0, None)]);
    assert_eq!(one.transfers[0].verified, Verified::Unverified);
    assert_eq!(one.transfers[0].marks, ["destination 1 was not checked"]);
}

#[test]
fn the_first_mismatch_is_reported_and_outranks_a_missed_expectation() {
    let test = planned(vec![transfer(0, &[0], 0, &[1, 1])]);
    let at = |destination, execution| MismatchEntry { destination, execution, ..mismatch() };
    let verdicts = vec![verdict(0, Some(at(0, 9))), verdict(1, Some(at(1, 2))), verdict(1, Some(at(1, 9)))];
    let result = verify_one(&test, verdicts.clone());
    assert_eq!((result.outcome, result.transfers[0].verified), (Outcome::Mismatch, Verified::Failed));
    assert_eq!(result.transfers[0].mismatch, Some(at(1, 2)));
    assert_eq!(result.transfers[0].marks, ["2 destinations are wrong"]);

    let rank_1 =
        RankReport { rank: 1, executors: vec![], verdicts, warnings: vec![], circumstances: Circumstances::default() };
    let reports = [report(0, vec![measure(0, 0, &[window(0, 100)])], &[]), rank_1];
    let result = collect(&expecting(&test, Some(1e6), None), &world(&[0, 0]), &reports, NO_TIME);
    assert_eq!((result.outcome, result.violations.len()), (Outcome::Mismatch, 1));
}

#[test]
fn what_was_not_checked_is_unverified() {
    let no_destination = planned(vec![transfer(0, &[0], 0, &[])]);
    let result = verify_one(&no_destination, Vec::new());
    assert_eq!(result.transfers[0].verified, Verified::Unverified);
    assert_eq!(result.transfers[0].marks, ["nothing to verify"]);

    let mut never = planned(vec![transfer(0, &[0], 0, &[1])]);
    never.options.always_validate = Validate::Never;
    let result = verify_one(&never, Vec::new());
    assert_eq!(result.transfers[0].verified, Verified::Unverified);
    assert!(result.transfers[0].marks.is_empty());
}

#[test]
fn each_rate_outside_the_range_is_one_line() {
    let (test, reports) = two_ranks();
    // 10.5 and 8.07 GB/s.
    let check = |(min, max)| collect(&expecting(&test, min, max), &world(&[0, 0]), &reports, NO_TIME);
    let below = check((Some(9.0), None));
    assert_eq!(below.outcome, Outcome::OutsideExpectation);
    assert_eq!(below.violations, ["transfer 1 (R1C0 -> R1C0 -> R0C0): 8.07 GB/s is below min_gbps = 9.00"]);
    let above = check((None, Some(10.0)));
    assert_eq!(above.violations, ["transfer 0 (R0C0 -> R0C0 -> R1C0): 10.5 GB/s is above max_gbps = 10.0"]);
    assert_eq!(check((Some(11.0), Some(12.0))).violations.len(), 2);
    assert_eq!(check((Some(8.0), Some(11.0))).outcome, Outcome::Passed);
    assert_eq!(check((None, None)).outcome, Outcome::Passed);
}

#[test]
fn a_clock_that_stands_still_or_breaks_gives_no_rate_and_says_so() {
    let test = expecting(&planned(vec![transfer(0, &[0], 0, &[])]), Some(1.0), None);
    let durations = |durations_ns: &[f64]| {
        let mut exe = measure(0, 0, &vec![window(0, 100); durations_ns.len()]);
        exe.transfers[0].durations_ns = durations_ns.to_vec();
        let result = collect(&test, &world(&[0]), &[report(0, vec![exe], &[])], NO_TIME);
        (result.transfers[0].clone(), result.violations)
    };
    let (still, violations) = durations(&[0.0, 0.0]);
    assert_eq!((still.rate_gbps, still.rate_mean_gbps), (None, None));
    assert!(still.marks.contains(&"no time passed on its clock".to_owned()));
    assert_eq!(violations, ["transfer 0 (R0C0 -> R0C0 -> N): no rate was measured"]);

    let (broken, _) = durations(&[f64::NAN, -5.0, 2000.0, f64::INFINITY]);
    assert_eq!(broken.samples_us, [2.0]);
    assert!(broken.marks.contains(&"3 samples without a time".to_owned()));
    assert!(broken.marks.contains(&"single sample".to_owned()));

    let (nothing, _) = durations(&[f64::NAN]);
    assert_eq!((nothing.time_us, nothing.rate_gbps), (None, None));
}

#[test]
fn outliers_are_marked_and_stay() {
    let test = planned(vec![transfer(0, &[0], 0, &[])]);
    let windows: Vec<Window> = [100, 101, 99, 100, 102, 300].iter().map(|end| window(0, *end)).collect();
    let reports = [report(0, vec![measure(0, 0, &windows)], &[])];
    let result = collect(&test, &world(&[0]), &reports, NO_TIME);
    assert_eq!(result.transfers[0].samples_us.len(), 6);
    assert!(result.transfers[0].marks.contains(&"1 outlier".to_owned()));
}

#[test]
fn local_copies_give_traffic_and_others_do_not() {
    let check = |srcs: &[u32], dsts: &[u32]| {
        let test = planned(vec![transfer(0, srcs, 0, dsts)]);
        let reports = [report(0, vec![measure(0, 0, &[window(0, 100)])], &[]), report(1, Vec::new(), &[])];
        collect(&test, &world(&[0, 0]), &reports, NO_TIME).transfers[0].traffic_gbps
    };
    assert_eq!(check(&[0], &[0]), rate_gbps(Bytes::mib(2), 100.0));
    assert_eq!(check(&[0, 0], &[0]), rate_gbps(Bytes::mib(3), 100.0));
    assert_eq!(check(&[1], &[1]), rate_gbps(Bytes::mib(2), 100.0));
    assert_eq!(check(&[0], &[1]), None);
}

#[test]
fn rotation_in_force_is_recorded() {
    let test = planned(vec![transfer(0, &[0, 1], 0, &[1])]);
    let result = unmeasured(&test, Outcome::NotRun, None, NO_TIME);
    assert_eq!((result.transfers[0].slices, result.transfers[0].footprint_bytes), (256, 512 * MIB));
    let fill = unmeasured(&planned(vec![transfer(0, &[], 0, &[1])]), Outcome::NotRun, None, NO_TIME);
    assert_eq!((fill.transfers[0].slices, fill.transfers[0].footprint_bytes), (1, 0));
}

#[test]
fn idle_sub_executors_are_not_counted() {
    let mut wide = transfer(0, &[0], 0, &[1]);
    (wide.bytes, wide.sub_executors) = (Bytes(512), 8);
    let result = unmeasured(&planned(vec![wide]), Outcome::NotRun, None, NO_TIME);
    assert_eq!(result.transfers[0].sub_executors, 2);
}

#[test]
fn a_test_without_figures_keeps_its_transfers() {
    let (test, _) = two_ranks();
    let seconds = PartSeconds { setup: 1.5, run: 0.5, verify: 0.25 };
    let result = unmeasured(&test, Outcome::Failed, Some("error: x".to_owned()), seconds);
    assert_eq!((result.outcome, result.failure.as_deref()), (Outcome::Failed, Some("error: x")));
    assert_eq!((result.setup_seconds, result.run_seconds, result.verify_seconds), (1.5, 0.5, 0.25));
    let figures = result.transfers.iter().map(|t| (t.notation(), t.clock, t.rate_gbps, t.verified));
    let expected = [("R0C0 -> R0C0 -> R1C0"), ("R1C0 -> R1C0 -> R0C0")];
    assert!(figures.eq(expected.map(|name| (name.to_owned(), None, None, Verified::Unverified))));
}

#[test]
fn samples_that_were_never_taken_are_absent() {
    let test = planned(vec![transfer(0, &[0], 0, &[])]);
    let result = collect(&test, &world(&[0]), &[report(0, vec![measure(0, 0, &[])], &[])], NO_TIME);
    assert_eq!((result.time_us, result.rate_gbps, result.overhead_us), (None, None, None));
    assert_eq!((result.iterations, result.start_spread_us), (0, None));
}

#[test]
#[should_panic(expected = "as many samples as the others")]
fn ranks_that_took_different_numbers_of_samples_are_our_mistake() {
    let (test, mut reports) = two_ranks();
    reports[1].executors[0] = measure(1, 1, &[window(0, 1), window(2, 3)]);
    collect(&test, &world(&[0, 0]), &reports, NO_TIME);
}

#[test]
#[should_panic(expected = "every transfer of the plan was measured")]
fn a_missing_rank_is_our_mistake() {
    let (test, mut reports) = two_ranks();
    reports.pop();
    collect(&test, &world(&[0, 0]), &reports, NO_TIME);
}

#[test]
#[should_panic(expected = "the owner of a destination checks it")]
fn a_verdict_of_a_stranger_is_our_mistake() {
    let (test, mut reports) = two_ranks();
    reports[1].verdicts[0].transfer = 1;
    assert_eq!(test.transfers[1].dsts[0].rank, Rank(0));
    collect(&test, &world(&[0, 0]), &reports, NO_TIME);
}

#[test]
fn cold_and_warm_samples_are_of_one_execution_and_not_in_the_headline() {
    let mut test = planned(vec![transfer(0, &[0], 0, &[1])]);
    test.options.sub_iterations = 4;
    let mut report = report(0, vec![measure(0, 0, &[window(0, 4)])], &[]);
    report.executors[0].transfers[0].cold_ns = vec![3000.0, f64::NAN, 2000.0, 2500.0];
    report.executors[0].transfers[0].warm_ns = vec![1000.0, 1250.0, 1300.0];
    let result = collect(&test, &world(&[0, 0]), &[report], NO_TIME);
    let transfer = &result.transfers[0];
    let gbps = |us: f64| rate_gbps(Bytes::mib(1), us);
    assert_eq!(transfer.samples_us, [1.0]);
    assert_eq!(transfer.rate_gbps, gbps(1.0));
    assert_eq!(
        (&transfer.cold_samples_us[..], &transfer.warm_samples_us[..]),
        (&[3.0, 2.0, 2.5][..], &[1.0, 1.25, 1.3][..])
    );
    assert_eq!((transfer.cold_gbps, transfer.warm_gbps), (gbps(2.5), gbps(1.25)));
    assert_eq!(transfer.warm_over_cold, Some(2.0));
}

#[test]
fn an_implausible_rate_fails_a_strict_run_alone() {
    let (mut test, mut reports) = two_ranks();
    // 1 MiB in 100 us is 10.5 GB/s, twice what this memory can take.
    let mut world = world(&[0, 0]);
    let peaks = crate::gpu::peaks::Peaks { memory_gbps: Some(5.0), ..Default::default() };
    world.ranks[1].devices = vec![crate::gpu::DeviceInfo { peaks, ..device() }];
    test.transfers[0].dsts[0].kind = crate::place::MemKind::Device;
    reports[0].circumstances.contended = Some("why".to_owned());
    let result = collect(&test, &world, &reports, NO_TIME);
    assert_eq!(result.outcome, Outcome::Passed);
    assert_eq!(result.transfers[0].limit_by.as_deref(), Some("memory of R1G0"));
    assert_eq!(result.transfers[0].limit_gbps, Some(5.0));
    assert!(result.transfers[0].marks.iter().any(|mark| mark.starts_with("implausible: ")));
    assert!(result.transfers[0].marks.contains(&"contended".to_owned()));
    assert!(!result.transfers[1].marks.contains(&"contended".to_owned()));
    assert_eq!((result.transfers[1].limit_gbps, result.transfers[1].of_limit), (None, None));
    assert_eq!(result.circumstances.len(), 2);

    test.options.strict = true;
    let result = collect(&test, &world, &reports, NO_TIME);
    assert_eq!((result.outcome, result.violations.len()), (Outcome::OutsideExpectation, 1));
}

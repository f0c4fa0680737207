//! Marks rates that a cache had a hand in.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use super::results::{Outcome, RotationCheck, TestResult, TransferResult, Verified};
use crate::stats::summarise;
use crate::units::{Bytes, rate_gbps};

/// Mark of a size that is faster than the plateau of its sweep.
pub const ABOVE_PLATEAU: &str = "above_plateau";

/// How far a rate may exceed the plateau before it is marked: two runs of one size differ by less.
const PLATEAU_EXCESS: f64 = 1.05;

/// Gives every transfer of a sweep its plateau, and marks the sizes above it. May be repeated as the
/// sweep grows.
///
/// A sweep is one transfer of tests that share name and rotation, at several sizes. Its plateau is
/// the median of the rates of the sizes of at least half the largest one: that one, and in a sweep
/// by doubling the one before it. A smaller size is above the plateau where its rate exceeds it by
/// more than 5 %, and its interval lies above those of the sizes that make the plateau (a rate
/// without one, of few samples, counts as it is).
pub fn mark_plateaus(tests: &mut [TestResult]) {
    let mut sweeps: BTreeMap<(String, u64, u32, String), Vec<&mut TransferResult>> = BTreeMap::new();
    for test in tests {
        let (name, rotation) = (&test.name, test.src_rotate_bytes);
        for transfer in &mut test.transfers {
            transfer.plateau_gbps = None;
            transfer.marks.retain(|mark| mark != ABOVE_PLATEAU);
            let key = (name.clone(), rotation, transfer.index, transfer.notation());
            sweeps.entry(key).or_default().push(transfer);
        }
    }
    for sweep in sweeps.into_values() {
        mark_sweep(sweep);
    }
}

fn mark_sweep(sweep: Vec<&mut TransferResult>) {
    let Some(largest) = sweep.iter().filter(|step| step.rate_gbps.is_some()).map(|step| step.bytes).max() else {
        return;
    };
    let is_large = |bytes: u64| bytes >= largest.div_ceil(2);
    if sweep.iter().all(|step| is_large(step.bytes)) {
        return;
    }
    let large: Vec<&TransferResult> =
        sweep.iter().map(|step| &**step).filter(|step| is_large(step.bytes) && step.rate_gbps.is_some()).collect();
    let rates: Vec<f64> = large.iter().filter_map(|step| step.rate_gbps).collect();
    let Some(plateau) = summarise(&rates).map(|rates| rates.median) else { return };
    let highest = large.iter().filter_map(|step| interval(step)).map(|[_, high]| high).fold(0.0, f64::max);
    for step in sweep {
        step.plateau_gbps = Some(plateau);
        let apart = interval(step).is_some_and(|[low, _]| low > highest);
        let exceeds = step.rate_gbps.is_some_and(|rate| rate > PLATEAU_EXCESS * plateau);
        if !is_large(step.bytes) && exceeds && apart {
            step.marks.push(ABOVE_PLATEAU.to_owned());
        }
    }
}

/// Where the rate may lie: its interval, or where that is not known, itself.
fn interval(step: &TransferResult) -> Option<[f64; 2]> {
    let rate = step.rate_gbps?;
    let ends = step.time_us.as_ref().and_then(|time| time.ci95);
    let at = |time_us| rate_gbps(Bytes(step.bytes), time_us).unwrap_or(rate);
    Some(ends.map_or([rate; 2], |[short, long]| [at(long), at(short)]))
}

/// Mark of a transfer that is slower with twice its footprint.
pub const ROTATION_INSUFFICIENT: &str = "rotation_insufficient";

/// How far a rate may fall with twice the footprint before its own is too small.
const ROTATION_FALL: f64 = 0.02;

/// Lays the repetition of a test with twice its footprint over its result.
///
/// A transfer whose rate falls by more than 2 %, and whose intervals lie apart, had a part of its
/// data in a cache. What went wrong in the repetition is the test's outcome too.
pub fn check_rotation(test: &mut TestResult, twice: TestResult) {
    // What was given up says nothing about a test that ran.
    if !matches!(twice.outcome, Outcome::Passed | Outcome::NotRun) {
        test.outcome = twice.outcome;
        let failure = twice.failure.map(|failure| format!("with twice the footprint (rotation_check): {failure}"));
        test.failure = test.failure.take().or(failure);
    }
    test.setup_seconds += twice.setup_seconds;
    test.run_seconds += twice.run_seconds;
    test.verify_seconds += twice.verify_seconds;
    test.warnings
        .extend(twice.warnings.into_iter().filter(|warning| !test.warnings.contains(warning)).collect::<Vec<_>>());
    for (transfer, twice) in test.transfers.iter_mut().zip(twice.transfers) {
        check_transfer(transfer, twice);
    }
}

fn check_transfer(transfer: &mut TransferResult, twice: TransferResult) {
    if twice.verified == Verified::Failed && transfer.verified != Verified::Failed {
        (transfer.verified, transfer.mismatch) = (Verified::Failed, twice.mismatch.clone());
        transfer.marks.push("with twice the footprint".to_owned());
    }
    if (twice.slices, twice.dst_slices) == (transfer.slices, transfer.dst_slices) {
        return;
    }
    let change = transfer.rate_gbps.zip(twice.rate_gbps).map(|(once, twice)| twice / once - 1.0);
    let apart = interval(transfer).zip(interval(&twice)).is_some_and(|([low, _], [_, high])| low > high);
    if apart && change.is_some_and(|change| change < -ROTATION_FALL) {
        transfer.marks.push(ROTATION_INSUFFICIENT.to_owned());
    }
    transfer.rotation_check = Some(RotationCheck {
        slices: twice.slices,
        footprint_bytes: twice.footprint_bytes,
        dst_slices: twice.dst_slices,
        rate_gbps: twice.rate_gbps,
        change,
    });
}

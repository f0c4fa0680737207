//! Marks rates that a cache had a hand in.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use super::results::{TestResult, TransferResult};
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
/// more than 5 %, and the interval of its rate, where there is one, lies above it too.
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
    let rates: Vec<f64> = sweep.iter().filter(|step| is_large(step.bytes)).filter_map(|step| step.rate_gbps).collect();
    let Some(plateau) = summarise(&rates).map(|rates| rates.median) else { return };
    for step in sweep {
        step.plateau_gbps = Some(plateau);
        if !is_large(step.bytes) && exceeds(step, plateau) {
            step.marks.push(ABOVE_PLATEAU.to_owned());
        }
    }
}

fn exceeds(step: &TransferResult, plateau: f64) -> bool {
    let longest = step.time_us.as_ref().and_then(|time| time.ci95).map(|[_, long]| long);
    let surely = longest.and_then(|time| rate_gbps(Bytes(step.bytes), time)).is_none_or(|lowest| lowest > plateau);
    surely && step.rate_gbps.is_some_and(|rate| rate > PLATEAU_EXCESS * plateau)
}

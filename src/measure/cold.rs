//! Cold samples, each after a flush, beside warm ones of the same kind.

use super::{Check, Measured, WALK_MAX};
use crate::comm::Communicator;
use crate::config::options::{Options, Validate};
use crate::error::Error;
use crate::exec::{Executions, Ready, SampleTimes};
use crate::plan::PlannedTest;

/// The state of the caches that a sample starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caches {
    /// Flushed.
    Cold,
    /// As executions one after the other leave them.
    Warm,
}

/// By executor of this rank, then by sample; every sample is one execution.
#[derive(Clone, Debug, Default)]
pub struct Contrast {
    pub cold: Vec<Vec<SampleTimes>>,
    pub warm: Vec<Vec<SampleTimes>>,
}

/// Cold, warm, warm, cold, and so on: a drift over the samples weighs on both alike.
fn order(pairs: u64) -> impl Iterator<Item = Caches> {
    let pair = |i: u64| if i.is_multiple_of(2) { [Caches::Cold, Caches::Warm] } else { [Caches::Warm, Caches::Cold] };
    (0..pairs).flat_map(pair)
}

impl Measured<'_> {
    /// Takes `cold_iterations` samples of each state. False if a destination was wrong; collective.
    pub(super) fn contrast(&mut self, comm: &dyn Communicator, test: &PlannedTest, check: &mut Check) -> bool {
        let rules = &test.options;
        let slices = test.transfers.iter().map(|transfer| transfer.src.slices.max(transfer.dst.slices));
        let walk = slices.max().unwrap_or(1).min(WALK_MAX) as u32;
        let executors = self.prepared.executors.len();
        let (cold, warm) = (vec![Vec::new(); executors], vec![Vec::new(); executors]);
        self.contrast = Contrast { cold, warm };
        let mut after_cold = true;
        for caches in order(rules.cold_iterations) {
            self.one(comm, rules, caches, after_cold.then_some(walk));
            after_cold = caches == Caches::Cold;
            if rules.always_validate == Validate::EveryIteration && !self.checked(comm, check) {
                return false;
            }
        }
        true
    }

    /// `walk`: executions that bring the caches back to what rotation keeps them in, all slices once
    /// and ending with the one before the sample's.
    fn one(&mut self, comm: &dyn Communicator, rules: &Options, caches: Caches, walk: Option<u32>) {
        let sample = Executions { first: self.executions, count: 1 };
        self.last = sample;
        self.executions += 1;
        if let (Caches::Warm, Some(count)) = (caches, walk) {
            self.together(comm, Executions { first: sample.first, count });
        }
        if rules.always_validate == Validate::EveryIteration {
            let poisoned = self.unless_faulted(|measured| measured.prepared.poison(sample));
            self.latch(poisoned);
        }
        if caches == Caches::Cold {
            let flushed = self.unless_faulted(|measured| measured.prepared.flush());
            self.latch(flushed);
        }
        self.together(comm, sample);
        if self.fault.is_none() {
            let times: Result<Vec<SampleTimes>, Error> = self.prepared.executors.iter_mut().map(Ready::times).collect();
            let list = match caches {
                Caches::Cold => &mut self.contrast.cold,
                Caches::Warm => &mut self.contrast.warm,
            };
            match times {
                Ok(times) => list.iter_mut().zip(times).for_each(|(samples, times)| samples.push(times)),
                Err(error) => self.latch(Err(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_drift_weighs_on_both_alike() {
        for pairs in [2u64, 4, 10, 100] {
            let mean = |wanted| {
                let at: Vec<usize> = (0..).zip(order(pairs)).filter(|(_, it)| *it == wanted).map(|(i, _)| i).collect();
                assert_eq!(at.len() as u64, pairs);
                at.iter().sum::<usize>()
            };
            assert_eq!(mean(Caches::Cold), mean(Caches::Warm), "{pairs} pairs");
        }
        let three: Vec<Caches> = order(3).collect();
        let (cold, warm) = (Caches::Cold, Caches::Warm);
        assert_eq!(three, [cold, warm, warm, cold, cold, warm]);
        assert_eq!(order(0).count(), 0);
    }
}

//! The timed loop: warm-ups and samples between barriers, one more sample to verify.

pub mod circumstances;
mod cold;

use std::time::Instant;

use crate::comm::Communicator;
use crate::config::options::{Options, Validate};
use crate::error::{Error, Phase};
use crate::exec::{Executions, Ready, SampleTimes};
use crate::memory::Memory;
use crate::plan::PlannedTest;
use crate::prepare::Prepared;
pub use cold::Contrast;

/// Executions of the pass before the warm-ups. At 256 MiB they cover all slices from 16 KiB on;
/// of smaller ones, whose rate is that of the calls, a part.
const WALK_MAX: u64 = 16_384;

/// A rank's executors after the loop, with what they were timed at.
pub struct Measured<'m> {
    pub prepared: Prepared<'m>,
    /// By executor of this rank, then by sample.
    pub samples: Vec<Vec<SampleTimes>>,
    /// Cold samples and their warm partners.
    pub contrast: Contrast,
    /// Executions of every transfer so far.
    executions: u64,
    /// Those of the last sample: what the destinations hold.
    pub last: Executions,
    /// Timed samples, the same on all ranks.
    pub iterations: u64,
    /// The first thing that went wrong on this rank; it launched nothing after that.
    fault: Option<Error>,
}

/// Checks this rank's destinations after a sample: whether all is well.
pub type Check<'a> = dyn FnMut(&Prepared<'_>, Executions) -> Result<bool, Error> + 'a;

/// Runs a test. `check` is called after every sample if every iteration is validated; it is given
/// the executions of the sample.
///
/// Mixed: the barriers are collective, what fails between them is kept in the value, and their
/// number depends on agreed data only.
pub fn run<'m>(comm: &dyn Communicator, prepared: Prepared<'m>, test: &PlannedTest, check: &mut Check) -> Measured<'m> {
    let rules = &test.options;
    let slices_max = test.transfers.iter().map(|transfer| transfer.src.slices).max().unwrap_or(1);
    let samples = prepared.executors.iter().map(|_| Vec::new()).collect();
    let mut measured = Measured {
        prepared,
        samples,
        contrast: Contrast::default(),
        executions: 0,
        last: Executions { first: 0, count: 1 },
        iterations: 0,
        fault: None,
    };
    let every = rules.always_validate == Validate::EveryIteration;
    let mut all_well = true;
    measured.walk_all_slices(comm, slices_max);
    for _ in 0..rules.warmups {
        measured.sample(comm, rules, every, false);
        all_well = all_well && (!every || measured.checked(comm, check));
        if !all_well {
            return measured;
        }
    }
    let started = Instant::now();
    loop {
        measured.sample(comm, rules, every, true);
        measured.iterations += 1;
        if every && !measured.checked(comm, check) {
            return measured;
        }
        if is_last(comm, rules, measured.iterations, started) {
            break;
        }
    }
    if rules.cold_iterations > 0 && !measured.contrast(comm, test, check) {
        return measured;
    }
    if rules.always_validate == Validate::AtEnd {
        // By the very same path, with the destinations poisoned before, so that stale data cannot pass.
        measured.sample(comm, rules, true, false);
    }
    measured
}

/// The stop rule, the same on all ranks and outside the timed part.
fn is_last(comm: &dyn Communicator, rules: &Options, iterations: u64, started: Instant) -> bool {
    match rules.seconds {
        None => iterations >= rules.iterations,
        Some(seconds) => {
            let over = started.elapsed().as_secs_f64() >= seconds;
            comm.broadcast(vec![u8::from(over)]) == [1]
        }
    }
}

impl<'m> Measured<'m> {
    /// One sample: rotate, common start, every executor at once, local end, barrier.
    fn sample(&mut self, comm: &dyn Communicator, rules: &Options, poisoned: bool, timed: bool) {
        let sample = Executions { first: self.executions, count: rules.sub_iterations };
        self.last = sample;
        self.executions += u64::from(sample.count);
        if poisoned {
            let result = self.unless_faulted(|measured| measured.prepared.poison(sample));
            self.latch(result);
        }
        self.together(comm, sample);
        if timed && self.fault.is_none() {
            let times: Result<Vec<SampleTimes>, Error> = self.prepared.executors.iter_mut().map(Ready::times).collect();
            match times {
                Ok(times) => self.samples.iter_mut().zip(times).for_each(|(samples, times)| samples.push(times)),
                Err(error) => self.latch(Err(error)),
            }
        }
    }

    /// Filling leaves the last slices in cache: one pass over all of them, untimed and not counted,
    /// brings every cache on the path to the state that rotation keeps it in.
    fn walk_all_slices(&mut self, comm: &dyn Communicator, slices_max: u64) {
        if slices_max > 1 {
            let count = slices_max.min(WALK_MAX) as u32;
            self.together(comm, Executions { first: 0, count });
        }
    }

    /// Every executor of every rank runs the executions at once.
    fn together(&mut self, comm: &dyn Communicator, sample: Executions) {
        // The first barrier takes up the wait for slow ranks: armed threads spin, and would keep the
        // CPU from them. Between the barriers there is only the arming, so that all leave together.
        comm.barrier();
        let result = self.unless_faulted(|measured| each(&mut measured.prepared.executors, |exe| exe.arm(sample)));
        self.latch(result);
        comm.barrier();
        let started = self.unless_faulted(|measured| each(&mut measured.prepared.executors, Ready::go));
        let ended = self.unless_faulted(|measured| each(&mut measured.prepared.executors, Ready::wait));
        comm.barrier();
        self.latch(started.and(ended));
    }

    fn unless_faulted(&mut self, step: impl FnOnce(&mut Measured<'m>) -> Result<(), Error>) -> Result<(), Error> {
        if self.fault.is_some() { Ok(()) } else { step(self) }
    }

    fn latch(&mut self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.fault.get_or_insert(error);
        }
    }

    /// Whether the destinations of all ranks are right; collective.
    fn checked(&mut self, comm: &dyn Communicator, check: &mut Check) -> bool {
        comm.watch().enter(Phase::Verify);
        let mut well = self.fault.is_none();
        if well {
            match check(&self.prepared, self.last) {
                Ok(right) => well = right,
                Err(error) => {
                    self.latch(Err(error));
                    well = false;
                }
            }
        }
        let all = comm.gather(vec![u8::from(well)]).map(|all| all.iter().all(|byte| byte == &[1]));
        let well = comm.broadcast(all.map(|well| vec![u8::from(well)]).unwrap_or_default()) == [1];
        comm.watch().enter(Phase::Run);
        well
    }

    /// Ends the loop: what failed on this rank, with the memory for its collective release.
    pub fn ended(mut self) -> Result<Measured<'m>, (Error, Memory)> {
        match self.fault.take() {
            None => Ok(self),
            Some(error) => Err((error, self.prepared.into())),
        }
    }
}

/// Every executor gets the call, whatever the others say; the first error counts.
fn each(executors: &mut [Ready], mut call: impl FnMut(&mut Ready) -> Result<(), Error>) -> Result<(), Error> {
    executors.iter_mut().map(&mut call).fold(Ok(()), Result::and)
}

impl From<Measured<'_>> for Memory {
    fn from(measured: Measured<'_>) -> Memory {
        measured.prepared.into()
    }
}

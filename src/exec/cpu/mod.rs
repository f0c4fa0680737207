//! The CPU executor: one pinned thread for each sub-executor's share.

mod crew;
pub mod loops;
#[cfg(test)]
mod tests;

use std::ops::Range;

use super::{BoundTransfer, Clock, Executions, SampleTimes, TransferTime, Window, Work};
use crate::error::Error;
use crate::fault::{Faults, Hit};
use crate::memory::map;
use crate::memory::rotating::Rotating;
use crate::units::Bytes;
use crate::world::Caches;
pub use crew::THREAD_NAME;
use crew::{Crew, Task};
use loops::{Isa, Piece};

/// Last-level cache to count with where the system does not tell: what a CPU of a server or a
/// desktop typically reaches.
const CACHE_ASSUMED: Bytes = Bytes::mib(32);

/// Whether the data of an executor outgrow the cache, so that stores had better go past it: a line
/// that is not read again before it is evicted costs a read of the memory first.
pub fn outgrows_cache(transfers: &[BoundTransfer], caches: &Caches) -> bool {
    let cache = [caches.l3, caches.l2].into_iter().find(|size| *size > Bytes::ZERO).unwrap_or(CACHE_ASSUMED);
    let buffers = transfers.iter().flat_map(|transfer| transfer.srcs.iter().chain(&transfer.dsts));
    let working_set = buffers.fold(0u64, |sum, buffer| sum.saturating_add(buffer.layout().footprint().0));
    working_set > cache.0
}

/// Threads that wait for the next sample.
pub struct Ready {
    crew: Crew,
    /// Threads of each transfer.
    threads: Vec<Range<usize>>,
    /// Number of the last execution of the sample.
    last: u64,
    /// Boxed to keep the kinds of executor alike in size.
    first_dst: Option<Box<Rotating>>,
    corrupt: bool,
    faults: Faults,
    isa: Isa,
    streaming: bool,
}

impl Ready {
    /// Starts the threads; `cpus` are those of the executor's node that this rank may use.
    /// `streaming` stores past the cache.
    ///
    /// # Errors
    /// There is no CPU, or a thread cannot be started or pinned.
    pub fn new(work: Work, cpus: &[u32], streaming: bool, faults: &Faults) -> Result<Ready, Error> {
        let exe = work.exe;
        if cpus.is_empty() {
            return Err(Error::new(format!("{exe} has no CPU that this rank may run on")));
        }
        faults.hit("spawn")?;
        let isa = Isa::best();
        let mut tasks: Vec<Task> = Vec::new();
        let mut threads = Vec::with_capacity(work.transfers.len());
        for transfer in &work.transfers {
            let start = tasks.len();
            for share in &transfer.shares {
                let mut piece = Piece::new(transfer, *share, isa, streaming);
                tasks.push(Box::new(move |sample: Executions| piece.execute(sample.first, sample.count)));
            }
            threads.push(start..tasks.len());
        }
        let crew = Crew::start(tasks, cpus).map_err(|err| err.context(exe))?;
        Ok(Ready {
            crew,
            threads,
            last: 0,
            first_dst: work.transfers.iter().find_map(|transfer| transfer.dsts.first().cloned().map(Box::new)),
            corrupt: false,
            faults: faults.clone(),
            isa,
            streaming,
        })
    }

    /// Wakes the threads; returns when all of them spin, waiting for `go`.
    ///
    /// # Errors
    /// An injected fault, or a thread died in an earlier sample.
    pub fn arm(&mut self, sample: Executions) -> Result<(), Error> {
        let hit = self.faults.hit("execute")?;
        self.last = sample.first + u64::from(sample.count.saturating_sub(1));
        self.corrupt = hit == Hit::Corrupt;
        self.crew.arm(sample, hit != Hit::Drop)
    }

    /// # Errors
    /// None; executors of other kinds have some.
    pub fn go(&mut self) -> Result<(), Error> {
        self.crew.go();
        Ok(())
    }

    /// Sleeps until every thread has written its last byte.
    ///
    /// # Errors
    /// A thread died.
    pub fn wait(&mut self) -> Result<(), Error> {
        self.crew.wait()?;
        if let (true, Some(dst)) = (self.corrupt, &self.first_dst) {
            let slice = dst.slice_region(self.last);
            let mut byte = [0];
            map::read(&slice, 0, &mut byte);
            map::write(&slice, 0, &[byte[0] ^ 1]);
        }
        Ok(())
    }

    /// A transfer lasts from its first thread's start to its last thread's end.
    ///
    /// # Errors
    /// None; executors of other kinds have some.
    pub fn times(&mut self) -> Result<SampleTimes, Error> {
        let windows = self.crew.windows();
        let around = |threads: &Range<usize>| {
            Window::around(windows[threads.clone()].iter().copied()).expect("every transfer has a busy sub-executor")
        };
        let transfers = self.threads.iter().map(around).map(|window| TransferTime { duration_ns: window.ns(), window });
        let transfers: Vec<TransferTime> = transfers.collect();
        let executor = Window::around(transfers.iter().map(|transfer| transfer.window));
        Ok(SampleTimes { executor: executor.expect("an executor has a transfer"), transfers })
    }

    pub fn clock(&self) -> Clock {
        Clock::Host
    }

    /// Which loops run: "AVX-512 loops, streaming stores".
    pub fn loops(&self) -> String {
        format!("{} loops, {} stores", self.isa.name(), if self.streaming { "streaming" } else { "ordinary" })
    }

    /// By transfer, the CPUs that its threads were on at the end of the last sample, without
    /// repetition.
    pub fn placement(&self) -> Vec<Vec<u32>> {
        let cpus = self.crew.cpus();
        let of = |threads: &Range<usize>| {
            let mut cpus = cpus[threads.clone()].to_vec();
            cpus.sort_unstable();
            cpus.dedup();
            cpus
        };
        self.threads.iter().map(of).collect()
    }
}

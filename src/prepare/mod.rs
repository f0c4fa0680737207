//! Makes executors ready: sources filled and replicated, destinations guarded, memory bound, threads and streams made.

pub mod data;
pub mod flush;
pub mod owned;
pub mod reference;

use crate::config::options::{Gfx, Options, Streaming};
use crate::error::Error;
use crate::exec::{BoundTransfer, Executions, Ready, Work, batch, bulk, copy_engine, cpu, kernel};
use crate::memory::rotating::Rotating;
use crate::memory::{Linked, Memory};
use crate::place::ExeKind;
use crate::plan::local::{BufferId, LocalExecutor, LocalPlan, OwnBuffer, Side};
use crate::plan::rotation::is_local;
use crate::plan::split::shares;
use crate::plan::{PlannedTest, Transfer, placement};
use crate::region::Region;
use crate::world::machine::Machine;
use flush::Flush;
use owned::Owned;
use reference::Reference;

/// Executors that can run samples, and the data that they move.
pub struct Prepared<'m> {
    // Declared before the memory that they use, so dropped before it.
    pub executors: Vec<Ready>,
    /// Where cold samples are asked for.
    flush: Option<Flush>,
    pub reference: Reference,
    pub machine: &'m Machine,
    pub options: Options,
    pub plan: LocalPlan,
    pub memory: Memory,
}

/// Fills this rank's buffers and readies its executors. Local.
///
/// # Errors
/// Names the buffer or executor, and returns the memory for its collective release.
pub fn prepare<'m>(linked: Linked, test: &PlannedTest, machine: &'m Machine) -> Result<Prepared<'m>, (Error, Memory)> {
    let Linked { plan, memory } = linked;
    let mut prepared = Prepared {
        executors: Vec::new(),
        flush: None,
        reference: Reference::new(&test.options),
        machine,
        options: test.options.clone(),
        plan,
        memory,
    };
    let flush = || match test.options.cold_iterations {
        0 => Ok(None),
        _ => Flush::new(test, prepared.plan.rank, machine).map(Some),
    };
    match prepared.fill().and_then(|()| Ok((prepared.ready_executors()?, flush()?))) {
        Ok((executors, flush)) => {
            (prepared.executors, prepared.flush) = (executors, flush);
            Ok(prepared)
        }
        Err(error) => Err((error, prepared.into())),
    }
}

impl From<Prepared<'_>> for Memory {
    fn from(prepared: Prepared<'_>) -> Memory {
        // The executors and their regions end here.
        prepared.memory
    }
}

impl Prepared<'_> {
    /// The destinations that this rank owns.
    pub fn destinations(&self) -> impl Iterator<Item = &OwnBuffer> {
        self.plan.own.iter().filter(|own| own.id.side == Side::Dst)
    }

    pub fn sources(&self) -> impl Iterator<Item = &OwnBuffer> {
        self.plan.own.iter().filter(|own| own.id.side == Side::Src)
    }

    /// Access to an own buffer for filling and poisoning: by its device, or by the CPU.
    pub fn owned<'a>(&'a self, own: &OwnBuffer, region: &'a Region) -> Owned<'a> {
        if own.place.kind.is_host() {
            return Owned::by_cpu(region, &self.machine.faults);
        }
        let device = self.machine.device(own.place.index);
        Owned::by_driver(region, &**device.driver(), device.id(), &self.machine.faults)
    }

    fn fill(&self) -> Result<(), Error> {
        for own in self.sources() {
            let region = self.memory.region(own.id);
            data::fill_source(&self.reference, own, &self.owned(own, &region))
                .map_err(|err| err.context(format!("fill {} ({})", own.id, own.place)))?;
        }
        for own in self.destinations() {
            let region = self.memory.region(own.id);
            data::fill_destination(own, &self.owned(own, &region), 0)
                .map_err(|err| err.context(format!("clear {} ({})", own.id, own.place)))?;
        }
        Ok(())
    }

    /// Overwrites what the sample will write, so that stale data cannot pass for its work.
    pub fn poison(&self, sample: Executions) -> Result<(), Error> {
        for own in self.destinations() {
            let region = self.memory.region(own.id);
            let byte = self.reference.poison(own.sources);
            data::poison(own, &self.owned(own, &region), sample, byte)
                .map_err(|err| err.context(format!("poison {} ({})", own.id, own.place)))?;
        }
        Ok(())
    }

    /// Pushes what the executors use out of the caches that this rank can reach.
    ///
    /// # Panics
    /// If no cold samples are asked for.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.flush.as_mut().expect("cold samples are asked for").run()
    }

    fn ready_executors(&self) -> Result<Vec<Ready>, Error> {
        self.plan
            .executors
            .iter()
            .map(|local| self.ready(local).map_err(|err| err.context(format!("prepare executor {}", local.exe))))
            .collect()
    }

    fn ready(&self, local: &LocalExecutor) -> Result<Ready, Error> {
        let exe = local.exe;
        let transfers = local.transfers.iter().map(|transfer| self.bind(transfer)).collect();
        let work = Work { exe, transfers };
        let machine = self.machine;
        Ok(match exe.kind {
            ExeKind::Cpu => {
                let streaming = match self.options.cpu_streaming {
                    Streaming::Auto => cpu::outgrows_cache(&work.transfers, &machine.inventory.caches),
                    Streaming::Always => true,
                    Streaming::Never => false,
                };
                Ready::Cpu(cpu::Ready::new(work, &machine.cpus_for_threads(exe.index), streaming, &machine.faults)?)
            }
            ExeKind::Kernel => {
                let all_local = || local.transfers.iter().all(|t| is_local(&t.srcs, t.exe, &t.dsts));
                let gfx = &self.options.gfx;
                let gfx = Gfx { single_team: Some(gfx.single_team.unwrap_or_else(all_local)), ..gfx.clone() };
                let xcc = |transfer: &Transfer| placement::xcc(exe, &transfer.dsts, &gfx);
                let xccs: Vec<Option<u32>> = local.transfers.iter().map(xcc).collect();
                Ready::Kernel(kernel::Ready::on_xccs(work, &gfx, &xccs, machine.device(exe.index))?)
            }
            ExeKind::CopyEngine => {
                let ready = copy_engine::Ready::new(work, machine.device(exe.index))?;
                Ready::CopyEngine(if self.options.dma_no_cu { ready.without_compute_units() } else { ready })
            }
            ExeKind::Batch => Ready::CopyEngine(batch::ready(work, machine.device(exe.index))?),
            ExeKind::Bulk => Ready::Kernel(bulk::ready(
                work,
                &self.options.tdm,
                self.options.gfx.block_order,
                machine.device(exe.index),
            )?),
            ExeKind::Mpi | ExeKind::Nic | ExeKind::NicNear => {
                unreachable!("planning refuses executor {exe}")
            }
        })
    }

    fn bind(&self, transfer: &Transfer) -> BoundTransfer {
        let side = |side, count: usize, layout| {
            let id = |ordinal| BufferId { transfer: transfer.index, side, ordinal };
            (0..count as u32).map(|ordinal| Rotating::new(self.memory.region(id(ordinal)), layout)).collect()
        };
        BoundTransfer {
            index: transfer.index,
            bytes: transfer.bytes,
            srcs: side(Side::Src, transfer.srcs.len(), transfer.src),
            dsts: side(Side::Dst, transfer.dsts.len(), transfer.dst),
            shares: shares(transfer.bytes, transfer.sub_executors, self.options.block_bytes),
        }
    }
}

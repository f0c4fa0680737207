//! Cuts one rank's share out of the plan.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::rotation::Layout;
use super::{PlannedTest, Transfer};
use crate::place::{Executor, Place};
use crate::units::Rank;

/// Which side of a transfer a buffer is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Side {
    Src,
    Dst,
}

/// Names a buffer of a test, the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BufferId {
    pub transfer: u32,
    pub side: Side,
    /// Position among the sources or destinations.
    pub ordinal: u32,
}

impl std::fmt::Display for BufferId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let side = match self.side {
            Side::Src => "source",
            Side::Dst => "destination",
        };
        write!(f, "{side} {} of transfer {}", self.ordinal, self.transfer)
    }
}

/// A buffer that this rank owns: allocates, fills, verifies, frees.
#[derive(Clone, Debug)]
pub struct OwnBuffer {
    pub id: BufferId,
    pub place: Place,
    pub layout: Layout,
    /// The other rank that reads or writes it, if any.
    pub used_by: Option<Rank>,
    /// How many sources the transfer adds (what a destination is checked against).
    pub sources: u32,
    /// K of the transfer's sources: tells which slice an execution read.
    pub src_slices: u64,
}

/// A buffer of another rank that an executor of this rank reads or writes.
#[derive(Clone, Debug)]
pub struct Import {
    pub id: BufferId,
    pub place: Place,
    pub layout: Layout,
    /// The executor that will use it.
    pub exe: Executor,
}

/// One executor of this rank, with its transfers in list order.
#[derive(Clone, Debug)]
pub struct LocalExecutor {
    pub exe: Executor,
    pub transfers: Vec<Transfer>,
}

/// One rank's share of a test.
#[derive(Clone, Debug)]
pub struct LocalPlan {
    pub rank: Rank,
    pub own: Vec<OwnBuffer>,
    pub imports: Vec<Import>,
    pub executors: Vec<LocalExecutor>,
}

impl LocalPlan {
    /// What `rank` does in `test`; work and memory grow with its own transfers.
    pub fn cut(test: &PlannedTest, rank: Rank) -> LocalPlan {
        let mut own = Vec::new();
        let mut imports = Vec::new();
        let mut executors: BTreeMap<Executor, Vec<Transfer>> = BTreeMap::new();
        for transfer in &test.transfers {
            if transfer.exe.rank == rank {
                executors.entry(transfer.exe).or_default().push(transfer.clone());
            }
            for (id, place, layout) in transfer.buffers() {
                if place.rank == rank {
                    let used_by = (transfer.exe.rank != rank).then_some(transfer.exe.rank);
                    own.push(OwnBuffer {
                        id,
                        place,
                        layout,
                        used_by,
                        sources: transfer.srcs.len() as u32,
                        src_slices: transfer.src.slices,
                    });
                } else if transfer.exe.rank == rank {
                    imports.push(Import { id, place, layout, exe: transfer.exe });
                }
            }
        }
        let executors = executors.into_iter().map(|(exe, transfers)| LocalExecutor { exe, transfers }).collect();
        LocalPlan { rank, own, imports, executors }
    }
}

impl Transfer {
    /// Every buffer of the transfer, sources first.
    pub fn buffers(&self) -> impl Iterator<Item = (BufferId, Place, Layout)> + '_ {
        let name = |side, ordinal: usize| BufferId { transfer: self.index, side, ordinal: ordinal as u32 };
        let srcs = self.srcs.iter().enumerate().map(move |(i, place)| (name(Side::Src, i), *place, self.src));
        let dsts = self.dsts.iter().enumerate().map(move |(i, place)| (name(Side::Dst, i), *place, self.dst));
        srcs.chain(dsts)
    }
}

//! Names of places and executors: the letters of the notation and what they stand for.

use serde::{Deserialize, Serialize};

use crate::units::Rank;

/// Kinds of memory, by the letters of the notation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum MemKind {
    /// `C` page-locked host memory on a NUMA node.
    Pinned,
    /// `P` page-locked host memory on the node nearest to a device.
    PinnedNear,
    /// `B` page-locked, coherent.
    Coherent,
    /// `D` page-locked, non-coherent.
    NonCoherent,
    /// `K` page-locked, uncached.
    Uncached,
    /// `H` ordinary host memory.
    Host,
    /// `G` device memory.
    Device,
    /// `F` fine-grained device memory.
    DeviceFine,
    /// `U` uncached device memory.
    DeviceUncached,
    /// `M` managed memory.
    Managed,
}

/// Kinds of executor, by the letters of the notation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ExeKind {
    /// `C` threads on a NUMA node.
    Cpu,
    /// `G` a device kernel.
    Kernel,
    /// `D` a device's copy engine.
    CopyEngine,
    /// `B` a device's copy engine, many copies in one call.
    Batch,
    /// `T` a device's tensor data mover.
    Bulk,
    /// `M` MPI itself.
    Mpi,
    /// `I` a NIC by number.
    Nic,
    /// `N` the nearest NIC.
    NicNear,
}

impl MemKind {
    pub const LETTERS: [(char, MemKind); 10] = [
        ('C', MemKind::Pinned),
        ('P', MemKind::PinnedNear),
        ('B', MemKind::Coherent),
        ('D', MemKind::NonCoherent),
        ('K', MemKind::Uncached),
        ('H', MemKind::Host),
        ('G', MemKind::Device),
        ('F', MemKind::DeviceFine),
        ('U', MemKind::DeviceUncached),
        ('M', MemKind::Managed),
    ];

    pub fn from_letter(letter: char) -> Option<MemKind> {
        let letter = letter.to_ascii_uppercase();
        MemKind::LETTERS.iter().find(|(l, _)| *l == letter).map(|(_, kind)| *kind)
    }

    pub fn letter(self) -> char {
        MemKind::LETTERS.iter().find(|(_, kind)| *kind == self).expect("every kind has a letter").0
    }

    /// Whether it is memory of the host. Its index counts NUMA nodes, but that of `P` counts devices.
    pub fn is_host(self) -> bool {
        matches!(
            self,
            MemKind::Pinned
                | MemKind::Coherent
                | MemKind::NonCoherent
                | MemKind::Uncached
                | MemKind::Host
                | MemKind::PinnedNear
        )
    }
}

impl MemKind {
    /// Whether it is host memory that a device runtime allocates, and knows from then on.
    pub fn is_runtime_host(self) -> bool {
        matches!(self, MemKind::Coherent | MemKind::NonCoherent | MemKind::Uncached)
    }
}

impl ExeKind {
    pub const LETTERS: [(char, ExeKind); 8] = [
        ('C', ExeKind::Cpu),
        ('G', ExeKind::Kernel),
        ('D', ExeKind::CopyEngine),
        ('B', ExeKind::Batch),
        ('T', ExeKind::Bulk),
        ('M', ExeKind::Mpi),
        ('I', ExeKind::Nic),
        ('N', ExeKind::NicNear),
    ];

    pub fn from_letter(letter: char) -> Option<ExeKind> {
        let letter = letter.to_ascii_uppercase();
        ExeKind::LETTERS.iter().find(|(l, _)| *l == letter).map(|(_, kind)| *kind)
    }

    pub fn letter(self) -> char {
        ExeKind::LETTERS.iter().find(|(_, kind)| *kind == self).expect("every kind has a letter").0
    }
}

/// Where a source or destination lives: `R1C0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Place {
    pub rank: Rank,
    pub kind: MemKind,
    /// NUMA node (host kinds) or device number of that rank.
    pub index: u32,
}

/// Who moves the bytes: `R1G0.2`. The order is that of the results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Executor {
    pub rank: Rank,
    pub kind: ExeKind,
    pub index: u32,
    pub sub_index: Option<u32>,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&format!("R{}{}{}", self.rank, self.kind.letter(), self.index))
    }
}

impl std::fmt::Display for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sub = self.sub_index.map(|x| format!(".{x}")).unwrap_or_default();
        f.pad(&format!("R{}{}{}{sub}", self.rank, self.kind.letter(), self.index))
    }
}

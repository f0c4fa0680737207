//! Multiplies a transfer as written into the transfers it stands for on this job's ranks.

use std::collections::HashSet;

use crate::config::TransferConfig;
use crate::config::notation::{ExePiece, Indexes, MemPiece};
use crate::config::value::quote;
use crate::place::{ExeKind, Executor, MemKind, Place};
use crate::units::Rank;
use crate::world::{Inventory, World};

/// Transfers that one line may stand for.
pub const TRANSFERS_MAX: usize = 1_000_000;

/// Problems told of one line; the others are counted.
const PROBLEMS_SHOWN: usize = 8;

/// One transfer, every index a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expanded {
    pub srcs: Vec<Place>,
    pub exe: Executor,
    pub dsts: Vec<Place>,
}

/// The cartesian product of all ranges, the first varying slowest: each source (rank, then index),
/// each destination, the executor's rank, index and sub-index. A transfer with a piece that is local
/// (without `R`) is repeated for every rank.
///
/// # Errors
/// Everything that the ranges name and the world does not have, or a product beyond `TRANSFERS_MAX`.
pub fn expand(transfer: &TransferConfig, world: &World) -> Result<Vec<Expanded>, Vec<String>> {
    let mut expansion = Expansion { world, problems: Vec::new(), told: HashSet::new() };
    let all = if is_local(transfer) {
        let mut all = Vec::new();
        for rank in 0..world.ranks.len() as u32 {
            expansion.on_rank(transfer, Rank(rank), &mut all);
        }
        all
    } else {
        let mut all = Vec::new();
        expansion.on_rank(transfer, Rank(0), &mut all);
        all
    };
    expansion.finish(all)
}

fn is_local(transfer: &TransferConfig) -> bool {
    // `N` alone takes its ranks from both ends.
    let nearest = transfer.exe.kind == ExeKind::NicNear && transfer.exe.index.is_none();
    (transfer.exe.rank.is_none() && !nearest)
        || transfer.srcs.iter().chain(&transfer.dsts).any(|piece| piece.rank.is_none())
}

struct Expansion<'a> {
    world: &'a World,
    problems: Vec<String>,
    told: HashSet<String>,
}

impl Expansion<'_> {
    /// Appends the product with every local piece on `local`.
    fn on_rank(&mut self, transfer: &TransferConfig, local: Rank, all: &mut Vec<Expanded>) {
        let pieces = transfer.srcs.iter().chain(&transfer.dsts);
        let places: Vec<Vec<Place>> = pieces.map(|piece| self.places(piece, local)).collect();
        // An empty list has left its problem; the executor's own problems are looked for all the same.
        if places.iter().any(Vec::is_empty) {
            self.executors(&transfer.exe, local, &[], &[]);
            return;
        }
        let mut at = vec![0; places.len()];
        loop {
            let chosen: Vec<Place> = places.iter().zip(&at).map(|(list, i)| list[*i]).collect();
            let (srcs, dsts) = chosen.split_at(transfer.srcs.len());
            let executors = self.executors(&transfer.exe, local, srcs, dsts);
            if !self.problems.is_empty() {
                // It would be the same again for every combination.
                return;
            }
            if all.len() + executors.len() > TRANSFERS_MAX {
                let text = quote(&transfer.text);
                return self
                    .problem(format!("{text} stands for more than {TRANSFERS_MAX} transfers: use smaller ranges"));
            }
            all.extend(executors.into_iter().map(|exe| Expanded { srcs: srcs.to_vec(), exe, dsts: dsts.to_vec() }));
            if !advance(&mut at, &places) {
                return;
            }
        }
    }

    fn places(&mut self, piece: &MemPiece, local: Rank) -> Vec<Place> {
        let mut places = Vec::new();
        for rank in self.ranks(piece.rank.as_ref(), local) {
            let what = if counts_devices(piece.kind) { Counted::Devices } else { Counted::NumaNodes };
            let indexes = self.indexes(&piece.index, rank, what);
            places.extend(indexes.into_iter().map(|index| Place { rank, kind: piece.kind, index }));
        }
        places
    }

    fn executors(&mut self, piece: &ExePiece, local: Rank, srcs: &[Place], dsts: &[Place]) -> Vec<Executor> {
        let kind = piece.kind;
        let Some(index) = &piece.index else {
            return self.without_index(piece, local, srcs, dsts);
        };
        let mut executors = Vec::new();
        for rank in self.ranks(piece.rank.as_ref(), local) {
            let indexes = match kind {
                ExeKind::Cpu => self.indexes(index, rank, Counted::NumaNodes),
                ExeKind::Nic => self.nics(index, rank),
                ExeKind::Mpi => self.mpi(index),
                _ => self.indexes(index, rank, Counted::Devices),
            };
            for index in indexes {
                let subs = self.sub_indexes(piece, rank, index, dsts);
                executors.extend(subs.into_iter().map(|sub_index| Executor { rank, kind, index, sub_index }));
            }
        }
        executors
    }

    /// `M`, or `N` alone: the NIC nearest to the source writes to the one nearest to the destination.
    fn without_index(&mut self, piece: &ExePiece, local: Rank, srcs: &[Place], dsts: &[Place]) -> Vec<Executor> {
        let kind = piece.kind;
        if kind == ExeKind::NicNear {
            let near = srcs.first().or(dsts.first());
            let executor = |near: &Place| Executor {
                rank: near.rank,
                kind,
                index: near.index,
                sub_index: dsts.first().map(|far| far.index),
            };
            return near.map(executor).into_iter().collect();
        }
        let executor = |rank| Executor { rank, kind, index: 0, sub_index: None };
        self.ranks(piece.rank.as_ref(), local).into_iter().map(executor).collect()
    }

    fn ranks(&mut self, ranks: Option<&Indexes>, local: Rank) -> Vec<Rank> {
        let count = self.world.ranks.len() as u32;
        let list = match ranks {
            None => return vec![local],
            Some(Indexes::All) => return (0..count).map(Rank).collect(),
            Some(Indexes::List(list)) => list,
        };
        // The list ascends.
        let (there, absent) = list.split_at(list.partition_point(|rank| *rank < count));
        if let Some(first) = absent.first() {
            self.problem(format!("rank {first} does not exist (the job has {count} ranks: {})", span(count)));
        }
        there.iter().copied().map(Rank).collect()
    }

    /// The numbers that exist on a rank; those that do not are a problem.
    fn indexes(&mut self, indexes: &Indexes, rank: Rank, what: Counted) -> Vec<u32> {
        let inventory = &self.world.ranks[rank.0 as usize];
        let count = what.count(inventory);
        let host = &inventory.host_name;
        let name = what.name();
        match indexes {
            Indexes::All if count == 0 => {
                let why = what.absent(inventory);
                self.problem(format!("there is no {name} on rank {rank} (host {host}{why})"));
                Vec::new()
            }
            Indexes::All => (0..count).collect(),
            Indexes::List(list) => {
                let (there, absent) = list.split_at(list.partition_point(|index| *index < count));
                if let Some(first) = absent.first() {
                    let has = match count {
                        0 => format!("has none{}", what.absent(inventory)),
                        _ => format!("has {count}: {}", span(count)),
                    };
                    self.problem(format!("{name} {first} does not exist on rank {rank} (host {host} {has})"));
                }
                there.to_vec()
            }
        }
    }

    /// NICs are not in the world, so only numbers can be taken, unchecked; planning refuses them.
    fn nics(&mut self, indexes: &Indexes, rank: Rank) -> Vec<u32> {
        match indexes {
            Indexes::List(list) => list.clone(),
            Indexes::All => {
                self.problem(format!("I* on rank {rank}: the NICs of the ranks are not known in this version"));
                Vec::new()
            }
        }
    }

    fn mpi(&mut self, indexes: &Indexes) -> Vec<u32> {
        match indexes {
            Indexes::List(list) if list[..] != [0] => {
                self.problem(format!("executor M{indexes} does not exist: a rank has one MPI, so write M"));
                Vec::new()
            }
            _ => vec![0],
        }
    }

    /// `*` stands for what the world knows: the XCCs of a device for `G`, the devices on the destination's rank for `N`, nothing
    /// for executors that have no sub-index.
    fn sub_indexes(&mut self, piece: &ExePiece, rank: Rank, index: u32, dsts: &[Place]) -> Vec<Option<u32>> {
        let devices = &self.world.ranks[rank.0 as usize].devices;
        let xccs = devices.get(index as usize).map_or(0, |device| device.xccs);
        match &piece.sub_index {
            None => vec![None],
            Some(Indexes::List(list)) => list.iter().copied().map(Some).collect(),
            Some(Indexes::All) => match piece.kind {
                ExeKind::NicNear => {
                    let far = dsts.first().map_or(rank, |dst| dst.rank);
                    self.indexes(&Indexes::All, far, Counted::Devices).into_iter().map(Some).collect()
                }
                ExeKind::Kernel if xccs > 0 => (0..xccs).map(Some).collect(),
                ExeKind::Kernel | ExeKind::CopyEngine | ExeKind::Nic => {
                    let letter = piece.kind.letter();
                    self.problem(format!(
                        "the sub-indices of executor {letter} on rank {rank} are not known: name one"
                    ));
                    Vec::new()
                }
                ExeKind::Cpu | ExeKind::Batch | ExeKind::Bulk | ExeKind::Mpi => vec![None],
            },
        }
    }

    fn problem(&mut self, problem: String) {
        if self.told.insert(problem.clone()) {
            self.problems.push(problem);
        }
    }

    fn finish(mut self, all: Vec<Expanded>) -> Result<Vec<Expanded>, Vec<String>> {
        let more = self.problems.len().saturating_sub(PROBLEMS_SHOWN);
        if more > 0 {
            self.problems.truncate(PROBLEMS_SHOWN);
            self.problems.push(format!("and {more} more such problems"));
        }
        if self.problems.is_empty() { Ok(all) } else { Err(self.problems) }
    }
}

/// Steps to the next combination, the last position fastest.
fn advance(at: &mut [usize], lists: &[Vec<Place>]) -> bool {
    for (position, list) in at.iter_mut().zip(lists).rev() {
        *position += 1;
        if *position < list.len() {
            return true;
        }
        *position = 0;
    }
    false
}

/// `P` is host memory, but its number is that of the device it is near to.
fn counts_devices(kind: MemKind) -> bool {
    !kind.is_host() || kind == MemKind::PinnedNear
}

#[derive(Clone, Copy)]
enum Counted {
    NumaNodes,
    Devices,
}

impl Counted {
    fn count(self, inventory: &Inventory) -> u32 {
        match self {
            Counted::NumaNodes => inventory.numa.len() as u32,
            Counted::Devices => inventory.devices.len() as u32,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Counted::NumaNodes => "NUMA node",
            Counted::Devices => "device",
        }
    }

    fn absent(self, inventory: &Inventory) -> String {
        match (self, &inventory.devices_absent) {
            (Counted::Devices, Some(why)) => format!(": {why}"),
            _ => String::new(),
        }
    }
}

/// The numbers of `count` things: `0 to 3`.
fn span(count: u32) -> String {
    if count == 1 { "0".to_owned() } else { format!("0 to {}", count.saturating_sub(1)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::notation::{self, Notation};
    use crate::gpu::DeviceInfo;
    use crate::units::Bytes;
    use crate::world::{Caches, HostGroup, HostIdentity, NumaNode, ShareVia};

    /// A rank for each pair of (NUMA nodes, devices).
    fn world(ranks: &[(u32, u32)]) -> World {
        let device = DeviceInfo {
            name: "emulated".into(),
            runtime: "host (EMULATED)".into(),
            uuid: String::new(),
            pci: String::new(),
            architecture: "emulated".into(),
            memory_total: Bytes::gib(1),
            cache: Bytes::ZERO,
            compute_units: 1,
            warp_size: 1,
            numa: None,
            memory_kinds: vec![MemKind::Device],
            host_kinds: vec![],
            cpu_access: true,
            exportable: true,
            xccs: 0,
            cu_masks: false,
            no_cu_copies: false,
            kernels_absent: None,
            batch_absent: None,
            bulk_absent: None,
            peaks: Default::default(),
        };
        let node = |os_index| NumaNode {
            os_index,
            cpus: vec![os_index],
            cpus_allowed: vec![os_index],
            memory_allowed: true,
            memory_total: Bytes::gib(1),
            distances: Vec::new(),
        };
        let inventory = |(i, (nodes, devices)): (usize, &(u32, u32))| Inventory {
            host_name: format!("n{i}"),
            identity: HostIdentity { boot_id: i.to_string(), pid_namespace: 0, shm: (0, 0), user: 0 },
            pid: 1,
            cpu_model: String::new(),
            kernel: String::new(),
            numa: (0..*nodes).map(node).collect(),
            caches: Caches::default(),
            memory_free: Bytes::gib(1),
            devices: vec![device.clone(); *devices as usize],
            devices_free: Vec::new(),
            devices_absent: (*devices == 0).then(|| "no device runtime was found".to_owned()),
        };
        let group = |i: usize| HostGroup { label: format!("n{i}"), via: ShareVia::Memfd, ranks: vec![Rank(i as u32)] };
        World {
            ranks: ranks.iter().enumerate().map(inventory).collect(),
            hosts: (0..ranks.len()).map(group).collect(),
            host_of: (0..ranks.len() as u32).collect(),
        }
    }

    fn run(text: &str, world: &World) -> Result<Vec<Expanded>, Vec<String>> {
        let Notation { srcs, exe, dsts } = notation::parse(text).unwrap();
        let text = text.to_owned();
        expand(&TransferConfig { srcs, exe, dsts, bytes: None, sub_executors: None, span: 0..0, text }, world)
    }

    fn check(text: &str, world: &World) -> Vec<String> {
        let places = |places: &[Place]| match places {
            [] => "N".to_owned(),
            some => some.iter().map(Place::to_string).collect(),
        };
        match run(text, world) {
            Ok(all) => all.iter().map(|t| format!("{} {} {}", places(&t.srcs), t.exe, places(&t.dsts))).collect(),
            Err(problems) => problems,
        }
    }

    #[test]
    fn the_first_range_varies_slowest() {
        let world = world(&[(1, 2), (1, 2)]);
        assert_eq!(
            check("R0G* -> R[0,1]G0 -> R1G[0,1]", &world),
            [
                "R0G0 R0G0 R1G0",
                "R0G0 R1G0 R1G0",
                "R0G0 R0G0 R1G1",
                "R0G0 R1G0 R1G1",
                "R0G1 R0G0 R1G0",
                "R0G1 R1G0 R1G0",
                "R0G1 R0G0 R1G1",
                "R0G1 R1G0 R1G1",
            ]
        );
    }

    #[test]
    fn ranges_are_a_product_and_not_a_zip() {
        assert_eq!(run("R0G* -> R0G* -> R1G*", &world(&[(1, 4), (1, 4)])).unwrap().len(), 64);
    }

    #[test]
    fn ranks_vary_slower_than_their_indexes() {
        let world = world(&[(2, 0), (1, 0)]);
        assert_eq!(check("R*C* -> R0C0 -> N", &world), ["R0C0 R0C0 N", "R0C1 R0C0 N", "R1C0 R0C0 N"]);
    }

    #[test]
    fn pieces_side_by_side_are_sources_of_one_transfer() {
        let world = world(&[(1, 2)]);
        assert_eq!(check("R0G0G1 -> R0G0 -> R0G1", &world).len(), 1);
        assert_eq!(check("R0G[0,1]R0C0 -> R0G0 -> N", &world), ["R0G0R0C0 R0G0 N", "R0G1R0C0 R0G0 N"]);
    }

    #[test]
    fn local_pieces_repeat_the_whole_for_every_rank() {
        let world = world(&[(1, 1), (1, 2)]);
        assert_eq!(check("C0 -> C0 -> R1C0", &world), ["R0C0 R0C0 R1C0", "R1C0 R1C0 R1C0"]);
        assert_eq!(
            check("G* -> R0D0 -> N", &world),
            ["R0G0 R0D0 N", "R1G0 R0D0 N", "R1G1 R0D0 N"],
            "the star counts the devices of each rank"
        );
    }

    #[test]
    fn executors_without_number_take_one_from_the_transfer() {
        let world = world(&[(1, 2), (1, 2)]);
        assert_eq!(check("R0G1 -> N -> R1G0", &world), ["R0G1 R0N1.0 R1G0"]);
        assert_eq!(check("R0C0 -> R0M -> R1C0", &world), ["R0C0 R0M0 R1C0"]);
        assert_eq!(
            check("R0C0 -> R0M1 -> R1C0", &world),
            ["executor M1 does not exist: a rank has one MPI, so write M"]
        );
    }

    #[test]
    fn sub_indexes_vary_fastest() {
        let world = world(&[(1, 2)]);
        assert_eq!(
            check("R0G0 -> R0D[0,1].[2,3] -> R0G1", &world),
            ["R0G0 R0D0.2 R0G1", "R0G0 R0D0.3 R0G1", "R0G0 R0D1.2 R0G1", "R0G0 R0D1.3 R0G1",]
        );
        assert_eq!(check("R0C0 -> R0C0.* -> N", &world), ["R0C0 R0C0 N"]);
        assert_eq!(check("R0G0 -> R0N0.* -> R0G1", &world), ["R0G0 R0N0.0 R0G1", "R0G0 R0N0.1 R0G1"]);
    }

    #[test]
    fn what_does_not_exist_is_named_with_what_does() {
        let world = world(&[(1, 4), (2, 0)]);
        assert_eq!(
            check("R0G4 -> R1G0 -> R1C[1..7]", &world),
            [
                "device 4 does not exist on rank 0 (host n0 has 4: 0 to 3)",
                "NUMA node 2 does not exist on rank 1 (host n1 has 2: 0 to 1)",
                "device 0 does not exist on rank 1 (host n1 has none: no device runtime was found)",
            ]
        );
        assert_eq!(check("R[0,2..9]C0 -> R0C0 -> N", &world), ["rank 2 does not exist (the job has 2 ranks: 0 to 1)"]);
        assert_eq!(
            check("R*G* -> R0C0 -> N", &world),
            ["there is no device on rank 1 (host n1: no device runtime was found)"]
        );
        assert_eq!(check("R0P0 -> R0C0 -> R1P0", &world).len(), 1, "P is numbered by devices");
        assert_eq!(
            check("R0C0 -> R0I*.0 -> N", &world),
            ["I* on rank 0: the NICs of the ranks are not known in this version"]
        );
    }

    #[test]
    fn equal_problems_are_told_once_and_many_are_counted() {
        let world = world(&[(1, 0); 20]);
        let problems = check("G0 -> G0 -> G0", &world);
        assert_eq!(problems.len(), PROBLEMS_SHOWN + 1);
        assert_eq!(problems.last().unwrap(), "and 12 more such problems");
    }

    #[test]
    fn products_are_bounded_on_both_sides() {
        let world = world(&[(1, 100)]);
        assert_eq!(run("R0G* -> R0G* -> R0G*", &world).unwrap().len(), TRANSFERS_MAX);
        let problems = check("R0G*G* -> R0G* -> R0G*", &world);
        assert_eq!(problems, ["\"R0G*G* -> R0G* -> R0G*\" stands for more than 1000000 transfers: use smaller ranges"]);
        assert_eq!(check("R[0..65535]G[0..65535] -> R0G0 -> N", &world).len(), 2);
    }
}

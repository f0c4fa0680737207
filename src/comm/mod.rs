//! Who the ranks are and how they talk: bytes only, no method can fail on one rank alone.

pub mod agree;
pub mod hello;
pub mod launcher;
pub mod mpi;
pub mod threads;
pub mod watch;
pub mod wire;

use crate::error::ExitCode;
use crate::units::Rank;
use watch::Watch;

/// The ranks of a job. Implementations give three primitives; collectives are written once, as
/// binomial trees rooted at rank 0, so that a rank sends and receives O(log ranks) messages.
///
/// Every rank calls the same collectives in the same order; their number depends on agreed data
/// only. No method returns `Result`: a broken job ends (MPI errors are fatal, see `abort`).
pub trait Communicator {
    fn rank(&self) -> Rank;
    fn size(&self) -> u32;
    /// What this rank is doing, for the watchdog.
    fn watch(&self) -> &Watch;
    /// Ends every rank of the job with `code`, without finalising.
    fn abort(&self, code: ExitCode) -> !;
    /// Primitive of `barrier`.
    fn arrive(&self);
    /// Primitive of all others: sends each message, returns one message from each of `from`.
    /// Messages between two ranks keep their order; nobody sends to itself.
    fn swap(&self, outgoing: &[(Rank, &[u8])], from: &[Rank]) -> Vec<Vec<u8>>;

    /// Everybody arrives before anybody leaves.
    fn barrier(&self) {
        self.watch().wait_begin();
        self.arrive();
        self.watch().wait_end();
    }

    /// Messages between ranks that both know of each other; every rank takes part, with or without any.
    fn exchange(&self, outgoing: &[(Rank, &[u8])], from: &[Rank]) -> Vec<Vec<u8>> {
        self.watch().wait_begin();
        let incoming = self.swap(outgoing, from);
        self.watch().wait_end();
        incoming
    }

    /// The bytes of rank 0, on every rank.
    fn broadcast(&self, bytes: Vec<u8>) -> Vec<u8> {
        self.watch().wait_begin();
        let bytes = spread(self, bytes);
        self.watch().wait_end();
        bytes
    }

    /// Everybody's bytes by rank, on rank 0; nothing elsewhere.
    fn gather(&self, bytes: Vec<u8>) -> Option<Vec<Vec<u8>>> {
        self.watch().wait_begin();
        let all = collect(self, bytes);
        self.watch().wait_end();
        all
    }
}

/// The parent of a rank in the binomial tree: its number without the lowest set bit.
fn parent(rank: u32) -> Option<u32> {
    (rank != 0).then(|| rank & (rank - 1))
}

/// The children of a rank, largest subtree first.
fn children(rank: u32, size: u32) -> Vec<u32> {
    let bits = if rank == 0 { u32::BITS } else { rank.trailing_zeros() };
    let mut list: Vec<u32> =
        (0..bits).map_while(|k| 1u32.checked_shl(k).and_then(|step| rank.checked_add(step))).collect();
    list.retain(|child| *child < size);
    list.reverse();
    list
}

fn spread<C: Communicator + ?Sized>(comm: &C, bytes: Vec<u8>) -> Vec<u8> {
    let rank = comm.rank().0;
    let bytes = match parent(rank) {
        None => bytes,
        Some(parent) => comm.swap(&[], &[Rank(parent)]).pop().expect("one message was asked for"),
    };
    let outgoing: Vec<(Rank, &[u8])> =
        children(rank, comm.size()).into_iter().map(|child| (Rank(child), bytes.as_slice())).collect();
    comm.swap(&outgoing, &[]);
    bytes
}

/// Frames of a gathered subtree: rank, length, bytes.
fn collect<C: Communicator + ?Sized>(comm: &C, bytes: Vec<u8>) -> Option<Vec<Vec<u8>>> {
    let rank = comm.rank().0;
    let from: Vec<Rank> = children(rank, comm.size()).into_iter().map(Rank).collect();
    let mut frames = Vec::with_capacity(bytes.len() + 12);
    push_frame(&mut frames, rank, &bytes);
    for subtree in comm.swap(&[], &from) {
        frames.extend_from_slice(&subtree);
    }
    match parent(rank) {
        Some(parent) => {
            comm.swap(&[(Rank(parent), &frames)], &[]);
            None
        }
        None => {
            let mut all = vec![Vec::new(); comm.size() as usize];
            let mut rest = frames.as_slice();
            while !rest.is_empty() {
                let (from, bytes) = pop_frame(&mut rest);
                all[from as usize] = bytes.to_vec();
            }
            Some(all)
        }
    }
}

fn push_frame(frames: &mut Vec<u8>, rank: u32, bytes: &[u8]) {
    frames.extend_from_slice(&rank.to_le_bytes());
    frames.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    frames.extend_from_slice(bytes);
}

fn pop_frame<'a>(rest: &mut &'a [u8]) -> (u32, &'a [u8]) {
    let (head, tail) = rest.split_at(12);
    let rank = u32::from_le_bytes(head[..4].try_into().expect("four bytes"));
    let length = u64::from_le_bytes(head[4..].try_into().expect("eight bytes"));
    let (bytes, tail) = tail.split_at(length as usize);
    *rest = tail;
    (rank, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_but_0_is_the_child_of_its_parent() {
        for size in [1, 2, 3, 7, 8, 64, 100] {
            let mut seen = vec![0; size as usize];
            for rank in 0..size {
                for child in children(rank, size) {
                    assert_eq!(parent(child), Some(rank));
                    seen[child as usize] += 1;
                }
            }
            assert_eq!(seen[0], 0);
            assert!(seen[1..].iter().all(|n| *n == 1), "{size}: {seen:?}");
        }
    }

    #[test]
    fn no_rank_has_more_than_log2_children() {
        assert_eq!(children(0, 1024).len(), 10);
        assert_eq!(children(512, 1024).len(), 9);
        assert!(children(1, 1024).is_empty());
    }
}

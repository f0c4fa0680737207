//! Ranks as threads of one process: for `--ranks N` without a launcher, and for tests.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::watch::{NOTICE, Watch};
use super::{Communicator, watch};
use crate::error::ExitCode;
use crate::units::Rank;

/// Waits shorter than this poll and yield; longer ones nap, so that they leave the CPU to others.
const POLLS_BEFORE_NAP: u32 = 2_000;
const NAP: Duration = Duration::from_micros(50);

struct Shared {
    size: u32,
    watches: Vec<Arc<Watch>>,
    /// By receiver, then sender.
    mail: Vec<Mutex<Vec<VecDeque<Vec<u8>>>>>,
    arrived: Vec<Condvar>,
    waiting: AtomicU32,
    round: AtomicU32,
    /// A rank panicked: nobody will wait for it.
    dead: AtomicBool,
}

/// One rank of a job whose ranks are threads.
pub struct ThreadComm {
    rank: Rank,
    shared: Arc<Shared>,
}

/// Runs `size` ranks as threads, each with its own communicator, and returns their results by rank.
///
/// # Panics
/// If a rank panics; the others are not left waiting.
pub fn run<T: Send>(size: u32, deadline: Duration, rank_main: impl Fn(&ThreadComm) -> T + Sync) -> Vec<T> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let watches: Vec<_> = (0..size).map(|rank| Watch::new(Rank(rank), host.clone(), deadline)).collect();
    watch::start(watches.clone(), |code| std::process::exit(code as i32));
    let shared = Arc::new(Shared {
        size,
        watches,
        mail: (0..size).map(|_| Mutex::new(vec![VecDeque::new(); size as usize])).collect(),
        arrived: (0..size).map(|_| Condvar::new()).collect(),
        waiting: AtomicU32::new(0),
        round: AtomicU32::new(0),
        dead: AtomicBool::new(false),
    });
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let comm = ThreadComm { rank: Rank(rank), shared: shared.clone() };
                let rank_main = &rank_main;
                std::thread::Builder::new()
                    .name(format!("rank {rank}"))
                    .spawn_scoped(scope, move || rank_main(&comm))
                    .expect("a thread can be started")
            })
            .collect();
        let joined: Vec<_> = ranks.into_iter().map(|rank| rank.join()).collect();
        joined.into_iter().map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

impl Drop for ThreadComm {
    fn drop(&mut self) {
        self.watch().finish();
        if std::thread::panicking() {
            self.shared.dead.store(true, Ordering::Release);
            for condvar in &self.shared.arrived {
                condvar.notify_all();
            }
        }
    }
}

impl ThreadComm {
    fn check_alive(&self) {
        assert!(!self.shared.dead.load(Ordering::Acquire), "another rank panicked");
    }

    /// Names the ranks that are not at this collective, once waiting has become long.
    fn note_missing(&self) {
        let mine = self.watch();
        if mine.stalled() < NOTICE.min(mine.deadline()) / 2 {
            return;
        }
        let missing: Vec<String> = self
            .shared
            .watches
            .iter()
            .filter(|other| other.step() <= mine.step() && !other.is_waiting() && other.rank() != self.rank)
            .map(|other| format!("rank {} has not arrived: it is in {}", other.rank(), other.phase()))
            .collect();
        mine.set_missing((!missing.is_empty()).then(|| missing.join(", ")));
    }
}

impl Communicator for ThreadComm {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn size(&self) -> u32 {
        self.shared.size
    }

    fn watch(&self) -> &Watch {
        &self.shared.watches[self.rank.0 as usize]
    }

    fn abort(&self, code: ExitCode) -> ! {
        std::process::exit(code as i32)
    }

    fn arrive(&self) {
        let shared = &self.shared;
        let round = shared.round.load(Ordering::Acquire);
        if shared.waiting.fetch_add(1, Ordering::AcqRel) + 1 == shared.size {
            shared.waiting.store(0, Ordering::Relaxed);
            shared.round.store(round.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut polls = 0;
        while shared.round.load(Ordering::Acquire) == round {
            self.check_alive();
            polls += 1;
            if polls < POLLS_BEFORE_NAP {
                std::thread::yield_now();
            } else {
                self.note_missing();
                std::thread::sleep(NAP);
            }
        }
    }

    fn swap(&self, outgoing: &[(Rank, &[u8])], from: &[Rank]) -> Vec<Vec<u8>> {
        for (to, bytes) in outgoing {
            let to = to.0 as usize;
            self.shared.mail[to].lock().expect("no panic while locked")[self.rank.0 as usize].push_back(bytes.to_vec());
            self.shared.arrived[to].notify_all();
        }
        let me = self.rank.0 as usize;
        let mut incoming = Vec::with_capacity(from.len());
        for sender in from {
            let mut mail = self.shared.mail[me].lock().expect("no panic while locked");
            let message = loop {
                if let Some(message) = mail[sender.0 as usize].pop_front() {
                    break message;
                }
                mail = self.shared.arrived[me]
                    .wait_timeout(mail, Duration::from_millis(100))
                    .expect("no panic while locked")
                    .0;
                self.note_missing();
                if self.shared.dead.load(Ordering::Acquire) {
                    drop(mail);
                    self.check_alive();
                    unreachable!("a dead job ends in check_alive");
                }
            };
            incoming.push(message);
        }
        incoming
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    #[test]
    fn collectives_reach_every_rank() {
        for size in [1, 2, 3, 8, 13] {
            let results = run(size, LIMIT, |comm| {
                let rank = comm.rank().0;
                let word = comm.broadcast(if rank == 0 { b"plan".to_vec() } else { Vec::new() });
                let all = comm.gather(vec![rank as u8; rank as usize]);
                comm.barrier();
                let (next, before) = (Rank((rank + 1) % size), Rank((rank + size - 1) % size));
                let got = if size > 1 { comm.exchange(&[(next, &[rank as u8])], &[before]) } else { vec![] };
                (word, all, got)
            });
            for (rank, (word, all, got)) in results.into_iter().enumerate() {
                assert_eq!(word, b"plan");
                assert_eq!(all.is_some(), rank == 0);
                for (from, bytes) in all.into_iter().flatten().enumerate() {
                    assert_eq!(bytes, vec![from as u8; from]);
                }
                if size > 1 {
                    assert_eq!(got, vec![vec![((rank + size as usize - 1) % size as usize) as u8]]);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "rank 1 gave up")]
    fn a_panic_on_one_rank_does_not_leave_the_others_waiting() {
        // The first panic by rank order is re-raised: rank 0 dies of rank 1, so give it a way out.
        run(2, LIMIT, |comm| {
            if comm.rank().0 == 1 {
                panic!("rank 1 gave up");
            }
            let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| comm.barrier()));
            assert!(waited.is_err());
        });
    }
}

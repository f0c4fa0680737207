//! Ranks of an MPI job; the only file that names rsmpi.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mpi::environment::Universe;
use mpi::point_to_point::{Destination as _, MatchedReceiveVec as _, Source as _};
use mpi::topology::{Communicator as _, SimpleCommunicator};
use mpi::{Tag, Threading};

use super::watch::{NOTICE, Watch};
use super::{Communicator, watch};
use crate::error::ExitCode;
use crate::units::Rank;

/// MPI counts are C ints; a message is cut into pieces below 2^31 bytes.
const PIECE: usize = 1 << 30;

const DATA: Tag = 1;
/// A waiting rank tells rank 0 where it waits.
const WAITING: Tag = 2;
/// Rank 0 answers with the ranks that it misses.
const ANSWER: Tag = 3;

/// A blocking MPI call costs 33 ms with 8 ranks of MPICH on 2 cores, a polled one with a yield
/// 50 us. Long waits nap instead, so that they leave the CPU to those who work.
const POLLS_BEFORE_NAP: u32 = 2_000;
const NAP: Duration = Duration::from_micros(50);

/// The job: MPI is finalised when this is dropped, which waits for every rank.
pub struct MpiComm {
    world: SimpleCommunicator,
    /// Talk about waiting, apart from the data.
    side: SimpleCommunicator,
    watch: Arc<Watch>,
    waiters: RefCell<Waiters>,
    _universe: Universe,
}

/// What rank 0 knows of those who wait, and what the others have asked.
#[derive(Default)]
struct Waiters {
    step: u64,
    arrived: BTreeSet<u32>,
    asked: Option<Instant>,
    answered: bool,
}

impl MpiComm {
    /// Starts MPI, or returns `None` if it was started before.
    pub fn start(host: String, deadline: Duration) -> Option<MpiComm> {
        // Threads of ours never call MPI, but the abort of the watchdog and of the panic hook does.
        let (universe, _granted) = mpi::initialize_with_threading(Threading::Multiple)?;
        let world = universe.world();
        let watch = Watch::new(Rank(world.rank() as u32), host, deadline);
        watch::start(vec![watch.clone()], |code| abort(code));
        Some(MpiComm {
            side: world.duplicate(),
            world: world.duplicate(),
            watch,
            waiters: RefCell::default(),
            _universe: universe,
        })
    }

    /// What this rank is doing, for the panic hook.
    pub fn shared_watch(&self) -> Arc<Watch> {
        self.watch.clone()
    }

    /// The library's own name and version, on one line.
    pub fn library() -> String {
        let text = mpi::environment::library_version().unwrap_or_default();
        let line = text.lines().next().unwrap_or_default();
        let line = line.split(", package:").next().unwrap_or(line);
        line.split_whitespace().collect::<Vec<_>>().join(" ").replace("MPICH Version:", "MPICH")
    }

    /// Polls until `done` says so; meanwhile yields, and finds out who is missing.
    fn poll(&self, mut done: impl FnMut() -> bool) {
        let mut polls = 0u32;
        while !done() {
            polls = polls.saturating_add(1);
            if polls < POLLS_BEFORE_NAP {
                std::thread::yield_now();
            } else {
                self.talk_about_waiting();
                std::thread::sleep(NAP);
            }
        }
    }

    /// Once waiting has become long: ranks tell rank 0 that they wait, rank 0 tells them whom it misses.
    fn talk_about_waiting(&self) {
        let long = NOTICE.min(self.watch.deadline()) / 2;
        if self.watch.stalled() < long {
            return;
        }
        let mut waiters = self.waiters.borrow_mut();
        let step = self.watch.step();
        if waiters.step != step {
            *waiters = Waiters { step, ..Waiters::default() };
        }
        if self.rank().0 == 0 { self.answer(&mut waiters) } else { self.ask(&mut waiters, long) }
    }

    fn answer(&self, waiters: &mut Waiters) {
        let mut fresh = Vec::new();
        while let Some((message, status)) = self.side.any_process().immediate_matched_probe_with_tag(WAITING) {
            let (text, status) = (message, status).matched_receive_vec::<u8>();
            let step = <[u8; 8]>::try_from(text).map(u64::from_le_bytes);
            if step == Ok(waiters.step) {
                waiters.arrived.insert(status.source_rank() as u32);
                fresh.push(status.source_rank());
            }
        }
        let missing: Vec<u32> = (1..self.size()).filter(|rank| !waiters.arrived.contains(rank)).collect();
        self.watch.set_missing(self.describe_missing(&missing));
        let bytes: Vec<u8> = missing.iter().flat_map(|rank| rank.to_le_bytes()).collect();
        for rank in fresh {
            // Small, so it leaves at once; the receiver waits for it.
            self.side.process_at_rank(rank).send_with_tag(&bytes[..], ANSWER);
        }
    }

    fn ask(&self, waiters: &mut Waiters, long: Duration) {
        if waiters.asked.is_none_or(|asked| asked.elapsed() > long) {
            waiters.asked = Some(Instant::now());
            self.side.process_at_rank(0).send_with_tag(&waiters.step.to_le_bytes()[..], WAITING);
        }
        while let Some(probed) = self.side.process_at_rank(0).immediate_matched_probe_with_tag(ANSWER) {
            let (bytes, _) = probed.matched_receive_vec::<u8>();
            let missing: Vec<u32> =
                bytes.chunks_exact(4).map(|four| u32::from_le_bytes(four.try_into().expect("four bytes"))).collect();
            waiters.answered = true;
            self.watch.set_missing(self.describe_missing(&missing));
        }
        if !waiters.answered {
            self.watch.set_missing(Some(format!("{} does not answer", self.watch.name_of(Rank(0)))));
        }
    }

    fn describe_missing(&self, missing: &[u32]) -> Option<String> {
        const NAMED: usize = 8;
        if missing.is_empty() {
            return None;
        }
        let names: Vec<String> = missing.iter().take(NAMED).map(|rank| self.watch.name_of(Rank(*rank))).collect();
        let more = if missing.len() > NAMED { format!(" and {} more", missing.len() - NAMED) } else { String::new() };
        let have = if missing.len() == 1 { "has" } else { "have" };
        Some(format!("{}{more} {have} not arrived", names.join(", ")))
    }
}

/// Launchers forward stderr on their own time, and MPICH's drops what it has not read when a rank
/// aborts: the reason for the abort was said right before it.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Ends every rank, from any thread; before MPI has started only this process.
pub fn abort(code: ExitCode) -> ! {
    if mpi::environment::is_initialized() && !mpi::environment::is_finalized() {
        std::thread::sleep(LAST_WORDS);
        SimpleCommunicator::world().abort(code as i32);
    }
    std::process::exit(code as i32)
}

/// A message that is being received: its length comes first, then its pieces.
struct Incoming {
    from: Rank,
    length: Option<usize>,
    bytes: Vec<u8>,
}

impl Incoming {
    fn is_done(&self) -> bool {
        self.length == Some(self.bytes.len())
    }

    fn receive(&mut self, world: &SimpleCommunicator) {
        let process = world.process_at_rank(self.from.0 as i32);
        while !self.is_done() {
            let Some(probed) = process.immediate_matched_probe_with_tag(DATA) else { return };
            let (piece, _) = probed.matched_receive_vec::<u8>();
            match self.length {
                None => {
                    let length: [u8; 8] = piece.try_into().expect("a message starts with its length");
                    self.length = Some(u64::from_le_bytes(length) as usize);
                }
                Some(_) => self.bytes.extend_from_slice(&piece),
            }
        }
    }
}

impl Communicator for MpiComm {
    fn rank(&self) -> Rank {
        Rank(self.world.rank() as u32)
    }

    fn size(&self) -> u32 {
        self.world.size() as u32
    }

    fn watch(&self) -> &Watch {
        &self.watch
    }

    fn abort(&self, code: ExitCode) -> ! {
        abort(code)
    }

    fn arrive(&self) {
        use mpi::collective::CommunicatorCollectives as _;
        let request = Cell::new(Some(self.world.immediate_barrier()));
        self.poll(|| {
            let pending = request.take().expect("the barrier is pending until it is done");
            match pending.test() {
                Ok(_) => true,
                Err(pending) => {
                    request.set(Some(pending));
                    false
                }
            }
        });
    }

    fn swap(&self, outgoing: &[(Rank, &[u8])], from: &[Rank]) -> Vec<Vec<u8>> {
        let lengths: Vec<[u8; 8]> = outgoing.iter().map(|(_, bytes)| (bytes.len() as u64).to_le_bytes()).collect();
        let mut incoming: Vec<Incoming> =
            from.iter().map(|from| Incoming { from: *from, length: None, bytes: Vec::new() }).collect();
        mpi::request::scope(|scope| {
            let mut pending = Vec::new();
            for ((to, bytes), length) in outgoing.iter().zip(&lengths) {
                let process = self.world.process_at_rank(to.0 as i32);
                pending.push(process.immediate_send_with_tag(scope, &length[..], DATA));
                for piece in bytes.chunks(PIECE) {
                    pending.push(process.immediate_send_with_tag(scope, piece, DATA));
                }
            }
            self.poll(|| {
                pending = std::mem::take(&mut pending).into_iter().filter_map(|request| request.test().err()).collect();
                incoming.iter_mut().for_each(|message| message.receive(&self.world));
                pending.is_empty() && incoming.iter().all(Incoming::is_done)
            });
        });
        incoming.into_iter().map(|message| message.bytes).collect()
    }
}

impl Drop for MpiComm {
    fn drop(&mut self) {
        self.watch.finish();
    }
}

//! Threads that start a sample together, time themselves and wake who waits for the last of them.
//!
//! Between samples they sleep. `arm` wakes them and returns when all spin on one atomic; `go` is
//! one store to it. From there to a thread's end stamp nothing but its task runs.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};

use crate::clock::now_ns;
use crate::error::Error;
use crate::exec::{Executions, Window};

/// One thread's work of one sample.
pub type Task = Box<dyn FnMut(Executions) + Send>;

/// How the threads' names begin; a blank and a number follow.
pub const THREAD_NAME: &str = "cpu";

/// Value of `Shared::start` that ends the threads.
const QUIT: u64 = u64::MAX;

/// A spinning thread gives its CPU away this often (every few microseconds): on a full machine the
/// thread that will say `go` may need it, on an idle one the call returns in a fraction of a
/// microsecond.
const SPINS_PER_YIELD: u32 = 64;

/// A yield does not let every scheduler's other threads run, and the one that is waited for may be
/// among them: after some milliseconds of spinning the thread naps. `go` comes well before that
/// unless CPUs are shared.
const SPINS_BEFORE_NAP: u32 = 65_536;
const NAP: Duration = Duration::from_micros(20);

/// What a thread leaves behind; on lines of its own, so that stamping disturbs no other thread.
#[repr(align(128))]
#[derive(Default)]
struct Slot {
    start_ns: AtomicU64,
    end_ns: AtomicU64,
    cpu: AtomicU64,
}

#[derive(Default)]
struct Board {
    /// Number of the sample that threads are to get ready for.
    generation: u64,
    spinning: usize,
    finished: usize,
    quit: bool,
    /// A task panicked: no further sample can be complete.
    dead: bool,
}

struct Shared {
    board: Mutex<Board>,
    /// Tells sleeping threads that the generation changed.
    armed: Condvar,
    /// Tells the owner that the last thread spins or has finished.
    reached: Condvar,
    /// The generation that may run.
    start: AtomicU64,
    first: AtomicU64,
    count: AtomicU32,
    /// Tasks are run (else the sample is empty).
    act: AtomicBool,
    slots: Vec<Slot>,
}

impl Shared {
    fn board(&self) -> MutexGuard<'_, Board> {
        // A panicking task never holds the lock, so the board is whole.
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False when the threads have to end.
    fn spin_until(&self, generation: u64) -> bool {
        let mut spins = 0u32;
        loop {
            match self.start.load(Ordering::Acquire) {
                QUIT => return false,
                now if now == generation => return true,
                _ => {}
            }
            spins = spins.saturating_add(1);
            if spins > SPINS_BEFORE_NAP {
                std::thread::sleep(NAP);
            } else if spins.is_multiple_of(SPINS_PER_YIELD) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Sleeps until a generation after `seen` is armed, and counts as spinning; none = end.
    fn next_generation(&self, seen: u64) -> Option<u64> {
        let mut board = self.board();
        while board.generation == seen && !board.quit {
            board = self.armed.wait(board).unwrap_or_else(PoisonError::into_inner);
        }
        if board.quit {
            return None;
        }
        board.spinning += 1;
        if board.spinning == self.slots.len() {
            self.reached.notify_all();
        }
        Some(board.generation)
    }

    fn work(&self, slot: &Slot, task: &mut Task) {
        let mut generation = 0;
        while let Some(next) = self.next_generation(generation) {
            generation = next;
            if !self.spin_until(generation) {
                return;
            }
            let start_ns = now_ns();
            if self.act.load(Ordering::Relaxed) {
                let first = self.first.load(Ordering::Relaxed);
                task(Executions { first, count: self.count.load(Ordering::Relaxed) });
            }
            let end_ns = now_ns();
            slot.start_ns.store(start_ns, Ordering::Relaxed);
            slot.end_ns.store(end_ns, Ordering::Relaxed);
            slot.cpu.store(sched_getcpu() as u64, Ordering::Relaxed);
            let mut board = self.board();
            board.finished += 1;
            if board.finished == self.slots.len() {
                self.reached.notify_all();
            }
        }
    }
}

/// Reports a thread that unwinds as finished, so that nobody waits for it.
struct Mourner<'a>(&'a Shared);

impl Drop for Mourner<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut board = self.0.board();
            board.dead = true;
            board.finished += 1;
            self.0.reached.notify_all();
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Asleep,
    Armed,
    Running,
}

/// The threads of one executor. Dropping it ends them.
pub struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    state: State,
}

impl Crew {
    /// Starts one thread per task, thread i pinned to CPU `cpus[i mod n]`.
    ///
    /// # Errors
    /// A thread cannot be started or pinned.
    pub fn start(tasks: Vec<Task>, cpus: &[u32]) -> Result<Crew, Error> {
        let shared = Arc::new(Shared {
            board: Mutex::default(),
            armed: Condvar::new(),
            reached: Condvar::new(),
            start: AtomicU64::new(0),
            first: AtomicU64::new(0),
            count: AtomicU32::new(0),
            act: AtomicBool::new(true),
            slots: tasks.iter().map(|_| Slot::default()).collect(),
        });
        let count = tasks.len();
        let mut crew = Crew { shared, threads: Vec::with_capacity(count), state: State::Asleep };
        let (report, reports) = mpsc::channel();
        for (i, mut task) in tasks.into_iter().enumerate() {
            let (shared, report, cpu) = (Arc::clone(&crew.shared), report.clone(), cpus[i % cpus.len()]);
            let body = move || {
                let pinned = pin(cpu);
                let failed = pinned.is_err();
                // The receiver lives until every thread has reported.
                let _ = report.send(pinned);
                if !failed {
                    let _mourner = Mourner(&shared);
                    shared.work(&shared.slots[i], &mut task);
                }
            };
            let thread = std::thread::Builder::new().name(format!("{THREAD_NAME} {i}")).spawn(body).map_err(|err| {
                Error::new(format!(
                    "cannot start thread {i} of {count}: {err}; use fewer sub_executors or raise ulimit -u"
                ))
            })?;
            crew.threads.push(thread);
        }
        for _ in 0..count {
            reports.recv().expect("every thread reports before it ends")?;
        }
        Ok(crew)
    }

    /// Wakes the threads and returns when all of them wait for `go`. May be repeated, with other
    /// arguments, before `go`.
    ///
    /// # Errors
    /// A thread died in an earlier sample.
    pub fn arm(&mut self, sample: Executions, act: bool) -> Result<(), Error> {
        assert_ne!(self.state, State::Running, "a sample ends before the next is armed");
        self.shared.first.store(sample.first, Ordering::Relaxed);
        self.shared.count.store(sample.count, Ordering::Relaxed);
        self.shared.act.store(act, Ordering::Relaxed);
        let mut board = self.shared.board();
        if board.dead {
            return Err(died());
        }
        if self.state == State::Asleep {
            board.generation += 1;
            board.spinning = 0;
            board.finished = 0;
            self.shared.armed.notify_all();
        }
        drop(self.until(board, |board| board.spinning));
        self.state = State::Armed;
        Ok(())
    }

    pub fn go(&mut self) {
        assert_eq!(self.state, State::Armed, "a sample is armed before it starts");
        self.state = State::Running;
        // Only `arm` changes the generation, and it needs `&mut self`.
        let generation = self.shared.start.load(Ordering::Relaxed) + 1;
        self.shared.start.store(generation, Ordering::Release);
    }

    /// Sleeps until every thread has finished its task.
    ///
    /// # Errors
    /// A task panicked.
    pub fn wait(&mut self) -> Result<(), Error> {
        assert_eq!(self.state, State::Running, "a sample starts before it is waited for");
        self.state = State::Asleep;
        let board = self.until(self.shared.board(), |board| board.finished);
        if board.dead { Err(died()) } else { Ok(()) }
    }

    /// Sleeps until the count is that of the threads.
    fn until<'a>(&'a self, mut board: MutexGuard<'a, Board>, count: impl Fn(&Board) -> usize) -> MutexGuard<'a, Board> {
        while count(&board) < self.shared.slots.len() {
            board = self.shared.reached.wait(board).unwrap_or_else(PoisonError::into_inner);
        }
        board
    }

    /// By thread: start and end in the sample that `wait` ended.
    pub fn windows(&self) -> Vec<Window> {
        let window = |slot: &Slot| Window {
            start_ns: slot.start_ns.load(Ordering::Relaxed),
            end_ns: slot.end_ns.load(Ordering::Relaxed),
        };
        self.shared.slots.iter().map(window).collect()
    }

    /// By thread: the CPU it was on at the end of that sample.
    pub fn cpus(&self) -> Vec<u32> {
        self.shared.slots.iter().map(|slot| slot.cpu.load(Ordering::Relaxed) as u32).collect()
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.board().quit = true;
        self.shared.armed.notify_all();
        self.shared.start.store(QUIT, Ordering::Release);
        for thread in self.threads.drain(..) {
            // A panic was printed by the hook and reported by `wait`.
            let _ = thread.join();
        }
    }
}

fn died() -> Error {
    Error::new("a thread of the CPU executor panicked, so its samples cannot be completed")
}

fn pin(cpu: u32) -> Result<(), Error> {
    if cpu as usize >= CpuSet::MAX_CPU {
        return Err(Error::new(format!(
            "cannot pin a thread to CPU {cpu}: only CPUs below {} can be named",
            CpuSet::MAX_CPU
        )));
    }
    let mut set = CpuSet::new();
    set.set(cpu as usize);
    sched_setaffinity(None, &set).map_err(|err| Error::from(err).context(format!("pin a thread to CPU {cpu}")))
}

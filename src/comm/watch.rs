//! Knows what each rank of this process is doing, says so when it takes long, ends what hangs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::error::{ExitCode, Phase};
use crate::units::Rank;

/// A step that makes no progress for this long is spoken of.
pub const NOTICE: Duration = Duration::from_secs(10);

/// Rank 0 knows best who is missing, so the others leave it this long past the deadline to say so.
const GRACE: Duration = Duration::from_secs(2);

/// How often the watchdog looks.
const TICK: Duration = Duration::from_millis(200);

/// What one rank is doing. Progress is counted in steps: each collective ends one.
pub struct Watch {
    rank: Rank,
    host: String,
    origin: Instant,
    phase: AtomicUsize,
    waiting: AtomicBool,
    step: AtomicU64,
    /// Milliseconds from `origin` to the start of the present step.
    since_ms: AtomicU64,
    deadline_ms: AtomicU64,
    over: AtomicBool,
    /// What a waiting rank has learnt of those that it waits for.
    missing: Mutex<Option<String>>,
    /// Labels of the other ranks' hosts, known after `hello`.
    hosts: Mutex<BTreeMap<Rank, String>>,
}

impl Watch {
    pub fn new(rank: Rank, host: String, deadline: Duration) -> Arc<Watch> {
        Arc::new(Watch {
            rank,
            host,
            origin: Instant::now(),
            phase: AtomicUsize::new(0),
            waiting: AtomicBool::new(false),
            step: AtomicU64::new(0),
            since_ms: AtomicU64::new(0),
            deadline_ms: AtomicU64::new(deadline.as_millis() as u64),
            over: AtomicBool::new(false),
            missing: Mutex::new(None),
            hosts: Mutex::new(BTreeMap::new()),
        })
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    pub fn host(&self) -> &str {
        &self.host
    }

    pub fn set_hosts(&self, hosts: impl IntoIterator<Item = (Rank, String)>) {
        self.hosts.lock().expect("no panic while locked").extend(hosts);
    }

    /// "rank 1 (n7)".
    pub fn name_of(&self, rank: Rank) -> String {
        match self.hosts.lock().expect("no panic while locked").get(&rank) {
            Some(host) => format!("rank {rank} ({host})"),
            None => format!("rank {rank}"),
        }
    }

    pub fn enter(&self, phase: Phase) {
        self.phase.store(phase as usize, Ordering::Relaxed);
        self.progress();
    }

    pub fn phase(&self) -> Phase {
        Phase::ALL[self.phase.load(Ordering::Relaxed)]
    }

    pub fn set_deadline(&self, deadline: Duration) {
        self.deadline_ms.store(deadline.as_millis() as u64, Ordering::Relaxed);
    }

    pub fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms.load(Ordering::Relaxed))
    }

    /// Something was done: the deadline counts from here.
    pub fn progress(&self) {
        self.since_ms.store(self.origin.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    pub fn wait_begin(&self) {
        self.progress();
        self.waiting.store(true, Ordering::Release);
    }

    pub fn wait_end(&self) {
        self.waiting.store(false, Ordering::Release);
        self.step.fetch_add(1, Ordering::Release);
        self.progress();
    }

    pub fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }

    /// Collectives ended so far; equal on all ranks at the same place of the program.
    pub fn step(&self) -> u64 {
        self.step.load(Ordering::Acquire)
    }

    /// Time without progress.
    pub fn stalled(&self) -> Duration {
        self.origin.elapsed().saturating_sub(Duration::from_millis(self.since_ms.load(Ordering::Relaxed)))
    }

    pub fn set_missing(&self, missing: Option<String>) {
        *self.missing.lock().expect("no panic while locked") = missing;
    }

    /// The rank has left the job: nothing more is watched.
    pub fn finish(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// "rank 1 (n7) is in run: waiting for others for 12 s; rank 2 (n8) has not arrived".
    fn describe(&self) -> String {
        let what = if self.is_waiting() { "waiting for others" } else { "working" };
        let seconds = self.stalled().as_secs();
        let mut text = format!("rank {} ({}) is in {}: {what} for {seconds} s", self.rank, self.host, self.phase());
        if let Some(missing) =
            self.missing.lock().expect("no panic while locked").as_ref().filter(|_| self.is_waiting())
        {
            text.push_str(&format!("; {missing}"));
        }
        text
    }

    fn is_past_deadline(&self) -> bool {
        let grace = if self.rank.0 == 0 || !self.is_waiting() { Duration::ZERO } else { GRACE };
        self.stalled() > self.deadline() + grace
    }
}

/// Starts the thread that watches the ranks of this process and calls `abort` past a deadline.
pub fn start(ranks: Vec<Arc<Watch>>, abort: impl Fn(ExitCode) + Send + 'static) {
    let watch = move || {
        let mut noticed: Vec<(u64, u64)> = vec![(0, 0); ranks.len()];
        loop {
            std::thread::sleep(TICK);
            if ranks.iter().all(|rank| rank.over.load(Ordering::Acquire)) {
                return;
            }
            for (rank, noticed) in ranks.iter().zip(&mut noticed) {
                if rank.over.load(Ordering::Acquire) {
                    continue;
                }
                if rank.is_past_deadline() {
                    let seconds = rank.deadline().as_secs_f64();
                    complain(&format!(
                        "error: {}: no progress within the deadline of {seconds} s (run.deadline_seconds); giving up",
                        rank.describe()
                    ));
                    abort(ExitCode::Deadline);
                }
                let notice = (rank.step(), rank.stalled().as_secs() / NOTICE.as_secs());
                if notice.1 > 0 && *noticed != notice {
                    *noticed = notice;
                    complain(&rank.describe());
                }
            }
        }
    };
    std::thread::Builder::new().name("watchdog".into()).spawn(watch).expect("a thread can be started");
}

/// One line to stderr, whatever state it is in.
fn complain(line: &str) {
    use std::io::Write as _;
    // A stderr that is gone cannot be told anything.
    let _ = writeln!(std::io::stderr(), "tb-mpi: {line}");
}

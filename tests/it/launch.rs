//! Starts tb-mpi as a job, with a time limit, and sees that nothing of it is left behind.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;
use tempfile::TempDir;

/// Longer than any job here takes, shorter than the limit after which nextest kills the test.
const LIMIT: Duration = Duration::from_secs(60);

/// How long a job that has ended may take to vanish: Open MPI kills ranks one second after asking them.
const VANISH: Duration = Duration::from_secs(10);

/// How often a condition that has no signal is looked at.
const POLL: Duration = Duration::from_millis(10);

/// Marks the processes of one job, through their environment.
const JOB: &str = "TB_TEST_JOB";

/// Two tests: `first` ends at once, `long` runs until something ends it. A results file with one test in
/// it says that the ranks are in the timed loop of `long` or about to be.
pub const LONG: &str = r#"
[run]
warmups = 0
[[test]]
name = "first"
iterations = 1
bytes = "4K"
sub_executors = 1
transfers = ["R0C0 -> R1C0 -> R1C0"]
[[test]]
name = "long"
seconds = 3600.0
bytes = "1M"
sub_executors = 1
transfers = ["R0C0 -> R1C0 -> R1C0", "R1C0 -> R0C0 -> R0C0"]
"#;

/// One pull between two ranks: small, quick, verified.
pub const PULL: &str = r#"
[run]
iterations = 3
warmups = 0
[data]
bytes = "64K"
src_rotate_bytes = "256K"
src_rotate_scope = "all"
[[test]]
name = "pull"
sub_executors = 1
transfers = ["R0C0 -> R1C0 -> R1C0"]
"#;

/// The MPI whose launcher the jobs use; the binary has to be linked with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    OpenMpi,
    Mpich,
}

/// `TB_TEST_MPIRUN`, else Open MPI's launcher where it has its own name, else `mpirun`.
fn launcher() -> String {
    let own = "mpirun.openmpi";
    std::env::var("TB_TEST_MPIRUN").unwrap_or_else(|_| if on_path(own) { own } else { "mpirun" }.to_owned())
}

fn on_path(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

pub fn dialect() -> Dialect {
    let version = Command::new(launcher()).arg("--version").output().expect("the MPI launcher starts");
    let text = String::from_utf8_lossy(&version.stdout);
    // Under the name that Debian gives it, Open MPI's launcher calls itself OpenRTE.
    let is_open_mpi = ["Open MPI", "OpenRTE"].iter().any(|name| text.contains(name));
    if is_open_mpi { Dialect::OpenMpi } else { Dialect::Mpich }
}

/// Ranks that start with the same environment.
#[derive(Debug)]
struct Context {
    ranks: u32,
    env: Vec<(String, String)>,
}

/// A job to be started, in a folder of its own.
#[derive(Debug)]
pub struct Job {
    dir: TempDir,
    /// None: no launcher.
    contexts: Vec<Context>,
    /// Of a job without a launcher.
    env: Vec<(String, String)>,
    args: Vec<String>,
    stdout: Option<Stdio>,
}

impl Job {
    /// Without a launcher.
    pub fn alone() -> Job {
        let dir = tempfile::tempdir().expect("a temporary folder can be made");
        Job { dir, contexts: Vec::new(), env: Vec::new(), args: Vec::new(), stdout: None }
    }

    /// `mpirun -np RANKS`.
    pub fn mpirun(ranks: u32) -> Job {
        Job::alone().and(ranks)
    }

    /// More ranks, whose environment is set apart: `: -np RANKS`.
    pub fn and(mut self, ranks: u32) -> Job {
        self.contexts.push(Context { ranks, env: Vec::new() });
        self
    }

    /// Sets a variable of the ranks named last.
    pub fn env(mut self, name: &str, value: &str) -> Job {
        let env = self.contexts.last_mut().map_or(&mut self.env, |context| &mut context.env);
        env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Writes the config file, gives it as an argument, and asks for a results file.
    pub fn config(self, text: &str) -> Job {
        let path = self.path("cfg.toml");
        fs::write(&path, text).expect("the temporary folder is writable");
        let (config, json) = (path.display().to_string(), self.path("r.json").display().to_string());
        self.args(&[&config, "--json", &json])
    }

    pub fn args(mut self, args: &[&str]) -> Job {
        self.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    pub fn stdout(mut self, stdout: impl Into<Stdio>) -> Job {
        self.stdout = Some(stdout.into());
        self
    }

    /// A file in the folder of the job.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self) -> Command {
        let binary = env!("CARGO_BIN_EXE_tb-mpi");
        if self.contexts.is_empty() {
            let mut command = Command::new(binary);
            command.args(&self.args).envs(self.env.iter().cloned());
            return command;
        }
        let mut command = Command::new(launcher());
        if dialect() == Dialect::OpenMpi {
            command.args(["--oversubscribe", "--bind-to", "none"]);
            command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        }
        for (i, context) in self.contexts.iter().enumerate() {
            if i > 0 {
                command.arg(":");
            }
            command.arg("-np").arg(context.ranks.to_string()).arg("env");
            command.args(context.env.iter().map(|(name, value)| format!("{name}={value}")));
            command.arg(binary).args(&self.args);
        }
        command
    }

    /// Starts the job. Jobs of all tests take turns: the machine is theirs, and so is `/dev/shm`.
    pub fn start(mut self) -> Running {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let turn = File::create(Path::new(env!("CARGO_TARGET_TMPDIR")).join("jobs.lock")).expect("the lock file opens");
        rustix::fs::flock(&turn, rustix::fs::FlockOperation::LockExclusive).expect("the lock can be waited for");
        let mark = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let capture = |name: &str| File::create(self.dir.path().join(name)).expect("the temporary folder is writable");
        let (stdout, stderr) = (capture("stdout"), capture("stderr"));
        let stdout = self.stdout.take().unwrap_or(stdout.into());
        let mut command = self.command();
        command.env(JOB, &mark).stdin(Stdio::null()).stdout(stdout).stderr(stderr).process_group(0);
        let segments = segments();
        let child = command.spawn().expect("the job starts");
        Running { job: self, child, mark, segments, started: Instant::now(), _turn: turn }
    }

    pub fn run(self) -> Finished {
        self.start().wait()
    }
}

/// A job that has been started. Dropping it kills what is left of it.
#[derive(Debug)]
pub struct Running {
    job: Job,
    child: Child,
    mark: String,
    /// Shared-memory segments that were there before.
    segments: BTreeSet<String>,
    started: Instant,
    _turn: File,
}

impl Running {
    pub fn path(&self, name: &str) -> PathBuf {
        self.job.path(name)
    }

    /// The launcher, or the program itself where there is none.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the job is still there");
    }

    /// Sends a signal to one rank of the job.
    pub fn signal_rank(&self, rank: u32, signal: Signal) {
        let pid = self.pid_of(rank).unwrap_or_else(|| panic!("rank {rank} is not there; {}", self.output()));
        kill_process(pid, signal).expect("the rank is still there");
    }

    fn pid_of(&self, rank: u32) -> Option<Pid> {
        let names = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"];
        self.processes().into_iter().find_map(|(pid, env)| {
            let is_it = env.iter().any(|(name, value)| names.contains(&name.as_str()) && *value == rank.to_string());
            is_it.then_some(pid)
        })
    }

    /// Returns once the results file holds `tests` finished tests.
    pub fn wait_for_tests(&mut self, tests: usize) {
        let path = self.path("r.json");
        loop {
            // A file that does not parse is half written, which the program promises not to do.
            if let Ok(text) = fs::read_to_string(&path) {
                let results: Value = serde_json::from_str(&text).expect("the results file is whole at any time");
                if results["tests"].as_array().is_some_and(|list| list.len() >= tests) {
                    return;
                }
            }
            assert!(self.started.elapsed() < LIMIT, "no {tests} finished tests in time; {}", self.output());
            let ended = self.child.try_wait().expect("the job can be waited for");
            assert!(ended.is_none(), "the job ended before {tests} tests were finished; {}", self.output());
            sleep(POLL);
        }
    }

    /// Waits for the end, at most until the limit.
    ///
    /// # Panics
    /// If the job runs past its limit, or if a process or a shared-memory segment of it stays.
    pub fn wait(mut self) -> Finished {
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("the job can be waited for") {
                break status;
            }
            assert!(self.started.elapsed() < LIMIT, "still running at the limit; {}", self.output());
            sleep(POLL);
        };
        let took = self.started.elapsed();
        self.expect_nothing_left();
        let [stdout, stderr] = ["stdout", "stderr"].map(|name| self.captured(name));
        let json = fs::read_to_string(self.path("r.json")).ok();
        Finished { status, stdout, stderr, took, json }
    }

    fn expect_nothing_left(&self) {
        let ended = Instant::now();
        loop {
            let processes = self.processes();
            let segments: Vec<String> = segments().difference(&self.segments).cloned().collect();
            if processes.is_empty() && segments.is_empty() {
                return;
            }
            let pids: Vec<Pid> = processes.into_iter().map(|(pid, _)| pid).collect();
            assert!(
                ended.elapsed() < VANISH,
                "left behind: processes {pids:?}, segments {segments:?}; {}",
                self.output()
            );
            sleep(POLL);
        }
    }

    /// The tb-mpi processes of this job, with their environment.
    fn processes(&self) -> Vec<(Pid, Vec<(String, String)>)> {
        let entries = fs::read_dir("/proc").expect("/proc is there");
        let mut found = Vec::new();
        for entry in entries.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw)
            else {
                continue;
            };
            // A process may end at any moment: what cannot be read is gone.
            let Ok(program) = fs::read_link(entry.path().join("exe")) else { continue };
            if !program.file_name().is_some_and(|name| name.as_bytes().starts_with(b"tb-mpi")) {
                continue;
            }
            let environ = fs::read(entry.path().join("environ")).unwrap_or_default();
            let env: Vec<(String, String)> = String::from_utf8_lossy(&environ)
                .split('\0')
                .filter_map(|pair| pair.split_once('='))
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect();
            if env.iter().any(|(name, value)| name == JOB && *value == self.mark) {
                found.push((pid, env));
            }
        }
        found
    }

    fn captured(&self, name: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.path(name)).unwrap_or_default()).into_owned()
    }

    fn output(&self) -> String {
        format!(
            "after {:?}, stdout:\n{}\nstderr:\n{}",
            self.started.elapsed(),
            self.captured("stdout"),
            self.captured("stderr")
        )
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for (pid, _) in self.processes() {
            let _ = kill_process(pid, Signal::KILL);
        }
        if let Ok(None) = self.child.try_wait() {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

fn segments() -> BTreeSet<String> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| name.starts_with("tb-mpi")).collect()
}

/// A job that has ended and left nothing behind.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    pub took: Duration,
    json: Option<String>,
}

impl Finished {
    #[track_caller]
    pub fn expect_code(self, code: i32) -> Finished {
        assert_eq!(self.status.code(), Some(code), "{self}");
        self
    }

    /// Ended by a code that is not 0, or by a signal.
    #[track_caller]
    pub fn expect_bad_end(self) -> Finished {
        assert!(!self.status.success(), "{self}");
        self
    }

    /// What the program said to people names every one of `words`.
    #[track_caller]
    pub fn expect_said(self, words: &[&str]) -> Finished {
        for word in words {
            assert!(self.stderr.contains(word), "\"{word}\" was not said; {self}");
        }
        self
    }

    #[track_caller]
    pub fn expect_no_panic(self) -> Finished {
        assert!(!self.stderr.contains("panicked"), "{self}");
        self
    }

    /// The results file.
    #[track_caller]
    pub fn results(&self) -> Value {
        let text = self.json.as_ref().unwrap_or_else(|| panic!("no results file; {self}"));
        serde_json::from_str(text).unwrap_or_else(|err| panic!("the results file is not JSON: {err}\n{text}"))
    }
}

impl std::fmt::Display for Finished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (code, signal) = (self.status.code(), self.status.signal());
        writeln!(f, "code {code:?}, signal {signal:?}, after {:?}", self.took)?;
        write!(f, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr)
    }
}

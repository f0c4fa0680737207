//! The edge of the process: arguments, signals and panics, the ranks' communicator, the exit code.

use std::io::IsTerminal as _;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tb_mpi::cli::{self, Request};
use tb_mpi::comm::mpi::{MpiComm, abort};
use tb_mpi::comm::watch::Watch;
use tb_mpi::comm::{Communicator, launcher, threads};
use tb_mpi::error::ExitCode;
use tb_mpi::fault::Faults;
use tb_mpi::session::{self, Job};
use tb_mpi::{memory, report};

/// In force until the settings are agreed on (`run.deadline_seconds`).
const FIRST_DEADLINE: Duration = Duration::from_secs(60);

fn main() -> std::process::ExitCode {
    let rank = rank_by_environment();
    let request = match cli::parse(std::env::args_os()) {
        Ok(request) => request,
        Err(refusal) => {
            return refuse(&refusal, rank);
        }
    };
    std::panic::set_hook(Box::new(|panic| {
        report::write::complain(&format!("tb-mpi: {}: {panic}", who_panics()));
        abort(ExitCode::Panic);
    }));
    start_logging();
    clean_up_on_signals();
    raise_descriptor_limit();
    let code = match request.ranks {
        Some(ranks) => run_threads(request, ranks),
        None => run_mpi(request),
    };
    (code as u8).into()
}

/// Says what is wrong with the command line. Help and version touch no MPI; a refusal under a
/// launcher does, since the other ranks may have been started with another line and would wait.
fn refuse(refusal: &clap::Error, rank: Option<u32>) -> std::process::ExitCode {
    let code = refusal.exit_code() as u8;
    match rank {
        None | Some(0) => {
            // A stdout that is gone cannot be told anything.
            let _ = refusal.print();
        }
        Some(rank) if code != 0 => {
            let text = refusal.to_string();
            report::write::complain(&format!("rank {rank}: {}", text.lines().next().unwrap_or_default()));
        }
        Some(_) => {}
    }
    if rank.is_some() && code != 0 {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let _job = MpiComm::start(host, first_deadline());
        abort(ExitCode::Usage);
    }
    code.into()
}

/// This process's rank as soon as it is known, for the panic hook.
static JOB: OnceLock<Arc<Watch>> = OnceLock::new();

/// "rank 1 (n7) in run"; where ranks are threads, the thread's name.
fn who_panics() -> String {
    match JOB.get() {
        Some(watch) => format!("rank {} ({}) in {}", watch.rank(), watch.host(), watch.phase()),
        None => std::thread::current().name().unwrap_or("a thread").to_owned(),
    }
}

fn run_threads(request: Request, ranks: u32) -> ExitCode {
    let job = job(request, "threads of one process".to_owned(), 1);
    let codes = threads::run(ranks, first_deadline(), |comm| run_rank(comm, &job));
    codes[0]
}

fn run_mpi(request: Request) -> ExitCode {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let Some(comm) = MpiComm::start(host, first_deadline()) else {
        report::write::complain("error: MPI was already started in this process");
        return ExitCode::Other;
    };
    JOB.get_or_init(|| comm.shared_watch());
    let job = job(request, MpiComm::library(), comm.size());
    run_rank(&comm, &job)
    // Dropping the communicator finalises MPI: all ranks leave together, with the same code.
}

fn run_rank(comm: &dyn Communicator, job: &Job) -> ExitCode {
    let _span = tracing::error_span!("rank", n = comm.rank().0).entered();
    let faults = match std::env::var("TB_FAULT") {
        Ok(spec) => Faults::parse(&spec, comm.rank()),
        Err(_) => Ok(Faults::default()),
    };
    match faults {
        Ok(faults) => session::run(comm, job, &faults),
        Err(error) => {
            // The variable may be set on one rank alone, so this cannot be agreed on.
            report::write::complain(&format!("error: rank {}: {error}", comm.rank()));
            comm.abort(ExitCode::Usage)
        }
    }
}

fn job(request: Request, transport: String, processes: u32) -> Job<'static> {
    fn env(name: &str) -> Option<String> {
        std::env::var(name).ok()
    }
    Job {
        request,
        launcher: launcher::seen(&env),
        env: &env,
        env_names: std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect(),
        transport,
        processes,
        read_file: &|path| std::fs::read(path),
        command: std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect(),
        started: humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string(),
    }
}

/// Before anything is known of the config; `TB_DEADLINE_SECONDS` shortens it too.
fn first_deadline() -> Duration {
    let seconds = std::env::var("TB_DEADLINE_SECONDS").ok().and_then(|text| text.parse::<f64>().ok());
    seconds.and_then(|s| Duration::try_from_secs_f64(s).ok()).filter(|d| !d.is_zero()).unwrap_or(FIRST_DEADLINE)
}

/// This process's rank as its launcher tells it, before MPI is started.
fn rank_by_environment() -> Option<u32> {
    ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"]
        .iter()
        .find_map(|name| std::env::var(name).ok()?.parse().ok())
}

fn start_logging() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("TB_LOG").unwrap_or_else(|_| "warn".into());
    let colour = std::io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(colour)
        .with_target(false)
        .init();
}

/// SIGINT and SIGTERM leave no segment and no half-written file, then end the process as usual.
fn clean_up_on_signals() {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let Ok(mut signals) = signal_hook::iterator::Signals::new([SIGINT, SIGTERM]) else {
        tracing::warn!("signals cannot be handled: an interrupted run may leave a temporary file");
        return;
    };
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            report::write::remove_unfinished();
            memory::map::unlink_all();
            // The launcher sees a rank that a signal ended, and ends the others.
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(wait).expect("a thread can be started");
}

/// Every buffer that another rank opens holds a descriptor until it is open there.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(err) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!("the limit of open files stays at {:?}: {err}", limit.current);
    }
}

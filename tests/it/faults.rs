//! Fails every fallible call of every rank in turn, in ranks that are threads of this process.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use tb_mpi::cli;
use tb_mpi::comm::{Communicator, threads};
use tb_mpi::error::ExitCode;
use tb_mpi::fault::{Action, Faults};
use tb_mpi::session::{self, Job};

/// Every kind of memory and executor that runs here, between two ranks and within one, with all
/// that can be asked of the data.
const CONFIG: &str = r#"
backend = "host"
[run]
iterations = 2
warmups = 1
sub_iterations = 3
[data]
bytes = "4K"
src_rotate_bytes = "20K"
src_rotate_scope = "all"
src_rotate_distinct = true
[validate]
validate_source = true
[host]
devices = 1
memory = "1M"
[[test]]
name = "cpu"
sub_executors = 2
transfers = ["R0C0 -> R1C0 -> R1H0", "R1C0R0H0 -> R0C0 -> R0C0R1C0"]
[[test]]
name = "device"
sub_executors = 2
transfers = ["R0G0 -> R1G0 -> R1G0", "R1G0 -> R1D0 -> R0G0", "R0C0 -> R0G0 -> R0G0", "R0G0 -> R0C0 -> R0C0"]
"#;

/// Ends the test process, by the deadline's exit code, if a run hangs.
const DEADLINE: Duration = Duration::from_secs(20);

/// Runs the config with the given fault on each rank, and returns each rank's exit code.
fn run(ranks: u32, config: &str, folder: &Path, faults: &[Faults]) -> Vec<ExitCode> {
    let json = folder.join("r.json");
    let args = ["tb-mpi", "cfg.toml", "--quiet", "--json", json.to_str().unwrap(), "--csv"];
    let csv = folder.join("r.csv");
    let job = Job {
        request: cli::parse(args.into_iter().chain([csv.to_str().unwrap()])).unwrap(),
        launcher: None,
        env: &|_| None,
        env_names: Vec::new(),
        transport: "threads of one process".to_owned(),
        processes: 1,
        read_file: &|_| Ok(config.as_bytes().to_vec()),
        command: vec!["tb-mpi".to_owned()],
        started: "2026-01-01T00:00:00Z".to_owned(),
    };
    threads::run(ranks, DEADLINE, |comm| session::run(comm, &job, &faults[comm.rank().0 as usize]))
}

/// What a run must give back: descriptors, and mappings of shared memory.
fn held() -> (BTreeSet<String>, usize) {
    let of_jobs = |path: String| path.contains("memfd") || path.contains("/dev/shm");
    let open = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    let open = open.map(|path| path.display().to_string()).filter(|path| of_jobs(path.clone())).collect();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (open, maps.lines().filter(|line| of_jobs((*line).to_owned())).count())
}

fn sweep(ranks: u32, config: &str) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let counting: Vec<Faults> = (0..ranks).map(|_| Faults::counting()).collect();
    assert!(run(ranks, config, folder.path(), &counting).iter().all(|code| *code == ExitCode::Fine));
    let before = held();
    let mut swept = 0;
    for (rank, counted) in counting.iter().enumerate() {
        for nth in 0..counted.calls() {
            let mut faults = vec![Faults::default(); ranks as usize];
            faults[rank] = Faults::nth(nth, Action::Fail);
            let codes = run(ranks, config, folder.path(), &faults);
            let Some(call) = faults[rank].struck() else { panic!("call {nth} of rank {rank} was not reached") };
            let what = format!("{call} (call {nth}) of rank {rank}: {codes:?}");
            assert!(codes.iter().all(|code| *code == codes[0]), "{what}: one code on every rank");
            assert_eq!(held(), before, "{what}: nothing is left");
            match codes[0] {
                ExitCode::PhaseFailed => {}
                ExitCode::Fine => assert!(TOLERATED.contains(&call), "{what}: a failed phase"),
                ExitCode::Rejected => assert!(PROBES.contains(&call), "{what}: a failed phase"),
                _ => panic!("{what}"),
            }
            swept += 1;
        }
    }
    swept
}

/// They find out how ranks share memory: a failed one costs a way of sharing, and ranks that share
/// nothing cannot run this plan.
const PROBES: &[&str] = &["probe", "open_probe"];

/// A failure of these is no failure of the run: another way of sharing is left, or the driver could
/// not give back what it is asked to forget, or not tell what is free, which is logged.
const TOLERATED: &[&str] = &[
    "probe",
    "open_probe",
    "memory_free",
    "free",
    "close_import",
    "unregister_host",
    "stream_destroy",
    "event_destroy",
];

/// The verified sample is the fourth: its executions are 9, 10 and 11, and slice 11 mod 5 = 1 is read
/// last. An executor that did not advance from sample to sample would end on slice 2, one that did
/// not advance inside a sample on slice 4; each holds other data.
#[test]
fn distinct_slices_prove_that_every_executor_rotates() {
    let folder = tempfile::tempdir().unwrap();
    let codes = run(2, CONFIG, folder.path(), &[Faults::default(), Faults::default()]);
    assert_eq!(codes, [ExitCode::Fine; 2]);
    let results: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(folder.path().join("r.json")).unwrap()).unwrap();
    let transfers: Vec<_> =
        results["tests"].as_array().unwrap().iter().flat_map(|test| test["transfers"].as_array().unwrap()).collect();
    assert_eq!(transfers.len(), 6);
    for transfer in transfers {
        assert_eq!((&transfer["slices"], &transfer["verified"]), (&5.into(), &"passed".into()), "{transfer}");
    }
}

#[test]
fn every_failed_call_ends_every_rank_with_the_same_failure_and_leaves_nothing() {
    let swept = sweep(2, CONFIG);
    assert!(swept > 100, "{swept} calls were failed");
}

#[test]
fn a_third_rank_that_only_waits_gets_the_failure_too() {
    let cpu_only = CONFIG.split("[[test]]\nname = \"device\"").next().unwrap().replace("\"host\"", "\"auto\"");
    let swept = sweep(3, &cpu_only);
    assert!(swept > 30, "{swept} calls were failed");
}

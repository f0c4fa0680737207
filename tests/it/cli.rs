//! One process, no launcher: arguments, refusals, and what goes to which stream.

use std::fs::{self, File};
use std::path::Path;

use crate::launch::{Finished, Job, LONG, PULL};
use rustix::process::Signal;

fn run(args: &[&str]) -> Finished {
    Job::alone().args(args).run()
}

/// Two ranks as threads run `text`.
fn threads(text: &str) -> Job {
    Job::alone().args(&["--ranks", "2"]).config(text)
}

/// Refused with exit code 3: said once, on stderr, in words that name the cause.
fn check_refused(job: Job, words: &[&str]) {
    let finished = job.run().expect_code(3).expect_said(words).expect_no_panic();
    assert_eq!(finished.stdout, "", "{finished}");
    assert_eq!(finished.stderr.matches(words[0]).count(), 1, "{finished}");
}

#[test]
fn help_and_version_go_to_stdout() {
    let help = run(&["--help"]).expect_code(0);
    for word in ["--ranks", "--set", "--json", "plan", "devices"] {
        assert!(help.stdout.contains(word), "{word}; {help}");
    }
    let version = run(&["--version"]).expect_code(0);
    assert!(version.stdout.contains(env!("CARGO_PKG_VERSION")), "{version}");
}

#[test]
fn a_usage_error_ends_with_2() {
    let finished = run(&["--no-such-option"]).expect_code(2).expect_said(&["--no-such-option"]);
    assert_eq!(finished.stdout, "", "{finished}");
}

#[test]
fn two_ranks_as_threads_verify_what_they_moved() {
    let results = threads(PULL).run().expect_code(0).results();
    assert_eq!(results["exit_code"], 0);
    assert_eq!(results["complete"], true);
    assert_eq!(results["tests"][0]["transfers"][0]["verified"], "passed");
}

#[test]
fn a_missing_file_is_named() {
    check_refused(Job::alone().args(&["--ranks", "2", "/no/such/cfg.toml"]), &["/no/such/cfg.toml"]);
}

#[test]
fn an_unknown_key_names_the_nearest_known_one() {
    check_refused(threads("[run]\niteratons = 3\n"), &["unknown key", "iteratons", "iterations", "cfg.toml:2"]);
}

#[test]
fn all_problems_of_a_file_are_reported_at_once() {
    let text = r#"
[data]
bytes = "64Q"
[[test]]
name = "pull"
transfers = ["R0X0 -> R1C0 -> R1C0", "R0C0 -> R9C0 -> R1C0"]
"#;
    threads(text).run().expect_code(3).expect_said(&["64Q", "R0X0"]);
}

#[test]
fn a_rank_that_the_job_does_not_have_is_refused() {
    let text = "[[test]]\ntransfers = [\"R0C0 -> R2C0 -> R0C0\"]\n";
    threads(text).run().expect_code(3).expect_said(&["rank 2", "2 ranks"]);
}

#[test]
fn an_overriding_setting_that_does_not_parse_is_refused() {
    threads(PULL).args(&["--set", "data.bytes=64Q"]).run().expect_bad_end().expect_said(&["64Q"]);
}

#[test]
fn every_shipped_config_can_be_planned() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    let mut planned = 0;
    for entry in fs::read_dir(folder).expect("configs/ is there") {
        let path = entry.expect("configs/ can be read").path();
        run(&["plan", "--ranks", "2", path.to_str().expect("the names are UTF-8")]).expect_code(0);
        planned += 1;
    }
    assert!(planned > 0);
}

#[test]
fn planning_allocates_nothing() {
    let job = Job::alone().args(&["plan", "--ranks", "2"]).config(PULL);
    job.env("TB_FAULT", "call=allocate do=panic").run().expect_code(0);
}

#[test]
fn results_reach_the_file_when_stdout_is_closed() {
    let (reader, writer) = std::io::pipe().expect("a pipe can be made");
    drop(reader);
    let finished = threads(PULL).stdout(writer).run().expect_no_panic();
    assert_eq!(finished.results()["complete"], true, "{finished}");
}

#[test]
fn results_reach_the_file_when_stdout_is_full() {
    let full = File::options().write(true).open("/dev/full").expect("/dev/full is there");
    let finished = threads(PULL).stdout(full).run().expect_no_panic();
    assert_eq!(finished.results()["complete"], true, "{finished}");
}

#[test]
fn a_rank_that_its_launcher_started_as_one_of_four_does_not_run_alone() {
    let job = Job::alone().config(&PULL.replace("R1", "R0"));
    let job = job.env("SLURM_JOB_ID", "1").env("SLURM_STEP_ID", "0").env("SLURM_NTASKS", "4").env("SLURM_PROCID", "2");
    job.run().expect_bad_end().expect_said(&["SLURM"]);
}

#[test]
fn fewer_ranks_than_expected_are_refused() {
    let job = Job::alone().args(&["--expect-ranks", "2"]).config(&PULL.replace("R1", "R0"));
    job.run().expect_code(3).expect_said(&["1 rank", "2"]);
}

/// Ctrl-C or a batch system's end of time: what was finished is on disk, and nothing else stays.
fn check_interrupted(signal: Signal) {
    let mut running = threads(LONG).start();
    running.wait_for_tests(1);
    running.signal(signal);
    let finished = running.wait().expect_bad_end().expect_no_panic();
    assert_eq!(finished.results()["tests"][0]["name"], "first", "{finished}");
}

#[test]
fn an_interrupt_leaves_whole_results_and_nothing_else() {
    check_interrupted(Signal::INT);
}

#[test]
fn a_termination_leaves_whole_results_and_nothing_else() {
    check_interrupted(Signal::TERM);
}

//! Several ranks under mpirun: the same results, refusals before anything is allocated, and every way
//! for one rank to go wrong.

use std::path::Path;
use std::time::Duration;

use crate::launch::{Finished, Job, LONG, PULL};
use rustix::process::Signal;
use serde_json::{Map, Value};

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").expect("the host has a name").trim().to_owned()
}

/// Two ranks run the pull with `fault` injected.
fn with_fault(fault: &str) -> Finished {
    Job::mpirun(2).env("TB_FAULT", fault).config(PULL).run()
}

/// Two ranks in the timed loop.
fn in_the_loop(args: &[&str]) -> crate::launch::Running {
    let mut running = Job::mpirun(2).config(LONG).args(args).start();
    running.wait_for_tests(1);
    running
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

/// Every value by its kind only; numbers and their absence are the same.
fn shape(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            Value::Object(map.iter().map(|(key, part)| (key.clone(), shape(part))).collect::<Map<_, _>>())
        }
        Value::Array(parts) if parts.iter().any(Value::is_object) => parts.iter().map(shape).collect(),
        Value::Array(_) => "list".into(),
        _ => "value".into(),
    }
}

#[test]
fn the_quick_start_is_verified_throughout() {
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/quickstart.toml");
    let job = Job::mpirun(2);
    let (config, json) = (config.display().to_string(), job.path("r.json").display().to_string());
    let smaller = ["--set", "data.bytes=256K,1M", "--set", "run.iterations=6"];
    let finished = job.args(&[&config, "--json", &json]).args(&smaller).run().expect_code(0);
    let results = finished.results();
    let tests = list(&results, "tests");
    // Pull and push, two sizes, rotated and not.
    assert_eq!(tests.len(), 8, "{finished}");
    for test in tests {
        assert_eq!(test["outcome"], "passed", "{test}");
        let circumstances = list(test, "circumstances");
        assert_eq!(circumstances.iter().map(|one| &one["rank"]).collect::<Vec<_>>(), [0, 1], "{test}");
        for one in circumstances {
            let told =
                ["seconds", "load", "involuntary_switches", "executor_switches"].iter().all(|key| one[key].is_number());
            assert!(told && one["devices"] == serde_json::json!([]), "{one}");
        }
        for transfer in list(test, "transfers") {
            assert!(transfer["limit_gbps"].is_null(), "nothing is known of host memory: {transfer}");
            assert_eq!(transfer["verified"], "passed", "{transfer}");
            let rotate = test["src_rotate_bytes"].as_u64().expect("a size");
            let bytes = test["bytes"].as_u64().expect("a size");
            assert_eq!(transfer["slices"], (rotate / bytes).max(1), "{transfer}");
            assert_eq!(list(transfer, "samples_us").len(), 6, "{transfer}");
        }
    }
    assert!(finished.stdout.contains("pull") && finished.stdout.contains("push"), "{finished}");
}

#[test]
fn threads_and_processes_give_the_same_structure() {
    let config = r#"
[run]
iterations = 2
warmups = 1
[data]
bytes = ["4K", "8K"]
[[test]]
name = "ring"
sub_executors = 1
transfers = ["R0C0 -> R1C0 -> R1C0", "R1C0 -> R2C0 -> R2C0", "R2C0 -> R0C0 -> R0C0"]
"#;
    let processes = Job::mpirun(3).config(config).run().expect_code(0).results();
    let threads = Job::alone().args(&["--ranks", "3"]).config(config).run().expect_code(0).results();
    assert_eq!(shape(&processes), shape(&threads));
    assert_eq!(list(&processes, "tests").len(), 2);
}

#[test]
fn ranks_that_disagree_are_named_before_anything_is_allocated() {
    let trap = ("TB_FAULT", "call=allocate do=panic");
    let job = Job::mpirun(1).env("SRC_ROTATE_BYTES", "64M").env(trap.0, trap.1);
    let job = job.and(1).env("SRC_ROTATE_BYTES", "128M").env(trap.0, trap.1);
    let finished = job.config(PULL).run().expect_code(3);
    let finished = finished.expect_said(&["src_rotate_bytes", "64 MiB", "128 MiB", "rank 0", "rank 1", &host()]);
    assert!(finished.took < Duration::from_secs(5), "{finished}");
}

#[test]
fn the_same_environment_on_every_rank_is_obeyed() {
    let job = Job::mpirun(1).env("SRC_ROTATE_BYTES", "128K").and(1).env("SRC_ROTATE_BYTES", "128K");
    let results = job.config(PULL).run().expect_code(0).results();
    assert_eq!(results["tests"][0]["src_rotate_bytes"], 128 << 10);
    assert_eq!(results["tests"][0]["transfers"][0]["slices"], 2);
}

#[test]
fn a_bad_file_is_reported_once() {
    let finished = Job::mpirun(2).config("[run]\nno_such_key = 1\n").run().expect_code(3);
    assert_eq!(finished.stderr.matches("unknown").count(), 1, "{finished}");
    let finished = Job::mpirun(2).args(&["/no/such/cfg.toml"]).run().expect_code(3);
    assert_eq!(finished.stderr.matches("/no/such/cfg.toml").count(), 1, "{finished}");
}

#[test]
fn a_failed_allocation_names_rank_and_host() {
    with_fault("rank=1 call=allocate do=fail").expect_code(4).expect_said(&["rank 1", &host(), "allocate"]);
}

#[test]
fn after_a_failed_test_the_next_one_runs() {
    let second = "[[test]]\nname = \"second\"\nsub_executors = 1\ntransfers = [\"R1C0 -> R0C0 -> R0C0\"]\n";
    let job = Job::mpirun(2).env("TB_FAULT", "rank=1 call=allocate do=fail").config(&format!("{PULL}{second}"));
    let results = job.run().expect_code(4).results();
    assert_eq!(results["tests"][0]["outcome"], "failed");
    assert_eq!(results["tests"][1]["outcome"], "passed");
    assert_eq!(results["exit_code"], 4);
}

#[test]
fn wrong_data_ends_with_5_and_says_where() {
    // Executions 0 to 2 are timed; number 3 is the one that is verified.
    let finished = with_fault("rank=1 call=execute nth=4 do=corrupt").expect_code(5);
    let results = finished.results();
    let transfer = &results["tests"][0]["transfers"][0];
    assert_eq!(transfer["verified"], "failed", "{transfer}");
    assert_eq!(transfer["mismatch"]["rank"], 1, "{transfer}");
    assert_eq!(transfer["mismatch"]["wrong_bytes"], 1, "{transfer}");
    assert_eq!(results["exit_code"], 5);
}

#[test]
fn a_transfer_that_wrote_nothing_is_found() {
    with_fault("rank=1 call=execute nth=4 do=drop").expect_code(5);
}

#[test]
fn a_panic_on_one_rank_ends_all_with_101() {
    with_fault("rank=1 call=allocate do=panic").expect_code(101).expect_said(&["injected panic"]);
}

#[test]
fn a_panic_in_the_timed_loop_ends_all_with_101() {
    with_fault("rank=1 call=execute nth=1 do=panic").expect_code(101).expect_said(&["injected panic"]);
}

#[test]
fn a_killed_rank_takes_the_job_with_it() {
    let running = in_the_loop(&[]);
    running.signal_rank(1, Signal::KILL);
    running.wait().expect_bad_end();
}

#[test]
fn a_stopped_rank_is_named_when_the_deadline_passes() {
    let running = in_the_loop(&["--set", "run.deadline_seconds=5"]);
    running.signal_rank(1, Signal::STOP);
    let finished = running.wait().expect_code(102).expect_said(&["rank 1", &host()]);
    assert!(finished.took < Duration::from_secs(30), "{finished}");
}

#[test]
fn a_terminated_launcher_leaves_whole_results_and_nothing_else() {
    let running = in_the_loop(&[]);
    running.signal(Signal::TERM);
    // Its own exit code says nothing: terminated in the first tenths of a second, MPICH's ends with
    // 0 now and then, whatever it runs (`mpirun.mpich -np 2 sleep 10` too). The file tells.
    let finished = running.wait();
    let results = finished.results();
    assert_eq!(results["complete"], false, "{finished}");
    assert_eq!(results["tests"][0]["outcome"], "passed", "{finished}");
    assert_eq!(list(&results, "tests").len(), 1, "{finished}");
}

//! Cold samples, marks and the pattern `rotation`, in jobs of two ranks.

use crate::launch::{Finished, Job};
use serde_json::Value;

fn two_ranks(config: &str) -> Finished {
    Job::mpirun(2).config(config).run()
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

const COLD: &str = r#"
[run]
iterations = 2
warmups = 1
cold_iterations = 3
sub_iterations = 2
[data]
bytes = "64K"
src_rotate_bytes = ["0", "256K"]
src_rotate_scope = "all"
"#;

fn check_cold(config: &str, transfers: usize) {
    let finished = two_ranks(config).expect_code(0);
    let results = finished.results();
    let tests = list(&results, "tests");
    assert_eq!(tests.len(), 2, "{finished}");
    for transfer in tests.iter().flat_map(|test| list(test, "transfers")) {
        let samples = |key| list(transfer, key).len();
        assert_eq!((samples("cold_samples_us"), samples("warm_samples_us"), samples("samples_us")), (3, 3, 2));
        let rate = |key: &str| transfer[key].as_f64().unwrap_or_else(|| panic!("{key} of {transfer}"));
        let ratio = rate("warm_gbps") / rate("cold_gbps");
        assert!((ratio / rate("warm_over_cold") - 1.0).abs() < 1e-9, "{transfer}");
        assert_eq!(transfer["verified"], "passed", "{transfer}");
    }
    assert_eq!(list(&tests[0], "transfers").len(), transfers);
    assert!(finished.stdout.contains("warm / cold"), "{finished}");
}

#[test]
fn cold_samples_stand_beside_warm_ones() {
    let one = "[[test]]\nsub_executors = 1\ntransfers = [\"R0C0 -> R1C0 -> R1C0\"]\n";
    check_cold(&format!("{COLD}{one}"), 1);
    let pair = "[[test]]\nsub_executors = 1\ntransfers = [\"R0C0 -> R1C0 -> R1C0\", \"R1C0 -> R0C0 -> R0H0\"]\n";
    check_cold(&format!("{COLD}[validate]\nalways_validate = 1\n{pair}"), 2);
}

#[test]
fn devices_are_flushed_too() {
    let device = "[[test]]\nsub_executors = 2\ntransfers = [\"R0G0 -> R1G0 -> R1G0\", \"R0G1 -> R0D1 -> R0C0\"]\n";
    check_cold(&format!("backend = \"host\"\n{COLD}{device}"), 2);
}

#[test]
fn a_flush_that_fails_is_the_tests_failure() {
    let test = "[[test]]\nname = \"pull\"\nsub_executors = 1\ntransfers = [\"R0G0 -> R1G0 -> R1G0\"]\n";
    let config = format!("backend = \"host\"\n{COLD}{test}");
    // The 3rd allocation of rank 1: after its destination and the records of its kernel.
    let job = Job::mpirun(2).env("TB_FAULT", "rank=1 call=allocate nth=2 do=fail").config(&config);
    job.run().expect_code(4).expect_said(&["rank 1", "prepare", "scratch memory for cold_iterations"]);
    // Kernels copy nothing, so the first copy of the source's owner while it runs is its flush.
    let config = config.replace("[\"0\", \"256K\"]", "\"0\"");
    let job = Job::mpirun(2).env("TB_FAULT", "rank=0 call=copy nth=0 do=fail").config(&config);
    job.run().expect_code(4).expect_said(&["rank 0", "flush the caches"]);
}

#[test]
fn the_pattern_makes_one_table_of_the_whole_experiment() {
    let config = r#"
backend = "host"
[run]
warmups = 0
[data]
bytes = ["4K", "64K"]
[[test]]
pattern = "rotation"
src_rotate_bytes = "128K"
sub_executors = 1
"#;
    let finished = two_ranks(config).expect_code(0);
    let results = finished.results();
    let tests = list(&results, "tests");
    assert_eq!(tests.len(), 2 * 2 * 2, "{finished}");
    for (i, test) in tests.iter().enumerate() {
        let part = if i < 4 { "pull" } else { "push" };
        assert_eq!(test["pattern"]["part"], part, "{test}");
        assert_eq!(test["src_rotate_bytes"], [0, 128 << 10][i % 2], "{test}");
        let transfer = &test["transfers"][0];
        assert_eq!((list(transfer, "samples_us").len(), list(transfer, "cold_samples_us").len()), (3, 3));
        assert_eq!(transfer["exe"], if i < 4 { "R1G0" } else { "R0G0" });
        assert!(transfer["plateau_gbps"].is_f64(), "{transfer}");
    }
    for word in ["off cold", "off warm", "on cold", "on warm", "w/c", "plateau (largest sizes)"] {
        assert_eq!(finished.stdout.matches(word).count(), if word == "w/c" { 2 } else { 1 }, "{word}: {finished}");
    }
}

const CHECKED: &str = r#"
[run]
iterations = 2
warmups = 0
rotation_check = true
[data]
bytes = ["16K", "64K"]
src_rotate_bytes = ["0", "256K"]
src_rotate_scope = "all"
src_rotate_distinct = true
[[test]]
name = "pull"
sub_executors = 1
transfers = ["R0C0 -> R1C0 -> R1C0"]
"#;

#[test]
fn what_rotates_is_measured_with_twice_its_footprint_too() {
    let finished = two_ranks(CHECKED).expect_code(0);
    let results = finished.results();
    let tests = list(&results, "tests");
    assert_eq!(tests.len(), 4, "{finished}");
    for test in tests {
        let transfer = &test["transfers"][0];
        let check = &transfer["rotation_check"];
        if test["src_rotate_bytes"] == 0 {
            assert!(check.is_null(), "{transfer}");
            continue;
        }
        assert_eq!(check["footprint_bytes"], 512 << 10, "{transfer}");
        assert_eq!(check["slices"].as_u64(), transfer["slices"].as_u64().map(|slices| 2 * slices));
        let change = check["rate_gbps"].as_f64().zip(transfer["rate_gbps"].as_f64()).map(|(twice, once)| twice / once);
        assert!((change.expect("both are measured") - 1.0 - check["change"].as_f64().unwrap()).abs() < 1e-9);
    }
    assert!(finished.stdout.contains("twice the footprint: "), "{finished}");
    assert_eq!(finished.stdout.matches("R0C0 -> R1C0 -> R1C0").count(), 1, "one table: {finished}");
}

#[test]
fn a_repetition_that_fails_fails_its_test() {
    // Rank 0 allocates a source for each of the two steps of 16 KiB, then for the repetition.
    let job = Job::mpirun(2).env("TB_FAULT", "rank=0 call=allocate nth=2 do=fail").config(CHECKED);
    let finished = job.run().expect_code(4).expect_said(&["rank 0"]);
    let results = finished.results();
    let outcomes: Vec<&Value> = list(&results, "tests").iter().map(|test| &test["outcome"]).collect();
    assert_eq!(outcomes, ["passed", "failed", "passed", "passed"], "{finished}");
    assert!(results["tests"][1]["failure"].as_str().unwrap().contains("rotation_check"), "{finished}");
    assert!(results["tests"][1]["transfers"][0]["rate_gbps"].is_f64(), "{finished}");
}

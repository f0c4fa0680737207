//! Every kind of memory under every executor that can reach it, pulled and pushed: one config a kind.

use std::fmt::Write;

use crate::launch::{Finished, Job};

const ON_DEVICE: &str = r#"
backend = "host"
[run]
iterations = 2
[data]
bytes = ["252", "65540"]
src_rotate_bytes = "256K"
src_rotate_distinct = true
[dma]
no_cu = true
[gfx]
cu_mask = "0,2-3"
xcc_preference = [0, 1, 1, 0]
[[test]]
transfers = ["R0G[0,1] -> R0G0.1 -> R1G0", "R0G0 -> R0G[0,1] -> R0G1", "R1G0 -> R0G0.* -> R0G1"]
[[test]]
transfers = ["R0G0 -> R0D0 -> R1G0"]
"#;

/// Those that ranks of a host share; the others are of one rank.
const SHARED: &str = "CPHGFU";
const ONE_RANK: &str = "BDKM";

/// Slices differ, so that a wrong one shows; sizes of one element, of less than a block and with a tail.
///
/// `cpu`: the CPU loads and stores device memory.
pub fn config(backend: &str, kind: char, cpu: bool) -> String {
    let mut text = format!(
        "backend = \"{backend}\"\n[run]\niterations = 2\nwarmups = 1\n[data]\nsrc_rotate_scope = \"all\"\n\
         src_rotate_distinct = true\n[validate]\nvalidate_source = true\n"
    );
    let on_host = "CPHBDK".contains(kind);
    for exe in ["C0", "G0", "D0"] {
        let by_cpu = exe == "C0";
        if by_cpu && !on_host && !cpu {
            continue;
        }
        // A CPU executor reaches host memory of every rank, and device memory of its own.
        let (pull, push) = match SHARED.contains(kind) && (on_host || !by_cpu) {
            true => (format!("R0{kind}0 -> R1{exe} -> R1{kind}0"), format!("R0{kind}0 -> R0{exe} -> R1{kind}0")),
            false if by_cpu => (format!("R1C0 -> R0{exe} -> R0{kind}0"), format!("R0{kind}0 -> R0{exe} -> R1C0")),
            false => (format!("R1G0 -> R0{exe} -> R0{kind}0"), format!("R0{kind}0 -> R0{exe} -> R1G0")),
        };
        for (way, transfer) in [("pull", pull), ("push", push)] {
            for (bytes, rotate) in [("[\"4\", \"252\"]", "2K"), ("\"1048580\"", "3M")] {
                write!(
                    text,
                    "[[test]]\nname = \"{way} by {exe}, {rotate}\"\nsub_executors = 2\nbytes = {bytes}\n\
                     src_rotate_bytes = \"{rotate}\"\ntransfers = [\"{transfer}\"]\n"
                )
                .unwrap();
            }
        }
    }
    text
}

fn all() -> impl Iterator<Item = char> {
    SHARED.chars().chain(ONE_RANK.chars())
}

/// Every transfer was verified, over more than one slice.
pub fn expect_verified(finished: &Finished, kind: char, executors: usize) {
    let results = finished.results();
    let tests = results["tests"].as_array().expect("tests are a list");
    assert_eq!(tests.len(), executors * 2 * 3, "kind {kind}: {finished}");
    for transfer in tests.iter().flat_map(|test| test["transfers"].as_array().expect("transfers are a list")) {
        assert_eq!(transfer["verified"], "passed", "kind {kind}: {transfer}");
    }
}

#[test]
fn every_kind_of_memory_moves_under_every_executor() {
    for kind in all() {
        let job = Job::alone().config(&config("host", kind, true)).args(&["--ranks", "2"]);
        expect_verified(&job.run().expect_code(0), kind, 3);
    }
}

#[test]
fn kinds_of_one_rank_are_refused_elsewhere_with_the_reason() {
    for (kind, why) in [
        ('B', "none can share host memory with another process; use C"),
        ('D', "none can share host memory"),
        ('K', "none can share host memory"),
        ('M', "managed memory cannot be shared"),
    ] {
        let config = format!("backend = \"host\"\n[[test]]\ntransfers = [\"R0{kind}0 -> R1G0 -> R1G0\"]\n");
        let finished = Job::alone().config(&config).args(&["--ranks", "2"]).run().expect_code(3);
        finished.expect_said(&[&format!("R1G0 cannot reach R0{kind}0"), why]);
    }
}

#[test]
fn executors_keep_to_compute_units_xccs_and_copy_engines() {
    let finished = Job::alone().config(ON_DEVICE).args(&["--ranks", "2"]).run().expect_code(0);
    let results = finished.results();
    let tests = results["tests"].as_array().expect("tests are a list");
    let count = |test: usize| tests[test]["transfers"].as_array().expect("transfers are a list").len();
    assert_eq!((tests.len(), count(0), count(2)), (4, 6, 1), "{finished}");
    for transfer in tests.iter().flat_map(|test| test["transfers"].as_array().expect("transfers are a list")) {
        assert_eq!(transfer["verified"], "passed", "{transfer}");
    }
}

#[test]
fn places_on_a_device_that_are_not_there_are_refused() {
    for (settings, exe, why) in [
        ("", "G0.2", "R0G0.2: XCC 2 does not exist: emulated device has 2, numbered from 0"),
        ("", "D0.1", "R0D0.1: emulated device has one copy engine: leave out .1"),
        ("[gfx]\ncu_mask = [4]", "G0", "gfx.cu_mask names compute unit 4: emulated device has 4 on each XCC"),
        ("[gfx]\nxcc_preference = [0]", "G0", "gfx.xcc_preference has 1 rows, and rank 0 has 2 devices"),
    ] {
        let config = format!("backend = \"host\"\n{settings}\n[[test]]\ntransfers = [\"R0G0 -> R0{exe} -> R0G1\"]\n");
        Job::alone().config(&config).args(&["--ranks", "1"]).run().expect_code(3).expect_said(&[why]);
    }
}

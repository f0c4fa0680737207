//! What patterns stand for on machines of several shapes, and how they are refused.

use crate::config::settings::effective;
use crate::config::{Source, diagnose, read};
use crate::plan::build::build;
use crate::plan::{Plan, PlannedTest};
use crate::report::fixtures::{device, world};
use crate::units::Bytes;
use crate::world::World;

const ROTATION: &str = "[[test]]\npattern = \"rotation\"\n";

/// Ranks with so many devices each, on the hosts given.
fn with_devices(host_of: &[u32], devices: &[usize]) -> World {
    let mut world = world(host_of);
    for (inventory, count) in world.ranks.iter_mut().zip(devices) {
        inventory.memory_free = Bytes::gib(16);
        let mut info = device();
        (info.kernels_absent, info.memory_total, info.architecture) = (None, Bytes::gib(80), "sm_90".to_owned());
        inventory.devices = vec![info; *count];
    }
    world
}

fn planned(text: &str, world: &World, sets: &[(&str, &str)]) -> Result<Plan, String> {
    let source = Source { name: "cfg.toml".to_owned(), text: text.to_owned() };
    let config = read::parse(&source).map_err(|problems| diagnose::render(&source, &problems))?;
    let sets: Vec<(String, String)> = sets.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
    let settings = effective(&config.file, &|_| None, &sets).unwrap();
    build(&config, &settings, world).map_err(|problems| diagnose::render(&source, &problems))
}

/// Names and transfers of the tests, each once.
fn parts(text: &str, world: &World) -> Vec<String> {
    let plan = planned(text, world, &[]).unwrap_or_else(|text| panic!("{text}"));
    let mut parts: Vec<String> = plan.tests().iter().map(|t| format!("{} {}", t.name, t.transfers[0])).collect();
    parts.dedup();
    parts
}

fn refusal(text: &str, world: &World) -> String {
    planned(text, world, &[]).expect_err("the pattern is refused")
}

#[test]
fn one_line_is_the_whole_experiment() {
    let plan = planned(ROTATION, &with_devices(&[0, 0], &[1, 1]), &[]).unwrap();
    let shown = |test: &PlannedTest| {
        let pattern = test.pattern.clone().unwrap();
        assert_eq!((pattern.name.as_str(), pattern.test.as_str()), ("rotation", "rotation"));
        assert_eq!((test.options.iterations, test.transfers.len()), (3, 1));
        (pattern.part, test.bytes.0 >> 20, test.src_rotate_bytes.0 >> 20, test.transfers[0].src.slices)
    };
    let tests: Vec<_> = plan.tests().iter().map(shown).collect();
    assert_eq!(tests.len(), 2 * 7 * 2);
    assert_eq!(tests[0], ("pull".to_owned(), 8, 0, 1));
    assert_eq!(tests[1], ("pull".to_owned(), 8, 256, 32));
    assert_eq!(tests[13], ("pull".to_owned(), 512, 256, 1));
    assert_eq!(tests[14], ("push".to_owned(), 8, 0, 1));
}

#[test]
fn the_ends_are_the_first_two_devices_that_reach_each_other() {
    let push_and_pull = ["rotation: pull R0G0 -> R1G0 -> R1G0", "rotation: push R0G0 -> R0G0 -> R1G0"];
    assert_eq!(parts(ROTATION, &with_devices(&[0, 0], &[1, 1])), push_and_pull);
    let within_a_rank = ["rotation: pull R0G0 -> R0G1 -> R0G1", "rotation: push R0G0 -> R0G0 -> R0G1"];
    assert_eq!(parts(ROTATION, &with_devices(&[0], &[2])), within_a_rank);
    // The other rank is on another host.
    assert_eq!(parts(ROTATION, &with_devices(&[0, 1], &[2, 2])), within_a_rank);
    let local = ["rotation: local R0G0 -> R0G0 -> R0G0"];
    assert_eq!(parts(ROTATION, &with_devices(&[0], &[1])), local);
    assert_eq!(parts(ROTATION, &with_devices(&[0, 0], &[1, 0])), local);
    let past_the_bare_rank = ["rotation: pull R1G0 -> R2G0 -> R2G0", "rotation: push R1G0 -> R1G0 -> R2G0"];
    assert_eq!(parts(ROTATION, &with_devices(&[0, 0, 0], &[0, 1, 1])), past_the_bare_rank);
}

#[test]
fn a_local_copy_rotates_its_destination_with_its_source() {
    let plan = planned(ROTATION, &with_devices(&[0], &[1]), &[]).unwrap();
    let slices: Vec<(u64, u64)> =
        plan.tests()[..2].iter().map(|test| (test.transfers[0].src.slices, test.transfers[0].dst.slices)).collect();
    assert_eq!(slices, [(1, 1), (32, 32)]);
}

#[test]
fn without_devices_host_memories_are_the_ends() {
    let all = format!("[data]\nsrc_rotate_scope = \"all\"\n{ROTATION}");
    let mut two = with_devices(&[0, 0], &[0, 0]);
    let expected = ["rotation: pull R0C0 -> R1C0 -> R1C0", "rotation: push R0C0 -> R0C0 -> R1C0"];
    assert_eq!(parts(&all, &two), expected);
    assert_eq!(parts(&format!("{all}executor = \"C\"\n"), &with_devices(&[0, 0], &[1, 1])), expected);
    two.ranks.truncate(1);
    two.host_of.truncate(1);
    assert_eq!(parts(&all, &two), ["rotation: local R0C0 -> R0C0 -> R0C0"]);
    let node = two.ranks[0].numa[0].clone();
    two.ranks[0].numa.push(node);
    assert_eq!(parts(&all, &two), ["rotation: pull R0C0 -> R0C1 -> R0C1", "rotation: push R0C0 -> R0C0 -> R0C1"]);
}

#[test]
fn keys_name_the_ends_and_the_executor() {
    let world = with_devices(&[0, 0], &[2, 2]);
    let text = format!("{ROTATION}name = \"link\"\nexecutor = \"D\"\nsrc = \"R1G1\"\ndst = \"R0G1\"\n");
    assert_eq!(parts(&text, &world), ["link: pull R1G1 -> R0D1 -> R0G1", "link: push R1G1 -> R1D1 -> R0G1"]);
    // Each end has an executor of its own kind.
    let text = format!("[data]\nsrc_rotate_scope = \"all\"\n{ROTATION}src = \"R0C0\"\ndst = \"R0G1\"\n");
    assert_eq!(parts(&text, &world), ["rotation: pull R0C0 -> R0G1 -> R0G1", "rotation: push R0C0 -> R0C0 -> R0G1"]);
}

#[test]
fn settings_of_a_pattern_give_way_to_everybody_elses() {
    let world = with_devices(&[0, 0], &[1, 1]);
    let steps = |text: &str, sets: &[(&str, &str)]| {
        let plan = planned(text, &world, sets).unwrap();
        let of = |test: &PlannedTest| (test.bytes.0 >> 20, test.src_rotate_bytes.0 >> 20, test.options.iterations);
        plan.tests().iter().take(3).map(of).collect::<Vec<_>>()
    };
    assert_eq!(steps(ROTATION, &[]), [(8, 0, 3), (8, 256, 3), (16, 0, 3)]);
    let file = format!("[run]\niterations = 7\n[data]\nbytes = [\"1M\", \"2M\"]\n{ROTATION}");
    assert_eq!(steps(&file, &[]), [(1, 0, 7), (1, 256, 7), (2, 0, 7)]);
    let own = format!("{file}bytes = \"4M\"\nsrc_rotate_bytes = [\"32M\", \"64M\"]\n");
    assert_eq!(steps(&own, &[]), [(4, 0, 7), (4, 32, 7), (4, 64, 7)]);
    assert_eq!(steps(&own, &[("data.bytes", "16M"), ("run.iterations", "9")])[0], (16, 0, 9));
    // What it brings along is in the results, as what a test sets for itself.
    let plan = planned(&format!("{ROTATION}warmups = 1\n"), &world, &[]).unwrap();
    let own = &plan.tests()[0].own_settings;
    let has = |key: &str, value: &str| own.iter().any(|(k, v)| (k.as_str(), v.as_str()) == (key, value));
    assert!(has("data.src_rotate_bytes", "0 B, auto") && has("run.iterations", "3") && has("run.warmups", "1"));
}

#[test]
fn what_a_pattern_cannot_be_is_shown_at_its_key() {
    let world = with_devices(&[0, 0], &[1, 1]);
    let text = format!("{ROTATION}src = \"R0G0\"\ndst = \"R0G4\"\n");
    insta::assert_snapshot!(refusal(&text, &world), @r#"
    error: pattern "rotation": device 4 does not exist on rank 0 (it has 1)
     --> cfg.toml:4:7
      |
    4 | dst = "R0G4"
      |       ^^^^^^

    1 problem in cfg.toml
    "#);
    for (keys, expected) in [
        ("src = \"R0G0\"\n", "give dst too, or neither"),
        ("src = \"R7G0\"\ndst = \"R0G0\"\n", "rank 7 does not exist (the job has 2 ranks)"),
        ("executor = \"C\"\n", "R0C0 -> R1C0 -> R1C0 is not rotated with src_rotate_scope = \"gpu\""),
        ("executor = \"D\"\nsrc = \"R0G0\"\ndst = \"R0C0\"\n", "executor D does not sit with R0C0"),
    ] {
        let text = refusal(&format!("{ROTATION}{keys}"), &world);
        assert!(text.contains(expected), "{text}");
    }
    let bare = refusal(&format!("{ROTATION}executor = \"G\"\n"), &with_devices(&[0], &[0]));
    assert!(bare.contains("no rank has a device") && bare.contains("cfg.toml:3:12"), "{bare}");
}

#[test]
fn the_keys_of_a_pattern_are_checked_like_all_others() {
    let text = "[[test]]\npattern = \"rotation\"\nexecutr = \"G\"\nsrc = \"G*\"\ndst = 5\nexecutor = \"X\"\n\
                transfers = [\"G0 -> G0 -> G0\"]\n[[test]]\nexecutor = \"G\"\ntransfers = [\"G0 -> G0 -> G0\"]\n\
                [[test]]\npattern = \"rotatoin\"\n";
    insta::assert_snapshot!(refusal(text, &world(&[0])), @r#"
    error: unknown key "executr" in [[test]]
     --> cfg.toml:3:1
      |
    3 | executr = "G"
      | ^^^^^^^
      |
      = help: did you mean executor?

    error: src: "G*" is not one memory of one rank, such as "R0G0"
     --> cfg.toml:4:7
      |
    4 | src = "G*"
      |       ^^^^

    error: dst: expected a place such as "R0G0", found an integer
     --> cfg.toml:5:7
      |
    5 | dst = 5
      |       ^

    error: executor: "X" is not one of auto, C, G, D, B, T
     --> cfg.toml:6:12
      |
    6 | executor = "X"
      |            ^^^

    error: a pattern makes its own transfers: leave out pattern or transfers
     --> cfg.toml:7:1
      |
    7 | transfers = ["G0 -> G0 -> G0"]
      | ^^^^^^^^^

    error: "executor" is a key of the pattern "rotation"
     --> cfg.toml:9:1
      |
    9 | executor = "G"
      | ^^^^^^^^
      |
      = help: add pattern = "rotation"

    error: unknown pattern "rotatoin"
      --> cfg.toml:12:11
       |
    12 | pattern = "rotatoin"
       |           ^^^^^^^^^^
       |
       = help: did you mean rotation?; or write the transfers as a list: * and ranges stand for many

    7 problems in cfg.toml
    "#);
}

#[test]
fn a_rotation_check_repeats_what_rotates_with_twice_the_footprint() {
    let world = with_devices(&[0, 0], &[1, 1]);
    let shape = |text: &str| -> Vec<(bool, u64, u64)> {
        let plan = planned(text, &world, &[("run.rotation_check", "true")]).unwrap();
        let of = |test: &PlannedTest| (test.repeats, test.transfers[0].src.slices, test.transfers[0].dst.slices);
        plan.tests().iter().map(of).collect()
    };
    let data = "[data]\nbytes = [\"64M\", \"1G\"]\nsrc_rotate_bytes = [\"0\", \"256M\"]\n[[test]]\n";
    // A size beyond the footprint has it twice too: two slices of its own.
    let pull = format!("{data}transfers = [\"R0G0 -> R1G0 -> R1G0\"]\n");
    let steps = [(false, 1, 1), (false, 4, 1), (true, 8, 1), (false, 1, 1), (false, 1, 1), (true, 2, 1)];
    assert_eq!(shape(&pull), steps);
    let local = format!("{data}transfers = [\"R0G0 -> R0G0 -> R0G0\"]\n");
    let steps = [(false, 1, 1), (false, 4, 4), (true, 8, 8), (false, 1, 1), (false, 1, 1), (true, 2, 2)];
    assert_eq!(shape(&local), steps);
    // Out of the scope of rotation there is nothing to repeat.
    let host = format!("{data}transfers = [\"R0C0 -> R1C0 -> R1C0\"]\n");
    assert!(shape(&host).iter().all(|(repeats, ..)| !repeats));
}

//! Builds plans, worlds and results for the tests of this folder.

use super::results::*;
use std::collections::BTreeMap;

use crate::config::options::*;
use crate::exec::Clock;
use crate::gpu::DeviceInfo;
use crate::gpu::peaks::{Pcie, Peaks, PeerLinks};
use crate::measure::circumstances::{Circumstances, DeviceCircumstances};
use crate::place::{ExeKind, Executor, MemKind, Place};
use crate::plan::rotation::{GUARD, Layout};
use crate::plan::{PlannedTest, Transfer};
use crate::stats::summarise;
use crate::units::{Bytes, Rank, rate_gbps};
use crate::world::*;

pub const MIB: u64 = 1 << 20;

pub fn options() -> Options {
    Options {
        backend: Backend::Auto,
        gpus: Gpus::Split,
        iterations: 10,
        seconds: None,
        warmups: 3,
        cold_iterations: 0,
        rotation_check: false,
        sub_iterations: 1,
        start: Start::Barrier,
        strict: false,
        deadline_seconds: 60.0,
        sub_executors: None,
        bytes: vec![Bytes::mib(1)],
        src_rotate_bytes: vec![RotateBytes::Size(Bytes::mib(256))],
        src_rotate_scope: RotateScope::All,
        src_rotate_distinct: false,
        dst_rotate_bytes: RotateBytes::Size(Bytes::ZERO),
        fill_pattern: Vec::new(),
        fill_compress: Vec::new(),
        byte_offset: Bytes::ZERO,
        block_bytes: Bytes(256),
        always_validate: Validate::AtEnd,
        validate_direct: false,
        validate_source: false,
        cpu_streaming: Streaming::Auto,
        gfx: Options::default().gfx,
        tdm: Options::default().tdm,
        dma_no_cu: false,
        host_devices: 0,
        host_memory: Bytes::ZERO,
        output_json: None,
        output_csv: None,
        output_iterations: false,
    }
}

pub fn place(rank: u32) -> Place {
    Place { rank: Rank(rank), kind: MemKind::Pinned, index: 0 }
}

pub fn cpu(rank: u32) -> Executor {
    Executor { rank: Rank(rank), kind: ExeKind::Cpu, index: 0, sub_index: None }
}

pub fn transfer(index: u32, srcs: &[u32], exe: u32, dsts: &[u32]) -> Transfer {
    let (bytes, rotate) = (Bytes::mib(1), Bytes::mib(256));
    Transfer {
        index,
        bytes,
        srcs: srcs.iter().map(|rank| place(*rank)).collect(),
        exe: cpu(exe),
        dsts: dsts.iter().map(|rank| place(*rank)).collect(),
        sub_executors: 1,
        cache: Bytes::mib(32),
        src: Layout::new(bytes, rotate, Bytes::ZERO, Bytes::ZERO).unwrap(),
        dst: Layout::new(bytes, Bytes::ZERO, Bytes::ZERO, GUARD).unwrap(),
    }
}

pub fn planned(transfers: Vec<Transfer>) -> PlannedTest {
    PlannedTest {
        name: "copy".to_owned(),
        pattern: None,
        bytes: Bytes::mib(1),
        src_rotate_bytes: Bytes::mib(256),
        options: options(),
        own_settings: Vec::new(),
        transfers,
        expect: None,
        repeats: false,
        warnings: Vec::new(),
    }
}

/// `host_of[rank]` is the host of each rank.
pub fn world(host_of: &[u32]) -> World {
    let identity = HostIdentity { boot_id: "boot".to_owned(), pid_namespace: 1, shm: (1, 1), user: 0 };
    let inventory = Inventory {
        host_name: "n1".to_owned(),
        identity,
        pid: 1,
        cpu_model: "cpu".to_owned(),
        kernel: "6.1".to_owned(),
        numa: vec![numa_node()],
        caches: Caches::default(),
        memory_free: Bytes::gib(1),
        devices: Vec::new(),
        devices_free: Vec::new(),
        devices_absent: None,
    };
    let group = |host: u32| HostGroup {
        label: format!("n{host}"),
        via: ShareVia::Memfd,
        ranks: (0..host_of.len() as u32).filter(|rank| host_of[*rank as usize] == host).map(Rank).collect(),
    };
    World {
        ranks: host_of.iter().map(|_| inventory.clone()).collect(),
        hosts: (0..=host_of.iter().copied().max().unwrap()).map(group).collect(),
        host_of: host_of.to_vec(),
    }
}

fn numa_node() -> NumaNode {
    NumaNode {
        os_index: 0,
        cpus: vec![0, 1],
        cpus_allowed: vec![0, 1],
        memory_allowed: true,
        memory_total: Bytes::gib(2),
        distances: vec![10],
    }
}

/// A measured transfer: `rate` GB/s with a spread of 1 %, ten samples.
pub fn measured(index: u32, src: &str, exe: &str, dst: &str, bytes: u64, rotate: u64, rate: f64) -> TransferResult {
    let middle = bytes as f64 / rate / 1e3;
    let samples_us: Vec<f64> = (0..10).map(|i| middle * (1.0 + (f64::from(i) - 4.5) * 0.001)).collect();
    let time_us = summarise(&samples_us);
    let slices = rotate.div_ceil(bytes).max(1);
    let side = |place: &str| if place == "N" { Vec::new() } else { vec![place.to_owned()] };
    TransferResult {
        index,
        src: side(src),
        exe: exe.to_owned(),
        dst: side(dst),
        bytes,
        sub_executors: 1,
        slices,
        footprint_bytes: slices * bytes,
        dst_slices: 1,
        cache_bytes: 32 * MIB,
        clock: Some(Clock::Host),
        rate_gbps: rate_gbps(Bytes(bytes), time_us.as_ref().unwrap().median),
        rate_mean_gbps: rate_gbps(Bytes(bytes), time_us.as_ref().unwrap().mean),
        traffic_gbps: None,
        limit_gbps: None,
        limit_by: None,
        of_limit: None,
        samples_us,
        time_us,
        cold_gbps: None,
        warm_gbps: None,
        warm_over_cold: None,
        cold_samples_us: Vec::new(),
        warm_samples_us: Vec::new(),
        rotation_check: None,
        plateau_gbps: None,
        verified: Verified::Passed,
        mismatch: None,
        marks: Vec::new(),
        placement: vec!["thread 0 on CPU 3, node 0".to_owned()],
    }
}

/// Gives a transfer cold and warm samples at these rates.
pub fn contrast(transfer: &mut TransferResult, cold: f64, warm: f64) {
    let samples = |rate: f64| vec![transfer.bytes as f64 / rate / 1e3; 3];
    (transfer.cold_samples_us, transfer.warm_samples_us) = (samples(cold), samples(warm));
    (transfer.cold_gbps, transfer.warm_gbps) = (Some(cold), Some(warm));
    transfer.warm_over_cold = Some(warm / cold);
}

/// A test of measured transfers.
pub fn tested(name: &str, bytes: u64, rotate: u64, transfers: Vec<TransferResult>) -> TestResult {
    let time_us = transfers.first().and_then(|transfer| transfer.time_us.clone());
    let total = Bytes(transfers.iter().map(|transfer| transfer.bytes).sum());
    TestResult {
        name: name.to_owned(),
        pattern: None,
        bytes,
        src_rotate_bytes: rotate,
        settings: BTreeMap::new(),
        outcome: Outcome::Passed,
        failure: None,
        start: "barrier".to_owned(),
        warmups: 3,
        iterations: 10,
        sub_iterations: 1,
        start_spread_us: summarise(&[0.5; 10]),
        rate_gbps: time_us.as_ref().and_then(|time| rate_gbps(total, time.median)),
        overhead_us: Some(0.25),
        executors: transfers.first().map(executor_of).into_iter().collect(),
        time_us,
        transfers,
        warnings: Vec::new(),
        violations: Vec::new(),
        circumstances: vec![Circumstances::default(), circumstances()],
        setup_seconds: 0.5,
        run_seconds: 1.0,
        verify_seconds: 0.25,
    }
}

fn circumstances() -> Circumstances {
    let device = DeviceCircumstances {
        device: 0,
        sm_mhz: [Some(345), Some(1980)],
        memory_mhz: [None, Some(3201)],
        reasons: Some(vec!["idle".to_owned()]),
        throttled: None,
    };
    Circumstances {
        rank: 1,
        seconds: 1.0,
        devices: vec![device],
        steal: Some(0.001),
        load: Some(0.5),
        involuntary_switches: Some(3),
        executor_switches: Some(1),
        executor_wait: Some(0.002),
        contended: None,
    }
}

fn executor_of(transfer: &TransferResult) -> ExecutorResult {
    ExecutorResult {
        rank: 0,
        exe: transfer.exe.clone(),
        bytes: transfer.bytes,
        time_us: transfer.time_us.clone(),
        rate_gbps: transfer.rate_gbps,
        clock: Clock::Host,
    }
}

/// One step of a sweep: the same copy at another size or rotation.
pub fn step(name: &str, bytes: u64, rotate: u64, rate: f64) -> TestResult {
    let transfer = measured(0, "R0C0", "R1C0", "R1C0", bytes, rotate, rate);
    tested(name, bytes, rotate, vec![transfer])
}

/// All pairs of `n` ranks, pushed; `rate(src, dst)` in GB/s.
pub fn all_pairs(n: u32, rate: impl Fn(u32, u32) -> f64) -> TestResult {
    let pairs = (0..n).flat_map(|src| (0..n).map(move |dst| (src, dst)));
    let transfers = pairs.enumerate().map(|(i, (src, dst))| {
        let (s, d) = (format!("R{src}C0"), format!("R{dst}C0"));
        measured(i as u32, &s, &s, &d, MIB, 0, rate(src, dst))
    });
    tested("all pairs", MIB, 0, transfers.collect())
}

pub fn mismatch() -> MismatchEntry {
    MismatchEntry {
        destination: 0,
        place: "R1C0".to_owned(),
        rank: 1,
        host: "n1".to_owned(),
        execution: 13,
        element: Some(17),
        expected: Some("31".to_owned()),
        actual: Some("165".to_owned()),
        wrong_bytes: 4,
        what: "differs from the reference".to_owned(),
    }
}

pub fn setting(key: &str, value: &str, from: &str) -> (String, SettingEntry) {
    (key.to_owned(), SettingEntry { value: value.to_owned(), from: from.to_owned(), is_default: from == "default" })
}

/// Results of two ranks on one host around `tests`.
pub fn results(tests: Vec<TestResult>) -> Results {
    let rank = RankEntry {
        host: "n1".to_owned(),
        host_name: "n1.example".to_owned(),
        cpu_model: "cpu \"x\"".to_owned(),
        kernel: "6.1".to_owned(),
        cpus_allowed: vec![0, 1],
        numa: vec![numa_node()],
        caches: Caches { l1d: Bytes::kib(32), l2: Bytes::mib(1), l3: Bytes::mib(32), l3_total: Bytes::mib(64) },
        memory_free: 1 << 30,
        devices: Vec::new(),
    };
    Results {
        schema: SCHEMA,
        tool: Tool { version: "0.1.0".to_owned(), git: "abc".to_owned(), features: Vec::new() },
        job: Job {
            ranks: 2,
            hosts: vec!["n1".to_owned()],
            mpi: "Open MPI 4.1.4".to_owned(),
            launcher: "mpirun".to_owned(),
            command: vec!["tb-mpi".to_owned(), "cfg.toml".to_owned()],
            started: "2025-01-01T00:00:00Z".to_owned(),
            emulated: false,
            backend: None,
        },
        settings: BTreeMap::from([
            setting("run.start", "barrier", "default"),
            setting("validate.always_validate", "0", "default"),
            setting("data.src_rotate_scope", "all", "cfg.toml:7"),
        ]),
        world: vec![rank.clone(), rank],
        warnings: Vec::new(),
        exit_code: 0,
        complete: true,
        tests,
    }
}

/// A device of the emulated driver.
pub fn device() -> DeviceInfo {
    DeviceInfo {
        name: "emulated".to_owned(),
        runtime: "host (EMULATED)".to_owned(),
        uuid: "EMULATED-0".to_owned(),
        pci: String::new(),
        architecture: "emulated".to_owned(),
        memory_total: Bytes::gib(1),
        cache: Bytes::ZERO,
        compute_units: 4,
        warp_size: 1,
        numa: None,
        memory_kinds: vec![MemKind::Device, MemKind::DeviceFine],
        host_kinds: vec![],
        cpu_access: true,
        exportable: true,
        xccs: 0,
        cu_masks: false,
        no_cu_copies: false,
        kernels_absent: Some("no compiler".to_owned()),
        batch_absent: None,
        bulk_absent: None,
        peaks: Peaks::default(),
    }
}

/// One of everything that results can hold.
pub fn varied() -> Results {
    let mut failed = step("failed", MIB, 0, 1.0);
    failed.outcome = Outcome::Failed;
    failed.failure = Some("error: rank 1 (n1) failed in allocate: out of memory".to_owned());
    for transfer in &mut failed.transfers {
        (transfer.clock, transfer.time_us, transfer.rate_gbps) = (None, None, None);
        (transfer.rate_mean_gbps, transfer.samples_us, transfer.verified) = (None, Vec::new(), Verified::Unverified);
    }
    (failed.time_us, failed.rate_gbps, failed.overhead_us, failed.start_spread_us) = (None, None, None, None);
    failed.executors.clear();

    let mut not_run = tested("not run", MIB, 0, Vec::new());
    not_run.outcome = Outcome::NotRun;

    let mut wrong = step("wrong", MIB, 0, 20.0);
    wrong.outcome = Outcome::Mismatch;
    wrong.transfers[0].verified = Verified::Failed;
    wrong.transfers[0].mismatch = Some(mismatch());

    let mut guard = wrong.clone();
    guard.name = "guard zone".to_owned();
    guard.transfers[0].mismatch =
        Some(MismatchEntry { element: None, expected: None, actual: None, what: "guard".to_owned(), ..mismatch() });

    let mut slow = step("slow", MIB, 0, 20.0);
    slow.outcome = Outcome::OutsideExpectation;
    slow.violations = vec!["transfer 0 (R0C0 -> R1C0 -> R1C0): 20.0 GB/s is below min_gbps = 300".to_owned()];

    let mut fill = tested("fill", MIB, 0, vec![measured(0, "N", "R0C0", "R0C0", MIB, 0, 9.0)]);
    fill.transfers[0].traffic_gbps = Some(9.0);
    fill.transfers[0].marks = vec!["1 outlier".to_owned(), "a; b, \"c\"".to_owned()];

    let mut cold = step("rotation: pull", MIB, 256 * MIB, 18.0);
    cold.pattern = Some(PatternStep { name: "rotation".into(), test: "rotation".into(), part: "pull".into() });
    contrast(&mut cold.transfers[0], 16.0, 18.5);
    cold.transfers[0].plateau_gbps = Some(17.0);
    cold.transfers[0].rotation_check = Some(RotationCheck {
        slices: 512,
        footprint_bytes: 512 * MIB,
        dst_slices: 1,
        rate_gbps: Some(17.5),
        change: Some(17.5 / 18.0 - 1.0),
    });

    let mut tests = vec![failed, not_run, wrong, guard, slow, fill, all_pairs(3, |_, _| 12.0), cold];
    let names =
        ["comma, quote \" and\nnewline", "=1+1", "-1", "@x", "+1", "'quoted", "caf\u{e9} \u{2192} \u{1F680}", ""];
    tests.extend(names.iter().map(|name| step(name, MIB, 256 * MIB, 18.9)));
    let mut results = results(tests);
    results.exit_code = 5;
    results.complete = false;
    results.warnings = vec!["a warning".to_owned()];
    let link =
        |to: Option<&str>, gbps| PeerLinks { to: to.map(str::to_owned), kind: "NVLink 4".to_owned(), count: 18, gbps };
    let peaks = Peaks {
        memory_gbps: Some(4916.7),
        pcie: Some(Pcie { gts: 32.0, lanes: 16, gts_now: Some(2.5), lanes_now: None }),
        links: Some(vec![link(None, Some(450.0)), link(Some("0000:1b:00.0"), None)]),
        absent: Some("it is not there".to_owned()),
    };
    results.world[1].devices = vec![DeviceInfo { peaks, ..device() }];
    results.job.backend = Some("host".to_owned());
    results.job.emulated = true;
    results
}

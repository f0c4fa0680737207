//! The CPU executor on real threads: what it moves, stamps and survives.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::fault::Action;
use crate::memory::map::HostMap;
use crate::place::{ExeKind, Executor};
use crate::plan::rotation::Layout;
use crate::plan::split::shares;
use crate::units::Rank;
use crate::world::host;

fn exe() -> Executor {
    Executor { rank: Rank(0), kind: ExeKind::Cpu, index: 0, sub_index: None }
}

fn cpus() -> Vec<u32> {
    host::inventory().unwrap().cpus_allowed()
}

fn rotating(bytes: u64, rotate: u64) -> Rotating {
    let layout = Layout::new(Bytes(bytes), Bytes(rotate), Bytes::ZERO, Bytes::ZERO).unwrap();
    let map = HostMap::private(layout.total(), None, &Faults::default()).unwrap();
    Rotating::new(Arc::new(map).region(), layout)
}

fn transfer(bytes: u64, sub_executors: u32, srcs: Vec<Rotating>, dsts: Vec<Rotating>) -> BoundTransfer {
    let shares = shares(Bytes(bytes), sub_executors, Bytes(256));
    BoundTransfer { index: 0, bytes: Bytes(bytes), srcs, dsts, shares }
}

/// A copy of 64 KiB by `threads` threads.
fn copy_work(threads: u32) -> (Work, Rotating) {
    let (src, dst) = (rotating(65536, 0), rotating(65536, 0));
    map::fill(&src.slice_region(0), 0, Bytes(65536), 0x5A);
    let transfers = vec![transfer(65536, threads, vec![src], vec![dst.clone()])];
    (Work { exe: exe(), transfers }, dst)
}

fn sample(ready: &mut Ready, first: u64) -> SampleTimes {
    ready.arm(Executions { first, count: 1 }).unwrap();
    ready.go().unwrap();
    ready.wait().unwrap();
    ready.times().unwrap()
}

fn wrong_bytes(dst: &Rotating) -> usize {
    let mut bytes = vec![0; dst.layout().bytes.0 as usize];
    map::read(&dst.slice_region(0), 0, &mut bytes);
    bytes.iter().filter(|byte| **byte != 0x5A).count()
}

#[test]
fn one_thread_and_more_threads_than_cpus_copy_everything_in_every_sample() {
    let cpus = cpus();
    for threads in [1, cpus.len() as u32, 3 * cpus.len() as u32 + 1] {
        let (work, dst) = copy_work(threads);
        let mut ready = Ready::new(work, &cpus, true, &Faults::default()).unwrap();
        for n in 0..3 {
            map::fill(&dst.slice_region(0), 0, Bytes(65536), 0);
            sample(&mut ready, n);
            assert_eq!(wrong_bytes(&dst), 0, "{threads} threads");
        }
    }
}

#[test]
fn times_cover_each_transfer_and_lie_between_go_and_wait() {
    let (src, dst) = (rotating(4096, 0), rotating(4096, 0));
    let small = transfer(4096, 1, vec![src.clone()], vec![dst]);
    let transfers = vec![small, transfer(4096, 2, vec![src], vec![])];
    let work = Work { exe: exe(), transfers };
    let mut ready = Ready::new(work, &cpus(), false, &Faults::default()).unwrap();
    ready.arm(Executions { first: 0, count: 3 }).unwrap();
    let before = crate::clock::now_ns();
    ready.go().unwrap();
    ready.wait().unwrap();
    let after = crate::clock::now_ns();
    let times = ready.times().unwrap();
    assert_eq!(times.transfers.len(), 2);
    for time in &times.transfers {
        assert!(before <= time.window.start_ns && time.window.start_ns < time.window.end_ns);
        assert!(time.window.end_ns <= after);
        assert_eq!(time.duration_ns, time.window.ns());
    }
    assert_eq!(Some(times.executor), Window::around(times.transfers.iter().map(|time| time.window)));
}

#[test]
fn threads_run_where_they_are_pinned() {
    let cpu = *cpus().last().unwrap();
    let mut ready = Ready::new(copy_work(2).0, &[cpu], false, &Faults::default()).unwrap();
    sample(&mut ready, 0);
    assert_eq!(ready.placement(), [[cpu]]);
}

#[test]
fn an_executor_that_cannot_be_placed_is_refused() {
    let error = |cpus: &[u32]| Ready::new(copy_work(1).0, cpus, false, &Faults::default()).err().unwrap().to_string();
    assert_eq!(error(&[]), "R0C0 has no CPU that this rank may run on");
    assert!(error(&[1000]).starts_with("R0C0: pin a thread to CPU 1000: "));
    assert!(error(&[5000]).starts_with("R0C0: cannot pin a thread to CPU 5000: "));
}

#[test]
fn a_sample_may_be_armed_again_and_given_up() {
    let (work, dst) = copy_work(2);
    let mut ready = Ready::new(work, &cpus(), false, &Faults::default()).unwrap();
    ready.arm(Executions { first: 0, count: 1 }).unwrap();
    ready.arm(Executions { first: 1, count: 1 }).unwrap();
    sample(&mut ready, 2);
    assert_eq!(wrong_bytes(&dst), 0);
    ready.arm(Executions { first: 3, count: 1 }).unwrap();
    drop(ready);
}

#[test]
fn injected_faults_fail_drop_or_corrupt_one_sample() {
    let run = |action| {
        let (work, dst) = copy_work(2);
        let mut ready = Ready::new(work, &cpus(), false, &Faults::nth_of("execute", 1, action)).unwrap();
        sample(&mut ready, 0);
        let good = wrong_bytes(&dst);
        map::fill(&dst.slice_region(0), 0, Bytes(65536), 0);
        let armed = ready.arm(Executions { first: 1, count: 1 });
        if armed.is_ok() {
            ready.go().unwrap();
            ready.wait().unwrap();
        }
        (good, armed.is_ok(), wrong_bytes(&dst))
    };
    assert_eq!(run(Action::Fail), (0, false, 65536));
    assert_eq!(run(Action::Drop), (0, true, 65536));
    assert_eq!(run(Action::Corrupt), (0, true, 1));
    assert!(Ready::new(copy_work(1).0, &cpus(), false, &Faults::nth_of("spawn", 0, Action::Fail)).is_err());
}

#[test]
fn a_thread_that_panics_ends_the_wait_with_an_error() {
    let ran = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&ran);
    let good: Task = Box::new(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let bad: Task = Box::new(|sample: Executions| assert_ne!(sample.first, 1, "a panic that belongs to the test"));
    let mut crew = Crew::start(vec![good, bad], &cpus()).unwrap();
    for first in 0..2 {
        crew.arm(Executions { first, count: 1 }, true).unwrap();
        crew.go();
        assert_eq!(crew.wait().is_ok(), first == 0);
    }
    assert!(crew.arm(Executions { first: 2, count: 1 }, true).is_err());
    drop(crew);
    assert_eq!(ran.load(Ordering::Relaxed), 2);
}

#[test]
fn stores_stream_from_the_byte_on_that_outgrows_the_last_cache() {
    let work = |rotate| vec![transfer(4096, 1, vec![rotating(4096, rotate)], vec![rotating(4096, 0)])];
    let caches = |l2, l3| Caches { l1d: Bytes::kib(32), l2: Bytes(l2), l3: Bytes(l3), l3_total: Bytes(l3) };
    assert!(!outgrows_cache(&work(0), &caches(4096, 8192)));
    assert!(outgrows_cache(&work(0), &caches(4096, 8191)));
    assert!(outgrows_cache(&work(8192), &caches(4096, 8192)));
    // The last level that is known, or what is assumed.
    assert!(!outgrows_cache(&work(0), &caches(8192, 0)));
    assert!(outgrows_cache(&work(0), &caches(8191, 0)));
    assert!(!outgrows_cache(&work(CACHE_ASSUMED.0 - 4096), &Caches::default()));
    assert!(outgrows_cache(&work(CACHE_ASSUMED.0), &Caches::default()));
}

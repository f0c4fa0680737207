//! Marks on rates of simulated caches, and at their limits.

use super::*;
use crate::plan::rotation::Layout;
use crate::report::fixtures::*;
use crate::report::results::TestResult;

/// What a simulated memory serves, and what its cache does, in GB/s.
const MEMORY: f64 = 1270.0;
const CACHE: f64 = 4760.0;

/// Grain of the simulation.
const LINE: u64 = 512 << 10;

#[derive(Clone, Copy, PartialEq)]
enum Policy {
    /// The line that was not used for longest makes room.
    Oldest,
    /// Any line does, as hashed caches behave.
    Random,
}

/// A cache of whole lines.
struct Cache {
    lines: Vec<u64>,
    capacity: usize,
    policy: Policy,
    seed: u64,
}

impl Cache {
    fn new(bytes: u64, policy: Policy) -> Cache {
        Cache { lines: Vec::new(), capacity: (bytes / LINE) as usize, policy, seed: 75 }
    }

    /// Whether the line was there; it is now.
    fn read(&mut self, line: u64) -> bool {
        let found = self.lines.iter().position(|known| *known == line);
        match (found, self.policy) {
            (Some(_), Policy::Random) => return true,
            (Some(at), Policy::Oldest) => drop(self.lines.remove(at)),
            (None, _) if self.lines.len() < self.capacity => {}
            (None, Policy::Oldest) => drop(self.lines.remove(0)),
            (None, Policy::Random) => {
                self.seed = self.seed.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
                self.lines.swap_remove((self.seed >> 33) as usize % self.capacity);
            }
        }
        self.lines.push(line);
        found.is_some()
    }

    /// The rate of one execution that reads slice `n mod K`.
    fn execute(&mut self, layout: &Layout, n: u64) -> f64 {
        let start = layout.slice_offset(n) / LINE;
        let lines = layout.bytes.0 / LINE;
        let hits = (start..start + lines).filter(|line| self.read(*line)).count() as f64;
        let bytes = layout.bytes.0 as f64;
        let cached = bytes * hits / lines as f64;
        bytes / (cached / CACHE + (bytes - cached) / MEMORY)
    }
}

/// The rate that the loop would report: after a walk over all slices, the median of ten executions.
fn simulated(bytes: u64, rotate: u64, cache: u64, policy: Policy) -> f64 {
    let layout = Layout::new(Bytes(bytes), Bytes(rotate), Bytes::ZERO, Bytes::ZERO).unwrap();
    let mut cache = Cache::new(cache, policy);
    let walk = 3 * layout.slices;
    let _ = (0..walk).map(|n| cache.execute(&layout, n)).sum::<f64>();
    let rates: Vec<f64> = (walk..walk + 10).map(|n| cache.execute(&layout, n)).collect();
    summarise(&rates).unwrap().median
}

/// A sweep by doubling, in MiB, over a simulated cache; the sizes that are marked.
fn marked(from: u64, to: u64, rotate: u64, cache: u64, policy: Policy) -> Vec<u64> {
    let sizes = std::iter::successors(Some(from), |size| Some(size * 2)).take_while(|size| *size <= to);
    let rate = |size: u64| simulated(size * MIB, rotate * MIB, cache * MIB, policy);
    marks_of(sizes.map(|size| step("pull", size * MIB, rotate * MIB, rate(size))).collect())
}

fn marks_of(mut tests: Vec<TestResult>) -> Vec<u64> {
    mark_plateaus(&mut tests);
    let is_marked = |test: &&TestResult| test.transfers[0].marks.iter().any(|mark| mark == ABOVE_PLATEAU);
    tests.iter().filter(is_marked).map(|test| test.bytes / MIB).collect()
}

#[test]
fn a_fixed_source_that_fits_into_the_cache_is_marked() {
    assert_eq!(marked(8, 512, 0, 80, Policy::Oldest), [8, 16, 32, 64]);
    // A random one keeps a part of what is a little larger.
    assert_eq!(marked(8, 512, 0, 80, Policy::Random), [8, 16, 32, 64, 128]);
}

#[test]
fn too_few_slices_are_marked_and_enough_are_not() {
    for policy in [Policy::Oldest, Policy::Random] {
        assert_eq!(marked(8, 512, 64, 80, policy)[..4], [8, 16, 32, 64]);
        // Four times the cache, as "auto" takes.
        assert_eq!(marked(8, 512, 320, 80, policy), [0; 0]);
    }
    // Just above the cache: enough where the oldest line goes, and not where any may.
    assert_eq!(marked(8, 512, 96, 80, Policy::Oldest), [0; 0]);
    assert_eq!(marked(8, 512, 96, 80, Policy::Random), [8, 16, 32, 64, 128]);
}

#[test]
fn two_sizes_are_enough_for_a_plateau() {
    assert_eq!(marks_of(vec![step("local", 16 * MIB, 0, 2556.0), step("local", 1024 * MIB, 0, 2010.0)]), [16]);
    // In whatever order.
    assert_eq!(marks_of(vec![step("local", 1024 * MIB, 0, 2010.0), step("local", 16 * MIB, 0, 2556.0)]), [16]);
}

#[test]
fn the_plateau_is_the_median_of_the_upper_octave() {
    let sizes = [(8, 10.0), (255, 30.0), (256, 20.0), (384, 22.0), (512, 19.0)];
    let mut tests: Vec<TestResult> = sizes.iter().map(|(size, rate)| step("pull", size * MIB, 0, *rate)).collect();
    mark_plateaus(&mut tests);
    for test in &tests {
        let plateau = test.transfers[0].plateau_gbps.unwrap();
        assert!((plateau - 20.0).abs() < 1e-9, "{plateau}");
    }
    // The large ones make it, and are not measured by it.
    assert_eq!(marks_of(tests), [255]);
}

#[test]
fn five_percent_are_the_limit() {
    let sweep = |rate| marks_of(vec![step("pull", MIB, 0, rate), step("pull", 64 * MIB, 0, 100.0)]);
    assert_eq!(sweep(104.9), [0; 0]);
    assert_eq!(sweep(105.1), [1]);
}

#[test]
fn a_rate_that_may_be_the_plateaus_is_not_marked() {
    let mut small = step("pull", MIB, 0, 110.0);
    // The large size may be as fast.
    let mut large = step("pull", 64 * MIB, 0, 100.0);
    large.transfers[0].time_us.as_mut().unwrap().ci95 = Some([64.0 * MIB as f64 / 112.0 / 1e3, 1e6]);
    assert_eq!(marks_of(vec![small.clone(), large]), [0; 0]);
    // The interval reaches below the plateau of 100 GB/s.
    small.transfers[0].time_us.as_mut().unwrap().ci95 = Some([9.0, MIB as f64 / 99.0 / 1e3]);
    assert_eq!(marks_of(vec![small.clone(), step("pull", 64 * MIB, 0, 100.0)]), [0; 0]);
    // A single sample has none, and counts as it is.
    small.transfers[0].time_us.as_mut().unwrap().ci95 = None;
    assert_eq!(marks_of(vec![small, step("pull", 64 * MIB, 0, 100.0)]), [1]);
}

#[test]
fn sweeps_are_kept_apart_by_name_rotation_and_transfer() {
    let tests = vec![
        step("pull", MIB, 0, 60.0),
        step("pull", MIB, 256 * MIB, 19.0),
        step("pull", 64 * MIB, 0, 20.0),
        step("pull", 64 * MIB, 256 * MIB, 19.0),
        step("push", MIB, 0, 60.0),
    ];
    let mut marked = tests.clone();
    mark_plateaus(&mut marked);
    let plateaus: Vec<Option<u64>> =
        marked.iter().map(|test| test.transfers[0].plateau_gbps.map(|rate| rate.round() as u64)).collect();
    assert_eq!(plateaus, [Some(20), Some(19), Some(20), Some(19), None]);
    let counts: Vec<usize> = marked.iter().map(|test| test.transfers[0].marks.len()).collect();
    assert_eq!(counts, [1, 0, 0, 0, 0]);
    // As the sweep grows it is marked anew: without its large size there is no plateau.
    marked.remove(2);
    mark_plateaus(&mut marked);
    assert!(marked[0].transfers[0].marks.is_empty() && marked[0].transfers[0].plateau_gbps.is_none());
}

#[test]
fn what_was_not_measured_makes_no_plateau() {
    let mut failed = step("pull", 1024 * MIB, 0, 1.0);
    (failed.transfers[0].rate_gbps, failed.transfers[0].time_us) = (None, None);
    assert_eq!(marks_of(vec![step("pull", MIB, 0, 60.0), step("pull", 64 * MIB, 0, 20.0), failed.clone()]), [1]);
    assert_eq!(marks_of(vec![failed]), [0; 0]);
    assert_eq!(marks_of(Vec::new()), [0; 0]);
}

/// The result of a copy over `rotate` MiB of a simulated cache, and of its repetition over twice as many.
fn checked(size: u64, rotate: u64, cache: u64, policy: Policy) -> TransferResult {
    let rate = |rotate: u64| simulated(size * MIB, rotate * MIB, cache * MIB, policy);
    let mut test = step("pull", size * MIB, rotate * MIB, rate(rotate));
    check_rotation(&mut test, step("pull", size * MIB, 2 * rotate * MIB, rate(2 * rotate)));
    test.transfers.remove(0)
}

fn is_insufficient(transfer: &TransferResult) -> bool {
    transfer.marks.iter().any(|mark| mark == ROTATION_INSUFFICIENT)
}

#[test]
fn a_footprint_that_a_cache_holds_a_part_of_is_insufficient() {
    for policy in [Policy::Oldest, Policy::Random] {
        let held = checked(16, 64, 80, policy);
        assert!(is_insufficient(&held), "{:?}", held.rotation_check);
        let check = held.rotation_check.unwrap();
        assert_eq!((check.slices, check.footprint_bytes), (8, 128 * MIB));
        assert!(check.rate_gbps < held.rate_gbps && check.change.unwrap() < -0.02);
        let enough = checked(16, 320, 80, policy);
        assert!(!is_insufficient(&enough) && enough.rotation_check.unwrap().change.unwrap().abs() < 0.02);
    }
    // Just above the cache: enough where the oldest line goes, and not where any may.
    assert!(!is_insufficient(&checked(16, 96, 80, Policy::Oldest)));
    assert!(is_insufficient(&checked(16, 96, 80, Policy::Random)));
}

#[test]
fn a_fall_of_two_percent_is_the_limit() {
    let fall = |to: f64| {
        let mut test = step("pull", MIB, 8 * MIB, 100.0);
        let mut twice = step("pull", MIB, 16 * MIB, to);
        test.transfers[0].time_us.as_mut().unwrap().ci95 = None;
        twice.transfers[0].time_us.as_mut().unwrap().ci95 = None;
        check_rotation(&mut test, twice);
        is_insufficient(&test.transfers[0])
    };
    assert!(!fall(98.1) && fall(97.9) && !fall(150.0));
    // Within the intervals of 2 % on either side nothing is told.
    let mut test = step("pull", MIB, 8 * MIB, 100.0);
    let mut twice = step("pull", MIB, 16 * MIB, 97.0);
    for transfer in test.transfers.iter_mut().chain(&mut twice.transfers) {
        let time = transfer.time_us.as_mut().unwrap();
        time.ci95 = Some([time.median * 0.98, time.median * 1.02]);
    }
    check_rotation(&mut test, twice);
    assert!(!is_insufficient(&test.transfers[0]));
}

#[test]
fn what_goes_wrong_in_the_repetition_is_the_tests_outcome() {
    let good = || step("pull", MIB, 8 * MIB, 100.0);
    let mut wrong = step("pull", MIB, 16 * MIB, 100.0);
    wrong.outcome = Outcome::Mismatch;
    (wrong.transfers[0].verified, wrong.transfers[0].mismatch) = (Verified::Failed, Some(mismatch()));
    let mut test = good();
    check_rotation(&mut test, wrong);
    assert_eq!((&test.outcome, test.transfers[0].verified), (&Outcome::Mismatch, Verified::Failed));
    assert!(test.transfers[0].mismatch.is_some() && test.transfers[0].rate_gbps.is_some());

    let mut failed = step("pull", MIB, 16 * MIB, 100.0);
    (failed.outcome, failed.failure) = (Outcome::Failed, Some("rank 1 ran out of memory".to_owned()));
    (failed.transfers[0].rate_gbps, failed.transfers[0].time_us) = (None, None);
    let mut test = good();
    check_rotation(&mut test, failed.clone());
    assert_eq!(test.outcome, Outcome::Failed);
    assert!(test.failure.unwrap().contains("twice the footprint (rotation_check): rank 1 ran out of memory"));
    assert_eq!(test.transfers[0].rotation_check.as_ref().unwrap().change, None);

    failed.outcome = Outcome::NotRun;
    let mut test = good();
    check_rotation(&mut test, failed);
    assert_eq!(test.outcome, Outcome::Passed);
}

#[test]
fn what_does_not_rotate_is_not_checked() {
    let mut test = step("pull", MIB, 0, 100.0);
    check_rotation(&mut test, step("pull", MIB, 0, 50.0));
    assert_eq!(test.transfers[0].rotation_check, None);
    assert!(test.transfers[0].marks.is_empty());
}

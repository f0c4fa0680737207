//! Shows what a person sees.

use super::*;
use crate::report::figure::figure;
use crate::report::fixtures::*;
use crate::report::json;
use crate::report::results::MismatchEntry;
use crate::stats::summarise;

const PLAIN: TextStyle = TextStyle { ascii: false };
const ASCII: TextStyle = TextStyle { ascii: true };

/// The tests' part of the text.
fn tables(tests: Vec<TestResult>) -> String {
    finished_tests(&results(tests), 0, PLAIN)
}

/// Three sizes, rotated and fixed.
fn quick_start(name: &str) -> Vec<TestResult> {
    let rates = [(1, 18.9, 61.2), (16, 18.8, 33.8), (256, 18.9, 19.0)];
    let steps = |(size, slow, fast)| [step(name, size * MIB, 256 * MIB, slow), step(name, size * MIB, 0, fast)];
    rates.into_iter().flat_map(steps).collect()
}

/// A test of three transfers, the second out of the scope of rotation, the third a fill.
fn three() -> TestResult {
    let mut second = measured(1, "R1C0", "R0C0", "R1C0", MIB, 0, 8.0);
    second.sub_executors = 4;
    second.marks = vec!["placement unknown".to_owned()];
    let transfers = vec![
        measured(0, "R0C0", "R0C0", "R1C0", MIB, 256 * MIB, 9.0),
        second,
        measured(2, "N", "R0C0", "R1C0", MIB, 0, 99.96),
    ];
    tested("three", MIB, 256 * MIB, transfers)
}

fn with_samples(mut test: TestResult, samples_us: &[f64]) -> TestResult {
    for transfer in &mut test.transfers {
        transfer.samples_us = samples_us.to_vec();
        transfer.time_us = summarise(samples_us);
    }
    test
}

/// Line number `n` of the tables, without the blanks around it.
fn line(text: &str, n: usize) -> &str {
    text.lines().nth(n).unwrap().trim()
}

#[test]
fn rotated_and_fixed_sources_stand_side_by_side() {
    insta::assert_snapshot!(render(&results(quick_start("pull")), PLAIN), @r##"
    tb-mpi 0.1.0 · 2 ranks on 1 host · CPU memory only, no device backend · start: barrier · data verified at the end
    not the defaults: data.src_rotate_scope = all (cfg.toml:7)

    pull   R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size      rotated           fixed source      fixed / rotated                       rotation
       1 MiB     18.9  18.8–19.0   61.2  61.0–61.4   3.24              served from cache   K 256 x 1 MiB = 256 MiB
       16 MiB    18.8  18.7–18.9   33.8  33.7–33.9   1.80              served from cache   K 16 x 16 MiB = 256 MiB
       256 MiB   18.9  18.8–19.0   19.0  18.9–19.1   1.01                                  K 1 x 256 MiB = 256 MiB

    6 transfers, all verified · 1 test · 10.5 s
    "##);
}

#[test]
fn several_transfers_are_listed_with_executors_and_the_test() {
    insta::assert_snapshot!(tables(vec![three()]), @r##"
    three   1 MiB   rotated 256 MiB   3 transfers at once   GB/s, median and 95 % interval of 10 samples
       #   transfer                      bytes   sub-executors   GB/s              time µs   data     rotation
       0   R0C0 -> R0C0 -> R1C0          1 MiB   1 thread        9.00  8.97–9.03       117   passed   K 256 x 1 MiB = 256 MiB
       1   R1C0 -> R0C0 -> R1C0          1 MiB   4 threads       8.00  7.97–8.03       131   passed   K 1 x 1 MiB = 1 MiB       not rotated, placement unknown
       2   N -> R0C0 -> R1C0             1 MiB   1 thread         100  99.6–100       10.5   passed
           executor R0C0                 1 MiB                   9.00  8.97–9.03       117
           test (all bytes / its time)   3 MiB                   27.0  26.9–27.1       117
       overhead 0.250 µs · start spread 0.500 µs (at most 0.500 µs)
    "##);
}

#[test]
fn pairs_make_a_matrix_and_the_slow_one_is_named() {
    let mut test = all_pairs(3, |src, dst| if (src, dst) == (0, 2) { 7.0 } else { 12.0 + f64::from(src) });
    test.transfers[4].verified = Verified::Failed;
    test.transfers[4].mismatch = Some(MismatchEntry { place: "R1C0".to_owned(), ..mismatch() });
    test.transfers[5].verified = Verified::Unverified;
    test.transfers.remove(8);
    test = tested(&test.name, MIB, 0, test.transfers);
    insta::assert_snapshot!(tables(vec![test]), @r##"
    all pairs   1 MiB   fixed source   8 transfers at once   by SRC (push)   GB/s, median and 95 % interval of 10 samples
       SRC \ DST   R0C0    R1C0    R2C0
       R0C0        12.0    12.0   7.00*
       R1C0        13.0   13.0!    13.0
       R2C0        14.0    14.0
       95 % intervals within ±0.350 %
       * slow: R0C0 -> R0C0 -> R2C0: 7.00 GB/s, 0.538 of the median 13.0
       ! WRONG DATA: R1C0 -> R1C0 -> R1C0
       UNVERIFIED: R1C0 -> R1C0 -> R2C0
                                     bytes   GB/s              time µs
       executor R0C0                 1 MiB   12.0  12.0–12.0      87.4
       test (all bytes / its time)   8 MiB   96.0  95.7–96.3      87.4
       overhead 0.250 µs · start spread 0.500 µs (at most 0.500 µs)
       WRONG DATA: transfer 4 (R1C0 -> R1C0 -> R1C0), destination 0 (R1C0) on rank 1 (n1), execution 13: element 17 is 165, expected 31; differs from the reference; 4 wrong bytes
    "##);
}

#[test]
fn whatever_went_wrong_is_said() {
    insta::assert_snapshot!(render(&varied(), ASCII), @r##"
    tb-mpi 0.1.0 | 2 ranks on 1 host | 1 EMULATED device | start: barrier | data verified at the end
    EMULATED devices: they are threads and memory of the CPU, no figure of a device means anything
    not the defaults: data.src_rotate_scope = all (cfg.toml:7)
    warning: a warning

    failed   R0C0 -> R1C0 -> R1C0   1 thread
       size    fixed source   time us
       1 MiB   n/a                n/a   FAILED
       FAILED: rank 1 (n1) failed in allocate: out of memory

    not run
       size
       1 MiB   not run

    wrong   R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size    fixed source      time us
       1 MiB   20.0  19.9-20.1      52.4   WRONG DATA
       WRONG DATA: transfer 0 (R0C0 -> R1C0 -> R1C0), destination 0 (R1C0) on rank 1 (n1), execution 13: element 17 is 165, expected 31; differs from the reference; 4 wrong bytes

    guard zone   R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size    fixed source      time us
       1 MiB   20.0  19.9-20.1      52.4   WRONG DATA
       WRONG DATA: transfer 0 (R0C0 -> R1C0 -> R1C0), destination 0 (R1C0) on rank 1 (n1), execution 13: guard; 4 wrong bytes

    slow   R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size    fixed source      time us
       1 MiB   20.0  19.9-20.1      52.4   outside expectation
       outside expectation: transfer 0 (R0C0 -> R1C0 -> R1C0): 20.0 GB/s is below min_gbps = 300

    fill   N -> R0C0 -> R0C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size    GB/s              time us
       1 MiB   9.00  8.97-9.03       117   1 outlier, a; b, "c"

    all pairs   1 MiB   fixed source   9 transfers at once   by SRC (push)   GB/s, median and 95 % interval of 10 samples
       SRC \ DST   R0C0   R1C0   R2C0
       R0C0        12.0   12.0   12.0
       R1C0        12.0   12.0   12.0
       R2C0        12.0   12.0   12.0
       95 % intervals within +-0.350 %
                                     bytes   GB/s              time us
       executor R0C0                 1 MiB   12.0  12.0-12.0      87.4
       test (all bytes / its time)   9 MiB    108  108-108        87.4
       overhead 0.250 us | start spread 0.500 us (at most 0.500 us)

    rotation   pull R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
              size    on cold   on warm    w/c   rotation
       pull   1 MiB      16.0      18.5   1.16   K 256 x 1 MiB = 256 MiB
       plateau (largest sizes), GB/s: pull on 17.0
       twice the footprint: 0 of 1 more than 2 % slower

    comma, quote " and\nnewline   R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size    rotated           time us   rotation
       1 MiB   18.9  18.8-19.0      55.5   K 256 x 1 MiB = 256 MiB

    =1+1   R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size    rotated           time us   rotation
       1 MiB   18.9  18.8-19.0      55.5   K 256 x 1 MiB = 256 MiB

    -1   R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size    rotated           time us   rotation
       1 MiB   18.9  18.8-19.0      55.5   K 256 x 1 MiB = 256 MiB

    @x   R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size    rotated           time us   rotation
       1 MiB   18.9  18.8-19.0      55.5   K 256 x 1 MiB = 256 MiB

    +1   R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size    rotated           time us   rotation
       1 MiB   18.9  18.8-19.0      55.5   K 256 x 1 MiB = 256 MiB

    'quoted   R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size    rotated           time us   rotation
       1 MiB   18.9  18.8-19.0      55.5   K 256 x 1 MiB = 256 MiB

    café → 🚀   R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size    rotated           time us   rotation
       1 MiB   18.9  18.8-19.0      55.5   K 256 x 1 MiB = 256 MiB

    R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size    rotated           time us   rotation
       1 MiB   18.9  18.8-19.0      55.5   K 256 x 1 MiB = 256 MiB

    23 transfers: 20 verified, 2 with WRONG DATA, 1 without a result | 16 tests, 1 FAILED, 1 not run, 1 outside expectation | 28.0 s | exit 5 | INCOMPLETE: the run did not end in order
    "##);
}

#[test]
fn what_is_known_of_limits_has_a_column_and_a_line() {
    let limited = |bytes, rotate, rate: f64| {
        let mut test = step("local", bytes, rotate, rate);
        let transfer = &mut test.transfers[0];
        transfer.limit_gbps = Some(2458.368);
        transfer.limit_by = Some("memory of R0G0".to_owned());
        transfer.of_limit = transfer.rate_gbps.map(|rate| rate / 2458.368);
        test
    };
    let (mut fixed, rotated) = (limited(16 * MIB, 0, 2556.0), limited(16 * MIB, 256 * MIB, 2000.0));
    fixed.transfers[0].marks = vec!["implausible: above what memory of R0G0 can do".to_owned()];
    insta::assert_snapshot!(tables(vec![rotated, fixed]), @r##"
    local   R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
       size     rotated           fixed source      of limit        fixed / rotated                                                                                    rotation
       16 MiB   2000  1990–2010   2560  2550–2560   81.4 %, 104 %   1.28              served from cache, fixed source: implausible: above what memory of R0G0 can do   K 16 x 16 MiB = 256 MiB
       limit: 2460 GB/s (memory of R0G0)
    "##);
    let mut pair = three();
    pair.transfers[1] = limited(MIB, 0, 2000.0).transfers.remove(0);
    let text = tables(vec![pair]);
    assert!(text.contains("limit: 2460 GB/s (memory of R0G0)") && text.contains(" 81.4 % "), "{text}");
}

#[test]
fn samples_have_rows_if_asked() {
    let samples = [50.0, 51.0, 50.5, 49.5, 50.2, 90.0];
    let mut results = results(vec![with_samples(step("copy", MIB, 0, 20.0), &samples)]);
    results.settings.extend([setting("output.iterations", "true", "--set")]);
    insta::assert_snapshot!(finished_tests(&results, 0, PLAIN), @r##"
    copy   R0C0 -> R1C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 6 samples
       size    fixed source      time µs
       1 MiB   20.0  11.7–21.2      50.4
       outliers: 1 of 6 samples, kept
       size    sources        sample   time µs   GB/s
       1 MiB   fixed source        0      50.0   21.0
       1 MiB   fixed source        1      51.0   20.6
       1 MiB   fixed source        2      50.5   20.8
       1 MiB   fixed source        3      49.5   21.2
       1 MiB   fixed source        4      50.2   20.9
       1 MiB   fixed source        5      90.0   11.7   outlier
    "##);
}

#[test]
fn the_cache_is_named_only_where_fixed_is_clearly_faster() {
    let check = |rotated: f64, fixed: f64| {
        let text = tables(vec![step("a", MIB, 256 * MIB, rotated), step("a", MIB, 0, fixed)]);
        text.contains("served from cache")
    };
    assert!(check(10.0, 10.6));
    assert!(!check(10.0, 10.4), "4 % is noise");
    assert!(!check(10.6, 10.0), "slower is no cache");
    let wide = with_samples(step("a", MIB, 0, 10.6), &[90.0, 95.0, 99.0, 99.0, 105.0, 110.0]);
    assert!(!tables(vec![step("a", MIB, 256 * MIB, 10.0), wide]).contains("cache"), "intervals overlap");
    let few = with_samples(step("a", MIB, 0, 20.0), &[50.0]);
    assert!(!tables(vec![step("a", MIB, 256 * MIB, 10.0), few]).contains("cache"), "no interval");
}

#[test]
fn sources_out_of_scope_are_not_called_rotated() {
    let mut tests = quick_start("copy");
    for test in &mut tests {
        (test.transfers[0].slices, test.transfers[0].footprint_bytes) = (1, test.bytes);
    }
    let text = tables(tests);
    assert!(line(&text, 1).starts_with("size      not rotated"), "{text}");
    assert!(!text.contains("cache") && !text.contains("fixed / rotated"), "{text}");
}

#[test]
fn several_rotations_make_several_columns() {
    let rotations = [(64, 20.0), (256, 18.0), (0, 60.0)];
    let text = tables(rotations.iter().map(|(mib, rate)| step("copy", MIB, mib * MIB, *rate)).collect());
    let header: Vec<&str> = line(&text, 1).split("   ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
    assert_eq!(header, ["size", "rotated 64 MiB", "rotated 256 MiB", "fixed source", "fixed / rotated", "rotation"]);
    let cells: Vec<&str> = line(&text, 2).split("   ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
    assert_eq!(cells[4..], ["3.33", "served from cache", "K 64 x 1 MiB = 64 MiB; K 256 x 1 MiB = 256 MiB"]);
}

#[test]
fn tests_of_another_name_transfer_or_repeated_step_are_not_mixed() {
    let other = |mut test: TestResult| {
        test.transfers[0].dst = vec!["R0C0".to_owned()];
        test
    };
    let tests = vec![step("a", MIB, 0, 1.0), step("a", 2 * MIB, 0, 2.0), step("b", MIB, 0, 3.0)];
    assert_eq!(groups(&tests).iter().map(|group| group.len()).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(groups(&[step("a", MIB, 0, 1.0), step("a", MIB, 0, 1.0)]).len(), 2);
    assert_eq!(groups(&[step("a", MIB, 0, 1.0), other(step("a", 2 * MIB, 0, 1.0))]).len(), 2);
    let mut lost = step("a", 2 * MIB, 0, 1.0);
    lost.transfers.clear();
    assert_eq!(groups(&[step("a", MIB, 0, 1.0), lost, step("a", 4 * MIB, 0, 1.0)]).len(), 1);
}

#[test]
fn printing_group_by_group_gives_the_same_text() {
    let mut tests = quick_start("pull");
    tests.extend(quick_start("push"));
    let all = results(tests);
    let parts = finished_tests(&results(quick_start("pull")), 0, PLAIN) + &finished_tests(&all, 6, PLAIN);
    assert_eq!(finished_tests(&all, 0, PLAIN), parts);
    assert_eq!(finished_tests(&all, 12, PLAIN), "");
    assert_eq!(finished_tests(&all, 99, PLAIN), "");
}

#[test]
fn the_next_test_tells_whether_a_group_goes_on() {
    let mut next = planned(vec![transfer(0, &[0], 1, &[1])]);
    let group = [step("copy", 2 * MIB, 256 * MIB, 1.0)];
    assert!(continues_group(&group, &next));
    assert!(!continues_group(&[], &next));
    assert!(!continues_group(&[step("copy", MIB, 256 * MIB, 1.0)], &next), "the same step again");
    next.name = "other".to_owned();
    assert!(!continues_group(&group, &next));
    assert!(!continues_group(&group, &planned(vec![transfer(0, &[0], 0, &[1])])));
}

#[test]
fn captions_tell_how_much_was_measured() {
    let caption = |samples: &[f64]| {
        let text = tables(vec![with_samples(step("a", MIB, 0, 20.0), samples)]);
        text.lines().next().unwrap().rsplit("   ").next().unwrap().to_owned()
    };
    assert_eq!(caption(&[50.0]), "GB/s of a single sample");
    assert_eq!(caption(&[50.0; 3]), "GB/s, median of 3 samples (an interval needs 6)");
    assert_eq!(caption(&[50.0; 6]), "GB/s, median and 95 % interval of 6 samples");
    let mixed = vec![with_samples(step("a", MIB, 0, 1.0), &[1.0; 8]), step("a", 2 * MIB, 0, 1.0)];
    assert!(tables(mixed).contains("of 8 to 10 samples"));
}

#[test]
fn matrices_are_for_pairs_of_one_size() {
    let is_matrix = |test: TestResult| tables(vec![test]).contains("SRC \\ DST");
    assert!(is_matrix(all_pairs(3, |_, _| 1.0)));
    assert!(!is_matrix(all_pairs(2, |_, _| 1.0)), "four are a list");
    let mut uneven = all_pairs(3, |_, _| 1.0);
    uneven.transfers[0].bytes /= 2;
    assert!(!is_matrix(uneven));
    let mut twice = all_pairs(3, |_, _| 1.0);
    twice.transfers[1].dst = twice.transfers[0].dst.clone();
    assert!(!is_matrix(twice));
    let mut two_sources = all_pairs(3, |_, _| 1.0);
    two_sources.transfers[0].src.push("R1C0".to_owned());
    assert!(!is_matrix(two_sources));
    let one_source = tested("a", MIB, 0, all_pairs(7, |_, _| 1.0).transfers.drain(..7).collect());
    assert!(!is_matrix(one_source));
}

#[test]
fn figures_are_those_of_the_json() {
    let results = results([quick_start("pull"), vec![three(), all_pairs(4, |s, d| f64::from(1 + s * 4 + d))]].concat());
    let text = render(&results, PLAIN);
    let words: Vec<&str> = text.split_whitespace().map(|word| word.trim_end_matches('*')).collect();
    let document: serde_json::Value = serde_json::from_str(&json::render(&results)).unwrap();
    for test in document["tests"].as_array().unwrap() {
        for transfer in test["transfers"].as_array().unwrap() {
            let rate = figure(transfer["rate_gbps"].as_f64());
            assert!(words.contains(&rate.as_str()), "{rate} of {} is not in\n{text}", test["name"]);
        }
    }
}

#[test]
fn the_header_says_what_is_not_as_usual() {
    let mut results = results(Vec::new());
    results.settings = std::collections::BTreeMap::from([
        setting("validate.always_validate", "-1", "environment ALWAYS_VALIDATE"),
        setting("run.start", "barrier", "default"),
    ]);
    results.job.mpi = "threads of one process".to_owned();
    results.job.hosts.push("n2".to_owned());
    results.job.backend = Some("hip".to_owned());
    results.world[0].devices = vec![device(), device()];
    let text = header(&results, ASCII);
    assert_eq!(
        text,
        "tb-mpi 0.1.0 | 2 ranks on 2 hosts | 2 devices on hip | ranks are threads of one process | start: barrier | data UNVERIFIED\n\
         not the defaults: validate.always_validate = -1 (environment ALWAYS_VALIDATE)\n\n"
    );
}

#[test]
fn the_last_line_sums_up() {
    let files = ["quickstart.json".to_owned(), "q.csv".to_owned()];
    let good = results(quick_start("pull"));
    let check = |results: &Results, seconds| footer(results, Duration::from_secs_f64(seconds), &files, PLAIN);
    assert_eq!(
        check(&good, 4.12),
        "6 transfers, all verified \u{b7} 1 test \u{b7} 4.1 s \u{b7} results: quickstart.json, q.csv\n"
    );
    assert!(check(&good, 123.4).contains(" 123 s "));
    let mut unverified = good.clone();
    unverified.tests.iter_mut().for_each(|test| test.transfers[0].verified = Verified::Unverified);
    assert!(check(&unverified, 1.0).starts_with("6 transfers, all UNVERIFIED"));
    unverified.tests[0].transfers[0].verified = Verified::Passed;
    assert!(check(&unverified, 1.0).starts_with("6 transfers: 1 verified, 5 UNVERIFIED"));
    assert!(check(&results(Vec::new()), 0.0).starts_with("0 transfers \u{b7} 0 tests \u{b7} 0.0 s"));
}

#[test]
fn ascii_text_is_ascii() {
    let mut results = varied();
    results.tests.retain(|test| test.name.is_ascii());
    results.tests.extend(quick_start("pull"));
    results.tests.push(three());
    results.settings.extend([setting("output.iterations", "true", "default")]);
    assert!(render(&results, ASCII).is_ascii());
    assert!(!render(&results, PLAIN).is_ascii());
}

#[test]
fn lines_have_no_trailing_blanks_and_no_control_characters() {
    let mut results = varied();
    results.tests.push(three());
    results.tests.push(step("bell \u{7} \u{1b}[31m", MIB, 0, 1.0));
    for line in render(&results, PLAIN).lines() {
        assert_eq!(line, line.trim_end());
        assert!(!line.chars().any(char::is_control), "{line:?}");
    }
}

//! Writes results for a person: tables read at a glance, nothing cut, also in a pipe.
//!
//! `header`, then `finished_tests` as tests finish, then `footer`; `render` is all of them.

mod block;
mod detail;
mod matrix;
pub mod plan;
mod rotation;
mod sweep;
mod table;

use std::time::Duration;

use super::figure::counted;
use super::results::{Outcome, Results, TestResult, TransferResult, Verified};
use crate::plan::{PatternStep, PlannedTest};
use table::clean;

/// How text looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextStyle {
    /// Only ASCII between the words of others (names, messages), which stay as they are.
    pub ascii: bool,
}

impl TextStyle {
    fn dot(self) -> &'static str {
        if self.ascii { " | " } else { " \u{b7} " }
    }

    fn dash(self) -> &'static str {
        if self.ascii { "-" } else { "\u{2013}" }
    }

    fn micro(self) -> &'static str {
        if self.ascii { "us" } else { "\u{b5}s" }
    }

    fn plus_minus(self) -> &'static str {
        if self.ascii { "+-" } else { "\u{b1}" }
    }
}

/// The whole text; the time is that of the tests, and no files are named.
pub fn render(results: &Results, style: TextStyle) -> String {
    let seconds = |test: &TestResult| test.setup_seconds + test.run_seconds + test.verify_seconds;
    let elapsed = Duration::try_from_secs_f64(results.tests.iter().map(seconds).sum()).unwrap_or_default();
    header(results, style) + &finished_tests(results, 0, style) + &footer(results, elapsed, &[], style)
}

/// What runs where, what is not as usual, and what a reader of the figures has to know.
pub fn header(results: &Results, style: TextStyle) -> String {
    let job = &results.job;
    let ranks = counted(job.ranks as usize, "rank");
    let mut facts = vec![
        format!("tb-mpi {}", clean(&results.tool.version)),
        format!("{ranks} on {}", counted(job.hosts.len(), "host")),
        backend(results),
    ];
    if job.mpi == "threads of one process" && job.ranks > 1 {
        facts.push("ranks are threads of one process".to_owned());
    }
    if let Some(start) = results.setting("run.start") {
        facts.push(format!("start: {}", clean(start)));
    }
    facts.extend(validation(results));
    let mut text = facts.join(style.dot()) + "\n";
    if job.emulated {
        text += "EMULATED devices: they are threads and memory of the CPU, no figure of a device means anything\n";
    }
    let changed: Vec<String> = results
        .settings
        .iter()
        .filter(|(_, entry)| !entry.is_default)
        .map(|(key, entry)| format!("{} = {} ({})", clean(key), clean(&entry.value), clean(&entry.from)))
        .collect();
    if !changed.is_empty() {
        text += &format!("not the defaults: {}\n", changed.join(", "));
    }
    for warning in &results.warnings {
        text += &detail::message("", "warning: ", warning);
    }
    text + "\n"
}

fn backend(results: &Results) -> String {
    let devices: usize = results.world.iter().map(|rank| rank.devices.len()).sum();
    match &results.job.backend {
        None => "CPU memory only, no device backend".to_owned(),
        Some(_) if results.job.emulated => counted(devices, "EMULATED device"),
        Some(name) => format!("{} on {}", counted(devices, "device"), clean(name)),
    }
}

fn validation(results: &Results) -> Option<String> {
    Some(match results.setting("validate.always_validate")? {
        "0" => "data verified at the end".to_owned(),
        "1" => "data verified after every iteration".to_owned(),
        "-1" => "data UNVERIFIED".to_owned(),
        other => format!("always_validate: {}", clean(other)),
    })
}

/// The tests from number `from` on, those that belong together as one table.
///
/// To print while tests run: call it when `continues_group` says that the next test begins
/// another table, and after the last test; `from` is then the number of tests already printed.
pub fn finished_tests(results: &Results, from: usize, style: TextStyle) -> String {
    let mut text = String::new();
    for group in groups(results.tests.get(from..).unwrap_or_default()) {
        text += &if is_rotation(&group[0]) {
            rotation::render(group)
        } else if group.iter().all(|test| test.transfers.len() <= 1) {
            sweep::render(group, style)
        } else {
            group.iter().map(|test| block::render(test, style)).collect()
        };
        if results.iterations_wanted() {
            text += &detail::samples(group, style);
        }
        text.push('\n');
    }
    text
}

fn is_rotation(test: &TestResult) -> bool {
    test.pattern.as_ref().is_some_and(|pattern| pattern.name == "rotation")
}

/// What a test has in common with the others of its table, and what it has not.
struct Step<'a> {
    name: &'a str,
    pattern: Option<&'a PatternStep>,
    bytes: u64,
    src_rotate_bytes: u64,
    transfers: Vec<String>,
}

impl<'a> Step<'a> {
    fn of(test: &'a TestResult) -> Step<'a> {
        Step {
            name: &test.name,
            pattern: test.pattern.as_ref(),
            bytes: test.bytes,
            src_rotate_bytes: test.src_rotate_bytes,
            transfers: test.transfers.iter().map(TransferResult::notation).collect(),
        }
    }

    /// Whether it is another step of the `group`: a step that is there already begins a new one.
    fn joins(&self, group: &[TestResult]) -> bool {
        let Some(first) = group.first() else { return false };
        let same = |test: &TestResult| {
            (&test.name[..], test.bytes, test.src_rotate_bytes) == (self.name, self.bytes, self.src_rotate_bytes)
        };
        if group.iter().any(same) {
            return false;
        }
        match (&first.pattern, self.pattern) {
            // Parts of one pattern stand in one table.
            (Some(theirs), Some(own)) => (&theirs.name, &theirs.test) == (&own.name, &own.test),
            (None, None) => {
                let known = group.iter().find(|test| !test.transfers.is_empty());
                let alike = |test: &TestResult| {
                    let theirs = test.transfers.iter().map(TransferResult::notation);
                    self.transfers.is_empty() || theirs.eq(self.transfers.iter().cloned())
                };
                first.name == self.name && known.is_none_or(alike)
            }
            _ => false,
        }
    }
}

/// Whether the next test is another size or rotation of the `group` that was finished last.
pub fn continues_group(group: &[TestResult], next: &PlannedTest) -> bool {
    let next = Step {
        name: &next.name,
        pattern: next.pattern.as_ref(),
        bytes: next.bytes.0,
        src_rotate_bytes: next.src_rotate_bytes.0,
        transfers: next.transfers.iter().map(ToString::to_string).collect(),
    };
    next.joins(group)
}

/// Consecutive tests that share name and transfers, or a pattern.
fn groups(tests: &[TestResult]) -> Vec<&[TestResult]> {
    let mut groups = Vec::new();
    let mut start = 0;
    for (i, test) in tests.iter().enumerate().skip(1) {
        if !Step::of(test).joins(&tests[start..i]) {
            groups.push(&tests[start..i]);
            start = i;
        }
    }
    if start < tests.len() {
        groups.push(&tests[start..]);
    }
    groups
}

/// How it went, in one line: transfers, tests, time, files.
pub fn footer(results: &Results, elapsed: Duration, files: &[String], style: TextStyle) -> String {
    let mut facts = vec![transfers_line(&results.tests), tests_line(&results.tests)];
    let seconds = elapsed.as_secs_f64();
    facts.push(if seconds < 100.0 { format!("{seconds:.1} s") } else { format!("{seconds:.0} s") });
    if !files.is_empty() {
        facts.push(format!("results: {}", clean(&files.join(", "))));
    }
    if results.exit_code != 0 {
        facts.push(format!("exit {}", results.exit_code));
    }
    if !results.complete {
        facts.push("INCOMPLETE: the run did not end in order".to_owned());
    }
    facts.join(style.dot()) + "\n"
}

fn transfers_line(tests: &[TestResult]) -> String {
    let transfers: Vec<&TransferResult> = tests.iter().flat_map(|test| &test.transfers).collect();
    let total = counted(transfers.len(), "transfer");
    let count = |wanted: &dyn Fn(&TransferResult) -> bool| transfers.iter().filter(|t| wanted(t)).count();
    let measured = |transfer: &TransferResult| transfer.time_us.is_some();
    let parts = [
        (count(&|t| t.verified == Verified::Passed), "verified"),
        (count(&|t| t.verified == Verified::Failed), "with WRONG DATA"),
        (count(&|t| t.verified == Verified::Unverified && measured(t)), "UNVERIFIED"),
        (count(&|t| t.verified == Verified::Unverified && !measured(t)), "without a result"),
    ];
    let present: Vec<&(usize, &str)> = parts.iter().filter(|(n, _)| *n > 0).collect();
    match present[..] {
        [] => total,
        [(_, what)] => format!("{total}, all {what}"),
        _ => {
            let parts: Vec<String> = present.iter().map(|(n, what)| format!("{n} {what}")).collect();
            format!("{total}: {}", parts.join(", "))
        }
    }
}

fn tests_line(tests: &[TestResult]) -> String {
    let groups = groups(tests);
    let mut line = counted(groups.len(), "test");
    for (outcome, what) in [
        (Outcome::Failed, "FAILED"),
        (Outcome::NotRun, "not run"),
        (Outcome::OutsideExpectation, "outside expectation"),
    ] {
        let n = groups.iter().filter(|group| group.iter().any(|test| test.outcome == outcome)).count();
        if n > 0 {
            line += &format!(", {n} {what}");
        }
    }
    line
}

#[cfg(test)]
mod tests;

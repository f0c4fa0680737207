//! Words and lines that every kind of table shares: figures with intervals, remarks, failures, samples.

use super::TextStyle;
use super::table::{INDENT, clean, left, right, table};
use crate::exec::Clock;
use crate::report::circumstances::reasons;
use crate::report::collect::{SINGLE_SAMPLE, outlier_mark};
use crate::report::figure::{counted, figure};
use crate::report::inflation::{ABOVE_PLATEAU, ROTATION_INSUFFICIENT};
use crate::report::results::{MismatchEntry, Outcome, Summary, TestResult, TransferResult, Verified};
use crate::stats::outliers;
use crate::units::{Bytes, rate_gbps};

/// Said of sources that stay at one address though rotation was asked for.
pub const NOT_ROTATED: &str = "not rotated";

/// Rates at the ends of the interval of the median time, lower first.
pub fn rate_interval(bytes: u64, time: Option<&Summary>) -> Option<[f64; 2]> {
    let [short, long] = time?.ci95?;
    Some([rate_gbps(Bytes(bytes), long)?, rate_gbps(Bytes(bytes), short)?])
}

/// Rate and its interval: `18.9` and `18.7–19.1`.
pub fn rate(rate_gbps: Option<f64>, bytes: u64, time: Option<&Summary>, style: TextStyle) -> (String, String) {
    let interval = rate_interval(bytes, time)
        .map(|[low, high]| format!("{}{}{}", figure(low), style.dash(), figure(high)))
        .unwrap_or_default();
    (figure(rate_gbps), interval)
}

/// Rate after a flush, and how much faster it is warm; empty where that was not asked for.
pub fn contrast(transfer: Option<&TransferResult>) -> [String; 2] {
    [transfer.and_then(|t| t.cold_gbps), transfer.and_then(|t| t.warm_over_cold)]
        .map(|value| value.map(figure).unwrap_or_default())
}

/// Headings of `contrast`.
pub const CONTRAST: [&str; 2] = ["cold", "warm / cold"];

/// Median time.
pub fn median(time: Option<&Summary>) -> String {
    figure(time.map(|time| time.median))
}

/// `K 64 x 4 MiB = 256 MiB`: slices, distance between their starts, and the footprint over all
/// sources; empty where nothing was asked to rotate.
pub fn rotation(test: &TestResult, transfer: &TransferResult) -> String {
    let mut parts = Vec::new();
    let (sources, slices) = (transfer.src.len() as u64, transfer.slices);
    if sources > 0 && test.src_rotate_bytes > 0 {
        let stride = Bytes(transfer.footprint_bytes / (slices * sources).max(1));
        let several = if sources > 1 { format!(" x {sources} sources") } else { String::new() };
        parts.push(format!("K {slices} x {stride}{several} = {}", Bytes(transfer.footprint_bytes)));
    }
    if transfer.dst_slices > 1 {
        parts.push(format!("destinations K {}", transfer.dst_slices));
    }
    parts.join(", ")
}

/// Whether rotation was asked for and yet the sources stay at one address, because their executor
/// or memory is out of scope (a size above the footprint needs no second slice).
pub fn not_rotated(test: &TestResult, transfer: &TransferResult) -> bool {
    !transfer.src.is_empty() && transfer.slices == 1 && transfer.bytes < test.src_rotate_bytes
}

/// "1 thread", "8 sub-executors".
pub fn sub_executors(transfer: &TransferResult) -> String {
    let kind = transfer.exe.chars().find(|c| c.is_ascii_uppercase() && *c != 'R');
    counted(transfer.sub_executors as usize, if kind == Some('C') { "thread" } else { "sub-executor" })
}

/// What the figures below are: unit, statistic, samples and, where it is not the host's, the clock.
pub fn caption<'a>(tests: impl IntoIterator<Item = &'a TestResult>) -> String {
    let mut counts: Vec<u64> = Vec::new();
    let mut clocks: Vec<&str> = Vec::new();
    for transfer in tests.into_iter().flat_map(|test| &test.transfers) {
        counts.extend(transfer.time_us.as_ref().map(|time| time.n));
        clocks.extend(match transfer.clock {
            Some(Clock::DeviceEvent) => Some("device events"),
            Some(Clock::DeviceClock) => Some("device clock"),
            Some(Clock::Host) | None => None,
        });
    }
    let (Some(&least), Some(&most)) = (counts.iter().min(), counts.iter().max()) else { return String::new() };
    let samples = if least == most { counted(most as usize, "sample") } else { format!("{least} to {most} samples") };
    clocks.sort_unstable();
    clocks.dedup();
    let clock = if clocks.is_empty() { String::new() } else { format!(", by {}", clocks.join(" and ")) };
    match most {
        1 => format!("GB/s of a single sample{clock}"),
        2..=5 => format!("GB/s, median of {samples} (an interval needs 6){clock}"),
        _ => format!("GB/s, median and 95 % interval of {samples}{clock}"),
    }
}

/// "83.3 %" of what the slowest thing on the path can do; empty where that is not known.
pub fn of_limit(transfer: &TransferResult) -> String {
    transfer.of_limit.map(|part| format!("{} %", figure(part * 100.0))).unwrap_or_default()
}

/// More are a list that nobody reads; the JSON has them by transfer.
const LIMITS_MAX: usize = 3;

/// "2460 GB/s (memory of R0G0)", each limit once.
fn limits<'a>(transfers: impl Iterator<Item = &'a TransferResult>) -> Option<String> {
    let mut limits: Vec<String> = Vec::new();
    for transfer in transfers {
        let limit =
            transfer.limit_by.as_ref().map(|by| format!("{} GB/s ({})", figure(transfer.limit_gbps), clean(by)));
        limits.extend(limit.filter(|limit| !limits.contains(limit)));
    }
    (1..=LIMITS_MAX).contains(&limits.len()).then(|| limits.join(", "))
}

/// How a transfer's data were found, in one word.
pub fn verified(test: &TestResult, transfer: &TransferResult) -> &'static str {
    match (&test.outcome, transfer.verified) {
        (Outcome::Failed, Verified::Unverified) => "FAILED",
        (Outcome::NotRun, _) => "not run",
        (_, Verified::Passed) => "passed",
        (_, Verified::Failed) => "WRONG DATA",
        (_, Verified::Unverified) => "UNVERIFIED",
    }
}

/// Marks that the text does not tell elsewhere (the caption has the samples, a line the outliers).
pub fn marks(transfer: &TransferResult) -> impl Iterator<Item = String> + '_ {
    let counted = transfer.time_us.as_ref().map(|time| outlier_mark(time.outliers));
    transfer.marks.iter().filter(move |mark| *mark != SINGLE_SAMPLE && Some(*mark) != counted.as_ref()).map(|mark| {
        match (mark.as_str(), transfer.rate_gbps.zip(transfer.plateau_gbps)) {
            (ABOVE_PLATEAU, Some((rate, plateau))) => {
                format!("{ABOVE_PLATEAU}: {} of {}", figure(rate / plateau), figure(plateau))
            }
            (ROTATION_INSUFFICIENT, _) => {
                let twice = transfer.rotation_check.as_ref().and_then(|check| check.rate_gbps);
                format!("{ROTATION_INSUFFICIENT}: {} with twice the footprint", figure(twice))
            }
            _ => clean(mark),
        }
    })
}

/// What a line has to say of a test of one transfer, beside its figures.
pub fn notes_of(test: &TestResult) -> Vec<String> {
    let Some(transfer) = test.transfers.first() else {
        return match test.outcome {
            Outcome::Failed => vec!["FAILED".to_owned()],
            Outcome::NotRun => vec!["not run".to_owned()],
            _ => Vec::new(),
        };
    };
    let mut notes = Vec::new();
    if transfer.verified != Verified::Passed {
        notes.push(verified(test, transfer).to_owned());
    }
    if test.outcome == Outcome::OutsideExpectation {
        notes.push("outside expectation".to_owned());
    }
    if not_rotated(test, transfer) {
        notes.push(NOT_ROTATED.to_owned());
    }
    notes.extend(marks(transfer));
    notes
}

/// Lines below a table, each test's in front of it `name(test)`: what went wrong, what to know.
pub fn details(tests: &[TestResult], name: impl Fn(&TestResult) -> String) -> String {
    let mut text = String::new();
    let (mut warned, mut outliers, mut samples) = (Vec::new(), 0, 0);
    // Sizes, rotation and sub-executors have columns of their own; a sweep shares the rest.
    let in_table = |key: &str| ["data.bytes", "data.src_rotate_bytes", "run.sub_executors"].contains(&key);
    let own: Vec<String> = tests
        .first()
        .into_iter()
        .flat_map(|test| &test.settings)
        .filter(|(key, _)| !in_table(key))
        .map(|(key, value)| format!("{} = {}", clean(key), clean(value)))
        .collect();
    if !own.is_empty() {
        text += &message(INDENT, "with ", &own.join(", "));
    }
    if let Some(limits) = limits(tests.iter().flat_map(|test| &test.transfers)) {
        text += &message(INDENT, "limit: ", &limits);
    }
    for test in tests {
        let at = name(test);
        if let Some(failure) = &test.failure {
            let lead = if test.outcome == Outcome::NotRun { "not run" } else { "FAILED" };
            let failure = failure.strip_prefix("error: ").unwrap_or(failure);
            text += &message(INDENT, &format!("{at}{lead}: "), failure);
        }
        for transfer in &test.transfers {
            if let Some(wrong) = &transfer.mismatch {
                text += &message(INDENT, &format!("{at}WRONG DATA: "), &mismatch(transfer, wrong));
            }
            let time = transfer.time_us.as_ref();
            outliers += time.map_or(0, |time| time.outliers);
            samples += time.map_or(0, |time| time.n);
        }
        for violation in &test.violations {
            text += &message(INDENT, &format!("{at}outside expectation: "), violation);
        }
        for reason in reasons(&test.circumstances) {
            text += &message(INDENT, &at, &reason);
        }
        for warning in &test.warnings {
            // A sweep says the same at every size: once is enough.
            if !warned.contains(&warning) {
                warned.push(warning);
                text += &message(INDENT, "warning: ", warning);
            }
        }
    }
    let checks = tests.iter().flat_map(|test| &test.transfers).filter(|transfer| transfer.rotation_check.is_some());
    let (mut checked, mut insufficient) = (0, 0);
    for transfer in checks {
        checked += 1;
        insufficient += usize::from(transfer.marks.iter().any(|mark| mark == ROTATION_INSUFFICIENT));
    }
    if checked > 0 {
        text += &format!("{INDENT}twice the footprint: {insufficient} of {checked} more than 2 % slower\n");
    }
    if outliers > 0 {
        text += &format!("{INDENT}outliers: {outliers} of {}, kept\n", counted(samples as usize, "sample"));
    }
    text
}

/// A message of several lines, the later ones set in.
pub fn message(indent: &str, lead: &str, text: &str) -> String {
    let mut lines = text.trim_end().lines();
    let mut message = format!("{indent}{lead}{}", clean(lines.next().unwrap_or_default())).trim_end().to_owned();
    for line in lines {
        message += &format!("\n{indent}{INDENT}{}", clean(line));
    }
    message + "\n"
}

fn mismatch(transfer: &TransferResult, wrong: &MismatchEntry) -> String {
    let element = wrong.element.map(|element| {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "n/a".to_owned());
        format!("element {element} is {}, expected {}; ", text(&wrong.actual), text(&wrong.expected))
    });
    format!(
        "transfer {} ({}), destination {} ({}) on rank {} ({}), execution {}: {}{}; {}",
        transfer.index,
        transfer.notation(),
        wrong.destination,
        wrong.place,
        wrong.rank,
        wrong.host,
        wrong.execution,
        element.unwrap_or_default(),
        wrong.what,
        counted(wrong.wrong_bytes as usize, "wrong byte"),
    )
}

/// What became of the rotation of a test's sources: "rotated 256 MiB", "not rotated", "fixed source".
pub fn rotation_found(test: &TestResult) -> String {
    let mut sourced = test.transfers.iter().filter(|transfer| !transfer.src.is_empty()).peekable();
    match test.src_rotate_bytes {
        _ if sourced.peek().is_none() && !test.transfers.is_empty() => "no source".to_owned(),
        0 => "fixed source".to_owned(),
        _ if sourced.peek().is_some() && sourced.all(|transfer| not_rotated(test, transfer)) => {
            "not rotated".to_owned()
        }
        bytes => format!("rotated {}", Bytes(bytes)),
    }
}

/// A row for every sample of every transfer.
pub fn samples(tests: &[TestResult], style: TextStyle) -> String {
    let several = tests.iter().any(|test| test.transfers.len() > 1);
    let mut rows = Vec::new();
    for test in tests {
        for transfer in &test.transfers {
            let odd = outliers(&transfer.samples_us);
            for (i, time_us) in transfer.samples_us.iter().enumerate() {
                rows.push(vec![
                    Bytes(test.bytes).to_string(),
                    rotation_found(test),
                    if several { format!("{}  {}", transfer.index, transfer.notation()) } else { String::new() },
                    i.to_string(),
                    figure(*time_us),
                    figure(rate_gbps(Bytes(transfer.bytes), *time_us)),
                    if odd.binary_search(&i).is_ok() { "outlier".to_owned() } else { String::new() },
                ]);
            }
        }
    }
    let time = right(format!("time {}", style.micro()));
    table(&[left("size"), left("sources"), left("transfer"), right("sample"), time, right("GB/s"), left("")], &rows)
}

//! Writes one test of several transfers: its list or matrix, its executors, and the test as a whole.

use super::TextStyle;
use super::detail::*;
use super::matrix::Matrix;
use super::table::{INDENT, clean, left, paired, right, table};
use crate::report::figure::{counted, figure};
use crate::report::results::{Outcome, Summary, TestResult};
use crate::units::Bytes;

pub fn render(test: &TestResult, style: TextStyle) -> String {
    let matrix = Matrix::of(&test.transfers);
    let mut parts = vec![
        clean(&test.name),
        Bytes(test.bytes).to_string(),
        rotation_found(test),
        format!("{} at once", counted(test.transfers.len(), "transfer")),
    ];
    parts.extend(matrix.as_ref().map(Matrix::executors));
    parts.push(caption([test]));
    parts.extend(match test.outcome {
        Outcome::Failed => Some("FAILED".to_owned()),
        Outcome::NotRun => Some("not run".to_owned()),
        Outcome::Passed | Outcome::Mismatch | Outcome::OutsideExpectation => None,
    });
    parts.retain(|part| !part.is_empty());
    let mut text = parts.join("   ") + "\n";
    match matrix {
        Some(matrix) => {
            text += &matrix.render(test, style);
            text += &rows(test, false, style);
        }
        None => text += &rows(test, true, style),
    }
    text += &whole(test, style);
    text + &details(std::slice::from_ref(test), |_| String::new())
}

/// A row for each transfer (if `listed`) and executor, and one for the test.
fn rows(test: &TestResult, listed: bool, style: TextStyle) -> String {
    let mut rates = Vec::new();
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut push = |name: [String; 2], bytes: u64, rate_gbps, time: Option<&Summary>, rest: [String; 7]| {
        let [sub_executors, cold, warm_over_cold, of_limit, verified, rotation, marks] = rest;
        rates.push(rate(rate_gbps, bytes, time, style));
        let [index, name] = name;
        let bytes = Bytes(bytes).to_string();
        let figures = [sub_executors, String::new(), cold, warm_over_cold, of_limit, median(time), verified];
        rows.push([index, name, bytes].into_iter().chain(figures).chain([rotation, marks]).collect());
    };
    for transfer in test.transfers.iter().filter(|_| listed) {
        let mut notes: Vec<String> = marks(transfer).collect();
        if not_rotated(test, transfer) {
            notes.insert(0, "not rotated".to_owned());
        }
        let [cold, warm_over_cold] = contrast(Some(transfer));
        let rest = [
            sub_executors(transfer),
            cold,
            warm_over_cold,
            of_limit(transfer),
            verified(test, transfer).to_owned(),
            rotation(test, transfer),
            notes.join(", "),
        ];
        let name = [transfer.index.to_string(), transfer.notation()];
        push(name, transfer.bytes, transfer.rate_gbps, transfer.time_us.as_ref(), rest);
    }
    for exe in &test.executors {
        let name = [String::new(), format!("executor {}", exe.exe)];
        push(name, exe.bytes, exe.rate_gbps, exe.time_us.as_ref(), Default::default());
    }
    if test.time_us.is_some() {
        let bytes = test.transfers.iter().map(|transfer| transfer.bytes).sum();
        let name = [String::new(), "test (all bytes / its time)".to_owned()];
        push(name, bytes, test.rate_gbps, test.time_us.as_ref(), Default::default());
    }
    for (row, rate) in rows.iter_mut().zip(paired(&rates)) {
        row[4] = rate;
    }
    let columns = [
        right("#"),
        left(if listed { "transfer" } else { "" }),
        left("bytes"),
        left("sub-executors"),
        left("GB/s"),
        right(CONTRAST[0]),
        right(CONTRAST[1]),
        left("of limit"),
        right(format!("time {}", style.micro())),
        left("data"),
        left("rotation"),
        left(""),
    ];
    table(&columns, &rows)
}

/// What only the test as a whole has.
fn whole(test: &TestResult, style: TextStyle) -> String {
    let mut facts = Vec::new();
    if let Some(overhead) = test.overhead_us {
        facts.push(format!("overhead {} {}", figure(overhead), style.micro()));
    }
    if let Some(spread) = &test.start_spread_us {
        let (middle, most) = (figure(spread.median), figure(spread.max));
        facts.push(format!("start spread {middle} {0} (at most {most} {0})", style.micro()));
    }
    if facts.is_empty() { String::new() } else { format!("{INDENT}{}\n", facts.join(style.dot())) }
}

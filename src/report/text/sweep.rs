//! Writes the steps of one transfer as a table: a row for each size, rotated and fixed side by side.

use super::TextStyle;
use super::detail::*;
use super::table::{Column, clean, left, paired, right, table};
use crate::report::figure::figure;
use crate::report::results::{TestResult, TransferResult};
use crate::units::Bytes;

/// How much faster than rotated a fixed source must be to count as served by a cache: the noise
/// that two runs of one size show.
const CACHED: f64 = 1.05;

const ROTATED: &str = "rotated";

/// `tests` share name and transfer, and each has another size or rotation.
pub fn render(tests: &[TestResult], style: TextStyle) -> String {
    let mut sizes: Vec<u64> = Vec::new();
    let mut rotations: Vec<u64> = Vec::new();
    for test in tests {
        for (list, value) in [(&mut sizes, test.bytes), (&mut rotations, test.src_rotate_bytes)] {
            if !list.contains(&value) {
                list.push(value);
            }
        }
    }
    // Fixed sources come last, beside the truth that they are compared with.
    rotations.sort_by_key(|bytes| *bytes == 0);
    let at = |bytes, rotate| tests.iter().find(|test| (test.bytes, test.src_rotate_bytes) == (bytes, rotate));
    let steps: Vec<Vec<Option<&TestResult>>> =
        sizes.iter().map(|bytes| rotations.iter().map(|rotate| at(*bytes, *rotate)).collect()).collect();

    let transfers: Vec<&TransferResult> = tests.iter().filter_map(|test| test.transfers.first()).collect();
    let uniform = transfers.windows(2).all(|pair| pair[0].sub_executors == pair[1].sub_executors);
    let several = rotations.len() > 1;
    let headings: Vec<String> = rotations.iter().map(|rotate| heading(tests, *rotate, &rotations)).collect();
    let compared = several && rotations.last() == Some(&0) && headings[rotations.len() - 2].starts_with(ROTATED);
    let mut text = title(tests, transfers.first().copied().filter(|_| uniform));

    let mut columns: Vec<Column> = vec![left("size"), left("sub-executors")];
    for heading in &headings {
        columns.push(left(heading));
        columns.extend(CONTRAST.map(right));
    }
    columns.push(left("of limit"));
    columns.push(left("fixed / rotated"));
    columns.push(right(format!("time {}", style.micro())));
    columns.extend([left(""), left("rotation")]);

    let rates: Vec<Vec<String>> = (0..rotations.len())
        .map(|column| paired(&steps.iter().map(|row| step_rate(row[column], style)).collect::<Vec<_>>()))
        .collect();
    let rows: Vec<Vec<String>> = (0..sizes.len())
        .map(|r| {
            let row = &steps[r];
            let first = row.iter().flatten().next().and_then(|test| test.transfers.first());
            let comparison = if compared { Comparison::of(row) } else { None };
            let mut cells = vec![Bytes(sizes[r]).to_string()];
            cells.push(first.filter(|_| !uniform).map(sub_executors).unwrap_or_default());
            for (step, rates) in row.iter().zip(&rates) {
                cells.push(rates[r].clone());
                cells.extend(contrast(step.and_then(|test| test.transfers.first())));
            }
            let parts = row.iter().flatten().filter_map(|test| test.transfers.first()).map(of_limit);
            cells.push(parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", "));
            cells.push(comparison.as_ref().map(|it| figure(it.ratio)).unwrap_or_default());
            cells.push(first.filter(|_| !several).map(|t| median(t.time_us.as_ref())).unwrap_or_default());
            cells.push(remarks(row, &headings, comparison.as_ref()));
            let turned = row.iter().flatten().filter_map(|test| Some(rotation(test, test.transfers.first()?)));
            // A fixed source beside rotated destinations adds nothing to what is said of the rotated one.
            let said = |all: String, words: String| match all.as_str() {
                "" => words,
                _ if all.ends_with(&words) => all,
                _ => format!("{all}; {words}"),
            };
            cells.push(turned.fold(String::new(), said));
            cells
        })
        .collect();
    text += &table(&columns, &rows);
    text + &details(tests, |test| match (sizes.len(), several) {
        (1, false) => String::new(),
        (_, false) => format!("{}: ", Bytes(test.bytes)),
        (_, true) => format!("{}, {}: ", Bytes(test.bytes), rotation_found(test)),
    })
}

fn title(tests: &[TestResult], uniform: Option<&TransferResult>) -> String {
    let mut parts = vec![clean(&tests[0].name)];
    parts.extend(tests.iter().find_map(|test| test.transfers.first()).map(TransferResult::notation));
    parts.extend(uniform.map(sub_executors));
    parts.push(caption(tests));
    parts.retain(|part| !part.is_empty());
    parts.join("   ") + "\n"
}

/// What a column of rates is about; it never says "rotated" of sources that were not.
fn heading(tests: &[TestResult], rotate: u64, rotations: &[u64]) -> String {
    let column: Vec<(&TestResult, &TransferResult)> = tests
        .iter()
        .filter(|test| test.src_rotate_bytes == rotate)
        .filter_map(|test| Some((test, test.transfers.first()?)))
        .collect();
    let sourced = column.iter().any(|(_, transfer)| !transfer.src.is_empty());
    let turned = column.iter().any(|(_, transfer)| transfer.slices > 1);
    let fixed = column.iter().any(|(test, transfer)| not_rotated(test, transfer));
    let name = if fixed && !turned { NOT_ROTATED } else { ROTATED };
    match rotate {
        _ if rotations.len() == 1 && !sourced && !column.is_empty() => "GB/s".to_owned(),
        0 => "fixed source".to_owned(),
        _ if rotations.iter().filter(|bytes| **bytes > 0).count() == 1 => name.to_owned(),
        bytes => format!("{name} {}", Bytes(bytes)),
    }
}

fn step_rate(test: Option<&TestResult>, style: TextStyle) -> (String, String) {
    let Some(transfer) = test.and_then(|test| test.transfers.first()) else { return Default::default() };
    rate(transfer.rate_gbps, transfer.bytes, transfer.time_us.as_ref(), style)
}

/// A fixed source beside the rotated one of the same size.
struct Comparison {
    ratio: f64,
    cached: bool,
}

impl Comparison {
    /// `row` ends with the fixed source; the rotation in front of it is the last one asked for.
    fn of(row: &[Option<&TestResult>]) -> Option<Comparison> {
        let [.., rotated, fixed] = row else { return None };
        let (rotated, fixed) = (rotated.as_ref()?.transfers.first()?, fixed.as_ref()?.transfers.first()?);
        let ratio = fixed.rate_gbps? / rotated.rate_gbps?;
        let interval = |transfer: &TransferResult| rate_interval(transfer.bytes, transfer.time_us.as_ref());
        let apart = interval(rotated).zip(interval(fixed)).is_some_and(|([_, high], [low, _])| low > high);
        // With one slice on both sides they are the same measurement, and what differs is weather.
        let differ = rotated.slices > fixed.slices;
        Some(Comparison { ratio, cached: differ && apart && ratio > CACHED })
    }
}

fn remarks(row: &[Option<&TestResult>], headings: &[String], comparison: Option<&Comparison>) -> String {
    let mut remarks = Vec::new();
    if comparison.is_some_and(|it| it.cached) {
        remarks.push("served from cache".to_owned());
    }
    // What holds in every column is said once, without the column.
    let mut notes: Vec<(String, Vec<usize>)> = Vec::new();
    for (column, test) in row.iter().enumerate() {
        let told = |note: &String| note == NOT_ROTATED && headings[column].starts_with(NOT_ROTATED);
        for note in test.map(notes_of).unwrap_or_default().into_iter().filter(|note| !told(note)) {
            match notes.iter_mut().find(|(known, _)| *known == note) {
                Some((_, columns)) => columns.push(column),
                None => notes.push((note, vec![column])),
            }
        }
    }
    let present = row.iter().flatten().count();
    for (note, columns) in notes {
        if columns.len() == present {
            remarks.push(note);
        } else {
            remarks.extend(columns.iter().map(|c| format!("{}: {note}", headings[*c])));
        }
    }
    remarks.join(", ")
}

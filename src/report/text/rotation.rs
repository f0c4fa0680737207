//! Writes the pattern `rotation`: sizes pulled and pushed, without and with rotation side by side.

use super::detail::*;
use super::table::{Column, INDENT, clean, left, right, table};
use crate::report::figure::figure;
use crate::report::inflation::ABOVE_PLATEAU;
use crate::report::results::{TestResult, TransferResult};
use crate::units::Bytes;

/// Stands before a rate that exceeds the plateau of its sweep.
const ABOVE: &str = "*";

/// `tests` are those of one pattern: each part at several sizes and rotations.
pub fn render(tests: &[TestResult]) -> String {
    let mut parts: Vec<&str> = Vec::new();
    let mut rotations: Vec<u64> = Vec::new();
    for test in tests {
        if !parts.contains(&part(test)) {
            parts.push(part(test));
        }
        if !rotations.contains(&test.src_rotate_bytes) {
            rotations.push(test.src_rotate_bytes);
        }
    }
    // Rotation off comes first, as the control.
    rotations.sort_unstable();
    let headings: Vec<String> = rotations.iter().map(|rotate| heading(*rotate, &rotations)).collect();

    let mut columns: Vec<Column> = vec![left(""), left("size")];
    // Without cold samples their columns have no cells, and vanish.
    let contrasted = tests.iter().flat_map(|test| &test.transfers).any(|transfer| transfer.cold_gbps.is_some());
    for heading in &headings {
        columns.push(right(format!("{heading} cold")));
        columns.push(right(if contrasted { format!("{heading} warm") } else { format!("{heading} GB/s") }));
        columns.push(right("w/c"));
    }
    columns.extend([right("off / on"), left(""), left("rotation")]);
    let mut rows: Vec<Vec<String>> = Vec::new();
    for name in &parts {
        let mut sizes: Vec<u64> = tests.iter().filter(|test| part(test) == *name).map(|test| test.bytes).collect();
        sizes.dedup();
        for (nth, bytes) in sizes.into_iter().enumerate() {
            let at = |rotate: &u64| {
                tests.iter().find(|test| (part(test), test.bytes, test.src_rotate_bytes) == (*name, bytes, *rotate))
            };
            let steps: Vec<Option<&TestResult>> = rotations.iter().map(at).collect();
            let mut row = vec![if nth == 0 { clean(name) } else { String::new() }, Bytes(bytes).to_string()];
            row.extend(steps.iter().flat_map(|step| cells(*step)));
            row.push(off_over_on(&steps).map(figure).unwrap_or_default());
            row.push(remarks(&steps, &headings));
            let turned = steps.iter().flatten().rev().filter_map(|test| Some(rotation(test, test.transfers.first()?)));
            row.push(turned.into_iter().next().unwrap_or_default());
            rows.push(row);
        }
    }
    let text = title(tests, &parts) + &table(&columns, &rows) + &plateaus(tests, &parts, &rotations, &headings);
    text + &details(tests, |test| {
        format!("{} {}, {}: ", clean(part(test)), Bytes(test.bytes), heading(test.src_rotate_bytes, &rotations))
    })
}

fn part(test: &TestResult) -> &str {
    test.pattern.as_ref().map_or("", |pattern| pattern.part.as_str())
}

fn heading(rotate: u64, rotations: &[u64]) -> String {
    match rotate {
        0 => "off".to_owned(),
        _ if rotations.iter().filter(|bytes| **bytes > 0).count() == 1 => "on".to_owned(),
        bytes => format!("on {}", Bytes(bytes)),
    }
}

/// `rotation   pull R1G0 -> R0G0 -> R0G0, push ...   132 sub-executors   GB/s, median of 3 samples`
fn title(tests: &[TestResult], parts: &[&str]) -> String {
    let transfer = |name: &&str| {
        let mut own = tests.iter().filter(|test| part(test) == *name).filter_map(|test| test.transfers.first());
        own.next()
    };
    let shown: Vec<String> = parts
        .iter()
        .map(|name| format!("{} {}", clean(name), transfer(name).map(TransferResult::notation).unwrap_or_default()))
        .collect();
    let name = tests.first().and_then(|test| Some(clean(&test.pattern.as_ref()?.test)));
    let mut title: Vec<String> = name.into_iter().chain([shown.join(", ")]).collect();
    let mut threads: Vec<String> = tests.iter().flat_map(|test| &test.transfers).map(sub_executors).collect();
    threads.dedup();
    if let [threads] = &threads[..] {
        title.push(threads.clone());
    }
    title.push(caption(tests));
    title.retain(|part| !part.trim().is_empty());
    title.join("   ") + "\n"
}

fn is_above(transfer: &TransferResult) -> bool {
    transfer.marks.iter().any(|mark| mark == ABOVE_PLATEAU)
}

/// Cold, warm, and warm over cold; the mark is that of the headline, which the warm one repeats.
fn cells(step: Option<&TestResult>) -> [String; 3] {
    let Some(transfer) = step.and_then(|test| test.transfers.first()) else { return Default::default() };
    let text = |value: Option<f64>| value.map(figure).unwrap_or_default();
    let mark = if is_above(transfer) { ABOVE } else { "" };
    let warm = format!("{mark}{}", figure(warm(transfer)));
    [text(transfer.cold_gbps), warm, text(transfer.warm_over_cold)]
}

/// The rate that stands beside the cold one, or the headline where there is none.
fn warm(transfer: &TransferResult) -> Option<f64> {
    transfer.warm_gbps.or(transfer.rate_gbps)
}

fn off_over_on(steps: &[Option<&TestResult>]) -> Option<f64> {
    let [Some(off), .., Some(on)] = steps else { return None };
    Some(warm(off.transfers.first()?)? / warm(on.transfers.first()?)?)
}

/// What else is to know of the steps of one size; the star says what the plateau's mark does.
fn remarks(steps: &[Option<&TestResult>], headings: &[String]) -> String {
    let mut remarks: Vec<String> = Vec::new();
    for (step, heading) in steps.iter().zip(headings) {
        let Some(test) = step else { continue };
        let notes = notes_of(test).into_iter().filter(|note| !note.starts_with(ABOVE_PLATEAU));
        remarks.extend(notes.map(|note| format!("{heading}: {note}")));
    }
    remarks.join(", ")
}

/// The plateau of every part and rotation, and what exceeds it.
fn plateaus(tests: &[TestResult], parts: &[&str], rotations: &[u64], headings: &[String]) -> String {
    let mut shown = Vec::new();
    for name in parts {
        for (rotate, heading) in rotations.iter().zip(headings) {
            let sweep = tests.iter().filter(|test| (part(test), test.src_rotate_bytes) == (*name, *rotate));
            let plateau = sweep.flat_map(|test| &test.transfers).find_map(|transfer| transfer.plateau_gbps);
            shown.extend(plateau.map(|plateau| format!("{} {heading} {}", clean(name), figure(plateau))));
        }
    }
    if shown.is_empty() {
        return String::new();
    }
    let mut text = format!("{INDENT}plateau (largest sizes), GB/s: {}\n", shown.join(", "));
    if tests.iter().flat_map(|test| &test.transfers).any(is_above) {
        text += &format!("{INDENT}{ABOVE} more than 5 % above the plateau, which is what memory and link can do\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixtures::*;
    use crate::report::inflation::mark_plateaus;
    use crate::report::results::{PatternStep, Verified};
    use crate::report::text::{TextStyle, finished_tests};

    /// One step of the pattern named `test`.
    fn step_of(test: &str, part: &str, size: u64, rotate: u64, rate: f64) -> TestResult {
        let pattern = PatternStep { name: "rotation".to_owned(), test: test.to_owned(), part: part.to_owned() };
        let mut result = step(&format!("{test}: {part}"), size * MIB, rotate * MIB, rate);
        result.pattern = Some(pattern);
        if part == "push" {
            result.transfers = vec![measured(0, "R0C0", "R0C0", "R1C0", size * MIB, rotate * MIB, rate)];
        }
        result
    }

    fn experiment(test: &str) -> Vec<TestResult> {
        let rates = [(32, 1824.0, 712.0), (64, 3226.0, 1013.0), (256, 1159.0, 1176.0), (512, 1199.0, 1201.0)];
        let both = |part: &'static str, size, off, on| {
            let mut steps = [step_of(test, part, size, 0, off), step_of(test, part, size, 256, on)];
            for transfer in steps.iter_mut().flat_map(|step| &mut step.transfers) {
                let warm = transfer.rate_gbps.unwrap();
                crate::report::fixtures::contrast(transfer, on * 0.95, warm);
            }
            steps
        };
        let pull = rates.into_iter().flat_map(|(size, off, on)| both("pull", size, off, on));
        let push = rates.into_iter().flat_map(|(size, _, on)| both("push", size, on, on));
        let mut tests: Vec<TestResult> = pull.chain(push).collect();
        mark_plateaus(&mut tests);
        tests
    }

    fn tables(tests: Vec<TestResult>) -> String {
        finished_tests(&results(tests), 0, TextStyle { ascii: false })
    }

    #[test]
    fn the_experiment_is_one_table_with_the_impossible_marked() {
        let mut tests = experiment("rotation");
        tests[5].transfers[0].verified = Verified::Unverified;
        insta::assert_snapshot!(tables(tests), @r##"
        rotation   pull R0C0 -> R1C0 -> R1C0, push R0C0 -> R0C0 -> R1C0   1 thread   GB/s, median and 95 % interval of 10 samples
                  size      off cold   off warm    w/c   on cold   on warm    w/c   off / on                    rotation
           pull   32 MiB         676      *1820   2.70       676       712   1.05       2.56                    K 8 x 32 MiB = 256 MiB
                  64 MiB         962      *3230   3.35       962      1010   1.05       3.18                    K 4 x 64 MiB = 256 MiB
                  256 MiB       1120       1160   1.04      1120      1180   1.05      0.986   on: UNVERIFIED   K 1 x 256 MiB = 256 MiB
                  512 MiB       1140       1200   1.05      1140      1200   1.05      0.998                    K 1 x 512 MiB = 512 MiB
           push   32 MiB         676        712   1.05       676       712   1.05       1.00                    K 8 x 32 MiB = 256 MiB
                  64 MiB         962       1010   1.05       962      1010   1.05       1.00                    K 4 x 64 MiB = 256 MiB
                  256 MiB       1120       1180   1.05      1120      1180   1.05       1.00                    K 1 x 256 MiB = 256 MiB
                  512 MiB       1140       1200   1.05      1140      1200   1.05       1.00                    K 1 x 512 MiB = 512 MiB
           plateau (largest sizes), GB/s: pull off 1180, pull on 1190, push off 1190, push on 1190
           * more than 5 % above the plateau, which is what memory and link can do
        "##);
    }

    #[test]
    fn two_experiments_are_two_tables() {
        let twice: Vec<TestResult> = [experiment("a"), experiment("b"), experiment("b")].concat();
        let text = tables(twice);
        assert_eq!(text.matches("plateau (largest sizes)").count(), 3, "{text}");
    }
}

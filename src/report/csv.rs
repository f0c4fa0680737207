//! Writes results as CSV: one row for each transfer, and for each sample if asked.
//!
//! RFC 4180 with a fixed header; new columns are added at the end. An empty cell is what was not
//! measured. Summary rows have an empty `sample`; sample rows count it from 0, give `sample_us` and
//! the rate of that sample, and leave the statistics empty. A test without transfers still has a row.
//!
//! A spreadsheet runs a cell that starts with `= + - @` (or a tab or carriage return before it) as a
//! formula, also when it is quoted, and a test may have any name. So a text that starts with one of
//! these gets a single quote in front; so does one that starts with a single quote, which makes the
//! rule reversible: a reader drops one leading single quote. JSON has every text as it is.

use super::results::{Outcome, Results, TestResult, TransferResult, Verified};
use crate::stats::outliers;
use crate::units::{Bytes, rate_gbps};

const HEADER: [&str; 42] = [
    "test",
    "bytes_swept",
    "src_rotate_bytes",
    "transfer",
    "rank",
    "src",
    "exe",
    "dst",
    "bytes",
    "sub_executors",
    "slices",
    "footprint_bytes",
    "clock",
    "sample",
    "sample_us",
    "n",
    "min_us",
    "median_us",
    "mean_us",
    "max_us",
    "stddev_us",
    "ci95_low_us",
    "ci95_high_us",
    "rate_gbps",
    "rate_mean_gbps",
    "traffic_gbps",
    "verified",
    "wrong_bytes",
    "outcome",
    "marks",
    "failure",
    "cold_gbps",
    "warm_gbps",
    "warm_over_cold",
    "plateau_gbps",
    "cache_bytes",
    "pattern",
    "part",
    "limit_gbps",
    "limit_by",
    "of_limit",
    "rotation_check_gbps",
];

/// The whole file; `output.iterations` adds a row for each sample.
pub fn render(results: &Results) -> String {
    let mut writer = csv::WriterBuilder::new().terminator(csv::Terminator::CRLF).from_writer(Vec::new());
    let mut write = |row: &[String]| writer.write_record(row).expect("memory takes every row, all of one length");
    write(&HEADER.map(str::to_owned));
    for test in &results.tests {
        if test.transfers.is_empty() {
            write(&row(test, None, Part::Summary));
        }
        for transfer in &test.transfers {
            write(&row(test, Some(transfer), Part::Summary));
            if results.iterations_wanted() {
                let odd = outliers(&transfer.samples_us);
                for i in 0..transfer.samples_us.len() {
                    write(&row(test, Some(transfer), Part::Sample { i, outlier: odd.binary_search(&i).is_ok() }));
                }
            }
        }
    }
    let bytes = writer.into_inner().expect("memory takes every row");
    String::from_utf8(bytes).expect("only text was written")
}

/// What a row is about.
#[derive(Clone, Copy)]
enum Part {
    Summary,
    Sample { i: usize, outlier: bool },
}

/// Cells in the order of the header.
fn row(test: &TestResult, transfer: Option<&TransferResult>, part: Part) -> [String; 42] {
    let sample_us = |transfer: &TransferResult| match part {
        Part::Summary => None,
        Part::Sample { i, .. } => Some(transfer.samples_us[i]),
    };
    let of = |cell: &dyn Fn(&TransferResult) -> String| transfer.map(cell).unwrap_or_default();
    let summary = |figure: &dyn Fn(&TransferResult) -> Option<f64>| match part {
        Part::Summary => number(transfer.and_then(figure)),
        Part::Sample { .. } => String::new(),
    };
    let time = |figure: &dyn Fn(&crate::stats::Summary) -> Option<f64>| {
        summary(&|transfer| transfer.time_us.as_ref().and_then(figure))
    };
    let rate = |transfer: &TransferResult| match sample_us(transfer) {
        Some(time_us) => rate_gbps(Bytes(transfer.bytes), time_us),
        None => transfer.rate_gbps,
    };
    let samples = |transfer: &TransferResult| transfer.time_us.as_ref().map(|time| time.n.to_string());
    let marks = |transfer: &TransferResult| match part {
        Part::Summary => transfer.marks.join("; "),
        Part::Sample { outlier: true, .. } => "outlier".to_owned(),
        Part::Sample { outlier: false, .. } => String::new(),
    };
    let pattern = test.pattern.as_ref();
    [
        text(&test.name),
        test.bytes.to_string(),
        test.src_rotate_bytes.to_string(),
        of(&|transfer| transfer.index.to_string()),
        of(&|transfer| rank_of(&transfer.exe)),
        of(&|transfer| text(&transfer.src.concat())),
        of(&|transfer| text(&transfer.exe)),
        of(&|transfer| text(&transfer.dst.concat())),
        of(&|transfer| transfer.bytes.to_string()),
        of(&|transfer| transfer.sub_executors.to_string()),
        of(&|transfer| transfer.slices.to_string()),
        of(&|transfer| transfer.footprint_bytes.to_string()),
        of(&|transfer| transfer.clock.map(|clock| name_of(&clock)).unwrap_or_default()),
        match part {
            Part::Summary => String::new(),
            Part::Sample { i, .. } => i.to_string(),
        },
        number(transfer.and_then(sample_us)),
        match part {
            Part::Summary => transfer.and_then(samples).unwrap_or_default(),
            Part::Sample { .. } => String::new(),
        },
        time(&|time| Some(time.min)),
        time(&|time| Some(time.median)),
        time(&|time| Some(time.mean)),
        time(&|time| Some(time.max)),
        time(&|time| time.stddev),
        time(&|time| time.ci95.map(|[low, _]| low)),
        time(&|time| time.ci95.map(|[_, high]| high)),
        number(transfer.and_then(rate)),
        summary(&|transfer| transfer.rate_mean_gbps),
        summary(&|transfer| transfer.traffic_gbps),
        transfer.map_or_else(|| name_of(&Verified::Unverified), |transfer| name_of(&transfer.verified)),
        of(&|transfer| transfer.mismatch.as_ref().map(|wrong| wrong.wrong_bytes.to_string()).unwrap_or_default()),
        name_of::<Outcome>(&test.outcome),
        text(&of(&marks)),
        text(test.failure.as_deref().unwrap_or_default()),
        summary(&|transfer| transfer.cold_gbps),
        summary(&|transfer| transfer.warm_gbps),
        summary(&|transfer| transfer.warm_over_cold),
        summary(&|transfer| transfer.plateau_gbps),
        of(&|transfer| transfer.cache_bytes.to_string()),
        text(pattern.map_or("", |pattern| &pattern.name)),
        text(pattern.map_or("", |pattern| &pattern.part)),
        of(&|transfer| number(transfer.limit_gbps)),
        of(&|transfer| text(transfer.limit_by.as_deref().unwrap_or_default())),
        summary(&|transfer| transfer.of_limit),
        summary(&|transfer| transfer.rotation_check.as_ref()?.rate_gbps),
    ]
}

/// Shortest text that reads back as the same f64, as in JSON.
fn number(value: Option<f64>) -> String {
    value.map(|x| x.to_string()).unwrap_or_default()
}

/// The name that JSON uses.
fn name_of<T: serde::Serialize>(value: &T) -> String {
    let name = serde_json::to_value(value).ok().and_then(|name| name.as_str().map(str::to_owned));
    name.expect("the enums of results are written as names")
}

/// `R12C0` is run by rank 12.
fn rank_of(exe: &str) -> String {
    exe.chars().skip(1).take_while(char::is_ascii_digit).collect()
}

/// A text that no spreadsheet runs; see the head of this file.
fn text(value: &str) -> String {
    let runs = value.starts_with(['=', '+', '-', '@', '\t', '\r', '\'']);
    if runs { format!("'{value}") } else { value.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixtures::*;
    use crate::report::json;

    /// Strict reader: a row of another length or broken quoting is an error.
    fn read(text: &str) -> Vec<Vec<String>> {
        let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(false).from_reader(text.as_bytes());
        reader.records().map(|row| row.unwrap().iter().map(str::to_owned).collect()).collect()
    }

    fn cell<'a>(row: &'a [String], column: &str) -> &'a str {
        &row[HEADER.iter().position(|name| *name == column).unwrap()]
    }

    #[test]
    fn the_header_is_there_without_results() {
        assert_eq!(read(&render(&results(Vec::new()))), [HEADER.map(str::to_owned)]);
    }

    #[test]
    fn every_figure_is_that_of_the_json() {
        let results = varied();
        let document: serde_json::Value = serde_json::from_str(&json::render(&results)).unwrap();
        let mut rows = read(&render(&results)).into_iter().skip(1);
        let mut figures = 0;
        for test in document["tests"].as_array().unwrap() {
            for transfer in test["transfers"].as_array().unwrap() {
                let row = rows.next().unwrap();
                let time = &transfer["time_us"];
                for (column, value) in [
                    ("bytes_swept", &test["bytes"]),
                    ("src_rotate_bytes", &test["src_rotate_bytes"]),
                    ("bytes", &transfer["bytes"]),
                    ("slices", &transfer["slices"]),
                    ("footprint_bytes", &transfer["footprint_bytes"]),
                    ("n", &time["n"]),
                    ("min_us", &time["min"]),
                    ("median_us", &time["median"]),
                    ("mean_us", &time["mean"]),
                    ("max_us", &time["max"]),
                    ("stddev_us", &time["stddev"]),
                    ("ci95_low_us", &time["ci95"][0]),
                    ("ci95_high_us", &time["ci95"][1]),
                    ("rate_gbps", &transfer["rate_gbps"]),
                    ("rate_mean_gbps", &transfer["rate_mean_gbps"]),
                    ("traffic_gbps", &transfer["traffic_gbps"]),
                    ("limit_gbps", &transfer["limit_gbps"]),
                    ("of_limit", &transfer["of_limit"]),
                    ("wrong_bytes", &transfer["mismatch"]["wrong_bytes"]),
                    ("cold_gbps", &transfer["cold_gbps"]),
                    ("warm_gbps", &transfer["warm_gbps"]),
                    ("warm_over_cold", &transfer["warm_over_cold"]),
                    ("plateau_gbps", &transfer["plateau_gbps"]),
                    ("cache_bytes", &transfer["cache_bytes"]),
                    ("rotation_check_gbps", &transfer["rotation_check"]["rate_gbps"]),
                ] {
                    assert_eq!(cell(&row, column).parse::<f64>().ok(), value.as_f64(), "{column} of {}", test["name"]);
                    figures += usize::from(value.is_number());
                }
                assert_eq!(cell(&row, "verified"), transfer["verified"]);
                assert_eq!(cell(&row, "outcome"), test["outcome"]);
                assert_eq!(cell(&row, "exe"), transfer["exe"]);
                assert_eq!(cell(&row, "part"), test["pattern"]["part"].as_str().unwrap_or_default());
                assert_eq!(cell(&row, "limit_by"), transfer["limit_by"].as_str().unwrap_or_default());
                assert_eq!(cell(&row, "clock"), transfer["clock"].as_str().unwrap_or_default());
            }
            if test["transfers"].as_array().unwrap().is_empty() {
                let row = rows.next().unwrap();
                assert_eq!((cell(&row, "outcome"), cell(&row, "rate_gbps")), ("not_run", ""));
            }
        }
        assert_eq!(rows.next(), None);
        assert!(figures > 200, "{figures}");
    }

    #[test]
    fn names_come_back_and_none_is_a_formula() {
        let results = varied();
        let names: Vec<String> = read(&render(&results)).into_iter().skip(1).map(|row| row[0].clone()).collect();
        for name in &names {
            assert!(!name.starts_with(['=', '+', '-', '@', '\t', '\r']), "{name:?}");
        }
        let mut back: Vec<&str> = names.iter().map(|name| name.strip_prefix('\'').unwrap_or(name)).collect();
        back.dedup();
        let written: Vec<&str> = results.tests.iter().map(|test| test.name.as_str()).collect();
        assert_eq!(back, written);
    }

    #[test]
    fn samples_have_rows_of_their_own_only_if_asked() {
        let mut results = results(vec![step("copy", MIB, 0, 20.0)]);
        assert_eq!(read(&render(&results)).len(), 2);
        results.settings.extend([setting("output.iterations", "true", "--set")]);
        results.tests[0].transfers[0].samples_us[4] = 1e4;
        let rows = read(&render(&results));
        assert_eq!(rows.len(), 12);
        assert_eq!(cell(&rows[1], "sample"), "");
        for (i, row) in rows[2..].iter().enumerate() {
            let sample_us = results.tests[0].transfers[0].samples_us[i];
            assert_eq!(cell(row, "sample"), i.to_string());
            assert_eq!(cell(row, "sample_us").parse(), Ok(sample_us));
            assert_eq!(cell(row, "rate_gbps").parse().ok(), rate_gbps(Bytes(MIB), sample_us));
            assert_eq!((cell(row, "median_us"), cell(row, "n")), ("", ""));
            assert_eq!(cell(row, "marks"), if i == 4 { "outlier" } else { "" });
        }
    }

    #[test]
    fn rows_end_as_rfc_4180_says() {
        let text = render(&results(vec![step("a \"b\", c", MIB, 0, 20.0)]));
        assert!(text.contains("\r\n\"a \"\"b\"\", c\","), "{text}");
        assert!(text.ends_with("\r\n"));
    }
}

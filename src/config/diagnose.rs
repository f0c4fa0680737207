//! Prints every problem of a config with its line, a caret, and the way out.

use std::ops::Range;

use annotate_snippets::{AnnotationKind, Group, Level, Origin, Renderer, Snippet};

use super::{Lines, Problem, Source};

/// Longer lines are cut around the spot, so that printing stays linear in the size of the file.
const LINE_SHOWN_MAX: usize = 200;

/// Plain text, one report for each problem, then their number.
pub fn render(source: &Source, problems: &[Problem]) -> String {
    let lines = Lines::of(&source.text);
    let renderer = Renderer::plain();
    let mut text = String::new();
    for problem in problems {
        text.push_str(&renderer.render(&[report(source, &lines, problem)]));
        text.push_str("\n\n");
    }
    let noun = if problems.len() == 1 { "problem" } else { "problems" };
    text.push_str(&format!("{} {noun} in {}", problems.len(), source.name));
    text
}

fn report<'a>(source: &'a Source, lines: &Lines, problem: &'a Problem) -> Group<'a> {
    let mut group = Group::with_title(Level::ERROR.primary_title(&problem.message));
    match &problem.span {
        Some(span) => {
            let start = floor(&source.text, span.start);
            let line = lines.span(&source.text, start);
            let window = window(&source.text, &line, start);
            let shown = &source.text[window.clone()];
            // A problem of several lines is shown at its first.
            let end = floor(&source.text, span.end).clamp(start, window.end.max(start));
            let spot = (start.min(window.end) - window.start)..(end.min(window.end) - window.start);
            let snippet =
                Snippet::source(shown).line_start(lines.number(start)).annotation(AnnotationKind::Primary.span(spot));
            group = if window.start == line.start {
                group.element(snippet.path(&source.name))
            } else {
                let column = source.text[line.start..start.min(line.end)].chars().count() + 1;
                let origin = Origin::path(&source.name).line(lines.number(start)).char_column(column);
                group.element(origin).element(snippet)
            };
        }
        None => group = group.element(Origin::path(&source.name)),
    }
    match &problem.help {
        Some(help) => group.element(Level::HELP.message(help)),
        None => group,
    }
}

/// The part of a line that is shown around a byte of it.
fn window(text: &str, line: &Range<usize>, at: usize) -> Range<usize> {
    if line.len() <= LINE_SHOWN_MAX {
        return line.clone();
    }
    let start = floor(text, at.saturating_sub(LINE_SHOWN_MAX / 3).max(line.start));
    start..floor(text, (start + LINE_SHOWN_MAX).min(line.end))
}

/// The nearest character boundary at or before a byte.
fn floor(text: &str, at: usize) -> usize {
    let at = at.min(text.len());
    (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::read;

    fn check(text: &str) -> String {
        let source = Source { name: "cfg.toml".to_owned(), text: text.to_owned() };
        match read::parse(&source) {
            Ok(config) => format!("{} tests, fine", config.tests.len()),
            Err(problems) => {
                let report = render(&source, &problems);
                assert!(report.starts_with("error"));
                report
            }
        }
    }

    #[test]
    fn a_file_with_many_kinds_of_problems_reports_all_of_them() {
        let report = check(
            r#"backend = "hipp"
iterations = 5

[run]
iteratons = 3
warmups = "3"
seconds = 5
iterations = 7

[data]
bytes = { from = "8M", to = "1M" }
byte_offset = 3
deadline_seconds = 5

[nowhere]
unroll = 4

[[test]]
name = ""
sub_executor = 4
backend = "host"
transfers = ["R0G0 -> R0X0 -> R1G0", { src = ["G0"], dst = ["G0"] }]
expect = { min_gpbs = 1 }
"#,
        );
        insta::assert_snapshot!(report, @r##"
error: backend: "hipp" is not one of auto, hip, cuda, host
 --> cfg.toml:1:11
  |
1 | backend = "hipp"
  |           ^^^^^^

error: "iterations" belongs into a section
 --> cfg.toml:2:1
  |
2 | iterations = 5
  | ^^^^^^^^^^
  |
  = help: write it under [run]

error: unknown key "iteratons" in [run]
 --> cfg.toml:5:1
  |
5 | iteratons = 3
  | ^^^^^^^^^
  |
  = help: did you mean iterations?

error: warmups: expected a whole number, found a string
 --> cfg.toml:6:11
  |
6 | warmups = "3"
  |           ^^^

error: seconds replaces iterations: give one of them
 --> cfg.toml:7:1
  |
7 | seconds = 5
  | ^^^^^^^

error: bytes: a sweep from 8 MiB to 1 MiB is empty: from has to be the smaller one
  --> cfg.toml:11:9
   |
11 | bytes = { from = "8M", to = "1M" }
   |         ^^^^^^^^^^^^^^^^^^^^^^^^^^

error: byte_offset: 3 B is not a multiple of 4
  --> cfg.toml:12:15
   |
12 | byte_offset = 3
   |               ^

error: unknown key "deadline_seconds" in [data]
  --> cfg.toml:13:1
   |
13 | deadline_seconds = 5
   | ^^^^^^^^^^^^^^^^
   |
   = help: it belongs under [run]

error: unknown section [nowhere]
  --> cfg.toml:15:2
   |
15 | [nowhere]
   |  ^^^^^^^
   |
   = help: known: [ranks], [run], [data], [validate], [cpu], [gfx], [tdm], [dma], [host], [output], [[test]]

error: the name of a test is empty
  --> cfg.toml:19:8
   |
19 | name = ""
   |        ^^

error: unknown key "sub_executor" in [[test]]
  --> cfg.toml:20:1
   |
20 | sub_executor = 4
   | ^^^^^^^^^^^^
   |
   = help: did you mean sub_executors?

error: "backend" is the same for all tests
  --> cfg.toml:21:1
   |
21 | backend = "host"
   | ^^^^^^^
   |
   = help: write it at the top

error: expected a letter of executor (C G D B T M I N)
  --> cfg.toml:22:25
   |
22 | transfers = ["R0G0 -> R0X0 -> R1G0", { src = ["G0"], dst = ["G0"] }]
   |                         ^

error: a transfer needs exe, such as exe = "R0G0"
  --> cfg.toml:22:38
   |
22 | transfers = ["R0G0 -> R0X0 -> R1G0", { src = ["G0"], dst = ["G0"] }]
   |                                      ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

error: unknown key "min_gpbs" in expect
  --> cfg.toml:23:12
   |
23 | expect = { min_gpbs = 1 }
   |            ^^^^^^^^
   |
   = help: did you mean min_gbps?

15 problems in cfg.toml
"##);
    }

    #[test]
    fn a_syntax_error_does_not_hide_the_other_lines() {
        insta::assert_snapshot!(check("[run]\nwarmups = 3 4\nsub_iterations = 0\n[[test]]\ntransfers = [\"G0 -> G0\"]\n"), @r##"
error: string values must be quoted, expected literal string
 --> cfg.toml:2:11
  |
2 | warmups = 3 4
  |           ^^^

error: sub_iterations: "0" is not a whole number from 1 to 4294967295
 --> cfg.toml:3:18
  |
3 | sub_iterations = 0
  |                  ^

error: a transfer has three parts, SRC -> EXE -> DST; found 2
 --> cfg.toml:5:15
  |
5 | transfers = ["G0 -> G0"]
  |               ^^^^^^^^

3 problems in cfg.toml
"##);
    }

    #[test]
    fn duplicate_keys_are_named() {
        insta::assert_snapshot!(check("[run]\nwarmups = 1\nwarmups = 2\n[run]\n"), @r##"
error: duplicate key
 --> cfg.toml:3:1
  |
3 | warmups = 2
  | ^^^^^^^

error: duplicate key
 --> cfg.toml:4:2
  |
4 | [run]
  |  ^^^

2 problems in cfg.toml
"##);
    }

    #[test]
    fn a_file_without_tests_says_how_to_write_one() {
        insta::assert_snapshot!(check(""), @r##"
error: there is no [[test]], so nothing would run
--> cfg.toml
 = help: add [[test]] with transfers = ["R0C0 -> R0C0 -> R1C0"]

1 problem in cfg.toml
"##);
    }

    #[test]
    fn tests_of_the_wrong_shape_say_the_right_one() {
        insta::assert_snapshot!(check("run = 5\n[test]\nname = \"x\"\n"), @r##"
error: run is a section, found an integer
 --> cfg.toml:1:1
  |
1 | run = 5
  | ^^^
  |
  = help: write its keys under [run]

error: a test is one of a list
 --> cfg.toml:2:1
  |
2 | [test]
  | ^^^^^^
  |
  = help: write [[test]] with two brackets

2 problems in cfg.toml
"##);
        insta::assert_snapshot!(check("test = [1, { pattern = \"a2a\" }, { transfers = [] }, {}]\n"), @r##"
error: expected a test, found an integer
 --> cfg.toml:1:9
  |
1 | test = [1, { pattern = "a2a" }, { transfers = [] }, {}]
  |         ^
  |
  = help: write each test under its own [[test]]

error: unknown pattern "a2a"
 --> cfg.toml:1:24
  |
1 | test = [1, { pattern = "a2a" }, { transfers = [] }, {}]
  |                        ^^^^^
  |
  = help: known: rotation; or write the transfers as a list: * and ranges stand for many

error: the list of transfers is empty
 --> cfg.toml:1:47
  |
1 | test = [1, { pattern = "a2a" }, { transfers = [] }, {}]
  |                                               ^^

error: test "test 4" has no transfers
 --> cfg.toml:1:53
  |
1 | test = [1, { pattern = "a2a" }, { transfers = [] }, {}]
  |                                                     ^^
  |
  = help: add transfers = ["SRC -> EXE -> DST"]

4 problems in cfg.toml
"##);
    }

    #[test]
    fn marks_and_line_ends_of_other_systems_do_not_shift_the_caret() {
        insta::assert_snapshot!(check("\u{feff}bakend = 1\r\n[[test]]\r\ntransfers = [\"Gé\"]\r\n"), @r##"
error: unknown key "bakend"
 --> cfg.toml:1:1
  |
1 | bakend = 1
  | ^^^^^^
  |
  = help: did you mean backend?

error: a transfer has three parts, SRC -> EXE -> DST; found 1
 --> cfg.toml:3:15
  |
3 | transfers = ["Gé"]
  |               ^^

2 problems in cfg.toml
"##);
    }

    #[test]
    fn zero_bytes_and_escapes_are_shown_harmlessly() {
        let report = check("x\u{0} = 1\n\"\\u001b[31m\" = 2\n");
        assert!(!report.contains(['\u{0}', '\u{1b}']), "{report}");
    }

    #[test]
    fn long_lines_are_cut_around_the_spot() {
        let text = format!(
            "[[test]]\ntransfers = [{}\"bad\"{}]\n",
            "\"G0 G0 G0\",".repeat(50),
            ",\"G0 G0 G0\"".repeat(50_000)
        );
        let report = check(&text);
        assert!(report.len() < 1000, "{report}");
        assert!(report.contains("cfg.toml:2:565") && report.contains("\"bad\""), "{report}");
    }

    #[test]
    fn large_and_deep_files_take_linear_time() {
        let many = format!("[[test]]\ntransfers = [\n{}]\n", "\"G0 -> G0 -> G1\",\n".repeat(20_000));
        assert_eq!(check(&many), "1 tests, fine");
        let tests = "[[test]]\ntransfers = [\"G0 -> G0 -> G1\"]\nbytes = 4\n".repeat(5_000);
        assert_eq!(check(&tests), "5000 tests, fine");
        let bad = format!("[[test]]\ntransfers = [\n{}]\n", "\"G0 -> G0 -> X1\",\n".repeat(2_000));
        assert!(check(&bad).ends_with("2000 problems in cfg.toml"));
        for deep in
            ["[".repeat(100_000), format!("a = {}", "[".repeat(100_000)), format!("a = {}", "{a=".repeat(50_000))]
        {
            assert!(check(&deep).contains("cfg.toml:1"));
        }
        let key = format!("{} = 1\n{TEST}", "k".repeat(1 << 20));
        assert!(check(&key).len() < 2000);
        let dotted = format!("{}a = 1\n{TEST}", "a.".repeat(1 << 16));
        assert!(check(&dotted).len() < 2000);
    }

    const TEST: &str = "[[test]]\ntransfers = [\"G0 -> G0 -> G1\"]\n";

    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_text_is_read_or_reported(text in any::<String>()) {
            check(&text);
        }

        #[test]
        fn broken_configs_are_read_or_reported(text in "(\\[|\\]|\\[\\[test\\]\\]|\n|=|\"|\\{|\\}|,|é| |data|run|bytes|from|to|transfers|G0|->|4K|-1|name){0,60}") {
            check(&text);
        }
    }
}

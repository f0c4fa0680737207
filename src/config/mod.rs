//! What the user asked for: settings, tests and transfers, with where each was written.

pub mod options;
mod table;
pub mod value;

pub mod settings;
pub mod settle;

pub mod notation;
mod numbers;

pub mod patterns;
pub mod read;
pub mod tests_table;

pub mod diagnose;
pub mod load;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::units::Bytes;
use notation::{ExePiece, MemPiece};
use patterns::PatternConfig;
use settings::FileLayer;

/// A config file: its name as messages show it, and what it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub name: String,
    pub text: String,
}

/// Something wrong with a config, where, and the way out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub message: String,
    /// Bytes of the source; none where something is missing.
    pub span: Option<Range<usize>>,
    pub help: Option<String>,
}

/// A config without problems of its own; whether the job's machines can do it is the plan's question.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub file: FileLayer,
    /// At least one.
    pub tests: Vec<TestConfig>,
}

/// One `[[test]]`.
#[derive(Clone, Debug, PartialEq)]
pub struct TestConfig {
    pub name: String,
    /// Of its header.
    pub span: Range<usize>,
    /// Its own settings: dotted key, canonical value, line.
    pub overrides: Vec<(String, String, usize)>,
    /// At least one, or none where a pattern makes them.
    pub transfers: Vec<TransferConfig>,
    pub pattern: Option<PatternConfig>,
    pub expect: Option<Expect>,
}

/// Bounds of the rate of each transfer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Expect {
    pub min_gbps: Option<f64>,
    pub max_gbps: Option<f64>,
}

/// A transfer as written, before expansion.
#[derive(Clone, Debug, PartialEq)]
pub struct TransferConfig {
    pub srcs: Vec<MemPiece>,
    pub exe: ExePiece,
    pub dsts: Vec<MemPiece>,
    /// Its own size, in place of `data.bytes`.
    pub bytes: Option<Bytes>,
    pub sub_executors: Option<u32>,
    pub span: Range<usize>,
    /// As written, or in the notation where it was written as a table.
    pub text: String,
}

impl Source {
    /// # Errors
    /// Names the line and column of the first byte that is not UTF-8.
    pub fn new(name: impl Into<String>, bytes: Vec<u8>) -> Result<Source, String> {
        let name = name.into();
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Source { name, text }),
            Err(err) => {
                let valid = String::from_utf8_lossy(&err.as_bytes()[..err.utf8_error().valid_up_to()]);
                let line = valid.matches('\n').count() + 1;
                let column = valid.rsplit('\n').next().map_or(0, |last| last.chars().count()) + 1;
                Err(format!("{name}:{line}:{column}: not UTF-8 text: save the file as UTF-8"))
            }
        }
    }
}

impl Problem {
    pub fn at(span: Range<usize>, message: impl Into<String>) -> Problem {
        Problem { message: message.into(), span: Some(span), help: None }
    }

    pub fn with_help(mut self, help: impl Into<String>) -> Problem {
        self.help = Some(help.into());
        self
    }
}

/// What some editors put in front of UTF-8 text.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// Where the lines of a text start.
pub(crate) struct Lines {
    starts: Vec<usize>,
}

impl Lines {
    pub(crate) fn of(text: &str) -> Lines {
        let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        Lines { starts }
    }

    /// The number of the line that holds a byte, from 1.
    pub(crate) fn number(&self, at: usize) -> usize {
        self.starts.partition_point(|start| *start <= at)
    }

    /// The bytes of the line that holds a byte, without its end.
    pub(crate) fn span(&self, text: &str, at: usize) -> Range<usize> {
        let number = self.number(at);
        let start = match self.starts[number - 1] {
            0 if text.starts_with(BYTE_ORDER_MARK) => BYTE_ORDER_MARK.len_utf8(),
            start => start,
        };
        let end = self.starts.get(number).map_or(text.len(), |next| next - 1);
        start..end.max(start) - usize::from(text[start..end.max(start)].ends_with('\r'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_not_utf8_are_located() {
        let error = Source::new("cfg.toml", b"a = 1\nb\xc3\xa9 = \"\xff\"\n".to_vec()).unwrap_err();
        assert_eq!(error, "cfg.toml:2:7: not UTF-8 text: save the file as UTF-8");
    }

    #[test]
    fn lines_are_found_by_any_of_their_bytes() {
        let text = "ab\r\n\nc";
        let lines = Lines::of(text);
        let shown: Vec<_> = (0..=6).map(|at| (lines.number(at), &text[lines.span(text, at)])).collect();
        assert_eq!(shown, [(1, "ab"), (1, "ab"), (1, "ab"), (1, "ab"), (2, ""), (3, "c"), (3, "c")]);
    }
}

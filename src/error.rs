//! What can go wrong, who it went wrong for, and the exit code that says so.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::units::Rank;

/// The exit codes of the program; the numbers are part of its interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ExitCode {
    Fine = 0,
    Other = 1,
    Usage = 2,
    /// The config or the plan was rejected, or the ranks disagree.
    Rejected = 3,
    PhaseFailed = 4,
    DataMismatch = 5,
    BelowExpectation = 6,
    NothingRan = 7,
    Panic = 101,
    Deadline = 102,
}

/// The steps of a run, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    Hello,
    Settle,
    Inventory,
    Plan,
    Allocate,
    Share,
    Prepare,
    Run,
    Verify,
    Gather,
    Report,
    Release,
}

impl Phase {
    pub const ALL: [Phase; 12] = [
        Phase::Hello,
        Phase::Settle,
        Phase::Inventory,
        Phase::Plan,
        Phase::Allocate,
        Phase::Share,
        Phase::Prepare,
        Phase::Run,
        Phase::Verify,
        Phase::Gather,
        Phase::Report,
        Phase::Release,
    ];
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Phase::Hello => "hello",
            Phase::Settle => "settle",
            Phase::Inventory => "inventory",
            Phase::Plan => "plan",
            Phase::Allocate => "allocate",
            Phase::Share => "share",
            Phase::Prepare => "prepare",
            Phase::Run => "run",
            Phase::Verify => "verify",
            Phase::Gather => "gather",
            Phase::Report => "report",
            Phase::Release => "release",
        };
        f.pad(name)
    }
}

/// A failure of one local step on one rank: what, its value, and the way out.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[error("{message}")]
pub struct Error {
    message: String,
    exit: ExitCode,
    /// Nothing more can run on this rank (a broken device context).
    broken: bool,
}

impl Error {
    /// A failure of a phase on this machine (exit code 4).
    pub fn new(message: impl Into<String>) -> Error {
        Error { message: message.into(), exit: ExitCode::PhaseFailed, broken: false }
    }

    /// A config or plan that was refused (exit code 3).
    pub fn rejected(message: impl Into<String>) -> Error {
        Error { message: message.into(), exit: ExitCode::Rejected, broken: false }
    }

    pub fn with_exit(mut self, exit: ExitCode) -> Error {
        self.exit = exit;
        self
    }

    /// Marks that no later test can run on this rank either.
    pub fn broken(mut self) -> Error {
        self.broken = true;
        self
    }

    /// Puts what was being done in front: "map source 0 of transfer 3: out of memory".
    pub fn context(mut self, what: impl fmt::Display) -> Error {
        self.message = format!("{what}: {}", self.message);
        self
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub fn exit(&self) -> ExitCode {
        self.exit
    }

    pub fn is_broken(&self) -> bool {
        self.broken
    }
}

impl From<std::io::Error> for Error {
    fn from(err: std::io::Error) -> Error {
        Error::new(err.to_string())
    }
}

impl From<rustix::io::Errno> for Error {
    fn from(err: rustix::io::Errno) -> Error {
        std::io::Error::from(err).into()
    }
}

/// One rank's part in a failure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankError {
    pub rank: Rank,
    pub host: String,
    pub error: Error,
}

/// The same on every rank: a phase that at least one rank could not finish.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    pub phase: Phase,
    /// At least one, in rank order.
    pub ranks: Vec<RankError>,
}

impl Failure {
    /// The code with which every rank leaves: that of the first failed rank.
    pub fn exit(&self) -> ExitCode {
        self.ranks.first().map_or(ExitCode::Other, |part| part.error.exit())
    }

    /// Whether later tests have to be given up too.
    pub fn is_broken(&self) -> bool {
        self.ranks.iter().any(|part| part.error.is_broken())
    }
}

/// A message that fits the failed ranks: one rank is named on the line, equal messages are folded.
impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut groups: Vec<(&str, Vec<&RankError>)> = Vec::new();
        for part in &self.ranks {
            match groups.iter_mut().find(|(message, _)| *message == part.error.message()) {
                Some((_, parts)) => parts.push(part),
                None => groups.push((part.error.message(), vec![part])),
            }
        }
        for (i, (message, parts)) in groups.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            if message.starts_with("error") {
                // Already a whole report (config problems, settings that differ).
                write!(f, "{}", message.trim_end())?;
                continue;
            }
            let first = parts[0];
            write!(f, "error: rank {} ({})", first.rank, first.host)?;
            match parts.len() - 1 {
                0 => {}
                1 => write!(f, " and 1 more rank")?,
                n => write!(f, " and {n} more ranks")?,
            }
            write!(f, " failed in {}: {message}", self.phase)?;
        }
        Ok(())
    }
}

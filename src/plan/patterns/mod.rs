//! Spells out patterns: each a pure function from its keys, the options and the world to tests.
//!
//! A pattern is a file here, a row in `config::patterns`, and, where its results make a table of
//! their own, a file in `report::text`.

mod rotation;
#[cfg(test)]
mod tests;

use super::expand::Expanded;
use crate::config::options::Options;
use crate::config::patterns::{Pattern, PatternConfig};
use crate::units::Bytes;
use crate::world::World;

/// One test of a pattern; its options say at which sizes and rotations it is repeated.
#[derive(Clone, Debug, PartialEq)]
pub struct PatternTest {
    /// What it is within the pattern: "pull".
    pub part: String,
    pub options: Options,
    pub transfers: Vec<PatternTransfer>,
}

/// One transfer of a pattern, checked like one that was written.
#[derive(Clone, Debug, PartialEq)]
pub struct PatternTransfer {
    pub parts: Expanded,
    /// Its own size, in place of that of the sweep.
    pub bytes: Option<Bytes>,
    pub sub_executors: Option<u32>,
}

/// Why a pattern stands for nothing here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The key that it is about; none = the pattern as a whole.
    pub key: Option<&'static str>,
    pub message: String,
}

/// The tests that a pattern stands for; `options` are those of the test that asks for it.
///
/// # Errors
/// What the world or the options do not give.
pub fn tests(config: &PatternConfig, options: &Options, world: &World) -> Result<Vec<PatternTest>, Refusal> {
    match config.pattern {
        Pattern::Rotation => rotation::tests(config, options, world),
    }
}

//! Turns a config and the world into one checked plan, and cuts each rank's share out of it.

pub mod build;
pub mod caches;
pub mod check;
pub mod data;
pub mod expand;
pub mod limit;
pub mod local;
pub mod patterns;
pub mod placement;
pub mod rotation;
pub mod split;

use serde::{Deserialize, Serialize};

use crate::config::Expect;
use crate::config::options::Options;
use crate::place::{Executor, Place};
use crate::units::Bytes;
use rotation::Layout;

/// One transfer, checked: reads every source, adds them as float32, writes every destination.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    /// Position in its test.
    pub index: u32,
    /// Payload; a multiple of 4, not 0.
    pub bytes: Bytes,
    pub srcs: Vec<Place>,
    pub exe: Executor,
    pub dsts: Vec<Place>,
    pub sub_executors: u32,
    /// Largest cache that its reads pass; 0 = unknown.
    pub cache: Bytes,
    /// Shape of every source buffer.
    pub src: Layout,
    /// Shape of every destination buffer.
    pub dst: Layout,
}

/// `R0C0 -> R0C0 -> R1C0`, with `N` for no source or no destination.
impl std::fmt::Display for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&format!("{} -> {} -> {}", places(&self.srcs), self.exe, places(&self.dsts)))
    }
}

fn places(places: &[Place]) -> String {
    match places {
        [] => "N".to_owned(),
        some => some.iter().map(Place::to_string).collect(),
    }
}

/// Where a test stands in the pattern that it comes of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PatternStep {
    /// Name of the pattern.
    pub name: String,
    /// Name that the config gives to all of it.
    pub test: String,
    /// What it is in the pattern: "pull".
    pub part: String,
}

/// A set of transfers run at the same time, with the settings in force for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedTest {
    pub name: String,
    /// Where it stands in a pattern, if it comes of one.
    pub pattern: Option<PatternStep>,
    /// The size of the sweep that this test is one step of.
    pub bytes: Bytes,
    /// The rotation of the sweep that this test is one step of (after `auto` was resolved).
    pub src_rotate_bytes: Bytes,
    pub options: Options,
    /// What the test itself sets: dotted key and value, where environment and command line let it.
    pub own_settings: Vec<(String, String)>,
    pub transfers: Vec<Transfer>,
    pub expect: Option<Expect>,
    /// It repeats the test before it with twice the footprint, and has no result of its own.
    pub repeats: bool,
    /// Said with the results: idle sub-executors, settings without effect.
    pub warnings: Vec<String>,
}

/// What the job will run. Made by `build` alone, so holding one proves that it was checked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    tests: Vec<PlannedTest>,
}

impl Plan {
    pub fn tests(&self) -> &[PlannedTest] {
        &self.tests
    }
}

//! Measures memory transfers between the ranks of an MPI job, so that the figures can be trusted.
//!
//! Modules in reading order; ARCHITECTURE.md draws the map.

pub mod cli;
pub mod clock;
pub mod comm;
pub mod config;
pub mod error;
pub mod exec;
pub mod fault;
pub mod gpu;
pub mod measure;
pub mod memory;
pub mod place;
pub mod plan;
pub mod prepare;
pub mod region;
pub mod report;
pub mod session;
pub mod stats;
pub mod units;
pub mod verify;
pub mod world;

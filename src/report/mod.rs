//! Turns results into text, JSON and CSV; only rank 0 writes.

pub mod circumstances;
pub mod collect;
pub mod csv;
pub mod figure;
pub mod inflation;
pub mod json;
pub mod limits;
pub mod ranks;
pub mod results;
pub mod run;
pub mod text;
pub mod write;

#[cfg(test)]
pub(crate) mod fixtures;

//! Tests of the whole program: started as its users start it, the devices it drives, and the rules that its text keeps.

#![allow(clippy::unwrap_used)]

mod cli;
mod driver_suite;
mod faults;
#[cfg(feature = "hip")]
mod hip;
mod inflation;
mod kinds;
mod launch;
mod ranks;
mod tidy;

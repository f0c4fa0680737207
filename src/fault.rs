//! Fails, delays, drops or corrupts a chosen fallible call, so that tests reach every error path.
//!
//! Off unless `TB_FAULT` asks for it, and then every output says so.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::error::Error;
use crate::units::Rank;

/// What happens to the chosen call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Action {
    Fail,
    Panic,
    Delay(Duration),
    /// The call does nothing and says that it worked.
    Drop,
    /// The call works, then one bit of what it wrote is flipped.
    Corrupt,
}

/// What a call has to do when it is not failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hit {
    Go,
    Drop,
    Corrupt,
}

#[derive(Debug)]
struct Chosen {
    /// Counts only calls of this name; none = all.
    call: Option<String>,
    /// Which of the counted calls, from 0; none = never (counting only).
    nth: Option<u64>,
    action: Action,
    count: AtomicU64,
    struck: OnceLock<&'static str>,
}

/// The fault of one rank. Clones share their count; the default never does anything.
#[derive(Clone, Debug, Default)]
pub struct Faults(Option<Arc<Chosen>>);

impl Faults {
    /// Counts calls and lets them pass.
    pub fn counting() -> Faults {
        Faults::choose(None, None, Action::Fail)
    }

    /// Applies `action` to the `nth` call (from 0) of any name.
    pub fn nth(nth: u64, action: Action) -> Faults {
        Faults::choose(None, Some(nth), action)
    }

    /// Applies `action` to the `nth` call (from 0) named `call`.
    pub fn nth_of(call: &str, nth: u64, action: Action) -> Faults {
        Faults::choose(Some(call.to_owned()), Some(nth), action)
    }

    fn choose(call: Option<String>, nth: Option<u64>, action: Action) -> Faults {
        Faults(Some(Arc::new(Chosen { call, nth, action, count: AtomicU64::new(0), struck: OnceLock::new() })))
    }

    /// Reads `rank=1 call=allocate nth=0 do=fail`; parts may be left out except `do`, which is
    /// `fail`, `panic`, `drop`, `corrupt` or `delay:SECONDS`. For other ranks the result is inactive.
    ///
    /// # Errors
    /// Names the part that does not parse.
    pub fn parse(spec: &str, rank: Rank) -> Result<Faults, Error> {
        let bad = |part: &str| {
            Error::new(format!("TB_FAULT: \"{part}\" is not understood: write rank=N call=NAME nth=N do=fail|panic|drop|corrupt|delay:SECONDS")).with_exit(crate::error::ExitCode::Usage)
        };
        let (mut here, mut call, mut nth, mut action) = (true, None, 0, None);
        for part in spec.split_whitespace() {
            match part.split_once('=').ok_or_else(|| bad(part))? {
                ("rank", n) => here = n.parse::<u32>().map_err(|_| bad(part))? == rank.0,
                ("call", name) => call = Some(name.to_owned()),
                ("nth", n) => nth = n.parse().map_err(|_| bad(part))?,
                ("do", what) => {
                    action = Some(match what {
                        "fail" => Action::Fail,
                        "panic" => Action::Panic,
                        "drop" => Action::Drop,
                        "corrupt" => Action::Corrupt,
                        _ => {
                            let seconds = what.strip_prefix("delay:").and_then(|s| s.parse::<f64>().ok());
                            let delay = seconds.and_then(|s| Duration::try_from_secs_f64(s).ok());
                            Action::Delay(delay.ok_or_else(|| bad(part))?)
                        }
                    });
                }
                _ => return Err(bad(part)),
            }
        }
        let action = action.ok_or_else(|| bad(spec))?;
        Ok(if here { Faults::choose(call, Some(nth), action) } else { Faults::default() })
    }

    pub fn is_active(&self) -> bool {
        self.0.is_some()
    }

    /// Every fallible call passes here first, under its name.
    ///
    /// # Errors
    /// The injected failure.
    pub fn hit(&self, call: &'static str) -> Result<Hit, Error> {
        let Some(chosen) = &self.0 else { return Ok(Hit::Go) };
        if chosen.call.as_deref().is_some_and(|name| name != call) {
            return Ok(Hit::Go);
        }
        let n = chosen.count.fetch_add(1, Ordering::Relaxed);
        if chosen.nth != Some(n) {
            return Ok(Hit::Go);
        }
        chosen.struck.get_or_init(|| call);
        match chosen.action {
            Action::Fail => Err(Error::new(format!("injected fault in {call} (call {n})"))),
            Action::Panic => panic!("injected panic in {call} (call {n})"),
            Action::Delay(time) => {
                std::thread::sleep(time);
                Ok(Hit::Go)
            }
            Action::Drop => Ok(Hit::Drop),
            Action::Corrupt => Ok(Hit::Corrupt),
        }
    }

    /// Name of the call that the action was applied to.
    pub fn struck(&self) -> Option<&'static str> {
        self.0.as_ref()?.struck.get().copied()
    }

    /// Calls counted so far.
    pub fn calls(&self) -> u64 {
        self.0.as_ref().map_or(0, |chosen| chosen.count.load(Ordering::Relaxed))
    }
}

//! The phase that checks every destination and source that this rank owns.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::mismatch::Mismatch;
use super::{Check, Way, destination, device::DeviceCheck, source, way};
use crate::comm::watch::Watch;
use crate::config::options::Validate;
use crate::error::{Error, ExitCode};
use crate::exec::Executions;
use crate::measure::Measured;
use crate::memory::Memory;
use crate::place::Place;
use crate::plan::local::OwnBuffer;
use crate::prepare::Prepared;
use crate::prepare::owned::Owned;

/// What this rank found in one of its destinations.
pub struct Verdict {
    pub transfer: u32,
    /// Position among the destinations.
    pub destination: u32,
    pub place: Place,
    /// The execution whose data were looked for.
    pub execution: u64,
    pub mismatch: Option<Mismatch>,
}

/// What was measured, with a verdict on every destination of this rank, or none if validation is off.
pub struct Verified<'m> {
    pub measured: Measured<'m>,
    pub verdicts: Vec<Verdict>,
    /// Checks that were done another way than asked for.
    pub warnings: Vec<String>,
}

impl From<Verified<'_>> for Memory {
    fn from(verified: Verified<'_>) -> Memory {
        verified.measured.into()
    }
}

/// Checks the destinations of this rank against the last sample. Local.
///
/// # Errors
/// Data that could not be read; wrong data are verdicts, not errors.
pub fn verify<'m>(measured: Measured<'m>, watch: &Watch) -> Result<Verified<'m>, (Error, Memory)> {
    if measured.prepared.options.always_validate == Validate::Never {
        return Ok(Verified { measured, verdicts: Vec::new(), warnings: Vec::new() });
    }
    let mut comparer = Comparer::new(&measured.prepared);
    let verdicts = comparer.verdicts(measured.last, watch);
    let warnings = comparer.warnings;
    match verdicts {
        Ok(verdicts) => Ok(Verified { measured, verdicts, warnings }),
        Err(error) => Err((error, measured.into())),
    }
}

/// Whether every destination of this rank holds what the sample should have written.
///
/// # Errors
/// Data that could not be read.
pub fn all_right(prepared: &Prepared, last: Executions, watch: &Watch) -> Result<bool, Error> {
    Ok(Comparer::new(prepared).verdicts(last, watch)?.iter().all(|verdict| verdict.mismatch.is_none()))
}

/// `validate_source`: checks the sources right after they were filled. Local.
///
/// # Errors
/// Names the first source with wrong data (exit code 5).
pub fn sources<'m>(prepared: Prepared<'m>, watch: &Watch) -> Result<Prepared<'m>, (Error, Memory)> {
    let check = || {
        let mut comparer = Comparer::new(&prepared);
        for own in prepared.sources() {
            watch.progress();
            let found = comparer.compare(own, source)?;
            if let Some(mismatch) = found {
                let what = format!("{} ({}) does not hold its data: {}", own.id, own.place, mismatch.what);
                return Err(Error::new(what).with_exit(ExitCode::DataMismatch));
            }
        }
        Ok(())
    };
    match check() {
        Ok(()) => Ok(prepared),
        Err(error) => Err((error, prepared.into())),
    }
}

/// Compares own buffers, on their devices or on the host.
struct Comparer<'p> {
    prepared: &'p Prepared<'p>,
    /// The check kernel of each device that was needed so far.
    on_device: BTreeMap<u32, DeviceCheck>,
    warnings: Vec<String>,
}

impl<'p> Comparer<'p> {
    fn new(prepared: &'p Prepared<'p>) -> Comparer<'p> {
        Comparer { prepared, on_device: BTreeMap::new(), warnings: Vec::new() }
    }

    fn verdicts(&mut self, last: Executions, watch: &Watch) -> Result<Vec<Verdict>, Error> {
        let mut verdicts = Vec::new();
        for own in self.prepared.destinations() {
            watch.progress();
            let mismatch = self
                .compare(own, |check| destination(check, last, own.src_slices))
                .map_err(|err| err.context(format!("{} on {}", own.id, own.place)))?;
            verdicts.push(Verdict {
                transfer: own.id.transfer,
                destination: own.id.ordinal,
                place: own.place,
                execution: last.first + u64::from(last.count) - 1,
                mismatch,
            });
        }
        Ok(verdicts)
    }

    fn compare<T>(&mut self, own: &OwnBuffer, compare: impl FnOnce(Check) -> Result<T, Error>) -> Result<T, Error> {
        let prepared = self.prepared;
        let region = prepared.memory.region(own.id);
        let machine = prepared.machine;
        let device = (!own.place.kind.is_host()).then(|| machine.device(own.place.index));
        let (way, warning) = way(prepared.options.validate_direct, &region, device.map(|device| device.info()));
        self.warnings.extend(warning.filter(|text| !self.warnings.contains(text)));
        if let (Way::Kernel, Some(device), Entry::Vacant(vacant)) = (way, device, self.on_device.entry(own.place.index))
        {
            let largest = prepared.plan.own.iter().map(|own| own.layout.bytes).max().unwrap_or(own.layout.bytes);
            vacant.insert(DeviceCheck::new(device.driver().clone(), device.id(), largest, &machine.faults)?);
        }
        let memory = match way {
            Way::Direct => Owned::by_cpu(&region, &machine.faults),
            Way::Copy | Way::Kernel => prepared.owned(own, &region),
        };
        let kernel = self.on_device.get(&own.place.index).filter(|_| way == Way::Kernel);
        compare(Check { reference: &prepared.reference, own, memory, kernel })
    }
}

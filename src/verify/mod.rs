//! Checks what destinations (and, if asked, sources) hold, by bytes, on the device or on the host.

mod compare;
pub mod device;
pub mod mismatch;
pub mod phase;

use crate::error::Error;
use crate::exec::Executions;
use crate::gpu::DeviceInfo;
use crate::plan::local::OwnBuffer;
use crate::prepare::owned::Owned;
use crate::prepare::reference::{DISTINCT_SLICES, Data, GUARD_BYTE, Reference};
use crate::region::{Region, Space};
use crate::units::Bytes;
use compare::{Account, Expected, Reader, Wanted};
use device::DeviceCheck;
use mismatch::Mismatch;

/// Parts that start this close together are read in one go.
const NEAR: u64 = 64 << 10;

/// How the bytes of a buffer are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By the CPU, where they lie.
    Direct,
    /// By the CPU, after a copy to the host.
    Copy,
    /// By a kernel of the device.
    Kernel,
}

/// The way for a buffer, and what to say if it is not the one asked for.
///
/// # Panics
/// If memory of a device comes without its `info`.
pub fn way(validate_direct: bool, region: &Region, info: Option<&DeviceInfo>) -> (Way, Option<String>) {
    let Space::Device { device, cpu } = region.space() else { return (Way::Direct, None) };
    if validate_direct {
        let refused = || {
            format!("validate_direct: the CPU cannot read memory of device {device}; it is compared after a host copy")
        };
        return if cpu { (Way::Direct, None) } else { (Way::Copy, Some(refused())) };
    }
    match &info.expect("device memory comes with its device").kernels_absent {
        None => (Way::Kernel, None),
        Some(why) => (
            Way::Copy,
            Some(format!("memory of device {device} is compared after a host copy: kernels cannot run there ({why})")),
        ),
    }
}

/// A buffer to check.
#[derive(Clone, Copy)]
pub struct Check<'a> {
    pub reference: &'a Reference,
    pub own: &'a OwnBuffer,
    /// By the CPU for `Way::Direct`, else by the driver.
    pub memory: Owned<'a>,
    /// For `Way::Kernel`: that of the buffer's device.
    pub kernel: Option<&'a DeviceCheck>,
}

/// Checks a destination after `sample`: every slice that the sample wrote, each against the
/// execution that wrote it last, then the guard zones and gaps. `src_slices` is the K of the
/// transfer's sources: execution n read slice n mod K.
///
/// # Errors
/// Names the buffer. Wrong data are no error, but the result.
pub fn destination(check: Check<'_>, sample: Executions, src_slices: u64) -> Result<Option<Mismatch>, Error> {
    let slices = check.own.layout.slices;
    let data = Data::Sum(check.own.sources);
    let wanted =
        sample.last_on_each(slices).map(|n| Wanted { data, slice: n % src_slices, of: src_slices, at: n % slices });
    let poison = check.reference.poison(check.own.sources);
    let mut comparison = Comparison::new(check, "read_destination", Some(poison));
    let found = comparison.slices(wanted).and_then(|wrong| Ok((wrong, comparison.guards()?)));
    let (wrong, outside) = found.map_err(|err| err.context(format!("verify {}", check.own.id)))?;
    Ok(Mismatch::join(wrong, outside))
}

/// Checks every slice of a source, right after it was filled.
///
/// # Errors
/// Names the buffer. Wrong data are no error, but the result.
pub fn source(mut check: Check<'_>) -> Result<Option<Mismatch>, Error> {
    let layout = &check.own.layout;
    // Many small slices are compared faster after one copy than by a launch each.
    check.kernel = check.kernel.filter(|_| layout.stride.0 > NEAR || layout.slices == 1);
    let data = Data::Source(check.own.id.ordinal);
    let wanted = (0..layout.slices).map(|k| Wanted { data, slice: k, of: layout.slices, at: k });
    let found = Comparison::new(check, "read_source", None).slices(wanted);
    found.map_err(|err| err.context(format!("verify {}", check.own.id)))
}

struct Comparison<'a> {
    check: Check<'a>,
    /// What the buffer held before it was written.
    poison: Option<u8>,
    reader: Reader<'a>,
    expected: Expected<'a>,
    /// What the device's scratch memory holds, apart from what the host compares with.
    uploaded: Expected<'a>,
}

impl<'a> Comparison<'a> {
    fn new(check: Check<'a>, call: &'static str, poison: Option<u8>) -> Comparison<'a> {
        Comparison {
            check,
            poison,
            reader: Reader::new(check.memory, call),
            expected: Expected::new(check.reference),
            uploaded: Expected::new(check.reference),
        }
    }

    /// The first wrong slice, with the wrong bytes of all.
    fn slices(&mut self, wanted: impl Iterator<Item = Wanted> + Clone) -> Result<Option<Mismatch>, Error> {
        let (all, mut bad) = (wanted.clone().count(), 0);
        let mut found: Option<Mismatch> = None;
        for wanted in wanted {
            if let Some(next) = self.slice(wanted, all > 1)? {
                bad += 1;
                match &mut found {
                    Some(first) => first.wrong_bytes += next.wrong_bytes,
                    None => found = Some(next),
                }
            }
        }
        if let (Some(first), 2..) = (&mut found, bad) {
            first.what += &format!("; {bad} of {all} slices are wrong");
        }
        Ok(found)
    }

    fn slice(&mut self, wanted: Wanted, more: bool) -> Result<Option<Mismatch>, Error> {
        let layout = self.check.own.layout;
        let offset = layout.slice_offset(wanted.at);
        let mut seen_by_device = 0;
        if let Some(kernel) = self.check.kernel {
            seen_by_device = kernel.compare(self.check.memory, &mut self.uploaded, wanted, offset, layout.bytes)?;
            if seen_by_device == 0 {
                return Ok(None);
            }
        }
        let body_end = layout.lead.0 + layout.footprint().0;
        self.reader.until = if more && layout.stride.0 <= NEAR { body_end } else { offset + layout.bytes.0 };
        let account = self.account(wanted)?;
        let what = if account.wrong_bytes > 0 {
            self.describe(wanted, account)?
        } else if seen_by_device > 0 {
            "differs where the device's kernel reads it, but not in a copy read by the host".to_owned()
        } else {
            return Ok(None);
        };
        let what = if layout.slices > 1 { format!("slice {}: {what}", wanted.at) } else { what };
        let wrong_bytes = if account.wrong_bytes > 0 { account.wrong_bytes } else { seen_by_device };
        Ok(Some(Mismatch { first: account.first, wrong_bytes, what }))
    }

    fn account(&mut self, wanted: Wanted) -> Result<Account, Error> {
        let layout = &self.check.own.layout;
        let place = (layout.slice_offset(wanted.at), layout.bytes);
        compare::account(&mut self.reader, &mut self.expected, wanted, place, self.poison)
    }

    /// Says what wrong data look like.
    fn describe(&mut self, wanted: Wanted, account: Account) -> Result<String, Error> {
        let (wrong, all) = (account.wrong_elements, account.elements);
        if account.poisoned == all {
            return Ok("nothing was written".to_owned());
        }
        if account.zero == all {
            return Ok("all zero".to_owned());
        }
        if let Some(slice) = self.other_slice(wanted, account)? {
            return Ok(format!("holds slice {slice}, expected slice {}", wanted.slice));
        }
        Ok(match account {
            Account { poisoned, .. } if poisoned == wrong => format!("{wrong} of {all} elements were not written"),
            Account { zero, .. } if zero == wrong => format!("{wrong} of {all} elements are zero instead"),
            Account { poisoned: 0, .. } => format!("{wrong} of {all} elements are wrong"),
            Account { poisoned, .. } => {
                format!("{wrong} of {all} elements are wrong, {poisoned} of them were not written")
            }
        })
    }

    /// The slice whose data these are, where slices are distinct.
    fn other_slice(&mut self, wanted: Wanted, seen: Account) -> Result<Option<u64>, Error> {
        let (true, Some(first)) = (self.check.reference.is_distinct(), seen.first) else { return Ok(None) };
        for slice in (0..wanted.of.min(DISTINCT_SLICES)).filter(|&slice| slice != wanted.slice) {
            let mut element = [0; 4];
            self.check.reference.write(wanted.data, slice, first.element, &mut element);
            let matches = u32::from_ne_bytes(element) == first.actual;
            if matches && self.account(Wanted { slice, ..wanted })?.wrong_bytes == 0 {
                return Ok(Some(slice));
            }
        }
        Ok(None)
    }

    /// Bytes changed before, between and after the slices.
    fn guards(&mut self) -> Result<Option<Mismatch>, Error> {
        let layout = self.check.own.layout;
        let gap = layout.stride.0 - layout.bytes.0;
        let (end, total) = (layout.lead.0 + layout.footprint().0, layout.total().0);
        let between = if gap > 0 { layout.slices - 1 } else { 0 };
        let zones = std::iter::once((0, layout.lead.0, Zone::Before))
            .chain((0..between).map(|k| (layout.slice_offset(k) + layout.bytes.0, gap, Zone::Between(k))))
            .chain(std::iter::once((end - gap, gap + layout.tail.0, Zone::After)));
        let (mut found, mut gaps) = (Vec::new(), 0);
        let mut wrong_bytes = 0;
        for (offset, bytes, zone) in zones {
            self.reader.until = if between > 0 && layout.stride.0 <= NEAR { total } else { offset + bytes };
            let changed = self.reader.count_other(offset, Bytes(bytes), GUARD_BYTE)?;
            if changed == 0 {
                continue;
            }
            wrong_bytes += changed;
            let plural = if changed == 1 { "" } else { "s" };
            match zone {
                Zone::Before => found.push(format!("wrote {changed} byte{plural} before the destination")),
                Zone::Between(k) => {
                    gaps += 1;
                    // Every one of a million gaps may be hit: the first is named, the others counted.
                    if gaps == 1 {
                        found.push(format!("wrote {changed} byte{plural} between slices {k} and {}", k + 1));
                    }
                }
                Zone::After => found.push(format!("wrote {changed} byte{plural} after the destination")),
            }
        }
        if gaps > 1 {
            found.push(format!("wrote into {gaps} of {between} gaps between slices"));
        }
        let what = found.join("; ");
        Ok((wrong_bytes > 0).then_some(Mismatch { first: None, wrong_bytes, what }))
    }
}

enum Zone {
    Before,
    /// Behind this slice.
    Between(u64),
    After,
}

#[cfg(test)]
mod tests;

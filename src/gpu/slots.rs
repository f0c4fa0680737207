//! Handles of a runtime by small numbers: read without a lock inside the timed part, and checked.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::DeviceId;
use crate::error::Error;

/// More streams or events than any plan has: a transfer takes at most three of them.
const CAPACITY: usize = 1 << 16;

/// Streams or events of one driver.
pub struct Slots {
    what: &'static str,
    slots: Box<[Slot]>,
    unused: Mutex<Vec<u32>>,
}

#[derive(Default)]
struct Slot {
    /// Null: unused.
    raw: AtomicPtr<c_void>,
    device: AtomicU32,
}

impl Slots {
    /// `what` is in the messages: "stream".
    pub fn new(what: &'static str) -> Slots {
        let slots = (0..CAPACITY).map(|_| Slot::default()).collect();
        Slots { what, slots, unused: Mutex::new((0..CAPACITY as u32).rev().collect()) }
    }

    fn unused(&self) -> MutexGuard<'_, Vec<u32>> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// If there are too many; the handle is the caller's to destroy.
    pub fn insert<T>(&self, device: DeviceId, raw: *mut T) -> Result<u64, Error> {
        let index = self.unused().pop();
        let index = index.ok_or_else(|| Error::new(format!("more than {CAPACITY} {}s at a time", self.what)))?;
        let slot = &self.slots[index as usize];
        slot.device.store(device.0, Ordering::Relaxed);
        slot.raw.store(raw.cast(), Ordering::Release);
        Ok(u64::from(index))
    }

    /// # Errors
    /// If it was destroyed, or never created.
    pub fn get<T>(&self, id: u64) -> Result<(DeviceId, *mut T), Error> {
        let slot = usize::try_from(id).ok().and_then(|index| self.slots.get(index));
        let raw = slot.map_or(ptr::null_mut(), |slot| slot.raw.load(Ordering::Acquire));
        match slot {
            Some(slot) if !raw.is_null() => Ok((DeviceId(slot.device.load(Ordering::Relaxed)), raw.cast())),
            _ => Err(self.absent(id)),
        }
    }

    /// Takes it out; of two who do so at once, one gets it.
    ///
    /// # Errors
    /// If it was destroyed, or never created.
    pub fn remove<T>(&self, id: u64) -> Result<(DeviceId, *mut T), Error> {
        let (device, _) = self.get::<T>(id)?;
        let raw = self.slots[id as usize].raw.swap(ptr::null_mut(), Ordering::AcqRel);
        if raw.is_null() {
            return Err(self.absent(id));
        }
        self.unused().push(id as u32);
        Ok((device, raw.cast()))
    }

    fn absent(&self, id: u64) -> Error {
        Error::new(format!("{} {id} does not exist: destroyed, or never created", self.what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_found_until_it_is_removed() {
        let slots = Slots::new("stream");
        let (mut a, mut b) = (1, 2);
        let first = slots.insert(DeviceId(3), &raw mut a).unwrap();
        let second = slots.insert(DeviceId(4), &raw mut b).unwrap();
        assert_eq!(slots.get(first), Ok((DeviceId(3), &raw mut a)));
        assert_eq!(slots.remove(first), Ok((DeviceId(3), &raw mut a)));
        assert!(slots.get::<i32>(first).unwrap_err().message().starts_with("stream 0 does not exist"));
        assert!(slots.remove::<i32>(first).is_err());
        assert_eq!(slots.get(second), Ok((DeviceId(4), &raw mut b)));
        assert!(slots.get::<i32>(u64::MAX).is_err());
    }

    #[test]
    fn slots_are_used_again_and_end() {
        let slots = Slots::new("event");
        let mut x = 0;
        let ids: Vec<u64> = (0..CAPACITY).map(|_| slots.insert(DeviceId(0), &raw mut x).unwrap()).collect();
        assert!(slots.insert(DeviceId(0), &raw mut x).is_err());
        slots.remove::<i32>(ids[7]).unwrap();
        assert_eq!(slots.insert(DeviceId(0), &raw mut x), Ok(ids[7]));
    }
}

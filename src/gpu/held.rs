//! What one driver of a real device runtime has allocated, imported and registered: runtimes tell
//! little of it, and a mistake with it corrupts memory instead of failing.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::DeviceId;
use crate::error::Error;
use crate::place::MemKind;
use crate::units::Bytes;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    pub device: DeviceId,
    pub kind: MemKind,
    pub bytes: Bytes,
    pub shareable: bool,
}

#[derive(Clone, Copy, Debug)]
struct Import {
    /// What the runtime opened; none where the address is used as it is.
    opened: Option<u64>,
    /// Opening what is open already gives the same address.
    times: u32,
}

/// Everything is found by its address.
#[derive(Default)]
pub struct Held {
    allocations: Mutex<BTreeMap<u64, Allocation>>,
    imports: Mutex<BTreeMap<(DeviceId, u64), Import>>,
    registrations: Mutex<BTreeMap<(u64, DeviceId), Bytes>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each is changed by single steps, so it is consistent after a panic too.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Held {
    pub fn add_allocation(&self, address: u64, allocation: Allocation) {
        lock(&self.allocations).insert(address, allocation);
    }

    /// # Errors
    /// If it is not the start of one of that device.
    pub fn take_allocation(&self, device: DeviceId, address: u64) -> Result<Allocation, Error> {
        let mut allocations = lock(&self.allocations);
        let known = allocations.get(&address).copied().filter(|allocation| allocation.device == device);
        let known = known.ok_or_else(|| absent(device, address))?;
        allocations.remove(&address);
        Ok(known)
    }

    /// # Errors
    /// If it is not the start of one of that device, or cannot be opened by others.
    pub fn shareable(&self, device: DeviceId, address: u64) -> Result<Allocation, Error> {
        let known = lock(&self.allocations).get(&address).copied().filter(|allocation| allocation.device == device);
        let known = known.ok_or_else(|| absent(device, address))?;
        if !known.shareable {
            return Err(Error::new(format!(
                "{address:#x} of device {} cannot be exported: allocate it as shareable",
                device.0
            )));
        }
        Ok(known)
    }

    /// Notes that `address` is open, as part of what the runtime `opened`.
    pub fn add_import(&self, device: DeviceId, address: u64, opened: Option<u64>) {
        let mut imports = lock(&self.imports);
        imports.entry((device, address)).or_insert(Import { opened, times: 0 }).times += 1;
    }

    /// What the runtime has to close.
    ///
    /// # Errors
    /// If it is not open.
    pub fn take_import(&self, device: DeviceId, address: u64) -> Result<Option<u64>, Error> {
        let mut imports = lock(&self.imports);
        let known = imports.get_mut(&(device, address)).ok_or_else(|| {
            Error::new(format!(
                "{address:#x} is not the start of an open import of device {}: closed twice, or never imported",
                device.0
            ))
        })?;
        known.times -= 1;
        let Import { opened, times } = *known;
        if times == 0 {
            imports.remove(&(device, address));
        }
        Ok(opened)
    }

    /// Registers host memory with `device`; `register` is called unless the runtime knows the very
    /// range already for another device, since a runtime registers a range once for all of them.
    ///
    /// # Errors
    /// If it is registered with the device, or `register` fails.
    pub fn register(
        &self,
        device: DeviceId,
        address: u64,
        bytes: Bytes,
        register: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut registrations = lock(&self.registrations);
        if registrations.contains_key(&(address, device)) {
            let device = device.0;
            return Err(Error::new(format!(
                "host memory {address:#x} of {bytes} is already registered with device {device}"
            )));
        }
        if !self.allocated_on_host(address, bytes) && !others(&registrations, address).any(|known| known == bytes) {
            register()?;
        }
        registrations.insert((address, device), bytes);
        Ok(())
    }

    /// Ends a registration; `unregister` is called for the last one of the range.
    ///
    /// # Errors
    /// If it is not registered with the device, or `unregister` fails.
    pub fn unregister(
        &self,
        device: DeviceId,
        address: u64,
        unregister: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut registrations = lock(&self.registrations);
        registrations.remove(&(address, device)).ok_or_else(|| {
            Error::new(format!(
                "host memory {address:#x} is not registered with device {}: unregistered twice, or never registered",
                device.0
            ))
        })?;
        let stays = others(&registrations, address).next().is_some() || self.allocated_on_host(address, Bytes::ZERO);
        if stays { Ok(()) } else { unregister() }
    }

    /// Whether the runtime itself allocated that host memory: it is registered with every device.
    fn allocated_on_host(&self, address: u64, bytes: Bytes) -> bool {
        let allocations = lock(&self.allocations);
        allocations.get(&address).is_some_and(|known| known.kind.is_host() && bytes <= known.bytes)
    }

    /// Allocations that nobody freed.
    pub fn leftovers(&self) -> Vec<(u64, Allocation)> {
        std::mem::take(&mut *lock(&self.allocations)).into_iter().collect()
    }
}

fn others(registrations: &BTreeMap<(u64, DeviceId), Bytes>, address: u64) -> impl Iterator<Item = Bytes> {
    registrations.range((address, DeviceId(0))..=(address, DeviceId(u32::MAX))).map(|(_, bytes)| *bytes)
}

fn absent(device: DeviceId, address: u64) -> Error {
    Error::new(format!(
        "{address:#x} is not the start of a live allocation of device {}: freed twice, or never allocated",
        device.0
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const D0: DeviceId = DeviceId(0);
    const D1: DeviceId = DeviceId(1);

    #[test]
    fn an_allocation_is_freed_once_by_its_device() {
        let held = Held::default();
        let allocation = Allocation { device: D0, kind: MemKind::Device, bytes: Bytes(8), shareable: false };
        held.add_allocation(0x100, allocation);
        assert!(held.take_allocation(D1, 0x100).is_err());
        assert!(held.take_allocation(D0, 0x104).is_err());
        assert!(held.shareable(D0, 0x100).unwrap_err().message().contains("allocate it as shareable"));
        assert_eq!(held.take_allocation(D0, 0x100), Ok(allocation));
        assert!(held.take_allocation(D0, 0x100).is_err());
    }

    #[test]
    fn an_import_is_closed_as_often_as_it_was_opened() {
        let held = Held::default();
        held.add_import(D0, 0x300, Some(0x200));
        held.add_import(D0, 0x300, Some(0x200));
        held.add_import(D1, 0x300, None);
        assert_eq!(held.take_import(D0, 0x300), Ok(Some(0x200)));
        assert_eq!(held.take_import(D0, 0x300), Ok(Some(0x200)));
        assert!(held.take_import(D0, 0x300).is_err());
        assert_eq!(held.take_import(D1, 0x300), Ok(None));
    }

    #[test]
    fn a_range_is_registered_once_for_all_devices() {
        let held = Held::default();
        let calls = Cell::new((0, 0));
        let register = |device| {
            held.register(device, 0x100, Bytes(8), || {
                calls.set((calls.get().0 + 1, calls.get().1));
                Ok(())
            })
        };
        let unregister = |device| {
            held.unregister(device, 0x100, || {
                calls.set((calls.get().0, calls.get().1 + 1));
                Ok(())
            })
        };
        register(D0).unwrap();
        assert!(register(D0).is_err());
        register(D1).unwrap();
        assert_eq!(calls.get(), (1, 0));
        unregister(D0).unwrap();
        assert!(unregister(D0).is_err());
        assert_eq!(calls.get(), (1, 0));
        unregister(D1).unwrap();
        assert_eq!(calls.get(), (1, 1));
    }

    #[test]
    fn host_memory_of_the_runtime_is_registered_from_the_start() {
        let held = Held::default();
        let allocation = Allocation { device: D0, kind: MemKind::Coherent, bytes: Bytes(8), shareable: false };
        held.add_allocation(0x100, allocation);
        let never = || -> Result<(), Error> { panic!("the runtime is not asked") };
        held.register(D1, 0x100, Bytes(8), never).unwrap();
        assert!(held.register(D1, 0x100, Bytes(8), never).is_err());
        held.unregister(D1, 0x100, never).unwrap();
        assert!(held.unregister(D1, 0x100, never).is_err());
        // More than was allocated is for the runtime to judge.
        assert!(held.register(D1, 0x100, Bytes(9), || Err(Error::new("too long"))).is_err());
    }
}

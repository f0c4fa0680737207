//! Knows every address that an emulated device may touch, and how much memory is left.

use std::collections::{BTreeMap, BTreeSet};

use super::segment::{Locator, Segment};
use crate::error::Error;
use crate::gpu::DeviceId;
use crate::units::Bytes;

/// Who wants to touch an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// Copies and fills, which runtimes stage where devices cannot reach each other.
    Copy,
    /// Kernels, which need peer access to another device.
    Kernel,
}

/// Whose memory an allocation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Device,
    /// The host's: it takes nothing of a device, and every device reaches it.
    Host,
}

#[derive(Debug)]
struct Range {
    device: DeviceId,
    owner: Owner,
    bytes: Bytes,
    imported: bool,
    segment: Segment,
}

#[derive(Debug)]
struct Memory {
    total: Bytes,
    used: Bytes,
    peers: BTreeSet<DeviceId>,
}

/// Allocations, imports and registrations of one driver.
#[derive(Debug)]
pub struct Ledger {
    devices: Vec<Memory>,
    ranges: BTreeMap<u64, Range>,
    /// Host memory, by device and start.
    registered: BTreeMap<(DeviceId, u64), Bytes>,
}

impl Ledger {
    pub fn new(devices: u32, memory: Bytes) -> Ledger {
        let device = || Memory { total: memory, used: Bytes::ZERO, peers: BTreeSet::new() };
        Ledger {
            devices: (0..devices).map(|_| device()).collect(),
            ranges: BTreeMap::new(),
            registered: BTreeMap::new(),
        }
    }

    fn memory(&mut self, device: DeviceId) -> Result<&mut Memory, Error> {
        let count = self.devices.len();
        self.devices.get_mut(device.0 as usize).ok_or_else(|| absent(device, count))
    }

    /// # Errors
    /// If there is no such device.
    pub fn check(&self, device: DeviceId) -> Result<(), Error> {
        self.free_bytes(device).map(|_| ())
    }

    pub fn free_bytes(&self, device: DeviceId) -> Result<Bytes, Error> {
        let memory = self.devices.get(device.0 as usize).ok_or_else(|| absent(device, self.devices.len()))?;
        Ok(Bytes(memory.total.0 - memory.used.0))
    }

    pub fn enable_peer(&mut self, device: DeviceId, peer: DeviceId) -> Result<(), Error> {
        self.check(peer)?;
        if device == peer {
            return Err(Error::new(format!("device {} is no peer of itself", device.0)));
        }
        self.memory(device)?.peers.insert(peer);
        Ok(())
    }

    pub fn allocate(&mut self, device: DeviceId, owner: Owner, bytes: Bytes, shareable: bool) -> Result<u64, Error> {
        let free = self.free_bytes(device)?;
        let page = rustix::param::page_size() as u64;
        if owner == Owner::Device && bytes.round_up(page).is_none_or(|rounded| rounded > free) {
            let total = self.memory(device)?.total;
            return Err(Error::new(format!(
                "device {} is out of memory: {bytes} asked, {free} free of {total}",
                device.0
            )));
        }
        let segment = if shareable { Segment::shareable(bytes)? } else { Segment::private(bytes)? };
        if owner == Owner::Device {
            self.memory(device)?.used.0 += segment.mapped().0;
        }
        Ok(self.insert(Range { device, owner, bytes, imported: false, segment }))
    }

    fn insert(&mut self, range: Range) -> u64 {
        let start = range.segment.start();
        self.ranges.insert(start, range);
        start
    }

    /// Gives an allocation up; its memory stays mapped until the segment is dropped.
    pub fn take_allocation(&mut self, device: DeviceId, start: u64) -> Result<Segment, Error> {
        let range = self.own(device, start)?;
        let (owner, mapped) = (range.owner, range.segment.mapped());
        if owner == Owner::Device {
            self.memory(device)?.used.0 -= mapped.0;
        }
        Ok(self.ranges.remove(&start).expect("the range was just found").segment)
    }

    fn own(&self, device: DeviceId, start: u64) -> Result<&Range, Error> {
        self.ranges.get(&start).filter(|range| range.device == device && !range.imported).ok_or_else(|| {
            Error::new(format!(
                "{start:#x} is not the start of a live allocation of device {}: freed twice, or never allocated",
                device.0
            ))
        })
    }

    pub fn locator(&self, device: DeviceId, start: u64) -> Result<Locator, Error> {
        let range = self.own(device, start)?;
        range.segment.locator(range.bytes).ok_or_else(|| {
            Error::new(format!("{start:#x} of device {} cannot be exported: allocate it as shareable", device.0))
        })
    }

    pub fn import(&mut self, device: DeviceId, locator: &Locator, bytes: Bytes) -> Result<u64, Error> {
        self.check(device)?;
        if bytes > locator.bytes {
            return Err(Error::new(format!("{bytes} cannot be imported from an allocation of {}", locator.bytes)));
        }
        let allocated = |range: &Range| !range.imported && range.segment.locator(range.bytes).as_ref() == Some(locator);
        if self.ranges.values().any(allocated) {
            return Err(Error::new(format!(
                "device {} cannot import memory that this driver has allocated itself: use its address",
                device.0
            )));
        }
        let segment = Segment::open(locator)?;
        Ok(self.insert(Range { device, owner: Owner::Device, bytes, imported: true, segment }))
    }

    pub fn take_import(&mut self, device: DeviceId, start: u64) -> Result<Segment, Error> {
        if !self.ranges.get(&start).is_some_and(|range| range.device == device && range.imported) {
            return Err(Error::new(format!(
                "{start:#x} is not the start of an open import of device {}: closed twice, or never imported",
                device.0
            )));
        }
        Ok(self.ranges.remove(&start).expect("the range was just found").segment)
    }

    pub fn register(&mut self, device: DeviceId, start: u64, bytes: Bytes) -> Result<(), Error> {
        self.check(device)?;
        let end = start.checked_add(bytes.0).filter(|_| start != 0 && bytes.0 != 0);
        let end = end.ok_or_else(|| Error::new(format!("{bytes} at {start:#x} is no host memory")))?;
        let before = self.registered.range((device, 0)..(device, end)).next_back();
        if before.is_some_and(|((_, known), length)| known + length.0 > start) {
            return Err(Error::new(format!(
                "host memory {start:#x} of {bytes} is already registered with device {}",
                device.0
            )));
        }
        self.registered.insert((device, start), bytes);
        Ok(())
    }

    pub fn unregister(&mut self, device: DeviceId, start: u64) -> Result<(), Error> {
        self.registered.remove(&(device, start)).map(|_| ()).ok_or_else(|| {
            Error::new(format!(
                "host memory {start:#x} is not registered with device {}: unregistered twice, or never registered",
                device.0
            ))
        })
    }

    /// Proves that `device` may touch `[address, address + bytes)`.
    ///
    /// # Errors
    /// If the bytes do not all lie in one live allocation, import or registration.
    pub fn reach(&self, device: DeviceId, address: u64, bytes: u64, via: Via) -> Result<*mut u8, Error> {
        let range = self.ranges.range(..=address).next_back();
        let range = range.filter(|(start, range)| address - **start < range.bytes.0);
        let (start, length) = match range {
            Some((start, range)) => {
                if range.owner == Owner::Device {
                    self.check_peer(device, range.device, via)?;
                }
                (*start, range.bytes.0)
            }
            None => {
                let host = self.registered.range((device, 0)..=(device, address)).next_back();
                let host = host.filter(|((_, start), length)| address - start < length.0);
                host.map(|((_, start), length)| (*start, length.0)).ok_or_else(|| {
                    Error::new(format!(
                        "{address:#x} is neither live device memory nor host memory registered with device {}",
                        device.0
                    ))
                })?
            }
        };
        let offset = address - start;
        if bytes > length - offset {
            return Err(Error::new(format!(
                "{bytes} bytes at offset {offset} leave the {} at {start:#x}",
                Bytes(length)
            )));
        }
        Ok(std::ptr::with_exposed_provenance_mut(address as usize))
    }

    fn check_peer(&self, device: DeviceId, owner: DeviceId, via: Via) -> Result<(), Error> {
        let peers = self.devices.get(device.0 as usize).map(|memory| &memory.peers);
        if via == Via::Copy || owner == device || peers.is_some_and(|peers| peers.contains(&owner)) {
            return Ok(());
        }
        Err(Error::new(format!(
            "a kernel of device {} touched memory of device {} without peer access: enable it first",
            device.0, owner.0
        )))
    }
}

fn absent(device: DeviceId, count: usize) -> Error {
    Error::new(format!("device {} does not exist: there are {count} emulated devices, numbered from 0", device.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const D0: DeviceId = DeviceId(0);
    const D1: DeviceId = DeviceId(1);

    #[test]
    fn a_range_is_reached_to_its_last_byte_and_no_further() {
        let mut ledger = Ledger::new(1, Bytes::mib(1));
        let start = ledger.allocate(D0, Owner::Device, Bytes(100), false).unwrap();
        assert!(ledger.reach(D0, start, 100, Via::Copy).is_ok());
        assert!(ledger.reach(D0, start + 99, 1, Via::Copy).is_ok());
        assert!(ledger.reach(D0, start + 99, 2, Via::Copy).is_err());
        assert!(ledger.reach(D0, start + 100, 1, Via::Copy).is_err());
        assert!(ledger.reach(D0, start, u64::MAX, Via::Copy).is_err());
    }

    #[test]
    fn registrations_are_per_device_and_may_not_overlap() {
        let mut ledger = Ledger::new(2, Bytes::mib(1));
        ledger.register(D0, 0x1000, Bytes(256)).unwrap();
        assert!(ledger.reach(D0, 0x1080, 128, Via::Kernel).is_ok());
        assert!(ledger.reach(D1, 0x1080, 128, Via::Kernel).is_err());
        for start in [0xff0, 0x1000, 0x10ff] {
            assert!(ledger.register(D0, start, Bytes(64)).is_err(), "{start:#x}");
        }
        ledger.register(D0, 0x1100, Bytes(64)).unwrap();
        ledger.register(D0, 0xfc0, Bytes(64)).unwrap();
        ledger.register(D1, 0x1000, Bytes(256)).unwrap();
        ledger.unregister(D0, 0x1000).unwrap();
        assert!(ledger.unregister(D0, 0x1000).is_err());
        assert!(ledger.reach(D0, 0x1080, 1, Via::Kernel).is_err());
    }

    #[test]
    fn kernels_need_peer_access_and_copies_do_not() {
        let mut ledger = Ledger::new(2, Bytes::mib(1));
        let start = ledger.allocate(D1, Owner::Device, Bytes(4), false).unwrap();
        assert!(ledger.reach(D0, start, 4, Via::Copy).is_ok());
        assert!(ledger.reach(D0, start, 4, Via::Kernel).is_err());
        ledger.enable_peer(D0, D1).unwrap();
        assert!(ledger.reach(D0, start, 4, Via::Kernel).is_ok());
        assert!(ledger.enable_peer(D0, D0).is_err());
    }
}

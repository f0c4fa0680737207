//! Proof of mapped memory: addresses with the owner that keeps them valid.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::units::Bytes;

/// An address that is valid in this process, on the CPU or on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

/// Who can use an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Memory of the host that the CPU loads and stores.
    Host,
    /// Memory of a device; `cpu` tells whether the CPU may load and store it too.
    Device { device: u32, cpu: bool },
}

/// Proof of a mapped range: as long as a clone of it lives, the bytes stay mapped.
///
/// Made only by the owners of memory (`memory::map`, `gpu::Buffer`).
#[derive(Clone)]
pub struct Region {
    address: Address,
    bytes: Bytes,
    space: Space,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:#x}, {}, {:?})", self.address.0, self.bytes, self.space)
    }
}

impl Region {
    /// `owner` must keep `[address, address + bytes)` mapped until it is dropped.
    pub(crate) fn new(address: Address, bytes: Bytes, space: Space, owner: Arc<dyn Any + Send + Sync>) -> Region {
        Region { address, bytes, space, _owner: owner }
    }

    pub fn address(&self) -> Address {
        self.address
    }

    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    pub fn space(&self) -> Space {
        self.space
    }

    pub fn cpu_can_access(&self) -> bool {
        matches!(self.space, Space::Host | Space::Device { cpu: true, .. })
    }

    /// A part of the region.
    ///
    /// # Panics
    /// If the part is not inside: the plan laid the buffers out, so that is our mistake.
    pub fn part(&self, offset: u64, bytes: Bytes) -> Region {
        let end = offset.checked_add(bytes.0).expect("a part ends inside 64 bits");
        assert!(end <= self.bytes.0, "part {offset}+{bytes} of a region of {}", self.bytes);
        Region { address: Address(self.address.0 + offset), bytes, space: self.space, _owner: self._owner.clone() }
    }
}

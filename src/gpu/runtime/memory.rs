//! Memory of real devices: allocated, opened by other processes, and host memory made usable.

use super::RuntimeDriver;
use super::calls::{Calls, pointer};
use crate::error::Error;
use crate::gpu::held::Allocation;
use crate::gpu::ipc::{Export, Origin};
use crate::gpu::library::Refusal;
use crate::gpu::{DeviceId, Driver, ExportHandle, checks};
use crate::place::MemKind;
use crate::region::Address;
use crate::units::Bytes;

impl<C: Calls> RuntimeDriver<C> {
    pub(super) fn allocate_memory(
        &self,
        device: DeviceId,
        kind: MemKind,
        bytes: Bytes,
        shareable: bool,
    ) -> Result<Address, Error> {
        let info = &self.slot(device)?.info;
        checks::kind(device, info, kind, shareable)?;
        let free = self.memory_free(device)?;
        // Managed memory beyond what is free would move to the host, and be measured there.
        if !kind.is_host() && bytes > info.memory_total || kind == MemKind::Managed && bytes > free {
            return Err(checks::out_of_memory(device, bytes, free, info));
        }
        let address = match self.calls.allocate(kind, bytes.0 as usize) {
            Err(Refusal { status: Some(status), .. }) if status == C::OUT_OF_MEMORY && !kind.is_host() => {
                return Err(checks::out_of_memory(device, bytes, free, info));
            }
            allocated => self.told(allocated, || match kind.is_host() {
                true => format!("allocate {bytes} of host memory of kind {}", kind.letter()),
                false => format!("allocate {bytes} on device {}", device.0),
            })?,
        };
        self.held.add_allocation(address, Allocation { device, kind, bytes, shareable });
        Ok(Address(address))
    }

    pub(super) fn free_memory(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.enter(device)?;
        let Allocation { kind, bytes, .. } = self.held.take_allocation(device, address.0)?;
        Export::forget(address.0);
        self.drain(device)?;
        // SAFETY: it was allocated here and is forgotten; what was queued on it is done.
        let freed = unsafe { self.calls.free(kind, address.0) };
        self.told(freed, || format!("free {bytes} of device {}", device.0))
    }

    /// Waits for everything queued on a device that may touch memory that is about to go.
    fn drain(&self, device: DeviceId) -> Result<(), Error> {
        self.told(self.calls.wait_device(), || format!("wait for device {}", device.0))
    }

    pub(super) fn export_memory(&self, device: DeviceId, address: Address) -> Result<ExportHandle, Error> {
        self.enter(device)?;
        let Allocation { bytes, .. } = self.held.shareable(device, address.0)?;
        let what = || format!("export {bytes} of device {}", device.0);
        // A handle opens the whole allocation that the address is part of.
        // SAFETY: the address is that of a live allocation.
        let start = self.told(unsafe { self.calls.allocation_start(address.0) }, what)?;
        // SAFETY: as above.
        let handle = self.told(unsafe { self.calls.ipc_handle(address.0) }, what)?;
        Ok(Export::new(self.instance, device, address.0, bytes, address.0 - start, handle)?.encode())
    }

    pub(super) fn import_memory(
        &self,
        device: DeviceId,
        handle: &ExportHandle,
        bytes: Bytes,
    ) -> Result<Address, Error> {
        self.enter(device)?;
        match Export::decode(handle)?.origin(self.instance, bytes)? {
            // A runtime refuses to open a handle in the process that made it.
            Origin::Here { device: owner, address } => {
                if owner != device {
                    self.enable_peer(device, owner)?;
                }
                self.held.add_import(device, address, None);
                Ok(Address(address))
            }
            Origin::Elsewhere { ipc, offset } => {
                let opened = self.calls.ipc_open(ipc);
                let start = self.told(opened, || format!("open {bytes} of another process on device {}", device.0))?;
                self.held.add_import(device, start + offset, Some(start));
                Ok(Address(start + offset))
            }
        }
    }

    pub(super) fn close_memory(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.enter(device)?;
        let opened = self.held.take_import(device, address.0)?;
        self.drain(device)?;
        let Some(start) = opened else { return Ok(()) };
        // SAFETY: it was opened on this device; what was queued on it is done.
        let closed = unsafe { self.calls.ipc_close(start) };
        self.told(closed, || format!("close {:#x} of another process on device {}", address.0, device.0))
    }

    pub(super) fn register_memory(&self, device: DeviceId, address: Address, bytes: Bytes) -> Result<Address, Error> {
        self.enter(device)?;
        let host = pointer(address.0);
        let what = || format!("register {bytes} of host memory with device {}", device.0);
        self.held.register(device, address.0, bytes, || {
            // SAFETY: the owner of the range keeps it mapped until it is unregistered.
            self.told(unsafe { self.calls.host_register(host, bytes.0 as usize) }, what)
        })?;
        // SAFETY: the range is registered.
        let there = self.told(unsafe { self.calls.host_address(host) }, what).inspect_err(|_| {
            let _ = self.unregister_memory(device, address);
        })?;
        Ok(Address(there))
    }

    pub(super) fn unregister_memory(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.enter(device)?;
        self.held.unregister(device, address.0, || {
            self.drain(device)?;
            // SAFETY: it is registered, and what was queued on it is done.
            let gone = unsafe { self.calls.host_unregister(pointer(address.0)) };
            self.told(gone, || format!("unregister host memory {:#x} from device {}", address.0, device.0))
        })
    }
}

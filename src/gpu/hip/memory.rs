//! Memory of AMD devices: allocated, opened by other processes, and host memory made usable.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::HipDriver;
use super::ffi::{
    self, Api, hipDeviceMallocFinegrained, hipHostRegisterMapped, hipHostRegisterPortable, hipIpcMemHandle_t,
    hipMemAttachGlobal,
};
use crate::error::Error;
use crate::gpu::held::Allocation;
use crate::gpu::ipc::{Export, Origin};
use crate::gpu::library::Refusal;
use crate::gpu::{DeviceId, Driver, ExportHandle, checks};
use crate::place::MemKind;
use crate::region::Address;
use crate::units::Bytes;

/// What is allocated to see whether it can be.
const PROBE_BYTES: usize = 4096;

impl HipDriver {
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
        if bytes > info.memory_total || kind == MemKind::Managed && bytes > free {
            return Err(checks::out_of_memory(device, bytes, free, info));
        }
        let mut address = ptr::null_mut();
        let size = bytes.0 as usize;
        let allocated = match kind {
            // SAFETY: it writes one address.
            MemKind::DeviceFine => unsafe {
                self.api.table.hipExtMallocWithFlags(&mut address, size, hipDeviceMallocFinegrained)
            },
            // SAFETY: it writes one address.
            MemKind::DeviceUncached => unsafe {
                self.api.table.hipExtMallocWithFlags(&mut address, size, ffi::DEVICE_MALLOC_UNCACHED)
            },
            // SAFETY: it writes one address.
            MemKind::Managed => unsafe { self.api.table.hipMallocManaged(&mut address, size, hipMemAttachGlobal) },
            // SAFETY: it writes one address.
            _ => unsafe { self.api.table.hipMalloc(&mut address, size) },
        };
        match allocated {
            Err(Refusal { status: Some(ffi::OUT_OF_MEMORY), .. }) => {
                return Err(checks::out_of_memory(device, bytes, free, info));
            }
            allocated => self.told(allocated, || format!("allocate {bytes} on device {}", device.0))?,
        }
        let address = address.expose_provenance() as u64;
        self.held.add_allocation(address, Allocation { device, kind, bytes, shareable });
        Ok(Address(address))
    }

    pub(super) fn free_memory(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.enter(device)?;
        let Allocation { bytes, .. } = self.held.take_allocation(device, address.0)?;
        Export::forget(address.0);
        self.drain(device)?;
        // SAFETY: it was allocated here and is forgotten; what was queued on it is done.
        let freed = unsafe { self.api.table.hipFree(pointer(address.0)) };
        self.told(freed, || format!("free {bytes} of device {}", device.0))
    }

    /// Waits for everything queued on a device that may touch memory that is about to go.
    fn drain(&self, device: DeviceId) -> Result<(), Error> {
        // SAFETY: the device is current.
        let drained = unsafe { self.api.table.hipDeviceSynchronize() };
        self.told(drained, || format!("wait for device {}", device.0))
    }

    pub(super) fn export_memory(&self, device: DeviceId, address: Address) -> Result<ExportHandle, Error> {
        self.enter(device)?;
        let Allocation { bytes, .. } = self.held.shareable(device, address.0)?;
        let what = || format!("export {bytes} of device {}", device.0);
        // A handle opens the whole allocation that the address is part of.
        let (mut base, mut length) = (ptr::null_mut(), 0);
        // SAFETY: it writes an address and a size.
        let asked = unsafe { self.api.table.hipMemGetAddressRange(&mut base, &mut length, pointer(address.0)) };
        self.told(asked, what)?;
        let mut handle = hipIpcMemHandle_t { reserved: [0; _] };
        // SAFETY: the address is that of a live allocation; it writes one handle.
        self.told(unsafe { self.api.table.hipIpcGetMemHandle(&mut handle, pointer(address.0)) }, what)?;
        let ipc = handle.reserved.map(|byte| byte as u8);
        Ok(Export::new(self.instance, device, address.0, bytes, address.0 - base.addr() as u64, ipc)?.encode())
    }

    pub(super) fn import_memory(
        &self,
        device: DeviceId,
        handle: &ExportHandle,
        bytes: Bytes,
    ) -> Result<Address, Error> {
        self.enter(device)?;
        match Export::decode(handle)?.origin(self.instance, bytes)? {
            // HIP refuses to open a handle in the process that made it.
            Origin::Here { device: owner, address } => {
                if owner != device {
                    self.enable_peer(device, owner)?;
                }
                self.held.add_import(device, address, None);
                Ok(Address(address))
            }
            Origin::Elsewhere { ipc, offset } => {
                let handle = hipIpcMemHandle_t { reserved: ipc.map(|byte| byte as _) };
                let mut base = ptr::null_mut();
                // SAFETY: it writes one address, and checks flag and handle.
                let mut open = |flag| unsafe { self.api.table.hipIpcOpenMemHandle(&mut base, handle, flag) };
                let [new, old] = ffi::IPC_LAZY_PEER_ACCESS;
                let opened = match open(new) {
                    Err(Refusal { status: Some(ffi::INVALID_VALUE), .. }) => open(old),
                    opened => opened,
                };
                self.told(opened, || format!("open {bytes} of another process on device {}", device.0))?;
                let base = base.expose_provenance() as u64;
                self.held.add_import(device, base + offset, Some(base));
                Ok(Address(base + offset))
            }
        }
    }

    pub(super) fn close_memory(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.enter(device)?;
        let opened = self.held.take_import(device, address.0)?;
        self.drain(device)?;
        let Some(base) = opened else { return Ok(()) };
        // SAFETY: it was opened here; what was queued on it is done.
        let closed = unsafe { self.api.table.hipIpcCloseMemHandle(pointer(base)) };
        self.told(closed, || format!("close {:#x} of another process on device {}", address.0, device.0))
    }

    pub(super) fn register_memory(&self, device: DeviceId, address: Address, bytes: Bytes) -> Result<Address, Error> {
        self.enter(device)?;
        let host = pointer(address.0);
        let what = || format!("register {bytes} of host memory with device {}", device.0);
        self.held.register(device, address.0, bytes, || {
            let flags = hipHostRegisterPortable | hipHostRegisterMapped;
            // SAFETY: the owner of the range keeps it mapped until it is unregistered.
            self.told(unsafe { self.api.table.hipHostRegister(host, bytes.0 as usize, flags) }, what)
        })?;
        let mut there = ptr::null_mut();
        // SAFETY: the range is registered; it writes one address.
        let asked = unsafe { self.api.table.hipHostGetDevicePointer(&mut there, host, 0) };
        self.told(asked, what).inspect_err(|_| {
            let _ = self.unregister_memory(device, address);
        })?;
        Ok(Address(there.expose_provenance() as u64))
    }

    pub(super) fn unregister_memory(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.enter(device)?;
        let host = pointer(address.0);
        self.held.unregister(device, address.0, || {
            self.drain(device)?;
            // SAFETY: it is registered, and what was queued on it is done.
            let gone = unsafe { self.api.table.hipHostUnregister(host) };
            self.told(gone, || format!("unregister host memory {:#x} from device {}", address.0, device.0))
        })
    }
}

/// The kinds of memory that a device has; found by allocating a little of each, since attributes and
/// allocations do not agree between releases.
pub(super) fn kinds(api: &Api, device: c_int, managed: Option<c_int>) -> Vec<MemKind> {
    let flagged = |flags| {
        let mut address = ptr::null_mut();
        // SAFETY: it takes any number, and changes this thread's device only.
        let chosen = unsafe { api.table.hipSetDevice(device) };
        // SAFETY: it writes one address.
        let allocated = chosen.and(unsafe { api.table.hipExtMallocWithFlags(&mut address, PROBE_BYTES, flags) });
        // SAFETY: it was just allocated.
        allocated.is_ok() && unsafe { api.table.hipFree(address) }.is_ok()
    };
    let mut kinds = vec![MemKind::Device];
    kinds.extend(flagged(hipDeviceMallocFinegrained).then_some(MemKind::DeviceFine));
    kinds.extend(flagged(ffi::DEVICE_MALLOC_UNCACHED).then_some(MemKind::DeviceUncached));
    kinds.extend((managed == Some(1)).then_some(MemKind::Managed));
    kinds
}

/// An address as HIP takes it.
pub(super) fn pointer(address: u64) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

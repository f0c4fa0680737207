//! Memory of NVIDIA devices: allocated, opened by other processes, and host memory made usable.

use std::ffi::c_void;
use std::ptr;

use super::CudaDriver;
use super::ffi::{
    self, CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CUdeviceptr, CUipcMem_flags, CUipcMemHandle,
    CUmemAttach_flags,
};
use crate::error::Error;
use crate::gpu::held::Allocation;
use crate::gpu::ipc::{Export, Origin};
use crate::gpu::library::Refusal;
use crate::gpu::{DeviceId, Driver, ExportHandle, checks};
use crate::place::MemKind;
use crate::region::Address;
use crate::units::Bytes;

impl CudaDriver {
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
        let mut address: CUdeviceptr = 0;
        let size = bytes.0 as usize;
        let allocated = match kind {
            // SAFETY: it writes one address.
            MemKind::Managed => unsafe {
                let global = CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
                self.api.table.cuMemAllocManaged(&mut address, size, global)
            },
            // SAFETY: it writes one address.
            _ => unsafe { self.api.table.cuMemAlloc_v2(&mut address, size) },
        };
        match allocated {
            Err(Refusal { status: Some(ffi::OUT_OF_MEMORY), .. }) => {
                return Err(checks::out_of_memory(device, bytes, free, info));
            }
            allocated => self.told(allocated, || format!("allocate {bytes} on device {}", device.0))?,
        }
        self.held.add_allocation(address, Allocation { device, kind, bytes, shareable });
        Ok(Address(address))
    }

    pub(super) fn free_memory(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.enter(device)?;
        let Allocation { bytes, .. } = self.held.take_allocation(device, address.0)?;
        Export::forget(address.0);
        self.drain(device)?;
        // SAFETY: it was allocated here and is forgotten; what was queued on it is done.
        let freed = unsafe { self.api.table.cuMemFree_v2(address.0) };
        self.told(freed, || format!("free {bytes} of device {}", device.0))
    }

    /// Waits for everything queued on a device that may touch memory that is about to go.
    fn drain(&self, device: DeviceId) -> Result<(), Error> {
        // SAFETY: the device's context is current.
        let drained = unsafe { self.api.table.cuCtxSynchronize() };
        self.told(drained, || format!("wait for device {}", device.0))
    }

    pub(super) fn export_memory(&self, device: DeviceId, address: Address) -> Result<ExportHandle, Error> {
        self.enter(device)?;
        let Allocation { bytes, .. } = self.held.shareable(device, address.0)?;
        let what = || format!("export {bytes} of device {}", device.0);
        // A handle opens the whole allocation that the address is part of.
        let (mut base, mut length) = (0, 0);
        // SAFETY: it writes an address and a size.
        let asked = unsafe { self.api.table.cuMemGetAddressRange_v2(&mut base, &mut length, address.0) };
        self.told(asked, what)?;
        let mut handle = CUipcMemHandle { reserved: [0; _] };
        // SAFETY: the address is that of a live allocation; it writes one handle.
        self.told(unsafe { self.api.table.cuIpcGetMemHandle(&mut handle, address.0) }, what)?;
        let ipc = handle.reserved.map(|byte| byte as u8);
        Ok(Export::new(self.instance, device, address.0, bytes, address.0 - base, ipc)?.encode())
    }

    pub(super) fn import_memory(
        &self,
        device: DeviceId,
        handle: &ExportHandle,
        bytes: Bytes,
    ) -> Result<Address, Error> {
        self.enter(device)?;
        match Export::decode(handle)?.origin(self.instance, bytes)? {
            // CUDA refuses to open a handle in the process that made it.
            Origin::Here { device: owner, address } => {
                if owner != device {
                    self.enable_peer(device, owner)?;
                }
                self.held.add_import(device, address, None);
                Ok(Address(address))
            }
            Origin::Elsewhere { ipc, offset } => {
                let handle = CUipcMemHandle { reserved: ipc.map(|byte| byte as _) };
                let lazy = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
                let mut base = 0;
                // SAFETY: it writes one address, and checks the handle.
                let opened = unsafe { self.api.table.cuIpcOpenMemHandle_v2(&mut base, handle, lazy) };
                self.told(opened, || format!("open {bytes} of another process on device {}", device.0))?;
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
        // SAFETY: it was opened in this context; what was queued on it is done.
        let closed = unsafe { self.api.table.cuIpcCloseMemHandle(base) };
        self.told(closed, || format!("close {:#x} of another process on device {}", address.0, device.0))
    }

    pub(super) fn register_memory(&self, device: DeviceId, address: Address, bytes: Bytes) -> Result<Address, Error> {
        self.enter(device)?;
        let host: *mut c_void = ptr::with_exposed_provenance_mut(address.0 as usize);
        let what = || format!("register {bytes} of host memory with device {}", device.0);
        self.held.register(device, address.0, bytes, || {
            let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
            // SAFETY: the owner of the range keeps it mapped until it is unregistered.
            self.told(unsafe { self.api.table.cuMemHostRegister_v2(host, bytes.0 as usize, flags) }, what)
        })?;
        let mut there = 0;
        // SAFETY: the range is registered; it writes one address.
        let asked = unsafe { self.api.table.cuMemHostGetDevicePointer_v2(&mut there, host, 0) };
        self.told(asked, what).inspect_err(|_| {
            let _ = self.unregister_memory(device, address);
        })?;
        Ok(Address(there))
    }

    pub(super) fn unregister_memory(&self, device: DeviceId, address: Address) -> Result<(), Error> {
        self.enter(device)?;
        let host: *mut c_void = ptr::with_exposed_provenance_mut(address.0 as usize);
        self.held.unregister(device, address.0, || {
            self.drain(device)?;
            // SAFETY: it is registered, and what was queued on it is done.
            let gone = unsafe { self.api.table.cuMemHostUnregister(host) };
            self.told(gone, || format!("unregister host memory {:#x} from device {}", address.0, device.0))
        })
    }
}

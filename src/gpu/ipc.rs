//! What an exported allocation is called: an IPC handle for other processes, an address for this one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use super::{DeviceId, ExportHandle};
use crate::error::Error;
use crate::units::Bytes;

/// Bytes of a CUDA or HIP IPC handle.
pub const IPC_BYTES: usize = 64;

/// Tells this process from every other one, also of another process namespace.
type Token = [u8; 16];

/// A number that nothing else of this process has.
pub fn serial() -> u64 {
    static SERIAL: AtomicU64 = AtomicU64::new(1);
    SERIAL.fetch_add(1, Ordering::Relaxed)
}

fn token() -> Result<Token, Error> {
    static TOKEN: OnceLock<Token> = OnceLock::new();
    if let Some(token) = TOKEN.get() {
        return Ok(*token);
    }
    let mut fresh = Token::default();
    rustix::rand::getrandom(&mut fresh, rustix::rand::GetRandomFlags::empty())?;
    Ok(*TOKEN.get_or_init(|| fresh))
}

/// What this process has exported and not freed: address and serial number. Who imports it in this
/// process uses the address itself, and no runtime would tell that it is gone.
fn exported() -> MutexGuard<'static, HashMap<u64, u64>> {
    static EXPORTED: LazyLock<Mutex<HashMap<u64, u64>>> = LazyLock::new(Mutex::default);
    EXPORTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An exported allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    token: Token,
    /// The driver that owns it, among those of its process: rank threads have one each.
    driver: u64,
    serial: u64,
    /// The owner's number of the device.
    device: u32,
    address: u64,
    bytes: Bytes,
    /// Where the allocation starts in what the handle opens.
    offset: u64,
    ipc: [u8; IPC_BYTES],
}

/// Where the importer finds an exported allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Another driver of this process: at its address, after peer access to the device.
    Here { device: DeviceId, address: u64 },
    /// Another process: at an offset in what the IPC handle opens.
    Elsewhere { ipc: [u8; IPC_BYTES], offset: u64 },
}

impl Export {
    const SIZE: usize = 16 + 3 * 8 + 4 + 2 * 8 + IPC_BYTES;

    /// Exports the allocation at `address`, until `forget`.
    ///
    /// # Errors
    /// If the system has no random bytes.
    pub fn new(
        driver: u64,
        device: DeviceId,
        address: u64,
        bytes: Bytes,
        offset: u64,
        ipc: [u8; IPC_BYTES],
    ) -> Result<Export, Error> {
        let token = token()?;
        let serial = *exported().entry(address).or_insert_with(serial);
        Ok(Export { token, driver, serial, device: device.0, address, bytes, offset, ipc })
    }

    /// The allocation at `address` is about to be freed.
    pub fn forget(address: u64) {
        exported().remove(&address);
    }

    pub fn encode(&self) -> ExportHandle {
        let mut bytes = Vec::with_capacity(Export::SIZE);
        bytes.extend(self.token);
        for word in [self.driver, self.serial, self.address] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.device.to_le_bytes());
        for word in [self.bytes.0, self.offset] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.ipc);
        ExportHandle(bytes)
    }

    /// # Errors
    /// If the bytes are no handle of a real device's memory.
    pub fn decode(handle: &ExportHandle) -> Result<Export, Error> {
        let mut rest = handle.0.as_slice();
        let mut decode = || {
            let (token, driver, serial, address) =
                (take(&mut rest)?, word(&mut rest)?, word(&mut rest)?, word(&mut rest)?);
            let device = u32::from_le_bytes(take(&mut rest)?);
            let (bytes, offset, ipc) = (Bytes(word(&mut rest)?), word(&mut rest)?, take(&mut rest)?);
            rest.is_empty().then_some(Export { token, driver, serial, device, address, bytes, offset, ipc })
        };
        decode().ok_or_else(|| {
            let length = handle.0.len();
            Error::new(format!(
                "a handle of {length} bytes is not one of device memory: all ranks need the same backend"
            ))
        })
    }

    /// Where `bytes` bytes of it are, for a driver of this process.
    ///
    /// # Errors
    /// If it is shorter, has been freed, or is that driver's own.
    pub fn origin(&self, driver: u64, bytes: Bytes) -> Result<Origin, Error> {
        if bytes > self.bytes {
            return Err(Error::new(format!("{bytes} cannot be imported from an allocation of {}", self.bytes)));
        }
        if self.token != token()? {
            return Ok(Origin::Elsewhere { ipc: self.ipc, offset: self.offset });
        }
        if exported().get(&self.address) != Some(&self.serial) {
            return Err(Error::new(format!("the {} that were exported are freed", self.bytes)));
        }
        if self.driver == driver {
            return Err(Error::new("a driver cannot import memory that it has allocated itself: use its address"));
        }
        Ok(Origin::Here { device: DeviceId(self.device), address: self.address })
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, others) = rest.split_first_chunk()?;
    *rest = others;
    Some(*first)
}

fn word(rest: &mut &[u8]) -> Option<u64> {
    take(rest).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IPC: [u8; IPC_BYTES] = [7; IPC_BYTES];

    fn export(driver: u64, address: u64) -> Export {
        Export::new(driver, DeviceId(1), address, Bytes(100), 512, IPC).unwrap()
    }

    #[test]
    fn a_handle_survives_encoding_and_other_bytes_are_refused() {
        let export = export(1, 0x1000_0001);
        let handle = export.encode();
        assert_eq!(handle.0.len(), Export::SIZE);
        assert_eq!(Export::decode(&handle), Ok(export));
        for wrong in [&handle.0[1..], &[&handle.0[..], &[0]].concat(), &[]] {
            let err = Export::decode(&ExportHandle(wrong.to_vec())).unwrap_err();
            assert!(err.message().contains(&format!("{} bytes", wrong.len())), "{err}");
        }
    }

    #[test]
    fn another_driver_of_this_process_gets_the_address_until_it_is_freed() {
        let address = 0x1000_0002;
        let export = export(1, address);
        assert_eq!(export.origin(2, Bytes(100)), Ok(Origin::Here { device: DeviceId(1), address }));
        assert!(export.origin(2, Bytes(101)).unwrap_err().message().contains("allocation of 100 B"));
        assert!(export.origin(1, Bytes(100)).unwrap_err().message().contains("itself"));
        Export::forget(address);
        let err = export.origin(2, Bytes(100)).unwrap_err();
        assert!(err.message().contains("freed"), "{err}");
        // What is allocated later at the same address is something else.
        let _later = self::export(3, address);
        assert!(export.origin(2, Bytes(100)).is_err());
    }

    #[test]
    fn another_process_gets_the_handle_and_the_offset() {
        let mut export = export(1, 0x1000_0003);
        export.token[0] ^= 1;
        assert_eq!(export.origin(1, Bytes(100)), Ok(Origin::Elsewhere { ipc: IPC, offset: 512 }));
        assert!(export.origin(1, Bytes(101)).is_err());
    }
}

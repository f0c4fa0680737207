//! What the drivers of real devices refuse before the runtime sees it, in the same words.

use super::{CheckArgs, DeviceId, DeviceInfo, KernelId, KernelName, KernelSpec, LatchArgs, TransferArgs};
use crate::error::Error;
use crate::place::MemKind;
use crate::units::Bytes;

/// A loaded kernel by its slot, with the size of its arguments and of its shared memory (in units of
/// `SHARED_UNIT`), which a launch can read without a lock.
pub fn kernel_id(slot: u64, spec: KernelSpec) -> KernelId {
    let size = match spec.name() {
        KernelName::Transfer | KernelName::Bulk => TransferArgs::SIZE,
        KernelName::Check => CheckArgs::SIZE,
        KernelName::Latch => LatchArgs::SIZE,
    };
    let shared = u64::from(spec.shared_bytes().div_ceil(SHARED_UNIT));
    KernelId(slot | (size as u64) << 32 | shared << 48)
}

const SHARED_UNIT: u32 = 128;

/// Shared memory that a launch of the kernel has to ask for.
pub fn shared_bytes(kernel: KernelId) -> u32 {
    (kernel.0 >> 48) as u32 * SHARED_UNIT
}

/// The slot of the kernel, for a launch that makes sense.
///
/// # Errors
/// If nothing would run, or the arguments have not the kernel's size.
pub fn launchable(kernel: KernelId, blocks: u32, threads: u32, args: &[u8]) -> Result<u64, Error> {
    if blocks == 0 || threads == 0 {
        return Err(Error::new(format!("a launch of {blocks} blocks of {threads} threads: both must be at least 1")));
    }
    let size = kernel.0 >> 32 & u64::from(u16::MAX);
    if args.len() as u64 != size {
        let given = args.len();
        return Err(Error::new(format!("a kernel was launched with {given} bytes of arguments, it takes {size}")));
    }
    Ok(kernel.0 & u64::from(u32::MAX))
}

/// A kernel runs on the device that it was loaded for.
pub fn loaded_for(owner: DeviceId, stream: DeviceId) -> Result<(), Error> {
    if owner == stream {
        return Ok(());
    }
    Err(Error::new(format!("a kernel that was loaded for device {} was launched on device {}", owner.0, stream.0)))
}

pub fn one_device(event: DeviceId, stream: DeviceId) -> Result<(), Error> {
    if event == stream {
        return Ok(());
    }
    Err(Error::new(format!("an event of device {} cannot be recorded in a stream of device {}", event.0, stream.0)))
}

/// Whether a device has memory of that kind, for others too if `shareable`.
pub fn kind(device: DeviceId, info: &DeviceInfo, kind: MemKind, shareable: bool) -> Result<(), Error> {
    let (device, name, letter) = (device.0, &info.name, kind.letter());
    if !info.memory_kinds.contains(&kind) && !info.host_kinds.contains(&kind) {
        return Err(Error::new(format!("device {device} ({name}) has no memory of kind {letter}")));
    }
    if shareable && (kind == MemKind::Managed || kind.is_host()) {
        return Err(Error::new(format!(
            "memory of kind {letter} cannot be opened by another rank: runtimes export none"
        )));
    }
    Ok(())
}

pub fn out_of_memory(device: DeviceId, asked: Bytes, free: Bytes, info: &DeviceInfo) -> Error {
    let total = info.memory_total;
    Error::new(format!("device {} is out of memory: {asked} asked, {free} free of {total}", device.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::BulkVariant;

    #[test]
    fn a_launch_is_checked() {
        let (transfer, check) = (kernel_id(7, KernelName::Transfer.into()), kernel_id(8, KernelSpec::Check));
        assert_eq!(launchable(transfer, 1, 1, &[0; TransferArgs::SIZE]), Ok(7));
        assert_eq!(launchable(check, 1, 1, &[0; CheckArgs::SIZE]), Ok(8));
        let refusal =
            |blocks, threads, size: usize| launchable(check, blocks, threads, &vec![0; size]).unwrap_err().to_string();
        assert!(refusal(0, 1, CheckArgs::SIZE).contains("at least 1"));
        assert!(refusal(1, 0, CheckArgs::SIZE).contains("at least 1"));
        assert!(refusal(1, 1, 24).contains("24 bytes of arguments, it takes 32"));
        let bulk = kernel_id(9, KernelSpec::Bulk(BulkVariant { stages: 3, stage_bytes: 64 << 10 }));
        assert_eq!((launchable(bulk, 1, 1, &[0; TransferArgs::SIZE]), shared_bytes(bulk)), (Ok(9), 3 * (64 << 10)));
        assert_eq!(shared_bytes(check), 0);
        assert!(loaded_for(DeviceId(1), DeviceId(0)).is_err());
    }
}

//! Maps memory of an emulated device: private, or a file without a name that others can open.

use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::shm;

use crate::error::Error;
use crate::gpu::ExportHandle;
use crate::units::Bytes;

/// Where another process finds a segment: a file descriptor of its owner, and proof that it is
/// still the same file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locator {
    pub process: u32,
    descriptor: u32,
    pub bytes: Bytes,
    pub inode: u64,
}

impl Locator {
    const SIZE: usize = 24;

    pub fn encode(self) -> ExportHandle {
        let mut bytes = Vec::with_capacity(Locator::SIZE);
        bytes.extend(self.process.to_le_bytes());
        bytes.extend(self.descriptor.to_le_bytes());
        bytes.extend(self.bytes.0.to_le_bytes());
        bytes.extend(self.inode.to_le_bytes());
        ExportHandle(bytes)
    }

    /// # Errors
    /// If the bytes are no handle of this driver.
    pub fn decode(handle: &ExportHandle) -> Result<Locator, Error> {
        let bytes: &[u8; Locator::SIZE] = handle.0.as_slice().try_into().map_err(|_| {
            Error::new(format!(
                "a handle of {} bytes is not one of emulated device memory ({} bytes): all ranks need the same backend",
                handle.0.len(),
                Locator::SIZE
            ))
        })?;
        let half = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let word = |at: usize| u64::from(half(at)) | u64::from(half(at + 4)) << 32;
        Ok(Locator { process: half(0), descriptor: half(4), bytes: Bytes(word(8)), inode: word(16) })
    }
}

/// Mapped memory, page aligned and zeroed; unmapped when dropped.
#[derive(Debug)]
pub struct Segment {
    start: u64,
    /// What was mapped: whole pages.
    mapped: usize,
    file: Option<File>,
}

#[derive(Debug)]
struct File {
    descriptor: OwnedFd,
    inode: u64,
}

impl Segment {
    /// Memory that only this process can use.
    pub fn private(bytes: Bytes) -> Result<Segment, Error> {
        let mapped = pages(bytes)?;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no existing one.
        let start = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let start = start.map_err(|err| Error::from(err).context(format!("map {bytes}")))?;
        Ok(Segment { start: start.expose_provenance() as u64, mapped, file: None })
    }

    /// Memory that another process can open while this segment lives.
    pub fn shareable(bytes: Bytes) -> Result<Segment, Error> {
        let mapped = pages(bytes)?;
        let file = nameless_file()?;
        let size_it = || -> Result<(), Errno> {
            rustix::fs::ftruncate(&file, mapped as u64)?;
            // Reserves the pages, so that a full /dev/shm is an error here and no SIGBUS later.
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, mapped as u64)
        };
        size_it().map_err(|err| Error::from(err).context(format!("reserve {bytes} of shared memory")))?;
        Segment::map(file, mapped)
    }

    /// Opens a segment of another process, or of another driver of this process.
    ///
    /// # Errors
    /// If the owner is gone, has freed it, or may not be looked into.
    pub fn open(locator: &Locator) -> Result<Segment, Error> {
        let path = format!("/proc/{}/fd/{}", locator.process, locator.descriptor);
        let file = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|err| {
            Error::from(err).context(format!(
                "open shared memory {path} (its owner must still hold it, and run as the same user in the same \
                 process and user namespace)"
            ))
        })?;
        let stat = rustix::fs::fstat(&file)?;
        let mapped = pages(locator.bytes)?;
        if stat.st_ino != locator.inode || (stat.st_size as u64) < mapped as u64 {
            return Err(Error::new(format!(
                "{path} is not the {} that were exported: the owner has freed them",
                locator.bytes
            )));
        }
        // The lock only serves to detect a wrong order of release: where locks are missing, do without.
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK) {
            return Err(Error::new(format!("{path} is being freed by its owner")));
        }
        Segment::map(file, mapped)
    }

    fn map(file: OwnedFd, mapped: usize) -> Result<Segment, Error> {
        let inode = rustix::fs::fstat(&file)?.st_ino;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing one.
        let start = unsafe {
            rustix::mm::mmap(ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
        };
        let start = start.map_err(|err| Error::from(err).context(format!("map {}", Bytes(mapped as u64))))?;
        Ok(Segment { start: start.expose_provenance() as u64, mapped, file: Some(File { descriptor: file, inode }) })
    }

    pub fn start(&self) -> u64 {
        self.start
    }

    pub fn mapped(&self) -> Bytes {
        Bytes(self.mapped as u64)
    }

    /// How others find the segment, or `None` where it is private.
    pub fn locator(&self, bytes: Bytes) -> Option<Locator> {
        self.file.as_ref().map(|file| Locator {
            process: std::process::id(),
            descriptor: file.descriptor.as_raw_fd() as u32,
            bytes,
            inode: file.inode,
        })
    }

    /// Whether someone who opened this segment still has it open. Importers hold a shared lock.
    pub fn is_open_elsewhere(&self) -> bool {
        self.file.as_ref().is_some_and(|file| {
            rustix::fs::flock(&file.descriptor, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
        })
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let start = ptr::with_exposed_provenance_mut(self.start as usize);
        // SAFETY: this is the mapping that the constructor made; the ledger gives a segment up only
        // after everything queued on its addresses is done.
        let unmapped = unsafe { rustix::mm::munmap(start, self.mapped) };
        if let Err(err) = unmapped {
            tracing::warn!("unmap {:#x}: {err}", self.start);
        }
    }
}

fn pages(bytes: Bytes) -> Result<usize, Error> {
    bytes
        .round_up(rustix::param::page_size() as u64)
        .filter(|rounded| rounded.0 > 0)
        .and_then(|rounded| usize::try_from(rounded.0).ok())
        .ok_or_else(|| {
            Error::new(format!("{bytes} of memory cannot be mapped: ask for at least 1 B and less than 2^63"))
        })
}

fn nameless_file() -> Result<OwnedFd, Error> {
    match rustix::fs::memfd_create("tb-mpi", MemfdFlags::CLOEXEC) {
        Ok(file) => Ok(file),
        // Old kernels and strict sandboxes have no memfd.
        Err(Errno::NOSYS | Errno::PERM | Errno::ACCESS) => unlinked_file(),
        Err(err) => Err(Error::from(err).context("create shared memory")),
    }
}

/// A named file that loses its name at once: `/proc/PID/fd` still leads to it.
fn unlinked_file() -> Result<OwnedFd, Error> {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let name = format!("/tb-mpi.{}.{}", std::process::id(), SERIAL.fetch_add(1, Ordering::Relaxed));
    let flags = shm::OFlags::RDWR | shm::OFlags::CREATE | shm::OFlags::EXCL;
    let file = shm::open(&name, flags, Mode::RUSR | Mode::WUSR)
        .map_err(|err| Error::from(err).context(format!("create shared memory {name}")))?;
    shm::unlink(&name)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_locator_survives_encoding_and_other_bytes_are_refused() {
        let locator = Locator { process: 0x1234_5678, descriptor: 9, bytes: Bytes(u64::MAX - 1), inode: 1 << 40 };
        assert_eq!(Locator::decode(&locator.encode()).unwrap(), locator);
        let err = Locator::decode(&ExportHandle(vec![0; 64])).unwrap_err();
        assert!(err.message().contains("64 bytes"), "{err}");
    }

    #[test]
    fn a_file_that_lost_its_name_can_be_opened_by_its_locator() {
        let file = unlinked_file().unwrap();
        let size = rustix::param::page_size();
        rustix::fs::ftruncate(&file, size as u64).unwrap();
        let owner = Segment::map(file, size).unwrap();
        let locator = owner.locator(Bytes(100)).unwrap();
        let opened = Segment::open(&locator).unwrap();
        assert_ne!(opened.start(), owner.start());
        assert!(owner.is_open_elsewhere());
        drop(opened);
        assert!(!owner.is_open_elsewhere());
    }

    #[test]
    fn a_freed_segment_cannot_be_opened() {
        let owner = Segment::shareable(Bytes(100)).unwrap();
        let locator = owner.locator(Bytes(100)).unwrap();
        drop(owner);
        assert!(Segment::open(&locator).is_err());
    }
}

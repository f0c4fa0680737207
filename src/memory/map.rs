//! Maps host memory, shares it with other processes of the host, and places it on a NUMA node.

mod access;
mod policy;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, fallocate, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap, mmap_anonymous, munmap};
use rustix::process::{Resource, getrlimit};
use rustix::shm;
use serde::{Deserialize, Serialize};

pub use access::{copy, fill, read, write};
pub use policy::allocate_on;

use crate::error::Error;
use crate::fault::Faults;
use crate::region::{Address, Region, Space};
use crate::units::Bytes;
use crate::world::{NumaNode, ShareVia, host};

/// From this size on mappings are aligned to it, so that the kernel can back them with large pages:
/// 5 % faster streams on Zen 4.
const LARGE_PAGE: u64 = 2 << 20;

/// Pages whose node is asked for: enough to see a misplaced part of 0.1 %.
const PAGES_SAMPLED: u64 = 1024;

/// How another process of the host opens a mapping. Valid until its owner calls `close_export`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SharedHandle {
    Memfd { pid: u32, fd: i32, object: Object },
    Named { name: String, object: Object },
}

/// Device and inode of the memory behind a handle: a process number or a name that was given to
/// something else meanwhile does not match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    device: u64,
    inode: u64,
}

#[derive(Debug)]
enum Export {
    Memfd(OwnedFd, Object),
    Named(SegmentName, Object),
}

/// The owner of one mapping; dropping it unmaps.
#[derive(Debug)]
pub struct HostMap {
    address: Address,
    bytes: Bytes,
    /// `bytes` in whole pages: what is mapped.
    mapped: Bytes,
    export: Mutex<Option<Export>>,
    notes: Vec<String>,
}

impl HostMap {
    /// Zeroed memory of this process, all pages present, on `node` where one is given.
    ///
    /// # Errors
    /// Not enough memory is free, or the system refuses.
    pub fn private(bytes: Bytes, node: Option<&NumaNode>, faults: &Faults) -> Result<HostMap, Error> {
        faults.hit("allocate")?;
        let mapped = whole_pages(bytes)?;
        check_free(bytes, host::memory_free()?)?;
        let address = map_private(mapped).map_err(|err| refused(bytes, err))?;
        let mut map = HostMap { address, bytes, mapped, export: Mutex::new(None), notes: Vec::new() };
        map.bind(node, faults)?;
        map.prefault()?;
        Ok(map)
    }

    /// The same, for other processes to open by the handle that `export` gives.
    ///
    /// # Errors
    /// Not enough memory is free, or the system refuses.
    pub fn shared(bytes: Bytes, via: ShareVia, node: Option<&NumaNode>, faults: &Faults) -> Result<HostMap, Error> {
        faults.hit("allocate")?;
        let mapped = whole_pages(bytes)?;
        check_free(bytes, host::memory_free()?)?;
        let (fd, name) = match via {
            ShareVia::Memfd => (memfd_create("tb-mpi", MemfdFlags::CLOEXEC).map_err(|err| refused(bytes, err))?, None),
            ShareVia::Named => {
                let (fd, name) = SegmentName::create()?;
                (fd, Some(name))
            }
        };
        let refused = |err| match via {
            ShareVia::Memfd => refused(bytes, err),
            ShareVia::Named => refused(bytes, err).context("a segment in /dev/shm"),
        };
        ftruncate(&fd, mapped.0).map_err(refused)?;
        let address = map_shared(&fd, mapped).map_err(refused)?;
        let mut map = HostMap { address, bytes, mapped, export: Mutex::new(None), notes: Vec::new() };
        map.bind(node, faults)?;
        // A full /dev/shm is an error here and a fatal signal when a page is touched.
        fallocate(&fd, FallocateFlags::empty(), 0, mapped.0).map_err(refused)?;
        map.prefault()?;
        let object = object_of(&fd)?;
        *map.export() = Some(match name {
            None => Export::Memfd(fd, object),
            Some(name) => Export::Named(name, object),
        });
        Ok(map)
    }

    /// What another process needs to open this mapping.
    ///
    /// # Panics
    /// If the mapping was not made by `shared`, or after `close_export`.
    ///
    /// # Errors
    /// Only an injected fault.
    pub fn export_handle(&self, faults: &Faults) -> Result<SharedHandle, Error> {
        faults.hit("export")?;
        Ok(match self.export().as_ref().expect("only a shared mapping whose export is open has a handle") {
            Export::Memfd(fd, object) => {
                SharedHandle::Memfd { pid: std::process::id(), fd: fd.as_raw_fd(), object: *object }
            }
            Export::Named(name, object) => SharedHandle::Named { name: name.0.clone(), object: *object },
        })
    }

    /// Maps memory that another process (or this one) shares; `bytes` is what was allocated there.
    ///
    /// # Errors
    /// It cannot be opened, or is not the memory that the handle was made for.
    pub fn import(handle: &SharedHandle, bytes: Bytes, faults: &Faults) -> Result<HostMap, Error> {
        faults.hit("import")?;
        let mapped = whole_pages(bytes)?;
        let (path, opened, object) = match handle {
            SharedHandle::Memfd { pid, fd, object } => {
                let path = format!("/proc/{pid}/fd/{fd}");
                let opened = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
                (path, opened, object)
            }
            SharedHandle::Named { name, object } => {
                (format!("/dev/shm{name}"), shm::open(name, shm::OFlags::RDWR, Mode::empty()), object)
            }
        };
        let cannot = |what: &str| Error::new(format!("cannot open the shared memory {path}: {what}"));
        let fd = opened.map_err(|err| cannot(&std::io::Error::from(err).to_string()))?;
        let stat = fstat(&fd)?;
        if object_of(&fd)? != *object {
            return Err(cannot("something else has that name now; did its owner end?"));
        }
        let user = rustix::process::geteuid().as_raw();
        if stat.st_uid != user {
            return Err(cannot(&format!("it belongs to user {}, this process to {user}", stat.st_uid)));
        }
        if (stat.st_size as u64) < mapped.0 {
            return Err(cannot(&format!("it has {}, {bytes} are expected", Bytes(stat.st_size as u64))));
        }
        let address = map_shared(&fd, mapped).map_err(|err| refused(bytes, err).context(&path))?;
        let mut map = HostMap { address, bytes, mapped, export: Mutex::new(None), notes: Vec::new() };
        map.prefault()?;
        Ok(map)
    }

    /// After all have mapped it: closes the descriptor or removes the name, so that nothing is left
    /// behind however this process ends.
    pub fn close_export(&self) {
        *self.export() = None;
    }

    /// Keeps the pages in memory. Where the limit is too low the mapping stays as it is, and a note
    /// says so.
    ///
    /// # Errors
    /// Only an injected fault.
    pub fn lock(&mut self, faults: &Faults) -> Result<(), Error> {
        faults.hit("lock")?;
        // SAFETY: the range is mapped until `self` is dropped.
        if let Err(err) = unsafe { mlock(self.pointer(), self.mapped.0 as usize) } {
            let note = lock_note(err, getrlimit(Resource::Memlock).current.map(Bytes));
            self.notes.push(note);
        }
        Ok(())
    }

    /// Compares where the pages are with where they should be. Elsewhere is an error where
    /// `strict`, else a note; so is a system that does not tell.
    ///
    /// # Errors
    /// Counts the pages that are elsewhere.
    pub fn check_placement(&mut self, node: &NumaNode, strict: bool) -> Result<(), Error> {
        let placement = self.placement();
        let Some(misplaced) = placement.misplaced(node.os_index) else { return Ok(()) };
        if strict {
            return Err(Error::new(format!("{misplaced}; free memory on that node, or use memory of kind H")));
        }
        self.notes.push(misplaced);
        Ok(())
    }

    /// Which node the pages are on.
    pub fn placement(&self) -> Placement {
        placement_of(self.address, self.mapped)
    }

    /// What a reader of the results has to know: not locked, not bound.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The mapping as a region that keeps it alive.
    pub fn region(self: &Arc<Self>) -> Region {
        Region::new(self.address, self.bytes, Space::Host, Arc::clone(self) as _)
    }

    fn pointer(&self) -> *mut c_void {
        with_exposed_provenance_mut(self.address.0 as usize)
    }

    fn export(&self) -> MutexGuard<'_, Option<Export>> {
        // Nothing panics while the lock is held.
        self.export.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for pages on `node`. As a preference: a binding on a full node ends in the kernel
    /// killing a process, and `check_placement` finds pages that went elsewhere.
    fn bind(&mut self, node: Option<&NumaNode>, faults: &Faults) -> Result<(), Error> {
        let Some(node) = node else { return Ok(()) };
        faults.hit("bind")?;
        match prefer_node(self.pointer(), self.mapped.0, node.os_index) {
            Ok(()) => {}
            Err(Errno::NOSYS) => {
                self.notes.push(format!("not bound to node {}: the kernel has no NUMA support", node.os_index));
            }
            // Containers often forbid it.
            Err(Errno::PERM) => {
                self.notes.push(format!("not bound to node {}: the system forbids it", node.os_index));
            }
            Err(err) => return Err(Error::from(err).context(format!("bind {} to node {}", self.bytes, node.os_index))),
        }
        Ok(())
    }

    /// Makes all pages present, so that no page fault lies inside a measurement.
    fn prefault(&mut self) -> Result<(), Error> {
        // SAFETY: the range is mapped until `self` is dropped, and the advice changes no contents.
        match unsafe { madvise(self.pointer(), self.mapped.0 as usize, Advice::LinuxPopulateWrite) } {
            Ok(()) => Ok(()),
            // Before Linux 5.14.
            Err(Errno::INVAL) => {
                // SAFETY: the range is mapped until `self` is dropped.
                unsafe { access::touch(self.address, self.mapped, rustix::param::page_size()) };
                Ok(())
            }
            Err(err) => Err(refused(self.bytes, err)),
        }
    }
}

impl Drop for HostMap {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by us and no `Region` of it is left: they hold an `Arc` of
        // this owner.
        let unmapped = unsafe { munmap(self.pointer(), self.mapped.0 as usize) };
        debug_assert_eq!(unmapped, Ok(()), "a mapping is unmapped once");
    }
}

/// Where the pages of a mapping are.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    pages: u64,
    /// Pages looked at, by node; none where the system does not tell.
    nodes: Result<BTreeMap<u32, u64>, Errno>,
}

impl Placement {
    /// What is wrong with it, if `node` is where all pages should be.
    fn misplaced(&self, node: u32) -> Option<String> {
        let Ok(nodes) = &self.nodes else { return None };
        let sampled: u64 = nodes.values().sum();
        let elsewhere = sampled - nodes.get(&node).copied().unwrap_or(0);
        let looked_at = if sampled < self.pages { " looked at" } else { "" };
        (elsewhere > 0).then(|| format!("{elsewhere} of {sampled} pages{looked_at} are not on node {node} but {self}"))
    }
}

/// "node 0 (2048 pages)".
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes = match &self.nodes {
            Ok(nodes) => nodes,
            Err(Errno::NOSYS) => return write!(f, "node unknown: the kernel has no NUMA support"),
            Err(Errno::PERM) => return write!(f, "node unknown: the system forbids the question"),
            Err(err) => return write!(f, "node unknown: {}", std::io::Error::from(*err)),
        };
        let sampled: u64 = nodes.values().sum();
        for (i, (node, count)) in nodes.iter().enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            write!(f, "{comma}node {node} ({count}")?;
            if sampled < self.pages {
                write!(f, " of {sampled} pages looked at)")?;
            } else {
                write!(f, " pages)")?;
            }
        }
        Ok(())
    }
}

/// A name in /dev/shm; dropping it removes the name.
#[derive(Debug)]
struct SegmentName(String);

/// Names that exist because of this process.
static NAMES: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

fn names() -> MutexGuard<'static, BTreeSet<String>> {
    NAMES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes every name of a shared segment that this process made: what a thread that handles
/// signals calls before it ends the process. Mappings stay usable.
pub fn unlink_all() {
    for name in std::mem::take(&mut *names()) {
        // It may be gone already; there is nobody to tell.
        let _ = shm::unlink(&name);
    }
}

impl SegmentName {
    fn create() -> Result<(OwnedFd, SegmentName), Error> {
        let mut random = [0u8; 8];
        rustix::rand::getrandom(&mut random[..], rustix::rand::GetRandomFlags::empty())?;
        let user = rustix::process::geteuid().as_raw();
        let name = format!("/tb-mpi-{user}-{:016x}", u64::from_ne_bytes(random));
        // Listed first: a signal between the two finds it.
        names().insert(name.clone());
        let segment = SegmentName(name);
        let flags = shm::OFlags::CREATE | shm::OFlags::EXCL | shm::OFlags::RDWR;
        let fd = shm::open(&segment.0, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|err| Error::from(err).context(format!("create the shared segment {}", segment.0)))?;
        Ok((fd, segment))
    }
}

impl Drop for SegmentName {
    fn drop(&mut self) {
        if names().remove(&self.0) {
            // It may be gone already; there is nobody to tell.
            let _ = shm::unlink(&self.0);
        }
    }
}

fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// Which node the pages of a mapped range are on; `mapped` in whole pages.
fn placement_of(start: Address, mapped: Bytes) -> Placement {
    let pages = mapped.0 / page();
    let sampled = pages.min(PAGES_SAMPLED);
    // In 128 bits: a product of two counts.
    let nth = |i: u64| (u128::from(i) * u128::from(pages) / u128::from(sampled)) as u64;
    let addresses: Vec<*mut c_void> =
        (0..sampled).map(|i| with_exposed_provenance_mut((start.0 + nth(i) * page()) as usize)).collect();
    Placement { pages, nodes: query_nodes(&addresses) }
}

fn whole_pages(bytes: Bytes) -> Result<Bytes, Error> {
    assert!(bytes > Bytes::ZERO, "a mapping has at least one byte");
    let mapped = bytes.round_up(page());
    // Twice, and below half of the address space: what is added for alignment fits too.
    mapped.filter(|mapped| mapped.0 <= i64::MAX as u64 / 2).ok_or_else(|| refused(bytes, Errno::NOMEM))
}

fn check_free(asked: Bytes, free: host::Free) -> Result<(), Error> {
    if asked > free.bytes { Err(Error::new(format!("asked {asked}, {free}"))) } else { Ok(()) }
}

/// The system's own refusal, with what is free and the limit that may be behind it.
fn refused(asked: Bytes, err: Errno) -> Error {
    let mut message = format!("asked {asked}");
    if let Ok(free) = host::memory_free() {
        message += &format!(", {free}");
    }
    message += &format!(": {}", std::io::Error::from(err));
    if let (Errno::NOMEM, Some(limit)) = (err, getrlimit(Resource::As).current) {
        message += &format!("; ulimit -v is {}", Bytes(limit));
    }
    Error::new(message)
}

fn lock_note(err: Errno, limit: Option<Bytes>) -> String {
    match (err, limit) {
        (Errno::NOMEM | Errno::AGAIN | Errno::PERM, Some(limit)) => format!("not page-locked: ulimit -l is {limit}"),
        _ => format!("not page-locked: {}", std::io::Error::from(err)),
    }
}

fn object_of(fd: &OwnedFd) -> Result<Object, Error> {
    let stat = fstat(fd)?;
    Ok(Object { device: stat.st_dev, inode: stat.st_ino })
}

/// Maps `mapped` bytes; large ones start at a large page, and ask for such pages.
fn map_private(mapped: Bytes) -> Result<Address, Errno> {
    let large = mapped.0 >= LARGE_PAGE;
    let spare = if large { LARGE_PAGE } else { 0 };
    let (length, protection) = ((mapped.0 + spare) as usize, ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new mapping at an address that the kernel chooses touches nothing else.
    let start = unsafe { mmap_anonymous(null_mut(), length, protection, MapFlags::PRIVATE) }?;
    if !large {
        return Ok(Address(start.expose_provenance() as u64));
    }
    let head = start.align_offset(LARGE_PAGE as usize);
    let aligned = start.wrapping_byte_add(head);
    if head > 0 {
        // SAFETY: the unused start of the mapping made above.
        unsafe { munmap(start, head) }?;
    }
    if spare as usize > head {
        // SAFETY: the unused end of the mapping made above.
        unsafe { munmap(aligned.wrapping_byte_add(mapped.0 as usize), spare as usize - head) }?;
    }
    // A kernel without large pages refuses, and small ones do.
    // SAFETY: the range was mapped above, and the advice changes no contents.
    let _ = unsafe { madvise(aligned, mapped.0 as usize, Advice::LinuxHugepage) };
    Ok(Address(aligned.expose_provenance() as u64))
}

fn map_shared(fd: &impl AsFd, mapped: Bytes) -> Result<Address, Errno> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses touches nothing else.
    let start = unsafe { mmap(null_mut(), mapped.0 as usize, protection, MapFlags::SHARED, fd, 0) }?;
    // A kernel without large pages for shared memory refuses, and small ones do.
    // SAFETY: the range was mapped above, and the advice changes no contents.
    let _ = unsafe { madvise(start, mapped.0 as usize, Advice::LinuxHugepage) };
    Ok(Address(start.expose_provenance() as u64))
}

fn prefer_node(start: *mut c_void, length: u64, node: u32) -> Result<(), Errno> {
    let mask = node_mask(node);
    // The kernel reads one bit less than it is told (mbind(2), BUGS of set_mempolicy).
    let mask_bits = mask.len() * libc::c_ulong::BITS as usize + 1;
    // As wide as the kernel reads it.
    let mode = libc::c_ulong::from(libc::MPOL_PREFERRED.unsigned_abs());
    let flags: libc::c_uint = 0;
    // SAFETY: the kernel reads the mask, which lives across the call, and changes the placement of
    // a range that the caller has mapped, not its contents.
    let done = unsafe { libc::syscall(libc::SYS_mbind, start, length, mode, mask.as_ptr(), mask_bits, flags) };
    if done == 0 { Ok(()) } else { Err(last_errno()) }
}

fn node_mask(node: u32) -> Vec<libc::c_ulong> {
    let bits = libc::c_ulong::BITS;
    let mut mask = vec![0; (node / bits) as usize + 1];
    mask[(node / bits) as usize] = 1 << (node % bits);
    mask
}

/// Pages by node.
fn query_nodes(pages: &[*mut c_void]) -> Result<BTreeMap<u32, u64>, Errno> {
    let mut status = vec![-1 as libc::c_int; pages.len()];
    let this_process: libc::pid_t = 0;
    let move_nothing: *const libc::c_int = std::ptr::null();
    let flags: libc::c_int = 0;
    // SAFETY: the kernel reads `pages` and writes as many entries of `status`; without target nodes
    // it moves nothing.
    let done = unsafe {
        let (count, list) = (pages.len() as libc::c_ulong, pages.as_ptr());
        libc::syscall(libc::SYS_move_pages, this_process, count, list, move_nothing, status.as_mut_ptr(), flags)
    };
    if done != 0 {
        return Err(last_errno());
    }
    let mut nodes = BTreeMap::new();
    for node in status {
        // A negative number is why that page has no node.
        let node = u32::try_from(node).map_err(|_| Errno::from_raw_os_error(-node))?;
        *nodes.entry(node).or_insert(0) += 1;
    }
    Ok(nodes)
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

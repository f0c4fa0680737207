//! Reads and writes regions outside the timed part: to prepare and to verify.

use std::ptr::with_exposed_provenance_mut;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::region::{Address, Region};
use crate::units::Bytes;

/// Copies `bytes` into the region.
///
/// # Panics
/// If the range is not inside the region or the CPU cannot reach it: our mistake, as below.
pub fn write(region: &Region, offset: u64, bytes: &[u8]) {
    let to = pointer(region, offset, bytes.len() as u64);
    // SAFETY: `pointer` checked that the range is mapped; a slice of ours never overlaps a mapping
    // that is reached through regions only.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
}

/// Copies from the region into `buffer`.
pub fn read(region: &Region, offset: u64, buffer: &mut [u8]) {
    let from = pointer(region, offset, buffer.len() as u64);
    // SAFETY: as in `write`.
    unsafe { std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), buffer.len()) };
}

/// Sets `bytes` bytes of the region.
pub fn fill(region: &Region, offset: u64, bytes: Bytes, byte: u8) {
    let to = pointer(region, offset, bytes.0);
    // SAFETY: `pointer` checked that the range is mapped.
    unsafe { std::ptr::write_bytes(to, byte, bytes.0 as usize) };
}

/// Copies the first `bytes` bytes of one region to another; they may overlap.
pub fn copy(dst: &Region, src: &Region, bytes: Bytes) {
    let (to, from) = (pointer(dst, 0, bytes.0), pointer(src, 0, bytes.0));
    // SAFETY: `pointer` checked that both ranges are mapped.
    unsafe { std::ptr::copy(from, to, bytes.0 as usize) };
}

fn pointer(region: &Region, offset: u64, bytes: u64) -> *mut u8 {
    assert!(region.cpu_can_access(), "the CPU cannot reach {region:?}");
    let end = offset.checked_add(bytes).expect("a range ends inside 64 bits");
    assert!(end <= region.bytes().0, "{bytes} bytes at {offset} of a region of {}", region.bytes());
    with_exposed_provenance_mut((region.address().0 + offset) as usize)
}

/// Writes to every page without a change, so that the page is there and writable. Atomic, since
/// another process may be writing to a shared one.
///
/// # Safety
/// `bytes` bytes from `start` are mapped, readable and writable.
pub(super) unsafe fn touch(start: Address, bytes: Bytes, page: usize) {
    for offset in (0..bytes.0).step_by(page) {
        let at = with_exposed_provenance_mut((start.0 + offset) as usize);
        // SAFETY: passed on to the caller; a byte is always aligned.
        let byte = unsafe { AtomicU8::from_ptr(at) };
        byte.fetch_or(0, Ordering::Relaxed);
    }
}

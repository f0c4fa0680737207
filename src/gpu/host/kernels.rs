//! The device kernels in Rust, on the very argument structs of the real ones.

use std::hint::black_box;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{PoisonError, RwLock};
use std::thread;

use super::ledger::{Ledger, Via};
use crate::clock::now_ns;
use crate::error::Error;
use crate::gpu::{
    ANY_XCC, CheckArgs, DeviceId, LatchArgs, MAX_SIDES, SubExecutorRecord, Ticket, TransferArgs, TransferVariant,
};

/// Elements that pass through the stack at a time: small enough for the first-level cache.
const CHUNK: usize = 1024;
const ELEMENT: u64 = 4;
/// What a transfer without sources writes, byte by byte.
const FILL_BYTE: u8 = 75;

/// Runs the records one after the other. Of the variant only what changes the meaning counts: here
/// a word, a wave or a temporal hint is nothing.
pub fn transfer(
    ledger: &RwLock<Ledger>,
    device: DeviceId,
    variant: &TransferVariant,
    args: &TransferArgs,
    blocks: u32,
) -> Result<(), Error> {
    let a_block = if variant.warps { variant.block_threads / super::WARP_SIZE } else { 1 };
    let on_an_xcc = if variant.xcc { blocks / super::XCCS } else { blocks };
    if u64::from(on_an_xcc) * u64::from(a_block) < u64::from(args.count) {
        return Err(Error::new(format!(
            "{blocks} blocks of {a_block} sub-executors were launched for {} records",
            args.count
        )));
    }
    let bytes = u64::from(args.count) * SubExecutorRecord::SIZE as u64;
    let records = reach(ledger, device, args.records, bytes)?.cast::<SubExecutorRecord>();
    if !records.is_aligned() {
        return Err(Error::new(format!("records at {:#x} are not aligned to 8 bytes", args.records)));
    }
    for number in 0..args.count as usize {
        if variant.xcc && !take(ledger, device, args, number)? {
            continue;
        }
        // SAFETY: the ledger holds `count` records there, aligned; they stay mapped until this
        // queue is drained.
        let record = unsafe { records.add(number) };
        // SAFETY: as above; any bytes are a record, and its writer has ordered itself before this launch.
        let part = Part::check(ledger, device, variant, unsafe { record.read() })
            .map_err(|err| err.context(format!("transfer kernel, sub-executor {number}")))?;
        let start = now_ns();
        for execution in 0..u64::from(args.executions) {
            part.execute(args.first.wrapping_add(execution));
        }
        fence(Ordering::SeqCst);
        let stop = now_ns();
        // SAFETY: inside the record proven above.
        unsafe { (&raw mut (*record).start_ticks).write(start) };
        // SAFETY: inside the record proven above.
        unsafe { (&raw mut (*record).stop_ticks).write(stop) };
    }
    Ok(())
}

/// Takes a record's ticket; it stays undone if nobody may.
fn take(ledger: &RwLock<Ledger>, device: DeviceId, args: &TransferArgs, number: usize) -> Result<bool, Error> {
    let tickets = args.records + u64::from(args.count) * SubExecutorRecord::SIZE as u64;
    let size = size_of::<Ticket>();
    let ticket = reach(ledger, device, tickets + (number * size) as u64, size as u64)?.cast::<Ticket>();
    // SAFETY: the ledger proved the bytes, which stay mapped until this queue is drained.
    let [wanted, taken] = unsafe { ticket.read_unaligned() };
    // SAFETY: as above.
    unsafe { ticket.write_unaligned([wanted, 1]) };
    Ok(taken == 0 && (wanted == ANY_XCC || wanted < super::XCCS))
}

fn reach(ledger: &RwLock<Ledger>, device: DeviceId, address: u64, bytes: u64) -> Result<*mut u8, Error> {
    ledger.read().unwrap_or_else(PoisonError::into_inner).reach(device, address, bytes, Via::Kernel)
}

/// A record whose every slice is known to be mapped, and whose team is its own in every variant but one.
struct Part(SubExecutorRecord);

impl Part {
    fn check(
        ledger: &RwLock<Ledger>,
        device: DeviceId,
        variant: &TransferVariant,
        mut record: SubExecutorRecord,
    ) -> Result<Part, Error> {
        if !variant.single_team {
            (record.team_size, record.team_index) = (1, 0);
        }
        if record.team_index >= record.team_size {
            return Err(Error::new(format!("number {} of a team of {}", record.team_index, record.team_size)));
        }
        if variant.copy && record.src_count != 1 {
            return Err(Error::new(format!("{} sources for a kernel that was compiled for 1", record.src_count)));
        }
        let sides = [
            ("source", record.src_count, &record.src, record.src_stride, record.src_slices),
            ("destination", record.dst_count, &record.dst, record.dst_stride, record.dst_slices),
        ];
        for (name, count, addresses, stride, slices) in sides {
            if count as usize > MAX_SIDES || slices == 0 {
                return Err(Error::new(format!(
                    "{count} {name}s of {slices} slices: at most {MAX_SIDES} of at least 1"
                )));
            }
            let extent = (slices - 1).checked_mul(stride);
            let extent = record.elements.checked_mul(ELEMENT).and_then(|bytes| extent?.checked_add(bytes));
            for (ordinal, address) in addresses[..count as usize].iter().enumerate() {
                let reached = reach(ledger, device, *address, extent.unwrap_or(u64::MAX));
                reached.map_err(|err| err.context(format!("{name} {ordinal}")))?;
            }
        }
        Ok(Part(record))
    }

    /// Execution number `n`: reads and writes slice `n` modulo their number, as the plan laid them out.
    fn execute(&self, n: u64) {
        let record = &self.0;
        let src_skip = n % record.src_slices * record.src_stride;
        let dst_skip = n % record.dst_slices * record.dst_stride;
        let srcs = &record.src[..record.src_count as usize];
        let dsts = &record.dst[..record.dst_count as usize];
        let mut sum = [f32::from_ne_bytes([FILL_BYTE; 4]); CHUNK];
        let mut term = [0f32; CHUNK];
        let mut done = u64::from(record.team_index) * CHUNK as u64;
        while done < record.elements {
            let count = (record.elements - done).min(CHUNK as u64) as usize;
            let skip = done * ELEMENT;
            for (ordinal, src) in srcs.iter().enumerate() {
                let into = if ordinal == 0 { &mut sum } else { &mut term };
                load(src + src_skip + skip, &mut into[..count]);
                if ordinal > 0 {
                    sum[..count].iter_mut().zip(&term[..count]).for_each(|(sum, term)| *sum += term);
                }
            }
            // A transfer that only reads has to read all the same.
            black_box(&sum);
            for dst in dsts {
                store(&sum[..count], dst + dst_skip + skip);
            }
            done += u64::from(record.team_size) * CHUNK as u64;
        }
    }
}

/// `T` is `u8` or `f32`, of which every bit pattern is a value.
fn load<T: Copy>(address: u64, into: &mut [T]) {
    let from = ptr::with_exposed_provenance::<u8>(address as usize);
    // SAFETY: the callers proved the range mapped, and it stays so until this queue is drained;
    // `into` is on the stack, so they cannot overlap.
    unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr().cast::<u8>(), size_of_val(into)) };
}

fn store(from: &[f32], address: u64) {
    let into = ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: as for `load`.
    unsafe { ptr::copy_nonoverlapping(from.as_ptr().cast::<u8>(), into, size_of_val(from)) };
}

/// Compares byte by byte: adds the number of differences, lowers the first offset.
pub fn check(ledger: &RwLock<Ledger>, device: DeviceId, args: &CheckArgs) -> Result<(), Error> {
    let context = |name: &'static str| move |err: Error| err.context(format!("check kernel, {name}"));
    reach(ledger, device, args.actual, args.bytes).map_err(context("actual"))?;
    reach(ledger, device, args.expected, args.bytes).map_err(context("expected"))?;
    let result = reach(ledger, device, args.result, 16).map_err(context("result"))?.cast::<[u64; 2]>();
    // SAFETY: 16 bytes in live memory, kept mapped until this queue is drained.
    let [mut wrong, mut first] = unsafe { result.read_unaligned() };
    let (mut actual, mut expected) = ([0u8; CHUNK], [0u8; CHUNK]);
    let mut done = 0;
    while done < args.bytes {
        let count = (args.bytes - done).min(CHUNK as u64) as usize;
        let (ours, theirs) = (&mut actual[..count], &mut expected[..count]);
        load(args.actual + done, ours);
        load(args.expected + done, theirs);
        if ours != theirs {
            let mut differences = ours.iter().zip(theirs).enumerate().filter(|(_, (a, b))| a != b).map(|(i, _)| i);
            first = differences.next().map_or(first, |i| first.min(done + i as u64));
            wrong += 1 + differences.count() as u64;
        }
        done += count as u64;
    }
    // SAFETY: as for the read.
    unsafe { result.write_unaligned([wrong, first]) };
    Ok(())
}

/// Waits until the flag is set, and says when that was seen.
pub fn latch(ledger: &RwLock<Ledger>, device: DeviceId, args: &LatchArgs) -> Result<(), Error> {
    let context = |name: &'static str| move |err: Error| err.context(format!("latch kernel, {name}"));
    let flag = reach(ledger, device, args.flag, 4).map_err(context("flag"))?.cast::<AtomicU32>();
    let released = reach(ledger, device, args.released, 8).map_err(context("released"))?.cast::<u64>();
    if !flag.is_aligned() {
        return Err(Error::new(format!("latch kernel: the flag at {:#x} is not aligned to 4 bytes", args.flag)));
    }
    // SAFETY: 4 aligned bytes in live memory, kept mapped until this queue is drained; whoever else
    // writes them meanwhile does it in one store.
    let flag = unsafe { &*flag };
    let start = now_ns();
    let seen = loop {
        let set = flag.load(Ordering::Acquire).wrapping_sub(args.value) as i32 >= 0;
        let now = now_ns();
        if set {
            break now;
        }
        if now - start >= args.max_ticks {
            break 0;
        }
        thread::yield_now();
    };
    // SAFETY: 8 bytes in live memory, kept mapped until this queue is drained.
    unsafe { released.write_unaligned(seen) };
    Ok(())
}

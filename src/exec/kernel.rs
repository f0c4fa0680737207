//! Executor `G`: a device kernel, one block a sub-executor, all transfers in one launch.

use std::ops::Range;
use std::sync::Arc;

use super::mapped::{Reach, Sides, Slices};
use super::{BoundTransfer, Clock, Executions, SampleTimes, TransferTime, Window, Work};
use crate::clock::now_ns;
use crate::error::Error;
use crate::gpu::owner::{Buffer, Device, Event, Stream};
use crate::gpu::{KernelId, KernelName, MAX_SIDES, SubExecutorRecord, TransferArgs};
use crate::place::MemKind;
use crate::plan::rotation::Layout;
use crate::region::Address;
use crate::units::Bytes;

/// Threads of a block: what TransferBench launches by default, and a size that every device takes.
pub const BLOCK_THREADS: u32 = 256;

const ELEMENT: u64 = 4;

/// A kernel executor ready to run samples.
pub struct Ready {
    /// First, so that it is waited for before what it uses is freed.
    stream: Stream,
    start: Event,
    stop: Event,
    kernel: KernelId,
    records: Buffer,
    /// One for each transfer.
    blocks: Vec<Range<usize>>,
    args: TransferArgs,
    /// What `times` reads the records into.
    seen: Vec<u8>,
    /// Start ticks of each block in the sample before: a launch that did not run repeats them.
    before: Vec<u64>,
    ns_per_tick: f64,
    doubted: bool,
    window: Window,
    device: Arc<Device>,
    _reach: Reach,
}

impl Ready {
    /// # Errors
    /// If a transfer does not fit the kernel, or the device cannot reach its memory.
    pub fn new(work: Work, device: &Arc<Device>) -> Result<Ready, Error> {
        let context = |err: Error| err.context(format!("prepare {}", work.exe));
        work.transfers.iter().try_for_each(check).map_err(context)?;
        let (reach, sides) = Reach::new(&work.transfers, device).map_err(context)?;
        let mut bytes = Vec::new();
        let mut blocks = Vec::with_capacity(work.transfers.len());
        for (transfer, sides) in work.transfers.iter().zip(&sides) {
            let first = bytes.len() / SubExecutorRecord::SIZE;
            blocks.push(first..first + transfer.shares.len());
            bytes.extend(transfer.shares.iter().flat_map(|share| record(share.offset, share.bytes, sides).to_bytes()));
        }
        let count = bytes.len() / SubExecutorRecord::SIZE;
        let records = device.allocate(MemKind::Device, Bytes(bytes.len() as u64), false).map_err(context)?;
        device.write(records.address(), &bytes).map_err(context)?;
        Ok(Ready {
            stream: device.stream().map_err(context)?,
            start: device.event().map_err(context)?,
            stop: device.event().map_err(context)?,
            kernel: device.load_kernel(KernelName::Transfer).map_err(context)?,
            args: TransferArgs { records: records.address().0, first: 0, executions: 0, _pad: 0 },
            records,
            blocks,
            seen: bytes,
            before: vec![0; count],
            ns_per_tick: device.ns_per_tick().map_err(context)?,
            doubted: false,
            window: Window { start_ns: 0, end_ns: 0 },
            device: Arc::clone(device),
            _reach: reach,
        })
    }

    pub fn arm(&mut self, sample: Executions) -> Result<(), Error> {
        (self.args.first, self.args.executions) = (sample.first, sample.count);
        Ok(())
    }

    pub fn go(&mut self) -> Result<(), Error> {
        self.window.start_ns = now_ns();
        self.stream.record(&self.start)?;
        self.stream.launch(self.kernel, self.before.len() as u32, BLOCK_THREADS, &self.args.to_bytes())?;
        self.stream.record(&self.stop)
    }

    pub fn wait(&mut self) -> Result<(), Error> {
        let result = self.stream.wait();
        self.window.end_ns = now_ns();
        result
    }

    /// # Errors
    /// If the kernel has not stamped its records in this sample: it did not run.
    pub fn times(&mut self) -> Result<SampleTimes, Error> {
        self.device.read(self.records.address(), &mut self.seen)?;
        let (stamps, _) = self.seen.as_chunks::<{ SubExecutorRecord::SIZE }>();
        let mut transfers = Vec::with_capacity(self.blocks.len());
        for blocks in &self.blocks {
            let (mut start, mut stop) = (u64::MAX, 0);
            for block in blocks.clone() {
                let record = SubExecutorRecord::from_bytes(stamps[block]);
                if record.start_ticks == self.before[block] || record.stop_ticks < record.start_ticks {
                    return Err(Error::new(format!(
                        "block {block} of the transfer kernel left no time stamps in this sample (start {}, stop {}): \
                         it did not run",
                        record.start_ticks, record.stop_ticks
                    )));
                }
                self.before[block] = record.start_ticks;
                (start, stop) = (start.min(record.start_ticks), stop.max(record.stop_ticks));
            }
            let duration_ns = (stop - start) as f64 * self.ns_per_tick;
            transfers.push(TransferTime { duration_ns, window: self.window });
        }
        let longest = transfers.iter().map(|time| time.duration_ns).fold(0.0, f64::max);
        self.doubt(longest)?;
        Ok(SampleTimes { executor: self.window, transfers })
    }

    /// Time stamps of the kernel lie between the events around it: if they do not, its clock is not
    /// what the runtime says. Said once; 10 % and 20 us are more than events are off.
    fn doubt(&mut self, longest_ns: f64) -> Result<(), Error> {
        let around_ns = self.stop.ns_since(&self.start)?;
        if !self.doubted && longest_ns > around_ns * 1.1 + 20_000.0 {
            self.doubted = true;
            tracing::warn!(
                "device {}: a transfer took {longest_ns:.0} ns by the clock in the kernel and {around_ns:.0} ns by the \
                 events around it: {} ns a tick is doubtful",
                self.device.id().0,
                self.ns_per_tick
            );
        }
        Ok(())
    }

    pub fn clock(&self) -> Clock {
        Clock::DeviceClock
    }
}

fn check(transfer: &BoundTransfer) -> Result<(), Error> {
    let index = transfer.index;
    for (name, buffers) in [("sources", &transfer.srcs), ("destinations", &transfer.dsts)] {
        if buffers.len() > MAX_SIDES {
            return Err(Error::new(format!(
                "transfer {index} has {} {name}: a kernel takes at most {MAX_SIDES}",
                buffers.len()
            )));
        }
    }
    match transfer.shares.iter().find(|share| share.offset % ELEMENT != 0 || share.bytes % ELEMENT != 0) {
        Some(share) => Err(Error::new(format!(
            "transfer {index} has a share of {} bytes at {}: a kernel moves whole elements of {ELEMENT} bytes",
            share.bytes, share.offset
        ))),
        None => Ok(()),
    }
}

/// One share of a transfer. All buffers of a side have one layout.
fn record(offset: u64, bytes: u64, sides: &Sides) -> SubExecutorRecord {
    let (src_stride, src_slices) = shape(&sides.srcs);
    let (dst_stride, dst_slices) = shape(&sides.dsts);
    SubExecutorRecord {
        elements: bytes / ELEMENT,
        src_count: sides.srcs.len() as u32,
        dst_count: sides.dsts.len() as u32,
        src: starts(&sides.srcs, offset),
        dst: starts(&sides.dsts, offset),
        src_stride,
        src_slices,
        dst_stride,
        dst_slices,
        start_ticks: 0,
        stop_ticks: 0,
    }
}

fn shape(side: &[Slices]) -> (u64, u64) {
    let shape = |layout: &Layout| (layout.stride.0, layout.slices);
    let first = side.first().map_or((0, 1), |slices| shape(slices.layout()));
    assert!(side.iter().all(|slices| shape(slices.layout()) == first), "all buffers of a side have one shape");
    first
}

fn starts(side: &[Slices], offset: u64) -> [u64; MAX_SIDES] {
    let mut starts = [0; MAX_SIDES];
    for (start, slices) in starts.iter_mut().zip(side) {
        let Address(slice) = slices.slice(0);
        *start = slice + offset;
    }
    starts
}

//! Executor `G`: a device kernel, one block or warp a sub-executor, all transfers in one launch.

use std::sync::Arc;

use super::mapped::{Reach, Sides, Slices};
use super::{BoundTransfer, Clock, Executions, SampleTimes, TransferTime, Window, Work};
use crate::clock::now_ns;
use crate::config::options::{BlockOrder, Gfx, SubExecutorType};
use crate::error::Error;
use crate::gpu::owner::{Buffer, Device, Event, Stream};
use crate::gpu::{ANY_XCC, KernelId, KernelSpec, MAX_SIDES, SubExecutorRecord, Ticket, TransferArgs, TransferVariant};
use crate::place::MemKind;
use crate::plan::rotation::Layout;
use crate::region::Address;
use crate::units::Bytes;

/// Makes the shuffled order the same in every run; the help text of `gfx.block_order` names it.
const SHUFFLE_SEED: u64 = 75;

const ELEMENT: u64 = 4;

/// A kernel executor ready to run samples.
pub struct Ready {
    /// First, so that it is waited for before what it uses is freed.
    stream: Stream,
    start: Event,
    stop: Event,
    kernel: KernelId,
    records: Buffer,
    /// Behind the records, where they want an XCC: anew for each sample. Else empty.
    tickets: Vec<u8>,
    /// Which records are a transfer's.
    numbers: Vec<Vec<usize>>,
    blocks: u32,
    threads: u32,
    args: TransferArgs,
    /// What `times` reads the records into.
    seen: Vec<u8>,
    /// Start ticks of each record in the sample before: a launch that did not run repeats them.
    before: Vec<u64>,
    ns_per_tick: f64,
    doubted: bool,
    window: Window,
    device: Arc<Device>,
    _reach: Reach,
}

/// What is launched, and how sub-executors become its blocks.
pub(super) struct Launch<'a> {
    pub spec: KernelSpec,
    pub threads: u32,
    /// Sub-executors of a block.
    pub a_block: u32,
    pub order: BlockOrder,
    /// All sub-executors of a transfer have all of it.
    pub single_team: bool,
    /// Compute units of each XCC that it may run on; empty = all.
    pub cu_mask: &'a [u32],
    /// XCC of each transfer; empty = any.
    pub xccs: &'a [Option<u32>],
}

impl Ready {
    /// # Errors
    /// If a transfer does not fit the kernel, or the device cannot reach its memory.
    pub fn new(work: Work, gfx: &Gfx, device: &Arc<Device>) -> Result<Ready, Error> {
        Ready::on_xccs(work, gfx, &[], device)
    }

    /// The same, with the XCC that each transfer has to run on; an empty list asks for none.
    ///
    /// # Errors
    /// As for `new`.
    pub fn on_xccs(work: Work, gfx: &Gfx, xccs: &[Option<u32>], device: &Arc<Device>) -> Result<Ready, Error> {
        let variant = variant(&work.transfers, gfx, &device.info().architecture);
        let variant = TransferVariant { xcc: xccs.iter().any(Option::is_some), ..variant };
        let launch = Launch {
            spec: KernelSpec::Transfer(variant),
            threads: variant.block_threads,
            a_block: if variant.warps { (variant.block_threads / device.info().warp_size).max(1) } else { 1 },
            order: gfx.block_order,
            single_team: variant.single_team,
            cu_mask: &gfx.cu_mask,
            xccs,
        };
        Ready::with(work, &launch, device)
    }

    /// Any kernel that takes records.
    pub(super) fn with(work: Work, launch: &Launch, device: &Arc<Device>) -> Result<Ready, Error> {
        let context = |err: Error| err.context(format!("prepare {}", work.exe));
        work.transfers.iter().try_for_each(check).map_err(context)?;
        let (reach, sides) = Reach::new(&work.transfers, device).map_err(context)?;
        let order = order(&work.transfers, launch.order);
        let mut numbers = vec![Vec::new(); work.transfers.len()];
        let mut bytes = Vec::with_capacity(order.len() * SubExecutorRecord::SIZE);
        for (number, &(transfer, share)) in order.iter().enumerate() {
            numbers[transfer].push(number);
            let record = record(&work.transfers[transfer], share, launch.single_team, &sides[transfer]);
            bytes.extend(record.to_bytes());
        }
        let tickets = tickets(launch.xccs, &order);
        let count = order.len() as u32;
        let blocks = count.div_ceil(launch.a_block);
        let room = Bytes((bytes.len() + tickets.len()) as u64);
        let records = device.allocate(MemKind::Device, room, false).map_err(context)?;
        device.write(records.address(), &bytes).map_err(context)?;
        Ok(Ready {
            stream: stream(device, launch.cu_mask).map_err(context)?,
            start: device.event().map_err(context)?,
            stop: device.event().map_err(context)?,
            kernel: device.load_kernel(launch.spec).map_err(context)?,
            args: TransferArgs { records: records.address().0, first: 0, executions: 0, count },
            records,
            numbers,
            // Blocks go to the XCCs in turn: as many on each.
            blocks: if tickets.is_empty() { blocks } else { blocks * device.info().xccs.max(1) },
            tickets,
            threads: launch.threads,
            seen: bytes,
            before: vec![0; order.len()],
            ns_per_tick: device.ns_per_tick().map_err(context)?,
            doubted: false,
            window: Window { start_ns: 0, end_ns: 0 },
            device: Arc::clone(device),
            _reach: reach,
        })
    }

    pub fn arm(&mut self, sample: Executions) -> Result<(), Error> {
        (self.args.first, self.args.executions) = (sample.first, sample.count);
        if self.tickets.is_empty() {
            return Ok(());
        }
        let after = Address(self.records.address().0 + self.seen.len() as u64);
        self.device.write(after, &self.tickets)
    }

    pub fn go(&mut self) -> Result<(), Error> {
        self.window.start_ns = now_ns();
        self.stream.record(&self.start)?;
        self.stream.launch(self.kernel, self.blocks, self.threads, &self.args.to_bytes())?;
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
        let mut transfers = Vec::with_capacity(self.numbers.len());
        for numbers in &self.numbers {
            let (mut start, mut stop) = (u64::MAX, 0);
            for &number in numbers {
                let record = SubExecutorRecord::from_bytes(stamps[number]);
                if record.start_ticks == self.before[number] || record.stop_ticks < record.start_ticks {
                    return Err(Error::new(format!(
                        "sub-executor {number} of the transfer kernel left no time stamps in this sample (start {}, stop {}): \
                         it did not run",
                        record.start_ticks, record.stop_ticks
                    )));
                }
                self.before[number] = record.start_ticks;
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

/// The constants that the kernel is compiled with.
fn variant(transfers: &[BoundTransfer], gfx: &Gfx, architecture: &str) -> TransferVariant {
    TransferVariant {
        block_threads: gfx.block_size,
        unroll: gfx.unroll.unwrap_or_else(|| TransferVariant::unroll_for(architecture)),
        word: gfx.word_size,
        temporal: gfx.temporal,
        wave_order: gfx.wave_order,
        single_team: gfx.single_team == Some(true),
        warps: gfx.se_type == SubExecutorType::Warp,
        copy: transfers.iter().all(|transfer| transfer.srcs.len() == 1),
        xcc: false,
    }
}

/// What each record wants, if one wants anything.
fn tickets(xccs: &[Option<u32>], order: &[(usize, usize)]) -> Vec<u8> {
    if xccs.iter().all(Option::is_none) {
        return Vec::new();
    }
    let ticket = |(transfer, _): &(usize, usize)| -> Ticket { [xccs[*transfer].unwrap_or(ANY_XCC), 0] };
    order.iter().flat_map(ticket).flat_map(u32::to_ne_bytes).collect()
}

/// A stream for all compute units, or for some of each XCC.
fn stream(device: &Arc<Device>, cu_mask: &[u32]) -> Result<Stream, Error> {
    match cu_mask {
        [] => device.stream(),
        units => device.masked_stream(&mask_words(units, device.info().xccs.max(1))),
    }
}

/// Unit `u` of XCC `x` is bit `u * xccs + x`, in as many words as TransferBench gives: 64 bits an XCC.
fn mask_words(units: &[u32], xccs: u32) -> Vec<u32> {
    let mut words = vec![0; 2 * xccs as usize];
    for bit in units.iter().flat_map(|unit| (0..xccs).map(move |xcc| unit * xccs + xcc)) {
        words[bit as usize / 32] |= 1 << (bit % 32);
    }
    words
}

/// Every share of every transfer, by position, in the order of the launch.
fn order(transfers: &[BoundTransfer], order: BlockOrder) -> Vec<(usize, usize)> {
    let shares = |(i, transfer): (usize, &BoundTransfer)| (0..transfer.shares.len()).map(move |share| (i, share));
    let mut all: Vec<(usize, usize)> = transfers.iter().enumerate().flat_map(shares).collect();
    match order {
        BlockOrder::Sequential => {}
        BlockOrder::Interleaved => all.sort_by_key(|&(transfer, share)| (share, transfer)),
        BlockOrder::Random => {
            tracing::info!("sub-executors are shuffled with seed {SHUFFLE_SEED}");
            shuffle(&mut all);
        }
    }
    all
}

/// Fisher and Yates with the numbers of SplitMix64: the bias of the remainder is below 2^-40 for
/// as many sub-executors as there can be.
fn shuffle<T>(list: &mut [T]) {
    let mut state = SHUFFLE_SEED;
    for last in (1..list.len()).rev() {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        list.swap(last, ((mixed ^ (mixed >> 31)) % (last as u64 + 1)) as usize);
    }
}

/// One share of a transfer, or its place in a team that has the whole. All buffers of a side have
/// one layout.
fn record(transfer: &BoundTransfer, share: usize, single_team: bool, sides: &Sides) -> SubExecutorRecord {
    let (src_stride, src_slices) = shape(&sides.srcs);
    let (dst_stride, dst_slices) = shape(&sides.dsts);
    let team = transfer.shares.len() as u32;
    let (offset, bytes, team_size, team_index) = if single_team {
        (0, transfer.bytes.0, team, share as u32)
    } else {
        (transfer.shares[share].offset, transfer.shares[share].bytes, 1, 0)
    };
    SubExecutorRecord {
        elements: bytes / ELEMENT,
        src_count: sides.srcs.len() as u32,
        dst_count: sides.dsts.len() as u32,
        team_size,
        team_index,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::Options;
    use crate::plan::split::shares;

    fn transfer(index: u32, sub_executors: u32) -> BoundTransfer {
        let bytes = Bytes(4096);
        let shares = shares(bytes, sub_executors, Bytes(256));
        BoundTransfer { index, bytes, srcs: Vec::new(), dsts: Vec::new(), shares }
    }

    #[test]
    fn sub_executors_come_in_the_order_asked_for() {
        let transfers = [transfer(0, 3), transfer(1, 2)];
        let sequential = order(&transfers, BlockOrder::Sequential);
        assert_eq!(sequential, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]);
        assert_eq!(order(&transfers, BlockOrder::Interleaved), [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]);
    }

    #[test]
    fn the_shuffled_order_has_everything_once_and_is_always_the_same() {
        let transfers = [transfer(0, 16), transfer(1, 16)];
        let shuffled = order(&transfers, BlockOrder::Random);
        assert_eq!(shuffled, order(&transfers, BlockOrder::Random));
        let mut sorted = shuffled.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, order(&transfers, BlockOrder::Sequential));
        assert_ne!(shuffled, sorted);
    }

    #[test]
    fn a_team_has_the_whole_and_its_members_their_numbers() {
        let sides = Sides { srcs: Vec::new(), dsts: Vec::new() };
        let transfer = transfer(0, 4);
        let team = record(&transfer, 2, true, &sides);
        assert_eq!((team.elements, team.team_size, team.team_index), (1024, 4, 2));
        let alone = record(&transfer, 2, false, &sides);
        assert_eq!((alone.elements, alone.team_size, alone.team_index), (256, 1, 0));
    }

    #[test]
    fn a_mask_has_a_bit_for_each_unit_of_each_xcc() {
        assert_eq!(mask_words(&[0, 33], 1), [1, 2]);
        // Bits 10 and 11, 20 to 25.
        assert_eq!(mask_words(&[5, 10, 11, 12], 2), [0x3f0_0c00, 0, 0, 0]);
        assert_eq!(mask_words(&[37], 8)[9], 0xff << 8);
        assert_eq!(mask_words(&[63], 16)[31], 0xffff << 16);
    }

    #[test]
    fn records_want_the_xcc_of_their_transfer_anew_for_each_sample() {
        let order = [(0, 0), (1, 0), (0, 1)];
        assert!(tickets(&[], &order).is_empty() && tickets(&[None, None], &order).is_empty());
        let words = tickets(&[Some(3), None], &order);
        let words: Vec<u32> = words.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect();
        assert_eq!(words, [3, 0, ANY_XCC, 0, 3, 0]);
    }

    #[test]
    fn the_default_variant_on_nvidia_is_the_embedded_one() {
        let gfx = Options::default().gfx;
        let general = variant(&[transfer(0, 1)], &gfx, "sm_90");
        assert_eq!(general, TransferVariant::default());
        let unroll = |architecture: &str| variant(&[], &gfx, architecture).unroll;
        assert_eq!([unroll("gfx90a:sramecc+:xnack-"), unroll("gfx942"), unroll("gfx1250")], [8, 4, 32]);
        assert_eq!(variant(&[], &Gfx { unroll: Some(3), ..gfx.clone() }, "gfx942").unroll, 3);
    }
}

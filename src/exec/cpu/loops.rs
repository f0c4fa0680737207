//! The loops that read, add and write the share of one sub-executor.
//!
//! Each body is written once over `Vector` and compiled once per instruction set; which one runs
//! is decided when the executor is made. All memory is reached through `Region`s, which prove that
//! it is mapped.

#[cfg(test)]
mod tests;
mod vector;

use std::hint::black_box;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use crate::exec::BoundTransfer;
use crate::memory::rotating::Rotating;
use crate::plan::split::Share;
use crate::region::Address;
#[cfg(target_arch = "x86_64")]
use vector::{Avx2, Avx512, Sse2};
use vector::{Portable, Vector};

/// Every byte of a destination without sources (TransferBench's value).
pub const FILL_BYTE: u8 = 0x4B;

/// Destinations are written in whole lines of this size.
const LINE_BYTES: usize = 64;

/// Vectors moved per round. Two to eight are equally fast; sixteen lose 20 % on Zen 4.
const ROUND: usize = 4;

/// Independent sums of a read-only transfer, so that the latency of an add never limits it.
const READ_ROUND: usize = 8;

/// How far ahead of the loads sources are prefetched, where stores are streaming: 1 to 4 KiB are
/// equally good and give 20 % over no prefetch on Zen 4. Ordinary stores gain nothing from it.
const PREFETCH_BYTES: usize = 2048;

/// The instruction set of the loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    Avx512,
    Avx2,
    Sse2,
    Portable,
}

impl Isa {
    /// Those that this CPU has, widest first; never empty.
    pub fn available() -> Vec<Isa> {
        [Isa::Avx512, Isa::Avx2, Isa::Sse2, Isa::Portable].into_iter().filter(|isa| isa.is_available()).collect()
    }

    pub fn best() -> Isa {
        Isa::available()[0]
    }

    #[cfg(target_arch = "x86_64")]
    fn is_available(self) -> bool {
        match self {
            Isa::Avx512 => is_x86_feature_detected!("avx512f"),
            Isa::Avx2 => is_x86_feature_detected!("avx2"),
            // Part of every x86-64.
            Isa::Sse2 | Isa::Portable => true,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_available(self) -> bool {
        self == Isa::Portable
    }

    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "AVX-512",
            Isa::Avx2 => "AVX2",
            Isa::Sse2 => "SSE2",
            Isa::Portable => "portable",
        }
    }
}

/// One share of a transfer with everything bound: nothing is allocated when it runs.
pub struct Piece {
    srcs: Vec<Rotating>,
    dsts: Vec<Rotating>,
    share: Share,
    isa: Isa,
    streaming: bool,
    /// Start of the share in the current slice of each source and destination.
    src_at: Vec<Address>,
    dst_at: Vec<Address>,
}

impl Piece {
    /// # Panics
    /// If the CPU cannot reach a buffer, if a size or address is no multiple of 4, if the share
    /// leaves the transfer or if the CPU lacks `isa`: the plan checked all of it.
    pub fn new(transfer: &BoundTransfer, share: Share, isa: Isa, streaming: bool) -> Piece {
        assert!(isa.is_available(), "{} loops on a CPU without it", isa.name());
        let end = share.offset.checked_add(share.bytes).expect("a share ends inside 64 bits");
        assert!(share.offset.is_multiple_of(4) && share.bytes.is_multiple_of(4), "shares hold whole elements");
        for buffer in transfer.srcs.iter().chain(&transfer.dsts) {
            assert!(buffer.region().cpu_can_access(), "the CPU cannot reach {:?}", buffer.region());
            assert!(end <= buffer.layout().bytes.0, "the share ends inside its slice");
            assert!(buffer.slice(0).0.is_multiple_of(4), "elements are aligned");
            assert!(buffer.layout().stride.0.is_multiple_of(4), "elements are aligned in every slice");
        }
        Piece {
            src_at: vec![Address(0); transfer.srcs.len()],
            dst_at: vec![Address(0); transfer.dsts.len()],
            srcs: transfer.srcs.clone(),
            dsts: transfer.dsts.clone(),
            share,
            isa,
            streaming,
        }
    }

    /// Runs executions `first` to `first + count - 1`, back to back; every store is visible to
    /// whoever synchronises with this thread afterwards.
    pub fn execute(&mut self, first: u64, count: u32) {
        for n in first..first + u64::from(count) {
            for (at, buffer) in self.src_at.iter_mut().zip(&self.srcs) {
                *at = Address(buffer.slice(n).0 + self.share.offset);
            }
            for (at, buffer) in self.dst_at.iter_mut().zip(&self.dsts) {
                *at = Address(buffer.slice(n).0 + self.share.offset);
            }
            self.execute_once();
        }
        drain();
    }

    fn execute_once(&self) {
        let (srcs, dsts) = (&self.src_at[..], &self.dst_at[..]);
        let elements = (self.share.bytes / 4) as usize;
        // Streaming stores need aligned addresses, and one head aligns all destinations or none.
        let line = |at: &Address| at.0 % LINE_BYTES as u64;
        let streaming = self.streaming && dsts.iter().all(|at| line(at) == line(&dsts[0]));
        match self.isa {
            // SAFETY: `new` checked that the CPU has the instruction set and that the share lies
            // inside every slice; the `Rotating`s keep the slices mapped.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { run_avx512(srcs, dsts, elements, streaming) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { run_avx2(srcs, dsts, elements, streaming) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Sse2 => unsafe { run::<Sse2>(srcs, dsts, elements, streaming) },
            // SAFETY: as above; the portable loops need no instruction set.
            _ => unsafe { run::<Portable>(srcs, dsts, elements, streaming) },
        }
    }
}

/// Streaming stores are weakly ordered: without the fence the flag that says "done" could overtake
/// them.
fn drain() {
    // SAFETY: SSE is part of every x86-64, and a fence touches no memory.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// # Safety
/// As `run`, on a CPU with AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn run_avx512(srcs: &[Address], dsts: &[Address], elements: usize, streaming: bool) {
    // SAFETY: passed on to the caller.
    unsafe { run::<Avx512>(srcs, dsts, elements, streaming) }
}

/// # Safety
/// As `run`, on a CPU with AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn run_avx2(srcs: &[Address], dsts: &[Address], elements: usize, streaming: bool) {
    // SAFETY: passed on to the caller.
    unsafe { run::<Avx2>(srcs, dsts, elements, streaming) }
}

/// Picks the body. The common shapes get one of their own, with the number of sources and
/// destinations known to the compiler.
///
/// # Safety
/// `elements` f32 are mapped and 4-byte aligned at every address; the CPU has the instruction set
/// of `V`; for `streaming`, all destinations have the same position in their line.
#[inline(always)]
unsafe fn run<V: Vector>(srcs: &[Address], dsts: &[Address], elements: usize, streaming: bool) {
    match (srcs, dsts, streaming) {
        // SAFETY: passed on to the caller, here and in every arm.
        ([src], [], true) => unsafe { read::<V, true>(&[*src], elements) },
        // SAFETY: as above.
        ([src], [], false) => unsafe { read::<V, false>(&[*src], elements) },
        // SAFETY: as above.
        (_, [], true) => unsafe { read::<V, true>(srcs, elements) },
        // SAFETY: as above.
        (_, [], false) => unsafe { read::<V, false>(srcs, elements) },
        // SAFETY: as above.
        ([src], [dst], true) => unsafe { add::<V, true>(&[*src], &[*dst], elements) },
        // SAFETY: as above.
        ([src], [dst], false) => unsafe { add::<V, false>(&[*src], &[*dst], elements) },
        // SAFETY: as above.
        ([], [dst], true) => unsafe { add::<V, true>(&[], &[*dst], elements) },
        // SAFETY: as above.
        ([], [dst], false) => unsafe { add::<V, false>(&[], &[*dst], elements) },
        // SAFETY: as above.
        (_, _, true) => unsafe { add::<V, true>(srcs, dsts, elements) },
        // SAFETY: as above.
        (_, _, false) => unsafe { add::<V, false>(srcs, dsts, elements) },
    }
}

/// Writes the sum of all sources, left to right, to every destination; copies one source; fills
/// where there is none.
///
/// # Safety
/// As `run`; at least one destination.
#[inline(always)]
unsafe fn add<V: Vector, const STREAM: bool>(srcs: &[Address], dsts: &[Address], elements: usize) {
    let head = elements_to_line(dsts[0], elements);
    // SAFETY: `head <= elements`.
    unsafe { add_short::<V>(srcs, dsts, 0, head) };
    let round = ROUND * V::LANES;
    let mut i = head;
    while elements - i >= round {
        if STREAM {
            prefetch::<V>(srcs, i + PREFETCH_BYTES / 4, round);
        }
        // SAFETY: the round ends inside `elements`.
        let mut sums: [V; ROUND] = std::array::from_fn(|j| unsafe { first::<V>(srcs, i + j * V::LANES) });
        for src in srcs.iter().skip(1) {
            for (j, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the round ends inside `elements`.
                *sum = unsafe { sum.add(V::load(element(*src, i + j * V::LANES))) };
            }
        }
        for dst in dsts {
            for (j, sum) in sums.iter().enumerate() {
                let at = element_mut(*dst, i + j * V::LANES);
                if STREAM {
                    // SAFETY: inside `elements`; the head aligned every destination.
                    unsafe { sum.stream(at) };
                } else {
                    // SAFETY: inside `elements`.
                    unsafe { sum.store(at) };
                }
            }
        }
        i += round;
    }
    // SAFETY: `i <= elements`.
    unsafe { add_short::<V>(srcs, dsts, i, elements - i) };
}

/// The same for fewer elements than a round, from `start`: whole vectors, then a part of one.
///
/// # Safety
/// As `run`, for elements `start` to `start + elements`.
#[inline(always)]
unsafe fn add_short<V: Vector>(srcs: &[Address], dsts: &[Address], start: usize, elements: usize) {
    let end = start + elements;
    let mut i = start;
    while end - i >= V::LANES {
        // SAFETY: the vector ends inside `end`.
        let mut sum = unsafe { first::<V>(srcs, i) };
        for src in srcs.iter().skip(1) {
            // SAFETY: as above.
            sum = unsafe { sum.add(V::load(element(*src, i))) };
        }
        for dst in dsts {
            // SAFETY: as above.
            unsafe { sum.store(element_mut(*dst, i)) };
        }
        i += V::LANES;
    }
    let lanes = end - i;
    if lanes == 0 {
        return;
    }
    let mut sum = match srcs {
        // SAFETY: no memory is touched.
        [] => unsafe { V::splat(FILL) },
        // SAFETY: `lanes` elements are left before `end`.
        [src, ..] => unsafe { V::load_first(element(*src, i), lanes) },
    };
    for src in srcs.iter().skip(1) {
        // SAFETY: as above.
        sum = unsafe { sum.add(V::load_first(element(*src, i), lanes)) };
    }
    for dst in dsts {
        // SAFETY: as above.
        unsafe { sum.store_first(element_mut(*dst, i), lanes) };
    }
}

/// Reads every source; the sum of all elements keeps the compiler from dropping the loads.
///
/// # Safety
/// As `run`.
#[inline(always)]
unsafe fn read<V: Vector, const STREAM: bool>(srcs: &[Address], elements: usize) {
    let Some(lead) = srcs.first() else { return };
    // SAFETY: no memory is touched.
    let mut sums: [V; READ_ROUND] = [unsafe { V::splat(0.0) }; READ_ROUND];
    let head = elements_to_line(*lead, elements);
    // SAFETY: `head <= elements`.
    sums[0] = unsafe { read_short(srcs, 0, head, sums[0]) };
    let round = READ_ROUND * V::LANES;
    let mut i = head;
    while elements - i >= round {
        if STREAM {
            prefetch::<V>(srcs, i + PREFETCH_BYTES / 4, round);
        }
        for src in srcs {
            for (j, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the round ends inside `elements`.
                *sum = unsafe { sum.add(V::load(element(*src, i + j * V::LANES))) };
            }
        }
        i += round;
    }
    // SAFETY: `i <= elements`.
    sums[0] = unsafe { read_short(srcs, i, elements - i, sums[0]) };
    black_box(sums);
}

/// # Safety
/// As `run`, for elements `start` to `start + elements`.
#[inline(always)]
unsafe fn read_short<V: Vector>(srcs: &[Address], start: usize, elements: usize, mut sum: V) -> V {
    let end = start + elements;
    let mut i = start;
    while i < end {
        let lanes = V::LANES.min(end - i);
        for src in srcs {
            // SAFETY: `lanes` elements are left before `end`.
            sum = unsafe { sum.add(V::load_first(element(*src, i), lanes)) };
        }
        i += lanes;
    }
    sum
}

const FILL: f32 = f32::from_bits(u32::from_ne_bytes([FILL_BYTE; 4]));

/// What the sum starts with: the vector at `i` of the first source, or the fill value.
///
/// # Safety
/// A whole vector is mapped at element `i` of the first source; the CPU has the instruction set.
#[inline(always)]
unsafe fn first<V: Vector>(srcs: &[Address], i: usize) -> V {
    match srcs {
        // SAFETY: no memory is touched.
        [] => unsafe { V::splat(FILL) },
        // SAFETY: passed on to the caller.
        [src, ..] => unsafe { V::load(element(*src, i)) },
    }
}

/// Fetches the lines of the elements from `i` on. They may lie past the end: a prefetch of an
/// unmapped address does nothing.
#[inline(always)]
fn prefetch<V: Vector>(srcs: &[Address], i: usize, elements: usize) {
    for src in srcs {
        let mut line = 0;
        while line < elements {
            V::prefetch(element(*src, i + line));
            line += LINE_BYTES / 4;
        }
    }
}

#[inline(always)]
fn element(base: Address, i: usize) -> *const f32 {
    with_exposed_provenance::<f32>(base.0 as usize).wrapping_add(i)
}

#[inline(always)]
fn element_mut(base: Address, i: usize) -> *mut f32 {
    with_exposed_provenance_mut::<f32>(base.0 as usize).wrapping_add(i)
}

/// Elements before the next line starts, at most all.
#[inline(always)]
fn elements_to_line(base: Address, elements: usize) -> usize {
    let over = base.0 as usize % LINE_BYTES;
    ((LINE_BYTES - over) % LINE_BYTES / 4).min(elements)
}

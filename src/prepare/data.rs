//! Fills sources and makes their replicas; guards, clears and poisons destinations.

use crate::error::Error;
use crate::exec::Executions;
use crate::plan::local::OwnBuffer;
use crate::plan::rotation::Layout;
use crate::prepare::owned::{Owned, Span, SpanCopy};
use crate::prepare::reference::{GUARD_BYTE, Reference};

/// Bytes that the host makes at a time, so that its memory does not grow with the transfer.
pub(crate) const BLOCK: u64 = 4 << 20;

/// Fills every slice of a source: slice 0 by the host and the others by doubling copies where the
/// memory is; all by the host if slices are distinct.
///
/// # Errors
/// Names the buffer.
pub fn fill_source(reference: &Reference, own: &OwnBuffer, memory: &Owned<'_>) -> Result<(), Error> {
    let layout = &own.layout;
    let filled = if reference.is_distinct() {
        write_slices(reference, own, memory, layout.slices)
    } else {
        write_slices(reference, own, memory, 1).and_then(|()| replicate(memory, layout))
    };
    filled.map_err(|err| err.context(format!("fill {}", own.id)))
}

/// Writes the first `slices` slices from the host, several small ones at a time.
fn write_slices(reference: &Reference, own: &OwnBuffer, memory: &Owned<'_>, slices: u64) -> Result<(), Error> {
    const CALL: &str = "fill_source";
    let (layout, ordinal) = (&own.layout, own.id.ordinal);
    let (bytes, stride) = (layout.bytes.0, layout.stride.0);
    if stride > BLOCK {
        let mut block = vec![0; BLOCK as usize];
        for slice in 0..slices {
            for at in (0..bytes).step_by(BLOCK as usize) {
                let part = &mut block[..BLOCK.min(bytes - at) as usize];
                reference.source(ordinal, slice, at / 4, part);
                memory.write(CALL, layout.slice_offset(slice) + at, part)?;
            }
        }
        return Ok(());
    }
    let together = BLOCK / stride;
    let mut block = vec![0; (together.min(slices) * stride) as usize];
    for first in (0..slices).step_by(together as usize) {
        let count = together.min(slices - first);
        for (slice, part) in (first..first + count).zip(block.chunks_exact_mut(stride as usize)) {
            reference.source(ordinal, slice, 0, &mut part[..bytes as usize]);
        }
        let end = ((count - 1) * stride + bytes) as usize;
        memory.write(CALL, layout.slice_offset(first), &block[..end])?;
    }
    Ok(())
}

/// Makes slices 1 to K-1 of slice 0 and the gap behind it: 1, 2, 4, ... slices a copy.
fn replicate(memory: &Owned<'_>, layout: &Layout) -> Result<(), Error> {
    let made = std::iter::successors(Some(1), |made| Some(made * 2)).take_while(|&made| made < layout.slices);
    let copies = made.map(|made| {
        let bytes = made.min(layout.slices - made) * layout.stride.0;
        SpanCopy { to: Span { offset: layout.slice_offset(made), bytes }, from: layout.lead.0 }
    });
    memory.copy("replicate", copies)
}

/// Sets every slice of a destination to `byte`, everything around and between them to the guard.
///
/// # Errors
/// Names the buffer.
pub fn fill_destination(own: &OwnBuffer, memory: &Owned<'_>, byte: u8) -> Result<(), Error> {
    const CALL: &str = "fill_destination";
    let layout = &own.layout;
    let (lead, end) = (layout.lead.0, layout.lead.0 + layout.footprint().0);
    let gap = layout.stride.0 - layout.bytes.0;
    let guard = [
        Span { offset: 0, bytes: lead },
        Span { offset: lead + layout.bytes.0, bytes: gap },
        Span { offset: end, bytes: layout.tail.0 },
    ];
    // Without gaps the slices are one piece.
    let slices = if gap == 0 { layout.footprint().0 } else { layout.bytes.0 };
    memory
        .fill(CALL, GUARD_BYTE, guard)
        .and_then(|()| memory.fill(CALL, byte, [Span { offset: lead, bytes: slices }]))
        .and_then(|()| if gap == 0 { Ok(()) } else { replicate(memory, layout) })
        .map_err(|err| err.context(format!("fill {}", own.id)))
}

/// Overwrites every slice that `sample` will write, so that old data cannot pass for its own.
///
/// # Errors
/// Names the buffer.
pub fn poison(own: &OwnBuffer, memory: &Owned<'_>, sample: Executions, byte: u8) -> Result<(), Error> {
    let layout = &own.layout;
    let spans =
        sample.last_on_each(layout.slices).map(|n| Span { offset: layout.slice_offset(n), bytes: layout.bytes.0 });
    memory.fill("poison", byte, spans).map_err(|err| err.context(format!("poison {}", own.id)))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::fault::{Action, Faults};
    use crate::gpu::DeviceId;
    use crate::memory::map;
    use crate::place::{MemKind, Place};
    use crate::plan::local::{BufferId, Side};
    use crate::plan::rotation::GUARD;
    use crate::prepare::owned::tests::{Fake, region};
    use crate::prepare::reference::tests::{distinct, options, pattern};
    use crate::region::{Region, Space};
    use crate::units::{Bytes, Rank};

    /// A buffer of `slices` slices of `bytes` bytes; destinations have guards.
    pub(crate) fn own(side: Side, ordinal: u32, sources: u32, bytes: u64, slices: u64) -> OwnBuffer {
        let guard = if side == Side::Dst { GUARD } else { Bytes::ZERO };
        let stride = Bytes(bytes).round_up(256).unwrap();
        let layout = Layout::new(Bytes(bytes), Bytes(stride.0 * slices), Bytes(16), guard).unwrap();
        assert_eq!(layout.slices, slices);
        let place = Place { rank: Rank(0), kind: MemKind::Host, index: 0 };
        OwnBuffer { id: BufferId { transfer: 3, side, ordinal }, place, layout, used_by: None, sources, src_slices: 1 }
    }

    pub(crate) fn contents(region: &Region) -> Vec<u8> {
        let mut buf = vec![0; region.bytes().0 as usize];
        map::read(region, 0, &mut buf);
        buf
    }

    fn slice(own: &OwnBuffer, all: &[u8], k: u64) -> Vec<u8> {
        all[own.layout.slice_offset(k) as usize..][..own.layout.bytes.0 as usize].to_vec()
    }

    fn expected(reference: &Reference, own: &OwnBuffer, k: u64) -> Vec<u8> {
        let mut out = vec![0; own.layout.bytes.0 as usize];
        reference.source(own.id.ordinal, k, 0, &mut out);
        out
    }

    #[test]
    fn replicas_take_log2_copies_and_equal_slice_0() {
        let reference = Reference::new(&options());
        for (slices, copies) in [(1, 0), (2, 1), (3, 2), (5, 3), (64, 6)] {
            for bytes in [4, 256, 1000] {
                let own = own(Side::Src, 1, 2, bytes, slices);
                let counter = Faults::nth_of("replicate", u64::MAX, Action::Fail);
                let host = region(own.layout.total().0, Space::Host);
                fill_source(&reference, &own, &Owned::by_cpu(&host, &counter)).unwrap();
                assert_eq!(counter.calls(), copies, "{slices} slices");

                let (fake, writes) = (Fake::default(), Faults::nth_of("fill_source", u64::MAX, Action::Fail));
                let device = fake.region(own.layout.total().0);
                fill_source(&reference, &own, &Owned::by_driver(&device, &fake, DeviceId(0), &writes)).unwrap();
                assert_eq!((fake.copies.load(Ordering::Relaxed), writes.calls(), fake.live()), (copies, 1, 0));

                for all in [contents(&host), contents(&fake.with(device.address()).0)] {
                    for k in 0..slices {
                        assert_eq!(slice(&own, &all, k), expected(&reference, &own, 0), "slice {k} of {slices}");
                    }
                }
            }
        }
    }

    #[test]
    fn distinct_slices_are_all_written_by_the_host_in_few_writes() {
        let reference = distinct();
        for (bytes, slices, writes) in [(1000, 5, 1), (BLOCK / 2, 3, 2), (BLOCK + 4, 2, 4)] {
            let own = own(Side::Src, 0, 1, bytes, slices);
            let host = region(own.layout.total().0, Space::Host);
            let counter = Faults::counting();
            fill_source(&reference, &own, &Owned::by_cpu(&host, &counter)).unwrap();
            assert_eq!(counter.calls(), writes, "{bytes}");
            let all = contents(&host);
            for k in 0..slices {
                assert!(slice(&own, &all, k) == expected(&reference, &own, k), "slice {k} of {bytes}");
            }
            assert!(slice(&own, &all, 0) != slice(&own, &all, 1));
        }
    }

    #[test]
    fn long_slices_are_written_in_blocks() {
        let reference = pattern(&[1.0, 2.0, 3.0]);
        let own = own(Side::Src, 0, 1, 2 * BLOCK + 4, 1);
        let host = region(own.layout.total().0, Space::Host);
        let counter = Faults::counting();
        fill_source(&reference, &own, &Owned::by_cpu(&host, &counter)).unwrap();
        assert_eq!(counter.calls(), 3);
        assert!(slice(&own, &contents(&host), 0) == expected(&reference, &own, 0));
    }

    #[test]
    fn destinations_are_guarded_before_between_and_after() {
        for (bytes, slices) in [(1000, 5), (1000, 1), (512, 3)] {
            let own = own(Side::Dst, 0, 1, bytes, slices);
            let host = region(own.layout.total().0, Space::Host);
            fill_destination(&own, &Owned::by_cpu(&host, &Faults::default()), 7).unwrap();
            let mut wanted = vec![GUARD_BYTE; own.layout.total().0 as usize];
            for k in 0..slices {
                wanted[own.layout.slice_offset(k) as usize..][..bytes as usize].fill(7);
            }
            assert_eq!(contents(&host), wanted, "{bytes} x {slices}");
        }
    }

    #[test]
    fn only_the_slices_that_a_sample_writes_are_poisoned() {
        let own = own(Side::Dst, 0, 1, 1000, 5);
        let host = region(own.layout.total().0, Space::Host);
        let faults = Faults::default();
        let memory = Owned::by_cpu(&host, &faults);
        for (first, count, poisoned) in [(3, 1, vec![3]), (8, 3, vec![0, 3, 4]), (7, 12, vec![0, 1, 2, 3, 4])] {
            fill_destination(&own, &memory, 0).unwrap();
            poison(&own, &memory, Executions { first, count }, 0xC3).unwrap();
            let mut wanted = vec![GUARD_BYTE; own.layout.total().0 as usize];
            for k in 0..5 {
                let byte = if poisoned.contains(&k) { 0xC3 } else { 0 };
                wanted[own.layout.slice_offset(k) as usize..][..1000].fill(byte);
            }
            assert_eq!(contents(&host), wanted, "{first}+{count}");
        }
    }

    #[test]
    fn the_last_execution_on_each_slice_is_known() {
        let last = |first, count, slices| Executions { first, count }.last_on_each(slices).collect::<Vec<_>>();
        assert_eq!(last(4, 1, 3), [4]);
        assert_eq!(last(4, 7, 3), [8, 9, 10]);
        assert_eq!(last(4, 7, 1), [10]);
        assert_eq!(last(4, 2, 100), [4, 5]);
    }

    #[test]
    fn failures_name_the_buffer() {
        let own = own(Side::Src, 1, 2, 1000, 5);
        let host = region(own.layout.total().0, Space::Host);
        let faults = Faults::nth_of("replicate", 1, Action::Fail);
        let err = fill_source(&Reference::new(&options()), &own, &Owned::by_cpu(&host, &faults)).unwrap_err();
        assert!(err.message().starts_with("fill source 1 of transfer 3: injected"), "{err}");
    }
}

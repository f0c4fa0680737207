//! Every variant of the loops against a scalar reference.

use std::sync::Arc;

use super::*;
use crate::fault::Faults;
use crate::memory::map::{HostMap, fill, read, write};
use crate::plan::rotation::Layout;
use crate::region::Region;
use crate::units::Bytes;

/// What no destination may write: no element of a sum looks like it.
const GUARD_BYTE: u8 = 0xEE;

fn region(bytes: u64) -> Region {
    Arc::new(HostMap::private(Bytes(bytes), None, &Faults::default()).unwrap()).region()
}

/// A buffer of one slice at `offset`, between guards.
fn buffer(bytes: u64, offset: u64) -> Rotating {
    let layout = Layout::new(Bytes(bytes), Bytes::ZERO, Bytes(offset), Bytes(256)).unwrap();
    let whole = region(layout.total().0);
    fill(&whole, 0, whole.bytes(), GUARD_BYTE);
    Rotating::new(whole, layout)
}

fn contents(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.bytes().0 as usize];
    read(region, 0, &mut bytes);
    bytes
}

/// Values that depend on the order of addition.
fn source_value(source: usize, i: usize) -> f32 {
    [1.0e8, -1.0e8, 1.0][source % 3] * (1.0 + (i % 97) as f32) + source as f32
}

fn expected(sources: usize, elements: usize) -> Vec<u8> {
    let sum = |i| (0..sources).map(|s| source_value(s, i)).reduce(|a, b| a + b);
    let bytes = |i| sum(i).map_or([FILL_BYTE; 4], f32::to_ne_bytes);
    (0..elements).flat_map(bytes).collect()
}

struct Case {
    isa: Isa,
    streaming: bool,
    elements: usize,
    sources: usize,
    /// Where each destination starts in its line.
    dst_offsets: Vec<u64>,
    src_offset: u64,
}

fn check(case: &Case) {
    let bytes = case.elements as u64 * 4;
    let srcs: Vec<Rotating> = (0..case.sources).map(|s| buffer(bytes, case.src_offset + 4 * s as u64)).collect();
    for (s, src) in srcs.iter().enumerate() {
        let data: Vec<u8> = (0..case.elements).flat_map(|i| source_value(s, i).to_ne_bytes()).collect();
        write(&src.slice_region(0), 0, &data);
    }
    let dsts: Vec<Rotating> = case.dst_offsets.iter().map(|offset| buffer(bytes, *offset)).collect();
    let share = Share { offset: 0, bytes };
    let transfer = BoundTransfer { index: 0, bytes: Bytes(bytes), srcs, dsts, shares: vec![share] };
    Piece::new(&transfer, share, case.isa, case.streaming).execute(0, 1);
    let named = || format!("{:?} streaming {} {} elements", case.isa, case.streaming, case.elements);
    for dst in &transfer.dsts {
        let all = contents(dst.region());
        let start = dst.layout().lead.0 as usize;
        let (before, rest) = all.split_at(start);
        let (written, after) = rest.split_at(bytes as usize);
        assert_eq!(written, expected(case.sources, case.elements), "{}", named());
        assert!(before.iter().chain(after).all(|byte| *byte == GUARD_BYTE), "{} wrote outside", named());
    }
}

#[test]
fn every_variant_adds_left_to_right_and_writes_nothing_outside() {
    // Around every vector and round of every variant, and well beyond.
    let sizes = (1..36).chain([63, 64, 65, 127, 129, 255, 257, 1023, 1025, 1100]);
    let sizes: Vec<usize> = sizes.collect();
    for isa in Isa::available() {
        for streaming in [false, true] {
            for (n, elements) in sizes.iter().enumerate() {
                for sources in 0..=3 {
                    for destinations in 0..=3 {
                        let dst = 4 * (n as u64 * 5 % 16);
                        let dst_offsets = vec![dst; destinations];
                        let src_offset = 4 * (n as u64 * 7 % 16);
                        check(&Case { isa, streaming, elements: *elements, sources, dst_offsets, src_offset });
                    }
                }
            }
        }
    }
}

#[test]
fn destinations_of_different_alignment_are_written_without_streaming() {
    for isa in Isa::available() {
        for elements in [3, 64, 257, 1000] {
            let dst_offsets = vec![4, 8, 32];
            check(&Case { isa, streaming: true, elements, sources: 2, dst_offsets, src_offset: 0 });
        }
    }
}

#[test]
fn every_alignment_of_a_copy_is_right() {
    for isa in Isa::available() {
        for offset in (0..64).step_by(4) {
            for src_offset in [0, 4, 36] {
                let dst_offsets = vec![offset];
                check(&Case { isa, streaming: true, elements: 300, sources: 1, dst_offsets, src_offset });
            }
        }
    }
}

#[test]
fn a_share_touches_only_its_part() {
    let transfer = BoundTransfer {
        index: 0,
        bytes: Bytes(4096),
        srcs: vec![],
        dsts: vec![buffer(4096, 0)],
        shares: vec![Share { offset: 1024, bytes: 516 }],
    };
    Piece::new(&transfer, transfer.shares[0], Isa::best(), true).execute(0, 1);
    let slice = contents(&transfer.dsts[0].slice_region(0));
    let filled: Vec<usize> = (0..4096).filter(|i| slice[*i] == FILL_BYTE).collect();
    assert_eq!((filled[0], filled.len(), filled[filled.len() - 1]), (1024, 516, 1539));
}

#[test]
fn executions_walk_through_the_slices_of_both_sides() {
    let rotating = |slices: u64| {
        let layout = Layout::new(Bytes(256), Bytes(256 * slices), Bytes::ZERO, Bytes::ZERO).unwrap();
        Rotating::new(region(layout.total().0), layout)
    };
    let (src, dst) = (rotating(3), rotating(4));
    for slice in 0..3u8 {
        fill(&src.slice_region(u64::from(slice)), 0, Bytes(256), slice + 1);
    }
    let share = Share { offset: 0, bytes: 256 };
    let transfer =
        BoundTransfer { index: 0, bytes: Bytes(256), srcs: vec![src], dsts: vec![dst.clone()], shares: vec![share] };
    // Executions 5, 6 and 7: sources 2, 0, 1 and destinations 1, 2, 3.
    Piece::new(&transfer, share, Isa::best(), false).execute(5, 3);
    let firsts: Vec<u8> = (0..4).map(|n| contents(&dst.slice_region(n))[0]).collect();
    assert_eq!(firsts, [0, 3, 1, 2]);
}

#[test]
#[should_panic(expected = "the share ends inside its slice")]
fn a_share_beyond_the_slice_is_our_mistake() {
    let transfer =
        BoundTransfer { index: 0, bytes: Bytes(256), srcs: vec![], dsts: vec![buffer(256, 0)], shares: vec![] };
    Piece::new(&transfer, Share { offset: 128, bytes: 132 }, Isa::best(), false);
}

#[test]
fn the_portable_loops_are_always_there_and_come_last() {
    assert_eq!(Isa::available().last(), Some(&Isa::Portable));
    assert_eq!(Isa::best(), Isa::available()[0]);
}

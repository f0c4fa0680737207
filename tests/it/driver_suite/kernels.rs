//! The kernels, by their argument structs.

use tb_mpi::gpu::owner::Buffer;
use tb_mpi::gpu::{CheckArgs, KernelName, LatchArgs, MAX_SIDES, SubExecutorRecord, TransferArgs};
use tb_mpi::plan::rotation::Layout;
use tb_mpi::region::Address;
use tb_mpi::units::Bytes;

use super::Rig;

const THREADS: u32 = 256;

/// Element `i` of slice `slice` of source `source`: small whole numbers, so that sums are exact.
pub fn element(source: usize, slice: u64, i: u64) -> f32 {
    (i % 383) as f32 + 1000.0 * slice as f32 + 10_000.0 * source as f32
}

/// A whole source buffer with different data in every slice, and 0x11 elsewhere.
pub fn source_bytes(source: usize, layout: &Layout) -> Vec<u8> {
    let mut bytes = vec![0x11; layout.total().0 as usize];
    for slice in 0..layout.slices {
        for i in 0..layout.bytes.0 / 4 {
            let at = (layout.slice_offset(slice) + 4 * i) as usize;
            bytes[at..at + 4].copy_from_slice(&element(source, slice, i).to_ne_bytes());
        }
    }
    bytes
}

/// A whole destination buffer of 0x22, with the sum of `sources` sources in the slices that
/// `executions` wrote when they read sources of `slices` slices.
pub fn expected_bytes(
    layout: &Layout,
    sources: usize,
    slices: u64,
    executions: impl IntoIterator<Item = u64>,
) -> Vec<u8> {
    let mut bytes = vec![0x22; layout.total().0 as usize];
    for n in executions {
        for i in 0..layout.bytes.0 / 4 {
            let at = (layout.slice_offset(n) + 4 * i) as usize;
            let sum = (0..sources).map(|source| element(source, n % slices, i)).reduce(|a, b| a + b);
            let sum = sum.map_or([75; 4], f32::to_ne_bytes);
            bytes[at..at + 4].copy_from_slice(&sum);
        }
    }
    bytes
}

struct Kernel {
    sources: usize,
    destinations: usize,
    src: Layout,
    dst: Layout,
    first: u64,
    executions: u32,
    /// Bytes of each record; together the whole transfer.
    parts: Vec<u64>,
}

fn addresses(buffers: &[Buffer], offset: u64) -> [u64; MAX_SIDES] {
    let mut addresses = [0; MAX_SIDES];
    for (address, buffer) in addresses.iter_mut().zip(buffers) {
        *address = buffer.address().0 + offset;
    }
    addresses
}

/// Runs the transfer kernel and compares every byte of every destination buffer.
fn check(rig: &Rig, kernel: &Kernel) {
    let device = rig.device();
    let buffers = |count: usize, layout: &Layout| (0..count).map(|_| rig.buffer(layout.total().0)).collect::<Vec<_>>();
    let (srcs, dsts) = (buffers(kernel.sources, &kernel.src), buffers(kernel.destinations, &kernel.dst));
    for (source, buffer) in srcs.iter().enumerate() {
        device.write(buffer.address(), &source_bytes(source, &kernel.src)).unwrap();
    }
    for buffer in &dsts {
        device.write(buffer.address(), &vec![0x22; kernel.dst.total().0 as usize]).unwrap();
    }
    let mut offset = 0;
    let mut records = Vec::new();
    for bytes in &kernel.parts {
        let record = SubExecutorRecord {
            elements: bytes / 4,
            src_count: kernel.sources as u32,
            dst_count: kernel.destinations as u32,
            team_size: 1,
            team_index: 0,
            src: addresses(&srcs, kernel.src.slice_offset(0) + offset),
            dst: addresses(&dsts, kernel.dst.slice_offset(0) + offset),
            src_stride: kernel.src.stride.0,
            src_slices: kernel.src.slices,
            dst_stride: kernel.dst.stride.0,
            dst_slices: kernel.dst.slices,
            start_ticks: 0,
            stop_ticks: 0,
        };
        records.extend(record.to_bytes());
        offset += bytes;
    }
    assert_eq!(offset, kernel.src.bytes.0);
    let table = rig.buffer(records.len() as u64);
    device.write(table.address(), &records).unwrap();
    let count = kernel.parts.len() as u32;
    let args = TransferArgs { records: table.address().0, first: kernel.first, executions: kernel.executions, count };
    let stream = device.stream().unwrap();
    let id = device.load_kernel(KernelName::Transfer).unwrap();
    stream.launch(id, count, THREADS, &args.to_bytes()).unwrap();
    stream.wait().unwrap();

    let executions = kernel.first..kernel.first + u64::from(kernel.executions);
    let expected = expected_bytes(&kernel.dst, kernel.sources, kernel.src.slices, executions);
    for (i, buffer) in dsts.iter().enumerate() {
        let mut seen = vec![0; expected.len()];
        device.read(buffer.address(), &mut seen).unwrap();
        let wrong = seen.iter().zip(&expected).position(|(a, b)| a != b);
        let what = format!("destination {i} of {} sources, {} bytes", kernel.sources, kernel.src.bytes);
        assert_eq!(wrong, None, "first wrong byte of {what}");
    }
    device.read(table.address(), &mut records).unwrap();
    for record in records.chunks(SubExecutorRecord::SIZE) {
        let record = SubExecutorRecord::from_bytes(record.try_into().unwrap());
        assert!(record.start_ticks > 0 && record.stop_ticks >= record.start_ticks, "{record:?}");
    }
}

fn layout(bytes: u64, slices: u64, byte_offset: u64, guard: u64) -> Layout {
    let rotate = bytes.next_multiple_of(256) * slices;
    Layout::new(Bytes(bytes), Bytes(rotate), Bytes(byte_offset), Bytes(guard)).unwrap()
}

pub fn the_transfer_kernel_adds_sources_into_every_destination(rig: &Rig) {
    for sources in 0..=3 {
        for destinations in 0..=3 {
            for bytes in [4, 252, 4096 + 12, 40_004] {
                check(
                    rig,
                    &Kernel {
                        sources,
                        destinations,
                        src: layout(bytes, 1, 0, 0),
                        dst: layout(bytes, 1, 0, 256),
                        first: 0,
                        executions: 1,
                        parts: vec![bytes],
                    },
                );
            }
        }
    }
}

pub fn the_transfer_kernel_rotates_both_sides(rig: &Rig) {
    let bytes = 4096 + 252;
    for first in [0, 3, 4, 1 << 40] {
        for executions in 1..=3 {
            check(
                rig,
                &Kernel {
                    sources: 2,
                    destinations: 2,
                    src: layout(bytes, 5, 4, 0),
                    dst: layout(bytes, 3, 8, 4096),
                    first,
                    executions,
                    // Uneven, and the last one with a tail.
                    parts: vec![256, 2048, bytes - 2304],
                },
            );
        }
    }
}

pub fn the_transfer_kernel_reports_memory_that_it_may_not_touch(rig: &Rig) {
    let device = rig.device();
    let (data, table) = (rig.buffer(1024), rig.buffer(SubExecutorRecord::SIZE as u64));
    let record = SubExecutorRecord {
        elements: 64,
        src_count: 1,
        dst_count: 1,
        team_size: 1,
        team_index: 0,
        src: [data.address().0; MAX_SIDES],
        dst: [data.address().0 + 768; MAX_SIDES],
        src_stride: 256,
        src_slices: 3,
        dst_stride: 256,
        dst_slices: 1,
        start_ticks: 0,
        stop_ticks: 0,
    };
    let args = |count| TransferArgs { records: table.address().0, first: 0, executions: 3, count }.to_bytes();
    let stream = device.stream().unwrap();
    let kernel = device.load_kernel(KernelName::Transfer).unwrap();
    let run = |record: SubExecutorRecord, count: u32| {
        device.write(table.address(), &record.to_bytes()).unwrap();
        stream.launch(kernel, 1, THREADS, &args(count)).unwrap();
        stream.wait()
    };
    run(record, 1).unwrap();
    assert!(run(SubExecutorRecord { src_slices: 5, ..record }, 1).is_err(), "the last slice leaves the buffer");
    assert!(run(SubExecutorRecord { elements: 65, ..record }, 1).is_err(), "the destination leaves the buffer");
    assert!(run(SubExecutorRecord { src: [0; MAX_SIDES], ..record }, 1).is_err(), "no memory there");
    assert!(run(SubExecutorRecord { src_count: 9, ..record }, 1).is_err(), "too many sources");
    assert!(run(record, 2).is_err(), "more records than blocks");
    run(record, 1).unwrap();
}

pub fn a_launch_that_makes_no_sense_is_refused(rig: &Rig) {
    let device = rig.device();
    let stream = device.stream().unwrap();
    let kernel = device.load_kernel(KernelName::Transfer).unwrap();
    let args = TransferArgs { records: 0, first: 0, executions: 0, count: 0 }.to_bytes();
    assert!(stream.launch(kernel, 1, THREADS, &args[1..]).is_err(), "arguments of the wrong size");
    assert!(stream.launch(kernel, 0, THREADS, &args).is_err(), "no blocks");
    assert!(stream.launch(kernel, 1, 0, &args).is_err(), "no threads");
    if let Some(other) = rig.devices.get(1) {
        let theirs = other.load_kernel(KernelName::Transfer).unwrap();
        assert!(stream.launch(theirs, 1, THREADS, &args).is_err(), "loaded for another device");
    }
    stream.wait().unwrap();
}

pub fn the_check_kernel_counts_differences_and_finds_the_first(rig: &Rig) {
    let device = rig.device();
    let bytes = 100_004;
    let (actual, expected, result) = (rig.buffer(bytes), rig.buffer(bytes), rig.buffer(16));
    let stream = device.stream().unwrap();
    let kernel = device.load_kernel(KernelName::Check).unwrap();
    let args =
        CheckArgs { actual: actual.address().0, expected: expected.address().0, bytes, result: result.address().0 };
    let data: Vec<u8> = (0..bytes).map(|i| (i * 13 + i / 255) as u8).collect();
    device.write(expected.address(), &data).unwrap();
    let run = |wrong: &[usize]| {
        let mut data = data.clone();
        wrong.iter().for_each(|at| data[*at] ^= 0x80);
        device.write(actual.address(), &data).unwrap();
        stream.launch(kernel, 4, THREADS, &args.to_bytes()).unwrap();
        stream.wait().unwrap();
        let mut seen = [0; 16];
        device.read(result.address(), &mut seen).unwrap();
        let word = |at: usize| u64::from_ne_bytes(seen[at..at + 8].try_into().unwrap());
        (word(0), word(8))
    };
    let mut start = [0xFF; 16];
    start[..8].fill(0);
    device.write(result.address(), &start).unwrap();
    assert_eq!(run(&[]), (0, u64::MAX));
    assert_eq!(run(&[100_003]), (1, 100_003));
    assert_eq!(run(&[70_000, 5000, 5001, 99_999]), (5, 5000), "the count is added to, the first is the least");
    assert_eq!(run(&[60_000]), (6, 5000));
    assert_eq!(run(&[0]), (7, 0));
    device.write(Address(result.address().0), &start).unwrap();
    assert_eq!(run(&(0..bytes as usize).collect::<Vec<_>>()), (bytes, 0));
}

pub fn the_latch_kernel_waits_for_its_flag_and_no_longer_than_told(rig: &Rig) {
    let device = rig.device();
    let (flag, released) = (rig.buffer(4), rig.buffer(8));
    let kernel = device.load_kernel(KernelName::Latch).unwrap();
    let stream = device.stream().unwrap();
    let latch = |value: u32, seconds: f64| {
        let max_ticks = (seconds * 1e9 / device.ns_per_tick().unwrap()) as u64;
        let args = LatchArgs { flag: flag.address().0, released: released.address().0, max_ticks, value, _pad: 0 };
        device.write(released.address(), &[0xFF; 8]).unwrap();
        stream.launch(kernel, 1, 1, &args.to_bytes()).unwrap();
    };
    let released_at = || {
        stream.wait().unwrap();
        let mut seen = [0; 8];
        device.read(released.address(), &mut seen).unwrap();
        u64::from_ne_bytes(seen)
    };
    device.write(flag.address(), &u32::MAX.to_ne_bytes()).unwrap();
    latch(u32::MAX, 60.0);
    let first = released_at();
    assert!(first > 0 && first < u64::MAX, "{first}");
    // The count goes round: 0 comes after u32::MAX.
    latch(0, 0.001);
    assert_eq!(released_at(), 0, "nothing has set the flag");
    device.write(flag.address(), &0u32.to_ne_bytes()).unwrap();
    latch(0, 60.0);
    assert!(released_at() > first);
}

//! The device executors: what they move, sample by sample.

use std::sync::Arc;

use tb_mpi::config::options::{BlockOrder, Gfx, Options, SubExecutorType, Tdm};
use tb_mpi::exec::{BoundTransfer, Clock, Executions, Ready, Work, batch, bulk, copy_engine, kernel};
use tb_mpi::gpu::owner::{Buffer, Device};
use tb_mpi::gpu::{KernelName, TransferVariant};
use tb_mpi::memory::rotating::Rotating;
use tb_mpi::place::{ExeKind, Executor, MemKind};
use tb_mpi::plan::rotation::{GUARD, Layout};
use tb_mpi::plan::split::shares;
use tb_mpi::prepare::flush::DeviceFlush;
use tb_mpi::region::Address;
use tb_mpi::units::{Bytes, Rank};

use super::Rig;
use super::kernels::{expected_bytes, source_bytes};

const SRC_SLICES: u64 = 4;
const SUB_ITERATIONS: u32 = 3;

fn executor(kind: ExeKind) -> Executor {
    Executor { rank: Rank(0), kind, index: 0, sub_index: None }
}

fn gfx() -> Gfx {
    Options::default().gfx
}

fn buffer(device: &Arc<Device>, layout: &Layout) -> Buffer {
    device.allocate(MemKind::Device, layout.total(), true).unwrap()
}

/// A transfer of distinct source slices, and its destination buffers.
fn transfer(rig: &Rig, index: u32, bytes: u64, sources: usize, destinations: usize) -> (BoundTransfer, Vec<Buffer>) {
    transfer_from(rig, index, bytes, Bytes(4), sources, destinations)
}

/// The same with the sources' data that far into their buffers.
fn transfer_from(
    rig: &Rig,
    index: u32,
    bytes: u64,
    offset: Bytes,
    sources: usize,
    destinations: usize,
) -> (BoundTransfer, Vec<Buffer>) {
    let stride = bytes.next_multiple_of(256);
    let src = Layout::new(Bytes(bytes), Bytes(SRC_SLICES * stride), offset, Bytes::ZERO).unwrap();
    // As many destination slices as executions in a sample: each leaves its own trace.
    let rotate = Bytes(u64::from(SUB_ITERATIONS) * stride);
    let dst = Layout::new(Bytes(bytes), rotate, Bytes::ZERO, GUARD).unwrap();
    let srcs = (0..sources).map(|source| {
        let buffer = buffer(rig.device(), &src);
        rig.device().write(buffer.address(), &source_bytes(source, &src)).unwrap();
        Rotating::new(buffer.region(), src)
    });
    // On the last device: another one where there are several.
    let dsts: Vec<Buffer> = (0..destinations).map(|_| buffer(rig.devices.last().unwrap(), &dst)).collect();
    let transfer = BoundTransfer {
        index,
        bytes: Bytes(bytes),
        srcs: srcs.collect(),
        dsts: dsts.iter().map(|buffer| Rotating::new(buffer.region(), dst)).collect(),
        shares: shares(Bytes(bytes), 3, Bytes(256)),
    };
    (transfer, dsts)
}

/// Runs samples and compares every byte of every destination after each of them.
fn check(ready: &mut Ready, transfers: &[(BoundTransfer, Vec<Buffer>)], clock: Clock) {
    assert_eq!(ready.clock(), clock);
    for sample in 0..6 {
        let first = sample * u64::from(SUB_ITERATIONS);
        for (_, dsts) in transfers {
            for dst in dsts {
                dst.device().write(dst.address(), &vec![0x22; dst.bytes().0 as usize]).unwrap();
            }
        }
        ready.arm(Executions { first, count: SUB_ITERATIONS }).unwrap();
        ready.go().unwrap();
        ready.wait().unwrap();
        let times = ready.times().unwrap();
        assert!(times.executor.end_ns > times.executor.start_ns);
        assert_eq!(times.transfers.len(), transfers.len());
        for ((transfer, dsts), time) in transfers.iter().zip(times.transfers) {
            assert!(
                time.duration_ns > 0.0 || transfer.bytes < Bytes::kib(64),
                "a coarse clock misses only small transfers"
            );
            assert!(time.duration_ns <= times.executor.ns(), "a transfer lies inside its executor's window");
            assert_eq!(time.window, times.executor);
            for (dst, rotating) in dsts.iter().zip(&transfer.dsts) {
                let executions = first..first + u64::from(SUB_ITERATIONS);
                let expected = expected_bytes(rotating.layout(), transfer.srcs.len(), SRC_SLICES, executions);
                let mut seen = vec![0; expected.len()];
                dst.device().read(dst.address(), &mut seen).unwrap();
                let wrong = seen.iter().zip(&expected).position(|(a, b)| a != b);
                assert_eq!(wrong, None, "first wrong byte of transfer {} in sample {sample}", transfer.index);
            }
        }
    }
}

fn work(kind: ExeKind, transfers: &[(BoundTransfer, Vec<Buffer>)]) -> Work {
    Work { exe: executor(kind), transfers: transfers.iter().map(|(transfer, _)| transfer.clone()).collect() }
}

pub fn the_kernel_executor_rotates_over_samples_and_sub_iterations(rig: &Rig) {
    let transfers = [transfer(rig, 0, 4, 1, 1), transfer(rig, 1, 65_536 + 4, 3, 2), transfer(rig, 2, 1020, 0, 1)];
    let ready = kernel::Ready::new(work(ExeKind::Kernel, &transfers), &gfx(), rig.device()).unwrap();
    check(&mut Ready::Kernel(ready), &transfers, Clock::DeviceClock);
}

pub fn every_kernel_variant_moves_the_same_data(rig: &Rig) {
    let (block, warp) = (SubExecutorType::Block, SubExecutorType::Warp);
    let mut variants = Vec::new();
    for (single_team, se_type) in [(false, block), (true, block), (false, warp), (true, warp)] {
        for wave_order in 0..=5 {
            // Not every combination: each value of each setting, next to several of the others.
            let of = |list: &[u32]| list[wave_order as usize % list.len()];
            let orders = [BlockOrder::Sequential, BlockOrder::Interleaved, BlockOrder::Random];
            variants.push(Gfx {
                block_size: of(&[256, 64, 1024, 192]),
                unroll: Some(of(&[1, 3, 8, 16, 32])),
                word_size: of(&[4, 1, 2, 4]),
                temporal: of(&[0, 3, 1, 2, 3]),
                wave_order,
                block_order: orders[wave_order as usize % 3],
                single_team: Some(single_team),
                se_type,
                ..gfx()
            });
        }
    }
    let copies = [transfer(rig, 0, 4, 1, 1), transfer(rig, 1, 65_536 + 4, 1, 2), transfer(rig, 2, 40_000, 1, 1)];
    let sums = [transfer(rig, 0, 252, 2, 1), transfer(rig, 1, 40_004, 3, 2), transfer(rig, 2, 1020, 0, 1)];
    for gfx in variants {
        for transfers in [&copies[..], &sums[..]] {
            let ready = kernel::Ready::new(work(ExeKind::Kernel, transfers), &gfx, rig.device());
            let ready = ready.unwrap_or_else(|err| panic!("{gfx:?}: {err}"));
            check(&mut Ready::Kernel(ready), transfers, Clock::DeviceClock);
        }
    }
}

/// On every XCC that there is, with transfers that want one next to one that does not.
pub fn the_kernel_executor_runs_on_the_xcc_that_is_asked_for(rig: &Rig) {
    let transfers = [transfer(rig, 0, 4, 1, 1), transfer(rig, 1, 65_536 + 4, 3, 2), transfer(rig, 2, 1020, 1, 1)];
    let info = rig.device().info();
    if info.xccs == 0 || !TransferVariant::tells_xcc(&info.architecture, info.xccs) {
        assert_ne!(rig.driver.name(), "host");
        return;
    }
    for xcc in 0..info.xccs {
        for se_type in [SubExecutorType::Block, SubExecutorType::Warp] {
            let (gfx, xccs) = (Gfx { se_type, ..gfx() }, [Some(xcc), None, Some(info.xccs - 1)]);
            let ready = kernel::Ready::on_xccs(work(ExeKind::Kernel, &transfers), &gfx, &xccs, rig.device()).unwrap();
            check(&mut Ready::Kernel(ready), &transfers, Clock::DeviceClock);
        }
    }
    // Nobody takes what wants an XCC that is not there: that is told, and not taken for a time.
    let xccs = [Some(info.xccs), None, None];
    let ready = kernel::Ready::on_xccs(work(ExeKind::Kernel, &transfers), &gfx(), &xccs, rig.device());
    let mut ready = ready.unwrap();
    ready.arm(Executions { first: 0, count: 1 }).unwrap();
    ready.go().unwrap();
    ready.wait().unwrap();
    assert!(ready.times().unwrap_err().message().contains("did not run"));
}

pub fn the_kernel_executor_keeps_to_a_mask_where_there_are_masks(rig: &Rig) {
    let transfers = [transfer(rig, 0, 65_536 + 4, 2, 1), transfer(rig, 1, 252, 1, 1)];
    let gfx = Gfx { cu_mask: vec![0, 2, 3], ..gfx() };
    let ready = kernel::Ready::new(work(ExeKind::Kernel, &transfers), &gfx, rig.device());
    if !rig.device().info().cu_masks {
        assert!(ready.err().unwrap().message().contains("no masks of compute units"));
        return;
    }
    check(&mut Ready::Kernel(ready.unwrap()), &transfers, Clock::DeviceClock);
}

pub fn the_copy_engine_copies_without_compute_units_where_it_can(rig: &Rig) {
    let transfers = [transfer(rig, 0, 4, 1, 1), transfer(rig, 1, 65_536 + 4, 1, 3)];
    let ready = copy_engine::Ready::new(work(ExeKind::CopyEngine, &transfers), rig.device()).unwrap();
    let mut ready = ready.without_compute_units();
    if !rig.device().info().no_cu_copies {
        ready.arm(Executions { first: 0, count: 1 }).unwrap();
        assert!(ready.go().unwrap_err().message().contains("cannot be kept from compute units"));
        return;
    }
    check(&mut Ready::CopyEngine(ready), &transfers, Clock::DeviceEvent);
}

pub fn the_copy_engine_rotates_over_samples_and_sub_iterations(rig: &Rig) {
    let transfers = [transfer(rig, 0, 4, 1, 1), transfer(rig, 1, 65_536 + 4, 1, 3)];
    let ready = copy_engine::Ready::new(work(ExeKind::CopyEngine, &transfers), rig.device()).unwrap();
    check(&mut Ready::CopyEngine(ready), &transfers, Clock::DeviceEvent);
}

pub fn the_batched_copy_engine_moves_every_share(rig: &Rig) {
    let device = rig.device();
    let transfers = [transfer(rig, 0, 4, 1, 1), transfer(rig, 1, 65_536 + 4, 1, 3)];
    let ready = batch::ready(work(ExeKind::Batch, &transfers), device);
    if let Some(why) = &device.info().batch_absent {
        let mut ready = ready.unwrap();
        ready.arm(Executions { first: 0, count: 1 }).unwrap();
        let err = ready.go().unwrap_err();
        assert!(err.message().contains("has no function"), "{err}, where the device says: {why}");
        return;
    }
    check(&mut Ready::CopyEngine(ready.unwrap()), &transfers, Clock::DeviceEvent);
}

pub fn bulk_copies_rotate_over_samples_and_sub_iterations(rig: &Rig) {
    let device = rig.device();
    if let Some(why) = &device.info().bulk_absent {
        let err = device.load_kernel(KernelName::Bulk).unwrap_err();
        assert!(!err.message().is_empty(), "the device says: {why}");
        return;
    }
    // Whole words; ends before and after them; sides that are not aligned to each other.
    let sizes = [4, 252, 4096, (1 << 20) + 4, 3_000_000];
    let transfers: Vec<_> =
        sizes.iter().enumerate().map(|(i, bytes)| transfer_from(rig, i as u32, *bytes, Bytes::ZERO, 1, 1)).collect();
    let apart = [transfer(rig, 0, 65_536 + 4, 1, 1)];
    let tdm = |shared_bytes, stages| Tdm { shared_bytes, stages };
    for tdm in [Options::default().tdm, tdm(Bytes::kib(4), 2), tdm(Bytes::kib(200), 7)] {
        for transfers in [&transfers[..], &apart] {
            let ready = bulk::ready(work(ExeKind::Bulk, transfers), &tdm, BlockOrder::Random, device);
            let ready = ready.unwrap_or_else(|err| panic!("{tdm:?}: {err}"));
            check(&mut Ready::Kernel(ready), transfers, Clock::DeviceClock);
        }
    }
}

/// All executions of a sample write one place, and the last of them has to be there in the end.
pub fn bulk_copies_into_one_place_keep_their_order(rig: &Rig) {
    let device = rig.device();
    if device.info().bulk_absent.is_some() {
        return;
    }
    for bytes in [256, 16 << 10, 5 << 20] {
        let (mut transfer, dsts) = transfer_from(rig, 0, bytes, Bytes::ZERO, 1, 1);
        let one = Layout::new(Bytes(bytes), Bytes::ZERO, Bytes::ZERO, GUARD).unwrap();
        transfer.dsts = vec![Rotating::new(dsts[0].region(), one)];
        let mut ready = bulk::ready(
            work(ExeKind::Bulk, &[(transfer, Vec::new())]),
            &Options::default().tdm,
            BlockOrder::Sequential,
            device,
        )
        .unwrap();
        for first in 0..20 {
            ready.arm(Executions { first, count: 50 }).unwrap();
            ready.go().unwrap();
            ready.wait().unwrap();
            let expected = expected_bytes(&one, 1, SRC_SLICES, first + 49..first + 50);
            let mut seen = vec![0; bytes as usize];
            let at = GUARD.0 as usize;
            dsts[0].device().read(Address(dsts[0].address().0 + GUARD.0), &mut seen).unwrap();
            assert!(seen[..] == expected[at..at + bytes as usize], "{bytes} bytes, executions from {first}");
        }
    }
}

pub fn executors_read_memory_of_another_rank(rig: &Rig) {
    let other = rig.neighbour();
    let (mut transfer, dsts) = transfer(rig, 0, 8192 + 4, 1, 1);
    let layout = *transfer.srcs[0].layout();
    let remote = buffer(other.device(), &layout);
    other.device().write(remote.address(), &source_bytes(0, &layout)).unwrap();
    let imported = rig.device().import(&remote.export().unwrap(), layout.total()).unwrap();
    transfer.srcs = vec![Rotating::new(imported.region(), layout)];
    drop(imported);
    let transfers = [(transfer, dsts)];
    let ready = kernel::Ready::new(work(ExeKind::Kernel, &transfers), &gfx(), rig.device()).unwrap();
    check(&mut Ready::Kernel(ready), &transfers, Clock::DeviceClock);
    let ready = copy_engine::Ready::new(work(ExeKind::CopyEngine, &transfers), rig.device()).unwrap();
    check(&mut Ready::CopyEngine(ready), &transfers, Clock::DeviceEvent);
    drop(transfers);
}

pub fn a_flush_reads_all_of_its_scratch_memory_again_and_again(rig: &Rig) {
    // Parts of an odd size, which the flush rounds up.
    let flush = DeviceFlush::new(rig.device(), Bytes(16 * 1000 + 4)).unwrap();
    for _ in 0..3 {
        flush.start().unwrap();
        flush.wait().unwrap();
    }
    // More than the L2 of any device that there is, as cold samples take.
    let flush = DeviceFlush::new(rig.device(), Bytes::mib(128)).unwrap();
    flush.start().unwrap();
    flush.start().unwrap();
    // Dropped with copies queued: they are waited for before the memory is freed.
}

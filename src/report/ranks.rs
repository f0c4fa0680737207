//! What a rank sends to rank 0 at the end of a test: its samples and its verdicts.

use super::collect::{ExecutorMeasure, RankReport, TransferMeasure, Verdict};
use super::results::MismatchEntry;
use crate::exec::{Ready, SampleTimes};
use crate::measure::Measured;
use crate::measure::circumstances::{self, Reading};
use crate::plan::local::{BufferId, LocalExecutor, Side};
use crate::units::Rank;
use crate::verify::phase::{self, Verified};

/// The readings are those around the timed loop.
///
/// # Panics
/// If executors and samples do not match: the loop keeps one list for each executor.
pub fn rank_report(rank: Rank, host: &str, verified: &Verified, [before, after]: [&Reading; 2]) -> RankReport {
    let measured = &verified.measured;
    let locals = &measured.prepared.plan.executors;
    assert_eq!(locals.len(), measured.samples.len(), "one list of samples for each executor");
    let samples = measured.samples.first().map_or(0, Vec::len) as u64;
    RankReport {
        rank: rank.0,
        circumstances: circumstances::between(rank.0, before, after, samples),
        executors: locals.iter().enumerate().map(|(i, local)| executor(measured, i, local)).collect(),
        verdicts: verified.verdicts.iter().map(|verdict| entry(rank, host, verdict)).collect(),
        warnings: verified.warnings.clone(),
    }
}

fn executor(measured: &Measured, i: usize, local: &LocalExecutor) -> ExecutorMeasure {
    let (ready, samples) = (&measured.prepared.executors[i], &measured.samples[i]);
    let cpus = match ready {
        Ready::Cpu(cpu) => cpu.placement(),
        Ready::Kernel(_) | Ready::CopyEngine(_) => vec![Vec::new(); local.transfers.len()],
    };
    let transfers = local.transfers.iter().enumerate().map(|(t, transfer)| {
        let mut placement = Vec::new();
        if let Ready::Cpu(cpu) = ready {
            placement.push(format!("threads on CPU {:?}, {}", cpus[t], cpu.loops()));
        }
        // Buffers of other ranks are placed, and reported on, by their owners.
        for (side, count, name) in
            [(Side::Src, transfer.srcs.len(), "source"), (Side::Dst, transfer.dsts.len(), "destination")]
        {
            for ordinal in 0..count as u32 {
                let id = BufferId { transfer: transfer.index, side, ordinal };
                let note = measured.prepared.memory.note(id);
                placement.extend(note.map(|note| format!("{name} {ordinal}: {note}")));
            }
        }
        TransferMeasure {
            index: transfer.index,
            durations_ns: samples.iter().map(|sample| sample.transfers[t].duration_ns).collect(),
            cold_ns: contrast(&measured.contrast.cold, i, t),
            warm_ns: contrast(&measured.contrast.warm, i, t),
            placement,
            marks: Vec::new(),
        }
    });
    ExecutorMeasure {
        exe: local.exe,
        clock: ready.clock(),
        windows: samples.iter().map(|sample| sample.executor).collect(),
        transfers: transfers.collect(),
    }
}

/// Times of transfer `t` of executor `i`; empty where no cold samples were asked for.
fn contrast(samples: &[Vec<SampleTimes>], i: usize, t: usize) -> Vec<f64> {
    samples.get(i).into_iter().flatten().map(|sample| sample.transfers[t].duration_ns).collect()
}

fn entry(rank: Rank, host: &str, verdict: &phase::Verdict) -> Verdict {
    let mismatch = verdict.mismatch.as_ref().map(|mismatch| {
        let (expected, actual) = mismatch.first.map(|first| first.texts()).unzip();
        MismatchEntry {
            destination: verdict.destination,
            place: verdict.place.to_string(),
            rank: rank.0,
            host: host.to_owned(),
            execution: verdict.execution,
            element: mismatch.first.map(|first| first.element),
            expected,
            actual,
            wrong_bytes: mismatch.wrong_bytes,
            what: mismatch.what.clone(),
        }
    });
    Verdict { transfer: verdict.transfer, destination: verdict.destination, mismatch }
}

//! Executor `T`: a device's bulk asynchronous copies through shared memory, one block a sub-executor.

use std::sync::Arc;

use super::kernel::{Launch, Ready};
use super::{BoundTransfer, Work};
use crate::config::options::{BlockOrder, Tdm};
use crate::error::Error;
use crate::gpu::owner::Device;
use crate::gpu::{BulkVariant, KernelSpec};

/// What the copies move at a time, and the alignment of a stage.
const PIECE: u64 = 128;

/// A bulk executor ready to run samples.
///
/// # Errors
/// If a transfer has not one source and one destination, or the device cannot reach its memory.
pub fn ready(work: Work, tdm: &Tdm, order: BlockOrder, device: &Arc<Device>) -> Result<Ready, Error> {
    work.transfers.iter().try_for_each(check).map_err(|err| err.context(format!("prepare {}", work.exe)))?;
    let launch = Launch {
        spec: KernelSpec::Bulk(variant(tdm)),
        threads: BulkVariant::BLOCK_THREADS,
        a_block: 1,
        order,
        single_team: false,
        cu_mask: &[],
        xccs: &[],
    };
    Ready::with(work, &launch, device)
}

fn check(transfer: &BoundTransfer) -> Result<(), Error> {
    let (index, srcs, dsts) = (transfer.index, transfer.srcs.len(), transfer.dsts.len());
    if (srcs, dsts) == (1, 1) {
        return Ok(());
    }
    Err(Error::new(format!("transfer {index} has {srcs} sources and {dsts} destinations: bulk copies take 1 and 1")))
}

/// The shared memory in whole pieces for each stage, the rest unused.
fn variant(tdm: &Tdm) -> BulkVariant {
    let stage = tdm.shared_bytes.0 / u64::from(tdm.stages) / PIECE * PIECE;
    BulkVariant { stages: tdm.stages, stage_bytes: stage as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::Options;
    use crate::units::Bytes;

    #[test]
    fn shared_memory_is_cut_into_stages() {
        assert_eq!(variant(&Options::default().tdm), BulkVariant::default());
        let tdm = Tdm { shared_bytes: Bytes(100_000), stages: 3 };
        assert_eq!(variant(&tdm), BulkVariant { stages: 3, stage_bytes: 33_280 });
    }
}

//! Executor `B`: a device's copy engine, all parts of a transfer in one call.

use std::sync::Arc;

use super::{BoundTransfer, Work, copy_engine};
use crate::error::Error;
use crate::gpu::CopyBatch;
use crate::gpu::owner::Device;
use crate::plan::split::Share;
use crate::region::Address;

/// What one execution of a transfer copies: each share to each destination.
pub(super) struct Batch {
    shares: Vec<Share>,
    /// Filled anew for each execution; its room is made before.
    copies: CopyBatch,
}

/// A batched copy-engine executor ready to run samples.
///
/// # Errors
/// If a transfer has not one source and at least one destination, or the device cannot reach them.
pub fn ready(work: Work, device: &Arc<Device>) -> Result<copy_engine::Ready, Error> {
    copy_engine::Ready::with(work, device, |transfer| Some(Batch::new(transfer)))
}

impl Batch {
    fn new(transfer: &BoundTransfer) -> Batch {
        let shares = transfer.shares.clone();
        let count = shares.len() * transfer.dsts.len();
        let sizes = transfer.dsts.iter().flat_map(|_| &shares).map(|share| share.bytes as usize).collect();
        Batch { copies: CopyBatch { dsts: vec![0; count], srcs: vec![0; count], sizes }, shares }
    }

    /// The copies of an execution that reads and writes there.
    pub(super) fn of(&mut self, src: Address, dsts: impl Iterator<Item = Address>) -> &CopyBatch {
        let ends =
            dsts.flat_map(|dst| self.shares.iter().map(move |share| (src.0 + share.offset, dst.0 + share.offset)));
        let places = self.copies.srcs.iter_mut().zip(&mut self.copies.dsts);
        for (place, ends) in places.zip(ends) {
            (*place.0, *place.1) = ends;
        }
        &self.copies
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::split::shares;
    use crate::units::Bytes;

    #[test]
    fn a_batch_has_every_share_for_every_destination() {
        let shares = shares(Bytes(1000), 2, Bytes(256));
        let sizes = [&shares[..], &shares[..]].concat().iter().map(|share| share.bytes as usize).collect();
        let mut batch = Batch { copies: CopyBatch { dsts: vec![0; 4], srcs: vec![0; 4], sizes }, shares };
        let copies = batch.of(Address(10_000), [Address(20_000), Address(30_000)].into_iter());
        assert_eq!(copies.srcs, [10_000, 10_512, 10_000, 10_512]);
        assert_eq!(copies.dsts, [20_000, 20_512, 30_000, 30_512]);
        assert_eq!(copies.sizes, [512, 488, 512, 488]);
    }
}

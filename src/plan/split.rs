//! Splits a transfer over its sub-executors.

use serde::{Deserialize, Serialize};

use crate::units::Bytes;

/// The part of a transfer that one sub-executor moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    pub offset: u64,
    pub bytes: u64,
}

/// Shares of at most `sub_executors` sub-executors: multiples of `block` except the last, none
/// empty, every element exactly once. More sub-executors than blocks leaves the surplus idle, so
/// the list may be shorter than asked.
pub fn shares(bytes: Bytes, sub_executors: u32, block: Bytes) -> Vec<Share> {
    let block = block.0.max(4);
    let usable = bytes.0.div_ceil(block).min(u64::from(sub_executors));
    let mut offset = 0;
    (0..usable)
        .map(|i| {
            let left = bytes.0 - offset;
            let blocks = left.div_ceil(block) / (usable - i);
            let share = Share { offset, bytes: left.min(blocks * block) };
            offset += share.bytes;
            share
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shares_cover_everything_once_in_whole_blocks(elements in 1u64..100_000, n in 1u32..300, blocks in 1u64..200) {
            let (bytes, block) = (elements * 4, blocks * 4);
            let shares = shares(Bytes(bytes), n, Bytes(block));
            let mut next = 0;
            for (i, share) in shares.iter().enumerate() {
                prop_assert_eq!(share.offset, next);
                prop_assert!(share.bytes > 0);
                prop_assert!(share.bytes.is_multiple_of(block) || i + 1 == shares.len());
                next += share.bytes;
            }
            prop_assert_eq!(next, bytes);
            prop_assert_eq!(shares.len() as u64, bytes.div_ceil(block).min(u64::from(n)));
        }
    }

    #[test]
    fn sizes_beyond_32_bits_are_split() {
        let shares = shares(Bytes((1 << 40) + 4), 3, Bytes(256));
        assert_eq!(shares.iter().map(|s| s.bytes).sum::<u64>(), (1 << 40) + 4);
    }
}

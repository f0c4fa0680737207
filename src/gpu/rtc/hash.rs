//! A hash that is the same in every build: names cached kernels, and ties embedded ones to their source.
//!
//! FNV-1a of 128 bits (Fowler, Noll, Vo; draft-eastlake-fnv): it tells texts apart and guards against
//! accidents. It does not guard against malice: the cache trusts the user's own files only.

const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;

/// Of several parts; where one ends counts.
pub fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u128 {
    parts.into_iter().fold(OFFSET, |hash, part| {
        let length = (part.len() as u64).to_le_bytes();
        part.iter().chain(&length).fold(hash, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_and_every_border_counts() {
        let hash = |parts: &[&str]| of(parts.iter().map(|part| part.as_bytes()));
        let all = [hash(&[]), hash(&[""]), hash(&["ab"]), hash(&["ba"]), hash(&["a", "b"]), hash(&["ab", ""])];
        for (i, one) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|other| one != other), "{i}");
        }
    }

    #[test]
    fn the_hash_does_not_change() {
        // The length follows as eight zero bytes: FNV-1a of those alone.
        let zeros = [0u8; 8].iter().fold(OFFSET, |hash, _| hash.wrapping_mul(PRIME));
        assert_eq!(of([&b""[..]]), zeros);
        assert_eq!(of([]), OFFSET);
    }
}

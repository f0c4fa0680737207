//! Values to bytes and back, between ranks of one build; the only user of bincode.

use std::hash::{DefaultHasher, Hasher as _};

use bincode::Options as _;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Communicator;

/// Compared in `hello` before anything is decoded; bumped when a message changes.
pub const VERSION: u32 = 1;

/// A message larger than this is a mistake, not data (a plan of a million transfers is 200 MB).
const LIMIT: u64 = 1 << 33;

fn format() -> impl bincode::Options {
    bincode::DefaultOptions::new().with_fixint_encoding().with_limit(LIMIT).reject_trailing_bytes()
}

/// # Panics
/// If the value is larger than the limit of a message.
pub fn encode<T: Serialize + ?Sized>(value: &T) -> Vec<u8> {
    format().serialize(value).expect("values on the wire serialise and fit a message")
}

/// # Errors
/// If the bytes are not such a value, whole and alone.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    format().deserialize(bytes).map_err(|err| err.to_string())
}

/// # Panics
/// If the bytes are not such a value: `hello` has shown that all ranks are of one build.
fn received<T: DeserializeOwned>(bytes: &[u8]) -> T {
    decode(bytes).expect("ranks of one build understand each other")
}

/// Equal for equal values; shows that all ranks received the same.
pub fn fingerprint<T: Serialize + ?Sized>(value: &T) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(&encode(value));
    hasher.finish()
}

/// Rank 0's value, on every rank; the others bring none.
pub fn broadcast<T: Serialize + DeserializeOwned>(comm: &dyn Communicator, value: Option<T>) -> T {
    assert_eq!(value.is_some(), comm.rank().0 == 0, "rank 0 brings the value");
    let bytes = comm.broadcast(value.as_ref().map(encode).unwrap_or_default());
    value.unwrap_or_else(|| received(&bytes))
}

/// Every rank's value, by rank, on rank 0.
pub fn gather<T: Serialize + DeserializeOwned>(comm: &dyn Communicator, value: &T) -> Option<Vec<T>> {
    let all = comm.gather(encode(value))?;
    Some(all.iter().map(|bytes| received(bytes)).collect())
}

/// Sends each value to its rank and returns one value from each of `from`.
pub fn exchange<T: Serialize + DeserializeOwned>(
    comm: &dyn Communicator,
    outgoing: &[(crate::units::Rank, T)],
    from: &[crate::units::Rank],
) -> Vec<T> {
    let encoded: Vec<_> = outgoing.iter().map(|(to, value)| (*to, encode(value))).collect();
    let borrowed: Vec<_> = encoded.iter().map(|(to, bytes)| (*to, bytes.as_slice())).collect();
    comm.exchange(&borrowed, from).iter().map(|bytes| received(bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trailing_bytes_and_short_messages_are_refused() {
        let bytes = encode(&(1u32, "x".to_owned()));
        assert_eq!(decode::<(u32, String)>(&bytes), Ok((1, "x".to_owned())));
        assert!(decode::<(u32, String)>(&bytes[..bytes.len() - 1]).is_err());
        assert!(decode::<(u32, String)>(&[bytes.as_slice(), &[0]].concat()).is_err());
    }

    #[test]
    fn a_length_beyond_the_message_does_not_allocate() {
        let mut bytes = encode(&vec![0u64; 2]);
        bytes[..8].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
        assert!(decode::<Vec<u64>>(&bytes).is_err());
    }
}

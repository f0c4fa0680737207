//! Compares a slice with its expected data in blocks, on the host.

use crate::error::Error;
use crate::prepare::data::BLOCK;
use crate::prepare::owned::Owned;
use crate::units::Bytes;

use super::mismatch::Difference;
use crate::prepare::reference::{Data, Reference};

/// What a slice of a buffer must hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub data: Data,
    /// The source slice with these data, and how many there are.
    pub slice: u64,
    pub of: u64,
    /// The slice of the buffer.
    pub at: u64,
}

/// Expected data, a block at a time; made again only if they differ from those of the last call.
pub(super) struct Expected<'a> {
    reference: &'a Reference,
    buf: Vec<u8>,
    holds: Option<(Data, u64, u64)>,
}

impl<'a> Expected<'a> {
    pub fn new(reference: &'a Reference) -> Expected<'a> {
        Expected { reference, buf: Vec::new(), holds: None }
    }

    /// Bytes of a block: whole periods where that is possible, so that all blocks are equal, and
    /// a multiple of 256, so that blocks are aligned as their slice is.
    pub fn block(&self) -> u64 {
        let period = self.reference.period() * 4;
        let unit = period << 8u32.saturating_sub(period.trailing_zeros());
        if unit <= BLOCK { BLOCK / unit * unit } else { BLOCK }
    }

    /// `bytes` bytes of the data that `wanted` from `element` on, and whether they were made anew.
    pub fn get(&mut self, wanted: Wanted, element: u64, bytes: u64) -> (&[u8], bool) {
        let slice = if self.reference.is_distinct() { wanted.slice } else { 0 };
        let key = (wanted.data, slice, element % self.reference.period());
        let fresh = self.holds != Some(key) || (self.buf.len() as u64) < bytes;
        if fresh {
            self.buf.resize(bytes as usize, 0);
            self.reference.write(wanted.data, slice, element, &mut self.buf);
            self.holds = Some(key);
        }
        (&self.buf[..bytes as usize], fresh)
    }
}

/// Reads a buffer in order, several near parts at a time.
pub(super) struct Reader<'a> {
    memory: Owned<'a>,
    /// The name of its reads for fault injection.
    call: &'static str,
    buf: Vec<u8>,
    start: u64,
    /// Where reading ahead ends.
    pub until: u64,
}

impl<'a> Reader<'a> {
    pub fn new(memory: Owned<'a>, call: &'static str) -> Reader<'a> {
        Reader { memory, call, buf: Vec::new(), start: 0, until: 0 }
    }

    /// At most `BLOCK` bytes from `offset` on.
    fn get(&mut self, offset: u64, bytes: u64) -> Result<&[u8], Error> {
        let held = self.start..self.start + self.buf.len() as u64;
        if offset < held.start || offset + bytes > held.end {
            let ahead = self.until.saturating_sub(offset).clamp(bytes, BLOCK);
            self.buf.resize(ahead as usize, 0);
            self.start = offset;
            self.memory.read(self.call, offset, &mut self.buf)?;
        }
        let from = (offset - self.start) as usize;
        Ok(&self.buf[from..from + bytes as usize])
    }

    /// Bytes that are not `byte`.
    pub fn count_other(&mut self, offset: u64, bytes: Bytes, byte: u8) -> Result<u64, Error> {
        let mut count = 0;
        for at in (0..bytes.0).step_by(BLOCK as usize) {
            let part = self.get(offset + at, BLOCK.min(bytes.0 - at))?;
            count += part.iter().filter(|&&b| b != byte).count() as u64;
        }
        Ok(count)
    }
}

/// How a slice differs from its expected data.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Account {
    pub elements: u64,
    pub wrong_bytes: u64,
    pub wrong_elements: u64,
    /// Of the wrong elements, those that still hold the poison, and those of zero bytes.
    pub poisoned: u64,
    pub zero: u64,
    pub first: Option<Difference>,
}

/// Compares the slice of `bytes` bytes at `offset`.
pub(super) fn account(
    reader: &mut Reader<'_>,
    expected: &mut Expected<'_>,
    wanted: Wanted,
    (offset, bytes): (u64, Bytes),
    poison: Option<u8>,
) -> Result<Account, Error> {
    let mut account = Account { elements: bytes.0 / 4, ..Account::default() };
    let block = expected.block();
    for at in (0..bytes.0).step_by(block as usize) {
        let part = block.min(bytes.0 - at);
        let actual = reader.get(offset + at, part)?;
        let (expected, _) = expected.get(wanted, at / 4, part);
        if actual != expected {
            account.add(actual, expected, at / 4, poison);
        }
    }
    Ok(account)
}

impl Account {
    fn add(&mut self, actual: &[u8], expected: &[u8], element: u64, poison: Option<u8>) {
        let elements = |bytes: &'_ [u8]| -> Vec<[u8; 4]> {
            bytes.chunks_exact(4).map(|b| b.try_into().expect("an element has four bytes")).collect()
        };
        for (element, (actual, expected)) in (element..).zip(elements(actual).into_iter().zip(elements(expected))) {
            if actual == expected {
                continue;
            }
            self.wrong_elements += 1;
            self.wrong_bytes += actual.iter().zip(&expected).filter(|(a, e)| a != e).count() as u64;
            self.poisoned += u64::from(poison.is_some_and(|byte| actual == [byte; 4]));
            self.zero += u64::from(actual == [0; 4]);
            self.first.get_or_insert(Difference {
                element,
                expected: u32::from_ne_bytes(expected),
                actual: u32::from_ne_bytes(actual),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prepare::reference::tests::{distinct, options, pattern};

    #[test]
    fn blocks_are_equal_where_the_period_allows() {
        let long: Vec<f32> = (0..2_000_000).map(|i| i as f32).collect();
        for (reference, whole) in
            [(Reference::new(&options()), true), (pattern(&[1.0; 100]), true), (pattern(&long), false)]
        {
            let block = Expected::new(&reference).block();
            assert_eq!(block.is_multiple_of(reference.period() * 4), whole);
            assert!(block.is_multiple_of(256) && block <= BLOCK && block > BLOCK / 2);
        }
    }

    #[test]
    fn blocks_are_made_anew_only_where_they_differ() {
        let made = |reference: &Reference| {
            let mut expected = Expected::new(reference);
            let block = expected.block();
            let (a, b) = (Data::Sum(1), Data::Sum(2));
            [(a, 0, 0, block), (a, 0, 1, block), (a, 1, 0, 8), (b, 1, 0, 8), (b, 1, 0, 12), (b, 1, 0, 8)].map(
                |(data, slice, blocks, bytes)| {
                    let wanted = Wanted { data, slice, of: 2, at: 0 };
                    let (got, fresh) = expected.get(wanted, blocks * block / 4, bytes);
                    let mut want = vec![0; bytes as usize];
                    reference.write(data, slice, blocks * block / 4, &mut want);
                    assert!(got == want, "{wanted:?}");
                    fresh
                },
            )
        };
        assert_eq!(made(&Reference::new(&options())), [true, false, false, true, true, false]);
        assert_eq!(made(&distinct()), [true, false, true, true, true, false]);
    }
}

//! What was wrong in a buffer.

use serde::{Deserialize, Serialize};

/// Wrong data or a write outside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mismatch {
    /// None where only bytes outside the data were wrong, or where the host sees no difference.
    pub first: Option<Difference>,
    /// All of them, outside the data too.
    pub wrong_bytes: u64,
    /// What it looks like, for people.
    pub what: String,
}

/// The first wrong element (float32) of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    pub element: u64,
    /// Bits of the float, as are those of `actual`.
    pub expected: u32,
    pub actual: u32,
}

impl Mismatch {
    pub(super) fn join(one: Option<Mismatch>, other: Option<Mismatch>) -> Option<Mismatch> {
        match (one, other) {
            (Some(one), Some(other)) => Some(Mismatch {
                first: one.first.or(other.first),
                wrong_bytes: one.wrong_bytes + other.wrong_bytes,
                what: format!("{}; {}", one.what, other.what),
            }),
            (one, other) => one.or(other),
        }
    }
}

impl Difference {
    /// Expected and actual value; with their bytes, in memory order, when they print alike.
    pub fn texts(&self) -> (String, String) {
        let print = |bits| format!("{:?}", f32::from_bits(bits));
        let (expected, actual) = (print(self.expected), print(self.actual));
        if expected != actual {
            return (expected, actual);
        }
        let with_bytes = |text, bits: u32| {
            let [a, b, c, d] = bits.to_ne_bytes();
            format!("{text} (bytes {a:02x} {b:02x} {c:02x} {d:02x})")
        };
        (with_bytes(expected, self.expected), with_bytes(actual, self.actual))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(expected: f32, actual: f32, texts: (&str, &str)) {
        let difference = Difference { element: 0, expected: expected.to_bits(), actual: actual.to_bits() };
        let (expected, actual) = difference.texts();
        assert_eq!((expected.as_str(), actual.as_str()), texts);
    }

    #[test]
    fn values_print_as_floats() {
        check(31.0, 165.5, ("31.0", "165.5"));
        check(0.0, -0.0, ("0.0", "-0.0"));
        check(1.0, f32::from_bits(1.0f32.to_bits() + 1), ("1.0", "1.0000001"));
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn values_that_print_alike_show_their_bytes() {
        check(
            f32::from_bits(0x7FC0_0000),
            f32::from_bits(0x7FC0_0001),
            ("NaN (bytes 00 00 c0 7f)", "NaN (bytes 01 00 c0 7f)"),
        );
    }
}

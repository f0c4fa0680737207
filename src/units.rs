//! Quantities with their units: bytes, ranks, rates; and the one size parser.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A count of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Bytes(pub u64);

/// The number of a rank in the job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank(pub u32);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

const BINARY: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// Prints the largest power-of-1024 unit that divides the count exactly ("256 MiB", "4100 B").
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, scale) in BINARY {
            if self.0 != 0 && self.0.is_multiple_of(scale) {
                return f.pad(&format!("{} {name}", self.0 / scale));
            }
        }
        f.pad(&format!("{} B", self.0))
    }
}

impl Bytes {
    pub const ZERO: Bytes = Bytes(0);

    pub const fn kib(n: u64) -> Bytes {
        Bytes(n << 10)
    }

    pub const fn mib(n: u64) -> Bytes {
        Bytes(n << 20)
    }

    pub const fn gib(n: u64) -> Bytes {
        Bytes(n << 30)
    }

    /// Reads a size: digits, then optionally one blank and a unit. `K M G T` (either case) and
    /// `KiB MiB GiB TiB` are powers of 1024, `kB MB GB TB` powers of 1000, none or `B` is bytes.
    ///
    /// # Errors
    /// Says what is wrong with the text: sign, fraction, unknown unit, overflow of 64 bits.
    pub fn parse(text: &str) -> Result<Bytes, String> {
        let text = text.trim();
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, unit) = text.split_at(digits);
        let unit = unit.strip_prefix(' ').unwrap_or(unit);
        if number.is_empty() {
            return Err(format!(
                "\"{text}\" is not a size: write a whole number with an optional unit, such as 256M or 64KiB"
            ));
        }
        if unit.starts_with('.') {
            return Err(format!("\"{text}\" is not a whole number of units: use the next smaller unit"));
        }
        let scale = match unit {
            "" | "B" => 1,
            "K" | "k" | "KiB" => 1 << 10,
            "M" | "m" | "MiB" => 1 << 20,
            "G" | "g" | "GiB" => 1 << 30,
            "T" | "t" | "TiB" => 1 << 40,
            "kB" => 1_000,
            "MB" => 1_000_000,
            "GB" => 1_000_000_000,
            "TB" => 1_000_000_000_000,
            _ => {
                return Err(format!(
                    "\"{text}\" has the unknown unit \"{unit}\": K M G T and KiB MiB GiB TiB are powers of 1024, kB MB GB TB powers of 1000"
                ));
            }
        };
        number
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(scale))
            .map(Bytes)
            .ok_or_else(|| format!("\"{text}\" does not fit in 64 bits"))
    }

    /// Rounds up to a multiple of `step`, or `None` on overflow.
    pub fn round_up(self, step: u64) -> Option<Bytes> {
        self.0.checked_next_multiple_of(step).map(Bytes)
    }
}

/// Payload rate in GB/s (10^9 bytes a second), or `None` where no time was measured.
///
/// The one place where a rate is derived: 1 byte in 1 ns is 1 GB/s.
pub fn rate_gbps(bytes: Bytes, time_us: f64) -> Option<f64> {
    let rate = bytes.0 as f64 / (time_us * 1e3);
    (time_us > 0.0 && rate.is_finite()).then_some(rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Option<u64>) {
        assert_eq!(Bytes::parse(text).ok().map(|b| b.0), expected, "{text:?}");
    }

    #[test]
    fn sizes_are_read_one_way_or_refused() {
        check("256", Some(256));
        check("256M", Some(256 << 20));
        check("256m", Some(256 << 20));
        check("256MiB", Some(256 << 20));
        check("256 MiB", Some(256 << 20));
        check("256MB", Some(256_000_000));
        check("1kB", Some(1000));
        check("2T", Some(2 << 40));
        check("0", Some(0));
        check("18446744073709551615", Some(u64::MAX));
        for bad in [
            "",
            "M",
            "-1",
            "1.5G",
            "1e9",
            "0x100",
            "1_000",
            "256  M",
            "256KB",
            "256Mi",
            "18446744073709551616",
            "16777216T",
            "\u{0661}",
        ] {
            check(bad, None);
        }
    }

    #[test]
    fn printing_then_reading_is_the_identity() {
        for n in [0, 1, 4, 1023, 1024, 1025, 4096, 1 << 20, (1 << 20) + 4, 3 << 30, 1 << 42, u64::MAX] {
            assert_eq!(Bytes::parse(&Bytes(n).to_string()), Ok(Bytes(n)));
        }
    }

    #[test]
    fn a_rate_without_time_is_absent() {
        assert_eq!(rate_gbps(Bytes(1000), 1.0), Some(1.0));
        assert_eq!(rate_gbps(Bytes(1000), 0.0), None);
        assert_eq!(rate_gbps(Bytes(1000), -1.0), None);
        assert_eq!(rate_gbps(Bytes(1000), f64::NAN), None);
    }
}

//! Reads the text of one value and prints it back, the same for file, environment and command line.

use std::fmt::Display;
use std::ops::RangeInclusive;

use super::options::RotateBytes;
use crate::units::Bytes;

/// Elements are float32, so every size and offset is a multiple of it.
pub const ELEMENT_BYTES: u64 = 4;

/// Every sample of every transfer is kept, so the number of iterations is bounded by memory.
pub const ITERATIONS_MAX: u64 = 10_000_000;

/// More than any executor has, and few enough that a list of their shares fits in memory.
pub const SUB_EXECUTORS_MAX: u32 = 1 << 20;

/// A sweep is a test for each size; more than this is a slip of the keyboard.
pub const SIZES_MAX: usize = 4096;

/// About 30 years: far below the largest `Duration`, so that arithmetic on deadlines cannot overflow.
pub const SECONDS_MAX: f64 = 1e9;

/// What an absent optional value is written as.
pub const NONE: &str = "none";

/// Quotes a text for a message: control characters escaped, long texts cut.
pub fn quote(text: &str) -> String {
    const SHOWN: usize = 60;
    let mut shown: String = text.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN).is_some() {
        shown.push_str("...");
    }
    format!("\"{shown}\"")
}

/// The candidate most like `name`, if any is like it at all.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // Names are short; a long text is no slip of one.
    if name.len() > 64 {
        return None;
    }
    candidates
        .into_iter()
        .map(|candidate| (strsim::normalized_damerau_levenshtein(name, candidate), candidate))
        .filter(|(likeness, _)| *likeness >= 0.4)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

/// One of the listed words.
pub fn choice<T: Copy>(text: &str, words: &[(&str, T)]) -> Result<T, String> {
    let text = text.trim();
    words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(|| {
        let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        format!("{} is not one of {}", quote(text), known.join(", "))
    })
}

/// The word for a value of the list.
pub fn word<T: PartialEq>(value: &T, words: &[(&'static str, T)]) -> String {
    words.iter().find(|(_, listed)| listed == value).expect("every value has its word").0.to_owned()
}

/// `true` or `1`, `false` or `0`.
pub fn switch(text: &str) -> Result<bool, String> {
    match text.trim() {
        "true" | "1" => Ok(true),
        "false" | "0" => Ok(false),
        other => Err(format!("{} is not one of true, false, 1, 0", quote(other))),
    }
}

/// A whole number inside `range`.
pub fn count<T>(text: &str, range: RangeInclusive<T>) -> Result<T, String>
where
    T: std::str::FromStr + PartialOrd + Display,
{
    let text = text.trim();
    let refusal = || format!("{} is not a whole number from {} to {}", quote(text), range.start(), range.end());
    text.parse().ok().filter(|n| range.contains(n)).ok_or_else(refusal)
}

/// `count`, with the reason where TransferBench gives 0 a meaning.
pub fn iterations(text: &str) -> Result<u64, String> {
    if text.trim().parse() == Ok(0u64) {
        return Err("0 iterations would run for ever and never report: give at least 1, or set run.seconds".to_owned());
    }
    count(text, 1..=ITERATIONS_MAX)
}

/// A positive, finite number of seconds.
pub fn seconds(text: &str) -> Result<f64, String> {
    let text = text.trim();
    let refusal = || format!("{} is not a number of seconds above 0 and up to {SECONDS_MAX}", quote(text));
    text.parse().ok().filter(|s| *s > 0.0 && *s <= SECONDS_MAX).ok_or_else(refusal)
}

/// A value, or the word that stands for its absence.
pub fn optional<T>(text: &str, absent: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, String> {
    if text.trim() == absent {
        return Ok(None);
    }
    parse(text).map(Some).map_err(|why| format!("{why}, or {}", quote(absent)))
}

pub fn sub_executors(text: &str) -> Result<u32, String> {
    count(text, 1..=SUB_EXECUTORS_MAX)
}

/// Threads of a block: whole waves of 64, which every device has as many of as it has warps of 32.
pub fn block_size(text: &str) -> Result<u32, String> {
    let threads: u32 = count(text, 64..=1024)?;
    if !threads.is_multiple_of(64) {
        return Err(format!("{threads} is not a multiple of 64"));
    }
    Ok(threads)
}

/// TransferBench's unroll factors.
pub fn unroll(text: &str) -> Result<u32, String> {
    let refusal = || format!("{} is not one of 1 to 8, 16, 32", quote(text.trim()));
    text.trim().parse().ok().filter(|n| matches!(n, 1..=8 | 16 | 32)).ok_or_else(refusal)
}

/// A word, or TransferBench's number for it: its place in the list.
pub fn numbered<T: Copy>(text: &str, words: &[(&'static str, T)]) -> Result<T, String> {
    let place = text.trim().parse().ok().and_then(|place: usize| words.get(place));
    place.map_or_else(|| choice(text, words), |(_, value)| Ok(*value))
}

pub fn print_optional<T: Display>(value: &Option<T>, absent: &str) -> String {
    value.as_ref().map_or_else(|| absent.to_owned(), T::to_string)
}

/// A path; `none` writes no file.
pub fn path(text: &str) -> Result<Option<String>, String> {
    if text.trim().is_empty() {
        return Err(format!("an empty path names no file: write {} for none", quote(NONE)));
    }
    if text.contains('\0') {
        return Err(format!("{} cannot be a path: it holds a zero byte", quote(text)));
    }
    Ok((text != NONE).then(|| text.to_owned()))
}

/// The one size parser, with the text cut to a length that a message can carry.
pub fn size(text: &str) -> Result<Bytes, String> {
    if text.len() > 64 {
        return Err(format!("{} is not a size", quote(text)));
    }
    Bytes::parse(text)
}

/// Shared memory of a block: a few stages at least, and no more than a multiprocessor of sm_90 gives a
/// block (227 KiB, CUDA programming guide, technical specifications), with room for the barriers.
pub fn shared_bytes(text: &str) -> Result<Bytes, String> {
    let (least, most) = (Bytes::kib(4), Bytes::kib(224));
    match size(text)? {
        bytes if bytes < least || bytes > most => Err(format!("{bytes} is not between {least} and {most}")),
        bytes => Ok(bytes),
    }
}

/// A size that is a whole number of elements.
pub fn element_size(text: &str) -> Result<Bytes, String> {
    let bytes = size(text)?;
    if !bytes.0.is_multiple_of(ELEMENT_BYTES) {
        return Err(format!("{bytes} is not a multiple of {ELEMENT_BYTES}"));
    }
    Ok(bytes)
}

/// A size of at least one element.
pub fn payload_size(text: &str) -> Result<Bytes, String> {
    let bytes = element_size(text)?;
    if bytes == Bytes::ZERO {
        return Err(format!("0 bytes is no size: give at least {ELEMENT_BYTES}"));
    }
    Ok(bytes)
}

/// Sizes: `4M`, `1M, 4M`, or a sweep `1M..512M/2` (up to 512M, 2 sizes to each doubling).
pub fn sizes(text: &str) -> Result<Vec<Bytes>, String> {
    let Some((from, rest)) = text.split_once("..") else {
        let list = list(text, payload_size)?;
        return if list.len() > SIZES_MAX {
            Err(format!("{} sizes are more than {SIZES_MAX}", list.len()))
        } else {
            Ok(list)
        };
    };
    let (to, per_octave) = rest.split_once('/').unwrap_or((rest, "1"));
    let per_octave = count(per_octave, 1..=SIZES_MAX as u64).map_err(|why| format!("per_octave: {why}"))?;
    sweep(payload_size(from)?, payload_size(to)?, per_octave)
}

/// From `from` up to at most `to`: each doubling in `per_octave` equal steps (TransferBench's
/// SAMPLING_FACTOR), each size rounded down to whole elements, none twice.
fn sweep(from: Bytes, to: Bytes, per_octave: u64) -> Result<Vec<Bytes>, String> {
    if from > to {
        return Err(format!("a sweep from {from} to {to} is empty: from has to be the smaller one"));
    }
    let mut sizes = Vec::new();
    let mut octave = u128::from(from.0);
    while octave <= u128::from(to.0) {
        for step in 0..u128::from(per_octave) {
            let exact = octave + octave * step / u128::from(per_octave);
            let whole = exact - exact % u128::from(ELEMENT_BYTES);
            let Some(size) = u64::try_from(whole).ok().map(Bytes).filter(|size| *size <= to) else { break };
            if sizes.last() != Some(&size) {
                sizes.push(size);
            }
            if sizes.len() > SIZES_MAX {
                return Err(format!(
                    "a sweep from {from} to {to} with {per_octave} per octave has more than {SIZES_MAX} sizes"
                ));
            }
        }
        octave *= 2;
    }
    Ok(sizes)
}

/// Rotation footprints: sizes or `auto`.
pub fn rotations(text: &str) -> Result<Vec<RotateBytes>, String> {
    list(text, rotation)
}

/// One rotation footprint.
pub fn rotation(text: &str) -> Result<RotateBytes, String> {
    match text.trim() {
        "auto" => Ok(RotateBytes::Auto),
        text => size(text).map(RotateBytes::Size),
    }
}

impl std::fmt::Display for RotateBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RotateBytes::Auto => f.pad("auto"),
            RotateBytes::Size(bytes) => bytes.fmt(f),
        }
    }
}

/// Percentages of the classes random, 1B0, 2B0, 4B0, 32B0; none, or summing to 100.
pub fn percentages(text: &str) -> Result<Vec<u8>, String> {
    if text.trim() == NONE {
        return Ok(Vec::new());
    }
    let parts = list(text, |part| count(part, 0..=100u8))?;
    if parts.len() > 5 {
        return Err(format!("{} percentages are more than the 5 classes random, 1B0, 2B0, 4B0, 32B0", parts.len()));
    }
    let sum: u32 = parts.iter().map(|part| u32::from(*part)).sum();
    if sum != 100 {
        return Err(format!("percentages {} sum to {sum}, not 100", join(&parts)));
    }
    Ok(parts)
}

pub fn print_percentages(percentages: &[u8]) -> String {
    if percentages.is_empty() { NONE.to_owned() } else { join(percentages) }
}

/// A fill pattern: hex digits in TransferBench's order, or decimal numbers (with a point or a comma).
pub fn pattern(text: &str) -> Result<Vec<f32>, String> {
    let text = text.trim();
    if text == NONE {
        return Ok(Vec::new());
    }
    if text.contains(['.', ',']) {
        let float = |part: &str| {
            let part = part.trim();
            part.parse().map_err(|_| format!("{} is not a float32 number", quote(part)))
        };
        return list(text, float);
    }
    let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect();
    let digits = digits.filter(|digits| !digits.is_empty()).ok_or_else(|| {
        format!("{} is no fill pattern: give hex digits without 0x, or numbers with a point or a comma", quote(text))
    })?;
    if digits.len() % 2 != 0 {
        return Err(format!("the fill pattern has {} hex digits: whole bytes need an even number", digits.len()));
    }
    // TransferBench takes the digits as one big-endian number and repeats it to whole floats.
    let bytes: Vec<u8> = digits.chunks(2).rev().map(|pair| pair[0] << 4 | pair[1]).collect();
    let copies = match digits.len() % 8 {
        0 => 1,
        4 => 2,
        _ => 4,
    };
    let filled = bytes.repeat(copies);
    Ok(filled.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

/// The hex digits that `pattern` reads back bit for bit.
pub fn print_pattern(pattern: &[f32]) -> String {
    if pattern.is_empty() {
        return NONE.to_owned();
    }
    pattern.iter().rev().map(|float| format!("{:08x}", float.to_bits())).collect()
}

/// Values separated by commas, at least one.
fn list<T>(text: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    if text.trim().is_empty() {
        return Err("the list is empty: give at least one value".to_owned());
    }
    text.split(',').map(parse).collect()
}

pub fn join<T: Display>(values: &[T]) -> String {
    values.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sweep_of(text: &str) -> Vec<u64> {
        sizes(text).unwrap().into_iter().map(|b| b.0).collect()
    }

    #[test]
    fn sweeps_double_in_equal_steps() {
        assert_eq!(sweep_of("1K..8K"), [1024, 2048, 4096, 8192]);
        assert_eq!(sweep_of("1K..4K/2"), [1024, 1536, 2048, 3072, 4096]);
        assert_eq!(sweep_of("1K..5K"), [1024, 2048, 4096]);
        assert_eq!(sweep_of("4K..4K/8"), [4096]);
    }

    #[test]
    fn small_sweeps_hold_whole_elements_once() {
        assert_eq!(sweep_of("4..16/8"), [4, 8, 12, 16]);
        assert_eq!(sweep_of("1000..2000/3"), [1000, 1332, 1664, 2000]);
    }

    #[test]
    fn sweeps_end_at_64_bits_and_at_the_limit() {
        assert_eq!(sweep_of("9223372036854775808..18446744073709551612").len(), 1);
        assert_eq!(sweep_of("1M..2097148/4096").len(), SIZES_MAX);
        assert!(sizes("1M..2M/4096").is_err());
        for bad in ["8K..4K", "0..4K", "1..4K", "4..", "..4", "4..8/0", "4..8/x", "4..8..16", ""] {
            assert!(sizes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn patterns_follow_transferbench() {
        // One big-endian number: the first digits end up in the last byte.
        assert_eq!(pattern("3F800000"), Ok(vec![1.0]));
        assert_eq!(pattern("3F80000040000000"), Ok(vec![2.0, 1.0]));
        assert_eq!(pattern("4b"), Ok(vec![f32::from_bits(0x4b4b4b4b)]));
        assert_eq!(pattern("4041"), Ok(vec![f32::from_bits(0x40414041)]));
        assert_eq!(pattern("010203").unwrap().len(), 3);
        assert_eq!(pattern("1.0, 2.5"), Ok(vec![1.0, 2.5]));
        for bad in ["", "0x10", "123", "g0", "1.0,x", ","] {
            assert!(pattern(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn percentages_are_at_most_five_and_sum_to_100() {
        assert_eq!(percentages("20, 80"), Ok(vec![20, 80]));
        assert_eq!(percentages("0,0,0,0,100").unwrap().len(), 5);
        for bad in ["", "50", "50,51", "0,0,0,0,0,100", "-1,101", "100,"] {
            assert!(percentages(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn limits_hold_on_both_sides() {
        assert_eq!(iterations("1"), Ok(1));
        assert_eq!(iterations("10000000"), Ok(ITERATIONS_MAX));
        for bad in ["0", "-1", "10000001", "1.5", "x", "", "18446744073709551616"] {
            assert!(iterations(bad).is_err(), "{bad}");
        }
        assert_eq!(seconds("1e9"), Ok(SECONDS_MAX));
        assert_eq!(seconds("0.25"), Ok(0.25));
        for bad in ["0", "-1", "1.1e9", "inf", "nan", "x", ""] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
        assert!(payload_size("4").is_ok());
        for bad in ["0", "6", "-4"] {
            assert!(payload_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn messages_stay_short_and_printable() {
        let long = "9\u{1b}[31m".repeat(100_000);
        for message in [size(&long).unwrap_err(), switch(&long).unwrap_err(), pattern(&long).unwrap_err()] {
            assert!(message.len() < 400 && !message.contains('\u{1b}'), "{message}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in any::<String>()) {
            let _ = (sizes(&text), rotations(&text), percentages(&text), pattern(&text), seconds(&text), path(&text));
        }

        #[test]
        fn sizes_survive_printing(list in proptest::collection::vec((1u64..u64::MAX / 4).prop_map(|n| Bytes(n * 4)), 1..20)) {
            prop_assert_eq!(sizes(&join(&list)), Ok(list));
        }

        #[test]
        fn sweeps_ascend_within_their_bounds(from in 1u64..1 << 40, factor in 1u64..1 << 20, per_octave in 1u64..100) {
            let (from, to) = (from * 4, from * 4 * factor);
            let sizes = sizes(&format!("{from}..{to}/{per_octave}")).unwrap();
            prop_assert_eq!(sizes[0], Bytes(from));
            prop_assert!(sizes.windows(2).all(|w| w[0] < w[1]));
            prop_assert!(sizes.iter().all(|s| s.0 <= to && s.0 % 4 == 0));
        }

        #[test]
        fn patterns_survive_printing_bit_for_bit(bits in proptest::collection::vec(any::<u32>(), 1..20)) {
            let floats: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).collect();
            let back: Vec<u32> = pattern(&print_pattern(&floats)).unwrap().iter().map(|f| f.to_bits()).collect();
            prop_assert_eq!(back, bits);
        }
    }
}

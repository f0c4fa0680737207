//! Reference data: what every source holds, and what every destination must hold.

use crate::config::options::Options;
use crate::plan::data::{CLASSES, check};

/// What a destination without sources is filled with (TransferBench's `MEMSET_CHAR`).
pub const FILL_BYTE: u8 = 75;

/// What guard zones and gaps between slices hold; a write there changes it.
pub const GUARD_BYTE: u8 = 0x5A;

/// Slices with data of their own when they are distinct: the largest element of source 0 is then
/// 382 + 31 + 383 * 32767 < 2^24, which float32 holds exactly.
pub const DISTINCT_SLICES: u64 = 32768;

const ELEMENT: usize = 4;
/// Period of the default data, in elements; a prime, so that no power-of-two shift goes unnoticed.
const DEFAULT_PERIOD: u64 = 383;

const LINE: usize = 64;
const LINE_ELEMENTS: u64 = (LINE / ELEMENT) as u64;
/// Percentages are whole numbers, so that counts in a block of 100 lines are exact.
const BLOCK_LINES: u64 = 100;
/// 128 blocks are 819200 bytes: more than caches that compress look at, little to generate.
const PERIOD_LINES: u64 = 128 * BLOCK_LINES;
/// Data of one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// What the source of this number holds.
    Source(u32),
    /// The sum of this many sources: what a destination must hold.
    Sum(u32),
}

/// Gives any piece of the data of any source or destination; keeps none of it.
///
/// Elements are float32 in the byte order of the machine. All transfers share the same data.
#[derive(Clone, Debug)]
pub struct Reference {
    values: Values,
}

#[derive(Clone, Debug)]
enum Values {
    /// Element i of source b is `(((i mod 383) * 517) mod 383 + 31) * (b + 1)`. With distinct
    /// slices, 383 * (k mod 32768) is added inside the bracket for slice k.
    Default { distinct: bool },
    /// The floats repeated, the same in every source.
    Pattern(Vec<f32>),
    /// Lines of 16 floats (64 bytes), uniform in [-100000, 100000), with bytes zeroed by the
    /// line's class: random = none; 1B0 = every odd byte; 2B0 = bytes 2 and 3 of each 4;
    /// 4B0 = bytes 4 to 7 of each 8; 32B0 = bytes 32 to 63.
    ///
    /// Every 100 lines hold each class as often as its percentage says, in an order shuffled for
    /// that block and source; no remainder is left to distribute. The data repeat after 128
    /// blocks. Floats and shuffles are words of one SplitMix64 sequence (Steele, Lea, Flood 2014)
    /// numbered by source, line and block, so every run and every rank has the same. A last
    /// partial line is zeroed by its class too.
    Compress([u8; CLASSES]),
}

impl Reference {
    /// # Panics
    /// If `check` refuses the options: plans hold only checked ones.
    pub fn new(options: &Options) -> Reference {
        if let Err(problem) = check(options) {
            panic!("data settings are checked when planning: {problem}");
        }
        let values = if !options.fill_compress.is_empty() {
            let mut percent = [0; CLASSES];
            percent[..options.fill_compress.len()].copy_from_slice(&options.fill_compress);
            Values::Compress(percent)
        } else if !options.fill_pattern.is_empty() {
            Values::Pattern(options.fill_pattern.clone())
        } else {
            Values::Default { distinct: options.src_rotate_distinct }
        };
        Reference { values }
    }

    /// Whether each source slice holds different data.
    pub fn is_distinct(&self) -> bool {
        matches!(self.values, Values::Default { distinct: true })
    }

    /// Elements after which all data repeat, within a slice.
    pub fn period(&self) -> u64 {
        match &self.values {
            Values::Default { .. } => DEFAULT_PERIOD,
            Values::Pattern(floats) => floats.len() as u64,
            Values::Compress(_) => PERIOD_LINES * LINE_ELEMENTS,
        }
    }

    /// Writes `data` of a slice from `element` on; `out` holds whole elements. The slice counts
    /// only if slices are distinct.
    pub fn write(&self, data: Data, slice: u64, element: u64, out: &mut [u8]) {
        match data {
            Data::Source(ordinal) => self.source(ordinal, slice, element, out),
            Data::Sum(sources) => self.expected(sources, slice, element, out),
        }
    }

    /// Writes what source `ordinal` holds in `slice` from `element` on.
    pub fn source(&self, ordinal: u32, slice: u64, element: u64, out: &mut [u8]) {
        let head = self.head(out);
        self.generate(ordinal, slice, element, &mut out[..head]);
        repeat(out, head);
    }

    /// Writes what a destination of `sources` sources must hold from `element` on, when `slice` of
    /// each was read: the float32 sum, left to right. No source = the fill byte; one = its bytes.
    pub fn expected(&self, sources: u32, slice: u64, element: u64, out: &mut [u8]) {
        if sources == 0 {
            return out.fill(FILL_BYTE);
        }
        let head = self.head(out);
        self.generate(0, slice, element, &mut out[..head]);
        let mut term = vec![0; if sources > 1 { head } else { 0 }];
        for ordinal in 1..sources {
            self.generate(ordinal, slice, element, &mut term);
            for (sum, term) in out[..head].chunks_exact_mut(ELEMENT).zip(term.chunks_exact(ELEMENT)) {
                let value = float(sum) + float(term);
                sum.copy_from_slice(&value.to_ne_bytes());
            }
        }
        repeat(out, head);
    }

    /// The byte that destinations of `sources` sources are poisoned with: no expected element
    /// consists of it. Never 0, the fill byte or the guard byte.
    ///
    /// 0xC3 makes a negative float, which the default data cannot hold in any slice; the other
    /// data are searched. (Only a pattern with all 253 candidates leaves none: then the rarest.)
    pub fn poison(&self, sources: u32) -> u8 {
        const PREFERRED: u8 = 0xC3;
        let mut uses = [0u64; 256];
        let mut data = vec![0; self.period() as usize * ELEMENT];
        self.expected(sources, 0, 0, &mut data);
        for element in data.chunks_exact(ELEMENT) {
            if element.iter().all(|&byte| byte == element[0]) {
                uses[usize::from(element[0])] += 1;
            }
        }
        std::iter::once(PREFERRED)
            .chain(1..=u8::MAX)
            .filter(|&byte| byte != FILL_BYTE && byte != GUARD_BYTE)
            .min_by_key(|&byte| uses[usize::from(byte)])
            .expect("there are candidates")
    }

    /// Bytes of `out` up to where the data repeat.
    fn head(&self, out: &[u8]) -> usize {
        assert!(out.len().is_multiple_of(ELEMENT), "{} bytes are not whole elements", out.len());
        out.len().min(self.period() as usize * ELEMENT)
    }

    fn generate(&self, ordinal: u32, slice: u64, element: u64, out: &mut [u8]) {
        let positions = (element..).zip(out.chunks_exact_mut(ELEMENT));
        match &self.values {
            Values::Default { distinct } => {
                let base = 31 + if *distinct { 383 * (slice % DISTINCT_SLICES) } else { 0 };
                for (i, bytes) in positions {
                    let value = ((i % 383 * 517) % 383 + base) * (u64::from(ordinal) + 1);
                    bytes.copy_from_slice(&(value as f32).to_ne_bytes());
                }
            }
            Values::Pattern(floats) => {
                for (i, bytes) in positions {
                    bytes.copy_from_slice(&floats[(i % floats.len() as u64) as usize].to_ne_bytes());
                }
            }
            Values::Compress(percent) => compress(percent, ordinal, element, out),
        }
    }
}

fn float(bytes: &[u8]) -> f32 {
    f32::from_ne_bytes(bytes.try_into().expect("an element has four bytes"))
}

/// Repeats the first `head` bytes to the end, by doubling.
fn repeat(out: &mut [u8], head: usize) {
    let mut done = head;
    while done < out.len() {
        let more = done.min(out.len() - done);
        out.copy_within(..more, done);
        done += more;
    }
}

fn compress(percent: &[u8; CLASSES], ordinal: u32, element: u64, out: &mut [u8]) {
    let mut block = None;
    let mut classes = [0; BLOCK_LINES as usize];
    let mut done = 0;
    while done < out.len() {
        let position = (element + (done / ELEMENT) as u64) % (PERIOD_LINES * LINE_ELEMENTS);
        let (line, from) = (position / LINE_ELEMENTS, (position % LINE_ELEMENTS) as usize * ELEMENT);
        if block != Some(line / BLOCK_LINES) {
            block = Some(line / BLOCK_LINES);
            classes = shuffled(percent, ordinal, line / BLOCK_LINES);
        }
        let bytes = compress_line(ordinal, line, classes[(line % BLOCK_LINES) as usize]);
        let count = (LINE - from).min(out.len() - done);
        out[done..done + count].copy_from_slice(&bytes[from..from + count]);
        done += count;
    }
}

/// The classes of a block's lines (Fisher-Yates).
fn shuffled(percent: &[u8; CLASSES], ordinal: u32, block: u64) -> [u8; BLOCK_LINES as usize] {
    let mut classes = [0; BLOCK_LINES as usize];
    let counted = percent.iter().zip(0u8..).flat_map(|(&n, class)| std::iter::repeat_n(class, usize::from(n)));
    for (place, class) in classes.iter_mut().zip(counted) {
        *place = class;
    }
    for i in (1..classes.len()).rev() {
        // The top bit keeps the words of shuffles apart from those of lines.
        let word = random((1 << 63) | (u64::from(ordinal) << 24) | (block << 8) | i as u64);
        classes.swap(i, (((word >> 32) * (i as u64 + 1)) >> 32) as usize);
    }
    classes
}

fn compress_line(ordinal: u32, line: u64, class: u8) -> [u8; LINE] {
    const WORDS: u64 = (LINE / 8) as u64;
    let first = (u64::from(ordinal) << 24) | (line * WORDS);
    let mut bytes = [0; LINE];
    for (word, pair) in (first..).map(random).zip(bytes.chunks_exact_mut(8)) {
        pair[..4].copy_from_slice(&uniform(word as u32).to_ne_bytes());
        pair[4..].copy_from_slice(&uniform((word >> 32) as u32).to_ne_bytes());
    }
    for (i, byte) in bytes.iter_mut().enumerate() {
        let zero = match class {
            1 => i % 2 == 1,
            2 => i % 4 >= 2,
            3 => i % 8 >= 4,
            4 => i >= 32,
            _ => false,
        };
        if zero {
            *byte = 0;
        }
    }
    bytes
}

/// Uniform in [-100000, 100000). 24 bits, so that rounding to float32 does not reach the end.
fn uniform(word: u32) -> f32 {
    (f64::from(word >> 8) * (200_000.0 / f64::from(1 << 24)) - 100_000.0) as f32
}

/// Word number `n` of a SplitMix64 sequence.
fn random(n: u64) -> u64 {
    let z = n.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::options::{Backend, Gpus, RotateBytes, RotateScope, Start, Streaming, Validate};
    use crate::units::Bytes;

    pub(crate) fn options() -> Options {
        Options {
            backend: Backend::Auto,
            gpus: Gpus::Split,
            iterations: 1,
            seconds: None,
            warmups: 0,
            cold_iterations: 0,
            rotation_check: false,
            sub_iterations: 1,
            start: Start::Barrier,
            strict: false,
            deadline_seconds: 60.0,
            sub_executors: None,
            bytes: vec![Bytes::mib(1)],
            src_rotate_bytes: vec![RotateBytes::Size(Bytes::mib(256))],
            src_rotate_scope: RotateScope::All,
            src_rotate_distinct: false,
            dst_rotate_bytes: RotateBytes::Size(Bytes::ZERO),
            fill_pattern: vec![],
            fill_compress: vec![],
            byte_offset: Bytes::ZERO,
            block_bytes: Bytes(256),
            always_validate: Validate::AtEnd,
            validate_direct: false,
            validate_source: false,
            cpu_streaming: Streaming::Auto,
            gfx: Options::default().gfx,
            tdm: Options::default().tdm,
            dma_no_cu: false,
            host_devices: 0,
            host_memory: Bytes::ZERO,
            output_json: None,
            output_csv: None,
            output_iterations: false,
        }
    }

    fn default() -> Reference {
        Reference::new(&options())
    }

    pub(crate) fn distinct() -> Reference {
        Reference::new(&Options { src_rotate_distinct: true, ..options() })
    }

    pub(crate) fn pattern(floats: &[f32]) -> Reference {
        Reference::new(&Options { fill_pattern: floats.to_vec(), ..options() })
    }

    fn compressed(percent: &[u8]) -> Reference {
        Reference::new(&Options { fill_compress: percent.to_vec(), ..options() })
    }

    fn floats(reference: &Reference, data: Data, slice: u64, element: u64, n: usize) -> Vec<f32> {
        let mut bytes = vec![0; n * 4];
        reference.write(data, slice, element, &mut bytes);
        bytes.chunks_exact(4).map(float).collect()
    }

    #[test]
    fn default_sources_follow_the_formula() {
        let r = default();
        assert_eq!(floats(&r, Data::Source(0), 0, 0, 5), [31.0, 165.0, 299.0, 50.0, 184.0]);
        assert_eq!(floats(&r, Data::Source(0), 0, 382, 2), [280.0, 31.0]);
        assert_eq!(floats(&r, Data::Source(2), 0, 383 * 5_000_000_000 + 1, 1), [495.0]);
        assert_eq!(floats(&r, Data::Source(0), 9, 0, 2), [31.0, 165.0], "equal slices");
    }

    #[test]
    fn sums_run_over_the_sources() {
        let r = default();
        assert_eq!(floats(&r, Data::Sum(1), 0, 1, 1), [165.0]);
        assert_eq!(floats(&r, Data::Sum(3), 0, 1, 1), [165.0 * 6.0]);
        assert_eq!(floats(&r, Data::Sum(0), 0, 7, 2), [f32::from_ne_bytes([75; 4]); 2]);
        // Left to right in float32: (2^24 + 2^24) + 2^24, and one below stays exact.
        let p = pattern(&[16_777_216.0, 0.1]);
        assert_eq!(floats(&p, Data::Sum(3), 0, 0, 3), [50_331_648.0, 0.1 + 0.1 + 0.1, 50_331_648.0]);
    }

    #[test]
    fn one_source_is_copied_bit_by_bit() {
        let mut bytes = [0; 4];
        pattern(&[-0.0]).expected(1, 0, 0, &mut bytes);
        assert_eq!(bytes, (-0.0f32).to_ne_bytes());
    }

    #[test]
    fn distinct_slices_hold_different_exact_data() {
        let r = distinct();
        assert_eq!(floats(&r, Data::Source(0), 0, 0, 2), [31.0, 165.0]);
        assert_eq!(floats(&r, Data::Source(0), 3, 1, 1), [165.0 + 3.0 * 383.0]);
        assert_eq!(floats(&r, Data::Source(1), 3, 1, 1), [2.0 * (165.0 + 3.0 * 383.0)]);
        assert_eq!(floats(&r, Data::Source(0), 32767, 0, 1), [(31 + 383 * 32767) as f32]);
        assert_eq!((31 + 383 * 32767) as f32 as u64, 31 + 383 * 32767);
        assert_eq!(floats(&r, Data::Source(0), 32768, 0, 1), [31.0]);
    }

    #[test]
    fn patterns_repeat() {
        let r = pattern(&[1.5, -2.0, 3.0]);
        assert_eq!(floats(&r, Data::Source(4), 7, 2, 5), [3.0, 1.5, -2.0, 3.0, 1.5]);
    }

    #[test]
    fn pieces_of_any_size_equal_one_shot() {
        let long: Vec<f32> = (0..1000).map(|i| i as f32 * 0.3).collect();
        for r in [default(), distinct(), pattern(&[7.0]), pattern(&long), compressed(&[20, 20, 20, 20, 20])] {
            for data in [Data::Source(0), Data::Source(3), Data::Sum(0), Data::Sum(1), Data::Sum(3)] {
                let n = r.period() as usize + 1234;
                let whole = floats(&r, data, 5, 0, n);
                for step in [n / 2 + 1, 1021 * 17, 40_961] {
                    let pieces: Vec<f32> =
                        (0..n).step_by(step).flat_map(|at| floats(&r, data, 5, at as u64, step.min(n - at))).collect();
                    assert!(
                        pieces.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits()),
                        "{r:?} {data:?} {step}"
                    );
                    assert_eq!(pieces.len(), whole.len());
                }
            }
        }
    }

    /// The class that a line's zero bytes show (chance zeros are no issue: all bytes must fit).
    fn class(line: &[u8]) -> usize {
        let fits = |zero: &dyn Fn(usize) -> bool| line.iter().enumerate().all(|(i, &b)| !zero(i) || b == 0);
        if fits(&|i| i % 4 >= 2) {
            2
        } else if fits(&|i| i % 2 == 1) {
            1
        } else if fits(&|i| i % 8 >= 4) {
            3
        } else if fits(&|i| i >= 32) {
            4
        } else {
            0
        }
    }

    #[test]
    fn percentages_hold_in_every_block_of_100_lines() {
        for percent in [[30, 25, 20, 15, 10], [1, 0, 99, 0, 0], [0, 0, 0, 0, 100]] {
            let r = compressed(&percent);
            for first_line in [0u64, 100, 12_700, 12_800 * 7 + 300] {
                let mut bytes = vec![0; 6400];
                r.source(1, 0, first_line * 16, &mut bytes);
                let mut counts = [0u8; 5];
                bytes.chunks(64).for_each(|line| counts[class(line)] += 1);
                assert_eq!(counts, percent, "line {first_line}");
            }
        }
    }

    #[test]
    fn compressed_data_are_shuffled_and_differ_by_source_and_block() {
        let r = compressed(&[50, 50]);
        let of = |ordinal, line: u64| {
            let mut bytes = vec![0; 6400];
            r.source(ordinal, 0, line * 16, &mut bytes);
            bytes
        };
        assert_eq!(of(0, 0), of(0, 0));
        assert_ne!(of(0, 0), of(1, 0));
        assert_ne!(of(0, 0), of(0, 100));
        assert_eq!(of(0, 0), of(0, 12_800));
        let order = |bytes: &[u8]| bytes.chunks(64).map(class).collect::<Vec<_>>();
        assert!(order(&of(0, 0)).windows(2).filter(|w| w[0] != w[1]).count() > 20);
        assert_ne!(order(&of(0, 0)), order(&of(0, 100)));
    }

    #[test]
    fn random_floats_stay_in_their_range() {
        assert_eq!(uniform(0), -100_000.0);
        assert!(uniform(u32::MAX) < 100_000.0);
        assert!(floats(&compressed(&[100]), Data::Source(0), 0, 0, 5000).iter().any(|v| v.abs() > 90_000.0));
    }

    #[test]
    fn poison_is_never_expected_data() {
        assert_eq!(default().poison(1), 0xC3);
        assert_eq!(default().poison(0), 0xC3);
        let c3 = f32::from_ne_bytes([0xC3; 4]);
        assert_ne!(pattern(&[1.0, c3]).poison(1), 0xC3);
        assert_ne!(pattern(&[c3 / 2.0]).poison(2), 0xC3, "the sum counts");
        assert_eq!(pattern(&[c3]).poison(2), 0xC3);
        let taken: Vec<f32> =
            [0xC3u8].into_iter().chain(1..=200).map(|b| f32::from_ne_bytes([b; 4])).filter(|v| !v.is_nan()).collect();
        assert_eq!(pattern(&taken).poison(1), 201);
    }

    #[test]
    fn contradicting_settings_are_refused_all_at_once() {
        let refused = |options: Options| check(&options).unwrap_err();
        assert!(refused(Options { fill_compress: vec![50, 49], ..options() }).contains("sums to 99"));
        let two = refused(Options { fill_compress: vec![20; 6], ..options() });
        assert!(two.contains("has 6 percentages") && two.contains("sums to 120"), "{two}");
        assert!(refused(Options { fill_pattern: vec![1.0, f32::NAN], ..options() }).contains("fill_pattern[1]"));
        let distinct = Options { src_rotate_distinct: true, ..options() };
        assert!(refused(Options { fill_pattern: vec![1.0], ..distinct.clone() }).contains("fill_pattern"));
        assert!(refused(Options { fill_compress: vec![100], ..distinct.clone() }).contains("fill_compress"));
        assert_eq!(check(&distinct), Ok(vec![]));
    }

    #[test]
    fn compress_wins_over_pattern_and_says_so() {
        let both = Options { fill_compress: vec![0, 0, 0, 0, 100], fill_pattern: vec![1.0], ..options() };
        assert_eq!(check(&both).unwrap().len(), 1);
        assert_eq!(floats(&Reference::new(&both), Data::Source(0), 0, 8, 8), [0.0; 8]);
    }
}

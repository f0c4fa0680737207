//! Checks the settings of what sources hold.

use crate::config::options::Options;

/// Kinds of 64-byte lines that `fill_compress` mixes: random, 1B0, 2B0, 4B0, 32B0.
pub const CLASSES: usize = 5;

/// Refuses data settings that contradict each other, and tells which one has no effect.
///
/// # Errors
/// Every problem, one after the other.
pub fn check(options: &Options) -> Result<Vec<String>, String> {
    let (compress, pattern) = (&options.fill_compress, &options.fill_pattern);
    let mut problems = Vec::new();
    if compress.len() > CLASSES {
        problems.push(format!(
            "fill_compress has {} percentages: at most 5 are known (random, 1B0, 2B0, 4B0, 32B0)",
            compress.len()
        ));
    }
    let sum: u32 = compress.iter().map(|&p| u32::from(p)).sum();
    if !compress.is_empty() && sum != 100 {
        problems.push(format!("fill_compress sums to {sum}: the percentages must sum to 100"));
    }
    if let Some(i) = pattern.iter().position(|v| v.is_nan()) {
        problems.push(format!(
            "fill_pattern[{i}] is NaN, whose sums differ between processors: use values that compare by bytes"
        ));
    }
    if options.src_rotate_distinct && !(compress.is_empty() && pattern.is_empty()) {
        let key = if compress.is_empty() { "fill_pattern" } else { "fill_compress" };
        problems.push(format!(
            "src_rotate_distinct needs the default data: leave {key} out, or set src_rotate_distinct = false"
        ));
    }
    if !problems.is_empty() {
        return Err(problems.join("; "));
    }
    Ok(compress_wins(options).into_iter().collect())
}

/// The warning that `fill_pattern` is not used, where both are set.
fn compress_wins(options: &Options) -> Option<String> {
    let both = !options.fill_compress.is_empty() && !options.fill_pattern.is_empty();
    both.then(|| "fill_pattern has no effect: fill_compress is set too and wins".to_owned())
}

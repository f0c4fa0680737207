//! Turns samples into a summary.

use serde::{Deserialize, Serialize};

/// A percentile is given only where at least this many samples lie beyond it: p5 and p95 from
/// 100 samples on, p99 from 500 on. Below that it says no more than the extreme does.
const BEYOND_PERCENTILE: f64 = 5.0;

/// Probability that the interval of the median may miss it.
const MISS: f64 = 0.05;

/// Modified z-score beyond which a sample is marked (Iglewicz & Hoaglin 1993, p. 12).
const OUTLIER_SCORE: f64 = 3.5;

/// 0.75 quantile of the normal distribution: makes MAD / 0.6745 estimate its standard deviation.
const MAD_TO_SIGMA: f64 = 0.6745;

/// sqrt(pi / 2): makes 1.2533 x mean absolute deviation estimate a normal standard deviation.
const MEAN_AD_TO_SIGMA: f64 = 1.253_314;

/// A distribution of times in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub n: u64,
    pub min: f64,
    /// From 100 samples on.
    pub p5: Option<f64>,
    pub median: f64,
    pub mean: f64,
    /// From 100 samples on.
    pub p95: Option<f64>,
    /// From 500 samples on.
    pub p99: Option<f64>,
    pub max: f64,
    /// Of a sample (divisor n - 1), from 2 samples on.
    pub stddev: Option<f64>,
    /// 95 % interval of the median by order statistics; none below 6 samples.
    pub ci95: Option<[f64; 2]>,
    /// Samples with a modified z-score above 3.5: marked, never dropped.
    pub outliers: u64,
}

/// Summarises the finite samples (in microseconds), or `None` where there are none.
///
/// A sample that is infinite or not a number was not measured: it counts nowhere, not even in `n`.
/// Percentiles interpolate linearly between order statistics (definition 7 of Hyndman & Fan,
/// "Sample quantiles in statistical packages", The American Statistician 50, 1996).
pub fn summarise(samples_us: &[f64]) -> Option<Summary> {
    let sorted = sorted_finite(samples_us);
    let (&min, &max) = (sorted.first()?, sorted.last()?);
    let n = sorted.len();
    let (mean, stddev) = mean_and_stddev(&sorted);
    let meaningful = |q: f64| (n as f64 * q.min(1.0 - q) > BEYOND_PERCENTILE - 1e-9).then(|| quantile(&sorted, q));
    Some(Summary {
        n: n as u64,
        min,
        p5: meaningful(0.05),
        median: quantile(&sorted, 0.5),
        mean,
        p95: meaningful(0.95),
        p99: meaningful(0.99),
        max,
        stddev,
        ci95: median_ranks(n).map(|(low, high)| [sorted[low - 1], sorted[high - 1]]),
        outliers: outliers_of(samples_us, &sorted).len() as u64,
    })
}

/// Positions of the samples whose modified z-score exceeds 3.5.
///
/// The score is 0.6745 (x - median) / MAD. Where more than half of the samples are equal, MAD is 0
/// and the score is (x - median) / (1.2533 x mean absolute deviation from the median). Iglewicz &
/// Hoaglin, "How to detect and handle outliers", ASQC Quality Press, 1993.
pub fn outliers(samples_us: &[f64]) -> Vec<usize> {
    outliers_of(samples_us, &sorted_finite(samples_us))
}

fn outliers_of(samples: &[f64], sorted: &[f64]) -> Vec<usize> {
    if sorted.is_empty() {
        return Vec::new();
    }
    let median = quantile(sorted, 0.5);
    let deviations: Vec<f64> = sorted.iter().map(|x| (x - median).abs()).collect();
    let mean_deviation = mean_and_stddev(&deviations).0;
    let mad = quantile(&sorted_finite(&deviations), 0.5);
    let sigma = if mad > 0.0 { mad / MAD_TO_SIGMA } else { MEAN_AD_TO_SIGMA * mean_deviation };
    // All equal: sigma is 0 and no deviation exceeds it.
    (0..samples.len())
        .filter(|&i| samples[i].is_finite() && (samples[i] - median).abs() > OUTLIER_SCORE * sigma)
        .collect()
}

fn sorted_finite(samples: &[f64]) -> Vec<f64> {
    let mut sorted: Vec<f64> = samples.iter().copied().filter(|x| x.is_finite()).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted
}

/// `sorted` is not empty; `q` is in 0..=1.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let position = (sorted.len() - 1) as f64 * q;
    let below = position.floor() as usize;
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (sorted[above] - sorted[below]) * (position - below as f64)
}

/// Mean and sample standard deviation in one pass without cancellation (Welford, "Note on a method
/// for calculating corrected sums of squares and products", Technometrics 4, 1962).
fn mean_and_stddev(samples: &[f64]) -> (f64, Option<f64>) {
    let (mut mean, mut squares) = (0.0, 0.0);
    for (i, x) in samples.iter().enumerate() {
        let off = x - mean;
        mean += off / (i + 1) as f64;
        squares += off * (x - mean);
    }
    let variance = squares / (samples.len().saturating_sub(1)) as f64;
    (mean, (samples.len() >= 2 && variance.is_finite()).then(|| variance.sqrt()))
}

/// Ranks (from 1) of the narrowest symmetric pair of order statistics that holds the median with
/// at least 95 %, or `None` below 6 samples, where even the extremes do not.
///
/// The pair (k, n + 1 - k) misses the median with probability 2 P(B < k), B binomial (n, 1/2), for
/// any continuous distribution: David & Nagaraja, "Order Statistics", 3rd ed., section 7.1;
/// Le Boudec, "Performance Evaluation of Computer and Communication Systems", theorem 2.1.
fn median_ranks(n: usize) -> Option<(usize, usize)> {
    // Weights C(n, i) for i up to n/2, relative to the central one: no overflow for any n, and the
    // far tail underflows to 0, which is its value in f64 anyway.
    let centre = n / 2;
    let mut weights = vec![1.0; centre + 1];
    for i in (0..centre).rev() {
        weights[i] = weights[i + 1] * (i + 1) as f64 / (n - i) as f64;
    }
    let half: f64 = weights.iter().sum();
    // The upper half mirrors the lower one; an even n has its central weight once.
    let total = 2.0 * half - if n.is_multiple_of(2) { 1.0 } else { 0.0 };
    let mut below = 0.0;
    let mut k = 0;
    for weight in weights {
        below += weight;
        if 2.0 * below > MISS * total {
            break;
        }
        k += 1;
    }
    (k > 0).then(|| (k, n + 1 - k))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// SplitMix64 (Steele, Lea, Flood 2014): seeded, so that the simulation is the same each time.
    struct Uniform(u64);

    impl Uniform {
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
        }
    }

    fn check(samples: &[f64]) -> Summary {
        summarise(samples).unwrap()
    }

    /// Exact probability that the pair (k, n + 1 - k) holds the median.
    fn confidence(n: u32, k: usize) -> f64 {
        let mut choose: u128 = 1;
        let mut below: u128 = 0;
        for i in 0..k as u32 {
            below += choose;
            choose = choose * u128::from(n - i) / u128::from(i + 1);
        }
        1.0 - 2.0 * below as f64 / 2f64.powi(n as i32)
    }

    #[test]
    fn known_values_come_out() {
        let s = check(&[4.0, 2.0, 5.0, 4.0, 7.0, 9.0, 4.0, 5.0]);
        assert_eq!((s.n, s.min, s.median, s.mean, s.max), (8, 2.0, 4.5, 5.0, 9.0));
        assert!((s.stddev.unwrap() - (32.0f64 / 7.0).sqrt()).abs() < 1e-12);
        assert_eq!(s.ci95, Some([2.0, 9.0]));
        assert_eq!((s.p5, s.p95, s.p99), (None, None, None));
    }

    #[test]
    fn one_sample_has_no_spread() {
        let s = check(&[3.25]);
        assert_eq!((s.n, s.min, s.median, s.mean, s.max), (1, 3.25, 3.25, 3.25, 3.25));
        assert_eq!((s.stddev, s.ci95, s.p5, s.outliers), (None, None, None, 0));
    }

    #[test]
    fn nothing_measured_is_nothing() {
        assert_eq!(summarise(&[]), None);
        assert_eq!(summarise(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]), None);
    }

    #[test]
    fn samples_that_are_no_numbers_change_nothing_else() {
        let clean = check(&[1.0, 2.0, 3.0, 50.0]);
        assert_eq!(check(&[f64::NAN, 1.0, 2.0, f64::INFINITY, 3.0, 50.0]), clean);
        assert_eq!(outliers(&[f64::NAN, 1.0, 2.0, f64::INFINITY, 3.0, 50.0]), [5]);
    }

    #[test]
    fn constant_samples_have_no_width_and_no_outliers() {
        let s = check(&[0.1; 600]);
        assert_eq!((s.min, s.median, s.mean, s.max), (0.1, 0.1, 0.1, 0.1));
        assert_eq!((s.p5, s.p95, s.p99), (Some(0.1), Some(0.1), Some(0.1)));
        assert_eq!((s.stddev, s.ci95, s.outliers), (Some(0.0), Some([0.1, 0.1]), 0));
    }

    #[test]
    fn percentiles_begin_where_five_samples_lie_beyond() {
        let at = |n: u32| check(&(0..n).map(f64::from).collect::<Vec<_>>());
        assert_eq!((at(99).p5, at(99).p95), (None, None));
        assert_eq!(at(100).p5.map(|x| (x * 1e6).round()), Some(4_950_000.0));
        assert_eq!(at(101).p95, Some(95.0));
        assert_eq!(at(499).p99, None);
        assert_eq!(at(501).p99, Some(495.0));
        assert!(at(500).p99.is_some());
    }

    #[test]
    fn the_interval_takes_the_ranks_of_the_tables() {
        // Symmetric rows of the sign-test tables, such as Le Boudec, appendix A.
        for (n, ranks) in [(6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (30, (10, 21)), (70, (27, 44))] {
            assert_eq!(median_ranks(n), Some(ranks), "n = {n}");
        }
        for n in 0..6 {
            assert_eq!(median_ranks(n), None, "n = {n}");
        }
    }

    #[test]
    fn the_interval_is_the_narrowest_that_holds_95_percent() {
        for n in 6..=100 {
            let (k, high) = median_ranks(n).unwrap();
            assert_eq!(k + high, n + 1);
            assert!(confidence(n as u32, k) >= 0.95, "n = {n}");
            assert!(confidence(n as u32, k + 1) < 0.95, "n = {n}");
        }
    }

    #[test]
    fn many_samples_neither_overflow_nor_underflow() {
        // Normal approximation: k = n/2 - 0.98 sqrt(n), within one rank.
        let (k, _) = median_ranks(1_000_000).unwrap();
        assert!((499_019..=499_021).contains(&k), "{k}");
    }

    #[test]
    fn the_interval_covers_the_true_median_as_often_as_it_says() {
        const TRIALS: u32 = 4000;
        let mut uniform = Uniform(20_250_101);
        for n in [6usize, 10, 25, 60] {
            let mut covered = 0;
            for _ in 0..TRIALS {
                // Exponential: skewed, as times are. Its median is ln 2.
                let samples: Vec<f64> = (0..n).map(|_| -(1.0 - uniform.next()).ln()).collect();
                let [low, high] = check(&samples).ci95.unwrap();
                covered += u32::from(low <= std::f64::consts::LN_2 && std::f64::consts::LN_2 <= high);
            }
            let exact = confidence(n as u32, median_ranks(n).unwrap().0);
            let (seen, sigma) = (f64::from(covered) / f64::from(TRIALS), (exact * (1.0 - exact) / 4000.0).sqrt());
            assert!((seen - exact).abs() < 4.0 * sigma, "n = {n}: {seen} for {exact}");
        }
    }

    #[test]
    fn outliers_are_counted_and_kept() {
        let samples = [10.0, 10.1, 9.9, 10.2, 9.8, 30.0];
        assert_eq!(outliers(&samples), [5]);
        assert_eq!((check(&samples).outliers, check(&samples).max), (1, 30.0));
        // 0.6745 x 5.2 / 1 = 3.507 and 0.6745 x 5.1 / 1 = 3.44.
        assert_eq!(outliers(&[-1.0, 0.0, 0.0, 1.0, -1.0, 1.0, 5.2]), [6]);
        assert_eq!(outliers(&[-1.0, 0.0, 0.0, 1.0, -1.0, 1.0, 5.1]), [0usize; 0]);
    }

    #[test]
    fn one_odd_sample_among_equals_is_an_outlier() {
        let mut samples = vec![7.0; 9];
        samples.push(7.5);
        assert_eq!(outliers(&samples), [9]);
        // A third of them is not odd: (1 - 0) / (1.2533 / 3) = 2.4.
        assert_eq!(outliers(&[0.0, 0.0, 0.0, 0.0, 1.0, 1.0]), [0usize; 0]);
    }

    proptest! {
        #[test]
        fn every_figure_is_finite_and_in_order(samples in prop::collection::vec(any::<f64>(), 0..40)) {
            let samples: Vec<f64> = samples.into_iter().filter(|x| !x.is_finite() || x.abs() < 1e100).collect();
            if let Some(s) = summarise(&samples) {
                let figures = [Some(s.min), s.p5, Some(s.median), Some(s.mean), s.p95, s.p99, Some(s.max), s.stddev];
                prop_assert!(figures.iter().flatten().all(|x| x.is_finite()));
                prop_assert!(s.min <= s.median && s.median <= s.max);
                if let Some([low, high]) = s.ci95 {
                    prop_assert!(s.min <= low && low <= s.median && s.median <= high && high <= s.max);
                }
            }
        }
    }
}

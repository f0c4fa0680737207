//! Writes a number for a person: the one formatter of every figure in text.

/// Significant digits of a figure: a measurement of memory repeats to about a percent.
const DIGITS: usize = 3;

/// Three significant digits, never in scientific notation, "n/a" where nothing was measured.
/// Only zero itself prints as "0".
pub fn figure(value: impl Into<Option<f64>>) -> String {
    value.into().map_or_else(|| "n/a".to_owned(), |x| significant(x, DIGITS))
}

/// Two figures with as many digits (at least three) as it takes to tell them apart.
pub fn distinct(a: f64, b: f64) -> (String, String) {
    // 17 digits tell any two f64 apart.
    (DIGITS..=17)
        .map(|digits| (significant(a, digits), significant(b, digits)))
        .find(|(a, b)| a != b)
        .unwrap_or_else(|| (figure(a), figure(b)))
}

fn significant(x: f64, digits: usize) -> String {
    if !x.is_finite() {
        return "n/a".to_owned();
    }
    if x == 0.0 {
        return "0".to_owned();
    }
    // Rounding may carry into a new digit (9.996 to 10.0), so the exponent is read after it.
    let text = format!("{:.*e}", digits - 1, x.abs());
    let (mantissa, exponent) = text.split_once('e').expect("scientific notation has an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is a number");
    let mantissa: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    let sign = if x < 0.0 { "-" } else { "" };
    let whole_digits = exponent + 1;
    if whole_digits <= 0 {
        format!("{sign}0.{}{mantissa}", "0".repeat(whole_digits.unsigned_abs() as usize))
    } else if whole_digits as usize >= digits {
        format!("{sign}{mantissa}{}", "0".repeat(whole_digits as usize - digits))
    } else {
        let (whole, fraction) = mantissa.split_at(whole_digits as usize);
        format!("{sign}{whole}.{fraction}")
    }
}

/// "1 transfer", "2 transfers".
pub fn counted(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn figures_have_three_significant_digits() {
        for (x, text) in [
            (0.0, "0"),
            (-0.0, "0"),
            (1.0, "1.00"),
            (18.94, "18.9"),
            (9.994, "9.99"),
            (9.996, "10.0"),
            (99.96, "100"),
            (999.6, "1000"),
            (2095.0, "2100"),
            (123_456_789.0, "123000000"),
            (0.012_345, "0.0123"),
            (0.099_96, "0.100"),
            (0.000_000_4, "0.000000400"),
            (-18.94, "-18.9"),
            (f64::NAN, "n/a"),
            (f64::INFINITY, "n/a"),
        ] {
            assert_eq!(figure(x), text, "{x}");
        }
        assert_eq!(figure(None), "n/a");
    }

    #[test]
    fn values_that_differ_are_printed_so() {
        assert_eq!(distinct(299.987, 300.0), ("299.99".to_owned(), "300.00".to_owned()));
        assert_eq!(distinct(12.3, 300.0), ("12.3".to_owned(), "300".to_owned()));
        assert_eq!(distinct(5.0, 5.0), ("5.00".to_owned(), "5.00".to_owned()));
    }

    proptest! {
        #[test]
        fn a_figure_is_within_half_a_percent_of_its_value(x in prop::num::f64::NORMAL) {
            let text = figure(x);
            prop_assert!(!text.contains(['e', 'E']), "{text}");
            let back: f64 = text.parse().unwrap();
            // Close to the largest f64 the rounded figure may leave the range.
            prop_assert!(back.is_infinite() || ((back - x) / x).abs() <= 0.005_001, "{x} became {text}");
        }
    }
}

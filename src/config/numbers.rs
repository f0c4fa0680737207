//! Reads lists of whole numbers: sets with ranges, and square tables.

use super::value::{NONE, count, join, quote};

/// More compute units than an XCC has (TransferBench's mask has room for 64).
const CUS_MAX: u32 = 64;
/// More XCCs than a device has: the hardware's number of one has 4 bits.
const XCCS_MAX: u32 = 16;

/// Numbers and ranges, `5, 10-12`: ascending, none twice; `none` is the empty set.
pub fn set(text: &str) -> Result<Vec<u32>, String> {
    if text.trim() == NONE {
        return Ok(Vec::new());
    }
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (count(first, 0..=CUS_MAX - 1)?, count(last, 0..=CUS_MAX - 1)?);
        if last < first {
            return Err(format!("the range {} runs backwards", quote(part.trim())));
        }
        numbers.extend(first..=last);
    }
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers)
}

/// What `set` reads back: two numbers in a row stay two, more become a range.
pub fn print_set(numbers: &[u32]) -> String {
    if numbers.is_empty() {
        return NONE.to_owned();
    }
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).flat_map(|run| match run {
        [first, _, .., last] => vec![format!("{first}-{last}")],
        few => few.iter().map(u32::to_string).collect(),
    });
    runs.collect::<Vec<_>>().join(", ")
}

/// A square table, row by row; `none` is the empty one.
pub fn table(text: &str) -> Result<Vec<u32>, String> {
    if text.trim() == NONE {
        return Ok(Vec::new());
    }
    let numbers = text.split(',').map(|part| count(part, 0..=XCCS_MAX - 1)).collect::<Result<Vec<u32>, _>>()?;
    if numbers.len().isqrt().pow(2) != numbers.len() {
        return Err(format!("{} numbers are no square table of devices", numbers.len()));
    }
    Ok(numbers)
}

pub fn print_table(numbers: &[u32]) -> String {
    if numbers.is_empty() { NONE.to_owned() } else { join(numbers) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_read_as_transferbench_writes_them() {
        assert_eq!(set("5,10-12"), Ok(vec![5, 10, 11, 12]));
        assert_eq!(set(" 3 , 1-2, 2 "), Ok(vec![1, 2, 3]));
        assert_eq!(set("0-63").map(|all| all.len()), Ok(64));
        for bad in ["", "64", "-1", "3-", "4-2", "a", "1,,2", "1-2-3", "0-64"] {
            assert!(set(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn printing_a_set_is_read_back() {
        for (text, printed) in [("none", "none"), ("1,2,5", "1, 2, 5"), ("5,10-12", "5, 10-12"), ("0,1,2,3", "0-3")] {
            let numbers = set(text).unwrap();
            assert_eq!(print_set(&numbers), printed);
            assert_eq!(set(printed), Ok(numbers));
        }
    }

    #[test]
    fn tables_are_square() {
        assert_eq!(table("0,1,1,0"), Ok(vec![0, 1, 1, 0]));
        assert_eq!(table("15"), Ok(vec![15]));
        for bad in ["", "0,1", "0,1,2", "16", "x"] {
            assert!(table(bad).is_err(), "{bad}");
        }
    }
}

//! Writes transfers between pairs of places as a matrix of rates, with the slow ones marked and named.

use std::collections::{BTreeMap, BTreeSet};

use super::TextStyle;
use super::detail::{marks, not_rotated, rate_interval, rotation, verified};
use super::table::{INDENT, clean, left, right, table};
use crate::place::{ExeKind, MemKind};
use crate::report::figure::figure;
use crate::report::results::{TestResult, TransferResult, Verified};
use crate::stats::summarise;

/// A list of up to this many transfers is read at a glance, and says more.
const LIST_AT_MOST: usize = 6;

/// A transfer below this part of the median rate is marked as slow.
const SLOW: f64 = 0.8;

/// Transfers of one size from one place to one other, each pair at most once.
pub struct Matrix<'a> {
    sources: Vec<&'a str>,
    destinations: Vec<&'a str>,
    cells: BTreeMap<(&'a str, &'a str), &'a TransferResult>,
}

impl<'a> Matrix<'a> {
    /// `None` where a list says it better.
    pub fn of(transfers: &'a [TransferResult]) -> Option<Matrix<'a>> {
        let (mut sources, mut destinations, mut cells) = (Vec::new(), Vec::new(), BTreeMap::new());
        let (mut seen_src, mut seen_dst) = (BTreeSet::new(), BTreeSet::new());
        for transfer in transfers {
            let ([src], [dst]) = (&transfer.src[..], &transfer.dst[..]) else { return None };
            if seen_src.insert(src) {
                sources.push(src.as_str());
            }
            if seen_dst.insert(dst) {
                destinations.push(dst.as_str());
            }
            if cells.insert((src.as_str(), dst.as_str()), transfer).is_some() {
                return None;
            }
        }
        let one_size = transfers.windows(2).all(|pair| pair[0].bytes == pair[1].bytes);
        let wide = transfers.len() > LIST_AT_MOST && sources.len() > 1 && destinations.len() > 1;
        (one_size && wide).then_some(Matrix { sources, destinations, cells })
    }

    /// Who moves the bytes, where one phrase tells.
    pub fn executors(&self) -> String {
        let all = |side: &dyn Fn(&TransferResult) -> &[String]| {
            self.cells.values().all(|transfer| is_at(&transfer.exe, &side(transfer)[0]))
        };
        let names: BTreeSet<&str> = self.cells.values().map(|transfer| transfer.exe.as_str()).collect();
        match names.first() {
            Some(only) if names.len() == 1 => format!("by {only}"),
            _ if all(&|transfer| &transfer.src) => "by SRC (push)".to_owned(),
            _ if all(&|transfer| &transfer.dst) => "by DST (pull)".to_owned(),
            _ => "by several executors".to_owned(),
        }
    }

    pub fn render(&self, test: &TestResult, style: TextStyle) -> String {
        let rates: Vec<f64> = self.cells.values().filter_map(|transfer| transfer.rate_gbps).collect();
        let middle = summarise(&rates).map(|summary| summary.median);
        let slow = |transfer: &TransferResult| middle.zip(transfer.rate_gbps).is_some_and(|(m, rate)| rate < SLOW * m);

        let mut columns = vec![left("SRC \\ DST")];
        columns.extend(self.destinations.iter().map(|dst| right(*dst)));
        let row = |src: &&str| {
            let cell = |dst: &&str| {
                let Some(transfer) = self.cells.get(&(*src, *dst)) else { return String::new() };
                let wrong = if transfer.verified == Verified::Failed { "!" } else { "" };
                let late = if slow(transfer) { "*" } else { "" };
                format!("{}{late}{wrong}", figure(transfer.rate_gbps))
            };
            std::iter::once((*src).to_owned()).chain(self.destinations.iter().map(cell)).collect()
        };
        let rows: Vec<Vec<String>> = self.sources.iter().map(row).collect();
        let mut text = table(&columns, &rows);

        let mut line = |words: String| text += &format!("{INDENT}{}\n", clean(&words));
        if let Some(widest) = self.cells.values().filter_map(|transfer| half_width(transfer)).reduce(f64::max) {
            line(format!("95 % intervals within {}{} %", style.plus_minus(), figure(widest * 100.0)));
        }
        for words in self.rotations(test) {
            line(words);
        }
        for transfer in test.transfers.iter().filter(|transfer| slow(transfer)) {
            let part = transfer.rate_gbps.zip(middle).map(|(rate, middle)| rate / middle);
            let (rate, part, middle) = (figure(transfer.rate_gbps), figure(part), figure(middle));
            line(format!("* slow: {}: {rate} GB/s, {part} of the median {middle}", transfer.notation()));
        }
        self.status(test).into_iter().for_each(line);
        text
    }

    /// The rotation in force, once where all transfers share it.
    fn rotations(&self, test: &TestResult) -> BTreeSet<String> {
        let words = |transfer| {
            let unmet = if not_rotated(test, transfer) { "not rotated: " } else { "" };
            Some(rotation(test, transfer)).filter(|words| !words.is_empty()).map(|words| format!("{unmet}{words}"))
        };
        test.transfers.iter().filter_map(words).collect()
    }

    /// Data and marks, one line for all transfers that share them.
    fn status(&self, test: &TestResult) -> Vec<String> {
        let mut notes: Vec<(String, Vec<String>)> = Vec::new();
        for transfer in &test.transfers {
            let found = Some(verified(test, transfer).to_owned()).filter(|_| transfer.verified != Verified::Passed);
            for note in found.into_iter().chain(marks(transfer)) {
                match notes.iter_mut().find(|(known, _)| *known == note) {
                    Some((_, names)) => names.push(transfer.notation()),
                    None => notes.push((note, vec![transfer.notation()])),
                }
            }
        }
        let all = test.transfers.len();
        let words = |(note, names): (String, Vec<String>)| {
            let sign = if note == "WRONG DATA" { "! " } else { "" };
            if names.len() == all {
                format!("{sign}{note}: all transfers")
            } else {
                format!("{sign}{note}: {}", names.join(", "))
            }
        };
        notes.into_iter().map(words).collect()
    }
}

/// Half the interval of the rate, as a part of it.
fn half_width(transfer: &TransferResult) -> Option<f64> {
    let [low, high] = rate_interval(transfer.bytes, transfer.time_us.as_ref())?;
    Some((high - low) / 2.0 / transfer.rate_gbps?)
}

/// Whether an executor sits with a place: the same NUMA node or device of the same rank.
fn is_at(exe: &str, place: &str) -> bool {
    let (exe, place) = (parts(exe), parts(place));
    let exe = exe.map(|(rank, kind, index)| (rank, ExeKind::from_letter(kind) == Some(ExeKind::Cpu), index));
    let place = place.and_then(|(rank, kind, index)| match MemKind::from_letter(kind)? {
        // Counts devices and lies on a node: with neither.
        MemKind::PinnedNear => None,
        kind => Some((rank, kind.is_host(), index)),
    });
    exe.is_some() && exe == place
}

/// Rank, letter and number of a name such as `R1G0.2`.
fn parts(name: &str) -> Option<(&str, char, &str)> {
    let rest = name.strip_prefix('R')?;
    let (rank, rest) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?);
    let kind = rest.chars().next()?;
    let index = rest.strip_prefix(kind)?;
    Some((rank, kind, index.split('.').next().unwrap_or(index)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executors_are_found_at_their_memory() {
        for (exe, place) in [("R1D0.2", "R1G0"), ("R1G0", "R1F0"), ("R12C0", "R12H0"), ("R1C1", "R1D1")] {
            assert!(is_at(exe, place), "{exe} {place}");
        }
        // `D` is host memory as a place and a copy engine as an executor.
        for (exe, place) in
            [("R1C0", "R1G0"), ("R1C0", "R2C0"), ("R1C0", "R1C1"), ("R1D0", "R1D0"), ("R1G0", "R1P0"), ("?", "?")]
        {
            assert!(!is_at(exe, place), "{exe} {place}");
        }
    }
}

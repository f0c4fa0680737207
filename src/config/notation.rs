//! Reads `SRC -> EXE -> DST`, TransferBench's notation of transfers, and prints it back.
//!
//! ```text
//! transfer = memories "->" executor "->" memories      blanks and parentheses as in TransferBench
//! memories = "N" | memory+                             each memory is one source or destination
//! memory   = ["R" range] letter range
//! executor = "N" | ["R" range] letter [range] ["." range]
//! range    = number | "*" | "[" item ("," item)* "]"   item = number | number ".." number
//! ```

use std::fmt;
use std::ops::Range;

use crate::place::{ExeKind, MemKind};

/// Numbers in one range. Larger sets are written `*`, so more than this is a slip.
pub const RANGE_MAX: usize = 65_536;

/// Sources or destinations of one transfer.
pub const PIECES_MAX: usize = 32;

/// Ranks, devices or NUMA nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Indexes {
    All,
    /// Ascending, none twice, at least one.
    List(Vec<u32>),
}

/// One source or destination; without a rank it is local to every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemPiece {
    pub rank: Option<Indexes>,
    pub kind: MemKind,
    pub index: Indexes,
}

/// An executor; without a rank it is local to every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExePiece {
    pub rank: Option<Indexes>,
    pub kind: ExeKind,
    /// None only for `N` alone (the NICs nearest to both ends) and for MPI.
    pub index: Option<Indexes>,
    pub sub_index: Option<Indexes>,
}

/// A transfer as it was written, before expansion. No sources or no destinations = `N`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notation {
    pub srcs: Vec<MemPiece>,
    pub exe: ExePiece,
    pub dsts: Vec<MemPiece>,
}

/// What is wrong, and where in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotationError {
    pub message: String,
    pub at: Range<usize>,
}

/// Reads a whole transfer.
///
/// # Errors
/// The first thing that is wrong, with its bytes in `text`.
pub fn parse(text: &str) -> Result<Notation, NotationError> {
    let [src, exe, dst] = split(text)?;
    let notation = Notation { srcs: memories(text, src)?, exe: executor(text, exe)?, dsts: memories(text, dst)? };
    if notation.srcs.is_empty() && notation.dsts.is_empty() {
        return error("a transfer needs a source or a destination", 0..text.len());
    }
    Ok(notation)
}

/// Reads sources or destinations: `R0G0`, `G0G1`, `N`.
///
/// # Errors
/// As `parse`.
pub fn parse_memories(text: &str) -> Result<Vec<MemPiece>, NotationError> {
    memories(text, trimmed(text))
}

/// Reads an executor: `R0G0`, `D0.2`, `N`.
///
/// # Errors
/// As `parse`.
pub fn parse_executor(text: &str) -> Result<ExePiece, NotationError> {
    executor(text, trimmed(text))
}

fn error<T>(message: impl Into<String>, at: Range<usize>) -> Result<T, NotationError> {
    Err(NotationError { message: message.into(), at })
}

fn trimmed(text: &str) -> Range<usize> {
    let start = text.len() - text.trim_start().len();
    start..start.max(text.trim_end().len())
}

/// Finds the three parts. Arrows may be left out where blanks (or `:`, as in TransferBench) separate.
fn split(text: &str) -> Result<[Range<usize>; 3], NotationError> {
    let mut inside = trimmed(text);
    match (text[inside.clone()].starts_with('('), text[inside.clone()].ends_with(')')) {
        (true, true) => inside = inside.start + 1..inside.end - 1,
        (true, false) => return error("\"(\" without \")\"", inside.start..inside.start + 1),
        (false, true) => return error("\")\" without \"(\"", inside.end - 1..inside.end),
        (false, false) => {}
    }
    let mut parts: Vec<Range<usize>> = Vec::new();
    let (mut open, mut bracket, mut arrow_before) = (None, None, true);
    let mut at = inside.start;
    while at < inside.end {
        let rest = &text[at..inside.end];
        let c = rest.chars().next().expect("there is text before the end");
        let arrow = bracket.is_none() && rest.starts_with("->");
        let blank = bracket.is_none() && (c.is_whitespace() || c == ':');
        if (arrow || blank)
            && let Some(start) = open.take()
        {
            parts.push(start..at);
            arrow_before = false;
        }
        if arrow {
            if arrow_before {
                return error("nothing before \"->\": write N for no source or no destination", at..at + 2);
            }
            arrow_before = true;
            at += 2;
            continue;
        }
        if !blank {
            open.get_or_insert(at);
            match c {
                '[' => bracket = Some(at),
                ']' => bracket = None,
                _ => {}
            }
        }
        at += c.len_utf8();
    }
    if let Some(at) = bracket {
        return error("\"[\" without \"]\"", at..at + 1);
    }
    if let Some(start) = open {
        parts.push(start..inside.end);
    } else if arrow_before && !parts.is_empty() {
        return error("nothing after \"->\": write N for no source or no destination", 0..text.len());
    }
    let found = parts.len();
    let surplus = parts.get(3).map(|part| part.start..inside.end);
    parts.try_into().or_else(|_| {
        error(format!("a transfer has three parts, SRC -> EXE -> DST; found {found}"), surplus.unwrap_or(0..text.len()))
    })
}

fn memories(text: &str, part: Range<usize>) -> Result<Vec<MemPiece>, NotationError> {
    if text[part.clone()].eq_ignore_ascii_case("n") {
        return Ok(Vec::new());
    }
    if part.is_empty() {
        return error("nothing here: write N for no source or no destination", part);
    }
    let mut scan = Scan { text, at: part.start, end: part.end };
    let mut pieces = Vec::new();
    while scan.at < scan.end {
        if pieces.len() == PIECES_MAX {
            return error(format!("more than {PIECES_MAX} sources or destinations"), scan.at..scan.end);
        }
        let rank = scan.rank()?;
        let (letter, at) = scan.letter("memory", &MemKind::LETTERS.map(|(letter, _)| letter))?;
        let Some(kind) = MemKind::from_letter(letter) else {
            return error("N means none and stands alone, without rank or index", at);
        };
        let index = scan.range(&format!("number of {letter}"))?;
        pieces.push(MemPiece { rank, kind, index });
    }
    Ok(pieces)
}

fn executor(text: &str, part: Range<usize>) -> Result<ExePiece, NotationError> {
    if part.is_empty() {
        return error("no executor: write one such as G0", part);
    }
    let mut scan = Scan { text, at: part.start, end: part.end };
    let rank = scan.rank()?;
    let (letter, at) = scan.letter("executor", &ExeKind::LETTERS.map(|(letter, _)| letter))?;
    let kind = ExeKind::from_letter(letter).expect("only letters of executors were asked for");
    let alone = scan.at == scan.end || scan.peek() == Some('.');
    let index = match kind {
        ExeKind::NicNear if scan.at == scan.end && rank.is_none() => None,
        ExeKind::Mpi if alone => None,
        _ => Some(scan.range(&format!("number of {letter}"))?),
    };
    let sub_index = match scan.peek() {
        Some('.') => {
            scan.at += 1;
            Some(scan.range("sub-index after \".\"")?)
        }
        _ => None,
    };
    if kind == ExeKind::Nic && sub_index.is_none() {
        return error("a NIC needs the number of the NIC on the other side, such as I0.1", at.start..scan.at);
    }
    if scan.at < scan.end {
        let what = match kind {
            ExeKind::NicNear => "the 2nd nearest NIC and so on (a letter after the number) cannot be chosen",
            _ => "an executor ends here: there is one for each transfer",
        };
        return error(what, scan.at..scan.end);
    }
    Ok(ExePiece { rank, kind, index, sub_index })
}

/// A place in one part of the text.
struct Scan<'a> {
    text: &'a str,
    at: usize,
    end: usize,
}

impl Scan<'_> {
    fn peek(&self) -> Option<char> {
        self.text[self.at..self.end].chars().next()
    }

    /// The bytes of the next character, or the end of the part.
    fn here(&self) -> Range<usize> {
        self.at..self.at + self.peek().map_or(0, char::len_utf8)
    }

    fn eat(&mut self, expected: char) -> bool {
        let found = self.peek() == Some(expected);
        if found {
            self.at += expected.len_utf8();
        }
        found
    }

    fn blanks(&mut self) {
        while self.eat(' ') {}
    }

    fn rank(&mut self) -> Result<Option<Indexes>, NotationError> {
        if !self.eat('R') && !self.eat('r') {
            return Ok(None);
        }
        self.range("rank after \"R\"").map(Some)
    }

    /// A letter of `known`, or `N`, in upper case.
    fn letter(&mut self, what: &str, known: &[char]) -> Result<(char, Range<usize>), NotationError> {
        let at = self.here();
        match self.peek().map(|c| c.to_ascii_uppercase()) {
            Some(c) if known.contains(&c) || c == 'N' => {
                self.at = at.end;
                Ok((c, at))
            }
            _ => {
                let known: Vec<String> = known.iter().map(char::to_string).collect();
                error(format!("expected a letter of {what} ({})", known.join(" ")), at)
            }
        }
    }

    fn range(&mut self, what: &str) -> Result<Indexes, NotationError> {
        if self.eat('*') {
            return Ok(Indexes::All);
        }
        let open = self.here();
        if !self.eat('[') {
            return self.number(what).map(|n| Indexes::List(vec![n]));
        }
        let mut list = Vec::new();
        loop {
            self.blanks();
            let start = self.at;
            let first = self.number("number in the range")?;
            let last = if self.text[self.at..self.end].starts_with("..") {
                self.at += 2;
                self.number("number after \"..\"")?
            } else {
                first
            };
            if last < first {
                return error(format!("the range {first}..{last} runs backwards"), start..self.at);
            }
            if (last - first) as usize >= RANGE_MAX - list.len() {
                return error(format!("more than {RANGE_MAX} numbers in a range"), start..self.at);
            }
            list.extend(first..=last);
            self.blanks();
            if self.eat(']') {
                break;
            }
            if self.at == self.end {
                return error("\"[\" without \"]\"", open);
            }
            if !self.eat(',') {
                return error("expected \",\", \"..\" or \"]\" in a range such as [0,2,4..7]", self.here());
            }
        }
        list.sort_unstable();
        list.dedup();
        Ok(Indexes::List(list))
    }

    fn number(&mut self, what: &str) -> Result<u32, NotationError> {
        let rest = &self.text[self.at..self.end];
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        if digits == 0 {
            return error(format!("expected the {what}"), self.here());
        }
        let at = self.at..self.at + digits;
        self.at = at.end;
        rest[..digits].parse().or_else(|_| error(format!("the {what} does not fit in 32 bits"), at))
    }
}

impl fmt::Display for Indexes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = match self {
            Indexes::All => return f.write_str("*"),
            Indexes::List(list) => list,
        };
        if let [one] = list[..] {
            return write!(f, "{one}");
        }
        let runs: Vec<String> = list
            .chunk_by(|a, b| a.checked_add(1) == Some(*b))
            .flat_map(|run| match run {
                [first, _, .., last] => vec![format!("{first}..{last}")],
                few => few.iter().map(u32::to_string).collect(),
            })
            .collect();
        write!(f, "[{}]", runs.join(","))
    }
}

fn write_rank(f: &mut fmt::Formatter<'_>, rank: &Option<Indexes>) -> fmt::Result {
    rank.as_ref().map_or(Ok(()), |rank| write!(f, "R{rank}"))
}

impl fmt::Display for MemPiece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_rank(f, &self.rank)?;
        write!(f, "{}{}", self.kind.letter(), self.index)
    }
}

impl fmt::Display for ExePiece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_rank(f, &self.rank)?;
        write!(f, "{}", self.kind.letter())?;
        if let Some(index) = &self.index {
            write!(f, "{index}")?;
        }
        if let Some(sub_index) = &self.sub_index {
            write!(f, ".{sub_index}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Notation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{} -> {} -> {}", side(&self.srcs), self.exe, side(&self.dsts)))
    }
}

fn side(pieces: &[MemPiece]) -> String {
    match pieces {
        [] => "N".to_owned(),
        some => some.iter().map(MemPiece::to_string).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(text: &str) -> String {
        match parse(text) {
            Ok(notation) => notation.to_string(),
            Err(NotationError { message, at }) => format!("{:?}: {message}", &text[at]),
        }
    }

    #[test]
    fn transferbench_spellings_mean_the_same() {
        let expected = "R0G0 -> R0G0 -> R1G0";
        for text in [
            "R0G0 -> R0G0 -> R1G0",
            "r0g0->r0g0->r1g0",
            "(R0G0->R0G0->R1G0)",
            "( R0G0 R0G0 R1G0 )",
            "R0G0:R0G0:R1G0",
            "  R0G0\tR0G0 -> R1G0 ",
            "R[0]G[0,0] -> R0G0 -> R1G[ 0 ]",
        ] {
            assert_eq!(check(text), expected, "{text}");
        }
    }

    #[test]
    fn every_part_of_the_notation_is_read() {
        for text in [
            "N -> G0 -> G0",
            "G0 -> G0 -> N",
            "G0G1 -> C0 -> R1C0C1",
            "R*G* -> R*G* -> R[0,2,4..7]G[0..2]",
            "G0 -> D0.2 -> G1",
            "G0 -> I0.1 -> G1",
            "G0 -> N -> G1",
            "R2G4 -> N4.5 -> R4G5",
            "C0 -> M -> R1C0",
            "C0 -> R1M -> R1C0",
            "C0P1B0D0K0H0G0F0U0M0 -> B0 -> G0",
            "G0 -> T3 -> G0",
        ] {
            assert_eq!(check(text), text);
        }
        assert_eq!(check("G0 -> g[2,1,0,4] -> n"), "G0 -> G[0..2,4] -> N");
    }

    #[test]
    fn errors_name_the_spot() {
        let bad = [
            "",
            "G0",
            "G0 -> G0",
            "G0 -> G0 -> G0 -> G0",
            "-> G0 -> G0",
            "G0 -> -> G0",
            "G0 -> G0 ->",
            "(G0 G0 G0",
            "G0 G0 G0)",
            "N -> G0 -> N",
            "X0 -> G0 -> G0",
            "G -> G0 -> G0",
            "R0 -> G0 -> G0",
            "RG0 -> G0 -> G0",
            "G0N -> G0 -> G0",
            "N0 -> G0 -> G0",
            "G0 -> X0 -> G0",
            "G0 -> G -> G0",
            "G0 -> G0G1 -> G0",
            "G0 -> G0. -> G0",
            "G0 -> I0 -> G0",
            "G0 -> R0N -> G0",
            "G0 -> N0A -> G0",
            "G[] -> G0 -> G0",
            "G[3..1] -> G0 -> G0",
            "G[0;1] -> G0 -> G0",
            "G[0 -> G0 -> G0",
            "G[*] -> G0 -> G0",
            "G4294967296 -> G0 -> G0",
            "G[0..4000000000] -> G0 -> G0",
            "Gé -> G0 -> G0",
            "G0 → G0 → G0",
            "G0-G0-G0",
        ];
        let report: Vec<String> = bad.iter().map(|text| format!("{text:<33} {}", check(text))).collect();
        insta::assert_snapshot!(report.join("\n"), @r##"
                                  "": a transfer has three parts, SRC -> EXE -> DST; found 0
G0                                "G0": a transfer has three parts, SRC -> EXE -> DST; found 1
G0 -> G0                          "G0 -> G0": a transfer has three parts, SRC -> EXE -> DST; found 2
G0 -> G0 -> G0 -> G0              "G0": a transfer has three parts, SRC -> EXE -> DST; found 4
-> G0 -> G0                       "->": nothing before "->": write N for no source or no destination
G0 -> -> G0                       "->": nothing before "->": write N for no source or no destination
G0 -> G0 ->                       "G0 -> G0 ->": nothing after "->": write N for no source or no destination
(G0 G0 G0                         "(": "(" without ")"
G0 G0 G0)                         ")": ")" without "("
N -> G0 -> N                      "N -> G0 -> N": a transfer needs a source or a destination
X0 -> G0 -> G0                    "X": expected a letter of memory (C P B D K H G F U M)
G -> G0 -> G0                     "": expected the number of G
R0 -> G0 -> G0                    "": expected a letter of memory (C P B D K H G F U M)
RG0 -> G0 -> G0                   "G": expected the rank after "R"
G0N -> G0 -> G0                   "N": N means none and stands alone, without rank or index
N0 -> G0 -> G0                    "N": N means none and stands alone, without rank or index
G0 -> X0 -> G0                    "X": expected a letter of executor (C G D B T M I N)
G0 -> G -> G0                     "": expected the number of G
G0 -> G0G1 -> G0                  "G1": an executor ends here: there is one for each transfer
G0 -> G0. -> G0                   "": expected the sub-index after "."
G0 -> I0 -> G0                    "I0": a NIC needs the number of the NIC on the other side, such as I0.1
G0 -> R0N -> G0                   "": expected the number of N
G0 -> N0A -> G0                   "A": the 2nd nearest NIC and so on (a letter after the number) cannot be chosen
G[] -> G0 -> G0                   "]": expected the number in the range
G[3..1] -> G0 -> G0               "3..1": the range 3..1 runs backwards
G[0;1] -> G0 -> G0                ";": expected ",", ".." or "]" in a range such as [0,2,4..7]
G[0 -> G0 -> G0                   "[": "[" without "]"
G[*] -> G0 -> G0                  "*": expected the number in the range
G4294967296 -> G0 -> G0           "4294967296": the number of G does not fit in 32 bits
G[0..4000000000] -> G0 -> G0      "0..4000000000": more than 65536 numbers in a range
Gé -> G0 -> G0                    "é": expected the number of G
G0 → G0 → G0                      "→ G0": a transfer has three parts, SRC -> EXE -> DST; found 5
G0-G0-G0                          "G0-G0-G0": a transfer has three parts, SRC -> EXE -> DST; found 1
"##);
    }

    #[test]
    fn ranges_and_pieces_are_bounded_on_both_sides() {
        assert!(parse("G[0..65535] -> G0 -> G0").is_ok());
        assert!(parse("G[0..65536] -> G0 -> G0").is_err());
        assert!(parse("G[0..65534,7,7] -> G0 -> G0").is_err());
        assert!(parse(&format!("{} -> G0 -> G0", "G0".repeat(PIECES_MAX))).is_ok());
        assert!(parse(&format!("{} -> G0 -> G0", "G0".repeat(PIECES_MAX + 1))).is_err());
    }

    fn indexes() -> impl Strategy<Value = Indexes> {
        let list = proptest::collection::btree_set(prop_oneof![0u32..12, any::<u32>()], 1..8);
        prop_oneof![Just(Indexes::All), list.prop_map(|set| Indexes::List(set.into_iter().collect()))]
    }

    fn memories_of(min: usize) -> impl Strategy<Value = Vec<MemPiece>> {
        let kind = (0..MemKind::LETTERS.len()).prop_map(|i| MemKind::LETTERS[i].1);
        let piece = (proptest::option::of(indexes()), kind, indexes());
        proptest::collection::vec(piece.prop_map(|(rank, kind, index)| MemPiece { rank, kind, index }), min..4)
    }

    fn executors() -> impl Strategy<Value = ExePiece> {
        let kind = (0..ExeKind::LETTERS.len()).prop_map(|i| ExeKind::LETTERS[i].1);
        (proptest::option::of(indexes()), kind, indexes(), indexes(), any::<(bool, bool)>()).prop_map(
            |(rank, kind, index, sub, (bare, with_sub))| match kind {
                ExeKind::NicNear if bare => ExePiece { rank: None, kind, index: None, sub_index: None },
                ExeKind::Mpi if bare => ExePiece { rank, kind, index: None, sub_index: None },
                _ => {
                    let sub_index = (with_sub || kind == ExeKind::Nic).then_some(sub);
                    ExePiece { rank, kind, index: Some(index), sub_index }
                }
            },
        )
    }

    proptest! {
        #[test]
        fn printing_then_reading_is_the_identity(srcs in memories_of(0), exe in executors(), dsts in memories_of(1)) {
            let notation = Notation { srcs, exe, dsts };
            prop_assert_eq!(parse(&notation.to_string()), Ok(notation));
        }

        #[test]
        fn any_text_is_read_or_refused_inside_itself(text in any::<String>()) {
            if let Err(NotationError { at, .. }) = parse(&text) {
                prop_assert!(text.get(at).is_some());
            }
        }

        #[test]
        fn near_misses_are_read_or_refused_inside_themselves(text in "[RrGgCNnDMI0-9\\[\\],.* >:()é-]{0,40}") {
            if let Err(NotationError { at, .. }) = parse(&text) {
                prop_assert!(text.get(at).is_some());
            }
        }
    }
}

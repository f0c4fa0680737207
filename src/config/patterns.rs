//! The patterns that a test can ask for in place of transfers: their names, keys and defaults.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use super::notation;
use super::options::Kind;
use super::read::{Reader, hint, toml_text, type_name};
use super::value::quote;

/// A pattern; what it stands for is spelt out in `plan::patterns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    Rotation,
}

/// What the config has to know of a pattern.
pub struct PatternSpec {
    pub pattern: Pattern,
    pub name: &'static str,
    pub help: &'static str,
    /// Settings that it brings along, dotted key and value, each in force where nobody sets it.
    pub defaults: &'static [(&'static str, &'static str)],
    pub keys: &'static [PatternKey],
}

/// A key that a test with the pattern may have.
pub struct PatternKey {
    pub key: &'static str,
    pub kind: Kind,
    pub help: &'static str,
    /// # Errors
    /// What is wrong with the value, without the key.
    pub check: fn(&str) -> Result<(), String>,
}

/// Every pattern there is.
pub static PATTERNS: &[PatternSpec] = &[PatternSpec {
    pattern: Pattern::Rotation,
    name: "rotation",
    help: "what a fixed source hides: sizes, pulled and pushed, rotation off and on, cold and warm",
    defaults: &[
        ("data.bytes", "8 MiB, 16 MiB, 32 MiB, 64 MiB, 128 MiB, 256 MiB, 512 MiB"),
        ("data.src_rotate_bytes", "0 B, auto"),
        ("run.iterations", "3"),
        ("run.cold_iterations", "3"),
    ],
    keys: &[
        PatternKey {
            key: "executor",
            kind: Kind::Choice(EXECUTORS),
            help: "who moves the data at either end; auto = G by a device, else C",
            check: |text| if EXECUTORS.contains(&text) { Ok(()) } else { Err(not_one_of(text, EXECUTORS)) },
        },
        PatternKey {
            key: "src",
            kind: Kind::Place,
            help: "the memory that is read, such as R0G0; with dst, in place of the first two there are",
            check: one_place,
        },
        PatternKey { key: "dst", kind: Kind::Place, help: "the memory that is written", check: one_place },
    ],
}];

const EXECUTORS: &[&str] = &["auto", "C", "G", "D", "B", "T"];

fn not_one_of(text: &str, words: &[&str]) -> String {
    format!("{} is not one of {}", quote(text), words.join(", "))
}

/// One memory of one rank, each number a single one.
fn one_place(text: &str) -> Result<(), String> {
    let one = |indexes: &notation::Indexes| matches!(indexes, notation::Indexes::List(list) if list.len() == 1);
    match notation::parse_memories(text).map_err(|error| error.message)?.as_slice() {
        [piece] if piece.rank.as_ref().is_some_and(one) && one(&piece.index) => Ok(()),
        _ => Err(format!("{} is not one memory of one rank, such as \"R0G0\"", quote(text))),
    }
}

/// A pattern as a test asks for it.
#[derive(Clone, Debug, PartialEq)]
pub struct PatternConfig {
    pub pattern: Pattern,
    span: Range<usize>,
    /// Key, checked value, and where it stands.
    values: Vec<(&'static str, String, Range<usize>)>,
}

impl PatternConfig {
    pub fn spec(&self) -> &'static PatternSpec {
        PATTERNS.iter().find(|spec| spec.pattern == self.pattern).expect("every pattern has a row")
    }

    /// What the test says under one of the pattern's keys.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.values.iter().find(|(known, ..)| *known == key).map(|(_, value, _)| value.as_str())
    }

    /// Where a problem with a key, or with the pattern as a whole, is shown.
    pub fn span_of(&self, key: Option<&str>) -> Range<usize> {
        let value = self.values.iter().find(|(known, ..)| Some(*known) == key);
        value.map_or_else(|| self.span.clone(), |(.., span)| span.clone())
    }

    /// Takes a key if it is one of the pattern's; whether it is.
    pub(super) fn take(
        &mut self,
        reader: &mut Reader<'_>,
        key: &Spanned<DeString<'_>>,
        value: &Spanned<DeValue<'_>>,
    ) -> bool {
        let Some(known) = self.spec().keys.iter().find(|known| known.key == key.get_ref().as_ref()) else {
            return false;
        };
        let text = toml_text(known.kind, value.get_ref());
        match text.and_then(|text| (known.check)(&text).map(|()| text)) {
            Ok(text) => self.values.push((known.key, text, value.span())),
            Err(why) => reader.problem(value.span(), format!("{}: {why}", known.key)),
        }
        true
    }
}

/// Reads the name under `pattern`; the pattern's keys come later.
pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Option<PatternConfig> {
    let value = table.get("pattern")?;
    let DeValue::String(name) = value.get_ref() else {
        let found = type_name(value.get_ref());
        reader.problem(value.span(), format!("pattern: expected a name, found {found}"));
        return None;
    };
    if let Some(spec) = PATTERNS.iter().find(|spec| spec.name == name.as_ref()) {
        return Some(PatternConfig { pattern: spec.pattern, span: value.span(), values: Vec::new() });
    }
    let known: Vec<&str> = PATTERNS.iter().map(|spec| spec.name).collect();
    reader.problem_with_help(
        value.span(),
        format!("unknown pattern {}", quote(name)),
        format!("{}; or write the transfers as a list: * and ranges stand for many", hint(name, &known, str::to_owned)),
    );
    None
}

/// The pattern that has a key, for a test that has another or none.
pub(super) fn owner_of(key: &str) -> Option<&'static str> {
    PATTERNS.iter().find(|spec| spec.keys.iter().any(|known| known.key == key)).map(|spec| spec.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::{OPTIONS, find};

    #[test]
    fn defaults_are_settings_of_a_test_in_their_canonical_form() {
        for (key, value) in PATTERNS.iter().flat_map(|spec| spec.defaults) {
            let opt = find(key).unwrap();
            assert!(opt.per_test, "{key}");
            assert_eq!(opt.canonical(value).as_deref(), Ok(*value), "{key}");
        }
    }

    #[test]
    fn no_key_of_a_pattern_is_a_setting_too() {
        for spec in PATTERNS {
            for key in spec.keys {
                assert!(OPTIONS.iter().all(|opt| opt.short() != key.key), "{} of {}", key.key, spec.name);
            }
        }
    }

    #[test]
    fn an_end_is_one_memory_of_one_rank() {
        for good in ["R0G0", "R12C1", "r1h0"] {
            assert_eq!(one_place(good), Ok(()), "{good}");
        }
        for bad in ["G0", "R0G*", "R*G0", "R0G[0,1]", "R0G0R0G1", "N", "", "R0X0"] {
            assert!(one_place(bad).is_err(), "{bad}");
        }
    }
}

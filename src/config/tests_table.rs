//! Reads the `[[test]]` tables: transfers, expectations, and settings of one test.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use super::notation::{self, MemPiece, Notation, NotationError};
use super::options::{OPTIONS, Opt, Options, find};
use super::patterns::{self, PatternConfig};
use super::read::{Reader, hint, integer, size_text, type_name};
use super::settings::{Origin, Settings};
use super::value::{self, quote};
use super::{Expect, Problem, TestConfig, TransferConfig};

/// Keys of a test that are no settings.
const TEST_KEYS: [&str; 4] = ["name", "transfers", "expect", "pattern"];

type Value<'i> = Spanned<DeValue<'i>>;

impl TestConfig {
    /// The options of this test: its own keys over file and defaults; environment and `--set` win.
    ///
    /// # Errors
    /// A key that no test has or a value that is refused; none after `read::parse`.
    pub fn options(&self, settings: &Settings) -> Result<Options, Vec<Problem>> {
        let mut options = settings.options();
        let mut problems = Vec::new();
        // Iterations and seconds are one choice: who makes it, makes it for both.
        let duration_given = DURATION.iter().any(|key| settings.get(key).from.outranks_file());
        if !duration_given && self.overrides.iter().any(|(key, ..)| DURATION.contains(&key.as_str())) {
            options.seconds = None;
        }
        for (key, value) in self.brought_along(settings) {
            let set = find(key).map(|opt| (opt.set)(&mut options, value));
            set.expect("a default of a pattern is a setting").expect("a default of a pattern is valid");
        }
        for (key, value, _) in &self.overrides {
            let Some(opt) = find(key).filter(|opt| opt.per_test) else {
                problems.push(Problem::at(self.span.clone(), format!("{} cannot be set for one test", quote(key))));
                continue;
            };
            let given =
                if DURATION.contains(&opt.key) { duration_given } else { settings.get(opt.key).from.outranks_file() };
            if given {
                continue;
            }
            if let Err(why) = (opt.set)(&mut options, value) {
                problems.push(Problem::at(self.span.clone(), format!("{}: {why}", opt.short())));
            }
        }
        if problems.is_empty() { Ok(options) } else { Err(problems) }
    }
}

impl TestConfig {
    /// What the test's pattern sets, since nobody else does: dotted key and value.
    pub fn brought_along<'a>(
        &'a self,
        settings: &'a Settings,
    ) -> impl Iterator<Item = (&'static str, &'static str)> + 'a {
        let defaults = self.pattern.iter().flat_map(|pattern| pattern.spec().defaults);
        let nobodys =
            |key: &str| settings.get(key).from == Origin::Default && self.overrides.iter().all(|(own, ..)| own != key);
        defaults.copied().filter(move |(key, _)| nobodys(key))
    }
}

const DURATION: [&str; 2] = ["run.iterations", "run.seconds"];

/// Reads what stands under the key `test`.
pub(super) fn read(reader: &mut Reader<'_>, value: Option<&Value<'_>>) -> Vec<TestConfig> {
    const EXAMPLE: &str = "add [[test]] with transfers = [\"R0C0 -> R0C0 -> R1C0\"]";
    let Some(value) = value else {
        reader.problems.push(Problem {
            message: "there is no [[test]], so nothing would run".to_owned(),
            span: None,
            help: Some(EXAMPLE.to_owned()),
        });
        return Vec::new();
    };
    let array = match value.get_ref() {
        DeValue::Array(array) => array,
        DeValue::Table(_) => {
            reader.problem_with_help(value.span(), "a test is one of a list", "write [[test]] with two brackets");
            return Vec::new();
        }
        other => {
            reader.problem_with_help(value.span(), format!("expected tests, found {}", type_name(other)), EXAMPLE);
            return Vec::new();
        }
    };
    if array.is_empty() {
        reader.problem_with_help(value.span(), "there is no test, so nothing would run", EXAMPLE);
    }
    let mut tests = Vec::new();
    for (i, value) in array.iter().enumerate() {
        match value.get_ref() {
            DeValue::Table(table) => tests.push(test(reader, i + 1, value.span(), table)),
            other => reader.problem_with_help(
                value.span(),
                format!("expected a test, found {}", type_name(other)),
                "write each test under its own [[test]]",
            ),
        }
    }
    tests
}

fn test(reader: &mut Reader<'_>, number: usize, span: Range<usize>, table: &DeTable<'_>) -> TestConfig {
    let mut test = TestConfig {
        name: format!("test {number}"),
        span: span.clone(),
        overrides: Vec::new(),
        transfers: Vec::new(),
        pattern: patterns::read(reader, table),
        expect: None,
    };
    if let Some(pattern) = &test.pattern {
        test.name = pattern.spec().name.to_owned();
    }
    for (key, value) in table {
        match key.get_ref().as_ref() {
            "name" => test.name = name(reader, value).unwrap_or(test.name),
            "transfers" => test.transfers = transfers(reader, value),
            "expect" => test.expect = expect(reader, value),
            "pattern" => {}
            _ if test.pattern.as_mut().is_some_and(|pattern| pattern.take(reader, key, value)) => {}
            _ => {
                if let Some(opt) = own_setting(reader, key, test.pattern.as_ref())
                    && let Some(text) = reader.value(opt, value)
                {
                    test.overrides.push((opt.key.to_owned(), text, reader.lines.number(key.span().start)));
                }
            }
        }
    }
    reader.iterations_or_seconds(table);
    if let (Some((key, _)), true) = (table.get_key_value("transfers"), table.contains_key("pattern")) {
        reader.problem(key.span(), "a pattern makes its own transfers: leave out pattern or transfers");
    }
    if !table.contains_key("transfers") && !table.contains_key("pattern") {
        reader.problem_with_help(
            span,
            format!("test {} has no transfers", quote(&test.name)),
            "add transfers = [\"SRC -> EXE -> DST\"]",
        );
    }
    test
}

fn name(reader: &mut Reader<'_>, value: &Value<'_>) -> Option<String> {
    match value.get_ref() {
        DeValue::String(name) if name.trim().is_empty() => {
            reader.problem(value.span(), "the name of a test is empty");
        }
        DeValue::String(name) if name.contains(char::is_control) => {
            reader.problem(value.span(), "the name of a test holds a control character");
        }
        DeValue::String(name) => return Some(name.to_string()),
        other => reader.problem(value.span(), format!("name: expected a string, found {}", type_name(other))),
    }
    None
}

/// The setting that a key of a test stands for.
fn own_setting(
    reader: &mut Reader<'_>,
    key: &Spanned<DeString<'_>>,
    pattern: Option<&PatternConfig>,
) -> Option<&'static Opt> {
    let name = key.get_ref().as_ref();
    let own = |opt: &&Opt| opt.per_test && opt.short() == name;
    if let Some(opt) = OPTIONS.iter().find(own) {
        return Some(opt);
    }
    let message = format!("unknown key {} in [[test]]", quote(name));
    if let Some(opt) = OPTIONS.iter().find(|opt| opt.short() == name) {
        let place = opt.section().map_or_else(|| "at the top".to_owned(), |section| format!("under [{section}]"));
        reader.problem_with_help(
            key.span(),
            format!("{} is the same for all tests", quote(name)),
            format!("write it {place}"),
        );
    } else if OPTIONS.iter().any(|opt| opt.section() == Some(name)) {
        reader.problem_with_help(key.span(), message, format!("write the keys of {name} into the test directly"));
    } else if let Some(owner) = patterns::owner_of(name) {
        let help = format!("add pattern = {}", quote(owner));
        reader.problem_with_help(key.span(), format!("{} is a key of the pattern {}", quote(name), quote(owner)), help);
    } else {
        let of_pattern = pattern.into_iter().flat_map(|pattern| pattern.spec().keys).map(|known| known.key);
        let of_tests = OPTIONS.iter().filter(|opt| opt.per_test).map(Opt::short).chain(TEST_KEYS);
        let known: Vec<&str> = of_pattern.chain(of_tests).collect();
        reader.problem_with_help(key.span(), message, hint(name, &known, str::to_owned));
    }
    None
}

fn expect(reader: &mut Reader<'_>, value: &Value<'_>) -> Option<Expect> {
    let DeValue::Table(table) = value.get_ref() else {
        let found = type_name(value.get_ref());
        reader.problem(value.span(), format!("expected {{ min_gbps = 1.0 }}, found {found}"));
        return None;
    };
    let mut expect = Expect { min_gbps: None, max_gbps: None };
    for (key, value) in table {
        let bound = match key.get_ref().as_ref() {
            "min_gbps" => &mut expect.min_gbps,
            "max_gbps" => &mut expect.max_gbps,
            other => {
                let help = hint(other, &["min_gbps", "max_gbps"], str::to_owned);
                reader.problem_with_help(key.span(), format!("unknown key {} in expect", quote(other)), help);
                continue;
            }
        };
        let text = match value.get_ref() {
            DeValue::Float(float) => float.as_str().to_owned(),
            other => integer(other).unwrap_or_default(),
        };
        *bound = text.parse().ok().filter(|rate: &f64| *rate > 0.0 && rate.is_finite());
        if bound.is_none() {
            reader.problem(value.span(), format!("{}: expected a rate in GB/s above 0", key.get_ref()));
        }
    }
    if table.is_empty() {
        reader.problem(value.span(), "expect says nothing: give min_gbps, max_gbps or both");
    }
    if let Expect { min_gbps: Some(min), max_gbps: Some(max) } = expect
        && min > max
    {
        reader.problem(value.span(), format!("no rate is at least {min} and at most {max} GB/s"));
    }
    Some(expect)
}

fn transfers(reader: &mut Reader<'_>, value: &Value<'_>) -> Vec<TransferConfig> {
    let DeValue::Array(array) = value.get_ref() else {
        let found = type_name(value.get_ref());
        reader.problem_with_help(
            value.span(),
            format!("expected a list of transfers, found {found}"),
            "write transfers = [\"SRC -> EXE -> DST\"]",
        );
        return Vec::new();
    };
    if array.is_empty() {
        reader.problem(value.span(), "the list of transfers is empty");
    }
    array.iter().filter_map(|value| transfer(reader, value)).collect()
}

fn transfer(reader: &mut Reader<'_>, value: &Value<'_>) -> Option<TransferConfig> {
    let span = value.span();
    match value.get_ref() {
        DeValue::String(text) => match notation::parse(text) {
            Ok(Notation { srcs, exe, dsts }) => {
                let text = text.trim().to_owned();
                Some(TransferConfig { srcs, exe, dsts, bytes: None, sub_executors: None, span, text })
            }
            Err(error) => {
                notation_problem(reader, value, text, error);
                None
            }
        },
        DeValue::Table(table) => transfer_table(reader, span, table),
        other => {
            reader.problem(span, format!("expected a transfer, found {}", type_name(other)));
            None
        }
    }
}

/// Points into the string where the source spells it without escapes, else at the whole string.
fn notation_problem(reader: &mut Reader<'_>, value: &Value<'_>, text: &str, error: NotationError) {
    let whole = value.span();
    let inside = whole.start + 1..whole.end.saturating_sub(1);
    let verbatim = reader.source.text.get(inside.clone()) == Some(text);
    let span = if verbatim { inside.start + error.at.start..inside.start + error.at.end } else { whole };
    reader.problem(span, error.message);
}

fn transfer_table(reader: &mut Reader<'_>, span: Range<usize>, table: &DeTable<'_>) -> Option<TransferConfig> {
    const KEYS: [&str; 5] = ["src", "exe", "dst", "bytes", "sub_executors"];
    let problems_before = reader.problems.len();
    let (mut srcs, mut exe, mut dsts, mut bytes, mut sub_executors) = (Vec::new(), None, Vec::new(), None, None);
    for (key, value) in table {
        match key.get_ref().as_ref() {
            "src" => srcs = side(reader, value),
            "dst" => dsts = side(reader, value),
            "exe" => match value.get_ref() {
                DeValue::String(text) => match notation::parse_executor(text) {
                    Ok(piece) => exe = Some(piece),
                    Err(error) => notation_problem(reader, value, text, error),
                },
                other => reader.problem(value.span(), format!("exe: expected a string, found {}", type_name(other))),
            },
            "bytes" => bytes = own(reader, value, "bytes", size_text, value::payload_size),
            "sub_executors" => sub_executors = own(reader, value, "sub_executors", integer, value::sub_executors),
            other => {
                let help = hint(other, &KEYS, str::to_owned);
                reader.problem_with_help(key.span(), format!("unknown key {} in a transfer", quote(other)), help);
            }
        }
    }
    if !table.contains_key("exe") {
        reader.problem(span.clone(), "a transfer needs exe, such as exe = \"R0G0\"");
    }
    if reader.problems.len() > problems_before {
        return None;
    }
    if srcs.is_empty() && dsts.is_empty() {
        reader.problem(span, "a transfer needs a source or a destination");
        return None;
    }
    let notation = Notation { srcs, exe: exe?, dsts };
    let text = notation.to_string();
    let Notation { srcs, exe, dsts } = notation;
    Some(TransferConfig { srcs, exe, dsts, bytes, sub_executors, span, text })
}

/// A value of a transfer's own.
fn own<T>(
    reader: &mut Reader<'_>,
    value: &Value<'_>,
    key: &str,
    text: impl Fn(&DeValue<'_>) -> Result<String, String>,
    read: impl Fn(&str) -> Result<T, String>,
) -> Option<T> {
    match text(value.get_ref()).and_then(|text| read(&text)) {
        Ok(own) => Some(own),
        Err(why) => {
            reader.problem(value.span(), format!("{key}: {why}"));
            None
        }
    }
}

/// `src` or `dst`: one string or a list of them; an empty list is none.
fn side(reader: &mut Reader<'_>, value: &Value<'_>) -> Vec<MemPiece> {
    let parts = match value.get_ref() {
        DeValue::Array(array) => array.iter().collect(),
        _ => vec![value],
    };
    let mut pieces = Vec::new();
    for part in parts {
        match part.get_ref() {
            DeValue::String(text) => match notation::parse_memories(text) {
                Ok(more) => pieces.extend(more),
                Err(error) => notation_problem(reader, part, text, error),
            },
            other => {
                reader.problem(part.span(), format!("expected a place such as \"R0G0\", found {}", type_name(other)))
            }
        }
    }
    if pieces.len() > notation::PIECES_MAX {
        reader.problem(value.span(), format!("more than {} sources or destinations", notation::PIECES_MAX));
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    use crate::config::settings::{FileLayer, effective};
    use crate::config::{Config, Source, read};
    use crate::units::Bytes;

    fn config(text: &str) -> Config {
        read::parse(&Source { name: "cfg.toml".to_owned(), text: text.to_owned() }).unwrap()
    }

    fn options(text: &str, env: &[(&str, &str)]) -> Options {
        let config = config(text);
        let lookup = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        config.tests[0].options(&effective(&config.file, &lookup, &[]).unwrap()).unwrap()
    }

    const TRANSFER: &str = "transfers = [\"C0 -> C0 -> C0\"]\n";

    #[test]
    fn a_test_overrides_the_file_and_the_environment_overrides_the_test() {
        let text =
            format!("[data]\nbytes = 64\nblock_bytes = 8\n[[test]]\nbytes = [4, \"8\"]\nwarmups = 0\n{TRANSFER}");
        let plain = options(&text, &[]);
        assert_eq!((plain.bytes, plain.block_bytes, plain.warmups), (vec![Bytes(4), Bytes(8)], Bytes(8), 0));
        let given = options(&text, &[("TB_BYTES", "16"), ("NUM_WARMUPS", "9")]);
        assert_eq!((given.bytes, given.warmups), (vec![Bytes(16)], 9));
    }

    #[test]
    fn iterations_and_seconds_are_one_choice() {
        let text = format!("[run]\nseconds = 5\n[[test]]\niterations = 7\n{TRANSFER}");
        let plain = options(&text, &[]);
        assert_eq!((plain.iterations, plain.seconds), (7, None));
        let given = options(&text, &[("NUM_ITERATIONS", "-2")]);
        assert_eq!(given.seconds, Some(2.0));
        let text = format!("[[test]]\nseconds = 5\n{TRANSFER}");
        assert_eq!(options(&text, &[]).seconds, Some(5.0));
        let given = options(&text, &[("NUM_ITERATIONS", "3")]);
        assert_eq!((given.iterations, given.seconds), (3, None));
    }

    #[test]
    fn overrides_made_by_hand_are_checked() {
        let mut test = config(&format!("[[test]]\n{TRANSFER}")).tests.remove(0);
        test.overrides = vec![("backend".into(), "host".into(), 1), ("data.bytes".into(), "3".into(), 2)];
        let settings = effective(&FileLayer::default(), &|_| None, &[]).unwrap();
        assert_eq!(test.options(&settings).unwrap_err().len(), 2);
    }

    #[test]
    fn keys_of_a_test_are_unique() {
        let shorts = OPTIONS.iter().filter(|opt| opt.per_test).map(Opt::short).chain(TEST_KEYS);
        let all: Vec<&str> = shorts.collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
    }

    #[test]
    fn tables_and_strings_make_the_same_transfers() {
        let config = config(
            r#"
            [[test]]
            transfers = [
                "G0G1 -> R0D0.1 -> N",
                { src = ["G0", "G1"], exe = "R0D0.1", dst = [], bytes = "64M", sub_executors = 8 },
                { src = "G0G1", exe = "R0D0.1" },
            ]
            expect = { min_gbps = 300, max_gbps = 4e3 }
            "#,
        );
        let [plain, full, short] = &config.tests[0].transfers[..] else { panic!("three transfers") };
        assert_eq!(config.tests[0].name, "test 1");
        assert_eq!(config.tests[0].expect, Some(Expect { min_gbps: Some(300.0), max_gbps: Some(4000.0) }));
        assert_eq!((&plain.srcs, &plain.exe, &plain.dsts), (&full.srcs, &full.exe, &full.dsts));
        assert_eq!((full.bytes, full.sub_executors), (Some(Bytes::mib(64)), Some(8)));
        assert_eq!(short.text, "G0G1 -> R0D0.1 -> N");
        assert_eq!((short.bytes, short.sub_executors), (None, None));
    }
}

//! Turns TOML into a config, or into all of its problems.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeArray, DeString, DeTable, DeValue};

use super::options::{Kind, OPTIONS, Opt, find};
use super::settings::{FileEntry, FileLayer};
use super::tests_table;
use super::value::{self, nearest, quote};
use super::{Config, Lines, Problem, Source};

/// Reads a config file.
///
/// # Errors
/// Every problem of the file, in its order.
pub fn parse(source: &Source) -> Result<Config, Vec<Problem>> {
    let mut reader = Reader { source, lines: Lines::of(&source.text), problems: Vec::new() };
    let (root, syntax) = DeTable::parse_recoverable(&source.text);
    let file = reader.settings(root.get_ref());
    let tests = tests_table::read(&mut reader, root.get_ref().get("test"));
    let problems = with_syntax(reader.problems, &syntax, &reader.lines);
    if problems.is_empty() { Ok(Config { file, tests }) } else { Err(problems) }
}

/// Merges in the parser's own errors, the first of each line. What was recovered from such a line is
/// a guess, and something missing may be what could not be read: problems of that kind are dropped.
fn with_syntax(problems: Vec<Problem>, syntax: &[toml::de::Error], lines: &Lines) -> Vec<Problem> {
    let mut broken: BTreeMap<usize, Problem> = BTreeMap::new();
    for error in syntax {
        let span = error.span().unwrap_or(0..0);
        broken.entry(lines.number(span.start)).or_insert_with(|| Problem::at(span, error.message().trim()));
    }
    let trusted = |problem: &Problem| match &problem.span {
        None => broken.is_empty(),
        Some(span) => !broken.contains_key(&lines.number(span.start)),
    };
    let mut all: Vec<Problem> = problems.into_iter().filter(trusted).collect();
    all.extend(broken.into_values());
    all.sort_by_key(|problem| problem.span.as_ref().map_or(usize::MAX, |span| span.start));
    all
}

/// What all parts of the reading share.
pub(super) struct Reader<'a> {
    pub(super) source: &'a Source,
    pub(super) lines: Lines,
    pub(super) problems: Vec<Problem>,
}

type Key<'i> = Spanned<DeString<'i>>;
type Value<'i> = Spanned<DeValue<'i>>;

impl Reader<'_> {
    pub(super) fn problem(&mut self, span: Range<usize>, message: impl Into<String>) {
        self.problems.push(Problem::at(span, message));
    }

    pub(super) fn problem_with_help(
        &mut self,
        span: Range<usize>,
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        self.problems.push(Problem::at(span, message).with_help(help));
    }

    /// The settings outside of tests.
    fn settings(&mut self, root: &DeTable<'_>) -> FileLayer {
        let mut layer = FileLayer::default();
        for (key, value) in root {
            let name = key.get_ref().as_ref();
            if name == "test" {
                continue;
            }
            if let Some(opt) = find(name) {
                self.setting(opt, key, value, &mut layer);
            } else if OPTIONS.iter().any(|opt| opt.section() == Some(name)) {
                match value.get_ref() {
                    DeValue::Table(table) => {
                        self.section(name, table, &mut layer);
                        if name == "run" {
                            self.iterations_or_seconds(table);
                        }
                    }
                    other => self.problem_with_help(
                        key.span(),
                        format!("{name} is a section, found {}", type_name(other)),
                        format!("write its keys under [{name}]"),
                    ),
                }
            } else {
                self.unknown_top_level(key, value.get_ref());
            }
        }
        layer
    }

    fn section(&mut self, section: &str, table: &DeTable<'_>, layer: &mut FileLayer) {
        for (key, value) in table {
            match find(&format!("{section}.{}", key.get_ref())) {
                Some(opt) => self.setting(opt, key, value, layer),
                None => self.unknown_in_section(section, key),
            }
        }
    }

    fn setting(&mut self, opt: &'static Opt, key: &Key<'_>, value: &Value<'_>, layer: &mut FileLayer) {
        if let Some(value) = self.value(opt, value) {
            let line = self.lines.number(key.span().start);
            layer.entries.push(FileEntry { key: opt.key.to_owned(), value, line, file: self.source.name.clone() });
        }
    }

    /// The canonical text of a setting's value.
    pub(super) fn value(&mut self, opt: &Opt, value: &Value<'_>) -> Option<String> {
        let canonical = toml_text(opt.kind, value.get_ref()).and_then(|text| opt.canonical(&text));
        match canonical {
            Ok(text) if opt.kind == Kind::Path => Some(self.beside_source(text)),
            Ok(text) => Some(text),
            Err(why) => {
                self.problem(value.span(), format!("{}: {why}", opt.short()));
                None
            }
        }
    }

    /// Paths in the file are relative to the file.
    fn beside_source(&self, path: String) -> String {
        if path == value::NONE {
            return path;
        }
        let folder = Path::new(&self.source.name).parent().unwrap_or(Path::new(""));
        folder.join(&path).into_os_string().into_string().unwrap_or(path)
    }

    /// Refuses a table that says twice how long a test lasts.
    pub(super) fn iterations_or_seconds(&mut self, table: &DeTable<'_>) {
        let seconds = table.get_key_value("seconds");
        if let Some((key, value)) = seconds
            && table.contains_key("iterations")
            && value.get_ref().as_str() != Some(value::NONE)
        {
            self.problem(key.span(), "seconds replaces iterations: give one of them");
        }
    }

    fn unknown_top_level(&mut self, key: &Key<'_>, value: &DeValue<'_>) {
        let name = key.get_ref().as_ref();
        let table = matches!(value, DeValue::Table(_)) || matches!(value, DeValue::Array(a) if holds_tables(a));
        if let Some(opt) = OPTIONS.iter().find(|opt| !table && opt.short() == name) {
            let section = opt.section().unwrap_or_default();
            return self.problem_with_help(
                key.span(),
                format!("{} belongs into a section", quote(name)),
                format!("write it under [{section}]"),
            );
        }
        let mut sections: Vec<&str> = OPTIONS.iter().filter_map(|opt| opt.section()).collect();
        sections.dedup();
        sections.push("test");
        if table {
            let help =
                hint(name, &sections, |near| if near == "test" { "[[test]]".to_owned() } else { format!("[{near}]") });
            self.problem_with_help(key.span(), format!("unknown section [{}]", plain(name)), help);
        } else {
            let keys: Vec<&str> = OPTIONS.iter().map(Opt::short).chain(["test"]).collect();
            let help = nearest(name, keys.iter().copied()).map_or_else(
                || format!("known sections: {}", sections.join(", ")),
                |near| match OPTIONS.iter().find(|opt| opt.short() == near).and_then(Opt::section) {
                    Some(section) => format!("did you mean {near}, under [{section}]?"),
                    None => format!("did you mean {near}?"),
                },
            );
            self.problem_with_help(key.span(), format!("unknown key {}", quote(name)), help);
        }
    }

    fn unknown_in_section(&mut self, section: &str, key: &Key<'_>) {
        let name = key.get_ref().as_ref();
        let known: Vec<&str> = OPTIONS.iter().filter(|o| o.section() == Some(section)).map(Opt::short).collect();
        let elsewhere = OPTIONS.iter().find(|opt| opt.short() == name);
        let help = match elsewhere.map(|opt| opt.section()) {
            Some(Some(other)) => format!("it belongs under [{other}]"),
            Some(None) => "it belongs at the top, before the first section".to_owned(),
            None => hint(name, &known, str::to_owned),
        };
        self.problem_with_help(key.span(), format!("unknown key {} in [{section}]", quote(name)), help);
    }
}

fn holds_tables(array: &DeArray<'_>) -> bool {
    array.iter().any(|value| value.get_ref().is_table())
}

/// A name without the quotes of `quote`.
fn plain(name: &str) -> String {
    quote(name).trim_matches('"').to_owned()
}

/// Names the nearest of the known names, or all.
pub(super) fn hint(name: &str, known: &[&str], show: impl Fn(&str) -> String) -> String {
    match nearest(name, known.iter().copied()) {
        Some(near) => format!("did you mean {}?", show(near)),
        None => format!("known: {}", known.iter().map(|name| show(name)).collect::<Vec<_>>().join(", ")),
    }
}

/// What a value is, for messages.
pub(super) fn type_name(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a number with a point",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// Turns a TOML value of the right type into the text that the setting's own reader takes.
pub(super) fn toml_text(kind: Kind, value: &DeValue<'_>) -> Result<String, String> {
    let wrong = |expected: &str| Err(format!("expected {expected}, found {}", type_name(value)));
    match (kind, value) {
        (Kind::Choice(_) | Kind::Path | Kind::Place, DeValue::String(text)) => Ok(text.to_string()),
        (Kind::Choice(_) | Kind::Count(_) | Kind::Seconds(_), DeValue::Integer(_)) => integer(value),
        (Kind::Choice(words), _) => wrong(&format!("one of {}", words.join(", "))),
        (Kind::Switch(_), DeValue::Boolean(on)) => Ok(on.to_string()),
        (Kind::Switch(Some(word)) | Kind::Count(Some(word)) | Kind::Seconds(Some(word)), DeValue::String(text))
            if text.as_ref() == word =>
        {
            Ok(word.to_owned())
        }
        (Kind::Switch(None), _) => wrong("true or false"),
        (Kind::Switch(Some(word)), _) => wrong(&format!("true, false or \"{word}\"")),
        (Kind::Count(None), _) => wrong("a whole number"),
        (Kind::Count(Some(word)), _) => wrong(&format!("a whole number or \"{word}\"")),
        (Kind::Seconds(_), DeValue::Float(float)) => Ok(float.as_str().to_owned()),
        (Kind::Seconds(_), _) => wrong("a number of seconds"),
        (Kind::Size | Kind::Sizes | Kind::Rotation | Kind::Rotations, DeValue::String(_) | DeValue::Integer(_)) => {
            size_text(value)
        }
        (Kind::Size, _) => wrong("a size such as \"64M\" or a number of bytes"),
        (Kind::Sizes | Kind::Rotations, DeValue::Array(array)) => list_text(array, size_text),
        (Kind::Sizes, DeValue::Table(table)) => sweep_text(table),
        (Kind::Sizes, _) => wrong("a size, a list of sizes, or { from, to, per_octave }"),
        (Kind::Rotation, _) => wrong("a size or \"auto\""),
        (Kind::Rotations, _) => wrong("a size, \"auto\", or a list of them"),
        (Kind::Percentages, DeValue::Array(array)) if array.is_empty() => Ok(value::NONE.to_owned()),
        (Kind::Percentages, DeValue::Array(array)) => list_text(array, integer),
        (Kind::Percentages, DeValue::String(text)) if text.as_ref() == value::NONE => Ok(text.to_string()),
        (Kind::Percentages, _) => wrong("a list of percentages"),
        (Kind::Pattern, DeValue::Array(array)) if array.is_empty() => Ok(value::NONE.to_owned()),
        (Kind::Pattern, DeValue::Array(array)) => array
            .iter()
            .map(|part| float(part.get_ref()))
            .collect::<Result<Vec<f32>, _>>()
            .map(|f| value::print_pattern(&f)),
        (Kind::Pattern, DeValue::String(text)) => Ok(text.to_string()),
        (Kind::Pattern, _) => wrong("hex digits in quotes, or a list of numbers"),
        (Kind::Numbers, DeValue::Array(array)) if array.is_empty() => Ok(value::NONE.to_owned()),
        (Kind::Numbers, DeValue::Array(array)) => list_text(array, integer),
        (Kind::Numbers, DeValue::String(text)) => Ok(text.to_string()),
        (Kind::Numbers, _) => wrong("a list of numbers, or a text such as \"5,10-12\""),
        (Kind::Path, _) => wrong("a path"),
        (Kind::Place, _) => wrong("a place such as \"R0G0\""),
    }
}

fn list_text(array: &DeArray<'_>, text: impl Fn(&DeValue<'_>) -> Result<String, String>) -> Result<String, String> {
    let parts: Vec<String> = array.iter().map(|part| text(part.get_ref())).collect::<Result<_, _>>()?;
    Ok(parts.join(","))
}

/// Decimal digits of an integer of any base.
pub(super) fn integer(value: &DeValue<'_>) -> Result<String, String> {
    let DeValue::Integer(integer) = value else {
        return Err(format!("expected a whole number, found {}", type_name(value)));
    };
    i128::from_str_radix(integer.as_str(), integer.radix())
        .map(|number| number.to_string())
        .map_err(|_| format!("{} does not fit in 64 bits", plain(integer.as_str())))
}

fn float(value: &DeValue<'_>) -> Result<f32, String> {
    let text = match value {
        DeValue::Float(float) => float.as_str().to_owned(),
        other => integer(other)?,
    };
    text.parse().map_err(|_| format!("{} is not a float32 number", quote(&text)))
}

/// One size; what it may hold is the size parser's question.
pub(super) fn size_text(value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(_) => integer(value),
        other => Err(format!("expected a size such as \"64M\", found {}", type_name(other))),
    }
}

/// `{ from = "1M", to = "512M", per_octave = 2 }` as `1M..512M/2`.
fn sweep_text(table: &DeTable<'_>) -> Result<String, String> {
    const KEYS: [&str; 3] = ["from", "to", "per_octave"];
    if let Some(unknown) = table.keys().find(|key| !KEYS.contains(&key.get_ref().as_ref())) {
        let name = unknown.get_ref();
        return Err(format!("a sweep has no key {}: {}", quote(name), hint(name, &KEYS, str::to_owned)));
    }
    let part =
        |key: &str| table.get(key).map(|value| size_text(value.get_ref()).map_err(|why| format!("{key}: {why}")));
    let (Some(from), Some(to)) = (part("from"), part("to")) else {
        return Err("a sweep needs both from and to".to_owned());
    };
    let per_octave = table.get("per_octave").map_or(Ok("1".to_owned()), |value| integer(value.get_ref()))?;
    Ok(format!("{}..{}/{per_octave}", from?, to?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST: &str = "[[test]]\ntransfers = [\"G0 -> G0 -> G1\"]\n";

    fn parse_text(text: &str) -> Result<Config, Vec<Problem>> {
        parse(&Source { name: "configs/cfg.toml".to_owned(), text: format!("{text}\n{TEST}") })
    }

    fn check(text: &str, expected: &str) {
        let config = parse_text(text).unwrap_or_else(|problems| panic!("{text}: {problems:?}"));
        let shown: Vec<String> = config.file.entries.iter().map(|e| format!("{}={}", e.key, e.value)).collect();
        assert_eq!(shown, [expected], "{text}");
    }

    fn refuse(text: &str, expected: &str) {
        let problems = parse_text(text).expect_err(text);
        assert!(problems[0].message.contains(expected), "{text}: {problems:?}");
    }

    #[test]
    fn every_type_of_value_is_read_from_its_toml_form() {
        check("backend = \"host\"", "backend=host");
        check("run.iterations = 1_000", "run.iterations=1000");
        check("run.seconds = 2.5", "run.seconds=2.5");
        check("run.seconds = \"none\"", "run.seconds=none");
        check("[run]\nsub_executors = \"all\"", "run.sub_executors=all");
        check("[data]\nbytes = 0x1000", "data.bytes=4 KiB");
        check("[data]\nbytes = [\"4M\", 64]", "data.bytes=4 MiB, 64 B");
        check("[data]\nbytes = { from = \"1K\", to = 2048, per_octave = 2 }", "data.bytes=1 KiB, 1536 B, 2 KiB");
        check("[data.bytes]\nfrom = 4\nto = \"8\"", "data.bytes=4 B, 8 B");
        check("[data]\nsrc_rotate_bytes = [\"auto\", 0]", "data.src_rotate_bytes=auto, 0 B");
        check("[data]\ndst_rotate_bytes = \"auto\"", "data.dst_rotate_bytes=auto");
        check("[data]\ndst_rotate_bytes = 4096", "data.dst_rotate_bytes=4 KiB");
        check("[data]\nfill_pattern = [1]", "data.fill_pattern=3f800000");
        check("[data]\nfill_pattern = [1e0, 2]", "data.fill_pattern=400000003f800000");
        check("[data]\nfill_pattern = \"3F800000\"", "data.fill_pattern=3f800000");
        check("[data]\nfill_pattern = []", "data.fill_pattern=none");
        check("[data]\nfill_compress = [25, 75]", "data.fill_compress=25, 75");
        check("[validate]\nalways_validate = -1", "validate.always_validate=-1");
        check("[validate]\nvalidate_source = true", "validate.validate_source=true");
    }

    #[test]
    fn values_of_another_type_are_refused() {
        refuse("backend = true", "expected one of auto, hip, cuda, host, found true or false");
        refuse("[run]\niterations = \"10\"", "expected a whole number, found a string");
        refuse("[run]\niterations = 1.5", "found a number with a point");
        refuse("[run]\niterations = -5", "\"-5\" is not a whole number from 1");
        refuse("[run]\niterations = 99999999999999999999999999999999999999999", "does not fit in 64 bits");
        refuse("[run]\nseconds = inf", "seconds above 0");
        refuse("[data]\nbytes = 1e9", "found a number with a point");
        refuse("[data]\nbytes = -4", "is not a size");
        refuse("[data]\nbytes = []", "the list is empty");
        refuse("[data]\nbytes = [[4]]", "found a list");
        refuse("[data]\nbytes = { from = 4 }", "needs both from and to");
        refuse("[data]\nbytes = { from = 4, to = 8, step = 4 }", "a sweep has no key \"step\"");
        refuse("[data]\nsrc_rotate_bytes = true", "expected a size, \"auto\", or a list");
        refuse("[data]\ndst_rotate_bytes = [0]", "expected a size or \"auto\", found a list");
        refuse("[data]\nfill_pattern = 12", "hex digits in quotes");
        refuse("[data]\nfill_pattern = [\"1\"]", "expected a whole number, found a string");
        refuse("[data]\nfill_compress = [50]", "sum to 50");
        for switch in ["1", "\"true\"", "\"yes\""] {
            refuse(&format!("[validate]\nvalidate_source = {switch}"), "expected true or false");
        }
        refuse("[validate]\nalways_validate = 2", "\"2\" is not one of -1, 0, 1");
        refuse("[output]\njson = 1979-05-27", "found a date");
    }

    #[test]
    fn paths_are_relative_to_the_file() {
        check("[output]\njson = \"out/a.json\"", "output.json=configs/out/a.json");
        check("[output]\ncsv = \"/tmp/a.csv\"", "output.csv=/tmp/a.csv");
        check("[output]\ncsv = \"none\"", "output.csv=none");
    }

    #[test]
    fn entries_know_their_line() {
        let config = parse_text("# title\n[data]\n\nbytes = 64").unwrap();
        let entry = &config.file.entries[0];
        assert_eq!((entry.file.as_str(), entry.line), ("configs/cfg.toml", 4));
        let config = parse(&Source { name: "c".to_owned(), text: format!("{TEST}bytes = 64\n") }).unwrap();
        assert_eq!(config.tests[0].overrides, [("data.bytes".to_owned(), "64 B".to_owned(), 3)]);
    }
}

//! Lays command line over environment over file over defaults, and remembers where each value is from.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::options::{OPTIONS, Opt, Options, Settle, find};
use super::value::{self, nearest, quote};

/// Where a value is from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    Default,
    File {
        name: String,
        line: usize,
    },
    /// A variable and what it holds.
    Environment {
        name: String,
        text: String,
    },
    CommandLine,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.pad("default"),
            Origin::File { name, line } => f.pad(&format!("{name}:{line}")),
            Origin::Environment { name, text } => f.pad(&format!("environment {name}={text}")),
            Origin::CommandLine => f.pad("--set"),
        }
    }
}

impl Origin {
    /// Whether it was given for this run, and so wins over what the file says for one test.
    pub fn outranks_file(&self) -> bool {
        matches!(self, Origin::Environment { .. } | Origin::CommandLine)
    }
}

/// The effective value of one setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    pub key: String,
    /// Canonical: equal values have equal texts, and the text reads back to the value.
    pub value: String,
    pub from: Origin,
}

impl Setting {
    /// Whether the value is the default, wherever it is from.
    pub fn is_default(&self) -> bool {
        find(&self.key).is_some_and(|opt| opt.default == self.value)
    }
}

/// Every setting of a run, in table order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    list: Vec<Setting>,
}

/// What the config file says about the settings: rank 0 reads it, every rank lays its own
/// environment over it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileLayer {
    pub entries: Vec<FileEntry>,
}

/// A setting as the file gives it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    pub key: String,
    pub value: String,
    pub line: usize,
    pub file: String,
}

/// A setting in which two ranks differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    pub key: String,
    pub mine: Setting,
    pub reference: Setting,
}

impl Settings {
    /// The defaults alone.
    pub fn defaults() -> Settings {
        let setting =
            |opt: &Opt| Setting { key: opt.key.to_owned(), value: opt.default.to_owned(), from: Origin::Default };
        Settings { list: OPTIONS.iter().map(setting).collect() }
    }

    pub fn iter(&self) -> std::slice::Iter<'_, Setting> {
        self.list.iter()
    }

    /// The setting of a dotted key of the table.
    pub fn get(&self, key: &str) -> &Setting {
        self.list.iter().find(|setting| setting.key == key).expect("the key is one of the table's")
    }

    pub fn options(&self) -> Options {
        let mut options = Options::default();
        for (opt, setting) in OPTIONS.iter().zip(&self.list) {
            (opt.set)(&mut options, &setting.value).expect("settings hold only values that were read before");
        }
        options
    }

    /// Lays one layer over this one.
    fn lay(&mut self, layer: Vec<Layered>, errors: &mut Vec<String>) {
        let has = |key: &str| layer.iter().find(|entry| entry.opt.key == key);
        match (has("run.iterations"), has("run.seconds")) {
            (Some(iterations), Some(seconds)) if seconds.value != value::NONE => errors.push(format!(
                "{}: run.iterations and {}: run.seconds are both given, and the second replaces the first: give one of them",
                iterations.from, seconds.from
            )),
            // A lower layer's seconds would win over the iterations asked for here.
            (Some(iterations), None) if self.get("run.seconds").value != value::NONE => {
                self.put("run.seconds", value::NONE, &iterations.from);
            }
            _ => {}
        }
        for entry in &layer {
            self.put(entry.opt.key, &entry.value, &entry.from);
        }
    }

    fn put(&mut self, key: &str, value: &str, from: &Origin) {
        let setting = self.list.iter_mut().find(|setting| setting.key == key).expect("the key is one of the table's");
        setting.value = value.to_owned();
        setting.from = from.clone();
    }
}

/// A value that was read, on its way into the settings.
struct Layered {
    opt: &'static Opt,
    value: String,
    from: Origin,
}

impl Layered {
    fn read(opt: &'static Opt, text: &str, from: Origin) -> Result<Layered, String> {
        match opt.canonical(text) {
            Ok(value) => Ok(Layered { opt, value, from }),
            Err(why) => Err(format!("{from}: {}: {why}", opt.key)),
        }
    }
}

/// The settings in force on this rank: command line over environment over file over default.
/// Of several values for one key on the command line the last counts.
///
/// # Errors
/// Every value that was refused, with where it is from.
pub fn effective(
    file: &FileLayer,
    env: &dyn Fn(&str) -> Option<String>,
    sets: &[(String, String)],
) -> Result<Settings, Vec<String>> {
    let mut errors = Vec::new();
    let mut settings = Settings::defaults();
    let layers: [Vec<Result<Layered, String>>; 3] = [
        file.entries.iter().map(from_file).collect(),
        OPTIONS.iter().filter_map(|opt| from_environment(opt, env)).collect(),
        sets.iter().map(|(key, text)| from_set(key, text)).collect(),
    ];
    for layer in layers {
        let (read, refused): (Vec<_>, Vec<_>) = layer.into_iter().partition(Result::is_ok);
        errors.extend(refused.into_iter().filter_map(Result::err));
        settings.lay(read.into_iter().filter_map(Result::ok).collect(), &mut errors);
    }
    if errors.is_empty() { Ok(settings) } else { Err(errors) }
}

fn from_file(entry: &FileEntry) -> Result<Layered, String> {
    let from = Origin::File { name: entry.file.clone(), line: entry.line };
    let opt = find(&entry.key).ok_or_else(|| format!("{from}: {}", unknown(&entry.key)))?;
    Layered::read(opt, &entry.value, from)
}

/// An empty variable counts as unset, as in TransferBench.
fn from_environment(opt: &'static Opt, env: &dyn Fn(&str) -> Option<String>) -> Option<Result<Layered, String>> {
    let text = env(opt.env).filter(|text| !text.is_empty())?;
    let shown = quote(&text);
    let from = Origin::Environment { name: opt.env.to_owned(), text: shown[1..shown.len() - 1].to_owned() };
    // TransferBench: a negative number of iterations is a number of seconds.
    if let ("run.iterations", Ok(negative @ ..=-1)) = (opt.key, text.trim().parse::<i64>()) {
        let seconds = find("run.seconds").expect("the table has run.seconds");
        return Some(Layered::read(seconds, &negative.unsigned_abs().to_string(), from));
    }
    Some(Layered::read(opt, &text, from))
}

fn from_set(key: &str, text: &str) -> Result<Layered, String> {
    let opt = find_set(key).map_err(|why| format!("{}: {why}", Origin::CommandLine))?;
    Layered::read(opt, text, Origin::CommandLine)
}

/// Checks a `--set key=value` by itself.
///
/// # Errors
/// The key is unknown or the value is refused.
pub fn check_set(key: &str, text: &str) -> Result<(), String> {
    find_set(key)?.canonical(text).map(|_| ())
}

/// The row of a key on the command line: dotted, or without its section where that is unique.
fn find_set(key: &str) -> Result<&'static Opt, String> {
    if let Some(opt) = find(key) {
        return Ok(opt);
    }
    let short: Vec<&'static Opt> = OPTIONS.iter().filter(|opt| opt.short() == key).collect();
    match short[..] {
        [opt] => Ok(opt),
        [] => Err(unknown(key)),
        _ => {
            let keys: Vec<&str> = short.iter().map(|opt| opt.key).collect();
            Err(format!("the key {} could be {}", quote(key), keys.join(" or ")))
        }
    }
}

fn unknown(key: &str) -> String {
    let near = nearest(key, OPTIONS.iter().flat_map(|opt| [opt.key, opt.short()]));
    let hint = near.map_or_else(|| "--help lists all keys".to_owned(), |near| format!("did you mean {near}?"));
    format!("unknown key {}: {hint}", quote(key))
}

/// Settings in which this rank differs from `reference` although all ranks must have the same,
/// `data.src_rotate_bytes` first and the others in table order.
pub fn differences(mine: &Settings, reference: &Settings) -> Vec<Difference> {
    let mut differences: Vec<Difference> = OPTIONS
        .iter()
        .filter(|opt| opt.settle == Settle::Same)
        .map(|opt| (mine.get(opt.key), reference.get(opt.key)))
        .filter(|(mine, reference)| mine.value != reference.value)
        .map(|(mine, reference)| Difference { key: mine.key.clone(), mine: mine.clone(), reference: reference.clone() })
        .collect();
    differences.sort_by_key(|difference| difference.key != "data.src_rotate_bytes");
    differences
}

/// Warnings for TransferBench's variables that are set (`env_names`) and that nothing here reads.
pub fn ignored_environment(env_names: &[String]) -> Vec<String> {
    IGNORED
        .iter()
        .filter(|(name, _)| env_names.iter().any(|set| set == name))
        .map(|(name, instead)| match *instead {
            "" => format!("environment {name} is set, but is not honoured here"),
            instead => format!("environment {name} is set, but is not honoured here: {instead}"),
        })
        .collect()
}

const RANKS_INSTEAD: &str = "start the ranks with mpirun or with --ranks";
const SWEEP_INSTEAD: &str = "give data.bytes as a sweep { from, to, per_octave }";
const CSV_INSTEAD: &str = "write CSV to a file with --csv";

/// TransferBench's variables without a counterpart, and what to use instead. The GPU runtime's own
/// (GPU_MAX_HW_QUEUES, HSA_ENABLE_SDMA) are left out: the runtime reads them.
const IGNORED: &[(&str, &str)] = &[
    ("SHOW_PERCENTILES", "the results hold every sample and the usual percentiles"),
    ("SHOW_BORDERS", ""),
    ("OUTPUT_TO_CSV", CSV_INSTEAD),
    ("HIDE_ENV", ""),
    ("USE_INTERACTIVE", ""),
    ("SAMPLING_FACTOR", SWEEP_INSTEAD),
    ("SWEEP_MIN_POW2", SWEEP_INSTEAD),
    ("SWEEP_MAX_POW2", SWEEP_INSTEAD),
    ("MIN_VAR_SUBEXEC", "give run.sub_executors in one [[test]] for each count"),
    ("MAX_VAR_SUBEXEC", "give run.sub_executors in one [[test]] for each count"),
    ("VALIDATE_ON_DEVICE", "device memory is checked on its device unless validate.validate_direct is set"),
    ("GFX_KERNEL", "the copy kernel is taken where every transfer of the executor has one source"),
    ("USE_HIP_EVENTS", ""),
    ("USE_SINGLE_STREAM", ""),
    ("USE_HSA_DMA", ""),
    ("TDM_BLOCK_SIZE", ""),
    ("TDM_BLOCK_ORDER", "GFX_BLOCK_ORDER counts for executor T too"),
    ("IB_GID_INDEX", ""),
    ("IB_PORT_NUMBER", ""),
    ("NIC_CHUNK_BYTES", ""),
    ("NIC_CQ_POLL_BATCH", ""),
    ("NIC_RELAX_ORDER", ""),
    ("NIC_SERVICE_LEVEL", ""),
    ("NIC_TRAFFIC_CLASS", ""),
    ("IP_ADDRESS_FAMILY", ""),
    ("ROCE_VERSION", ""),
    ("TB_NUM_RANKS", RANKS_INSTEAD),
    ("TB_RANK", RANKS_INSTEAD),
    ("TB_MASTER_ADDR", RANKS_INSTEAD),
    ("TB_MASTER_IFACE", RANKS_INSTEAD),
    ("TB_MASTER_PORT", RANKS_INSTEAD),
    ("TB_SINGLE_LOG", "set TB_LOG"),
    ("TB_VERBOSE", "set TB_LOG"),
    ("TB_DUMP_CFG_FILE", ""),
    ("TB_DUMP_LINES", ""),
    ("TB_FORCE_SINGLE_POD", ""),
    ("TB_NIC_FILTER", ""),
    ("TB_PAUSE", ""),
    ("TB_SEND_USLEEP", ""),
    ("TB_SHOW_ALL_NUMA", ""),
    ("TB_WALLCLOCK_RATE", ""),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::RotateBytes;
    use crate::units::Bytes;

    fn file(entries: &[(&str, &str)]) -> FileLayer {
        let entry = |(line, (key, value)): (usize, &(&str, &str))| FileEntry {
            key: (*key).to_owned(),
            value: (*value).to_owned(),
            line: line + 1,
            file: "cfg.toml".to_owned(),
        };
        FileLayer { entries: entries.iter().enumerate().map(entry).collect() }
    }

    fn check(entries: &[(&str, &str)], env: &[(&str, &str)], sets: &[(&str, &str)]) -> Result<Settings, Vec<String>> {
        let lookup = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let sets: Vec<_> = sets.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        effective(&file(entries), &lookup, &sets)
    }

    fn shown(settings: &Settings, key: &str) -> String {
        let setting = settings.get(key);
        format!("{} ({})", setting.value, setting.from)
    }

    #[test]
    fn command_line_wins_over_environment_over_file_over_default() {
        let key = "data.src_rotate_bytes";
        let (f, e, s) = ([(key, "1M")], [("SRC_ROTATE_BYTES", "64M")], [(key, "auto")]);
        assert_eq!(shown(&check(&[], &[], &[]).unwrap(), key), "256 MiB (default)");
        assert_eq!(shown(&check(&f, &[], &[]).unwrap(), key), "1 MiB (cfg.toml:1)");
        assert_eq!(shown(&check(&f, &e, &[]).unwrap(), key), "64 MiB (environment SRC_ROTATE_BYTES=64M)");
        let all = check(&f, &e, &s).unwrap();
        assert_eq!(shown(&all, key), "auto (--set)");
        assert_eq!(all.options().src_rotate_bytes, [RotateBytes::Auto]);
        assert!(!all.get(key).is_default());
    }

    #[test]
    fn every_refused_value_is_reported_with_its_origin() {
        let errors = check(
            &[("data.byte_offset", "3")],
            &[("BLOCK_BYTES", "6"), ("NUM_ITERATIONS", "0"), ("VALIDATE_DIRECT", "yes")],
            &[("run.warmups", "-1"), ("iterations", "3"), ("run.iteratons", "3"), ("zzz", "")],
        )
        .unwrap_err();
        insta::assert_snapshot!(errors.join("\n"), @r##"
cfg.toml:1: data.byte_offset: 3 B is not a multiple of 4
environment NUM_ITERATIONS=0: run.iterations: 0 iterations would run for ever and never report: give at least 1, or set run.seconds
environment BLOCK_BYTES=6: data.block_bytes: 6 B is not a multiple of 4
environment VALIDATE_DIRECT=yes: validate.validate_direct: "yes" is not one of true, false, 1, 0
--set: run.warmups: "-1" is not a whole number from 0 to 10000000
--set: the key "iterations" could be run.iterations or output.iterations
--set: unknown key "run.iteratons": did you mean run.iterations?
--set: unknown key "zzz": --help lists all keys
"##);
    }

    #[test]
    fn negative_iterations_in_the_environment_are_seconds() {
        let settings = check(&[("run.iterations", "5")], &[("NUM_ITERATIONS", "-30")], &[]).unwrap();
        assert_eq!(shown(&settings, "run.seconds"), "30 (environment NUM_ITERATIONS=-30)");
        assert_eq!(settings.options().seconds, Some(30.0));
        assert!(check(&[], &[], &[("run.iterations", "-30")]).is_err());
    }

    #[test]
    fn iterations_replace_the_seconds_of_a_lower_layer_but_not_of_their_own() {
        let settings = check(&[("run.seconds", "5")], &[("NUM_ITERATIONS", "7")], &[]).unwrap();
        assert_eq!(settings.options().seconds, None);
        assert_eq!(shown(&settings, "run.seconds"), "none (environment NUM_ITERATIONS=7)");
        assert!(check(&[], &[], &[("run.seconds", "5"), ("run.iterations", "7")]).is_err());
        assert!(check(&[], &[], &[("run.seconds", "none"), ("run.iterations", "7")]).is_ok());
        assert_eq!(check(&[("run.iterations", "7")], &[], &[]).unwrap().get("run.seconds").from, Origin::Default);
    }

    #[test]
    fn an_empty_variable_counts_as_unset() {
        assert_eq!(check(&[], &[("SRC_ROTATE_BYTES", "")], &[]).unwrap(), Settings::defaults());
    }

    #[test]
    fn differences_name_both_sides_and_the_rotation_first() {
        let mine = check(&[], &[("TB_BYTES", "4M"), ("SRC_ROTATE_BYTES", "64M"), ("TB_OUTPUT_CSV", "x")], &[]).unwrap();
        let reference = check(&[], &[("SRC_ROTATE_BYTES", "128M")], &[]).unwrap();
        let differences = differences(&mine, &reference);
        let shown: Vec<_> = differences.iter().map(|d| (&*d.key, &*d.mine.value, &*d.reference.value)).collect();
        assert_eq!(shown, [("data.src_rotate_bytes", "64 MiB", "128 MiB"), ("data.bytes", "4 MiB", "256 MiB")]);
    }

    #[test]
    fn equal_values_written_differently_are_no_difference() {
        let mine = check(&[], &[("SRC_ROTATE_BYTES", "256M")], &[]).unwrap();
        assert_eq!(differences(&mine, &Settings::defaults()), []);
        assert!(mine.get("data.src_rotate_bytes").is_default());
    }

    #[test]
    fn settings_survive_the_wire() {
        let settings = check(&[("data.bytes", "1M..8M")], &[("TB_BACKEND", "host")], &[("host.memory", "1G")]).unwrap();
        let back: Settings = serde_json::from_str(&serde_json::to_string(&settings).unwrap()).unwrap();
        assert_eq!(back, settings);
        assert_eq!(back.options().host_memory, Bytes::gib(1));
        assert_eq!(back.options().bytes.len(), 4);
    }

    #[test]
    fn ignored_variables_are_named_and_no_honoured_one_is_listed() {
        let warnings = ignored_environment(&["PATH".to_owned(), "OUTPUT_TO_CSV".to_owned()]);
        assert_eq!(
            warnings,
            ["environment OUTPUT_TO_CSV is set, but is not honoured here: write CSV to a file with --csv"]
        );
        assert!(IGNORED.iter().all(|(name, _)| OPTIONS.iter().all(|opt| opt.env != *name)));
    }
}

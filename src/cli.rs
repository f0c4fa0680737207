//! Turns the command line into a request; what the settings come to is decided later.

use std::ffi::OsString;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::config::options::{Kind, OPTIONS, Opt};
use crate::config::patterns::PATTERNS;
use crate::config::settings::check_set;

/// What was typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub what: What,
    /// Threads of this process as ranks, instead of a launcher's processes.
    pub ranks: Option<u32>,
    /// Settings in the order given, `--json` and `--csv` last; each was checked by itself.
    pub sets: Vec<(String, String)>,
    /// Refuse to run with another number of ranks.
    pub expect_ranks: Option<u32>,
    pub quiet: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    Run {
        config: PathBuf,
    },
    /// Prints what would run.
    Plan {
        config: PathBuf,
    },
}

impl What {
    pub fn config(&self) -> &Path {
        match self {
            What::Run { config } | What::Plan { config } => config,
        }
    }
}

/// Ranks as threads are for trying and testing; more would only measure the scheduler.
const RANKS_MAX: i64 = 1024;

/// Measures memory transfers between the ranks of an MPI job
#[derive(Parser)]
#[command(name = "tb-mpi", version, subcommand_negates_reqs = true)]
struct Line {
    /// Config file (TOML)
    #[arg(required = true)]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Print what would run, without allocating anything
    Plan {
        /// Config file (TOML)
        config: PathBuf,
        #[command(flatten)]
        flags: Flags,
    },
}

#[derive(Args, Default)]
struct Flags {
    /// Run N ranks as threads of this process, without a launcher
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=RANKS_MAX))]
    ranks: Option<u32>,
    /// Give a setting its value, over environment and file (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = key_value)]
    sets: Vec<(String, String)>,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE", value_parser = file)]
    json: Option<String>,
    /// Write the results as CSV
    #[arg(long, value_name = "FILE", value_parser = file)]
    csv: Option<String>,
    /// Refuse to run with another number of ranks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    expect_ranks: Option<u32>,
    /// Print errors only
    #[arg(long, short)]
    quiet: bool,
}

/// Reads the arguments, the program's name first.
///
/// # Errors
/// clap's: help and version (exit code 0), or a usage error (exit code 2).
pub fn parse<I, T>(args: I) -> Result<Request, clap::Error>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    let mut command = Line::command().after_help(settings_help());
    let matches = command.try_get_matches_from_mut(args)?;
    let line = Line::from_arg_matches(&matches)?;
    let (what, below) = match (line.config, line.command) {
        (None, Some(Command::Plan { config, flags })) => (What::Plan { config }, flags),
        (Some(config), None) => (What::Run { config }, Flags::default()),
        (Some(config), Some(_)) => {
            let message = format!("a subcommand stands before its config file: tb-mpi plan {}", config.display());
            return Err(command.error(ErrorKind::ArgumentConflict, message));
        }
        (None, None) => return Err(command.error(ErrorKind::MissingRequiredArgument, "no config file was given")),
    };
    Ok(request(what, line.flags, below))
}

/// Flags may stand on both sides of a subcommand; those behind it count where only one can.
fn request(what: What, above: Flags, below: Flags) -> Request {
    let mut sets = above.sets;
    sets.extend(below.sets);
    let files = [("output.json", below.json.or(above.json)), ("output.csv", below.csv.or(above.csv))];
    sets.extend(files.into_iter().filter_map(|(key, file)| file.map(|file| (key.to_owned(), file))));
    Request {
        what,
        ranks: below.ranks.or(above.ranks),
        sets,
        expect_ranks: below.expect_ranks.or(above.expect_ranks),
        quiet: above.quiet || below.quiet,
    }
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    let key = key.trim();
    check_set(key, value)?;
    Ok((key.to_owned(), value.to_owned()))
}

fn file(text: &str) -> Result<String, String> {
    check_set("output.json", text).map(|()| text.to_owned())
}

/// The table of settings for `--help`.
fn settings_help() -> String {
    let mut text = "Settings: TOML key, value, [default], environment variable\n".to_owned();
    for opt in OPTIONS {
        write!(text, "  {:<26} {} [{}] {}\n      {}", opt.key, kind(opt.kind), opt.default, opt.env, opt.help)
            .expect("writing to a String cannot fail");
        text.push_str(&honoured_by(opt));
        text.push('\n');
    }
    text.push_str("\nPatterns, in place of the transfers of a test: [[test]] pattern = NAME, with keys of their own\n");
    for spec in PATTERNS {
        writeln!(text, "  {}\n      {}", spec.name, spec.help).expect("writing to a String cannot fail");
        for own in spec.keys {
            writeln!(text, "    {:<24} {}\n      {}", own.key, kind(own.kind), own.help)
                .expect("writing to a String cannot fail");
        }
    }
    text.push_str(
        "\n--set wins over the environment, the environment over the config file. Sizes: K M G T and KiB\n\
         MiB GiB TiB are powers of 1024, kB MB GB TB powers of 1000, a bare number is bytes.",
    );
    text
}

fn honoured_by(opt: &Opt) -> String {
    let letters: Vec<String> = opt.honoured_by.iter().map(|kind| kind.letter().to_string()).collect();
    if letters.is_empty() { String::new() } else { format!(" (executor {})", letters.join(", ")) }
}

fn kind(kind: Kind) -> String {
    match kind {
        Kind::Choice(words) => words.join("|"),
        Kind::Switch(None) => "true|false".to_owned(),
        Kind::Switch(Some(word)) => format!("true|false|{word}"),
        Kind::Count(None) => "number".to_owned(),
        Kind::Count(Some(word)) => format!("number|{word}"),
        Kind::Seconds(None) => "seconds".to_owned(),
        Kind::Seconds(Some(word)) => format!("seconds|{word}"),
        Kind::Size => "size".to_owned(),
        Kind::Sizes => "size,..|from..to/per_octave".to_owned(),
        Kind::Rotation => "size|auto".to_owned(),
        Kind::Rotations => "size|auto,..".to_owned(),
        Kind::Percentages => "percent,..|none".to_owned(),
        Kind::Pattern => "hex|number,..|none".to_owned(),
        Kind::Place => "place".to_owned(),
        Kind::Numbers => "number,..|none".to_owned(),
        Kind::Path => "file|none".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str) -> Result<Request, clap::Error> {
        parse(std::iter::once("tb-mpi").chain(line.split_whitespace()))
    }

    fn sets(request: &Request) -> Vec<String> {
        request.sets.iter().map(|(key, value)| format!("{key}={value}")).collect()
    }

    #[test]
    fn a_run_needs_only_its_config() {
        let request = check("cfg.toml").unwrap();
        let what = What::Run { config: "cfg.toml".into() };
        assert_eq!(request, Request { what, ranks: None, sets: vec![], expect_ranks: None, quiet: false });
    }

    #[test]
    fn every_flag_is_read() {
        let request = check(
            "--ranks 4 --set data.bytes=1M,2M --json out.json cfg.toml --csv out.csv --expect-ranks 4 --quiet \
             --set src_rotate_bytes=64M",
        )
        .unwrap();
        assert_eq!((request.ranks, request.expect_ranks, request.quiet), (Some(4), Some(4), true));
        assert_eq!(
            sets(&request),
            ["data.bytes=1M,2M", "src_rotate_bytes=64M", "output.json=out.json", "output.csv=out.csv"]
        );
    }

    #[test]
    fn flags_count_on_both_sides_of_a_subcommand() {
        let request = check("--ranks 2 --set host.devices=1 plan cfg.toml --set host.devices=3 -q").unwrap();
        assert_eq!(request.what, What::Plan { config: "cfg.toml".into() });
        assert_eq!((request.ranks, request.quiet), (Some(2), true));
        assert_eq!(sets(&request), ["host.devices=1", "host.devices=3"]);
    }

    #[test]
    fn usage_errors_leave_with_2_and_say_why() {
        let cases = [
            ("", "required"),
            ("plan", "required"),
            ("a.toml b.toml", "b.toml"),
            ("a.toml plan b.toml", "before its config file"),
            ("a.toml --rank 2", "--ranks"),
            ("a.toml --ranks 0", "1..=1024"),
            ("a.toml --ranks 1025", "1..=1024"),
            ("a.toml --expect-ranks 0", "not in"),
            ("a.toml --set iterations", "KEY=VALUE"),
            ("a.toml --set run.iteratons=3", "did you mean run.iterations?"),
            ("a.toml --set run.iterations=0", "for ever"),
            ("a.toml --set data.byte_offset=3", "not a multiple of 4"),
        ];
        for (line, expected) in cases {
            let error = check(line).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line}");
            assert!(error.to_string().contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn help_lists_every_setting_in_lines_that_fit() {
        let help = check("--help").unwrap_err();
        assert_eq!(help.exit_code(), 0);
        let text = settings_help();
        for opt in OPTIONS {
            for part in [opt.key, opt.env, opt.help, opt.default] {
                assert!(text.contains(part), "{part}");
            }
        }
        for spec in PATTERNS {
            assert!(text.contains(spec.name) && spec.keys.iter().all(|own| text.contains(own.help)), "{}", spec.name);
        }
        for line in text.lines() {
            assert!(line.len() <= 98, "{line}");
        }
        assert!(help.to_string().contains("data.src_rotate_bytes"));
        assert_eq!(check("--version").unwrap_err().exit_code(), 0);
        Line::command().debug_assert();
    }

    #[test]
    fn text_that_is_not_utf8_is_no_panic() {
        use std::os::unix::ffi::OsStringExt;
        let odd = OsString::from_vec(vec![b'a', 0xff]);
        assert!(parse([OsString::from("tb-mpi"), odd.clone()]).is_ok());
        assert!(parse(["tb-mpi".into(), "cfg.toml".into(), OsString::from("--json"), odd]).is_err());
    }
}

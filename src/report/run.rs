//! The results of a run as they grow: printed test by test, on disk before the next test starts.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::collect::{PartSeconds, RankReport, collect, unmeasured};
use super::results::{Job, Outcome, RankEntry, Results, SCHEMA, SettingEntry, Tool};
use super::{csv, inflation, json, text, write};
use crate::config::settings::{Origin, Settings};
use crate::error::{Error, ExitCode, Failure};
use crate::fault::Faults;
use crate::plan::{Plan, PlannedTest};
use crate::world::World;

/// How a test ended: the ranks' reports (there on rank 0) with the time its parts took.
pub type TestOutcome = Result<(Option<Vec<RankReport>>, PartSeconds), Failure>;

const STYLE: text::TextStyle = text::TextStyle { ascii: false };

/// What is known of a run before its first test.
pub struct Facts {
    pub transport: String,
    pub launcher: Option<String>,
    pub command: Vec<String>,
    /// UTC, RFC 3339.
    pub started: String,
    pub quiet: bool,
    /// The config, which no output may replace.
    pub config: PathBuf,
    /// Nothing will run, so nothing is written.
    pub plan_only: bool,
    pub warnings: Vec<String>,
}

/// The report of a run; on rank 0 only.
pub struct RunReport {
    results: Results,
    world: World,
    json: Option<PathBuf>,
    csv: Option<PathBuf>,
    quiet: bool,
    /// Tests of `results` that have been printed.
    printed: usize,
    faults: Faults,
    exit: ExitCode,
}

impl RunReport {
    /// Prints the header.
    ///
    /// # Errors
    /// An output path that cannot be written: better now than after the measurement.
    pub fn begin(facts: Facts, settings: &Settings, world: World, faults: &Faults) -> Result<RunReport, Error> {
        let options = settings.options();
        let plan_only = facts.plan_only;
        let path = |key: &str, path: Option<&String>| {
            path.filter(|_| !plan_only).map(|path| beside_its_config(path, &settings.get(key).from))
        };
        let config = facts.config.clone();
        let report = RunReport {
            json: path("output.json", options.output_json.as_ref()),
            csv: path("output.csv", options.output_csv.as_ref()),
            quiet: facts.quiet,
            printed: 0,
            faults: faults.clone(),
            exit: ExitCode::Fine,
            results: header(facts, settings, &world),
            world,
        };
        for path in report.files() {
            write::check_writable(path).map_err(|err| err.with_exit(ExitCode::Rejected))?;
        }
        if let Some(path) = report.files().find(|path| write::is_same_file(path, &config)) {
            let path = path.display();
            return Err(Error::rejected(format!(
                "the results would replace the config {path}: give them another name"
            )));
        }
        if let (Some(json), Some(csv)) = (&report.json, &report.csv)
            && write::is_same_file(json, csv)
        {
            let path = json.display();
            return Err(Error::rejected(format!("JSON and CSV would both be written to {path}: give them two names")));
        }
        // An older run's file must not pass for this run's, should it end early.
        report.write()?;
        report.say(&text::header(&report.results, STYLE));
        Ok(report)
    }

    fn files(&self) -> impl Iterator<Item = &Path> {
        self.json.iter().chain(&self.csv).map(PathBuf::as_path)
    }

    fn say(&self, text: &str) {
        if !self.quiet
            && let Err(error) = write::print(text)
        {
            // The results files are the ones that count.
            tracing::warn!("{error}");
        }
    }

    /// What would run, instead of running it.
    pub fn print_plan(&self, plan: &Plan) {
        self.say(&text::plan::render(plan));
    }

    /// Adds a test (none = given up), and says whether later ones have to be given up.
    ///
    /// # Errors
    /// A results file that could not be written; what was measured is on stdout all the same.
    pub fn add(&mut self, test: &PlannedTest, outcome: Option<&TestOutcome>) -> Result<bool, Error> {
        let mut stop = outcome.is_none();
        let result = match outcome {
            None => unmeasured(test, Outcome::NotRun, None, PartSeconds::default()),
            Some(Ok((reports, seconds))) => {
                let reports = reports.as_ref().expect("rank 0 has every rank's report");
                collect(test, &self.world, reports, *seconds)
            }
            Some(Err(failure)) => {
                stop = failure.is_broken();
                self.raise(failure.exit());
                write::complain(&failure.to_string());
                unmeasured(test, Outcome::Failed, Some(failure.to_string()), PartSeconds::default())
            }
        };
        match result.outcome {
            Outcome::Mismatch => {
                self.raise(ExitCode::DataMismatch);
                // Validation of every iteration is for finding out what happened then and there.
                stop |= test.options.always_validate == crate::config::options::Validate::EveryIteration;
            }
            Outcome::OutsideExpectation => self.raise(ExitCode::BelowExpectation),
            Outcome::Passed | Outcome::Failed | Outcome::NotRun => {}
        }
        match self.results.tests.last_mut() {
            Some(before) if test.repeats => inflation::check_rotation(before, result),
            _ => {
                if !text::continues_group(&self.results.tests[self.printed..], test) {
                    self.print_finished();
                }
                self.results.tests.push(result);
            }
        }
        // What is not printed yet is one group: the steps of a sweep so far.
        inflation::mark_plateaus(&mut self.results.tests[self.printed..]);
        let written = self.write();
        if written.is_err() {
            self.print_finished();
        }
        written.map(|()| stop)
    }

    /// A mismatch weighs most, then a failed phase, then a missed expectation.
    fn raise(&mut self, code: ExitCode) {
        let weight = |code| match code {
            ExitCode::DataMismatch => 3,
            ExitCode::BelowExpectation => 1,
            ExitCode::Fine => 0,
            _ => 2,
        };
        if weight(code) > weight(self.exit) {
            self.exit = code;
        }
        self.results.exit_code = self.exit as i32;
    }

    fn print_finished(&mut self) {
        self.say(&text::finished_tests(&self.results, self.printed, STYLE));
        self.printed = self.results.tests.len();
    }

    fn write(&self) -> Result<(), Error> {
        if let Some(path) = &self.json {
            write::write_atomically(path, &json::render(&self.results), &self.faults)?;
        }
        if let Some(path) = &self.csv {
            write::write_atomically(path, &csv::render(&self.results), &self.faults)?;
        }
        Ok(())
    }

    /// Prints the rest, and marks the files as those of a run that ended in order.
    ///
    /// # Errors
    /// A results file that could not be written.
    pub fn finish(mut self, elapsed: Duration) -> Result<ExitCode, Error> {
        self.results.complete = true;
        self.print_finished();
        let written = self.write();
        let files: Vec<String> = self.files().map(|path| path.display().to_string()).collect();
        self.say(&text::footer(&self.results, elapsed, &files, STYLE));
        written.map(|()| self.exit)
    }
}

/// A path in a config file is relative to that file.
fn beside_its_config(path: &str, from: &Origin) -> PathBuf {
    match from {
        Origin::File { name, .. } => Path::new(name).parent().unwrap_or(Path::new("")).join(path),
        _ => PathBuf::from(path),
    }
}

fn header(facts: Facts, settings: &Settings, world: &World) -> Results {
    let runtime = world.ranks.iter().flat_map(|rank| &rank.devices).map(|device| device.runtime.clone()).next();
    Results {
        schema: SCHEMA,
        tool: Tool {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            git: env!("TB_GIT").to_owned(),
            features: cfg!(feature = "hip").then(|| "hip".to_owned()).into_iter().collect(),
        },
        job: Job {
            ranks: world.ranks.len() as u32,
            hosts: world.hosts.iter().map(|host| host.label.clone()).collect(),
            mpi: facts.transport,
            launcher: facts.launcher.unwrap_or_else(|| "none".to_owned()),
            command: facts.command,
            started: facts.started,
            emulated: runtime.as_deref().is_some_and(|runtime| runtime.contains("EMULATED")),
            backend: runtime,
        },
        settings: settings
            .iter()
            .map(|setting| {
                let (value, from) = (setting.value.clone(), setting.from.to_string());
                (setting.key.clone(), SettingEntry { value, from, is_default: setting.is_default() })
            })
            .collect(),
        world: (0..world.ranks.len()).map(|rank| rank_entry(world, rank)).collect(),
        warnings: facts.warnings.into_iter().chain(unknown_peaks(world)).collect(),
        exit_code: 0,
        complete: false,
        tests: Vec::new(),
    }
}

/// Why limits, clocks and throttle reasons are missing, each reason once for all devices.
fn unknown_peaks(world: &World) -> BTreeSet<String> {
    let devices = world.ranks.iter().flat_map(|rank| &rank.devices);
    devices
        .filter_map(|device| device.peaks.absent.as_ref())
        .map(|why| format!("links of devices and what throttles them are not known: {why}"))
        .collect()
}

fn rank_entry(world: &World, rank: usize) -> RankEntry {
    let inventory = &world.ranks[rank];
    RankEntry {
        host: world.hosts[world.host_of[rank] as usize].label.clone(),
        host_name: inventory.host_name.clone(),
        cpu_model: inventory.cpu_model.clone(),
        kernel: inventory.kernel.clone(),
        cpus_allowed: inventory.cpus_allowed(),
        numa: inventory.numa.clone(),
        caches: inventory.caches,
        memory_free: inventory.memory_free.0,
        devices: inventory.devices.clone(),
    }
}

//! The pipeline: the only place that orders the phases of a run and agrees on how they ended.

use std::time::{Duration, Instant};

use crate::cli::{Request, What};
use crate::comm::agree::{agree, failure, on_rank_0};
use crate::comm::hello::{self, Hello};
use crate::comm::launcher::Launcher;
use crate::comm::{Communicator, wire};
use crate::config::load::{self, Loaded};
use crate::config::settings::{self, Settings};
use crate::config::settle;
use crate::error::{Error, ExitCode, Failure, Phase};
use crate::fault::Faults;
use crate::measure::{self, circumstances};
use crate::memory::{self, Memory};
use crate::plan::local::LocalPlan;
use crate::plan::{self, Plan, PlannedTest};
use crate::prepare;
use crate::report::collect::PartSeconds;
use crate::report::ranks;
use crate::report::run::{Facts, RunReport, TestOutcome};
use crate::report::write;
use crate::units::Rank;
use crate::verify;
use crate::world;
use crate::world::machine::Machine;
use crate::world::meet::{self, Met};

/// What the process edge hands to every rank.
pub struct Job<'a> {
    pub request: Request,
    pub launcher: Option<Launcher>,
    /// Reads this rank's environment.
    pub env: &'a (dyn Fn(&str) -> Option<String> + Sync),
    pub env_names: Vec<String>,
    /// Name and version of what connects the ranks.
    pub transport: String,
    /// Processes in this process's own view: 1 where ranks are threads.
    pub processes: u32,
    /// Reads a file; rank 0 alone does, the config.
    pub read_file: &'a (dyn Fn(&std::path::Path) -> std::io::Result<Vec<u8>> + Sync),
    pub command: Vec<String>,
    /// UTC, RFC 3339.
    pub started: String,
}

/// Runs the job on this rank; every rank returns the same code.
pub fn run(comm: &dyn Communicator, job: &Job, faults: &Faults) -> ExitCode {
    match pipeline(comm, job, faults) {
        Ok(code) => code,
        Err(failure) => {
            if comm.rank().0 == 0 {
                write::complain(&failure.to_string());
            }
            failure.exit()
        }
    }
}

fn pipeline(comm: &dyn Communicator, job: &Job, faults: &Faults) -> Result<ExitCode, Failure> {
    comm.watch().enter(Phase::Hello);
    greet(comm, job)?;

    comm.watch().enter(Phase::Settle);
    let config = on_rank_0(comm, Phase::Settle, || load::load(job.request.what.config(), job.read_file))?;
    let settings = settle(comm, job, config.as_ref())?;
    comm.watch().set_deadline(Duration::from_secs_f64(settings.options().deadline_seconds));

    comm.watch().enter(Phase::Inventory);
    let options = settings.options();
    let machine = agree(comm, Phase::Inventory, Machine::open(&options, faults.clone()))?;
    let Met { world, seat, kept } = meet::meet(comm, &machine.inventory, options.gpus, faults);
    let machine = machine.seated(seat, &kept);
    let world = meet::weigh(comm, world, &machine);

    comm.watch().enter(Phase::Plan);
    let plan = plan(comm, config.as_ref(), &settings, world.as_ref())?;
    let mut report = on_rank_0(comm, Phase::Plan, || {
        let world = world.expect("rank 0 has met the world");
        RunReport::begin(facts(job), &settings, world, faults)
    })?;
    if matches!(job.request.what, What::Plan { .. }) {
        report.iter_mut().for_each(|report| report.print_plan(&plan));
        return Ok(ExitCode::Fine);
    }

    let (began, mut broken) = (Instant::now(), false);
    for test in plan.tests() {
        let outcome = if broken { None } else { Some(run_test(comm, test, &machine)) };
        comm.watch().enter(Phase::Report);
        let recorded = on_rank_0(comm, Phase::Report, || {
            let report = report.as_mut().expect("rank 0 reports");
            report.add(test, outcome.as_ref())
        })?;
        broken = wire::broadcast(comm, recorded);
    }
    let code = on_rank_0(comm, Phase::Report, || report.take().expect("rank 0 reports").finish(began.elapsed()))?;
    Ok(wire::broadcast(comm, code))
}

fn facts(job: &Job) -> Facts {
    Facts {
        transport: job.transport.clone(),
        launcher: job.launcher.as_ref().map(|launcher| launcher.name.to_owned()),
        command: job.command.clone(),
        started: job.started.clone(),
        quiet: job.request.quiet,
        config: job.request.what.config().to_owned(),
        plan_only: matches!(job.request.what, What::Plan { .. }),
        warnings: warnings(job),
    }
}

fn warnings(job: &Job) -> Vec<String> {
    let fault = (job.env)("TB_FAULT").map(|spec| format!("this run injects a fault on purpose: TB_FAULT={spec}"));
    settings::ignored_environment(&job.env_names).into_iter().chain(fault).collect()
}

fn greet(comm: &dyn Communicator, job: &Job) -> Result<(), Failure> {
    let request = &job.request;
    let command = u32::from(matches!(request.what, What::Plan { .. }));
    let (host, launcher) = (comm.watch().host(), job.launcher.as_ref());
    let mine = Hello::of_this_build(host, job.processes, launcher, request.expect_ranks, command);
    let hosts = hello::greet(comm, &mine, job.launcher.as_ref())?;
    let ranks = (0..).map(Rank);
    comm.watch().set_hosts(ranks.zip(hosts));
    Ok(())
}

/// Every rank's own environment over the one file, the same everywhere before anything is allocated.
fn settle(comm: &dyn Communicator, job: &Job, config: Option<&Loaded>) -> Result<Settings, Failure> {
    let file = wire::broadcast(comm, config.map(|config| config.file().clone()));
    let effective =
        settings::effective(&file, job.env, &job.request.sets).map_err(|problems| Error::rejected(problems.join("\n")));
    let settings = agree(comm, Phase::Settle, effective)?;
    let reference = wire::broadcast(comm, (comm.rank().0 == 0).then(|| settings.clone()));
    let mine = (comm.watch().host().to_owned(), settings::differences(&settings, &reference));
    let all = wire::gather(comm, &mine);
    on_rank_0(comm, Phase::Settle, || {
        let all = all.expect("rank 0 gathers");
        settle::disagreement(&reference, &all).map_or(Ok(()), |text| Err(Error::rejected(text)))
    })?;
    Ok(settings)
}

/// Rank 0 makes the plan; all ranks then hold the same one.
fn plan(
    comm: &dyn Communicator,
    config: Option<&Loaded>,
    settings: &Settings,
    world: Option<&world::World>,
) -> Result<Plan, Failure> {
    let plan = on_rank_0(comm, Phase::Plan, || {
        let (config, world) = (config.expect("rank 0 has the config"), world.expect("rank 0 has met the world"));
        plan::build::build(config.config(), settings, world).map_err(|problems| config.reject(&problems))
    })?;
    let plan: Plan = wire::broadcast(comm, plan);
    let mine = wire::fingerprint(&plan);
    let same = wire::gather(comm, &mine).map(|all| all.iter().all(|one| *one == mine));
    on_rank_0(comm, Phase::Plan, || match same {
        Some(false) => Err(Error::rejected("ranks received different plans: is the network corrupting messages?")),
        _ => Ok(()),
    })?;
    Ok(plan)
}

/// Phases 5 to 10 and 12 of one test. Everything it allocates is gone when it returns.
fn run_test(comm: &dyn Communicator, test: &PlannedTest, machine: &Machine) -> TestOutcome {
    let watch = comm.watch();
    let mut seconds = PartSeconds::default();
    let started = Instant::now();

    watch.enter(Phase::Allocate);
    let local = LocalPlan::cut(test, comm.rank());
    let mut allocated = agree(comm, Phase::Allocate, memory::allocate(local, machine))?;

    watch.enter(Phase::Share);
    let handles = memory::exchange_handles(comm, &mut allocated);
    let linked = agree_holding(comm, Phase::Share, memory::link(allocated, handles, machine))?;
    linked.memory.close_exports();

    watch.enter(Phase::Prepare);
    let prepared = agree_holding(comm, Phase::Prepare, prepare::prepare(linked, test, machine))?;
    let prepared = match test.options.validate_source {
        true => agree_holding(comm, Phase::Prepare, verify::phase::sources(prepared, watch))?,
        false => prepared,
    };
    seconds.setup = started.elapsed().as_secs_f64();

    watch.enter(Phase::Run);
    let started = Instant::now();
    let mut check = |prepared: &prepare::Prepared, last| verify::phase::all_right(prepared, last, watch);
    let before = circumstances::read(machine);
    let measured = measure::run(comm, prepared, test, &mut check);
    let after = circumstances::read(machine);
    let measured = agree_holding(comm, Phase::Run, measured.ended())?;
    seconds.run = started.elapsed().as_secs_f64();

    watch.enter(Phase::Verify);
    let started = Instant::now();
    let verified = agree_holding(comm, Phase::Verify, verify::phase::verify(measured, watch))?;
    seconds.verify = started.elapsed().as_secs_f64();

    watch.enter(Phase::Gather);
    let report = ranks::rank_report(comm.rank(), watch.host(), &verified, [&before, &after]);
    let reports = wire::gather(comm, &report);

    watch.enter(Phase::Release);
    memory::release(comm, verified.into());
    Ok((reports, seconds))
}

/// `agree` for steps whose memory other ranks may have open: on a failure it is released by all.
fn agree_holding<T: Into<Memory>>(
    comm: &dyn Communicator,
    phase: Phase,
    result: Result<T, (Error, Memory)>,
) -> Result<T, Failure> {
    match failure(comm, phase, result.as_ref().err().map(|(error, _)| error)) {
        None => Ok(result.map_err(|(error, _)| error).expect("no rank failed")),
        Some(failure) => {
            comm.watch().enter(Phase::Release);
            memory::release(comm, result.map_or_else(|(_, memory)| memory, Into::into));
            Err(failure)
        }
    }
}

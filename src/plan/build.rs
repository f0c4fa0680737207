//! Makes the plan: every test, size and rotation spelt out, everything checked against the world.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::expand::{Expanded, expand};
use super::rotation::{GUARD, Layout, dst_rotate_bytes, rotate_bytes, too_small};
use super::split::shares;
use super::{PatternStep, Plan, PlannedTest, Transfer, check, patterns, placement};
use crate::config::options::{Options, RotateBytes};
use crate::config::settings::Settings;
use crate::config::{Config, Problem, TestConfig};
use crate::units::Bytes;
use crate::world::World;

/// Problems told at once; the others are counted.
const PROBLEMS_MAX: usize = 50;

/// Spells out a config for the whole job.
///
/// # Errors
/// Every problem of every test at once, each with its place in the config.
pub fn build(config: &Config, settings: &Settings, world: &World) -> Result<Plan, Vec<Problem>> {
    let mut problems = Vec::new();
    let mut tests = Vec::new();
    for test in &config.tests {
        match test.options(settings) {
            Ok(options) => {
                let own = own_settings(test, settings);
                plan_test(test, &options, &own, world, &mut tests, &mut problems);
            }
            Err(more) => problems.extend(more),
        }
    }
    // The same problem at every size of a sweep is one problem.
    let mut seen = BTreeSet::new();
    problems.retain(|problem| seen.insert((problem.span.clone().map(|s| (s.start, s.end)), problem.message.clone())));
    let more = problems.len().saturating_sub(PROBLEMS_MAX);
    if more > 0 {
        problems.truncate(PROBLEMS_MAX);
        problems.push(Problem { message: format!("and {more} more problems like these"), span: None, help: None });
    }
    if problems.is_empty() { Ok(Plan { tests }) } else { Err(problems) }
}

/// What a test sets for itself and nothing outranks.
fn own_settings(test: &TestConfig, settings: &Settings) -> Vec<(String, String)> {
    let in_force = |key: &str| !settings.get(key).from.outranks_file();
    let own =
        test.overrides.iter().filter(|(key, ..)| in_force(key)).map(|(key, value, _)| (key.clone(), value.clone()));
    let brought = test.brought_along(settings).map(|(key, value)| (key.to_owned(), value.to_owned()));
    brought.chain(own).collect()
}

/// One of the tests that a `[[test]]` stands for.
struct Part {
    name: String,
    pattern: Option<PatternStep>,
    options: Options,
    drafts: Vec<Draft>,
}

/// A transfer after expansion, with what the config says of it.
struct Draft {
    span: Range<usize>,
    bytes: Option<Bytes>,
    sub_executors: Option<u32>,
    parts: Expanded,
}

fn plan_test(
    test: &TestConfig,
    options: &Options,
    own: &[(String, String)],
    world: &World,
    tests: &mut Vec<PlannedTest>,
    problems: &mut Vec<Problem>,
) {
    let about_data = match super::data::check(options) {
        Ok(warnings) => warnings,
        Err(message) => return problems.push(Problem::at(test.span.clone(), message)),
    };
    let before = problems.len();
    let parts = parts(test, options, world, problems);
    for Draft { span, parts, .. } in parts.iter().flat_map(|part| &part.drafts) {
        problems.extend(check::transfer(parts, world).into_iter().map(|message| Problem::at(span.clone(), message)));
        let devices = world.inventory(parts.exe.rank).map_or(&[][..], |inventory| &inventory.devices);
        problems.extend(
            placement::check(parts, options, devices).into_iter().map(|message| Problem::at(span.clone(), message)),
        );
    }
    if problems.len() > before {
        return;
    }
    for Part { name, pattern, options, drafts } in &parts {
        // A sweep is run once if no transfer follows it.
        let swept = drafts.iter().any(|draft| draft.bytes.is_none());
        let sizes = if swept { options.bytes.as_slice() } else { &options.bytes[..1] };
        let steps = sizes.iter().flat_map(|bytes| options.src_rotate_bytes.iter().map(move |rotate| (*bytes, *rotate)));
        for (bytes, rotate) in steps {
            match plan_step(drafts, options, world, bytes, rotate, 1) {
                Ok(mut step) => {
                    step.name = name.clone();
                    step.pattern = pattern.clone();
                    step.expect = test.expect;
                    step.own_settings = own.to_vec();
                    step.warnings.extend(about_data.iter().cloned());
                    let too_large = check::memory(&step, world);
                    problems.extend(too_large.into_iter().map(|text| Problem::at(test.span.clone(), text)));
                    let twice = options.rotation_check.then(|| twice(&step, drafts, world, rotate));
                    tests.push(step);
                    match twice.transpose() {
                        Ok(twice) => {
                            let twice = twice.flatten();
                            let too_large = twice.iter().flat_map(|twice| check::memory(twice, world));
                            problems.extend(too_large.map(|text| Problem::at(test.span.clone(), text)));
                            tests.extend(twice);
                        }
                        Err((span, message)) => problems.push(Problem::at(span, message)),
                    }
                }
                Err((span, message)) => problems.push(Problem::at(span, message)),
            }
        }
    }
}

/// The transfers of a `[[test]]`, written out or made by a pattern.
fn parts(test: &TestConfig, options: &Options, world: &World, problems: &mut Vec<Problem>) -> Vec<Part> {
    let Some(pattern) = &test.pattern else {
        let mut drafts = Vec::new();
        for config in &test.transfers {
            let draft = |parts| Draft {
                span: config.span.clone(),
                bytes: config.bytes,
                sub_executors: config.sub_executors,
                parts,
            };
            match expand(config, world) {
                Ok(list) => drafts.extend(list.into_iter().map(draft)),
                Err(messages) => {
                    problems.extend(messages.into_iter().map(|text| Problem::at(config.span.clone(), text)));
                }
            }
        }
        return vec![Part { name: test.name.clone(), pattern: None, options: options.clone(), drafts }];
    };
    let spelt_out = match patterns::tests(pattern, options, world) {
        Ok(tests) => tests,
        Err(refusal) => {
            let name = pattern.spec().name;
            let message = format!("pattern \"{name}\": {}", refusal.message);
            problems.push(Problem::at(pattern.span_of(refusal.key), message));
            return Vec::new();
        }
    };
    let part = |made: patterns::PatternTest| {
        let drafts = made.transfers.into_iter().map(|transfer| Draft {
            span: pattern.span_of(None),
            bytes: transfer.bytes,
            sub_executors: transfer.sub_executors,
            parts: transfer.parts,
        });
        Part {
            name: format!("{}: {}", test.name, made.part),
            pattern: Some(PatternStep {
                name: pattern.spec().name.to_owned(),
                test: test.name.clone(),
                part: made.part,
            }),
            options: made.options,
            drafts: drafts.collect(),
        }
    };
    spelt_out.into_iter().map(part).collect()
}

type Placed<T> = Result<T, (Range<usize>, String)>;

/// A step again with twice its footprint, or nothing where it does not rotate.
fn twice(step: &PlannedTest, drafts: &[Draft], world: &World, rotate: RotateBytes) -> Placed<Option<PlannedTest>> {
    let options = Options { cold_iterations: 0, ..step.options.clone() };
    let mut twice = plan_step(drafts, &options, world, step.bytes, rotate, 2)?;
    let shapes = |transfer: &Transfer| (transfer.src.slices, transfer.dst.slices);
    if step.transfers.iter().map(shapes).eq(twice.transfers.iter().map(shapes)) {
        return Ok(None);
    }
    twice.repeats = true;
    (twice.name, twice.pattern, twice.own_settings) =
        (step.name.clone(), step.pattern.clone(), step.own_settings.clone());
    // What there is to say was said of the step.
    twice.warnings.clear();
    Ok(Some(twice))
}

/// One size and one rotation of a test, over so many times the footprint.
fn plan_step(
    drafts: &[Draft],
    options: &Options,
    world: &World,
    bytes: Bytes,
    rotate: RotateBytes,
    times: u64,
) -> Placed<PlannedTest> {
    let mut on_executor: BTreeMap<_, u32> = BTreeMap::new();
    for draft in drafts {
        *on_executor.entry(draft.parts.exe).or_default() += 1;
    }
    let mut warnings = BTreeSet::new();
    let mut largest_rotation = Bytes::ZERO;
    let mut transfers = Vec::with_capacity(drafts.len());
    for (index, draft) in drafts.iter().enumerate() {
        let Expanded { srcs, exe, dsts } = draft.parts.clone();
        let size = draft.bytes.unwrap_or(bytes);
        let asked = draft.sub_executors.or(options.sub_executors);
        let sub_executors =
            asked.unwrap_or_else(|| (check::width(exe, &options.gfx, world) / on_executor[&exe]).max(1));
        let cache = super::caches::on_path(&srcs, exe, world);
        let (rotation, capped) = rotate_bytes(rotate, cache, &srcs, world);
        largest_rotation = largest_rotation.max(rotation);
        let rotated = super::rotation::in_scope(options.src_rotate_scope, &srcs, exe);
        let shape = |rotate: Bytes, guard| {
            let layout = |rotate| {
                let layout = Layout::new(size, rotate, options.byte_offset, guard);
                layout.map_err(|message| (draft.span.clone(), message))
            };
            match times {
                2.. if rotate > Bytes::ZERO => layout(Bytes(layout(rotate)?.footprint().0.saturating_mul(times))),
                _ => layout(rotate),
            }
        };
        let src_rotation = if rotated { rotation } else { Bytes::ZERO };
        let src = shape(src_rotation, Bytes::ZERO)?;
        let dst = shape(dst_rotate_bytes(options.dst_rotate_bytes, src_rotation, &srcs, exe, &dsts), GUARD)?;
        if rotated && !srcs.is_empty() && rotation > Bytes::ZERO {
            warnings.extend(capped);
            warnings.extend(too_small(&src, srcs.len(), cache));
        }
        if !rotated && !srcs.is_empty() && rotation > Bytes::ZERO {
            warnings.insert(
                "host-resident sources and CPU executors are not rotated: src_rotate_scope = \"gpu\"; set it to \"all\" to keep caches out of these figures".to_owned(),
            );
        }
        let busy = shares(size, sub_executors, options.block_bytes).len() as u32;
        if busy < sub_executors {
            warnings.insert(format!(
                "{sub_executors} sub-executors asked for {size} in blocks of {}: {busy} have work, the others idle",
                options.block_bytes
            ));
        }
        transfers.push(Transfer { index: index as u32, bytes: size, srcs, exe, dsts, sub_executors, cache, src, dst });
    }
    warnings.extend(check::crowding(&transfers, &options.gfx, world));
    Ok(PlannedTest {
        name: String::new(),
        pattern: None,
        bytes,
        src_rotate_bytes: largest_rotation,
        options: options.clone(),
        own_settings: Vec::new(),
        transfers,
        expect: None,
        repeats: false,
        warnings: warnings.into_iter().collect(),
    })
}

//! Makes the plan: every test, size and rotation spelt out, everything checked against the world.

use std::collections::{BTreeMap, BTreeSet};

use super::expand::{Expanded, expand};
use super::rotation::{GUARD, Layout, dst_rotate_bytes, rotate_bytes, too_small};
use super::split::shares;
use super::{Plan, PlannedTest, Transfer, check};
use crate::config::options::{Options, RotateBytes};
use crate::config::settings::Settings;
use crate::config::{Config, Problem, TestConfig, TransferConfig};
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
    let own = test.overrides.iter().filter(|(key, ..)| in_force(key));
    own.map(|(key, value, _)| (key.clone(), value.clone())).collect()
}

/// A transfer of the config after expansion, with what it is named by.
struct Draft<'a> {
    config: &'a TransferConfig,
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
    let mut drafts = Vec::new();
    let before = problems.len();
    for config in &test.transfers {
        let here = |message| Problem::at(config.span.clone(), message);
        match expand(config, world) {
            Ok(list) => {
                for parts in list {
                    problems.extend(check::transfer(&parts, world).into_iter().map(here));
                    drafts.push(Draft { config, parts });
                }
            }
            Err(messages) => problems.extend(messages.into_iter().map(here)),
        }
    }
    if problems.len() > before {
        return;
    }
    // A sweep is run once if no transfer follows it.
    let swept = drafts.iter().any(|draft| draft.config.bytes.is_none());
    let sizes = if swept { options.bytes.as_slice() } else { &options.bytes[..1] };
    for bytes in sizes {
        for rotate in &options.src_rotate_bytes {
            match plan_step(&drafts, options, world, *bytes, *rotate) {
                Ok(mut step) => {
                    step.name = test.name.clone();
                    step.expect = test.expect;
                    step.own_settings = own.to_vec();
                    step.warnings.extend(about_data.iter().cloned());
                    let too_large = check::memory(&step, world);
                    problems.extend(too_large.into_iter().map(|text| Problem::at(test.span.clone(), text)));
                    tests.push(step);
                }
                Err((span, message)) => problems.push(Problem::at(span, message)),
            }
        }
    }
}

type Placed<T> = Result<T, (std::ops::Range<usize>, String)>;

/// One size and one rotation of a test.
fn plan_step(
    drafts: &[Draft],
    options: &Options,
    world: &World,
    bytes: Bytes,
    rotate: RotateBytes,
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
        let size = draft.config.bytes.unwrap_or(bytes);
        let asked = draft.config.sub_executors.or(options.sub_executors);
        let sub_executors =
            asked.unwrap_or_else(|| (check::width(exe, &options.gfx, world) / on_executor[&exe]).max(1));
        let cache = super::caches::on_path(&srcs, exe, world);
        let (rotation, capped) = rotate_bytes(rotate, cache, &srcs, world);
        largest_rotation = largest_rotation.max(rotation);
        let rotated = super::rotation::in_scope(options.src_rotate_scope, &srcs, exe);
        let shape = |rotate, guard| {
            Layout::new(size, rotate, options.byte_offset, guard)
                .map_err(|message| (draft.config.span.clone(), message))
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
        bytes,
        src_rotate_bytes: largest_rotation,
        options: options.clone(),
        own_settings: Vec::new(),
        transfers,
        expect: None,
        warnings: warnings.into_iter().collect(),
    })
}

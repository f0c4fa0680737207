//! Pattern `rotation`: what a fixed source hides, between two memories, pulled and pushed.

use super::{PatternTest, PatternTransfer, Refusal};
use crate::config::notation::{self, Indexes};
use crate::config::options::{Options, RotateBytes, RotateScope};
use crate::config::patterns::PatternConfig;
use crate::place::{ExeKind, Executor, MemKind, Place};
use crate::plan::expand::Expanded;
use crate::units::{Bytes, Rank};
use crate::world::{Inventory, World};

/// Pull and push of one transfer at a time, or one local copy where both ends are one memory; every
/// size first without rotation.
pub fn tests(config: &PatternConfig, options: &Options, world: &World) -> Result<Vec<PatternTest>, Refusal> {
    let kind = config.get("executor").filter(|word| *word != "auto").map(|word| {
        let letter = word.chars().next().and_then(ExeKind::from_letter);
        letter.expect("the key's words are letters of executors")
    });
    let [src, dst] = ends(config, kind, world)?;
    let options = Options { src_rotate_bytes: off_and(&options.src_rotate_bytes), ..options.clone() };
    let test = |part: &str, at: Place| {
        let exe = executor(at, kind)?;
        let parts = Expanded { srcs: vec![src], exe, dsts: vec![dst] };
        check_scope(&parts, &options)?;
        let transfers = vec![PatternTransfer { parts, bytes: None, sub_executors: None }];
        Ok(PatternTest { part: part.to_owned(), options: options.clone(), transfers })
    };
    if src == dst { Ok(vec![test("local", src)?]) } else { Ok(vec![test("pull", dst)?, test("push", src)?]) }
}

/// No rotation, then every one that was asked for.
fn off_and(asked: &[RotateBytes]) -> Vec<RotateBytes> {
    let off = RotateBytes::Size(Bytes::ZERO);
    std::iter::once(off).chain(asked.iter().copied().filter(|rotate| *rotate != off)).collect()
}

/// Source and destination: those that the config names, or the first two memories of the kind that
/// reach each other.
fn ends(config: &PatternConfig, kind: Option<ExeKind>, world: &World) -> Result<[Place; 2], Refusal> {
    match (config.get("src"), config.get("dst")) {
        (Some(src), Some(dst)) => Ok([named("src", src, world)?, named("dst", dst, world)?]),
        (None, None) => match kind {
            Some(ExeKind::Cpu) => host_ends(world),
            Some(_) => device_ends(world).ok_or_else(|| refusal(Some("executor"), "no rank has a device".to_owned())),
            None => device_ends(world).map_or_else(|| host_ends(world), Ok),
        },
        (src, _) => {
            let (given, other) = if src.is_some() { ("src", "dst") } else { ("dst", "src") };
            Err(refusal(Some(given), format!("{given} is one of two ends: give {other} too, or neither")))
        }
    }
}

fn refusal(key: Option<&'static str>, message: String) -> Refusal {
    Refusal { key, message }
}

fn named(key: &'static str, text: &str, world: &World) -> Result<Place, Refusal> {
    let number = |indexes: &Indexes| match indexes {
        Indexes::List(list) => list.first().copied(),
        Indexes::All => None,
    };
    let pieces = notation::parse_memories(text).expect("the config has checked it");
    let (rank, index) = pieces
        .first()
        .and_then(|piece| Some((number(piece.rank.as_ref()?)?, number(&piece.index)?)))
        .expect("the config has checked that it is one memory");
    let place = Place { rank: Rank(rank), kind: pieces[0].kind, index };
    let Some(inventory) = world.inventory(place.rank) else {
        return Err(refusal(
            Some(key),
            format!("rank {rank} does not exist (the job has {} ranks)", world.ranks.len()),
        ));
    };
    let devices = !place.kind.is_host() || place.kind == MemKind::PinnedNear;
    let (count, what) = if devices { (inventory.devices.len(), "device") } else { (inventory.numa.len(), "NUMA node") };
    if index as usize >= count {
        return Err(refusal(Some(key), format!("{what} {index} does not exist on rank {rank} (it has {count})")));
    }
    Ok(place)
}

/// Device 0 of the first rank that has one, and the nearest other: of another rank of its host, else
/// its own second one, else itself.
fn device_ends(world: &World) -> Option<[Place; 2]> {
    let count = |rank: Rank| world.inventory(rank).map_or(0, |inventory| inventory.devices.len());
    let ranks = || (0..world.ranks.len() as u32).map(Rank);
    let first = ranks().find(|rank| count(*rank) > 0)?;
    let device = |rank, index| Place { rank, kind: MemKind::Device, index };
    let other = ranks().find(|rank| *rank != first && world.same_host(first, *rank) && count(*rank) > 0);
    let second = other.map_or_else(|| device(first, u32::from(count(first) > 1)), |rank| device(rank, 0));
    Some([device(first, 0), second])
}

/// Node 0 of rank 0, and of another rank of its host, else its own second one with CPUs, else itself.
fn host_ends(world: &World) -> Result<[Place; 2], Refusal> {
    let usable = |rank: Rank| {
        let node = |inventory: &Inventory| {
            let good = |node: &crate::world::NumaNode| node.memory_allowed && !node.cpus_allowed.is_empty();
            let all = inventory.numa.iter().enumerate().filter(|(_, node)| good(node));
            all.map(|(index, _)| index as u32).collect::<Vec<u32>>()
        };
        world.inventory(rank).map(node).unwrap_or_default()
    };
    let memory = |rank, index| Place { rank, kind: MemKind::Pinned, index };
    let own = usable(Rank(0));
    let Some(first) = own.first() else {
        return Err(refusal(None, "rank 0 has no NUMA node with both memory and CPUs that it may use".to_owned()));
    };
    let other = (1..world.ranks.len() as u32).map(Rank).filter(|rank| world.same_host(Rank(0), *rank));
    let other = other.filter_map(|rank| Some(memory(rank, *usable(rank).first()?))).next();
    let second = other.unwrap_or_else(|| memory(Rank(0), *own.get(1).unwrap_or(first)));
    Ok([memory(Rank(0), *first), second])
}

/// The executor that sits with a memory.
fn executor(at: Place, asked: Option<ExeKind>) -> Result<Executor, Refusal> {
    let kind = asked.unwrap_or(if at.kind.is_host() { ExeKind::Cpu } else { ExeKind::Kernel });
    let fits = match kind {
        ExeKind::Cpu => at.kind.is_host() && at.kind != MemKind::PinnedNear,
        _ => !at.kind.is_host(),
    };
    if !fits {
        let message =
            format!("executor {} does not sit with {at}: leave it out, or name another memory", kind.letter());
        return Err(refusal(Some("executor"), message));
    }
    Ok(Executor { rank: at.rank, kind, index: at.index, sub_index: None })
}

/// Without rotation there is nothing to see.
fn check_scope(parts: &Expanded, options: &Options) -> Result<(), Refusal> {
    let rotates = crate::plan::rotation::in_scope(options.src_rotate_scope, &parts.srcs, parts.exe);
    if rotates || options.src_rotate_scope == RotateScope::All {
        return Ok(());
    }
    Err(refusal(
        None,
        format!(
            "{} -> {} -> {} is not rotated with src_rotate_scope = \"gpu\": set it to \"all\"",
            parts.srcs[0], parts.exe, parts.dsts[0]
        ),
    ))
}

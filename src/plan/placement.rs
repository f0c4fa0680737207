//! Where on a device an executor runs: compute units, XCCs, copy engines.

use super::expand::Expanded;
use crate::config::options::{Gfx, Options};
use crate::gpu::{DeviceInfo, TransferVariant};
use crate::place::{ExeKind, Executor, Place};

/// The XCC that a transfer has to run on: the executor's sub-index, else that of the table for a
/// single destination in device memory.
pub fn xcc(exe: Executor, dsts: &[Place], gfx: &Gfx) -> Option<u32> {
    if exe.sub_index.is_some() || exe.kind != ExeKind::Kernel {
        return exe.sub_index.filter(|_| exe.kind == ExeKind::Kernel);
    }
    let [dst] = dsts else { return None };
    if dst.kind.is_host() {
        return None;
    }
    let (row, column, side) = (exe.index as usize, dst.index as usize, gfx.xcc_preference.len().isqrt());
    (row < side && column < side).then(|| gfx.xcc_preference[row * side + column])
}

/// What the executor's device cannot do of it.
pub fn check(parts: &Expanded, options: &Options, devices: &[DeviceInfo]) -> Vec<String> {
    let exe = parts.exe;
    let Some(info) = devices.get(exe.index as usize) else { return Vec::new() };
    let problems = match exe.kind {
        ExeKind::Kernel => {
            [xcc_problem(parts, info, &options.gfx, devices.len()), mask_problem(info, &options.gfx.cu_mask)]
        }
        ExeKind::CopyEngine => [engine_problem(exe, info), no_cu_problem(info, options.dma_no_cu)],
        _ => [None, None],
    };
    problems.into_iter().flatten().map(|problem| format!("{exe}: {problem}")).collect()
}

fn xcc_problem(parts: &Expanded, info: &DeviceInfo, gfx: &Gfx, devices: usize) -> Option<String> {
    let (name, xccs) = (&info.name, info.xccs);
    let side = gfx.xcc_preference.len().isqrt();
    if side > 0 && side != devices {
        return Some(format!(
            "gfx.xcc_preference has {side} rows, and rank {} has {devices} devices: give {devices} x {devices} numbers",
            parts.exe.rank
        ));
    }
    let far = parts.dsts.first().filter(|dst| !dst.kind.is_host() && dst.index as usize >= side);
    if let (true, Some(dst)) = (side > 0, far) {
        return Some(format!("gfx.xcc_preference has {side} columns: none for {dst}"));
    }
    let xcc = xcc(parts.exe, &parts.dsts, gfx)?;
    match (info.runtime.as_str(), xccs) {
        ("cuda", _) => Some(format!("NVIDIA devices have no XCCs: leave out the choice of XCC {xcc}")),
        (_, 0) => Some(format!("the runtime does not tell how many XCCs {name} has: that needs HIP 7")),
        (_, xccs) if xcc >= xccs => Some(format!("XCC {xcc} does not exist: {name} has {xccs}, numbered from 0")),
        _ if !TransferVariant::tells_xcc(&info.architecture, xccs) => {
            Some(format!("a kernel cannot tell on which XCC of {name} ({}) it runs", info.architecture))
        }
        _ => None,
    }
}

fn mask_problem(info: &DeviceInfo, mask: &[u32]) -> Option<String> {
    let last = mask.last()?;
    let (name, units) = (&info.name, info.compute_units / info.xccs.max(1));
    match info.runtime.as_str() {
        "cuda" => Some("NVIDIA devices have no masks of compute units: leave out gfx.cu_mask".to_owned()),
        _ if !info.cu_masks => Some(format!("{name} takes no gfx.cu_mask here: its runtime has no masks")),
        _ if *last >= units => {
            Some(format!("gfx.cu_mask names compute unit {last}: {name} has {units} on each XCC, numbered from 0"))
        }
        _ => None,
    }
}

fn engine_problem(exe: Executor, info: &DeviceInfo) -> Option<String> {
    let engine = exe.sub_index?;
    Some(match info.runtime.as_str() {
        "cuda" => format!("NVIDIA devices offer no choice of copy engine: leave out .{engine}"),
        "hip" => format!(
            "HIP offers no choice of copy engine, and this version does not call HSA, which does: leave out .{engine}"
        ),
        _ => format!("{} has one copy engine: leave out .{engine}", info.name),
    })
}

fn no_cu_problem(info: &DeviceInfo, no_cu: bool) -> Option<String> {
    let name = &info.name;
    match info.runtime.as_str() {
        _ if !no_cu || info.no_cu_copies => None,
        "cuda" => Some("CUDA cannot keep copies from multiprocessors: leave out dma.no_cu".to_owned()),
        _ => Some(format!("copies by {name} cannot be kept from compute units: dma.no_cu needs HIP 6")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::OPTIONS;
    use crate::place::MemKind;
    use crate::report::fixtures;
    use crate::units::Rank;

    fn info(runtime: &str, architecture: &str, xccs: u32) -> DeviceInfo {
        let able = runtime == "hip" && xccs > 0;
        DeviceInfo {
            name: "GPU".into(),
            runtime: runtime.into(),
            architecture: architecture.into(),
            compute_units: 304,
            xccs,
            cu_masks: able,
            no_cu_copies: able,
            ..fixtures::device()
        }
    }

    fn parts(kind: ExeKind, sub_index: Option<u32>, dst: u32) -> Expanded {
        let place = |index| Place { rank: Rank(0), kind: MemKind::Device, index };
        let exe = Executor { rank: Rank(0), kind, index: 0, sub_index };
        Expanded { srcs: vec![place(0)], exe, dsts: vec![place(dst)] }
    }

    fn said(parts: &Expanded, settings: &[(&str, &str)], info: &DeviceInfo) -> String {
        let mut options = Options::default();
        for (key, value) in settings {
            (OPTIONS.iter().find(|opt| opt.key == *key).unwrap().set)(&mut options, value).unwrap();
        }
        check(parts, &options, &[info.clone(), info.clone()]).join("; ")
    }

    #[test]
    fn what_a_device_cannot_do_is_named() {
        let (mi300, nvidia) = (info("hip", "gfx942", 8), info("cuda", "sm_90", 0));
        let (old, next) = (info("hip", "gfx942", 0), info("hip", "gfx1250", 8));
        let kernel = |sub| parts(ExeKind::Kernel, sub, 1);
        let table = [("gfx.xcc_preference", "0, 7, 1, 1")];
        for (parts, settings, info, expected) in [
            (kernel(None), &[][..], &nvidia, ""),
            (kernel(Some(7)), &[][..], &mi300, ""),
            (kernel(Some(8)), &[][..], &mi300, "R0G0.8: XCC 8 does not exist: GPU has 8"),
            (kernel(Some(0)), &[][..], &nvidia, "NVIDIA devices have no XCCs"),
            (kernel(Some(0)), &[][..], &old, "does not tell how many XCCs GPU has"),
            (kernel(Some(0)), &[][..], &next, "cannot tell on which XCC of GPU (gfx1250)"),
            (kernel(None), &table[..], &mi300, ""),
            (kernel(None), &table[..], &nvidia, "no XCCs: leave out the choice of XCC 7"),
            (kernel(None), &[("gfx.xcc_preference", "9, 9, 9, 8")][..], &mi300, "XCC 9 does not exist"),
            (kernel(None), &[("gfx.xcc_preference", "1")][..], &mi300, "has 1 rows, and rank 0 has 2 devices"),
            (kernel(None), &[("gfx.cu_mask", "0-37")][..], &mi300, ""),
            (kernel(None), &[("gfx.cu_mask", "0-38")][..], &mi300, "compute unit 38: GPU has 38 on each XCC"),
            (kernel(None), &[("gfx.cu_mask", "0")][..], &nvidia, "no masks of compute units: leave out gfx.cu_mask"),
            (kernel(None), &[("gfx.cu_mask", "0")][..], &old, "its runtime has no masks"),
            (parts(ExeKind::CopyEngine, Some(2), 1), &[][..], &mi300, "R0D0.2: HIP offers no choice"),
            (parts(ExeKind::CopyEngine, Some(2), 1), &[][..], &nvidia, "NVIDIA devices offer no choice"),
            (parts(ExeKind::CopyEngine, None, 1), &[("dma.no_cu", "true")][..], &mi300, ""),
            (parts(ExeKind::CopyEngine, None, 1), &[("dma.no_cu", "true")][..], &nvidia, "CUDA cannot keep copies"),
            (parts(ExeKind::CopyEngine, None, 1), &[("dma.no_cu", "true")][..], &old, "needs HIP 6"),
        ] {
            let said = said(&parts, settings, info);
            assert!(if expected.is_empty() { said.is_empty() } else { said.contains(expected) }, "{expected}: {said}");
        }
    }

    #[test]
    fn the_table_is_read_by_executor_and_destination() {
        let gfx = Gfx { xcc_preference: vec![0, 7, 1, 2], ..Options::default().gfx };
        let of = |exe: u32, dst: u32| {
            let mut parts = parts(ExeKind::Kernel, None, dst);
            parts.exe.index = exe;
            xcc(parts.exe, &parts.dsts, &gfx)
        };
        assert_eq!([of(0, 0), of(0, 1), of(1, 0), of(1, 1)], [0, 7, 1, 2].map(Some));
        let chosen = parts(ExeKind::Kernel, Some(3), 1);
        assert_eq!(xcc(chosen.exe, &chosen.dsts, &gfx), Some(3), "a sub-index outranks the table");
        let two = [chosen.dsts[0], chosen.dsts[0]];
        assert_eq!(xcc(parts(ExeKind::Kernel, None, 0).exe, &two, &gfx), None, "of one destination only");
    }
}

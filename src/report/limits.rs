//! Holds every measured rate against what physics allows it.

use super::figure::distinct;
use super::results::TransferResult;
use crate::plan::PlannedTest;
use crate::plan::limit::limit;
use crate::world::World;

/// A rate above this part of its limit was not measured on the path that it is said to be of.
/// The clocks that limits are computed from are rounded to megahertz, and the clock that times a
/// transfer is not theirs: both together stay below a percent.
pub const IMPLAUSIBLE: f64 = 1.02;

/// Mark of a transfer whose rate is above its limit, at its beginning.
const MARK: &str = "implausible";

/// Lays the limits over the results; says what violates a strict run.
pub(super) fn apply(test: &PlannedTest, world: &World, results: &mut [TransferResult]) -> Vec<String> {
    let mut violations = Vec::new();
    for (transfer, result) in test.transfers.iter().zip(results) {
        let Some(limit) = limit(transfer, world) else { continue };
        result.limit_gbps = Some(limit.gbps);
        result.of_limit = result.rate_gbps.map(|rate| rate / limit.gbps);
        if let Some(rate) = result.rate_gbps
            && rate > IMPLAUSIBLE * limit.gbps
        {
            let hint = hint(result);
            result.marks.push(format!("{MARK}: above what {} can do{hint}", limit.by));
            if test.options.strict {
                let (rate, most) = distinct(rate, limit.gbps);
                violations.push(format!(
                    "transfer {} ({}): {rate} GB/s is above {most}, what {} can do (strict = true)",
                    result.index,
                    result.notation(),
                    limit.by
                ));
            }
        }
        result.limit_by = Some(limit.by);
    }
    violations
}

/// The side that stays at one address is the one that a cache may have served.
fn hint(result: &TransferResult) -> &'static str {
    if !result.src.is_empty() && result.slices == 1 {
        ": served from a cache? see src_rotate_bytes"
    } else if !result.dst.is_empty() && result.dst_slices == 1 {
        ": written into a cache? see dst_rotate_bytes"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::DeviceInfo;
    use crate::gpu::peaks::{Peaks, memory_gbps};
    use crate::place::{ExeKind, Executor, MemKind, Place};
    use crate::report::fixtures;
    use crate::units::Rank;

    /// A local copy of 16 MiB on an H200 (memory clock 3201 MHz, 6144 bits) at this rate.
    fn local_copy(gbps: f64, slices: u64, strict: bool) -> (TransferResult, Vec<String>) {
        let memory_gbps = memory_gbps(Some(3_201_000), Some(6144), Some(2));
        let peaks = Peaks { memory_gbps, ..Peaks::default() };
        let mut world = fixtures::world(&[0]);
        world.ranks[0].devices = vec![DeviceInfo { peaks, ..fixtures::device() }];
        let place = Place { rank: Rank(0), kind: MemKind::Device, index: 0 };
        let exe = Executor { rank: Rank(0), kind: ExeKind::Kernel, index: 0, sub_index: None };
        let mut test = fixtures::planned(vec![fixtures::transfer(0, &[], 0, &[])]);
        test.options.strict = strict;
        let transfer = &mut test.transfers[0];
        (transfer.srcs, transfer.exe, transfer.dsts) = (vec![place], exe, vec![place]);
        let bytes = 16 * fixtures::MIB;
        let mut result = [fixtures::measured(0, "R0G0", "R0G0", "R0G0", bytes, slices * bytes, gbps)];
        let violations = apply(&test, &world, &mut result);
        let [result] = result;
        (result, violations)
    }

    #[test]
    fn a_copy_faster_than_the_memory_is_implausible() {
        let (result, violations) = local_copy(2556.0, 1, false);
        assert_eq!(result.limit_by.as_deref(), Some("memory of R0G0"));
        assert!((result.limit_gbps.unwrap() - 2458.368).abs() < 1e-6);
        assert!((result.of_limit.unwrap() - 1.0397).abs() < 1e-4);
        assert_eq!(
            result.marks,
            ["implausible: above what memory of R0G0 can do: served from a cache? see src_rotate_bytes"]
        );
        assert_eq!(violations, [""; 0], "only a strict run fails for it");
    }

    #[test]
    fn a_strict_run_names_transfer_value_and_limit() {
        let (_, violations) = local_copy(2556.0, 1, true);
        assert_eq!(
            violations,
            ["transfer 0 (R0G0 -> R0G0 -> R0G0): 2560 GB/s is above 2460, what memory of R0G0 can do (strict = true)"]
        );
        assert_eq!(local_copy(2400.0, 1, true).1, [""; 0]);
    }

    #[test]
    fn the_tolerance_is_two_percent() {
        for (rate, marked) in [(2400.0, false), (2500.0, false), (2507.0, false), (2508.0, true)] {
            assert_eq!(local_copy(rate, 1, false).0.marks.len(), usize::from(marked), "{rate}");
        }
    }

    #[test]
    fn the_mark_names_the_side_that_stays_in_place() {
        let (result, _) = local_copy(2556.0, 16, false);
        assert!(result.marks[0].ends_with("written into a cache? see dst_rotate_bytes"), "{}", result.marks[0]);
    }
}

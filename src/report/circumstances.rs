//! Marks the transfers that the circumstances of a test have touched.

use super::results::TransferResult;
use crate::exec::Clock;
use crate::measure::circumstances::Circumstances;
use crate::place::{ExeKind, Executor, Place};
use crate::plan::{PlannedTest, Transfer};

/// A device that the transfer touches was slowed down.
const THROTTLED: &str = "throttled";
/// Others took CPU time of the rank whose clock timed the transfer.
const CONTENDED: &str = "contended";

/// Marks, and drops nothing.
pub(super) fn mark(test: &PlannedTest, circumstances: &[Circumstances], results: &mut [TransferResult]) {
    for (transfer, result) in test.transfers.iter().zip(results) {
        let throttled = |one: &Circumstances| {
            let mut devices = one.devices.iter().filter(|device| device.throttled.is_some());
            devices.any(|device| touches(transfer, one.rank, device.device))
        };
        // What a device's own clock timed is not touched by the CPUs.
        let by_host = result.clock == Some(Clock::Host);
        let contended = |one: &Circumstances| by_host && one.contended.is_some() && one.rank == transfer.exe.rank.0;
        for (mark, touched) in
            [(THROTTLED, circumstances.iter().any(throttled)), (CONTENDED, circumstances.iter().any(contended))]
        {
            if touched {
                result.marks.push(mark.to_owned());
            }
        }
    }
}

fn touches(transfer: &Transfer, rank: u32, device: u32) -> bool {
    let place = |place: &Place| !place.kind.is_host() && (place.rank.0, place.index) == (rank, device);
    let executor = |exe: Executor| {
        let on_device = !matches!(exe.kind, ExeKind::Cpu | ExeKind::Mpi | ExeKind::Nic | ExeKind::NicNear);
        on_device && (exe.rank.0, exe.index) == (rank, device)
    };
    executor(transfer.exe) || transfer.srcs.iter().chain(&transfer.dsts).any(place)
}

/// "rank 0: 3.1 % of ...", "R0G1: hardware thermal slowdown": what a reader of the marks wants to know.
pub fn reasons(circumstances: &[Circumstances]) -> Vec<String> {
    let mut reasons = Vec::new();
    for one in circumstances {
        let throttled = one.devices.iter().filter_map(|device| Some((device.device, device.throttled.as_ref()?)));
        reasons.extend(throttled.map(|(device, why)| format!("{THROTTLED}: R{}G{device}: {why}", one.rank)));
        reasons.extend(one.contended.as_ref().map(|why| format!("{CONTENDED}: rank {}: {why}", one.rank)));
    }
    reasons
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::circumstances::DeviceCircumstances;
    use crate::place::MemKind;
    use crate::report::fixtures;
    use crate::units::Rank;

    fn hot(device: u32) -> DeviceCircumstances {
        let throttled = Some("hardware thermal slowdown".to_owned());
        DeviceCircumstances { device, sm_mhz: [None; 2], memory_mhz: [None; 2], reasons: None, throttled }
    }

    /// Marks of a transfer by the CPU of rank 0 from rank 0 to device 1 of rank 1.
    fn marks(circumstances: &[Circumstances], clock: Clock) -> Vec<String> {
        let mut test = fixtures::planned(vec![fixtures::transfer(0, &[0], 0, &[])]);
        test.transfers[0].dsts = vec![Place { rank: Rank(1), kind: MemKind::Device, index: 1 }];
        let mut results = [fixtures::measured(0, "R0C0", "R0C0", "R1G1", 1 << 20, 0, 1.0)];
        results[0].clock = Some(clock);
        mark(&test, circumstances, &mut results);
        std::mem::take(&mut results[0].marks)
    }

    #[test]
    fn a_slowed_device_marks_what_touches_it() {
        let on = |rank, device| Circumstances { rank, devices: vec![hot(device)], ..Circumstances::default() };
        assert_eq!(marks(&[on(1, 1)], Clock::Host), ["throttled"]);
        assert_eq!(marks(&[on(1, 0), on(0, 1)], Clock::Host), [""; 0]);
        assert_eq!(reasons(&[on(1, 1)]), ["throttled: R1G1: hardware thermal slowdown"]);
    }

    #[test]
    fn a_contended_rank_marks_what_its_clock_timed() {
        let busy = |rank| Circumstances { rank, contended: Some("why".to_owned()), ..Circumstances::default() };
        assert_eq!(marks(&[busy(0)], Clock::Host), ["contended"]);
        assert_eq!(marks(&[busy(0)], Clock::DeviceEvent), [""; 0]);
        assert_eq!(marks(&[busy(1)], Clock::Host), [""; 0]);
        assert_eq!(reasons(&[busy(0), busy(1)]), ["contended: rank 0: why", "contended: rank 1: why"]);
    }
}

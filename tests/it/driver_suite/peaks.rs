//! What is told of a device's memory, links and clocks.

use tb_mpi::gpu::peaks::Peaks;
use tb_mpi::gpu::sensors::{self, Sensors};

use super::Rig;

/// Emulated devices have no hardware that could limit them.
pub fn nothing_is_claimed(rig: &Rig) {
    for device in &rig.devices {
        assert_eq!(device.info().peaks, Peaks::default());
        assert_eq!(sensors::read(device.info()), Sensors::default());
    }
}

/// NVML is there, knows the device, and what it says fits what such devices are.
pub fn limits_and_clocks_are_known(rig: &Rig) {
    for device in &rig.devices {
        let peaks = &device.info().peaks;
        println!("{}: {peaks:?}", device.info().pci);
        assert_eq!(peaks.absent, None);
        let memory = peaks.memory_gbps.expect("clock and bus width are known");
        assert!((3_000.0..10_000.0).contains(&memory), "{memory} GB/s");
        for links in peaks.links.as_ref().expect("NVML tells of links, or that there are none") {
            let each = links.gbps.expect("the version of the links is known") / f64::from(links.count);
            assert!((20.0..=50.0).contains(&each) && links.count <= 36, "{links:?}");
        }
        // A virtual machine may hide the link to the host.
        if let Some(pcie) = peaks.pcie {
            assert!((1.0..=130.0).contains(&pcie.gbps()), "{pcie}");
        }
        let read = sensors::read(device.info());
        println!("{read:?}: {:?}", read.reasons.map(sensors::words));
        assert!(read.sm_mhz.is_some_and(|mhz| (100..4_000).contains(&mhz)), "{read:?}");
        assert!(read.memory_mhz.is_some_and(|mhz| (100..20_000).contains(&mhz)), "{read:?}");
        let reasons = read.reasons.expect("NVML tells what holds the clocks down");
        assert!(!sensors::words(reasons).iter().any(|word| word.starts_with("unknown")), "{reasons:#x}");
    }
}

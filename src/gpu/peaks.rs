//! What a device's memory and links can carry at most, by what the machine tells of them.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Peaks of one device; whatever is not known is none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Peaks {
    /// Reads and writes of its memory together, in GB/s.
    pub memory_gbps: Option<f64>,
    /// The link to its host, if that is PCIe.
    pub pcie: Option<Pcie>,
    /// Links to other devices; an empty list says that there are none.
    pub links: Option<Vec<PeerLinks>>,
    /// Why links, clocks and throttle reasons are not known, if so.
    pub absent: Option<String>,
}

/// A PCIe link, each way. What it is trained to now may be less: an idle device slows it down.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pcie {
    /// Fastest that the device can, in gigatransfers a second and lane.
    pub gts: f64,
    pub lanes: u32,
    pub gts_now: Option<f64>,
    pub lanes_now: Option<u32>,
}

/// All links of a device to one neighbour.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerLinks {
    /// PCI address of the neighbour; none = a switch, or a neighbour that is not told.
    pub to: Option<String>,
    /// `NVLink 4`, `xGMI`.
    pub kind: String,
    pub count: u32,
    /// All of them together, each way; none = not known.
    pub gbps: Option<f64>,
}

/// Clock × bytes of the bus × transfers a clock. What is not positive is not known.
pub fn memory_gbps(clock_khz: Option<i32>, bus_bits: Option<i32>, transfers: Option<u32>) -> Option<f64> {
    let (clock, bits, transfers) = (clock_khz?, bus_bits?, transfers?);
    let positive = clock > 0 && bits > 0;
    positive.then(|| f64::from(clock) * 1e3 * f64::from(bits) / 8.0 * f64::from(transfers) / 1e9)
}

impl Pcie {
    /// Bytes that lanes carry each way, in GB/s, after the line code. Headers of packets are not
    /// taken off: no rate of payload is above it.
    ///
    /// PCI Express base specification: 8b/10b up to 5 GT/s, 128b/130b up to 32 GT/s, and from 64 GT/s
    /// on units of 256 bytes of which 236 are packets.
    pub fn gbps(&self) -> f64 {
        let code = match self.gts {
            gts if gts <= 5.0 => 8.0 / 10.0,
            gts if gts <= 32.0 => 128.0 / 130.0,
            _ => 236.0 / 256.0,
        };
        self.gts * code * f64::from(self.width()) / 8.0
    }

    /// Lanes in use: a link that was trained to fewer stays so, while its speed follows the load.
    fn width(&self) -> u32 {
        self.lanes_now.map_or(self.lanes, |now| now.min(self.lanes))
    }
}

/// "PCIe 5.0 x16".
impl std::fmt::Display for Pcie {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Every generation doubles the one before, but the third, which changed the line code.
        let generation = [2.5, 5.0, 8.0, 16.0, 32.0, 64.0, 128.0].iter().position(|gts| *gts == self.gts);
        match generation {
            Some(n) => write!(f, "PCIe {}.0 x{}", n + 1, self.width()),
            None => write!(f, "PCIe {} GT/s x{}", self.gts, self.width()),
        }
    }
}

/// The link of a PCI device, where the system tells (Linux, Documentation/ABI/testing/sysfs-bus-pci:
/// `max_link_speed` is "16.0 GT/s PCIe", `max_link_width` is "16"; "Unknown" and 0 are not known).
pub fn pcie(root: &Path, pci: &str) -> Option<Pcie> {
    let folder = root.join("sys/bus/pci/devices").join(pci);
    let word = |name: &str| {
        let text = fs::read_to_string(folder.join(name)).ok()?;
        text.split_whitespace().next().map(str::to_owned)
    };
    let speed = |name| word(name)?.parse::<f64>().ok().filter(|gts| gts.is_finite() && *gts > 0.0);
    // 255 is what a device that is gone answers.
    let lanes = |name| word(name)?.parse::<u32>().ok().filter(|lanes| (1..=32).contains(lanes));
    Some(Pcie {
        gts: speed("max_link_speed")?,
        lanes: lanes("max_link_width")?,
        gts_now: speed("current_link_speed"),
        lanes_now: lanes("current_link_width"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(actual: Option<f64>, expected: f64) {
        assert!(actual.is_some_and(|x| (x / expected - 1.0).abs() < 1e-4), "{actual:?}, expected {expected}");
    }

    #[test]
    fn memory_peaks_are_those_of_the_data_sheets() {
        about(memory_gbps(Some(3_201_000), Some(6144), Some(2)), 4916.7); // H200
        about(memory_gbps(Some(2_619_000), Some(5120), Some(2)), 3352.3); // H100 SXM
        about(memory_gbps(Some(1_300_000), Some(8192), Some(4)), 5324.8); // MI300X
        assert_eq!(memory_gbps(Some(0), Some(6144), Some(2)), None);
        assert_eq!(memory_gbps(Some(1), Some(-1), Some(2)), None);
        assert_eq!(memory_gbps(Some(1), Some(1), None), None);
    }

    fn link(gts: f64, lanes: u32, now: Option<u32>) -> Pcie {
        Pcie { gts, lanes, gts_now: None, lanes_now: now }
    }

    #[test]
    fn pcie_rates_take_the_line_code_off() {
        about(Some(link(2.5, 16, None).gbps()), 4.0);
        about(Some(link(8.0, 16, None).gbps()), 15.7538);
        about(Some(link(32.0, 16, None).gbps()), 63.0154);
        about(Some(link(32.0, 16, Some(8)).gbps()), 31.5077);
        about(Some(link(64.0, 16, None).gbps()), 118.0);
        assert_eq!(link(32.0, 16, None).to_string(), "PCIe 5.0 x16");
        assert_eq!(link(8.0, 16, Some(4)).to_string(), "PCIe 3.0 x4");
        assert_eq!(link(20.0, 16, None).to_string(), "PCIe 20 GT/s x16");
    }

    #[test]
    fn links_are_read_as_the_kernel_writes_them() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("sys/bus/pci/devices/0000:1b:00.0");
        fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, text: &str| fs::write(folder.join(name), text).unwrap();
        write("max_link_speed", "32.0 GT/s PCIe\n");
        assert_eq!(pcie(root.path(), "0000:1b:00.0"), None, "half of it is not enough");
        write("max_link_width", "16\n");
        write("current_link_speed", "2.5 GT/s PCIe\n");
        write("current_link_width", "8\n");
        let found = pcie(root.path(), "0000:1b:00.0").unwrap();
        assert_eq!(found, Pcie { gts: 32.0, lanes: 16, gts_now: Some(2.5), lanes_now: Some(8) });
        write("current_link_speed", "Unknown\n");
        write("current_link_width", "0\n");
        let found = pcie(root.path(), "0000:1b:00.0").unwrap();
        assert_eq!((found.gts_now, found.lanes_now, found.to_string()), (None, None, "PCIe 5.0 x16".to_owned()));
        write("max_link_width", "255\n");
        assert_eq!(pcie(root.path(), "0000:1b:00.0"), None);
        assert_eq!(pcie(root.path(), "0000:ff:00.0"), None);
    }
}

//! Reads what a device is doing right now: its clocks, and what holds them down.

use std::fs;
use std::path::Path;

use super::{DeviceInfo, nvml};

/// One reading; whatever cannot be read is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sensors {
    pub sm_mhz: Option<u32>,
    pub memory_mhz: Option<u32>,
    /// NVML's bits of what holds the clocks down.
    pub reasons: Option<u64>,
    /// Nanoseconds so far in each of `SLOWDOWNS`, where the driver counts them.
    pub slowdown_ns: Option<[u64; 3]>,
}

/// Slowdowns that no device should be in while it is measured, in the order of their counters.
pub const SLOWDOWNS: [&str; 3] = ["software thermal slowdown", "hardware thermal slowdown", "hardware power brake"];

/// `nvmlClocksEventReasons` of nvml.h, and whether a figure taken meanwhile is touched by it.
///
/// Not so: idleness, settings and policies, which are the same in every run; the software power cap,
/// in which a busy device works by design; and "hardware slowdown" alone, which nvml.h says is also
/// reported while clocks change, and which heat and the power brake report by bits of their own.
const REASONS: [(u64, &str, bool); 11] = [
    (0x001, "idle", false),
    (0x002, "application clocks setting", false),
    (0x004, "software power cap", false),
    (0x008, "hardware slowdown", false),
    (0x010, "sync boost", false),
    (0x020, SLOWDOWNS[0], true),
    (0x040, SLOWDOWNS[1], true),
    (0x080, SLOWDOWNS[2], true),
    (0x100, "display clock setting", false),
    (0x200, "board limit", false),
    (0x400, "reliability", false),
];

/// The words of a mask, bits that are not known by their value.
pub fn words(mask: u64) -> Vec<String> {
    let known = REASONS.iter().filter(|(bit, ..)| mask & bit != 0).map(|(_, word, _)| (*word).to_owned());
    let all: u64 = REASONS.iter().map(|(bit, ..)| bit).sum();
    known.chain((mask & !all != 0).then(|| format!("unknown ({:#x})", mask & !all))).collect()
}

/// Those of the mask that touch a figure.
pub fn slowdowns(mask: u64) -> impl Iterator<Item = &'static str> {
    REASONS.iter().filter(move |(bit, _, touches)| *touches && mask & bit != 0).map(|(_, word, _)| *word)
}

/// Costs a few calls of the vendor's library or a few files; not for the timed part.
pub fn read(device: &DeviceInfo) -> Sensors {
    match device.runtime.as_str() {
        "cuda" => nvml::Nvml::open().ok().and_then(|nvml| nvml.sensors(&device.pci)).unwrap_or_default(),
        "hip" => amdgpu(Path::new("/"), &device.pci),
        _ => Sensors::default(),
    }
}

/// The clocks that the amdgpu driver shows (Linux, Documentation/gpu/amdgpu/thermal.rst, HWMON
/// interfaces: `freq1_input` is the compute clock and `freq2_input` that of memory, in hertz).
fn amdgpu(root: &Path, pci: &str) -> Sensors {
    let folder = root.join("sys/bus/pci/devices").join(pci).join("hwmon");
    let mut folders = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let Some(folder) = folders.next() else { return Sensors::default() };
    let mhz = |name: &str| {
        let hertz: u64 = fs::read_to_string(folder.join(name)).ok()?.trim().parse().ok()?;
        u32::try_from(hertz / 1_000_000).ok()
    };
    Sensors { sm_mhz: mhz("freq1_input"), memory_mhz: mhz("freq2_input"), ..Sensors::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_put_into_words() {
        assert_eq!(words(0), [""; 0]);
        assert_eq!(words(0x1), ["idle"]);
        assert_eq!(words(0x48), ["hardware slowdown", "hardware thermal slowdown"]);
        assert_eq!(words(0x8004), ["software power cap", "unknown (0x8000)"]);
    }

    #[test]
    fn heat_and_the_power_brake_touch_figures() {
        let touching = |mask| slowdowns(mask).collect::<Vec<_>>();
        assert_eq!(touching(0xe0), SLOWDOWNS);
        assert_eq!(touching(0x71f), [""; 0]);
    }

    #[test]
    fn clocks_of_amdgpu_are_in_hertz() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("sys/bus/pci/devices/0000:c1:00.0/hwmon/hwmon5");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("freq1_input"), "2100000000\n").unwrap();
        let sensors = amdgpu(root.path(), "0000:c1:00.0");
        assert_eq!(sensors, Sensors { sm_mhz: Some(2100), ..Sensors::default() });
        fs::write(folder.join("freq2_input"), "1300000000\n").unwrap();
        assert_eq!(amdgpu(root.path(), "0000:c1:00.0").memory_mhz, Some(1300));
        assert_eq!(amdgpu(root.path(), "0000:c2:00.0"), Sensors::default());
    }

    #[test]
    fn emulated_devices_have_no_sensors() {
        assert_eq!(read(&crate::report::fixtures::device()), Sensors::default());
    }
}

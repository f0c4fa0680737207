//! NVIDIA's management library, by our own signatures from nvml.h: links, clocks, what slows them.
//!
//! Everything is optional: without the library, or on a device that it does not know, nothing is told.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_longlong, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use super::library::{Library, functions, text};
use super::peaks::PeerLinks;
use super::sensors::Sensors;
use crate::error::Error;

/// `nvmlDevice_t`: a pointer to what only the library knows.
type Handle = *mut c_void;

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PciInfo {
    legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    id: [u8; 32],
}

/// `nvmlFieldValue_t`, its value (`nvmlValue_t`, a union of up to eight bytes) as bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct FieldValue {
    field: c_uint,
    scope: c_uint,
    timestamp: c_longlong,
    latency: c_longlong,
    value_type: c_uint,
    status: c_uint,
    value: [u64; 1],
}

functions! {
    /// NVML, as far as it is used (nvml.h of CUDA 13).
    Table {
        fn nvmlInit_v2();
        fn nvmlDeviceGetHandleByPciBusId_v2(pci: *const c_char, device: *mut Handle);
        fn nvmlDeviceGetClockInfo(device: Handle, kind: c_uint, mhz: *mut c_uint);
        fn nvmlDeviceGetCurrentClocksEventReasons(device: Handle, reasons: *mut c_ulonglong);
        fn nvmlDeviceGetCurrentClocksThrottleReasons(device: Handle, reasons: *mut c_ulonglong);
        fn nvmlDeviceGetFieldValues(device: Handle, count: c_int, values: *mut FieldValue);
        fn nvmlDeviceGetNvLinkState(device: Handle, link: c_uint, active: *mut c_uint);
        fn nvmlDeviceGetNvLinkVersion(device: Handle, link: c_uint, version: *mut c_uint);
        fn nvmlDeviceGetNvLinkRemoteDeviceType(device: Handle, link: c_uint, kind: *mut c_uint);
        fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Handle, link: c_uint, pci: *mut PciInfo);
    }
}

/// `NVML_CLOCK_SM` and `NVML_CLOCK_MEM`.
const CLOCK_SM: c_uint = 1;
const CLOCK_MEMORY: c_uint = 2;

/// `NVML_NVLINK_MAX_LINKS`; a link that a device lacks is an invalid argument.
const LINKS_MAX: c_uint = 36;
const LINK_ACTIVE: c_uint = 1;
/// `NVML_NVLINK_DEVICE_TYPE_GPU`.
const REMOTE_GPU: c_uint = 0;

/// `NVML_FI_DEV_CLOCKS_EVENT_REASON_`: `SW_THERM_SLOWDOWN`, `HW_THERM_SLOWDOWN` and
/// `HW_POWER_BRAKE_SLOWDOWN`, in nanoseconds; in the order of `sensors::SLOWDOWNS`.
const SLOWDOWN_FIELDS: [c_uint; 3] = [269, 270, 271];
/// `NVML_VALUE_TYPE_UNSIGNED_LONG_LONG`.
const UNSIGNED_LONG_LONG: c_uint = 3;

/// `nvmlNvlinkVersion_t`: the number as people know it, and GB/s of a link each way, as NVIDIA's
/// architecture white papers give it: 20 (P100), 25 (V100, A100 with 12 links, H100 and H200 with
/// 18), 50 (B200 with 18). Of version 3.1 (GA10x, slower links) and newer ones nothing is claimed.
const VERSIONS: [(c_uint, &str, Option<f64>); 7] = [
    (1, "NVLink 1", Some(20.0)),
    (2, "NVLink 2", Some(25.0)),
    (3, "NVLink 2.2", Some(25.0)),
    (4, "NVLink 3", Some(25.0)),
    (5, "NVLink 3.1", None),
    (6, "NVLink 4", Some(25.0)),
    (7, "NVLink 5", Some(50.0)),
];

/// The library, opened once for the process and never shut down.
pub struct Nvml {
    table: Table,
}

/// One link that is up.
#[derive(Clone)]
struct Link {
    version: Option<c_uint>,
    /// None: a switch, or a neighbour that is not told.
    to: Option<String>,
}

impl Nvml {
    /// # Errors
    /// If the library is not on this machine, or finds no driver.
    pub fn open() -> Result<&'static Nvml, Error> {
        static NVML: OnceLock<Result<Nvml, Error>> = OnceLock::new();
        NVML.get_or_init(Nvml::load).as_ref().map_err(Error::clone)
    }

    fn load() -> Result<Nvml, Error> {
        let library = Library::open(&["libnvidia-ml.so.1".to_owned()])?;
        let nvml = Nvml { table: Table::load(&library) };
        // SAFETY: it takes nothing, and may be called again.
        unsafe { nvml.table.nvmlInit_v2() }
            .map_err(|refusal| refusal.explain(library.name(), "start NVML", |_| "it did not start".to_owned()))?;
        Ok(nvml)
    }

    fn device(&self, pci: &str) -> Option<Handle> {
        let pci = CString::new(pci).ok()?;
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: the address ends with a zero; it writes one handle.
        unsafe { self.table.nvmlDeviceGetHandleByPciBusId_v2(pci.as_ptr(), &mut handle) }.ok()?;
        Some(handle)
    }

    /// Clocks, and what holds them down.
    pub fn sensors(&self, pci: &str) -> Option<Sensors> {
        let device = self.device(pci)?;
        let clock = |kind| {
            let mut mhz = 0;
            // SAFETY: the handle is the library's; it writes one integer.
            unsafe { self.table.nvmlDeviceGetClockInfo(device, kind, &mut mhz) }.ok().map(|()| mhz)
        };
        let mut reasons = 0;
        // SAFETY: as above.
        let told = unsafe { self.table.nvmlDeviceGetCurrentClocksEventReasons(device, &mut reasons) };
        // SAFETY: as above; the name before driver 535.
        let told =
            told.or_else(|_| unsafe { self.table.nvmlDeviceGetCurrentClocksThrottleReasons(device, &mut reasons) });
        Some(Sensors {
            sm_mhz: clock(CLOCK_SM),
            memory_mhz: clock(CLOCK_MEMORY),
            reasons: told.ok().map(|()| reasons),
            slowdown_ns: self.slowdown_ns(device),
        })
    }

    fn slowdown_ns(&self, device: Handle) -> Option<[u64; 3]> {
        let blank = FieldValue {
            field: 0,
            scope: 0,
            timestamp: 0,
            latency: 0,
            value_type: 0,
            // Not success, should the library leave it as it is.
            status: c_uint::MAX,
            value: [0],
        };
        let mut values = SLOWDOWN_FIELDS.map(|field| FieldValue { field, ..blank });
        // SAFETY: the handle is the library's; it writes as many values as it is told.
        unsafe { self.table.nvmlDeviceGetFieldValues(device, values.len() as c_int, values.as_mut_ptr()) }.ok()?;
        let good = values.iter().all(|value| value.status == 0 && value.value_type == UNSIGNED_LONG_LONG);
        good.then(|| values.map(|value| value.value[0]))
    }

    /// The NVLinks of a device that are up, by neighbour; an empty list if it has none.
    pub fn links(&self, pci: &str) -> Option<Vec<PeerLinks>> {
        let device = self.device(pci)?;
        let mut links = Vec::new();
        for link in 0..LINKS_MAX {
            let mut active = 0;
            // SAFETY: the handle is the library's; it writes one integer.
            let asked = unsafe { self.table.nvmlDeviceGetNvLinkState(device, link, &mut active) };
            if asked.is_ok() && active == LINK_ACTIVE {
                links.push(self.link(device, link));
            }
        }
        Some(grouped(&links))
    }

    fn link(&self, device: Handle, link: c_uint) -> Link {
        let mut version = 0;
        // SAFETY: the handle is the library's; it writes one integer.
        let asked = unsafe { self.table.nvmlDeviceGetNvLinkVersion(device, link, &mut version) };
        let version = asked.ok().map(|()| version);
        let mut kind = 0;
        // SAFETY: as above.
        let asked = unsafe { self.table.nvmlDeviceGetNvLinkRemoteDeviceType(device, link, &mut kind) };
        if asked.is_err() || kind != REMOTE_GPU {
            return Link { version, to: None };
        }
        let blank = [0; 16];
        let mut pci =
            PciInfo { legacy: blank, domain: 0, bus: 0, device: 0, device_id: 0, subsystem_id: 0, id: [0; 32] };
        // SAFETY: the handle is the library's; it writes one address.
        let asked = unsafe { self.table.nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, &mut pci) };
        Link { version, to: asked.ok().map(|()| address(&pci)) }
    }
}

/// As in /sys: `0000:1b:00.0`.
fn address(pci: &PciInfo) -> String {
    let function = text(&pci.id).rsplit_once('.').map_or_else(|| "0".to_owned(), |(_, function)| function.to_owned());
    format!("{:04x}:{:02x}:{:02x}.{function}", pci.domain, pci.bus, pci.device)
}

/// Links to one neighbour as one entry; a version that is not known leaves the rate unknown.
fn grouped(links: &[Link]) -> Vec<PeerLinks> {
    let mut groups: BTreeMap<&Option<String>, Vec<&Link>> = BTreeMap::new();
    for link in links {
        groups.entry(&link.to).or_default().push(link);
    }
    let known = |link: &&Link| VERSIONS.iter().find(|(version, ..)| Some(*version) == link.version);
    let groups = groups.into_iter().map(|(to, links)| PeerLinks {
        to: to.clone(),
        kind: links.first().and_then(known).map_or("NVLink", |(_, name, _)| name).to_owned(),
        count: links.len() as u32,
        gbps: links.iter().map(|link| known(link)?.2).sum(),
    });
    groups.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_layout_of_the_header() {
        use std::mem::{offset_of, size_of};
        assert_eq!((size_of::<PciInfo>(), offset_of!(PciInfo, id)), (68, 36));
        assert_eq!((size_of::<FieldValue>(), offset_of!(FieldValue, status)), (40, 28));
        assert_eq!(offset_of!(FieldValue, value), 32);
    }

    #[test]
    fn remote_addresses_are_written_as_in_sys() {
        let mut id = [0; 32];
        id[..16].copy_from_slice(b"00000000:1B:00.0");
        let pci = PciInfo { legacy: [0; 16], domain: 0, bus: 0x1b, device: 0, device_id: 0, subsystem_id: 0, id };
        assert_eq!(address(&pci), "0000:1b:00.0");
        assert_eq!(address(&PciInfo { id: [0; 32], domain: 0x10000, ..pci }), "10000:1b:00.0");
    }

    fn links(count: usize, version: c_uint, to: Option<&str>) -> Vec<Link> {
        (0..count).map(|_| Link { version: Some(version), to: to.map(str::to_owned) }).collect()
    }

    #[test]
    fn links_to_one_neighbour_add_up() {
        let switched = grouped(&links(18, 6, None));
        let expected = PeerLinks { to: None, kind: "NVLink 4".to_owned(), count: 18, gbps: Some(450.0) };
        assert_eq!(switched, [expected]);
        let both = grouped(&[links(4, 4, Some("0000:01:00.0")), links(2, 4, Some("0000:02:00.0"))].concat());
        assert_eq!(
            both.iter().map(|group| (group.count, group.gbps)).collect::<Vec<_>>(),
            [(4, Some(100.0)), (2, Some(50.0))]
        );
        assert_eq!(grouped(&[]), []);
    }

    #[test]
    fn an_unknown_version_has_no_rate() {
        let group = &grouped(&links(2, 99, None))[0];
        assert_eq!((group.kind.as_str(), group.count, group.gbps), ("NVLink", 2, None));
        let mut mixed = links(1, 7, None);
        mixed.push(Link { version: None, to: None });
        assert_eq!(grouped(&mixed)[0].gbps, None);
    }
}

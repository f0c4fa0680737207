//! Links of AMD devices as the kernel's compute driver shows them: xGMI between devices, what leads to the host.
//!
//! Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c writes `key value` lines; kfd_crat.c fills them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::peaks::PeerLinks;

const NODES: &str = "sys/class/kfd/kfd/topology/nodes";

/// `CRAT_IOLINK_TYPE_`: `PCIEXPRESS` and `XGMI` of kfd_crat.h.
const PCIE: u64 = 2;
const XGMI: u64 = 11;

/// GB/s of one link each way: AMD's data sheets give both ways together, 184 for two links (MI50),
/// 92 (MI100), 100 (MI250X), 128 (MI300X), 153.6 (MI350X).
const LINK_GBPS: [(&str, f64); 5] =
    [("gfx906", 46.0), ("gfx908", 46.0), ("gfx90a", 50.0), ("gfx942", 64.0), ("gfx950", 76.8)];

/// Transfers a clock of the memory: 2 for HBM2; 4 for HBM3, whose clock is reported at half
/// (5.3 TB/s of 8192 bits at 1300 MHz, ROCm/rocm_smi_lib#209). Of others nothing is claimed.
const MEMORY_TRANSFERS: [(&str, u32); 5] = [("gfx906", 2), ("gfx908", 2), ("gfx90a", 2), ("gfx942", 4), ("gfx950", 4)];

/// What leads away from a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Neighbourhood {
    pub links: Vec<PeerLinks>,
    /// Its host is reached by PCIe, and not by a link of another kind.
    pub host_by_pcie: bool,
}

/// By `gfx942`; none = not known.
pub fn memory_transfers(architecture: &str) -> Option<u32> {
    MEMORY_TRANSFERS.iter().find(|(name, _)| *name == architecture).map(|(_, transfers)| *transfers)
}

/// The links of the device at a PCI address (`0000:c1:00.0`); none where the system does not tell,
/// or where several nodes (partitions of one device) have the address.
pub fn neighbourhood(root: &Path, pci: &str, architecture: &str) -> Option<Neighbourhood> {
    let folder = root.join(NODES);
    let mut nodes: BTreeMap<u64, BTreeMap<String, u64>> = BTreeMap::new();
    for entry in fs::read_dir(&folder).ok()?.flatten() {
        if let Ok(number) = entry.file_name().to_string_lossy().parse() {
            nodes.insert(number, properties(&entry.path())?);
        }
    }
    let mut here = nodes.iter().filter(|(_, node)| address(node).as_deref() == Some(pci)).map(|(number, _)| *number);
    let (Some(me), None) = (here.next(), here.next()) else { return None };
    let mut found = Neighbourhood { links: Vec::new(), host_by_pcie: false };
    let mut other_way = false;
    for entry in fs::read_dir(folder.join(me.to_string()).join("io_links")).ok()?.flatten() {
        let link = properties(&entry.path())?;
        let value = |key: &str| link.get(key).copied().unwrap_or(0);
        match nodes.get(&value("node_to")).map(address) {
            Some(Some(to)) if value("type") == XGMI => {
                let least = value("min_bandwidth");
                // The least is that of one link; what is indirect has none (kfd_crat.c).
                let count = value("max_bandwidth").checked_div(least).unwrap_or(0);
                let one = LINK_GBPS.iter().find(|(name, _)| *name == architecture).map(|(_, gbps)| *gbps);
                found.links.push(PeerLinks {
                    to: Some(to),
                    kind: "xGMI".to_owned(),
                    count: count as u32,
                    gbps: one.filter(|_| count > 0).map(|gbps| gbps * count as f64),
                });
            }
            // A node without an address is one of CPUs.
            Some(None) => {
                found.host_by_pcie |= value("type") == PCIE;
                other_way |= value("type") != PCIE;
            }
            _ => {}
        }
    }
    found.host_by_pcie &= !other_way;
    found.links.sort_by(|a, b| a.to.cmp(&b.to));
    Some(found)
}

/// `location_id` is bus, device and function; partitions have more in the upper bits.
fn address(node: &BTreeMap<String, u64>) -> Option<String> {
    let number = |key: &str| node.get(key).copied();
    let (simds, location, domain) = (number("simd_count")?, number("location_id")?, number("domain").unwrap_or(0));
    let (bus, device, function) = (location >> 8 & 0xff, location >> 3 & 0x1f, location & 7);
    (simds > 0).then(|| format!("{domain:04x}:{bus:02x}:{device:02x}.{function}"))
}

fn properties(folder: &Path) -> Option<BTreeMap<String, u64>> {
    let text = fs::read_to_string(folder.join("properties")).ok()?;
    let pair = |line: &str| {
        let (key, value) = line.split_once(' ')?;
        Some((key.to_owned(), value.trim().parse().ok()?))
    };
    Some(text.lines().filter_map(pair).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host with one CPU node and two devices (nodes 1 and 2) that four links join.
    fn machine(host_type: u64, max: u64) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: String| {
            let folder = root.path().join(NODES).join(path);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("properties"), text).unwrap();
        };
        write("0", "cpu_cores_count 64\nsimd_count 0\nlocation_id 0\ndomain 0\n".to_owned());
        for (node, location) in [(1, 0xc100), (2, 0xc600)] {
            write(&node.to_string(), format!("cpu_cores_count 0\nsimd_count 440\nlocation_id {location}\ndomain 0\n"));
            let peer = 3 - node;
            let link = |kind, to, most| {
                format!("type {kind}\nnode_from {node}\nnode_to {to}\nmin_bandwidth 50000\nmax_bandwidth {most}\n")
            };
            write(&format!("{node}/io_links/0"), link(host_type, 0, 50000));
            write(&format!("{node}/io_links/1"), link(XGMI, peer, max));
        }
        root
    }

    #[test]
    fn links_are_counted_by_their_bandwidth_and_rated_by_architecture() {
        let root = machine(PCIE, 200_000);
        let found = neighbourhood(root.path(), "0000:c1:00.0", "gfx90a").unwrap();
        let to = Some("0000:c6:00.0".to_owned());
        assert_eq!(found.links, [PeerLinks { to, kind: "xGMI".to_owned(), count: 4, gbps: Some(200.0) }]);
        assert!(found.host_by_pcie);
        assert_eq!(neighbourhood(root.path(), "0000:c6:00.0", "gfx1100").unwrap().links[0].gbps, None);
    }

    #[test]
    fn what_is_indirect_or_not_told_has_no_rate() {
        let root = machine(XGMI, 0);
        let found = neighbourhood(root.path(), "0000:c1:00.0", "gfx90a").unwrap();
        assert_eq!((found.links[0].count, found.links[0].gbps), (0, None));
        assert!(!found.host_by_pcie, "Infinity Fabric leads to the host");
        assert_eq!(neighbourhood(root.path(), "0000:c7:00.0", "gfx90a"), None);
        assert_eq!(neighbourhood(Path::new("/nowhere"), "0000:c1:00.0", "gfx90a"), None);
    }

    #[test]
    fn partitions_of_one_device_are_not_told_apart() {
        let root = machine(PCIE, 200_000);
        let text = format!("simd_count 440\nlocation_id {}\ndomain 0\n", 0x1000_c100);
        fs::create_dir_all(root.path().join(NODES).join("3")).unwrap();
        fs::write(root.path().join(NODES).join("3/properties"), text).unwrap();
        assert_eq!(neighbourhood(root.path(), "0000:c1:00.0", "gfx942"), None);
    }
}

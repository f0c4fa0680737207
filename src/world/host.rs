//! Reads what this host has: NUMA nodes, CPUs, caches, memory, and what identifies it.
//!
//! Everything comes from files under a root folder, so that tests can show other machines.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{Caches, HostIdentity, Inventory, NumaNode};
use crate::error::Error;
use crate::units::Bytes;

/// No cache is larger: the largest L3 that one CPU reaches is about 0.5 GiB today. Virtual machines
/// report more; such a size is treated as unknown.
const CACHE_MAX: Bytes = Bytes::gib(4);

/// What this host has, without devices.
///
/// # Errors
/// Something that no guess can replace is unreadable: the message names the file.
pub fn inventory() -> Result<Inventory, Error> {
    inventory_at(Path::new("/"))
}

/// Memory that can still be allocated by this process.
///
/// # Errors
/// `/proc/meminfo` is unreadable.
pub fn memory_free() -> Result<Free, Error> {
    memory_free_at(Path::new("/"))
}

/// Memory that is left, and whose limit that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Free {
    pub bytes: Bytes,
    /// The limit is the control group's, not the host's.
    pub of_group: bool,
}

/// "20 GiB free", rounded down to what a reader needs.
impl fmt::Display for Free {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = [Bytes::gib(1), Bytes::mib(1)].into_iter().find(|step| self.bytes.0 >= 10 * step.0);
        let step = step.unwrap_or(Bytes::kib(1)).0;
        write!(f, "{} free", Bytes(self.bytes.0 / step * step))?;
        if self.of_group { write!(f, " within the control group's limit") } else { Ok(()) }
    }
}

fn inventory_at(root: &Path) -> Result<Inventory, Error> {
    let status = read(root, "proc/self/status")?;
    let cpus_allowed = status_list(&status, "Cpus_allowed_list:")
        .ok_or_else(|| Error::new("cannot read Cpus_allowed_list in /proc/self/status"))?;
    let nodes_allowed = status_list(&status, "Mems_allowed_list:");
    Ok(Inventory {
        host_name: read(root, "proc/sys/kernel/hostname")?,
        identity: identity(root)?,
        pid: std::process::id(),
        cpu_model: cpu_model(root),
        kernel: read(root, "proc/sys/kernel/osrelease")?,
        caches: caches(root, &cpus_allowed),
        numa: numa(root, &cpus_allowed, nodes_allowed.as_ref())?,
        memory_free: memory_free_at(root)?.bytes,
        devices: Vec::new(),
        devices_free: Vec::new(),
        devices_absent: None,
    })
}

fn identity(root: &Path) -> Result<HostIdentity, Error> {
    let namespace = root.join("proc/self/ns/pid");
    let namespace = fs::metadata(&namespace).map_err(|err| Error::from(err).context(namespace.display()))?;
    Ok(HostIdentity {
        boot_id: read(root, "proc/sys/kernel/random/boot_id")?,
        pid_namespace: namespace.ino(),
        // Without the folder there are no named segments, and nobody looks at the number.
        shm: fs::metadata(root.join("dev/shm")).map_or((0, 0), |shm| (shm.dev(), shm.ino())),
        user: rustix::process::geteuid().as_raw(),
    })
}

/// Nodes with CPUs first, then those without, each in the order of the system. Where the system
/// shows no nodes, or none has a CPU of ours, everything is one node.
fn numa(root: &Path, allowed: &BTreeSet<u32>, nodes_allowed: Option<&BTreeSet<u32>>) -> Result<Vec<NumaNode>, Error> {
    let folder = root.join("sys/devices/system/node");
    let mut indices: Vec<u32> = fs::read_dir(&folder)
        .map(|entries| entries.flatten().filter_map(|entry| number_after(&entry.file_name(), "node")).collect())
        .unwrap_or_default();
    indices.sort_unstable();
    let node = |os_index: &u32| -> (NumaNode, Vec<u32>) {
        let at = PathBuf::from(format!("sys/devices/system/node/node{os_index}"));
        let cpus = read(root, at.join("cpulist")).ok().and_then(|list| parse_list(&list)).unwrap_or_default();
        let memory = read(root, at.join("meminfo")).ok().and_then(|text| kib_after(&text, "MemTotal:"));
        let memory_total = memory.unwrap_or(Bytes::ZERO);
        let distances = read(root, at.join("distance")).unwrap_or_default();
        let distances = distances.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let node = NumaNode {
            os_index: *os_index,
            cpus_allowed: cpus.intersection(allowed).copied().collect(),
            cpus: cpus.into_iter().collect(),
            memory_allowed: memory_total > Bytes::ZERO && nodes_allowed.is_none_or(|nodes| nodes.contains(os_index)),
            memory_total,
            distances: Vec::new(),
        };
        (node, distances)
    };
    let nodes: Vec<(NumaNode, Vec<u32>)> = indices.iter().map(node).collect();
    if nodes.iter().all(|(node, _)| node.cpus_allowed.is_empty()) {
        return one_node(root, allowed).map(|node| vec![node]);
    }
    // Stable: the order of the system stays within both groups.
    let mut order: Vec<usize> = (0..nodes.len()).collect();
    order.sort_by_key(|i| nodes[*i].0.cpus.is_empty());
    let reordered = |i: &usize| {
        let (mut node, distances) = nodes[*i].clone();
        // A short row (a node that came or went meanwhile) leaves the usual value of a remote node.
        node.distances =
            order.iter().map(|j| distances.get(*j).copied().unwrap_or(if i == j { 10 } else { 20 })).collect();
        node
    };
    Ok(order.iter().map(reordered).collect())
}

fn one_node(root: &Path, allowed: &BTreeSet<u32>) -> Result<NumaNode, Error> {
    let online = read(root, "sys/devices/system/cpu/online").ok().and_then(|list| parse_list(&list));
    Ok(NumaNode {
        os_index: 0,
        cpus: online.unwrap_or_else(|| allowed.clone()).into_iter().collect(),
        cpus_allowed: allowed.iter().copied().collect(),
        memory_allowed: true,
        memory_total: meminfo(root, "MemTotal:")?,
        distances: vec![10],
    })
}

/// Largest data or unified cache of each level among the allowed CPUs, and their level 3 caches
/// together; 0 = unknown.
fn caches(root: &Path, allowed: &BTreeSet<u32>) -> Caches {
    let mut caches = Caches::default();
    let mut clusters = BTreeSet::new();
    for cpu in allowed {
        let folder = root.join(format!("sys/devices/system/cpu/cpu{cpu}/cache"));
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let field = |name| fs::read_to_string(entry.path().join(name)).unwrap_or_default().trim().to_owned();
            if !matches!(field("type").as_str(), "Data" | "Unified") {
                continue;
            }
            let Some(size) = Bytes::parse(&field("size")).ok().filter(|size| *size <= CACHE_MAX) else { continue };
            let level = match field("level").as_str() {
                "1" => &mut caches.l1d,
                "2" => &mut caches.l2,
                "3" => &mut caches.l3,
                _ => continue,
            };
            *level = size.max(*level);
            // A cache is listed by each of the CPUs that share it.
            let sharers = field("shared_cpu_list");
            if field("level") == "3" && !sharers.is_empty() && clusters.insert(sharers) {
                caches.l3_total = Bytes(caches.l3_total.0 + size.0);
            }
        }
    }
    caches.l3_total = caches.l3_total.max(caches.l3);
    caches
}

fn cpu_model(root: &Path) -> String {
    let text = read(root, "proc/cpuinfo").unwrap_or_default();
    // Arm names no model here; its machine is what the device tree says.
    let named = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':').map(|(_, name)| name));
    named.map(|name| name.trim().to_owned()).unwrap_or_else(|| format!("unknown {} CPU", std::env::consts::ARCH))
}

fn memory_free_at(root: &Path) -> Result<Free, Error> {
    let bytes = meminfo(root, "MemAvailable:")?;
    let group = group_free(root).filter(|group| *group < bytes);
    Ok(Free { bytes: group.unwrap_or(bytes), of_group: group.is_some() })
}

fn meminfo(root: &Path, key: &str) -> Result<Bytes, Error> {
    let text = read(root, "proc/meminfo")?;
    kib_after(&text, key).ok_or_else(|| Error::new(format!("cannot read {key} in /proc/meminfo")))
}

/// What the process's control group and all above it leave, version 2 or 1; none = no limit.
fn group_free(root: &Path) -> Option<Bytes> {
    let groups = read(root, "proc/self/cgroup").ok()?;
    let free_of = |line: &str| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let (mount, files) = match controllers {
            "" => ("sys/fs/cgroup", ["memory.max", "memory.current", "inactive_file "]),
            "memory" => {
                let files = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "];
                ("sys/fs/cgroup/memory", files)
            }
            _ => return None,
        };
        // A container may not see the upper part of its path: folders that are absent are passed.
        let path = path.trim_start_matches('/');
        Path::new(path).ancestors().filter_map(|part| free_in(&root.join(mount).join(part), files)).min()
    };
    groups.lines().filter_map(free_of).min()
}

/// Limit minus usage of one group; pages of files that are not in use can be taken back.
fn free_in(folder: &Path, [limit, usage, reclaimable]: [&str; 3]) -> Option<Bytes> {
    let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    // "max" does not parse: no limit.
    let (limit, usage) = (number(limit)?, number(usage)?);
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let reclaimable = stat.lines().find_map(|line| line.strip_prefix(reclaimable)?.trim().parse::<u64>().ok());
    Some(Bytes(limit.saturating_sub(usage.saturating_sub(reclaimable.unwrap_or(0)))))
}

fn read(root: &Path, file: impl AsRef<Path>) -> Result<String, Error> {
    let path = root.join(file);
    let text = fs::read_to_string(&path).map_err(|err| Error::from(err).context(format!("read {}", path.display())))?;
    Ok(text.trim().to_owned())
}

fn status_list(status: &str, key: &str) -> Option<BTreeSet<u32>> {
    status.lines().find_map(|line| line.strip_prefix(key)).and_then(parse_list)
}

/// Reads the kernel's lists: "0-3,8,10-11".
fn parse_list(text: &str) -> Option<BTreeSet<u32>> {
    let mut numbers = BTreeSet::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        numbers.extend(first.trim().parse::<u32>().ok()?..=last.trim().parse::<u32>().ok()?);
    }
    Some(numbers)
}

/// The number of KiB that follows `key` in a line.
fn kib_after(text: &str, key: &str) -> Option<Bytes> {
    let (_, rest) = text.lines().find_map(|line| line.split_once(key))?;
    let kib: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10).map(Bytes)
}

fn number_after(name: &std::ffi::OsStr, prefix: &str) -> Option<u32> {
    name.to_str()?.strip_prefix(prefix)?.parse().ok()
}

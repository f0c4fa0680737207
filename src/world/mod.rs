//! What every rank has, and how the ranks group into hosts.

pub mod host;
pub mod machine;
pub mod meet;

use serde::{Deserialize, Serialize};

use crate::gpu::DeviceInfo;
use crate::units::{Bytes, Rank};

/// A NUMA node of a rank's host. Nodes with CPUs come first, in the order of the system; the
/// notation's index is the position in that list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NumaNode {
    /// The system's number.
    pub os_index: u32,
    /// CPUs that belong to the node.
    pub cpus: Vec<u32>,
    /// Those that this rank may run on.
    pub cpus_allowed: Vec<u32>,
    /// Whether this rank may allocate there.
    pub memory_allowed: bool,
    pub memory_total: Bytes,
    /// Distances to the nodes of the list, in its order (10 = local).
    pub distances: Vec<u32>,
}

/// Largest data or unified cache of each level that a CPU of the rank sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Caches {
    pub l1d: Bytes,
    pub l2: Bytes,
    pub l3: Bytes,
    /// All level 3 caches of the rank's CPUs together: what its threads can keep data in.
    pub l3_total: Bytes,
}

/// How another process opens a rank's shared host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ShareVia {
    /// A memfd, opened through `/proc/PID/fd`: nothing is left behind, whatever happens.
    Memfd,
    /// A named segment, unlinked as soon as all have mapped it.
    Named,
}

/// What tells whether two ranks can share memory, before it is tried.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HostIdentity {
    /// `/proc/sys/kernel/random/boot_id`: one per running kernel.
    pub boot_id: String,
    /// Inode of the PID namespace: `/proc/PID` means the same process.
    pub pid_namespace: u64,
    /// Device and inode of `/dev/shm`: a name means the same segment.
    pub shm: (u64, u64),
    pub user: u32,
}

/// What one rank has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Inventory {
    /// For people; never used to group ranks.
    pub host_name: String,
    pub identity: HostIdentity,
    pub pid: u32,
    pub cpu_model: String,
    pub kernel: String,
    /// At least one.
    pub numa: Vec<NumaNode>,
    pub caches: Caches,
    pub memory_free: Bytes,
    pub devices: Vec<DeviceInfo>,
    /// By device: memory that was free when the rank had taken it; all of it where that is unknown.
    /// Empty until then.
    pub devices_free: Vec<Bytes>,
    /// Why there are none, where there are none.
    pub devices_absent: Option<String>,
}

impl Inventory {
    /// Keeps the devices that are this rank's: positions in `devices`, in order.
    pub fn keep(&mut self, kept: &[u32]) {
        let some = !self.devices.is_empty();
        let mut position = 0..;
        self.devices.retain(|_| position.next().is_some_and(|position| kept.contains(&position)));
        if some && self.devices.is_empty() {
            self.devices_absent =
                Some("ranks.gpus left none: the other ranks of the host have those that it sees".to_owned());
        }
    }

    /// Memory of a device that can be allocated.
    pub fn device_free(&self, index: u32) -> Option<Bytes> {
        let total = || self.devices.get(index as usize).map(|info| info.memory_total);
        self.devices_free.get(index as usize).copied().or_else(total)
    }

    /// The NUMA node nearest to a device, as a position in `numa`: that of its PCI slot, or the only
    /// one of a host that has no other.
    pub fn nearest_node(&self, device: u32) -> Option<usize> {
        match (self.devices.get(device as usize)?.numa, &self.numa[..]) {
            (Some(os_index), nodes) => nodes.iter().position(|node| node.os_index == os_index),
            (None, [_only]) => Some(0),
            (None, _) => None,
        }
    }

    /// CPUs that this rank may run on, over all nodes.
    pub fn cpus_allowed(&self) -> Vec<u32> {
        let mut cpus: Vec<u32> = self.numa.iter().flat_map(|node| node.cpus_allowed.iter().copied()).collect();
        cpus.sort_unstable();
        cpus
    }
}

/// Ranks that can map each other's host memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HostGroup {
    /// The host's name; `name#1` for the second group with that name, and so on.
    pub label: String,
    pub via: ShareVia,
    pub ranks: Vec<Rank>,
}

/// The whole job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct World {
    /// By rank.
    pub ranks: Vec<Inventory>,
    pub hosts: Vec<HostGroup>,
    /// By rank: position in `hosts`.
    pub host_of: Vec<u32>,
}

impl World {
    pub fn inventory(&self, rank: Rank) -> Option<&Inventory> {
        self.ranks.get(rank.0 as usize)
    }

    pub fn host(&self, rank: Rank) -> &HostGroup {
        &self.hosts[self.host_of[rank.0 as usize] as usize]
    }

    pub fn same_host(&self, a: Rank, b: Rank) -> bool {
        self.host_of[a.0 as usize] == self.host_of[b.0 as usize]
    }
}

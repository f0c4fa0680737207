//! Hosts of many shapes, as trees of files.

use super::*;

/// A machine made of files.
struct Machine(tempfile::TempDir);

impl Machine {
    fn new() -> Machine {
        let machine = Machine(tempfile::tempdir().unwrap());
        machine
            .file("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-3,6\nMems_allowed_list:\t0,8\n")
            .file("proc/self/ns/pid", "")
            .file("proc/sys/kernel/hostname", "n1.rack\n")
            .file("proc/sys/kernel/osrelease", "6.1.0\n")
            .file("proc/sys/kernel/random/boot_id", "b-o-o-t\n")
            .file("proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU\n")
            .file("proc/meminfo", "MemTotal:  67108864 kB\nMemFree: 1 kB\nMemAvailable:  20971520 kB\n")
    }

    fn file(self, path: &str, text: &str) -> Machine {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    fn node(self, index: u32, cpus: &str, kib: u64, distances: &str) -> Machine {
        let at = format!("sys/devices/system/node/node{index}");
        self.file(&format!("{at}/cpulist"), &format!("{cpus}\n"))
            .file(&format!("{at}/meminfo"), &format!("Node {index} MemTotal:   {kib} kB\nNode {index} MemFree: 1 kB\n"))
            .file(&format!("{at}/distance"), distances)
    }

    fn cache(self, cpu: u32, index: u32, level: u32, kind: &str, size: &str) -> Machine {
        let at = format!("sys/devices/system/cpu/cpu{cpu}/cache/index{index}");
        self.file(&format!("{at}/level"), &format!("{level}\n"))
            .file(&format!("{at}/type"), &format!("{kind}\n"))
            .file(&format!("{at}/size"), &format!("{size}\n"))
    }

    fn inventory(&self) -> Inventory {
        inventory_at(self.0.path()).unwrap()
    }

    fn free(&self) -> Free {
        memory_free_at(self.0.path()).unwrap()
    }
}

#[test]
fn this_host_can_be_read() {
    let inventory = inventory().unwrap();
    assert!(!inventory.cpus_allowed().is_empty());
    assert!(inventory.memory_free > Bytes::mib(1));
    assert!(!inventory.host_name.is_empty() && !inventory.identity.boot_id.is_empty());
    assert_eq!(inventory.pid, std::process::id());
    for node in &inventory.numa {
        assert_eq!(node.distances.len(), inventory.numa.len());
    }
}

#[test]
fn nodes_with_gaps_keep_their_numbers_and_those_without_cpus_come_last() {
    let machine = Machine::new()
        .node(8, "", 1 << 20, "28 26 10\n")
        .node(0, "0-3", 2 << 20, "10 21 28\n")
        .node(2, "4-7", 3 << 20, "21 10 26\n")
        .file("sys/devices/system/node/online", "0,2,8\n");
    let numa = machine.inventory().numa;
    let seen: Vec<(u32, usize, &[u32], bool)> =
        numa.iter().map(|n| (n.os_index, n.cpus.len(), &n.cpus_allowed[..], n.memory_allowed)).collect();
    assert_eq!(seen, [(0, 4, &[0, 1, 2, 3][..], true), (2, 4, &[6][..], false), (8, 0, &[][..], true)]);
    assert_eq!(numa[2].distances, [28, 26, 10]);
    assert_eq!(numa[1].memory_total, Bytes::gib(3));
}

#[test]
fn distances_follow_the_nodes_when_their_order_changes() {
    let machine = Machine::new().node(0, "", 4, "10 17\n").node(1, "0-3", 4, "18 10\n");
    let numa = machine.inventory().numa;
    let seen: Vec<(u32, &[u32])> = numa.iter().map(|n| (n.os_index, &n.distances[..])).collect();
    assert_eq!(seen, [(1, &[10, 18][..]), (0, &[17, 10][..])]);
}

#[test]
fn a_host_without_the_node_folder_is_one_node() {
    let numa = Machine::new().file("sys/devices/system/cpu/online", "0-7\n").inventory().numa;
    assert_eq!(numa.len(), 1);
    assert_eq!(numa[0].cpus.len(), 8);
    assert_eq!(numa[0].cpus_allowed, [0, 1, 2, 3, 6]);
    assert_eq!((numa[0].memory_allowed, numa[0].memory_total), (true, Bytes::gib(64)));
}

#[test]
fn nodes_that_miss_our_cpus_are_not_believed() {
    assert_eq!(Machine::new().node(0, "64-127", 4, "10\n").inventory().numa[0].cpus_allowed, [0, 1, 2, 3, 6]);
}

#[test]
fn the_largest_data_cache_of_an_allowed_cpu_counts() {
    let machine = Machine::new()
        .cache(0, 0, 1, "Data", "32K")
        .cache(0, 1, 1, "Instruction", "64K")
        .cache(0, 2, 2, "Unified", "1024K")
        .cache(0, 3, 3, "Unified", "32768K")
        .cache(6, 3, 3, "Unified", "98304K")
        .cache(5, 3, 3, "Unified", "999999K");
    let expected = Caches { l1d: Bytes::kib(32), l2: Bytes::mib(1), l3: Bytes::mib(96), l3_total: Bytes::mib(96) };
    assert_eq!(machine.inventory().caches, expected);
}

#[test]
fn level_3_caches_of_several_clusters_add_up() {
    let machine = [(0, "0-1"), (1, "0-1"), (2, "2-3"), (6, "6-7"), (5, "4-5")].into_iter().fold(
        Machine::new(),
        |machine, (cpu, sharers)| {
            let at = format!("sys/devices/system/cpu/cpu{cpu}/cache/index3/shared_cpu_list");
            machine.cache(cpu, 3, 3, "Unified", "32768K").file(&at, &format!("{sharers}\n"))
        },
    );
    let caches = machine.inventory().caches;
    assert_eq!((caches.l3, caches.l3_total), (Bytes::mib(32), Bytes::mib(96)));
}

#[test]
fn a_cache_that_cannot_be_is_unknown() {
    for size in ["16777216K", "18014398509481984K", "", "lots"] {
        let caches =
            Machine::new().cache(0, 2, 2, "Unified", "1024K").cache(0, 3, 3, "Unified", size).inventory().caches;
        assert_eq!(caches, Caches { l2: Bytes::mib(1), ..Caches::default() }, "{size:?}");
    }
    assert_eq!(Machine::new().cache(0, 3, 3, "Unified", "4194304K").inventory().caches.l3, CACHE_MAX);
}

#[test]
fn identity_comes_from_the_kernel_and_the_folder_of_segments() {
    let machine = Machine::new().file("dev/shm/x", "");
    let inventory = machine.inventory();
    assert_eq!(inventory.identity.boot_id, "b-o-o-t");
    assert_ne!(inventory.identity.shm, (0, 0));
    assert_eq!(inventory.cpu_model, "Some CPU");
    assert_eq!((inventory.host_name.as_str(), inventory.kernel.as_str()), ("n1.rack", "6.1.0"));
    assert_eq!(Machine::new().inventory().identity.shm, (0, 0));
}

#[test]
fn an_unreadable_identity_is_an_error_that_names_the_file() {
    let machine = Machine::new();
    fs::remove_file(machine.0.path().join("proc/sys/kernel/random/boot_id")).unwrap();
    let message = inventory_at(machine.0.path()).unwrap_err().to_string();
    assert!(message.contains("boot_id"), "{message}");
}

#[test]
fn free_memory_is_the_hosts_or_that_of_the_tightest_group() {
    let host = Free { bytes: Bytes::gib(20), of_group: false };
    assert_eq!(Machine::new().free(), host);

    let v2 = || Machine::new().file("proc/self/cgroup", "0::/job/step\n");
    assert_eq!(v2().file("sys/fs/cgroup/job/step/memory.max", "max\n").free(), host);
    let gib = |n: u64| (n << 30).to_string();
    let step = v2().file("sys/fs/cgroup/job/step/memory.max", "max").file("sys/fs/cgroup/job/step/memory.current", "5");
    let limited = step
        .file("sys/fs/cgroup/job/memory.max", &gib(8))
        .file("sys/fs/cgroup/job/memory.current", &gib(5))
        .file("sys/fs/cgroup/job/memory.stat", &format!("anon 7\ninactive_file {}\n", gib(2)));
    assert_eq!(limited.free(), Free { bytes: Bytes::gib(5), of_group: true });

    // The path is the host's, the container sees its own group at the top.
    let v1 = Machine::new()
        .file("proc/self/cgroup", "4:memory:/docker/abc\n0::/\n")
        .file("sys/fs/cgroup/memory/memory.limit_in_bytes", &gib(4))
        .file("sys/fs/cgroup/memory/memory.usage_in_bytes", &gib(1));
    assert_eq!(v1.free(), Free { bytes: Bytes::gib(3), of_group: true });
}

#[test]
fn free_memory_is_printed_for_readers() {
    let text = |bytes, of_group| Free { bytes: Bytes(bytes), of_group }.to_string();
    assert_eq!(text((20 << 30) + 123, false), "20 GiB free");
    assert_eq!(text((9 << 30) + 123, false), "9 GiB free");
    assert_eq!(text((9 << 30) + (5 << 20) + 1, true), "9221 MiB free within the control group's limit");
    assert_eq!(text(0, false), "0 B free");
}

#[test]
fn lists_of_the_kernel_are_read() {
    let read = |text| parse_list(text).map(|set| set.into_iter().collect::<Vec<u32>>());
    assert_eq!(read("0-2,8\n"), Some(vec![0, 1, 2, 8]));
    assert_eq!(read("\n"), Some(vec![]));
    assert_eq!(read("0-x"), None);
}

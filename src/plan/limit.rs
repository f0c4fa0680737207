//! What physics allows a transfer: the slowest thing on its path, by what is known of the devices.

use crate::gpu::DeviceInfo;
use crate::gpu::peaks::PeerLinks;
use crate::place::{ExeKind, MemKind, Place};
use crate::plan::Transfer;
use crate::units::Rank;
use crate::world::World;

/// A rate of payload that no transfer can exceed, in GB/s.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    pub gbps: f64,
    /// "memory of R0G0", "PCIe 5.0 x16 of R0G0".
    pub by: String,
}

/// What a transfer passes, and how often.
///
/// The payload limit of each thing is its peak over the number of times that the payload passes it;
/// of things whose peak is not known, host memory and message transports among them, nothing is
/// claimed. So a limit may be too high, and none is too low.
pub fn limit(transfer: &Transfer, world: &World) -> Option<Limit> {
    let mut path = Path { world, passed: Vec::new() };
    for place in transfer.srcs.iter().chain(&transfer.dsts) {
        path.memory(place);
    }
    for (from, to) in hops(transfer) {
        path.hop(from, to);
    }
    let limits = path.passed.into_iter().map(|it| Limit { gbps: it.peak / f64::from(it.times), by: it.by });
    // The first of equals: in the order of the path.
    limits.min_by(|a, b| a.gbps.total_cmp(&b.gbps))
}

/// Where bytes come from or go to.
#[derive(Clone, Copy)]
enum End {
    Host(Rank),
    Device(Rank, u32),
}

/// The ways that the payload takes from one end to another.
fn hops(transfer: &Transfer) -> Vec<(End, End)> {
    let exe = transfer.exe;
    let through = match exe.kind {
        ExeKind::Cpu => End::Host(exe.rank),
        ExeKind::Kernel | ExeKind::Bulk => End::Device(exe.rank, exe.index),
        // A runtime may do a copy between others without the device that it was asked of.
        ExeKind::CopyEngine | ExeKind::Batch => {
            let pairs = transfer.srcs.iter().flat_map(|src| transfer.dsts.iter().map(move |dst| (src, dst)));
            return pairs.filter_map(|(src, dst)| Some((end(src)?, end(dst)?))).collect();
        }
        ExeKind::Mpi | ExeKind::Nic | ExeKind::NicNear => return Vec::new(),
    };
    let read = transfer.srcs.iter().filter_map(end).map(|from| (from, through));
    let written = transfer.dsts.iter().filter_map(end).map(|to| (through, to));
    read.chain(written).collect()
}

/// Managed memory is wherever the runtime put it last.
fn end(place: &Place) -> Option<End> {
    match place.kind {
        MemKind::Managed => None,
        kind if kind.is_host() => Some(End::Host(place.rank)),
        _ => Some(End::Device(place.rank, place.index)),
    }
}

struct Path<'w> {
    world: &'w World,
    passed: Vec<Passed>,
}

/// A thing on the path, in one direction.
struct Passed {
    key: String,
    by: String,
    /// In GB/s.
    peak: f64,
    times: u32,
}

impl<'w> Path<'w> {
    fn device(&self, rank: Rank, index: u32) -> Option<&'w DeviceInfo> {
        self.world.inventory(rank)?.devices.get(index as usize)
    }

    /// Ranks may see one device under several numbers.
    fn key(&self, rank: Rank, device: &DeviceInfo) -> String {
        format!("{} {}", self.world.host_of[rank.0 as usize], device.uuid)
    }

    fn pass(&mut self, key: String, by: impl FnOnce() -> String, peak: f64) {
        match self.passed.iter_mut().find(|passed| passed.key == key) {
            Some(passed) => passed.times += 1,
            None => self.passed.push(Passed { key, by: by(), peak, times: 1 }),
        }
    }

    /// One read or one write.
    fn memory(&mut self, place: &Place) {
        let Some(End::Device(rank, index)) = end(place) else { return };
        let Some(device) = self.device(rank, index) else { return };
        if let Some(peak) = device.peaks.memory_gbps {
            let key = format!("memory {}", self.key(rank, device));
            self.pass(key, || format!("memory of R{rank}G{index}"), peak);
        }
    }

    fn hop(&mut self, from: End, to: End) {
        match (from, to) {
            (End::Host(_), End::Host(_)) => {}
            (End::Device(rank, index), End::Host(host)) if self.world.same_host(rank, host) => {
                self.pcie(rank, index, "out");
            }
            (End::Host(host), End::Device(rank, index)) if self.world.same_host(rank, host) => {
                self.pcie(rank, index, "in");
            }
            (End::Device(a, i), End::Device(b, j)) => self.between((a, i), (b, j)),
            _ => {}
        }
    }

    fn pcie(&mut self, rank: Rank, index: u32, way: &str) {
        let Some(device) = self.device(rank, index) else { return };
        if let Some(pcie) = device.peaks.pcie {
            let key = format!("pcie {way} {}", self.key(rank, device));
            self.pass(key, || format!("{pcie} of R{rank}G{index}"), pcie.gbps());
        }
    }

    /// Between two devices: the links that they have to each other, else PCIe.
    fn between(&mut self, (a, i): (Rank, u32), (b, j): (Rank, u32)) {
        let (Some(from), Some(to)) = (self.device(a, i), self.device(b, j)) else { return };
        let (from_key, to_key) = (self.key(a, from), self.key(b, to));
        let (Some(out), Some(back)) = (&from.peaks.links, &to.peaks.links) else { return };
        if from_key == to_key {
            return;
        }
        let one_host = self.world.same_host(a, b);
        let (direct, switched) = towards(out, one_host.then_some(&to.pci));
        let (direct_back, switched_back) = towards(back, one_host.then_some(&from.pci));
        let none = [&direct, &switched, &direct_back, &switched_back].iter().all(|links| links.is_empty());
        if none && one_host {
            self.pcie(a, i, "out");
            self.pcie(b, j, "in");
        } else if direct.is_empty() && direct_back.is_empty() {
            // What goes by a switch shares these links with what goes to others.
            self.links(&switched, format!("links out {from_key}"), format!("from R{a}G{i}"));
            self.links(&switched_back, format!("links in {to_key}"), format!("to R{b}G{j}"));
        } else {
            let all = [direct, switched].concat();
            self.links(&all, format!("links {from_key} {to_key}"), format!("from R{a}G{i} to R{b}G{j}"));
        }
    }

    fn links(&mut self, links: &[&PeerLinks], key: String, ends: String) {
        let peak: Option<f64> = links.iter().map(|link| link.gbps).sum();
        let count: u32 = links.iter().map(|link| link.count).sum();
        if let (Some(peak), Some(first)) = (peak, links.first()) {
            self.pass(key, || format!("{count} x {} {ends}", first.kind), peak);
        }
    }
}

/// Links to a neighbour at a PCI address of the same host, and those that may lead anywhere.
fn towards<'l>(links: &'l [PeerLinks], pci: Option<&String>) -> (Vec<&'l PeerLinks>, Vec<&'l PeerLinks>) {
    let direct = links.iter().filter(|link| link.to.is_some() && link.to.as_ref() == pci).collect();
    (direct, links.iter().filter(|link| link.to.is_none()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::peaks::{Pcie, Peaks, memory_gbps};
    use crate::place::{ExeKind, Executor};
    use crate::report::fixtures;

    /// An H200: what its runtime, /sys and NVML tell of it, recorded.
    fn h200(n: u32) -> DeviceInfo {
        let switched = PeerLinks { to: None, kind: "NVLink 4".to_owned(), count: 18, gbps: Some(450.0) };
        DeviceInfo {
            uuid: format!("GPU-{n}"),
            pci: format!("0000:0{n}:00.0"),
            peaks: Peaks {
                memory_gbps: memory_gbps(Some(3_201_000), Some(6144), Some(2)),
                pcie: Some(Pcie { gts: 32.0, lanes: 16, gts_now: Some(32.0), lanes_now: Some(16) }),
                links: Some(vec![switched]),
                absent: None,
            },
            ..fixtures::device()
        }
    }

    /// Rank 0 has devices 0 and 1, rank 1 of the same host device 2, rank 2 of another one device 3.
    fn world(change: impl Fn(&mut DeviceInfo)) -> World {
        let mut world = fixtures::world(&[0, 0, 1]);
        for (rank, numbers) in [vec![0, 1], vec![2], vec![3]].into_iter().enumerate() {
            world.ranks[rank].devices = numbers.into_iter().map(h200).collect();
            world.ranks[rank].devices.iter_mut().for_each(&change);
        }
        world
    }

    /// `G0.1` is device 1 of rank 0, `C1` memory or CPU of rank 1.
    fn split(name: &str) -> (char, Rank, u32) {
        let (kind, numbers) = name.split_at(1);
        let (rank, index) = numbers.split_once('.').unwrap_or((numbers, "0"));
        (kind.chars().next().unwrap(), Rank(rank.parse().unwrap()), index.parse().unwrap())
    }

    fn check(world: &World, srcs: &[&str], exe: &str, dsts: &[&str]) -> Option<(f64, String)> {
        let place = |name: &&str| {
            let (kind, rank, index) = split(name);
            Place { rank, kind: MemKind::from_letter(kind).unwrap(), index }
        };
        let (kind, rank, index) = split(exe);
        let mut transfer = fixtures::transfer(0, &[], 0, &[]);
        transfer.srcs = srcs.iter().map(place).collect();
        transfer.dsts = dsts.iter().map(place).collect();
        transfer.exe = Executor { rank, kind: ExeKind::from_letter(kind).unwrap(), index, sub_index: None };
        limit(&transfer, world).map(|limit| ((limit.gbps * 10.0).round() / 10.0, limit.by))
    }

    #[track_caller]
    fn expect(found: Option<(f64, String)>, gbps: f64, by: &str) {
        assert_eq!(found, Some((gbps, by.to_owned())));
    }

    #[test]
    fn every_read_and_write_of_one_memory_counts() {
        let world = world(|_| {});
        expect(check(&world, &["G0"], "G0", &["G0"]), 2458.4, "memory of R0G0");
        expect(check(&world, &["G0"], "D0", &["G0"]), 2458.4, "memory of R0G0");
        expect(check(&world, &["G0", "G0"], "G0", &["G0"]), 1638.9, "memory of R0G0");
        expect(check(&world, &["G0"], "G0", &[]), 4916.7, "memory of R0G0");
        expect(check(&world, &[], "G0", &["G0"]), 4916.7, "memory of R0G0");
    }

    #[test]
    fn host_and_device_are_joined_by_pcie_each_way() {
        let world = world(|_| {});
        for (src, exe, dst) in [("C0", "D0", "G0"), ("G0", "G0", "C1"), ("G0", "C0", "C0"), ("H1", "C1", "G0.0")] {
            expect(check(&world, &[src], exe, &[dst]), 63.0, "PCIe 5.0 x16 of R0G0");
        }
        expect(check(&world, &["C0"], "G0", &["C0"]), 63.0, "PCIe 5.0 x16 of R0G0");
        expect(check(&world, &["C0", "C0"], "G0", &["G0"]), 31.5, "PCIe 5.0 x16 of R0G0");
        assert_eq!(check(&world, &["C0"], "D0", &["C1"]), None, "the runtime may leave the device out");
    }

    #[test]
    fn switched_links_are_shared_by_all_neighbours() {
        let world = world(|_| {});
        expect(check(&world, &["G0"], "G0", &["G0.1"]), 450.0, "18 x NVLink 4 from R0G0");
        expect(check(&world, &["G0"], "G1", &["G1"]), 450.0, "18 x NVLink 4 from R0G0");
        expect(check(&world, &["G0"], "G0", &["G0.1", "G1"]), 225.0, "18 x NVLink 4 from R0G0");
        expect(check(&world, &["G0", "G0.1"], "G1", &["G1"]), 225.0, "18 x NVLink 4 to R1G0");
        expect(check(&world, &["G0"], "D0", &["G2"]), 450.0, "18 x NVLink 4 from R0G0");
    }

    #[test]
    fn direct_links_are_those_of_the_pair() {
        let world = world(|device| {
            let to = |n: u32, count| PeerLinks {
                to: Some(format!("0000:0{n}:00.0")),
                kind: "xGMI".to_owned(),
                count,
                gbps: (count > 0).then(|| 50.0 * f64::from(count)),
            };
            device.peaks.links = Some(match device.uuid.as_str() {
                "GPU-0" => vec![to(1, 4), to(2, 0)],
                "GPU-1" => vec![to(0, 4)],
                _ => vec![to(0, 0)],
            });
        });
        expect(check(&world, &["G0"], "G0", &["G0.1"]), 200.0, "4 x xGMI from R0G0 to R0G1");
        expect(check(&world, &["G0"], "G0", &["G0.1", "G0.1"]), 100.0, "4 x xGMI from R0G0 to R0G1");
        expect(check(&world, &["G0.1"], "G0.1", &["G1"]), 63.0, "PCIe 5.0 x16 of R0G1");
        // Linked, but nobody says how fast: only the memories are known.
        expect(check(&world, &["G0"], "G0", &["G1"]), 4916.7, "memory of R0G0");
        expect(check(&world, &["G0"], "G0", &["G2"]), 4916.7, "memory of R0G0");
    }

    #[test]
    fn nothing_is_claimed_of_what_is_not_known() {
        let bare = world(|device| device.peaks = Peaks::default());
        for (src, exe, dst) in [("G0", "G0", "G0"), ("C0", "D0", "G0"), ("G0", "G0", "G0.1"), ("C0", "C0", "C1")] {
            assert_eq!(check(&bare, &[src], exe, &[dst]), None, "{src} {exe} {dst}");
        }
        let known = world(|_| {});
        expect(check(&known, &["G0"], "M0", &["G2"]), 4916.7, "memory of R0G0");
        assert_eq!(check(&known, &["M0"], "C0", &["C0"]), None, "managed memory is anywhere");
        let unlinked = world(|device| device.peaks.links = None);
        expect(check(&unlinked, &["G0"], "G0", &["G0.1"]), 4916.7, "memory of R0G0");
    }

    #[test]
    fn one_device_of_two_ranks_is_one_device() {
        let mut world = world(|_| {});
        world.ranks[1].devices = vec![h200(0)];
        expect(check(&world, &["G0"], "G0", &["G1"]), 2458.4, "memory of R0G0");
    }
}

//! Gathers the inventories and finds out, by trying, which ranks share host memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::machine::Machine;
use super::{HostGroup, Inventory, ShareVia, World};
use crate::comm::{Communicator, wire};
use crate::config::options::Gpus;
use crate::error::Error;
use crate::fault::Faults;
use crate::memory::map::{HostMap, SharedHandle, read, write};
use crate::units::{Bytes, Rank};

/// Bytes that tell a probe of this job from a stranger's memory.
type Token = [u8; 16];

/// A leader's memory for the others of its host to open, one for each way that worked for it.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
struct Probe {
    via: ShareVia,
    handle: SharedHandle,
    token: Token,
}

/// Whether a rank could open its leader's probes, and why not.
type Opened = BTreeMap<u8, Result<(), String>>;

const WAYS: [ShareVia; 2] = [ShareVia::Memfd, ShareVia::Named];

/// A rank's place among the ranks of its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Seat {
    /// How the ranks of the host share memory.
    pub via: ShareVia,
    /// Position among them, in rank order.
    pub position: u32,
    pub neighbours: u32,
}

/// What a rank takes from the meeting.
pub struct Met {
    /// On rank 0 alone.
    pub world: Option<World>,
    pub seat: Seat,
    /// The devices that it keeps, of those that it sees.
    pub kept: Vec<u32>,
}

/// Collective: who is there, who shares a host, and whose each device is.
///
/// Costs a rank one probe of its host's first rank; that rank makes one, whatever their number.
pub fn meet(comm: &dyn Communicator, inventory: &Inventory, gpus: Gpus, faults: &Faults) -> Met {
    let inventories = wire::gather(comm, inventory);
    let leaders = wire::broadcast(comm, inventories.as_deref().map(leaders));
    let me = comm.rank();
    let leader = leaders[me.0 as usize];

    let members: Vec<Rank> = (0..comm.size()).map(Rank).filter(|r| leaders[r.0 as usize] == me && *r != me).collect();
    let mut kept = Vec::new();
    let mut outgoing = Vec::new();
    if !members.is_empty() {
        let probes: Vec<Probe> = WAYS.iter().filter_map(|via| make_probe(*via, faults, &mut kept).ok()).collect();
        outgoing = members.iter().map(|member| (*member, probes.clone())).collect();
    }
    let from: &[Rank] = if leader == me { &[] } else { &[leader] };
    let probes = wire::exchange(comm, &outgoing, from);
    let opened: Opened = probes
        .into_iter()
        .flatten()
        .map(|probe| (probe.via as u8, open_probe(&probe, faults).map_err(|err| err.to_string())))
        .collect();
    let all = wire::gather(comm, &opened);
    // Every member has opened what it could: the probes may go.
    drop(kept);

    let names = inventories.as_deref().map(|list| list.iter().map(|i| i.host_name.clone()).collect::<Vec<_>>());
    let groups = all.zip(names).map(|(all, names)| group(&leaders, &all, &names));
    let seats = wire::broadcast(comm, groups.as_ref().map(|(hosts, host_of)| seats(hosts, host_of)));
    let mut world = inventories.zip(groups).map(|(ranks, (hosts, host_of))| World { ranks, hosts, host_of });
    let kept = wire::broadcast(comm, world.as_ref().map(|world| share_out(world, gpus)));
    for (inventory, kept) in world.iter_mut().flat_map(|world| &mut world.ranks).zip(&kept) {
        inventory.keep(kept);
    }
    let kept = kept.into_iter().nth(me.0 as usize).expect("there is a share for every rank");
    Met { world, seat: seats[me.0 as usize], kept }
}

/// Collective: what is free on each rank's own devices, into the world of rank 0.
pub fn weigh(comm: &dyn Communicator, world: Option<World>, machine: &Machine) -> Option<World> {
    let free = wire::gather(comm, &machine.devices_free());
    let mut world = world?;
    for (inventory, free) in world.ranks.iter_mut().zip(free.into_iter().flatten()) {
        inventory.devices_free = free;
    }
    Some(world)
}

/// By rank.
fn seats(hosts: &[HostGroup], host_of: &[u32]) -> Vec<Seat> {
    let seat = |(rank, host): (usize, &u32)| {
        let HostGroup { via, ranks, .. } = &hosts[*host as usize];
        let position = ranks.iter().position(|other| other.0 as usize == rank).expect("a rank is on its host");
        Seat { via: *via, position: position as u32, neighbours: ranks.len() as u32 }
    };
    host_of.iter().enumerate().map(seat).collect()
}

/// By rank: which of its visible devices it keeps, as positions in its inventory.
///
/// A device is known by its UUID. Those that the very same ranks of a host see are shared out among
/// these ranks in rank order, neighbours together, so that ranks and devices spread evenly.
fn share_out(world: &World, gpus: Gpus) -> Vec<Vec<u32>> {
    let seen = |rank: Rank| 0..world.ranks[rank.0 as usize].devices.len() as u32;
    let uuid = |rank: Rank, device: u32| &world.ranks[rank.0 as usize].devices[device as usize].uuid;
    let mut kept = vec![Vec::new(); world.ranks.len()];
    for host in &world.hosts {
        // What the same ranks see, in the order in which the first of them numbers it.
        let mut classes: BTreeMap<Vec<Rank>, Vec<&String>> = BTreeMap::new();
        let mut known = BTreeSet::new();
        for (rank, device) in host.ranks.iter().flat_map(|rank| seen(*rank).map(|device| (*rank, device))) {
            let name = uuid(rank, device);
            if known.insert(name) {
                let sees = |other: &Rank| seen(*other).any(|device| uuid(*other, device) == name);
                classes.entry(host.ranks.iter().copied().filter(sees).collect()).or_default().push(name);
            }
        }
        let owner = |name: &String| {
            let (ranks, devices) = classes.iter().find(|(_, devices)| devices.contains(&name))?;
            let position = devices.iter().position(|device| *device == name)?;
            Some(ranks[position * ranks.len() / devices.len()])
        };
        for (local, rank) in host.ranks.iter().enumerate() {
            let count = seen(*rank).len();
            let keeps = |device: &u32| match gpus {
                Gpus::All => true,
                Gpus::LocalRank => *device as usize == local % count,
                Gpus::Split => owner(uuid(*rank, *device)) == Some(*rank),
            };
            kept[rank.0 as usize] = seen(*rank).filter(keeps).collect();
        }
    }
    kept
}

/// The first rank of each set of ranks that look as if they shared memory, by rank.
fn leaders(inventories: &[Inventory]) -> Vec<Rank> {
    let mut first = BTreeMap::new();
    inventories
        .iter()
        .enumerate()
        .map(|(rank, inventory)| *first.entry(&inventory.identity).or_insert(Rank(rank as u32)))
        .collect()
}

fn make_probe(via: ShareVia, faults: &Faults, kept: &mut Vec<Arc<HostMap>>) -> Result<Probe, Error> {
    faults.hit("probe")?;
    // Its steps are not those of a buffer.
    let quiet = Faults::default();
    let mut token = Token::default();
    rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty())?;
    let map = Arc::new(HostMap::shared(Bytes::kib(4), via, None, &quiet)?);
    write(&map.region(), 0, &token);
    let handle = map.export_handle(&quiet)?;
    kept.push(map);
    Ok(Probe { via, handle, token })
}

fn open_probe(probe: &Probe, faults: &Faults) -> Result<(), Error> {
    faults.hit("open_probe")?;
    let map = Arc::new(HostMap::import(&probe.handle, Bytes::kib(4), &Faults::default())?);
    let mut token = Token::default();
    read(&map.region(), 0, &mut token);
    if token == probe.token { Ok(()) } else { Err(Error::new("another process's memory came up under the handle")) }
}

/// Members that opened their leader's probe form its host; the others are hosts of their own.
fn group(leaders: &[Rank], opened: &[Opened], names: &[String]) -> (Vec<HostGroup>, Vec<u32>) {
    let worked = |rank: usize, via: ShareVia| matches!(opened[rank].get(&(via as u8)), Some(Ok(())));
    let mut hosts: Vec<HostGroup> = Vec::new();
    let mut host_of = vec![0; leaders.len()];
    let mut host_of_leader = BTreeMap::new();
    for (rank, leader) in leaders.iter().enumerate() {
        let rank_id = Rank(rank as u32);
        let members = || (0..leaders.len()).filter(|r| leaders[*r] == *leader && Rank(*r as u32) != *leader);
        // The way that most members could use; nearly always all or none.
        let count = |via| members().filter(|r| worked(*r, via)).count();
        let via = if count(ShareVia::Named) > count(ShareVia::Memfd) { ShareVia::Named } else { ShareVia::Memfd };
        let joins = rank_id != *leader && worked(rank, via);
        let host = match host_of_leader.get(leader) {
            Some(host) if joins => *host,
            _ => {
                hosts.push(HostGroup { label: names[rank].clone(), via, ranks: Vec::new() });
                (hosts.len() - 1) as u32
            }
        };
        if rank_id == *leader {
            host_of_leader.insert(*leader, host);
        }
        hosts[host as usize].ranks.push(rank_id);
        host_of[rank] = host;
    }
    number_equal_names(&mut hosts);
    (hosts, host_of)
}

fn number_equal_names(hosts: &mut [HostGroup]) {
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    for host in hosts {
        let count = seen.entry(host.label.clone()).or_default();
        if *count > 0 {
            host.label = format!("{}#{count}", host.label);
        }
        *count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::DeviceInfo;
    use crate::report::fixtures;

    fn check(leaders: &[u32], fails: &[usize], names: &[&str], expected: &[(&str, &[u32])]) {
        let leaders: Vec<Rank> = leaders.iter().map(|r| Rank(*r)).collect();
        let opened: Vec<Opened> = (0..leaders.len())
            .map(|rank| {
                let result = if fails.contains(&rank) { Err("refused".to_owned()) } else { Ok(()) };
                [(ShareVia::Memfd as u8, result)].into_iter().collect()
            })
            .collect();
        let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
        let (hosts, host_of) = group(&leaders, &opened, &names);
        let got: Vec<(String, Vec<u32>)> =
            hosts.iter().map(|h| (h.label.clone(), h.ranks.iter().map(|r| r.0).collect())).collect();
        let expected: Vec<(String, Vec<u32>)> = expected.iter().map(|(n, r)| ((*n).to_owned(), r.to_vec())).collect();
        assert_eq!(got, expected);
        for (rank, host) in host_of.iter().enumerate() {
            assert!(hosts[*host as usize].ranks.contains(&Rank(rank as u32)));
        }
    }

    #[test]
    fn ranks_group_by_what_they_share_and_not_by_name() {
        check(&[0, 0, 0], &[], &["n", "n", "n"], &[("n", &[0, 1, 2])]);
        check(&[0, 1, 0, 1], &[], &["n", "n", "n", "n"], &[("n", &[0, 2]), ("n#1", &[1, 3])]);
        check(&[0, 0], &[], &["a", "b"], &[("a", &[0, 1])]);
    }

    #[test]
    fn seats_count_the_ranks_of_a_host_in_order() {
        let host = |ranks: &[u32]| HostGroup {
            label: "n".into(),
            via: ShareVia::Memfd,
            ranks: ranks.iter().map(|r| Rank(*r)).collect(),
        };
        let seats = seats(&[host(&[0, 2]), host(&[1])], &[0, 1, 0]);
        let places: Vec<(u32, u32)> = seats.iter().map(|seat| (seat.position, seat.neighbours)).collect();
        assert_eq!(places, [(0, 2), (0, 1), (1, 2)]);
    }

    #[test]
    fn a_rank_that_cannot_open_the_probe_is_a_host_of_its_own() {
        check(&[0, 0, 0], &[1], &["n", "n", "n"], &[("n", &[0, 2]), ("n#1", &[1])]);
    }

    /// `sees`: by rank, the names of the devices that it sees; `expected`: those that it keeps.
    fn check_share(hosts: &[u32], sees: &[&str], gpus: Gpus, expected: &[&str]) {
        let mut world = fixtures::world(hosts);
        for (inventory, names) in world.ranks.iter_mut().zip(sees) {
            let device = |name: &str| DeviceInfo { uuid: name.to_owned(), ..fixtures::device() };
            inventory.devices = names.split_whitespace().map(device).collect();
        }
        let kept = share_out(&world, gpus);
        for (inventory, kept) in world.ranks.iter_mut().zip(&kept) {
            inventory.keep(kept);
        }
        let names = |inventory: &Inventory| {
            inventory.devices.iter().map(|device| device.uuid.as_str()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(world.ranks.iter().map(names).collect::<Vec<_>>(), expected, "{sees:?} {gpus:?}");
    }

    #[test]
    fn devices_seen_in_common_are_split_in_rank_order() {
        check_share(&[0, 0], &["a b", "a b"], Gpus::Split, &["a", "b"]);
        check_share(&[0, 0], &["a b c d", "a b c d"], Gpus::Split, &["a b", "c d"]);
        check_share(&[0, 0, 0], &["a b c d", "a b c d", "a b c d"], Gpus::Split, &["a b", "c", "d"]);
        // More ranks than devices: they spread over the ranks.
        check_share(&[0, 0, 0, 0], &["a b", "a b", "a b", "a b"], Gpus::Split, &["a", "", "b", ""]);
        // Another order of numbering is the same devices.
        check_share(&[0, 0], &["a b", "b a"], Gpus::Split, &["a", "b"]);
    }

    #[test]
    fn masked_devices_stay_with_who_sees_them() {
        check_share(&[0, 0], &["a", "b"], Gpus::Split, &["a", "b"]);
        check_share(&[0, 0], &["a b", "b c"], Gpus::Split, &["a b", "c"]);
        check_share(&[0, 0], &["", "a"], Gpus::Split, &["", "a"]);
        check_share(&[0, 0, 0, 0], &["a b", "a b", "c d", "c d"], Gpus::Split, &["a", "b", "c", "d"]);
    }

    #[test]
    fn equal_names_on_other_hosts_are_other_devices() {
        check_share(&[0, 1, 0, 1], &["a b", "a b", "a b", "a b"], Gpus::Split, &["a", "a", "b", "b"]);
    }

    #[test]
    fn devices_can_be_given_to_all_or_by_position() {
        check_share(&[0, 0], &["a b", "a b"], Gpus::All, &["a b", "a b"]);
        check_share(&[0, 1, 0, 0], &["a b", "a b", "a b", "a b"], Gpus::LocalRank, &["a", "a", "b", "a"]);
        check_share(&[0, 0], &["", ""], Gpus::LocalRank, &["", ""]);
    }
}

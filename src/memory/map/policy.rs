//! Host memory that a device runtime allocates: on the node that is asked for, and proven to be there.

use rustix::io::Errno;

use super::{Placement, access, check_free, last_errno, node_mask, placement_of};
use crate::error::Error;
use crate::fault::Faults;
use crate::region::Region;
use crate::units::Bytes;
use crate::world::{NumaNode, host};

/// Bits of a node mask that every kernel takes: the largest has 1024 nodes (`CONFIG_NODES_SHIFT`).
const NODES_MAX: usize = 4096;

/// Runs `allocate`, which takes pages for `bytes` bytes by the policy of the calling thread, with a
/// preference for `node`; zeroes the memory, and says where its pages are.
///
/// The thread's own policy is put back in every case.
///
/// # Errors
/// Not enough memory is free, `allocate` fails, or pages are on another node.
pub fn allocate_on<T>(
    node: &NumaNode,
    bytes: Bytes,
    faults: &Faults,
    allocate: impl FnOnce() -> Result<(T, Region), Error>,
) -> Result<(T, String), Error> {
    check_free(bytes, host::memory_free()?)?;
    faults.hit("bind")?;
    let policy = Preference::set(node.os_index);
    let (owner, region) = allocate()?;
    // Pages that are not there yet come with the first write.
    access::fill(&region, 0, bytes, 0);
    let refused = match policy {
        Ok(preference) => {
            drop(preference);
            None
        }
        Err(Errno::NOSYS) => Some("the kernel has no NUMA support"),
        // Containers often forbid it.
        Err(Errno::PERM) => Some("the system forbids it"),
        Err(err) => return Err(Error::from(err).context(format!("prefer memory of node {}", node.os_index))),
    };
    let placement = placement_of(region.address(), bytes.round_up(super::page()).unwrap_or(bytes));
    verify(&placement, node)?;
    let note = refused.map(|why| format!("; not bound to node {}: {why}", node.os_index));
    Ok((owner, format!("{placement}{}", note.unwrap_or_default())))
}

fn verify(placement: &Placement, node: &NumaNode) -> Result<(), Error> {
    match placement.misplaced(node.os_index) {
        Some(misplaced) => Err(Error::new(format!("{misplaced}; free memory on that node, or use memory of kind H"))),
        None => Ok(()),
    }
}

/// The calling thread's memory policy as it was, put back when dropped.
struct Preference {
    mode: libc::c_int,
    nodes: Vec<libc::c_ulong>,
}

impl Preference {
    /// Prefers `node` for the pages that this thread takes from now on.
    fn set(node: u32) -> Result<Preference, Errno> {
        let before = Preference::current()?;
        let preferred = node_mask(node);
        set_policy(libc::MPOL_PREFERRED, &preferred)?;
        Ok(before)
    }

    fn current() -> Result<Preference, Errno> {
        let mut mode: libc::c_int = 0;
        let mut nodes: Vec<libc::c_ulong> = vec![0; NODES_MAX / libc::c_ulong::BITS as usize];
        let (address, flags): (usize, libc::c_ulong) = (0, 0);
        // SAFETY: the kernel writes one integer and at most as many bits as it is told the mask has.
        let done = unsafe {
            libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, nodes.as_mut_ptr(), NODES_MAX, address, flags)
        };
        if done == 0 { Ok(Preference { mode, nodes }) } else { Err(last_errno()) }
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        if let Err(err) = set_policy(self.mode, &self.nodes) {
            tracing::warn!("the memory policy of a thread was not put back: {}", std::io::Error::from(err));
        }
    }
}

fn set_policy(mode: libc::c_int, nodes: &[libc::c_ulong]) -> Result<(), Errno> {
    // The kernel reads one bit less than it is told (set_mempolicy(2), BUGS of mbind(2)).
    let bits = nodes.len() * libc::c_ulong::BITS as usize + 1;
    let empty = nodes.iter().all(|word| *word == 0);
    // The default policy takes no nodes.
    let (mask, bits) = if empty { (std::ptr::null(), 0) } else { (nodes.as_ptr(), bits) };
    // SAFETY: the kernel reads the mask, which lives across the call, and changes where this thread's
    // later pages come from.
    let done = unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::c_long::from(mode), mask, bits) };
    if done == 0 { Ok(()) } else { Err(last_errno()) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::HostMap;
    use super::*;
    use crate::fault::Action;

    fn policy() -> Option<(libc::c_int, Vec<libc::c_ulong>)> {
        // A system that forbids the question has nothing to put back.
        Preference::current().ok().map(|now| {
            let now = std::mem::ManuallyDrop::new(now);
            (now.mode, now.nodes.clone())
        })
    }

    fn node() -> NumaNode {
        host::inventory().unwrap().numa.swap_remove(0)
    }

    #[test]
    fn memory_is_zeroed_on_its_node_and_the_policy_is_put_back() {
        let (node, bytes, before) = (node(), Bytes(10_000), policy());
        let mut during = None;
        let (map, note) = allocate_on(&node, bytes, &Faults::default(), || {
            during = policy();
            let map = Arc::new(HostMap::private(bytes, None, &Faults::default())?);
            access::fill(&map.region(), 0, bytes, 9);
            let region = map.region();
            Ok((map, region))
        })
        .unwrap();
        let mut seen = vec![1; 10_000];
        access::read(&map.region(), 0, &mut seen);
        assert_eq!(seen, vec![0; 10_000]);
        assert!(note.starts_with("node "), "{note}");
        assert_eq!(policy(), before);
        if let (Some((mode, mask)), false) = (during, note.contains("not bound")) {
            let bits = libc::c_ulong::BITS;
            assert_eq!(mode, libc::MPOL_PREFERRED);
            assert_eq!(mask[(node.os_index / bits) as usize], 1 << (node.os_index % bits));
        }
    }

    #[test]
    fn the_policy_is_put_back_after_a_failure_too() {
        let (node, before) = (node(), policy());
        let failing = || -> Result<((), Region), Error> { Err(Error::new("the runtime refuses")) };
        let err = allocate_on(&node, Bytes(4096), &Faults::default(), failing).unwrap_err();
        assert_eq!(err.message(), "the runtime refuses");
        assert_eq!(policy(), before);
        let faults = Faults::nth_of("bind", 0, Action::Fail);
        assert!(allocate_on(&node, Bytes(4096), &faults, failing).unwrap_err().message().contains("injected"));
        assert_eq!(policy(), before);
    }

    #[test]
    fn pages_on_another_node_are_an_error() {
        let placement = Placement { pages: 3, nodes: Ok([(0, 2), (1, 1)].into()) };
        let on = |os_index| verify(&placement, &NumaNode { os_index, ..node() });
        assert!(on(0).unwrap_err().message().starts_with("1 of 3 pages are not on node 0"));
        assert!(on(1).unwrap_err().message().contains("use memory of kind H"));
        verify(&Placement { pages: 3, nodes: Ok([(0, 3)].into()) }, &NumaNode { os_index: 0, ..node() }).unwrap();
    }
}

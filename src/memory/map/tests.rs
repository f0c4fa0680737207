//! Mappings of this process: their life, sharing and placement.

use super::*;
use crate::fault::Action;

fn none() -> Faults {
    Faults::default()
}

fn private(bytes: u64) -> HostMap {
    HostMap::private(Bytes(bytes), None, &none()).unwrap()
}

fn shared(bytes: u64, via: ShareVia) -> HostMap {
    HostMap::shared(Bytes(bytes), via, None, &none()).unwrap()
}

fn first_node() -> NumaNode {
    host::inventory().unwrap().numa.swap_remove(0)
}

fn bytes_of(map: &Arc<HostMap>) -> Vec<u8> {
    let mut bytes = vec![1; map.bytes.0 as usize];
    read(&map.region(), 0, &mut bytes);
    bytes
}

#[test]
fn a_new_mapping_is_zeroed_aligned_and_as_large_as_asked() {
    for (bytes, align) in [(1u64, 4096), (4097, 4096), (2 << 20, 2 << 20), ((6 << 20) + 4, 2 << 20)] {
        let map = Arc::new(private(bytes));
        assert!(map.address.0.is_multiple_of(align), "{bytes}");
        assert_eq!(map.region().bytes(), Bytes(bytes));
        assert!(bytes_of(&map).iter().all(|byte| *byte == 0));
    }
}

#[test]
fn an_import_sees_the_owners_bytes_and_the_owner_the_imports() {
    for via in [ShareVia::Memfd, ShareVia::Named] {
        let owner = Arc::new(shared(10_000, via));
        let handle = owner.export_handle(&none()).unwrap();
        let import = Arc::new(HostMap::import(&handle, Bytes(10_000), &none()).unwrap());
        assert_ne!(owner.address, import.address);
        write(&owner.region(), 9_998, &[7, 8]);
        write(&import.region(), 0, &[9]);
        assert_eq!(bytes_of(&import)[9_998..], [7, 8]);
        assert_eq!(bytes_of(&owner)[0], 9);
        // Each side outlives the other's end.
        owner.close_export();
        drop(owner);
        assert_eq!(bytes_of(&import)[9_998..], [7, 8]);
    }
}

#[test]
fn after_close_export_nothing_can_be_opened_and_no_name_is_left() {
    for via in [ShareVia::Memfd, ShareVia::Named] {
        let owner = shared(4096, via);
        let handle = owner.export_handle(&none()).unwrap();
        if let SharedHandle::Named { name, .. } = &handle {
            assert!(std::path::Path::new("/dev/shm").join(&name[1..]).exists());
            assert!(names().contains(name));
        }
        owner.close_export();
        assert!(HostMap::import(&handle, Bytes(4096), &none()).is_err());
        if let SharedHandle::Named { name, .. } = &handle {
            assert!(!std::path::Path::new("/dev/shm").join(&name[1..]).exists());
            assert!(!names().contains(name));
        }
    }
}

#[test]
fn a_name_is_for_its_user_only_and_goes_with_its_owner() {
    use std::os::unix::fs::PermissionsExt;
    let owner = shared(4096, ShareVia::Named);
    let SharedHandle::Named { name, .. } = owner.export_handle(&none()).unwrap() else { panic!("named") };
    let path = std::path::Path::new("/dev/shm").join(&name[1..]);
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    drop(owner);
    assert!(!path.exists());
}

#[test]
fn a_handle_opens_only_the_object_it_was_made_for() {
    let (owner, other) = (shared(4096, ShareVia::Memfd), shared(4096, ShareVia::Memfd));
    let SharedHandle::Memfd { pid, object, .. } = owner.export_handle(&none()).unwrap() else { panic!("memfd") };
    let SharedHandle::Memfd { fd, .. } = other.export_handle(&none()).unwrap() else { panic!("memfd") };
    let err = HostMap::import(&SharedHandle::Memfd { pid, fd, object }, Bytes(4096), &none()).unwrap_err();
    assert!(err.message().contains("something else has that name"), "{err}");
}

#[test]
fn an_import_larger_than_the_memory_is_refused_up_to_the_page() {
    let owner = shared(4096, ShareVia::Memfd);
    let handle = owner.export_handle(&none()).unwrap();
    assert!(HostMap::import(&handle, Bytes(4096), &none()).is_ok());
    let err = HostMap::import(&handle, Bytes(4097), &none()).unwrap_err();
    assert!(err.message().contains("it has 4 KiB, 4097 B are expected"), "{err}");
}

#[test]
fn an_import_of_an_ended_process_says_what_could_not_be_opened() {
    let handle = SharedHandle::Memfd { pid: u32::MAX, fd: 3, object: Object { device: 0, inode: 0 } };
    let err = HostMap::import(&handle, Bytes(4096), &none()).unwrap_err();
    assert!(err.message().contains("/proc/4294967295/fd/3: No such file"), "{err}");
}

#[test]
fn more_than_is_free_is_refused_with_both_numbers() {
    let ask = |via: Option<ShareVia>, bytes| match via {
        None => HostMap::private(bytes, None, &none()),
        Some(via) => HostMap::shared(bytes, via, None, &none()),
    };
    for via in [None, Some(ShareVia::Memfd), Some(ShareVia::Named)] {
        for bytes in [Bytes(1 << 50), Bytes(u64::MAX)] {
            let err = ask(via, bytes).unwrap_err();
            assert!(err.message().starts_with(&format!("asked {bytes}, ")), "{err}");
            assert!(err.message().contains(" free"), "{err}");
        }
    }
    let free = host::Free { bytes: Bytes::gib(20), of_group: false };
    assert_eq!(check_free(Bytes::gib(20), free), Ok(()));
    assert_eq!(check_free(Bytes::gib(40), free).unwrap_err().message(), "asked 40 GiB, 20 GiB free");
}

#[test]
fn a_refusal_of_the_system_carries_its_text() {
    // No address space is that large.
    let err = map_private(Bytes(1 << 60)).map_err(|err| refused(Bytes(1 << 60), err)).unwrap_err();
    assert!(err.message().starts_with("asked 1048576 TiB, "), "{err}");
    assert!(err.message().contains("Cannot allocate memory"), "{err}");
}

#[test]
fn a_lock_that_fails_is_a_note_with_the_limit() {
    assert_eq!(lock_note(Errno::NOMEM, Some(Bytes::mib(8))), "not page-locked: ulimit -l is 8 MiB");
    assert!(lock_note(Errno::NOSYS, None).contains("not page-locked: Function not implemented"));
    let mut map = private(4096);
    map.lock(&none()).unwrap();
    assert!(map.notes().iter().all(|note| note.starts_with("not page-locked")));
}

#[test]
fn pages_are_on_the_node_they_were_asked_for() {
    let node = first_node();
    for pages in [1, 1024, 1025] {
        let mut map = HostMap::private(Bytes(pages * 4096), Some(&node), &none()).unwrap();
        if map.notes().is_empty() {
            map.check_placement(&node, true).unwrap();
            let text = map.placement().to_string();
            assert!(text.starts_with(&format!("node {} (", node.os_index)), "{text}");
        }
        let mut shared = HostMap::shared(Bytes(pages * 4096), ShareVia::Memfd, Some(&node), &none()).unwrap();
        shared.check_placement(&node, shared.notes().is_empty()).unwrap();
    }
}

#[test]
fn a_node_that_does_not_exist_is_an_error() {
    let node = NumaNode { os_index: 777, ..first_node() };
    match HostMap::private(Bytes(4096), Some(&node), &none()) {
        Err(err) => assert!(err.message().starts_with("bind 4 KiB to node 777"), "{err}"),
        Ok(map) => assert!(map.notes()[0].starts_with("not bound to node 777"), "{:?}", map.notes()),
    }
}

#[test]
fn misplaced_pages_are_counted_and_fail_only_where_strict() {
    let placement = |pages, nodes: &[(u32, u64)]| Placement { pages, nodes: Ok(nodes.iter().copied().collect()) };
    assert_eq!(placement(2048, &[(0, 2048)]).to_string(), "node 0 (2048 pages)");
    assert_eq!(
        placement(9999, &[(0, 1000), (8, 24)]).to_string(),
        "node 0 (1000 of 1024 pages looked at), node 8 (24 of 1024 pages looked at)"
    );
    assert_eq!(placement(4, &[(2, 4)]).misplaced(2), None);
    let misplaced = placement(4, &[(0, 1), (2, 3)]).misplaced(2).unwrap();
    assert_eq!(misplaced, "1 of 4 pages are not on node 2 but node 0 (1 pages), node 2 (3 pages)");
    assert_eq!(Placement { pages: 1, nodes: Err(Errno::NOSYS) }.misplaced(0), None);

    let mut map = private(3 * 4096);
    if map.placement().nodes.is_ok() {
        let elsewhere = NumaNode { os_index: 777, ..first_node() };
        let err = map.check_placement(&elsewhere, true).unwrap_err();
        assert!(err.message().starts_with("3 of 3 pages are not on node 777"), "{err}");
        map.check_placement(&elsewhere, false).unwrap();
        assert!(map.notes()[0].starts_with("3 of 3 pages"));
    }
}

#[test]
fn every_fallible_step_can_be_made_to_fail_and_leaves_nothing_behind() {
    let all = |faults: &Faults| -> Result<(), Error> {
        let node = first_node();
        let mut map = HostMap::shared(Bytes(4096), ShareVia::Named, Some(&node), faults)?;
        map.lock(faults)?;
        let handle = map.export_handle(faults)?;
        HostMap::import(&handle, Bytes(4096), faults)?;
        HostMap::private(Bytes(4096), Some(&node), faults).map(drop)
    };
    let counting = Faults::counting();
    all(&counting).unwrap();
    assert_eq!(counting.calls(), 7);
    for nth in 0..7 {
        assert!(all(&Faults::nth(nth, Action::Fail)).is_err(), "call {nth}");
    }
    for call in ["allocate", "bind", "lock", "export", "import"] {
        assert!(all(&Faults::nth_of(call, 0, Action::Fail)).is_err(), "{call}");
    }
}

#[test]
fn touching_brings_pages_and_keeps_their_bytes() {
    let map = Arc::new(private(3 * 4096));
    write(&map.region(), 4096, &[5]);
    // SAFETY: the mapping lives.
    unsafe { access::touch(map.address, map.mapped, 4096) };
    assert_eq!(bytes_of(&map)[4096], 5);
}

#[test]
fn regions_are_filled_and_copied_in_their_range_only() {
    let (a, b) = (Arc::new(private(4096)), Arc::new(private(4096)));
    fill(&a.region(), 10, Bytes(5), 0xAA);
    let bytes = bytes_of(&a);
    assert_eq!(bytes[9..16], [0, 0xAA, 0xAA, 0xAA, 0xAA, 0xAA, 0]);
    copy(&b.region().part(100, Bytes(50)), &a.region(), Bytes(12));
    assert_eq!(bytes_of(&b)[109..113], [0, 0xAA, 0xAA, 0]);
}

#[test]
#[should_panic(expected = "2 bytes at 4095 of a region of 4 KiB")]
fn a_range_past_the_end_is_our_mistake() {
    write(&Arc::new(private(4096)).region(), 4095, &[1, 2]);
}

#[test]
#[should_panic(expected = "the CPU cannot reach")]
fn device_memory_is_not_touched() {
    let space = Space::Device { device: 0, cpu: false };
    let region = Region::new(Address(4096), Bytes(8), space, Arc::new(()));
    read(&region, 0, &mut [0]);
}

#[test]
fn unlink_all_removes_names_of_live_mappings_once() {
    // In a process of its own: other tests of this one have names too.
    const NAME: &str = "memory::map::tests::unlink_all_removes_names_of_live_mappings_once";
    if std::env::var_os("TB_TEST_UNLINK").is_none() {
        let this = std::env::current_exe().unwrap();
        let child =
            std::process::Command::new(this).args([NAME, "--exact"]).env("TB_TEST_UNLINK", "1").output().unwrap();
        let text = String::from_utf8_lossy(&child.stdout).into_owned();
        assert!(child.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let owner = Arc::new(shared(4096, ShareVia::Named));
    let SharedHandle::Named { name, .. } = owner.export_handle(&none()).unwrap() else { panic!("named") };
    unlink_all();
    assert!(!std::path::Path::new("/dev/shm").join(&name[1..]).exists());
    write(&owner.region(), 0, &[3]);
    assert_eq!(bytes_of(&owner)[0], 3);
}

//! Memory, copies, streams, events and sharing.

use tb_mpi::gpu::{DeviceId, ExportHandle};
use tb_mpi::memory::map;
use tb_mpi::place::MemKind;
use tb_mpi::region::Address;
use tb_mpi::units::Bytes;

use super::Rig;

const SIZES: [usize; 3] = [4, 252, (1 << 20) + 4];

/// Bytes that differ from place to place and from `seed` to `seed`.
fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 + i / 251 + seed * 31) as u8).collect()
}

fn read(rig: &Rig, address: Address, bytes: usize) -> Vec<u8> {
    let mut seen = vec![0; bytes];
    rig.device().read(address, &mut seen).unwrap();
    seen
}

pub fn devices_are_described(rig: &Rig) {
    assert!(!rig.devices.is_empty());
    for device in &rig.devices {
        let info = device.info();
        assert!(info.memory_kinds.contains(&MemKind::Device));
        assert!(info.memory_total > Bytes::ZERO && info.compute_units > 0 && info.warp_size > 0);
        assert!(!info.runtime.is_empty() && !info.architecture.is_empty());
        assert_eq!(info.runtime.contains("EMULATED"), rig.driver.name() == "host");
        assert!(device.memory_free().unwrap() <= info.memory_total);
        assert!(device.ns_per_tick().unwrap() > 0.0);
    }
    let mut uuids: Vec<&str> = rig.devices.iter().map(|device| device.info().uuid.as_str()).collect();
    uuids.dedup();
    assert_eq!(uuids.len(), rig.devices.len());
    let beyond = DeviceId(rig.devices.len() as u32);
    assert!(rig.driver.memory_free(beyond).is_err());
    assert!(rig.driver.stream_create(beyond).is_err());
}

pub fn allocations_are_accounted_for(rig: &Rig) {
    let before = rig.free();
    // Larger than the blocks that runtimes take from a device, and than what they may keep.
    let buffers = [rig.buffer(64 << 20), rig.buffer(128 << 20)];
    let during = rig.device().memory_free().unwrap();
    assert!(during.0 + (192 << 20) <= before[0].0 + rig.kind.slack.0);
    assert!(buffers.iter().all(|buffer| buffer.address().0.is_multiple_of(256)));
    drop(buffers);
    rig.assert_free(&before);
}

pub fn out_of_memory_names_the_bytes_asked_and_free(rig: &Rig) {
    let _some = rig.buffer(1 << 20);
    let asked = rig.device().info().memory_total;
    let before = rig.free();
    let free = before[0];
    let err = rig.device().allocate(MemKind::Device, asked, false).err().unwrap();
    assert!(err.message().contains(&format!("{asked} asked")), "{err}");
    assert!(err.message().contains(&format!("{free} free")), "{err}");
    assert!(rig.device().allocate(MemKind::Device, Bytes(u64::MAX), false).is_err());
    rig.assert_free(&before);
}

pub fn every_kind_of_memory_is_usable(rig: &Rig) {
    let device = rig.device();
    let stream = device.stream().unwrap();
    let bytes = SIZES[2];
    let copy = rig.buffer(bytes as u64);
    for (seed, kind) in device.info().memory_kinds.iter().enumerate() {
        let buffer = device.allocate(*kind, Bytes(bytes as u64), false).unwrap();
        device.write(buffer.address(), &pattern(bytes, seed)).unwrap();
        stream.copy(copy.address(), buffer.address(), copy.bytes()).unwrap();
        stream.fill(buffer.address(), 9, buffer.bytes()).unwrap();
        stream.wait().unwrap();
        assert_eq!(read(rig, copy.address(), bytes), pattern(bytes, seed), "{kind:?}");
        assert_eq!(read(rig, buffer.address(), bytes), vec![9; bytes], "{kind:?}");
    }
    let has = |kind: &MemKind| device.info().memory_kinds.contains(kind) || device.info().host_kinds.contains(kind);
    let absent = MemKind::LETTERS.iter().map(|(_, kind)| *kind).filter(|kind| !has(kind));
    for kind in absent {
        let err = device.allocate(kind, Bytes(4096), false).err().unwrap();
        assert!(err.message().contains(&format!("kind {}", kind.letter())), "{err}");
    }
}

/// Not by `rig.device()` alone: every device of the driver reaches it, and so does the CPU.
pub fn host_memory_of_the_runtime_is_reached_by_all(rig: &Rig) {
    let bytes = SIZES[2];
    for (seed, kind) in rig.device().info().host_kinds.iter().enumerate() {
        assert!(kind.is_host(), "{kind:?}");
        let free = rig.device().memory_free().unwrap();
        let buffer = rig.device().allocate(*kind, Bytes(bytes as u64), false).unwrap();
        assert!(rig.device().memory_free().unwrap().0 + rig.kind.slack.0 >= free.0, "it takes nothing of the device");
        let region = buffer.region();
        assert!(region.cpu_can_access());
        map::write(&region, 0, &pattern(bytes, seed));
        for device in &rig.devices {
            let registration = device.register(&region).unwrap();
            let (there, copy) =
                (registration.address(), rig.devices[0].allocate(MemKind::Device, Bytes(bytes as u64), false));
            let (stream, copy) = (device.stream().unwrap(), copy.unwrap());
            stream.copy(copy.address(), there, buffer.bytes()).unwrap();
            stream.fill(there, 9, Bytes(4)).unwrap();
            stream.wait().unwrap();
            assert_eq!(read(rig, copy.address(), bytes), pattern(bytes, seed), "{kind:?}");
            let mut seen = [0; 4];
            map::read(&region, 0, &mut seen);
            assert_eq!(seen, [9; 4], "{kind:?}");
            map::write(&region, 0, &pattern(4, seed));
        }
        let err = rig.device().allocate(*kind, Bytes(4096), true).err().unwrap();
        assert!(err.message().contains("cannot be opened by another rank"), "{err}");
    }
}

pub fn host_memory_is_copied_where_it_is_registered(rig: &Rig) {
    let bytes = (1 << 20) + 4;
    let stream = rig.device().stream().unwrap();
    let buffer = rig.buffer(bytes as u64);
    let (driver, mut host) = (&rig.driver, [pattern(bytes, 3), vec![0; bytes]]);
    let here = host.each_mut().map(|memory| Address(memory.as_mut_ptr().expose_provenance() as u64));
    for device in &rig.devices {
        let there = here.map(|here| driver.register_host(device.id(), here, Bytes(bytes as u64)).unwrap());
        assert!(driver.register_host(device.id(), here[0], Bytes(bytes as u64)).is_err(), "registered twice");
        if device.id() == rig.device().id() {
            stream.copy(buffer.address(), there[0], buffer.bytes()).unwrap();
            stream.copy(there[1], buffer.address(), buffer.bytes()).unwrap();
            stream.wait().unwrap();
        }
    }
    for device in &rig.devices {
        here.iter().for_each(|here| driver.unregister_host(device.id(), *here).unwrap());
        assert!(driver.unregister_host(device.id(), here[0]).is_err(), "unregistered twice");
    }
    assert_eq!(read(rig, buffer.address(), bytes), host[0]);
    assert!(std::hint::black_box(&host)[1] == host[0], "the host sees what the device wrote");
}

pub fn data_survive_every_way_of_moving_them(rig: &Rig) {
    for bytes in SIZES {
        let (a, b) = (rig.buffer(bytes as u64 + 8), rig.buffer(bytes as u64 + 8));
        let stream = rig.device().stream().unwrap();
        // One element in, so that a copy of too much or to the wrong place shows.
        let (from, to) = (Address(a.address().0 + 4), Address(b.address().0 + 4));
        let data = pattern(bytes, 1);
        rig.device().write(from, &data).unwrap();
        assert_eq!(read(rig, from, bytes), data);
        stream.fill(b.address(), 0xA5, b.bytes()).unwrap();
        stream.copy(to, from, Bytes(bytes as u64)).unwrap();
        stream.wait().unwrap();
        let expected = [&[0xA5; 4][..], &data, &[0xA5; 4]].concat();
        assert_eq!(read(rig, b.address(), bytes + 8), expected, "{bytes} bytes");
    }
}

pub fn a_stream_works_in_order(rig: &Rig) {
    let bytes = 1 << 20;
    let stream = rig.device().stream().unwrap();
    let work = rig.buffer(bytes);
    let copies: Vec<_> = (0..8).map(|_| rig.buffer(bytes)).collect();
    for (i, copy) in copies.iter().enumerate() {
        stream.fill(work.address(), i as u8 + 1, Bytes(bytes)).unwrap();
        stream.copy(copy.address(), work.address(), Bytes(bytes)).unwrap();
    }
    stream.wait().unwrap();
    for (i, copy) in copies.iter().enumerate() {
        assert!(read(rig, copy.address(), bytes as usize).iter().all(|byte| *byte == i as u8 + 1), "copy {i}");
    }
}

pub fn events_follow_the_order_of_their_stream(rig: &Rig) {
    let stream = rig.device().stream().unwrap();
    let buffer = rig.buffer(4 << 20);
    let events: Vec<_> = (0..4).map(|_| rig.device().event().unwrap()).collect();
    for round in 0..3 {
        for event in &events {
            stream.record(event).unwrap();
            stream.fill(buffer.address(), round, buffer.bytes()).unwrap();
        }
        stream.wait().unwrap();
        for pair in events.windows(2) {
            assert!(pair[1].ns_since(&pair[0]).unwrap() > 0.0, "a fill of 4 MiB takes time");
        }
    }
}

pub fn an_event_that_was_not_recorded_has_no_time(rig: &Rig) {
    let stream = rig.device().stream().unwrap();
    let (recorded, other) = (rig.device().event().unwrap(), rig.device().event().unwrap());
    stream.record(&recorded).unwrap();
    stream.wait().unwrap();
    assert!(other.ns_since(&recorded).is_err());
    assert!(recorded.ns_since(&other).is_err());
}

pub fn exported_memory_is_the_same_memory_elsewhere(rig: &Rig) {
    let other = rig.neighbour();
    for bytes in SIZES {
        let buffer = rig.device().allocate(MemKind::Device, Bytes(bytes as u64), true).unwrap();
        rig.device().write(buffer.address(), &pattern(bytes, 2)).unwrap();
        let handle = buffer.export().unwrap();
        let imported = other.device().import(&handle, Bytes(bytes as u64)).unwrap();
        assert_eq!(read(&other, imported.region().address(), bytes), pattern(bytes, 2));

        let stream = other.device().stream().unwrap();
        stream.fill(imported.region().address(), 0x5A, Bytes(bytes as u64)).unwrap();
        stream.wait().unwrap();
        assert_eq!(read(rig, buffer.address(), bytes), vec![0x5A; bytes]);
        let free = other.device().memory_free().unwrap();
        drop(imported);
        assert_eq!(other.device().memory_free().unwrap(), free, "importing takes no memory");
        assert!(other.device().import(&handle, Bytes(bytes as u64)).is_ok(), "an import can be opened again");
    }
}

pub fn memory_of_its_own_is_not_imported(rig: &Rig) {
    let buffer = rig.device().allocate(MemKind::Device, Bytes(4096), true).unwrap();
    let handle = buffer.export().unwrap();
    for device in &rig.devices {
        assert!(device.import(&handle, Bytes(4096)).is_err());
    }
}

pub fn an_import_is_checked_against_what_was_exported(rig: &Rig) {
    let other = rig.neighbour();
    let buffer = rig.device().allocate(MemKind::Device, Bytes(4096), true).unwrap();
    let handle = buffer.export().unwrap();
    assert!(other.device().import(&handle, Bytes(4097)).is_err());
    assert!(other.device().import(&ExportHandle(vec![1, 2, 3]), Bytes(4096)).is_err());
    drop(buffer);
    assert!(other.device().import(&handle, Bytes(4096)).is_err(), "the owner has freed it");
    let private = rig.buffer(4096);
    assert!(private.export().is_err(), "it was not allocated shareable");
}

pub fn accesses_out_of_bounds_are_refused(rig: &Rig) {
    let (a, b) = (rig.buffer(100), rig.buffer(100));
    let stream = rig.device().stream().unwrap();
    let inside = |offset: u64| (Address(a.address().0 + offset), Address(b.address().0 + offset));
    stream.copy(inside(60).0, inside(60).1, Bytes(40)).unwrap();
    assert!(stream.copy(inside(60).0, b.address(), Bytes(41)).is_err());
    assert!(stream.copy(a.address(), inside(60).1, Bytes(41)).is_err());
    assert!(stream.fill(inside(99).0, 0, Bytes(2)).is_err());
    assert!(rig.device().write(inside(99).0, &[0; 2]).is_err());
    assert!(rig.device().read(inside(99).0, &mut [0; 2]).is_err());
    let unregistered = [0u8; 64];
    let address = Address(unregistered.as_ptr() as u64);
    assert!(stream.copy(a.address(), address, Bytes(64)).is_err(), "host memory was not registered");
    stream.wait().unwrap();
    let (id, gone) = (rig.device().id(), a.address());
    drop(a);
    assert!(rig.driver.write(id, gone, &[0; 4]).is_err(), "used after it was freed");
}

pub fn what_is_gone_cannot_be_freed_or_used(rig: &Rig) {
    let (driver, id) = (&rig.driver, rig.device().id());
    let address = driver.allocate(id, MemKind::Device, Bytes(4096), false).unwrap();
    assert!(driver.free(id, Address(address.0 + 4)).is_err(), "not the start of the allocation");
    assert!(driver.close_import(id, address).is_err(), "it was not imported");
    driver.free(id, address).unwrap();
    assert!(driver.free(id, address).is_err(), "freed twice");
    assert!(driver.unregister_host(id, address).is_err());

    let stream = driver.stream_create(id).unwrap();
    let event = driver.event_create(id).unwrap();
    driver.stream_destroy(stream).unwrap();
    driver.event_destroy(event).unwrap();
    assert!(driver.stream_destroy(stream).is_err());
    assert!(driver.stream_wait(stream).is_err());
    assert!(driver.event_destroy(event).is_err());
}

pub fn freeing_waits_for_what_is_queued(rig: &Rig) {
    let (driver, id) = (&rig.driver, rig.device().id());
    let stream = rig.device().stream().unwrap();
    let bytes = Bytes::mib(4);
    for _ in 0..4 {
        let address = driver.allocate(id, MemKind::Device, bytes, false).unwrap();
        (0..8).for_each(|byte| stream.fill(address, byte, bytes).unwrap());
        driver.free(id, address).unwrap();
    }
    stream.wait().unwrap();
}

pub fn freeing_imported_memory_is_reported(rig: &Rig) {
    let other = rig.neighbour();
    let (driver, id) = (&rig.driver, rig.device().id());
    let address = driver.allocate(id, MemKind::Device, Bytes(4096), true).unwrap();
    let handle = driver.export(id, address).unwrap();
    let imported = other.device().import(&handle, Bytes(4096)).unwrap();
    let err = driver.free(id, address).unwrap_err();
    assert!(err.message().contains("imported"), "{err}");
    assert_eq!(read(&other, imported.region().address(), 4), [0; 4], "an emulated import outlives its owner");
}

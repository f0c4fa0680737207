//! Verification by every way: on host memory, by copies and by the kernel of a fake device.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::*;
use crate::fault::{Action, Faults};
use crate::gpu::{DeviceId, Driver};
use crate::memory::map;
use crate::plan::local::Side;
use crate::prepare::data::tests::own;
use crate::prepare::data::{BLOCK, fill_destination, fill_source};
use crate::prepare::owned::tests::{Fake, region};
use crate::prepare::reference::tests::{distinct, options, pattern};

const ONE: Executions = Executions { first: 0, count: 1 };

fn default() -> Reference {
    Reference::new(&options())
}

/// Runs `check` with memory made ready by `prepare`, by all ways, and expects one answer.
fn by_all_ways<T: PartialEq + std::fmt::Debug>(
    reference: &Reference,
    own: &OwnBuffer,
    faults: &Faults,
    prepare: impl Fn(&Region),
    check: impl Fn(Check<'_>) -> T,
) -> T {
    let host = region(own.layout.total().0, Space::Host);
    prepare(&host);
    let direct = check(Check { reference, own, memory: Owned::by_cpu(&host, faults), kernel: None });

    let fake = Arc::new(Fake::default());
    let device = fake.region(own.layout.total().0);
    prepare(&fake.with(device.address()).0);
    let memory = Owned::by_driver(&device, &*fake, DeviceId(0), faults);
    assert_eq!(check(Check { reference, own, memory, kernel: None }), direct);

    let kernel = DeviceCheck::new(fake.clone(), DeviceId(0), own.layout.bytes, &Faults::default()).unwrap();
    assert_eq!(check(Check { reference, own, memory, kernel: Some(&kernel) }), direct);
    assert!(fake.launches.load(Ordering::Relaxed) > 0);
    drop(kernel);
    assert_eq!(fake.live(), 0);
    direct
}

/// A destination as after a faultless sample, then damaged.
fn check(
    reference: &Reference,
    own: &OwnBuffer,
    (sample, src_slices): (Executions, u64),
    damage: impl Fn(&Region),
) -> Option<Mismatch> {
    let faults = Faults::default();
    let prepare = |region: &Region| {
        let (memory, layout) = (Owned::by_cpu(region, &faults), &own.layout);
        fill_destination(own, &memory, reference.poison(own.sources)).unwrap();
        for n in sample.first..sample.first + u64::from(sample.count) {
            let mut data = vec![0; layout.bytes.0 as usize];
            reference.expected(own.sources, n % src_slices, 0, &mut data);
            map::write(region, layout.slice_offset(n), &data);
        }
        damage(region);
    };
    by_all_ways(reference, own, &faults, prepare, |check| destination(check, sample, src_slices).unwrap())
}

fn what(mismatch: Option<Mismatch>) -> (String, u64) {
    let mismatch = mismatch.expect("a mismatch");
    (mismatch.what, mismatch.wrong_bytes)
}

#[test]
fn right_data_pass() {
    let long: Vec<f32> = (0..3000).map(|i| i as f32).collect();
    for reference in [default(), distinct(), pattern(&long)] {
        for sources in [0, 1, 3] {
            for (bytes, slices) in [(4, 1), (1004, 3), (512, 2)] {
                let own = own(Side::Dst, 0, sources, bytes, slices);
                for sample in [ONE, Executions { first: 7, count: 2 }, Executions { first: 9, count: 40 }] {
                    assert_eq!(check(&reference, &own, (sample, 4), |_| {}), None);
                }
            }
        }
    }
}

#[test]
fn data_of_several_blocks_are_compared_to_the_last_byte() {
    let own = own(Side::Dst, 0, 1, 2 * BLOCK + 4, 1);
    let elements = own.layout.bytes.0 / 4;
    assert_eq!(check(&default(), &own, (ONE, 1), |_| {}), None);
    let found = check(&default(), &own, (ONE, 1), |r| {
        map::write(r, own.layout.lead.0 + BLOCK + 400, &[0xFF]);
        map::write(r, own.layout.lead.0 + own.layout.bytes.0 - 1, &[0xFF]);
    })
    .unwrap();
    assert_eq!((found.first.unwrap().element, found.wrong_bytes), (BLOCK / 4 + 100, 2));
    assert_eq!(found.what, format!("2 of {elements} elements are wrong"));
}

#[test]
fn the_first_wrong_element_is_named_with_both_values() {
    for (sources, bytes) in [(1, 1004), (2, 16), (0, 4)] {
        let own = own(Side::Dst, 0, sources, bytes, 1);
        let last = bytes / 4 - 1;
        for element in [0, last / 2, last] {
            let at = own.layout.lead.0 + element * 4;
            let found = check(&default(), &own, (ONE, 1), |r| map::write(r, at, &1.5f32.to_ne_bytes())).unwrap();
            let first = found.first.unwrap();
            let mut wanted = [0; 4];
            default().expected(sources, 0, element, &mut wanted);
            assert_eq!(first.element, element);
            assert_eq!((first.expected, first.actual), (u32::from_ne_bytes(wanted), 1.5f32.to_bits()));
            let differ = wanted.iter().zip(1.5f32.to_ne_bytes()).filter(|(a, b)| **a != *b).count();
            assert_eq!(found.wrong_bytes, differ as u64);
        }
    }
}

#[test]
fn an_inverted_first_element_is_wrong_by_every_way() {
    // The kernel compares with the first element inverted, so this is the one it cannot see.
    let own = own(Side::Dst, 0, 1, 64, 1);
    let inverted = 31.0f32.to_ne_bytes().map(|byte| !byte);
    let found = check(&default(), &own, (ONE, 1), |r| map::write(r, own.layout.lead.0, &inverted));
    assert_eq!(what(found), ("1 of 16 elements are wrong".to_owned(), 4));
}

#[test]
fn writes_outside_are_found() {
    let own = own(Side::Dst, 0, 1, 1000, 3);
    let (lead, stride) = (own.layout.lead.0, own.layout.stride.0);
    let damage =
        |offset: u64, bytes: &'static [u8]| what(check(&default(), &own, (ONE, 1), |r| map::write(r, offset, bytes)));
    let zeros: &[u8] = &[0; 12];
    assert_eq!(damage(0, &zeros[..1]), ("wrote 1 byte before the destination".to_owned(), 1));
    assert_eq!(damage(lead - 12, zeros), ("wrote 12 bytes before the destination".to_owned(), 12));
    assert_eq!(damage(lead + 1000, zeros), ("wrote 12 bytes between slices 0 and 1".to_owned(), 12));
    assert_eq!(damage(lead + stride + 1012, zeros), ("wrote 12 bytes between slices 1 and 2".to_owned(), 12));
    assert_eq!(damage(lead + 2 * stride + 1000, zeros), ("wrote 12 bytes after the destination".to_owned(), 12));
    let end = own.layout.total().0;
    assert_eq!(damage(end - 1, &zeros[..1]), ("wrote 1 byte after the destination".to_owned(), 1));
}

#[test]
fn wrong_data_and_writes_outside_are_both_reported() {
    let own = own(Side::Dst, 0, 1, 1000, 1);
    let lead = own.layout.lead.0;
    let found = check(&default(), &own, (ONE, 1), |r| {
        map::fill(r, lead - 2, Bytes(6), 0x11);
        map::write(r, lead + 1000, &[0]);
    })
    .unwrap();
    assert_eq!(
        found.what,
        "1 of 250 elements are wrong; wrote 2 bytes before the destination; wrote 1 byte after the destination"
    );
    assert_eq!((found.first.unwrap().element, found.wrong_bytes), (0, 4 + 2 + 1));
}

#[test]
fn many_gaps_are_counted_and_the_first_is_named() {
    let own = own(Side::Dst, 0, 1, 1000, 5);
    let found = check(&default(), &own, (ONE, 1), |r| {
        (1..4).for_each(|k| map::write(r, own.layout.slice_offset(k) + 1001, &[0; 2]));
    });
    let text = "wrote 2 bytes between slices 1 and 2; wrote into 3 of 4 gaps between slices";
    assert_eq!(what(found), (text.to_owned(), 6));
}

#[test]
fn far_gaps_are_checked_too() {
    let own = own(Side::Dst, 0, 1, NEAR + 4, 3);
    let at = own.layout.slice_offset(1) + own.layout.bytes.0 + 3;
    let found = check(&default(), &own, (ONE, 1), |r| map::write(r, at, &[0]));
    assert_eq!(what(found), ("wrote 1 byte between slices 1 and 2".to_owned(), 1));
}

#[test]
fn data_that_were_not_written_are_told_apart() {
    let own = own(Side::Dst, 0, 1, 1000, 1);
    let lead = own.layout.lead.0;
    let damage = |from: u64, bytes: u64, byte| {
        what(check(&default(), &own, (ONE, 1), |r| map::fill(r, lead + from, Bytes(bytes), byte)))
    };
    // Two of the elements, 390.0 and 391.0, have a byte 0xC3 of their own.
    assert_eq!(damage(0, 1000, 0xC3), ("nothing was written".to_owned(), 998));
    assert_eq!(damage(400, 600, 0xC3).0, "150 of 250 elements were not written");
    assert_eq!(damage(0, 1000, 0).0, "all zero");
    assert_eq!(damage(8, 4, 0).0, "1 of 250 elements are zero instead");
    let both = check(&default(), &own, (ONE, 1), |r| {
        map::fill(r, lead, Bytes(4), 0x11);
        map::fill(r, lead + 4, Bytes(4), 0xC3);
    });
    assert_eq!(what(both).0, "2 of 250 elements are wrong, 1 of them were not written");
}

#[test]
fn every_slice_that_the_sample_wrote_is_checked_and_no_other() {
    let own = own(Side::Dst, 0, 1, 1000, 5);
    let sample = Executions { first: 8, count: 3 };
    let hurt = |slices: &[u64]| {
        check(&default(), &own, (sample, 1), |r| {
            slices.iter().for_each(|&k| map::write(r, own.layout.slice_offset(k) + 4, &[0x11; 4]));
        })
    };
    assert_eq!(hurt(&[1, 2]), None);
    assert_eq!(what(hurt(&[0])), ("slice 0: 1 of 250 elements are wrong".to_owned(), 4));
    assert_eq!(what(hurt(&[0, 3])), ("slice 3: 1 of 250 elements are wrong; 2 of 3 slices are wrong".to_owned(), 8));
}

#[test]
fn the_execution_tells_which_source_slice_is_expected() {
    let own = own(Side::Dst, 0, 2, 1000, 2);
    // Executions 5, 6, 7: destination slice 0 was written last by 6, slice 1 by 7.
    let sample = Executions { first: 5, count: 3 };
    let write = |at: u64, source: u64| {
        what(check(&distinct(), &own, (sample, 4), |r| {
            let mut data = vec![0; 1000];
            distinct().expected(2, source, 0, &mut data);
            map::write(r, own.layout.slice_offset(at), &data);
        }))
        .0
    };
    assert_eq!(write(0, 1), "slice 0: holds slice 1, expected slice 2");
    assert_eq!(write(1, 0), "slice 1: holds slice 0, expected slice 3");
}

#[test]
fn sources_are_checked_slice_by_slice() {
    let faults = Faults::default();
    for (reference, bytes) in [(default(), 1000), (default(), NEAR + 4), (distinct(), NEAR + 4), (distinct(), 1000)] {
        let own = own(Side::Src, 2, 3, bytes, 5);
        let run = |damage: &dyn Fn(&Region)| {
            let prepare = |region: &Region| {
                fill_source(&reference, &own, &Owned::by_cpu(region, &faults)).unwrap();
                damage(region);
            };
            let host = region(own.layout.total().0, Space::Host);
            prepare(&host);
            let small = Check { reference: &reference, own: &own, memory: Owned::by_cpu(&host, &faults), kernel: None };
            if bytes < NEAR {
                // Small slices are left to the host, so the kernel does not run.
                return source(small).unwrap();
            }
            by_all_ways(&reference, &own, &faults, prepare, |check| source(check).unwrap())
        };
        assert_eq!(run(&|_| {}), None);
        let last = own.layout.slice_offset(4) + bytes - 1;
        let found = run(&|r| map::write(r, last, &[0xFF])).unwrap();
        assert_eq!((found.first.unwrap().element, found.wrong_bytes), (bytes / 4 - 1, 1));
        assert!(found.what.starts_with("slice 4: 1 of"), "{}", found.what);
    }
}

#[test]
fn a_kernel_that_does_not_run_cannot_pass() {
    let (reference, own) = (default(), own(Side::Dst, 0, 1, 1000, 1));
    let run = |fake: Fake, faults: &Faults| {
        let fake = Arc::new(fake);
        let device = fake.region(own.layout.total().0);
        let cpu = fake.with(device.address()).0;
        fill_destination(&own, &Owned::by_cpu(&cpu, &Faults::default()), 0).unwrap();
        let mut data = [0; 1000];
        reference.expected(1, 0, 0, &mut data);
        map::write(&cpu, own.layout.lead.0, &data);
        let kernel = DeviceCheck::new(fake.clone(), DeviceId(0), own.layout.bytes, &Faults::default()).unwrap();
        let memory = Owned::by_driver(&device, &*fake, DeviceId(0), faults);
        destination(Check { reference: &reference, own: &own, memory, kernel: Some(&kernel) }, ONE, 1)
    };
    assert_eq!(run(Fake::default(), &Faults::default()), Ok(None));
    let idle = run(Fake::idle(), &Faults::default()).unwrap_err();
    assert!(idle.message().contains("did not run"), "{idle}");
    assert!(run(Fake::default(), &Faults::nth_of("check", 0, Action::Drop)).is_err());
    let seen = run(Fake::default(), &Faults::nth_of("check", 0, Action::Corrupt)).unwrap();
    assert!(what(seen).0.starts_with("differs where the device's kernel reads it"));
}

#[test]
fn blocks_that_differ_are_each_uploaded() {
    // A period longer than a block, and more blocks than results (two, in tests).
    let reference = pattern(&(0..1_100_000).map(|i| i as f32).collect::<Vec<_>>());
    let own = own(Side::Dst, 0, 1, 2 * BLOCK + 4, 1);
    let last = own.layout.lead.0 + 2 * BLOCK;
    let found = check(&reference, &own, (ONE, 1), |r| map::write(r, last, &[0x11; 4])).unwrap();
    assert_eq!((found.first.unwrap().element, found.wrong_bytes), (BLOCK / 2, 4));
}

#[test]
fn failed_reads_name_the_buffer_and_free_what_they_took() {
    let (reference, own) = (default(), own(Side::Dst, 1, 1, 1000, 1));
    let host = region(own.layout.total().0, Space::Host);
    for nth in 0..3 {
        let faults = Faults::nth(nth, Action::Fail);
        let memory = Owned::by_cpu(&host, &faults);
        let err = destination(Check { reference: &reference, own: &own, memory, kernel: None }, ONE, 1).unwrap_err();
        assert!(err.message().starts_with("verify destination 1 of transfer 3: injected"), "{err}");
    }
    let fake = Arc::new(Fake::default());
    let faults = Faults::nth(0, Action::Fail);
    assert!(DeviceCheck::new(fake.clone(), DeviceId(0), Bytes(BLOCK), &faults).is_err());
    assert_eq!(fake.live(), 0);
    assert_eq!(fake.name(), "fake");
}

#[test]
fn the_way_follows_what_the_platform_can() {
    let info = |kernels_absent: Option<&str>| DeviceInfo {
        name: String::new(),
        runtime: String::new(),
        uuid: String::new(),
        pci: String::new(),
        architecture: String::new(),
        memory_total: Bytes(0),
        cache: Bytes(0),
        compute_units: 1,
        warp_size: 32,
        numa: None,
        memory_kinds: vec![],
        host_kinds: vec![],
        cpu_access: false,
        exportable: false,
        xccs: 0,
        cu_masks: false,
        no_cu_copies: false,
        kernels_absent: kernels_absent.map(str::to_owned),
        batch_absent: None,
        bulk_absent: None,
        peaks: Default::default(),
    };
    let host = region(4, Space::Host);
    let device = |cpu| region(4, Space::Device { device: 2, cpu });
    for direct in [false, true] {
        assert_eq!(way(direct, &host, None), (Way::Direct, None));
    }
    assert_eq!(way(false, &device(true), Some(&info(None))), (Way::Kernel, None));
    assert_eq!(way(true, &device(true), Some(&info(Some("x")))), (Way::Direct, None));
    let (copy, said) = way(true, &device(false), Some(&info(None)));
    assert!(copy == Way::Copy && said.unwrap().contains("device 2"));
    let (copy, said) = way(false, &device(true), Some(&info(Some("no compiler"))));
    assert!(copy == Way::Copy && said.unwrap().contains("no compiler"));
}

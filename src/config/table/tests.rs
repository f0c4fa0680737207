//! Every row of the table reads and prints its own field.

use super::*;
use crate::config::options::{Options, RotateBytes, find};
use crate::units::Bytes;

#[test]
fn defaults_are_canonical_and_survive_printing() {
    let defaults = Options::default();
    for opt in OPTIONS {
        assert_eq!(opt.canonical(opt.default).as_deref(), Ok(opt.default), "{}", opt.key);
        assert_eq!((opt.get)(&defaults), opt.default, "{}", opt.key);
    }
    assert_eq!(defaults.bytes, [Bytes::mib(256)]);
    assert_eq!(defaults.src_rotate_bytes, [RotateBytes::Size(Bytes::mib(256))]);
}

#[test]
fn every_listed_word_is_read_and_printed() {
    for opt in OPTIONS {
        let words = match opt.kind {
            Kind::Choice(words) => words,
            Kind::Switch(_) => &["true", "false"],
            Kind::Count(Some(word)) | Kind::Seconds(Some(word)) => &[word][..],
            _ => &[],
        };
        for word in words {
            assert_eq!(opt.canonical(word).as_deref(), Ok(*word), "{}", opt.key);
        }
    }
}

#[test]
fn each_row_reads_into_its_own_field() {
    let samples = [
        "host",
        "all",
        "7",
        "2.5",
        "9",
        "6",
        "true",
        "11",
        "barrier",
        "true",
        "77",
        "5",
        "4 KiB, 8 KiB",
        "auto, 0 B",
        "all",
        "true",
        "1 MiB",
        "40490fdb",
        "20, 80",
        "64 B",
        "512 B",
        "1",
        "true",
        "true",
        "never",
        "128",
        "16",
        "2",
        "3",
        "5",
        "1",
        "true",
        "warp",
        "5, 10-12",
        "0, 1, 1, 0",
        "64 KiB",
        "4",
        "true",
        "3",
        "1 GiB",
        "a.json",
        "b.csv",
        "true",
    ];
    assert_eq!(samples.len(), OPTIONS.len());
    for (i, opt) in OPTIONS.iter().enumerate() {
        let mut options = Options::default();
        (opt.set)(&mut options, samples[i]).unwrap();
        for (j, other) in OPTIONS.iter().enumerate() {
            let expected = if i == j { samples[i] } else { other.default };
            assert_eq!((other.get)(&options), expected, "{} after setting {}", other.key, opt.key);
        }
    }
}

#[test]
fn kernel_shapes_are_bounded_on_both_sides() {
    let block = find("gfx.block_size").unwrap();
    let unroll = find("gfx.unroll").unwrap();
    for good in ["64", "192", "1024"] {
        assert_eq!(block.canonical(good).as_deref(), Ok(good));
    }
    for bad in ["0", "32", "96", "1088", "x", ""] {
        assert!(block.canonical(bad).is_err(), "{bad}");
    }
    for good in ["1", "8", "16", "32", "auto"] {
        assert_eq!(unroll.canonical(good).as_deref(), Ok(good));
    }
    for bad in ["0", "9", "15", "24", "33", "64", "x"] {
        assert!(unroll.canonical(bad).is_err(), "{bad}");
    }
    let se_type = find("gfx.se_type").unwrap();
    assert_eq!(se_type.canonical("0").as_deref(), Ok("block"));
    assert_eq!(se_type.canonical("1").as_deref(), Ok("warp"));
}

#[test]
fn keys_and_environment_names_are_unique() {
    let mut names: Vec<&str> = OPTIONS.iter().flat_map(|opt| [opt.key, opt.env]).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|w| w[0] != w[1]), "{names:?}");
}

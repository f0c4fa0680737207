//! Device memory between processes: a test runs itself once more as the one that imports.

use std::process::Command;

use tb_mpi::gpu::ExportHandle;
use tb_mpi::place::MemKind;
use tb_mpi::units::Bytes;

use super::{Kind, Rig};

/// Handles of the owner's buffers, in the importer's environment.
const HANDLES: &str = "TB_TEST_HANDLES";
/// Small ones share a page or a block with each other on some devices.
const SIZES: [u64; 4] = [4, 4096, 4096, (6 << 20) + 4];

fn pattern(buffer: usize, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 + i / 251) as u8 ^ (buffer as u8 + 1)).collect()
}

/// `this` is the path of the test that calls, with the crate's name.
pub fn import_in_another_process(kind: Kind, this: &str) {
    let rig = Rig::new(kind);
    if let Ok(handles) = std::env::var(HANDLES) {
        return import(&rig, &handles);
    }
    // Each buffer on another device, where there are several.
    let owner = |buffer: usize| &rig.devices[buffer % rig.devices.len()];
    let buffers: Vec<_> = SIZES
        .into_iter()
        .enumerate()
        .map(|(i, bytes)| {
            let buffer = owner(i).allocate(MemKind::Device, Bytes(bytes), true).unwrap();
            owner(i).write(buffer.address(), &pattern(i, bytes)).unwrap();
            buffer
        })
        .collect();
    let hex = |handle: ExportHandle| handle.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let handles: Vec<String> = buffers.iter().map(|buffer| hex(buffer.export().unwrap())).collect();
    let (_, name) = this.split_once("::").expect("a path has the crate's name first");
    let mut importer = Command::new(std::env::current_exe().unwrap());
    let output =
        importer.args(["--exact", "--include-ignored", name]).env(HANDLES, handles.join(",")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
    for (i, buffer) in buffers.iter().enumerate() {
        let mut seen = vec![0; SIZES[i] as usize];
        owner(i).read(buffer.address(), &mut seen).unwrap();
        let expected: Vec<u8> = pattern(i, SIZES[i]).iter().map(|byte| !byte).collect();
        assert!(seen == expected, "buffer {i} does not hold what the importer wrote");
    }
}

/// Reads every buffer, opened twice, by the last device; writes it back inverted.
fn import(rig: &Rig, handles: &str) {
    let device = rig.devices.last().unwrap();
    let bytes =
        |hex: &str| (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect();
    let handles: Vec<ExportHandle> = handles.split(',').map(|hex| ExportHandle(bytes(hex))).collect();
    let imports: Vec<_> =
        handles.iter().zip(SIZES).map(|(handle, size)| device.import(handle, Bytes(size)).unwrap()).collect();
    for ((i, imported), handle) in imports.iter().enumerate().zip(&handles) {
        let mut seen = vec![0; SIZES[i] as usize];
        device.read(imported.region().address(), &mut seen).unwrap();
        assert!(seen == pattern(i, SIZES[i]), "buffer {i} does not hold what its owner wrote");
        // A second time, and closed again: the first stays open.
        drop(device.import(handle, Bytes(SIZES[i])).unwrap());
        seen.iter_mut().for_each(|byte| *byte = !*byte);
        device.write(imported.region().address(), &seen).unwrap();
    }
}

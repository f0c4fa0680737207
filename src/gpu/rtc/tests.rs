//! Every kernel is compiled for every NVIDIA target, and the embedded PTX belongs to its source.
//!
//! What needs a compiler is ignored by a plain run, which counts it as skipped; `ci/kernels` runs it.

use std::path::Path;

use super::compiler::Form;
use super::*;
use crate::gpu::BulkVariant;

/// What the PTX is compiled for: the oldest architecture that it has to run on.
fn ptx_target(kernel: KernelSpec) -> &'static str {
    if needs_sm_90(kernel) { "compute_90" } else { "compute_80" }
}

/// Bulk asynchronous copies came with it.
fn needs_sm_90(kernel: KernelSpec) -> bool {
    kernel.name() == KernelName::Bulk
}

fn ptx_options(kernel: KernelSpec) -> Vec<String> {
    compiler::nvrtc_options(ptx_target(kernel)).into_iter().chain(source::defines(kernel)).collect()
}

/// The line that ties a PTX file to all that it was made from.
fn source_line(kernel: KernelSpec) -> String {
    let (text, options) = (source::text(kernel.name()), ptx_options(kernel));
    let hash = hash::of(std::iter::once(&text).chain(&options).map(String::as_bytes));
    format!("// source {hash:032x}")
}

#[test]
fn the_embedded_ptx_belongs_to_its_source() {
    for (file, ptx) in EMBEDDED {
        let line = ptx.lines().next().unwrap_or_default();
        assert_eq!(line, source_line(embedded_kernel(file)), "kernels/ptx/{file} is out of date: run ci/ptx");
    }
}

#[test]
fn every_kernel_has_an_embedded_default() {
    let copy = TransferVariant { copy: true, ..TransferVariant::default() };
    let defaults = [KernelName::Transfer, KernelName::Bulk, KernelName::Check, KernelName::Latch].map(KernelSpec::from);
    for kernel in defaults.into_iter().chain([KernelSpec::Transfer(copy)]) {
        let Image { bytes, entry } = embedded(kernel).unwrap();
        let ptx = std::str::from_utf8(&bytes).unwrap();
        assert!(ptx.contains(&format!(".visible .entry {entry}(")) && ptx.ends_with('\0'), "{kernel:?}");
    }
    assert_eq!(embedded(KernelSpec::Transfer(TransferVariant { unroll: 3, ..copy })), None);
}

/// Each value of each constant, and the largest kernels.
fn variants() -> Vec<TransferVariant> {
    let default = TransferVariant::default();
    let with = |change: fn(&mut TransferVariant, u32), value: u32| {
        let mut variant = default;
        change(&mut variant, value);
        variant
    };
    let mut variants = vec![default];
    variants.extend([1, 2, 3, 4, 5, 6, 7, 16, 32].map(|value| with(|v, n| v.unroll = n, value)));
    variants.extend([1, 2].map(|value| with(|v, n| v.word = n, value)));
    variants.extend([64, 512, 1024].map(|value| with(|v, n| v.block_threads = n, value)));
    variants.extend([1, 2, 3].map(|value| with(|v, n| v.temporal = n, value)));
    variants.extend([1, 2, 3, 4, 5].map(|value| with(|v, n| v.wave_order = n, value)));
    variants.push(TransferVariant { single_team: true, wave_order: 5, ..default });
    variants.push(TransferVariant { warps: true, ..default });
    variants.push(TransferVariant { warps: true, single_team: true, wave_order: 4, ..default });
    variants.push(TransferVariant { block_threads: 1024, unroll: 32, temporal: 3, single_team: true, ..default });
    variants.push(TransferVariant { xcc: true, ..default });
    variants.push(TransferVariant { xcc: true, warps: true, ..default });
    // A kernel of one source is a part of the general one: the extremes are enough.
    let extremes =
        variants.iter().filter(|variant| variant.unroll == 32 || variant.warps || variant.block_threads != 256);
    let copies: Vec<TransferVariant> =
        extremes.chain([&default]).map(|variant| TransferVariant { copy: true, ..*variant }).collect();
    variants.into_iter().chain(copies).collect()
}

fn all_kernels() -> Vec<KernelSpec> {
    let transfers = variants().into_iter().map(KernelSpec::Transfer);
    let bulk = [
        BulkVariant::default(),
        BulkVariant { stages: 2, stage_bytes: 128 },
        BulkVariant { stages: 7, stage_bytes: 32 << 10 },
    ];
    let others = [KernelName::Check, KernelName::Latch].map(KernelSpec::from);
    transfers.chain(bulk.map(KernelSpec::Bulk)).chain(others).collect()
}

/// Compiles everything for one architecture; the messages of what failed.
fn failures(compiler: &Compiler, architecture: &str) -> Vec<String> {
    let (form, target) = match compiler.target(architecture) {
        Ok(target) => target,
        Err(err) => return vec![err.to_string()],
    };
    let compile = |kernel: KernelSpec| {
        let options: Vec<String> = target.iter().cloned().chain(source::defines(kernel)).collect();
        compiler.compile(source::file(kernel.name()), &source::text(kernel.name()), &options, form)
    };
    let sm_90 = architecture.strip_prefix("sm_").and_then(|sm| sm.parse().ok()).is_some_and(|sm: u32| sm >= 90);
    let kernels: Vec<KernelSpec> = all_kernels().into_iter().filter(|kernel| sm_90 || !needs_sm_90(*kernel)).collect();
    let failed: Vec<String> = kernels
        .iter()
        .filter_map(|kernel| compile(*kernel).err().map(|err| format!("{kernel:?} for {architecture}: {err}")))
        .collect();
    let (good, all) = (kernels.len() - failed.len(), kernels.len());
    println!("{}: {good} of {all} kernels compile for {architecture} ({form:?})", compiler.version());
    failed
}

#[test]
#[ignore = "needs NVRTC: ci/kernels"]
fn kernels_compile_for_every_nvidia_target() {
    let compiler = Compiler::load(Vendor::Cuda).unwrap();
    let failed: Vec<String> =
        ["sm_80", "sm_90", "sm_100"].iter().flat_map(|architecture| failures(&compiler, architecture)).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
#[ignore = "needs hipRTC: ci/kernels"]
fn kernels_compile_with_hiprtc() {
    let compiler = Compiler::load(Vendor::Hip).unwrap();
    let architectures = if compiler.version().starts_with("hipRTC 5.") {
        &["gfx90a:sramecc+:xnack-", "gfx1030"][..]
    } else {
        &["gfx90a", "gfx942", "gfx950", "gfx1100"][..]
    };
    let failed: Vec<String> = architectures.iter().flat_map(|architecture| failures(&compiler, architecture)).collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
#[ignore = "needs NVRTC: ci/kernels"]
fn a_kernel_that_does_not_compile_comes_with_the_compilers_log() {
    let compiler = Compiler::load(Vendor::Cuda).unwrap();
    let options = ["--gpu-architecture=compute_90".to_owned()];
    let err = compiler.compile("broken.h", "__global__ void f() { nonsense(); }", &options, Form::Ptx).unwrap_err();
    assert!(err.message().contains("broken.h(1)") && err.message().contains("nonsense"), "{err}");
}

/// With `TB_PTX_UPDATE` it writes the files, as `ci/ptx` does. It has to be their NVRTC: another
/// makes other text of the same source.
#[test]
#[ignore = "needs the NVRTC of ci/ptx: ci/kernels"]
fn the_embedded_ptx_is_what_nvrtc_makes() {
    let compiler = Compiler::load(Vendor::Cuda).unwrap();
    for (file, embedded) in EMBEDDED {
        let kernel = embedded_kernel(file);
        let (text, options) = (source::text(kernel.name()), ptx_options(kernel));
        let ptx = compiler.compile(source::file(kernel.name()), &text, &options, Form::Ptx).unwrap();
        let ptx = String::from_utf8(ptx).unwrap();
        let maker = format!("// made by ci/ptx with {}", compiler.version());
        let whole = format!("{}\n{maker}\n{}\n", source_line(kernel), ptx.trim_end_matches('\0').trim());
        if std::env::var_os("TB_PTX_UPDATE").is_some() {
            std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/ptx").join(file), whole).unwrap();
        } else {
            assert_eq!(embedded.lines().nth(1), Some(&*maker), "kernels/ptx/{file} is from another NVRTC");
            assert!(whole == *embedded, "kernels/ptx/{file} is not what this NVRTC makes: run ci/ptx");
        }
    }
}

//! The texts of `kernels/`, and the constants that a variant is compiled with.

use crate::gpu::{KernelName, KernelSpec};

const PRELUDE: &str = include_str!("../../../kernels/prelude.h");

fn family(name: KernelName) -> (&'static str, &'static str, &'static str) {
    match name {
        KernelName::Transfer => ("transfer.h", "tb_transfer", include_str!("../../../kernels/transfer.h")),
        KernelName::Check => ("check.h", "tb_check", include_str!("../../../kernels/check.h")),
        KernelName::Latch => ("latch.h", "tb_latch", include_str!("../../../kernels/latch.h")),
    }
}

/// What a compiler's messages call the source.
pub fn file(name: KernelName) -> &'static str {
    family(name).0
}

/// Name of the kernel.
pub fn entry(name: KernelName) -> &'static str {
    family(name).1
}

/// The whole source as one text, so that a compiler needs no include path.
pub fn text(name: KernelName) -> String {
    let (file, _, text) = family(name);
    format!("#line 1 \"prelude.h\"\n{PRELUDE}\n#line 1 \"{file}\"\n{text}")
}

/// Macro definitions of a variant, all of them, so that the defaults in the source do not count.
pub fn defines(kernel: KernelSpec) -> Vec<String> {
    if kernel.name != KernelName::Transfer {
        return Vec::new();
    }
    let variant = kernel.variant;
    let values = [
        ("BLOCK", variant.block_threads),
        ("UNROLL", variant.unroll),
        ("WORD", variant.word),
        ("TEMPORAL", variant.temporal),
        ("WAVE_ORDER", variant.wave_order),
        ("SINGLE_TEAM", variant.single_team.into()),
        ("SE_WARP", variant.warps.into()),
        ("COPY", variant.copy.into()),
    ];
    values.iter().map(|(name, value)| format!("-DTB_{name}={value}")).collect()
}

//! The texts of `kernels/`, and the constants that a variant is compiled with.

use crate::gpu::{BulkVariant, KernelName, KernelSpec, TransferVariant};

const PRELUDE: &str = include_str!("../../../kernels/prelude.h");

const RECORD: &str = include_str!("../../../kernels/record.h");

struct Family {
    file: &'static str,
    entry: &'static str,
    /// What it includes beside the prelude, by file.
    includes: &'static [(&'static str, &'static str)],
    text: &'static str,
}

fn family(name: KernelName) -> Family {
    let of = |file, entry, includes, text| Family { file, entry, includes, text };
    let record: &[(&str, &str)] = &[("record.h", RECORD)];
    match name {
        KernelName::Transfer => of("transfer.h", "tb_transfer", record, include_str!("../../../kernels/transfer.h")),
        KernelName::Bulk => of("bulk.h", "tb_bulk", record, include_str!("../../../kernels/bulk.h")),
        KernelName::Check => of("check.h", "tb_check", &[], include_str!("../../../kernels/check.h")),
        KernelName::Latch => of("latch.h", "tb_latch", &[], include_str!("../../../kernels/latch.h")),
    }
}

/// What a compiler's messages call the source.
pub fn file(name: KernelName) -> &'static str {
    family(name).file
}

/// Name of the kernel.
pub fn entry(name: KernelName) -> &'static str {
    family(name).entry
}

/// The whole source as one text, so that a compiler needs no include path.
pub fn text(name: KernelName) -> String {
    let Family { file, includes, text, .. } = family(name);
    let mut whole = format!("#line 1 \"prelude.h\"\n{PRELUDE}\n");
    for (file, text) in includes {
        whole += &format!("#line 1 \"{file}\"\n{text}\n");
    }
    whole + &format!("#line 1 \"{file}\"\n{text}")
}

/// Macro definitions of a variant, all of them, so that the defaults in the source do not count.
pub fn defines(kernel: KernelSpec) -> Vec<String> {
    let values = match kernel {
        KernelSpec::Transfer(variant) => transfer(variant),
        KernelSpec::Bulk(BulkVariant { stages, stage_bytes }) => {
            vec![("BLOCK", BulkVariant::BLOCK_THREADS), ("STAGES", stages), ("STAGE_BYTES", stage_bytes)]
        }
        KernelSpec::Check | KernelSpec::Latch => Vec::new(),
    };
    values.iter().map(|(name, value)| format!("-DTB_{name}={value}")).collect()
}

fn transfer(variant: TransferVariant) -> Vec<(&'static str, u32)> {
    vec![
        ("BLOCK", variant.block_threads),
        ("UNROLL", variant.unroll),
        ("WORD", variant.word),
        ("TEMPORAL", variant.temporal),
        ("WAVE_ORDER", variant.wave_order),
        ("SINGLE_TEAM", variant.single_team.into()),
        ("SE_WARP", variant.warps.into()),
        ("COPY", variant.copy.into()),
        ("XCC", variant.xcc.into()),
    ]
}

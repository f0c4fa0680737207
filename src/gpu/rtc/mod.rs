//! Turns a kernel's source into code for one device, at run time.
//!
//! In this order: what an earlier run left in the cache, the vendor's runtime compiler, and for
//! NVIDIA the default variants that are embedded as PTX.

mod cache;
mod compiler;
mod hash;
mod source;

use std::sync::OnceLock;

use super::{KernelName, KernelSpec, TransferVariant};
use crate::error::Error;
use cache::Cache;
use compiler::Compiler;

/// Whose runtime loads the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vendor {
    Hip,
    Cuda,
}

impl Vendor {
    fn compiler_name(self) -> &'static str {
        match self {
            Vendor::Hip => "hipRTC",
            Vendor::Cuda => "NVRTC",
        }
    }
}

/// Code that the runtime's module loader takes: a code object, a cubin, or PTX with the zero byte
/// that ends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    pub bytes: Vec<u8>,
    /// Name of the kernel in it.
    pub entry: String,
}

/// Code of a kernel for a device's architecture (`sm_90`; `gfx90a:sramecc+:xnack-`).
///
/// # Errors
/// No runtime compiler and nothing embedded, an architecture that the compiler does not know, or
/// the compiler's own log.
pub fn image(vendor: Vendor, architecture: &str, kernel: KernelSpec) -> Result<Image, Error> {
    match compiler(vendor) {
        Ok(compiler) => compile(compiler, architecture, kernel),
        Err(absent) if vendor == Vendor::Cuda => embedded(kernel).ok_or_else(|| {
            absent.clone().context(format!(
                "only the default variants of the kernels are embedded, and {kernel:?} has to be compiled"
            ))
        }),
        Err(absent) => Err(absent.clone()),
    }
}

/// The default variants as PTX for sm_80 and later: for a machine with the NVIDIA driver alone, or
/// with an NVRTC that is newer than its driver.
pub fn embedded(kernel: KernelSpec) -> Option<Image> {
    let found = EMBEDDED.iter().find(|(file, _)| embedded_kernel(file) == kernel)?;
    // The driver wants the text as a C string.
    let bytes = [found.1.as_bytes(), b"\0"].concat();
    Some(Image { bytes, entry: source::entry(kernel.name()).to_owned() })
}

/// The runtime compiler and its version, or why there is none.
pub fn compiler_version(vendor: Vendor) -> Result<String, Error> {
    compiler(vendor).as_ref().map(Compiler::version).map_err(Error::clone)
}

/// Loaded once, and kept: unloading a compiler that has started threads is not safe.
fn compiler(vendor: Vendor) -> &'static Result<Compiler, Error> {
    static HIP: OnceLock<Result<Compiler, Error>> = OnceLock::new();
    static CUDA: OnceLock<Result<Compiler, Error>> = OnceLock::new();
    let loaded = match vendor {
        Vendor::Hip => &HIP,
        Vendor::Cuda => &CUDA,
    };
    loaded.get_or_init(|| Compiler::load(vendor))
}

fn compile(compiler: &Compiler, architecture: &str, kernel: KernelSpec) -> Result<Image, Error> {
    static CACHE: OnceLock<Option<Cache>> = OnceLock::new();
    let context = |err: Error| err.context(format!("compile {} for {architecture}", source::file(kernel.name())));
    let (form, target) = compiler.target(architecture).map_err(context)?;
    let text = source::text(kernel.name());
    let mut options = target;
    options.extend(source::defines(kernel));
    let parts = [compiler.version(), architecture.to_owned(), text.clone()];
    let key = hash::of(parts.iter().chain(&options).map(String::as_bytes));
    let entry = source::entry(kernel.name()).to_owned();
    let cache = CACHE.get_or_init(Cache::open).as_ref();
    if let Some(bytes) = cache.and_then(|cache| cache.read(key)) {
        return Ok(Image { bytes, entry });
    }
    let bytes = compiler.compile(source::file(kernel.name()), &text, &options, form).map_err(context)?;
    if let Some(cache) = cache {
        cache.write(key, &bytes);
    }
    Ok(Image { bytes, entry })
}

/// What `ci/ptx` has made, by the names that it gives.
const EMBEDDED: &[(&str, &str)] = &[
    ("transfer.ptx", include_str!("../../../kernels/ptx/transfer.ptx")),
    ("transfer_copy.ptx", include_str!("../../../kernels/ptx/transfer_copy.ptx")),
    ("bulk.ptx", include_str!("../../../kernels/ptx/bulk.ptx")),
    ("check.ptx", include_str!("../../../kernels/ptx/check.ptx")),
    ("latch.ptx", include_str!("../../../kernels/ptx/latch.ptx")),
];

fn embedded_kernel(file: &str) -> KernelSpec {
    match file {
        "transfer.ptx" => KernelName::Transfer.into(),
        "transfer_copy.ptx" => KernelSpec::Transfer(TransferVariant { copy: true, ..TransferVariant::default() }),
        "bulk.ptx" => KernelName::Bulk.into(),
        "check.ptx" => KernelName::Check.into(),
        "latch.ptx" => KernelName::Latch.into(),
        other => unreachable!("{other} is not in the list"),
    }
}

#[cfg(test)]
mod tests;

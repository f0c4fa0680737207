//! Kernel images of this process: compiled once for each architecture, whatever devices and drivers share it.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use super::KernelSpec;
use super::rtc::{self, Image, Vendor};
use crate::error::Error;

type Compiled = Result<Arc<Image>, Error>;
type Key = (&'static str, String, KernelSpec);

/// # Errors
/// Why there is none: no compiler and no embedded image, or what the compiler said. Asking again
/// gives the same answer.
pub fn get(runtime: &'static str, vendor: Vendor, architecture: &str, kernel: KernelSpec) -> Compiled {
    static IMAGES: LazyLock<Mutex<HashMap<Key, Compiled>>> = LazyLock::new(Mutex::default);
    // Held while compiling, so that rank threads do not do the same work at once.
    let mut images = IMAGES.lock().unwrap_or_else(PoisonError::into_inner);
    let compile = || rtc::image(vendor, architecture, kernel).map(Arc::new);
    images.entry((runtime, architecture.to_owned(), kernel)).or_insert_with(compile).clone()
}

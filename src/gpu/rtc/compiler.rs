//! NVRTC and hipRTC, opened at run time: one interface under two prefixes.

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::{Library, Symbol};

use super::Vendor;
use crate::error::Error;

/// What is taken from the compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Code for one architecture: cubin or AMD code object.
    Code,
    Ptx,
}

/// `nvrtcProgram`, `hiprtcProgram`: pointers to opaque structs.
type Program = *mut c_void;
/// `nvrtcResult`, `hiprtcResult` as the integers that they are: a newer library may return values
/// that an enum of ours would not have.
type Status = c_int;

type VersionFn = unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status;
type RuntimeVersionFn = unsafe extern "C" fn(*mut c_int) -> Status;
type ErrorTextFn = unsafe extern "C" fn(Status) -> *const c_char;
type CreateFn = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Status;
type CompileFn = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status;
type SizeFn = unsafe extern "C" fn(Program, *mut usize) -> Status;
type BytesFn = unsafe extern "C" fn(Program, *mut c_char) -> Status;
type DestroyFn = unsafe extern "C" fn(*mut Program) -> Status;
type CountArchitecturesFn = unsafe extern "C" fn(*mut c_int) -> Status;
type ArchitecturesFn = unsafe extern "C" fn(*mut c_int) -> Status;

/// Size and contents of one product of a program.
struct Product {
    name: &'static str,
    size: SizeFn,
    bytes: BytesFn,
}

/// A runtime compiler.
pub struct Compiler {
    vendor: Vendor,
    version: (u32, u32),
    /// Compute capabilities that NVRTC makes code for, such as 90.
    capabilities: Vec<u32>,
    error_text: ErrorTextFn,
    create: CreateFn,
    compile: CompileFn,
    destroy: DestroyFn,
    log: Product,
    code: Product,
    ptx: Option<Product>,
    /// Keeps the functions mapped.
    _library: Library,
}

impl Compiler {
    /// Opens the first library that is there.
    ///
    /// # Errors
    /// If none is, or one is too old; the message names what was tried.
    pub fn load(vendor: Vendor) -> Result<Compiler, Error> {
        let tried = candidates(vendor, |name| env::var_os(name).map(PathBuf::from));
        for path in &tried {
            // SAFETY: these are the vendor's own libraries, whose initialisers only set up themselves.
            let Ok(library) = (unsafe { Library::new(path) }) else { continue };
            match Compiler::new(vendor, library) {
                Ok(compiler) => return Ok(compiler),
                Err(err) => tracing::debug!("{}: {err}", path.display()),
            }
        }
        let names: Vec<String> = tried.iter().map(|path| path.display().to_string()).collect();
        Err(Error::new(format!("{} is not here (tried {})", vendor.compiler_name(), names.join(", "))))
    }

    fn new(vendor: Vendor, library: Library) -> Result<Compiler, Error> {
        let table = Table { library: &library, prefix: if vendor == Vendor::Hip { "hiprtc" } else { "nvrtc" } };
        let version = match vendor {
            Vendor::Cuda => table.version()?,
            Vendor::Hip => table.hip_version()?,
        };
        let cuda = vendor == Vendor::Cuda;
        Ok(Compiler {
            vendor,
            version,
            capabilities: if cuda { table.capabilities()? } else { Vec::new() },
            // SAFETY: the type is that of the documented function of this name.
            error_text: unsafe { table.symbol("GetErrorString") }?,
            // SAFETY: as above.
            create: unsafe { table.symbol("CreateProgram") }?,
            // SAFETY: as above.
            compile: unsafe { table.symbol("CompileProgram") }?,
            // SAFETY: as above.
            destroy: unsafe { table.symbol("DestroyProgram") }?,
            log: table.product("ProgramLog")?,
            code: table.product(if cuda { "CUBIN" } else { "Code" })?,
            ptx: if cuda { Some(table.product("PTX")?) } else { None },
            _library: library,
        })
    }

    /// `NVRTC 12.9`.
    pub fn version(&self) -> String {
        format!("{} {}.{}", self.vendor.compiler_name(), self.version.0, self.version.1)
    }

    /// What to ask for to run on an architecture, and the options that say so.
    ///
    /// # Errors
    /// If the compiler does not know the architecture.
    pub fn target(&self, architecture: &str) -> Result<(Form, Vec<String>), Error> {
        match self.vendor {
            Vendor::Hip => {
                let base = architecture.split(':').next().unwrap_or(architecture);
                if !hiprtc_knows(self.version.0, base) {
                    return Err(Error::new(format!(
                        "{} is older than this architecture: load ROCm 6 or newer",
                        self.version()
                    )));
                }
                let target = format!("--offload-arch={architecture}");
                Ok((Form::Code, vec![target, "-std=c++17".to_owned(), "-O3".to_owned()]))
            }
            Vendor::Cuda => {
                let (form, target) = nvrtc_target(&self.capabilities, architecture).ok_or_else(|| {
                    Error::new(format!("{} makes nothing that runs on {architecture}", self.version()))
                })?;
                Ok((form, nvrtc_options(&target)))
            }
        }
    }

    /// # Errors
    /// The compiler's log.
    pub fn compile(&self, file: &str, text: &str, options: &[String], form: Form) -> Result<Vec<u8>, Error> {
        let c_string = |text: &str| CString::new(text).expect("sources and options hold no zero byte");
        let (file, text) = (c_string(file), c_string(text));
        let options: Vec<CString> = options.iter().map(|option| c_string(option)).collect();
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = Created { compiler: self, program: ptr::null_mut() };
        let (out, none) = (&raw mut program.program, ptr::null());
        // SAFETY: the strings outlive the call, there are no headers, and the program is destroyed once.
        let status = unsafe { (self.create)(out, text.as_ptr(), file.as_ptr(), 0, none, none) };
        self.check(status, "create a program")?;
        // SAFETY: the program was created, and the option strings outlive the call.
        let status = unsafe { (self.compile)(program.program, options.len() as c_int, options.as_ptr()) };
        if let Err(err) = self.check(status, "compile") {
            let log = self.take(&self.log, &program).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let log = log.trim_end_matches('\0').trim();
            return Err(if log.is_empty() { err } else { err.context(log) });
        }
        match (form, &self.ptx) {
            (Form::Ptx, Some(ptx)) => self.take(ptx, &program),
            (Form::Ptx, None) => unreachable!("only NVRTC is asked for PTX"),
            (Form::Code, _) => self.take(&self.code, &program),
        }
    }

    fn take(&self, product: &Product, program: &Created<'_>) -> Result<Vec<u8>, Error> {
        let mut size = 0;
        // SAFETY: the program lives, and the function writes one size.
        let status = unsafe { (product.size)(program.program, &mut size) };
        self.check(status, product.name)?;
        let mut bytes = vec![0u8; size];
        // SAFETY: the function writes as many bytes as it said.
        let status = unsafe { (product.bytes)(program.program, bytes.as_mut_ptr().cast()) };
        self.check(status, product.name)?;
        Ok(bytes)
    }

    fn check(&self, status: Status, what: &str) -> Result<(), Error> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: any status is allowed; the result is a constant string or null.
        let text = unsafe { (self.error_text)(status) };
        let text = if text.is_null() {
            "unknown".into()
        } else {
            // SAFETY: a string that ends with zero and is never freed.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        Err(Error::new(format!("{} could not {what}: {text} (status {status})", self.version())))
    }
}

/// A program that is destroyed at the end.
struct Created<'a> {
    compiler: &'a Compiler,
    program: Program,
}

impl Drop for Created<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: created by this library and not destroyed before.
            unsafe { (self.compiler.destroy)(&raw mut self.program) };
        }
    }
}

/// The functions of a library, by their names after the prefix.
struct Table<'a> {
    library: &'a Library,
    prefix: &'static str,
}

impl Table<'_> {
    /// # Safety
    /// `T` is the type of the function.
    unsafe fn symbol<T: Copy>(&self, name: &str) -> Result<T, Error> {
        let name = format!("{}{name}", self.prefix);
        // SAFETY: the caller's promise.
        let symbol: Symbol<'_, T> = unsafe { self.library.get(name.as_bytes()) }
            .map_err(|_| Error::new(format!("the library has no {name}: it is too old")))?;
        Ok(*symbol)
    }

    fn product(&self, name: &'static str) -> Result<Product, Error> {
        Ok(Product {
            name,
            // SAFETY: every product has two functions of these types.
            size: unsafe { self.symbol(&format!("Get{name}Size")) }?,
            // SAFETY: as above.
            bytes: unsafe { self.symbol(&format!("Get{name}")) }?,
        })
    }

    fn version(&self) -> Result<(u32, u32), Error> {
        // SAFETY: the type is that of the documented function of this name.
        let version: VersionFn = unsafe { self.symbol("Version") }?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two integers.
        let status = unsafe { version(&mut major, &mut minor) };
        match (u32::try_from(major), u32::try_from(minor)) {
            (Ok(major), Ok(minor)) if status == 0 => Ok((major, minor)),
            _ => Err(Error::new(format!("its version cannot be asked (status {status})"))),
        }
    }

    /// The version of HIP that the compiler belongs to. hipRTC inside the runtime says 9.0 of itself
    /// whatever HIP is (5.2.3 does), but there the runtime can be asked.
    fn hip_version(&self) -> Result<(u32, u32), Error> {
        let runtime = Table { library: self.library, prefix: "hip" };
        // SAFETY: the type is that of the documented function of this name.
        let Ok(version) = (unsafe { runtime.symbol::<RuntimeVersionFn>("RuntimeGetVersion") }) else {
            return self.version();
        };
        let mut number = 0;
        // SAFETY: writes one integer.
        let status = unsafe { version(&mut number) };
        // HIP_VERSION is major * 10^7 + minor * 10^5 + patch.
        match u32::try_from(number) {
            Ok(number) if status == 0 => Ok((number / 10_000_000, number / 100_000 % 100)),
            _ => Err(Error::new(format!("the version of HIP cannot be asked (status {status})"))),
        }
    }

    fn capabilities(&self) -> Result<Vec<u32>, Error> {
        // SAFETY: the type is that of the documented function of this name.
        let count: CountArchitecturesFn = unsafe { self.symbol("GetNumSupportedArchs") }?;
        // SAFETY: as above.
        let list: ArchitecturesFn = unsafe { self.symbol("GetSupportedArchs") }?;
        let mut number = 0;
        // SAFETY: writes one integer.
        let status = unsafe { count(&mut number) };
        let mut capabilities = vec![0; usize::try_from(number).unwrap_or(0)];
        if status != 0 || capabilities.is_empty() {
            return Err(Error::new(format!("its architectures cannot be asked (status {status})")));
        }
        // SAFETY: writes as many integers as it said there are.
        let status = unsafe { list(capabilities.as_mut_ptr()) };
        if status != 0 {
            return Err(Error::new(format!("its architectures cannot be asked (status {status})")));
        }
        Ok(capabilities.into_iter().filter_map(|capability| u32::try_from(capability).ok()).collect())
    }
}

/// Code where the compiler knows the architecture, else PTX of the newest that it knows below: the
/// driver finishes that one. `None` for one that is older than all.
fn nvrtc_target(capabilities: &[u32], architecture: &str) -> Option<(Form, String)> {
    let number: u32 = architecture.strip_prefix("sm_")?.parse().ok()?;
    if capabilities.contains(&number) {
        return Some((Form::Code, format!("sm_{number}")));
    }
    let below = capabilities.iter().filter(|known| **known < number).max()?;
    Some((Form::Ptx, format!("compute_{below}")))
}

pub fn nvrtc_options(target: &str) -> Vec<String> {
    vec![format!("--gpu-architecture={target}"), "-std=c++17".to_owned()]
}

/// hipRTC of ROCm 5 ends the process (SIGABRT in 5.2.3) when asked for an architecture that came
/// after it, and nothing that it offers tells beforehand. So before version 6 it is asked only for
/// what every release of 5 has compiled. From 6 on it returns an error, as it should. A separate
/// library of before 5.3 counts itself as 9.
fn hiprtc_knows(major: u32, base: &str) -> bool {
    const ROCM_5: &[&str] = &["gfx803", "gfx900", "gfx906", "gfx908", "gfx90a", "gfx1010", "gfx1030"];
    matches!(major, 6..=8 | 10..) || ROCM_5.contains(&base)
}

/// Libraries in the order in which they are tried; `variable` reads the environment.
fn candidates(vendor: Vendor, variable: impl Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    let (own, homes, folders, names): (&str, &[&str], &[&str], &[&str]) = match vendor {
        Vendor::Cuda => (
            "TB_NVRTC",
            &["CUDA_HOME", "CUDA_PATH"],
            &["lib64", "lib"],
            &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"],
        ),
        // Before ROCm 6, and still in Debian's packages, the functions are in the runtime itself.
        Vendor::Hip => (
            "TB_HIPRTC",
            &["ROCM_PATH", "HIP_PATH"],
            &["lib"],
            &[
                "libhiprtc.so.7",
                "libhiprtc.so.6",
                "libhiprtc.so",
                "libamdhip64.so.7",
                "libamdhip64.so.6",
                "libamdhip64.so.5",
                "libamdhip64.so",
            ],
        ),
    };
    if let Some(path) = variable(own) {
        return vec![path];
    }
    let homes = homes.iter().filter_map(|home| variable(home));
    let homes: Vec<PathBuf> = homes.flat_map(|home| folders.iter().map(move |folder| home.join(folder))).collect();
    let in_homes = homes.iter().flat_map(|home| names.iter().map(move |name| home.join(name)));
    let in_homes: Vec<PathBuf> = in_homes.filter(|path| path.exists()).collect();
    in_homes.into_iter().chain(names.iter().map(Path::new).map(Path::to_path_buf)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvrtc_is_asked_for_code_or_for_the_nearest_ptx_below() {
        let known = [75, 80, 90, 100];
        let target = |architecture| nvrtc_target(&known, architecture);
        assert_eq!(target("sm_90"), Some((Form::Code, "sm_90".to_owned())));
        assert_eq!(target("sm_86"), Some((Form::Ptx, "compute_80".to_owned())));
        assert_eq!(target("sm_121"), Some((Form::Ptx, "compute_100".to_owned())));
        assert_eq!(target("sm_70"), None);
        assert_eq!(target("gfx90a"), None);
    }

    #[test]
    fn old_hiprtc_is_asked_only_for_what_it_surely_knows() {
        assert!(hiprtc_knows(5, "gfx90a") && hiprtc_knows(5, "gfx1030"));
        assert!(!hiprtc_knows(5, "gfx942") && !hiprtc_knows(5, "gfx1100") && !hiprtc_knows(9, "gfx942"));
        assert!(hiprtc_knows(6, "gfx942") && hiprtc_knows(7, "gfx1250"));
    }

    #[test]
    fn a_path_in_the_environment_is_the_only_candidate() {
        let own = |name: &str| (name == "TB_NVRTC").then(|| PathBuf::from("/x/libnvrtc.so"));
        assert_eq!(candidates(Vendor::Cuda, own), [Path::new("/x/libnvrtc.so")]);
        assert!(candidates(Vendor::Hip, own).len() > 1);
    }

    #[test]
    fn homes_come_before_the_loaders_own_folders() {
        let home = tempfile::tempdir().unwrap();
        let library = home.path().join("lib64/libnvrtc.so.12");
        std::fs::create_dir(home.path().join("lib64")).unwrap();
        std::fs::write(&library, "").unwrap();
        let variable = |name: &str| (name == "CUDA_PATH").then(|| home.path().to_owned());
        let found = candidates(Vendor::Cuda, variable);
        assert_eq!(found[..2], [library, PathBuf::from("libnvrtc.so.13")]);
    }

    #[test]
    fn a_library_that_is_not_a_compiler_is_refused() {
        // SAFETY: the C library is loaded already.
        let library = unsafe { Library::new("libc.so.6") }.unwrap();
        let err = Compiler::new(Vendor::Cuda, library).err().unwrap();
        assert_eq!(err.message(), "the library has no nvrtcVersion: it is too old");
    }
}

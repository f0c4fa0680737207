//! Opens a device runtime's library when the program runs, and calls its functions by a table.

use std::error::Error as _;
use std::ffi::c_int;
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;

use crate::error::Error;

/// A shared library that stays loaded until the process ends: runtimes leave threads and exit
/// handlers behind that must not lose their code.
pub struct Library {
    name: String,
    inner: ManuallyDrop<libloading::Library>,
}

impl Library {
    /// The first of `names` that opens.
    ///
    /// # Errors
    /// What the loader says of the last name, which is the plainest one.
    pub fn open(names: &[String]) -> Result<Library, Error> {
        let mut said = String::new();
        for name in names {
            // SAFETY: the names are those of device runtimes, which are made to be loaded at any time.
            match unsafe { libloading::Library::new(name) } {
                Ok(inner) => return Ok(Library { name: name.clone(), inner: ManuallyDrop::new(inner) }),
                Err(err) => said = err.source().map_or_else(|| err.to_string(), ToString::to_string),
            }
        }
        Err(Error::new(format!("{} is not on this machine: {said}", names.join(" or "))))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// A function, if the library has it.
    ///
    /// # Safety
    /// `F` must be the function pointer type that the library's documentation gives for `name`.
    pub unsafe fn symbol<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: passed on to the caller.
        let symbol = unsafe { self.inner.get::<F>(name) };
        symbol.ok().map(|symbol| *symbol)
    }
}

/// Why a call of a table did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub call: &'static str,
    /// None: the library has no such function.
    pub status: Option<u32>,
}

impl Refusal {
    /// As an error: what was being done, the call, the runtime's own text.
    pub fn explain(self, library: &str, what: impl fmt::Display, text: impl FnOnce(u32) -> String) -> Error {
        let Refusal { call, status } = self;
        Error::new(match status {
            None => format!("{what}: {library} has no function {call}: it is too old, or too new"),
            Some(status) => format!("{what}: {call}: {} (status {status})", text(status)),
        })
    }
}

/// Declares a table of functions that return a status, 0 meaning success.
///
/// Every function is optional, since older and newer libraries lack some, and statuses are plain
/// integers, since a value that is missing in a Rust enum is undefined behaviour. `types` holds the
/// pointer types by what a status is: `same_signatures` or `same_wrappers` assigns the functions of
/// the crate that the signatures come from, so that the compiler compares the two.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $(fn $name:ident($($arg:ident: $ty:ty),* $(,)?);)+ }) => {
        #[allow(non_camel_case_types, dead_code)]
        pub mod types {
            use super::*;
            $(pub type $name<R> = unsafe extern "C" fn($($ty),*) -> R;)+
        }

        /// Compares with the C functions of a crate; it is enough that it compiles.
        #[allow(unused_macros)]
        macro_rules! same_signatures {
            ($origin:ident, $status:ty) => {
                $(let _: types::$name<$status> = $origin::$name;)+
            };
        }

        /// The same for a crate that wraps the C functions in Rust ones.
        #[allow(unused_macros)]
        macro_rules! same_wrappers {
            ($origin:ident, $status:ty) => {
                $(let _: unsafe fn($($ty),*) -> $status = $origin::$name;)+
            };
        }

        $(#[$doc])*
        #[allow(non_snake_case)]
        pub struct $table {
            $($name: Option<types::$name<u32>>,)+
        }

        #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
        impl $table {
            fn load(library: &$crate::gpu::library::Library) -> $table {
                $table {
                    $(
                        // SAFETY: the type is that of the runtime's header, compared by the compiler.
                        $name: unsafe { library.symbol(stringify!($name)) },
                    )+
                }
            }

            /// Whether the library has the function.
            #[allow(dead_code)]
            pub fn has(&self, call: &str) -> bool {
                match call {
                    $(stringify!($name) => self.$name.is_some(),)+
                    _ => false,
                }
            }

            $(
                pub unsafe fn $name(&self, $($arg: $ty),*) -> Result<(), $crate::gpu::library::Refusal> {
                    let call = stringify!($name);
                    let absent = $crate::gpu::library::Refusal { call, status: None };
                    let function = self.$name.ok_or(absent)?;
                    // SAFETY: the caller keeps what the runtime's documentation asks for.
                    match unsafe { function($($arg),*) } {
                        0 => Ok(()),
                        status => Err($crate::gpu::library::Refusal { call, status: Some(status) }),
                    }
                }
            )+
        }
    };
}
pub(super) use functions;

/// Text that a runtime wrote into a buffer, up to its end.
pub fn text(buffer: &[u8]) -> String {
    let end = buffer.iter().position(|byte| *byte == 0).unwrap_or(buffer.len());
    String::from_utf8_lossy(&buffer[..end]).into_owned()
}

/// An attribute that counts something: what is negative or absent is 0.
pub fn count(value: Option<c_int>) -> u32 {
    value.and_then(|value| u32::try_from(value).ok()).unwrap_or(0)
}

/// A device's UUID as the vendors' tools print it.
pub fn uuid(bytes: [u8; 16]) -> String {
    if bytes.iter().all(u8::is_ascii_hexdigit) {
        // AMD's runtime gives the digits themselves.
        return format!("GPU-{}", text(&bytes));
    }
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// NUMA node of a PCI device, where the system tells.
pub fn numa_node(pci: &str) -> Option<u32> {
    let file = Path::new("/sys/bus/pci/devices").join(pci).join("numa_node");
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::c_void;

    // Of the C library, which is always there; `memset` stands for a call that fails.
    functions! {
        Table {
            fn getpagesize();
            fn no_such_function(place: *mut c_void);
        }
    }

    #[test]
    fn an_absent_library_is_named_with_what_the_loader_says() {
        let err = Library::open(&["libnowhere.so.1".to_owned(), "libnowhere.so".to_owned()]).err().unwrap();
        let expected = "libnowhere.so.1 or libnowhere.so is not on this machine: ";
        assert!(err.message().starts_with(expected) && err.message().contains("libnowhere.so:"), "{err}");
    }

    #[test]
    fn a_status_and_an_absent_function_are_told_apart() {
        let library = Library::open(&["libc.so.6".to_owned()]).unwrap();
        let table = Table::load(&library);
        // SAFETY: it takes nothing and changes nothing.
        let refusal = unsafe { table.getpagesize() }.unwrap_err();
        let page = rustix::param::page_size() as u32;
        assert_eq!(refusal, Refusal { call: "getpagesize", status: Some(page) });
        let err = refusal.explain(library.name(), "ask", |_| "it is big".to_owned());
        assert_eq!(err.message(), format!("ask: getpagesize: it is big (status {page})"));

        // SAFETY: it is not there to be called.
        let refusal = unsafe { table.no_such_function(std::ptr::null_mut()) }.unwrap_err();
        let err = refusal.explain(library.name(), "ask", |_| unreachable!("there is no status"));
        assert_eq!(err.message(), "ask: libc.so.6 has no function no_such_function: it is too old, or too new");
    }

    #[test]
    fn uuids_print_as_the_vendors_tools_do() {
        assert_eq!(uuid(*b"00000000feed0001"), "GPU-00000000feed0001");
        let bytes = std::array::from_fn(|i| i as u8 + 0xa0);
        assert_eq!(uuid(bytes), "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf");
    }

    #[test]
    fn text_ends_at_its_zero() {
        assert_eq!(text(b"H200\0\0\0"), "H200");
        assert_eq!(text(b"H200"), "H200");
    }
}

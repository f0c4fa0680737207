//! Brings finished text to files and to stdout: the only part of `report` that touches the system.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};

use crate::error::Error;
use crate::fault::{Faults, Hit};

/// Temporary files of this process that are not yet renamed.
static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// A panic while the list was held leaves it whole: single insertions and removals.
fn unfinished() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes what an interrupted write left behind; to be called right before the process ends early.
///
/// Takes a lock, so it is for a thread that waits for signals, not for a signal handler itself.
pub fn remove_unfinished() {
    remove_all(&mut unfinished());
}

fn remove_all(list: &mut BTreeSet<PathBuf>) {
    for path in std::mem::take(list) {
        // Renamed a moment ago, or its folder is gone: nothing is left either way.
        let _ = fs::remove_file(path);
    }
}

/// Replaces the file at `path` as a whole: a reader finds the old text or the new one, never a part.
///
/// The text goes to a temporary file in the same folder, which is renamed. It is not forced to the
/// disk: results survive the end of the process, not a loss of power.
///
/// # Errors
/// Names the file and the system's reason; the old file is then as it was, and nothing is left.
pub fn write_atomically(path: &Path, contents: &str, faults: &Faults) -> Result<(), Error> {
    replace(path, contents, faults).map_err(|err| err.context(format_args!("write {}", path.display())))
}

fn replace(path: &Path, contents: &str, faults: &Faults) -> Result<(), Error> {
    let target = Target::of(path)?;
    let mut bytes = contents.as_bytes().to_vec();
    match faults.hit("write_results")? {
        Hit::Go => {}
        Hit::Drop => return Ok(()),
        Hit::Corrupt => bytes.iter_mut().take(1).for_each(|byte| *byte ^= 1),
    }
    let mut temporary = Temporary::create(&target.folder)?;
    temporary.file.write_all(&bytes)?;
    if let Some(permissions) = target.permissions {
        fs::set_permissions(&temporary.path, permissions)?;
    }
    match faults.hit("rename_results")? {
        Hit::Go | Hit::Corrupt => Ok(fs::rename(&temporary.path, &target.path)?),
        Hit::Drop => Ok(()),
    }
}

/// Finds out before the run whether results can be written to `path` at its end.
///
/// # Errors
/// Says what stands in the way: no such folder, not a folder, a folder or device of that name, no
/// permission.
pub fn check_writable(path: &Path) -> Result<(), Error> {
    let check = || Temporary::create(&Target::of(path)?.folder).map(drop);
    check().map_err(|err| err.context(format_args!("results cannot be written to {}", path.display())))
}

/// A regular file, present or to come.
struct Target {
    /// Behind symbolic links, so that these stay.
    path: PathBuf,
    folder: PathBuf,
    /// Of the file that is replaced.
    permissions: Option<fs::Permissions>,
}

impl Target {
    fn of(path: &Path) -> Result<Target, Error> {
        // Renaming over these would replace the device itself.
        let special = path.starts_with("/proc") || path.starts_with("/dev") && !path.starts_with("/dev/shm");
        if special || path.file_name().is_none() {
            return Err(Error::new("it does not name a file: give the name of a file in a folder"));
        }
        let (path, permissions) = match fs::metadata(path) {
            Ok(found) if found.is_dir() => return Err(Error::new("it is a folder: give the name of a file in it")),
            Ok(found) if !found.is_file() => return Err(Error::new("it is not a regular file: give another name")),
            Ok(found) if found.permissions().readonly() => {
                return Err(Error::new("the file is write-protected: give another name, or chmod u+w it"));
            }
            Ok(found) => (fs::canonicalize(path)?, Some(found.permissions())),
            Err(err) if err.kind() == ErrorKind::NotFound => (path.to_owned(), None),
            Err(err) => return Err(err.into()),
        };
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        if !folder.is_dir() {
            return Err(Error::new(format!("there is no folder {}: create it first", folder.display())));
        }
        Ok(Target { path, folder, permissions })
    }
}

/// A file that vanishes unless it is renamed before it is dropped.
struct Temporary {
    path: PathBuf,
    file: File,
}

impl Temporary {
    fn create(folder: &Path) -> Result<Temporary, Error> {
        // Created and listed under one lock, so that no file exists that `remove_unfinished` misses.
        let mut list = unfinished();
        let mut n = 0u32;
        loop {
            let path = folder.join(format!(".tb-mpi-{}-{n}.tmp", process::id()));
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(file) => {
                    list.insert(path.clone());
                    return Ok(Temporary { path, file });
                }
                // Another thread's, or left by a killed process of the same number.
                Err(err) if err.kind() == ErrorKind::AlreadyExists && n < 1000 => n += 1,
                Err(err) => return Err(Error::from(err).context(format_args!("folder {}", folder.display()))),
            }
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Absent once it is renamed.
        let _ = fs::remove_file(&self.path);
        unfinished().remove(&self.path);
    }
}

/// Whether two paths name one file: there, or where it would be made.
pub fn is_same_file(a: &Path, b: &Path) -> bool {
    let real = |path: &Path| {
        fs::canonicalize(path).ok().or_else(|| {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            Some(fs::canonicalize(parent).ok()?.join(path.file_name()?))
        })
    };
    real(a).is_some_and(|a| Some(a) == real(b))
}

/// Writes a line to stderr, whatever state that is in.
pub fn complain(line: &str) {
    // A stderr that is gone cannot be told anything.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Writes `text` to stdout; a reader that has gone away (`tb-mpi | head`) is no failure.
///
/// # Errors
/// Where stdout takes no more (a full disk). Never panics, unlike `print!`.
pub fn print(text: &str) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    let wait = || {
        let stdout = io::stdout();
        // A failed wait only makes the next attempt come sooner.
        let _ = poll(&mut [PollFd::from_borrowed_fd(stdout.as_fd(), PollFlags::OUT)], None);
    };
    print_to(&mut out, text, wait).map_err(|err| Error::from(err).context("write to stdout"))
}

/// `wait` returns when `out` may take more: another process may have made a shared stdout non-blocking.
fn print_to(out: &mut impl Write, text: &str, wait: impl Fn()) -> io::Result<()> {
    let mut rest = text.as_bytes();
    loop {
        let step = if rest.is_empty() { out.flush().map(|()| None) } else { out.write(rest).map(Some) };
        match step {
            Ok(None) => return Ok(()),
            Ok(Some(0)) => return Err(ErrorKind::WriteZero.into()),
            Ok(Some(n)) => rest = &rest[n..],
            Err(err) => match err.kind() {
                ErrorKind::Interrupted => {}
                ErrorKind::WouldBlock => wait(),
                ErrorKind::BrokenPipe => return Ok(()),
                _ => return Err(err),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use crate::fault::Action;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn folder_with(text: &str) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r.json");
        fs::write(&path, text).unwrap();
        (folder, path)
    }

    #[test]
    fn a_file_is_replaced_and_nothing_else_is_left() {
        let (folder, path) = folder_with("old");
        write_atomically(&path, "new", &Faults::default()).unwrap();
        assert_eq!(
            (fs::read_to_string(&path).unwrap().as_str(), names(folder.path())),
            ("new", vec!["r.json".to_owned()])
        );
        let other = folder.path().join("other.csv");
        write_atomically(&other, "x", &Faults::default()).unwrap();
        assert_eq!(names(folder.path()), ["other.csv", "r.json"]);
    }

    #[test]
    fn a_failure_at_any_step_leaves_the_old_file_alone() {
        for call in ["write_results", "rename_results"] {
            let (folder, path) = folder_with("old");
            let err = write_atomically(&path, "new", &Faults::nth_of(call, 0, Action::Fail)).unwrap_err();
            assert!(err.message().contains("r.json") && err.message().contains(call), "{err}");
            assert_eq!((fs::read_to_string(&path).unwrap().as_str(), names(folder.path()).len()), ("old", 1));
        }
    }

    #[test]
    fn every_step_passes_the_fault_counter() {
        let (_folder, path) = folder_with("old");
        let faults = Faults::counting();
        write_atomically(&path, "new", &faults).unwrap();
        assert_eq!(faults.calls(), 2);
    }

    #[test]
    fn dropped_and_corrupted_writes_act_as_they_say() {
        for call in ["write_results", "rename_results"] {
            let (folder, path) = folder_with("old");
            write_atomically(&path, "new", &Faults::nth_of(call, 0, Action::Drop)).unwrap();
            assert_eq!((fs::read_to_string(&path).unwrap().as_str(), names(folder.path()).len()), ("old", 1));
        }
        let (_folder, path) = folder_with("old");
        write_atomically(&path, "new", &Faults::nth_of("write_results", 0, Action::Corrupt)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "oew");
    }

    #[test]
    fn what_is_unfinished_can_be_removed_from_outside() {
        let folder = tempfile::tempdir().unwrap();
        let temporary = Temporary::create(folder.path()).unwrap();
        assert_eq!(names(folder.path()).len(), 1);
        // Only its own is removed: tests of one process share the list.
        let mut own: BTreeSet<PathBuf> =
            unfinished().iter().filter(|path| path.starts_with(folder.path())).cloned().collect();
        assert_eq!(own, BTreeSet::from([temporary.path.clone()]));
        remove_all(&mut own);
        assert_eq!(names(folder.path()), [""; 0]);
        let path = temporary.path.clone();
        drop(temporary);
        assert!(!unfinished().contains(&path));
    }

    #[test]
    fn a_leftover_of_a_killed_process_is_no_obstacle() {
        let (folder, path) = folder_with("old");
        let leftover = folder.path().join(format!(".tb-mpi-{}-0.tmp", process::id()));
        fs::write(&leftover, "half").unwrap();
        write_atomically(&path, "new", &Faults::default()).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_to_string(&leftover).unwrap(), "half");
    }

    #[test]
    fn links_and_permissions_stay() {
        let (folder, path) = folder_with("old");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let link = folder.path().join("latest.json");
        symlink(&path, &link).unwrap();
        write_atomically(&link, "new", &Faults::default()).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[track_caller]
    fn refused(path: &Path, reason: &str) {
        for result in [check_writable(path), write_atomically(path, "x", &Faults::default())] {
            let err = result.unwrap_err();
            assert!(err.message().contains(reason), "{err}");
            assert!(err.message().contains(&path.display().to_string()), "{err}");
        }
    }

    #[test]
    fn what_cannot_be_written_is_found_early() {
        let (folder, path) = folder_with("old");
        check_writable(&path).unwrap();
        check_writable(&folder.path().join("new.json")).unwrap();
        assert_eq!(names(folder.path()), ["r.json"]);
        refused(folder.path(), "is a folder");
        refused(&folder.path().join("none/r.json"), "there is no folder");
        refused(&path.join("r.json"), "Not a directory");
        refused(Path::new("/dev/null"), "does not name a file");
        refused(Path::new("/dev/stdout"), "does not name a file");
        refused(Path::new("/proc/self/fd/1"), "does not name a file");
        refused(Path::new(".."), "does not name a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
        refused(&path, "write-protected");
        let fifo = folder.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        refused(&fifo, "not a regular file");
    }

    /// Takes three bytes at a time, after failing once with each of the errors.
    struct Difficult {
        errors: Vec<ErrorKind>,
        taken: Vec<u8>,
    }

    impl Write for Difficult {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if let Some(kind) = self.errors.pop() {
                return Err(kind.into());
            }
            let n = bytes.len().min(3);
            self.taken.extend(&bytes[..n]);
            Ok(n)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn print_with(errors: &[ErrorKind]) -> (Result<(), ErrorKind>, String, u32) {
        let mut out = Difficult { errors: errors.to_vec(), taken: Vec::new() };
        let waits = Cell::new(0);
        let result = print_to(&mut out, "0123456789", || waits.set(waits.get() + 1));
        (result.map_err(|err| err.kind()), String::from_utf8(out.taken).unwrap(), waits.get())
    }

    #[test]
    fn a_slow_stdout_gets_everything() {
        let (result, taken, waits) =
            print_with(&[ErrorKind::WouldBlock, ErrorKind::Interrupted, ErrorKind::WouldBlock]);
        assert_eq!((result, taken.as_str(), waits), (Ok(()), "0123456789", 2));
    }

    #[test]
    fn a_closed_stdout_is_quiet_and_a_full_one_is_an_error() {
        assert_eq!(print_with(&[ErrorKind::BrokenPipe]), (Ok(()), String::new(), 0));
        assert_eq!(print_with(&[ErrorKind::StorageFull]).0, Err(ErrorKind::StorageFull));
        let mut full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        assert!(print_to(&mut full, "x", || ()).is_err());
    }
}

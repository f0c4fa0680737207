//! Keeps compiled kernels on disk, so that only the first run of a machine compiles.
//!
//! Whatever is wrong with the cache is no reason to fail: it is then as if it were empty.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use super::hash;

/// First bytes of a file: changed with the format.
const MAGIC: &[u8; 16] = b"tb-mpi kernel 1\n";
/// Magic, length, hash.
const HEADER: usize = 16 + 8 + 16;
/// A compiled kernel takes some kilobytes.
const BYTES_MAX: u64 = 64 << 20;

pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// `$XDG_CACHE_HOME/tb-mpi` or `~/.cache/tb-mpi`, if the user can have a folder there.
    pub fn open() -> Option<Cache> {
        let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let base = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
        Cache::in_folder(base.join("tb-mpi"))
    }

    fn in_folder(folder: PathBuf) -> Option<Cache> {
        if let Err(err) = fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder) {
            tracing::debug!("no cache of kernels in {}: {err}", folder.display());
            return None;
        }
        let meta = fs::symlink_metadata(&folder).ok()?;
        if !meta.is_dir() || !private(&meta) {
            tracing::debug!("no cache of kernels in {}: others can write there", folder.display());
            return None;
        }
        Some(Cache { folder })
    }

    /// What was written under this key, if it is whole and the user's own.
    pub fn read(&self, key: u128) -> Option<Vec<u8>> {
        // What a link points to may be someone else's.
        let flags = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
        let mut file = OpenOptions::new().read(true).custom_flags(flags).open(self.path(key)).ok()?;
        let meta = file.metadata().ok()?;
        if !meta.is_file() || !private(&meta) || meta.len() > BYTES_MAX {
            return None;
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).ok()?;
        let (header, code) = bytes.split_at_checked(HEADER)?;
        (header == self::header(key, code)).then(|| code.to_vec())
    }

    /// Other ranks may write the same at the same time: each to a name of its own, then renamed.
    pub fn write(&self, key: u128, code: &[u8]) {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let part = self.folder.join(format!(".{key:032x}.{}.{number}", std::process::id()));
        let path = self.path(key);
        let written = create(&part)
            .and_then(|mut file| {
                file.write_all(&header(key, code))?;
                file.write_all(code)
            })
            .and_then(|()| fs::rename(&part, &path));
        if let Err(err) = written {
            tracing::debug!("cannot cache a kernel as {}: {err}", path.display());
            let _ = fs::remove_file(&part);
        }
    }

    fn path(&self, key: u128) -> PathBuf {
        self.folder.join(format!("{key:032x}"))
    }
}

fn create(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// The user's own, and nobody else can write it.
fn private(meta: &fs::Metadata) -> bool {
    meta.uid() == rustix::process::geteuid().as_raw() && meta.mode() & 0o022 == 0
}

/// The hash covers the key: a file under another's name is refused.
fn header(key: u128, code: &[u8]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..16].copy_from_slice(MAGIC);
    header[16..24].copy_from_slice(&(code.len() as u64).to_le_bytes());
    header[24..].copy_from_slice(&hash::of([&key.to_le_bytes()[..], code]).to_le_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn cache() -> (tempfile::TempDir, Cache) {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::in_folder(folder.path().join("a/tb-mpi")).unwrap();
        (folder, cache)
    }

    #[test]
    fn what_was_written_is_read_back_by_its_key_alone() {
        let (_folder, cache) = cache();
        assert_eq!(cache.read(7), None);
        cache.write(7, b"code");
        cache.write(8, b"");
        assert_eq!(cache.read(7).as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.read(8).as_deref(), Some(&b""[..]));
        assert_eq!(cache.read(9), None);
        cache.write(7, b"newer");
        assert_eq!(cache.read(7).as_deref(), Some(&b"newer"[..]));
        let files = fs::read_dir(&cache.folder).unwrap().map(|entry| entry.unwrap().metadata().unwrap());
        let modes: Vec<u32> = files.map(|meta| meta.mode() & 0o777).collect();
        assert_eq!(modes, [0o600, 0o600], "no part file is left, and the files are private");
    }

    #[test]
    fn a_file_that_is_damaged_or_cut_is_not_read() {
        let (_folder, cache) = cache();
        cache.write(7, b"some code");
        let whole = fs::read(cache.path(7)).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(cache.path(7), &damaged).unwrap();
            assert_eq!(cache.read(7), None, "byte {at}");
            fs::write(cache.path(7), &whole[..at]).unwrap();
            assert_eq!(cache.read(7), None, "cut at {at}");
        }
        fs::write(cache.path(7), &whole).unwrap();
        assert!(cache.read(7).is_some());
        fs::rename(cache.path(7), cache.path(8)).unwrap();
        assert_eq!(cache.read(8), None, "under another's name");
    }

    #[test]
    fn what_others_can_write_is_not_trusted() {
        let (folder, cache) = cache();
        cache.write(7, b"code");
        fs::set_permissions(cache.path(7), fs::Permissions::from_mode(0o620)).unwrap();
        assert_eq!(cache.read(7), None);
        fs::set_permissions(cache.path(7), fs::Permissions::from_mode(0o600)).unwrap();
        assert!(cache.read(7).is_some());
        fs::rename(cache.path(7), folder.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(folder.path().join("elsewhere"), cache.path(7)).unwrap();
        assert_eq!(cache.read(7), None, "a link");
        fs::set_permissions(&cache.folder, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Cache::in_folder(cache.folder.clone()).is_none());
    }

    #[test]
    fn without_a_folder_there_is_no_cache() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(Cache::in_folder(file.path().join("tb-mpi")).is_none());
    }
}

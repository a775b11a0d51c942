//! Files and folders that are not to stay. Their makers remove them, also on errors; but a program that ends
//! at once runs no destructors, so their names are kept here too, for [`remove_all`].

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

const SUFFIX: &str = ".partial";
/// A folder may get another file from a program that was started in it while it is being removed.
const ATTEMPTS: usize = 3;

static KNOWN: Mutex<BTreeMap<u64, PathBuf>> = Mutex::new(BTreeMap::new());
static NUMBER: AtomicU64 = AtomicU64::new(0);

fn registered_paths() -> MutexGuard<'static, BTreeMap<u64, PathBuf>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A name that [`remove_all`] would remove, until this is dropped.
#[derive(Debug)]
pub struct CleanupRegistration(u64);

impl Drop for CleanupRegistration {
    fn drop(&mut self) {
        registered_paths().remove(&self.0);
    }
}

/// Makes a file or folder and notes its name. Drop the thing itself (if that removes it) before its
/// registration.
pub fn create_registered<T>(make: impl FnOnce() -> Result<(T, PathBuf)>) -> Result<(T, CleanupRegistration)> {
    // Under the lock: there is nothing that `remove_all` does not know.
    let mut known = registered_paths();
    let (made, path) = make()?;
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    known.insert(number, path);
    Ok((made, CleanupRegistration(number)))
}

/// Removes everything that is registered, for a program that ends now: nothing can be created after that.
pub fn remove_all() {
    let known = registered_paths();
    for path in known.values() {
        let removed = |_: &usize| match path.is_dir() {
            true => std::fs::remove_dir_all(path).is_ok(),
            false => std::fs::remove_file(path).is_ok() || !path.exists(),
        };
        // Files that cannot be removed stay; no caller is left for the error.
        let _ = (0..ATTEMPTS).find(removed);
    }
    // Other threads wait until the program has ended.
    std::mem::forget(known);
}

/// A file on its way to the name `path`, in the same folder.
#[derive(Debug)]
pub struct TemporaryFile {
    pub file: File,
    pub temporary: PathBuf,
    pub registration: CleanupRegistration,
}

/// The permissions of a new file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// The permissions of the process's umask.
    Usual,
    /// Its owner alone, where the system knows owners.
    Owner,
}

/// Makes a temporary file in the folder of `path`, and removes those of programs that were killed while they
/// wrote the same one. A device or folder at `path` is an error: a file would take its place.
pub fn create_beside(path: &Path) -> Result<TemporaryFile> {
    create_beside_for(path, FileAccess::Usual)
}

/// The same with a file that others may not read.
pub fn create_beside_for(path: &Path, access: FileAccess) -> Result<TemporaryFile> {
    let refuse = |what| Err(Error::new(ErrorKind::InvalidInput, what));
    let Some(name) = path.file_name().map(|n| n.to_string_lossy().into_owned()) else {
        return refuse("the path has no file name");
    };
    if let Some(there) = std::fs::metadata(path).ok().filter(|there| !there.is_file()) {
        return refuse(if there.is_dir() { "it is a folder" } else { "it exists and is not a regular file" });
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    remove_leftovers(folder, |of| of == name);
    // Process and number keep two writers of one file apart.
    static FILE_NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = FILE_NUMBER.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_file_name(format!(".{name}.{}.{number}{SUFFIX}", std::process::id()));
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    if access == FileAccess::Owner {
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    }
    let (file, registration) =
        create_registered(|| Ok((options.open(&temporary)?, std::path::absolute(&temporary)?)))?;
    Ok(TemporaryFile { file, temporary, registration })
}

/// Removes temporary files that ended programs have left in a folder, of the names that `is_of` takes. Best
/// effort: files that cannot be identified or removed stay.
pub fn remove_leftovers(folder: &Path, is_of: impl Fn(&str) -> bool) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let found = entry.file_name();
        let Some(found) = found.to_str().and_then(|f| f.strip_prefix('.')?.strip_suffix(SUFFIX)) else {
            continue;
        };
        // Number, process, name.
        let mut parts = found.rsplitn(3, '.').skip(1);
        let (Some(pid), Some(name)) = (parts.next(), parts.next()) else { continue };
        let Some(pid) = pid.parse::<u32>().ok().filter(|_| is_of(name)) else { continue };
        let alive = !Path::new("/proc/self").exists() || Path::new(&format!("/proc/{pid}")).exists();
        if !alive {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let (_, registration) = create_registered(|| Ok((File::create(&path)?, path.clone()))).unwrap();
        assert!(registered_paths().values().any(|p| *p == path));
        drop(registration);
        assert!(!registered_paths().values().any(|p| *p == path));
        let failed = create_registered::<()>(|| Err(ErrorKind::StorageFull.into()));
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::StorageFull);
    }
}

//! Objects that earlier builds made, in a folder of bounded size.
//!
//! An entry's name is the hash of all that it depends on: the text that the back end was given, the machine,
//! the version of the back end. So entries never go stale, and are only removed for room. Nothing here can
//! fail a build: what cannot be read or is damaged is made anew, what cannot be written is not kept.

use crate::objects::ObjectKey;
use mlcc_files::unfinished;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use xxhash_rust::xxh3::xxh3_128;

/// Names the folder; empty: no cache.
pub const CACHE_VARIABLE: &str = "MLCC_CACHE_DIR";

/// Form of entries: this, the hash of key and object, the object.
const MAGIC: &[u8; 8] = b"mlccobj1";
const HEAD: usize = MAGIC.len() + 16;
const SUFFIX: &str = ".o";
const UNFINISHED: &str = ".unfinished";
/// Files that no program finishes any more.
const ABANDONED: Duration = Duration::from_secs(3600);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectCache {
    folder: PathBuf,
    /// Most bytes of all entries after a build.
    limit: u64,
}

/// Number and bytes of the entries of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ObjectCacheUsage {
    pub entries: usize,
    pub bytes: u64,
}

struct CachedObject {
    path: PathBuf,
    bytes: u64,
    /// The time of its last use.
    used: SystemTime,
}

impl ObjectCache {
    /// Room for some hundred models, or a level of each.
    pub const LIMIT: u64 = 256 << 20;

    pub fn new(folder: impl Into<PathBuf>, limit: u64) -> ObjectCache {
        ObjectCache { folder: folder.into(), limit }
    }

    /// `MLCC_CACHE_DIR`, else `mlcc/objects` in `XDG_CACHE_HOME` or `~/.cache`. `None` if the variable is
    /// empty, or there is no home.
    pub fn from_environment() -> Option<ObjectCache> {
        let folder = match std::env::var_os(CACHE_VARIABLE) {
            Some(name) if name.is_empty() => return None,
            Some(name) => PathBuf::from(name),
            None => {
                let named = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
                let caches = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")))?;
                caches.join("mlcc").join("objects")
            }
        };
        Some(ObjectCache::new(folder, ObjectCache::LIMIT))
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    fn path(&self, key: ObjectKey) -> PathBuf {
        self.folder.join(format!("{key}{SUFFIX}"))
    }

    pub(crate) fn get(&self, key: ObjectKey) -> Option<Vec<u8>> {
        let path = self.path(key);
        let entry = fs::read(&path).ok()?;
        match object_of(&entry, key) {
            Some(object) => {
                // Without this, an entry that is of use is removed as an old one is.
                let _ =
                    File::options().append(true).open(&path).and_then(|f| f.set_modified(SystemTime::now()));
                Some(object.to_vec())
            }
            None => {
                let _ = fs::remove_file(&path);
                None
            }
        }
    }

    pub(crate) fn store_object(&self, key: ObjectKey, object: &[u8]) {
        let _ = self.try_put(key, object);
    }

    /// Other builds see the whole entry or none.
    fn try_put(&self, key: ObjectKey, object: &[u8]) -> io::Result<()> {
        create_private(&self.folder)?;
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let temporary = self.folder.join(format!("{key}.{}.{number}{UNFINISHED}", std::process::id()));
        let (mut file, _registration) = unfinished::create_registered(|| {
            Ok((File::create(&temporary)?, std::path::absolute(&temporary)?))
        })?;
        let mut whole = || {
            file.write_all(MAGIC)?;
            file.write_all(&hash(key, object))?;
            file.write_all(object)?;
            fs::rename(&temporary, self.path(key))
        };
        whole().inspect_err(|_| drop(fs::remove_file(&temporary)))
    }

    /// Removes the entries that were of no use for the longest time until a quarter of the room is free, if
    /// there is none.
    pub(crate) fn evict_oldest(&self) {
        let Ok((mut entries, unfinished)) = self.list_entries() else { return };
        for file in unfinished {
            if SystemTime::now().duration_since(file.used).is_ok_and(|age| age > ABANDONED) {
                let _ = fs::remove_file(file.path);
            }
        }
        let mut bytes: u64 = entries.iter().map(|e| e.bytes).sum();
        if bytes <= self.limit {
            return;
        }
        entries.sort_by(|a, b| (a.used, &a.path).cmp(&(b.used, &b.path)));
        for entry in entries {
            if bytes <= self.limit / 4 * 3 {
                break;
            }
            if fs::remove_file(entry.path).is_ok() {
                bytes -= entry.bytes;
            }
        }
    }

    /// An error if there is a folder that cannot be read.
    pub fn measure_usage(&self) -> io::Result<ObjectCacheUsage> {
        let (entries, _) = self.list_entries()?;
        Ok(ObjectCacheUsage { entries: entries.len(), bytes: entries.iter().map(|e| e.bytes).sum() })
    }

    /// Removes all entries, and nothing else that may lie in the folder. Returns what was removed.
    pub fn clear(&self) -> io::Result<ObjectCacheUsage> {
        let (entries, unfinished) = self.list_entries()?;
        let mut removed = ObjectCacheUsage::default();
        for entry in entries {
            fs::remove_file(&entry.path)?;
            removed.entries += 1;
            removed.bytes += entry.bytes;
        }
        unfinished.iter().for_each(|file| drop(fs::remove_file(&file.path)));
        Ok(removed)
    }

    /// Entries, and files that are or were to become some.
    fn list_entries(&self) -> io::Result<(Vec<CachedObject>, Vec<CachedObject>)> {
        let (mut entries, mut unfinished) = (Vec::new(), Vec::new());
        let files = match fs::read_dir(&self.folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((entries, unfinished)),
            files => files?,
        };
        for file in files {
            let file = file?;
            let name = file.file_name();
            let Some((key, rest)) = name.to_str().and_then(|n| n.split_at_checked(ObjectKey::DIGITS)) else {
                continue;
            };
            let list = match rest {
                _ if !key.bytes().all(|b| b.is_ascii_hexdigit()) => continue,
                SUFFIX => &mut entries,
                rest if rest.ends_with(UNFINISHED) => &mut unfinished,
                _ => continue,
            };
            // Another build may have removed it.
            let Ok(metadata) = file.metadata() else { continue };
            let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            list.push(CachedObject { path: file.path(), bytes: metadata.len(), used });
        }
        Ok((entries, unfinished))
    }
}

fn hash(key: ObjectKey, object: &[u8]) -> [u8; 16] {
    xxh3_128(&[&key.bytes(), object].concat()).to_le_bytes()
}

/// The object of an entry; `None` if it is damaged.
fn object_of(entry: &[u8], key: ObjectKey) -> Option<&[u8]> {
    let (head, object) = entry.split_at_checked(HEAD)?;
    let written = head.strip_prefix(MAGIC)?;
    (written == hash(key, object)).then_some(object)
}

/// Entries become code of artifacts: only the owner may write there.
fn create_private(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> ObjectKey {
        ObjectKey::from_parts(&[name.as_bytes()])
    }

    #[test]
    fn what_was_put_is_there_until_it_is_cleared() {
        let folder = tempfile::tempdir().unwrap();
        let cache = ObjectCache::new(folder.path().join("a/b"), 1 << 20);
        assert_eq!(
            (cache.get(key("x")), cache.measure_usage().unwrap()),
            (None, ObjectCacheUsage::default())
        );
        cache.store_object(key("x"), b"object");
        cache.store_object(key("y"), b"");
        assert_eq!(cache.get(key("x")).unwrap(), b"object");
        assert_eq!(cache.get(key("y")).unwrap(), b"");
        fs::write(cache.folder().join("mine.o"), b"not ours").unwrap();
        let all = ObjectCacheUsage { entries: 2, bytes: 2 * HEAD as u64 + 6 };
        assert_eq!((cache.measure_usage().unwrap(), cache.clear().unwrap()), (all, all));
        assert_eq!(cache.get(key("x")), None);
        assert_eq!(fs::read_dir(cache.folder()).unwrap().count(), 1);
    }

    #[test]
    fn damaged_entries_are_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let cache = ObjectCache::new(folder.path(), 1 << 20);
        let path = cache.path(key("x"));
        let changes: [fn(&mut Vec<u8>); 5] =
            [|e| e[HEAD] ^= 1, |e| e.truncate(HEAD + 2), |e| e.truncate(3), |e| e.clear(), |e| e[0] = 0];
        for change in changes {
            cache.store_object(key("x"), b"object");
            let mut entry = fs::read(&path).unwrap();
            change(&mut entry);
            fs::write(&path, entry).unwrap();
            assert_eq!(cache.get(key("x")), None);
            assert!(!path.exists());
        }
        // An entry under another name.
        cache.store_object(key("x"), b"object");
        fs::rename(&path, cache.path(key("y"))).unwrap();
        assert_eq!(cache.get(key("y")), None);
    }

    #[test]
    fn the_oldest_go_first() {
        let folder = tempfile::tempdir().unwrap();
        let cache = ObjectCache::new(folder.path(), 10 * 1024);
        let names: Vec<String> = (0..12).map(|i| i.to_string()).collect();
        let long_ago = SystemTime::now() - Duration::from_secs(10_000);
        for (i, name) in names.iter().enumerate() {
            cache.store_object(key(name), &[0; 1000]);
            let file = File::options().append(true).open(cache.path(key(name))).unwrap();
            file.set_modified(long_ago + Duration::from_secs(i as u64)).unwrap();
        }
        assert!(cache.get(key("0")).is_some());
        cache.evict_oldest();
        assert!(cache.measure_usage().unwrap().bytes <= 10 * 1024 / 4 * 3);
        let left: Vec<&String> = names.iter().filter(|n| cache.path(key(n)).exists()).collect();
        assert_eq!(left, ["0", "6", "7", "8", "9", "10", "11"]);
    }

    #[test]
    fn a_folder_that_cannot_be_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        let cache = ObjectCache::new(file.join("cache"), 1 << 20);
        cache.store_object(key("x"), b"object");
        assert_eq!(cache.get(key("x")), None);
        cache.evict_oldest();
    }
}

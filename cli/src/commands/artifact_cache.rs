//! Artifacts that were built of checkpoints, and files that addresses named: folders of the cache.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use mlcc_codegen::cache::ObjectCache;
use mlcc_models::resolve::{FolderUsage, measure_folder};
use xxhash_rust::xxh3::xxh3_64;

use crate::commands::build::parse_bytes;
use crate::error::CliError;
use crate::ui::Ui;

/// The most bytes that artifacts in the cache may have together.
pub(crate) const LIMIT_VARIABLE: &str = "MLCC_CACHE_LIMIT";
const USUAL_LIMIT: u64 = 50_000_000_000;

const ARTIFACTS: &str = "artifacts";
const DOWNLOADS: &str = "downloads";
const LOCK: &str = "artifacts.lock";
const END: &str = ".so";
const UNFINISHED: &str = ".part";
/// Transfers that nobody goes on with any more.
const ABANDONED: Duration = Duration::from_secs(24 * 3600);
/// Digits of the hashes in a file's name: of the source, of the request, and of the content.
const DIGITS: [usize; 3] = [8, 8, 16];

/// The source of an artifact and the way in which it was built.
#[derive(Clone, Debug)]
pub(crate) struct ArtifactKey {
    /// The name of the checkpoint.
    pub stem: String,
    /// Where the checkpoint comes from.
    pub source: String,
    /// The flags of the build.
    pub request: String,
    /// The state of the checkpoint's files, and the compiler: with another one, the artifact is built again.
    pub content: String,
}

impl ArtifactKey {
    /// The start of the names of all artifacts of the source.
    fn source_prefix(&self) -> String {
        let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.' | '+');
        let stem: String = self.stem.chars().take(100).map(|c| if is_plain(c) { c } else { '_' }).collect();
        format!("{}-{:08x}-", stem.trim_start_matches('.'), xxh3_64(self.source.as_bytes()) as u32)
    }

    /// The start of the names of the artifacts that this one takes the place of.
    fn request_prefix(&self) -> String {
        format!("{}{:08x}-", self.source_prefix(), xxh3_64(self.request.as_bytes()) as u32)
    }
}

/// The cache of artifacts, beside that of compiled code.
#[derive(Clone, Debug)]
pub(crate) struct ArtifactCache {
    folder: PathBuf,
}

/// A file of the cache, or the folder of a download.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CacheEntry {
    pub name: String,
    pub path: PathBuf,
    pub usage: FolderUsage,
}

/// The files that were removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RemovedFiles {
    pub files: usize,
    pub bytes: u64,
}

impl RemovedFiles {
    pub(crate) fn add(&mut self, bytes: u64) {
        self.files += 1;
        self.bytes += bytes;
    }
}

impl ArtifactCache {
    /// `None` where there is no cache of compiled code either.
    pub(crate) fn from_environment() -> Option<ArtifactCache> {
        Some(ArtifactCache { folder: ObjectCache::from_environment()?.folder().to_path_buf() })
    }

    pub(crate) fn artifacts(&self) -> PathBuf {
        self.folder.join(ARTIFACTS)
    }

    pub(crate) fn path_of(&self, key: &ArtifactKey) -> PathBuf {
        let content = xxh3_64(key.content.as_bytes());
        self.artifacts().join(format!("{}{content:016x}{END}", key.request_prefix()))
    }

    /// The folder for the file of an address.
    pub(crate) fn download_folder(&self, address: &str) -> PathBuf {
        self.folder.join(DOWNLOADS).join(format!("{:016x}", xxh3_64(address.as_bytes())))
    }

    /// Waits until no other program builds into the cache. A file system without locks is used without them.
    pub(crate) fn lock(&self, ui: &Ui) -> Result<Option<File>, CliError> {
        let (artifacts, path) = (self.artifacts(), self.folder.join(LOCK));
        create_private(&artifacts).map_err(CliError::io("create", &artifacts))?;
        let file = File::options().append(true).create(true).open(&path);
        let file = file.map_err(CliError::io("open", &path))?;
        if let Err(fs::TryLockError::WouldBlock) = file.try_lock() {
            ui.note("another mlcc builds a model; waiting for it");
        }
        match file.lock() {
            Ok(()) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(None),
            Err(error) => Err(CliError::io("lock", &path)(error)),
        }
    }

    /// The artifacts, those that were used last first.
    pub(crate) fn list_artifacts(&self) -> io::Result<Vec<CacheEntry>> {
        let mut found = Vec::new();
        for entry in entries_of(&self.artifacts())? {
            let (metadata, path) = (entry.metadata(), entry.path());
            let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(END));
            let Some(name) = name.and_then(artifact_name) else { continue };
            // Another program may have removed it; a link leads elsewhere.
            let Some(metadata) = metadata.ok().filter(fs::Metadata::is_file) else { continue };
            let last_use = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let usage = FolderUsage { bytes: metadata.len(), last_use };
            found.push(CacheEntry { name: name.to_owned(), path, usage });
        }
        found.sort_by(|a, b| (b.usage.last_use, &a.path).cmp(&(a.usage.last_use, &b.path)));
        Ok(found)
    }

    /// The files that addresses named, unfinished ones included.
    pub(crate) fn list_downloads(&self) -> io::Result<Vec<CacheEntry>> {
        let mut found = Vec::new();
        for entry in entries_of(&self.folder.join(DOWNLOADS))? {
            if !entry.file_type()?.is_dir() {
                continue;
            }
            let path = entry.path();
            let names =
                entries_of(&path)?.into_iter().map(|file| file.file_name().to_string_lossy().into_owned());
            let name = names.min_by_key(|name| (name.ends_with(UNFINISHED), name.clone()));
            let usage = measure_folder(&path)?;
            found.push(CacheEntry { name: name.unwrap_or_default(), path, usage });
        }
        found.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
        Ok(found)
    }

    /// The artifacts that were built of a source, with whatever flags and by whatever compiler.
    pub(crate) fn artifacts_of(&self, key: &ArtifactKey) -> io::Result<Vec<CacheEntry>> {
        let prefix = key.source_prefix();
        let is_of = |entry: &CacheEntry| file_name(&entry.path).starts_with(&prefix);
        Ok(self.list_artifacts()?.into_iter().filter(is_of).collect())
    }

    /// Removes what was made of the same checkpoint by the same request, before its files or the compiler
    /// changed.
    pub(crate) fn remove_outdated(&self, key: &ArtifactKey) {
        let (prefix, kept) = (key.request_prefix(), self.path_of(key));
        let old = self.list_artifacts().unwrap_or_default().into_iter();
        let old = old.filter(|entry| entry.path != kept && file_name(&entry.path).starts_with(&prefix));
        // One that cannot be removed only takes room.
        old.for_each(|entry| drop(fs::remove_file(entry.path)));
    }

    /// Removes the artifacts that were not used for the longest time until the others have at most `limit`
    /// bytes; `kept` stays.
    pub(crate) fn remove_oldest(&self, limit: u64, kept: Option<&Path>) -> io::Result<RemovedFiles> {
        let (mut left, mut removed) = (0_u64, RemovedFiles::default());
        for entry in self.list_artifacts()? {
            left = left.saturating_add(entry.usage.bytes);
            if left > limit && kept != Some(&entry.path) {
                fs::remove_file(&entry.path)?;
                left -= entry.usage.bytes;
                removed.add(entry.usage.bytes);
            }
        }
        Ok(removed)
    }

    /// Removes what downloads have left that nobody goes on with.
    pub(crate) fn remove_abandoned(&self) -> io::Result<RemovedFiles> {
        let mut removed = RemovedFiles::default();
        for entry in self.list_downloads()? {
            let age = SystemTime::now().duration_since(entry.usage.last_use);
            if (entry.name.is_empty() || entry.name.ends_with(UNFINISHED))
                && age.is_ok_and(|age| age > ABANDONED)
            {
                fs::remove_dir_all(&entry.path)?;
                removed.add(entry.usage.bytes);
            }
        }
        Ok(removed)
    }
}

/// The limit of the environment, else the usual one.
pub(crate) fn cache_limit() -> Result<u64, CliError> {
    match std::env::var(LIMIT_VARIABLE) {
        Ok(text) if !text.trim().is_empty() => {
            parse_bytes(text.trim()).map_err(|why| CliError::usage(format!("{LIMIT_VARIABLE}: {why}")))
        }
        _ => Ok(USUAL_LIMIT),
    }
}

/// Says that an artifact is of use.
pub(crate) fn touch(path: &Path) {
    // Without it the artifact only counts as older than it is.
    let _ = File::open(path).and_then(|file| file.set_modified(SystemTime::now()));
}

/// The name of the checkpoint in that of an artifact; `None` if the file is none of the cache's.
fn artifact_name(stem: &str) -> Option<&str> {
    let mut parts = stem.rsplitn(DIGITS.len() + 1, '-');
    let is_hash =
        |part: &str, digits: usize| part.len() == digits && part.bytes().all(|b| b.is_ascii_hexdigit());
    let hashes = DIGITS.iter().rev().all(|&digits| parts.next().is_some_and(|part| is_hash(part, digits)));
    if hashes {
        return parts.next();
    }
    // Those of earlier versions, which this one does not take.
    let mut parts = stem.rsplitn(3, '-');
    let hashes = (0..2).all(|_| parts.next().is_some_and(|part| is_hash(part, 16)));
    parts.next().filter(|_| hashes)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The entries of a folder; none if it is not there.
fn entries_of(folder: &Path) -> io::Result<Vec<fs::DirEntry>> {
    match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        entries => entries?.collect(),
    }
}

/// Artifacts are code: only the owner may write there.
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

    fn key(stem: &str, quant: &str, content: &str) -> ArtifactKey {
        let [stem, source, request, content] = [stem, "source", quant, content].map(str::to_owned);
        ArtifactKey { stem, source, request, content }
    }

    #[test]
    fn artifacts_are_found_by_source_and_the_oldest_go_first() {
        let folder = tempfile::tempdir().unwrap();
        let cache = ArtifactCache { folder: folder.path().join("cache") };
        assert_eq!(cache.list_artifacts().unwrap(), []);
        fs::create_dir_all(cache.artifacts()).unwrap();
        let keys = [key("a-b", "q4", "1"), key("a-b", "q8", "1"), key("c/../d", "q4", "1")];
        for (age, key) in keys.iter().enumerate() {
            fs::write(cache.path_of(key), [0; 100]).unwrap();
            let used = SystemTime::now() - Duration::from_secs(1000 * (age as u64 + 1));
            File::open(cache.path_of(key)).unwrap().set_modified(used).unwrap();
        }
        fs::write(cache.artifacts().join("mine.so"), b"").unwrap();
        let names: Vec<String> =
            cache.list_artifacts().unwrap().into_iter().map(|entry| entry.name).collect();
        assert_eq!(names, ["a-b", "a-b", "c_.._d"]);
        assert_eq!(cache.artifacts_of(&keys[0]).unwrap().len(), 2);
        // Another compiler.
        fs::write(cache.path_of(&key("a-b", "q4", "2")), [0; 100]).unwrap();
        cache.remove_outdated(&key("a-b", "q4", "2"));
        assert!(!cache.path_of(&keys[0]).exists() && cache.path_of(&keys[1]).exists());
        let oldest = cache.path_of(&keys[2]);
        assert_eq!(cache.remove_oldest(200, Some(&oldest)).unwrap(), RemovedFiles::default());
        assert_eq!(cache.remove_oldest(200, None).unwrap(), RemovedFiles { files: 1, bytes: 100 });
        assert!(!oldest.exists());
        assert_eq!(cache.remove_oldest(0, None).unwrap().files, 2);
        assert!(cache.artifacts().join("mine.so").exists());
    }

    #[test]
    fn names_of_artifacts_end_with_hashes() {
        assert_eq!(artifact_name("a-b-00000001-00000002-0000000000000003"), Some("a-b"));
        assert_eq!(artifact_name("a-0000000000000001-0000000000000002"), Some("a"));
        for other in ["a", "a-1-2-3", "00000001-00000002-0000000000000003", "a-0000000000000003"] {
            assert_eq!(artifact_name(other), None, "{other}");
        }
    }
}

//! What the cache of the Hugging Face tools holds, and how a repository leaves it.

use super::hub_cache::{HubCache, RepoName};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const PREFIX: &str = "models--";
/// Folders inside each other in a cache: a repository, snapshots, a commit, folders of its files.
const DEEPEST: usize = 8;

/// A repository in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedRepository {
    pub repo: RepoName,
    pub folder: PathBuf,
    pub usage: FolderUsage,
    /// Whether a download has ended: a revision is known.
    pub is_complete: bool,
}

/// Bytes and times of the files below a folder; links are not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FolderUsage {
    pub bytes: u64,
    /// The latest time at which one of the files was read or written.
    pub last_use: SystemTime,
}

impl HubCache {
    /// The repositories of models in the cache, by name. A cache that does not exist has none.
    pub fn repositories(&self) -> io::Result<Vec<CachedRepository>> {
        let entries = match fs::read_dir(&self.directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split_once("--"));
            let Some(repo) = name.and_then(|(org, repo)| RepoName::parse(&format!("{org}/{repo}"))) else {
                continue;
            };
            if !entry.file_type()?.is_dir() {
                continue;
            }
            let (folder, usage) = (entry.path(), measure_folder(&entry.path())?);
            let is_complete = fs::read_dir(folder.join("refs")).is_ok_and(|mut refs| refs.next().is_some());
            found.push(CachedRepository { repo, folder, usage, is_complete });
        }
        found.sort_by_key(|repository| repository.repo.full_name());
        Ok(found)
    }

    /// Removes a repository, all its revisions, and gives the bytes that it had; `None` if it is not there. A link in place
    /// of its folder is removed, and what it leads to stays.
    pub fn remove_repository(&self, repo: &RepoName) -> io::Result<Option<u64>> {
        let folder = self.repo_folder(repo);
        let metadata = match fs::symlink_metadata(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata?,
        };
        if !metadata.is_dir() {
            fs::remove_file(&folder)?;
            return Ok(Some(0));
        }
        let usage = measure_folder(&folder)?;
        // Revisions first: what is left of an interrupted removal is not taken for a whole checkpoint.
        for part in ["refs", "snapshots"] {
            remove_if_there(&folder.join(part))?;
        }
        fs::remove_dir_all(&folder)?;
        Ok(Some(usage.bytes))
    }
}

fn remove_if_there(folder: &Path) -> io::Result<()> {
    match fs::symlink_metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(folder),
        Ok(_) => fs::remove_file(folder),
    }
}

/// Adds up the files below a folder.
pub fn measure_folder(folder: &Path) -> io::Result<FolderUsage> {
    let mut usage = FolderUsage { bytes: 0, last_use: SystemTime::UNIX_EPOCH };
    let mut waiting = vec![(folder.to_path_buf(), 0)];
    while let Some((folder, depth)) = waiting.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            // Another program may have removed it.
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_dir() && depth < DEEPEST {
                waiting.push((entry.path(), depth + 1));
            } else if metadata.is_file() {
                usage.bytes += metadata.len();
                let times = [metadata.accessed(), metadata.modified()].into_iter().flatten();
                usage.last_use = times.fold(usage.last_use, SystemTime::max);
            }
        }
    }
    Ok(usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_are_listed_and_removed_and_nothing_else() {
        let home = tempfile::tempdir().unwrap();
        let cache = HubCache { directory: home.path().join("hub") };
        assert_eq!(cache.repositories().unwrap(), []);
        let outside = home.path().join("outside");
        fs::create_dir_all(&outside).unwrap();
        fs::write(outside.join("mine"), b"mine").unwrap();
        let folder = cache.directory.join("models--org--tiny");
        for part in ["refs", "blobs", "snapshots/abc"] {
            fs::create_dir_all(folder.join(part)).unwrap();
        }
        fs::write(folder.join("blobs/b"), [0; 100]).unwrap();
        fs::write(folder.join("refs/main"), b"abc").unwrap();
        fs::create_dir_all(cache.directory.join("datasets--a--b")).unwrap();
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("../../blobs/b", folder.join("snapshots/abc/model.safetensors"))
                .unwrap();
            std::os::unix::fs::symlink(&outside, folder.join("snapshots/link")).unwrap();
            std::os::unix::fs::symlink(&outside, cache.directory.join("models--org--link")).unwrap();
        }
        let found = cache.repositories().unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].repo.full_name().as_str(), found[0].usage.bytes), ("org/tiny", 103));
        let repo = |name: &str| RepoName::parse(name).unwrap();
        assert_eq!(cache.remove_repository(&repo("org/other")).unwrap(), None);
        assert_eq!(cache.remove_repository(&repo("org/tiny")).unwrap(), Some(103));
        #[cfg(unix)]
        assert_eq!(cache.remove_repository(&repo("org/link")).unwrap(), Some(0));
        assert_eq!(cache.repositories().unwrap(), []);
        assert_eq!(fs::read(outside.join("mine")).unwrap(), b"mine");
        assert!(cache.directory.join("datasets--a--b").is_dir());
    }
}

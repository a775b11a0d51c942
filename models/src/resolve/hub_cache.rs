//! The cache of the Hugging Face tools: `models--org--repo/refs/<revision>` names a commit, `snapshots/<commit>` has its files.

use crate::error::ResolveError;
use std::path::{Path, PathBuf};

/// Where the cache is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubCache {
    pub directory: PathBuf,
}

/// `org/repo`, with the revision to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoName {
    pub org: String,
    pub repo: String,
    /// Branch, tag or commit; `main` unless given as `org/repo@revision`.
    pub revision: String,
}

impl RepoName {
    /// `None` if it is not of the form `org/repo` or `org/repo@revision`.
    pub fn parse(text: &str) -> Option<RepoName> {
        let (name, revision) = text.split_once('@').unwrap_or((text, "main"));
        let (org, repo) = name.split_once('/')?;
        // Also keeps paths such as `../x` and `a/b/c` out.
        let is_name = |part: &str| {
            let is_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            !part.is_empty() && !part.starts_with('.') && part.chars().all(is_char)
        };
        let valid = is_name(org) && is_name(repo) && is_name(revision);
        valid.then(|| RepoName { org: org.into(), repo: repo.into(), revision: revision.into() })
    }

    pub fn full_name(&self) -> String {
        format!("{}/{}", self.org, self.repo)
    }
    /// `org/repo`, with the revision unless it is `main`.
    pub fn full_name_at(&self) -> String {
        match self.revision.as_str() {
            "main" => self.full_name(),
            revision => format!("{}@{revision}", self.full_name()),
        }
    }
    pub fn short_name(&self) -> &str {
        &self.repo
    }
}

/// A commit of a repository in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubSnapshot {
    pub directory: PathBuf,
    pub commit: String,
}

impl HubCache {
    pub fn from_environment() -> HubCache {
        HubCache::from_variables(|name| std::env::var(name).ok())
    }

    /// The rules of huggingface_hub: HF_HUB_CACHE, HF_HOME/hub, XDG_CACHE_HOME/huggingface/hub, ~/.cache/huggingface/hub.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> HubCache {
        let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let directory = path("HF_HUB_CACHE")
            .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| path("HF_HOME").map(|home| home.join("hub")))
            .or_else(|| path("XDG_CACHE_HOME").map(|cache| cache.join("huggingface/hub")))
            .unwrap_or_else(|| path("HOME").unwrap_or_default().join(".cache/huggingface/hub"));
        HubCache { directory }
    }

    /// The snapshot directory of a repository; `None` if it was never downloaded.
    pub fn find_snapshot(&self, repo: &RepoName) -> Result<Option<HubSnapshot>, ResolveError> {
        let root = self.repo_folder(repo);
        if !root.is_dir() {
            return Ok(None);
        }
        let broken = |path: &Path, detail: String| ResolveError::BrokenCache {
            repo: repo.full_name(),
            path: path.to_path_buf(),
            detail,
        };
        let reference = root.join("refs").join(&repo.revision);
        let commit = match mlcc_files::read_to_string(&reference, mlcc_files::FileKind::Branch) {
            Ok(text) => text.trim().to_string(),
            // A commit may be given in place of a branch.
            Err(_) => repo.revision.clone(),
        };
        // The commit comes from a file: it must not lead out of the cache.
        if commit.is_empty() || !commit.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
            return Err(broken(&reference, "its reference does not name a commit".to_string()));
        }
        let directory = root.join("snapshots").join(&commit);
        match directory.is_dir() {
            true => Ok(Some(HubSnapshot { directory, commit })),
            // A download that has not ended; its files are known by their commit only.
            false if !reference.exists() => Ok(None),
            false => Err(broken(&directory, format!("revision {} has no snapshot", repo.revision))),
        }
    }

    pub(super) fn repo_folder(&self, repo: &RepoName) -> PathBuf {
        self.directory.join(format!("models--{}--{}", repo.org, repo.repo))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repository_names() {
        let parsed = RepoName::parse("RWKV/rwkv-4-1b5-pile").unwrap();
        assert_eq!((parsed.full_name().as_str(), parsed.revision.as_str()), ("RWKV/rwkv-4-1b5-pile", "main"));
        assert_eq!(RepoName::parse("a/b@v1.0").unwrap().revision, "v1.0");
        for bad in ["a", "a/b/c", "../b", "a/..", "/b", "a/", "a/b@", "a b/c", "a/b@../x"] {
            assert_eq!(RepoName::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_environment_decides_where_the_cache_is() {
        let cache = |variables: &[(&str, &str)]| {
            let find =
                |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
            HubCache::from_variables(find).directory
        };
        assert_eq!(cache(&[("HOME", "/h")]), Path::new("/h/.cache/huggingface/hub"));
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), Path::new("/x/huggingface/hub"));
        assert_eq!(cache(&[("HF_HOME", "/f"), ("XDG_CACHE_HOME", "/x")]), Path::new("/f/hub"));
        assert_eq!(cache(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]), Path::new("/c"));
        assert_eq!(cache(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "")]), Path::new("/f/hub"));
    }
}

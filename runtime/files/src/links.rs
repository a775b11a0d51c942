//! Files that are links to nothing, as a cache that was cleaned leaves them: such a file was meant to be
//! there, so it counts neither as one that is nor as one that never was.

use std::path::{Path, PathBuf};

/// A link whose target is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DanglingLink {
    pub path: PathBuf,
    pub target: PathBuf,
}

impl std::fmt::Display for DanglingLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (path, target) = (self.path.display(), self.target.display());
        write!(
            f,
            "{path} is a link to {target}, which does not exist; fetch the file again, or remove the link"
        )
    }
}

impl std::error::Error for DanglingLink {}

/// True if a file is there. A link to nothing is an error.
pub fn is_file(path: &Path) -> Result<bool, DanglingLink> {
    Ok(exists(path)? && path.is_file())
}

/// True if anything is there, even if it is no file: reading it then says what it is. A link to nothing is an
/// error.
pub fn exists(path: &Path) -> Result<bool, DanglingLink> {
    match std::fs::read_link(path) {
        Ok(target) if std::fs::metadata(path).is_err() => Err(DanglingLink { path: path.to_owned(), target }),
        _ => Ok(path.exists()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_nothing_are_neither_there_nor_absent() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("file"), "x").unwrap();
        std::os::unix::fs::symlink("file", path("good")).unwrap();
        std::os::unix::fs::symlink("gone", path("bad")).unwrap();
        std::os::unix::fs::symlink("ring", path("ring")).unwrap();
        assert_eq!(
            ["file", "good", "none"].map(|name| is_file(&path(name))),
            [Ok(true), Ok(true), Ok(false)]
        );
        assert_eq!((is_file(folder.path()), exists(folder.path())), (Ok(false), Ok(true)));
        assert_eq!(exists(&path("none")), Ok(false));
        let error = is_file(&path("bad")).unwrap_err().to_string();
        assert!(error.contains("bad is a link to gone") && error.contains("remove the link"), "{error}");
        assert!(is_file(&path("ring")).is_err() && exists(&path("bad")).is_err());
    }
}

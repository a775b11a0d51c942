//! Errors while an artifact is written.

use std::io;
use std::path::{Path, PathBuf};

use mlcc_abi::elf::ElfError;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum ArtifactError {
    #[error(
        "no space left on the file system of {path} after {written} bytes: free some space or choose another output \
         folder with -o"
    )]
    NoSpace { path: PathBuf, written: u64 },
    #[error(
        "{path} would be larger than the system permits ({written} bytes were written): raise the limit (ulimit -f), or choose another file \
         system with -o"
    )]
    TooLarge { path: PathBuf, written: u64 },
    #[error("cannot write {path}: permission denied or read-only folder; choose another output with -o")]
    NotWritable { path: PathBuf },
    #[error("cannot write {path}: its folder does not exist; create it or choose another output with -o")]
    NoFolder { path: PathBuf },
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{path}, the linker's output, is no usable shared object: {source}")]
    Linked { path: PathBuf, source: ElfError },
    #[error("{path}, the linker's output, must import nothing, but it needs {}", names.join(", "))]
    Imports { path: PathBuf, names: Vec<String> },
    #[error("internal error of the artifact writer: {0}")]
    Misuse(String),
}

impl ArtifactError {
    /// Names what the user can do about an I/O error, where that is known.
    pub(super) fn from_io(action: &'static str, path: &Path, written: u64, source: io::Error) -> Self {
        let path = path.to_path_buf();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::NoSpace { path, written },
            io::ErrorKind::FileTooLarge => Self::TooLarge { path, written },
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem if action == "create" => {
                Self::NotWritable { path }
            }
            io::ErrorKind::NotFound if action == "create" => Self::NoFolder { path },
            _ => Self::Io { action, path, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_named() {
        let full = ArtifactError::from_io("write", "m.so".as_ref(), 12, io::ErrorKind::StorageFull.into());
        assert!(full.to_string().contains("no space left on the file system of m.so after 12 bytes"));
        let quota = ArtifactError::from_io("write", "m.so".as_ref(), 0, io::ErrorKind::QuotaExceeded.into());
        assert!(matches!(quota, ArtifactError::NoSpace { .. }));
    }
}

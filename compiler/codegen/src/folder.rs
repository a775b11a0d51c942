//! Temporary folders, also for a program that ends before they are dropped.

use std::io::Result;
use std::path::Path;

use mlcc_files::unfinished::{self, CleanupRegistration};
use tempfile::TempDir;

/// A folder that goes away with this value.
#[derive(Debug)]
pub struct TemporaryFolder {
    folder: TempDir,
    /// The registration, dropped after the folder, which removes itself.
    _registration: CleanupRegistration,
}

impl TemporaryFolder {
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// A new folder among the system's temporary ones.
pub fn create_temporary(prefix: &str) -> Result<TemporaryFolder> {
    let make = || {
        let folder = tempfile::Builder::new().prefix(prefix).tempdir()?;
        let path = folder.path().to_path_buf();
        Ok((folder, path))
    };
    let (folder, _registration) = unfinished::create_registered(make)?;
    Ok(TemporaryFolder { folder, _registration })
}

//! A file that appears under its final name only when it is complete.

use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use mlcc_files::unfinished::{self, CleanupRegistration};

use super::ArtifactError;

/// Large enough that the writes of one tensor row do not become one system call each.
const BUFFER: usize = 1 << 20;

/// A temporary file beside `path`; `commit` renames it, a drop removes it.
pub(super) struct PendingFile {
    path: PathBuf,
    temporary: PathBuf,
    /// `None` after `commit`.
    out: Option<BufWriter<File>>,
    at: u64,
    /// Dropped last: for a program that ends before.
    _registration: CleanupRegistration,
}

impl PendingFile {
    pub fn create(path: &Path) -> Result<Self, ArtifactError> {
        let beside =
            unfinished::create_beside(path).map_err(|e| ArtifactError::from_io("create", path, 0, e))?;
        let out = Some(BufWriter::with_capacity(BUFFER, beside.file));
        let (temporary, registration) = (beside.temporary, beside.registration);
        Ok(Self { path: path.to_path_buf(), temporary, out, at: 0, _registration: registration })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the bytes until `commit`.
    pub fn temporary_path(&self) -> &Path {
        &self.temporary
    }

    pub fn position(&self) -> u64 {
        self.at
    }

    fn run(
        &mut self,
        action: &'static str,
        f: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
    ) -> Result<(), ArtifactError> {
        let Some(out) = &mut self.out else { return Err(ArtifactError::Misuse("write after commit".into())) };
        f(out).map_err(|e| ArtifactError::from_io(action, &self.path, self.at, e))
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ArtifactError> {
        self.run("write", |out| out.write_all(bytes))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Zeros up to a multiple of `align`.
    pub fn align(&mut self, align: u64) -> Result<(), ArtifactError> {
        const ZEROS: [u8; 4096] = [0; 4096];
        while !self.at.is_multiple_of(align) {
            let missing = (self.at.next_multiple_of(align) - self.at).min(ZEROS.len() as u64);
            self.write(&ZEROS[..missing as usize])?;
        }
        Ok(())
    }

    /// Overwrites bytes that were written before; the end of the file stays the place of the next write.
    pub fn patch(&mut self, at: u64, bytes: &[u8]) -> Result<(), ArtifactError> {
        let end = self.at;
        self.run("write", |out| {
            out.seek(SeekFrom::Start(at))?;
            out.write_all(bytes)?;
            out.seek(SeekFrom::Start(end)).map(|_| ())
        })
    }

    /// Everything written so far can be read from the file.
    pub fn flush(&mut self) -> Result<(), ArtifactError> {
        self.run("write", |out| out.flush())
    }

    /// Forgets what was written after `end`.
    pub fn truncate(&mut self, end: u64) -> Result<(), ArtifactError> {
        self.run("write", |out| {
            out.flush()?;
            out.get_ref().set_len(end)?;
            out.seek(SeekFrom::Start(end)).map(|_| ())
        })?;
        self.at = end;
        Ok(())
    }

    /// Flushes to disk. Late errors (a full disk found at write-back) come here.
    pub fn sync(&mut self) -> Result<(), ArtifactError> {
        self.run("write", |out| {
            out.flush()?;
            out.get_ref().sync_all()
        })
    }

    /// Makes the file visible under its final name.
    pub fn commit(mut self) -> Result<(), ArtifactError> {
        self.sync()?;
        std::fs::rename(&self.temporary, &self.path)
            .map_err(|e| ArtifactError::from_io("create", &self.path, self.at, e))?;
        // Dropped without its own flush: everything is on disk, and `Drop` must not remove a committed file.
        self.out = None;
        Ok(())
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if let Some(out) = self.out.take() {
            // Throws the buffer away instead of flushing it to a file that goes away.
            drop(out.into_parts());
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

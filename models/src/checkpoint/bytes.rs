//! The bytes of one weight file: mapped, or owned where they come from memory (tests, fuzzing).

use crate::error::CheckpointError;
use memmap2::{Mmap, UncheckedAdvice};
use std::fs::File;
use std::path::Path;

#[derive(Debug)]
pub struct FileBytes {
    /// The path, for messages.
    pub label: String,
    content: FileContent,
}

#[derive(Debug)]
enum FileContent {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl FileBytes {
    pub fn owned(label: &str, bytes: Vec<u8>) -> FileBytes {
        FileBytes { label: label.to_string(), content: FileContent::Owned(bytes) }
    }

    pub fn map(path: &Path) -> Result<FileBytes, CheckpointError> {
        let label = path.display().to_string();
        let fail = |action, source| CheckpointError::Io { file: label.clone(), action, source };
        // Opening a pipe would wait for its other end.
        let metadata = std::fs::metadata(path).map_err(|e| fail("open", e))?;
        if !metadata.is_file() {
            let detail = "is not a regular file".to_string();
            return Err(CheckpointError::Unsupported { file: label, detail });
        }
        if metadata.len() == 0 {
            return Err(CheckpointError::Damaged { file: label, detail: "is empty".to_string() });
        }
        let file = File::open(path).map_err(|e| fail("open", e))?;
        // SAFETY: the mapping is read-only and private to this struct. Rust's aliasing rules would be broken if another
        // process changed the file while it is mapped; weight files are not written in place by anything that fetches
        // them, and shrinking one ends this process with SIGBUS rather than with wrong memory.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| fail("map", e))?;
        Ok(FileBytes { label, content: FileContent::Mapped(map) })
    }

    pub fn as_bytes(&self) -> &[u8] {
        match &self.content {
            FileContent::Mapped(map) => map,
            FileContent::Owned(bytes) => bytes,
        }
    }

    /// `length` bytes from `start`; the readers have checked the range when they listed the tensor.
    pub(crate) fn slice(&self, start: usize, length: usize) -> &[u8] {
        &self.as_bytes()[start..start + length]
    }

    /// Tells the system that the pages of this range are not needed now, so that a build that streams a large file does
    /// not count the whole of it as its own memory.
    pub(crate) fn release_pages(&self, start: usize, length: usize) {
        let FileContent::Mapped(map) = &self.content else { return };
        // SAFETY: on a read-only mapping of a file MADV_DONTNEED loses nothing: the next access reads the page again.
        let advised = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, length) };
        // Advice only: a system that refuses it keeps the pages a little longer.
        drop(advised);
    }
}

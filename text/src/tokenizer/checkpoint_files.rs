//! The trait through which this crate reads files: it opens none itself.

use std::path::{Path, PathBuf};

use super::TokenizerError;

/// The files of a checkpoint, wherever they are.
pub trait CheckpointFiles {
    /// True if this is a file. A link to nothing is an error.
    fn is_file(&self, path: &Path) -> Result<bool, TokenizerError>;

    /// The entries of a folder, in any order; none where there is no such folder.
    fn list_folder(&self, folder: &Path) -> Vec<PathBuf>;

    /// The content of a tokenizer file.
    fn read_tokenizer(&self, path: &Path) -> Result<Vec<u8>, TokenizerError>;

    /// The content of one of the small files in the same folder.
    fn read_config(&self, path: &Path) -> Result<String, TokenizerError>;
}

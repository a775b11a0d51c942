//! Shared parts of several tests: this machine, and the folders of reference files.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mlcc_text::chat::{StackError, TemplateHost};
use mlcc_text::tokenizer::{CheckpointFiles, TokenizerError};

pub use crate::vocabularies::{sentencepiece, sentencepiece_json, world, world_vocabulary};

/// Threads and files, as `mlcc-engine` has them for users.
pub struct Machine;

impl TemplateHost for Machine {
    fn run_on_stack(&self, bytes: usize, task: &mut (dyn FnMut() + Send)) -> Result<(), StackError> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(bytes).spawn_scoped(scope, task);
            thread.map_err(StackError::NoStack)?.join().map_err(|_| StackError::Panicked)
        })
    }

    fn processor_time(&self) -> Duration {
        static BEGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        BEGIN.get_or_init(Instant::now).elapsed()
    }

    fn local_time(&self) -> u64 {
        0
    }
}

impl CheckpointFiles for Machine {
    fn is_file(&self, path: &Path) -> Result<bool, TokenizerError> {
        Ok(path.is_file())
    }

    fn list_folder(&self, folder: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    fn read_tokenizer(&self, path: &Path) -> Result<Vec<u8>, TokenizerError> {
        let error = |source| TokenizerError::Io { path: path.display().to_string(), source };
        std::fs::read(path).map_err(error)
    }

    fn read_config(&self, path: &Path) -> Result<String, TokenizerError> {
        Ok(std::fs::read_to_string(path).unwrap())
    }
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The small trained model that is part of the project.
pub fn tiny_books() -> PathBuf {
    workspace().join("assets/rwkv4-tiny-books")
}

/// A path in the folder of reference files that are not part of the project; `None`, with a printed reason,
/// where it is absent.
pub fn shared(path: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("MLCC_SHARED").map_or_else(|| workspace().join("../shared"), PathBuf::from);
    let path = folder.join(path);
    if path.exists() {
        Some(path)
    } else {
        eprintln!("skipped: {} is absent (set MLCC_SHARED to the folder of reference files)", path.display());
        None
    }
}

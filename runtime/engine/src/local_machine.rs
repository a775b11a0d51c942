//! This machine for [`mlcc_text`]: threads with stacks, clocks, files.

mod local_time;
mod processor_time;

use std::path::{Path, PathBuf};
use std::time::Duration;

use mlcc_files::FileKind;
use mlcc_text::chat::{StackError, TemplateHost};
use mlcc_text::tokenizer::{CheckpointFiles, TokenizerError};

/// This machine. A task with a stack of its own has a thread of its own.
#[derive(Debug, Clone, Copy)]
pub struct LocalMachine;

impl TemplateHost for LocalMachine {
    fn run_on_stack(&self, bytes: usize, task: &mut (dyn FnMut() + Send)) -> Result<(), StackError> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(bytes).spawn_scoped(scope, task);
            thread.map_err(StackError::NoStack)?.join().map_err(|_| StackError::Panicked)
        })
    }

    fn processor_time(&self) -> Duration {
        processor_time::now()
    }

    fn local_time(&self) -> u64 {
        local_time::now()
    }
}

impl CheckpointFiles for LocalMachine {
    fn is_file(&self, path: &Path) -> Result<bool, TokenizerError> {
        mlcc_files::is_file(path).map_err(|link| TokenizerError::Unreadable(Box::new(link)))
    }

    fn list_folder(&self, folder: &Path) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
    }

    fn read_tokenizer(&self, path: &Path) -> Result<Vec<u8>, TokenizerError> {
        mlcc_files::read(path, FileKind::Tokenizer).map_err(|source| unreadable(path, source))
    }

    fn read_config(&self, path: &Path) -> Result<String, TokenizerError> {
        mlcc_files::read_to_string(path, FileKind::Config).map_err(|source| unreadable(path, source))
    }
}

fn unreadable(path: &Path, source: std::io::Error) -> TokenizerError {
    TokenizerError::Io { path: path.display().to_string(), source }
}

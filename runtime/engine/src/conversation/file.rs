//! A conversation as files: `FILE` has the messages as JSON, `FILE.state` the model's state, so that nothing
//! has to be read again. Without the second file, or for another model, the messages alone are taken over.

use std::io::Write;
use std::path::{Path, PathBuf};

use mlcc_files::FileKind;
use mlcc_runtime::{Session, replace_file};
use mlcc_text::{ChatMessage, TokenId};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Conversation, ConversationError};

/// Version of the JSON.
const VERSION: u32 = 1;

#[derive(Debug, Error)]
pub enum FileError {
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("{path} is not a saved conversation: {reason}")]
    Format { path: PathBuf, reason: String },
    #[error(
        "{path} exists and is not a saved conversation, so it is not replaced. Choose another name, or remove it."
    )]
    Other { path: PathBuf },
    #[error(transparent)]
    State(#[from] mlcc_runtime::Error),
    #[error(transparent)]
    Conversation(#[from] ConversationError),
}

/// The context that came back with the messages.
#[derive(Debug)]
pub enum RestoredContext {
    /// The model's state: the next turn computes new tokens only.
    State,
    /// Nothing, for this reason: the next turn reads the whole conversation.
    MessagesOnly(String),
}

#[derive(Serialize, Deserialize)]
struct SavedConversation {
    mlcc_conversation: u32,
    messages: Vec<ChatMessage>,
    /// Tokens of the context that the state file holds.
    tokens: Vec<TokenId>,
    turn_start: usize,
    context_text: Option<String>,
}

fn state_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(".state");
    name.into()
}

impl Conversation<Session> {
    /// Writes `path` and `path.state`; both are replaced as a whole, and only by their kind.
    pub fn save(&self, path: &Path) -> Result<(), FileError> {
        let saved = SavedConversation {
            mlcc_conversation: VERSION,
            messages: self.messages.clone(),
            tokens: self.generator.computed_tokens().to_vec(),
            turn_start: self.turn_start,
            context_text: self.context_text.clone(),
        };
        let io = |source| FileError::Io { action: "write", path: path.to_path_buf(), source };
        if !may_replace(path) {
            return Err(FileError::Other { path: path.to_path_buf() });
        }
        let text = serde_json::to_vec_pretty(&saved).map_err(|e| io(e.into()))?;
        self.generator.model().save_state(state_path(path))?;
        replace_file(path, |file| file.write_all(&text)).map_err(io)
    }

    /// Replaces messages and context by those of `path`. On an error the conversation is as before.
    pub fn load(&mut self, path: &Path) -> Result<RestoredContext, FileError> {
        let saved = read(path)?;
        let state = match self.load_state(path, &saved) {
            Ok(()) => RestoredContext::State,
            Err(reason) => {
                self.forget_context()?;
                RestoredContext::MessagesOnly(reason)
            }
        };
        self.messages = saved.messages;
        if let RestoredContext::State = state {
            self.checkpoints.clear();
            self.turn_start = saved.turn_start;
            self.context_text = saved.context_text;
            self.generator.assume_computed(saved.tokens);
        }
        Ok(state)
    }

    fn load_state(&mut self, path: &Path, saved: &SavedConversation) -> Result<(), String> {
        let vocab = self.generator.model().model().vocab();
        if saved.tokens.iter().any(|&id| usize::try_from(id).map_or(true, |id| id >= vocab)) {
            return Err("its tokens are not of this model's vocabulary".into());
        }
        let session = self.generator.model_mut();
        session.load_state(state_path(path)).map_err(|e| e.to_string())?;
        if session.past() != saved.tokens.len() as u64 || saved.turn_start > saved.tokens.len() {
            return Err(format!(
                "the state has {} tokens, the conversation {}",
                session.past(),
                saved.tokens.len()
            ));
        }
        Ok(())
    }
}

/// True if there is nothing, or a conversation (of any version), which a new one may replace. Anything else
/// is the user's, or the model itself.
fn may_replace(path: &Path) -> bool {
    #[derive(Deserialize)]
    struct VersionMarker {
        #[serde(rename = "mlcc_conversation")]
        _version: u32,
    }
    match std::fs::metadata(path) {
        // `replace_file` says what devices and folders are.
        Ok(there) if there.is_file() => {
            there.len() == 0
                || mlcc_files::read(path, FileKind::Conversation)
                    .is_ok_and(|text| serde_json::from_slice::<VersionMarker>(&text).is_ok())
        }
        _ => true,
    }
}

fn read(path: &Path) -> Result<SavedConversation, FileError> {
    let io = |source| FileError::Io { action: "read", path: path.to_path_buf(), source };
    let wrong = |reason: String| FileError::Format { path: path.to_path_buf(), reason };
    let text = mlcc_files::read(path, FileKind::Conversation).map_err(io)?;
    let saved: SavedConversation = serde_json::from_slice(&text).map_err(|e| wrong(e.to_string()))?;
    if saved.mlcc_conversation != VERSION {
        let found = saved.mlcc_conversation;
        return Err(wrong(format!("it is of version {found}, this program reads version {VERSION}")));
    }
    Ok(saved)
}

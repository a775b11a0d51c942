//! Sources of a tokenizer's bytes: a checkpoint's folder, a file, or an artifact's payload section.
//!
//! Section format: the kind's tag, for some kinds a space and JSON ([`TokenizerExtras`]), a newline, then the
//! file exactly as it was.

use std::path::{Path, PathBuf};

use super::added_tokens::TokenizerExtras;
use super::auxiliary_files::AuxiliaryFiles;
use super::checkpoint_files::CheckpointFiles;
use super::{Tokenizer, TokenizerError};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenizerKind {
    HfJson,
    RwkvWorld,
    SentencePiece,
    Tiktoken,
}

impl TokenizerKind {
    pub const ALL: [TokenizerKind; 4] = [
        TokenizerKind::HfJson,
        TokenizerKind::RwkvWorld,
        TokenizerKind::SentencePiece,
        TokenizerKind::Tiktoken,
    ];

    /// The name under which an artifact stores it.
    pub fn tag(self) -> &'static str {
        match self {
            TokenizerKind::HfJson => "hf-json",
            TokenizerKind::RwkvWorld => "rwkv-world",
            TokenizerKind::SentencePiece => "sentencepiece",
            TokenizerKind::Tiktoken => "tiktoken",
        }
    }

    pub fn from_tag(tag: &str) -> Result<Self, TokenizerError> {
        Self::ALL.into_iter().find(|kind| kind.tag() == tag).ok_or_else(|| TokenizerError::UnknownKind {
            found: tag.to_owned(),
            known: Self::ALL.map(TokenizerKind::tag).join(", "),
        })
    }
}

/// A tokenizer file, read but not yet understood.
#[derive(Debug, Clone)]
pub struct TokenizerFile {
    pub path: PathBuf,
    pub kind: TokenizerKind,
    pub bytes: Vec<u8>,
    /// The content of other files; empty for kinds that need none.
    pub extras: TokenizerExtras,
}

/// Longest first line of a section: a few thousand added tokens.
const LONGEST_HEAD: usize = 1 << 20;

/// Names in the order of preference: the checkpoint's own, RWKV's file for its Pile models, World
/// vocabularies, then formats that need another file.
const NAMES: [&str; 2] = ["tokenizer.json", "20B_tokenizer.json"];
const MODELS: [&str; 4] = ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "ice_text.model"];

/// The vocabulary of BERT.
const WORD_PIECES: &str = "vocab.txt";

impl TokenizerFile {
    /// The tokenizer in a checkpoint's folder.
    pub fn find(folder: &Path, files: &dyn CheckpointFiles) -> Result<Self, TokenizerError> {
        match Self::find_in(folder, files)? {
            Some(file) => Ok(file),
            None => Err(TokenizerError::NotFound { folder: folder.display().to_string() }),
        }
    }

    /// The same; `None` if the folder has none. A tokenizer of a kind that is not read is an error.
    pub fn find_in(folder: &Path, files: &dyn CheckpointFiles) -> Result<Option<Self>, TokenizerError> {
        let named = |name: &str| -> Result<Option<PathBuf>, TokenizerError> {
            let path = folder.join(name);
            Ok(files.is_file(&path)?.then_some(path))
        };
        let first = |names: &[&str]| names.iter().find_map(|name| named(name).transpose()).transpose();
        let matching = |begin: &str, end: &str| {
            let is_match = |path: &PathBuf| {
                let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
                name.starts_with(begin) && name.ends_with(end)
            };
            // The last by name: names of World vocabularies carry a date.
            files.list_folder(folder).into_iter().filter(is_match).max()
        };
        let mut found = first(&NAMES)?.or_else(|| matching("rwkv_vocab_", ".txt"));
        if found.is_none() {
            found = first(&MODELS)?.or_else(|| matching("", ".tiktoken"));
        }
        if found.is_none() {
            found = named("vocab.json")?;
            if found.is_some() && named("merges.txt")?.is_none() {
                found = None;
            }
        }
        if found.is_none() {
            found = named(WORD_PIECES)?;
        }
        found.map(|path| Self::read(&path, files)).transpose()
    }

    /// One file. Its name and its beginning tell its kind; other files in its folder (tokenizer_config.json,
    /// merges.txt, added_tokens.json) are taken into account where the kind needs them.
    pub fn read(path: &Path, files: &dyn CheckpointFiles) -> Result<Self, TokenizerError> {
        let name = || path.display().to_string();
        let file_name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
        if !matches!(extension, "json" | "txt" | "model" | "tiktoken") {
            return Err(TokenizerError::UnknownFile { path: name() });
        }
        let bytes = files.read_tokenizer(path)?;
        let named = |error: TokenizerError| match error {
            io @ TokenizerError::Io { .. } => io,
            source => TokenizerError::InFile { path: name(), source: Box::new(source) },
        };
        let beside = || AuxiliaryFiles::read_beside(path, files);
        let ranks = super::tiktoken::looks_like_ranks(&bytes);
        let (kind, bytes, extras) = match extension {
            "json" if file_name == "vocab.json" => {
                let json = beside()?.slow_bpe(&bytes).map_err(named)?;
                (TokenizerKind::HfJson, json, TokenizerExtras::default())
            }
            "json" => (TokenizerKind::HfJson, bytes, TokenizerExtras::default()),
            "txt" if file_name == WORD_PIECES => {
                let json = beside()?.word_pieces(&bytes).map_err(named)?;
                (TokenizerKind::HfJson, json, TokenizerExtras::default())
            }
            "txt" => (TokenizerKind::RwkvWorld, bytes, TokenizerExtras::default()),
            _ if ranks => {
                let extras = beside()?.tiktoken(file_name, &bytes).map_err(named)?;
                (TokenizerKind::Tiktoken, bytes, extras)
            }
            _ => {
                let (bytes, extras) = beside()?.sentence_piece(file_name, bytes).map_err(named)?;
                (TokenizerKind::SentencePiece, bytes, extras)
            }
        };
        Ok(TokenizerFile { path: path.to_owned(), kind, bytes, extras })
    }

    pub fn load(&self) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::new(self.kind, &self.bytes, self.extras.clone()).map_err(|source| TokenizerError::InFile {
            path: self.path.display().to_string(),
            source: Box::new(source),
        })
    }

    /// The content of an artifact's tokenizer section.
    pub fn to_section(&self) -> Vec<u8> {
        let mut section = Vec::with_capacity(self.bytes.len() + 64);
        section.extend_from_slice(self.kind.tag().as_bytes());
        if self.extras != TokenizerExtras::default() {
            section.push(b' ');
            // Strings and numbers always print.
            section.extend(serde_json::to_vec(&self.extras).unwrap_or_default());
        }
        section.push(b'\n');
        section.extend_from_slice(&self.bytes);
        section
    }
}

impl Tokenizer {
    /// Reads the content of an artifact's tokenizer section.
    pub fn from_section(section: &[u8]) -> Result<Self, TokenizerError> {
        let end = section.iter().take(LONGEST_HEAD).position(|&b| b == b'\n');
        let (head, file) = match end {
            Some(end) => (&section[..end], &section[end + 1..]),
            None => (&section[..section.len().min(32)], &[][..]),
        };
        let head = String::from_utf8_lossy(head);
        let (tag, extras) = match head.split_once(' ') {
            Some((tag, extras)) => (tag, extras),
            None => (&*head, "{}"),
        };
        let kind = TokenizerKind::from_tag(tag)?;
        let extras =
            serde_json::from_str(extras).map_err(|e| TokenizerError::Section { reason: e.to_string() })?;
        Tokenizer::new(kind, file, extras)
    }
}

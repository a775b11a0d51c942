//! Where a tokenizer's bytes come from: a checkpoint's folder, a file, or an artifact's payload section.
//!
//! Section format: the kind's tag, a newline, then the file exactly as it was.

use std::path::{Path, PathBuf};

use super::{Tokenizer, TokenizerError};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenizerKind {
    HfJson,
    RwkvWorld,
}

impl TokenizerKind {
    pub const ALL: [TokenizerKind; 2] = [TokenizerKind::HfJson, TokenizerKind::RwkvWorld];

    /// The name under which an artifact stores it.
    pub fn tag(self) -> &'static str {
        match self {
            TokenizerKind::HfJson => "hf-json",
            TokenizerKind::RwkvWorld => "rwkv-world",
        }
    }

    pub fn from_tag(tag: &str) -> Result<Self, TokenizerError> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.tag() == tag)
            .ok_or_else(|| TokenizerError::UnknownKind { found: tag.to_owned() })
    }

    fn of_path(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "json" => Some(TokenizerKind::HfJson),
            "txt" => Some(TokenizerKind::RwkvWorld),
            _ => None,
        }
    }
}

/// A tokenizer file, read but not yet understood.
#[derive(Debug, Clone)]
pub struct TokenizerFile {
    pub path: PathBuf,
    pub kind: TokenizerKind,
    pub bytes: Vec<u8>,
}

impl TokenizerFile {
    /// Names in the order of preference: the checkpoint's own, RWKV's file for its Pile models, World vocabularies.
    const NAMES: [&'static str; 3] = ["tokenizer.json", "20B_tokenizer.json", "rwkv_vocab_v20230424.txt"];

    /// The tokenizer in a checkpoint's folder.
    pub fn find(folder: &Path) -> Result<Self, TokenizerError> {
        match Self::NAMES.iter().map(|name| folder.join(name)).find(|path| path.exists()) {
            Some(path) => Self::read(&path),
            None => Err(TokenizerError::NotFound { folder: folder.display().to_string() }),
        }
    }

    /// One file, whose kind its extension tells.
    pub fn read(path: &Path) -> Result<Self, TokenizerError> {
        let name = || path.display().to_string();
        let kind =
            TokenizerKind::of_path(path).ok_or_else(|| TokenizerError::UnknownFile { path: name() })?;
        let bytes = std::fs::read(path).map_err(|source| TokenizerError::Io { path: name(), source })?;
        Ok(TokenizerFile { path: path.to_owned(), kind, bytes })
    }

    pub fn load(&self) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::from_bytes(self.kind, &self.bytes).map_err(|source| TokenizerError::InFile {
            path: self.path.display().to_string(),
            source: Box::new(source),
        })
    }

    /// The content of an artifact's tokenizer section.
    pub fn to_section(&self) -> Vec<u8> {
        let mut section = Vec::with_capacity(self.bytes.len() + 16);
        section.extend_from_slice(self.kind.tag().as_bytes());
        section.push(b'\n');
        section.extend_from_slice(&self.bytes);
        section
    }
}

impl Tokenizer {
    /// From the content of an artifact's tokenizer section.
    pub fn from_section(section: &[u8]) -> Result<Self, TokenizerError> {
        let end = section.iter().take(64).position(|&b| b == b'\n');
        let (tag, file) = match end {
            Some(end) => (&section[..end], &section[end + 1..]),
            None => (&section[..section.len().min(32)], &[][..]),
        };
        Tokenizer::from_bytes(TokenizerKind::from_tag(&String::from_utf8_lossy(tag))?, file)
    }
}

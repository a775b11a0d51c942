//! The bytes of each token id.

use super::TokenId;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryKind {
    /// No token has this id.
    Absent,
    Text,
    /// A control token: its bytes are its name and no part of a text.
    Special,
}

#[derive(Debug, Clone, Copy)]
struct TokenEntry {
    start: u32,
    len: u32,
    kind: EntryKind,
}

/// Token id to bytes, in one flat buffer.
#[derive(Debug, Clone)]
pub(super) struct TokenTable {
    bytes: Vec<u8>,
    entries: Vec<TokenEntry>,
}

impl TokenTable {
    pub(super) fn new(ids: usize) -> Self {
        TokenTable {
            bytes: Vec::new(),
            entries: vec![TokenEntry { start: 0, len: 0, kind: EntryKind::Absent }; ids],
        }
    }

    /// Sets the bytes of `id`, which lies below the size given to [`TokenTable::new`].
    pub(super) fn set(&mut self, id: usize, bytes: &[u8], kind: EntryKind) {
        self.entries[id] = TokenEntry { start: self.bytes.len() as u32, len: bytes.len() as u32, kind };
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn get(&self, id: TokenId) -> Option<(&[u8], EntryKind)> {
        let entry = self.entries.get(usize::try_from(id).ok()?)?;
        match entry.kind {
            EntryKind::Absent => None,
            EntryKind::Text | EntryKind::Special => {
                let start = entry.start as usize;
                Some((&self.bytes[start..start + entry.len as usize], entry.kind))
            }
        }
    }

    /// One more than the largest id.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

//! Normalization before sentencepiece encodes (`SentencePieceNormalizer` of its source): replacement of
//! characters by a table compiled into a double-array trie (`precompiled_charsmap`), removal of extra white
//! space, the space before the text.

use super::super::prefix_index::PrefixIndex;
use super::proto::ModelProto;

/// U+2581, which is a space in pieces.
pub(super) const SPACE: &str = "\u{2581}";

#[derive(Debug)]
pub(super) struct SentencePieceNormalizer {
    charsmap: Option<CharsMap>,
    /// User-defined pieces, which stay as they are.
    symbols: PrefixIndex,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
    escape_whitespaces: bool,
    suffix: bool,
}

impl SentencePieceNormalizer {
    pub fn new(model: &ModelProto, symbols: PrefixIndex) -> Result<SentencePieceNormalizer, String> {
        let charsmap = match model.charsmap.is_empty() {
            true => None,
            false => Some(CharsMap::parse(&model.charsmap)?),
        };
        Ok(SentencePieceNormalizer {
            charsmap,
            symbols,
            add_dummy_prefix: model.add_dummy_prefix,
            remove_extra_whitespaces: model.remove_extra_whitespaces,
            escape_whitespaces: model.escape_whitespaces,
            suffix: model.treat_whitespace_as_suffix,
        })
    }

    /// The number of spaces that decoding drops at the start of a text.
    pub fn leading_strip(&self) -> usize {
        match (self.remove_extra_whitespaces, self.add_dummy_prefix) {
            (true, _) => usize::MAX,
            (false, dummy) => dummy.into(),
        }
    }

    /// Tells if no character is left out or replaced by another.
    pub fn keeps_all(&self) -> bool {
        self.charsmap.is_none() && !self.remove_extra_whitespaces
    }

    /// The replacement of the beginning of `text` and the number of bytes that it replaces.
    fn step<'a>(&'a self, text: &'a str) -> (&'a str, usize) {
        if let Some((length, _)) = self.symbols.longest(text.as_bytes()) {
            return (&text[..length], length);
        }
        if let Some((replacement, length)) = self.charsmap.as_ref().and_then(|map| map.longest(text)) {
            return (replacement, length);
        }
        let length = text.chars().next().map_or(0, char::len_utf8);
        (&text[..length], length)
    }

    /// `dummy_prefix` says whether this part of a text may get the space before it. `None` if the result is
    /// longer than `most` bytes: a table may put any text in the place of a character.
    pub fn normalize(&self, text: &str, dummy_prefix: bool, most: usize) -> Option<String> {
        let space = if self.escape_whitespaces { SPACE } else { " " };
        let mut rest = text;
        if self.remove_extra_whitespaces {
            while !rest.is_empty() {
                let (piece, length) = self.step(rest);
                if piece != " " {
                    break;
                }
                rest = &rest[length..];
            }
        }
        let mut out = String::with_capacity(text.len() * 3 / 2 + 4);
        if rest.is_empty() {
            return Some(out);
        }
        let dummy = self.add_dummy_prefix && dummy_prefix;
        if dummy && !self.suffix {
            out.push_str(space);
        }
        let mut after_space = self.remove_extra_whitespaces;
        while !rest.is_empty() {
            let (mut piece, length) = self.step(rest);
            if after_space {
                piece = piece.trim_start_matches(' ');
            }
            // A space becomes three bytes.
            if piece.len().saturating_mul(3).saturating_add(out.len()) > most.max(text.len()) {
                return None;
            }
            if !piece.is_empty() {
                match self.escape_whitespaces {
                    true => out.extend(piece.split_inclusive(' ').flat_map(|part| {
                        let (word, ended) = part.strip_suffix(' ').map_or((part, ""), |word| (word, SPACE));
                        [word, ended]
                    })),
                    false => out.push_str(piece),
                }
                after_space = piece.ends_with(' ');
            }
            rest = &rest[length..];
            after_space &= self.remove_extra_whitespaces;
        }
        if self.remove_extra_whitespaces {
            while let Some(shorter) = out.strip_suffix(space) {
                out.truncate(shorter.len());
            }
        }
        if dummy && self.suffix {
            out.push_str(space);
        }
        (out.len() <= most).then_some(out)
    }
}

/// A trie over UTF-8 bytes in the layout of darts-clone, and the strings that its values point to.
#[derive(Debug)]
struct CharsMap {
    units: Vec<u32>,
    strings: String,
}

impl CharsMap {
    /// Four bytes: size of the trie in bytes; the trie; strings, each ended by a zero byte.
    fn parse(bytes: &[u8]) -> Result<CharsMap, String> {
        let broken = || "precompiled_charsmap is damaged".to_owned();
        let (size, rest) = bytes.split_first_chunk::<4>().ok_or_else(broken)?;
        let (trie, strings) = rest.split_at_checked(u32::from_le_bytes(*size) as usize).ok_or_else(broken)?;
        let (units, odd) = trie.as_chunks::<4>();
        if units.is_empty() || !odd.is_empty() {
            return Err(broken());
        }
        let strings = std::str::from_utf8(strings).map_err(|_| broken())?.to_owned();
        Ok(CharsMap { units: units.iter().map(|unit| u32::from_le_bytes(*unit)).collect(), strings })
    }

    /// The longest key that `text` begins with: its replacement and its length. A value that points nowhere
    /// in a damaged table counts as no match.
    fn longest(&self, text: &str) -> Option<(&str, usize)> {
        let mut best = None;
        let mut node = self.offset(0, *self.units.first()?);
        for (at, &byte) in text.as_bytes().iter().enumerate() {
            node ^= usize::from(byte);
            let Some(&unit) = self.units.get(node) else { break };
            if unit & 0x8000_00ff != u32::from(byte) {
                break;
            }
            node = self.offset(node, unit);
            if unit >> 8 & 1 == 1
                && let Some(&leaf) = self.units.get(node)
            {
                best = Some(((leaf & 0x7fff_ffff) as usize, at + 1));
            }
        }
        let (start, length) = best.filter(|&(_, length)| text.is_char_boundary(length))?;
        let replacement = self.strings.get(start..)?;
        Some((replacement.split('\0').next().unwrap_or(""), length))
    }

    fn offset(&self, node: usize, unit: u32) -> usize {
        node ^ ((unit >> 10) as usize) << ((unit & 1 << 9) >> 6)
    }
}

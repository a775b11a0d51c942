//! tiktoken rank files (`*.tiktoken`, and the `tokenizer.model` of GLM-4 and Llama 3): one token per line,
//! its bytes in base64 and its rank, which is its id.
//!
//! A text is cut by a regular expression ([`TiktokenPattern`]); in each piece the pair of neighbours whose
//! joined bytes have the lowest rank is joined until none is left.

use std::borrow::Cow;
use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::{NormalizedString, Normalizer};

use super::added_tokens::{AddedTokenSplitter, TextSegment, TokenizerExtras};
use super::merge::merge;
use super::table::{EntryKind, TokenTable};
use super::{MAX_ID, TokenId, TokenizerError};

/// The pattern that cuts a text. The files do not say; it is part of each model's code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TiktokenPattern {
    /// Each digit alone: Qwen (first generation).
    Qwen,
    /// Up to three digits: GLM-4, Llama 3, OpenAI's cl100k.
    Cl100k,
}

impl TiktokenPattern {
    pub(super) const fn regex(self) -> &'static str {
        match self {
            TiktokenPattern::Qwen => {
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            }
            TiktokenPattern::Cl100k => {
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            }
        }
    }
}

pub struct TiktokenTokenizer {
    ranks: HashMap<Box<[u8]>, u32>,
    regex: fancy_regex::Regex,
    extras: TokenizerExtras,
    splitter: AddedTokenSplitter,
    /// Ids of what the splitter finds.
    added: Vec<Vec<TokenId>>,
    table: TokenTable,
    specials: Vec<TokenId>,
}

impl TiktokenTokenizer {
    pub fn from_bytes(bytes: &[u8], extras: TokenizerExtras) -> Result<Self, TokenizerError> {
        let ranks = read_ranks(bytes)?;
        for byte in 0..=255u8 {
            if !ranks.contains_key(&[byte][..]) {
                return Err(TokenizerError::TiktokenByte { byte });
            }
        }
        let (table, specials) = token_table(&ranks, &extras)?;
        let pattern = extras.pattern.unwrap_or(TiktokenPattern::Cl100k);
        let regex = fancy_regex::Regex::new(pattern.regex())
            .map_err(|e| TokenizerError::Encode { bytes: 0, reason: e.to_string() })?;
        let parsed = || extras.added.iter().filter(|added| added.parsed);
        let splitter = AddedTokenSplitter::new(parsed().map(|added| added.text.as_str()));
        let added = parsed().map(|added| added.ids.clone()).collect();
        Ok(TiktokenTokenizer { ranks, regex, splitter, added, extras, table, specials })
    }

    /// `template` adds what belongs around a prompt.
    pub fn encode(&self, text: &str, template: bool) -> Result<Vec<TokenId>, TokenizerError> {
        let mut out = Vec::with_capacity(text.len() / 3 + 2);
        if template {
            out.extend(&self.extras.prefix);
        }
        let text = self.normalized(text)?;
        for part in self.splitter.split(&text) {
            match part {
                TextSegment::Added(token) => out.extend(&self.added[token]),
                TextSegment::Text(text) => {
                    for piece in self.regex.find_iter(text) {
                        let piece = piece.map_err(|e| TokenizerError::Encode {
                            bytes: text.len(),
                            reason: e.to_string(),
                        })?;
                        self.encode_piece(piece.as_str().as_bytes(), &mut out);
                    }
                }
            }
        }
        if template {
            out.extend(&self.extras.suffix);
        }
        Ok(out)
    }

    /// `tokenize` of Qwen's tokenization_qwen.py begins with NFC.
    fn normalized<'t>(&self, text: &'t str) -> Result<Cow<'t, str>, TokenizerError> {
        if self.extras.pattern != Some(TiktokenPattern::Qwen) || text.is_ascii() {
            return Ok(Cow::Borrowed(text));
        }
        let mut normalized = NormalizedString::from(text);
        NFC.normalize(&mut normalized)
            .map_err(|e| TokenizerError::Encode { bytes: text.len(), reason: e.to_string() })?;
        Ok(Cow::Owned(normalized.get().to_owned()))
    }

    fn encode_piece(&self, piece: &[u8], out: &mut Vec<TokenId>) {
        if let Some(&rank) = self.ranks.get(piece) {
            out.push(rank as TokenId);
            return;
        }
        let bytes = piece.iter().map(|_| (1, false));
        let merged = merge(bytes, |range, _| self.ranks.get(&piece[range]).copied());
        // Every single byte and every joined pair has a rank.
        out.extend(
            merged.into_iter().filter_map(|range| self.ranks.get(&piece[range])).map(|&rank| rank as TokenId),
        );
    }

    pub(super) fn table(&self) -> &TokenTable {
        &self.table
    }
    pub fn specials(&self) -> &[TokenId] {
        &self.specials
    }

    pub fn token_to_id(&self, token: &str) -> Option<TokenId> {
        let added = self.extras.added.iter().find(|added| added.text == token && added.ids.len() == 1);
        let rank = || self.ranks.get(token.as_bytes()).map(|&rank| rank as TokenId);
        added.and_then(|added| added.ids.first().copied()).or_else(rank)
    }
}

/// True if a file looks like one of these: a first line of base64 and a number.
pub(super) fn looks_like_ranks(bytes: &[u8]) -> bool {
    let line = bytes.split(|&byte| byte == b'\n').next().unwrap_or(&[]);
    line.len() < 1024 && std::str::from_utf8(line).is_ok_and(|line| read_line(line).is_some())
}

/// One more than the largest rank, for ids of added tokens.
pub(super) fn count_ranks(bytes: &[u8]) -> Result<u32, TokenizerError> {
    Ok(read_ranks(bytes)?.values().max().map_or(0, |&last| last + 1))
}

fn read_ranks(bytes: &[u8]) -> Result<HashMap<Box<[u8]>, u32>, TokenizerError> {
    let mut ranks = HashMap::new();
    let mut used = std::collections::HashSet::new();
    for (number, line) in (1..).zip(bytes.split(|&byte| byte == b'\n')) {
        let error = |expected| TokenizerError::TiktokenLine { line: number, expected };
        let line = std::str::from_utf8(line).map_err(|_| error("UTF-8 text"))?.trim_end_matches('\r');
        if line.is_empty() {
            continue;
        }
        let (token, rank) = read_line(line).ok_or_else(|| error("base64, a space and a rank"))?;
        if rank > MAX_ID {
            return Err(error("a rank below 16777216"));
        }
        if !used.insert(rank) {
            return Err(error("each rank once"));
        }
        if ranks.insert(token.into_boxed_slice(), rank).is_some() {
            return Err(error("each token once"));
        }
    }
    if ranks.is_empty() { Err(TokenizerError::Empty) } else { Ok(ranks) }
}

fn read_line(line: &str) -> Option<(Vec<u8>, u32)> {
    let (token, rank) = line.split_once(' ')?;
    Some((base64(token)?, rank.parse().ok()?)).filter(|(token, _)| !token.is_empty())
}

/// Standard alphabet with padding.
pub(super) fn base64(text: &str) -> Option<Vec<u8>> {
    let data = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - data.len() > 2 {
        return None;
    }
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    for group in data.as_bytes().chunks(4) {
        let mut bits = 0u32;
        for &c in group {
            let value = match c {
                b'A'..=b'Z' => c - b'A',
                b'a'..=b'z' => c - b'a' + 26,
                b'0'..=b'9' => c - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(value);
        }
        match group.len() {
            4 => out.extend(&bits.to_be_bytes()[1..]),
            3 => out.extend(&(bits << 6).to_be_bytes()[1..3]),
            2 => out.extend(&(bits << 12).to_be_bytes()[1..2]),
            _ => return None,
        }
    }
    Some(out)
}

fn token_table(
    ranks: &HashMap<Box<[u8]>, u32>,
    extras: &TokenizerExtras,
) -> Result<(TokenTable, Vec<TokenId>), TokenizerError> {
    let mut last = ranks.values().max().copied().unwrap_or(0);
    for added in &extras.added {
        for &id in &added.ids {
            let id = u32::try_from(id).unwrap_or(u32::MAX);
            if id > MAX_ID {
                return Err(TokenizerError::HugeId { token: super::brief(&added.text), id, limit: MAX_ID });
            }
            last = last.max(id);
        }
    }
    let mut table = TokenTable::new(last as usize + 1);
    for (bytes, &rank) in ranks {
        table.set(rank as usize, bytes, EntryKind::Text);
    }
    let mut specials = Vec::new();
    for added in &extras.added {
        let [id] = added.ids[..] else { continue };
        let kind = if added.special { EntryKind::Special } else { EntryKind::Text };
        table.set(id as usize, added.text.as_bytes(), kind);
        if added.special {
            specials.push(id);
        }
    }
    specials.sort_unstable();
    specials.dedup();
    Ok((table, specials))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_all_lengths() {
        let cases =
            [("IQ==", "!"), ("YWI=", "ab"), ("YWJj", "abc"), ("8J+YgA==", "😀"), ("YWJjZA==", "abcd")];
        for (text, expected) in cases {
            assert_eq!(base64(text).unwrap(), expected.as_bytes(), "{text}");
        }
        for bad in ["Y", "YW", "YWI", "Y===", "YW=j", "Y*==", "====", "é==="] {
            assert_eq!(base64(bad), None, "{bad}");
        }
        assert_eq!(base64(""), Some(Vec::new()));
    }
}

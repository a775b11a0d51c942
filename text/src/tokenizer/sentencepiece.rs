//! sentencepiece models (`tokenizer.model`): unigram and BPE, with byte fallback.
//!
//! The algorithms are those of the sentencepiece library (Kudo and Richardson, 2018), written anew so that
//! the result is the same to the last token: converting to a list of merges is not exact, because
//! sentencepiece ranks the joined piece and not the pair. Control pieces and added tokens are looked for in
//! the text first, as `transformers` does.

mod encode;
mod normalizer;
mod proto;

pub use proto::{ModelProto as SentencePieceModel, ModelType, PieceKind, ProtoPiece};

use std::borrow::Cow;
use std::collections::HashMap;

use super::added_tokens::{AddedTokenSplitter, TextSegment, TokenizerExtras};
use super::prefix_index::PrefixIndex;
use super::table::{EntryKind, TokenTable};
use super::{MAX_ID, TokenId, TokenizerError, brief, growth_bound};
use normalizer::{SPACE, SentencePieceNormalizer};

#[derive(Debug)]
pub struct SentencePieceTokenizer {
    model: SentencePieceModel,
    extras: TokenizerExtras,
    normalizer: SentencePieceNormalizer,
    /// Pieces that text can match: normal, user-defined and unused ones.
    pieces: PrefixIndex,
    ids: HashMap<Box<[u8]>, u32>,
    /// User-defined pieces.
    symbols: PrefixIndex,
    unknown: u32,
    /// The piece of each byte, where bytes are pieces.
    bytes: Option<Box<[u32; 256]>>,
    splitter: AddedTokenSplitter,
    /// Ids of what the splitter finds.
    added: Vec<Vec<TokenId>>,
    names: HashMap<String, TokenId>,
    table: TokenTable,
    specials: Vec<TokenId>,
}

fn wrong(reason: impl Into<String>) -> TokenizerError {
    TokenizerError::SentencePiece { reason: reason.into() }
}

impl SentencePieceTokenizer {
    pub fn from_bytes(bytes: &[u8], extras: TokenizerExtras) -> Result<Self, TokenizerError> {
        let model = SentencePieceModel::parse(bytes).map_err(wrong)?;
        if model.pieces.is_empty() {
            return Err(TokenizerError::Empty);
        }
        let kind_is = |kinds: &[PieceKind]| {
            let entries = model.pieces.iter().zip(0u32..).filter(|(piece, _)| kinds.contains(&piece.kind));
            entries.map(|(piece, id)| (piece.text.clone().into_bytes(), id)).collect::<Vec<_>>()
        };
        let matched = kind_is(&[PieceKind::Normal, PieceKind::UserDefined, PieceKind::Unused]);
        let symbols = PrefixIndex::new(kind_is(&[PieceKind::UserDefined]));
        let unknown = kind_is(&[PieceKind::Unknown]);
        let [(_, unknown)] = unknown[..] else {
            return Err(wrong(format!("{} pieces are of the kind UNKNOWN, one is expected", unknown.len())));
        };
        let mut ids = HashMap::new();
        for (text, id) in &matched {
            if ids.insert(text.clone().into_boxed_slice(), *id).is_some() {
                return Err(wrong(format!(
                    "the piece {:?} occurs twice",
                    brief(&String::from_utf8_lossy(text))
                )));
            }
        }
        let bytes = match model.byte_fallback {
            true => Some(byte_pieces(&model)?),
            false => None,
        };
        let (table, specials) = token_table(&model, &extras)?;
        let (splitter, added) = splitter(&model, &extras);
        Ok(SentencePieceTokenizer {
            normalizer: SentencePieceNormalizer::new(&model, symbols.clone()).map_err(wrong)?,
            pieces: PrefixIndex::new(matched),
            names: names(&model, &extras),
            ids,
            symbols,
            unknown,
            bytes,
            splitter,
            added,
            table,
            specials,
            model,
            extras,
        })
    }

    /// `template` adds what belongs around a prompt.
    pub fn encode(&self, text: &str, template: bool) -> Result<Vec<TokenId>, TokenizerError> {
        let most = growth_bound::limit(text.len());
        let mut room = most;
        let mut out = Vec::with_capacity(text.len() / 3 + 2);
        if template {
            out.extend(&self.extras.prefix);
        }
        for (number, part) in self.splitter.split(text).into_iter().enumerate() {
            match part {
                TextSegment::Added(token) => out.extend(&self.added[token]),
                TextSegment::Text(part) => {
                    let normalized = self.normalized(part, number == 0, room);
                    let normalized = normalized.ok_or(TokenizerError::TooLong { bytes: text.len(), most })?;
                    room -= normalized.len();
                    self.encode_part(&normalized, &mut out);
                }
            }
        }
        if template {
            out.extend(&self.extras.suffix);
        }
        Ok(out)
    }

    /// True if every part of a text becomes tokens, and none of them means a run of any length.
    pub(super) fn keeps_all_bytes(&self) -> bool {
        self.bytes.is_some() && self.normalizer.keeps_all() && !self.extras.glm_spaces
    }

    /// True if the files say what is between two texts.
    pub fn takes_pairs(&self) -> bool {
        !self.extras.between.is_empty()
    }

    /// Two texts as one input.
    pub fn encode_pair(&self, first: &str, second: &str) -> Result<Vec<TokenId>, TokenizerError> {
        let TokenizerExtras { prefix, between, suffix, .. } = &self.extras;
        let (first, second) = (self.encode(first, false)?, self.encode(second, false)?);
        Ok([prefix, &first, between, &second, suffix].map(Vec::as_slice).concat())
    }

    /// A part of a text as pieces match it; `None` if it is longer than `most` bytes.
    fn normalized(&self, text: &str, first: bool, most: usize) -> Option<String> {
        let text = if self.extras.glm_spaces { Cow::Owned(glm_spaces(text)) } else { Cow::Borrowed(text) };
        self.normalizer.normalize(&text, first || !self.extras.first_part_only, most)
    }

    fn encode_part(&self, text: &str, out: &mut Vec<TokenId>) {
        let found = match self.model.model_type {
            ModelType::Unigram => encode::unigram(&self.model, &self.pieces, self.unknown, text),
            ModelType::Bpe => encode::bpe(&self.model, &self.ids, &self.symbols, self.unknown, text),
        };
        let mut after_unknown = false;
        for (range, id) in found {
            let unknown = id == self.unknown;
            match &self.bytes {
                Some(pieces) if unknown => {
                    let bytes = text.as_bytes()[range].iter();
                    out.extend(bytes.map(|&byte| self.id(pieces[usize::from(byte)])));
                }
                // A run of unknown characters is one token.
                None if unknown && after_unknown => {}
                _ => out.push(self.id(id)),
            }
            after_unknown = unknown;
        }
    }

    fn id(&self, piece: u32) -> TokenId {
        // Below MAX_ID, as the table's construction has checked.
        (piece + self.extras.id_offset) as TokenId
    }

    pub(super) fn table(&self) -> &TokenTable {
        &self.table
    }
    pub fn specials(&self) -> &[TokenId] {
        &self.specials
    }
    pub fn token_to_id(&self, token: &str) -> Option<TokenId> {
        self.names.get(token).copied()
    }
    pub(super) fn leading_strip(&self) -> usize {
        self.normalizer.leading_strip()
    }
}

/// `<0x00>` to `<0xFF>`.
fn byte_pieces(model: &SentencePieceModel) -> Result<Box<[u32; 256]>, TokenizerError> {
    let mut bytes = Box::new([u32::MAX; 256]);
    for (piece, id) in model.pieces.iter().zip(0u32..).filter(|(piece, _)| piece.kind == PieceKind::Byte) {
        let byte = super::hf::fallback_byte(&piece.text)
            .ok_or_else(|| wrong(format!("the byte piece {:?} is not of the form <0x0A>", piece.text)))?;
        bytes[usize::from(byte)] = id;
    }
    match bytes.iter().position(|&id| id == u32::MAX) {
        Some(byte) => Err(wrong(format!("it has byte fallback but no piece for the byte {byte:#04x}"))),
        None => Ok(bytes),
    }
}

/// The bytes of each id.
fn token_table(
    model: &SentencePieceModel,
    extras: &TokenizerExtras,
) -> Result<(TokenTable, Vec<TokenId>), TokenizerError> {
    let offset = u64::from(extras.id_offset);
    let last_piece = offset + model.pieces.len() as u64 - 1;
    let added_ids =
        extras.added.iter().flat_map(|added| added.ids.iter().map(|&id| (id, added.text.as_str())));
    let mut last = (last_piece, model.pieces.last().map_or("", |piece| piece.text.as_str()));
    for (id, text) in added_ids {
        let id = u64::try_from(id).map_err(|_| wrong(format!("the added token {text:?} has id {id}")))?;
        last = last.max((id, text));
    }
    if last.0 > u64::from(MAX_ID) {
        let id = u32::try_from(last.0).unwrap_or(u32::MAX);
        return Err(TokenizerError::HugeId { token: last.1.to_owned(), id, limit: MAX_ID });
    }
    let mut table = TokenTable::new(last.0 as usize + 1);
    let mut specials = Vec::new();
    for (piece, id) in model.pieces.iter().zip(offset as usize..) {
        let text = piece.text.replace(SPACE, " ");
        let (bytes, kind) = match piece.kind {
            PieceKind::Control | PieceKind::Unknown => (piece.text.clone().into_bytes(), EntryKind::Special),
            PieceKind::Byte => match super::hf::fallback_byte(&piece.text) {
                Some(byte) => (vec![byte], EntryKind::Text),
                None => (text.into_bytes(), EntryKind::Text),
            },
            _ if extras.glm_spaces => (glm_text(&text).into_bytes(), EntryKind::Text),
            _ => (text.into_bytes(), EntryKind::Text),
        };
        table.set(id, &bytes, kind);
        if kind == EntryKind::Special {
            specials.push(id as TokenId);
        }
    }
    for added in &extras.added {
        // A sequence is written with tokens that have entries of their own.
        let [id] = added.ids[..] else { continue };
        let kind = if added.special { EntryKind::Special } else { EntryKind::Text };
        table.set(id as usize, added.text.as_bytes(), kind);
        specials.retain(|&special| special != id);
        if added.special {
            specials.push(id);
        }
    }
    specials.sort_unstable();
    Ok((table, specials))
}

/// Added tokens and control pieces.
fn splitter(model: &SentencePieceModel, extras: &TokenizerExtras) -> (AddedTokenSplitter, Vec<Vec<TokenId>>) {
    let added = extras
        .added
        .iter()
        .filter(|added| added.parsed)
        .map(|added| (added.text.as_str(), added.ids.clone()));
    let control =
        model.pieces.iter().zip(extras.id_offset..).filter(|(piece, _)| piece.kind == PieceKind::Control);
    let control = control.map(|(piece, id)| (piece.text.as_str(), vec![id as TokenId]));
    let (texts, ids): (Vec<&str>, Vec<Vec<TokenId>>) = added.chain(control).unzip();
    (AddedTokenSplitter::new(texts), ids)
}

fn names(model: &SentencePieceModel, extras: &TokenizerExtras) -> HashMap<String, TokenId> {
    let pieces =
        model.pieces.iter().zip(extras.id_offset..).map(|(piece, id)| (piece.text.clone(), id as TokenId));
    let added = extras.added.iter().filter_map(|added| Some((added.text.clone(), *added.ids.first()?)));
    pieces.chain(added).collect()
}

/// ChatGLM-6B's pieces for white space.
const GLM_LINE: &str = "<n>";
const GLM_TAB: &str = "<|tab|>";
const GLM_LONGEST: usize = 80;

/// `_preprocess` of ChatGLM-6B's tokenizer: runs of two to eighty spaces, tabs and line breaks become pieces.
fn glm_spaces(text: &str) -> String {
    let mut text = text.replace('\n', GLM_LINE).replace('\t', GLM_TAB);
    for length in (2..=GLM_LONGEST).rev() {
        text = text.replace(&" ".repeat(length), &format!("<|blank_{length}|>"));
    }
    text
}

/// The text of such a piece.
fn glm_text(piece: &str) -> String {
    let spaces =
        piece.strip_prefix("<|blank_").and_then(|rest| rest.strip_suffix("|>")?.parse::<usize>().ok());
    match (piece, spaces) {
        (GLM_LINE, _) => "\n".to_owned(),
        (GLM_TAB, _) => "\t".to_owned(),
        (_, Some(length)) if length <= GLM_LONGEST => " ".repeat(length),
        _ => piece.to_owned(),
    }
}

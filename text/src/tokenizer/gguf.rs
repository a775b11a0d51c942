//! The tokenizer of a GGUF file (`tokenizer.ggml.*`), converted to one of the other kinds.

use serde_json::Value;
use std::path::Path;

use super::added_tokens::TokenizerExtras;
use super::bpe_json::{BpeAlphabet, BpeParts};
use super::regexes::{known, pre_tokenizer};
use super::sentencepiece::{ModelType, PieceKind, ProtoPiece, SentencePieceModel};
use super::wordpiece_json::WordPiece;
use super::{TokenId, TokenizerError, TokenizerFile, TokenizerKind, brief};

/// The values of the file, named like the keys. Ids are those of the file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GgufVocabulary {
    /// `tokenizer.ggml.model`: llama, gpt2, gemma4, t5, bert, rwkv.
    pub model: String,
    pub pre: Option<String>,
    pub tokens: Vec<String>,
    pub scores: Vec<f32>,
    pub token_types: Vec<i32>,
    pub merges: Vec<String>,
    pub bos_token_id: Option<u32>,
    pub eos_token_id: Option<u32>,
    pub unknown_token_id: Option<u32>,
    /// The tokens that begin a text, and that end each (BERT).
    pub cls_token_id: Option<u32>,
    pub separator_token_id: Option<u32>,
    pub add_bos_token: Option<bool>,
    pub add_eos_token: Option<bool>,
    /// True if there is a separator between two texts.
    pub add_sep_token: Option<bool>,
    pub add_space_prefix: Option<bool>,
    pub remove_extra_whitespaces: Option<bool>,
    pub precompiled_charsmap: Vec<u8>,
}

fn wrong(reason: impl Into<String>) -> TokenizerError {
    TokenizerError::Gguf { reason: reason.into() }
}

/// Advice about a tokenizer that is not read.
pub(super) const WAY_OUT: &str =
    "Put the model's tokenizer.json next to the file, or name it with --tokenizer tokenizer.json";

impl GgufVocabulary {
    /// `path` is that of the GGUF file, for messages.
    pub fn to_file(&self, path: &Path) -> Result<TokenizerFile, TokenizerError> {
        if self.tokens.is_empty() {
            return Err(TokenizerError::Empty);
        }
        for (name, length) in [("scores", self.scores.len()), ("token_type", self.token_types.len())] {
            if length != 0 && length != self.tokens.len() {
                let tokens = self.tokens.len();
                return Err(wrong(format!("tokenizer.ggml.{name} has {length} entries for {tokens} tokens")));
            }
        }
        let (kind, bytes, extras) = match self.model.as_str() {
            "llama" => self.sentence_piece(ModelType::Bpe)?,
            "t5" => self.sentence_piece(ModelType::Unigram)?,
            "gpt2" | "gemma4" => (
                TokenizerKind::HfJson,
                self.merged_pairs()?.to_string().into_bytes(),
                TokenizerExtras::default(),
            ),
            "bert" => (
                TokenizerKind::HfJson,
                self.word_pieces()?.to_string().into_bytes(),
                TokenizerExtras::default(),
            ),
            "rwkv" => (TokenizerKind::RwkvWorld, self.world()?.into_bytes(), TokenizerExtras::default()),
            other => {
                let other = brief(other);
                return Err(wrong(format!(
                    "tokenizer.ggml.model is `{other}`; llama, t5, gpt2, gemma4, bert and rwkv are read. {WAY_OUT}"
                )));
            }
        };
        Ok(TokenizerFile { path: path.to_owned(), kind, bytes, extras })
    }

    /// The names that `tokenizer.ggml.pre` may have.
    pub fn pre_tokenizers() -> impl Iterator<Item = &'static str> {
        known()
    }

    fn kind(&self, id: usize) -> Result<PieceKind, TokenizerError> {
        let Some(&number) = self.token_types.get(id) else { return Ok(PieceKind::Normal) };
        let kind = u64::try_from(number).ok().and_then(PieceKind::from_number);
        kind.ok_or_else(|| {
            wrong(format!("tokenizer.ggml.token_type of token {id} is {number}, 1 to 6 are known"))
        })
    }

    fn named(&self, id: Option<u32>) -> Option<(String, TokenId)> {
        let id = id?;
        Some((self.tokens.get(id as usize)?.clone(), TokenId::try_from(id).ok()?))
    }

    fn sentence_piece(
        &self,
        model_type: ModelType,
    ) -> Result<(TokenizerKind, Vec<u8>, TokenizerExtras), TokenizerError> {
        if self.scores.is_empty() {
            return Err(wrong(format!("a `{}` tokenizer needs tokenizer.ggml.scores", self.model)));
        }
        let mut pieces = Vec::with_capacity(self.tokens.len());
        for (id, (text, &score)) in self.tokens.iter().zip(&self.scores).enumerate() {
            pieces.push(ProtoPiece { text: text.clone(), score, kind: self.kind(id)? });
        }
        if !pieces.iter().any(|piece| piece.kind == PieceKind::Unknown) {
            let unknown = self.unknown_token_id.unwrap_or(0) as usize;
            let piece = pieces.get_mut(unknown);
            piece.ok_or_else(|| wrong(format!("unknown_token_id {unknown} is not a token")))?.kind =
                PieceKind::Unknown;
        }
        let bos = self.named(self.bos_token_id);
        let eos = self.named(self.eos_token_id);
        let bytes = pieces.iter().filter(|piece| piece.kind == PieceKind::Byte).count();
        let model = SentencePieceModel {
            pieces,
            model_type,
            byte_fallback: bytes == 256,
            bos_piece: bos.clone().map_or_else(String::new, |(name, _)| name),
            eos_piece: eos.clone().map_or_else(String::new, |(name, _)| name),
            charsmap: self.precompiled_charsmap.clone(),
            add_dummy_prefix: self.add_space_prefix.unwrap_or(true),
            remove_extra_whitespaces: self.remove_extra_whitespaces.unwrap_or(false),
            ..SentencePieceModel::default()
        };
        let extras = TokenizerExtras {
            prefix: wanted(bos, self.add_bos_token.unwrap_or(model_type == ModelType::Bpe)),
            suffix: wanted(eos, self.add_eos_token.unwrap_or(model_type == ModelType::Unigram)),
            ..TokenizerExtras::default()
        };
        Ok((TokenizerKind::SentencePiece, model.to_bytes(), extras))
    }

    /// Byte-pair encoding, over bytes or over texts.
    fn merged_pairs(&self) -> Result<Value, TokenizerError> {
        if self.merges.is_empty() {
            let model = &self.model;
            return Err(wrong(format!("a `{model}` tokenizer needs tokenizer.ggml.merges. {WAY_OUT}")));
        }
        // Files with the model `gemma4` need not repeat the name.
        let named = Some("gemma4").filter(|model| self.model == *model).or(self.pre.as_deref());
        let pre = named.ok_or_else(|| {
            wrong(format!(
                "tokenizer.ggml.pre is missing, so the file does not say how texts are split; convert the model again. \
                 {WAY_OUT}"
            ))
        })?;
        let unknown = || TokenizerError::PreTokenizer { name: pre.to_owned(), near: String::new() };
        let setup = pre_tokenizer(pre).ok_or_else(unknown)?;
        let unknown = self.named(self.unknown_token_id).map(|(name, _)| name);
        let mut bpe = BpeParts {
            alphabet: match setup.plain_text {
                true => BpeAlphabet::Text { unknown },
                false => BpeAlphabet::Bytes,
            },
            merges: self.merges.clone(),
            regexes: setup.regexes,
            ignore_merges: setup.ignore_merges,
            nfc: setup.nfc,
            ..BpeParts::default()
        };
        for (id, token) in self.tokens.iter().enumerate() {
            // Below 2^24, as reading the file has checked.
            let number = id as TokenId;
            match self.kind(id)? {
                PieceKind::Control | PieceKind::Unknown => bpe.added.push((token.clone(), number, true)),
                PieceKind::UserDefined => bpe.added.push((token.clone(), number, false)),
                PieceKind::Normal | PieceKind::Unused | PieceKind::Byte => {}
            }
            bpe.vocab.push((token.clone(), number));
        }
        // Early files of Gemma 4 deny the begin token that the model was trained with.
        let add_bos = self.add_bos_token.filter(|_| pre != "gemma4").unwrap_or(setup.add_bos);
        bpe.bos = self.named(self.bos_token_id).filter(|_| add_bos);
        bpe.eos = self.named(self.eos_token_id).filter(|_| self.add_eos_token.unwrap_or(false));
        let add_sep = self.add_sep_token.unwrap_or(setup.add_sep);
        bpe.separator = self.named(self.separator_token_id).filter(|_| add_sep);
        Ok(bpe.to_json())
    }

    /// WordPiece: tokens that begin a word have a mark in front, in place of the `##` of the others; control
    /// tokens have none. Files do not say whether letters become small: llama.cpp always makes them so.
    fn word_pieces(&self) -> Result<Value, TokenizerError> {
        let mut vocab = Vec::with_capacity(self.tokens.len());
        let mut others = Vec::new();
        for (id, token) in self.tokens.iter().enumerate() {
            let is_control = self.kind(id)? == PieceKind::Control;
            // Older files leave all tokens in brackets as they are.
            let control = is_control || (token.starts_with('[') && token.ends_with(']'));
            vocab.push(match token.strip_prefix('\u{2581}') {
                Some(word) if !control => word.to_owned(),
                None if !control => format!("##{token}"),
                _ => token.clone(),
            });
            if is_control {
                others.push(token.clone());
            }
        }
        let usual = WordPiece::of(vocab);
        let named = |id: Option<u32>, usual: &str| self.named(id).map_or(usual.to_owned(), |(name, _)| name);
        let pieces = WordPiece {
            unknown: named(self.unknown_token_id, &usual.unknown),
            begin: named(self.cls_token_id.or(self.bos_token_id), &usual.begin),
            end: named(self.separator_token_id.or(self.eos_token_id), &usual.end),
            others: usual.others.iter().cloned().chain(others).collect(),
            ..usual
        };
        pieces.to_json()
    }

    /// The World vocabulary: tokens are written as the inside of a Python bytes literal. Token 0 is the end
    /// of a text.
    fn world(&self) -> Result<String, TokenizerError> {
        let mut file = String::new();
        for (id, token) in self.tokens.iter().enumerate().skip(1) {
            if token.starts_with("[PAD") || self.kind(id)? != PieceKind::Normal {
                continue;
            }
            // Python chooses double quotes where a single one is inside.
            let quoted = [format!("b'{token}'"), format!("b\"{token}\"")];
            let literal = quoted.iter().find_map(|text| Some((text, super::world::literal_length(text)?)));
            let (literal, length) = literal.ok_or_else(|| {
                wrong(format!(
                    "token {id} of the World vocabulary is not a bytes literal: {:?}",
                    brief(token)
                ))
            })?;
            file.push_str(&format!("{id} {literal} {length}\n"));
        }
        Ok(file)
    }
}

fn wanted(token: Option<(String, TokenId)>, wanted: bool) -> Vec<TokenId> {
    token.filter(|_| wanted).into_iter().map(|(_, id)| id).collect()
}

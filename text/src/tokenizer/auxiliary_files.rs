//! The small files beside a vocabulary that say what the vocabulary does not: tokenizer_config.json,
//! added_tokens.json, merges.txt, and what the code of a tokenizer class does by itself.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::added_tokens::{AddedToken, TokenizerExtras};
use super::bpe_json::BpeParts;
use super::checkpoint_files::CheckpointFiles;
use super::regexes::{GPT2, QWEN2};
use super::sentencepiece::{PieceKind, ProtoPiece, SentencePieceModel};
use super::tiktoken::{TiktokenPattern, count_ranks};
use super::wordpiece_json::WordPiece;
use super::{TokenId, TokenizerError};

/// Parsed companions of one file; absent ones are `null`.
pub(super) struct AuxiliaryFiles {
    config: Value,
    added_tokens: Value,
    special_tokens_map: Value,
    merges: Option<String>,
}

/// Classes whose code is known to follow `vocab.json` and `merges.txt`.
const BYTE_LEVEL_CLASSES: &[&str] =
    &["GPT2Tokenizer", "Qwen2Tokenizer", "CodeGenTokenizer", "GPTNeoXTokenizer"];

/// Classes whose code is known to follow `vocab.txt`.
const WORD_PIECE_CLASSES: &[&str] = &["BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"];

/// The default of those classes for every special token that no file names.
const END_OF_TEXT: &str = "<|endoftext|>";

impl AuxiliaryFiles {
    pub fn read_beside(path: &Path, files: &dyn CheckpointFiles) -> Result<AuxiliaryFiles, TokenizerError> {
        let folder = path.parent().unwrap_or(Path::new(""));
        let read = |name: &str| -> Result<Option<String>, TokenizerError> {
            let path = folder.join(name);
            files.is_file(&path)?.then(|| files.read_config(&path)).transpose()
        };
        let json = |name: &str| -> Result<Value, TokenizerError> {
            let Some(text) = read(name)? else { return Ok(Value::Null) };
            serde_json::from_str(&text)
                .map_err(|e| TokenizerError::Companion { file: name.to_owned(), reason: e.to_string() })
        };
        Ok(AuxiliaryFiles {
            config: json("tokenizer_config.json")?,
            added_tokens: json("added_tokens.json")?,
            special_tokens_map: json("special_tokens_map.json")?,
            merges: read("merges.txt")?,
        })
    }

    fn class(&self) -> &str {
        let class = self.config.get("tokenizer_class").and_then(Value::as_str).unwrap_or("");
        class.strip_suffix("Fast").unwrap_or(class)
    }

    fn flag(&self, name: &str) -> Option<bool> {
        self.config.get(name).and_then(Value::as_bool)
    }

    /// `bos_token` and the like, by name.
    fn token(&self, name: &str) -> Option<&str> {
        let token = self.config.get(name).or_else(|| self.special_tokens_map.get(name))?;
        token.as_str().or_else(|| token.get("content")?.as_str())
    }

    /// The class's default for `bos_token` and the like where no file names one.
    fn default_token(&self, name: &str) -> Option<&'static str> {
        match (self.class(), name) {
            ("Qwen2Tokenizer", "bos_token") => None,
            // `vocab.json` without a class is the first GPT-2's.
            (class, "bos_token" | "eos_token" | "unk_token")
                if class.is_empty() || BYTE_LEVEL_CLASSES.contains(&class) =>
            {
                Some(END_OF_TEXT)
            }
            _ => None,
        }
    }

    /// True if the files name a token as one with a function, which is no part of a text.
    fn is_special(&self, text: &str) -> bool {
        let content = |token: &Value| token.as_str().or_else(|| token.get("content")?.as_str()) == Some(text);
        let fields =
            [&self.config, &self.special_tokens_map].into_iter().filter_map(Value::as_object).flatten();
        let named = |(name, value): (&String, &Value)| match name.as_str() {
            "additional_special_tokens" | "extra_special_tokens" => {
                value.as_array().is_some_and(|tokens| tokens.iter().any(content))
                    || value.as_object().is_some_and(|tokens| tokens.values().any(content))
            }
            name => name.ends_with("_token") && content(value),
        };
        fields.into_iter().any(named) || self.default_token("eos_token") == Some(text)
    }

    /// Tokens that the files add to a vocabulary, in the order of their ids.
    fn added(&self) -> Result<Vec<AddedToken>, TokenizerError> {
        let wrong = |file: &str, reason: &str| TokenizerError::Companion {
            file: file.to_owned(),
            reason: reason.to_owned(),
        };
        let mut added: BTreeMap<TokenId, (String, bool)> = BTreeMap::new();
        for (text, id) in self.added_tokens.as_object().into_iter().flatten() {
            let id = id.as_u64().and_then(|id| TokenId::try_from(id).ok());
            let id = id.ok_or_else(|| {
                wrong("added_tokens.json", &format!("the id of {text:?} is not a token id"))
            })?;
            added.insert(id, (text.clone(), self.is_special(text)));
        }
        for (id, token) in
            self.config.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten()
        {
            let text = token.get("content").and_then(Value::as_str);
            let (Ok(id), Some(text)) = (id.parse::<u32>(), text) else {
                let reason = format!("added_tokens_decoder.{id} should be a token id with a `content`");
                return Err(wrong("tokenizer_config.json", &reason));
            };
            let special = token.get("special").and_then(Value::as_bool).unwrap_or(true);
            let id = TokenId::try_from(id)
                .map_err(|_| wrong("tokenizer_config.json", "a token id is too large"))?;
            added.insert(id, (text.to_owned(), special));
        }
        let token = |(id, (text, special))| AddedToken { text, ids: vec![id], special, parsed: true };
        Ok(added.into_iter().map(token).collect())
    }

    /// A sentencepiece model with the ids that the tokenizer's class gives, and what belongs to it.
    pub fn sentence_piece(
        &self,
        file_name: &str,
        bytes: Vec<u8>,
    ) -> Result<(Vec<u8>, TokenizerExtras), TokenizerError> {
        let model =
            SentencePieceModel::parse(&bytes).map_err(|reason| TokenizerError::SentencePiece { reason })?;
        let shifted = file_name == "sentencepiece.bpe.model" && self.class().is_empty();
        if self.class() == "XLMRobertaTokenizer" || shifted {
            return self.xlm_roberta(model);
        }
        Ok((bytes, self.beside_pieces(file_name, &model)?))
    }

    /// XLM-RoBERTa: four control tokens come first, those of the model fall away, and `<mask>` is the last.
    fn xlm_roberta(
        &self,
        mut model: SentencePieceModel,
    ) -> Result<(Vec<u8>, TokenizerExtras), TokenizerError> {
        let first = ["<unk>", "<s>", "</s>"];
        if !model.pieces.iter().take(3).map(|piece| piece.text.as_str()).eq(first) {
            let reason =
                "its first pieces are not <unk>, <s> and </s>, as those of XLM-RoBERTa are".to_owned();
            return Err(TokenizerError::SentencePiece { reason });
        }
        let piece = |text: &str, kind| ProtoPiece { text: text.to_owned(), score: 0.0, kind };
        let control = ["<s>", "<pad>", "</s>"].map(|text| piece(text, PieceKind::Control));
        let begin = control.into_iter().chain([piece("<unk>", PieceKind::Unknown)]);
        model.pieces.splice(..3, begin);
        let mask = TokenId::try_from(model.pieces.len()).unwrap_or(TokenId::MAX);
        let added = AddedToken { text: "<mask>".to_owned(), ids: vec![mask], special: true, parsed: true };
        let (begin, end) = (vec![0], vec![2]);
        let between = [&end[..], &end[..]].concat();
        let extras = TokenizerExtras {
            added: vec![added],
            prefix: begin,
            between,
            suffix: end,
            ..TokenizerExtras::default()
        };
        Ok((model.to_bytes(), extras))
    }

    /// The extras of a sentencepiece model whose ids are its own.
    fn beside_pieces(
        &self,
        file_name: &str,
        model: &SentencePieceModel,
    ) -> Result<TokenizerExtras, TokenizerError> {
        if self.class() == "ChatGLMTokenizer" || file_name == "ice_text.model" {
            return match file_name {
                "ice_text.model" => self.chatglm_6b(model),
                _ => self.chatglm_2(model),
            };
        }
        if matches!(self.class(), "CamembertTokenizer" | "NllbTokenizer" | "MBartTokenizer") {
            return Err(TokenizerError::UnknownClass {
                class: self.class().to_owned(),
                detail: "its ids are shifted against the sentencepiece model".to_owned(),
            });
        }
        let id_of = |name: &str| piece_id(model, name);
        let added = self.added()?;
        let find = |name: Option<&str>, default: &str| {
            let name = name.unwrap_or(default);
            let added =
                added.iter().find(|added| added.text == name).and_then(|added| added.ids.first().copied());
            added.or_else(|| id_of(name))
        };
        let is_t5 = self.class() == "T5Tokenizer" || file_name == "spiece.model";
        let bos = find(self.token("bos_token"), &model.bos_piece);
        let eos = find(self.token("eos_token"), &model.eos_piece);
        let prefix = bos.filter(|_| self.flag("add_bos_token").unwrap_or(!is_t5));
        let suffix = eos.filter(|_| self.flag("add_eos_token").unwrap_or(is_t5));
        Ok(TokenizerExtras {
            added,
            prefix: prefix.into_iter().collect(),
            suffix: suffix.into_iter().collect(),
            first_part_only: self.flag("legacy") == Some(false),
            ..TokenizerExtras::default()
        })
    }

    /// ChatGLM2 and ChatGLM3: command tokens after the pieces; a prompt begins with `[gMASK] sop`.
    fn chatglm_2(&self, model: &SentencePieceModel) -> Result<TokenizerExtras, TokenizerError> {
        const COMMANDS: [&str; 9] = [
            "[MASK]",
            "[gMASK]",
            "[sMASK]",
            "sop",
            "eop",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
        ];
        let first = model.pieces.len() as TokenId;
        let mut added: Vec<AddedToken> = COMMANDS
            .iter()
            .zip(first..)
            .map(|(text, id)| AddedToken {
                text: (*text).to_owned(),
                ids: vec![id],
                special: true,
                // Ordinary letters, which are in many words.
                parsed: !matches!(*text, "sop" | "eop"),
            })
            .collect();
        let start = vec![first + 1, first + 3];
        added.push(AddedToken {
            text: "[gMASK]sop".to_owned(),
            ids: start.clone(),
            special: true,
            parsed: true,
        });
        Ok(TokenizerExtras { added, prefix: start, ..TokenizerExtras::default() })
    }

    /// ChatGLM-6B: white space is written as pieces; a prompt ends with `[gMASK] <sop>`.
    fn chatglm_6b(&self, model: &SentencePieceModel) -> Result<TokenizerExtras, TokenizerError> {
        let images = self.config.get("num_image_tokens").and_then(Value::as_u64).unwrap_or(20_000);
        let id_offset = u32::try_from(images).unwrap_or(u32::MAX);
        if id_offset > super::MAX_ID {
            return Err(TokenizerError::Companion {
                file: "tokenizer_config.json".to_owned(),
                reason: format!("num_image_tokens is {images}"),
            });
        }
        let mut suffix = Vec::new();
        for name in ["[gMASK]", "<sop>"] {
            let id = piece_id(model, name).ok_or_else(|| TokenizerError::SentencePiece {
                reason: format!("it has no piece `{name}`, which ChatGLM-6B needs"),
            })?;
            suffix.push(id + id_offset as TokenId);
        }
        Ok(TokenizerExtras { suffix, id_offset, glm_spaces: true, ..TokenizerExtras::default() })
    }

    /// The extras of a rank file.
    pub fn tiktoken(&self, file_name: &str, bytes: &[u8]) -> Result<TokenizerExtras, TokenizerError> {
        let mut added = self.added()?;
        let (pattern, prefix) = match self.class() {
            "QWenTokenizer" => (TiktokenPattern::Qwen, &[][..]),
            "" if file_name.contains("qwen") => (TiktokenPattern::Qwen, &[][..]),
            "ChatGLM4Tokenizer" | "ChatGLM4" => (TiktokenPattern::Cl100k, &["[gMASK]", "<sop>"][..]),
            "" | "LlamaTokenizer" | "PreTrainedTokenizer" => (TiktokenPattern::Cl100k, &[][..]),
            other => {
                return Err(TokenizerError::UnknownClass {
                    class: other.to_owned(),
                    detail:
                        "only its own code defines how it splits texts; QWenTokenizer, ChatGLM4Tokenizer and \
                         LlamaTokenizer are supported"
                            .to_owned(),
                });
            }
        };
        if pattern == TiktokenPattern::Qwen && added.is_empty() {
            added = qwen_tokens(count_ranks(bytes)? as TokenId);
        }
        let id = |name: &&str| added.iter().find(|added| added.text == **name)?.ids.first().copied();
        let prefix = prefix.iter().filter_map(id).collect();
        Ok(TokenizerExtras { added, prefix, pattern: Some(pattern), ..TokenizerExtras::default() })
    }

    /// `vocab.txt` as the tokenizer.json that the `transformers` library makes of it.
    pub fn word_pieces(&self, vocab: &[u8]) -> Result<Vec<u8>, TokenizerError> {
        let class = self.class();
        if !class.is_empty() && !WORD_PIECE_CLASSES.contains(&class) {
            return Err(TokenizerError::UnknownClass {
                class: class.to_owned(),
                detail: format!("of vocab.txt {} are known", WORD_PIECE_CLASSES.join(", ")),
            });
        }
        if self.flag("do_basic_tokenize") == Some(false) {
            return Err(TokenizerError::Companion {
                file: "tokenizer_config.json".to_owned(),
                reason: "do_basic_tokenize is false, and words are cut at white space only with that"
                    .to_owned(),
            });
        }
        let vocab = std::str::from_utf8(vocab).map_err(|e| TokenizerError::Json { reason: e.to_string() })?;
        let usual = WordPiece::of(vocab.lines().map(str::to_owned).collect());
        let token = |name: &str, usual: String| self.token(name).map_or(usual, str::to_owned);
        let mut others: Vec<String> = ["pad_token", "mask_token"]
            .into_iter()
            .zip(usual.others)
            .map(|(name, usual)| token(name, usual))
            .collect();
        others.extend(self.added()?.into_iter().filter(|added| added.special).map(|added| added.text));
        let pieces = WordPiece {
            lowercase: self.flag("do_lower_case").unwrap_or(true),
            strip_accents: self.flag("strip_accents"),
            chinese_chars: self.flag("tokenize_chinese_chars").unwrap_or(true),
            unknown: token("unk_token", usual.unknown),
            begin: token("cls_token", usual.begin),
            end: token("sep_token", usual.end),
            others,
            vocab: usual.vocab,
        };
        Ok(pieces.to_json()?.to_string().into_bytes())
    }

    /// `vocab.json` with `merges.txt` as the tokenizer.json that the `transformers` library makes of them.
    pub fn slow_bpe(&self, vocab: &[u8]) -> Result<Vec<u8>, TokenizerError> {
        let class = self.class();
        if !class.is_empty() && !BYTE_LEVEL_CLASSES.contains(&class) {
            return Err(TokenizerError::UnknownClass {
                class: class.to_owned(),
                detail: format!(
                    "with vocab.json and merges.txt only {} are known",
                    BYTE_LEVEL_CLASSES.join(", ")
                ),
            });
        }
        let merges = self.merges.as_deref().ok_or_else(|| TokenizerError::Companion {
            file: "merges.txt".to_owned(),
            reason: "it is missing, and vocab.json needs it".to_owned(),
        })?;
        let vocab: BTreeMap<String, TokenId> =
            serde_json::from_slice(vocab).map_err(|e| TokenizerError::Json { reason: e.to_string() })?;
        let merges = merges.lines().filter(|line| !line.starts_with("#version") && !line.trim().is_empty());
        let qwen2 = class == "Qwen2Tokenizer";
        let mut added: Vec<(String, TokenId, bool)> =
            self.added()?.into_iter().filter_map(|a| Some((a.text, *a.ids.first()?, a.special))).collect();
        let token = |name: &str| self.token(name).or_else(|| self.default_token(name));
        for name in ["bos_token", "eos_token", "unk_token", "pad_token"] {
            if let Some((text, id)) = token(name).and_then(|text| Some((text, *vocab.get(text)?)))
                && !added.iter().any(|(known, ..)| known == text)
            {
                added.push((text.to_owned(), id, true));
            }
        }
        added.sort_by_key(|(_, id, _)| *id);
        let bos = token("bos_token").filter(|_| self.flag("add_bos_token") == Some(true));
        let bpe = BpeParts {
            merges: merges.map(str::to_owned).collect(),
            regexes: if qwen2 { &[QWEN2] } else { &[GPT2] },
            nfc: qwen2,
            add_prefix_space: self.flag("add_prefix_space") == Some(true),
            bos: bos.and_then(|bos| Some((bos.to_owned(), *vocab.get(bos)?))),
            vocab: vocab.into_iter().collect(),
            added,
            ..BpeParts::default()
        };
        Ok(bpe.to_json().to_string().into_bytes())
    }
}

fn piece_id(model: &SentencePieceModel, name: &str) -> Option<TokenId> {
    let found = model.pieces.iter().position(|piece| piece.text == name && piece.kind != PieceKind::Unknown);
    found.and_then(|id| TokenId::try_from(id).ok())
}

/// The special tokens in the code of Qwen's first tokenizer.
fn qwen_tokens(first: TokenId) -> Vec<AddedToken> {
    let names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(str::to_owned);
    let extra = (0..205).map(|number| format!("<|extra_{number}|>"));
    let token = |(text, id)| AddedToken { text, ids: vec![id], special: true, parsed: true };
    names.into_iter().chain(extra).zip(first..).map(token).collect()
}

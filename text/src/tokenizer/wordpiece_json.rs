//! A `tokenizer.json` for WordPiece from its parts: `vocab.txt` of older BERT folders, and the list in GGUF
//! files. It is the one that the `transformers` library makes of them.

use serde_json::{Map, Value, json};

use super::{TokenId, TokenizerError};

/// A vocabulary in which `##` begins what goes on with a word.
#[derive(Debug)]
pub(super) struct WordPiece {
    /// Tokens in the order of their ids.
    pub vocab: Vec<String>,
    pub lowercase: bool,
    /// `None`: where letters become small.
    pub strip_accents: Option<bool>,
    /// Each Chinese character is a word.
    pub chinese_chars: bool,
    pub unknown: String,
    /// The tokens that begin a text, and that end each.
    pub begin: String,
    pub end: String,
    /// Further control tokens.
    pub others: Vec<String>,
}

impl WordPiece {
    /// The usual names, and small letters.
    pub fn of(vocab: Vec<String>) -> WordPiece {
        WordPiece {
            vocab,
            lowercase: true,
            strip_accents: None,
            chinese_chars: true,
            unknown: "[UNK]".into(),
            begin: "[CLS]".into(),
            end: "[SEP]".into(),
            others: vec!["[PAD]".into(), "[MASK]".into()],
        }
    }

    /// The last of several equal tokens counts.
    fn id(&self, token: &str) -> Option<TokenId> {
        let id = self.vocab.iter().rposition(|known| known == token)?;
        TokenId::try_from(id).ok()
    }

    pub fn to_json(&self) -> Result<Value, TokenizerError> {
        for needed in [&self.unknown, &self.begin, &self.end] {
            if self.id(needed).is_none() {
                let reason =
                    format!("the WordPiece vocabulary has no token {needed}, which its tokenizer needs");
                return Err(TokenizerError::Json { reason });
            }
        }
        let named = [&self.unknown, &self.begin, &self.end].into_iter().chain(&self.others);
        let mut special: Vec<(&String, TokenId)> =
            named.filter_map(|token| Some((token, self.id(token)?))).collect();
        special.sort_by_key(|(_, id)| *id);
        special.dedup();
        let added = special.iter().map(|(token, id)| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                   "special": true})
        });
        let vocab: Map<String, Value> = self
            .vocab
            .iter()
            .zip(0..)
            .map(|(token, id): (&String, TokenId)| (token.clone(), id.into()))
            .collect();
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": self.chinese_chars,
                           "strip_accents": self.strip_accents, "lowercase": self.lowercase},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": self.post_processor(),
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
            "model": {"type": "WordPiece", "unk_token": self.unknown, "continuing_subword_prefix": "##",
                      "max_input_chars_per_word": 100, "vocab": vocab},
        }))
    }

    fn post_processor(&self) -> Value {
        let special = |name: &String, kind: u32| json!({"SpecialToken": {"id": name, "type_id": kind}});
        let sequence = |id: &str, kind: u32| json!({"Sequence": {"id": id, "type_id": kind}});
        let first = [special(&self.begin, 0), sequence("A", 0), special(&self.end, 0)];
        let second = [sequence("B", 1), special(&self.end, 1)];
        let tokens: Map<String, Value> = [&self.begin, &self.end]
            .into_iter()
            .map(|name| (name.clone(), json!({"id": name, "ids": [self.id(name)], "tokens": [name]})))
            .collect();
        let pair = [&first[..], &second[..]].concat();
        json!({"type": "TemplateProcessing", "single": first, "pair": pair, "special_tokens": tokens})
    }
}

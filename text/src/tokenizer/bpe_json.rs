//! A `tokenizer.json` for BPE from its parts: `vocab.json` and `merges.txt` of older Hugging Face folders,
//! and the lists in GGUF files.

use serde_json::{Map, Value, json};

use super::TokenId;

/// The alphabet of the tokens of a vocabulary.
#[derive(Debug, Default)]
pub(super) enum BpeAlphabet {
    /// GPT-2's printable characters, one for each byte.
    #[default]
    Bytes,
    /// Texts with U+2581 for spaces; characters that are no token are bytes `<0xHH>`, or else this token.
    Text { unknown: Option<String> },
}

/// A vocabulary with its merges.
#[derive(Debug, Default)]
pub(super) struct BpeParts<'a> {
    pub alphabet: BpeAlphabet,
    pub vocab: Vec<(String, TokenId)>,
    /// `left right` each, best first.
    pub merges: Vec<String>,
    /// Text, id, and whether it is a control token.
    pub added: Vec<(String, TokenId, bool)>,
    pub regexes: &'a [&'a str],
    pub ignore_merges: bool,
    /// Unicode normalization form C first (Qwen2).
    pub nfc: bool,
    pub add_prefix_space: bool,
    /// Tokens that begin and end a prompt, by name and id.
    pub bos: Option<(String, TokenId)>,
    pub eos: Option<(String, TokenId)>,
    /// The token before the second of two texts, with the end token before it.
    pub separator: Option<(String, TokenId)>,
}

impl BpeParts<'_> {
    pub fn to_json(&self) -> Value {
        let vocab: Map<String, Value> =
            self.vocab.iter().map(|(token, id)| (token.clone(), Value::from(*id))).collect();
        let merges: Vec<Value> = self.merges.iter().map(|merge| pair(merge)).collect();
        let added = self.added.iter().map(|(text, id, special)| {
            json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": special})
        });
        let mut cuts: Vec<Value> = self
            .regexes
            .iter()
            .map(|regex| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}))
            .collect();
        let (normalizer, decoder, unknown) = match &self.alphabet {
            BpeAlphabet::Bytes => {
                cuts.push(json!({"type": "ByteLevel", "add_prefix_space": self.add_prefix_space, "trim_offsets": false,
                                 "use_regex": false}));
                let decoder = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
                (json!(self.nfc.then(|| json!({"type": "NFC"}))), decoder, None)
            }
            BpeAlphabet::Text { unknown } => {
                let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
                let decoder = json!({"type": "Sequence", "decoders":
                    [replace("\u{2581}", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]});
                (replace(" ", "\u{2581}"), decoder, unknown.as_ref())
            }
        };
        let is_text = matches!(self.alphabet, BpeAlphabet::Text { .. });
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
            "post_processor": self.post_processor(),
            "decoder": decoder,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": is_text, "byte_fallback": is_text,
                "ignore_merges": self.ignore_merges, "vocab": vocab, "merges": merges,
            },
        })
    }

    fn post_processor(&self) -> Value {
        let (bos, eos) = (self.bos.as_ref(), self.eos.as_ref());
        if bos.is_none() && eos.is_none() && self.separator.is_none() {
            return Value::Null;
        }
        let special = |name: &String| json!({"SpecialToken": {"id": name, "type_id": 0}});
        let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        let around = |inner: Vec<Value>| -> Vec<Value> {
            let bos = bos.iter().map(|(name, _)| special(name));
            bos.chain(inner).chain(eos.iter().map(|(name, _)| special(name))).collect()
        };
        let between: Vec<Value> = match &self.separator {
            Some((name, _)) => eos.iter().map(|(name, _)| special(name)).chain([special(name)]).collect(),
            None => Vec::new(),
        };
        let pair = [vec![sequence("A")], between, vec![sequence("B")]].concat();
        let tokens: Map<String, Value> = bos
            .into_iter()
            .chain(eos)
            .chain(&self.separator)
            .map(|(name, id)| (name.clone(), json!({"id": name, "ids": [id], "tokens": [name]})))
            .collect();
        json!({"type": "TemplateProcessing", "single": around(vec![sequence("A")]),
               "pair": around(pair), "special_tokens": tokens})
    }
}

/// The merge as a pair, so that tokens with spaces in them stay whole; a line that is no pair is left for the
/// reader to refuse.
fn pair(merge: &str) -> Value {
    // The first character may be a space that belongs to the left half.
    let cut = merge.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(at, _)| at);
    match cut {
        Some(at) => json!([merge[..at], merge[at + 1..]]),
        None => Value::from(merge),
    }
}

//! A `tokenizer.json` for byte-level BPE from its parts: `vocab.json` and `merges.txt` of older Hugging Face folders, and
//! the lists in GGUF files.

use serde_json::{Map, Value, json};

use super::TokenId;

/// A vocabulary in GPT-2's byte alphabet.
#[derive(Debug, Default)]
pub(super) struct ByteLevelBpe<'a> {
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
}

impl ByteLevelBpe<'_> {
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
        cuts.push(
            json!({"type": "ByteLevel", "add_prefix_space": self.add_prefix_space, "trim_offsets": false,
                         "use_regex": false}),
        );
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added.collect::<Vec<_>>(),
            "normalizer": self.nfc.then(|| json!({"type": "NFC"})),
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
            "post_processor": self.post_processor(),
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": self.ignore_merges, "vocab": vocab, "merges": merges,
            },
        })
    }

    fn post_processor(&self) -> Value {
        let (bos, eos) = (self.bos.as_ref(), self.eos.as_ref());
        if bos.is_none() && eos.is_none() {
            return Value::Null;
        }
        let special = |name: &String| json!({"SpecialToken": {"id": name, "type_id": 0}});
        let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        let around = |inner: Vec<Value>| -> Vec<Value> {
            let bos = bos.iter().map(|(name, _)| special(name));
            bos.chain(inner).chain(eos.iter().map(|(name, _)| special(name))).collect()
        };
        let tokens: Map<String, Value> = bos
            .iter()
            .chain(&eos)
            .map(|(name, id)| (name.clone(), json!({"id": name, "ids": [id], "tokens": [name]})))
            .collect();
        json!({"type": "TemplateProcessing", "single": around(vec![sequence("A")]),
               "pair": around(vec![sequence("A"), sequence("B")]), "special_tokens": tokens})
    }
}

/// As a pair, so that tokens with spaces in them stay whole; a line that is no pair is left for the reader to refuse.
fn pair(merge: &str) -> Value {
    // The first character may be a space that belongs to the left half.
    let cut = merge.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(at, _)| at);
    match cut {
        Some(at) => json!([merge[..at], merge[at + 1..]]),
        None => Value::from(merge),
    }
}

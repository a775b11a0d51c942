//! The most bytes of a text in one token: a text of more bytes than that times a context is too long, without
//! encoding it.
//!
//! Where a tokenizer can drop parts of a text, or make one token of a run of any length, there is no such
//! number.

use serde_json::Value;

use super::table::TokenTable;
use super::{TokenId, Tokenizer, TokenizerScheme};

/// Canonical and compatible composition make up to four bytes one (mathematical letters, Hangul syllables).
const COMPOSED: usize = 4;

impl Tokenizer {
    /// The most bytes of a text that become one token, if that is bounded.
    pub fn most_bytes_of_token(&self) -> Option<usize> {
        let longest = longest(self.table());
        let shrinks = match &self.scheme {
            // Every byte is a token.
            TokenizerScheme::RwkvWorld(_) => 1,
            TokenizerScheme::Tiktoken(_) => COMPOSED,
            TokenizerScheme::SentencePiece(sp) if sp.keeps_all_bytes() => 1,
            TokenizerScheme::SentencePiece(_) => return None,
            TokenizerScheme::Hf(hf) => {
                let parts = hf.parts()?;
                let bytes = &parts["model"]["byte_fallback"] == true || hf.has_byte_level();
                if !bytes || !has_all_bytes(self.table(), hf.has_byte_level(), hf) {
                    return None;
                }
                of_parts(&parts)?
            }
        };
        Some(longest.checked_mul(shrinks)?.max(1))
    }
}

fn longest(table: &TokenTable) -> usize {
    let ids = 0..TokenId::try_from(table.len()).unwrap_or(TokenId::MAX);
    ids.filter_map(|id| table.get(id)).map(|(bytes, _)| bytes.len()).max().unwrap_or(0)
}

/// Tells if nothing is unknown, as each byte has a token.
fn has_all_bytes(table: &TokenTable, byte_level: bool, hf: &super::HfTokenizer) -> bool {
    if !byte_level {
        return (0..=255u8).all(|byte| hf.token_to_id(&format!("<0x{byte:02X}>")).is_some());
    }
    let mut found = [false; 256];
    let ids = 0..TokenId::try_from(table.len()).unwrap_or(TokenId::MAX);
    for (bytes, _) in ids.filter_map(|id| table.get(id)) {
        if let [byte] = bytes {
            found[usize::from(*byte)] = true;
        }
    }
    found.iter().all(|&found| found)
}

/// The most bytes that the parts of a `tokenizer.json` make one; `None` if they may drop some.
fn of_parts(parts: &Value) -> Option<usize> {
    let model = &parts["model"];
    let affixes = ["continuing_subword_prefix", "end_of_word_suffix"];
    let plain = affixes.iter().all(|name| model[*name].as_str().unwrap_or_default().is_empty());
    // Tokens that take adjacent blanks along contain any number of these.
    let strips = |token: &Value| token["lstrip"] == true || token["rstrip"] == true;
    let added = parts["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
    if model["type"] != "BPE" || !plain || added.iter().any(strips) || !keeps_all(&parts["pre_tokenizer"]) {
        return None;
    }
    shrinks(&parts["normalizer"])
}

/// Tells if a pre-tokenizer cuts a text without leaving anything out.
fn keeps_all(part: &Value) -> bool {
    match part["type"].as_str() {
        None => part.is_null(),
        Some("Sequence") => part["pretokenizers"].as_array().is_some_and(|parts| parts.iter().all(keeps_all)),
        Some("ByteLevel" | "Metaspace" | "Digits") => true,
        Some("Split" | "Punctuation") => part["behavior"].as_str().is_some_and(|kind| kind != "Removed"),
        Some(_) => false,
    }
}

/// The most bytes that a normalizer makes one.
fn shrinks(part: &Value) -> Option<usize> {
    match part["type"].as_str() {
        None => part.is_null().then_some(1),
        Some("Sequence") => {
            let parts = part["normalizers"].as_array()?;
            parts.iter().try_fold(1usize, |all, part| all.checked_mul(shrinks(part)?))
        }
        Some("NFC" | "NFKC" | "NFD" | "NFKD" | "Lowercase") => Some(COMPOSED),
        Some("Prepend" | "ByteLevel") => Some(1),
        Some("Replace") => {
            let from = part["pattern"]["String"].as_str()?.len();
            let to = part["content"].as_str()?.len();
            (to > 0).then(|| from.div_ceil(to).max(1))
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn llama() -> Value {
        json!({
            "added_tokens": [{"id": 1, "content": "<s>", "lstrip": false, "rstrip": false}],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ]},
            "pre_tokenizer": null,
            "model": {"type": "BPE", "byte_fallback": true, "continuing_subword_prefix": null},
        })
    }

    #[test]
    fn parts_that_drop_something_have_no_bound() {
        assert_eq!(of_parts(&llama()), Some(1));
        let with = |at: &str, value: Value| {
            let mut parts = llama();
            parts[at] = value;
            of_parts(&parts)
        };
        assert_eq!(with("normalizer", Value::Null), Some(1));
        assert_eq!(with("normalizer", json!({"type": "NFC"})), Some(4));
        let replace = |to: &str| json!({"type": "Replace", "pattern": {"String": "abcde"}, "content": to});
        assert_eq!(with("normalizer", replace("xy")), Some(3));
        assert_eq!(
            with("normalizer", json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, replace("x")]})),
            Some(20)
        );
        for drops in [
            replace(""),
            json!({"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}),
            json!({"type": "Strip", "strip_left": true, "strip_right": true}),
            json!({"type": "StripAccents"}),
            json!({"type": "BertNormalizer"}),
            json!({"type": "Precompiled", "precompiled_charsmap": ""}),
        ] {
            assert_eq!(with("normalizer", drops.clone()), None, "{drops}");
        }
        assert_eq!(with("pre_tokenizer", json!({"type": "ByteLevel"})), Some(1));
        let split = |behavior| json!({"type": "Split", "pattern": {"String": " "}, "behavior": behavior});
        assert_eq!(
            with("pre_tokenizer", json!({"type": "Sequence", "pretokenizers": [split("Isolated")]})),
            Some(1)
        );
        for drops in [split("Removed"), json!({"type": "Whitespace"}), json!({"type": "BertPreTokenizer"})] {
            assert_eq!(with("pre_tokenizer", drops.clone()), None, "{drops}");
        }
        assert_eq!(with("model", json!({"type": "WordPiece"})), None);
        assert_eq!(with("model", json!({"type": "Unigram"})), None);
        assert_eq!(with("model", json!({"type": "BPE", "end_of_word_suffix": "</w>"})), None);
        assert_eq!(
            with("added_tokens", json!([{"content": "<mask>", "lstrip": true, "rstrip": false}])),
            None
        );
    }
}

//! Small vocabularies for tests, also for those of `mlcc-engine`.

use std::fmt::Write as _;

use mlcc_text::{Tokenizer, TokenizerKind};

/// An RWKV World vocabulary: all bytes, then `words` from id 257 on.
pub fn world_vocabulary(words: &[&[u8]]) -> String {
    let mut file = String::new();
    let singles = (0..=255u8).map(|b| vec![b]);
    for (index, token) in singles.chain(words.iter().map(|w| w.to_vec())).enumerate() {
        writeln!(file, "{} {} {}", index + 1, python_repr(&token), token.len()).unwrap();
    }
    file
}

/// The bytes as Python writes them, `str` where they are text.
fn python_repr(bytes: &[u8]) -> String {
    let mut body = String::new();
    if let Ok(text) = std::str::from_utf8(bytes) {
        text.chars().for_each(|c| escape(&mut body, c));
        return format!("'{body}'");
    }
    for &b in bytes {
        if b < 0x80 {
            escape(&mut body, char::from(b));
        } else {
            write!(body, "\\x{b:02x}").unwrap();
        }
    }
    format!("b'{body}'")
}

fn escape(body: &mut String, c: char) {
    match c {
        '\\' => body.push_str("\\\\"),
        '\'' => body.push_str("\\'"),
        '\n' => body.push_str("\\n"),
        '\r' => body.push_str("\\r"),
        '\t' => body.push_str("\\t"),
        ' '..='~' | '\u{a1}'.. => body.push(c),
        c => write!(body, "\\x{:02x}", u32::from(c)).unwrap(),
    }
}

pub fn world(words: &[&[u8]]) -> Tokenizer {
    Tokenizer::from_bytes(TokenizerKind::RwkvWorld, world_vocabulary(words).as_bytes()).unwrap()
}

/// A tokenizer in sentencepiece's manner: a begin token, spaces as `▁`, byte fallback, a leading space that
/// is dropped when decoding. Ids: 0 `<unk>`, 1 `<s>`, 2 `</s>`, 3 to 258 bytes, then pieces.
pub fn sentencepiece_json() -> String {
    let mut vocab = serde_json::Map::new();
    let names = ["<unk>", "<s>", "</s>"].map(String::from).into_iter();
    let bytes = (0..=255u8).map(|b| format!("<0x{b:02X}>"));
    let pieces = ["▁", "a", "b", "c", "▁a", "ab", "▁ab"].map(String::from);
    for (id, token) in names.chain(bytes).chain(pieces).enumerate() {
        vocab.insert(token, id.into());
    }
    let special = |id: u32, content: &str| {
        serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    };
    serde_json::json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": [["▁", "a"], ["a", "b"], ["▁", "ab"], ["▁a", "b"]]},
    })
    .to_string()
}

pub fn sentencepiece() -> Tokenizer {
    Tokenizer::from_bytes(TokenizerKind::HfJson, sentencepiece_json().as_bytes()).unwrap()
}

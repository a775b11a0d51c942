//! Tokenizers of a few kilobytes that would make gigabytes of a text.

use crate::common;
use mlcc_text::tokenizer::{GgufVocabulary, TokenizerError};
use mlcc_text::{Tokenizer, TokenizerKind};
use serde_json::{Value, json};

/// The tokenizer.json of the tests with one field changed.
fn with(field: &str, value: Value) -> Result<Tokenizer, TokenizerError> {
    let mut file: Value = serde_json::from_str(&common::sentencepiece_json()).unwrap();
    file[field] = value;
    Tokenizer::from_bytes(TokenizerKind::HfJson, file.to_string().as_bytes())
}

fn replace(from: &str, to: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": from}, "content": to})
}

#[test]
fn normalizers_that_grow_are_refused_at_the_text() {
    let ten = json!({"type": "Sequence", "normalizers": vec![replace("h", &"h".repeat(10)); 8]});
    let tokenizer = with("normalizer", ten).unwrap();
    tokenizer.encode("ab").unwrap();
    let error = tokenizer.encode_prompt("h").unwrap_err();
    assert!(matches!(error, TokenizerError::TooLong { bytes: 1, .. }), "{error}");
}

#[test]
fn templates_that_grow_are_refused() {
    let piece = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    let template = |single: Vec<Value>, ids: usize| {
        json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens":
            {"<s>": {"id": "<s>", "ids": vec![1; ids], "tokens": vec!["<s>"; ids]}}})
    };
    with("post_processor", template(vec![piece.clone(), text.clone()], 3)).unwrap();
    let many = [vec![piece; 2000], vec![text.clone()]].concat();
    for grown in [template(many, 1000), template(vec![text.clone(), text], 1)] {
        let inside = json!({"type": "Sequence", "processors": [grown.clone()]});
        for processor in [grown, inside] {
            let error = with("post_processor", processor).unwrap_err();
            assert!(matches!(error, TokenizerError::Grows { .. }), "{error}");
        }
    }
}

#[test]
fn decoders_that_grow_are_refused() {
    let ten = vec![replace("a", &"a".repeat(10)); 8];
    let error = with("decoder", json!({"type": "Sequence", "decoders": ten})).unwrap_err();
    assert!(matches!(error, TokenizerError::Grows { .. }), "{error}");
    let many = vec![replace("a", "a"); 200];
    let error = with("decoder", json!({"type": "Sequence", "decoders": many})).unwrap_err();
    assert!(error.to_string().contains("100"), "{error}");
}

#[test]
fn long_texts_of_a_file_are_not_repeated() {
    let token = |content: String| {
        json!([{"id": 9, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}])
    };
    for length in [1 << 10, 1 << 17, 1 << 22] {
        let error = with("added_tokens", token("x".repeat(length))).unwrap_err().to_string();
        assert!(error.contains("xxx...") && error.len() < 1000, "{} bytes", error.len());
    }
    let mut file: Value = serde_json::from_str(&common::sentencepiece_json()).unwrap();
    file["model"]["continuing_subword_prefix"] = "#".repeat(1 << 20).into();
    let error = Tokenizer::from_bytes(TokenizerKind::HfJson, file.to_string().as_bytes()).unwrap_err();
    assert!(error.to_string().contains("continuing_subword_prefix"), "{error}");
}

/// A table that puts a long text in the place of `a`: a trie with one key, in the layout of darts-clone.
#[test]
fn sentencepiece_tables_that_grow_are_refused_at_the_text() {
    let mut vocabulary = GgufVocabulary {
        model: "t5".to_owned(),
        tokens: ["<unk>", "\u{2581}", "a", "b"].map(str::to_owned).to_vec(),
        scores: vec![0.0, -1.0, -2.0, -3.0],
        token_types: vec![2, 1, 1, 1],
        ..GgufVocabulary::default()
    };
    // Node 0 points to 256 ^ byte; the unit there has the byte and a leaf, whose value is the start of the
    // text.
    let mut units = vec![0u32; 1024];
    units[0] = 256 << 10;
    let node = 256 ^ usize::from(b'a');
    units[node] = u32::from(b'a') | 1 << 8 | 512 << 10;
    units[node ^ 512] = 0x8000_0000;
    vocabulary.precompiled_charsmap = (units.len() as u32 * 4).to_le_bytes().to_vec();
    vocabulary.precompiled_charsmap.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
    let load = |text: &str| {
        let mut vocabulary = vocabulary.clone();
        vocabulary.precompiled_charsmap.extend(text.as_bytes());
        vocabulary.precompiled_charsmap.push(0);
        vocabulary.to_file(std::path::Path::new("model.gguf")).unwrap().load().unwrap()
    };
    assert_eq!(load("b").encode("a").unwrap(), load("b").encode("b").unwrap());
    let tokenizer = load(&"b".repeat(1 << 20));
    assert!(tokenizer.encode("b").is_ok());
    let error = tokenizer.encode(&"a".repeat(1000)).unwrap_err();
    assert!(matches!(error, TokenizerError::TooLong { bytes: 1000, .. }), "{error}");
}

//! Encodings and decodings of other implementations.

use crate::common;
use std::path::{Path, PathBuf};

use mlcc_engine::tokenizer::Added;
use mlcc_engine::{DecodeStream, SpecialTokens, TokenId, Tokenizer, TokenizerFile, TokenizerKind};
use serde_json::Value;

fn ids(value: &Value) -> Vec<TokenId> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as TokenId).collect()
}

fn check(folder: &Path, special: SpecialTokens) -> Tokenizer {
    let tokenizer = Tokenizer::from_dir(folder).unwrap();
    let golden = std::fs::read(folder.join("tokenizer_golden.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() >= 10);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(tokenizer.encode_prompt(text).unwrap(), expected, "{text:?}");
        let decoded = case["decoded"].as_str().unwrap();
        assert_eq!(tokenizer.decode(&expected, special), decoded);
        let mut stream = DecodeStream::new(&tokenizer, special);
        let mut streamed = String::new();
        for id in expected {
            streamed.extend(stream.push(id));
        }
        streamed.extend(stream.finish());
        assert_eq!(streamed, decoded);
    }
    for chat in golden["chat"].as_array().into_iter().flatten() {
        assert_eq!(tokenizer.encode(chat["rendered"].as_str().unwrap()).unwrap(), ids(&chat["ids"]));
    }
    tokenizer
}

#[test]
fn tiny_books_of_the_project() {
    let tokenizer = check(&common::tiny_books(), SpecialTokens::Keep);
    assert_eq!(tokenizer.vocab_size(), 4096);
    assert_eq!(tokenizer.special_ids(), [0]);
    assert_eq!(tokenizer.decode(&[65, 0, 66], SpecialTokens::Skip), "ab");
    tokenizer.check_vocab(4096).unwrap();
}

#[test]
fn gpt2() {
    if let Some(folder) = common::shared("goldens/gpt2") {
        check(&folder, SpecialTokens::Keep);
    }
}

#[test]
fn qwen2_with_chat() {
    if let Some(folder) = common::shared("goldens/qwen2") {
        assert_eq!(check(&folder, SpecialTokens::Keep).special_ids(), [597, 598, 599]);
    }
}

#[test]
fn llama_with_begin_token() {
    if let Some(folder) = common::shared("goldens/llama-mha") {
        let tokenizer = check(&folder, SpecialTokens::Skip);
        assert_eq!(tokenizer.encode("Hello world").unwrap()[0], 384);
        assert_eq!(tokenizer.token_to_id("</s>"), Some(2));
    }
}

#[test]
fn rwkv_world() {
    if let Some(folder) = common::shared("goldens/tokenizer-rwkv-world") {
        let tokenizer = check(&folder, SpecialTokens::Skip);
        assert_eq!(tokenizer.vocab_size(), 65530);
        tokenizer.check_vocab(65536).unwrap();
    }
}

#[test]
fn evaluation_text_has_the_stated_tokens() {
    let Some(text) = common::shared("models/rwkv4-tiny-books/valid.txt") else { return };
    let tokenizer = Tokenizer::from_dir(&common::tiny_books()).unwrap();
    let tokens = tokenizer.encode(&std::fs::read_to_string(text).unwrap()).unwrap();
    // eval.json beside the model: 26635 tokens, 104 windows, 26520 scored.
    assert_eq!(tokens.len(), 26635);
    let windows = mlcc_engine::eval::Windows::new(&tokens, Default::default(), 4096).unwrap();
    assert_eq!(windows.count(), 104);
    assert_eq!(windows.iter().map(|w| w.tokens.len() - w.first_scored).sum::<usize>(), 26520);
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// Small models of sentencepiece and tiktoken, with what these libraries make of texts (`tools/tokenizer_cases.py`).
#[test]
fn small_models_of_the_reference_libraries() {
    let files: Value = serde_json::from_slice(&std::fs::read(data("tokenizer_cases.json")).unwrap()).unwrap();
    let files = files.as_array().unwrap();
    assert_eq!(files.len(), 7);
    for file in files {
        let name = file["file"].as_str().unwrap();
        let mut read = TokenizerFile::read(&data(name)).unwrap();
        // Qwen's are known by the file's name; for others they come from tokenizer_config.json.
        if name == "digits.tiktoken" {
            let special = file["special"].as_object().unwrap().iter();
            let added = special.map(|(text, id)| Added {
                text: text.clone(),
                ids: vec![id.as_i64().unwrap() as TokenId],
                special: true,
                parsed: true,
            });
            read.extras.added = added.collect();
        }
        // Through the form that the artifact carries.
        let tokenizer = Tokenizer::from_section(&read.to_section()).unwrap();
        let is_sentence_piece = name.ends_with(".model");
        for case in file["cases"].as_array().unwrap() {
            let (text, expected) = (case["text"].as_str().unwrap(), ids(&case["ids"]));
            // The unknown token has a name here, and " ⁇ " in sentencepiece.
            let decoded = case["decoded"].as_str().unwrap().replace(" \u{2047} ", "");
            if is_sentence_piece && text.contains("<s>") {
                continue;
            }
            assert_eq!(tokenizer.encode(text).unwrap(), expected, "{name}: {text:?}");
            if !expected.contains(&0) || !is_sentence_piece {
                assert_eq!(tokenizer.decode(&expected, SpecialTokens::Keep), decoded, "{name}: {text:?}");
            }
        }
    }
}

/// The same ids from `tokenizer.model` as from `tokenizer.json`.
#[test]
fn llama_from_its_sentencepiece_model() {
    let Some(folder) = common::shared("goldens/llama-mha") else { return };
    let own = tempfile::tempdir().unwrap();
    for file in ["tokenizer.model", "tokenizer_config.json", "tokenizer_golden.json"] {
        std::fs::copy(folder.join(file), own.path().join(file)).unwrap();
    }
    let tokenizer = check(own.path(), SpecialTokens::Skip);
    assert_eq!(tokenizer.kind(), TokenizerKind::SentencePiece);
    let json = Tokenizer::from_dir(&folder).unwrap();
    assert_eq!(tokenizer.vocab_size(), json.vocab_size());
    for text in ["<s>[INST] Hi [/INST] Hello </s><s>[INST] x", " a", "\u{0}\u{7f}é😀\n\n", "</s>", "a<s> b"]
    {
        assert_eq!(tokenizer.encode(text).unwrap(), json.encode(text).unwrap(), "{text:?}");
    }
}

/// `vocab.json` and `merges.txt` give what `tokenizer.json` gives.
#[test]
fn gpt2_from_vocabulary_and_merges() {
    let Some(folder) = common::shared("goldens/gpt2") else { return };
    let own = tempfile::tempdir().unwrap();
    for file in ["vocab.json", "merges.txt", "tokenizer_config.json", "tokenizer_golden.json"] {
        std::fs::copy(folder.join(file), own.path().join(file)).unwrap();
    }
    let tokenizer = check(own.path(), SpecialTokens::Keep);
    assert_eq!(tokenizer.special_ids(), Tokenizer::from_dir(&folder).unwrap().special_ids());
    std::fs::remove_file(own.path().join("merges.txt")).unwrap();
    let error = TokenizerFile::read(&own.path().join("vocab.json")).unwrap_err().to_string();
    assert!(error.contains("merges.txt"), "{error}");
}

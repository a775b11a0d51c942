//! Tokenizers of GGUF files by the names that llama.cpp gives them.

use mlcc_text::tokenizer::{GgufVocabulary, TokenizerError};
use mlcc_text::{SpecialTokens, TokenId, Tokenizer};
use serde_json::Value;

/// Names without a tokenizer: their texts are cut by rules that are no expressions, or there are none.
const REFUSED: &[&str] = &[
    "pre whitespace",
    "model hybriddna",
    "model whitespace",
    "model plamo2",
    "model none",
    "model no_vocab",
];

fn data() -> Value {
    serde_json::from_str(include_str!("../data/gguf_tokenizers.json")).unwrap()
}

fn load(vocabulary: &GgufVocabulary) -> Result<Tokenizer, TokenizerError> {
    vocabulary.to_file(std::path::Path::new("model.gguf"))?.load()
}

/// The vocabularies of the data with the names of each kind of file.
fn vocabularies() -> Vec<(GgufVocabulary, Value)> {
    let strings = |value: &Value| -> Vec<String> {
        value.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    let vocabulary = |value: &Value| GgufVocabulary {
        model: value["model"].as_str().unwrap().to_owned(),
        pre: value["pre"].as_str().map(str::to_owned),
        tokens: strings(&value["tokens"]),
        token_types: value["token_types"]
            .as_array()
            .unwrap()
            .iter()
            .map(|t| t.as_i64().unwrap() as i32)
            .collect(),
        merges: strings(&value["merges"]),
        ..GgufVocabulary::default()
    };
    data()["vocabularies"].as_array().unwrap().iter().map(|v| (vocabulary(v), v["cases"].clone())).collect()
}

#[test]
fn ids_are_those_of_the_tokenizers_library() {
    for (vocabulary, cases) in vocabularies() {
        let tokenizer = load(&vocabulary).unwrap();
        for case in cases.as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let expected: Vec<TokenId> =
                case["ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as TokenId).collect();
            assert_eq!(tokenizer.encode(text).unwrap(), expected, "{}: {text:?}", vocabulary.model);
            assert_eq!(tokenizer.decode(&expected, SpecialTokens::Skip), text);
        }
    }
}

#[test]
fn every_name_is_read_or_refused_with_a_way_out() {
    let [(bytes, cases), (texts, _)] = &vocabularies()[..] else { panic!("two vocabularies") };
    let names = include_str!("../data/gguf_names.txt").lines().filter(|line| !line.starts_with('#'));
    let mut refused = Vec::new();
    for name in names {
        let vocabulary = match name.split_once(' ').unwrap() {
            ("pre", pre) => match pre {
                "gemma4" | "granite-embed-multi-311m" | "sarvam-moe" => {
                    GgufVocabulary { model: "gpt2".to_owned(), pre: Some(pre.to_owned()), ..texts.clone() }
                }
                _ => GgufVocabulary { pre: Some(pre.to_owned()), ..bytes.clone() },
            },
            // Kinds with vocabularies of their own have tests of their own.
            (_, "llama" | "bert" | "t5" | "rwkv") => continue,
            (_, "gemma4") => texts.clone(),
            (_, model) => GgufVocabulary { model: model.to_owned(), ..bytes.clone() },
        };
        match load(&vocabulary) {
            Ok(tokenizer) => {
                for case in cases.as_array().unwrap() {
                    let text = case["text"].as_str().unwrap();
                    // One of them composes letters.
                    if name != "pre qwen2" {
                        let ids = tokenizer.encode(text).unwrap();
                        assert_eq!(tokenizer.decode(&ids, SpecialTokens::Skip), text, "{name}");
                    }
                }
            }
            Err(error) => {
                assert!(error.to_string().contains("--tokenizer tokenizer.json"), "{name}: {error}");
                refused.push(name);
            }
        }
    }
    assert_eq!(refused, REFUSED);
}

#[test]
fn begin_tokens_and_separators() {
    let [(bytes, _), (texts, _)] = &vocabularies()[..] else { panic!("two vocabularies") };
    let denied = GgufVocabulary { bos_token_id: Some(2), add_bos_token: Some(false), ..texts.clone() };
    // Early files of Gemma 4 deny it.
    assert_eq!(load(&denied).unwrap().encode_prompt("a").unwrap()[0], 2);
    let pair = GgufVocabulary {
        pre: Some("roberta-bpe".to_owned()),
        bos_token_id: Some(1),
        eos_token_id: Some(2),
        separator_token_id: Some(2),
        add_bos_token: Some(true),
        add_eos_token: Some(true),
        ..bytes.clone()
    };
    let id = |text: &str| load(&pair).unwrap().encode(text).unwrap()[0];
    let (ids, _) = load(&pair).unwrap().encode_pair("a", "b").unwrap();
    assert_eq!(ids, [1, id("a"), 2, 2, id("b"), 2]);
}

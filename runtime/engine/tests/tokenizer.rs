//! Tokenizers from memory, streams, and files that are wrong.

mod common;

use mlcc_engine::special::SpecialSources;
use mlcc_engine::tokenizer::TokenizerError;
use mlcc_engine::{
    DecodeStream, SpecialIds, SpecialTokens, TokenId, Tokenizer, TokenizerFile, TokenizerKind,
};
use proptest::prelude::*;

fn world_error(file: &str) -> String {
    Tokenizer::from_bytes(TokenizerKind::RwkvWorld, file.as_bytes()).unwrap_err().to_string()
}

#[test]
fn world_takes_the_longest_match() {
    let words: [&[u8]; 6] = [b"ab", b"abcd", b" a", "é".as_bytes(), &[0xa9, b'x'], b"'\\\n"];
    let tokenizer = common::world(&words);
    assert_eq!(tokenizer.vocab_size(), 263);
    // No match for "abc": back to "ab".
    assert_eq!(tokenizer.encode("abcabcd").unwrap(), [257, i32::from(b'c') + 1, 258]);
    assert_eq!(tokenizer.encode("é\u{fe}").unwrap(), [260, 0xc3 + 1, 0xbe + 1]);
    // 0xC3 0xA9 is taken whole although 0xA9 'x' begins inside of it.
    assert_eq!(tokenizer.encode("éx").unwrap(), [260, i32::from(b'x') + 1]);
    assert_eq!(tokenizer.encode("'\\\n").unwrap(), [262]);
    assert!(tokenizer.encode("").unwrap().is_empty());
    assert_eq!(tokenizer.bytes_of(261), Some(&[0xa9, b'x'][..]));
    assert_eq!(tokenizer.bytes_of(263), None);
    assert_eq!(tokenizer.bytes_of(-1), None);
    assert!(tokenizer.is_special(0) && !tokenizer.is_special(1));
    assert_eq!(tokenizer.decode(&[0, 257, 9999, 258], SpecialTokens::Skip), "ababcd");
}

#[test]
fn world_files_that_are_wrong() {
    let good = common::world_vocabulary(&[b"ab"]);
    assert!(world_error("").contains("no tokens"));
    let cases = [
        ("258 'cd' 3\n", "line 258"),
        ("258 'cd 2\n", "quoted Python"),
        ("258 'cd'\n", "ID REPR LENGTH"),
        ("x 'cd' 2\n", "ID REPR LENGTH"),
        ("0 'cd' 2\n", "an id from 1"),
        ("99999999 'cd' 2\n", "an id from 1"),
        ("257 'cd' 2\n", "each id once"),
        ("258 'ab' 2\n", "each token once"),
        ("258 '' 0\n", "as many bytes"),
        ("258 '\\q' 1\n", "an escape"),
    ];
    for (line, expected) in cases {
        let message = world_error(&format!("{good}{line}"));
        assert!(message.contains(expected) && message.contains("line"), "{line:?}: {message}");
    }
    let missing: String =
        good.lines().filter(|line| !line.starts_with("98 ")).map(|line| format!("{line}\n")).collect();
    assert!(world_error(&missing).contains("0x61"));
    let not_text = Tokenizer::from_bytes(TokenizerKind::RwkvWorld, b"1 'a' 1\n\xff").unwrap_err();
    assert!(not_text.to_string().contains("line 2"), "{not_text}");
}

#[test]
fn sentencepiece_spaces_and_bytes() {
    let tokenizer = common::sentencepiece();
    // Also: the truncation in the file (to 3 tokens) is not applied.
    let ids = tokenizer.encode_prompt("ab c\nab").unwrap();
    assert_eq!(ids[0], 1);
    assert_eq!(tokenizer.encode("ab c\nab").unwrap(), ids[1..]);
    assert_eq!(tokenizer.decode(&ids, SpecialTokens::Skip), "ab c\nab");
    assert_eq!(tokenizer.decode(&ids, SpecialTokens::Keep), "<s> ab c\nab");
    assert_eq!(tokenizer.bytes_of(ids[1]), Some(&b" ab"[..]));

    // After a prompt the space between words stays.
    let mut stream = DecodeStream::continuing(&tokenizer, SpecialTokens::Skip);
    assert_eq!(stream.push(ids[1]), Some(" ab"));
    let mut stream = DecodeStream::new(&tokenizer, SpecialTokens::Skip);
    assert_eq!(stream.push(1), None);
    assert_eq!(stream.push(ids[1]), Some("ab"));
}

#[test]
fn json_files_that_are_wrong() {
    let load = |json: &str| Tokenizer::from_bytes(TokenizerKind::HfJson, json.as_bytes());
    let good = common::sentencepiece_json();
    assert!(load(&good).is_ok());
    for bad in ["", "{}", "[1]", &good[..good.len() / 2], &good.replace("\"BPE\"", "\"Magic\"")] {
        assert!(matches!(load(bad), Err(TokenizerError::Json { .. })), "{bad:.40}");
    }
    // The library would renumber this token.
    let moved = good.replacen("\"id\":2,", "\"id\":7000,", 1);
    assert_ne!(moved, good);
    let message = load(&moved).unwrap_err().to_string();
    assert!(message.contains("</s>") && message.contains("7000"), "{message}");
    let huge = good.replace("\"c\":262", "\"c\":4000000000");
    assert_ne!(huge, good);
    assert!(matches!(load(&huge), Err(TokenizerError::HugeId { .. })));
    let template = good.replace("\"ids\":[1]", "\"ids\":[999]");
    assert!(load(&template).unwrap_err().to_string().contains("id 999, which is no token"));
    let template = good.replace("{\"SpecialToken\":{\"id\":\"<s>\"", "{\"SpecialToken\":{\"id\":\"<q>\"");
    assert!(load(&template).unwrap_err().to_string().contains("\"<q>\" has no ids"));
    let wordpiece = good.replace("\"ByteFallback\"", "\"CTC\"");
    assert!(load(&wordpiece).is_err());
}

#[test]
fn ids_beyond_the_vocabulary() {
    let tokenizer = common::sentencepiece();
    assert_eq!(tokenizer.vocab_size(), 266);
    tokenizer.check_vocab(266).unwrap();
    tokenizer.check_vocab(32000).unwrap();
    let message = tokenizer.check_vocab(264).unwrap_err().to_string();
    assert!(
        message.contains("264") && message.contains("2 token(s)") && message.contains("265"),
        "{message}"
    );
}

#[test]
fn files_and_sections() {
    let folder = tempfile::tempdir().unwrap();
    let error = TokenizerFile::find(folder.path()).unwrap_err();
    assert!(error.to_string().contains("--tokenizer"), "{error}");
    assert!(matches!(
        TokenizerFile::read(&folder.path().join("a.bin")),
        Err(TokenizerError::UnknownFile { .. })
    ));
    assert!(matches!(TokenizerFile::read(&folder.path().join("a.json")), Err(TokenizerError::Io { .. })));

    std::fs::write(folder.path().join("rwkv_vocab_v20230424.txt"), common::world_vocabulary(&[b"ab"]))
        .unwrap();
    assert_eq!(Tokenizer::from_dir(folder.path()).unwrap().kind(), TokenizerKind::RwkvWorld);
    std::fs::write(folder.path().join("tokenizer.json"), common::sentencepiece_json()).unwrap();
    let file = TokenizerFile::find(folder.path()).unwrap();
    assert_eq!(file.kind, TokenizerKind::HfJson);

    let section = file.to_section();
    let tokenizer = Tokenizer::from_section(&section).unwrap();
    assert_eq!(tokenizer.encode("ab").unwrap(), file.load().unwrap().encode("ab").unwrap());
    assert!(matches!(Tokenizer::from_section(b"tiktoken\nxyz"), Err(TokenizerError::UnknownKind { .. })));
    assert!(Tokenizer::from_section(b"").is_err());
    assert!(Tokenizer::from_section(&section[..section.len() / 2]).is_err());

    std::fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
    let message = Tokenizer::from_dir(folder.path()).unwrap_err().to_string();
    assert!(message.contains("tokenizer.json"), "{message}");
}

#[test]
fn begin_and_end_tokens() {
    let tokenizer = common::sentencepiece();
    let tokenizer_config: &[u8] =
        br#"{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}}"#;
    let by_name = SpecialSources { tokenizer_config: Some(tokenizer_config), ..SpecialSources::default() };
    let expected = SpecialIds { bos: Some(1), eos: vec![2] };
    assert_eq!(SpecialIds::resolve(&tokenizer, by_name).unwrap(), expected);
    let all = SpecialSources {
        generation_config: Some(br#"{"eos_token_id": [2, 5]}"#),
        config: Some(br#"{"bos_token_id": 7, "eos_token_id": 9}"#),
        ..by_name
    };
    assert_eq!(SpecialIds::resolve(&tokenizer, all).unwrap(), SpecialIds { bos: Some(7), eos: vec![2, 5] });
    let bad = SpecialSources { config: Some(br#"{"eos_token_id": "x"}"#), ..SpecialSources::default() };
    assert!(SpecialIds::resolve(&tokenizer, bad).unwrap_err().to_string().contains("config.json"));
    let world = SpecialIds::resolve(&common::world(&[]), SpecialSources::default()).unwrap();
    assert_eq!(world.eos, [0]);
}

fn streamed(tokenizer: &Tokenizer, ids: &[TokenId], special: SpecialTokens) -> String {
    let mut stream = DecodeStream::new(tokenizer, special);
    let mut text = String::new();
    for &id in ids {
        text.extend(stream.push(id));
    }
    text.extend(stream.finish());
    text
}

fn check_stream(tokenizer: &Tokenizer, ids: &[TokenId]) -> Result<(), TestCaseError> {
    for special in [SpecialTokens::Skip, SpecialTokens::Keep] {
        prop_assert_eq!(streamed(tokenizer, ids, special), tokenizer.decode(ids, special));
    }
    Ok(())
}

proptest! {
    #[test]
    fn world_stream_equals_decode(ids in proptest::collection::vec(-2i32..270, 0..32)) {
        check_stream(&common::world(&[b"ab", &[0xf0, 0x9f], &[0x98, 0x80, b'!'], "é".as_bytes()]), &ids)?;
    }

    #[test]
    fn sentencepiece_stream_equals_decode(ids in proptest::collection::vec(prop_oneof![-1i32..270, 258i32..262], 0..24)) {
        check_stream(&common::sentencepiece(), &ids)?;
    }

    #[test]
    fn world_round_trip(text in "\\PC{0,40}") {
        let tokenizer = common::world(&[b"the", b" th", "é".as_bytes(), &[0xe2, 0x80]]);
        let ids = tokenizer.encode(&text).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids, SpecialTokens::Skip), text);
    }
}

/// Damages a file: bytes at some places replaced, maybe cut off.
fn damage(file: &str, places: &[(u32, u8)], keep: u32) -> Vec<u8> {
    let mut bytes = file.as_bytes().to_vec();
    for &(place, byte) in places {
        let place = place as usize % bytes.len();
        bytes[place] = byte;
    }
    if keep.is_multiple_of(4) {
        bytes.truncate(keep as usize % bytes.len());
    }
    bytes
}

/// What a damaged file may still be: an error, or a tokenizer that works.
fn survives(kind: TokenizerKind, bytes: &[u8]) {
    if let Ok(tokenizer) = Tokenizer::from_bytes(kind, bytes) {
        if let Ok(ids) = tokenizer.encode_prompt("ab c\n é") {
            tokenizer.decode(&ids, SpecialTokens::Keep);
        }
        let _ = tokenizer.check_vocab(200);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn damaged_files_never_panic(
        places in proptest::collection::vec((any::<u32>(), prop_oneof![any::<u8>(), 0x20u8..0x7f]), 1..6),
        keep in any::<u32>(),
    ) {
        survives(TokenizerKind::HfJson, &damage(&common::sentencepiece_json(), &places, keep));
        survives(TokenizerKind::RwkvWorld, &damage(&common::world_vocabulary(&[b"ab", "é".as_bytes()]), &places, keep));
    }
}

#[test]
fn byte_level_stream_equals_decode() {
    let tokenizer = Tokenizer::from_dir(&common::tiny_books()).unwrap();
    let mut runner = proptest::test_runner::TestRunner::default();
    runner.run(&proptest::collection::vec(0i32..4100, 0..48), |ids| check_stream(&tokenizer, &ids)).unwrap();
    runner
        .run(&"\\PC{0,60}", |text| {
            let ids = tokenizer.encode(&text).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids, SpecialTokens::Keep), text);
            Ok(())
        })
        .unwrap();
}

#[test]
fn threads_may_share_a_tokenizer() {
    fn shared<T: Send + Sync>() {}
    shared::<Tokenizer>();
    shared::<TokenizerError>();
}

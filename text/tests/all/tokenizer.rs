//! Tokenizers from memory, streams, and files that are wrong.

use crate::common::{self, Machine};
use crate::readers;
use mlcc_text::special_tokens::SpecialSources;
use mlcc_text::tokenizer::{GgufVocabulary, TokenizerError, TokenizerExtras};
use mlcc_text::{DecodeStream, SpecialIds, SpecialTokens, TokenId, Tokenizer, TokenizerFile, TokenizerKind};
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
    assert!(load(&template).unwrap_err().to_string().contains("id 999, which is not a token"));
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
    let error = TokenizerFile::find(folder.path(), &Machine).unwrap_err();
    assert!(error.to_string().contains("--tokenizer"), "{error}");
    assert!(matches!(
        TokenizerFile::read(&folder.path().join("a.bin"), &Machine),
        Err(TokenizerError::UnknownFile { .. })
    ));
    assert!(matches!(
        TokenizerFile::read(&folder.path().join("a.json"), &Machine),
        Err(TokenizerError::Io { .. })
    ));

    std::fs::write(folder.path().join("rwkv_vocab_v20230424.txt"), common::world_vocabulary(&[b"ab"]))
        .unwrap();
    assert_eq!(Tokenizer::from_dir(folder.path(), &Machine).unwrap().kind(), TokenizerKind::RwkvWorld);
    std::fs::write(folder.path().join("tokenizer.json"), common::sentencepiece_json()).unwrap();
    let file = TokenizerFile::find(folder.path(), &Machine).unwrap();
    assert_eq!(file.kind, TokenizerKind::HfJson);

    let section = file.to_section();
    let tokenizer = Tokenizer::from_section(&section).unwrap();
    assert_eq!(tokenizer.encode("ab").unwrap(), file.load().unwrap().encode("ab").unwrap());
    assert!(matches!(Tokenizer::from_section(b"wordpiece\nxyz"), Err(TokenizerError::UnknownKind { .. })));
    assert!(Tokenizer::from_section(b"").is_err());
    assert!(Tokenizer::from_section(&section[..section.len() / 2]).is_err());

    std::fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
    let message = Tokenizer::from_dir(folder.path(), &Machine).unwrap_err().to_string();
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
    damage_bytes(file.as_bytes(), places, keep)
}

fn damage_bytes(file: &[u8], places: &[(u32, u8)], keep: u32) -> Vec<u8> {
    let mut bytes = file.to_vec();
    for &(place, byte) in places {
        let place = place as usize % bytes.len();
        bytes[place] = byte;
    }
    if keep.is_multiple_of(4) {
        bytes.truncate(keep as usize % bytes.len());
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn damaged_files_never_panic(
        places in proptest::collection::vec((any::<u32>(), prop_oneof![any::<u8>(), 0x20u8..0x7f]), 1..6),
        keep in any::<u32>(),
    ) {
        readers::tokenizer(TokenizerKind::HfJson, &damage(&common::sentencepiece_json(), &places, keep));
        let sentence_piece = gguf_file(&sentence_piece_vocabulary()).unwrap().bytes;
        readers::tokenizer(TokenizerKind::SentencePiece, &damage_bytes(&sentence_piece, &places, keep));
        let charsmap = include_bytes!("../data/unigram.model");
        readers::tokenizer(TokenizerKind::SentencePiece, &damage_bytes(charsmap, &places, keep));
        readers::tokenizer_section(&damage_bytes(b"sentencepiece {\"prefix\":[1],\"id_offset\":3}\n\x0a\x03\x0a\x01a", &places, keep));
        readers::chat(&damage("{% for m in messages %}{{ m.role | tojson }}{% if loop.last %}{{ m['content'][1:] }}{% endif %}{% endfor %}", &places, keep), &Machine);
        readers::tokenizer(TokenizerKind::Tiktoken, &damage(include_str!("../data/digits.tiktoken"), &places, keep));
        readers::tokenizer(TokenizerKind::RwkvWorld, &damage(&common::world_vocabulary(&[b"ab", "é".as_bytes()]), &places, keep));
    }
}

#[test]
fn byte_level_stream_equals_decode() {
    let tokenizer = Tokenizer::from_dir(&common::tiny_books(), &Machine).unwrap();
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

/// A sentencepiece model of a few pieces and all bytes.
fn sentence_piece_vocabulary() -> GgufVocabulary {
    let mut vocabulary = GgufVocabulary {
        model: "llama".to_owned(),
        bos_token_id: Some(1),
        eos_token_id: Some(2),
        ..GgufVocabulary::default()
    };
    let mut add = |text: &str, score: f32, kind: i32| {
        vocabulary.tokens.push(text.to_owned());
        vocabulary.scores.push(score);
        vocabulary.token_types.push(kind);
    };
    add("<unk>", 0.0, 2);
    add("<s>", 0.0, 3);
    add("</s>", 0.0, 3);
    (0..=255u8).for_each(|byte| add(&format!("<0x{byte:02X}>"), 0.0, 6));
    for (text, score) in [("\u{2581}", -1.0), ("a", -2.0), ("b", -3.0), ("ab", -4.0), ("\u{2581}ab", -5.0)] {
        add(text, score, 1);
    }
    add("<|user|>", 0.0, 4);
    vocabulary
}

fn gguf_file(vocabulary: &GgufVocabulary) -> Result<TokenizerFile, TokenizerError> {
    vocabulary.to_file(std::path::Path::new("model.gguf"))
}

#[test]
fn gguf_sentencepiece() {
    let vocabulary = sentence_piece_vocabulary();
    let tokenizer = Tokenizer::from_section(&gguf_file(&vocabulary).unwrap().to_section()).unwrap();
    let word = 263;
    assert_eq!(tokenizer.encode("ab").unwrap(), [word]);
    assert_eq!(tokenizer.encode_prompt("ab ab").unwrap(), [1, word, word]);
    assert_eq!(tokenizer.encode("é").unwrap(), [259, 3 + 0xc3, 3 + 0xa9]);
    assert_eq!(tokenizer.encode("<|user|>ab</s>").unwrap()[..2], [259, 264]);
    assert_eq!(tokenizer.decode(&[1, word, 264, word, 2], SpecialTokens::Skip), "ab<|user|> ab");
    assert_eq!(tokenizer.token_to_id("</s>"), Some(2));
    let without = GgufVocabulary { add_bos_token: Some(false), add_eos_token: Some(true), ..vocabulary };
    let tokenizer = gguf_file(&without).unwrap().load().unwrap();
    assert_eq!(tokenizer.encode_prompt("ab").unwrap(), [word, 2]);
}

#[test]
fn gguf_byte_level() {
    let vocabulary = GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: Some("qwen2".to_owned()),
        tokens: ["a", "b", "Ġ", "ab", "Ġab", "<|end|>", "1", "<tool>"].map(str::to_owned).to_vec(),
        token_types: vec![1, 1, 1, 1, 1, 3, 1, 4],
        merges: vec!["a b".to_owned(), "Ġ ab".to_owned()],
        eos_token_id: Some(5),
        ..GgufVocabulary::default()
    };
    let tokenizer = gguf_file(&vocabulary).unwrap().load().unwrap();
    assert_eq!(tokenizer.encode_prompt("ab ab11<|end|>a<tool>").unwrap(), [3, 4, 6, 6, 5, 0, 7]);
    assert_eq!(tokenizer.special_ids(), [5]);
    assert_eq!(tokenizer.decode(&[3, 4, 5, 7], SpecialTokens::Skip), "ab ab<tool>");
    let begun = GgufVocabulary { bos_token_id: Some(5), add_bos_token: Some(true), ..vocabulary.clone() };
    assert_eq!(gguf_file(&begun).unwrap().load().unwrap().encode_prompt("a").unwrap(), [5, 0]);
    let refused = |vocabulary: GgufVocabulary, part: &str| {
        let error = gguf_file(&vocabulary).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    refused(GgufVocabulary { pre: Some("elvish".to_owned()), ..vocabulary.clone() }, "`elvish`");
    refused(GgufVocabulary { pre: None, ..vocabulary.clone() }, "tokenizer.ggml.pre is missing");
    refused(GgufVocabulary { merges: Vec::new(), ..vocabulary.clone() }, "merges");
    refused(GgufVocabulary { token_types: vec![1], ..vocabulary.clone() }, "1 entries for 8 tokens");
    refused(GgufVocabulary { token_types: vec![9; 8], ..vocabulary.clone() }, "token 0 is 9");
    refused(GgufVocabulary { model: "plamo2".to_owned(), ..vocabulary.clone() }, "`plamo2`");
    refused(GgufVocabulary { model: "bert".to_owned(), ..vocabulary }, "has no token [UNK]");
}

#[test]
fn gguf_world() {
    let mut tokens = vec!["<s>".to_owned()];
    tokens.extend((0..=255u8).map(|byte| match byte {
        b'\\' => "\\\\".to_owned(),
        0x20..0x7f => char::from(byte).to_string(),
        byte => format!("\\x{byte:02x}"),
    }));
    tokens.push("don't".to_owned());
    tokens.push("[PAD258]".to_owned());
    let vocabulary = GgufVocabulary { model: "rwkv".to_owned(), tokens, ..GgufVocabulary::default() };
    let tokenizer = gguf_file(&vocabulary).unwrap().load().unwrap();
    assert_eq!(tokenizer.encode("don't\n").unwrap(), [257, 11]);
    assert_eq!(tokenizer.vocab_size(), 258);
}

#[test]
fn rank_files_that_are_wrong() {
    let all: String = (0..=255u8).map(|byte| format!("{} {byte}\n", base64(byte))).collect();
    let load = |text: &str| Tokenizer::from_bytes(TokenizerKind::Tiktoken, text.as_bytes());
    let tokenizer = load(&format!("{all}YWI= 256\n")).unwrap();
    assert_eq!(tokenizer.encode("abé").unwrap(), [256, 0xc3, 0xa9]);
    assert_eq!((tokenizer.token_to_id("ab"), tokenizer.token_to_id("abc")), (Some(256), None));
    let cases = [
        ("", "no tokens"),
        ("IQ== 33\n", "0x00"),
        ("IQ==\n", "line 1"),
        ("IQ== x\n", "base64, a space and a rank"),
        ("I!== 3\n", "base64"),
        ("IQ== 3\nIg== 3\n", "each rank once"),
        ("IQ== 3\nIQ== 4\n", "each token once"),
        ("IQ== 99999999\n", "a rank below"),
    ];
    for (text, part) in cases {
        let error = load(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text:?}: {error}");
    }
}

fn base64(byte: u8) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |six: u8| char::from(ALPHABET[usize::from(six)]);
    format!("{}{}==", digit(byte >> 2), digit((byte & 3) << 4))
}

#[test]
fn sentencepiece_models_that_are_wrong() {
    let good = gguf_file(&sentence_piece_vocabulary()).unwrap().bytes;
    let load = |bytes: &[u8]| Tokenizer::from_bytes(TokenizerKind::SentencePiece, bytes);
    assert!(load(&good).is_ok());
    assert!(matches!(load(b""), Err(TokenizerError::Empty)));
    assert!(load(&good[..good.len() - 3]).unwrap_err().to_string().contains("ends in the middle"));
    // Trainer field 3 (model type): WORD.
    let word = [&good[..], &[0x12, 2, 0x18, 3]].concat();
    assert!(load(&word).unwrap_err().to_string().contains("type WORD"));
    let charsmap = [&good[..], &[0x1a, 6, 0x12, 4, 255, 255, 0, 0]].concat();
    assert!(load(&charsmap).unwrap_err().to_string().contains("precompiled_charsmap"));
    let twice = [&good[..], &[0x0a, 3, 0x0a, 1, b'a']].concat();
    assert!(load(&twice).unwrap_err().to_string().contains("occurs twice"));
    let bytes = [&good[..], &[0x0a, 10, 0x0a, 6, b'<', b'0', b'x', b'Z', b'Z', b'>', 0x18, 6]].concat();
    assert!(load(&bytes).unwrap_err().to_string().contains("byte piece"));
    let huge = TokenizerFile {
        extras: TokenizerExtras { id_offset: u32::MAX, ..TokenizerExtras::default() },
        ..gguf_file(&sentence_piece_vocabulary()).unwrap()
    };
    assert!(huge.load().unwrap_err().to_string().contains("4294967295"));
}

#[test]
fn files_beside_a_vocabulary() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    let find = || TokenizerFile::find(folder.path(), &Machine);
    write("vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n");
    assert!(find().unwrap_err().to_string().contains("has no token [SEP]"));
    write("tokenizer.model", &gguf_file(&sentence_piece_vocabulary()).unwrap().bytes);
    assert_eq!(find().unwrap().extras, TokenizerExtras { prefix: vec![1], ..TokenizerExtras::default() });

    write("tokenizer_config.json", br#"{"tokenizer_class": "ChatGLMTokenizer"}"#);
    let glm = find().unwrap().load().unwrap();
    // 265 pieces, then [MASK] [gMASK] [sMASK] sop eop <|system|> ...; "sop" in a word stays text.
    assert_eq!(glm.encode_prompt("").unwrap(), [266, 268]);
    assert_eq!(glm.encode("[gMASK]sop<|assistant|>").unwrap(), [266, 268, 272]);
    assert!(!glm.encode("philosophy").unwrap().contains(&268));
    assert!(glm.is_special(268) && glm.vocab_size() == 274);

    let config = r#"{"add_bos_token": false, "add_eos_token": true, "legacy": false, "eos_token": {"content": "<e>"},
        "added_tokens_decoder": {"265": {"content": "<e>", "special": true}, "266": {"content": "<t>", "special": false}}}"#;
    write("tokenizer_config.json", config.as_bytes());
    let tokenizer = find().unwrap().load().unwrap();
    assert_eq!(tokenizer.encode_prompt("ab<t>ab").unwrap(), [263, 266, 262, 265]);
    assert_eq!(tokenizer.special_ids(), [0, 1, 2, 265]);

    // added_tokens.json does not say what is special; a field that names the token does.
    write("added_tokens.json", br#"{"<e>": 265, "<t>": 266, "<u>": 267}"#);
    write(
        "tokenizer_config.json",
        br#"{"eos_token": {"content": "<e>"}, "additional_special_tokens": ["<u>"]}"#,
    );
    let tokenizer = find().unwrap().load().unwrap();
    assert_eq!(tokenizer.special_ids(), [0, 1, 2, 265, 267]);
    assert_eq!(tokenizer.decode(&[265, 266, 267], SpecialTokens::Skip), "<t>");
    std::fs::remove_file(folder.path().join("added_tokens.json")).unwrap();

    write("tokenizer_config.json", br#"{"added_tokens_decoder": {"x": 1}}"#);
    assert!(find().unwrap_err().to_string().contains("added_tokens_decoder.x"));
    write("tokenizer_config.json", br#"{"tokenizer_class": "NllbTokenizer"}"#);
    assert!(find().unwrap_err().to_string().contains("NllbTokenizer"));
    write("tokenizer_config.json", b"{");
    assert!(find().unwrap_err().to_string().contains("tokenizer_config.json"));

    std::fs::remove_file(folder.path().join("tokenizer.model")).unwrap();
    write("k.tiktoken", b"IQ== 0\n");
    write("tokenizer_config.json", br#"{"tokenizer_class": "KimiTokenizer"}"#);
    assert!(find().unwrap_err().to_string().contains("KimiTokenizer"));
}

/// `vocab.json` and `merges.txt` where no file names a special token: the classes call it `<|endoftext|>`.
#[test]
fn special_tokens_that_only_the_class_knows() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("vocab.json", r#"{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3, "<": 4, "|": 5}"#);
    write("merges.txt", "#version: 0.2\na b\n");
    for class in ["", r#""tokenizer_class": "GPT2Tokenizer""#, r#""tokenizer_class": "Qwen2TokenizerFast""#] {
        write("tokenizer_config.json", &format!("{{{class}}}"));
        let tokenizer = TokenizerFile::find(folder.path(), &Machine).unwrap().load().unwrap();
        assert_eq!(tokenizer.encode("ab<|endoftext|>b").unwrap(), [2, 3, 1], "{class}");
        assert_eq!(tokenizer.encode_prompt("ab").unwrap(), [2], "{class}");
        assert_eq!(tokenizer.decode(&[2, 3, 1], SpecialTokens::Skip), "abb", "{class}");
        assert_eq!(tokenizer.special_ids(), [3], "{class}");
    }
    write("tokenizer_config.json", r#"{"tokenizer_class": "GPT2Tokenizer", "add_bos_token": true}"#);
    let tokenizer = TokenizerFile::find(folder.path(), &Machine).unwrap().load().unwrap();
    assert_eq!(tokenizer.encode_prompt("ab").unwrap(), [3, 2]);
}

#[test]
fn chatglm_6b_spaces() {
    let folder = tempfile::tempdir().unwrap();
    let mut vocabulary = sentence_piece_vocabulary();
    for (text, kind) in [("<n>", 4), ("<|tab|>", 4), ("<|blank_3|>", 4), ("[gMASK]", 1), ("<sop>", 1)] {
        vocabulary.tokens.push(text.to_owned());
        vocabulary.scores.push(-9.0);
        vocabulary.token_types.push(kind);
    }
    std::fs::write(folder.path().join("ice_text.model"), gguf_file(&vocabulary).unwrap().bytes).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), br#"{"num_image_tokens": 1000}"#).unwrap();
    let tokenizer = TokenizerFile::find(folder.path(), &Machine).unwrap().load().unwrap();
    let ids = tokenizer.encode_prompt("ab\n\tab   ab").unwrap();
    assert_eq!(ids, [1263, 1265, 1266, 1262, 1267, 1262, 1268, 1269]);
    assert_eq!(tokenizer.decode(&ids[..6], SpecialTokens::Skip), "ab\n\tab   ab");
}

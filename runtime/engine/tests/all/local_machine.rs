//! Files of tokenizers on this machine.

use crate::common;
use mlcc_engine::LocalMachine;
use mlcc_text::tokenizer::TokenizerError;
use mlcc_text::{Tokenizer, TokenizerFile, TokenizerKind};

#[test]
fn tokenizers_are_found_in_folders() {
    let folder = tempfile::tempdir().unwrap();
    let absent = TokenizerFile::read(&folder.path().join("a.json"), &LocalMachine);
    assert!(matches!(absent, Err(TokenizerError::Io { .. })));
    assert!(TokenizerFile::find_in(&folder.path().join("none"), &LocalMachine).unwrap().is_none());
    let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
    write("rwkv_vocab_v20230424.txt", common::world_vocabulary(&[b"ab"]));
    let found = || Tokenizer::from_dir(folder.path(), &LocalMachine);
    assert_eq!(found().unwrap().kind(), TokenizerKind::RwkvWorld);
    write("tokenizer.json", common::sentencepiece_json());
    assert_eq!(found().unwrap().kind(), TokenizerKind::HfJson);
}

#[test]
fn a_tokenizer_that_is_a_link_to_nothing_is_no_absent_one() {
    for name in ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"] {
        let folder = tempfile::tempdir().unwrap();
        assert!(TokenizerFile::find_in(folder.path(), &LocalMachine).unwrap().is_none());
        std::os::unix::fs::symlink("../../blobs/cleaned", folder.path().join(name)).unwrap();
        let error = TokenizerFile::find_in(folder.path(), &LocalMachine).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("../../blobs/cleaned"), "{error}");
    }
    // Nor is a file that says how a vocabulary is used.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("vocab.txt"), "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n").unwrap();
    TokenizerFile::find(folder.path(), &LocalMachine).unwrap();
    std::os::unix::fs::symlink("cleaned", folder.path().join("tokenizer_config.json")).unwrap();
    let error = TokenizerFile::find(folder.path(), &LocalMachine).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json") && error.contains("cleaned"), "{error}");
}

//! Sessions over KV caches, on a toy (`toy/cached.c`): memory on demand, truncation, forks, state files.

use crate::toy::{self, VOCAB, WIDTH};
use mlcc_codegen::artifact::WeightDestination;
use mlcc_runtime::{Error, LoadOptions, Model, Session};

fn load(flags: &[&str]) -> Option<(tempfile::TempDir, Model)> {
    if !toy::can_compile() {
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("toy.so");
    toy::pack(&toy::linked_from("cached.c", folder.path(), flags), &path, WeightDestination::Inside);
    let options = LoadOptions { threads: Some(2), ..LoadOptions::default() };
    let model = Model::load(path, &options).unwrap();
    Some((folder, model))
}

/// Logits at every position.
fn reference(tokens: &[i32]) -> Vec<Vec<f32>> {
    let e = toy::embedding();
    let row = |t: usize| &e[t * WIDTH..(t + 1) * WIDTH];
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let logit = |upto: usize, v: usize| {
        let of = |(p, &t): (usize, &i32)| (1 + p % 3) as f32 * dot(row(t as usize), row(v));
        tokens[..=upto].iter().enumerate().map(of).sum()
    };
    (0..tokens.len()).map(|t| (0..VOCAB).map(|v| logit(t, v)).collect()).collect()
}

const TOKENS: [i32; 10] = [3, 1, 4, 1, 0, 2, 2, 4, 3, 3];

#[test]
fn caches_grow_and_are_reset() {
    let Some((_folder, model)) = load(&[]) else { return };
    let expected = reference(&TOKENS);
    let mut session = model.session().unwrap();
    for (i, &token) in TOKENS.iter().enumerate() {
        assert_eq!(session.decode(token).unwrap(), expected[i], "position {i}");
    }
    session.reset().unwrap();
    assert_eq!(session.prefill(&TOKENS).unwrap(), expected[9], "rows of before mean nothing");
    session.reset().unwrap();
    assert_eq!(session.prefill_logits(&TOKENS).unwrap(), expected.concat());
    assert_eq!(session.state("k").unwrap().unwrap().len(), 10 * 32, "rows in use");
    assert_eq!(model.table().cache_bytes_per_token(), 64);
}

#[test]
fn truncated_sequences_go_on_otherwise() {
    let Some((_folder, model)) = load(&[]) else { return };
    let mut session = model.session().unwrap();
    assert!(session.can_truncate());
    session.prefill(&TOKENS).unwrap();
    session.truncate(4).unwrap();
    assert_eq!(session.past(), 4);
    let other = [3, 1, 4, 1, 2, 2];
    assert_eq!(session.prefill(&other[4..]).unwrap(), reference(&other)[5]);
    assert!(matches!(session.truncate(7), Err(Error::TruncateBeyond { wanted: 7, past: 6 })));
    session.truncate(6).unwrap();
    session.truncate(0).unwrap();
    assert_eq!(session.prefill(&TOKENS).unwrap(), reference(&TOKENS)[9]);
}

#[test]
fn recurrent_states_cannot_go_back() {
    let Some((_folder, model)) = load(&["-DTOY_MIXED"]) else { return };
    let mut session = model.session().unwrap();
    session.prefill(&TOKENS[..4]).unwrap();
    assert!(!session.can_truncate());
    let error = session.truncate(2).unwrap_err();
    assert!(matches!(error, Error::TruncateRecurrent { wanted: 2, past: 4, .. }));
    assert!(error.to_string().contains("`sum`"), "{error}");
    assert_eq!(session.past(), 4);
    session.truncate(0).unwrap();
    let logits = session.prefill(&TOKENS[..2]).unwrap();
    let expected: Vec<f32> = reference(&TOKENS)[1].iter().map(|x| x + 4.0).collect();
    assert_eq!(logits, expected);
}

#[test]
fn forks_and_files_carry_the_rows_in_use() {
    let Some((folder, model)) = load(&[]) else { return };
    let expected = reference(&TOKENS);
    let mut session = model.session().unwrap();
    session.prefill(&TOKENS[..6]).unwrap();
    let mut twin = session.fork().unwrap();
    assert_eq!((twin.past(), twin.logits()), (6, &expected[5][..]));
    let file = folder.path().join("s.state");
    session.save_state(&file).unwrap();
    assert_eq!(std::fs::metadata(&file).unwrap().len(), 64 + 6 * 64);
    session.prefill(&[0, 0, 0]).unwrap();
    assert_eq!(twin.prefill(&TOKENS[6..]).unwrap(), expected[9]);
    session.load_state(&file).unwrap();
    assert_eq!(session.prefill(&TOKENS[6..]).unwrap(), expected[9]);

    // Another context size takes the file where it fits, and says so where it does not.
    let Some((_other, wider)) = load(&["-DTOY_CONTEXT=400"]) else { return };
    let mut wider = wider.session().unwrap();
    wider.load_state(&file).unwrap();
    assert_eq!(wider.prefill(&TOKENS[6..]).unwrap(), expected[9]);
    let Some((_other, narrower)) = load(&["-DTOY_CONTEXT=5"]) else { return };
    let mut narrower = narrower.session().unwrap();
    narrower.prefill(&TOKENS[..2]).unwrap();
    let error = narrower.load_state(&file).unwrap_err().to_string();
    assert!(error.contains("--ctx-size"), "{error}");
    assert_eq!(narrower.decode(TOKENS[2]).unwrap(), expected[2], "refused files change nothing");
    // Rows of another width are another model's.
    let Some((_other, foreign)) = load(&["-DTOY_ROW=9"]) else { return };
    let error = foreign.session().unwrap().load_state(&file).unwrap_err().to_string();
    assert!(error.contains("another model"), "{error}");
}

#[test]
fn snapshots_are_returned_to() {
    for flags in [&[][..], &["-DTOY_MIXED"]] {
        let Some((_folder, model)) = load(flags) else { return };
        let mut session = model.session().unwrap();
        session.prefill(&TOKENS[..5]).unwrap();
        let snapshot = session.snapshot().unwrap();
        let expected = session.prefill(&TOKENS[5..]).unwrap().to_vec();
        session.restore(&snapshot).unwrap();
        assert_eq!(session.past(), 5);
        assert_eq!(session.prefill(&TOKENS[5..]).unwrap(), expected);
        let Some((_other, foreign)) = load(&["-DTOY_ROW=9"]) else { return };
        assert!(matches!(foreign.session().unwrap().restore(&snapshot), Err(Error::ForeignSnapshot)));
    }
}

#[test]
fn a_full_context_is_named() {
    let Some((_folder, model)) = load(&["-DTOY_CONTEXT=5"]) else { return };
    let mut session = model.session().unwrap();
    session.prefill(&TOKENS[..5]).unwrap();
    let error = session.decode(1).unwrap_err();
    assert!(matches!(error, Error::ContextFull { past: 5, n: 1, context: 5 }));
    assert!(error.to_string().contains("--ctx-size"), "{error}");
    session.truncate(4).unwrap();
    assert_eq!(session.decode(TOKENS[4]).unwrap(), reference(&TOKENS)[4]);
}

/// 131072 positions of 8 KiB each: a gigabyte of addresses, of which a session uses only a part.
#[test]
fn an_announced_length_is_taken_back_when_the_prompt_fails() {
    let Some((_folder, model)) = load(&["-DTOY_LENGTH", "-DTOY_LAST=8"]) else { return };
    let expected = reference(&TOKENS);
    for logits_of_all in [false, true] {
        let mut session = model.session().unwrap();
        let length = |session: &Session| session.state("length").unwrap().unwrap();
        session.prefill(&TOKENS[..4]).unwrap();
        assert_eq!(length(&session), 4i32.to_le_bytes(), "two pieces");
        // The first piece of three tokens is computed, the second one is not.
        let fed = match logits_of_all {
            false => session.prefill(&TOKENS[4..]).map(drop),
            true => session.prefill_logits(&TOKENS[4..]).map(drop),
        };
        assert!(matches!(fed, Err(Error::Step { .. })), "{fed:?}");
        assert_eq!((session.past(), length(&session)), (7, 7i32.to_le_bytes().to_vec()));
        assert_eq!(session.decode(TOKENS[7]).unwrap(), expected[7], "the sequence goes on");
    }
}

#[test]
fn long_contexts_take_memory_as_they_grow() {
    let Some((_folder, model)) = load(&["-DTOY_CONTEXT=131072", "-DTOY_ROW=1024"]) else { return };
    let mut session = model.session().unwrap();
    let fresh = session.memory();
    assert_eq!(fresh.planned_state, 64 + 2 * 131072 * 4096);
    assert_eq!((fresh.state, fresh.bytes_per_token), (64, 8192));
    session.prefill(&TOKENS).unwrap();
    assert_eq!(session.memory().state, 64 + 64 * 8192, "a page");
    let tokens: Vec<i32> = (0..500).map(|i| i % 5).collect();
    session.prefill(&tokens).unwrap();
    assert_eq!(session.memory().state, 64 + 512 * 8192);
    let twin = session.fork().unwrap();
    assert_eq!(twin.memory().state, 64 + 512 * 8192, "the same pages");
    session.reset().unwrap();
    assert_eq!(session.memory().state, 64);
    assert_eq!(session.prefill(&TOKENS).unwrap(), reference(&TOKENS)[9]);
}

#[test]
fn prompts_that_must_be_whole_are_not_cut() {
    let Some((_folder, model)) = load(&["-DTOY_FLAGS=MLCC_WHOLE_PROMPTS"]) else { return };
    let mut session = model.session().unwrap();
    let error = session.prefill(&TOKENS[..4]).unwrap_err();
    assert!(matches!(error, Error::WholePrompt { n: 4, past: 0, chunk: 3 }));
    assert!(error.to_string().contains("--chunk"), "{error}");
    session.prefill(&TOKENS[..3]).unwrap();
    assert_eq!(session.decode(TOKENS[3]).unwrap(), reference(&TOKENS)[3]);
    assert!(matches!(session.prefill(&TOKENS[4..6]), Err(Error::WholePrompt { n: 2, past: 4, .. })));
    session.reset().unwrap();
    assert_eq!(session.prefill(&TOKENS[..3]).unwrap(), reference(&TOKENS)[2]);
}

/// Only the `window` newest tokens count.
fn windowed(tokens: &[i32], window: usize) -> Vec<Vec<f32>> {
    let e = toy::embedding();
    let row = |t: usize| &e[t * WIDTH..(t + 1) * WIDTH];
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let logit = |upto: usize, v: usize| {
        let seen = (upto + 1).saturating_sub(window)..=upto;
        seen.map(|p| (1 + p % 3) as f32 * dot(row(tokens[p] as usize), row(v))).sum()
    };
    (0..tokens.len()).map(|t| (0..VOCAB).map(|v| logit(t, v)).collect()).collect()
}

#[test]
fn windows_go_on_beyond_the_context() {
    let tokens: Vec<i32> = (0..60).map(|i| (i * i + i / 7) % 5).collect();
    for (context, window) in [("9", 4), ("7", 6), ("20", 1)] {
        let flags = [format!("-DTOY_CONTEXT={context}"), format!("-DTOY_WINDOW={window}")];
        let Some((folder, model)) = load(&flags.each_ref().map(String::as_str)) else { return };
        let expected = windowed(&tokens, window);
        let mut session = model.session().unwrap();
        assert_eq!(session.window(), Some(window as u64));
        for (i, &token) in tokens.iter().enumerate() {
            assert_eq!(session.decode(token).unwrap(), expected[i], "position {i}, window {window}");
        }
        assert_eq!(session.past(), 60);
        session.reset().unwrap();
        assert_eq!(session.prefill(&tokens).unwrap(), expected[59], "in chunks");
        session.reset().unwrap();
        assert_eq!(session.prefill_logits(&tokens[..40]).unwrap(), expected[..40].concat());
        // Dropped rows come along with files and forks.
        let file = folder.path().join("s.state");
        session.save_state(&file).unwrap();
        let mut twin = session.fork().unwrap();
        assert_eq!(twin.prefill(&tokens[40..]).unwrap(), expected[59]);
        session.reset().unwrap();
        session.load_state(&file).unwrap();
        assert_eq!(session.past(), 40);
        assert_eq!(session.prefill(&tokens[40..]).unwrap(), expected[59]);
    }
}

#[test]
fn windows_go_back_as_far_as_they_have_rows() {
    let tokens: Vec<i32> = (0..30).map(|i| (i * i + i / 7) % 5).collect();
    let Some((_folder, model)) = load(&["-DTOY_CONTEXT=10", "-DTOY_WINDOW=4"]) else { return };
    let mut session = model.session().unwrap();
    session.prefill(&tokens[..10]).unwrap();
    session.truncate(2).unwrap();
    session.prefill(&tokens[2..14]).unwrap();
    let least = (1..14).find(|&past| session.can_truncate_to(past)).unwrap();
    assert!((4..14).contains(&least), "{least}");
    let error = session.truncate(least - 1).unwrap_err();
    assert!(matches!(error, Error::TruncateDropped { past: 14, window: 4, .. }), "{error}");
    session.truncate(least).unwrap();
    let other = [&tokens[..least as usize], &[1, 1, 2]].concat();
    assert_eq!(session.prefill(&[1, 1, 2]).unwrap(), windowed(&other, 4)[least as usize + 2]);
}

#[test]
fn tables_with_impossible_rows_are_refused() {
    for flags in ["-DTOY_BAD_ROWS=TOY_CONTEXT-1", "-DTOY_BAD_ROWS=0x2000000000000001"] {
        if !toy::can_compile() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("toy.so");
        toy::pack(&toy::linked_from("cached.c", folder.path(), &[flags]), &path, WeightDestination::Inside);
        let error = Model::load(path, &LoadOptions::default()).err().unwrap().to_string();
        assert!(error.contains("cache k"), "{error}");
    }
}

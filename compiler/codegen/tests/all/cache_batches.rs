//! Steps of several sequences whose caches share the pages of a model (`toy/cached.c`): what is refused, and
//! what is then left of everybody. The bad input that compiled models know as well:
//! `cli/tests/all/{batch,step}.rs`.

use crate::page_histories::{load, logits};
use mlcc_runtime::{Error, Model, OutputRows, Session, SessionInput};

/// Sequences of four, steps of twenty rows, contexts of five pages.
const FLAGS: [&str; 3] = ["-DTOY_BATCH=4", "-DTOY_CHUNK=20", "-DTOY_CONTEXT=300"];

fn tokens(n: usize, seed: usize) -> Vec<i32> {
    (0..n).map(|i| ((i * i + seed * i + seed) % 5) as i32).collect()
}

fn fed(model: &Model, tokens: &[i32]) -> Session {
    let mut session = model.session().unwrap();
    session.prefill(tokens).unwrap();
    session
}

fn all(tokens: &[i32]) -> Vec<f32> {
    logits(tokens, usize::MAX)
}

fn free(model: &Model) -> usize {
    model.cache_pages().free
}

#[test]
fn a_step_without_pages_is_refused_and_changes_nothing() {
    let Some((_folder, model)) = load(&FLAGS, Some(6)) else { return };
    let texts = [tokens(300, 1), tokens(300, 2), tokens(300, 3)];
    // All pages that they have are full: two of six are free, and each would like one.
    let mut sessions = texts.each_ref().map(|text| fed(&model, &text[..64]));
    sessions[0].prefill(&texts[0][64..128]).unwrap();
    assert_eq!(free(&model), 2);
    let past = [128, 64, 64];
    let mut batch = model.batch(4).unwrap();
    for pieces in [[1, 1, 1], [3, 2, 7], [18, 1, 1]] {
        let before = sessions.each_ref().map(|s| s.logits().to_vec());
        let [a, b, c] = &mut sessions;
        let piece = |i: usize| &texts[i][past[i]..past[i] + pieces[i]];
        let mut rows =
            [SessionInput::new(a, piece(0)), SessionInput::new(b, piece(1)), SessionInput::new(c, piece(2))];
        let error = batch.step(&mut rows).unwrap_err();
        assert!(matches!(error, Error::NoPages { wanted: 3, free: 2, pages: 6 }), "{error:?}");
        assert!(error.to_string().contains("cache_pages"), "{error}");
        assert!(batch.logits().is_empty(), "nothing after an error");
        let [a, b, c] = &mut sessions;
        let next = [0, 1, 2].map(|i| texts[i][past[i]]);
        let refused = batch.decode(&mut [a, b, c], &next).unwrap_err();
        assert!(matches!(refused, Error::NoPages { wanted: 3, free: 2, pages: 6 }), "{refused:?}");
        for (i, (session, before)) in sessions.iter().zip(&before).enumerate() {
            assert_eq!((session.past(), session.logits()), (past[i] as u64, &before[..]), "sequence {i}");
        }
        assert_eq!(free(&model), 2, "what some got is free again");
    }
    // Two of them at a time go on as if nothing had been.
    let [a, b, c] = &mut sessions;
    let found = batch
        .step(&mut [SessionInput::new(a, &texts[0][128..140]), SessionInput::new(c, &texts[2][64..66])])
        .unwrap();
    assert_eq!(found, [all(&texts[0][..140]), all(&texts[2][..66])].concat());
    assert!(matches!(b.decode(texts[1][64]), Err(Error::NoPages { wanted: 1, free: 0, pages: 6 })));
    // A sequence alone gets the same error.
    let alone = [&texts[1][64..65], &texts[1][64..70]]
        .map(|piece| batch.step(&mut [SessionInput::new(b, piece)]).unwrap_err());
    assert!(alone.iter().all(|e| matches!(e, Error::NoPages { wanted: 1, free: 0, pages: 6 })), "{alone:?}");
    let alone = batch.decode(&mut [b], &[1]).unwrap_err();
    assert!(matches!(alone, Error::NoPages { wanted: 1, free: 0, pages: 6 }), "{alone:?}");
    c.truncate(64).unwrap();
    let found = batch.decode(&mut [a, b], &[texts[0][140], texts[1][64]]).unwrap();
    assert_eq!(found, [all(&texts[0][..141]), all(&texts[1][..65])].concat());
    drop(sessions);
    assert_eq!(free(&model), 6);
}

/// Sequences that will begin pages together have memory for them before.
#[test]
fn pages_have_memory_ahead_of_need() {
    // A page of three of the system's huge pages, so that none has memory by chance.
    let flags = [&FLAGS[..], &["-DTOY_GAP=6291456"]].concat();
    let Some((_folder, model)) = load(&flags, Some(14)) else { return };
    let ready = || model.cache_pages().ready;
    let text = tokens(300, 3);
    let mut sessions: Vec<Session> = (0..3).map(|_| fed(&model, &text[..1])).collect();
    let before = ready();
    assert!(before <= 1, "{before}");
    let mut batch = model.batch(4).unwrap();
    let mut step = |sessions: &mut [Session], token| {
        let mut members: Vec<&mut Session> = sessions.iter_mut().collect();
        batch.decode(&mut members, &[token; 3]).unwrap();
    };
    let mut seen = vec![before];
    for &token in &text[1..64] {
        step(&mut sessions, token);
        seen.push(ready());
    }
    assert!(seen.is_sorted() && seen[20] < 3 && seen[63] == 3, "{seen:?}");
    step(&mut sessions, text[64]);
    assert_eq!((free(&model), ready()), (14 - 6, 0));
    assert!(sessions.iter().all(|s| s.logits() == all(&text[..65])));
    // In the last pages of their contexts they need no more.
    let [_, b, c] = &mut sessions[..] else { unreachable!() };
    b.prefill(&text[65..290]).unwrap();
    c.prefill(&text[65..290]).unwrap();
    let before = (free(&model), ready());
    for &token in &text[290..300] {
        batch.decode(&mut [b, c], &[token; 2]).unwrap();
    }
    assert_eq!((free(&model), ready()), before);
    assert_eq!(c.logits(), all(&text));
}

/// The copy of a page that others have as well counts, and so does a page that a fork does not need any more.
#[test]
fn copies_of_shared_pages_are_among_the_numbers() {
    let Some((_folder, model)) = load(&FLAGS, Some(5)) else { return };
    let text = tokens(300, 4);
    let mut a = fed(&model, &text[..200]);
    let mut b = a.fork().unwrap();
    let mut c = a.fork().unwrap();
    assert_eq!(free(&model), 1);
    let mut batch = model.batch(3).unwrap();
    let mut step = |a, b, c| {
        let rows = &mut [
            SessionInput::new(a, &text[200..203]),
            SessionInput::new(b, &text[200..201]),
            SessionInput::new(c, &text[200..202]),
        ];
        batch.step(rows).map(|_| ())
    };
    // The first one takes the last page for its copy; of the others one more needs a copy, the last one has
    // the page alone.
    assert!(matches!(step(&mut a, &mut b, &mut c), Err(Error::NoPages { free: 0, pages: 5, .. })));
    assert_eq!([a.past(), b.past(), c.past()], [200; 3]);
    // Below the shared page: it counts one less.
    b.truncate(100).unwrap();
    assert!(matches!(b.decode(1), Err(Error::NoPages { wanted: 1, .. })), "page 1 is that of others, too");
    drop(b);
    let mut step = |a, c| {
        let rows = &mut [SessionInput::new(a, &text[200..203]), SessionInput::new(c, &text[200..202])];
        batch.step(rows).map(<[f32]>::to_vec)
    };
    assert_eq!(step(&mut a, &mut c).unwrap(), [all(&text[..203]), all(&text[..202])].concat());
}

#[test]
fn what_is_reserved_is_there() {
    let Some((_folder, model)) = load(&FLAGS, Some(6)) else { return };
    let texts = [tokens(300, 1), tokens(300, 5)];
    let (mut a, mut b) = (fed(&model, &texts[0][..60]), fed(&model, &texts[1][..60]));
    assert_eq!(free(&model), 4);
    a.reserve(4).unwrap();
    assert_eq!(free(&model), 4, "they fit in what it has");
    a.reserve(70).unwrap();
    assert_eq!(free(&model), 2);
    let refused = b.reserve(200).unwrap_err();
    assert!(matches!(refused, Error::NoPages { wanted: 4, free: 2, pages: 6 }), "{refused:?}");
    assert_eq!((free(&model), b.past(), b.logits()), (2, 60, &all(&texts[1][..60])[..]));
    b.reserve(130).unwrap();
    assert_eq!(free(&model), 0);
    // Both use their reserved pages, alone and in steps.
    a.prefill(&texts[0][60..80]).unwrap();
    let mut batch = model.batch(2).unwrap();
    for at in (80..125).step_by(15) {
        let pieces = &mut [
            SessionInput::new(&mut a, &texts[0][at..at + 15]),
            SessionInput::new(&mut b, &texts[1][at - 20..at - 15]),
        ];
        batch.step(pieces).unwrap();
        b.prefill(&texts[1][at - 15..at - 5]).unwrap();
    }
    assert_eq!((a.logits(), b.logits()), (&all(&texts[0][..125])[..], &all(&texts[1][..105])[..]));
    // Pages behind the tokens go back, and beyond the context there is nothing to reserve.
    b.truncate(10).unwrap();
    assert_eq!(free(&model), 2);
    a.reserve(usize::MAX).unwrap();
    assert_eq!(free(&model), 0, "five pages are a context");
    a.reset().unwrap();
    assert_eq!(free(&model), 5);
}

/// A window counts on as many rows as go into a call, and drops pages for them.
#[test]
fn windows_reserve_a_call_and_take_no_longer_pieces() {
    let flags = ["-DTOY_BATCH=4", "-DTOY_CHUNK=20", "-DTOY_CONTEXT=80", "-DTOY_WINDOW=70"];
    let Some((_folder, model)) = load(&flags, None) else { return };
    let text = tokens(300, 2);
    let (mut a, mut b) = (fed(&model, &text[..150]), model.session().unwrap());
    let most = a.tokens_per_call();
    assert!((1..20).contains(&most), "{most}");
    a.reserve(1000).unwrap();
    let mut batch = model.batch(4).unwrap();
    let too_long = &text[150..151 + most];
    let error =
        batch.step(&mut [SessionInput::new(&mut b, &[1]), SessionInput::new(&mut a, too_long)]).unwrap_err();
    let Error::BatchSequence { index: 1, source } = &error else { panic!("{error:?}") };
    assert!(matches!(**source, Error::PieceTokens { n, most: m } if (n, m) == (most + 1, most)), "{error:?}");
    assert_eq!((a.past(), b.past()), (150, 0));
    let rows = &mut [SessionInput::new(&mut b, &[1]), SessionInput::new(&mut a, &text[150..150 + most])];
    assert_eq!(batch.step(rows).unwrap(), [logits(&[1], 70), logits(&text[..150 + most], 70)].concat());
}

/// A step that fails costs its own sequences alone, and those no pages.
#[test]
fn a_failed_step_loses_its_sequences_and_no_others() {
    let flags = [&FLAGS[..], &["-DTOY_LAST=100"]].concat();
    let Some((_folder, model)) = load(&flags, None) else { return };
    let pages = free(&model);
    let texts = [tokens(300, 1), tokens(300, 2), tokens(300, 3)];
    let mut sessions = texts.each_ref().map(|text| fed(&model, &text[..95]));
    let [a, b, c] = &mut sessions;
    let mut batch = model.batch(4).unwrap();
    let rows = &mut [SessionInput::new(a, &texts[0][95..98]), SessionInput::new(b, &texts[1][95..102])];
    let error = batch.step(rows).unwrap_err();
    assert!(matches!(error, Error::Step { entry: "step", .. }), "{error:?}");
    // Other sessions go on.
    assert_eq!(c.decode(texts[2][95]).unwrap(), all(&texts[2][..96]));
    // Sessions of the step have the tokens of before, and can start anew.
    assert_eq!([a.past(), b.past()], [95; 2]);
    for (session, text) in [(a, &texts[0]), (b, &texts[1])] {
        session.reset().unwrap();
        assert_eq!(session.prefill(&text[..97]).unwrap(), all(&text[..97]));
    }
    drop(sessions);
    assert_eq!(free(&model), pages);
}

/// Files hold rows, so that they go from pages of one size to those of another. Without pages for them
/// nothing changes.
#[test]
fn states_are_loaded_into_pages_of_another_size() {
    let Some((folder, model)) = load(&FLAGS, None) else { return };
    let wide = [&FLAGS[..], &["-DTOY_GAP=1024"]].concat();
    let Some((_folder, other)) = load(&wide, Some(5)) else { return };
    assert_ne!(model.plan().page_bytes, other.plan().page_bytes);
    let text = tokens(300, 3);
    let file = folder.path().join("s.state");
    fed(&model, &text[..200]).save_state(&file).unwrap();
    let mut session = fed(&other, &text[..10]);
    session.load_state(&file).unwrap();
    assert_eq!((session.past(), free(&other)), (200, 1));
    assert_eq!(session.prefill(&text[200..220]).unwrap(), all(&text[..220]));
    let mut short = fed(&other, &text[..10]);
    let refused = short.load_state(&file).unwrap_err();
    assert!(matches!(refused, Error::NoPages { wanted: 4, free: 0, pages: 5 }), "{refused:?}");
    assert_eq!((short.past(), short.logits()), (10, &all(&text[..10])[..]));
    assert_eq!(short.prefill(&text[10..12]).unwrap(), all(&text[..12]));
    // And back.
    session.save_state(&file).unwrap();
    let mut back = model.session().unwrap();
    back.load_state(&file).unwrap();
    assert_eq!(back.decode(text[220]).unwrap(), all(&text[..221]));
}

fn nothing<'a>(session: &'a mut Session, tokens: &'a [i32]) -> SessionInput<'a> {
    SessionInput { session, tokens, outputs: OutputRows::Nothing }
}

#[test]
fn rows_that_nobody_wants_are_computed() {
    let Some((_folder, model)) = load(&FLAGS, None) else { return };
    let text = tokens(300, 1);
    let (mut a, mut b) = (model.session().unwrap(), model.session().unwrap());
    let mut batch = model.batch(2).unwrap();
    let rows = &mut [nothing(&mut a, &text[..5]), nothing(&mut b, &text[..3])];
    assert!(batch.step(rows).unwrap().is_empty());
    let rows = &mut [
        nothing(&mut a, &text[5..6]),
        SessionInput { session: &mut b, tokens: &text[3..6], outputs: OutputRows::All },
    ];
    let expected = [4, 5, 6].map(|n| all(&text[..n])).concat();
    assert_eq!(batch.step(rows).unwrap(), expected);
    assert_eq!(a.decode(text[6]).unwrap(), all(&text[..7]));
}

//! Random histories of sessions that share pages (`toy/cached.c`), against the tokens that each has seen.

use crate::toy::{self, VOCAB, WIDTH};
use mlcc_codegen::artifact::WeightDestination;
use mlcc_runtime::{
    Error, LoadOptions, Model, OutputRows, Result, Session, SessionBatch, SessionInput, SessionSnapshot,
};
use proptest::prelude::*;

/// Rows of a page.
const ROWS: u64 = 64;

pub fn load(flags: &[&str], cache_pages: Option<u64>) -> Option<(tempfile::TempDir, Model)> {
    if !toy::can_compile() {
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("toy.so");
    toy::pack(&toy::linked_from("cached.c", folder.path(), flags), &path, WeightDestination::Inside);
    let options = LoadOptions { threads: Some(1), cache_pages, ..LoadOptions::default() };
    let model = Model::load(path, &options).unwrap();
    Some((folder, model))
}

/// Logits of the last of some tokens, of which the model sees the `window` newest.
pub fn logits(tokens: &[i32], window: usize) -> Vec<f32> {
    let e = toy::embedding();
    let row = |t: usize| &e[t * WIDTH..(t + 1) * WIDTH];
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let seen = tokens.len().saturating_sub(window)..tokens.len();
    let of = |v: usize| seen.clone().map(|p| (1 + p % 3) as f32 * dot(row(tokens[p] as usize), row(v))).sum();
    (0..VOCAB).map(of).collect()
}

/// An event of one of the sessions, chosen by the first number.
#[derive(Clone, Debug)]
enum SessionEvent {
    Feed(usize, usize),
    /// Several sessions at once, with their tokens and output rows.
    Step(Vec<(usize, usize, OutputRows)>),
    Fork(usize),
    Drop(usize),
    /// Truncates to this many thousandths of its tokens.
    Truncate(usize, usize),
    Keep(usize),
    Return(usize),
    Save(usize),
    Load(usize),
}

fn event() -> impl Strategy<Value = SessionEvent> {
    let at = 0..8usize;
    let want = prop::sample::select(vec![OutputRows::Nothing, OutputRows::Last, OutputRows::All]);
    let piece = (at.clone(), prop_oneof![Just(1), 1..15usize], want);
    prop_oneof![
        4 => (at.clone(), 1..90usize).prop_map(|(at, n)| SessionEvent::Feed(at, n)),
        4 => prop::collection::vec(piece, 1..=4).prop_map(SessionEvent::Step),
        3 => at.clone().prop_map(SessionEvent::Fork),
        1 => at.clone().prop_map(SessionEvent::Drop),
        2 => (at.clone(), 0..1000usize).prop_map(|(at, part)| SessionEvent::Truncate(at, part)),
        1 => at.clone().prop_map(SessionEvent::Keep),
        1 => at.clone().prop_map(SessionEvent::Return),
        1 => at.clone().prop_map(SessionEvent::Save),
        1 => at.prop_map(SessionEvent::Load),
    ]
}

/// Sessions with the tokens that each has seen.
struct SessionHistory<'a> {
    model: &'a Model,
    batch: SessionBatch,
    /// True if all pages may be in use.
    short: bool,
    folder: &'a std::path::Path,
    /// Most tokens of a sequence, and how many of them it sees.
    most: usize,
    window: usize,
    sessions: Vec<(Session, Vec<i32>)>,
    kept: Option<(SessionSnapshot, Vec<i32>)>,
    saved: Option<Vec<i32>>,
}

impl SessionHistory<'_> {
    fn play(&mut self, number: usize, event: &SessionEvent) {
        let file = self.folder.join("s.state");
        let count = self.sessions.len();
        match *event {
            SessionEvent::Feed(at, n) => {
                let (session, seen) = &mut self.sessions[at % count];
                let new = next(seen, n.min(self.most - seen.len()), number);
                if !new.is_empty() && there(self.short, session.prefill(&new).map(drop)) {
                    seen.extend(new);
                    assert_eq!(session.logits(), logits(seen, self.window), "after {} tokens", seen.len());
                }
            }
            SessionEvent::Step(ref pieces) => self.step(pieces, number),
            SessionEvent::Fork(at) if count < 8 => {
                let (session, seen) = &self.sessions[at % count];
                let twin = (session.fork().unwrap(), seen.clone());
                self.sessions.push(twin);
            }
            SessionEvent::Drop(at) if count > 1 => drop(self.sessions.swap_remove(at % count)),
            SessionEvent::Fork(_) | SessionEvent::Drop(_) => {}
            SessionEvent::Truncate(at, part) => {
                let (session, seen) = &mut self.sessions[at % count];
                let past = seen.len() * part / 1000;
                if session.can_truncate_to(past as u64) {
                    session.truncate(past as u64).unwrap();
                    seen.truncate(past);
                } else {
                    assert!(matches!(session.truncate(past as u64), Err(Error::TruncateDropped { .. })));
                }
            }
            SessionEvent::Keep(at) => {
                let (session, seen) = &self.sessions[at % count];
                self.kept = Some((session.snapshot().unwrap(), seen.clone()));
            }
            SessionEvent::Return(at) => {
                if let Some((snapshot, kept)) = &self.kept {
                    let (session, seen) = &mut self.sessions[at % count];
                    if there(self.short, session.restore(snapshot)) {
                        seen.clone_from(kept);
                    }
                }
            }
            SessionEvent::Save(at) => {
                let (session, seen) = &self.sessions[at % count];
                session.save_state(&file).unwrap();
                self.saved = Some(seen.clone());
            }
            SessionEvent::Load(at) => {
                if let Some(saved) = &self.saved {
                    let (session, seen) = &mut self.sessions[at % count];
                    if there(self.short, session.load_state(&file)) {
                        seen.clone_from(saved);
                    }
                }
            }
        }
        for (session, seen) in &self.sessions {
            assert_eq!(session.past(), seen.len() as u64);
        }
    }

    /// Computes a piece of each of some sessions at once.
    fn step(&mut self, pieces: &[(usize, usize, OutputRows)], number: usize) {
        let (mut room, count) = (self.model.max_step_tokens(), self.sessions.len());
        let mut members: Vec<Option<_>> = self.sessions.iter_mut().map(Some).collect();
        let mut fed = Vec::new();
        for &(at, n, want) in pieces {
            let Some((session, seen)) = members[at % count].take() else { continue };
            let n = n.min(self.most - seen.len()).min(session.tokens_per_call()).min(room);
            if n > 0 {
                room -= n;
                fed.push((session, next(seen, n, number), seen, want));
            }
        }
        let mut rows: Vec<SessionInput> = fed
            .iter_mut()
            .map(|(session, tokens, _, want)| SessionInput { session, tokens, outputs: *want })
            .collect();
        if rows.is_empty() || !there(self.short, self.batch.step(&mut rows).map(drop)) {
            return;
        }
        let mut expected = Vec::new();
        for (session, new, seen, want) in fed {
            let first = seen.len() + 1;
            seen.extend(new);
            let of = |n: usize| logits(&seen[..n], self.window);
            match want {
                OutputRows::Nothing => continue,
                OutputRows::Last => expected.extend(of(seen.len())),
                OutputRows::All => expected.extend((first..=seen.len()).flat_map(of)),
            }
            assert_eq!(session.logits(), of(seen.len()), "after {} tokens", seen.len());
        }
        assert_eq!(self.batch.logits(), expected);
    }
}

/// Tokens that go on behind others.
fn next(seen: &[i32], n: usize, number: usize) -> Vec<i32> {
    (0..n).map(|i| ((number * 7 + seen.len() + i * i) % VOCAB) as i32).collect()
}

/// True if there were pages for something; they may only be missing where they are `short`.
fn there(short: bool, result: Result<()>) -> bool {
    match result {
        Ok(()) => true,
        Err(Error::NoPages { .. }) if short => false,
        Err(error) => panic!("{error}"),
    }
}

fn check(flags: &[&str], most: usize, window: usize, cache_pages: Option<u64>) {
    let flags = [flags, &["-DTOY_BATCH=4"]].concat();
    let Some((folder, model)) = load(&flags, cache_pages) else { return };
    let folder = folder.path();
    let all = model.cache_pages().all;
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(40));
    let histories = prop::collection::vec(event(), 1..60);
    let done = runner.run(&histories, |events| {
        let sessions = vec![(model.session().unwrap(), Vec::new())];
        let (batch, short) = (model.batch(4).unwrap(), cache_pages.is_some());
        let (kept, saved) = (None, None);
        let mut history =
            SessionHistory { model: &model, batch, short, folder, most, window, sessions, kept, saved };
        events.iter().enumerate().for_each(|(number, event)| history.play(number, event));
        // No page more than sequences of these lengths would have alone.
        let alone: u64 = history.sessions.iter().map(|(_, seen)| (seen.len() as u64).div_ceil(ROWS)).sum();
        let used = all - history.model.cache_pages().free;
        assert!(used as u64 <= alone, "{used} pages, {alone} without sharing");
        drop(history);
        assert_eq!(model.cache_pages().free, all, "all pages come back");
        Ok(())
    });
    done.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn sessions_have_what_they_were_fed() {
    check(&["-DTOY_CONTEXT=300", "-DTOY_CHUNK=20"], 300, usize::MAX, None);
}

/// Every session that gets no pages has the state from before.
#[test]
fn sessions_that_are_refused_pages_have_what_they_had() {
    check(&["-DTOY_CONTEXT=300", "-DTOY_CHUNK=20"], 300, usize::MAX, Some(8));
}

/// Windows of a few rows of a page, of whole pages with room for some to be dropped, and of nearly all that
/// there is.
#[test]
fn windows_have_what_they_see() {
    for (context, window) in [(40, 7), (300, 70), (200, 190)] {
        let flags = [format!("-DTOY_CONTEXT={context}"), format!("-DTOY_WINDOW={window}")];
        for chunk in ["-DTOY_CHUNK=3", "-DTOY_CHUNK=20"] {
            let flags = [&flags.each_ref().map(String::as_str)[..], &[chunk]].concat();
            check(&flags, 2000, window, None);
        }
    }
}

#[test]
fn forks_share_all_pages_but_the_one_they_write_to() {
    let Some((_folder, model)) = load(&["-DTOY_CONTEXT=2048"], None) else { return };
    let all = model.cache_pages().all;
    let used = || all - model.cache_pages().free;
    let tokens: Vec<i32> = (0..2000).map(|i| i * i % 5).collect();
    let mut session = model.session().unwrap();
    session.prefill(&tokens).unwrap();
    assert_eq!(used(), 32);
    let mut twins: Vec<Session> = (0..5).map(|_| session.fork().unwrap()).collect();
    assert_eq!(used(), 32, "nobody has written yet");
    for (token, twin) in (0..).zip(&mut twins) {
        let seen = [&tokens[..], &[token]].concat();
        assert_eq!(twin.decode(token).unwrap(), logits(&seen, usize::MAX));
    }
    assert_eq!(used(), 37, "the last page of each");
    session.truncate(1000).unwrap();
    assert_eq!(used(), 36, "others have all but its last one");
    let seen = [&tokens[..1000], &[3]].concat();
    assert_eq!(session.decode(3).unwrap(), logits(&seen, usize::MAX));
    assert_eq!(used(), 37, "row 1000 was one of all");
    let seen = [&tokens[..], &[1, 2]].concat();
    assert_eq!(twins[1].decode(2).unwrap(), logits(&seen, usize::MAX));
    twins.clear();
    assert_eq!(used(), 16);
    drop(session);
    assert_eq!(used(), 0);
}

#[test]
fn too_few_pages_are_named_and_change_nothing() {
    // A full context has five.
    let Some((_folder, model)) = load(&["-DTOY_CONTEXT=300"], Some(6)) else { return };
    assert_eq!((model.cache_pages().all, model.cache_pages().free), (6, 6));
    let tokens: Vec<i32> = (0..300).map(|i| i * i % 5).collect();
    let (mut long, mut short) = (model.session().unwrap(), model.session().unwrap());
    long.prefill(&tokens).unwrap();
    short.prefill(&tokens[..64]).unwrap();
    let error = short.prefill(&tokens[64..200]).unwrap_err();
    assert!(matches!(error, Error::NoPages { wanted: 3, free: 0, pages: 6 }), "{error:?}");
    assert!(error.to_string().contains("cache_pages"), "{error}");
    assert!(matches!(short.decode(1), Err(Error::NoPages { wanted: 1, .. })));
    assert_eq!(short.past(), 64);
    // A fork has all of its rows, but none that it may write to.
    let mut twin = long.fork().unwrap();
    twin.truncate(290).unwrap();
    assert!(matches!(twin.decode(1), Err(Error::NoPages { wanted: 1, free: 0, .. })));
    long.reset().unwrap();
    assert_eq!(
        twin.decode(tokens[290]).unwrap(),
        logits(&tokens[..291], usize::MAX),
        "it has them alone now"
    );
    drop(twin);
    assert_eq!(short.prefill(&tokens[64..200]).unwrap(), logits(&tokens[..200], usize::MAX));
    // Fewer than a full context are none to choose.
    let Some((_folder, model)) = load(&["-DTOY_CONTEXT=300"], Some(1)) else { return };
    assert_eq!(model.cache_pages().all, 5);
}

//! The engine over a toy model: texts are those of single runs, whatever else runs; nothing is lost when
//! requests are cancelled, fail or panic.

use std::ops::ControlFlow;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::toy::{CHUNK, FAILS, PANICS, ToyModel, VOCAB};
use mlcc_engine::serving::{
    Engine, EngineOptions, EngineRequest, LaunchError, RequestFailure, RequestHandle, RequestSummary,
    SequenceEvent, TextAdapter,
};
use mlcc_engine::speculate::{DraftModel, Drafter, MakeDrafter, NgramDrafter};
use mlcc_engine::{FinishReason, GenerationRequest, SamplingParams, TextGenerator};
use mlcc_text::{TokenId, Tokenizer};
use proptest::prelude::*;

pub fn tokenizer() -> Tokenizer {
    crate::common::world(&[b"ab"])
}

pub fn engine(toy: &ToyModel, sequences: usize, max_queue: usize) -> Engine {
    drafting(toy, sequences, max_queue, DrafterChoice::None)
}

/// The drafter.
#[derive(Debug, Clone, Copy)]
enum DrafterChoice {
    None,
    Ngrams,
    /// A model that samples as the toy does, if that takes the most probable token.
    Model,
    /// A model that cannot roll back, or one that drops old tokens.
    Recurrent,
    Windowed,
    /// Letters without a reason.
    Wild,
}

fn drafting(toy: &ToyModel, sequences: usize, max_queue: usize, drafts: DrafterChoice) -> Engine {
    keeping(toy, EngineOptions { max_sequences: sequences, max_queue, ..EngineOptions::default() }, drafts)
}

fn keeping(toy: &ToyModel, options: EngineOptions, drafts: DrafterChoice) -> Engine {
    let small = ToyModel::new(false, toy.context);
    let make: Option<MakeDrafter> = match drafts {
        DrafterChoice::None => None,
        DrafterChoice::Ngrams => Some(Box::new(|| Box::new(NgramDrafter))),
        DrafterChoice::Model => Some(Box::new(|| Box::new(DraftModel::new(small)))),
        DrafterChoice::Recurrent => Some(Box::new(|| Box::new(DraftModel::new(ToyModel::new(true, None))))),
        DrafterChoice::Windowed => {
            Some(Box::new(|| Box::new(DraftModel::new(ToyModel::new(false, None).with_window(24)))))
        }
        DrafterChoice::Wild => Some(Box::new(|| Box::new(RandomDrafter))),
    };
    Engine::start_drafting(toy.clone(), Arc::new(tokenizer()), options, make).unwrap()
}

struct RandomDrafter;

impl Drafter for RandomDrafter {
    fn append_draft(&mut self, text: usize, tokens: &mut Vec<TokenId>, most: usize) {
        let letter = |at: usize| 98 + ((text + at * at) % 10) as TokenId;
        // One more than requested: it is cut.
        let from = tokens.len();
        tokens.extend((from..=from + most).map(letter));
    }
}

/// Two adapters of the toy.
pub fn adapters() -> &'static [TextAdapter; 2] {
    static ADAPTERS: OnceLock<[TextAdapter; 2]> = OnceLock::new();
    ADAPTERS.get_or_init(|| [TextAdapter::new("one", 11_u64), TextAdapter::new("two", 22_u64)])
}

pub fn ids(text: &str) -> Vec<TokenId> {
    text.bytes().map(|b| TokenId::from(b) + 1).collect()
}

fn sampled(seed: u64) -> SamplingParams {
    SamplingParams { seed: Some(seed), ..SamplingParams::default() }
}

pub fn request(prompt: &str, seed: u64, max_tokens: usize) -> EngineRequest {
    EngineRequest {
        max_tokens: Some(max_tokens),
        eos: vec![0],
        ..EngineRequest::new(ids(prompt), sampled(seed))
    }
}

/// Text and end of a request.
pub fn read(handle: RequestHandle) -> (String, RequestSummary) {
    let mut text = String::new();
    for event in handle {
        match event {
            SequenceEvent::Delta(piece) => text += &piece.text,
            SequenceEvent::Finished(finished) => return (text, finished),
            other => panic!("{other:?}"),
        }
    }
    panic!("the engine is gone");
}

fn failure(handle: RequestHandle) -> RequestFailure {
    let last = handle.last();
    let Some(SequenceEvent::Failed(failure)) = last else { panic!("{last:?}") };
    failure
}

/// The same text by a generator of its own.
pub fn alone(toy: &ToyModel, request: &EngineRequest) -> (String, FinishReason, usize) {
    let mut generator =
        TextGenerator::new(ToyModel::new(toy.recurrent, toy.context).one().adapted(request.adapter.as_ref()));
    let single = GenerationRequest {
        max_tokens: request.max_tokens,
        eos: &request.eos,
        stop: &request.stop,
        ..GenerationRequest::new(&request.prompt, request.sampling.clone())
    };
    let mut text = String::new();
    let out = generator.generate(&tokenizer(), &single, |piece| {
        text += piece;
        ControlFlow::Continue(())
    });
    let out = out.unwrap();
    (text, out.finish, out.tokens.len())
}

/// The treatment of a request.
#[derive(Debug, Clone)]
struct RequestPlan {
    request: EngineRequest,
    /// Equal requests that are launched with it.
    twins: usize,
    /// The number of pieces after which it is dropped.
    leave_after: Option<usize>,
    /// Texts that are read to their end before it is launched.
    wait_for: usize,
}

fn plan() -> impl Strategy<Value = RequestPlan> {
    // Few letters, so that prompts are often the begin of others.
    let tail = prop_oneof!["[ab]{0,3}", "[a-c]{0,40}"];
    let prompt = (0..4usize, tail).prop_map(|(shared, tail)| {
        let begin =
            ["", "abc", "the quick brown fox jumps over the lazy dog", "the quick brown fox sleeps"][shared];
        format!("a{begin}{tail}")
    });
    let stop = proptest::collection::vec("[a-j]{2,3}", 0..3);
    let leave = proptest::option::weighted(0.2, 0..6usize);
    let order = (0..3u64, -2..3i64, proptest::collection::vec(0..90usize, 0..3), 0..3usize);
    (prompt, any::<u64>(), 0..30usize, stop, 0..3usize, leave, 0..3usize, any::<bool>(), order).prop_map(
        |(
            prompt,
            seed,
            max_tokens,
            stop,
            twins,
            leave_after,
            wait_for,
            reuse,
            (client, priority, borders, adapter),
        )| {
            let request = request(&prompt, seed, max_tokens);
            let adapter = adapter.checked_sub(1).map(|index| adapters()[index].clone());
            let request = EngineRequest {
                stop,
                use_prefix_cache: reuse,
                client,
                priority,
                cache_breakpoints: borders,
                adapter,
                ..request
            };
            RequestPlan { request, twins, leave_after, wait_for }
        },
    )
}

/// Launches all, reads what is not given up, and compares.
fn check_schedule(
    toy: &ToyModel,
    sequences: usize,
    kept: usize,
    drafts: DrafterChoice,
    plans: &[RequestPlan],
) {
    let options = EngineOptions {
        max_sequences: sequences,
        prefix_cache_size: kept,
        max_queue: 1000,
        ..EngineOptions::default()
    };
    let engine = keeping(toy, options, drafts);
    let mut open: Vec<(EngineRequest, RequestHandle)> = Vec::new();
    let finish = |(request, handle): (EngineRequest, RequestHandle)| {
        let (text, finished) = read(handle);
        let expected = alone(toy, &request);
        assert_eq!((text, finished.reason, finished.completion_tokens), expected, "{request:?}");
        assert_eq!(finished.prompt_tokens, request.prompt.len());
        assert!(finished.cached_tokens <= finished.prompt_tokens);
    };
    for plan in plans {
        for _ in 0..plan.wait_for.min(open.len()) {
            finish(open.remove(0));
        }
        let seeds = (0..=plan.twins as u64).map(|i| plan.request.sampling.seed.unwrap().wrapping_add(i));
        let requests: Vec<EngineRequest> =
            seeds.map(|seed| EngineRequest { sampling: sampled(seed), ..plan.request.clone() }).collect();
        let handles = engine.launch_all(requests.clone()).unwrap();
        for (request, mut handle) in requests.into_iter().zip(handles) {
            match plan.leave_after {
                Some(pieces) => drop(handle.by_ref().take(pieces).count()),
                None => open.push((request, handle)),
            }
        }
    }
    open.into_iter().for_each(finish);
    assert!(engine.wait_idle(Duration::from_secs(60)), "given up texts still run: {:?}", engine.stats());
    let stats = engine.stats();
    assert_eq!((stats.waiting, stats.failed), (0, 0));
    let count: usize = plans.iter().map(|plan| 1 + plan.twins).sum();
    assert_eq!((stats.finished + stats.cancelled) as usize, count);
    assert!(
        stats.slots.len() == sequences && stats.slots.iter().all(|slot| slot.running.is_none()) || count == 0
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn schedules_change_no_text(
        (recurrent, window) in prop_oneof![Just((true, None)), Just((false, None)), (9..40usize).prop_map(|w| (false, Some(w)))],
        sequences in 1usize..5,
        kept in 0usize..7,
        plans in proptest::collection::vec(plan(), 1..12),
        // Room for the longest text at least.
        memory in prop_oneof![Just(usize::MAX), 110..400usize],
        drafts in prop_oneof![Just(DrafterChoice::None), Just(DrafterChoice::Ngrams), Just(DrafterChoice::Model), Just(DrafterChoice::Recurrent), Just(DrafterChoice::Windowed), Just(DrafterChoice::Wild)],
    ) {
        let endless = recurrent || window.is_some();
        let toy = ToyModel::new(recurrent, (!endless).then_some(90)).with_memory(memory);
        let toy = window.into_iter().fold(toy, ToyModel::with_window);
        check_schedule(&toy, sequences, kept, drafts, &plans);
        assert_eq!(toy.used(), 0, "memory is given back");
    }
}

#[test]
fn texts_give_way_when_memory_is_short() {
    for recurrent in [false, true] {
        let toy = ToyModel::new(recurrent, None).with_memory(150);
        let engine = engine(&toy, 4, 8);
        let requests: Vec<EngineRequest> = (0..4)
            .map(|seed| EngineRequest {
                eos: vec![],
                ..request(&"a b c d e ".repeat(2 + seed), seed as u64, 60)
            })
            .collect();
        let handles: Vec<RequestHandle> =
            requests.iter().map(|r| engine.launch(r.clone()).unwrap()).collect();
        for (request, handle) in requests.iter().zip(handles) {
            let (text, finished) = read(handle);
            assert_eq!((text, finished.completion_tokens), (alone(&toy, request).0, 60));
        }
        let stats = engine.stats();
        assert!(stats.preempted > 0, "{stats:?}");
        // A request that could never fit ends with an error.
        let failed =
            failure(engine.launch(EngineRequest { eos: vec![], ..request("go on", 1, 200) }).unwrap());
        assert!(matches!(&failed, RequestFailure::Model(reason) if reason.contains("memory")), "{failed:?}");
        drop(engine);
        assert_eq!(toy.used(), 0);
    }
}

/// Memory is asked for what a step reads: of four prompts that is two, and when the others begin these have
/// ended.
#[test]
fn prompts_that_wait_for_a_step_take_no_memory() {
    let toy = ToyModel::new(false, None).with_memory(3 * CHUNK);
    let engine = engine(&toy, 4, 8);
    let text =
        |letter: &str| EngineRequest { use_prefix_cache: false, ..request(&letter.repeat(CHUNK), 1, 1) };
    let requests: Vec<EngineRequest> = ["a", "b", "c", "d"].map(text).into();
    for (request, handle) in requests.iter().zip(engine.launch_all(requests.clone()).unwrap()) {
        assert_eq!(read(handle).0, alone(&toy, request).0);
    }
    let stats = engine.stats();
    assert_eq!((stats.finished, stats.preempted), (4, 0), "{stats:?}");
}

#[test]
fn states_that_cannot_be_copied_are_told_and_read_again() {
    let toy = ToyModel::new(true, None);
    let engine = engine(&toy, 2, 8);
    let texts = ["a b c d e f g", "h i j k l m n"].map(|prompt| request(prompt, 1, 12));
    for text in &texts {
        assert_eq!(read(engine.launch(text.clone()).unwrap()).0, alone(&toy, text).0);
    }
    toy.copies.store(false, Ordering::Relaxed);
    let before = toy.read.load(Ordering::Relaxed);
    let (text, finished) = read(engine.launch(texts[0].clone()).unwrap());
    assert_eq!((finished.cached_tokens, toy.read.load(Ordering::Relaxed) - before), (0, 13 + 11));
    assert_eq!(text, alone(&toy, &texts[0]).0);
    let stats = engine.stats();
    assert_eq!((stats.prefixes_lost, stats.failed), (1, 0));
    assert_eq!(stats.prefix_loss_reason.as_deref(), Some("the copy is refused"));
    toy.copies.store(true, Ordering::Relaxed);
    assert_eq!(read(engine.launch(texts[0].clone()).unwrap()).1.cached_tokens, 13);
    assert_eq!(engine.stats().prefixes_lost, 1);
}

#[test]
fn right_drafts_take_fewer_steps() {
    let toy = ToyModel::new(false, Some(200));
    let greedy = EngineRequest { sampling: SamplingParams::greedy(), eos: vec![], ..request("once", 1, 60) };
    let models = [
        (DrafterChoice::Model, 1),
        (DrafterChoice::Model, 3),
        (DrafterChoice::Recurrent, 1),
        (DrafterChoice::Windowed, 2),
    ];
    for (drafts, sequences) in models.into_iter().chain([(DrafterChoice::Wild, 1)]) {
        let engine = drafting(&toy, sequences, 8, drafts);
        let handles = engine.launch_all(vec![greedy.clone(); sequences]).unwrap();
        for handle in handles {
            let (text, finished) = read(handle);
            assert_eq!((text, finished.completion_tokens), (alone(&toy, &greedy).0, 60), "{drafts:?}");
            let (drafted, accepted) = (finished.drafted_tokens, finished.accepted_tokens);
            let all_right = !matches!(drafts, DrafterChoice::Wild);
            assert!(drafted > 0 && (drafted == accepted) == all_right, "{drafts:?}: {drafted}, {accepted}");
        }
        let stats = engine.stats();
        assert_eq!(
            (stats.steps < 30, stats.drafted_tokens > 0),
            (!matches!(drafts, DrafterChoice::Wild), true)
        );
    }
    // Recurrent states cannot roll back, so nothing is drafted.
    let engine = drafting(&ToyModel::new(true, None), 1, 8, DrafterChoice::Wild);
    assert_eq!(read(engine.launch(greedy).unwrap()).1.drafted_tokens, 0);
}

/// A drafter that cannot roll back goes on from a copy of before the draft, where some of it was wrong: it
/// reads no text again.
#[test]
fn drafts_of_recurrent_models_read_nothing_again() {
    let (toy, small) = (ToyModel::new(false, None), ToyModel::new(true, None));
    let counted = small.clone();
    let make: MakeDrafter = Box::new(|| Box::new(DraftModel::new(small)));
    let options = EngineOptions { max_sequences: 1, ..EngineOptions::default() };
    let engine = Engine::start_drafting(toy.clone(), Arc::new(tokenizer()), options, Some(make)).unwrap();
    let sampling = SamplingParams { temperature: 0.4, ..sampled(5) };
    let wanted = EngineRequest { sampling, eos: vec![], ..request(&"once ".repeat(60), 5, 200) };
    let (text, finished) = read(engine.launch(wanted.clone()).unwrap());
    assert_eq!((text, finished.completion_tokens), (alone(&toy, &wanted).0, 200));
    let RequestSummary { drafted_tokens, accepted_tokens, .. } = finished;
    assert!(accepted_tokens > 10 && accepted_tokens < drafted_tokens, "{finished:?}");
    // The prompt and the text once, drafts, and behind a wrong one the right ones again.
    let read = counted.read.load(Ordering::Relaxed);
    assert!(read <= 300 + 200 + 2 * drafted_tokens, "{read} tokens for {drafted_tokens} of drafts");
}

/// Prompts of several texts are read in the same steps.
#[test]
fn short_prompts_share_a_step() {
    let toy = ToyModel::new(true, None);
    let engine = engine(&toy, 4, 8);
    let runs = engine.launch(endless("go")).unwrap();
    let texts: Vec<EngineRequest> = ["ab", "cd", "ef"].map(|prompt| request(prompt, 3, 20)).to_vec();
    let handles = texts.iter().map(|request| engine.launch(request.clone()).unwrap());
    for (request, handle) in texts.iter().zip(handles.collect::<Vec<_>>()) {
        assert_eq!(read(handle).0, alone(&toy, request).0);
    }
    drop(runs);
    assert!(toy.together.load(Ordering::Relaxed) >= 2);
}

#[test]
fn a_known_prefix_is_not_read_again() {
    for recurrent in [false, true] {
        let toy = ToyModel::new(recurrent, None);
        let engine = engine(&toy, 2, 8);
        let first = request("a conversation begins somewhere and then", 3, 12);
        let (text, finished) = read(engine.launch(first.clone()).unwrap());
        assert_eq!((finished.cached_tokens, finished.reason), (0, FinishReason::Length));
        let read_before = toy.read.load(Ordering::Relaxed);
        // The next turn: what was said and more.
        let said = tokenizer().encode(&text).unwrap();
        let prompt = [first.prompt.clone(), said, ids(" it goes on")].concat();
        let next = EngineRequest { prompt: prompt.clone(), ..first.clone() };
        let (again, finished) = read(engine.launch(next.clone()).unwrap());
        assert_eq!(again, alone(&toy, &next).0);
        // The last token of the text before was sampled, but not computed.
        assert_eq!(finished.cached_tokens, first.prompt.len() + 11, "recurrent: {recurrent}");
        let fed = toy.read.load(Ordering::Relaxed) - read_before;
        assert_eq!(fed, prompt.len() - finished.cached_tokens + 11);
        // Another client asks the first question: a recurrent model has a snapshot behind it, the other one a
        // prefix.
        let other = EngineRequest { sampling: sampled(9), ..first.clone() };
        let (text, finished) = read(engine.launch(other.clone()).unwrap());
        assert_eq!(text, alone(&toy, &other).0);
        let all = first.prompt.len();
        assert_eq!(finished.cached_tokens, if recurrent { all } else { all - 2 });
        let fresh = EngineRequest { use_prefix_cache: false, ..first };
        assert_eq!(read(engine.launch(fresh).unwrap()).1.cached_tokens, 0);
    }
}

#[test]
fn a_snapshot_is_gone_on_from() {
    let toy = ToyModel::new(true, None);
    let engine = engine(&toy, 1, 8);
    let first = request("the begin of many", 1, 5);
    read(engine.launch(first.clone()).unwrap());
    for (seed, tail) in [" tales", " stories", ""].into_iter().enumerate() {
        let next = request(&format!("the begin of many{tail}"), seed as u64, 5);
        let (text, finished) = read(engine.launch(next.clone()).unwrap());
        assert_eq!(text, alone(&toy, &next).0, "{tail}");
        assert_eq!(finished.cached_tokens, first.prompt.len());
    }
}

#[test]
fn a_shared_prefix_is_copied_where_another_text_would_lose_more() {
    let toy = ToyModel::new(false, None);
    let engine = engine(&toy, 2, 8);
    let system = "you are a helpful machine, which answers in one word";
    let long = request(&format!("{system}{}", "a long story ".repeat(8)), 1, 4);
    read(engine.launch(long.clone()).unwrap());
    let (_, finished) = read(engine.launch(request(&format!("{system}?"), 2, 4)).unwrap());
    assert_eq!(finished.cached_tokens, system.len() - 1, "two tokens are read again");
    let (_, finished) = read(engine.launch(long.clone()).unwrap());
    assert_eq!(finished.cached_tokens, long.prompt.len() - 2, "the long text is still there");
}

#[test]
fn equal_prompts_of_one_launch_are_read_once() {
    for recurrent in [false, true] {
        let toy = ToyModel::new(recurrent, None);
        let engine = engine(&toy, 4, 8);
        let requests: Vec<EngineRequest> =
            (0..4).map(|seed| request("which of these is the best answer", seed, 1)).collect();
        let texts: Vec<(String, RequestSummary)> =
            engine.launch_all(requests.clone()).unwrap().into_iter().map(read).collect();
        for (request, (text, _)) in requests.iter().zip(&texts) {
            assert_eq!(*text, alone(&toy, request).0);
        }
        assert_eq!(toy.read.load(Ordering::Relaxed), requests[0].prompt.len());
    }
}

#[test]
fn twins_go_on_when_the_first_is_given_up() {
    let toy = ToyModel::new(true, None);
    let engine = engine(&toy, 3, 8);
    let request = request(&"a long prompt ".repeat(200), 4, 5);
    let mut handles = engine.launch_all(vec![request.clone(); 3]).unwrap();
    drop(handles.remove(0));
    for handle in handles {
        assert_eq!(read(handle).0, alone(&toy, &request).0);
    }
}

#[test]
fn refused_requests_name_what_is_wrong() {
    let toy = ToyModel::new(false, Some(20));
    let engine = engine(&toy, 1, 0);
    let refuse = |request: EngineRequest| engine.launch(request).unwrap_err();
    assert_eq!(refuse(request("", 1, 1)), LaunchError::EmptyPrompt);
    let long = refuse(request(&"a".repeat(21), 1, 1));
    assert_eq!(long, LaunchError::PromptTooLong { prompt: 21, max: 20 });
    let strange = EngineRequest { prompt: vec![1, VOCAB as TokenId], ..request("a", 1, 1) };
    assert_eq!(refuse(strange), LaunchError::PromptToken { position: 1, id: 258, vocab: 258 });
    let biased = EngineRequest { bias: vec![(300, 1.0)], ..request("a", 1, 1) };
    assert!(matches!(refuse(biased), LaunchError::Params(e) if e.name == "logit_bias"));
    let hot =
        EngineRequest { sampling: SamplingParams { temperature: -1.0, ..sampled(1) }, ..request("a", 1, 1) };
    assert!(matches!(refuse(hot), LaunchError::Params(e) if e.name == "temperature"));
    let stop = EngineRequest { stop: vec![String::new()], ..request("a", 1, 1) };
    assert!(matches!(refuse(stop), LaunchError::Stop(_)));
    // A full context ends a text.
    let (_, finished) = read(engine.launch(EngineRequest { eos: vec![], ..request("ab", 1, 100) }).unwrap());
    assert_eq!((finished.reason, finished.completion_tokens), (FinishReason::Context, 19));
    engine.close();
    assert_eq!(refuse(request("a", 1, 1)), LaunchError::Closed);
}

/// Bytes of an endless text.
fn endless(prompt: &str) -> EngineRequest {
    EngineRequest { max_tokens: None, eos: vec![], ..request(prompt, 1, 1) }
}

#[test]
fn the_queue_is_bounded_and_frees_its_places() {
    let toy = ToyModel::new(true, None);
    let engine = engine(&toy, 2, 1);
    let running: Vec<RequestHandle> = (0..3).map(|_| engine.launch(endless("go")).unwrap()).collect();
    let error = engine.launch(request("a", 1, 1)).unwrap_err();
    assert_eq!(error, LaunchError::QueueFull { waiting: 1, max: 1 });
    let three = vec![request("a", 1, 1); 3];
    assert!(matches!(engine.launch_all(three), Err(LaunchError::QueueFull { .. })));
    drop(running);
    assert!(engine.wait_idle(Duration::from_secs(60)));
    assert_eq!(read(engine.launch(request("a", 1, 1)).unwrap()).1.completion_tokens, 1);
}

#[test]
fn deadlines_end_texts_that_run_and_texts_that_wait() {
    let toy = ToyModel::new(true, None);
    let engine = engine(&toy, 1, 4);
    let at = |from_now| Some(Instant::now() + Duration::from_millis(from_now));
    let runs = engine.launch(EngineRequest { deadline: at(200), ..endless("go") }).unwrap();
    let waits = engine.launch(EngineRequest { deadline: at(100), ..endless("go") }).unwrap();
    let (text, finished) = read(waits);
    assert_eq!((text.as_str(), finished.reason, finished.completion_tokens), ("", FinishReason::Deadline, 0));
    let (text, finished) = read(runs);
    assert_eq!(finished.reason, FinishReason::Deadline);
    assert!(!text.is_empty());
}

#[test]
fn failures_and_panics_end_their_texts_and_no_others() {
    let toy = ToyModel::new(false, None);
    let engine = engine(&toy, 2, 8);
    let with = |token: TokenId| EngineRequest { prompt: vec![5, 6, token], ..request("a", 1, 4) };
    let failed = failure(engine.launch(with(FAILS)).unwrap());
    assert_eq!(failed, RequestFailure::Model(format!("token {FAILS} is refused")));
    let panicked = failure(engine.launch(with(PANICS)).unwrap());
    assert!(
        matches!(&panicked, RequestFailure::Panic(message) if message.contains("told to panic")),
        "{panicked:?}"
    );
    let fine = request("the engine goes on", 1, 4);
    assert_eq!(read(engine.launch(fine.clone()).unwrap()).0, alone(&toy, &fine).0);
    let stats = engine.stats();
    assert_eq!((stats.failed, stats.finished), (2, 1));
    // One that is written meanwhile goes on as if nothing had been, and so do those that wait.
    let long = EngineRequest { eos: vec![], ..request("a text that is being written", 2, 400) };
    let mut beside = engine.launch(long.clone()).unwrap();
    let first = beside.next();
    assert!(matches!(first, Some(SequenceEvent::Delta(_))), "{first:?}");
    let all = [with(PANICS), with(FAILS), with(PANICS), fine.clone()]
        .map(|request| engine.launch(request).unwrap());
    for (at, handle) in all.into_iter().enumerate() {
        let last = handle.last();
        assert_eq!(matches!(last, Some(SequenceEvent::Finished(_))), at == 3, "{at}: {last:?}");
    }
    let Some(SequenceEvent::Delta(first)) = first else { return };
    let (rest, finished) = read(beside);
    assert_eq!((first.text.to_string() + &rest, finished.completion_tokens), (alone(&toy, &long).0, 400));
    assert!(engine.wait_idle(Duration::from_secs(60)));
}

#[test]
fn dropping_the_engine_ends_everything() {
    let toy = ToyModel::new(true, None);
    let engine = engine(&toy, 1, 4);
    let running = engine.launch(endless("go")).unwrap();
    let waiting = engine.launch(endless("go")).unwrap();
    drop(engine);
    for handle in [running, waiting] {
        match handle.last() {
            Some(SequenceEvent::Finished(finished)) => assert_eq!(finished.reason, FinishReason::Cancelled),
            other => panic!("{other:?}"),
        }
    }
}

/// Logprobs are those of the model itself, of the prompt's tokens too.
#[test]
fn long_prompts_are_read_in_pieces_between_tokens() {
    let toy = ToyModel::new(true, None);
    let engine = engine(&toy, 2, 8);
    let mut talks = engine.launch(endless("go")).unwrap();
    assert!(matches!(talks.next(), Some(SequenceEvent::Delta(_))));
    let steps = engine.stats().steps;
    let long = request(&"ab".repeat(50 * CHUNK), 1, 1);
    assert_eq!(read(engine.launch(long).unwrap()).1.completion_tokens, 1);
    // No piece is longer than a chunk, and each is a step in which the other text gets its token.
    assert!(engine.stats().steps - steps >= 100, "{:?}", engine.stats());
}

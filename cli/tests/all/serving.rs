//! The engine over artifacts: the tokens of every text are those of a session of its own, whatever else runs
//! and in whatever pieces its prompt is read.
//!
//! The reason is that their logits have the same bits, with schemes of integer activations: RWKV-4 in every
//! case, the others but where a single row is compared with several (states that generated tokens have left).
//! RWKV-6, RWKV-7 and experts round differently.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::cases::{CHUNK, artifact, backends, find, load, options, workspace};
use mlcc_engine::serving::{
    CompiledModelRunner, DiskCacheOptions, Engine, EngineExtras, EngineOptions, EngineRequest, RequestHandle,
    SequenceEvent,
};
use mlcc_engine::speculate::{DraftModel, MakeDrafter, NgramDrafter};
use mlcc_engine::{
    GenerationRequest, LanguageModel, LocalMachine, SamplingParams, TextGenerator, is_batch_invariant,
};
use mlcc_runtime::{LoadOptions, Model};
use mlcc_serve::{ModelSetup, ReadyModel, ServeOptions};
use mlcc_text::{TokenId, Tokenizer};

/// Vectors as states, matrices as states, caches with few key heads.
const CASES: [&str; 3] = [ALWAYS_EQUAL, "rwkv5-hf", "llama3-gqa-tied"];

/// The case in which single rows have the bits of several, too.
const ALWAYS_EQUAL: &str = "rwkv4-hf-odd";

/// Numbers without a pattern, the same in each run.
struct LogitNumbers(u64);

impl LogitNumbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// Prompts of all lengths, of which some begin alike.
fn request(numbers: &mut LogitNumbers, vocab: usize, seed: u64) -> EngineRequest {
    let mut shared = LogitNumbers(numbers.below(3) as u64);
    let begin: Vec<TokenId> = (0..numbers.below(20)).map(|_| shared.below(vocab) as TokenId).collect();
    let own = (0..1 + numbers.below(12)).map(|_| numbers.below(vocab) as TokenId);
    let prompt = begin.into_iter().chain(own).collect();
    let sampling = SamplingParams { temperature: 1.0, seed: Some(seed), ..SamplingParams::default() };
    EngineRequest { max_tokens: Some(1 + numbers.below(14)), ..EngineRequest::new(prompt, sampling) }
}

fn tokens(handle: RequestHandle) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    for event in handle {
        match event {
            SequenceEvent::Delta(piece) => tokens.extend(piece.token.map(|token| token.id)),
            SequenceEvent::Finished(_) => return tokens,
            other => panic!("{other:?}"),
        }
    }
    panic!("the engine is gone");
}

fn alone(model: &Model, tokenizer: &Tokenizer, request: &EngineRequest) -> Vec<TokenId> {
    let mut generator = TextGenerator::new(model.session().unwrap());
    let single = GenerationRequest {
        max_tokens: request.max_tokens,
        ..GenerationRequest::new(&request.prompt, request.sampling.clone())
    };
    generator.generate(tokenizer, &single, |_| ControlFlow::Continue(())).unwrap().tokens
}

fn greedy(prompt: Vec<TokenId>) -> EngineRequest {
    EngineRequest::new(prompt, SamplingParams::greedy())
}

/// Any will do: tokens are compared, not their texts.
fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_dir(&workspace().join("assets/rwkv4-tiny-books"), &LocalMachine).unwrap())
}

fn engine(model: &Model, tokenizer: &Arc<Tokenizer>, sequences: usize) -> Engine {
    let options = EngineOptions { max_sequences: sequences, max_queue: 100, ..EngineOptions::default() };
    Engine::start(CompiledModelRunner::new(model).unwrap(), Arc::clone(tokenizer), options).unwrap()
}

/// Launches, waits for some, and compares all.
fn check(case: &str, model: &Model, sequences: usize, seed: u64) {
    let what = format!("{case}, {sequences} sequences");
    let reuse = case == ALWAYS_EQUAL || is_batch_invariant(model);
    let tokenizer = tokenizer();
    let engine = engine(model, &tokenizer, sequences);
    let mut numbers = LogitNumbers(seed);
    let mut open: Vec<(EngineRequest, RequestHandle)> = Vec::new();
    let mut done: Vec<(EngineRequest, Vec<TokenId>)> = Vec::new();
    for index in 0..24 {
        let first = EngineRequest { use_prefix_cache: reuse, ..request(&mut numbers, model.vocab(), index) };
        let mut requests = vec![first];
        if numbers.below(4) == 0 {
            let twin = requests[0].clone();
            let sampling = SamplingParams { seed: Some(1000 + index), ..twin.sampling.clone() };
            requests.push(EngineRequest { sampling, ..twin });
        }
        let handles = engine.launch_all(requests.clone()).unwrap();
        for (request, mut handle) in requests.into_iter().zip(handles) {
            match numbers.below(6) {
                0 => drop(handle.by_ref().take(numbers.below(3)).count()),
                _ => open.push((request, handle)),
            }
        }
        while open.len() > numbers.below(8) {
            let (request, handle) = open.remove(0);
            let found = tokens(handle);
            // Some conversations go on.
            if reuse && numbers.below(3) == 0 && request.prompt.len() + found.len() < 40 {
                let prompt = [request.prompt.clone(), found.clone(), vec![1]].concat();
                let next = EngineRequest { prompt, ..request.clone() };
                open.push((next.clone(), engine.launch(next).unwrap()));
            }
            done.push((request, found));
        }
    }
    done.extend(open.into_iter().map(|(request, handle)| (request, tokens(handle))));
    let stats = engine.stats();
    assert!((stats.cached_tokens > 0) == reuse && stats.failed == 0, "{what}: {stats:?}");
    for (index, (request, found)) in done.iter().enumerate() {
        assert_eq!(*found, alone(model, &tokenizer, request), "{what}, text {index}: {request:?}");
    }
}

fn build(case: &str, batch: u32, folder: &Path) -> Option<Model> {
    build_with(case, batch, false, folder)
}

fn build_with(case: &str, batch: u32, batch_invariant: bool, folder: &Path) -> Option<Model> {
    find(case)?;
    let mut options = options(case, "q4i8");
    options.batch_invariant = batch_invariant;
    options.batch = Some(batch);
    options.context = (!case.starts_with("rwkv")).then_some(64);
    options.backend = backends().next().expect("a back end is built in");
    let (path, _) = artifact(&options, folder, &format!("{case}-{batch}.so"));
    Some(load(&path, None, 1))
}

#[test]
fn texts_are_those_of_single_sessions() {
    for case in CASES {
        let folder = tempfile::tempdir().unwrap();
        let Some(model) = build(case, 3, folder.path()) else { continue };
        for (seed, sequences) in [(1, 1), (2, 3), (3, 5)] {
            check(case, &model, sequences, seed);
        }
    }
}

/// Next tokens, pieces of several prompts and states that generated tokens have left go together.
#[test]
fn batch_invariant_texts_share_steps() {
    for case in ["llama3-gqa-tied", "rwkv7-hf"] {
        let folder = tempfile::tempdir().unwrap();
        let Some(model) = build_with(case, 3, true, folder.path()) else { continue };
        check(case, &model, 5, 7);
    }
}

/// A row has the same bits alone and among others, and however its prompt is cut, as long as no piece is a
/// single row.
#[test]
fn rows_do_not_depend_on_their_company() {
    for case in CASES {
        let folder = tempfile::tempdir().unwrap();
        let Some(model) = build(case, 3, folder.path()) else { continue };
        let mut numbers = LogitNumbers(1);
        for len in [8, 14] {
            let prompt: Vec<TokenId> = (0..len).map(|_| numbers.below(model.vocab()) as TokenId).collect();
            let mut whole = model.session().unwrap();
            whole.prefill(&prompt).unwrap();
            let alone_in_the_end = |n: usize| n % CHUNK as usize == 1;
            for at in (1..len).filter(|&at| !alone_in_the_end(at) && !alone_in_the_end(len - at)) {
                let mut cut = model.session().unwrap();
                cut.prefill(&prompt[..at]).unwrap();
                cut.prefill(&prompt[at..]).unwrap();
                assert_eq!(cut.logits(), whole.logits(), "{case}: {len} tokens cut at {at}");
            }
            let mut batch = model.batch(3).unwrap();
            for n in 2..=3 {
                let mut together: Vec<_> = (0..n).map(|_| whole.fork().unwrap()).collect();
                let mut alone = whole.fork().unwrap();
                for step in 0..3 {
                    let tokens: Vec<TokenId> = (0..n as TokenId).map(|i| 7 * step + 3 + i).collect();
                    let mut members: Vec<_> = together.iter_mut().collect();
                    batch.decode(&mut members, &tokens).unwrap();
                    let expected = alone.decode(tokens[0]).unwrap();
                    assert_eq!(together[0].logits(), expected, "{case}: {n} sequences in step {step}");
                }
            }
        }
    }
}

/// Tokens that were read as a prompt may be the begin of another one.
#[test]
fn known_prefixes_change_no_text() {
    for case in CASES {
        let folder = tempfile::tempdir().unwrap();
        let Some(model) = build(case, 3, folder.path()) else { continue };
        let tokenizer = tokenizer();
        let engine = engine(&model, &tokenizer, 2);
        let mut numbers = LogitNumbers(9);
        let mut prompt: Vec<TokenId> = Vec::new();
        for seed in 0..4 {
            prompt.extend((0..7).map(|_| numbers.below(model.vocab()) as TokenId));
            let begin = EngineRequest { max_tokens: Some(0), ..greedy(prompt.clone()) };
            assert!(tokens(engine.launch(begin).unwrap()).is_empty());
            let next = EngineRequest { max_tokens: Some(8), ..greedy([&prompt[..], &[1, 2, 3]].concat()) };
            let mut cached = 0;
            let mut found = Vec::new();
            for event in engine.launch(next.clone()).unwrap() {
                match event {
                    SequenceEvent::Delta(piece) => found.extend(piece.token.map(|token| token.id)),
                    SequenceEvent::Finished(finished) => cached = finished.cached_tokens,
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(cached, prompt.len(), "{case}");
            assert_eq!(found, alone(&model, &tokenizer, &next), "{case}, {seed}");
        }
    }
}

/// Drafts of the model itself, of earlier tokens and random ones: their rows are checked in steps of several
/// rows.
#[test]
fn drafts_change_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let Some(model) = build_with("llama3-gqa-tied", 3, true, folder.path()) else { return };
    let tokenizer = tokenizer();
    let step = || CompiledModelRunner::new(&model).unwrap();
    let small = step();
    let makers: [MakeDrafter; 2] =
        [Box::new(|| Box::new(NgramDrafter)), Box::new(|| Box::new(DraftModel::new(small)))];
    for (which, make) in makers.into_iter().enumerate() {
        let options = EngineOptions { max_sequences: 2, max_queue: 100, ..EngineOptions::default() };
        let engine = Engine::start_drafting(step(), Arc::clone(&tokenizer), options, Some(make)).unwrap();
        let mut numbers = LogitNumbers(4);
        let texts = (0..8).map(|seed| {
            let word: Vec<TokenId> = (0..5).map(|_| numbers.below(model.vocab()) as TokenId).collect();
            let sampling = SamplingParams { temperature: 0.4, seed: Some(seed), ..SamplingParams::default() };
            let sampling = if seed % 2 == 0 { SamplingParams::greedy() } else { sampling };
            EngineRequest { max_tokens: Some(24), ..EngineRequest::new(word.repeat(3), sampling) }
        });
        let texts: Vec<EngineRequest> = texts.collect();
        let handles: Vec<RequestHandle> =
            texts.iter().map(|text| engine.launch(text.clone()).unwrap()).collect();
        for (index, (text, handle)) in texts.iter().zip(handles).enumerate() {
            let expected = alone(&model, &tokenizer, text);
            assert_eq!(tokens(handle), expected, "drafter {which}, text {index}");
            let mut generator = TextGenerator::new(model.session().unwrap());
            generator.draft_with(Box::new(NgramDrafter));
            let single = GenerationRequest {
                max_tokens: text.max_tokens,
                ..GenerationRequest::new(&text.prompt, text.sampling.clone())
            };
            let found = generator.generate(&tokenizer, &single, |_| ControlFlow::Continue(())).unwrap();
            assert_eq!(found.tokens, expected, "drafter {which}, text {index} of its own");
        }
        let stats = engine.stats();
        assert!(stats.drafted_tokens > 0 && stats.failed == 0, "{stats:?}");
        assert!(which == 0 || stats.accepted_tokens > 0, "{stats:?}");
    }
}

/// Drafts by a model that cannot roll back, and is mostly wrong.
#[test]
fn drafts_of_a_recurrent_model_change_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let Some(model) = build_with("smollm3", 3, true, folder.path()) else { return };
    let Some(small) = build("rwkv7-hf", 1, folder.path()) else { return };
    assert_eq!(model.vocab(), small.vocab());
    let (tokenizer, small) = (tokenizer(), CompiledModelRunner::new(&small).unwrap());
    let make: MakeDrafter = Box::new(|| Box::new(DraftModel::new(small)));
    let options = EngineOptions { max_sequences: 2, max_queue: 100, ..EngineOptions::default() };
    let step = CompiledModelRunner::new(&model).unwrap();
    let engine = Engine::start_drafting(step, Arc::clone(&tokenizer), options, Some(make)).unwrap();
    let texts: Vec<EngineRequest> = (0..4)
        .map(|seed| {
            let sampling = SamplingParams { seed: Some(seed), ..SamplingParams::default() };
            let prompt = vec![3 + seed as TokenId, 40, 9, 200];
            EngineRequest { max_tokens: Some(50), ..EngineRequest::new(prompt, sampling) }
        })
        .collect();
    let handles: Vec<RequestHandle> = texts.iter().map(|text| engine.launch(text.clone()).unwrap()).collect();
    for (text, handle) in texts.iter().zip(handles) {
        assert_eq!(tokens(handle), alone(&model, &tokenizer, text));
    }
    let stats = engine.stats();
    assert!(stats.drafted_tokens > 20 && stats.failed == 0, "{stats:?}");
}

/// Artifacts without an entry point for batches: texts take turns.
#[test]
fn a_model_without_batches_serves_many_texts() {
    let folder = tempfile::tempdir().unwrap();
    let Some(model) = build(ALWAYS_EQUAL, 1, folder.path()) else { return };
    assert_eq!(model.max_batch(), 1);
    check(ALWAYS_EQUAL, &model, 4, 5);
}

/// A model with pages for two long texts, of which `context` is the most.
fn with_pages(case: &str, context: impl Into<Option<u64>>, pages: u64, folder: &Path) -> Option<Model> {
    find(case)?;
    let mut options = options(case, "q4i8");
    options.batch_invariant = true;
    options.batch = Some(4);
    options.context = context.into();
    options.chunk = Some(64);
    options.backend = backends().next().expect("a back end is built in");
    let (path, _) = artifact(&options, folder, "pages.so");
    let options = LoadOptions { threads: Some(1), cache_pages: Some(pages), ..LoadOptions::default() };
    Some(Model::load(path, &options).unwrap())
}

/// Texts that have used up the pages of the model give way, and go on as if nothing had been: with caches
/// alone, with a window that drops pages, and with states whose snapshots have rows.
#[test]
fn texts_give_way_when_pages_are_short() {
    for (case, context) in [("llama3-gqa-tied", 256), ("mistral-swa", 192), ("falcon-h1", 256)] {
        let folder = tempfile::tempdir().unwrap();
        let pages = context / 64 + 1;
        let Some(model) = with_pages(case, context, pages, folder.path()) else { continue };
        let all = model.cache_pages().all;
        assert_eq!(all as u64, pages);
        give_way(case, &model, 70);
        assert_eq!(model.cache_pages().free, all, "{case}: all pages come back");
    }
}

/// Texts of about `tokens` tokens behind their prompts, for which memory is short.
pub fn give_way(case: &str, model: &Model, tokens: usize) {
    let tokenizer = tokenizer();
    let engine = engine(model, &tokenizer, 4);
    let mut numbers = LogitNumbers(3);
    let mut text = |seed: u64| {
        let prompt = (0..30 + numbers.below(60)).map(|_| numbers.below(model.vocab()) as TokenId);
        let sampling = SamplingParams { temperature: 1.0, seed: Some(seed), ..SamplingParams::default() };
        EngineRequest { max_tokens: Some(tokens), ..EngineRequest::new(prompt.collect(), sampling) }
    };
    let mut texts: Vec<EngineRequest> = (0..5).map(&mut text).collect();
    // A known begin, and one that is read once for two.
    texts.push(EngineRequest { max_tokens: Some(tokens + 20), ..texts[0].clone() });
    let mut handles: Vec<RequestHandle> =
        texts.iter().map(|text| engine.launch(text.clone()).unwrap()).collect();
    let twin = text(9);
    let twins = vec![twin.clone(), EngineRequest { max_tokens: Some(tokens - 10), ..twin }];
    handles.extend(engine.launch_all(twins.clone()).unwrap());
    texts.extend(twins);
    let found: Vec<Vec<TokenId>> = handles.into_iter().map(self::tokens).collect();
    let stats = engine.stats();
    assert!(stats.preempted > 0 && stats.failed == 0, "{case}: {stats:?}");
    let cache = stats.cache.map(|cache| (cache.block_tokens, cache.blocks, cache.used));
    // The blocks that four texts can have.
    let blocks = model.cache_pages().all.min(4 * model.plan().pages() as usize);
    assert_eq!(cache, Some((64, blocks, 0)), "{case}: what nobody runs in is not in use");
    drop(engine);
    for (index, (text, found)) in texts.iter().zip(found).enumerate() {
        assert_eq!(found, alone(model, &tokenizer, text), "{case}, text {index}");
    }
}

#[test]
fn limits_are_those_of_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let Some(model) = build("llama3-gqa-tied", 3, folder.path()) else { return };
    let session = model.session().unwrap();
    let engine = engine(&model, &tokenizer(), 2);
    assert_eq!(engine.limits().context, session.context());
    assert_eq!((engine.limits().vocab, engine.limits().prompt), (session.vocab(), None));
    let long = greedy(vec![1; 65]);
    let error = engine.launch(long).unwrap_err().to_string();
    assert!(error.contains("65 tokens") && error.contains("at most 64"), "{error}");
}

/// Prompts that share a begin, and turns that are edited, go on from states inside of others: recurrent ones,
/// some with caches in pages, and those of a window that has dropped rows.
#[test]
fn prompts_go_on_from_states_inside_of_others() {
    for (case, context) in [("rwkv7-hf", None), ("falcon-h1", Some(256)), ("mistral-swa", Some(192))] {
        let folder = tempfile::tempdir().unwrap();
        let Some(model) = with_pages(case, context, 16, folder.path()) else { continue };
        let tokenizer = tokenizer();
        // All states together have no more pages than full contexts of that many sequences.
        let engine = engine(&model, &tokenizer, 4);
        let mut numbers = LogitNumbers(6);
        let mut some = |count: usize| -> Vec<TokenId> {
            (0..count).map(|_| numbers.below(model.vocab()) as TokenId).collect()
        };
        // The last token, of those read and written, is sampled and not computed.
        let ask = |prompt: Vec<TokenId>, borders: Vec<usize>, cached: usize| {
            let text =
                EngineRequest { cache_breakpoints: borders, max_tokens: Some(12), ..greedy(prompt.clone()) };
            let (mut found, mut known) = (Vec::new(), usize::MAX);
            for event in engine.launch(text.clone()).unwrap() {
                match event {
                    SequenceEvent::Delta(piece) => found.extend(piece.token.map(|token| token.id)),
                    SequenceEvent::Finished(finished) => known = finished.cached_tokens,
                    other => panic!("{case}: {other:?}"),
                }
            }
            assert_eq!(found, alone(&model, &tokenizer, &text), "{case}, {} tokens", prompt.len());
            // Where no rows are dropped yet a window goes back anywhere, also in a text that went on from
            // here.
            let more = case == "mistral-swa" && known > cached;
            assert!(known == cached || more, "{case}, {} tokens: {known} for {cached}", prompt.len());
            [prompt, found].concat()
        };
        let system = some(70);
        let with = |begin: &[TokenId], more: Vec<TokenId>| [begin, &more].concat();
        let mut talk = ask(with(&system, some(40)), vec![70], 0);
        ask(with(&system, some(35)), vec![70], 70);
        let mut edited = talk.clone();
        for _ in 0..2 {
            let known = talk.len() - 1;
            edited = talk.clone();
            talk = ask(with(&talk, some(20)), vec![70], known);
        }
        let known = edited.len() - 1;
        ask(with(&edited, some(9)), vec![70], known);
        ask(with(&system, some(3)), vec![70], 70);
        let stats = engine.stats();
        assert_eq!((stats.failed, stats.prefixes_lost), (0, 0), "{case}: {stats:?}");
        drop(engine);
        assert_eq!(model.cache_pages().free, model.cache_pages().all, "{case}: all pages come back");
    }
}

/// States go into files and come back: caches in pages, with a window, and with recurrent states.
#[test]
fn states_outlive_the_engine_in_files() {
    for (case, context) in [("llama3-gqa-tied", 256), ("mistral-swa", 192), ("falcon-h1", 256)] {
        let folder = tempfile::tempdir().unwrap();
        let Some(model) = with_pages(case, context, 16, folder.path()) else { continue };
        let (tokenizer, cache) = (tokenizer(), tempfile::tempdir().unwrap());
        let mut numbers = LogitNumbers(5);
        let prompt: Vec<TokenId> = (0..90).map(|_| numbers.below(model.vocab()) as TokenId).collect();
        let text =
            EngineRequest { max_tokens: Some(20), ..EngineRequest::new(prompt, SamplingParams::greedy()) };
        let expected = alone(&model, &tokenizer, &text);
        for round in 0..2 {
            let files = DiskCacheOptions {
                folder: cache.path().into(),
                max_bytes: 1 << 30,
                idle_time: Duration::from_secs(2),
                warn: |what| panic!("{what}"),
            };
            let extras = EngineExtras { disk_cache: Some(files), ..EngineExtras::default() };
            let options = EngineOptions { max_sequences: 2, ..EngineOptions::default() };
            let step = CompiledModelRunner::new(&model).unwrap();
            let engine = Engine::start_with(step, Arc::clone(&tokenizer), options, extras).unwrap();
            let (mut found, mut cached) = (Vec::new(), 0);
            for event in engine.launch(text.clone()).unwrap() {
                match event {
                    SequenceEvent::Delta(piece) => found.extend(piece.token.map(|token| token.id)),
                    SequenceEvent::Finished(finished) => cached = finished.cached_tokens,
                    other => panic!("{case}: {other:?}"),
                }
            }
            assert_eq!(found, expected, "{case}, {round}");
            assert!(if round == 0 { cached == 0 } else { cached >= 88 }, "{case}, {round}: {cached}");
            drop(engine);
            assert_eq!(model.cache_pages().free, model.cache_pages().all, "{case}");
        }
    }
}

/// The memory in a server's refusal counts the model that drafts, and pages that are fewer than those of full
/// contexts.
#[test]
fn a_server_counts_drafts_and_pages() {
    let folder = tempfile::tempdir().unwrap();
    let Some(model) = with_pages("llama3-gqa-tied", 256, 5, folder.path()) else { return };
    let ready = |draft: bool, memory: u64, sequences: usize| {
        let served = ModelSetup {
            executor: String::new(),
            tokenizer: Tokenizer::from_dir(&workspace().join("assets/rwkv4-tiny-books"), &LocalMachine)
                .unwrap(),
            format: None,
            sampling: SamplingParams::default(),
            eos: Vec::new(),
            drafter: None,
            draft: draft.then(|| model.clone()),
            adapters: Vec::new(),
            reads_adapters: None,
        };
        let options = ServeOptions {
            sequences: Some(sequences),
            max_queue: 1,
            memory: Some(memory),
            ..ServeOptions::default()
        };
        ReadyModel::from_model(&model, served, &options, 0)
            .map(|ready| ready.need())
            .map_err(|error| error.to_string())
    };
    let (one, eight) = (ready(false, 1 << 30, 1).unwrap(), ready(false, 1 << 30, 8).unwrap());
    let plan = model.plan();
    let each = plan.state_bytes + 4 * plan.vocab;
    // A full context has 4 pages, all texts together no more than 5.
    let kept =
        |sequences| mlcc_serve::prefix_cache_states(&model, sequences) as u64 * (each + 4 * plan.vocab);
    assert_eq!(eight - one, 7 * each + plan.page_bytes + kept(8) - kept(1), "{one} {eight}");
    // Nothing is kept of the model that drafts.
    let both = 2 * eight - kept(8);
    assert_eq!(ready(true, 1 << 30, 8).unwrap(), both);
    let refused = |draft: bool| ready(draft, both - 1, 8).unwrap_err();
    assert!(ready(false, both - 1, 8).is_ok());
    let text = refused(true);
    for part in ["8 sequences of", "caches of", "--cache-tokens", "+ for drafts ", "--memory is"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

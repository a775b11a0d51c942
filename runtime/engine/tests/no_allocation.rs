//! Sampling, decoding and matching stop strings allocate nothing once they have warmed up. Alone in its
//! process, because it brings an allocator that counts.

// Shared with the program `all`.
#[allow(dead_code, reason = "a part of it is used here")]
#[path = "../../../text/tests/all/vocabularies.rs"]
mod common;
#[allow(dead_code, reason = "a part of it is used here")]
#[path = "all/toy/mod.rs"]
mod toy;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mlcc_engine::sampler::LogitChanges;
use mlcc_engine::serving::{Engine, EngineOptions, EngineRequest, EventSink, SequenceEvent};
use mlcc_engine::{Sampler, SamplingParams};
use mlcc_text::stop::StopMatcher;
use mlcc_text::{DecodeStream, SpecialTokens, TokenId};

struct CountingAllocator;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches a const-initialised thread
// local without destructor, which allocates nothing itself.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn allocations(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.with(Cell::get);
    work();
    ALLOCATIONS.with(Cell::get) - before
}

const VOCAB: usize = 5000;

/// Different logits each time, without a pattern.
fn logits(round: usize, out: &mut [f32]) {
    for (id, logit) in out.iter_mut().enumerate() {
        let mixed = (id * 2654435761 + round * 40503) % 10007;
        *logit = mixed as f32 / 1000.0;
    }
}

#[test]
fn sampling() {
    let penalties =
        SamplingParams { repeat_penalty: 1.1, frequency_penalty: 0.1, seed: Some(3), ..Default::default() };
    let all = [
        SamplingParams::greedy(),
        SamplingParams::default(),
        penalties.clone(),
        SamplingParams { top_k: 0, ..penalties.clone() },
        SamplingParams { top_k: 0, min_p: 0.0, ..penalties },
        SamplingParams { top_k: 0, min_p: 0.0, top_p: 1.0, ..SamplingParams::default() },
    ];
    let mut buffer = vec![0.0; VOCAB];
    let biased = LogitChanges { bias: vec![(7, 2.0)], banned_until_min: vec![0], min_tokens: 100 };
    let changes = [LogitChanges::default(), biased];
    for (params, changes) in all.iter().flat_map(|p| changes.iter().map(move |c| (p, c))) {
        let mut sampler = Sampler::with_changes(params.clone(), changes.clone(), VOCAB).unwrap();
        let mut round = 0;
        let mut step = |rounds: usize| {
            for _ in 0..rounds {
                round += 1;
                logits(round, &mut buffer);
                let token = sampler.sample(&buffer).unwrap();
                sampler.accept(token);
            }
        };
        step(1);
        assert_eq!(allocations(|| step(200)), 0, "{params:?} {changes:?}");
    }
}

#[test]
fn text() {
    let tokenizer = common::world(&[b"hello ", "wörld ".as_bytes(), b"\nUs", b"\nUser"]);
    let mut decoder = DecodeStream::new(&tokenizer, SpecialTokens::Skip);
    let mut stops = StopMatcher::new(&["\nUser:".to_owned()]).unwrap();
    let tokens: [TokenId; 8] = [257, 258, 0xf0 + 1, 0x9f + 1, 0x98 + 1, 0x80 + 1, 260, 257];
    let mut length = 0;
    let mut step = |rounds: usize| {
        for _ in 0..rounds {
            for token in tokens {
                if let Some(piece) = decoder.push(token) {
                    length += stops.push(piece).text.len();
                }
            }
        }
    };
    step(2);
    assert_eq!(allocations(|| step(100)), 0);
    assert!(length > 2000);
}

/// The sinks run on the engine's thread, and see what it has allocated since the last token.
#[test]
fn steps_of_an_engine() {
    const TEXTS: usize = 3;
    const TOKENS: usize = 120;
    let mut toy = toy::ToyModel::new(false, None);
    toy.threads = false;
    let engine = Engine::start(
        toy,
        Arc::new(common::world(&[])),
        EngineOptions { max_sequences: TEXTS, ..EngineOptions::default() },
    );
    let engine = engine.unwrap();
    let counts = (0..TEXTS).map(|_| Vec::with_capacity(TOKENS)).collect();
    let seen: Arc<Mutex<Vec<Vec<usize>>>> = Arc::new(Mutex::new(counts));
    let requests = (0..TEXTS).map(|text| {
        let sampling = SamplingParams { seed: Some(text as u64), ..Default::default() };
        let mut request = EngineRequest::new(vec![7; 3 + text], sampling);
        request.max_tokens = Some(TOKENS);
        let seen = Arc::clone(&seen);
        let sink: EventSink = Box::new(move |event| {
            if let SequenceEvent::Delta(piece) = event
                && piece.token.is_some()
            {
                seen.lock().unwrap()[text].push(ALLOCATIONS.with(Cell::get));
            }
            ControlFlow::Continue(())
        });
        (request, sink)
    });
    let tickets = engine.launch_with(requests.collect()).unwrap();
    assert!(engine.wait_idle(Duration::from_secs(60)));
    drop(tickets);
    for counts in seen.lock().unwrap().iter() {
        assert_eq!(counts.len(), TOKENS);
        // Once all have started and before the first ends.
        assert_eq!(counts[20], counts[TOKENS - 10], "{counts:?}");
    }
}

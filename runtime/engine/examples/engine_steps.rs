//! The effect of texts on each other, and of drafts. Times are of runs in turns.
//!
//!     cargo run --release -p mlcc-engine --example engine_steps model.so tokenizer-folder [prompt] [texts]
//!
//! A prompt (2000 tokens by default) is read while texts (8) are written: the longest time between two tokens
//! of a text, in steps. Then a text that repeats itself and one that does not, with and without drafts. Any
//! tokenizer will do.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mlcc_engine::serving::{
    CompiledModelRunner, Engine, EngineOptions, EngineRequest, RequestHandle, SequenceEvent,
};
use mlcc_engine::speculate::{MakeDrafter, NgramDrafter};
use mlcc_engine::{LocalMachine, SamplingParams};
use mlcc_runtime::{LoadOptions, Model};
use mlcc_text::{TokenId, Tokenizer};

type ExampleResult<T> = Result<T, Box<dyn std::error::Error>>;

const RUNS: usize = 3;
const TOKENS: usize = 96;

fn main() -> ExampleResult<()> {
    let mut args = std::env::args().skip(1);
    let usage = "usage: engine_steps model.so tokenizer-folder [prompt] [texts]";
    let (model, tokenizer) = (args.next().ok_or(usage)?, args.next().ok_or(usage)?);
    let mut number = |usual: usize| args.next().map_or(Ok(usual), |a| a.parse());
    let (prompt, texts) = (number(2000)?, number(8)?);
    let model = Model::load(model, &LoadOptions::default())?;
    let tokenizer = Arc::new(Tokenizer::from_dir(Path::new(&tokenizer), &LocalMachine)?);
    gaps(&model, &tokenizer, prompt, texts)?;
    drafts(&model, &tokenizer)
}

fn engine(
    model: &Model,
    tokenizer: &Arc<Tokenizer>,
    sequences: usize,
    drafter: Option<MakeDrafter>,
) -> ExampleResult<Engine> {
    let options = EngineOptions { max_sequences: sequences, ..EngineOptions::default() };
    Ok(Engine::start_drafting(CompiledModelRunner::new(model)?, Arc::clone(tokenizer), options, drafter)?)
}

/// Tokens without a pattern.
fn noise(seed: u64, count: usize, vocab: usize) -> Vec<TokenId> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) as usize % vocab) as TokenId
    };
    (0..count).map(next).collect()
}

fn greedy(prompt: Vec<TokenId>, tokens: usize) -> EngineRequest {
    EngineRequest { max_tokens: Some(tokens), ..EngineRequest::new(prompt, SamplingParams::greedy()) }
}

/// The times at which tokens came.
fn times(handle: RequestHandle) -> Vec<Instant> {
    handle
        .filter(|event| matches!(event, SequenceEvent::Delta(p) if p.token.is_some()))
        .map(|_| Instant::now())
        .collect()
}

fn gaps(model: &Model, tokenizer: &Arc<Tokenizer>, prompt: usize, texts: usize) -> ExampleResult<()> {
    let engine = engine(model, tokenizer, texts + 1, None)?;
    let vocab = model.vocab();
    let begin = Instant::now();
    engine.launch(greedy(noise(1, prompt, vocab), 1))?.count();
    let idle = begin.elapsed();
    let long: Vec<RequestHandle> = (0..texts)
        .map(|text| engine.launch(greedy(noise(2 + text as u64, 16, vocab), 400)))
        .collect::<Result<_, _>>()?;
    let writers: Vec<_> = long.into_iter().map(|handle| std::thread::spawn(|| times(handle))).collect();
    while engine.stats().written_tokens < 30 * texts as u64 {
        std::thread::sleep(Duration::from_millis(5));
    }
    let from = Instant::now();
    engine.launch(greedy(noise(99, prompt, vocab), 1))?.count();
    let to = Instant::now();
    let (mut before, mut during) = (Vec::new(), Vec::new());
    for writer in writers {
        let came = writer.join().map_err(|_| "a reader failed")?;
        for pair in came.windows(2) {
            let gap = pair[1] - pair[0];
            match (pair[0] >= from, pair[1] <= to) {
                (true, true) => during.push(gap),
                (false, _) if pair[1] <= from => before.push(gap),
                _ => {}
            }
        }
    }
    before.sort_unstable();
    during.sort_unstable();
    let (Some(&last), Some(step)) = (during.last(), before.get(before.len() / 2)) else {
        return Err("the prompt was read before the texts had begun".into());
    };
    let at = |share: usize| during[during.len() * share / 100].as_secs_f64() / step.as_secs_f64();
    println!(
        "{texts} texts, a step takes {step:.1?}; while a prompt of {prompt} is read, gaps in steps: median {:.2}, 90 % {:.2}, longest {:.2}",
        at(50),
        at(90),
        last.as_secs_f64() / step.as_secs_f64()
    );
    println!("its first token comes after {:.2?}, alone after {idle:.2?}", to - from);
    Ok(())
}

fn drafts(model: &Model, tokenizer: &Arc<Tokenizer>) -> ExampleResult<()> {
    let hot = SamplingParams {
        temperature: 2.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: Some(1),
        ..SamplingParams::default()
    };
    // A bias makes it the same token for ever: the best case.
    let same = EngineRequest { bias: vec![(7, 100.0)], ..greedy(noise(5, 64, model.vocab()), TOKENS) };
    let other = EngineRequest { sampling: hot, ..greedy(noise(6, 64, model.vocab()), TOKENS) };
    for (what, request) in [("repeats itself", same), ("does not", other)] {
        let (mut plain, mut drafted, mut accepted) = (Vec::new(), Vec::new(), (0, 0));
        for _ in 0..RUNS {
            let ngrams: MakeDrafter = Box::new(|| Box::new(NgramDrafter));
            for drafter in [None, Some(ngrams)] {
                let all = if drafter.is_some() { &mut drafted } else { &mut plain };
                let engine = engine(model, tokenizer, 1, drafter)?;
                let came = times(engine.launch(request.clone())?);
                all.push(came[came.len() - 1] - came[0]);
                let stats = engine.stats();
                if stats.drafted_tokens > 0 {
                    accepted = (stats.accepted_tokens, stats.drafted_tokens);
                }
            }
        }
        plain.sort_unstable();
        drafted.sort_unstable();
        let gain = plain[RUNS / 2].as_secs_f64() / drafted[RUNS / 2].as_secs_f64();
        println!(
            "a text that {what}: {gain:.2} times as fast with drafts ({} of {} tokens right)",
            accepted.0, accepted.1
        );
    }
    Ok(())
}

//! Sampling in an engine: by workers that share sequences, from the first token on; and with which
//! probability.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use mlcc_engine::LanguageModel;
use mlcc_engine::sampler::compute_logprobs;
use mlcc_engine::serving::{Engine, EngineOptions, EngineRequest, SequenceEvent};
use mlcc_text::TokenId;

use crate::serving::{alone, engine, ids, read, request, tokenizer};
use crate::toy::ToyModel;

/// A burst of prompts that are known as a whole: there is no step beside which their first tokens could be
/// chosen.
#[test]
fn first_tokens_of_known_prompts_are_dealt_out_together() {
    let toy = ToyModel::new(true, None);
    let options = EngineOptions { max_sequences: 4, prefix_cache_size: 16, ..EngineOptions::default() };
    let engine = Engine::start(toy.clone(), Arc::new(tokenizer()), options).unwrap();
    let prompts = ["abcd", "bcde", "cdef", "defg"];
    for prompt in prompts {
        read(engine.launch(request(prompt, 1, 1)).unwrap());
    }
    assert_eq!(toy.dealt.load(Ordering::Relaxed), 1);
    let before = toy.read.load(Ordering::Relaxed);
    // All but the last have no other token; and equal ones.
    for prompts in [prompts, ["abcd"; 4]] {
        let requests = (0..4).map(|at| request(prompts[at], 5 + at as u64, 1 + at / 3)).collect::<Vec<_>>();
        toy.dealt.store(0, Ordering::Relaxed);
        let handles = engine.launch_all(requests.clone()).unwrap();
        for (handle, request) in handles.into_iter().zip(&requests) {
            let (text, finished) = read(handle);
            assert_eq!((text, finished.cached_tokens), (alone(&toy, request).0, 4));
        }
        assert_eq!(toy.dealt.load(Ordering::Relaxed), 4);
    }
    assert_eq!(toy.read.load(Ordering::Relaxed) - before, 2);
}

#[test]
fn a_warm_up_leaves_nothing() {
    for recurrent in [false, true] {
        let toy = ToyModel::new(recurrent, (!recurrent).then_some(90)).with_memory(100);
        let engine = Engine::start(toy.clone(), Arc::new(tokenizer()), EngineOptions::default()).unwrap();
        engine.warm_up().unwrap();
        let read_by_it = toy.read.load(Ordering::Relaxed);
        assert!(read_by_it > 1 && toy.used() == 0);
        let stats = engine.stats();
        assert_eq!((stats.finished, stats.prompt_tokens, stats.written_tokens, stats.steps), (0, 0, 0, 0));
        // Beside a text, too.
        let text = request("and then", 1, 40);
        let handle = engine.launch(text.clone()).unwrap();
        engine.warm_up().unwrap();
        assert_eq!(read(handle).0, alone(&toy, &text).0);
        engine.close();
        engine.warm_up().unwrap();
    }
}

#[test]
fn first_tokens_are_dealt_out_together() {
    // Prompts that one step reads together, and equal ones, which wait for the first of them.
    for prompts in [["ab", "bc", "cd", "de"], ["abcde"; 4]] {
        for recurrent in [false, true] {
            let toy = ToyModel::new(recurrent, None);
            let options = EngineOptions { max_sequences: 4, ..EngineOptions::default() };
            let engine = Engine::start(toy.clone(), Arc::new(tokenizer()), options).unwrap();
            // There are no others than the first.
            let requests = (0..4).map(|at| request(prompts[at], at as u64, 1)).collect::<Vec<_>>();
            let handles = engine.launch_all(requests.clone()).unwrap();
            for (handle, request) in handles.into_iter().zip(&requests) {
                assert_eq!(read(handle).0, alone(&toy, request).0);
            }
            assert_eq!(toy.dealt.load(Ordering::Relaxed), 4, "{prompts:?}");
        }
    }
}

#[test]
fn logprobs_are_of_the_models_own_distribution() {
    let toy = ToyModel::new(false, None);
    let engine = engine(&toy, 2, 8);
    let prompt = "what is known of this";
    let wanted = EngineRequest {
        logprobs: Some(3),
        prompt_logprobs: Some(2),
        bias: vec![(ids("a")[0], 5.0)],
        ..request(prompt, 8, 6)
    };
    let mut single = toy.one();
    let mut behind = |tokens: &[TokenId]| single.prefill(tokens).unwrap().to_vec();
    let (mut of_prompt, mut chosen) = (None, Vec::new());
    for event in engine.launch(wanted.clone()).unwrap() {
        match event {
            SequenceEvent::PromptLogprobs(found) => of_prompt = Some(found),
            SequenceEvent::Delta(piece) => chosen.extend(piece.token),
            SequenceEvent::Finished(finished) => assert_eq!(finished.cached_tokens, 0),
            SequenceEvent::Failed(failure) => panic!("{failure}"),
        }
    }
    let of_prompt = of_prompt.unwrap();
    assert_eq!(of_prompt.len(), prompt.len());
    assert_eq!(of_prompt[0], None);
    let mut logits = behind(&wanted.prompt[..1]);
    for (found, &token) in of_prompt[1..].iter().zip(&wanted.prompt[1..]) {
        assert_eq!(*found, compute_logprobs(&logits, token, 2));
        logits = behind(&[token]);
    }
    assert!(!chosen.is_empty());
    for token in chosen {
        assert_eq!(token.logprobs, compute_logprobs(&logits, token.id, 3));
        logits = behind(&[token.id]);
    }
}

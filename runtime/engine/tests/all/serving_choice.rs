//! Who chooses tokens in an engine: workers, texts dealt out, from the first token on.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use mlcc_engine::serving::{Engine, EngineOptions};

use crate::serving::{alone, read, request, tokenizer};
use crate::toy::Toy;

#[test]
fn first_tokens_are_dealt_out_together() {
    // Prompts that one step reads together, and equal ones, which wait for the first of them.
    for prompts in [["ab", "bc", "cd", "de"], ["abcde"; 4]] {
        for recurrent in [false, true] {
            let toy = Toy::new(recurrent, None);
            let options = EngineOptions { sequences: 4, ..EngineOptions::default() };
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

//! The generation loop over a toy model: the most probable next byte is the next one of a fixed text.

use crate::common;
use crate::toy::ToyModel;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use mlcc_engine::speculate::{DraftModel, Drafter, NgramDrafter};
use mlcc_engine::{
    FinishReason, GenerateError, GenerationRequest, GenerationResult, LanguageModel, SamplingParams,
    TextGenerator,
};
use mlcc_text::{TokenId, Tokenizer};

/// Says `script` byte by byte, whatever its input is, from the first byte after the prompt.
struct ScriptedModel {
    script: Vec<u8>,
    said: usize,
    fed: Vec<TokenId>,
    logits: Vec<f32>,
    context: Option<usize>,
    fails_at: Option<usize>,
}

#[derive(Debug, thiserror::Error)]
#[error("the device is gone")]
struct ModelGone;

impl ScriptedModel {
    fn new(script: &[u8]) -> Self {
        ScriptedModel {
            script: script.to_vec(),
            said: 0,
            fed: vec![],
            logits: vec![0.0; 258],
            context: None,
            fails_at: None,
        }
    }

    fn next(&mut self) -> Result<&[f32], ModelGone> {
        if self.fails_at == Some(self.said) {
            return Err(ModelGone);
        }
        self.logits.fill(0.0);
        // World ids of bytes are one more; after the script comes the end of the text, id 0.
        let id = self.script.get(self.said).map_or(0, |&b| usize::from(b) + 1);
        self.logits[id] = 50.0;
        Ok(&self.logits)
    }
}

impl LanguageModel for ScriptedModel {
    type Error = ModelGone;

    fn prefill(&mut self, tokens: &[TokenId]) -> Result<&[f32], ModelGone> {
        self.fed.extend_from_slice(tokens);
        self.next()
    }

    fn decode(&mut self, token: TokenId) -> Result<&[f32], ModelGone> {
        self.fed.push(token);
        self.said += 1;
        self.next()
    }

    fn reset(&mut self) -> Result<(), ModelGone> {
        self.fed.clear();
        self.said = 0;
        Ok(())
    }

    fn past(&self) -> usize {
        self.fed.len()
    }

    fn vocab(&self) -> usize {
        self.logits.len()
    }

    fn context(&self) -> Option<usize> {
        self.context
    }

    fn prefill_chunk(&self) -> usize {
        4
    }
}

fn tokenizer() -> Tokenizer {
    common::world(&[b"ab"])
}

fn ids(text: &str) -> Vec<TokenId> {
    text.bytes().map(|b| TokenId::from(b) + 1).collect()
}

fn greedy(prompt: &[TokenId]) -> GenerationRequest<'_> {
    GenerationRequest { eos: &[0], ..GenerationRequest::new(prompt, SamplingParams::greedy()) }
}

fn run(
    generator: &mut TextGenerator<ScriptedModel>,
    request: &GenerationRequest<'_>,
) -> (Vec<String>, GenerationResult) {
    let mut pieces = Vec::new();
    let result = generator.generate(&tokenizer(), request, |piece| {
        pieces.push(piece.to_owned());
        ControlFlow::Continue(())
    });
    (pieces, result.unwrap())
}

#[test]
fn ends_with_the_end_token() {
    let prompt = ids("hello you");
    let mut generator = TextGenerator::new(ScriptedModel::new("naïve".as_bytes()));
    let (pieces, out) = run(&mut generator, &greedy(&prompt));
    assert_eq!(pieces, ["n", "a", "ï", "v", "e"]);
    assert_eq!(out.finish, FinishReason::Eos);
    assert_eq!((out.prompt_tokens, out.tokens.len(), out.decode_steps), (9, 7, 6));
    assert_eq!(out.tokens.last(), Some(&0));
    // The end token is chosen, but no part of the context.
    assert_eq!(generator.model().fed, [prompt, ids("naïve")].concat());
    assert_eq!(generator.past(), 9 + 6);
}

#[test]
fn end_token_may_be_ignored_and_shows_nothing() {
    let prompt = ids("x");
    let request = GenerationRequest { eos: &[], max_tokens: Some(6), ..greedy(&prompt) };
    let (pieces, out) = run(&mut TextGenerator::new(ScriptedModel::new(b"abc")), &request);
    assert_eq!((pieces.concat().as_str(), out.tokens.len()), ("abc", 6));
}

#[test]
fn length_is_exact_and_the_next_turn_feeds_the_last_token() {
    let mut generator = TextGenerator::new(ScriptedModel::new(b"abcdef"));
    let prompt = ids("x");
    let (pieces, out) = run(&mut generator, &GenerationRequest { max_tokens: Some(3), ..greedy(&prompt) });
    assert_eq!((pieces.concat().as_str(), out.finish, out.decode_steps), ("abc", FinishReason::Length, 2));
    assert_eq!(generator.model().fed, ids("xab"));
    let next = ids("yz");
    let (_, out) = run(&mut generator, &GenerationRequest { max_tokens: Some(1), ..greedy(&next) });
    assert_eq!(generator.model().fed, ids("xabcyz"));
    assert_eq!((out.prompt_tokens, generator.past()), (3, 6));
    generator.reset().unwrap();
    let (_, out) = run(&mut generator, &GenerationRequest { max_tokens: Some(0), ..greedy(&prompt) });
    assert_eq!((out.tokens.len(), out.finish, generator.past()), (0, FinishReason::Length, 1));
    assert_eq!(generator.model().fed, ids("x"));
}

#[test]
fn stop_string_is_not_shown() {
    let prompt = ids("x");
    let stop = ["\nUser:".to_owned(), "END".to_owned()];
    let request = GenerationRequest { stop: &stop, ..greedy(&prompt) };
    let (pieces, out) = run(&mut TextGenerator::new(ScriptedModel::new(b"Hi\nUseful\nUser: me")), &request);
    assert_eq!(pieces.concat(), "Hi\nUseful");
    assert_eq!(out.finish, FinishReason::Stop(0));
    // Text that only looks like the start of one is shown at the end.
    let (pieces, out) = run(&mut TextGenerator::new(ScriptedModel::new(b"Hi\nUse")), &request);
    assert_eq!((pieces.concat().as_str(), out.finish), ("Hi\nUse", FinishReason::Eos));
}

#[test]
fn text_that_ends_inside_a_character() {
    let prompt = ids("x");
    let request = GenerationRequest { max_tokens: Some(2), ..greedy(&prompt) };
    let (pieces, _) = run(&mut TextGenerator::new(ScriptedModel::new("aé".as_bytes())), &request);
    assert_eq!(pieces, ["a", "\u{fffd}"]);
}

#[test]
fn full_context_ends_the_text() {
    let prompt = ids("12345");
    let mut model = ScriptedModel::new(b"abcdefgh");
    model.context = Some(7);
    let mut generator = TextGenerator::new(model);
    let (pieces, out) = run(&mut generator, &greedy(&prompt));
    // Two tokens fit, and the third is chosen from the logits after them.
    assert_eq!((pieces.concat().as_str(), out.finish, generator.past()), ("abc", FinishReason::Context, 7));
    let error =
        generator.generate(&tokenizer(), &greedy(&prompt), |_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, GenerateError::PromptTooLong { prompt: 5, past: 8, context: 7 }), "{error}");
    assert!(error.to_string().contains("--ctx-size"));
}

#[test]
fn penalties_reach_back_into_the_turn_before() {
    let first = ids("a");
    let next = ids("x");
    // So strong that what has been said once is never said again.
    let sampling = SamplingParams { presence_penalty: 100.0, ..SamplingParams::greedy() };
    let request = |prompt| GenerationRequest {
        max_tokens: Some(1),
        ..GenerationRequest::new(prompt, sampling.clone())
    };
    let mut generator = TextGenerator::new(ScriptedModel::new(b"aa"));
    assert_ne!(run(&mut generator, &request(&first)).1.tokens, ids("a"));
    assert_ne!(run(&mut generator, &request(&next)).1.tokens, ids("a"));
    generator.reset().unwrap();
    assert_eq!(run(&mut generator, &request(&next)).1.tokens, ids("a"));
}

#[test]
fn cancelling() {
    let prompt = ids("123456789");
    let flag = AtomicBool::new(true);
    let request = GenerationRequest { cancel: Some(&flag), ..greedy(&prompt) };
    let mut generator = TextGenerator::new(ScriptedModel::new(b"abc"));
    let (pieces, out) = run(&mut generator, &request);
    assert_eq!((pieces.len(), out.finish, out.prompt_tokens), (0, FinishReason::Cancelled, 0));
    flag.store(false, Ordering::Relaxed);
    // The last token of a text is computed with the next prompt, also if a prompt was cancelled meanwhile.
    let one = GenerationRequest { max_tokens: Some(1), ..request.clone() };
    run(&mut generator, &one);
    flag.store(true, Ordering::Relaxed);
    run(&mut generator, &one);
    flag.store(false, Ordering::Relaxed);
    assert_eq!(run(&mut generator, &one).1.prompt_tokens, prompt.len() + 1);
    let past = generator.past();
    assert!(generator.decode_pending().unwrap() && generator.decode_pending().unwrap());
    assert_eq!(generator.past(), past + 1);
    assert_eq!(run(&mut generator, &one).1.prompt_tokens, prompt.len());
    let mut generator = TextGenerator::new(ScriptedModel::new(b"abcdef"));
    let mut text = String::new();
    let result = generator.generate(&tokenizer(), &request, |piece| {
        text.push_str(piece);
        flag.store(text.len() == 2, Ordering::Relaxed);
        ControlFlow::Continue(())
    });
    assert_eq!((text.as_str(), result.unwrap().finish), ("ab", FinishReason::Cancelled));
    let result =
        TextGenerator::new(ScriptedModel::new(b"abc"))
            .generate(&tokenizer(), &greedy(&prompt), |_| ControlFlow::Break(()));
    assert_eq!(result.unwrap().finish, FinishReason::Cancelled);
}

#[test]
fn bad_requests_are_named_and_change_nothing() {
    let mut generator = TextGenerator::new(ScriptedModel::new(b"abc"));
    let mut fails = |request: &GenerationRequest<'_>| {
        let error = generator.generate(&tokenizer(), request, |_| ControlFlow::Continue(())).unwrap_err();
        assert_eq!(generator.past(), 0);
        error.to_string()
    };
    assert!(fails(&greedy(&[])).contains("prompt is empty"));
    assert!(fails(&greedy(&[1, 2, 258])).contains("token 2 of the prompt has id 258"));
    assert!(fails(&greedy(&[-5])).contains("id -5"));
    let hot = SamplingParams { temperature: -1.0, ..SamplingParams::default() };
    assert!(fails(&GenerationRequest::new(&[1], hot)).contains("temperature is -1"));
    assert!(
        fails(&GenerationRequest { stop: &[String::new()], ..greedy(&[1]) }).contains("stop string number 0")
    );
}

#[test]
fn a_failing_model_is_an_error() {
    let mut model = ScriptedModel::new(b"abc");
    model.fails_at = Some(2);
    let prompt = ids("x");
    let mut text = String::new();
    let result = TextGenerator::new(model).generate(&tokenizer(), &greedy(&prompt), |piece| {
        text.push_str(piece);
        ControlFlow::Continue(())
    });
    assert_eq!(text, "ab");
    assert!(result.unwrap_err().to_string().contains("the device is gone"));
}

#[test]
fn a_seed_gives_the_text_again() {
    let prompt = ids("x");
    let sampling = SamplingParams {
        temperature: 40.0,
        min_p: 0.0,
        top_p: 1.0,
        top_k: 0,
        seed: Some(9),
        ..SamplingParams::default()
    };
    let request =
        GenerationRequest { max_tokens: Some(40), ..GenerationRequest::new(&prompt, sampling.clone()) };
    let (_, first) = run(&mut TextGenerator::new(ScriptedModel::new(b"abcabcabc")), &request);
    let (_, again) = run(&mut TextGenerator::new(ScriptedModel::new(b"abcabcabc")), &request);
    assert_eq!((&first.tokens, first.seed), (&again.tokens, 9));
    let other = GenerationRequest { sampling: SamplingParams { seed: Some(10), ..sampling }, ..request };
    assert_ne!(run(&mut TextGenerator::new(ScriptedModel::new(b"abcabcabc")), &other).1.tokens, first.tokens);
}

/// Letters without a reason, now and then the right one.
struct WildDrafter;

impl Drafter for WildDrafter {
    fn append_draft(&mut self, _text: usize, tokens: &mut Vec<TokenId>, most: usize) {
        let from = tokens.len();
        tokens.extend((from..from + most).map(|at| 98 + (at * at % 10) as TokenId));
    }
}

#[test]
fn drafts_change_no_text() {
    let tokenizer = crate::common::world(&[b"ab"]);
    let prompt: Vec<TokenId> = b"once upon a time".iter().map(|&b| TokenId::from(b) + 1).collect();
    let stop = ["ccc".to_owned(), "ad".to_owned()];
    let mut accepted = 0;
    for case in 0..60 {
        let toy = ToyModel::new(case % 7 == 6, [None, Some(90)][case % 2]);
        let sampling = match case % 3 {
            0 => SamplingParams::greedy(),
            _ => SamplingParams { seed: Some(case as u64), repeat_penalty: 1.1, ..SamplingParams::default() },
        };
        let request = GenerationRequest {
            max_tokens: [Some(40), Some(0), Some(1), None][case % 4],
            eos: &[0],
            stop: &stop[..case % 3],
            ..GenerationRequest::new(&prompt, sampling)
        };
        let request = GenerationRequest { max_tokens: request.max_tokens.or(Some(100)), ..request };
        let small = ToyModel::new(false, None);
        let drafters: [Box<dyn Drafter>; 3] =
            [Box::new(NgramDrafter), Box::new(WildDrafter), Box::new(DraftModel::new(small))];
        let mut plain = TextGenerator::new(toy.one());
        // The next text goes on where the last one ended.
        let expected = [(); 2].map(|()| plain.generate(&tokenizer, &request, |_| ControlFlow::Continue(())));
        for drafter in drafters {
            let mut generator = TextGenerator::new(toy.one());
            generator.draft_with(drafter);
            for expected in &expected {
                let found = generator.generate(&tokenizer, &request, |_| ControlFlow::Continue(()));
                match (&found, expected) {
                    (Ok(found), Ok(expected)) => {
                        accepted += found.accepted;
                        assert_eq!(
                            (&found.tokens, found.finish),
                            (&expected.tokens, expected.finish),
                            "{case}"
                        );
                        assert_eq!(found.decode_steps + found.accepted, expected.decode_steps);
                    }
                    (Err(found), Err(expected)) => assert_eq!(found.to_string(), expected.to_string()),
                    other => panic!("{case}: {other:?}"),
                }
            }
            assert_eq!(
                (generator.past(), generator.computed_tokens()),
                (plain.past(), plain.computed_tokens()),
                "{case}"
            );
        }
    }
    assert!(accepted > 100, "{accepted}");
}

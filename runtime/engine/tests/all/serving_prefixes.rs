//! The parts of a prompt that are not read again: states that an engine keeps, of models that can go back and
//! of those that cannot.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use mlcc_engine::serving::{Engine, EngineOptions, EngineRequest, SequenceEvent, TextAdapter};
use mlcc_text::TokenId;

use crate::serving::{adapters, alone, read, request, tokenizer};
use crate::toy::{CHUNK, ToyModel};

/// An engine that counts the tokens that it computes.
struct CountedEngine {
    toy: ToyModel,
    engine: Engine,
}

impl CountedEngine {
    fn new(toy: &ToyModel, sequences: usize, kept: usize) -> Self {
        let options = EngineOptions {
            max_sequences: sequences,
            prefix_cache_size: kept,
            max_queue: 16,
            ..EngineOptions::default()
        };
        let engine = Engine::start(toy.clone(), Arc::new(tokenizer()), options).unwrap();
        CountedEngine { toy: toy.clone(), engine }
    }

    /// The tokens of a text, and how many of its prompt were read; the others were known.
    fn ask(&self, request: &EngineRequest) -> (Vec<TokenId>, usize) {
        let before = self.toy.read.load(Ordering::Relaxed);
        let (text, finished) = read(self.engine.launch(request.clone()).unwrap());
        assert_eq!(text, alone(&self.toy, request).0, "{request:?}");
        let fed = self.toy.read.load(Ordering::Relaxed) - before;
        let of_prompt = fed - (finished.completion_tokens - 1);
        assert_eq!(of_prompt, finished.prompt_tokens - finished.cached_tokens);
        (tokenizer().encode(&text).unwrap(), of_prompt)
    }

    fn read_of(&self, request: &EngineRequest) -> usize {
        self.ask(request).1
    }
}

/// A text of `length` tokens, different for each `seed`.
fn long(seed: usize, length: usize) -> String {
    (0..length).map(|at| char::from(b'a' + ((seed * 7 + at * at + at / 3) % 17) as u8)).collect()
}

fn after(before: &[TokenId], said: &str, seed: u64) -> EngineRequest {
    let mut next = request(said, seed, 6);
    next.eos = Vec::new();
    next.prompt.splice(0..0, before.iter().copied());
    next
}

/// Models that cannot roll back.
fn checkpointed() -> [ToyModel; 2] {
    [ToyModel::new(true, None), ToyModel::new(false, None).with_window(24)]
}

#[test]
fn an_edited_turn_is_read_from_its_begin() {
    for toy in checkpointed() {
        let engine = CountedEngine::new(&toy, 1, 16);
        let first = after(&[], &long(1, 60), 1);
        let (said, of_prompt) = engine.ask(&first);
        assert_eq!(of_prompt, 60);
        let turn = [first.prompt.clone(), said].concat();
        // The last token of an answer was sampled, but not computed.
        let second = after(&turn, &long(2, 40), 2);
        let (said, of_prompt) = engine.ask(&second);
        assert_eq!(of_prompt, 41);
        for edited in 3..6 {
            assert_eq!(engine.read_of(&after(&turn, &long(edited, 50), 3)), 51, "{edited}");
        }
        // Also before an answer, and where it went on.
        let third = [second.prompt.clone(), said].concat();
        assert_eq!(engine.read_of(&after(&third, &long(6, 45), 4)), 46);
        assert_eq!(engine.read_of(&after(&first.prompt, &long(7, 33), 5)), 33);
    }
}

#[test]
fn a_shared_begin_is_read_once_if_its_end_is_known() {
    let system = long(1, 300);
    for toy in checkpointed() {
        let engine = CountedEngine::new(&toy, 2, 8);
        let with_border =
            EngineRequest { cache_breakpoints: vec![300], ..after(&[], &(system.clone() + &long(2, 50)), 1) };
        assert_eq!(engine.read_of(&with_border), 350);
        for seed in 3..8 {
            assert_eq!(engine.read_of(&after(&[], &(system.clone() + &long(seed, 50)), 1)), 50, "{seed}");
        }
    }
}

/// The end of the shared begin is not known: the second prompt is read from a state inside of it, and from
/// then on the end is known.
#[test]
fn where_prompts_part_is_seen() {
    let system = long(1, 300);
    for toy in checkpointed() {
        let engine = CountedEngine::new(&toy, 2, 8);
        let prompt = |seed| after(&[], &(system.clone() + &long(seed, 100)), 1);
        assert_eq!(engine.read_of(&prompt(2)), 400);
        let second = engine.read_of(&prompt(3));
        assert!((100..100 + 400 / 4 + CHUNK).contains(&second), "{second}");
        for seed in 4..8 {
            assert_eq!(engine.read_of(&prompt(seed)), 100, "{seed}");
        }
    }
}

/// A request without the prefix cache leaves pieces as they are.
#[test]
fn prompts_that_are_to_be_read_whole_are() {
    let toy = ToyModel::new(true, None);
    let engine = CountedEngine::new(&toy, 2, 8);
    let fresh = EngineRequest {
        use_prefix_cache: false,
        cache_breakpoints: vec![100],
        ..after(&[], &long(1, 200), 1)
    };
    for _ in 0..2 {
        assert_eq!(engine.read_of(&fresh), 200);
    }
    assert_eq!(engine.read_of(&after(&[], &(long(1, 200) + "abcabc"), 1)), 6);
    assert_eq!(engine.read_of(&after(&[], &(long(1, 100) + "abcabc"), 1)), 106);
}

/// More conversations than slots: their states wait beside these.
#[test]
fn conversations_take_turns_in_a_slot() {
    for toy in
        [ToyModel::new(false, None), ToyModel::new(true, None), ToyModel::new(false, None).with_window(24)]
    {
        let engine = CountedEngine::new(&toy, 1, 20);
        let mut talks: Vec<Vec<TokenId>> = (0..5).map(|seed| after(&[], &long(seed, 60), 1).prompt).collect();
        for turn in 0..4 {
            for talk in &mut talks {
                let next = after(talk, &long(turn, 40), 1);
                let (said, of_prompt) = engine.ask(&next);
                assert_eq!(of_prompt, if turn == 0 { 100 } else { 41 });
                *talk = [next.prompt, said].concat();
            }
        }
    }
}

#[test]
fn what_was_used_longest_ago_goes_first() {
    // One state for each text of a model that can go back; of others also those behind its prompt and inside
    // of it.
    for (toy, each) in [(ToyModel::new(false, None), 1), (ToyModel::new(true, None), 3)] {
        let engine = CountedEngine::new(&toy, 1, 4 * each);
        let prompt = |seed| after(&[], &long(seed, 60), 1);
        for seed in 0..8 {
            assert_eq!(engine.read_of(&prompt(seed)), 60);
            assert!(toy.used() <= (1 + 4 * each) * 66, "{} tokens have memory", toy.used());
        }
        // One is used again, and the others are evicted.
        let again = if toy.recurrent { 0 } else { 2 };
        assert_eq!(engine.read_of(&prompt(4)), again);
        for seed in [10, 11] {
            assert_eq!(engine.read_of(&prompt(seed)), 60);
        }
        assert_eq!([4, 7].map(|seed| engine.read_of(&prompt(seed))), [again; 2]);
        assert_eq!(engine.read_of(&prompt(5)), 60);
        drop(engine);
        assert_eq!(toy.used(), 0);
    }
}

/// Unused ones inside of prompts take no more than half of the room.
#[test]
fn long_prompts_leave_room_for_others() {
    let toy = ToyModel::new(true, None);
    let engine = CountedEngine::new(&toy, 1, 10);
    let first = after(&[], &long(1, 60), 1);
    assert_eq!(engine.read_of(&first), 60);
    // Each leaves three states inside, that behind it and that of its text.
    for seed in 2..4 {
        assert_eq!(engine.read_of(&after(&[], &long(seed, 600), 1)), 600);
    }
    assert_eq!(engine.read_of(&first), 0);
}

/// States without a running sequence give way to sequences.
#[test]
fn kept_states_make_room_for_texts() {
    for recurrent in [false, true] {
        let toy = ToyModel::new(recurrent, None).with_memory(200);
        let engine = CountedEngine::new(&toy, 1, 20);
        for seed in 0..6 {
            assert_eq!(engine.read_of(&after(&[], &long(seed, 60), 1)), 60);
        }
        assert_eq!(engine.read_of(&after(&[], &long(9, 180), 1)), 180);
        let stats = engine.engine.stats();
        assert_eq!((stats.failed, stats.preempted), (0, 0));
    }
}

/// A state that was read with an adapter is no begin of a prompt with another one, or with none; with the
/// same it is.
#[test]
fn states_of_adapters_are_theirs() {
    let [one, two] = adapters().clone().map(Some);
    for toy in
        [ToyModel::new(false, None), ToyModel::new(true, None), ToyModel::new(false, None).with_window(24)]
    {
        for slots in [1, 2, 4] {
            let engine = CountedEngine::new(&toy, slots, 32);
            let (begin, end) = (long(1, 100), long(2, 50));
            let with = |adapter: &Option<TextAdapter>, text: &str| EngineRequest {
                adapter: adapter.clone(),
                ..after(&[], text, 1)
            };
            for adapter in [&one, &None, &two] {
                assert_eq!(engine.read_of(&with(adapter, &begin)), 100, "{adapter:?} with {slots} slots");
            }
            for adapter in [&two, &one, &None] {
                let of_prompt = engine.read_of(&with(adapter, &(begin.clone() + &end)));
                assert_eq!(of_prompt, 50, "{adapter:?} with {slots} slots");
            }
        }
    }
}

/// Equal prompts of one request wait for each other only if their adapters are equal too.
#[test]
fn twins_have_one_adapter() {
    let toy = ToyModel::new(false, None);
    let engine = CountedEngine::new(&toy, 4, 8).engine;
    let [one, two] = adapters().clone().map(Some);
    let requests: Vec<EngineRequest> = [&one, &None, &two, &one]
        .map(|adapter| EngineRequest { adapter: adapter.clone(), ..after(&[], &long(1, 60), 1) })
        .into();
    for (request, handle) in requests.iter().zip(engine.launch_all(requests.clone()).unwrap()) {
        assert_eq!(read(handle).0, alone(&toy, request).0);
    }
    assert_eq!(toy.read.load(Ordering::Relaxed), 3 * 60 + 4 * 5);
}

/// States of an adapter that is forgotten go, and so does that of a text that runs with it when that ends;
/// others stay.
#[test]
fn states_of_a_forgotten_adapter_go() {
    for toy in [ToyModel::new(false, None), ToyModel::new(true, None)] {
        for slots in [1, 3] {
            let engine = CountedEngine::new(&toy, slots, 32);
            let [number, other] = [5, 6].map(Arc::new);
            let left = Arc::downgrade(&number);
            let one = TextAdapter::new("one", number);
            let other = Some(TextAdapter::new("other", other));
            let with =
                |adapter: Option<TextAdapter>, text: &str| EngineRequest { adapter, ..after(&[], text, 1) };
            let texts = [long(1, 100), long(2, 100)];
            for text in &texts {
                assert_eq!(engine.read_of(&with(Some(one.clone()), text)), 100);
                assert_eq!(engine.read_of(&with(other.clone(), text)), 100);
            }
            let endless = EngineRequest { max_tokens: Some(2000), ..with(Some(one.clone()), &texts[0]) };
            let mut running = engine.engine.launch(endless).unwrap();
            assert!(running.any(|event| matches!(event, SequenceEvent::Delta(_))));
            engine.engine.forget_adapter(&one);
            assert!(running.any(|event| matches!(event, SequenceEvent::Finished(_))));
            assert!(engine.read_of(&with(other.clone(), &texts[1])) < 3, "{slots} slots");
            // A late request is answered, and that leaves nothing either.
            assert_eq!(engine.read_of(&with(Some(one.clone()), &texts[0])), 100);
            drop(one);
            until_none(&left);
        }
    }
}

fn until_none(number: &std::sync::Weak<u64>) {
    let begin = std::time::Instant::now();
    while number.strong_count() > 0 {
        assert!(begin.elapsed().as_secs() < 60, "somebody has the adapter");
        std::thread::yield_now();
    }
}

//! Texts within grammars: whatever is chosen, the text is one that the grammar allows; what cannot be
//! enforced is refused.

use std::sync::Arc;

use crate::common::world;
use crate::toy::{ToyModel, VOCAB};
use mlcc_engine::serving::{
    Engine, EngineOptions, EngineRequest, LaunchError, RequestFailure, RequestSummary, SequenceEvent,
};
use mlcc_engine::{FinishReason, GrammarCompiler, SamplingParams};
use mlcc_text::{Grammar, GrammarError, GrammarSpec, TokenId, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

fn tokenizer() -> Tokenizer {
    world(&[b"ab"])
}

fn compiler() -> &'static GrammarCompiler {
    static MADE: std::sync::OnceLock<GrammarCompiler> = std::sync::OnceLock::new();
    MADE.get_or_init(|| GrammarCompiler::new(&tokenizer(), VOCAB).unwrap())
}

fn compile(spec: &GrammarSpec) -> Grammar {
    compiler().compile(spec).unwrap_or_else(|error| panic!("{spec:?}: {error}"))
}

fn request(grammar: &Grammar, seed: u64) -> EngineRequest {
    let sampling = SamplingParams { seed: Some(seed), ..SamplingParams::default() };
    EngineRequest {
        max_tokens: Some(4000),
        eos: vec![0],
        grammar: Some(grammar.clone()),
        ..EngineRequest::new(vec![1 + (seed % 200) as TokenId, 30, 31], sampling)
    }
}

fn engine(sequences: usize) -> Engine {
    let options = EngineOptions { max_sequences: sequences, ..EngineOptions::default() };
    Engine::start(ToyModel::new(false, None), Arc::new(tokenizer()), options).unwrap()
}

fn run(
    engine: &Engine,
    requests: Vec<EngineRequest>,
) -> Vec<Result<(String, RequestSummary), RequestFailure>> {
    let read = |handle: mlcc_engine::serving::RequestHandle| {
        let mut text = String::new();
        for event in handle {
            match event {
                SequenceEvent::Delta(piece) => text += &piece.text,
                SequenceEvent::Finished(finished) => return Ok((text, finished)),
                SequenceEvent::Failed(failure) => return Err(failure),
                SequenceEvent::PromptLogprobs(_) => {}
            }
        }
        panic!("the engine is gone")
    };
    engine.launch_all(requests).unwrap().into_iter().map(read).collect()
}

fn person() -> GrammarSpec {
    GrammarSpec::JsonSchema(json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "friends": {"type": "array", "items": {"$ref": "#/$defs/friend"}, "maxItems": 2},
        },
        "required": ["name", "age", "friends"],
        "additionalProperties": false,
        "$defs": {"friend": {"type": "object", "properties": {"name": {"enum": ["a", "b\"c"]}}, "required": ["name"],
            "additionalProperties": false}},
    }))
}

fn is_person(text: &str) -> bool {
    let Ok(Value::Object(map)) = serde_json::from_str(text) else { return false };
    let friend = |friend: &Value| {
        friend.as_object().unwrap().len() == 1 && ["a", "b\"c"].contains(&friend["name"].as_str().unwrap())
    };
    let keys: Vec<&str> = map.keys().map(String::as_str).collect();
    keys == ["name", "age", "friends"]
        && map["name"].as_str().unwrap().chars().count() <= 12
        && map["age"].as_u64().unwrap() <= 130
        && map["friends"].as_array().unwrap().len() <= 2
        && map["friends"].as_array().unwrap().iter().all(friend)
}

/// Grammars and whether a text is one of theirs.
type GrammarCase = (GrammarSpec, fn(&str) -> bool);

fn cases() -> Vec<GrammarCase> {
    let choice = ["abc", "abcdef", "a\"\n", "größe"].map(String::from).to_vec();
    let lark = "start: \"(\" (start | WORD) \")\"\nWORD: /[ab]{1,3}/\n";
    vec![
        (person(), is_person),
        (GrammarSpec::Regex("[a-c]{2,5}(-[0-9]+)?x".into()), |text| {
            text.ends_with('x') && text.starts_with(['a', 'b', 'c'])
        }),
        (GrammarSpec::Choice(choice), |text| ["abc", "abcdef", "a\"\n", "größe"].contains(&text)),
        (GrammarSpec::Lark(lark.into()), |text| {
            let opens = text.bytes().filter(|&b| b == b'(').count();
            let word = text.trim_matches(['(', ')']);
            text.bytes().filter(|&b| b == b')').count() == opens
                && text.starts_with('(')
                && matches!(word.len(), 1..=3)
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever else runs, and however often a grammar is used.
    #[test]
    fn texts_are_those_that_the_grammar_allows(seed in any::<u64>(), sequences in 1usize..5) {
        let engine = engine(sequences);
        let cases = cases();
        let mut requests: Vec<EngineRequest> = cases.iter().map(|(spec, _)| request(&compile(spec), seed)).collect();
        // Another text without a grammar, and one that shares its grammar's tables.
        requests.push(EngineRequest { grammar: None, max_tokens: Some(50), ..requests[0].clone() });
        requests.push(requests[0].clone());
        let found = run(&engine, requests.clone());
        prop_assert_eq!(&found[0].as_ref().unwrap().0, &found[5].as_ref().unwrap().0);
        for ((spec, allowed), found) in cases.iter().zip(&found) {
            let (text, finished) = found.as_ref().unwrap();
            let ended = matches!(finished.reason, FinishReason::Grammar | FinishReason::Eos);
            prop_assert!(ended && allowed(text), "{:?}: {:?} {:?}", spec, text, finished.reason);
        }
        let alone = run(&self::engine(1), requests[..1].to_vec());
        prop_assert_eq!(&alone[0].as_ref().unwrap().0, &found[0].as_ref().unwrap().0);
    }
}

/// Every split of a text into parts fits it, so that each mask takes long.
fn ambiguous() -> GrammarSpec {
    GrammarSpec::Lark("start: s\ns: s s s | s s | X |\nX: /./".into())
}

/// Texts in one engine get their tokens in the same steps, unless one has to wait.
#[test]
fn a_text_does_not_wait_for_the_grammars_of_others() {
    let engine = engine(3);
    let slow = EngineRequest { eos: vec![], ..request(&compile(&ambiguous()), 5) };
    let plain = EngineRequest { grammar: None, eos: vec![], max_tokens: Some(2000), ..slow.clone() };
    let handles = engine.launch_all(vec![slow.clone(), slow, plain]).unwrap();
    let mut handles = handles.into_iter();
    let (slow, plain) = ([handles.next().unwrap(), handles.next().unwrap()], handles.next().unwrap());
    let written = plain.filter(|event| matches!(event, SequenceEvent::Delta(_))).count();
    assert_eq!(written, 2000);
    // The text that they had written by then, and perhaps a little more.
    slow.iter().for_each(|handle| handle.cancel());
    for handle in slow {
        let written = handle.filter(|event| matches!(event, SequenceEvent::Delta(_))).count();
        assert!(written < 1000, "{written}");
    }
    assert!(engine.wait_idle(std::time::Duration::from_secs(60)), "a mask that nobody wants is given up");
    // Its threads compute others.
    let (text, _) = run(&engine, vec![request(&compile(&person()), 3)]).remove(0).unwrap();
    assert!(text.trim_start().starts_with('{'), "{text}");
}

#[test]
fn a_grammar_ends_a_text_without_an_end_token() {
    let engine = engine(2);
    let only = compile(&GrammarSpec::Choice(vec!["yes".into(), "no".into()]));
    let endless = EngineRequest { eos: vec![], min_tokens: 100, ..request(&only, 1) };
    let (text, finished) = run(&engine, vec![endless]).remove(0).unwrap();
    assert!(["yes", "no"].contains(&text.as_str()), "{text}");
    assert_eq!((finished.reason, finished.completion_tokens), (FinishReason::Grammar, text.len()));
    // Where the text could go on, it is the end token that ends it.
    let digits = compile(&GrammarSpec::Regex("[0-9]+".into()));
    let (text, finished) = run(&engine, vec![request(&digits, 5)]).remove(0).unwrap();
    assert_eq!(finished.reason, FinishReason::Eos);
    assert!(text.bytes().all(|b| b.is_ascii_digit()) && !text.is_empty(), "{text}");
    // Cut by its length it is a begin of what is allowed.
    let cut = EngineRequest { max_tokens: Some(5), ..request(&compile(&person()), 3) };
    let (text, finished) = run(&engine, vec![cut]).remove(0).unwrap();
    assert_eq!((finished.reason, text.trim_start().starts_with('{')), (FinishReason::Length, true));
}

#[test]
fn what_a_grammar_forbids_is_not_chosen_though_nothing_else_is_left() {
    let engine = engine(1);
    let only = compile(&GrammarSpec::Choice(vec!["a".into()]));
    let banned = EngineRequest { bias: vec![(98, f32::NEG_INFINITY)], ..request(&only, 1) };
    let failure = run(&engine, vec![banned]).remove(0).unwrap_err();
    assert!(
        matches!(&failure, RequestFailure::Grammar(reason) if reason.contains("no token is left")),
        "{failure:?}"
    );
    let other = GrammarCompiler::new(&tokenizer(), VOCAB + 1).unwrap();
    let request = request(&other.compile(&GrammarSpec::JsonObject).unwrap(), 1);
    let refused = engine.launch(request).unwrap_err();
    let error = GrammarError::Vocabulary { expected: VOCAB, found: VOCAB + 1 };
    assert_eq!(refused, LaunchError::Grammar(error));
}

/// Schemas and whether a text is one of theirs.
type SchemaCase = (Value, fn(&str) -> bool);

/// Keywords that hold for every value, only annotate, or are another way to write what can be enforced.
#[test]
fn keywords_that_leave_nothing_to_enforce_are_taken() {
    let text = json!({"type": "string", "maxLength": 3});
    let closed = |properties: Value| {
        let names: Vec<&String> = properties.as_object().unwrap().keys().collect();
        json!({"type": "object", "required": names, "properties": properties, "additionalProperties": false})
    };
    let with = |mut schema: Value, more: Value| {
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    };
    let flag = json!({"type": "boolean"});
    let is_flag = |text: &str| serde_json::from_str::<Value>(text).unwrap()["v"].is_boolean();
    let names = |text: &str| serde_json::from_str::<Value>(text).unwrap().as_object().unwrap().len() <= 2;
    let cases: Vec<SchemaCase> = vec![
        (
            json!({"type": "object", "propertyNames": {"type": "string", "title": "k"}, "additionalProperties": flag,
            "maxProperties": 0}),
            names,
        ),
        (
            json!({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": flag}),
            |text| {
                let value: Value = serde_json::from_str(text).unwrap();
                value
                    .as_object()
                    .unwrap()
                    .iter()
                    .all(|(name, value)| ["a", "b"].contains(&name.as_str()) && value.is_boolean())
            },
        ),
        (
            closed(
                json!({"v": with(flag.clone(), json!({"format": "binary", "deprecated": true, "x-order": 1,
            "readOnly": true, "examples": [5], "default": "d", "$comment": "c"}))}),
            ),
            is_flag,
        ),
        (
            with(closed(json!({"v": {"$ref": "#/$defs/a~1b%20c"}})), json!({"$defs": {"a/b c": flag}})),
            is_flag,
        ),
        (
            with(
                closed(json!({"v": {"$ref": "#flag"}})),
                json!({"definitions": {"f": {"$anchor": "flag", "type": "boolean"}}}),
            ),
            is_flag,
        ),
        (
            with(
                closed(json!({"v": {"$ref": "https://example.com/f"}})),
                json!({"$id": "https://example.com/s", "$schema": "https://json-schema.org/draft/2020-12/schema",
                "$defs": {"f": {"$id": "https://example.com/f", "$ref": "#/$defs/g", "$defs": {"g": flag}}}}),
            ),
            is_flag,
        ),
        (
            with(
                closed(json!({"v": flag})),
                json!({"if": {"required": ["q"]}, "uniqueItems": false, "not": false,
            "unevaluatedProperties": true, "dependentRequired": {}}),
            ),
            is_flag,
        ),
        (
            json!({"type": "object", "required": ["v"], "properties": {"v": flag}, "unevaluatedProperties": false}),
            is_flag,
        ),
        (closed(json!({"v": {"type": "string", "format": "palindrome", "maxLength": 2}})), |text| {
            serde_json::from_str::<Value>(text).unwrap()["v"].as_str().unwrap().chars().count() <= 2
        }),
        (
            closed(
                json!({"v": {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$", "maxLength": 5}}),
            ),
            |text| {
                let value: Value = serde_json::from_str(text).unwrap();
                value["v"].as_str().unwrap().parse::<f64>().is_ok()
            },
        ),
        (
            closed(json!({"v": with(text, json!({"contentEncoding": "base64", "format": "uri-reference"}))})),
            |text| text.contains('v'),
        ),
        (
            closed(json!({"v": {"type": "array", "uniqueItems": true, "maxItems": 1, "items": flag}})),
            |text| serde_json::from_str::<Value>(text).unwrap()["v"].is_array(),
        ),
    ];
    let engine = engine(4);
    for (schema, allowed) in cases {
        let grammar = compile(&GrammarSpec::JsonSchema(schema.clone()));
        let (text, finished) = run(&engine, vec![request(&grammar, 3)]).remove(0).unwrap();
        let ended = matches!(finished.reason, FinishReason::Grammar | FinishReason::Eos);
        assert!(ended && allowed(&text), "{schema}: {text:?} {:?}", finished.reason);
    }
}

/// A model that would write blanks for ever ends its JSON nevertheless.
#[test]
fn blanks_between_tokens_of_json_are_bounded() {
    let engine = engine(4);
    let inner = json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false});
    let list = json!({"type": "array", "minItems": 2, "maxItems": 2, "items": inner});
    let framed = GrammarSpec::Framed {
        rules: "start: \"x\" @framed".into(),
        part: Box::new(GrammarSpec::JsonSchema(list.clone())),
    };
    for spec in [person(), GrammarSpec::JsonSchema(list), framed] {
        for blank in [b' ', b'\n', b'\t', b'\r'] {
            let grammar = compile(&spec);
            let bias = vec![(TokenId::from(blank) + 1, 30.0), (TokenId::from(b'\n') + 1, 29.0)];
            let (text, finished) =
                run(&engine, vec![EngineRequest { bias, ..request(&grammar, 5) }]).remove(0).unwrap();
            assert!(matches!(finished.reason, FinishReason::Grammar | FinishReason::Eos), "{text:?}");
            assert_eq!(text.trim_end(), text, "nothing follows the value");
            serde_json::from_str::<Value>(text.trim_start_matches('x'))
                .unwrap_or_else(|e| panic!("{e}: {text:?}"));
            let longest = text.split(|c: char| !c.is_whitespace()).map(str::len).max().unwrap();
            assert!((1..=24).contains(&longest), "{longest} blanks: {text:?}");
        }
    }
}

/// Nor does one that likes a digit.
#[test]
fn digits_of_numbers_are_bounded() {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["a", "b", "c", "d", "e"], "properties": {
        "a": {"type": "integer"}, "b": {"type": "number"}, "c": {"type": "integer", "minimum": 0},
        "d": {"type": ["number", "null"], "minimum": 0, "maximum": 1}, "e": {"anyOf": [{"type": "number", "exclusiveMaximum": 5}]}}});
    let grammar = compile(&GrammarSpec::JsonSchema(schema));
    let engine = engine(2);
    for liked in [&b"0"[..], b"3", b"0.", b"9", b"-1", b"2e", b".7"] {
        let bias = liked.iter().map(|&byte| (TokenId::from(byte) + 1, 30.0)).collect();
        let (text, finished) =
            run(&engine, vec![EngineRequest { bias, ..request(&grammar, 5) }]).remove(0).unwrap();
        assert!(matches!(finished.reason, FinishReason::Grammar | FinishReason::Eos), "{text:?}");
        serde_json::from_str::<Value>(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
        let longest = text.split(|c: char| !c.is_ascii_digit()).map(str::len).max().unwrap();
        assert!(longest <= 18, "{longest} digits: {text:?}");
    }
}

/// They end with a grammar or with an error, and neither the process nor the memory does.
/// More at once than places: those of one schema share its compilation, others wait for a place.
#[test]
fn a_burst_of_grammars_is_compiled() {
    let compiler = GrammarCompiler::new(&tokenizer(), VOCAB).unwrap();
    let barrier = std::sync::Barrier::new(24);
    std::thread::scope(|scope| {
        for i in 0..24_u32 {
            let (compiler, barrier) = (&compiler, &barrier);
            scope.spawn(move || {
                let spec = match i % 2 {
                    0 => person(),
                    _ => GrammarSpec::Regex(format!("a{{{i}}}")),
                };
                barrier.wait();
                let mut grammar = compiler.compile(&spec).unwrap_or_else(|error| panic!("{spec:?}: {error}"));
                grammar.prepare(&[0]).unwrap();
                let mut logits = [0.0; VOCAB];
                grammar.restrict(&mut logits);
                assert!(logits.contains(&0.0));
            });
        }
    });
}

#[test]
fn hostile_grammars_come_to_an_end() {
    let nested = |levels: usize| {
        (0..levels).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}))
    };
    let wide: serde_json::Map<String, Value> =
        (0..5000).map(|i| (format!("property {i}"), json!({"type": "string"}))).collect();
    let all_of: Vec<Value> = (0..12)
        .map(|i| json!({"anyOf": [{"properties": {format!("a{i}"): {"type": "null"}}}, {"properties": {format!("b{i}"): {"type": "null"}}}]}))
        .collect();
    let cases = [
        GrammarSpec::JsonSchema(json!({"$ref": "#"})),
        GrammarSpec::JsonSchema(
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        ),
        GrammarSpec::JsonSchema(json!({"type": "array", "items": {"$ref": "#"}})),
        GrammarSpec::JsonSchema(json!({"anyOf": [{"$ref": "#"}, {"type": "null"}]})),
        GrammarSpec::JsonSchema(nested(100)),
        GrammarSpec::JsonSchema(json!({"type": "object", "properties": wide})),
        GrammarSpec::JsonSchema(json!({"allOf": all_of})),
        GrammarSpec::JsonSchema(json!({"type": "string", "minLength": 100_000, "maxLength": 100_001})),
        GrammarSpec::JsonSchema(
            json!({"type": "array", "minItems": 1_000_000_000, "items": {"type": "null"}}),
        ),
        GrammarSpec::JsonSchema(json!({"type": "array", "maxItems": 1_000_000, "items": {"type": "null"}})),
        GrammarSpec::JsonSchema(json!({"type": "number", "multipleOf": 1e-300})),
        GrammarSpec::JsonSchema(json!({"type": "string", "pattern": "^(a|b|ab)*c{1000}(x{1,500}y){1,500}$"})),
        GrammarSpec::Regex("((((((a{1,99}){1,99}){1,99}){1,99}){1,99}){1,99}){1,99}".into()),
        GrammarSpec::Regex("(a?){5000}a{5000}".into()),
        GrammarSpec::Regex(format!("{}a{}", "(".repeat(50_000), ")".repeat(50_000))),
        GrammarSpec::Regex("(.*a.{20}.*)&(.*b.{20}.*)".into()),
        GrammarSpec::Regex("[ab]*a[ab]{200}".into()),
        GrammarSpec::Choice((0..10_000).map(|i| format!("{i:05}")).collect()),
        GrammarSpec::Lark("start: start start | \"a\" | \"\"".into()),
        GrammarSpec::Lark(format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000))),
        GrammarSpec::Lark("start: a{1000000000}\na: \"x\"".into()),
    ];
    let engine = engine(2);
    // Its places stay taken after a compilation was given up, so others do not share it.
    let compiler = GrammarCompiler::new(&tokenizer(), VOCAB).unwrap();
    for spec in cases {
        let begin = std::time::Instant::now();
        let shown: String = format!("{spec:?}").chars().take(90).collect();
        match compiler.compile(&spec) {
            Err(error) => {
                println!("{:?} {shown}: {error}", begin.elapsed());
                assert!(!error.to_string().is_empty());
            }
            Ok(grammar) => {
                let found =
                    run(&engine, vec![EngineRequest { max_tokens: Some(40), ..request(&grammar, 9) }])
                        .remove(0);
                println!("{:?} {shown}: {found:?}", begin.elapsed());
                assert!(matches!(found, Ok(_) | Err(RequestFailure::Grammar(_))), "{shown}: {found:?}");
            }
        }
    }
}

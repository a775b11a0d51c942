//! The tokens that grammars allow, and grammars that cannot be enforced.

use crate::common::{Machine, sentencepiece, world};
use mlcc_text::chat::{AnswerGrammar, AnswerSyntax, CallGrammar};
use mlcc_text::{
    ChatTemplate, Grammar, GrammarError, GrammarFactory, GrammarSpec, TokenId, Tokenizer, TokenizerKind,
};
use serde_json::{Value, json};

fn factory() -> &'static GrammarFactory {
    static MADE: std::sync::OnceLock<GrammarFactory> = std::sync::OnceLock::new();
    MADE.get_or_init(|| GrammarFactory::new(&world(&[b"ab"]), 258).unwrap())
}

fn refusal(spec: &GrammarSpec) -> String {
    match factory().compile(spec).unwrap_err() {
        GrammarError::Invalid { reason } => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_cannot_be_enforced_is_refused_with_the_reason() {
    let schema = |schema: Value| GrammarSpec::JsonSchema(schema);
    let cases = [
        (schema(json!(5)), "is an object"),
        (schema(json!({"type": "strange"})), "strange"),
        (schema(json!({"type": "array", "uniqueItems": true})), "uniqueItems"),
        (schema(json!({"properties": {"a/b": {"not": {"const": 1}}}})), "`not` at `#/properties/a~1b`"),
        (schema(json!({"if": {}, "then": {"required": ["a"]}})), "`if` at `#`"),
        (schema(json!({"items": {"contains": {}}})), "`contains` at `#/items`"),
        (schema(json!({"dependentRequired": {"a": ["b"]}})), "`dependentRequired` at `#`"),
        (
            schema(json!({"$ref": "#/$defs/a", "$defs": {"a": {"uniqueItems": true}}})),
            "`uniqueItems` at `#/$defs/",
        ),
        (schema(json!({"allOf": [{}], "unevaluatedProperties": false})), "`unevaluatedProperties` at `#`"),
        (schema(json!({"propertyNames": {"maxLength": 3}})), "`propertyNames` at `#`"),
        (schema(json!({"type": "object", "patternProperties": {"(?=a)b": {}}})), "(?=a)b"),
        (schema(json!({"type": "integer", "minimum": 5, "maximum": 4})), "minimum"),
        (schema(json!({"$ref": "https://example.com/schema.json"})), "example.com"),
        (schema(json!({"$ref": "#/$defs/missing"})), "missing"),
        (schema(json!({"type": "string", "pattern": "(?=a)b"})), "look"),
        // Leniency that the schema asks for is no way around.
        (
            schema(json!({"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}})),
            "uniqueItems",
        ),
        (schema(json!({"const": false, "allOf": [{"const": true}]})), "incompatible"),
        (GrammarSpec::Regex("(a".into()), "unclosed"),
        (GrammarSpec::Regex(String::new()), "empty"),
        (GrammarSpec::Choice(vec![]), "one or more"),
        (GrammarSpec::Choice(vec![String::new()]), "none of them empty"),
        (GrammarSpec::Lark("start: missing".into()), "missing"),
        (GrammarSpec::Lark("  ".into()), "empty"),
        (GrammarSpec::Lark("start: <|no_such_token|>".into()), "no_such_token"),
    ];
    for (spec, part) in cases {
        let reason = refusal(&spec);
        assert!(
            reason.to_lowercase().contains(&part.to_lowercase()) && !reason.contains("backtrace"),
            "{spec:?}: {reason}"
        );
    }
    let long = factory().compile(&GrammarSpec::Lark("a".repeat(300_000))).unwrap_err();
    assert_eq!(long, GrammarError::TooLarge { bytes: 300_000, most: 262_144 });
}

/// Digits of numbers are bounded; usual numbers are allowed.
#[test]
fn numbers_of_usual_lengths_are_accepted() {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["a", "b", "c", "d", "e"], "properties": {
        "a": {"type": "integer"}, "b": {"type": "number"}, "c": {"type": "integer", "minimum": 0},
        "d": {"type": ["number", "null"], "minimum": 0, "maximum": 1}, "e": {"anyOf": [{"type": "number", "exclusiveMaximum": 5}]}}});
    let grammar = factory().compile(&GrammarSpec::JsonSchema(schema)).unwrap();
    for text in [
        r#"{"a":123456789012345678,"b":-3.25,"c":0,"d":0.12345678,"e":4.75}"#,
        r#"{"a":-7,"b":1500000,"c":899999999999999999,"d":null,"e":-0.5}"#,
    ] {
        let tokens: Vec<TokenId> = text.bytes().map(|byte| TokenId::from(byte) + 1).collect();
        assert!(accepts(&grammar, &tokens, 0), "{text}");
    }
}

/// True if a grammar allows these tokens in order, and then the end.
fn accepts(grammar: &Grammar, tokens: &[TokenId], end: TokenId) -> bool {
    let mut grammar = grammar.clone();
    let vocab = grammar.vocab();
    let all = tokens
        .iter()
        .all(|token| allowed(&mut grammar, &[end], vocab).contains(token) && grammar.accept(*token).is_ok());
    all && (grammar.is_finished() || allowed(&mut grammar, &[end], vocab).contains(&end))
}

/// The tokens among `tokens` that may come next.
fn allowed(grammar: &mut Grammar, ends: &[TokenId], vocab: usize) -> Vec<TokenId> {
    let mut logits = vec![0.0; vocab];
    grammar.restrict(&mut logits);
    assert!(logits.iter().all(|&logit| logit == f32::NEG_INFINITY), "nothing is allowed before it is known");
    grammar.prepare(ends).unwrap();
    logits.fill(0.0);
    grammar.restrict(&mut logits);
    (0..vocab as TokenId).filter(|&id| logits[id as usize] == 0.0).collect()
}

/// A tokenizer with the control tokens of such models: thoughts and texts come before a call, or before a
/// text of a form.
#[test]
fn answers_in_channels_are_held_to_calls_and_forms() {
    let tokenizer = include_bytes!("../data/harmony-tokenizer.json");
    let tokenizer = Tokenizer::from_bytes(TokenizerKind::HfJson, tokenizer).unwrap();
    let template = ChatTemplate::from_jinja(include_str!("../data/harmony.jinja"), &Machine).unwrap();
    let syntax = AnswerSyntax::from_template(&template);
    let factory = GrammarFactory::new(&tokenizer, 263).unwrap();
    let city = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": false});
    let tools =
        [("weather".to_owned(), city), ("noop".to_owned(), json!({"type": "object", "properties": {}}))];
    let calls = CallGrammar { tools: &tools, strict: &[], several: true };
    let form = GrammarSpec::Choice(vec!["yes".into(), "no".into()]);
    let open = "<|start|>user<|message|>Q<|end|><|start|>assistant";
    let compile = |prompt: &str, calls: Option<CallGrammar<'_>>, text: Option<GrammarSpec>| {
        let spec = AnswerGrammar { syntax: &syntax, prompt, calls, text }.spec(&tokenizer).unwrap();
        factory.compile(&spec).unwrap_or_else(|error| panic!("{spec:?}: {error}"))
    };
    let grammars = [
        compile(open, Some(calls), None),
        compile(open, None, Some(form.clone())),
        compile(open, Some(calls), Some(form.clone())),
    ];
    let (thought, next) = ("<|channel|>analysis<|message|>Hm.<|end|>", "<|start|>assistant");
    let call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"city\": \"Rome\"}";
    let other = " to=functions.weather<|channel|>commentary json<|message|>{\"city\":\"Oslo\"}";
    let (text, aside) = ("<|channel|>final<|message|>yes", "<|channel|>commentary<|message|>I look.<|end|>");
    // True for each of the three that allows it.
    for (answer, wanted) in [
        (call.to_owned(), [true, false, true]),
        (other.to_owned(), [true, false, true]),
        (format!("{thought}{next}{call}"), [true, false, true]),
        (format!("{thought}{next}{aside}{next}{other}"), [true, false, true]),
        (text.to_owned(), [false, true, true]),
        (format!("{thought}{next}{thought}{next}{text}"), [false, true, true]),
        (format!("{aside}{next}{text}"), [false, false, true]),
        (call.replace("Rome", "Bern"), [false; 3]),
        (call.replace("weather", "sun"), [false; 3]),
        (text.replace("yes", "maybe"), [false; 3]),
        ("yes".to_owned(), [false; 3]),
        (thought.to_owned(), [false; 3]),
    ] {
        let tokens = tokenizer.encode(&answer).unwrap();
        let found = grammars.each_ref().map(|grammar| accepts(grammar, &tokens, 261));
        assert_eq!(found, wanted, "{answer}");
    }
    // Where the prompt has started the thoughts they go on.
    let begun = compile(&format!("{open}<|channel|>analysis<|message|>"), None, Some(form));
    let tokens = tokenizer.encode(&format!("Hm.<|end|>{next}{text}")).unwrap();
    assert!(accepts(&begun, &tokens, 261) && !accepts(&begun, &tokenizer.encode(text).unwrap(), 261));
}

/// Byte tokens beside pieces, a space before words, control tokens, ids without a token, ends that are no
/// control tokens.
#[test]
fn tokens_of_a_sentencepiece_vocabulary() {
    let tokenizer = sentencepiece();
    let vocab = 300;
    let factory = GrammarFactory::new(&tokenizer, vocab).unwrap();
    let id = |name: &str| tokenizer.token_to_id(name).unwrap();
    let mut spaced = factory.compile(&GrammarSpec::Choice(vec![" ab".into()])).unwrap();
    let byte = 3 + TokenId::from(b' ');
    let sorted = |mut ids: Vec<TokenId>| {
        ids.sort_unstable();
        ids
    };
    assert_eq!(allowed(&mut spaced, &[2], vocab), sorted(vec![byte, id("▁"), id("▁a"), id("▁ab")]));
    spaced.accept(id("▁a")).unwrap();
    assert_eq!(allowed(&mut spaced, &[2], vocab), sorted(vec![3 + TokenId::from(b'b'), id("b")]));
    spaced.accept(id("b")).unwrap();
    assert!(spaced.is_finished());
    // `a` ends this text, where the grammar says that it may end.
    let mut repeated = factory.compile(&GrammarSpec::Regex("b+".into())).unwrap();
    assert!(!allowed(&mut repeated, &[2, id("a")], vocab).contains(&id("a")));
    repeated.accept(id("b")).unwrap();
    let now = allowed(&mut repeated, &[2, id("a")], vocab);
    assert_eq!(now, sorted(vec![2, 3 + TokenId::from(b'b'), id("a"), id("b")]));
    // A control token that a grammar names.
    let mut named = factory.compile(&GrammarSpec::Lark("start: <s> \"c\"".into())).unwrap();
    assert_eq!(allowed(&mut named, &[2], vocab), [1]);
    assert!(repeated.accept(id("c")).is_err());
}

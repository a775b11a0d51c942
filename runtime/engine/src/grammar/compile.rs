//! The compilation of a grammar's text to its parser.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use super::schema::{SchemaStrictness, compilable};
use super::vocabulary::GrammarVocabulary;
use super::{FRAMED, Grammar, GrammarError, GrammarSpec, reason};
use crate::tokenizer::Tokenizer;

/// Most bytes of a grammar's text.
const MOST_BYTES: usize = 256 << 10;
/// Most texts of a choice: each is a path of the automaton.
const MOST_CHOICES: usize = 10_000;
/// The time after which a client gets the error that its grammar takes too long. The work ends later, by
/// llguidance's own limits.
const PATIENCE: Duration = Duration::from_secs(10);
/// Grammars that are compiled at a time, given up ones among them. Others wait for a place.
const MOST_COMPILING: usize = 4;
/// The compiler is recursive over the nesting of a grammar.
const STACK: usize = 64 << 20;
/// About 2 KiB each, per running text.
const MOST_LEXER_STATES: usize = 16_000;
/// Items of a parser for one mask. Grammars of structured answers need some hundreds, very ambiguous ones
/// ever more.
const MOST_STEP_ITEMS: usize = 25_000;
/// Grammars that are kept compiled.
const KEPT: usize = 32;

/// Makes grammars for one vocabulary. The first use of a vocabulary costs about a second per 100 thousand
/// tokens.
pub struct GrammarCompiler {
    vocab: usize,
    factory: Arc<ParserFactory>,
    shared: Arc<SharedGrammars>,
}

/// State that requests and the threads that compile for them share.
#[derive(Default)]
struct SharedGrammars {
    grammars: Mutex<GrammarCache>,
    /// A grammar was kept, or is no longer compiled.
    changed: Condvar,
}

#[derive(Default)]
struct GrammarCache {
    compiling: Vec<GrammarSpec>,
    /// Used longest ago first.
    kept: VecDeque<(GrammarSpec, Grammar)>,
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GrammarCompiler({} tokens)", self.vocab)
    }
}

impl GrammarCompiler {
    /// The compiler for a model with `vocab` logits.
    pub fn new(tokenizer: &Tokenizer, vocab: usize) -> Result<GrammarCompiler, GrammarError> {
        let env = GrammarVocabulary::env(tokenizer, vocab)?;
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|error| GrammarError::Tokenizer { reason: reason(error) })?;
        factory.quiet();
        factory.limits_mut().max_lexer_states = MOST_LEXER_STATES;
        factory.limits_mut().step_max_items = MOST_STEP_ITEMS;
        // An error would repeat the text so far.
        factory.limits_mut().verbose_errors = false;
        Ok(GrammarCompiler { vocab, factory: Arc::new(factory), shared: Arc::default() })
    }

    /// A grammar at its begin. Equal grammars that are asked for together are compiled once.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        let bytes = spec.size();
        if bytes > MOST_BYTES {
            return Err(GrammarError::TooLarge { bytes, most: MOST_BYTES });
        }
        let deadline = Instant::now() + PATIENCE;
        match CompileSlot::acquire(&self.shared, spec, deadline)? {
            GrammarLookup::Cached(grammar) => Ok(*grammar),
            GrammarLookup::Compile(place) => self.compile_in(place, spec, deadline),
        }
    }

    /// Compiles on a separate thread, for as long as a client would wait.
    fn compile_in(
        &self,
        place: CompileSlot,
        spec: &GrammarSpec,
        deadline: Instant,
    ) -> Result<Grammar, GrammarError> {
        let (factory, source, vocab) = (Arc::clone(&self.factory), source(spec)?, self.vocab);
        let (sender, receiver) = mpsc::channel();
        let compile = move || {
            let parser = factory.create_parser(source);
            let made = parser.map_err(|error| GrammarError::Invalid { reason: reason(error) });
            let made =
                made.and_then(checked).map(|matcher| place.cache_grammar(Grammar::new(matcher, vocab)));
            drop(place);
            // The receiver may have left.
            let _ = sender.send(made);
        };
        let thread = std::thread::Builder::new().name("mlcc-grammar".into()).stack_size(STACK);
        thread.spawn(compile).map_err(|error| GrammarError::Thread { reason: error.to_string() })?;
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(made) => made,
            Err(mpsc::RecvTimeoutError::Timeout) => Err(GrammarError::TOO_SLOW),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(GrammarError::Invalid { reason: "the compiler of grammars failed".into() })
            }
        }
    }
}

impl GrammarError {
    const TOO_SLOW: GrammarError = GrammarError::TooSlow { seconds: PATIENCE.as_secs() };
}

impl SharedGrammars {
    fn lock(&self) -> MutexGuard<'_, GrammarCache> {
        self.grammars.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GrammarCache {
    fn find_cached(&mut self, spec: &GrammarSpec) -> Option<Grammar> {
        let found = self.kept.iter().position(|(of, _)| of == spec)?;
        let entry = self.kept.remove(found)?;
        let fresh = entry.1.separate();
        self.kept.push_back(entry);
        Some(fresh)
    }
}

/// The grammar, or an error if llguidance would only warn of parts that are not enforced.
fn checked(parser: llguidance::TokenParser) -> Result<Matcher, GrammarError> {
    let mut matcher = Matcher::new(Ok(parser));
    let invalid = |reason: String| GrammarError::Invalid { reason };
    if let Some(error) = matcher.get_error().or_else(|| matcher.grammar_warnings().into_iter().next()) {
        return Err(invalid(reason(error)));
    }
    if matcher.is_stopped() {
        return Err(invalid("it allows no text but the empty one".into()));
    }
    let first = matcher.compute_mask().map_err(|error| invalid(reason(error)))?;
    match first.is_zero() {
        true => Err(invalid("the model's tokens cannot write any text that it allows".into())),
        false => Ok(matcher),
    }
}

fn source(spec: &GrammarSpec) -> Result<TopLevelGrammar, GrammarError> {
    let invalid = |reason: &str| Err(GrammarError::Invalid { reason: reason.to_owned() });
    Ok(match spec {
        GrammarSpec::JsonObject => json_schema(&json!({"type": "object"}))?,
        GrammarSpec::JsonSchema(schema) => json_schema(schema)?,
        GrammarSpec::Regex(text) if text.is_empty() => return invalid("the expression is empty"),
        GrammarSpec::Regex(text) => TopLevelGrammar::from_regex(text),
        GrammarSpec::Choice(texts) if texts.is_empty() || texts.iter().any(String::is_empty) => {
            return invalid("expected one or more texts to choose from, none of them empty");
        }
        GrammarSpec::Choice(texts) if texts.len() > MOST_CHOICES => {
            return invalid(&format!(
                "the choice has {} texts, at most {MOST_CHOICES} are allowed",
                texts.len()
            ));
        }
        GrammarSpec::Choice(texts) => TopLevelGrammar::from_lark(choice(texts)),
        GrammarSpec::Lark(text) if text.trim().is_empty() => return invalid("the grammar is empty"),
        GrammarSpec::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
        GrammarSpec::Framed { rules, part } => {
            let mut inner = source(part)?;
            let Some(first) = inner.grammars.first_mut() else { return invalid("the grammar is empty") };
            first.name = Some(FRAMED.into());
            inner.grammars.insert(0, GrammarWithLexer::from_lark(rules.clone()));
            inner
        }
    })
}

fn json_schema(schema: &Value) -> Result<TopLevelGrammar, GrammarError> {
    let compilable = compilable(schema, SchemaStrictness::Strict);
    let compilable = compilable.map_err(|reason| GrammarError::Invalid { reason })?;
    Ok(TopLevelGrammar::from_json_schema(compilable))
}

fn choice(texts: &[String]) -> String {
    let quoted: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
    format!("start: CHOICE\nCHOICE: {}\n", quoted.join("\n | "))
}

/// The result of a request for a grammar.
enum GrammarLookup {
    Cached(Box<Grammar>),
    Compile(CompileSlot),
}

/// One of the places for grammars that are being compiled.
struct CompileSlot {
    shared: Arc<SharedGrammars>,
    spec: GrammarSpec,
}

impl CompileSlot {
    /// Waits until the grammar is there, or a place to compile it.
    fn acquire(
        shared: &Arc<SharedGrammars>,
        spec: &GrammarSpec,
        deadline: Instant,
    ) -> Result<GrammarLookup, GrammarError> {
        let mut grammars = shared.lock();
        loop {
            if let Some(grammar) = grammars.find_cached(spec) {
                return Ok(GrammarLookup::Cached(Box::new(grammar)));
            }
            let equal = grammars.compiling.contains(spec);
            if !equal && grammars.compiling.len() < MOST_COMPILING {
                grammars.compiling.push(spec.clone());
                return Ok(GrammarLookup::Compile(CompileSlot {
                    shared: Arc::clone(shared),
                    spec: spec.clone(),
                }));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let running = grammars.compiling.len();
                return Err(if equal { GrammarError::TOO_SLOW } else { GrammarError::Busy { running } });
            }
            grammars = shared.changed.wait_timeout(grammars, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Keeps a grammar for later requests, and gives one at its begin.
    fn cache_grammar(&self, grammar: Grammar) -> Grammar {
        let fresh = grammar.separate();
        let mut grammars = self.shared.lock();
        if grammars.kept.len() >= KEPT {
            grammars.kept.pop_front();
        }
        grammars.kept.push_back((self.spec.clone(), grammar));
        fresh
    }
}

impl Drop for CompileSlot {
    fn drop(&mut self) {
        let mut grammars = self.shared.lock();
        if let Some(found) = grammars.compiling.iter().position(|spec| *spec == self.spec) {
            grammars.compiling.swap_remove(found);
        }
        drop(grammars);
        self.shared.changed.notify_all();
    }
}

//! The compilation of a grammar's text to its parser.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use super::schema::{SchemaStrictness, compilable};
use super::vocabulary::GrammarVocabulary;
use super::{FRAMED, Grammar, GrammarError, GrammarSpec, reason};
use crate::tokenizer::Tokenizer;

/// Most texts of a choice: each is a path of the automaton.
const MOST_CHOICES: usize = 10_000;
/// About 2 KiB each, per running text.
const MOST_LEXER_STATES: usize = 16_000;
/// Items of a parser for one mask. Grammars of structured answers need some hundreds, very ambiguous ones
/// ever more.
const MOST_STEP_ITEMS: usize = 25_000;

/// Makes grammars for one vocabulary, on the caller's stack and for as long as that takes.
pub struct GrammarFactory {
    vocab: usize,
    parsers: ParserFactory,
}

impl std::fmt::Debug for GrammarFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GrammarFactory({} tokens)", self.vocab)
    }
}

impl GrammarFactory {
    /// Bytes of stack that [`GrammarFactory::compile`] needs for grammars of strangers: it is recursive over
    /// the nesting.
    pub const STACK: usize = 64 << 20;

    /// The factory for a model with `vocab` logits.
    pub fn new(tokenizer: &Tokenizer, vocab: usize) -> Result<GrammarFactory, GrammarError> {
        let env = GrammarVocabulary::env(tokenizer, vocab)?;
        let slices = SlicedBiasComputer::general_slices();
        let mut parsers = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|error| GrammarError::Tokenizer { reason: reason(error) })?;
        parsers.quiet();
        parsers.limits_mut().max_lexer_states = MOST_LEXER_STATES;
        parsers.limits_mut().step_max_items = MOST_STEP_ITEMS;
        // An error would repeat the text so far.
        parsers.limits_mut().verbose_errors = false;
        Ok(GrammarFactory { vocab, parsers })
    }

    /// Number of logits of the model.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// A grammar at its begin.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Grammar, GrammarError> {
        spec.check_size()?;
        let parser = self.parsers.create_parser(source(spec)?);
        let parser = parser.map_err(|error| GrammarError::Invalid { reason: reason(error) })?;
        Ok(Grammar::new(checked(parser)?, self.vocab))
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

//! Grammars of answers with calls, and of answers behind reasoning.

use serde_json::{Value as Json, json};

use super::syntax::{AnswerSyntax, CallSyntax, ID};
use crate::grammar::GrammarSpec;
use crate::tokenizer::{TokenId, Tokenizer};

/// An answer that is calls of tools.
#[derive(Debug, Clone, Copy)]
pub struct CallGrammar<'a> {
    pub syntax: &'a CallSyntax,
    /// Names of functions with the schemas of their arguments.
    pub tools: &'a [(String, Json)],
    /// Whether there may be several calls.
    pub several: bool,
}

impl CallGrammar<'_> {
    pub fn spec(&self, tokenizer: &Tokenizer) -> GrammarSpec {
        let fixed = |text: &str| fixed(text, tokenizer);
        let CallSyntax { begin, open, middle, close, between, end, .. } = self.syntax;
        let several = match between {
            Some(between) if self.several => format!("({} call)*", fixed(between)),
            _ => String::new(),
        };
        // What a template writes before an answer differs; blanks there are no part of a call.
        let first = if begin.trim().is_empty() { "" } else { begin.trim_start() };
        let names: Vec<String> = (0..self.tools.len()).map(|at| format!("call_{at}")).collect();
        let mut text = format!(
            "start: {} call {several} {}\ncall: {}\n",
            fixed(first),
            fixed(end.trim_end()),
            names.join(" | ")
        );
        for ((name, schema), rule) in self.tools.iter().zip(&names) {
            let head = fixed(&format!(
                "{}{name}{middle}",
                if begin.trim().is_empty() { open.trim_start() } else { open }
            ));
            text += &format!("{rule}: {head} %json {schema} {}\n", fixed(close));
        }
        if [begin, open, middle, close, end].into_iter().any(|text| text.contains(ID)) {
            text += "CALL_ID: /[a-zA-Z0-9]{9}/\n";
        }
        GrammarSpec::Lark(text)
    }
}

/// Any text that ends with `marker`, then what another grammar allows.
pub fn free_then(marker: &str, then: GrammarSpec, tokenizer: &Tokenizer) -> GrammarSpec {
    let marker = marker.trim();
    let token = special(marker, tokenizer).filter(|(name, _)| *name == marker.len()).map(|(_, id)| id);
    GrammarSpec::After { marker: marker.to_owned(), token, then: Box::new(then) }
}

impl AnswerSyntax {
    /// Whether its markers have control tokens, so that texts have to show them.
    pub fn has_control_tokens(&self, tokenizer: &Tokenizer) -> bool {
        let calls = self.calls.iter().flat_map(|c| [&c.begin, &c.open, &c.middle, &c.close, &c.end]);
        let reasoning = self.reasoning.iter().flat_map(|r| [&r.open, &r.close]);
        let has = |text: &str| text.char_indices().any(|(at, _)| special(&text[at..], tokenizer).is_some());
        calls.chain(reasoning).any(|text| has(text))
    }
}

/// The control token at the begin of a text: the longest one, with its length.
fn special(text: &str, tokenizer: &Tokenizer) -> Option<(usize, TokenId)> {
    let begins = |&id: &TokenId| {
        let name =
            tokenizer.bytes_of(id).filter(|name| !name.is_empty() && text.as_bytes().starts_with(name))?;
        Some((name.len(), id))
    };
    tokenizer.special_ids().iter().filter_map(begins).max()
}

/// Fixed text as a sequence of Lark's: strings, control tokens by their ids, ids of calls.
fn fixed(text: &str, tokenizer: &Tokenizer) -> String {
    let mut items: Vec<String> = Vec::new();
    let mut plain = String::new();
    let mut rest = text;
    let flush = |plain: &mut String, items: &mut Vec<String>| {
        if !plain.is_empty() {
            items.push(json!(std::mem::take(plain)).to_string());
        }
    };
    while let Some(next) = rest.chars().next() {
        if let Some((length, id)) = special(rest, tokenizer) {
            flush(&mut plain, &mut items);
            items.push(format!("<[{id}]>"));
            rest = &rest[length..];
        } else if next == ID {
            flush(&mut plain, &mut items);
            items.push("CALL_ID".into());
            rest = &rest[next.len_utf8()..];
        } else {
            plain.push(next);
            rest = &rest[next.len_utf8()..];
        }
    }
    flush(&mut plain, &mut items);
    items.join(" ")
}

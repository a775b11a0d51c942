//! Grammars of answers with calls, and of answers behind reasoning.

use serde_json::{Value as Json, json};

use super::syntax::{AnswerSyntax, CallSyntax, ID};
use super::tags::{TagSyntax, ValueKind, held_to, unenforceable};
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
    /// What cannot be enforced is an error that names it.
    pub fn spec(&self, tokenizer: &Tokenizer) -> Result<GrammarSpec, String> {
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
            match &self.syntax.tags {
                None => text += &format!("{rule}: {head} %json {schema} {}\n", fixed(close)),
                Some(tags) => {
                    let arguments = tagged(tags, rule, schema, tokenizer);
                    let (names, rules) = arguments.map_err(|why| format!("`{name}`: {why}"))?;
                    text += &format!("{rule}: {head} {names} {}\n{rules}", fixed(close));
                }
            }
        }
        if [begin, open, middle, close, end].into_iter().any(|text| text.contains(ID)) {
            text += "CALL_ID: /[a-zA-Z0-9]{9}/\n";
        }
        Ok(GrammarSpec::Lark(text))
    }
}

/// The arguments of a function in tags, in the order of its schema: what stands in its rule, and the rules of them.
fn tagged(
    tags: &TagSyntax,
    rule: &str,
    schema: &Json,
    tokenizer: &Tokenizer,
) -> Result<(String, String), String> {
    if !tags.between.trim().is_empty() {
        return Err("the template separates arguments, and no grammar is made for that".into());
    }
    const KNOWN: [&str; 6] =
        ["type", "properties", "required", "additionalProperties", "title", "description"];
    let fields = schema.as_object().into_iter().flatten();
    if let Some((name, _)) = fields.into_iter().find(|(name, _)| !KNOWN.contains(&name.as_str())) {
        return Err(format!("`{name}` in a schema whose arguments stand in tags cannot be enforced"));
    }
    let required =
        |name: &str| schema["required"].as_array().is_some_and(|all| all.iter().any(|n| n == name));
    let known = |name: &Json| name.as_str().is_some_and(|name| schema["properties"].get(name).is_some());
    if let Some(name) = schema["required"].as_array().into_iter().flatten().find(|name| !known(name)) {
        return Err(format!("{name} is required, and is none of the `properties`"));
    }
    let (mut names, mut rules) = (String::new(), String::new());
    for (at, (name, value)) in schema["properties"].as_object().into_iter().flatten().enumerate() {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if !name.chars().all(plain) {
            return Err(format!("the argument `{name}` has a name that cannot stand in a tag"));
        }
        if let Some(what) = unenforceable(schema, name) {
            return Err(format!(
                "`{what}` of the argument `{name}`, which stands in a tag, cannot be enforced"
            ));
        }
        let own = format!("{rule}_{at}");
        let head = fixed(&format!("{}{name}{}", tags.open, tags.middle), tokenizer);
        let choices =
            value["enum"].as_array().cloned().or_else(|| value.get("const").map(|v| vec![v.clone()]));
        let close = fixed(&tags.close, tokenizer);
        let inside = match (ValueKind::of(schema, name), choices) {
            (ValueKind::Text | ValueKind::TextOrNull, Some(choices)) => {
                // What is no string is `null`, which stands in a tag as it is.
                let has = |choice: Json| choices.contains(&choice);
                if ValueKind::of(schema, name) == ValueKind::TextOrNull
                    && has("null".into())
                    && !has(Json::Null)
                {
                    return Err(format!(
                        "the argument `{name}` may be the text `null`, which in a tag is null"
                    ));
                }
                let quoted = |choice: &Json| match choice {
                    Json::Null => json!("null").to_string(),
                    text => text.to_string(),
                };
                let choices: Vec<String> = choices.iter().map(quoted).collect();
                format!("({}) {close}", choices.join(" | "))
            }
            // A text `null` is no text; any other one is.
            (ValueKind::Text | ValueKind::TextOrNull, None) => {
                let held = held_to(value).map_err(|why| format!("the argument `{name}`: {why}"))?;
                let (inside, more) = text_in_tag(tags, &own, &held, tokenizer);
                rules += &more;
                inside
            }
            (ValueKind::Json, _) => format!("%json {value} {close}"),
        };
        rules += &format!("{own}: {head} {inside}\n");
        names += &if required(name) { format!(" {own}") } else { format!(" {own}?") };
    }
    Ok((names, rules))
}

/// A text in the tag of the rule `own`, with its end, that matches all of some expressions: what stands in the rule, and another rule.
fn text_in_tag(tags: &TagSyntax, own: &str, held: &[String], tokenizer: &Tokenizer) -> (String, String) {
    let end = tags.end();
    let special = special(end, tokenizer);
    // Not even the name of a control token may be in the text, and nothing that would end it before it is what it has to be.
    let named = regex_of(&end[..special.map_or(end.len(), |(length, _)| length)]);
    let whole: String = held.iter().map(|expression| format!(" & /{expression}/")).collect();
    let text = format!("/(?s:.*)/ & ~/(?s:.*){named}(?s:.*)/{whole}");
    // Blanks before the end are no part of a text, so that they have to be there where it is held to something.
    let blanks = Some(tags.blanks().1).filter(|blanks| !held.is_empty() && !blanks.is_empty());
    let text = match blanks {
        Some(blanks) => format!("({text}) {}", json!(blanks)),
        None => text,
    };
    match special {
        Some(_) => {
            let terminal = own.to_uppercase();
            (format!("{terminal} {}", fixed(end, tokenizer)), format!("{terminal}: {text}\n"))
        }
        None => {
            let text = if held.is_empty() { "/(?s:.*)/" } else { &text };
            (format!("{own}_text"), format!("{own}_text[suffix={}]: {text}\n", json!(end)))
        }
    }
}

/// A regular expression of Lark that matches this text alone.
fn regex_of(text: &str) -> String {
    let of =
        |c: char| if c.is_ascii_alphanumeric() { c.to_string() } else { format!("\\x{{{:x}}}", c as u32) };
    text.chars().map(of).collect()
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
        let tags = self.calls.iter().filter_map(|c| c.tags.as_ref());
        let calls = calls.chain(tags.flat_map(|t| [&t.open, &t.middle, &t.close, &t.between]));
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

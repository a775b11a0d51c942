//! Grammars of answers with calls, of texts, and of what comes before them.

use serde_json::{Value as Json, json};

use super::syntax::{AnswerSyntax, CallSyntax, ChannelSyntax, ID, ReasoningSyntax};
use super::tags::{TagSyntax, ValueKind, held_to};
use super::value_kinds::{choices, of_texts, properties, required};
use crate::grammar::{FRAMED, GrammarSpec, SchemaStrictness, compilable, compilable_part, constrains};
use crate::tokenizer::{TokenId, Tokenizer};

/// Functions that an answer may call.
#[derive(Debug, Clone, Copy)]
pub struct CallGrammar<'a> {
    /// Names of functions with the schemas of their arguments.
    pub tools: &'a [(String, Json)],
    /// Names of those whose arguments are held to all of their schema; the others are held to what a grammar
    /// can do.
    pub strict: &'a [String],
    /// True if there may be several calls.
    pub several: bool,
}

/// The possible answers behind the reasoning: calls, a text, or either.
#[derive(Debug, Clone)]
pub struct AnswerGrammar<'a> {
    pub syntax: &'a AnswerSyntax,
    /// The prompt that the answer goes on from.
    pub prompt: &'a str,
    pub calls: Option<CallGrammar<'a>>,
    pub text: Option<GrammarSpec>,
}

/// Blanks behind the reasoning.
const BLANKS: &str = "BLANKS: /[ \\t\\r\\n]{1,8}/\n";

impl AnswerGrammar<'_> {
    /// The grammar; parts that cannot be enforced are an error that names them.
    pub fn spec(&self, tokenizer: &Tokenizer) -> Result<GrammarSpec, String> {
        let mut rules = String::new();
        let calls = match (self.calls, &self.syntax.calls, &self.syntax.channels) {
            (Some(calls), _, Some(channels)) => Some(calls.in_channels(channels, tokenizer)?),
            (Some(calls), Some(syntax), None) => Some(calls.rules(syntax, tokenizer)?),
            _ => None,
        };
        rules.extend(calls.clone());
        if let Some(channels) = self.syntax.channels.as_ref().filter(|c| c.is_answered(self.prompt)) {
            rules += &self.channels(channels, calls.is_some(), tokenizer);
        } else {
            let before = self.reasoning(tokenizer);
            if let Some(reasoning) = self.syntax.reasoning.as_ref().filter(|_| !before.is_empty()) {
                rules += &free(reasoning.close.trim(), tokenizer);
                rules += BLANKS;
            }
            match (&self.text, before.is_empty(), calls.is_some()) {
                (Some(text), true, false) => return Ok(text.clone()),
                (Some(_), _, true) => rules += &format!("start: {before} (calls | @{FRAMED})\n"),
                (Some(_), false, false) => rules += &format!("start: {before} @{FRAMED}\n"),
                (None, ..) => rules += &format!("start: {before} calls\n"),
            }
        }
        Ok(match &self.text {
            Some(text) => GrammarSpec::Framed { rules, part: Box::new(text.clone()) },
            None => GrammarSpec::Lark(rules),
        })
    }

    /// The part of a rule for the reasoning.
    fn reasoning(&self, tokenizer: &Tokenizer) -> String {
        let Some(ReasoningSyntax { open, close }) = &self.syntax.reasoning else { return String::new() };
        let prompt = self.prompt.trim_end();
        if self.syntax.reasoning.as_ref().is_some_and(|reasoning| reasoning.is_open_behind(prompt)) {
            return format!("{} BLANKS?", through(close.trim(), tokenizer));
        }
        if prompt.ends_with(close.trim()) || close.trim().is_empty() {
            return String::new();
        }
        format!("({} {} BLANKS?)?", fixed(open.trim(), tokenizer), through(close.trim(), tokenizer))
    }

    /// The rules of an answer in channels: thoughts and texts on the way to a call, then the call or the
    /// final text.
    fn channels(&self, channels: &ChannelSyntax, calls: bool, tokenizer: &Tokenizer) -> String {
        let fixed = |text: &str| fixed(text, tokenizer);
        let ChannelSyntax { start, role, channel, message, thoughts, answer, calls: commentary, .. } =
            channels;
        let end = through(channels.end(), tokenizer);
        let next = fixed(&format!("{start}{role}"));
        let head = |name: &str| fixed(&format!("{channel}{name}{message}"));
        let mut aside = format!("{} {end} {next}", head(thoughts));
        let text = match &self.text {
            Some(_) => format!("{} @{FRAMED}", head(answer)),
            None => String::new(),
        };
        if calls {
            aside += &format!(" | {} {end} {next}", head(commentary));
        }
        let ends: Vec<&str> =
            [if calls { "calls" } else { "" }, &text].into_iter().filter(|end| !end.is_empty()).collect();
        // The prompt may have started the thoughts.
        let begun = if channels.started_answer(self.prompt).is_empty() {
            String::new()
        } else {
            format!("{end} {next}")
        };
        let free = free(channels.end(), tokenizer);
        format!("start: {begun} aside* ({})\naside: {aside}\n{free}", ends.join(" | "))
    }
}

impl CallGrammar<'_> {
    /// Arguments are an object, whatever a schema says.
    fn check(name: &str, schema: &Json) -> Result<(), String> {
        match &schema["type"] {
            Json::Null => Ok(()),
            kind if kind == "object" || kind.as_array().is_some_and(|all| all.contains(&json!("object"))) => {
                Ok(())
            }
            kind => Err(format!("`{name}`: arguments are an object, and the `type` of the schema is {kind}")),
        }
    }

    fn strictness(&self, name: &str) -> SchemaStrictness {
        match self.strict.iter().any(|strict| strict == name) {
            true => SchemaStrictness::Strict,
            false => SchemaStrictness::Lenient,
        }
    }

    /// The rule `calls`, and those that it needs.
    fn rules(&self, syntax: &CallSyntax, tokenizer: &Tokenizer) -> Result<String, String> {
        let fixed = |text: &str| fixed(text, tokenizer);
        let CallSyntax { begin, open, middle, close, between, end, .. } = syntax;
        let several = match between {
            Some(between) if self.several => format!("({} call)*", fixed(between)),
            _ => String::new(),
        };
        // Templates write different texts before an answer; blanks there are no part of a call.
        let first = if begin.trim().is_empty() { "" } else { begin.trim_start() };
        let names: Vec<String> = (0..self.tools.len()).map(|at| format!("call_{at}")).collect();
        let mut text = format!(
            "calls: {} call {several} {}\ncall: {}\n",
            fixed(first),
            fixed(end.trim_end()),
            names.join(" | ")
        );
        for ((name, schema), rule) in self.tools.iter().zip(&names) {
            CallGrammar::check(name, schema)?;
            let head = fixed(&format!(
                "{}{name}{middle}",
                if begin.trim().is_empty() { open.trim_start() } else { open }
            ));
            let strictness = self.strictness(name);
            let arguments = match &syntax.tags {
                None => {
                    compilable(schema, strictness).map(|schema| (format!("%json {schema}"), String::new()))
                }
                Some(tags) => TagRules { tags, rule, schema, strictness, tokenizer }.rules(),
            };
            let (arguments, rules) = arguments.map_err(|why| format!("`{name}`: {why}"))?;
            text += &format!("{rule}: {head} {arguments} {}\n{rules}", fixed(close));
        }
        if [begin, open, middle, close, end].into_iter().any(|text| text.contains(ID)) {
            text += "CALL_ID: /[a-zA-Z0-9]{9}/\n";
        }
        Ok(text)
    }

    /// The rules of an answer in channels, which has one call, in one of the two forms that such models
    /// write.
    fn in_channels(&self, channels: &ChannelSyntax, tokenizer: &Tokenizer) -> Result<String, String> {
        let fixed = |text: &str| fixed(text, tokenizer);
        let ChannelSyntax { channel, message, recipient, namespace, calls, .. } = channels;
        let names: Vec<String> = (0..self.tools.len()).map(|at| format!("call_{at}")).collect();
        let mut text = format!("calls: {}\n", names.join(" | "));
        for ((name, schema), rule) in self.tools.iter().zip(&names) {
            CallGrammar::check(name, schema)?;
            let schema =
                compilable(schema, self.strictness(name)).map_err(|why| format!("`{name}`: {why}"))?;
            let to = format!("{recipient}{namespace}{name}");
            text += &format!(
                "{rule}: ({} | {}) kind? {} %json {schema}\n",
                fixed(&format!(" {to}{channel}{calls}")),
                fixed(&format!("{channel}{calls} {to}")),
                fixed(message),
            );
        }
        let constrained = fixed(&format!("{}json", channels.constrain()));
        text += &format!("kind: \" json\" | \" \"? {constrained}\n");
        Ok(text)
    }
}

/// The arguments of a function in tags, in the order of its schema.
struct TagRules<'a> {
    tags: &'a TagSyntax,
    /// The rule of the call.
    rule: &'a str,
    schema: &'a Json,
    strictness: SchemaStrictness,
    tokenizer: &'a Tokenizer,
}

impl TagRules<'_> {
    fn is_strict(&self) -> bool {
        self.strictness == SchemaStrictness::Strict
    }

    /// The arguments in the rule of the call, and their rules.
    fn rules(&self) -> Result<(String, String), String> {
        let TagRules { tags, rule, schema, tokenizer, .. } = *self;
        if !tags.between.trim().is_empty() {
            return Err("the template separates arguments, and no grammar is made for that".into());
        }
        const KNOWN: [&str; 6] = ["type", "properties", "required", "additionalProperties", "$ref", "allOf"];
        let mut fields = schema.as_object().into_iter().flatten();
        let other = fields.find(|(name, value)| !KNOWN.contains(&name.as_str()) && constrains(name, value));
        if let Some((name, _)) = other.filter(|_| self.is_strict()) {
            return Err(format!("`{name}` cannot be enforced in a schema whose arguments are in tags"));
        }
        let (listed, needed) = (properties(schema, schema, 0), required(schema, schema, 0));
        let known = |name: &str| listed.iter().any(|(known, _)| *known == name);
        if let Some(name) = needed.iter().find(|name| !known(name)).filter(|_| self.is_strict()) {
            return Err(format!("`{name}` is required, and is none of the `properties`"));
        }
        let (mut names, mut rules) = (String::new(), String::new());
        for (at, (name, value)) in listed.into_iter().enumerate() {
            let is_needed = needed.contains(&name);
            if !name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c)) {
                if is_needed || self.is_strict() {
                    return Err(format!("the argument `{name}` has a name that is not allowed in a tag"));
                }
                continue;
            }
            let own = format!("{rule}_{at}");
            let head = fixed(&format!("{}{name}{}", tags.open, tags.middle), tokenizer);
            let (inside, more) =
                self.value(&own, value).map_err(|why| format!("the argument `{name}`: {why}"))?;
            rules += &more;
            rules += &format!("{own}: {head} {inside}\n");
            names += &if is_needed { format!(" {own}") } else { format!(" {own}?") };
        }
        Ok((names, rules))
    }

    /// A value with the end of its tag: the body of the rule `own`, and another rule.
    fn value(&self, own: &str, value: &Json) -> Result<(String, String), String> {
        let TagRules { tags, schema, strictness, tokenizer, .. } = *self;
        let close = fixed(&tags.close, tokenizer);
        let kind = ValueKind::of_value(schema, value);
        if kind == ValueKind::Json {
            let value = compilable_part(schema, value, strictness)?;
            return Ok((format!("%json {value} {close}"), String::new()));
        }
        if let Some(choices) = choices(schema, value, 0).filter(|choices| !choices.is_empty()) {
            self.held(value, true)?;
            // A value that is no string is `null`, which is in a tag as it is.
            let quoted = |choice: &Json| match choice {
                Json::Null => json!("null").to_string(),
                text => text.to_string(),
            };
            let choices: Vec<String> = choices.iter().map(quoted).collect();
            return Ok((format!("({}) {close}", choices.join(" | ")), String::new()));
        }
        let mut held = self.held(value, false)?;
        if kind == ValueKind::TextOrNull {
            held = held.into_iter().map(|expression| format!("({expression}|null)")).collect();
        }
        Ok(text_in_tag(tags, own, &held, tokenizer))
    }

    /// The expressions that a text has to match; none may be needed where it is `chosen` from a list.
    fn held(&self, value: &Json, chosen: bool) -> Result<Vec<String>, String> {
        let mut all = Vec::new();
        for part in of_texts(self.schema, value, 0) {
            let held = held_to(part, self.strictness)?;
            if chosen && self.is_strict() && !held.is_empty() {
                let fields = ["pattern", "minLength", "maxLength"].into_iter();
                let field = fields.into_iter().find(|field| part.get(*field).is_some()).unwrap_or("pattern");
                return Err(format!("`{field}` cannot be enforced together with a list of values in a tag"));
            }
            all.extend(held);
        }
        Ok(all)
    }
}

/// A text in the tag of the rule `own`, with its end, that matches all of some expressions: the body of the
/// rule, and another rule.
fn text_in_tag(tags: &TagSyntax, own: &str, held: &[String], tokenizer: &Tokenizer) -> (String, String) {
    let end = tags.end();
    let special = special(end, tokenizer);
    // Not even the name of a control token may be in the text, and nothing that would end it before it is
    // what it has to be.
    let named = regex_of(&end[..special.map_or(end.len(), |(length, _)| length)]);
    let whole: String = held.iter().map(|expression| format!(" & /{expression}/")).collect();
    let text = format!("/(?s:.*)/ & ~/(?s:.*){named}(?s:.*)/{whole}");
    // Blanks before the end are no part of a text, so that they have to be there where it is held to
    // something.
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

/// The rule for any text up to the first `marker`, and that.
fn through(marker: &str, tokenizer: &Tokenizer) -> String {
    match special(marker, tokenizer).filter(|(length, _)| *length == marker.len()) {
        Some((_, id)) => format!("FREE? <[{id}]>"),
        None => "free".to_owned(),
    }
}

/// The rule that this needs.
fn free(marker: &str, tokenizer: &Tokenizer) -> String {
    match special(marker, tokenizer).filter(|(length, _)| *length == marker.len()) {
        Some(_) => "FREE: /(?s:.+)/\n".to_owned(),
        None => format!("free[suffix={}]: /(?s:.*)/\n", json!(marker)),
    }
}

impl AnswerSyntax {
    /// Control tokens that end an answer in channels: that of a call in addition to that of a text.
    pub fn end_tokens(&self, tokenizer: &Tokenizer) -> Vec<TokenId> {
        let ends = self.channels.iter().flat_map(|channels| channels.ends.iter().skip(1));
        let whole = |end: &String| special(end, tokenizer).filter(|(length, _)| *length == end.len());
        ends.filter_map(whole).map(|(_, id)| id).collect()
    }

    /// True if its markers have control tokens, so that texts have to show them.
    pub fn has_control_tokens(&self, tokenizer: &Tokenizer) -> bool {
        let calls = self.calls.iter().flat_map(|c| [&c.begin, &c.open, &c.middle, &c.close, &c.end]);
        let tags = self.calls.iter().filter_map(|c| c.tags.as_ref());
        let calls = calls.chain(tags.flat_map(|t| [&t.open, &t.middle, &t.close, &t.between]));
        let reasoning = self.reasoning.iter().flat_map(|r| [&r.open, &r.close]);
        let channels = self.channels.iter().flat_map(|c| [&c.channel, &c.message, &c.start]);
        let has = |text: &str| text.char_indices().any(|(at, _)| special(&text[at..], tokenizer).is_some());
        calls.chain(reasoning).chain(channels).any(|text| has(text))
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

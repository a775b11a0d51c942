//! How a model writes calls of tools and its reasoning: found by rendering its template with samples, and not by the model's name.
//!
//! A conversation whose answer has one call, and one with two, show what stands before, between and behind the name of a function and
//! its arguments. Templates that write arguments in another form than JSON (a tag for each) have calls that are not read here.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use minijinja::value::Serde;

use super::{ChatTemplate, Content, Extra, Message, Value};

/// How a call is written: `begin`, then for each call `open` NAME `middle` ARGUMENTS `close` with `between` them, then `end`.
/// Where a call has an id, [`ID`] stands for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallSyntax {
    pub begin: String,
    pub open: String,
    pub middle: String,
    pub close: String,
    /// `None`: an answer has one call at most.
    pub between: Option<String>,
    pub end: String,
    /// The template takes arguments as JSON text, not as an object.
    pub arguments_as_text: bool,
}

/// What stands for the id of a call in a [`CallSyntax`].
pub const ID: char = '\u{1}';

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasoningSyntax {
    pub open: String,
    pub close: String,
}

/// What an answer may have beside its text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnswerSyntax {
    pub calls: Option<CallSyntax>,
    pub reasoning: Option<ReasoningSyntax>,
}

const QUESTION: &str = "Question?";
const ANSWER: &str = "Answer.";
const REASONS: &str = "Reasons.";
const NAMES: [&str; 2] = ["sample_one", "sample_two"];
/// Nine letters and digits, which some templates demand.
const IDS: [&str; 2] = ["sampleid1", "sampleid2"];
const KEY: &str = "sample_key";
const VALUES: [&str; 2] = ["value one", "value two"];

impl AnswerSyntax {
    /// By rendering samples.
    pub fn of(template: &ChatTemplate) -> AnswerSyntax {
        let reasoning = reasoning(template);
        let calls = calls(template, reasoning.as_ref());
        AnswerSyntax { calls, reasoning }
    }
}

impl ReasoningSyntax {
    /// Whether a prompt ends where the model reasons already.
    pub fn is_open_behind(&self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open.trim())
    }
}

fn user() -> Message {
    Message::new("user", QUESTION)
}

fn assistant(content: Content, fields: Json) -> Message {
    let Json::Object(fields) = fields else { return Message::new("assistant", "") };
    let fields = fields.into_iter().map(|(name, value)| (name, Value::from(Serde(value)))).collect();
    Message { role: "assistant".into(), content, fields }
}

fn tools() -> Extra {
    let tool = |name: &str| {
        json!({"type": "function", "function": {"name": name, "description": "A sample.", "parameters":
            {"type": "object", "properties": {KEY: {"type": "string"}}, "required": [KEY]}}})
    };
    Extra { tools: Some(Value::from(Serde(NAMES.map(tool)))), variables: BTreeMap::new(), ..Extra::default() }
}

fn common_prefix(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

fn common_suffix(a: &str, b: &str) -> usize {
    a.chars().rev().zip(b.chars().rev()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

fn reasoning(template: &ChatTemplate) -> Option<ReasoningSyntax> {
    let extra = Extra::default();
    let prompt = template.render(&[user()], true, &extra).ok()?;
    let fields = json!({"reasoning_content": REASONS, "thinking": REASONS});
    let with =
        template.render(&[user(), assistant(Content::Text(ANSWER.into()), fields)], false, &extra).ok();
    let shown = with.as_ref().and_then(|text| {
        let (before, behind) = text.split_once(REASONS)?;
        let (close, _) = behind.split_once(ANSWER)?;
        let close = close.trim().to_owned();
        // `</think>` belongs to `<think>`.
        let twin = close.replacen('/', "", 1);
        let new = &before[common_prefix(before, &prompt)..];
        let open = if close.contains('/') && before.trim_end().ends_with(&twin) { &twin } else { new.trim() };
        let known = !open.is_empty() && !close.is_empty();
        known.then(|| ReasoningSyntax { open: open.to_owned(), close })
    });
    shown.or_else(|| opened(&prompt))
}

/// A prompt that ends with an opening tag: the answer closes it.
fn opened(prompt: &str) -> Option<ReasoningSyntax> {
    let prompt = prompt.trim_end();
    let (left, right) = if prompt.ends_with('>') { ('<', '>') } else { ('[', ']') };
    let begin = prompt.ends_with(right).then(|| prompt.rfind(left))??;
    let word = prompt[begin..].strip_prefix(left)?.strip_suffix(right)?;
    let plain = !word.is_empty() && word.chars().all(|c| c.is_ascii_alphabetic() || c == '_');
    // Only what is known to name reasoning: `[INST]` would be one as well.
    let reasons = ["think", "reason", "thought"].iter().any(|stem| word.to_ascii_lowercase().contains(stem));
    (plain && reasons).then(|| ReasoningSyntax {
        open: format!("{left}{word}{right}"),
        close: format!("{left}/{word}{right}"),
    })
}

/// An answer with these calls, as the template writes it behind the prompt; names, arguments and ids as they are.
fn rendered(template: &ChatTemplate, count: usize, as_text: bool, content: &Content) -> Option<String> {
    let call = |at: usize| {
        let arguments = json!({KEY: VALUES[at]});
        let arguments = if as_text { Json::String(arguments.to_string()) } else { arguments };
        json!({"id": IDS[at], "type": "function", "function": {"name": NAMES[at], "arguments": arguments}})
    };
    let calls: Vec<Json> = (0..count).map(call).collect();
    let extra = tools();
    let prompt = template.render(&[user()], true, &extra).ok()?;
    let plain = template.render(&[user(), Message::new("assistant", ANSWER)], false, &extra).ok()?;
    let message = assistant(content.clone(), json!({"tool_calls": calls}));
    let with = template.render(&[user(), message], false, &extra).ok()?;
    let tail = plain.rsplit_once(ANSWER)?.1;
    let answer = &with[common_prefix(&with, &prompt)..];
    let end = if answer.ends_with(tail) { tail.len() } else { common_suffix(answer, &plain) };
    Some(answer[..answer.len() - end].to_owned())
}

/// Begin and end of the JSON object of sample `at`.
fn arguments(text: &str, at: usize) -> Option<(usize, usize)> {
    let key = text.find(VALUES[at])?;
    let (begin, _) = text[..key].rmatch_indices('{').next()?;
    let mut objects = serde_json::Deserializer::from_str(&text[begin..]).into_iter::<Json>();
    let found = objects.next()?.ok()?;
    (found == json!({KEY: VALUES[at]})).then(|| (begin, begin + objects.byte_offset()))
}

/// Where the name and the arguments of a sample stand.
struct Found {
    name: usize,
    middle: (usize, usize),
    close: usize,
}

fn find(text: &str, at: usize) -> Option<Found> {
    let name = text.find(NAMES[at])?;
    let (begin, end) = arguments(text, at)?;
    let behind = name + NAMES[at].len();
    (behind <= begin).then_some(Found { name, middle: (behind, begin), close: end })
}

fn calls(template: &ChatTemplate, reasoning: Option<&ReasoningSyntax>) -> Option<CallSyntax> {
    // Nobody would tell the model of its tools otherwise.
    let prompt = |extra: &Extra| template.render(&[user()], true, extra).ok();
    if prompt(&tools())? == prompt(&Extra::default()).unwrap_or_default() {
        return None;
    }
    let ways = [false, true]
        .into_iter()
        .flat_map(|text| [(text, Content::None), (text, Content::Text(String::new()))]);
    ways.into_iter().find_map(|(as_text, content)| {
        let one = rendered(template, 1, as_text, &content)?;
        let first = find(&one, 0)?;
        let two = rendered(template, 2, as_text, &content);
        let two = two.as_ref().and_then(|two| Some((two, find(two, 0)?, find(two, 1)?)));
        let without_ids =
            |text: &str| IDS.iter().fold(text.to_owned(), |text, id| text.replace(id, &ID.to_string()));
        let before = without_ids(behind_reasoning(&one[..first.name], reasoning));
        let behind = without_ids(&one[first.close..]);
        let middle = without_ids(&one[first.middle.0..first.middle.1]);
        if middle.trim().is_empty() {
            return None;
        }
        let single = CallSyntax {
            begin: String::new(),
            open: before.clone(),
            middle,
            close: behind.clone(),
            between: None,
            end: String::new(),
            arguments_as_text: as_text,
        };
        let Some((two, of_first, of_second)) = two else { return Some(single) };
        let gap = without_ids(two.get(of_first.close..of_second.name)?);
        let open = behind_tag(&before, common_suffix(&before, &gap));
        let close = common_prefix(&behind, &gap[..gap.len() - open]);
        Some(CallSyntax {
            begin: before[..before.len() - open].to_owned(),
            open: before[before.len() - open..].to_owned(),
            close: behind[..close].to_owned(),
            between: Some(gap[close..gap.len() - open].to_owned()),
            end: behind[close..].to_owned(),
            ..single
        })
    })
}

/// The length of an end of `text`, less what is the rest of a tag that begins before it.
fn behind_tag(text: &str, end: usize) -> usize {
    let (before, behind) = text.split_at(text.len() - end);
    let inside = before.rfind('<').is_some_and(|at| !before[at..].contains('>'));
    match behind.find('>').filter(|_| inside) {
        Some(at) => end - at - 1,
        None => end,
    }
}

/// The template may write an empty reasoning before calls, which is no part of them.
fn behind_reasoning<'a>(text: &'a str, reasoning: Option<&ReasoningSyntax>) -> &'a str {
    let close = reasoning.map(|reasoning| reasoning.close.trim()).filter(|close| !close.is_empty());
    match close.and_then(|close| Some(text.rfind(close)? + close.len())) {
        Some(end) => text[end..].trim_start(),
        None => text,
    }
}

//! The way in which a model writes calls of tools and its reasoning: found by rendering its template with
//! samples, and not by the model's name.
//!
//! A conversation whose answer has one call, and one with two, show the text before, between and behind the
//! name of a function and its arguments, be they JSON or a tag for each. Templates that write them in another
//! form have calls that are not read here.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use minijinja::value::Serde;

pub use super::channels::ChannelSyntax;
use super::tags::TagSyntax;
use super::{ChatMessage, ChatTemplate, MessageContent, TemplateInputs, TemplateValue};

/// The form of a call: `begin`, then for each call `open` NAME `middle` ARGUMENTS `close` with `between`
/// them, then `end`. The arguments are a JSON object, or tags. Where a call has an id, [`ID`] takes its
/// place.
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
    /// `None`: the arguments are JSON.
    pub tags: Option<TagSyntax>,
}

/// The placeholder of the id of a call in a [`CallSyntax`].
pub const ID: char = '\u{1}';

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasoningSyntax {
    pub open: String,
    pub close: String,
}

/// The parts that an answer may have besides its text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnswerSyntax {
    pub calls: Option<CallSyntax>,
    pub reasoning: Option<ReasoningSyntax>,
    /// Answers are messages in channels, and what the other two say of them holds for one of several forms.
    pub channels: Option<ChannelSyntax>,
}

const QUESTION: &str = "Question?";
pub(super) const ANSWER: &str = "Answer.";
pub(super) const REASONS: &str = "Reasons.";
pub(super) const NAMES: [&str; 2] = ["sample_one", "sample_two"];
/// Nine letters and digits, which some templates demand.
const IDS: [&str; 2] = ["sampleid1", "sampleid2"];
const KEY: &str = "sample_key";
const VALUES: [&str; 2] = ["value one", "value two"];
/// The keys of a call with two arguments, in alphabetical order.
const KEYS: [&str; 2] = ["sample_key", "sample_zone"];

impl AnswerSyntax {
    /// Finds the syntax by rendering samples.
    pub fn from_template(template: &ChatTemplate) -> AnswerSyntax {
        let reasoning = reasoning(template);
        let calls = calls(template, reasoning.as_ref()).or_else(|| tagged(template, reasoning.as_ref()));
        let channels = ChannelSyntax::from_template(template, calls.as_ref());
        AnswerSyntax { calls, reasoning, channels }
    }
}

impl ReasoningSyntax {
    /// True if a prompt ends where the model reasons already.
    pub fn is_open_behind(&self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open.trim())
    }
}

pub(super) fn user() -> ChatMessage {
    ChatMessage::new("user", QUESTION)
}

pub(super) fn assistant(content: MessageContent, fields: Json) -> ChatMessage {
    let Json::Object(fields) = fields else { return ChatMessage::new("assistant", "") };
    let fields = fields.into_iter().map(|(name, value)| (name, TemplateValue::from(Serde(value)))).collect();
    ChatMessage { role: "assistant".into(), content, fields }
}

/// Two functions.
pub(super) fn tools() -> TemplateInputs {
    let tool = |name: &str| {
        json!({"type": "function", "function": {"name": name, "description": "A sample.", "parameters":
            {"type": "object", "properties": {KEY: {"type": "string"}}, "required": [KEY]}}})
    };
    TemplateInputs {
        tools: Some(TemplateValue::from(Serde(NAMES.map(tool)))),
        variables: BTreeMap::new(),
        ..TemplateInputs::default()
    }
}

fn common_prefix(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

pub(super) fn common_suffix(a: &str, b: &str) -> usize {
    a.chars().rev().zip(b.chars().rev()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}

fn reasoning(template: &ChatTemplate) -> Option<ReasoningSyntax> {
    let extra = TemplateInputs::default();
    let prompt = template.render_adapted(&[user()], true, &extra).ok()?;
    let fields = json!({"reasoning_content": REASONS, "thinking": REASONS});
    let with = template
        .render_adapted(&[user(), assistant(MessageContent::Text(ANSWER.into()), fields)], false, &extra)
        .ok();
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

/// An answer with calls of these arguments, as the template writes it behind the prompt; names, arguments and
/// ids as they are.
fn rendered(
    template: &ChatTemplate,
    arguments: &[Json],
    as_text: bool,
    content: &MessageContent,
) -> Option<String> {
    let call = |(at, arguments): (usize, &Json)| {
        let arguments = if as_text { Json::String(arguments.to_string()) } else { arguments.clone() };
        json!({"id": IDS[at], "type": "function", "function": {"name": NAMES[at], "arguments": arguments}})
    };
    let calls: Vec<Json> = arguments.iter().enumerate().map(call).collect();
    let extra = tools();
    let prompt = template.render_adapted(&[user()], true, &extra).ok()?;
    let plain =
        template.render_adapted(&[user(), ChatMessage::new("assistant", ANSWER)], false, &extra).ok()?;
    let message = assistant(content.clone(), json!({"tool_calls": calls}));
    let with = template.render_adapted(&[user(), message], false, &extra).ok()?;
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

/// The places of the name and the arguments of a sample.
struct CallSpans {
    name: usize,
    middle: (usize, usize),
    close: usize,
}

fn find(text: &str, at: usize) -> Option<CallSpans> {
    let name = text.find(NAMES[at])?;
    let (begin, end) = arguments(text, at)?;
    let behind = name + NAMES[at].len();
    (behind <= begin).then_some(CallSpans { name, middle: (behind, begin), close: end })
}

fn calls(template: &ChatTemplate, reasoning: Option<&ReasoningSyntax>) -> Option<CallSyntax> {
    if !tells_of_tools(template) {
        return None;
    }
    let samples = VALUES.map(|value| json!({KEY: value}));
    let ways = [false, true]
        .into_iter()
        .flat_map(|text| [(text, MessageContent::None), (text, MessageContent::Text(String::new()))]);
    ways.into_iter().find_map(|(as_text, content)| {
        let one = rendered(template, &samples[..1], as_text, &content)?;
        let first = find(&one, 0)?;
        let two = rendered(template, &samples, as_text, &content);
        let two = two.as_ref().and_then(|two| Some((two, find(two, 0)?, find(two, 1)?)));
        let before = without_ids(behind_reasoning(&one[..first.name], reasoning));
        let behind = without_ids(&one[first.close..]);
        let middle = without_ids(&one[first.middle.0..first.middle.1]);
        if middle.trim().is_empty() {
            return None;
        }
        let gap = match &two {
            Some((two, of_first, of_second)) => Some(without_ids(two.get(of_first.close..of_second.name)?)),
            None => None,
        };
        Some(CallSyntax { middle, arguments_as_text: as_text, ..framed(&before, &behind, gap.as_deref()) })
    })
}

/// True if the template tells the model of its tools.
fn tells_of_tools(template: &ChatTemplate) -> bool {
    let prompt = |extra: &TemplateInputs| template.render_adapted(&[user()], true, extra).ok();
    prompt(&tools()).is_some_and(|with| with != prompt(&TemplateInputs::default()).unwrap_or_default())
}

fn without_ids(text: &str) -> String {
    IDS.iter().fold(text.to_owned(), |text, id| text.replace(id, &ID.to_string()))
}

/// The frame of a call, from the texts before the first and behind the last, and between two; without middle
/// and arguments.
fn framed(before: &str, behind: &str, gap: Option<&str>) -> CallSyntax {
    let open = gap.map_or(before.len(), |gap| behind_tag(before, common_suffix(before, gap)));
    let close = gap.map_or(behind.len(), |gap| common_prefix(behind, &gap[..gap.len() - open]));
    CallSyntax {
        begin: before[..before.len() - open].to_owned(),
        open: before[before.len() - open..].to_owned(),
        middle: String::new(),
        close: behind[..close].to_owned(),
        between: gap.map(|gap| gap[close..gap.len() - open].to_owned()),
        end: behind[close..].to_owned(),
        arguments_as_text: false,
        tags: None,
    }
}

/// The places of the parts of a call with two arguments.
struct FoundTags {
    name: usize,
    keys: [usize; 2],
    values: [usize; 2],
}

impl FoundTags {
    fn find(text: &str, name: &str) -> Option<FoundTags> {
        let behind = |from: usize, what: &str| Some(from + text.get(from..)?.find(what)?);
        let name = behind(0, name)?;
        let first = behind(name, KEYS[0])?;
        let one = behind(first, VALUES[0])?;
        let second = behind(one, KEYS[1])?;
        let two = behind(second, VALUES[1])?;
        Some(FoundTags { name, keys: [first, second], values: [one, two] })
    }

    /// The place behind the last value.
    fn end(&self) -> usize {
        self.values[1] + VALUES[1].len()
    }
}

/// Calls whose arguments have a tag each.
fn tagged(template: &ChatTemplate, reasoning: Option<&ReasoningSyntax>) -> Option<CallSyntax> {
    if !tells_of_tools(template) {
        return None;
    }
    let sample = json!({KEYS[0]: VALUES[0], KEYS[1]: VALUES[1]});
    [MessageContent::None, MessageContent::Text(String::new())].into_iter().find_map(|content| {
        let one = rendered(template, std::slice::from_ref(&sample), false, &content)?;
        let found = FoundTags::find(&one, NAMES[0])?;
        let (name_end, first) = (found.name + NAMES[0].len(), found.keys[0]);
        let middles = [0, 1].map(|at| &one[found.keys[at] + KEYS[at].len()..found.values[at]]);
        let gap = &one[found.values[0] + VALUES[0].len()..found.keys[1]];
        let behind = &one[found.end()..];
        // Where the first argument begins, the call's own tag may have ended.
        let same = common_suffix(&one[..first], gap).min(first - name_end);
        let open = behind_tag(&one[..first], same);
        let close = common_prefix(behind, &gap[..gap.len() - open]);
        let close = behind[..close].rfind('>').map(|at| &behind[..=at])?;
        let is_tag = middles[0] == middles[1] && middles[0].contains('>') && close.contains('<');
        if !is_tag || open == 0 {
            return None;
        }
        let tags = TagSyntax {
            open: one[first - open..first].to_owned(),
            middle: middles[0].to_owned(),
            close: close.to_owned(),
            between: gap[close.len()..gap.len() - open].to_owned(),
        };
        // A template may write texts in another way than other values; that is not read here.
        let number = rendered(template, &[json!({KEYS[0]: 7})], false, &content)?;
        if !number.contains(&format!("{}{}{}7{}", tags.open, KEYS[0], tags.middle, tags.close)) {
            return None;
        }
        let two = rendered(template, &[sample.clone(), sample.clone()], false, &content);
        let between = two.as_ref().and_then(|two| {
            let first = FoundTags::find(two, NAMES[0])?;
            let begin = first.end() + close.len();
            Some(without_ids(two.get(begin..begin + two.get(begin..)?.find(NAMES[1])?)?))
        });
        let before = without_ids(behind_reasoning(&one[..found.name], reasoning));
        let behind = without_ids(&behind[close.len()..]);
        let middle = without_ids(&one[name_end..first - open]);
        let around = framed(&before, &behind, between.as_deref());
        Some(CallSyntax { middle, tags: Some(tags), ..around })
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

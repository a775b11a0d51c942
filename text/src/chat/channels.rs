//! The form of answers that are messages in channels, as gpt-oss writes them: found from its template.
//!
//! `<|channel|>analysis<|message|>Thoughts.<|end|>`, then
//! `<|start|>assistant<|channel|>final<|message|>Text.<|return|>`.
//! The part behind the thoughts depends on the answer: the final text, a call, a text on the way to one, or
//! more thoughts.

use serde_json::json;

use super::syntax::{ANSWER, CallSyntax, NAMES, REASONS, assistant, common_suffix, tools, user};
use super::tags::open_end;
use super::{ChatTemplate, MessageContent, TemplateInputs};

/// The markers of messages and the names of channels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChannelSyntax {
    /// Begins the head of a message, before the role.
    pub start: String,
    pub role: String,
    /// The marker before the name of a channel.
    pub channel: String,
    /// Ends the head.
    pub message: String,
    /// Texts that end a message; the first one ends a message that others follow.
    pub ends: Vec<String>,
    /// The channel of thoughts.
    pub thoughts: String,
    /// The channel of the final text.
    pub answer: String,
    /// The channel of calls, and of texts on the way to one.
    pub calls: String,
    /// The text before the name of the function that is called: `to=`.
    pub recipient: String,
    /// The text before the names of the functions of a request: `functions.`.
    pub namespace: String,
}

/// The kind of a message of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageKind {
    Thoughts,
    Text,
    Call,
    /// A message of another role.
    Foreign,
}

/// The name of a channel or a role at the end of a text.
fn word_at_end(text: &str) -> &str {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    &text[text.trim_end_matches(is_part).len()..]
}

/// The marker at the begin of a text: `<...>`.
fn marker_at_begin(text: &str) -> Option<&str> {
    let end = text.starts_with('<').then(|| text.find('>'))??;
    Some(&text[..=end])
}

impl ChannelSyntax {
    /// The form found by rendering samples; `None` if the template writes no channels.
    pub fn from_template(template: &ChatTemplate, calls: Option<&CallSyntax>) -> Option<ChannelSyntax> {
        let extra = TemplateInputs::default();
        let prompt = template.render(&[user()], true, &extra).ok()?;
        let fields = json!({"reasoning_content": REASONS, "thinking": REASONS});
        let message = assistant(MessageContent::Text(ANSWER.into()), fields);
        let whole = template.render(&[user(), message], false, &extra).ok()?;
        let (first, rest) = whole.strip_prefix(prompt.as_str())?.split_once(REASONS)?;
        let (between, behind) = rest.split_once(ANSWER)?;
        // Both heads end alike, and the names of their channels are before that.
        let message = &first[first.len() - common_suffix(first, between)..];
        let message = &message[message.find('<')?..];
        let (thoughts_head, answer_head) = (first.strip_suffix(message)?, between.strip_suffix(message)?);
        let (thoughts, answer) = (word_at_end(thoughts_head), word_at_end(answer_head));
        let channel = thoughts_head.strip_suffix(thoughts)?;
        let before = answer_head.strip_suffix(answer)?.strip_suffix(channel)?;
        if thoughts.is_empty() || answer.is_empty() || marker_at_begin(channel)? != channel {
            return None;
        }
        let end = marker_at_begin(before)?;
        let head = &before[end.len()..];
        let role = word_at_end(head);
        let start = head.strip_suffix(role).filter(|start| !start.is_empty())?;
        let mut ends = vec![end.to_owned()];
        let mut add = |marker: Option<&str>| {
            let marker = marker.map(str::to_owned);
            ends.extend(
                marker
                    .filter(|marker| marker != start && !ends.contains(marker))
                    .into_iter()
                    .collect::<Vec<_>>(),
            );
        };
        add(marker_at_begin(behind));
        add(called_end(template).as_deref());
        let (recipient, namespace, commentary) = calls
            .and_then(|calls| called(calls, channel))
            .unwrap_or_else(|| ("to=".into(), "functions.".into(), "commentary".into()));
        Some(ChannelSyntax {
            start: start.into(),
            role: role.into(),
            channel: channel.into(),
            message: message.into(),
            ends,
            thoughts: thoughts.into(),
            answer: answer.into(),
            calls: commentary,
            recipient,
            namespace,
        })
    }

    /// The end of a message that others follow.
    pub fn end(&self) -> &str {
        self.ends.first().map_or("", String::as_str)
    }

    /// The marker before the name of a form that the text of a message has.
    pub fn constrain(&self) -> String {
        // Templates do not write it; models do.
        "<|constrain|>".to_owned()
    }

    /// The part of the answer that a prompt has already, behind the role.
    pub fn started_answer<'p>(&self, prompt: &'p str) -> &'p str {
        let head = format!("{}{}", self.start, self.role);
        prompt.rfind(&self.start).and_then(|at| prompt[at..].strip_prefix(head.as_str())).unwrap_or_default()
    }

    /// True if a prompt ends where an answer begins, or in its thoughts.
    pub fn is_answered(&self, prompt: &str) -> bool {
        let head = format!("{}{}", self.start, self.role);
        let thoughts = format!("{}{}{}", self.channel, self.thoughts, self.message);
        let last = prompt.rfind(&self.start).is_some_and(|at| prompt[at..].starts_with(&head));
        let started = self.started_answer(prompt);
        let open = started.starts_with(&thoughts) && !self.ends.iter().any(|end| started.contains(end));
        last && (started.is_empty() || open)
    }
}

impl ChannelSyntax {
    /// True if a text may be the head of a message, or the begin of one.
    pub(super) fn may_be_head(&self, text: &str) -> bool {
        let text = text.trim_start();
        let begins = |mark: &str| text.starts_with(mark) || mark.starts_with(text);
        begins(&self.channel) || begins(&self.recipient)
    }

    /// The kind of a message by its head, with the name of the function that is called. The `first` one has
    /// no role.
    pub(super) fn read_head(&self, head: &str, first: bool) -> (MessageKind, Option<String>) {
        let head = head.trim_start();
        if !first && !head.starts_with(&self.role) {
            return (MessageKind::Foreign, None);
        }
        let word = |text: &str| {
            let end = text.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(text.len());
            text[..end].to_owned()
        };
        let behind = |mark: &str| head.split_once(mark).map(|(_, behind)| word(behind.trim_start()));
        match behind(&self.recipient) {
            Some(name) => match name.strip_prefix(self.namespace.as_str()).filter(|name| !name.is_empty()) {
                Some(name) => (MessageKind::Call, Some(name.to_owned())),
                // Tools of the model's own, which are not run here.
                None => (MessageKind::Thoughts, None),
            },
            None if behind(&self.channel).is_some_and(|channel| channel == self.thoughts) => {
                (MessageKind::Thoughts, None)
            }
            None => (MessageKind::Text, None),
        }
    }

    /// Begin and end of the first marker in a text that ends a message, and where it begins the next one
    /// whether that has its role.
    pub(super) fn message_end(&self, text: &str) -> Option<(usize, usize, Option<bool>)> {
        let ends = self.ends.iter().map(|mark| (mark, None));
        let marks = ends.chain([(&self.start, Some(true)), (&self.channel, Some(false))]);
        let found = marks.filter_map(|(mark, next)| {
            let at = text.find(mark.as_str())?;
            // The marker of a channel is a part of its head.
            Some((at, if next == Some(false) { at } else { at + mark.len() }, next))
        });
        found.min()
    }

    /// Bytes at the end of a text that may become a marker.
    pub(super) fn open_marker(&self, text: &str) -> usize {
        let marks = self.ends.iter().chain([&self.start, &self.channel]);
        marks.map(|mark| open_end(text, mark)).max().unwrap_or(0)
    }
}

/// Recipient, namespace and channel of calls, of how a template writes one.
fn called(calls: &CallSyntax, channel: &str) -> Option<(String, String, String)> {
    let before = format!("{}{}", calls.begin, calls.open);
    let named = before.split_whitespace().next_back()?;
    let at = named.find('=')?;
    let (recipient, namespace) = named.split_at(at + 1);
    // The name of the channel is behind the name of the function, or before it.
    let head = [calls.middle.as_str(), &before].into_iter().find_map(|text| text.split_once(channel))?.1;
    let end = head.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(head.len());
    Some((recipient.to_owned(), namespace.to_owned(), head[..end].to_owned()))
}

/// The marker behind a call in the middle of a conversation.
fn called_end(template: &ChatTemplate) -> Option<String> {
    let arguments = json!({"sample_key": REASONS});
    let call = json!({"id": "sampleid1", "type": "function", "function": {"name": NAMES[0], "arguments": arguments}});
    let message = assistant(MessageContent::None, json!({"tool_calls": [call]}));
    let whole = template.render(&[user(), message], false, &tools()).ok()?;
    let (_, behind) = whole.rsplit_once(REASONS)?;
    Some(marker_at_begin(&behind[behind.find('<')?..])?.to_owned())
}

//! An answer as it comes, taken apart into reasoning, text and calls.

use serde_json::Value as Json;

use super::syntax::{AnswerSyntax, CallSyntax, ID, ReasoningSyntax};
use super::tags::{TagSyntax, TagValue, ValueKind, open_end};

/// Longest name of a function.
const LONGEST_NAME: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerPart {
    Reasoning(String),
    Text(String),
    /// A call begins; they are numbered from 0.
    Call {
        index: usize,
        name: String,
    },
    /// More of the arguments' JSON text.
    Arguments {
        index: usize,
        text: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// Nothing but blanks has come.
    Begin,
    Reasoning,
    /// Behind the reasoning or before a call: blanks are no part of the text.
    Blank,
    Text,
    /// `held` begins with a call, of which so many bytes are read.
    Name(usize),
    Arguments {
        depth: usize,
        in_string: bool,
        escaped: bool,
    },
    /// Before an argument that has a tag, or behind the last; whether it would be the first one.
    Tag {
        first: bool,
    },
    /// In the name of an argument.
    Key {
        first: bool,
    },
    Value(TagValue),
    Close,
    Between,
}

/// Takes an answer apart. What may become a marker is held back until it is known.
#[derive(Debug, Clone)]
pub struct AnswerParser {
    reasoning: Option<ReasoningSyntax>,
    calls: Option<CallSyntax>,
    /// Functions that may be called.
    names: Vec<String>,
    /// The schemas of their arguments, as far as they are known.
    schemas: Vec<Json>,
    /// The function that is being called, by its number.
    called: usize,
    /// Most calls; later ones are dropped.
    most: usize,
    state: State,
    held: String,
    count: usize,
    /// Whether any text has been given out.
    texts: bool,
}

enum Match {
    /// So many bytes.
    Full(usize),
    /// All there is could be the begin.
    Partial,
    No,
}

/// Whether `text` begins with `pattern`, blanks apart.
fn matches(pattern: &str, text: &str) -> Match {
    let mut wanted = pattern.chars().filter(|c| !c.is_whitespace()).peekable();
    let mut rest = text.char_indices().peekable();
    let mut end = 0;
    while let Some(&next) = wanted.peek() {
        let Some(&(at, found)) = rest.peek() else { return Match::Partial };
        if found.is_whitespace() {
            rest.next();
        } else if next == ID {
            let length = text[at..].find(|c: char| !(c.is_ascii_alphanumeric() || "_-".contains(c)));
            match length {
                None => return Match::Partial,
                Some(0) => return Match::No,
                Some(length) => {
                    end = at + length;
                    rest = text.char_indices().peekable();
                    while rest.next_if(|&(i, _)| i < end).is_some() {}
                    wanted.next();
                }
            }
        } else if found == next {
            end = at + found.len_utf8();
            rest.next();
            wanted.next();
        } else {
            return Match::No;
        }
    }
    Match::Full(end)
}

impl AnswerParser {
    /// `names`: functions that may be called; `prompt`: what the answer goes on from.
    pub fn new(syntax: &AnswerSyntax, names: Vec<String>, most_calls: usize, prompt: &str) -> AnswerParser {
        let reasons = syntax.reasoning.as_ref().is_some_and(|r| r.is_open_behind(prompt));
        AnswerParser {
            reasoning: syntax.reasoning.clone(),
            calls: syntax.calls.clone().filter(|_| !names.is_empty()),
            names,
            schemas: Vec::new(),
            called: 0,
            most: most_calls,
            state: if reasons { State::Reasoning } else { State::Begin },
            held: String::new(),
            count: 0,
            texts: false,
        }
    }

    /// With the schemas of the arguments, in the order of the names: what stands in tags is a text or JSON by them.
    pub fn with_schemas(self, schemas: Vec<Json>) -> AnswerParser {
        AnswerParser { schemas, ..self }
    }

    /// Calls so far.
    pub fn calls(&self) -> usize {
        self.count.min(self.most)
    }

    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        self.held.push_str(piece);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        self.kept(parts)
    }

    /// The answer has ended: what was held back is what it is.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let rest = std::mem::take(&mut self.held);
        let blank = rest.trim().is_empty();
        let part = match self.state {
            State::Reasoning => (!blank).then(|| AnswerPart::Reasoning(rest.trim_end().to_owned())),
            State::Text => (!rest.is_empty()).then_some(AnswerPart::Text(rest)),
            State::Begin | State::Blank | State::Name(_) => (!blank).then_some(AnswerPart::Text(rest)),
            State::Arguments { .. } => {
                (!blank).then(|| AnswerPart::Arguments { index: self.count - 1, text: rest })
            }
            State::Value(ref value) => {
                let tags = self.calls.as_ref().and_then(|calls| calls.tags.as_ref());
                let text = tags.map(|tags| value.cut(&rest, tags)).unwrap_or_default();
                (!text.is_empty()).then(|| AnswerPart::Arguments { index: self.count - 1, text })
            }
            // The begin of a marker that did not come.
            State::Tag { .. } | State::Key { .. } | State::Close | State::Between => None,
        };
        self.kept(part.into_iter().collect())
    }

    fn kept(&self, mut parts: Vec<AnswerPart>) -> Vec<AnswerPart> {
        parts.retain(|part| match part {
            AnswerPart::Call { index, .. } | AnswerPart::Arguments { index, .. } => *index < self.most,
            AnswerPart::Text(text) | AnswerPart::Reasoning(text) => !text.is_empty(),
        });
        parts
    }

    /// Looks at what is held; false when more has to come first.
    fn step(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        match self.state.clone() {
            State::Begin => self.begin(),
            State::Reasoning => self.reason(parts),
            State::Blank => self.blank(),
            State::Text => self.text(parts),
            State::Name(begin) => self.name(begin, parts),
            State::Arguments { depth, in_string, escaped } => {
                self.arguments(depth, in_string, escaped, parts)
            }
            State::Tag { first } => self.tag(first, parts),
            State::Key { first } => self.key(first, parts),
            State::Value(value) => self.value(value, parts),
            State::Close => self.close(),
            State::Between => self.between(),
        }
    }

    fn go(&mut self, state: State) -> bool {
        self.state = state;
        true
    }

    fn begin(&mut self) -> bool {
        let Some(open) = self.reasoning.as_ref().map(|r| r.open.trim().to_owned()) else {
            return self.go(State::Text);
        };
        match matches(&open, &self.held) {
            Match::Partial => false,
            Match::Full(end) => {
                self.held.drain(..end);
                self.go(State::Reasoning)
            }
            Match::No => self.go(State::Text),
        }
    }

    fn reason(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        let close = self.reasoning.as_ref().map(|r| r.close.trim().to_owned()).unwrap_or_default();
        if let Some(at) = self.held.find(&close) {
            let text = self.held[..at].trim_end().to_owned();
            self.held.drain(..at + close.len());
            parts.push(AnswerPart::Reasoning(self.without_begin(text)));
            return self.go(State::Blank);
        }
        let safe = self.held.len() - open_end(&self.held, &close);
        let safe = self.held[..safe].trim_end().len();
        if safe > 0 {
            let text = self.held.drain(..safe).collect();
            parts.push(AnswerPart::Reasoning(self.without_begin(text)));
        }
        false
    }

    /// Reasoning and text begin without blanks.
    fn without_begin(&mut self, text: String) -> String {
        if self.texts {
            return text;
        }
        let text = text.trim_start().to_owned();
        self.texts = !text.is_empty();
        text
    }

    fn blank(&mut self) -> bool {
        self.texts = false;
        let blanks = self.held.len() - self.held.trim_start().len();
        self.held.drain(..blanks);
        !self.held.is_empty() && self.go(State::Text)
    }

    fn text(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(calls) = &self.calls else {
            if !self.held.is_empty() {
                parts.push(AnswerPart::Text(std::mem::take(&mut self.held)));
                self.texts = true;
            }
            return false;
        };
        let marker = format!("{}{}", calls.begin, calls.open);
        let marker = marker.trim_start().to_owned();
        // Without a marker of its own a call is all of the answer.
        let bare = marker.starts_with('{')
            || marker.strip_prefix('[').is_some_and(|m| m.trim_start().starts_with('{'));
        let candidates = self.held.char_indices().filter(|(_, c)| marker.starts_with(*c)).map(|(at, _)| at);
        let first = |&at: &usize| !bare || !self.texts && self.held[..at].trim().is_empty();
        let candidates: Vec<usize> = candidates.filter(first).collect();
        for at in candidates {
            match matches(&marker, &self.held[at..]) {
                Match::No => {}
                Match::Partial => {
                    self.give(at, parts);
                    return false;
                }
                Match::Full(end) => {
                    let all = self.held.len();
                    self.give(at, parts);
                    let given = all - self.held.len();
                    return self.go(State::Name(at - given + end));
                }
            }
        }
        self.give(self.held.len(), parts);
        false
    }

    /// Gives out text; blanks at its end only when more text follows.
    fn give(&mut self, end: usize, parts: &mut Vec<AnswerPart>) {
        let end = if self.calls.is_some() { self.held[..end].trim_end().len() } else { end };
        if end > 0 {
            self.texts = true;
            parts.push(AnswerPart::Text(self.held.drain(..end).collect()));
        }
    }

    /// The begin of a call turned out to be none.
    fn no_call(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        if !self.held.is_empty() {
            self.texts = true;
            parts.push(AnswerPart::Text(std::mem::take(&mut self.held)));
        }
        self.go(State::Text)
    }

    fn name(&mut self, begin: usize, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(calls) = self.calls.clone() else { return self.no_call(parts) };
        let rest = &self.held[begin..];
        let blanks = rest.len() - rest.trim_start().len();
        let rest = &rest[blanks..];
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || "_-.".contains(c)));
        let Some(end) = end.filter(|&end| end > 0) else {
            return if rest.len() > LONGEST_NAME || end == Some(0) { self.no_call(parts) } else { false };
        };
        let name = rest[..end].to_owned();
        let Some(called) = self.names.iter().position(|known| *known == name) else {
            return self.no_call(parts);
        };
        let brace = if calls.tags.is_some() { "" } else { "{" };
        match matches(&format!("{}{brace}", calls.middle), &rest[end..]) {
            Match::Partial => false,
            Match::No => self.no_call(parts),
            Match::Full(length) => {
                let used = begin + blanks + end + length - brace.len();
                self.held.drain(..used);
                let index = self.count;
                self.count += 1;
                self.called = called;
                self.texts = true;
                parts.push(AnswerPart::Call { index, name });
                if calls.tags.is_none() {
                    return self.go(State::Arguments { depth: 0, in_string: false, escaped: false });
                }
                self.argue(parts, "{");
                self.go(State::Tag { first: true })
            }
        }
    }

    /// More of the arguments of the call.
    fn argue(&self, parts: &mut Vec<AnswerPart>, text: impl Into<String>) {
        let text: String = text.into();
        if !text.is_empty() {
            parts.push(AnswerPart::Arguments { index: self.count - 1, text });
        }
    }

    fn tags(&self) -> Option<TagSyntax> {
        self.calls.as_ref()?.tags.clone()
    }

    fn tag(&mut self, first: bool, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(tags) = self.tags() else { return self.go(State::Close) };
        if self.held.trim().is_empty() {
            return false;
        }
        let open = if first { tags.open } else { format!("{}{}", tags.between, tags.open) };
        match matches(&open, &self.held) {
            Match::Partial => return false,
            Match::Full(end) => {
                self.held.drain(..end);
                return self.go(State::Key { first });
            }
            Match::No => {}
        }
        // Whatever comes here is no argument.
        self.argue(parts, "}");
        self.go(State::Close)
    }

    fn key(&mut self, first: bool, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(tags) = self.tags() else { return self.go(State::Close) };
        let begin = tags.middle.trim_start().chars().next();
        let Some(at) = begin.and_then(|begin| self.held.find(begin)) else {
            // A name without an end is none.
            return self.held.len() > LONGEST_NAME && self.broken(parts);
        };
        match matches(&tags.middle, &self.held[at..]) {
            Match::Partial => false,
            Match::No => self.broken(parts),
            Match::Full(end) => {
                let name = self.held[..at].trim().to_owned();
                self.held.drain(..at + end);
                let kind = match self.schemas.get(self.called) {
                    Some(schema) => ValueKind::of(schema, &name),
                    None => ValueKind::Json,
                };
                let comma = if first { "" } else { ", " };
                self.argue(parts, format!("{comma}{}: ", Json::from(name)));
                self.go(State::Value(TagValue::new(kind)))
            }
        }
    }

    /// What begins an argument goes on as none.
    fn broken(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        self.argue(parts, "}");
        self.go(State::Blank)
    }

    fn value(&mut self, mut value: TagValue, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(tags) = self.tags() else { return self.go(State::Close) };
        let (text, ended) = value.take(&mut self.held, &tags);
        self.argue(parts, text);
        if ended {
            return self.go(State::Tag { first: false });
        }
        self.state = State::Value(value);
        false
    }

    /// As much of a JSON object as there is.
    fn arguments(
        &mut self,
        mut depth: usize,
        mut in_string: bool,
        mut escaped: bool,
        parts: &mut Vec<AnswerPart>,
    ) -> bool {
        let mut end = None;
        for (at, c) in self.held.char_indices() {
            match c {
                _ if escaped => escaped = false,
                '\\' if in_string => escaped = true,
                '"' => in_string = !in_string,
                '{' | '[' if !in_string => depth += 1,
                '}' | ']' if !in_string => {
                    depth -= 1;
                    if depth == 0 {
                        end = Some(at + c.len_utf8());
                        break;
                    }
                }
                _ => {}
            }
        }
        let text: String = self.held.drain(..end.unwrap_or(self.held.len())).collect();
        let more = !text.is_empty();
        if more {
            parts.push(AnswerPart::Arguments { index: self.count - 1, text });
        }
        match end {
            Some(_) => self.go(State::Close),
            None => {
                self.state = State::Arguments { depth, in_string, escaped };
                false
            }
        }
    }

    fn close(&mut self) -> bool {
        let close = self.calls.as_ref().map(|calls| calls.close.clone()).unwrap_or_default();
        match matches(&close, &self.held) {
            Match::Partial => false,
            Match::No => self.go(State::Blank),
            Match::Full(end) => {
                self.held.drain(..end);
                self.go(State::Between)
            }
        }
    }

    /// Another call, or the end of them.
    fn between(&mut self) -> bool {
        let Some(calls) = self.calls.clone() else { return self.go(State::Blank) };
        if self.held.trim().is_empty() {
            return false;
        }
        let next = calls.between.map(|between| format!("{between}{}", calls.open));
        let found = next.map_or(Match::No, |next| matches(&next, &self.held));
        match (found, matches(&calls.end, &self.held)) {
            (Match::Full(end), _) => self.go(State::Name(end)),
            (Match::No, Match::Full(end)) => {
                self.held.drain(..end);
                self.go(State::Blank)
            }
            (Match::No, Match::No) => self.go(State::Blank),
            (Match::Partial, _) | (_, Match::Partial) => false,
        }
    }
}

#[cfg(test)]
mod tests;

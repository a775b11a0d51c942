//! Answers whose reasoning and calls are between markers.

use std::sync::Arc;

use serde_json::Value as Json;

use super::AnswerPart;
use super::form::CallForm;
use super::marker::{Match, matches};
use super::object::{CallObject, JsonValue};
use crate::chat::syntax::{AnswerSyntax, ReasoningSyntax};
use crate::chat::tags::{TagSyntax, TagValue, open_end};

/// Shortest begin of a marker that is one for sure where an answer was cut.
const SHORTEST_MARKUP: usize = 2;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MarkedAnswerState {
    /// Only blanks so far.
    Begin,
    Reasoning,
    /// Behind the reasoning or a call: blanks are no part of the text.
    Blank,
    Text,
    /// `held` begins with a possible call, of whose marker `end` bytes are read.
    Name {
        end: usize,
        inside: bool,
    },
    /// The same, where the call is an object.
    Object {
        end: usize,
        inside: bool,
        object: Box<CallObject>,
    },
    /// Between two objects of a list.
    Listed,
    Arguments(Box<JsonValue>),
    /// Before an argument that has a tag, or behind the last; whether it would be the first one.
    Tag {
        first: bool,
    },
    /// The name of an argument; `first` if it would be the first one.
    Key {
        first: bool,
    },
    Value(TagValue),
    /// Behind the arguments, with the number of the next piece that may end the call.
    Close(usize),
}

/// The parser of answers whose reasoning and calls are between markers.
#[derive(Debug, Clone)]
pub(super) struct MarkedParser {
    pub(super) reasoning: Option<ReasoningSyntax>,
    pub(super) calls: Option<CallForm>,
    pub(super) tags: Option<TagSyntax>,
    /// Functions that may be called.
    pub(super) names: Vec<String>,
    /// The schemas of their arguments, as far as they are known.
    pub(super) schemas: Arc<[Json]>,
    /// The function that is being called, by its number.
    pub(super) called: Option<usize>,
    pub(super) state: MarkedAnswerState,
    pub(super) held: String,
    pub(super) count: usize,
    /// True if any text has been given out.
    pub(super) texts: bool,
    /// True if the reasoning was left for a call, so that its end may still come.
    pub(super) left: bool,
    pub(super) cut_call: bool,
}

/// A marker of calls in what is held.
enum CallMarker {
    Found { at: usize, end: usize },
    Begun { at: usize },
}

impl MarkedParser {
    pub(super) fn new(syntax: &AnswerSyntax, names: Vec<String>, prompt: &str) -> MarkedParser {
        let reasons = syntax.reasoning.as_ref().is_some_and(|r| r.is_open_behind(prompt));
        let calls = syntax.calls.as_ref().filter(|_| !names.is_empty());
        MarkedParser {
            reasoning: syntax.reasoning.clone(),
            tags: calls.and_then(|calls| calls.tags.clone()),
            calls: calls.map(CallForm::from_syntax),
            names,
            schemas: Arc::default(),
            called: None,
            state: if reasons { MarkedAnswerState::Reasoning } else { MarkedAnswerState::Begin },
            held: String::new(),
            count: 0,
            texts: false,
            left: false,
            cut_call: false,
        }
    }

    pub(super) fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        self.held.push_str(piece);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    pub(super) fn finish(&mut self, cut: bool) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        // Text that is held there is the begin of an end.
        if matches!(self.state, MarkedAnswerState::Close(_))
            || self.left && matches!(self.state, MarkedAnswerState::Blank)
        {
            return parts;
        }
        let mut rest = std::mem::take(&mut self.held);
        if cut
            && matches!(
                self.state,
                MarkedAnswerState::Begin
                    | MarkedAnswerState::Reasoning
                    | MarkedAnswerState::Text
                    | MarkedAnswerState::Blank
            )
        {
            let markup = self.markup_at_end(&rest);
            self.cut_call = self.calls.is_some() && markup > 0;
            rest.truncate(rest.len() - markup);
        }
        self.cut_call |=
            cut && matches!(&self.state, MarkedAnswerState::Name { .. } | MarkedAnswerState::Object { .. });
        let text = |text: String| (!text.trim().is_empty()).then_some(AnswerPart::Text(text));
        let reason = |text: &str| {
            let text = text.trim_end();
            (!text.is_empty()).then(|| AnswerPart::Reasoning(text.to_owned()))
        };
        let part = match &self.state {
            MarkedAnswerState::Reasoning => reason(&rest),
            MarkedAnswerState::Text if self.calls.is_some() && cut => text(rest.trim_end().to_owned()),
            MarkedAnswerState::Text => (!rest.is_empty()).then_some(AnswerPart::Text(rest)),
            MarkedAnswerState::Begin | MarkedAnswerState::Blank => text(rest),
            MarkedAnswerState::Name { .. } => self.ended_name(&rest, cut, &mut parts).and_then(text),
            MarkedAnswerState::Object { object, .. } if object.told => None,
            MarkedAnswerState::Object { .. } | MarkedAnswerState::Arguments(_) if cut => None,
            MarkedAnswerState::Object { inside: true, .. } => reason(&rest),
            MarkedAnswerState::Object { .. } => text(rest),
            MarkedAnswerState::Arguments(value) if value.is_empty() => self.argument("{}"),
            MarkedAnswerState::Value(value) => {
                let text = self.tags.as_ref().map(|tags| value.cut(&rest, tags)).unwrap_or_default();
                self.argument(&text)
            }
            // Behind the last argument that came the call has ended.
            MarkedAnswerState::Tag { .. } | MarkedAnswerState::Key { .. } if !cut => self.argument("}"),
            // The begin of a marker that did not come.
            _ => None,
        };
        parts.extend(part);
        self.count += parts.iter().filter(|part| matches!(part, AnswerPart::Call { .. })).count();
        parts
    }

    /// Bytes at the end that are the begin of a marker.
    fn markup_at_end(&self, text: &str) -> usize {
        let reasoning = self.reasoning.as_ref().map(|reasoning| match self.state {
            MarkedAnswerState::Begin => reasoning.open.trim(),
            _ => reasoning.close.trim(),
        });
        let reasoning = reasoning
            .filter(|_| matches!(self.state, MarkedAnswerState::Begin | MarkedAnswerState::Reasoning));
        let calls = self.calls.iter().flat_map(|calls| &calls.markers).map(String::as_str);
        // A marker may have blanks inside, that the text does not have.
        let partial = |marker: &str| {
            let begins = |&at: &usize| matches(marker, &text[at..]) == Match::Partial;
            let first = marker.chars().next();
            let starts = text.char_indices().filter(|&(_, c)| Some(c) == first).map(|(at, _)| at);
            starts.into_iter().find(begins).map_or(0, |at| text.len() - at)
        };
        let longest = reasoning.into_iter().chain(calls).map(partial).max().unwrap_or(0);
        if text[text.len() - longest..].trim().len() < SHORTEST_MARKUP { 0 } else { longest }
    }

    /// A name behind a marker at the end of the answer: of a call without arguments, or no call.
    fn ended_name(&self, rest: &str, cut: bool, parts: &mut Vec<AnswerPart>) -> Option<String> {
        let (MarkedAnswerState::Name { end, .. }, false) = (&self.state, cut) else { return None };
        let name = rest[*end..].trim();
        if !self.names.iter().any(|known| known == name) {
            return Some(rest.to_owned());
        }
        parts.push(AnswerPart::Call { index: self.count, name: name.to_owned() });
        parts.push(AnswerPart::Arguments { index: self.count, text: "{}".into() });
        None
    }

    /// Looks at what is held; false when more has to come first.
    fn step(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        // Text that these have read so far is not copied.
        match &self.state {
            MarkedAnswerState::Object { .. } | MarkedAnswerState::Arguments(_) => {
                match std::mem::replace(&mut self.state, MarkedAnswerState::Blank) {
                    MarkedAnswerState::Object { end, inside, object } => {
                        return self.object(end, inside, object, parts);
                    }
                    MarkedAnswerState::Arguments(value) => return self.arguments(value, parts),
                    other => self.state = other,
                }
            }
            _ => {}
        }
        match self.state.clone() {
            MarkedAnswerState::Begin => self.begin(),
            MarkedAnswerState::Reasoning => self.reason(parts),
            MarkedAnswerState::Blank => self.blank(),
            MarkedAnswerState::Text => self.text(parts),
            MarkedAnswerState::Name { end, inside } => self.name(end, inside, parts),
            MarkedAnswerState::Object { .. } | MarkedAnswerState::Arguments(_) => false,
            MarkedAnswerState::Listed => self.listed(),
            MarkedAnswerState::Tag { first } => self.tag(first, parts),
            MarkedAnswerState::Key { first } => self.key(first, parts),
            MarkedAnswerState::Value(value) => self.value(value, parts),
            MarkedAnswerState::Close(next) => self.close(next),
        }
    }

    pub(super) fn enter_state(&mut self, state: MarkedAnswerState) -> bool {
        self.state = state;
        true
    }

    fn begin(&mut self) -> bool {
        let Some(open) = self.reasoning.as_ref().map(|r| r.open.trim().to_owned()) else {
            return self.enter_state(MarkedAnswerState::Text);
        };
        match matches(&open, &self.held) {
            Match::Partial => false,
            Match::Full(end) => {
                self.held.drain(..end);
                self.enter_state(MarkedAnswerState::Reasoning)
            }
            Match::No => self.enter_state(MarkedAnswerState::Text),
        }
    }

    fn reason(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        let close = self.reasoning.as_ref().map(|r| r.close.trim().to_owned()).unwrap_or_default();
        let closed = self.held.find(&close);
        let marker = self.marker(true).filter(|marker| match marker {
            CallMarker::Found { at, .. } => closed.is_none_or(|closed| *at < closed),
            CallMarker::Begun { .. } => closed.is_none(),
        });
        if let Some(CallMarker::Found { at, end }) = marker {
            let given = self.emit_reasoning(at, parts);
            return self.enter_state(MarkedAnswerState::Name { end: end - given, inside: true });
        }
        if let Some(at) = closed {
            self.emit_reasoning(at, parts);
            let at = self.held.find(&close).unwrap_or(0);
            self.held.drain(..at + close.len());
            return self.enter_state(MarkedAnswerState::Blank);
        }
        let mut safe = self.held.len() - open_end(&self.held, &close);
        if let Some(CallMarker::Begun { at }) = marker {
            safe = safe.min(at);
        }
        self.emit_reasoning(safe, parts);
        false
    }

    /// Gives out reasoning, but for the blanks at its end; their bytes that are no longer held.
    fn emit_reasoning(&mut self, end: usize, parts: &mut Vec<AnswerPart>) -> usize {
        let end = self.held[..end].trim_end().len();
        if end > 0 {
            let text = self.held.drain(..end).collect();
            parts.push(AnswerPart::Reasoning(self.without_begin(text)));
        }
        end
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
        self.texts = self.count > 0;
        let blanks = self.held.len() - self.held.trim_start().len();
        self.held.drain(..blanks);
        if self.left
            && let Some(close) = self.reasoning.as_ref().map(|r| r.close.trim())
        {
            match matches(close, &self.held) {
                Match::Partial => return false,
                Match::Full(end) => drop(self.held.drain(..end)),
                Match::No => return self.enter_state(MarkedAnswerState::Text),
            }
            self.left = false;
            return true;
        }
        !self.held.is_empty() && self.enter_state(MarkedAnswerState::Text)
    }

    /// The first marker of a call. In reasoning only those count that are no text.
    fn marker(&self, inside: bool) -> Option<CallMarker> {
        let calls = self.calls.as_ref()?;
        if calls.is_bare() {
            let at = self.held.len() - self.held.trim_start().len();
            let begins = !inside && !self.texts && self.held[at..].starts_with(['{', '[']);
            return begins.then_some(CallMarker::Found { at, end: at });
        }
        let firsts: Vec<char> = calls.markers.iter().filter_map(|marker| marker.chars().next()).collect();
        let begins = self.held.char_indices().filter(|(_, c)| firsts.contains(c)).map(|(at, _)| at);
        for at in begins {
            let found: Vec<Match> =
                calls.markers.iter().map(|marker| matches(marker, &self.held[at..])).collect();
            if let Some(end) =
                found.iter().find_map(|m| if let Match::Full(end) = m { Some(end) } else { None })
            {
                return Some(CallMarker::Found { at, end: at + end });
            }
            if found.contains(&Match::Partial) {
                return Some(CallMarker::Begun { at });
            }
        }
        None
    }

    fn text(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        if self.calls.is_none() {
            if !self.held.is_empty() {
                parts.push(AnswerPart::Text(std::mem::take(&mut self.held)));
                self.texts = true;
            }
            return false;
        }
        match self.marker(false) {
            Some(CallMarker::Found { at, end }) => {
                let all = self.held.len();
                self.emit_text(at, parts);
                let given = all - self.held.len();
                self.enter_state(MarkedAnswerState::Name { end: end - given, inside: false })
            }
            Some(CallMarker::Begun { at }) => {
                self.emit_text(at, parts);
                false
            }
            None => {
                self.emit_text(self.held.len(), parts);
                false
            }
        }
    }

    /// Gives out text; blanks at its end only when more text follows.
    fn emit_text(&mut self, end: usize, parts: &mut Vec<AnswerPart>) {
        let end = if self.calls.is_some() { self.held[..end].trim_end().len() } else { end };
        if end > 0 {
            self.texts = true;
            parts.push(AnswerPart::Text(self.held.drain(..end).collect()));
        }
    }

    /// Ends a possible call that is none: its marker, of `end` bytes, is text.
    pub(super) fn no_call(&mut self, end: usize, inside: bool, parts: &mut Vec<AnswerPart>) -> bool {
        self.texts = true;
        let marker: String = self.held.drain(..end).collect();
        if inside {
            parts.push(AnswerPart::Reasoning(marker));
            return self.enter_state(MarkedAnswerState::Reasoning);
        }
        parts.push(AnswerPart::Text(marker));
        self.enter_state(MarkedAnswerState::Text)
    }
}

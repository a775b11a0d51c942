//! Calls in an answer between markers: their names, and arguments that are JSON.

use super::AnswerPart;
use super::form::CallForm;
use super::marked::{MarkedAnswerState, MarkedParser};
use super::marker::{Match, matches};
use super::object::{CallObject, JsonValue, ObjectProgress};

/// Longest name of a function.
pub(super) const LONGEST_NAME: usize = 256;

impl MarkedParser {
    /// True for the name of a function that may be called. One that is not known counts where the form leaves
    /// no doubt.
    fn is_callable(&self, name: &str, doubtful: bool) -> bool {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        let valid = !name.is_empty() && name.len() <= LONGEST_NAME && name.chars().all(plain);
        self.names.iter().any(|known| known == name) || valid && !doubtful
    }

    /// A call begins.
    fn begin_call(&mut self, name: String, inside: bool, parts: &mut Vec<AnswerPart>) {
        let index = self.count;
        self.count += 1;
        self.called = self.names.iter().position(|known| *known == name);
        self.texts = true;
        self.left |= inside;
        parts.push(AnswerPart::Call { index, name });
    }

    pub(super) fn name(&mut self, begin: usize, inside: bool, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(calls) = self.calls.clone() else { return self.no_call(begin, inside, parts) };
        if let Some(keys) = calls.keys {
            let object = Box::new(CallObject::new(keys, begin));
            return self.enter_state(MarkedAnswerState::Object { end: begin, inside, object });
        }
        let rest = &self.held[begin..];
        let blanks = rest.len() - rest.trim_start().len();
        let rest = &rest[blanks..];
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || "_-.".contains(c)));
        let Some(end) = end.filter(|&end| end > 0) else {
            let none = rest.len() > LONGEST_NAME || end == Some(0);
            return none && self.no_call(begin, inside, parts);
        };
        let name = rest[..end].to_owned();
        if !self.is_callable(&name, inside || calls.middle.trim().is_empty()) {
            return self.no_call(begin, inside, parts);
        }
        let behind = &rest[end..];
        let brace = if self.tags.is_some() { "" } else { "{" };
        let text = matches(&format!("{}\"", calls.middle), behind);
        let length = match (matches(&format!("{}{brace}", calls.middle), behind), text) {
            (Match::Full(length), _) => length - brace.len(),
            (_, Match::Full(length)) if self.tags.is_none() => length - 1,
            (Match::No, _) => return self.without_arguments(begin, blanks + end, inside, name, parts),
            (Match::Partial, _) => return false,
        };
        self.held.drain(..begin + blanks + end + length);
        self.begin_call(name, inside, parts);
        if self.tags.is_none() {
            return self.enter_state(MarkedAnswerState::Arguments(Box::default()));
        }
        self.emit_arguments(parts, "{");
        self.enter_state(MarkedAnswerState::Tag { first: true })
    }

    /// No arguments begin behind the name: the call has none, if it ends there.
    fn without_arguments(
        &mut self,
        begin: usize,
        name_end: usize,
        inside: bool,
        name: String,
        parts: &mut Vec<AnswerPart>,
    ) -> bool {
        let closes = self.calls.iter().flat_map(|calls| calls.closes.first());
        let ended: Vec<Match> = closes.map(|close| matches(close, &self.held[begin + name_end..])).collect();
        match ended.first() {
            Some(Match::Partial) => false,
            Some(Match::Full(_)) => {
                self.held.drain(..begin + name_end);
                self.begin_call(name, inside, parts);
                self.emit_arguments(parts, "{}");
                self.enter_state(MarkedAnswerState::Close(0))
            }
            _ => self.no_call(begin, inside, parts),
        }
    }

    pub(super) fn object(
        &mut self,
        end: usize,
        inside: bool,
        mut object: Box<CallObject>,
        parts: &mut Vec<AnswerPart>,
    ) -> bool {
        let progress = object.push(&self.held);
        if !object.told && object.is_call() {
            let name = object.name.clone().unwrap_or_default();
            let bare = self.calls.as_ref().is_some_and(CallForm::is_bare);
            if !self.is_callable(&name, inside || bare) {
                return self.no_call(end, inside, parts);
            }
            object.told = true;
            self.begin_call(name, inside, parts);
        }
        if object.told {
            self.held.drain(..object.read);
            object.read = 0;
            let arguments = object.take_arguments();
            object.argued |= !arguments.is_empty();
            self.emit_arguments(parts, arguments);
        }
        match progress {
            ObjectProgress::More => {
                self.state = MarkedAnswerState::Object { end, inside, object };
                false
            }
            // A later one of a list that is none ends the list.
            ObjectProgress::Broken | ObjectProgress::End if !object.told && object.follows => {
                self.enter_state(MarkedAnswerState::Close(0))
            }
            ObjectProgress::Broken | ObjectProgress::End if !object.told => self.no_call(end, inside, parts),
            ObjectProgress::Broken | ObjectProgress::End => {
                if !object.argued {
                    self.emit_arguments(parts, "{}");
                }
                let listed = object.listed && progress == ObjectProgress::End;
                self.enter_state(if listed { MarkedAnswerState::Listed } else { MarkedAnswerState::Close(0) })
            }
        }
    }

    pub(super) fn listed(&mut self) -> bool {
        let blanks = self.held.len() - self.held.trim_start().len();
        self.held.drain(..blanks);
        match self.held.chars().next() {
            None => false,
            Some(',') => {
                self.held.drain(..1);
                let Some(keys) = self.calls.as_ref().and_then(|calls| calls.keys.clone()) else {
                    return self.enter_state(MarkedAnswerState::Close(0));
                };
                let object = Box::new(CallObject::following(keys));
                self.enter_state(MarkedAnswerState::Object { end: 0, inside: false, object })
            }
            Some(']') => {
                self.held.drain(..1);
                self.enter_state(MarkedAnswerState::Close(0))
            }
            Some(_) => self.enter_state(MarkedAnswerState::Close(0)),
        }
    }

    /// A part of the arguments of the call.
    pub(super) fn argument(&self, text: &str) -> Option<AnswerPart> {
        let index = self.count.checked_sub(1)?;
        (!text.is_empty()).then(|| AnswerPart::Arguments { index, text: text.to_owned() })
    }

    pub(super) fn emit_arguments(&self, parts: &mut Vec<AnswerPart>, text: impl AsRef<str>) {
        parts.extend(self.argument(text.as_ref()));
    }

    /// Reads the part of a JSON object that is there.
    pub(super) fn arguments(&mut self, mut value: Box<JsonValue>, parts: &mut Vec<AnswerPart>) -> bool {
        let mut read = 0;
        while let Some(c) = self.held[read..].chars().next().filter(|_| !value.has_ended()) {
            if value.is_empty() && c.is_whitespace() || value.push(c) {
                read += c.len_utf8();
            }
        }
        self.held.drain(..read);
        self.emit_arguments(parts, value.take_arguments());
        if value.has_ended() {
            return self.enter_state(MarkedAnswerState::Close(0));
        }
        self.state = MarkedAnswerState::Arguments(value);
        false
    }

    pub(super) fn close(&mut self, next: usize) -> bool {
        let Some(calls) = &self.calls else { return self.enter_state(MarkedAnswerState::Blank) };
        for (at, piece) in calls.closes.iter().enumerate().skip(next) {
            match matches(piece, &self.held) {
                Match::Partial => return false,
                Match::Full(end) => {
                    self.held.drain(..end);
                    return self.enter_state(MarkedAnswerState::Close(at + 1));
                }
                Match::No => {}
            }
        }
        if !calls.between.is_empty() {
            match matches(&calls.between, &self.held) {
                Match::Partial => return false,
                Match::Full(end) => drop(self.held.drain(..end)),
                Match::No => {}
            }
        }
        self.enter_state(MarkedAnswerState::Blank)
    }
}

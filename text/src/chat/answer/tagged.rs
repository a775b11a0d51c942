//! Arguments in tags, as they come.

use serde_json::Value as Json;

use super::AnswerPart;
use super::calls::LONGEST_NAME;
use super::marked::{MarkedAnswerState, MarkedParser};
use super::marker::{Match, matches};
use crate::chat::tags::{TagValue, ValueKind};

impl MarkedParser {
    pub(super) fn tag(&mut self, first: bool, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(tags) = self.tags.clone() else { return self.enter_state(MarkedAnswerState::Close(0)) };
        if self.held.trim().is_empty() {
            return false;
        }
        let open = if first { tags.open } else { format!("{}{}", tags.between, tags.open) };
        match matches(&open, &self.held) {
            Match::Partial => return false,
            Match::Full(end) => {
                self.held.drain(..end);
                return self.enter_state(MarkedAnswerState::Key { first });
            }
            Match::No => {}
        }
        // Whatever comes here is no argument.
        self.emit_arguments(parts, "}");
        self.enter_state(MarkedAnswerState::Close(0))
    }

    pub(super) fn key(&mut self, first: bool, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(tags) = self.tags.clone() else { return self.enter_state(MarkedAnswerState::Close(0)) };
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
                let kind = match self.called.and_then(|called| self.schemas.get(called)) {
                    Some(schema) => ValueKind::of_argument(schema, &name),
                    None => ValueKind::Json,
                };
                let comma = if first { "" } else { ", " };
                self.emit_arguments(parts, format!("{comma}{}: ", Json::from(name)));
                self.enter_state(MarkedAnswerState::Value(TagValue::new(kind)))
            }
        }
    }

    /// Ends the arguments where the begin of one goes on as none.
    fn broken(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        self.emit_arguments(parts, "}");
        self.enter_state(MarkedAnswerState::Blank)
    }

    pub(super) fn value(&mut self, mut value: TagValue, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(tags) = self.tags.clone() else { return self.enter_state(MarkedAnswerState::Close(0)) };
        let (text, ended) = value.take(&mut self.held, &tags);
        self.emit_arguments(parts, text);
        if ended {
            return self.enter_state(MarkedAnswerState::Tag { first: false });
        }
        self.state = MarkedAnswerState::Value(value);
        false
    }
}

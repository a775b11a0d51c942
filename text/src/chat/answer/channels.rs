//! Answers in channels: a sequence of messages, each with a head that tells its kind.

use super::AnswerPart;
use crate::chat::channels::{ChannelSyntax, MessageKind};

/// Longest head of a message.
const LONGEST_HEAD: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChannelPosition {
    /// A head; `first` if nothing marks its begin, so that a text without one is possible.
    Head {
        first: bool,
    },
    Body(MessageKind),
    /// Behind a message.
    Between,
}

/// Takes an answer in channels apart.
#[derive(Debug, Clone)]
pub(super) struct ChannelParser {
    syntax: ChannelSyntax,
    names: Vec<String>,
    held: String,
    place: ChannelPosition,
    /// True if the message has given out anything.
    begun: bool,
    /// Kinds of messages of which something was given out.
    told: Vec<MessageKind>,
    pub calls: usize,
    /// True if the answer was cut in the head of a call.
    pub cut_call: bool,
}

impl ChannelParser {
    pub fn new(syntax: &ChannelSyntax, names: Vec<String>, prompt: &str) -> ChannelParser {
        let mut parser = ChannelParser {
            syntax: syntax.clone(),
            names,
            held: String::new(),
            place: ChannelPosition::Head { first: true },
            begun: false,
            told: Vec::new(),
            calls: 0,
            cut_call: false,
        };
        // The prompt may have started a message: its part of it is no part of the answer.
        parser.push(syntax.started_answer(prompt));
        parser.held.clear();
        parser.calls = 0;
        parser.told.clear();
        if parser.place == ChannelPosition::Body(MessageKind::Call) {
            parser.place = ChannelPosition::Body(MessageKind::Text);
        }
        parser
    }

    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        self.held.push_str(piece);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// The answer has ended, or was cut.
    pub fn finish(&mut self, cut: bool) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        let rest = std::mem::take(&mut self.held);
        let in_head = matches!(self.place, ChannelPosition::Head { .. });
        self.cut_call = cut && in_head && !self.names.is_empty() && rest.contains(&self.syntax.recipient);
        match self.place {
            ChannelPosition::Body(kind) => {
                let open = if cut { self.syntax.open_marker(&rest) } else { 0 };
                self.emit_part(kind, rest[..rest.len() - open].trim_end(), &mut parts);
                self.end(kind, &mut parts, cut);
            }
            ChannelPosition::Head { first: true } if !self.is_markup(rest.trim(), cut) => {
                self.emit_part(MessageKind::Text, rest.trim(), &mut parts);
            }
            ChannelPosition::Head { .. } | ChannelPosition::Between => {}
        }
        parts
    }

    fn step(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        match self.place {
            ChannelPosition::Head { first } => self.head(first, parts),
            ChannelPosition::Body(kind) => self.body(kind, parts),
            ChannelPosition::Between => self.between(),
        }
    }

    fn head(&mut self, first: bool, parts: &mut Vec<AnswerPart>) -> bool {
        let Some(end) = self.held.find(&self.syntax.message) else {
            let plain = first && !self.syntax.may_be_head(&self.held) || self.held.len() > LONGEST_HEAD;
            if plain {
                self.place = ChannelPosition::Body(MessageKind::Text);
            }
            return plain;
        };
        let head = self.held[..end].to_owned();
        if first && !self.syntax.may_be_head(&self.held) {
            self.place = ChannelPosition::Body(MessageKind::Text);
            return true;
        }
        self.held.drain(..end + self.syntax.message.len());
        let (kind, name) = self.kind(&head, first);
        self.begun = false;
        self.place = ChannelPosition::Body(kind);
        if let Some(name) = name {
            parts.push(AnswerPart::Call { index: self.calls, name });
            self.calls += 1;
        }
        true
    }

    /// True if the text is the begin of a head.
    fn is_markup(&self, text: &str, cut: bool) -> bool {
        let ChannelSyntax { channel, recipient, .. } = &self.syntax;
        let begins = text.starts_with(channel.as_str()) || text.starts_with(recipient.as_str());
        begins || cut && text.len() > 1 && channel.starts_with(text)
    }

    /// The kind of a message, with the name of the function that it calls.
    fn kind(&self, head: &str, first: bool) -> (MessageKind, Option<String>) {
        match self.syntax.read_head(head, first) {
            // Without functions to call, a call of the model is a text.
            (MessageKind::Call, _) if self.names.is_empty() => (MessageKind::Text, None),
            found => found,
        }
    }

    fn body(&mut self, kind: MessageKind, parts: &mut Vec<AnswerPart>) -> bool {
        if let Some((at, end, next)) = self.syntax.message_end(&self.held) {
            let text = self.held[..at].trim_end().to_owned();
            self.held.drain(..end);
            self.emit_part(kind, &text, parts);
            self.end(kind, parts, false);
            self.place = match next {
                Some(has_role) => ChannelPosition::Head { first: !has_role },
                None => ChannelPosition::Between,
            };
            return true;
        }
        let safe = self.held.len() - self.syntax.open_marker(&self.held);
        let safe = self.held[..safe].trim_end().len();
        if safe > 0 {
            let text: String = self.held.drain(..safe).collect();
            self.emit_part(kind, &text, parts);
        }
        false
    }

    /// Gives out a part of a message.
    fn emit_part(&mut self, kind: MessageKind, text: &str, parts: &mut Vec<AnswerPart>) {
        let text = if self.begun { text } else { text.trim_start() };
        if text.is_empty() || kind == MessageKind::Foreign {
            return;
        }
        // Messages of one kind are separate.
        let apart = if !self.begun && self.told.contains(&kind) { "\n" } else { "" };
        self.begun = true;
        parts.push(match kind {
            MessageKind::Thoughts => AnswerPart::Reasoning(format!("{apart}{text}")),
            MessageKind::Text | MessageKind::Foreign => AnswerPart::Text(format!("{apart}{text}")),
            MessageKind::Call => AnswerPart::Arguments { index: self.calls - 1, text: text.to_owned() },
        });
        if kind != MessageKind::Call && !self.told.contains(&kind) {
            self.told.push(kind);
        }
    }

    /// A message has ended: a call without arguments has none.
    fn end(&mut self, kind: MessageKind, parts: &mut Vec<AnswerPart>, cut: bool) {
        if kind == MessageKind::Call && !self.begun && !cut {
            parts.push(AnswerPart::Arguments { index: self.calls - 1, text: "{}".into() });
        }
    }

    fn between(&mut self) -> bool {
        let blanks = self.held.len() - self.held.trim_start().len();
        self.held.drain(..blanks);
        let syntax = &self.syntax;
        if self.held.starts_with(&syntax.start) {
            self.held.drain(..syntax.start.len());
            self.place = ChannelPosition::Head { first: false };
            return true;
        }
        if let Some(end) = syntax.ends.iter().find(|end| self.held.starts_with(end.as_str())) {
            self.held.drain(..end.len());
            return true;
        }
        let mut marks = syntax.ends.iter().chain([&syntax.start, &syntax.channel]);
        let partial = marks.any(|mark| mark.starts_with(&self.held));
        if self.held.is_empty() || partial && !self.held.starts_with(&syntax.channel) {
            return false;
        }
        self.begun = false;
        self.place = ChannelPosition::Head { first: true };
        true
    }
}

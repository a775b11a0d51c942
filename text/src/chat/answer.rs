//! An answer as it comes, taken apart into reasoning, text and calls.

mod calls;
mod channels;
mod form;
mod marked;
mod marker;
mod object;
mod tagged;

use serde_json::Value as Json;

use super::syntax::AnswerSyntax;
use channels::ChannelParser;
use marked::MarkedParser;
pub(super) use marker::{Match, matches};

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

/// Takes an answer apart. Text that may become a marker is held back until it is known.
#[derive(Debug, Clone)]
pub struct AnswerParser {
    /// Most calls; later ones are dropped.
    most: usize,
    kind: ParserKind,
    /// True if the answer was cut in the begin of a call.
    cut_call: bool,
}

#[derive(Debug, Clone)]
enum ParserKind {
    Marked(Box<MarkedParser>),
    Channels(Box<ChannelParser>),
}

impl AnswerParser {
    /// `names`: functions that may be called; `prompt`: what the answer goes on from.
    pub fn new(syntax: &AnswerSyntax, names: Vec<String>, most_calls: usize, prompt: &str) -> AnswerParser {
        let kind = match &syntax.channels {
            Some(channels) => ParserKind::Channels(Box::new(ChannelParser::new(channels, names, prompt))),
            None => ParserKind::Marked(Box::new(MarkedParser::new(syntax, names, prompt))),
        };
        AnswerParser { most: most_calls, kind, cut_call: false }
    }

    /// Adds the schemas of the arguments, in the order of the names: they decide whether a value in tags is a
    /// text or JSON.
    pub fn with_schemas(mut self, schemas: Vec<Json>) -> AnswerParser {
        if let ParserKind::Marked(parser) = &mut self.kind {
            // Each choice of an answer has a copy of the parser.
            parser.schemas = schemas.into();
        }
        self
    }

    /// Calls so far.
    pub fn calls(&self) -> usize {
        let count = match &self.kind {
            ParserKind::Marked(parser) => parser.count,
            ParserKind::Channels(parser) => parser.calls,
        };
        count.min(self.most)
    }

    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        let parts = match &mut self.kind {
            ParserKind::Marked(parser) => parser.push(piece),
            ParserKind::Channels(parser) => parser.push(piece),
        };
        self.kept(parts)
    }

    /// True if the answer was cut in the begin of a call, which was not reported.
    pub fn was_cut_in_call(&self) -> bool {
        self.cut_call
    }

    /// Ends the answer: text that was held back is final. Where it was `cut`, by its length as a rule, the
    /// begin of a marker or of a call is no text.
    pub fn finish(&mut self, cut: bool) -> Vec<AnswerPart> {
        let parts = match &mut self.kind {
            ParserKind::Marked(parser) => {
                let parts = parser.finish(cut);
                self.cut_call = parser.cut_call;
                parts
            }
            ParserKind::Channels(parser) => {
                let parts = parser.finish(cut);
                self.cut_call = parser.cut_call;
                parts
            }
        };
        self.kept(parts)
    }

    fn kept(&self, mut parts: Vec<AnswerPart>) -> Vec<AnswerPart> {
        parts.retain(|part| match part {
            AnswerPart::Call { index, .. } => *index < self.most,
            AnswerPart::Arguments { index, text } => *index < self.most && !text.is_empty(),
            AnswerPart::Text(text) | AnswerPart::Reasoning(text) => !text.is_empty(),
        });
        parts
    }
}

#[cfg(test)]
mod tests;

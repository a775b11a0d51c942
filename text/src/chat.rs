//! Chat templates: messages to the text that a chat model was trained on.
//!
//! A template is either the checkpoint's own Jinja text, rendered as the `transformers` library renders it,
//! or one of the [`BuiltinFormat`]s of models that were published without one. [`ChatSource`] collects what a
//! checkpoint's files say and packs it into the artifact's chat section; [`ChatTemplate`] is made from that
//! section and renders.
//!
//! [`AnswerSyntax`] is how a model calls tools and reasons, found from its template; [`AnswerParser`] takes
//! answers apart by it.
//!
//! Templates are foreign programs: they run with bounded steps, time, memory, depth and output, cannot reach
//! files, and what they raise becomes an error that carries their message. A [`TemplateHost`] gives stacks
//! and clocks.

mod accepted_messages;
mod answer;
mod builtin;
mod call_grammar;
mod channels;
mod guard;
mod host;
mod jinja;
mod message;
mod named_templates;
mod python;
mod reranker_templates;
mod source;
mod strftime;
mod syntax;
mod tags;
mod value_kinds;

pub use answer::{AnswerParser, AnswerPart};
pub use builtin::BuiltinFormat;
pub use call_grammar::{AnswerGrammar, CallGrammar};
pub use channels::ChannelSyntax;
pub use guard::StopGuard;
#[cfg(test)]
pub(crate) use host::CallerHost;
pub use host::{StackError, TemplateHost};
pub use message::{ChatMessage, MessageContent, TemplateValue};
pub use source::{ChatFiles, ChatSource};
pub use strftime::strftime;
pub use syntax::{AnswerSyntax, CallSyntax, ReasoningSyntax};
pub use tags::TagSyntax;

use accepted_messages::AcceptedMessages;
use jinja::JinjaTemplates;
use std::collections::BTreeMap;
use std::sync::OnceLock;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum ChatError {
    #[error("the chat section of the artifact cannot be read: {reason}. Build the artifact again.")]
    Section { reason: String },
    #[error(
        "{file} is not as expected: {reason}. Correct it, or remove it to build without a chat template."
    )]
    File { file: String, reason: String },
    #[error("the chat template `{template}` is not a valid template: {reason}")]
    Syntax { template: String, reason: String },
    #[error(
        "cannot start a thread for the chat template, which needs a stack of {mebibytes} MiB: {source}. Allow more \
         memory (`ulimit -v`) or threads (`ulimit -u`)."
    )]
    NoThread { mebibytes: usize, source: std::io::Error },
    #[error(
        "the chat template `{template}` failed: {reason}. Correct it, or use another one (mlcc chat --template)."
    )]
    Render { template: String, reason: String },
    #[error("the chat template refuses these messages: {message}")]
    Raised { message: String },
    #[error(
        "the chat template `{template}` ran for more than {steps} steps without finishing; it loops, or the \
         conversation is too long"
    )]
    TooManySteps { template: String, steps: u64 },
    #[error("the chat template `{template}` made more than {bytes} bytes of text from one conversation")]
    TooLong { template: String, bytes: u64 },
    #[error(
        "the chat template `{template}` needs more than {bytes} bytes of memory for its values; it grows without \
         limit, or the conversation is too long"
    )]
    TooMuchMemory { template: String, bytes: u64 },
    #[error(
        "the chat template `{template}` ran for more than {milliseconds} ms; it loops, or the conversation is too long"
    )]
    TooSlow { template: String, milliseconds: u64 },
    #[error(
        "the chat template `{template}`, or a value passed to it, nests lists and mappings more than {levels} levels \
         deep"
    )]
    TooDeep { template: String, levels: usize },
    #[error("message {index} contains {kind}, but this model reads only text. Send only the text.")]
    NotText { index: usize, kind: String },
    #[error("message {index} has role `{role}`, but the chat format {format} supports {known}")]
    Role { index: usize, role: String, format: &'static str, known: &'static str },
    #[error(
        "the chat template drops messages with the role `{role}` of message {index}: send its text in a role that the \
         template supports"
    )]
    RoleDropped { index: usize, role: String },
    #[error("unknown chat format `{found}`; the built-in formats are {known}")]
    UnknownFormat { found: String, known: String },
}

/// Inputs of a template besides the messages.
#[derive(Debug, Clone, Default)]
pub struct TemplateInputs {
    /// Descriptions of functions that the model may call, as the chat API takes them.
    pub tools: Option<TemplateValue>,
    /// Texts for retrieval-augmented answers.
    pub documents: Option<TemplateValue>,
    /// Further variables of the template (`enable_thinking`, ...); they win over the special tokens' names.
    pub variables: BTreeMap<String, TemplateValue>,
    /// Seconds since 1970 that `strftime_now` formats as they are; `None`: now, in local time.
    pub now: Option<u64>,
}

/// A chat template, ready to render.
#[derive(Debug)]
pub struct ChatTemplate {
    format: TemplateKind,
    /// The messages that it takes, without and with tools; found at the first use.
    accepted: [OnceLock<AcceptedMessages>; 2],
}

#[derive(Debug)]
enum TemplateKind {
    Jinja(Box<JinjaTemplates>),
    Builtin(BuiltinFormat),
}

impl ChatTemplate {
    /// Reads the content of an artifact's chat section.
    pub fn from_section(section: &[u8], host: &'static dyn TemplateHost) -> Result<ChatTemplate, ChatError> {
        ChatSource::from_section(section)?.compile(host)
    }

    /// One Jinja template without special tokens, for example from a user's file.
    pub fn from_jinja(text: &str, host: &'static dyn TemplateHost) -> Result<ChatTemplate, ChatError> {
        ChatSource::jinja(text).compile(host)
    }

    pub fn builtin(format: BuiltinFormat) -> ChatTemplate {
        ChatTemplate::new(TemplateKind::Builtin(format))
    }

    fn new(format: TemplateKind) -> ChatTemplate {
        ChatTemplate { format, accepted: Default::default() }
    }

    /// The prompt of a conversation. `add_generation_prompt` ends it where the assistant's next answer
    /// begins.
    ///
    /// The text contains the names of control tokens; how to encode it says
    /// [`ChatTemplate::wants_prompt_template`].
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        extra: &TemplateInputs,
    ) -> Result<String, ChatError> {
        message::check_text(messages)?;
        match &self.format {
            TemplateKind::Jinja(templates) => templates.render(messages, add_generation_prompt, extra),
            TemplateKind::Builtin(format) => format.render(messages, add_generation_prompt),
        }
    }

    /// True if the rendered text still needs what the tokenizer puts around a prompt
    /// ([`crate::Tokenizer::encode_prompt`]); a Jinja template writes its begin token itself
    /// ([`crate::Tokenizer::encode`]).
    pub fn wants_prompt_template(&self) -> bool {
        match &self.format {
            TemplateKind::Jinja(_) => false,
            TemplateKind::Builtin(format) => format.wants_prompt_template(),
        }
    }

    /// Texts that end an answer although the model has no token for them.
    pub fn stop_texts(&self) -> &'static [&'static str] {
        match &self.format {
            TemplateKind::Jinja(_) => &[],
            TemplateKind::Builtin(format) => format.stop_texts(),
        }
    }

    /// True if the template reads a variable, for example `tools` or `enable_thinking`.
    pub fn uses_variable(&self, variable: &str) -> bool {
        match &self.format {
            TemplateKind::Jinja(templates) => templates.uses(variable),
            TemplateKind::Builtin(_) => false,
        }
    }

    /// The messages in the form that the template takes: instructions as one message at the begin, or in
    /// front of the user's first text where the template has no role for them, and contents as texts or as
    /// parts. A message of a role that the template drops is an error.
    pub fn adapt_messages(
        &self,
        messages: &[ChatMessage],
        extra: &TemplateInputs,
    ) -> Result<Vec<ChatMessage>, ChatError> {
        let accepted = &self.accepted[usize::from(extra.tools.is_some())];
        let accepted = match accepted.get() {
            Some(known) => *known,
            None => {
                let found = AcceptedMessages::from_template(self, extra.tools.is_some())?;
                *accepted.get_or_init(|| found)
            }
        };
        accepted.adapt_messages(self, messages, extra)
    }

    /// The prompt of messages that are [adapted](Self::adapt_messages) first.
    pub fn render_adapted(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        extra: &TemplateInputs,
    ) -> Result<String, ChatError> {
        self.render(&self.adapt_messages(messages, extra)?, add_generation_prompt, extra)
    }

    /// The Jinja text, without tools if there is one of its own for them; `None` of a built-in format.
    pub fn jinja_text(&self) -> Option<&str> {
        match &self.format {
            TemplateKind::Jinja(templates) => templates.text(),
            TemplateKind::Builtin(_) => None,
        }
    }

    /// True if the template has a word as an attribute or as a constant text.
    fn has_word(&self, word: &str, extra: &TemplateInputs) -> bool {
        match &self.format {
            TemplateKind::Jinja(templates) => templates.has_word(word, extra),
            TemplateKind::Builtin(_) => false,
        }
    }
}

//! A conversation: messages in, answers out, over one context that is read only once.
//!
//! Every turn renders the whole conversation by the chat template, but computes only the tokens that the
//! context lacks:
//! * a model with caches keeps the longest common prefix of the tokens and drops the rest of its rows;
//! * a recurrent model cannot drop tokens. Its context goes on where its text is the begin of the new text;
//!   else it goes back to the state that was kept at the begin of a turn, and as a last resort to the empty
//!   one;
//! * a prefix language model (ChatGLM-6B), whose tokens see later ones of the prompt, reads everything again.

mod file;

use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;

use mlcc_text::chat::{AnswerGrammar, AnswerSyntax, TemplateInputs};
use mlcc_text::tokenizer::TokenizerError;
use mlcc_text::{
    ChatError, ChatMessage, ChatTemplate, Grammar, GrammarError, GrammarSpec, SpecialTokens, TokenId,
    Tokenizer,
};
use thiserror::Error;

use crate::generate::{
    FinishReason, GenerateError, GenerationRequest, GenerationResult, RewindModel, TextGenerator,
};
use crate::grammar_compiler::GrammarCompiler;
use crate::sampler::SamplingParams;
use crate::speculate::Drafter;

pub use file::{FileError, RestoredContext};

/// States of past turns that are kept for models that cannot drop tokens.
const CHECKPOINTS: usize = 8;

/// The format that makes a text of messages.
#[derive(Debug)]
pub enum ChatFormat {
    Template(Box<ChatTemplate>),
    /// The texts of all messages in order, as a model that was not trained to chat continues them.
    Plain,
}

impl ChatFormat {
    /// The messages as text; with `answer` it ends where the next answer begins. Roles and contents become
    /// what the template takes.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        answer: bool,
        extra: &TemplateInputs,
    ) -> Result<String, ChatError> {
        match self {
            ChatFormat::Template(template) => template.render_adapted(messages, answer, extra),
            ChatFormat::Plain => Ok(messages.iter().map(ChatMessage::text).collect()),
        }
    }

    /// The tokens of a whole rendered conversation.
    pub fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Result<Vec<TokenId>, TokenizerError> {
        let with_begin = match self {
            ChatFormat::Template(template) => template.wants_prompt_template(),
            ChatFormat::Plain => true,
        };
        if with_begin { tokenizer.encode_prompt(text) } else { tokenizer.encode(text) }
    }

    /// Tokens with which the template ends an answer.
    pub fn end_tokens(&self, tokenizer: &Tokenizer) -> Vec<TokenId> {
        match self {
            ChatFormat::Template(template) => end_tokens(template, tokenizer),
            ChatFormat::Plain => Vec::new(),
        }
    }

    /// The parts that an answer may have besides its text.
    pub fn answer_syntax(&self) -> AnswerSyntax {
        match self {
            ChatFormat::Template(template) => AnswerSyntax::from_template(template),
            ChatFormat::Plain => AnswerSyntax::default(),
        }
    }

    /// The Jinja text of the template, if it is one.
    pub fn jinja_text(&self) -> Option<&str> {
        match self {
            ChatFormat::Template(template) => template.jinja_text(),
            ChatFormat::Plain => None,
        }
    }

    /// True if the template reads a variable.
    pub fn uses(&self, variable: &str) -> bool {
        match self {
            ChatFormat::Template(template) => template.uses_variable(variable),
            ChatFormat::Plain => false,
        }
    }

    /// The grammar of an answer of this form that goes on from `prompt`; reasoning comes before it.
    pub fn answer_grammar(
        &self,
        tokenizer: &Tokenizer,
        form: AnswerForm<'_>,
        prompt: &str,
    ) -> Result<Grammar, GrammarError> {
        let syntax = self.answer_syntax();
        let text = Some(form.grammar.clone());
        let spec = AnswerGrammar { syntax: &syntax, prompt, calls: None, text }.spec(tokenizer);
        form.compiler.compile(&spec.map_err(|reason| GrammarError::Invalid { reason })?)
    }

    /// Texts that end an answer although the model has no token for them.
    pub fn stop_texts(&self) -> &'static [&'static str] {
        match self {
            ChatFormat::Template(template) => template.stop_texts(),
            ChatFormat::Plain => &[],
        }
    }
}

#[derive(Debug, Error)]
pub enum ConversationError {
    #[error(transparent)]
    Chat(#[from] ChatError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(transparent)]
    Generate(#[from] GenerateError),
    #[error("there is no answer to regenerate: send a message first")]
    NothingToRegenerate,
}

/// Settings of one answer.
#[derive(Debug, Clone, Copy)]
pub struct AnswerSettings<'a> {
    pub sampling: &'a SamplingParams,
    /// `None`: until something else ends the answer.
    pub max_tokens: Option<usize>,
    /// Tokens that end an answer, in addition to those of the template.
    pub eos: &'a [TokenId],
    /// Texts that end an answer, in addition to those of the template.
    pub stop: &'a [String],
    /// The form of an answer, behind its reasoning.
    pub form: Option<AnswerForm<'a>>,
    pub cancel: Option<&'a AtomicBool>,
}

/// The form of the answers of a conversation.
#[derive(Debug, Clone, Copy)]
pub struct AnswerForm<'a> {
    pub grammar: &'a GrammarSpec,
    /// The compiler for the model's vocabulary.
    pub compiler: &'a GrammarCompiler,
}

/// The result of a turn.
#[derive(Debug, Clone)]
pub struct TurnResult {
    pub generation: GenerationResult,
    /// Tokens of the conversation before the answer.
    pub prompt_tokens: usize,
    /// Those of them that were in the context already.
    pub reused_tokens: usize,
}

pub struct Conversation<M: RewindModel> {
    generator: TextGenerator<M>,
    format: ChatFormat,
    /// Tokens with which the template ends an answer.
    end_tokens: Vec<TokenId>,
    messages: Vec<ChatMessage>,
    /// The text of the context's tokens; `None` when it is not known exactly.
    context_text: Option<String>,
    /// Oldest first; only for models that cannot drop tokens.
    checkpoints: Vec<ContextCheckpoint<M::Snapshot>>,
    /// Tokens that were in the context when the last turn began.
    turn_start: usize,
}

/// The state at the begin of a turn.
struct ContextCheckpoint<S> {
    snapshot: S,
    fed: usize,
    text: String,
}

impl<M: RewindModel> Conversation<M> {
    /// `model` has an empty context. `system` is the first message, where the template knows one.
    pub fn new(model: M, format: ChatFormat, system: Option<&str>, tokenizer: &Tokenizer) -> Self {
        let end_tokens = format.end_tokens(tokenizer);
        Conversation {
            generator: TextGenerator::new(model),
            format,
            end_tokens,
            messages: system.map(|text| ChatMessage::new("system", text)).into_iter().collect(),
            context_text: Some(String::new()),
            checkpoints: Vec::new(),
            turn_start: 0,
        }
    }

    /// Lets answers be drafted, if the model can take drafts back. They stay the same.
    pub fn draft_with(&mut self, drafter: Box<dyn Drafter>) {
        self.generator.draft_with(drafter);
    }

    pub fn messages(&self) -> &[ChatMessage] {
        &self.messages
    }

    pub fn model(&self) -> &M {
        self.generator.model()
    }

    /// Tokens in the context now.
    pub fn context_tokens(&self) -> usize {
        self.generator.past()
    }

    /// Tokens with which the template ends an answer.
    pub fn end_tokens(&self) -> &[TokenId] {
        &self.end_tokens
    }

    /// Forgets all messages but the system's.
    pub fn reset(&mut self) -> Result<(), ConversationError> {
        self.messages.retain(|m| m.role == "system");
        self.forget_context()
    }

    /// Says `text` and streams the answer. On an error, and when the answer was cancelled before its first
    /// token, the conversation is as before.
    pub fn send_message(
        &mut self,
        tokenizer: &Tokenizer,
        text: &str,
        settings: &AnswerSettings<'_>,
        on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<TurnResult, ConversationError> {
        self.messages.push(ChatMessage::new("user", text));
        let turn = self.generate_answer(tokenizer, settings, usize::MAX, on_text);
        if turn.as_ref().map_or(true, |t| t.generation.tokens.is_empty()) {
            self.messages.pop();
        }
        turn
    }

    /// Makes the last answer again. The input of the turn is read again in the same pieces, so that an equal
    /// seed gives an equal answer.
    pub fn regenerate(
        &mut self,
        tokenizer: &Tokenizer,
        settings: &AnswerSettings<'_>,
        on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<TurnResult, ConversationError> {
        let Some(old) = self.messages.pop_if(|m| m.role == "assistant") else {
            return Err(ConversationError::NothingToRegenerate);
        };
        let turn = self.generate_answer(tokenizer, settings, self.turn_start, on_text);
        if turn.as_ref().map_or(true, |t| t.generation.tokens.is_empty()) {
            self.messages.push(old);
        }
        turn
    }

    /// Makes an answer to the messages, and appends it to them if it has a token. At most `most_reused`
    /// tokens of the context stay.
    fn generate_answer(
        &mut self,
        tokenizer: &Tokenizer,
        settings: &AnswerSettings<'_>,
        most_reused: usize,
        mut on_text: impl FnMut(&str) -> ControlFlow<()>,
    ) -> Result<TurnResult, ConversationError> {
        let text = self.format.render(&self.messages, true, &TemplateInputs::default())?;
        let new = match self.generator.model().can_truncate() {
            _ if self.generator.model().needs_whole_prompts() => {
                self.forget_context()?;
                self.format.encode(tokenizer, &text)?
            }
            true => self.keep_common_prefix(tokenizer, &text, most_reused)?,
            false => self.restore_checkpoint(tokenizer, &text)?,
        };
        let form = settings.form.map(|form| self.format.answer_grammar(tokenizer, form, &text));
        let grammar = form.transpose().map_err(GenerateError::from)?;
        let reused_tokens = self.generator.past();
        let eos = [settings.eos, &self.end_tokens].concat();
        let template_stops = self.format.stop_texts();
        let stop: Vec<String> =
            settings.stop.iter().cloned().chain(template_stops.iter().map(|s| s.to_string())).collect();
        let request = GenerationRequest {
            max_tokens: settings.max_tokens,
            eos: &eos,
            stop: &stop,
            grammar,
            cancel: settings.cancel,
            ..GenerationRequest::new(&new, settings.sampling.clone())
        };
        self.context_text = None;
        let mut answer = String::new();
        let out = self.generator.generate(tokenizer, &request, |piece| {
            answer.push_str(piece);
            on_text(piece)
        });
        let generation = match out {
            Ok(generation) => generation,
            Err(error) => {
                if matches!(error, GenerateError::Model(_)) {
                    self.forget_context()?;
                }
                return Err(error.into());
            }
        };
        if !generation.tokens.is_empty() {
            self.turn_start = reused_tokens;
        }
        let whole_prompt = generation.prompt_tokens == new.len();
        if whole_prompt && generation.finish != FinishReason::Cancelled || !generation.tokens.is_empty() {
            // The last token was sampled but not computed; the next turn renders its text.
            let fed = self.generator.past() - reused_tokens - new.len();
            let said = tokenizer.decode(&generation.tokens[..fed], SpecialTokens::Keep);
            self.context_text = Some(text + &said);
        }
        self.generator.drop_pending();
        if !generation.tokens.is_empty() {
            self.messages.push(ChatMessage::new("assistant", answer));
        }
        Ok(TurnResult { generation, prompt_tokens: reused_tokens + new.len(), reused_tokens })
    }

    /// Drops the tokens that the context has beyond the begin of `text`; returns those that are left to
    /// compute, at least one.
    fn keep_common_prefix(
        &mut self,
        tokenizer: &Tokenizer,
        text: &str,
        most_reused: usize,
    ) -> Result<Vec<TokenId>, ConversationError> {
        let ids = self.format.encode(tokenizer, text)?;
        let fed = self.generator.computed_tokens();
        let common = fed.iter().zip(&ids).take_while(|(a, b)| a == b).count();
        // The last token is computed even if it is there: its logits are needed.
        let kept = common.min(ids.len().saturating_sub(1)).min(most_reused);
        if kept == fed.len() {
            return Ok(ids[kept..].to_vec());
        }
        if !self.generator.model().can_truncate_to(kept) {
            self.generator.reset()?;
            return Ok(ids);
        }
        self.generator.truncate(kept)?;
        Ok(ids[kept..].to_vec())
    }

    /// Brings a context that cannot drop tokens to a begin of `text`; returns the tokens that are left to
    /// compute.
    fn restore_checkpoint(
        &mut self,
        tokenizer: &Tokenizer,
        text: &str,
    ) -> Result<Vec<TokenId>, ConversationError> {
        let rest_after = |begin: &str| text.strip_prefix(begin).filter(|rest| !rest.is_empty());
        if self.generator.past() > 0
            && let Some(begin) = &self.context_text
            && let Some(rest) = rest_after(begin)
        {
            let (snapshot, fed) = (self.generator.snapshot()?, self.generator.computed_tokens().len());
            if self.checkpoints.len() == CHECKPOINTS {
                self.checkpoints.remove(0);
            }
            self.checkpoints.push(ContextCheckpoint { snapshot, fed, text: begin.clone() });
            return Ok(tokenizer.encode(rest)?);
        }
        while let Some(checkpoint) = self.checkpoints.last() {
            if let Some(rest) = rest_after(&checkpoint.text) {
                self.generator.restore(&checkpoint.snapshot, checkpoint.fed)?;
                return Ok(tokenizer.encode(rest)?);
            }
            self.checkpoints.pop();
        }
        if self.generator.past() > 0 {
            self.generator.reset()?;
        }
        Ok(self.format.encode(tokenizer, text)?)
    }

    fn forget_context(&mut self) -> Result<(), ConversationError> {
        self.checkpoints.clear();
        self.context_text = Some(String::new());
        self.turn_start = 0;
        Ok(self.generator.reset()?)
    }
}

/// The control token that the template puts after an answer (`<|im_end|>`, `<|eot_id|>`, ...). A model ends
/// its answer with it although its generation_config.json may not say so.
fn end_tokens(template: &ChatTemplate, tokenizer: &Tokenizer) -> Vec<TokenId> {
    const ANSWER: &str = "Answer.";
    let messages = [ChatMessage::new("user", "Question?"), ChatMessage::new("assistant", ANSWER)];
    // A template that refuses this talk ends its answers in a way that cannot be found out here.
    let Ok(text) = template.render_adapted(&messages, false, &TemplateInputs::default()) else {
        return Vec::new();
    };
    let Some((_, tail)) = text.rsplit_once(ANSWER) else { return Vec::new() };
    let Ok(ids) = tokenizer.encode(tail) else { return Vec::new() };
    let blank = |id: &TokenId| {
        !tokenizer.is_special(*id) && tokenizer.decode(&[*id], SpecialTokens::Skip).trim().is_empty()
    };
    let first = ids.into_iter().find(|id| !blank(id));
    first.into_iter().filter(|&id| tokenizer.is_special(id)).collect()
}

//! `mlcc chat`: a conversation with a compiled model. Answers and the results of commands go to standard
//! output, everything else to standard error. Reads lines from a terminal or, one message per line, from a
//! pipe.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::builder::NonEmptyStringValueParser;
use mlcc_driver::compile::keep::scheme_name;
use mlcc_engine::conversation::{
    AnswerSettings, ChatFormat, Conversation, ConversationError, RestoredContext, TurnResult,
};
use mlcc_engine::{FinishReason, LocalMachine};
use mlcc_runtime::{Model, Session};
use mlcc_text::{TokenId, Tokenizer};
use serde_json::Value;

use crate::commands::form::{KnownForm, TextForm};
use crate::commands::speculation::SpeculationArgs;
use crate::commands::{print, run};
use crate::error::CliError;
use crate::interrupt;
use crate::ui::{self, Ui};
use command::ChatCommand;
use input::{ChatInput, InputEvent};
use settings::ChatSettings;

mod command;
mod input;
mod settings;

/// `--template` for models that were not trained to chat.
const PLAIN: &str = "plain";

#[derive(Debug, clap::Args)]
#[command(after_help = "Example: mlcc chat model.so --system \"Answer in one sentence.\" --temp 0.7\n\
    In the chat: /help lists the commands; Ctrl-C stops an answer, clears the line at the prompt, and exits at an \
    empty prompt.")]
pub struct ChatArgs {
    /// A compiled model, or what one is built of first: a preset name, hf:org/repo, a folder, a GGUF file, or
    /// an address of one (docs/from-a-name.md)
    #[arg(env = "MLCC_ARTIFACT")]
    artifact: PathBuf,
    /// Weight format if a checkpoint is compiled [default: one for this machine: q4i8 on CPUs, q4f16 on GPUs,
    /// q8i8 for models of texts; as stored if small or quantized]
    #[arg(long, value_name = "NAME")]
    quant: Option<String>,
    /// System message at the start of the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Chat template to use instead of the model's own: a name (chatml, llama-2, llama-3, ...), a file of
    /// Jinja text, or `plain` for text that is simply continued
    #[arg(long, value_name = "NAME|FILE")]
    template: Option<String>,
    /// Maximum number of tokens of an answer; -1 generates until the model ends it
    #[arg(short = 'n', long, visible_alias = "n-predict", default_value_t = -1, allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    predict: i64,
    #[command(flatten)]
    threads: super::ThreadArgs,
    #[command(flatten)]
    sampling: run::SamplingArgs,
    #[command(flatten)]
    speculation: SpeculationArgs,
    /// End an answer before this string (repeatable)
    #[arg(short = 'r', long, visible_alias = "reverse-prompt", value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    #[command(flatten)]
    form: TextForm,
    /// Tokenizer file, instead of the one in the artifact
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// LoRA adapter in PEFT format, with an optional scale; the artifact must be built with --lora-slots
    #[arg(long, value_name = "DIR[=SCALE]")]
    lora: Option<mlcc_models::AdapterRequest>,
    /// Start from a conversation that /save wrote
    #[arg(long, value_name = "FILE")]
    load: Option<PathBuf>,
}

pub fn run(args: &ChatArgs, ui: &Ui) -> Result<(), CliError> {
    let artifact = super::checkpoint::artifact_for(&args.artifact, args.quant.as_deref(), ui)?;
    let model = super::load_to_run(&artifact, &args.threads, ui)?;
    let tokenizer = run::tokenizer(&model, args.tokenizer.as_deref())?;
    tokenizer.check_vocab(model.vocab())?;
    let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
    let format = format(&model, args.template.as_deref(), ui)?;
    let settings = ChatSettings {
        sampling: run::sampling(&metadata, &args.sampling, &tokenizer)?,
        max_tokens: usize::try_from(args.predict).ok(),
        stop: args.stop.clone(),
    };
    settings.check().map_err(CliError::usage)?;
    let session = run::adapted_session(&model, args.lora.as_ref())?;
    let mut conversation = Conversation::new(session, format, args.system.as_deref(), &tokenizer);
    if let Some(drafts) = args.speculation.drafter(&model, &tokenizer, &args.threads)? {
        conversation.draft_with((drafts.make_drafter)());
    }
    let eos = mlcc_engine::artifact_text::eos_ids(&metadata);
    let form = args.form.read(&tokenizer, model.vocab())?;
    let mut chat =
        ChatLoop { conversation, tokenizer, settings, form, eos, last: None, failed: false, ui: *ui };
    if let Some(path) = &args.load {
        chat.load_conversation(path)?;
    }
    ui.note(format_args!(
        "{}, {}, on {}, {}. /help lists the commands.",
        super::model_name(&metadata, &args.artifact),
        scheme_name(&metadata),
        model.executor(),
        match model.plan().context {
            0 => "no limit of the context".into(),
            context => format!("context {context} tokens"),
        }
    ));
    chat.run()
}

/// The template of `--template`, else of the artifact, if it has one.
pub(crate) fn known_format(model: &Model, name: Option<&str>) -> Result<Option<ChatFormat>, CliError> {
    if let (Some(_), Some(_)) = (model.plan().decoder_start(), name) {
        return Err(no_chat_error(model));
    }
    let template = match name {
        None if model.plan().decoder_start().is_some() => return Ok(None),
        None => return Ok(mlcc_engine::artifact_text::chat_format(model)?),
        Some(PLAIN) => return Ok(Some(ChatFormat::Plain)),
        Some(name) => {
            let source = super::chat_template(name, &format!(", and {PLAIN}"))?;
            mlcc_engine::artifact_text::with_tokens(source, model)?.compile(&LocalMachine)?
        }
    };
    Ok(Some(ChatFormat::Template(Box::new(template))))
}

/// An encoder-decoder model reads a text and writes one.
fn no_chat_error(model: &Model) -> CliError {
    CliError::Failed(format!(
        "{} is an encoder-decoder model, which writes one text for another and has no chats: use `mlcc run`, or \
         /v1/completions of `mlcc serve` without --template",
        super::name_of_artifact(model)
    ))
}

/// The template; a model without one goes on with what is written, as its page does in `mlcc serve`.
fn format(model: &Model, name: Option<&str>, ui: &Ui) -> Result<ChatFormat, CliError> {
    if model.plan().decoder_start().is_some() {
        return Err(no_chat_error(model));
    }
    Ok(known_format(model, name)?.unwrap_or_else(|| {
        ui.note(
            "this model has no chat template: it continues the text that you write (--template NAME, for example \
             chatml, turns it into messages)",
        );
        ChatFormat::Plain
    }))
}

struct ChatLoop {
    conversation: Conversation<Session>,
    tokenizer: Tokenizer,
    settings: ChatSettings,
    form: Option<KnownForm>,
    /// Tokens that end texts, as the model's files say.
    eos: Vec<TokenId>,
    last: Option<TurnResult>,
    /// True if something was refused; the exit code tells it where the messages are not read.
    failed: bool,
    ui: Ui,
}

/// The flow of the conversation: whether it goes on.
type ChatFlow = Result<ControlFlow<()>, CliError>;

impl ChatLoop {
    fn run(&mut self) -> Result<(), CliError> {
        let mut input = ChatInput::open()?;
        // From here on Ctrl-C stops answers.
        interrupt::flag();
        loop {
            interrupt::wait_at_prompt(true);
            let event = input.read();
            interrupt::wait_at_prompt(false);
            let flow = match event? {
                InputEvent::End => ControlFlow::Break(()),
                InputEvent::Interrupted => return Err(CliError::Interrupted),
                InputEvent::Message(text) => self.handle_line(&text)?,
            };
            if flow.is_break() {
                break;
            }
        }
        if self.failed && !input.is_terminal() { Err(CliError::Reported) } else { Ok(()) }
    }

    fn handle_line(&mut self, text: &str) -> ChatFlow {
        match ChatCommand::parse(text) {
            None if text.trim().is_empty() => Ok(ControlFlow::Continue(())),
            None => self.generate_answer(Some(command::unescape_message(text))),
            Some(Ok(command)) => self.handle_command(command),
            Some(Err(message)) => self.report_mistake(message),
        }
    }

    /// A mistake ends nothing.
    fn report_mistake(&mut self, message: impl std::fmt::Display) -> ChatFlow {
        self.failed = true;
        let _ = writeln!(std::io::stderr(), "error: {message}");
        Ok(ControlFlow::Continue(()))
    }

    fn handle_command(&mut self, command: ChatCommand) -> ChatFlow {
        match command {
            ChatCommand::Help => print(command::HELP)?,
            ChatCommand::Exit => return Ok(ControlFlow::Break(())),
            ChatCommand::Stats => print(&self.stats())?,
            ChatCommand::Regenerate => return self.generate_answer(None),
            ChatCommand::Reset => {
                self.last = None;
                match self.conversation.reset() {
                    Ok(()) => self.ui.note("(a new conversation)"),
                    Err(e) => return self.report_mistake(e),
                }
            }
            ChatCommand::Set(None) => print(&self.settings.list())?,
            ChatCommand::Set(Some(text)) => match self.settings.set(&text) {
                Ok(said) => self.ui.note(format_args!("({said})")),
                Err(message) => return self.report_mistake(message),
            },
            ChatCommand::Save(path) => match self.conversation.save(&path) {
                Ok(()) => self.ui.note(format_args!("(saved as {})", path.display())),
                Err(e) => return self.report_mistake(e),
            },
            ChatCommand::Load(path) => {
                if let Err(e) = self.load_conversation(&path) {
                    return self.report_mistake(e);
                }
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn load_conversation(&mut self, path: &Path) -> Result<(), CliError> {
        let restored = self.conversation.load(path)?;
        self.last = None;
        let count = self.conversation.messages().len();
        self.ui.note(format_args!("({} from {})", ui::pluralize(count, "message"), path.display()));
        if let RestoredContext::MessagesOnly(reason) = restored {
            self.ui.warn(format_args!("the conversation will be read again: {reason}"));
        }
        Ok(())
    }

    /// Answers `text`, or the last message again.
    fn generate_answer(&mut self, text: Option<&str>) -> ChatFlow {
        let settings = AnswerSettings {
            sampling: &self.settings.sampling,
            max_tokens: self.settings.max_tokens,
            eos: &self.eos,
            stop: &self.settings.stop,
            form: self.form.as_ref().map(KnownForm::answers),
            cancel: Some(interrupt::flag()),
        };
        let mut out = run::StdoutText::new(None);
        let show = |piece: &str| out.write_piece(piece);
        let turn = match text {
            Some(text) => self.conversation.send_message(&self.tokenizer, text, &settings, show),
            None => self.conversation.regenerate(&self.tokenizer, &settings, show),
        };
        match turn {
            Ok(turn) => {
                out.end()?;
                self.print_end(&turn);
                self.last = Some(turn);
                Ok(ControlFlow::Continue(()))
            }
            Err(error) => {
                out.check()?;
                let hint = match &error {
                    ConversationError::Generate(mlcc_engine::GenerateError::PromptTooLong { .. }) => {
                        ". /reset starts a new conversation."
                    }
                    _ => "",
                };
                self.report_mistake(format_args!("{error}{hint}"))
            }
        }
    }

    fn print_end(&self, turn: &TurnResult) {
        match turn.generation.finish {
            FinishReason::Cancelled | FinishReason::Deadline => self.ui.note("(stopped)"),
            FinishReason::Length => self.ui.note("(stopped at the -n limit)"),
            FinishReason::Context => self.ui.note(
                "(the context is full: /reset starts a new conversation; build with a larger -c/--ctx-size for longer \
                 ones)",
            ),
            FinishReason::Eos | FinishReason::Stop(_) | FinishReason::Grammar => {}
        }
    }

    fn stats(&self) -> String {
        let session = self.conversation.model();
        let memory = session.memory();
        let limit = match (session.window(), session.model().plan().context) {
            // Older messages are dropped, so that there is no end.
            (Some(window), _) => match session.sinks() {
                0 => format!("of which it sees the newest {window}"),
                sinks => format!("of which it sees the first {sinks} and the newest {window}"),
            },
            (None, 0) => "no limit".into(),
            (None, context) => format!("of {context}"),
        };
        let mut out = format!(
            "context: {} tokens, {limit}; state {} of at most {}\n",
            self.conversation.context_tokens(),
            ui::bytes(memory.state),
            ui::bytes(memory.planned_state)
        );
        if let Some(turn) = &self.last {
            let made = &turn.generation;
            out += &format!(
                "last turn: prompt {} tokens, {} of them in the context before, {} read at {:.1} tokens/s; answer {} \
                 tokens at {:.1} tokens/s; end: {}; seed {}\n",
                turn.prompt_tokens,
                turn.reused_tokens,
                made.prompt_tokens,
                made.prefill_tokens_per_second(),
                made.tokens.len(),
                made.decode_tokens_per_second(),
                made.finish.as_str(),
                made.seed
            );
        }
        if let Some(notice) = session.performance_warning() {
            out += &format!("{notice}\n");
        }
        out
    }
}

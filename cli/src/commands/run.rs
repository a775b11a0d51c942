//! `mlcc run`: text from a prompt. Text goes to standard output as it comes, statistics to standard error.

use std::collections::BTreeSet;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use mlcc_engine::conversation::ChatFormat;
use mlcc_engine::generate::{FinishReason, GenerationRequest, GenerationResult, TextGenerator};
use mlcc_engine::{GenerateError, LocalMachine, SamplingOverrides, SamplingParams, artifact_text};
use mlcc_models::AdapterRequest;
use mlcc_runtime::{CpuTopology, LoadedAdapter, LoraFactors, Model, Session};
use mlcc_text::chat::{ChatMessage, TemplateInputs};
use mlcc_text::{Grammar, TokenId, Tokenizer, TokenizerFile};
use serde_json::Value;

use crate::commands::form::TextForm;
use crate::commands::samplers::SamplerArgs;
use crate::commands::speculation::SpeculationArgs;
use crate::commands::{chat, read_stdin, read_text};
use crate::error::CliError;
use crate::interrupt;
use crate::ui::{self, Ui, Verbosity};

#[derive(Debug, clap::Args)]
#[command(after_help = "Example: mlcc run model.so -p \"The sea was\" -n 100 --temp 0.7")]
pub struct RunArgs {
    /// A compiled model, or what one is built of first: a preset name, hf:org/repo, a folder, a GGUF file, or
    /// an address of one (docs/from-a-name.md)
    #[arg(env = "MLCC_ARTIFACT")]
    artifact: PathBuf,
    /// Weight format if a checkpoint is compiled [default: one for this machine: q4i8 on CPUs, q4f16 on GPUs,
    /// q8i8 for models of texts; as stored if small or quantized]
    #[arg(long, value_name = "NAME")]
    quant: Option<String>,
    /// The prompt; `-` reads it from standard input. A model with a chat template answers it, other models
    /// continue it
    #[arg(short, long, conflicts_with = "file")]
    prompt: Option<String>,
    /// File with the prompt; `-` is standard input
    #[arg(short, long)]
    file: Option<PathBuf>,
    /// Continue the prompt as it is, without the model's chat template; implied by --load-state and
    /// --save-state
    #[arg(long)]
    raw: bool,
    /// Number of tokens to generate; -1 generates until the model ends the text
    #[arg(
        short = 'n',
        long,
        visible_alias = "n-predict",
        default_value_t = 256,
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(i64).range(-1..)
    )]
    predict: i64,
    #[command(flatten)]
    threads: super::ThreadArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    speculation: SpeculationArgs,
    /// End the text before this string (repeatable)
    #[arg(short = 'r', long, visible_alias = "reverse-prompt", value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    #[command(flatten)]
    form: TextForm,
    /// Continue after the model's end-of-text token
    #[arg(long)]
    ignore_eos: bool,
    /// Do not repeat the prompt before the text
    #[arg(long, visible_alias = "no-display-prompt")]
    no_echo: bool,
    /// Tokenizer file, instead of the one in the artifact
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// LoRA adapter in PEFT format, with an optional scale; the artifact must be built with --lora-slots
    #[arg(long, value_name = "DIR[=SCALE]")]
    lora: Option<AdapterRequest>,
    /// Start from the state in this file
    #[arg(long, value_name = "FILE")]
    load_state: Option<PathBuf>,
    /// Write the state to this file at the end
    #[arg(long, value_name = "FILE")]
    save_state: Option<PathBuf>,
}

#[derive(Debug, Clone, clap::Args)]
#[command(
    next_help_heading = "Sampling (defaults: temp 0.8, top-k 40, top-p 0.95, min-p 0.05; the model's own values win over these)"
)]
pub(crate) struct SamplingArgs {
    /// Sampling temperature; 0 is greedy
    #[arg(long, visible_alias = "temperature", allow_negative_numbers = true)]
    temp: Option<f32>,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, allow_negative_numbers = true)]
    top_k: Option<u32>,
    /// Keep the most likely tokens up to this total probability; 1 keeps all
    #[arg(long, allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Drop tokens below P times the top probability
    #[arg(long, allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Make tokens among the last --repeat-last-n less likely; 1 disables
    #[arg(long, visible_alias = "repetition-penalty", allow_negative_numbers = true)]
    repeat_penalty: Option<f32>,
    /// Number of last tokens that the penalties look at; -1 = all
    #[arg(long, allow_negative_numbers = true)]
    repeat_last_n: Option<i32>,
    /// Subtracted from the logit of each token in that window; 0 disables
    #[arg(long, allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Subtracted from a token's logit for each time it occurs in that window; 0 disables
    #[arg(long, allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Random seed: equal seeds give equal texts; -1 picks a new one each time
    #[arg(short, long, allow_negative_numbers = true, env = "MLCC_SEED", value_parser = SeedArg::parse)]
    seed: Option<SeedArg>,
    /// Always take the most likely token
    #[arg(long, conflicts_with = "temp")]
    greedy: bool,
    #[command(flatten)]
    samplers: SamplerArgs,
}

/// A seed as users write it: a number, or -1 for another one each time (`None`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SeedArg(pub Option<u64>);

impl SeedArg {
    pub(crate) fn parse(text: &str) -> Result<SeedArg, String> {
        match text.trim() {
            "-1" => Ok(SeedArg(None)),
            number => match number.parse() {
                Ok(seed) => Ok(SeedArg(Some(seed))),
                Err(_) => {
                    Err(format!("`{text}` is not a seed: expected -1 or a number from 0 to {}", u64::MAX))
                }
            },
        }
    }
}

impl SamplingArgs {
    fn overrides(&self, tokenizer: &Tokenizer) -> SamplingOverrides {
        SamplingOverrides {
            temperature: if self.greedy { Some(0.0) } else { self.temp },
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed.and_then(|seed| seed.0),
            extra: self.samplers.samplers(tokenizer),
        }
    }
}

pub fn run(args: &RunArgs, ui: &Ui) -> Result<(), CliError> {
    let prompt = prompt(args)?;
    if let Some(path) = &args.save_state
        && path.canonicalize().is_ok_and(|path| args.artifact.canonicalize().is_ok_and(|model| model == path))
    {
        return Err(CliError::usage(format!("--save-state {}: that is the model itself", path.display())));
    }
    let artifact = super::checkpoint::artifact_for(&args.artifact, args.quant.as_deref(), ui)?;
    let model = super::load_to_run(&artifact, &args.threads, ui)?;
    let tokenizer = tokenizer(&model, args.tokenizer.as_deref())?;
    tokenizer.check_vocab(model.vocab())?;
    let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
    let session = session(&model, args.lora.as_ref(), args.load_state.as_deref())?;
    let format = template(args, &model, ui)?;
    let loaded = ui.started.elapsed();
    let ids = match &format {
        Some(format) => format.encode(&tokenizer, &message(format, &prompt)?)?,
        None if session.past() == 0 => tokenizer.encode_prompt(&prompt)?,
        // A loaded state has its begin already.
        None => tokenizer.encode(&prompt)?,
    };
    let (eos, stop) = stop_conditions(args, &metadata, format.as_ref(), &tokenizer);
    let grammar = grammar(args, &model, &tokenizer, format.as_ref(), &prompt)?;
    let request = GenerationRequest {
        max_tokens: usize::try_from(args.predict).ok(),
        eos: &eos,
        stop: &stop,
        grammar,
        cancel: Some(interrupt::flag()),
        ..GenerationRequest::new(&ids, sampling(&metadata, &args.sampling, &tokenizer)?)
    };
    ui.detail(format_args!(
        "{} on {} with {}",
        args.artifact.display(),
        model.executor(),
        ui::pluralize(model.threads(), "thread")
    ));
    ui.detail(format_args!("memory: {}", memory(&model)));
    ui.detail(format_args!("cores: {}", CpuTopology::detect_host()));
    let mut generator = TextGenerator::new(session);
    if let Some(drafts) = args.speculation.drafter(&model, &tokenizer, &args.threads)? {
        generator.draft_with((drafts.make_drafter)());
    }
    // The prompt is repeated when it has been accepted: with the first text, or at the end. A source text or
    // a message is not continued by the text.
    let echo = !args.no_echo && format.is_none() && model.plan().decoder_start().is_none();
    let mut text = StdoutText::new(echo.then_some(prompt));
    let mut first = None;
    let out = generator.generate(&tokenizer, &request, |piece| {
        first.get_or_insert_with(|| ui.started.elapsed());
        text.write_piece(piece)
    })?;
    text.end()?;
    print_statistics(&out, loaded, first.unwrap_or_else(|| ui.started.elapsed()), ui);
    super::warn_session(generator.model(), ui);
    if let Some(weights) = ui::placement(&model) {
        ui.detail(format_args!("weights: {weights}"));
    }
    if let Some(path) = &args.save_state {
        if !generator.decode_pending()? {
            ui.warn("the context is full: the saved state lacks the last token of the text");
        }
        generator.into_model().save_state(path)?;
    }
    match out.finish {
        FinishReason::Cancelled => Err(CliError::Interrupted),
        _ => Ok(()),
    }
}

/// Standard output, which may go away in the middle of the text.
pub(crate) struct StdoutText {
    /// Text before the first piece.
    echo: Option<String>,
    error: Option<std::io::Error>,
}

impl StdoutText {
    pub(crate) fn new(echo: Option<String>) -> Self {
        StdoutText { echo, error: None }
    }

    pub(crate) fn write_piece(&mut self, piece: &str) -> ControlFlow<()> {
        let mut out = std::io::stdout().lock();
        let echo = self.echo.take().unwrap_or_default();
        let written = out.write_all(echo.as_bytes()).and_then(|()| out.write_all(piece.as_bytes()));
        match written.and_then(|()| out.flush()) {
            Ok(()) => ControlFlow::Continue(()),
            Err(e) => {
                self.error = Some(e);
                ControlFlow::Break(())
            }
        }
    }

    pub(crate) fn end(&mut self) -> Result<(), CliError> {
        if self.error.is_none() {
            let _ = self.write_piece("\n");
        }
        self.check()
    }

    /// The error that ended the text, if there was one.
    pub(crate) fn check(&mut self) -> Result<(), CliError> {
        match self.error.take() {
            Some(e) => Err(e.into()),
            None => Ok(()),
        }
    }
}

fn prompt(args: &RunArgs) -> Result<String, CliError> {
    let text = match (&args.prompt, &args.file) {
        (Some(prompt), _) if prompt == "-" => read_stdin(mlcc_files::FileKind::Prompt)?,
        (Some(prompt), _) => prompt.clone(),
        (None, Some(path)) => read_text(path, mlcc_files::FileKind::Prompt)?,
        (None, None) => {
            return Err(CliError::usage("no prompt: give -p TEXT, -f FILE, or -p - for standard input"));
        }
    };
    if text.is_empty() {
        return Err(GenerateError::EmptyPrompt.into());
    }
    Ok(text)
}

/// The model's chat template, if there is one that the prompt goes into.
fn template(args: &RunArgs, model: &Model, ui: &Ui) -> Result<Option<ChatFormat>, CliError> {
    if args.raw || model.chat().is_none() {
        return Ok(None);
    }
    // A context from a state file has no end of a message.
    if args.load_state.is_some() || args.save_state.is_some() {
        ui.note("the prompt is used as it is, without the model's chat template, because of the state file");
        return Ok(None);
    }
    let format = chat::known_format(model, None).map_err(suggest_raw)?;
    if format.is_some() {
        ui.note("the prompt is a message in the model's chat template; --raw continues it as it is");
    }
    Ok(format)
}

/// One message, up to where its answer begins.
fn message(format: &ChatFormat, text: &str) -> Result<String, CliError> {
    let messages = [ChatMessage::new("user", text)];
    format.render(&messages, true, &TemplateInputs::default()).map_err(|error| suggest_raw(error.into()))
}

/// The grammar of the text, behind the reasoning that a template knows.
fn grammar(
    args: &RunArgs,
    model: &Model,
    tokenizer: &Tokenizer,
    format: Option<&ChatFormat>,
    prompt: &str,
) -> Result<Option<Grammar>, CliError> {
    let Some(form) = args.form.read(tokenizer, model.vocab())? else { return Ok(None) };
    let grammar = match format {
        Some(format) => format.answer_grammar(tokenizer, form.answers(), &message(format, prompt)?),
        None => form.compiler.compile(&form.spec),
    };
    Ok(Some(grammar.map_err(GenerateError::from)?))
}

/// An error of a template, with the way around it.
fn suggest_raw(error: CliError) -> CliError {
    CliError::Failed(format!("{error}; `mlcc run --raw` continues the prompt without the template"))
}

/// The tokens and texts that end the text: the model's, those of the template, and those that the user named.
fn stop_conditions(
    args: &RunArgs,
    metadata: &Value,
    format: Option<&ChatFormat>,
    tokenizer: &Tokenizer,
) -> (Vec<TokenId>, Vec<String>) {
    let mut stop = args.stop.clone();
    if args.ignore_eos {
        return (Vec::new(), stop);
    }
    let mut eos = artifact_text::eos_ids(metadata);
    if let Some(format) = format {
        eos.extend(format.end_tokens(tokenizer));
        stop.extend(format.stop_texts().iter().map(|text| text.to_string()));
    }
    (eos, stop)
}

/// The tokenizer of the artifact, or a file.
pub(crate) fn tokenizer(model: &Model, file: Option<&Path>) -> Result<Tokenizer, CliError> {
    if let Some(file) = file {
        let tokenizer = TokenizerFile::read(file, &LocalMachine)?.load()?;
        return Ok(tokenizer.with_decoder_start(model.plan().decoder_start()));
    }
    Ok(artifact_text::tokenizer(model)?)
}

/// A session with an adapter, if one is asked for.
pub(crate) fn adapted_session(model: &Model, adapter: Option<&AdapterRequest>) -> Result<Session, CliError> {
    let mut session = model.session()?;
    if let Some(request) = adapter {
        session.set_adapter(Some(&load_adapter(model, request)?))?;
    }
    Ok(session)
}

/// Puts an adapter into a slot of the model.
pub(crate) fn load_adapter(model: &Model, request: &AdapterRequest) -> Result<LoadedAdapter, CliError> {
    // Before its tensors are looked for in slots that are not there.
    if model.adapter_slots() == 0 {
        return Ok(model.load_adapter(&request.name(), &[])?);
    }
    let slots: BTreeSet<&str> = model.adapter_tensors().collect();
    let found = mlcc_models::adapter_factors(request, |tensor| slots.contains(tensor))?;
    let factors: Vec<LoraFactors> =
        found.iter().map(|f| LoraFactors { tensor: &f.tensor, rank: f.rank, a: &f.a, b: &f.b }).collect();
    Ok(model.load_adapter(&request.name(), &factors)?)
}

fn session(
    model: &Model,
    adapter: Option<&AdapterRequest>,
    state: Option<&Path>,
) -> Result<Session, CliError> {
    let mut session = adapted_session(model, adapter)?;
    if let Some(path) = state {
        session.load_state(path)?;
    }
    Ok(session)
}

/// Tool defaults, then the model's generation_config.json or what its family is used with, then flags.
pub(crate) fn sampling(
    metadata: &Value,
    flags: &SamplingArgs,
    tokenizer: &Tokenizer,
) -> Result<SamplingParams, CliError> {
    let flags = flags.overrides(tokenizer);
    SamplingParams::default().with(&flags).check().map_err(|e| {
        CliError::usage(format!("--{} is {}, expected {}", e.name.replace('_', "-"), e.found, e.expected))
    })?;
    Ok(artifact_text::sampling(metadata)?.with(&flags))
}

/// The memory of a sequence, as planned when the model was built.
fn memory(model: &Model) -> String {
    let plan = model.plan();
    format!(
        "{} weights, {} state{}, {} scratch",
        ui::bytes(plan.ranks * plan.weights_bytes),
        ui::bytes(plan.sequence_bytes()),
        match plan.context {
            0 => String::new(),
            context => format!(" for {context} tokens"),
        },
        ui::bytes(plan.scratch_bytes())
    )
}

/// `loaded` and `first`: from the program's start to the loaded model, and to the first text.
fn print_statistics(out: &GenerationResult, loaded: Duration, first: Duration, ui: &Ui) {
    let more = match ui.verbosity {
        Verbosity::Verbose => format!(
            " | loaded in {:.3} s | sampling {:.3} s",
            loaded.as_secs_f64(),
            out.sampling_time.as_secs_f64()
        ),
        Verbosity::Quiet | Verbosity::Normal => String::new(),
    };
    let drafts = match out.drafted {
        0 => String::new(),
        drafted => format!(" ({} of {drafted} drafted ones)", out.accepted),
    };
    ui.note(format_args!(
        "\nprompt: {}, {:.1} tokens/s | generated: {}{drafts}, {:.1} tokens/s | first text {:.3} s after the start | end: {} | seed {}{more}",
        ui::pluralize(out.prompt_tokens, "token"),
        out.prefill_tokens_per_second(),
        ui::pluralize(out.tokens.len(), "token"),
        out.decode_tokens_per_second(),
        first.as_secs_f64(),
        out.finish.as_str(),
        out.seed
    ));
}

//! `mlcc eval`: perplexity of a text, and the distance from another compiled model.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use mlcc_bench::limits::SequenceLimits;
use mlcc_engine::eval::{self, EvalProtocol, EvalWindows, Perplexity, WindowModel};
use mlcc_models::AdapterRequest;
use mlcc_runtime::{Model, Session};
use mlcc_text::{TokenId, Tokenizer};
use serde_json::json;

use crate::commands::{checkpoint, load, name_of_artifact, print, print_json, read_text, run};
use crate::error::CliError;
use crate::interrupt;
use crate::ui::{self, Ui};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Perplexity: exp of the mean of -ln p over all scored tokens. The text is cut into windows of \
    --context tokens, --stride apart, each from the empty state; the first token of a window is context only, and an \
    incomplete last window is dropped."
)]
pub struct EvalArgs {
    /// A compiled model, or what one is built of first: a preset name, hf:org/repo, a folder, a GGUF file, or
    /// an address of one (docs/from-a-name.md)
    artifact: PathBuf,
    /// Weight format if a checkpoint is compiled [default: one for this machine: q4i8 on CPUs, q4f16 on GPUs,
    /// q8i8 for models of texts; as stored if small or quantized]
    #[arg(long, value_name = "NAME")]
    quant: Option<String>,
    /// The text, UTF-8; `-` is standard input
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens per window [default: 256, or the model's context if that is smaller]
    #[arg(long)]
    context: Option<usize>,
    /// Tokens from the start of one window to the next [default: 256, or --context if that is smaller]
    #[arg(long)]
    stride: Option<usize>,
    /// Compiled model to use as the reference: adds KL divergence and top-token agreement
    #[arg(long, value_name = "ARTIFACT")]
    against: Option<PathBuf>,
    /// LoRA adapter in PEFT format, with an optional scale; the artifact must be built with --lora-slots
    #[arg(long, value_name = "DIR[=SCALE]")]
    lora: Option<AdapterRequest>,
    /// Use at most N windows
    #[arg(long, value_name = "N")]
    windows: Option<usize>,
    /// Worker threads [default: physical cores]
    #[arg(short, long, env = "MLCC_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Tokenizer file, instead of the one in the artifact
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &EvalArgs, ui: &Ui) -> Result<(), CliError> {
    let text = read_text(&args.text, mlcc_files::FileKind::EvalText)?;
    let threads = args.threads.map(usize::from);
    // Both are built before one of them is loaded.
    let artifact = checkpoint::artifact_for(&args.artifact, args.quant.as_deref(), ui)?;
    let against =
        args.against.as_deref().map(|path| checkpoint::artifact_as_stored(path, None, ui)).transpose()?;
    let model = load(&artifact, threads, false)?;
    if model.plan().decoder_start().is_some() {
        return Err(CliError::Failed(format!(
            "{} is an encoder-decoder model: perplexity is for models that continue a text. Use `mlcc run` to generate \
             with it, and `mlcc verify` to compare it with its reference",
            args.artifact.display()
        )));
    }
    let tokenizer = run::tokenizer(&model, args.tokenizer.as_deref())?;
    let reference = against.as_deref().map(|path| load(path, threads, false)).transpose()?;
    let protocol = choose_protocol(args, &model, reference.as_ref(), ui)?;
    let tokens = tokens(&tokenizer, &text, args.windows, protocol)?;
    let windows = EvalWindows::new(&tokens, protocol, model.vocab())?;

    let bar = ui.count_bar("eval");
    bar.set_length(windows.count() as u64);
    let progress = |so_far: &Perplexity| {
        bar.set_position(so_far.windows as u64);
        bar.set_message(format!("perplexity {:.3}", so_far.perplexity()));
    };
    let mut this = InterruptibleSession(run::adapted_session(&model, args.lora.as_ref())?);
    let result = match &reference {
        None => eval::perplexity(&windows, &mut this, progress).map(|p| (p, None)),
        Some(reference) => {
            same_vocabulary(&model, reference)?;
            let mut reference = InterruptibleSession(reference.session()?);
            eval::compare(&windows, &mut reference, &mut this, progress).map(|c| (c.this, Some(c)))
        }
    };
    bar.finish_and_clear();
    if interrupt::flag().load(Ordering::Relaxed) {
        return Err(CliError::Interrupted);
    }
    let (this, comparison) = result?;
    report(args, protocol, &this, comparison.as_ref(), tokens.len())
}

/// The windows that are asked for, else some that every model in use can see.
fn choose_protocol(
    args: &EvalArgs,
    model: &Model,
    reference: Option<&Model>,
    ui: &Ui,
) -> Result<EvalProtocol, CliError> {
    let usual = EvalProtocol::default();
    let limits = reference
        .map_or_else(SequenceLimits::default, SequenceLimits::from_model)
        .intersect(SequenceLimits::from_model(model));
    let context = match (args.context, limits.prompt) {
        (Some(asked), Some(most)) if asked > most => {
            return Err(CliError::usage(format!(
                "--context {asked} is more than the {most} tokens that fit into the context of {}: choose at most \
                 {most}, or build with a larger -c/--ctx-size (--chunk for a model that must read a prompt at once)",
                if reference.is_some() { "the models" } else { "the model" }
            )));
        }
        (Some(asked), _) => asked,
        (None, Some(most)) if most < usual.context => {
            ui.note(format_args!("windows of {most} tokens: the limit of the model"));
            most
        }
        (None, _) => usual.context,
    };
    let stride = args.stride.unwrap_or(usual.stride.min(context));
    Ok(EvalProtocol { context, stride })
}

fn tokens(
    tokenizer: &Tokenizer,
    text: &str,
    windows: Option<usize>,
    protocol: EvalProtocol,
) -> Result<Vec<TokenId>, CliError> {
    let mut tokens = tokenizer.encode(text)?;
    if let Some(windows) = windows {
        let EvalProtocol { context, stride } = protocol;
        let most = windows.saturating_sub(1).saturating_mul(stride).saturating_add(context);
        tokens.truncate(most);
    }
    Ok(tokens)
}

fn same_vocabulary(this: &Model, reference: &Model) -> Result<(), CliError> {
    if this.vocab() == reference.vocab() {
        return Ok(());
    }
    Err(CliError::Failed(format!(
        "{} has a vocabulary of {}, {} one of {}: only models with the same tokenizer can be compared",
        name_of_artifact(this),
        this.vocab(),
        name_of_artifact(reference),
        reference.vocab()
    )))
}

/// A session that fails once Ctrl-C was pressed.
struct InterruptibleSession(Session);

impl WindowModel for InterruptibleSession {
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn window_logits(&mut self, tokens: &[TokenId]) -> Result<&[f32], Self::Error> {
        if interrupt::flag().load(Ordering::Relaxed) {
            return Err("interrupted".into());
        }
        Ok(WindowModel::window_logits(&mut self.0, tokens)?)
    }
}

fn report(
    args: &EvalArgs,
    protocol: EvalProtocol,
    this: &Perplexity,
    comparison: Option<&eval::ModelComparison>,
    tokens: usize,
) -> Result<(), CliError> {
    if args.json {
        return print_json(&json!({
            "perplexity": this.perplexity(),
            "mean_nll": this.mean_nll(),
            "tokens": this.tokens_scored,
            "text_tokens": tokens,
            "windows": this.windows,
            "context": protocol.context,
            "stride": protocol.stride,
            "reference_perplexity": comparison.map(|c| c.reference.perplexity()),
            "kl_divergence": comparison.map(|c| c.kl_divergence),
            "kl_max": comparison.map(|c| c.kl_max),
            "same_top_token": comparison.map(|c| c.same_top_token),
        }));
    }
    let mut out = format!(
        "perplexity {:.4} over {} in {}\n",
        this.perplexity(),
        ui::pluralize(this.tokens_scored, "token"),
        ui::pluralize(this.windows, "window")
    );
    if let Some(c) = comparison {
        out.push_str(&format!(
            "reference perplexity {:.4}, KL divergence {:.6} (at most {:.4}), same top token {:.2} %\n",
            c.reference.perplexity(),
            c.kl_divergence,
            c.kl_max,
            100.0 * c.same_top_token
        ));
    }
    print(&out)
}

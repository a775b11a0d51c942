//! `mlcc eval`: perplexity of a text, and the distance from another compiled model.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use mlcc_engine::eval::{self, Perplexity, Protocol, WindowModel, Windows};
use mlcc_engine::{TokenId, Tokenizer};
use mlcc_runtime::{Model, Session};
use serde_json::json;

use crate::commands::{load, print, print_json, read_text, run};
use crate::error::CliError;
use crate::interrupt;
use crate::ui::Ui;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Perplexity: exp of the mean of -ln p over all scored tokens. The text is cut into windows of \
    --context tokens, --stride apart, each from the empty state; the first token of a window is context only, and an \
    incomplete last window is dropped."
)]
pub struct Args {
    /// A compiled model
    artifact: PathBuf,
    /// The text, UTF-8; `-` is standard input
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens of a window
    #[arg(long, default_value_t = 256)]
    context: usize,
    /// Tokens from the begin of one window to the next
    #[arg(long, default_value_t = 256)]
    stride: usize,
    /// Another compiled model, the reference: adds KL divergence and the share of equal top tokens
    #[arg(long, value_name = "ARTIFACT")]
    against: Option<PathBuf>,
    /// At most so many windows
    #[arg(long, value_name = "N")]
    windows: Option<usize>,
    /// Worker threads [default: physical cores]
    #[arg(short, long, env = "MLCC_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Tokenizer file, in place of the one in the artifact
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, ui: &Ui) -> Result<(), CliError> {
    let text = read_text(&args.text)?;
    let threads = args.threads.map(usize::from);
    let model = load(&args.artifact, threads, false)?;
    let tokenizer = run::tokenizer(&model, args.tokenizer.as_deref())?;
    let tokens = tokens(&tokenizer, &text, args)?;
    let protocol = Protocol { context: args.context, stride: args.stride };
    let windows = Windows::new(&tokens, protocol, model.vocab())?;

    let bar = ui.count_bar("eval");
    bar.set_length(windows.count() as u64);
    let progress = |so_far: &Perplexity| {
        bar.set_position(so_far.windows as u64);
        bar.set_message(format!("perplexity {:.3}", so_far.perplexity()));
    };
    let mut this = Cancellable(model.session()?);
    let result = match &args.against {
        None => eval::perplexity(&windows, &mut this, progress).map(|p| (p, None)),
        Some(path) => {
            let reference = load(path, threads, false)?;
            same_vocabulary(&model, &reference)?;
            let mut reference = Cancellable(reference.session()?);
            eval::compare(&windows, &mut reference, &mut this, progress).map(|c| (c.this, Some(c)))
        }
    };
    bar.finish_and_clear();
    if interrupt::flag().load(Ordering::Relaxed) {
        return Err(CliError::Interrupted);
    }
    let (this, comparison) = result?;
    report(args, &this, comparison.as_ref(), tokens.len())
}

fn tokens(tokenizer: &Tokenizer, text: &str, args: &Args) -> Result<Vec<TokenId>, CliError> {
    let mut tokens = tokenizer.encode(text)?;
    if let Some(windows) = args.windows {
        let most = windows.saturating_sub(1).saturating_mul(args.stride).saturating_add(args.context);
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
        this.artifact().path().display(),
        this.vocab(),
        reference.artifact().path().display(),
        reference.vocab()
    )))
}

/// A session that fails once Ctrl-C was pressed.
struct Cancellable(Session);

impl WindowModel for Cancellable {
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn window_logits(&mut self, tokens: &[TokenId]) -> Result<&[f32], Self::Error> {
        if interrupt::flag().load(Ordering::Relaxed) {
            return Err("interrupted".into());
        }
        Ok(WindowModel::window_logits(&mut self.0, tokens)?)
    }
}

fn report(
    args: &Args,
    this: &Perplexity,
    comparison: Option<&eval::Comparison>,
    tokens: usize,
) -> Result<(), CliError> {
    if args.json {
        return print_json(&json!({
            "perplexity": this.perplexity(),
            "mean_nll": this.mean_nll(),
            "tokens": this.tokens_scored,
            "text_tokens": tokens,
            "windows": this.windows,
            "context": args.context,
            "stride": args.stride,
            "reference_perplexity": comparison.map(|c| c.reference.perplexity()),
            "kl_divergence": comparison.map(|c| c.kl_divergence),
            "kl_max": comparison.map(|c| c.kl_max),
            "same_top_token": comparison.map(|c| c.same_top_token),
        }));
    }
    let mut out = format!(
        "perplexity {:.4} over {} tokens in {} windows\n",
        this.perplexity(),
        this.tokens_scored,
        this.windows
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

//! Flags for drafts of what a text says next.

use std::path::{Path, PathBuf};

use mlcc_engine::serving::CompiledModelRunner;
use mlcc_engine::speculate::{DraftModel, Drafter, MakeDrafter, NgramDrafter};
use mlcc_engine::{can_draft, is_batch_invariant, takes_drafts};
use mlcc_runtime::Model;
use mlcc_text::{TokenId, Tokenizer};

use crate::commands::{ThreadArgs, load_beside, run};
use crate::error::CliError;

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Drafts, which change no text but its speed")]
pub(crate) struct SpeculationArgs {
    /// Draft the tokens that followed an earlier occurrence of the last tokens
    #[arg(long, value_enum, value_name = "HOW", conflicts_with = "draft")]
    speculate: Option<SpeculateArg>,
    /// Draft with this smaller compiled model, which has the same vocabulary
    #[arg(long, value_name = "FILE")]
    draft: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum SpeculateArg {
    Ngram,
}

/// The drafter.
pub(crate) struct DraftSource {
    pub make_drafter: MakeDrafter,
    /// The model that does.
    pub model: Option<Model>,
}

impl SpeculationArgs {
    /// The drafter for `model`, if one is requested.
    pub(crate) fn drafter(
        &self,
        model: &Model,
        tokenizer: &Tokenizer,
        threads: &ThreadArgs,
    ) -> Result<Option<DraftSource>, CliError> {
        let flag = match (self.speculate, &self.draft) {
            (None, None) => return Ok(None),
            (Some(SpeculateArg::Ngram), _) => "--speculate ngram",
            (None, Some(_)) => "--draft",
        };
        check_rollback(flag, model)?;
        check_equal_bits(flag, model)?;
        let Some(path) = &self.draft else {
            let make: MakeDrafter = Box::new(|| Box::new(NgramDrafter) as Box<dyn Drafter>);
            return Ok(Some(DraftSource { make_drafter: make, model: None }));
        };
        let small = load_beside(model.workers(), path, threads, None)?;
        check_chunk(&small)?;
        same_vocabulary(path, &small, model, tokenizer)?;
        let step = CompiledModelRunner::new(&small)?;
        let make: MakeDrafter = Box::new(|| Box::new(DraftModel::new(step)) as Box<dyn Drafter>);
        Ok(Some(DraftSource { make_drafter: make, model: Some(small) }))
    }
}

fn check_rollback(flag: &str, model: &Model) -> Result<(), CliError> {
    if takes_drafts(model) {
        return Ok(());
    }
    Err(CliError::Failed(format!(
        "{flag}: {} cannot roll back tokens, because it has a recurrent state, a window, or reads prompts at once: \
         leave the flag out",
        model.artifact().path().display()
    )))
}

/// Checks that the model can draft: it computes a few tokens at a time.
fn check_chunk(small: &Model) -> Result<(), CliError> {
    if can_draft(small) {
        return Ok(());
    }
    Err(CliError::Failed(format!(
        "--draft {}: it reads a text only as a whole, or otherwise at another length: draft with another model",
        small.artifact().path().display()
    )))
}

/// Drafts are checked in rows of their own, whose logits must be those of single tokens.
fn check_equal_bits(flag: &str, model: &Model) -> Result<(), CliError> {
    if is_batch_invariant(model) {
        return Ok(());
    }
    Err(CliError::Failed(format!(
        "{flag}: with {} drafts could change the text, because several tokens at once have other last bits than one after the \
         other: build it with --batch-invariant",
        model.artifact().path().display()
    )))
}

/// Drafts are token ids: the same one must be the same text in both models.
fn same_vocabulary(path: &Path, small: &Model, model: &Model, tokenizer: &Tokenizer) -> Result<(), CliError> {
    let (expected, found) = (model.vocab(), small.vocab());
    let refuse = |what: String| Err(CliError::Failed(format!("--draft {}: {what}", path.display())));
    if expected != found {
        return refuse(format!("it has a vocabulary of {found} tokens, the model has {expected}"));
    }
    let of_small = run::tokenizer(small, None)?;
    let ids = 0..TokenId::try_from(expected).unwrap_or(TokenId::MAX);
    match ids.into_iter().find(|&id| of_small.bytes_of(id) != tokenizer.bytes_of(id)) {
        Some(id) => refuse(format!("its token {id} is another text than the model's")),
        None => Ok(()),
    }
}

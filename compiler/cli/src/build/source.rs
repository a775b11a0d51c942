//! The input of a build: configuration, weights (opened, not read), tokenizer.

use mlcc_engine::ChatSource;
use mlcc_models::resolve::resolve;
use mlcc_models::{Checkpoint, ResolvedModel};

use super::text_files::{self, SourceTokenizer};
use super::{BuildError, BuildOptions};

pub struct Source {
    pub model: ResolvedModel,
    pub checkpoint: Checkpoint,
    /// Positions that caches get room for.
    pub context: usize,
    pub tokenizer: Option<SourceTokenizer>,
    /// `generation_config.json` as it is.
    pub generation_config: Option<Vec<u8>>,
    pub chat: Option<ChatSource>,
    /// What was left out, and why.
    pub warnings: Vec<String>,
}

impl Source {
    /// Finds and opens everything and holds it against each other: tensors against the configuration, the tokenizer
    /// against the vocabulary.
    pub fn open(options: &BuildOptions) -> Result<Source, BuildError> {
        let model = resolve(&options.request)?;
        let checkpoint = model.open_weights()?;
        let context = context(&model, options)?;
        let generation_config = text_files::read(model.files.generation_config.as_deref())?;
        let tokenizer = text_files::tokenizer(&model, &checkpoint, options, generation_config.as_deref())?;
        let mut warnings = Vec::new();
        let chat = text_files::chat(&model, &checkpoint, tokenizer.as_ref(), &mut warnings)?;
        Ok(Source { model, checkpoint, context, tokenizer, generation_config, chat, warnings })
    }

    /// Most tokens of one sequence; `None` = no limit (recurrent models, unless one was asked for).
    pub fn context_limit(&self, options: &BuildOptions) -> Option<u64> {
        match self.model.config.architecture.has_cache() {
            true => Some(self.context as u64),
            false => options.context,
        }
    }
}

/// What was asked for, within what the model was trained with.
fn context(model: &ResolvedModel, options: &BuildOptions) -> Result<usize, BuildError> {
    let architecture = &model.config.architecture;
    let trained = architecture.context_length();
    match options.context {
        None => Ok(architecture.default_context()),
        Some(asked) if architecture.has_cache() && asked > trained as u64 => {
            Err(BuildError::Context { asked, trained, origin: model.config.origin.clone() })
        }
        Some(asked) => Ok(usize::try_from(asked).unwrap_or(usize::MAX)),
    }
}

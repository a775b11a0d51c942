//! The input of a build: configuration, weights (opened, not read), tokenizer.

use mlcc_engine::special::SpecialSources;
use mlcc_engine::{SpecialIds, Tokenizer, TokenizerFile};
use mlcc_models::resolve::resolve;
use mlcc_models::{Checkpoint, ResolvedModel};

use super::{BuildError, BuildOptions};

pub struct Source {
    pub model: ResolvedModel,
    pub checkpoint: Checkpoint,
    /// Positions that caches get room for.
    pub context: usize,
    pub tokenizer: Option<SourceTokenizer>,
    /// `generation_config.json` as it is.
    pub generation_config: Option<Vec<u8>>,
    pub chat_template: Option<Vec<u8>>,
}

pub struct SourceTokenizer {
    pub file: TokenizerFile,
    pub tokenizer: Tokenizer,
    pub special: SpecialIds,
}

impl Source {
    /// Finds and opens everything and holds it against each other: tensors against the configuration, the tokenizer
    /// against the vocabulary.
    pub fn open(options: &BuildOptions) -> Result<Source, BuildError> {
        let model = resolve(&options.request)?;
        let checkpoint = model.open_weights()?;
        let context = context(&model, options)?;
        let generation_config = read(model.files.generation_config.as_deref())?;
        let chat_template = read(model.files.chat_template.as_deref())?;
        let tokenizer = tokenizer(&model, options, generation_config.as_deref())?;
        Ok(Source { model, checkpoint, context, tokenizer, generation_config, chat_template })
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

fn tokenizer(
    model: &ResolvedModel,
    options: &BuildOptions,
    generation_config: Option<&[u8]>,
) -> Result<Option<SourceTokenizer>, BuildError> {
    let beside = model.files.tokenizer_json.as_ref().or(model.files.rwkv_vocab.as_ref());
    let Some(path) = options.tokenizer.as_ref().or(beside) else { return Ok(None) };
    let file = TokenizerFile::read(path)?;
    let tokenizer = file.load()?;
    tokenizer.check_vocab(model.config.architecture.vocab())?;
    let config = serde_json::to_vec(&model.config.raw).unwrap_or_default();
    let tokenizer_config = read(model.files.tokenizer_config.as_deref())?;
    let sources = SpecialSources {
        generation_config,
        config: Some(&config),
        tokenizer_config: tokenizer_config.as_deref(),
    };
    let special = SpecialIds::resolve(&tokenizer, sources)?;
    Ok(Some(SourceTokenizer { file, tokenizer, special }))
}

fn read(path: Option<&std::path::Path>) -> Result<Option<Vec<u8>>, BuildError> {
    let Some(path) = path else { return Ok(None) };
    let bytes = std::fs::read(path);
    bytes.map(Some).map_err(|source| BuildError::Io { action: "read", path: path.to_path_buf(), source })
}

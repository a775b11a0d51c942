//! Tokenizer and chat template of a model: found, loaded, held against the model's vocabulary.

use std::path::Path;

use mlcc_engine::chat::{BuiltinFormat, ChatFiles};
use mlcc_engine::special::SpecialSources;
use mlcc_engine::{ChatSource, SpecialIds, Tokenizer, TokenizerFile, TokenizerKind};
use mlcc_models::ResolvedModel;

use super::{BuildError, BuildOptions};

pub struct SourceTokenizer {
    pub file: TokenizerFile,
    pub tokenizer: Tokenizer,
    pub special: SpecialIds,
}

/// The tokenizer that the user named, or the one beside the model.
pub(super) fn tokenizer(
    model: &ResolvedModel,
    options: &BuildOptions,
    generation_config: Option<&[u8]>,
) -> Result<Option<SourceTokenizer>, BuildError> {
    let Some(file) = tokenizer_file(model, options)? else { return Ok(None) };
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

fn tokenizer_file(
    model: &ResolvedModel,
    options: &BuildOptions,
) -> Result<Option<TokenizerFile>, BuildError> {
    if let Some(path) = &options.tokenizer {
        return Ok(Some(TokenizerFile::read(path)?));
    }
    for dir in &model.files.directories {
        if let Some(file) = TokenizerFile::find_in(dir)? {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// The chat template of the model's files, else the format that belongs to its kind. A template that is no valid one is
/// left out with a warning: the model can be used without it.
pub(super) fn chat(
    model: &ResolvedModel,
    tokenizer: Option<&SourceTokenizer>,
    warnings: &mut Vec<String>,
) -> Result<Option<ChatSource>, BuildError> {
    let files = &model.files;
    let jinja = read(files.chat_template.as_deref())?;
    let tokenizer_config = read(files.tokenizer_config.as_deref())?;
    let json = read(files.chat_template_json.as_deref())?;
    let special_tokens_map = read(files.special_tokens_map.as_deref())?;
    let found = ChatSource::from_files(ChatFiles {
        chat_template_jinja: jinja.as_deref(),
        tokenizer_config: tokenizer_config.as_deref(),
        chat_template_json: json.as_deref(),
        special_tokens_map: special_tokens_map.as_deref(),
    })?;
    let Some(source) = found.or_else(|| builtin(model, tokenizer).map(ChatSource::builtin)) else {
        return Ok(None);
    };
    match source.compile() {
        Ok(_) => Ok(Some(source)),
        Err(error) => {
            warnings.push(format!("the artifact gets no chat template: {error}"));
            Ok(None)
        }
    }
}

/// The format of models whose code has one.
fn builtin(model: &ResolvedModel, tokenizer: Option<&SourceTokenizer>) -> Option<BuiltinFormat> {
    let raw = &model.config.raw;
    let name = raw.get("_name_or_path").and_then(|name| name.as_str()).unwrap_or("");
    match model.config.model_type.as_str() {
        "chatglm" if raw.contains_key("position_encoding_2d") => Some(BuiltinFormat::ChatGlm6b),
        "chatglm" if name.contains("chatglm3") => Some(BuiltinFormat::ChatGlm3),
        "chatglm" => Some(BuiltinFormat::ChatGlm2),
        _ if tokenizer.is_some_and(|t| t.file.kind == TokenizerKind::RwkvWorld) => {
            Some(BuiltinFormat::RwkvWorld)
        }
        _ => None,
    }
}

pub(super) fn read(path: Option<&Path>) -> Result<Option<Vec<u8>>, BuildError> {
    let Some(path) = path else { return Ok(None) };
    let bytes = std::fs::read(path);
    bytes.map(Some).map_err(|source| BuildError::Io { action: "read", path: path.to_path_buf(), source })
}

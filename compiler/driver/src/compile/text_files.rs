//! Tokenizer and chat template of a model: found, loaded, compared with the model's vocabulary.

use std::collections::BTreeMap;
use std::path::Path;

use mlcc_engine::{GenerationConfig, LocalMachine};
use mlcc_models::checkpoint::gguf::GgufMetadata;
use mlcc_models::{Checkpoint, CheckpointError, ModelError, PoolingHead, PoolingOutput, ResolvedModel};
use mlcc_text::chat::{BuiltinFormat, ChatFiles};
use mlcc_text::special_tokens::SpecialSources;
use mlcc_text::tokenizer::{GgufVocabulary, TokenizerError};
use mlcc_text::{ChatSource, SpecialIds, TokenId, Tokenizer, TokenizerFile, TokenizerKind};

use super::{BuildError, BuildOptions};

pub struct SourceTokenizer {
    pub file: TokenizerFile,
    pub tokenizer: Tokenizer,
    pub special: SpecialIds,
    /// Special tokens by the names under which templates find them.
    pub names: BTreeMap<String, String>,
}

/// The tokenizer that the user named, or the one beside the model.
pub(super) fn resolve_tokenizer(
    model: &ResolvedModel,
    checkpoint: &Checkpoint,
    options: &BuildOptions,
    generation_config: Option<&[u8]>,
) -> Result<Option<SourceTokenizer>, BuildError> {
    let Some(file) = tokenizer_file(model, checkpoint, options)? else { return Ok(None) };
    let tokenizer = file.load()?;
    tokenizer.check_vocab(model.config.architecture.vocab())?;
    let config = serde_json::to_vec(&model.config.raw).unwrap_or_default();
    let tokenizer_config = read(model.files.tokenizer_config.as_deref())?;
    let sources = SpecialSources {
        generation_config,
        config: Some(&config),
        tokenizer_config: tokenizer_config.as_deref(),
    };
    if let Some(bytes) = generation_config {
        GenerationConfig::from_json("generation_config.json", bytes)?;
    }
    let special = SpecialIds::resolve(&tokenizer, sources)?;
    let names = special_names(model, checkpoint, &tokenizer, &special)?;
    Ok(Some(SourceTokenizer { file, tokenizer, special, names }))
}

/// Special tokens by the names under which templates find them: those of the GGUF file, of the model's files,
/// or by their ids.
fn special_names(
    model: &ResolvedModel,
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    special: &SpecialIds,
) -> Result<BTreeMap<String, String>, BuildError> {
    let mut names = gguf_tokens(&checkpoint.metadata).map_err(ModelError::from)?;
    if names.is_empty() {
        let tokenizer_config = read(model.files.tokenizer_config.as_deref())?;
        let special_tokens_map = read(model.files.special_tokens_map.as_deref())?;
        names = ChatSource::tokens_from_files(ChatFiles {
            tokenizer_config: tokenizer_config.as_deref(),
            special_tokens_map: special_tokens_map.as_deref(),
            ..ChatFiles::default()
        })?;
    }
    if names.is_empty() {
        let ids = [("bos_token", special.bos), ("eos_token", special.eos.first().copied())];
        let text = |id: Option<TokenId>| String::from_utf8(tokenizer.bytes_of(id?)?.to_vec()).ok();
        names.extend(ids.into_iter().filter_map(|(name, id)| Some((name.to_owned(), text(id)?))));
    }
    Ok(names)
}

fn tokenizer_file(
    model: &ResolvedModel,
    checkpoint: &Checkpoint,
    options: &BuildOptions,
) -> Result<Option<TokenizerFile>, BuildError> {
    if let Some(path) = &options.tokenizer {
        return Ok(Some(TokenizerFile::read(path, &LocalMachine)?));
    }
    if let Some(vocabulary) = gguf_vocabulary(&checkpoint.metadata).map_err(ModelError::from)? {
        let file = vocabulary.to_file(Path::new(&checkpoint.origin));
        return Ok(Some(file.map_err(with_near_names)?));
    }
    for dir in &model.files.directories {
        if let Some(file) = TokenizerFile::find_in(dir, &LocalMachine)? {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

/// The error of a name that no pre-tokenizer has, with names near it.
fn with_near_names(error: TokenizerError) -> TokenizerError {
    match error {
        TokenizerError::PreTokenizer { name, .. } => {
            let near = mlcc_files::did_you_mean(&name, GgufVocabulary::pre_tokenizers());
            TokenizerError::PreTokenizer { name, near }
        }
        other => other,
    }
}

/// The tokenizer in a GGUF file's metadata.
fn gguf_vocabulary(metadata: &GgufMetadata) -> Result<Option<GgufVocabulary>, CheckpointError> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let Some(model) = metadata.string(&key("model"))? else { return Ok(None) };
    let id = |name: &str| -> Result<Option<u32>, CheckpointError> {
        Ok(metadata.number(&key(name))?.and_then(|id| u32::try_from(id).ok()))
    };
    let bytes = |list: Vec<i64>| list.into_iter().map(|byte| byte as u8).collect();
    Ok(Some(GgufVocabulary {
        model: model.to_owned(),
        pre: metadata.string(&key("pre"))?.map(str::to_owned),
        tokens: metadata.strings(&key("tokens"))?.to_vec(),
        scores: metadata.floats(&key("scores"))?.iter().map(|&score| score as f32).collect(),
        token_types: metadata.integers(&key("token_type"))?.into_iter().map(|kind| kind as i32).collect(),
        merges: metadata.strings(&key("merges"))?.to_vec(),
        bos_token_id: id("bos_token_id")?,
        eos_token_id: id("eos_token_id")?,
        unknown_token_id: id("unknown_token_id")?,
        cls_token_id: id("cls_token_id")?,
        // Names in the spelling of the files.
        separator_token_id: id("seperator_token_id")?,
        add_bos_token: metadata.flag(&key("add_bos_token"))?,
        add_eos_token: metadata.flag(&key("add_eos_token"))?,
        add_sep_token: metadata.flag(&key("add_sep_token"))?,
        add_space_prefix: metadata.flag(&key("add_space_prefix"))?,
        remove_extra_whitespaces: metadata.flag(&key("remove_extra_whitespaces"))?,
        precompiled_charsmap: bytes(metadata.integers(&key("precompiled_charsmap"))?),
    }))
}

/// The chat templates in a GGUF file's metadata, with the names of the special tokens.
fn gguf_chat(metadata: &GgufMetadata) -> Result<Option<ChatSource>, CheckpointError> {
    const KEY: &str = "tokenizer.chat_template";
    let Some(default) = metadata.string(KEY)? else { return Ok(None) };
    let mut source = ChatSource::jinja(default);
    for name in metadata.strings("tokenizer.chat_templates")? {
        if let Some(text) = metadata.string(&format!("{KEY}.{name}"))? {
            source = source.with_template(name, text);
        }
    }
    Ok(Some(source.with_tokens(gguf_tokens(metadata)?)))
}

/// The names of the special tokens in a GGUF file's metadata.
fn gguf_tokens(metadata: &GgufMetadata) -> Result<BTreeMap<String, String>, CheckpointError> {
    let tokens = metadata.strings("tokenizer.ggml.tokens")?;
    let mut names = BTreeMap::new();
    for (token, key) in
        [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")]
    {
        let id = metadata.number(&format!("tokenizer.ggml.{key}_token_id"))?;
        let text = id.and_then(|id| tokens.get(usize::try_from(id).ok()?));
        names.extend(text.map(|text| (token.to_owned(), text.clone())));
    }
    Ok(names)
}

/// The chat template that the user named, that of the model's files, or the format that belongs to its kind.
/// One of the files that is no valid template is left out with a warning: the model can be used without it.
pub(super) fn resolve_chat_template(
    model: &ResolvedModel,
    checkpoint: &Checkpoint,
    options: &BuildOptions,
    tokenizer: Option<&SourceTokenizer>,
    warnings: &mut Vec<String>,
) -> Result<Option<ChatSource>, BuildError> {
    let files = &model.files;
    let jinja = read(files.chat_template.as_deref())?;
    let tokenizer_config = read(files.tokenizer_config.as_deref())?;
    let json = read(files.chat_template_json.as_deref())?;
    let special_tokens_map = read(files.special_tokens_map.as_deref())?;
    let found = match gguf_chat(&checkpoint.metadata).map_err(ModelError::from)? {
        Some(source) => Some(source),
        None => ChatSource::from_files(ChatFiles {
            chat_template_jinja: jinja.as_deref(),
            tokenizer_config: tokenizer_config.as_deref(),
            chat_template_json: json.as_deref(),
            special_tokens_map: special_tokens_map.as_deref(),
        })?,
    };
    let tokens = || tokenizer.map(|tokenizer| tokenizer.names.clone()).unwrap_or_default();
    let named = options.template.as_ref().map(|template| template.clone().with_tokens(tokens()));
    if let Some(head) =
        model.config.architecture.pooling_head().filter(|head| head.output == PoolingOutput::Scores)
    {
        return resolve_pair_template(model, head, named, found);
    }
    if let Some(source) = named {
        source.compile(&LocalMachine)?;
        return Ok(Some(source));
    }
    let Some(source) = found.or_else(|| builtin_format(model, tokenizer).map(ChatSource::builtin)) else {
        return Ok(None);
    };
    match source.compile(&LocalMachine) {
        Ok(_) => Ok(Some(source)),
        Err(error) => {
            warnings.push(format!("the artifact gets no chat template: {error}"));
            Ok(None)
        }
    }
}

/// The way in which a reranker gets a query and a document: by a template that takes them, else by the
/// tokenizer alone (`None`). One that answers with a token needs a template.
fn resolve_pair_template(
    model: &ResolvedModel,
    head: &PoolingHead,
    named: Option<ChatSource>,
    found: Option<ChatSource>,
) -> Result<Option<ChatSource>, BuildError> {
    let refused = |what: &str| {
        let roles = "the messages of roles `query` and `document` that a pair of a reranker consists of";
        Err(BuildError::Unsupported(format!("{what} {roles}")))
    };
    if let Some(source) = named {
        return match source.compile(&LocalMachine)?.takes_pairs() {
            true => Ok(Some(source)),
            false => refused("--template: this template does not write"),
        };
    }
    if let Some(source) = found
        && source.compile(&LocalMachine).is_ok_and(|template| template.takes_pairs())
    {
        return Ok(Some(source));
    }
    let answers = head.answer_tokens().next().is_some();
    match model.config.model_type.as_str() {
        _ if !answers => Ok(None),
        QWEN3 => Ok(Some(ChatSource::qwen3_reranker())),
        _ => refused("the model's chat template does not write: name one with --template that does, with"),
    }
}

const QWEN3: &str = "qwen3";

/// Makes a reranker of a model that answers with one of two tokens, where that was asked for. The files of
/// Qwen3-Reranker do not differ from those of a chat model, but its name does.
pub(super) fn answer_with_tokens(
    model: &mut ResolvedModel,
    options: &BuildOptions,
    tokenizer: Option<&SourceTokenizer>,
) -> Result<(), BuildError> {
    let architecture = &model.config.architecture;
    let named = model.config.model_type == QWEN3 && model.name.to_lowercase().contains("reranker");
    let usual = ["yes".to_string(), "no".to_string()];
    let answers = match &options.answers {
        None if !named || architecture.pooling_head().is_some() => return Ok(()),
        // Nothing else could be done with the name alone.
        None if tokenizer.is_none() => return Ok(()),
        None => &usual,
        Some(answers) => answers,
    };
    let refused =
        |what: String| Err(BuildError::Unsupported(format!("--rerank-by {}: {what}", answers.join(","))));
    if architecture.pooling_head().is_some() || !architecture.supports_pooling() {
        return refused(format!(
            "the model_type `{}` does not answer with tokens, or is a reranker already",
            model.config.model_type
        ));
    }
    let Some(tokenizer) = tokenizer else {
        return refused("no tokenizer has the two tokens".into());
    };
    let mut ids = [0; 2];
    for (id, answer) in ids.iter_mut().zip(answers) {
        match tokenizer.tokenizer.encode(answer)?[..] {
            [token] => *id = token as usize,
            ref tokens => return refused(format!("`{answer}` is {} tokens, it has to be one", tokens.len())),
        }
    }
    let head = PoolingHead::token_score(ids[0], Some(ids[1]));
    model.config.architecture = architecture.clone().with_pooling_head(Some(head));
    Ok(())
}

/// The format of models whose code has one.
fn builtin_format(model: &ResolvedModel, tokenizer: Option<&SourceTokenizer>) -> Option<BuiltinFormat> {
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
    let bytes = mlcc_files::read(path, mlcc_files::FileKind::Config);
    bytes.map(Some).map_err(|source| BuildError::Io { action: "read", path: path.to_path_buf(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_near_a_pre_tokenizer_are_offered() {
        let error = |name: &str| {
            with_near_names(TokenizerError::PreTokenizer { name: name.into(), near: String::new() })
        };
        let text = error("qwen-2").to_string();
        assert!(text.contains("`qwen-2` is not supported: did you mean `qwen2`"), "{text}");
        assert!(error("elvish").to_string().contains("`elvish` is not supported: docs/"));
    }
}

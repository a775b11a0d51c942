//! The files of sentence-transformers beside a model, which say what is made of the hidden states of a text: `modules.json`
//! with the order of parts, a config.json for each, and `config_sentence_transformers.json` with prompts.

use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::layers::ActivationFunction;
use crate::pooling_head::{POOLINGS, PoolingHead, PoolingMode, PoolingOutput, PoolingStep};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// What the files say.
#[derive(Clone, Debug, PartialEq)]
pub struct SentenceTransformerConfig {
    pub head: PoolingHead,
    /// Directories of parts with weights of their own, and what their tensors' names begin with.
    pub weights: Vec<(String, PathBuf)>,
    pub prompts: PromptPrefixes,
}

/// Texts that are put before a text, by what it is (`query`, `document`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptPrefixes {
    /// In the order of the file.
    pub named: Vec<(String, String)>,
    /// The one that is used where none is asked for.
    pub default: Option<String>,
    /// Whether a pair that is written as a chat ends where the answer begins.
    pub opens_answer: bool,
}

/// Reads them; `None` where the directory has no modules.json.
pub fn read_sentence_transformer(dir: &Path) -> Result<Option<SentenceTransformerConfig>, ConfigError> {
    let path = dir.join("modules.json");
    if !mlcc_files::is_file(&path)? {
        return Ok(None);
    }
    let label = path.display().to_string();
    let bytes = mlcc_files::read(&path, mlcc_files::FileKind::Config)
        .map_err(|source| ConfigError::Io { file: label.clone(), source })?;
    let json: Value = serde_json::from_slice(&bytes)
        .map_err(|e| ConfigError::Json { file: label.clone(), detail: e.to_string() })?;
    let form = |detail: &str| ConfigError::Form {
        file: label.clone(),
        what: "list of modules of sentence-transformers",
        detail: detail.to_string(),
    };
    let modules = json.as_array().ok_or_else(|| form("it is no list"))?;
    let (mut pooling, mut answer, mut parts, mut weights) = (None, None, Vec::new(), Vec::new());
    for module in modules {
        let text = |key: &str| module.get(key).and_then(Value::as_str);
        let kind = text("type").ok_or_else(|| form("a module has no `type`"))?;
        let folder = text("path").unwrap_or("");
        let is_part = !folder.is_empty() && folder != "." && folder != ".." && !folder.contains(['/', '\\']);
        // Newer releases have longer names of classes; the last part is the same.
        match kind.rsplit('.').next().unwrap_or(kind) {
            "Transformer" if folder.is_empty() => {}
            "LogitScore" if is_part && answer.is_none() && pooling.is_none() && parts.is_empty() => {
                answer = Some(read_answer(&dir.join(folder))?);
            }
            "Pooling" if is_part && answer.is_none() && pooling.is_none() && parts.is_empty() => {
                pooling = Some(read_pooling(&dir.join(folder))?);
            }
            "Dense" if is_part && answer.is_none() => {
                let name = format!("{folder}.linear");
                parts.extend(read_dense(&dir.join(folder), name)?);
                weights.push((folder.to_string(), dir.join(folder)));
            }
            "Normalize" if answer.is_none() => parts.push(PoolingStep::Normalize),
            _ => {
                return Err(ConfigError::NotSupportedYet {
                    file: label.clone(),
                    what: format!("the module `{kind}` in `{folder}`"),
                    supported:
                        "a Transformer in the folder itself, then one Pooling, then Dense and Normalize; or LogitScore alone"
                            .to_string(),
                });
            }
        }
    }
    let head = match (answer, pooling) {
        (Some(head), _) => head,
        (None, Some(pooling)) => PoolingHead { pooling, steps: parts, output: PoolingOutput::Embedding },
        (None, None) => return Err(form("there is no module for pooling")),
    };
    let prompts = PromptPrefixes { opens_answer: read_opens_answer(dir)?, ..read_prompts(dir)? };
    Ok(Some(SentenceTransformerConfig { head, weights, prompts }))
}

fn read_answer(dir: &Path) -> Result<PoolingHead, ConfigError> {
    let fields = ConfigFields::read(&dir.join("config.json"))?;
    let token = |field: &str| match fields.get(field) {
        None => Err(fields.missing_field(field, "the id of a token")),
        Some(_) => fields.count_or(field, 0),
    };
    let no = fields.get("false_token_id").map(|_| token("false_token_id")).transpose()?;
    Ok(PoolingHead::token_score(token("true_token_id")?, no))
}

/// What is passed to the chat template of a pair.
fn read_opens_answer(dir: &Path) -> Result<bool, ConfigError> {
    let path = dir.join("sentence_bert_config.json");
    if !mlcc_files::is_file(&path)? {
        return Ok(false);
    }
    let Some(how) = ConfigFields::read(&path)?.nested_object("processing_kwargs")? else { return Ok(false) };
    match how.nested_object("chat_template")? {
        None => Ok(false),
        Some(template) => template.flag_or("add_generation_prompt", false),
    }
}

fn read_pooling(dir: &Path) -> Result<PoolingMode, ConfigError> {
    let fields = ConfigFields::read(&dir.join("config.json"))?;
    if fields.get("pooling_mode").is_some() {
        let name = fields.string("pooling_mode")?;
        return PoolingMode::from_name(&name).ok_or_else(|| unknown_pooling(&fields, &name));
    }
    let mut found = None;
    for (field, value) in &fields.raw {
        let Some(name) = field.strip_prefix("pooling_mode_") else { continue };
        if *value != Value::Bool(true) {
            continue;
        }
        let name = name.strip_suffix("_token").or(name.strip_suffix("_tokens")).unwrap_or(name);
        let pooling = PoolingMode::from_name(name).ok_or_else(|| unknown_pooling(&fields, field))?;
        if found.replace(pooling).is_some() {
            return Err(unknown_pooling(&fields, "two at once"));
        }
    }
    found.ok_or_else(|| {
        fields.missing_field("pooling_mode_mean_tokens", "true in it, or in another field of this kind")
    })
}

fn unknown_pooling(fields: &ConfigFields, what: &str) -> ConfigError {
    ConfigError::NotSupportedYet {
        file: fields.origin.clone(),
        what: format!("pooling `{what}`"),
        supported: POOLINGS.map(|(name, _)| name).join(", "),
    }
}

/// The linear layer, and the activation if there is one.
fn read_dense(dir: &Path, name: String) -> Result<Vec<PoolingStep>, ConfigError> {
    let fields = ConfigFields::read(&dir.join("config.json"))?;
    let mut parts = vec![PoolingStep::Linear {
        name,
        out: fields.size("out_features")?,
        bias: fields.flag_or("bias", true)?,
    }];
    let field = "activation_function";
    let activation = match fields.get(field) {
        None => "torch.nn.modules.activation.Tanh".to_string(),
        Some(_) => fields.string(field)?,
    };
    match activation.rsplit('.').next().unwrap_or_default() {
        "Identity" => {}
        "Tanh" => parts.push(PoolingStep::Tanh),
        "ReLU" => parts.push(PoolingStep::Activation(ActivationFunction::Relu)),
        "GELU" => parts.push(PoolingStep::Activation(ActivationFunction::Gelu)),
        "SiLU" => parts.push(PoolingStep::Activation(ActivationFunction::Silu)),
        _ => {
            let found = Value::from(activation);
            return Err(fields.invalid_value(
                field,
                "Identity, Tanh, ReLU, GELU or SiLU of torch.nn",
                &found,
            ));
        }
    }
    Ok(parts)
}

fn read_prompts(dir: &Path) -> Result<PromptPrefixes, ConfigError> {
    let path = dir.join("config_sentence_transformers.json");
    if !mlcc_files::is_file(&path)? {
        return Ok(PromptPrefixes::default());
    }
    let fields = ConfigFields::read(&path)?;
    let mut prompts = PromptPrefixes::default();
    if let Some(named) = fields.nested_object("prompts")? {
        for name in named.raw.keys() {
            prompts.named.push((name.clone(), named.string(name)?));
        }
    }
    if fields.get("default_prompt_name").is_some() {
        let name = fields.string("default_prompt_name")?;
        if !prompts.named.iter().any(|(known, _)| *known == name) {
            let found = Value::from(name);
            return Err(fields.invalid_value(
                "default_prompt_name",
                "the name of one of the prompts",
                &found,
            ));
        }
        prompts.default = Some(name);
    }
    Ok(prompts)
}

//! The list of model families that mlcc can build: one line per `model_type` of config.json.

use crate::config::{ConfigFields, Rwkv4Config};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::llama::LlamaConfig;
use crate::qwen2;

/// A model type and how its configuration is read.
pub struct Entry {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// Names in `architectures` of config.json that mean the same where `model_type` is absent or another.
    pub classes: &'static [&'static str],
    /// For people: `mlcc build --help`, error messages.
    pub about: &'static str,
    config: fn(&ConfigFields) -> Result<Architecture, ConfigError>,
}

/// Reads the configuration of one family.
type Reader = fn(&ConfigFields) -> Result<Architecture, ConfigError>;

const fn entry(
    model_type: &'static str,
    classes: &'static [&'static str],
    about: &'static str,
    config: Reader,
) -> Entry {
    Entry { model_type, classes, about, config }
}

pub const REGISTRY: &[Entry] = &[
    entry("rwkv", &["RwkvForCausalLM"], "RWKV-4", |f| Rwkv4Config::from_fields(f).map(Architecture::new)),
    entry("llama", &["LlamaForCausalLM", "LLaMAForCausalLM"], "Llama 1, 2, 3; Yi", |f| {
        LlamaConfig::from_fields(f).map(Architecture::new)
    }),
    entry("mistral", &["MistralForCausalLM"], "Mistral", |f| LlamaConfig::mistral(f).map(Architecture::new)),
    entry("internlm", &["InternLMForCausalLM"], "InternLM 1", |f| {
        LlamaConfig::internlm(f).map(Architecture::new)
    }),
    entry("qwen2", &["Qwen2ForCausalLM"], "Qwen 2, 2.5", |f| qwen2::from_fields(f).map(Architecture::new)),
];

/// Model types people are likely to bring that later versions will read.
const PLANNED: &[(&str, &str)] = &[("rwkv5", "RWKV-5"), ("rwkv6", "RWKV-6"), ("rwkv7", "RWKV-7")];

/// The model type and the configured model: by `model_type`, else by the class in `architectures`.
pub(crate) fn architecture(fields: &ConfigFields) -> Result<(String, Architecture), ConfigError> {
    let class = class_name(fields);
    let by_class = REGISTRY.iter().find(|e| class.is_some_and(|c| e.classes.contains(&c)));
    let model_type = match (fields.get("model_type"), by_class) {
        (None, Some(entry)) => entry.model_type.to_string(),
        _ => fields.string("model_type")?,
    };
    let by_type = REGISTRY.iter().find(|e| e.model_type == model_type);
    if let Some(entry) = by_type.or(by_class) {
        return Ok((model_type, (entry.config)(fields)?));
    }
    let file = fields.origin.clone();
    if let Some((_, about)) = PLANNED.iter().find(|(name, _)| *name == model_type) {
        return Err(ConfigError::NotSupportedYet { file, what: about.to_string(), supported: supported() });
    }
    Err(ConfigError::UnknownModelType { file, found: model_type, supported: supported() })
}

/// The first name in `architectures`.
fn class_name(fields: &ConfigFields) -> Option<&str> {
    fields.get("architectures")?.as_array()?.first()?.as_str()
}

/// All supported model types, for messages.
pub fn supported() -> String {
    let names: Vec<String> = REGISTRY.iter().map(|e| format!("{} ({})", e.model_type, e.about)).collect();
    names.join(", ")
}

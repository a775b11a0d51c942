//! The list of model types that mlcc can build: one line per `model_type` of config.json.

use crate::config::{Architecture, ConfigFields, Rwkv4Config};
use crate::error::ConfigError;

/// A model type and how its configuration is read.
pub struct Entry {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// For people: `mlcc build --help`, error messages.
    pub about: &'static str,
    config: fn(&ConfigFields) -> Result<Architecture, ConfigError>,
}

pub const REGISTRY: &[Entry] = &[Entry {
    model_type: "rwkv",
    about: "RWKV-4",
    config: |fields| Rwkv4Config::from_fields(fields).map(Architecture::Rwkv4),
}];

/// Model types people are likely to bring that later versions will read.
const PLANNED: &[(&str, &str)] = &[("rwkv5", "RWKV-5"), ("rwkv6", "RWKV-6"), ("rwkv7", "RWKV-7")];

pub(crate) fn architecture(model_type: &str, fields: &ConfigFields) -> Result<Architecture, ConfigError> {
    if let Some(entry) = REGISTRY.iter().find(|entry| entry.model_type == model_type) {
        return (entry.config)(fields);
    }
    let file = fields.origin.clone();
    if let Some((_, about)) = PLANNED.iter().find(|(name, _)| *name == model_type) {
        return Err(ConfigError::NotSupportedYet { file, what: about.to_string(), supported: supported() });
    }
    Err(ConfigError::UnknownModelType { file, found: model_type.to_string(), supported: supported() })
}

/// All supported model types, for messages.
pub fn supported() -> String {
    let names: Vec<String> = REGISTRY.iter().map(|e| format!("{} ({})", e.model_type, e.about)).collect();
    names.join(", ")
}

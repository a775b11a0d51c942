//! What a family hands to the rest: one row of data, in the file that has its graph.

use crate::checkpoint::gguf::GgufArchitecture;
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};

/// A model family: everything by which its checkpoints are known and read.
pub struct ModelFamily {
    /// One for each `model_type` of config.json.
    pub variants: &'static [FamilyVariant],
    /// The architectures of its GGUF files.
    pub gguf: &'static [GgufArchitecture],
}

/// A model type of a family and how its configuration is read.
pub struct FamilyVariant {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// Names in `architectures` of config.json that mean the same where `model_type` is absent or another.
    pub classes: &'static [&'static str],
    /// For people: `mlcc models`, error messages.
    pub about: &'static str,
    /// The configured model of the fields of config.json.
    pub(crate) read: fn(&ConfigFields) -> Result<Architecture, ConfigError>,
    /// Completes the fields that published files leave out by what the tensors tell.
    pub(crate) infer: fn(&mut ConfigEvidence) -> EvidenceResult,
    /// What becomes of each field of the configuration class of transformers.
    pub fields: PublishedFields,
}

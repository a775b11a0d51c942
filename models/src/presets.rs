//! Models whose configuration is known without files: the published RWKV series, by their sizes, and the transformers of
//! `presets/transformers.json`, by the fields of their config.json that matter.

use crate::config::ConfigFields;
use crate::config::sizes::{HIDDEN, LAYERS};
use crate::families::rwkv4::Rwkv4Config;
use crate::families::rwkv5::Rwkv5Config;
use crate::families::rwkv6::Rwkv6Config;
use crate::families::rwkv7::Rwkv7Config;
use crate::model_config::ModelConfig;
use crate::pooling_head::{PoolingHead, PoolingMode};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::sync::LazyLock;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preset {
    pub name: &'static str,
    /// The Hugging Face repository with the weights.
    pub repo: &'static str,
    pub layers: usize,
    pub hidden: usize,
    family: PresetSource,
}

/// What a size stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum PresetSource {
    Rwkv4Pile,
    Rwkv5World,
    Rwkv6World,
    Rwkv7World,
    /// A configuration as it is in config.json, and how rows are pooled where the model is one of embeddings.
    Fields(Map<String, Value>, Option<PoolingMode>),
}

/// Tokens of the GPT-NeoX tokenizer that the Pile series was trained with.
const PILE_VOCAB: usize = 50277;
/// Rows of the embedding of the World series.
const WORLD_VOCAB: usize = 65536;

const fn preset(
    name: &'static str,
    repo: &'static str,
    layers: usize,
    hidden: usize,
    family: PresetSource,
) -> Preset {
    Preset { name, repo, layers, hidden, family }
}

const RWKV: &[Preset] = &[
    preset("rwkv-169m", "RWKV/rwkv-4-169m-pile", 12, 768, PresetSource::Rwkv4Pile),
    preset("rwkv-430m", "RWKV/rwkv-4-430m-pile", 24, 1024, PresetSource::Rwkv4Pile),
    preset("rwkv-1.5b", "RWKV/rwkv-4-1b5-pile", 24, 2048, PresetSource::Rwkv4Pile),
    preset("rwkv-3b", "RWKV/rwkv-4-3b-pile", 32, 2560, PresetSource::Rwkv4Pile),
    preset("rwkv-7b", "RWKV/rwkv-4-7b-pile", 32, 4096, PresetSource::Rwkv4Pile),
    preset("rwkv-14b", "RWKV/rwkv-4-14b-pile", 40, 5120, PresetSource::Rwkv4Pile),
    preset("rwkv5-1.5b", "RWKV/rwkv-5-world-1b5", 24, 2048, PresetSource::Rwkv5World),
    preset("rwkv5-3b", "RWKV/rwkv-5-world-3b", 32, 2560, PresetSource::Rwkv5World),
    preset("rwkv5-7b", "RWKV/v5-Eagle-7B-HF", 32, 4096, PresetSource::Rwkv5World),
    preset("rwkv6-1.6b", "RWKV/rwkv-6-world-1b6", 24, 2048, PresetSource::Rwkv6World),
    preset("rwkv6-3b", "RWKV/rwkv-6-world-3b", 32, 2560, PresetSource::Rwkv6World),
    preset("rwkv6-7b", "RWKV/v6-Finch-7B-HF", 32, 4096, PresetSource::Rwkv6World),
    preset("rwkv7-0.1b", "fla-hub/rwkv7-191M-world", 12, 768, PresetSource::Rwkv7World),
    preset("rwkv7-0.4b", "fla-hub/rwkv7-0.4B-world", 24, 1024, PresetSource::Rwkv7World),
    preset("rwkv7-1.5b", "fla-hub/rwkv7-1.5B-world", 24, 2048, PresetSource::Rwkv7World),
    preset("rwkv7-2.9b", "fla-hub/rwkv7-2.9B-world", 32, 2560, PresetSource::Rwkv7World),
];

impl Preset {
    /// Case does not matter, and `1b5` is how the series themselves spell 1.5b.
    pub fn from_name(name: &str) -> Option<&'static Preset> {
        let name = name.to_ascii_lowercase().replace("1b5", "1.5b").replace("1b6", "1.6b");
        all_presets().find(|preset| preset.name == name)
    }

    pub fn model_config(&self) -> ModelConfig {
        let (hidden, layers) = (self.hidden, self.layers);
        let origin = format!("preset {}", self.name);
        let raw = match &self.family {
            PresetSource::Fields(raw, _) => raw.clone(),
            PresetSource::Rwkv4Pile => Rwkv4Config::of_size(PILE_VOCAB, hidden, layers).to_fields(),
            PresetSource::Rwkv5World => Rwkv5Config::of_size(WORLD_VOCAB, hidden, layers).to_fields(),
            PresetSource::Rwkv6World => Rwkv6Config::of_size(WORLD_VOCAB, hidden, layers).to_fields(),
            PresetSource::Rwkv7World => {
                let mut config = Rwkv7Config::of_size(WORLD_VOCAB, hidden, layers);
                if hidden == 1024 {
                    // The one published shape that departs from the rule.
                    config.gate_rank = 128;
                }
                config.to_fields()
            }
        };
        let config = ModelConfig::from_fields(ConfigFields { origin, raw });
        let config = config.expect("a test reads the configurations of all presets");
        let PresetSource::Fields(_, Some(pooling)) = &self.family else { return config };
        let head = PoolingHead::embedding(*pooling);
        ModelConfig { architecture: config.architecture.with_pooling_head(Some(head)), ..config }
    }
}

/// One line of `transformers.json`.
#[derive(Deserialize)]
struct PublishedPreset {
    name: &'static str,
    repo: &'static str,
    config: Map<String, Value>,
    /// As sentence-transformers names it.
    pooling: Option<&'static str>,
}

static TRANSFORMERS: LazyLock<Vec<Preset>> = LazyLock::new(|| {
    let published: Vec<PublishedPreset> =
        serde_json::from_str(include_str!("presets/transformers.json")).expect("a test reads it");
    let preset = |PublishedPreset { name, repo, config, pooling }| {
        let fields = ConfigFields { origin: name.to_string(), raw: config };
        let size = |names: &[&'static str]| {
            fields.size(fields.first_present(names)).expect("a test reads all sizes")
        };
        let (layers, hidden) = (size(&LAYERS), size(&HIDDEN));
        Preset {
            name,
            repo,
            layers,
            hidden,
            family: PresetSource::Fields(fields.raw, pooling.and_then(PoolingMode::from_name)),
        }
    };
    published.into_iter().map(preset).collect()
});

/// All presets, by family.
pub fn all_presets() -> impl Iterator<Item = &'static Preset> {
    RWKV.iter().chain(TRANSFORMERS.iter())
}

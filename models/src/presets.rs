//! Models whose configuration is known without files: the RWKV-4 "Pile" series as published.

use crate::config::{ModelConfig, Rwkv4Config};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    pub name: &'static str,
    /// The Hugging Face repository with the weights.
    pub repo: &'static str,
    pub layers: usize,
    pub hidden: usize,
}

/// Tokens of the GPT-NeoX tokenizer that the series was trained with.
const PILE_VOCAB: usize = 50277;

pub const PRESETS: &[Preset] = &[
    Preset { name: "rwkv-169m", repo: "RWKV/rwkv-4-169m-pile", layers: 12, hidden: 768 },
    Preset { name: "rwkv-430m", repo: "RWKV/rwkv-4-430m-pile", layers: 24, hidden: 1024 },
    Preset { name: "rwkv-1.5b", repo: "RWKV/rwkv-4-1b5-pile", layers: 24, hidden: 2048 },
    Preset { name: "rwkv-3b", repo: "RWKV/rwkv-4-3b-pile", layers: 32, hidden: 2560 },
    Preset { name: "rwkv-7b", repo: "RWKV/rwkv-4-7b-pile", layers: 32, hidden: 4096 },
    Preset { name: "rwkv-14b", repo: "RWKV/rwkv-4-14b-pile", layers: 40, hidden: 5120 },
];

impl Preset {
    /// Case does not matter, and `1b5` is how the series itself spells 1.5b.
    pub fn find(name: &str) -> Option<&'static Preset> {
        let name = name.to_ascii_lowercase().replace("1b5", "1.5b");
        PRESETS.iter().find(|preset| preset.name == name)
    }

    pub fn config(&self) -> ModelConfig {
        let config = Rwkv4Config::of_size(PILE_VOCAB, self.hidden, self.layers);
        ModelConfig::rwkv4(format!("preset {}", self.name), config)
    }
}

/// All names, for messages.
pub fn names() -> String {
    let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
    names.join(", ")
}

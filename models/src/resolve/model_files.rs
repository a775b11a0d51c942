//! The files beside the weights that are not weights. Only located here; what is in them is read elsewhere.

use std::path::{Path, PathBuf};

/// Paths of the files that exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFiles {
    pub generation_config: Option<PathBuf>,
    /// Hugging Face tokenizer.
    pub tokenizer_json: Option<PathBuf>,
    pub tokenizer_config: Option<PathBuf>,
    pub special_tokens_map: Option<PathBuf>,
    pub chat_template: Option<PathBuf>,
    /// RWKV World vocabulary, `rwkv_vocab_*.txt`.
    pub rwkv_vocab: Option<PathBuf>,
}

impl ModelFiles {
    /// Each file from the first directory that has it.
    pub fn in_directories<'a>(dirs: impl Iterator<Item = &'a PathBuf>) -> ModelFiles {
        let mut files = ModelFiles::default();
        for dir in dirs {
            let named = |name: &str| Some(dir.join(name)).filter(|path| path.is_file());
            let fill = |slot: &mut Option<PathBuf>, name: &str| {
                if slot.is_none() {
                    *slot = named(name);
                }
            };
            fill(&mut files.generation_config, "generation_config.json");
            // The Pile models of BlinkDL come with it under this name.
            fill(&mut files.tokenizer_json, "tokenizer.json");
            fill(&mut files.tokenizer_json, "20B_tokenizer.json");
            fill(&mut files.tokenizer_config, "tokenizer_config.json");
            fill(&mut files.special_tokens_map, "special_tokens_map.json");
            fill(&mut files.chat_template, "chat_template.jinja");
            if files.rwkv_vocab.is_none() {
                files.rwkv_vocab = rwkv_vocab_in(dir);
            }
        }
        files
    }
}

/// The newest vocabulary by its name, which carries the date.
fn rwkv_vocab_in(dir: &Path) -> Option<PathBuf> {
    let is_vocab = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        name.starts_with("rwkv_vocab_") && name.ends_with(".txt")
    };
    std::fs::read_dir(dir).ok()?.filter_map(|entry| Some(entry.ok()?.path())).filter(is_vocab).max()
}

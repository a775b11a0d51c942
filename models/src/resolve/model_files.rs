//! The files beside the weights that are not weights. Only located here; what is in them is read elsewhere.

use mlcc_files::DanglingLink;
use std::path::PathBuf;

/// Paths of the files that exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFiles {
    /// Where the files were looked for, best first; the tokenizer is found in the first of them that has one.
    pub directories: Vec<PathBuf>,
    pub generation_config: Option<PathBuf>,
    pub tokenizer_config: Option<PathBuf>,
    pub special_tokens_map: Option<PathBuf>,
    /// `chat_template.jinja`.
    pub chat_template: Option<PathBuf>,
    /// `chat_template.json`, the older form of it.
    pub chat_template_json: Option<PathBuf>,
    /// Text to measure the model on.
    pub eval_text: Option<PathBuf>,
}

impl ModelFiles {
    /// Each file from the first directory that has it.
    pub fn in_directories<'a>(dirs: impl Iterator<Item = &'a PathBuf>) -> Result<ModelFiles, DanglingLink> {
        let mut files = ModelFiles::default();
        for dir in dirs {
            if files.directories.contains(dir) {
                continue;
            }
            files.directories.push(dir.clone());
            let fill = |slot: &mut Option<PathBuf>, name: &str| -> Result<(), DanglingLink> {
                let path = dir.join(name);
                if slot.is_none() && mlcc_files::is_file(&path)? {
                    *slot = Some(path);
                }
                Ok(())
            };
            fill(&mut files.generation_config, "generation_config.json")?;
            fill(&mut files.tokenizer_config, "tokenizer_config.json")?;
            fill(&mut files.special_tokens_map, "special_tokens_map.json")?;
            fill(&mut files.chat_template, "chat_template.jinja")?;
            fill(&mut files.chat_template_json, "chat_template.json")?;
            fill(&mut files.eval_text, "eval.txt")?;
            fill(&mut files.eval_text, "valid.txt")?;
        }
        Ok(files)
    }
}

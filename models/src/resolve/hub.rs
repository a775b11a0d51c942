//! Downloads into the Hugging Face cache, only with the cargo feature `hub`. Token, endpoint and proxy come from the same
//! environment variables as for the Hugging Face tools.

use super::{HubCache, RepoName};
use crate::error::ResolveError;
use hf_hub::api::sync::ApiBuilder;
use hf_hub::{Repo, RepoType};

/// Everything but weights that a build may read.
const SMALL_FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "20B_tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "spiece.model",
    "ice_text.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
];

/// Fetches configuration, tokenizer and weights of a repository: safetensors if it has them, else torch files.
pub(super) fn download(repo: &RepoName, cache: &HubCache) -> Result<(), ResolveError> {
    let fail = |detail: String| ResolveError::Download { repo: repo.full_name(), detail };
    if std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| !matches!(value.as_str(), "" | "0" | "false")) {
        return Err(fail("HF_HUB_OFFLINE is set".to_string()));
    }
    let builder = ApiBuilder::from_env().with_cache_dir(cache.directory.clone());
    let api = builder.build().map_err(|error| fail(error.to_string()))?;
    let remote = Repo::with_revision(repo.full_name(), RepoType::Model, repo.revision.clone());
    let remote = api.repo(remote);
    let info = remote.info().map_err(|error| fail(error.to_string()))?;
    let names: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
    for name in wanted(&names) {
        remote.get(name).map_err(|error| fail(format!("{name}: {error}")))?;
    }
    Ok(())
}

fn wanted(names: &[String]) -> Vec<&str> {
    let has_safetensors = names.iter().any(|name| name.ends_with(".safetensors"));
    let is_weights = |name: &str| match has_safetensors {
        true => name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"),
        false => name.ends_with(".bin") || name.ends_with(".bin.index.json") || name.ends_with(".pth"),
    };
    let is_vocab =
        |name: &str| name.starts_with("rwkv_vocab_") && name.ends_with(".txt") || name.ends_with(".tiktoken");
    // Files in folders are variants (onnx, original weights) that a build does not read.
    let in_root = names.iter().map(String::as_str).filter(|name| !name.contains('/'));
    in_root.filter(|name| SMALL_FILES.contains(name) || is_weights(name) || is_vocab(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn safetensors_are_preferred_to_torch_files() {
        let names = |list: &[&str]| list.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        let both = names(&[
            "README.md",
            "config.json",
            "model.safetensors",
            "pytorch_model.bin",
            "onnx/model.safetensors",
        ]);
        assert_eq!(wanted(&both), ["config.json", "model.safetensors"]);
        let torch = names(&["RWKV-4.pth", "rwkv_vocab_v1.txt"]);
        assert_eq!(wanted(&torch), ["RWKV-4.pth", "rwkv_vocab_v1.txt"]);
    }
}

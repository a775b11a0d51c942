//! Downloads into the Hugging Face cache, only with the cargo feature `hub`. Token, endpoint and proxy come from the same
//! environment variables as for the Hugging Face tools.

use super::{DownloadEvent, DownloadListener, HubCache, RepoName};
use crate::error::ResolveError;
use hf_hub::api::Progress;
use hf_hub::api::sync::{ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};

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

/// Attempts beyond the first one at a file whose transfer breaks off.
const RETRIES: usize = 5;

/// Fetches configuration, tokenizer and weights of a repository at one commit: safetensors if it has them, else torch
/// files. What an earlier attempt left is gone on with. The cache knows the revision only when every file is there.
pub(super) fn download(
    repo: &RepoName,
    cache: &HubCache,
    listener: &DownloadListener,
) -> Result<(), ResolveError> {
    let fail = |error: ApiError| ResolveError::Download { repo: repo.full_name(), detail: explain(&error) };
    let builder = ApiBuilder::from_env().with_cache_dir(cache.directory.clone()).with_retries(RETRIES);
    let builder = match std::env::var("HF_TOKEN") {
        Ok(token) if !token.trim().is_empty() => builder.with_token(Some(token.trim().to_string())),
        _ => builder,
    };
    let api = builder.build().map_err(fail)?;
    let at = |revision: &str| {
        api.repo(Repo::with_revision(repo.full_name(), RepoType::Model, revision.to_string()))
    };
    let info = at(&repo.revision).info().map_err(fail)?;
    let pinned = at(&info.sha);
    let local = Cache::new(cache.directory.clone());
    let local = local.repo(Repo::with_revision(repo.full_name(), RepoType::Model, info.sha.clone()));
    let names: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
    let wanted = wanted(&names);
    for (done, name) in wanted.iter().enumerate() {
        listener.tell(DownloadEvent::File { name, done, files: wanted.len() });
        if local.get(name).is_none() {
            pinned.download_with_progress(name, Bytes { listener, done: 0, total: 0 }).map_err(|error| {
                let detail = format!("{name}: {}", explain(&error));
                ResolveError::Download { repo: repo.full_name(), detail }
            })?;
        }
    }
    listener.tell(DownloadEvent::Finished);
    remember(repo, cache, &info.sha)
}

/// Writes which commit the revision is.
fn remember(repo: &RepoName, cache: &HubCache, commit: &str) -> Result<(), ResolveError> {
    let reference = cache.root(repo).join("refs").join(&repo.revision);
    let write = || {
        let folder = reference.parent().unwrap_or(&cache.directory);
        std::fs::create_dir_all(folder)?;
        let partial = folder.join(format!(".{}.{}", repo.revision, std::process::id()));
        std::fs::write(&partial, commit)?;
        std::fs::rename(&partial, &reference)
    };
    write().map_err(|error| ResolveError::Unusable {
        path: reference.display().to_string(),
        detail: format!("cannot be written: {error}"),
    })
}

/// What went wrong, and what helps.
fn explain(error: &ApiError) -> String {
    let text = error.to_string();
    let advice = match text.rsplit(' ').next() {
        Some("401" | "403") => {
            "; private and gated repositories need HF_TOKEN, gated ones also that you accept their terms on their page"
        }
        Some("404") => "; there is no such repository, revision or file",
        Some("429") => "; too many requests, try again later (HF_TOKEN raises the limit)",
        _ => "; run it again to go on where it stopped",
    };
    format!("{text}{advice}")
}

/// Progress of one file for the listener.
struct Bytes<'a> {
    listener: &'a DownloadListener,
    done: u64,
    total: u64,
}

impl Progress for Bytes<'_> {
    fn init(&mut self, size: usize, _: &str) {
        (self.done, self.total) = (0, size as u64);
    }
    fn update(&mut self, size: usize) {
        self.done += size as u64;
        self.listener.tell(DownloadEvent::Bytes { done: self.done, total: self.total });
    }
    fn finish(&mut self) {}
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

//! Downloads into the Hugging Face cache, only with the cargo feature `hub`. Token, endpoint and proxy come from the same
//! environment variables as for the Hugging Face tools, and the cache is laid out as theirs: `blobs/<entity tag>` has the bytes,
//! `snapshots/<commit>/<name>` is a link there. Both names come from the server, so both are checked ([`names`]).

mod client;
mod failure;
mod names;

use super::{DownloadEvent, DownloadListener, HubCache, RepoName};
use crate::error::ResolveError;
use client::{HubClient, RemoteFile};
use failure::HubError;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

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
    let fail = |name: Option<&str>, error: HubError| ResolveError::Download {
        repo: repo.full_name(),
        detail: format!(
            "{}{}",
            name.map_or(String::new(), |name| format!("{name}: ")),
            explain_error(&error)
        ),
    };
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
    let client = HubClient::new(endpoint.trim(), read_token(variable));
    let listing = client.list_repository(repo).map_err(|error| fail(None, error))?;
    let wanted = select_files(&listing.files);
    let folder = cache.repo_folder(repo).join("snapshots").join(listing.commit.as_str());
    for (done, name) in wanted.iter().enumerate() {
        listener.report_event(DownloadEvent::File { name, done, files: wanted.len() });
        let link = folder.join(name);
        if !link.exists() {
            let fetch = || {
                let file = with_retries(|| client.describe_file(repo, &listing.commit, name))?;
                let blobs = cache.repo_folder(repo).join("blobs");
                with_retries(|| fetch_blob(&client, &file, &blobs, listener))?;
                link_to_blob(&link, &file)
            };
            fetch().map_err(|error| fail(Some(name), error))?;
        }
    }
    listener.report_event(DownloadEvent::Finished);
    write_ref(repo, cache, listing.commit.as_str())
}

/// The variable HF_TOKEN, or the file that `hf auth login` writes.
fn read_token(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let path = |name: &str| variable(name).map(PathBuf::from);
    let file = path("HF_TOKEN_PATH")
        .or_else(|| path("HF_HOME").map(|home| home.join("token")))
        .or_else(|| path("HOME").map(|home| home.join(".cache/huggingface/token")));
    let text = variable("HF_TOKEN").or_else(|| std::fs::read_to_string(file?).ok())?;
    Some(text.trim().to_string()).filter(|token| !token.is_empty())
}

/// Tries again what may pass, after a wait that doubles.
fn with_retries<T>(mut attempt: impl FnMut() -> Result<T, HubError>) -> Result<T, HubError> {
    for retry in 0..RETRIES {
        match attempt() {
            Err(error) if error.passes() => std::thread::sleep(Duration::from_millis(300 << retry)),
            done => return done,
        }
    }
    attempt()
}

/// Writes a blob, from where an earlier attempt stopped. One program at a time appends to a partial blob.
fn fetch_blob(
    client: &HubClient,
    file: &RemoteFile,
    blobs: &Path,
    listener: &DownloadListener,
) -> Result<(), HubError> {
    let blob = blobs.join(file.blob.as_str());
    let partial = blobs.join(file.blob.partial_file_name());
    let is_there = || blob.metadata().is_ok_and(|found| found.is_file() && found.len() == file.bytes);
    std::fs::create_dir_all(blobs).map_err(io_error_at(blobs))?;
    if is_there() {
        return Ok(());
    }
    let mut output =
        OpenOptions::new().append(true).create(true).open(&partial).map_err(io_error_at(&partial))?;
    // A file system without locks is used without them.
    if let Err(error) = output.lock()
        && error.kind() != std::io::ErrorKind::Unsupported
    {
        return Err(io_error_at(&partial)(error));
    }
    // Another program may have completed it during the wait, and then this is a handle of what it became.
    if is_there() {
        return Ok(());
    }
    append_missing_bytes(client, file, &mut output, &partial, listener)?;
    output.sync_all().map_err(io_error_at(&partial))?;
    std::fs::rename(&partial, &blob).map_err(io_error_at(&blob))
}

/// Appends what is missing of a partial blob, and not a byte more than the size told.
fn append_missing_bytes(
    client: &HubClient,
    file: &RemoteFile,
    output: &mut File,
    path: &Path,
    listener: &DownloadListener,
) -> Result<(), HubError> {
    let total = file.bytes;
    let mut done = output.metadata().map_err(io_error_at(path))?.len();
    if done > total {
        output.set_len(0).map_err(io_error_at(path))?;
        done = 0;
    }
    listener.report_event(DownloadEvent::Bytes { done, total });
    if done == total {
        return Ok(());
    }
    let (first, body) = client.bytes_from(file, done)?;
    if first != done {
        output.set_len(first).map_err(io_error_at(path))?;
        done = first;
    }
    let mut body = body.into_reader();
    let mut buffer = vec![0; 1 << 16];
    while done < total {
        let most = buffer.len().min(usize::try_from(total - done).unwrap_or(usize::MAX));
        let read = match body.read(&mut buffer[..most]) {
            Ok(0) => Err("the connection was closed".to_string()),
            Ok(read) => Ok(read),
            Err(error) => Err(error.to_string()),
        };
        let read = read.map_err(|detail| HubError::Broken { done, total, detail })?;
        output.write_all(&buffer[..read]).map_err(io_error_at(path))?;
        done += read as u64;
        listener.report_event(DownloadEvent::Bytes { done, total });
    }
    Ok(())
}

/// Links a name of a snapshot to its blob. A link that leads nowhere is replaced.
fn link_to_blob(link: &Path, file: &RemoteFile) -> Result<(), HubError> {
    let folder = link.parent().unwrap_or(Path::new(""));
    std::fs::create_dir_all(folder).map_err(io_error_at(folder))?;
    let unfinished = folder.join(format!(".{}.{}", file.blob.as_str(), std::process::id()));
    let target = Path::new("../../blobs").join(file.blob.as_str());
    std::os::unix::fs::symlink(target, &unfinished).map_err(io_error_at(&unfinished))?;
    std::fs::rename(&unfinished, link).map_err(io_error_at(link))
}

fn io_error_at(path: &Path) -> impl FnOnce(std::io::Error) -> HubError {
    let path = path.display().to_string();
    move |source| HubError::Io { path, source }
}

/// Writes which commit the revision is.
fn write_ref(repo: &RepoName, cache: &HubCache, commit: &str) -> Result<(), ResolveError> {
    let reference = cache.repo_folder(repo).join("refs").join(&repo.revision);
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
fn explain_error(error: &HubError) -> String {
    let advice = match error {
        HubError::Status(401 | 403) => {
            "; private and gated repositories need HF_TOKEN, gated ones also that you accept their terms on their page"
        }
        HubError::Status(404) => "; there is no such repository, revision or file",
        HubError::Status(429) => "; too many requests, try again later (HF_TOKEN raises the limit)",
        HubError::Answer { .. } | HubError::Io { .. } => "",
        _ => "; run it again to go on where it stopped",
    };
    format!("{error}{advice}")
}

fn select_files(names: &[String]) -> Vec<&str> {
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
        assert_eq!(select_files(&both), ["config.json", "model.safetensors"]);
        let torch = names(&["RWKV-4.pth", "rwkv_vocab_v1.txt"]);
        assert_eq!(select_files(&torch), ["RWKV-4.pth", "rwkv_vocab_v1.txt"]);
    }
}

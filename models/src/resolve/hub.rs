//! Downloads into the Hugging Face cache, only with the cargo feature `hub`. Token, endpoint and proxy come from the same
//! environment variables as for the Hugging Face tools, and the cache is laid out as theirs: `blobs/<entity tag>` has the bytes,
//! `snapshots/<commit>/<name>` is a link there. Both names come from the server, so both are checked ([`names`]).

mod client;
mod digest;
mod failure;
mod names;

use super::download::{DownloadEvent, DownloadListener, DownloadPlan};
use super::hub_cache::{HubCache, RepoName};
use crate::error::ResolveError;
use crate::presets;
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
/// files, else one GGUF file. What an earlier attempt left is gone on with. The cache knows the revision only when every
/// file is there.
pub(super) fn download(
    repo: &RepoName,
    cache: &HubCache,
    listener: &DownloadListener,
) -> Result<(), ResolveError> {
    let fail = |name: Option<&str>, error: HubError| {
        let name = name.map_or(String::new(), |name| format!("{name}: "));
        ResolveError::Download {
            repo: repo.full_name(),
            detail: format!("{name}{}", explain_error(&error, Some(repo), &cache.repo_folder(repo))),
        }
    };
    let client = connect();
    let listing = client.list_repository(repo).map_err(|error| fail(None, error))?;
    let wanted = select_files(&listing.files);
    let blobs = cache.repo_folder(repo).join("blobs");
    let folder = cache.repo_folder(repo).join("snapshots").join(listing.commit.as_str());
    let fetch = |done: usize, name: &str, file: &RemoteFile| {
        listener.report_event(DownloadEvent::File { name, done, files: wanted.len() });
        let link = folder.join(name);
        let fetched = with_retries(|| fetch_blob(&client, file, &blobs, listener));
        fetched.and_then(|()| link_to_blob(&link, file)).map_err(|error| fail(Some(name), error))
    };
    let describe = |name: &str| {
        with_retries(|| client.describe_file(repo, &listing.commit, name))
            .map_err(|error| fail(Some(name), error))
    };
    // What is small tells what the model is, before anything large comes.
    let (weights, small): (Vec<&str>, Vec<&str>) = wanted.iter().partition(|name| is_weight_file(name));
    for (done, name) in small.iter().enumerate() {
        if !folder.join(name).exists() {
            fetch(done, name, &describe(name)?)?;
        }
    }
    let mut plan = DownloadPlan {
        source: repo.full_name_at(),
        folder: folder.clone(),
        files: 0,
        missing_bytes: 0,
        weight_bytes: 0,
        is_gguf: weights.iter().any(|name| name.ends_with(".gguf")),
    };
    let mut missing = Vec::new();
    for name in weights {
        match folder.join(name).metadata() {
            Ok(there) => plan.weight_bytes += there.len(),
            Err(_) => {
                let file = describe(name)?;
                plan.weight_bytes += file.bytes;
                plan.missing_bytes += file.bytes.saturating_sub(bytes_there(&blobs, &file));
                missing.push((name, file));
            }
        }
    }
    plan.files = missing.len();
    if !missing.is_empty() {
        let refuse = |detail| ResolveError::Refused { repo: repo.full_name(), detail };
        listener.approve(&plan).map_err(refuse)?;
    }
    let before = wanted.len() - missing.len();
    for (at, (name, file)) in missing.iter().enumerate() {
        fetch(before + at, name, file)?;
    }
    listener.report_event(DownloadEvent::Finished);
    write_ref(repo, cache, listing.commit.as_str())
}

/// Fetches the file of an address, which is at `path` only when it is complete.
pub(super) fn download_file(
    address: &str,
    path: &Path,
    listener: &DownloadListener,
) -> Result<(), ResolveError> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let fail = |error: HubError| ResolveError::Download {
        repo: address.to_string(),
        detail: explain_error(&error, None, folder),
    };
    let client = connect();
    let file = with_retries(|| client.describe_address(address)).map_err(fail)?;
    let plan = DownloadPlan {
        source: address.to_string(),
        folder: folder.to_path_buf(),
        files: 1,
        missing_bytes: file.bytes.saturating_sub(bytes_there(folder, &file)),
        weight_bytes: file.bytes,
        is_gguf: address.contains(".gguf"),
    };
    listener.approve(&plan).map_err(|detail| ResolveError::Refused { repo: address.to_string(), detail })?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    listener.report_event(DownloadEvent::File { name: &name, done: 0, files: 1 });
    let blob = folder.join(file.blob.as_str());
    let fetched = with_retries(|| fetch_blob(&client, &file, folder, listener))
        .and_then(|()| std::fs::rename(&blob, path).map_err(io_error_at(path)));
    if let Err(error) = fetched
        // Another program may have completed it during the wait for the lock.
        && !path.metadata().is_ok_and(|found| found.len() == file.bytes)
    {
        return Err(fail(error));
    }
    listener.report_event(DownloadEvent::Finished);
    Ok(())
}

fn connect() -> HubClient {
    let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
    HubClient::new(endpoint.trim(), read_token(variable))
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}

/// Bytes of a blob that are on the disk already.
fn bytes_there(blobs: &Path, file: &RemoteFile) -> u64 {
    let names = [file.blob.as_str().to_string(), file.blob.partial_file_name()];
    let sizes = names.iter().filter_map(|name| Some(blobs.join(name).metadata().ok()?.len()));
    sizes.max().unwrap_or(0).min(file.bytes)
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
    if let Some(expected) = file.blob.sha256()
        && digest::file_sha256(&partial).map_err(io_error_at(&partial))? != expected
    {
        std::fs::remove_file(&partial).map_err(io_error_at(&partial))?;
        return Err(HubError::Damaged { bytes: file.bytes });
    }
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

/// What went wrong, and what helps. `folder` is where the files would be.
fn explain_error(error: &HubError, repo: Option<&RepoName>, folder: &Path) -> String {
    let advice = match (error, repo) {
        (HubError::Status(401 | 403), Some(repo)) => {
            let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
            let page = format!("{}/{}", endpoint.trim().trim_end_matches('/'), repo.full_name());
            format!(
                "; private and gated repositories need HF_TOKEN, gated ones also that you accept their terms on {page}. The \
                 hub answers the same for a name that does not exist{}",
                near_repositories(repo)
            )
        }
        (HubError::Status(404), Some(repo)) => {
            format!("; there is no such repository, revision or file{}", near_repositories(repo))
        }
        (HubError::Status(404), None) => "; there is no such file".to_string(),
        (HubError::Status(429), _) => {
            "; too many requests, try again later (HF_TOKEN raises the limit)".to_string()
        }
        (HubError::Io { source, .. }, _) if source.kind() == std::io::ErrorKind::StorageFull => {
            "; the disk is full. What has come is kept: make room and run it again to go on where it stopped"
                .to_string()
        }
        (HubError::Request(_), Some(repo)) => format!(
            "; run it again to go on where it stopped. Without a network: run `mlcc pull hf:{0}` (or hf download {1}) where \
             there is one, copy the folder {2} from there to {3}, and run this again with HF_HUB_OFFLINE=1",
            repo.full_name_at(),
            repo.full_name(),
            folder.file_name().unwrap_or_default().to_string_lossy(),
            folder.display()
        ),
        (HubError::Answer { .. } | HubError::Io { .. }, _) => String::new(),
        _ => "; run it again to go on where it stopped".to_string(),
    };
    format!("{error}{advice}")
}

/// The repositories of presets whose names are near.
fn near_repositories(repo: &RepoName) -> String {
    let known = presets::all_presets().map(|preset| preset.repo);
    match mlcc_files::did_you_mean(&repo.full_name(), known) {
        question if question.is_empty() => String::new(),
        question => format!(": {}", question.trim_end()),
    }
}

/// Names of weights that a build reads.
fn is_weight_file(name: &str) -> bool {
    [".safetensors", ".bin", ".pth", ".gguf"].iter().any(|end| name.ends_with(end))
}

/// Of GGUF files of one model in several formats, the first that has one of these in its name.
const GGUF_FORMATS: [&str; 7] = ["q4_k_m", "q4_0", "q4_k", "q8_0", "bf16", "f16", "f32"];

/// The GGUF file of a repository that has no other weights; with several formats that which most take.
fn choose_gguf(names: &[String]) -> Option<&str> {
    let mut files: Vec<&str> =
        names.iter().map(String::as_str).filter(|name| name.ends_with(".gguf")).collect();
    // Projectors of images, and models in several files.
    files.retain(|name| !name.to_lowercase().contains("mmproj") && !name.contains("-of-"));
    let has = |format: &str| files.iter().find(|name| name.to_lowercase().contains(format));
    GGUF_FORMATS.iter().find_map(|format| has(format)).or(files.first()).copied()
}

fn select_files(names: &[String]) -> Vec<&str> {
    let has_safetensors = names.iter().any(|name| name.ends_with(".safetensors"));
    let has_torch = names.iter().any(|name| name.ends_with(".bin") || name.ends_with(".pth"));
    let gguf = if has_safetensors || has_torch { None } else { choose_gguf(names) };
    let is_weights = |name: &str| match has_safetensors {
        true => name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"),
        false if gguf.is_some() => gguf == Some(name),
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
        let gguf = names(&["README.md", "x-Q2_K.gguf", "x-Q4_K_M.gguf", "x-Q8_0.gguf", "mmproj-q4_k_m.gguf"]);
        assert_eq!(select_files(&gguf), ["x-Q4_K_M.gguf"]);
    }
}

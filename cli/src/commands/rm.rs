//! `mlcc rm`: removes what lies in mlcc's caches, and nothing else.

use std::path::Path;

use mlcc_models::resolve::{HubCache, is_address, repository_of};

use crate::commands::artifact_cache::{ArtifactCache, RemovedFiles};
use crate::commands::checkpoint;
use crate::error::CliError;
use crate::ui::{self, Ui};

#[derive(Debug, clap::Args)]
#[command(after_help = "Example: mlcc rm qwen3-0.6b\n\
    Removes the checkpoint from the Hugging Face cache (all its revisions) and the artifacts that were built of it. Of a \
    folder or file outside of the caches, only the artifacts that were built of it are removed.")]
pub struct RmArgs {
    /// hf:org/repo, a preset name, an address, the path of a checkpoint, or a name or path that `mlcc list`
    /// shows
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
}

pub fn run(args: &RmArgs, ui: &Ui) -> Result<(), CliError> {
    for name in &args.names {
        let removed = remove(name)?;
        if removed.files == 0 {
            return Err(CliError::Failed(unknown_text(name)));
        }
        ui.note(format_args!("removed {name}, {}", ui::bytes(removed.bytes)));
    }
    Ok(())
}

/// Removes what the name leads to in the caches.
fn remove(name: &str) -> Result<RemovedFiles, CliError> {
    let mut removed = RemovedFiles::default();
    let cache = ArtifactCache::from_environment();
    if let Some(cache) = &cache {
        let failed = || CliError::io("read", cache.artifacts());
        let artifacts = cache.list_artifacts().map_err(failed())?;
        let downloads = cache.list_downloads().map_err(failed())?;
        let of_source = match checkpoint::source_key(name) {
            Some(key) => cache.artifacts_of(&key).map_err(failed())?,
            None => Vec::new(),
        };
        let address = is_address(name).then(|| cache.download_folder(name));
        // Only entries of the lists are removed: a path that is none of them leads elsewhere.
        let is_named = |path: &Path, known: &str| known == name || Path::new(name) == path;
        let files =
            of_source.into_iter().chain(artifacts.into_iter().filter(|it| is_named(&it.path, &it.name)));
        for entry in files {
            match std::fs::remove_file(&entry.path) {
                Ok(()) => removed.add(entry.usage.bytes),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(CliError::io("remove", &entry.path)(error)),
            }
        }
        for entry in downloads {
            if address.as_ref() == Some(&entry.path) || is_named(&entry.path, &entry.name) {
                std::fs::remove_dir_all(&entry.path).map_err(CliError::io("remove", &entry.path))?;
                removed.add(entry.usage.bytes);
            }
        }
    }
    let hub = HubCache::from_environment();
    let repositories = hub.repositories().map_err(CliError::io("read", &hub.directory))?;
    let listed = repositories.into_iter().find(|repository| repository.folder == Path::new(name));
    let repo = listed.map(|repository| repository.repo).or_else(|| repository_of(name));
    if let Some(repo) = repo
        && let Some(bytes) = hub.remove_repository(&repo).map_err(CliError::io("remove", &hub.directory))?
    {
        removed.add(bytes);
    }
    Ok(removed)
}

/// Nothing in the caches has the name: those that are near.
fn unknown_text(name: &str) -> String {
    let cache = ArtifactCache::from_environment();
    let artifacts = cache.and_then(|cache| cache.list_artifacts().ok()).unwrap_or_default();
    let repositories = HubCache::from_environment().repositories().unwrap_or_default();
    let names: Vec<String> = repositories
        .into_iter()
        .map(|repository| format!("hf:{}", repository.repo.full_name()))
        .chain(artifacts.into_iter().map(|entry| entry.name))
        .collect();
    let near = mlcc_files::did_you_mean(name, names.iter().map(String::as_str));
    format!("`{name}` is not in the caches, nothing was removed: {near}`mlcc list` shows what is there")
}

//! `mlcc list`: checkpoints and artifacts in the caches.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use mlcc_models::resolve::{FolderUsage, HubCache};
use serde_json::json;

use crate::commands::artifact_cache::{ArtifactCache, CacheEntry};
use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::{self, Ui};

#[derive(Debug, clap::Args)]
pub struct ListArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A line of the list.
struct CachedModelRow {
    name: String,
    kind: &'static str,
    path: PathBuf,
    usage: FolderUsage,
}

pub fn run(args: &ListArgs, ui: &Ui) -> Result<(), CliError> {
    let models = listed_models()?;
    if args.json {
        let row = |model: &CachedModelRow| {
            let last_use = model.usage.last_use.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            json!({
                "name": model.name, "kind": model.kind, "bytes": model.usage.bytes, "last_use": last_use,
                "path": model.path,
            })
        };
        return print_json(&models.iter().map(row).collect::<Vec<_>>());
    }
    if models.is_empty() {
        ui.note("no model is here yet: `mlcc pull NAME` downloads one, `mlcc chat NAME` also builds it and starts");
        return Ok(());
    }
    let mut rows = vec![["name", "kind", "size", "last use", "path"].map(String::from).to_vec()];
    rows.extend(models.iter().map(|model| {
        let (size, path) = (ui::bytes(model.usage.bytes), model.path.display().to_string());
        vec![model.name.clone(), model.kind.into(), size, age_text(model.usage.last_use), path]
    }));
    print(&ui::format_table(&rows))
}

/// Checkpoints of the hub's cache, files that addresses named, artifacts.
fn listed_models() -> Result<Vec<CachedModelRow>, CliError> {
    let hub = HubCache::from_environment();
    let repositories = hub.repositories().map_err(CliError::io("read", &hub.directory))?;
    let mut models: Vec<CachedModelRow> = Vec::new();
    models.extend(repositories.into_iter().map(|repository| CachedModelRow {
        name: format!("hf:{}", repository.repo.full_name()),
        kind: if repository.is_complete { "checkpoint" } else { "unfinished" },
        path: repository.folder,
        usage: repository.usage,
    }));
    if let Some(cache) = ArtifactCache::from_environment() {
        let listed = |kind| {
            move |entry: CacheEntry| CachedModelRow {
                name: entry.name,
                kind,
                path: entry.path,
                usage: entry.usage,
            }
        };
        let artifacts = cache.artifacts();
        let downloads = cache.list_downloads().map_err(CliError::io("read", &artifacts))?;
        models.extend(downloads.into_iter().map(listed("download")));
        let built = cache.list_artifacts().map_err(CliError::io("read", &artifacts))?;
        models.extend(built.into_iter().map(listed("artifact")));
    }
    Ok(models)
}

/// The time since then, in its largest unit.
fn age_text(time: SystemTime) -> String {
    let seconds = SystemTime::now().duration_since(time).unwrap_or_default().as_secs();
    let units = [("day", 24 * 3600), ("hour", 3600), ("minute", 60)];
    match units.into_iter().find(|(_, length)| seconds >= *length) {
        Some((unit, length)) => format!("{} ago", ui::pluralize(seconds / length, unit)),
        None => "now".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn ages_have_one_unit() {
        let age = |seconds| age_text(SystemTime::now() - Duration::from_secs(seconds));
        assert_eq!(
            [age(3), age(100), age(7300), age(90_000)],
            ["now", "1 minute ago", "2 hours ago", "1 day ago"]
        );
    }
}

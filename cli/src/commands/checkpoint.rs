//! Checkpoints where an artifact is expected: found by name, downloaded if they are not here, built into the
//! cache, and found there the next time.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use clap::{Args as _, FromArgMatches};
use mlcc_driver::compile::keep::KEEP;
use mlcc_models::presets::Preset;
use mlcc_models::resolve::{
    FoundCheckpoint, RepoName, download_file, find_checkpoint, is_address, repository_of, update_repository,
    url_file_name,
};
use mlcc_models::{DownloadListener, ModelRequest};

use crate::cli::COMMIT;
use crate::commands::artifact_cache::{self, ArtifactCache, ArtifactKey};
use crate::commands::build;
use crate::commands::model_size::{SizeEstimate, check_disk, check_memory, default_format};
use crate::error::CliError;
use crate::ui::{self, Ui};

/// Variables of `mlcc build` that make another artifact.
const VARIABLES: [&str; 3] = ["MLCC_TARGET", "MLCC_QUANT", "MLCC_BACKEND"];
const QUANT_VARIABLE: &str = "MLCC_QUANT";

/// The model that a name led to.
enum NamedModel {
    Artifact(PathBuf),
    Checkpoint(LocalCheckpoint),
}

/// A checkpoint on this machine.
struct LocalCheckpoint {
    /// The value of `mlcc build --model`.
    model: OsString,
    /// A folder, or a GGUF file.
    path: PathBuf,
    stem: String,
    /// Where it comes from; for its artifacts.
    source: String,
    /// The revision of the repository that it is of, and its commit, if it is of one.
    revision: Option<String>,
    commit: Option<String>,
}

/// The files with weights of a checkpoint.
#[derive(Clone, Copy)]
struct WeightSummary {
    bytes: u64,
    is_gguf: bool,
}

/// `path` itself, or if it names a checkpoint (a folder, a GGUF file, an address of one, `hf:org/repo`, a
/// preset), the artifact that `mlcc build` makes of it with `quant`, by default in a format for this machine.
pub(crate) fn artifact_for(path: &Path, quant: Option<&str>, ui: &Ui) -> Result<PathBuf, CliError> {
    build_named(path, quant, default_format, ui)
}

/// The same with weights as they are stored, where no format is chosen.
pub(crate) fn artifact_as_stored(path: &Path, quant: Option<&str>, ui: &Ui) -> Result<PathBuf, CliError> {
    build_named(path, quant, |_, _| KEEP, ui)
}

/// Chooses a weight format from the folder of a checkpoint and the bytes of its weights.
type FormatChoice = fn(&Path, u64) -> &'static str;

fn build_named(
    path: &Path,
    quant: Option<&str>,
    default: FormatChoice,
    ui: &Ui,
) -> Result<PathBuf, CliError> {
    let checkpoint = match locate(path, quant, default, ui)? {
        NamedModel::Checkpoint(checkpoint) => checkpoint,
        NamedModel::Artifact(path) => {
            return match quant {
                None => Ok(path),
                Some(_) => Err(CliError::usage(format!(
                    "--quant is for checkpoints, and {} is an artifact",
                    path.display()
                ))),
            };
        }
    };
    let cache = open_cache(path)?;
    let limit = artifact_cache::cache_limit()?;
    let weights = summarize_weights(&checkpoint.path);
    let chosen = chosen_format(&checkpoint.path, weights, quant, default);
    let content = match &checkpoint.commit {
        Some(commit) => commit.clone(),
        None => file_stamps(&checkpoint.path).map_err(CliError::io("read", &checkpoint.path))?,
    };
    let key = artifact_key(&checkpoint, &chosen, content);
    let artifact = cache.path_of(&key);
    let is_there = || artifact.is_file();
    if is_there() {
        ui.detail(format_args!("{} from the cache", artifact.display()));
        artifact_cache::touch(&artifact);
        return Ok(artifact);
    }
    let _lock = cache.lock(ui)?;
    // Another program may have built it during the wait.
    if is_there() {
        return Ok(artifact);
    }
    let estimate = SizeEstimate::of_checkpoint(config_folder(&checkpoint.path), weights.bytes, &chosen);
    let refuse = |detail| CliError::Failed(format!("{} is not built: {detail}", path.display()));
    check_memory(config_folder(&checkpoint.path), weights.bytes, &estimate).map_err(refuse)?;
    check_disk(&cache.artifacts(), estimate.bytes).map_err(refuse)?;
    ui.note(format_args!("{} is a checkpoint: its artifact is built first and cached", path.display()));
    if quant.is_none() && chosen != KEEP {
        ui.note(format_args!("{}; --quant to choose", estimate.text()));
    }
    build_into(&checkpoint, &chosen, &artifact, ui)?;
    cache.remove_outdated(&key);
    // What cannot be removed only takes room.
    if let Ok(removed) = cache.remove_oldest(limit, Some(&artifact))
        && removed.files > 0
    {
        let (count, bytes) = (ui::pluralize(removed.files as u64, "artifact"), ui::bytes(removed.bytes));
        ui.note(format_args!(
            "removed {count} from the cache that had no use for long, {bytes} ({})",
            artifact_cache::LIMIT_VARIABLE
        ));
    }
    Ok(artifact)
}

/// Builds the checkpoint, which needs no network any more.
fn build_into(checkpoint: &LocalCheckpoint, quant: &str, artifact: &Path, ui: &Ui) -> Result<(), CliError> {
    let flags: [OsString; 8] = [
        "build".into(),
        "--model".into(),
        checkpoint.model.clone(),
        "--quant".into(),
        quant.into(),
        "--offline".into(),
        "--output".into(),
        artifact.into(),
    ];
    let command = build::BuildArgs::augment_args(clap::Command::new("build"));
    let parsed =
        command.try_get_matches_from(flags).and_then(|found| build::BuildArgs::from_arg_matches(&found));
    build::run_quietly(&parsed.map_err(|error| CliError::usage(error.to_string()))?, ui)
}

/// Finds what a name means, and downloads it if it is not here.
fn locate(path: &Path, quant: Option<&str>, default: FormatChoice, ui: &Ui) -> Result<NamedModel, CliError> {
    let name = path.to_string_lossy();
    if is_address(&name) {
        let folder = open_cache(path)?.download_folder(&name);
        let file =
            download_file(&name, &folder, listener(quant, default, ui).as_ref()).map_err(model_error)?;
        return Ok(if is_gguf(&file) { local_checkpoint(&file)? } else { NamedModel::Artifact(file) });
    }
    if path.is_dir() || (is_gguf(path) && path.exists()) {
        return local_checkpoint(path);
    }
    // A mistyped path of an artifact gets the error of its loader.
    let is_file_name = path.extension().is_some_and(|end| end == "so" || end == "gguf");
    if path.exists()
        || (is_file_name && !is_hub_name(&name))
        || repository_of(&name).is_none() && is_path(&name)
    {
        return Ok(NamedModel::Artifact(path.to_path_buf()));
    }
    let request = ModelRequest { download: listener(quant, default, ui), ..ModelRequest::new(&name) };
    let found = find_checkpoint(&request).map_err(model_error)?;
    let FoundCheckpoint { name: stem, path: folder, repository } = found;
    let repo = repository_of(&name);
    let stem = repo.as_ref().map_or(stem, |repo| repo.short_name().to_owned());
    let source = repo.as_ref().map_or_else(|| name.to_string(), hub_source);
    let revision = repo.map(|repo| repo.revision);
    let commit = repository.map(|repository| repository.commit);
    let model = path.as_os_str().to_owned();
    Ok(NamedModel::Checkpoint(LocalCheckpoint { model, path: folder, stem, source, revision, commit }))
}

fn local_checkpoint(path: &Path) -> Result<NamedModel, CliError> {
    let whole = path.canonicalize().map_err(CliError::io("read", path))?;
    let stem = model_name(&whole).unwrap_or_default();
    let (model, source) = (whole.clone().into_os_string(), whole.display().to_string());
    Ok(NamedModel::Checkpoint(LocalCheckpoint {
        model,
        path: whole,
        stem,
        source,
        revision: None,
        commit: None,
    }))
}

/// All revisions of a repository are one source.
fn hub_source(repo: &RepoName) -> String {
    format!("hf:{}", repo.full_name())
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "gguf")
}

fn is_hub_name(name: &str) -> bool {
    name.get(..3).is_some_and(|start| start.eq_ignore_ascii_case("hf:"))
}

/// True for a name that nothing is found under and that looks like a path.
fn is_path(name: &str) -> bool {
    !is_hub_name(name) && (name.contains('/') || name.is_empty())
}

fn model_error(error: mlcc_models::error::ResolveError) -> CliError {
    CliError::Model(error.into())
}

fn open_cache(path: &Path) -> Result<ArtifactCache, CliError> {
    ArtifactCache::from_environment().ok_or_else(|| {
        CliError::Failed(format!(
            "{} is a checkpoint, and there is no cache for its artifact: set MLCC_CACHE_DIR to a folder, or use `mlcc build`",
            path.display()
        ))
    })
}

/// Says what comes, and refuses what has no room; `None` where downloads are off.
fn listener(quant: Option<&str>, default: FormatChoice, ui: &Ui) -> Option<DownloadListener> {
    let quant = quant.map(str::to_owned);
    let approval = move |plan: &mlcc_models::resolve::DownloadPlan| {
        check_disk(&plan.folder, plan.missing_bytes)?;
        let is_artifact = url_file_name(&plan.source).is_some_and(|name| name.ends_with(".so"));
        if is_artifact {
            return Ok(());
        }
        let weights = WeightSummary { bytes: plan.weight_bytes, is_gguf: plan.is_gguf };
        let chosen = chosen_format(&plan.folder, weights, quant.as_deref(), default);
        let estimate = SizeEstimate::of_checkpoint(&plan.folder, plan.weight_bytes, &chosen);
        check_memory(&plan.folder, plan.weight_bytes, &estimate)?;
        if let Some(cache) = ArtifactCache::from_environment() {
            check_disk(&cache.artifacts(), plan.missing_bytes.saturating_add(estimate.bytes))?;
        }
        Ok(())
    };
    (!build::offline_by_environment()).then(|| build::download_listener(ui).with_approval(approval))
}

/// A listener for a download that nothing is built of yet.
pub(crate) fn plain_listener(ui: &Ui) -> Option<DownloadListener> {
    let approval = |plan: &mlcc_models::resolve::DownloadPlan| check_disk(&plan.folder, plan.missing_bytes);
    (!build::offline_by_environment()).then(|| build::download_listener(ui).with_approval(approval))
}

fn chosen_format(path: &Path, weights: WeightSummary, quant: Option<&str>, default: FormatChoice) -> String {
    let named = std::env::var(QUANT_VARIABLE).ok().filter(|name| !name.is_empty());
    match (quant, named) {
        (Some(quant), _) => quant.to_owned(),
        (None, Some(named)) => named,
        // A GGUF file has the format that its makers chose.
        (None, None) if weights.is_gguf => KEEP.to_owned(),
        (None, None) => default(path, weights.bytes).to_owned(),
    }
}

/// The folder that may have a config.json: none for a GGUF file, beside which is that of another model.
fn config_folder(path: &Path) -> &Path {
    if path.is_dir() { path } else { Path::new("") }
}

/// Looks at the sizes of the files with weights.
fn summarize_weights(path: &Path) -> WeightSummary {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    if !path.is_dir() {
        return WeightSummary { bytes: size(path), is_gguf: is_gguf(path) };
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    // Of weights in several forms, the first is read.
    let kinds: [&[&str]; 3] = [&["safetensors"], &["bin", "pth"], &["gguf"]];
    for ends in kinds {
        let is_of =
            |path: &&PathBuf| path.extension().is_some_and(|end| ends.iter().any(|known| end == *known));
        let bytes: u64 = files.iter().filter(is_of).map(|path| size(path)).sum();
        if bytes > 0 {
            return WeightSummary { bytes, is_gguf: ends == ["gguf"] };
        }
    }
    WeightSummary { bytes: 0, is_gguf: false }
}

fn artifact_key(checkpoint: &LocalCheckpoint, quant: &str, content: String) -> ArtifactKey {
    let variables = VARIABLES.map(|name| std::env::var(name).unwrap_or_default());
    let (version, abi) = (env!("CARGO_PKG_VERSION"), mlcc_abi::ABI_VERSION);
    ArtifactKey {
        stem: checkpoint.stem.clone(),
        source: checkpoint.source.clone(),
        request: format!("{} {:?} {variables:?}", quant.to_lowercase(), checkpoint.revision),
        content: format!("{content} {version} {COMMIT} {abi}"),
    }
}

/// The key of all artifacts of a repository, or of the checkpoint at a path.
pub(crate) fn source_key(name: &str) -> Option<ArtifactKey> {
    let path = Path::new(name);
    let (stem, source) = match repository_of(name) {
        Some(repo) => (repo.short_name().to_owned(), hub_source(&repo)),
        None => {
            let whole = path.canonicalize().ok()?;
            (model_name(&whole)?, whole.display().to_string())
        }
    };
    Some(ArtifactKey { stem, source, request: String::new(), content: String::new() })
}

/// Downloads what a name leads to, or what the hub has of it now, and gives where it is.
pub(crate) fn pull(name: &str, ui: &Ui) -> Result<PathBuf, CliError> {
    if is_address(name) {
        let folder = open_cache(Path::new(name))?.download_folder(name);
        return download_file(name, &folder, plain_listener(ui).as_ref()).map_err(model_error);
    }
    let request = ModelRequest { download: plain_listener(ui), ..ModelRequest::new(name) };
    match repository_of(name) {
        Some(repo) => match request.cache.find_snapshot(&repo).map_err(model_error)? {
            Some(snapshot) if request.download.is_none() => {
                ui.warn("downloads are off (HF_HUB_OFFLINE): this is what the cache has");
                Ok(snapshot.directory)
            }
            _ => Ok(update_repository(&repo, &request).map_err(model_error)?.directory),
        },
        None if Path::new(name).exists() => Err(CliError::usage(format!(
            "{name} is here already: `mlcc pull` takes hf:org/repo, a preset or an address"
        ))),
        None => Err(match find_checkpoint(&request) {
            Err(error) => model_error(error),
            Ok(found) => CliError::usage(format!("{} is here already", found.path.display())),
        }),
    }
}

/// The name of an artifact or a checkpoint: that of its folder (`Qwen2.5-0.5B`, all of it), that of the file
/// without its end, that of a repository, or a preset.
pub(crate) fn model_name(path: &Path) -> Option<String> {
    let text = path.to_string_lossy();
    if let Some(name) = url_file_name(&text).filter(|_| is_address(&text)) {
        return Path::new(name).file_stem().map(|name| name.to_string_lossy().into_owned());
    }
    if is_hub_name(&text) || (Preset::from_name(&text).is_some() && !path.exists()) {
        let preset = Preset::from_name(&text).map(|preset| preset.name.to_owned());
        return preset.or_else(|| Some(repository_of(&text)?.short_name().to_owned()));
    }
    let whole = path.canonicalize();
    let path = whole.as_deref().ok().filter(|whole| whole.is_dir()).unwrap_or(path);
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map(|name| name.to_string_lossy().into_owned())
}

/// Whether a name is that of a checkpoint, of which artifacts are built.
pub(crate) fn is_checkpoint(path: &Path) -> bool {
    let text = path.to_string_lossy();
    match is_address(&text) {
        true => url_file_name(&text).is_some_and(|name| name.ends_with(".gguf")),
        false if path.exists() => path.is_dir() || is_gguf(path),
        false => repository_of(&text).is_some() && path.extension().is_none_or(|end| end != "so"),
    }
}

/// The names, sizes and times of a checkpoint's files: reading all of them takes longer than many a build.
fn file_stamps(path: &Path) -> std::io::Result<String> {
    let mut files = Vec::new();
    if path.is_dir() {
        for entry in std::fs::read_dir(path)? {
            files.push(entry?.path());
        }
        files.sort();
    } else {
        files.push(path.to_path_buf());
    }
    let mut text = String::new();
    for file in files {
        let metadata = std::fs::metadata(&file)?;
        let changed = metadata.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
        text += &format!("{file:?} {} {changed:?}\n", metadata.len());
    }
    Ok(text)
}

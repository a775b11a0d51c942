//! Checkpoints where an artifact is expected: built first, into the cache, and found there the next time.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use clap::{Args as _, FromArgMatches};
use mlcc_codegen::cache::ObjectCache;
use xxhash_rust::xxh3::xxh3_64;

use crate::commands::build;
use crate::error::CliError;
use crate::ui::Ui;

/// Folder of the artifacts in the cache.
const FOLDER: &str = "artifacts";
/// Variables of `mlcc build` that make another artifact.
const VARIABLES: [&str; 3] = ["MLCC_TARGET", "MLCC_QUANT", "MLCC_BACKEND"];

/// `path` itself, or if it is a folder with a checkpoint or a GGUF file, the artifact that `mlcc build` makes
/// of it with `quant`.
pub(crate) fn artifact_for(path: &Path, quant: Option<&str>, ui: &Ui) -> Result<PathBuf, CliError> {
    if !path.is_dir() && path.extension().is_none_or(|end| end != "gguf") {
        return match quant {
            None => Ok(path.to_path_buf()),
            Some(_) => Err(CliError::usage(format!(
                "--quant is for checkpoints, and {} is an artifact",
                path.display()
            ))),
        };
    }
    let Some(cache) = ObjectCache::from_environment() else {
        return Err(CliError::Failed(format!(
            "{} is a checkpoint, and there is no cache for its artifact: set MLCC_CACHE_DIR to a folder, or use `mlcc build`",
            path.display()
        )));
    };
    let folder = cache.folder().join(FOLDER);
    let whole = path.canonicalize().map_err(CliError::io("read", path))?;
    let stem = model_name(&whole).unwrap_or_default();
    let place = format!("{stem}-{:016x}", xxh3_64(build_request(&whole, quant).as_bytes()));
    let content = xxh3_64(file_stamps(&whole).map_err(CliError::io("read", path))?.as_bytes());
    let artifact = folder.join(format!("{place}-{content:016x}.so"));
    if artifact.is_file() {
        ui.detail(format_args!("{} from the cache", artifact.display()));
        return Ok(artifact);
    }
    std::fs::create_dir_all(&folder).map_err(CliError::io("create", &folder))?;
    ui.note(format_args!("{} is a checkpoint: its artifact is built first and cached", path.display()));
    let mut flags: Vec<OsString> =
        vec!["build".into(), "-m".into(), whole.into(), "-o".into(), artifact.clone().into()];
    flags.extend(quant.into_iter().flat_map(|quant| ["--quant".into(), quant.into()]));
    let command = build::BuildArgs::augment_args(clap::Command::new("build"));
    let parsed =
        command.try_get_matches_from(flags).and_then(|found| build::BuildArgs::from_arg_matches(&found));
    build::run_quietly(&parsed.map_err(|error| CliError::usage(error.to_string()))?, ui)?;
    remove_outdated(&folder, &place, &artifact);
    Ok(artifact)
}

/// The name of an artifact or a checkpoint: that of its folder (`Qwen2.5-0.5B`, all of it), or that of the
/// file without its end.
pub(crate) fn model_name(path: &Path) -> Option<String> {
    let whole = path.canonicalize();
    let path = whole.as_deref().ok().filter(|whole| whole.is_dir()).unwrap_or(path);
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map(|name| name.to_string_lossy().into_owned())
}

/// The request: the checkpoint, the flags, and the compiler.
fn build_request(path: &Path, quant: Option<&str>) -> String {
    let variables = VARIABLES.map(|name| std::env::var(name).unwrap_or_default());
    let (version, abi) = (env!("CARGO_PKG_VERSION"), mlcc_abi::ABI_VERSION);
    format!("{path:?} {quant:?} {variables:?} {version} {abi}")
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

/// Removes what was made of the same checkpoint before its files changed.
fn remove_outdated(folder: &Path, place: &str, kept: &Path) {
    let entries =
        std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let old = entries.filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        path != kept
            && name.strip_prefix(place).is_some_and(|rest| rest.starts_with('-'))
            && name.ends_with(".so")
    });
    // One that cannot be removed only takes room.
    old.for_each(|path| drop(std::fs::remove_file(path)));
}

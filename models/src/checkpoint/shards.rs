//! Which files hold the weights: one file, or the shards that an index file names.

use super::{Checkpoint, CheckpointFormat, Quantization};
use crate::config::ConfigFields;
use crate::error::{CheckpointError, list_names};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The weight files of a model, found but not opened.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightFiles {
    /// The directory or file, for messages.
    pub origin: String,
    pub format: CheckpointFormat,
    /// In order of name.
    pub files: Vec<PathBuf>,
    /// How the weights were quantized, which config.json says.
    pub quantization: Option<Quantization>,
    /// Files of other parts of the model, and what their tensors' names begin with.
    pub auxiliary: Vec<(String, PathBuf)>,
    index: Option<ShardIndex>,
}

/// `*.index.json`: tensor name to shard.
#[derive(Clone, Debug, PartialEq)]
struct ShardIndex {
    path: PathBuf,
    weight_map: BTreeMap<String, String>,
}

/// What is looked for in a directory, best first, as transformers does.
const SINGLE: &[(&str, CheckpointFormat)] =
    &[("model.safetensors", CheckpointFormat::Safetensors), ("pytorch_model.bin", CheckpointFormat::Torch)];
const EXPECTED: &str = "model.safetensors, model.safetensors.index.json, pytorch_model.bin, \
                        pytorch_model.bin.index.json, or one .safetensors, .pth, .pt, .bin or .gguf file";

impl WeightFiles {
    /// The weights in a directory.
    pub fn in_directory(dir: &Path) -> Result<WeightFiles, CheckpointError> {
        for (name, format) in SINGLE {
            let file = dir.join(name);
            if mlcc_files::is_file(&file)? {
                return Ok(WeightFiles::from_single_file(file, *format));
            }
            let index = dir.join(format!("{name}.index.json"));
            if mlcc_files::is_file(&index)? {
                return WeightFiles::from_index(&index, *format);
            }
        }
        let mut candidates = weight_files_of(dir)?;
        // A directory that has both usually has the same weights twice.
        if candidates.iter().any(|(_, format)| *format == CheckpointFormat::Safetensors) {
            candidates.retain(|(_, format)| *format == CheckpointFormat::Safetensors);
        }
        // Of a model in several GGUF files the first one stands for all.
        candidates.retain(|(file, _)| split_gguf(&file_name(file)).is_none_or(|(_, number, _)| number == 1));
        let mut candidates = candidates.into_iter();
        match (candidates.next(), candidates.len()) {
            (None, _) => {
                Err(CheckpointError::NoWeights { dir: dir.display().to_string(), expected: EXPECTED })
            }
            (Some((file, _)), 0) => WeightFiles::from_file(&file),
            (Some(first), _) => {
                let names: Vec<String> =
                    std::iter::once(first).chain(candidates).map(|(file, _)| file_name(&file)).collect();
                let dir = dir.display().to_string();
                Err(CheckpointError::Ambiguous { dir, candidates: list_names(&names) })
            }
        }
    }

    /// The weights in one file, or in the shards of an index file.
    pub fn from_file(path: &Path) -> Result<WeightFiles, CheckpointError> {
        let name = file_name(path);
        if let Some(base) = name.strip_suffix(".index.json") {
            let format = if base.ends_with(".safetensors") {
                CheckpointFormat::Safetensors
            } else {
                CheckpointFormat::Torch
            };
            return WeightFiles::from_index(path, format);
        }
        match format_of(path) {
            Some(CheckpointFormat::Gguf) => WeightFiles::gguf(path),
            Some(format) => Ok(WeightFiles::from_single_file(path.to_path_buf(), format)),
            None => Err(CheckpointError::Unsupported {
                file: path.display().to_string(),
                detail:
                    "does not have the name of a weight file; expected .safetensors, .pth, .pt, .bin, .gguf or \
                     .index.json"
                        .to_string(),
            }),
        }
    }

    /// Takes the weights in `dir` too: names of its tensors get `prefix` and a dot in front.
    pub fn add_auxiliary_weights(&mut self, prefix: String, dir: &Path) -> Result<(), CheckpointError> {
        let files = WeightFiles::in_directory(dir)?;
        self.auxiliary.extend(files.files.into_iter().map(|file| (prefix.clone(), file)));
        Ok(())
    }

    fn from_single_file(file: PathBuf, format: CheckpointFormat) -> WeightFiles {
        WeightFiles {
            origin: file.display().to_string(),
            format,
            files: vec![file],
            quantization: None,
            auxiliary: Vec::new(),
            index: None,
        }
    }

    /// One GGUF file, or all of a model that was split (`name-00001-of-00003.gguf`).
    fn gguf(path: &Path) -> Result<WeightFiles, CheckpointError> {
        let whole = WeightFiles::from_single_file(path.to_path_buf(), CheckpointFormat::Gguf);
        let name = file_name(path);
        let Some((base, _, count)) = split_gguf(&name) else { return Ok(whole) };
        let part = |number: u32| format!("{base}-{number:05}-of-{count:05}.gguf");
        let files: Vec<PathBuf> = (1..=count).map(|number| path.with_file_name(part(number))).collect();
        let mut absent = Vec::new();
        for file in &files {
            if !mlcc_files::is_file(file)? {
                absent.push(file);
            }
        }
        match absent.first() {
            Some(file) => Err(CheckpointError::MissingShard { index: whole.origin, shard: file_name(file) }),
            None => Ok(WeightFiles { files, ..whole }),
        }
    }

    fn from_index(path: &Path, format: CheckpointFormat) -> Result<WeightFiles, CheckpointError> {
        let origin = path.display().to_string();
        let bad = |detail: String| CheckpointError::Unsupported { file: origin.clone(), detail };
        let json = ConfigFields::read(path).map_err(|error| bad(error.to_string()))?;
        let map = json.get("weight_map").and_then(|map| map.as_object());
        let map =
            map.ok_or_else(|| bad("field `weight_map` should be an object of tensor names".to_string()))?;
        let mut weight_map = BTreeMap::new();
        for (tensor, shard) in map {
            let shard =
                shard.as_str().ok_or_else(|| bad(format!("weight_map.{tensor} should be a file name")))?;
            // A shard lies beside its index; anything else would let a model reach out of its directory.
            if Path::new(shard).file_name().is_none_or(|name| name != shard) {
                return Err(bad(format!("weight_map.{tensor} should be a plain file name, found `{shard}`")));
            }
            weight_map.insert(tensor.clone(), shard.to_string());
        }
        if weight_map.is_empty() {
            return Err(bad("`weight_map` names no shards".to_string()));
        }
        let dir = path.parent().unwrap_or(Path::new(""));
        let mut shards: Vec<String> = weight_map.values().cloned().collect();
        shards.sort();
        shards.dedup();
        for shard in &shards {
            if !mlcc_files::is_file(&dir.join(shard))? {
                return Err(CheckpointError::MissingShard { index: origin, shard: shard.clone() });
            }
        }
        let files = shards.iter().map(|shard| dir.join(shard)).collect();
        let index = Some(ShardIndex { path: path.to_path_buf(), weight_map });
        Ok(WeightFiles { origin, format, files, quantization: None, auxiliary: Vec::new(), index })
    }

    /// The directory the files lie in.
    pub fn directory(&self) -> &Path {
        self.files.first().and_then(|file| file.parent()).unwrap_or(Path::new(""))
    }

    /// Every tensor of the index has to be in the shard that the index names. Tensors that no index names are kept: the
    /// comparison with the model's own list will report them.
    pub(super) fn check_index(&self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let Some(index) = &self.index else { return Ok(()) };
        for (tensor, shard) in &index.weight_map {
            let found = checkpoint.tensor_info(tensor).map(|info| {
                info.storage.file_index().map_or_else(String::new, |file| file_name(&self.files[file]))
            });
            if found.as_ref() != Some(shard) {
                return Err(CheckpointError::NotInShard {
                    index: index.path.display().to_string(),
                    tensor: tensor.clone(),
                    shard: shard.clone(),
                });
            }
        }
        Ok(())
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Base name, number and count of a file of a split model.
fn split_gguf(name: &str) -> Option<(&str, u32, u32)> {
    const MOST: u32 = 10_000;
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (base, number) = rest.rsplit_once('-')?;
    let (number, count) = (number.parse().ok()?, count.parse().ok()?);
    (1..=count).contains(&number).then_some((base, number, count)).filter(|_| count <= MOST)
}

pub(super) fn format_of(path: &Path) -> Option<CheckpointFormat> {
    match path.extension()?.to_str()? {
        "safetensors" | "st" => Some(CheckpointFormat::Safetensors),
        "pth" | "pt" | "bin" => Some(CheckpointFormat::Torch),
        "gguf" => Some(CheckpointFormat::Gguf),
        _ => None,
    }
}

/// All weight files of a directory in order of name.
fn weight_files_of(dir: &Path) -> Result<Vec<(PathBuf, CheckpointFormat)>, CheckpointError> {
    let fail = |source| CheckpointError::Io { file: dir.display().to_string(), action: "list", source };
    let mut found = Vec::new();
    let mut dangling = None;
    for entry in std::fs::read_dir(dir).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        // transformers' trainer leaves this one beside the weights.
        let Some(format) = format_of(&path).filter(|_| file_name(&path) != "training_args.bin") else {
            continue;
        };
        match mlcc_files::is_file(&path) {
            Ok(true) => found.push((path, format)),
            Ok(false) => {}
            Err(link) => dangling = Some(link),
        }
    }
    if let Some(link) = dangling.filter(|_| found.is_empty()) {
        return Err(link.into());
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

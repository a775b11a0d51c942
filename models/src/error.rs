//! What can be wrong with a model on disk. Every message names the file and the tensor or field, says what was expected
//! and what was found, and ends with what to do where that is not obvious.

use std::collections::BTreeMap;
use std::path::PathBuf;
use thiserror::Error;

/// Any failure between a `--model` argument and a tensor.
#[derive(Debug, Error)]
pub enum ModelError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    #[error(transparent)]
    Tensors(#[from] TensorMismatch),
    #[error(transparent)]
    Adapter(#[from] AdapterError),
}

/// An adapter (`--lora`) is not one, or not for this base.
#[derive(Debug, Error)]
pub enum AdapterError {
    #[error(
        "{directory} is not a PEFT adapter: {what} is missing; give the folder with adapter_config.json and \
         adapter_model.safetensors"
    )]
    NoAdapter { directory: String, what: &'static str },
    #[error(transparent)]
    Config(Box<ConfigError>),
    #[error(
        "{file}: field `{field}` is {found}, expected {expected}; the file does not belong to the adapter's tensors"
    )]
    Rank { file: String, field: String, found: String, expected: String },
    #[error(
        "{file}: {what} is not merged; merge the adapter with PEFT (`merge_and_unload`) and build the merged model"
    )]
    Unsupported { file: String, what: String },
    #[error("{file}: tensor `{tensor}` {detail}", tensor = shorten_name(.tensor))]
    Tensor { file: String, tensor: String, detail: String },
    #[error(
        "{file}: tensor `{tensor}` {detail}. The adapter was made for another base (its adapter_config.json names {base})",
        tensor = shorten_name(.tensor), base = shorten_name(.base)
    )]
    OtherBase { file: String, tensor: String, detail: String, base: String },
}

/// A JSON file beside the weights (config.json, generation_config.json, golden.json, eval.json) is unusable.
#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("cannot read {file}: {source}")]
    Io { file: String, source: std::io::Error },
    #[error("{file} is not valid JSON: {detail}")]
    Json { file: String, detail: String },
    #[error("{file} is valid JSON, but contains no {what}: {detail}; give a file that does")]
    Form { file: String, what: &'static str, detail: String },
    #[error("{file}: field `{field}` is missing, expected {expected}")]
    Missing { file: String, field: String, expected: &'static str },
    #[error("{file}: field `{field}` should be {expected}, found {found}")]
    Wrong { file: String, field: String, expected: String, found: String },
    #[error(
        "{file}: model_type `{found}` is unknown: {near}`mlcc models` lists the supported ones",
        found = shorten_name(.found)
    )]
    UnknownModelType { file: String, found: String, near: String },
    #[error("{file}: {what} is not supported yet; this version of mlcc supports {supported}")]
    NotSupportedYet { file: String, what: String, supported: String },
    #[error(
        "{file}: no config.json next to it, and its tensors do not identify the model: {detail}. Put the model's \
         config.json into the same directory"
    )]
    CannotInfer { file: String, detail: String },
    #[error(
        "{file} and the tensors of {weights} contradict each other: field `{field}` {what}. Configuration and weights \
         must come from the same model"
    )]
    Contradiction {
        file: String,
        weights: String,
        field: String,
        /// What it says, and the tensor that tells otherwise.
        what: String,
    },
    #[error(
        "{file}: the weights are quantized {what} (`{field}`), which is not supported. Supported: {read}. Use the \
         unquantized checkpoint, or a GGUF file of the model; --quant quantizes it here. If the weights are not \
         quantized after all, remove the field"
    )]
    Quantized {
        file: String,
        field: String,
        /// "with" a method, or what is wrong with the field.
        what: String,
        /// The methods that are.
        read: &'static str,
    },
    #[error("{file}: {source}")]
    Stream { file: String, source: StreamError },
    #[error(transparent)]
    Link(#[from] mlcc_files::DanglingLink),
}

/// A window or attention sinks that a model cannot have.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum StreamError {
    #[error("a sliding window or attention sinks are not possible here: {why}")]
    Unsuitable { why: &'static str },
    #[error(
        "a sliding window of {window} tokens is longer than the {trained} that the model was trained with; choose at most {trained}"
    )]
    TooLong { window: usize, trained: usize },
    #[error(
        "{sinks} attention sinks need a window, and some layers of this model see all tokens; give it one with --sliding-window (`sliding_window_size` in config.json)"
    )]
    NoWindow { sinks: usize },
    #[error(
        "{sinks} attention sinks fill the whole sliding window of {window} tokens; choose fewer sinks or a longer \
         window"
    )]
    NothingLeft { sinks: usize, window: usize },
}

/// A weight file is damaged, of another kind, or uses something that is not read.
#[derive(Debug, Error)]
pub enum CheckpointError {
    #[error("cannot {action} {file}: {source}")]
    Io { file: String, action: &'static str, source: std::io::Error },
    #[error(transparent)]
    Link(#[from] mlcc_files::DanglingLink),
    #[error("{file}: {detail}. The file is damaged or was not copied completely: fetch it again")]
    Damaged { file: String, detail: String },
    #[error("{file}: {detail}")]
    Unsupported { file: String, detail: String },
    #[error(
        "{file}: tensor `{tensor}`: {detail}. The file is damaged or was not copied completely: fetch it again",
        tensor = shorten_name(.tensor)
    )]
    DamagedTensor { file: String, tensor: String, detail: String },
    #[error("{file}: tensor `{tensor}`: {detail}", tensor = shorten_name(.tensor))]
    UnsupportedTensor { file: String, tensor: String, detail: String },
    #[error("{file}: pickle byte {offset}: {detail}")]
    Pickle { file: String, offset: usize, detail: String },
    #[error(
        "tensor `{tensor}` occurs twice, in {first} and in {second}; keep one of them",
        tensor = shorten_name(.tensor)
    )]
    Duplicate { tensor: String, first: String, second: String },
    #[error(
        "{index} names the shard {shard}, which is missing; fetch all shards of the model",
        shard = shorten_name(.shard)
    )]
    MissingShard { index: String, shard: String },
    #[error(
        "{index} says that tensor `{tensor}` is in {shard}, but that file does not have it; index and shards are of different versions",
        tensor = shorten_name(.tensor), shard = shorten_name(.shard)
    )]
    NotInShard { index: String, tensor: String, shard: String },
    #[error("no weights in {dir}: expected {expected}")]
    NoWeights { dir: String, expected: &'static str },
    #[error("several weight files in {dir}: {candidates}; name the one to use with --model FILE")]
    Ambiguous { dir: String, candidates: String },
    #[error("the checkpoint has no tensor `{tensor}`", tensor = shorten_name(.tensor))]
    NotFound { tensor: String },
    #[error(
        "tensor `{tensor}` is stored as {stored}, weights have to be f32, f16 or bf16; convert the checkpoint",
        tensor = shorten_name(.tensor)
    )]
    NotFloat { tensor: String, stored: &'static str },
    #[error(
        "tensor `{tensor}`: elements {start}..{end} asked for, it has {elements}",
        tensor = shorten_name(.tensor)
    )]
    OutOfRange { tensor: String, start: usize, end: usize, elements: usize },
    #[error(
        "tensor `{tensor}` holds {value} at index {index:?} (element {element}); the checkpoint is broken, or overflowed when it was converted to {stored}",
        tensor = shorten_name(.tensor)
    )]
    NotFinite { tensor: String, index: Vec<usize>, element: usize, value: f32, stored: &'static str },
}

/// The `--model` argument does not lead to a model.
#[derive(Debug, Error)]
pub enum ResolveError {
    #[error("{path} does not exist. A model is {forms}")]
    NoSuchModel { path: String, forms: String },
    #[error("`{repo}` is not in the Hugging Face cache ({cache}). {advice}")]
    NotCached { repo: String, cache: PathBuf, advice: String },
    #[error(
        "the Hugging Face cache holds {repo}, but {detail} ({path}). Download it again: hf download {repo}"
    )]
    BrokenCache { repo: String, path: PathBuf, detail: String },
    #[error(
        "{name}: the configuration of this preset is known, but there are no weights: {detail}. Give --weights DIR, fetch {repo} into the Hugging Face cache (hf download {repo}), or use --random-weights SEED for a benchmark"
    )]
    NoPresetWeights { name: String, repo: String, detail: String },
    /// What asked for the download does not permit it.
    #[error("{repo} is not downloaded: {detail}")]
    Refused { repo: String, detail: String },
    #[error("cannot download {repo}: {detail}")]
    Download { repo: String, detail: String },
    #[error("{path}: {detail}")]
    Unusable { path: String, detail: String },
}

/// Names that an error lists of each kind.
pub(crate) const MOST_NAMES: usize = 10;
/// Bytes of a name that an error repeats; names come from files and are as long as these like.
const LONGEST_NAME: usize = 200;

/// A name as an error repeats it.
pub(crate) fn shorten_name(name: &str) -> String {
    let end = name.floor_char_boundary(LONGEST_NAME);
    match end < name.len() {
        true => format!("{}... ({} bytes)", &name[..end], name.len()),
        false => name.to_string(),
    }
}

/// The first names, and how many there are more.
pub(crate) fn list_names(names: &[String]) -> String {
    let mut text =
        names.iter().take(MOST_NAMES).map(|name| shorten_name(name)).collect::<Vec<_>>().join(", ");
    if names.len() > MOST_NAMES {
        text.push_str(&format!(" and {} more", names.len() - MOST_NAMES));
    }
    text
}

/// Lines of a kind of fault.
const MOST_LINES: usize = 64;

/// The lines of a list. Of a long one, names that differ in the number of a layer or expert alone have one line together, which has the
/// last of them.
fn format_lines<T>(list: &[T], kind: &str, name: impl Fn(&T) -> &str, rest: impl Fn(&T) -> String) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let pattern = |name: &str| match list.len() > MOST_LINES {
        true => {
            name.split('.').map(|part| if is_number(part) { "#" } else { part }).collect::<Vec<_>>().join(".")
        }
        false => name.to_string(),
    };
    let mut numbers: BTreeMap<(String, String), usize> = BTreeMap::new();
    let mut groups: Vec<(&str, String, usize)> = Vec::new();
    for item in list {
        let number = *numbers.entry((pattern(name(item)), rest(item))).or_insert(groups.len());
        match groups.get_mut(number) {
            Some(group) => (group.0, group.2) = (name(item), group.2 + 1),
            None => groups.push((name(item), rest(item), 1)),
        }
    }
    let mut text = String::new();
    for (name, rest, count) in groups.iter().take(MOST_LINES) {
        text.push_str(&format!("\n  {kind}: {}{rest}", shorten_name(name)));
        if *count > 1 {
            text.push_str(&format!(" (and {} more, of other numbers)", count - 1));
        }
    }
    let hidden: usize = groups.iter().skip(MOST_LINES).map(|(.., count)| count).sum();
    if hidden > 0 {
        text.push_str(&format!("\n  {kind}: {hidden} others"));
    }
    text
}

/// The tensors that do not fit, in one error: of each kind some, and how many there are.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{}", self.describe())]
pub struct TensorMismatch {
    /// Where the tensors came from, for the message.
    pub source_name: String,
    pub missing: Vec<(String, Vec<usize>)>,
    pub extra: Vec<(String, Vec<usize>)>,
    /// Name, expected shape, found shape.
    pub misshaped: Vec<(String, Vec<usize>, Vec<usize>)>,
}

impl TensorMismatch {
    fn describe(&self) -> String {
        let missing = format_lines(
            &self.missing,
            "missing",
            |(name, _)| name,
            |(_, shape)| format!(", expected {shape:?}"),
        );
        let shapes = |(_, expected, found): &(String, Vec<usize>, Vec<usize>)| {
            format!(", expected {expected:?}, found {found:?}")
        };
        let misshaped = format_lines(&self.misshaped, "wrong shape", |(name, ..)| name, shapes);
        let extra = format_lines(
            &self.extra,
            "not part of the model",
            |(name, _)| name,
            |(_, shape)| format!(" {shape:?}"),
        );
        format!(
            "the tensors of {} do not fit the model:{missing}{misshaped}{extra}\n\
             Configuration and weights must come from the same model.",
            self.source_name
        )
    }
}

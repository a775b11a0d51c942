//! From a `--model` argument to configuration, weight files and tokenizer files.
//!
//! `--model` is, in this order: `hf:org/repo` (also `HF://org/repo`, and `@revision`), an existing directory or file, the name of a
//! preset, or `org/repo` in the Hugging Face cache. Nothing here touches the network unless the crate is built with the
//! feature `hub` and the request allows it; then what `hf:` and presets name is downloaded where the cache has it not.

mod address;
mod download;
#[cfg(feature = "hub")]
mod hub;
mod hub_cache;
mod hub_contents;
mod model_files;
pub mod sentence_transformers;

pub use address::{download_file, is_address, url_file_name};
pub use download::{DownloadEvent, DownloadListener, DownloadPlan};
pub use hub_cache::{HubCache, HubSnapshot, RepoName};
pub use hub_contents::{CachedRepository, FolderUsage, measure_folder};
pub use model_files::ModelFiles;

use crate::adapter::{self, AdapterRequest};
use crate::checkpoint::quantized;
use crate::checkpoint::{Checkpoint, CheckpointFormat, Quantization, WeightFiles};
use crate::config::ConfigFields;
use crate::definition::Architecture;
use crate::error::{CheckpointError, ConfigError, ModelError, ResolveError};
use crate::families::gguf_architectures;
use crate::model_config::ModelConfig;
use crate::pooling_head::{PoolingHead, PoolingMode, PoolingOutput};
use crate::presets::{self, Preset};
use crate::registry;
use crate::tensor_check::check_tensors;
use mlcc_files::did_you_mean;
use sentence_transformers::PromptPrefixes;
use std::path::{Path, PathBuf};

/// What the user asked for.
#[derive(Clone, Debug)]
pub struct ModelRequest {
    pub model: String,
    /// `--weights`: a directory or file that has the weights in place of the one `model` leads to.
    pub weights: Option<PathBuf>,
    /// `--random-weights SEED`: no weights are read.
    pub random_weights: Option<u64>,
    /// `--lora`: adapters that are merged into the weights, in this order.
    pub adapters: Vec<AdapterRequest>,
    pub cache: HubCache,
    /// `--pooling`: vectors of texts are made, in this way in place of that which the files beside the model say.
    pub pooling: Option<PoolingMode>,
    /// Allows downloads, and hears of them; has an effect only with the feature `hub`.
    pub download: Option<DownloadListener>,
}

impl ModelRequest {
    /// A request with the cache that the environment names, and no downloads.
    pub fn new(model: &str) -> ModelRequest {
        ModelRequest {
            model: model.to_string(),
            weights: None,
            random_weights: None,
            adapters: Vec::new(),
            cache: HubCache::from_environment(),
            pooling: None,
            download: None,
        }
    }
}

/// Where the weights come from.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightSource {
    Files(WeightFiles),
    Random { seed: u64 },
}

/// A model that was found; its weights are not open yet.
#[derive(Clone, Debug)]
pub struct ResolvedModel {
    /// For the name of the artifact: directory, file, repository or preset name.
    pub name: String,
    pub config: ModelConfig,
    /// What the weights are for; adapters may add rows to the embedding table of it.
    base_architecture: Architecture,
    pub weights: WeightSource,
    pub adapters: Vec<AdapterRequest>,
    /// Tokenizer and other files beside the weights or the configuration.
    pub files: ModelFiles,
    /// What sentence-transformers puts before texts and between pairs of them.
    pub prompts: PromptPrefixes,
    /// The repository and commit that `--model` led to, if it led to one.
    pub repository: Option<HubRepository>,
}

/// A repository of the Hugging Face hub at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubRepository {
    /// `org/repo`.
    pub name: String,
    pub commit: String,
}

impl ResolvedModel {
    /// Opens the weights under their canonical names, compares them with what the model needs, and merges the adapters.
    pub fn open_weights(&self) -> Result<Checkpoint, ModelError> {
        let architecture = &self.base_architecture;
        let expected = architecture.tensor_shapes();
        let mut checkpoint = match &self.weights {
            WeightSource::Files(files) => {
                let mut checkpoint = open_checkpoint(files)?;
                checkpoint.rename(|name| architecture.canonical_name(name))?;
                checkpoint.apply_fallbacks(&expected, |missing| architecture.fallback_names(missing))?;
                checkpoint.transpose(|stored| architecture.is_stored_transposed(stored));
                checkpoint
            }
            WeightSource::Random { seed } => {
                let tensors = expected.iter().map(|(name, shape)| {
                    let distribution = architecture.distribution(name, shape);
                    (name.clone(), shape.clone(), distribution)
                });
                Checkpoint::random(*seed, tensors.collect())?
            }
        };
        check_tensors(&expected, &checkpoint, |name| architecture.is_ignored(name))?;
        let grown = &self.config.architecture;
        adapter::merge_adapters(&mut checkpoint, grown, self.base_architecture.vocab(), &self.adapters)?;
        check_tensors(&grown.tensor_shapes(), &checkpoint, |name| grown.is_ignored(name))?;
        Ok(checkpoint)
    }
}

/// What `--model` turned out to be.
enum ModelLocation {
    Directory(PathBuf),
    File(PathBuf),
    Preset(&'static Preset),
}

/// Finds a model. See the module's comment for the order of attempts.
pub fn resolve(request: &ModelRequest) -> Result<ResolvedModel, ModelError> {
    let LocatedModel { name, place, repository } = locate_model(request)?;
    let (config_dir, weight_files) = match &place {
        ModelLocation::Directory(dir) => (Some(dir.clone()), None),
        ModelLocation::File(file) => {
            let weights = WeightFiles::from_file(file)?;
            (Some(file.parent().unwrap_or(Path::new("")).to_path_buf()), Some(weights))
        }
        ModelLocation::Preset(_) => (None, None),
    };
    let mut weights = match (request.random_weights, &request.weights) {
        (Some(seed), _) => WeightSource::Random { seed },
        (None, Some(path)) => WeightSource::Files(open_weight_path(path)?),
        (None, None) => match (weight_files.clone(), &config_dir, &place) {
            (Some(files), _, _) => WeightSource::Files(files),
            (None, Some(dir), _) => WeightSource::Files(WeightFiles::in_directory(dir)?),
            (None, None, ModelLocation::Preset(preset)) => {
                return Err(no_preset_weights_error(preset, request).into());
            }
            (None, None, _) => return Err(no_such_model_error(&request.model).into()),
        },
    };
    if let WeightSource::Files(files) = &mut weights {
        files.quantization = detect_quantization(files)?;
    }
    let mut config = match &place {
        ModelLocation::Preset(preset) => preset.model_config(),
        ModelLocation::Directory(dir) => read_config(dir, &weights)?,
        // With --random-weights or --weights the file named still tells the shapes.
        ModelLocation::File(_) => match (&config_dir, weight_files) {
            (Some(dir), Some(mut files)) => {
                files.quantization = detect_quantization(&files)?;
                read_config(dir, &WeightSource::Files(files))?
            }
            _ => return Err(no_such_model_error(&request.model).into()),
        },
    };
    let weight_dir = match &weights {
        WeightSource::Files(files) => Some(files.directory().to_path_buf()),
        WeightSource::Random { .. } => None,
    };
    let adapters = request.adapters.clone();
    let grown = adapter::find_grown_vocab(&config.architecture, &adapters)?;
    // An adapter for which tokens were added has their tokenizer.
    let tokenizers = grown.iter().map(|(adapter, _)| &adapter.directory);
    let files = ModelFiles::in_directories(tokenizers.chain(&config_dir).chain(&weight_dir));
    let files = files.map_err(ConfigError::from)?;
    let prompts = attach_pooling_head(&mut config, &mut weights, &files, request.pooling)?;
    let base = config.architecture.clone();
    if let Some((_, rows)) = grown {
        config = config.with_vocab(rows)?;
    }
    Ok(ResolvedModel { name, config, base_architecture: base, weights, adapters, files, prompts, repository })
}

/// Makes a model of texts of one that has files of sentence-transformers beside it, and gives its prompts.
fn attach_pooling_head(
    config: &mut ModelConfig,
    weights: &mut WeightSource,
    files: &ModelFiles,
    pooling: Option<PoolingMode>,
) -> Result<PromptPrefixes, ModelError> {
    let architecture = &config.architecture;
    let own = architecture.pooling_head();
    // A head for classification says itself what it is.
    if own.is_some_and(|head| head.output == PoolingOutput::Scores) {
        return Ok(PromptPrefixes::default());
    }
    let read = |dir: &PathBuf| sentence_transformers::read_sentence_transformer(dir).transpose();
    let sentence = files.directories.iter().find_map(read).transpose()?;
    let answers = sentence.iter().flat_map(|sentence| sentence.head.answer_tokens());
    if let Some(token) = answers.into_iter().find(|&token| token >= architecture.vocab()) {
        return Err(ConfigError::Wrong {
            file: "the config.json of the module LogitScore".into(),
            field: "true_token_id or false_token_id".into(),
            expected: format!("one of the model's {} tokens", architecture.vocab()),
            found: token.to_string(),
        }
        .into());
    }
    let head = match (&sentence, pooling) {
        (None, None) => return Ok(PromptPrefixes::default()),
        (Some(sentence), _) if sentence.head.output == PoolingOutput::Scores => sentence.head.clone(),
        (Some(sentence), None) => sentence.head.clone(),
        (sentence, Some(pooling)) => {
            let head = sentence.as_ref().map(|sentence| sentence.head.clone()).or(own.cloned());
            PoolingHead { pooling, ..head.unwrap_or(PoolingHead::embedding(pooling)) }
        }
    };
    if !architecture.supports_pooling() {
        return Err(ConfigError::NotSupportedYet {
            file: config.origin.clone(),
            what: format!("the model_type `{}` as a model of embeddings (modules.json, --pooling)", config.model_type),
            supported: "for that bert, xlm-roberta, roberta, modernbert, qwen2, qwen3, llama, mistral and gemma3_text".to_string(),
        }
        .into());
    }
    config.architecture = architecture.clone().with_pooling_head(Some(head));
    let Some(sentence) = sentence else { return Ok(PromptPrefixes::default()) };
    if let WeightSource::Files(files) = weights {
        for (prefix, dir) in sentence.weights {
            files.add_auxiliary_weights(prefix, &dir)?;
        }
    }
    Ok(sentence.prompts)
}

struct LocatedModel {
    name: String,
    place: ModelLocation,
    repository: Option<HubRepository>,
}

impl LocatedModel {
    fn local(name: String, place: ModelLocation) -> LocatedModel {
        LocatedModel { name, place, repository: None }
    }
    fn snapshot(name: &str, repo: &RepoName, snapshot: HubSnapshot) -> LocatedModel {
        let repository = HubRepository { name: repo.full_name(), commit: snapshot.commit };
        LocatedModel {
            name: name.into(),
            place: ModelLocation::Directory(snapshot.directory),
            repository: Some(repository),
        }
    }
}

/// The files of a model, wherever its name led to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundCheckpoint {
    /// Directory, file, repository or preset name.
    pub name: String,
    /// A directory, or a weight file.
    pub path: PathBuf,
    /// The repository and commit that the name led to, if it led to one.
    pub repository: Option<HubRepository>,
}

/// Finds the files of a model as [`resolve`] does, downloads included, and reads none of them.
pub fn find_checkpoint(request: &ModelRequest) -> Result<FoundCheckpoint, ResolveError> {
    let LocatedModel { name, place, repository } = locate_model(request)?;
    match place {
        ModelLocation::Directory(path) | ModelLocation::File(path) => {
            Ok(FoundCheckpoint { name, path, repository })
        }
        ModelLocation::Preset(preset) => Err(no_preset_weights_error(preset, request)),
    }
}

/// The repository that a name means: `hf:org/repo`, a preset, or `org/repo`. Paths that exist mean themselves.
pub fn repository_of(model: &str) -> Option<RepoName> {
    match hub_prefix(model) {
        Some(repo) => RepoName::parse(repo),
        None if Path::new(model).exists() => None,
        None => match Preset::from_name(model) {
            Some(preset) => RepoName::parse(preset.repo),
            None => RepoName::parse(model),
        },
    }
}

/// Asks the hub for the commit that the revision is now, and downloads what is missing of it.
pub fn update_repository(repo: &RepoName, request: &ModelRequest) -> Result<HubSnapshot, ResolveError> {
    fetch_snapshot(repo, request)
}

fn locate_model(request: &ModelRequest) -> Result<LocatedModel, ResolveError> {
    let model = request.model.as_str();
    if let Some(repo) = hub_prefix(model) {
        let repo = RepoName::parse(repo).ok_or_else(|| no_such_model_error(model))?;
        let snapshot = cached_or_download(&repo, request)?;
        return Ok(LocatedModel::snapshot(repo.short_name(), &repo, snapshot));
    }
    let path = Path::new(model);
    if path.is_dir() {
        return Ok(LocatedModel::local(directory_name(path), ModelLocation::Directory(path.to_path_buf())));
    }
    if path.exists() {
        return Ok(LocatedModel::local(file_stem_name(path), ModelLocation::File(path.to_path_buf())));
    }
    if let Some(preset) = Preset::from_name(model) {
        let wants_files = request.weights.is_none() && request.random_weights.is_none();
        let Some(repo) = RepoName::parse(preset.repo).filter(|_| wants_files) else {
            return Ok(LocatedModel::local(preset.name.to_string(), ModelLocation::Preset(preset)));
        };
        return match cached_or_download(&repo, request) {
            Ok(snapshot) => Ok(LocatedModel::snapshot(preset.name, &repo, snapshot)),
            // Not there is reported later with all ways to get the weights; broken or failed is reported as such.
            Err(ResolveError::NotCached { .. }) => {
                Ok(LocatedModel::local(preset.name.to_string(), ModelLocation::Preset(preset)))
            }
            Err(other) => Err(other),
        };
    }
    let Some(repo) = RepoName::parse(model) else { return Err(no_such_model_error(model)) };
    match request.cache.find_snapshot(&repo)? {
        Some(snapshot) => Ok(LocatedModel::snapshot(repo.short_name(), &repo, snapshot)),
        // `models/x` may be a mistyped path as well as a repository: say both, and ask nobody for it.
        None => Err(ResolveError::NotCached {
            repo: repo.full_name_at(),
            cache: request.cache.directory.clone(),
            advice: format!("There is no directory or file of that name either. {}", download_advice(&repo)),
        }),
    }
}

/// The part after `hf:` or `hf://` in any case.
fn hub_prefix(model: &str) -> Option<&str> {
    let (scheme, rest) = model.split_once(':')?;
    scheme.eq_ignore_ascii_case("hf").then(|| rest.strip_prefix("//").unwrap_or(rest))
}

fn cached_or_download(repo: &RepoName, request: &ModelRequest) -> Result<HubSnapshot, ResolveError> {
    match request.cache.find_snapshot(repo)? {
        Some(snapshot) => Ok(snapshot),
        None => fetch_snapshot(repo, request),
    }
}

#[cfg(feature = "hub")]
fn fetch_snapshot(repo: &RepoName, request: &ModelRequest) -> Result<HubSnapshot, ResolveError> {
    let Some(listener) = &request.download else { return Err(not_cached_error(repo, request)) };
    hub::download(repo, &request.cache, listener)?;
    request.cache.find_snapshot(repo)?.ok_or_else(|| not_cached_error(repo, request))
}

#[cfg(not(feature = "hub"))]
fn fetch_snapshot(repo: &RepoName, request: &ModelRequest) -> Result<HubSnapshot, ResolveError> {
    Err(not_cached_error(repo, request))
}

fn not_cached_error(repo: &RepoName, request: &ModelRequest) -> ResolveError {
    let advice = format!(
        "{} Run: hf download {}, or give the directory of a copy in place of the name (HF_HOME moves the cache)",
        download::no_downloads(),
        repo.full_name()
    );
    ResolveError::NotCached { repo: repo.full_name_at(), cache: request.cache.directory.clone(), advice }
}

fn download_advice(repo: &RepoName) -> String {
    match cfg!(feature = "hub") {
        true => format!("--model hf:{} downloads it", repo.full_name_at()),
        false => format!("To fetch it, run: hf download {}", repo.full_name()),
    }
}

fn no_such_model_error(model: &str) -> ResolveError {
    let forms = format!(
        "a directory with config.json, a weight file (.safetensors, .pth, .bin, .gguf), hf:org/repo, or the name of a preset: \
         {}`mlcc models` lists all",
        did_you_mean(model, presets::all_presets().map(|preset| preset.name))
    );
    ResolveError::NoSuchModel { path: format!("`{model}`"), forms }
}

fn no_preset_weights_error(preset: &Preset, request: &ModelRequest) -> ResolveError {
    ResolveError::NoPresetWeights {
        name: preset.name.to_string(),
        repo: preset.repo.to_string(),
        detail: format!(
            "{} is not in the Hugging Face cache ({})",
            preset.repo,
            request.cache.directory.display()
        ),
    }
}

fn open_weight_path(path: &Path) -> Result<WeightFiles, ModelError> {
    if path.is_dir() {
        return Ok(WeightFiles::in_directory(path)?);
    }
    if !path.exists() {
        let detail = "does not exist; --weights takes a directory or a weight file".to_string();
        return Err(ResolveError::Unusable { path: path.display().to_string(), detail }.into());
    }
    Ok(WeightFiles::from_file(path)?)
}

/// The config.json beside the weights says so if another program has quantized them. GGUF files tell their types themselves.
fn detect_quantization(files: &WeightFiles) -> Result<Option<Quantization>, ModelError> {
    let (dir, path) = (files.directory(), files.directory().join("config.json"));
    if files.format == CheckpointFormat::Gguf || !mlcc_files::exists(&path).map_err(ConfigError::from)? {
        return Ok(None);
    }
    let fields = ConfigFields::read(&path)?;
    let found = quantized::read_quantization(&fields).and_then(|found| match found {
        Some(found) => Ok(Some(found)),
        None => quantized::read_quantization_file(dir),
    });
    if found.is_err() {
        // Of a model that is not known at all, that comes first.
        registry::find_entry(&fields)?;
    }
    Ok(found?)
}

/// config.json of the directory, or what the tensors tell.
fn read_config(dir: &Path, weights: &WeightSource) -> Result<ModelConfig, ModelError> {
    // A GGUF file tells its configuration itself; a config.json beside it may be that of another model.
    if let WeightSource::Files(files) = weights
        && files.format == CheckpointFormat::Gguf
        && let Some(fields) = open_checkpoint(files)?.embedded_config(&gguf_architectures())?
    {
        return Ok(ModelConfig::from_fields(fields)?);
    }
    let path = dir.join("config.json");
    if mlcc_files::exists(&path).map_err(ConfigError::from)? {
        let fields = ConfigFields::read(&path)?;
        let WeightSource::Files(files) = weights else { return Ok(ModelConfig::from_fields(fields)?) };
        // Before the weights, which may be of a kind that is not read either.
        registry::find_entry(&fields)?;
        return Ok(ModelConfig::from_checkpoint(fields, &open_checkpoint(files)?)?);
    }
    match weights {
        WeightSource::Files(files) => Ok(ModelConfig::of_rwkv_tensors(&open_checkpoint(files)?)?),
        WeightSource::Random { .. } => {
            let expected = "config.json, which --random-weights needs";
            Err(CheckpointError::NoWeights { dir: dir.display().to_string(), expected }.into())
        }
    }
}

/// Opens weights; tensors of GGUF files get the names that the families know.
pub fn open_checkpoint(files: &WeightFiles) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open_as(files, &gguf_architectures())
}

/// The last part of a path, also for `.` and `dir/..`.
fn directory_name(path: &Path) -> String {
    let full = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    full.file_name().map_or_else(|| "model".to_string(), |name| name.to_string_lossy().into_owned())
}

fn file_stem_name(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".to_string(), |name| name.to_string_lossy().into_owned())
}

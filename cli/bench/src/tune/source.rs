//! The model that `mlcc tune` builds: one by its name, or the configuration that an artifact has in its
//! metadata. Weights are random: speed does not depend on their values.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use mlcc_codegen::cache::ObjectCache;
use mlcc_codegen::folder::{TemporaryFolder, create_temporary};
use mlcc_driver::compile::keep::{BASE, KEEP};
use mlcc_driver::compile::{BuildOptions, ModuleText};
use mlcc_models::ModelRequest;
use mlcc_passes::CacheType;
use mlcc_passes::scheme::QuantScheme;
use mlcc_runtime::Artifact;
use serde_json::Value;

use super::TuneOptions;
use crate::error::BenchError;

const SEED: u64 = 0;

pub struct TuningSource {
    pub options: BuildOptions,
    /// Holds the configuration of an artifact until it is read.
    pub _folder: Option<TemporaryFolder>,
}

pub fn find_source(asked: &TuneOptions) -> Result<TuningSource, BenchError> {
    let path = Path::new(&asked.model);
    if ModuleText::is_named(&asked.model) {
        return Err(BenchError::usage(format!(
            "{}: a module in text form is tuned by hand; name the model that it came from",
            asked.model
        )));
    }
    let mut options = BuildOptions::new(&asked.model);
    let mut folder = None;
    if is_elf(path) {
        folder = Some(read_artifact(path, &mut options)?);
    } else if asked.quant.is_none() {
        return Err(BenchError::usage(format!(
            "{}: name the weight format with --quant (mlcc quants)",
            asked.model
        )));
    }
    if let Some(name) = &asked.quant {
        set_quant(&mut options, name).map_err(BenchError::Usage)?;
    }
    options.request.random_weights = Some(SEED);
    options.request.download = asked.download.clone();
    if let Some(directory) = &asked.hf_cache {
        options.request.cache.directory = directory.clone();
    }
    options.weights_on_load = true;
    // Its products are those of short prompts.
    options.batch = Some(1);
    options.kv_cache = asked.kv_cache.or(options.kv_cache);
    options.chunk = asked.chunk.or(options.chunk);
    options.context = asked.ctx_size.or(options.context);
    options.cache = ObjectCache::from_environment();
    Ok(TuningSource { options, _folder: folder })
}

fn set_quant(options: &mut BuildOptions, name: &str) -> Result<(), String> {
    if name.eq_ignore_ascii_case(KEEP) {
        return Err(format!(
            "--quant {KEEP} stands for what a checkpoint stores, but no checkpoint is read: name a format (mlcc quants)"
        ));
    }
    let (scheme, _) = QuantScheme::from_name(name).map_err(|e| e.to_string())?;
    options.quant = scheme;
    options.quant_name = name.to_lowercase();
    Ok(())
}

fn is_elf(path: &Path) -> bool {
    let mut magic = [0; 4];
    // A pipe would be waited for.
    let mut read = || File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok();
    path.is_file() && read() && magic == *b"\x7fELF"
}

/// Uses the metadata of a build: the configuration goes into a folder of its own, as a model without weights.
fn read_artifact(path: &Path, options: &mut BuildOptions) -> Result<TemporaryFolder, BenchError> {
    let artifact = Artifact::open(path)?;
    let failed = |what: &str| {
        BenchError::Failed(format!(
            "{}: its metadata {what}, so it cannot be built again: tune the model that it came from",
            path.display()
        ))
    };
    let metadata: Value = artifact
        .metadata()
        .and_then(|text| serde_json::from_str(text).ok())
        .ok_or_else(|| failed("cannot be read"))?;
    let get = |path: &str| metadata.pointer(path).filter(|value| !value.is_null());
    let config =
        get("/model/config").and_then(Value::as_object).ok_or_else(|| failed("has no configuration"))?;
    let name = get("/model/name").and_then(Value::as_str).unwrap_or_default();
    let name = if name.is_empty() || name.contains('/') || name.starts_with('.') { "model" } else { name };

    let folder = create_temporary("mlcc-tune").map_err(BenchError::io("create", std::env::temp_dir()))?;
    let place = folder.path().join(name);
    let written = std::fs::create_dir(&place)
        .and_then(|()| std::fs::write(place.join("config.json"), Value::Object(config.clone()).to_string()));
    written.map_err(BenchError::io("write", &place))?;
    options.request = ModelRequest::new(&place.display().to_string());

    let scheme =
        get("/quantization/scheme").and_then(Value::as_str).ok_or_else(|| failed("has no format"))?;
    let keeps_blocks = get("/quantization/keep").and_then(Value::as_bool) == Some(true) && scheme == BASE;
    if !keeps_blocks {
        set_quant(options, scheme)
            .map_err(|what| BenchError::Failed(format!("{}: {what}", path.display())))?;
    } else {
        // Which blocks were kept is known of no single tensor.
        return Err(failed("says that blocks of a checkpoint were kept"));
    }
    let number = |path: &str| get(path).and_then(Value::as_u64);
    options.chunk = number("/memory/chunk").and_then(|n| u32::try_from(n).ok());
    options.context = number("/memory/context");
    options.sliding_window = number("/memory/window").and_then(|n| usize::try_from(n).ok());
    options.attention_sinks = number("/memory/sinks").and_then(|n| usize::try_from(n).ok());
    let formats = get("/memory/cache/formats").and_then(Value::as_array);
    let mut formats = formats.into_iter().flatten().filter_map(Value::as_str);
    options.kv_cache = formats.next().and_then(CacheType::from_name);
    Ok(folder)
}

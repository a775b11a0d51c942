//! Loading of models, from the paths of artifacts to models that answer.

use std::path::PathBuf;
use std::time::Duration;

use mlcc_engine::conversation::ChatFormat;
use mlcc_engine::embedding::EmbeddingModel;
use mlcc_engine::{LocalMachine, artifact_text};
use mlcc_text::{ChatSource, ChatTemplate};
use mlcc_runtime::{LoadOptions, Model, WorkerThreads};
use mlcc_serve::{
    EmbeddedServer, ModelSetup, NoLibrary, ReadAdapter, ReadyModel, ServeOptions, embedding_memory,
};
use pyo3::prelude::*;
use serde_json::Value;

use crate::adapters::{self, AdapterSpec};
use crate::errors::{self, invalid};

/// Arguments of the constructor of a model.
#[derive(Clone)]
pub struct LoadSettings {
    pub threads: Option<usize>,
    pub cpu_level: Option<String>,
    /// Name of a chat template, `plain`, or Jinja text.
    pub template: Option<String>,
    /// Adapters of the first model.
    pub adapters: Vec<AdapterSpec>,
    pub serve: ServeOptions,
}

pub struct LoadedModels {
    /// The first one.
    pub model: Model,
    pub application: EmbeddedServer,
}

/// Loads `paths`, by the names that requests call them.
pub fn load(paths: &[(String, PathBuf)], settings: &LoadSettings) -> PyResult<LoadedModels> {
    let (mut models, mut texts, mut committed) = (Vec::new(), Vec::new(), 0);
    let mut first: Option<Model> = None;
    check_names(paths, &settings.adapters)?;
    for (name, path) in paths {
        let workers = first.as_ref().and_then(Model::workers);
        let model = open(path, settings, workers)?;
        let tokenizer = artifact_text::tokenizer(&model).map_err(errors::carried)?;
        tokenizer.check_vocab(model.vocab()).map_err(|error| invalid(error.to_string()))?;
        let wanted = settings.adapters.iter().filter(|_| first.is_none());
        let adapters = wanted.map(|wanted| adapters::read(&model, wanted)).collect::<Result<Vec<_>, _>>()?;
        first.get_or_insert_with(|| model.clone());
        if model.text_width() > 0 {
            let model = EmbeddingModel::new(&model, tokenizer).map_err(errors::texts)?;
            committed += embedding_memory(name, &model, &settings.serve, committed).map_err(errors::serve)?;
            texts.push((name.clone(), model));
            continue;
        }
        let metadata: Value = serde_json::from_str(model.metadata()).unwrap_or(Value::Null);
        let served = ModelSetup {
            executor: model.executor().to_owned(),
            format: format(&model, settings.template.as_deref())?,
            sampling: artifact_text::sampling(&metadata).map_err(|error| invalid(error.to_string()))?,
            eos: artifact_text::eos_ids(&metadata),
            drafter: None,
            draft: None,
            adapters,
            reads_adapters: Some(reader(&model)),
            tokenizer,
        };
        let ready =
            ReadyModel::from_model(&model, served, &settings.serve, committed).map_err(errors::serve)?;
        committed += ready.need();
        models.push((name.clone(), ready));
    }
    let model = first.ok_or_else(|| invalid("no model was given"))?;
    let application = EmbeddedServer::start(models, texts, Box::new(NoLibrary), &settings.serve);
    Ok(LoadedModels { model, application: application.map_err(errors::serve)? })
}

/// Names of adapters are names of models.
fn check_names(paths: &[(String, PathBuf)], adapters: &[AdapterSpec]) -> PyResult<()> {
    let mut names: Vec<&str> = paths.iter().map(|(name, _)| name.as_str()).collect();
    for (name, _, _) in adapters {
        if names.contains(&name.as_str()) {
            return Err(errors::adapter(format!(
                "two models are called {name}: give the adapter another name"
            )));
        }
        names.push(name);
    }
    Ok(())
}

/// Reads the adapters that clients load.
fn reader(model: &Model) -> ReadAdapter {
    let model = model.clone();
    Box::new(move |name, folder| {
        let wanted = (name.to_owned(), folder.to_path_buf(), 1.0);
        adapters::read(&model, &wanted).map_err(|error| error.to_string())
    })
}

fn open(path: &PathBuf, settings: &LoadSettings, workers: Option<WorkerThreads>) -> PyResult<Model> {
    let options = LoadOptions {
        threads: settings.threads,
        cpu_level: settings.cpu_level.clone(),
        workers,
        ..LoadOptions::default()
    };
    Model::load(path, &options).map_err(errors::runtime)
}

fn format(model: &Model, template: Option<&str>) -> PyResult<Option<ChatFormat>> {
    let refused = |error: mlcc_text::ChatError| invalid(error.to_string());
    let source = match template {
        None => return artifact_text::chat_format(model).map_err(refused),
        Some("plain") => return Ok(Some(ChatFormat::Plain)),
        Some(name) if ChatTemplate::names().contains(&name) => ChatSource::named(name).map_err(refused)?,
        Some(text) if text.contains('{') => ChatSource::jinja(text),
        Some(name) => {
            let names = ChatTemplate::names().join(", ");
            return Err(invalid(format!(
                "there is no chat template {name}: give Jinja text, or one of {names}, plain"
            )));
        }
    };
    let template = artifact_text::with_tokens(source, model).and_then(|source| source.compile(&LocalMachine));
    Ok(Some(ChatFormat::Template(Box::new(template.map_err(refused)?))))
}

/// A time from Python.
pub fn seconds(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| invalid(format!("{name} is {seconds}, expected seconds, 0 or more")))
}

//! `/api/tags`, `/api/ps` and `/api/show`: the models, and what they are.

use mlcc_engine::embedding::PoolingTask;
use mlcc_text::chat::strftime;
use serde_json::{Map, Value, json};

use crate::app_state::AppState;
use crate::embeddings::HostedEmbedder;
use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::fill_in_middle::FimTokens;
use crate::model_facts::ModelFacts;
use crate::ollama::options::{FIELDS, can_think};
use crate::ollama::tagged_name;
use crate::served_model::ServedModel;

/// The end of the time for which a model stays loaded: a client reads a time, and there is none.
const NEVER: &str = "2300-01-01T00:00:00Z";
/// The format that models have.
const FORMAT: &str = "mlcc";

/// A model in a list.
struct ListedModel<'a> {
    name: &'a str,
    parent: &'a str,
    facts: &'a ModelFacts,
    /// The time at which it was loaded, in seconds since 1970.
    loaded: u64,
}

impl ListedModel<'_> {
    fn served(hosted: &ServedModel) -> ListedModel<'_> {
        ListedModel {
            name: &hosted.name,
            parent: hosted.base_model().unwrap_or_default(),
            facts: &hosted.facts,
            loaded: hosted.loaded,
        }
    }

    fn embedder(hosted: &HostedEmbedder, loaded: u64) -> ListedModel<'_> {
        ListedModel { name: &hosted.name, parent: "", facts: &hosted.facts, loaded }
    }

    fn details(&self) -> Value {
        let family = &self.facts.family;
        json!({
            "parent_model": self.parent,
            "format": FORMAT,
            "family": family,
            "families": (!family.is_empty()).then_some([family]),
            "parameter_size": self.facts.parameters.map(parameter_size).unwrap_or_default(),
            "quantization_level": self.facts.scheme,
        })
    }

    fn entry(&self) -> Value {
        let name = tagged_name(self.name);
        json!({
            "name": name,
            "model": name,
            "modified_at": self.modified(),
            "size": self.facts.weight_bytes,
            "digest": self.facts.digest(),
            "details": self.details(),
        })
    }

    fn modified(&self) -> String {
        strftime("%FT%TZ", self.loaded)
    }
}

/// Models of vectors; scores have no route in this API.
fn embedders(app: &AppState) -> impl Iterator<Item = &HostedEmbedder> {
    app.embedding_models.all().filter(|hosted| hosted.purpose == PoolingTask::Embedding)
}

/// The models that can be asked now.
pub fn tags(app: &AppState) -> Value {
    let loaded = app.models.loaded();
    let texts = loaded.iter().map(|hosted| ListedModel::served(hosted).entry());
    let vectors = embedders(app).map(|hosted| ListedModel::embedder(hosted, app.server.started).entry());
    json!({"models": texts.chain(vectors).collect::<Vec<_>>()})
}

/// The same models with the memory that they need.
pub fn running(app: &AppState) -> Value {
    let loaded = app.models.loaded();
    let with = |mut entry: Value, bytes: u64, on_gpu: bool, context: Option<u64>| {
        entry.as_object_mut().and_then(|fields| fields.remove("modified_at"));
        entry["size"] = bytes.into();
        entry["size_vram"] = if on_gpu { bytes.into() } else { 0.into() };
        entry["expires_at"] = NEVER.into();
        entry["context_length"] = context.unwrap_or(0).into();
        entry
    };
    let texts = loaded.iter().map(|hosted| {
        let context = hosted.engine.limits().context.map(|most| most as u64);
        let bytes = hosted.need.max(hosted.facts.weight_bytes);
        with(ListedModel::served(hosted).entry(), bytes, hosted.facts.is_for_gpu, context)
    });
    let vectors = embedders(app).map(|hosted| {
        let entry = ListedModel::embedder(hosted, app.server.started).entry();
        with(entry, hosted.facts.weight_bytes, hosted.facts.is_for_gpu, hosted.facts.context)
    });
    json!({"models": texts.chain(vectors).collect::<Vec<_>>()})
}

/// A model: what it can do, its template and its size.
pub fn show(app: &AppState, mut fields: RequestFields) -> Result<Value, ApiError> {
    let model: Option<String> = fields.take_field("model", "the name of a model")?;
    let other: Option<String> = fields.take_field("name", "the name of a model")?;
    let _: Option<bool> = fields.take_field("verbose", "true or false")?;
    let _: Option<Map<String, Value>> = fields.take_field("options", "an object")?;
    fields.drop_neutral("system", |system| system == "");
    fields.finish(&[FIELDS])?;
    let name = model.or(other);
    let embedder = name.as_deref().and_then(|name| app.embedding_models.named(name));
    if let Some(hosted) = embedder.filter(|hosted| hosted.purpose == PoolingTask::Embedding) {
        let listed = ListedModel::embedder(hosted, app.server.started);
        let more =
            [("embedding_length", json!(hosted.width)), ("context_length", json!(hosted.facts.context))];
        return Ok(description(&listed, &["embedding"], "", more.into()));
    }
    let hosted = app.find_model(name.as_deref())?;
    let limits = hosted.engine.limits();
    let more = [("context_length", json!(limits.context)), ("vocab_size", json!(limits.vocab))];
    let template = hosted.format.as_ref().and_then(|format| format.jinja_text()).unwrap_or_default();
    Ok(description(&ListedModel::served(&hosted), &capabilities(&hosted), template, more.into()))
}

fn capabilities(hosted: &ServedModel) -> Vec<&'static str> {
    let able = [
        ("completion", true),
        ("tools", hosted.syntax.calls.is_some()),
        ("thinking", can_think(hosted)),
        ("insert", FimTokens::find(&hosted.tokenizer).is_some()),
    ];
    able.iter().filter(|(_, able)| *able).map(|(name, _)| *name).collect()
}

fn description(
    listed: &ListedModel<'_>,
    capabilities: &[&str],
    template: &str,
    more: Vec<(&str, Value)>,
) -> Value {
    let architecture = if listed.facts.family.is_empty() { FORMAT } else { &listed.facts.family };
    let mut info = json!({
        "general.architecture": architecture,
        "general.basename": listed.name,
        "general.parameter_count": listed.facts.parameters,
    });
    for (name, value) in more {
        info[format!("{architecture}.{name}")] = value;
    }
    json!({
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": listed.details(),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": listed.modified(),
    })
}

/// A number of parameters as Ollama writes it.
fn parameter_size(count: u64) -> String {
    match count {
        0..1_000 => count.to_string(),
        1_000..1_000_000 => format!("{:.2}K", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2}M", count as f64 / 1e6),
        _ => format!("{:.1}B", count as f64 / 1e9),
    }
}

//! The models of a server, by their names: which one a request means, and how they come and go while texts
//! run.
//!
//! A text holds on to its model. A model that was unloaded or replaced gets no new texts, and is given up
//! after its last one has ended.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Duration;

use serde_json::{Value, json};

use crate::app_state::ServerState;
use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::model_library::{LoadError, ModelLibrary, ReadyModel};
use crate::served_model::{LoadedModel, ServedModel};

/// The interval of checks whether a model that is to be unloaded is still in use.
const LOOK: Duration = Duration::from_millis(20);

/// Most models that are loaded at a time.
const MOST_MODELS: usize = 64;
/// Most bytes of a model's name.
const LONGEST_NAME: usize = 256;

pub struct ModelRegistry {
    /// The loaded models in the order in which they came; the first is that of requests without a name.
    pub(crate) loaded: RwLock<Vec<Arc<ServedModel>>>,
    /// All that were ever there, as long as they have texts.
    all_with_texts: Mutex<Vec<Weak<LoadedModel>>>,
    pub(crate) library: Box<dyn ModelLibrary>,
    /// Bytes that others can need at most, which do not come and go.
    other_bytes: u64,
    /// One comes or goes at a time.
    pub(crate) changes: Mutex<()>,
    pub(crate) server: Arc<ServerState>,
}

impl ModelRegistry {
    pub fn start(
        models: Vec<(String, ReadyModel)>,
        library: Box<dyn ModelLibrary>,
        beside: u64,
        server: &Arc<ServerState>,
    ) -> std::io::Result<ModelRegistry> {
        let start = |(name, ready)| LoadedModel::start(name, ready, server).map(Arc::new);
        let models = models.into_iter().map(start).collect::<std::io::Result<Vec<_>>>()?;
        let ever = Mutex::new(models.iter().map(Arc::downgrade).collect());
        let loaded = models.into_iter().flat_map(ServedModel::from_loaded).collect();
        let server = Arc::clone(server);
        Ok(ModelRegistry {
            loaded: RwLock::new(loaded),
            all_with_texts: ever,
            library,
            other_bytes: beside,
            changes: Mutex::new(()),
            server,
        })
    }

    pub fn loaded(&self) -> Vec<Arc<ServedModel>> {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The models that are loaded, and those that are not but have sequences.
    pub fn all_alive(&self) -> Vec<Arc<LoadedModel>> {
        let mut ever = self.all_with_texts.lock().unwrap_or_else(PoisonError::into_inner);
        ever.retain(|model| model.strong_count() > 0);
        ever.iter().filter_map(Weak::upgrade).collect()
    }

    /// True if there are models, and none of them works any more.
    pub fn all_lost(&self) -> bool {
        let loaded = self.loaded();
        !loaded.is_empty() && loaded.iter().all(|hosted| !hosted.engine.is_running())
    }

    /// The model that a request names, or the first one.
    pub fn find_model(&self, name: Option<&str>) -> Result<Arc<ServedModel>, ApiError> {
        let loaded = self.loaded();
        let Some(name) = name else {
            return loaded.first().cloned().ok_or_else(ApiError::no_model);
        };
        let loaded_as = |name: &str| loaded.iter().find(|hosted| hosted.name == name).cloned();
        let untagged = without_tag(name);
        loaded_as(name).or_else(|| loaded_as(untagged)).ok_or_else(|| {
            match self.library.names().iter().find(|known| *known == name || *known == untagged) {
                Some(known) => ApiError::not_loaded(known),
                None => ApiError::unknown_model(name, &names(&loaded)),
            }
        })
    }

    /// The memory that the texts of a body need at most while they become tokens, in whatever model.
    pub fn max_encoded_bytes(&self, body: usize) -> usize {
        self.loaded().iter().map(|hosted| hosted.encoding_bytes(body)).max().unwrap_or(0)
    }

    /// A client may change what is loaded, as long as it has this.
    pub(crate) fn lock_changes(&self) -> Result<MutexGuard<'_, ()>, ApiError> {
        let one = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        self.server.check_ready()?;
        Ok(one)
    }

    /// All models, as `/v1/models` tells of them: those that are loaded, then those that could be.
    pub fn list(&self) -> Vec<Value> {
        let loaded = self.loaded();
        let mut list: Vec<Value> = loaded
            .iter()
            .map(|hosted| entry(&hosted.name, hosted.loaded, "loaded", hosted.base_model()))
            .collect();
        let others = self.library.names().into_iter();
        let others = others.filter(|name| loaded.iter().all(|hosted| hosted.name != *name));
        list.extend(others.map(|name| entry(&name, self.server.started, "unloaded", None)));
        list
    }

    pub fn describe(&self, name: &str) -> Result<Value, ApiError> {
        let known = self.list().into_iter().find(|entry| entry["id"] == name);
        known.ok_or_else(|| ApiError::unknown_model(name, &names(&self.loaded())))
    }

    /// Loads a model, or loads it anew in the place of the one that has its name. If that fails, the old one
    /// stays.
    pub fn load(&self, mut fields: RequestFields) -> Result<Value, ApiError> {
        let name: String = fields.take_required("model", "the name of a model")?;
        let artifact: Option<String> = fields.take_field("artifact", "the name of an artifact")?;
        fields.finish(&[])?;
        check_name("model", &name)?;
        let artifact = artifact.unwrap_or_else(|| name.clone());
        let _one = self.lock_changes()?;
        self.refuse_adapter(&name)?;
        self.check_limit(&name)?;
        let committed =
            self.all_alive().iter().map(|hosted| hosted.need).fold(self.other_bytes, u64::saturating_add);
        let ready = self.library.load(&artifact, committed).map_err(|error| match error {
            LoadError::Unknown(_) => ApiError::unknown_model(&artifact, &self.library.names()),
            LoadError::Refused(why) => ApiError::refused_artifact(&artifact, &why),
        })?;
        if let Some(taken) = self.taken_name(&name, &ready) {
            let why = format!("its adapter has the name `{taken}`, which another model has");
            return Err(ApiError::refused_artifact(&artifact, &why));
        }
        let model = LoadedModel::start(name.clone(), ready, &self.server);
        let model = Arc::new(model.map_err(|error| ApiError::internal(error.to_string()))?);
        self.all_with_texts.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&model));
        let loaded = entry(&name, model.loaded, "loaded", None);
        let mut list = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        // The new one takes the place of the old one, with its adapters behind it.
        let at = list.iter().position(|old| old.base == name).unwrap_or(list.len());
        let count = list[at..].iter().take_while(|old| old.base == name).count();
        let old: Vec<_> = list.splice(at..at + count, ServedModel::from_loaded(model)).collect();
        drop(list);
        self.forget_numbers(&old);
        old.first().into_iter().for_each(|old| wait_and_drop(Arc::clone(old.model())));
        Ok(loaded)
    }

    /// Each model has threads and a tokenizer, which the sum of memory does not count, and those that were
    /// replaced have them until their last text has ended.
    fn check_limit(&self, name: &str) -> Result<(), ApiError> {
        let alive = self.all_alive();
        let known = alive.iter().any(|model| model.base == name);
        match alive.len() >= MOST_MODELS && !known || alive.len() >= 2 * MOST_MODELS {
            true => Err(ApiError::too_many_models(MOST_MODELS)),
            false => Ok(()),
        }
    }

    /// A name of an adapter that is to come, if another model has it.
    fn taken_name(&self, model: &str, ready: &ReadyModel) -> Option<String> {
        let others = self.loaded().into_iter().filter(|hosted| hosted.base != model);
        let others: Vec<String> =
            others.map(|hosted| hosted.name.clone()).chain([model.to_owned()]).collect();
        let mut names = ready.served.adapters.iter().map(|adapter| adapter.name());
        names.find(|name| others.iter().any(|other| other == name)).map(str::to_owned)
    }

    /// Adapters come and go with their models, or by routes of their own.
    fn refuse_adapter(&self, name: &str) -> Result<(), ApiError> {
        let loaded = self.loaded();
        match loaded.iter().find(|hosted| hosted.name == name).and_then(|hosted| hosted.base_model()) {
            None => Ok(()),
            Some(base) => {
                let message = format!("`{name}` is an adapter of `{base}`: load or unload that");
                Err(ApiError::field("model", "adapter", message))
            }
        }
    }

    /// Adapters that were unloaded have no numbers in `/metrics`: unlike models, they may come by ever new
    /// names.
    pub(crate) fn forget_numbers(&self, old: &[Arc<ServedModel>]) {
        let loaded = self.loaded();
        let gone = old.iter().filter(|old| loaded.iter().all(|hosted| hosted.name != old.name));
        for old in gone.filter(|old| old.adapter.is_some()) {
            self.server.metrics.forget_adapter(&old.base, &old.name);
        }
    }

    /// Unloads a model.
    pub fn unload(&self, mut fields: RequestFields) -> Result<Value, ApiError> {
        let name: String = fields.take_required("model", "the name of a model")?;
        fields.finish(&[])?;
        let _one = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let hosted = self.find_model(Some(&name))?;
        let name = hosted.name.clone();
        self.refuse_adapter(&name)?;
        let model = Arc::clone(hosted.model());
        drop(hosted);
        let mut list = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        let old: Vec<_> = list.extract_if(.., |other| other.base == name).collect();
        drop(list);
        self.forget_numbers(&old);
        drop(old);
        wait_and_drop(model);
        Ok(entry(&name, self.server.started, "unloaded", None))
    }
}

/// The name of a model without the tag that clients of Ollama put behind each.
pub fn without_tag(name: &str) -> &str {
    name.strip_suffix(":latest").unwrap_or(name)
}

/// Names of models are in lists, metrics and logs.
pub fn check_name(param: &str, name: &str) -> Result<(), ApiError> {
    if (1..=LONGEST_NAME).contains(&name.len()) && !name.contains(char::is_control) {
        return Ok(());
    }
    let message = format!(
        "`{param}` has {} bytes, expected a name of 1 to {LONGEST_NAME} without control characters",
        name.len()
    );
    Err(ApiError::field(param, "invalid_value", message))
}

fn names(models: &[Arc<ServedModel>]) -> Vec<String> {
    models.iter().map(|hosted| hosted.name.clone()).collect()
}

/// A model as `/v1/models` tells of it; an adapter has the model that it belongs to.
pub fn entry(name: &str, created: u64, status: &str, parent: Option<&str>) -> Value {
    let status = json!({"value": status});
    let mut entry =
        json!({"id": name, "object": "model", "created": created, "owned_by": "mlcc", "status": status});
    if let Some(parent) = parent {
        entry["parent"] = parent.into();
    }
    entry
}

/// Waits for the last text of a model that has no name any more, on a thread of its own: giving back a model
/// may take long.
fn wait_and_drop(model: Arc<LoadedModel>) {
    let wait = move || {
        while Arc::strong_count(&model) > 1 {
            std::thread::sleep(LOOK);
        }
    };
    // Without a thread it goes with its last text.
    let _ = std::thread::Builder::new().name("mlcc-retire".into()).spawn(wait);
}

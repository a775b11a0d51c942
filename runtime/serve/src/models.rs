//! The models of a server, by their names: which one a request means, and how they come and go while texts run.
//!
//! A text holds on to its model. A model that was unloaded or replaced gets no new texts, and is given up after its last one has ended.

use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::Duration;

use serde_json::{Value, json};

use crate::app::Server;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::hosted::Hosted;
use crate::library::{Library, LoadError, Ready};

/// How often it is looked whether somebody still needs a model that is to go.
const LOOK: Duration = Duration::from_millis(20);

pub struct Models {
    /// In the order in which they came; the first is that of requests without a name.
    loaded: RwLock<Vec<Arc<Hosted>>>,
    /// All that were ever there, as long as they have texts.
    ever: Mutex<Vec<Weak<Hosted>>>,
    library: Box<dyn Library>,
    /// Bytes that others can need at most, which do not come and go.
    beside: u64,
    /// One comes or goes at a time.
    changes: Mutex<()>,
    server: Arc<Server>,
}

impl Models {
    pub fn start(
        models: Vec<(String, Ready)>,
        library: Box<dyn Library>,
        beside: u64,
        server: &Arc<Server>,
    ) -> std::io::Result<Models> {
        let start = |(name, ready)| Hosted::start(name, ready, server).map(Arc::new);
        let loaded = models.into_iter().map(start).collect::<std::io::Result<Vec<_>>>()?;
        let ever = Mutex::new(loaded.iter().map(Arc::downgrade).collect());
        let server = Arc::clone(server);
        Ok(Models { loaded: RwLock::new(loaded), ever, library, beside, changes: Mutex::new(()), server })
    }

    pub fn loaded(&self) -> Vec<Arc<Hosted>> {
        self.loaded.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Those that are loaded, and those that are not but have texts.
    pub fn alive(&self) -> Vec<Arc<Hosted>> {
        let mut ever = self.ever.lock().unwrap_or_else(PoisonError::into_inner);
        ever.retain(|hosted| hosted.strong_count() > 0);
        ever.iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether there are models, and none of them works any more.
    pub fn all_lost(&self) -> bool {
        let loaded = self.loaded();
        !loaded.is_empty() && loaded.iter().all(|hosted| !hosted.engine.is_running())
    }

    /// The model that a request names, or the first one.
    pub fn find(&self, name: Option<&str>) -> Result<Arc<Hosted>, ApiError> {
        let loaded = self.loaded();
        let Some(name) = name else {
            return loaded.first().cloned().ok_or_else(ApiError::no_model);
        };
        loaded.iter().find(|hosted| hosted.name == name).cloned().ok_or_else(|| {
            match self.library.names().iter().any(|known| known == name) {
                true => ApiError::not_loaded(name),
                false => ApiError::unknown_model(name, &names(&loaded)),
            }
        })
    }

    /// All models, as `/v1/models` tells of them: those that are loaded, then those that could be.
    pub fn list(&self) -> Vec<Value> {
        let loaded = self.loaded();
        let mut list: Vec<Value> =
            loaded.iter().map(|hosted| entry(&hosted.name, hosted.loaded, "loaded")).collect();
        let others = self.library.names().into_iter();
        let others = others.filter(|name| loaded.iter().all(|hosted| hosted.name != *name));
        list.extend(others.map(|name| entry(&name, self.server.started, "unloaded")));
        list
    }

    pub fn describe(&self, name: &str) -> Result<Value, ApiError> {
        let known = self.list().into_iter().find(|entry| entry["id"] == name);
        known.ok_or_else(|| ApiError::unknown_model(name, &names(&self.loaded())))
    }

    /// Loads a model, or loads it anew in the place of the one that has its name. If that fails, the old one stays.
    pub fn load(&self, mut fields: Fields) -> Result<Value, ApiError> {
        let name: String = fields.need("model", "the name of a model")?;
        let artifact: Option<String> = fields.take("artifact", "the name of an artifact")?;
        fields.finish(&[])?;
        let artifact = artifact.unwrap_or_else(|| name.clone());
        let _one = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        self.server.ready()?;
        let committed = self.alive().iter().map(|hosted| hosted.need).fold(self.beside, u64::saturating_add);
        let ready = self.library.load(&artifact, committed).map_err(|error| match error {
            LoadError::Unknown(_) => ApiError::unknown_model(&artifact, &self.library.names()),
            LoadError::Refused(why) => ApiError::refused_artifact(&artifact, &why),
        })?;
        let hosted = Hosted::start(name.clone(), ready, &self.server);
        let hosted = Arc::new(hosted.map_err(|error| ApiError::internal(error.to_string()))?);
        self.ever.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&hosted));
        let loaded = entry(&name, hosted.loaded, "loaded");
        let mut list = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        let old = match list.iter_mut().find(|old| old.name == name) {
            Some(old) => Some(std::mem::replace(old, hosted)),
            None => {
                list.push(hosted);
                None
            }
        };
        drop(list);
        old.into_iter().for_each(retire);
        Ok(loaded)
    }

    /// Takes a model away.
    pub fn unload(&self, mut fields: Fields) -> Result<Value, ApiError> {
        let name: String = fields.need("model", "the name of a model")?;
        fields.finish(&[])?;
        let _one = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let hosted = self.find(Some(&name))?;
        self.loaded.write().unwrap_or_else(PoisonError::into_inner).retain(|other| other.name != name);
        retire(hosted);
        Ok(entry(&name, self.server.started, "unloaded"))
    }
}

fn names(models: &[Arc<Hosted>]) -> Vec<String> {
    models.iter().map(|hosted| hosted.name.clone()).collect()
}

/// A model as `/v1/models` tells of it.
pub fn entry(name: &str, created: u64, status: &str) -> Value {
    let status = json!({"value": status});
    json!({"id": name, "object": "model", "created": created, "owned_by": "mlcc", "status": status})
}

/// Waits for the last text of a model that has no name any more, on a thread of its own: giving back a model may take long.
fn retire(hosted: Arc<Hosted>) {
    let wait = move || {
        while Arc::strong_count(&hosted) > 1 {
            std::thread::sleep(LOOK);
        }
    };
    // Without a thread it goes with its last text.
    let _ = std::thread::Builder::new().name("mlcc-retire".into()).spawn(wait);
}

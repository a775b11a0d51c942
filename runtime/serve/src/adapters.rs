//! Adapters that come and go while the server runs, as models of their own: `/load_lora_adapter` and
//! `/unload_lora_adapter`, as vLLM has them.
//!
//! Clients name folders below one that the server's operator has named; without it they may load none.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use mlcc_engine::serving::TextAdapter;
use thiserror::Error;

use crate::error::ApiError;
use crate::fields::RequestFields;
use crate::known_fields;
use crate::model_registry::{ModelRegistry, check_name};
use crate::served_model::ServedModel;

/// Puts the adapter of a folder into a slot of a model, under a name; or says why not.
pub type ReadAdapter = Box<dyn Fn(&str, &Path) -> Result<TextAdapter, String> + Send + Sync>;

/// The reasons why an adapter is not loaded or unloaded.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum AdapterNameError {
    #[error("`{0}` is not an adapter name: it needs at least one character, and no /")]
    Name(String),
    #[error("a model or an adapter already has the name `{0}`")]
    Taken(String),
    #[error("there is no adapter `{0}`")]
    Unknown(String),
    #[error("no model here generates text with an adapter")]
    NoModel,
}

impl From<AdapterNameError> for ApiError {
    fn from(error: AdapterNameError) -> ApiError {
        let message = error.to_string();
        match error {
            AdapterNameError::Name(_) => ApiError::field("lora_name", "invalid_value", message),
            AdapterNameError::Taken(_) => {
                let message = format!("{message}; `load_inplace` puts an adapter in the place of another");
                ApiError::field("lora_name", "already_loaded", message)
            }
            AdapterNameError::NoModel => ApiError::no_model(),
            AdapterNameError::Unknown(_) => ApiError::unknown_adapter(message),
        }
    }
}

impl ModelRegistry {
    /// Loads an adapter of the first model, or of the one that is named.
    pub fn load_adapter(&self, mut fields: RequestFields) -> Result<String, ApiError> {
        let name: String = fields.take_required("lora_name", "a name for the adapter")?;
        let path: PathBuf = fields.take_required("lora_path", "the folder of the adapter")?;
        let base: Option<String> = fields.take_field("model", "the name of the model that it is for")?;
        let replaces = fields.take_field("load_inplace", "true or false")?.unwrap_or(false);
        fields.finish(&[])?;
        check_name("lora_name", &name)?;
        let folder = self.adapter_folder(&path)?;
        let _one = self.lock_changes()?;
        let base = self.find_model(base.as_deref())?;
        if base.adapter.is_some() {
            let message = format!("`{}` is an adapter itself", base.name);
            return Err(ApiError::field("model", "adapter", message));
        }
        // Before it takes a slot.
        self.check_name(&base, &name, replaces)?;
        let read = base.reads_adapters.as_ref();
        let read = read.ok_or_else(|| ApiError::refused_adapter(&name, "this model reads none"))?;
        let adapter = read(&name, &folder).map_err(|why| ApiError::refused_adapter(&name, &why))?;
        self.put_adapter(&base, adapter);
        Ok(format!("Success: LoRA adapter '{name}' added successfully."))
    }

    /// Unloads an adapter. Texts that run with it go on.
    pub fn unload_adapter(&self, mut fields: RequestFields) -> Result<String, ApiError> {
        let name: String = fields.take_required("lora_name", "the name of an adapter")?;
        fields.finish(&[known_fields::ADAPTERS])?;
        if self.server.options.lora_dir.is_none() {
            return Err(ApiError::adapters_are_fixed());
        }
        let _one = self.lock_changes()?;
        self.take_adapter(&name)?;
        Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
    }

    /// Adds an adapter of a model that was read already.
    pub fn add_adapter(&self, base: &Arc<ServedModel>, adapter: TextAdapter) -> Result<(), AdapterNameError> {
        let _one = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_name(base, adapter.name(), false)?;
        self.put_adapter(base, adapter);
        Ok(())
    }

    /// Unloads an adapter that is there.
    pub fn remove_adapter(&self, name: &str) -> Result<(), AdapterNameError> {
        let _one = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        self.take_adapter(name)
    }

    /// A folder that clients may load from. The answers do not tell files outside of it from missing ones.
    fn adapter_folder(&self, path: &Path) -> Result<PathBuf, ApiError> {
        let Some(all) = &self.server.options.lora_dir else { return Err(ApiError::adapters_are_fixed()) };
        let below = |all: &Path| {
            let all = all.canonicalize().ok()?;
            let folder = all.join(path).canonicalize().ok()?;
            (folder != all && folder.starts_with(&all) && folder.is_dir()).then_some(folder)
        };
        below(all).ok_or_else(|| {
            let message = "`lora_path` names no folder below that of the server's --lora-dir";
            ApiError::field("lora_path", "invalid_value", message)
        })
    }

    fn check_name(&self, base: &ServedModel, name: &str, replaces: bool) -> Result<(), AdapterNameError> {
        if name.is_empty() || name.contains('/') {
            return Err(AdapterNameError::Name(name.to_owned()));
        }
        let loaded = self.loaded();
        let other = loaded.iter().find(|hosted| hosted.name == name);
        let is_replaced = replaces && other.is_some_and(|other| other.base_model() == Some(&base.base));
        let known = other.is_some() || self.library.names().iter().any(|known| known == name);
        match known && !is_replaced {
            true => Err(AdapterNameError::Taken(name.to_owned())),
            false => Ok(()),
        }
    }

    /// Lists an adapter behind its model, in the place of one of its name.
    fn put_adapter(&self, base: &Arc<ServedModel>, adapter: TextAdapter) {
        let added = Arc::new(ServedModel::with_adapter(Arc::clone(base.model()), adapter));
        let mut list = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        let of_base = |other: &Arc<ServedModel>| Arc::ptr_eq(other.model(), base.model());
        let old = list.iter().position(|other| other.name == added.name);
        let old = match old {
            Some(at) => Some(std::mem::replace(&mut list[at], added)),
            None => {
                let end = list.iter().rposition(of_base).map_or(list.len(), |last| last + 1);
                list.insert(end, added);
                None
            }
        };
        drop(list);
        old.into_iter().for_each(|old| forget(&old));
    }

    fn take_adapter(&self, name: &str) -> Result<(), AdapterNameError> {
        let mut list = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        let is_it = |hosted: &Arc<ServedModel>| hosted.name == name && hosted.adapter.is_some();
        let at = list.iter().position(is_it).ok_or_else(|| AdapterNameError::Unknown(name.to_owned()))?;
        let old = list.remove(at);
        drop(list);
        forget(&old);
        self.forget_numbers(&[old]);
        Ok(())
    }
}

/// Its slot is free as soon as no text and no request has it.
fn forget(old: &ServedModel) {
    if let Some(adapter) = &old.adapter {
        old.engine.forget_adapter(adapter);
    }
}

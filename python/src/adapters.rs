//! Adapters (LoRA) from folders in PEFT's form, in slots of a model.

use std::collections::BTreeSet;
use std::path::PathBuf;

use mlcc_engine::serving::TextAdapter;
use mlcc_models::{AdapterRequest, ModelError};
use mlcc_runtime::{LoraFactors, Model};
use pyo3::exceptions::PyFileNotFoundError;
use pyo3::prelude::*;
use thiserror::Error;

use crate::errors::{self, adapter as refused};

/// An adapter that is asked for: the name that texts choose it by, its folder, and what multiplies it.
pub type AdapterSpec = (String, PathBuf, f64);

/// The reasons why an adapter is in no slot.
#[derive(Debug, Error)]
pub enum AdapterFault {
    #[error("`{0}` is not an adapter name: it needs at least one character, and no /")]
    Name(String),
    #[error("the scale of the adapter {name} is {scale}, expected a finite number")]
    Scale { name: String, scale: f64 },
    #[error("there is no folder {} for the adapter {name}", folder.display())]
    Missing { name: String, folder: PathBuf },
    #[error(transparent)]
    Files(#[from] ModelError),
    #[error(transparent)]
    Model(#[from] mlcc_runtime::Error),
}

impl From<AdapterFault> for PyErr {
    fn from(fault: AdapterFault) -> PyErr {
        match fault {
            AdapterFault::Model(error) => errors::runtime(error),
            AdapterFault::Missing { .. } => PyFileNotFoundError::new_err(fault.to_string()),
            AdapterFault::Name(_) | AdapterFault::Scale { .. } | AdapterFault::Files(_) => {
                refused(fault.to_string())
            }
        }
    }
}

/// Puts an adapter into a free slot of a model.
pub fn read(model: &Model, (name, folder, scale): &AdapterSpec) -> Result<TextAdapter, AdapterFault> {
    if name.is_empty() || name.contains('/') {
        return Err(AdapterFault::Name(name.clone()));
    }
    if !scale.is_finite() {
        return Err(AdapterFault::Scale { name: name.clone(), scale: *scale });
    }
    let put = |factors: &[LoraFactors]| Ok(TextAdapter::new(name, model.load_adapter(name, factors)?));
    // Before its tensors are looked for in slots that are not there.
    if model.adapter_slots() == 0 {
        return put(&[]);
    }
    if !folder.is_dir() {
        return Err(AdapterFault::Missing { name: name.clone(), folder: folder.clone() });
    }
    let slots: BTreeSet<&str> = model.adapter_tensors().collect();
    let request = AdapterRequest { directory: folder.clone(), scale: *scale };
    let found = mlcc_models::adapter_factors(&request, |tensor| slots.contains(tensor))?;
    let factors: Vec<LoraFactors> =
        found.iter().map(|f| LoraFactors { tensor: &f.tensor, rank: f.rank, a: &f.a, b: &f.b }).collect();
    put(&factors)
}

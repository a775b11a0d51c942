//! Requirements of an artifact, on a machine that need not have its device.

use std::path::Path;

use mlcc_abi::section;

use crate::features::HOST_TARGET;
use crate::page_pool::PageCounts;
use crate::table::{ArtifactTable, ModelPlan};
use crate::{Artifact, Error, Model, Result, library};

/// The needs of a model, by the artifact alone or by the model that was loaded from it.
#[derive(Debug, Clone)]
pub struct ModelRequirements {
    pub plan: ModelPlan,
    /// `cuda`, or a kind of CPU.
    pub target: String,
    /// Pages that the caches of all sequences together may have.
    pub cache_pages: u64,
    /// The weights are a part of the file; else they are made when it is loaded.
    pub has_weights: bool,
}

impl ModelRequirements {
    /// Reads it from the file. No worker is started, and no GPU asked for. `cache_pages` as in
    /// [`crate::LoadOptions`]; a GPU whose memory holds fewer than the default has as many as that holds.
    pub fn open(path: impl AsRef<Path>, cache_pages: Option<u64>) -> Result<Self> {
        let artifact = Artifact::open(path)?;
        if artifact.machine_name() != HOST_TARGET {
            let (path, found) = (artifact.path().to_path_buf(), artifact.machine_name());
            return Err(Error::WrongMachine { path, found, expected: HOST_TARGET });
        }
        let (_library, table) = library::load_code(&artifact, None)?;
        let pages = PageCounts::from_plan(&table.plan, cache_pages).map_or(0, |counts| counts.desired_pages);
        Ok(Self::from_table(&table, pages, artifact.section(section::WEIGHTS).is_some()))
    }

    fn from_table(table: &ArtifactTable, cache_pages: u64, has_weights: bool) -> Self {
        Self { plan: table.plan.clone(), target: table.target.clone(), cache_pages, has_weights }
    }
}

impl Model {
    /// The needs of the model.
    pub fn requirements(&self) -> ModelRequirements {
        ModelRequirements::from_table(
            self.table(),
            self.cache_pages().all as u64,
            self.section(section::WEIGHTS).is_some(),
        )
    }
}

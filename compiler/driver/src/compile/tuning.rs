//! `--tuning`: a tuning file in place of some values of a level.

use std::path::{Path, PathBuf};

use mlcc_codegen::launch::SharedMemory;
use mlcc_files::FileKind;
use mlcc_passes::LoweredProgram;
use mlcc_target::{CompileTarget, FeatureLevel, LevelTuning, detected_model};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_128;

use super::{BuildError, BuildOptions};

/// A tuning and the file that it came from.
#[derive(Clone, Debug, PartialEq)]
pub struct TuningFile {
    pub path: PathBuf,
    pub tuning: LevelTuning,
    /// Hash of the bytes of the file, in hexadecimal digits.
    pub xxh3_128: String,
}

impl TuningFile {
    pub fn read(path: &Path) -> Result<TuningFile, BuildError> {
        let failed = |source| BuildError::Io { action: "read", path: path.into(), source };
        let text = mlcc_files::read_to_string(path, FileKind::Tuning).map_err(failed)?;
        TuningFile::parse(path, &text)
    }

    /// The file of this name with this text.
    pub fn parse(path: &Path, text: &str) -> Result<TuningFile, BuildError> {
        let tuning = LevelTuning::parse(&path.display().to_string(), text)?;
        Ok(TuningFile { path: path.into(), tuning, xxh3_128: format!("{:032x}", xxh3_128(text.as_bytes())) })
    }

    /// The tuning for the metadata; no path.
    pub(super) fn json(&self) -> Value {
        json!({ "xxh3_128": self.xxh3_128, "content": self.tuning })
    }
}

impl BuildOptions {
    /// The machine to compile for, tuned as `tuning` says.
    pub fn resolve_target(&self) -> Result<CompileTarget, BuildError> {
        let mut target = mlcc_target::resolve_target(&self.target)?;
        if let Some(TuningFile { path, tuning, .. }) = &self.tuning {
            let file = path.display().to_string();
            tuning.apply(&file, &self.target, detected_model().as_ref(), &mut target)?;
        }
        Ok(target)
    }
}

/// Tiles of a tuned GPU level fit into the shared memory of its machines by themselves; a kernel has other
/// buffers, too.
pub(super) fn kernels_fit(target: &CompileTarget, program: &LoweredProgram) -> Result<(), BuildError> {
    let is_tuned =
        |level: &FeatureLevel| mlcc_target::level(&level.name).ok().flatten().as_ref() != Some(level);
    for (level, code) in target.levels.iter().zip(&program.levels) {
        let Some(gpu) = level.gpu.as_ref().filter(|_| is_tuned(level)) else { continue };
        let most = gpu.max_shared_bytes();
        for kernel in &code.lowered.kernels {
            let bytes = SharedMemory::bytes_of(kernel);
            if bytes > u64::from(most) {
                let (level, kernel) = (level.name.clone(), kernel.name.clone());
                return Err(BuildError::SharedMemory { level, kernel, bytes, most });
            }
        }
    }
    Ok(())
}

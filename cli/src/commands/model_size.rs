//! Whether a model fits: the format that its weights get where none was chosen, about how many bytes they
//! have in it, and the room that there is.

use std::path::Path;

use mlcc_driver::compile::keep::KEEP;
use mlcc_ir::module::ParamRole;
use mlcc_models::presets::{self, Preset};
use mlcc_models::{Architecture, ModelConfig};
use mlcc_passes::scheme::QuantScheme;
use mlcc_target::Arch;

use crate::commands::quants::stored_bits;
use crate::disk;
use crate::ui;

/// Weights up to this size stay as they are: there is little to save, and small models lose most.
const SMALL: u64 = 64_000_000;
/// Memory beside the weights: caches, scratch memory, the program.
const BESIDE: u64 = 256 << 20;
/// Formats from large to small, for what would fit.
const SMALLER_FORMATS: [&str; 3] = ["q8i8", "q4i8", "q3f16_1"];
/// Models that an error names.
const OFFERED: usize = 3;

/// A weight format, and about how many bytes a model has in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SizeEstimate {
    pub quant: String,
    pub bytes: u64,
}

impl SizeEstimate {
    /// The estimate for the checkpoint with these files; of its weights only the bytes are known yet.
    pub(crate) fn of_checkpoint(folder: &Path, weight_bytes: u64, quant: &str) -> SizeEstimate {
        let scheme = QuantScheme::from_name(quant).ok().map(|(scheme, _)| scheme);
        let config = || ModelConfig::read(&folder.join("config.json")).ok();
        let bytes = match scheme.filter(|_| !quant.eq_ignore_ascii_case(KEEP)) {
            None => weight_bytes,
            Some(scheme) => match config() {
                Some(config) => stored_bytes(&config.architecture, &scheme),
                // Most checkpoints have 16 bits.
                None => (weight_bytes as f64 * stored_bits(scheme.linear) / 16.0) as u64,
            },
        };
        SizeEstimate { quant: quant.to_owned(), bytes }
    }

    /// Memory that the model needs when it runs.
    pub(crate) fn memory(&self) -> u64 {
        self.bytes.saturating_add(self.bytes / 20).saturating_add(BESIDE)
    }

    /// `q4i8: 0.4 GB`.
    pub(crate) fn text(&self) -> String {
        format!("{}: {}", self.quant, ui::bytes(self.bytes))
    }
}

/// Bytes of the weights in a scheme; about, as the role of a tensor is read off its shape.
fn stored_bytes(architecture: &Architecture, scheme: &QuantScheme) -> u64 {
    let vocab = architecture.vocab();
    let bits = architecture.tensor_shapes().into_iter().map(|(_, shape)| {
        let role = match shape.len() {
            0 | 1 => ParamRole::Vector,
            _ if shape.contains(&vocab) => ParamRole::Embedding,
            _ => ParamRole::Linear,
        };
        shape.iter().map(|&size| size as f64).product::<f64>() * stored_bits(scheme.storage_type(role))
    });
    (bits.sum::<f64>() / 8.0) as u64
}

/// The format for weights where the user names none: 4 bits with 8-bit activations on CPUs, whose quality is
/// near that of the checkpoint, 8 bits for models of texts, and the stored types for weights that come
/// quantized or are small.
pub(crate) fn default_format(folder: &Path, weight_bytes: u64) -> &'static str {
    let raw = std::fs::read(folder.join("config.json")).unwrap_or_default();
    let config: serde_json::Value = serde_json::from_slice(&raw).unwrap_or_default();
    let is_quantized =
        ["quantization_config", "compression_config"].iter().any(|field| config.get(field).is_some());
    if config.is_null() || is_quantized || weight_bytes <= SMALL {
        return KEEP;
    }
    let target = std::env::var("MLCC_TARGET").unwrap_or_default();
    if mlcc_target::resolve_target(&target).is_ok_and(|target| target.arch == Arch::Nvptx) {
        return "q4f16";
    }
    let is_of_texts = folder.join("modules.json").exists()
        || ModelConfig::read(&folder.join("config.json"))
            .is_ok_and(|config| config.architecture.pooling_head().is_some());
    if is_of_texts { "q8i8" } else { "q4i8" }
}

/// Checks that the disk has room for the bytes that a folder is to get.
pub(crate) fn check_disk(folder: &Path, bytes: u64) -> Result<(), String> {
    match disk::free_bytes(folder) {
        Some(free) if free < bytes => Err(format!(
            "it takes {} of disk, and {} are free at {}: make room (`mlcc list`, `mlcc rm`, `mlcc prune`), or \
             choose another folder (HF_HOME for checkpoints, MLCC_CACHE_DIR for artifacts)",
            ui::bytes(bytes),
            ui::bytes(free),
            folder.display()
        )),
        _ => Ok(()),
    }
}

/// Checks that the model fits into the free memory; else says what would.
pub(crate) fn check_memory(folder: &Path, weight_bytes: u64, estimate: &SizeEstimate) -> Result<(), String> {
    let Some(free) = mlcc_serve::limit_beside(None, 0) else { return Ok(()) };
    if estimate.memory() <= free.bytes {
        return Ok(());
    }
    let in_format = |quant: &&str| SizeEstimate::of_checkpoint(folder, weight_bytes, quant);
    let smaller = SMALLER_FORMATS.iter().map(in_format);
    let smaller =
        smaller.filter(|other| other.bytes < estimate.bytes).find(|other| other.memory() <= free.bytes);
    let advice = match smaller {
        Some(other) => format!("--quant {} would fit ({})", other.quant, ui::bytes(other.memory())),
        None => presets_text(&presets_that_fit(free.bytes)),
    };
    Err(format!(
        "it needs about {} of memory as {}, and {} are free ({}); {advice}. `mlcc build` builds it all the same",
        ui::bytes(estimate.memory()),
        estimate.quant,
        ui::bytes(free.bytes),
        free.origin
    ))
}

/// The largest presets that fit in the default format, of different sizes.
fn presets_that_fit(free: u64) -> Vec<&'static Preset> {
    let Ok((scheme, _)) = QuantScheme::from_name("q4i8") else { return Vec::new() };
    let sized = presets::all_presets().filter_map(|preset| {
        let architecture = preset.model_config().architecture;
        let estimate =
            SizeEstimate { quant: scheme.name.to_owned(), bytes: stored_bytes(&architecture, &scheme) };
        (architecture.pooling_head().is_none() && estimate.memory() <= free)
            .then_some((estimate.bytes, preset))
    });
    let mut fitting: Vec<_> = sized.collect();
    fitting.sort_by_key(|(bytes, preset)| (std::cmp::Reverse(*bytes), preset.name));
    fitting.into_iter().take(OFFERED).map(|(_, preset)| preset).collect()
}

fn presets_text(fitting: &[&Preset]) -> String {
    match fitting {
        [] => "no model that is known by name would fit".to_owned(),
        list => {
            let names: Vec<&str> = list.iter().map(|preset| preset.name).collect();
            format!("the largest models that would fit as q4i8 are {}", names.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_presets_are_about_those_of_artifacts() {
        let (scheme, _) = QuantScheme::from_name("q4i8").unwrap();
        let preset = Preset::from_name("qwen3-0.6b").unwrap();
        let bytes = stored_bytes(&preset.model_config().architecture, &scheme);
        assert!((350_000_000..600_000_000).contains(&bytes), "{bytes}");
        assert!(presets_that_fit(1 << 20).is_empty());
        assert_eq!(presets_that_fit(2_000_000_000).len(), OFFERED);
    }

    #[test]
    fn what_comes_quantized_or_small_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(default_format(folder.path(), 1 << 40), KEEP);
        let write = |text: &str| std::fs::write(folder.path().join("config.json"), text).unwrap();
        write("{\"model_type\": \"llama\"}");
        assert_eq!(
            (default_format(folder.path(), 1 << 20), default_format(folder.path(), 1 << 30)),
            (KEEP, "q4i8")
        );
        std::fs::write(folder.path().join("modules.json"), "[]").unwrap();
        assert_eq!(default_format(folder.path(), 1 << 30), "q8i8");
        write("{\"model_type\": \"llama\", \"quantization_config\": {}}");
        assert_eq!(default_format(folder.path(), 1 << 30), KEEP);
    }

    #[test]
    fn disks_have_an_end() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(check_disk(folder.path(), 1), Ok(()));
        assert!(check_disk(folder.path(), u64::MAX).unwrap_err().contains("mlcc prune"));
    }
}

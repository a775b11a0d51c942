//! Rotary factors that GGUF keeps as tensors in place of configuration: `rope_freqs` (Llama 3.1 and later), and
//! `rope_factors_short` with `rope_factors_long` (Phi-3). Frequencies are divided by them, which is what the rope type
//! `longrope` of config.json means.

use super::super::bytes::FileBytes;
use super::super::stored_type::StoredType;
use super::RawTensor;
use serde_json::{Map, Value, json};

/// The field `rope_scaling`; `None` where no tensor has factors.
pub(super) fn read_rope_scaling(
    files: &[FileBytes],
    tensors: &[RawTensor],
    original: Option<u64>,
    attention_factor: Option<f64>,
) -> Option<Map<String, Value>> {
    let factors = |name: &str| read_rope_factors(files, tensors, name);
    let common = factors("rope_freqs.weight");
    let short = factors("rope_factors_short.weight").or_else(|| common.clone())?;
    let long = factors("rope_factors_long.weight").or(common)?;
    let mut fields = Map::new();
    fields.insert("rope_type".to_string(), json!("longrope"));
    fields.insert("short_factor".to_string(), json!(short));
    fields.insert("long_factor".to_string(), json!(long));
    fields.insert("attention_factor".to_string(), json!(attention_factor.unwrap_or(1.0)));
    if let Some(original) = original {
        fields.insert("original_max_position_embeddings".to_string(), json!(original));
    }
    Some(fields)
}

/// The factors in a tensor of that name.
pub(super) fn read_rope_factors(files: &[FileBytes], tensors: &[RawTensor], name: &str) -> Option<Vec<f32>> {
    let tensor = tensors.iter().find(|tensor| tensor.name == name && tensor.dtype == StoredType::F32)?;
    let bytes = files.get(tensor.file)?.slice(tensor.start, tensor.elements() * 4);
    Some(bytes.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect())
}

//! Weights that come quantized (GGUF): which storage format each parameter gets, and what became of each type.

use std::collections::BTreeMap;

use mlcc_ir::module::{Module, ParamSource};
use mlcc_ir::types::{DType, Format};
use mlcc_models::{Checkpoint, StoredType};
use mlcc_passes::policy::{QuantPolicy, Rule};
use mlcc_quant::ScaleSearch;
use serde::Serialize;

use super::payload::StoredTensor;

/// Tensors of one stored type that became one format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConversionRow {
    pub stored: &'static str,
    pub format: String,
    pub tensors: usize,
    pub how: &'static str,
}

const Q4: DType = DType::Packed(Format::Q4G32);
const Q8: DType = DType::Packed(Format::Q8G32);

/// The scheme whose format the rest gets (parameters that are no tensor of the file).
pub const BASE: &str = "q8f16_1";

/// A rule for every parameter that is not decided by the user's policy: the format that holds its stored type.
pub(super) fn policy(module: &Module, checkpoint: &Checkpoint, user: &QuantPolicy) -> QuantPolicy {
    let mut policy = user.clone();
    for param in module.params.values().filter(|param| user.rule(&param.name).is_none()) {
        if let Some(stored) = stored_type(checkpoint, &param.source) {
            let (glob, format) = (param.name.clone(), Some(holding(stored)));
            policy.rules.push(Rule { number: None, glob, format, scale_search: ScaleSearch::None });
        }
    }
    policy
}

/// The format that holds a stored type: without loss, or with little where there is none of ours that is equal.
fn holding(stored: StoredType) -> DType {
    match stored {
        StoredType::F16 => DType::F16,
        StoredType::BF16 => DType::BF16,
        StoredType::Q4_0 | StoredType::Q4_1 | StoredType::Q4K => Q4,
        StoredType::Q5_0 | StoredType::Q5_1 | StoredType::Q8_0 | StoredType::Q5K | StoredType::Q6K => Q8,
        _ => DType::F32,
    }
}

/// Per stored type, format and whether its values are the same, for a checkpoint with block formats; empty for others.
pub(super) fn conversions(checkpoint: &Checkpoint, stored: &[StoredTensor]) -> Vec<ConversionRow> {
    if !checkpoint.tensors().iter().any(|info| info.dtype.is_block()) {
        return Vec::new();
    }
    let mut counts: BTreeMap<(StoredType, DType, bool), usize> = BTreeMap::new();
    for StoredTensor { tensor, format } in stored {
        if let Some(info) = checkpoint.info(&tensor.name) {
            *counts.entry((info.dtype, *format, tensor.exact)).or_default() += 1;
        }
    }
    let row = |((stored, format, exact), tensors): ((StoredType, DType, bool), usize)| ConversionRow {
        stored: stored.name(),
        format: format.name().to_string(),
        tensors,
        how: how(stored, format, exact),
    };
    counts.into_iter().map(row).collect()
}

fn how(stored: StoredType, format: DType, exact: bool) -> &'static str {
    match format {
        DType::Packed(_) if stored.is_block() && exact => "kept: the same values",
        DType::Packed(_) if stored.is_block() => "dequantized and quantized again",
        DType::Packed(_) => "quantized",
        _ if stored.is_block() => "dequantized",
        _ if stored.ir() == Some(format) => "kept",
        _ => "converted",
    }
}

/// The type of the first tensor that a parameter is made of.
fn stored_type(checkpoint: &Checkpoint, source: &ParamSource) -> Option<StoredType> {
    source.tensors().into_iter().find_map(|name| checkpoint.info(name)).map(|info| info.dtype)
}

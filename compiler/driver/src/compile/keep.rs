//! `--quant keep`: every parameter gets the storage format that holds the type its weights come in.

use std::collections::BTreeMap;

use mlcc_ir::module::{ModelParam, Module, ParamRole, ParamSource};
use mlcc_ir::types::{DType, Packing, QuantFormat};
use mlcc_models::checkpoint::{StoredCodes, StoredGroups};
use mlcc_models::resolve::WeightSource;
use mlcc_models::{Checkpoint, ModelConfig, StoredType};
use mlcc_passes::LoweredProgram;
use mlcc_passes::policy::{PolicyRule, QuantPolicy};
use mlcc_passes::scheme::QuantScheme;
use mlcc_quant::{ScaleSearch, packed_bytes};
use serde::Serialize;

use super::payload::StoredTensor;
use super::report::element_count;
use super::{BuildOptions, BuildSource};
use crate::weights::matrix_shape;

/// Tensors of one stored type that became one format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ConversionRow {
    pub stored: &'static str,
    pub format: String,
    pub tensors: usize,
    pub how: &'static str,
}

/// The cost of keeping the weights, and of not keeping them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeptWeights {
    /// Types of matrices in the checkpoint, that of most weights first.
    pub types: Vec<&'static str>,
    /// Nothing is stored: this is the type that the model was published in.
    pub random: bool,
    /// Some were packed by another program, in a format that none of ours is equal to.
    pub dequantized: bool,
    pub bytes: u64,
    /// Bytes of the same weights with `--quant` [`SMALLER`].
    pub smaller_bytes: u64,
}

/// The meaning of `--quant` without a value.
pub const KEEP: &str = "keep";

/// The scheme that is compared with the kept types, for their size.
pub const SMALLER: &str = "q4f16";

/// The scheme whose format the rest gets (parameters that are no tensor of the file) where weights come in
/// blocks.
pub const BASE: &str = "q8f16_1";

/// The weight format as it was chosen; with `keep`, also what most weights were stored in, unless they were
/// quantized.
pub fn format_label(keep: bool, scheme: &str) -> String {
    match (keep, scheme) {
        (true, BASE) => KEEP.into(),
        (true, scheme) => format!("{KEEP} ({scheme})"),
        (false, scheme) => scheme.into(),
    }
}

/// The weight format of an artifact, as `--quant` chose it.
pub fn scheme_name(metadata: &serde_json::Value) -> String {
    let keeps = metadata.pointer("/quantization/keep").and_then(serde_json::Value::as_bool) == Some(true);
    let scheme = metadata.pointer("/quantization/scheme").and_then(serde_json::Value::as_str);
    format_label(keeps, scheme.unwrap_or("-"))
}

/// Most texts that are read in one call, if nothing else was asked for.
const TEXTS_TOGETHER: u32 = 64;

impl BuildOptions {
    /// The options with the scheme that comes nearest to the types of this source, if `keep` is set: it
    /// chooses the type of the cache, and the error that is permitted.
    pub fn for_source(&self, source: &BuildSource) -> BuildOptions {
        let mut options = self.clone();
        if options.keep_quant {
            options.quant = base_scheme(source);
        }
        if source.model.config.architecture.pooling_head().is_some() {
            // No vector depends on what texts are read with it.
            options.batch_invariant = true;
            options.batch.get_or_insert(TEXTS_TOGETHER);
        }
        options
    }
}

/// The plain scheme of the type that most weights have; [`BASE`] where those are packed.
fn base_scheme(source: &BuildSource) -> QuantScheme {
    let checkpoint = &source.checkpoint;
    let plain = |stored| match stored {
        StoredType::F16 => "f16",
        StoredType::BF16 => "bf16",
        _ => "f32",
    };
    let name = match published_type(source) {
        Some(stored) => plain(stored),
        None if checkpoint.tensors().iter().any(|info| info.dtype.is_block()) => BASE,
        None => {
            let needed = source.model.config.architecture.tensor_shapes();
            let infos = needed.iter().filter(|(_, shape)| shape.len() > 1).filter_map(|(name, _)| {
                let info = checkpoint.tensor_info(name)?;
                let scheme = match info.dtype {
                    StoredType::Packed(_) if holds_sorted(checkpoint, name) => BASE,
                    StoredType::Packed(_) => plain(computed_type(&source.model.config)),
                    stored => plain(stored),
                };
                Some((scheme, info.elements() as u64))
            });
            by_weights(infos).first().copied().unwrap_or("f32")
        }
    };
    QuantScheme::from_name(name).map(|(scheme, _)| scheme).unwrap_or_default()
}

/// Types, or names, with those of most weights first.
fn by_weights<T: Ord + Copy>(tensors: impl Iterator<Item = (T, u64)>) -> Vec<T> {
    let mut counts: BTreeMap<T, u64> = BTreeMap::new();
    tensors.for_each(|(stored, elements)| *counts.entry(stored).or_default() += elements);
    let mut types: Vec<_> = counts.into_iter().collect();
    types.sort_by_key(|&(stored, elements)| (std::cmp::Reverse(elements), stored));
    types.into_iter().map(|(stored, _)| stored).collect()
}

/// The type of random weights, which nothing stores: the one that config.json says the model was published
/// in, else bf16, in which most are.
fn published_type(source: &BuildSource) -> Option<StoredType> {
    let WeightSource::Random { .. } = source.model.weights else { return None };
    Some(named_type(&source.model.config).unwrap_or(StoredType::BF16))
}

fn named_type(config: &ModelConfig) -> Option<StoredType> {
    let name = ["torch_dtype", "dtype"].iter().find_map(|field| config.raw.get(*field)?.as_str())?;
    match name.strip_prefix("torch.").unwrap_or(name) {
        "float32" => Some(StoredType::F32),
        "float16" => Some(StoredType::F16),
        "bfloat16" => Some(StoredType::BF16),
        _ => None,
    }
}

/// A rule for every parameter that is not decided by the user's policy, nor kept by the scheme: the format
/// that holds its stored type.
pub(super) fn keep_policy(module: &Module, source: &BuildSource, options: &BuildOptions) -> QuantPolicy {
    let mut policy = options.policy.clone();
    for param in module.params.values().filter(|param| options.policy.rule_for(&param.name).is_none()) {
        let Some(format) = format_of(source, param) else { continue };
        if param.role != ParamRole::Vector && format != options.quant.storage_type(param.role) {
            let (glob, format) = (param.name.clone(), Some(format));
            policy.rules.push(PolicyRule { number: None, glob, format, scale_search: ScaleSearch::None });
        }
    }
    policy
}

/// The report on weights that are kept, once it is known where they go. `None` for a module in text form that
/// had quantized them already.
pub(super) fn kept_weights(source: &BuildSource, program: &LoweredProgram) -> Option<KeptWeights> {
    let memory = program.memory.as_ref()?;
    let quantized = |param: &ModelParam| {
        let plain = stored_type(source, &param.source).is_some_and(|stored| !stored.is_quantized());
        plain && param.ty.dtype.is_packed()
    };
    if program.module.params.values().any(quantized) {
        return None;
    }
    let weights = || program.module.params.values().filter(|param| !param.is_adapter());
    let matrices = || weights().filter(|param| param.role != ParamRole::Vector);
    let dequantized = |param: &ModelParam| {
        let stored = stored_type(source, &param.source);
        matches!(stored, Some(StoredType::Packed(_))) && !param.ty.dtype.is_packed()
    };
    let types =
        matrices().filter_map(|param| Some((stored_type(source, &param.source)?, element_count(param))));
    let (scheme, _) = QuantScheme::from_name(SMALLER).ok()?;
    let types = by_weights(types);
    Some(KeptWeights {
        dequantized: matrices().any(dequantized),
        types: types.into_iter().map(StoredType::name).collect(),
        random: matches!(source.model.weights, WeightSource::Random { .. }),
        bytes: memory.weights_bytes,
        smaller_bytes: weights().map(|param| bytes_in(&scheme, param)).sum(),
    })
}

/// Bytes of a parameter as the scheme stores it.
fn bytes_in(scheme: &QuantScheme, param: &ModelParam) -> u64 {
    let dtype = QuantPolicy::default().choose_format(scheme, param).0;
    let packed = matrix_shape(param).and_then(|(n, k)| packed_bytes(dtype, Packing::RowMajor, n, k).ok());
    packed.map_or_else(|| element_count(param) * dtype.bytes().unwrap_or(4) as u64, |bytes| bytes as u64)
}

/// The type that packed weights are dequantized to: the one that config.json says the model computes in, else
/// f16, in which their scales mostly are.
fn computed_type(config: &ModelConfig) -> StoredType {
    named_type(config).unwrap_or(StoredType::F16)
}

/// The format that holds the weights of a parameter as they are stored; `None` for one that is no tensor of
/// the checkpoint.
fn format_of(source: &BuildSource, param: &ModelParam) -> Option<DType> {
    let stored = stored_type(source, &param.source)?;
    let StoredType::Packed(_) = stored else { return Some(lossless_format(stored)) };
    let groups = stored_groups(&source.checkpoint, &param.source, false).filter(|_| param.ty.rank() == 2);
    let packed = groups.and_then(grouped_format).map(DType::Packed);
    Some(packed.unwrap_or_else(|| lossless_format(computed_type(&source.model.config))))
}

/// The groups of rows of packed weights; of columns where the transpose is needed.
fn stored_groups(checkpoint: &Checkpoint, source: &ParamSource, transposed: bool) -> Option<StoredGroups> {
    match source {
        ParamSource::Tensor(name) => {
            checkpoint.stored_groups(name).filter(|groups| groups.transposed == transposed)
        }
        ParamSource::Columns(_, inner) => match &**inner {
            ParamSource::Tensor(name) => checkpoint.sorted_groups(name).filter(|_| !transposed),
            _ => None,
        },
        ParamSource::Transpose(inner) => stored_groups(checkpoint, inner, !transposed),
        ParamSource::Rows(rows, inner) => {
            let groups = stored_groups(checkpoint, inner, transposed)?;
            // Rows of a transpose are the columns that have groups.
            let whole = rows.count == 1 && rows.start.is_multiple_of(groups.columns);
            (whole || !transposed).then_some(groups)
        }
        ParamSource::Concat(parts) if !transposed => {
            let mut parts = parts.iter().map(|part| stored_groups(checkpoint, part, transposed));
            let first = parts.next()??;
            parts.try_fold(first, |groups, part| groups.combine(part?))
        }
        _ => None,
    }
}

/// True if a format of ours holds a packed weight once its columns are sorted.
pub(super) fn holds_sorted(checkpoint: &Checkpoint, name: &str) -> bool {
    checkpoint.sorted_groups(name).and_then(grouped_format).is_some()
}

/// The format with the fewest bytes that holds these codes, scales and zero points. A group of the checkpoint
/// may be several of the format's.
fn grouped_format(groups: StoredGroups) -> Option<QuantFormat> {
    let fits = |columns: usize| groups.columns.is_multiple_of(columns);
    let name = match (groups.bits, groups.zeros) {
        _ if groups.codes == StoredCodes::E4M3 => match fits(128) && !groups.transposed {
            true => "e4m3g128_f32",
            false => return None,
        },
        _ if groups.codes == StoredCodes::E2M1 => match groups.bf16 && fits(32) {
            true => "e2m1g32_bf16",
            false => return None,
        },
        (..=4, false) if groups.f16 && fits(128) => "q4g128",
        (..=4, false) if groups.f16 && fits(64) => "q4g64",
        (..=4, false) if groups.f16 && fits(32) => "q4g32",
        (..=4, false) if groups.bf16 && fits(32) => "q4g32_bf16",
        (..=4, true) if groups.f16 && fits(128) => "q4g128_zero",
        (..=4, true) if groups.f16 && fits(64) => "q4g64_zero",
        (..=4, true) if groups.f16 && fits(32) => "q4g32_zero",
        (..=4, true) if groups.bf16 && fits(32) => "q4g32_bf16_zero",
        (8, false) if groups.f16 && fits(128) => "q8g128",
        (8, false) if groups.f16 && fits(32) => "q8g32",
        (8, true) if groups.f16 && fits(32) => "q8g32_zero",
        _ => return None,
    };
    QuantFormat::parse(name)
}

/// The format that holds a stored type: without loss, or with little where there is none of ours that is
/// equal.
fn lossless_format(stored: StoredType) -> DType {
    match stored {
        StoredType::F16 => DType::F16,
        StoredType::BF16 => DType::BF16,
        StoredType::Q4_0 => DType::Packed(QuantFormat::Q4G32),
        StoredType::Q5_0 | StoredType::Q8_0 | StoredType::Q6K => DType::Packed(QuantFormat::Q8G32),
        StoredType::Q4_1 | StoredType::Q4K => DType::Packed(QuantFormat::by_name("q4g32_min")),
        StoredType::Q5_1 | StoredType::Q5K => DType::Packed(QuantFormat::by_name("q8g32_min")),
        // Groups of 16 there.
        StoredType::Q2K => DType::Packed(QuantFormat::by_name("q4g32_min")),
        StoredType::Q3K => DType::Packed(QuantFormat::Q4G32),
        StoredType::Mxfp4 => DType::Packed(QuantFormat::by_name("e2m1g32_bf16")),
        // Codes that are not equally spaced.
        StoredType::Iq4Nl | StoredType::Iq4Xs | StoredType::Nvfp4 => DType::Packed(QuantFormat::Q8G32),
        _ => DType::F32,
    }
}

/// Per stored type, format and whether its values are the same, for a checkpoint with quantized weights;
/// empty for others.
pub(super) fn conversions(checkpoint: &Checkpoint, stored: &[StoredTensor]) -> Vec<ConversionRow> {
    if !checkpoint.tensors().iter().any(|info| info.dtype.is_quantized()) {
        return Vec::new();
    }
    let mut counts: BTreeMap<(StoredType, DType, bool), usize> = BTreeMap::new();
    for StoredTensor { tensor, format } in stored {
        if let Some(info) = checkpoint.tensor_info(&tensor.name) {
            *counts.entry((info.dtype, *format, tensor.exact)).or_default() += 1;
        }
    }
    let row = |((stored, format, exact), tensors): ((StoredType, DType, bool), usize)| ConversionRow {
        stored: stored.name(),
        format: format.name().to_string(),
        tensors,
        how: conversion_kind(stored, format, exact),
    };
    counts.into_iter().map(row).collect()
}

fn conversion_kind(stored: StoredType, format: DType, exact: bool) -> &'static str {
    match format {
        DType::Packed(_) if stored.is_quantized() && exact => "kept: the same values",
        DType::Packed(_) if stored.is_quantized() => "dequantized and quantized again",
        DType::Packed(_) => "quantized",
        _ if stored.is_quantized() => "dequantized",
        _ if stored.ir() == Some(format) => "kept",
        _ => "converted",
    }
}

/// The type of the first tensor that a parameter is made of.
fn stored_type(source: &BuildSource, tensors: &ParamSource) -> Option<StoredType> {
    let info = tensors.tensor_names().into_iter().find_map(|name| source.checkpoint.tensor_info(name))?;
    Some(published_type(source).unwrap_or(info.dtype))
}

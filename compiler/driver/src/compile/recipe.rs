//! `--weights-on-load`: how the runtime makes random weights, in place of the weights themselves.
//!
//! Values are drawn where they are packed, spread as those of `--random-weights` are, but they are not the
//! same: codes are drawn evenly, so nothing has to be quantized. Parameters that are no random values
//! (tables, exponentials of random values, columns that need padding) are stored in the recipe as they would
//! be in the weights.

use mlcc_ir::entity::EntityId;
use mlcc_ir::format::ZeroPoint;
use mlcc_ir::module::{ModelParam, ParamSource};
use mlcc_ir::types::{DType, Packing};
use mlcc_models::checkpoint::{Distribution, random};
use mlcc_passes::LoweredProgram;
use mlcc_passes::plan_memory::MemoryPlan;
use mlcc_quant::plain::PlainType;
use mlcc_quant::runs::{ByteKind, ByteRun, byte_runs};
use mlcc_runtime::weight_generator::{
    DrawPiece, FloatType, GeneratorEntry, PieceContent, RandomDraw, ValueDistribution, WeightGenerator,
};

use super::{BuildError, BuildHooks, BuildSource};
use crate::weights::{WeightWriteError, matrix_shape, pack_param};

pub(super) fn build_recipe(
    source: &BuildSource,
    seed: u64,
    program: &LoweredProgram,
    memory: &MemoryPlan,
    hooks: &mut BuildHooks<'_>,
) -> Result<WeightGenerator, BuildError> {
    let mut entries = Vec::new();
    for (id, param) in program.module.params.iter().filter(|(_, param)| !param.is_adapter()) {
        hooks.check_cancelled()?;
        let (offset, _) = memory.params[id.index()];
        match param_draws(source, seed, param, offset)? {
            Some(draws) => entries.extend(draws.into_iter().map(GeneratorEntry::Draw)),
            None => {
                let options = program.pack_options.get(&param.name).copied().unwrap_or_default();
                let mut bytes = Vec::new();
                pack_param::<BuildError>(&source.checkpoint, param, options, |piece| {
                    bytes.extend_from_slice(piece);
                    Ok(())
                })?;
                entries.push(GeneratorEntry::Stored { offset, bytes });
            }
        }
    }
    Ok(WeightGenerator { seed, bytes: memory.weights_bytes, entries })
}

/// The draws of a parameter; `None` if its values are to be stored.
fn param_draws(
    source: &BuildSource,
    seed: u64,
    param: &ModelParam,
    offset: u64,
) -> Result<Option<Vec<RandomDraw>>, BuildError> {
    let (n, k) = matrix_shape(param).ok_or_else(|| WeightWriteError::Shape(param.name.clone()))?;
    let Some(spread) = source_spread(source, &param.source, k) else { return Ok(None) };
    let dtype = param.ty.dtype;
    let packing = param.packing.unwrap_or(Packing::RowMajor);
    let named = |source| WeightWriteError::Pack { tensor: param.name.clone(), source };
    let Some(runs) = byte_runs(dtype, packing, n, k).map_err(named)? else { return Ok(None) };
    let Some(numbers) = numbers(dtype, spread) else { return Ok(None) };
    let draw = |(number, run): (usize, ByteRun)| RandomDraw {
        offset: offset + run.offset as u64,
        count: run.count as u64,
        // Runs of one parameter are drawn independently.
        key: random::key(seed, &format!("{}/{number}", param.name)),
        pieces: run.pieces.iter().map(|&(bytes, kind)| weight_piece(bytes, kind, numbers, spread)).collect(),
    };
    Ok(Some(runs.into_iter().enumerate().map(draw).collect()))
}

fn weight_piece(
    bytes: usize,
    kind: ByteKind,
    [scale, zero]: [PieceContent; 2],
    spread: ValueDistribution,
) -> DrawPiece {
    let content = match kind {
        ByteKind::Value(plain) => PieceContent::Floats(float_type(plain), spread),
        ByteKind::Code => PieceContent::Codes,
        ByteKind::Scale => scale,
        ByteKind::Zero => zero,
        ByteKind::Padding(byte) => PieceContent::Fill(byte),
    };
    DrawPiece { bytes: bytes as u64, content }
}

/// The scales and the zeros with which even codes have the wanted deviation; `None` where none do, because
/// the mean is not 0.
fn numbers(dtype: DType, spread: ValueDistribution) -> Option<[PieceContent; 2]> {
    let DType::Packed(format) = dtype else { return Some([PieceContent::Fill(0); 2]) };
    let deviation = match spread {
        ValueDistribution::Normal { mean: 0.0, deviation } => f64::from(deviation),
        ValueDistribution::Uniform { low, high } if low == -high => f64::from(high) / 3.0_f64.sqrt(),
        ValueDistribution::Normal { .. } | ValueDistribution::Uniform { .. } => return None,
    };
    let number = PlainType::of_scale(format.scale);
    let constant = |value: f64| {
        let value = number.round(value as f32);
        PieceContent::Floats(float_type(number), ValueDistribution::Uniform { low: value, high: value })
    };
    let last = format.max_code() as i32;
    // The middle of the codes; a whole zero point is next to it.
    let zero = match format.zero {
        ZeroPoint::Constant(zero) => f64::from(zero),
        ZeroPoint::PerGroup => f64::from(last / 2),
        ZeroPoint::Minimum => f64::from(last) / 2.0,
    };
    let number_of = |code: i32| f64::from(format.decode(code as u8));
    let squares: f64 = (0..=last).map(|code| (number_of(code) - zero).powi(2)).sum();
    let scale = deviation / (squares / f64::from(last + 1)).sqrt();
    if format.zero == ZeroPoint::Minimum {
        return Some([constant(scale), constant(-zero * scale)]);
    }
    // Both signs, so that codes of which one sign has more are 0 in the mean.
    let mut bytes = Vec::new();
    number.write(scale as f32, &mut bytes);
    let scales = match (number, bytes[..].try_into()) {
        (PlainType::F16, Ok(bits)) => PieceContent::Scales(u16::from_le_bytes(bits)),
        _ => {
            let high = (scale * 3.0_f64.sqrt()) as f32;
            PieceContent::Floats(float_type(number), ValueDistribution::Uniform { low: -high, high })
        }
    };
    Some([scales, constant(zero)])
}

fn float_type(plain: PlainType) -> FloatType {
    match plain {
        PlainType::F32 => FloatType::F32,
        PlainType::F16 => FloatType::F16,
        PlainType::BF16 => FloatType::BF16,
    }
}

/// The distribution of the values of a source in rows of `k`; `None` if they are not drawn, or not as
/// something that can be drawn.
fn source_spread(source: &BuildSource, of: &ParamSource, k: usize) -> Option<ValueDistribution> {
    let map = |inner: &ParamSource, f: &dyn Fn(f32) -> f32, g: &dyn Fn(f32) -> f32| {
        Some(match source_spread(source, inner, k)? {
            ValueDistribution::Normal { mean, deviation } => {
                ValueDistribution::Normal { mean: f(mean), deviation: g(deviation) }
            }
            ValueDistribution::Uniform { low, high } => {
                ValueDistribution::Uniform { low: f(low), high: f(high) }
            }
        })
    };
    match of {
        ParamSource::Tensor(name) => {
            let shape = &source.checkpoint.tensor_info(name)?.shape;
            Some(match source.model.config.architecture.distribution(name, shape) {
                Distribution::Constant(value) => ValueDistribution::Uniform { low: value, high: value },
                Distribution::Uniform { low, high } => ValueDistribution::Uniform { low, high },
                Distribution::Normal { mean, deviation } => ValueDistribution::Normal { mean, deviation },
            })
        }
        ParamSource::Scale(factor, inner) => {
            let factor = *factor as f32;
            map(inner, &|x| x * factor, &|deviation| deviation * factor.abs())
        }
        ParamSource::Offset(term, inner) => map(inner, &|x| x + *term as f32, &|deviation| deviation),
        ParamSource::Rows(_, inner)
        | ParamSource::Columns(_, inner)
        | ParamSource::ColumnRange(_, inner)
        | ParamSource::Transpose(inner) => source_spread(source, inner, k),
        ParamSource::UnitRows(_) => {
            Some(ValueDistribution::Normal { mean: 0.0, deviation: 1.0 / (k.max(1) as f32).sqrt() })
        }
        ParamSource::Concat(parts) => {
            let spreads: Option<Vec<ValueDistribution>> =
                parts.iter().map(|part| source_spread(source, part, k)).collect();
            let spreads = spreads?;
            let first = *spreads.first()?;
            spreads.iter().all(|&other| other == first).then_some(first)
        }
        ParamSource::NegExp(_)
        | ParamSource::Exp(_)
        | ParamSource::Values(_)
        | ParamSource::Ranks(_)
        | ParamSource::Adapter => None,
    }
}

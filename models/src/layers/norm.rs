//! Norms over the last axis, with their weights by checkpoint name.

pub use crate::layer_kinds::Norm;
use crate::model_builder::ModelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource};
use mlcc_ir::types::{DType, TensorType};

impl Norm {
    /// 0 without a norm.
    pub fn epsilon(self) -> f64 {
        match self {
            Norm::None => 0.0,
            Norm::Rms(eps) | Norm::RmsPlusOne(eps) | Norm::Layer(eps) | Norm::LayerNoBias(eps) => eps,
        }
    }

    pub fn apply(self, net: &mut ModelBuilder, x: ValueId, name: &str) -> ValueId {
        match self {
            Norm::None => x,
            Norm::Rms(eps) => rms_norm(net, x, name, eps),
            Norm::RmsPlusOne(eps) => rms_norm_plus_one(net, x, name, eps),
            Norm::Layer(eps) => layer_norm(net, x, name, eps),
            Norm::LayerNoBias(eps) => layer_norm_bias(net, x, name, eps, false),
        }
    }
}

/// `x / rms(x) * weight` (Zhang and Sennrich 2019) with `{name}.weight`.
pub fn rms_norm(net: &mut ModelBuilder, x: ValueId, name: &str, eps: f64) -> ValueId {
    let size = net.width(x);
    let weight = net.vector_param(&format!("{name}.weight"), size);
    net.rms_norm(x, weight, eps)
}

/// `x / rms(x)`.
pub fn rms_norm_unweighted(net: &mut ModelBuilder, x: ValueId, eps: f64) -> ValueId {
    let size = net.width(x);
    let ones = net.table_param(&format!("ones.{size}"), vec![1.0; size]);
    net.rms_norm(x, ones, eps)
}

/// [`rms_norm`] of each of `groups` equal parts of `x: [n, size]`.
pub fn grouped_rms_norm(net: &mut ModelBuilder, x: ValueId, name: &str, eps: f64, groups: usize) -> ValueId {
    if groups == 1 {
        return rms_norm(net, x, name, eps);
    }
    let (n, size) = (net.n(), net.width(x));
    let parts = net.split_heads(x, groups);
    let unit = rms_norm_unweighted(net, parts, eps);
    let unit = net.reshape(unit, [n, Dim::from(size)]);
    let weight = net.vector_param(&format!("{name}.weight"), size);
    net.mul(unit, weight)
}

/// RMS norm whose checkpoint stores the weight less one (Gemma).
pub fn rms_norm_plus_one(net: &mut ModelBuilder, x: ValueId, name: &str, eps: f64) -> ValueId {
    let (name, size) = (format!("{name}.weight"), net.width(x));
    let source = ParamSource::Offset(1.0, Box::new(net.declare_tensor(&name, &[size])));
    let weight = net.param_from(&name, ParamRole::Vector, TensorType::new(DType::F32, [size]), source);
    net.rms_norm(x, weight, eps)
}

/// LayerNorm (Ba et al. 2016) with `{name}.weight` and `{name}.bias`.
pub fn layer_norm(net: &mut ModelBuilder, x: ValueId, name: &str, eps: f64) -> ValueId {
    let size = net.width(x);
    let weight = net.vector_param(&format!("{name}.weight"), size);
    let bias = net.vector_param(&format!("{name}.bias"), size);
    net.layer_norm(x, weight, bias, eps)
}

/// LayerNorm with `{name}.weight` and, where `bias`, `{name}.bias`.
pub fn layer_norm_bias(net: &mut ModelBuilder, x: ValueId, name: &str, eps: f64, bias: bool) -> ValueId {
    if bias {
        return layer_norm(net, x, name, eps);
    }
    let size = net.width(x);
    let weight = net.vector_param(&format!("{name}.weight"), size);
    let zeros = net.table_param(&format!("zeros.{size}"), vec![0.0; size]);
    net.layer_norm(x, weight, zeros, eps)
}

/// LayerNorm of each head of `x: [n, heads, size]` with weights of its own, `{name}.norms.{head}.weight`, and no bias
/// (`StableLmLayerNormPerHead` of transformers).
pub fn layer_norm_by_head(net: &mut ModelBuilder, x: ValueId, name: &str, eps: f64) -> ValueId {
    let heads = net.ty(x).dims.get(1).and_then(Dim::as_const).unwrap_or(0) as usize;
    let size = net.width(x);
    let ones = net.table_param(&format!("ones.{size}"), vec![1.0; size]);
    let zeros = net.table_param(&format!("zeros.{size}"), vec![0.0; size]);
    let x = net.layer_norm(x, ones, zeros, eps);
    let parts =
        (0..heads).map(|head| net.declare_tensor(&format!("{name}.norms.{head}.weight"), &[size])).collect();
    let (name, ty) = (format!("{name}.weight"), TensorType::new(DType::F32, [heads * size]));
    let weight = net.param_from(&name, ParamRole::Vector, ty, ParamSource::Concat(parts));
    let weight = net.reshape(weight, [Dim::from(heads), Dim::from(size)]);
    net.mul(x, weight)
}

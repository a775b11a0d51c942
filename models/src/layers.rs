//! Layers shared by model definitions. Parameter names are the checkpoint's.

pub mod activation;
pub mod attention;
pub mod conv;
pub mod distance_bias;
pub mod latent_attention;
pub mod linear;
pub mod mamba;
pub mod mamba2;
pub mod matrix_state;
pub mod mlp;
pub mod moe;
pub mod norm;
pub mod query_temperature;
pub mod rope;
pub mod rope_config;
pub mod self_attention;

pub use crate::layer_kinds::ActivationFunction;
pub use attention::{AttentionVariant, KeyScope, RotatedQueries};
pub use distance_bias::{DistanceBias, DistanceBuckets};
pub use linear::{FusedQkv, LinearLayer};
pub use rope::{Rope, RopeTables};
pub use rope_config::{RopeConfig, RopeDefaults};
pub use self_attention::SelfAttention;

use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::{ParamRole, StateId};
use mlcc_ir::types::{DType, TensorType};

/// `x @ weight^T` with `weight: [out, in]`, as `torch.nn.Linear` without bias.
pub fn linear(b: &mut GraphBuilder, x: ValueId, weight: ValueId) -> ValueId {
    let transposed = b.permute(weight, &[1, 0]);
    b.matmul(x, transposed)
}

/// A linear layer's weight `[out, in]` under its checkpoint name.
pub fn linear_weight(b: &mut GraphBuilder, name: &str, out: usize, input: usize) -> ValueId {
    b.param(name, ParamRole::Linear, TensorType::new(DType::F32, [out, input]))
}

/// A vector `[size]` under its checkpoint name.
pub fn vector_param(b: &mut GraphBuilder, name: &str, size: usize) -> ValueId {
    b.param(name, ParamRole::Vector, TensorType::new(DType::F32, [size]))
}

/// LayerNorm over the last axis with `{name}.weight` and `{name}.bias`.
pub fn layer_norm(b: &mut GraphBuilder, x: ValueId, name: &str, size: usize, eps: f64) -> ValueId {
    let weight = vector_param(b, &format!("{name}.weight"), size);
    let bias = vector_param(b, &format!("{name}.bias"), size);
    b.layer_norm(x, weight, bias, eps)
}

/// The previous token's `x` at each of the `n` positions of `x: [n, size]`: the state first, then `x[0..n-1]`.
/// The state keeps the last row for the next step.
pub fn token_shift(b: &mut GraphBuilder, x: ValueId, state: StateId) -> ValueId {
    let (n, size) = (b.ty(x).dims[0].clone(), b.ty(x).dims[1].clone());
    let last = b.read(state);
    let last = b.reshape(last, [Dim::from(1), size.clone()]);
    let earlier = b.slice(x, 0, Dim::from(0), n.sub(&Dim::from(1)));
    let shifted = b.concat(&[last, earlier], 0);
    let newest = b.slice(x, 0, n.sub(&Dim::from(1)), Dim::from(1));
    let newest = b.reshape(newest, [size]);
    b.write(state, newest);
    shifted
}

/// `x * mix + previous * (1 - mix)` with a learned `mix: [size]`.
pub fn interpolate(b: &mut GraphBuilder, x: ValueId, previous: ValueId, mix: ValueId) -> ValueId {
    let one = b.constant(1.0);
    let rest = b.sub(one, mix);
    let new = b.mul(x, mix);
    let old = b.mul(previous, rest);
    b.add(new, old)
}

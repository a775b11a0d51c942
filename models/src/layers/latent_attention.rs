//! Multi-head latent attention (DeepSeek-AI 2024; reference: `DeepseekV3Attention` of transformers): queries, and keys and values,
//! come from rows of a low rank. A cache keeps these rows alone, one for all heads: what would make keys of them is applied to the
//! queries, and what would make values of them to the mean of the rows (the paper calls these matrices absorbed).

use super::attention::{AttentionVariant, RotatedQueries, append_to_cache};
use super::linear::LinearLayer;
use super::norm::rms_norm;
use super::rope::{RopeTables, slice_head_elements};
use crate::config::ConfigFields;
use crate::config::sizes::ModelSizes;
use crate::error::ConfigError;
use crate::model_builder::ModelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource, RowBlocks};
use mlcc_ir::types::{DType, TensorType};

#[derive(Clone, Debug, PartialEq)]
pub struct LatentAttention {
    pub heads: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// Rank of the queries; `None` where they come from one projection.
    pub query_rank: Option<usize>,
    /// Rank of keys and values.
    pub rank: usize,
    /// Elements of a query or key head that come from the row of keys and values, or from a projection of their own.
    pub nope_dim: usize,
    /// Elements that all key heads share, and that are turned where the model has positions.
    pub rope_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    pub bias: bool,
    /// What expands keys and what expands values are two tensors, by head (GGUF).
    pub split: bool,
}

/// What a call knows of positions.
#[derive(Clone, Copy)]
pub struct LatentPositions<'a> {
    /// `None` in layers without positions.
    pub rope: Option<&'a RopeTables>,
    /// Factors of the queries, `[n, 1, 1]` of one sequence.
    pub query_scale: Option<ValueId>,
}

impl<'a> LatentPositions<'a> {
    pub const NONE: LatentPositions<'static> = LatentPositions { rope: None, query_scale: None };

    pub fn with_rope(rope: &'a RopeTables) -> LatentPositions<'a> {
        LatentPositions { rope: Some(rope), query_scale: None }
    }
}

/// Larger than in any published model.
const LARGEST: usize = 65536;
/// Of the norms of both low rows, whatever the configuration says of the others.
const LATENT_EPS: f64 = 1e-6;

impl LatentAttention {
    /// Sizes of a model with such heads. What of a head is turned is called its size, as newer files write it; the width
    /// of the rows is no multiple of anything.
    pub fn sizes(fields: &ConfigFields) -> Result<ModelSizes, ConfigError> {
        let turned = fields.size("qk_rope_head_dim")?;
        ModelSizes::read_sized(fields, Some(4096), Some(turned))
    }

    /// From the fields of DeepSeek V2 and V3.
    pub fn read(fields: &ConfigFields, heads: usize) -> Result<LatentAttention, ConfigError> {
        let size = |field: &str| fields.check_max(field, fields.size(field)?, LARGEST);
        let (plain, turned) = (size("qk_nope_head_dim")?, size("qk_rope_head_dim")?);
        Ok(LatentAttention {
            heads,
            scale: ((plain + turned) as f64).powf(-0.5) * yarn_mscale(fields)?,
            query_rank: fields.get("q_lora_rank").map(|_| size("q_lora_rank")).transpose()?,
            rank: size("kv_lora_rank")?,
            nope_dim: plain,
            rope_dim: turned,
            value_dim: size("v_head_dim")?,
            bias: fields.flag_or("attention_bias", false)?,
            split: fields.flag_or("split_kv_b", false)?,
        })
    }

    /// `[n, hidden]` to `[n, hidden]`.
    pub fn apply(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        name: &str,
        x: ValueId,
        at: LatentPositions,
    ) -> ValueId {
        let (hidden, n) = (net.width(x), net.n());
        let q = self.project_queries(net, name, x);
        let q = net.split_heads(q, self.heads);
        let (still, moving) = (
            slice_head_elements(net, q, 0, self.nope_dim),
            slice_head_elements(net, q, self.nope_dim, self.rope_dim),
        );
        let heads = self.head_indices(net, x);
        let still = self.apply_head_matrices(net, (still, heads), (name, LatentSide::Keys));
        // A row of low rank, and the part of the keys that all heads share.
        let latent = apply_linear(net, name, "kv_a_proj_with_mqa", x, (self.rank + self.rope_dim, self.bias));
        let low = net.slice(latent, 1, 0.into(), self.rank.into());
        let shared = net.slice(latent, 1, self.rank.into(), self.rope_dim.into());
        let low = rms_norm(net, low, &format!("{name}.kv_a_layernorm"), LATENT_EPS);
        let attention =
            AttentionVariant { scale: self.scale, ..AttentionVariant::causal(self.nope_dim + self.rope_dim) };
        let rows = net.per_sequence(&[still, moving, low, shared], |net, rows| {
            let q = self.rotate_queries(net, (rows[0], rows[1]), at);
            let (low, mut shared) = (net.split_heads(rows[2], 1), net.split_heads(rows[3], 1));
            if let Some(rope) = at.rope {
                shared = rope.apply(net, shared);
            }
            let row = net.concat(&[low, shared], 2);
            let all = append_to_cache(net, &format!("layers.{layer}.latent"), row);
            let values = slice_head_elements(net, all, 0, self.rank);
            vec![attention.attend(net, q, [all, values], None)]
        });
        let mixed = net.split_heads(rows[0], self.heads);
        let values = self.apply_head_matrices(net, (mixed, heads), (name, LatentSide::Values));
        let values = net.reshape(values, [n, Dim::from(self.heads * self.value_dim)]);
        apply_linear(net, name, "o_proj", values, (hidden, self.bias))
    }

    /// Rows `[n, heads, in]` times a matrix of each head: queries for keys become queries for rows of low rank, and means of such
    /// rows become means of values. The heads are experts, of which every row chooses all.
    fn apply_head_matrices(
        &self,
        net: &mut ModelBuilder,
        (x, heads): (ValueId, ValueId),
        (name, side): (&str, LatentSide),
    ) -> ValueId {
        let (out, input) = match side {
            LatentSide::Keys => (self.rank, self.nope_dim),
            LatentSide::Values => (self.value_dim, self.rank),
        };
        let (stored, source) = self.head_matrix_source(net, name, side);
        let ty = TensorType::new(DType::F32, [self.heads * out, input]);
        let weight = net.param_from(&stored, ParamRole::Linear, ty, source);
        net.matmul_experts(x, weight, heads, self.heads)
    }

    /// Numbers of the heads for each row of `x: [n, ..]`, `i32[n, heads]`.
    fn head_indices(&self, net: &mut ModelBuilder, x: ValueId) -> ValueId {
        let numbers =
            net.table_param("latent_attention.heads", (0..self.heads).map(|head| head as f32).collect());
        let numbers = net.cast(numbers, DType::I32);
        let numbers = net.reshape(numbers, [Dim::from(1), Dim::from(self.heads)]);
        // The same whatever the rows hold: they only say how many there are.
        let any = net.slice(x, 1, 0.into(), 1.into());
        net.select_ge(any, any, numbers, numbers)
    }

    /// The matrices of all heads, below one another: `[heads * rank, plain]` or `[heads * value, rank]`, and their name.
    fn head_matrix_source(
        &self,
        net: &mut ModelBuilder,
        name: &str,
        side: LatentSide,
    ) -> (String, ParamSource) {
        let (width, which) = match side {
            LatentSide::Keys => (self.nope_dim, "k_b_proj"),
            LatentSide::Values => (self.value_dim, "v_b_proj"),
        };
        let stored = format!("{name}.{which}.weight");
        // Rows of a head: `start` of `of`.
        let (tensor, start, of) = match self.split {
            true => (net.declare_tensor(&stored, &[self.heads, width, self.rank]), 0, width),
            false => {
                let of = self.nope_dim + self.value_dim;
                let tensor =
                    net.declare_tensor(&format!("{name}.kv_b_proj.weight"), &[self.heads * of, self.rank]);
                (tensor, if side == LatentSide::Keys { 0 } else { self.nope_dim }, of)
            }
        };
        let all = self.heads * of;
        let rows = |blocks| ParamSource::Rows(blocks, Box::new(tensor.clone()));
        let source = match side {
            LatentSide::Values => {
                rows(RowBlocks { start, len: width, stride: of, count: self.heads, of: all })
            }
            LatentSide::Keys => {
                let head =
                    |i| ParamSource::Transpose(Box::new(rows(RowBlocks::range(i * of + start, width, all))));
                ParamSource::Concat((0..self.heads).map(head).collect())
            }
        };
        (stored, source)
    }

    /// `[n, heads * size]`.
    fn project_queries(&self, net: &mut ModelBuilder, name: &str, x: ValueId) -> ValueId {
        let width = self.heads * (self.nope_dim + self.rope_dim);
        let Some(rank) = self.query_rank else { return apply_linear(net, name, "q_proj", x, (width, false)) };
        let low = apply_linear(net, name, "q_a_proj", x, (rank, self.bias));
        let low = rms_norm(net, low, &format!("{name}.q_a_layernorm"), LATENT_EPS);
        apply_linear(net, name, "q_b_proj", low, (width, false))
    }

    /// Queries `[n, heads, rank + turned]` at their positions, of what is not turned and what is.
    fn rotate_queries(
        &self,
        net: &mut ModelBuilder,
        (still, moving): (ValueId, ValueId),
        at: LatentPositions,
    ) -> RotatedQueries {
        let join = |net: &mut ModelBuilder, moving| net.concat(&[still, moving], 2);
        let Some(rope) = at.rope else { return RotatedQueries::from(join(net, moving)) };
        let far = rope.apply_for_sinks(net, moving).map(|far| join(net, far));
        let near = rope.apply(net, moving);
        let mut near = join(net, near);
        if let Some(scale) = at.query_scale {
            near = net.mul(near, scale);
        }
        RotatedQueries { windowed: near, for_sinks: far.unwrap_or(near) }
    }
}

/// What the heads' matrices make of rows of low rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LatentSide {
    Keys,
    Values,
}

fn apply_linear(
    net: &mut ModelBuilder,
    name: &str,
    which: &str,
    x: ValueId,
    (out, bias): (usize, bool),
) -> ValueId {
    LinearLayer::new(&format!("{name}.{which}"), out).bias(bias).apply(net, x)
}

/// What YaRN makes of the scores: the square of its attention factor by `mscale_all_dim`.
fn yarn_mscale(fields: &ConfigFields) -> Result<f64, ConfigError> {
    let Some(scaling) = fields.nested_object("rope_parameters")?.or(fields.nested_object("rope_scaling")?)
    else {
        return Ok(1.0);
    };
    let all = scaling.float_or("mscale_all_dim", 0.0)?;
    let factor = scaling.float_or("factor", 1.0)?;
    let stretch = if all != 0.0 && factor > 1.0 { 0.1 * all * factor.ln() + 1.0 } else { 1.0 };
    Ok(stretch * stretch)
}

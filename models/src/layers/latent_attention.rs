//! Multi-head latent attention (DeepSeek-AI 2024; reference: `DeepseekV3Attention` of transformers): queries, and keys and values,
//! come from rows of a low rank. Here keys and values are expanded before they are kept.

use super::attention::{Attention, Queries};
use super::linear;
use super::linear::Linear;
use super::matrix_state::repeat_heads;
use super::norm::rms_norm;
use super::rope::{RopeTables, part};
use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::transformer::Net;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::ParamRole;
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
    pub plain: usize,
    /// Elements that all key heads share, and that are turned where the model has positions.
    pub turned: usize,
    /// Elements of a value.
    pub value: usize,
    pub bias: bool,
    /// What expands keys and what expands values are two tensors, by head (GGUF).
    pub split: bool,
}

/// What a call knows of positions.
#[derive(Clone, Copy)]
pub struct Positions<'a> {
    /// `None` in layers without positions.
    pub rope: Option<&'a RopeTables>,
    /// Factors of the queries, `[n, 1, 1]` of one sequence.
    pub query_scale: Option<ValueId>,
}

impl<'a> Positions<'a> {
    pub const NONE: Positions<'static> = Positions { rope: None, query_scale: None };

    pub fn turned(rope: &'a RopeTables) -> Positions<'a> {
        Positions { rope: Some(rope), query_scale: None }
    }
}

/// Larger than in any published model.
const LARGEST: usize = 65536;
/// Of the norms of both low rows, whatever the configuration says of the others.
const LATENT_EPS: f64 = 1e-6;

impl LatentAttention {
    /// From the fields of DeepSeek V2 and V3.
    pub fn read(fields: &ConfigFields, heads: usize) -> Result<LatentAttention, ConfigError> {
        let size = |field: &str| fields.within(field, fields.size(field)?, LARGEST);
        let (plain, turned) = (size("qk_nope_head_dim")?, size("qk_rope_head_dim")?);
        Ok(LatentAttention {
            heads,
            scale: ((plain + turned) as f64).powf(-0.5) * stretched(fields)?,
            query_rank: fields.get("q_lora_rank").map(|_| size("q_lora_rank")).transpose()?,
            rank: size("kv_lora_rank")?,
            plain,
            turned,
            value: size("v_head_dim")?,
            bias: fields.flag_or("attention_bias", false)?,
            split: fields.flag_or("split_kv_b", false)?,
        })
    }

    /// `[n, hidden]` to `[n, hidden]`.
    pub fn apply(&self, net: &mut Net, layer: usize, name: &str, x: ValueId, at: Positions) -> ValueId {
        let (hidden, size) = (net.width(x), self.plain + self.turned);
        let q = self.queries(net, name, x);
        // A row of low rank, and the part of the keys that all heads share.
        let latent = project(net, name, "kv_a_proj_with_mqa", x, (self.rank + self.turned, self.bias));
        let low = net.slice(latent, 1, 0.into(), self.rank.into());
        let shared = net.slice(latent, 1, self.rank.into(), self.turned.into());
        let low = rms_norm(net, low, &format!("{name}.kv_a_layernorm"), LATENT_EPS);
        let (k, v) = self.expanded(net, name, low);
        let attention = Attention { scale: self.scale, ..Attention::causal(size) };
        let inputs = [Some(q), Some(shared), Some(k), v];
        let inputs: Vec<ValueId> = inputs.into_iter().flatten().collect();
        let rows = net.per_sequence(&inputs, |net, rows| {
            let kv = net.split_heads(rows[2], self.heads);
            let (k, v) = match rows.get(3) {
                Some(&v) => (kv, net.split_heads(v, self.heads)),
                None => (part(net, kv, 0, self.plain), part(net, kv, self.plain, self.value)),
            };
            let mut shared = net.split_heads(rows[1], 1);
            if let Some(rope) = at.rope {
                shared = rope.apply(net, shared);
            }
            let shared = repeat_heads(net, shared, self.heads);
            let k = net.concat(&[k, shared], 2);
            let q = net.split_heads(rows[0], self.heads);
            let q = self.placed(net, q, at);
            vec![attention.apply(net, layer, q, k, v)]
        });
        project(net, name, "o_proj", rows[0], (hidden, self.bias))
    }

    /// Keys and values of all heads, `[n, heads * size]` each, from the row of low rank; with keys and values of a head beside one
    /// another where one tensor has both.
    fn expanded(&self, net: &mut Net, name: &str, low: ValueId) -> (ValueId, Option<ValueId>) {
        let one = |net: &mut Net, which: &str, size: usize| {
            let name = format!("{name}.{which}.weight");
            let source = net.tensor(&name, &[self.heads, size, self.rank]);
            let ty = TensorType::new(DType::F32, [self.heads * size, self.rank]);
            let weight = net.param_from(&name, ParamRole::Linear, ty, source);
            linear(net, low, weight)
        };
        match self.split {
            true => (one(net, "k_b_proj", self.plain), Some(one(net, "v_b_proj", self.value))),
            false => {
                let width = self.heads * (self.plain + self.value);
                (project(net, name, "kv_b_proj", low, (width, false)), None)
            }
        }
    }

    /// `[n, heads * size]`.
    fn queries(&self, net: &mut Net, name: &str, x: ValueId) -> ValueId {
        let width = self.heads * (self.plain + self.turned);
        let Some(rank) = self.query_rank else { return project(net, name, "q_proj", x, (width, false)) };
        let low = project(net, name, "q_a_proj", x, (rank, self.bias));
        let low = rms_norm(net, low, &format!("{name}.q_a_layernorm"), LATENT_EPS);
        project(net, name, "q_b_proj", low, (width, false))
    }

    /// Queries `[n, heads, size]` at their positions.
    fn placed(&self, net: &mut Net, q: ValueId, at: Positions) -> Queries {
        let Some(rope) = at.rope else { return Queries::from(q) };
        let (still, moving) = (part(net, q, 0, self.plain), part(net, q, self.plain, self.turned));
        let far = rope.apply_for_sinks(net, moving).map(|far| net.concat(&[still, far], 2));
        let near = rope.apply(net, moving);
        let mut near = net.concat(&[still, near], 2);
        if let Some(scale) = at.query_scale {
            near = net.mul(near, scale);
        }
        Queries { near, far: far.unwrap_or(near) }
    }
}

fn project(net: &mut Net, name: &str, which: &str, x: ValueId, (out, bias): (usize, bool)) -> ValueId {
    Linear::new(&format!("{name}.{which}"), out).bias(bias).apply(net, x)
}

/// What YaRN makes of the scores: the square of its attention factor by `mscale_all_dim`.
fn stretched(fields: &ConfigFields) -> Result<f64, ConfigError> {
    let Some(scaling) = fields.object("rope_parameters")?.or(fields.object("rope_scaling")?) else {
        return Ok(1.0);
    };
    let all = scaling.float_or("mscale_all_dim", 0.0)?;
    let factor = scaling.float_or("factor", 1.0)?;
    let stretch = if all != 0.0 && factor > 1.0 { 0.1 * all * factor.ln() + 1.0 } else { 1.0 };
    Ok(stretch * stretch)
}

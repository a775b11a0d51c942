//! What the RWKV families share: the frame around the blocks, mixes with the previous token, weights scaled against
//! overflow, matrix-valued states.

use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult};
use crate::definition::EntrySpec;
use crate::layers::{layer_norm, linear, linear_weight, token_shift, vector_param};
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{FunctionKind, ValueId};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::kernel::UnOp;
use mlcc_ir::module::{FuncId, ParamRole, ParamSource, StateId};
use mlcc_ir::types::{DType, TensorType};

/// Sizes and names of what lies around the blocks.
pub struct RwkvOuterLayers<'a> {
    pub vocab: usize,
    pub hidden: usize,
    pub layers: usize,
    pub epsilon: f64,
    pub embedding: &'a str,
    pub norm: &'a str,
    pub head: &'a str,
}

impl RwkvOuterLayers<'_> {
    /// Adds an entry function with `block` for each layer.
    pub fn build_entry(
        &self,
        b: &mut GraphBuilder,
        entry: &EntrySpec,
        mut block: impl FnMut(&mut GraphBuilder, usize, ValueId) -> ValueId,
    ) -> FuncId {
        b.set_batching(entry.batching);
        b.function(entry.name, FunctionKind::Entry, &entry.inputs(), |b, inputs| {
            let table = TensorType::new(DType::F32, [self.vocab, self.hidden]);
            let embedding = b.param(self.embedding, ParamRole::Embedding, table.clone());
            let mut x = b.gather(embedding, inputs[0]);
            b.tap("embedding", x);
            for layer in 0..self.layers {
                x = block(b, layer, x);
            }
            x = entry.output_rows(b, x, inputs);
            x = layer_norm(b, x, self.norm, self.hidden, self.epsilon);
            b.tap("final_norm", x);
            let head = b.param(self.head, ParamRole::Head, table);
            vec![linear(b, x, head)]
        })
    }
}

/// A block: both mixings, each of the normalised hidden values `[n, hidden]` and added to them.
pub struct RwkvBlock<'a> {
    /// Block `i` is `{blocks}.{i}`.
    pub blocks: &'a str,
    /// Norms before the first block, the mixing over time and the mixing of channels.
    pub norms: [&'a str; 3],
    pub hidden: usize,
    pub epsilon: f64,
    /// Hidden values are halved after this many blocks, 0 = never.
    pub rescale_every: usize,
}

impl RwkvBlock<'_> {
    pub fn add(
        &self,
        b: &mut GraphBuilder,
        layer: usize,
        mut x: ValueId,
        time_mixing: impl FnOnce(&mut GraphBuilder, ValueId) -> ValueId,
        channel_mixing: impl FnOnce(&mut GraphBuilder, ValueId) -> ValueId,
    ) -> ValueId {
        let [first, time, channels] = self.norms;
        let norm = |b: &mut GraphBuilder, x, norm: &str| {
            layer_norm(b, x, &format!("{}.{layer}.{norm}", self.blocks), self.hidden, self.epsilon)
        };
        if layer == 0 {
            x = norm(b, x, first);
        }
        let h = norm(b, x, time);
        let h = time_mixing(b, h);
        b.tap(format!("layer.{layer}.attention"), h);
        x = b.add(x, h);
        let h = norm(b, x, channels);
        let h = channel_mixing(b, h);
        b.tap(format!("layer.{layer}.mlp"), h);
        x = b.add(x, h);
        b.tap(format!("layer.{layer}"), x);
        halve_at_rescale(b, x, (layer, self.rescale_every))
    }
}

/// The previous token's `x: [n, hidden]` at each position, from and to the state of that name.
pub fn previous_token(b: &mut GraphBuilder, x: ValueId, state: &str) -> ValueId {
    let hidden = b.ty(x).dims[1].clone();
    let state = b.state(state, TensorType::new(DType::F32, [hidden]), 0.0);
    b.per_sequence(&[x], |b, rows| vec![token_shift(b, rows[0], state)])[0]
}

/// `x + delta * mix` with a learned `mix: [size]`, where `delta` is the previous token minus `x`.
pub fn mix_previous(b: &mut GraphBuilder, x: ValueId, delta: ValueId, mix: ValueId) -> ValueId {
    let part = b.mul(delta, mix);
    b.add(x, part)
}

/// `[out, input]`, divided by `2^(layer / rescale_every)` so that float16 does not overflow in deep layers.
pub fn rescaled_weight(
    b: &mut GraphBuilder,
    (layer, rescale_every): (usize, usize),
    name: &str,
    out: usize,
    input: usize,
) -> ValueId {
    let halvings = layer.checked_div(rescale_every).unwrap_or(0);
    let tensor = ParamSource::Tensor(name.into());
    let source = match halvings {
        0 => tensor,
        h => ParamSource::Scale(0.5f64.powi(h as i32), Box::new(tensor)),
    };
    b.param_from(name, ParamRole::Linear, TensorType::new(DType::F32, [out, input]), source)
}

/// Halves the hidden values where the weights of the layers after them are divided by one more 2.
fn halve_at_rescale(b: &mut GraphBuilder, x: ValueId, (layer, rescale_every): (usize, usize)) -> ValueId {
    match rescale_every > 0 && (layer + 1).is_multiple_of(rescale_every) {
        true => b.scale(x, 0.5),
        false => x,
    }
}

/// The gated feed-forward block of RWKV-4 to -6: `sigmoid(r R) * (relu(k K)^2 V)` for its two mixes k and r.
pub fn gated_channel_mixing(
    b: &mut GraphBuilder,
    module: &str,
    (hidden, intermediate): (usize, usize),
    rescale: (usize, usize),
    (k, r): (ValueId, ValueId),
) -> ValueId {
    let weight = linear_weight(b, &format!("{module}.key.weight"), intermediate, hidden);
    let k = linear(b, k, weight);
    let k = squared_relu(b, k);
    let weight = linear_weight(b, &format!("{module}.receptance.weight"), hidden, hidden);
    let r = linear(b, r, weight);
    let r = b.sigmoid(r);
    let weight = rescaled_weight(b, rescale, &format!("{module}.value.weight"), hidden, intermediate);
    let v = linear(b, k, weight);
    b.mul(r, v)
}

pub fn squared_relu(b: &mut GraphBuilder, x: ValueId) -> ValueId {
    let x = b.relu(x);
    b.square(x)
}

/// `x * sigmoid(x)`.
pub fn silu(b: &mut GraphBuilder, x: ValueId) -> ValueId {
    let gate = b.sigmoid(x);
    b.mul(x, gate)
}

/// A thin matrix `[out, in]` that the checkpoint has as `source`.
pub fn low_rank_weight(
    b: &mut GraphBuilder,
    name: &str,
    source: ParamSource,
    out: usize,
    input: usize,
) -> ValueId {
    b.param_from(name, ParamRole::LowRank, TensorType::new(DType::F32, [out, input]), source)
}

/// The heads of a layer: each has `size` keys and `size` values, and a state matrix `[values, keys]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RwkvHeads {
    pub count: usize,
    pub size: usize,
}

impl RwkvHeads {
    /// `[n, heads * size]` as `[n, heads, size]`.
    pub fn split(self, b: &mut GraphBuilder, x: ValueId) -> ValueId {
        let n = b.ty(x).dims[0].clone();
        b.reshape(x, [n, Dim::from(self.count), Dim::from(self.size)])
    }

    /// `[n, heads, size]` as `[n, heads * size]`.
    pub fn join(self, b: &mut GraphBuilder, x: ValueId) -> ValueId {
        let n = b.ty(x).dims[0].clone();
        b.reshape(x, [n, Dim::from(self.count * self.size)])
    }

    /// A vector `[heads * size]` under its checkpoint name, as `[heads, size]`.
    pub fn vector(self, b: &mut GraphBuilder, name: &str) -> ValueId {
        let flat = vector_param(b, name, self.count * self.size);
        b.reshape(flat, [self.count, self.size])
    }

    /// A vector `[heads * size]` that stands along the keys of the state matrices: `[heads, 1, size]`.
    pub fn along_keys(self, b: &mut GraphBuilder, flat: ValueId) -> ValueId {
        b.reshape(flat, [self.count, 1, self.size])
    }

    /// Vectors `[n, ..]` along the keys of the state matrices: `[n, heads, 1, size]`.
    pub fn keys(self, b: &mut GraphBuilder, x: ValueId) -> ValueId {
        let n = b.ty(x).dims[0].clone();
        b.reshape(x, [n, Dim::from(self.count), Dim::from(1), Dim::from(self.size)])
    }

    /// Vectors `[n, ..]` along the values of the state matrices: `[n, heads, size, 1]`.
    pub fn values(self, b: &mut GraphBuilder, x: ValueId) -> ValueId {
        let n = b.ty(x).dims[0].clone();
        b.reshape(x, [n, Dim::from(self.count), Dim::from(self.size), Dim::from(1)])
    }

    /// Types of a state matrix, of a vector along its keys, and of one along its values.
    pub fn types(self) -> [TensorType; 3] {
        let RwkvHeads { count, size } = self;
        [[count, size, size], [count, 1, size], [count, size, 1]]
            .map(|dims| TensorType::new(DType::F32, dims))
    }

    /// The state of a layer, row-major `[heads, values, keys]`.
    pub fn state(self, b: &mut GraphBuilder, layer: usize) -> StateId {
        let [matrix, ..] = self.types();
        b.state(&format!("blocks.{layer}.att.s"), matrix, 0.0)
    }

    /// Runs the recurrence `body` from the state of a layer, keeps the new state and gives the results of all positions
    /// as `[n, heads, size]`.
    pub fn recurrence(
        self,
        b: &mut GraphBuilder,
        layer: usize,
        body: FuncId,
        seqs: &[ValueId],
        consts: &[ValueId],
    ) -> ValueId {
        let state = self.state(b, layer);
        let n = b.ty(seqs[0]).dims[0].clone();
        let out = b.per_sequence(seqs, |b, seqs| {
            let before = b.read(state);
            let out = b.scan(body, &[before], seqs, consts);
            b.write(state, out[0]);
            vec![out[1]]
        });
        b.reshape(out[0], [n, Dim::from(self.count), Dim::from(self.size)])
    }

    /// GroupNorm with one group per head of `x: [n, heads, size]`, with `{name}.weight` and `{name}.bias`.
    pub fn norm(self, b: &mut GraphBuilder, x: ValueId, name: &str, epsilon: f64) -> ValueId {
        let mean = self.mean(b, x);
        let centred = b.sub(x, mean);
        let square = b.square(centred);
        let variance = self.mean(b, square);
        let epsilon = b.constant(epsilon);
        let variance = b.add(variance, epsilon);
        let inverse = b.unary(UnOp::Rsqrt, variance);
        let unit = b.mul(centred, inverse);
        let weight = self.vector(b, &format!("{name}.weight"));
        let bias = self.vector(b, &format!("{name}.bias"));
        let scaled = b.mul(unit, weight);
        b.add(scaled, bias)
    }

    fn mean(self, b: &mut GraphBuilder, x: ValueId) -> ValueId {
        let sum = b.reduce(RedOp::Sum, x, 2);
        b.scale(sum, 1.0 / self.size as f64)
    }
}

/// One step of the recurrence of RWKV-5 and -6 per head: `y = (S + v (u k)^T) r`, then `S = S diag(w) + v k^T`. Inputs S, r,
/// k, v, w, u; the state is indexed by value, then key.
pub fn linear_attention_step(b: &mut GraphBuilder, heads: RwkvHeads) -> FuncId {
    let [matrix, key, value] = heads.types();
    let types = [matrix, key.clone(), key.clone(), value, key.clone(), key];
    b.function("wkv", FunctionKind::Body, &types, |b, inputs| {
        let &[state, r, k, v, w, u] = inputs else { unreachable!("six inputs are declared") };
        let new = b.mul(v, k);
        let boosted = b.mul(new, u);
        let seen = b.add(state, boosted);
        let weighted = b.mul(seen, r);
        let y = b.reduce(RedOp::Sum, weighted, 2);
        let kept = b.mul(state, w);
        vec![b.add(kept, new), y]
    })
}

/// Heads of a GGUF file, in `head_size`. `context_length` is a million in all of them, and means nothing.
pub(super) fn write_gguf_heads(w: &mut ConfigFieldWriter<'_>, head_size: &str) -> FieldResult {
    w.remove_fields(&["max_position_embeddings", "num_attention_heads", "num_key_value_heads"]);
    let size = w.required_number("wkv.head_size")?;
    w.set_field(head_size, size);
    Ok(())
}

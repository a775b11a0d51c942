//! RWKV-7, "Goose" (Peng et al., "RWKV-7 'Goose' with Expressive Dynamic State Evolution", 2025; reference code: `RWKV_x070` of
//! the rwkv package; names of `RWKV7ForCausalLM` of flash-linear-attention).
//!
//! State per layer: the previous token's input of both blocks (`att.x`, `ffn.x`) and a matrix per head (`att.s`,
//! `[heads, values, keys]`).

pub mod config;
pub mod naming;

pub use config::Rwkv7Config;

use crate::checkpoint::Distribution;
use crate::checkpoint::gguf::TensorConversion::{Same, SplitHeads, Stacked};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::published::PublishedFields;
use crate::definition::{Architecture, EntrySpec, ModelDefinition};
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::rwkv::{
    RwkvBlock, RwkvHeads, RwkvOuterLayers, low_rank_weight, mix_previous, previous_token, squared_relu,
    write_gguf_heads,
};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::{linear, linear_weight, vector_param};
use mlcc_ir::compute::RedOp;
use mlcc_ir::graph::{FunctionKind, ValueId};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::kernel::UnOp;
use mlcc_ir::module::{FuncId, ParamSource};
use naming::{is_stored_transposed, is_unused, rwkv7_canonical, rwkv7_distribution, rwkv7_tensors};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "rwkv7",
        classes: &["RWKV7ForCausalLM"],
        about: "RWKV-7",
        read: |fields| Rwkv7Config::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields::UNKNOWN,
    }],
    gguf: &[GgufArchitecture {
        name: "rwkv7",
        model_type: "rwkv7",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        ..GgufArchitecture::LLAMA
    }],
};

/// Decays lie between `exp(-exp(-0.5))` and 1; the reference rounds the inner number so.
const DECAY_SCALE: f64 = -0.606531;
/// Smallest length that a key is divided by.
const SMALLEST_LENGTH: f64 = 1e-12;

impl ModelDefinition for Rwkv7Config {
    fn build(&self, b: &mut GraphBuilder, entry: &EntrySpec) -> FuncId {
        let frame = RwkvOuterLayers {
            vocab: self.vocab,
            hidden: self.hidden,
            layers: self.layers,
            epsilon: self.norm_epsilon,
            embedding: "model.embeddings.weight",
            norm: "model.norm",
            head: "lm_head.weight",
        };
        let mut first_value = None;
        let block = RwkvBlock {
            blocks: "model.layers",
            norms: ["pre_norm", "attn_norm", "ffn_norm"],
            hidden: self.hidden,
            epsilon: self.norm_epsilon,
            rescale_every: 0,
        };
        frame.build_entry(b, entry, |b, layer, x| {
            let time = |b: &mut GraphBuilder, x| time_mixing(b, self, layer, x, &mut first_value);
            let channels = |b: &mut GraphBuilder, x| channel_mixing(b, self, layer, x);
            block.add(b, layer, x, time, channels)
        })
    }

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn context_length(&self) -> usize {
        self.context_length
    }

    fn has_cache(&self) -> bool {
        false
    }

    fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        rwkv7_tensors(self)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        rwkv7_canonical(stored_name)
    }

    fn is_stored_transposed(&self, stored_name: &str) -> bool {
        is_stored_transposed(stored_name)
    }

    fn is_ignored(&self, name: &str) -> bool {
        is_unused(name)
    }

    fn distribution(&self, name: &str, shape: &[usize]) -> Distribution {
        rwkv7_distribution(name, shape)
    }
}

fn time_mixing(
    b: &mut GraphBuilder,
    config: &Rwkv7Config,
    layer: usize,
    x: ValueId,
    first_value: &mut Option<ValueId>,
) -> ValueId {
    let hidden = config.hidden;
    let heads = RwkvHeads { count: config.heads(), size: config.head_size };
    let name = format!("model.layers.{layer}.attn");
    let previous = previous_token(b, x, &format!("blocks.{layer}.att.x"));
    let delta = b.sub(previous, x);
    let mixed = |b: &mut GraphBuilder, which: &str| {
        let mix = vector_param(b, &format!("{name}.x_{which}"), hidden);
        mix_previous(b, x, delta, mix)
    };
    let [xr, xw, xk, xv, xa, xg] = ["r", "w", "k", "v", "a", "g"].map(|which| mixed(b, which));
    let project = |b: &mut GraphBuilder, x, which: &str| {
        let weight = linear_weight(b, &format!("{name}.{which}.weight"), hidden, hidden);
        linear(b, x, weight)
    };
    let is_first = first_value.is_none();
    let module = |which: &str| format!("{name}.{which}_lora");
    // What reads the mixes stands together, so that workers meet once after it.
    let r = project(b, xr, "r_proj");
    let k = project(b, xk, "k_proj");
    let v = project(b, xv, "v_proj");
    let w = low_rank_down(b, &module("w"), xw, (hidden, config.decay_rank), Some(UnOp::Tanh));
    let a = low_rank_down(b, &module("a"), xa, (hidden, config.rate_rank), None);
    let g = low_rank_down(b, &module("g"), xg, (hidden, config.gate_rank), Some(UnOp::Sigmoid));
    let share = (!is_first).then(|| low_rank_down(b, &module("v"), xv, (hidden, config.value_rank), None));

    // `sigmoid(x B + bias)`.
    let gate = |b: &mut GraphBuilder, x, which: &str, rank| {
        let x = low_rank_up(b, &module(which), x, (hidden, rank));
        let bias = vector_param(b, &format!("{}.lora.2.bias", module(which)), hidden);
        let x = b.add(x, bias);
        b.sigmoid(x)
    };
    let w = gate(b, w, "w", config.decay_rank);
    let w = b.scale(w, DECAY_SCALE);
    let w = b.exp(w);
    let a = gate(b, a, "a", config.rate_rank);
    let g = low_rank_up(b, &module("g"), g, (hidden, config.gate_rank));
    // Layers after the first take a part of the first one's value.
    let v = match (*first_value, share) {
        (Some(first), Some(share)) => {
            let share = gate(b, share, "v", config.value_rank);
            let missing = b.sub(first, v);
            let part = b.mul(missing, share);
            b.add(v, part)
        }
        _ => *first_value.insert(v),
    };

    let (k, a) = (heads.split(b, k), heads.split(b, a));
    let removed = unit_keys(b, heads, &name, k);
    let k = replacement_keys(b, heads, &name, k, a);
    let added = b.mul(removed, a);
    let removed = b.unary(UnOp::Neg, removed);
    let keys = [r, w, k].map(|x| heads.keys(b, x));
    let seqs = [keys[0], keys[1], keys[2], heads.values(b, v), heads.keys(b, removed), heads.keys(b, added)];
    let body = delta_rule_step(b, heads);
    let y = heads.recurrence(b, layer, body, &seqs, &[]);

    let y = heads.norm(b, y, &format!("{name}.g_norm"), config.group_norm_epsilon());
    let (r, v, g) = (heads.split(b, r), heads.split(b, v), heads.split(b, g));
    let weight = heads.vector(b, &format!("{name}.r_k"));
    let bonus = b.mul(r, k);
    let bonus = b.mul(bonus, weight);
    let bonus = b.reduce(RedOp::Sum, bonus, 2);
    let bonus = b.mul(bonus, v);
    let y = b.add(y, bonus);
    let y = b.mul(y, g);
    let y = heads.join(b, y);
    project(b, y, "o_proj")
}

/// `activation(x A)`, the first half of a low-rank product, with `A: [rank, hidden]` as `torch.nn.LinearLayer` has it.
fn low_rank_down(
    b: &mut GraphBuilder,
    module: &str,
    x: ValueId,
    (hidden, rank): (usize, usize),
    activation: Option<UnOp>,
) -> ValueId {
    let name = format!("{module}.lora.0.weight");
    let weight = low_rank_weight(b, &name, ParamSource::Tensor(name.clone()), rank, hidden);
    let x = linear(b, x, weight);
    activation.map_or(x, |op| b.unary(op, x))
}

/// `x B`, the second half, with `B: [hidden, rank]`.
fn low_rank_up(b: &mut GraphBuilder, module: &str, x: ValueId, (hidden, rank): (usize, usize)) -> ValueId {
    let name = format!("{module}.lora.2.weight");
    let weight = low_rank_weight(b, &name, ParamSource::Tensor(name.clone()), hidden, rank);
    linear(b, x, weight)
}

/// What is removed from the state: keys times `k_k`, of length 1 per head. `k: [n, heads, size]`.
fn unit_keys(b: &mut GraphBuilder, heads: RwkvHeads, name: &str, k: ValueId) -> ValueId {
    let scale = heads.vector(b, &format!("{name}.k_k"));
    let k = b.mul(k, scale);
    let square = b.square(k);
    let length = b.reduce(RedOp::Sum, square, 2);
    let length = b.unary(UnOp::Sqrt, length);
    let smallest = b.constant(SMALLEST_LENGTH);
    let length = b.max(length, smallest);
    b.div(k, length)
}

/// `k * (1 + (a - 1) * k_a)`, all `[n, heads, size]`.
fn replacement_keys(b: &mut GraphBuilder, heads: RwkvHeads, name: &str, k: ValueId, a: ValueId) -> ValueId {
    let weight = heads.vector(b, &format!("{name}.k_a"));
    let one = b.constant(1.0);
    let rate = b.sub(a, one);
    let rate = b.mul(rate, weight);
    let factor = b.add(one, rate);
    b.mul(k, factor)
}

/// One step of the generalised delta rule per head: `S = S diag(w) + v k^T + (S a) b^T`, then `y = S r`. Inputs S, r, w, k, v, a
/// (what is removed, negative), b (what is put in its place).
fn delta_rule_step(b: &mut GraphBuilder, heads: RwkvHeads) -> FuncId {
    let [matrix, key, value] = heads.types();
    let types = [matrix, key.clone(), key.clone(), key.clone(), value, key.clone(), key];
    b.function("wkv", FunctionKind::Body, &types, |b, inputs| {
        let &[state, r, w, k, v, removed, added] = inputs else { unreachable!("seven inputs are declared") };
        let found = b.mul(state, removed);
        let found = b.reduce(RedOp::Sum, found, 2);
        // What needs nothing of `found` first: a prompt on a GPU waits for the sum from step to step.
        let kept = b.mul(state, w);
        let new = b.mul(v, k);
        let kept = b.add(kept, new);
        let replaced = b.mul(found, added);
        let state = b.add(kept, replaced);
        let read = b.mul(state, r);
        vec![state, b.reduce(RedOp::Sum, read, 2)]
    })
}

fn channel_mixing(b: &mut GraphBuilder, config: &Rwkv7Config, layer: usize, x: ValueId) -> ValueId {
    let name = format!("model.layers.{layer}.ffn");
    let previous = previous_token(b, x, &format!("blocks.{layer}.ffn.x"));
    let delta = b.sub(previous, x);
    let mix = vector_param(b, &format!("{name}.x_k"), config.hidden);
    let x = mix_previous(b, x, delta, mix);
    let weight = linear_weight(b, &format!("{name}.key.weight"), config.intermediate, config.hidden);
    let k = linear(b, x, weight);
    let k = squared_relu(b, k);
    let weight = linear_weight(b, &format!("{name}.value.weight"), config.hidden, config.intermediate);
    linear(b, k, weight)
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.set_names(rwkv7_canonical, is_stored_transposed);
    t.record_axis_size(&["vocab_size"], "model.embeddings.weight", 0, 1)?;
    t.record_axis_size(&["hidden_size"], "model.embeddings.weight", 1, 1)?;
    t.record_axis_size(&["head_dim"], "model.layers.0.attn.r_k", 1, 1)?;
    t.record_axis_size(&["intermediate_size"], "model.layers.0.ffn.key.weight", 0, 1)?;
    // The first layer does not need its mix with the first layer's value.
    let ranks = [
        ("decay_low_rank_dim", "w", 0),
        ("a_low_rank_dim", "a", 0),
        ("v_low_rank_dim", "v", 1),
        ("gate_low_rank_dim", "g", 0),
    ];
    for (field, letter, layer) in ranks {
        let tensor = format!("model.layers.{layer}.attn.{letter}_lora.lora.0.weight");
        t.record_axis_size(&[field], &tensor, 0, 1)?;
    }
    Ok(())
}

/// The thin matrices lie as flash-linear-attention stores them.
const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "model.embeddings.weight", Same),
        ("token_embd_norm.weight", "model.layers.0.pre_norm.weight", Same),
        ("token_embd_norm.bias", "model.layers.0.pre_norm.bias", Same),
        ("output_norm.weight", "model.norm.weight", Same),
        ("output_norm.bias", "model.norm.bias", Same),
        ("output.weight", "lm_head.weight", Same),
    ],
    layers: "model.layers",
    block: &[
        ("attn_norm", "attn_norm", Same),
        ("attn_norm_2", "ffn_norm", Same),
        ("time_mix_lerp_fused.weight", "attn.x_{e}", Stacked(&["r", "w", "k", "v", "a", "g"])),
        ("time_mix_w0.weight", "attn.w_lora.lora.2.bias", Same),
        ("time_mix_w1.weight", "attn.w_lora.lora.0.weight", Same),
        ("time_mix_w2.weight", "attn.w_lora.lora.2.weight", Same),
        ("time_mix_a0.weight", "attn.a_lora.lora.2.bias", Same),
        ("time_mix_a1.weight", "attn.a_lora.lora.0.weight", Same),
        ("time_mix_a2.weight", "attn.a_lora.lora.2.weight", Same),
        ("time_mix_v0.weight", "attn.v_lora.lora.2.bias", Same),
        ("time_mix_v1.weight", "attn.v_lora.lora.0.weight", Same),
        ("time_mix_v2.weight", "attn.v_lora.lora.2.weight", Same),
        ("time_mix_g1.weight", "attn.g_lora.lora.0.weight", Same),
        ("time_mix_g2.weight", "attn.g_lora.lora.2.weight", Same),
        ("time_mix_k_k.weight", "attn.k_k", Same),
        ("time_mix_k_a.weight", "attn.k_a", Same),
        ("time_mix_r_k.weight", "attn.r_k", SplitHeads),
        ("time_mix_receptance", "attn.r_proj", Same),
        ("time_mix_key", "attn.k_proj", Same),
        ("time_mix_value", "attn.v_proj", Same),
        ("time_mix_output", "attn.o_proj", Same),
        ("time_mix_ln", "attn.g_norm", Same),
        ("channel_mix_lerp_k.weight", "ffn.x_k", Same),
        ("channel_mix_key", "ffn.key", Same),
        ("channel_mix_value", "ffn.value", Same),
    ],
    llama_block: false,
};

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    write_gguf_heads(w, "head_dim")?;
    w.copy_float("attention.layer_norm_epsilon", "norm_eps")?;
    w.copy_number("attention.decay_lora_rank", "decay_low_rank_dim")?;
    w.copy_number("attention.iclr_lora_rank", "a_low_rank_dim")?;
    w.copy_number("attention.value_residual_mix_lora_rank", "v_low_rank_dim")?;
    w.copy_number("attention.gate_lora_rank", "gate_low_rank_dim")
}

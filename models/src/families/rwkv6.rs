//! RWKV-6, "Finch" (Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024; reference
//! code: `RWKV` of the rwkv package, and the `Rwkv6ForCausalLM` that comes with the checkpoints).
//!
//! As RWKV-5, with token-shift mixes and decays that depend on the token through low-rank products. The state is that of
//! RWKV-5.

pub mod config;
pub mod naming;

pub use config::Rwkv6Config;

use crate::checkpoint::Distribution;
use crate::checkpoint::gguf::TensorConversion::{Rescaled, Same, Stacked, Transposed, TransposedEach};
use crate::checkpoint::gguf::{ConfigFieldWriter, FieldResult, GgufArchitecture, TensorNameMap};
use crate::config::published::PublishedFields;
use crate::definition::{Architecture, EntrySpec, ModelDefinition};
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::rwkv::{
    RwkvHeads, gated_channel_mixing, linear_attention_step, low_rank_weight, mix_previous, previous_token,
    write_gguf_heads,
};
use crate::families::rwkv4;
use crate::families::rwkv4::naming::rwkv4_canonical;
use crate::families::rwkv5;
use crate::families::rwkv5::gated_output;
use crate::families::rwkv5::naming::rwkv5_distribution;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::{linear, linear_weight, vector_param};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::kernel::UnOp;
use mlcc_ir::module::{FuncId, ParamSource, RowBlocks};
use naming::{RWKV6_MIXES, rwkv6_tensors};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "rwkv6",
        classes: &["Rwkv6ForCausalLM"],
        about: "RWKV-6",
        read: |fields| Rwkv6Config::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields::UNKNOWN,
    }],
    gguf: &[GgufArchitecture {
        name: "rwkv6",
        model_type: "rwkv6",
        write_fields: gguf_fields,
        tensor_names: |_| GGUF_NAMES,
        ..GgufArchitecture::LLAMA
    }],
};

impl ModelDefinition for Rwkv6Config {
    fn build(&self, b: &mut GraphBuilder, entry: &EntrySpec) -> FuncId {
        rwkv4::outer_layers(self).build_entry(b, entry, |b, layer, x| {
            let time = |b: &mut GraphBuilder, x| time_mixing(b, self, layer, x);
            let channels = |b: &mut GraphBuilder, x| channel_mixing(b, self, layer, x);
            rwkv4::block(self).add(b, layer, x, time, channels)
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
        rwkv6_tensors(self)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        rwkv4_canonical(stored_name)
    }

    fn distribution(&self, name: &str, shape: &[usize]) -> Distribution {
        rwkv5_distribution(name, shape)
    }
}

fn time_mixing(b: &mut GraphBuilder, config: &Rwkv6Config, layer: usize, x: ValueId) -> ValueId {
    let (hidden, attention) = (config.hidden, config.attention_hidden);
    let heads = RwkvHeads { count: config.heads(), size: config.head_size };
    let name = format!("rwkv.blocks.{layer}.attention");
    let previous = previous_token(b, x, &format!("blocks.{layer}.att.x"));
    let delta = b.sub(previous, x);
    let [wx, kx, vx, rx, gx] = mixes(b, config, &name, x, delta);
    let project = |b: &mut GraphBuilder, x: ValueId, which: &str| {
        let weight = linear_weight(b, &format!("{name}.{which}.weight"), attention, hidden);
        linear(b, x, weight)
    };
    let r = project(b, rx, "receptance");
    let k = project(b, kx, "key");
    let v = project(b, vx, "value");
    let g = project(b, gx, "gate");
    let decay = decays(b, config, &name, wx);
    let bonus = vector_param(b, &format!("{name}.time_faaaa"), attention);
    let bonus = heads.along_keys(b, bonus);

    let seqs = [heads.keys(b, r), heads.keys(b, k), heads.values(b, v), heads.keys(b, decay)];
    let body = linear_attention_step(b, heads);
    let y = heads.recurrence(b, layer, body, &seqs, &[bonus]);
    gated_output(b, config, layer, y, g)
}

/// `x` mixed with the previous token in five ways, by how much being learned and a function of the token:
/// `x + delta * (mix + tanh(shifted x A) B)`.
fn mixes(b: &mut GraphBuilder, config: &Rwkv6Config, name: &str, x: ValueId, delta: ValueId) -> [ValueId; 5] {
    let (hidden, rank) = (config.hidden, config.mix_rank);
    let mix = vector_param(b, &format!("{name}.time_maa_x"), hidden);
    let common = mix_previous(b, x, delta, mix);
    let down = transposed(b, &format!("{name}.time_maa_w1"), RWKV6_MIXES.len() * rank, hidden);
    let down = linear(b, common, down);
    let down = b.tanh(down);
    std::array::from_fn(|i| {
        // One of the five matrices [rank, hidden] that are stored together.
        let stored = format!("{name}.time_maa_w2");
        let rows = RowBlocks::range(i * rank, rank, RWKV6_MIXES.len() * rank);
        let source = ParamSource::Rows(rows, Box::new(ParamSource::Tensor(stored.clone())));
        let source = ParamSource::Transpose(Box::new(source));
        let up = low_rank_weight(b, &format!("{stored}.{}", RWKV6_MIXES[i]), source, hidden, rank);
        let own = b.slice(down, 1, Dim::from(i * rank), Dim::from(rank));
        let own = linear(b, own, up);
        let mix = vector_param(b, &format!("{name}.time_maa_{}", RWKV6_MIXES[i]), hidden);
        let mix = b.add(own, mix);
        mix_previous(b, x, delta, mix)
    })
}

/// What is kept of the state, per key: `exp(-exp(decay + tanh(x A) B))`.
fn decays(b: &mut GraphBuilder, config: &Rwkv6Config, name: &str, x: ValueId) -> ValueId {
    let (hidden, attention, rank) = (config.hidden, config.attention_hidden, config.decay_rank);
    let down = transposed(b, &format!("{name}.time_decay_w1"), rank, hidden);
    let down = linear(b, x, down);
    let down = b.tanh(down);
    let up = transposed(b, &format!("{name}.time_decay_w2"), attention, rank);
    let up = linear(b, down, up);
    let base = vector_param(b, &format!("{name}.time_decay"), attention);
    let w = b.add(up, base);
    let w = b.exp(w);
    let w = b.unary(UnOp::Neg, w);
    b.exp(w)
}

/// A thin matrix `[out, in]` that is stored as `[in, out]`.
fn transposed(b: &mut GraphBuilder, name: &str, out: usize, input: usize) -> ValueId {
    let source = ParamSource::Transpose(Box::new(ParamSource::Tensor(name.into())));
    low_rank_weight(b, name, source, out, input)
}

fn channel_mixing(b: &mut GraphBuilder, config: &Rwkv6Config, layer: usize, x: ValueId) -> ValueId {
    let name = format!("rwkv.blocks.{layer}.feed_forward");
    let previous = previous_token(b, x, &format!("blocks.{layer}.ffn.x"));
    let delta = b.sub(previous, x);
    let mixed = |b: &mut GraphBuilder, which: &str| {
        let mix = vector_param(b, &format!("{name}.time_maa_{which}"), config.hidden);
        mix_previous(b, x, delta, mix)
    };
    let (k, r) = (mixed(b, "k"), mixed(b, "r"));
    let rescale = (layer, config.rescale_every);
    gated_channel_mixing(b, &name, (config.hidden, config.intermediate), rescale, (k, r))
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    rwkv5::infer_fields(t)?;
    let attention = "rwkv.blocks.0.attention";
    t.record_axis_size(&["time_mix_extra_dim"], &format!("{attention}.time_maa_w1"), 1, 5)?;
    t.record_axis_size(&["time_decay_extra_dim"], &format!("{attention}.time_decay_w1"), 1, 1)
}

const GGUF_NAMES: TensorNameMap = TensorNameMap {
    top: &[
        ("token_embd.weight", "rwkv.embeddings.weight", Same),
        ("token_embd_norm.weight", "rwkv.blocks.0.pre_ln.weight", Same),
        ("token_embd_norm.bias", "rwkv.blocks.0.pre_ln.bias", Same),
        ("output_norm.weight", "rwkv.ln_out.weight", Same),
        ("output_norm.bias", "rwkv.ln_out.bias", Same),
        ("output.weight", "head.weight", Same),
    ],
    layers: "rwkv.blocks",
    block: &[
        ("attn_norm", "ln1", Same),
        ("attn_norm_2", "ln2", Same),
        ("time_mix_lerp_x.weight", "attention.time_maa_x", Same),
        ("time_mix_lerp_fused.weight", "attention.time_maa_{e}", Stacked(&RWKV6_MIXES)),
        ("time_mix_w1.weight", "attention.time_maa_w1", Transposed),
        ("time_mix_w2.weight", "attention.time_maa_w2", TransposedEach),
        ("time_mix_first.weight", "attention.time_faaaa", Same),
        ("time_mix_decay.weight", "attention.time_decay", Same),
        ("time_mix_decay_w1.weight", "attention.time_decay_w1", Transposed),
        ("time_mix_decay_w2.weight", "attention.time_decay_w2", Transposed),
        ("time_mix_key", "attention.key", Same),
        ("time_mix_value", "attention.value", Same),
        ("time_mix_receptance", "attention.receptance", Same),
        ("time_mix_gate", "attention.gate", Same),
        ("time_mix_output", "attention.output", Rescaled),
        ("time_mix_ln", "attention.ln_x", Same),
        ("channel_mix_lerp_k.weight", "feed_forward.time_maa_k", Same),
        ("channel_mix_lerp_r.weight", "feed_forward.time_maa_r", Same),
        ("channel_mix_key", "feed_forward.key", Same),
        ("channel_mix_value", "feed_forward.value", Rescaled),
        ("channel_mix_receptance", "feed_forward.receptance", Same),
    ],
    llama_block: false,
};

fn gguf_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    write_gguf_heads(w, "head_size")?;
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")?;
    w.copy_number("time_mix_extra_dim", "time_mix_extra_dim")?;
    w.copy_number("time_decay_extra_dim", "time_decay_extra_dim")?;
    // Weights are halved only where this is there.
    w.set_field("rescale_every", w.number("rescale_every_n_layers")?.unwrap_or(0));
    Ok(())
}

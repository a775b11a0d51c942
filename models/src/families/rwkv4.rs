//! RWKV-4 (Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", 2023, section 3; reference code:
//! `RwkvForCausalLM` of transformers and `RWKV_RNN` of the rwkv package).
//!
//! State per layer: the previous token's input of both blocks (`att.x`, `ffn.x`) and the WKV numerator, denominator and
//! running maximum exponent (`att.a`, `att.b`, `att.p`).

pub mod config;
pub mod naming;

pub use config::Rwkv4Config;

use crate::checkpoint::Distribution;
use crate::config::published::PublishedFields;
use crate::definition::{Architecture, EntrySpec, ModelDefinition};
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::rwkv::{
    RwkvBlock, RwkvOuterLayers, gated_channel_mixing, previous_token, rescaled_weight,
};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::{interpolate, linear, linear_weight, vector_param};
use mlcc_ir::graph::{FunctionKind, ValueId};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::{FuncId, ParamRole, ParamSource};
use mlcc_ir::types::{DType, TensorType};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "rwkv",
        classes: &["RwkvForCausalLM"],
        about: "RWKV-4",
        read: |fields| Rwkv4Config::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "attention_hidden_size context_length hidden_size intermediate_size \
                        layer_norm_epsilon num_hidden_layers rescale_every vocab_size bos_token_id=0 \
                        eos_token_id=0 tie_word_embeddings",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[],
};

/// Exponent of "nothing seen yet".
const EMPTY: f64 = -1e30;

impl ModelDefinition for Rwkv4Config {
    fn build(&self, b: &mut GraphBuilder, entry: &EntrySpec) -> FuncId {
        outer_layers(self).build_entry(b, entry, |b, layer, x| {
            let time = |b: &mut GraphBuilder, x| time_mixing(b, self, layer, x);
            let channels = |b: &mut GraphBuilder, x| channel_mixing(b, self, layer, x);
            block(self).add(b, layer, x, time, channels)
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
        naming::rwkv4_tensors(self)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        naming::rwkv4_canonical(stored_name)
    }

    fn distribution(&self, name: &str, shape: &[usize]) -> Distribution {
        naming::rwkv4_distribution(name, shape)
    }
}

/// What RWKV-4 to -6 have around their blocks.
pub(super) fn outer_layers(config: &Rwkv4Config) -> RwkvOuterLayers<'static> {
    RwkvOuterLayers {
        vocab: config.vocab,
        hidden: config.hidden,
        layers: config.layers,
        epsilon: config.layer_norm_epsilon,
        embedding: "rwkv.embeddings.weight",
        norm: "rwkv.ln_out",
        head: "head.weight",
    }
}

/// Their blocks.
pub(super) fn block(config: &Rwkv4Config) -> RwkvBlock<'static> {
    RwkvBlock {
        blocks: "rwkv.blocks",
        norms: ["pre_ln", "ln1", "ln2"],
        hidden: config.hidden,
        epsilon: config.layer_norm_epsilon,
        rescale_every: config.rescale_every,
    }
}

/// The attention-free mixing over time.
fn time_mixing(b: &mut GraphBuilder, config: &Rwkv4Config, layer: usize, x: ValueId) -> ValueId {
    let (hidden, attention) = (config.hidden, config.attention_hidden);
    let name = format!("rwkv.blocks.{layer}.attention");
    let previous = previous_token(b, x, &format!("blocks.{layer}.att.x"));
    let project = |b: &mut GraphBuilder, which: &str| {
        let mix = vector_param(b, &format!("{name}.time_mix_{which}"), hidden);
        let mixed = interpolate(b, x, previous, mix);
        let weight = linear_weight(b, &format!("{name}.{which}.weight"), attention, hidden);
        linear(b, mixed, weight)
    };
    let k = project(b, "key");
    let v = project(b, "value");
    let r = project(b, "receptance");
    let r = b.sigmoid(r);

    let channels = TensorType::new(DType::F32, [attention]);
    let decay_name = format!("{name}.time_decay");
    let decay_source = ParamSource::NegExp(Box::new(ParamSource::Tensor(decay_name.clone())));
    let decay = b.param_from(&decay_name, ParamRole::Vector, channels.clone(), decay_source);
    let bonus = vector_param(b, &format!("{name}.time_first"), attention);
    let states = [("a", 0.0), ("b", 0.0), ("p", EMPTY)]
        .map(|(s, init)| b.state(&format!("blocks.{layer}.att.{s}"), channels.clone(), init));
    let body = wkv_step(b, attention);
    let gated = b.per_sequence(&[k, v, r], |b, rows| {
        let carries = states.map(|s| b.read(s));
        let out = b.scan(body, &carries, &rows[..2], &[decay, bonus]);
        for (state, &value) in states.iter().zip(&out) {
            b.write(*state, value);
        }
        // The kernel of the recurrence computes it: so the product that makes `r` waits for no step.
        vec![b.mul(rows[2], out[3])]
    })[0];

    let output = format!("{name}.output.weight");
    let output = rescaled_weight(b, (layer, config.rescale_every), &output, hidden, attention);
    linear(b, gated, output)
}

/// One step of the WKV recurrence per channel, kept stable by the running maximum exponent `p`:
/// `wkv = (sum of exp(decays + k_i) v_i, with exp(bonus + k) for this token) / (the same sum without v)`.
fn wkv_step(b: &mut GraphBuilder, channels: usize) -> FuncId {
    let c = TensorType::new(DType::F32, [channels]);
    b.function("wkv", FunctionKind::Body, &vec![c; 7], |b, inputs| {
        let &[num, den, p, k, v, decay, bonus] = inputs else { unreachable!("seven inputs are declared") };
        // Two weighted terms added under a common maximum exponent: returns the sums and that exponent.
        let add_term = |b: &mut GraphBuilder, old: ValueId, new: ValueId| {
            let top = b.max(old, new);
            let (old, new) = (b.sub(old, top), b.sub(new, top));
            let (old, new) = (b.exp(old), b.exp(new));
            let scaled = b.mul(old, num);
            let weighted = b.mul(new, v);
            let num = b.add(scaled, weighted);
            let scaled = b.mul(old, den);
            let den = b.add(scaled, new);
            (num, den, top)
        };
        let boosted = b.add(bonus, k);
        let (n_out, d_out, _) = add_term(b, p, boosted);
        let wkv = b.div(n_out, d_out);
        let decayed = b.add(p, decay);
        let (num, den, p) = add_term(b, decayed, k);
        vec![num, den, p, wkv]
    })
}

/// Also that of RWKV-5.
pub(super) fn channel_mixing(
    b: &mut GraphBuilder,
    config: &Rwkv4Config,
    layer: usize,
    x: ValueId,
) -> ValueId {
    let name = format!("rwkv.blocks.{layer}.feed_forward");
    let previous = previous_token(b, x, &format!("blocks.{layer}.ffn.x"));
    let mixed = |b: &mut GraphBuilder, which: &str| {
        let mix = vector_param(b, &format!("{name}.time_mix_{which}"), config.hidden);
        interpolate(b, x, previous, mix)
    };
    let (k, r) = (mixed(b, "key"), mixed(b, "receptance"));
    let rescale = (layer, config.rescale_every);
    gated_channel_mixing(b, &name, (config.hidden, config.intermediate), rescale, (k, r))
}

pub(super) fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    t.set_names(naming::rwkv4_canonical, |_| false);
    t.record_axis_size(&["vocab_size"], "rwkv.embeddings.weight", 0, 1)?;
    t.record_axis_size(&["hidden_size"], "rwkv.embeddings.weight", 1, 1)?;
    t.record_axis_size(&["attention_hidden_size"], "rwkv.blocks.0.attention.key.weight", 0, 1)?;
    t.record_axis_size(&["intermediate_size"], "rwkv.blocks.0.feed_forward.key.weight", 0, 1)
}

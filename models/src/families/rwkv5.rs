//! RWKV-5.2, "Eagle" (Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", 2024;
//! reference code: `RWKV` of the rwkv package, and the `Rwkv5ForCausalLM` that comes with the checkpoints).
//!
//! State per layer: the previous token's input of both blocks (`att.x`, `ffn.x`) and a matrix per head (`att.s`,
//! `[heads, values, keys]`).

pub mod config;
pub mod naming;

pub use config::Rwkv5Config;

use crate::checkpoint::Distribution;
use crate::config::published::PublishedFields;
use crate::definition::{Architecture, EntrySpec, ModelDefinition};
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::families::rwkv::{RwkvHeads, linear_attention_step, previous_token, rescaled_weight, silu};
use crate::families::rwkv4;
use crate::families::rwkv4::naming::rwkv4_canonical;
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::{interpolate, linear, linear_weight, vector_param};
use mlcc_ir::graph::ValueId;
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::{FuncId, ParamRole, ParamSource};
use mlcc_ir::types::{DType, TensorType};
use naming::{rwkv5_distribution, rwkv5_tensors};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "rwkv5",
        classes: &["Rwkv5ForCausalLM"],
        about: "RWKV-5.2",
        read: |fields| Rwkv5Config::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields::UNKNOWN,
    }],
    gguf: &[],
};

impl ModelDefinition for Rwkv5Config {
    fn build(&self, b: &mut GraphBuilder, entry: &EntrySpec) -> FuncId {
        rwkv4::outer_layers(self).build_entry(b, entry, |b, layer, x| {
            let time = |b: &mut GraphBuilder, x| time_mixing(b, self, layer, x);
            let channels = |b: &mut GraphBuilder, x| rwkv4::channel_mixing(b, self, layer, x);
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
        rwkv5_tensors(self)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        rwkv4_canonical(stored_name)
    }

    fn distribution(&self, name: &str, shape: &[usize]) -> Distribution {
        rwkv5_distribution(name, shape)
    }
}

fn time_mixing(b: &mut GraphBuilder, config: &Rwkv5Config, layer: usize, x: ValueId) -> ValueId {
    let (hidden, attention) = (config.hidden, config.attention_hidden);
    let heads = RwkvHeads { count: config.heads(), size: config.head_size };
    let name = format!("rwkv.blocks.{layer}.attention");
    let previous = previous_token(b, x, &format!("blocks.{layer}.att.x"));
    let project = |b: &mut GraphBuilder, which: &str| {
        let mix = vector_param(b, &format!("{name}.time_mix_{which}"), hidden);
        let mixed = interpolate(b, x, previous, mix);
        let weight = linear_weight(b, &format!("{name}.{which}.weight"), attention, hidden);
        linear(b, mixed, weight)
    };
    let r = project(b, "receptance");
    let k = project(b, "key");
    let v = project(b, "value");
    let g = project(b, "gate");

    let decay_name = format!("{name}.time_decay");
    let decay = ParamSource::Tensor(decay_name.clone());
    let decay = ParamSource::Exp(Box::new(ParamSource::NegExp(Box::new(decay))));
    let width = TensorType::new(DType::F32, [attention]);
    let decay = b.param_from(&decay_name, ParamRole::Vector, width, decay);
    let bonus = vector_param(b, &format!("{name}.time_faaaa"), attention);
    let (decay, bonus) = (heads.along_keys(b, decay), heads.along_keys(b, bonus));

    let seqs = [heads.keys(b, r), heads.keys(b, k), heads.values(b, v)];
    let body = linear_attention_step(b, heads);
    let y = heads.recurrence(b, layer, body, &seqs, &[decay, bonus]);
    gated_output(b, config, layer, y, g)
}

/// The results of the heads `[n, heads, size]`, normalised, gated and brought back to the hidden width.
pub(crate) fn gated_output(
    b: &mut GraphBuilder,
    config: &Rwkv5Config,
    layer: usize,
    y: ValueId,
    g: ValueId,
) -> ValueId {
    let heads = RwkvHeads { count: config.heads(), size: config.head_size };
    let name = format!("rwkv.blocks.{layer}.attention");
    let y = heads.norm(b, y, &format!("{name}.ln_x"), config.group_norm_epsilon);
    let gate = silu(b, g);
    let gate = heads.split(b, gate);
    let gated = b.mul(y, gate);
    let gated = heads.join(b, gated);
    let rescale = (layer, config.rescale_every);
    let output = format!("{name}.output.weight");
    let output = rescaled_weight(b, rescale, &output, config.hidden, config.attention_hidden);
    linear(b, gated, output)
}

pub(super) fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    rwkv4::infer_fields(t)?;
    t.record_axis_size(&["head_size"], "rwkv.blocks.0.attention.time_faaaa", 1, 1)
}

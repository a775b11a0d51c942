//! OPT (Zhang et al. 2022; reference: `OPTForCausalLM` of transformers): learned positions from row 2 on, ReLU, norms
//! before the parts of a layer or (350m) after them.

use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::config::sizes::{CONTEXT, VOCAB};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::norm::{Norm, layer_norm};
use crate::layers::{ActivationFunction, AttentionVariant, LinearLayer, SelfAttention, mlp};
use crate::transformer::{
    LEARNED_POSITIONS, ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix,
};
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource, RowBlocks};
use mlcc_ir::types::{DType, TensorType};

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[FamilyVariant {
        model_type: "opt",
        classes: &["OPTForCausalLM"],
        about: "OPT",
        read: |fields| OptConfig::from_fields(fields).map(Architecture::new),
        infer: infer_fields,
        fields: PublishedFields {
            read: "activation_function do_layer_norm_before enable_bias ffn_dim hidden_size \
                        layer_norm_elementwise_affine max_position_embeddings num_attention_heads \
                        num_hidden_layers tie_word_embeddings vocab_size word_embed_proj_dim",
            ..PublishedFields::UNKNOWN
        },
    }],
    gguf: &[],
};

/// The table of positions has this many rows in front that are not used.
const POSITION_OFFSET: usize = 2;

#[derive(Clone, Debug, PartialEq)]
pub struct OptConfig {
    pub sizes: ModelSizes,
    pub intermediate: usize,
    pub activation: ActivationFunction,
    pub bias: bool,
    /// Norms stand before the parts of a layer.
    pub norm_first: bool,
    pub final_norm: bool,
    /// Width of the embeddings.
    pub embedding: usize,
    pub tied: bool,
}

/// That of `torch.nn.LayerNorm`; the configuration has no field for it.
const EPS: f64 = 1e-5;

impl OptConfig {
    pub fn from_fields(fields: &ConfigFields) -> Result<OptConfig, ConfigError> {
        fields.require_flag("layer_norm_elementwise_affine", true, "OPT with norms without weights")?;
        let sizes = ModelSizes::read(fields, Some(2048))?;
        let norm_first = fields.flag_or("do_layer_norm_before", true)?;
        Ok(OptConfig {
            intermediate: fields.size("ffn_dim")?,
            activation: ActivationFunction::read(fields, &["activation_function"], ActivationFunction::Relu)?,
            bias: fields.flag_or("enable_bias", true)?,
            norm_first,
            final_norm: norm_first && !fields.flag_or("_remove_final_layer_norm", false)?,
            embedding: fields.size_or("word_embed_proj_dim", sizes.hidden)?,
            tied: fields.flag_or("tie_word_embeddings", true)?,
            sizes,
        })
    }

    /// `[n, hidden]`.
    fn positions(&self, net: &mut ModelBuilder) -> ValueId {
        let ModelSizes { context, hidden, .. } = self.sizes;
        let name = "model.decoder.embed_positions.weight";
        let rows = context + POSITION_OFFSET;
        let source = net.declare_tensor(name, &[rows, hidden]);
        let source = ParamSource::Rows(RowBlocks::range(POSITION_OFFSET, context, rows), Box::new(source));
        let ty = TensorType::new(DType::F32, [context, hidden]);
        let table = net.param_from(name, ParamRole::Vector, ty, source);
        let positions = net.positions();
        net.per_sequence(&[], |net, _| vec![net.gather(table, positions)])[0]
    }
}

impl Transformer for OptConfig {
    type Shared = ();

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        let norm = if self.final_norm { Norm::Layer(EPS) } else { Norm::None };
        let norm = (norm, "model.decoder.final_layer_norm");
        OuterLayers::with_names("model.decoder.embed_tokens.weight", norm, "lm_head.weight", self.tied)
    }

    fn prepare_shared(&self, _: &mut ModelBuilder) {}

    fn embed(&self, net: &mut ModelBuilder) -> ValueId {
        let mut x = net.embed(self.outer_layers().embedding, self.sizes.vocab, self.embedding);
        if self.embedding != self.sizes.hidden {
            x = LinearLayer::new("model.decoder.project_in", self.sizes.hidden).apply(net, x);
        }
        let positions = self.positions(net);
        net.add(x, positions)
    }

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, (): &()) -> ValueId {
        let (sizes, bias) = (&self.sizes, self.bias);
        let name = format!("model.decoder.layers.{layer}");
        // The norm of a part, where it stands.
        let norm = |net: &mut ModelBuilder, x, which: &str, first: bool| match first == self.norm_first {
            true => layer_norm(net, x, &format!("{name}.{which}"), EPS),
            false => x,
        };
        let h = norm(net, x, "self_attn_layer_norm", true);
        let h = SelfAttention {
            name: &format!("{name}.self_attn"),
            output: "out_proj",
            qkv_bias: bias,
            output_bias: bias,
            head_norm: None,
            query_scale: None,
            rope: None,
            attention: AttentionVariant::causal(sizes.head_size),
        }
        .apply(net, layer, sizes, h);
        let x = net.add_residual(layer, "attention", x, h);
        let x = norm(net, x, "self_attn_layer_norm", false);
        let h = norm(net, x, "final_layer_norm", true);
        let (up, down) = (format!("{name}.fc1"), format!("{name}.fc2"));
        let (up, down) = (LinearLayer::new(&up, self.intermediate), LinearLayer::new(&down, sizes.hidden));
        let h = mlp::ungated(net, h, up.bias(bias), down.bias(bias), self.activation);
        let x = net.add_residual(layer, "mlp", x, h);
        norm(net, x, "final_layer_norm", false)
    }

    fn logits(&self, net: &mut ModelBuilder, mut x: ValueId) -> ValueId {
        if self.embedding != self.sizes.hidden {
            x = LinearLayer::new("model.decoder.project_out", self.embedding).apply(net, x);
        }
        self.outer_layers().logits(net, x, self.sizes.vocab)
    }

    fn streaming_obstacle(&self) -> Option<&'static str> {
        Some(LEARNED_POSITIONS)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        with_prefix(stored_name, "model.", &["decoder."])
    }
}

fn infer_fields(t: &mut ConfigEvidence) -> EvidenceResult {
    // The table of positions has two rows in front that are not used.
    if let Some(found) = t.find_tensor("embed_positions.weight").filter(|found| found.shape[0] > 2) {
        t.record_size(&CONTEXT, found.shape[0] - 2, &found)?;
    }
    t.record_axis_size(&VOCAB, "embed_tokens.weight", 0, 1)?;
    t.record_axis_size(&["word_embed_proj_dim"], "embed_tokens.weight", 1, 1)?;
    t.record_tied_embedding("embed_tokens.weight", "lm_head.weight", true)?;
    t.record_axis_size(&["ffn_dim"], "layers.0.fc1.weight", 0, 1)?;
    t.record_bias("enable_bias", "layers.0.fc1")
}

//! Mamba (Gu and Dao 2023; reference: `MambaForCausalLM` of transformers) and Mamba 2 (Dao and Gu 2024; `Mamba2ForCausalLM`): no attention;
//! each layer is one mixer after a norm.

use crate::checkpoint::gguf::TensorConversion::{Flat, NegExp, Same};
use crate::checkpoint::gguf::{
    BACKBONE_TOP, ConfigFieldWriter, FieldResult, GgufArchitecture, NameMapping, TensorNameMap,
};
use crate::config::ConfigFields;
use crate::config::published::PublishedFields;
use crate::config::sizes::{HIDDEN, LAYERS};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::evidence::{ConfigEvidence, EvidenceResult};
use crate::family::{FamilyVariant, ModelFamily};
use crate::layers::mamba::Mamba;
use crate::layers::mamba2::Mamba2;
use crate::layers::norm::{Norm, rms_norm};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, with_prefix};
use mlcc_ir::graph::ValueId;

pub const FAMILY: ModelFamily = ModelFamily {
    variants: &[
        FamilyVariant {
            model_type: "mamba2",
            classes: &["Mamba2ForCausalLM"],
            about: "Mamba 2",
            read: |fields| MambaConfig::from_mamba2_fields(fields).map(Architecture::new),
            infer: infer_mamba2,
            fields: PublishedFields {
                read: "conv_kernel head_dim hidden_act hidden_size layer_norm_epsilon n_groups \
                        num_heads num_hidden_layers state_size tie_word_embeddings time_step_limit \
                        use_bias use_conv_bias vocab_size",
                none: "chunk_size expand rescale_prenorm_residual residual_in_fp32 time_step_floor \
                        time_step_max time_step_min time_step_rank",
                ..PublishedFields::UNKNOWN
            },
        },
        FamilyVariant {
            model_type: "mamba",
            classes: &["MambaForCausalLM"],
            about: "Mamba",
            read: |fields| MambaConfig::from_mamba_fields(fields).map(Architecture::new),
            infer: infer_mamba,
            fields: PublishedFields {
                read: "conv_kernel expand hidden_act hidden_size intermediate_size \
                        layer_norm_epsilon num_hidden_layers state_size tie_word_embeddings \
                        time_step_rank use_bias use_conv_bias vocab_size",
                none: "rescale_prenorm_residual residual_in_fp32 time_step_floor \
                        time_step_init_scheme time_step_max time_step_min time_step_scale \
                        use_associative_scan use_mambapy",
                ..PublishedFields::UNKNOWN
            },
        },
    ],
    gguf: &[
        GgufArchitecture {
            name: "mamba",
            model_type: "mamba",
            write_fields: gguf_mamba_fields,
            tensor_names: |_| GGUF_MAMBA_NAMES,
            ..GgufArchitecture::LLAMA
        },
        GgufArchitecture {
            name: "mamba2",
            model_type: "mamba2",
            write_fields: gguf_mamba2_fields,
            tensor_names: |_| TensorNameMap { block: GGUF_MAMBA2_BLOCK, ..GGUF_MAMBA_NAMES },
            ..GgufArchitecture::LLAMA
        },
    ],
};

#[derive(Clone, Debug, PartialEq)]
pub struct MambaConfig {
    pub sizes: ModelSizes,
    pub eps: f64,
    pub mixer: MambaMixer,
    pub tied: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub enum MambaMixer {
    Mamba(Mamba),
    Mamba2(Mamba2),
}

/// Tokens that the published models were trained with at once; the state has no end.
const CONTEXT: usize = 2048;
const MOST_LAYERS: usize = 1000;
const EPSILON: (&[&str], f64) = (&["layer_norm_epsilon"], 1e-5);

impl MambaConfig {
    /// Of `mamba`.
    pub fn from_mamba_fields(fields: &ConfigFields) -> Result<MambaConfig, ConfigError> {
        let mixer = Mamba::read(fields)?;
        let hidden = fields.size(fields.first_present(&HIDDEN))?;
        MambaConfig::new(fields, MambaMixer::Mamba(mixer), [1, hidden], true)
    }

    /// Of `mamba2`.
    pub fn from_mamba2_fields(fields: &ConfigFields) -> Result<MambaConfig, ConfigError> {
        let names =
            ["num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "use_conv_bias", "use_bias"];
        let mixer = Mamba2::read(fields, names, fields.epsilon(EPSILON.0, EPSILON.1)?)?;
        let heads = [mixer.heads, mixer.head_size];
        MambaConfig::new(fields, MambaMixer::Mamba2(mixer), heads, false)
    }

    /// `tied`: where the file does not say it.
    fn new(
        fields: &ConfigFields,
        mixer: MambaMixer,
        [heads, head_size]: [usize; 2],
        tied: bool,
    ) -> Result<MambaConfig, ConfigError> {
        let layers = fields.first_present(&LAYERS);
        let sizes = ModelSizes {
            vocab: fields.vocab_size()?,
            hidden: fields.size(fields.first_present(&HIDDEN))?,
            layers: fields.check_max(layers, fields.size(layers)?, MOST_LAYERS)?,
            heads,
            kv_heads: heads,
            head_size,
            context: CONTEXT,
        };
        let eps = fields.epsilon(EPSILON.0, EPSILON.1)?;
        Ok(MambaConfig { sizes, eps, mixer, tied: fields.flag_or("tie_word_embeddings", tied)? })
    }
}

impl Transformer for MambaConfig {
    type Shared = ();

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        let norm = (Norm::Rms(self.eps), "backbone.norm_f");
        OuterLayers::with_names("backbone.embeddings.weight", norm, "lm_head.weight", self.tied)
    }

    fn prepare_shared(&self, _: &mut ModelBuilder) {}

    fn add_layer(&self, net: &mut ModelBuilder, layer: usize, x: ValueId, (): &()) -> ValueId {
        let name = format!("backbone.layers.{layer}");
        let h = rms_norm(net, x, &format!("{name}.norm"), self.eps);
        let name = format!("{name}.mixer");
        let h = match &self.mixer {
            MambaMixer::Mamba(mixer) => mixer.apply(net, layer, &name, h),
            MambaMixer::Mamba2(mixer) => mixer.apply(net, layer, &name, h),
        };
        net.add_residual(layer, "mixer", x, h)
    }

    fn has_cache(&self) -> bool {
        false
    }

    fn streaming_obstacle(&self) -> Option<&'static str> {
        Some("this model keeps a state of fixed size and no tokens; its text has no end anyway")
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        // The first published files call the table otherwise.
        let name = stored_name.replace("embedding.weight", "embeddings.weight");
        with_prefix(&name, "backbone.", &["embeddings.", "layers.", "norm_f."])
    }
}

fn infer_mamba(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("embeddings.weight", "lm_head.weight", true)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mixer.A_log", 0, 1)?;
    t.record_axis_size(&["state_size"], "layers.0.mixer.A_log", 1, 1)?;
    t.record_axis_size(&["time_step_rank"], "layers.0.mixer.dt_proj.weight", 1, 1)?;
    t.record_bias("use_bias", "layers.0.mixer.in_proj")?;
    t.record_bias("use_conv_bias", "layers.0.mixer.conv1d")
}

fn infer_mamba2(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_embedding("embeddings.weight", "lm_head.weight", false)?;
    t.record_axis_size(&["num_heads"], "layers.0.mixer.A_log", 0, 1)?;
    let Some(heads) = t.known_size(&["num_heads"]) else { return Ok(()) };
    t.record_axis_size(&["head_dim"], "layers.0.mixer.norm.weight", 0, heads)
}

const GGUF_MAMBA_NAMES: TensorNameMap = TensorNameMap {
    top: BACKBONE_TOP,
    layers: "backbone.layers",
    block: &[
        ("attn_norm", "norm", Same),
        ("ssm_in", "mixer.in_proj", Same),
        ("ssm_conv1d", "mixer.conv1d", Same),
        ("ssm_x", "mixer.x_proj", Same),
        ("ssm_dt", "mixer.dt_proj", Same),
        ("ssm_a", "mixer.A_log", NegExp),
        ("ssm_d", "mixer.D", Flat),
        ("ssm_out", "mixer.out_proj", Same),
    ],
    llama_block: false,
};

const GGUF_MAMBA2_BLOCK: &[NameMapping] = &[
    ("attn_norm", "norm", Same),
    ("ssm_in", "mixer.in_proj", Same),
    ("ssm_conv1d", "mixer.conv1d", Same),
    ("ssm_dt.bias", "mixer.dt_bias", Same),
    ("ssm_a", "mixer.A_log", NegExp),
    ("ssm_d", "mixer.D", Flat),
    ("ssm_norm", "mixer.norm", Flat),
    ("ssm_out", "mixer.out_proj", Same),
];

fn gguf_mamba_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    if w.flag("ssm.dt_b_c_rms")?.unwrap_or(false) {
        return Err(w.unsupported_error("is Falcon Mamba, with norms inside of its mixers"));
    }
    w.remove_fields(&["max_position_embeddings", "num_attention_heads", "num_key_value_heads"]);
    w.copy_number("ssm.inner_size", "intermediate_size")?;
    w.copy_number("ssm.time_step_rank", "time_step_rank")?;
    w.copy_number("ssm.state_size", "state_size")?;
    w.copy_number("ssm.conv_kernel", "conv_kernel")?;
    w.copy_float("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")?;
    w.set_field("use_conv_bias", w.has_tensor("blk.0.ssm_conv1d.bias"));
    w.set_field("use_bias", w.has_tensor("blk.0.ssm_in.bias"));
    Ok(())
}

fn gguf_mamba2_fields(w: &mut ConfigFieldWriter<'_>) -> FieldResult {
    w.remove_fields(&["max_position_embeddings", "num_attention_heads", "num_key_value_heads"]);
    w.remove_fields(&["intermediate_size"]);
    w.copy_mamba2([
        "num_heads",
        "head_dim",
        "n_groups",
        "state_size",
        "conv_kernel",
        "use_conv_bias",
        "use_bias",
    ])?;
    w.copy_float("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")
}

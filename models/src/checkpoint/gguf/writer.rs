//! Fields of config.json under construction, from the metadata and the tensors of a GGUF file. The order of the fields is that in
//! which they are written.

use super::super::bytes::FileBytes;
use super::{GgufMetadata, RawTensor, rope};
use crate::error::CheckpointError;
use serde_json::{Map, Value, json};

/// A field that cannot be written is an error that names the metadata.
pub(crate) type FieldResult = Result<(), CheckpointError>;

/// More layers than any model has; keeps a damaged file from asking for millions.
const MOST_LAYERS: u64 = 1000;

/// `pooling_type` of a score by a head of its own.
pub(super) const RANK: u64 = 4;

/// The fields as written so far.
pub(crate) struct ConfigFieldWriter<'a> {
    pub(super) files: &'a [FileBytes],
    pub metadata: &'a GgufMetadata,
    pub(super) arch: &'a str,
    pub(super) tensors: &'a [RawTensor],
    pub raw: Map<String, Value>,
}

impl ConfigFieldWriter<'_> {
    pub fn set_field(&mut self, field: &str, value: impl Into<Value>) {
        self.raw.insert(field.to_string(), value.into());
    }
    pub fn remove_fields(&mut self, fields: &[&str]) {
        fields.iter().for_each(|field| drop(self.raw.remove(*field)));
    }

    /// The key of the architecture's metadata, of which `name` is the end.
    pub fn metadata_key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }
    pub fn number(&self, name: &str) -> Result<Option<u64>, CheckpointError> {
        self.metadata.number(&self.metadata_key(name))
    }
    pub fn float(&self, name: &str) -> Result<Option<f64>, CheckpointError> {
        self.metadata.float(&self.metadata_key(name))
    }
    pub fn flag(&self, name: &str) -> Result<Option<bool>, CheckpointError> {
        self.metadata.flag(&self.metadata_key(name))
    }

    /// A number that the model cannot do without.
    pub fn required_number(&self, name: &str) -> Result<u64, CheckpointError> {
        self.number(name)?.ok_or_else(|| CheckpointError::Unsupported {
            file: self.metadata.origin.clone(),
            detail: format!("has no metadata `{}`, which its configuration needs", self.metadata_key(name)),
        })
    }

    /// Two such numbers divided, 0 by zero.
    pub fn quotient(&self, number: &str, by: &str) -> Result<u64, CheckpointError> {
        Ok(self.required_number(number)?.checked_div(self.required_number(by)?).unwrap_or(0))
    }

    pub fn unsupported_error(&self, what: &str) -> CheckpointError {
        CheckpointError::Unsupported {
            file: self.metadata.origin.clone(),
            detail: format!("{what}, which is not supported in GGUF files; use the model's own checkpoint"),
        }
    }

    /// Copies a number under another name, where it is there.
    pub fn copy_number(&mut self, name: &str, field: &str) -> FieldResult {
        if let Some(number) = self.number(name)? {
            self.set_field(field, number);
        }
        Ok(())
    }
    pub fn copy_float(&mut self, name: &str, field: &str) -> FieldResult {
        if let Some(number) = self.float(name)? {
            self.set_field(field, number);
        }
        Ok(())
    }

    pub fn has_tensor(&self, tensor: &str) -> bool {
        self.tensors.iter().any(|raw| raw.name == tensor)
    }
    /// Rows of a tensor that is there.
    pub fn tensor_rows(&self, tensor: &str) -> Option<usize> {
        self.tensors.iter().find(|raw| raw.name == tensor)?.shape.first().copied()
    }

    /// A tensor of this name in any layer.
    fn find_in_any_layer(&self, part: &str) -> Option<&RawTensor> {
        let fits = |name: &str| {
            let inside = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
            inside.is_some_and(|(_, name)| name == part)
        };
        self.tensors.iter().find(|raw| fits(&raw.name))
    }
    pub fn has_in_any_layer(&self, part: &str) -> bool {
        self.find_in_any_layer(part).is_some()
    }
    /// Rows of that tensor.
    pub fn rows_in_any_layer(&self, part: &str) -> Option<usize> {
        self.find_in_any_layer(part)?.shape.first().copied()
    }

    /// Layers, without those of a draft head, which are counted among them.
    pub(super) fn layer_count(&self) -> Result<u64, CheckpointError> {
        let draft = self.number("nextn_predict_layers")?.unwrap_or(0);
        Ok(self.required_number("block_count")?.saturating_sub(draft))
    }
    /// The same, within reason.
    pub fn bounded_layer_count(&self) -> Result<u64, CheckpointError> {
        Ok(self.layer_count()?.min(MOST_LAYERS))
    }

    /// Kinds of layers by whether they have this tensor.
    pub fn layer_kinds(
        &self,
        tensor: &str,
        [with, without]: [&str; 2],
    ) -> Result<Vec<String>, CheckpointError> {
        let kind = |layer| if self.has_tensor(&format!("blk.{layer}.{tensor}")) { with } else { without };
        Ok((0..self.bounded_layer_count()?).map(|layer| kind(layer).to_string()).collect())
    }

    /// Kinds of layers by whether they have a window; empty where the file does not say it of each.
    pub fn layer_types(&self) -> Result<Vec<&'static str>, CheckpointError> {
        let windowed = self.metadata.bools(&self.metadata_key("attention.sliding_window_pattern"))?;
        let kind = |windowed: &bool| if *windowed { "sliding_attention" } else { "full_attention" };
        Ok(windowed.iter().map(kind).collect())
    }

    /// Elements of a head: `attention.key_length`, else an equal share.
    pub fn head_size(&self) -> Result<u64, CheckpointError> {
        let share = self
            .required_number("embedding_length")?
            .checked_div(self.required_number("attention.head_count")?);
        Ok(self.number("attention.key_length")?.or(share).unwrap_or(0))
    }

    /// `rope.dimension_count` as a share of the head.
    pub fn copy_partial_rotary(&mut self, field: &str) -> FieldResult {
        let head = self.head_size()?;
        if let Some(dims) = self.number("rope.dimension_count")?.filter(|&dims| head > 0 && dims != head) {
            self.set_field(field, dims as f64 / head as f64);
        }
        Ok(())
    }

    /// Rotary factors in a tensor of that name.
    pub fn rope_factors(&self, name: &str) -> Option<Vec<f32>> {
        rope::read_rope_factors(self.files, self.tensors, name)
    }

    /// `rope_parameters` of models whose queries grow with their position; the defaults are those of the published files.
    pub fn set_rope_parameters(
        &mut self,
        scaling: &Map<String, Value>,
        theta: f64,
        beta: f64,
    ) -> FieldResult {
        let mut parameters = scaling.clone();
        let theta = self.float("rope.freq_base")?.unwrap_or(theta);
        parameters.insert("rope_theta".to_string(), json!(theta));
        let beta = self.float("attention.temperature_scale")?.unwrap_or(beta);
        parameters.insert("llama_4_scaling_beta".to_string(), json!(beta));
        self.set_field("rope_parameters", parameters);
        Ok(())
    }

    /// Whether the file has a head of its own for scores.
    pub fn is_reranker(&self) -> Result<bool, CheckpointError> {
        Ok(self.has_tensor("cls.weight") && self.number("pooling_type")? == Some(RANK))
    }

    /// Number of experts, in all and for each token, and their width. `names` are the fields of number and width.
    pub fn copy_experts(&mut self, [count, width]: [&str; 2]) -> FieldResult {
        self.copy_number("expert_count", count)?;
        self.copy_number("expert_used_count", "num_experts_per_tok")?;
        self.copy_number("expert_feed_forward_length", width)
    }

    /// How the weights of experts are scaled.
    pub fn copy_expert_scaling(&mut self) -> FieldResult {
        self.copy_float("expert_weights_scale", "routed_scaling_factor")?;
        // The converter writes it where it is true.
        let normalised = self.flag("expert_weights_norm")?.unwrap_or(false);
        self.set_field("norm_topk_prob", normalised);
        Ok(())
    }

    /// Mamba 2. `fields` are those of heads, their size, groups, size of the state, taps and biases of convolution and projections.
    pub fn copy_mamba2(&mut self, fields: [&str; 7]) -> FieldResult {
        let [heads, size, groups, state, taps, conv_bias, bias] = fields;
        self.copy_number("ssm.time_step_rank", heads)?;
        self.set_field(size, self.quotient("ssm.inner_size", "ssm.time_step_rank")?);
        self.copy_number("ssm.group_count", groups)?;
        self.copy_number("ssm.state_size", state)?;
        self.copy_number("ssm.conv_kernel", taps)?;
        self.set_field(conv_bias, self.has_in_any_layer("ssm_conv1d.bias"));
        self.set_field(bias, self.has_in_any_layer("ssm_in.bias"));
        Ok(())
    }

    /// Ranks and sizes of latent attention.
    pub fn copy_latent_sizes(&mut self) -> FieldResult {
        let turned = self.required_number("rope.dimension_count")?;
        let size = |mla: &str, other: &str| self.number(mla)?.map_or_else(|| self.required_number(other), Ok);
        let key = size("attention.key_length_mla", "attention.key_length")?;
        let value = size("attention.value_length_mla", "attention.value_length")?;
        self.set_field("qk_rope_head_dim", turned);
        self.set_field("qk_nope_head_dim", key.saturating_sub(turned));
        self.set_field("v_head_dim", value);
        self.set_field("split_kv_b", self.has_in_any_layer("attn_k_b.weight"));
        self.copy_number("attention.q_lora_rank", "q_lora_rank")?;
        self.copy_number("attention.kv_lora_rank", "kv_lora_rank")
    }
}

/// Fields of [`ConfigFieldWriter::copy_mamba2`] in layers that have more than Mamba.
pub(crate) const MAMBA_FIELDS: [&str; 7] = [
    "mamba_n_heads",
    "mamba_d_head",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_conv_bias",
    "mamba_proj_bias",
];

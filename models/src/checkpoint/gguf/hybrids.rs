//! Configurations of models with recurrent layers, latent attention or layers of several kinds.

use super::super::bytes::FileBytes;
use super::config::ConfigFieldWriter;
use super::{RawTensor, rope};
use crate::error::CheckpointError;
use serde_json::{Map, Value, json};

type ConfigWriteResult = Result<(), CheckpointError>;

/// `None`: the architecture is not one of these.
pub(super) fn write_hybrid_fields(w: &mut ConfigFieldWriter<'_>) -> Option<ConfigWriteResult> {
    Some(match w.arch {
        "exaone4" => exaone4(w),
        "mamba" => mamba(w),
        "mamba2" => mamba2(w),
        "nemotron_h" | "nemotron_h_moe" => nemotron_h(w),
        "falcon-h1" => falcon_h1(w),
        "granitehybrid" => granite(w),
        "qwen35" | "qwen35moe" | "qwen3next" => qwen(w),
        "deepseek2" | "mistral4" => copy_latent_attention(w),
        "kimi-linear" => kimi_linear(w),
        "gemma4" => gemma4(w),
        _ => return None,
    })
}

/// Layers, without those of a draft head.
fn bounded_layer_count(w: &ConfigFieldWriter<'_>) -> Result<u64, CheckpointError> {
    // More than any model has.
    Ok(w.layer_count()?.min(1000))
}

/// Kinds of layers by whether they have this tensor.
fn layer_kinds(
    w: &ConfigFieldWriter<'_>,
    tensor: &str,
    [with, without]: [&str; 2],
) -> Result<Vec<String>, CheckpointError> {
    let kind = |layer| if w.has_tensor(&format!("blk.{layer}.{tensor}")) { with } else { without };
    Ok((0..bounded_layer_count(w)?).map(|layer| kind(layer).to_string()).collect())
}

/// A tensor of this name in any layer.
fn find_in_any_layer<'a>(w: &ConfigFieldWriter<'a>, part: &str) -> Option<&'a RawTensor> {
    let fits = |name: &str| {
        let inside = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        inside.is_some_and(|(_, name)| name == part)
    };
    w.tensors.iter().find(|raw| fits(&raw.name))
}

/// Rows of that tensor.
fn rows_in_any_layer(w: &ConfigFieldWriter<'_>, part: &str) -> Option<usize> {
    find_in_any_layer(w, part)?.shape.first().copied()
}

fn quotient(w: &ConfigFieldWriter<'_>, number: &str, by: &str) -> Result<u64, CheckpointError> {
    Ok(w.required_number(number)?.checked_div(w.required_number(by)?).unwrap_or(0))
}

fn exaone4(w: &mut ConfigFieldWriter<'_>) -> ConfigWriteResult {
    w.set_field("hidden_act", "silu");
    w.copy_number("attention.sliding_window", "sliding_window")?;
    let windowed = w.metadata.bools(&w.metadata_key("attention.sliding_window_pattern"))?;
    let kind = |windowed: &bool| if *windowed { "sliding_attention" } else { "full_attention" };
    if !windowed.is_empty() {
        let kinds: Vec<&str> = windowed.iter().map(kind).collect();
        w.set_field("layer_types", kinds);
    }
    Ok(())
}

fn mamba(w: &mut ConfigFieldWriter<'_>) -> ConfigWriteResult {
    if w.metadata.flag(&w.metadata_key("ssm.dt_b_c_rms"))?.unwrap_or(false) {
        return Err(w.unsupported_error("is Falcon Mamba, with norms inside of its mixers"));
    }
    remove_fields(w, &["max_position_embeddings", "num_attention_heads", "num_key_value_heads"]);
    w.copy_number("ssm.inner_size", "intermediate_size")?;
    w.copy_number("ssm.time_step_rank", "time_step_rank")?;
    w.copy_number("ssm.state_size", "state_size")?;
    w.copy_number("ssm.conv_kernel", "conv_kernel")?;
    w.copy_float("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")?;
    w.set_field("use_conv_bias", w.has_tensor("blk.0.ssm_conv1d.bias"));
    w.set_field("use_bias", w.has_tensor("blk.0.ssm_in.bias"));
    Ok(())
}

fn remove_fields(w: &mut ConfigFieldWriter<'_>, fields: &[&str]) {
    fields.iter().for_each(|field| drop(w.raw.remove(*field)));
}

fn mamba2(w: &mut ConfigFieldWriter<'_>) -> ConfigWriteResult {
    remove_fields(
        w,
        &["max_position_embeddings", "num_attention_heads", "num_key_value_heads", "intermediate_size"],
    );
    copy_mamba2_fields(
        w,
        ["num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "use_conv_bias", "use_bias"],
    )?;
    w.copy_float("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")
}

/// Mamba 2. `fields` are those of heads, their size, groups, size of the state, taps and biases of convolution and projections.
fn copy_mamba2_fields(w: &mut ConfigFieldWriter<'_>, fields: [&str; 7]) -> ConfigWriteResult {
    let [heads, size, groups, state, taps, conv_bias, bias] = fields;
    w.copy_number("ssm.time_step_rank", heads)?;
    w.set_field(size, quotient(w, "ssm.inner_size", "ssm.time_step_rank")?);
    w.copy_number("ssm.group_count", groups)?;
    w.copy_number("ssm.state_size", state)?;
    w.copy_number("ssm.conv_kernel", taps)?;
    w.set_field(conv_bias, find_in_any_layer(w, "ssm_conv1d.bias").is_some());
    w.set_field(bias, find_in_any_layer(w, "ssm_in.bias").is_some());
    Ok(())
}

const MAMBA_FIELDS: [&str; 7] = [
    "mamba_n_heads",
    "mamba_d_head",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_conv_bias",
    "mamba_proj_bias",
];

/// What a layer is shows in its tensors.
fn nemotron_h(w: &mut ConfigFieldWriter<'_>) -> ConfigWriteResult {
    let kind = |layer: u64| {
        let has = |part: &str| w.has_tensor(&format!("blk.{layer}.{part}.weight"));
        match (has("ssm_in"), has("attn_q"), has("ffn_gate_inp")) {
            (true, ..) => "mamba",
            (_, true, _) => "attention",
            (.., true) => "moe",
            _ => "mlp",
        }
    };
    let kinds: Vec<&str> = (0..bounded_layer_count(w)?).map(kind).collect();
    w.set_field("layers_block_type", kinds);
    let names = [
        "mamba_num_heads",
        "mamba_head_dim",
        "n_groups",
        "ssm_state_size",
        "conv_kernel",
        "use_conv_bias",
        "use_bias",
    ];
    copy_mamba2_fields(w, names)?;
    // llama.cpp has no shortest time step.
    w.set_field("time_step_min", 0.0);
    w.copy_float("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")?;
    if let Some(width) = rows_in_any_layer(w, "ffn_up.weight") {
        w.set_field("intermediate_size", width);
    }
    w.set_field("attention_bias", find_in_any_layer(w, "attn_q.bias").is_some());
    w.set_field("mlp_bias", find_in_any_layer(w, "ffn_up.bias").is_some());
    w.copy_number("expert_count", "n_routed_experts")?;
    w.copy_number("expert_used_count", "num_experts_per_tok")?;
    w.copy_number("expert_feed_forward_length", "moe_intermediate_size")?;
    w.copy_number("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size")?;
    w.copy_number("expert_shared_count", "n_shared_experts")?;
    w.copy_number("expert_group_count", "n_group")?;
    w.copy_number("moe_latent_size", "moe_latent_size")?;
    copy_routing_fields(w)
}

/// How the weights of experts are scaled.
fn copy_routing_fields(w: &mut ConfigFieldWriter<'_>) -> ConfigWriteResult {
    w.copy_float("expert_weights_scale", "routed_scaling_factor")?;
    // The converter writes it where it is true.
    let normalised = w.metadata.flag(&w.metadata_key("expert_weights_norm"))?.unwrap_or(false);
    w.set_field("norm_topk_prob", normalised);
    Ok(())
}

/// The multipliers are in the weights.
fn falcon_h1(w: &mut ConfigFieldWriter<'_>) -> ConfigWriteResult {
    w.set_field("hidden_act", "silu");
    copy_mamba2_fields(w, MAMBA_FIELDS)?;
    w.set_field("mamba_rms_norm", find_in_any_layer(w, "ssm_norm.weight").is_some());
    // As llama.cpp computes it.
    w.set_field("mamba_norm_before_gate", false);
    w.set_field("projectors_bias", find_in_any_layer(w, "ssm_out.bias").is_some());
    w.set_field("attention_bias", find_in_any_layer(w, "attn_q.bias").is_some());
    w.set_field("mlp_bias", find_in_any_layer(w, "ffn_up.bias").is_some());
    Ok(())
}

fn granite(w: &mut ConfigFieldWriter<'_>) -> ConfigWriteResult {
    w.set_field("hidden_act", "silu");
    w.set_field("layer_types", layer_kinds(w, "ssm_in.weight", ["mamba", "attention"])?);
    w.set_field("attention_bias", find_in_any_layer(w, "attn_q.bias").is_some());
    w.copy_float("attention.scale", "attention_multiplier")?;
    w.copy_float("embedding_scale", "embedding_multiplier")?;
    w.copy_float("residual_scale", "residual_multiplier")?;
    w.copy_float("logit_scale", "logits_scaling")?;
    let turned = w.metadata.flag(&w.metadata_key("rope.scaling.finetuned"))?.unwrap_or(false);
    w.set_field("position_embedding_type", if turned { "rope" } else { "nope" });
    if find_in_any_layer(w, "ssm_in.weight").is_some() {
        copy_mamba2_fields(w, MAMBA_FIELDS)?;
    }
    w.set_field("fused_mlp", false);
    let shared = rows_in_any_layer(w, "ffn_gate_shexp.weight").or(rows_in_any_layer(w, "ffn_gate.weight"));
    if let Some(shared) = shared {
        w.set_field("shared_intermediate_size", shared);
    }
    w.copy_number("expert_count", "num_local_experts")?;
    w.copy_number("expert_used_count", "num_experts_per_tok")
}

/// Qwen3-Next and Qwen 3.5. Files of Qwen3-Next whose fused projection was taken apart are the same as those of Qwen 3.5.
fn qwen(w: &mut ConfigFieldWriter<'_>) -> ConfigWriteResult {
    let fused = w.has_tensor("blk.0.ssm_in.weight");
    w.set_field("hidden_act", "silu");
    w.set_field("fused_experts", false);
    if w.arch == "qwen3next" && fused {
        w.set_field("model_type", "qwen3_next");
    }
    w.set_field("attention_bias", find_in_any_layer(w, "attn_q.bias").is_some());
    w.set_field("layer_types", layer_kinds(w, "attn_q.weight", ["full_attention", "linear_attention"])?);
    w.copy_number("ssm.conv_kernel", "linear_conv_kernel_dim")?;
    w.copy_number("ssm.state_size", "linear_key_head_dim")?;
    w.copy_number("ssm.group_count", "linear_num_key_heads")?;
    w.copy_number("ssm.time_step_rank", "linear_num_value_heads")?;
    w.set_field("linear_value_head_dim", quotient(w, "ssm.inner_size", "ssm.time_step_rank")?);
    w.copy_number("expert_count", "num_experts")?;
    w.copy_number("expert_used_count", "num_experts_per_tok")?;
    w.copy_number("expert_feed_forward_length", "moe_intermediate_size")?;
    w.copy_number("expert_shared_feed_forward_length", "shared_expert_intermediate_size")?;
    w.copy_partial_rotary("partial_rotary_factor")
}

/// `expert_gating_func` of sigmoids.
const SIGMOID: u64 = 2;

/// DeepSeek V2 and V3 and what shares their layers.
fn copy_latent_attention(w: &mut ConfigFieldWriter<'_>) -> ConfigWriteResult {
    w.set_field("hidden_act", "silu");
    // Attention is written for the absorbed form, in which all heads have one key.
    remove_fields(w, &["num_key_value_heads", "head_dim"]);
    let sigmoids = match w.number("expert_gating_func")? {
        Some(function) => function == SIGMOID,
        None => find_in_any_layer(w, "exp_probs_b.bias").is_some(),
    };
    match w.arch {
        "mistral4" => w.set_field("fused_experts", find_in_any_layer(w, "ffn_gate_up_exps.weight").is_some()),
        _ => w.set_field("model_type", if sigmoids { "deepseek_v3" } else { "deepseek_v2" }),
    }
    latent_sizes(w)?;
    w.copy_number("expert_count", "n_routed_experts")?;
    w.copy_number("expert_used_count", "num_experts_per_tok")?;
    w.copy_number("expert_shared_count", "n_shared_experts")?;
    w.copy_number("expert_feed_forward_length", "moe_intermediate_size")?;
    w.copy_number("expert_group_count", "n_group")?;
    w.copy_number("expert_group_used_count", "topk_group")?;
    w.copy_number("leading_dense_block_count", "first_k_dense_replace")?;
    copy_routing_fields(w)
}

/// Ranks and sizes of latent attention.
fn latent_sizes(w: &mut ConfigFieldWriter<'_>) -> ConfigWriteResult {
    let turned = w.required_number("rope.dimension_count")?;
    let key = w
        .number("attention.key_length_mla")?
        .map_or_else(|| w.required_number("attention.key_length"), Ok)?;
    let value = w
        .number("attention.value_length_mla")?
        .map_or_else(|| w.required_number("attention.value_length"), Ok)?;
    w.set_field("qk_rope_head_dim", turned);
    w.set_field("qk_nope_head_dim", key.saturating_sub(turned));
    w.set_field("v_head_dim", value);
    w.set_field("split_kv_b", find_in_any_layer(w, "attn_k_b.weight").is_some());
    w.copy_number("attention.q_lora_rank", "q_lora_rank")?;
    w.copy_number("attention.kv_lora_rank", "kv_lora_rank")
}

/// Layers without latent attention have the delta rule, with as many heads.
fn kimi_linear(w: &mut ConfigFieldWriter<'_>) -> ConfigWriteResult {
    w.set_field("hidden_act", "silu");
    remove_fields(w, &["num_key_value_heads", "head_dim"]);
    w.set_field(
        "layer_types",
        layer_kinds(w, "attn_kv_a_mqa.weight", ["full_attention", "linear_attention"])?,
    );
    latent_sizes(w)?;
    w.copy_number("attention.head_count", "linear_num_heads")?;
    w.copy_number("kda.head_dim", "linear_head_dim")?;
    w.copy_number("ssm.conv_kernel", "linear_conv_kernel_dim")?;
    w.copy_number("expert_count", "num_experts")?;
    w.copy_number("expert_used_count", "num_experts_per_token")?;
    w.copy_number("expert_shared_count", "num_shared_experts")?;
    w.copy_number("expert_feed_forward_length", "moe_intermediate_size")?;
    w.copy_number("leading_dense_block_count", "first_k_dense_replace")?;
    w.copy_float("expert_weights_scale", "routed_scaling_factor")
}

/// Numbers of a layer that differ between layers with and without a window: the first of each.
fn split_by_window(
    w: &ConfigFieldWriter<'_>,
    key: &str,
    windowed: &[bool],
) -> Result<[Option<i64>; 2], CheckpointError> {
    let numbers = match w.number(key) {
        Ok(Some(number)) => vec![number as i64; windowed.len()],
        Ok(None) => Vec::new(),
        Err(_) => w.metadata.integers(&w.metadata_key(key))?,
    };
    let of = |kind: bool| {
        let mut both = numbers.iter().zip(windowed);
        both.find(|(number, windowed)| **windowed == kind && **number > 0).map(|(number, _)| *number)
    };
    Ok([of(false), of(true)])
}

fn gemma4(w: &mut ConfigFieldWriter<'_>) -> ConfigWriteResult {
    w.set_field("hidden_activation", "gelu_pytorch_tanh");
    let windowed = w.metadata.bools(&w.metadata_key("attention.sliding_window_pattern"))?.to_vec();
    let kind = |windowed: &bool| if *windowed { "sliding_attention" } else { "full_attention" };
    w.set_field("layer_types", windowed.iter().map(kind).collect::<Vec<_>>());
    w.copy_number("attention.sliding_window", "sliding_window")?;
    w.copy_number("attention.key_length", "global_head_dim")?;
    w.copy_number("attention.key_length_swa", "head_dim")?;
    let [full, sliding] = split_by_window(w, "attention.head_count_kv", &windowed)?;
    if let Some(heads) = sliding.or(full) {
        w.set_field("num_key_value_heads", heads);
    }
    if let Some(heads) = full {
        w.set_field("num_global_key_value_heads", heads);
    }
    // Layers that read the caches of others may lack both.
    let lacks = |layer: usize| {
        w.has_tensor(&format!("blk.{layer}.attn_k.weight"))
            && !w.has_tensor(&format!("blk.{layer}.attn_v.weight"))
    };
    let keys_are_values = windowed.iter().enumerate().any(|(layer, windowed)| !windowed && lacks(layer));
    w.set_field("attention_k_eq_v", keys_are_values);
    let widths = match w.number("feed_forward_length") {
        Ok(width) => width.map(|width| width as i64).into_iter().collect(),
        Err(_) => w.metadata.integers(&w.metadata_key("feed_forward_length"))?,
    };
    if let (Some(first), Some(last)) = (widths.first().copied(), widths.last()) {
        w.set_field("intermediate_size", first);
        w.set_field("use_double_wide_mlp", first != *last);
    }
    w.copy_number("attention.shared_kv_layers", "num_kv_shared_layers")?;
    w.copy_number("embedding_length_per_layer_input", "hidden_size_per_layer_input")?;
    let table = w.tensors.iter().find(|raw| raw.name == "per_layer_token_embd.weight");
    if let Some(rows) = table.and_then(|raw| raw.shape.first()) {
        w.set_field("vocab_size_per_layer_input", *rows);
    }
    w.copy_float("final_logit_softcapping", "final_logit_softcapping")?;
    w.set_field("enable_moe_block", find_in_any_layer(w, "ffn_gate_inp.weight").is_some());
    w.copy_number("expert_count", "num_experts")?;
    w.copy_number("expert_used_count", "top_k_experts")?;
    w.copy_number("expert_feed_forward_length", "moe_intermediate_size")
}

/// `rope_parameters` of Gemma 4. Pairs of full layers that stand still have a factor that is next to endless.
pub(super) fn gemma4_rope(w: &mut ConfigFieldWriter<'_>, files: &[FileBytes]) -> ConfigWriteResult {
    let factors = rope::read_rope_factors(files, w.tensors, "rope_freqs.weight").unwrap_or_default();
    let turned = factors.iter().filter(|factor| **factor == 1.0).count();
    let share = if factors.is_empty() { 0.25 } else { turned as f64 / factors.len() as f64 };
    let mut full = Map::new();
    full.insert("rope_type".into(), json!("proportional"));
    full.insert("partial_rotary_factor".into(), json!(share));
    full.insert("rope_theta".into(), json!(w.float("rope.freq_base")?.unwrap_or(1e6)));
    let mut sliding = Map::new();
    sliding.insert("rope_type".into(), json!("default"));
    sliding.insert("rope_theta".into(), json!(w.float("rope.freq_base_swa")?.unwrap_or(1e4)));
    w.raw.remove("rope_theta");
    let kinds = [("full_attention", full), ("sliding_attention", sliding)];
    w.set_field(
        "rope_parameters",
        kinds.into_iter().map(|(k, v)| (k.to_string(), Value::Object(v))).collect::<Map<_, _>>(),
    );
    Ok(())
}

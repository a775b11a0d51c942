//! What differs from family to family in the configuration of a GGUF file.

use super::config::{ARCHITECTURES, ConfigFieldWriter};
use super::{encoders, hybrids};
use crate::error::CheckpointError;
use serde_json::json;

/// What differs from family to family.
pub(super) fn write_family_fields(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    let unknown = |w: &ConfigFieldWriter<'_>| {
        let near = mlcc_files::did_you_mean(w.arch, ARCHITECTURES.iter().map(|(arch, _)| *arch));
        Err(CheckpointError::Unsupported {
            file: w.metadata.origin.clone(),
            detail: format!(
                "has the architecture `{}`, whose GGUF files are not supported: {near}`mlcc models` lists all",
                w.arch
            ),
        })
    };
    let Some((_, model_type)) = ARCHITECTURES.iter().find(|(arch, _)| *arch == w.arch) else {
        return unknown(w);
    };
    w.set_field("model_type", *model_type);
    match w.arch {
        "llama" | "internlm2" => llama(w),
        "granite" => granite(w),
        "baichuan" => baichuan(w),
        "qwen" => qwen(w),
        "qwen2" => {
            w.set_field("hidden_act", "silu");
            Ok(())
        }
        "qwen3" | "qwen3moe" => qwen3(w),
        "gemma" => {
            w.set_field("hidden_activation", "gelu_pytorch_tanh");
            Ok(())
        }
        "gemma2" | "gemma3" => gemma(w),
        "gemma-embedding" => {
            encoders::gemma_embedding(w);
            gemma(w)
        }
        "bert" => encoders::bert(w),
        "modern-bert" => encoders::modern_bert(w),
        "nomic-bert" => encoders::nomic_bert(w),
        "t5" => encoders::t5(w),
        "phi3" => {
            w.set_field("hidden_act", "silu");
            w.copy_number("attention.sliding_window", "sliding_window")?;
            w.copy_number("rope.scaling.original_context_length", "original_max_position_embeddings")?;
            w.copy_partial_rotary("partial_rotary_factor")
        }
        "gpt2" => gpt2(w),
        "starcoder" => starcoder(w),
        "gptneox" => {
            w.set_field("hidden_act", "gelu");
            w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")?;
            let parallel = w.metadata.flag(&w.metadata_key("use_parallel_residual"))?.unwrap_or(true);
            w.set_field("use_parallel_residual", parallel);
            let share = w.number("rope.dimension_count")?.unwrap_or(0) as f64 / w.head_size()?.max(1) as f64;
            w.set_field("rotary_pct", share);
            w.copy_float("rope.freq_base", "rotary_emb_base")
        }
        "falcon" => falcon(w),
        "bloom" => {
            w.copy_number("attention.head_count", "n_head")?;
            w.copy_number("block_count", "n_layer")?;
            w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")?;
            w.copy_number("context_length", "seq_length")
        }
        "mpt" => mpt(w),
        "starcoder2" => {
            w.set_field("hidden_act", "gelu_pytorch_tanh");
            w.set_field("use_bias", w.has_tensor("blk.0.attn_q.bias"));
            w.copy_number("attention.sliding_window", "sliding_window")?;
            w.copy_float("attention.layer_norm_epsilon", "norm_epsilon")
        }
        "stablelm" => {
            w.set_field("hidden_act", "silu");
            w.set_field("use_qkv_bias", w.has_tensor("blk.0.attn_q.bias"));
            w.set_field("qk_layernorm", w.has_tensor("blk.0.attn_q_norm.weight"));
            let parallel = w.metadata.flag(&w.metadata_key("use_parallel_residual"))?.unwrap_or(false);
            w.set_field("use_parallel_residual", parallel && !w.has_tensor("blk.0.ffn_norm.weight"));
            w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")?;
            w.copy_partial_rotary("partial_rotary_factor")
        }
        "olmo2" => {
            w.set_field("hidden_act", "silu");
            w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
            Ok(())
        }
        // The Hugging Face class of GLM-4 has separate projections.
        "chatglm" if w.has_tensor("blk.0.attn_q.weight") => {
            w.set_field("model_type", "glm");
            glm(w)
        }
        "chatglm" => chatglm(w),
        "smollm3" => {
            w.set_field("hidden_act", "silu");
            w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
            w.set_field("mlp_bias", w.has_tensor("blk.0.ffn_up.bias"));
            Ok(())
        }
        "mistral3" => {
            w.set_field("hidden_act", "silu");
            Ok(())
        }
        "cohere2" => {
            w.set_field("hidden_act", "silu");
            w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
            w.copy_number("attention.sliding_window", "sliding_window")?;
            w.copy_float("attention.layer_norm_epsilon", "layer_norm_eps")?;
            w.copy_float("logit_scale", "logit_scale")
        }
        "gpt-oss" => {
            w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
            w.set_field("fused_experts", false);
            w.copy_number("attention.sliding_window", "sliding_window")?;
            copy_expert_fields(w, ["num_local_experts", "intermediate_size"])
        }
        "glm4moe" => glm4moe(w),
        "minimax-m2" => {
            w.set_field("hidden_act", "silu");
            w.set_field("use_qk_norm", w.has_tensor("blk.0.attn_q_norm.weight"));
            w.copy_number("rope.dimension_count", "rotary_dim")?;
            copy_expert_fields(w, ["num_local_experts", "intermediate_size"])
        }
        "lfm2" | "lfm2moe" => lfm2(w),
        "rwkv6" => rwkv6(w),
        "rwkv7" => rwkv7(w),
        "glm4" => glm(w),
        _ => hybrids::write_hybrid_fields(w).unwrap_or_else(|| unknown(w)),
    }
}

/// Llama and its kin; with experts it is Mixtral.
fn llama(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.set_field("mlp_bias", w.has_tensor("blk.0.ffn_up.bias"));
    if !w.raw.contains_key("head_dim") {
        w.copy_number("rope.dimension_count", "head_dim")?;
    }
    let window = w.number("attention.sliding_window")?;
    if w.number("expert_count")?.unwrap_or(0) > 0 {
        w.set_field("model_type", "mixtral");
        w.copy_number("expert_count", "num_local_experts")?;
        w.copy_number("expert_used_count", "num_experts_per_tok")?;
    } else if window.is_some() {
        w.set_field("model_type", "mistral");
    }
    if let Some(window) = window {
        w.set_field("sliding_window", window);
    }
    Ok(())
}

fn granite(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.set_field("mlp_bias", w.has_tensor("blk.0.ffn_up.bias"));
    w.copy_float("attention.scale", "attention_multiplier")?;
    w.copy_float("embedding_scale", "embedding_multiplier")?;
    w.copy_float("residual_scale", "residual_multiplier")?;
    w.copy_float("logit_scale", "logits_scaling")
}

/// Layers of Baichuan 13B, which has ALiBi: llama.cpp knows it by them, because files do not say so.
const BAICHUAN_13B: u64 = 40;

fn baichuan(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    w.set_field("hidden_act", "silu");
    w.set_field("fused_qkv", false);
    let alibi = match w.float("attention.max_alibi_bias")? {
        Some(bias) => bias > 0.0,
        None => w.required_number("block_count")? == BAICHUAN_13B,
    };
    if alibi {
        w.copy_number("context_length", "model_max_length")?;
        w.raw.remove("max_position_embeddings");
    }
    Ok(())
}

/// Qwen, first generation. Its norms have no bias, whatever the name of the epsilon.
fn qwen(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")?;
    w.copy_float("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")?;
    w.copy_float("rope.freq_base", "rotary_emb_base")?;
    w.copy_number("context_length", "seq_length")?;
    w.set_field("kv_channels", w.head_size()?);
    w.set_field("no_bias", !w.has_tensor("blk.0.attn_output.bias"));
    Ok(())
}

/// What the RWKV families have in common. `context_length` is a million for all of them, and means nothing.
fn rwkv(w: &mut ConfigFieldWriter<'_>, head_size: &str) -> Result<(), CheckpointError> {
    for field in ["max_position_embeddings", "num_attention_heads", "num_key_value_heads"] {
        w.raw.remove(field);
    }
    let size = w.required_number("wkv.head_size")?;
    w.set_field(head_size, size);
    Ok(())
}

fn rwkv6(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    rwkv(w, "head_size")?;
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")?;
    w.copy_number("time_mix_extra_dim", "time_mix_extra_dim")?;
    w.copy_number("time_decay_extra_dim", "time_decay_extra_dim")?;
    // Weights are halved only where this is there.
    w.set_field("rescale_every", w.number("rescale_every_n_layers")?.unwrap_or(0));
    Ok(())
}

fn rwkv7(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    rwkv(w, "head_dim")?;
    w.copy_float("attention.layer_norm_epsilon", "norm_eps")?;
    w.copy_number("attention.decay_lora_rank", "decay_low_rank_dim")?;
    w.copy_number("attention.iclr_lora_rank", "a_low_rank_dim")?;
    w.copy_number("attention.value_residual_mix_lora_rank", "v_low_rank_dim")?;
    w.copy_number("attention.gate_lora_rank", "gate_low_rank_dim")
}

/// Number of experts, in all and for each token, and their width. `names` are the fields of number and width.
fn copy_expert_fields(
    w: &mut ConfigFieldWriter<'_>,
    [count, width]: [&str; 2],
) -> Result<(), CheckpointError> {
    w.copy_number("expert_count", count)?;
    w.copy_number("expert_used_count", "num_experts_per_tok")?;
    w.copy_number("expert_feed_forward_length", width)
}

/// GLM-4.5.
fn glm4moe(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.set_field("use_qk_norm", w.has_tensor("blk.0.attn_q_norm.weight"));
    copy_expert_fields(w, ["n_routed_experts", "moe_intermediate_size"])?;
    w.copy_number("expert_shared_count", "n_shared_experts")?;
    w.copy_number("leading_dense_block_count", "first_k_dense_replace")?;
    w.copy_float("expert_weights_scale", "routed_scaling_factor")?;
    if let Some(flag) = w.metadata.flag(&w.metadata_key("expert_weights_norm"))? {
        w.set_field("norm_topk_prob", flag);
    }
    w.copy_partial_rotary("partial_rotary_factor")
}

/// Layers without key heads are convolutions.
fn lfm2(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    let heads = w.metadata.integers(&w.metadata_key("attention.head_count_kv"))?;
    let kind = |heads: &i64| if *heads == 0 { "conv" } else { "full_attention" };
    w.set_field("layer_types", heads.iter().map(kind).collect::<Vec<_>>());
    w.copy_number("shortconv.l_cache", "conv_L_cache")?;
    w.set_field("conv_bias", w.has_tensor("blk.0.shortconv.conv.bias"));
    w.copy_float("attention.layer_norm_rms_epsilon", "norm_eps")?;
    // The width is what the class would compute.
    w.set_field("block_auto_adjust_ff_dim", false);
    if w.arch == "lfm2moe" {
        copy_expert_fields(w, ["num_experts", "moe_intermediate_size"])?;
        w.copy_number("leading_dense_block_count", "num_dense_layers")?;
    }
    Ok(())
}

fn qwen3(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    if w.arch == "qwen3moe" {
        w.copy_number("expert_count", "num_experts")?;
        w.copy_number("expert_used_count", "num_experts_per_tok")?;
        w.copy_number("expert_feed_forward_length", "moe_intermediate_size")?;
        // The converter writes no such flag; all published models have it.
        w.set_field("norm_topk_prob", true);
        let layers = w.required_number("block_count")?.min(1000);
        let dense = (0..layers).filter(|layer| !w.has_tensor(&format!("blk.{layer}.ffn_gate_exps.weight")));
        w.set_field("mlp_only_layers", dense.collect::<Vec<u64>>());
    }
    Ok(())
}

/// Layers of the published 27B models, which scale queries differently.
const GEMMA_27B: [(&str, u64); 2] = [("gemma2", 46), ("gemma3", 62)];

fn gemma(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    w.set_field("hidden_activation", "gelu_pytorch_tanh");
    w.copy_number("attention.sliding_window", "sliding_window")?;
    w.copy_float("attn_logit_softcapping", "attn_logit_softcapping")?;
    w.copy_float("final_logit_softcapping", "final_logit_softcapping")?;
    // Files without it: llama.cpp knows it by the number of layers.
    let layers = w.required_number("block_count")?;
    match w.float("attention.scale")? {
        Some(scale) if scale > 0.0 => w.set_field("query_pre_attn_scalar", scale.powi(-2)),
        _ if GEMMA_27B.contains(&(w.arch, layers)) => {
            let share = w
                .required_number("embedding_length")?
                .checked_div(w.required_number("attention.head_count")?);
            w.set_field("query_pre_attn_scalar", share.unwrap_or(0));
        }
        _ => w.set_field("query_pre_attn_scalar", w.head_size()?),
    }
    if w.arch == "gemma3" || w.arch == "gemma-embedding" {
        let local = w.float("rope.freq_base_swa")?.unwrap_or(10_000.0);
        w.set_field("rope_local_base_freq", local);
        w.set_field("sliding_window_pattern", w.number("attention.sliding_window_pattern")?.unwrap_or(6));
    }
    Ok(())
}

fn gpt2(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    w.set_field("activation_function", "gelu_new");
    w.copy_number("embedding_length", "n_embd")?;
    w.copy_number("block_count", "n_layer")?;
    w.copy_number("attention.head_count", "n_head")?;
    w.copy_number("context_length", "n_positions")?;
    w.copy_number("feed_forward_length", "n_inner")?;
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")
}

fn falcon(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    let kv = w.number("attention.head_count_kv")?.unwrap_or(1);
    let new = w.has_tensor("blk.0.attn_norm_2.weight") || kv > 1;
    w.set_field("activation", "gelu");
    w.set_field("alibi", false);
    w.set_field("bias", w.has_tensor("blk.0.attn_qkv.bias"));
    w.set_field("parallel_attn", true);
    w.set_field("multi_query", kv == 1);
    w.set_field("new_decoder_architecture", new);
    if new && !w.has_tensor("blk.0.attn_norm_2.weight") {
        w.set_field("num_ln_in_parallel_attn", 1);
    }
    w.set_field("num_kv_heads", kv);
    w.raw.remove("num_key_value_heads");
    w.copy_number("feed_forward_length", "ffn_hidden_size")?;
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")
}

fn mpt(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    let (hidden, inner) = (w.required_number("embedding_length")?, w.number("feed_forward_length")?);
    w.set_field("d_model", hidden);
    w.copy_number("block_count", "n_layers")?;
    w.copy_number("attention.head_count", "n_heads")?;
    w.copy_number("context_length", "max_seq_len")?;
    w.set_field("expansion_ratio", inner.and_then(|inner| inner.checked_div(hidden)).unwrap_or(4));
    w.set_field("no_bias", !w.has_tensor("blk.0.attn_qkv.bias"));
    w.copy_float("attention.layer_norm_epsilon", "layer_norm_epsilon")?;
    let bias = w.float("attention.max_alibi_bias")?.unwrap_or(0.0);
    let clip = w.float("attention.clamp_kqv")?;
    let kv = w.number("attention.head_count_kv")?;
    let attention = json!({
        "alibi": bias > 0.0,
        "alibi_bias_max": if bias > 0.0 { bias } else { 8.0 },
        "clip_qkv": clip,
        "kv_n_heads": kv,
        "qk_ln": w.has_tensor("blk.0.attn_q_norm.weight"),
    });
    w.set_field("attn_config", attention);
    w.raw.remove("num_key_value_heads");
    Ok(())
}

/// GPT-2 with matrices as they are, and one head of keys.
fn starcoder(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    if w.number("attention.head_count_kv")? != Some(1) {
        return Err(w.unsupported_error("has the architecture `starcoder` with more than one key head"));
    }
    gpt2(w)?;
    w.set_field("activation_function", "gelu_pytorch_tanh");
    w.set_field("multi_query", true);
    Ok(())
}

fn glm(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    w.set_field("hidden_act", "silu");
    w.set_field("attention_bias", w.has_tensor("blk.0.attn_q.bias"));
    w.copy_partial_rotary("partial_rotary_factor")
}

fn chatglm(w: &mut ConfigFieldWriter<'_>) -> Result<(), CheckpointError> {
    w.copy_number("block_count", "num_layers")?;
    w.copy_number("context_length", "seq_length")?;
    w.copy_number("feed_forward_length", "ffn_hidden_size")?;
    w.copy_number("attention.head_count_kv", "multi_query_group_num")?;
    w.copy_float("attention.layer_norm_rms_epsilon", "layernorm_epsilon")?;
    w.set_field("kv_channels", w.head_size()?);
    w.set_field("multi_query_attention", true);
    w.set_field("add_qkv_bias", w.has_tensor("blk.0.attn_qkv.bias"));
    w.set_field("add_bias_linear", w.has_tensor("blk.0.ffn_up.bias"));
    w.set_field("rmsnorm", true);
    w.set_field("post_layer_norm", true);
    w.set_field("original_rope", true);
    w.set_field("apply_residual_connection_post_layernorm", false);
    if let Some(rows) = w.raw.get("vocab_size").cloned() {
        w.set_field("padded_vocab_size", rows);
    }
    // The reference scales the base: 10000 * rope_ratio.
    if let Some(base) = w.float("rope.freq_base")? {
        w.set_field("rope_ratio", base / 10_000.0);
    }
    w.raw.remove("rope_theta");
    Ok(())
}

//! What the tensors of a checkpoint tell of its configuration.
//!
//! Published config.json files leave out what their class computes from the width or takes for granted: ranks, sizes of
//! heads, widths of feed-forward parts, biases, whether the head is the embedding. The tensors have it in their shapes, so
//! it is read there. A field that says something else than the tensors is an error that names both.

use super::fields::ConfigFields;
use super::sizes::{CONTEXT, HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, VOCAB};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::families::rwkv4::naming::rwkv4_canonical;
use crate::families::rwkv7::naming::rwkv7_canonical;
use crate::layers::moe::FUSED_EXPERTS;
use crate::registry;
use serde_json::Value;

mod tensors;

use tensors::ConfigEvidence;

/// What was told, or a contradiction.
type EvidenceResult = Result<(), ConfigError>;

/// The fields with those that were left out, as far as the tensors tell them.
pub(crate) fn complete_fields(
    fields: &ConfigFields,
    checkpoint: &Checkpoint,
) -> Result<ConfigFields, ConfigError> {
    let model_type = registry::find_entry(fields)?.1.model_type;
    let mut complete = fields.clone();
    let nested = registry::nested_text_config(fields)?;
    let canonical: fn(&str) -> String = match model_type {
        "rwkv" | "rwkv5" | "rwkv6" => rwkv4_canonical,
        "rwkv7" => rwkv7_canonical,
        _ => str::to_string,
    };
    let is_nested = nested.is_some();
    let mut tensors =
        ConfigEvidence { fields: nested.unwrap_or_else(|| fields.clone()), checkpoint, canonical };
    infer_family(&mut tensors, model_type)?;
    match is_nested {
        true => drop(complete.raw.insert(registry::TEXT_MODEL.into(), Value::Object(tensors.fields.raw))),
        false => complete = tensors.fields,
    }
    Ok(complete)
}

/// The stored name of a head that the configuration ties to the embedding table and that has other values; checkpoints have one after
/// a training of the head, or a merge of an adapter.
pub(crate) fn stored_untied_head(architecture: &Architecture, checkpoint: &Checkpoint) -> Option<String> {
    let (embedding, head) = architecture.tied_embedding()?;
    let find = |name: &str| {
        let is_it = |info: &&TensorInfo| {
            architecture.canonical_name(&info.listed_name) == name && info.dtype.is_weight()
        };
        checkpoint.tensors().iter().find(is_it)
    };
    let (table, head) = (find(embedding)?, find(head)?);
    (!tensors::tensors_equal(checkpoint, &table.name, &head.name)).then(|| head.stored_name.clone())
}

/// What each family leaves to its tensors. Names are canonical for RWKV, else as stored, without what may stand before.
fn infer_family(t: &mut ConfigEvidence, model_type: &str) -> EvidenceResult {
    match model_type {
        "rwkv" => rwkv4(t),
        "rwkv5" => rwkv5(t),
        "rwkv6" => {
            rwkv5(t)?;
            let attention = "rwkv.blocks.0.attention";
            t.record_axis_size(&["time_mix_extra_dim"], &format!("{attention}.time_maa_w1"), 1, 5)?;
            t.record_axis_size(&["time_decay_extra_dim"], &format!("{attention}.time_decay_w1"), 1, 1)
        }
        "rwkv7" => rwkv7(t),
        "llama" | "mistral" | "granite" => {
            llama(t, None)?;
            t.record_bias("attention_bias", "layers.0.self_attn.q_proj")?;
            t.record_bias("mlp_bias", "layers.0.mlp.gate_proj")
        }
        "qwen2" => llama(t, None),
        "exaone4" => llama(t, Some("layers.0.self_attn.q_norm.weight")),
        "internlm" => {
            llama(t, None)?;
            t.record_bias("bias", "layers.0.self_attn.q_proj")
        }
        "olmo2" | "olmo3" => {
            llama(t, None)?;
            t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
        }
        "smollm3" => {
            tied_llama(t)?;
            t.record_bias("attention_bias", "layers.0.self_attn.q_proj")?;
            t.record_bias("mlp_bias", "layers.0.mlp.gate_proj")
        }
        "ernie4_5" => {
            tied_llama(t)?;
            t.record_bias("use_bias", "layers.0.self_attn.q_proj")
        }
        "ministral3" => llama(t, None),
        "cohere2" => {
            tied_llama(t)?;
            t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
        }
        "lfm2" | "lfm2_moe" => {
            fused_experts(t, "feed_forward.experts", "w1")?;
            embedding(t, "embed_tokens.weight", "lm_head.weight", true)?;
            hybrid_heads(t, "self_attn.q_layernorm.weight")?;
            t.record_axis_size(&["num_experts"], "feed_forward.gate.weight", 0, 1)?;
            t.record_axis_size(&["moe_intermediate_size"], "feed_forward.experts.0.w1.weight", 0, 1)
        }
        "lfm3" => {
            t.record_bias("attention_bias", "self_attn.q_proj")?;
            embedding(t, "embed_tokens.weight", "lm_head.weight", true)?;
            hybrid_heads(t, "self_attn.q_norm.weight")?;
            t.record_axis_size(&["intermediate_size"], "layers.0.feed_forward.w1.weight", 0, 1)
        }
        "muse_glimmer" | "muse_glimmer_text" => {
            llama(t, None)?;
            t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
        }
        "kimi_linear" => {
            t.record_bias("attention_bias", "self_attn.kv_a_proj_with_mqa")?;
            fused_experts(t, "block_sparse_moe.experts", "w1")?;
            embedding(t, "embed_tokens.weight", "lm_head.weight", false)?;
            t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)?;
            t.record_axis_size(&["num_experts"], "block_sparse_moe.gate.weight", 0, 1)?;
            t.record_axis_size(&["moe_intermediate_size"], "block_sparse_moe.experts.0.w1.weight", 0, 1)
        }
        "glm4_moe" => {
            fused_experts(t, "mlp.experts", "gate_proj")?;
            embedding(t, "embed_tokens.weight", "lm_head.weight", false)?;
            separate_heads(t, None)?;
            t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)?;
            t.record_axis_size(&["n_routed_experts"], "mlp.gate.weight", 0, 1)?;
            t.record_axis_size(&["moe_intermediate_size"], "mlp.experts.0.gate_proj.weight", 0, 1)?;
            t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
        }
        "minimax_m2" => {
            fused_experts(t, "block_sparse_moe.experts", "w1")?;
            embedding(t, "embed_tokens.weight", "lm_head.weight", false)?;
            separate_heads(t, None)?;
            t.record_axis_size(&["intermediate_size"], "block_sparse_moe.experts.0.w1.weight", 0, 1)?;
            t.record_axis_size(&["num_local_experts"], "block_sparse_moe.gate.weight", 0, 1)
        }
        "qwen3_next" | "qwen3_5" | "qwen3_5_text" | "qwen3_5_moe" | "qwen3_5_moe_text" => {
            t.record_bias("attention_bias", "self_attn.q_proj")?;
            fused_experts(t, "mlp.experts", "gate_proj")?;
            embedding(t, "embed_tokens.weight", "lm_head.weight", false)?;
            hybrid_heads(t, "self_attn.q_norm.weight")?;
            t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)?;
            t.record_axis_size(&["moe_intermediate_size"], "mlp.experts.0.gate_proj.weight", 0, 1)?;
            t.record_axis_size(&["moe_intermediate_size"], "mlp.experts.gate_up_proj", 1, 2)?;
            t.record_axis_size(
                &["shared_expert_intermediate_size"],
                "mlp.shared_expert.gate_proj.weight",
                0,
                1,
            )?;
            t.record_axis_size(&["num_experts"], "mlp.gate.weight", 0, 1)?;
            t.record_axis_size(&["linear_num_value_heads"], "linear_attn.A_log", 0, 1)?;
            t.record_axis_size(&["linear_value_head_dim"], "linear_attn.norm.weight", 0, 1)
        }
        "granitemoehybrid" => {
            t.record_bias("attention_bias", "self_attn.q_proj")?;
            embedding(t, "embed_tokens.weight", "lm_head.weight", false)?;
            if let (Some(hidden), Some(heads)) = (t.known_size(&HIDDEN), t.known_size(&HEADS)) {
                t.record_axis_size(&KV_HEADS, "self_attn.k_proj.weight", 0, hidden / heads)?;
            }
            t.record_axis_size(&["intermediate_size"], "block_sparse_moe.input_linear.weight", 1, 2)?;
            t.record_axis_size(&["num_local_experts"], "block_sparse_moe.router.layer.weight", 0, 1)?;
            t.record_axis_size(&["shared_intermediate_size"], "shared_mlp.input_linear.weight", 0, 2)?;
            t.record_axis_size(&["mamba_n_heads"], "mamba.A_log", 0, 1)
        }
        "deepseek_v2" | "deepseek_v3" | "kimi_k2" | "glm4_moe_lite" | "mistral4" => {
            t.record_bias("attention_bias", "self_attn.kv_a_proj_with_mqa")?;
            fused_experts(t, "mlp.experts", "gate_proj")?;
            embedding(t, "embed_tokens.weight", "lm_head.weight", false)?;
            t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)?;
            t.record_axis_size(&["moe_intermediate_size"], "mlp.experts.0.gate_proj.weight", 0, 1)?;
            t.record_axis_size(&["moe_intermediate_size"], "mlp.experts.gate_up_proj", 1, 2)
        }
        "nemotron_h" => {
            t.record_bias("attention_bias", "mixer.q_proj")?;
            fused_experts(t, "mixer.experts", "up_proj")?;
            embedding(t, "embeddings.weight", "lm_head.weight", false)?;
            let Some(heads) = t.known_size(&HEADS) else { return Ok(()) };
            t.record_axis_size(&HEAD_SIZE, "mixer.q_proj.weight", 0, heads)?;
            if let Some(size) = t.known_size(&HEAD_SIZE) {
                t.record_axis_size(&KV_HEADS, "mixer.k_proj.weight", 0, size)?;
            }
            t.record_axis_size(&["moe_intermediate_size"], "mixer.experts.0.up_proj.weight", 0, 1)
        }
        "falcon_h1" => {
            t.record_bias("attention_bias", "self_attn.q_proj")?;
            embedding(t, "embed_tokens.weight", "lm_head.weight", false)?;
            separate_heads(t, None)?;
            t.record_axis_size(&["intermediate_size"], "layers.0.feed_forward.gate_proj.weight", 0, 1)
        }
        "gemma4" | "gemma4_text" => {
            // Layers without a window have other heads.
            let types = t.fields.get("layer_types").and_then(Value::as_array);
            let windowed = types.and_then(|types| types.iter().position(|kind| kind == "sliding_attention"));
            gemma(t, windowed.unwrap_or(0))?;
            t.record_axis_size(&["moe_intermediate_size"], "experts.gate_up_proj", 1, 2)?;
            t.record_axis_size(&["num_experts"], "router.proj.weight", 0, 1)
        }
        "mamba" => {
            embedding(t, "embeddings.weight", "lm_head.weight", true)?;
            t.record_axis_size(&["intermediate_size"], "layers.0.mixer.A_log", 0, 1)?;
            t.record_axis_size(&["state_size"], "layers.0.mixer.A_log", 1, 1)?;
            t.record_axis_size(&["time_step_rank"], "layers.0.mixer.dt_proj.weight", 1, 1)?;
            t.record_bias("use_bias", "layers.0.mixer.in_proj")?;
            t.record_bias("use_conv_bias", "layers.0.mixer.conv1d")
        }
        "olmo_hybrid" => {
            t.record_bias("attention_bias", "self_attn.q_proj")?;
            embedding(t, "embed_tokens.weight", "lm_head.weight", false)?;
            t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)?;
            if let (Some(hidden), Some(heads)) = (t.known_size(&HIDDEN), t.known_size(&HEADS)) {
                t.record_axis_size(&KV_HEADS, "self_attn.k_proj.weight", 0, hidden / heads)?;
            }
            t.record_axis_size(&["linear_num_value_heads"], "linear_attn.A_log", 0, 1)?;
            t.record_axis_size(&["linear_value_head_dim"], "linear_attn.o_norm.weight", 0, 1)
        }
        "mamba2" => {
            embedding(t, "embeddings.weight", "lm_head.weight", false)?;
            t.record_axis_size(&["num_heads"], "layers.0.mixer.A_log", 0, 1)?;
            let Some(heads) = t.known_size(&["num_heads"]) else { return Ok(()) };
            t.record_axis_size(&["head_dim"], "layers.0.mixer.norm.weight", 0, heads)
        }
        "gpt_oss" => {
            embedding(t, "embed_tokens.weight", "lm_head.weight", false)?;
            separate_heads(t, None)?;
            t.record_axis_size(&["intermediate_size"], "mlp.experts.down_proj", 1, 1)?;
            t.record_axis_size(&["num_local_experts"], "mlp.router.weight", 0, 1)?;
            t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
        }
        "qwen3" | "qwen3_moe" => {
            fused_experts(t, "mlp.experts", "gate_proj")?;
            llama(t, Some("layers.0.self_attn.q_norm.weight"))?;
            t.record_axis_size(&["moe_intermediate_size"], "mlp.experts.0.gate_proj.weight", 0, 1)?;
            t.record_axis_size(&["num_experts", "num_local_experts"], "mlp.gate.weight", 0, 1)?;
            t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
        }
        "mixtral" => {
            fused_experts(t, "block_sparse_moe.experts", "w1")?;
            llama(t, None)?;
            t.record_axis_size(&["intermediate_size"], "block_sparse_moe.experts.0.w1.weight", 0, 1)?;
            t.record_axis_size(&["num_local_experts"], "block_sparse_moe.gate.weight", 0, 1)
        }
        "bert" | "xlm-roberta" | "roberta" => {
            table(t, "embeddings.word_embeddings.weight")?;
            t.record_axis_size(&["intermediate_size"], "layer.0.intermediate.dense.weight", 0, 1)
        }
        "nomic_bert" => {
            table(t, "embeddings.word_embeddings.weight")?;
            t.record_axis_size(&["n_inner", "intermediate_size"], "layers.0.mlp.fc11.weight", 0, 1)
        }
        "t5" | "mt5" | "umt5" => {
            let names = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"];
            let table = names.into_iter().find(|name| t.find_tensor(name).is_some()).unwrap_or(names[0]);
            embedding(t, table, "lm_head.weight", model_type == "t5")?;
            t.record_axis_size(&["d_ff"], "encoder.block.0.layer.1.DenseReluDense.wo.weight", 1, 1)
        }
        "modernbert" => {
            table(t, "embeddings.tok_embeddings.weight")?;
            t.record_axis_size(&["intermediate_size"], "layers.0.mlp.Wi.weight", 0, 2)?;
            t.record_bias("attention_bias", "layers.0.attn.Wqkv")
        }
        "gemma" | "gemma2" | "gemma3" | "gemma3_text" => gemma(t, 0),
        "stablelm" => {
            llama(t, None)?;
            t.record_bias("use_qkv_bias", "layers.0.self_attn.q_proj")?;
            let (norm, last) =
                ("layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight");
            t.record_presence("qk_layernorm", norm, "layers.0.self_attn.q_layernorm.norms.0.weight", true)?;
            t.record_presence("use_parallel_residual", norm, last, false)
        }
        "starcoder2" => {
            embedding(t, "embed_tokens.weight", "lm_head.weight", true)?;
            separate_heads(t, None)?;
            t.record_axis_size(&["intermediate_size"], "layers.0.mlp.c_fc.weight", 0, 1)?;
            t.record_bias("use_bias", "layers.0.self_attn.q_proj")
        }
        "glm" | "glm4" => {
            embedding(t, "embed_tokens.weight", "lm_head.weight", false)?;
            separate_heads(t, None)?;
            t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_up_proj.weight", 0, 2)?;
            t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
        }
        "phi3" => {
            embedding(t, "embed_tokens.weight", "lm_head.weight", false)?;
            let part = "layers.0.self_attn";
            fused_heads(t, &format!("{part}.o_proj.weight"), &format!("{part}.qkv_proj.weight"), &KV_HEADS)?;
            t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_up_proj.weight", 0, 2)
        }
        "internlm2" => {
            embedding(t, "tok_embeddings.weight", "output.weight", false)?;
            fused_heads(t, "layers.0.attention.wo.weight", "layers.0.attention.wqkv.weight", &KV_HEADS)?;
            t.record_axis_size(&["intermediate_size"], "layers.0.feed_forward.w1.weight", 0, 1)?;
            t.record_bias("bias", "layers.0.attention.wqkv")
        }
        "baichuan" => {
            table(t, "embed_tokens.weight")?;
            t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)
        }
        "qwen" => {
            table(t, "wte.weight")?;
            if let Some(found) = t.find_tensor("h.0.mlp.w1.weight") {
                t.record_size(&["intermediate_size"], 2 * found.shape[0], &found)?;
            }
            t.record_presence("no_bias", "h.0.mlp.c_proj.weight", "h.0.mlp.c_proj.bias", false)
        }
        "gpt2" => {
            gpt2(t)?;
            t.record_axis_size(&["n_inner"], "h.0.mlp.c_fc.weight", 1, 1)
        }
        "gpt_bigcode" => {
            gpt2(t)?;
            t.record_axis_size(&["n_inner"], "h.0.mlp.c_fc.weight", 0, 1)?;
            multi_query(t, "h.0.attn.c_attn.weight")
        }
        "gptj" | "moss" => {
            table(t, "wte.weight")?;
            t.record_axis_size(&["n_inner"], "h.0.mlp.fc_in.weight", 0, 1)
        }
        "gpt_neox" => {
            embedding(t, "embed_in.weight", "embed_out.weight", false)?;
            t.record_axis_size(&["intermediate_size"], "layers.0.mlp.dense_h_to_4h.weight", 0, 1)?;
            t.record_bias("attention_bias", "layers.0.attention.query_key_value")
        }
        "opt" => opt(t),
        "falcon" => falcon(t),
        "bloom" => embedding(t, "word_embeddings.weight", "lm_head.weight", true),
        "mpt" => {
            embedding(t, "wte.weight", "lm_head.weight", true)?;
            let Some(hidden) = t.known_size(&HIDDEN) else { return Ok(()) };
            t.record_axis_size(&["expansion_ratio"], "blocks.0.ffn.up_proj.weight", 0, hidden)
        }
        "chatglm" => chatglm(t),
        _ => Ok(()),
    }
}

fn rwkv4(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_axis_size(&["vocab_size"], "rwkv.embeddings.weight", 0, 1)?;
    t.record_axis_size(&["hidden_size"], "rwkv.embeddings.weight", 1, 1)?;
    t.record_axis_size(&["attention_hidden_size"], "rwkv.blocks.0.attention.key.weight", 0, 1)?;
    t.record_axis_size(&["intermediate_size"], "rwkv.blocks.0.feed_forward.key.weight", 0, 1)
}

fn rwkv5(t: &mut ConfigEvidence) -> EvidenceResult {
    rwkv4(t)?;
    t.record_axis_size(&["head_size"], "rwkv.blocks.0.attention.time_faaaa", 1, 1)
}

fn rwkv7(t: &mut ConfigEvidence) -> EvidenceResult {
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
        t.record_axis_size(
            &[field],
            &format!("model.layers.{layer}.attn.{letter}_lora.lora.0.weight"),
            0,
            1,
        )?;
    }
    Ok(())
}

/// Whether the experts of a layer are stored together, as `{inside}.down_proj`, or one by one, with `part` in each. Files
/// that are no checkpoints of PyTorch say it themselves.
fn fused_experts(t: &mut ConfigEvidence, inside: &str, part: &str) -> EvidenceResult {
    if t.fields.get(FUSED_EXPERTS).is_some() {
        return Ok(());
    }
    let together = t.find_tensor(&format!("{inside}.down_proj"));
    match together.is_some() || t.find_tensor(&format!("{inside}.0.{part}.weight")).is_some() {
        true => t.record_flag(FUSED_EXPERTS, together.is_some(), ""),
        false => Ok(()),
    }
}

/// Vocabulary and width.
fn table(t: &mut ConfigEvidence, name: &str) -> EvidenceResult {
    t.record_axis_size(&VOCAB, name, 0, 1)?;
    t.record_axis_size(&HIDDEN, name, 1, 1)
}

/// The same, and whether the table is the head too.
fn embedding(t: &mut ConfigEvidence, name: &str, head: &str, usually_tied: bool) -> EvidenceResult {
    table(t, name)?;
    t.record_tied_embedding(name, head, usually_tied)
}

/// What the Llama block has. `head_norm` is a vector of one head, where there is one.
fn llama(t: &mut ConfigEvidence, head_norm: Option<&str>) -> EvidenceResult {
    embedding(t, "embed_tokens.weight", "lm_head.weight", false)?;
    separate_heads(t, head_norm)?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)
}

/// The same where the head usually is the embedding.
fn tied_llama(t: &mut ConfigEvidence) -> EvidenceResult {
    t.record_tied_embedding("embed_tokens.weight", "lm_head.weight", true)?;
    llama(t, None)
}

fn gemma(t: &mut ConfigEvidence, layer: usize) -> EvidenceResult {
    embedding(t, "embed_tokens.weight", "lm_head.weight", true)?;
    let attention = format!("layers.{layer}.self_attn");
    heads_of(t, &attention, Some(&format!("{attention}.q_norm.weight")))?;
    t.record_axis_size(&["intermediate_size"], "layers.0.mlp.gate_proj.weight", 0, 1)?;
    t.record_bias("attention_bias", "layers.0.self_attn.q_proj")
}

/// Heads and their size where queries and keys have matrices of their own.
fn separate_heads(t: &mut ConfigEvidence, head_norm: Option<&str>) -> EvidenceResult {
    heads_of(t, "layers.0.self_attn", head_norm)
}

fn heads_of(t: &mut ConfigEvidence, attention: &str, head_norm: Option<&str>) -> EvidenceResult {
    if let Some(norm) = head_norm {
        t.record_axis_size(&HEAD_SIZE, norm, 0, 1)?;
    }
    let query = &format!("{attention}.q_proj.weight");
    match (t.known_size(&HEADS), t.known_size(&HEAD_SIZE)) {
        (Some(heads), _) => t.record_axis_size(&HEAD_SIZE, query, 0, heads)?,
        (None, Some(size)) => t.record_axis_size(&HEADS, query, 0, size)?,
        (None, None) => {}
    }
    let Some(size) = t.known_size(&HEAD_SIZE) else { return Ok(()) };
    t.record_axis_size(&KV_HEADS, &format!("{attention}.k_proj.weight"), 0, size)
}

/// The same in the layers that have attention. `head_norm` is a vector of one head.
fn hybrid_heads(t: &mut ConfigEvidence, head_norm: &str) -> EvidenceResult {
    t.record_axis_size(&HEAD_SIZE, head_norm, 0, 1)?;
    let Some(size) = t.known_size(&HEAD_SIZE) else { return Ok(()) };
    t.record_axis_size(&KV_HEADS, "self_attn.k_proj.weight", 0, size)
}

/// The same where queries, keys and values are one matrix: the output's columns are those of all heads.
fn fused_heads(
    t: &mut ConfigEvidence,
    output: &str,
    fused: &str,
    kv_heads: &[&'static str],
) -> EvidenceResult {
    let Some(heads) = t.known_size(&HEADS) else { return Ok(()) };
    t.record_axis_size(&HEAD_SIZE, output, 1, heads)?;
    let (Some(size), Some(found)) = (t.known_size(&HEAD_SIZE), t.find_tensor(fused)) else { return Ok(()) };
    let others = found.shape[0].checked_div(size).and_then(|all| all.checked_sub(heads));
    match others.filter(|n| n % 2 == 0 && *n > 0) {
        Some(both) => t.record_size(kv_heads, both / 2, &found),
        None => Ok(()),
    }
}

fn gpt2(t: &mut ConfigEvidence) -> EvidenceResult {
    embedding(t, "wte.weight", "lm_head.weight", true)?;
    t.record_axis_size(&CONTEXT, "wpe.weight", 0, 1)
}

/// Whether all queries share one key head, from the rows of a fused matrix.
fn multi_query(t: &mut ConfigEvidence, fused: &str) -> EvidenceResult {
    let (Some(found), Some(hidden), Some(heads)) =
        (t.find_tensor(fused), t.known_size(&HIDDEN), t.known_size(&HEADS))
    else {
        return Ok(());
    };
    match found.shape[0] {
        _ if heads < 2 => Ok(()),
        rows if rows == hidden + 2 * (hidden / heads) => {
            t.record_flag("multi_query", true, &found.describe())
        }
        rows if rows == 3 * hidden => t.record_flag("multi_query", false, &found.describe()),
        _ => Ok(()),
    }
}

fn opt(t: &mut ConfigEvidence) -> EvidenceResult {
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

fn falcon(t: &mut ConfigEvidence) -> EvidenceResult {
    embedding(t, "word_embeddings.weight", "lm_head.weight", true)?;
    t.record_axis_size(&["ffn_hidden_size"], "h.0.mlp.dense_h_to_4h.weight", 0, 1)?;
    t.record_bias("bias", "h.0.mlp.dense_h_to_4h")?;
    let projection = "h.0.self_attention.query_key_value.weight";
    if t.find_tensor("h.0.ln_attn.weight").is_some() {
        t.record_presence("new_decoder_architecture", projection, "h.0.ln_attn.weight", true)?;
    }
    match t.fields.get("new_decoder_architecture") {
        Some(Value::Bool(true)) => fused_heads(t, "h.0.self_attention.dense.weight", projection, &KV_HEADS),
        _ => {
            multi_query(t, projection)?;
            let last = "h.0.post_attention_layernorm.weight";
            t.record_presence("parallel_attn", "h.0.input_layernorm.weight", last, false)
        }
    }
}

/// All versions: what one has, the others do not.
fn chatglm(t: &mut ConfigEvidence) -> EvidenceResult {
    table(t, "word_embeddings.weight")?;
    t.record_axis_size(&["inner_hidden_size"], "transformer.layers.0.mlp.dense_h_to_4h.weight", 0, 1)?;
    let (layer, mlp) = ("encoder.layers.0", "encoder.layers.0.mlp.dense_h_to_4h");
    if t.find_tensor(&format!("{layer}.input_layernorm.weight")).is_none() {
        return Ok(());
    }
    t.record_axis_size(&["ffn_hidden_size"], &format!("{mlp}.weight"), 0, 2)?;
    t.record_bias("add_bias_linear", mlp)?;
    // Without its own field the bias of the projection may come from the one for all.
    if t.fields.get("add_bias_linear") == Some(&Value::Bool(false)) {
        t.record_bias("add_qkv_bias", &format!("{layer}.self_attention.query_key_value"))?;
    }
    let attention = format!("{layer}.self_attention");
    let (output, fused) =
        (format!("{attention}.dense.weight"), format!("{attention}.query_key_value.weight"));
    let groups: &[&str] = match t.fields.get("multi_query_attention") {
        Some(Value::Bool(true)) => &["multi_query_group_num"],
        _ => &KV_HEADS,
    };
    fused_heads(t, &output, &fused, groups)?;
    let (norm, last) = (format!("{layer}.input_layernorm.weight"), "encoder.final_layernorm.weight");
    t.record_presence("post_layer_norm", &norm, last, true)
}

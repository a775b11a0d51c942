//! Names of models with recurrent layers, latent attention or embeddings of each layer.

use super::TensorConversion::*;
use super::{ArchitectureVariant, GEMMA_TOP, LLAMA_TOP, NameMapping, TensorNameMap};

pub(super) const BACKBONE_TOP: &[NameMapping] = &[
    ("token_embd.weight", "backbone.embeddings.weight", Same),
    ("output_norm.weight", "backbone.norm_f.weight", Same),
    ("output.weight", "lm_head.weight", Same),
];

const FALCON_H1_TOP: &[NameMapping] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.final_layernorm.weight", Same),
    ("output.weight", "lm_head.weight", Same),
];

const GEMMA4_TOP: &[NameMapping] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.norm.weight", Same),
    ("output.weight", "lm_head.weight", Same),
    ("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight", Same),
    ("per_layer_model_proj.weight", "model.per_layer_model_projection.weight", Same),
    ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight", Same),
];

const MAMBA_BLOCK: &[NameMapping] = &[
    ("attn_norm", "norm", Same),
    ("ssm_in", "mixer.in_proj", Same),
    ("ssm_conv1d", "mixer.conv1d", Same),
    ("ssm_x", "mixer.x_proj", Same),
    ("ssm_dt", "mixer.dt_proj", Same),
    ("ssm_a", "mixer.A_log", NegExp),
    ("ssm_d", "mixer.D", Flat),
    ("ssm_out", "mixer.out_proj", Same),
];

pub(super) const MAMBA2_BLOCK: &[NameMapping] = &[
    ("attn_norm", "norm", Same),
    ("ssm_in", "mixer.in_proj", Same),
    ("ssm_conv1d", "mixer.conv1d", Same),
    ("ssm_dt.bias", "mixer.dt_bias", Same),
    ("ssm_a", "mixer.A_log", NegExp),
    ("ssm_d", "mixer.D", Flat),
    ("ssm_norm", "mixer.norm", Flat),
    ("ssm_out", "mixer.out_proj", Same),
];

const NEMOTRON_H_BLOCK: &[NameMapping] = &[
    ("attn_norm", "norm", Same),
    ("ssm_in", "mixer.in_proj", Same),
    ("ssm_conv1d", "mixer.conv1d", Same),
    ("ssm_dt.bias", "mixer.dt_bias", Same),
    ("ssm_a", "mixer.A_log", NegExp),
    ("ssm_d", "mixer.D", Flat),
    ("ssm_norm", "mixer.norm", Flat),
    ("ssm_out", "mixer.out_proj", Same),
    ("attn_q", "mixer.q_proj", QueryHeads),
    ("attn_k", "mixer.k_proj", KeyHeads),
    ("attn_v", "mixer.v_proj", Same),
    ("attn_output", "mixer.o_proj", Same),
    ("ffn_up", "mixer.up_proj", Same),
    ("ffn_down", "mixer.down_proj", Same),
    ("ffn_gate_inp", "mixer.gate", Same),
    ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias", Same),
    ("ffn_up_exps", "mixer.experts.{e}.up_proj", Experts),
    ("ffn_down_exps", "mixer.experts.{e}.down_proj", Experts),
    ("ffn_up_shexp", "mixer.shared_experts.up_proj", Same),
    ("ffn_down_shexp", "mixer.shared_experts.down_proj", Same),
];

/// Mamba 2 inside of a layer that has more.
const MAMBA_PART: &[NameMapping] = &[
    ("ssm_in", "mamba.in_proj", Same),
    ("ssm_conv1d", "mamba.conv1d", Same),
    ("ssm_dt.bias", "mamba.dt_bias", Same),
    ("ssm_a", "mamba.A_log", NegExp),
    ("ssm_d", "mamba.D", Flat),
    ("ssm_norm", "mamba.norm", Flat),
    ("ssm_out", "mamba.out_proj", Same),
    ("attn_q", "self_attn.q_proj", Same),
    ("attn_k", "self_attn.k_proj", Same),
    ("ffn_norm", "pre_ff_layernorm", Same),
    ("ffn_gate", "feed_forward.gate_proj", Same),
    ("ffn_up", "feed_forward.up_proj", Same),
    ("ffn_down", "feed_forward.down_proj", Same),
];

const GRANITE_BLOCK: &[NameMapping] = &[
    ("ssm_in", "mamba.in_proj", Same),
    ("ssm_conv1d", "mamba.conv1d", Same),
    ("ssm_dt.bias", "mamba.dt_bias", Same),
    ("ssm_a", "mamba.A_log", NegExp),
    ("ssm_d", "mamba.D", Flat),
    ("ssm_norm", "mamba.norm", Flat),
    ("ssm_out", "mamba.out_proj", Same),
    ("attn_q", "self_attn.q_proj", QueryHeads),
    ("attn_k", "self_attn.k_proj", KeyHeads),
    ("ffn_gate_inp", "block_sparse_moe.router.layer", Same),
    ("ffn_gate_exps", "block_sparse_moe.experts.{e}.gate_proj", Experts),
    ("ffn_up_exps", "block_sparse_moe.experts.{e}.up_proj", Experts),
    ("ffn_down_exps", "block_sparse_moe.experts.{e}.down_proj", Experts),
    ("ffn_gate_shexp", "shared_mlp.gate_proj", Same),
    ("ffn_up_shexp", "shared_mlp.up_proj", Same),
    ("ffn_down_shexp", "shared_mlp.down_proj", Same),
    // Without experts it has the names of a plain feed-forward part.
    ("ffn_gate", "shared_mlp.gate_proj", Same),
    ("ffn_up", "shared_mlp.up_proj", Same),
    ("ffn_down", "shared_mlp.down_proj", Same),
];

/// What Qwen3-Next and Qwen 3.5 have alike.
macro_rules! qwen_block {
    ($($entry:expr,)*) => {
        &[
            $($entry,)*
            ("attn_norm", "input_layernorm", PlusOne),
            ("post_attention_norm", "post_attention_layernorm", PlusOne),
            ("attn_q_norm", "self_attn.q_norm", PlusOne),
            ("attn_k_norm", "self_attn.k_norm", PlusOne),
            ("ssm_norm", "linear_attn.norm", Same),
            ("ffn_gate_inp", "mlp.gate", Same),
            ("ffn_gate_exps", "mlp.experts.{e}.gate_proj", Experts),
            ("ffn_up_exps", "mlp.experts.{e}.up_proj", Experts),
            ("ffn_down_exps", "mlp.experts.{e}.down_proj", Experts),
            ("ffn_gate_shexp", "mlp.shared_expert.gate_proj", Same),
            ("ffn_up_shexp", "mlp.shared_expert.up_proj", Same),
            ("ffn_down_shexp", "mlp.shared_expert.down_proj", Same),
            ("ffn_gate_inp_shexp", "mlp.shared_expert_gate", Same),
        ]
    };
}

/// Value heads stand in another order than that of the key heads.
const QWEN35_BLOCK: &[NameMapping] = qwen_block![
    ("attn_qkv", "linear_attn.in_proj_qkv", ValueHeads(ValueHeadAxis::RowsAfterKeys)),
    ("attn_gate", "linear_attn.in_proj_z", ValueHeads(ValueHeadAxis::Rows)),
    ("ssm_beta", "linear_attn.in_proj_b", ValueHeads(ValueHeadAxis::Rows)),
    ("ssm_alpha", "linear_attn.in_proj_a", ValueHeads(ValueHeadAxis::Rows)),
    ("ssm_conv1d", "linear_attn.conv1d", ValueHeads(ValueHeadAxis::RowsAfterKeys)),
    ("ssm_dt.bias", "linear_attn.dt_bias", ValueHeads(ValueHeadAxis::Rows)),
    ("ssm_a", "linear_attn.A_log", ValueHeads(ValueHeadAxis::Decays)),
    ("ssm_out", "linear_attn.out_proj", ValueHeads(ValueHeadAxis::Columns)),
];

/// As converted since the fused projection is taken apart; what decides on beta and decay stands by key head.
const QWEN3_NEXT_BLOCK: &[NameMapping] = qwen_block![
    ("attn_qkv", "linear_attn.in_proj_qkv", Same),
    ("attn_gate", "linear_attn.in_proj_z", Same),
    ("ssm_ba.weight", "linear_attn.in_proj_{e}.weight", HalvesByKeyHead(["b", "a"])),
    ("ssm_conv1d", "linear_attn.conv1d", Same),
    ("ssm_dt.bias", "linear_attn.dt_bias", Same),
    ("ssm_a", "linear_attn.A_log", NegExp),
    ("ssm_out", "linear_attn.out_proj", Same),
];

/// As the first converter left it.
const QWEN3_NEXT_FUSED_BLOCK: &[NameMapping] = qwen_block![
    ("ssm_in", "linear_attn.in_proj_qkvz", Same),
    ("ssm_ba", "linear_attn.in_proj_ba", Same),
    ("ssm_conv1d", "linear_attn.conv1d", Same),
    ("ssm_dt.bias", "linear_attn.dt_bias", Same),
    ("ssm_a", "linear_attn.A_log", NegExp),
    ("ssm_out", "linear_attn.out_proj", Same),
];

/// What layers with latent attention have but for their experts.
macro_rules! latent_block {
    ($($entry:expr,)*) => {
        &[
            $($entry,)*
            ("attn_q_a", "self_attn.q_a_proj", Same),
            ("attn_q_a_norm", "self_attn.q_a_layernorm", Same),
            ("attn_q_b", "self_attn.q_b_proj", Same),
            ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", Same),
            ("attn_kv_a_norm", "self_attn.kv_a_layernorm", Same),
            ("attn_kv_b", "self_attn.kv_b_proj", Same),
            ("attn_k_b", "self_attn.k_b_proj", TransposedEach),
            ("attn_v_b", "self_attn.v_b_proj", Same),
            ("ffn_gate_inp", "mlp.gate", Same),
            ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", Same),
            ("ffn_gate_shexp", "mlp.shared_experts.gate_proj", Same),
            ("ffn_up_shexp", "mlp.shared_experts.up_proj", Same),
            ("ffn_down_shexp", "mlp.shared_experts.down_proj", Same),
        ]
    };
}

const LATENT_BLOCK: &[NameMapping] = latent_block![
    ("ffn_gate_exps", "mlp.experts.{e}.gate_proj", Experts),
    ("ffn_up_exps", "mlp.experts.{e}.up_proj", Experts),
    ("ffn_down_exps", "mlp.experts.{e}.down_proj", Experts),
];

/// The same with the experts' gates and inner projections in one tensor.
const LATENT_PACKED_BLOCK: &[NameMapping] = latent_block![
    ("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj", Same),
    ("ffn_down_exps.weight", "mlp.experts.down_proj", Same),
];

/// Layers with a delta rule and layers with latent attention.
const KIMI_LINEAR_BLOCK: &[NameMapping] = &[
    ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", Same),
    ("attn_kv_a_norm", "self_attn.kv_a_layernorm", Same),
    ("attn_kv_b", "self_attn.kv_b_proj", Same),
    ("attn_k_b", "self_attn.k_b_proj", TransposedEach),
    ("attn_v_b", "self_attn.v_b_proj", Same),
    ("attn_q_a", "self_attn.q_a_proj", Same),
    ("attn_q_a_norm", "self_attn.q_a_layernorm", Same),
    ("attn_q_b", "self_attn.q_b_proj", Same),
    ("ssm_conv1d_q", "self_attn.q_conv1d", Matrix),
    ("ssm_conv1d_k", "self_attn.k_conv1d", Matrix),
    ("ssm_conv1d_v", "self_attn.v_conv1d", Matrix),
    ("ssm_f_a", "self_attn.f_a_proj", Same),
    ("ssm_f_b", "self_attn.f_b_proj", Same),
    ("ssm_g_a", "self_attn.g_a_proj", Same),
    ("ssm_g_b", "self_attn.g_b_proj", Same),
    ("ssm_beta", "self_attn.b_proj", Same),
    ("ssm_a", "self_attn.A_log", NegExp),
    ("ssm_dt.bias", "self_attn.dt_bias", Same),
    ("ssm_norm", "self_attn.o_norm", Same),
    ("ffn_gate_inp", "block_sparse_moe.gate", Same),
    ("exp_probs_b.bias", "block_sparse_moe.gate.e_score_correction_bias", Same),
    ("ffn_gate_exps", "block_sparse_moe.experts.{e}.w1", Experts),
    ("ffn_up_exps", "block_sparse_moe.experts.{e}.w3", Experts),
    ("ffn_down_exps", "block_sparse_moe.experts.{e}.w2", Experts),
    ("ffn_gate_shexp", "block_sparse_moe.shared_experts.gate_proj", Same),
    ("ffn_up_shexp", "block_sparse_moe.shared_experts.up_proj", Same),
    ("ffn_down_shexp", "block_sparse_moe.shared_experts.down_proj", Same),
];

const GEMMA4_BLOCK: &[NameMapping] = &[
    ("post_attention_norm", "post_attention_layernorm", Same),
    ("ffn_norm", "pre_feedforward_layernorm", Same),
    ("post_ffw_norm", "post_feedforward_layernorm", Same),
    ("pre_ffw_norm_2", "pre_feedforward_layernorm_2", Same),
    ("post_ffw_norm_1", "post_feedforward_layernorm_1", Same),
    ("post_ffw_norm_2", "post_feedforward_layernorm_2", Same),
    ("layer_output_scale.weight", "layer_scalar", Same),
    ("inp_gate", "per_layer_input_gate", Same),
    ("proj", "per_layer_projection", Same),
    ("post_norm", "post_per_layer_input_norm", Same),
    ("ffn_gate_inp.weight", "router.proj.weight", Same),
    ("ffn_gate_inp.scale", "router.scale", Same),
    ("ffn_down_exps.scale", "router.per_expert_scale", Same),
    ("ffn_gate_up_exps.weight", "experts.gate_up_proj", Same),
    ("ffn_down_exps.weight", "experts.down_proj", Same),
];

pub(super) fn family(arch: &str, kind: ArchitectureVariant) -> Option<TensorNameMap> {
    let of = |top, layers, block, llama_block| Some(TensorNameMap { top, layers, block, llama_block });
    match arch {
        "mamba" => of(BACKBONE_TOP, "backbone.layers", MAMBA_BLOCK, false),
        "mamba2" => of(BACKBONE_TOP, "backbone.layers", MAMBA2_BLOCK, false),
        "nemotron_h" | "nemotron_h_moe" => of(BACKBONE_TOP, "backbone.layers", NEMOTRON_H_BLOCK, false),
        "falcon-h1" => of(FALCON_H1_TOP, "model.layers", MAMBA_PART, true),
        "granitehybrid" => of(LLAMA_TOP, "model.layers", GRANITE_BLOCK, true),
        "qwen35" | "qwen35moe" => of(GEMMA_TOP, "model.layers", QWEN35_BLOCK, true),
        "qwen3next" if kind.fused_qkvz => of(GEMMA_TOP, "model.layers", QWEN3_NEXT_FUSED_BLOCK, true),
        "qwen3next" => of(GEMMA_TOP, "model.layers", QWEN3_NEXT_BLOCK, true),
        "deepseek2" | "mistral4" if kind.packed_experts => {
            of(LLAMA_TOP, "model.layers", LATENT_PACKED_BLOCK, true)
        }
        "deepseek2" | "mistral4" => of(LLAMA_TOP, "model.layers", LATENT_BLOCK, true),
        "kimi-linear" => of(LLAMA_TOP, "model.layers", KIMI_LINEAR_BLOCK, true),
        "gemma4" => of(GEMMA4_TOP, "model.layers", GEMMA4_BLOCK, true),
        _ => None,
    }
}

/// Where the value heads stand in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum ValueHeadAxis {
    Rows,
    /// Rows behind those of queries and keys.
    RowsAfterKeys,
    Columns,
    /// A vector of decays, changed as [`NegExp`] says.
    Decays,
}

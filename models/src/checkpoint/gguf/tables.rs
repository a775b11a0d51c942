//! What tensors of each architecture are called in GGUF and in the Hugging Face checkpoint, and what llama.cpp's converter
//! did to them.

mod encoders;
mod hybrids;

pub(super) use hybrids::ValueHeadAxis;

/// What was done to a tensor, and is undone by reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TensorConversion {
    Same,
    /// Rows of each query head were interleaved: (half, i) became (i, half).
    QueryHeads,
    /// The same for key heads.
    KeyHeads,
    /// One was added to the weight of a norm.
    PlusOne,
    /// Conv1D of GPT-2 was transposed.
    Transposed,
    /// Rows of (head, q/k/v, i) became (q/k/v, head, i).
    HeadsInside,
    /// Falcon: rows of (group, q.../k/v, i) became all q, all k, all v.
    FalconGroups,
    /// All experts of a layer were stacked; the name has a place for the expert.
    Experts,
    /// Vectors of all heads were stacked; the name has a place for the head.
    Heads,
    /// Vectors were stacked that have these names, for which the name has a place.
    Stacked(&'static [&'static str]),
    /// A vector that was `[heads, size]`.
    SplitHeads,
    /// The matrices of a tensor of three axes were transposed, one by one.
    TransposedEach,
    /// The logarithm of decays became what they are used as: `-exp(x)`.
    NegExp,
    /// A vector that got a shape of its own.
    Flat,
    /// A matrix that got axes of one element.
    Matrix,
    /// Value heads that stood by key head take turns; the axis along which they stand.
    ValueHeads(ValueHeadAxis),
    /// Rows that stand by key head in two halves each, which have these names, for which the name has a place.
    HalvesByKeyHead([&'static str; 2]),
    /// Divided by `2^(layer / rescale_every)` against overflow (RWKV-6).
    Rescaled,
}

use TensorConversion::*;

use crate::families::rwkv6::naming::RWKV6_MIXES;

/// GGUF name, Hugging Face name, change; `{e}` in a name is what [`TensorConversion`] tells: an expert, a head, a part. Names in a
/// layer come without its number, and without `.weight` or `.bias` where both sides have it.
pub(super) type NameMapping = (&'static str, &'static str, TensorConversion);

const LLAMA_TOP: &[NameMapping] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.norm.weight", Same),
    ("output_norm.bias", "model.norm.bias", Same),
    ("output.weight", "lm_head.weight", Same),
];

const GPT2_TOP: &[NameMapping] = &[
    ("token_embd.weight", "transformer.wte.weight", Same),
    ("position_embd.weight", "transformer.wpe.weight", Same),
    ("output_norm.weight", "transformer.ln_f.weight", Same),
    ("output_norm.bias", "transformer.ln_f.bias", Same),
    ("output.weight", "lm_head.weight", Same),
];

const GEMMA_TOP: &[NameMapping] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.norm.weight", PlusOne),
    ("output.weight", "lm_head.weight", Same),
    ("dense_2.weight", "2_Dense.linear.weight", Same),
    ("dense_3.weight", "3_Dense.linear.weight", Same),
];

/// The parts that Llama-like blocks name alike, without the layer.
pub(super) const LLAMA_BLOCK: &[NameMapping] = &[
    ("attn_norm", "input_layernorm", Same),
    ("attn_q", "self_attn.q_proj", Same),
    ("attn_k", "self_attn.k_proj", Same),
    ("attn_v", "self_attn.v_proj", Same),
    ("attn_output", "self_attn.o_proj", Same),
    ("attn_q_norm", "self_attn.q_norm", Same),
    ("attn_k_norm", "self_attn.k_norm", Same),
    ("attn_qkv", "self_attn.qkv_proj", Same),
    ("ffn_norm", "post_attention_layernorm", Same),
    ("ffn_gate", "mlp.gate_proj", Same),
    ("ffn_up", "mlp.up_proj", Same),
    ("ffn_down", "mlp.down_proj", Same),
];

/// Queries and keys of Llama: what the converter does for rotary embedding of neighbouring elements.
const INTERLEAVED: &[NameMapping] =
    &[("attn_q", "self_attn.q_proj", QueryHeads), ("attn_k", "self_attn.k_proj", KeyHeads)];

const RWKV6_BLOCK: &[NameMapping] = &[
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
];

/// The thin matrices lie as flash-linear-attention stores them.
const RWKV7_BLOCK: &[NameMapping] = &[
    ("attn_norm", "attn_norm", Same),
    ("attn_norm_2", "ffn_norm", Same),
    ("time_mix_lerp_fused.weight", "attn.x_{e}", Stacked(&["r", "w", "k", "v", "a", "g"])),
    ("time_mix_w0.weight", "attn.w_lora.lora.2.bias", Same),
    ("time_mix_w1.weight", "attn.w_lora.lora.0.weight", Same),
    ("time_mix_w2.weight", "attn.w_lora.lora.2.weight", Same),
    ("time_mix_a0.weight", "attn.a_lora.lora.2.bias", Same),
    ("time_mix_a1.weight", "attn.a_lora.lora.0.weight", Same),
    ("time_mix_a2.weight", "attn.a_lora.lora.2.weight", Same),
    ("time_mix_v0.weight", "attn.v_lora.lora.2.bias", Same),
    ("time_mix_v1.weight", "attn.v_lora.lora.0.weight", Same),
    ("time_mix_v2.weight", "attn.v_lora.lora.2.weight", Same),
    ("time_mix_g1.weight", "attn.g_lora.lora.0.weight", Same),
    ("time_mix_g2.weight", "attn.g_lora.lora.2.weight", Same),
    ("time_mix_k_k.weight", "attn.k_k", Same),
    ("time_mix_k_a.weight", "attn.k_a", Same),
    ("time_mix_r_k.weight", "attn.r_k", SplitHeads),
    ("time_mix_receptance", "attn.r_proj", Same),
    ("time_mix_key", "attn.k_proj", Same),
    ("time_mix_value", "attn.v_proj", Same),
    ("time_mix_output", "attn.o_proj", Same),
    ("time_mix_ln", "attn.g_norm", Same),
    ("channel_mix_lerp_k.weight", "ffn.x_k", Same),
    ("channel_mix_key", "ffn.key", Same),
    ("channel_mix_value", "ffn.value", Same),
];

const LFM2_TOP: &[NameMapping] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("token_embd_norm.weight", "model.embedding_norm.weight", Same),
    // Newer files call it by its place.
    ("output_norm.weight", "model.embedding_norm.weight", Same),
    ("output.weight", "lm_head.weight", Same),
];

const LFM2_BLOCK: &[NameMapping] = &[
    ("attn_norm", "operator_norm", Same),
    ("shortconv.conv", "conv.conv", Same),
    ("shortconv.in_proj", "conv.in_proj", Same),
    ("shortconv.out_proj", "conv.out_proj", Same),
    ("attn_q_norm", "self_attn.q_layernorm", Same),
    ("attn_k_norm", "self_attn.k_layernorm", Same),
    ("attn_output", "self_attn.out_proj", Same),
    ("ffn_norm", "ffn_norm", Same),
    ("ffn_gate", "feed_forward.w1", Same),
    ("ffn_up", "feed_forward.w3", Same),
    ("ffn_down", "feed_forward.w2", Same),
    ("ffn_gate_inp", "feed_forward.gate", Same),
    ("exp_probs_b.bias", "feed_forward.expert_bias", Same),
    ("ffn_gate_exps", "feed_forward.experts.{e}.w1", Experts),
    ("ffn_down_exps", "feed_forward.experts.{e}.w2", Experts),
    ("ffn_up_exps", "feed_forward.experts.{e}.w3", Experts),
];

/// Tensors that hold configuration, not weights.
pub(super) const CONFIGURATION: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// One family: names outside of layers; the prefix of layer names; names in a layer that differ from [`LLAMA_BLOCK`] or
/// stand alone.
pub(super) struct TensorNameMap {
    pub top: &'static [NameMapping],
    pub layers: &'static str,
    pub block: &'static [NameMapping],
    /// Whether [`LLAMA_BLOCK`] holds for the rest.
    pub llama_block: bool,
}

/// Files of one architecture that stand for different families.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ArchitectureVariant {
    /// `expert_count` is above 0.
    pub experts: bool,
    /// Queries, keys and values have projections of their own.
    pub separate_qkv: bool,
    /// Those of the delta rule are one tensor with their gate.
    pub fused_qkvz: bool,
    /// Gates and inner projections of experts are one tensor.
    pub packed_experts: bool,
}

pub(super) fn tensor_name_map(arch: &str, kind: ArchitectureVariant) -> Option<TensorNameMap> {
    let llama = |block: &'static [NameMapping]| TensorNameMap {
        top: LLAMA_TOP,
        layers: "model.layers",
        block,
        llama_block: true,
    };
    Some(match arch {
        "llama" if kind.experts => llama(&[
            ("attn_q", "self_attn.q_proj", QueryHeads),
            ("attn_k", "self_attn.k_proj", KeyHeads),
            ("ffn_gate_inp", "block_sparse_moe.gate", Same),
            ("ffn_gate_exps", "block_sparse_moe.experts.{e}.w1", Experts),
            ("ffn_down_exps", "block_sparse_moe.experts.{e}.w2", Experts),
            ("ffn_up_exps", "block_sparse_moe.experts.{e}.w3", Experts),
        ]),
        // InternLM 2's fused projection was taken apart; what is left is Llama under other names.
        "llama" | "granite" | "baichuan" | "internlm2" | "smollm3" | "mistral3" => llama(INTERLEAVED),
        "qwen2" | "qwen3" | "cohere2" => llama(&[]),
        "gpt-oss" => llama(&[
            ("post_attention_norm", "post_attention_layernorm", Same),
            ("attn_sinks.weight", "self_attn.sinks", Same),
            ("ffn_gate_inp", "mlp.router", Same),
            ("ffn_gate_exps.weight", "mlp.experts.gate_proj", Same),
            ("ffn_gate_exps.bias", "mlp.experts.gate_proj_bias", Same),
            ("ffn_up_exps.weight", "mlp.experts.up_proj", Same),
            ("ffn_up_exps.bias", "mlp.experts.up_proj_bias", Same),
            ("ffn_down_exps.weight", "mlp.experts.down_proj", Same),
            ("ffn_down_exps.bias", "mlp.experts.down_proj_bias", Same),
        ]),
        "glm4moe" => llama(&[
            ("post_attention_norm", "post_attention_layernorm", Same),
            ("ffn_gate_inp", "mlp.gate", Same),
            ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", Same),
            ("ffn_gate_exps", "mlp.experts.{e}.gate_proj", Experts),
            ("ffn_down_exps", "mlp.experts.{e}.down_proj", Experts),
            ("ffn_up_exps", "mlp.experts.{e}.up_proj", Experts),
            ("ffn_gate_shexp", "mlp.shared_experts.gate_proj", Same),
            ("ffn_down_shexp", "mlp.shared_experts.down_proj", Same),
            ("ffn_up_shexp", "mlp.shared_experts.up_proj", Same),
            ("nextn.eh_proj", "eh_proj", Same),
            ("nextn.enorm", "enorm", Same),
            ("nextn.hnorm", "hnorm", Same),
            ("nextn.embed_tokens", "embed_tokens", Same),
            ("nextn.shared_head_head", "shared_head.head", Same),
            ("nextn.shared_head_norm", "shared_head.norm", Same),
        ]),
        "minimax-m2" => llama(&[
            ("ffn_gate_inp", "block_sparse_moe.gate", Same),
            ("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias", Same),
            ("ffn_gate_exps", "block_sparse_moe.experts.{e}.w1", Experts),
            ("ffn_down_exps", "block_sparse_moe.experts.{e}.w2", Experts),
            ("ffn_up_exps", "block_sparse_moe.experts.{e}.w3", Experts),
        ]),
        "lfm2" | "lfm2moe" => TensorNameMap { top: LFM2_TOP, block: LFM2_BLOCK, ..llama(&[]) },
        "qwen3moe" => llama(&[
            ("ffn_gate_inp", "mlp.gate", Same),
            ("ffn_gate_exps", "mlp.experts.{e}.gate_proj", Experts),
            ("ffn_down_exps", "mlp.experts.{e}.down_proj", Experts),
            ("ffn_up_exps", "mlp.experts.{e}.up_proj", Experts),
        ]),
        "gemma" => TensorNameMap {
            top: GEMMA_TOP,
            ..llama(&[
                ("attn_norm", "input_layernorm", PlusOne),
                ("ffn_norm", "post_attention_layernorm", PlusOne),
            ])
        },
        "bert" => encoders::BERT,
        "modern-bert" => encoders::MODERN_BERT,
        "nomic-bert" => encoders::NOMIC_BERT,
        "t5" => encoders::T5,
        "gemma2" | "gemma3" | "gemma-embedding" => TensorNameMap {
            top: GEMMA_TOP,
            ..llama(&[
                ("attn_norm", "input_layernorm", PlusOne),
                ("post_attention_norm", "post_attention_layernorm", PlusOne),
                ("ffn_norm", "pre_feedforward_layernorm", PlusOne),
                ("post_ffw_norm", "post_feedforward_layernorm", PlusOne),
                ("attn_q_norm", "self_attn.q_norm", PlusOne),
                ("attn_k_norm", "self_attn.k_norm", PlusOne),
            ])
        },
        "phi3" => llama(&[("ffn_up", "mlp.gate_up_proj", Same)]),
        "starcoder2" => llama(&[("ffn_up", "mlp.c_fc", Same), ("ffn_down", "mlp.c_proj", Same)]),
        "stablelm" => llama(&[
            ("attn_q_norm.weight", "self_attn.q_layernorm.norms.{e}.weight", Heads),
            ("attn_k_norm.weight", "self_attn.k_layernorm.norms.{e}.weight", Heads),
        ]),
        "olmo2" | "exaone4" => llama(&[
            ("post_attention_norm", "post_attention_layernorm", Same),
            ("post_ffw_norm", "post_feedforward_layernorm", Same),
        ]),
        "glm4" => llama(&[
            ("ffn_up", "mlp.gate_up_proj", Same),
            ("post_attention_norm", "post_self_attn_layernorm", Same),
            ("post_ffw_norm", "post_mlp_layernorm", Same),
        ]),
        "qwen" => TensorNameMap {
            top: &[
                ("token_embd.weight", "transformer.wte.weight", Same),
                ("output_norm.weight", "transformer.ln_f.weight", Same),
                ("output.weight", "lm_head.weight", Same),
            ],
            layers: "transformer.h",
            block: &[
                ("attn_norm", "ln_1", Same),
                ("attn_qkv", "attn.c_attn", Same),
                ("attn_output", "attn.c_proj", Same),
                ("ffn_norm", "ln_2", Same),
                ("ffn_up", "mlp.w1", Same),
                ("ffn_gate", "mlp.w2", Same),
                ("ffn_down", "mlp.c_proj", Same),
            ],
            llama_block: false,
        },
        "starcoder" => TensorNameMap {
            top: GPT2_TOP,
            layers: "transformer.h",
            block: &[
                ("attn_norm", "ln_1", Same),
                ("attn_qkv", "attn.c_attn", Same),
                ("attn_output", "attn.c_proj", Same),
                ("ffn_norm", "ln_2", Same),
                ("ffn_up", "mlp.c_fc", Same),
                ("ffn_down", "mlp.c_proj", Same),
            ],
            llama_block: false,
        },
        "gpt2" => TensorNameMap {
            top: GPT2_TOP,
            layers: "transformer.h",
            block: &[
                ("attn_norm", "ln_1", Same),
                ("attn_qkv", "attn.c_attn", Transposed),
                ("attn_output", "attn.c_proj", Transposed),
                ("ffn_norm", "ln_2", Same),
                ("ffn_up", "mlp.c_fc", Transposed),
                ("ffn_down", "mlp.c_proj", Transposed),
            ],
            llama_block: false,
        },
        "gptneox" => TensorNameMap {
            top: &[
                ("token_embd.weight", "gpt_neox.embed_in.weight", Same),
                ("output_norm.weight", "gpt_neox.final_layer_norm.weight", Same),
                ("output_norm.bias", "gpt_neox.final_layer_norm.bias", Same),
                ("output.weight", "embed_out.weight", Same),
            ],
            layers: "gpt_neox.layers",
            block: &[
                ("attn_norm", "input_layernorm", Same),
                ("attn_qkv", "attention.query_key_value", HeadsInside),
                ("attn_output", "attention.dense", Same),
                ("ffn_norm", "post_attention_layernorm", Same),
                ("ffn_up", "mlp.dense_h_to_4h", Same),
                ("ffn_down", "mlp.dense_4h_to_h", Same),
            ],
            llama_block: false,
        },
        "bloom" => TensorNameMap {
            top: &[
                ("token_embd.weight", "transformer.word_embeddings.weight", Same),
                ("token_embd_norm.weight", "transformer.word_embeddings_layernorm.weight", Same),
                ("token_embd_norm.bias", "transformer.word_embeddings_layernorm.bias", Same),
                ("output_norm.weight", "transformer.ln_f.weight", Same),
                ("output_norm.bias", "transformer.ln_f.bias", Same),
                ("output.weight", "lm_head.weight", Same),
            ],
            layers: "transformer.h",
            block: &[
                ("attn_norm", "input_layernorm", Same),
                ("attn_qkv", "self_attention.query_key_value", HeadsInside),
                ("attn_output", "self_attention.dense", Same),
                ("ffn_norm", "post_attention_layernorm", Same),
                ("ffn_up", "mlp.dense_h_to_4h", Same),
                ("ffn_down", "mlp.dense_4h_to_h", Same),
            ],
            llama_block: false,
        },
        "falcon" => TensorNameMap {
            top: &[
                ("token_embd.weight", "transformer.word_embeddings.weight", Same),
                ("output_norm.weight", "transformer.ln_f.weight", Same),
                ("output_norm.bias", "transformer.ln_f.bias", Same),
                ("output.weight", "lm_head.weight", Same),
            ],
            layers: "transformer.h",
            block: &[
                ("attn_norm", "input_layernorm", Same),
                ("attn_norm_2", "ln_mlp", Same),
                ("attn_qkv", "self_attention.query_key_value", FalconGroups),
                ("attn_output", "self_attention.dense", Same),
                ("ffn_up", "mlp.dense_h_to_4h", Same),
                ("ffn_down", "mlp.dense_4h_to_h", Same),
            ],
            llama_block: false,
        },
        "mpt" => TensorNameMap {
            top: &[
                ("token_embd.weight", "transformer.wte.weight", Same),
                ("output_norm.weight", "transformer.norm_f.weight", Same),
                ("output_norm.bias", "transformer.norm_f.bias", Same),
                ("output.weight", "lm_head.weight", Same),
            ],
            layers: "transformer.blocks",
            block: &[
                ("attn_norm", "norm_1", Same),
                ("attn_qkv", "attn.Wqkv", Same),
                ("attn_output", "attn.out_proj", Same),
                ("attn_q_norm", "attn.q_ln", Same),
                ("attn_k_norm", "attn.k_ln", Same),
                ("ffn_norm", "norm_2", Same),
                ("ffn_up", "ffn.up_proj", Same),
                ("ffn_down", "ffn.down_proj", Same),
            ],
            llama_block: false,
        },
        "rwkv6" => TensorNameMap {
            top: &[
                ("token_embd.weight", "rwkv.embeddings.weight", Same),
                ("token_embd_norm.weight", "rwkv.blocks.0.pre_ln.weight", Same),
                ("token_embd_norm.bias", "rwkv.blocks.0.pre_ln.bias", Same),
                ("output_norm.weight", "rwkv.ln_out.weight", Same),
                ("output_norm.bias", "rwkv.ln_out.bias", Same),
                ("output.weight", "head.weight", Same),
            ],
            layers: "rwkv.blocks",
            block: RWKV6_BLOCK,
            llama_block: false,
        },
        "rwkv7" => TensorNameMap {
            top: &[
                ("token_embd.weight", "model.embeddings.weight", Same),
                ("token_embd_norm.weight", "model.layers.0.pre_norm.weight", Same),
                ("token_embd_norm.bias", "model.layers.0.pre_norm.bias", Same),
                ("output_norm.weight", "model.norm.weight", Same),
                ("output_norm.bias", "model.norm.bias", Same),
                ("output.weight", "lm_head.weight", Same),
            ],
            layers: "model.layers",
            block: RWKV7_BLOCK,
            llama_block: false,
        },
        // The Hugging Face class of GLM-4.
        "chatglm" if kind.separate_qkv => llama(&[("ffn_up", "mlp.gate_up_proj", Same)]),
        "chatglm" => TensorNameMap {
            top: &[
                ("token_embd.weight", "transformer.embedding.word_embeddings.weight", Same),
                ("output_norm.weight", "transformer.encoder.final_layernorm.weight", Same),
                ("output.weight", "transformer.output_layer.weight", Same),
            ],
            layers: "transformer.encoder.layers",
            block: &[
                ("attn_norm", "input_layernorm", Same),
                ("attn_qkv", "self_attention.query_key_value", Same),
                ("attn_output", "self_attention.dense", Same),
                ("ffn_norm", "post_attention_layernorm", Same),
                ("ffn_up", "mlp.dense_h_to_4h", Same),
                ("ffn_down", "mlp.dense_4h_to_h", Same),
            ],
            llama_block: false,
        },
        _ => return hybrids::family(arch, kind),
    })
}

"""Tiny configurations whose fields have other values than the published ones: groups, heads and widths that do not divide,
activations, orders of layers, corrections of the choice of experts below zero, factors, biases, rotary embeddings.

`tiny_golden.py` makes reference cases of them. A field that a definition guesses is seen in one of these."""

import transformers as hf

SIZES = dict(vocab_size=96, max_position_embeddings=160, pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype="bfloat16")


def yarn(original=16, **more):
    return {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 6.0, "beta_slow": 0.6,
            "original_max_position_embeddings": original, **more}


def theta(base, **more):
    return {"rope_type": "default", "rope_theta": base, **more}


LATENT = dict(SIZES, hidden_size=44, intermediate_size=52, moe_intermediate_size=12, num_hidden_layers=3, num_attention_heads=3,
              num_key_value_heads=3, kv_lora_rank=20, q_lora_rank=14, qk_rope_head_dim=6, qk_nope_head_dim=10, v_head_dim=9,
              n_routed_experts=12, num_experts_per_tok=3, n_shared_experts=2, n_group=4, topk_group=1, first_k_dense_replace=1,
              routed_scaling_factor=1.7, rms_norm_eps=1e-3)

MAMBA = dict(mamba_n_heads=6, mamba_d_head=12, mamba_n_groups=3, mamba_d_state=10, mamba_d_conv=3, mamba_chunk_size=8,
             time_step_limit=(0.05, 0.9))

DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=7, linear_value_head_dim=10,
             linear_conv_kernel_dim=3)

QWEN = dict(SIZES, **DELTA, hidden_size=40, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=20,
            hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-3, attention_bias=True,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            rope_parameters=theta(3000.0, partial_rotary_factor=0.5))

EXPERTS = dict(num_experts=7, num_experts_per_tok=3, moe_intermediate_size=12, shared_expert_intermediate_size=20)

LLAMA = dict(SIZES, hidden_size=40, intermediate_size=52, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2)

VARIED = {
    "deepseek-v3-varied": lambda: hf.DeepseekV3Config(
        **LATENT, attention_bias=True, rope_interleave=False, hidden_act="gelu", norm_topk_prob=False,
        rope_parameters=yarn(mscale=0.7, mscale_all_dim=0.9)),
    "deepseek-v3-plain": lambda: hf.DeepseekV3Config(
        **{**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_routed_experts": 7}, norm_topk_prob=True,
        rope_parameters=yarn()),
    "deepseek-v2-varied": lambda: hf.DeepseekV2Config(
        **{**LATENT, "topk_group": 2, "hidden_size": 48}, attention_bias=True, hidden_act="gelu", topk_method="group_limited_greedy",
        rope_parameters=yarn(mscale=0.7, mscale_all_dim=0.9)),
    "glm4-moe-lite-varied": lambda: hf.Glm4MoeLiteConfig(
        **{**LATENT, "n_group": 3, "topk_group": 2, "first_k_dense_replace": None}, hidden_act="gelu",
        mlp_layer_types=["sparse", "dense", "sparse"], rope_interleave=False, rope_parameters=theta(3000.0)),
    "glm4-moe-varied": lambda: hf.Glm4MoeConfig(
        **LLAMA, head_dim=12, attention_bias=True, use_qk_norm=True, hidden_act="gelu", moe_intermediate_size=12,
        n_routed_experts=12, num_experts_per_tok=3, n_shared_experts=2, n_group=4, topk_group=1, first_k_dense_replace=1,
        norm_topk_prob=False, routed_scaling_factor=1.7, rms_norm_eps=1e-3,
        rope_parameters=theta(3000.0, partial_rotary_factor=0.34)),
    "kimi-linear-varied": lambda: hf.KimiLinearConfig(
        **{k: v for k, v in LATENT.items() if k not in ("n_routed_experts", "first_k_dense_replace")}, num_local_experts=12,
        hidden_act="gelu", attention_bias=True, norm_topk_prob=False,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"], linear_head_dim=10, linear_num_heads=3, linear_conv_kernel_dim=3),
    "qwen3.5-varied": lambda: hf.Qwen3_5TextConfig(**QWEN, intermediate_size=52, tie_word_embeddings=True),
    "qwen3.5-moe-varied": lambda: hf.Qwen3_5MoeTextConfig(**QWEN, **EXPERTS),
    "qwen3-next-varied": lambda: hf.Qwen3NextConfig(
        **QWEN, **EXPERTS, intermediate_size=52, decoder_sparse_step=2, mlp_only_layers=[2], norm_topk_prob=False),
    "gpt-oss-varied": lambda: hf.GptOssConfig(
        **{**LLAMA, "intermediate_size": 12}, head_dim=10, num_local_experts=5, num_experts_per_tok=2, swiglu_alpha=2.3, swiglu_limit=0.9,
        attention_bias=False, sliding_window=7, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rms_norm_eps=1e-3, rope_parameters=yarn(truncate=False)),
    "granite4-varied": lambda: hf.GraniteMoeHybridConfig(
        **{**LLAMA, "hidden_size": 36, "intermediate_size": 12, "num_hidden_layers": 4}, **MAMBA, mamba_expand=2, mamba_conv_bias=False,
        mamba_proj_bias=True, hidden_act="gelu", attention_bias=True, num_local_experts=7, num_experts_per_tok=3,
        shared_intermediate_size=28, layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        position_embedding_type="rope", embedding_multiplier=7.0, attention_multiplier=0.13, residual_multiplier=0.31,
        logits_scaling=0.4, rms_norm_eps=1e-3, tie_word_embeddings=True, rope_parameters=theta(3000.0)),
    "nemotron-h-varied": lambda: hf.NemotronHConfig(
        **SIZES, hidden_size=40, intermediate_size=52, layers_block_type=["moe", "mamba", "mlp", "attention"],
        num_attention_heads=6, num_key_value_heads=2, head_dim=10, mlp_bias=True, mlp_hidden_act="gelu",
        mamba_hidden_act="relu", mamba_num_heads=6, mamba_head_dim=14, n_groups=3, ssm_state_size=10, conv_kernel=3, expand=3,
        use_conv_bias=False, use_bias=True, time_step_min=0.05, n_routed_experts=12, num_experts_per_tok=3,
        moe_intermediate_size=12, moe_shared_expert_intermediate_size=20, moe_latent_size=24, n_group=4, topk_group=1,
        norm_topk_prob=False, routed_scaling_factor=1.7, layer_norm_epsilon=1e-3, chunk_size=8),
    "falcon-h1-varied": lambda: hf.FalconH1Config(
        **{**LLAMA, "num_hidden_layers": 2}, **MAMBA, mamba_d_ssm=72, mamba_conv_bias=False, mamba_proj_bias=True,
        projectors_bias=True, mamba_rms_norm=True, mamba_norm_before_gate=False, hidden_act="gelu", attention_bias=True,
        mlp_bias=True, lm_head_multiplier=0.7, embedding_multiplier=3.0, mlp_multipliers=[1.3, 0.8], key_multiplier=0.6,
        attention_out_multiplier=1.2, attention_in_multiplier=0.9, ssm_multipliers=[0.7, 1.1, 0.9, 1.3, 0.8],
        ssm_in_multiplier=1.4, ssm_out_multiplier=0.6, rms_norm_eps=1e-3, rope_parameters=theta(3000.0)),
    "falcon-h1-norm-first": lambda: hf.FalconH1Config(
        **{**LLAMA, "num_hidden_layers": 2}, **MAMBA, mamba_d_ssm=72, mamba_rms_norm=True, mamba_norm_before_gate=True,
        rope_parameters=theta(3000.0)),
    "mamba2-varied": lambda: hf.Mamba2Config(
        **{k: v for k, v in SIZES.items() if k != "max_position_embeddings"}, hidden_size=40, num_hidden_layers=2, expand=2,
        num_heads=8, head_dim=10, n_groups=4, state_size=10, conv_kernel=3, use_bias=True, use_conv_bias=False,
        hidden_act="gelu", time_step_limit=(0.05, 0.9), chunk_size=8, layer_norm_epsilon=1e-3, tie_word_embeddings=True),
    "mamba-varied": lambda: hf.MambaConfig(
        **{k: v for k, v in SIZES.items() if k != "max_position_embeddings"}, hidden_size=40, num_hidden_layers=2, expand=3,
        state_size=6, conv_kernel=3, use_bias=False, use_conv_bias=False, hidden_act="gelu", time_step_rank=5,
        layer_norm_epsilon=1e-3, tie_word_embeddings=False),
    "lfm2-varied": lambda: hf.Lfm2Config(
        **LLAMA, norm_eps=1e-3, conv_bias=True, conv_L_cache=4, block_multiple_of=12, block_ffn_dim_multiplier=1.3,
        block_auto_adjust_ff_dim=True, layer_types=["full_attention", "conv", "conv"], tie_word_embeddings=False,
        rope_parameters=theta(3000.0)),
    "lfm2-moe-varied": lambda: hf.Lfm2MoeConfig(
        **LLAMA, norm_eps=1e-3, conv_bias=True, conv_L_cache=4, num_dense_layers=1, num_experts=7, num_experts_per_tok=3,
        moe_intermediate_size=12, use_expert_bias=True, routed_scaling_factor=1.7, norm_topk_prob=False,
        layer_types=["conv", "full_attention", "conv"], rope_parameters=theta(3000.0)),
    "gemma3-varied": lambda: hf.Gemma3TextConfig(
        **{**LLAMA, "hidden_size": 42}, head_dim=14, hidden_activation="silu", attention_bias=True, query_pre_attn_scalar=29,
        sliding_window=9, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        final_logit_softcapping=5.0, rms_norm_eps=1e-3, tie_word_embeddings=False,
        rope_parameters={"sliding_attention": theta(700.0), "full_attention": {
            "rope_type": "linear", "factor": 3.0, "rope_theta": 30000.0}}),
    "gemma2-varied": lambda: hf.Gemma2Config(
        **{**LLAMA, "hidden_size": 42}, head_dim=14, hidden_activation="silu", attention_bias=True, query_pre_attn_scalar=29,
        sliding_window=9, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        final_logit_softcapping=5.0, attn_logit_softcapping=3.0, rms_norm_eps=1e-3, rope_parameters=theta(3000.0)),
    "gemma4-varied": lambda: hf.Gemma4TextConfig(
        **{**LLAMA, "num_hidden_layers": 4}, head_dim=10, global_head_dim=16, num_global_key_value_heads=3,
        attention_k_eq_v=True, hidden_activation="silu", attention_bias=True, sliding_window=9,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=1, use_double_wide_mlp=True, hidden_size_per_layer_input=6, vocab_size_per_layer_input=96,
        tie_word_embeddings=False, enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=12, final_logit_softcapping=5.0,
        rms_norm_eps=1e-3, rope_parameters={
            "sliding_attention": theta(700.0),
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 30000.0}}),
    "cohere2-varied": lambda: hf.Cohere2Config(
        **{**LLAMA, "hidden_size": 48}, hidden_act="gelu", attention_bias=True, logit_scale=0.31, layer_norm_eps=1e-3,
        sliding_window=9, layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        tie_word_embeddings=False, rope_parameters=theta(3000.0)),
    "phi3-varied": lambda: hf.Phi3Config(
        **{**LLAMA, "hidden_size": 48}, hidden_act="gelu", sliding_window=9, rms_norm_eps=1e-3, tie_word_embeddings=True,
        original_max_position_embeddings=160, rope_parameters=theta(3000.0, partial_rotary_factor=0.5)),
    "olmo3-varied": lambda: hf.Olmo3Config(
        **{**LLAMA, "hidden_size": 48}, hidden_act="gelu", attention_bias=True, sliding_window=9, rms_norm_eps=1e-3,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"], tie_word_embeddings=True,
        rope_parameters={"full_attention": yarn(), "sliding_attention": theta(700.0)}),
    "olmo2-varied": lambda: hf.Olmo2Config(
        **{**LLAMA, "hidden_size": 48}, hidden_act="gelu", attention_bias=True, rms_norm_eps=1e-3, rope_parameters=yarn()),
    "minimax-m2-varied": lambda: hf.MiniMaxM2Config(
        **LLAMA, head_dim=10, hidden_act="gelu", num_local_experts=7, num_experts_per_tok=3, rms_norm_eps=1e-3,
        tie_word_embeddings=True, rope_parameters=theta(3000.0, partial_rotary_factor=0.6)),
    "llama-varied": lambda: hf.LlamaConfig(
        **{**LLAMA, "hidden_size": 48}, head_dim=10, hidden_act="gelu", attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3,
        tie_word_embeddings=True, rope_parameters={
            "rope_type": "llama3", "rope_theta": 3000.0, "factor": 3.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0,
            "original_max_position_embeddings": 24}),
    "mistral-varied": lambda: hf.MistralConfig(
        **LLAMA, head_dim=10, hidden_act="gelu", sliding_window=9, rms_norm_eps=1e-3, tie_word_embeddings=True,
        rope_parameters=yarn()),
    "mixtral-varied": lambda: hf.MixtralConfig(
        **LLAMA, head_dim=10, hidden_act="gelu", sliding_window=9, rms_norm_eps=1e-3, num_local_experts=5,
        num_experts_per_tok=3, rope_parameters=theta(3000.0)),
    "starcoder2-varied": lambda: hf.Starcoder2Config(
        **{**LLAMA, "hidden_size": 48}, hidden_act="silu", sliding_window=9, norm_epsilon=1e-3, use_bias=False,
        tie_word_embeddings=False, rope_parameters=theta(3000.0)),
    "stablelm-varied": lambda: hf.StableLmConfig(
        **{**LLAMA, "hidden_size": 48}, hidden_act="gelu", layer_norm_eps=1e-3, use_qkv_bias=True, qk_layernorm=True,
        use_parallel_residual=False, tie_word_embeddings=True, rope_parameters=theta(3000.0, partial_rotary_factor=0.5)),
    "qwen2-varied": lambda: hf.Qwen2Config(
        **{**LLAMA, "hidden_size": 48}, hidden_act="gelu", rms_norm_eps=1e-3, use_sliding_window=True, sliding_window=9,
        max_window_layers=1, rope_parameters=theta(3000.0)),
    "qwen3-varied": lambda: hf.Qwen3Config(
        **LLAMA, head_dim=10, hidden_act="gelu", rms_norm_eps=1e-3, attention_bias=True, use_sliding_window=True,
        sliding_window=9, layer_types=["full_attention", "sliding_attention", "full_attention"],
        tie_word_embeddings=True, rope_parameters=theta(3000.0)),
    "qwen3-moe-varied": lambda: hf.Qwen3MoeConfig(
        **LLAMA, head_dim=10, hidden_act="gelu", rms_norm_eps=1e-3, attention_bias=True, use_sliding_window=True,
        sliding_window=9, max_window_layers=1, decoder_sparse_step=1, mlp_only_layers=[1], num_experts=7,
        num_experts_per_tok=3, moe_intermediate_size=12, norm_topk_prob=False, rope_parameters=theta(3000.0)),
    "granite-varied": lambda: hf.GraniteConfig(
        **{**LLAMA, "hidden_size": 48}, hidden_act="gelu", rms_norm_eps=1e-3, attention_bias=True, mlp_bias=True,
        embedding_multiplier=5.0, attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=0.5,
        rope_parameters=theta(3000.0)),
    "exaone4-varied": lambda: hf.Exaone4Config(
        **LLAMA, head_dim=10, hidden_act="gelu", rms_norm_eps=1e-3, sliding_window=9,
        layer_types=["full_attention", "sliding_attention", "full_attention"], tie_word_embeddings=True,
        rope_parameters=theta(3000.0)),
    "falcon-varied": lambda: hf.FalconConfig(
        vocab_size=96, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_kv_heads=2,
        new_decoder_architecture=True, num_ln_in_parallel_attn=1, bias=True, activation="silu", ffn_hidden_size=52,
        layer_norm_epsilon=1e-3, parallel_attn=True, tie_word_embeddings=False, max_position_embeddings=160,
        bos_token_id=1, eos_token_id=2, dtype="bfloat16", rope_parameters=theta(3000.0)),
    "falcon-alibi-varied": lambda: hf.FalconConfig(
        vocab_size=96, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, alibi=True, multi_query=False,
        new_decoder_architecture=False, parallel_attn=False, bias=True, activation="relu", ffn_hidden_size=52,
        layer_norm_epsilon=1e-3, max_position_embeddings=160, bos_token_id=1, eos_token_id=2, dtype="bfloat16"),
    "lfm3-varied": lambda: hf.Lfm3Config(
        **LLAMA, head_dim=10, norm_eps=1e-3, conv_bias=True, conv_L_cache=4, sliding_window=9, attention_bias=True,
        use_sandwich_norm=False, use_attention_gate=False, tie_word_embeddings=False,
        layer_types=["full_attention", "conv", "sliding_attention"],
        rope_parameters={"sliding_attention": theta(700.0), "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": 0.4, "rope_theta": 30000.0}}),
    "olmo-hybrid-varied": lambda: hf.OlmoHybridConfig(
        **{**LLAMA, "hidden_size": 48}, **{**DELTA, "linear_num_value_heads": 4}, hidden_act="gelu", attention_bias=True,
        rms_norm_eps=1e-3, linear_allow_neg_eigval=False, layer_types=["full_attention", "linear_attention", "linear_attention"],
        rope_parameters=theta(3000.0)),
    "gpt-neox-varied": lambda: hf.GPTNeoXConfig(
        vocab_size=96, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, intermediate_size=52, hidden_act="silu",
        layer_norm_eps=1e-3, use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True,
        max_position_embeddings=160, dtype="bfloat16", rope_parameters=theta(3000.0, partial_rotary_factor=0.5)),
    "glm-varied": lambda: hf.GlmConfig(
        **LLAMA, head_dim=10, hidden_act="gelu", rms_norm_eps=1e-3, attention_bias=False, tie_word_embeddings=True,
        rope_parameters=theta(3000.0, partial_rotary_factor=0.8)),
    "glm4-varied": lambda: hf.Glm4Config(
        **LLAMA, head_dim=10, hidden_act="gelu", rms_norm_eps=1e-3, attention_bias=False, tie_word_embeddings=True,
        rope_parameters=theta(3000.0, partial_rotary_factor=0.8)),
    "smollm3-varied": lambda: hf.SmolLM3Config(
        **{**LLAMA, "hidden_size": 48}, hidden_act="gelu", rms_norm_eps=1e-3, attention_bias=True, mlp_bias=True,
        use_sliding_window=True, sliding_window=9, no_rope_layers=[1, 0, 1], layer_types=["full_attention", "sliding_attention",
        "full_attention"], tie_word_embeddings=False, rope_parameters=theta(3000.0)),
    "gpt2-varied": lambda: hf.GPT2Config(
        vocab_size=96, n_embd=48, n_layer=3, n_head=6, n_positions=160, n_inner=52, activation_function="silu",
        layer_norm_epsilon=1e-3, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, dtype="bfloat16"),
    "opt-varied": lambda: hf.OPTConfig(
        vocab_size=96, hidden_size=48, num_hidden_layers=2, ffn_dim=52, max_position_embeddings=160, num_attention_heads=6,
        do_layer_norm_before=False, word_embed_proj_dim=32, activation_function="gelu", enable_bias=False,
        tie_word_embeddings=True, dtype="bfloat16"),
    "bloom-varied": lambda: hf.BloomConfig(
        vocab_size=96, hidden_size=48, n_layer=2, n_head=6, layer_norm_epsilon=1e-3,
        apply_residual_connection_post_layernorm=True, tie_word_embeddings=False, dtype="bfloat16"),
}

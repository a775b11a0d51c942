"""Layers of models that mix attention with something else, for write_model.py: LFM2, Qwen 3.5, Granite 4 H."""

import gguf
import numpy as np

F32 = gguf.GGMLQuantizationType.F32


def lfm2(writer, config):
    """Gated short convolutions, and attention with norms of heads."""
    file, hidden = writer.file, config["hidden_size"]
    inner = config["block_ff_dim"]
    if config.get("block_auto_adjust_ff_dim"):
        step = config["block_multiple_of"]
        inner = -(-int(config["block_ffn_dim_multiplier"] * (2 * inner // 3)) // step) * step
    attention = set(config["full_attn_idxs"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers = range(config["num_hidden_layers"])
    common(file, inner, heads, [kv_heads if layer in attention else 0 for layer in layers], config["norm_eps"])
    file.add_rope_freq_base(config["rope_theta"])
    file.add_shortconv_l_cache(config["conv_L_cache"])
    writer.matrix("token_embd.weight", config["vocab_size"], hidden, writer.head_type())
    for layer in layers:
        block = f"blk.{layer}."
        if layer in attention:
            attention_layer(writer, block, hidden, heads * (hidden // heads), kv_heads * (hidden // heads), hidden // heads)
        else:
            writer.vector(block + "attn_norm.weight", hidden, 1.0)
            writer.matrix(block + "shortconv.in_proj.weight", 3 * hidden, hidden)
            writer.matrix(block + "shortconv.conv.weight", hidden, config["conv_L_cache"], F32)
            writer.matrix(block + "shortconv.out_proj.weight", hidden, hidden)
        mlp(writer, block, hidden, inner, "ffn_norm")
    writer.vector("token_embd_norm.weight", hidden, 1.0)


def qwen35(writer, config):
    """Gated delta rules, and every fourth layer attention with an output gate."""
    file, hidden, inner = writer.file, config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    keys, key, values, value = (config[f"linear_{name}"] for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim"))
    interval = 4
    common(file, inner, heads, kv_heads, config["rms_norm_eps"])
    file.add_key_length(size)
    file.add_value_length(size)
    turned = int(size * config["partial_rotary_factor"])
    file.add_rope_dimension_count(turned)
    file.add_rope_dimension_sections([turned // 2, 0, 0, 0])
    file.add_rope_freq_base(config["rope_theta"])
    file.add_full_attention_interval(interval)
    mixer(file, config["linear_conv_kernel_dim"], key, keys, values * value, values)
    writer.matrix("token_embd.weight", config["vocab_size"], hidden, writer.head_type())
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}."
        if (layer + 1) % interval == 0:
            attention_layer(writer, block, hidden, heads * size, kv_heads * size, size, gated=True)
        else:
            channels = 2 * keys * key + values * value
            writer.vector(block + "attn_norm.weight", hidden, 1.0)
            writer.matrix(block + "attn_qkv.weight", channels, hidden)
            writer.matrix(block + "attn_gate.weight", values * value, hidden)
            writer.matrix(block + "ssm_conv1d.weight", channels, config["linear_conv_kernel_dim"], F32)
            writer.vector(block + "ssm_dt.bias", values)
            writer.vector(block + "ssm_a", values, -1.0)
            for name in ("beta", "alpha"):
                writer.matrix(f"{block}ssm_{name}.weight", values, hidden, writer.head_type())
            writer.vector(block + "ssm_norm.weight", value, 1.0)
            writer.matrix(block + "ssm_out.weight", hidden, values * value)
        mlp(writer, block, hidden, inner, "post_attention_norm")
    writer.vector("output_norm.weight", hidden, 1.0)


def granite_hybrid(writer, config):
    """Mamba 2, a few layers of attention without positions, experts beside a shared MLP."""
    file, hidden, inner = writer.file, config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, experts = config["num_attention_heads"], config["num_key_value_heads"], config["num_local_experts"]
    kinds = config["layer_types"]
    common(file, inner, heads, [kv_heads if kind == "attention" else 0 for kind in kinds], config["rms_norm_eps"])
    file.add_rope_dimension_count(hidden // heads)
    file.add_rope_scaling_finetuned(False)
    ssm_heads, state, groups, taps = (config[f"mamba_{name}"] for name in ("n_heads", "d_state", "n_groups", "d_conv"))
    width = ssm_heads * config["mamba_d_head"]
    mixer(file, taps, state, groups, width, ssm_heads)
    for name in ("attention", "embedding", "residual"):
        add = {"attention": file.add_attention_scale, "embedding": file.add_embedding_scale, "residual": file.add_residual_scale}[name]
        add(config[f"{name}_multiplier"])
    file.add_logit_scale(config["logits_scaling"])
    file.add_expert_count(experts)
    file.add_expert_used_count(config["num_experts_per_tok"])
    file.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.matrix("token_embd.weight", config["vocab_size"], hidden, writer.head_type())
    for layer, kind in enumerate(kinds):
        block = f"blk.{layer}."
        if kind == "attention":
            size = hidden // heads
            attention_layer(writer, block, hidden, heads * size, kv_heads * size, None)
        else:
            channels = width + 2 * groups * state
            writer.vector(block + "attn_norm.weight", hidden, 1.0)
            writer.matrix(block + "ssm_in.weight", width + channels + ssm_heads, hidden)
            writer.matrix(block + "ssm_conv1d.weight", channels, taps, F32)
            writer.vector(block + "ssm_conv1d.bias", channels)
            writer.vector(block + "ssm_dt.bias", ssm_heads)
            for name in ("ssm_a", "ssm_d"):
                writer.matrix(block + name, ssm_heads, 1, F32, value=-1.0)
            writer.matrix(block + "ssm_norm.weight", groups, width // groups, F32, value=1.0)
            writer.matrix(block + "ssm_out.weight", hidden, width)
        writer.vector(block + "ffn_norm.weight", hidden, 1.0)
        writer.matrix(block + "ffn_gate_inp.weight", experts, hidden, F32)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            writer.matrix(f"{block}ffn_{name}_exps.weight", rows, columns, copies=experts)
        shared = config["shared_intermediate_size"]
        for name, rows, columns in (("gate", shared, hidden), ("up", shared, hidden), ("down", hidden, shared)):
            writer.matrix(f"{block}ffn_{name}_shexp.weight", rows, columns)
    writer.vector("output_norm.weight", hidden, 1.0)


def common(file, inner, heads, kv_heads, epsilon):
    file.add_feed_forward_length(inner)
    file.add_head_count(heads)
    file.add_head_count_kv(kv_heads)
    file.add_layer_norm_rms_eps(epsilon)


def mixer(file, taps, state, groups, inner, rank):
    file.add_ssm_conv_kernel(taps)
    file.add_ssm_state_size(state)
    file.add_ssm_group_count(groups)
    file.add_ssm_inner_size(inner)
    file.add_ssm_time_step_rank(rank)


def attention_layer(writer, block, hidden, width, kv_width, normed, gated=False):
    """`normed` is the size of a head where queries and keys are normed, else None; a gate lies beside each query."""
    writer.vector(block + "attn_norm.weight", hidden, 1.0)
    for name, rows in (("q", width * (2 if gated else 1)), ("k", kv_width), ("v", kv_width)):
        writer.matrix(f"{block}attn_{name}.weight", rows, hidden)
    if normed:
        for name in ("q", "k"):
            writer.vector(f"{block}attn_{name}_norm.weight", normed, 1.0)
    writer.matrix(block + "attn_output.weight", hidden, width)


def mlp(writer, block, hidden, inner, norm):
    writer.vector(f"{block}{norm}.weight", hidden, 1.0)
    writer.matrix(block + "ffn_gate.weight", inner, hidden)
    writer.matrix(block + "ffn_up.weight", inner, hidden)
    writer.matrix(block + "ffn_down.weight", hidden, inner)

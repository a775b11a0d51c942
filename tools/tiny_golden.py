#!/usr/bin/env python3
"""Writes a tiny random checkpoint of a Hugging Face family with reference results, as a test case for `tests/goldens`.

    python tools/tiny_golden.py granite tests/goldens/granite

Needs torch, transformers and safetensors. Weights are drawn from a fixed seed in float32; the results are those of
transformers on the CPU, a full forward pass without a cache for every token; where rotary embeddings depend on the length,
the prompt in one pass and then token by token with a cache. Seeds are tried until every greedy
continuation is lively (at least four distinct tokens) and no greedy choice is closer than 1e-3.

To add a family, add a line to FAMILIES: the configuration that makes it small and uses everything that it can do.
"""

import argparse
import json
import pathlib

import torch
import transformers
from transformers import AutoModelForCausalLM

from varied_cases import VARIED

PROMPTS = ([5], [7, 3, 11], [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 17, 42, 99])
GREEDY = 16


def sequence(count):
    return [1 + (i * i + i // 5) % 62 for i in range(count)]


# Of one token, shorter than windows of 16, and longer.
WINDOW_PROMPTS = ([7], [3, 11, 101, 5, 64, 2, 90], [1 + (i * i * 7 + i // 3) % 109 for i in range(37)])


# Shorter and longer than the 32 positions that scaling starts from; the second one comes to them while it goes on.
LONG_PROMPTS = (sequence(7), sequence(25), sequence(60))

# Of one token, and longer than chunks of 8 and windows of 9.
VARIED_PROMPTS = (sequence(1), sequence(25))


def small(**kinds):
    """Sizes of the cases for scaled rotary embeddings."""
    return dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, tie_word_embeddings=False, torch_dtype="float16", **kinds)


def scaled_llama(positions, **scaling):
    return transformers.LlamaConfig(
        **small(max_position_embeddings=positions, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 10000.0, **scaling}))


def longrope():
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
               "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
               "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 12.0]}
    return transformers.Phi3Config(**small(
        max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=scaling, pad_token_id=0,
        bos_token_id=1, eos_token_id=2))


FAMILIES = {
    "granite": lambda: transformers.GraniteConfig(
        vocab_size=112, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=True,
        embedding_multiplier=6.0, attention_multiplier=0.25, residual_multiplier=0.4, logits_scaling=3.0),
    "llama-linear": lambda: scaled_llama(128, rope_type="linear", factor=4.0),
    "llama-dynamic": lambda: scaled_llama(32, rope_type="dynamic", factor=4.0),
    "llama-yarn": lambda: scaled_llama(
        128, rope_type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=4.0, beta_slow=0.5),
    "phi3-longrope": longrope,
    "gemma": lambda: transformers.GemmaConfig(
        vocab_size=112, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, hidden_activation="gelu_pytorch_tanh"),
    "ernie4-5": lambda: transformers.Ernie4_5Config(
        vocab_size=112, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, use_bias=True, tie_word_embeddings=True),
    "stablelm-head-norms": lambda: transformers.StableLmConfig(
        vocab_size=112, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, qk_layernorm=True, use_parallel_residual=True,
        use_qkv_bias=True, bos_token_id=0, eos_token_id=0),
    "exaone4": lambda: transformers.Exaone4Config(
        vocab_size=112, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=16, sliding_window_pattern=3,
        rope_parameters={"rope_theta": 1e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        rms_norm_eps=1e-5, dtype="bfloat16"),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=112, hidden_size=64, state_size=8, num_hidden_layers=3, expand=2, conv_kernel=3, use_bias=True,
        time_step_rank=6, layer_norm_epsilon=1e-6, dtype="bfloat16"),
    "olmo-hybrid": lambda: transformers.OlmoHybridConfig(
        vocab_size=112, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=12, linear_value_head_dim=24, linear_conv_kernel_dim=3,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": None}, pad_token_id=None, eos_token_id=2, dtype="bfloat16"),
    "glm4-moe-groups": lambda: transformers.Glm4MoeConfig(
        vocab_size=112, hidden_size=64, intermediate_size=96, moe_intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=3,
        n_group=4, topk_group=2, first_k_dense_replace=1, routed_scaling_factor=1.5, norm_topk_prob=True, use_qk_norm=True,
        max_position_embeddings=128, pad_token_id=None, dtype="bfloat16"),
    "nemotron-h-latent": lambda: transformers.NemotronHConfig(
        vocab_size=112, hidden_size=64, intermediate_size=96, hybrid_override_pattern="ME*E", num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=16, conv_kernel=4,
        chunk_size=16, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, moe_latent_size=32,
        moe_shared_expert_intermediate_size=48, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
        mlp_hidden_act="relu2", max_position_embeddings=128, pad_token_id=None, dtype="bfloat16"),
    "deepseek-v2-groups": lambda: transformers.DeepseekV2Config(
        vocab_size=112, hidden_size=64, intermediate_size=96, moe_intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=3,
        topk_method="group_limited_greedy", n_group=4, topk_group=2, first_k_dense_replace=1, routed_scaling_factor=2.5,
        kv_lora_rank=24, q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
        max_position_embeddings=128, pad_token_id=None, dtype="bfloat16"),
    "mistral4": lambda: transformers.Mistral4Config(
        vocab_size=112, hidden_size=64, intermediate_size=96, moe_intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=3,
        n_group=4, topk_group=2, first_k_dense_replace=1, routed_scaling_factor=1.5, kv_lora_rank=24, q_lora_rank=32,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, max_position_embeddings=128,
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5,
                         "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.7,
                         "llama_4_scaling_beta": 0.3},
        pad_token_id=None, dtype="bfloat16"),
}

FAMILIES |= VARIED

# Cases with other prompts than PROMPTS.
LONGER = ("exaone4", "mamba", "olmo-hybrid", "mistral4", "deepseek-v2-groups", "glm4-moe-groups",
          "nemotron-h-latent")


def model_of(config, seed):
    """Linear weights normal with deviation 1/sqrt(fan in), norms near one with random signs in the last."""
    torch.manual_seed(seed)
    stored_type = stored(config)
    if config.model_type == "mistral4":
        # Not known to AutoModel: it is published inside of a model for images.
        model = transformers.Mistral4ForCausalLM(config).float().eval()
    else:
        # Factors that a model keeps are those of float32 too, and not every attention has bounds by tanh.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        model.config.dtype = stored_type
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0.0, 1.0 / p.shape[-1] ** 0.5)
            else:
                p.copy_(1.0 + 0.1 * torch.randn_like(p))
            if name == "model.norm.weight":
                # Keeps tied embeddings from repeating the input token.
                p.mul_(torch.randint(0, 2, p.shape) * 2 - 1)
            if config.model_type == "gemma" and name.endswith("norm.weight"):
                p.sub_(1.0)
            if name.endswith(".bias"):
                p.sub_(1.0)
            if name.endswith("A_log"):
                # Decays from slow to fast.
                p.uniform_(-4.0, 1.0)
            if name.endswith("dt_bias"):
                p.uniform_(-3.0, 1.0)
            if stored(config) != torch.float32:
                p.copy_(p.to(stored(config)).float())
        for name, b in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                # Below zero: what is not in a chosen group is out of the choice all the same.
                b.copy_(torch.empty_like(b).normal_(-0.9, 0.1).to(stored(config)))
    return model


def published_convolutions(folder, config):
    """Cuts the convolutions of OLMo Hybrid as published files have them: transformers makes three equal parts of one."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    for name in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        joined = torch.cat([tensors[name] for name in names])
        for name, part in zip(names, joined.split([keys, keys, values])):
            tensors[name] = part.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def stored(config):
    """The type of the tensors in the file."""
    return config.dtype or torch.float32


def forward(model, tokens, cache=None):
    """Logits of all `tokens`, which go on after those of the cache. Scaling by length takes the length after them."""
    start = cache.get_seq_length() if cache else 0
    if not start and by_length(model):
        # The frequencies of the longest sequence so far would stay otherwise.
        model.model.rotary_emb.__init__(model.config)
    positions = torch.arange(start, start + len(tokens))[None]
    out = model(torch.tensor([tokens]), position_ids=positions, past_key_values=cache, use_cache=cache is not None)
    return out.logits[0].double()


def by_length(model):
    return getattr(getattr(model.base_model, "rotary_emb", None), "rope_type", None) in ("dynamic", "longrope")


@torch.no_grad()
def result_of(model, prompt):
    logits = forward(model, prompt)
    tokens, greedy, margins = list(prompt), [], []
    cache = transformers.DynamicCache() if by_length(model) else None
    last = None
    for _ in range(GREEDY):
        if cache is not None:
            # Keys stay as they were turned when they came.
            last = forward(model, tokens if last is None else tokens[-1:], cache)[-1]
        else:
            last = forward(model, tokens)[-1]
        top = torch.topk(last, 2)
        greedy.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
        tokens.append(greedy[-1])
    return {
        "input_ids": list(prompt),
        "logits_last": [float(f"{x:.9g}") for x in logits[-1].float()],
        "logits_checksum_all_positions": {
            "mean": [float(x) for x in logits.mean(-1)],
            "std": [float(x) for x in logits.std(-1, unbiased=False)],
        },
        "argmax_all_positions": [int(x) for x in logits.argmax(-1)],
        "greedy": greedy,
        "greedy_margin": margins,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    for seed in range(1000):
        model = model_of(FAMILIES[args.family](), seed)
        prompts = PROMPTS if model.config.vocab_size > 64 else LONG_PROMPTS
        prompts = WINDOW_PROMPTS if args.family in LONGER else prompts
        prompts = VARIED_PROMPTS if args.family in VARIED else prompts
        results = [result_of(model, prompt) for prompt in prompts]
        lively = all(len(set(r["greedy"])) >= 4 for r in results)
        if lively and min(min(r["greedy_margin"]) for r in results) > 1e-3:
            break
    model.to(stored(model.config)).save_pretrained(args.folder)
    if model.config.model_type == "olmo_hybrid":
        published_convolutions(args.folder, model.config)
    golden = {
        "source": f"transformers {transformers.__version__} {type(model).__name__}, torch {torch.__version__}, CPU",
        "file_dtype": str(stored(model.config)).removeprefix("torch."),
        "case": args.family,
        "note": f"written by tools/tiny_golden.py, seed {seed}",
        "quality": {
            "margin_min": min(min(r["greedy_margin"]) for r in results),
            "max_abs_logit": max(max(abs(x) for x in r["logits_last"]) for r in results),
        },
        "prompts": results,
    }
    (args.folder / "golden.json").write_text(json.dumps(golden) + "\n")
    print(f"{args.folder}: seed {seed}, smallest margin {golden['quality']['margin_min']:.4f}")


if __name__ == "__main__":
    main()

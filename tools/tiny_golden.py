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

PROMPTS = ([5], [7, 3, 11], [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 17, 42, 99])
GREEDY = 16


def sequence(count):
    return [1 + (i * i + i // 5) % 62 for i in range(count)]


# Shorter and longer than the 32 positions that scaling starts from; the second one comes to them while it goes on.
LONG_PROMPTS = (sequence(7), sequence(25), sequence(60))


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
}


def model_of(config, seed):
    """Linear weights normal with deviation 1/sqrt(fan in), norms near one with random signs in the last."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
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
            if half(config):
                p.copy_(p.half().float())
    return model


def half(config):
    return config.dtype == torch.float16


def forward(model, tokens, cache=None):
    """Logits of all `tokens`, which go on after those of the cache. Scaling by length takes the length after them."""
    start = cache.get_seq_length() if cache else 0
    if not start:
        # The frequencies of the longest sequence so far would stay otherwise.
        rope = model.model.rotary_emb
        rope.__init__(model.config)
    positions = torch.arange(start, start + len(tokens))[None]
    out = model(torch.tensor([tokens]), position_ids=positions, past_key_values=cache, use_cache=cache is not None)
    return out.logits[0].double()


@torch.no_grad()
def result_of(model, prompt):
    logits = forward(model, prompt)
    tokens, greedy, margins = list(prompt), [], []
    by_length = model.model.rotary_emb.rope_type in ("dynamic", "longrope")
    cache = transformers.DynamicCache() if by_length else None
    last = None
    for _ in range(GREEDY):
        if by_length:
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
        results = [result_of(model, prompt) for prompt in prompts]
        lively = all(len(set(r["greedy"])) >= 4 for r in results)
        if lively and min(min(r["greedy_margin"]) for r in results) > 1e-3:
            break
    (model.half() if half(model.config) else model).save_pretrained(args.folder)
    golden = {
        "source": f"transformers {transformers.__version__} {type(model).__name__}, torch {torch.__version__}, CPU",
        "file_dtype": "float16" if half(model.config) else "float32",
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

#!/usr/bin/env python3
"""Writes a tiny random checkpoint of a Hugging Face family with reference results, as a test case for `tests/goldens`.

    python tools/tiny_golden.py granite tests/goldens/granite

Needs torch, transformers and safetensors. Weights are drawn from a fixed seed in float32; the results are those of
transformers on the CPU, a full forward pass without a cache for every token. Seeds are tried until every greedy
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

FAMILIES = {
    "granite": lambda: transformers.GraniteConfig(
        vocab_size=112, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=True,
        embedding_multiplier=6.0, attention_multiplier=0.25, residual_multiplier=0.4, logits_scaling=3.0),
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
    return model


@torch.no_grad()
def result_of(model, prompt):
    logits = model(torch.tensor([prompt]), use_cache=False).logits[0].double()
    tokens, greedy, margins = list(prompt), [], []
    for _ in range(GREEDY):
        last = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
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
        results = [result_of(model, prompt) for prompt in PROMPTS]
        lively = all(len(set(r["greedy"])) >= 4 for r in results)
        if lively and min(min(r["greedy_margin"]) for r in results) > 1e-3:
            break
    model.save_pretrained(args.folder)
    golden = {
        "source": f"transformers {transformers.__version__} {type(model).__name__}, torch {torch.__version__}, CPU",
        "file_dtype": "float32",
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

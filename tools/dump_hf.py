#!/usr/bin/env python3
"""Writes the output of every layer of a Hugging Face model into a safetensors file, for `mlcc verify --layers --against`.

    python tools/dump_hf.py MODEL_DIR OUT.safetensors --tokens 1,2,3
    python tools/dump_hf.py MODEL_DIR OUT.safetensors --prompt "It was the best of times"

Needs torch, transformers and safetensors. The model runs on the CPU in float32, in one forward pass without a cache.

Tensors of the file, all float32 (names are those that model definitions of mlcc give their taps):

    tokens               [n]         ids of the prompt
    embedding            [n, hidden] input of the first layer
    layer.I              [n, hidden] output of layer I
    layer.I.attention    [n, hidden] output of its attention (or time mixing) block, before the residual is added
    layer.I.mlp          [n, hidden] output of its feed-forward block, before the residual is added
    final_norm           [n, hidden] output of the norm behind the last layer
    logits               [n, vocab]

What a family does not have under a known name is left out; `verify` compares the taps that both sides have.
"""

import argparse
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ATTENTION = ("self_attn", "attention", "attn", "self_attention", "temporal_block")
MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "ff")
FINAL_NORM = ("norm", "ln_f", "ln_out", "final_layer_norm", "final_layernorm", "norm_f")


def layers_of(model):
    """The list of decoder layers: the longest ModuleList of equal classes, with the module that owns it."""
    best = None
    for parent in model.modules():
        for child in parent.children():
            if not isinstance(child, torch.nn.ModuleList) or len(child) == 0:
                continue
            if len({type(layer) for layer in child}) == 1 and (best is None or len(child) > len(best[1])):
                best = (parent, child)
    if best is None:
        sys.exit("this model has no list of layers that the script knows how to find")
    return best


def first(value):
    """The hidden state among what a module returns."""
    while isinstance(value, (tuple, list)):
        value = value[0]
    return value


def child(module, names):
    """The first child of one of these names."""
    return next((getattr(module, n) for n in names if isinstance(getattr(module, n, None), torch.nn.Module)), None)


def dump(model, tokens):
    """Runs the model and returns its taps by name."""
    taps = {}

    def keep(name, value):
        # Batch of one; some families flatten it away.
        matrix = first(value).detach().to(torch.float32)
        taps[name] = matrix.reshape(-1, matrix.shape[-1]).contiguous().clone()

    def output(module, name):
        if module is not None:
            module.register_forward_hook(lambda _m, _args, out, name=name: keep(name, out))

    def first_input(_module, args, kwargs):
        keep("embedding", args[0] if args else kwargs["hidden_states"])

    owner, layers = layers_of(model)
    layers[0].register_forward_pre_hook(first_input, with_kwargs=True)
    for i, layer in enumerate(layers):
        output(layer, f"layer.{i}")
        output(child(layer, ATTENTION), f"layer.{i}.attention")
        output(child(layer, MLP), f"layer.{i}.mlp")
    output(child(owner, FINAL_NORM), "final_norm")
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits
    keep("logits", logits)
    # A block that gives something else than one row per token is not what the tap of that name means.
    taps = {name: value for name, value in taps.items() if value.shape[0] == len(tokens)}
    taps["tokens"] = torch.tensor(tokens, dtype=torch.float32)
    return taps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the checkpoint, or its name on the hub")
    parser.add_argument("out", help="file to write")
    parser.add_argument("--tokens", help="token ids of the prompt, with commas")
    parser.add_argument("--prompt", help="text of the prompt")
    args = parser.parse_args()
    if (args.tokens is None) == (args.prompt is None):
        parser.error("give --tokens or --prompt")
    if args.tokens is not None:
        tokens = [int(t) for t in args.tokens.split(",")]
    else:
        tokens = AutoTokenizer.from_pretrained(args.model)(args.prompt, add_special_tokens=False).input_ids
    model = AutoModelForCausalLM.from_pretrained(args.model).float().eval()
    taps = dump(model, tokens)
    save_file(taps, args.out, metadata={"format": "pt"})
    print(f"{args.out}: {len(taps)} tensors for {len(tokens)} tokens: {', '.join(sorted(taps))}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Writes what a Llama checkpoint answers to a sequence that is longer than what it sees of it, with attention sinks.

    python3 tools/streaming_golden.py tests/goldens/llama-linear --window 16 --sinks 4

The recipe of StreamingLLM (Xiao et al. 2023) word by word, in float64 with NumPy: keys are kept as they are before they
are turned; when the cache holds more than `window` tokens the oldest one behind the sinks is dropped; every token turns
the query and all kept keys by their places in the cache. Shares no code with the compiler. For plain Llama checkpoints
with default or linear rope scaling, in one file of float16 tensors.
"""

import argparse
import json
import math
import struct
from pathlib import Path

import numpy as np


def tensors(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    out = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + x for x in entry["data_offsets"])
            out[name] = np.frombuffer(data[begin:end], np.float16).astype(np.float64).reshape(entry["shape"])
    return out


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def turned(x, place, frequencies):
    """One head, element i with i + size / 2."""
    half = len(x) // 2
    cos, sin = np.cos(place * frequencies), np.sin(place * frequencies)
    return np.concatenate([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])


class Llama:
    def __init__(self, folder, window, sinks):
        config = json.loads((folder / "config.json").read_text())
        self.config, self.window, self.sinks = config, window, sinks
        self.weights = tensors(folder / "model.safetensors")
        self.heads, self.kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = config.get("head_dim") or config["hidden_size"] // self.heads
        rope = config["rope_parameters"]
        factor = {"default": 1.0, "linear": rope.get("factor", 1.0)}[rope["rope_type"]]
        index = np.arange(self.size // 2)
        self.frequencies = rope["rope_theta"] ** (-2.0 * index / self.size) / factor
        self.caches = [[] for _ in range(config["num_hidden_layers"])]

    def attention(self, layer, x):
        part = f"model.layers.{layer}.self_attn."
        q, k, v = (self.weights[part + f"{p}_proj.weight"] @ x for p in "qkv")
        cache = self.caches[layer]
        cache.append((k.reshape(self.kv, -1), v.reshape(self.kv, -1)))
        if len(cache) > self.window:
            del cache[self.sinks]
        place, rows = len(cache) - 1, []
        for head, q in enumerate(q.reshape(self.heads, -1)):
            group = head // (self.heads // self.kv)
            q = turned(q, place, self.frequencies)
            keys = [turned(k[group], j, self.frequencies) for j, (k, _) in enumerate(cache)]
            scores = np.array([q @ k for k in keys]) / math.sqrt(self.size)
            shares = np.exp(scores - scores.max())
            rows.append(sum(s * v[group] for s, (_, v) in zip(shares / shares.sum(), cache)))
        return self.weights[part + "o_proj.weight"] @ np.concatenate(rows)

    def token(self, token):
        """Logits after one more token."""
        eps = self.config["rms_norm_eps"]
        x = self.weights["model.embed_tokens.weight"][token]
        for layer in range(len(self.caches)):
            name = f"model.layers.{layer}."
            x = x + self.attention(layer, rms(x, self.weights[name + "input_layernorm.weight"], eps))
            h = rms(x, self.weights[name + "post_attention_layernorm.weight"], eps)
            gate, up, down = (self.weights[name + f"mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
            g = gate @ h
            x = x + down @ (g / (1 + np.exp(-g)) * (up @ h))
        return self.weights["lm_head.weight"] @ rms(x, self.weights["model.norm.weight"], eps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--window", type=int, required=True)
    parser.add_argument("--sinks", type=int, required=True)
    args = parser.parse_args()
    model = Llama(args.folder, args.window, args.sinks)
    ids = [1 + (7 * i * i + i // 3) % 62 for i in range(90)]
    logits = [[float(f"{x:.8g}") for x in model.token(token)] for token in ids]
    # Within the window, at its edge, and far beyond it.
    kept = [args.window - 1, args.window, args.window + args.sinks, 50, 89]
    golden = {
        "source": f"tools/streaming_golden.py, NumPy {np.__version__}, float64",
        "sliding_window": args.window,
        "attention_sinks": args.sinks,
        "input_ids": ids,
        "logits": [{"position": i, "values": logits[i]} for i in kept],
    }
    (args.folder / "streaming.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()

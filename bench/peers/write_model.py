#!/usr/bin/env python3
"""Writes a GGUF file with the shapes of a preset and random weights, for mlcc and its peers alike.

    python3 bench/peers/write_model.py tinyllama-1.1b q4_0 -o tinyllama-q4_0.gguf

The shapes are those of `models/src/presets/transformers.json`. Matrices are normal with deviation 0.02, quantized by the
`gguf` package; all layers hold the same values, which no engine's speed depends on. The head (or the tied embedding) is
Q8_0 in both quantized formats, as in mlcc's q4i8. The vocabulary is made up.
"""

import argparse
import json
import pathlib

import gguf
import numpy as np

PRESETS = pathlib.Path(__file__).parents[2] / "models/src/presets/transformers.json"
TYPES = gguf.GGMLQuantizationType
FORMATS = {"q4_0": TYPES.Q4_0, "q8_0": TYPES.Q8_0, "f16": TYPES.F16, "bf16": TYPES.BF16}
FILE_TYPES = {"q4_0": gguf.LlamaFileType.MOSTLY_Q4_0, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "f16": gguf.LlamaFileType.MOSTLY_F16,
              "bf16": gguf.LlamaFileType.MOSTLY_BF16}
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2"}


class Writer:
    """The open file, the random source, and values made before by shape and type."""

    def __init__(self, path, architecture, format):
        self.file = gguf.GGUFWriter(path, architecture)
        self.random = np.random.default_rng(0)
        self.format = FORMATS[format]
        self.made = {}

    def matrix(self, name, rows, columns, type=None):
        type = type or self.format
        key = (rows, columns, type)
        if key not in self.made:
            values = self.random.standard_normal((rows, columns), np.float32) * np.float32(0.02)
            self.made[key] = gguf.quants.quantize(values, type)
        self.file.add_tensor(name, self.made[key], raw_dtype=type)

    def vector(self, name, size, value=0.0):
        self.file.add_tensor(name, np.full(size, value, np.float32))

    def head_type(self):
        return TYPES.Q8_0 if self.format in (TYPES.Q4_0, TYPES.Q8_0) else self.format


def vocabulary(file, size):
    """A made-up vocabulary of byte-level BPE, the kind that all engines read: two controls, all bytes, words, one merge."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    tokens = ["<s>", "</s>"] + [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    tokens += [f"w{index}" for index in range(size - len(tokens))]
    kinds = gguf.TokenType
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("qwen2")
    file.add_token_list(tokens)
    file.add_token_types([kinds.CONTROL] * 2 + [kinds.NORMAL] * (size - 2))
    file.add_token_merges(["w 0"])
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)


def llama_like(writer, config):
    """Llama, Qwen2 (biases of q, k, v) and Qwen3 (norms of heads)."""
    file, kind = writer.file, config["model_type"]
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    size = config.get("head_dim") or hidden // heads
    file.add_feed_forward_length(inner)
    file.add_head_count(heads)
    file.add_head_count_kv(kv_heads)
    file.add_key_length(size)
    file.add_value_length(size)
    file.add_rope_dimension_count(size)
    file.add_rope_freq_base(config.get("rope_theta", 10000.0))
    file.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.matrix("token_embd.weight", config["vocab_size"], hidden, writer.head_type())
    for layer in range(layers):
        block = f"blk.{layer}."
        writer.vector(block + "attn_norm.weight", hidden, 1.0)
        for name, rows in (("q", heads * size), ("k", kv_heads * size), ("v", kv_heads * size)):
            writer.matrix(f"{block}attn_{name}.weight", rows, hidden)
            if kind == "qwen2":
                writer.vector(f"{block}attn_{name}.bias", rows)
        if kind == "qwen3":
            writer.vector(block + "attn_q_norm.weight", size, 1.0)
            writer.vector(block + "attn_k_norm.weight", size, 1.0)
        writer.matrix(block + "attn_output.weight", hidden, heads * size)
        writer.vector(block + "ffn_norm.weight", hidden, 1.0)
        writer.matrix(block + "ffn_gate.weight", inner, hidden)
        writer.matrix(block + "ffn_up.weight", inner, hidden)
        writer.matrix(block + "ffn_down.weight", hidden, inner)
    writer.vector("output_norm.weight", hidden, 1.0)
    if not config.get("tie_word_embeddings", False):
        writer.matrix("output.weight", config["vocab_size"], hidden, writer.head_type())


def gpt2(writer, config):
    file = writer.file
    hidden, layers, heads = config["n_embd"], config["n_layer"], config["n_head"]
    inner = config.get("n_inner") or 4 * hidden
    file.add_feed_forward_length(inner)
    file.add_head_count(heads)
    file.add_layer_norm_eps(config.get("layer_norm_epsilon", 1e-5))
    writer.matrix("token_embd.weight", config["vocab_size"], hidden, writer.head_type())
    writer.matrix("position_embd.weight", config["n_positions"], hidden, TYPES.F32)
    for layer in range(layers):
        block = f"blk.{layer}."
        for name, rows, columns in (
            ("attn_qkv", 3 * hidden, hidden), ("attn_output", hidden, hidden), ("ffn_up", inner, hidden), ("ffn_down", hidden, inner)):
            writer.matrix(f"{block}{name}.weight", rows, columns)
            writer.vector(f"{block}{name}.bias", rows)
        for name in ("attn_norm", "ffn_norm"):
            writer.vector(f"{block}{name}.weight", hidden, 1.0)
            writer.vector(f"{block}{name}.bias", hidden)
    writer.vector("output_norm.weight", hidden, 1.0)
    writer.vector("output_norm.bias", hidden)
    writer.matrix("output.weight", config["vocab_size"], hidden, writer.head_type())


def write(preset, format, path):
    config = next((entry["config"] for entry in json.loads(PRESETS.read_text()) if entry["name"] == preset), None)
    if config is None:
        raise SystemExit(f"no preset is named {preset}; see {PRESETS.name}")
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise SystemExit(f"{preset} is a {kind}; this script writes {', '.join(ARCHITECTURES)}")
    writer = Writer(path, ARCHITECTURES[kind], format)
    file = writer.file
    file.add_name(preset)
    file.add_context_length(config.get("max_position_embeddings") or config["n_positions"])
    file.add_embedding_length(config.get("hidden_size") or config["n_embd"])
    file.add_block_count(config.get("num_hidden_layers") or config["n_layer"])
    file.add_vocab_size(config["vocab_size"])
    file.add_file_type(FILE_TYPES[format])
    vocabulary(file, config["vocab_size"])
    (gpt2 if kind == "gpt2" else llama_like)(writer, config)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("preset")
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("-o", "--output", required=True)
    arguments = parser.parse_args()
    write(arguments.preset, arguments.format, arguments.output)


if __name__ == "__main__":
    main()

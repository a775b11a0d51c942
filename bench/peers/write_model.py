#!/usr/bin/env python3
"""Writes a GGUF file with the shapes of a preset and random weights, for mlcc and its peers alike.

    python3 bench/peers/write_model.py tinyllama-1.1b q4_0 -o tinyllama-q4_0.gguf

The shapes are those of `models/src/presets/transformers.json`, and of RWKV-7 as published. Matrices are normal with
deviation 0.02, quantized by the `gguf` package; all layers hold the same values, which no engine's speed depends on. The
head (or the tied embedding) is Q8_0 in both quantized formats, as in mlcc's q4i8. The vocabulary is made up.
"""

import argparse
import json
import pathlib

import gguf
import numpy as np
from write_hybrids import granite_hybrid, lfm2, qwen35

PRESETS = pathlib.Path(__file__).parents[2] / "models/src/presets/transformers.json"
TYPES = gguf.GGMLQuantizationType
FORMATS = {"q4_0": TYPES.Q4_0, "q8_0": TYPES.Q8_0, "f16": TYPES.F16, "bf16": TYPES.BF16}
FILE_TYPES = {"q4_0": gguf.LlamaFileType.MOSTLY_Q4_0, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "f16": gguf.LlamaFileType.MOSTLY_F16,
              "bf16": gguf.LlamaFileType.MOSTLY_BF16}
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2", "rwkv7": "rwkv7", "lfm2": "lfm2",
                 "qwen3_5_text": "qwen35", "granitemoehybrid": "granitehybrid"}
# Ranks of the thin matrices: decay, rate (iclr), value residual, gate.
RWKV7 = {"rwkv7-0.4b": (1024, 24, (64, 64, 32, 128)), "rwkv7-1.5b": (2048, 24, (96, 96, 64, 256))}


class Writer:
    """The open file, the random source, and values made before by shape and type."""

    def __init__(self, path, architecture, format):
        self.file = gguf.GGUFWriter(path, architecture)
        self.random = np.random.default_rng(0)
        self.format = FORMATS[format]
        self.made = {}

    def matrix(self, name, rows, columns, type=None, value=None, copies=None):
        """A matrix, or a stack of equal ones (experts); of random values, if none is given."""
        type = self.format if type is None else type  # F32 is 0
        key = (rows, columns, type, value, copies)
        if key not in self.made:
            random = self.random.standard_normal((rows, columns), np.float32) * np.float32(0.02)
            values = random if value is None else np.full((rows, columns), value, np.float32)
            one = gguf.quants.quantize(values, type)
            self.made[key] = one if copies is None else np.repeat(one[None], copies, axis=0)
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


def rwkv7(writer, config):
    """Thin matrices are f16, as in mlcc (llama.cpp's quantizer leaves them as they are, too)."""
    file, hidden, inner = writer.file, config["hidden_size"], 4 * config["hidden_size"]
    decay, rate, value, gate = config["ranks"]
    file.add_feed_forward_length(inner)
    file.add_head_count(0)
    file.add_layer_norm_eps(1e-5)
    file.add_wkv_head_size(64)
    file.add_token_shift_count(2)
    file.add_decay_lora_rank(decay)
    file.add_iclr_lora_rank(rate)
    file.add_value_residual_mix_lora_rank(value)
    file.add_gate_lora_rank(gate)
    writer.matrix("token_embd.weight", config["vocab_size"], hidden, writer.head_type())
    norms = ["token_embd_norm", "output_norm"]
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}."
        norms += [block + name for name in ("attn_norm", "attn_norm_2", "time_mix_ln")]
        # The first layer has no value residual; the file holds matrices of the rate's rank in its place.
        for name, rank in (("w", decay), ("a", rate), ("v", value if layer else rate), ("g", gate)):
            if name != "g":
                writer.vector(f"{block}time_mix_{name}0.weight", hidden, -1.0)
            writer.matrix(f"{block}time_mix_{name}1.weight", rank, hidden, TYPES.F16)
            writer.matrix(f"{block}time_mix_{name}2.weight", hidden, rank, TYPES.F16)
        writer.file.add_tensor(block + "time_mix_lerp_fused.weight", np.full((6, 1, 1, hidden), 0.5, np.float32))
        writer.file.add_tensor(block + "channel_mix_lerp_k.weight", np.full((1, 1, hidden), 0.5, np.float32))
        for name in ("k_k", "k_a", "r_k"):
            writer.vector(f"{block}time_mix_{name}.weight", hidden, 0.5)
        for name in ("receptance", "key", "value", "output"):
            writer.matrix(f"{block}time_mix_{name}.weight", hidden, hidden)
        writer.matrix(block + "channel_mix_key.weight", inner, hidden)
        writer.matrix(block + "channel_mix_value.weight", hidden, inner)
    for name in norms:
        writer.vector(name + ".weight", hidden, 1.0)
        writer.vector(name + ".bias", hidden)
    writer.matrix("output.weight", config["vocab_size"], hidden, writer.head_type())


FAMILIES = {"gpt2": gpt2, "rwkv7": rwkv7, "lfm2": lfm2, "qwen3_5_text": qwen35, "granitemoehybrid": granite_hybrid}


def configuration(preset):
    """Fields of config.json, by their names there."""
    if preset in RWKV7:
        hidden, layers, ranks = RWKV7[preset]
        return {"model_type": "rwkv7", "hidden_size": hidden, "num_hidden_layers": layers, "ranks": ranks, "vocab_size": 65536,
                "max_position_embeddings": 4096}
    return next((entry["config"] for entry in json.loads(PRESETS.read_text()) if entry["name"] == preset), None)


def write(preset, format, path):
    config = configuration(preset)
    if config is None:
        raise SystemExit(f"no preset is named {preset}; see {PRESETS.name}, and {', '.join(RWKV7)}")
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
    FAMILIES.get(kind, llama_like)(writer, config)
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

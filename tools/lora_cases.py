#!/usr/bin/env python3
"""Writes LoRA adapters for tests/goldens/lora/base, with the weights that merging them gives.

    pip install numpy safetensors
    python3 tools/lora_cases.py                  # the folders in models/tests/data/lora

A folder has an adapter as PEFT 0.21 writes it, and `expected.safetensors`: the changed tensors in float32. They are computed in
float64 by the formulas of PEFT's `merge` (`peft/tuners/lora/layer.py`, `dora.py`), written down here anew:

    LoRA           W + s B A               s = alpha / r, with rslora alpha / sqrt(r)
    LoRA, tables   W + s (B A)^T
    DoRA           m (W + s B A) / ||W + s B A||, by rows
"""

import json
import pathlib

import numpy as np
from safetensors.numpy import load_file, save_file

ROOT = pathlib.Path(__file__).parent.parent
BASE = {name: tensor.astype(np.float64)
        for name, tensor in load_file(ROOT / "tests/goldens/lora/base/model.safetensors").items()}
DATA = ROOT / "models/tests/data/lora"
random = np.random.default_rng(5)


def normal(*shape):
    return random.normal(0, 0.1, shape).astype(np.float16)


def write(name, fields, tensors, expected):
    folder = DATA / name
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": "../base", "lora_alpha": 12, "r": 4, "alpha_pattern": {},
              "rank_pattern": {}, "use_rslora": False, "use_dora": False, "bias": "none", "modules_to_save": None} | fields
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    prefixed = {"base_model.model." + name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(prefixed, folder / "adapter_model.safetensors", {"format": "pt"})
    save_file({name: tensor.astype(np.float32) for name, tensor in expected.items()}, folder / "expected.safetensors")


def dora():
    """Ranks and alphas by module, rank-stabilized."""
    tensors, expected = {}, {}
    modules = [("model.layers.0.self_attn.q_proj", 4, 12), ("model.layers.1.self_attn.q_proj", 2, 12),
               ("model.layers.0.mlp.down_proj", 4, 5), ("model.layers.1.mlp.down_proj", 3, 7)]
    for module, rank, alpha in modules:
        weight = BASE[module + ".weight"]
        a, b = normal(rank, weight.shape[1]), normal(weight.shape[0], rank)
        magnitude = (np.linalg.norm(weight, axis=1) * random.uniform(0.8, 1.2, len(weight))).astype(np.float16)
        tensors |= {module + ".lora_A.weight": a, module + ".lora_B.weight": b,
                    module + ".lora_magnitude_vector": magnitude}
        merged = weight + alpha / np.sqrt(rank) * (b.astype(np.float64) @ a.astype(np.float64))
        length = np.linalg.norm(merged, axis=1)
        expected[module + ".weight"] = (magnitude.astype(np.float64) / length)[:, None] * merged
    write("dora", {"use_dora": True, "use_rslora": True,
                   "rank_pattern": {"layers.1.self_attn.q_proj": 2, r"layers\.1\.mlp\.down_proj": 3},
                   "alpha_pattern": {"layers.0.mlp.down_proj": 5, r"layers\.[1-9]\.mlp\.(up|down)_proj": 7}},
          tensors, expected)


def tables():
    """The embedding table by factors, the head and a norm as they were saved."""
    table = BASE["model.embed_tokens.weight"]
    a, b = normal(4, table.shape[0]), normal(table.shape[1], 4)
    head, norm = normal(*BASE["lm_head.weight"].shape), normal(*BASE["model.norm.weight"].shape)
    tensors = {"model.embed_tokens.lora_embedding_A": a, "model.embed_tokens.lora_embedding_B": b,
               "lm_head.weight": head, "model.norm.weight": norm}
    expected = {"model.embed_tokens.weight": table + 12 / 4 * (b.astype(np.float64) @ a.astype(np.float64)).T,
                "lm_head.weight": head, "model.norm.weight": norm}
    write("tables", {"modules_to_save": ["lm_head", "norm"]}, tensors, expected)


dora()
tables()

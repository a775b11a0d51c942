#!/usr/bin/env python3
"""Writes reference cases of encoders as GGUF files, with the `gguf` package: names by its tables, and to values and metadata what
convert_hf_to_gguf.py of llama.cpp does.

    pip install gguf numpy && python3 tools/gguf_encoders.py embed-bert models/tests/data/embed-bert.gguf
"""

import argparse
import json
import pathlib

import gguf
import numpy as np
from gguf_cases import TYPES, as_float, read_safetensors

ROOT = pathlib.Path(__file__).parent.parent
ARCHITECTURES = {"bert": "BERT", "xlm-roberta": "BERT", "modernbert": "MODERN_BERT", "nomic_bert": "NOMIC_BERT",
                 "gemma3_text": "GEMMA_EMBEDDING"}
POOLINGS = {"mean": "MEAN", "cls": "CLS", "lasttoken": "LAST"}


def pooling(folder, config):
    if config["architectures"][0].endswith("ForSequenceClassification"):
        return gguf.PoolingType.RANK
    modes = json.loads((folder / "1_Pooling/config.json").read_text())
    found = next(name for name, on in modes.items() if name.startswith("pooling_mode_") and on is True)
    return gguf.PoolingType[POOLINGS[found.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")]]


def metadata(w, c, folder, arch):
    offset = c["pad_token_id"] + 1 if c["model_type"] == "xlm-roberta" else 0
    size = lambda *names: next(c[name] for name in names if name in c)
    w.add_context_length(size("max_position_embeddings", "n_positions") - offset)
    w.add_embedding_length(size("hidden_size", "n_embd"))
    w.add_block_count(size("num_hidden_layers", "n_layer"))
    w.add_feed_forward_length(size("intermediate_size", "n_inner"))
    w.add_head_count(size("num_attention_heads", "n_head"))
    w.add_causal_attention(False)
    w.add_pooling_type(pooling(folder, c))
    if "type_vocab_size" in c:
        w.add_token_type_count(c["type_vocab_size"])
    if arch == "GEMMA_EMBEDDING":
        w.add_head_count_kv(c["num_key_value_heads"])
        w.add_key_length(c["head_dim"])
        w.add_value_length(c["head_dim"])
        w.add_layer_norm_rms_eps(c["rms_norm_eps"])
        w.add_rope_freq_base(c["rope_theta"])
        w.add_sliding_window(c["sliding_window"])
        w.add_uint32("gemma-embedding.attention.sliding_window_pattern", c["layer_types"].index("full_attention") + 1)
    elif arch == "MODERN_BERT":
        w.add_layer_norm_eps(c["norm_eps"])
        thetas = c.get("rope_parameters", {
            "full_attention": {"rope_theta": c.get("global_rope_theta")},
            "sliding_attention": {"rope_theta": c.get("local_rope_theta")},
        })
        w.add_rope_freq_base(thetas["full_attention"]["rope_theta"])
        w.add_float32("modern-bert.rope.freq_base_swa", thetas["sliding_attention"]["rope_theta"])
        w.add_sliding_window(c["local_attention"])
        w.add_uint32("modern-bert.attention.sliding_window_pattern", c["global_attn_every_n_layers"])
        w.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    elif arch == "NOMIC_BERT":
        w.add_layer_norm_eps(c["layer_norm_epsilon"])
        w.add_rope_freq_base(c["rotary_emb_base"])
    else:
        w.add_layer_norm_eps(c["layer_norm_eps"])
    return offset


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("file", type=pathlib.Path)
    args = parser.parse_args()
    folder = ROOT / "tests/goldens" / args.case
    c = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[c["model_type"]]
    number = gguf.MODEL_ARCH[arch]
    w = gguf.GGUFWriter(args.file, gguf.MODEL_ARCH_NAMES[number])
    names = gguf.get_tensor_name_map(number, c.get("num_hidden_layers", c.get("n_layer")))
    offset = metadata(w, c, folder, arch)
    tensors = read_safetensors(folder)
    for dense in ("2_Dense", "3_Dense"):
        if (folder / dense).is_dir():
            found = read_safetensors(folder / dense)
            tensors |= {name.replace("linear", f"dense_{dense[0]}"): value for name, value in found.items()}
    for stored, (array, kind) in tensors.items():
        if stored.startswith("pooler.") or stored.endswith("position_ids"):
            continue
        values = as_float(array, kind)
        if stored.endswith("position_embeddings.weight"):
            values = values[offset:]
        if arch == "GEMMA_EMBEDDING" and stored.endswith("norm.weight"):
            values = values + 1
        name = stored
        for prefix in ("bert.", "roberta."):
            name = name.removeprefix(prefix)
        if arch == "MODERN_BERT":
            name = name.removeprefix("model.")
            # With labels the converter calls the last layer so.
            name = "classifier.out_proj" + name.removeprefix("classifier") if name.startswith("classifier.") else name
        if arch == "GEMMA_EMBEDDING" and not name.startswith(("model.", "dense_")):
            name = "model." + name
        new = names.get_name(name, (".weight", ".bias"))
        if new is None:
            raise ValueError(f"no name for {stored}")
        target = TYPES.F32 if values.ndim == 1 else {"F32": TYPES.F32, "F16": TYPES.F16, "BF16": TYPES.BF16}[kind]
        w.add_tensor(new, gguf.quantize(np.ascontiguousarray(values, np.float32), target), raw_dtype=target)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    print(args.file)


if __name__ == "__main__":
    main()

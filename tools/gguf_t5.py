#!/usr/bin/env python3
"""Writes a reference case of T5 as a GGUF file, with the `gguf` package: names by its tables, and to metadata what
convert_hf_to_gguf.py of llama.cpp does. The format has no field for the largest distance: it has to be 128.

    pip install gguf numpy && python3 tools/gguf_t5.py tests/goldens/t5-relu models/tests/data/t5-relu.gguf
"""

import json
import pathlib
import sys

import gguf

from gguf_cases import as_float, read_safetensors


def main(folder, out):
    c = json.loads((folder / "config.json").read_text())
    assert c["relative_attention_max_distance"] == 128
    w = gguf.GGUFWriter(out, "t5")
    w.add_context_length(c.get("n_positions", 512))
    w.add_embedding_length(c["d_model"])
    w.add_feed_forward_length(c["d_ff"])
    w.add_block_count(c["num_layers"])
    w.add_decoder_block_count(c["num_decoder_layers"])
    w.add_head_count(c["num_heads"])
    w.add_key_length(c["d_kv"])
    w.add_value_length(c["d_kv"])
    w.add_layer_norm_eps(c["layer_norm_epsilon"])
    w.add_relative_attn_buckets_count(c["relative_attention_num_buckets"])
    w.add_layer_norm_rms_eps(c["layer_norm_epsilon"])
    w.add_decoder_start_token_id(c["decoder_start_token_id"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, max(c["num_layers"], c["num_decoder_layers"]))
    for name, (stored, kind) in read_safetensors(folder).items():
        values = as_float(stored, kind)
        renamed = "token_embd.weight" if name == "shared.weight" else names.get_name(name, try_suffixes=(".weight",))
        w.add_tensor(renamed, values.astype("float32" if values.ndim == 1 else "float16"))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))

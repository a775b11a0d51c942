#!/usr/bin/env python3
"""Writes GGUF files of models with recurrent layers, latent attention or layers of several kinds, as tools/gguf_cases.py does.

    python3 tools/gguf_hybrids.py GOLDENS...              # the small files of models/tests/data
    python3 tools/gguf_hybrids.py GOLDENS... --all DIR    # one file for each reference checkpoint of these families

Tensor names come from the tables of the `gguf` package; changes of values are those of llama.cpp's converters.
"""

import argparse
import json
import pathlib

import gguf
import numpy as np
from gguf_cases import DATA, TYPES, as_float, permute, read_safetensors

# Kept in the project.
PROJECT = ("qwen3.5-moe", "qwen3-next", "granite4-hybrid", "falcon-h1", "nemotron-h", "mamba", "gemma4-e", "gemma4-moe",
           "deepseek-v3", "mistral4", "exaone4", "kimi-linear")

ARCHITECTURES = {
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "gemma4_text": "gemma4",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h_moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "mistral4": "mistral4",
    "mamba": "mamba",
    "exaone4": "exaone4",
    "kimi_linear": "kimi-linear",
}

# Tensors that stay in f32 whatever the others are.
EXACT = ("ffn_gate_inp.weight", "ssm_a", "ssm_d", "ssm_conv1d.weight")


def text_config(folder):
    config = json.loads((folder / "config.json").read_text())
    return config.get("text_config", config) if "hidden_size" not in config else config


def tiled(array, axis, keys, group, size):
    """Value heads by key head become the first of each key head, then the second of each."""
    shape = array.shape
    split = shape[:axis] + (keys, group, size) + shape[axis + 1 :]
    return array.reshape(split).swapaxes(axis, axis + 1).reshape(shape)


class Hybrid:
    def __init__(self, folder, path):
        self.folder, self.config = folder, text_config(folder)
        self.arch = ARCHITECTURES[self.config["model_type"]]
        self.writer = gguf.GGUFWriter(path, self.arch)
        number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == self.arch)
        self.layers = self.config["num_hidden_layers"]
        self.names = gguf.get_tensor_name_map(number, self.layers)
        self.stacks = {}

    # Metadata

    def metadata(self):
        w, c = self.writer, self.config
        w.add_block_count(self.layers)
        w.add_embedding_length(c["hidden_size"])
        w.add_context_length(c.get("max_position_embeddings", 2048))
        w.add_layer_norm_rms_eps(c.get("rms_norm_eps", c.get("layer_norm_epsilon")))
        rope = c.get("rope_parameters") or {}
        theta = c.get("rope_theta", rope.get("rope_theta"))
        if theta is not None:
            w.add_rope_freq_base(theta)
        if self.arch != "mamba":
            w.add_head_count(c["num_attention_heads"])
        if isinstance(c.get("intermediate_size"), int) and self.arch not in ("gemma4", "nemotron_h_moe"):
            w.add_feed_forward_length(c["intermediate_size"])
        kind = {"qwen35": "qwen", "qwen35moe": "qwen", "qwen3next": "qwen", "deepseek2": "latent", "mistral4": "latent",
                "granitehybrid": "granite", "falcon-h1": "falcon", "kimi-linear": "kimi", "nemotron_h_moe": "nemotron"}.get(self.arch, self.arch)
        getattr(self, kind)(w, c, rope)
        for name, add in (("bos_token_id", w.add_bos_token_id), ("eos_token_id", w.add_eos_token_id)):
            if isinstance(c.get(name), int):
                add(c[name])

    def heads(self, w, c, kv=None):
        w.add_head_count_kv(kv or c["num_key_value_heads"])
        size = c.get("head_dim")
        if size:
            w.add_key_length(size)
            w.add_value_length(size)

    def mixer(self, w, taps, state, groups, inner, rank):
        w.add_ssm_conv_kernel(taps)
        w.add_ssm_state_size(state)
        if groups is not None:
            w.add_ssm_group_count(groups)
        w.add_ssm_inner_size(inner)
        w.add_ssm_time_step_rank(rank)

    def experts(self, w, c, count, shared=None):
        if count:
            w.add_expert_count(count)
            w.add_expert_used_count(c["num_experts_per_tok"])
            if c.get("moe_intermediate_size"):
                w.add_expert_feed_forward_length(c["moe_intermediate_size"])
            if shared:
                w.add_expert_shared_feed_forward_length(shared)

    def exaone4(self, w, c, rope):
        self.heads(w, c)
        if c.get("sliding_window"):
            w.add_sliding_window(c["sliding_window"])
            w.add_sliding_window_pattern([kind == "sliding_attention" for kind in c["layer_types"]])
        if rope.get("rope_type") == "llama3":
            self.llama3_factors(rope)

    def llama3_factors(self, rope):
        size = self.config["head_dim"]
        freqs = 1.0 / rope["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float64) / size)
        turns = rope["original_max_position_embeddings"] * freqs / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        factors = 1 / ((1 - smooth) / rope["factor"] + smooth)
        self.writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))

    def mamba(self, w, c, rope):
        w.add_feed_forward_length(0)
        w.add_head_count(0)
        self.mixer(w, c["conv_kernel"], c["state_size"], None, c["expand"] * c["hidden_size"], c["time_step_rank"])
        w.add_ssm_dt_b_c_rms(False)

    def qwen(self, w, c, rope):
        self.heads(w, c)
        w.add_rope_dimension_count(int(c["head_dim"] * c.get("partial_rotary_factor", rope.get("partial_rotary_factor", 0.25))))
        values = c["linear_num_value_heads"]
        self.mixer(w, c["linear_conv_kernel_dim"], c["linear_key_head_dim"], c["linear_num_key_heads"],
                   values * c["linear_value_head_dim"], values)
        w.add_full_attention_interval(c.get("full_attention_interval", 4))
        self.experts(w, c, c.get("num_experts"), c.get("shared_expert_intermediate_size"))

    def granite(self, w, c, rope):
        w.add_head_count_kv([c["num_key_value_heads"] if kind == "attention" else 0 for kind in c["layer_types"]])
        inner = c["mamba_n_heads"] * c["mamba_d_head"]
        self.mixer(w, c["mamba_d_conv"], c["mamba_d_state"], c["mamba_n_groups"], inner, c["mamba_n_heads"])
        w.add_attention_scale(c["attention_multiplier"])
        w.add_embedding_scale(c["embedding_multiplier"])
        w.add_residual_scale(c["residual_multiplier"])
        w.add_logit_scale(c["logits_scaling"])
        w.add_rope_scaling_finetuned(c["position_embedding_type"] == "rope")
        self.experts(w, c, c.get("num_local_experts"), c["shared_intermediate_size"])

    def falcon(self, w, c, rope):
        self.heads(w, c)
        self.mixer(w, c["mamba_d_conv"], c["mamba_d_state"], c["mamba_n_groups"], c["mamba_d_ssm"], c["mamba_n_heads"])

    def nemotron(self, w, c, rope):
        pattern = c["hybrid_override_pattern"]
        self.heads(w, c, [c["num_key_value_heads"] if kind == "*" else 0 for kind in pattern])
        w.add_feed_forward_length([c["moe_intermediate_size"] if kind == "E" else 0 for kind in pattern])
        heads = c["mamba_num_heads"]
        self.mixer(w, c["conv_kernel"], c["ssm_state_size"], c["n_groups"], heads * c["mamba_head_dim"], heads)
        self.experts(w, c, c["n_routed_experts"], c["moe_shared_expert_intermediate_size"])
        w.add_expert_shared_count(c["n_shared_experts"])
        w.add_expert_weights_norm(c["norm_topk_prob"])
        w.add_expert_weights_scale(c["routed_scaling_factor"])
        w.add_expert_group_count(c["n_group"])

    def kimi(self, w, c, rope):
        linear = c["linear_attn_config"]
        w.add_head_count_kv([1 if i + 1 in linear["full_attn_layers"] else 0 for i in range(self.layers)])
        w.add_ssm_conv_kernel(linear["short_conv_kernel_size"])
        w.add_kda_head_dim(linear["head_dim"])
        rank, turned = c["kv_lora_rank"], c["qk_rope_head_dim"]
        w.add_kv_lora_rank(rank)
        w.add_rope_dimension_count(turned)
        w.add_key_length(rank + turned)
        w.add_key_length_mla(c["qk_nope_head_dim"] + turned)
        w.add_value_length_mla(c["v_head_dim"])
        self.experts(w, dict(c, num_experts_per_tok=c["num_experts_per_token"]), c["num_experts"])
        w.add_expert_shared_count(c["num_shared_experts"])
        w.add_leading_dense_block_count(c["first_k_dense_replace"])
        w.add_expert_weights_scale(c["routed_scaling_factor"])

    def latent(self, w, c, rope):
        scaling = c.get("rope_scaling") or (rope if rope.get("rope_type") == "yarn" else {})
        w.add_head_count_kv(1)
        w.add_leading_dense_block_count(c.get("first_k_dense_replace", 0))
        if c.get("q_lora_rank"):
            w.add_q_lora_rank(c["q_lora_rank"])
        rank, turned = c["kv_lora_rank"], c["qk_rope_head_dim"]
        w.add_kv_lora_rank(rank)
        w.add_key_length(rank + turned)
        w.add_value_length(rank)
        w.add_key_length_mla(c["qk_nope_head_dim"] + turned)
        w.add_value_length_mla(c["v_head_dim"])
        w.add_rope_dimension_count(turned)
        self.experts(w, c, c["n_routed_experts"])
        w.add_expert_shared_count(c["n_shared_experts"])
        w.add_expert_weights_scale(c["routed_scaling_factor"])
        if c["norm_topk_prob"]:
            w.add_expert_weights_norm(True)
        if c.get("n_group", 1) > 1:
            w.add_expert_group_count(c["n_group"])
            w.add_expert_group_used_count(c["topk_group"])
        sigmoid = c["model_type"] in ("deepseek_v3", "glm4_moe_lite")
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
        if scaling:
            if scaling["mscale"] != scaling["mscale_all_dim"]:
                raise ValueError("two factors of YaRN that differ")
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            w.add_rope_scaling_factor(scaling["factor"])
            w.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
            w.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
            w.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
            w.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
        if "llama_4_scaling_beta" in scaling:
            w.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])

    def gemma4(self, w, c, rope):
        windowed = [kind == "sliding_attention" for kind in c["layer_types"]]
        w.add_sliding_window_pattern(windowed)
        w.add_sliding_window(c["sliding_window"])
        w.add_shared_kv_layers(c["num_kv_shared_layers"])
        w.add_embedding_length_per_layer_input(c["hidden_size_per_layer_input"] or 0)
        for size, suffix in ((c["global_head_dim"], ""), (c["head_dim"], "_swa")):
            getattr(w, f"add_key_length{suffix}")(size)
            getattr(w, f"add_value_length{suffix}")(size)
            getattr(w, f"add_rope_dimension_count{suffix}")(size)
        few, many = c["num_global_key_value_heads"] or c["num_key_value_heads"], c["num_key_value_heads"]
        w.add_head_count_kv([many if local else few for local in windowed])
        first = self.layers - c["num_kv_shared_layers"]
        double = 2 if c["use_double_wide_mlp"] else 1
        w.add_feed_forward_length([c["intermediate_size"] * (double if i >= first else 1) for i in range(self.layers)])
        full, local = rope["full_attention"], rope["sliding_attention"]
        w.add_rope_freq_base(full["rope_theta"])
        w.add_rope_freq_base_swa(local["rope_theta"])
        half = c["global_head_dim"] // 2
        turned = int(half * full["partial_rotary_factor"])
        w.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (half - turned), np.float32))
        if c["final_logit_softcapping"]:
            w.add_final_logit_softcapping(c["final_logit_softcapping"])
        if c["enable_moe_block"]:
            self.experts(w, dict(c, num_experts_per_tok=c["top_k_experts"]), c["num_experts"])

    # Tensors

    def name_of(self, name, layer):
        """`blk.N.PART` of a part that the package's tables know by another name."""
        return f"blk.{layer}.{name}"

    def convert(self, name, x):
        """The tensors that become of one, as (name of the checkpoint or in the file, values)."""
        c, arch = self.config, self.arch
        layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else None
        last = name.split(".", 3)[-1] if layer is not None else name
        if name.endswith(".A_log"):
            x = -np.exp(x)
            if arch not in ("mamba", "qwen35", "qwen35moe", "qwen3next", "kimi-linear"):
                x = x.reshape(-1, 1)
        if name.endswith(".dt_bias"):
            name = name.removesuffix("dt_bias") + ("dt.bias" if arch == "nemotron_h_moe" else "dt_proj.bias")
        if "conv1d.weight" in name:
            x = x.squeeze(1) if arch != "kimi-linear" else x.reshape(1, x.shape[0], 1, -1)
        if name.endswith(".D") and arch != "mamba":
            x = x.reshape(-1, 1)
        if arch in ("granitehybrid", "falcon-h1", "nemotron_h_moe") and last.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            x = x.reshape(c.get("mamba_n_groups", c.get("n_groups")), -1)
        if arch in ("granitehybrid", "nemotron_h_moe") and last.endswith("q_proj.weight"):
            x = permute(x, c["num_attention_heads"])
        if arch in ("granitehybrid", "nemotron_h_moe") and last.endswith("k_proj.weight"):
            x = permute(x, c["num_key_value_heads"])
        if arch.startswith("qwen3"):
            return self.convert_qwen(name, last, layer, x)
        if arch == "falcon-h1":
            return [(name, self.multiplied(last, x))]
        if arch == "granitehybrid" and "input_linear" in last or last.endswith("shared_mlp.output_linear.weight"):
            return self.convert_granite(last, layer, x)
        if last.endswith("kv_b_proj.weight"):
            both = x.reshape(c["num_attention_heads"], -1, x.shape[-1])
            keys, values = np.split(both, [c["qk_nope_head_dim"]], axis=1)
            base = name.removesuffix("kv_b_proj.weight")
            return [(base + "k_b_proj.weight", keys.transpose(0, 2, 1)), (base + "v_b_proj.weight", values)]
        if arch == "gemma4":
            renamed = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
                       "layer_scalar": "layer_output_scale.weight"}
            if last in renamed:
                return [(self.name_of(renamed[last], layer), x)]
        if name.endswith((".gate_up_proj", ".down_proj")):
            name += ".weight"
        if name.endswith(".e_score_correction_bias"):
            name = name.removesuffix("_bias") + ".bias"
        return [(name, x)]

    def convert_qwen(self, name, last, layer, x):
        c = self.config
        keys, size = c["linear_num_key_heads"], c["linear_key_head_dim"]
        group, width = c["linear_num_value_heads"] // keys, c["linear_value_head_dim"]
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            x = x + 1
        if last.endswith("in_proj_qkvz.weight"):
            parts = np.split(x.reshape(keys, -1, x.shape[-1]), np.cumsum([size, size, group * width]), axis=1)
            q, k, v, z = (part.reshape(-1, x.shape[-1]) for part in parts)
            return [(self.name_of("attn_qkv.weight", layer), np.concatenate([q, k, v])), (self.name_of("attn_gate.weight", layer), z)]
        if last.endswith("experts.gate_up_proj"):
            gate, up = np.split(x, 2, axis=1)
            base = name.removesuffix("gate_up_proj")
            return [(base + "gate_proj.weight", gate), (base + "up_proj.weight", up)]
        if last.endswith("experts.down_proj"):
            return [(name + ".weight", x)]
        if last.endswith("shared_expert_gate.weight"):
            x = x.reshape(-1)
        if self.arch != "qwen3next" and group > 1 and last.startswith("linear_attn."):
            before = 2 * keys * size
            if "in_proj_qkv" in last or "conv1d" in last:
                x = np.concatenate([x[:before], tiled(x[before:], 0, keys, group, width)])
            elif "in_proj_z" in last:
                x = tiled(x, 0, keys, group, width)
            elif last.split(".")[1] in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
                x = tiled(x, 0, keys, group, 1)
            elif "out_proj" in last:
                x = tiled(x, 1, keys, group, width)
        return [(name, x)]

    def convert_granite(self, last, layer, x):
        experts = "_exps" if "block_sparse_moe" in last else "_shexp" if self.config.get("num_local_experts") else ""
        if "output_linear" in last:
            return [(self.name_of(f"ffn_down{experts}.weight", layer), x)]
        gate, up = np.split(x, 2, axis=-2)
        return [(self.name_of(f"ffn_gate{experts}.weight", layer), gate), (self.name_of(f"ffn_up{experts}.weight", layer), up)]

    def multiplied(self, last, x):
        """Falcon-H1 with its multipliers in the weights."""
        c = self.config
        inner, state = c["mamba_d_ssm"], c["mamba_n_groups"] * c["mamba_d_state"]
        part = last.split(".")[-2]
        factor = {
            "down_proj": c["mlp_multipliers"][1],
            "gate_proj": c["mlp_multipliers"][0],
            "k_proj": c["key_multiplier"] * c["attention_in_multiplier"],
            "q_proj": c["attention_in_multiplier"],
            "v_proj": c["attention_in_multiplier"],
            "o_proj": c["attention_out_multiplier"],
            "out_proj": c["ssm_out_multiplier"],
            "in_proj": c["ssm_in_multiplier"],
            "lm_head": c["lm_head_multiplier"],
            "embed_tokens": c["embedding_multiplier"],
        }.get(part, 1.0)
        x = x * np.float64(factor)
        if part == "in_proj":
            widths = [inner, inner, state, state, c["mamba_n_heads"]]
            x = x * np.repeat(c["ssm_multipliers"], widths)[:, None]
        return x.astype(np.float32)

    def tensors(self):
        tied = self.config.get("tie_word_embeddings", self.arch == "mamba")
        for stored, (array, kind) in read_safetensors(self.folder).items():
            name = stored.replace("model.language_model.", "model.", 1)
            other = name.startswith(("model.visual.", "visual.", "model.vision_tower.", "model.embed_vision.", "mtp.", "model.audio_tower."))
            draft = ".layers." in name and int(name.split(".layers.")[1].split(".")[0]) >= self.layers
            if other or draft or (tied and name == "lm_head.weight") or kind not in ("F32", "F16", "BF16"):
                continue
            for new, values in self.convert(name, as_float(array, kind)):
                base, mark, rest = new.partition(".experts.")
                if mark and rest[0].isdecimal():
                    number, part = rest.split(".", 1)
                    base = base.replace(".mixer", ".mlp").replace("backbone.", "model.") if self.arch == "nemotron_h_moe" else base
                    self.stacks.setdefault((f"{base}.experts.{part}", kind), {})[int(number)] = values
                else:
                    self.add(new, values, kind)
        for (name, kind), parts in self.stacks.items():
            self.add(name, np.stack([parts[n] for n in sorted(parts)]), kind)

    def add(self, name, values, kind):
        suffixes = (".weight", ".bias")
        new = name if name.startswith("blk.") else self.names.get_name(name, suffixes)
        if new is None:
            raise ValueError(f"{self.arch}: no name for {name}")
        if not new.endswith((*suffixes, ".scale", ".ssm_a", ".ssm_d")):
            new += name[name.rfind(".") :] if name.endswith(suffixes) else ".weight"
        small = values.ndim == 1 or new.endswith(EXACT) or self.arch == "falcon-h1"
        target = TYPES.F32 if small else {"F32": TYPES.F32, "F16": TYPES.F16, "BF16": TYPES.BF16}[kind]
        if "_norm" in new or new.endswith("ssm_norm.weight"):
            target = TYPES.F32
        data = gguf.quantize(np.ascontiguousarray(values, np.float32), target)
        self.writer.add_tensor(new, data, raw_dtype=target)

    def run(self):
        self.metadata()
        self.tensors()
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("goldens", type=pathlib.Path, nargs="+", help="folders of reference checkpoints")
    arguments.add_argument("--all", type=pathlib.Path, help="write a file for every checkpoint into this folder")
    options = arguments.parse_args()
    folders = sorted(folder for place in options.goldens for folder in place.iterdir() if (folder / "config.json").exists())
    target = options.all or DATA
    target.mkdir(exist_ok=True)
    for folder in folders:
        known = text_config(folder).get("model_type") in ARCHITECTURES and list(folder.glob("*.safetensors"))
        if known and (options.all or folder.name in PROJECT):
            path = target / f"{folder.name}.gguf"
            Hybrid(folder, path).run()
            print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()

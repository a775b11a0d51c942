#!/usr/bin/env python3
"""Writes GGUF files from checkpoints in the Hugging Face layout, with the `gguf` package of llama.cpp.

    pip install gguf sentencepiece
    python3 tools/gguf_cases.py GOLDENS...              # the small files of models/tests/data
    python3 tools/gguf_cases.py GOLDENS... --all DIR    # one file for each reference checkpoint that GGUF knows

Tensor names come from the package's own tables; changes of values are those of convert_hf_to_gguf.py.
"""

import argparse
import json
import pathlib
import struct

import gguf
import numpy as np

DATA = pathlib.Path(__file__).parent.parent / "models/tests/data"
TYPES = gguf.GGMLQuantizationType

# Kept in the project.
PROJECT = ("qwen2", "mistral-swa", "gemma", "stablelm-head-norms", "internlm2", "rwkv6-hf", "gpt-oss-mxfp4", "lfm2", "mamba2")

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "granite": "granite",
    "internlm": "llama",
    "internlm2": "internlm2",
    "baichuan": "baichuan",
    "qwen": "qwen",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "falcon": "falcon",
    "bloom": "bloom",
    "mpt": "mpt",
    "gpt_bigcode": "starcoder",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "olmo2": "olmo2",
    "chatglm": "chatglm",
    "glm": "chatglm",
    "glm4": "glm4",
    "smollm3": "smollm3",
    "ministral3": "mistral3",
    "cohere2": "cohere2",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "lfm2": "lfm2",
    "mamba2": "mamba2",
    "rwkv6": "rwkv6",
    "rwkv7": "rwkv7",
}


def read_safetensors(folder):
    """Name to (array, type name). bfloat16 comes as uint16."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            kind = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "U8": np.uint8, "BOOL": np.bool_}[entry["dtype"]]
            tensors[name] = (np.frombuffer(data[begin:end], kind).reshape(entry["shape"]), entry["dtype"])
    return tensors


def as_float(array, kind):
    if kind == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def first(config, *names, default=None):
    for name in names:
        if config.get(name) is not None:
            return config[name]
    return default


def permute(weights, heads):
    """Interleaves the halves of each head, as LlamaModel.permute does."""
    return weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


class Converter:
    def __init__(self, folder, path):
        self.folder = folder
        self.config = json.loads((folder / "config.json").read_text())
        self.arch = ARCHITECTURES[self.config["model_type"]]
        self.writer = gguf.GGUFWriter(path, self.arch)
        number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == self.arch)
        self.layers = first(self.config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
        if self.arch == "gpt-oss" and self.config.get("swiglu_limit", 7.0) != 7.0:
            raise ValueError("a limit of the gate other than 7")
        if self.arch == "glm4moe":
            self.config.setdefault("head_dim", self.config["hidden_size"] // self.config["num_attention_heads"])
        self.names = gguf.get_tensor_name_map(number, self.layers)
        c = self.config
        self.hidden = first(c, "hidden_size", "n_embd", "d_model")
        self.heads = first(c, "num_attention_heads", "n_head", "n_heads")
        self.kv_heads = first(c, "num_key_value_heads", "multi_query_group_num", default=self.heads)
        if self.arch == "falcon":
            self.kv_heads = c["num_kv_heads"] if c.get("new_decoder_architecture") else (1 if c["multi_query"] else self.heads)
        if self.arch == "starcoder":
            self.kv_heads = 1
        if self.heads:
            self.head = first(c, "head_dim", "kv_channels", default=self.hidden // self.heads)

    def metadata(self):
        w, c = self.writer, self.config
        if self.arch in ("rwkv6", "rwkv7"):
            return self.rwkv_metadata()
        if self.arch == "mamba2":
            return self.mamba_metadata()
        w.add_block_count(self.layers)
        w.add_embedding_length(self.hidden)
        w.add_head_count(self.heads)
        if self.arch == "lfm2":
            full = c.get("full_attn_idxs") or [i for i, kind in enumerate(c["layer_types"]) if kind == "full_attention"]
            w.add_head_count_kv([self.kv_heads if layer in full else 0 for layer in range(self.layers)])
            w.add_shortconv_l_cache(c["conv_L_cache"])
        elif self.kv_heads != self.heads or self.arch in ("falcon", "chatglm"):
            w.add_head_count_kv(self.kv_heads)
        context = first(c, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", default=2048)
        w.add_context_length(context)
        inner = first(c, "intermediate_size", "ffn_hidden_size", "n_inner", default=4 * self.hidden)
        if self.arch == "lfm2":
            inner = first(c, "block_ff_dim", "intermediate_size")
            if c.get("block_auto_adjust_ff_dim", True):
                inner = int(c.get("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
                inner = -(-inner // c["block_multiple_of"]) * c["block_multiple_of"]
        w.add_feed_forward_length(inner)
        if c.get("head_dim"):
            w.add_key_length(c["head_dim"])
            w.add_value_length(c["head_dim"])
        eps = first(c, "rms_norm_eps", "layernorm_epsilon", *(["norm_eps", "block_norm_eps"] if self.arch == "lfm2" else []))
        if eps is not None:
            w.add_layer_norm_rms_eps(eps)
        eps = first(c, "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
        if eps is not None:
            w.add_layer_norm_eps(eps)
        parameters = c.get("rope_parameters") or {}
        theta = first(c, "rope_theta", "rotary_emb_base", default=parameters.get("rope_theta"))
        if self.arch == "chatglm":
            theta = 10000.0 * c.get("rope_ratio", 1.0)
        if theta is not None:
            w.add_rope_freq_base(theta)
        share = first(c, "partial_rotary_factor", "rotary_pct", default=parameters.get("partial_rotary_factor"))
        if self.arch == "chatglm":
            share = 0.5
        if self.arch == "minimax-m2":
            share = c["rotary_dim"] / self.head
        if self.arch == "glm4moe" and share is None:
            share = 0.5
        if share is not None or self.arch in ("llama", "smollm3", "mistral3"):
            w.add_rope_dimension_count(int(self.head * (share or 1.0)))
        if c.get("sliding_window"):
            w.add_sliding_window(c["sliding_window"])
        if c.get("attn_logit_softcapping"):
            w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
        if c.get("final_logit_softcapping"):
            w.add_final_logit_softcapping(c["final_logit_softcapping"])
        experts = first(c, "num_local_experts", "num_experts", "n_routed_experts")
        if experts:
            w.add_expert_count(experts)
            w.add_expert_used_count(c["num_experts_per_tok"])
        if c.get("moe_intermediate_size") or self.arch in ("gpt-oss", "minimax-m2"):
            w.add_expert_feed_forward_length(first(c, "moe_intermediate_size", "intermediate_size"))
        if self.arch == "glm4moe":
            w.add_expert_shared_count(c["n_shared_experts"])
            w.add_leading_dense_block_count(c["first_k_dense_replace"])
            w.add_expert_weights_scale(c["routed_scaling_factor"])
            w.add_expert_weights_norm(c["norm_topk_prob"])
        if self.arch == "cohere2":
            w.add_logit_scale(c["logit_scale"])
        if "use_parallel_residual" in c:
            w.add_parallel_residual(c["use_parallel_residual"])
        if c.get("query_pre_attn_scalar"):
            w.add_attention_scale(c["query_pre_attn_scalar"] ** -0.5)
        if self.arch == "gemma3":
            w.add_uint32("gemma3.attention.sliding_window_pattern", c["sliding_window_pattern"])
            w.add_float32("gemma3.rope.freq_base_swa", c["rope_local_base_freq"])
        if self.arch == "granite":
            w.add_attention_scale(c["attention_multiplier"])
            w.add_embedding_scale(c["embedding_multiplier"])
            w.add_residual_scale(c["residual_multiplier"])
            w.add_logit_scale(c["logits_scaling"])
        if self.arch == "baichuan" and "max_position_embeddings" not in c:
            # Published files have 40 layers and do not say it.
            w.add_max_alibi_bias(8.0)
        if self.arch == "mpt":
            w.add_max_alibi_bias(c["attn_config"]["alibi_bias_max"])
        scaling = c.get("rope_scaling") or {}
        yarn = scaling if scaling.get("rope_type") == "yarn" else parameters
        if yarn.get("rope_type") == "yarn" and self.arch in ("gpt-oss", "mistral3"):
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            w.add_rope_scaling_factor(yarn["factor"])
            w.add_rope_scaling_orig_ctx_len(yarn["original_max_position_embeddings"])
            if yarn.get("beta_fast"):
                w.add_rope_scaling_yarn_beta_fast(yarn["beta_fast"])
                w.add_rope_scaling_yarn_beta_slow(yarn["beta_slow"])
            if self.arch == "mistral3":
                w.add_rope_scaling_yarn_log_mul(yarn["mscale_all_dim"])
                w.add_attn_temperature_scale(yarn["llama_4_scaling_beta"])
        if scaling.get("rope_type") == "linear":
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            w.add_rope_scaling_factor(scaling["factor"])
        if scaling.get("rope_type") == "llama3":
            self.llama3_factors(scaling, theta)

    def rwkv_metadata(self):
        w, c = self.writer, self.config
        w.add_context_length(1048576)
        w.add_embedding_length(self.hidden)
        w.add_block_count(self.layers)
        w.add_layer_norm_eps(first(c, "layer_norm_epsilon", "norm_eps"))
        w.add_wkv_head_size(first(c, "head_size", "head_dim"))
        w.add_feed_forward_length(c["intermediate_size"])
        w.add_head_count(0)
        if self.arch == "rwkv6":
            w.add_rescale_every_n_layers(c["rescale_every"])
            w.add_time_mix_extra_dim(32)
            w.add_time_decay_extra_dim(64)
        else:
            w.add_decay_lora_rank(c["decay_low_rank_dim"])
            w.add_iclr_lora_rank(c["a_low_rank_dim"])
            w.add_value_residual_mix_lora_rank(c["v_low_rank_dim"])
            w.add_gate_lora_rank(c["gate_low_rank_dim"])

    def mamba_metadata(self):
        w, c = self.writer, self.config
        inner = c["num_heads"] * c["head_dim"]
        w.add_context_length(2**20)
        w.add_embedding_length(self.hidden)
        w.add_feed_forward_length(0)
        w.add_head_count(0)
        w.add_block_count(self.layers)
        w.add_ssm_conv_kernel(c["conv_kernel"])
        w.add_ssm_inner_size(inner)
        w.add_ssm_state_size(c["state_size"])
        w.add_ssm_time_step_rank(c["num_heads"])
        w.add_ssm_group_count(c["n_groups"])
        w.add_layer_norm_rms_eps(c["layer_norm_epsilon"])

    def llama3_factors(self, scaling, theta):
        dims = self.head
        freqs = 1.0 / theta ** (np.arange(0, dims, 2, dtype=np.float64) / dims)
        factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
        original = scaling["original_max_position_embeddings"]
        factors = []
        for freq in freqs:
            wave = 2 * np.pi / freq
            if wave < original / high:
                factors.append(1.0)
            elif wave > original / low:
                factors.append(factor)
            else:
                smooth = (original / wave - low) / (high - low)
                factors.append(1 / ((1 - smooth) / factor + smooth))
        self.writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))

    def change(self, name, array):
        """What convert_hf_to_gguf.py does to the values of a tensor."""
        c, heads = self.config, self.heads
        interleaved = self.arch in ("llama", "granite", "smollm3", "mistral3")
        if interleaved and ".q_proj." in name:
            return permute(array, heads)
        if interleaved and ".k_proj." in name:
            return permute(array, self.kv_heads)
        if name.endswith(("conv1d.weight", "conv.conv.weight")):
            return array.squeeze(1)
        if name.endswith(".A_log"):
            return -np.exp(array).reshape(-1, 1)
        if name.endswith("mixer.D"):
            return array.reshape(-1, 1)
        if name.endswith("mixer.norm.weight"):
            return array.reshape(c["n_groups"], -1)
        if self.arch in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            return array + 1
        if self.arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            return array.T
        if self.arch in ("gptneox", "bloom") and ".query_key_value." in name:
            return array.reshape(heads, 3, self.hidden // heads, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
        if self.arch == "falcon" and ".query_key_value." in name:
            groups = array.reshape(self.kv_heads, heads // self.kv_heads + 2, self.head, -1)
            parts = [groups[:, :-2], groups[:, -2:-1], groups[:, -1:]]
            return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
        return array

    def parts(self, name, array):
        """A fused projection as the tensors that the converter makes of it, else the tensor."""
        for old, new in ((".sinks", ".sinks.weight"), (".e_score_correction_bias", ".e_score_correction.bias"), (".dt_bias", ".dt_proj.bias"),
                         (".expert_bias", ".expert_bias.bias")):
            if name.endswith(old):
                name = name.removesuffix(old) + new
        if self.arch == "gpt-oss" and ".experts." in name:
            # Stacked already: a mark of experts one by one must not be seen.
            base, part = name.split(".experts.")
            bias = part.endswith("_bias")
            values = array if bias else array.transpose(0, 2, 1)
            kind = "bias" if bias else "weight"
            if part.startswith("down_proj"):
                return [(f"{base}|experts.down_proj.{kind}", values)]
            return [(f"{base}|experts.gate_proj.{kind}", values[:, ::2]), (f"{base}|experts.up_proj.{kind}", values[:, 1::2])]
        if name.endswith("W_pack.weight"):
            q, k, v = np.split(array, 3)
        elif name.endswith(".wqkv.weight"):
            groups = array.reshape(self.kv_heads, -1, self.head, array.shape[-1])
            q, k, v = (part.reshape(-1, array.shape[-1]) for part in (groups[:, :-2], groups[:, -2], groups[:, -1]))
        else:
            return [(name, self.change(name, array))]
        base = name.split(".attention.")[0].split(".self_attn.")[0] + ".self_attn."
        q, k = permute(q, self.heads), permute(k, self.kv_heads)
        return [(base + part + "_proj.weight", values) for part, values in (("q", q), ("k", k), ("v", v))]

    def mxfp4_blocks(self, tensors):
        """Experts of gpt-oss as blocks of ggml: the exponent first, element `j + 16` in the upper half of byte `j`."""
        for name in [name for name in tensors if name.endswith("_blocks")]:
            (codes, _), (exponents, _) = tensors.pop(name), tensors.pop(name.replace("_blocks", "_scales"))
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 32)
            packed = np.concatenate([exponents[..., None], codes[..., :16] | codes[..., 16:] << 4], axis=-1)
            packed = packed.reshape(*packed.shape[:2], -1)
            base, part = name.removesuffix("_blocks").rsplit(".", 1)
            parts = {"gate_proj": packed[:, ::2], "up_proj": packed[:, 1::2]} if part == "gate_up_proj" else {part: packed}
            for part, values in parts.items():
                new = self.names.get_name(f"{base}.{part}.weight", (".weight", ".bias"))
                self.writer.add_tensor(new, np.ascontiguousarray(values), raw_dtype=TYPES.MXFP4)

    def tensors(self, quantization):
        tensors = read_safetensors(self.folder)
        if self.arch in ("rwkv6", "rwkv7"):
            return self.rwkv_tensors(tensors, quantization)
        self.mxfp4_blocks(tensors)
        tied = self.config.get("tie_word_embeddings", self.arch == "starcoder")
        stacks = {}
        for stored, (array, kind) in tensors.items():
            if kind not in ("F32", "F16", "BF16") or "inv_freq" in stored or (tied and stored == "lm_head.weight"):
                continue
            for name, values in self.parts(stored, as_float(array, kind)):
                for mark in (".experts.", "_layernorm.norms."):
                    if mark in name:
                        base, rest = name.split(mark)
                        number, part = rest.split(".", 1)
                        stack = base + mark.replace(".norms", "") + part
                        stacks.setdefault(stack, {})[int(number)] = values
                        break
                else:
                    self.add(name.replace("|", "."), values, kind, quantization)
        for name, parts in stacks.items():
            self.add(name, np.stack([parts[n] for n in sorted(parts)]), "F32", quantization)

    def rwkv_tensors(self, tensors, quantization):
        seven = self.arch == "rwkv7"
        mixes = ["r", "w", "k", "v", "a", "g"] if seven else ["w", "k", "v", "r", "g"]
        lerp = ".attn.x_" if seven else ".attention.time_maa_"
        stacks = {}
        for name, (array, kind) in tensors.items():
            values = as_float(array, kind)
            base, found, mix = name.partition(lerp)
            if found and mix in mixes:
                stacks.setdefault(base.split(".")[-1], {})[mix] = values.reshape(-1)
                continue
            if seven:
                name = name.replace("_lora.lora.0.weight", "1.weight").replace("_lora.lora.2.weight", "2.weight")
                name = name.replace("_lora.lora.2.bias", "0.weight").replace("ffn_norm", "ln2").replace("ffn", "feed_forward")
                name = name.replace("attn", "attention").replace("g_norm", "ln_x")
                values = values.reshape(-1) if name.endswith("r_k") else values.squeeze()
                self.add(name, values, kind, quantization)
                if ".layers.0.attention.a" in name and name.split(".a")[-1][:1] in "012":
                    # The first layer has none; llama.cpp wants some.
                    self.add(".v".join(name.rsplit(".a", 1)), values, kind, quantization)
                continue
            layer = int(name.split(".")[2]) if ".blocks." in name else 0
            if name.endswith(("time_maa_w1", "time_decay_w1", "time_decay_w2")):
                values = values.T
            if name.endswith("time_maa_w2"):
                values = values.transpose(0, 2, 1)
            if name.endswith("time_decay") or "_maa_" in name and values.shape[0] == 1:
                values = values.squeeze()
            if name.endswith(("attention.output.weight", "feed_forward.value.weight")) and self.config["rescale_every"]:
                values = values / 2 ** (layer // self.config["rescale_every"])
            self.add(name, values, kind, quantization)
        for layer, parts in stacks.items():
            stacked = np.stack([parts[mix] for mix in mixes])
            stacked = stacked if seven else stacked[:, None, None, :]
            self.writer.add_tensor(f"blk.{layer}.time_mix_lerp_fused.weight", np.ascontiguousarray(stacked))

    def add(self, name, values, kind, quantization):
        suffixes = (".weight", ".bias")
        new = self.names.get_name(name, suffixes) or self.names.get_name(name.removeprefix("transformer."), suffixes)
        if new is None and ".experts." in name:
            new = self.names.get_name(name.removeprefix("model."), suffixes)
        if new is None:
            raise ValueError(f"{self.arch}: no name for {name}")
        if not new.endswith(suffixes) and not new.endswith((".ssm_a", ".ssm_d")):
            new += ".weight"
        target = {"F32": TYPES.F32, "F16": TYPES.F16, "BF16": TYPES.BF16}[kind]
        small = ("ffn_gate_inp.weight", "_norm.weight", "time_mix_first.weight", "time_mix_w2.weight", ".ssm_a", ".ssm_d",
                 "conv1d.weight", "shortconv.conv.weight", "_exps.bias")
        if values.ndim == 1 or new.endswith(small):
            target = TYPES.F32
        elif quantization is not None and values.shape[-1] % gguf.GGML_QUANT_SIZES[quantization][0] == 0:
            target = quantization
        data = gguf.quantize(np.ascontiguousarray(values, np.float32), target)
        self.writer.add_tensor(new, data, raw_dtype=target)

    def tokenizer(self):
        w = self.writer
        path, model = self.folder / "tokenizer.json", self.folder / "tokenizer.model"
        config = self.folder / "tokenizer_config.json"
        config = json.loads(config.read_text()) if config.exists() else {}
        if model.exists():
            import sentencepiece

            sp = sentencepiece.SentencePieceProcessor(str(model))
            pieces = range(sp.vocab_size())
            kind = lambda i: 2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 5 if sp.is_unused(i) else 6 if sp.is_byte(i) else 1
            w.add_tokenizer_model("llama")
            w.add_token_list([sp.id_to_piece(i) for i in pieces])
            w.add_token_scores([sp.get_score(i) for i in pieces])
            w.add_token_types([kind(i) for i in pieces])
            w.add_add_bos_token(config.get("add_bos_token", True))
        elif path.exists():
            data = json.loads(path.read_text())
            tokens = {id: (token, 1) for token, id in data["model"]["vocab"].items()}
            for added in data["added_tokens"]:
                tokens[added["id"]] = (added["content"], 3 if added["special"] else 4)
            w.add_tokenizer_model("gpt2")
            w.add_tokenizer_pre("qwen2" if self.arch == "qwen2" else "gpt-2")
            w.add_token_list([tokens[i][0] for i in range(len(tokens))])
            w.add_token_types([tokens[i][1] for i in range(len(tokens))])
            merges = data["model"]["merges"]
            w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
        if config.get("chat_template"):
            w.add_chat_template(config["chat_template"])
        for name, add in (("bos_token_id", w.add_bos_token_id), ("eos_token_id", w.add_eos_token_id)):
            if isinstance(self.config.get(name), int):
                add(self.config[name])

    def run(self, quantization=None):
        self.metadata()
        self.tokenizer()
        self.tensors(quantization)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def blocks(path):
    """Random bytes as blocks of every type, and what the package reads from them."""
    random = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "blocks")
    expected = {}
    for kind in (TYPES.Q4_0, TYPES.Q4_1, TYPES.Q5_0, TYPES.Q5_1, TYPES.Q8_0, TYPES.Q4_K, TYPES.Q5_K, TYPES.Q6_K,
                 TYPES.Q2_K, TYPES.Q3_K, TYPES.IQ4_NL, TYPES.IQ4_XS, TYPES.MXFP4, TYPES.NVFP4):
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        data = random.integers(0, 256, (3, 512 // elements, size), dtype=np.uint8)
        # Scales are half floats anywhere in a block: finite ones.
        offsets = {TYPES.Q6_K: [208], TYPES.Q4_0: [0], TYPES.Q5_0: [0], TYPES.Q8_0: [0],
                   TYPES.Q2_K: [80, 82], TYPES.Q3_K: [108], TYPES.IQ4_NL: [0], TYPES.IQ4_XS: [0], TYPES.MXFP4: [], TYPES.NVFP4: []}.get(kind, [0, 2])
        if kind == TYPES.MXFP4:
            data[:, :, 0] = random.integers(100, 140, data.shape[:2])
        for offset in offsets:
            scales = random.normal(0, 0.05, data.shape[:2]).astype(np.float16)
            data[:, :, offset : offset + 2] = scales.view(np.uint8).reshape(*data.shape[:2], 2)
        data = data.reshape(3, -1)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        expected[kind.name] = gguf.dequantize(data, kind).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = np.concatenate([expected[name].ravel() for name in expected])
    path.with_suffix(".f32").write_bytes(values.astype("<f4").tobytes())


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("goldens", type=pathlib.Path, nargs="+", help="folders of reference checkpoints")
    arguments.add_argument("--all", type=pathlib.Path, help="write a file for every checkpoint into this folder")
    arguments.add_argument("--quantize", help="a type such as Q8_0 for the matrices, with --all")
    options = arguments.parse_args()
    quantization = TYPES[options.quantize] if options.quantize else None
    if options.all:
        options.all.mkdir(exist_ok=True)
        for folder in sorted(folder for place in options.goldens for folder in place.iterdir()):
            config = folder / "config.json"
            kind = json.loads(config.read_text()).get("model_type") if config.exists() else None
            config = json.loads(config.read_text()) if config.exists() else {}
            if kind in ARCHITECTURES and list(folder.glob("*.safetensors")) and not config.get("position_encoding_2d"):
                if folder.name in ("gpt2-hub-names",):
                    continue
                try:
                    Converter(folder, options.all / f"{folder.name}.gguf").run(quantization)
                    print(folder.name)
                except ValueError as error:
                    (options.all / f"{folder.name}.gguf").unlink(missing_ok=True)
                    print(f"{folder.name}: not expressible: {error}")
        return
    DATA.mkdir(exist_ok=True)
    for name in PROJECT:
        folder = next(place / name for place in options.goldens if (place / name).exists())
        Converter(folder, DATA / f"{name}.gguf").run()
    blocks(DATA / "blocks.gguf")
    for path in sorted(DATA.iterdir()):
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()

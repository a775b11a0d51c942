#!/usr/bin/env python3
"""Reference cases for families whose published code needs no other library's weights: tiny random checkpoints under the
published tensor names, and what a straight NumPy program computes from them. Written from the published modeling files
(MossForCausalLM, GPTBigCodeForCausalLM, InternLMForCausalLM, InternLM2ForCausalLM, QWenLMHeadModel), apart from the
compiler's own definitions, with which it shares no code.

    python3 tools/reference_models.py tests/goldens

Needs NumPy. Weights are stored as float16, arithmetic is float64 on the stored values, every token by a full forward.
"""

import json
import math
import struct
import sys
from pathlib import Path

import numpy as np

HIDDEN, HEADS, LAYERS, VOCAB, CONTEXT = 64, 4, 2, 200, 128
SIZE = HIDDEN // HEADS


def rms(x, w, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w


def layer_norm(x, w, b, eps=1e-5):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps) * w + b


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def angles(n, dims, base=10000.0):
    """cos, sin: [n, dims / 2]."""
    inv = np.array([1.0 / base ** (2 * i / dims) for i in range(dims // 2)])
    table = np.arange(n)[:, None] * inv[None, :]
    return np.cos(table), np.sin(table)


def rotate_half(x, base=10000.0):
    """Whole heads [n, heads, size], element i with i + size / 2."""
    cos, sin = angles(x.shape[0], x.shape[2], base)
    out, half = x.copy(), x.shape[2] // 2
    for h in range(x.shape[1]):
        a, b = x[:, h, :half], x[:, h, half:]
        out[:, h, :half], out[:, h, half:] = a * cos - b * sin, b * cos + a * sin
    return out


def rotate_every_two(x, dims):
    """The first dims elements of each head, element 2 i with 2 i + 1."""
    cos, sin = angles(x.shape[0], dims)
    out = x.copy()
    for i in range(dims // 2):
        a, b = x[:, :, 2 * i], x[:, :, 2 * i + 1]
        c, s = cos[:, i : i + 1], sin[:, i : i + 1]
        out[:, :, 2 * i], out[:, :, 2 * i + 1] = a * c - b * s, b * c + a * s
    return out


def attention(q, k, v):
    """Causal; q [n, heads, size], k and v [n, kv heads, size]."""
    n, heads, size = q.shape
    shared = heads // k.shape[1]
    out = np.zeros_like(q)
    for h in range(heads):
        scores = q[:, h] @ k[:, h // shared].T / math.sqrt(size)
        scores[np.triu_indices(n, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, h] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, h // shared]
    return out.reshape(n, heads * size)


def linear(t, name, x):
    y = x @ t[name + ".weight"].T
    return y + t[name + ".bias"] if name + ".bias" in t else y


class Moss:
    config = dict(
        architectures=["MossForCausalLM"], model_type="moss", n_embd=HIDDEN, n_head=HEADS, n_layer=LAYERS,
        n_positions=CONTEXT, n_ctx=CONTEXT, rotary_dim=8, activation_function="gelu_new", layer_norm_epsilon=1e-5,
        tie_word_embeddings=False, vocab_size=VOCAB, torch_dtype="float16",
    )

    @staticmethod
    def shapes():
        yield "transformer.wte.weight", (VOCAB, HIDDEN)
        for i in range(LAYERS):
            h = f"transformer.h.{i}."
            yield h + "ln_1.weight", (HIDDEN,)
            yield h + "ln_1.bias", (HIDDEN,)
            yield h + "attn.qkv_proj.weight", (3 * HIDDEN, HIDDEN)
            yield h + "attn.out_proj.weight", (HIDDEN, HIDDEN)
            yield h + "mlp.fc_in.weight", (4 * HIDDEN, HIDDEN)
            yield h + "mlp.fc_in.bias", (4 * HIDDEN,)
            yield h + "mlp.fc_out.weight", (HIDDEN, 4 * HIDDEN)
            yield h + "mlp.fc_out.bias", (HIDDEN,)
        yield "transformer.ln_f.weight", (HIDDEN,)
        yield "transformer.ln_f.bias", (HIDDEN,)
        yield "lm_head.weight", (VOCAB, HIDDEN)
        yield "lm_head.bias", (VOCAB,)

    @staticmethod
    def forward(t, ids):
        x = t["transformer.wte.weight"][ids]
        n, cores = len(ids), 4
        for i in range(LAYERS):
            h = f"transformer.h.{i}."
            y = layer_norm(x, t[h + "ln_1.weight"], t[h + "ln_1.bias"])
            fused = linear(t, h + "attn.qkv_proj", y).reshape(n, cores, 3, HIDDEN // cores)
            # In this order.
            q, v, k = (fused[:, :, j].reshape(n, HEADS, SIZE) for j in range(3))
            a = attention(rotate_every_two(q, 8), rotate_every_two(k, 8), v)
            m = linear(t, h + "mlp.fc_out", gelu_tanh(linear(t, h + "mlp.fc_in", y)))
            x = x + linear(t, h + "attn.out_proj", a) + m
        return linear(t, "lm_head", layer_norm(x, t["transformer.ln_f.weight"], t["transformer.ln_f.bias"]))


class BigCode:
    config = dict(
        architectures=["GPTBigCodeForCausalLM"], model_type="gpt_bigcode", n_embd=HIDDEN, n_head=HEADS, n_layer=LAYERS,
        n_positions=CONTEXT, n_inner=160, multi_query=True, activation_function="gelu_pytorch_tanh",
        layer_norm_epsilon=1e-5, scale_attn_weights=True, vocab_size=VOCAB, torch_dtype="float16",
    )

    @staticmethod
    def shapes():
        yield "transformer.wte.weight", (VOCAB, HIDDEN)
        yield "transformer.wpe.weight", (CONTEXT, HIDDEN)
        for i in range(LAYERS):
            h = f"transformer.h.{i}."
            layers = [("attn.c_attn", HIDDEN + 2 * SIZE, HIDDEN), ("attn.c_proj", HIDDEN, HIDDEN),
                      ("mlp.c_fc", 160, HIDDEN), ("mlp.c_proj", HIDDEN, 160)]
            for name, rows, columns in layers:
                yield h + name + ".weight", (rows, columns)
                yield h + name + ".bias", (rows,)
            for name in ("ln_1", "ln_2"):
                yield h + name + ".weight", (HIDDEN,)
                yield h + name + ".bias", (HIDDEN,)
        yield "transformer.ln_f.weight", (HIDDEN,)
        yield "transformer.ln_f.bias", (HIDDEN,)

    @staticmethod
    def forward(t, ids):
        n = len(ids)
        x = t["transformer.wte.weight"][ids] + t["transformer.wpe.weight"][:n]
        for i in range(LAYERS):
            h = f"transformer.h.{i}."
            y = layer_norm(x, t[h + "ln_1.weight"], t[h + "ln_1.bias"])
            fused = linear(t, h + "attn.c_attn", y)
            q = fused[:, :HIDDEN].reshape(n, HEADS, SIZE)
            k = fused[:, HIDDEN : HIDDEN + SIZE].reshape(n, 1, SIZE)
            v = fused[:, HIDDEN + SIZE :].reshape(n, 1, SIZE)
            x = x + linear(t, h + "attn.c_proj", attention(q, k, v))
            y = layer_norm(x, t[h + "ln_2.weight"], t[h + "ln_2.bias"])
            x = x + linear(t, h + "mlp.c_proj", gelu_tanh(linear(t, h + "mlp.c_fc", y)))
        x = layer_norm(x, t["transformer.ln_f.weight"], t["transformer.ln_f.bias"])
        return x @ t["transformer.wte.weight"].T


class InternLm:
    config = dict(
        architectures=["InternLMForCausalLM"], model_type="internlm", bias=True, hidden_act="silu", hidden_size=HIDDEN,
        intermediate_size=160, num_attention_heads=HEADS, num_hidden_layers=LAYERS, max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6, tie_word_embeddings=False, vocab_size=VOCAB, torch_dtype="float16",
    )

    @staticmethod
    def shapes():
        yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
        for i in range(LAYERS):
            h = f"model.layers.{i}."
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                yield f"{h}self_attn.{name}.weight", (HIDDEN, HIDDEN)
                yield f"{h}self_attn.{name}.bias", (HIDDEN,)
            yield h + "mlp.gate_proj.weight", (160, HIDDEN)
            yield h + "mlp.up_proj.weight", (160, HIDDEN)
            yield h + "mlp.down_proj.weight", (HIDDEN, 160)
            yield h + "input_layernorm.weight", (HIDDEN,)
            yield h + "post_attention_layernorm.weight", (HIDDEN,)
        yield "model.norm.weight", (HIDDEN,)
        yield "lm_head.weight", (VOCAB, HIDDEN)

    @staticmethod
    def forward(t, ids):
        x, n = t["model.embed_tokens.weight"][ids], len(ids)
        for i in range(LAYERS):
            h = f"model.layers.{i}."
            y = rms(x, t[h + "input_layernorm.weight"], 1e-6)
            q, k, v = (linear(t, h + f"self_attn.{p}_proj", y).reshape(n, HEADS, SIZE) for p in "qkv")
            x = x + linear(t, h + "self_attn.o_proj", attention(rotate_half(q), rotate_half(k), v))
            y = rms(x, t[h + "post_attention_layernorm.weight"], 1e-6)
            gate, up = linear(t, h + "mlp.gate_proj", y), linear(t, h + "mlp.up_proj", y)
            x = x + linear(t, h + "mlp.down_proj", silu(gate) * up)
        return linear(t, "lm_head", rms(x, t["model.norm.weight"], 1e-6))


class InternLm2:
    config = dict(
        architectures=["InternLM2ForCausalLM"], model_type="internlm2", bias=False, hidden_act="silu",
        hidden_size=HIDDEN, intermediate_size=160, num_attention_heads=HEADS, num_key_value_heads=2,
        num_hidden_layers=LAYERS, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, rope_theta=1000000,
        rope_scaling={"type": "dynamic", "factor": 2.0}, tie_word_embeddings=False, vocab_size=VOCAB,
        torch_dtype="float16",
    )

    @staticmethod
    def shapes():
        yield "model.tok_embeddings.weight", (VOCAB, HIDDEN)
        for i in range(LAYERS):
            h = f"model.layers.{i}."
            yield h + "attention.wqkv.weight", (HIDDEN + 2 * 2 * SIZE, HIDDEN)
            yield h + "attention.wo.weight", (HIDDEN, HIDDEN)
            yield h + "feed_forward.w1.weight", (160, HIDDEN)
            yield h + "feed_forward.w3.weight", (160, HIDDEN)
            yield h + "feed_forward.w2.weight", (HIDDEN, 160)
            yield h + "attention_norm.weight", (HIDDEN,)
            yield h + "ffn_norm.weight", (HIDDEN,)
        yield "model.norm.weight", (HIDDEN,)
        yield "output.weight", (VOCAB, HIDDEN)

    @staticmethod
    def forward(t, ids):
        x, n, groups = t["model.tok_embeddings.weight"][ids], len(ids), HEADS // 2
        for i in range(LAYERS):
            h = f"model.layers.{i}."
            y = rms(x, t[h + "attention_norm.weight"], 1e-5)
            fused = linear(t, h + "attention.wqkv", y).reshape(n, 2, groups + 2, SIZE)
            q = fused[:, :, :groups].reshape(n, HEADS, SIZE)
            k, v = fused[:, :, -2], fused[:, :, -1]
            x = x + linear(t, h + "attention.wo", attention(rotate_half(q, 1e6), rotate_half(k, 1e6), v))
            y = rms(x, t[h + "ffn_norm.weight"], 1e-5)
            gate, up = linear(t, h + "feed_forward.w1", y), linear(t, h + "feed_forward.w3", y)
            x = x + linear(t, h + "feed_forward.w2", silu(gate) * up)
        return linear(t, "output", rms(x, t["model.norm.weight"], 1e-5))


class Qwen:
    config = dict(
        architectures=["QWenLMHeadModel"], model_type="qwen", hidden_size=HIDDEN, intermediate_size=320, kv_channels=SIZE,
        num_attention_heads=HEADS, num_hidden_layers=LAYERS, seq_length=CONTEXT, layer_norm_epsilon=1e-6, no_bias=True,
        rotary_emb_base=10000, rotary_pct=1.0, use_dynamic_ntk=True, use_logn_attn=True, tie_word_embeddings=False,
        vocab_size=VOCAB, torch_dtype="float16",
    )

    @staticmethod
    def shapes():
        yield "transformer.wte.weight", (VOCAB, HIDDEN)
        for i in range(LAYERS):
            h = f"transformer.h.{i}."
            yield h + "ln_1.weight", (HIDDEN,)
            yield h + "attn.c_attn.weight", (3 * HIDDEN, HIDDEN)
            yield h + "attn.c_attn.bias", (3 * HIDDEN,)
            yield h + "attn.c_proj.weight", (HIDDEN, HIDDEN)
            yield h + "ln_2.weight", (HIDDEN,)
            yield h + "mlp.w1.weight", (160, HIDDEN)
            yield h + "mlp.w2.weight", (160, HIDDEN)
            yield h + "mlp.c_proj.weight", (HIDDEN, 160)
        yield "transformer.ln_f.weight", (HIDDEN,)
        yield "lm_head.weight", (VOCAB, HIDDEN)

    @staticmethod
    def forward(t, ids):
        x, n = t["transformer.wte.weight"][ids], len(ids)
        for i in range(LAYERS):
            h = f"transformer.h.{i}."
            fused = linear(t, h + "attn.c_attn", rms(x, t[h + "ln_1.weight"], 1e-6))
            q, k, v = (part.reshape(n, HEADS, SIZE) for part in np.split(fused, 3, axis=1))
            x = x + linear(t, h + "attn.c_proj", attention(rotate_half(q), rotate_half(k), v))
            y = rms(x, t[h + "ln_2.weight"], 1e-6)
            x = x + linear(t, h + "mlp.c_proj", linear(t, h + "mlp.w1", y) * silu(linear(t, h + "mlp.w2", y)))
        return linear(t, "lm_head", rms(x, t["transformer.ln_f.weight"], 1e-6))


def draw(model, seed):
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in model.shapes():
        noise = rng.standard_normal(shape)
        if name.endswith("bias"):
            values = 0.1 * noise
        elif len(shape) == 1:
            values = 1 + 0.1 * noise
            if name == "transformer.ln_f.weight" and "lm_head.weight" not in dict(model.shapes()):
                # Keeps a tied head from repeating the input token.
                values *= rng.choice([-1.0, 1.0], shape)
        elif name.startswith(("lm_head", "output")):
            values = 2 * noise / math.sqrt(shape[1])
        elif "wpe" in name or "wte" in name or "embed" in name:
            values = 0.5 * noise
        else:
            values = noise / math.sqrt(shape[1])
        tensors[name] = values.astype(np.float16)
    return tensors


def greedy(model, tensors, prompt, steps):
    ids, tokens, margins = list(prompt), [], []
    for _ in range(steps):
        last = model.forward(tensors, ids)[-1]
        order = np.argsort(-last)
        tokens.append(int(order[0]))
        margins.append(float(last[order[0]] - last[order[1]]))
        ids.append(int(order[0]))
    return tokens, margins


def case(model, name, folder):
    for seed in range(1000):
        stored = draw(model, seed)
        tensors = {k: v.astype(np.float64) for k, v in stored.items()}
        rng = np.random.default_rng(seed + 77)
        prompts = []
        for n in (1, 7, 33):
            ids = [int(i) for i in rng.integers(3, VOCAB, n)]
            logits = model.forward(tensors, ids)
            tokens, margins = greedy(model, tensors, ids, 32)
            prompts.append(dict(
                input_ids=ids, logits_last=[float(f"{x:.8g}") for x in logits[-1]],
                logits_checksum_all_positions=dict(mean=[float(f"{x:.8g}") for x in logits.mean(axis=1)],
                                                   std=[float(f"{x:.8g}") for x in logits.std(axis=1)]),
                argmax_all_positions=[int(i) for i in logits.argmax(axis=1)], greedy=tokens,
                greedy_margin=[float(f"{m:.4g}") for m in margins],
            ))
        distinct = min(len(set(p["greedy"])) for p in prompts)
        margin = min(min(p["greedy_margin"]) for p in prompts)
        if distinct >= 10 and margin > 1e-3:
            break
    else:
        raise SystemExit(f"{name}: no seed with 10 distinct tokens and margins above 1e-3")
    quality = dict(distinct_min=distinct, margin_min=margin,
                   max_abs_logit=max(abs(x) for p in prompts for x in p["logits_last"]))
    golden = dict(source="tools/reference_models.py, NumPy float64", case=name, seed=seed, file_dtype="float16",
                  compute_dtype="float64", quality=quality, prompts=prompts)
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "golden.json").write_text(json.dumps(golden) + "\n")
    (path / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    write_safetensors(path / "model.safetensors", stored)
    print(f"{name}: seed {seed}, {distinct} distinct tokens, smallest margin {margin:.4g}")


def write_safetensors(path, tensors):
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = dict(dtype="F16", shape=list(values.shape), data_offsets=[at, at + values.nbytes])
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for values in tensors.values():
            out.write(values.tobytes())


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/goldens")
    models = dict(moss=Moss, internlm=InternLm, internlm2=InternLm2, qwen=Qwen)
    for name, model in (models | {"gpt-bigcode": BigCode}).items():
        case(model, name, folder)

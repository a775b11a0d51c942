#!/usr/bin/env python3
"""Reference cases of encoder-decoder models: tiny random checkpoints of T5 1.0 and UMT5 under the published tensor names,
and what a straight NumPy program computes from them. Written from the published modeling files
(T5ForConditionalGeneration, UMT5ForConditionalGeneration), apart from the compiler's own definitions.

    python3 tools/reference_t5.py tests/goldens
    python3 tools/reference_t5.py --check tests/goldens/t5    # the program against results of transformers

Needs NumPy. Weights are stored as float16, arithmetic is float64 on the stored values, every token by a full forward.
"""

import json
import math
import struct
import sys
from pathlib import Path

import numpy as np

from reference_models import gelu_tanh, rms, write_safetensors

CASES = {
    # Not gated, tied and scaled, with distances as GGUF files have them; heads wider than the residual stream, more decoder layers than encoder layers.
    "t5-relu": dict(
        architectures=["T5ForConditionalGeneration"], model_type="t5", d_model=48, d_kv=20, d_ff=80, num_layers=2,
        num_decoder_layers=3, num_heads=3, vocab_size=150, relative_attention_num_buckets=12,
        relative_attention_max_distance=128, feed_forward_proj="relu", layer_norm_epsilon=1e-6, n_positions=64,
        decoder_start_token_id=0, eos_token_id=1, pad_token_id=0, torch_dtype="float16",
    ),
    # A table of distances in every layer, fewer decoder layers.
    "umt5": dict(
        architectures=["UMT5ForConditionalGeneration"], model_type="umt5", d_model=64, d_kv=16, d_ff=56, num_layers=3,
        num_decoder_layers=2, num_heads=3, vocab_size=180, relative_attention_num_buckets=16,
        relative_attention_max_distance=40, feed_forward_proj="gated-gelu", layer_norm_epsilon=1e-6,
        tie_word_embeddings=False, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0, torch_dtype="float16",
    ),
}


def is_tied(c):
    return c.get("tie_word_embeddings", c["model_type"] == "t5")


def shapes(c):
    inner, d, ff = c["num_heads"] * c["d_kv"], c["d_model"], c["d_ff"]
    tables = (c["relative_attention_num_buckets"], c["num_heads"])
    yield "shared.weight", (c["vocab_size"], d)
    for stack, layers in (("encoder", c["num_layers"]), ("decoder", c["num_decoder_layers"])):
        for i in range(layers):
            parts = ["SelfAttention"] + ["EncDecAttention"] * (stack == "decoder")
            block = f"{stack}.block.{i}.layer."
            for at, part in enumerate(parts):
                for which in "qkv":
                    yield f"{block}{at}.{part}.{which}.weight", (inner, d)
                yield f"{block}{at}.{part}.o.weight", (d, inner)
                if part == "SelfAttention" and (i == 0 or c["model_type"] == "umt5"):
                    yield f"{block}{at}.{part}.relative_attention_bias.weight", tables
                yield f"{block}{at}.layer_norm.weight", (d,)
            at = len(parts)
            gated = c["feed_forward_proj"].startswith("gated")
            for which in ("wi_0", "wi_1") if gated else ("wi",):
                yield f"{block}{at}.DenseReluDense.{which}.weight", (ff, d)
            yield f"{block}{at}.DenseReluDense.wo.weight", (d, ff)
            yield f"{block}{at}.layer_norm.weight", (d,)
        yield f"{stack}.final_layer_norm.weight", (d,)
    if not is_tied(c):
        yield "lm_head.weight", (c["vocab_size"], d)


def draw(c, seed):
    rng, tensors = np.random.default_rng(seed), {}
    tied = is_tied(c)
    for name, shape in shapes(c):
        if name.endswith("norm.weight"):
            # Of a tied head, whose rows are small, the last one makes up for that.
            scale = 10 if tied and name.startswith("decoder.final") else 1
            values = scale * (1 + 0.1 * rng.standard_normal(shape))
        elif "relative_attention_bias" in name:
            values = rng.standard_normal(shape)
        elif name in ("shared.weight", "lm_head.weight"):
            # A tied head says a token again where its row is most of the residual stream.
            scale = (0.1 if tied else 1) if name == "shared.weight" else c["d_model"] ** -0.5
            values = rng.standard_normal(shape) * scale
        else:
            # Queries are not divided by the root of the head's size.
            values = rng.standard_normal(shape) * (shape[1] ** -0.5) * (0.6 if name.endswith(".q.weight") else 1)
        tensors[name] = values.astype(np.float16)
    return tensors


def buckets(distance, both_sides, count, most):
    """Of keys minus queries."""
    out = np.zeros_like(distance)
    if both_sides:
        count //= 2
        out = out + (distance > 0) * count
        distance = np.abs(distance)
    else:
        distance = -np.minimum(distance, 0)
    exact = count // 2
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(most / exact))
    wide = np.minimum(exact + (ratio * np.float32(count - exact)).astype(np.int64), count - 1)
    return out + np.where(distance < exact, distance, wide)


def attend(t, part, c, x, keys, bias, causal):
    n, m, heads, size = len(x), len(keys), c["num_heads"], c["d_kv"]
    q, k, v = (a @ t[f"{part}.{w}.weight"].T for a, w in ((x, "q"), (keys, "k"), (keys, "v")))
    out = np.zeros((n, heads * size))
    for h in range(heads):
        at = slice(h * size, (h + 1) * size)
        scores = q[:, at] @ k[:, at].T
        if bias is not None:
            scores = scores + bias[:, :, h]
        if causal:
            scores[np.triu_indices(n, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, at] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, at]
    return out @ t[f"{part}.o.weight"].T


def stack(t, c, which, layers, ids, source):
    x, decoder, table = t["shared.weight"][ids], which == "decoder", None
    eps = c["layer_norm_epsilon"]
    positions = np.arange(len(ids))
    place = buckets(positions[None, :] - positions[:, None], not decoder, c["relative_attention_num_buckets"],
                    c["relative_attention_max_distance"])
    for i in range(layers):
        block = f"{which}.block.{i}.layer."
        table = t.get(f"{block}0.SelfAttention.relative_attention_bias.weight", table)
        h = rms(x, t[f"{block}0.layer_norm.weight"], eps)
        x = x + attend(t, f"{block}0.SelfAttention", c, h, h, table[place], decoder)
        at = 1
        if decoder:
            h = rms(x, t[f"{block}1.layer_norm.weight"], eps)
            x = x + attend(t, f"{block}1.EncDecAttention", c, h, source, None, False)
            at = 2
        h, mlp = rms(x, t[f"{block}{at}.layer_norm.weight"], eps), f"{block}{at}.DenseReluDense."
        if c["feed_forward_proj"] == "gated-gelu":
            h = gelu_tanh(h @ t[mlp + "wi_0.weight"].T) * (h @ t[mlp + "wi_1.weight"].T)
        else:
            h = np.maximum(h @ t[mlp + "wi.weight"].T, 0)
        x = x + h @ t[mlp + "wo.weight"].T
    return rms(x, t[f"{which}.final_layer_norm.weight"], eps)


def logits(t, c, source, ids):
    x = stack(t, c, "decoder", c["num_decoder_layers"], ids, source)[-1]
    if "lm_head.weight" in t:
        return t["lm_head.weight"] @ x
    return t["shared.weight"] @ (x * c["d_model"] ** -0.5)


def prompt(t, c, ids, steps):
    source, start = stack(t, c, "encoder", c["num_layers"], ids, None), c["decoder_start_token_id"]
    target, tokens, margins, first = [start], [], [], None
    for _ in range(steps):
        last = logits(t, c, source, target)
        first = last if first is None else first
        order = np.argsort(-last)
        tokens.append(int(order[0]))
        margins.append(float(last[order[0]] - last[order[1]]))
        target.append(int(order[0]))
    checks = dict(mean=source.mean(axis=1), std=source.std(axis=1))
    return dict(
        name=f"len{len(ids)}", input_ids=ids, decoder_start_token_id=start,
        encoder_checksum_all_positions={k: [float(f"{x:.8g}") for x in v] for k, v in checks.items()},
        logits_first=[float(f"{x:.8g}") for x in first], greedy=tokens,
        greedy_margin=[float(f"{m:.4g}") for m in margins],
    )


def case(name, c, folder):
    for seed in range(1000):
        stored = draw(c, seed)
        tensors = {k: v.astype(np.float64) for k, v in stored.items()}
        rng = np.random.default_rng(seed + 77)
        prompts = [prompt(tensors, c, [int(i) for i in rng.integers(3, c["vocab_size"], n)], 24) for n in (1, 7, 45)]
        distinct = min(len(set(p["greedy"])) for p in prompts)
        margin = min(min(p["greedy_margin"]) for p in prompts)
        if distinct >= 4 and margin > 1e-3:
            break
    else:
        raise SystemExit(f"{name}: no seed with 4 distinct tokens and margins above 1e-3")
    golden = dict(source="tools/reference_t5.py, NumPy float64", case=name, seed=seed, file_dtype="float16",
                  compute_dtype="float64", quality=dict(distinct_min=distinct, margin_min=margin), prompts=prompts)
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "golden.json").write_text(json.dumps(golden) + "\n")
    (path / "config.json").write_text(json.dumps(c, indent=2) + "\n")
    write_safetensors(path / "model.safetensors", stored)
    print(f"{name}: seed {seed}, {distinct} distinct tokens, smallest margin {margin:.4g}")


def check(folder):
    c, golden = (json.loads((folder / name).read_text()) for name in ("config.json", "golden.json"))
    data = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {
        name: np.frombuffer(data[8 + size :][slice(*x["data_offsets"])], np.float16).reshape(x["shape"]).astype(np.float64)
        for name, x in header.items()
    }
    for want in golden["prompts"]:
        found = prompt(tensors, c, want["input_ids"], len(want["greedy"]))
        off = max(abs(a - b) for a, b in zip(found["logits_first"], want["logits_first"]))
        print(f"{want['name']}: off by {off:.1e}, greedy {'equal' if found['greedy'] == want['greedy'] else 'differs'}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(Path(sys.argv[2]))
    else:
        for name, config in CASES.items():
            case(name, config, Path(sys.argv[1] if len(sys.argv) > 1 else "tests/goldens"))

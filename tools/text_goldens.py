#!/usr/bin/env python3
"""Writes tiny random rerankers with reference scores, and an embedding model with its vectors, as test cases for `tests/goldens`.

    python tools/text_goldens.py rerank-bert tests/goldens/rerank-bert

Needs torch, transformers and safetensors. Weights are drawn from a fixed seed; the scores are those of transformers on the CPU
in float32, each input alone. A score by answers is the logit of one token less that of another after the last token of the input,
as sentence-transformers' LogitScore has it. Inputs 3 and 4 have equal tokens and differ in where the second text begins (in one
token where a model has no token types).
"""

import argparse
import json
import pathlib

import torch
import transformers

VOCAB = 128
LENGTHS = (3, 9, 40, 40, 17)

SIZES = dict(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, dtype="float16")
QWEN3 = dict(SIZES, num_key_value_heads=2, head_dim=16, intermediate_size=64, max_position_embeddings=128)

CASES = {
    "rerank-bert": (transformers.BertForSequenceClassification, lambda: transformers.BertConfig(
        **SIZES, intermediate_size=96, max_position_embeddings=64, type_vocab_size=2, num_labels=1)),
    "rerank-modernbert": (transformers.ModernBertForSequenceClassification, lambda: transformers.ModernBertConfig(
        **SIZES, intermediate_size=64, max_position_embeddings=128, local_attention=16, global_attn_every_n_layers=2,
        classifier_pooling="mean", num_labels=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2)),
    "rerank-qwen3": (transformers.Qwen3ForCausalLM, lambda: transformers.Qwen3Config(**QWEN3, tie_word_embeddings=True)),
    "rerank-qwen3-labels": (transformers.Qwen3ForSequenceClassification, lambda: transformers.Qwen3Config(
        **QWEN3, num_labels=1, pad_token_id=0)),
    "embed-nomic": (transformers.NomicBertModel, lambda: transformers.NomicBertConfig(
        **SIZES, intermediate_size=80, max_position_embeddings=64, type_vocab_size=2, layer_norm_eps=1e-12)),
}

# The published files of Nomic BERT have these names.
NOMIC = {
    "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "torch_dtype": "float16", "activation_function": "swiglu",
    "n_embd": 48, "n_head": 4, "n_inner": 80, "n_layer": 3, "n_positions": 64, "max_trained_positions": 64, "vocab_size": VOCAB,
    "type_vocab_size": 2, "layer_norm_epsilon": 1e-12, "causal": False, "prenorm": False, "parallel_block": False,
    "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "use_rms_norm": False,
}

EMBEDDING_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]

# Ids of the answers that mean that a document fits, and that it does not.
YES, NO = 71, 17

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
    {"idx": 1, "name": "1", "path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"},
]


def model_of(kind, config, seed):
    torch.manual_seed(seed)
    model = kind._from_config(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0.0, 1.0 / p.shape[-1] ** 0.5)
            else:
                p.copy_((0.0 if name.endswith("bias") else 1.0) + 0.1 * torch.randn_like(p))
            p.copy_(p.to(config.dtype).float())
    return model


def inputs(types):
    for number, length in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        second = length // 2 + (4 if number == 3 else 0)
        if number == 3 and not types:
            ids[5] = 3 + (ids[5] + 1) % (VOCAB - 3)
        token_types = [int(place >= second) for place in range(length)] if types else None
        yield f"len{length}-{number}", ids, token_types


@torch.no_grad()
def score(model, ids, types):
    given = {"input_ids": torch.tensor([ids])}
    if types:
        given["token_type_ids"] = torch.tensor([types])
    logits = model(**given).logits[0]
    if logits.dim() > 1:
        return float(logits[-1, YES] - logits[-1, NO])
    return float(logits[0])


@torch.no_grad()
def embedding(model, ids):
    rows = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(rows.mean(0), dim=0).tolist()


def write_json(file, what):
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(what, indent=2) + "\n")


def write_embedding_model(folder, kind, config):
    model = model_of(kind, config, 0)
    results = [{"name": name, "input_ids": ids, "embedding": embedding(model, ids)} for name, ids, _ in inputs(False)]
    model.to(config.dtype).save_pretrained(folder)
    write_json(folder / "config.json", NOMIC)
    write_json(folder / "modules.json", EMBEDDING_MODULES)
    write_json(folder / "1_Pooling/config.json", {
        "word_embedding_dimension": config.hidden_size, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False})
    return results, 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    kind, config = CASES[args.case]
    args.folder.mkdir(exist_ok=True)
    if args.case.startswith("embed-"):
        results, seed = write_embedding_model(args.folder, kind, config())
        return write_golden(args, kind, results, seed)
    types = args.case == "rerank-bert"
    for seed in range(100):
        model = model_of(kind, config(), seed)
        results = []
        for name, ids, token_types in inputs(types):
            found = score(model, ids, token_types)
            result = {"name": name, "input_ids": ids, "token_type_ids": token_types, "score": found,
                      "sigmoid": float(torch.sigmoid(torch.tensor(found)))}
            results.append({key: value for key, value in result.items() if value is not None})
        scores = sorted(r["score"] for r in results)
        if min(b - a for a, b in zip(scores, scores[1:])) > 0.02:
            break
    model.to(config().dtype).save_pretrained(args.folder)
    if args.case == "rerank-qwen3":
        (args.folder / "modules.json").write_text(json.dumps(MODULES, indent=2) + "\n")
        (args.folder / "1_LogitScore").mkdir(exist_ok=True)
        answers = {"true_token_id": YES, "false_token_id": NO}
        (args.folder / "1_LogitScore/config.json").write_text(json.dumps(answers, indent=2) + "\n")
    write_golden(args, kind, results, seed)
    print(f"{args.folder}: seed {seed}, scores {[round(s, 3) for s in scores]}")


def write_golden(args, kind, results, seed):
    golden = {
        "source": f"transformers {transformers.__version__} {kind.__name__}, torch {torch.__version__}, CPU",
        "case": args.case,
        "note": f"written by tools/text_goldens.py, seed {seed}",
        "file_dtype": "float16",
        "inputs": results,
    }
    (args.folder / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()

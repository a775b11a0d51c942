"""Models that the tests share: compiled once, kept for the session."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlcc
import pytest

WORKSPACE = Path(__file__).resolve().parents[2]
BOOKS = WORKSPACE / "assets/rwkv4-tiny-books"

# A Llama with random weights and the tokenizer of the books: its texts mean nothing.
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}

# Words for the reference case of BERT, whose vocabulary has 400 entries.
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "sea", "a", "house", "was", "old", "and"]


def compiled(folder: Path, model: Path, *flags: str) -> Path:
    artifact = folder / "model.so"
    command = [os.environ.get("MLCC", "mlcc"), "build", "-q", "-m", str(model), "-o", str(artifact), "--no-report", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return artifact


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a recurrent state that writes English."""
    return compiled(tmp_path_factory.mktemp("books"), BOOKS)


def of_llama(folder: Path, *flags: str) -> Path:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(LLAMA))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BOOKS / name, checkpoint / name)
    return compiled(folder, checkpoint, "--random-weights", "1", "--quant", "f32", "--max-batch", "16", *flags)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with caches, for 512 tokens."""
    return of_llama(tmp_path_factory.mktemp("llama"))


def adapter(folder: Path, seed: int) -> Path:
    """An adapter of rank 2 for some products of the Llama."""
    folder.mkdir()
    numbers = random.Random(seed)
    header: dict[str, object] = {}
    data = b""
    shapes = {"self_attn.q_proj": (64, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128)}
    for layer in range(2):
        for module, (out, into) in shapes.items():
            for end, shape in (("A", (2, into)), ("B", (out, 2))):
                count = shape[0] * shape[1]
                values = struct.pack(f"<{count}f", *(numbers.uniform(-0.5, 0.5) for _ in range(count)))
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{end}.weight"
                offsets = [len(data), len(data) + len(values)]
                header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
                data += values
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return folder


@dataclass(frozen=True)
class Adapted:
    """The Llama with two slots, two adapters for it, and the Llama with the first one merged."""

    model: Path
    style: Path
    task: Path
    merged: Path


@pytest.fixture(scope="session")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("adapted")
    style, task = adapter(folder / "style", 1), adapter(folder / "task", 2)
    slots = of_llama(tmp_path_factory.mktemp("slots"), "--lora-slots", "2", "--lora-rank", "4")
    merged = of_llama(tmp_path_factory.mktemp("merged"), "--lora", str(style))
    return Adapted(slots, style, task, merged)


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of vectors."""
    folder = tmp_path_factory.mktemp("embedder")
    checkpoint = folder / "checkpoint"
    shutil.copytree(WORKSPACE / "tests/goldens/embed-bert", checkpoint)
    special = [{"id": id, "content": word, "special": True} for id, word in enumerate(WORDS[:5])]
    for token in special:
        token |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    def piece(kind: str, id: str) -> dict[str, object]:
        return {kind: {"id": id, "type_id": 0}}

    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [piece("SpecialToken", "[CLS]"), piece("Sequence", "A"), piece("SpecialToken", "[SEP]")],
            "pair": [
                piece(kind, id)
                for kind, id in (
                    ("SpecialToken", "[CLS]"),
                    ("Sequence", "A"),
                    ("SpecialToken", "[SEP]"),
                    ("Sequence", "B"),
                    ("SpecialToken", "[SEP]"),
                )
            ],
            "special_tokens": {
                word: {"id": word, "ids": [WORDS.index(word)], "tokens": [word]} for word in ("[CLS]", "[SEP]")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: id for id, word in enumerate(WORDS)},
        },
    }
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    return compiled(folder, checkpoint)


@pytest.fixture
def model(llama: Path) -> Iterator[mlcc.Model]:
    with mlcc.Model(llama, threads=1) as model:
        yield model

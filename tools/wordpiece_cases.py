#!/usr/bin/env python3
"""Writes text/tests/data/wordpiece.json: a small WordPiece vocabulary, and what transformers makes of texts and pairs with
it, from a folder with vocab.txt and tokenizer_config.json alone.

    pip install transformers tokenizers && python3 tools/wordpiece_cases.py
"""

import json
import pathlib
import tempfile

import tokenizers
import transformers

ROOT = pathlib.Path(__file__).parent.parent

TEXTS = [
    "",
    " ",
    "Hello world",
    "The Weights of the KERNELS, unpacked!",
    "naïve café, Ünïcode \u00c5ngstr\u00f6m e\u0301",
    "日本語のテキスト 한국어 😀",
    "don't stop... (x[1:] + 'it')",
    "[CLS] inside [MASK] and [SEP]",
    "zzzzqqqq unknown\u200bwords\ttab\r\nline\u00a0space \u0000 \ufffd",
    "a" * 120,
]

PAIRS = [("what is a kernel?", "A kernel computes."), ("Weights", "two texts, [SEP] inside")]

CONFIGS = [
    {"tokenizer_class": "BertTokenizer"},
    {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
    {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "strip_accents": False},
    {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
]


def vocabulary():
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))).splitlines()
    # Some words with capitals and accents, for the models that keep them.
    text += ["Hello World naïve café Kernels Weights 日 本 語"] * 50
    trainer = tokenizers.BertWordPieceTokenizer(lowercase=False)
    trainer.train_from_iterator(text, vocab_size=600, min_frequency=2, show_progress=False)
    vocab = trainer.get_vocab()
    return sorted(vocab, key=vocab.get)


def main():
    vocab, results = vocabulary(), []
    for config in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            pairs = [tokenizer(*pair) for pair in PAIRS]
            results.append({
                "config": config,
                "texts": [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in TEXTS],
                "pairs": [{"pair": pair, "ids": out["input_ids"], "types": out["token_type_ids"]} for pair, out in zip(PAIRS, pairs)],
            })
    out = {"source": f"transformers {transformers.__version__}", "vocab": vocab, "cases": results}
    path = ROOT / "text/tests/data/wordpiece.json"
    path.write_text(json.dumps(out, ensure_ascii=False, indent=None, separators=(",", ":")) + "\n")
    print(path, len(vocab))


if __name__ == "__main__":
    main()

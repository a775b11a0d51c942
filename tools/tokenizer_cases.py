#!/usr/bin/env python3
"""Writes small tokenizers into text/tests/data, and what the reference libraries make of some texts with them.

    pip install sentencepiece tiktoken && python3 tools/tokenizer_cases.py

sentencepiece models are trained on the project's own documentation; the tiktoken ranks are the first of the vocabulary
of assets/rwkv4-tiny-books.
"""

import base64
import io
import json
import pathlib
import random
import tempfile
import unicodedata

import sentencepiece
import tiktoken

ROOT = pathlib.Path(__file__).parent.parent
DATA = ROOT / "text/tests/data"

TEXTS = [
    "",
    " ",
    "   ",
    "Hello world",
    " Hello  world ",
    "  two leading, two trailing  ",
    "line one\nline two\n\n\tindented",
    "naïve café, ﬁne ½ Ａｂｃ ｶﾞ ①",
    "日本語のテキスト 한국어 😀😃 مرحبا",
    "a" * 40,
    "aaa aaaa aaaaa  aaaaaa",
    "<mark>kept</mark> <mark><mark> x<mark",
    "def f(x):\n    return x[1:] + 'it''s'\n",
    "1234567 3.14159 0x1F",
    "\u2581already\u2581there \u200bzero\u00a0width\r\n",
    "weights weights, weightsweights",
    "e\u0301 combining e\u0301e\u0301 \u1100\u1161\u11a8",
]

PATTERNS = {
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def random_texts():
    """Texts over few characters, where many segmentations compete."""
    choose = random.Random(7)
    return ["".join(choose.choice("aeht nsé<") for _ in range(choose.randrange(1, 60))) for _ in range(40)]


def train(name, **options):
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))).splitlines()
    out = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        # A small table in place of NFKC's 240 kB: some replacements, one longer than one character, one removal.
        for source, target in [("ﬁ", "fi"), ("½", "1/2"), ("Ａ", "A"), ("ｂ", "b"), ("①", "1"), ("\u200b", ""), ("\u00a0", " "), ("\t", " "), ("\r\n", " "), ("\r", " "), ("\u0065\u0301", "é")]:
            left = " ".join(f"{ord(c):X}" for c in source)
            right = " ".join(f"{ord(c):X}" for c in target)
            rules.write(f"{left}\t{right}\n")
        rules.flush()
        if options.pop("normalize", False):
            options["normalization_rule_tsv"] = rules.name
        else:
            options["normalization_rule_name"] = "identity"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text), model_writer=out, num_threads=1, minloglevel=2, hard_vocab_limit=False, **options
        )
    (DATA / name).write_bytes(out.getvalue())
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    texts = TEXTS + random_texts()
    return {"file": name, "cases": [{"text": t, "ids": model.encode(t), "decoded": model.decode(model.encode(t))} for t in texts]}


def rank_file(name, count, pattern):
    alphabet = {}
    extra = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(256 + extra)] = byte
            extra += 1
    tokenizer = json.loads((ROOT / "assets/rwkv4-tiny-books/tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    tokens = [bytes(alphabet[c] for c in token) for token, _ in vocabulary if all(c in alphabet for c in token)]
    tokens = [token for token in tokens if token != b"<|endoftext|>"]
    # All bytes first, then runs of one letter, where the order of merges matters most.
    tokens = [bytes([b]) for b in range(256)] + [b"a" * n for n in (2, 3, 5)] + [t for t in tokens if len(t) > 1][:count]
    ranks = {}
    for token in tokens:
        ranks.setdefault(token, len(ranks))
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (DATA / name).write_text("".join(lines))
    special = {"<|endoftext|>": len(ranks), "<|im_start|>": len(ranks) + 1, "<|im_end|>": len(ranks) + 2}
    model = tiktoken.Encoding(name, pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=special)
    texts = TEXTS + random_texts() + ["<|im_start|>user\nhi<|im_end|>\n<|endoftext|>"]
    # QWenTokenizer.tokenize of Qwen's own code begins with NFC.
    normal = lambda text: unicodedata.normalize("NFC", text) if pattern == "qwen" else text
    encode = lambda text: model.encode(normal(text), allowed_special="all")
    cases = [{"text": t, "ids": encode(t), "decoded": normal(t)} for t in texts]
    return {"file": name, "special": special, "cases": cases}


def main():
    DATA.mkdir(exist_ok=True)
    files = [
        train("unigram.model", model_type="unigram", vocab_size=400, normalize=True, user_defined_symbols=["<mark>", "</mark>"]),
        train("unigram-bytes.model", model_type="unigram", vocab_size=600, byte_fallback=True, remove_extra_whitespaces=False),
        train("bpe.model", model_type="bpe", vocab_size=500, normalize=True, user_defined_symbols=["<mark>", "</mark>"]),
        train("bpe-bytes.model", model_type="bpe", vocab_size=700, byte_fallback=True, remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, split_digits=True),
        train("bpe-plain.model", model_type="bpe", vocab_size=300, add_dummy_prefix=False),
        rank_file("qwen.tiktoken", 400, "qwen"),
        rank_file("digits.tiktoken", 200, "cl100k"),
    ]
    (DATA / "tokenizer_cases.json").write_text(json.dumps(files, ensure_ascii=False, separators=(",", ":")) + "\n")
    for path in sorted(DATA.iterdir()):
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()

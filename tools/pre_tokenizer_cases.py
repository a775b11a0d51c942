#!/usr/bin/env python3
"""Writes tests/data/gguf_tokenizers.json of text: where the `tokenizers` library cuts texts with the
expressions that GGUF files name, and ids of small vocabularies.

    pip install tokenizers && python3 tools/pre_tokenizer_cases.py

The expressions are written here in the dialect of the library's Python package (Oniguruma), from the tokenizer.json of
the models; text/src/tokenizer/regexes.rs has them in that of Rust.
"""

import json
import pathlib

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).parent.parent
OUT = ROOT / "text/tests/data/gguf_tokenizers.json"

TEXTS = [
    "Hello world, it's 1234567 o'clock!",
    "Café déjà vu — 123 😊",
    "e\u0301cole ไทยภาษา हिन्दी বাংলা",
    "a\n\n  b\t c   d \r\n\r\n e  ",
    "漢字とカナ abc123 한국어は、好き。「引用」",
    "DON'T don't we'LL HTMLParser camelCase ǅungla",
    "foo_bar(x)==1;//c\n\treturn [a, b];\n",
    "½ ² Ⅷ ١٢٣٤ x² 1,234.56 $5 <tag> `code` a|b",
    "ΑΒΓ αβγ Жук ჯორჯია Ünïcode ª º ƻ ʔ",
]

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def cased(upper, lower, digits, more="/"):
    """Words that end where capital letters begin again."""
    first = r"[^\r\n\p{L}\p{N}]?"
    words = f"{first}{upper}*{lower}+{CONTRACTIONS}?|{first}{upper}+{lower}*{CONTRACTIONS}?"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{more}]*|{SPACES}"


def words(letters, others, digits):
    return rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?{others}+[\r\n]*|{SPACES}"


O200K = cased(f"[{UPPER}]", f"[{LOWER}]", r"\p{N}{1,3}")
KIMI = r"[\p{Han}]+|" + cased(rf"[{UPPER}&&[^\p{{Han}}]]", rf"[{LOWER}&&[^\p{{Han}}]]", r"\p{N}{1,3}", "")
MARK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK_V3 = rf"{MARK}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
NAMES = {
    "gpt-2": [GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "lfm2": [words(r"\p{L}", r"[^\s\p{L}\p{N}]", r"\p{N}{1,3}")],
    "qwen35": [words(r"[\p{L}\p{M}]", r"[^\s\p{L}\p{M}\p{N}]", r"\p{N}")],
    "minimax-m2": [O200K],
    "kimi-k2": [KIMI],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK_V3],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "afmoe": [r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", "[一-鿿㐀-䶿가-힯\u3040-ヿเ-\u0e7f]+", DEEPSEEK_V3],
    "viking": [r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"],
    "gemma4": [r"[^\n]+|[\n]+"],
}


def splits(regexes):
    return [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]


def cuts():
    found = {}
    for name, regexes in NAMES.items():
        pre = pre_tokenizers.Sequence(splits(regexes))
        found[name] = [{"text": text, "pieces": [piece for piece, _ in pre.pre_tokenize_str(text)]} for text in TEXTS]
    return found


def corpus():
    return "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


def vocabulary(tokenizer, **told):
    """The lists of a GGUF file, and ids of texts."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    kind = lambda token: 3 if token in special else 6 if len(token) == 6 and token.startswith("<0x") else 1
    ids = [{"text": text, "ids": tokenizer.encode(text, add_special_tokens=False).ids} for text in TEXTS]
    return {
        **told,
        "tokens": tokens,
        "token_types": [kind(token) for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "cases": ids,
    }


def train(tokenizer, size, **options):
    tokenizer.train_from_iterator([corpus()], trainers.BpeTrainer(vocab_size=size, show_progress=False, **options))
    return tokenizer


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        splits(NAMES["qwen35"]) + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train(tokenizer, 500, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    return vocabulary(tokenizer, model="gpt2", pre="qwen35")


def over_texts():
    special = ["<pad>", "<eos>", "<bos>", "<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    # Lines end where sentences do, so that merges are short.
    trained.pre_tokenizer = pre_tokenizers.Sequence(splits([r"[^\n.]+|[\n.]+"]))
    train(trained, 700, limit_alphabet=90, special_tokens=special)
    trained.pre_tokenizer = pre_tokenizers.Sequence(splits(NAMES["gemma4"]))
    # Bytes are no tokens that stand in texts.
    data = json.loads(trained.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    return vocabulary(Tokenizer.from_str(json.dumps(data)), model="gemma4")


def main():
    data = {"cuts": cuts(), "vocabularies": [byte_level(), over_texts()]}
    OUT.write_text(json.dumps(data, ensure_ascii=False, indent=0, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

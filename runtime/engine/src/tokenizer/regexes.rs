//! The regular expressions that cut a text before byte-level pair merging, by the name that GGUF files give them
//! (`tokenizer.ggml.pre`). Sources: the `tokenizer.json` of the models named.

/// How a byte-level BPE of a GGUF file is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PreTokenizer {
    /// Values of `tokenizer.ggml.pre`.
    pub names: &'static [&'static str],
    /// Applied one after the other, each to the pieces of the one before.
    pub regexes: &'static [&'static str],
    /// A piece that is a token is taken whole, without merging.
    pub ignore_merges: bool,
    /// Whether a begin token is added where the file does not say.
    pub add_bos: bool,
}

pub(super) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
pub(super) const QWEN2: &str = super::tiktoken::Pattern::Qwen.regex();
const CL100K: &str = super::tiktoken::Pattern::Cl100k.regex();
const PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|`]+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

pub(super) const PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer {
        names: &["gpt-2", "mpt", "olmo", "jais", "phi-2", "dbrx-gpt2", "gpt-neox", "trillion"],
        regexes: &[GPT2],
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral-llama3"],
        regexes: &[CL100K],
        ignore_merges: true,
        add_bos: true,
    },
    PreTokenizer {
        names: &["glm4", "chatglm-bpe", "dbrx", "smaug-bpe"],
        regexes: &[CL100K],
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez"],
        regexes: &[QWEN2],
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"],
        regexes: &[r"\p{N}", GPT2],
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer {
        names: &["falcon"],
        regexes: &[PUNCTUATION, GPT2, "[0-9][0-9][0-9]"],
        ignore_merges: false,
        add_bos: false,
    },
    PreTokenizer { names: &["gpt-4o", "llama4"], regexes: &[O200K], ignore_merges: false, add_bos: false },
    PreTokenizer { names: &["tekken"], regexes: &[TEKKEN], ignore_merges: true, add_bos: true },
];

/// The setup of a name in a GGUF file.
pub(super) fn pre_tokenizer(name: &str) -> Option<&'static PreTokenizer> {
    PRE_TOKENIZERS.iter().find(|pre| pre.names.contains(&name))
}

/// All names, for messages.
pub(super) fn known() -> String {
    PRE_TOKENIZERS.iter().flat_map(|pre| pre.names).copied().collect::<Vec<_>>().join(", ")
}

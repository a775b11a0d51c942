//! The regular expressions that cut a text before pair merging, by the name that GGUF files give them
//! (`tokenizer.ggml.pre`). Sources: the `tokenizer.json` of the models named; where several of them have one
//! name, the meaning in llama.cpp, which writes and reads these names.

/// Settings of a BPE of a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PreTokenizer {
    /// Values of `tokenizer.ggml.pre`.
    pub names: &'static [&'static str],
    /// Expressions in order, each applied to the pieces of the one before.
    pub regexes: &'static [&'static str],
    /// A piece that is a token is taken whole, without merging.
    pub ignore_merges: bool,
    /// True if a begin token is added where the file does not say.
    pub add_bos: bool,
    /// True if there is a separator between two texts where the file does not say.
    pub add_sep: bool,
    /// Unicode normalization form C first.
    pub nfc: bool,
    /// Tokens are texts with U+2581 for spaces and `<0xHH>` for other bytes, not GPT-2's alphabet for bytes.
    pub plain_text: bool,
}

const PLAIN: PreTokenizer = PreTokenizer {
    names: &[],
    regexes: &[],
    ignore_merges: false,
    add_bos: false,
    add_sep: false,
    nfc: false,
    plain_text: false,
};

pub(super) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
pub(super) const QWEN2: &str = super::tiktoken::TiktokenPattern::Qwen.regex();
const CL100K: &str = super::tiktoken::TiktokenPattern::Cl100k.regex();
/// Qwen 2's, with marks as parts of words.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|`]+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Runs of Chinese characters apart, and other words as OpenAI's o200k.
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LINES: &str = r"[^\n]+|[\n]+";
const UP_TO_THREE_DIGITS: &str = r"\p{N}{1,3}";
/// Threes from the last digit on.
const DIGITS_FROM_THE_END: &str = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))";
const CHINESE_AND_KANA: &str = r"[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+";
/// Samaritan to Chinese, and Korean.
const DEEPSEEK_ASIAN: &str = r"[\u{4E00}-\u{9FA5}\u{0800}-\u{4E00}\u{AC00}-\u{D7FF}]+";
/// Letters that have a case, of the scripts that the model's authors list.
const DEEPSEEK_WORDS: &str = r"\s?[A-Za-z\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}\u{295}-\u{2AF}\u{370}-\u{373}\u{376}\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\u{388}-\u{38A}\u{38C}\u{38E}-\u{3A1}\u{3A3}-\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}\u{531}-\u{556}\u{10A0}-\u{10C5}\u{13A0}-\u{13F5}\u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}\u{1D00}-\u{1D2B}\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}\u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}\u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}\u{1F59}\u{1F5B}\u{1F5D}\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}\u{1FC6}-\u{1FCC}\u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}\u{1FF6}-\u{1FFC}\u{2102}\u{2107}\u{210A}-\u{2113}\u{2115}\u{2119}-\u{211D}\u{2124}\u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}\u{2139}\u{213C}-\u{213F}\u{2145}-\u{2149}\u{214E}\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}\u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}\u{A640}-\u{A66D}\u{A680}-\u{A69B}\u{A722}-\u{A76F}\u{A771}-\u{A787}\u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}\u{FB00}-\u{FB06}\u{FB13}-\u{FB17}\u{FF21}-\u{FF3A}\u{FF41}-\u{FF5A}\u{10400}-\u{1044F}\u{104B0}-\u{104D3}\u{104D8}-\u{104FB}\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}\u{118A0}-\u{118DF}\u{1E900}-\u{1E943}]+";
const DEEPSEEK_MARKS: &str =
    r"\s?[!-/:-~\u{FF01}-\u{FF0F}\u{FF1A}-\u{FF5E}\u{2018}-\u{201F}\u{3000}-\u{3002}]+";
/// A word of Latin letters keeps the mark before it, others a character that is neither letter nor mark.
const DEEPSEEK_V3: &str = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SPARK: &str =
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+";
/// Everything but spaces and the marks that end a part of a sentence.
const POLYGLOT: &str = r" ?[^(\s|.,!?\u{2026}\u{3002}\u{FF0C}\u{3001}\u{0964}\u{06D4}\u{060C})]+";
const YOUTU_ASIAN: &str = r"[\u{AC00}-\u{D7A3}\u{3131}-\u{318E}]+|[\u{FF01}\u{2026}\u{201C}\u{201D}\u{2018}\u{2019}\u{2014}\u{FF1A}\u{FF1B}\u{FF0C}\u{3001}-\u{303F}\u{FE30}-\u{FE4F}]+|[\u{3105}-\u{312F}]+|[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+";
const YOUTU: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Chinese, Japanese, Thai, Lao, Khmer, Burmese and Korean.
const AFMOE_ASIAN: &str = r"[\u{4E00}-\u{9FFF}\u{3400}-\u{4DBF}\u{F900}-\u{FAFF}\u{3040}-\u{309F}\u{30A0}-\u{30FF}\u{FF65}-\u{FF9F}\u{2F00}-\u{2FDF}\u{0E40}-\u{0E7F}\u{0E80}-\u{0EFF}\u{1780}-\u{17FF}\u{1000}-\u{109F}\u{AA60}-\u{AA7F}\u{A9E0}-\u{A9FF}\u{AC00}-\u{D7AF}\u{1100}-\u{11FF}]+";
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2's without English contractions.
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Several words may be one piece.
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const MINICPM5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

pub(super) const PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer {
        names: &[
            "gpt-2",
            "mpt",
            "olmo",
            "jais",
            "phi-2",
            "dbrx-gpt2",
            "gpt-neox",
            "trillion",
            "granite-docling",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "exaone4",
        ],
        regexes: &[GPT2],
        ..PLAIN
    },
    PreTokenizer {
        names: &["roberta-bpe", "jina-v1-en", "jina-v2-code"],
        regexes: &[GPT2],
        add_sep: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["default"],
        regexes: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
        ..PLAIN
    },
    PreTokenizer {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "pixtral-llama3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        regexes: &[CL100K],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["glm4", "chatglm-bpe", "dbrx", "smaug-bpe"], regexes: &[CL100K], ..PLAIN },
    PreTokenizer {
        names: &["minicpm5"],
        regexes: &[UP_TO_THREE_DIGITS, MINICPM5],
        ignore_merges: true,
        ..PLAIN
    },
    PreTokenizer { names: &["qwen2"], regexes: &[QWEN2], nfc: true, ..PLAIN },
    PreTokenizer {
        names: &[
            "stablelm2",
            "deepseek-r1-qwen",
            "hunyuan",
            "megrez",
            "kormo",
            "f2llmv2",
            "solar-open",
            "grok-2",
        ],
        regexes: &[QWEN2],
        ..PLAIN
    },
    PreTokenizer { names: &["qwen35"], regexes: &[QWEN35], ..PLAIN },
    PreTokenizer { names: &["ufakzeka"], regexes: &[UFAKZEKA], ..PLAIN },
    PreTokenizer { names: &["laguna"], regexes: &[LINES, QWEN2], ..PLAIN },
    PreTokenizer {
        names: &[
            "starcoder",
            "refact",
            "command-r",
            "smollm",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        regexes: &[r"\p{N}", GPT2],
        ..PLAIN
    },
    PreTokenizer { names: &["falcon"], regexes: &[PUNCTUATION, GPT2, "[0-9][0-9][0-9]"], ..PLAIN },
    PreTokenizer {
        names: &["gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"],
        regexes: &[O200K],
        ..PLAIN
    },
    PreTokenizer { names: &["granite-embed-multi-97m"], regexes: &[O200K], ignore_merges: true, ..PLAIN },
    PreTokenizer {
        names: &["tiny_aya", "cohere2moe"],
        regexes: &[r"\d{1,3}(?=(?:\d{3})*\b)", O200K],
        ..PLAIN
    },
    PreTokenizer { names: &["tekken"], regexes: &[TEKKEN], ignore_merges: true, add_bos: true, ..PLAIN },
    PreTokenizer { names: &["kimi-k2"], regexes: &[KIMI], ..PLAIN },
    PreTokenizer {
        names: &["deepseek-llm"],
        regexes: &[r"[\r\n]", DEEPSEEK_WORDS, DEEPSEEK_MARKS, r"\s+$", DEEPSEEK_ASIAN, r"\p{N}+"],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-coder"],
        regexes: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_ASIAN, r"\p{N}"],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        regexes: &[UP_TO_THREE_DIGITS, CHINESE_AND_KANA, DEEPSEEK_V3],
        ..PLAIN
    },
    PreTokenizer {
        names: &["spark2_5"],
        regexes: &[UP_TO_THREE_DIGITS, CHINESE_AND_KANA, SPARK, r"\p{N}"],
        ..PLAIN
    },
    PreTokenizer { names: &["afmoe"], regexes: &[DIGITS_FROM_THE_END, AFMOE_ASIAN, DEEPSEEK_V3], ..PLAIN },
    PreTokenizer { names: &["youtu"], regexes: &[YOUTU_ASIAN, YOUTU], ignore_merges: true, ..PLAIN },
    PreTokenizer { names: &["jais-2"], regexes: &[JAIS2], ..PLAIN },
    PreTokenizer { names: &["bailingmoe", "bailingmoe2", "llada-moe"], regexes: &[BAILING], ..PLAIN },
    PreTokenizer { names: &["seed-coder"], regexes: &[SEED], ..PLAIN },
    PreTokenizer { names: &["exaone-moe"], regexes: &[EXAONE_MOE], ..PLAIN },
    PreTokenizer { names: &["superbpe"], regexes: &[r"\p{N}+", r"(?=(\d{3})+(?!\d))"], ..PLAIN },
    PreTokenizer { names: &["poro-chat", "bloom", "gpt3-finnish"], regexes: &[POLYGLOT], ..PLAIN },
    PreTokenizer { names: &["viking"], regexes: &[POLYGLOT, r"\p{N}"], ..PLAIN },
    PreTokenizer {
        names: &["chameleon"],
        regexes: &[
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ],
        add_bos: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["gemma4", "granite-embed-multi-311m"],
        regexes: &[LINES],
        add_bos: true,
        plain_text: true,
        ..PLAIN
    },
    PreTokenizer { names: &["sarvam-moe"], regexes: &[LINES], plain_text: true, ..PLAIN },
];

/// The setup of a name in a GGUF file.
pub(super) fn pre_tokenizer(name: &str) -> Option<&'static PreTokenizer> {
    PRE_TOKENIZERS.iter().find(|pre| pre.names.contains(&name))
}

/// All names, for messages.
pub(super) fn known() -> impl Iterator<Item = &'static str> {
    PRE_TOKENIZERS.iter().flat_map(|pre| pre.names).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString};
    use tokenizers::{PreTokenizer as _, SplitDelimiterBehavior};

    fn pieces(name: &str, text: &str) -> Vec<String> {
        let mut cut = PreTokenizedString::from(text);
        for regex in pre_tokenizer(name).unwrap().regexes {
            let pattern = SplitPattern::Regex((*regex).to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap();
            split.pre_tokenize(&mut cut).unwrap();
        }
        let splits = cut.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(piece, ..)| piece.to_owned()).collect()
    }

    #[test]
    fn texts_are_cut_as_by_the_tokenizers_library() {
        let data: Value =
            serde_json::from_str(include_str!("../../tests/data/gguf_tokenizers.json")).unwrap();
        for (name, cases) in data["cuts"].as_object().unwrap() {
            for case in cases.as_array().unwrap() {
                let text = case["text"].as_str().unwrap();
                assert_eq!(Value::from(pieces(name, text)), case["pieces"], "{name}: {text:?}");
            }
        }
    }

    #[test]
    fn cuts_of_the_first_deepseek_models() {
        let found = pieces("deepseek-llm", "Ünder ½ 12 漢字, ƻǆ \n");
        // The class of marks has the range from `:` to `~`, so it cuts a word at letters beyond ASCII once
        // more.
        assert_eq!(found, ["Ü", "nder", " ", "½", " ", "12", " ", "漢字", ",", " ƻ", "ǆ", " ", "\n"]);
    }

    #[test]
    fn a_name_has_one_setup() {
        let mut names: Vec<&str> = PRE_TOKENIZERS.iter().flat_map(|pre| pre.names).copied().collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}

//! A bound on the length of a text before it is cut into tokens.
//!
//! The steps of a `tokenizer.json` come from a checkpoint, and a file of some kilobytes may ask for a text
//! that is a million times as long: several replacements of a letter by ten in a row. So the largest growth
//! of each step is read from the file, and where that may be too much for a text, the steps are measured on
//! it, each before it is done.

use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer as _, NormalizerWrapper};

use super::{TokenizerError, brief};

/// The largest growth of a text. The pre-tokenizers of published models make it up to four times as long,
/// their normalizers up to three times, and eleven times for single characters.
pub(super) const MOST_TIMES: usize = 16;
/// Bytes that any text may become.
pub(super) const MOST_BYTES: usize = 8 << 20;
/// Steps of each kind.
const MOST_STEPS: usize = 100;
/// Bytes that one byte may become in a step whose result is not known before, and in all pre-tokenizers
/// together.
const MOST_OF_BYTE: usize = 64;
/// Bytes that are given to the library at a time.
const PIECE: usize = 1 << 16;

/// The permitted length for a text of this length.
pub(super) fn limit(bytes: usize) -> usize {
    bytes.saturating_mul(MOST_TIMES).max(MOST_BYTES)
}

/// The normalizers of a file in their order, and what its pre-tokenizers do on top.
#[derive(Debug, Default)]
pub(super) struct GrowthBound {
    steps: Vec<NormalizerStep>,
    /// Bytes that a byte becomes in the pre-tokenizers at most.
    cut: usize,
    /// Bytes of the shortest added token: a text has at most one part for each of these.
    shortest_added: usize,
}

#[derive(Debug)]
enum NormalizerStep {
    /// Every match becomes `to`.
    Replace { pattern: fancy_regex::Regex, to: String },
    /// A text before each part of a text.
    Prepend(String),
    /// A step of the library by which a byte becomes at most `times` bytes.
    Other { normalizer: Box<NormalizerWrapper>, times: usize },
}

impl GrowthBound {
    /// Reads the steps of a `tokenizer.json`. Steps that can serve no text are refused.
    pub fn from_steps(
        normalizer: &Value,
        pre_tokenizer: &Value,
        added: &[usize],
    ) -> Result<GrowthBound, TokenizerError> {
        let mut steps = Vec::new();
        for value in flat(normalizer, "normalizers")? {
            steps.push(step(value)?);
        }
        let cuts = flat(pre_tokenizer, "pretokenizers")?;
        let cut = cuts.into_iter().map(times_of_cut).fold(1usize, usize::saturating_mul);
        if cut > MOST_OF_BYTE {
            let detail = format!("may make a text {cut} times as long, {MOST_OF_BYTE} times are permitted");
            return Err(TokenizerError::Grows { step: "pre_tokenizer".to_owned(), detail });
        }
        Ok(GrowthBound {
            steps,
            cut,
            shortest_added: added.iter().copied().min().unwrap_or(usize::MAX).max(1),
        })
    }

    /// An error for a text that would become too long.
    pub fn check(&self, text: &str) -> Result<(), TokenizerError> {
        let most = limit(text.len());
        if self.at_most(text.len()) <= most {
            return Ok(());
        }
        let too_long = || TokenizerError::TooLong { bytes: text.len(), most };
        let mut now = text.to_owned();
        for step in &self.steps {
            now = step.run(&now, most, self.parts(now.len())).ok_or_else(too_long)?;
        }
        // Each of the parts is normalized separately, which may add the text before a text to every one.
        let before = self.prepended().saturating_mul(self.parts(text.len()));
        match now.len().saturating_add(before).saturating_mul(self.cut) <= most {
            true => Ok(()),
            false => Err(too_long()),
        }
    }

    /// Parts between added tokens.
    fn parts(&self, bytes: usize) -> usize {
        bytes / self.shortest_added.saturating_add(1) + 1
    }

    fn prepended(&self) -> usize {
        self.steps
            .iter()
            .map(|step| if let NormalizerStep::Prepend(text) = step { text.len() } else { 0 })
            .sum()
    }

    /// The most bytes that a text of `bytes` bytes may become.
    fn at_most(&self, bytes: usize) -> usize {
        let parts = self.parts(bytes);
        let steps = self.steps.iter().fold(bytes, |now, step| match step {
            // A match may be empty, and then there is one more than there are characters.
            NormalizerStep::Replace { to, .. } => {
                now.saturating_add(now.saturating_add(parts).saturating_mul(to.len()))
            }
            NormalizerStep::Prepend(text) => now.saturating_add(parts.saturating_mul(text.len())),
            NormalizerStep::Other { times, .. } => now.saturating_mul(*times),
        });
        steps.saturating_mul(self.cut)
    }
}

impl NormalizerStep {
    /// The text after the step; `None` if it is longer than `most`.
    fn run(&self, text: &str, most: usize, parts: usize) -> Option<String> {
        match self {
            NormalizerStep::Replace { pattern, to } => {
                // The library reports patterns that it cannot match either.
                let matches = || pattern.find_iter(text).map_while(Result::ok);
                let removed: usize = matches().map(|found| found.range().len()).sum();
                let added = matches().count().saturating_mul(to.len());
                let length = (text.len() - removed).saturating_add(added);
                (length <= most).then(|| pattern.replace_all(text, fancy_regex::NoExpand(to)).into_owned())
            }
            NormalizerStep::Prepend(before) => {
                let length = text.len().saturating_add(before.len().saturating_mul(parts));
                (length <= most).then(|| format!("{before}{text}"))
            }
            NormalizerStep::Other { normalizer, .. } => {
                let mut out = String::new();
                let mut rest = text;
                while !rest.is_empty() {
                    let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE));
                    let mut piece = NormalizedString::from(piece);
                    normalizer.normalize(&mut piece).ok()?;
                    out.push_str(piece.get());
                    if out.len() > most {
                        return None;
                    }
                    rest = after;
                }
                Some(out)
            }
        }
    }
}

/// The steps inside of sequences, in their order.
fn flat<'v>(value: &'v Value, list: &'static str) -> Result<Vec<&'v Value>, TokenizerError> {
    fn add<'v>(value: &'v Value, list: &str, out: &mut Vec<&'v Value>) {
        match value.get(list).and_then(Value::as_array) {
            Some(inner) => inner.iter().for_each(|value| add(value, list, out)),
            None if value.is_null() => {}
            None => out.push(value),
        }
    }
    let mut steps = Vec::new();
    add(value, list, &mut steps);
    match steps.len() {
        0..=MOST_STEPS => Ok(steps),
        count => Err(TokenizerError::Grows {
            step: list.to_owned(),
            detail: format!("are {count} steps, {MOST_STEPS} are permitted"),
        }),
    }
}

/// One normalizer, which the library has read before.
fn step(value: &Value) -> Result<NormalizerStep, TokenizerError> {
    let text = |key: &str| value.get(key).and_then(Value::as_str);
    let kind = text("type").unwrap_or_default();
    let grows = |detail: String| TokenizerError::Grows { step: brief(kind), detail };
    let short = |to: &str| match to.len() <= MOST_BYTES / MOST_TIMES {
        true => Ok(to.to_owned()),
        false => Err(grows(format!("writes {} bytes at a time", to.len()))),
    };
    match kind {
        "Replace" => {
            let literal = value.pointer("/pattern/String").and_then(Value::as_str).map(escaped);
            let regex = value.pointer("/pattern/Regex").and_then(Value::as_str).map(str::to_owned);
            let pattern = fancy_regex::Regex::new(&literal.or(regex).unwrap_or_default());
            let pattern =
                pattern.map_err(|error| TokenizerError::Json { reason: brief(&error.to_string()) })?;
            Ok(NormalizerStep::Replace { pattern, to: short(text("content").unwrap_or_default())? })
        }
        "Prepend" => Ok(NormalizerStep::Prepend(short(text("prepend").unwrap_or_default())?)),
        _ => {
            let times = match kind {
                "NFC" | "NFD" => 3,
                "NFKC" | "NFKD" => 11,
                "BertNormalizer" => 8,
                "Lowercase" | "ByteLevel" => 2,
                "Precompiled" => longest_of_table(text("precompiled_charsmap").unwrap_or_default()),
                _ => 1,
            };
            if times > MOST_OF_BYTE {
                let detail = format!("may make {times} bytes of a character, {MOST_OF_BYTE} are permitted");
                return Err(grows(detail));
            }
            let normalizer = serde_json::from_value(value.clone())
                .map_err(|error| TokenizerError::Json { reason: brief(&error.to_string()) })?;
            Ok(NormalizerStep::Other { normalizer: Box::new(normalizer), times })
        }
    }
}

/// Bytes that a byte becomes in a pre-tokenizer at most. Each of its pieces may get a space before it.
fn times_of_cut(value: &Value) -> usize {
    let flag = |key: &str| value.get(key).and_then(Value::as_bool).unwrap_or(true);
    match value.get("type").and_then(Value::as_str) {
        Some("ByteLevel") if flag("add_prefix_space") => 4,
        Some("ByteLevel") => 2,
        Some("Metaspace") => 8,
        _ => 1,
    }
}

/// The longest replacement in a table of sentencepiece in base64: four bytes with the size of a trie, the
/// trie, and texts that end in a zero.
fn longest_of_table(base64: &str) -> usize {
    let bytes = super::tiktoken::base64(base64).unwrap_or_default();
    let Some((size, rest)) = bytes.split_first_chunk::<4>() else { return 1 };
    let texts = rest.get(u32::from_le_bytes(*size) as usize..).unwrap_or_default();
    texts.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0).max(1)
}

/// A text as a regular expression that matches it.
fn escaped(text: &str) -> String {
    fancy_regex::escape(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn bound(normalizer: Value, pre: Value) -> Result<GrowthBound, TokenizerError> {
        GrowthBound::from_steps(&normalizer, &pre, &[3])
    }

    fn replace(from: &str, to: &str) -> Value {
        json!({"type": "Replace", "pattern": {"String": from}, "content": to})
    }

    fn sequence(steps: Vec<Value>) -> Value {
        json!({"type": "Sequence", "normalizers": steps})
    }

    #[test]
    fn replacements_in_a_row_are_stopped_before_the_memory_is_used() {
        let eight = sequence(vec![replace("h", "hhhhhhhhhh"); 8]);
        let grows = bound(sequence(vec![eight]), Value::Null).unwrap();
        let error = grows.check("h").unwrap_err();
        assert!(matches!(error, TokenizerError::TooLong { bytes: 1, .. }), "{error}");
        // Nothing to replace.
        grows.check(&"a".repeat(1 << 20)).unwrap();
        // Six times are a million letters.
        let six = bound(sequence(vec![replace("h", "hhhhhhhhhh"); 6]), Value::Null).unwrap();
        six.check("h").unwrap();
        assert!(six.check(&"h".repeat(100)).is_err());
    }

    #[test]
    fn every_kind_of_step_has_a_bound() {
        let regex = json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y".repeat(1000)});
        assert!(bound(regex, Value::Null).unwrap().check(&"a".repeat(10_000)).is_err());
        let prepend = json!({"type": "Prepend", "prepend": "y".repeat(1000)});
        assert!(bound(prepend, Value::Null).unwrap().check(&"a".repeat(100_000)).is_err());
        let bytes = sequence(vec![json!({"type": "ByteLevel"}); 30]);
        assert!(bound(bytes, Value::Null).unwrap().check("é").is_err());
        let huge = replace("h", &"h".repeat(1 << 20));
        assert!(matches!(bound(huge, Value::Null), Err(TokenizerError::Grows { .. })));
        let many = sequence(vec![json!({"type": "NFC"}); 101]);
        assert!(matches!(bound(many, Value::Null), Err(TokenizerError::Grows { .. })));
        let cuts = vec![json!({"type": "ByteLevel", "add_prefix_space": false}); 20];
        let cuts = json!({"type": "Sequence", "pretokenizers": cuts});
        let error = bound(Value::Null, cuts).unwrap_err().to_string();
        assert!(error.contains("pre_tokenizer") && error.contains("1048576 times"), "{error}");
    }

    #[test]
    fn what_published_files_have_is_permitted() {
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true});
        bound(json!({"type": "NFC"}), byte_level).unwrap().check(&"é".repeat(1 << 20)).unwrap();
        let spaces =
            sequence(vec![json!({"type": "Prepend", "prepend": "\u{2581}"}), replace(" ", "\u{2581}")]);
        bound(spaces, Value::Null).unwrap().check(&" ".repeat(1 << 20)).unwrap();
        let albert = sequence(vec![
            replace("``", "\""),
            json!({"type": "NFKD"}),
            json!({"type": "StripAccents"}),
            json!({"type": "Lowercase"}),
            json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}),
        ]);
        let metaspace = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always"});
        bound(albert, metaspace).unwrap().check(&"Ünïcode ``text''  and so on. ".repeat(100_000)).unwrap();
    }

    #[test]
    fn tables_tell_their_longest_replacement() {
        // A trie of no bytes, and the texts "ab" and "xyz".
        assert_eq!(longest_of_table("AAAAAGFiAHh5egA="), 3);
        assert_eq!([longest_of_table(""), longest_of_table("/////w==")], [1, 1]);
    }
}

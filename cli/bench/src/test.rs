//! The tests of `mlcc bench`: their inputs, and the least cost of a token.

use std::str::FromStr;

use mlcc_runtime::Model;
use serde_json::Value;

use crate::probe::{ComputeType, KINDS, MachineProbe};

/// One test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchTest {
    Prompt(usize),
    /// `tokens` tokens for each sequence, one by one after `depth` others.
    Generate {
        tokens: usize,
        depth: usize,
        sequences: usize,
    },
    /// One step, in which the texts that go on have `depth` tokens before.
    Mixed {
        mix: MixedStep,
        depth: usize,
    },
    /// Vectors of texts, with `texts_per_call` texts in a call.
    Texts {
        counts: TextCounts,
        texts_per_call: usize,
    },
}

/// A number of texts, and the tokens of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextCounts {
    pub texts: usize,
    pub tokens: usize,
}

impl FromStr for TextCounts {
    type Err = String;

    fn from_str(text: &str) -> Result<TextCounts, String> {
        let [texts, tokens] = parse_pair(text, 'x').ok_or_else(|| {
            format!("`{text}` does not describe texts: expected TEXTSxTOKENS, for example 64x256")
        })?;
        // All texts are in memory.
        parse_tokens(&texts.saturating_mul(tokens).to_string())?;
        Ok(TextCounts { texts, tokens })
    }
}

/// Recurrent models have no context that would bound what is asked for.
const MOST_TOKENS: usize = 1 << 24;

pub fn parse_tokens(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|&count| count <= MOST_TOKENS);
    count.ok_or_else(|| format!("`{text}` is not a number of tokens from 0 to {MOST_TOKENS}"))
}

/// Two numbers above 0 with `between` between them.
fn parse_pair(text: &str, between: char) -> Option<[usize; 2]> {
    let (a, b) = text.split_once(between)?;
    let both = [parse_tokens(a).ok()?, parse_tokens(b).ok()?];
    both.iter().all(|&n| n > 0).then_some(both)
}

/// The content of a step: the next tokens of some sequences, and some tokens of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MixedStep {
    pub decode_tokens: usize,
    pub prefill_tokens: usize,
}

impl FromStr for MixedStep {
    type Err = String;

    fn from_str(text: &str) -> Result<MixedStep, String> {
        let [next, piece] = parse_pair(text, '+')
            .ok_or_else(|| format!("`{text}` is not a step: expected NEXT+PIECE, for example 8+120"))?;
        Ok(MixedStep { decode_tokens: next, prefill_tokens: piece })
    }
}

/// The cost of one token.
#[derive(Debug, PartialEq)]
pub(crate) struct TokenCost {
    pub bytes: f64,
    /// Operations by arithmetic ([`ComputeType::ALL`]).
    pub ops: [f64; KINDS],
}

impl TokenCost {
    /// Seconds that the operations of each arithmetic take at its peak.
    pub fn seconds(&self, machine: &MachineProbe) -> [f64; KINDS] {
        std::array::from_fn(|i| if self.ops[i] > 0.0 { self.ops[i] / machine.peaks[i] } else { 0.0 })
    }
}

impl BenchTest {
    /// Tokens of all sequences together.
    pub fn tokens(self) -> usize {
        match self {
            BenchTest::Prompt(n) => n,
            BenchTest::Generate { tokens, sequences, .. } => tokens * sequences,
            BenchTest::Mixed { mix, .. } => mix.decode_tokens + mix.prefill_tokens,
            BenchTest::Texts { counts: of, .. } => of.texts * of.tokens,
        }
    }

    /// Sequences of the test.
    pub fn sequences(self) -> usize {
        match self {
            BenchTest::Prompt(_) => 1,
            BenchTest::Generate { sequences, .. } => sequences,
            BenchTest::Mixed { mix, .. } => mix.decode_tokens + 1,
            BenchTest::Texts { counts: of, .. } => of.texts,
        }
    }

    pub fn name(self) -> String {
        let after = |depth| if depth > 0 { format!("@d{depth}") } else { String::new() };
        match self {
            BenchTest::Prompt(n) => format!("pp{n}"),
            BenchTest::Generate { tokens, depth, sequences } => {
                let batch = if sequences > 1 { format!("@b{sequences}") } else { String::new() };
                format!("tg{tokens}{}{batch}", after(depth))
            }
            BenchTest::Mixed { mix, depth } => {
                format!("mx{}+{}{}", mix.decode_tokens, mix.prefill_tokens, after(depth))
            }
            BenchTest::Texts { counts: of, .. } => format!("tx{}x{}", of.texts, of.tokens),
        }
    }

    /// Weights and the rows of the caches are read once per call, which takes a chunk of the prompt, or one
    /// token of each sequence, or both.
    pub(crate) fn cost(self, metadata: &Value, chunk: u64) -> TokenCost {
        let get = |path: &str| metadata.pointer(path).and_then(Value::as_f64).unwrap_or(0.0);
        let (bytes, ops) = (get("/decode/bytes_per_token"), operations_per_token(metadata, "ops_per_token"));
        let (row, window) = (get("/memory/cache/bytes_per_token"), get("/memory/window"));
        let (states, all_weights) = (get("/decode/state_bytes"), bytes + get("/decode/other_expert_bytes"));
        let head = operations_per_token(metadata, "head_ops");
        // Bytes of the caches that a call reads on average, behind `past` tokens.
        let cache = |past: f64| row * if window > 0.0 { past.min(window) } else { past };
        match self {
            BenchTest::Prompt(n) => {
                let calls = n.div_ceil(chunk.max(1) as usize) as f64;
                let bytes = all_weights + cache(n as f64 / 2.0);
                // The head is needed once per call only.
                TokenCost { bytes: bytes * calls / n as f64, ops: std::array::from_fn(|i| ops[i] - head[i]) }
            }
            BenchTest::Texts { counts: of, texts_per_call: together } => {
                let calls = of.texts.div_ceil(together) as f64;
                // Heads of scores are for the last rows alone.
                let per_row = 1.0 - 1.0 / of.tokens as f64;
                TokenCost {
                    bytes: all_weights * calls / self.tokens() as f64,
                    ops: std::array::from_fn(|i| ops[i] - per_row * head[i]),
                }
            }
            BenchTest::Generate { tokens, depth, sequences } => {
                // States are each sequence's own.
                let shared = (bytes - states) * (1.0 - 1.0 / sequences as f64);
                TokenCost { bytes: bytes - shared + cache(depth as f64 + tokens as f64 / 2.0), ops }
            }
            BenchTest::Mixed { mix, depth } => {
                let (next, rows) = (mix.decode_tokens as f64, self.tokens() as f64);
                let caches = next * cache(depth as f64) + cache(mix.prefill_tokens as f64 / 2.0);
                // The head is needed once per sequence.
                let without = 1.0 - (next + 1.0) / rows;
                TokenCost {
                    bytes: (all_weights + next * states + caches) / rows,
                    ops: std::array::from_fn(|i| ops[i] - without * head[i]),
                }
            }
        }
    }
}

/// Operations of one token in each arithmetic ([`ComputeType::ALL`]).
pub(crate) fn operations_per_token(metadata: &Value, key: &str) -> [f64; KINDS] {
    let get = |kind: &str| metadata["decode"][key][kind].as_f64().unwrap_or(0.0);
    ComputeType::ALL.map(|a| get(a.name()))
}

/// Tokens from all over the vocabulary, the same each time.
pub(crate) fn test_tokens(n: usize, vocab: u64) -> Vec<i32> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 33) % vocab.max(1)) as i32
    };
    (0..n).map(|_| next()).collect()
}

/// A prompt of `n` tokens; for an encoder-decoder model a source text and the token behind it.
pub(crate) fn test_prompt(n: usize, model: &Model) -> Vec<i32> {
    let vocab = model.vocab() as u64;
    let Some(start) = model.plan().decoder_start() else { return test_tokens(n, vocab) };
    let mut prompt = test_tokens(n.max(2) - 1, vocab);
    prompt.iter_mut().filter(|token| **token == start).for_each(|token| *token = (start + 1) % vocab as i32);
    prompt.push(start);
    prompt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_stay_in_the_vocabulary_and_repeat() {
        assert!(test_tokens(100, 7).iter().all(|t| (0..7).contains(t)));
        assert_eq!(test_tokens(5, 1000), test_tokens(5, 1000));
    }

    #[test]
    fn calls_share_the_reading_of_weights() {
        let metadata = serde_json::json!({
            "decode": { "bytes_per_token": 1000, "state_bytes": 100, "ops_per_token": { "f32": 40, "i8": 400, "i4": 200 },
                "head_ops": { "i8": 100 } },
            "memory": { "cache": { "bytes_per_token": 10 } }
        });
        let without_caches = serde_json::json!({ "decode": metadata["decode"] });
        let tg = BenchTest::Generate { tokens: 4, depth: 0, sequences: 1 }.cost(&without_caches, 64);
        assert_eq!(tg, TokenCost { bytes: 1000.0, ops: [40.0, 0.0, 400.0, 200.0] });
        let four = BenchTest::Generate { tokens: 4, depth: 0, sequences: 4 };
        let cost = four.cost(&without_caches, 64);
        assert_eq!(
            (cost.bytes, cost.ops),
            (325.0, tg.ops),
            "900 of weights for four, 100 of states for each"
        );
        assert_eq!((four.name().as_str(), four.tokens()), ("tg4@b4", 16));
        let pp = BenchTest::Prompt(100).cost(&without_caches, 64);
        assert_eq!(pp, TokenCost { bytes: 20.0, ops: [40.0, 0.0, 300.0, 200.0] });
        let mixed = BenchTest::Mixed { mix: MixedStep { decode_tokens: 4, prefill_tokens: 16 }, depth: 30 };
        assert_eq!((mixed.name().as_str(), mixed.tokens(), mixed.sequences()), ("mx4+16@d30", 20, 5));
        let cost = mixed.cost(&metadata, 64);
        // Weights once, a state of each of five sequences, 30 rows of four caches and 8 in the mean of the
        // fifth.
        assert_eq!(cost.bytes, (900.0 + 500.0 + 1200.0 + 80.0) / 20.0);
        assert_eq!(cost.ops, [40.0, 0.0, 325.0, 200.0], "heads of a quarter of the rows");
    }

    #[test]
    fn tokens_read_the_rows_before_them() {
        let mut metadata = serde_json::json!({
            "decode": { "bytes_per_token": 1000 }, "memory": { "cache": { "bytes_per_token": 10 } }
        });
        let bytes = |metadata: &Value, depth| {
            BenchTest::Generate { tokens: 4, depth, sequences: 1 }.cost(metadata, 64).bytes
        };
        assert_eq!([0, 100].map(|d| bytes(&metadata, d)), [1020.0, 2020.0]);
        metadata["memory"]["window"] = 50.into();
        assert_eq!(bytes(&metadata, 100), 1500.0);
    }

    #[test]
    fn texts_share_the_reading_of_weights() {
        let metadata = serde_json::json!({ "decode": { "bytes_per_token": 1000, "ops_per_token": { "i8": 400 },
            "head_ops": { "i8": 100 } } });
        let test = BenchTest::Texts { counts: TextCounts { texts: 6, tokens: 10 }, texts_per_call: 4 };
        assert_eq!((test.name().as_str(), test.tokens(), test.sequences()), ("tx6x10", 60, 6));
        let cost = test.cost(&metadata, 64);
        assert_eq!(
            (cost.bytes, cost.ops),
            (2000.0 / 60.0, [0.0, 0.0, 310.0, 0.0]),
            "two calls, a head for each text"
        );
    }

    #[test]
    fn texts_are_read_strictly() {
        assert_eq!("64x256".parse(), Ok(TextCounts { texts: 64, tokens: 256 }));
        for wrong in
            ["64", "64x", "x256", "0x8", "8x0", "8x8x8", "-1x8", "9999999x9999999", "18446744073709551615x2"]
        {
            assert!(wrong.parse::<TextCounts>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn mixes_are_read_strictly() {
        assert_eq!("8+120".parse(), Ok(MixedStep { decode_tokens: 8, prefill_tokens: 120 }));
        for wrong in ["8", "8+", "+8", "0+8", "8+0", "8+1+1", "-1+8", "8+99999999999"] {
            assert!(wrong.parse::<MixedStep>().is_err(), "{wrong}");
        }
    }
}

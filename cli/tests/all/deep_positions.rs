//! Positions up to 131071 of scaled rotary embeddings, against the formulas in f64: a Llama of one layer,
//! whose keys and values depend on the token and its position alone.

use std::path::Path;

use serde_json::{Value, json};

use crate::cases::assert_close;
use crate::program::{json, mlcc};
use crate::step::StepRandom;
use mlcc_runtime::{LoadOptions, Model, Session};

const CONTEXT: usize = 131_072;
const VOCAB: usize = 64;
const HIDDEN: usize = 32;
const SIZE: usize = 16;
const INNER: usize = 48;
const THETA: f64 = 500_000.0;
const FACTOR: f64 = 8.0;
const ORIGINAL: f64 = 16_384.0;
/// Keys that a token of a model with a window sees.
const WINDOW: usize = 2048;

/// The rotation of queries and keys, and the distance that a query sees.
struct RotationTables {
    frequencies: Vec<f64>,
    scale: f64,
    window: Option<usize>,
}

/// A row-major matrix, as files have it: outputs by inputs.
struct ReferenceMatrix {
    columns: usize,
    values: Vec<f32>,
}

impl ReferenceMatrix {
    fn random(random: &mut StepRandom, rows: usize, columns: usize, size: f32) -> ReferenceMatrix {
        let value = |_| size * (random.below(20_001) as f32 / 10_000.0 - 1.0);
        ReferenceMatrix { columns, values: (0..rows * columns).map(value).collect() }
    }

    fn row(&self, i: usize) -> Vec<f64> {
        self.values[i * self.columns..][..self.columns].iter().map(|&v| f64::from(v)).collect()
    }

    fn times(&self, x: &[f64]) -> Vec<f64> {
        let rows = self.values.chunks_exact(self.columns);
        rows.map(|row| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()).collect()
    }
}

/// The weights; norms have ones.
struct ReferenceWeights {
    embedding: ReferenceMatrix,
    /// Weights of queries, keys, values and the output.
    attention: [ReferenceMatrix; 4],
    /// Gate, up, down.
    mlp: [ReferenceMatrix; 3],
}

impl ReferenceWeights {
    /// Scores spread by some units, so that a few of all keys count.
    fn new() -> ReferenceWeights {
        let r = &mut StepRandom(11);
        let mut random = |rows, columns, size| ReferenceMatrix::random(r, rows, columns, size);
        ReferenceWeights {
            embedding: random(VOCAB, HIDDEN, 1.0),
            attention: [
                random(SIZE, HIDDEN, 0.6),
                random(SIZE, HIDDEN, 0.6),
                random(SIZE, HIDDEN, 0.5),
                random(HIDDEN, SIZE, 0.5),
            ],
            mlp: [random(INNER, HIDDEN, 0.3), random(INNER, HIDDEN, 0.3), random(HIDDEN, INNER, 0.3)],
        }
    }

    /// A file with a header of names, shapes and places, then the values (safetensors).
    fn write(&self, path: &Path) {
        let ones = |n| ReferenceMatrix { columns: n, values: vec![1.0; n] };
        let norms =
            ["model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"];
        let norms = norms.map(|name| (name.to_string(), ones(HIDDEN)));
        let [q, k, v, o] = ["q", "k", "v", "o"].map(|n| format!("model.layers.0.self_attn.{n}_proj"));
        let [gate, up, down] = ["gate", "up", "down"].map(|n| format!("model.layers.0.mlp.{n}_proj"));
        let names = ["model.embed_tokens".into(), q, k, v, o, gate, up, down];
        let matrices = [&self.embedding].into_iter().chain(&self.attention).chain(&self.mlp);
        let norms = norms.iter().map(|(name, ones)| (name, ones, vec![HIDDEN]));
        let matrices = names.iter().zip(matrices);
        let matrices = matrices.map(|(name, m)| (name, m, vec![m.values.len() / m.columns, m.columns]));
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, matrix, shape) in matrices.chain(norms) {
            let from = data.len();
            matrix.values.iter().for_each(|v| data.extend(v.to_le_bytes()));
            let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [from, data.len()] });
            header.insert(format!("{name}.weight"), entry);
        }
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.bytes());
        file.extend(data);
        std::fs::write(path, file).unwrap();
    }

    /// Logits of the last of some tokens, of which it sees those of its window; angles are products of f32,
    /// as implementations have them.
    fn logits(
        &self,
        tokens: &[i32],
        RotationTables { frequencies, scale, window }: &RotationTables,
    ) -> Vec<f64> {
        let [q, k, v, o] = &self.attention;
        let (scale, unseen) = (*scale, window.map_or(0, |window| tokens.len().saturating_sub(window)));
        let turned = |x: Vec<f64>, position: usize| turn(&x, position, frequencies, scale);
        // The parts that do not depend on the position, of every token of the vocabulary.
        let rows: Vec<Vec<f64>> = (0..VOCAB).map(|t| self.embedding.row(t)).collect();
        let keys: Vec<Vec<f64>> = rows.iter().map(|x| k.times(&norm(x))).collect();
        let values: Vec<Vec<f64>> = rows.iter().map(|x| v.times(&norm(x))).collect();
        let (last, x) = (tokens.len() - 1, &rows[tokens[tokens.len() - 1] as usize]);
        let query = turned(q.times(&norm(x)), last);
        let score =
            |(p, &t): (usize, &i32)| dot(&query, &turned(keys[t as usize].clone(), p)) / (SIZE as f64).sqrt();
        let scores: Vec<f64> = tokens.iter().enumerate().skip(unseen).map(score).collect();
        let most = scores.iter().copied().fold(f64::MIN, f64::max);
        let (mut sum, mut mean) = (0.0, vec![0.0; SIZE]);
        for (s, &t) in scores.iter().zip(&tokens[unseen..]) {
            let weight = (s - most).exp();
            sum += weight;
            mean.iter_mut().zip(&values[t as usize]).for_each(|(m, v)| *m += weight * v);
        }
        mean.iter_mut().for_each(|m| *m /= sum);
        let x = add(x, &o.times(&mean));
        let [gate, up, down] = &self.mlp;
        let normed = norm(&x);
        let silu = |g: f64| g / (1.0 + (-g).exp());
        let inner: Vec<f64> =
            gate.times(&normed).into_iter().zip(up.times(&normed)).map(|(g, u)| silu(g) * u).collect();
        self.embedding.times(&norm(&add(&x, &down.times(&inner))))
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn norm(x: &[f64]) -> Vec<f64> {
    let scale = (dot(x, x) / x.len() as f64 + 1e-5).sqrt().recip();
    x.iter().map(|x| x * scale).collect()
}

fn turn(x: &[f64], position: usize, frequencies: &[f64], scale: f64) -> Vec<f64> {
    let half = frequencies.len();
    let of = |i: usize| {
        let angle = f64::from(position as f32 * frequencies[i % half] as f32);
        let (a, b) = (x[i % half], x[half + i % half]);
        scale * if i < half { a * angle.cos() - b * angle.sin() } else { b * angle.cos() + a * angle.sin() }
    };
    (0..2 * half).map(of).collect()
}

fn plain() -> Vec<f64> {
    (0..SIZE / 2).map(|i| THETA.powf(-2.0 * i as f64 / SIZE as f64)).collect()
}

/// Long waves by the factor, short ones not, a line between.
fn llama3() -> Vec<f64> {
    let scaled = |f: f64| {
        let waves = ORIGINAL * f / std::f64::consts::TAU;
        let smooth = ((waves - 1.0) / (4.0 - 1.0)).clamp(0.0, 1.0);
        f * (smooth + (1.0 - smooth) / FACTOR)
    };
    plain().into_iter().map(scaled).collect()
}

/// A line between the numbers of the pairs that turn 32 times and once within the original length.
fn yarn() -> Vec<f64> {
    let pair =
        |turns: f64| SIZE as f64 * (ORIGINAL / (turns * std::f64::consts::TAU)).ln() / (2.0 * THETA.ln());
    let (low, high) = (pair(32.0).floor().max(0.0), pair(1.0).ceil().min(SIZE as f64 - 1.0));
    let scaled = |(i, f): (usize, f64)| {
        let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        f * (1.0 - ramp + ramp / FACTOR)
    };
    plain().into_iter().enumerate().map(scaled).collect()
}

fn close(what: &str, expected: &[f64], session: &Session) {
    let expected: Vec<f32> = expected.iter().map(|&x| x as f32).collect();
    assert_close(what, &expected, session.logits(), 2e-4);
}

/// The first 200 tokens, and `count` of a context of 131072, whose memory the plan tells.
fn check(rope: Value, turns: &RotationTables, count: usize) {
    let folder = tempfile::tempdir().unwrap();
    let weights = ReferenceWeights::new();
    weights.write(&folder.path().join("model.safetensors"));
    let (class, family) = match turns.window {
        None => ("LlamaForCausalLM", "llama"),
        Some(_) => ("MistralForCausalLM", "mistral"),
    };
    let config = json!({
        "architectures": [class], "model_type": family, "hidden_size": HIDDEN, "head_dim": SIZE,
        "intermediate_size": INNER, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1,
        "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": true,
        "sliding_window": turns.window,
        "rope_theta": THETA, "rope_scaling": rope, "max_position_embeddings": CONTEXT, "torch_dtype": "float32",
    });
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let path = folder.path().join("deep.so");
    let mut build = mlcc();
    build.arg("build").arg("-m").arg(folder.path()).args(["--quant", "f32", "--max-batch", "1", "-c"]);
    build.arg(CONTEXT.to_string()).arg("-o").arg(&path).assert().success();
    let info = json(mlcc().arg("inspect").arg(&path).arg("--json"));
    let cache = &info["metadata"]["memory"]["cache"];
    let row = 2 * 4 * SIZE as u64;
    assert_eq!(
        (cache["rows"].as_u64(), cache["bytes_per_token"].as_u64()),
        (Some(CONTEXT as u64), Some(row))
    );

    let model = Model::load(&path, &LoadOptions { threads: Some(2), ..LoadOptions::default() }).unwrap();
    let mut session = model.session().unwrap();
    let random = &mut StepRandom(5);
    let tokens: Vec<i32> = (0..count).map(|_| random.below(VOCAB) as i32).collect();
    session.prefill(&tokens[..200]).unwrap();
    close("position 199", &weights.logits(&tokens[..200], turns), &session);
    session.prefill(&tokens[200..count - 1]).unwrap();
    session.decode(tokens[count - 1]).unwrap();
    let expected = weights.logits(&tokens, turns);
    close(&format!("position {}", count - 1), &expected, &session);
    let plain = RotationTables { frequencies: plain(), scale: 1.0, window: turns.window };
    let unscaled = weights.logits(&tokens, &plain);
    let far = expected.iter().zip(&unscaled).any(|(a, b)| (a - b).abs() > 0.1);
    assert!(far, "without scaling the logits are others");
    if count == CONTEXT && turns.window.is_none() {
        assert_eq!(session.memory().state, CONTEXT as u64 * row, "as much as was planned");
        assert!(session.decode(1).is_err(), "the context is full");
    }
}

#[test]
fn llama3_scaling_to_the_last_position() {
    let rope = json!({
        "rope_type": "llama3", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL as u64,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    });
    check(rope, &RotationTables { frequencies: llama3(), scale: 1.0, window: None }, CONTEXT);
}

fn yarn_to(count: usize, window: Option<usize>) {
    let rope = json!({
        "rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL as u64,
    });
    let scale = 0.1 * FACTOR.ln() + 1.0;
    check(rope, &RotationTables { frequencies: yarn(), scale, window }, count);
}

/// Keys that are further away than the original length. Attention takes the square of the length.
#[test]
fn yarn_scaling_beyond_the_original_length() {
    yarn_to(24_000, None);
}

/// Positions to the end of the context, of keys in a window, which take little time.
#[test]
fn yarn_scaling_to_the_last_position() {
    yarn_to(CONTEXT, Some(WINDOW));
}

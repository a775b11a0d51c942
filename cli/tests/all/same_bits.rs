//! The logits of a row as bits, however its sequence came there: at once, in pieces, token by token, together
//! with others, by any number of threads. The table of docs/same-bits.md says for which schemes they are the
//! same.

use std::path::Path;

use crate::cases::{
    argmax, artifact, backends, build_options, distance, feed, find, golden, ids, load, scheme,
};
use mlcc_driver::compile::BuildOptions;
use mlcc_runtime::{Model, OutputRows, SessionInput};

const BATCH: u32 = 4;
/// Several blocks of keys, and no multiple of anything.
const LENGTH: usize = 141;
const CONTEXT: u64 = 160;
const CHUNK: u32 = 64;
/// Lengths of pieces, some of them single tokens.
const PIECES: [usize; 6] = [1, 7, 1, 33, 2, 16];

fn options(dir: &Path, quant: &str, batch_invariant: bool) -> BuildOptions {
    let mut options = build_options(dir);
    options.quant = scheme(quant);
    options.quant_name = quant.into();
    options.chunk = Some(CHUNK);
    options.batch = Some(BATCH);
    options.context = Some(CONTEXT);
    options.batch_invariant = batch_invariant;
    options.backend = backends().next().expect("a back end is built in");
    options
}

fn text(case: &str) -> Vec<i32> {
    let golden = golden(case);
    let longest = golden.prompts.iter().map(ids).max_by_key(Vec::len).unwrap();
    longest.iter().copied().cycle().take(LENGTH).collect()
}

/// Gives the logits of the last token of a text.
type FeedingOrder = fn(&Model, &[i32]) -> Vec<f32>;

fn pieces(model: &Model, text: &[i32], size: usize) -> Vec<f32> {
    feed(&mut model.session().unwrap(), text, size)
}

/// Token by token beside three others, which have other lengths.
fn decoded_beside_others(model: &Model, text: &[i32]) -> Vec<f32> {
    let (prompt, rest) = text.split_at(text.len() - 24);
    let mut sessions: Vec<_> = (0..BATCH as usize).map(|_| model.session().unwrap()).collect();
    let mut batch = model.batch(sessions.len()).unwrap();
    sessions[2].prefill(prompt).unwrap();
    for (i, &token) in rest.iter().enumerate() {
        let tokens = [text[i], text[2 * i], token, text[i]];
        let mut members: Vec<_> = sessions.iter_mut().collect();
        // Sequences come and go.
        let from = i % 3;
        batch.decode(&mut members[from..], &tokens[from..]).unwrap();
    }
    sessions[2].logits().to_vec()
}

/// The text in ragged pieces of these lengths, together with those of others.
fn in_ragged_steps(model: &Model, text: &[i32], pieces: [usize; 6]) -> Vec<f32> {
    let mut sessions: Vec<_> = (0..3).map(|_| model.session().unwrap()).collect();
    let mut batch = model.batch(3).unwrap();
    let (mut done, mut number) = (0, 0);
    while done < text.len() {
        let piece = pieces[number % 6].min(text.len() - done);
        let [a, b, c] = &mut sessions[..] else { unreachable!() };
        let mut rows = vec![
            SessionInput { session: a, tokens: &text[..1 + number % 4], outputs: OutputRows::Nothing },
            SessionInput::new(b, &text[done..done + piece]),
            SessionInput::new(c, &text[number..number + 1]),
        ];
        rows.rotate_left(number % 3);
        batch.step(&mut rows).unwrap();
        done += piece;
        number += 1;
    }
    sessions[1].logits().to_vec()
}

const FEEDINGS: [(&str, FeedingOrder); 9] = [
    ("at once", |model, text| pieces(model, text, text.len())),
    ("pieces of 1", |model, text| pieces(model, text, 1)),
    ("pieces of 3", |model, text| pieces(model, text, 3)),
    ("pieces of 8", |model, text| pieces(model, text, 8)),
    ("pieces of 16", |model, text| pieces(model, text, 16)),
    ("pieces of 50", |model, text| pieces(model, text, 50)),
    ("decode_batch", decoded_beside_others),
    ("step", |model, text| in_ragged_steps(model, text, [2, 7, 3, 33, 2, 16])),
    ("step with single rows", |model, text| in_ragged_steps(model, text, PIECES)),
];

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

/// True if the text is computed in pieces of several tokens: single ones have the attention kernel of one
/// query.
fn of_several(feeding: &str) -> bool {
    !matches!(feeding, "pieces of 1" | "decode_batch" | "step with single rows")
}

/// The feedings that give other bits than the text at once by two threads, and how far they are off.
fn differing(path: &Path, text: &[i32]) -> Vec<(&'static str, String)> {
    let models = [2, 1].map(|threads| load(path, None, threads));
    let expected = (FEEDINGS[0].1)(&models[0], text);
    assert!(expected.iter().all(|x| x.is_finite()) && argmax(&expected) < models[0].vocab() as u32);
    let mut found = Vec::new();
    for (threads, model) in [2, 1].into_iter().zip(&models) {
        for (name, feeding) in FEEDINGS {
            let logits = feeding(model, text);
            if bits(&logits) != bits(&expected) {
                found.push((
                    name,
                    format!("{name} by {threads} threads ({:e})", distance(&expected, &logits)),
                ));
            }
        }
    }
    found
}

/// `None` where the case is not there.
fn differing_in(case: &str, quant: &str, batch_invariant: bool) -> Option<Vec<(&'static str, String)>> {
    let dir = find(case)?;
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = artifact(&options(&dir, quant, batch_invariant), folder.path(), "case.so");
    Some(differing(&path, &text(case)))
}

/// A line of the table: whether the bits are those of the text at once, for models of attention and dense
/// products.
pub struct BitsPromise {
    pub schemes: &'static [&'static str],
    /// In pieces of several tokens and in steps, then token by token, in a build without flags.
    pub usual: [bool; 2],
    /// True for any way, with --batch-invariant.
    pub batch_invariant: bool,
}

pub const PROMISES: [BitsPromise; 2] = [
    BitsPromise { schemes: &["q4i8", "q8i8"], usual: [true, false], batch_invariant: true },
    BitsPromise { schemes: &["f16", "f32"], usual: [false, false], batch_invariant: true },
];

/// Every cell of a line, for every scheme of it.
fn is_as_promised(promise: &BitsPromise) {
    for quant in promise.schemes {
        let Some(found) = differing_in("llama3-gqa-tied", quant, false) else { return };
        let same = [true, false].map(|several| found.iter().all(|(name, _)| of_several(name) != several));
        assert_eq!(same, promise.usual, "{quant}: {found:?}");
        let found = differing_in("llama3-gqa-tied", quant, true).unwrap();
        assert_eq!(found.is_empty(), promise.batch_invariant, "{quant}, --batch-invariant: {found:?}");
    }
}

#[test]
fn integer_schemes_are_as_the_table_says() {
    is_as_promised(&PROMISES[0]);
}

#[test]
fn float_schemes_are_as_the_table_says() {
    is_as_promised(&PROMISES[1]);
}

/// The same pieces as of [`in_ragged_steps`], alone.
fn in_pieces_alone(model: &Model, text: &[i32]) -> Vec<f32> {
    let mut session = model.session().unwrap();
    let mut rest = text;
    for piece in PIECES.into_iter().cycle() {
        let (now, later) = rest.split_at(piece.min(rest.len()));
        if !now.is_empty() {
            session.prefill(now).unwrap();
        }
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    session.logits().to_vec()
}

/// A single row of `step` has the bits of `decode` in a build without the flag, in integer schemes. So next
/// tokens can go with pieces of prompts in one call, and every text is that of a session alone.
#[test]
fn single_rows_of_a_step_have_the_bits_of_decode() {
    for case in ["llama3-gqa-tied", "rwkv4-hf-odd", "rwkv5-hf", "mistral-swa"] {
        let Some(dir) = find(case) else { continue };
        let folder = tempfile::tempdir().unwrap();
        let (path, _) = artifact(&options(&dir, "q4i8", false), folder.path(), "case.so");
        let text = text(case);
        for threads in [2, 1] {
            let model = load(&path, None, threads);
            let (alone, beside) = (in_pieces_alone(&model, &text), in_ragged_steps(&model, &text, PIECES));
            assert!(
                bits(&alone) == bits(&beside),
                "{case}, {threads} threads: {:e}",
                distance(&alone, &beside)
            );
        }
    }
}

/// A window and a soft cap, matrices as states, experts beside a recurrence.
#[test]
fn rows_know_nothing_of_each_other_with_batch_invariance() {
    for (case, quant) in [("gemma2", "q8i8"), ("rwkv7-hf", "q4i8"), ("qwen3-next", "q4i8")] {
        let found = differing_in(case, quant, true).unwrap_or_default();
        assert!(found.is_empty(), "{case} in {quant}: {found:?}");
    }
}

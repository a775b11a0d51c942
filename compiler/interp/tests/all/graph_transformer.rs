//! Attention, caches, top-k and products with chosen experts against directly written references.

use mlcc_interp::graph::{Interpreter, StateValues, Tensor};
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::module::{FuncId, ModelState, Module};
use mlcc_ir::ops::{AttentionOp, KeySpan, Op};
use mlcc_ir::text::{parse_module, print_module};
use mlcc_ir::types::{DType, TensorType};
use mlcc_ir::verify::verify_module;

/// Deterministic values in -1..1.
fn values(dims: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 11) as f64 / (1u64 << 52) as f64 - 1.0) as f32 as f64
    };
    Tensor::new(DType::F32, dims, (0..dims.iter().product()).map(|_| next()).collect())
}

struct TransformerCase {
    heads: usize,
    kv: usize,
    size: usize,
    value_size: usize,
    /// Tokens per call.
    calls: &'static [usize],
    attention: AttentionOp,
}

const CONTEXT: usize = 24;
/// Columns of a table of terms, and keys of a span.
const DISTANCES: usize = 5;
const COUNT: usize = 3;

/// `f(q, k, v, ..)`: both appended to their caches, then attention.
fn module(case: &TransformerCase) -> (Module, FuncId) {
    let mut m = Module::new("m");
    let mut cache = |name: &str, size: usize| {
        let ty = TensorType::new(DType::F32, [CONTEXT, case.kv, size]);
        m.states.push(ModelState { name: name.into(), ty, init: 0.0 })
    };
    let (keys, kept) = (cache("keys", case.size), cache("values", case.value_size));
    let n = Dim::sym(SizeSymbol::N);
    let row = |h: usize, s: usize| TensorType::new(DType::F32, [n.clone(), Dim::from(h), Dim::from(s)]);
    let mut f = Function::new("f", FunctionKind::Entry);
    let q = f.add_input(row(case.heads, case.size));
    let k = f.add_input(row(case.kv, case.size));
    let v = f.add_input(row(case.kv, case.value_size));
    let mut inputs = vec![q];
    inputs.push(f.append(&m, Op::CacheAppend(keys), &[k]).unwrap()[0]);
    inputs.push(f.append(&m, Op::CacheAppend(kept), &[v]).unwrap()[0]);
    if case.attention.alibi {
        inputs.push(f.add_input(TensorType::new(DType::F32, [case.heads])));
    }
    if case.attention.prefix || case.attention.span != KeySpan::All {
        inputs.push(f.add_input(TensorType::new(DType::I32, [1])));
    }
    if case.attention.sinks > 0 {
        inputs.push(f.add_input(row(case.heads, case.size)));
    }
    if case.attention.terms.is_some() {
        inputs.push(f.add_input(TensorType::new(DType::F32, [case.heads, DISTANCES])));
    }
    f.outputs = f.append(&m, Op::Attention(case.attention.clone()), &inputs).unwrap();
    let id = m.functions.push(f);
    verify_module(&m).unwrap();
    let text = print_module(&m);
    assert_eq!(print_module(&parse_module(&text).unwrap()), text);
    (m, id)
}

/// The keys that a query sees: rows so far, slopes and prefix.
struct VisibleKeys<'a> {
    keys: &'a Tensor,
    kept: &'a Tensor,
    slopes: &'a [f64],
    terms: &'a [f64],
    prefix: usize,
    known: usize,
}

/// The output row of the query at `position`; `far` is the query for sinks beyond the window.
fn reference(case: &TransformerCase, [q, far]: [&[f64]; 2], position: usize, seen: &VisibleKeys) -> Vec<f64> {
    let (a, mut out) = (&case.attention, vec![]);
    for head in 0..case.heads {
        let kv = head / (case.heads / case.kv);
        let in_window = |j: usize| a.window == 0 || position < j + a.window;
        let visible = |j: &usize| {
            let in_span = match a.span {
                KeySpan::All => true,
                KeySpan::First => *j < COUNT,
                KeySpan::Rest => *j >= COUNT,
            };
            let near = *j <= position + a.ahead && (in_window(*j) || *j < a.sinks);
            in_span && (near || (a.prefix && *j < seen.prefix))
        };
        let score = |j: usize| {
            let key = &seen.keys.data[(j * case.kv + kv) * case.size..][..case.size];
            let (q, place) = match a.sinks > 0 && !in_window(j) {
                true => (far, position.min(a.window + a.sinks - 1)),
                false => (q, position),
            };
            let query = &q[head * case.size..][..case.size];
            let mut score = query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() * a.scale;
            if a.softcap != 0.0 {
                score = a.softcap * (score / a.softcap).tanh();
            }
            if a.alibi {
                score += seen.slopes[head] * (j as f64 - place as f64);
            }
            if let Some(behind) = a.terms {
                let column = (j + behind).saturating_sub(position).min(DISTANCES - 1);
                score += seen.terms[head * DISTANCES + column];
            }
            score
        };
        let scores: Vec<(usize, f64)> = (0..seen.known).filter(visible).map(|j| (j, score(j))).collect();
        let top = scores.iter().map(|s| s.1).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s.1 - top).exp()).sum();
        for d in 0..case.value_size {
            let value = |j: usize| seen.kept.data[(j * case.kv + kv) * case.value_size + d];
            out.push(scores.iter().map(|&(j, s)| (s - top).exp() / sum * value(j)).sum());
        }
    }
    out
}

fn check(case: TransformerCase) {
    let (m, id) = module(&case);
    let interpreter = Interpreter::new(&m, |_| unreachable!());
    let mut states = StateValues::new(&m).unwrap();
    let total: usize = case.calls.iter().sum();
    let q = values(&[total, case.heads, case.size], 1);
    let k = values(&[total, case.kv, case.size], 2);
    let v = values(&[total, case.kv, case.value_size], 3);
    let slopes = values(&[case.heads], 4);
    let far = values(&[total, case.heads, case.size], 6);
    let terms = values(&[case.heads, DISTANCES], 7);
    let count = |prefix: usize| match (case.attention.prefix, case.attention.span) {
        (false, KeySpan::All) => None,
        (true, _) => Some(Tensor::new(DType::I32, &[1], vec![prefix as f64])),
        (false, _) => Some(Tensor::new(DType::I32, &[1], vec![COUNT as f64])),
    };
    let prefix = case.calls[0];
    let mut past = 0;
    for &n in case.calls {
        let rows = |t: &Tensor| {
            let row: usize = t.dims[1..].iter().product();
            Tensor::new(DType::F32, &[n, t.dims[1], t.dims[2]], t.data[past * row..(past + n) * row].to_vec())
        };
        let mut inputs = vec![rows(&q), rows(&k), rows(&v)];
        if case.attention.alibi {
            inputs.push(slopes.clone());
        }
        inputs.extend(count(prefix));
        if case.attention.sinks > 0 {
            inputs.push(rows(&far));
        }
        inputs.extend(case.attention.terms.map(|_| terms.clone()));
        let syms = SymValues { n: n as i64, b: 1, past: past as i64 };
        let out = interpreter.run(id, &inputs, &mut states, syms).unwrap().remove(0);
        for i in 0..n {
            let width = case.heads * case.size;
            let row = &inputs[0].data[i * width..][..width];
            let far = &far.data[(past + i) * width..][..width];
            let seen = VisibleKeys {
                keys: &k,
                kept: &v,
                slopes: &slopes.data,
                terms: &terms.data,
                prefix,
                known: past + n,
            };
            let expected = reference(&case, [row, far], past + i, &seen);
            let found = &out.data[i * expected.len()..][..expected.len()];
            for (x, y) in expected.iter().zip(found) {
                assert!((x - y).abs() < 1e-5, "{:?}, position {}: {x} and {y}", case.attention, past + i);
            }
        }
        past += n;
    }
    let over = SymValues { n: 1, b: 1, past: CONTEXT as i64 };
    let one = |h, s| values(&[1, h, s], 5);
    let mut inputs = vec![one(case.heads, case.size), one(case.kv, case.size), one(case.kv, case.value_size)];
    inputs.extend(case.attention.alibi.then(|| slopes.clone()));
    inputs.extend(count(1));
    inputs.extend((case.attention.sinks > 0).then(|| one(case.heads, case.size)));
    inputs.extend(case.attention.terms.map(|_| terms.clone()));
    assert!(interpreter.run(id, &inputs, &mut states, over).is_err(), "a full cache takes no rows");
}

#[test]
fn attention_over_a_cache_equals_its_formula() {
    let plain = AttentionOp::causal(0.3);
    let calls: &[usize] = &[5, 1, 4, 1];
    let case = |heads, kv, attention| TransformerCase { heads, kv, size: 6, value_size: 4, calls, attention };
    check(case(2, 2, plain.clone()));
    check(case(6, 2, plain.clone()));
    check(case(4, 1, AttentionOp { softcap: 0.5, ..plain.clone() }));
    check(case(2, 1, AttentionOp { window: 3, ..plain.clone() }));
    check(case(3, 3, AttentionOp { alibi: true, ..plain.clone() }));
    check(case(2, 2, AttentionOp { prefix: true, ..plain.clone() }));
    check(case(4, 2, AttentionOp { alibi: true, prefix: true, softcap: 2.0, window: 4, ..plain.clone() }));
    check(case(4, 2, AttentionOp { alibi: true, softcap: 2.0, window: 3, sinks: 2, ..plain.clone() }));
    check(case(2, 1, AttentionOp { ahead: AttentionOp::ALL, ..plain.clone() }));
    check(case(4, 2, AttentionOp { ahead: 1, window: 3, alibi: true, ..plain.clone() }));
    check(case(4, 2, AttentionOp { span: KeySpan::First, terms: Some(3), softcap: 2.0, ..plain.clone() }));
    check(case(2, 1, AttentionOp { span: KeySpan::Rest, ahead: AttentionOp::ALL, terms: Some(1), ..plain }));
}

fn run(m: &Module, id: FuncId, inputs: &[Tensor]) -> Vec<Tensor> {
    let interpreter = Interpreter::new(m, |_| unreachable!());
    interpreter.run(id, inputs, &mut StateValues::new(m).unwrap(), SymValues::for_tokens(3)).unwrap()
}

#[test]
fn top_k_falls_and_prefers_the_first_among_equals() {
    let mut m = Module::new("m");
    let mut f = Function::new("f", FunctionKind::Entry);
    let x = f.add_input(TensorType::new(DType::F32, [2, 4]));
    f.outputs = f.append(&m, Op::TopK { k: 3 }, &[x]).unwrap();
    let id = m.functions.push(f);
    let found = run(&m, id, &[Tensor::f32(&[2, 4], &[0.5, 2.0, -1.0, 2.0, -3.0, -3.0, -4.0, -3.0])]);
    assert_eq!(found[0].data, [2.0, 2.0, 0.5, -3.0, -3.0, -3.0]);
    assert_eq!(found[1].data, [1.0, 3.0, 0.0, 0.0, 1.0, 3.0]);
}

#[test]
fn rows_meet_the_matrices_of_their_experts() {
    for slots in [1, 2] {
        let mut m = Module::new("m");
        let mut f = Function::new("f", FunctionKind::Entry);
        let x = f.add_input(TensorType::new(DType::F32, [3, slots, 5]));
        let w = f.add_input(TensorType::new(DType::F32, [4 * 2, 5]));
        let ids = f.add_input(TensorType::new(DType::I32, [3, 2]));
        f.outputs = f.append(&m, Op::MatMulExperts { experts: 4 }, &[x, w, ids]).unwrap();
        let id = m.functions.push(f);
        let (x, w) = (values(&[3, slots, 5], 1), values(&[8, 5], 2));
        let choice = [3.0, 0.0, 1.0, 1.0, 2.0, 3.0];
        let found = run(&m, id, &[x.clone(), w.clone(), Tensor::new(DType::I32, &[3, 2], choice.to_vec())]);
        assert_eq!(found[0].dims, [3, 2, 2]);
        for (at, value) in found[0].data.iter().enumerate() {
            let (row, slot, out) = (at / 4, at / 2 % 2, at % 2);
            let from = &x.data[(row * slots + slot % slots) * 5..][..5];
            let weights = &w.data[(choice[row * 2 + slot] as usize * 2 + out) * 5..][..5];
            let expected: f64 = from.iter().zip(weights).map(|(a, b)| a * b).sum();
            assert!((value - expected).abs() < 1e-6, "{at}: {value} and {expected}");
        }
    }
}

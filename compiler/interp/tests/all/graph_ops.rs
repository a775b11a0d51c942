//! Every op: the fast path equals the register program bit by bit, and the result equals a directly written
//! reference.

use mlcc_interp::graph::{EvaluationMode, Interpreter, StateValues, Tensor};
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, QuantFormat, TensorType};

const SYMS: SymValues = SymValues { n: 3, b: 1, past: 0 };

/// Deterministic values in -2..2 (integers: -3..=3).
fn values(dtype: DType, dims: &[usize], seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let data = (0..dims.iter().product())
        .map(|_| if dtype.is_int() { (next() * 7.0).floor() - 3.0 } else { next() * 4.0 - 2.0 })
        .collect();
    Tensor::new(dtype, dims, data)
}

/// Runs one op on inputs of these types in both modes, which must agree, and returns its output.
fn run(op: Op, inputs: &[(TensorType, Tensor)]) -> Tensor {
    run_all(op, inputs).remove(0)
}

/// All results of an op, which both modes agree on.
fn run_all(op: Op, inputs: &[(TensorType, Tensor)]) -> Vec<Tensor> {
    let mut module = Module::new("m");
    let mut f = Function::new("f", FunctionKind::Entry);
    let args: Vec<_> = inputs.iter().map(|(ty, _)| f.add_input(ty.clone())).collect();
    f.outputs = f.append(&module, op, &args).unwrap();
    let id = module.functions.push(f);
    let tensors: Vec<Tensor> = inputs.iter().map(|(_, t)| t.clone()).collect();
    let [fast, plain] = [EvaluationMode::Fast, EvaluationMode::Plain].map(|mode| {
        let interpreter = Interpreter::new(&module, |_| unreachable!()).with_mode(mode);
        let mut states = StateValues::new(&module).unwrap();
        interpreter.run(id, &tensors, &mut states, SYMS).unwrap()
    });
    for (fast, plain) in fast.iter().zip(&plain) {
        assert_eq!(fast.dims, plain.dims);
        for (i, (a, b)) in fast.data.iter().zip(&plain.data).enumerate() {
            assert!(a.to_bits() == b.to_bits(), "element {i}: fast {a}, plain {b}");
        }
    }
    fast
}

fn input(dtype: DType, dims: &[Dim], seed: u64) -> (TensorType, Tensor) {
    let ty = TensorType::new(dtype, dims);
    let concrete: Vec<usize> = dims.iter().map(|d| d.eval(&SYMS) as usize).collect();
    let tensor = values(dtype, &concrete, seed);
    (ty, tensor)
}

fn d(v: i64) -> Dim {
    Dim::from(v)
}
fn n() -> Dim {
    Dim::sym(SizeSymbol::N)
}

fn assert_close(got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(1e-30, |m: f64, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance * scale, "element {i}: got {g}, want {w}");
    }
}

#[test]
fn unary_ops() {
    let x = input(DType::F32, &[n(), d(5)], 1);
    let positive =
        (x.0.clone(), Tensor::new(DType::F32, &[3, 5], x.1.data.iter().map(|v| v.abs() + 0.1).collect()));
    for op in UnOp::ALL.into_iter().filter(|&op| op != UnOp::Not) {
        let arg = if matches!(op, UnOp::Sqrt | UnOp::Log | UnOp::Rsqrt) { &positive } else { &x };
        let reference = |v: f64| match op {
            UnOp::Neg => -v,
            UnOp::Abs => v.abs(),
            UnOp::Sqrt => v.sqrt(),
            UnOp::Floor => v.floor(),
            UnOp::Round => v.round_ties_even(),
            UnOp::Exp => v.exp(),
            UnOp::Log => v.ln(),
            UnOp::Tanh => v.tanh(),
            UnOp::Sigmoid => 0.5 + 0.5 * (v / 2.0).tanh(),
            UnOp::Rsqrt => v.powf(-0.5),
            UnOp::Recip => v.powi(-1),
            // Power series, ample for |x| <= 2.
            UnOp::Erf => {
                let mut term = v;
                let mut sum = v;
                for k in 1..60 {
                    term *= -v * v / f64::from(k);
                    sum += term / f64::from(2 * k + 1);
                }
                sum * 2.0 / std::f64::consts::PI.sqrt()
            }
            UnOp::Sin => v.sin(),
            UnOp::Cos => v.cos(),
            UnOp::Not => unreachable!(),
        };
        let want: Vec<f64> = arg.1.data.iter().map(|&v| reference(v)).collect();
        assert_close(&run(Op::Unary(op), std::slice::from_ref(arg)).data, &want, 1e-7);
    }
}

#[test]
fn binary_ops_broadcast() {
    let a = input(DType::F32, &[n(), d(1), d(4)], 2);
    let b = input(DType::F32, &[d(2), d(1)], 3);
    let out = run(Op::Binary(BinOp::Sub), &[a.clone(), b.clone()]);
    assert_eq!(out.dims, [3, 2, 4]);
    let at = |i: usize, j: usize, k: usize| out.data[(i * 2 + j) * 4 + k];
    for (i, j, k) in (0..3).flat_map(|i| (0..2).flat_map(move |j| (0..4).map(move |k| (i, j, k)))) {
        assert_eq!(at(i, j, k), f64::from((a.1.data[i * 4 + k] - b.1.data[j]) as f32));
    }
    for op in [BinOp::Add, BinOp::Mul, BinOp::Div, BinOp::Min, BinOp::Max] {
        run(Op::Binary(op), &[a.clone(), b.clone()]);
    }
    let ints = [
        input(DType::I32, &[d(4)], 4),
        (TensorType::new(DType::I32, [4]), Tensor::full(DType::I32, &[4], 2.0)),
    ];
    let quotient = run(Op::Binary(BinOp::Div), &ints);
    assert_eq!(quotient.data, ints[0].1.data.iter().map(|v| (v / 2.0).trunc()).collect::<Vec<_>>());
}

#[test]
fn halves_round_after_each_op() {
    let x = (TensorType::new(DType::F16, [1]), Tensor::full(DType::F16, &[1], 2048.0));
    let one = (TensorType::new(DType::F16, [1]), Tensor::full(DType::F16, &[1], 1.0));
    assert_eq!(run(Op::Binary(BinOp::Add), &[x, one]).data, [2048.0]);
}

#[test]
fn casts_and_constants() {
    let x = (TensorType::new(DType::F32, [4]), Tensor::f32(&[4], &[1.9, -1.9, 300.0, f32::NAN]));
    assert_eq!(run(Op::Cast(DType::I8), std::slice::from_ref(&x)).data, [1.0, -1.0, 127.0, 0.0]);
    let i = (TensorType::new(DType::I32, [2]), Tensor::ids(&[300, -200]));
    assert_eq!(run(Op::Cast(DType::I8), std::slice::from_ref(&i)).data, [44.0, 56.0]);
    assert_eq!(run(Op::Cast(DType::F16), &[i]).data, [300.0, -200.0]);
    assert_eq!(run(Op::Constant { value: 0.1, dtype: DType::F32 }, &[]).data, [f64::from(0.1f32)]);
}

#[test]
fn movement_ops() {
    let x = input(DType::F32, &[n(), d(4)], 5);
    let row = |i: usize| x.1.row(i).to_vec();
    let t = run(Op::Permute { perm: vec![1, 0] }, std::slice::from_ref(&x));
    assert_eq!(t.dims, [4, 3]);
    assert_eq!(t.row(1), [row(0)[1], row(1)[1], row(2)[1]]);
    let r = run(Op::Reshape { dims: vec![n().scale(2), d(2)] }, std::slice::from_ref(&x));
    assert_eq!((r.dims.as_slice(), &r.data), ([6, 2].as_slice(), &x.1.data));
    let s = run(Op::Slice { axis: 1, start: d(1), len: d(2) }, std::slice::from_ref(&x));
    assert_eq!(s.row(2), &row(2)[1..3]);
    let last = Op::Slice { axis: 0, start: n().sub(&d(1)), len: d(1) };
    assert_eq!(run(last, std::slice::from_ref(&x)).data, row(2));
    let y = input(DType::F32, &[d(2), d(4)], 6);
    let c = run(Op::Concat { axis: 0 }, &[x.clone(), y.clone(), x.clone()]);
    assert_eq!((c.dims[0], c.row(3), c.row(5)), (8, y.1.row(0), x.1.row(0)));
    let ids = (TensorType::new(DType::I32, [n()]), Tensor::ids(&[2, 0, 2]));
    let g = run(Op::Gather, &[x.clone(), ids]);
    assert_eq!((g.row(0), g.row(1), g.row(2)), (x.1.row(2), x.1.row(0), x.1.row(2)));
}

#[test]
fn matmul_both_layouts() {
    let a = input(DType::F32, &[d(2), n(), d(5)], 7);
    let b = input(DType::F16, &[d(5), d(4)], 8);
    let out = run(Op::MatMul { transpose_b: false }, &[a.clone(), b.clone()]);
    let mut want = vec![0.0; 2 * 3 * 4];
    for (row, x) in want.chunks_mut(4).zip(a.1.data.chunks(5)) {
        for (j, o) in row.iter_mut().enumerate() {
            *o = (0..5).map(|k| x[k] * b.1.data[k * 4 + j]).sum();
        }
    }
    assert_close(&out.data, &want, 1e-7);
    let transposed = run(Op::Permute { perm: vec![1, 0] }, &[b]);
    let bt = (TensorType::new(DType::F16, [4, 5]), transposed);
    assert_eq!(run(Op::MatMul { transpose_b: true }, &[a, bt]), out);
}

#[test]
fn reductions() {
    let x = input(DType::F32, &[n(), d(4)], 9);
    let sum = run(Op::Reduce { op: RedOp::Sum, axis: 0 }, std::slice::from_ref(&x));
    assert_eq!(sum.dims, [1, 4]);
    assert_close(&sum.data, &(0..4).map(|j| (0..3).map(|i| x.1.row(i)[j]).sum()).collect::<Vec<_>>(), 1e-7);
    let max = run(Op::Reduce { op: RedOp::Max, axis: 1 }, std::slice::from_ref(&x));
    let largest = |i: usize| x.1.row(i).iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
    assert_eq!(max.data, [largest(0), largest(1), largest(2)]);
    let ints = input(DType::I32, &[n(), d(2)], 10);
    let sum = run(Op::Reduce { op: RedOp::Sum, axis: 1 }, std::slice::from_ref(&ints));
    assert_eq!(sum.data[1], ints.1.row(1)[0] + ints.1.row(1)[1]);
}

#[test]
fn norms_and_softmax() {
    let x = input(DType::F32, &[n(), d(6)], 11);
    let (w, b) = (input(DType::F32, &[d(6)], 12), input(DType::F32, &[d(6)], 13));
    let eps = 1e-5;
    let mut layer = vec![];
    let mut rms = vec![];
    let mut soft = vec![];
    for row in x.1.data.chunks(6) {
        let mean = row.iter().sum::<f64>() / 6.0;
        let variance = row.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / 6.0;
        let square = row.iter().map(|v| v * v).sum::<f64>() / 6.0;
        let total = row.iter().map(|v| v.exp()).sum::<f64>();
        for (j, v) in row.iter().enumerate() {
            layer.push((v - mean) / (variance + eps).sqrt() * w.1.data[j] + b.1.data[j]);
            rms.push(v / (square + eps).sqrt() * w.1.data[j]);
            soft.push(v.exp() / total);
        }
    }
    let out = run(Op::LayerNorm { eps }, &[x.clone(), w.clone(), b]);
    assert_close(&out.data, &layer, 1e-6);
    assert_close(&run(Op::RmsNorm { eps }, &[x.clone(), w]).data, &rms, 1e-6);
    assert_close(&run(Op::Softmax, &[x]).data, &soft, 1e-6);
}

#[test]
fn softmax_of_large_values_does_not_overflow() {
    let x = (TensorType::new(DType::F32, [2]), Tensor::f32(&[2], &[1000.0, 1000.0]));
    assert_eq!(run(Op::Softmax, &[x]).data, [0.5, 0.5]);
}

/// `x` quantized per group as written in the notes: scale = max / 127, short last group padded with 0.
#[test]
fn activation_quantization_with_a_short_last_group() {
    let (k, group, groups) = (40usize, 32usize, 2usize);
    let mut x = input(DType::F32, &[n(), d(k as i64)], 14);
    x.1.data[32..40].fill(0.0); // an all-zero group
    let scales = run(Op::GroupScale { group, bits: 8 }, std::slice::from_ref(&x));
    assert_eq!(scales.dims, [3, groups]);
    assert_eq!(scales.data[1], 0.0);
    let sty = TensorType::new(DType::F32, [n(), d(groups as i64)]);
    let codes =
        run(Op::GroupQuantize { group, bits: 8, part: 32 }, &[x.clone(), (sty.clone(), scales.clone())]);
    assert_eq!(codes.dims, [3, groups * group]);
    for i in 0..3 {
        for j in 0..groups * group {
            let scale = scales.row(i)[j / group];
            let want = match j < k && scale > 0.0 {
                true => (x.1.row(i)[j] / scale).round_ties_even().clamp(-127.0, 127.0),
                false => 0.0,
            };
            assert_eq!(codes.row(i)[j], want, "row {i} column {j}");
        }
    }
    let cty = TensorType::new(DType::I8, [n(), d(64)]);
    let sums = run(Op::GroupSum { part: 32, zero: 128 }, &[(cty.clone(), codes.clone())]);
    assert_eq!(sums.row(2)[1], -128.0 * codes.row(2)[32..].iter().sum::<f64>());

    let packed = DType::Packed(QuantFormat::Q8G32);
    let w = (TensorType::new(packed, [d(5), d(k as i64)]), values(packed, &[5, k], 15));
    let zty = TensorType::new(DType::I32, [n(), d(2)]);
    let inputs = [(cty, codes.clone()), (sty, scales.clone()), (zty, sums), w.clone()];
    let out = run(Op::MatMulI8 { group }, &inputs);
    let mut want = vec![];
    for i in 0..3 {
        for row in w.1.data.chunks(k) {
            let x = |j: usize| codes.row(i)[j] * scales.row(i)[j / group];
            want.push(row.iter().enumerate().map(|(j, w)| x(j) * w).sum::<f64>());
        }
    }
    assert_close(&out.data, &want, 1e-7);
    assert_eq!(run(Op::Dequantize, std::slice::from_ref(&w)).data, w.1.data);
}

/// `quantize_rows` is the three steps, with a scale for more columns than a sum.
#[test]
fn rows_are_quantized_in_one_op() {
    let k = 40usize;
    let x = input(DType::F32, &[n(), d(k as i64)], 16);
    for (bits, most) in [(8, 127.0), (16, 32512.0)] {
        let op = Op::QuantizeRows { group: 64, bits, part: 32, zero: 7 };
        let [codes, scales, sums] = <[Tensor; 3]>::try_from(run_all(op, std::slice::from_ref(&x))).unwrap();
        assert_eq!((codes.dims[1], scales.dims[1], sums.dims[1]), (64, 1, 2));
        for i in 0..3 {
            let largest = x.1.row(i).iter().fold(0.0_f64, |m, v| m.max(v.abs()));
            assert!((scales.row(i)[0] - largest / most).abs() <= largest * 1e-7);
            assert_eq!(codes.row(i).iter().fold(0.0_f64, |m, v| m.max(v.abs())), most);
            assert_eq!(sums.row(i)[0], -7.0 * codes.row(i)[..32].iter().sum::<f64>());
        }
    }
    let halves = Tensor::new(DType::F32, &[1, 4], vec![127.0, 10.5, -10.5, -0.5]);
    let op = Op::QuantizeRows { group: 64, bits: 8, part: 4, zero: 7 };
    let codes = run_all(op, &[(TensorType::new(DType::F32, [d(1), d(4)]), halves)]).swap_remove(0);
    assert_eq!(codes.data, [127.0, 11.0, -10.0, 0.0]);
}

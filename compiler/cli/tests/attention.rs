//! Attention kernels against a plain reference: interpreted for CPUs and a GPU, compiled by every back end at every level of
//! this machine, for decode and prefill, over head sizes, groups, lengths and kinds of attention.

mod cases;

use std::collections::HashMap;

use cases::{assert_close, host_levels};
use mlcc_codegen::executor::{Aligned, Executor};
use mlcc_interp::equivalence::random_tensor;
use mlcc_interp::graph::Tensor;
use mlcc_interp::kernel::{Buffer, Options, run_with};
use mlcc_ir::dim::{Dim, Sym, SymValues};
use mlcc_ir::graph::{Function, FunctionKind, ValueId};
use mlcc_ir::kernel::{BinOp, Expr, Kernel};
use mlcc_ir::module::Module;
use mlcc_ir::ops::{Attention, Op};
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernels::lower::group::lower_group;
use mlcc_kernels::params::KernelTarget;
use mlcc_target::Level;

/// A kind of attention with its sizes.
#[derive(Clone, Debug)]
struct Case {
    kv: usize,
    group: usize,
    size: usize,
    value_size: usize,
    cache: DType,
    /// Every third row of codes has a negative scale.
    negative: bool,
    op: Attention,
}

impl Case {
    fn new(kv: usize, group: usize, size: usize) -> Case {
        let op = Attention::causal((size as f64).powf(-0.5));
        Case { kv, group, size, value_size: size, cache: DType::F32, negative: false, op }
    }
    /// The same with products of several queries in integers.
    fn on_codes(self) -> Case {
        let op = Attention { codes: true, ..self.op };
        Case { op, ..self }
    }
    fn heads(&self) -> usize {
        self.kv * self.group
    }

    /// The group that lowering gets: `n` queries, one if `single`.
    fn function(&self, single: bool) -> Function {
        let n = if single { Dim::from(1) } else { Dim::sym(Sym::N) };
        let t = Dim::sym(Sym::Past).add(&n);
        let mut f = Function::new("attention", FunctionKind::Group);
        let dims = |rows: &Dim, heads: usize, size: usize| [rows.clone(), Dim::from(heads), Dim::from(size)];
        let mut inputs = vec![f.add_input(TensorType::new(DType::F32, dims(&n, self.heads(), self.size)))];
        for size in [self.size, self.value_size] {
            let rows = f.add_input(TensorType::new(self.cache, dims(&t, self.kv, size)));
            inputs.push(if self.cache == DType::I8 { self.unpacked(&mut f, rows, &t) } else { rows });
        }
        if self.op.alibi {
            inputs.push(f.add_input(TensorType::new(DType::F32, [self.heads()])));
        }
        if self.op.prefix {
            inputs.push(f.add_input(TensorType::new(DType::I32, [1])));
        }
        if self.op.sinks > 0 {
            inputs.push(f.add_input(TensorType::new(DType::F32, dims(&n, self.heads(), self.size))));
        }
        f.outputs = f.append(&Module::new("m"), Op::Attention(self.op.clone()), &inputs).unwrap();
        f
    }

    /// Codes times the scales of their rows, as `quantize_cache` writes it.
    fn unpacked(&self, f: &mut Function, codes: ValueId, t: &Dim) -> ValueId {
        let module = Module::new("m");
        let scales = f.add_input(TensorType::new(DType::F32, [t.clone(), Dim::from(self.kv)]));
        let mut op = |op: Op, inputs: &[ValueId]| f.append(&module, op, inputs).unwrap()[0];
        let column = Op::Reshape { dims: vec![t.clone(), Dim::from(self.kv), Dim::from(1)] };
        let (codes, scales) = (op(Op::Cast(DType::F32), &[codes]), op(column, &[scales]));
        op(Op::Binary(BinOp::Mul), &[codes, scales])
    }

    /// Keys or values: rows, or codes and their scales.
    fn rows(&self, t: usize, size: usize, seed: u64) -> Vec<Tensor> {
        if self.cache != DType::I8 {
            return vec![random_tensor(self.cache, &[t, self.kv, size], seed)];
        }
        let codes = random_tensor(DType::F32, &[t, self.kv, size], seed).data;
        let scales = random_tensor(DType::F32, &[t, self.kv], seed + 10).data;
        let codes = codes.into_iter().map(|x| 8.0 * x).collect();
        let sign = |i: usize| if self.negative && i.is_multiple_of(3) { -1.0 } else { 1.0 };
        let scales = scales.into_iter().enumerate().map(|(i, x)| sign(i) * (0.02 * x + 0.06)).collect();
        vec![
            Tensor::new(DType::I8, &[t, self.kv, size], codes),
            Tensor::new(DType::F32, &[t, self.kv], scales),
        ]
    }

    /// The operands of the attention: codes times scales.
    fn operands(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [q, rest @ ..] = inputs else { return vec![] };
        let mut operands = vec![q.clone()];
        let rest = match self.cache {
            DType::I8 => {
                for pair in rest[..4].chunks(2) {
                    let size = pair[0].dims[2];
                    let product = |(i, code): (usize, &f64)| code * pair[1].data[i / size];
                    let data = pair[0].data.iter().enumerate().map(product).collect();
                    operands.push(Tensor { dtype: DType::F32, dims: pair[0].dims.clone(), data });
                }
                &rest[4..]
            }
            _ => rest,
        };
        operands.extend_from_slice(rest);
        operands
    }

    fn inputs(&self, n: usize, past: usize) -> Vec<Tensor> {
        let (t, heads) = (past + n, self.heads());
        let mut inputs = vec![random_tensor(DType::F32, &[n, heads, self.size], 1)];
        inputs.extend(self.rows(t, self.size, 2));
        inputs.extend(self.rows(t, self.value_size, 3));
        if self.op.alibi {
            let slopes = (0..heads).map(|h| (-8.0 * (h + 1) as f64 / heads as f64).exp2()).collect();
            inputs.push(Tensor::new(DType::F32, &[heads], slopes));
        }
        if self.op.prefix {
            inputs.push(Tensor::new(DType::I32, &[1], vec![(t / 2 + 1) as f64]));
        }
        if self.op.sinks > 0 {
            inputs.push(random_tensor(DType::F32, &[n, heads, self.size], 4));
        }
        inputs
    }

    /// The definition, in f64.
    fn reference(&self, inputs: &[Tensor], n: usize, past: usize) -> Vec<f32> {
        let inputs = &self.operands(inputs);
        let (q, k, v) = (&inputs[0].data, &inputs[1].data, &inputs[2].data);
        let prefix = self.op.prefix_input().map_or(0, |i| inputs[i].data[0] as usize);
        let mut out = Vec::new();
        for i in 0..n {
            let p = past + i;
            for h in 0..self.heads() {
                let kv = h / self.group;
                let near = |j: usize| self.op.window == 0 || p - j.min(p) < self.op.window;
                let seen = |j: usize| j <= p && (near(j) || j < self.op.sinks) || j < prefix;
                let keys: Vec<usize> = (0..past + n).filter(|&j| seen(j)).collect();
                let score = |j: usize| {
                    let sink = self.op.sink_input().filter(|_| !near(j));
                    let (q, place) = match sink {
                        Some(input) => (&inputs[input].data, p.min(self.op.last_place())),
                        None => (q, p),
                    };
                    let query = &q[(i * self.heads() + h) * self.size..][..self.size];
                    let key = &k[(j * self.kv + kv) * self.size..][..self.size];
                    let mut s = self.op.scale * query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>();
                    if self.op.softcap != 0.0 {
                        s = self.op.softcap * (s / self.op.softcap).tanh();
                    }
                    let distance = j as f64 - place as f64;
                    s + if self.op.alibi { inputs[3].data[h] * distance } else { 0.0 }
                };
                let scores: Vec<f64> = keys.iter().map(|&j| score(j)).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|s| (s - most).exp()).sum();
                let value = |c: usize| {
                    let of = |j: usize| v[(j * self.kv + kv) * self.value_size + c];
                    keys.iter().zip(&scores).map(|(&j, s)| (s - most).exp() * of(j)).sum::<f64>() / total
                };
                out.extend((0..self.value_size).map(|c| value(c) as f32));
            }
        }
        out
    }

    /// The kernel, and the one that joins its slices.
    fn kernels(&self, single: bool, target: &KernelTarget) -> Vec<Kernel> {
        let f = self.function(single);
        let packings = vec![None; f.inputs.len()];
        let made = lower_group(&Module::new("m"), &f, "attention", &packings, target).unwrap();
        std::iter::once(made.kernel).chain(made.merge.map(|m| m.kernel.kernel)).collect()
    }
}

fn kinds() -> Vec<Attention> {
    let plain = Attention::causal(0.2);
    vec![
        Attention { softcap: 5.0, ..plain.clone() },
        Attention { window: 7, ..plain.clone() },
        Attention { window: 40, softcap: 3.0, ..plain.clone() },
        Attention { alibi: true, ..plain.clone() },
        Attention { prefix: true, ..plain.clone() },
        Attention { prefix: true, window: 5, alibi: true, ..plain.clone() },
        Attention { window: 6, sinks: 2, softcap: 4.0, ..plain.clone() },
        Attention { window: 21, sinks: 37, alibi: true, ..plain },
    ]
}

/// Runs kernels one after the other: buffers of the first one, what lies between, the results.
fn run(
    kernels: &[Kernel],
    inputs: &[Tensor],
    sizes: &SymValues,
    mut call: impl FnMut(&Kernel, &mut Vec<Vec<u8>>),
) -> Vec<f32> {
    let mut buffers: Vec<Vec<u8>> =
        inputs.iter().map(|t| Buffer::from_floats(t.dtype, &t.to_f32()).bytes).collect();
    for (i, kernel) in kernels.iter().enumerate() {
        if i > 0 {
            buffers.drain(..buffers.len() - 1);
        }
        let out = kernel.bufs[*kernel.params.last().unwrap()].len.eval(sizes);
        buffers.push(vec![0xff; 4 * out as usize]);
        call(kernel, &mut buffers);
    }
    let bytes = buffers.pop().unwrap();
    bytes.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
}

fn interpreted(kernels: &[Kernel], inputs: &[Tensor], sizes: &SymValues, workers: usize) -> Vec<f32> {
    run(kernels, inputs, sizes, |kernel, bytes| {
        let buffers = kernel.params.iter().zip(bytes.iter());
        let mut buffers: Vec<Buffer> =
            buffers.map(|(&p, b)| Buffer::new(kernel.bufs[p].dtype, b.clone())).collect();
        run_with(kernel, &mut buffers, sizes, &Options::workers(workers)).unwrap_or_else(|e| panic!("{e}"));
        *bytes = buffers.into_iter().map(|b| b.bytes).collect();
    })
}

fn executed(
    e: &Executor,
    kernels: &[Kernel],
    inputs: &[Tensor],
    sizes: &SymValues,
    workers: usize,
) -> Vec<f32> {
    run(kernels, inputs, sizes, |kernel, bytes| {
        let mut buffers: Vec<Aligned> = bytes.iter().map(|b| Aligned::from_bytes(b)).collect();
        e.run(&kernel.name, &mut buffers, sizes, workers).unwrap();
        *bytes = buffers.iter().map(|b| b.bytes().to_vec()).collect();
    })
}

fn target_of(name: &str) -> (KernelTarget, Level) {
    let target = mlcc_target::resolve(name).unwrap();
    let level = target.levels[0].clone();
    (KernelTarget::new(target.arch, &level), level)
}

/// Integer products with codes take weights as 16-bit block floating point: off by half of `2^-16` of the largest weight of a
/// block for every key, twice that where a code has a sign (a scale is negative, or the instruction takes signed operands). Seen
/// where values nearly cancel: 4.1e-5 of the largest result without signs, 5.9e-5 with them, 2.6e-6 where floats meet.
fn tolerance(case: &Case, kernel: &Kernel) -> f32 {
    match has_one_of(kernel, &UNSIGNED) {
        true if !case.negative => 5e-5,
        unsigned if unsigned || has_one_of(kernel, &SIGNED) || has_pairs(kernel) => 1e-4,
        _ => 1e-5,
    }
}

/// Several queries. In integers products of 64 weights and values fill 31 bits: 13 of a value, 12 to 15 of a weight. Seen where
/// values nearly cancel: 4.1e-4 of the largest result.
fn tolerance_of_several(kernel: &Kernel) -> f32 {
    if has_pairs(kernel) { 6e-4 } else { 1e-5 }
}

/// Dot instructions whose first operand is unsigned bytes, those with signed ones, and what multiplies pairs of 16 bits.
const UNSIGNED: [&str; 4] = ["vpdpbusd_512", "vpdpbusd_256", "vpdpbusd_avx_256", "usdot_128"];
const SIGNED: [&str; 1] = ["sdot_128"];
const PAIRS: [&str; 5] = ["vpdpwssd_512", "vpdpwssd_256", "vpdpwssd_avx_256", "vpmaddwd_256", "pmaddwd_128"];

/// True if the kernel calls one of the instructions.
fn has_one_of(kernel: &Kernel, names: &[&str]) -> bool {
    let calls = |expr: &Expr| matches!(expr, Expr::Instr(instr, _) if names.contains(&instr.def().name));
    kernel.exprs.ids().any(|id| calls(kernel.exprs.expr(id)))
}

/// True if the kernel multiplies pairs of 16 bits.
fn has_pairs(kernel: &Kernel) -> bool {
    has_one_of(kernel, &PAIRS)
}

/// (queries, past) that fit an interpreter: within and across blocks of keys, ragged ends.
const SMALL: [(usize, usize); 6] = [(1, 0), (1, 5), (1, 77), (3, 0), (19, 0), (9, 30)];

#[test]
fn interpreted_kernels_equal_the_definition() {
    let mut all: Vec<Case> = vec![
        Case::new(2, 2, 32),
        Case { value_size: 16, ..Case::new(1, 3, 24) },
        Case { cache: DType::F16, ..Case::new(1, 1, 6) },
        Case { cache: DType::I8, value_size: 16, ..Case::new(2, 5, 8) },
    ];
    all.extend(kinds().into_iter().map(|op| Case { op, ..Case::new(1, 2, 16) }));
    for case in all {
        for (n, past) in SMALL {
            let inputs = case.inputs(n, past);
            let expected = case.reference(&inputs, n, past);
            let sizes = SymValues { n: n as i64, b: 1, past: past as i64 };
            for (name, workers) in [("x86-64-v3", 3), ("x86-64-v4", 1), ("x86-64-v4-bf16", 2), ("sm_80", 1)] {
                let target = target_of(name).0;
                for single in if n == 1 { vec![true, false] } else { vec![false] } {
                    let kernels = case.kernels(single, &target);
                    let found = interpreted(&kernels, &inputs, &sizes, workers);
                    let what = format!("{case:?} for {name}, n = {n} ({single}), past = {past}");
                    assert_close(&what, &expected, &found, tolerance(&case, &kernels[0]));
                }
            }
        }
    }
}

/// Dot instructions that take unsigned bytes, and signed ones; and products of words.
#[test]
fn integer_products_interpreted() {
    let sized = |kv, group, size, value_size| {
        let case = Case::new(kv, group, size);
        Case { cache: DType::I8, value_size, ..case }
    };
    let cases = [
        sized(2, 2, 32, 64),
        Case { negative: true, ..sized(1, 3, 32, 64) },
        Case { op: kinds().swap_remove(6), ..sized(1, 6, 16, 64) },
        sized(1, 9, 16, 64),
        sized(1, 1, 64, 64),
    ];
    for (name, instr) in [
        ("x86-64-v4-vnni", "vpdpbusd_512"),
        ("armv8.2-dotprod", "sdot_128"),
        ("x86-64-v3", "vpmaddwd_256"),
        ("x86-64-v2", "pmaddwd_128"),
    ] {
        let target = target_of(name).0;
        for (c, case) in cases.iter().enumerate() {
            for past in [0, 2, 77] {
                let inputs = case.inputs(1, past);
                let expected = case.reference(&inputs, 1, past);
                let sizes = SymValues { n: 1, b: 1, past: past as i64 };
                let kernels = case.kernels(true, &target);
                assert!(has_one_of(&kernels[0], &[instr]), "{name}, case {c}");
                let found = interpreted(&kernels, &inputs, &sizes, 2);
                assert_close(
                    &format!("{case:?} for {name}, past = {past}"),
                    &expected,
                    &found,
                    tolerance(case, &kernels[0]),
                );
            }
        }
    }
}

/// Rows that are no whole vectors of bytes meet queries as words where there is a dot instruction for these, too.
#[test]
fn words_of_512_bits_interpreted() {
    let target = target_of("x86-64-v4-vnni").0;
    for group in [1, 2, 6, 16] {
        let case = Case { cache: DType::I8, negative: group == 6, value_size: 32, ..Case::new(2, group, 32) };
        let kernels = case.kernels(true, &target);
        assert!(has_one_of(&kernels[0], &["vpdpwssd_512"]), "{group} heads");
        for past in [0, 2, 77] {
            let inputs = case.inputs(1, past);
            let expected = case.reference(&inputs, 1, past);
            let sizes = SymValues { n: 1, b: 1, past: past as i64 };
            let found = interpreted(&kernels, &inputs, &sizes, 2);
            assert_close(&format!("{group} heads, past = {past}"), &expected, &found, 1e-4);
        }
    }
}

/// Products of several queries in integers, in all kinds of attention; other machines and single queries have none.
#[test]
fn products_of_pairs_interpreted() {
    let mut all = vec![
        Case::new(2, 2, 32),
        Case { value_size: 16, ..Case::new(1, 3, 24) },
        Case { cache: DType::I8, negative: true, value_size: 16, ..Case::new(2, 5, 8) },
        Case { cache: DType::F16, ..Case::new(1, 1, 16) },
    ];
    all.extend(kinds().into_iter().map(|op| Case { op, ..Case::new(1, 2, 16) }));
    for case in all.into_iter().map(Case::on_codes) {
        for (n, past) in SMALL {
            let inputs = case.inputs(n, past);
            let expected = case.reference(&inputs, n, past);
            let sizes = SymValues { n: n as i64, b: 1, past: past as i64 };
            let with =
                ["x86-64-v4-vnni", "x86-64-v3-vnni", "x86-64-v3", "x86-64-v2"].map(|name| (name, true));
            for (name, pairs) in with.into_iter().chain([("x86-64-v4", false)]) {
                let target = target_of(name).0;
                let kernels = case.kernels(false, &target);
                assert_eq!(has_pairs(&kernels[0]), pairs, "{case:?} for {name}");
                let found = interpreted(&kernels, &inputs, &sizes, 2);
                let what = format!("{case:?} for {name}, n = {n}, past = {past}");
                assert_close(&what, &expected, &found, tolerance_of_several(&kernels[0]));
            }
        }
    }
    let target = target_of("x86-64-v4-vnni").0;
    let odd = Case { value_size: 24, ..Case::new(1, 2, 32) }.on_codes();
    assert!(!has_pairs(&odd.kernels(false, &target)[0]), "no whole vectors of values");
    assert!(!has_pairs(&Case::new(1, 2, 32).on_codes().kernels(true, &target)[0]), "one query");
    assert!(!has_pairs(&Case::new(1, 2, 32).kernels(false, &target)[0]), "not permitted");
}

/// Codes as large as they get in all lanes, of one sign, keep sums within 32 bits; and where a key with small values has nearly
/// all of the weight, as the first of a text often does, those of the others keep their precision.
#[test]
fn codes_of_extreme_rows() {
    let case = Case::new(1, 2, 32).on_codes();
    let (n, past) = (9, 120);
    let sizes = SymValues { n: n as i64, b: 1, past: past as i64 };
    for target in ["x86-64-v4-vnni", "x86-64-v3"] {
        let kernels = case.kernels(false, &target_of(target).0);
        for scale in [1e-6, 1.0, 3e4] {
            let mut inputs = case.inputs(n, past);
            inputs[0].data.fill(0.01);
            inputs[1].data.fill(-scale);
            inputs[2].data.fill(-scale);
            let found = interpreted(&kernels, &inputs, &sizes, 1);
            assert_close("equal rows", &vec![-scale as f32; found.len()], &found, 2e-4);
        }
        let mut inputs = case.inputs(n, past);
        inputs[0].data.iter_mut().for_each(|x| *x = x.abs());
        for c in 0..case.size {
            inputs[1].data[c] = 4.0;
            inputs[2].data[c] *= 1e-3;
        }
        let expected = case.reference(&inputs, n, past);
        let found = interpreted(&kernels, &inputs, &sizes, 1);
        assert_close("a heavy first key", &expected, &found, 2e-4);
    }
}

/// The same for one token and a cache of 8-bit codes, whose rows are as long as they may be.
#[test]
fn codes_of_extreme_cached_rows() {
    let case = Case { cache: DType::I8, value_size: 64, ..Case::new(1, 2, 512) };
    let past = 120;
    let sizes = SymValues { n: 1, b: 1, past };
    for target in ["x86-64-v4-vnni", "x86-64-v3", "x86-64-v2"] {
        let kernels = case.kernels(true, &target_of(target).0);
        assert!(has_one_of(&kernels[0], &UNSIGNED) || has_pairs(&kernels[0]), "{target}");
        for (query, code) in [(1.0, -128.0), (-1e3, -128.0), (1e-6, 127.0)] {
            let mut inputs = case.inputs(1, past as usize);
            inputs[0].data.fill(query);
            inputs[1].data.fill(code);
            // The first key has a smaller size than the others.
            inputs[1].data[..512].fill(-code.signum());
            inputs[3].data.fill(code);
            let expected = case.reference(&inputs, 1, past as usize);
            let found = interpreted(&kernels, &inputs, &sizes, 1);
            assert_close(&format!("{query} and {code} for {target}"), &expected, &found, 1e-4);
        }
    }
}

/// Slices with all key heads.
#[test]
fn a_long_cache_interpreted() {
    let case = Case { cache: DType::F16, ..Case::new(2, 3, 16) };
    let (n, past) = (1, 1100);
    let inputs = case.inputs(n, past);
    let sizes = SymValues { n: 1, b: 1, past: past as i64 };
    let kernels = case.kernels(true, &target_of("x86-64-v4").0);
    let found = interpreted(&kernels, &inputs, &sizes, 3);
    assert_close("a long cache", &case.reference(&inputs, n, past), &found, 1e-5);
    let alone = interpreted(&kernels, &inputs, &sizes, 1);
    assert_eq!(found, alone, "the number of workers changes nothing");
}

type Compile = fn(&[Kernel], &Level) -> Executor;

fn back_ends() -> Vec<(&'static str, Compile)> {
    vec![
        #[cfg(feature = "llvm")]
        ("llvm", |kernels, level| Executor::new(kernels, level).unwrap()),
        #[cfg(feature = "cranelift")]
        ("cranelift", |kernels, level| Executor::with_cranelift(kernels, level).unwrap()),
    ]
}

#[test]
fn compiled_kernels_equal_the_definition() {
    let sized = |kv, group, size, cache| Case { cache, ..Case::new(kv, group, size) };
    let mut all = vec![
        sized(1, 1, 32, DType::F32),
        sized(2, 3, 40, DType::F16),
        sized(1, 4, 64, DType::BF16),
        sized(3, 1, 80, DType::F32),
        sized(2, 7, 96, DType::F16),
        sized(1, 8, 128, DType::F16),
        sized(1, 2, 256, DType::F32),
        Case { value_size: 72, ..sized(1, 16, 48, DType::F16) },
        sized(2, 20, 16, DType::BF16),
        sized(2, 8, 64, DType::I8),
        // Integer products: fewer heads than lanes have room for, other sizes of rows, several sets, kinds of attention.
        sized(1, 7, 128, DType::I8),
        sized(2, 4, 64, DType::I8),
        Case { value_size: 128, ..sized(2, 2, 64, DType::I8) },
        sized(2, 1, 128, DType::I8),
        Case { value_size: 64, ..sized(1, 20, 24, DType::I8) },
        Case { cache: DType::I8, op: kinds().swap_remove(7), ..Case::new(2, 3, 64) },
        Case { negative: true, ..sized(1, 5, 64, DType::I8) },
        Case { value_size: 24, ..sized(2, 1, 40, DType::I8) },
    ];
    all.extend(kinds().into_iter().map(|op| Case { op, ..Case::new(1, 2, 32) }));
    let on_codes = [
        sized(1, 2, 64, DType::F32),
        sized(2, 3, 80, DType::F16),
        sized(2, 1, 96, DType::BF16),
        sized(1, 8, 128, DType::F16),
        sized(1, 2, 256, DType::F32),
        sized(2, 4, 64, DType::I8),
        Case { negative: true, value_size: 32, ..sized(1, 7, 48, DType::I8) },
    ];
    all.extend(on_codes.map(Case::on_codes));
    all.extend(kinds().into_iter().map(|op| Case { op, ..Case::new(1, 2, 32) }.on_codes()));
    let lengths = [(1, 0), (1, 1), (1, 63), (1, 200), (2, 0), (33, 0), (70, 41), (5, 333)];
    let big = [(1, 2000), (300, 0), (120, 900)];
    // Inputs and the expected result by case, tokens and past.
    type References = HashMap<(usize, usize, usize), (Vec<Tensor>, Vec<f32>)>;
    let mut references = References::new();
    let levels = host_levels();
    for (l, level) in levels.iter().enumerate() {
        let (target, level) = target_of(level);
        for (back_end, compile) in back_ends() {
            for (c, case) in all.iter().enumerate() {
                // The best level does everything, the others share the cases.
                if l + 1 < levels.len() && !(c + l).is_multiple_of(3) {
                    continue;
                }
                let (decode, prefill) = (case.kernels(true, &target), case.kernels(false, &target));
                let (one, many) = (compile(&decode, &level), compile(&prefill, &level));
                let more = if [0, 4, 29].contains(&c) && back_end == "llvm" { &big[..] } else { &[] };
                for &(n, past) in lengths.iter().chain(more) {
                    let (inputs, expected) = references.entry((c, n, past)).or_insert_with(|| {
                        let inputs = case.inputs(n, past);
                        let expected = case.reference(&inputs, n, past);
                        (inputs, expected)
                    });
                    let sizes = SymValues { n: n as i64, b: 1, past: past as i64 };
                    let what = format!("{case:?} by {back_end} for {}, n = {n}, past = {past}", level.name);
                    let found = executed(&many, &prefill, inputs, &sizes, 2);
                    assert_close(&what, expected, &found, tolerance_of_several(&prefill[0]));
                    if n == 1 {
                        let found = executed(&one, &decode, inputs, &sizes, 3);
                        assert_close(
                            &format!("{what}, decode"),
                            expected,
                            &found,
                            tolerance(case, &decode[0]),
                        );
                    }
                }
            }
        }
    }
}

//! Kinds of attention with the references of their kernels, and the code that runs them.

use crate::cases::assert_close;
use mlcc_codegen::executor::{AlignedBytes, KernelExecutor};
use mlcc_interp::equivalence::random_tensor;
use mlcc_interp::graph::Tensor;
use mlcc_interp::kernel::{ExecutionOptions, KernelBuffer, run_with};
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph::{Function, FunctionKind, ValueId};
use mlcc_ir::kernel::{BinOp, Expr, Kernel};
use mlcc_ir::module::Module;
use mlcc_ir::ops::{AttentionOp, KeySpan, Op};
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernels::lower::group::lower_group;
use mlcc_kernels::params::KernelTarget;
use mlcc_target::FeatureLevel;

/// Columns of a table of terms.
const DISTANCES: usize = 14;

/// A kind of attention with its sizes.
#[derive(Clone, Debug)]
pub struct AttentionCase {
    pub kv: usize,
    pub group: usize,
    pub size: usize,
    pub value_size: usize,
    pub cache: DType,
    /// Every third row of codes has a negative scale.
    pub negative: bool,
    pub op: AttentionOp,
}

impl AttentionCase {
    pub fn new(kv: usize, group: usize, size: usize) -> AttentionCase {
        let op = AttentionOp::causal((size as f64).powf(-0.5));
        AttentionCase { kv, group, size, value_size: size, cache: DType::F32, negative: false, op }
    }
    /// The same with products of several queries in integers.
    pub fn on_codes(self) -> AttentionCase {
        let op = AttentionOp { codes: true, ..self.op };
        AttentionCase { op, ..self }
    }
    pub fn heads(&self) -> usize {
        self.kv * self.group
    }

    /// The group that lowering gets: `n` queries, one if `single`.
    pub fn function(&self, single: bool) -> Function {
        let n = if single { Dim::from(1) } else { Dim::sym(SizeSymbol::N) };
        let t = Dim::sym(SizeSymbol::Past).add(&n);
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
        if self.op.prefix || self.op.span != KeySpan::All {
            inputs.push(f.add_input(TensorType::new(DType::I32, [1])));
        }
        if self.op.sinks > 0 {
            inputs.push(f.add_input(TensorType::new(DType::F32, dims(&n, self.heads(), self.size))));
        }
        if self.op.null_logits {
            inputs.push(f.add_input(TensorType::new(DType::F32, [self.heads()])));
        }
        if self.op.terms.is_some() {
            inputs.push(f.add_input(TensorType::new(DType::F32, [self.heads(), DISTANCES])));
        }
        f.outputs = f.append(&Module::new("m"), Op::Attention(self.op.clone()), &inputs).unwrap();
        f
    }

    /// Codes times the scales of their rows, as `quantize_cache` writes it.
    pub fn unpacked(&self, f: &mut Function, codes: ValueId, t: &Dim) -> ValueId {
        let module = Module::new("m");
        let scales = f.add_input(TensorType::new(DType::F32, [t.clone(), Dim::from(self.kv)]));
        let mut op = |op: Op, inputs: &[ValueId]| f.append(&module, op, inputs).unwrap()[0];
        let column = Op::Reshape { dims: vec![t.clone(), Dim::from(self.kv), Dim::from(1)] };
        let (codes, scales) = (op(Op::Cast(DType::F32), &[codes]), op(column, &[scales]));
        op(Op::Binary(BinOp::Mul), &[codes, scales])
    }

    /// Keys or values: rows, or codes and their scales.
    pub fn rows(&self, t: usize, size: usize, seed: u64) -> Vec<Tensor> {
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
    pub fn operands(&self, inputs: &[Tensor]) -> Vec<Tensor> {
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

    pub fn inputs(&self, n: usize, past: usize) -> Vec<Tensor> {
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
        let count = match self.op.span {
            KeySpan::All => None,
            KeySpan::First => Some(t / 2 + 1),
            // The first query sees one of the rest.
            KeySpan::Rest => Some(past / 2),
        };
        inputs.extend(count.map(|count| Tensor::new(DType::I32, &[1], vec![count as f64])));
        if self.op.sinks > 0 {
            inputs.push(random_tensor(DType::F32, &[n, heads, self.size], 4));
        }
        if self.op.null_logits {
            inputs.push(random_tensor(DType::F32, &[heads], 5));
        }
        if self.op.terms.is_some() {
            inputs.push(random_tensor(DType::F32, &[heads, DISTANCES], 6));
        }
        inputs
    }

    /// The definition, in f64.
    pub fn reference(&self, inputs: &[Tensor], n: usize, past: usize) -> Vec<f32> {
        let inputs = &self.operands(inputs);
        let (q, k, v) = (&inputs[0].data, &inputs[1].data, &inputs[2].data);
        let prefix = self.op.prefix_input().map_or(0, |i| inputs[i].data[0] as usize);
        let count = self.op.span_input().map_or(0, |i| inputs[i].data[0] as usize);
        let in_span = |j: usize| match self.op.span {
            KeySpan::All => true,
            KeySpan::First => j < count,
            KeySpan::Rest => j >= count,
        };
        let mut out = Vec::new();
        for i in 0..n {
            let p = past + i;
            for h in 0..self.heads() {
                let kv = h / self.group;
                let near = |j: usize| self.op.window == 0 || p - j.min(p) < self.op.window;
                let seen = |j: usize| j <= p + self.op.ahead && (near(j) || j < self.op.sinks) || j < prefix;
                let keys: Vec<usize> = (0..past + n).filter(|&j| seen(j) && in_span(j)).collect();
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
                    let term = self.op.terms_input().zip(self.op.terms).map_or(0.0, |(i, behind)| {
                        let column = (j + behind).saturating_sub(p).min(DISTANCES - 1);
                        inputs[i].data[h * DISTANCES + column]
                    });
                    s + term + if self.op.alibi { inputs[3].data[h] * distance } else { 0.0 }
                };
                let scores: Vec<f64> = keys.iter().map(|&j| score(j)).collect();
                let null = self.op.null_input().map(|i| inputs[i].data[h]);
                let most = scores.iter().copied().chain(null).fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().copied().chain(null).map(|s| (s - most).exp()).sum();
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
    pub fn kernels(&self, single: bool, target: &KernelTarget) -> Vec<Kernel> {
        let f = self.function(single);
        let packings = vec![None; f.inputs.len()];
        let made = lower_group(&Module::new("m"), &f, "attention", &packings, target).unwrap();
        std::iter::once(made.kernel).chain(made.merge.map(|m| m.kernel.kernel)).collect()
    }
}

pub fn kinds() -> Vec<AttentionOp> {
    let plain = AttentionOp::causal(0.2);
    vec![
        AttentionOp { softcap: 5.0, ..plain.clone() },
        AttentionOp { window: 7, ..plain.clone() },
        AttentionOp { window: 40, softcap: 3.0, ..plain.clone() },
        AttentionOp { alibi: true, ..plain.clone() },
        AttentionOp { prefix: true, ..plain.clone() },
        AttentionOp { prefix: true, window: 5, alibi: true, ..plain.clone() },
        AttentionOp { window: 6, sinks: 2, softcap: 4.0, ..plain.clone() },
        AttentionOp { window: 21, sinks: 37, alibi: true, ..plain.clone() },
        AttentionOp { window: 9, null_logits: true, ..plain.clone() },
        AttentionOp { ahead: AttentionOp::ALL, ..plain.clone() },
        AttentionOp { ahead: 8, window: 9, softcap: 3.0, ..plain.clone() },
        AttentionOp { ahead: 21, alibi: true, ..plain.clone() },
        AttentionOp { ahead: AttentionOp::ALL, terms: Some(6), ..plain.clone() },
        AttentionOp { ahead: AttentionOp::ALL, span: KeySpan::First, ..plain.clone() },
        AttentionOp { span: KeySpan::Rest, terms: Some(DISTANCES - 1), null_logits: true, ..plain.clone() },
        AttentionOp { span: KeySpan::First, terms: Some(0), softcap: 3.0, ..plain.clone() },
        AttentionOp { span: KeySpan::Rest, ahead: 3, window: 9, ..plain },
    ]
}

/// Runs kernels in order: buffers of the first one, intermediate buffers, the results.
pub fn run(
    kernels: &[Kernel],
    inputs: &[Tensor],
    sizes: &SymValues,
    mut call: impl FnMut(&Kernel, &mut Vec<Vec<u8>>),
) -> Vec<f32> {
    let mut buffers: Vec<Vec<u8>> =
        inputs.iter().map(|t| KernelBuffer::from_floats(t.dtype, &t.to_f32()).bytes).collect();
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

pub fn interpreted(kernels: &[Kernel], inputs: &[Tensor], sizes: &SymValues, workers: usize) -> Vec<f32> {
    run(kernels, inputs, sizes, |kernel, bytes| {
        let buffers = kernel.params.iter().zip(bytes.iter());
        let mut buffers: Vec<KernelBuffer> =
            buffers.map(|(&p, b)| KernelBuffer::new(kernel.bufs[p].dtype, b.clone())).collect();
        run_with(kernel, &mut buffers, sizes, &ExecutionOptions::with_workers(workers))
            .unwrap_or_else(|e| panic!("{e}"));
        *bytes = buffers.into_iter().map(|b| b.bytes).collect();
    })
}

/// Interprets kernels of `n` queries behind `past` positions, and compares with the definition.
pub fn equals_reference(
    what: &str,
    case: &AttentionCase,
    kernels: &[Kernel],
    (n, past): (usize, usize),
    workers: usize,
    tolerance: f32,
) {
    let inputs = case.inputs(n, past);
    let sizes = SymValues { n: n as i64, b: 1, past: past as i64 };
    let found = interpreted(kernels, &inputs, &sizes, workers);
    let what = format!("{what}, n = {n}, past = {past}");
    assert_close(&what, &case.reference(&inputs, n, past), &found, tolerance);
}

pub fn executed(
    e: &KernelExecutor,
    kernels: &[Kernel],
    inputs: &[Tensor],
    sizes: &SymValues,
    workers: usize,
) -> Vec<f32> {
    run(kernels, inputs, sizes, |kernel, bytes| {
        let mut buffers: Vec<AlignedBytes> = bytes.iter().map(|b| AlignedBytes::from_bytes(b)).collect();
        e.run(&kernel.name, &mut buffers, sizes, workers).unwrap();
        *bytes = buffers.iter().map(|b| b.bytes().to_vec()).collect();
    })
}

pub fn target_of(name: &str) -> (KernelTarget, FeatureLevel) {
    let target = mlcc_target::resolve_target(name).unwrap();
    let level = target.levels[0].clone();
    (KernelTarget::new(target.arch, &level), level)
}

/// Integer products with codes take weights as 16-bit block floating point: off by half of `2^-16` of the
/// largest weight of a block for every key, twice that where a code has a sign (a scale is negative, or the
/// instruction takes signed operands). Seen where values nearly cancel: 4.1e-5 of the largest result without
/// signs, 5.9e-5 with them, 2.6e-6 where floats meet.
pub fn tolerance(case: &AttentionCase, kernel: &Kernel) -> f32 {
    match has_one_of(kernel, &UNSIGNED) {
        true if !case.negative => 5e-5,
        unsigned if unsigned || has_one_of(kernel, &SIGNED) || has_pairs(kernel) => 1e-4,
        _ => 1e-5,
    }
}

/// Several queries. In integers products of 64 weights and values fill 31 bits: 13 of a value, 12 to 15 of a
/// weight. Seen where values nearly cancel: 4.1e-4 of the largest result.
pub fn tolerance_of_several(kernel: &Kernel) -> f32 {
    if has_pairs(kernel) { 6e-4 } else { 1e-5 }
}

/// Dot instructions whose first operand is unsigned bytes, those with signed ones, and what multiplies pairs
/// of 16 bits.
pub const UNSIGNED: [&str; 4] = ["vpdpbusd_512", "vpdpbusd_256", "vpdpbusd_avx_256", "usdot_128"];
pub const SIGNED: [&str; 1] = ["sdot_128"];
pub const PAIRS: [&str; 5] =
    ["vpdpwssd_512", "vpdpwssd_256", "vpdpwssd_avx_256", "vpmaddwd_256", "pmaddwd_128"];

/// Products of fragments.
pub const FRAGMENTS: [&str; 2] = ["mma_m16n8k16_f16", "mma_m16n8k16_bf16"];

/// True if the kernel calls one of the instructions.
pub fn has_one_of(kernel: &Kernel, names: &[&str]) -> bool {
    let calls = |expr: &Expr| matches!(expr, Expr::Instr(instr, _) if names.contains(&instr.def().name));
    kernel.exprs.ids().any(|id| calls(kernel.exprs.expr(id)))
}

/// True if the kernel multiplies pairs of 16 bits.
pub fn has_pairs(kernel: &Kernel) -> bool {
    has_one_of(kernel, &PAIRS)
}

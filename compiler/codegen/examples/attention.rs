//! Speed of the attention kernels on one core, beside reading the same memory and beside the fma peak, both
//! probed in the same process.
//!
//!     GLIBC_TUNABLES=glibc.malloc.hugetlb=1 cargo run -p mlcc-codegen --example attention -- f16 4 8 64 2048
//!
//! Arguments: cache (`f32`, `f16`, `bf16`, `i8`), key heads, query heads of each, size of a head, keys; then
//! optionally `n=64` (queries, 1 is decode), `layers=24` (caches of that many layers, read in turn: few stay
//! in the CPU's caches), `codes=1` (several queries: integers, where the machine has the instruction),
//! `invariant=1` (one query like several), `turns=3` (measures longer), `object=PATH`, which writes the
//! object file for a disassembler.

mod machine;

use std::time::Instant;

use machine::{compiled, level, number, time};
use mlcc_codegen::executor::{AlignedBytes, KernelExecutor};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph::{Function, FunctionKind, ValueId};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BinOp, ExprType, Kernel, MemorySpace, ParamAccess, Stmt};
use mlcc_ir::module::Module;
use mlcc_ir::ops::{AttentionOp, Op};
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernels::lower::group::lower_group;
use mlcc_kernels::params::KernelTarget;
use mlcc_target::Arch;

struct AttentionBenchmark {
    cache: DType,
    kv: usize,
    group: usize,
    size: usize,
    keys: usize,
    n: usize,
    layers: usize,
    turns: usize,
    codes: bool,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [cache, kv, group, size, keys, options @ ..] = args.as_slice() else {
        panic!("arguments: CACHE KEY_HEADS GROUP SIZE KEYS [key=value]...")
    };
    let types = [DType::F32, DType::F16, DType::BF16, DType::I8];
    let cache = types.into_iter().find(|t| t.name() == cache).unwrap_or_else(|| panic!("cache {cache}"));
    let [kv, group, size, keys] = [kv, group, size, keys].map(|s| number(s));
    let mut p = AttentionBenchmark { cache, kv, group, size, keys, n: 1, layers: 0, turns: 1, codes: false };
    p.layers = (192 << 20) / p.bytes();
    let (mut object, mut batch_invariant) = (None, false);
    for option in options {
        match option.split_once('=') {
            Some(("invariant", v)) => batch_invariant = number(v) != 0,
            Some(("n", v)) => p.n = number(v),
            Some(("layers", v)) => p.layers = number(v),
            Some(("codes", v)) => p.codes = number(v) != 0,
            Some(("turns", v)) => p.turns = number(v),
            Some(("object", v)) => object = Some(v.to_string()),
            _ => panic!("option {option}"),
        }
    }
    let level = level();
    let target = KernelTarget { batch_invariant, ..KernelTarget::new(Arch::X86_64, &level) };
    let mut kernels = p.kernels(&target);
    let attention = kernels.len();
    kernels.extend([read_kernel(), peak_kernel()]);
    let executor = compiled(&kernels, &level, object);
    p.measure(&executor, &kernels[..attention]);
}

impl AttentionBenchmark {
    /// Bytes of the keys and values of a layer.
    fn bytes(&self) -> usize {
        let element = self.cache.bytes().unwrap_or(1);
        let scales = if self.cache == DType::I8 { 4 } else { 0 };
        2 * self.keys * self.kv * (self.size * element + scales)
    }

    fn kernels(&self, target: &KernelTarget) -> Vec<Kernel> {
        let n = if self.n == 1 { Dim::from(1) } else { Dim::sym(SizeSymbol::N) };
        let t = Dim::sym(SizeSymbol::Past).add(&n);
        let module = Module::new("m");
        let mut f = Function::new("attention", FunctionKind::Group);
        let dims = |rows: &Dim, heads: usize| [rows.clone(), Dim::from(heads), Dim::from(self.size)];
        let q = f.add_input(TensorType::new(DType::F32, dims(&n, self.kv * self.group)));
        let operand = |f: &mut Function| -> ValueId {
            let codes = f.add_input(TensorType::new(self.cache, dims(&t, self.kv)));
            if self.cache != DType::I8 {
                return codes;
            }
            let scales = f.add_input(TensorType::new(DType::F32, [t.clone(), Dim::from(self.kv)]));
            let mut op = |op: Op, inputs: &[ValueId]| f.append(&module, op, inputs).expect("it types")[0];
            let column = Op::Reshape { dims: vec![t.clone(), Dim::from(self.kv), Dim::from(1)] };
            let (codes, scales) = (op(Op::Cast(DType::F32), &[codes]), op(column, &[scales]));
            op(Op::Binary(BinOp::Mul), &[codes, scales])
        };
        let (k, v) = (operand(&mut f), operand(&mut f));
        let plain = AttentionOp::causal((self.size as f64).powf(-0.5));
        let op = Op::Attention(AttentionOp { codes: self.codes, ..plain });
        f.outputs = f.append(&Module::new("m"), op, &[q, k, v]).expect("it types");
        let packings = vec![None; f.inputs.len()];
        let made = lower_group(&Module::new("m"), &f, "attention", &packings, target).expect("it lowers");
        std::iter::once(made.kernel).chain(made.merge.map(|m| m.kernel.kernel)).collect()
    }

    fn measure(&self, executor: &KernelExecutor, kernels: &[Kernel]) {
        let dims = SymValues { n: self.n as i64, b: 1, past: (self.keys - self.n) as i64 };
        let mut layers: Vec<Vec<AlignedBytes>> =
            (0..self.layers as u32).map(|l| buffers(&kernels[0], &dims, l)).collect();
        // All layers of a model leave their results in the same place.
        let results = layers.iter_mut().map(|layer| layer.pop().expect("a kernel has results"));
        let mut results = results.last().expect("a layer");
        let (mut peak, mut read, mut best, mut join) = (0.0_f64, 0.0_f64, f64::INFINITY, f64::INFINITY);
        let mut probe = vec![AlignedBytes::zeroed(64)];
        let mut out = kernels.get(1).map(|k| buffers(k, &dims, 1));
        for _ in 0..6 {
            peak = peak.max(PEAK_OPS / time(executor, "peak", &mut probe, &dims));
            let begin = Instant::now();
            let (mut sum, mut bytes) = (AlignedBytes::zeroed(64), 0);
            for buffer in layers.iter_mut().flat_map(|layer| &mut layer[1..]) {
                let elements = (buffer.bytes().len() / 256) as i64;
                let mut both = vec![std::mem::replace(buffer, AlignedBytes::zeroed(0)), sum];
                let sizes = SymValues { n: elements, b: 1, past: 0 };
                executor.run("read", &mut both, &sizes, 1).expect("the kernel runs");
                sum = both.pop().expect("two buffers");
                *buffer = both.pop().expect("two buffers");
                bytes += 256 * elements;
            }
            read = read.max(bytes as f64 / begin.elapsed().as_secs_f64());
            // Few layers stay in a cache of the CPU; then the best of many short turns is the time of the
            // arithmetic.
            for _ in 0..(48 / self.layers).max(3) * self.turns {
                let begin = Instant::now();
                for layer in &mut layers {
                    layer.push(results);
                    executor.run("attention", layer, &dims, 1).expect("the kernel runs");
                    results = layer.pop().expect("the results");
                }
                best = best.min(begin.elapsed().as_secs_f64() / self.layers as f64);
            }
            if let Some(out) = &mut out {
                join = join.min(time(executor, &kernels[1].name, out, &dims));
            }
        }
        if self.n > 1 {
            let seen = self.n as f64 * (self.keys - self.n) as f64 + (self.n * (self.n + 1) / 2) as f64;
            let rate = 4.0 * seen * (self.kv * self.group * self.size) as f64 / best;
            println!(
                "{:.1} us, {:.1} of {:.1} Gflop/s: {:.1} %",
                best * 1e6,
                rate / 1e9,
                peak / 1e9,
                100.0 * rate / peak
            );
            return;
        }
        let explained = self.bytes() as f64 / read;
        println!(
            "{:.1} us a layer (joining {:.1}), {:.1} ns per key and key head, reading {:.1} GB/s explains {:.1}: {:.2} times",
            best * 1e6,
            if join.is_finite() { join * 1e6 } else { 0.0 },
            best * 1e9 / (self.keys * self.kv) as f64,
            read / 1e9,
            explained * 1e9 / (self.keys * self.kv) as f64,
            best / explained
        );
    }
}

/// Values that are neither denormal nor large; caches are long enough for huge pages.
fn buffers(kernel: &Kernel, dims: &SymValues, seed: u32) -> Vec<AlignedBytes> {
    let mut seed = seed;
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / 8_388_608.0 - 1.0
    };
    let buffer = |(i, &p): (usize, &mlcc_ir::kernel::BufId)| {
        let decl = &kernel.bufs[p];
        let bytes = decl.len.eval(dims) as usize * decl.dtype.bytes().unwrap_or(1);
        let least = if bytes < 256 << 10 { bytes } else { bytes.max(4 << 20) };
        let mut buffer = AlignedBytes::zeroed(least);
        for word in buffer.bytes_mut()[..bytes].chunks_exact_mut(4) {
            let word: &mut [u8; 4] = word.try_into().expect("four bytes");
            *word = match decl.dtype {
                // Scales of codes are small.
                DType::F32 if kernel.bufs[kernel.params[1]].dtype == DType::I8 && i > 0 => {
                    (0.01 + 0.004 * next()).to_le_bytes()
                }
                DType::F32 => next().to_le_bytes(),
                DType::I8 => ((next() * 2e9) as i32).to_le_bytes(),
                // Two numbers of size 1 to 2, whatever the sign.
                DType::F16 => (((next() * 2e9) as u32 & 0x83ff_83ff) | 0x3c00_3c00).to_le_bytes(),
                _ => (((next() * 2e9) as u32 & 0x807f_807f) | 0x3f80_3f80).to_le_bytes(),
            };
        }
        buffer
    };
    kernel.params.iter().enumerate().map(buffer).collect()
}

const ROUNDS: i64 = 1 << 20;
const CHAINS: usize = 16;
const PEAK_OPS: f64 = (ROUNDS as usize * CHAINS * 32) as f64;

/// Independent multiply-adds on registers.
fn peak_kernel() -> Kernel {
    let mut kb = KernelBuilder::new("peak");
    let out = kb.param("out", DType::F32, 16, ParamAccess::InOut, 64);
    let zero = kb.int(0);
    let x = kb.load_vec(out, zero, 16);
    let x = kb.let_("x", x);
    let sums = sums(&mut kb);
    let rounds = kb.int(ROUNDS);
    kb.serial("round", rounds, |kb, _| {
        for &sum in &sums {
            let old = kb.load_vec(sum, zero, 16);
            let new = kb.fma(old, x, x);
            kb.store_vec(sum, zero, new);
        }
    });
    add_up(&mut kb, &sums, out)
}

/// Adds up memory in pieces of 256 bytes, asked for 4 KiB ahead.
fn read_kernel() -> Kernel {
    let mut kb = KernelBuilder::new("read");
    let x = kb.param("x", DType::F32, Dim::sym(SizeSymbol::N).scale(64), ParamAccess::In, 64);
    let out = kb.param("out", DType::F32, 16, ParamAccess::InOut, 64);
    let zero = kb.int(0);
    let sums = sums(&mut kb);
    let pieces = kb.sym(SizeSymbol::N);
    let prefetch = InstrId::by_name("prefetch_f32").expect("an instruction of the table");
    kb.serial("piece", pieces, |kb, i| {
        for v in 0..4 {
            let at = kb.mul_int(i, 64);
            let at = kb.add_int(at, 16 * v);
            let (ahead, end) = (kb.add_int(at, 1024), kb.mul_int(pieces, 64));
            let end = kb.add_int(end, -16);
            let ahead = kb.min(ahead, end);
            let ahead = kb.load(x, ahead);
            kb.push(Stmt::Instr { instr: prefetch, args: vec![ahead] });
            let (value, sum) = (kb.load_vec(x, at, 16), sums[v as usize]);
            let old = kb.load_vec(sum, zero, 16);
            let new = kb.add(old, value);
            kb.store_vec(sum, zero, new);
        }
    });
    add_up(&mut kb, &sums, out)
}

fn sums(kb: &mut KernelBuilder) -> Vec<mlcc_ir::kernel::BufId> {
    let (zero, nothing) = (kb.int(0), kb.constant(0.0, ExprType::vector(DType::F32, 16)));
    let mut sum = |_| {
        let sum = kb.alloc("sum", DType::F32, 16, MemorySpace::Local);
        kb.store_vec(sum, zero, nothing);
        sum
    };
    (0..CHAINS).map(&mut sum).collect()
}

fn add_up(kb: &mut KernelBuilder, sums: &[mlcc_ir::kernel::BufId], out: mlcc_ir::kernel::BufId) -> Kernel {
    let zero = kb.int(0);
    let mut all = kb.constant(0.0, ExprType::vector(DType::F32, 16));
    for &sum in sums {
        let value = kb.load_vec(sum, zero, 16);
        all = kb.add(all, value);
    }
    kb.store_vec(out, zero, all);
    std::mem::replace(kb, KernelBuilder::new("")).finish()
}

//! Speed of one matrix product on one core, beside the peak of the instruction it is made of, probed in the
//! same process.
//!
//!     cargo run -p mlcc-codegen --example product -- q4 i8 512 2048 2048
//!
//! Arguments: weights (`q4`, `q8`, `f32`, `f16`, `bf16`), activations (`i8`, `i16`, `bf16`, `f32`), m, n, k;
//! then optionally `key=value` of the schedule parameters: `rows=12.4.1`, `tiles=2`, `tall=8.2` (or
//! `tall=no`), `group=128`, `chunk=96`, `unroll=4`, `in_flight=8`, `epilogue=no` (its operands are not
//! prefetched), `spread=no`, `distance=4096` and `sparse=yes` (how a single row prefetches its weights), and
//! `object=PATH`, which writes the object file for a disassembler.

mod machine;

use machine::{compiled, level, number, time};
use mlcc_codegen::executor::AlignedBytes;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, ExprType, Kernel, ParamAccess};
use mlcc_ir::types::{DType, Packing, QuantFormat};
use mlcc_kernel_lang::PrefetchMethod;
use mlcc_kernels::matmul::plan::{SpreadPrefetch, TallTile};
use mlcc_kernels::matmul::{
    CpuPlan, DOT_COLUMNS, MatmulActivation, MatmulProblem, MatmulWeight, QuantizedActivations, choose,
    emit_matmul,
};
use mlcc_kernels::params::KernelTarget;
use mlcc_kernels::quantize::CodeBlock;
use mlcc_quant::{PackOptions, pack};
use mlcc_target::Arch;

#[derive(Clone, Copy, PartialEq)]
enum ActivationFormat {
    F32,
    BF16,
    /// This many planes of bytes.
    Codes(usize),
}

struct MatmulBenchmark {
    weight: DType,
    x: ActivationFormat,
    group: usize,
    m: usize,
    n: usize,
    k: usize,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [weight, x, m, n, k, options @ ..] = args.as_slice() else {
        panic!("arguments: WEIGHTS ACTIVATIONS M N K [key=value]...")
    };
    let weight = match weight.as_str() {
        "q4" => DType::Packed(QuantFormat::Q4G32),
        "q8" => DType::Packed(QuantFormat::Q8G32),
        "f32" => DType::F32,
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        other => panic!("weights {other}"),
    };
    let x = match x.as_str() {
        "i8" => ActivationFormat::Codes(1),
        "i16" => ActivationFormat::Codes(2),
        "bf16" => ActivationFormat::BF16,
        "f32" => ActivationFormat::F32,
        other => panic!("activations {other}"),
    };
    let mut problem = MatmulBenchmark { weight, x, group: 128, m: number(m), n: number(n), k: number(k) };
    let level = level();
    let target = KernelTarget::new(Arch::X86_64, &level);
    let none = problem.activation(CodeBlock::SINGLE, [BufId(0); 2]);
    let plan = choose(&target, weight, none, problem.m == 1);
    let mut plan = plan.for_dense(weight, problem.n, problem.k);
    let mut object = None;
    for option in options {
        match option.split_once('=') {
            Some(("rows", v)) => plan.rows = v.split('.').map(|v| number(v) as u32).collect(),
            Some(("tiles", v)) => plan.tiles = number(v) as u32,
            Some(("tall", v)) => {
                let tall = |(r, t)| TallTile { rows: number(r) as u32, tiles: number(t) as u32 };
                plan.tall = v.split_once('.').map(tall)
            }
            Some(("chunk", v)) => plan.chunk = Some(number(v) as u32),
            Some(("few", v)) => plan.few = number(v) as u32,
            Some(("epilogue", "no")) => plan.epilogue_prefetch = None,
            Some(("order", "no")) => plan.in_order = None,
            Some(("spread", "no")) => plan.spread = None,
            Some(("spread", "yes")) => {
                let spread = |prefetch| SpreadPrefetch { prefetch, groups: 0 };
                plan.spread = plan.spread.or(target.prefetch_instr(weight).map(spread))
            }
            Some(("unroll", v)) => plan.unroll = number(v) as u32,
            Some(("in_flight", v)) => plan.in_flight = number(v) as u32,
            Some(("distance", v)) => {
                plan.stream = match plan.stream {
                    PrefetchMethod::Lines { prefetch, .. } => {
                        PrefetchMethod::Lines { prefetch, distance: number(v) as i64 }
                    }
                    PrefetchMethod::Sparse { prefetch, .. } => {
                        PrefetchMethod::Sparse { prefetch, distance: number(v) as i64 }
                    }
                    other => other,
                }
            }
            Some(("sparse", v)) => {
                plan.stream = match (plan.stream, v == "yes") {
                    (PrefetchMethod::Lines { prefetch, distance }, true) => {
                        PrefetchMethod::Sparse { prefetch, distance }
                    }
                    (PrefetchMethod::Sparse { prefetch, distance }, false) => {
                        PrefetchMethod::Lines { prefetch, distance }
                    }
                    (other, _) => other,
                }
            }
            Some(("group", v)) => problem.group = number(v),
            Some(("object", v)) => object = Some(v.to_string()),
            _ => panic!("option {option}"),
        }
    }
    let peak = peak_kernel(x);
    let kernels = [problem.kernel(&plan), peak, reading_kernel(pack_bytes(&problem))];
    let executor = compiled(&kernels, &level, object);
    let mut buffers = problem.buffers(&kernels[0]);
    let mut out = vec![AlignedBytes::zeroed(64)];
    // The machine may be shared: the best of many short turns, taken alternately.
    let (mut peak, mut seconds, mut reading) = (0.0_f64, f64::INFINITY, f64::INFINITY);
    let mut weights = vec![buffers[3].clone(), AlignedBytes::zeroed(64)];
    for _ in 0..15 {
        peak = peak.max(PEAK_OPS / time(&executor, "peak", &mut out, &SymValues::for_tokens(1)));
        seconds =
            seconds.min(time(&executor, "product", &mut buffers, &SymValues::for_tokens(problem.m as i64)));
        reading = reading.min(time(&executor, "read", &mut weights, &SymValues::for_tokens(1)));
    }
    let rate = 2.0 * (problem.m * problem.n * problem.k) as f64 / seconds;
    let bytes = pack_bytes(&problem) as f64;
    println!(
        "{:.1} of {:.1} Gop/s: {:.1} %, weights {:.2} GB/s of {:.2}: {:.1} %",
        rate / 1e9,
        peak / 1e9,
        100.0 * rate / peak,
        bytes / seconds / 1e9,
        bytes / reading / 1e9,
        100.0 * reading / seconds
    );
}

/// Reads all of `bytes` with additions only.
fn reading_kernel(bytes: usize) -> Kernel {
    let mut kb = KernelBuilder::new("read");
    let w = kb.param("w", DType::U8, bytes, ParamAccess::In, 64);
    let out = kb.param("out", DType::U8, 64, ParamAccess::Out, 64);
    let ty = ExprType::vector(DType::I32, 16);
    let acc = kb.alloc("acc", DType::I32, 16 * 4, mlcc_ir::kernel::MemorySpace::Local);
    for c in 0..4 {
        let at = kb.int(16 * c);
        let zero = kb.constant(0.0, ty);
        kb.store_vec(acc, at, zero);
    }
    let turns = kb.int((bytes / 256) as i64);
    kb.serial("turn", turns, |kb, turn| {
        let first = kb.mul_int(turn, 256);
        for c in 0..4 {
            let from = kb.add_int(first, 64 * c);
            let line = kb.load_vec(w, from, 64);
            let line = kb.bitcast(line, ty);
            let at = kb.int(16 * c);
            let old = kb.load_vec(acc, at, 16);
            let new = kb.add(old, line);
            kb.store_vec(acc, at, new);
        }
    });
    let mut sum = kb.constant(0.0, ty);
    for c in 0..4 {
        let at = kb.int(16 * c);
        let value = kb.load_vec(acc, at, 16);
        sum = kb.add(sum, value);
    }
    let sum = kb.bitcast(sum, ExprType::vector(DType::U8, 64));
    let zero = kb.int(0);
    kb.store_vec(out, zero, sum);
    kb.finish()
}

fn pack_bytes(problem: &MatmulBenchmark) -> usize {
    mlcc_quant::packed_bytes(problem.weight, Packing::Tile16, problem.n, problem.k).expect("sizes fit")
}

const ROUNDS: i64 = 1 << 20;
const CHAINS: usize = 16;
/// Operations for 64 products per instruction; kernels with fewer run more often.
const PEAK_OPS: f64 = (ROUNDS as usize * CHAINS * 128) as f64;

/// Independent dot products or multiply-adds on registers. Bytes count 64 products per instruction, bf16 32,
/// f32 16: these run more rounds, so that all have the same number of operations.
fn peak_kernel(x: ActivationFormat) -> Kernel {
    let mut kb = KernelBuilder::new("peak");
    let out = kb.param("out", DType::U8, 64, ParamAccess::InOut, 64);
    let zero = kb.int(0);
    let bytes = kb.load_vec(out, zero, 64);
    let bytes = kb.let_("bytes", bytes);
    let (dtype, rounds) = match x {
        ActivationFormat::Codes(_) => (DType::I32, ROUNDS),
        ActivationFormat::BF16 => (DType::F32, 2 * ROUNDS),
        ActivationFormat::F32 => (DType::F32, 4 * ROUNDS),
    };
    let ty = ExprType::vector(dtype, 16);
    let acc = kb.alloc("acc", dtype, 16 * CHAINS, mlcc_ir::kernel::MemorySpace::Local);
    for c in 0..CHAINS {
        let at = kb.int(16 * c as i64);
        let first = kb.constant(0.0, ty);
        kb.store_vec(acc, at, first);
    }
    let rounds = kb.int(rounds);
    let instr = |name| InstrId::by_name(name).expect("an instruction of the table");
    kb.serial("round", rounds, |kb, _| {
        for c in 0..CHAINS {
            let at = kb.int(16 * c as i64);
            let old = kb.load_vec(acc, at, 16);
            let new = match x {
                ActivationFormat::Codes(_) => {
                    let signed = kb.bitcast(bytes, ExprType::vector(DType::I8, 64));
                    kb.instr(instr("vpdpbusd_512"), vec![old, bytes, signed])
                }
                ActivationFormat::BF16 => {
                    let x = kb.bitcast(bytes, ExprType::vector(DType::BF16, 32));
                    kb.instr(instr("vdpbf16ps_512"), vec![old, x, x])
                }
                ActivationFormat::F32 => {
                    let x = kb.bitcast(bytes, ty);
                    kb.fma(old, x, x)
                }
            };
            kb.store_vec(acc, at, new);
        }
    });
    let mut sum = kb.constant(0.0, ty);
    for c in 0..CHAINS {
        let at = kb.int(16 * c as i64);
        let value = kb.load_vec(acc, at, 16);
        sum = kb.add(sum, value);
    }
    let sum = kb.bitcast(sum, ExprType::vector(DType::U8, 64));
    kb.store_vec(out, zero, sum);
    kb.finish()
}

impl MatmulBenchmark {
    fn activation(&self, block: CodeBlock, [scales, starts]: [BufId; 2]) -> MatmulActivation {
        match self.x {
            ActivationFormat::Codes(planes) => MatmulActivation::Codes(QuantizedActivations {
                planes,
                group: self.group,
                block,
                scales,
                starts,
            }),
            ActivationFormat::BF16 => MatmulActivation::BF16,
            ActivationFormat::F32 => MatmulActivation::F32,
        }
    }

    fn kernel(&self, plan: &CpuPlan) -> Kernel {
        let (n, k) = (self.n, self.k);
        let mut kb = KernelBuilder::new("product");
        let rows = Dim::sym(SizeSymbol::N);
        let x_type = match self.x {
            ActivationFormat::Codes(1) => DType::I8,
            ActivationFormat::Codes(_) => DType::I16,
            ActivationFormat::BF16 => DType::BF16,
            ActivationFormat::F32 => DType::F32,
        };
        let x =
            kb.param("x", x_type, rows.scale(k.next_multiple_of(DOT_COLUMNS) as i64), ParamAccess::In, 64);
        let scales =
            kb.param("scales", DType::F32, rows.scale(k.div_ceil(self.group) as i64), ParamAccess::In, 64);
        let starts =
            kb.param("starts", DType::I32, rows.scale(k.div_ceil(DOT_COLUMNS) as i64), ParamAccess::In, 64);
        let w_type = if self.weight.is_packed() { DType::U8 } else { self.weight };
        let w_len = pack_bytes(self) / w_type.bytes().unwrap_or(1);
        let w = kb.param("w", w_type, w_len, ParamAccess::In, 64);
        let y = kb.param("y", DType::F32, rows.scale(n as i64), ParamAccess::Out, 64);
        let m = if self.m == 1 { kb.int(1) } else { kb.sym(SizeSymbol::N) };
        let weight = MatmulWeight::from_dtype(self.weight).expect("a weight type");
        let activation = self.activation(plan.code_block(), [scales, starts]);
        let problem = MatmulProblem {
            x,
            activation,
            w,
            w_offset: 0,
            weight,
            packing: Packing::Tile16,
            m,
            n,
            k,
            epilogue_operands: [Some(y), None, None, None],
        };
        emit_matmul(&mut kb, &problem, plan, &mut |k, sums| sums.store(k.view(y, [1, n as i64])));
        kb.finish()
    }

    fn buffers(&self, kernel: &Kernel) -> Vec<AlignedBytes> {
        let mut seed = 1_u32;
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / 8_388_608.0 - 1.0
        };
        let weights: Vec<f32> = (0..self.n * self.k).map(|_| next()).collect();
        let packed = pack(self.weight, Packing::Tile16, self.n, self.k, &weights, PackOptions::default())
            .expect("it packs");
        let dims = SymValues::for_tokens(self.m as i64);
        let mut buffers: Vec<AlignedBytes> = kernel
            .params
            .iter()
            .map(|&p| {
                let decl = &kernel.bufs[p];
                let bytes = decl.len.eval(&dims) as usize * decl.dtype.bytes().unwrap_or(1);
                // Any codes do; floats must not be denormal.
                let value = |_| match decl.dtype {
                    DType::F32 => next().to_le_bytes(),
                    DType::BF16 => [next(), next()]
                        .map(|x| x.to_bits().to_le_bytes())
                        .map(|b| [b[2], b[3]])
                        .concat()
                        .try_into()
                        .expect("four bytes"),
                    _ => ((next() * 1e9) as i32).to_le_bytes(),
                };
                let words: Vec<u8> = (0..bytes.div_ceil(4)).flat_map(value).collect();
                AlignedBytes::from_bytes(&words[..bytes])
            })
            .collect();
        buffers[3] = AlignedBytes::from_bytes(&packed);
        buffers
    }
}

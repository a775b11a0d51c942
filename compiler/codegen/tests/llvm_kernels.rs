//! Kernels compiled by LLVM for every level of this machine against the interpreter.
#![cfg(feature = "llvm")]

mod cases;

use cases::values::{any, tame};
use cases::{Case, map_case};
use mlcc_codegen::executor::{Aligned, Executor};
use mlcc_interp::compare::Tolerance;
use mlcc_interp::kernel::Buffer;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, Sym, SymValues};
use mlcc_ir::instr::{InstrId, Meaning};
use mlcc_ir::kernel::*;
use mlcc_ir::types::DType;
use mlcc_target::{Arch, Level};

/// Levels that this machine runs.
fn levels() -> Vec<Level> {
    let have = mlcc_target::detected_features();
    let specs = mlcc_target::specs().unwrap();
    let spec = specs.into_iter().find(|s| Some(s.arch) == Arch::of_host());
    let levels = spec.map(|s| s.levels).unwrap_or_default();
    levels.into_iter().filter(|l| l.features.iter().all(|f| have.contains(&f.as_str()))).collect()
}

fn run_case(executor: &Executor, case: &Case, workers: usize) -> Vec<Vec<u8>> {
    let mut buffers: Vec<Aligned> = case.buffers.iter().map(|b| Aligned::from_bytes(&b.bytes)).collect();
    executor.run(&case.kernel.name, &mut buffers, &case.dims, workers).unwrap();
    buffers.iter().map(|b| b.bytes().to_vec()).collect()
}

/// Holds the cases against the interpreter at every level, with one and with three workers.
fn check(mut cases: Vec<Case>) {
    for (i, case) in cases.iter_mut().enumerate() {
        case.kernel.name = format!("{}_{i}", case.kernel.name);
    }
    let kernels: Vec<Kernel> = cases.iter().map(|c| c.kernel.clone()).collect();
    let wanted: Vec<Vec<Buffer>> = cases.iter().map(Case::expected).collect();
    for level in levels() {
        let executor = Executor::new(&kernels, &level).unwrap();
        for (case, want) in cases.iter().zip(&wanted) {
            for workers in [1, 3] {
                let got = run_case(&executor, case, workers);
                case.check(&format!("{} x{workers}", level.name), &got, want);
            }
        }
    }
}

/// Cases take turns through these, so that every operation meets all of them with some type.
const LANES: [u32; 4] = [1, 3, 8, 16];

fn turn(cases: &[Case]) -> u32 {
    LANES[cases.len() % LANES.len()]
}

#[test]
fn integer_arithmetic() {
    let mut cases = Vec::new();
    for dtype in DType::PLAIN.into_iter().filter(|d| d.is_int()) {
        for op in BinOp::ALL {
            let name = format!("{}_{}", op.name(), dtype);
            let a = any(dtype, 48, 3);
            let b = match op {
                BinOp::Div | BinOp::Rem | BinOp::Shl | BinOp::Shr => tame(dtype, 48, 4),
                _ => any(dtype, 48, 9),
            };
            let out = if op.is_comparison() { DType::Bool } else { dtype };
            let lanes = turn(&cases);
            cases.push(map_case(&name, &[a, b], out, lanes, |kb, v| kb.binary(op, v[0], v[1])));
        }
        for op in [UnOp::Neg, UnOp::Abs, UnOp::Not] {
            cases.push(map_case(op.name(), &[any(dtype, 48, 1)], dtype, 8, |kb, v| kb.unary(op, v[0])));
        }
    }
    check(cases);
}

#[test]
fn float_arithmetic() {
    let mut cases = Vec::new();
    let ops = [BinOp::Add, BinOp::Sub, BinOp::Mul, BinOp::Div, BinOp::Min, BinOp::Max];
    let compares = [BinOp::Lt, BinOp::Le, BinOp::Eq, BinOp::Ne];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for op in ops.into_iter().chain(compares) {
            let name = format!("{}_{}", op.name(), dtype);
            let inputs = [any(dtype, 64, 2), any(dtype, 64, 5)];
            let out = if op.is_comparison() { DType::Bool } else { dtype };
            for lanes in LANES {
                cases.push(map_case(&name, &inputs, out, lanes, |kb, v| kb.binary(op, v[0], v[1])));
            }
        }
        for op in [UnOp::Neg, UnOp::Abs, UnOp::Sqrt, UnOp::Floor, UnOp::Round] {
            let name = format!("{}_{}", op.name(), dtype);
            for lanes in LANES {
                cases.push(map_case(&name, &[any(dtype, 64, 1)], dtype, lanes, |kb, v| kb.unary(op, v[0])));
            }
        }
        let inputs = [tame(dtype, 64, 2), tame(dtype, 64, 5), tame(dtype, 64, 6)];
        for lanes in LANES {
            let mut case = map_case("fma", &inputs, dtype, lanes, |kb, v| kb.fma(v[0], v[1], v[2]));
            // Levels without FMA round twice.
            case.tolerance = Tolerance::relative(if dtype == DType::F32 { 1e-6 } else { 1e-2 });
            cases.push(case);
        }
    }
    check(cases);
}

#[test]
fn casts() {
    let mut cases = Vec::new();
    for from in DType::PLAIN {
        for to in DType::PLAIN {
            let name = format!("{from}_to_{to}");
            let lanes = turn(&cases);
            cases.push(map_case(&name, &[any(from, 64, 0)], to, lanes, |kb, v| kb.cast(v[0], to)));
        }
    }
    check(cases);
}

/// All 65536 bit patterns, and f32 values around every rounding decision.
#[test]
fn half_conversions_are_exact() {
    let patterns: Vec<i64> = (0..65536).collect();
    let bits = Buffer::from_ints(DType::U16, &patterns);
    let mut cases = Vec::new();
    for half in [DType::F16, DType::BF16] {
        cases.push(map_case("widen", &[bits.clone()], DType::F32, 16, |kb, v| {
            let value = kb.bitcast(v[0], Ty::vector(half, 16));
            kb.cast(value, DType::F32)
        }));
        let edges: Vec<f32> = (0..65536u32)
            .flat_map(|p| {
                let exact = match half {
                    DType::F16 => half::f16::from_bits(p as u16).to_f32(),
                    _ => half::bf16::from_bits(p as u16).to_f32(),
                };
                let bits = exact.to_bits();
                let middle = if half == DType::F16 { 0x1000 } else { 0x8000 };
                [0, 1, middle - 1, middle, middle + 1].map(|d| f32::from_bits(bits.wrapping_add(d)))
            })
            .filter(|v| !v.is_nan())
            .collect();
        cases.push(map_case("narrow", &[Buffer::from_f32(&edges)], half, 16, |kb, v| kb.cast(v[0], half)));
    }
    check(cases);
}

#[test]
fn lanes_move() {
    let mut cases = Vec::new();
    let f = any(DType::F32, 64, 0);
    let b = tame(DType::F32, 64, 8);
    let two = [f.clone(), b.clone()];
    cases.push(map_case("reverse", &[f.clone()], DType::F32, 8, |kb, v| {
        kb.shuffle(v[0], None, (0..8).rev().collect())
    }));
    cases.push(map_case("interleave", &two, DType::F32, 4, |kb, v| kb.shuffle(v[0], Some(v[1]), vec![0, 4, 1, 5])));
    cases.push(map_case("one_lane", &two, DType::F32, 1, |kb, v| kb.shuffle(v[0], Some(v[1]), vec![1])));
    cases.push(map_case("widen_shuffle", &[f.clone()], DType::F32, 4, |kb, v| {
        let low = kb.shuffle(v[0], None, vec![2]);
        kb.splat(low, 4)
    }));
    cases.push(map_case("sum_lanes", &[b.clone()], DType::F32, 16, |kb, v| {
        let sum = kb.reduce_lanes(BinOp::Add, v[0]);
        kb.splat(sum, 16)
    }));
    cases.push(map_case("select", &two, DType::F32, 8, |kb, v| {
        let less = kb.lt(v[0], v[1]);
        let negative = kb.unary(UnOp::Neg, v[1]);
        kb.select(less, v[0], negative)
    }));
    cases.push(map_case("bits", &[any(DType::I32, 48, 1)], DType::I32, 4, |kb, v| {
        let bytes = kb.bitcast(v[0], Ty::vector(DType::U8, 16));
        let turned = kb.shuffle(bytes, None, (0..16).rev().collect());
        kb.bitcast(turned, Ty::vector(DType::I32, 4))
    }));
    cases.push(map_case("bool_bits", &[any(DType::Bool, 48, 1)], DType::U32, 4, |kb, v| {
        let flipped = kb.unary(UnOp::Not, v[0]);
        let word = kb.bitcast(flipped, Ty::scalar(DType::U32));
        kb.splat(word, 4)
    }));
    cases.push(map_case("bool_logic", &[any(DType::Bool, 48, 1), any(DType::Bool, 48, 2)], DType::Bool, 8, |kb, v| {
        let both = kb.binary(BinOp::And, v[0], v[1]);
        kb.binary(BinOp::Xor, both, v[0])
    }));
    check(cases);
}

/// `f(kb, input, out)` over an input of 64 elements of a type and an output of the same.
fn memory_case(
    name: &str,
    dtype: DType,
    f: impl FnOnce(&mut KernelBuilder, BufId, BufId, ExprId),
) -> Case {
    let mut kb = KernelBuilder::new(name);
    let input = kb.param("in", dtype, 64, Access::In, 64);
    let out = kb.param("out", dtype, 64, Access::InOut, 64);
    let extent = kb.int(4);
    kb.par("t", extent, |kb, t| f(kb, input, out, t));
    Case::new(kb.finish(), vec![any(dtype, 64, 0), tame(dtype, 64, 1)])
}

#[test]
fn memory_accesses() {
    let mut cases = Vec::new();
    for dtype in DType::PLAIN {
        cases.push(memory_case("strided", dtype, |kb, input, out, t| {
            let four = kb.int(4);
            let index = kb.ramp(t, four, 16);
            let value = kb.load(input, index);
            kb.store(out, index, value);
        }));
        cases.push(memory_case("offset_ramp", dtype, |kb, input, out, t| {
            let base = kb.int(3);
            let ramp = kb.ramp1(base, 8);
            let by = kb.mul_int(t, 8);
            let index = kb.add(ramp, by);
            let value = kb.load(input, index);
            let at = kb.mul_int(t, 16);
            kb.store_vec(out, at, value);
        }));
        cases.push(memory_case("backwards", dtype, |kb, input, out, t| {
            let at = kb.mul_int(t, 16);
            let last = kb.add_int(at, 15);
            let minus = kb.int(-1);
            let index = kb.ramp(last, minus, 16);
            let value = kb.load(input, index);
            kb.store_vec(out, at, value);
        }));
        for lanes in [1, 3, 16] {
            cases.push(memory_case("masked", dtype, move |kb, input, out, t| masked(kb, input, out, t, lanes, 1)));
            cases.push(memory_case("masked_gather", dtype, move |kb, input, out, t| {
                masked(kb, input, out, t, lanes, 2);
            }));
        }
    }
    check(cases);
}

/// Copies `lanes` elements from 16t on, those below 16t + 2 only, at a stride; the others lie outside of the buffer.
fn masked(kb: &mut KernelBuilder, input: BufId, out: BufId, t: ExprId, lanes: u32, stride: i64) {
    let at = kb.mul_int(t, 16);
    let far = kb.int(1 << 40);
    let step = kb.int(stride);
    let index = kb.ramp(at, step, lanes);
    let zero = kb.int(0);
    let one = kb.int(1);
    let number = kb.ramp(zero, one, lanes);
    let two = kb.int(2);
    let mask = kb.lt(number, two);
    let index = if stride == 1 { index } else { kb.select(mask, index, far) };
    let value = kb.load_masked(input, index, Some(mask));
    kb.store_masked(out, index, value, Some(mask));
    // The zeros of a masked load show here.
    let free = kb.add_int(at, 16 - 1 - i64::from(lanes - 1).min(15));
    if lanes < 8 {
        kb.store_vec(out, free, value);
    }
}

#[test]
fn loops_and_registers() {
    let mut cases = vec![dot_case(1), dot_case(4), recurrence_case(), branches_case(), serial_case()];
    cases.push(stack_case());
    check(cases);
}

/// y[r] = sum over k of w[r, k] x[k], n rows at run time, lanes accumulated in registers over an unrolled inner loop.
fn dot_case(unroll: i64) -> Case {
    let mut kb = KernelBuilder::new("dot");
    let rows = Dim::sym(Sym::N);
    let w = kb.param("w", DType::F32, rows.scale(64), Access::In, 64);
    let x = kb.param("x", DType::F32, 64, Access::In, 64);
    let y = kb.param("y", DType::F32, rows, Access::Out, 4);
    let n = kb.sym(Sym::N);
    kb.par("r", n, |kb, r| {
        let acc = kb.alloc("acc", DType::F32, 8 * unroll as usize, Space::Local);
        let zero = kb.constant(0.0, Ty::vector(DType::F32, 8));
        for u in 0..unroll {
            let at = kb.int(8 * u);
            kb.store_vec(acc, at, zero);
        }
        let steps = kb.int(64 / 8 / unroll);
        kb.serial("k", steps, |kb, k| {
            let count = kb.int(unroll);
            kb.for_("u", count, ForKind::Unroll, |kb, u| {
                let k = kb.mul_int(k, unroll);
                let k = kb.add(k, u);
                let k = kb.mul_int(k, 8);
                let row = kb.mul_int(r, 64);
                let at = kb.add(row, k);
                let (a, b) = (kb.load_vec(w, at, 8), kb.load_vec(x, k, 8));
                let slot = kb.mul_int(u, 8);
                let old = kb.load_vec(acc, slot, 8);
                let new = kb.fma(a, b, old);
                kb.store_vec(acc, slot, new);
            });
        });
        let zero = kb.int(0);
        let mut total = kb.load_vec(acc, zero, 8);
        for u in 1..unroll {
            let at = kb.int(8 * u);
            let more = kb.load_vec(acc, at, 8);
            total = kb.add(total, more);
        }
        let sum = kb.reduce_lanes(BinOp::Add, total);
        kb.store(y, r, sum);
    });
    let buffers = vec![tame(DType::F32, 7 * 64, 1), tame(DType::F32, 64, 2), Buffer::zeros(DType::F32, 7)];
    let mut case = Case::new(kb.finish(), buffers);
    case.dims = SymValues::tokens(7);
    case.tolerance = Tolerance::relative(1e-5);
    case
}

/// A scalar carried through a serial loop, one chain per channel; in place.
fn recurrence_case() -> Case {
    let mut kb = KernelBuilder::new("scan");
    let state = kb.param("state", DType::F32, 24, Access::InOut, 64);
    let x = kb.param("x", DType::F32, Dim::sym(Sym::N).scale(24), Access::In, 64);
    let n = kb.sym(Sym::N);
    let channels = kb.int(3);
    kb.par("c", channels, |kb, c| {
        let at = kb.mul_int(c, 8);
        kb.serial("t", n, |kb, t| {
            let old = kb.load_vec(state, at, 8);
            let row = kb.mul_int(t, 24);
            let index = kb.add(row, at);
            let value = kb.load_vec(x, index, 8);
            let decay = kb.constant(0.5, Ty::F32);
            let kept = kb.mul(old, decay);
            let new = kb.add(kept, value);
            kb.store_vec(state, at, new);
        });
    });
    Case::new(kb.finish(), vec![tame(DType::F32, 24, 1), tame(DType::F32, 5 * 24, 2)])
}

fn branches_case() -> Case {
    let mut kb = KernelBuilder::new("branches");
    let x = kb.param("x", DType::I32, 32, Access::In, 4);
    let out = kb.param("out", DType::I32, 32, Access::Out, 4);
    let extent = kb.int(32);
    kb.par("i", extent, |kb, i| {
        let value = kb.load(x, i);
        let pinned = kb.let_("v", value);
        let three = kb.int_of(3, DType::I32);
        let small = kb.lt(pinned, three);
        kb.if_else(
            small,
            |kb| {
                let double = kb.add(pinned, pinned);
                kb.store(out, i, double);
            },
            |kb| {
                let seven = kb.int(7);
                let odd = kb.lt(seven, i);
                let one = kb.int_of(1, DType::I32);
                kb.store(out, i, one);
                kb.if_(odd, |kb| {
                    let minus = kb.sub(pinned, three);
                    kb.store(out, i, minus);
                });
            },
        );
    });
    Case::new(kb.finish(), vec![tame(DType::I32, 32, 5), Buffer::zeros(DType::I32, 32)])
}

/// No `par` loop: one worker does it all.
fn serial_case() -> Case {
    let mut kb = KernelBuilder::new("alone");
    let sum = kb.param("sum", DType::I64, 1, Access::InOut, 8);
    let n = kb.sym(Sym::N);
    let zero = kb.int(0);
    kb.serial("i", n, |kb, i| {
        let old = kb.load(sum, zero);
        let new = kb.add(old, i);
        kb.store(sum, zero, new);
    });
    Case::new(kb.finish(), vec![Buffer::from_i64(&[100])])
}

/// A table on the stack, indexed by data.
fn stack_case() -> Case {
    let mut kb = KernelBuilder::new("stack");
    let x = kb.param("x", DType::I64, 16, Access::In, 8);
    let out = kb.param("out", DType::F32, 16, Access::Out, 4);
    let extent = kb.int(2);
    kb.par("half", extent, |kb, half| {
        let table = kb.alloc("table", DType::F32, 8, Space::Stack);
        let eight = kb.int(8);
        kb.serial("i", eight, |kb, i| {
            let f = kb.cast(i, DType::F32);
            kb.store(table, i, f);
        });
        kb.serial("i", eight, |kb, i| {
            let base = kb.mul_int(half, 8);
            let at = kb.add(base, i);
            let pick = kb.load(x, at);
            let value = kb.load(table, pick);
            kb.store(out, at, value);
        });
    });
    Case::new(kb.finish(), vec![tame(DType::I64, 16, 3), Buffer::zeros(DType::F32, 16)])
}

/// Every instruction of this architecture: with its spelling where a level has it, expanded elsewhere.
#[test]
fn instructions_mean_what_the_table_says() {
    let arch = Arch::of_host().map(Arch::name);
    let mut cases = Vec::new();
    for id in InstrId::all() {
        let def = id.def();
        if Some(def.arch) != arch || !matches!(def.meaning, Meaning::Expr(_)) {
            continue;
        }
        let Some(ret) = def.ret else { continue };
        cases.push(instr_case(id, ret));
    }
    assert!(!cases.is_empty() || arch.is_none());
    check(cases);
}

fn instr_case(id: InstrId, ret: Ty) -> Case {
    let def = id.def();
    let mut kb = KernelBuilder::new(def.name);
    let rounds = 16;
    let (mut params, mut buffers) = (Vec::new(), Vec::new());
    for (i, ty) in def.args.iter().enumerate() {
        let len = ty.lanes as usize * rounds;
        params.push(kb.param(&format!("a{i}"), ty.dtype, len, Access::In, 1));
        let random = if ty.dtype.is_float() { tame(ty.dtype, len, i as u64) } else { any(ty.dtype, len, i as u64) };
        buffers.push(random);
    }
    let out = kb.param("out", ret.dtype, ret.lanes as usize * rounds, Access::Out, 1);
    buffers.push(Buffer::zeros(ret.dtype, ret.lanes as usize * rounds));
    let extent = kb.int(rounds as i64);
    kb.par("r", extent, |kb, r| {
        let args = def.args.iter().zip(&params).map(|(ty, &buf)| {
            let at = kb.mul_int(r, i64::from(ty.lanes));
            kb.load_vec(buf, at, ty.lanes)
        });
        let args: Vec<ExprId> = args.collect();
        let value = kb.instr(id, args);
        let at = kb.mul_int(r, i64::from(ret.lanes));
        kb.store_vec(out, at, value);
    });
    let mut case = Case::new(kb.finish(), buffers);
    // dpbf16 flushes denormals and rounds in its own way.
    case.tolerance = Tolerance::relative(1e-5);
    case
}

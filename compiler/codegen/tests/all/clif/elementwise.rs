//! Every elementwise operation over every type, in several lane counts.

use super::harness::{ClifCase, check};
use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::{INSTRS, InstrId, InstrSemantics};
use mlcc_ir::kernel::{BinOp, ExprId, ExprType, ParamAccess, UnOp};
use mlcc_ir::types::DType;

/// One lane, an odd number, a vector of some types, vectors of all types.
const LANES: [u32; 4] = [1, 3, 8, 32];

/// Values at which something could go wrong, then ordinary ones; the same number for each type.
pub fn samples(dtype: DType, seed: u64) -> KernelBuffer {
    const N: usize = 97;
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    if dtype.is_float() {
        let edges = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 1e-30, 3e9, -3e9, 1e20, 65504.0, 8_388_609.0];
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE / 4.0, 6e-8, -127.5, 255.5];
        let mut values: Vec<f32> = edges.into_iter().chain(odd).collect();
        let rotate = seed as usize % values.len();
        values.rotate_left(rotate);
        while values.len() < N {
            values.push((next() % 2000) as f32 / 7.0 - 140.0);
        }
        return KernelBuffer::from_floats(dtype, &values);
    }
    let bits = dtype.bytes().map_or(64, |b| 8 * b as u32);
    let top = 1i64.wrapping_shl(bits - 1);
    let mut values = vec![0, 1, -1, 2, 3, 7, -8, 100, top, top.wrapping_sub(1), top.wrapping_add(1), 255];
    let rotate = seed as usize % values.len();
    values.rotate_left(rotate);
    while values.len() < N {
        values.push(next() as i64 >> (next() % 60));
    }
    KernelBuffer::from_ints(dtype, &values)
}

/// `out[i] = f(a[i + 1], b[i + 1], ...)`, `lanes` at a time: no vector in memory is aligned.
fn kernel(
    name: String,
    lanes: u32,
    inputs: Vec<KernelBuffer>,
    out: DType,
    f: impl FnOnce(&mut KernelBuilder, &[ExprId]) -> ExprId,
) -> ClifCase {
    let mut kb = KernelBuilder::new(name);
    let len = inputs[0].len();
    let params: Vec<_> = inputs
        .iter()
        .enumerate()
        .map(|(i, b)| kb.param(&format!("in{i}"), b.dtype, len, ParamAccess::In, 1))
        .collect();
    let result = kb.param("out", out, len, ParamAccess::Out, 1);
    let steps = kb.int(((len - 1) / lanes as usize) as i64);
    kb.par("i", steps, |kb, i| {
        let at = kb.mul_int(i, i64::from(lanes));
        let next = kb.add_int(at, 1);
        let args: Vec<ExprId> = params.iter().map(|&p| kb.load_vec(p, next, lanes)).collect();
        let value = f(kb, &args);
        kb.store_vec(result, at, value);
    });
    let mut buffers = inputs;
    buffers.push(KernelBuffer::zeros(out, len));
    ClifCase::new(kb.finish(), buffers)
}

#[test]
fn unary_operations() {
    let mut cases = Vec::new();
    for dtype in DType::PLAIN {
        for op in UnOp::ALL.into_iter().filter(|op| op.is_primitive()) {
            let fits = match op {
                UnOp::Neg | UnOp::Abs => dtype != DType::Bool,
                UnOp::Not => !dtype.is_float(),
                _ => dtype.is_float(),
            };
            for lanes in LANES.into_iter().filter(|_| fits) {
                let name = format!("{}_{dtype}_{lanes}", op.name());
                let input = vec![samples(dtype, 1)];
                cases.push(kernel(name, lanes, input, dtype, |kb, a| kb.unary(op, a[0])));
            }
        }
    }
    check(&cases);
}

#[test]
fn binary_operations() {
    let mut cases = Vec::new();
    for dtype in DType::PLAIN {
        for op in BinOp::ALL {
            let fits = match (op, dtype) {
                (BinOp::And | BinOp::Or | BinOp::Xor, d) => !d.is_float(),
                (BinOp::Shl | BinOp::Shr, d) => d.is_int(),
                (BinOp::Eq | BinOp::Ne, _) => true,
                (_, d) => d != DType::Bool,
            };
            for lanes in LANES.into_iter().filter(|_| fits) {
                let out = if op.is_comparison() { DType::Bool } else { dtype };
                let name = format!("{}_{dtype}_{lanes}", op.name());
                let inputs = vec![samples(dtype, 1), samples(dtype, 2)];
                cases.push(kernel(name, lanes, inputs, out, |kb, a| {
                    let b = defined_operand(kb, op, a[1]);
                    kb.binary(op, a[0], b)
                }));
            }
        }
    }
    check(&cases);
}

/// A comparison whose operand is used nowhere else: Cranelift is tempted to read it from memory while
/// comparing, which faults without AVX.
#[test]
fn comparison_with_an_unaligned_operand() {
    let mut cases = Vec::new();
    for op in [BinOp::Lt, BinOp::Le, BinOp::Eq, BinOp::Ne] {
        let mut kb = KernelBuilder::new(format!("{}_one_lane", op.name()));
        let source = kb.param("in", DType::F32, 16usize, ParamAccess::In, 4);
        let result = kb.param("out", DType::Bool, 1usize, ParamAccess::Out, 1);
        let (zero, one, six) = (kb.int(0), kb.int(1), kb.int(6));
        let (a, b) = (kb.load_vec(source, one, 4), kb.load_vec(source, six, 4));
        let all = kb.binary(op, a, b);
        let third = kb.shuffle(all, None, vec![2]);
        kb.store(result, zero, third);
        let values: Vec<f32> = (0..16).map(|i| (i * 5 % 7) as f32).collect();
        cases.push(ClifCase::new(
            kb.finish(),
            vec![KernelBuffer::from_f32(&values), KernelBuffer::zeros(DType::Bool, 1)],
        ));
    }
    check(&cases);
}

/// Makes a right operand with which the result is defined.
pub fn defined_operand(kb: &mut KernelBuilder, op: BinOp, b: ExprId) -> ExprId {
    let ty = kb.ty(b);
    if !ty.dtype.is_int() {
        return b;
    }
    let bits = ty.dtype.bytes().unwrap_or(1) as f64 * 8.0;
    match op {
        BinOp::Div | BinOp::Rem => {
            // 1, 3, ..., 63: neither zero nor -1.
            let (mask, one) = (kb.constant(62.0, ty), kb.constant(1.0, ty));
            let even = kb.binary(BinOp::And, b, mask);
            kb.binary(BinOp::Or, even, one)
        }
        BinOp::Shl | BinOp::Shr => {
            let mask = kb.constant(bits - 1.0, ty);
            kb.binary(BinOp::And, b, mask)
        }
        _ => b,
    }
}

#[test]
fn shifts_by_one_amount_and_negative_divisors() {
    let mut cases = Vec::new();
    for dtype in [DType::I8, DType::U8, DType::I16, DType::U16, DType::I32, DType::U32, DType::I64] {
        let sign = if dtype.is_signed() { -1 } else { 1 };
        for (op, amount) in [(BinOp::Shl, 3), (BinOp::Shr, 5), (BinOp::Div, 3 * sign), (BinOp::Rem, 7 * sign)]
        {
            let name = format!("{}_{dtype}_by_one", op.name());
            cases.push(kernel(name, 32, vec![samples(dtype, 3)], dtype, |kb, a| {
                let amount = kb.int_of(amount, dtype);
                kb.binary(op, a[0], amount)
            }));
        }
    }
    check(&cases);
}

#[test]
fn casts() {
    let mut cases = Vec::new();
    for from in DType::PLAIN {
        for to in DType::PLAIN {
            for lanes in LANES {
                let name = format!("cast_{from}_{to}_{lanes}");
                cases.push(kernel(name, lanes, vec![samples(from, 4)], to, |kb, a| kb.cast(a[0], to)));
            }
        }
    }
    check(&cases);
}

#[test]
fn fma_and_select() {
    let mut cases = Vec::new();
    for lanes in LANES {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let inputs = (5..8).map(|seed| samples(dtype, seed)).collect();
            let mut case = kernel(format!("fma_{dtype}_{lanes}"), lanes, inputs, dtype, |kb, a| {
                kb.fma(a[0], a[1], a[2])
            });
            case.tolerance = 1e-2;
            // Sums near the limits of the type may round to infinity or not; ordinary values suffice here.
            for (i, buffer) in case.buffers[..3].iter_mut().enumerate() {
                let values: Vec<f32> =
                    (0..buffer.len()).map(|j| ((j * 7 + i * 5) % 23) as f32 / 4.0 + 0.5).collect();
                *buffer = KernelBuffer::from_floats(dtype, &values);
            }
            cases.push(case);
        }
        for dtype in DType::PLAIN {
            for cond in [DType::F32, DType::I8, DType::I64, DType::U16] {
                let inputs = vec![samples(cond, 1), samples(cond, 2), samples(dtype, 3), samples(dtype, 4)];
                let name = format!("select_{cond}_{dtype}_{lanes}");
                cases.push(kernel(name, lanes, inputs, dtype, |kb, a| {
                    let cond = kb.lt(a[0], a[1]);
                    kb.select(cond, a[2], a[3])
                }));
            }
        }
    }
    check(&cases);
}

#[test]
fn mixed_masks() {
    let mut cases = Vec::new();
    for lanes in LANES {
        let inputs = vec![
            samples(DType::F32, 1),
            samples(DType::I8, 2),
            samples(DType::Bool, 3),
            samples(DType::U16, 4),
        ];
        cases.push(kernel(format!("masks_{lanes}"), lanes, inputs, DType::Bool, |kb, a| {
            let zero = kb.constant(0.0, ExprType::F32);
            let one = kb.constant(1.0, ExprType::scalar(DType::I8));
            let big = kb.constant(1000.0, ExprType::scalar(DType::U16));
            let (x, y, z) = (kb.lt(a[0], zero), kb.lt(one, a[1]), kb.lt(big, a[3]));
            let p = kb.binary(BinOp::Xor, x, y);
            let q = kb.binary(BinOp::And, p, a[2]);
            let r = kb.binary(BinOp::Eq, q, z);
            let s = kb.unary(UnOp::Not, r);
            kb.select(y, s, q)
        }));
    }
    check(&cases);
}

#[test]
fn bitcasts() {
    let mut cases = Vec::new();
    let plain =
        [DType::I8, DType::U8, DType::I16, DType::F16, DType::I32, DType::U32, DType::F32, DType::I64];
    for from in plain {
        for to in plain {
            let (wide, narrow) = (from.bytes().unwrap_or(1) as u32, to.bytes().unwrap_or(1) as u32);
            for bytes in [8, 16, 48] {
                let (in_lanes, out_lanes) = (bytes / wide, bytes / narrow);
                let mut kb = KernelBuilder::new(format!("bitcast_{from}_{to}_{bytes}"));
                let source = kb.param("in", from, in_lanes as usize, ParamAccess::In, 1);
                let result = kb.param("out", to, out_lanes as usize, ParamAccess::Out, 1);
                let zero = kb.int(0);
                let value = kb.load_vec(source, zero, in_lanes);
                let value = kb.bitcast(value, ExprType::vector(to, out_lanes));
                kb.store_vec(result, zero, value);
                let input: Vec<u8> =
                    (0..bytes as u8).map(|i| i.wrapping_mul(37).wrapping_add(11) & 0x7b).collect();
                let buffers =
                    vec![KernelBuffer::new(from, input), KernelBuffer::zeros(to, out_lanes as usize)];
                cases.push(ClifCase::new(kb.finish(), buffers));
            }
        }
    }
    check(&cases);
}

#[test]
fn shuffles() {
    let mut cases = Vec::new();
    for dtype in [DType::I8, DType::I16, DType::F32, DType::I64, DType::Bool, DType::BF16] {
        for (n, lanes) in [(4u32, 3usize), (16, 16), (64, 32), (32, 4), (8, 48), (16, 64)] {
            for two in [false, true] {
                let name = format!("shuffle_{dtype}_{n}_{lanes}_{two}");
                let total = if two { 2 * n } else { n };
                let picks: Vec<u32> = (0..lanes as u32).map(|i| (i * 5 + 3) % total).collect();
                let mut kb = KernelBuilder::new(name);
                let source = kb.param("in", dtype, 2 * n as usize, ParamAccess::In, 1);
                let result = kb.param("out", dtype, lanes, ParamAccess::Out, 1);
                let (zero, second) = (kb.int(0), kb.int(i64::from(n)));
                let a = kb.load_vec(source, zero, n);
                let b = two.then(|| kb.load_vec(source, second, n));
                let value = kb.shuffle(a, b, picks);
                kb.store_vec(result, zero, value);
                let input: Vec<i64> = (0..2 * i64::from(n)).map(|i| i * 3 % 121).collect();
                let buffers = vec![KernelBuffer::from_ints(dtype, &input), KernelBuffer::zeros(dtype, lanes)];
                cases.push(ClifCase::new(kb.finish(), buffers));
            }
        }
    }
    check(&cases);
}

#[test]
fn lane_reductions() {
    let mut cases = Vec::new();
    for (dtype, op) in [(DType::F32, BinOp::Add), (DType::I32, BinOp::Max), (DType::U8, BinOp::Min)] {
        let mut kb = KernelBuilder::new(format!("reduce_{dtype}"));
        let source = kb.param("in", dtype, 32usize, ParamAccess::In, 1);
        let result = kb.param("out", dtype, 1usize, ParamAccess::Out, 1);
        let zero = kb.int(0);
        let value = kb.load_vec(source, zero, 32);
        let value = kb.reduce_lanes(op, value);
        kb.store(result, zero, value);
        let input: Vec<i64> = (0..32).map(|i| i * 37 % 101).collect();
        cases.push(ClifCase::new(
            kb.finish(),
            vec![KernelBuffer::from_ints(dtype, &input), KernelBuffer::zeros(dtype, 1)],
        ));
    }
    check(&cases);
}

#[test]
fn cpu_instructions_by_their_meaning() {
    let mut cases = Vec::new();
    for id in InstrId::all() {
        let def = &INSTRS[id.0 as usize];
        let (InstrSemantics::Expr(_), Some(ret)) = (def.meaning, def.ret) else { continue };
        let mut kb = KernelBuilder::new(format!("instr_{}", def.name));
        let mut buffers = Vec::new();
        let mut args = Vec::new();
        let zero = kb.int(0);
        for (i, ty) in def.args.iter().enumerate() {
            let param = kb.param(&format!("in{i}"), ty.dtype, ty.lanes as usize, ParamAccess::In, 1);
            args.push(kb.load_vec(param, zero, ty.lanes));
            let values: Vec<i64> =
                (0..i64::from(ty.lanes)).map(|l| (l * 31 + i as i64 * 17) % 251 - 100).collect();
            buffers.push(KernelBuffer::from_ints(ty.dtype, &values));
        }
        let result = kb.param("out", ret.dtype, ret.lanes as usize, ParamAccess::Out, 1);
        let value = kb.instr(id, args);
        kb.store_vec(result, zero, value);
        buffers.push(KernelBuffer::zeros(ret.dtype, ret.lanes as usize));
        let mut case = ClifCase::new(kb.finish(), buffers);
        case.tolerance = 1e-5;
        cases.push(case);
    }
    check(&cases);
}

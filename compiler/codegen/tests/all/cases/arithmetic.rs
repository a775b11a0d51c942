//! Every operation and cast on every type that has it.

use super::values::{any, tame};
use super::{KernelCase, map_case};
use mlcc_interp::compare::Tolerance;
use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::kernel::*;
use mlcc_ir::types::DType;

/// Cases take turns through these, so that every operation meets all of them with some type.
const LANES: [u32; 4] = [1, 3, 8, 16];

fn turn(cases: &[KernelCase]) -> u32 {
    LANES[cases.len() % LANES.len()]
}

pub fn integer_arithmetic() -> Vec<KernelCase> {
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
    cases
}

pub fn float_arithmetic() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    let ops = [BinOp::Add, BinOp::Sub, BinOp::Mul, BinOp::Div, BinOp::Rem, BinOp::Min, BinOp::Max];
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
    cases
}

pub fn casts() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for from in DType::PLAIN {
        for to in DType::PLAIN {
            let name = format!("{from}_to_{to}");
            let lanes = turn(&cases);
            cases.push(map_case(&name, &[any(from, 64, 0)], to, lanes, |kb, v| kb.cast(v[0], to)));
        }
    }
    cases
}

/// All 65536 bit patterns, and f32 values around every rounding decision.
pub fn half_conversions() -> Vec<KernelCase> {
    let patterns: Vec<i64> = (0..65536).collect();
    let bits = KernelBuffer::from_ints(DType::U16, &patterns);
    let mut cases = Vec::new();
    for half in [DType::F16, DType::BF16] {
        cases.push(map_case("widen", std::slice::from_ref(&bits), DType::F32, 16, |kb, v| {
            let value = kb.bitcast(v[0], ExprType::vector(half, 16));
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
        cases.push(map_case("narrow", &[KernelBuffer::from_f32(&edges)], half, 16, |kb, v| {
            kb.cast(v[0], half)
        }));
    }
    cases
}

//! Lanes and memory: shuffles, bitcasts, strides, gathers, masks.

use super::values::{any, tame};
use super::{KernelCase, map_case};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::*;
use mlcc_ir::types::DType;

pub fn lanes_move() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    let f = any(DType::F32, 64, 0);
    let b = tame(DType::F32, 64, 8);
    let two = [f.clone(), b.clone()];
    cases.push(map_case("reverse", std::slice::from_ref(&f), DType::F32, 8, |kb, v| {
        kb.shuffle(v[0], None, (0..8).rev().collect())
    }));
    cases.push(map_case("interleave", &two, DType::F32, 4, |kb, v| {
        kb.shuffle(v[0], Some(v[1]), vec![0, 4, 1, 5])
    }));
    cases.push(map_case("one_lane", &two, DType::F32, 1, |kb, v| kb.shuffle(v[0], Some(v[1]), vec![1])));
    cases.push(map_case("widen_shuffle", std::slice::from_ref(&f), DType::F32, 4, |kb, v| {
        let low = kb.shuffle(v[0], None, vec![2]);
        kb.splat(low, 4)
    }));
    cases.push(map_case("sum_lanes", std::slice::from_ref(&b), DType::F32, 16, |kb, v| {
        let sum = kb.reduce_lanes(BinOp::Add, v[0]);
        kb.splat(sum, 16)
    }));
    cases.push(map_case("select", &two, DType::F32, 8, |kb, v| {
        let less = kb.lt(v[0], v[1]);
        let negative = kb.unary(UnOp::Neg, v[1]);
        kb.select(less, v[0], negative)
    }));
    cases.push(map_case("bits", &[any(DType::I32, 48, 1)], DType::I32, 4, |kb, v| {
        let bytes = kb.bitcast(v[0], ExprType::vector(DType::U8, 16));
        let turned = kb.shuffle(bytes, None, (0..16).rev().collect());
        kb.bitcast(turned, ExprType::vector(DType::I32, 4))
    }));
    cases.push(map_case(
        "bool_logic",
        &[any(DType::Bool, 48, 1), any(DType::Bool, 48, 2)],
        DType::Bool,
        8,
        |kb, v| {
            let both = kb.binary(BinOp::And, v[0], v[1]);
            kb.binary(BinOp::Xor, both, v[0])
        },
    ));
    cases
}

/// `f(kb, input, out)` over an input of 64 elements of a type and an output of the same.
fn memory_case(
    name: &str,
    dtype: DType,
    f: impl FnOnce(&mut KernelBuilder, BufId, BufId, ExprId),
) -> KernelCase {
    let mut kb = KernelBuilder::new(name);
    let input = kb.param("in", dtype, 64, ParamAccess::In, 64);
    let out = kb.param("out", dtype, 64, ParamAccess::InOut, 64);
    let extent = kb.int(4);
    kb.par("t", extent, |kb, t| f(kb, input, out, t));
    KernelCase::new(kb.finish(), vec![any(dtype, 64, 0), tame(dtype, 64, 1)])
}

pub fn memory_accesses() -> Vec<KernelCase> {
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
            cases.push(memory_case("masked", dtype, move |kb, input, out, t| {
                masked(kb, input, out, t, lanes, 1)
            }));
            cases.push(memory_case("masked_gather", dtype, move |kb, input, out, t| {
                masked(kb, input, out, t, lanes, 2);
            }));
        }
    }
    cases
}

/// Copies `lanes` elements from 16t on, those below 16t + 2 only, at a stride; the others lie outside of the
/// buffer.
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

//! Loads, stores, buffers and control flow.

use super::harness::{ClifCase, check};
use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::kernel::{BinOp, ExprId, ExprType, ForKind, MemorySpace, ParamAccess};
use mlcc_ir::types::DType;

const TYPES: [DType; 6] = [DType::Bool, DType::I8, DType::F16, DType::I32, DType::F32, DType::I64];

fn counted(dtype: DType, n: i64) -> KernelBuffer {
    let values: Vec<i64> =
        (0..n).map(|i| if dtype == DType::Bool { i % 3 } else { i * 7 % 120 - 50 }).collect();
    KernelBuffer::from_ints(dtype, &values)
}

/// The index of lane `l` in the given manner, in 0..128.
fn index(
    kb: &mut KernelBuilder,
    manner: &str,
    lanes: u32,
    at: ExprId,
    table: mlcc_ir::kernel::BufId,
) -> ExprId {
    match manner {
        "run" => kb.ramp1(at, lanes),
        "run_plus" => {
            let three = kb.int(3);
            let run = kb.ramp1(three, lanes);
            kb.add(run, at)
        }
        "stride" => {
            let step = kb.int(3);
            kb.ramp(at, step, lanes)
        }
        "back" => {
            let (last, step) = (kb.int(100), kb.int(-1));
            kb.ramp(last, step, lanes)
        }
        _ => {
            let spread = kb.load_vec(table, at, lanes);
            kb.cast(spread, DType::I64)
        }
    }
}

#[test]
fn loads_and_stores_of_every_kind() {
    let mut cases = Vec::new();
    for dtype in TYPES {
        for manner in ["run", "run_plus", "stride", "back", "gather"] {
            for lanes in [1u32, 5, 16] {
                for masked in [false, true] {
                    let name = format!("access_{dtype}_{manner}_{lanes}_{masked}");
                    let mut kb = KernelBuilder::new(name);
                    let source = kb.param("in", dtype, 128usize, ParamAccess::In, 1);
                    let table = kb.param("table", DType::I32, 128usize, ParamAccess::In, 1);
                    let read = kb.param("read", dtype, 128usize, ParamAccess::InOut, 1);
                    let written = kb.param("written", dtype, 128usize, ParamAccess::InOut, 1);
                    let once = kb.int(1);
                    kb.par("once", once, |kb, zero| {
                        let five = kb.add_int(zero, 5);
                        let i = index(kb, manner, lanes, five, table);
                        let mask = masked.then(|| {
                            let key = kb.load_vec(table, five, lanes);
                            let limit = kb.constant(60.0, ExprType::scalar(DType::I32));
                            kb.lt(key, limit)
                        });
                        let value = kb.load_masked(source, i, mask);
                        kb.store_vec(read, zero, value);
                        kb.store_masked(written, i, value, mask);
                    });
                    let spread: Vec<i32> = (0..128).map(|i| i * 37 % 128).collect();
                    let blank = || counted(dtype, 128);
                    let buffers =
                        vec![counted(dtype, 128), KernelBuffer::from_i32(&spread), blank(), blank()];
                    cases.push(ClifCase::new(kb.finish(), buffers));
                }
            }
        }
    }
    check(&cases);
}

#[test]
fn masks_that_are_full_or_empty() {
    let mut cases = Vec::new();
    for dtype in TYPES {
        let mut kb = KernelBuilder::new(format!("tail_{dtype}"));
        let source = kb.param("in", dtype, 37usize, ParamAccess::In, 1);
        let result = kb.param("out", dtype, 37usize, ParamAccess::InOut, 1);
        let steps = kb.int(3);
        kb.par("i", steps, |kb, i| {
            let at = kb.mul_int(i, 16);
            let run = kb.ramp1(at, 16);
            let len = kb.int(37);
            let mask = kb.lt(run, len);
            let value = kb.load_masked(source, run, Some(mask));
            kb.store_masked(result, run, value, Some(mask));
        });
        let buffers = vec![counted(dtype, 37), KernelBuffer::zeros(dtype, 37)];
        cases.push(ClifCase::new(kb.finish(), buffers));
    }
    check(&cases);
}

/// Matrix times vector, four rows at a time, with accumulators in `space`.
fn matvec(space: MemorySpace, kind: ForKind, lanes: u32) -> ClifCase {
    const ROWS: i64 = 12;
    const COLS: i64 = 64;
    let mut kb = KernelBuilder::new(format!("matvec_{}_{kind:?}_{lanes}", space.name()));
    let w = kb.param("w", DType::F32, (ROWS * COLS) as usize, ParamAccess::In, 64);
    let x = kb.param("x", DType::F32, COLS as usize, ParamAccess::In, 64);
    let y = kb.param("y", DType::F32, ROWS as usize, ParamAccess::Out, 64);
    let tiles = kb.int(ROWS / 4);
    kb.par("tile", tiles, |kb, tile| {
        let acc = kb.alloc("acc", DType::F32, 4 * lanes as usize, space);
        let (four, blocks) = (kb.int(4), kb.int(COLS / i64::from(lanes)));
        kb.for_("r", four, kind, |kb, r| {
            let at = kb.mul_int(r, i64::from(lanes));
            let zero = kb.constant(0.0, ExprType::vector(DType::F32, lanes));
            kb.store_vec(acc, at, zero);
        });
        kb.serial("k", blocks, |kb, k| {
            let column = kb.mul_int(k, i64::from(lanes));
            let xs = kb.load_vec(x, column, lanes);
            let xs = kb.let_("xs", xs);
            kb.for_("r", four, kind, |kb, r| {
                let row = kb.mul_int(tile, 4);
                let row = kb.add(row, r);
                let start = kb.mul_int(row, COLS);
                let start = kb.add(start, column);
                let at = kb.mul_int(r, i64::from(lanes));
                let (ws, sum) = (kb.load_vec(w, start, lanes), kb.load_vec(acc, at, lanes));
                let sum = kb.fma(ws, xs, sum);
                kb.store_vec(acc, at, sum);
            });
        });
        kb.for_("r", four, kind, |kb, r| {
            let at = kb.mul_int(r, i64::from(lanes));
            let sum = kb.load_vec(acc, at, lanes);
            let sum = kb.reduce_lanes(BinOp::Add, sum);
            let row = kb.mul_int(tile, 4);
            let row = kb.add(row, r);
            kb.store(y, row, sum);
        });
    });
    let data =
        |n: i64, step: i64| -> Vec<f32> { (0..n).map(|i| (i * step % 17) as f32 / 8.0 - 1.0).collect() };
    let buffers = vec![
        KernelBuffer::from_f32(&data(ROWS * COLS, 5)),
        KernelBuffer::from_f32(&data(COLS, 3)),
        KernelBuffer::zeros(DType::F32, ROWS as usize),
    ];
    // Products of these are exact, so fused and separate rounding agree.
    ClifCase::new(kb.finish(), buffers)
}

#[test]
fn accumulators_in_registers_and_on_the_stack() {
    let mut cases = Vec::new();
    for lanes in [1, 2, 4, 16] {
        cases.push(matvec(MemorySpace::Local, ForKind::Unroll, lanes));
        cases.push(matvec(MemorySpace::Stack, ForKind::Serial, lanes));
        cases.push(matvec(MemorySpace::Stack, ForKind::Unroll, lanes));
    }
    check(&cases);
}

#[test]
fn local_buffers_of_every_type() {
    let mut cases = Vec::new();
    for dtype in TYPES {
        for (offset, lanes) in [(0i64, 16u32), (3, 4), (0, 1)] {
            let mut kb = KernelBuilder::new(format!("local_{dtype}_{offset}_{lanes}"));
            let source = kb.param("in", dtype, 64usize, ParamAccess::In, 1);
            let table = kb.param("mask", DType::Bool, 64usize, ParamAccess::In, 1);
            let result = kb.param("out", dtype, 64usize, ParamAccess::InOut, 1);
            let rounds = kb.int(2);
            kb.par("round", rounds, |kb, round| {
                let buf = kb.alloc("buf", dtype, 64, MemorySpace::Local);
                let all = kb.int(4);
                kb.for_("i", all, ForKind::Unroll, |kb, i| {
                    let at = kb.mul_int(i, 16);
                    let from = kb.add(at, round);
                    let clamped = kb.int(48);
                    let from = kb.min(from, clamped);
                    let value = kb.load_vec(source, from, 16);
                    kb.store_vec(buf, at, value);
                });
                let zero = kb.int(0);
                let mask = kb.load_vec(table, zero, lanes);
                let at = kb.int(offset);
                let run = kb.ramp1(at, lanes);
                let old = kb.int(32);
                let old = kb.load_vec(buf, old, lanes);
                kb.store_masked(buf, run, old, Some(mask));
                let value = kb.load_masked(buf, run, Some(mask));
                let to = kb.mul_int(round, 32);
                kb.store_vec(result, to, value);
                let value = kb.load(buf, run);
                let to = kb.add_int(to, 16);
                kb.store_vec(result, to, value);
            });
            let buffers = vec![counted(dtype, 64), counted(DType::Bool, 64), KernelBuffer::zeros(dtype, 64)];
            cases.push(ClifCase::new(kb.finish(), buffers));
        }
    }
    check(&cases);
}

/// Loops with run-time extents, branches, and a value pinned across a store.
fn control_flow() -> KernelBuilder {
    let mut kb = KernelBuilder::new("control");
    let n = kb.sym(SizeSymbol::N);
    let past = kb.sym(SizeSymbol::Past);
    let len = Dim::sym(SizeSymbol::N).scale(8);
    let data = kb.param("data", DType::I32, len, ParamAccess::InOut, 4);
    kb.par("row", n, |kb, row| {
        let at = kb.mul_int(row, 8);
        let first = kb.load(data, at);
        let first = kb.let_("first", first);
        let half = kb.int(2);
        let odd = kb.rem(row, half);
        let one = kb.int(1);
        let is_odd = kb.binary(BinOp::Eq, odd, one);
        kb.serial("j", past, |kb, j| {
            let eight = kb.int(8);
            let within = kb.rem(j, eight);
            let cell = kb.add(at, within);
            let value = kb.load(data, cell);
            let step = kb.cast(j, DType::I32);
            let sum = kb.add(value, step);
            kb.if_else(
                is_odd,
                |kb| {
                    kb.store(data, cell, sum);
                    let two = kb.int(2);
                    let few = kb.lt(j, two);
                    kb.if_(few, |kb| {
                        let again = kb.load(data, cell);
                        let twice = kb.add(again, again);
                        kb.store(data, cell, twice);
                    });
                },
                |kb| {
                    let less = kb.sub(value, first);
                    kb.store(data, cell, less);
                },
            );
        });
    });
    kb
}

#[test]
fn loops_branches_and_pinned_values() {
    let mut cases = Vec::new();
    for (i, (n, past)) in [(1, 0), (5, 3), (7, 30), (2, 1)].into_iter().enumerate() {
        let mut kernel = control_flow().finish();
        kernel.name = format!("control_{i}");
        let mut case = ClifCase::new(kernel, vec![counted(DType::I32, 8 * n)]);
        case.dims = SymValues { n, b: 1, past };
        cases.push(case);
    }
    check(&cases);
}

#[test]
fn ramps_of_small_integers() {
    let mut cases = Vec::new();
    for dtype in [DType::I8, DType::U16, DType::I32, DType::I64] {
        for lanes in [3u32, 16, 64] {
            let mut kb = KernelBuilder::new(format!("ramp_{dtype}_{lanes}"));
            let result = kb.param("out", dtype, lanes as usize, ParamAccess::Out, 1);
            let first = if dtype.is_signed() { -5 } else { 65_500 };
            let (base, stride) = (kb.int_of(first, dtype), kb.int_of(3, dtype));
            let ramp = kb.ramp(base, stride, lanes);
            let zero = kb.int(0);
            kb.store_vec(result, zero, ramp);
            cases.push(ClifCase::new(kb.finish(), vec![KernelBuffer::zeros(dtype, lanes as usize)]));
        }
    }
    check(&cases);
}

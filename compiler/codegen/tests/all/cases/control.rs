//! Loops, branches, allocations, several workers.

use super::KernelCase;
use super::values::tame;
use mlcc_interp::compare::Tolerance;
use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::*;
use mlcc_ir::types::DType;

pub fn loops_and_registers() -> Vec<KernelCase> {
    let mut cases = vec![dot_case(1), dot_case(4), recurrence_case(), branches_case(), serial_case()];
    cases.push(stack_case());
    cases.extend(
        ["prefetch_u8", "prefetch_f16", "prefetch_bf16", "prefetch_f32"]
            .into_iter()
            .filter_map(prefetch_case),
    );
    cases
}

/// y[r] = sum over k of w[r, k] x[k], n rows at run time, lanes accumulated in registers over an unrolled
/// inner loop.
fn dot_case(unroll: i64) -> KernelCase {
    let mut kb = KernelBuilder::new("dot");
    let rows = Dim::sym(SizeSymbol::N);
    let w = kb.param("w", DType::F32, rows.scale(64), ParamAccess::In, 64);
    let x = kb.param("x", DType::F32, 64, ParamAccess::In, 64);
    let y = kb.param("y", DType::F32, rows, ParamAccess::Out, 4);
    let n = kb.sym(SizeSymbol::N);
    kb.par("r", n, |kb, r| {
        let acc = kb.alloc("acc", DType::F32, 8 * unroll as usize, MemorySpace::Local);
        let zero = kb.constant(0.0, ExprType::vector(DType::F32, 8));
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
    let buffers =
        vec![tame(DType::F32, 7 * 64, 1), tame(DType::F32, 64, 2), KernelBuffer::zeros(DType::F32, 7)];
    let mut case = KernelCase::new(kb.finish(), buffers);
    case.dims = SymValues::for_tokens(7);
    case.tolerance = Tolerance::relative(1e-5);
    case
}

/// A scalar carried through a serial loop, one chain per channel; in place.
fn recurrence_case() -> KernelCase {
    let mut kb = KernelBuilder::new("scan");
    let state = kb.param("state", DType::F32, 24, ParamAccess::InOut, 64);
    let x = kb.param("x", DType::F32, Dim::sym(SizeSymbol::N).scale(24), ParamAccess::In, 64);
    let n = kb.sym(SizeSymbol::N);
    let channels = kb.int(3);
    kb.par("c", channels, |kb, c| {
        let at = kb.mul_int(c, 8);
        kb.serial("t", n, |kb, t| {
            let old = kb.load_vec(state, at, 8);
            let row = kb.mul_int(t, 24);
            let index = kb.add(row, at);
            let value = kb.load_vec(x, index, 8);
            let decay = kb.constant(0.5, ExprType::F32);
            let kept = kb.mul(old, decay);
            let new = kb.add(kept, value);
            kb.store_vec(state, at, new);
        });
    });
    KernelCase::new(kb.finish(), vec![tame(DType::F32, 24, 1), tame(DType::F32, 5 * 24, 2)])
}

fn branches_case() -> KernelCase {
    let mut kb = KernelBuilder::new("branches");
    let x = kb.param("x", DType::I32, 32, ParamAccess::In, 4);
    let out = kb.param("out", DType::I32, 32, ParamAccess::Out, 4);
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
    KernelCase::new(kb.finish(), vec![tame(DType::I32, 32, 5), KernelBuffer::zeros(DType::I32, 32)])
}

/// No `par` loop: one worker does it all.
fn serial_case() -> KernelCase {
    let mut kb = KernelBuilder::new("alone");
    let sum = kb.param("sum", DType::I64, 1, ParamAccess::InOut, 8);
    let n = kb.sym(SizeSymbol::N);
    let zero = kb.int(0);
    kb.serial("i", n, |kb, i| {
        let old = kb.load(sum, zero);
        let new = kb.add(old, i);
        kb.store(sum, zero, new);
    });
    KernelCase::new(kb.finish(), vec![KernelBuffer::from_i64(&[100])])
}

/// A table on the stack, indexed by data.
fn stack_case() -> KernelCase {
    let mut kb = KernelBuilder::new("stack");
    let x = kb.param("x", DType::I64, 16, ParamAccess::In, 8);
    let out = kb.param("out", DType::F32, 16, ParamAccess::Out, 4);
    let extent = kb.int(2);
    kb.par("half", extent, |kb, half| {
        let table = kb.alloc("table", DType::F32, 8, MemorySpace::Stack);
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
    KernelCase::new(kb.finish(), vec![tame(DType::I64, 16, 3), KernelBuffer::zeros(DType::F32, 16)])
}

/// A copy that asks for its elements first.
fn prefetch_case(name: &str) -> Option<KernelCase> {
    let prefetch = InstrId::by_name(name)?;
    let dtype = prefetch.def().args.first()?.dtype;
    let mut kb = KernelBuilder::new(name);
    let x = kb.param("x", dtype, 64, ParamAccess::In, 64);
    let out = kb.param("out", dtype, 64, ParamAccess::Out, 64);
    let extent = kb.int(8);
    kb.par("i", extent, |kb, i| {
        let at = kb.mul_int(i, 8);
        let load = kb.load(x, at);
        kb.push(Stmt::Instr { instr: prefetch, args: vec![load] });
        let value = kb.load_vec(x, at, 8);
        kb.store_vec(out, at, value);
    });
    Some(KernelCase::new(kb.finish(), vec![tame(dtype, 64, 1), KernelBuffer::zeros(dtype, 64)]))
}

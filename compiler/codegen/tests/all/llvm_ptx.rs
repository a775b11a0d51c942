//! GPU kernels to PTX that NVIDIA's assembler accepts, at every level. Their meaning is held by the SIMT
//! interpreter; here it runs each of these kernels too, so that what is assembled is a valid kernel.
#![cfg(feature = "llvm")]

use crate::cases::values::tame;
use crate::toy_kernels;
use mlcc_codegen::LevelInput;
use mlcc_codegen::llvm::{EmitFormat, ptx_module};
use mlcc_codegen::ptxas::{PTXAS_VARIABLE, assemble, find_ptxas};
use mlcc_interp::kernel::{KernelBuffer, run};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::*;
use mlcc_ir::step::{
    BufferRef, LaunchGrid, LaunchItem, MemoryBase, RepeatMode, StepItem, StepProgram, WorkSchedule,
};
use mlcc_ir::types::DType;

fn ptx(kernels: &[Kernel], level: &str) -> String {
    let target = mlcc_target::resolve_target(level).unwrap();
    let steps = toy_kernels::steps(toy_kernels::IterationPlace::Threads(4));
    let input = LevelInput { level: &target.levels[0], kernels, steps: &steps };
    String::from_utf8(ptx_module(&target.triple, &input, EmitFormat::Assembly).unwrap()).unwrap()
}

/// Sum of every row of 256 elements: one block per row, a tree in shared memory, then shuffles in the first
/// warp.
fn row_sums() -> Kernel {
    let mut kb = KernelBuilder::new("row_sums");
    let n = Dim::sym(SizeSymbol::N);
    let x = kb.param("x", DType::F32, n.scale(256), ParamAccess::In, 64);
    let y = kb.param("y", DType::F32, n, ParamAccess::Out, 4);
    let rows = kb.sym(SizeSymbol::N);
    kb.for_("row", rows, ForKind::Block(0), |kb, row| {
        let part = kb.alloc("part", DType::F32, 256, MemorySpace::Shared);
        let all = kb.int(256);
        let warp = kb.int(32);
        kb.for_("t", all, ForKind::Thread(0), |kb, t| {
            let base = kb.mul_int(row, 256);
            let at = kb.add(base, t);
            let value = kb.load(x, at);
            kb.store(part, t, value);
        });
        kb.barrier();
        kb.for_("t", warp, ForKind::Thread(0), |kb, t| {
            let mut sum = kb.load(part, t);
            for step in 1..8 {
                let at = kb.add_int(t, 32 * step);
                let more = kb.load(part, at);
                sum = kb.add(sum, more);
            }
            let mut sum = kb.let_("sum", sum);
            let shuffle = InstrId::by_name("shfl_xor_f32").unwrap();
            for distance in [16, 8, 4, 2, 1] {
                let distance = kb.int_of(distance, DType::I32);
                let other = kb.instr(shuffle, vec![sum, distance]);
                let total = kb.add(sum, other);
                sum = kb.let_("sum", total);
            }
            let zero = kb.int(0);
            let first = kb.binary(BinOp::Eq, t, zero);
            kb.if_(first, |kb| kb.store(y, row, sum));
        });
    });
    kb.finish()
}

/// `C = A * B^T` in tiles of 16 x 16 through shared memory, f16 inputs, two thread axes.
fn tiled_matmul() -> Kernel {
    let mut kb = KernelBuilder::new("tiled_matmul");
    let n = Dim::sym(SizeSymbol::N);
    let a = kb.param("a", DType::F16, n.scale(32), ParamAccess::In, 64);
    let b = kb.param("b", DType::F16, 48 * 32, ParamAccess::In, 64);
    let c = kb.param("c", DType::F32, n.scale(48), ParamAccess::Out, 64);
    let rows = kb.sym(SizeSymbol::N);
    let high = kb.dim(&n.ceil_div(16));
    let (wide, sixteen) = (kb.int(3), kb.int(16));
    kb.for_("bx", wide, ForKind::Block(0), |kb, bx| {
        kb.for_("by", high, ForKind::Block(1), |kb, by| {
            let ta = kb.alloc("ta", DType::F32, 256, MemorySpace::Shared);
            let tb = kb.alloc("tb", DType::F32, 256, MemorySpace::Shared);
            kb.for_("ty", sixteen, ForKind::Thread(1), |kb, ty| {
                kb.for_("tx", sixteen, ForKind::Thread(0), |kb, tx| {
                    let acc = kb.alloc("acc", DType::F32, 1, MemorySpace::Local);
                    let zero = kb.int(0);
                    let nothing = kb.float(0.0);
                    kb.store(acc, zero, nothing);
                    let two = kb.int(2);
                    kb.serial("k", two, |kb, k| {
                        let from = kb.mul_int(k, 16);
                        let column = kb.add(from, tx);
                        let (ra, rb) = (kb.mul_int(by, 16), kb.mul_int(bx, 16));
                        let (ra, rb) = (kb.add(ra, ty), kb.add(rb, ty));
                        let inside = kb.lt(ra, rows);
                        let (ia, ib) = (kb.mul_int(ra, 32), kb.mul_int(rb, 32));
                        let (ia, ib) = (kb.add(ia, column), kb.add(ib, column));
                        let va = kb.load_masked(a, ia, Some(inside));
                        let vb = kb.load(b, ib);
                        let (va, vb) = (kb.cast(va, DType::F32), kb.cast(vb, DType::F32));
                        let slot = kb.mul_int(ty, 16);
                        let slot = kb.add(slot, tx);
                        kb.store(ta, slot, va);
                        kb.store(tb, slot, vb);
                        kb.barrier();
                        kb.for_("i", sixteen, ForKind::Unroll, |kb, i| {
                            let (pa, pb) = (kb.mul_int(ty, 16), kb.mul_int(tx, 16));
                            let (pa, pb) = (kb.add(pa, i), kb.add(pb, i));
                            let (va, vb) = (kb.load(ta, pa), kb.load(tb, pb));
                            let old = kb.load(acc, zero);
                            let new = kb.fma(va, vb, old);
                            kb.store(acc, zero, new);
                        });
                        kb.barrier();
                    });
                    let (row, column) = (kb.mul_int(by, 16), kb.mul_int(bx, 16));
                    let (row, column) = (kb.add(row, ty), kb.add(column, tx));
                    let inside = kb.lt(row, rows);
                    let at = kb.mul_int(row, 48);
                    let at = kb.add(at, column);
                    let value = kb.load(acc, zero);
                    kb.store_masked(c, at, value, Some(inside));
                });
            });
        });
    });
    kb.finish()
}

/// int8 dot products, bf16 output, vector loads, casts and rounding.
fn mixed_types() -> Kernel {
    let mut kb = KernelBuilder::new("mixed_types");
    let a = kb.param("a", DType::I8, 256, ParamAccess::In, 64);
    let b = kb.param("b", DType::I8, 256, ParamAccess::In, 64);
    let out = kb.param("out", DType::BF16, 64, ParamAccess::Out, 64);
    let (blocks, threads) = (kb.int(2), kb.int(32));
    kb.for_("block", blocks, ForKind::Block(0), |kb, block| {
        kb.for_("t", threads, ForKind::Thread(0), |kb, t| {
            let i = kb.mul_int(block, 32);
            let i = kb.add(i, t);
            let at = kb.mul_int(i, 4);
            let (x, y) = (kb.load_vec(a, at, 4), kb.load_vec(b, at, 4));
            let zero = kb.int_of(0, DType::I32);
            let dp4a = InstrId::by_name("dp4a_s32").unwrap();
            let sum = kb.instr(dp4a, vec![zero, x, y]);
            let sum = kb.cast(sum, DType::F32);
            let third = kb.float(1.0 / 3.0);
            let scaled = kb.mul(sum, third);
            let low = kb.unary(UnOp::Floor, scaled);
            let near = kb.unary(UnOp::Round, scaled);
            let root = kb.unary(UnOp::Abs, scaled);
            let root = kb.unary(UnOp::Sqrt, root);
            let limit = kb.min(low, root);
            let value = kb.max(limit, near);
            let value = kb.cast(value, DType::BF16);
            kb.store(out, i, value);
        });
    });
    kb.finish()
}

fn all() -> Vec<Kernel> {
    let mut all = vec![row_sums(), tiled_matmul(), mixed_types()];
    all.extend(toy_kernels::kernels(toy_kernels::IterationPlace::Threads(4)));
    all
}

#[test]
fn every_level_assembles() {
    let Some(ptxas) = find_ptxas() else {
        eprintln!("skipped: no ptxas (set {PTXAS_VARIABLE}, or `pip install nvidia-cuda-nvcc-cu12`)");
        return;
    };
    let kernels = all();
    for level in ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100"] {
        let target = mlcc_target::resolve_target(level).unwrap();
        let sm = target.levels[0].gpu.as_ref().unwrap().sm;
        let text = ptx(&kernels, level);
        let done = assemble(&ptxas, text.as_bytes(), sm).unwrap_or_else(|e| panic!("{level}: {e}"));
        assert_eq!(done.usage.len(), kernels.len());
        for u in &done.usage {
            eprintln!("{level} {}: {} registers, {} bytes shared", u.kernel, u.registers, u.shared_bytes);
            assert_eq!(u.spill_bytes, 0, "{level} {}", u.kernel);
        }
    }
}

#[test]
fn the_text_has_the_intended_instructions() {
    let text = ptx(&all(), "sm_80");
    let entry = |name: &str| {
        let from = text.find(&format!(".entry {name}(")).unwrap_or_else(|| panic!("no {name} in\n{text}"));
        let rest = &text[from..];
        rest[..rest.find(".visible .entry").unwrap_or(rest.len())].to_owned()
    };
    let sums = entry("k_row_sums");
    assert_eq!(sums.matches("shfl.sync.bfly.b32").count(), 5, "{sums}");
    assert_eq!(sums.matches("bar.sync").count(), 1, "{sums}");
    assert!(sums.contains(".maxntid 256"), "{sums}");
    assert!(sums.contains("ld.global") && sums.contains("st.shared") && !sums.contains("ld.f32"), "{sums}");
    let matmul = entry("k_tiled_matmul");
    assert_eq!(matmul.matches("fma.rn.f32").count() % 16, 0, "{matmul}");
    assert!(matmul.contains("cvt.f32.f16") && !matmul.contains(".local"), "{matmul}");
    let mixed = entry("k_mixed_types");
    assert!(mixed.contains("dp4a.s32.s32"), "{mixed}");
    assert!(mixed.contains("sqrt.rn.f32"), "{mixed}");
    // Sizes are read, once and by a load that may be cached, and blocks beyond them return.
    assert_eq!(sums.matches("ld.global.nc.u64").count(), 1, "{sums}");
    assert!(sums.contains("%ctaid.x") && sums.contains("setp."), "{sums}");
    for (kernel, arguments) in [("k_row_sums", 3), ("k_toy_shares", 3), ("k_mixed_types", 3)] {
        let text = entry(kernel);
        let params = &text[..text.find(')').unwrap()];
        assert_eq!(params.matches(".param .u64").count(), arguments, "{params}");
        assert_eq!(params.matches(".param").count(), arguments, "{params}");
    }
}

/// A kernel on buffers that may lie behind the rows of earlier tokens.
#[test]
fn new_rows_of_a_cache_are_found_by_the_kernel() {
    let mut kb = KernelBuilder::new("append");
    let x = kb.param("x", DType::F32, 64, ParamAccess::In, 64);
    let rows = kb.param("rows", DType::F32, 64, ParamAccess::Out, 64);
    let (one, threads) = (kb.int(1), kb.int(16));
    kb.for_("block", one, ForKind::Block(0), |kb, _| {
        kb.for_("t", threads, ForKind::Thread(0), |kb, t| {
            let at = kb.mul_int(t, 4);
            let value = kb.load_vec(x, at, 4);
            kb.store_vec(rows, at, value);
        });
    });
    let kernel = kb.finish();
    let text = |per_past: u64| {
        let launch = LaunchItem {
            kernel: "append".into(),
            buffers: vec![
                BufferRef::fixed(MemoryBase::Arena, 0, 256),
                BufferRef { per_past, ..BufferRef::fixed(MemoryBase::State, 0, 256) },
            ],
            dims: vec![],
            grid: Some(LaunchGrid { blocks: [1.into(), 1.into(), 1.into()], threads: [16, 1, 1] }),
            repeat: RepeatMode::Once,
            schedule: WorkSchedule::Static,
        };
        let items = vec![StepItem::Launch(launch)];
        let steps = [StepProgram { name: "decode".into(), items, arena_bytes: 256 }];
        let target = mlcc_target::resolve_target("sm_80").unwrap();
        let kernels = std::slice::from_ref(&kernel);
        let input = LevelInput { level: &target.levels[0], kernels, steps: &steps };
        let ptx = ptx_module(&target.triple, &input, EmitFormat::Assembly).unwrap();
        if let Some(ptxas) = find_ptxas() {
            assemble(&ptxas, &ptx, 80).unwrap();
        }
        String::from_utf8(ptx).unwrap()
    };
    let (fixed, moving) = (text(0), text(256));
    assert_eq!((fixed.matches(".param .u64").count(), moving.matches(".param .u64").count()), (2, 3));
    assert!(!fixed.contains("ld.global.nc.u64") && moving.contains("ld.global.nc.u64"), "{moving}");
    // The bytes of a row are known, so stores stay as wide as the alignment permits.
    for text in [fixed, moving] {
        assert!(text.contains("st.global.v4.f32"), "{text}");
    }
}

#[test]
fn the_kernels_are_valid() {
    let dims = SymValues::for_tokens(20);
    let mut sums = vec![tame(DType::F32, 20 * 256, 1), KernelBuffer::zeros(DType::F32, 20)];
    run(&row_sums(), &mut sums, &dims).unwrap();
    let row: f32 = sums[0].to_f32()[256..512].iter().sum();
    assert!((sums[1].to_f32()[1] - row).abs() < 1e-3);
    let mut matmul = vec![
        tame(DType::F16, 20 * 32, 1),
        tame(DType::F16, 48 * 32, 2),
        KernelBuffer::zeros(DType::F32, 20 * 48),
    ];
    run(&tiled_matmul(), &mut matmul, &dims).unwrap();
    let (a, b) = (matmul[0].to_f32(), matmul[1].to_f32());
    let want: f32 = (0..32).map(|k| a[19 * 32 + k] * b[47 * 32 + k]).sum();
    assert!((matmul[2].to_f32()[19 * 48 + 47] - want).abs() < 1e-3);
    let mut mixed =
        vec![tame(DType::I8, 256, 1), tame(DType::I8, 256, 2), KernelBuffer::zeros(DType::BF16, 64)];
    run(&mixed_types(), &mut mixed, &dims).unwrap();
}

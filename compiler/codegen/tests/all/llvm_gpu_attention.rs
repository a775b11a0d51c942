//! Attention on tensor cores: PTX on the driver in software against the interpreter, to the bit, and what
//! NVIDIA's assembler makes of it.
#![cfg(feature = "llvm")]

use crate::cases::values::tame;
use crate::software::{assembled, both, counted, ptx};
use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::kernel::Kernel;
use mlcc_ir::module::Module;
use mlcc_ir::ops::{AttentionOp, Op};
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernels::lower::group::lower_group;
use mlcc_kernels::params::KernelTarget;

/// Query heads, key heads, size of heads, type of the cache.
type AttentionShape = (usize, usize, usize, DType);

fn kernel(op: &AttentionOp, (heads, kv, size, cache): AttentionShape, single: bool, level: &str) -> Kernel {
    let n = if single { Dim::from(1) } else { Dim::sym(SizeSymbol::N) };
    let t = Dim::sym(SizeSymbol::Past).add(&n);
    let mut f = Function::new("attention", FunctionKind::Group);
    let dims = |rows: &Dim, heads: usize| [rows.clone(), Dim::from(heads), Dim::from(size)];
    let mut inputs = vec![f.add_input(TensorType::new(DType::F32, dims(&n, heads)))];
    inputs.extend([0, 1].map(|_| f.add_input(TensorType::new(cache, dims(&t, kv)))));
    f.outputs = f.append(&Module::new("m"), Op::Attention(op.clone()), &inputs).unwrap();
    let target = mlcc_target::resolve_target(level).unwrap();
    let target = KernelTarget::new(target.arch, &target.levels[0]);
    lower_group(&Module::new("m"), &f, "attention", &[None; 3], &target).unwrap().kernel
}

fn op(size: usize) -> AttentionOp {
    AttentionOp::causal((size as f64).powf(-0.5))
}

#[test]
fn ptx_computes_what_the_interpreter_does() {
    let window = AttentionOp { window: 9, softcap: 3.0, ..op(32) };
    // Blocks of 64 rows, and slices of a cache.
    let cases = [
        ((4, 2, 32, DType::F16), op(32), [70, 5], [3, 2], "sm_80"),
        ((3, 1, 16, DType::F32), window, [21, 70], [1, 1], "sm_90"),
        ((2, 2, 16, DType::BF16), op(16), [1, 130], [32, 2], "sm_90"),
        ((6, 1, 48, DType::F16), op(48), [1, 100], [32, 1], "sm_80"),
    ];
    for (shape, op, [n, past], [x, y], level) in cases {
        let (heads, kv, size, cache) = shape;
        let kernel = kernel(&op, shape, n == 1, level);
        let sizes = SymValues { n: n as i64, b: 1, past: past as i64 };
        let out = kernel.bufs[*kernel.params.last().unwrap()].len.eval(&sizes);
        let rows = |seed| tame(cache, (n + past) * kv * size, seed);
        let q = tame(DType::F32, n * heads * size, 1);
        let buffers = [q, rows(2), rows(3), KernelBuffer::zeros(DType::F32, out as usize)];
        let [found, executed] = both(&kernel, level, [x, y, 1], &buffers, &sizes);
        assert_eq!(found.unwrap(), executed.unwrap(), "{shape:?}");
    }
}

/// Instructions of all warps, and those without tensor cores.
#[test]
fn what_is_executed() {
    let (heads, kv, size) = (4, 1, 128);
    for (cache, n, past, share) in
        [(DType::F16, 32, 96, 10), (DType::F32, 32, 96, 5), (DType::F16, 1, 127, 2)]
    {
        let rows = if cache == DType::F32 { 32 } else { 64 };
        let [found, before] = [("sm_90", rows), ("sm_75", 16)].map(|(level, rows)| {
            let kernel = kernel(&op(size), (heads, kv, size, cache), n == 1, level);
            let sizes = SymValues { n: n as i64, b: 1, past: past as i64 };
            let out = kernel.bufs[*kernel.params.last().unwrap()].len.eval(&sizes);
            let rows_of = |seed| tame(cache, (n + past) * kv * size, seed);
            let q = tame(DType::F32, n * heads * size, 1);
            let buffers = [q, rows_of(2), rows_of(3), KernelBuffer::zeros(DType::F32, out as usize)];
            // Two slices of 64 keys, or blocks of this many rows.
            let grid = if n == 1 { [2, 1, 1] } else { [(n * heads / rows) as u32, 1, 1] };
            let counts = counted(&kernel, "sm_90", grid, &buffers, &sizes);
            ["/instructions/warp", "/instructions/by_pipe/tensor", "/shared/bank_conflicts"]
                .map(|at| counts.pointer(at).and_then(|n| n.as_u64()).unwrap_or(0))
        });
        eprintln!("{cache}, {n} queries: {found:?}, without tensor cores {before:?}");
        assert!(found[0] * share < before[0] && found[1] > 0 && before[1] == 0, "{cache} {n}");
    }
}

/// Products in the text, wide accesses, no spills.
#[test]
fn what_is_assembled() {
    for (level, sm) in [("sm_80", 80), ("sm_90", 90)] {
        for (size, cache) in [(64, DType::F16), (128, DType::F16), (128, DType::F32), (256, DType::F16)] {
            for single in [false, true] {
                let kernel = kernel(&op(size), (32, 8, size, cache), single, level);
                let text = ptx(&kernel, level);
                assert!(text.contains("mma.sync") && text.contains("ldmatrix.sync"), "{text}");
                assert!(text.contains("ldmatrix.sync.aligned.m8n8.x4.trans"), "{text}");
                assert_eq!(text.contains("cp.async.cg.shared.global"), cache == DType::F16, "{text}");
                assert!(!text.contains(".local"), "{text}");
                let Some(usage) = assembled(&text, sm) else { continue };
                let what = format!("{level} {size} {cache} {single}");
                eprintln!("{what}: {} registers, {} bytes", usage.registers, usage.shared_bytes);
                assert_eq!(usage.spill_bytes, 0, "{what}");
            }
        }
    }
}

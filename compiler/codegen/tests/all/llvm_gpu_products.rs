//! Products on tensor cores: PTX on the driver in software against the interpreter, to the bit, and what NVIDIA's assembler makes of it.
#![cfg(feature = "llvm")]

use crate::cases::values::tame;
use crate::software::{assembled, both, ptx};
use mlcc_interp::kernel::Buffer;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, Sym, SymValues};
use mlcc_ir::kernel::{Access, Kernel};
use mlcc_ir::types::{DType, Packing};
use mlcc_kernels::product::{Activation, GpuPlan, Product, Weight, choose_gpu, emit_gpu_product};
use mlcc_quant::{PackOptions, pack};
use mlcc_target::MatrixTile;

/// `[m, k]` times `[n, k]` with the plan of a level.
fn product(weight: DType, x: DType, (n, k): (usize, usize), tile: MatrixTile) -> (Kernel, Buffer) {
    let bytes =
        pack(weight, Packing::RowMajor, n, k, &tame(DType::F32, n * k, 1).to_f32(), PackOptions::default());
    let w_dtype = if weight.is_packed() { DType::U8 } else { weight };
    let w_buffer = Buffer::new(w_dtype, bytes.unwrap());
    let mut kb = KernelBuilder::new("product");
    let rows = Dim::sym(Sym::N);
    let x_buf = kb.param("x", x, rows.scale(k as i64), Access::In, 64);
    let w = kb.param("w", w_dtype, w_buffer.len(), Access::In, 64);
    let y = kb.param("y", DType::F32, rows.scale(n as i64), Access::Out, 64);
    let problem = Product {
        x: x_buf,
        activation: if x == DType::F32 { Activation::F32 } else { Activation::BF16 },
        w,
        w_offset: 0,
        weight: Weight::of(weight).unwrap(),
        m: kb.sym(Sym::N),
        n,
        k,
        epilogue_operands: [Some(y), None, None, None],
    };
    let plan = choose_gpu(Some(tile), &problem, false).unwrap();
    assert_eq!(plan, GpuPlan::Matrix(tile));
    emit_gpu_product(&mut kb, &problem, &plan, &mut |k, sums| sums.store(k.view(y, [1, n as i64]))).unwrap();
    (kb.finish(), w_buffer)
}

fn tile_of(level: &str) -> MatrixTile {
    mlcc_target::level(level).unwrap().unwrap().gpu.unwrap().product.unwrap()
}

const WEIGHTS: [(&str, DType); 4] =
    [("f16", DType::F32), ("bf16", DType::BF16), ("q4g32", DType::F32), ("q8g32", DType::F32)];

#[test]
fn ptx_computes_what_the_interpreter_does() {
    // More rows and columns than a tile; and a ring that is more than a kernel may declare.
    let wide = MatrixTile { stages: 4, ..tile_of("sm_90") };
    for ((weight, x), tile) in WEIGHTS.into_iter().zip([tile_of("sm_80"), wide, tile_of("sm_90"), wide]) {
        let ((m, n, k), weight) = ((70, 130, 160), DType::parse(weight).unwrap());
        let (kernel, w) = product(weight, x, (n, k), tile);
        let buffers = [tame(x, m * k, 2), w, Buffer::zeros(DType::F32, m * n)];
        let [found, executed] = both(&kernel, "sm_90", [2, 2, 1], &buffers, &SymValues::tokens(m as i64));
        assert_eq!(found.unwrap(), executed.unwrap(), "{weight} {x}");
    }
}

/// Products in the text, wide accesses, no spills.
#[test]
fn what_is_assembled() {
    for (level, sm) in [("sm_80", 80), ("sm_90", 90)] {
        for (weight, x) in WEIGHTS {
            let tile = tile_of(level);
            let (kernel, _) = product(DType::parse(weight).unwrap(), x, (4096, 4096), tile);
            let text = ptx(&kernel, level);
            let [mt, nt] = tile.fragments();
            let terms = match (weight, x) {
                ("f16", _) => 3,
                (_, DType::F32) => 2,
                _ => 1,
            };
            assert_eq!(text.matches("mma.sync").count() as i64, 2 * terms * mt * nt, "{weight} {x}");
            assert!(text.contains("cp.async.cg.shared.global") && text.contains("ld.shared.v4"), "{text}");
            assert!(!text.contains(".local"), "{text}");
            let Some(usage) = assembled(&text, sm) else { continue };
            eprintln!("{level} {weight} {x}: {} registers, {} bytes", usage.registers, usage.shared_bytes);
            assert_eq!(usage.spill_bytes, 0, "{level} {weight} {x}");
            // Two blocks of a multiprocessor at least.
            assert!(usage.registers * tile.threads() * 2 <= 65536, "{} registers", usage.registers);
        }
    }
}

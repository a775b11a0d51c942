//! Products on tensor cores: PTX on the driver in software against the interpreter, to the bit, and what
//! NVIDIA's assembler makes of it.
#![cfg(feature = "llvm")]

use crate::cases::values::tame;
use crate::software::{assembled, both, counted, ptx};
use mlcc_codegen::launch::SharedMemory;
use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::kernel::{Kernel, ParamAccess};
use mlcc_ir::types::{DType, Packing};
use mlcc_kernels::matmul::{
    GpuMatmulPlan, MatmulActivation, MatmulProblem, MatmulWeight, choose_gpu, emit_gpu_matmul,
};
use mlcc_quant::{PackOptions, pack, packed_bytes};
use mlcc_target::MatrixTile;

/// `[m, k]` times `[n, k]` with the plan of a level.
fn product(
    (weight, packing): (DType, Packing),
    x: DType,
    (n, k): (usize, usize),
    tile: MatrixTile,
) -> Kernel {
    let w_dtype = stored(weight);
    let w_len = packed_bytes(weight, packing, n, k).unwrap() / w_dtype.bytes().unwrap();
    let mut kb = KernelBuilder::new("product");
    let rows = Dim::sym(SizeSymbol::N);
    let x_buf = kb.param("x", x, rows.scale(k as i64), ParamAccess::In, 64);
    let w = kb.param("w", w_dtype, w_len, ParamAccess::In, 64);
    let y = kb.param("y", DType::F32, rows.scale(n as i64), ParamAccess::Out, 64);
    let problem = MatmulProblem {
        x: x_buf,
        activation: match x {
            DType::F16 => MatmulActivation::F16,
            DType::BF16 => MatmulActivation::BF16,
            _ => MatmulActivation::F32,
        },
        w,
        w_offset: 0,
        weight: MatmulWeight::from_dtype(weight).unwrap(),
        packing,
        m: kb.sym(SizeSymbol::N),
        n,
        k,
        epilogue_operands: [Some(y), None, None, None],
    };
    let plan = choose_gpu(Some(tile), &problem, false).unwrap();
    assert_eq!(plan, GpuMatmulPlan::Matrix(tile));
    emit_gpu_matmul(&mut kb, &problem, &plan, &mut |k, sums| sums.store(k.view(y, [1, n as i64]))).unwrap();
    kb.finish()
}

/// The type of a buffer of weights.
fn stored(weight: DType) -> DType {
    if weight.is_packed() { DType::U8 } else { weight }
}

/// Values for the weights of a product.
fn weights((weight, packing): (DType, Packing), (n, k): (usize, usize)) -> KernelBuffer {
    let values = tame(DType::F32, n * k, 1).to_f32();
    KernelBuffer::new(stored(weight), pack(weight, packing, n, k, &values, PackOptions::default()).unwrap())
}

fn tile_of(level: &str) -> MatrixTile {
    mlcc_target::level(level).unwrap().unwrap().gpu.unwrap().product.unwrap()
}

/// The tile that a product is lowered with.
fn tile_for(level: &str, weight: &str, x: DType) -> MatrixTile {
    let gpu = mlcc_target::level(level).unwrap().unwrap().gpu.unwrap();
    let codes = DType::parse(weight).unwrap().is_packed() && x == DType::F16;
    gpu.code_product.filter(|_| codes).or(gpu.product).unwrap()
}

const WEIGHTS: [(&str, DType); 9] = [
    ("f16", DType::F32),
    ("bf16", DType::BF16),
    ("q4g32", DType::F32),
    ("q8g32", DType::F32),
    ("f16", DType::F16),
    ("f16", DType::BF16),
    ("q4g32", DType::F16),
    ("q8g32", DType::F16),
    ("q4g32", DType::BF16),
];

/// The same with the packing of the weights: fragments where activations are halves, and row-major ones for
/// all.
fn cases() -> impl Iterator<Item = (&'static str, DType, Packing)> {
    let rows = WEIGHTS.into_iter().map(|(weight, x)| (weight, x, Packing::RowMajor));
    let halves = WEIGHTS.into_iter().filter(|(_, x)| *x != DType::F32);
    rows.chain(halves.map(|(weight, x)| (weight, x, Packing::Fragments)))
}

/// Rows of weights: of fragments the next sixteen.
fn rows_of(packing: Packing, n: usize) -> usize {
    if packing == Packing::Fragments { n.next_multiple_of(16) } else { n }
}

/// Products of fragments that make one of a weight with an activation.
fn terms(weight: &str, x: DType) -> usize {
    match (weight, x) {
        ("f16", DType::F32) => 3,
        ("f16", DType::BF16) | (_, DType::F32) => 2,
        _ => 1,
    }
}

#[test]
fn ptx_computes_what_the_interpreter_does() {
    // More rows and columns than a tile, of which eight blocks in a column are for neighbours in a row; and a
    // ring that is more than a kernel may declare.
    let wide = MatrixTile { stages: 4, ..tile_of("sm_90") };
    for ((weight, x, packing), tile) in
        cases().zip([tile_of("sm_80"), wide, tile_of("sm_90")].into_iter().cycle())
    {
        // Packed weights with f16 activations have a tile of their own.
        let own = tile_for("sm_90", weight, x);
        let tile = if own == tile_of("sm_90") { tile } else { own };
        let ((m, n, k), weight) = ((70, rows_of(packing, 130), 256), DType::parse(weight).unwrap());
        let stored = (weight, packing);
        let (kernel, w) = (product(stored, x, (n, k), tile), weights(stored, (n, k)));
        let buffers = [tame(x, m * k, 2), w, KernelBuffer::zeros(DType::F32, m * n)];
        let [found, executed] =
            both(&kernel, "sm_90", [1, 16, 1], &buffers, &SymValues::for_tokens(m as i64));
        assert_eq!(found.unwrap(), executed.unwrap(), "{weight} {x} {packing:?}");
    }
}

/// The parts of a kernel for up to 16 rows and for up to 64.
#[test]
fn ptx_of_few_rows_computes_what_the_interpreter_does() {
    for ((weight, x, packing), m) in cases().zip([5, 16, 17, 64].into_iter().cycle()) {
        let tile = tile_for("sm_90", weight, x);
        let ((n, k), weight) = ((rows_of(packing, 100), 256), DType::parse(weight).unwrap());
        let stored = (weight, packing);
        let (kernel, w) = (product(stored, x, (n, k), tile), weights(stored, (n, k)));
        let buffers = [tame(x, m * k, 2), w, KernelBuffer::zeros(DType::F32, m * n)];
        let [found, executed] = both(&kernel, "sm_90", [1, 8, 1], &buffers, &SymValues::for_tokens(m as i64));
        assert_eq!(found.unwrap(), executed.unwrap(), "{weight} {x} {packing:?}");
    }
}

/// Products with a matrix of so many columns of results that a block has 128 of them. The driver runs the
/// first blocks alone.
#[test]
fn ptx_of_few_rows_and_many_columns_computes_what_the_interpreter_does() {
    const BLOCKS: usize = 3;
    // The interpreter runs them all, so these are the tiles of the formats that ship most, and one of
    // row-major weights.
    let cases = [
        ("q4g32", DType::F16, Packing::Fragments, 16),
        ("q4g32", DType::F16, Packing::Fragments, 20),
        ("q4g32", DType::F16, Packing::Fragments, 64),
        ("f16", DType::F16, Packing::Fragments, 16),
        ("q8g32", DType::F32, Packing::RowMajor, 20),
    ];
    for (weight, x, packing, m) in cases {
        let tile = tile_for("sm_90", weight, x);
        let ((n, k), weight) = ((128 * 130, 64), DType::parse(weight).unwrap());
        let stored = (weight, packing);
        let (kernel, w) = (product(stored, x, (n, k), tile), weights(stored, (n, k)));
        let buffers = [tame(x, m * k, 2), w, KernelBuffer::zeros(DType::F32, m * n)];
        let blocks = [1, BLOCKS as u32, 1];
        let [found, executed] = both(&kernel, "sm_90", blocks, &buffers, &SymValues::for_tokens(m as i64));
        let [found, executed] = [found, executed].map(|buffer| buffer.unwrap().to_f32());
        // Up to 64 rows are one tile, or two of 32.
        let columns = executed[..n].iter().take_while(|sum| **sum != 0.0).count();
        assert!(columns >= (BLOCKS - 1) * 128, "{weight} {x} {packing:?}: {columns} columns of {m} rows");
        let first = |rows: &[f32]| -> Vec<u32> {
            rows.chunks(n).take(32).flat_map(|row| &row[..columns]).map(|sum| sum.to_bits()).collect()
        };
        assert_eq!(first(&found), first(&executed), "{weight} {x} {packing:?}");
    }
}

/// A product of 8 rows multiplies 16 rows, fewer than a tile of a prompt has (which is the only tile where it
/// has 48 columns), and copies weights once.
#[test]
fn what_few_rows_take() {
    for (name, x, packing) in cases() {
        let ((m, n, k), weight) = ((8, 192, 512), DType::parse(name).unwrap());
        let large = MatrixTile { columns: 48, warps: [4, 1], ..tile_of("sm_90") };
        let [few, many] = [(tile_of("sm_90"), 16), (large, 4)].map(|(tile, blocks)| {
            let stored = (weight, packing);
            let (kernel, w) = (product(stored, x, (n, k), tile), weights(stored, (n, k)));
            let buffers = [tame(x, m * k, 2), w, KernelBuffer::zeros(DType::F32, m * n)];
            counted(&kernel, "sm_90", [1, blocks, 1], &buffers, &SymValues::for_tokens(m as i64))
        });
        let of = |counts: &serde_json::Value, at: &str| counts.pointer(at).and_then(|n| n.as_u64()).unwrap();
        let [few, many] = [few, many].map(|counts| {
            ["/instructions/warp", "/instructions/by_pipe/tensor", "/async/bytes", "/shared/bank_conflicts"]
                .map(|at| of(&counts, at))
        });
        eprintln!("{weight} {x} {}: {few:?}, with tiles of 64 rows {many:?}", packing.name());
        assert_eq!(few[1] as usize, n / 8 * (k / 32) * 2 * terms(name, x));
        // Scales of row-major weights are copied in pieces of 4 bytes; of fragments each lane copies those of
        // two rows and two groups.
        let scale = if packing == Packing::Fragments { 16 } else { 4 };
        let of_weight = if weight.is_packed() {
            [16, 32][usize::from(weight.to_string().starts_with("q8"))] + scale
        } else {
            64
        };
        let of_x = 16 * 32 * x.bytes().unwrap() * n / 32;
        assert_eq!(few[2] as usize, k / 32 * (n * of_weight + of_x));
        assert!(few[0] * 3 < many[0] * 2 && few[1] * 4 <= many[1], "{weight} {x}");
    }
}

/// Products in the text, wide accesses, no spills.
#[test]
fn what_is_assembled() {
    // Few columns of results, and enough that blocks of few rows are wide.
    for (level, sm, n) in [("sm_80", 80, 2048), ("sm_90", 90, 2048), ("sm_90", 90, 28672)] {
        for (weight, x, packing) in cases().filter(|of| n == 2048 || of.2 == Packing::Fragments) {
            let tile = tile_for(level, weight, x);
            let stored = (DType::parse(weight).unwrap(), packing);
            let kernel = product(stored, x, (n, 4096), tile);
            // The shared memory that every machine of the level has.
            let most = mlcc_target::level(level).unwrap().unwrap().gpu.unwrap().max_shared_bytes();
            assert!(SharedMemory::bytes_of(&kernel) <= u64::from(most), "{level} {weight} {x} {packing:?}");
            let text = ptx(&kernel, level);
            let terms = terms(weight, x) as i64;
            // Two for a slice of 32 columns and a fragment of sums. A warp has 4 x 8 or 2 x 8 of these for
            // many rows, one row of 4 for up to 16, and two of 4 for up to 64.
            let [mt, nt] = tile.fragments();
            let fragments = mt * nt + 4 + 2 * 4;
            // Slices of packed weights in fragments have 64 columns.
            let wide = packing == Packing::Fragments && stored.0.is_packed();
            let count = if wide { 4 } else { 2 } * terms * fragments;
            if n == 2048 {
                assert_eq!(text.matches("mma.sync").count() as i64, count, "{weight} {x}");
            }
            assert!(text.contains("cp.async.cg.shared.global") && text.contains("ld.shared.v4"), "{text}");
            assert!(!text.contains(".local"), "{text}");
            let Some(usage) = assembled(&text, sm) else { continue };
            eprintln!(
                "{level} {weight} {x} {packing:?}: {} registers, {} bytes",
                usage.registers, usage.shared_bytes
            );
            assert_eq!(usage.spill_bytes, 0, "{level} {weight} {x}");
            // Two blocks of a multiprocessor at least.
            assert!(usage.registers * tile.threads() * 2 <= 65536, "{} registers", usage.registers);
        }
    }
}

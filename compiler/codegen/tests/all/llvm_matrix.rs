//! Tensor cores and asynchronous copies: what the interpreter says they mean and what their PTX does, in
//! kernels that are right and in ones with a mistake put in.
#![cfg(feature = "llvm")]

use crate::software::{assembled, both, ptx};
use mlcc_interp::kernel::{ExecutionOptions, KernelBuffer, KernelFault, run_with};
use mlcc_ir::dim::SymValues;
use mlcc_ir::fragment::{Fragment, M16N8K16, M16N8K32, MmaLayout};
use mlcc_ir::kernel::{ExprType, Kernel, MemorySpace};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::matrix::fragment_position;
use mlcc_kernel_lang::{BufferView, Recorder, Val};

const LEVELS: [(&str, u32); 2] = [("sm_80", 80), ("sm_90", 90)];

/// Small integers, which every type holds.
fn numbers(dtype: DType, count: usize, seed: i64) -> KernelBuffer {
    let values: Vec<i64> = (0..count as i64).map(|i| (i * 7 + seed) % 13 - 6).collect();
    KernelBuffer::from_ints(dtype, &values)
}

/// The fragment of a warp, element by element.
fn gather<'k>(from: BufferView<'k, 2>, of: &Fragment, lane: Val<'k>, transposed: bool) -> Val<'k> {
    let k = lane.recorder();
    let held = k.reg("held", k.zeros(from.dtype(), of.elements_per_lane()));
    let all = (0..of.elements_per_lane()).map(|e| {
        let [row, column] = fragment_position(of, lane, e);
        from.at(if transposed { [column, row] } else { [row, column] })
    });
    let all: Vec<Val> = all.collect();
    let joined = all.iter().enumerate().fold(held.get(), |sum, (i, &one)| {
        let lanes = of.elements_per_lane();
        let at = (0..lanes).map(|l| if l == i as u32 { lanes } else { l });
        sum.shuffle_with(one.splat(lanes), at)
    });
    joined.named("fragment")
}

/// `y = a b^T + 1` of one warp, of which only the first `active` lanes multiply. `order` of the elements of
/// `a`.
fn product(
    mma: &MmaLayout,
    dtype: DType,
    order: Option<[u32; 8]>,
    active: i64,
) -> (Kernel, Vec<KernelBuffer>) {
    let sum = if dtype.is_float() { DType::F32 } else { DType::I32 };
    let k = Recorder::new("product");
    let depth = i64::from(mma.a.columns);
    let a = k.input("a", dtype, [16, depth]);
    let b = k.input("b", dtype, [8, depth]);
    let y = k.output("y", sum, [16, 8]);
    k.blocks("block", 0, 1, |_| {
        k.threads("lane", 32, |lane| {
            let left = gather(a, &mma.a, lane, false);
            let left = order.map_or(left, |order| left.shuffle(order));
            let right = gather(b, &mma.b, lane, true);
            let multiply = || {
                let sums = k.literal(1.0, ExprType::vector(sum, 4)).mma(left, right).named("sums");
                for e in 0..mma.accumulator.elements_per_lane() {
                    y.set(fragment_position(&mma.accumulator, lane, e), sums.shuffle([e]));
                }
            };
            if active < 32 { k.when(lane.lt(active), multiply) } else { multiply() }
        });
    });
    let buffers = vec![
        numbers(dtype, 16 * depth as usize, 1),
        numbers(dtype, 8 * depth as usize, 5),
        KernelBuffer::zeros(sum, 128),
    ];
    (k.finish(), buffers)
}

fn expected(buffers: &[KernelBuffer], depth: usize) -> Vec<i64> {
    let (a, b) = (buffers[0].to_i64(), buffers[1].to_i64());
    let element = |i: usize| (0..depth).map(|j| a[i / 8 * depth + j] * b[i % 8 * depth + j]).sum::<i64>() + 1;
    (0..128).map(element).collect()
}

#[test]
fn products_of_fragments() {
    for (mma, dtype) in [(&M16N8K16, DType::F16), (&M16N8K16, DType::BF16), (&M16N8K32, DType::I8)] {
        let (kernel, buffers) = product(mma, dtype, None, 32);
        for (level, sm) in LEVELS {
            for found in both(&kernel, level, [1; 3], &buffers, &SymValues::for_tokens(1)) {
                assert_eq!(found.unwrap().to_i64(), expected(&buffers, mma.a.columns as usize), "{dtype}");
            }
            assembled(&ptx(&kernel, level), sm);
        }
    }
}

#[test]
fn a_wrong_map_of_lanes_shows() {
    // Registers 1 and 2 of `a` exchanged.
    let (kernel, buffers) = product(&M16N8K16, DType::F16, Some([0, 1, 4, 5, 2, 3, 6, 7]), 32);
    for found in both(&kernel, "sm_80", [1; 3], &buffers, &SymValues::for_tokens(1)) {
        assert_ne!(found.unwrap().to_i64(), expected(&buffers, 16));
    }
}

#[test]
fn all_lanes_have_to_come() {
    let (kernel, buffers) = product(&M16N8K16, DType::F16, None, 31);
    let [a, b] = both(&kernel, "sm_80", [1; 3], &buffers, &SymValues::for_tokens(1)).map(Result::unwrap_err);
    assert!(a.contains("warp 0, of which 31 lanes are active"), "{a}");
    assert!(b.contains("lane 31 of warp 0") || b.contains("do not come"), "{b}");
}

/// 8 x 16 bytes in shared memory for each of `matrices`, read by `ldmatrix`; what each lane got.
fn loaded(dtype: DType, matrices: u32, transposed: bool, shift: i64) -> (Kernel, Vec<KernelBuffer>) {
    let k = Recorder::new("loaded");
    let width = 16 / dtype.bytes().unwrap() as i64;
    let rows = 8 * i64::from(matrices);
    let x = k.input("x", dtype, [32, width]);
    let lanes = matrices * 4 / dtype.bytes().unwrap() as u32;
    let y = k.output("y", dtype, [32, i64::from(lanes)]);
    k.blocks("block", 0, 1, |_| {
        let xs = k.alloc("xs", dtype, [40, width], MemorySpace::Shared);
        k.threads("lane", 32, |lane| {
            xs.start_copy((lane, 0), 16, x, (lane, 0));
            k.wait_copies(0);
        });
        k.barrier();
        k.threads("lane", 32, |lane| {
            let at = (lane % rows, shift);
            y.set((lane, 0), xs.load_matrices(at, matrices, transposed));
        });
    });
    let count = 32 * width as usize;
    let values: Vec<i64> = (0..count as i64).map(|i| i % 120).collect();
    (
        k.finish(),
        vec![KernelBuffer::from_ints(dtype, &values), KernelBuffer::zeros(dtype, 32 * lanes as usize)],
    )
}

#[test]
fn rows_of_matrices() {
    for dtype in [DType::F16, DType::BF16, DType::I8] {
        for (matrices, transposed) in [(4, false), (2, false), (4, true), (2, true)] {
            if transposed && dtype == DType::I8 {
                continue;
            }
            let (kernel, buffers) = loaded(dtype, matrices, transposed, 0);
            let x = buffers[0].to_i64();
            // Elements in 16 bits.
            let unit = 2 / dtype.bytes().unwrap();
            let width = 8 * unit;
            let lanes = matrices as usize * 2 * unit;
            let want = (0..32 * lanes).map(|i| {
                let (lane, e) = (i / lanes, i % lanes);
                let (matrix, column) = (e / (2 * unit), lane % 4 * 2 + e / unit % 2);
                let (row, column) = if transposed { (column, lane / 4) } else { (lane / 4, column) };
                x[(8 * matrix + row) * width + column * unit + e % unit]
            });
            let want: Vec<i64> = want.collect();
            for found in both(&kernel, "sm_80", [1; 3], &buffers, &SymValues::for_tokens(1)) {
                assert_eq!(found.unwrap().to_i64(), want, "{dtype} {matrices} {transposed}");
            }
            assembled(&ptx(&kernel, "sm_80"), 80);
        }
    }
}

#[test]
fn rows_off_their_alignment() {
    let (kernel, buffers) = loaded(DType::F16, 4, false, 4);
    let [a, b] = both(&kernel, "sm_80", [1; 3], &buffers, &SymValues::for_tokens(1)).map(Result::unwrap_err);
    assert!(a.contains("no multiple of 16 bytes"), "{a}");
    assert!(b.contains("no multiple of 16"), "{b}");
}

/// The mistake in a ring of stages.
#[derive(Clone, Copy, PartialEq, Debug)]
enum PipelineMistake {
    None,
    /// Threads do not wait.
    NoWait,
    /// One group too many may be under way.
    ShortWait,
    /// Threads do not wait for each other before they read.
    NoBarrier,
    /// A stage is filled while threads may still read it.
    EarlyReuse,
    /// The last copies are left alone.
    NoLastWait,
    /// The source of a copy is written while it is under way.
    SourceWritten,
}

const STAGES: i64 = 3;
const TILES: i64 = 7;

/// `y[t] = sum over tiles of x[tile][(t + 1) % 64]`: tiles come through a ring in shared memory, each thread
/// brings 4 floats of a tile, and reads what its neighbour has brought.
fn ring(mistake: PipelineMistake) -> Kernel {
    let k = Recorder::new("ring");
    let x = k.builder(|kb| {
        kb.param("x", DType::F32, 64 * TILES as usize, mlcc_ir::kernel::ParamAccess::InOut, 64)
    });
    let x = k.view(x, [TILES, 64]);
    let y = k.output("y", DType::F32, [64]);
    k.blocks("block", 0, 1, |_| {
        let stages = k.alloc("stages", DType::F32, [STAGES, 64], MemorySpace::Shared);
        let sum = k.registers("sum", [1]);
        let fill = |t: Val<'_>, tile: Val<'_>| {
            // Tiles after the last one are not there; with this mistake, the first ones come again.
            let (from, there) = match mistake {
                PipelineMistake::NoLastWait => (tile % TILES, t.lt(16)),
                _ => (tile, tile.lt(TILES) & t.lt(16)),
            };
            k.when(there, || stages.start_copy([tile % STAGES, t * 4], 16, x, [from, t * 4]));
            k.commit_copies();
        };
        k.threads("t", 64, |t| {
            sum.set([0], k.float(0.0));
            for tile in 0..STAGES - 1 {
                fill(t, k.int(tile));
            }
        });
        k.serial("tile", TILES, |tile| {
            k.threads("t", 64, |t| {
                match mistake {
                    PipelineMistake::NoWait => {}
                    PipelineMistake::ShortWait => k.wait_copies(STAGES as u32 - 1),
                    _ => k.wait_copies(STAGES as u32 - 2),
                }
                if mistake == PipelineMistake::SourceWritten {
                    x.set((tile.min(TILES - 2) + 1, t), k.float(0.0));
                }
            });
            if mistake != PipelineMistake::NoBarrier {
                k.barrier();
            }
            let early = mistake == PipelineMistake::EarlyReuse;
            k.threads("t", 64, |t| {
                if early {
                    fill(t, tile + STAGES);
                } else {
                    fill(t, tile + (STAGES - 1));
                }
                let read = stages.at([tile % STAGES, (t + 1) % 64]);
                sum.set([0], sum.at([0]) + read);
            });
        });
        k.threads("t", 64, |t| {
            if !matches!(mistake, PipelineMistake::NoWait | PipelineMistake::NoLastWait) {
                k.wait_copies(0);
            }
            y.set([t], sum.at([0]));
        });
    });
    k.finish()
}

#[test]
fn a_ring_of_stages() {
    let x = numbers(DType::F32, 64 * TILES as usize, 3);
    let sums: Vec<f32> =
        (0..64).map(|t| (0..TILES as usize).map(|tile| x.to_f32()[tile * 64 + (t + 1) % 64]).sum()).collect();
    let buffers = [x, KernelBuffer::zeros(DType::F32, 64)];
    let kernel = ring(PipelineMistake::None);
    for found in both(&kernel, "sm_80", [1; 3], &buffers, &SymValues::for_tokens(1)) {
        assert_eq!(found.unwrap().to_f32(), sums);
    }
    let text = ptx(&kernel, "sm_80");
    assert!(text.contains("cp.async.wait_group 1;") && text.contains("cp.async.commit_group;"), "{text}");
    assembled(&text, 80);
}

/// The interpreter locks the source of a copy. The driver judges writes over what another thread of the block
/// reads in some orders only.
#[test]
fn the_source_of_a_copy_is_locked() {
    let mut buffers = [numbers(DType::F32, 64 * TILES as usize, 3), KernelBuffer::zeros(DType::F32, 64)];
    let run = run_with(
        &ring(PipelineMistake::SourceWritten),
        &mut buffers,
        &SymValues::for_tokens(1),
        &ExecutionOptions::default(),
    );
    let fault = run.unwrap_err().fault;
    assert!(
        matches!(&fault, KernelFault::UnderWay { buffer, does: "reads", .. } if buffer == "x"),
        "{fault}"
    );
}

/// Each mistake is found, on both sides.
#[test]
fn mistakes_in_a_ring() {
    let buffers = [numbers(DType::F32, 64 * TILES as usize, 3), KernelBuffer::zeros(DType::F32, 64)];
    for (mistake, by_interpreter, by_ptx) in [
        (PipelineMistake::NoWait, "a copy that nobody has waited for", "while a copy to it is under way"),
        (PipelineMistake::ShortWait, "a copy that nobody has waited for", "while a copy to it is under way"),
        (PipelineMistake::NoBarrier, "race on stages", "and no barrier stands between"),
        (PipelineMistake::EarlyReuse, "stages", "k_ring_stages"),
        (PipelineMistake::NoLastWait, "has not waited for its copy", "has not waited for its copies"),
    ] {
        let [a, b] = both(&ring(mistake), "sm_80", [1; 3], &buffers, &SymValues::for_tokens(1));
        let (Err(a), Err(b)) = (a, b) else { panic!("{mistake:?} is not found") };
        assert!(a.contains(by_interpreter) && b.contains(by_ptx), "{mistake:?}: {a}; {b}");
    }
}

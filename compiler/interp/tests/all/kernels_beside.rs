//! Kernels in one grid compute the same as each alone.

use mlcc_interp::kernel::{ExecutionOptions, ExecutionOrder, KernelBuffer, run_with};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::horizontal_fusion::{FusedGrid, GridMember, fuse_kernels};
use mlcc_ir::kernel::*;
use mlcc_ir::types::DType;
use mlcc_ir::verify::verify_kernel;

const WIDTH: i64 = 64;

/// Reverses each run of `threads` elements of a row through shared memory; rows along x, runs along y.
/// `y = reversed(x) + row`.
fn reverse(rows: impl Into<Dim>, threads: i64) -> (Kernel, [Dim; 3]) {
    let rows = rows.into();
    let mut kb = KernelBuilder::new("reverse");
    let len = rows.mul(&Dim::from(WIDTH)).unwrap();
    let x = kb.param("x", DType::I32, len.clone(), ParamAccess::In, 64);
    let y = kb.param("y", DType::I32, len, ParamAccess::Out, 64);
    let tile = kb.alloc("tile", DType::I32, threads as usize, MemorySpace::Shared);
    let (row_extent, runs) = (kb.dim(&rows), kb.int(WIDTH / threads));
    kb.for_("row", row_extent, ForKind::Block(0), |kb, row| {
        kb.for_("run", runs, ForKind::Block(1), |kb, run| {
            let (start, from) = (kb.mul_int(row, WIDTH), kb.mul_int(run, threads));
            let base = kb.add(start, from);
            let extent = kb.int(threads);
            kb.for_("t", extent, ForKind::Thread(0), |kb, t| {
                let at = kb.add(base, t);
                let value = kb.load(x, at);
                kb.store(tile, t, value);
            });
            kb.barrier();
            kb.for_("t", extent, ForKind::Thread(0), |kb, t| {
                let last = kb.int(threads - 1);
                let mirror = kb.sub(last, t);
                let value = kb.load(tile, mirror);
                let row = kb.cast(row, DType::I32);
                let value = kb.add(value, row);
                let at = kb.add(base, t);
                kb.store(y, at, value);
            });
        });
    });
    (kb.finish(), [rows, Dim::from(WIDTH / threads), Dim::from(1)])
}

/// `y = -x`, a block for each of `blocks` runs of 8 along `axis`.
fn negate(blocks: i64, axis: u8) -> (Kernel, [Dim; 3]) {
    let mut kb = KernelBuilder::new("negate");
    let x = kb.param("x", DType::I32, blocks * 8, ParamAccess::In, 64);
    let y = kb.param("y", DType::I32, blocks * 8, ParamAccess::Out, 64);
    let extent = kb.int(blocks);
    kb.for_("block", extent, ForKind::Block(axis), |kb, block| {
        let eight = kb.int(8);
        kb.for_("t", eight, ForKind::Thread(0), |kb, t| {
            let from = kb.mul_int(block, 8);
            let at = kb.add(from, t);
            let value = kb.load(x, at);
            let value = kb.unary(UnOp::Neg, value);
            kb.store(y, at, value);
        });
    });
    let mut grid = [1; 3].map(Dim::from);
    grid[usize::from(axis)] = Dim::from(blocks);
    (kb.finish(), grid)
}

fn numbers(count: i64) -> KernelBuffer {
    KernelBuffer::from_i32(&(0..count as i32).map(|i| i * 7 - 30).collect::<Vec<_>>())
}

/// Inputs and empty outputs of a kernel whose parameters are one of each.
fn memory(kernel: &Kernel, sizes: &SymValues) -> [KernelBuffer; 2] {
    let count = kernel.bufs[kernel.params[0]].len.eval(sizes);
    [numbers(count), KernelBuffer::from_i32(&vec![0; count as usize])]
}

fn run(kernel: &Kernel, buffers: &mut [KernelBuffer], sizes: &SymValues, order: ExecutionOrder) {
    run_with(kernel, buffers, sizes, &ExecutionOptions { workers: 1, order })
        .unwrap_or_else(|e| panic!("{e}"));
}

fn same_together(parts: &[(Kernel, [Dim; 3])], blocks: [Dim; 3]) -> Kernel {
    let grids: Vec<&[Dim; 3]> = parts.iter().map(|(_, grid)| grid).collect();
    let layout = FusedGrid::for_members(&grids).expect("they fit");
    assert_eq!(layout.blocks, blocks);
    let all: Vec<GridMember> = parts.iter().map(|(kernel, blocks)| GridMember { kernel, blocks }).collect();
    let kernel = fuse_kernels("both", &all, &layout).expect("they are nests of blocks");
    verify_kernel(&kernel).unwrap();
    for rows in [1, 3] {
        let sizes = SymValues::for_tokens(rows);
        let mut want = Vec::new();
        for (kernel, _) in parts {
            let mut alone = memory(kernel, &sizes);
            run(kernel, &mut alone, &sizes, ExecutionOrder::Forward);
            want.extend(alone.map(|buffer| buffer.to_i64()));
        }
        for order in [ExecutionOrder::Forward, ExecutionOrder::Reverse, ExecutionOrder::Shuffled(5)] {
            let mut buffers: Vec<KernelBuffer> =
                parts.iter().flat_map(|(kernel, _)| memory(kernel, &sizes)).collect();
            run(&kernel, &mut buffers, &sizes, order);
            let got: Vec<Vec<i64>> = buffers.iter().map(KernelBuffer::to_i64).collect();
            assert_eq!(got, want, "{rows} rows");
        }
    }
    kernel
}

#[test]
fn constant_grids_lie_on_a_line() {
    let blocks = [4 * 2 + 3 + 3 * 4, 1, 1].map(Dim::from);
    same_together(&[reverse(4, 32), negate(3, 1), reverse(3, 16)], blocks);
}

#[test]
fn rows_of_a_call_stay_on_their_axis() {
    let n = Dim::sym(SizeSymbol::N);
    let blocks = [n.clone(), Dim::from(2 + 5 + 4), Dim::from(1)];
    same_together(&[reverse(n.clone(), 32), negate(5, 0), reverse(n, 16)], blocks);
}

#[test]
fn parts_share_their_memory() {
    let kernel = same_together(&[reverse(1, 16), reverse(1, 64)], [5, 1, 1].map(Dim::from));
    let shared: Vec<&Dim> =
        kernel.bufs.values().filter(|b| b.space == MemorySpace::Shared).map(|b| &b.len).collect();
    assert_eq!(shared, [&Dim::from(64)]);
}

#[test]
fn different_numbers_of_rows_do_not_fit() {
    let n = Dim::sym(SizeSymbol::N);
    let (of_rows, of_halves) =
        ([n.clone(), Dim::from(2), Dim::from(1)], [n.floor_div(2), Dim::from(2), Dim::from(1)]);
    assert_eq!(FusedGrid::for_members(&[&of_rows, &of_halves]), None);
    let across = [Dim::from(2), n, Dim::from(1)];
    assert_eq!(FusedGrid::for_members(&[&of_rows, &across]), None);
}

//! The kernel for groups of elementwise ops and last-axis reductions: one pass per row. Reductions become scalars of
//! the row, then every output is stored in one loop over the columns, all loads of an iteration before its stores (so an
//! output may take the place of an input read at the same index).
//!
//! CPU: rows are shared out among workers along their first axis, columns are vectors with a scalar tail. GPU: a block per
//! row of the first two axes, threads stride over the columns, reductions meet in shared memory.

use super::codes::{self, Block, RowCodes};
use super::inline::{Binding, Index, Inliner, const_of};
use super::known::borders;
use crate::contraction::CodeBlock;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{Node, ValueId};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::{BufId, ExprId, ForKind, Space, Ty};
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;

/// Threads of a GPU block that works on a row.
pub const ROW_THREADS: u32 = 256;

/// What executes a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RowMachine {
    /// With vectors of so many lanes; what asks for f32 elements ahead of their use.
    Cpu {
        lanes: u32,
        prefetch: Option<InstrId>,
    },
    Gpu,
}

/// The axes before the last one: of a row, and of the place that it is stored at.
#[derive(Clone, Copy)]
pub(super) struct RowAt<'a> {
    row: &'a [Index],
    place: &'a [Index],
}

impl<'a> RowAt<'a> {
    /// A row that is stored where the type of its value says.
    pub fn own(row: &'a [Index]) -> RowAt<'a> {
        RowAt { row, place: row }
    }
}

/// Stores one row of `outputs` at `place` in place of `row` (one entry per axis but the last; CPU). Only the first axis of the
/// buffers may be longer than the values'.
pub(crate) fn emit_at(
    kb: &mut KernelBuilder,
    inliner: &Inliner,
    (row, place): (&[Index], &[Index]),
    outputs: &[(ValueId, BufId)],
    lanes: u32,
) {
    let (mut inliner, machine) = (inliner.clone(), RowMachine::Cpu { lanes, prefetch: None });
    bind_reductions(kb, &mut inliner, row, machine);
    store_columns(kb, &inliner, RowAt { row, place }, outputs, machine);
}

/// Emits the kernel body. `inliner` binds the inputs of the group; `outputs` names what is stored where.
/// All outputs have the same leading axes `rows`. Rows that are quantized (`codes`, CPU) are shared out in blocks of `block`, as
/// their codes are ordered; where there are further leading axes, the codes follow row by row.
pub fn emit(
    kb: &mut KernelBuilder,
    inliner: &Inliner,
    rows: &[Dim],
    outputs: &[(ValueId, BufId)],
    (codes, block): (&[RowCodes], CodeBlock),
    machine: RowMachine,
) {
    if let (RowMachine::Cpu { .. }, [_, ..], [count]) = (machine, codes, rows) {
        return quantized_rows(kb, inliner, count, outputs, (codes, block), machine);
    }
    let first = rows.first().cloned().unwrap_or(Dim::from(1));
    let extent = kb.dim(&first);
    let kind = match machine {
        RowMachine::Cpu { .. } => ForKind::Par,
        RowMachine::Gpu => ForKind::Block(0),
    };
    kb.for_("row", extent, kind, |kb, row| {
        let leading = if rows.is_empty() { vec![] } else { vec![Index::scalar(row)] };
        inner_rows(kb, inliner, rows, leading, (outputs, codes), machine);
    });
}

/// Blocks of rows among workers; for each row first what is stored as it is, then the codes of all rows.
fn quantized_rows(
    kb: &mut KernelBuilder,
    inliner: &Inliner,
    rows: &Dim,
    outputs: &[(ValueId, BufId)],
    (codes, block): (&[RowCodes], CodeBlock),
    machine: RowMachine,
) {
    let RowMachine::Cpu { lanes, prefetch } = machine else { return };
    // A single row is in no block.
    let CodeBlock { rows: block, columns } =
        if rows.as_const() == Some(1) { CodeBlock::SINGLE } else { block };
    let count = kb.dim(rows);
    let size = kb.int(block.into());
    let rounded = kb.add_int(count, i64::from(block) - 1);
    let blocks = kb.div(rounded, size);
    kb.par("rows", blocks, |kb, b| {
        let first = kb.mul(b, size);
        let first = kb.let_("first", first);
        let left = kb.sub(count, first);
        let here = kb.min(left, size);
        let known = kept_reductions(kb, inliner, block);
        let (on_the_way, before) = stored_with(inliner, outputs, &codes[0], lanes);
        let each = |kb: &mut KernelBuilder, r: ExprId| {
            let row = kb.add(first, r);
            let row = kb.let_("row", row);
            let leading = [Index::scalar(row)];
            let mut inliner = inliner.clone();
            bind_reductions(kb, &mut inliner, &leading, machine);
            store_columns(kb, &inliner, RowAt::own(&leading), &before, machine);
            for &(v, buf) in &known {
                if let Some(Binding::Value(value)) = inliner.bindings.get(&v) {
                    kb.store(buf, r, *value);
                }
            }
        };
        match block {
            1 => {
                let zero = kb.int(0);
                each(kb, zero);
            }
            _ if known.is_empty() && before.is_empty() => {}
            _ => kb.serial("r", here, each),
        }
        let ahead = prefetch.map(|instr| (instr, count));
        let rows = Block {
            inliner,
            leading: None,
            first,
            rows: here,
            size: block,
            columns,
            known: &known,
            lanes,
            ahead,
        };
        codes::emit(kb, &rows, codes, &on_the_way);
    });
}

/// Values and the buffers that they go to.
type Stores = Vec<(ValueId, BufId)>;

/// The outputs that can be stored while rows are quantized, in whole vectors of the same columns, and the others.
fn stored_with(
    inliner: &Inliner,
    outputs: &[(ValueId, BufId)],
    codes: &RowCodes,
    lanes: u32,
) -> (Stores, Stores) {
    let whole = codes.k.is_multiple_of(lanes as usize) && lanes > 1;
    let same = |v: ValueId| columns(inliner, v) == Dim::from(codes.k);
    outputs.iter().partition(|(v, _)| whole && same(*v) && inliner.vectorizable(*v))
}

/// Room for the reductions of the rows of a block.
fn kept_reductions(kb: &mut KernelBuilder, inliner: &Inliner, block: u32) -> Vec<(ValueId, BufId)> {
    let space = if block == 1 { Space::Local } else { Space::Stack };
    let reductions = inliner.f.live().map(|(_, node)| node).filter(|node| match node.op {
        Op::Reduce { axis, .. } => is_over_columns(inliner, axis, node.inputs[0], 1),
        _ => false,
    });
    let room = |node: &Node| {
        let v = node.outputs[0];
        let dtype = if inliner.f.ty(v).dtype.is_int() { DType::I32 } else { DType::F32 };
        (v, kb.alloc("kept", dtype, block as usize, space))
    };
    reductions.map(room).collect()
}

/// True for a reduction over the last axis of a value behind so many leading ones.
fn is_over_columns(inliner: &Inliner, axis: usize, input: ValueId, leading: usize) -> bool {
    axis + 1 == inliner.f.ty(input).rank() && axis == leading
}

/// Blocks of a GPU along the second axis of a launch.
const MOST_BLOCKS: i64 = 65_535;

/// Loops over further leading axes (on a GPU, blocks for the second one where its size is known), then the row itself.
fn inner_rows(
    kb: &mut KernelBuilder,
    inliner: &Inliner,
    rows: &[Dim],
    leading: Vec<Index>,
    (outputs, codes): (&[(ValueId, BufId)], &[RowCodes]),
    machine: RowMachine,
) {
    if leading.len() >= rows.len() {
        let mut inliner = inliner.clone();
        bind_reductions(kb, &mut inliner, &leading, machine);
        store_columns(kb, &inliner, RowAt::own(&leading), outputs, machine);
        if let (RowMachine::Cpu { lanes, .. }, [_, ..]) = (machine, codes) {
            let (first, one) = (flat_row(kb, rows, &leading), kb.int(1));
            let (leading, ahead) = (Some(leading.as_slice()), None);
            let row = Block {
                inliner: &inliner,
                leading,
                first,
                rows: one,
                size: 1,
                columns: 4,
                known: &[],
                lanes,
                ahead,
            };
            codes::emit(kb, &row, codes, &[]);
        }
        return;
    }
    let extent = kb.dim(&rows[leading.len()]);
    let few = rows[leading.len()].as_const().is_some_and(|size| size <= MOST_BLOCKS);
    let in_blocks = machine == RowMachine::Gpu && leading.len() == 1 && few;
    let kind = if in_blocks { ForKind::Block(1) } else { ForKind::Serial };
    kb.for_("inner", extent, kind, |kb, i| {
        let mut leading = leading.clone();
        leading.push(Index::scalar(i));
        inner_rows(kb, inliner, rows, leading, (outputs, codes), machine);
        if in_blocks {
            return;
        }
        // The next row's reductions write the shared memory that this row's results were read from.
        if machine == RowMachine::Gpu && inliner.f.live().any(|(_, n)| matches!(n.op, Op::Reduce { .. })) {
            kb.barrier();
        }
    });
}

/// Number of a row among all.
fn flat_row(kb: &mut KernelBuilder, rows: &[Dim], leading: &[Index]) -> ExprId {
    let mut flat = kb.int(0);
    for (dim, index) in rows.iter().zip(leading) {
        let size = kb.dim(dim);
        flat = kb.mul(flat, size);
        if let Index::Affine { base, .. } = index {
            flat = kb.add(flat, *base);
        }
    }
    kb.let_("row", flat)
}

/// Computes the reductions over a row and binds their results.
fn bind_reductions(kb: &mut KernelBuilder, inliner: &mut Inliner, leading: &[Index], machine: RowMachine) {
    let f = inliner.f;
    for (_, node) in f.live() {
        let Op::Reduce { op, axis } = node.op else { continue };
        let (input, output) = (node.inputs[0], node.outputs[0]);
        if !is_over_columns(inliner, axis, input, leading.len()) {
            continue;
        }
        let value = match machine {
            RowMachine::Cpu { .. } => {
                let zero = kb.int(0);
                let index = [leading, &[Index::scalar(zero)]].concat();
                inliner.value(kb, output, &index)
            }
            RowMachine::Gpu => gpu_reduce(kb, inliner, op, input, leading),
        };
        inliner.bindings.insert(output, Binding::Value(value));
    }
}

/// Stores the outputs of a row, those of the same columns in one loop.
fn store_columns(
    kb: &mut KernelBuilder,
    inliner: &Inliner,
    at: RowAt,
    outputs: &[(ValueId, BufId)],
    machine: RowMachine,
) {
    let mut done = vec![false; outputs.len()];
    for i in 0..outputs.len() {
        if done[i] {
            continue;
        }
        let cols = columns(inliner, outputs[i].0);
        let wide = inliner.vectorizable(outputs[i].0);
        let together: Vec<usize> = (i..outputs.len())
            .filter(|&j| !done[j] && columns(inliner, outputs[j].0) == cols)
            .filter(|&j| inliner.vectorizable(outputs[j].0) == wide)
            .collect();
        let stores: Vec<(ValueId, BufId)> = together.iter().map(|&j| outputs[j]).collect();
        together.iter().for_each(|&j| done[j] = true);
        match machine {
            RowMachine::Cpu { lanes, .. } => {
                cpu_columns(kb, inliner, at, &cols, if wide { lanes } else { 1 }, &stores);
            }
            RowMachine::Gpu => gpu_columns(kb, inliner, at, &cols, &stores),
        }
    }
}

/// Size of the last axis; 1 for a rank-0 value.
fn columns(inliner: &Inliner, v: ValueId) -> Dim {
    inliner.f.ty(v).dims.last().cloned().unwrap_or(Dim::from(1))
}

fn cpu_columns(
    kb: &mut KernelBuilder,
    inliner: &Inliner,
    at: RowAt,
    cols: &Dim,
    lanes: u32,
    stores: &[(ValueId, BufId)],
) {
    let total = kb.dim(cols);
    let width = kb.int(i64::from(lanes));
    let blocks = kb.div(total, width);
    let end = kb.mul(blocks, width);
    let rest = kb.sub(total, end);
    let part = |kb: &mut KernelBuilder, start: i64, vectors: ExprId| {
        kb.serial("c", vectors, |kb, j| {
            let at_vector = kb.mul(j, width);
            let c = kb.add_int(at_vector, start);
            let ctx = Inliner { lanes, aligned: true, ..inliner.clone() };
            store_all(kb, &ctx, at, (Index::lanes(c), c), stores);
        });
    };
    match const_of(kb, end).filter(|_| lanes > 1) {
        Some(end) => {
            let borders = borders(inliner, i64::from(lanes), end);
            for (&from, &to) in borders.iter().zip(&borders[1..]) {
                let vectors = kb.int((to - from) / i64::from(lanes));
                part(kb, from, vectors);
            }
        }
        None if lanes > 1 => part(kb, 0, blocks),
        None => {}
    }
    let (start, count) = if lanes > 1 { (end, rest) } else { (kb.int(0), total) };
    kb.serial("c", count, |kb, j| {
        let c = kb.add(start, j);
        let ctx = Inliner { lanes: 1, aligned: false, ..inliner.clone() };
        store_all(kb, &ctx, at, (Index::scalar(c), c), stores);
    });
}

/// All values first, then all stores. `first`: the column, or the first one of the lanes.
pub(super) fn store_all(
    kb: &mut KernelBuilder,
    ctx: &Inliner,
    at: RowAt,
    (column, first): (Index, ExprId),
    stores: &[(ValueId, BufId)],
) {
    let values: Vec<ExprId> = stores
        .iter()
        .map(|&(v, buf)| {
            let rank = ctx.f.ty(v).rank();
            let index = if rank == 0 { vec![] } else { [at.row, &[column]].concat() };
            let value = ctx.value(kb, v, &index);
            let value = if kb.ty(value).lanes < ctx.lanes { kb.splat(value, ctx.lanes) } else { value };
            let dtype = kb.kernel().bufs[buf].dtype;
            let value = kb.cast(value, dtype);
            kb.let_("value", value)
        })
        .collect();
    for (&(v, buf), value) in stores.iter().zip(values) {
        let ty = ctx.f.ty(v).clone();
        let base = row_base(kb, &ty.dims, at.place);
        let place = kb.add(base, first);
        kb.store_vec(buf, place, value);
    }
}

/// Offset of the first element of a row.
fn row_base(kb: &mut KernelBuilder, dims: &[Dim], leading: &[Index]) -> ExprId {
    let mut flat = kb.int(0);
    for (i, dim) in dims.iter().enumerate() {
        let size = kb.dim(dim);
        flat = kb.mul(flat, size);
        if let Some(Index::Affine { base, .. }) = leading.get(i)
            && i + 1 < dims.len()
        {
            flat = kb.add(flat, *base);
        }
    }
    flat
}

/// `body(column)` for every column, strided over the threads of the block.
fn gpu_strided(kb: &mut KernelBuilder, cols: &Dim, t: ExprId, body: impl FnOnce(&mut KernelBuilder, ExprId)) {
    let total = kb.dim(cols);
    let threads = i64::from(ROW_THREADS);
    let rounds = kb.dim(&cols.ceil_div(threads));
    let exact = cols.as_const().is_some_and(|c| c % threads == 0);
    kb.serial("j", rounds, |kb, j| {
        let base = kb.mul_int(j, threads);
        let c = kb.add(base, t);
        if exact {
            return body(kb, c);
        }
        let inside = kb.lt(c, total);
        kb.if_(inside, |kb| body(kb, c));
    });
}

fn gpu_columns(
    kb: &mut KernelBuilder,
    inliner: &Inliner,
    at: RowAt,
    cols: &Dim,
    stores: &[(ValueId, BufId)],
) {
    let threads = kb.int(i64::from(ROW_THREADS));
    kb.for_("t", threads, ForKind::Thread(0), |kb, t| {
        gpu_strided(kb, cols, t, |kb, c| store_all(kb, inliner, at, (Index::scalar(c), c), stores));
    });
}

/// Partial results per thread, then a tree in shared memory. Returns a load of the result, valid in all threads.
fn gpu_reduce(
    kb: &mut KernelBuilder,
    inliner: &Inliner,
    op: RedOp,
    input: ValueId,
    leading: &[Index],
) -> ExprId {
    let cols = columns(inliner, input);
    let dtype = if inliner.f.ty(input).dtype.is_int() { DType::I32 } else { DType::F32 };
    let identity = if dtype.is_float() { op.identity() } else { 0.0 };
    let shared = kb.alloc("partial", dtype, ROW_THREADS as usize, Space::Shared);
    let threads = kb.int(i64::from(ROW_THREADS));
    let zero = kb.int(0);
    kb.for_("t", threads, ForKind::Thread(0), |kb, t| {
        let acc = kb.alloc("acc", dtype, 1, Space::Local);
        let initial = kb.constant(identity, Ty::scalar(dtype));
        kb.store(acc, zero, initial);
        gpu_strided(kb, &cols, t, |kb, c| {
            let value = inliner.value(kb, input, &[leading, &[Index::scalar(c)]].concat());
            let value = kb.cast(value, dtype);
            let old = kb.load(acc, zero);
            let new = kb.binary(op.bin(), old, value);
            kb.store(acc, zero, new);
        });
        let sum = kb.load(acc, zero);
        kb.store(shared, t, sum);
    });
    kb.barrier();
    let mut half = ROW_THREADS / 2;
    while half > 0 {
        kb.for_("t", threads, ForKind::Thread(0), |kb, t| {
            let limit = kb.int(i64::from(half));
            let active = kb.lt(t, limit);
            kb.if_(active, |kb| {
                let low = kb.load(shared, t);
                let other = kb.add(t, limit);
                let high = kb.load(shared, other);
                let sum = kb.binary(op.bin(), low, high);
                kb.store(shared, t, sum);
            });
        });
        kb.barrier();
        half /= 2;
    }
    kb.load(shared, zero)
}

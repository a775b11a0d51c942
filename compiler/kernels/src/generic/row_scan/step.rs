//! One step of the body for a few rows of a state: values in registers, columns in vectors.

use super::arithmetic::Arithmetic;
use super::{Extent, RowScan};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::compute::RedOp;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::{BufId, ExprId};
use mlcc_ir::ops::Op;
use std::collections::HashMap;

/// Rows of one head that run together.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub head: ExprId,
    /// The first.
    pub row: ExprId,
    pub rows: usize,
}

/// The columns of one row, piece by piece; one entry for a value without columns.
pub(super) type Row = Vec<ExprId>;

/// Values of the body: a row for each of the tile, or one for all.
pub(super) type Values = HashMap<ValueId, Vec<Row>>;

pub(super) struct Step<'a> {
    scan: &'a RowScan<'a>,
    lanes: u32,
    /// First column and lanes of each piece of a row: whole vectors, then single columns.
    pieces: Vec<(i64, u32)>,
    arithmetic: Arithmetic<'a>,
}

impl<'a> Step<'a> {
    pub fn new(scan: &'a RowScan<'a>, lanes: u32) -> Step<'a> {
        let (columns, width) = (scan.shape.columns, i64::from(lanes));
        let end = columns / width * width;
        let vectors = (0..end).step_by(lanes as usize).map(|c| (c, lanes));
        let pieces = vectors.chain((end..columns).map(|c| (c, 1))).collect();
        Step { scan, lanes, pieces, arithmetic: Arithmetic::new(scan.body) }
    }

    /// Elements of local memory that a row of a state takes: whole vectors, so that they can live in registers.
    pub fn stride(&self, extent: Extent) -> usize {
        match extent.columns {
            true => (self.scan.shape.columns as usize).next_multiple_of(self.lanes as usize),
            false => 1,
        }
    }

    fn pieces(&self, extent: Extent) -> &[(i64, u32)] {
        if extent.columns { &self.pieces } else { &[(0, 1)] }
    }

    /// A row of consecutive elements from `base`.
    pub fn load(&self, kb: &mut KernelBuilder, buf: BufId, base: ExprId, extent: Extent) -> Row {
        let mut row = Row::new();
        for &(column, lanes) in self.pieces(extent) {
            let at = kb.add_int(base, column);
            let value = kb.load_vec(buf, at, lanes);
            row.push(kb.let_("x", value));
        }
        row
    }

    pub fn store(&self, kb: &mut KernelBuilder, buf: BufId, base: ExprId, row: &Row, extent: Extent) {
        for (&(column, _), &value) in self.pieces(extent).iter().zip(row) {
            let at = kb.add_int(base, column);
            kb.store_vec(buf, at, value);
        }
    }

    pub fn load_state(&self, kb: &mut KernelBuilder, state: BufId, extent: Extent, r: usize) -> Row {
        let base = kb.int((r * self.stride(extent)) as i64);
        self.load(kb, state, base, extent)
    }

    pub fn store_state(&self, kb: &mut KernelBuilder, state: BufId, extent: Extent, r: usize, row: &Row) {
        let base = kb.int((r * self.stride(extent)) as i64);
        self.store(kb, state, base, row, extent);
    }

    /// Adds the values of all nodes to those of the inputs.
    pub fn evaluate(&self, kb: &mut KernelBuilder, rows: usize, values: &mut Values) {
        let body = self.scan.body;
        for (_, node) in body.live() {
            let out = node.outputs[0];
            if self.arithmetic.is_fused(out) {
                continue;
            }
            let extent = self.scan.extent(out);
            let mut all = Vec::new();
            for r in 0..if extent.rows { rows } else { 1 } {
                let row = match node.op {
                    Op::Reduce { op, .. } => vec![self.reduce(kb, op, node.inputs[0], r, values)],
                    _ => (0..self.pieces(extent).len())
                        .map(|p| {
                            let at = |v| self.at(values, v, r, p);
                            self.arithmetic.elementwise(kb, node, self.pieces(extent)[p].1, &at)
                        })
                        .collect(),
                };
                all.push(row.into_iter().map(|value| kb.let_("y", value)).collect());
            }
            values.insert(out, all);
        }
    }

    /// Piece `p` of row `r` of a value, which may be broadcast there.
    fn at(&self, values: &Values, v: ValueId, r: usize, p: usize) -> ExprId {
        let rows = &values[&v];
        let row = &rows[if rows.len() > 1 { r } else { 0 }];
        row[if row.len() > 1 { p } else { 0 }]
    }

    /// Over the columns of row `r`: vectors first, then their lanes, then single columns.
    fn reduce(&self, kb: &mut KernelBuilder, op: RedOp, input: ValueId, r: usize, values: &Values) -> ExprId {
        let pieces = self.pieces(self.scan.extent(input));
        let mut wide: Option<ExprId> = None;
        let mut single: Option<ExprId> = None;
        for (p, &(_, lanes)) in pieces.iter().enumerate() {
            let so_far = if lanes > 1 { &mut wide } else { &mut single };
            let at = |v| self.at(values, v, r, p);
            let sum = self.arithmetic.reduce(kb, (op, input), lanes, *so_far, &at);
            *so_far = Some(kb.let_("sum", sum));
        }
        let wide = wide.map(|w| kb.reduce_lanes(op.bin(), w));
        match (wide, single) {
            (Some(w), Some(s)) => kb.binary(op.bin(), w, s),
            (Some(all), None) | (None, Some(all)) => all,
            (None, None) => unreachable!("a row has columns"),
        }
    }
}

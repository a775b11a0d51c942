//! One step of the body for a few rows of a state: values in registers, columns in vectors.

use super::{Extent, RowScan};
use crate::generic::inline::{Binding, Index, Inliner};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::compute::RedOp;
use mlcc_ir::graph::{Function, Node, ValueId};
use mlcc_ir::kernel::{BinOp, BufId, ExprId};
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
    /// Products that are not computed alone: their one user adds them to something.
    products: Vec<ValueId>,
}

impl<'a> Step<'a> {
    pub fn new(scan: &'a RowScan<'a>, lanes: u32) -> Step<'a> {
        let (columns, width) = (scan.shape.columns, i64::from(lanes));
        let end = columns / width * width;
        let vectors = (0..end).step_by(lanes as usize).map(|c| (c, lanes));
        let pieces = vectors.chain((end..columns).map(|c| (c, 1))).collect();
        Step { scan, lanes, pieces, products: fused_products(scan.body) }
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
            if self.products.contains(&out) {
                continue;
            }
            let extent = self.scan.extent(out);
            let mut all = Vec::new();
            for r in 0..if extent.rows { rows } else { 1 } {
                let row = match node.op {
                    Op::Reduce { op, .. } => vec![self.reduce(kb, op, node.inputs[0], r, values)],
                    _ => (0..self.pieces(extent).len())
                        .map(|p| self.piece(kb, node, r, (p, self.pieces(extent)[p].1), values))
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

    /// Piece `p`, of `lanes` columns, of row `r` of what an elementwise node computes.
    fn piece(
        &self,
        kb: &mut KernelBuilder,
        node: &Node,
        r: usize,
        (p, lanes): (usize, u32),
        values: &Values,
    ) -> ExprId {
        if let (Op::Binary(BinOp::Add), &[a, b]) = (&node.op, node.inputs.as_slice()) {
            for (product, other) in [(a, b), (b, a)] {
                if self.products.contains(&product) {
                    let other = self.operand(kb, other, r, (p, lanes), values);
                    return self.add_product(kb, product, other, r, p, values);
                }
            }
        }
        let body = self.scan.body;
        let operand = |v: &ValueId| (*v, Binding::Value(self.at(values, *v, r, p)));
        let bindings = node.inputs.iter().map(operand).collect();
        let inliner = Inliner { f: body, bindings, lanes, mask: None, aligned: false, reduce_lanes: 1 };
        // Bound values do not look at their index.
        let zero = kb.int(0);
        let index = vec![Index::scalar(zero); body.ty(node.outputs[0]).rank()];
        let value = inliner.value(kb, node.outputs[0], &index);
        if kb.ty(value).lanes < lanes { kb.splat(value, lanes) } else { value }
    }

    /// A value that may be a product which is not computed alone.
    fn operand(
        &self,
        kb: &mut KernelBuilder,
        v: ValueId,
        r: usize,
        (p, lanes): (usize, u32),
        values: &Values,
    ) -> ExprId {
        let value = match self.products.contains(&v) {
            true => {
                let [a, b] = self.factors(v).map(|f| self.at(values, f, r, p));
                kb.mul(a, b)
            }
            false => self.at(values, v, r, p),
        };
        if kb.ty(value).lanes < lanes { kb.splat(value, lanes) } else { value }
    }

    fn factors(&self, product: ValueId) -> [ValueId; 2] {
        let node = self.scan.body.def(product).expect("a product is computed");
        [node.inputs[0], node.inputs[1]]
    }

    fn add_product(
        &self,
        kb: &mut KernelBuilder,
        product: ValueId,
        sum: ExprId,
        r: usize,
        p: usize,
        values: &Values,
    ) -> ExprId {
        let [a, b] = self.factors(product).map(|f| self.at(values, f, r, p));
        let lanes = kb.ty(sum).lanes;
        let [a, b] = [a, b].map(|x| if kb.ty(x).lanes < lanes { kb.splat(x, lanes) } else { x });
        kb.fma(a, b, sum)
    }

    /// Over the columns of row `r`: vectors first, then their lanes, then single columns.
    fn reduce(&self, kb: &mut KernelBuilder, op: RedOp, input: ValueId, r: usize, values: &Values) -> ExprId {
        let pieces = self.pieces(self.scan.extent(input));
        let fused = op == RedOp::Sum && self.products.contains(&input);
        let mut wide: Option<ExprId> = None;
        let mut single: Option<ExprId> = None;
        for (p, &(_, lanes)) in pieces.iter().enumerate() {
            let so_far = if lanes > 1 { &mut wide } else { &mut single };
            let sum = match *so_far {
                Some(sum) if fused => self.add_product(kb, input, sum, r, p, values),
                Some(sum) => {
                    let value = self.operand(kb, input, r, (p, lanes), values);
                    kb.binary(op.bin(), sum, value)
                }
                None => self.operand(kb, input, r, (p, lanes), values),
            };
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

/// Products with one user that adds them up, by itself or over the columns: they become part of a fused multiply-add.
fn fused_products(body: &Function) -> Vec<ValueId> {
    let uses = body.use_counts();
    let is_product =
        |v: &ValueId| uses[v.0 as usize] == 1 && body.def(*v).is_some_and(|n| n.op == Op::Binary(BinOp::Mul));
    let adds = |n: &&Node| matches!(n.op, Op::Binary(BinOp::Add) | Op::Reduce { op: RedOp::Sum, .. });
    let users = body.live().map(|(_, n)| n).filter(adds);
    users.flat_map(|n| &n.inputs).copied().filter(is_product).collect()
}

//! Products and tables: what has weights.

use super::Unshardable;
use super::partial_sums::MatmulOperands;
use super::placement::{FunctionSharder, ShardPlacement};
use super::shard_spec::{AxisParts, RowShardSpec, ShardSpec, constant_size, is_divisible};
use mlcc_ir::dim::Dim;
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{GraphNode, NodeId, ValueId};
use mlcc_ir::kernel::BinOp;
use mlcc_ir::module::{ParamId, ParamRole};
use mlcc_ir::ops::Op;
use mlcc_ir::sequences::{RowScope, row_scopes};
use mlcc_ir::types::DType;
use mlcc_quant::TILE;
use std::collections::BTreeSet;

/// A product with this many times more columns than rows is computed by every rank: sending its few results
/// would cost more than computing them (routers of experts, gates of one row).
const FLAT: i64 = 16;
/// A product with at most this many rows is computed by every rank if the ranks do not divide them.
const FEW: i64 = 128;
/// Whole numbers up to this are exact in f32.
const MOST_ROWS: i64 = 1 << 24;

impl FunctionSharder<'_, '_> {
    /// The parameter that a free value is made of, if it is one.
    pub fn weight(&self, mut v: ValueId) -> Option<ParamId> {
        loop {
            let node = self.f.defining_node(v)?;
            match node.op {
                Op::Param(p) => return Some(p),
                Op::Dequantize | Op::Cast(_) | Op::Permute { .. } | Op::Reshape { .. } | Op::Unary(_) => {
                    v = node.inputs[0];
                }
                _ => return None,
            }
        }
    }

    /// The parts of the rows of a weight.
    fn parts(&self, weight: ParamId, rows: &Dim, columns: &Dim) -> AxisParts {
        let sizes = (rows.as_const().unwrap_or(0), columns.as_const().unwrap_or(0));
        let role = self.s.old.params[weight].role;
        match self.s.plan.products.get(&weight) {
            Some(&parts) => parts,
            None if sizes.0.saturating_mul(FLAT) <= sizes.1 => AxisParts::WHOLE,
            None if sizes.0 <= FEW && !is_divisible(rows, self.ranks()) => AxisParts::WHOLE,
            // The thin half of a low-rank product: its other half has the rows of heads.
            None if role == ParamRole::LowRank && sizes.0 < sizes.1 => AxisParts::WHOLE,
            None => self.parts_of_rows(rows),
        }
    }

    /// A part of rows for each rank: of whole tiles where they do not divide.
    fn parts_of_rows(&self, rows: &Dim) -> AxisParts {
        match is_divisible(rows, TILE) && !is_divisible(rows, self.ranks()) {
            true => AxisParts { unit: TILE, ..AxisParts::new(self.ranks()) },
            false => AxisParts::new(self.ranks()),
        }
    }

    /// Asks for such a split of the products from which values are computed; false if all of them have been
    /// asked before.
    pub fn demand(&mut self, values: &[ValueId], parts: AxisParts) -> bool {
        self.demand_of(values, parts, |split, weight, _| !split.s.plan.products.contains_key(&weight))
    }

    /// Asks the same for products that are held as terms: they are needed in parts.
    pub fn demand_of_terms(&mut self, values: &[ValueId]) -> bool {
        let parts = AxisParts::new(self.ranks());
        self.demand_of(values, parts, |split, weight, product| {
            !split.s.plan.products.contains_key(&weight)
                && matches!(split.placement(product), ShardPlacement::Partial(_))
        })
    }

    /// The same once more, in the place of what others have asked for: of queries, keys and values their
    /// attention knows best.
    pub fn choose(&mut self, values: &[ValueId], parts: AxisParts) -> bool {
        self.demand_of(values, parts, |split, weight, _| {
            let plan = &mut split.s.plan;
            plan.products.get(&weight) != Some(&parts) && plan.chosen.insert(weight)
        })
    }

    /// The products that are meant by `wanted`, by weight and result: each only a few times, since two values
    /// that ask for different parts of one product would ask forever.
    fn demand_of(
        &mut self,
        values: &[ValueId],
        parts: AxisParts,
        wanted: impl Fn(&mut Self, ParamId, ValueId) -> bool,
    ) -> bool {
        let mut changed = false;
        let (mut open, mut seen) = (values.to_vec(), BTreeSet::new());
        while let Some(v) = open.pop() {
            if self.is_free(v) || !seen.insert(v) {
                continue;
            }
            let Some(node) = self.f.defining_node(v) else { continue };
            // The sum that an adapter adds has the requested parts, whatever it is computed from.
            if matches!(node.op, Op::MatMulExperts { .. }) && self.is_adapter(node.inputs[1]) {
                continue;
            }
            // A part of what a product gives.
            if let Op::Slice { axis, start, len } = &node.op
                && let Some(asked) = self.demand_range(node.inputs[0], (*axis, start, len), Some(parts))
            {
                changed |= asked;
                continue;
            }
            let weight = match node.op {
                Op::MatMul { .. } if self.is_free(node.inputs[1]) => self.weight(node.inputs[1]),
                _ => None,
            };
            match weight {
                Some(weight) if wanted(self, weight, node.outputs[0]) => {
                    self.s.plan.products.insert(weight, parts);
                    changed = true;
                }
                Some(_) => {}
                None => open.extend(&node.inputs),
            }
        }
        self.s.again |= changed;
        changed
    }

    pub fn matmul(&mut self, id: NodeId, node: &GraphNode, transposed: bool) -> Result<(), Unshardable> {
        let (x, w) = (node.inputs[0], node.inputs[1]);
        let weight = if self.dims(w).len() == 2 && self.is_free(w) { self.weight(w) } else { None };
        let Some(weight) = weight else { return self.matmul_of_values(node) };
        let last = self.dims(x).len() - 1;
        // Rows that the ranks have are theirs already.
        if let Some(cut) = self.shard_spec(x).filter(|cut| cut.axis < last) {
            let inputs = [self.shard(x, cut)?, self.replicate(w)?];
            let part = self.emit(node.op.clone(), &inputs)?;
            self.set_placement(node.outputs[0], ShardPlacement::Shard(part, cut));
            return Ok(());
        }
        let (rows, columns) = if transposed { (0, 1) } else { (1, 0) };
        let factors = MatmulOperands { x, weight: w, columns };
        // Values that others need in parts are not terms.
        let demanded = self.s.plan.products.contains_key(&weight);
        if !demanded && self.product_of_columns(node, &factors, |x, w| vec![x, w])? {
            return Ok(());
        }
        let dims = self.dims(w);
        let parts = self.parts(weight, &dims[rows], &dims[columns]);
        if parts.count == 1 {
            return self.replicated(node);
        }
        let segments = self.s.plan.segments.get(&weight).copied().filter(|s| s.iter().count() > 1);
        if segments.is_some_and(|segments| segments.iter().all(|(_, parts)| parts.count == 1)) {
            return self.replicated(node);
        }
        let cut = ShardSpec { axis: rows, parts, segments };
        if !self.has_part(w, cut)? {
            let plan = &self.s.plan;
            if !is_divisible(&dims[rows], parts.count * parts.unit) {
                let what = format!("{} rows of {}", dims[rows], self.s.old.params[weight].name);
                return Err(plan.divide(what));
            }
            return Err(plan.unsupported(self.label(id), "its weight has no rows of its own for each rank"));
        }
        let inputs = [self.replicate(x)?, self.shard(w, cut)?];
        let part = self.emit(node.op.clone(), &inputs)?;
        self.set_placement(node.outputs[0], ShardPlacement::Shard(part, cut.on_axis(last)));
        Ok(())
    }

    /// A product of two computed values, which may be split along an axis that is not summed over.
    fn matmul_of_values(&mut self, node: &GraphNode) -> Result<(), Unshardable> {
        let (a, b, out) = (node.inputs[0], node.inputs[1], node.outputs[0]);
        let rank = self.dims(out).len();
        let cut = self.of_result(a, out).or_else(|| self.of_result(b, out));
        match cut.filter(|cut| cut.axis + 2 < rank) {
            Some(cut) => self.broadcast(node, cut),
            None => self.replicated(node),
        }
    }

    /// Each rank has some rows of every expert; of rows by head (latent attention) it has its heads, and all
    /// matrices.
    pub fn experts(&mut self, id: NodeId, node: &GraphNode, experts: usize) -> Result<(), Unshardable> {
        let [x, w, ids] = [node.inputs[0], node.inputs[1], node.inputs[2]];
        // Parts of what an adapter adds are taken from all of it.
        if self.is_adapter(w) {
            return self.shard_adapted(node);
        }
        if let Some(cut) = self.shard_spec(x).filter(|cut| cut.axis == 1)
            && self.has_part(ids, cut)?
        {
            let inputs = [self.shard(x, cut)?, self.replicate(w)?, self.shard(ids, cut)?];
            let part = self.emit(node.op.clone(), &inputs)?;
            self.set_placement(node.outputs[0], ShardPlacement::Shard(part, cut));
            return Ok(());
        }
        let rows = self.dims(w)[0].floor_div(experts as i64);
        let weight = match self.f.defining_node(w) {
            Some(GraphNode { op: Op::Param(p), .. }) => Some((*p, false)),
            Some(GraphNode { op: Op::Dequantize, inputs, .. }) => self.weight(inputs[0]).map(|p| (p, true)),
            _ => None,
        };
        let Some((weight, stored)) = weight else {
            return Err(self.s.plan.unsupported(self.label(id), "its weight is not a parameter"));
        };
        let factors = MatmulOperands { x, weight: w, columns: 1 };
        if let ShardPlacement::Replicate(ids) = self.placement(ids)
            && self.product_of_columns(node, &factors, |x, w| vec![x, w, ids])?
        {
            return Ok(());
        }
        // Integer products of packed weights take only whole tiles: a part is to be computed as the whole is.
        let tile = if stored && is_divisible(&rows, TILE) { TILE } else { 1 };
        let parts = AxisParts::of_units(self.ranks(), tile, constant_size(&rows).unwrap_or(0));
        let weight = self.s.part_of(weight, RowShardSpec { outer: experts, parts, segments: None });
        let mut w = self.emit(Op::Param(weight), &[])?;
        if stored {
            w = self.emit(Op::Dequantize, &[w])?;
        }
        let inputs = [self.replicate(x)?, w, self.replicate(ids)?];
        let part = self.emit(node.op.clone(), &inputs)?;
        self.set_placement(node.outputs[0], ShardPlacement::Shard(part, ShardSpec::with_parts(2, parts)));
        Ok(())
    }

    /// Rows of a table: of an embedding each rank has some, of other values and tables all.
    pub fn gather_rows(&mut self, id: NodeId, node: &GraphNode) -> Result<(), Unshardable> {
        let (table, ids, out) = (node.inputs[0], node.inputs[1], node.outputs[0]);
        if self.dims(ids).len() > 1 {
            return self.replicated(node);
        }
        if let Some(cut) = self.shard_spec(table).filter(|cut| cut.axis > 0) {
            let inputs = [self.shard(table, cut)?, self.replicate(ids)?];
            let part = self.emit(node.op.clone(), &inputs)?;
            self.set_placement(out, ShardPlacement::Shard(part, cut));
            return Ok(());
        }
        let of_sequence =
            row_scopes(self.s.old, self.f).is_some_and(|s| s[ids.index()] == RowScope::Sequence);
        let weight = if self.is_free(table) && !of_sequence { self.weight(table) } else { None };
        let is_embedding = |p: &ParamId| self.s.old.params[*p].role == ParamRole::Embedding;
        let Some(weight) = weight.filter(is_embedding) else { return self.replicated(node) };
        let (rows, columns) = (&self.dims(table)[0], &self.dims(table)[1]);
        let parts = self.parts(weight, rows, columns);
        if parts.count != self.ranks() {
            return self.replicated(node);
        }
        let cut = ShardSpec::with_parts(0, parts);
        let few = rows.as_const().is_some_and(|rows| rows <= MOST_ROWS);
        if !few || !self.has_part(table, cut)? {
            return Err(self.s.plan.unsupported(self.label(id), "its table has no rows for each rank"));
        }
        let row = self.embedded(table, ids, cut)?;
        self.set_placement(out, ShardPlacement::Replicate(row));
        Ok(())
    }

    /// Every rank looks up all ids in its rows, and all take each row from the rank that has it.
    fn embedded(&mut self, table: ValueId, ids: ValueId, cut: ShardSpec) -> Result<ValueId, Unshardable> {
        let (parts, all) = (cut.parts, constant_size(&self.dims(table)[0]).unwrap_or(0));
        let (ranks, rows) = (parts.count, parts.len(all));
        let columns = self.dims(table)[1].clone();
        let ids = self.replicate(ids)?;
        let mut name = format!("rank.first_of_{rows}");
        if !parts.is_disjoint(all) {
            name = format!("{name}_in_{all}");
        }
        let first = self.s.add_number_param(&name, |rank| parts.part_start(all, rank) as f32);
        let first = self.emit(Op::Param(first), &[])?;
        let first = self.emit(Op::Cast(DType::I32), &[first])?;
        let own = self.emit(Op::Binary(BinOp::Sub), &[ids, first])?;
        let (zero, last) = (self.id(0)?, self.id(rows as i64 - 1)?);
        let own = self.emit(Op::Binary(BinOp::Max), &[own, zero])?;
        let own = self.emit(Op::Binary(BinOp::Min), &[own, last])?;
        let table = self.shard(table, cut)?;
        let found = self.emit(Op::Gather, &[table, own])?;
        let found = self.emit(Op::AllGather { ranks }, &[found])?;
        self.s.all_gathers += 1;
        let count = self.out.ty(ids).dims[0].clone();
        let ids = self.emit(Op::Reshape { dims: vec![count, Dim::from(1)] }, &[ids])?;
        let of_rank =
            |rank: usize| Op::Slice { axis: 1, start: columns.scale(rank as i64), len: columns.clone() };
        let mut row = self.emit(of_rank(0), &[found])?;
        for (rank, _) in parts.distinct_ranges(all).into_iter().skip(1) {
            let theirs = self.emit(of_rank(rank), &[found])?;
            let first = self.id(parts.part_start(all, rank) as i64)?;
            row = self.emit(Op::SelectGe, &[ids, first, theirs, row])?;
        }
        Ok(row)
    }

    fn id(&mut self, value: i64) -> Result<ValueId, Unshardable> {
        self.emit(Op::Constant { value: value as f64, dtype: DType::I32 }, &[])
    }
}

//! Products whose results are read apart: one matrix for several of a layer's values (gates, keys, values,
//! time steps of a recurrence). Each rank has a part of each of them.

use super::Unshardable;
use super::placement::{FunctionSharder, ShardPlacement};
use super::shard_spec::{AxisParts, AxisSegments, ShardSpec};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{FunctionKind, GraphNode, ValueId};
use mlcc_ir::module::ParamRole;
use mlcc_ir::ops::Op;
use std::collections::BTreeSet;

impl FunctionSharder<'_, '_> {
    /// A slice along the axis of the parts: of whole segments a rank has what it has of them.
    pub fn slice(
        &mut self,
        node: &GraphNode,
        (axis, start, len): (usize, &Dim, &Dim),
    ) -> Result<(), Unshardable> {
        let (x, out) = (node.inputs[0], node.outputs[0]);
        let (ShardPlacement::Shard(part, own), Some((first, count))) =
            (self.placement(x), constants(start, len))
        else {
            return self.replicated(node);
        };
        if let Some((at, cut)) = own.slice(first, count) {
            let local = cut.map_or(len.clone(), |cut| cut.part_size(len));
            let part = self.emit(Op::Slice { axis, start: Dim::from(at), len: local }, &[part])?;
            self.set_placement(
                out,
                cut.map_or(ShardPlacement::Replicate(part), |cut| ShardPlacement::Shard(part, cut)),
            );
            return Ok(());
        }
        // Where it was not asked for before, the function begins again.
        self.demand_range(x, (axis, start, len), None);
        self.replicated(node)
    }

    /// Asks for a split of the products which a range of columns comes from that keeps it together, in the
    /// given parts if there are any. `None` if it comes from no product; false if all of them were asked
    /// before.
    pub fn demand_range(
        &mut self,
        v: ValueId,
        (axis, start, len): (usize, &Dim, &Dim),
        parts: Option<AxisParts>,
    ) -> Option<bool> {
        let (start, len) = constants(start, len)?;
        if self.f.kind != FunctionKind::Entry || axis + 1 != self.dims(v).len() {
            return None;
        }
        let (mut found, mut changed) = (false, false);
        let (mut open, mut seen) = (vec![(v, start)], BTreeSet::new());
        while let Some((v, start)) = open.pop() {
            if self.is_free(v) || !seen.insert((v, start)) {
                continue;
            }
            let Some(node) = self.f.defining_node(v) else { continue };
            let (inputs, width) = (&node.inputs, self.dims(v).last().cloned());
            match &node.op {
                Op::MatMul { .. } if self.is_free(inputs[1]) => {
                    let asked = self.segment(node, start, len, parts);
                    found |= asked.is_some();
                    changed |= asked == Some(true);
                }
                Op::Slice { axis, start: first, .. } if axis + 1 == self.dims(v).len() => {
                    if let Some(first) = first.as_const().and_then(|first| usize::try_from(first).ok()) {
                        open.push((inputs[0], first + start));
                    }
                }
                Op::Concat { axis } if axis + 1 == self.dims(v).len() => {}
                Op::Unary(_)
                | Op::Cast(_)
                | Op::Binary(_)
                | Op::SelectGe
                | Op::Concat { .. }
                | Op::Slice { .. }
                | Op::Reshape { .. }
                | Op::SequenceSplit { .. }
                | Op::SequenceJoin
                | Op::OutputRows => {
                    let same = |x: &&ValueId| self.dims(**x).last().cloned() == width;
                    open.extend(inputs.iter().filter(same).map(|&x| (x, start)));
                }
                _ => {}
            }
        }
        self.s.again |= changed;
        found.then_some(changed)
    }

    /// Makes a range of the rows of a product's weight a segment; `None` if its rows are not split.
    fn segment(
        &mut self,
        node: &GraphNode,
        start: usize,
        len: usize,
        parts: Option<AxisParts>,
    ) -> Option<bool> {
        let weight = self.weight(node.inputs[1])?;
        // The thin halves of several low-rank products are gathered once.
        if self.s.old.params[weight].role == ParamRole::LowRank {
            return None;
        }
        let width = self.dims(node.outputs[0]).last()?.as_const().and_then(|w| usize::try_from(w).ok())?;
        if start + len > width || matches!(self.placement(node.outputs[0]), ShardPlacement::Partial(_)) {
            return None;
        }
        let ranks = self.ranks();
        let segments = &mut self.s.plan.segments;
        let known = segments
            .get(&weight)
            .copied()
            .or_else(|| AxisSegments::new(&[(width, AxisParts::new(ranks))]))?;
        let new = known.split_at(start, len, parts)?;
        Some(new != known && segments.insert(weight, new) != Some(new))
    }

    /// Asks that every rank has all of the ranges of products that values come from, where they cannot be
    /// split as requested; false if there are none, or they were asked before.
    pub fn demand_whole(&mut self, values: &[ValueId]) -> bool {
        let (mut open, mut seen) = (values.to_vec(), BTreeSet::new());
        let mut changed = false;
        while let Some(v) = open.pop() {
            if self.is_free(v) || !seen.insert(v) {
                continue;
            }
            let Some(node) = self.f.defining_node(v) else { continue };
            match &node.op {
                Op::Slice { axis, start, len } => {
                    match self.demand_range(node.inputs[0], (*axis, start, len), Some(AxisParts::WHOLE)) {
                        Some(asked) => changed |= asked,
                        None => open.extend(&node.inputs),
                    }
                }
                Op::MatMul { .. } | Op::Attention(_) | Op::Scan { .. } => {}
                Op::MatMulExperts { .. } if self.is_adapter(node.inputs[1]) => {}
                _ => open.extend(&node.inputs),
            }
        }
        changed
    }

    /// All of a value of which each rank has parts of segments.
    pub fn gather_segments(&mut self, part: ValueId, cut: ShardSpec) -> Result<ValueId, Unshardable> {
        let Some(segments) = cut.segments else { return Ok(part) };
        let (ranks, axis, local) = (self.ranks(), cut.axis, segments.rank_len());
        let mut whole = self.out.ty(part).dims.clone();
        // The part of the axis of each rank: they are joined as parts of one axis.
        let all = self.all_gather(part, axis, AxisParts::new(ranks), ranks * local)?;
        let (mut pieces, mut at) = (Vec::new(), 0);
        for (size, parts) in segments.iter() {
            for (number, piece) in parts.distinct_ranges(size) {
                let start = parts.rank(number, ranks) * local + at + piece.start;
                let slice = Op::Slice { axis, start: Dim::from(start), len: Dim::from(piece.len()) };
                pieces.push(self.emit(slice, &[all])?);
            }
            at += parts.len(size);
        }
        let all = self.emit(Op::Concat { axis }, &pieces)?;
        whole[axis] = Dim::from(segments.len());
        debug_assert_eq!(self.out.ty(all).dims, whole);
        Ok(all)
    }
}

/// The start and the length of a range, if both are constant.
fn constants(start: &Dim, len: &Dim) -> Option<(usize, usize)> {
    let constant = |dim: &Dim| usize::try_from(dim.as_const()?).ok();
    Some((constant(start)?, constant(len)?))
}

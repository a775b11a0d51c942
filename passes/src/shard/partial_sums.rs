//! Sums over ranks: a product of values of which each rank has a part takes its columns of the weight, and
//! its results are terms, one of each rank, as large as the result. They are gathered and added in the order
//! of the ranks where the sum is needed. Linear ops are done with the terms before: of several experts one
//! sum is left, and of branches that are added.

use super::Unshardable;
use super::placement::{FunctionSharder, ShardPlacement};
use super::shard_spec::{ShardSpec, is_divisible};
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{FunctionKind, GraphNode, ValueId};
use mlcc_ir::kernel::BinOp;
use mlcc_ir::module::ParamId;
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;

/// The weight of a product: its axis that is summed over, and the other operand.
pub(super) struct MatmulOperands {
    pub x: ValueId,
    pub weight: ValueId,
    pub columns: usize,
}

impl FunctionSharder<'_, '_> {
    /// A product as terms, if its operand is held in parts along the columns of its weight and it has no
    /// other reader. `finish` makes the node of the parts of both.
    pub fn product_of_columns(
        &mut self,
        node: &GraphNode,
        factors: &MatmulOperands,
        inputs: impl Fn(ValueId, ValueId) -> Vec<ValueId>,
    ) -> Result<bool, Unshardable> {
        let MatmulOperands { x, weight, columns } = *factors;
        let cut = ShardSpec::new(self.dims(x).len() - 1, self.ranks());
        let entry = self.f.kind == FunctionKind::Entry;
        // An element that two ranks have would be added twice.
        let overlaps = !is_divisible(&self.dims(x)[cut.axis], self.ranks());
        if !self.s.plan.sums || !entry || overlaps || self.shard_spec(x) != Some(cut) || self.uses(x) != 1 {
            return Ok(false);
        }
        let Some(w) = self.columns_of(weight, columns)? else { return Ok(false) };
        let x = self.shard(x, cut)?;
        let term = self.emit(node.op.clone(), &inputs(x, w))?;
        self.set_placement(node.outputs[0], ShardPlacement::Partial(term));
        Ok(true)
    }

    /// The rank's part of a weight along an axis.
    fn columns_of(&mut self, w: ValueId, axis: usize) -> Result<Option<ValueId>, Unshardable> {
        let Some(node) = self.f.defining_node(w) else { return Ok(None) };
        let axis = match &node.op {
            Op::Param(param) if self.dims(w).len() == 2 && axis == 1 => {
                self.whole_groups(*param)?;
                let part = self.s.columns_of(*param);
                return self.emit(Op::Param(part), &[]).map(Some);
            }
            Op::Param(_) if axis == 0 => {
                let cut = ShardSpec::new(axis, self.ranks());
                return if self.has_part(w, cut)? { self.shard(w, cut).map(Some) } else { Ok(None) };
            }
            Op::Dequantize | Op::Cast(_) | Op::Unary(_) => axis,
            Op::Permute { perm } => perm[axis],
            _ => return Ok(None),
        };
        let Some(x) = self.columns_of(node.inputs[0], axis)? else { return Ok(None) };
        self.emit(node.op.clone(), &[x]).map(Some)
    }

    /// Groups of a packed weight stay whole, so that its parts have the codes and scales that it has.
    fn whole_groups(&self, param: ParamId) -> Result<(), Unshardable> {
        let param = &self.s.old.params[param];
        let columns = &param.ty.dims[1];
        let group = match (param.ty.dtype, columns.as_const()) {
            (DType::Packed(format), Some(columns)) => format.group_size(columns as usize),
            _ => 1,
        };
        if is_divisible(columns, self.ranks() * group) {
            return Ok(());
        }
        let groups = if group > 1 { format!(" in groups of {group}") } else { String::new() };
        Err(self.s.plan.divide(format!("{columns} columns{groups} of {}", param.name)))
    }

    /// An op that is linear in what is held as terms, of the terms; false if it is none, or they would be
    /// more.
    pub fn of_terms(&mut self, node: &GraphNode) -> Result<bool, Unshardable> {
        let terms = node.inputs.iter().filter(|&&v| self.is_term(v)).count();
        if terms == 0 || node.inputs.iter().any(|&v| self.is_term(v) && self.uses(v) != 1) {
            return Ok(false);
        }
        let first = node.inputs[0];
        let linear = match &node.op {
            Op::Reshape { .. } | Op::Permute { .. } | Op::Slice { .. } => true,
            Op::SequenceSplit { .. } | Op::SequenceJoin | Op::OutputRows => true,
            Op::Reduce { op: mlcc_ir::compute::RedOp::Sum, .. } => true,
            Op::Binary(BinOp::Add | BinOp::Sub) => terms == 2,
            Op::Binary(BinOp::Mul) => terms == 1,
            Op::Binary(BinOp::Div) => terms == 1 && self.is_term(first),
            _ => false,
        };
        let out = node.outputs.first().copied();
        let Some(out) = out.filter(|_| linear) else { return Ok(false) };
        let size = |v: ValueId| super::dim_product(self.dims(v));
        let grows = matches!(node.op, Op::Binary(_))
            && node.inputs.iter().any(|&v| self.is_term(v) && size(v) != size(out));
        // A factor of which each rank has a part would be gathered.
        if grows || node.inputs.iter().any(|&v| self.shard_spec(v).is_some()) {
            return Ok(false);
        }
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for &v in &node.inputs {
            inputs.push(match self.placement(v) {
                ShardPlacement::Partial(term) => term,
                ShardPlacement::Replicate(_) | ShardPlacement::Shard(..) | ShardPlacement::Deferred => {
                    self.replicate(v)?
                }
            });
        }
        let term = self.emit(node.op.clone(), &inputs)?;
        self.set_placement(out, ShardPlacement::Partial(term));
        Ok(true)
    }

    fn is_term(&self, v: ValueId) -> bool {
        matches!(self.placement(v), ShardPlacement::Partial(_))
    }

    /// The number of inputs and outputs of the function that read a value.
    fn uses(&self, v: ValueId) -> usize {
        self.uses[v.index()]
    }

    /// The sum of the terms of all ranks, added in their order: on all of them the same bits.
    pub fn sum(&mut self, term: ValueId) -> Result<ValueId, Unshardable> {
        if self.f.kind != FunctionKind::Entry {
            return Err(Unshardable::Gathers);
        }
        self.s.all_gathers += 1;
        let ranks = self.ranks();
        let dims = self.out.ty(term).dims.clone();
        let Some(last) = dims.last() else {
            return Err(self.s.plan.unsupported(format!("a number of @{}", self.f.name), "it is a sum"));
        };
        let all = self.emit(Op::AllGather { ranks }, &[term])?;
        let axis = dims.len() - 1;
        let of_rank = |rank: usize| Op::Slice { axis, start: last.scale(rank as i64), len: last.clone() };
        let mut sum = self.emit(of_rank(0), &[all])?;
        for rank in 1..ranks {
            let next = self.emit(of_rank(rank), &[all])?;
            sum = self.emit(Op::Binary(BinOp::Add), &[sum, next])?;
        }
        Ok(sum)
    }
}

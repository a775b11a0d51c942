//! Values that every rank has and that are needed in parts: a rank computes its part again, from parts of the
//! inputs, by the same ops and so with the same bits. Values without readers are removed then.

use super::Unshardable;
use super::placement::{FunctionSharder, reshape_shard};
use super::shard_spec::ShardSpec;
use mlcc_ir::compute::RedOp;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;

impl FunctionSharder<'_, '_> {
    /// The part of a value that is held whole; where nothing is to be emitted, some value if there is one.
    pub fn recompute(
        &mut self,
        v: ValueId,
        cut: ShardSpec,
        emit: bool,
    ) -> Result<Option<ValueId>, Unshardable> {
        let known = self.recomputed.get(&(v, cut)).copied();
        match known {
            Some(false) => return Ok(None),
            Some(true) if !emit => return Ok(Some(v)),
            _ => {}
        }
        let found = self.recompute_now(v, cut, emit)?;
        self.recomputed.insert((v, cut), found.is_some());
        Ok(found)
    }

    fn recompute_now(
        &mut self,
        v: ValueId,
        cut: ShardSpec,
        emit: bool,
    ) -> Result<Option<ValueId>, Unshardable> {
        let Some(node) = self.f.defining_node(v) else { return Ok(None) };
        let last = self.dims(v).len() - 1;
        let from = match &node.op {
            Op::Concat { axis } if *axis == cut.axis => return self.fewer_copies(v, cut, emit),
            Op::Concat { .. } => {
                let mut parts = Vec::with_capacity(node.inputs.len());
                for &x in &node.inputs {
                    let Some(part) = self.find_part(x, cut, emit)? else { return Ok(None) };
                    parts.push(part);
                }
                return if emit { self.emit(node.op.clone(), &parts).map(Some) } else { Ok(Some(v)) };
            }
            Op::Binary(_) | Op::SelectGe => return self.elementwise_part(v, cut, emit),
            Op::RmsNorm { eps } if cut.axis == last => return self.norm_part(v, *eps, cut, emit),
            Op::MatMulExperts { experts } if cut.axis == last => {
                return self.adapted_part(v, *experts, cut, emit);
            }
            Op::Unary(_) | Op::Cast(_) => cut,
            Op::RmsNorm { .. } | Op::LayerNorm { .. } | Op::Softmax => cut,
            Op::Slice { axis, .. } | Op::Reduce { axis, .. } if *axis != cut.axis => cut,
            Op::SequenceSplit { .. } | Op::SequenceJoin | Op::OutputRows if cut.axis > 0 => cut,
            Op::Permute { perm } => cut.on_axis(perm[cut.axis]),
            Op::Reshape { .. } => match reshape_shard(self.dims(v), self.dims(node.inputs[0]), cut) {
                Some(from) => from,
                None => return Ok(None),
            },
            _ => return Ok(None),
        };
        if matches!(node.op, Op::LayerNorm { .. } | Op::Softmax) && cut.axis == last {
            return Ok(None);
        }
        let Some(x) = self.find_part(node.inputs[0], from, emit)? else { return Ok(None) };
        if !emit {
            return Ok(Some(v));
        }
        let mut inputs = vec![x];
        inputs.extend(self.replicate_all(&node.inputs[1..])?);
        let op = self.local_op(&node.op, v, cut);
        self.emit(op, &inputs).map(Some)
    }

    /// The part of a norm over the axis of the parts: its length is that of the whole row, as `Op::RmsNorm`
    /// decomposes.
    fn norm_part(
        &mut self,
        v: ValueId,
        eps: f64,
        cut: ShardSpec,
        emit: bool,
    ) -> Result<Option<ValueId>, Unshardable> {
        let Some(node) = self.f.defining_node(v) else { return Ok(None) };
        let (x, weight, axis) = (node.inputs[0], node.inputs[1], cut.axis);
        if !self.has_part(x, cut)? || !self.has_part(weight, cut.on_axis(0))? {
            return Ok(None);
        }
        if !emit {
            return Ok(Some(v));
        }
        let size = self.dims(x)[axis].as_const().unwrap_or(1);
        let all = self.replicate(x)?;
        let number = |value| Op::Constant { value, dtype: DType::F32 };
        let square = self.emit(Op::Binary(BinOp::Mul), &[all, all])?;
        let sum = self.emit(Op::Reduce { op: RedOp::Sum, axis }, &[square])?;
        let inverse = self.emit(number(1.0 / size as f64), &[])?;
        let mean = self.emit(Op::Binary(BinOp::Mul), &[sum, inverse])?;
        let eps = self.emit(number(eps), &[])?;
        let shifted = self.emit(Op::Binary(BinOp::Add), &[mean, eps])?;
        let scale = self.emit(Op::Unary(UnOp::Rsqrt), &[shifted])?;
        let (x, weight) = (self.shard(x, cut)?, self.shard(weight, cut.on_axis(0))?);
        let unit = self.emit(Op::Binary(BinOp::Mul), &[x, scale])?;
        self.emit(Op::Binary(BinOp::Mul), &[unit, weight]).map(Some)
    }
}

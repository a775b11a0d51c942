//! Norms and softmax, by decomposition.

use super::{Op, OpError, invalid_input};
use crate::compute::RedOp;
use crate::graph::{Function, ValueId};
use crate::kernel::{BinOp, UnOp};
use crate::module::Module;
use crate::types::{DType, TensorType};

pub(super) fn infer(op: &Op, inputs: &[&TensorType]) -> Result<Vec<TensorType>, OpError> {
    let wanted = match op {
        Op::LayerNorm { .. } => 3,
        Op::RmsNorm { .. } => 2,
        _ => 1,
    };
    if inputs.len() != wanted {
        return invalid_input(op, format!("takes {wanted} inputs, not {}", inputs.len()));
    }
    let x = inputs[0];
    let Some(last) = x.dims.last() else { return invalid_input(op, "takes at least one axis") };
    if x.dtype != DType::F32 || last.as_const().is_none() && !matches!(op, Op::Softmax) {
        return invalid_input(op, format!("takes f32 with a last axis of constant size, not {x}"));
    }
    for vector in &inputs[1..] {
        if vector.dtype != x.dtype || vector.dims.as_slice() != std::slice::from_ref(last) {
            return invalid_input(op, format!("weights are {vector}, the last axis has {last}"));
        }
    }
    Ok(vec![x.clone()])
}

/// Appends nodes to a function with few words.
struct NormExpansion<'a> {
    module: &'a Module,
    f: &'a mut Function,
}

impl NormExpansion<'_> {
    fn op(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, OpError> {
        Ok(self.f.append(self.module, op, inputs)?[0])
    }
    fn bin(&mut self, op: BinOp, a: ValueId, b: ValueId) -> Result<ValueId, OpError> {
        self.op(Op::Binary(op), &[a, b])
    }
    fn un(&mut self, op: UnOp, a: ValueId) -> Result<ValueId, OpError> {
        self.op(Op::Unary(op), &[a])
    }
    fn constant(&mut self, value: f64) -> Result<ValueId, OpError> {
        self.op(Op::Constant { value, dtype: DType::F32 }, &[])
    }
    /// Mean over the last axis, kept with size 1.
    fn mean(&mut self, x: ValueId) -> Result<ValueId, OpError> {
        let axis = self.f.ty(x).rank() - 1;
        let size = self.f.ty(x).dims[axis].as_const().unwrap_or(1);
        let sum = self.op(Op::Reduce { op: RedOp::Sum, axis }, &[x])?;
        let inverse = self.constant(1.0 / size as f64)?;
        self.bin(BinOp::Mul, sum, inverse)
    }
    /// `x / sqrt(mean(x^2) + eps)`.
    fn unit_variance(&mut self, x: ValueId, eps: f64) -> Result<ValueId, OpError> {
        let square = self.bin(BinOp::Mul, x, x)?;
        let variance = self.mean(square)?;
        let eps = self.constant(eps)?;
        let shifted = self.bin(BinOp::Add, variance, eps)?;
        let inverse = self.un(UnOp::Rsqrt, shifted)?;
        self.bin(BinOp::Mul, x, inverse)
    }
}

pub(super) fn decompose(
    op: &Op,
    module: &Module,
    f: &mut Function,
    inputs: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let mut e = NormExpansion { module, f };
    let x = inputs[0];
    let out = match op {
        Op::LayerNorm { eps } => {
            let mean = e.mean(x)?;
            let centred = e.bin(BinOp::Sub, x, mean)?;
            let unit = e.unit_variance(centred, *eps)?;
            let scaled = e.bin(BinOp::Mul, unit, inputs[1])?;
            e.bin(BinOp::Add, scaled, inputs[2])?
        }
        Op::RmsNorm { eps } => {
            let unit = e.unit_variance(x, *eps)?;
            e.bin(BinOp::Mul, unit, inputs[1])?
        }
        Op::Softmax => {
            let axis = e.f.ty(x).rank() - 1;
            let max = e.op(Op::Reduce { op: RedOp::Max, axis }, &[x])?;
            let shifted = e.bin(BinOp::Sub, x, max)?;
            let weights = e.un(UnOp::Exp, shifted)?;
            let sum = e.op(Op::Reduce { op: RedOp::Sum, axis }, &[weights])?;
            e.bin(BinOp::Div, weights, sum)?
        }
        _ => return invalid_input(op, "is not a norm"),
    };
    Ok(vec![out])
}

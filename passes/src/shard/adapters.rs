//! Products of adapters in slots. Their factors are small, and all of them are on every rank, in memory that
//! ranks of one process share. A rank computes all of the first product, and of the second one the rows that
//! it has of the product that the adapter changes.

use super::Unshardable;
use super::placement::{FunctionSharder, ShardPlacement};
use super::shard_spec::{ShardSpec, constant_size};
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{GraphNode, ValueId};
use mlcc_ir::kernel::BinOp;
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;

impl FunctionSharder<'_, '_> {
    /// True if a weight is a factor in slots.
    pub fn is_adapter(&self, weight: ValueId) -> bool {
        match self.f.defining_node(weight) {
            Some(GraphNode { op: Op::Param(param), .. }) => self.s.old.params[*param].is_adapter(),
            _ => false,
        }
    }

    /// Computes all of a product with factors in slots, on every rank. Its input is gathered once for it and
    /// for the product that the adapter changes, which reads the same rows in another shape.
    pub fn shard_adapted(&mut self, node: &GraphNode) -> Result<(), Unshardable> {
        let [x, w, ids] = [node.inputs[0], node.inputs[1], node.inputs[2]];
        let whole = match self.f.defining_node(x) {
            Some(GraphNode { op: Op::Reshape { dims }, inputs, .. }) if self.shard_spec(x).is_some() => {
                let rows = self.replicate(inputs[0])?;
                self.emit(Op::Reshape { dims: dims.clone() }, &[rows])?
            }
            _ => self.replicate(x)?,
        };
        let inputs = [whole, self.replicate(w)?, self.replicate(ids)?];
        let product = self.emit(node.op.clone(), &inputs)?;
        self.set_placement(node.outputs[0], ShardPlacement::Replicate(product));
        Ok(())
    }

    /// The part of a product with the matrix of a slot. The rows that all ranks need are one matrix, of which
    /// each rank takes its own.
    pub fn adapted_part(
        &mut self,
        v: ValueId,
        matrices: usize,
        cut: ShardSpec,
        emit: bool,
    ) -> Result<Option<ValueId>, Unshardable> {
        let Some(node) = self.f.defining_node(v) else { return Ok(None) };
        let [x, w, ids] = [node.inputs[0], node.inputs[1], node.inputs[2]];
        let one_each = self.dims(ids).last().and_then(constant_size) == Some(1);
        let Some(rows) = constant_size(&self.dims(v)[cut.axis]) else { return Ok(None) };
        if !self.is_adapter(w) || !one_each {
            return Ok(None);
        }
        let by_rank: Vec<_> =
            (0..self.ranks()).map(|rank| cut.rank_ranges(rows, rank, self.ranks())).collect();
        let borders = by_rank.iter().flatten().flat_map(|range| [range.start, range.len()]);
        let unit = borders.fold(rows, greatest_common_divisor);
        if unit == 0 {
            return Ok(None);
        }
        if !emit {
            return Ok(Some(v));
        }
        let units = |ranges: &Vec<std::ops::Range<usize>>| -> Vec<f32> {
            let of = |range: &std::ops::Range<usize>| range.start / unit..range.end / unit;
            ranges.iter().flat_map(of).map(|number| number as f32).collect()
        };
        let numbers: Vec<_> = by_rank.iter().map(units).collect();
        let count = numbers[0].len();
        let own = self.s.add_numbers_param("rank.rows_of_adapters", numbers);
        let own = self.emit(Op::Param(own), &[])?;
        let own = self.emit(Op::Cast(DType::I32), &[own])?;
        let own = self.emit(Op::Reshape { dims: vec![Dim::from(1), Dim::from(count)] }, &[own])?;
        let of_matrix = Op::Constant { value: (rows / unit) as f64, dtype: DType::I32 };
        let of_matrix = self.emit(of_matrix, &[])?;
        let ids = self.replicate(ids)?;
        let first = self.emit(Op::Binary(BinOp::Mul), &[ids, of_matrix])?;
        let ids = self.emit(Op::Binary(BinOp::Add), &[first, own])?;
        let (x, w) = (self.replicate(x)?, self.replicate(w)?);
        let op = Op::MatMulExperts { experts: matrices * (rows / unit) };
        let part = self.emit(op, &[x, w, ids])?;
        let n = self.dims(v)[0].clone();
        let dims = vec![n, Dim::from(1), Dim::from(count * unit)];
        self.emit(Op::Reshape { dims }, &[part]).map(Some)
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

//! Placements of values, and the ways in which a rank gets all of a value or its part of it.

use super::shard_spec::{AxisParts, RowShardSpec, ShardSpec, constant_size, cut_type};
use super::{ModuleSharder, Unshardable, dim_product};
use mlcc_ir::dim::Dim;
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{Function, FunctionKind, GraphNode, NodeId, ValueId};
use mlcc_ir::ops::Op;
use mlcc_ir::text::node_label;
use mlcc_ir::types::DType;
use std::collections::BTreeMap;
use std::ops::Range;

/// The placement of a value of the old function in the new one.
#[allow(
    clippy::large_enum_variant,
    reason = "there is one for each value of a function, while it is rebuilt"
)]
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum ShardPlacement {
    /// Every rank has the value.
    Replicate(ValueId),
    /// Each rank has a part.
    Shard(ValueId, ShardSpec),
    /// The value is the sum of what the ranks have, each a term of its size.
    Partial(ValueId),
    /// Made from parameters, constants and states where it is needed.
    Deferred,
}

/// A function while it is rebuilt.
pub(super) struct FunctionSharder<'s, 'a> {
    pub s: &'s mut ModuleSharder<'a>,
    pub f: &'a Function,
    pub out: Function,
    placements: Vec<Option<ShardPlacement>>,
    /// The number of inputs and outputs that read each value.
    pub uses: Vec<usize>,
    wholes: BTreeMap<ValueId, ValueId>,
    shards: BTreeMap<(ValueId, ShardSpec), ValueId>,
    /// True for values that every rank has and that can be computed in parts.
    pub recomputed: BTreeMap<(ValueId, ShardSpec), bool>,
}

impl<'s, 'a> FunctionSharder<'s, 'a> {
    pub fn new(
        s: &'s mut ModuleSharder<'a>,
        f: &'a Function,
        inputs: &[Option<ShardSpec>],
    ) -> FunctionSharder<'s, 'a> {
        let mut out = Function::new(f.name.clone(), f.kind);
        let mut placements = vec![None; f.values.len()];
        for (&v, &cut) in f.inputs.iter().zip(inputs) {
            let mut ty = f.ty(v).clone();
            cut_type(&mut ty, cut);
            let input = out.add_input(ty);
            placements[v.index()] =
                Some(cut.map_or(ShardPlacement::Replicate(input), |cut| ShardPlacement::Shard(input, cut)));
        }
        let mut uses = vec![0; f.values.len()];
        let inputs = f.live_nodes().flat_map(|(_, node)| &node.inputs);
        inputs.chain(&f.outputs).for_each(|v| uses[v.index()] += 1);
        let (wholes, shards, recomputed) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        FunctionSharder { s, f, out, placements, uses, wholes, shards, recomputed }
    }

    pub fn ranks(&self) -> usize {
        self.s.plan.ranks
    }
    /// Old dims of an old value.
    pub fn dims(&self, v: ValueId) -> &'a [Dim] {
        &self.f.ty(v).dims
    }
    /// The placement of a value; values are defined before they are used.
    pub fn placement(&self, v: ValueId) -> ShardPlacement {
        self.placements[v.index()].unwrap_or(ShardPlacement::Deferred)
    }
    pub fn shard_spec(&self, v: ValueId) -> Option<ShardSpec> {
        match self.placement(v) {
            ShardPlacement::Shard(_, cut) => Some(cut),
            _ => None,
        }
    }
    pub fn is_free(&self, v: ValueId) -> bool {
        self.placement(v) == ShardPlacement::Deferred
    }
    pub fn set_placement(&mut self, v: ValueId, held: ShardPlacement) {
        self.placements[v.index()] = Some(held);
    }
    /// `function @f, %3 = op`, of an old node.
    pub fn label(&self, id: NodeId) -> String {
        format!("{} of @{}", node_label(self.f, id), self.f.name)
    }
    pub fn emit(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, Unshardable> {
        Ok(self.out.append(&self.s.new, op, inputs)?[0])
    }

    /// All of a value, on every rank.
    pub fn replicate(&mut self, v: ValueId) -> Result<ValueId, Unshardable> {
        if let Some(&whole) = self.wholes.get(&v) {
            return Ok(whole);
        }
        let whole = match self.placement(v) {
            ShardPlacement::Replicate(whole) => whole,
            ShardPlacement::Shard(part, cut) => self.gather(part, cut, &self.dims(v)[cut.axis])?,
            ShardPlacement::Partial(term) => self.sum(term)?,
            ShardPlacement::Deferred => self.free_whole(v)?,
        };
        self.wholes.insert(v, whole);
        Ok(whole)
    }

    pub fn replicate_all(&mut self, values: &[ValueId]) -> Result<Vec<ValueId>, Unshardable> {
        values.iter().map(|&v| self.replicate(v)).collect()
    }

    /// True if a rank can have its part of a value without an all-gather.
    pub fn has_part(&mut self, v: ValueId, cut: ShardSpec) -> Result<bool, Unshardable> {
        Ok(self.find_part(v, cut, false)?.is_some())
    }

    /// The rank's part of a value that has one.
    pub fn shard(&mut self, v: ValueId, cut: ShardSpec) -> Result<ValueId, Unshardable> {
        match self.find_part(v, cut, true)? {
            Some(part) => Ok(part),
            None => Err(self.s.plan.unsupported(format!("a value of @{}", self.f.name), "it has no part")),
        }
    }

    /// A part; where nothing is to be emitted, some value if there is one.
    pub fn find_part(
        &mut self,
        v: ValueId,
        cut: ShardSpec,
        emit: bool,
    ) -> Result<Option<ValueId>, Unshardable> {
        if let Some(&part) = self.shards.get(&(v, cut)) {
            return Ok(Some(part));
        }
        if self.dims(v).get(cut.axis).is_none_or(|dim| !cut.fits_dim(dim)) {
            return Ok(None);
        }
        let part = match self.placement(v) {
            ShardPlacement::Shard(part, own) => return Ok((own == cut).then_some(part)),
            ShardPlacement::Replicate(_) => self.recompute(v, cut, emit)?,
            ShardPlacement::Partial(_) => None,
            ShardPlacement::Deferred => self.free_part(v, cut, emit)?,
        };
        if let (Some(part), true) = (part, emit) {
            self.shards.insert((v, cut), part);
        }
        Ok(part)
    }

    /// Copies of one value along an axis: a part has fewer of them.
    pub fn fewer_copies(
        &mut self,
        v: ValueId,
        cut: ShardSpec,
        emit: bool,
    ) -> Result<Option<ValueId>, Unshardable> {
        let Some(GraphNode { op: Op::Concat { axis }, inputs, .. }) = self.f.defining_node(v) else {
            return Ok(None);
        };
        let same = inputs.iter().all(|x| x == &inputs[0]);
        let sizes =
            constant_size(&self.dims(v)[cut.axis]).zip(constant_size(&self.dims(inputs[0])[cut.axis]));
        let Some((all, one)) = sizes.filter(|&(_, one)| one > 0) else { return Ok(None) };
        let len = cut.parts.len(all);
        if *axis != cut.axis || cut.segments.is_some() || !same || !len.is_multiple_of(one) {
            return Ok(None);
        }
        if !emit {
            return Ok(Some(v));
        }
        let copy = self.replicate(inputs[0])?;
        self.emit(Op::Concat { axis: *axis }, &vec![copy; len / one]).map(Some)
    }

    /// The node of a value that is free.
    fn free_node(&self, v: ValueId) -> Result<&'a GraphNode, Unshardable> {
        let f: &'a Function = self.f;
        f.defining_node(v)
            .ok_or_else(|| self.s.plan.unsupported(format!("an input of @{}", f.name), "it is not held"))
    }

    fn free_whole(&mut self, v: ValueId) -> Result<ValueId, Unshardable> {
        let node = self.free_node(v)?;
        if let Op::StateRead(state) = node.op
            && let Some(cut) = self.s.state_shard(state, None)
        {
            let part = self.emit(node.op.clone(), &[])?;
            return self.gather(part, cut, &self.dims(v)[cut.axis]);
        }
        let inputs = self.replicate_all(&node.inputs)?;
        self.emit(node.op.clone(), &inputs)
    }

    fn free_part(&mut self, v: ValueId, cut: ShardSpec, emit: bool) -> Result<Option<ValueId>, Unshardable> {
        let node = self.free_node(v)?;
        let (op, inputs) = (&node.op, &node.inputs);
        let from = match op {
            Op::Param(p) if cut.axis == 0 && emit => {
                let rows = RowShardSpec { outer: 1, parts: cut.parts, segments: cut.segments };
                let part = self.s.part_of(*p, rows);
                return self.emit(Op::Param(part), &[]).map(Some);
            }
            Op::Param(_) if cut.axis == 0 => return Ok(Some(v)),
            // Weights of convolutions, which are stored by channels.
            Op::Param(p) if self.f.ty(v).dtype != DType::F32 || !self.s.is_transposed(*p) => return Ok(None),
            Op::Param(_) if !emit => return Ok(Some(v)),
            Op::Param(p) => {
                let part = self.s.columns_by(*p, cut);
                return self.emit(Op::Param(part), &[]).map(Some);
            }
            Op::StateRead(state) => {
                let known = self.s.states.get(state).copied();
                return match known {
                    Some(other) if other != Some(cut) => Ok(None),
                    _ if !emit => Ok(Some(v)),
                    _ => {
                        self.s.state_shard(*state, Some(cut));
                        self.emit(op.clone(), &[]).map(Some)
                    }
                };
            }
            Op::Dequantize | Op::Unary(_) | Op::Cast(_) => cut,
            Op::Slice { axis, .. } if *axis != cut.axis => cut,
            Op::Permute { perm } => cut.on_axis(perm[cut.axis]),
            Op::Reshape { .. } => match reshape_shard(self.dims(v), self.dims(inputs[0]), cut) {
                Some(from) => from,
                None => return Ok(None),
            },
            Op::Binary(_) | Op::SelectGe => return self.elementwise_part(v, cut, emit),
            _ => return Ok(None),
        };
        let Some(x) = self.find_part(inputs[0], from, emit)? else { return Ok(None) };
        if !emit {
            return Ok(Some(v));
        }
        let op = self.local_op(op, v, cut);
        self.emit(op, &[x]).map(Some)
    }

    pub fn elementwise_part(
        &mut self,
        v: ValueId,
        cut: ShardSpec,
        emit: bool,
    ) -> Result<Option<ValueId>, Unshardable> {
        let node = self.free_node(v)?;
        let mut parts = Vec::with_capacity(node.inputs.len());
        for &x in &node.inputs {
            let part = match self.operand_shard(x, v, cut) {
                Some(cut) => self.find_part(x, cut, emit)?,
                None if emit => Some(self.replicate(x)?),
                None => Some(x),
            };
            match part {
                Some(part) => parts.push(part),
                None => return Ok(None),
            }
        }
        if !emit {
            return Ok(Some(v));
        }
        self.emit(node.op.clone(), &parts).map(Some)
    }

    /// The cut of an operand that goes with a cut of the result; `None` where the operand has one row for all
    /// there.
    pub fn operand_shard(&self, x: ValueId, result: ValueId, cut: ShardSpec) -> Option<ShardSpec> {
        let (rank, own) = (self.dims(result).len(), self.dims(x).len());
        let axis = (cut.axis + own).checked_sub(rank)?;
        (self.dims(x)[axis] != Dim::from(1)).then(|| cut.on_axis(axis))
    }

    /// An op with the sizes of a part of its result.
    pub fn local_op(&self, op: &Op, result: ValueId, cut: ShardSpec) -> Op {
        match op {
            Op::Reshape { .. } => {
                let mut ty = self.f.ty(result).clone();
                cut_type(&mut ty, Some(cut));
                Op::Reshape { dims: ty.dims }
            }
            other => other.clone(),
        }
    }

    /// Adds an all-gather of parts with this many elements, which are joined along their axis.
    fn gather(&mut self, part: ValueId, cut: ShardSpec, of: &Dim) -> Result<ValueId, Unshardable> {
        if self.f.kind != FunctionKind::Entry {
            return Err(Unshardable::Gathers);
        }
        match (cut.segments, constant_size(of)) {
            (Some(_), _) => self.gather_segments(part, cut),
            (None, Some(size)) => self.all_gather(part, cut.axis, cut.parts, size),
            (None, None) => Err(self.s.plan.unsupported(format!("an axis of {of} elements"), "it varies")),
        }
    }

    /// The same where the axis has no segments.
    pub fn all_gather(
        &mut self,
        part: ValueId,
        axis: usize,
        parts: AxisParts,
        size: usize,
    ) -> Result<ValueId, Unshardable> {
        self.s.all_gathers += 1;
        let ranks = self.ranks();
        let mut whole = self.out.ty(part).dims.clone();
        let inner = dim_product(&whole[axis + 1..]);
        let flat: Vec<Dim> = whole[..axis].iter().cloned().chain([dim_product(&whole[axis..])]).collect();
        let flat = if flat == whole { part } else { self.emit(Op::Reshape { dims: flat }, &[part])? };
        let all = self.emit(Op::AllGather { ranks }, &[flat])?;
        let len = parts.len(size);
        let mut slices = Vec::new();
        for range in gathered_ranges(parts, size, ranks).into_iter().filter(|range| range.len() < ranks * len)
        {
            let [start, len] = [range.start, range.len()].map(|elements| inner.scale(elements as i64));
            slices.push(self.emit(Op::Slice { axis, start, len }, &[all])?);
        }
        let all = match slices.as_slice() {
            [] => all,
            &[one] => one,
            _ => self.emit(Op::Concat { axis }, &slices)?,
        };
        whole[axis] = Dim::from(size);
        match self.out.ty(all).dims == whole {
            true => Ok(all),
            false => self.emit(Op::Reshape { dims: whole }, &[all]),
        }
    }

    /// Outputs: whole ones of an entry function, those of a body as they are.
    pub fn finish_outputs(&mut self) -> Result<Vec<Option<ShardSpec>>, Unshardable> {
        let f = self.f;
        let mut cuts = Vec::with_capacity(f.outputs.len());
        for &v in &f.outputs {
            let (output, cut) = match self.placement(v) {
                ShardPlacement::Shard(part, cut) if f.kind != FunctionKind::Entry => (part, Some(cut)),
                _ => (self.replicate(v)?, None),
            };
            self.out.outputs.push(output);
            cuts.push(cut);
        }
        Ok(cuts)
    }
}

/// The ranges in which the elements of an axis lie in the concatenated parts of all ranks.
fn gathered_ranges(parts: AxisParts, size: usize, ranks: usize) -> Vec<Range<usize>> {
    let len = parts.len(size);
    let mut all: Vec<Range<usize>> = Vec::new();
    for (number, piece) in parts.distinct_ranges(size) {
        let first = parts.rank(number, ranks) * len;
        match all.last_mut() {
            Some(last) if last.end == first + piece.start => last.end = first + piece.end,
            _ => all.push(first + piece.start..first + piece.end),
        }
    }
    all
}

/// The axis of `to` that a cut of `from` is a cut of, where both are the same elements in row-major order.
pub(super) fn reshape_shard(from: &[Dim], to: &[Dim], cut: ShardSpec) -> Option<ShardSpec> {
    let axis = reshaped_axis(from, to, cut.axis)?;
    let sizes = (constant_size(&from[cut.axis])?, constant_size(&to[axis])?);
    let cut = cut.on_axis(axis);
    match cut.segments {
        None => Some(ShardSpec { parts: cut.parts.regrouped(sizes.0, sizes.1)?, ..cut }),
        Some(_) => (sizes.0 == sizes.1).then_some(cut),
    }
}

/// The axis of `to` that begins where an axis of `from` does.
pub(super) fn reshaped_axis(from: &[Dim], to: &[Dim], axis: usize) -> Option<usize> {
    let before = dim_product(&from[..axis]);
    let begins = |&b: &usize| dim_product(&to[..b]) == before && to[b] != Dim::from(1);
    (0..to.len()).find(begins)
}

//! The placement of results of ops whose inputs are held in parts.

use super::Unshardable;
use super::placement::{FunctionSharder, ShardPlacement, reshape_shard, reshaped_axis};
use super::shard_spec::{AxisParts, ShardSpec, constant_size};
use mlcc_ir::graph::{FunctionKind, GraphNode, NodeId, ValueId};
use mlcc_ir::module::{FuncId, StateId};
use mlcc_ir::ops::{AttentionOp, Op};

impl FunctionSharder<'_, '_> {
    /// Rebuilds one node.
    pub fn node(&mut self, id: NodeId, node: &GraphNode) -> Result<(), Unshardable> {
        let inputs = &node.inputs;
        if self.is_made_of_free(node) {
            self.set_placement(node.outputs[0], ShardPlacement::Deferred);
            return Ok(());
        }
        if self.of_terms(node)? {
            return Ok(());
        }
        match &node.op {
            Op::StateRead(state) => {
                // The cut of this state is known.
                let cut = self.s.states.get(state).copied().flatten();
                let value = self.emit(node.op.clone(), &[])?;
                self.set_placement(
                    node.outputs[0],
                    cut.map_or(ShardPlacement::Replicate(value), |cut| ShardPlacement::Shard(value, cut)),
                );
                Ok(())
            }
            Op::StateWrite(state) => self.state_write(*state, inputs[0]),
            Op::CacheAppend(state) => self.cache_append(*state, node),
            Op::MatMul { transpose_b } => self.matmul(id, node, *transpose_b),
            Op::MatMulExperts { experts } => self.experts(id, node, *experts),
            Op::Gather => self.gather_rows(id, node),
            Op::Attention(attention) => self.attention(id, node, attention),
            Op::Scan { body, carries, seqs } => self.scan(id, node, *body, (*carries, *seqs)),
            Op::Unary(_) | Op::Cast(_) | Op::Binary(_) | Op::SelectGe => self.elementwise(node),
            Op::Reshape { .. } => self.reshape(id, node),
            Op::Permute { perm } => {
                let axis = |cut: ShardSpec| perm.iter().position(|&p| p == cut.axis);
                self.keeps(node, |cut| axis(cut).map(|axis| cut.on_axis(axis)))
            }
            Op::Slice { axis, start, len }
                if self.shard_spec(inputs[0]).is_some_and(|cut| cut.axis == *axis) =>
            {
                self.slice(node, (*axis, start, len))
            }
            Op::Slice { axis, .. } | Op::Reduce { axis, .. } => {
                self.keeps(node, |cut| (cut.axis != *axis).then_some(cut))
            }
            Op::Softmax | Op::LayerNorm { .. } | Op::RmsNorm { .. } => {
                let last = self.dims(inputs[0]).len() - 1;
                self.keeps(node, |cut| (cut.axis != last).then_some(cut))
            }
            Op::SequenceSplit { .. } | Op::SequenceJoin | Op::OutputRows => {
                self.keeps(node, |cut| (cut.axis > 0).then_some(cut))
            }
            Op::Concat { axis } => self.concat(node, *axis),
            _ => self.replicated(node),
        }
    }

    /// True if a value can be made from parameters, constants and states wherever it is needed.
    fn is_made_of_free(&self, node: &GraphNode) -> bool {
        let entry = self.f.kind == FunctionKind::Entry;
        match &node.op {
            Op::Param(_) | Op::Constant { .. } => true,
            Op::StateRead(state) => entry && !self.s.states.contains_key(state),
            Op::Dequantize
            | Op::Unary(_)
            | Op::Cast(_)
            | Op::Reshape { .. }
            | Op::Permute { .. }
            | Op::Slice { .. }
            | Op::Binary(_)
            | Op::SelectGe => node.inputs.iter().all(|&v| self.is_free(v)),
            _ => false,
        }
    }

    /// Every rank computes all of it.
    pub fn replicated(&mut self, node: &GraphNode) -> Result<(), Unshardable> {
        let inputs = self.replicate_all(&node.inputs)?;
        let outputs = self.out.append(&self.s.new, node.op.clone(), &inputs)?;
        for (&v, output) in node.outputs.iter().zip(outputs) {
            self.set_placement(v, ShardPlacement::Replicate(output));
        }
        Ok(())
    }

    /// An op of a part of its first input and all of the others, with a part of its result, if `cut` knows
    /// which.
    fn keeps(
        &mut self,
        node: &GraphNode,
        cut: impl Fn(ShardSpec) -> Option<ShardSpec>,
    ) -> Result<(), Unshardable> {
        let (x, out) = (node.inputs[0], node.outputs[0]);
        let ShardPlacement::Shard(part, own) = self.placement(x) else { return self.replicated(node) };
        let Some(cut) = cut(own) else { return self.replicated(node) };
        let mut inputs = vec![part];
        inputs.extend(self.replicate_all(&node.inputs[1..])?);
        let op = self.local_op(&node.op, out, cut);
        let part = self.emit(op, &inputs)?;
        self.set_placement(out, ShardPlacement::Shard(part, cut));
        Ok(())
    }

    fn elementwise(&mut self, node: &GraphNode) -> Result<(), Unshardable> {
        let out = node.outputs[0];
        let Some(cut) = node.inputs.iter().find_map(|&v| self.of_result(v, out)) else {
            return self.replicated(node);
        };
        self.broadcast(node, cut)
    }

    /// An op whose operands are broadcast, with a part of its result, if each operand has its part or no such
    /// axis.
    pub fn broadcast(&mut self, node: &GraphNode, cut: ShardSpec) -> Result<(), Unshardable> {
        let out = node.outputs[0];
        for &v in &node.inputs {
            let fits = match self.operand_shard(v, out, cut) {
                Some(own) => self.has_part(v, own)?,
                None => self.shard_spec(v).is_none(),
            };
            if !fits {
                return self.replicated(node);
            }
        }
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for &v in &node.inputs {
            inputs.push(match self.operand_shard(v, out, cut) {
                Some(own) => self.shard(v, own)?,
                None => self.replicate(v)?,
            });
        }
        let part = self.emit(node.op.clone(), &inputs)?;
        self.set_placement(out, ShardPlacement::Shard(part, cut));
        Ok(())
    }

    /// The cut of a broadcast result that goes with that of an operand.
    pub fn of_result(&self, v: ValueId, result: ValueId) -> Option<ShardSpec> {
        let cut = self.shard_spec(v)?;
        Some(cut.on_axis(cut.axis + self.dims(result).len() - self.dims(v).len()))
    }

    fn reshape(&mut self, id: NodeId, node: &GraphNode) -> Result<(), Unshardable> {
        let (x, out) = (node.inputs[0], node.outputs[0]);
        let Some(cut) = self.shard_spec(x) else { return self.replicated(node) };
        let (from, to) = (self.dims(x), self.dims(out));
        if let Some(new) = reshape_shard(from, to, cut) {
            // One head for all: it is not needed in parts.
            let is_head =
                new.axis > cut.axis && to[cut.axis..new.axis].iter().all(|d| d.as_const() == Some(1));
            if is_head && self.f.kind == FunctionKind::Entry && self.demand_whole(&[x]) {
                return self.replicated(node);
            }
            return self.keeps(node, |_| Some(new));
        }
        let axis = reshaped_axis(from, to, cut.axis);
        let sizes = axis.and_then(|axis| constant_size(&from[cut.axis]).zip(constant_size(&to[axis])));
        let Some((all, heads)) = sizes.filter(|&(_, heads)| heads > 0) else {
            return self.replicated(node);
        };
        // Heads fewer than ranks: several ranks have the same one.
        let shared = heads < cut.parts.count && cut.parts.count.is_multiple_of(heads);
        let parts = match shared {
            true => AxisParts::new(heads),
            false => AxisParts::of_units(self.ranks(), all / heads, all),
        };
        let heads_are_units = all.is_multiple_of(heads);
        let asked = heads_are_units && self.demand(&[x], parts);
        if asked || self.s.again || self.demand_whole(&[x]) {
            return self.replicated(node);
        }
        Err(self.s.plan.divide(format!("{heads} heads ({})", self.label(id))))
    }

    fn concat(&mut self, node: &GraphNode, axis: usize) -> Result<(), Unshardable> {
        let cut = node.inputs.iter().find_map(|&v| self.shard_spec(v)).filter(|cut| cut.axis != axis);
        let Some(cut) = cut else { return self.replicated(node) };
        for &v in &node.inputs {
            if !self.has_part(v, cut)? {
                return self.replicated(node);
            }
        }
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for &v in &node.inputs {
            inputs.push(self.shard(v, cut)?);
        }
        let part = self.emit(node.op.clone(), &inputs)?;
        self.set_placement(node.outputs[0], ShardPlacement::Shard(part, cut));
        Ok(())
    }

    fn state_write(&mut self, state: StateId, v: ValueId) -> Result<(), Unshardable> {
        let own = self.shard_spec(v);
        let value = match self.s.state_shard(state, own) {
            None => self.replicate(v)?,
            Some(cut) if self.has_part(v, cut)? => self.shard(v, cut)?,
            Some(_) => {
                self.s.correct_placement(state, own);
                return Ok(());
            }
        };
        self.out.append(&self.s.new, Op::StateWrite(state), &[value])?;
        Ok(())
    }

    fn cache_append(&mut self, state: StateId, node: &GraphNode) -> Result<(), Unshardable> {
        let (rows, out) = (node.inputs[0], node.outputs[0]);
        let own = self.shard_spec(rows).filter(|cut| cut.axis > 0);
        match self.s.state_shard(state, own) {
            None => self.replicated(node),
            Some(cut) if self.has_part(rows, cut)? => {
                let rows = self.shard(rows, cut)?;
                let all = self.emit(node.op.clone(), &[rows])?;
                self.set_placement(out, ShardPlacement::Shard(all, cut));
                Ok(())
            }
            Some(_) => {
                self.s.correct_placement(state, own);
                let all = self.replicate(rows)?;
                let ty = self.f.ty(out).clone();
                let all = self.out.append_typed(node.op.clone(), &[all], vec![ty])[0];
                self.set_placement(out, ShardPlacement::Replicate(all));
                Ok(())
            }
        }
    }

    /// Splits attention by query heads; each rank has the key heads that these use.
    fn attention(&mut self, id: NodeId, node: &GraphNode, a: &AttentionOp) -> Result<(), Unshardable> {
        let [q, k, v] = [node.inputs[0], node.inputs[1], node.inputs[2]];
        let ranks = self.ranks();
        let heads = |split: &Self, v: ValueId| constant_size(&split.dims(v)[1]).unwrap_or(0).max(1);
        let (query_heads, key_heads) = (heads(self, q), heads(self, k));
        let (queries, keys) = parts_of_heads(query_heads, key_heads, ranks);
        let by_heads = ShardSpec::with_parts(1, queries);
        // The rows of a product that heads are made of.
        let rows = |split: &Self, v: ValueId, heads: usize, parts: AxisParts| {
            let size = split.dims(v)[2..].iter().filter_map(constant_size).product::<usize>();
            parts.regrouped(heads, heads * size).unwrap_or(parts)
        };
        if !self.has_part(q, by_heads)? {
            let wanted = rows(self, q, query_heads, queries);
            return match self.choose(&[q], wanted) || self.s.again {
                true => self.replicated(node),
                false => Err(self.s.plan.divide(format!("{query_heads} query heads ({})", self.label(id)))),
            };
        }
        // By input: how each rank needs it.
        let cut = |i: usize| match i {
            0 => Some(by_heads),
            1 | 2 => (keys.count > 1).then_some(ShardSpec::with_parts(1, keys)),
            _ if Some(i) == a.sink_input() => Some(by_heads),
            _ if [a.slopes_input(), a.null_input(), a.terms_input()].contains(&Some(i)) => {
                Some(by_heads.on_axis(0))
            }
            _ => None,
        };
        for (i, &x) in node.inputs.iter().enumerate() {
            let fits = match cut(i) {
                Some(cut) => self.has_part(x, cut)?,
                None => self.shard_spec(x).is_none(),
            };
            if fits {
                continue;
            }
            let [of_keys, of_values] = [k, v].map(|x| rows(self, x, key_heads, keys));
            let chosen = i < 3 && (self.choose(&[k], of_keys) | self.choose(&[v], of_values));
            let asked = chosen || (i < 3 && self.ask_of_cache(x, cut(i))?);
            if !asked && !self.s.again {
                let why = format!("its input {i} is not split by heads");
                return Err(self.s.plan.unsupported(self.label(id), why));
            }
            return self.replicated(node);
        }
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for (i, &x) in node.inputs.iter().enumerate() {
            inputs.push(match cut(i) {
                Some(cut) => self.shard(x, cut)?,
                None => self.replicate(x)?,
            });
        }
        let part = self.emit(node.op.clone(), &inputs)?;
        self.set_placement(node.outputs[0], ShardPlacement::Shard(part, by_heads));
        Ok(())
    }

    /// Asks that a cache which every rank has whole is held in parts; false if its rows have none.
    fn ask_of_cache(&mut self, cache: ValueId, cut: Option<ShardSpec>) -> Result<bool, Unshardable> {
        let (Some(GraphNode { op: Op::CacheAppend(state), inputs, .. }), Some(cut)) =
            (self.f.defining_node(cache), cut)
        else {
            return Ok(false);
        };
        let has_parts = self.shard_spec(cache).is_none() && self.has_part(inputs[0], cut)?;
        if has_parts {
            self.s.correct_placement(*state, Some(cut));
        }
        Ok(has_parts)
    }

    /// Splits a scan by the axis along which its sequences are split, which is that of heads or channels.
    fn scan(
        &mut self,
        id: NodeId,
        node: &GraphNode,
        body: FuncId,
        (carries, seqs): (usize, usize),
    ) -> Result<(), Unshardable> {
        let is_seq = |i: usize| (carries..carries + seqs).contains(&i);
        let of_seq = |&v: &ValueId| Some((v, self.shard_spec(v).filter(|cut| cut.axis > 0)?));
        // Heads come first: what is split along another axis is shared by them.
        let first = node.inputs[carries..carries + seqs].iter().filter_map(of_seq);
        let Some((like, cut)) = first.min_by_key(|(_, cut)| cut.axis) else { return self.replicated(node) };
        let (slice, size) = (cut.on_axis(cut.axis - 1), self.dims(like)[cut.axis].clone());
        if cut.parts.count != self.ranks() || cut.segments.is_some() {
            if self.demand_whole(&node.inputs) || self.s.again {
                return self.replicated(node);
            }
            return Err(self.s.plan.divide(format!("{size} heads ({})", self.label(id))));
        }
        let (mut inputs, mut cuts, mut shared, mut others) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (i, &v) in node.inputs.iter().enumerate() {
            let own = if is_seq(i) { cut } else { slice };
            let has_heads = self.dims(v).get(own.axis) == Some(&size);
            let fits = has_heads && self.has_part(v, own)?;
            match (fits, has_heads) {
                (false, true) => others.push(v),
                (false, false) if self.shard_spec(v).is_some() => shared.push(v),
                _ => {}
            }
            cuts.push((fits, own, v));
        }
        // All of what heads share is computed by every rank.
        if self.demand(&shared, AxisParts::WHOLE) || self.s.again {
            return self.replicated(node);
        }
        for &(fits, own, v) in &cuts {
            inputs.push(if fits { self.shard(v, own)? } else { self.replicate(v)? });
        }
        let cuts: Vec<Option<ShardSpec>> = cuts.iter().map(|(fits, ..)| fits.then_some(slice)).collect();
        let made = match self.s.shard_body(body, &cuts) {
            Ok(made) => made,
            Err(Unshardable::Gathers) => {
                let parts = AxisParts::new(self.ranks());
                let asked = self.demand_of_terms(&node.inputs) || self.demand(&others, parts);
                if !asked {
                    self.keep_whole(&node.inputs[..carries]);
                }
                return self.replicated(node);
            }
            Err(stop) => return Err(stop),
        };
        if made.outputs[..carries] != cuts[..carries] {
            self.keep_whole(&node.inputs[..carries]);
            return self.replicated(node);
        }
        let op = Op::Scan { body: made.id, carries, seqs };
        let outputs = self.out.append(&self.s.new, op, &inputs)?;
        for (i, (&v, output)) in node.outputs.iter().zip(outputs).enumerate() {
            let stacked = |cut: ShardSpec| if i < carries { cut } else { cut.on_axis(cut.axis + 1) };
            self.set_placement(
                v,
                made.outputs[i].map_or(ShardPlacement::Replicate(output), |cut| {
                    ShardPlacement::Shard(output, stacked(cut))
                }),
            );
        }
        Ok(())
    }

    /// States that are read here are whole: the recurrence cannot be split, and every rank computes all of
    /// it.
    fn keep_whole(&mut self, carries: &[ValueId]) {
        for &v in carries {
            if let Some(GraphNode { op: Op::StateRead(state), .. }) = self.f.defining_node(v)
                && matches!(self.s.states.get(state), Some(Some(_)))
            {
                self.s.correct_placement(*state, None);
            }
        }
    }
}

/// The parts of query heads and of key heads, so that a rank has the key heads of its queries.
fn parts_of_heads(queries: usize, keys: usize, ranks: usize) -> (AxisParts, AxisParts) {
    match (keys.is_multiple_of(ranks), ranks.is_multiple_of(keys)) {
        (true, _) => (AxisParts::new(ranks), AxisParts::new(ranks)),
        // Several ranks have the same key head, and each some of its queries, or all of them.
        (_, true) if queries.is_multiple_of(ranks) || keys == 1 => {
            (AxisParts::new(ranks), AxisParts::new(keys))
        }
        (_, true) => (AxisParts::new(keys), AxisParts::new(keys)),
        _ => (AxisParts::of_units(ranks, queries / keys, queries), AxisParts::new(ranks)),
    }
}

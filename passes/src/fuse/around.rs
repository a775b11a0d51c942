//! Fuses a product of a single row with the ops around it, where a launch costs more than to compute a row
//! again in every block ([`KernelTarget::joins_single_rows`]): elementwise ops that read the product in equal
//! parts (gates), and rows that only products read (norms). A row that a state keeps as well (the shift of
//! RWKV) is computed once more for the state, by a kernel that nothing waits for.

use super::{FunctionFusion, FusionClass, FusionGroup};
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{GraphNode, NodeId, ValueId};
use mlcc_ir::ops::Op;
use mlcc_kernels::lower::contraction::{computes_activations, is_of_heads, result_parts};
use mlcc_kernels::params::KernelTarget;
use mlcc_kernels::rows::RowHeads;
use mlcc_target::Arch;

/// Most parts of a product that meet.
const MOST_PARTS: usize = 4;

/// The readers of rows.
struct RowReaders {
    /// Groups, by their numbers.
    products: Vec<usize>,
    /// The rows that are new values of states.
    new_states: Vec<ValueId>,
    /// Rows of heads in the shape of activations.
    reshapes: Vec<NodeId>,
}

impl FunctionFusion<'_> {
    /// Joins rows with products that are all around them.
    pub(super) fn around_products(&mut self) {
        let Some(target) = self.target else { return };
        for product in 0..self.groups.len() {
            if let Some(rows) = self.rows_of_parts(product, target) {
                let nodes = std::mem::take(&mut self.groups[rows].nodes);
                nodes.iter().for_each(|n| self.group_of[n.index()] = Some(product));
                self.groups[product].nodes.extend(nodes);
            }
        }
        // From the last on: rows that are computed of others bring these along.
        for rows in (0..self.groups.len()).rev() {
            let Some(RowReaders { products, new_states: kept, reshapes }) = self.readers_of(rows, target)
            else {
                continue;
            };
            let mut nodes = std::mem::take(&mut self.groups[rows].nodes);
            nodes.extend(reshapes);
            for product in products {
                let FusionGroup { nodes: own, copied, .. } = &self.groups[product];
                let activations = self.f.nodes[own[0]].inputs[0];
                let mut needed = self.needed_for(&[activations], &[&nodes[..], copied].concat());
                needed.retain(|n| nodes.contains(n));
                self.groups[product].copied.extend(needed);
            }
            let needed = self.needed_for(&kept, &nodes);
            self.groups[rows].nodes = nodes.into_iter().filter(|n| needed.contains(n)).collect();
        }
    }

    /// The subset of `nodes` that is needed to compute `values`.
    fn needed_for(&self, values: &[ValueId], nodes: &[NodeId]) -> Vec<NodeId> {
        let (mut needed, mut next) = (Vec::new(), values.to_vec());
        while let Some(v) = next.pop() {
            let Some(def) = self.f.def_id(v).filter(|def| nodes.contains(def) && !needed.contains(def))
            else {
                continue;
            };
            needed.push(def);
            next.extend(&self.f.nodes[def].inputs);
        }
        needed
    }

    /// True for what reads a part of a product that it can join: it is no mere movement of elements.
    pub(super) fn is_of_parts(&self, node: &GraphNode) -> bool {
        let is_part = |v: &ValueId| {
            let Some(GraphNode { op: Op::Slice { .. }, inputs, .. }) = self.f.defining_node(*v) else {
                return false;
            };
            let product = self.f.def_id(inputs[0]).map(|def| self.class[def.index()]);
            product == Some(FusionClass::Contraction) && result_parts(self.f, inputs[0]).contains(v)
        };
        let dims = &self.f.ty(node.outputs[0]).dims;
        self.target.is_some_and(|target| target.joins_single_rows(dims)) && node.inputs.iter().any(is_part)
    }

    /// True for what only reductions read, on a machine where they have the row at hand.
    pub(super) fn is_of_reduction(&self, node: &GraphNode) -> bool {
        let gpu = self.target.is_some_and(|target| target.arch == Arch::Nvptx);
        let read = |v: &ValueId| {
            let mut users = self.users_of(*v).peekable();
            users.peek().is_some() && users.all(|(_, user)| matches!(user.op, Op::Reduce { .. }))
        };
        gpu && node.outputs.iter().all(|v| read(v) && !self.f.outputs.contains(v))
    }

    fn users_of(&self, v: ValueId) -> impl Iterator<Item = (NodeId, &GraphNode)> {
        self.f.live_nodes().filter(move |(_, n)| n.inputs.contains(&v))
    }

    /// The rows that are computed of equal parts of a product alone, column by column.
    fn rows_of_parts(&self, product: usize, target: &KernelTarget) -> Option<usize> {
        let g = &self.groups[product];
        let &[node] = &g.nodes[..] else { return None };
        let result = self.f.nodes[node].outputs[0];
        if g.class != FusionClass::Contraction || !target.joins_single_rows(&g.shape) {
            return None;
        }
        let parts = result_parts(self.f, result);
        if parts.len() > MOST_PARTS || parts.iter().any(|v| self.f.outputs.contains(v)) {
            return None;
        }
        let part = &self.f.ty(*parts.first()?).dims;
        let mut users = parts.iter().flat_map(|&v| self.users_of(v)).map(|(n, _)| self.group_of[n.index()]);
        let rows = users.next()??;
        let together = users.all(|group| group == Some(rows));
        let fits = |&n: &NodeId| {
            let node = &self.f.nodes[n];
            let other = |v: &&ValueId| !parts.contains(*v) && self.producer_group(**v) != Some(rows);
            node.op.is_elementwise()
                && self.f.ty(node.outputs[0]).dims == *part
                && node.inputs.iter().filter(other).all(|&v| !self.depends_on_group(v, product))
        };
        let group = &self.groups[rows];
        (group.class == FusionClass::Row && together && group.nodes.iter().all(fits)).then_some(rows)
    }

    /// Readers of rows that are activations of products and new values of states, and nothing else.
    fn readers_of(&self, rows: usize, target: &KernelTarget) -> Option<RowReaders> {
        let g = &self.groups[rows];
        let row = |n: &NodeId| !matches!(self.f.nodes[*n].op, Op::QuantizeRows { .. });
        if g.class != FusionClass::Row || !g.nodes.iter().all(row) {
            return None;
        }
        let (mut products, mut kept, mut reshapes) = (Vec::new(), Vec::new(), Vec::new());
        for &v in g.nodes.iter().flat_map(|&n| &self.f.nodes[n].outputs) {
            if self.f.outputs.contains(&v) {
                return None;
            }
            for (id, user) in self.users_of(v) {
                let group = self.group_of[id.index()];
                if group == Some(rows) {
                    continue;
                }
                if self.is_new_state(user) {
                    kept.push(v);
                    continue;
                }
                if self.is_row_of_heads(user, &g.nodes) {
                    let row = user.outputs[0];
                    reshapes.push(id);
                    for (id, user) in self.users_of(row) {
                        products.push(self.product_of(row, (id, user), target)?);
                    }
                    continue;
                }
                match self.products_with(id) {
                    with if with.is_empty() => products.push(self.product_of(v, (id, user), target)?),
                    with => products.extend(with),
                }
            }
        }
        products.sort_unstable();
        products.dedup();
        (!products.is_empty()).then_some(RowReaders { products, new_states: kept, reshapes })
    }

    /// The products that compute a node of rows, if nothing else does.
    fn products_with(&self, id: NodeId) -> Vec<usize> {
        let stays = self.group_of[id.index()].is_some_and(|group| self.groups[group].nodes.contains(&id));
        let all = self.groups.iter().enumerate().filter(|(_, group)| !stays && group.copied.contains(&id));
        all.map(|(product, _)| product).collect()
    }

    /// The group of a product that computes its activations `v` itself.
    fn product_of(
        &self,
        v: ValueId,
        (id, user): (NodeId, &GraphNode),
        target: &KernelTarget,
    ) -> Option<usize> {
        let activation = user.inputs.iter().position(|&i| i == v) == Some(0);
        let single = matches!(user.op, Op::MatMul { .. }) && user.inputs[1..].iter().all(|&i| i != v);
        let product = self.group_of[id.index()]?;
        let group = &self.groups[product];
        let fits = group.nodes.first() == Some(&id)
            && group.class == FusionClass::Contraction
            && computes_activations(target, &self.f.ty(v).dims);
        (activation && single && fits).then_some(product)
    }

    /// True for what makes a row of heads, which `nodes` compute, activations of products.
    fn is_row_of_heads(&self, reshape: &GraphNode, nodes: &[NodeId]) -> bool {
        let &[row] = &reshape.outputs[..] else { return false };
        let Some(heads) = RowHeads::of_value(self.f, row).filter(|_| !self.f.outputs.contains(&row)) else {
            return false;
        };
        let fits = |&n: &NodeId| {
            let node = &self.f.nodes[n];
            is_of_heads(self.f, node, heads) && !node.inputs.iter().any(|&v| self.is_moved(v))
        };
        nodes.iter().all(fits)
    }

    /// True for what makes its operand the new value of a state.
    fn is_new_state(&self, node: &GraphNode) -> bool {
        let [result] = node.outputs[..] else { return matches!(node.op, Op::StateWrite(_)) };
        let mut users = self.users_of(result).peekable();
        matches!(node.op, Op::Reshape { .. })
            && !self.f.outputs.contains(&result)
            && users.peek().is_some()
            && users.all(|(_, user)| self.is_new_state(user))
    }
}

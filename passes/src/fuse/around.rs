//! What is computed around a product of a single row joins its kernel, where a launch costs more than to compute a row again in every block
//! ([`KernelTarget::joins_single_rows`]): elementwise ops that read the product in equal parts (gates), and rows that nothing but products
//! reads (norms).

use super::{Class, Fusion};
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{Node, NodeId, ValueId};
use mlcc_ir::ops::Op;
use mlcc_kernels::lower::contraction::{computes_activations, parts};
use mlcc_kernels::params::KernelTarget;
use mlcc_target::Arch;

/// Most parts of a product that meet.
const MOST_PARTS: usize = 4;

impl Fusion<'_> {
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
        for rows in 0..self.groups.len() {
            let Some(products) = self.products_of(rows, target) else { continue };
            let nodes = std::mem::take(&mut self.groups[rows].nodes);
            for product in products {
                let node = self.groups[product].nodes[0];
                let needed = self.needed_for(self.f.nodes[node].inputs[0], &nodes);
                self.groups[product].copied.extend(needed);
            }
        }
    }

    /// Those of `nodes` that compute a value.
    fn needed_for(&self, v: ValueId, nodes: &[NodeId]) -> Vec<NodeId> {
        let (mut needed, mut next) = (Vec::new(), vec![v]);
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
    pub(super) fn is_of_parts(&self, node: &Node) -> bool {
        let is_part = |v: &ValueId| {
            let Some(Node { op: Op::Slice { .. }, inputs, .. }) = self.f.def(*v) else { return false };
            let product = self.f.def_id(inputs[0]).map(|def| self.class[def.index()]);
            product == Some(Class::Contraction) && parts(self.f, inputs[0]).contains(v)
        };
        let dims = &self.f.ty(node.outputs[0]).dims;
        self.target.is_some_and(|target| target.joins_single_rows(dims)) && node.inputs.iter().any(is_part)
    }

    /// True for what only reductions read, on a machine where they have the row at hand.
    pub(super) fn is_of_reduction(&self, node: &Node) -> bool {
        let gpu = self.target.is_some_and(|target| target.arch == Arch::Nvptx);
        let read = |v: &ValueId| {
            let mut users = self.users(*v).peekable();
            users.peek().is_some() && users.all(|(_, user)| matches!(user.op, Op::Reduce { .. }))
        };
        gpu && node.outputs.iter().all(|v| read(v) && !self.f.outputs.contains(v))
    }

    fn users(&self, v: ValueId) -> impl Iterator<Item = (NodeId, &Node)> {
        self.f.live().filter(move |(_, n)| n.inputs.contains(&v))
    }

    /// The rows that are computed of equal parts of a product alone, column by column.
    fn rows_of_parts(&self, product: usize, target: &KernelTarget) -> Option<usize> {
        let g = &self.groups[product];
        let &[node] = &g.nodes[..] else { return None };
        let result = self.f.nodes[node].outputs[0];
        if g.class != Class::Contraction || !target.joins_single_rows(&g.shape) {
            return None;
        }
        let parts = parts(self.f, result);
        if parts.len() > MOST_PARTS || parts.iter().any(|v| self.f.outputs.contains(v)) {
            return None;
        }
        let part = &self.f.ty(*parts.first()?).dims;
        let mut users = parts.iter().flat_map(|&v| self.users(v)).map(|(n, _)| self.group_of[n.index()]);
        let rows = users.next()??;
        let together = users.all(|group| group == Some(rows));
        let fits = |&n: &NodeId| {
            let node = &self.f.nodes[n];
            let other = |v: &&ValueId| !parts.contains(*v) && self.producer_group(**v) != Some(rows);
            node.op.is_elementwise()
                && self.f.ty(node.outputs[0]).dims == *part
                && node.inputs.iter().filter(other).all(|&v| !self.depends(v, product))
        };
        let group = &self.groups[rows];
        (group.class == Class::Row && together && group.nodes.iter().all(fits)).then_some(rows)
    }

    /// The products whose activations are rows that nothing else reads.
    fn products_of(&self, rows: usize, target: &KernelTarget) -> Option<Vec<usize>> {
        let g = &self.groups[rows];
        let row = |n: &NodeId| !matches!(self.f.nodes[*n].op, Op::QuantizeRows { .. });
        if g.class != Class::Row || !g.nodes.iter().all(row) {
            return None;
        }
        let mut products = Vec::new();
        for &v in g.nodes.iter().flat_map(|&n| &self.f.nodes[n].outputs) {
            if self.f.outputs.contains(&v) {
                return None;
            }
            for (id, user) in self.users(v) {
                let group = self.group_of[id.index()];
                if group == Some(rows) {
                    continue;
                }
                let activation = user.inputs.iter().position(|&i| i == v) == Some(0);
                let single = matches!(user.op, Op::MatMul { .. }) && user.inputs[1..].iter().all(|&i| i != v);
                let product = group.filter(|&group| self.groups[group].nodes.first() == Some(&id))?;
                let fits = self.groups[product].class == Class::Contraction
                    && computes_activations(target, &self.f.ty(v).dims);
                if !(activation && single && fits) {
                    return None;
                }
                if !products.contains(&product) {
                    products.push(product);
                }
            }
        }
        (!products.is_empty()).then_some(products)
    }
}

//! Groups nodes into kernels: elementwise ops and last-axis reductions of one row shape go together,
//! elementwise ops behind a matrix product become its epilogue, cheap index-only ops are computed again by
//! all their users.
//!
//! Greedy in execution order: a node joins the latest group that it reads from if shapes agree and no circle
//! arises between groups. Nodes are classed as
//! * structural (parameters, states, reshapes): never in a group;
//! * lazy (constants, positions, slices, concatenations, permutations, arithmetic on parameters): copied into
//!   each group that reads them, unless something needs the value in memory;
//! * lazy, too, are nodes that compute from single elements and are read by attention alone, whose kernel
//!   unpacks cached codes and rotates queries as it loads them, or by one concatenation of columns alone
//!   (rotated keys, written once);
//! * contraction, row (elementwise or last-axis reduction), scan (over channels: takes elementwise ops on its
//!   stacked values), and closed (everything else, a kernel each).

mod around;

use crate::dce::remove_dead_nodes;
use crate::outline::{self, entry_functions, is_top_level};
use crate::rewrite::{count_key, times_text};
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::dim::Dim;
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{Function, GraphNode, NodeId, ValueId};
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::types::DType;
use mlcc_kernels::lower::contraction::is_contraction;
use mlcc_kernels::params::KernelTarget;
use mlcc_kernels::scan::is_channelwise;
use mlcc_target::Arch;
use petgraph::algo::has_path_connecting;
use petgraph::visit::{GraphBase, GraphRef, IntoNeighbors, NodeFiltered, Visitable};
use std::collections::HashSet;

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let mut fused = 0;
    let target = ctx.options.levels.first().map(|(_, target)| target.clone());
    for id in entry_functions(&program.module) {
        // An unused node would belong to no group.
        remove_dead_nodes(&mut program.module, id);
        let f = &program.module.functions[id];
        let mut fusion = FunctionFusion::new(&program.module, f, target.as_ref());
        for (node, _) in f.live_nodes() {
            fusion.assign_group(node);
        }
        fusion.around_products();
        for (why, n) in &fusion.misses {
            ctx.note(format!("@{}: {why} ({})", f.name, times_text(*n)));
        }
        let groups = fusion.finish();
        fused += groups.iter().map(|g| g.nodes.len() - 1).sum::<usize>();
        outline::outline(&mut program.module, id, &groups);
    }
    Ok(fused)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum FusionClass {
    Structural,
    Lazy,
    Contraction,
    Row,
    Scan,
    Closed,
}

struct FusionGroup {
    /// The class, which decides what may join: nothing joins `Closed`.
    class: FusionClass,
    /// Leading axes of row groups, all axes of a contraction's result and of a scan's stacked values.
    shape: Vec<Dim>,
    nodes: Vec<NodeId>,
    /// Nodes that are computed here as well as in other groups.
    copied: Vec<NodeId>,
}

struct FunctionFusion<'a> {
    module: &'a Module,
    f: &'a Function,
    /// The target of products of a single row, if such a product joins the ops around it.
    target: Option<&'a KernelTarget>,
    class: Vec<FusionClass>,
    /// Nodes that only attention or a concatenation of columns reads, through nodes of the same kind.
    attended: Vec<bool>,
    group_of: Vec<Option<usize>>,
    groups: Vec<FusionGroup>,
    /// Ops that were not fused and the reason, with the number of places, in order of the first.
    misses: Vec<(String, usize)>,
}

impl<'a> FunctionFusion<'a> {
    fn new(module: &'a Module, f: &'a Function, target: Option<&'a KernelTarget>) -> Self {
        let mut fusion = FunctionFusion {
            module,
            f,
            target,
            class: vec![FusionClass::Structural; f.nodes.len()],
            attended: attention_inputs(f),
            group_of: vec![None; f.nodes.len()],
            groups: vec![],
            misses: vec![],
        };
        for (id, node) in f.live_nodes() {
            fusion.class[id.index()] = match fusion.attended[id.index()] {
                true => FusionClass::Lazy,
                false => fusion.classify(node),
            };
        }
        fusion
    }

    fn classify(&self, node: &GraphNode) -> FusionClass {
        let f = self.f;
        let constant = |v: &ValueId| match f.def_id(*v) {
            None => false,
            Some(d) => match &f.nodes[d].op {
                Op::Param(_) => !f.ty(*v).dtype.is_packed() && f.ty(*v).rank() < 2,
                Op::Reshape { .. } => false,
                _ => self.class[d.index()] == FusionClass::Lazy,
            },
        };
        match &node.op {
            op if is_top_level(op) => FusionClass::Structural,
            Op::Constant { .. }
            | Op::Iota { .. }
            | Op::Slice { .. }
            | Op::Concat { .. }
            | Op::Permute { .. } => FusionClass::Lazy,
            op if op.is_elementwise() && node.inputs.iter().all(constant) && !self.is_of_parts(node) => {
                FusionClass::Lazy
            }
            op if op.is_elementwise() => FusionClass::Row,
            Op::Reduce { axis, .. } if axis + 1 == f.ty(node.inputs[0]).rank() => FusionClass::Row,
            Op::QuantizeRows { .. }
                if f.ty(node.inputs[0]).dims.last().is_some_and(|k| k.as_const().is_some()) =>
            {
                FusionClass::Row
            }
            op if is_contraction(f, op, &node.inputs) => FusionClass::Contraction,
            Op::Scan { body, carries, .. }
                if node.outputs.len() > *carries && is_channelwise(&self.module.functions[*body]) =>
            {
                FusionClass::Scan
            }
            _ => FusionClass::Closed,
        }
    }

    fn assign_group(&mut self, id: NodeId) {
        let node = &self.f.nodes[id];
        match self.class[id.index()] {
            FusionClass::Structural | FusionClass::Lazy => {}
            FusionClass::Closed => self.open(id, FusionClass::Closed, vec![]),
            FusionClass::Contraction => {
                let shape = self.f.ty(node.outputs[0]).dims.clone();
                self.open(id, FusionClass::Contraction, shape);
            }
            FusionClass::Scan => {
                let stacked = node.outputs.last().map(|&v| self.f.ty(v).dims.clone());
                self.open(id, FusionClass::Scan, stacked.unwrap_or_default());
            }
            FusionClass::Row => match self.find_group(node) {
                Some(group) => {
                    self.groups[group].nodes.push(id);
                    self.group_of[id.index()] = Some(group);
                }
                None => {
                    let shape = row_shape(self.f, node);
                    self.open(id, FusionClass::Row, shape);
                }
            },
        }
    }

    fn open(&mut self, id: NodeId, class: FusionClass, shape: Vec<Dim>) {
        self.group_of[id.index()] = Some(self.groups.len());
        self.groups.push(FusionGroup { class, shape, nodes: vec![id], copied: vec![] });
    }

    /// Groups that a node reads from directly, latest first.
    fn find_group(&mut self, node: &GraphNode) -> Option<usize> {
        let mut candidates: Vec<usize> =
            node.inputs.iter().filter_map(|&v| self.group_of[self.f.def_id(v)?.index()]).collect();
        candidates.sort_unstable();
        candidates.dedup();
        candidates.into_iter().rev().find(|&g| match self.obstacle(node, g) {
            None => true,
            Some(why) => {
                let first = &self.f.nodes[self.groups[g].nodes[0]].op;
                let miss = format!("{} not fused with {}: {why}", node.op.name(), first.name());
                count_key(&mut self.misses, miss);
                false
            }
        })
    }

    /// The reason why a node cannot join a group.
    fn obstacle(&self, node: &GraphNode, group: usize) -> Option<&'static str> {
        let g = &self.groups[group];
        let out = self.f.ty(node.outputs[0]);
        match g.class {
            FusionClass::Contraction | FusionClass::Scan if !node.op.is_elementwise() => {
                return Some("a reduction cannot be an epilogue");
            }
            FusionClass::Contraction if out.dims != g.shape => return Some("another shape than the product"),
            FusionClass::Scan if out.dims != g.shape => return Some("another shape than the stacked values"),
            FusionClass::Contraction | FusionClass::Scan if self.is_of_reduction(node) => {
                return Some("its reduction computes it");
            }
            FusionClass::Contraction | FusionClass::Scan if node.inputs.iter().any(|&v| self.is_moved(v)) => {
                return Some("an epilogue moves no elements");
            }
            FusionClass::Row if row_shape(self.f, node) != g.shape => return Some("other rows"),
            FusionClass::Contraction | FusionClass::Row | FusionClass::Scan => {}
            FusionClass::Closed if self.rounds_attention(node, g) => return None,
            FusionClass::Structural | FusionClass::Lazy | FusionClass::Closed => {
                return Some("the group takes no others");
            }
        }
        for &v in &node.inputs {
            let direct = self.producer_group(v) == Some(group);
            let aligned = match g.class {
                FusionClass::Contraction | FusionClass::Scan => self.f.ty(v).dims == g.shape,
                _ => leading_dims(&self.f.ty(v).dims) == g.shape.as_slice(),
            };
            if direct && !aligned {
                return Some("reads the group at other rows");
            }
            if !direct && self.reaches_through_lazy(v, group) {
                return Some("reads the group through a movement of elements");
            }
            if !direct && self.depends_on_group(v, group) {
                return Some("would close a circle between kernels");
            }
        }
        None
    }

    /// True for a cast of a value that only an attention computes: on a GPU the attention stores its results
    /// in that type.
    fn rounds_attention(&self, node: &GraphNode, group: &FusionGroup) -> bool {
        let &[only] = &group.nodes[..] else { return false };
        let attention = &self.f.nodes[only];
        let uses = |v: &ValueId| self.f.use_counts()[v.index()];
        self.target.is_some_and(|target| target.arch == Arch::Nvptx)
            && is_attention(attention)
            && matches!(node.op, Op::Cast(DType::F16 | DType::BF16))
            && node.inputs == attention.outputs
            && uses(&attention.outputs[0]) == 1
    }

    fn producer_group(&self, v: ValueId) -> Option<usize> {
        self.group_of[self.f.def_id(v)?.index()]
    }

    /// True if `v` is a lazy value that is computed from the group's results by lazy nodes alone.
    fn reaches_through_lazy(&self, v: ValueId, group: usize) -> bool {
        let is_lazy = |n: NodeId| self.class[n.index()] == FusionClass::Lazy;
        let first = self.groups[group].nodes[0];
        let Some(def) = self.f.def_id(v).filter(|&def| is_lazy(def)) else { return false };
        let lazy = NodeFiltered::from_fn(GroupReads(self), |n| n == first || is_lazy(n));
        has_path_connecting(&lazy, def, first, None)
    }

    /// True if the readers of the lazy value `v` compute it from elements of other places.
    fn is_moved(&self, v: ValueId) -> bool {
        let (mut next, mut seen) = (vec![v], HashSet::new());
        while let Some(v) = next.pop() {
            let lazy = |def: &NodeId| self.class[def.index()] == FusionClass::Lazy;
            let Some(def) = self.f.def_id(v).filter(lazy) else { continue };
            let node = &self.f.nodes[def];
            if !node.op.is_elementwise() {
                return true;
            }
            if seen.insert(def) {
                next.extend(&node.inputs);
            }
        }
        false
    }

    /// True if computing `v` needs the group to have run.
    fn depends_on_group(&self, v: ValueId, group: usize) -> bool {
        let Some(def) = self.f.def_id(v) else { return false };
        let reads = GroupReads(self);
        has_path_connecting(reads, reads.kernel(def), self.groups[group].nodes[0], None)
    }

    /// Adds the lazy nodes that each group reads, and groups of their own for lazy values needed in memory.
    fn finish(mut self) -> Vec<outline::KernelGroup> {
        let f = self.f;
        let needed: Vec<NodeId> = self.lazy_in_memory();
        for id in needed {
            self.open(id, FusionClass::Closed, vec![]);
        }
        let mut groups = Vec::new();
        for group in self.groups.iter().filter(|group| !group.nodes.is_empty()) {
            let mut nodes = [group.nodes.as_slice(), &group.copied].concat();
            let mut i = 0;
            while i < nodes.len() {
                for &v in &f.nodes[nodes[i]].inputs {
                    if let Some(def) = f.def_id(v)
                        && self.is_inlined(nodes[i], def)
                        && !nodes.contains(&def)
                    {
                        nodes.push(def);
                    }
                }
                i += 1;
            }
            // Execution order within the function is by position, not by id.
            let position = |n: &NodeId| f.body.iter().position(|b| b == n);
            nodes.sort_by_key(position);
            let copied = nodes.iter().copied().filter(|n| !group.nodes.contains(n)).collect();
            groups.push(outline::KernelGroup { nodes, copied });
        }
        groups
    }

    /// True if `user` recomputes the lazy node `def` instead of reading it from memory.
    fn is_inlined(&self, user: NodeId, def: NodeId) -> bool {
        if self.class[def.index()] != FusionClass::Lazy {
            return false;
        }
        let reads_memory = match self.class[user.index()] {
            FusionClass::Row | FusionClass::Lazy => false,
            FusionClass::Closed => !is_attention(&self.f.nodes[user]),
            FusionClass::Contraction | FusionClass::Scan | FusionClass::Structural => true,
        };
        !reads_memory
    }

    /// Lazy values read by structural nodes, contractions or closed kernels, and function outputs.
    fn lazy_in_memory(&self) -> Vec<NodeId> {
        let mut needed = vec![false; self.f.nodes.len()];
        let mut need = |v: ValueId| {
            if let Some(def) = self.f.def_id(v)
                && self.class[def.index()] == FusionClass::Lazy
            {
                needed[def.index()] = true;
            }
        };
        for (id, node) in self.f.live_nodes() {
            if !matches!(self.class[id.index()], FusionClass::Row | FusionClass::Lazy) && !is_attention(node)
            {
                node.inputs.iter().for_each(|&v| need(v));
            }
        }
        self.f.outputs.iter().for_each(|&v| need(v));
        self.f.body.iter().copied().filter(|n| needed[n.index()]).collect()
    }
}

/// The graph of kernels as far as they are known: an edge leads from a node to each that it reads. A group is
/// its first node, which reads what any of its nodes reads.
#[derive(Clone, Copy)]
struct GroupReads<'a>(&'a FunctionFusion<'a>);

impl GroupReads<'_> {
    fn kernel(self, node: NodeId) -> NodeId {
        self.0.group_of[node.index()].map_or(node, |g| self.0.groups[g].nodes[0])
    }
}

impl GraphBase for GroupReads<'_> {
    type NodeId = NodeId;
    type EdgeId = ();
}

impl GraphRef for GroupReads<'_> {}

impl Visitable for GroupReads<'_> {
    type Map = HashSet<NodeId>;
    fn visit_map(&self) -> HashSet<NodeId> {
        HashSet::new()
    }
    fn reset_map(&self, map: &mut HashSet<NodeId>) {
        map.clear();
    }
}

impl IntoNeighbors for GroupReads<'_> {
    type Neighbors = std::vec::IntoIter<NodeId>;
    fn neighbors(self, node: NodeId) -> Self::Neighbors {
        let alone = [node];
        let members = match self.0.group_of[node.index()] {
            Some(group) => &self.0.groups[group].nodes,
            None => &alone[..],
        };
        let operands = members.iter().flat_map(|&n| &self.0.f.nodes[n].inputs);
        let read = operands.filter_map(|&v| Some(self.kernel(self.0.f.def_id(v)?)));
        read.filter(|&n| n != node).collect::<Vec<_>>().into_iter()
    }
}

fn is_attention(node: &GraphNode) -> bool {
    matches!(node.op, Op::Attention(_))
}

/// Marks nodes that compute each element from single elements of their operands, and that only attention, a
/// concatenation of columns with one user, and marked nodes use.
fn attention_inputs(f: &Function) -> Vec<bool> {
    let mut users: Vec<Vec<NodeId>> = vec![Vec::new(); f.values.len()];
    for (id, node) in f.live_nodes() {
        node.inputs.iter().for_each(|v| users[v.index()].push(id));
    }
    let users_of = |v: &ValueId| users[v.index()].len() + f.outputs.iter().filter(|o| *o == v).count();
    let mut marked = vec![false; f.nodes.len()];
    for (id, node) in f.live_nodes().rev() {
        let moves =
            matches!(node.op, Op::Slice { .. } | Op::Concat { .. } | Op::Permute { .. } | Op::Iota { .. });
        let only = |v: &ValueId| {
            let users = &users[v.index()];
            let joins = |u: &NodeId| match f.nodes[*u] {
                GraphNode { op: Op::Concat { axis }, ref outputs, .. } => {
                    axis + 1 == f.ty(outputs[0]).rank() && users_of(&outputs[0]) == 1
                }
                _ => false,
            };
            let fits = |u: &NodeId| marked[u.index()] || is_attention(&f.nodes[*u]) || joins(u);
            !users.is_empty() && users.iter().all(fits) && !f.outputs.contains(v)
        };
        marked[id.index()] = (moves || node.op.is_elementwise()) && node.outputs.iter().all(only);
    }
    marked
}

fn leading_dims(dims: &[Dim]) -> &[Dim] {
    &dims[..dims.len().saturating_sub(1)]
}

/// Leading axes of the rows that a row node works on.
fn row_shape(f: &Function, node: &GraphNode) -> Vec<Dim> {
    leading_dims(&f.ty(node.outputs[0]).dims).to_vec()
}

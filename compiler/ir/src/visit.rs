//! petgraph's visit traits on `&Function`, so that its algorithms run on our own storage: nodes are the live
//! nodes, an edge leads from the node that defines a value to each operand that uses it. And the graph of
//! calls.
//!
//! Incoming neighbours are read off a node's operands; outgoing ones are found by looking through the body.

use crate::entity::EntityId;
use crate::graph::{Function, NodeId, ValueDef};
use crate::module::{FuncId, Module};
use crate::ops::Op;
use petgraph::Direction;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::{
    GraphBase, IntoNeighbors, IntoNeighborsDirected, IntoNodeIdentifiers, NodeCount, NodeIndexable, Visitable,
};
use std::collections::HashSet;

/// One use of a value: operand number `operand` of node `user`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ValueUse {
    pub user: NodeId,
    pub operand: usize,
}

impl GraphBase for Function {
    type NodeId = NodeId;
    type EdgeId = ValueUse;
}

impl NodeIndexable for Function {
    fn node_bound(&self) -> usize {
        self.nodes.len()
    }
    fn to_index(&self, id: NodeId) -> usize {
        id.index()
    }
    fn from_index(&self, index: usize) -> NodeId {
        NodeId::from_index(index)
    }
}

impl NodeCount for Function {
    fn node_count(&self) -> usize {
        self.body.len()
    }
}

impl Visitable for Function {
    type Map = HashSet<NodeId>;
    fn visit_map(&self) -> HashSet<NodeId> {
        HashSet::with_capacity(self.body.len())
    }
    fn reset_map(&self, map: &mut HashSet<NodeId>) {
        map.clear();
    }
}

impl<'a> IntoNodeIdentifiers for &'a Function {
    type NodeIdentifiers = std::iter::Copied<std::slice::Iter<'a, NodeId>>;
    fn node_identifiers(self) -> Self::NodeIdentifiers {
        self.body.iter().copied()
    }
}

impl Function {
    /// Nodes that define the operands of a node, once for each operand; also for functions that are not well
    /// formed.
    fn operand_nodes(&self, id: NodeId) -> impl Iterator<Item = NodeId> {
        let operands = self.nodes.get(id).map_or(&[][..], |node| &node.inputs);
        operands.iter().filter_map(|v| match self.values.get(*v)?.def {
            ValueDef::Input(_) => None,
            ValueDef::Node(n, _) => Some(n),
        })
    }
}

impl IntoNeighbors for &Function {
    type Neighbors = std::vec::IntoIter<NodeId>;
    fn neighbors(self, node: NodeId) -> Self::Neighbors {
        self.neighbors_directed(node, Direction::Outgoing)
    }
}

impl IntoNeighborsDirected for &Function {
    type NeighborsDirected = std::vec::IntoIter<NodeId>;
    fn neighbors_directed(self, node: NodeId, direction: Direction) -> Self::NeighborsDirected {
        let neighbours: Vec<NodeId> = match direction {
            Direction::Incoming => self.operand_nodes(node).collect(),
            Direction::Outgoing => {
                let uses = |&id: &NodeId| self.operand_nodes(id).filter(move |&d| d == node).map(move |_| id);
                self.body.iter().flat_map(uses).collect()
            }
        };
        neighbours.into_iter()
    }
}

/// Functions, with an edge to each that a function calls or scans over, once for each place. Missing
/// functions are left out.
pub fn call_graph(module: &Module) -> DiGraph<FuncId, ()> {
    let mut graph = DiGraph::with_capacity(module.functions.len(), module.functions.len());
    for id in module.functions.ids() {
        graph.add_node(id);
    }
    for (id, f) in module.functions.iter() {
        for node in f.body.iter().filter_map(|&n| f.nodes.get(n)) {
            if let Op::Call(callee) | Op::Scan { body: callee, .. } = node.op
                && module.functions.get(callee).is_some()
            {
                graph.add_edge(NodeIndex::new(id.index()), NodeIndex::new(callee.index()), ());
            }
        }
    }
    graph
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::FunctionKind;
    use crate::kernel::BinOp;
    use crate::types::{DType, TensorType};
    use petgraph::algo::{dominators, has_path_connecting, toposort};

    /// `(x + x) * x - (x + x)`.
    fn diamond() -> (Module, Function) {
        let module = Module::new("m");
        let mut f = Function::new("f", FunctionKind::Entry);
        let x = f.add_input(TensorType::new(DType::F32, [2]));
        let a = f.append(&module, Op::Binary(BinOp::Add), &[x, x]).unwrap()[0];
        let b = f.append(&module, Op::Binary(BinOp::Mul), &[a, x]).unwrap()[0];
        f.outputs = f.append(&module, Op::Binary(BinOp::Sub), &[b, a]).unwrap();
        (module, f)
    }

    #[test]
    fn algorithms_run_on_a_function() {
        let (_, f) = diamond();
        assert_eq!(toposort(&f, None).unwrap(), f.body);
        assert!(has_path_connecting(&f, NodeId(0), NodeId(2), None));
        assert!(!has_path_connecting(&f, NodeId(2), NodeId(0), None));
        let dominators = dominators::simple_fast(&f, NodeId(0));
        assert_eq!(dominators.immediate_dominator(NodeId(2)), Some(NodeId(0)));
    }
}

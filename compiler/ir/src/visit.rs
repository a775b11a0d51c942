//! petgraph's visit traits on `&Function`, so that its algorithms run on our own storage: nodes are the live nodes, an
//! edge leads from the node that defines a value to each operand that uses it.
//!
//! Incoming neighbours are read off a node's operands; outgoing ones are found by looking through the body, which is
//! meant for diagnostics and drawings, not for passes over large functions.

use crate::entity::EntityId;
use crate::graph::{Def, Function, Node, NodeId, ValueId};
use crate::module::Module;
use crate::ops::Op;
use petgraph::Direction;
use petgraph::data::DataMap;
use petgraph::dot::{Config, Dot};
use petgraph::visit::{
    Data, EdgeRef, GraphBase, GraphProp, IntoEdgeReferences, IntoNeighbors, IntoNeighborsDirected,
    IntoNodeIdentifiers, IntoNodeReferences, NodeCount, NodeIndexable, NodeRef, Visitable,
};
use std::collections::HashSet;

/// One use of a value: operand number `operand` of node `user`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Use {
    pub user: NodeId,
    pub operand: usize,
}

impl GraphBase for Function {
    type NodeId = NodeId;
    type EdgeId = Use;
}

impl Data for Function {
    type NodeWeight = Node;
    type EdgeWeight = ValueId;
}

impl DataMap for Function {
    fn node_weight(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id)
    }
    fn edge_weight(&self, id: Use) -> Option<&ValueId> {
        self.nodes.get(id.user)?.inputs.get(id.operand)
    }
}

impl GraphProp for Function {
    type EdgeType = petgraph::Directed;
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
    /// Nodes that define the operands of a node; also for functions that are not well formed.
    fn operand_nodes(&self, node: &Node) -> Vec<NodeId> {
        let def = |v: &ValueId| match self.values.get(*v)?.def {
            Def::Input(_) => None,
            Def::Node(n, _) => Some(n),
        };
        node.inputs.iter().filter_map(def).collect()
    }
}

/// A live node with its id.
#[derive(Clone, Copy)]
pub struct NodeReference<'a> {
    id: NodeId,
    node: &'a Node,
}

impl NodeRef for NodeReference<'_> {
    type NodeId = NodeId;
    type Weight = Node;
    fn id(&self) -> NodeId {
        self.id
    }
    fn weight(&self) -> &Node {
        self.node
    }
}

impl<'a> IntoNodeReferences for &'a Function {
    type NodeRef = NodeReference<'a>;
    type NodeReferences = std::vec::IntoIter<NodeReference<'a>>;
    fn node_references(self) -> Self::NodeReferences {
        self.live().map(|(id, node)| NodeReference { id, node }).collect::<Vec<_>>().into_iter()
    }
}

/// A use of a value together with its definition.
#[derive(Clone, Copy)]
pub struct EdgeReference<'a> {
    source: NodeId,
    at: Use,
    value: &'a ValueId,
}

impl EdgeRef for EdgeReference<'_> {
    type NodeId = NodeId;
    type EdgeId = Use;
    type Weight = ValueId;
    fn source(&self) -> NodeId {
        self.source
    }
    fn target(&self) -> NodeId {
        self.at.user
    }
    fn weight(&self) -> &ValueId {
        self.value
    }
    fn id(&self) -> Use {
        self.at
    }
}

impl<'a> IntoEdgeReferences for &'a Function {
    type EdgeRef = EdgeReference<'a>;
    type EdgeReferences = std::vec::IntoIter<EdgeReference<'a>>;
    fn edge_references(self) -> Self::EdgeReferences {
        let uses = |(user, node): (NodeId, &'a Node)| {
            node.inputs.iter().enumerate().filter_map(move |(operand, value)| {
                let source = self.def_id(*value)?;
                Some(EdgeReference { source, at: Use { user, operand }, value })
            })
        };
        self.live().flat_map(uses).collect::<Vec<_>>().into_iter()
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
            Direction::Incoming => self.nodes.get(node).map(|n| self.operand_nodes(n)).unwrap_or_default(),
            Direction::Outgoing => {
                let uses = |&id: &NodeId| {
                    let operands = self.nodes.get(id).map(|n| self.operand_nodes(n)).unwrap_or_default();
                    operands.into_iter().filter(move |&d| d == node).map(move |_| id)
                };
                self.body.iter().flat_map(uses).collect()
            }
        };
        neighbours.into_iter()
    }
}

/// The function as Graphviz text: nodes with their op, edges with the type of the value.
pub fn dot(module: &Module, function: &Function) -> String {
    let label = |_: &Function, n: NodeReference| {
        let symbol = match &n.node.op {
            Op::Param(id) => module.params.get(*id).map(|p| p.name.clone()),
            Op::StateRead(id) | Op::StateWrite(id) | Op::CacheAppend(id) => {
                module.states.get(*id).map(|s| s.name.clone())
            }
            Op::Call(id) | Op::Scan { body: id, .. } => module.functions.get(*id).map(|f| f.name.clone()),
            _ => None,
        };
        let name = symbol.map_or(String::new(), |s| format!(" @{}", s.replace('"', "'")));
        format!("label = \"{}{name}\"", n.node.op.name())
    };
    let config = [Config::NodeNoLabel, Config::EdgeNoLabel];
    let edge = |f: &Function, e: EdgeReference| format!("label = \"{}\"", f.ty(*e.value));
    format!("{:?}", Dot::with_attr_getters(function, &config, &|f, e| edge(f, e), &|f, n| label(f, n)))
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

    #[test]
    fn drawing() {
        let (module, f) = diamond();
        let text = dot(&module, &f);
        for line in ["0 [ label = \"add\"]", "1 -> 2 [ label = \"f32[2]\"]", "0 -> 1 [", "0 -> 2 ["] {
            assert!(text.contains(line), "{line} is not in {text}");
        }
    }
}

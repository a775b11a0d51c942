//! Graph IR: functions of SSA nodes on tensors.
//!
//! Invariants (held by the verifier): `body` lists nodes so that every operand is defined before it is used;
//! a node's outputs have the types that its op infers from its inputs; a state is written at most once per
//! function, and a `state.read` gives the value from before the step wherever it is.

use crate::entity::{EntityArena, entity};
use crate::module::Module;
use crate::ops::{Op, OpError};
use crate::types::TensorType;

entity!(/// A node of one function.
    NodeId, "n");
entity!(/// An SSA value of one function.
    ValueId, "v");

/// The purpose of a function.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum FunctionKind {
    /// An entry point of the artifact.
    #[default]
    Entry,
    /// The body of a `scan`.
    Body,
    /// A group of nodes that becomes one kernel, made by fusion and invoked by `call`.
    Group,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ValueDef {
    Input(u32),
    /// Output number `.1` of a node.
    Node(NodeId, u32),
}

#[derive(Clone, PartialEq, Debug)]
pub struct GraphValue {
    pub ty: TensorType,
    pub def: ValueDef,
}

#[derive(Clone, PartialEq, Debug)]
pub struct GraphNode {
    pub op: Op,
    pub inputs: Vec<ValueId>,
    pub outputs: Vec<ValueId>,
}

#[derive(Clone, Default, Debug)]
pub struct Function {
    pub name: String,
    pub kind: FunctionKind,
    pub values: EntityArena<ValueId, GraphValue>,
    pub nodes: EntityArena<NodeId, GraphNode>,
    pub inputs: Vec<ValueId>,
    /// Live nodes in execution order.
    pub body: Vec<NodeId>,
    pub outputs: Vec<ValueId>,
}

impl Function {
    pub fn new(name: impl Into<String>, kind: FunctionKind) -> Function {
        Function { name: name.into(), kind, ..Function::default() }
    }
    pub fn add_input(&mut self, ty: TensorType) -> ValueId {
        let value = self.values.push(GraphValue { ty, def: ValueDef::Input(self.inputs.len() as u32) });
        self.inputs.push(value);
        value
    }
    /// Appends a node; its output types are inferred.
    pub fn append(&mut self, module: &Module, op: Op, inputs: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        let types: Vec<&TensorType> = inputs.iter().map(|&v| &self.values[v].ty).collect();
        let outputs = op.infer(module, &types)?;
        Ok(self.append_typed(op, inputs, outputs))
    }
    /// Appends a node whose output types are known.
    pub fn append_typed(&mut self, op: Op, inputs: &[ValueId], types: Vec<TensorType>) -> Vec<ValueId> {
        let node = self.nodes.push(GraphNode { op, inputs: inputs.to_vec(), outputs: Vec::new() });
        let outputs: Vec<ValueId> = types
            .into_iter()
            .enumerate()
            .map(|(i, ty)| self.values.push(GraphValue { ty, def: ValueDef::Node(node, i as u32) }))
            .collect();
        self.nodes[node].outputs.clone_from(&outputs);
        self.body.push(node);
        outputs
    }
    pub fn ty(&self, v: ValueId) -> &TensorType {
        &self.values[v].ty
    }
    /// The node that defines a value; `None` for inputs.
    pub fn defining_node(&self, v: ValueId) -> Option<&GraphNode> {
        match self.values[v].def {
            ValueDef::Input(_) => None,
            ValueDef::Node(n, _) => Some(&self.nodes[n]),
        }
    }
    pub fn def_id(&self, v: ValueId) -> Option<NodeId> {
        match self.values[v].def {
            ValueDef::Input(_) => None,
            ValueDef::Node(n, _) => Some(n),
        }
    }
    /// Live nodes in order.
    pub fn live_nodes(&self) -> impl DoubleEndedIterator<Item = (NodeId, &GraphNode)> {
        self.body.iter().map(|&id| (id, &self.nodes[id]))
    }
    /// The number of uses of each value by live nodes and outputs, indexed by value.
    pub fn use_counts(&self) -> Vec<u32> {
        let mut counts = vec![0; self.values.len()];
        let uses = self.live_nodes().flat_map(|(_, n)| &n.inputs).chain(&self.outputs);
        for v in uses {
            counts[v.0 as usize] += 1;
        }
        counts
    }
    /// Makes every user of `old` use `new` instead.
    pub fn replace_uses(&mut self, old: ValueId, new: ValueId) {
        for &id in &self.body {
            for input in &mut self.nodes[id].inputs {
                if *input == old {
                    *input = new;
                }
            }
        }
        for output in &mut self.outputs {
            if *output == old {
                *output = new;
            }
        }
    }
    /// Copies the function node by node. `f` sees each node with its inputs already mapped to the new
    /// function and may emit something else instead, returning the values that replace its outputs; `None`
    /// copies the node.
    pub fn rebuild<E>(
        &self,
        mut f: impl FnMut(&mut Function, NodeId, &Op, &[ValueId]) -> Result<Option<Vec<ValueId>>, E>,
    ) -> Result<Function, E> {
        let mut out = Function::new(self.name.clone(), self.kind);
        let mut map: Vec<Option<ValueId>> = vec![None; self.values.len()];
        for &v in &self.inputs {
            map[v.0 as usize] = Some(out.add_input(self.ty(v).clone()));
        }
        let mapped = |map: &[Option<ValueId>], v: ValueId| map[v.0 as usize].expect("defined before use");
        for (id, node) in self.live_nodes() {
            let inputs: Vec<ValueId> = node.inputs.iter().map(|&v| mapped(&map, v)).collect();
            let outputs = match f(&mut out, id, &node.op, &inputs)? {
                Some(outputs) => outputs,
                None => {
                    let types = node.outputs.iter().map(|&v| self.ty(v).clone()).collect();
                    out.append_typed(node.op.clone(), &inputs, types)
                }
            };
            assert_eq!(outputs.len(), node.outputs.len(), "replacement of {}", node.op.name());
            for (&old, new) in node.outputs.iter().zip(outputs) {
                map[old.0 as usize] = Some(new);
            }
        }
        out.outputs = self.outputs.iter().map(|&v| mapped(&map, v)).collect();
        Ok(out)
    }
}

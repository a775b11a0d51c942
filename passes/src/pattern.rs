//! Patterns are values: `op(MatMul, [any("x"), op(Permute, [any("w")]).when("swaps the last two axes", |at|
//! ..)])`.
//!
//! A pattern is matched with the value that a node defines and follows operands towards the inputs. It gives
//! named captures, or a [`MatchFailure`] that says whether the root's op was right and what did not fit: the
//! first reason, for `--explain-passes`.

use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{Function, GraphNode, NodeId, ValueId};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::types::TensorType;
use std::collections::BTreeMap;

/// An op without its attributes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum OpKind {
    Param,
    StateRead,
    StateWrite,
    CacheAppend,
    SequenceSplit,
    SequenceJoin,
    OutputRows,
    AllGather,
    Call,
    Scan,
    Constant,
    Unary(UnOp),
    Binary(BinOp),
    SelectGe,
    Cast,
    Iota,
    Reshape,
    Permute,
    Slice,
    Concat,
    Gather,
    MatMul,
    Reduce,
    LayerNorm,
    RmsNorm,
    Softmax,
    Attention,
    TopK,
    MatMulExperts,
    MatMulExpertsI8,
    Dequantize,
    GroupScale,
    GroupQuantize,
    GroupSum,
    QuantizeRows,
    MatMulI8,
}

impl OpKind {
    pub fn of(op: &Op) -> OpKind {
        match op {
            Op::Param(_) => OpKind::Param,
            Op::StateRead(_) => OpKind::StateRead,
            Op::StateWrite(_) => OpKind::StateWrite,
            Op::CacheAppend(_) => OpKind::CacheAppend,
            Op::SequenceSplit { .. } => OpKind::SequenceSplit,
            Op::SequenceJoin => OpKind::SequenceJoin,
            Op::OutputRows => OpKind::OutputRows,
            Op::AllGather { .. } => OpKind::AllGather,
            Op::Call(_) => OpKind::Call,
            Op::Scan { .. } => OpKind::Scan,
            Op::Constant { .. } => OpKind::Constant,
            Op::Unary(op) => OpKind::Unary(*op),
            Op::Binary(op) => OpKind::Binary(*op),
            Op::SelectGe => OpKind::SelectGe,
            Op::Cast(_) => OpKind::Cast,
            Op::Iota { .. } => OpKind::Iota,
            Op::Reshape { .. } => OpKind::Reshape,
            Op::Permute { .. } => OpKind::Permute,
            Op::Slice { .. } => OpKind::Slice,
            Op::Concat { .. } => OpKind::Concat,
            Op::Gather => OpKind::Gather,
            Op::MatMul { .. } => OpKind::MatMul,
            Op::Reduce { .. } => OpKind::Reduce,
            Op::LayerNorm { .. } => OpKind::LayerNorm,
            Op::RmsNorm { .. } => OpKind::RmsNorm,
            Op::Softmax => OpKind::Softmax,
            Op::Attention(_) => OpKind::Attention,
            Op::TopK { .. } => OpKind::TopK,
            Op::MatMulExperts { .. } => OpKind::MatMulExperts,
            Op::MatMulExpertsI8 { .. } => OpKind::MatMulExpertsI8,
            Op::Dequantize => OpKind::Dequantize,
            Op::GroupScale { .. } => OpKind::GroupScale,
            Op::GroupQuantize { .. } => OpKind::GroupQuantize,
            Op::GroupSum { .. } => OpKind::GroupSum,
            Op::QuantizeRows { .. } => OpKind::QuantizeRows,
            Op::MatMulI8 { .. } => OpKind::MatMulI8,
        }
    }

    /// True if the operands may be exchanged.
    pub fn commutes(self) -> bool {
        matches!(self, OpKind::Binary(BinOp::Add | BinOp::Mul | BinOp::Min | BinOp::Max))
    }
}

/// The context that a guard may look at.
pub struct MatchSite<'a> {
    pub module: &'a Module,
    pub f: &'a Function,
    /// The value that the guarded part of the pattern has matched.
    pub value: ValueId,
    captures: &'a MatchCaptures,
    uses: &'a [u32],
}

impl<'a> MatchSite<'a> {
    /// The node that the guarded part has matched; `None` for a function's input.
    pub fn node(&self) -> Option<&'a GraphNode> {
        self.f.defining_node(self.value)
    }
    pub fn ty(&self) -> &'a TensorType {
        self.f.ty(self.value)
    }
    /// Type of an operand of the matched node.
    pub fn operand_type(&self, i: usize) -> Option<&'a TensorType> {
        Some(self.f.ty(*self.node()?.inputs.get(i)?))
    }
    /// A value captured so far.
    pub fn capture(&self, name: &str) -> Option<ValueId> {
        self.captures.get(name)
    }
    /// The number of nodes and outputs that use the matched value.
    pub fn use_count(&self) -> u32 {
        self.uses[self.value.index()]
    }
}

/// A condition with the words that say what it asks for.
#[derive(Clone, Copy)]
struct PatternGuard {
    asks: &'static str,
    holds: fn(&MatchSite) -> bool,
}

#[derive(Clone)]
enum PatternKind {
    Any,
    /// A constant, of that value if given.
    Constant(Option<f64>),
    /// The value that an earlier part has captured under the pattern's name.
    Same,
    /// An op with these operands; `None` matches any.
    Op(OpKind, Option<Vec<GraphPattern>>),
}

/// See the module's head.
#[derive(Clone)]
pub struct GraphPattern {
    what: PatternKind,
    name: Option<&'static str>,
    guards: Vec<PatternGuard>,
}

/// Any value, captured.
pub fn any(name: &'static str) -> GraphPattern {
    GraphPattern { what: PatternKind::Any, name: Some(name), guards: vec![] }
}
/// The value that an earlier part (operands are matched left to right) has captured under this name.
pub fn same(name: &'static str) -> GraphPattern {
    GraphPattern { what: PatternKind::Same, name: Some(name), guards: vec![] }
}
/// A constant of this value.
pub fn constant(value: f64) -> GraphPattern {
    GraphPattern { what: PatternKind::Constant(Some(value)), name: None, guards: vec![] }
}
/// Any constant, captured.
pub fn any_constant(name: &'static str) -> GraphPattern {
    GraphPattern { what: PatternKind::Constant(None), name: Some(name), guards: vec![] }
}
/// An op with exactly these operands; those of commutative ops match in either order.
pub fn op(kind: OpKind, operands: impl IntoIterator<Item = GraphPattern>) -> GraphPattern {
    GraphPattern {
        what: PatternKind::Op(kind, Some(operands.into_iter().collect())),
        name: None,
        guards: vec![],
    }
}
/// An op with any operands.
pub fn node(kind: OpKind) -> GraphPattern {
    GraphPattern { what: PatternKind::Op(kind, None), name: None, guards: vec![] }
}

impl GraphPattern {
    /// Captures the matched value.
    pub fn named(mut self, name: &'static str) -> GraphPattern {
        self.name = Some(name);
        self
    }
    /// Adds a condition; `asks` completes the sentence "this is not one that ...", e.g. "swaps the last two
    /// axes".
    pub fn when(mut self, asks: &'static str, holds: fn(&MatchSite) -> bool) -> GraphPattern {
        self.guards.push(PatternGuard { asks, holds });
        self
    }

    /// Kind of the root, if the pattern is of an op.
    pub fn root(&self) -> Option<OpKind> {
        match self.what {
            PatternKind::Op(kind, _) => Some(kind),
            PatternKind::Any | PatternKind::Same | PatternKind::Constant(_) => None,
        }
    }
}

/// Matched values by name; the root is always there under "".
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MatchCaptures {
    values: BTreeMap<&'static str, ValueId>,
}

impl MatchCaptures {
    pub fn get(&self, name: &str) -> Option<ValueId> {
        self.values.get(name).copied()
    }
}

impl std::ops::Index<&str> for MatchCaptures {
    type Output = ValueId;
    /// A name that the pattern captures.
    fn index(&self, name: &str) -> &ValueId {
        &self.values[name]
    }
}

/// The reasons why a pattern does not match.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MatchFailure {
    /// The root is another op: not worth a word.
    Other,
    /// The root's op is right; the first thing that is not.
    Near(String),
}

/// Holds patterns against the nodes of one function.
pub struct PatternMatcher<'a> {
    module: &'a Module,
    f: &'a Function,
    uses: Vec<u32>,
}

impl<'a> PatternMatcher<'a> {
    pub fn new(module: &'a Module, f: &'a Function) -> PatternMatcher<'a> {
        PatternMatcher { module, f, uses: f.use_counts() }
    }

    /// Matches the (only) output of a node.
    pub fn match_node(&self, pattern: &GraphPattern, id: NodeId) -> Result<MatchCaptures, MatchFailure> {
        let node = &self.f.nodes[id];
        let &[root] = node.outputs.as_slice() else { return Err(MatchFailure::Other) };
        if pattern.root().is_some_and(|kind| kind != OpKind::of(&node.op)) {
            return Err(MatchFailure::Other);
        }
        let mut captures = MatchCaptures::default();
        captures.values.insert("", root);
        self.match_value(pattern, root, &mut captures).map_err(MatchFailure::Near)?;
        Ok(captures)
    }

    fn match_value(
        &self,
        pattern: &GraphPattern,
        v: ValueId,
        captures: &mut MatchCaptures,
    ) -> Result<(), String> {
        let found = self.f.defining_node(v);
        match &pattern.what {
            PatternKind::Any => {}
            PatternKind::Same => {
                let name = pattern.name.unwrap_or_default();
                if captures.get(name) != Some(v) {
                    return Err(format!("{} is not the same value as {name}", self.describe(v)));
                }
            }
            PatternKind::Constant(wanted) => {
                let Some(Op::Constant { value, .. }) = found.map(|n| &n.op) else {
                    return Err(format!("{} is not a constant", self.describe(v)));
                };
                if wanted.is_some_and(|w| w != *value) {
                    return Err(format!("the constant is {value}"));
                }
            }
            PatternKind::Op(kind, operands) => {
                let Some(node) = found.filter(|n| OpKind::of(&n.op) == *kind) else {
                    return Err(format!("{} is not a {kind:?}", self.describe(v)));
                };
                if let Some(operands) = operands {
                    self.match_operands(*kind, operands, node, captures)?;
                }
            }
        }
        if let (Some(name), false) = (pattern.name, matches!(pattern.what, PatternKind::Same)) {
            captures.values.insert(name, v);
        }
        for guard in &pattern.guards {
            let at = MatchSite { module: self.module, f: self.f, value: v, captures, uses: &self.uses };
            if !(guard.holds)(&at) {
                return Err(format!("{} is not one that {}", self.describe(v), guard.asks));
            }
        }
        Ok(())
    }

    /// Matches the operands in the given order, then exchanged if the op commutes; the reason of the first
    /// order is reported.
    fn match_operands(
        &self,
        kind: OpKind,
        patterns: &[GraphPattern],
        node: &GraphNode,
        captures: &mut MatchCaptures,
    ) -> Result<(), String> {
        if patterns.len() != node.inputs.len() {
            return Err(format!("{} has {} operands", node.op.name(), node.inputs.len()));
        }
        let attempt = |inputs: &mut dyn Iterator<Item = ValueId>| {
            let mut tried = captures.clone();
            patterns
                .iter()
                .zip(inputs)
                .try_for_each(|(p, v)| self.match_value(p, v, &mut tried))
                .map(|()| tried)
        };
        let straight = attempt(&mut node.inputs.iter().copied());
        let result = match straight {
            Err(_) if kind.commutes() => attempt(&mut node.inputs.iter().rev().copied()).or(straight),
            other => other,
        };
        *captures = result?;
        Ok(())
    }

    /// A value by what defines it.
    fn describe(&self, v: ValueId) -> String {
        match self.f.defining_node(v).map(|n| &n.op) {
            None => format!("input {}", self.f.ty(v)),
            Some(Op::Param(p)) => format!("param {}", self.module.params[*p].name),
            Some(op) => format!("{} {}", op.name(), self.f.ty(v)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlcc_ir::graph::FunctionKind;
    use mlcc_ir::types::DType;

    /// `(x + 1) * (y - x)`.
    fn example() -> (Module, Function) {
        let module = Module::new("m");
        let mut f = Function::new("f", FunctionKind::Entry);
        let ty = TensorType::new(DType::F32, [2]);
        let (x, y) = (f.add_input(ty.clone()), f.add_input(ty));
        let one = f.append(&module, Op::Constant { value: 1.0, dtype: DType::F32 }, &[]).unwrap()[0];
        let sum = f.append(&module, Op::Binary(BinOp::Add), &[x, one]).unwrap()[0];
        let rest = f.append(&module, Op::Binary(BinOp::Sub), &[y, x]).unwrap()[0];
        f.outputs = f.append(&module, Op::Binary(BinOp::Mul), &[sum, rest]).unwrap();
        (module, f)
    }

    fn bin(op: BinOp) -> OpKind {
        OpKind::Binary(op)
    }

    fn at_root(pattern: &GraphPattern) -> Result<MatchCaptures, MatchFailure> {
        let (module, f) = example();
        PatternMatcher::new(&module, &f).match_node(pattern, f.def_id(f.outputs[0]).unwrap())
    }

    #[test]
    fn commutative_operands_match_in_either_order() {
        let sum = op(bin(BinOp::Add), [constant(1.0), any("x")]);
        let rest = op(bin(BinOp::Sub), [any("y"), same("x")]).named("rest");
        let found = at_root(&op(bin(BinOp::Mul), [sum.clone(), rest.clone()])).unwrap();
        let (_, f) = example();
        assert_eq!((found["x"], found["y"]), (f.inputs[0], f.inputs[1]));
        assert_eq!(found[""], f.outputs[0]);
        assert_eq!(f.defining_node(found["rest"]).unwrap().op, Op::Binary(BinOp::Sub));
        // With the parts exchanged, `same` comes before what it names and fails in the one order only.
        let other = op(bin(BinOp::Sub), [any("y"), any("x")]);
        assert!(at_root(&op(bin(BinOp::Mul), [other, sum])).is_ok());
    }

    #[test]
    fn misses_say_why() {
        let near = |p: GraphPattern| match at_root(&p) {
            Err(MatchFailure::Near(why)) => why,
            other => panic!("{other:?}"),
        };
        assert_eq!(at_root(&node(OpKind::MatMul)), Err(MatchFailure::Other));
        let two = op(bin(BinOp::Add), [any("x"), constant(2.0)]);
        assert_eq!(near(op(bin(BinOp::Mul), [two, any("r")])), "the constant is 1");
        let exp = node(OpKind::Unary(UnOp::Exp));
        assert_eq!(near(op(bin(BinOp::Mul), [any("s"), exp])), "sub f32[2] is not a Unary(Exp)");
        let guarded = node(bin(BinOp::Mul)).when("has rank 3", |at| at.ty().rank() == 3);
        assert_eq!(near(guarded), "mul f32[2] is not one that has rank 3");
        let twice = op(bin(BinOp::Sub), [same("x"), any("y")]);
        let sum = op(bin(BinOp::Add), [any("x"), any_constant("c")]);
        assert_eq!(near(op(bin(BinOp::Mul), [sum, twice])), "input f32[2] is not the same value as x");
    }

    #[test]
    fn guards_see_uses_and_captures() {
        let used_once = |at: &MatchSite| at.use_count() == 1 && at.capture("x").is_some();
        let sum = op(bin(BinOp::Add), [any("x"), constant(1.0)]).when("is used once", used_once);
        assert!(at_root(&op(bin(BinOp::Mul), [sum, any("r")])).is_ok());
        let shared = any("x").when("is used once", |at| at.use_count() == 1);
        let sum = op(bin(BinOp::Add), [shared, constant(1.0)]);
        assert!(at_root(&op(bin(BinOp::Mul), [sum, any("r")])).is_err());
    }
}

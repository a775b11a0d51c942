//! Batched entry functions: one token for each of `n` sequences.
//!
//! In such a function a row `[n, ..]` belongs to each sequence and is computed with those of the others: weights are read
//! once. What looks at one sequence stands between `sequence.split` and `sequence.join`: values there exist once per
//! sequence, as if the ops between were run for one sequence after the other. States and `past` are those of the sequence.
//!
//! A value is of one sequence if it comes from a split, a state or `past`, or is computed from such a value. Only a join
//! makes a value of all sequences from it, and only a split one of a single sequence from rows of all.

use crate::dim::{Atom, Dim, Sym};
use crate::entity::EntityId;
use crate::graph::{Function, Node, NodeId, ValueId};
use crate::module::Module;
use crate::ops::Op;

/// Which values of a batched function are of one sequence, by value id; `None` if the function is not batched.
pub fn per_sequence(module: &Module, f: &Function) -> Option<Vec<bool>> {
    if !is_batched(f) {
        return None;
    }
    let mut single = vec![false; f.values.len()];
    for (_, node) in f.live() {
        let each = runs_for_each(module, node, &single);
        let outputs = match node.op {
            Op::SequenceJoin => false,
            _ => each,
        };
        node.outputs.iter().for_each(|v| single[v.index()] = outputs);
    }
    Some(single)
}

/// Whether a function decodes a batch: it splits rows of sequences or joins them.
pub fn is_batched(f: &Function) -> bool {
    f.live().any(|(_, node)| matches!(node.op, Op::SequenceSplit | Op::SequenceJoin))
}

/// Whether a node of a batched function is run for each sequence; `single` tells that of the values before it.
pub fn runs_for_each(module: &Module, node: &Node, single: &[bool]) -> bool {
    match node.op {
        Op::SequenceSplit | Op::SequenceJoin | Op::StateRead(_) | Op::StateWrite(_) | Op::CacheAppend(_) => {
            true
        }
        _ => node.inputs.iter().any(|v| single[v.index()]) || reads_past(module, node),
    }
}

/// Whether the result depends on `past` beyond the types of the inputs.
fn reads_past(module: &Module, node: &Node) -> bool {
    match &node.op {
        Op::Iota { start, len } => mentions(start, Sym::Past) || mentions(len, Sym::Past),
        Op::Call(callee) => {
            module.functions.get(*callee).is_some_and(|f| f.live().any(|(_, n)| reads_past(module, n)))
        }
        _ => false,
    }
}

/// Whether a size depends on a symbol.
pub fn mentions(dim: &Dim, sym: Sym) -> bool {
    dim.terms().iter().any(|(atom, _)| match atom {
        Atom::Sym(s) => *s == sym,
        Atom::FloorDiv(d, _) => mentions(d, sym),
        Atom::Min(a, b) | Atom::Max(a, b) => mentions(a, sym) || mentions(b, sym),
        Atom::Product(factors) => factors.iter().any(|d| mentions(d, sym)),
    })
}

/// The first node of a batched function that mixes values of one sequence with rows of all, and what is wrong with it.
pub(crate) fn fault(module: &Module, f: &Function) -> Option<(NodeId, String)> {
    let single = per_sequence(module, f)?;
    let rows = |v: ValueId| f.ty(v).dims.iter().any(|d| mentions(d, Sym::N));
    for (id, node) in f.live() {
        let each = runs_for_each(module, node, &single);
        let all = |v: &&ValueId| !single[v.index()];
        let message = match node.op {
            Op::SequenceSplit => node
                .inputs
                .iter()
                .find(|v| single[v.index()])
                .map(|_| "splits what is of one sequence already"),
            Op::SequenceJoin => node.inputs.iter().find(all).map(|_| "joins what is not of one sequence"),
            _ if !each => None,
            _ if node.inputs.iter().filter(all).any(|&v| rows(v)) => {
                Some("reads rows of all sequences for one of them: split them")
            }
            _ if node.outputs.iter().any(|&v| rows(v)) => Some("makes more than the row of one sequence"),
            _ => None,
        };
        if let Some(message) = message {
            return Some((id, message.into()));
        }
    }
    None
}

/// Whether an output of a batched function is of one sequence.
pub(crate) fn unjoined_output(module: &Module, f: &Function) -> Option<usize> {
    let single = per_sequence(module, f)?;
    f.outputs.iter().position(|v| single[v.index()])
}

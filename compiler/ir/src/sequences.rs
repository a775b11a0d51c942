//! Entry functions for rows of several sequences, computed together: weights are read once for all of them.
//!
//! There are two kinds ([`RowBatching`]): one row of each of `n` sequences, or any number of rows of each of
//! `b` sequences, sequence by sequence, `n` rows in all. Ops on one sequence are between `sequence.split` and
//! `sequence.join`: values there exist once per sequence, as if the ops between were run for each sequence.
//! Logits may be requested for some rows only: behind `rows.wanted` there are no others.
//!
//! So a value has a scope ([`RowScope`]), and symbols mean what they mean there. In the scope of a sequence,
//! states, `past` and (in a ragged function) `n` are those of the sequence; behind `rows.wanted`, `n` is the
//! number of these rows. That way an op is the same function, and the same kernel, as in a function for one
//! sequence.
//!
//! A value is of one sequence if it comes from a split, a state or `past`, counts rows (`iota` over `n`), or
//! is computed from such a value. Only a join makes a value of all sequences from it, and only a split one of
//! a single sequence from rows of all.

use crate::dim::{Dim, DimAtom, SizeSymbol};
use crate::entity::EntityId;
use crate::graph::{Function, GraphNode, NodeId, ValueId};
use crate::module::Module;
use crate::ops::Op;

/// The rows of an entry function.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum RowBatching {
    /// All of one sequence.
    #[default]
    Single,
    /// One of each of `n` sequences.
    OneEach,
    /// At least one row of each of `b` sequences.
    Ragged,
}

impl RowBatching {
    /// True if there are rows of several sequences.
    pub fn is_batched(self) -> bool {
        match self {
            RowBatching::Single => false,
            RowBatching::OneEach | RowBatching::Ragged => true,
        }
    }
}

/// The rows that a value or a node is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum RowScope {
    /// All rows of the call, or none in particular.
    All,
    /// The rows of one sequence: the value exists once per sequence.
    Sequence,
    /// The rows whose logits are requested.
    Outputs,
}

/// The scopes of the values of a batched function, by value id; `None` if the function is not batched.
pub fn row_scopes(module: &Module, f: &Function) -> Option<Vec<RowScope>> {
    if !row_batching(f).is_batched() {
        return None;
    }
    let mut scopes = vec![RowScope::All; f.values.len()];
    for (_, node) in f.live_nodes() {
        let scope = match node.op {
            Op::SequenceJoin => RowScope::All,
            _ => scope_of(module, node, &scopes),
        };
        node.outputs.iter().for_each(|v| scopes[v.index()] = scope);
    }
    Some(scopes)
}

/// The rows that a function takes: it splits rows of sequences or joins them.
pub fn row_batching(f: &Function) -> RowBatching {
    let kind = |node: &GraphNode| match node.op {
        Op::SequenceSplit { ragged: true } | Op::OutputRows => RowBatching::Ragged,
        Op::SequenceSplit { ragged: false } => RowBatching::OneEach,
        Op::SequenceJoin if joins_one(f, node) => RowBatching::OneEach,
        Op::SequenceJoin => RowBatching::Ragged,
        _ => RowBatching::Single,
    };
    f.live_nodes().map(|(_, node)| kind(node)).max().unwrap_or_default()
}

/// True if a join takes one row of each sequence.
fn joins_one(f: &Function, node: &GraphNode) -> bool {
    node.inputs.first().is_some_and(|&v| f.ty(v).dims.first() == Some(&Dim::from(1)))
}

/// The rows that a node of a batched function computes; `scopes` has those of the values before it. A join is
/// run for every sequence, its result is of all.
pub fn scope_of(module: &Module, node: &GraphNode, scopes: &[RowScope]) -> RowScope {
    let reads = |scope| node.inputs.iter().any(|v| scopes[v.index()] == scope);
    match node.op {
        Op::SequenceSplit { .. }
        | Op::SequenceJoin
        | Op::StateRead(_)
        | Op::StateWrite(_)
        | Op::CacheAppend(_) => RowScope::Sequence,
        Op::OutputRows => RowScope::Outputs,
        _ if reads(RowScope::Sequence) || counts_rows(module, node) => RowScope::Sequence,
        _ if reads(RowScope::Outputs) => RowScope::Outputs,
        _ => RowScope::All,
    }
}

/// True if the result depends on `past` or on the number of rows beyond the types of the inputs.
fn counts_rows(module: &Module, node: &GraphNode) -> bool {
    match &node.op {
        Op::Iota { start, len } => {
            let counts = |dim| depends_on(dim, SizeSymbol::Past) || depends_on(dim, SizeSymbol::N);
            counts(start) || counts(len)
        }
        Op::Call(callee) => {
            module.functions.get(*callee).is_some_and(|f| f.live_nodes().any(|(_, n)| counts_rows(module, n)))
        }
        _ => false,
    }
}

/// True if a size depends on a symbol.
pub fn depends_on(dim: &Dim, sym: SizeSymbol) -> bool {
    dim.terms().iter().any(|(atom, _)| match atom {
        DimAtom::Sym(s) => *s == sym,
        DimAtom::FloorDiv(d, _) => depends_on(d, sym),
        DimAtom::Min(a, b) | DimAtom::Max(a, b) => depends_on(a, sym) || depends_on(b, sym),
        DimAtom::Product(factors) => factors.iter().any(|d| depends_on(d, sym)),
    })
}

/// The first node of a batched function that mixes rows of different scopes, and what is wrong with it.
pub(crate) fn find_mixed_rows(module: &Module, f: &Function) -> Option<(NodeId, String)> {
    let (scopes, batching) = (row_scopes(module, f)?, row_batching(f));
    f.live_nodes().find_map(|(id, node)| {
        let message = mixed(f, node, scope_of(module, node, &scopes), &scopes, batching)?;
        Some((id, message.into()))
    })
}

fn mixed(
    f: &Function,
    node: &GraphNode,
    scope: RowScope,
    scopes: &[RowScope],
    batching: RowBatching,
) -> Option<&'static str> {
    let rows = |v: ValueId| f.ty(v).dims.iter().any(|d| depends_on(d, SizeSymbol::N));
    let reads = |scope| node.inputs.iter().any(|v| scopes[v.index()] == scope);
    let reads_all = || node.inputs.iter().any(|&v| scopes[v.index()] == RowScope::All && rows(v));
    let ragged = batching == RowBatching::Ragged;
    let one_each = match node.op {
        Op::SequenceSplit { ragged } => !ragged,
        Op::SequenceJoin => joins_one(f, node),
        _ => false,
    };
    match node.op {
        Op::SequenceSplit { .. } | Op::SequenceJoin if ragged && one_each => {
            Some("takes one row of each sequence, other nodes take pieces")
        }
        Op::SequenceSplit { .. } if reads(RowScope::Sequence) => {
            Some("splits what is of one sequence already")
        }
        Op::SequenceSplit { .. } if reads(RowScope::Outputs) => {
            Some("splits rows that are wanted, not those of all")
        }
        Op::SequenceSplit { .. } => None,
        Op::SequenceJoin if reads(RowScope::All) || reads(RowScope::Outputs) => {
            Some("joins what is not of one sequence")
        }
        Op::SequenceJoin => None,
        Op::OutputRows if reads(RowScope::Sequence) || reads(RowScope::Outputs) => {
            Some("takes the wanted rows of something that is not the rows of all")
        }
        Op::OutputRows => None,
        _ => match scope {
            RowScope::All => None,
            RowScope::Sequence if reads(RowScope::Outputs) => {
                Some("reads rows that are wanted for one sequence")
            }
            RowScope::Sequence if reads_all() => {
                Some("reads rows of all sequences for one of them: split them")
            }
            RowScope::Sequence if !ragged && node.outputs.iter().any(|&v| rows(v)) => {
                Some("makes more than the row of one sequence")
            }
            RowScope::Sequence => None,
            RowScope::Outputs if reads_all() => Some("reads rows of all beside those that are wanted"),
            RowScope::Outputs => None,
        },
    }
}

/// The first output of a batched function that is of one sequence, if there is one.
pub(crate) fn unjoined_output(module: &Module, f: &Function) -> Option<usize> {
    let scopes = row_scopes(module, f)?;
    f.outputs.iter().position(|v| scopes[v.index()] == RowScope::Sequence)
}

//! Rewrites: a pattern (with its guards) and a builder that emits what takes the matched value's place.
//! Applied over the module to a fixed point, with a record of what matched and of the first reason of each
//! near miss.

use crate::dce::remove_dead_nodes;
use crate::pattern::{GraphPattern, MatchCaptures, MatchFailure, OpKind, PatternMatcher};
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{Function, NodeId, ValueId};
use mlcc_ir::module::Module;
use mlcc_ir::ops::{Op, OpError};
use std::collections::{BTreeMap, BTreeSet};

/// Sweeps over a function before a set of rewrites counts as running in circles.
const MOST_SWEEPS: usize = 1000;

/// One replacement rule.
pub struct RewriteRule {
    /// The effect of the rewrite, for `--explain-passes`.
    pub name: &'static str,
    pub pattern: GraphPattern,
    /// Emits the replacement.
    pub build: fn(&mut RewriteBuilder) -> Result<ValueId, OpError>,
}

/// The context of a builder: the function being rebuilt, and the match in terms of its values.
pub struct RewriteBuilder<'a> {
    pub module: &'a Module,
    /// Type-checked appending goes through [`RewriteBuilder::op`].
    pub f: &'a mut Function,
    old: &'a Function,
    map: &'a [Option<ValueId>],
    captures: MatchCaptures,
}

impl RewriteBuilder<'_> {
    /// A captured value.
    pub fn get(&self, name: &str) -> ValueId {
        self.mapped(self.captures[name])
    }
    /// The op of a captured value's node. Only for captures that the pattern knows to be ops.
    pub fn captured_op(&self, name: &str) -> &Op {
        &self.old.defining_node(self.captures[name]).expect("the capture is an op's result").op
    }
    /// The matched root.
    pub fn root(&self) -> &Op {
        self.captured_op("")
    }
    /// Operands of the matched root.
    pub fn operands(&self) -> Vec<ValueId> {
        self.operands_of("")
    }
    /// Operands of a captured value's node. Only for captures that the pattern knows to be ops.
    pub fn operands_of(&self, name: &str) -> Vec<ValueId> {
        let node = self.old.defining_node(self.captures[name]).expect("the capture is an op's result");
        node.inputs.iter().map(|&v| self.mapped(v)).collect()
    }
    /// Appends an op.
    pub fn op(&mut self, op: Op, inputs: &[ValueId]) -> Result<ValueId, OpError> {
        Ok(self.f.append(self.module, op, inputs)?[0])
    }
    fn mapped(&self, old: ValueId) -> ValueId {
        self.map[old.index()].expect("captures are defined before the root")
    }
}

/// The report on near misses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NearMisses {
    Report,
    /// No report, for rules that most places are not meant for.
    Skip,
}

/// Applies rewrites to all functions until nothing matches. Returns the number of replacements.
pub fn apply(
    program: &mut LoweredProgram,
    ctx: &mut PassContext,
    pass: &'static str,
    rewrites: &[RewriteRule],
    misses: NearMisses,
) -> Result<usize, PassError> {
    let mut total = 0;
    for id in program.module.functions.ids().collect::<Vec<_>>() {
        let mut record = RewriteRecord::default();
        let mut sweeps = 0;
        let mut made = BTreeSet::new();
        loop {
            let f = &program.module.functions[id];
            let swept = sweep_once(&program.module, f, rewrites, &made, &mut record);
            let Some(rebuilt) = swept.map_err(PassError::op_error(pass))? else { break };
            program.module.functions[id] = rebuilt.function;
            made = rebuilt.made;
            remove_dead_nodes(&mut program.module, id);
            sweeps += 1;
            if sweeps > MOST_SWEEPS {
                return Err(PassError::internal(pass, "rewrites run in circles"));
            }
        }
        total += record.replaced.iter().map(|(_, n)| n).sum::<usize>();
        record.report(ctx, &program.module.functions[id].name, rewrites, misses);
    }
    Ok(total)
}

/// Replacements and near misses in one function.
#[derive(Default)]
struct RewriteRecord {
    /// Replacements by rewrite, in order of first match.
    replaced: Vec<(usize, usize)>,
    /// Misses of the last sweep (what stayed), by rewrite and reason.
    missed: Vec<((usize, String), usize)>,
}

/// Adds one to the count of `key`.
pub(crate) fn count_key<K: PartialEq>(list: &mut Vec<(K, usize)>, key: K) {
    match list.iter_mut().find(|(k, _)| *k == key) {
        Some((_, n)) => *n += 1,
        None => list.push((key, 1)),
    }
}

pub(crate) fn times_text(n: usize) -> String {
    if n == 1 { "once".into() } else { format!("{n} times") }
}

impl RewriteRecord {
    fn report(&self, ctx: &mut PassContext, function: &str, rewrites: &[RewriteRule], misses: NearMisses) {
        for (rewrite, n) in &self.replaced {
            ctx.note(format!("@{function}: {} ({})", rewrites[*rewrite].name, times_text(*n)));
        }
        if misses == NearMisses::Skip {
            return;
        }
        for ((rewrite, why), n) in &self.missed {
            let name = rewrites[*rewrite].name;
            ctx.note(format!("@{function}: not: {name}, because {why} ({})", times_text(*n)));
        }
    }
}

/// A function after some of its nodes were replaced.
struct RebuiltFunction {
    function: Function,
    /// Nodes that rewrites have emitted, in this sweep or in one before.
    made: BTreeSet<NodeId>,
}

/// One pass over the nodes of a function; the first rewrite that matches a node is taken. `None` if none did.
/// Nodes that rewrites have `made` were a match: if they fit no pattern any more, that is no miss.
fn sweep_once(
    module: &Module,
    f: &Function,
    rewrites: &[RewriteRule],
    made: &BTreeSet<NodeId>,
    record: &mut RewriteRecord,
) -> Result<Option<RebuiltFunction>, OpError> {
    record.missed.clear();
    let matcher = PatternMatcher::new(module, f);
    let mut found: BTreeMap<NodeId, (usize, MatchCaptures)> = BTreeMap::new();
    for (id, node) in f.live_nodes() {
        let kind = OpKind::of(&node.op);
        for (i, rewrite) in rewrites.iter().enumerate() {
            if rewrite.pattern.root().is_some_and(|root| root != kind) {
                continue;
            }
            match matcher.match_node(&rewrite.pattern, id) {
                Ok(captures) => {
                    found.insert(id, (i, captures));
                    count_key(&mut record.replaced, i);
                    break;
                }
                Err(MatchFailure::Near(why)) if !made.contains(&id) => {
                    count_key(&mut record.missed, (i, why))
                }
                Err(MatchFailure::Near(_) | MatchFailure::Other) => {}
            }
        }
    }
    if found.is_empty() { Ok(None) } else { rebuild(module, f, rewrites, found, made).map(Some) }
}

/// Copies the function with the matched roots replaced. Matches may overlap: each replaces its root by an
/// equal value, and what it has captured exists in the copy too.
fn rebuild(
    module: &Module,
    f: &Function,
    rewrites: &[RewriteRule],
    mut found: BTreeMap<NodeId, (usize, MatchCaptures)>,
    made: &BTreeSet<NodeId>,
) -> Result<RebuiltFunction, OpError> {
    let mut made_now = BTreeSet::new();
    let mut out = Function::new(f.name.clone(), f.kind);
    let mut map: Vec<Option<ValueId>> = vec![None; f.values.len()];
    for &v in &f.inputs {
        map[v.index()] = Some(out.add_input(f.ty(v).clone()));
    }
    for (id, node) in f.live_nodes() {
        let first = out.nodes.len();
        let replaced = found.remove(&id);
        let is_made = replaced.is_some() || made.contains(&id);
        let outputs = match replaced {
            Some((i, captures)) => {
                let mut build = RewriteBuilder { module, f: &mut out, old: f, map: &map, captures };
                let new = (rewrites[i].build)(&mut build)?;
                debug_assert_eq!(out.ty(new), f.ty(node.outputs[0]), "{}", rewrites[i].name);
                vec![new]
            }
            None => {
                let inputs: Vec<ValueId> =
                    node.inputs.iter().map(|v| map[v.index()].expect("defined before use")).collect();
                let types = node.outputs.iter().map(|&v| f.ty(v).clone()).collect();
                out.append_typed(node.op.clone(), &inputs, types)
            }
        };
        if is_made {
            made_now.extend((first..out.nodes.len()).map(NodeId::from_index));
        }
        for (old, new) in node.outputs.iter().zip(outputs) {
            map[old.index()] = Some(new);
        }
    }
    out.outputs = f.outputs.iter().map(|v| map[v.index()].expect("outputs are defined")).collect();
    Ok(RebuiltFunction { function: out, made: made_now })
}

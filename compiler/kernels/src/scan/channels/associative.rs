//! Bodies of scans over channels whose steps can be joined: weighted sums beside the running maximum of their
//! exponents, as in RWKV-4,
//!
//! ```text
//! top' = max(top + fade, level)
//! sum' = sum * exp(top + fade - top') + x * exp(level - top')
//! ```
//!
//! where `fade` is a constant of its channel and `level` and `x` know no carries. What several steps make of
//! nothing is a level with sums too, so carries before them join it as they join a step, faded by all of
//! them.

use super::ChannelScan;
use crate::inline::{Binding, Inliner, LaneIndex};
use mlcc_ir::entity::EntityId;
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::ops::Op;
use mlcc_kernel_lang::Val;
use std::collections::HashMap;

/// The parts of such a body.
pub(super) struct AssociativeBody {
    /// The carry that is the maximum, and what it becomes.
    max_carry: (usize, ValueId),
    decay: ValueId,
    level: ValueId,
    sums: Vec<WeightedCarry>,
}

/// One of the other carries, with the weights of what it was and of what a step adds.
struct WeightedCarry {
    carry: usize,
    old: ValueId,
    new: ValueId,
}

/// The dependence of a value, each also on those before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ValueDependence {
    Channel,
    Step,
    Carries,
}

impl AssociativeBody {
    /// Analyzes a body with `carries` carries and `seqs` sequences; `None` if it is no such body.
    pub fn analyze(body: &Function, carries: usize, seqs: usize) -> Option<AssociativeBody> {
        let b = BodyDependences { body, dependences: dependence(body, carries, seqs) };
        (0..carries).find_map(|top| {
            let new_top = body.outputs[top];
            b.pairs(new_top, BinOp::Max).find_map(|(faded, level)| {
                let (_, fade) = b.pairs(faded, BinOp::Add).find(|(old, _)| *old == body.inputs[top])?;
                // Both are replaced when steps are joined, and nothing else may be with them.
                let apart = fade != level && !b.is_one(fade) && !b.is_one(level);
                let fits = apart
                    && b.dependence_of(fade) == ValueDependence::Channel
                    && b.dependence_of(level) <= ValueDependence::Step;
                let pair = DecayedMaximum { b: &b, maximum: new_top, decayed: faded, level };
                let others = (0..carries).filter(|carry| *carry != top);
                let sums = others.map(|carry| pair.sum(carry)).collect::<Option<_>>()?;
                fits.then_some(AssociativeBody { max_carry: (top, new_top), decay: fade, level, sums })
            })
        })
    }

    /// The carries of nothing: sums of zero that weigh nothing beside any number. Smaller than any other, but
    /// finite, so that no difference of two is NaN.
    pub fn identity(&self, carry: usize) -> f64 {
        if carry == self.max_carry.0 { f64::from(f32::MIN) } else { 0.0 }
    }

    /// The fade of a step.
    pub fn step_decay<'k>(
        &self,
        scan: &ChannelScan<'_, 'k>,
        constants: impl Iterator<Item = Val<'k>>,
        c: Val<'k>,
    ) -> Val<'k> {
        let names = scan.body.inputs[scan.carries + scan.seqs..].iter().copied();
        let bindings = names.zip(constants.map(Binding::Value)).collect();
        let index = [LaneIndex::from(c, 1)];
        Inliner::new(scan.body, bindings).value(scan.k, self.decay, &index[..scan.body.ty(self.decay).rank()])
    }

    /// The carries after some steps: of those before, which fade by `fade` on the way, and of those that the
    /// steps make of nothing.
    pub fn combine_carries<'k>(
        &self,
        scan: &ChannelScan<'_, 'k>,
        (before, made): (&[Val<'k>], &[Val<'k>]),
        fade: Val<'k>,
        c: Val<'k>,
    ) -> Vec<Val<'k>> {
        let (top, new_top) = self.max_carry;
        // The steps are one step of the body, with their own fade and level.
        let known = [(scan.body.inputs[top], before[top]), (self.decay, fade), (self.level, made[top])];
        let bindings: HashMap<_, _> =
            known.into_iter().map(|(v, value)| (v, Binding::Value(value))).collect();
        let inliner = Inliner::new(scan.body, bindings);
        let value = |v| inliner.value(scan.k, v, &[LaneIndex::from(c, 1)]).named("joined");
        let mut after = before.to_vec();
        after[top] = value(new_top);
        for &WeightedCarry { carry, old, new } in &self.sums {
            after[carry] = (before[carry] * value(old) + made[carry] * value(new)).named("sum");
        }
        after
    }
}

/// The dependence of each value.
fn dependence(body: &Function, carries: usize, seqs: usize) -> Vec<ValueDependence> {
    let mut of = vec![ValueDependence::Channel; body.values.len()];
    for (i, v) in body.inputs.iter().enumerate() {
        of[v.index()] = match i {
            _ if i < carries => ValueDependence::Carries,
            _ if i < carries + seqs => ValueDependence::Step,
            _ => ValueDependence::Channel,
        };
    }
    for (_, node) in body.live_nodes() {
        let most = node.inputs.iter().map(|v| of[v.index()]).max().unwrap_or(ValueDependence::Channel);
        node.outputs.iter().for_each(|v| of[v.index()] = most);
    }
    of
}

struct BodyDependences<'a> {
    body: &'a Function,
    dependences: Vec<ValueDependence>,
}

impl<'a> BodyDependences<'a> {
    fn dependence_of(&self, v: ValueId) -> ValueDependence {
        self.dependences[v.index()]
    }

    fn node(&self, v: ValueId) -> Option<&'a GraphNode> {
        self.body.defining_node(v)
    }

    /// The operands of a value that this operation makes, which commutes, in both orders.
    fn pairs(&self, v: ValueId, op: BinOp) -> impl Iterator<Item = (ValueId, ValueId)> + use<> {
        let operands = match self.node(v) {
            Some(GraphNode { op: Op::Binary(found), inputs, .. }) if *found == op => {
                Some((inputs[0], inputs[1]))
            }
            _ => None,
        };
        operands.into_iter().flat_map(|(a, b)| [(a, b), (b, a)])
    }

    /// The operand of a value that this function makes.
    fn unary(&self, v: ValueId, op: UnOp) -> Option<ValueId> {
        match self.node(v)? {
            GraphNode { op: Op::Unary(found), inputs, .. } if *found == op => Some(inputs[0]),
            _ => None,
        }
    }

    fn difference(&self, v: ValueId) -> Option<(ValueId, ValueId)> {
        match self.node(v)? {
            GraphNode { op: Op::Binary(BinOp::Sub), inputs, .. } => Some((inputs[0], inputs[1])),
            _ => None,
        }
    }

    fn is_one(&self, v: ValueId) -> bool {
        matches!(self.node(v), Some(GraphNode { op: Op::Constant { value, .. }, .. }) if *value == 1.0)
    }

    /// True for `exp(-|a - b|)`.
    fn is_smaller_weight(&self, v: ValueId, (a, b): (ValueId, ValueId)) -> bool {
        let distance = self.unary(v, UnOp::Exp).and_then(|v| self.unary(v, UnOp::Neg));
        let difference = distance.and_then(|v| self.unary(v, UnOp::Abs)).and_then(|v| self.difference(v));
        difference.is_some_and(|of| of == (a, b) || of == (b, a))
    }
}

/// The maximum of a body and what it is of.
struct DecayedMaximum<'a> {
    b: &'a BodyDependences<'a>,
    maximum: ValueId,
    decayed: ValueId,
    level: ValueId,
}

impl DecayedMaximum<'_> {
    /// The carry as a weighted sum, if it is one.
    fn sum(&self, carry: usize) -> Option<WeightedCarry> {
        let BodyDependences { body, .. } = self.b;
        let level = |v| self.is_weight(v, self.level, self.decayed);
        let added = |v| {
            let product = || {
                self.b
                    .pairs(v, BinOp::Mul)
                    .find(|(w, x)| level(*w) && self.b.dependence_of(*x) <= ValueDependence::Step)
            };
            if level(v) { Some(v) } else { product().map(|(weight, _)| weight) }
        };
        self.b.pairs(body.outputs[carry], BinOp::Add).find_map(|(kept, new)| {
            let mut products = self.b.pairs(kept, BinOp::Mul);
            let is_old = |(old, was): &(ValueId, ValueId)| {
                *was == body.inputs[carry] && self.is_weight(*old, self.decayed, self.level)
            };
            let (old, _) = products.find(is_old)?;
            Some(WeightedCarry { carry, old, new: added(new)? })
        })
    }

    /// True for `exp(side - top)`, also as a choice between 1 and `exp(-|side - other|)`.
    fn is_weight(&self, v: ValueId, side: ValueId, other: ValueId) -> bool {
        if let Some(x) = self.b.unary(v, UnOp::Exp) {
            return self.b.difference(x) == Some((side, self.maximum));
        }
        let Some(GraphNode { op: Op::SelectGe, inputs, .. }) = self.b.node(v) else { return false };
        let &[a, b, at_least, below] = &inputs[..] else { return false };
        let (larger, smaller) = match (a, b) {
            _ if (a, b) == (side, other) => (at_least, below),
            _ if (a, b) == (other, side) => (below, at_least),
            _ => return false,
        };
        self.b.is_one(larger) && self.b.is_smaller_weight(smaller, (side, other))
    }
}

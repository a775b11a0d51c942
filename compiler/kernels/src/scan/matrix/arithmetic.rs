//! The arithmetic of a scan body on values that are at hand, one piece (a vector or a number) at a time.
//! Products that are only added to something become part of a fused multiply-add.

use crate::inline::{Binding, Inliner, LaneIndex};
use mlcc_ir::compute::RedOp;
use mlcc_ir::graph::{Function, GraphNode, ValueId};
use mlcc_ir::kernel::BinOp;
use mlcc_ir::ops::Op;
use mlcc_kernel_lang::{Recorder, Val};

pub(super) struct BodyArithmetic<'a, 'k> {
    k: &'k Recorder,
    body: &'a Function,
    /// Products that are not computed alone: their one user adds them to something.
    products: Vec<ValueId>,
}

/// The lookup of a value of the body where it is needed; numbers are vectors of equal lanes.
pub(super) type ValueLookup<'a, 'k> = &'a dyn Fn(ValueId) -> Val<'k>;

impl<'a, 'k> BodyArithmetic<'a, 'k> {
    pub fn new(k: &'k Recorder, body: &'a Function) -> BodyArithmetic<'a, 'k> {
        BodyArithmetic { k, body, products: fused_products(body) }
    }

    /// True for a product that its user computes.
    pub fn is_fused(&self, v: ValueId) -> bool {
        self.products.contains(&v)
    }

    /// The result of an elementwise node, `lanes` elements of it.
    pub fn elementwise(&self, node: &GraphNode, lanes: u32, at: ValueLookup<'_, 'k>) -> Val<'k> {
        if let (Op::Binary(BinOp::Add), &[a, b]) = (&node.op, node.inputs.as_slice()) {
            for (product, other) in [(a, b), (b, a)] {
                if self.is_fused(product) {
                    return self.add_product(product, self.operand(other, lanes, at), at);
                }
            }
        }
        let bindings = node.inputs.iter().map(|&v| (v, Binding::Value(at(v)))).collect();
        let inliner = Inliner { lanes, ..Inliner::new(self.body, bindings) };
        // Bound values do not look at their index.
        let index = vec![LaneIndex::scalar(self.k.int(0)); self.body.ty(node.outputs[0]).rank()];
        inliner.value(self.k, node.outputs[0], &index).to_lanes(lanes)
    }

    /// One more element, or `lanes` of them, of what a reduction of `input` has met so far.
    pub fn reduce(
        &self,
        (op, input): (RedOp, ValueId),
        lanes: u32,
        so_far: Option<Val<'k>>,
        at: ValueLookup<'_, 'k>,
    ) -> Val<'k> {
        match so_far {
            Some(sum) if op == RedOp::Sum && self.is_fused(input) => self.add_product(input, sum, at),
            Some(sum) => sum.binary(op.bin(), self.operand(input, lanes, at)),
            None => self.operand(input, lanes, at),
        }
    }

    /// A value that may be a product and is computed only as part of another op.
    fn operand(&self, v: ValueId, lanes: u32, at: ValueLookup<'_, 'k>) -> Val<'k> {
        let value = match self.is_fused(v) {
            true => {
                let [a, b] = self.factors(v).map(at);
                a * b
            }
            false => at(v),
        };
        value.to_lanes(lanes)
    }

    fn factors(&self, product: ValueId) -> [ValueId; 2] {
        let node = self.body.defining_node(product).expect("a product is computed");
        [node.inputs[0], node.inputs[1]]
    }

    fn add_product(&self, product: ValueId, sum: Val<'k>, at: ValueLookup<'_, 'k>) -> Val<'k> {
        let [a, b] = self.factors(product).map(|v| at(v).to_lanes(sum.lanes()));
        a.fma(b, sum)
    }
}

/// Products with one user that adds them up, by itself or over the columns: they become part of a fused
/// multiply-add.
fn fused_products(body: &Function) -> Vec<ValueId> {
    let uses = body.use_counts();
    let is_product = |v: &ValueId| {
        uses[v.0 as usize] == 1 && body.defining_node(*v).is_some_and(|n| n.op == Op::Binary(BinOp::Mul))
    };
    let adds = |n: &&GraphNode| matches!(n.op, Op::Binary(BinOp::Add) | Op::Reduce { op: RedOp::Sum, .. });
    let users = body.live_nodes().map(|(_, n)| n).filter(adds);
    users.flat_map(|n| &n.inputs).copied().filter(is_product).collect()
}

//! The arithmetic of a scan body on values that are at hand, one piece (a vector or a number) at a time. Products that are
//! only added to something become part of a fused multiply-add.

use crate::generic::inline::{Binding, Index, Inliner};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::compute::RedOp;
use mlcc_ir::graph::{Function, Node, ValueId};
use mlcc_ir::kernel::{BinOp, ExprId};
use mlcc_ir::ops::Op;

pub(super) struct Arithmetic<'a> {
    body: &'a Function,
    /// Products that are not computed alone: their one user adds them to something.
    products: Vec<ValueId>,
}

/// What a value of the body is at the place in question; numbers stand for vectors of equal lanes.
pub(super) type At<'a> = &'a dyn Fn(ValueId) -> ExprId;

impl<'a> Arithmetic<'a> {
    pub fn new(body: &'a Function) -> Arithmetic<'a> {
        Arithmetic { body, products: fused_products(body) }
    }

    /// True for a product that its user computes.
    pub fn is_fused(&self, v: ValueId) -> bool {
        self.products.contains(&v)
    }

    /// What an elementwise node computes, `lanes` elements of it.
    pub fn elementwise(&self, kb: &mut KernelBuilder, node: &Node, lanes: u32, at: At) -> ExprId {
        if let (Op::Binary(BinOp::Add), &[a, b]) = (&node.op, node.inputs.as_slice()) {
            for (product, other) in [(a, b), (b, a)] {
                if self.is_fused(product) {
                    let other = self.operand(kb, other, lanes, at);
                    return self.add_product(kb, product, other, at);
                }
            }
        }
        let bindings = node.inputs.iter().map(|&v| (v, Binding::Value(at(v)))).collect();
        let f = self.body;
        let inliner = Inliner { f, bindings, lanes, mask: None, aligned: false, reduce_lanes: 1 };
        // Bound values do not look at their index.
        let zero = kb.int(0);
        let index = vec![Index::scalar(zero); f.ty(node.outputs[0]).rank()];
        let value = inliner.value(kb, node.outputs[0], &index);
        if kb.ty(value).lanes < lanes { kb.splat(value, lanes) } else { value }
    }

    /// One more element, or `lanes` of them, of what a reduction of `input` has met so far.
    pub fn reduce(
        &self,
        kb: &mut KernelBuilder,
        (op, input): (RedOp, ValueId),
        lanes: u32,
        so_far: Option<ExprId>,
        at: At,
    ) -> ExprId {
        match so_far {
            Some(sum) if op == RedOp::Sum && self.is_fused(input) => self.add_product(kb, input, sum, at),
            Some(sum) => {
                let value = self.operand(kb, input, lanes, at);
                kb.binary(op.bin(), sum, value)
            }
            None => self.operand(kb, input, lanes, at),
        }
    }

    /// A value that may be a product which is not computed alone.
    fn operand(&self, kb: &mut KernelBuilder, v: ValueId, lanes: u32, at: At) -> ExprId {
        let value = match self.is_fused(v) {
            true => {
                let [a, b] = self.factors(v).map(at);
                kb.mul(a, b)
            }
            false => at(v),
        };
        if kb.ty(value).lanes < lanes { kb.splat(value, lanes) } else { value }
    }

    fn factors(&self, product: ValueId) -> [ValueId; 2] {
        let node = self.body.def(product).expect("a product is computed");
        [node.inputs[0], node.inputs[1]]
    }

    fn add_product(&self, kb: &mut KernelBuilder, product: ValueId, sum: ExprId, at: At) -> ExprId {
        let [a, b] = self.factors(product).map(at);
        let lanes = kb.ty(sum).lanes;
        let [a, b] = [a, b].map(|x| if kb.ty(x).lanes < lanes { kb.splat(x, lanes) } else { x });
        kb.fma(a, b, sum)
    }
}

/// Products with one user that adds them up, by itself or over the columns: they become part of a fused multiply-add.
fn fused_products(body: &Function) -> Vec<ValueId> {
    let uses = body.use_counts();
    let is_product =
        |v: &ValueId| uses[v.0 as usize] == 1 && body.def(*v).is_some_and(|n| n.op == Op::Binary(BinOp::Mul));
    let adds = |n: &&Node| matches!(n.op, Op::Binary(BinOp::Add) | Op::Reduce { op: RedOp::Sum, .. });
    let users = body.live().map(|(_, n)| n).filter(adds);
    users.flat_map(|n| &n.inputs).copied().filter(is_product).collect()
}

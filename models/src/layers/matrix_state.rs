//! Recurrences whose state is a matrix per head: the gated delta rule and the state-space models that are attention without
//! a softmax. Written as a scan, of which lowering makes one kernel with the state in registers.

use crate::model_builder::ModelBuilder;
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::{FunctionKind, ValueId};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::kernel::UnOp;
use mlcc_ir::module::FuncId;
use mlcc_ir::types::{DType, TensorType};

/// The matrices of a layer, `[heads, values, keys]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MatrixState {
    pub heads: usize,
    /// Queries and keys: each for so many neighbouring heads; a divisor of `heads`.
    pub shared_by: usize,
    /// Size of a value.
    pub values: usize,
    /// Size of a key.
    pub keys: usize,
}

/// Along what an input of a step extends, besides the heads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StateAxis {
    Keys,
    Values,
    /// A number per head.
    Head,
    /// Both, the same in every step.
    Matrix,
}

impl MatrixState {
    /// The gated delta rule (Yang et al. 2025): `S = decay S`, `S = S + beta (v - S k) k^T`, `y = S q`. Queries and keys
    /// `[n, heads / shared_by, keys]`, values `[n, heads, values]`, `beta` `[n, heads]`, `decay` the same or, for each key channel,
    /// `[n, heads, keys]` (Kimi Delta Attention, 2025); gives `[n, heads, values]`.
    pub fn gated_delta_rule(
        self,
        net: &mut ModelBuilder,
        layer: usize,
        [q, k, v]: [ValueId; 3],
        [decay, beta]: [ValueId; 2],
    ) -> ValueId {
        use StateAxis::{Head, Keys, Values};
        let (name, along) = match net.ty(decay).dims.len() {
            3 => ("channel_delta_rule", Keys),
            _ => ("gated_delta_rule", Head),
        };
        let inputs = [(q, Keys), (k, Keys), (v, Values), (decay, along), (beta, Head)];
        self.recurrence(net, layer, (name, &inputs), |b, state, x| {
            let &[q, k, v, decay, beta] = x else { unreachable!("five inputs are declared") };
            let kept = b.mul(state, decay);
            let found = b.mul(kept, k);
            let found = b.reduce(RedOp::Sum, found, self.head_dims().len() + 1);
            let missing = b.sub(v, found);
            let change = b.mul(missing, beta);
            let added = b.mul(change, k);
            (b.add(kept, added), q)
        })
    }

    /// The state space of Mamba 2 (Dao and Gu 2024): `S = decay S + v k^T`, `y = S q`, with the shapes of
    /// [`MatrixState::gated_delta_rule`].
    pub fn state_space(
        self,
        net: &mut ModelBuilder,
        layer: usize,
        [q, k, v]: [ValueId; 3],
        decay: ValueId,
    ) -> ValueId {
        use StateAxis::{Head, Keys, Values};
        let inputs = [(q, Keys), (k, Keys), (v, Values), (decay, Head)];
        self.recurrence(net, layer, ("state_space", &inputs), |b, state, x| {
            let &[q, k, v, decay] = x else { unreachable!("four inputs are declared") };
            let kept = b.mul(state, decay);
            let added = b.mul(v, k);
            (b.add(kept, added), q)
        })
    }

    /// The selective state space of Mamba (Gu and Dao 2023): `S = exp(slopes dt) S + v k^T`, `y = S q`. Queries and keys `[n, heads,
    /// keys]`, values and steps `dt` `[n, heads, values]`, `slopes` `[heads, values, keys]`; gives `[n, heads, values]`.
    pub fn selective_state_space(
        self,
        net: &mut ModelBuilder,
        layer: usize,
        [q, k, v, dt]: [ValueId; 4],
        slopes: ValueId,
    ) -> ValueId {
        use StateAxis::{Keys, Matrix, Values};
        let inputs = [(q, Keys), (k, Keys), (v, Values), (dt, Values), (slopes, Matrix)];
        self.recurrence(net, layer, ("selective_state_space", &inputs), |b, state, x| {
            let &[q, k, v, dt, slopes] = x else { unreachable!("five inputs are declared") };
            let log = b.mul(slopes, dt);
            let decay = b.exp(log);
            let kept = b.mul(state, decay);
            let added = b.mul(v, k);
            (b.add(kept, added), q)
        })
    }

    /// Runs a recurrence from the state of a layer and keeps the new state. `step` gives the new state and the queries that
    /// read it.
    fn recurrence(
        self,
        net: &mut ModelBuilder,
        layer: usize,
        (name, inputs): (&str, &[(ValueId, StateAxis)]),
        step: impl FnOnce(&mut GraphBuilder, ValueId, &[ValueId]) -> (ValueId, ValueId),
    ) -> ValueId {
        let body = self.step_function(net, name, inputs, step);
        let n = net.n();
        // What stays the same comes last.
        let fixed: Vec<ValueId> =
            inputs.iter().filter(|(_, a)| *a == StateAxis::Matrix).map(|(x, _)| *x).collect();
        let rows: Vec<ValueId> = inputs[..inputs.len() - fixed.len()]
            .iter()
            .map(|&(x, along)| {
                let dims = self.dims(along).into_iter().map(Dim::from);
                net.reshape(x, std::iter::once(n.clone()).chain(dims))
            })
            .collect();
        let state = net.state(&format!("layers.{layer}.matrix"), self.matrix(), 0.0);
        let out = net.per_sequence(&rows, |net, rows| {
            let before = net.read(state);
            let out = net.scan(body, &[before], rows, &fixed);
            net.write(state, out[0]);
            vec![out[1]]
        });
        net.reshape(out[0], [n, Dim::from(self.heads), Dim::from(self.values)])
    }

    fn step_function(
        self,
        net: &mut ModelBuilder,
        name: &str,
        inputs: &[(ValueId, StateAxis)],
        step: impl FnOnce(&mut GraphBuilder, ValueId, &[ValueId]) -> (ValueId, ValueId),
    ) -> FuncId {
        let types = inputs.iter().map(|&(_, along)| TensorType::new(DType::F32, self.dims(along)));
        let types: Vec<TensorType> = std::iter::once(self.matrix()).chain(types).collect();
        net.function(name, FunctionKind::Body, &types, |b, inputs| {
            let (state, q) = step(b, inputs[0], &inputs[1..]);
            let read = b.mul(state, q);
            vec![state, b.reduce(RedOp::Sum, read, self.head_dims().len() + 1)]
        })
    }

    fn matrix(self) -> TensorType {
        TensorType::new(DType::F32, self.dims(StateAxis::Matrix))
    }

    /// The axes of heads: those that have queries of their own, and if there are several of these, those that share them.
    fn head_dims(self) -> Vec<usize> {
        let groups = self.heads / self.shared_by;
        if groups == 1 || self.shared_by == 1 { vec![self.heads] } else { vec![groups, self.shared_by] }
    }

    fn dims(self, along: StateAxis) -> Vec<usize> {
        let mut dims = self.head_dims();
        if along == StateAxis::Keys && self.shared_by > 1 {
            dims[self.head_dims().len() - 1] = 1;
        }
        dims.extend(match along {
            StateAxis::Keys => [1, self.keys],
            StateAxis::Values => [self.values, 1],
            StateAxis::Head => [1, 1],
            StateAxis::Matrix => [self.values, self.keys],
        });
        dims
    }
}

/// Each head of `x: [n, heads, size]` as often in a row as makes `count` heads.
pub fn repeat_heads(net: &mut ModelBuilder, x: ValueId, count: usize) -> ValueId {
    let dims = net.ty(x).dims.clone();
    let heads = dims[1].as_const().unwrap_or(1).max(1) as usize;
    if heads == count {
        return x;
    }
    let column = net.reshape(x, [dims[0].clone(), dims[1].clone(), Dim::from(1), dims[2].clone()]);
    let copies = net.concat(&vec![column; count / heads], 2);
    net.reshape(copies, [dims[0].clone(), Dim::from(count), dims[2].clone()])
}

/// `x / sqrt(sum of x^2 + eps)` over the last axis of `x: [n, heads, size]`.
pub fn unit_length(net: &mut ModelBuilder, x: ValueId, eps: f64) -> ValueId {
    let square = net.square(x);
    let sum = net.reduce(RedOp::Sum, square, 2);
    let eps = net.constant(eps);
    let sum = net.add(sum, eps);
    let inverse = net.unary(UnOp::Rsqrt, sum);
    net.mul(x, inverse)
}

/// `log(1 + exp(x))`.
pub fn softplus(net: &mut ModelBuilder, x: ValueId) -> ValueId {
    let positive = net.relu(x);
    let size = net.unary(UnOp::Abs, x);
    let negative = net.unary(UnOp::Neg, size);
    let small = net.exp(negative);
    let one = net.constant(1.0);
    let sum = net.add(small, one);
    let rest = net.unary(UnOp::Log, sum);
    net.add(positive, rest)
}

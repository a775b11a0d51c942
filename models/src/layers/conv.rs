//! Short causal convolutions over the tokens, as hybrids have before or in place of a recurrence.

use crate::model_builder::ModelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource};
use mlcc_ir::types::{DType, TensorType};

/// A depthwise convolution: `y[t] = sum over j of w[j] * x[t - (taps - 1) + j]` for each channel, and zeros before the
/// sequence. Its state are the last `taps - 1` rows.
#[derive(Clone, Copy, Debug)]
pub struct CausalConv<'a> {
    /// `{name}.weight: [channels, 1, taps]`, as `torch.nn.Conv1d` stores it. Several are for parts of the channels.
    pub names: &'a [&'a str],
    /// Channels of each name; none where all have as many.
    pub widths: &'a [usize],
    /// At least 2.
    pub taps: usize,
    /// Adds `{name}.bias: [channels]`, of one name.
    pub bias: bool,
}

impl CausalConv<'_> {
    /// `x: [n, channels]` to the same shape.
    pub fn apply(&self, net: &mut ModelBuilder, layer: usize, x: ValueId) -> ValueId {
        let (channels, taps) = (net.width(x), self.taps);
        let [first, ..] = self.names else { return x };
        let equal = channels / self.names.len();
        let stored = self.names.iter().enumerate().map(|(i, name)| {
            let width = self.widths.get(i).copied().unwrap_or(equal);
            net.declare_tensor(&format!("{name}.weight"), &[width, 1, taps])
        });
        let stored = stored.collect();
        let source = ParamSource::Transpose(Box::new(concat_sources(stored)));
        let name = format!("{first}.weight");
        let ty = TensorType::new(DType::F32, [taps, channels]);
        let weight = net.param_from(&name, ParamRole::Vector, ty, source);
        let rows = net.per_sequence(&[x], |net, rows| {
            let joined = prepend_state_rows(net, &format!("layers.{layer}.conv"), rows[0], taps - 1);
            let n = net.n();
            let tap = |net: &mut ModelBuilder, tap: usize| {
                let earlier = net.slice(joined, 0, Dim::from(tap), n.clone());
                let weight = net.slice(weight, 0, Dim::from(tap), Dim::from(1));
                net.mul(earlier, weight)
            };
            let mut sum = tap(net, 0);
            for number in 1..taps {
                let part = tap(net, number);
                sum = net.add(sum, part);
            }
            vec![sum]
        });
        match self.bias {
            false => rows[0],
            true => {
                let bias = net.vector_param(&format!("{first}.bias"), channels);
                net.add(rows[0], bias)
            }
        }
    }
}

/// Sources below one another.
fn concat_sources(mut parts: Vec<ParamSource>) -> ParamSource {
    match parts.len() {
        1 => parts.remove(0),
        _ => ParamSource::Concat(parts),
    }
}

/// `rows: [n, ..]` of one sequence after the `count` rows before them, which are the state `name`.
fn prepend_state_rows(net: &mut ModelBuilder, name: &str, rows: ValueId, count: usize) -> ValueId {
    let channels = net.ty(rows).dims[1].clone();
    let state = net.state(name, TensorType::new(DType::F32, [Dim::from(count), channels]), 0.0);
    let before = net.read(state);
    let joined = net.concat(&[before, rows], 0);
    let n = net.n();
    let last = net.slice(joined, 0, n, Dim::from(count));
    net.write(state, last);
    joined
}

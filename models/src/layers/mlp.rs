//! Feed-forward parts.

use super::ActivationFunction;
use super::linear::LinearLayer;
use crate::model_builder::ModelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::RowBlocks;

/// `down(act(gate(x)) * up(x))` (Shazeer 2020) with three layers under these names.
pub fn gated(
    net: &mut ModelBuilder,
    x: ValueId,
    [gate, up, down]: [LinearLayer; 3],
    activation: ActivationFunction,
) -> ValueId {
    let gate = gate.apply(net, x);
    let up = up.apply(net, x);
    let gate = activation.apply(net, gate);
    let product = net.mul(gate, up);
    down.apply(net, product)
}

/// The same with the names that most checkpoints have: `{name}.gate_proj`, `{name}.up_proj`, `{name}.down_proj`.
pub fn gated_by_name(
    net: &mut ModelBuilder,
    x: ValueId,
    name: &str,
    width: usize,
    bias: bool,
    activation: ActivationFunction,
) -> ValueId {
    let hidden = net.width(x);
    let names = ["gate_proj", "up_proj", "down_proj"].map(|part| format!("{name}.{part}"));
    let [gate, up, down] = names.each_ref().map(|name| LinearLayer::new(name, width).bias(bias));
    gated(net, x, [gate, up, down.with_out(hidden)], activation)
}

/// The same with `gate_up: [2 * width, in]`, the rows of the gate first.
pub fn gated_fused(
    net: &mut ModelBuilder,
    x: ValueId,
    gate_up: LinearLayer,
    down: LinearLayer,
    activation: ActivationFunction,
) -> ValueId {
    let rows = gate_up.out();
    let gate = gate_up.clone().with_part("gate", RowBlocks::range(0, rows / 2, rows));
    let up = gate_up.with_part("up", RowBlocks::range(rows / 2, rows / 2, rows));
    gated(net, x, [gate, up, down], activation)
}

/// `down(act(up(x)))`.
pub fn ungated(
    net: &mut ModelBuilder,
    x: ValueId,
    up: LinearLayer,
    down: LinearLayer,
    activation: ActivationFunction,
) -> ValueId {
    let h = up.apply(net, x);
    let h = activation.apply(net, h);
    down.apply(net, h)
}

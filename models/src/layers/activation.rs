//! Activation functions, element by element.

use crate::layer_kinds::ActivationFunction;
use crate::model_builder::ModelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::UnOp;

impl ActivationFunction {
    pub fn apply(self, net: &mut ModelBuilder, x: ValueId) -> ValueId {
        match self {
            ActivationFunction::Silu => sigmoid_gate(net, x, 1.0),
            ActivationFunction::QuickGelu => sigmoid_gate(net, x, 1.702),
            ActivationFunction::Relu => net.relu(x),
            ActivationFunction::ReluSquared => {
                let positive = net.relu(x);
                net.square(positive)
            }
            ActivationFunction::Gelu => {
                let scaled = net.scale(x, std::f64::consts::FRAC_1_SQRT_2);
                let erf = net.unary(UnOp::Erf, scaled);
                half_of_one_plus(net, x, erf)
            }
            ActivationFunction::GeluTanh => {
                // tanh(sqrt(2/pi) * (x + 0.044715 x^3)), Hendrycks and Gimpel 2016.
                let square = net.square(x);
                let cube = net.mul(square, x);
                let cube = net.scale(cube, 0.044715);
                let sum = net.add(x, cube);
                let inner = net.scale(sum, (2.0 / std::f64::consts::PI).sqrt());
                let tanh = net.tanh(inner);
                half_of_one_plus(net, x, tanh)
            }
        }
    }
}

/// `x * sigmoid(factor * x)`.
fn sigmoid_gate(net: &mut ModelBuilder, x: ValueId, factor: f64) -> ValueId {
    let scaled = if factor == 1.0 { x } else { net.scale(x, factor) };
    let gate = net.sigmoid(scaled);
    net.mul(x, gate)
}

/// `x / 2 * (1 + y)`.
fn half_of_one_plus(net: &mut ModelBuilder, x: ValueId, y: ValueId) -> ValueId {
    let half = net.scale(x, 0.5);
    let one = net.constant(1.0);
    let sum = net.add(y, one);
    net.mul(half, sum)
}

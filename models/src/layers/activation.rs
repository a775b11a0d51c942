//! Activation functions by the names that configurations use.

use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::transformer::ModelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::kernel::UnOp;
use serde_json::Value;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationFunction {
    /// `x * sigmoid(x)`.
    Silu,
    /// `x * Phi(x)`, with the error function.
    Gelu,
    /// Its approximation by tanh.
    GeluTanh,
    /// Its approximation by a sigmoid, `x * sigmoid(1.702 x)`.
    QuickGelu,
    Relu,
    /// `max(x, 0)^2`.
    ReluSquared,
}

/// Every name with its function. `gelu_fast` and `gelu_new` write one formula in two ways.
const NAMES: [(&str, ActivationFunction); 13] = [
    ("silu", ActivationFunction::Silu),
    ("swish", ActivationFunction::Silu),
    ("gelu", ActivationFunction::Gelu),
    ("gelu_python", ActivationFunction::Gelu),
    ("gelu_new", ActivationFunction::GeluTanh),
    ("gelu_fast", ActivationFunction::GeluTanh),
    ("gelu_pytorch_tanh", ActivationFunction::GeluTanh),
    ("gelu_tanh", ActivationFunction::GeluTanh),
    ("quick_gelu", ActivationFunction::QuickGelu),
    ("relu", ActivationFunction::Relu),
    ("relu2", ActivationFunction::ReluSquared),
    ("relu_squared", ActivationFunction::ReluSquared),
    ("squared_relu", ActivationFunction::ReluSquared),
];

impl ActivationFunction {
    pub fn from_name(name: &str) -> Option<ActivationFunction> {
        NAMES.iter().find(|(n, _)| *n == name).map(|(_, activation)| *activation)
    }

    /// The first of `fields` that the configuration has, or `default`.
    pub fn read(
        config: &ConfigFields,
        fields: &[&str],
        default: ActivationFunction,
    ) -> Result<ActivationFunction, ConfigError> {
        let Some(field) = fields.iter().find(|f| config.get(f).is_some()) else { return Ok(default) };
        let name = config.string(field)?;
        ActivationFunction::from_name(&name).ok_or_else(|| {
            let names: Vec<&str> = NAMES.iter().map(|(n, _)| *n).collect();
            config.invalid_value(field, &format!("one of {}", names.join(", ")), &Value::from(name))
        })
    }

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

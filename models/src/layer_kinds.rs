//! Kinds of norms and activation functions, as configurations name them. What they compute stands in [`crate::layers`].

use crate::config::ConfigFields;
use crate::error::ConfigError;
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
}

/// A norm with its epsilon.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    None,
    /// [`rms_norm`](crate::layers::norm::rms_norm).
    Rms(f64),
    /// [`rms_norm_plus_one`](crate::layers::norm::rms_norm_plus_one).
    RmsPlusOne(f64),
    /// [`layer_norm`](crate::layers::norm::layer_norm).
    Layer(f64),
    /// [`layer_norm_bias`](crate::layers::norm::layer_norm_bias) without bias.
    LayerNoBias(f64),
}

//! The mixer of Mamba (Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023; reference:
//! `MambaMixer` of transformers): after a short convolution, a state space for each channel whose steps depend on the input.

use super::conv::CausalConv;
use super::matrix_state::{MatrixState, softplus};
use super::{ActivationFunction, LinearLayer};
use crate::config::ConfigFields;
use crate::config::sizes::HIDDEN;
use crate::error::ConfigError;
use crate::model_builder::ModelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource};
use mlcc_ir::types::{DType, TensorType};
use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
pub struct Mamba {
    /// Channels.
    pub inner: usize,
    /// Numbers of the state per channel.
    pub state_size: usize,
    /// Taps of the convolution.
    pub taps: usize,
    /// Rank of the time steps.
    pub rank: usize,
    pub activation: ActivationFunction,
    /// The projections have biases.
    pub bias: bool,
    pub conv_bias: bool,
}

/// Larger than in any published model.
const LARGEST: usize = 65536;
/// Width per time step's rank, where the file does not say the rank.
const WIDTH_PER_RANK: usize = 16;

impl Mamba {
    pub fn read(fields: &ConfigFields) -> Result<Mamba, ConfigError> {
        let size =
            |field: &str, default: usize| fields.check_max(field, fields.size_or(field, default)?, LARGEST);
        let hidden = fields.size(fields.first_present(&HIDDEN))?;
        let inner_field = fields.first_present(&["intermediate_size", "d_inner"]);
        let inner = size(inner_field, hidden.saturating_mul(fields.size_or("expand", 2)?))?;
        let taps = fields.size_or("conv_kernel", 4)?;
        if !(2..=64).contains(&taps) {
            let expected = "a number of taps from 2 to 64";
            return Err(fields.invalid_value("conv_kernel", expected, &Value::from(taps)));
        }
        let auto = hidden.div_ceil(WIDTH_PER_RANK);
        let rank = match fields.get("time_step_rank").and_then(Value::as_str) {
            Some("auto") => auto,
            _ => size("time_step_rank", auto)?,
        };
        Ok(Mamba {
            inner,
            state_size: size("state_size", 16)?,
            taps,
            rank,
            activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            bias: fields.flag_or("use_bias", false)?,
            conv_bias: fields.flag_or("use_conv_bias", true)?,
        })
    }

    /// `[n, hidden]` to `[n, hidden]`.
    pub fn apply(&self, net: &mut ModelBuilder, layer: usize, name: &str, x: ValueId) -> ValueId {
        let (hidden, inner, size) = (net.width(x), self.inner, self.state_size);
        let linear = |net: &mut ModelBuilder, which: &str, x, out, bias| {
            LinearLayer::new(&format!("{name}.{which}"), out).bias(bias).apply(net, x)
        };
        let part = |net: &mut ModelBuilder, x, start: usize, len: usize| {
            net.slice(x, 1, Dim::from(start), Dim::from(len))
        };
        let projected = linear(net, "in_proj", x, 2 * inner, self.bias);
        let (x, gate) = (part(net, projected, 0, inner), part(net, projected, inner, inner));
        let conv = format!("{name}.conv1d");
        let conv = CausalConv { names: &[&conv], widths: &[], taps: self.taps, bias: self.conv_bias };
        let x = conv.apply(net, layer, x);
        let x = self.activation.apply(net, x);
        let low = linear(net, "x_proj", x, self.rank + 2 * size, false);
        let dt = part(net, low, 0, self.rank);
        let (b, c) = (part(net, low, self.rank, size), part(net, low, self.rank + size, size));
        let dt = linear(net, "dt_proj", dt, inner, true);
        let dt = softplus(net, dt);
        let scaled = net.mul(x, dt);
        let slopes = self.slopes(net, name);
        let state = MatrixState { heads: 1, shared_by: 1, values: inner, keys: size };
        let y = state.selective_state_space(net, layer, [c, b, scaled, dt], slopes);
        let n = net.n();
        let y = net.reshape(y, [n, Dim::from(inner)]);
        // What passes by the state.
        let direct = net.vector_param(&format!("{name}.D"), inner);
        let direct = net.mul(x, direct);
        let y = net.add(y, direct);
        let gate = ActivationFunction::Silu.apply(net, gate);
        let y = net.mul(y, gate);
        linear(net, "out_proj", y, hidden, self.bias)
    }

    /// `-exp(A)`, `[1, inner, state]`.
    fn slopes(&self, net: &mut ModelBuilder, name: &str) -> ValueId {
        let name = format!("{name}.A_log");
        let (inner, size) = (self.inner, self.state_size);
        let source = ParamSource::NegExp(Box::new(net.declare_tensor(&name, &[inner, size])));
        let slopes =
            net.param_from(&name, ParamRole::Vector, TensorType::new(DType::F32, [inner, size]), source);
        net.reshape(slopes, [1, inner, size])
    }
}

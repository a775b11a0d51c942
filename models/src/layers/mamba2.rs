//! The mixer of Mamba 2 (Dao and Gu, "Transformers are SSMs", 2024; reference: `Mamba2Mixer` of transformers): a state space
//! with a matrix per head, after a short convolution.

use super::conv::CausalConv;
use super::matrix_state::{MatrixState, softplus};
use super::norm::grouped_rms_norm;
use super::{ActivationFunction, LinearLayer};
use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::model_builder::ModelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource};
use mlcc_ir::types::{DType, TensorType};
use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2 {
    pub heads: usize,
    pub head_size: usize,
    /// Heads share what writes and reads the state (B and C) in groups.
    pub groups: usize,
    /// Columns of the state's matrices.
    pub state_size: usize,
    /// Taps of the convolution.
    pub taps: usize,
    pub conv_bias: bool,
    /// Of what the convolution gives.
    pub conv_activation: ActivationFunction,
    /// The projections have biases.
    pub bias: bool,
    /// Bounds of the time steps.
    pub time_steps: (f64, f64),
    pub eps: f64,
    pub norm: GatedNorm,
    /// The output projection has a bias.
    pub output_bias: bool,
    /// Factors of gate, values, B, C and time steps (muP).
    pub multipliers: Option<[f64; 5]>,
}

/// The norm of the values beside their gate, over each of a number of equal parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatedNorm {
    None,
    /// The gate comes first.
    After {
        groups: usize,
    },
    /// The norm comes first.
    Before {
        groups: usize,
    },
}

/// Larger than in any published model.
const LARGEST: usize = 65536;

impl Mamba2 {
    /// `names` are those of the fields for heads, size of a head, groups, size of the state, taps, bias of the convolution and
    /// bias of the projections.
    pub fn read(fields: &ConfigFields, names: [&'static str; 7], eps: f64) -> Result<Mamba2, ConfigError> {
        let [heads_field, size_field, groups_field, state_field, taps_field, conv_bias, bias] = names;
        let size = |field: &str| fields.check_max(field, fields.size(field)?, LARGEST);
        let (heads, groups, taps) = (size(heads_field)?, size(groups_field)?, size(taps_field)?);
        if !heads.is_multiple_of(groups) {
            let expected = format!("a divisor of {heads_field}, which is {heads}");
            return Err(fields.invalid_value(groups_field, &expected, &Value::from(groups)));
        }
        if !(2..=64).contains(&taps) {
            return Err(fields.invalid_value(
                taps_field,
                "a number of taps from 2 to 64",
                &Value::from(taps),
            ));
        }
        let bias = fields.flag_or(bias, false)?;
        Ok(Mamba2 {
            heads,
            head_size: size(size_field)?,
            groups,
            state_size: size(state_field)?,
            taps,
            conv_bias: fields.flag_or(conv_bias, true)?,
            conv_activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            bias,
            output_bias: bias,
            multipliers: None,
            time_steps: read_time_step_bounds(fields)?,
            eps,
            norm: GatedNorm::After { groups },
        })
    }

    /// Width of the values of all heads.
    pub fn inner(&self) -> usize {
        self.heads * self.head_size
    }

    /// `[n, hidden]` to `[n, hidden]`.
    pub fn apply(&self, net: &mut ModelBuilder, layer: usize, name: &str, x: ValueId) -> ValueId {
        let (hidden, inner, shared) = (net.width(x), self.inner(), self.groups * self.state_size);
        let widths = [inner, inner + 2 * shared, self.heads];
        let input = format!("{name}.in_proj");
        let projected = LinearLayer::new(&input, widths.iter().sum()).bias(self.bias).apply(net, x);
        let projected = self.scale_output(net, projected);
        let [gate, xbc, dt] = split_columns(net, projected, widths);
        let conv = CausalConv {
            names: &[&format!("{name}.conv1d")],
            widths: &[],
            taps: self.taps,
            bias: self.conv_bias,
        };
        let xbc = conv.apply(net, layer, xbc);
        let xbc = self.conv_activation.apply(net, xbc);
        let [x, b, c] = split_columns(net, xbc, [inner, shared, shared]);
        let x = net.split_heads(x, self.heads);
        let [b, c] = [b, c].map(|x| net.split_heads(x, self.groups));
        let dt = self.time_step(net, name, dt);
        let decay = self.decay(net, name, dt);
        let n = net.n();
        let dt = net.reshape(dt, [n.clone(), Dim::from(self.heads), Dim::from(1)]);
        let scaled = net.mul(x, dt);
        let state = MatrixState {
            heads: self.heads,
            shared_by: self.heads / self.groups,
            values: self.head_size,
            keys: self.state_size,
        };
        let y = state.state_space(net, layer, [c, b, scaled], decay);
        // What passes by the state.
        let direct = net.vector_param(&format!("{name}.D"), self.heads);
        let direct = net.reshape(direct, [self.heads, 1]);
        let direct = net.mul(x, direct);
        let y = net.add(y, direct);
        let y = net.reshape(y, [n, Dim::from(inner)]);
        let y = self.apply_gate(net, name, y, gate);
        LinearLayer::new(&format!("{name}.out_proj"), hidden).bias(self.output_bias).apply(net, y)
    }

    /// What the input projection gives, `[n, ..]`, times its multipliers.
    fn scale_output(&self, net: &mut ModelBuilder, x: ValueId) -> ValueId {
        let Some(multipliers) = self.multipliers else { return x };
        let shared = self.groups * self.state_size;
        let widths = [self.inner(), self.inner(), shared, shared, self.heads];
        let factors = multipliers.iter().zip(widths).flat_map(|(&m, width)| vec![m as f32; width]);
        let factors = net.table_param("mamba.multipliers", factors.collect());
        net.mul(x, factors)
    }

    fn apply_gate(&self, net: &mut ModelBuilder, name: &str, y: ValueId, gate: ValueId) -> ValueId {
        let name = format!("{name}.norm");
        let gate = ActivationFunction::Silu.apply(net, gate);
        match self.norm {
            GatedNorm::None => net.mul(y, gate),
            GatedNorm::After { groups } => {
                let y = net.mul(y, gate);
                grouped_rms_norm(net, y, &name, self.eps, groups)
            }
            GatedNorm::Before { groups } => {
                let y = grouped_rms_norm(net, y, &name, self.eps, groups);
                net.mul(y, gate)
            }
        }
    }

    /// `softplus(dt + bias)` within the bounds, `[n, heads]`.
    fn time_step(&self, net: &mut ModelBuilder, name: &str, dt: ValueId) -> ValueId {
        let bias = net.vector_param(&format!("{name}.dt_bias"), self.heads);
        let dt = net.add(dt, bias);
        let mut dt = softplus(net, dt);
        let (low, high) = self.time_steps;
        if low > 0.0 {
            let low = net.constant(low);
            dt = net.max(dt, low);
        }
        if high.is_finite() {
            let high = net.constant(high);
            dt = net.min(dt, high);
        }
        dt
    }

    /// `exp(-exp(A) * dt)`, `[n, heads]`.
    fn decay(&self, net: &mut ModelBuilder, name: &str, dt: ValueId) -> ValueId {
        let name = format!("{name}.A_log");
        let source = ParamSource::NegExp(Box::new(net.declare_tensor(&name, &[self.heads])));
        let ty = TensorType::new(DType::F32, [self.heads]);
        let slope = net.param_from(&name, ParamRole::Vector, ty, source);
        let log = net.mul(dt, slope);
        net.exp(log)
    }
}

/// Columns of `x: [n, ..]`, one part after the other.
fn split_columns<const N: usize>(net: &mut ModelBuilder, x: ValueId, widths: [usize; N]) -> [ValueId; N] {
    let mut start = 0;
    widths.map(|width| {
        let part = net.slice(x, 1, Dim::from(start), Dim::from(width));
        start += width;
        part
    })
}

/// `time_step_limit`, by default none. JSON has no infinity, but Python writes it ([`ConfigFields::read`]).
fn read_time_step_bounds(fields: &ConfigFields) -> Result<(f64, f64), ConfigError> {
    let field = "time_step_limit";
    let Some(found) = fields.get(field) else { return Ok((0.0, f64::INFINITY)) };
    match *fields.numbers(field)? {
        [low, f64::MAX] if low >= 0.0 => Ok((low, f64::INFINITY)),
        [low, high] if 0.0 <= low && low <= high => Ok((low, high)),
        _ => Err(fields.invalid_value(field, "two numbers of at least 0, the smaller first", found)),
    }
}

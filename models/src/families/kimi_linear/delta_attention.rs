//! Kimi Delta Attention: the gated delta rule with a decay for each channel of the keys, from projections of low rank.

use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::layers::conv::CausalConv;
use crate::layers::linear::apply_concatenated;
use crate::layers::matrix_state::{MatrixState, softplus, unit_length};
use crate::layers::norm::rms_norm;
use crate::layers::{ActivationFunction, LinearLayer};
use crate::transformer::ModelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource};
use mlcc_ir::types::{DType, TensorType};
use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
pub struct DeltaAttention {
    pub heads: usize,
    /// Of queries, keys and values.
    pub head_size: usize,
    /// Taps of the convolution.
    pub taps: usize,
    /// Of what the convolution gives.
    pub conv_activation: ActivationFunction,
    pub eps: f64,
}

/// Added to the squared length of queries and keys.
const LENGTH_EPS: f64 = 1e-6;
/// Larger than in any published model.
const LARGEST: usize = 4096;

impl DeltaAttention {
    /// From `linear_attn_config`, or fields of newer files.
    pub fn read(
        fields: &ConfigFields,
        linear: Option<&ConfigFields>,
        eps: f64,
    ) -> Result<DeltaAttention, ConfigError> {
        let size = |inside: &str, outside: &str, default, most: usize| {
            let (fields, field) = match linear {
                Some(linear) if linear.get(inside).is_some() => (linear, inside),
                _ => (fields, outside),
            };
            fields.check_max(field, fields.size_or(field, default)?, most)
        };
        let taps = size("short_conv_kernel_size", "linear_conv_kernel_dim", 4, 64)?;
        if taps < 2 {
            return Err(fields.invalid_value("short_conv_kernel_size", "from 2 to 64", &Value::from(taps)));
        }
        Ok(DeltaAttention {
            heads: size("num_heads", "linear_num_heads", 32, LARGEST)?,
            head_size: size("head_dim", "linear_head_dim", 128, LARGEST)?,
            taps,
            conv_activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            eps,
        })
    }

    /// Width of all heads.
    fn width(&self) -> usize {
        self.heads * self.head_size
    }

    /// `[n, hidden]` to `[n, hidden]`.
    pub fn apply(&self, net: &mut ModelBuilder, layer: usize, name: &str, x: ValueId) -> ValueId {
        let (hidden, width) = (net.width(x), self.width());
        let projections = ["q_proj", "k_proj", "v_proj"].map(|part| format!("{name}.{part}"));
        let qkv = apply_concatenated(
            net,
            &format!("{name}.qkv_proj"),
            &projections.each_ref().map(|n| (&**n, width)),
            x,
        );
        let convs = ["q_conv1d", "k_conv1d", "v_conv1d"].map(|part| format!("{name}.{part}"));
        let convs = convs.each_ref().map(String::as_str);
        let qkv =
            CausalConv { names: &convs, widths: &[], taps: self.taps, bias: false }.apply(net, layer, qkv);
        let qkv = self.conv_activation.apply(net, qkv);
        let [q, k, v] = [0, 1, 2].map(|part| {
            let x = net.slice(qkv, 1, Dim::from(part * width), Dim::from(width));
            net.split_heads(x, self.heads)
        });
        let [q, k] = [q, k].map(|x| unit_length(net, x, LENGTH_EPS));
        let q = net.scale(q, (self.head_size as f64).powf(-0.5));
        let decay = self.decay(net, name, x);
        let beta = LinearLayer::new(&format!("{name}.b_proj"), self.heads).apply(net, x);
        let beta = net.sigmoid(beta);
        let state =
            MatrixState { heads: self.heads, shared_by: 1, values: self.head_size, keys: self.head_size };
        let y = state.gated_delta_rule(net, layer, [q, k, v], [decay, beta]);
        let y = rms_norm(net, y, &format!("{name}.o_norm"), self.eps);
        let gate = self.low_rank(net, name, ["g_a_proj", "g_b_proj"], x);
        let gate = net.split_heads(gate, self.heads);
        let open = net.sigmoid(gate);
        let y = net.mul(y, open);
        let n = net.n();
        let y = net.reshape(y, [n, Dim::from(width)]);
        LinearLayer::new(&format!("{name}.o_proj"), hidden).apply(net, y)
    }

    /// `exp(-exp(A) * softplus(f + bias))`, `[n, heads, head_size]`, with `f` of low rank and `A` of each head.
    fn decay(&self, net: &mut ModelBuilder, name: &str, x: ValueId) -> ValueId {
        let rate = self.low_rank(net, name, ["f_a_proj", "f_b_proj"], x);
        let bias = net.vector_param(&format!("{name}.dt_bias"), self.width());
        let rate = net.add(rate, bias);
        let rate = softplus(net, rate);
        let rate = net.split_heads(rate, self.heads);
        let name = format!("{name}.A_log");
        let source = ParamSource::NegExp(Box::new(net.declare_tensor(&name, &[1, 1, self.heads, 1])));
        let ty = TensorType::new(DType::F32, [self.heads, 1]);
        let slope = net.param_from(&name, ParamRole::Vector, ty, source);
        let log = net.mul(rate, slope);
        net.exp(log)
    }

    /// Two layers, with as many values between them as a head has.
    fn low_rank(&self, net: &mut ModelBuilder, name: &str, [down, up]: [&str; 2], x: ValueId) -> ValueId {
        let low = LinearLayer::new(&format!("{name}.{down}"), self.head_size).apply(net, x);
        LinearLayer::new(&format!("{name}.{up}"), self.width()).apply(net, low)
    }
}

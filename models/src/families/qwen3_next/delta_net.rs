//! The part of a layer with the gated delta rule.

use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::layers::conv::CausalConv;
use crate::layers::linear::apply_concatenated;
use crate::layers::matrix_state::{MatrixState, repeat_heads, softplus, unit_length};
use crate::layers::norm::rms_norm;
use crate::layers::{ActivationFunction, LinearLayer, linear};
use crate::transformer::ModelBuilder;
use mlcc_ir::dim::Dim;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource, RowBlocks};
use mlcc_ir::types::{DType, TensorType};
use serde_json::Value;

#[derive(Clone, Debug, PartialEq)]
pub struct DeltaNet {
    pub key_heads: usize,
    /// Value heads share key heads in groups.
    pub value_heads: usize,
    pub key_size: usize,
    pub value_size: usize,
    /// Taps of the convolution.
    pub taps: usize,
    /// Of what the convolution gives.
    pub conv_activation: ActivationFunction,
    pub eps: f64,
    pub layout: ProjectionLayout,
    /// Factor of beta: 2 lets what is replaced change its sign.
    pub beta_scale: f64,
}

/// How projections and convolutions are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProjectionLayout {
    /// Queries, keys and values are one matrix (Qwen 3.5).
    Joined,
    /// All projections are two matrices, whose rows are in groups by key head (Qwen3-Next).
    ByKeyHead,
    /// A matrix and a convolution for each of queries, keys and values (OLMo Hybrid).
    Separate,
}

/// Added to the squared length of queries and keys.
const LENGTH_EPS: f64 = 1e-6;
/// Larger than in any published model.
const MOST_HEADS: usize = 4096;

impl DeltaNet {
    /// [`ProjectionLayout::Separate`].
    pub fn separate(fields: &ConfigFields) -> Result<DeltaNet, ConfigError> {
        // Of the norm of the output, whatever the file says of the others.
        let delta_net = DeltaNet::read(fields, 1e-5, ProjectionLayout::Separate)?;
        let beta_scale = if fields.flag_or("linear_allow_neg_eigval", true)? { 2.0 } else { 1.0 };
        Ok(DeltaNet { beta_scale, ..delta_net })
    }

    pub fn read(fields: &ConfigFields, eps: f64, form: ProjectionLayout) -> Result<DeltaNet, ConfigError> {
        let size = |field: &str, default: usize| {
            fields.check_max(field, fields.size_or(field, default)?, MOST_HEADS)
        };
        let (key_heads, value_heads) =
            (size("linear_num_key_heads", 16)?, size("linear_num_value_heads", 32)?);
        if !value_heads.is_multiple_of(key_heads) {
            let expected = format!("a multiple of linear_num_key_heads, which is {key_heads}");
            return Err(fields.invalid_value("linear_num_value_heads", &expected, &Value::from(value_heads)));
        }
        let taps = fields.size_or("linear_conv_kernel_dim", 4)?;
        if !(2..=64).contains(&taps) {
            return Err(fields.invalid_value("linear_conv_kernel_dim", "from 2 to 64", &Value::from(taps)));
        }
        let (key_size, value_size) = (size("linear_key_head_dim", 128)?, size("linear_value_head_dim", 128)?);
        Ok(DeltaNet {
            key_heads,
            value_heads,
            key_size,
            value_size,
            taps,
            conv_activation: ActivationFunction::read(fields, &["hidden_act"], ActivationFunction::Silu)?,
            eps,
            layout: form,
            beta_scale: 1.0,
        })
    }

    fn key_width(&self) -> usize {
        self.key_heads * self.key_size
    }

    fn value_width(&self) -> usize {
        self.value_heads * self.value_size
    }

    /// `[n, hidden]` to `[n, hidden]`.
    pub fn apply(&self, net: &mut ModelBuilder, layer: usize, name: &str, x: ValueId) -> ValueId {
        let hidden = net.width(x);
        let [qkv, z, b, a] = match self.layout {
            ProjectionLayout::Joined => self.projections(net, name, x),
            ProjectionLayout::ByKeyHead => self.fused_projections(net, name, x),
            ProjectionLayout::Separate => self.separate_projections(net, name, x),
        };
        let qkv = self.convolve(net, layer, name, qkv);
        let qkv = self.conv_activation.apply(net, qkv);
        let keys = self.key_width();
        let part = |net: &mut ModelBuilder, start: usize, len: usize| {
            net.slice(qkv, 1, Dim::from(start), Dim::from(len))
        };
        let [q, k] = [0, keys].map(|start| {
            let x = part(net, start, keys);
            let x = split(net, x, self.key_heads);
            let x = unit_length(net, x, LENGTH_EPS);
            repeat_heads(net, x, self.value_heads)
        });
        let q = net.scale(q, (self.key_size as f64).powf(-0.5));
        let v = part(net, 2 * keys, self.value_width());
        let v = split(net, v, self.value_heads);
        let beta = net.sigmoid(b);
        let beta = if self.beta_scale == 1.0 { beta } else { net.scale(beta, self.beta_scale) };
        let decay = self.decay(net, name, a);
        let state = MatrixState {
            heads: self.value_heads,
            shared_by: 1,
            values: self.value_size,
            keys: self.key_size,
        };
        let y = state.gated_delta_rule(net, layer, [q, k, v], [decay, beta]);
        let [norm, output] = match self.layout {
            ProjectionLayout::Separate => ["o_norm", "o_proj"],
            ProjectionLayout::Joined | ProjectionLayout::ByKeyHead => ["norm", "out_proj"],
        };
        let y = rms_norm(net, y, &format!("{name}.{norm}"), self.eps);
        let z = split(net, z, self.value_heads);
        let gate = ActivationFunction::Silu.apply(net, z);
        let y = net.mul(y, gate);
        let n = net.n();
        let y = net.reshape(y, [n, Dim::from(self.value_width())]);
        LinearLayer::new(&format!("{name}.{output}"), hidden).apply(net, y)
    }

    /// Queries, keys and values after their short convolutions.
    fn convolve(&self, net: &mut ModelBuilder, layer: usize, name: &str, qkv: ValueId) -> ValueId {
        let parts: &[&str] = match self.layout {
            ProjectionLayout::Separate => &["q_conv1d", "k_conv1d", "v_conv1d"],
            ProjectionLayout::Joined | ProjectionLayout::ByKeyHead => &["conv1d"],
        };
        let names: Vec<String> = parts.iter().map(|part| format!("{name}.{part}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let widths = [self.key_width(), self.key_width(), self.value_width()];
        let widths = if names.len() == 1 { &[][..] } else { &widths[..] };
        CausalConv { names: &names, widths, taps: self.taps, bias: false }.apply(net, layer, qkv)
    }

    /// `exp(-exp(A) * softplus(a + bias))` per head.
    fn decay(&self, net: &mut ModelBuilder, name: &str, a: ValueId) -> ValueId {
        let bias = net.vector_param(&format!("{name}.dt_bias"), self.value_heads);
        let a = net.add(a, bias);
        let rate = softplus(net, a);
        let name = format!("{name}.A_log");
        let source = ParamSource::NegExp(Box::new(net.declare_tensor(&name, &[self.value_heads])));
        let ty = TensorType::new(DType::F32, [self.value_heads]);
        let slope = net.param_from(&name, ParamRole::Vector, ty, source);
        let log = net.mul(rate, slope);
        net.exp(log)
    }

    /// Queries, keys and values in one; the gate of the output; what decides on beta and on the decay.
    fn projections(&self, net: &mut ModelBuilder, name: &str, x: ValueId) -> [ValueId; 4] {
        let widths = [
            2 * self.key_width() + self.value_width(),
            self.value_width(),
            self.value_heads,
            self.value_heads,
        ];
        let names = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"];
        std::array::from_fn(|i| LinearLayer::new(&format!("{name}.{}", names[i]), widths[i]).apply(net, x))
    }

    /// The same from a matrix each.
    fn separate_projections(&self, net: &mut ModelBuilder, name: &str, x: ValueId) -> [ValueId; 4] {
        let parts = ["q_proj", "k_proj", "v_proj"].map(|part| format!("{name}.{part}"));
        let [q, k, v] = parts.each_ref().map(String::as_str);
        let layers = [(q, self.key_width()), (k, self.key_width()), (v, self.value_width())];
        let qkv = apply_concatenated(net, &format!("{name}.qkv_proj"), &layers, x);
        let project = |net: &mut ModelBuilder, part: &str, out| {
            LinearLayer::new(&format!("{name}.{part}"), out).apply(net, x)
        };
        let heads = self.value_heads;
        [
            qkv,
            project(net, "g_proj", self.value_width()),
            project(net, "b_proj", heads),
            project(net, "a_proj", heads),
        ]
    }

    /// The same from `in_proj_qkvz` and `in_proj_ba`: by key head its query, key, values and gates, and its two numbers per
    /// value head.
    fn fused_projections(&self, net: &mut ModelBuilder, name: &str, x: ValueId) -> [ValueId; 4] {
        let (size, group) = (self.key_size, self.value_heads / self.key_heads);
        let values = group * self.value_size;
        let stride = 2 * size + 2 * values;
        let block = |start, len, stride: usize| RowBlocks {
            start,
            len,
            stride,
            count: self.key_heads,
            of: stride * self.key_heads,
        };
        let qkvz = format!("{name}.in_proj_qkvz");
        let rows =
            [(0, size), (size, size), (2 * size, values)].map(|(start, len)| block(start, len, stride));
        let qkv = joined_rows(net, &qkvz, "qkv", &rows, x);
        let z = LinearLayer::new(&qkvz, stride * self.key_heads)
            .with_part("z", block(2 * size + values, values, stride));
        let ba = format!("{name}.in_proj_ba");
        let half = |which: &'static str, start| {
            LinearLayer::new(&ba, 2 * self.value_heads).with_part(which, block(start, group, 2 * group))
        };
        [qkv, z.apply(net, x), half("b", 0).apply(net, x), half("a", group).apply(net, x)]
    }
}

/// The product with some rows of a layer, one block after the other.
fn joined_rows(net: &mut ModelBuilder, name: &str, part: &str, blocks: &[RowBlocks], x: ValueId) -> ValueId {
    let input = net.width(x);
    let source = net.declare_tensor(&format!("{name}.weight"), &[blocks[0].of, input]);
    let parts = blocks.iter().map(|&rows| ParamSource::Rows(rows, Box::new(source.clone()))).collect();
    let out: usize = blocks.iter().filter_map(RowBlocks::row_count).sum();
    let ty = TensorType::new(DType::F32, [out, input]);
    let weight =
        net.param_from(&format!("{name}.{part}.weight"), ParamRole::Linear, ty, ParamSource::Concat(parts));
    linear(net, x, weight)
}

/// `[n, heads * size]` as `[n, heads, size]`.
fn split(net: &mut ModelBuilder, x: ValueId, heads: usize) -> ValueId {
    net.split_heads(x, heads)
}

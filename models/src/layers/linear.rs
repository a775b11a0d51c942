//! Linear layers as checkpoints store them: plain, fused with others, transposed; with or without bias.

use super::linear;
use crate::model_builder::ModelBuilder;
use mlcc_ir::graph::ValueId;
use mlcc_ir::module::{ParamRole, ParamSource, RowBlocks};
use mlcc_ir::types::{DType, TensorType};

/// A linear layer `x @ weight^T + bias`, `weight: [out, in]`.
#[derive(Clone, Debug)]
pub struct LinearLayer<'a> {
    name: &'a str,
    out: usize,
    bias: bool,
    transposed: bool,
    part: Option<(&'a str, RowBlocks)>,
    role: ParamRole,
}

impl<'a> LinearLayer<'a> {
    /// `{name}.weight: [out, in]`.
    pub fn new(name: &'a str, out: usize) -> LinearLayer<'a> {
        LinearLayer { name, out, bias: false, transposed: false, part: None, role: ParamRole::Linear }
    }
    /// Also adds `{name}.bias: [out]`.
    pub fn bias(self, bias: bool) -> Self {
        LinearLayer { bias, ..self }
    }
    /// Stored as `[in, out]` (`Conv1D` of GPT-2).
    pub fn conv1d(self) -> Self {
        LinearLayer { transposed: true, ..self }
    }
    /// With another number of rows.
    pub fn with_out(self, out: usize) -> Self {
        LinearLayer { out, ..self }
    }
    /// Rows of the stored layer.
    pub fn out(&self) -> usize {
        self.out
    }
    /// Only these rows of a fused layer, under a name of their own.
    pub fn with_part(self, part: &'a str, rows: RowBlocks) -> Self {
        LinearLayer { part: Some((part, rows)), ..self }
    }
    /// Kept in f32 whatever the quantization: routers.
    pub fn unquantized(self) -> Self {
        LinearLayer { role: ParamRole::Vector, ..self }
    }

    /// Whether there are slots for adapters beside it: of tensors as a checkpoint has them, neither parts nor transposed.
    fn accepts_adapters(&self) -> bool {
        self.role == ParamRole::Linear && self.part.is_none() && !self.transposed
    }

    /// `[n, in]` to `[n, out]`, or to the width of the part.
    pub fn apply(&self, net: &mut ModelBuilder, x: ValueId) -> ValueId {
        let input = net.width(x);
        let stored = if self.transposed { [input, self.out] } else { [self.out, input] };
        let mut source = net.declare_tensor(&format!("{}.weight", self.name), &stored);
        if self.transposed {
            source = ParamSource::Transpose(Box::new(source));
        }
        let weight = self.param(net, "weight", source, self.role, Some(input));
        let mut y = linear(net, x, weight);
        if self.accepts_adapters() {
            y = net.add_adapters(&format!("{}.weight", self.name), x, y);
        }
        if !self.bias {
            return y;
        }
        let source = net.declare_tensor(&format!("{}.bias", self.name), &[self.out]);
        let bias = self.param(net, "bias", source, ParamRole::Vector, None);
        net.add(y, bias)
    }

    fn param(
        &self,
        net: &mut ModelBuilder,
        kind: &str,
        source: ParamSource,
        role: ParamRole,
        input: Option<usize>,
    ) -> ValueId {
        let (name, rows, source) = match self.part {
            None => (format!("{}.{kind}", self.name), self.out, source),
            Some((part, blocks)) => {
                let name = format!("{}.{part}.{kind}", self.name);
                (name, blocks.row_count().unwrap_or(0), ParamSource::Rows(blocks, Box::new(source)))
            }
        };
        let ty = TensorType::new(DType::F32, [rows].into_iter().chain(input));
        net.param_from(&name, role, ty, source)
    }
}

/// The products with several layers `{name}.weight: [out, in]`, side by side, as one product with the weight `{joined}.weight`.
pub fn apply_concatenated(
    net: &mut ModelBuilder,
    joined: &str,
    layers: &[(&str, usize)],
    x: ValueId,
) -> ValueId {
    let input = net.width(x);
    let parts = layers
        .iter()
        .map(|(name, out)| net.declare_tensor(&format!("{name}.weight"), &[*out, input]))
        .collect();
    let out: usize = layers.iter().map(|(_, out)| out).sum();
    let ty = TensorType::new(DType::F32, [out, input]);
    let weight =
        net.param_from(&format!("{joined}.weight"), ParamRole::Linear, ty, ParamSource::Concat(parts));
    linear(net, x, weight)
}

/// Where queries, keys and values are in the rows of a fused layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedQkv {
    pub query: RowBlocks,
    pub key: RowBlocks,
    pub value: RowBlocks,
}

impl FusedQkv {
    /// All queries, then all keys, then all values.
    pub fn in_order(query: usize, key: usize) -> FusedQkv {
        let of = query + 2 * key;
        FusedQkv {
            query: RowBlocks::range(0, query, of),
            key: RowBlocks::range(query, key, of),
            value: RowBlocks::range(query + key, key, of),
        }
    }

    /// By key head: the queries of its group, the key, the value. With one query per key this is GPT-NeoX's order.
    pub fn grouped_by_key_head(heads: usize, kv_heads: usize, size: usize) -> FusedQkv {
        let group = heads / kv_heads.max(1);
        let stride = (group + 2) * size;
        let block = |start, len| RowBlocks { start, len, stride, count: kv_heads, of: stride * kv_heads };
        FusedQkv {
            query: block(0, group * size),
            key: block(group * size, size),
            value: block((group + 1) * size, size),
        }
    }

    /// Rows of the fused layer.
    pub fn rows(&self) -> usize {
        self.query.of
    }

    /// The three products, `[n, width]` each.
    pub fn apply(&self, net: &mut ModelBuilder, x: ValueId, layer: &LinearLayer) -> [ValueId; 3] {
        let parts = [("query", self.query), ("key", self.key), ("value", self.value)];
        parts.map(|(name, rows)| layer.clone().with_part(name, rows).apply(net, x))
    }
}

/// Logits of the head `name: [vocab, hidden]`.
pub fn logit_head(net: &mut ModelBuilder, x: ValueId, name: &str, vocab: usize) -> ValueId {
    let hidden = net.width(x);
    let weight = net.weight_param(name, ParamRole::Head, &[vocab, hidden]);
    linear(net, x, weight)
}

/// Logits by the embedding table `embedding` where it is tied, else by `name`.
pub fn logit_head_or_tied(
    net: &mut ModelBuilder,
    x: ValueId,
    name: &str,
    tied: Option<&str>,
    vocab: usize,
) -> ValueId {
    match tied {
        None => logit_head(net, x, name, vocab),
        Some(embedding) => {
            let hidden = net.width(x);
            let table = net.weight_param(embedding, ParamRole::Embedding, &[vocab, hidden]);
            linear(net, x, table)
        }
    }
}

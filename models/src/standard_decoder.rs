//! Decoders whose layers are attention and a feed-forward part, and that differ in norms, biases, rotary embedding and the
//! form of these parts: each is a description, from which one definition makes the graph.

use crate::config::ConfigFields;
use crate::error::ConfigError;
use crate::layers::linear::{FusedQkv, LinearLayer};
use crate::layers::moe::{ExpertNames, ExpertStorage, MoeLayer};
use crate::layers::norm::{Norm, layer_norm_by_head, rms_norm};
use crate::layers::query_temperature::QueryTemperature;
use crate::layers::self_attention::HeadNorm;
use crate::layers::{
    ActivationFunction, AttentionVariant, Rope, RopeConfig, RopeDefaults, RopeTables, SelfAttention, mlp,
};
use crate::transformer::{ModelBuilder, ModelSizes, OuterLayers, Transformer, widest_window, with_prefix};
use mlcc_ir::graph::ValueId;

/// A decoder of equal layers.
#[derive(Clone, Debug, PartialEq)]
pub struct StandardDecoder {
    pub sizes: ModelSizes,
    pub outer_layers: OuterLayers,
    pub block: StandardBlock,
    /// What checkpoints of the inner model leave out before names, and how these names begin.
    pub inner_model: (&'static str, &'static [&'static str]),
    /// The hidden states of a text may be pooled.
    pub supports_pooling: bool,
    /// Rows that no layer's window reaches any more may be dropped from the caches.
    pub drops_rows: bool,
}

/// A layer: `x: [n, hidden]` to `[n, hidden]`.
#[derive(Clone, Debug, PartialEq)]
pub struct StandardBlock {
    /// Layer `i` is `{layers}.{i}`.
    pub layers: &'static str,
    /// Kind and epsilon of all norms.
    pub norm: Norm,
    pub norms: BlockNorms,
    pub attention: BlockAttention,
    pub mlp: BlockMlp,
    pub experts: Option<BlockExperts>,
    pub residual: ResidualForm,
}

/// Where a layer has norms, by their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockNorms {
    pub attention_input: Option<&'static str>,
    /// Before it is added.
    pub attention_output: Option<&'static str>,
    pub mlp_input: Option<&'static str>,
    pub mlp_output: Option<&'static str>,
}

impl BlockNorms {
    /// Before both parts (Xiong et al. 2020), as most checkpoints name them.
    pub const BEFORE: BlockNorms = BlockNorms::before("input_layernorm", "post_attention_layernorm");

    /// After both parts (OLMo 2).
    pub const AFTER: BlockNorms = BlockNorms {
        attention_input: None,
        attention_output: Some("post_attention_layernorm"),
        mlp_input: None,
        mlp_output: Some("post_feedforward_layernorm"),
    };

    pub const fn before(attention: &'static str, mlp: &'static str) -> BlockNorms {
        BlockNorms {
            attention_input: Some(attention),
            attention_output: None,
            mlp_input: Some(mlp),
            mlp_output: None,
        }
    }
}

/// What the feed-forward part reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResidualForm {
    /// The layer's input with what attention added.
    Sequential,
    /// The layer's input, through a norm of its own (GPT-NeoX).
    Parallel,
    /// The normalised input of attention (Cohere).
    ParallelShared,
}

/// Attention with rotary embedding. Names stand inside of `{layer}.{name}`.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockAttention {
    pub name: &'static str,
    pub qkv: QkvProjection,
    pub output: &'static str,
    pub qkv_bias: bool,
    pub output_bias: bool,
    /// `q_norm` and `k_norm`.
    pub head_norm: QueryKeyNorm,
    pub rope: Rope,
    /// Of layers with a window, where theirs is another one.
    pub local_rope: Option<Rope>,
    /// By layer: positions count. Queries and keys of other layers are not turned.
    pub use_rope: Vec<bool>,
    /// Attention windows by layer.
    pub windows: Vec<Option<usize>>,
    pub query_temperature: Option<QueryTemperature>,
}

/// How queries, keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkvProjection {
    /// `q_proj`, `k_proj`, `v_proj`.
    Separate,
    /// One matrix of this name: all queries, all keys, all values.
    FusedInOrder(&'static str),
    /// One matrix of this name: for each key head its queries, the key and the value.
    FusedByKeyHead(&'static str),
}

/// What is normalised of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryKeyNorm {
    None,
    /// Each head (Qwen 3).
    EachHead,
    /// Each head, with weights of its own and without bias (StableLM 2 12B).
    EachHeadOwnWeights,
    /// All heads together (OLMo 2).
    AllHeads,
}

/// The feed-forward part. Names stand inside of `{layer}.{name}`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockMlp {
    pub name: &'static str,
    pub form: MlpForm,
    pub width: usize,
    pub bias: bool,
    pub activation: ActivationFunction,
}

/// The feed-forward part's layers, by their names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpForm {
    /// `down(act(gate(x)) * up(x))` (Shazeer 2020): gate, up, down.
    Gated([&'static str; 3]),
    /// The same with gate and up in one matrix: that, down.
    GatedFused([&'static str; 2]),
    /// `down(act(up(x)))`: up, down.
    Ungated([&'static str; 2]),
}

impl MlpForm {
    /// As most checkpoints name them.
    pub const GATED: MlpForm = MlpForm::Gated(["gate_proj", "up_proj", "down_proj"]);
    pub const GATED_FUSED: MlpForm = MlpForm::GatedFused(["gate_up_proj", "down_proj"]);
}

/// Experts in place of the feed-forward part. Names stand inside of the layer.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockExperts {
    pub experts: MoeLayer,
    /// Layers that have them.
    pub sparse: Vec<bool>,
    pub router: &'static str,
    /// Expert `i` is `{inside}.{i}`.
    pub inside: &'static str,
    /// Gate, up, down.
    pub parts: [&'static str; 3],
}

/// What a family takes for granted where its configuration does not tell.
#[derive(Clone, Copy, Debug)]
pub struct StandardDefaults {
    /// Positions that the model was trained with.
    pub context: usize,
    pub rope: RopeDefaults,
    /// The norm of an epsilon.
    pub norm: fn(f64) -> Norm,
    /// Field and default of the epsilon.
    pub epsilon: (&'static str, f64),
    pub activation: ActivationFunction,
    pub tied: bool,
}

impl StandardDefaults {
    pub const LLAMA: StandardDefaults = StandardDefaults {
        context: 2048,
        rope: RopeDefaults::LLAMA,
        norm: Norm::Rms,
        epsilon: ("rms_norm_eps", 1e-6),
        activation: ActivationFunction::Silu,
        tied: false,
    };
}

impl StandardDecoder {
    /// The Llama block with these defaults, without biases and windows.
    pub fn read(fields: &ConfigFields, defaults: &StandardDefaults) -> Result<StandardDecoder, ConfigError> {
        StandardDecoder::read_sized(fields, defaults, ModelSizes::read(fields, Some(defaults.context))?)
    }

    /// The same of these sizes.
    pub fn read_sized(
        fields: &ConfigFields,
        defaults: &StandardDefaults,
        mut sizes: ModelSizes,
    ) -> Result<StandardDecoder, ConfigError> {
        let rope = RopeConfig::read(fields, sizes.head_size, sizes.context, defaults.rope)?;
        sizes.context = rope.context;
        let width = fields.size("intermediate_size")?;
        let (epsilon_field, epsilon) = defaults.epsilon;
        let norm = (defaults.norm)(fields.epsilon(&[epsilon_field], epsilon)?);
        let activation = ActivationFunction::read(fields, &["hidden_act"], defaults.activation)?;
        let tied = fields.flag_or("tie_word_embeddings", defaults.tied)?;
        let mut model = StandardDecoder::new(sizes, norm, rope.rope, BlockMlp::gated(width, activation));
        model.outer_layers.tied = tied;
        Ok(model)
    }

    /// The same of parts that were read in another way, with a head of its own.
    pub fn new(sizes: ModelSizes, norm: Norm, rope: Rope, mlp: BlockMlp) -> StandardDecoder {
        StandardDecoder {
            outer_layers: OuterLayers::hugging_face(norm, false),
            block: StandardBlock {
                layers: "model.layers",
                norm,
                norms: BlockNorms::BEFORE,
                attention: BlockAttention::new(rope, sizes.layers),
                mlp,
                experts: None,
                residual: ResidualForm::Sequential,
            },
            inner_model: ("model.", &["embed_tokens.", "layers.", "norm."]),
            supports_pooling: false,
            drops_rows: true,
            sizes,
        }
    }

    /// Another kind or epsilon for all norms.
    pub fn set_norm(&mut self, norm: Norm) {
        (self.block.norm, self.outer_layers.norm.0) = (norm, norm);
    }
}

impl BlockAttention {
    /// Separate projections without biases, all layers alike.
    pub fn new(rope: Rope, layers: usize) -> BlockAttention {
        BlockAttention {
            name: "self_attn",
            qkv: QkvProjection::Separate,
            output: "o_proj",
            qkv_bias: false,
            output_bias: false,
            head_norm: QueryKeyNorm::None,
            rope,
            local_rope: None,
            use_rope: vec![true; layers],
            windows: vec![None; layers],
            query_temperature: None,
        }
    }

    /// A bias for all four projections, or for none.
    pub fn set_bias(&mut self, bias: bool) {
        (self.qkv_bias, self.output_bias) = (bias, bias);
    }

    /// `[n, hidden]` to `[n, hidden]`, in layer `layer` of such blocks.
    fn apply(
        &self,
        net: &mut ModelBuilder,
        block: &StandardBlock,
        sizes: &ModelSizes,
        layer: usize,
        x: ValueId,
        positions: &BlockPositions,
    ) -> ValueId {
        let (norm, name) = (block.norm, format!("{}.{layer}.{}", block.layers, self.name));
        let [mut q, mut k, v] = self.project(net, sizes, &name, x);
        let mut head_norm: Option<(HeadNorm, f64)> = None;
        match self.head_norm {
            QueryKeyNorm::None => {}
            QueryKeyNorm::EachHead => head_norm = Some((rms_norm, norm.epsilon())),
            QueryKeyNorm::EachHeadOwnWeights => head_norm = Some((own_head_norm, norm.epsilon())),
            QueryKeyNorm::AllHeads => {
                q = norm.apply(net, q, &format!("{name}.q_norm"));
                k = norm.apply(net, k, &format!("{name}.k_norm"));
            }
        }
        let window = self.windows[layer];
        let attention = AttentionVariant { window, ..AttentionVariant::causal(sizes.head_size) };
        let part = SelfAttention {
            head_norm,
            rope: positions.rope.as_ref(),
            query_scale: positions.query_scale,
            ..SelfAttention::without_positions(&name, attention)
        };
        let h = part.attend(net, layer, sizes, [q, k, v]);
        let output = format!("{name}.{}", self.output);
        LinearLayer::new(&output, sizes.hidden).bias(self.output_bias).apply(net, h)
    }

    /// Queries, keys and values, `[n, width]` each.
    fn project(&self, net: &mut ModelBuilder, sizes: &ModelSizes, name: &str, x: ValueId) -> [ValueId; 3] {
        let (query, key) = (sizes.query_width(), sizes.key_width());
        let (fused, order) = match self.qkv {
            QkvProjection::Separate => {
                return [("q_proj", query), ("k_proj", key), ("v_proj", key)].map(|(part, out)| {
                    LinearLayer::new(&format!("{name}.{part}"), out).bias(self.qkv_bias).apply(net, x)
                });
            }
            QkvProjection::FusedInOrder(fused) => (fused, FusedQkv::in_order(query, key)),
            QkvProjection::FusedByKeyHead(fused) => {
                (fused, FusedQkv::grouped_by_key_head(sizes.heads, sizes.kv_heads, sizes.head_size))
            }
        };
        let fused = format!("{name}.{fused}");
        order.apply(net, x, &LinearLayer::new(&fused, order.rows()).bias(self.qkv_bias))
    }
}

/// [`layer_norm_by_head`] of checkpoints that call it `q_layernorm` and `k_layernorm`.
fn own_head_norm(net: &mut ModelBuilder, x: ValueId, name: &str, eps: f64) -> ValueId {
    layer_norm_by_head(net, x, &name.replace("_norm", "_layernorm"), eps)
}

impl BlockMlp {
    /// Gated, without biases, with the usual names.
    pub fn gated(width: usize, activation: ActivationFunction) -> BlockMlp {
        BlockMlp { name: "mlp", form: MlpForm::GATED, width, bias: false, activation }
    }

    /// `[n, hidden]` to `[n, hidden]`, inside of the layer `block`.
    pub fn apply(&self, net: &mut ModelBuilder, block: &str, x: ValueId) -> ValueId {
        let (hidden, name) = (net.width(x), |part: &str| format!("{block}.{}.{part}", self.name));
        match self.form {
            MlpForm::Gated(parts) => {
                let names = parts.map(name);
                let [gate, up, down] =
                    names.each_ref().map(|name| LinearLayer::new(name, self.width).bias(self.bias));
                mlp::gated(net, x, [gate, up, down.with_out(hidden)], self.activation)
            }
            MlpForm::GatedFused(parts) => {
                let [gate_up, down] = parts.map(name);
                let gate_up = LinearLayer::new(&gate_up, 2 * self.width).bias(self.bias);
                let down = LinearLayer::new(&down, hidden).bias(self.bias);
                mlp::gated_fused(net, x, gate_up, down, self.activation)
            }
            MlpForm::Ungated(parts) => {
                let [up, down] = parts.map(name);
                let up = LinearLayer::new(&up, self.width).bias(self.bias);
                let down = LinearLayer::new(&down, hidden).bias(self.bias);
                mlp::ungated(net, x, up, down, self.activation)
            }
        }
    }
}

impl BlockExperts {
    fn apply(&self, net: &mut ModelBuilder, block: &str, x: ValueId) -> ValueId {
        let (router, inside) = (format!("{block}.{}", self.router), format!("{block}.{}", self.inside));
        let storage = ExpertStorage::Single { experts: &inside, parts: self.parts };
        let names = ExpertNames { router: &router, correction: None, expert_scale: None, storage };
        self.experts.apply(net, x, &names)
    }
}

impl StandardBlock {
    /// Adds a layer.
    pub fn apply(
        &self,
        net: &mut ModelBuilder,
        sizes: &ModelSizes,
        layer: usize,
        x: ValueId,
        positions: &BlockPositions,
    ) -> ValueId {
        let name = format!("{}.{layer}", self.layers);
        let normalised = |net: &mut ModelBuilder, x: ValueId, norm: Option<&str>| match norm {
            Some(norm) => self.norm.apply(net, x, &format!("{name}.{norm}")),
            None => x,
        };
        let input = normalised(net, x, self.norms.attention_input);
        let h = self.attention.apply(net, self, sizes, layer, input, positions);
        let h = normalised(net, h, self.norms.attention_output);
        let attended = net.add_residual(layer, "attention", x, h);
        let input = match self.residual {
            ResidualForm::Sequential => normalised(net, attended, self.norms.mlp_input),
            ResidualForm::Parallel => normalised(net, x, self.norms.mlp_input),
            ResidualForm::ParallelShared => input,
        };
        let h = match &self.experts {
            Some(experts) if experts.sparse[layer] => experts.apply(net, &name, input),
            _ => self.mlp.apply(net, &name, input),
        };
        let h = normalised(net, h, self.norms.mlp_output);
        net.add_residual(layer, "mlp", attended, h)
    }
}

/// What depends on the positions of a call, of one layer.
#[derive(Clone, Copy)]
pub struct BlockPositions {
    /// `None`: positions do not count.
    pub rope: Option<RopeTables>,
    /// Factors of the queries, `[n, 1, 1]`.
    pub query_scale: Option<ValueId>,
}

/// The same of all layers.
pub struct StandardPositions {
    rope: RopeTables,
    /// Of layers with a window.
    local_rope: RopeTables,
    query_scale: Option<ValueId>,
}

impl Transformer for StandardDecoder {
    type Shared = StandardPositions;

    fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    fn outer_layers(&self) -> OuterLayers {
        self.outer_layers.clone()
    }

    fn prepare_shared(&self, net: &mut ModelBuilder) -> StandardPositions {
        let attention = &self.block.attention;
        let local = attention.local_rope.as_ref().unwrap_or(&attention.rope);
        let [rope, local_rope] = attention.rope.tables_with_local(net, local);
        let temperature = attention.query_temperature.as_ref();
        let query_scale = temperature.map(|scale| net.for_sequences(|net| scale.factors(net)));
        StandardPositions { rope, local_rope, query_scale }
    }

    fn add_layer(
        &self,
        net: &mut ModelBuilder,
        layer: usize,
        x: ValueId,
        positions: &StandardPositions,
    ) -> ValueId {
        let attention = &self.block.attention;
        let rope = if attention.windows[layer].is_some() { positions.local_rope } else { positions.rope };
        let query_scale = positions.query_scale;
        let positions = BlockPositions { rope: attention.use_rope[layer].then_some(rope), query_scale };
        self.block.apply(net, &self.sizes, layer, x, &positions)
    }

    fn canonical_name(&self, stored_name: &str) -> String {
        let (prefix, roots) = self.inner_model;
        with_prefix(stored_name, prefix, roots)
    }

    fn supports_pooling(&self) -> bool {
        self.supports_pooling
    }

    fn has_experts(&self) -> bool {
        self.block.experts.is_some()
    }

    fn window(&self) -> Option<usize> {
        widest_window(&self.block.attention.windows).filter(|_| self.drops_rows)
    }

    fn streaming_obstacle(&self) -> Option<&'static str> {
        let grow = self.block.attention.query_temperature.is_some();
        grow.then_some("queries of this model grow with their position")
    }
}

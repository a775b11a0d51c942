//! What a tensor of a GGUF file is called in the Hugging Face checkpoint, and what llama.cpp's converter did to it.

use TensorConversion::*;

/// What was done to a tensor, and is undone by reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorConversion {
    Same,
    /// Rows of each query head were interleaved: (half, i) became (i, half).
    QueryHeads,
    /// The same for key heads.
    KeyHeads,
    /// One was added to the weight of a norm.
    PlusOne,
    /// Conv1D of GPT-2 was transposed.
    Transposed,
    /// Rows of (head, q/k/v, i) became (q/k/v, head, i).
    HeadsInside,
    /// Falcon: rows of (group, q.../k/v, i) became all q, all k, all v.
    FalconGroups,
    /// All experts of a layer were stacked; the name has a place for the expert.
    Experts,
    /// Vectors of all heads were stacked; the name has a place for the head.
    Heads,
    /// Vectors were stacked that have these names, for which the name has a place.
    Stacked(&'static [&'static str]),
    /// A vector that was `[heads, size]`.
    SplitHeads,
    /// The matrices of a tensor of three axes were transposed, one by one.
    TransposedEach,
    /// The logarithm of decays became what they are used as: `-exp(x)`.
    NegExp,
    /// A vector that got a shape of its own.
    Flat,
    /// A matrix that got axes of one element.
    Matrix,
    /// Value heads that stood by key head take turns; the axis along which they stand.
    ValueHeads(ValueHeadAxis),
    /// Rows that stand by key head in two halves each, which have these names, for which the name has a place.
    HalvesByKeyHead([&'static str; 2]),
    /// Divided by `2^(layer / rescale_every)` against overflow (RWKV-6).
    Rescaled,
}

/// Where the value heads stand in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ValueHeadAxis {
    Rows,
    /// Rows behind those of queries and keys.
    RowsAfterKeys,
    Columns,
    /// A vector of decays, changed as [`NegExp`] says.
    Decays,
}

/// GGUF name, Hugging Face name, change; `{e}` in a name is what [`TensorConversion`] tells: an expert, a head, a part. Names in a
/// layer come without its number, and without `.weight` or `.bias` where both sides have it.
pub(crate) type NameMapping = (&'static str, &'static str, TensorConversion);

/// Names outside of layers; the prefix of layer names; names in a layer that differ from [`LLAMA_BLOCK`] or stand alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorNameMap {
    pub top: &'static [NameMapping],
    pub layers: &'static str,
    pub block: &'static [NameMapping],
    /// Whether [`LLAMA_BLOCK`] holds for the rest.
    pub llama_block: bool,
}

/// The parts that Llama-like blocks name alike, without the layer.
const LLAMA_BLOCK: &[NameMapping] = &[
    ("attn_norm", "input_layernorm", Same),
    ("attn_q", "self_attn.q_proj", Same),
    ("attn_k", "self_attn.k_proj", Same),
    ("attn_v", "self_attn.v_proj", Same),
    ("attn_output", "self_attn.o_proj", Same),
    ("attn_q_norm", "self_attn.q_norm", Same),
    ("attn_k_norm", "self_attn.k_norm", Same),
    ("attn_qkv", "self_attn.qkv_proj", Same),
    ("ffn_norm", "post_attention_layernorm", Same),
    ("ffn_gate", "mlp.gate_proj", Same),
    ("ffn_up", "mlp.up_proj", Same),
    ("ffn_down", "mlp.down_proj", Same),
];

/// What stands before `blk.`, and what the checkpoint has there.
const STACKS: [(&str, &str); 3] = [("", ""), ("enc.", "encoder."), ("dec.", "decoder.")];

/// A tensor's name in the checkpoint, and what to undo.
#[derive(Debug)]
pub(crate) struct MappedTensor {
    pub name: String,
    pub change: TensorConversion,
    pub layer: usize,
}

impl TensorNameMap {
    pub fn map_name(&self, gguf: &str) -> Option<MappedTensor> {
        if let Some((_, name, change)) = self.top.iter().find(|(known, ..)| *known == gguf) {
            return Some(MappedTensor { name: (*name).to_string(), change: *change, layer: 0 });
        }
        let (stack, rest) = gguf.split_once("blk.")?;
        let (layer, whole) = rest.split_once('.')?;
        let layer: u32 = layer.parse().ok()?;
        let rest: &[_] = if self.llama_block { LLAMA_BLOCK } else { &[] };
        // Of an encoder with a decoder each has names of its own.
        let entry = |part: &str| {
            let is = |known: &str| known.strip_prefix(stack) == Some(part);
            self.block.iter().chain(rest).find(|(known, ..)| is(known))
        };
        let stack_name = STACKS.iter().find(|(short, _)| *short == stack)?.1;
        let prefix = format!("{stack_name}{}.{layer}", self.layers);
        let layer = layer as usize;
        if let Some((_, name, change)) = entry(whole) {
            return Some(MappedTensor { name: format!("{prefix}.{name}"), change: *change, layer });
        }
        let (part, suffix) = whole.rsplit_once('.')?;
        let (_, name, change) = entry(part)?;
        // A bias is one element per row; a transposed matrix has its bias as it was.
        let change = if suffix == "bias" && *change == Transposed { Same } else { *change };
        Some(MappedTensor { name: format!("{prefix}.{name}.{suffix}"), change, layer })
    }
}

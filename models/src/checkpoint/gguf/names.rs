//! From the tensors of a GGUF file to those of the Hugging Face checkpoint: names, and what the converter
//! (`convert_hf_to_gguf.py` of llama.cpp) did to the values.
//!
//! A tensor that has no entry keeps its name; the comparison with the model's own list reports it.

use super::super::TensorInfo;
use super::config::ARCHITECTURES;
use super::view::View;
use super::{Metadata, RawTensor};
use crate::error::CheckpointError;

/// What was done to a tensor, and is undone here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
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
    /// All experts of a layer were stacked; the name has a second place, for the expert.
    Experts,
}

use Change::*;

/// GGUF name, Hugging Face name, change. `{}` is the number of the layer, `{e}` that of the expert.
type Entry = (&'static str, &'static str, Change);

const LLAMA_TOP: &[Entry] = &[
    ("token_embd.weight", "model.embed_tokens.weight", Same),
    ("output_norm.weight", "model.norm.weight", Same),
    ("output_norm.bias", "model.norm.bias", Same),
    ("output.weight", "lm_head.weight", Same),
];

/// The parts that Llama-like blocks name alike, without the layer.
const LLAMA_BLOCK: &[Entry] = &[
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

/// Tensors that hold configuration, not weights.
const CONFIGURATION: [&str; 3] =
    ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// One family: names outside of layers; the prefix of layer names; names in a layer that differ from [`LLAMA_BLOCK`] or
/// stand alone.
struct Family {
    top: &'static [Entry],
    layers: &'static str,
    block: &'static [Entry],
    /// Whether [`LLAMA_BLOCK`] holds for the rest.
    llama_block: bool,
}

fn family(arch: &str, experts: bool) -> Option<Family> {
    let llama =
        |block: &'static [Entry]| Family { top: LLAMA_TOP, layers: "model.layers", block, llama_block: true };
    Some(match arch {
        "llama" if experts => llama(&[
            ("attn_q", "self_attn.q_proj", QueryHeads),
            ("attn_k", "self_attn.k_proj", KeyHeads),
            ("ffn_gate_inp", "block_sparse_moe.gate", Same),
            ("ffn_gate_exps", "block_sparse_moe.experts.{e}.w1", Experts),
            ("ffn_down_exps", "block_sparse_moe.experts.{e}.w2", Experts),
            ("ffn_up_exps", "block_sparse_moe.experts.{e}.w3", Experts),
        ]),
        "llama" => {
            llama(&[("attn_q", "self_attn.q_proj", QueryHeads), ("attn_k", "self_attn.k_proj", KeyHeads)])
        }
        "qwen2" | "qwen3" => llama(&[]),
        "qwen3moe" => llama(&[
            ("ffn_gate_inp", "mlp.gate", Same),
            ("ffn_gate_exps", "mlp.experts.{e}.gate_proj", Experts),
            ("ffn_down_exps", "mlp.experts.{e}.down_proj", Experts),
            ("ffn_up_exps", "mlp.experts.{e}.up_proj", Experts),
        ]),
        "gemma2" | "gemma3" => Family {
            top: &[
                ("token_embd.weight", "model.embed_tokens.weight", Same),
                ("output_norm.weight", "model.norm.weight", PlusOne),
                ("output.weight", "lm_head.weight", Same),
            ],
            ..llama(&[
                ("attn_norm", "input_layernorm", PlusOne),
                ("post_attention_norm", "post_attention_layernorm", PlusOne),
                ("ffn_norm", "pre_feedforward_layernorm", PlusOne),
                ("post_ffw_norm", "post_feedforward_layernorm", PlusOne),
                ("attn_q_norm", "self_attn.q_norm", PlusOne),
                ("attn_k_norm", "self_attn.k_norm", PlusOne),
            ])
        },
        "phi3" => llama(&[("ffn_up", "mlp.gate_up_proj", Same)]),
        "starcoder2" => llama(&[("ffn_up", "mlp.c_fc", Same), ("ffn_down", "mlp.c_proj", Same)]),
        "stablelm" => llama(&[]),
        "olmo2" => llama(&[
            ("post_attention_norm", "post_attention_layernorm", Same),
            ("post_ffw_norm", "post_feedforward_layernorm", Same),
        ]),
        "glm4" => llama(&[
            ("ffn_up", "mlp.gate_up_proj", Same),
            ("post_attention_norm", "post_self_attn_layernorm", Same),
            ("post_ffw_norm", "post_mlp_layernorm", Same),
        ]),
        "gpt2" => Family {
            top: &[
                ("token_embd.weight", "transformer.wte.weight", Same),
                ("position_embd.weight", "transformer.wpe.weight", Same),
                ("output_norm.weight", "transformer.ln_f.weight", Same),
                ("output_norm.bias", "transformer.ln_f.bias", Same),
                ("output.weight", "lm_head.weight", Same),
            ],
            layers: "transformer.h",
            block: &[
                ("attn_norm", "ln_1", Same),
                ("attn_qkv", "attn.c_attn", Transposed),
                ("attn_output", "attn.c_proj", Transposed),
                ("ffn_norm", "ln_2", Same),
                ("ffn_up", "mlp.c_fc", Transposed),
                ("ffn_down", "mlp.c_proj", Transposed),
            ],
            llama_block: false,
        },
        "gptneox" => Family {
            top: &[
                ("token_embd.weight", "gpt_neox.embed_in.weight", Same),
                ("output_norm.weight", "gpt_neox.final_layer_norm.weight", Same),
                ("output_norm.bias", "gpt_neox.final_layer_norm.bias", Same),
                ("output.weight", "embed_out.weight", Same),
            ],
            layers: "gpt_neox.layers",
            block: &[
                ("attn_norm", "input_layernorm", Same),
                ("attn_qkv", "attention.query_key_value", HeadsInside),
                ("attn_output", "attention.dense", Same),
                ("ffn_norm", "post_attention_layernorm", Same),
                ("ffn_up", "mlp.dense_h_to_4h", Same),
                ("ffn_down", "mlp.dense_4h_to_h", Same),
            ],
            llama_block: false,
        },
        "bloom" => Family {
            top: &[
                ("token_embd.weight", "transformer.word_embeddings.weight", Same),
                ("token_embd_norm.weight", "transformer.word_embeddings_layernorm.weight", Same),
                ("token_embd_norm.bias", "transformer.word_embeddings_layernorm.bias", Same),
                ("output_norm.weight", "transformer.ln_f.weight", Same),
                ("output_norm.bias", "transformer.ln_f.bias", Same),
                ("output.weight", "lm_head.weight", Same),
            ],
            layers: "transformer.h",
            block: &[
                ("attn_norm", "input_layernorm", Same),
                ("attn_qkv", "self_attention.query_key_value", HeadsInside),
                ("attn_output", "self_attention.dense", Same),
                ("ffn_norm", "post_attention_layernorm", Same),
                ("ffn_up", "mlp.dense_h_to_4h", Same),
                ("ffn_down", "mlp.dense_4h_to_h", Same),
            ],
            llama_block: false,
        },
        "falcon" => Family {
            top: &[
                ("token_embd.weight", "transformer.word_embeddings.weight", Same),
                ("output_norm.weight", "transformer.ln_f.weight", Same),
                ("output_norm.bias", "transformer.ln_f.bias", Same),
                ("output.weight", "lm_head.weight", Same),
            ],
            layers: "transformer.h",
            block: &[
                ("attn_norm", "input_layernorm", Same),
                ("attn_norm_2", "ln_mlp", Same),
                ("attn_qkv", "self_attention.query_key_value", FalconGroups),
                ("attn_output", "self_attention.dense", Same),
                ("ffn_up", "mlp.dense_h_to_4h", Same),
                ("ffn_down", "mlp.dense_4h_to_h", Same),
            ],
            llama_block: false,
        },
        "mpt" => Family {
            top: &[
                ("token_embd.weight", "transformer.wte.weight", Same),
                ("output_norm.weight", "transformer.norm_f.weight", Same),
                ("output_norm.bias", "transformer.norm_f.bias", Same),
                ("output.weight", "lm_head.weight", Same),
            ],
            layers: "transformer.blocks",
            block: &[
                ("attn_norm", "norm_1", Same),
                ("attn_qkv", "attn.Wqkv", Same),
                ("attn_output", "attn.out_proj", Same),
                ("attn_q_norm", "attn.q_ln", Same),
                ("attn_k_norm", "attn.k_ln", Same),
                ("ffn_norm", "norm_2", Same),
                ("ffn_up", "ffn.up_proj", Same),
                ("ffn_down", "ffn.down_proj", Same),
            ],
            llama_block: false,
        },
        "chatglm" => Family {
            top: &[
                ("token_embd.weight", "transformer.embedding.word_embeddings.weight", Same),
                ("output_norm.weight", "transformer.encoder.final_layernorm.weight", Same),
                ("output.weight", "transformer.output_layer.weight", Same),
            ],
            layers: "transformer.encoder.layers",
            block: &[
                ("attn_norm", "input_layernorm", Same),
                ("attn_qkv", "self_attention.query_key_value", Same),
                ("attn_output", "self_attention.dense", Same),
                ("ffn_norm", "post_attention_layernorm", Same),
                ("ffn_up", "mlp.dense_h_to_4h", Same),
                ("ffn_down", "mlp.dense_4h_to_h", Same),
            ],
            llama_block: false,
        },
        _ => return None,
    })
}

/// More than any model has; keeps a damaged file from asking for millions of tensors.
const MOST_EXPERTS: usize = 4096;

/// Sizes that the changes depend on.
#[derive(Clone, Copy, Debug)]
struct Heads {
    query: usize,
    key: usize,
}

/// All tensors under their Hugging Face names. Files of an architecture that is not known keep their own names.
pub(super) fn map(
    label: &str,
    metadata: &Metadata,
    tensors: &[RawTensor],
) -> Result<Vec<TensorInfo>, CheckpointError> {
    let arch = metadata.string("general.architecture")?.unwrap_or("");
    let number = |name: &str| metadata.number(&format!("{arch}.{name}"));
    let query = number("attention.head_count")?.unwrap_or(0);
    let key = number("attention.head_count_kv")?.unwrap_or(query);
    let heads = Heads { query: query as usize, key: key as usize };
    let experts = number("expert_count")?.unwrap_or(0) > 0;
    let family = family(arch, experts);
    debug_assert!(family.is_some() == ARCHITECTURES.iter().any(|(known, _)| *known == arch));
    let mut infos = Vec::with_capacity(tensors.len());
    for raw in tensors.iter().filter(|raw| !CONFIGURATION.contains(&raw.name.as_str())) {
        let found = family.as_ref().and_then(|family| family.find(&raw.name));
        match found {
            Some((name, change)) => undo(label, raw, name, change, heads, &mut infos)?,
            None => infos.push(raw.plain(raw.name.clone())),
        }
    }
    Ok(infos)
}

impl Family {
    fn find(&self, gguf: &str) -> Option<(String, Change)> {
        if let Some((_, name, change)) = self.top.iter().find(|(known, ..)| *known == gguf) {
            return Some(((*name).to_string(), *change));
        }
        let (layer, part) = gguf.strip_prefix("blk.")?.split_once('.')?;
        let layer: u32 = layer.parse().ok()?;
        let (part, suffix) = part.rsplit_once('.')?;
        let rest: &[Entry] = if self.llama_block { LLAMA_BLOCK } else { &[] };
        let (_, name, change) = self.block.iter().chain(rest).find(|(known, ..)| *known == part)?;
        // A bias is one element per row; a transposed matrix has its bias as it was.
        let change = if suffix == "bias" && *change == Transposed { Same } else { *change };
        Some((format!("{}.{layer}.{name}.{suffix}", self.layers), change))
    }
}

fn undo(
    label: &str,
    raw: &RawTensor,
    name: String,
    change: Change,
    heads: Heads,
    infos: &mut Vec<TensorInfo>,
) -> Result<(), CheckpointError> {
    let view = View::whole(raw);
    let wrong = |what: String| CheckpointError::UnsupportedTensor {
        file: label.to_string(),
        tensor: raw.name.clone(),
        detail: format!("has shape {:?}, {what}", raw.shape),
    };
    let ordered = |order: Option<Vec<u32>>| {
        let heads = format!("which does not fit {} query and {} key heads", heads.query, heads.key);
        let order = order.ok_or_else(|| wrong(heads))?;
        Ok(raw.viewed(name.clone(), raw.shape.clone(), View { order: Some(order), ..view.clone() }))
    };
    match change {
        Same => infos.push(raw.plain(name)),
        QueryHeads => infos.push(ordered(interleaved(view.rows, heads.query))?),
        KeyHeads => infos.push(ordered(interleaved(view.rows, heads.key))?),
        HeadsInside => infos.push(ordered(heads_inside(view.rows, heads.query))?),
        FalconGroups => infos.push(ordered(falcon_groups(view.rows, heads))?),
        PlusOne => infos.push(raw.viewed(name, raw.shape.clone(), View { add: -1.0, ..view })),
        Transposed => {
            let &[rows, columns] = raw.shape.as_slice() else {
                return Err(wrong("expected a matrix".to_string()));
            };
            infos.push(raw.viewed(name, vec![columns, rows], View { transpose: true, ..view }));
        }
        Experts => {
            let &[experts, rows, columns] = raw.shape.as_slice() else {
                return Err(wrong("expected a matrix for each expert".to_string()));
            };
            if experts > MOST_EXPERTS || raw.elements() == 0 {
                return Err(wrong(format!("expected up to {MOST_EXPERTS} experts")));
            }
            for expert in 0..experts {
                let name = name.replace("{e}", &expert.to_string());
                let view = View { first: expert * rows, ..view.clone() };
                infos.push(raw.viewed(name, vec![rows, columns], view));
            }
        }
    }
    Ok(())
}

/// Rows of a head: (half, i) is stored at (i, half).
fn interleaved(rows: usize, heads: usize) -> Option<Vec<u32>> {
    let head = exact(rows, heads)?;
    let half = exact(head, 2)?;
    Some(
        (0..rows)
            .map(|row| row / head * head + row % head % half * 2 + row % head / half)
            .map(|r| r as u32)
            .collect(),
    )
}

/// Row (head, part, i) of three parts is stored at (part, head, i).
fn heads_inside(rows: usize, heads: usize) -> Option<Vec<u32>> {
    let size = exact(rows, 3 * heads)?;
    let stored = |row: usize| {
        let (head, part, i) = (row / (3 * size), row / size % 3, row % size);
        (part * heads + head) * size + i
    };
    Some((0..rows).map(|row| stored(row) as u32).collect())
}

/// Row (group, part, i), where a group has its queries, one key and one value, is stored with all queries first.
fn falcon_groups(rows: usize, heads: Heads) -> Option<Vec<u32>> {
    let size = exact(rows, heads.query + 2 * heads.key)?;
    let queries = exact(heads.query, heads.key)?;
    let stored = |row: usize| {
        let (group, part, i) = (row / ((queries + 2) * size), row / size % (queries + 2), row % size);
        let head = match part {
            part if part < queries => group * queries + part,
            part => heads.query + (part - queries) * heads.key + group,
        };
        head * size + i
    };
    Some((0..rows).map(|row| stored(row) as u32).collect())
}

/// The quotient, if there is no rest.
fn exact(number: usize, by: usize) -> Option<usize> {
    (by != 0 && number.is_multiple_of(by)).then(|| number / by)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows after a conversion: number of the original row at each stored place.
    fn restored(stored: &[u32], order: &[u32]) -> Vec<u32> {
        order.iter().map(|&row| stored[row as usize]).collect()
    }

    #[test]
    fn conversions_are_undone() {
        let all: Vec<u32> = (0..24).collect();
        // reshape(2, 2, 6).swapaxes(1, 2): head, half, i.
        let rows = |f: &dyn Fn(u32, u32, u32) -> u32, a: u32, b: u32, c: u32| -> Vec<u32> {
            let pairs = (0..a).flat_map(|x| (0..b).map(move |y| (x, y)));
            pairs.flat_map(|(x, y)| (0..c).map(move |z| (x, y, z))).map(|(x, y, z)| f(x, y, z)).collect()
        };
        let stored = rows(&|head, i, half| head * 12 + half * 6 + i, 2, 6, 2);
        assert_eq!(restored(&stored, &interleaved(24, 2).unwrap()), all);
        // reshape(2, 3, 4) to q, k, v.
        let stored = rows(&|part, head, i| head * 12 + part * 4 + i, 3, 2, 4);
        assert_eq!(restored(&stored, &heads_inside(24, 2).unwrap()), all);
        // Two groups of one query head, a key and a value of 4; the same order as above.
        let order = falcon_groups(24, Heads { query: 2, key: 2 }).unwrap();
        assert_eq!(restored(&stored, &order), all);
        // Groups of two query heads: q q k v, elements of 3.
        let stored = [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 6, 7, 8, 18, 19, 20, 9, 10, 11, 21, 22, 23];
        let order = falcon_groups(24, Heads { query: 4, key: 2 }).unwrap();
        assert_eq!(restored(&stored, &order), all);
        for bad in [interleaved(24, 0), interleaved(24, 7), interleaved(24, 24), heads_inside(24, 3)] {
            assert_eq!(bad, None);
        }
    }

    #[test]
    fn every_architecture_has_names() {
        for (arch, _) in ARCHITECTURES {
            let family = family(arch, false).unwrap_or_else(|| panic!("{arch}"));
            assert!(family.find("token_embd.weight").is_some(), "{arch}");
            assert!(family.find("blk.3.attn_norm.weight").is_some() || *arch == "olmo2", "{arch}");
        }
    }
}

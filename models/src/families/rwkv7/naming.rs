//! One set of tensor names for RWKV-7: those of the Hugging Face checkpoints (flash-linear-attention). BlinkDL's own `.pth`
//! files use shorter ones, and store the thin matrices `w1`, `w2`, ... as `[in, out]`.
//!
//! | BlinkDL | here |
//! | --- | --- |
//! | `emb.weight` | `model.embeddings.weight` |
//! | `blocks.0.ln0.*` | `model.layers.0.pre_norm.*` |
//! | `blocks.N.ln1.*`, `ln2.*` | `model.layers.N.attn_norm.*`, `ffn_norm.*` |
//! | `blocks.N.att.receptance`, `key`, `value`, `output` | `model.layers.N.attn.r_proj`, `k_proj`, `v_proj`, `o_proj` |
//! | `blocks.N.att.ln_x.*` | `model.layers.N.attn.g_norm.*` |
//! | `blocks.N.att.w0`, `w1`, `w2` (also a, v, g) | `model.layers.N.attn.w_lora.lora.2.bias`, `lora.0.weight`, `lora.2.weight` |
//! | `blocks.N.ffn.*` | `model.layers.N.ffn.*` |
//! | `ln_out.*`, `head.weight` | `model.norm.*`, `lm_head.weight` |

use crate::checkpoint::Distribution;
use crate::families::rwkv7::Rwkv7Config;

/// Parts that come from two thin matrices.
const LOW_RANK: [&str; 4] = ["w", "a", "v", "g"];

/// The canonical name of a tensor of RWKV-7. A name that is canonical already, or unknown, comes back as it is.
pub fn rwkv7_canonical(name: &str) -> String {
    if let Some(rest) = name.strip_prefix("emb.") {
        return format!("model.embeddings.{rest}");
    }
    if let Some(rest) = name.strip_prefix("ln_out.") {
        return format!("model.norm.{rest}");
    }
    if let Some(rest) = name.strip_prefix("head.") {
        return format!("lm_head.{rest}");
    }
    let block = name.strip_prefix("blocks.").and_then(|rest| rest.split_once('.'));
    let Some((number, rest)) = block else { return name.to_string() };
    let rest = match rest.split_once('.') {
        Some(("ln0", part)) => format!("pre_norm.{part}"),
        Some(("ln1", part)) => format!("attn_norm.{part}"),
        Some(("ln2", part)) => format!("ffn_norm.{part}"),
        Some(("att", part)) => format!("attn.{}", attention_part(part)),
        _ => rest.to_string(),
    };
    format!("model.layers.{number}.{rest}")
}

fn attention_part(part: &str) -> String {
    if let Some((letter, number)) = low_rank(part) {
        let place = ["lora.2.bias", "lora.0.weight", "lora.2.weight"][number];
        return format!("{letter}_lora.{place}");
    }
    let (module, rest) = part.split_once('.').unwrap_or((part, ""));
    let module = match module {
        "receptance" => "r_proj",
        "key" => "k_proj",
        "value" => "v_proj",
        "output" => "o_proj",
        "ln_x" => "g_norm",
        _ => return part.to_string(),
    };
    format!("{module}.{rest}")
}

/// `w1` as ("w", 1).
fn low_rank(part: &str) -> Option<(&'static str, usize)> {
    let letter = LOW_RANK.into_iter().find(|letter| part.starts_with(letter))?;
    let number = ["0", "1", "2"].iter().position(|n| part[letter.len()..] == **n)?;
    Some((letter, number))
}

/// True for the thin matrices of BlinkDL's files.
pub fn is_stored_transposed(stored_name: &str) -> bool {
    let part = stored_name.strip_prefix("blocks.").and_then(|rest| rest.split_once(".att."));
    part.is_some_and(|(_, part)| matches!(low_rank(part), Some((_, 1 | 2))))
}

/// Files of the training code have a mix with the first layer's value in the first layer too, where it does nothing.
pub fn is_unused(canonical_name: &str) -> bool {
    canonical_name.starts_with("model.layers.0.attn.v_lora.")
}

/// Canonical name and shape of every tensor of an RWKV-7 checkpoint.
pub fn rwkv7_tensors(config: &Rwkv7Config) -> Vec<(String, Vec<usize>)> {
    let Rwkv7Config { vocab, hidden: c, intermediate: f, layers, .. } = *config;
    let mut tensors = vec![("model.embeddings.weight".to_string(), vec![vocab, c])];
    for layer in 0..layers {
        let mut add = |part: &str, shape: &[usize]| {
            tensors.push((format!("model.layers.{layer}.{part}"), shape.to_vec()));
        };
        let norms: &[&str] =
            if layer == 0 { &["pre_norm", "attn_norm", "ffn_norm"] } else { &["attn_norm", "ffn_norm"] };
        for norm in norms {
            add(&format!("{norm}.weight"), &[c]);
            add(&format!("{norm}.bias"), &[c]);
        }
        for mix in ["r", "w", "k", "v", "a", "g"] {
            add(&format!("attn.x_{mix}"), &[c]);
        }
        let ranks = [config.decay_rank, config.rate_rank, config.value_rank, config.gate_rank];
        for (letter, rank) in LOW_RANK.into_iter().zip(ranks) {
            if (letter, layer) == ("v", 0) {
                continue;
            }
            add(&format!("attn.{letter}_lora.lora.0.weight"), &[rank, c]);
            add(&format!("attn.{letter}_lora.lora.2.weight"), &[c, rank]);
            if letter != "g" {
                add(&format!("attn.{letter}_lora.lora.2.bias"), &[c]);
            }
        }
        add("attn.k_k", &[c]);
        add("attn.k_a", &[c]);
        add("attn.r_k", &[config.heads(), config.head_size]);
        for projection in ["r_proj", "k_proj", "v_proj", "o_proj"] {
            add(&format!("attn.{projection}.weight"), &[c, c]);
        }
        add("attn.g_norm.weight", &[c]);
        add("attn.g_norm.bias", &[c]);
        add("ffn.x_k", &[c]);
        add("ffn.key.weight", &[f, c]);
        add("ffn.value.weight", &[c, f]);
    }
    tensors.push(("model.norm.weight".to_string(), vec![c]));
    tensors.push(("model.norm.bias".to_string(), vec![c]));
    tensors.push(("lm_head.weight".to_string(), vec![vocab, c]));
    tensors
}

/// Random values in the range of a trained model: norms near 1, mixes between 0 and 1, matrices with deviation
/// 1/sqrt(inputs), the functions of the token near their constant parts.
pub fn rwkv7_distribution(name: &str, shape: &[usize]) -> Distribution {
    let (module, part) = name.rsplit_once('.').unwrap_or(("", name));
    let near = |mean, deviation| Distribution::Normal { mean, deviation };
    match part {
        "bias" if module.ends_with("w_lora.lora.2") => Distribution::Uniform { low: -6.0, high: 1.0 },
        "bias" => near(0.0, 0.02),
        "weight" if module.ends_with("norm") => near(1.0, 0.02),
        "k_k" => near(0.85, 0.05),
        "k_a" => near(1.0, 0.02),
        "r_k" => near(0.0, 0.1),
        _ if part.starts_with("x_") => Distribution::Uniform { low: 0.0, high: 1.0 },
        _ => near(0.0, 1.0 / (shape.last().copied().unwrap_or(1).max(1) as f32).sqrt()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_namings_lead_to_one() {
        let pairs = [
            ("emb.weight", "model.embeddings.weight"),
            ("blocks.0.ln0.bias", "model.layers.0.pre_norm.bias"),
            ("blocks.12.ln2.weight", "model.layers.12.ffn_norm.weight"),
            ("blocks.3.att.w0", "model.layers.3.attn.w_lora.lora.2.bias"),
            ("blocks.3.att.v1", "model.layers.3.attn.v_lora.lora.0.weight"),
            ("blocks.3.att.g2", "model.layers.3.attn.g_lora.lora.2.weight"),
            ("blocks.3.att.x_a", "model.layers.3.attn.x_a"),
            ("blocks.3.att.value.weight", "model.layers.3.attn.v_proj.weight"),
            ("blocks.3.att.ln_x.bias", "model.layers.3.attn.g_norm.bias"),
            ("blocks.3.att.r_k", "model.layers.3.attn.r_k"),
            ("blocks.3.ffn.value.weight", "model.layers.3.ffn.value.weight"),
            ("ln_out.bias", "model.norm.bias"),
            ("head.weight", "lm_head.weight"),
        ];
        for (short, long) in pairs {
            assert_eq!(rwkv7_canonical(short), long);
            assert_eq!(rwkv7_canonical(long), long);
            assert_eq!(
                is_stored_transposed(short),
                short.ends_with("v1") || short.ends_with("g2"),
                "{short}"
            );
            assert!(!is_stored_transposed(long));
        }
    }

    #[test]
    fn strange_names_are_left_alone() {
        for name in ["", "blocks", "blocks.", "blocks.1", "w1", "model.layers.x", "blocks.1.att"] {
            let canonical = rwkv7_canonical(name);
            assert!(canonical == name || canonical.starts_with("model.layers."), "{canonical}");
            assert!(!is_stored_transposed(name) && !is_unused(&canonical));
        }
        assert!(
            is_unused(&rwkv7_canonical("blocks.0.att.v1")) && !is_unused(&rwkv7_canonical("blocks.1.att.v1"))
        );
    }

    #[test]
    fn a_published_model_has_its_published_size() {
        // RWKV-7-World-2.9B.
        let config = Rwkv7Config::of_size(65536, 2560, 32);
        let tensors = rwkv7_tensors(&config);
        let elements: usize = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        assert_eq!(elements, 2_947_735_040);
    }
}

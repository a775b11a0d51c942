//! One set of tensor names for RWKV-4 to -6: those of the Hugging Face checkpoints. BlinkDL's own `.pth` files use shorter
//! ones.
//!
//! | BlinkDL | here |
//! | --- | --- |
//! | `emb.weight` | `rwkv.embeddings.weight` |
//! | `blocks.0.ln0.*` | `rwkv.blocks.0.pre_ln.*` |
//! | `blocks.N.ln1.*`, `ln2.*` | `rwkv.blocks.N.ln1.*`, `ln2.*` |
//! | `blocks.N.att.*` | `rwkv.blocks.N.attention.*` |
//! | `blocks.N.ffn.*` | `rwkv.blocks.N.feed_forward.*` |
//! | `*.time_mix_k`, `_v`, `_r`, `_g` | `*.time_mix_key`, `_value`, `_receptance`, `_gate` |
//! | `ln_out.*` | `rwkv.ln_out.*` |
//! | `head.weight` | `head.weight` |

use crate::checkpoint::Distribution;
use crate::families::rwkv4::Rwkv4Config;

/// The canonical name of a tensor of RWKV-4, -5 or -6. A name that is canonical already, or unknown, comes back as it is.
pub fn rwkv4_canonical(name: &str) -> String {
    if let Some(rest) = name.strip_prefix("emb.") {
        return format!("rwkv.embeddings.{rest}");
    }
    if name.starts_with("ln_out.") {
        return format!("rwkv.{name}");
    }
    let block = name.strip_prefix("blocks.").and_then(|rest| rest.split_once('.'));
    let Some((number, rest)) = block else { return name.to_string() };
    let rest = match rest.split_once('.') {
        Some(("ln0", part)) => format!("pre_ln.{part}"),
        Some(("att", part)) => format!("attention.{}", long_mix(part)),
        Some(("ffn", part)) => format!("feed_forward.{}", long_mix(part)),
        _ => rest.to_string(),
    };
    format!("rwkv.blocks.{number}.{rest}")
}

fn long_mix(part: &str) -> &str {
    match part {
        "time_mix_k" => "time_mix_key",
        "time_mix_v" => "time_mix_value",
        "time_mix_r" => "time_mix_receptance",
        "time_mix_g" => "time_mix_gate",
        other => other,
    }
}

/// Canonical name and shape of every tensor of an RWKV-4 checkpoint.
pub fn rwkv4_tensors(config: &Rwkv4Config) -> Vec<(String, Vec<usize>)> {
    let Rwkv4Config { vocab, hidden: c, attention_hidden: a, intermediate: f, layers, .. } = *config;
    let mut tensors = vec![("rwkv.embeddings.weight".to_string(), vec![vocab, c])];
    for layer in 0..layers {
        let mut add = |part: &str, shape: &[usize]| {
            tensors.push((format!("rwkv.blocks.{layer}.{part}"), shape.to_vec()));
        };
        let norms: &[&str] = if layer == 0 { &["pre_ln", "ln1", "ln2"] } else { &["ln1", "ln2"] };
        for norm in norms {
            add(&format!("{norm}.weight"), &[c]);
            add(&format!("{norm}.bias"), &[c]);
        }
        add("attention.time_decay", &[a]);
        add("attention.time_first", &[a]);
        for mix in ["time_mix_key", "time_mix_value", "time_mix_receptance"] {
            add(&format!("attention.{mix}"), &[c]);
        }
        for projection in ["key", "value", "receptance"] {
            add(&format!("attention.{projection}.weight"), &[a, c]);
        }
        add("attention.output.weight", &[c, a]);
        for mix in ["time_mix_key", "time_mix_receptance"] {
            add(&format!("feed_forward.{mix}"), &[c]);
        }
        add("feed_forward.key.weight", &[f, c]);
        add("feed_forward.receptance.weight", &[c, c]);
        add("feed_forward.value.weight", &[c, f]);
    }
    tensors.push(("rwkv.ln_out.weight".to_string(), vec![c]));
    tensors.push(("rwkv.ln_out.bias".to_string(), vec![c]));
    tensors.push(("head.weight".to_string(), vec![vocab, c]));
    tensors
}

/// Random values that keep a random RWKV-4 in the range of a trained one: norms near 1, decays over their trained range,
/// mixes between 0 and 1, matrices with deviation 1/sqrt(inputs) so that activations neither die out nor grow.
pub fn rwkv4_distribution(name: &str, shape: &[usize]) -> Distribution {
    let (module, part) = name.rsplit_once('.').unwrap_or(("", name));
    let is_norm = module.ends_with("ln1") || module.ends_with("ln2") || module.ends_with("ln_out");
    match part {
        "bias" => Distribution::Normal { mean: 0.0, deviation: 0.02 },
        "weight" if is_norm || module.ends_with("pre_ln") => {
            Distribution::Normal { mean: 1.0, deviation: 0.02 }
        }
        "time_decay" => Distribution::Uniform { low: -5.0, high: 3.0 },
        "time_first" => Distribution::Uniform { low: -1.7, high: -0.7 },
        _ if part.starts_with("time_mix_") => Distribution::Uniform { low: 0.0, high: 1.0 },
        _ => {
            let inputs = shape.last().copied().unwrap_or(1).max(1);
            Distribution::Normal { mean: 0.0, deviation: 1.0 / (inputs as f32).sqrt() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_namings_lead_to_one() {
        let pairs = [
            ("emb.weight", "rwkv.embeddings.weight"),
            ("blocks.0.ln0.bias", "rwkv.blocks.0.pre_ln.bias"),
            ("blocks.12.ln2.weight", "rwkv.blocks.12.ln2.weight"),
            ("blocks.3.att.time_mix_k", "rwkv.blocks.3.attention.time_mix_key"),
            ("blocks.3.att.time_decay", "rwkv.blocks.3.attention.time_decay"),
            ("blocks.3.ffn.time_mix_r", "rwkv.blocks.3.feed_forward.time_mix_receptance"),
            ("blocks.3.ffn.value.weight", "rwkv.blocks.3.feed_forward.value.weight"),
            ("ln_out.bias", "rwkv.ln_out.bias"),
            ("head.weight", "head.weight"),
        ];
        for (short, long) in pairs {
            assert_eq!(rwkv4_canonical(short), long);
            assert_eq!(rwkv4_canonical(long), long);
        }
    }

    #[test]
    fn strange_names_are_left_alone() {
        for name in ["", "blocks", "blocks.", "blocks.1", "optimizer.state", "rwkv.blocks.x"] {
            assert_eq!(rwkv4_canonical(name), name);
        }
    }

    #[test]
    fn the_smallest_published_model_has_its_published_size() {
        let elements = |config: &Rwkv4Config| -> usize {
            rwkv4_tensors(config).iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
        };
        assert_eq!(elements(&Rwkv4Config::of_size(50277, 768, 12)), 169_342_464);
    }

    #[test]
    fn each_kind_of_tensor_gets_its_own_range() {
        let normal = |mean, deviation| Distribution::Normal { mean, deviation };
        assert_eq!(rwkv4_distribution("rwkv.blocks.0.pre_ln.weight", &[8]), normal(1.0, 0.02));
        assert_eq!(rwkv4_distribution("rwkv.ln_out.bias", &[8]), normal(0.0, 0.02));
        assert_eq!(rwkv4_distribution("rwkv.blocks.0.attention.key.weight", &[8, 64]), normal(0.0, 0.125));
        let decay = rwkv4_distribution("rwkv.blocks.0.attention.time_decay", &[8]);
        assert_eq!(decay, Distribution::Uniform { low: -5.0, high: 3.0 });
    }
}

//! Tensors of RWKV-5.2 checkpoints under the names of the Hugging Face files, and random values for them. Those of RWKV-6
//! are much the same.

use crate::checkpoint::Distribution;
use crate::families::rwkv4::Rwkv4Config;
use crate::families::rwkv4::naming::rwkv4_distribution;
use crate::families::rwkv5::Rwkv5Config;

/// Canonical name and shape of every tensor of an RWKV-5.2 checkpoint.
pub fn rwkv5_tensors(config: &Rwkv5Config) -> Vec<(String, Vec<usize>)> {
    let (c, heads, size) = (config.hidden, config.heads(), config.head_size);
    tensors(config, |add| {
        for mix in ["key", "value", "receptance", "gate"] {
            add(&format!("attention.time_mix_{mix}"), &[c]);
        }
        add("attention.time_decay", &[heads, size]);
        for mix in ["key", "receptance"] {
            add(&format!("feed_forward.time_mix_{mix}"), &[c]);
        }
    })
}

/// What RWKV-5 and -6 have, with the tensors of each layer that `special` adds.
pub(in crate::families) fn tensors(
    config: &Rwkv5Config,
    special: impl Fn(&mut dyn FnMut(&str, &[usize])),
) -> Vec<(String, Vec<usize>)> {
    let Rwkv4Config { vocab, hidden: c, attention_hidden: a, intermediate: f, layers, .. } = config.base;
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
        add("attention.time_faaaa", &[config.heads(), config.head_size]);
        for projection in ["key", "value", "receptance", "gate"] {
            add(&format!("attention.{projection}.weight"), &[a, c]);
        }
        add("attention.output.weight", &[c, a]);
        add("attention.ln_x.weight", &[a]);
        add("attention.ln_x.bias", &[a]);
        add("feed_forward.key.weight", &[f, c]);
        add("feed_forward.receptance.weight", &[c, c]);
        add("feed_forward.value.weight", &[c, f]);
        special(&mut add);
    }
    tensors.push(("rwkv.ln_out.weight".to_string(), vec![c]));
    tensors.push(("rwkv.ln_out.bias".to_string(), vec![c]));
    tensors.push(("head.weight".to_string(), vec![vocab, c]));
    tensors
}

/// Random values in the range of a trained model; see [`rwkv4_distribution`] for what is as in RWKV-4.
pub fn rwkv5_distribution(name: &str, shape: &[usize]) -> Distribution {
    let (module, part) = name.rsplit_once('.').unwrap_or(("", name));
    let thin = |inputs: usize| Distribution::Normal { mean: 0.0, deviation: 0.1 / (inputs as f32).sqrt() };
    match part {
        "weight" if module.ends_with("ln_x") => Distribution::Normal { mean: 1.0, deviation: 0.02 },
        "time_decay" => Distribution::Uniform { low: -6.0, high: 0.0 },
        "time_faaaa" => Distribution::Uniform { low: -0.5, high: 0.5 },
        // Stored with the inputs as the last but one axis.
        "time_maa_w1" | "time_maa_w2" | "time_decay_w1" | "time_decay_w2" => {
            thin(shape.iter().rev().nth(1).copied().unwrap_or(1).max(1))
        }
        _ if part.starts_with("time_maa_") => Distribution::Uniform { low: 0.0, high: 1.0 },
        _ => rwkv4_distribution(name, shape),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_model_has_its_published_size() {
        // RWKV-5-World-1B5, as its repository states.
        let tensors = rwkv5_tensors(&Rwkv5Config::of_size(65536, 2048, 24));
        let elements: usize = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        assert_eq!(elements, 1_577_754_624);
    }

    #[test]
    fn thin_matrices_and_decays_have_their_own_ranges() {
        let thin = rwkv5_distribution("rwkv.blocks.0.attention.time_maa_w2", &[5, 64, 128]);
        assert_eq!(thin, Distribution::Normal { mean: 0.0, deviation: 0.0125 });
        let mix = rwkv5_distribution("rwkv.blocks.0.attention.time_maa_w", &[128]);
        assert_eq!(mix, Distribution::Uniform { low: 0.0, high: 1.0 });
        let decay = rwkv5_distribution("rwkv.blocks.0.attention.time_decay", &[2, 64]);
        assert_eq!(decay, Distribution::Uniform { low: -6.0, high: 0.0 });
    }
}

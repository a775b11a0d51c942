//! Tensors of RWKV-6 checkpoints under the names of the Hugging Face files.

use crate::families::rwkv5::naming::tensors;
use crate::families::rwkv6::Rwkv6Config;

/// What the five mixes of RWKV-6 are for, in the order in which their low-rank matrices are stored.
pub const RWKV6_MIXES: [&str; 5] = ["w", "k", "v", "r", "g"];

/// Canonical name and shape of every tensor of an RWKV-6 checkpoint.
pub fn rwkv6_tensors(config: &Rwkv6Config) -> Vec<(String, Vec<usize>)> {
    let Rwkv6Config { base, mix_rank, decay_rank } = config;
    let (c, a) = (base.hidden, base.attention_hidden);
    tensors(base, |add| {
        add("attention.time_maa_x", &[c]);
        for mix in RWKV6_MIXES {
            add(&format!("attention.time_maa_{mix}"), &[c]);
        }
        add("attention.time_maa_w1", &[c, RWKV6_MIXES.len() * mix_rank]);
        add("attention.time_maa_w2", &[RWKV6_MIXES.len(), *mix_rank, c]);
        add("attention.time_decay", &[a]);
        add("attention.time_decay_w1", &[c, *decay_rank]);
        add("attention.time_decay_w2", &[*decay_rank, a]);
        for mix in ["k", "r"] {
            add(&format!("feed_forward.time_maa_{mix}"), &[c]);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_model_has_its_published_size() {
        // RWKV-6-World-1B6, as its repository states.
        let tensors = rwkv6_tensors(&Rwkv6Config::of_size(65536, 2048, 24));
        let elements: usize = tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        assert_eq!(elements, 1_599_873_024);
    }
}

//! The families of models, one file each, and the list of them.

use crate::checkpoint::gguf::GgufArchitecture;
use crate::family::{FamilyVariant, ModelFamily};

pub mod baichuan;
pub mod bert;
pub mod bloom;
pub mod chatglm;
pub mod chatglm2;
pub mod cohere2;
pub mod deepseek;
pub mod ernie4_5;
pub mod exaone4;
pub mod falcon;
pub mod falcon_h1;
pub mod gemma;
pub mod gemma4;
pub mod glm;
pub mod glm4_moe;
pub mod gpt2;
pub mod gpt_neox;
pub mod gpt_oss;
pub mod gptj;
pub mod granite;
pub mod granite_hybrid;
pub mod internlm2;
pub mod kimi_linear;
pub mod lfm2;
pub mod lfm3;
pub mod llama;
pub mod mamba;
pub mod minimax_m2;
pub mod ministral3;
pub mod mixtral;
pub mod modernbert;
pub mod mpt;
pub mod muse_glimmer;
pub mod nemotron_h;
pub mod nomic_bert;
pub mod olmo2;
pub mod olmo_hybrid;
pub mod opt;
pub mod phi3;
pub mod qwen;
pub mod qwen2;
pub mod qwen3;
pub mod qwen3_next;
pub mod rwkv;
pub mod rwkv4;
pub mod rwkv5;
pub mod rwkv6;
pub mod rwkv7;
pub(crate) mod rwkv_files;
pub mod smollm3;
pub mod stablelm;
pub mod starcoder2;
pub mod t5;

/// Every family: one line for each.
pub const FAMILIES: &[&ModelFamily] = &[
    &rwkv4::FAMILY,
    &rwkv5::FAMILY,
    &rwkv6::FAMILY,
    &rwkv7::FAMILY,
    &llama::FAMILY,
    &lfm2::FAMILY,
    &lfm3::FAMILY,
    &glm4_moe::FAMILY,
    &minimax_m2::FAMILY,
    &qwen3_next::FAMILY,
    &granite_hybrid::FAMILY,
    &nemotron_h::FAMILY,
    &falcon_h1::FAMILY,
    &gemma4::FAMILY,
    &deepseek::FAMILY,
    &kimi_linear::FAMILY,
    &muse_glimmer::FAMILY,
    &mamba::FAMILY,
    &olmo_hybrid::FAMILY,
    &mixtral::FAMILY,
    &qwen::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &gemma::FAMILY,
    &phi3::FAMILY,
    &olmo2::FAMILY,
    &exaone4::FAMILY,
    &smollm3::FAMILY,
    &ernie4_5::FAMILY,
    &ministral3::FAMILY,
    &cohere2::FAMILY,
    &gpt_oss::FAMILY,
    &starcoder2::FAMILY,
    &stablelm::FAMILY,
    &gpt2::FAMILY,
    &gptj::FAMILY,
    &gpt_neox::FAMILY,
    &opt::FAMILY,
    &falcon::FAMILY,
    &bloom::FAMILY,
    &mpt::FAMILY,
    &glm::FAMILY,
    &chatglm2::FAMILY,
    &baichuan::FAMILY,
    &internlm2::FAMILY,
    &bert::FAMILY,
    &modernbert::FAMILY,
    &nomic_bert::FAMILY,
    &t5::FAMILY,
    &granite::FAMILY,
];

/// The model types of all families, in the order of the list.
pub fn variants() -> impl Iterator<Item = &'static FamilyVariant> {
    FAMILIES.iter().flat_map(|family| family.variants)
}

/// The architectures of GGUF files of all families.
pub fn gguf_architectures() -> Vec<&'static GgufArchitecture> {
    FAMILIES.iter().flat_map(|family| family.gguf).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::gguf::GgufVariant;
    use crate::checkpoint::gguf::TensorConversion::Same;
    use std::collections::BTreeSet;

    #[test]
    fn every_name_is_of_one_family() {
        let names = variants().map(|variant| variant.model_type);
        let classes = variants().flat_map(|variant| variant.classes).copied();
        let architectures = gguf_architectures().into_iter().map(|known| known.name);
        for mut list in [names.collect::<Vec<_>>(), classes.collect(), architectures.collect()] {
            let count = list.len();
            list.sort_unstable();
            list.dedup();
            assert_eq!(list.len(), count, "{list:?}");
        }
        let names: BTreeSet<_> = variants().map(|variant| variant.model_type).collect();
        for known in gguf_architectures() {
            assert!(names.contains(known.model_type), "{} of {}", known.model_type, known.name);
        }
    }

    #[test]
    fn every_architecture_has_names() {
        for known in gguf_architectures() {
            let arch = known.name;
            for separate_qkv in [false, true] {
                let names = (known.tensor_names)(GgufVariant { separate_qkv, ..GgufVariant::default() });
                assert!(names.map_name("token_embd.weight").is_some(), "{arch}");
                // Norms stand before a layer's parts, or behind them.
                let norms = ["attn_norm", "post_attention_norm", "attn_output_norm"];
                let stacks = if arch == "t5" { &["enc.", "dec."][..] } else { &[""] };
                let parts = stacks.iter().flat_map(|s| norms.map(|norm| format!("{s}blk.3.{norm}.weight")));
                let mut found = parts.map(|name| names.map_name(&name));
                assert!(found.any(|name| name.is_some()), "{arch}");
            }
        }
    }

    #[test]
    fn names_with_and_without_a_suffix() {
        let map = |arch: &str, name: &str| {
            let known = gguf_architectures().into_iter().find(|known| known.name == arch).unwrap();
            (known.tensor_names)(GgufVariant::default()).map_name(name)
        };
        let find = |arch: &str, name: &str| map(arch, name).unwrap();
        let found = find("rwkv6", "blk.4.time_mix_first.weight");
        assert_eq!((found.name.as_str(), found.change), ("rwkv.blocks.4.attention.time_faaaa", Same));
        let found = find("rwkv6", "blk.4.time_mix_ln.bias");
        assert_eq!((found.name.as_str(), found.layer), ("rwkv.blocks.4.attention.ln_x.bias", 4));
        let found = find("rwkv7", "blk.0.time_mix_w0.weight");
        assert_eq!(found.name, "model.layers.0.attn.w_lora.lora.2.bias");
        let found = find("t5", "dec.blk.2.cross_attn_q.weight");
        assert_eq!(found.name, "decoder.block.2.layer.1.EncDecAttention.q.weight");
        assert!(map("t5", "blk.2.attn_q.weight").is_none());
        let found = find("gpt2", "blk.1.attn_qkv.bias");
        assert_eq!((found.name.as_str(), found.change), ("transformer.h.1.attn.c_attn.bias", Same));
    }
}

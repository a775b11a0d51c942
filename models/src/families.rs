//! The families of models, one file each, and the list of them.

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

//! The list of model families that mlcc can build: one line per `model_type` of config.json.

use crate::config::ConfigFields;
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::families::{
    BaichuanConfig, BloomConfig, ChatGlm2Config, ChatGlmConfig, FalconConfig, GemmaConfig, GlmConfig,
    Gpt2Config, GptJConfig, GptNeoxConfig, GraniteConfig, InternLm2Config, LlamaConfig, MixtralConfig,
    MptConfig, Olmo2Config, OptConfig, Phi3Config, Qwen3Config, QwenConfig, Rwkv4Config, Rwkv5Config,
    Rwkv6Config, Rwkv7Config, StableLmConfig, Starcoder2Config, qwen2,
};

/// A model type and how its configuration is read.
pub struct Entry {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// Names in `architectures` of config.json that mean the same where `model_type` is absent or another.
    pub classes: &'static [&'static str],
    /// For people: `mlcc build --help`, error messages.
    pub about: &'static str,
    config: fn(&ConfigFields) -> Result<Architecture, ConfigError>,
}

/// Reads the configuration of one family.
type Reader = fn(&ConfigFields) -> Result<Architecture, ConfigError>;

const fn family(
    model_type: &'static str,
    classes: &'static [&'static str],
    about: &'static str,
    config: Reader,
) -> Entry {
    Entry { model_type, classes, about, config }
}

pub const REGISTRY: &[Entry] = &[
    family("rwkv", &["RwkvForCausalLM"], "RWKV-4", |f| Rwkv4Config::from_fields(f).map(Architecture::new)),
    family("rwkv5", &["Rwkv5ForCausalLM"], "RWKV-5.2", |f| {
        Rwkv5Config::from_fields(f).map(Architecture::new)
    }),
    family("rwkv6", &["Rwkv6ForCausalLM"], "RWKV-6", |f| Rwkv6Config::from_fields(f).map(Architecture::new)),
    family("rwkv7", &["RWKV7ForCausalLM"], "RWKV-7", |f| Rwkv7Config::from_fields(f).map(Architecture::new)),
    family("llama", &["LlamaForCausalLM", "LLaMAForCausalLM"], "Llama 1, 2, 3; Yi", |f| {
        LlamaConfig::from_fields(f).map(Architecture::new)
    }),
    family("mistral", &["MistralForCausalLM"], "Mistral", |f| LlamaConfig::mistral(f).map(Architecture::new)),
    family("mixtral", &["MixtralForCausalLM"], "Mixtral", |f| {
        MixtralConfig::from_fields(f).map(Architecture::new)
    }),
    family("qwen", &["QWenLMHeadModel"], "Qwen, first generation", |f| {
        QwenConfig::from_fields(f).map(Architecture::new)
    }),
    family("qwen2", &["Qwen2ForCausalLM"], "Qwen 2, 2.5", |f| qwen2::from_fields(f).map(Architecture::new)),
    family("qwen3", &["Qwen3ForCausalLM"], "Qwen 3", |f| Qwen3Config::dense(f).map(Architecture::new)),
    family("qwen3_moe", &["Qwen3MoeForCausalLM"], "Qwen 3 with experts", |f| {
        Qwen3Config::moe(f).map(Architecture::new)
    }),
    family("gemma", &["GemmaForCausalLM"], "Gemma 1", |f| GemmaConfig::gemma1(f).map(Architecture::new)),
    family("gemma2", &["Gemma2ForCausalLM"], "Gemma 2", |f| GemmaConfig::gemma2(f).map(Architecture::new)),
    family("gemma3_text", &["Gemma3ForCausalLM"], "Gemma 3", |f| {
        GemmaConfig::gemma3(f).map(Architecture::new)
    }),
    family("gemma3", &[], "Gemma 3, text only", |f| GemmaConfig::gemma3(f).map(Architecture::new)),
    family("phi3", &["Phi3ForCausalLM"], "Phi 3", |f| Phi3Config::from_fields(f).map(Architecture::new)),
    family("olmo2", &["Olmo2ForCausalLM"], "OLMo 2", |f| Olmo2Config::from_fields(f).map(Architecture::new)),
    family("starcoder2", &["Starcoder2ForCausalLM"], "StarCoder 2", |f| {
        Starcoder2Config::from_fields(f).map(Architecture::new)
    }),
    family("stablelm", &["StableLmForCausalLM"], "StableLM 2", |f| {
        StableLmConfig::from_fields(f).map(Architecture::new)
    }),
    family("gpt2", &["GPT2LMHeadModel"], "GPT-2", |f| Gpt2Config::gpt2(f).map(Architecture::new)),
    family("gpt_bigcode", &["GPTBigCodeForCausalLM"], "StarCoder 1, SantaCoder", |f| {
        Gpt2Config::bigcode(f).map(Architecture::new)
    }),
    family("gptj", &["GPTJForCausalLM"], "GPT-J", |f| GptJConfig::gptj(f).map(Architecture::new)),
    family("moss", &["MossForCausalLM"], "MOSS", |f| GptJConfig::moss(f).map(Architecture::new)),
    family("gpt_neox", &["GPTNeoXForCausalLM"], "GPT-NeoX, Pythia", |f| {
        GptNeoxConfig::from_fields(f).map(Architecture::new)
    }),
    family("opt", &["OPTForCausalLM"], "OPT", |f| OptConfig::from_fields(f).map(Architecture::new)),
    family("falcon", &["FalconForCausalLM", "RWForCausalLM"], "Falcon", |f| {
        FalconConfig::from_fields(f).map(Architecture::new)
    }),
    family("bloom", &["BloomForCausalLM"], "BLOOM", |f| BloomConfig::from_fields(f).map(Architecture::new)),
    family("mpt", &["MptForCausalLM", "MPTForCausalLM"], "MPT", |f| {
        MptConfig::from_fields(f).map(Architecture::new)
    }),
    family("glm", &["GlmForCausalLM"], "GLM-4", |f| GlmConfig::glm(f).map(Architecture::new)),
    family("glm4", &["Glm4ForCausalLM"], "GLM-4-0414", |f| GlmConfig::glm4(f).map(Architecture::new)),
    family(
        "chatglm",
        &["ChatGLMModel", "ChatGLMForConditionalGeneration"],
        "ChatGLM-6B, ChatGLM2, ChatGLM3, GLM-4-9B",
        chatglm,
    ),
    family("baichuan", &["BaiChuanForCausalLM", "BaichuanForCausalLM"], "Baichuan 1, 2", |f| {
        BaichuanConfig::from_fields(f).map(Architecture::new)
    }),
    family("internlm", &["InternLMForCausalLM"], "InternLM 1", |f| {
        LlamaConfig::internlm(f).map(Architecture::new)
    }),
    family("internlm2", &["InternLM2ForCausalLM"], "InternLM 2", |f| {
        InternLm2Config::from_fields(f).map(Architecture::new)
    }),
    family("granite", &["GraniteForCausalLM"], "Granite 3", |f| {
        GraniteConfig::from_fields(f).map(Architecture::new)
    }),
];

/// Two architectures have one name: version 1 has positions of two dimensions.
fn chatglm(fields: &ConfigFields) -> Result<Architecture, ConfigError> {
    match fields.get("position_encoding_2d").or(fields.get("inner_hidden_size")) {
        Some(_) => ChatGlmConfig::from_fields(fields).map(Architecture::new),
        None => ChatGlm2Config::from_fields(fields).map(Architecture::new),
    }
}

/// The model type and the configured model: by `model_type`, else by the class in `architectures`.
pub(crate) fn architecture(fields: &ConfigFields) -> Result<(String, Architecture), ConfigError> {
    let (model_type, entry) = entry(fields)?;
    Ok((model_type, (entry.config)(fields)?))
}

/// The model type as the configuration calls it, and the family.
pub(crate) fn entry(fields: &ConfigFields) -> Result<(String, &'static Entry), ConfigError> {
    let class = class_name(fields);
    let by_class = REGISTRY.iter().find(|e| class.is_some_and(|c| e.classes.contains(&c)));
    let model_type = match (fields.get("model_type"), by_class) {
        (None, Some(entry)) => entry.model_type.to_string(),
        _ => fields.string("model_type")?,
    };
    refuse_other_inputs(fields)?;
    let by_type = REGISTRY.iter().find(|e| e.model_type == model_type);
    match by_type.or(by_class) {
        Some(entry) => Ok((model_type, entry)),
        None => {
            let file = fields.origin.clone();
            Err(ConfigError::UnknownModelType { file, found: model_type, supported: supported() })
        }
    }
}

/// Models that also take images or sounds have a configuration for that part.
fn refuse_other_inputs(fields: &ConfigFields) -> Result<(), ConfigError> {
    let parts =
        ["vision_config", "vision_tower", "mm_vision_tower", "visual", "audio_config", "img_processor"];
    match parts.iter().find(|part| fields.get(part).is_some()) {
        None => Ok(()),
        Some(part) => Err(ConfigError::NotSupportedYet {
            file: fields.origin.clone(),
            what: format!("a model with image or audio input (`{part}`)"),
            supported: "models of text only".to_string(),
        }),
    }
}

/// The first name in `architectures`.
fn class_name(fields: &ConfigFields) -> Option<&str> {
    fields.get("architectures")?.as_array()?.first()?.as_str()
}

/// All supported model types, for messages.
pub fn supported() -> String {
    let names: Vec<String> = REGISTRY.iter().map(|e| format!("{} ({})", e.model_type, e.about)).collect();
    names.join(", ")
}

//! The list of model families that mlcc can build: one line per `model_type` of config.json.

use crate::config::sizes::HIDDEN;
use crate::config::{ConfigFields, published};
use crate::definition::Architecture;
use crate::error::ConfigError;
use crate::families::{
    BaichuanConfig, BertConfig, BloomConfig, ChatGlm2Config, ChatGlmConfig, Cohere2Config, DeepSeekConfig,
    Exaone4Config, FalconConfig, FalconH1Config, Gemma4Config, GemmaConfig, Glm4MoeConfig, GlmConfig,
    Gpt2Config, GptJConfig, GptNeoxConfig, GptOssConfig, GraniteConfig, GraniteHybridConfig, InternLm2Config,
    KimiLinearConfig, Lfm2Config, Lfm3Config, LlamaConfig, MambaConfig, MiniMaxM2Config, Ministral3Config,
    MixtralConfig, ModernBertConfig, MptConfig, MuseGlimmerConfig, NemotronHConfig, NomicBertConfig,
    Olmo2Config, OlmoHybridConfig, OptConfig, Phi3Config, Qwen3Config, Qwen3NextConfig, QwenConfig,
    Rwkv4Config, Rwkv5Config, Rwkv6Config, Rwkv7Config, StableLmConfig, Starcoder2Config, T5Config, ernie4_5,
    qwen2, smollm3,
};
use crate::pooling_head::{PoolingHead, PoolingMode, PoolingOutput, PoolingStep};
use mlcc_files::did_you_mean;
use serde_json::Value;

/// A model type and how its configuration is read.
pub struct RegistryEntry {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// Names in `architectures` of config.json that mean the same where `model_type` is absent or another.
    pub classes: &'static [&'static str],
    /// For people: `mlcc build --help`, error messages.
    pub about: &'static str,
    config: fn(&ConfigFields) -> Result<Architecture, ConfigError>,
}

/// Reads the configuration of one family.
type ConfigReader = fn(&ConfigFields) -> Result<Architecture, ConfigError>;

const fn registry_entry(
    model_type: &'static str,
    classes: &'static [&'static str],
    about: &'static str,
    config: ConfigReader,
) -> RegistryEntry {
    RegistryEntry { model_type, classes, about, config }
}

pub const REGISTRY: &[RegistryEntry] = &[
    registry_entry("rwkv", &["RwkvForCausalLM"], "RWKV-4", |f| {
        Rwkv4Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("rwkv5", &["Rwkv5ForCausalLM"], "RWKV-5.2", |f| {
        Rwkv5Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("rwkv6", &["Rwkv6ForCausalLM"], "RWKV-6", |f| {
        Rwkv6Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("rwkv7", &["RWKV7ForCausalLM"], "RWKV-7", |f| {
        Rwkv7Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("llama", &["LlamaForCausalLM", "LLaMAForCausalLM"], "Llama 1, 2, 3; Yi", |f| {
        LlamaConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("mistral", &["MistralForCausalLM"], "Mistral", |f| {
        LlamaConfig::mistral(f).map(Architecture::new)
    }),
    registry_entry("lfm2", &["Lfm2ForCausalLM"], "LFM2", |f| Lfm2Config::dense(f).map(Architecture::new)),
    registry_entry("lfm2_moe", &["Lfm2MoeForCausalLM"], "LFM2 with experts", |f| {
        Lfm2Config::moe(f).map(Architecture::new)
    }),
    registry_entry("lfm3", &["Lfm3ForCausalLM"], "LFM3", |f| {
        Lfm3Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("glm4_moe", &["Glm4MoeForCausalLM"], "GLM-4.5, 4.6", |f| {
        Glm4MoeConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("minimax_m2", &["MiniMaxM2ForCausalLM"], "MiniMax-M2", |f| {
        MiniMaxM2Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("qwen3_next", &["Qwen3NextForCausalLM"], "Qwen3-Next", |f| {
        Qwen3NextConfig::next(f).map(Architecture::new)
    }),
    registry_entry("qwen3_5", &["Qwen3_5ForConditionalGeneration"], "Qwen 3.5, text only", |f| {
        Qwen3NextConfig::dense(f).map(Architecture::new)
    }),
    registry_entry("qwen3_5_text", &["Qwen3_5ForCausalLM"], "Qwen 3.5", |f| {
        Qwen3NextConfig::dense(f).map(Architecture::new)
    }),
    registry_entry(
        "qwen3_5_moe",
        &["Qwen3_5MoeForConditionalGeneration"],
        "Qwen 3.5 with experts, text only",
        |f| Qwen3NextConfig::moe(f).map(Architecture::new),
    ),
    registry_entry("qwen3_5_moe_text", &["Qwen3_5MoeForCausalLM"], "Qwen 3.5 with experts", |f| {
        Qwen3NextConfig::moe(f).map(Architecture::new)
    }),
    registry_entry("granitemoehybrid", &["GraniteMoeHybridForCausalLM"], "Granite 4", |f| {
        GraniteHybridConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("nemotron_h", &["NemotronHForCausalLM"], "Nemotron-H, Nemotron 3", |f| {
        NemotronHConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("falcon_h1", &["FalconH1ForCausalLM"], "Falcon-H1", |f| {
        FalconH1Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("gemma4_text", &["Gemma4ForCausalLM"], "Gemma 4", |f| {
        Gemma4Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("gemma4", &["Gemma4ForConditionalGeneration"], "Gemma 4, text only", |f| {
        Gemma4Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("deepseek_v2", &["DeepseekV2ForCausalLM"], "DeepSeek V2 Lite", |f| {
        DeepSeekConfig::v2(f).map(Architecture::new)
    }),
    registry_entry("deepseek_v3", &["DeepseekV3ForCausalLM"], "DeepSeek V3, R1", |f| {
        DeepSeekConfig::v3(f).map(Architecture::new)
    }),
    registry_entry("kimi_k2", &[], "Kimi K2", |f| DeepSeekConfig::v3(f).map(Architecture::new)),
    registry_entry("glm4_moe_lite", &["Glm4MoeLiteForCausalLM"], "GLM-4.7-Flash", |f| {
        DeepSeekConfig::v3(f).map(Architecture::new)
    }),
    registry_entry("kimi_linear", &["KimiLinearForCausalLM"], "Kimi Linear", |f| {
        KimiLinearConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry(
        "muse_glimmer",
        &["MuseGlimmerForConditionalGeneration"],
        "Muse Glimmer, text only",
        |f| MuseGlimmerConfig::from_fields(f).map(Architecture::new),
    ),
    registry_entry("muse_glimmer_text", &[], "Muse Glimmer", |f| {
        MuseGlimmerConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("mamba2", &["Mamba2ForCausalLM"], "Mamba 2", |f| {
        MambaConfig::from_mamba2_fields(f).map(Architecture::new)
    }),
    registry_entry("mamba", &["MambaForCausalLM"], "Mamba", |f| {
        MambaConfig::from_mamba_fields(f).map(Architecture::new)
    }),
    registry_entry("olmo_hybrid", &["OlmoHybridForCausalLM"], "OLMo Hybrid", |f| {
        OlmoHybridConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("mistral4", &["Mistral4ForCausalLM"], "Mistral Small 4, text only", |f| {
        DeepSeekConfig::mistral4(f).map(Architecture::new)
    }),
    registry_entry("mixtral", &["MixtralForCausalLM"], "Mixtral", |f| {
        MixtralConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("qwen", &["QWenLMHeadModel"], "Qwen, first generation", |f| {
        QwenConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("qwen2", &["Qwen2ForCausalLM"], "Qwen 2, 2.5", |f| {
        qwen2::from_fields(f).map(Architecture::new)
    }),
    registry_entry("qwen3", &["Qwen3ForCausalLM"], "Qwen 3", |f| {
        Qwen3Config::dense(f).map(Architecture::new)
    }),
    registry_entry("qwen3_moe", &["Qwen3MoeForCausalLM"], "Qwen 3 with experts", |f| {
        Qwen3Config::moe(f).map(Architecture::new)
    }),
    registry_entry("gemma", &["GemmaForCausalLM"], "Gemma 1", |f| {
        GemmaConfig::gemma1(f).map(Architecture::new)
    }),
    registry_entry("gemma2", &["Gemma2ForCausalLM"], "Gemma 2", |f| {
        GemmaConfig::gemma2(f).map(Architecture::new)
    }),
    registry_entry("gemma3_text", &["Gemma3ForCausalLM"], "Gemma 3", |f| {
        GemmaConfig::gemma3(f).map(Architecture::new)
    }),
    registry_entry("gemma3", &["Gemma3ForConditionalGeneration"], "Gemma 3, text only", |f| {
        GemmaConfig::gemma3(f).map(Architecture::new)
    }),
    registry_entry("phi3", &["Phi3ForCausalLM"], "Phi 3", |f| {
        Phi3Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("olmo2", &["Olmo2ForCausalLM"], "OLMo 2", |f| {
        Olmo2Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("olmo3", &["Olmo3ForCausalLM"], "OLMo 3", |f| {
        Olmo2Config::olmo3(f).map(Architecture::new)
    }),
    registry_entry("exaone4", &["Exaone4ForCausalLM"], "EXAONE 4", |f| {
        Exaone4Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("smollm3", &["SmolLM3ForCausalLM"], "SmolLM3", |f| {
        smollm3::from_fields(f).map(Architecture::new)
    }),
    registry_entry("ernie4_5", &["Ernie4_5ForCausalLM"], "ERNIE 4.5", |f| {
        ernie4_5::from_fields(f).map(Architecture::new)
    }),
    registry_entry("ministral3", &["Ministral3ForCausalLM"], "Ministral 3", |f| {
        Ministral3Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("cohere2", &["Cohere2ForCausalLM"], "Command R7B, Command A", |f| {
        Cohere2Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("gpt_oss", &["GptOssForCausalLM"], "gpt-oss", |f| {
        GptOssConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("starcoder2", &["Starcoder2ForCausalLM"], "StarCoder 2", |f| {
        Starcoder2Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("stablelm", &["StableLmForCausalLM"], "StableLM 2", |f| {
        StableLmConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("gpt2", &["GPT2LMHeadModel"], "GPT-2", |f| Gpt2Config::gpt2(f).map(Architecture::new)),
    registry_entry("gpt_bigcode", &["GPTBigCodeForCausalLM"], "StarCoder 1, SantaCoder", |f| {
        Gpt2Config::bigcode(f).map(Architecture::new)
    }),
    registry_entry("gptj", &["GPTJForCausalLM"], "GPT-J", |f| GptJConfig::gptj(f).map(Architecture::new)),
    registry_entry("moss", &["MossForCausalLM"], "MOSS", |f| GptJConfig::moss(f).map(Architecture::new)),
    registry_entry("gpt_neox", &["GPTNeoXForCausalLM"], "GPT-NeoX, Pythia", |f| {
        GptNeoxConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("opt", &["OPTForCausalLM"], "OPT", |f| OptConfig::from_fields(f).map(Architecture::new)),
    registry_entry("falcon", &["FalconForCausalLM", "RWForCausalLM"], "Falcon", |f| {
        FalconConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("bloom", &["BloomForCausalLM"], "BLOOM", |f| {
        BloomConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("mpt", &["MptForCausalLM", "MPTForCausalLM"], "MPT", |f| {
        MptConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("glm", &["GlmForCausalLM"], "GLM-4", |f| GlmConfig::glm(f).map(Architecture::new)),
    registry_entry("glm4", &["Glm4ForCausalLM"], "GLM-4-0414", |f| GlmConfig::glm4(f).map(Architecture::new)),
    registry_entry(
        "chatglm",
        &["ChatGLMModel", "ChatGLMForConditionalGeneration"],
        "ChatGLM-6B, ChatGLM2, ChatGLM3, GLM-4-9B",
        chatglm,
    ),
    registry_entry("baichuan", &["BaiChuanForCausalLM", "BaichuanForCausalLM"], "Baichuan 1, 2", |f| {
        BaichuanConfig::from_fields(f).map(Architecture::new)
    }),
    registry_entry("internlm", &["InternLMForCausalLM"], "InternLM 1", |f| {
        LlamaConfig::internlm(f).map(Architecture::new)
    }),
    registry_entry("internlm2", &["InternLM2ForCausalLM"], "InternLM 2", |f| {
        InternLm2Config::from_fields(f).map(Architecture::new)
    }),
    registry_entry("bert", &["BertModel", "BertForMaskedLM", "BertForSequenceClassification"], "BERT", |f| {
        BertConfig::bert(f).map(Architecture::new)
    }),
    registry_entry(
        "xlm-roberta",
        &["XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"],
        "XLM-RoBERTa",
        |f| BertConfig::roberta(f).map(Architecture::new),
    ),
    registry_entry("roberta", &["RobertaModel", "RobertaForSequenceClassification"], "RoBERTa", |f| {
        BertConfig::roberta(f).map(Architecture::new)
    }),
    registry_entry(
        "modernbert",
        &["ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"],
        "ModernBERT",
        |f| ModernBertConfig::from_fields(f).map(Architecture::new),
    ),
    registry_entry(
        "nomic_bert",
        &[
            "NomicBertModel",
            "NomicBertForPreTraining",
            "NomicBertForMaskedLM",
            "NomicBertForSequenceClassification",
        ],
        "Nomic BERT (nomic-embed-text)",
        |f| NomicBertConfig::from_fields(f).map(Architecture::new),
    ),
    registry_entry("t5", &["T5ForConditionalGeneration", "T5WithLMHeadModel"], "T5, FLAN-T5", |f| {
        T5Config::t5(f).map(Architecture::new)
    }),
    registry_entry("mt5", &["MT5ForConditionalGeneration"], "mT5", |f| {
        T5Config::mt5(f).map(Architecture::new)
    }),
    registry_entry("umt5", &["UMT5ForConditionalGeneration"], "UMT5", |f| {
        T5Config::umt5(f).map(Architecture::new)
    }),
    registry_entry("granite", &["GraniteForCausalLM"], "Granite 3", |f| {
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

/// The field with the configuration of the text model inside of a model that also takes images or sounds.
pub(crate) const TEXT_MODEL: &str = "text_config";

/// The model type and the configured model: by `model_type`, else by the class in `architectures`.
pub(crate) fn read_architecture(fields: &ConfigFields) -> Result<(String, Architecture), ConfigError> {
    let (model_type, entry) = find_entry(fields)?;
    let text = nested_text_config(fields)?;
    let class = match &text {
        Some(text) => text.get("model_type").and_then(Value::as_str).map(str::to_string),
        None => Some(entry.model_type.to_string()),
    };
    // The text model inside of a model is a class of its own.
    let class = class.unwrap_or_else(|| format!("{}_text", entry.model_type.trim_end_matches("_text")));
    let read = text.as_ref().unwrap_or(fields);
    published::reject_unbuilt_values(&class, read)?;
    let architecture = (entry.config)(&published::with_defaults(&class, read))?;
    let head = read_pooling_head(fields, &architecture)?;
    Ok((model_type, architecture.with_pooling_head(head)))
}

/// The way of pooling, as GGUF files say it, by its name.
pub(crate) const POOLING: &str = "gguf.pooling";
/// The widths of dense layers after it.
pub(crate) const DENSE: &str = "gguf.dense";

/// What is made of texts, where the configuration says it and the architecture has not read it itself, as encoders read their
/// classifiers.
fn read_pooling_head(
    fields: &ConfigFields,
    architecture: &Architecture,
) -> Result<Option<PoolingHead>, ConfigError> {
    let classifies = architecture.pooling_head().is_some_and(|head| head.output == PoolingOutput::Scores);
    if !architecture.supports_pooling() || classifies {
        return Ok(None);
    }
    if let (Some(labels), None) = (fields.label_count()?, architecture.pooling_head()) {
        return Ok(Some(PoolingHead::classification(labels)));
    }
    let Some(found) = fields.get(POOLING) else { return Ok(None) };
    let known = found.as_str().and_then(PoolingMode::from_name);
    let mut head = PoolingHead::embedding(
        known.ok_or_else(|| fields.invalid_value(POOLING, "cls, mean or lasttoken", found))?,
    );
    let widths = if fields.get(DENSE).is_some() { fields.numbers(DENSE)? } else { Vec::new() };
    let dense = widths.into_iter().zip(2..).map(|(out, number): (f64, usize)| PoolingStep::Linear {
        name: format!("{number}_Dense.linear"),
        out: out as usize,
        bias: false,
    });
    head.steps.splice(..0, dense);
    Ok(Some(head))
}

/// The configuration of the text model inside, if the file has no sizes outside of it. Whether the head is the embedding, and
/// which tokens stand for images, may stand outside.
pub(crate) fn nested_text_config(fields: &ConfigFields) -> Result<Option<ConfigFields>, ConfigError> {
    if fields.get(fields.first_present(&HIDDEN)).is_some() {
        return Ok(None);
    }
    let Some(mut text) = fields.nested_object(TEXT_MODEL)? else { return Ok(None) };
    for field in ["tie_word_embeddings", "image_token_id", "video_token_id"] {
        if let (None, Some(outside)) = (text.get(field), fields.get(field)) {
            text.raw.insert(field.to_string(), outside.clone());
        }
    }
    Ok(Some(text))
}

/// The model type as the configuration calls it, and the family.
pub(crate) fn find_entry(fields: &ConfigFields) -> Result<(String, &'static RegistryEntry), ConfigError> {
    let class = class_name(fields);
    let by_class = REGISTRY.iter().find(|e| class.is_some_and(|c| e.classes.contains(&c)));
    let model_type = match (fields.get("model_type"), by_class) {
        (None, Some(entry)) => entry.model_type.to_string(),
        _ => fields.string("model_type")?,
    };
    refuse_not_planned(fields, &model_type)?;
    let of_type = |model_type: &str| REGISTRY.iter().find(|e| e.model_type == model_type);
    if let Some(text) = nested_text_config(fields)? {
        // What stands around the text model may have a name of its own.
        return match of_type(&model_type).or(by_class) {
            Some(entry) => Ok((model_type, entry)),
            None => find_entry(&text),
        };
    }
    refuse_other_inputs(fields)?;
    match of_type(&model_type).or(by_class) {
        Some(entry) => Ok((model_type, entry)),
        None => {
            let file = fields.origin.clone();
            let near = did_you_mean(&model_type, REGISTRY.iter().map(|entry| entry.model_type));
            Err(ConfigError::UnknownModelType { file, found: model_type, near })
        }
    }
}

/// Fields of configurations that only parts of a model have which are not read, and what those are.
const NOT_PLANNED: [(&str, &str); 4] = [
    ("index_topk", "sparse attention with an indexer"),
    ("hc_mult", "hyper-connections"),
    ("hyper_connection_size", "hyper-connections"),
    ("ngram_size", "a table of n-grams"),
];

/// Parts of models that are published as models of their own, by the end of their type.
const PARTS: [(&str, &str); 5] = [
    ("_vision", "a tower for images"),
    ("_vision_model", "a tower for images"),
    ("_audio", "a tower for sounds"),
    ("_assistant", "a draft head"),
    ("_mtp", "a draft head"),
];

/// Models with parts that are not going to be read soon, by name: what they lack would not be seen in a list of families.
fn refuse_not_planned(fields: &ConfigFields, model_type: &str) -> Result<(), ConfigError> {
    let by_field = NOT_PLANNED.iter().find(|(field, _)| fields.get(field).is_some());
    let by_field = by_field.map(|(field, what)| format!("{what} (`{field}`)"));
    let by_type =
        PARTS.iter().find(|(end, _)| model_type.ends_with(end)).map(|(_, what)| (*what).to_string());
    match by_field.or(by_type) {
        None => Ok(()),
        Some(what) => Err(ConfigError::NotSupportedYet {
            file: fields.origin.clone(),
            what: format!("{what}, as model_type `{model_type}` has it,"),
            supported: "models of text without sparse indexers, hyper-connections and tables of n-grams"
                .to_string(),
        }),
    }
}

/// Models that also take images or sounds have a configuration for that part; what is read of them is a text model that
/// has a configuration of its own ([`nested_text_config`]).
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

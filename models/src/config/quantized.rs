//! Checkpoints whose weights another program has quantized: named before their tensors are looked at, which have other
//! names, types and shapes than the model's.

use super::fields::ConfigFields;
use crate::error::ConfigError;
use serde_json::Value;

/// Fields of config.json that say how the weights beside it were quantized.
const FIELDS: [&str; 2] = ["quantization_config", "compression_config"];

/// `quant_method` of Hugging Face transformers, and who makes such files. `bitsandbytes` is recognized by its flags as well.
const METHODS: [(&str, &str); 19] = [
    ("awq", "AWQ"),
    ("gptq", "GPTQ"),
    ("autoround", "AutoRound"),
    ("auto-round", "AutoRound"),
    ("intel/auto-round", "AutoRound"),
    ("aqlm", "AQLM"),
    ("bitnet", "BitNet"),
    ("bitsandbytes", "bitsandbytes"),
    ("compressed-tensors", "compressed-tensors (llm-compressor)"),
    ("eetq", "EETQ"),
    ("exl2", "EXL2 (ExLlamaV2)"),
    ("fbgemm_fp8", "FP8 (FBGEMM)"),
    ("fp8", "FP8"),
    ("higgs", "HIGGS"),
    ("hqq", "HQQ"),
    ("modelopt", "NVIDIA ModelOpt"),
    ("mxfp4", "MXFP4"),
    ("quanto", "Quanto"),
    ("torchao", "torchao"),
];

/// Refuses a configuration that belongs to quantized weights.
pub(crate) fn refuse(fields: &ConfigFields) -> Result<(), ConfigError> {
    let text = match fields.get("text_config") {
        Some(Value::Object(_)) => fields.object("text_config")?,
        _ => None,
    };
    for fields in [Some(fields), text.as_ref()].into_iter().flatten() {
        if let Some((field, found)) = FIELDS.iter().find_map(|&field| Some((field, fields.get(field)?))) {
            let (file, field) = (fields.origin.clone(), field.to_string());
            return Err(ConfigError::Quantized { file, field, what: what(found) });
        }
    }
    Ok(())
}

/// "with AWQ, 4 bits", or what else the entry is.
fn what(entry: &Value) -> String {
    let Value::Object(entry) = entry else { return format!("(the field is {}, not an object)", kind(entry)) };
    let bits = ["bits", "w_bit", "nbits", "weight_bits"].iter().find_map(|field| entry.get(*field)?.as_u64());
    let flag = |field: &str| entry.get(field).and_then(Value::as_bool) == Some(true);
    let bits = bits.or(flag("load_in_4bit").then_some(4)).or(flag("load_in_8bit").then_some(8));
    let bits = bits.map_or(String::new(), |bits| format!(", {bits} bits"));
    let method = match entry.get("quant_method").filter(|method| !method.is_null()) {
        Some(Value::String(method)) => method.as_str(),
        // Older files of two kinds have no name, but fields of their own.
        None if entry.contains_key("load_in_4bit") || entry.contains_key("load_in_8bit") => "bitsandbytes",
        None if entry.contains_key("config_groups") => "compressed-tensors",
        None => return format!("(the field has no `quant_method` that would say how){bits}"),
        Some(other) => return format!("(`quant_method` is {}, not a string){bits}", kind(other)),
    };
    let known = METHODS.iter().find(|(name, _)| name.eq_ignore_ascii_case(method));
    match known {
        Some((_, name)) => format!("with {name}{bits}"),
        None => {
            let name: String = method.chars().filter(|c| !c.is_control()).take(40).collect();
            format!("with `{name}`, a method that is not known here{bits}")
        }
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

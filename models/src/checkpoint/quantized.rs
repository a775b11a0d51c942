//! Checkpoints whose weights another program has quantized: what config.json says of them. Methods whose layout is not read are
//! refused by name before the tensors are looked at, which have other names, types and shapes than the model's.

use super::packed::{QuantMethod, Quantization};
use crate::config::ConfigFields;
use crate::error::ConfigError;
use serde_json::{Map, Value};
use std::path::Path;

/// Fields of config.json that say how the weights beside it were quantized.
const FIELDS: [&str; 2] = ["quantization_config", "compression_config"];

/// Files beside the weights that say so in the field's place, and the method if they do not name it.
const FILES: [(&str, &str); 3] =
    [("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt")];

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

/// What is read, for messages.
pub const READ: &str = "AWQ (GEMM, 4 bits), GPTQ (2, 4 and 8 bits), FP8, MXFP4, compressed-tensors (pack-quantized, \
    int-quantized, float-quantized, naive-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized, mxfp8-quantized), NVIDIA \
    ModelOpt (FP8, NVFP4) and bitsandbytes";

/// Formats of compressed-tensors that are read. What a module has is seen by its tensors.
const FORMATS: [&str; 9] = [
    "dense",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
];

/// The quantization of the weights that the configuration is about; `None` where they are floats.
pub fn read_quantization(fields: &ConfigFields) -> Result<Option<Quantization>, ConfigError> {
    let text = match fields.get("text_config") {
        Some(Value::Object(_)) => fields.nested_object("text_config")?,
        _ => None,
    };
    for fields in [Some(fields), text.as_ref()].into_iter().flatten() {
        if let Some((field, found)) = FIELDS.iter().find_map(|&field| Some((field, fields.get(field)?))) {
            return parse_entry(found).map(Some).map_err(|what| {
                let (file, field) = (fields.origin.clone(), field.to_string());
                ConfigError::Quantized { file, field, what, read: READ }
            });
        }
    }
    Ok(None)
}

/// The same by a file of its own beside the weights, as older programs write it.
pub(crate) fn read_quantization_file(dir: &Path) -> Result<Option<Quantization>, ConfigError> {
    for (name, method) in FILES {
        let path = dir.join(name);
        if !mlcc_files::is_file(&path)? {
            continue;
        }
        let fields = ConfigFields::read(&path)?;
        let field = "quant_method";
        let mut entry = fields.nested_object("quantization")?.unwrap_or(fields.clone()).raw;
        entry.entry(field).or_insert_with(|| Value::from(method));
        return self::parse_entry(&Value::Object(entry)).map(Some).map_err(|what| ConfigError::Quantized {
            file: fields.origin,
            field: field.into(),
            what,
            read: READ,
        });
    }
    Ok(None)
}

/// What an entry says, or what is wrong with it: "with AWQ, 3 bits".
fn parse_entry(entry: &Value) -> Result<Quantization, String> {
    let Value::Object(entry) = entry else {
        return Err(format!("(the field is {}, not an object)", value_kind(entry)));
    };
    let method = method_name(entry)?;
    let known = METHODS.iter().find(|(name, _)| method.eq_ignore_ascii_case(name));
    let Some(&(method, name)) = known else {
        // Names are words, what else is in a file does not go to the terminal.
        let plain: String = method.chars().filter(|c| !c.is_control()).take(40).collect();
        return Err(format!("with `{plain}`, a method that is not known"));
    };
    let bits = bit_width(entry);
    let refused = |why: &str| {
        let bits = bits.map_or(String::new(), |bits| format!(", {bits} bits"));
        Err(format!("with {name}{bits}{why}"))
    };
    let text = |field: &str| entry.get(field).and_then(Value::as_str).map(str::to_ascii_lowercase);
    let blocks = |blocks| Quantization { method: QuantMethod::Fp8, blocks, bits, zero_points: None };
    let whole_rows = || vec![[1, group_size(entry, &["group_size", "q_group_size"])]];
    match method {
        "awq" => match (text("version"), bits) {
            (Some(version), _) if version != "gemm" => refused(&format!(" in the layout `{version}`")),
            (_, Some(bits)) if bits != 4 => refused(""),
            _ => Ok(Quantization { method: QuantMethod::Awq, ..blocks(whole_rows()) }),
        },
        "gptq" => {
            let stored_minus_one = match text("checkpoint_format").as_deref() {
                None | Some("gptq") => true,
                Some("gptq_v2") => false,
                Some(other) => return refused(&format!(" in the layout `{other}`")),
            };
            match bits {
                Some(2 | 4 | 8) | None => Ok(Quantization {
                    method: QuantMethod::Gptq { stored_minus_one },
                    ..blocks(whole_rows())
                }),
                Some(_) => refused(""),
            }
        }
        "mxfp4" => Ok(Quantization { method: QuantMethod::Mxfp4, ..blocks(Vec::new()) }),
        "fp8" | "fbgemm_fp8" => {
            Ok(blocks(entry.get("weight_block_size").and_then(block_shape).into_iter().collect()))
        }
        "bitsandbytes" => Ok(Quantization { method: QuantMethod::BitsAndBytes, ..blocks(Vec::new()) }),
        "modelopt" => match text("quant_algo").as_deref() {
            Some("fp8" | "nvfp4") => {
                Ok(Quantization { method: QuantMethod::ModelOpt, ..blocks(vec![[1, 16]]) })
            }
            Some(algorithm) => refused(&format!(" in the layout `{algorithm}`")),
            None => refused(" and no `quant_algo` that says how"),
        },
        "compressed-tensors" => match parse_compressed_tensors(entry) {
            Ok(quantization) => Ok(quantization),
            Err(why) => refused(&why),
        },
        _ => refused(""),
    }
}

/// The name of the method; older files of some kinds have no name, but fields of their own.
fn method_name(entry: &Map<String, Value>) -> Result<&str, String> {
    match entry.get("quant_method").filter(|method| !method.is_null()) {
        Some(Value::String(method)) => Ok(method),
        None if entry.contains_key("load_in_4bit") || entry.contains_key("load_in_8bit") => {
            Ok("bitsandbytes")
        }
        None if entry.contains_key("config_groups") => Ok("compressed-tensors"),
        None => Err("(there is no `quant_method` that would say how)".to_string()),
        Some(other) => Err(format!("(`quant_method` is {}, not a string)", value_kind(other))),
    }
}

fn bit_width(entry: &Map<String, Value>) -> Option<usize> {
    let fields = ["bits", "w_bit", "nbits", "weight_bits"];
    let bits = fields.iter().find_map(|field| entry.get(*field)?.as_u64());
    let flag = |field: &str| entry.get(field).and_then(Value::as_bool) == Some(true);
    let bits = bits.or(flag("load_in_4bit").then_some(4)).or(flag("load_in_8bit").then_some(8));
    bits.and_then(|bits| usize::try_from(bits).ok())
}

/// A size of groups; as long as any row where it is absent or -1.
fn group_size(entry: &Map<String, Value>, fields: &[&str]) -> usize {
    let stated = fields.iter().find_map(|field| entry.get(*field)?.as_u64());
    stated.and_then(|size| usize::try_from(size).ok()).filter(|size| *size > 0).unwrap_or(usize::MAX)
}

/// `[rows, columns]` of blocks.
fn block_shape(value: &Value) -> Option<[usize; 2]> {
    let sizes: Option<Vec<usize>> = value
        .as_array()?
        .iter()
        .map(|size| usize::try_from(size.as_u64()?).ok().filter(|s| *s > 0))
        .collect();
    sizes?.try_into().ok()
}

/// Groups of modules, each with a format of its own. The error is why it is not read.
fn parse_compressed_tensors(entry: &Map<String, Value>) -> Result<Quantization, String> {
    let group_list: Vec<&Map<String, Value>> = match entry.get("config_groups") {
        Some(Value::Object(groups)) => groups.values().filter_map(Value::as_object).collect(),
        _ => Vec::new(),
    };
    let formats = std::iter::once(entry).chain(group_list.iter().copied());
    for format in formats.filter_map(|of| of.get("format")?.as_str()) {
        if !FORMATS.contains(&format) {
            return Err(format!(" in the layout `{}`", format.escape_debug()));
        }
    }
    let sparsity = entry.get("sparsity_config").and_then(Value::as_object);
    let sparse = sparsity.and_then(|config| config.get("format")?.as_str());
    if let Some(format) = sparse.filter(|format| *format != "dense") {
        return Err(format!(" in the layout `{}`", format.escape_debug()));
    }
    let transforms =
        entry.get("transform_config").and_then(|config| config.get("config_groups")?.as_object());
    if transforms.is_some_and(|groups| !groups.is_empty()) {
        return Err(" and transforms of activations (`transform_config`)".into());
    }
    let weights: Vec<&Map<String, Value>> =
        group_list.iter().filter_map(|group| group.get("weights")?.as_object()).collect();
    let block = |weights: &&Map<String, Value>| match weights.get("block_structure").and_then(block_shape) {
        Some(block) => Some(block),
        None => weights.get("group_size")?.as_u64().map(|size| [1, size as usize]).filter(|b| b[1] > 0),
    };
    let asymmetric =
        |weights: &&Map<String, Value>| weights.get("symmetric").and_then(Value::as_bool) == Some(false);
    Ok(Quantization {
        method: QuantMethod::CompressedTensors,
        blocks: weights.iter().filter_map(block).collect(),
        bits: None,
        zero_points: (!weights.is_empty() && weights.iter().all(asymmetric)).then_some(true),
    })
}

/// What a JSON value is, with an article.
fn value_kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

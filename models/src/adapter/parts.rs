//! Which tensors of an adapter belong together, by their names.

use crate::checkpoint::TensorInfo;
use std::collections::BTreeMap;

/// A tensor, and what is wrong with it.
type FaultyTensor<'a> = (&'a TensorInfo, String);

/// What an adapter has of one module of the base.
#[derive(Default)]
pub(super) struct LoraModule<'a> {
    a: Option<&'a TensorInfo>,
    b: Option<&'a TensorInfo>,
    embedding_a: Option<&'a TensorInfo>,
    embedding_b: Option<&'a TensorInfo>,
    pub magnitude: Option<&'a TensorInfo>,
    /// Added to the module's bias (`lora_bias`).
    pub bias: Option<&'a TensorInfo>,
    /// Tensors in place of the base's, by the end of their name.
    pub replaced: Vec<(&'a str, &'a TensorInfo)>,
}

impl<'a> LoraModule<'a> {
    /// Both factors, and whether they are those of an embedding; `None` if the module has none.
    pub fn factor_pair(&self) -> Result<Option<(&'a TensorInfo, &'a TensorInfo, bool)>, FaultyTensor<'a>> {
        let (a, b, transposed) = match (self.a.or(self.b), self.embedding_a.or(self.embedding_b)) {
            (Some(info), Some(_)) => {
                return Err((info, "has factors of both a linear layer and an embedding".into()));
            }
            (_, Some(_)) => (self.embedding_a, self.embedding_b, true),
            _ => (self.a, self.b, false),
        };
        match (a, b) {
            (Some(a), Some(b)) => Ok(Some((a, b, transposed))),
            (Some(info), None) | (None, Some(info)) => {
                Err((info, "has no partner: factors come in pairs, `lora_A` and `lora_B`".into()))
            }
            (None, None) => match self.magnitude.or(self.bias) {
                None => Ok(None),
                Some(info) => Err((info, "lacks the factors `lora_A` and `lora_B`".into())),
            },
        }
    }
}

/// The modules of an adapter by their names in the base, as PEFT has them.
pub(super) fn group_by_module(
    tensors: &[TensorInfo],
) -> Result<BTreeMap<String, LoraModule<'_>>, FaultyTensor<'_>> {
    let mut modules: BTreeMap<String, LoraModule> = BTreeMap::new();
    for info in tensors {
        let name = info.name.strip_prefix("base_model.model.").unwrap_or(&info.name);
        if !info.dtype.is_weight() {
            return Err((info, format!("is stored as {}, which no factor is", info.dtype)));
        }
        // The base's own tensor, which PEFT's state has beside the one that takes its place.
        if name.split('.').any(|part| part == "original_module") {
            continue;
        }
        if let Some((path, end)) = name.split_once(".lora_") {
            let module = modules.entry(strip_peft_modules(path)).or_default();
            let end = without_adapter_name(end);
            let place = match end.as_str() {
                "A.weight" => &mut module.a,
                "B.weight" => &mut module.b,
                "B.bias" => &mut module.bias,
                "embedding_A" | "embedding_A.weight" => &mut module.embedding_a,
                "embedding_B" | "embedding_B.weight" => &mut module.embedding_b,
                "magnitude_vector" | "magnitude_vector.weight" => &mut module.magnitude,
                _ => return Err((info, "is not a known part of a LoRA".into())),
            };
            if place.replace(info).is_some() {
                return Err((info, "occurs under two names".into()));
            }
            continue;
        }
        match name.rsplit_once('.') {
            Some((path, end @ ("weight" | "bias"))) => {
                modules.entry(strip_peft_modules(path)).or_default().replaced.push((end, info));
            }
            _ => return Err((info, "is neither a factor of a LoRA nor a weight or bias of the base".into())),
        }
    }
    Ok(modules)
}

/// `A.default.weight` is `A.weight`: the state of a model that PEFT has made has the name of the adapter in it, files that PEFT has
/// saved do not.
fn without_adapter_name(end: &str) -> String {
    let parts: Vec<&str> = end.split('.').collect();
    match parts[..] {
        [factor, _, last @ ("weight" | "bias")] => format!("{factor}.{last}"),
        [factor @ ("embedding_A" | "embedding_B" | "magnitude_vector"), name] if name != "weight" => {
            factor.to_string()
        }
        _ => end.to_string(),
    }
}

/// The path without the modules that PEFT puts around those of the base.
fn strip_peft_modules(path: &str) -> String {
    let own = |part: &&str| !matches!(*part, "base_layer" | "modules_to_save" | "default");
    let parts: Vec<&str> = path.split('.').filter(own).collect();
    parts.join(".")
}

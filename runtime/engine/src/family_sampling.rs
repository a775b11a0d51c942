//! Sampling of families whose checkpoints carry no `generation_config.json`: the values that their makers'
//! programs use.

use crate::sampler::SamplingOverrides;
use serde_json::Value;

/// A family: `model_type`, and a field of its configuration where that is not enough.
struct FamilyDefaults {
    model_types: &'static [&'static str],
    field: Option<&'static str>,
    temperature: f32,
    top_p: f32,
    repeat_penalty: f32,
}

/// The first that fits counts.
const FAMILIES: [FamilyDefaults; 3] = [
    // The RWKV chat configuration of MLC.
    FamilyDefaults {
        model_types: &["rwkv", "rwkv5", "rwkv6", "rwkv7"],
        field: None,
        temperature: 1.2,
        top_p: 0.6,
        repeat_penalty: 0.996,
    },
    // `chat` in the modeling file of ChatGLM-6B.
    FamilyDefaults {
        model_types: &["chatglm"],
        field: Some("position_encoding_2d"),
        temperature: 0.95,
        top_p: 0.7,
        repeat_penalty: 1.0,
    },
    // `chat` in those of ChatGLM2-6B and ChatGLM3-6B.
    FamilyDefaults {
        model_types: &["chatglm"],
        field: None,
        temperature: 0.8,
        top_p: 0.8,
        repeat_penalty: 1.0,
    },
];

/// The usual sampling settings of a model's family. `model` is that part of an artifact's metadata: `type`
/// and `config`.
pub fn family_sampling(model: &Value) -> SamplingOverrides {
    let is = |family: &&FamilyDefaults| {
        let config = model.get("config");
        model.get("type").and_then(Value::as_str).is_some_and(|found| family.model_types.contains(&found))
            && family.field.is_none_or(|field| config.is_some_and(|config| config.get(field).is_some()))
    };
    let Some(family) = FAMILIES.iter().find(is) else { return SamplingOverrides::default() };
    SamplingOverrides {
        temperature: Some(family.temperature),
        top_p: Some(family.top_p),
        repeat_penalty: Some(family.repeat_penalty),
        // These programs cut by top-p alone.
        top_k: Some(0),
        min_p: Some(0.0),
        ..SamplingOverrides::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::SamplingParams;
    use serde_json::json;

    #[test]
    fn families_have_the_values_of_their_makers() {
        let of = |model: Value| {
            let set = family_sampling(&model);
            (set.temperature, set.top_p, set.repeat_penalty)
        };
        let rwkv = (Some(1.2), Some(0.6), Some(0.996));
        assert_eq!(of(json!({ "type": "rwkv", "config": {} })), rwkv);
        assert_eq!(of(json!({ "type": "rwkv7" })), rwkv);
        let first = json!({ "type": "chatglm", "config": { "position_encoding_2d": true } });
        assert_eq!(of(first), (Some(0.95), Some(0.7), Some(1.0)));
        assert_eq!(of(json!({ "type": "chatglm", "config": {} })), (Some(0.8), Some(0.8), Some(1.0)));
        assert_eq!(of(json!({ "type": "llama", "config": {} })), (None, None, None));
        assert_eq!(of(Value::Null), (None, None, None));
    }

    #[test]
    fn every_family_is_within_the_ranges() {
        for family in FAMILIES {
            for kind in family.model_types {
                let config = family.field.map(|field| json!({ (field): true })).unwrap_or(json!({}));
                let set = family_sampling(&json!({ "type": kind, "config": config }));
                SamplingParams::default().with(&set).check().unwrap();
            }
        }
    }
}

//! The facts of an artifact about its model that clients see in lists of models.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::Value;

/// Facts of the metadata of an artifact; those that it lacks are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelFacts {
    /// The type of the model in its configuration.
    pub family: String,
    pub parameters: Option<u64>,
    /// The scheme of its weights.
    pub scheme: String,
    /// Bytes of its weights.
    pub weight_bytes: u64,
    /// Tokens of a context.
    pub context: Option<u64>,
    /// True if its code is for GPUs.
    pub is_for_gpu: bool,
    /// Bits of a hash of the metadata.
    digest: [u64; 4],
}

impl ModelFacts {
    pub fn from_metadata(text: &str) -> ModelFacts {
        let metadata: Value = serde_json::from_str(text).unwrap_or(Value::Null);
        let word = |path: &str| metadata.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
        let number = |path: &str| metadata.pointer(path).and_then(Value::as_u64);
        let hash = |part: usize| {
            let mut hasher = DefaultHasher::new();
            (part, text).hash(&mut hasher);
            hasher.finish()
        };
        ModelFacts {
            family: word("/model/type"),
            parameters: number("/model/parameters"),
            scheme: word("/quantization/scheme"),
            weight_bytes: number("/memory/weights_bytes").unwrap_or(0),
            context: number("/memory/context").or(number("/model/context_length")),
            is_for_gpu: metadata.pointer("/target/images").is_some(),
            digest: std::array::from_fn(hash),
        }
    }

    /// 64 hexadecimal digits, which differ between artifacts.
    pub fn digest(&self) -> String {
        self.digest.iter().map(|part| format!("{part:016x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_read_from_metadata() {
        let text = r#"{"model": {"type": "llama", "parameters": 12, "context_length": 99},
            "quantization": {"scheme": "q4i8"}, "memory": {"weights_bytes": 7}}"#;
        let facts = ModelFacts::from_metadata(text);
        let named = (facts.family.as_str(), facts.parameters, facts.scheme.as_str());
        assert_eq!(named, ("llama", Some(12), "q4i8"));
        assert_eq!((facts.weight_bytes, facts.context, facts.digest().len()), (7, Some(99), 64));
        assert_ne!(facts.digest(), ModelFacts::from_metadata("").digest());
    }
}

//! Quantization schemes by name: which storage type each kind of parameter gets, and how activations enter
//! products.
//!
//! Names follow MLC (`q{bits}{activation}_{variant}`); `q8i8` and `q4i8` quantize activations per group of
//! 128 at run time, as FastLLM and llama.cpp do; `bf16bf16` rounds them to bf16, as PyTorch and llama.cpp do
//! with weights in bf16.

use mlcc_files::did_you_mean;
use mlcc_ir::module::ParamRole;
use mlcc_ir::types::{DType, QuantFormat};

/// The scheme that plain `q4f16` means: the variant that MLC's documentation advises for RWKV.
pub const Q4F16: &str = "q4f16_2";

/// Type of the activations in products with packed weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ActivationType {
    F32,
    /// Rounded to bf16 where the weight is bf16, on CPUs.
    BF16,
    /// int8 per group of 128, on CPUs.
    I8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QuantScheme {
    pub name: &'static str,
    /// One line for help texts.
    pub about: &'static str,
    pub embedding: DType,
    pub head: DType,
    pub linear: DType,
    pub activation: ActivationType,
}

const Q4: DType = DType::Packed(QuantFormat::Q4G32);
const Q8: DType = DType::Packed(QuantFormat::Q8G32);

/// The same type for all matrices.
const fn uniform(name: &'static str, about: &'static str, dtype: DType) -> QuantScheme {
    let (embedding, head, linear) = (dtype, dtype, dtype);
    QuantScheme { name, about, embedding, head, linear, activation: ActivationType::F32 }
}

/// The same packed format for all matrices.
const fn packed(name: &'static str, about: &'static str, format: &str) -> QuantScheme {
    uniform(name, about, DType::Packed(QuantFormat::by_name(format)))
}

/// Every scheme that works, in the order of help texts.
pub const SCHEMES: &[QuantScheme] = &[
    uniform("f32", "32-bit floats", DType::F32),
    uniform("f16", "16-bit floats", DType::F16),
    uniform("bf16", "bfloat16", DType::BF16),
    QuantScheme {
        name: "bf16bf16",
        about: "bfloat16 weights times activations rounded to bfloat16 at run time",
        embedding: DType::BF16,
        head: DType::BF16,
        linear: DType::BF16,
        activation: ActivationType::BF16,
    },
    packed("q8f16_1", "8-bit weights in groups of 32", "q8g32"),
    packed("q4f16_0", "4-bit weights in groups of 32, reduction axis outermost", "q4g32"),
    packed("q4f16_1", "4-bit weights in groups of 32", "q4g32"),
    packed("q4f32_1", "4-bit weights in groups of 32, scales in f32", "q4g32_f32"),
    packed(
        "q4bf16_0",
        "4-bit weights in groups of 32, scales in bf16, reduction axis outermost",
        "q4g32_bf16",
    ),
    packed("q4bf16_1", "4-bit weights in groups of 32, scales in bf16", "q4g32_bf16"),
    packed("q3f16_0", "3-bit weights in groups of 40, reduction axis outermost", "q3g40"),
    packed("q3f16_1", "3-bit weights in groups of 40", "q3g40"),
    packed("q4f16_g128", "4-bit weights in groups of 128", "q4g128"),
    packed("q4f16_g128_asym", "4-bit weights in groups of 128, each with a zero point", "q4g128_zero"),
    QuantScheme {
        name: "q4f16_autoawq",
        about: "4-bit weights in groups of 128, each with a zero point, embedding and head in f16",
        embedding: DType::F16,
        head: DType::F16,
        linear: DType::Packed(QuantFormat::by_name("q4g128_zero")),
        activation: ActivationType::F32,
    },
    QuantScheme {
        name: "q4f16_2",
        about: "4-bit weights in groups of 32, embedding and head in f16",
        embedding: DType::F16,
        head: DType::F16,
        linear: Q4,
        activation: ActivationType::F32,
    },
    QuantScheme {
        name: "q8i8",
        about: "8-bit weights times activations quantized to 8 bits at run time",
        embedding: Q8,
        head: Q8,
        linear: Q8,
        activation: ActivationType::I8,
    },
    QuantScheme {
        name: "q4i8",
        about: "4-bit weights, embedding and head in 8 bits, times activations quantized to 8 bits at run time",
        embedding: Q8,
        head: Q8,
        linear: Q4,
        activation: ActivationType::I8,
    },
];

/// Aliases, with the scheme that they mean.
const ALIASES: [(&str, &str); 4] = [("q0f32", "f32"), ("q0f16", "f16"), ("q0bf16", "bf16"), ("q4f16", Q4F16)];

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchemeError {
    #[error("unknown quantization `{name}`: {near}`mlcc quants` lists all")]
    Unknown { name: String, near: String },
}

impl Default for QuantScheme {
    /// Weights as f32.
    fn default() -> Self {
        SCHEMES[0]
    }
}

impl QuantScheme {
    /// The scheme of a name in any case. The second value tells what the name means if it is not a scheme's
    /// own.
    pub fn from_name(name: &str) -> Result<(QuantScheme, Option<String>), SchemeError> {
        let wanted = name.trim().to_ascii_lowercase();
        let by_name = |name: &str| SCHEMES.iter().find(|s| s.name == name).copied();
        if let Some(scheme) = by_name(&wanted) {
            return Ok((scheme, None));
        }
        if let Some((_, target)) = ALIASES.iter().find(|(alias, _)| *alias == wanted)
            && let Some(scheme) = by_name(target)
        {
            let note = format!("{name} stands for {}: {}", scheme.name, scheme.about);
            return Ok((scheme, Some(note)));
        }
        let aliases = ALIASES.iter().map(|(alias, _)| *alias);
        let near = did_you_mean(&wanted, SCHEMES.iter().map(|s| s.name).chain(aliases));
        Err(SchemeError::Unknown { name: name.into(), near })
    }

    /// True if activations that products read are f16, and sums f32, where that is faster than f32: on GPUs.
    /// Names say it, as MLC's do.
    pub fn has_half_activations(&self) -> bool {
        self.name.contains("f16") && !self.name.contains("bf16")
    }

    /// Storage type of a parameter. Vectors always stay f32: they are small, and norms and time constants are
    /// sensitive. So are the factors of low-rank products, which stay f16 where matrices are packed.
    pub fn storage_type(&self, role: ParamRole) -> DType {
        match role {
            ParamRole::Embedding => self.embedding,
            ParamRole::Head => self.head,
            ParamRole::LowRank if self.linear.is_packed() => DType::F16,
            ParamRole::Linear | ParamRole::LowRank => self.linear,
            ParamRole::Vector => DType::F32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_any_case() {
        for scheme in SCHEMES {
            let found = QuantScheme::from_name(&scheme.name.to_ascii_uppercase()).unwrap();
            assert_eq!(found, (*scheme, None));
            assert_eq!(scheme.storage_type(ParamRole::Vector), DType::F32);
        }
        assert_eq!(QuantScheme::from_name("Q0F16").unwrap().0.name, "f16");
    }

    #[test]
    fn q4f16_says_what_it_stands_for() {
        let (scheme, note) = QuantScheme::from_name("q4f16").unwrap();
        assert_eq!(scheme.name, Q4F16);
        assert!(note.unwrap().starts_with("q4f16 stands for q4f16_"));
    }

    #[test]
    fn other_names_are_errors_that_help() {
        let unknown = QuantScheme::from_name("q5").unwrap_err().to_string();
        assert!(unknown.contains("`q5`") && unknown.contains("`mlcc quants`"), "{unknown}");
        let near = QuantScheme::from_name("q4i7").unwrap_err().to_string();
        assert!(near.contains("did you mean `q4i8`"), "{near}");
    }
}

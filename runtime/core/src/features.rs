//! Features of this CPU, and the choice among a model's variants.

use mlcc_abi::feature;

/// Environment variable that forces a lower CPU level.
pub const LEVEL_VARIABLE: &str = "MLCC_CPU_LEVEL";

/// Bits of [`mlcc_abi::feature`] that this CPU (and its operating system) has.
pub fn host() -> u64 {
    detect()
}

/// Name of this machine as the table's `target` spells it.
pub const HOST_TARGET: &str = if cfg!(target_arch = "x86_64") {
    "x86-64"
} else if cfg!(target_arch = "aarch64") {
    "aarch64"
} else {
    "unsupported"
};

#[cfg(target_arch = "x86_64")]
fn detect() -> u64 {
    use feature::*;
    use std::arch::is_x86_feature_detected as has;
    [
        (SSE3, has!("sse3")),
        (SSSE3, has!("ssse3")),
        (SSE4_1, has!("sse4.1")),
        (SSE4_2, has!("sse4.2")),
        (POPCNT, has!("popcnt")),
        (AVX, has!("avx")),
        (AVX2, has!("avx2")),
        (FMA, has!("fma")),
        (F16C, has!("f16c")),
        (BMI1, has!("bmi1")),
        (BMI2, has!("bmi2")),
        (LZCNT, has!("lzcnt")),
        (MOVBE, has!("movbe")),
        (AVX512F, has!("avx512f")),
        (AVX512BW, has!("avx512bw")),
        (AVX512CD, has!("avx512cd")),
        (AVX512DQ, has!("avx512dq")),
        (AVX512VL, has!("avx512vl")),
        (AVX512VNNI, has!("avx512vnni")),
        (AVX512BF16, has!("avx512bf16")),
        (AVX512VBMI, has!("avx512vbmi")),
        (AVX512FP16, has!("avx512fp16")),
        (AVXVNNI, has!("avxvnni")),
        (CMPXCHG16B, has!("cmpxchg16b")),
    ]
    .into_iter()
    .fold(0, |bits, (bit, present)| if present { bits | bit } else { bits })
}

#[cfg(target_arch = "aarch64")]
fn detect() -> u64 {
    use feature::*;
    use std::arch::is_aarch64_feature_detected as has;
    [
        (NEON, has!("neon")),
        (FP16, has!("fp16")),
        (DOTPROD, has!("dotprod")),
        (BF16, has!("bf16")),
        (I8MM, has!("i8mm")),
        (SVE, has!("sve")),
        (SVE2, has!("sve2")),
        (LSE, has!("lse")),
    ]
    .into_iter()
    .fold(0, |bits, (bit, present)| if present { bits | bit } else { bits })
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detect() -> u64 {
    0
}

/// The reasons why no variant fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VariantMismatch {
    /// Per variant: `NAME needs a, b`.
    Features(Vec<String>),
    UnknownLevel,
    NothingBelow,
}

/// Chooses among (name, required features), best first. `level` is a variant's name (exactly that one) or one
/// of [`feature::LEVELS`] (the best one within it).
pub fn choose_variant(
    variants: &[(&str, u64)],
    host: u64,
    level: Option<&str>,
) -> Result<usize, VariantMismatch> {
    let exact = level.and_then(|l| variants.iter().position(|(name, _)| *name == l));
    let allowed = match (level, exact) {
        (None, _) | (_, Some(_)) => u64::MAX,
        (Some(l), None) => {
            feature::LEVELS.iter().find(|(n, _)| *n == l).ok_or(VariantMismatch::UnknownLevel)?.1
        }
    };
    let mut candidates: Vec<usize> = match exact {
        Some(index) => vec![index],
        None => (0..variants.len()).collect(),
    };
    candidates.retain(|&i| variants[i].1 & !allowed == 0);
    if candidates.is_empty() && level.is_some() {
        return Err(VariantMismatch::NothingBelow);
    }
    if let Some(found) = candidates.iter().find(|&&i| variants[i].1 & !host == 0) {
        return Ok(*found);
    }
    let missing = |i: &usize| {
        let (name, needs) = variants[*i];
        let known: Vec<&str> = feature::names(needs & !host).collect();
        let all = feature::ALL.iter().fold(0, |bits, (bit, _)| bits | bit);
        let unknown = if needs & !all == 0 { "" } else { " and features this runtime does not know" };
        format!("{name} needs {}{unknown}", known.join(", "))
    };
    Err(VariantMismatch::Features(candidates.iter().map(missing).collect()))
}

/// This CPU's features as text.
pub fn names(bits: u64) -> String {
    let list: Vec<&str> = feature::names(bits).collect();
    if list.is_empty() { "none of the optional features".into() } else { list.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use feature::*;

    const V: [(&str, u64); 3] =
        [("x86-64-v4-vnni", X86_64_V4 | AVX512VNNI), ("x86-64-v3", X86_64_V3), ("x86-64-v2", X86_64_V2)];

    #[test]
    fn best_that_fits() {
        assert_eq!(choose_variant(&V, u64::MAX, None), Ok(0));
        assert_eq!(choose_variant(&V, X86_64_V4, None), Ok(1));
        assert_eq!(choose_variant(&V, X86_64_V2, None), Ok(2));
    }

    #[test]
    fn levels_cap_and_names_pin() {
        assert_eq!(choose_variant(&V, u64::MAX, Some("x86-64-v4")), Ok(1));
        assert_eq!(choose_variant(&V, u64::MAX, Some("x86-64-v2")), Ok(2));
        assert_eq!(choose_variant(&V, u64::MAX, Some("x86-64-v1")), Err(VariantMismatch::NothingBelow));
        assert_eq!(choose_variant(&V, u64::MAX, Some("fast")), Err(VariantMismatch::UnknownLevel));
        let missing = choose_variant(&V, X86_64_V2, Some("x86-64-v3"));
        let Err(VariantMismatch::Features(list)) = missing else { panic!("{missing:?}") };
        assert_eq!(list.len(), 1);
        assert!(list[0].starts_with("x86-64-v3 needs avx, avx2"), "{list:?}");
    }

    #[test]
    fn missing_features_are_named() {
        assert_eq!(
            choose_variant(&V[..1], X86_64_V4, None),
            Err(VariantMismatch::Features(vec!["x86-64-v4-vnni needs avx512vnni".into()]))
        );
        let Err(VariantMismatch::Features(list)) = choose_variant(&[("new", 1 << 62)], 0, None) else {
            panic!()
        };
        assert!(list[0].contains("does not know"));
    }
}

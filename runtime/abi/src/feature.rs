//! CPU features as bits of one `u64`, and the named levels made of them.

// x86-64: bits 0..32
pub const SSE3: u64 = 1 << 0;
pub const SSSE3: u64 = 1 << 1;
pub const SSE4_1: u64 = 1 << 2;
pub const SSE4_2: u64 = 1 << 3;
pub const POPCNT: u64 = 1 << 4;
pub const AVX: u64 = 1 << 5;
pub const AVX2: u64 = 1 << 6;
pub const FMA: u64 = 1 << 7;
pub const F16C: u64 = 1 << 8;
pub const BMI1: u64 = 1 << 9;
pub const BMI2: u64 = 1 << 10;
pub const LZCNT: u64 = 1 << 11;
pub const MOVBE: u64 = 1 << 12;
pub const AVX512F: u64 = 1 << 13;
pub const AVX512BW: u64 = 1 << 14;
pub const AVX512CD: u64 = 1 << 15;
pub const AVX512DQ: u64 = 1 << 16;
pub const AVX512VL: u64 = 1 << 17;
pub const AVX512VNNI: u64 = 1 << 18;
pub const AVX512BF16: u64 = 1 << 19;
pub const AVX512VBMI: u64 = 1 << 20;
pub const AVX512FP16: u64 = 1 << 21;
pub const AVXVNNI: u64 = 1 << 22;
/// Named but never detected yet: stable Rust cannot.
pub const AMX_TILE: u64 = 1 << 23;
pub const AMX_INT8: u64 = 1 << 24;
pub const AMX_BF16: u64 = 1 << 25;
pub const CMPXCHG16B: u64 = 1 << 26;
// AArch64: bits 32..64
pub const NEON: u64 = 1 << 32;
pub const FP16: u64 = 1 << 33;
pub const DOTPROD: u64 = 1 << 34;
pub const BF16: u64 = 1 << 35;
pub const I8MM: u64 = 1 << 36;
pub const SVE: u64 = 1 << 37;
pub const SVE2: u64 = 1 << 38;
pub const LSE: u64 = 1 << 39;

/// Every feature with the name that LLVM and Rust's detection macros give it, by bit.
pub const ALL: &[(u64, &str)] = &[
    (SSE3, "sse3"),
    (SSSE3, "ssse3"),
    (SSE4_1, "sse4.1"),
    (SSE4_2, "sse4.2"),
    (POPCNT, "popcnt"),
    (AVX, "avx"),
    (AVX2, "avx2"),
    (FMA, "fma"),
    (F16C, "f16c"),
    (BMI1, "bmi1"),
    (BMI2, "bmi2"),
    (LZCNT, "lzcnt"),
    (MOVBE, "movbe"),
    (AVX512F, "avx512f"),
    (AVX512BW, "avx512bw"),
    (AVX512CD, "avx512cd"),
    (AVX512DQ, "avx512dq"),
    (AVX512VL, "avx512vl"),
    (AVX512VNNI, "avx512vnni"),
    (AVX512BF16, "avx512bf16"),
    (AVX512VBMI, "avx512vbmi"),
    (AVX512FP16, "avx512fp16"),
    (AVXVNNI, "avxvnni"),
    (AMX_TILE, "amx-tile"),
    (AMX_INT8, "amx-int8"),
    (AMX_BF16, "amx-bf16"),
    (CMPXCHG16B, "cmpxchg16b"),
    (NEON, "neon"),
    (FP16, "fp16"),
    (DOTPROD, "dotprod"),
    (BF16, "bf16"),
    (I8MM, "i8mm"),
    (SVE, "sve"),
    (SVE2, "sve2"),
    (LSE, "lse"),
];

/// The x86-64 psABI levels. (`cx16` and `lahf` of v2 are in `CMPXCHG16B` or not used by generated code.)
pub const X86_64_V2: u64 = SSE3 | SSSE3 | SSE4_1 | SSE4_2 | POPCNT | CMPXCHG16B;
pub const X86_64_V3: u64 = X86_64_V2 | AVX | AVX2 | FMA | F16C | BMI1 | BMI2 | LZCNT | MOVBE;
pub const X86_64_V4: u64 = X86_64_V3 | AVX512F | AVX512BW | AVX512CD | AVX512DQ | AVX512VL;

/// Levels that `MLCC_CPU_LEVEL` understands beside the names of variants.
pub const LEVELS: &[(&str, u64)] = &[
    ("x86-64-v1", 0),
    ("x86-64-v2", X86_64_V2),
    ("x86-64-v3", X86_64_V3),
    ("x86-64-v3-vnni", X86_64_V3 | AVXVNNI),
    ("x86-64-v4", X86_64_V4),
    ("x86-64-v4-vnni", X86_64_V4 | AVX512VNNI),
    ("x86-64-v4-bf16", X86_64_V4 | AVX512VNNI | AVX512BF16),
    ("x86-64-v4-avxvnni", X86_64_V4 | AVX512VNNI | AVX512BF16 | AVXVNNI),
    ("armv8.0", NEON),
    ("armv8.2-dotprod", NEON | FP16 | DOTPROD | LSE),
    ("armv8.6", NEON | FP16 | DOTPROD | LSE | BF16 | I8MM),
];

/// The bit of a feature name; `None` if the name is unknown.
pub fn by_name(name: &str) -> Option<u64> {
    ALL.iter().find(|(_, n)| *n == name).map(|(bit, _)| *bit)
}

/// Names of the set bits, lowest bit first.
pub fn names(bits: u64) -> impl Iterator<Item = &'static str> {
    ALL.iter().filter(move |(bit, _)| bits & bit != 0).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_and_names_are_unique() {
        for (i, (bit, name)) in ALL.iter().enumerate() {
            assert_eq!(bit.count_ones(), 1);
            assert_eq!(by_name(name), Some(*bit));
            assert!(ALL[..i].iter().all(|(b, n)| b != bit && n != name), "{name} twice");
        }
    }

    #[test]
    fn levels_nest() {
        assert_eq!(X86_64_V4 & X86_64_V3, X86_64_V3);
        assert_eq!(names(X86_64_V3 & !X86_64_V2).next(), Some("avx"));
    }
}

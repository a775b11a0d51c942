//! Features of the processor that this program runs on.

use crate::Arch;

impl Arch {
    /// The architecture of this machine, if mlcc generates code for it.
    pub fn of_host() -> Option<Arch> {
        match std::env::consts::ARCH {
            "x86_64" => Some(Arch::X86_64),
            "aarch64" => Some(Arch::Aarch64),
            _ => None,
        }
    }
}

/// Names of the detected features among those that specs use.
#[cfg(target_arch = "x86_64")]
pub fn detected_features() -> Vec<&'static str> {
    use std::is_x86_feature_detected as has;
    let all = [
        ("sse", true),
        ("sse2", true),
        ("sse3", has!("sse3")),
        ("ssse3", has!("ssse3")),
        ("sse4.1", has!("sse4.1")),
        ("sse4.2", has!("sse4.2")),
        ("popcnt", has!("popcnt")),
        ("cmpxchg16b", has!("cmpxchg16b")),
        ("avx", has!("avx")),
        ("avx2", has!("avx2")),
        ("fma", has!("fma")),
        ("f16c", has!("f16c")),
        ("bmi1", has!("bmi1")),
        ("bmi2", has!("bmi2")),
        ("lzcnt", has!("lzcnt")),
        ("movbe", has!("movbe")),
        ("avxvnni", has!("avxvnni")),
        ("avx512f", has!("avx512f")),
        ("avx512bw", has!("avx512bw")),
        ("avx512cd", has!("avx512cd")),
        ("avx512dq", has!("avx512dq")),
        ("avx512vl", has!("avx512vl")),
        ("avx512vnni", has!("avx512vnni")),
        ("avx512bf16", has!("avx512bf16")),
    ];
    all.into_iter().filter(|(_, found)| *found).map(|(name, _)| name).collect()
}

/// Names of the detected features among those that specs use.
#[cfg(target_arch = "aarch64")]
pub fn detected_features() -> Vec<&'static str> {
    use std::arch::is_aarch64_feature_detected as has;
    let all = [
        ("neon", has!("neon")),
        ("lse", has!("lse")),
        ("fp16", has!("fp16")),
        ("dotprod", has!("dotprod")),
        ("bf16", has!("bf16")),
        ("i8mm", has!("i8mm")),
    ];
    all.into_iter().filter(|(_, found)| *found).map(|(name, _)| name).collect()
}

/// Names of the detected features among those that specs use.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn detected_features() -> Vec<&'static str> {
    Vec::new()
}

//! The inner loops of the probes. All `unsafe` of this crate is here: machine instructions behind a
//! check that the machine has them, and loads inside of a slice.

use mlcc_kernels::lower::cost::ComputeType;

/// A loop of independent operations on registers.
pub struct PeakLoop {
    /// Runs this many rounds; the value only keeps the compiler from dropping the work.
    pub run: fn(u64) -> u64,
    pub ops_per_round: u64,
}

/// Independent chains: enough for two units with a latency of four cycles, twice.
const CHAINS: usize = 16;

#[cfg(target_arch = "x86_64")]
pub fn peak_loop(arithmetic: ComputeType) -> Option<PeakLoop> {
    use std::is_x86_feature_detected as has;
    let ops = |lanes: usize| (2 * lanes * CHAINS) as u64;
    // SAFETY (of every `run`): it is chosen only where the features that its function is compiled for were
    // detected.
    match arithmetic {
        ComputeType::F32 if has!("avx512f") => {
            Some(PeakLoop { run: |n| unsafe { x86::fma_512(n) }, ops_per_round: ops(16) })
        }
        ComputeType::F32 if has!("avx2") && has!("fma") => {
            Some(PeakLoop { run: |n| unsafe { x86::fma_256(n) }, ops_per_round: ops(8) })
        }
        ComputeType::BF16 if has!("avx512bf16") => {
            Some(PeakLoop { run: |n| unsafe { x86::dpbf16_512(n) }, ops_per_round: ops(32) })
        }
        ComputeType::I8 | ComputeType::I4 if has!("avx512vnni") => {
            Some(PeakLoop { run: |n| unsafe { x86::dpbusd_512(n) }, ops_per_round: ops(64) })
        }
        ComputeType::I8 | ComputeType::I4 if has!("avxvnni") => {
            Some(PeakLoop { run: |n| unsafe { x86::dpbusd_256(n) }, ops_per_round: ops(32) })
        }
        ComputeType::I8 if has!("avx2") => {
            Some(PeakLoop { run: |n| unsafe { x86::maddubs_256(n) }, ops_per_round: ops(32) })
        }
        ComputeType::I4 if has!("avx2") => {
            Some(PeakLoop { run: |n| unsafe { x86::maddubs_sums_256(n) }, ops_per_round: ops(32) })
        }
        ComputeType::F32 => Some(portable_f32()),
        ComputeType::BF16 | ComputeType::I8 | ComputeType::I4 => None,
    }
}

#[cfg(target_arch = "aarch64")]
mod arm;

#[cfg(target_arch = "aarch64")]
pub fn peak_loop(arithmetic: ComputeType) -> Option<PeakLoop> {
    use std::arch::is_aarch64_feature_detected as has;
    let ops = |products: usize| (2 * products * CHAINS) as u64;
    // SAFETY (of every `run`): it is chosen only where the feature that its function is compiled for was
    // detected, and runs at least one round.
    match arithmetic {
        ComputeType::F32 => Some(PeakLoop { run: |n| unsafe { arm::fmla(n.max(1)) }, ops_per_round: ops(4) }),
        ComputeType::BF16 if has!("bf16") => {
            Some(PeakLoop { run: |n| unsafe { arm::bfmmla(n.max(1)) }, ops_per_round: ops(16) })
        }
        ComputeType::BF16 => None,
        ComputeType::I8 | ComputeType::I4 if has!("i8mm") => {
            Some(PeakLoop { run: |n| unsafe { arm::smmla(n.max(1)) }, ops_per_round: ops(32) })
        }
        ComputeType::I8 | ComputeType::I4 if has!("dotprod") => {
            Some(PeakLoop { run: |n| unsafe { arm::sdot(n.max(1)) }, ops_per_round: ops(16) })
        }
        ComputeType::I8 | ComputeType::I4 => {
            Some(PeakLoop { run: |n| unsafe { arm::smlal(n.max(1)) }, ops_per_round: ops(8) })
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub fn peak_loop(arithmetic: ComputeType) -> Option<PeakLoop> {
    match arithmetic {
        ComputeType::F32 => Some(portable_f32()),
        ComputeType::BF16 | ComputeType::I8 | ComputeType::I4 => None,
    }
}

/// The compiler's result for plain arithmetic.
#[cfg(not(target_arch = "aarch64"))]
fn portable_f32() -> PeakLoop {
    const LANES: usize = 4;
    let run = |rounds: u64| {
        let mut acc = [[1.0f32; LANES]; CHAINS];
        let (a, b) = (std::hint::black_box([0.5f32; LANES]), std::hint::black_box([1.0f32; LANES]));
        for _ in 0..rounds {
            for chain in &mut acc {
                for lane in 0..LANES {
                    chain[lane] = chain[lane] * a[lane] + b[lane];
                }
            }
        }
        acc.iter().flatten().map(|x| u64::from(x.to_bits())).sum()
    };
    PeakLoop { run, ops_per_round: (2 * LANES * CHAINS) as u64 }
}

/// Reads every byte.
pub fn read_bytes(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature is there.
            return unsafe { x86::read_512(bytes) };
        }
        if std::is_x86_feature_detected!("avx2") {
            // SAFETY: the feature is there.
            return unsafe { x86::read_256(bytes) };
        }
    }
    let (head, words, tail) = {
        let (words, tail) = bytes.as_chunks::<8>();
        (0u64, words, tail)
    };
    let sum = words.iter().fold(head, |sum, w| sum ^ u64::from_le_bytes(*w));
    tail.iter().fold(sum, |sum, &b| sum ^ u64::from(b))
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::CHAINS;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    #[target_feature(enable = "avx512f")]
    pub fn read_512(bytes: &[u8]) -> u64 {
        let mut acc = [_mm512_setzero_si512(); 8];
        for block in bytes.chunks_exact(512) {
            for (i, a) in acc.iter_mut().enumerate() {
                // SAFETY: 64 bytes at 64 i lie in the block of 512.
                let x = unsafe { _mm512_loadu_si512(block.as_ptr().add(64 * i).cast()) };
                *a = _mm512_xor_si512(*a, x);
            }
        }
        let sum = acc.into_iter().fold(_mm512_setzero_si512(), |s, a| _mm512_xor_si512(s, a));
        _mm512_reduce_add_epi64(sum) as u64
    }

    #[target_feature(enable = "avx2")]
    pub fn read_256(bytes: &[u8]) -> u64 {
        let mut acc = [_mm256_setzero_si256(); 8];
        for block in bytes.chunks_exact(256) {
            for (i, a) in acc.iter_mut().enumerate() {
                // SAFETY: 32 bytes at 32 i lie in the block of 256.
                let x = unsafe { _mm256_loadu_si256(block.as_ptr().add(32 * i).cast()) };
                *a = _mm256_xor_si256(*a, x);
            }
        }
        let sum = acc.into_iter().fold(_mm256_setzero_si256(), |s, a| _mm256_xor_si256(s, a));
        _mm256_extract_epi64::<0>(sum) as u64
    }

    #[target_feature(enable = "avx512f")]
    pub fn fma_512(rounds: u64) -> u64 {
        let (a, b) = (black_box(_mm512_set1_ps(0.5)), black_box(_mm512_set1_ps(1.0)));
        let mut acc = [_mm512_set1_ps(1.0); CHAINS];
        for _ in 0..rounds {
            for c in &mut acc {
                *c = _mm512_fmadd_ps(*c, a, b);
            }
        }
        let sum = acc.into_iter().fold(_mm512_setzero_ps(), |s, c| _mm512_add_ps(s, c));
        u64::from(_mm512_reduce_add_ps(sum).to_bits())
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn fma_256(rounds: u64) -> u64 {
        let (a, b) = (black_box(_mm256_set1_ps(0.5)), black_box(_mm256_set1_ps(1.0)));
        // Sixteen registers in all: twelve chains stay in them, the rest of the sixteen would not.
        let mut acc = [_mm256_set1_ps(1.0); 8];
        for _ in 0..2 * rounds {
            for c in &mut acc {
                *c = _mm256_fmadd_ps(*c, a, b);
            }
        }
        let sum = acc.into_iter().fold(_mm256_setzero_ps(), |s, c| _mm256_add_ps(s, c));
        u64::from(_mm256_cvtss_f32(sum).to_bits())
    }

    #[target_feature(enable = "avx512bf16,avx512f")]
    pub fn dpbf16_512(rounds: u64) -> u64 {
        let ones = black_box(_mm512_set1_ps(1.0));
        let a = _mm512_cvtne2ps_pbh(ones, ones);
        let mut acc = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..rounds {
            for c in &mut acc {
                *c = _mm512_dpbf16_ps(*c, a, a);
            }
        }
        let sum = acc.into_iter().fold(_mm512_setzero_ps(), |s, c| _mm512_add_ps(s, c));
        u64::from(_mm512_reduce_add_ps(sum).to_bits())
    }

    #[target_feature(enable = "avx512vnni,avx512f")]
    pub fn dpbusd_512(rounds: u64) -> u64 {
        let (a, b) = (black_box(_mm512_set1_epi8(3)), black_box(_mm512_set1_epi8(1)));
        let mut acc = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..rounds {
            for c in &mut acc {
                *c = _mm512_dpbusd_epi32(*c, a, b);
            }
        }
        let sum = acc.into_iter().fold(_mm512_setzero_si512(), |s, c| _mm512_add_epi32(s, c));
        _mm512_reduce_add_epi32(sum) as u64
    }

    #[target_feature(enable = "avxvnni,avx2")]
    pub fn dpbusd_256(rounds: u64) -> u64 {
        let (a, b) = (black_box(_mm256_set1_epi8(3)), black_box(_mm256_set1_epi8(1)));
        let mut acc = [_mm256_setzero_si256(); 8];
        for _ in 0..2 * rounds {
            for c in &mut acc {
                *c = _mm256_dpbusd_avx_epi32(*c, a, b);
            }
        }
        let sum = acc.into_iter().fold(_mm256_setzero_si256(), |s, c| _mm256_add_epi32(s, c));
        _mm256_extract_epi64::<0>(sum) as u64
    }

    /// Eight operands of different products: by `i % 4` and `i / 4`.
    #[target_feature(enable = "avx2")]
    fn byte_operands() -> ([__m256i; 4], [__m256i; 2]) {
        let codes = [1, 2, 3, 4].map(|code| black_box(_mm256_set1_epi8(code)));
        (codes, [5, 6].map(|code| black_box(_mm256_set1_epi8(code))))
    }

    /// Other operands for the next products, so that they are computed each time.
    #[target_feature(enable = "avx2")]
    fn change(x: &mut [__m256i; 2]) {
        let one = _mm256_set1_epi8(1);
        x.iter_mut().for_each(|x| *x = _mm256_add_epi8(*x, one));
    }

    /// A loop without a dot instruction: a multiplication of bytes, one of words, and the sum.
    #[target_feature(enable = "avx2")]
    pub fn maddubs_256(rounds: u64) -> u64 {
        let (codes, mut x) = byte_operands();
        let ones = black_box(_mm256_set1_epi16(1));
        let mut acc = [_mm256_setzero_si256(); 8];
        for _ in 0..2 * rounds {
            for (i, c) in acc.iter_mut().enumerate() {
                let pairs = _mm256_maddubs_epi16(codes[i % 4], x[i / 4]);
                *c = _mm256_add_epi32(*c, _mm256_madd_epi16(pairs, ones));
            }
            change(&mut x);
        }
        let sum = acc.into_iter().fold(_mm256_setzero_si256(), |s, c| _mm256_add_epi32(s, c));
        _mm256_extract_epi64::<0>(sum) as u64
    }

    /// The same with codes of 4 bits, of which eight products meet in 16 bits. `rounds` is a multiple of
    /// four.
    #[target_feature(enable = "avx2")]
    pub fn maddubs_sums_256(rounds: u64) -> u64 {
        let (codes, mut x) = byte_operands();
        let ones = black_box(_mm256_set1_epi16(1));
        let mut total = _mm256_setzero_si256();
        for _ in 0..rounds / 4 {
            let mut sums = [_mm256_setzero_si256(); 8];
            for _ in 0..8 {
                for (i, s) in sums.iter_mut().enumerate() {
                    *s = _mm256_add_epi16(*s, _mm256_maddubs_epi16(codes[i % 4], x[i / 4]));
                }
                change(&mut x);
            }
            for s in sums {
                total = _mm256_add_epi32(total, _mm256_madd_epi16(s, ones));
            }
        }
        _mm256_extract_epi64::<0>(total) as u64
    }
}

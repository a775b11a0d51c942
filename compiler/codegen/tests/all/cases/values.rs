//! Interesting inputs.

use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::types::DType;

/// A small deterministic generator (splitmix64).
pub struct ValueGenerator(pub u64);

impl ValueGenerator {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A number in `-1..1`.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

const SPECIAL: [f32; 24] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    2.5,
    -2.5,
    1e-3,
    6.0e-8,
    -6.1e-5,
    5.9e-8,
    65504.0,
    65519.9,
    65520.0,
    -1e6,
    3.4e38,
    1e-40,
    127.6,
    -128.5,
    2147483648.0,
    4294967295.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
];

/// `len` values of a type: special ones first, then random ones.
pub fn any(dtype: DType, len: usize, seed: u64) -> KernelBuffer {
    let mut random = ValueGenerator(seed);
    if dtype.is_float() {
        let nan = std::iter::once(f32::NAN);
        let special = SPECIAL.into_iter().chain(nan);
        let all: Vec<f32> = special
            .chain(std::iter::repeat_with(move || random.float() * 300.0))
            .skip(seed as usize % 7)
            .take(len)
            .collect();
        return KernelBuffer::from_floats(dtype, &all);
    }
    let special =
        [0, 1, 2, 255, 256, 127, 128, 32767, 65535, -1, -128, i64::from(i32::MAX), i64::from(i32::MIN)];
    let all: Vec<i64> = special
        .into_iter()
        .chain(std::iter::repeat_with(|| random.next() as i64 >> 33))
        .skip(seed as usize % 5)
        .take(len)
        .map(|v| if dtype == DType::Bool { v & 1 } else { v })
        .collect();
    KernelBuffer::from_ints(dtype, &all)
}

/// Finite values of moderate size, for arithmetic.
pub fn tame(dtype: DType, len: usize, seed: u64) -> KernelBuffer {
    let mut random = ValueGenerator(seed);
    if dtype.is_float() {
        let all: Vec<f32> = (0..len).map(|_| random.float() * 4.0).collect();
        return KernelBuffer::from_floats(dtype, &all);
    }
    let all: Vec<i64> = (0..len).map(|_| (random.next() % 7) as i64 + 1).collect();
    KernelBuffer::from_ints(dtype, &all)
}

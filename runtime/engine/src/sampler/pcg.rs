//! PCG64 (XSL RR 128/64), the generator of "PCG: A Family of Simple Fast Space-Efficient Statistically Good
//! Algorithms for Random Number Generation" (O'Neill, 2014).
//!
//! Own code, because a seed has to give the same text in every later version.

const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;
/// Any stream does; never change it, texts depend on it.
const STREAM: u128 = 54;

#[derive(Debug, Clone)]
pub struct Pcg64 {
    state: u128,
    increment: u128,
}

impl Pcg64 {
    pub fn new(seed: u64) -> Self {
        Self::with_stream(u128::from(seed), STREAM)
    }

    /// `pcg64_srandom_r` of the reference implementation.
    fn with_stream(seed: u128, stream: u128) -> Self {
        let increment = (stream << 1) | 1;
        let mut pcg = Pcg64 { state: increment.wrapping_add(seed), increment };
        pcg.step();
        pcg
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    pub fn next_u64(&mut self) -> u64 {
        self.step();
        let folded = ((self.state >> 64) as u64) ^ (self.state as u64);
        folded.rotate_right((self.state >> 122) as u32)
    }

    /// Uniform in [0, 1), 53 bits.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers that the reference implementation's own check prints for seed 42, stream 54.
    #[test]
    fn reference_sequence() {
        let mut pcg = Pcg64::with_stream(42, 54);
        let expected: [u64; 6] = [
            0x86b1_da1d_7206_2b68,
            0x1304_aa46_c985_3d39,
            0xa367_0e9e_0dd5_0358,
            0xf909_0e52_9a7d_ae00,
            0xc85b_9fd8_3799_6f2c,
            0x6061_21f8_e391_9196,
        ];
        assert_eq!(expected.map(|_| pcg.next_u64()), expected);
    }

    #[test]
    fn numbers_are_in_the_unit_interval() {
        let mut pcg = Pcg64::new(0);
        let mean =
            (0..4096).map(|_| pcg.next_f64()).inspect(|x| assert!((0.0..1.0).contains(x))).sum::<f64>()
                / 4096.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }
}

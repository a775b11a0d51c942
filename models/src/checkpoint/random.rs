//! Random weights for benchmarks: values that are a function of (seed, tensor name, element number) alone.
//!
//! A counter-based generator: element i of a tensor hashes `key + i * golden_ratio` with the finalizer of SplitMix64
//! (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), so that any piece of a tensor can be
//! made at any time and in any order. The normal distribution is approximated by the sum of the four 16-bit parts of the
//! hash (Irwin-Hall): mean and variance are exact, the tails end at 3.46 standard deviations. The values are part of
//! what "--random-weights SEED" means: a change here changes benchmark artifacts.

/// How the values of a tensor are spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Distribution {
    Constant(f32),
    Uniform { low: f32, high: f32 },
    Normal { mean: f32, deviation: f32 },
}

/// The generator of one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomTensor {
    key: u64,
    distribution: Distribution,
}

const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;

/// Finalizer of SplitMix64.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// FNV-1a, 64 bit: a hash of the name that stays the same across versions of Rust.
fn hash_name(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3))
}

/// What the values of a name are drawn with.
pub fn key(seed: u64, name: &str) -> u64 {
    mix(mix(seed.wrapping_add(GOLDEN_RATIO)) ^ hash_name(name))
}

impl RandomTensor {
    pub fn new(seed: u64, name: &str, distribution: Distribution) -> RandomTensor {
        RandomTensor { key: key(seed, name), distribution }
    }

    fn bits(&self, element: usize) -> u64 {
        mix(self.key.wrapping_add((element as u64).wrapping_mul(GOLDEN_RATIO)))
    }

    /// Elements from number `start` on.
    pub fn fill(&self, start: usize, out: &mut [f32]) {
        match self.distribution {
            Distribution::Constant(value) => out.fill(value),
            Distribution::Uniform { low, high } => {
                let scale = (high - low) / (1u64 << 24) as f32;
                for (i, value) in out.iter_mut().enumerate() {
                    // Below `high` also where the sum would round up to it.
                    let sample = low + (self.bits(start + i) >> 40) as f32 * scale;
                    *value = if sample < high { sample } else { low };
                }
            }
            Distribution::Normal { mean, deviation } => {
                // The sum of four uniform integers below 2^16 has mean 2 * 65535 and variance (2^32 - 1) / 3.
                let scale = deviation / (((1u64 << 32) - 1) as f32 / 3.0).sqrt();
                for (i, value) in out.iter_mut().enumerate() {
                    let bits = self.bits(start + i);
                    let sum =
                        (bits & 0xffff) + ((bits >> 16) & 0xffff) + ((bits >> 32) & 0xffff) + (bits >> 48);
                    *value = mean + (sum as i32 - 131_070) as f32 * scale;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(tensor: RandomTensor, count: usize) -> Vec<f32> {
        let mut out = vec![0.0; count];
        tensor.fill(0, &mut out);
        out
    }

    fn mean_and_deviation(values: &[f32]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().map(|&x| x as f64).sum::<f64>() / n;
        let variance = values.iter().map(|&x| (x as f64 - mean).powi(2)).sum::<f64>() / n;
        (mean, variance.sqrt())
    }

    #[test]
    fn normal_has_the_stated_moments_and_tails() {
        let all =
            values(RandomTensor::new(0, "w", Distribution::Normal { mean: 1.0, deviation: 0.02 }), 200_000);
        let (mean, deviation) = mean_and_deviation(&all);
        assert!((mean - 1.0).abs() < 3e-4, "{mean}");
        assert!((deviation - 0.02).abs() < 2e-4, "{deviation}");
        let beyond = all.iter().filter(|&&x| (x - 1.0).abs() > 0.04).count() as f64 / all.len() as f64;
        assert!((0.03..0.06).contains(&beyond), "share beyond two deviations: {beyond}, normal has 0.0455");
        assert!(all.iter().all(|x| (x - 1.0).abs() <= 0.0694));
    }

    #[test]
    fn uniform_stays_in_its_range_and_fills_it() {
        let all = values(RandomTensor::new(7, "w", Distribution::Uniform { low: -5.0, high: 3.0 }), 100_000);
        let (mean, deviation) = mean_and_deviation(&all);
        assert!((mean + 1.0).abs() < 0.03, "{mean}");
        assert!((deviation - 8.0 / 12f64.sqrt()).abs() < 0.03, "{deviation}");
        assert!(all.iter().all(|x| (-5.0..3.0).contains(x)));
    }

    #[test]
    fn pieces_equal_the_whole_and_neighbours_are_not_correlated() {
        let tensor = RandomTensor::new(3, "blocks.0.key", Distribution::Normal { mean: 0.0, deviation: 1.0 });
        let all = values(tensor, 10_000);
        let mut piece = vec![0.0; 77];
        tensor.fill(4321, &mut piece);
        assert_eq!(piece, all[4321..4398]);
        let lag: f64 = all.windows(2).map(|w| (w[0] * w[1]) as f64).sum::<f64>() / 9_999.0;
        assert!(lag.abs() < 0.05, "{lag}");
    }

    #[test]
    fn seed_and_name_matter_and_the_sequence_is_fixed() {
        let normal = Distribution::Normal { mean: 0.0, deviation: 0.02 };
        let first = values(RandomTensor::new(0, "a", normal), 4);
        assert_ne!(first, values(RandomTensor::new(1, "a", normal), 4));
        assert_ne!(first, values(RandomTensor::new(0, "b", normal), 4));
        let bits: Vec<u64> = (0..2).map(|i| RandomTensor::new(0, "a", normal).bits(i)).collect();
        assert_eq!(bits, EXPECTED_BITS);
    }

    /// Computed by an independent program from the description in the module's comment.
    const EXPECTED_BITS: [u64; 2] = [0x18a4_9f4b_61b5_b9f0, 0xed70_bc3e_66fe_33ac];
}

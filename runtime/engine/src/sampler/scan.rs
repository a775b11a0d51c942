//! Passes over all logits. A vocabulary has up to 256 thousand tokens, of which few matter: vector
//! instructions find the largest logit of a block, and most blocks need no more than that.

use mlcc_text::TokenId;

use super::{Candidate, compare_candidates};

const BLOCK: usize = 64;
/// Parallel accumulators, which the compiler keeps in vectors.
const LANES: usize = 16;

/// The most probable token, of equal ones that of the lowest id; `None` if no logit is a number.
pub(super) fn find_best(logits: &[f32]) -> Option<Candidate> {
    let mut best = f32::NEG_INFINITY;
    let mut found = None;
    for (block, of_block) in logits.chunks(BLOCK).enumerate() {
        let largest = block_max(of_block);
        if largest > best {
            (best, found) = (largest, Some((block, of_block)));
        }
    }
    let (block, of_block) = found?;
    finite_candidates(block, of_block).find(|c| c.logit == best)
}

/// Puts all tokens whose logits are at least `floor`, by id, in place of what was there.
pub(super) fn candidates_above(logits: &[f32], floor: f32, candidates: &mut Vec<Candidate>) {
    candidates.clear();
    for (block, of_block) in logits.chunks(BLOCK).enumerate() {
        if block_max(of_block) >= floor {
            candidates.extend(finite_candidates(block, of_block).filter(|c| c.logit >= floor));
        }
    }
}

/// The k most probable ones, sorted.
pub(super) fn find_top_k(logits: &[f32], k: usize, candidates: &mut Vec<Candidate>) {
    let mut floor = f32::NEG_INFINITY;
    for (block, of_block) in logits.chunks(BLOCK).enumerate() {
        if block_max(of_block) <= floor {
            continue;
        }
        for candidate in finite_candidates(block, of_block) {
            // Ids ascend, so an equal logit comes after those that are already in.
            if candidate.logit > floor {
                candidates.push(candidate);
                if candidates.len() == buffer_size(k) {
                    candidates.select_nth_unstable_by(k - 1, compare_candidates);
                    candidates.truncate(k);
                    floor = candidates[k - 1].logit;
                }
            }
        }
    }
    candidates.sort_unstable_by(compare_candidates);
    candidates.truncate(k);
}

/// Candidates that [`find_top_k`] collects before it drops the lower ones.
pub(super) fn buffer_size(k: usize) -> usize {
    2 * k + 64
}

/// The sum of `exp((logit - best) / temperature)` over all logits that are numbers, of which `best` is the
/// largest. In f32, with an error of at most 1e-6 of the sum.
pub(super) fn sum_weights(logits: &[f32], best: f32, temperature: f32) -> f64 {
    let scale = std::f32::consts::LOG2_E / temperature;
    let weight = |logit: f32| {
        let finite = if logit > f32::MAX { f32::MAX } else { logit };
        exp2_of_negative((finite - best) * scale)
    };
    let of_block = |block: &[f32]| {
        let (whole, rest) = block.as_chunks::<LANES>();
        let mut sums = [0.0_f32; LANES];
        for of_lanes in whole {
            sums = std::array::from_fn(|i| sums[i] + weight(of_lanes[i]));
        }
        let rest = rest.iter().map(|&logit| weight(logit));
        f64::from(sums.into_iter().chain(rest).sum::<f32>())
    };
    logits.chunks(BLOCK).map(of_block).sum()
}

/// `2^x` for x that are at most zero; 0 below -126 and where x is no number.
fn exp2_of_negative(x: f32) -> f32 {
    // `(2^r - 1) / r` for r up to 1/2 in size, the polynomial of the kernels.
    const P: [f32; 6] =
        [1.545_316_3e-4, 1.339_086_3e-3, 9.618_083e-3, 5.550_357e-2, 2.402_265e-1, std::f32::consts::LN_2];
    // 1.5 * 2^23 leaves the integer nearest to x in the low bits; 127 more make it an exponent.
    const MAGIC: f32 = 12_582_912.0 + 127.0;
    let shifted = x + MAGIC;
    let r = x - (shifted - MAGIC);
    let p = P.into_iter().fold(0.0, |sum, c| sum * r + c);
    let power = f32::from_bits(shifted.to_bits() << 23);
    let y = power + power * (p * r);
    if x >= -126.0 { y } else { 0.0 }
}

/// The largest of them as [`finite_candidates`] gives it; minus infinity if none is a number.
fn block_max(logits: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = logits.as_chunks::<LANES>();
    for of_lanes in whole {
        lanes = std::array::from_fn(|i| larger(lanes[i], of_lanes[i]));
    }
    for (lane, &logit) in lanes.iter_mut().zip(rest) {
        *lane = larger(*lane, logit);
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, larger).min(f32::MAX)
}

/// All logits of a block that are numbers. Plus infinity becomes the largest number, so that differences stay
/// numbers.
fn finite_candidates(block: usize, logits: &[f32]) -> impl Iterator<Item = Candidate> + '_ {
    let first = block * BLOCK;
    let numbers = logits.iter().enumerate().filter(|(_, logit)| **logit > f32::NEG_INFINITY);
    numbers.map(move |(i, &logit)| Candidate {
        id: (first + i) as TokenId,
        // Adding zero turns -0 into 0: they are equal, and sorting must find them so.
        logit: logit.min(f32::MAX) + 0.0,
        probability: 0.0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits of every kind, with equal ones far apart; lengths that leave parts of blocks and of lanes.
    fn logits(len: usize) -> Vec<f32> {
        let odd = [f32::NAN, f32::NEG_INFINITY, -0.0, 0.0, f32::MIN, 1e-40, -1e-40];
        let value = |i: usize| match i % 31 {
            0 => odd[i / 31 % odd.len()],
            _ => ((i * 2_654_435_761) % 1009) as f32 / 50.0 - 12.0,
        };
        (0..len).map(value).collect()
    }

    fn sorted(logits: &[f32]) -> Vec<Candidate> {
        let mut all: Vec<Candidate> = finite_candidates(0, logits).collect();
        all.sort_by(compare_candidates);
        all
    }

    const LENGTHS: [usize; 7] = [1, 2, 17, 64, 65, 1000, 5003];

    #[test]
    fn blocks_give_what_all_candidates_give() {
        for len in LENGTHS {
            let logits = logits(len);
            let all = sorted(&logits);
            assert_eq!(find_best(&logits), all.first().copied(), "{len}");
            let mut found = Vec::new();
            for k in [1, 2, 40, 300] {
                found.clear();
                find_top_k(&logits, k, &mut found);
                assert_eq!(found, all[..k.min(all.len())], "{len} {k}");
            }
            for floor in [f32::MIN, -3.0, 0.0, 7.9, 9.0] {
                candidates_above(&logits, floor, &mut found);
                assert!(found.is_sorted_by_key(|c| c.id));
                found.sort_by(compare_candidates);
                let kept: Vec<Candidate> = all.iter().copied().filter(|c| c.logit >= floor).collect();
                assert_eq!(found, kept, "{len} {floor}");
            }
        }
    }

    #[test]
    fn infinity_counts_as_the_largest_number() {
        let mut logits = logits(200);
        logits[150] = f32::MAX;
        logits[170] = f32::INFINITY;
        assert_eq!(find_best(&logits).map(|c| (c.id, c.logit)), Some((150, f32::MAX)));
        assert_eq!(sum_weights(&logits, f32::MAX, 1.0), 2.0);
        assert_eq!(find_best(&[f32::NAN, f32::NEG_INFINITY]), None);
    }

    #[test]
    fn sums_of_weights_are_those_of_f64() {
        for len in LENGTHS {
            let logits = logits(len);
            let Some(best) = find_best(&logits) else { continue };
            for temperature in [0.05_f32, 0.7, 1.0, 30.0] {
                let of = |l: f32| (f64::from(l - best.logit) / f64::from(temperature)).exp();
                let want: f64 = finite_candidates(0, &logits).map(|c| of(c.logit)).sum();
                let got = sum_weights(&logits, best.logit, temperature);
                assert!((got - want).abs() <= 1e-6 * want, "{len} {temperature}: {got} {want}");
            }
        }
    }
}

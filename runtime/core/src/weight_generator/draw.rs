//! Random values by place.

use super::{FloatType, PieceContent, RandomDraw, ValueDistribution};

const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;
/// Signs of scales are drawn with another key than codes, whose places they share.
const SIGNS: u64 = 0x5851_f42d_4c95_7f2d;

/// Word number `index` of a key: SplitMix64.
#[inline]
fn word(key: u64, index: u64) -> u64 {
    let mut x = key.wrapping_add(index.wrapping_mul(GOLDEN_RATIO));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Fills `out` with periods of the draw from number `first` on.
pub(super) fn fill_periods(draw: &RandomDraw, first: u64, out: &mut [u8]) {
    let mut place = first * draw.period_bytes();
    let mut rest = out;
    while !rest.is_empty() {
        for piece in &draw.pieces {
            let (here, behind) = std::mem::take(&mut rest).split_at_mut(piece.bytes as usize);
            match piece.content {
                PieceContent::Fill(byte) => here.fill(byte),
                PieceContent::Codes => fill_codes(draw.key, place, here),
                PieceContent::Scales(scale) => fill_scales(draw.key, place, scale, here),
                PieceContent::Floats(float, spread) => {
                    fill_floats(draw.key, place / float.value_bytes(), float, spread, here)
                }
            }
            rest = behind;
            place += piece.bytes;
        }
    }
}

/// Byte `i` of the key's words, for `i` from `place` on.
fn fill_codes(key: u64, place: u64, out: &mut [u8]) {
    let skip = (place % 8) as usize;
    let head = if skip == 0 { 0 } else { (8 - skip).min(out.len()) };
    let (begin, rest) = out.split_at_mut(head);
    begin.copy_from_slice(&word(key, place / 8).to_le_bytes()[skip..skip + head]);
    let next = place.div_ceil(8);
    let (words, end) = rest.as_chunks_mut::<8>();
    let behind = next + words.len() as u64;
    for (index, out) in (next..).zip(words) {
        *out = word(key, index).to_le_bytes();
    }
    end.copy_from_slice(&word(key, behind).to_le_bytes()[..end.len()]);
}

fn fill_scales(key: u64, place: u64, scale: u16, out: &mut [u8]) {
    for (index, out) in (place / 2..).zip(out.as_chunks_mut::<2>().0) {
        let sign = (word(key ^ SIGNS, index) >> 63) as u16;
        *out = (scale ^ sign << 15).to_le_bytes();
    }
}

fn fill_floats(key: u64, first: u64, float: FloatType, spread: ValueDistribution, out: &mut [u8]) {
    match spread {
        ValueDistribution::Normal { mean, deviation } => {
            // The sum of four uniform integers below 2^16 has mean 2 * 65535 and variance (2^32 - 1) / 3.
            let scale = deviation / (((1_u64 << 32) - 1) as f32 / 3.0).sqrt();
            store_values(float, first, out, |index| {
                let bits = word(key, index);
                let sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
                mean + (sum as i32 - 131_070) as f32 * scale
            });
        }
        ValueDistribution::Uniform { low, high } => {
            let scale = (high - low) / (1_u64 << 24) as f32;
            store_values(float, first, out, |index| low + (word(key, index) >> 40) as f32 * scale);
        }
    }
}

/// Values number `first` and on, each in its type.
#[inline]
fn store_values(float: FloatType, first: u64, out: &mut [u8], value: impl Fn(u64) -> f32) {
    match float {
        FloatType::F32 => {
            let places = out.as_chunks_mut::<4>().0;
            (first..).zip(places).for_each(|(index, out)| *out = value(index).to_le_bytes());
        }
        FloatType::F16 => {
            let places = out.as_chunks_mut::<2>().0;
            (first..).zip(places).for_each(|(index, out)| *out = f16_bits(value(index)).to_le_bytes());
        }
        FloatType::BF16 => {
            let places = out.as_chunks_mut::<2>().0;
            let bits = |value: f32| (value.to_bits() >> 16) as u16;
            (first..).zip(places).for_each(|(index, out)| *out = bits(value(index)).to_le_bytes());
        }
    }
}

/// The f16 next to zero's side: zero in place of subnormal numbers, the largest one in place of larger ones.
#[inline]
pub(super) fn f16_bits(value: f32) -> u16 {
    const SMALLEST: u32 = 113 << 23;
    const LARGEST: u32 = (143 << 23) - 1;
    let bits = value.to_bits();
    let magnitude = (bits & 0x7fff_ffff).min(LARGEST);
    let half = if magnitude < SMALLEST { 0 } else { (magnitude - (112 << 23)) >> 13 };
    (bits >> 16 & 0x8000) as u16 | half as u16
}

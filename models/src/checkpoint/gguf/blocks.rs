//! Block formats of ggml: how a block of quantized weights reads back (`dequantize_row_*` of `ggml-quants.c`).
//!
//! Products and sums are done in f32 in the order of that code, so the values are the same to the last bit.

use super::super::stored_type::StoredType;
use half::f16;

/// Weights in a block of the simple formats.
pub const SMALL: usize = 32;

/// Reads whole blocks. `bytes` and `out` have the lengths that [`StoredType::checked_bytes`] relates; types that are no
/// block types leave `out` as it is.
pub fn dequantize(dtype: StoredType, bytes: &[u8], out: &mut [f32]) {
    let read: fn(&[u8], &mut [f32]) = match dtype {
        StoredType::Q4_0 => q4_0,
        StoredType::Q4_1 => q4_1,
        StoredType::Q5_0 => q5_0,
        StoredType::Q5_1 => q5_1,
        StoredType::Q8_0 => q8_0,
        StoredType::Q4K => q4_k,
        StoredType::Q5K => q5_k,
        StoredType::Q6K => q6_k,
        StoredType::Q2K => q2_k,
        StoredType::Q3K => q3_k,
        StoredType::Iq4Nl => iq4_nl,
        StoredType::Iq4Xs => iq4_xs,
        StoredType::Mxfp4 => mxfp4,
        StoredType::Nvfp4 => nvfp4,
        _ => return,
    };
    let (elements, size) = dtype.block();
    for (block, values) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(elements)) {
        read(block, values);
    }
}

fn read_half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Scale, then 16 bytes: low nibbles are weights 0 to 15, high ones 16 to 31.
fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = read_half(block, 0);
    for (j, &byte) in block[2..18].iter().enumerate() {
        out[j] = (i32::from(byte & 15) - 8) as f32 * d;
        out[j + 16] = (i32::from(byte >> 4) - 8) as f32 * d;
    }
}

/// Scale and minimum, then as Q4_0.
fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (read_half(block, 0), read_half(block, 2));
    for (j, &byte) in block[4..20].iter().enumerate() {
        out[j] = f32::from(byte & 15) * d + m;
        out[j + 16] = f32::from(byte >> 4) * d + m;
    }
}

/// The fifth bits of 32 weights, one bit each.
fn fifth_bits(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn q5_0(block: &[u8], out: &mut [f32]) {
    let (d, high) = (read_half(block, 0), fifth_bits(&block[2..6]));
    for (j, &byte) in block[6..22].iter().enumerate() {
        let bit = |at: usize| (high >> at & 1) << 4;
        out[j] = ((u32::from(byte & 15) | bit(j)) as i32 - 16) as f32 * d;
        out[j + 16] = ((u32::from(byte >> 4) | bit(j + 16)) as i32 - 16) as f32 * d;
    }
}

fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m, high) = (read_half(block, 0), read_half(block, 2), fifth_bits(&block[4..8]));
    for (j, &byte) in block[8..24].iter().enumerate() {
        let bit = |at: usize| (high >> at & 1) << 4;
        out[j] = (u32::from(byte & 15) | bit(j)) as f32 * d + m;
        out[j + 16] = (u32::from(byte >> 4) | bit(j + 16)) as f32 * d + m;
    }
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = read_half(block, 0);
    for (value, &code) in out.iter_mut().zip(&block[2..34]) {
        *value = f32::from(code as i8) * d;
    }
}

/// Scale and minimum (6 bits each) of the eight groups of 32 in a block of Q4_K or Q5_K.
fn scale_and_minimum(group: usize, packed: &[u8]) -> (f32, f32) {
    let (scale, minimum) = match group {
        0..4 => (packed[group] & 63, packed[group + 4] & 63),
        _ => (
            packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
            packed[group + 4] >> 4 | packed[group] >> 6 << 4,
        ),
    };
    (f32::from(scale), f32::from(minimum))
}

/// `d`, `dmin`, 12 bytes of scales, 128 bytes: per 64 weights 32 bytes, low nibbles first.
fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (read_half(block, 0), read_half(block, 2));
    let (scales, codes) = (&block[4..16], &block[16..144]);
    for (group, values) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = scale_and_minimum(group, scales);
        let (scale, minimum) = (d * scale, dmin * minimum);
        let shift = 4 * (group % 2);
        for (value, &byte) in values.iter_mut().zip(&codes[32 * (group / 2)..]) {
            *value = scale * f32::from(byte >> shift & 15) - minimum;
        }
    }
}

/// As Q4_K with a fifth bit of each weight in 32 bytes before the nibbles: bit `g` of byte `j` for weight `j` of group `g`.
fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (read_half(block, 0), read_half(block, 2));
    let (scales, high, codes) = (&block[4..16], &block[16..48], &block[48..176]);
    for (group, values) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = scale_and_minimum(group, scales);
        let (scale, minimum) = (d * scale, dmin * minimum);
        let shift = 4 * (group % 2);
        for (j, value) in values.iter_mut().enumerate() {
            let code = codes[32 * (group / 2) + j] >> shift & 15 | (high[j] >> group & 1) << 4;
            *value = scale * f32::from(code) - minimum;
        }
    }
}

/// 128 bytes of low four bits, 64 bytes of high two bits, 16 scales (int8), `d`. Each half of the block has 128 weights,
/// of which numbers `j`, `j+32`, `j+64`, `j+96` share a byte of high bits.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let d = read_half(block, 208);
    for (half, values) in out.chunks_exact_mut(128).enumerate() {
        let low = &block[64 * half..64 * half + 64];
        let high = &block[128 + 32 * half..160 + 32 * half];
        let scales = &block[192 + 8 * half..200 + 8 * half];
        for (quarter, values) in values.chunks_exact_mut(32).enumerate() {
            for (j, value) in values.iter_mut().enumerate() {
                let nibble = low[32 * (quarter % 2) + j] >> (4 * (quarter / 2)) & 15;
                let code = i32::from(nibble | (high[j] >> (2 * quarter) & 3) << 4) - 32;
                let scale = f32::from(scales[2 * quarter + j / 16] as i8);
                *value = d * scale * code as f32;
            }
        }
    }
}

/// 16 scales and minima of 4 bits, 64 bytes of codes, `d`, `dmin`. Each half of the block has 128 weights, of which numbers `j`,
/// `j+32`, `j+64`, `j+96` share a byte.
fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, codes) = (&block[..16], &block[16..80]);
    let (d, dmin) = (read_half(block, 80), read_half(block, 82));
    for (group, values) in out.chunks_exact_mut(16).enumerate() {
        let (half, quarter) = (group / 8, group % 8 / 2);
        let (scale, minimum) = (d * f32::from(scales[group] & 15), dmin * f32::from(scales[group] >> 4));
        let codes = &codes[32 * half + 16 * (group % 2)..];
        for (value, &byte) in values.iter_mut().zip(codes) {
            *value = scale * f32::from(byte >> (2 * quarter) & 3) - minimum;
        }
    }
}

/// 32 bytes of third bits (bit `2 * half + quarter` of byte `j`), 64 bytes of low two bits as in Q2_K, 16 scales of 6 bits in 12
/// bytes, `d`.
fn q3_k(block: &[u8], out: &mut [f32]) {
    let (high, codes, scales, d) = (&block[..32], &block[32..96], &block[96..108], read_half(block, 108));
    for (group, values) in out.chunks_exact_mut(16).enumerate() {
        let (half, quarter) = (group / 8, group % 8 / 2);
        let low = scales[group % 8] >> (4 * (group / 8)) & 15;
        let scale = low | (scales[8 + group % 4] >> (2 * (group / 4)) & 3) << 4;
        let scale = d * f32::from(scale as i8 - 32);
        let at = 16 * (group % 2);
        for (j, value) in values.iter_mut().enumerate() {
            let code = (codes[32 * half + at + j] >> (2 * quarter) & 3) as i8;
            let missing = if high[at + j] >> (4 * half + quarter) & 1 == 0 { 4 } else { 0 };
            *value = scale * f32::from(code - missing);
        }
    }
}

/// What the codes of the IQ4 formats stand for.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Low nibbles are weights 0 to 15, high ones 16 to 31.
fn dequantize_by_table(codes: &[u8], scale: f32, table: &[i8; 16], out: &mut [f32]) {
    let half = codes.len();
    for (j, &byte) in codes.iter().enumerate() {
        out[j] = scale * f32::from(table[usize::from(byte & 15)]);
        out[j + half] = scale * f32::from(table[usize::from(byte >> 4)]);
    }
}

fn iq4_nl(block: &[u8], out: &mut [f32]) {
    dequantize_by_table(&block[2..18], read_half(block, 0), &IQ4, out);
}

/// `d`, high two bits of eight scales, their low four bits, 128 bytes of codes.
fn iq4_xs(block: &[u8], out: &mut [f32]) {
    let (d, high) = (read_half(block, 0), u16::from_le_bytes([block[2], block[3]]));
    for (group, values) in out.chunks_exact_mut(32).enumerate() {
        let low = block[4 + group / 2] >> (4 * (group % 2)) & 15;
        let scale = low | ((high >> (2 * group) & 3) as u8) << 4;
        let codes = &block[8 + 16 * group..24 + 16 * group];
        dequantize_by_table(codes, d * f32::from(scale as i8 - 32), &IQ4, values);
    }
}

/// Twice the values of the 4-bit floats; their scales are halved for it.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// An exponent with bias 128, then the codes. 255 stands for no number, as in OCP's definition.
fn mxfp4(block: &[u8], out: &mut [f32]) {
    let scale = match block[0] {
        255 => f32::NAN,
        exponent => 2f64.powi(i32::from(exponent) - 128) as f32,
    };
    dequantize_by_table(&block[1..17], scale, &E2M1, out);
}

/// Four scales in E4M3 without a sign, then the codes of four groups of 16. 0x7f stands for 0 there.
fn nvfp4(block: &[u8], out: &mut [f32]) {
    for (group, values) in out.chunks_exact_mut(16).enumerate() {
        let (code, exponent) = (block[group], i32::from(block[group] >> 3 & 15));
        let mantissa = f32::from(code & 7);
        let scale = match (code, exponent) {
            (0x7f, _) => 0.0,
            (_, 0) => mantissa * 2f32.powi(-9),
            _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
        };
        dequantize_by_table(&block[4 + 8 * group..12 + 8 * group], 0.5 * scale, &E2M1, values);
    }
}

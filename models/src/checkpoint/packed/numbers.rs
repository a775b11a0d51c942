//! Numbers of 4 and 8 bits: what each code stands for.

use half::f16;

/// OCP 8-bit float with 4 bits of exponent (bias 7) and 3 of mantissa: no infinities, NaN where all of them are set.
pub fn decode_e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code < 128 { size } else { -size }
}

/// The upper half of an f16.
pub fn decode_e5m2(code: u8) -> f32 {
    let value = f16::from_bits(u16::from(code) << 8).to_f32();
    if value.is_finite() { value } else { f32::NAN }
}

/// OCP 4-bit float: 2 bits of exponent, 1 of mantissa.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Exponent of a power of two, with bias 127; NaN for 255, which stands for none.
pub fn decode_e8m0(code: u8) -> f32 {
    match code {
        255 => f32::NAN,
        code => 2f64.powi(i32::from(code) - 127) as f32,
    }
}

/// Numbers of 8 bits by a function.
pub fn decode_table(value: fn(u8) -> f32) -> Vec<f32> {
    (0..=u8::MAX).map(value).collect()
}

/// Signed numbers of 8 bits.
pub fn decode_signed(code: u8) -> f32 {
    f32::from(code as i8)
}

/// Unsigned numbers of `1 << bits_log2` bits, less `offset`.
pub fn unsigned_values(bits_log2: u32, offset: i32) -> Vec<f32> {
    (0..1i32 << (1 << bits_log2)).map(|code| (code - offset) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_of_eight_bits() {
        let values =
            [(0x00, 0.0), (0x01, 0.001953125), (0x08, 0.015625), (0x38, 1.0), (0x7e, 448.0), (0xb9, -1.125)];
        for (code, value) in values {
            assert_eq!(decode_e4m3(code), value, "{code:#x}");
        }
        assert!(decode_e4m3(0x7f).is_nan() && decode_e4m3(0xff).is_nan());
        assert_eq!(
            (decode_e5m2(0x3c), decode_e5m2(0x7b), decode_e5m2(0x81)),
            (1.0, 57344.0, -2f32.powi(-16))
        );
        assert!(decode_e5m2(0x7c).is_nan() && decode_e5m2(0xff).is_nan());
        assert_eq!(
            (decode_e8m0(127), decode_e8m0(0), decode_e8m0(254)),
            (1.0, 2f32.powi(-127), 2f32.powi(127))
        );
        assert!(decode_e8m0(255).is_nan());
    }

    #[test]
    fn whole_numbers() {
        assert_eq!(unsigned_values(1, 1), [-1.0, 0.0, 1.0, 2.0]);
        assert_eq!(unsigned_values(2, 8)[15], 7.0);
        assert_eq!((unsigned_values(3, 0)[255], decode_signed(255)), (255.0, -1.0));
    }
}

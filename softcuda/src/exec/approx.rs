//! The approximate functions of the ISA. Their results are as far from the truth as the ISA permits: an exact
//! result is moved by a share of the documented error that follows from the operand's bits, so code that
//! needs more than is promised fails.

/// A number from -1 to 1, by the bits of an operand.
fn share(bits: u32) -> f64 {
    let mixed = bits.wrapping_mul(0x9e37_79b1) ^ bits.rotate_left(15).wrapping_mul(0x85eb_ca6b);
    f64::from(mixed as i32) / 2_147_483_648.0
}

/// The exact value with a relative error of up to `bound`. One half of the last place is left for rounding to
/// f32.
fn relative(exact: f64, bound: f64, bits: u32) -> f32 {
    if exact == 0.0 || !exact.is_finite() {
        return exact as f32;
    }
    (exact * (1.0 + share(bits) * bound)) as f32
}

const ULP: f64 = 1.0 / 8_388_608.0;

/// `2^x` with an error of at most 2 ulp.
pub fn ex2(x: f32) -> f32 {
    relative(f64::from(x).exp2(), 0.75 * ULP, x.to_bits())
}

/// Absolute error 2^-22 for operands from 0.5 to 2, relative error 2^-22 elsewhere.
pub fn lg2(x: f32) -> f32 {
    let exact = f64::from(x).log2();
    match x {
        0.5..=2.0 if exact != 0.0 => (exact + share(x.to_bits()) * 1.7 * ULP) as f32,
        _ => relative(exact, 1.5 * ULP, x.to_bits()),
    }
}

/// `1 / x` with an error of at most 1 ulp.
pub fn rcp(x: f32) -> f32 {
    relative(1.0 / f64::from(x), 0.25 * ULP, x.to_bits())
}

/// Relative error 2^-22.9.
pub fn rsqrt(x: f32) -> f32 {
    relative(1.0 / f64::from(x).sqrt(), 0.5 * ULP, x.to_bits())
}

/// Relative error 2^-23.
pub fn sqrt(x: f32) -> f32 {
    relative(f64::from(x).sqrt(), 0.4 * ULP, x.to_bits())
}

/// Absolute error 2^-20.5 from -2 pi to 2 pi; none is stated beyond.
pub fn sin(x: f32) -> f32 {
    (f64::from(x).sin() + share(x.to_bits()) * 5.0 * ULP) as f32
}

/// The cosine, with the error of [`sin`].
pub fn cos(x: f32) -> f32 {
    (f64::from(x).cos() + share(x.to_bits()) * 5.0 * ULP) as f32
}

/// Relative error 2^-11.
pub fn tanh(x: f32) -> f32 {
    relative(f64::from(x).tanh(), 4000.0 * ULP, x.to_bits())
}

/// The quotient with an error of at most 2 ulp; 0 for finite numbers over divisors beyond 2^126.
pub fn div(x: f32, y: f32) -> f32 {
    let large = y.is_finite() && y.abs() > f32::from_bits(0x7e80_0000);
    if large {
        return if x.is_infinite() { f32::NAN } else { 0f32.copysign(x) * 1f32.copysign(y) };
    }
    div_full(x, y)
}

/// The quotient with an error of at most 2 ulp, for all divisors.
pub fn div_full(x: f32, y: f32) -> f32 {
    relative(f64::from(x) / f64::from(y), 0.75 * ULP, x.to_bits() ^ y.to_bits())
}

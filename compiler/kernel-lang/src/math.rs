//! Transcendental functions as primitive operations, so that no back end needs a math library.
//!
//! All work on f32 with any number of lanes; [`expand_math`] takes f16 and bf16 through f32 and rounds once.
//! No step relies on a fused multiply-add: reductions subtract products that are exact in f32 (Cody and
//! Waite).
//!
//! Largest errors against f64 (units in the last place of the f32 result; measured by `tests/all/math.rs`,
//! which sweeps the floats and fails above these):
//!
//! | function | error | notes |
//! |---|---|---|
//! | [`exp`] | 1.5 ulp | 0 below -103.98, inf above 88.73, one step of rounding among denormals |
//! | [`exp_below_zero`] | 1.5 ulp | for x <= 0 only; 0 below -69 |
//! | [`exp2_below_zero`] | 1.5 ulp | for x <= 0 only; 0 below -100 |
//! | [`log`] | 2 ulp | denormals included; log(0) = -inf, log(x < 0) = NaN |
//! | [`tanh`] | 2.5 ulp | odd, exactly +-1 from about 9 |
//! | [`sigmoid`] | 3 ulp | relative also in the left tail |
//! | [`erf`] | 2 ulp | odd |
//! | rsqrt | 1.5 ulp | `1 / sqrt(x)` |
//! | recip | 0.5 ulp | `1 / x` |
//! | [`sin`], [`cos`] | 1.2e-7 absolute for abs(x) <= 1e5 | the error grows with x beyond; inf gives NaN |
//!
//! NaN gives NaN everywhere. Polynomials: exp, log, tanh, sin and cos as in Cephes (S. Moshier, single
//! precision), erf as published by N. Juffa.

mod expand;

use crate::Val;
use mlcc_ir::kernel::{ExprType, UnOp};
use mlcc_ir::types::DType;
use std::f64::consts::{FRAC_2_PI, FRAC_PI_2, LN_2, LOG2_E};

pub use expand::{expand_math, is_long};

/// `(exp(r) - 1 - r) / r^2` for r up to ln 2 / 2 in size.
const EXP: [f64; 6] =
    [1.987_569_15e-4, 1.398_199_95e-3, 8.333_451_9e-3, 4.166_579_6e-2, 1.666_666_55e-1, 5.000_000_1e-1];

/// `(2^r - 1) / r` for r up to 1/2 in size: through the zeros of a Chebyshev polynomial.
const EXP2: [f64; 6] =
    [1.545_316_29e-4, 1.339_086_34e-3, 9.618_082_56e-3, 5.550_357_11e-2, 2.402_265_08e-1, LN_2];

/// `(log(1 + f) - f + f^2 / 2) / f^3` for 1 + f from sqrt(1/2) to sqrt(2).
const LOG: [f64; 9] = [
    7.037_683_6e-2,
    -1.151_461_03e-1,
    1.167_699_87e-1,
    -1.242_014_08e-1,
    1.424_932_3e-1,
    -1.666_805_77e-1,
    2.000_071_48e-1,
    -2.499_999_4e-1,
    3.333_333_1e-1,
];

/// `(tanh(x) - x) / x^3` in `x^2`, for x up to 0.625 in size.
const TANH: [f64; 5] = [-5.704_988_73e-3, 2.063_908_88e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328_2e-1];

/// `(log(1 - erf(t)) + t) / t` for t from 0.93 to 4.
const ERF_TAIL: [f64; 7] = [
    -1.728_534_7e-5,
    3.831_971_3e-4,
    -3.883_964_4e-3,
    2.425_462_2e-2,
    -1.067_778_77e-1,
    -6.348_468_7e-1,
    -1.287_175_1e-1,
];

/// `erf(x) / x - 1` in `x^2`, for x up to 0.93 in size.
const ERF_CENTRE: [f64; 6] =
    [-5.967_617e-4, 4.991_194e-3, -2.676_813_4e-2, 1.128_199_25e-1, -3.761_253_4e-1, 1.283_791_66e-1];

/// `(sin(r) - r) / r^3` and `(cos(r) - 1 + r^2 / 2) / r^4` in `r^2`, for r up to pi / 4 in size.
const SIN: [f64; 3] = [-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1];
const COS: [f64; 3] = [2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2];

/// 1.5 * 2^23: added to a float below 2^22 in size, it leaves the nearest integer in the low bits.
const MAGIC: f32 = 12_582_912.0;
/// The bias of the exponent of a float, and the exponent's first bit.
const BIAS: i64 = 127;
const EXPONENT: i64 = 23;

/// The fastest way for a machine to find `x / (1 + e)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QuotientMethod {
    /// A division, which overlaps with the multiplications of other values.
    Division,
    /// A polynomial: a division would keep units from multiplying.
    Polynomial,
}

/// `op(x)` in primitive operations.
fn function<'k>(op: UnOp, x: Val<'k>, quotient: QuotientMethod) -> Val<'k> {
    match op {
        UnOp::Exp => exp(x),
        UnOp::Log => log(x),
        UnOp::Tanh => tanh(x, quotient),
        UnOp::Sigmoid => sigmoid(x, quotient),
        UnOp::Erf => erf(x),
        UnOp::Sin => sin(x),
        UnOp::Cos => cos(x),
        UnOp::Rsqrt => 1.0 / x.sqrt(),
        UnOp::Recip => 1.0 / x,
        UnOp::Neg | UnOp::Abs | UnOp::Not | UnOp::Sqrt | UnOp::Floor | UnOp::Round => x.unary(op),
    }
}

// ---- bits and pieces

/// The bits of floats as i32.
fn bits(x: Val) -> Val {
    x.bits_as(ExprType::vector(DType::I32, x.lanes()))
}

/// The floats that have these bits.
fn float(bits: Val) -> Val {
    bits.bits_as(ExprType::vector(DType::F32, bits.lanes()))
}

/// A polynomial by Horner's rule, highest coefficient first.
fn polynomial<'k>(x: Val<'k>, coefficients: &[f64]) -> Val<'k> {
    coefficients[1..].iter().fold(x.like(coefficients[0]), |sum, &c| sum.fma(x, c))
}

/// `value` with the sign of `sign`; `value` must not be negative.
fn copy_sign<'k>(value: Val<'k>, sign: Val<'k>) -> Val<'k> {
    float(bits(value) | (bits(sign) & i64::from(i32::MIN)))
}

/// The larger of `x` and `low`, NaN where x is NaN: one instruction on x86, where the maximum of two numbers
/// that may both be NaN takes four.
fn at_least(x: Val, low: f64) -> Val {
    x.lt(low).select(low, x)
}

/// The smaller of `x` and `high`, NaN where x is NaN.
fn at_most(x: Val, high: f64) -> Val {
    x.like(high).lt(x).select(high, x)
}

/// `y`, but 0 where x is below `low`.
fn zero_below<'k>(x: Val<'k>, low: f64, y: Val<'k>) -> Val<'k> {
    x.lt(low).select(0.0, y)
}

/// Nearest integer of a float below 2^22 in size, as i32 and without a conversion instruction.
pub fn nearest_i32(x: Val) -> Val {
    bits(x + f64::from(MAGIC)) - i64::from(MAGIC.to_bits())
}

/// The same as f32.
fn nearest(x: Val) -> Val {
    let magic = f64::from(MAGIC);
    (x + magic) - magic
}

/// The low bits of a number as the exponent of another.
fn power(low_bits: Val) -> Val {
    float(low_bits << EXPONENT)
}

// ---- exponentials

/// `(shifted, p)` with `exp(x) = 2^n (1 + p)` for an integer n: the low bits of `shifted` are those of
/// `n + bias`.
fn exp_parts(x: Val, bias: i64) -> (Val, Val) {
    // The same trick as in `nearest`, with the bias on top.
    let magic = f64::from(MAGIC) + bias as f64;
    let shifted = x.fma(LOG2_E, magic);
    let n = shifted - magic;
    // r = x - n ln 2 in two steps: the first constant has 10 bits, so its product is exact.
    let r = (-n).fma(0.693_359_375, x);
    let r = (-n).fma(-2.121_944_4e-4, r);
    (shifted, polynomial(r, &EXP).fma(r * r, r))
}

/// `exp(x)` for x from -87 to 88, where results are normal numbers.
fn exp_between(x: Val) -> Val {
    let (shifted, p) = exp_parts(x, BIAS);
    let power = power(bits(shifted));
    p.fma(power, power)
}

pub fn exp(x: Val) -> Val {
    let x = at_most(at_least(x, -104.0), 89.0);
    // 2^n as two factors, so that results reach infinity and the denormals: with twice the bias of exponents,
    // half of the low bits are the biased exponent of one and the rest that of the other. The bits above do
    // not survive the shifts.
    let (shifted, p) = exp_parts(x, 2 * BIAS);
    let exponents = bits(shifted);
    let half = exponents >> 1;
    let (a, b) = (power(half), power(exponents - half));
    p.fma(a, a) * b
}

/// `exp(x)` for x from -104 to 0; of numbers below something that is not NaN.
fn exp_of_negative(x: Val) -> Val {
    // Scaled up by 2^64, so that 2^n is a normal number.
    let (shifted, p) = exp_parts(x, BIAS + 64);
    let power = power(bits(shifted));
    p.fma(power, power) * (1.0 / (1_u128 << 64) as f64)
}

/// `exp(x)` for f32 x that are at most zero, as the weights of a softmax need it: no overflow, and results
/// below 1e-30 are zero, so that products with them are not denormal (which would be slow).
pub fn exp_below_zero(x: Val) -> Val {
    // Results below the limit have no meaning.
    zero_below(x, -69.0, exp_between(x))
}

/// `2^x` for f32 x that are at most zero, otherwise as [`exp_below_zero`]: 12 operations in place of 15,
/// since the part of x that is no integer is exact.
pub fn exp2_below_zero(x: Val) -> Val {
    // The same trick as in `nearest`, with the bias of exponents on top.
    let magic = f64::from(MAGIC) + BIAS as f64;
    let shifted = x + magic;
    let r = x - (shifted - magic);
    let p = polynomial(r, &EXP2) * r;
    let power = power(bits(shifted));
    zero_below(x, -100.0, p.fma(power, power))
}

// ---- functions of exponentials

/// `x / (1 + e)` for e from 0 to 1.
fn over_one_plus<'k>(x: Val<'k>, e: Val<'k>, quotient: QuotientMethod) -> Val<'k> {
    match quotient {
        QuotientMethod::Division => x / (e + 1.0),
        QuotientMethod::Polynomial => x * recip_above_one(e),
    }
}

/// `1 / (1 + e)` for e from 0 to 1: the best polynomial of degree 3 (`1 - (1 + e) p` is a Chebyshev
/// polynomial, at most 1/577), then one step of third order.
fn recip_above_one(e: Val) -> Val {
    let p = polynomial(e, &[-128.0 / 577.0, 384.0 / 577.0, -544.0 / 577.0, 576.0 / 577.0]);
    // The difference is exact.
    let rest = (-e).fma(p, 1.0 - p);
    p.fma(rest.fma(rest, rest), p)
}

pub fn tanh(x: Val, quotient: QuotientMethod) -> Val {
    let (a, z) = (x.abs(), x * x);
    let small = (polynomial(z, &TANH) * z).fma(x, x);
    // (1 - exp(-2a)) / (1 + exp(-2a))
    let e = exp_below_zero(a * -2.0);
    let large = copy_sign(over_one_plus(1.0 - e, e, quotient), x);
    a.lt(0.625).select(small, large)
}

pub fn sigmoid(x: Val, quotient: QuotientMethod) -> Val {
    // exp of a negative number only, so that nothing overflows: e / (1 + e) left of 0, 1 / (1 + e) right of
    // it.
    let minus = -x.abs();
    let e = zero_below(minus, -104.0, exp_of_negative(minus));
    over_one_plus(x.lt(0.0).select(e, 1.0), e, quotient)
}

pub fn erf(x: Val) -> Val {
    let (t, s) = (x.abs(), x * x);
    // 1 - exp(polynomial) in the tail; |x| is held below 4, where erf is 1 to f32.
    let held = at_most(t, 4.0);
    let e = exp_of_negative(polynomial(held, &ERF_TAIL).fma(held, -held));
    let tail = copy_sign(1.0 - e, x);
    let centre = polynomial(s, &ERF_CENTRE).fma(x, x);
    t.lt(0.927_734_375).select(centre, tail)
}

// ---- logarithm

pub fn log(x: Val) -> Val {
    // Denormals are scaled into the normal range first.
    let small = x.lt(f64::from(f32::MIN_POSITIVE));
    let scaled = bits(small.select(x * 16_777_216.0, x));
    // x = m * 2^e with m in [sqrt(1/2), sqrt(2)).
    let e = (scaled - 0x3f35_04f3) >> EXPONENT;
    let m = float(scaled - (e << EXPONENT));
    let e = e.cast(DType::F32) + small.select(x.like(-24.0), 0.0);
    let y = log_near_one(m - 1.0, e);
    // Limits.
    let y = x.equals(f64::INFINITY).select(f64::INFINITY, y);
    let y = x.equals(0.0).select(f64::NEG_INFINITY, y);
    let y = x.lt(0.0).select(f64::NAN, y);
    x.differs(x).select(x, y)
}

/// `log(1 + f) + e ln 2` for 1 + f in [sqrt(1/2), sqrt(2)).
fn log_near_one<'k>(f: Val<'k>, e: Val<'k>) -> Val<'k> {
    let ff = f * f;
    let p = polynomial(f, &LOG) * f * ff;
    let p = e.fma(-2.121_944_4e-4, p);
    let p = ff.fma(-0.5, p);
    e.fma(0.693_359_375, f + p)
}

// ---- circular functions

pub fn sin(x: Val) -> Val {
    sin_of_quarters(x, 0)
}

pub fn cos(x: Val) -> Val {
    sin_of_quarters(x, 1)
}

/// `sin(x + quarters * pi / 2)`.
fn sin_of_quarters(x: Val, quarters: i64) -> Val {
    // q = nearest integer to x / (pi/2); r = x - q pi/2 with pi/2 in parts of 8 bits, whose products with q
    // below 2^16 are exact, and a rest.
    let (q, quadrant) = (nearest(x * FRAC_2_PI), nearest_i32(x * FRAC_2_PI));
    let r = PI_HALF_PARTS.iter().fold(x, |r, &part| (-q).fma(part, r));
    let z = r * r;
    let sin = polynomial(z, &SIN).fma(z * r, r);
    let cos = polynomial(z, &COS).fma(z * z, z.fma(-0.5, 1.0));
    let quadrant = quadrant + quarters;
    let y = (quadrant & 1).differs(0).select(cos, sin);
    (quadrant & 2).differs(0).select(-y, y)
}

/// pi/2 as three numbers of at most 8 bits and the rest.
const PI_HALF_PARTS: [f64; 4] = pi_half_parts();

const fn pi_half_parts() -> [f64; 4] {
    // Multiples of 2^-7, 2^-15, 2^-23: each takes the next 8 bits.
    let a = (FRAC_PI_2 * 128.0) as i64 as f64 / 128.0;
    let b = ((FRAC_PI_2 - a) * 32_768.0) as i64 as f64 / 32_768.0;
    let c = ((FRAC_PI_2 - a - b) * 8_388_608.0) as i64 as f64 / 8_388_608.0;
    [a, b, c, FRAC_PI_2 - a - b - c]
}

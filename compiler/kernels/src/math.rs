//! Transcendental functions as primitive operations, so that no back end needs a math library.
//!
//! All work on f32 with any number of lanes; f16 and bf16 go through f32 and are rounded once. No step relies on a fused
//! multiply-add: reductions subtract products that are exact in f32 (Cody and Waite).
//!
//! Largest errors against f64 (units in the last place of the f32 result; measured by `tests/math.rs`, which sweeps the
//! floats and fails above these):
//!
//! | function | error | notes |
//! |---|---|---|
//! | exp | 1.5 ulp | 0 below -103.98, inf above 88.73, one step of rounding among denormals |
//! | [`exp_below_zero`] | 1.5 ulp | for x <= 0 only; 0 below -69 |
//! | [`exp2_below_zero`] | 1.5 ulp | for x <= 0 only; 0 below -100 |
//! | log | 2 ulp | denormals included; log(0) = -inf, log(x < 0) = NaN |
//! | tanh | 2.5 ulp | odd, exactly +-1 from about 9 |
//! | sigmoid | 3 ulp | relative also in the left tail |
//! | erf | 2 ulp | odd |
//! | rsqrt | 1.5 ulp | `1 / sqrt(x)` |
//! | recip | 0.5 ulp | `1 / x` |
//! | sin, cos | 1.2e-7 absolute for abs(x) <= 1e5 | beyond that the error grows with x; inf gives NaN |
//!
//! NaN gives NaN everywhere. Polynomials: exp, log, tanh, sin and cos as in Cephes (S. Moshier, single precision), erf as
//! published by N. Juffa.

use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::{BinOp, Expr, ExprId, Kernel, Literal, Ty, UnOp};
use mlcc_ir::rewrite::rewrite_exprs;
use mlcc_ir::types::DType;
use std::collections::HashMap;

/// `(exp(r) - 1 - r) / r^2` for r up to ln 2 / 2 in size.
const EXP: [f64; 6] =
    [1.987_569_15e-4, 1.398_199_95e-3, 8.333_451_9e-3, 4.166_579_6e-2, 1.666_666_55e-1, 5.000_000_1e-1];

/// `(2^r - 1) / r` for r up to 1/2 in size: through the zeros of a Chebyshev polynomial.
const EXP2: [f64; 6] = [
    1.545_316_29e-4,
    1.339_086_34e-3,
    9.618_082_56e-3,
    5.550_357_11e-2,
    2.402_265_08e-1,
    std::f64::consts::LN_2,
];

/// How a machine finds `x / (1 + e)` soonest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Quotient {
    /// By a division, which goes on beside the multiplications of other values.
    Division,
    /// By a polynomial: a division would keep units from multiplying.
    Polynomial,
}

/// Replaces every operation that is not [`UnOp::is_primitive`].
pub fn expand_math(kernel: &Kernel, quotient: Quotient) -> Kernel {
    let mut ranges = Ranges::default();
    rewrite_exprs(kernel, |kb, expr, ty| match *expr {
        Expr::Unary(UnOp::Exp, x) if ty.dtype == DType::F32 && ranges.is_plain_exp(kb, x) => {
            Some(Lanes { kb, lanes: ty.lanes, quotient }.exp_between(x))
        }
        Expr::Unary(op, x) if !op.is_primitive() => {
            let value = expand(kb, op, x, ty, quotient);
            match op {
                UnOp::Sigmoid => ranges.0.insert(value, (0.0, 1.0)),
                UnOp::Tanh => ranges.0.insert(value, (-1.0, 1.0)),
                _ => None,
            };
            Some(value)
        }
        _ => None,
    })
}

/// Between which numbers the results of expanded functions lie (or NaN).
#[derive(Default)]
struct Ranges(HashMap<ExprId, (f64, f64)>);

impl Ranges {
    /// True if `exp(x)` and all powers of two on the way to it are normal numbers.
    fn is_plain_exp(&self, kb: &KernelBuilder, x: ExprId) -> bool {
        self.of(kb, x).is_some_and(|(low, high)| low >= -87.0 && high <= 88.0)
    }

    fn of(&self, kb: &KernelBuilder, x: ExprId) -> Option<(f64, f64)> {
        if let Some(&range) = self.0.get(&x) {
            return Some(range);
        }
        match *kb.kernel().exprs.expr(x) {
            Expr::Binary(BinOp::Mul, a, b) => {
                let (value, factor) = match (constant(kb, a), constant(kb, b)) {
                    (Some(factor), _) => (b, factor),
                    (None, Some(factor)) => (a, factor),
                    (None, None) => return None,
                };
                let (low, high) = self.of(kb, value)?;
                let (a, b) = (low * factor, high * factor);
                Some((a.min(b), a.max(b)))
            }
            _ => None,
        }
    }
}

/// The number that all lanes have.
fn constant(kb: &KernelBuilder, x: ExprId) -> Option<f64> {
    match kb.kernel().exprs.expr(x) {
        Expr::Splat(x) => constant(kb, *x),
        Expr::Const(Literal::Float(bits)) => Some(f64::from_bits(*bits)),
        _ => None,
    }
}

/// True for functions that take many steps, each of which waits for the one before it.
pub fn is_long(op: UnOp) -> bool {
    !op.is_primitive() && !matches!(op, UnOp::Rsqrt | UnOp::Recip)
}

/// `op(x)` in primitive operations; `x` is of type `ty`, a float type.
fn expand(kb: &mut KernelBuilder, op: UnOp, x: ExprId, ty: Ty, quotient: Quotient) -> ExprId {
    let wide = kb.cast(x, DType::F32);
    let result = Lanes { kb, lanes: ty.lanes, quotient }.function(op, wide);
    kb.cast(result, ty.dtype)
}

/// `exp(x)` for f32 x that are at most zero, as the weights of a softmax need it: no overflow, and results below 1e-30 are
/// zero, so that products with them are not denormal (which would be slow).
pub fn exp_below_zero(kb: &mut KernelBuilder, x: ExprId) -> ExprId {
    let lanes = kb.ty(x).lanes;
    Lanes { kb, lanes, quotient: Quotient::Polynomial }.exp_below_zero(x)
}

/// `2^x` for f32 x that are at most zero, otherwise as [`exp_below_zero`]: 12 operations in place of 15, since the part of x
/// that is no integer is exact.
pub fn exp2_below_zero(kb: &mut KernelBuilder, x: ExprId) -> ExprId {
    let lanes = kb.ty(x).lanes;
    Lanes { kb, lanes, quotient: Quotient::Polynomial }.exp2_below_zero(x)
}

/// Builds f32 (and i32) expressions of one number of lanes.
struct Lanes<'a> {
    kb: &'a mut KernelBuilder,
    lanes: u32,
    quotient: Quotient,
}

impl Lanes<'_> {
    fn function(&mut self, op: UnOp, x: ExprId) -> ExprId {
        match op {
            UnOp::Exp => self.exp(x),
            UnOp::Log => self.log(x),
            UnOp::Tanh => self.tanh(x),
            UnOp::Sigmoid => self.sigmoid(x),
            UnOp::Erf => self.erf(x),
            UnOp::Sin => self.sin_cos(x, 0),
            UnOp::Cos => self.sin_cos(x, 1),
            UnOp::Rsqrt => {
                let root = self.kb.unary(UnOp::Sqrt, x);
                self.recip(root)
            }
            UnOp::Recip => self.recip(x),
            UnOp::Neg | UnOp::Abs | UnOp::Not | UnOp::Sqrt | UnOp::Floor | UnOp::Round => {
                self.kb.unary(op, x)
            }
        }
    }

    fn f(&mut self, value: f64) -> ExprId {
        self.kb.constant(value, Ty::vector(DType::F32, self.lanes))
    }
    fn i(&mut self, value: i64) -> ExprId {
        let one = self.kb.int_of(value, DType::I32);
        self.kb.splat(one, self.lanes)
    }
    fn bits(&mut self, x: ExprId) -> ExprId {
        self.kb.bitcast(x, Ty::vector(DType::I32, self.lanes))
    }
    fn float(&mut self, bits: ExprId) -> ExprId {
        self.kb.bitcast(bits, Ty::vector(DType::F32, self.lanes))
    }
    fn recip(&mut self, x: ExprId) -> ExprId {
        let one = self.f(1.0);
        self.kb.div(one, x)
    }
    /// `cond` is true where x is NaN; gives NaN there and `value` elsewhere.
    fn keep_nan(&mut self, x: ExprId, value: ExprId) -> ExprId {
        let nan = self.kb.binary(BinOp::Ne, x, x);
        self.kb.select(nan, x, value)
    }
    /// Horner's rule, highest coefficient first.
    fn poly(&mut self, x: ExprId, coefficients: &[f64]) -> ExprId {
        let mut sum = self.f(coefficients[0]);
        for &c in &coefficients[1..] {
            let c = self.f(c);
            sum = self.kb.fma(sum, x, c);
        }
        sum
    }
    /// `value` with the sign of `sign`; `value` must not be negative.
    fn copy_sign(&mut self, value: ExprId, sign: ExprId) -> ExprId {
        let (v, s) = (self.bits(value), self.bits(sign));
        let mask = self.i(i64::from(i32::MIN));
        let s = self.kb.binary(BinOp::And, s, mask);
        let joined = self.kb.binary(BinOp::Or, v, s);
        self.float(joined)
    }
    /// Nearest integer of a float below 2^22 in size: as f32 and as i32. Adding 1.5 * 2^23 leaves the integer in the low
    /// bits, which needs no conversion instruction.
    fn nearest(&mut self, x: ExprId) -> (ExprId, ExprId) {
        const MAGIC: f32 = 12_582_912.0;
        let magic = self.f(MAGIC.into());
        let shifted = self.kb.add(x, magic);
        let float = self.kb.sub(shifted, magic);
        let bits = self.bits(shifted);
        let base = self.i(MAGIC.to_bits().into());
        (float, self.kb.sub(bits, base))
    }

    /// The larger of `x` and `low`, NaN where x is NaN: one instruction on x86, where the maximum of two numbers that may
    /// both be NaN takes four.
    fn at_least(&mut self, x: ExprId, low: f64) -> ExprId {
        let low = self.f(low);
        let below = self.kb.lt(x, low);
        self.kb.select(below, low, x)
    }
    /// The smaller of `x` and `high`, NaN where x is NaN.
    fn at_most(&mut self, x: ExprId, high: f64) -> ExprId {
        let high = self.f(high);
        let above = self.kb.lt(high, x);
        self.kb.select(above, high, x)
    }

    /// `(shifted, p)` with `exp(x) = 2^n (1 + p)` for an integer n: the low bits of `shifted` are those of `n + bias`.
    fn exp_parts(&mut self, x: ExprId, bias: i64) -> (ExprId, ExprId) {
        // As in `nearest`, with the bias on top.
        let (log2e, magic) = (self.f(std::f64::consts::LOG2_E), self.f(12_582_912.0 + bias as f64));
        let shifted = self.kb.fma(x, log2e, magic);
        let n = self.kb.sub(shifted, magic);
        // r = x - n ln 2 in two steps: the first constant has 10 bits, so its product is exact.
        let minus_n = self.kb.unary(UnOp::Neg, n);
        let (c1, c2) = (self.f(0.693_359_375), self.f(-2.121_944_4e-4));
        let r = self.kb.fma(minus_n, c1, x);
        let r = self.kb.fma(minus_n, c2, r);
        let p = self.poly(r, &EXP);
        let rr = self.kb.mul(r, r);
        (shifted, self.kb.fma(p, rr, r))
    }

    /// `exp(x)` for x from -87 to 88, where results are normal numbers.
    fn exp_between(&mut self, x: ExprId) -> ExprId {
        let (shifted, p) = self.exp_parts(x, 127);
        let power = self.shifted_to_exponent(shifted);
        self.kb.fma(p, power, power)
    }

    fn exp(&mut self, x: ExprId) -> ExprId {
        let x = self.at_least(x, -104.0);
        let x = self.at_most(x, 89.0);
        // 2^n as two factors, so that results reach infinity and the denormals: with twice the bias of exponents, half of the
        // low bits are the biased exponent of one and the rest that of the other. The bits above do not survive the shifts.
        let (shifted, p) = self.exp_parts(x, 2 * 127);
        let (one, shift, bits) = (self.i(1), self.i(23), self.bits(shifted));
        let half = self.kb.binary(BinOp::Shr, bits, one);
        let rest = self.kb.sub(bits, half);
        let [a, b] = [half, rest].map(|exponent| {
            let bits = self.kb.binary(BinOp::Shl, exponent, shift);
            self.float(bits)
        });
        let y = self.kb.fma(p, a, a);
        self.kb.mul(y, b)
    }

    /// `exp(x)` for x from -104 to 0; of numbers below something that is not NaN.
    fn exp_of_negative(&mut self, x: ExprId) -> ExprId {
        // Scaled up by 2^64, so that 2^n is a normal number.
        let (shifted, p) = self.exp_parts(x, 127 + 64);
        let power = self.shifted_to_exponent(shifted);
        let y = self.kb.fma(p, power, power);
        let down = self.f(1.0 / (1_u128 << 64) as f64);
        self.kb.mul(y, down)
    }

    /// The low bits of a number as the exponent of another.
    fn shifted_to_exponent(&mut self, x: ExprId) -> ExprId {
        let (shift, bits) = (self.i(23), self.bits(x));
        let power = self.kb.binary(BinOp::Shl, bits, shift);
        self.float(power)
    }

    /// `x / (1 + e)` for e from 0 to 1.
    fn over_one_plus(&mut self, x: ExprId, e: ExprId) -> ExprId {
        let one = self.f(1.0);
        match self.quotient {
            Quotient::Division => {
                let below = self.kb.add(e, one);
                self.kb.div(x, below)
            }
            Quotient::Polynomial => {
                let factor = self.recip_above_one(e);
                self.kb.mul(x, factor)
            }
        }
    }

    /// `1 / (1 + e)` for e from 0 to 1: the best polynomial of degree 3 (`1 - (1 + e) p` is a Chebyshev polynomial, at most
    /// 1/577), then one step of third order.
    fn recip_above_one(&mut self, e: ExprId) -> ExprId {
        let p = self.poly(e, &[-128.0 / 577.0, 384.0 / 577.0, -544.0 / 577.0, 576.0 / 577.0]);
        // The difference is exact.
        let one = self.f(1.0);
        let rest = self.kb.sub(one, p);
        let minus_e = self.kb.unary(UnOp::Neg, e);
        let rest = self.kb.fma(minus_e, p, rest);
        let step = self.kb.fma(rest, rest, rest);
        self.kb.fma(p, step, p)
    }

    fn exp_below_zero(&mut self, x: ExprId) -> ExprId {
        let y = self.exp_between(x);
        // What comes out below is no number that means anything.
        self.zero_below(x, -69.0, y)
    }

    fn exp2_below_zero(&mut self, x: ExprId) -> ExprId {
        // As in `nearest`, with the bias of exponents on top.
        let magic = self.f(12_582_912.0 + 127.0);
        let shifted = self.kb.add(x, magic);
        let n = self.kb.sub(shifted, magic);
        let r = self.kb.sub(x, n);
        let p = self.poly(r, &EXP2);
        let p = self.kb.mul(p, r);
        let power = self.shifted_to_exponent(shifted);
        let y = self.kb.fma(p, power, power);
        self.zero_below(x, -100.0, y)
    }

    /// `y`, but 0 where x is below `low`.
    fn zero_below(&mut self, x: ExprId, low: f64, y: ExprId) -> ExprId {
        let (low, nothing) = (self.f(low), self.f(0.0));
        let gone = self.kb.lt(x, low);
        self.kb.select(gone, nothing, y)
    }

    fn log(&mut self, x: ExprId) -> ExprId {
        // Denormals are scaled into the normal range first.
        let (tiny, up) = (self.f(f32::MIN_POSITIVE.into()), self.f(16_777_216.0));
        let small = self.kb.lt(x, tiny);
        let scaled = self.kb.mul(x, up);
        let x1 = self.kb.select(small, scaled, x);
        let (minus24, zero) = (self.f(-24.0), self.f(0.0));
        let extra = self.kb.select(small, minus24, zero);
        // x = m * 2^e with m in [sqrt(1/2), sqrt(2)).
        let bits = self.bits(x1);
        let offset = self.i(0x3f35_04f3);
        let moved = self.kb.sub(bits, offset);
        let shift = self.i(23);
        let e = self.kb.binary(BinOp::Shr, moved, shift);
        let back = self.kb.binary(BinOp::Shl, e, shift);
        let mantissa = self.kb.sub(bits, back);
        let m = self.float(mantissa);
        let e = self.kb.cast(e, DType::F32);
        let e = self.kb.add(e, extra);
        let one = self.f(1.0);
        let f = self.kb.sub(m, one);
        let y = self.log1p_poly(f, e);
        // Limits.
        let inf = self.f(f64::INFINITY);
        let is_inf = self.kb.binary(BinOp::Eq, x, inf);
        let y = self.kb.select(is_inf, inf, y);
        let minus_inf = self.f(f64::NEG_INFINITY);
        let is_zero = self.kb.binary(BinOp::Eq, x, zero);
        let y = self.kb.select(is_zero, minus_inf, y);
        let nan = self.f(f64::NAN);
        let negative = self.kb.lt(x, zero);
        let y = self.kb.select(negative, nan, y);
        self.keep_nan(x, y)
    }

    /// `log(1 + f) + e ln 2` for 1 + f in [sqrt(1/2), sqrt(2)).
    fn log1p_poly(&mut self, f: ExprId, e: ExprId) -> ExprId {
        let p = self.poly(
            f,
            &[
                7.037_683_6e-2,
                -1.151_461_03e-1,
                1.167_699_87e-1,
                -1.242_014_08e-1,
                1.424_932_3e-1,
                -1.666_805_77e-1,
                2.000_071_48e-1,
                -2.499_999_4e-1,
                3.333_333_1e-1,
            ],
        );
        let ff = self.kb.mul(f, f);
        let p = self.kb.mul(p, f);
        let p = self.kb.mul(p, ff);
        let (c2, c1, minus_half) = (self.f(-2.121_944_4e-4), self.f(0.693_359_375), self.f(-0.5));
        let p = self.kb.fma(e, c2, p);
        let p = self.kb.fma(ff, minus_half, p);
        let y = self.kb.add(f, p);
        self.kb.fma(e, c1, y)
    }

    fn tanh(&mut self, x: ExprId) -> ExprId {
        let a = self.kb.unary(UnOp::Abs, x);
        let z = self.kb.mul(x, x);
        let p = self
            .poly(z, &[-5.704_988_73e-3, 2.063_908_88e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328_2e-1]);
        let p = self.kb.mul(p, z);
        let small = self.kb.fma(p, x, x);
        // (1 - exp(-2a)) / (1 + exp(-2a))
        let two = self.f(-2.0);
        let twice = self.kb.mul(a, two);
        let e = self.exp_below_zero(twice);
        let one = self.f(1.0);
        let numerator = self.kb.sub(one, e);
        let large = self.over_one_plus(numerator, e);
        let large = self.copy_sign(large, x);
        let limit = self.f(0.625);
        let is_small = self.kb.lt(a, limit);
        self.kb.select(is_small, small, large)
    }

    fn sigmoid(&mut self, x: ExprId) -> ExprId {
        // exp of a negative number only, so that nothing overflows: e / (1 + e) left of 0, 1 / (1 + e) right of it.
        let a = self.kb.unary(UnOp::Abs, x);
        let minus = self.kb.unary(UnOp::Neg, a);
        let e = self.exp_of_negative(minus);
        let e = self.zero_below(minus, -104.0, e);
        let (one, zero) = (self.f(1.0), self.f(0.0));
        let left = self.kb.lt(x, zero);
        let numerator = self.kb.select(left, e, one);
        self.over_one_plus(numerator, e)
    }

    fn erf(&mut self, x: ExprId) -> ExprId {
        let t = self.kb.unary(UnOp::Abs, x);
        let s = self.kb.mul(x, x);
        // 1 - exp(polynomial) in the tail; |x| is held below 4, where erf is 1 to f32.
        let tc = self.at_most(t, 4.0);
        let q = self.poly(
            tc,
            &[
                -1.728_534_7e-5,
                3.831_971_3e-4,
                -3.883_964_4e-3,
                2.425_462_2e-2,
                -1.067_778_77e-1,
                -6.348_468_7e-1,
                -1.287_175_1e-1,
            ],
        );
        let minus_t = self.kb.unary(UnOp::Neg, tc);
        let q = self.kb.fma(q, tc, minus_t);
        let e = self.exp_of_negative(q);
        let one = self.f(1.0);
        let tail = self.kb.sub(one, e);
        let tail = self.copy_sign(tail, x);
        let p = self.poly(
            s,
            &[
                -5.967_617e-4,
                4.991_194e-3,
                -2.676_813_4e-2,
                1.128_199_25e-1,
                -3.761_253_4e-1,
                1.283_791_66e-1,
            ],
        );
        let centre = self.kb.fma(p, x, x);
        let limit = self.f(0.927_734_375);
        let is_centre = self.kb.lt(t, limit);
        self.kb.select(is_centre, centre, tail)
    }

    /// `sin(x + quarter * pi / 2)`.
    fn sin_cos(&mut self, x: ExprId, quarter: i64) -> ExprId {
        // q = nearest integer to x / (pi/2); r = x - q pi/2 with pi/2 in parts of 8 bits, whose products with q below
        // 2^16 are exact, and a rest.
        let two_over_pi = self.f(std::f64::consts::FRAC_2_PI);
        let scaled = self.kb.mul(x, two_over_pi);
        let (q, quadrant) = self.nearest(scaled);
        let minus_q = self.kb.unary(UnOp::Neg, q);
        let mut r = x;
        for part in PI_HALF_PARTS {
            let part = self.f(part);
            r = self.kb.fma(minus_q, part, r);
        }
        let z = self.kb.mul(r, r);
        let sin = self.poly(z, &[-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1]);
        let zr = self.kb.mul(z, r);
        let sin = self.kb.fma(sin, zr, r);
        let cos = self.poly(z, &[2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2]);
        let zz = self.kb.mul(z, z);
        let (minus_half, one) = (self.f(-0.5), self.f(1.0));
        let head = self.kb.fma(z, minus_half, one);
        let cos = self.kb.fma(cos, zz, head);
        let shift = self.i(quarter);
        let quadrant = self.kb.add(quadrant, shift);
        let (bit0, bit1, none) = (self.i(1), self.i(2), self.i(0));
        let odd = self.kb.binary(BinOp::And, quadrant, bit0);
        let odd = self.kb.binary(BinOp::Ne, odd, none);
        let y = self.kb.select(odd, cos, sin);
        let negative = self.kb.binary(BinOp::And, quadrant, bit1);
        let negative = self.kb.binary(BinOp::Ne, negative, none);
        let minus_y = self.kb.unary(UnOp::Neg, y);
        self.kb.select(negative, minus_y, y)
    }
}

/// pi/2 as three numbers of at most 8 bits and the rest.
const PI_HALF_PARTS: [f64; 4] = pi_half_parts();

const fn pi_half_parts() -> [f64; 4] {
    let pi_half = std::f64::consts::FRAC_PI_2;
    // Multiples of 2^-7, 2^-15, 2^-23: each takes the next 8 bits.
    let a = (pi_half * 128.0) as i64 as f64 / 128.0;
    let b = ((pi_half - a) * 32_768.0) as i64 as f64 / 32_768.0;
    let c = ((pi_half - a - b) * 8_388_608.0) as i64 as f64 / 8_388_608.0;
    [a, b, c, pi_half - a - b - c]
}

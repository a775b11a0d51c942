//! `cvt`: every pair of types through one exact value in the middle.

use super::fault::{Done, Kind, trouble};
use super::lanes;
use super::registers::{Registers, Sources};
use crate::ptx::op::{Any, Op, Round, Ty, W};

/// A small format of floats.
#[derive(Clone, Copy)]
pub struct Format {
    /// Bits of the significand with the hidden one.
    precision: i32,
    lowest: i32,
    largest: f64,
}

pub const F16: Format = Format { precision: 11, lowest: -14, largest: 65504.0 };
pub const BF16: Format = Format { precision: 8, lowest: -126, largest: 3.389_531_389_251_535e38 };
pub const F32: Format = Format { precision: 24, lowest: -126, largest: f32::MAX as f64 };

fn integral(x: f64, round: Round) -> f64 {
    match round {
        Round::Nearest => x.round_ties_even(),
        Round::Zero => x.trunc(),
        Round::Down => x.floor(),
        Round::Up => x.ceil(),
    }
}

/// 2 to the power `e`, for exponents of f64.
fn power(e: i32) -> f64 {
    f64::from_bits(((e + 1023) as u64) << 52)
}

/// The value of a format that `x` is rounded to.
pub fn round_to(x: f64, to: Format, round: Round) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let exponent = ((x.to_bits() >> 52 & 2047) as i32 - 1023).max(to.lowest);
    // Both factors are powers of two within the range of f64 for all values that matter.
    let place = power((exponent - (to.precision - 1)).max(-1022));
    let rounded = integral(x / place, round) * place;
    if rounded.abs() <= to.largest {
        return if rounded == 0.0 { 0f64.copysign(x) } else { rounded };
    }
    let away = match round {
        Round::Nearest => true,
        Round::Zero => false,
        Round::Down => x < 0.0,
        Round::Up => x > 0.0,
    };
    if away { f64::INFINITY.copysign(x) } else { to.largest.copysign(x) }
}

pub fn f16_bits(x: f64, round: Round) -> u32 {
    if x.is_nan() {
        return 0x7fff;
    }
    u32::from(half::f16::from_f64(round_to(x, F16, round)).to_bits())
}

pub fn bf16_bits(x: f64, round: Round) -> u32 {
    if x.is_nan() {
        return 0x7fff;
    }
    // The rounded value is one of f32 whose lower half is zero.
    (round_to(x, BF16, round) as f32).to_bits() >> 16
}

pub fn f16_value(bits: u32) -> f64 {
    half::f16::from_bits(bits as u16).to_f64()
}

pub fn bf16_value(bits: u32) -> f64 {
    f64::from(f32::from_bits(bits << 16))
}

/// Any value: integers of 64 bits are not all values of f64.
enum Value {
    Int(i128),
    Float(f64),
}

fn value_of(bits: u64, ty: Ty) -> Value {
    match ty {
        Ty::U8 => Value::Int(i128::from(bits as u8)),
        Ty::U16 => Value::Int(i128::from(bits as u16)),
        Ty::U32 => Value::Int(i128::from(bits as u32)),
        Ty::S8 => Value::Int(i128::from(bits as i8)),
        Ty::S16 => Value::Int(i128::from(bits as i16)),
        Ty::S32 => Value::Int(i128::from(bits as i32)),
        Ty::S64 => Value::Int(i128::from(bits as i64)),
        Ty::F16 => Value::Float(f16_value(bits as u32)),
        Ty::BF16 => Value::Float(bf16_value(bits as u32)),
        Ty::F32 => Value::Float(f64::from(f32::from_bits(bits as u32))),
        _ => Value::Int(i128::from(bits)),
    }
}

/// The smallest and the largest integer of a type.
fn range(ty: Ty) -> (i128, i128) {
    let bits = ty.bytes() * 8;
    if ty.signed() { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

/// An integer in the low bits; a signed one is extended to 64 bits by its sign.
fn int_bits(x: i128, ty: Ty) -> u64 {
    match ty {
        Ty::U8 => u64::from(x as u8),
        Ty::U16 => u64::from(x as u16),
        Ty::U32 => u64::from(x as u32),
        Ty::S8 => x as i8 as i64 as u64,
        Ty::S16 => x as i16 as i64 as u64,
        Ty::S32 => x as i32 as i64 as u64,
        _ => x as u64,
    }
}

/// Directions of an integer that f64 cannot hold: rounded to odd, so that what is rounded after it is right.
fn odd(x: i128) -> f64 {
    let magnitude = x.unsigned_abs();
    let spare = (128 - magnitude.leading_zeros()).saturating_sub(50);
    let kept = magnitude >> spare;
    let lost = magnitude & ((1 << spare) - 1) != 0;
    let value = ((kept | u128::from(lost)) << spare) as f64;
    if x < 0 { -value } else { value }
}

struct How {
    to: Ty,
    from: Ty,
    round: Round,
    integral: bool,
    ftz: bool,
    sat: bool,
    relu: bool,
}

fn flush(x: f64) -> f64 {
    if x != 0.0 && x.abs() < f64::from(f32::MIN_POSITIVE) { 0f64.copysign(x) } else { x }
}

fn convert(bits: u64, how: &How) -> u64 {
    let value = value_of(bits, how.from);
    if how.to.integer() {
        let (low, high) = range(how.to);
        let int = match value {
            Value::Int(x) if how.sat => x.clamp(low, high),
            // Without `.sat` the upper bits are cut off.
            Value::Int(x) => x,
            Value::Float(x) => {
                let x = if how.ftz { flush(x) } else { x };
                // Floats are clamped always; NaN becomes 0.
                if x.is_nan() { 0 } else { (integral(x, how.round) as i128).clamp(low, high) }
            }
        };
        return int_bits(int, how.to);
    }
    let mut x = match value {
        Value::Int(x) => odd(x),
        Value::Float(x) if how.ftz && how.from == Ty::F32 => flush(x),
        Value::Float(x) => x,
    };
    if how.integral {
        x = integral(x, how.round);
    }
    if how.sat {
        x = if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) + 0.0 };
    }
    if how.relu && x < 0.0 {
        x = 0.0;
    }
    match how.to {
        Ty::F16 => f16_bits(x, how.round).into(),
        Ty::BF16 => bf16_bits(x, how.round).into(),
        _ if x.is_nan() => 0x7fff_ffff,
        _ => {
            let x = round_to(x, F32, how.round);
            u64::from(((if how.ftz { flush(x) } else { x }) as f32).to_bits())
        }
    }
}

/// What a register of a result holds: the signed are extended to its size, 16 bits have zeros above.
fn fitted(value: u64, to: Ty, d: Any) -> u64 {
    match d {
        Any::W(_) if to.bytes() <= 2 && !to.signed() => value & 0xffff,
        Any::W(_) if to.bytes() == 2 => value & 0xffff,
        _ => value,
    }
}

fn cvt(r: &mut Registers, s: Sources<'_>, how: &How, d: Any, a: Any) -> Done {
    // The frequent ones.
    match (how.to, how.from, d, a, how.sat) {
        (Ty::F32, Ty::F16, Any::W(d), Any::W(a), false) => {
            let out = r.w(s, a)?.map(|x| {
                let y = half::f16::from_bits(x as u16).to_f32();
                if y.is_nan() { 0x7fff_ffff } else { y.to_bits() }
            });
            r.put_w(d, &out, s.m);
            return Ok(());
        }
        (Ty::U64, Ty::U32, Any::D(d), Any::W(a), _) => {
            let out = r.w(s, a)?.map(u64::from);
            r.put_d(d, &out, s.m);
            return Ok(());
        }
        (Ty::U32, Ty::U64, Any::W(d), Any::D(a), false) => {
            let out = r.d(s, a)?.map(|x| x as u32);
            r.put_w(d, &out, s.m);
            return Ok(());
        }
        (Ty::F32, Ty::S32, Any::W(d), Any::W(a), false) if how.round == Round::Nearest => {
            let out = r.w(s, a)?.map(|x| (x as i32 as f32).to_bits());
            r.put_w(d, &out, s.m);
            return Ok(());
        }
        _ => {}
    }
    let a = r.any(s, a)?;
    for lane in lanes(s.m) {
        r.put_lane(d, lane, fitted(convert(a[lane], how), how.to, d));
    }
    Ok(())
}

fn pack(
    r: &mut Registers,
    s: Sources<'_>,
    bf16: bool,
    round: Round,
    relu: bool,
    d: W,
    [a, b]: [W; 2],
) -> Done {
    let (a, b) = (r.w(s, a)?, r.w(s, b)?);
    let half = |bits: u32| {
        let x = f64::from(f32::from_bits(bits));
        let x = if relu && x < 0.0 { 0.0 } else { x };
        if bf16 { bf16_bits(x, round) } else { f16_bits(x, round) }
    };
    let out = std::array::from_fn(|i| half(a[i]) << 16 | half(b[i]));
    r.put_w(d, &out, s.m);
    Ok(())
}

pub fn execute(r: &mut Registers, s: Sources<'_>, op: &Op) -> Done {
    match *op {
        Op::Cvt { to, from, round, integral, ftz, sat, relu, d, a } => {
            let how = How { to, from, round: round.unwrap_or(Round::Nearest), integral, ftz, sat, relu };
            cvt(r, s, &how, d, a)
        }
        Op::CvtPack { bf16, round, relu, d, a, b } => pack(r, s, bf16, round, relu, d, [a, b]),
        _ => Err(trouble(Kind::Undefined, None, "no conversion")),
    }
}

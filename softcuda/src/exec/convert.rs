//! `cvt`: every pair of types through one exact value in the middle.

use super::fault::{ExecResult, FaultKind, trouble};
use super::lanes;
use super::registers::{OperandSources, RegisterFile};
use crate::ptx::op::{AnyRegister, PtxOp, PtxType, RoundingMode, WordRegister};

/// A small format of floats.
#[derive(Clone, Copy)]
pub struct FloatFormat {
    /// Bits of the significand with the hidden one.
    precision: i32,
    lowest: i32,
    largest: f64,
}

pub const F16: FloatFormat = FloatFormat { precision: 11, lowest: -14, largest: 65504.0 };
pub const BF16: FloatFormat = FloatFormat { precision: 8, lowest: -126, largest: 3.389_531_389_251_535e38 };
pub const F32: FloatFormat = FloatFormat { precision: 24, lowest: -126, largest: f32::MAX as f64 };

fn integral(x: f64, round: RoundingMode) -> f64 {
    match round {
        RoundingMode::Nearest => x.round_ties_even(),
        RoundingMode::Zero => x.trunc(),
        RoundingMode::Down => x.floor(),
        RoundingMode::Up => x.ceil(),
    }
}

/// 2 to the power `e`, for exponents of f64.
fn power(e: i32) -> f64 {
    f64::from_bits(((e + 1023) as u64) << 52)
}

/// The value of a format that `x` is rounded to.
pub fn round_to(x: f64, to: FloatFormat, round: RoundingMode) -> f64 {
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
        RoundingMode::Nearest => true,
        RoundingMode::Zero => false,
        RoundingMode::Down => x < 0.0,
        RoundingMode::Up => x > 0.0,
    };
    if away { f64::INFINITY.copysign(x) } else { to.largest.copysign(x) }
}

pub fn f16_bits(x: f64, round: RoundingMode) -> u32 {
    if x.is_nan() {
        return 0x7fff;
    }
    u32::from(half::f16::from_f64(round_to(x, F16, round)).to_bits())
}

pub fn bf16_bits(x: f64, round: RoundingMode) -> u32 {
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
enum ConvertedValue {
    Int(i128),
    Float(f64),
}

fn value_of(bits: u64, ty: PtxType) -> ConvertedValue {
    match ty {
        PtxType::U8 => ConvertedValue::Int(i128::from(bits as u8)),
        PtxType::U16 => ConvertedValue::Int(i128::from(bits as u16)),
        PtxType::U32 => ConvertedValue::Int(i128::from(bits as u32)),
        PtxType::S8 => ConvertedValue::Int(i128::from(bits as i8)),
        PtxType::S16 => ConvertedValue::Int(i128::from(bits as i16)),
        PtxType::S32 => ConvertedValue::Int(i128::from(bits as i32)),
        PtxType::S64 => ConvertedValue::Int(i128::from(bits as i64)),
        PtxType::F16 => ConvertedValue::Float(f16_value(bits as u32)),
        PtxType::BF16 => ConvertedValue::Float(bf16_value(bits as u32)),
        PtxType::F32 => ConvertedValue::Float(f64::from(f32::from_bits(bits as u32))),
        _ => ConvertedValue::Int(i128::from(bits)),
    }
}

/// The smallest and the largest integer of a type.
fn range(ty: PtxType) -> (i128, i128) {
    let bits = ty.bytes() * 8;
    if ty.signed() { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

/// An integer in the low bits; a signed one is extended to 64 bits by its sign.
fn int_bits(x: i128, ty: PtxType) -> u64 {
    match ty {
        PtxType::U8 => u64::from(x as u8),
        PtxType::U16 => u64::from(x as u16),
        PtxType::U32 => u64::from(x as u32),
        PtxType::S8 => x as i8 as i64 as u64,
        PtxType::S16 => x as i16 as i64 as u64,
        PtxType::S32 => x as i32 as i64 as u64,
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

struct ConvertMode {
    to: PtxType,
    from: PtxType,
    round: RoundingMode,
    integral: bool,
    ftz: bool,
    sat: bool,
    relu: bool,
}

fn flush(x: f64) -> f64 {
    if x != 0.0 && x.abs() < f64::from(f32::MIN_POSITIVE) { 0f64.copysign(x) } else { x }
}

fn convert(bits: u64, how: &ConvertMode) -> u64 {
    let value = value_of(bits, how.from);
    if how.to.integer() {
        let (low, high) = range(how.to);
        let int = match value {
            ConvertedValue::Int(x) if how.sat => x.clamp(low, high),
            // Without `.sat` the upper bits are cut off.
            ConvertedValue::Int(x) => x,
            ConvertedValue::Float(x) => {
                let x = if how.ftz { flush(x) } else { x };
                // Floats are clamped always; NaN becomes 0.
                if x.is_nan() { 0 } else { (integral(x, how.round) as i128).clamp(low, high) }
            }
        };
        return int_bits(int, how.to);
    }
    let mut x = match value {
        ConvertedValue::Int(x) => odd(x),
        ConvertedValue::Float(x) if how.ftz && how.from == PtxType::F32 => flush(x),
        ConvertedValue::Float(x) => x,
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
        PtxType::F16 => f16_bits(x, how.round).into(),
        PtxType::BF16 => bf16_bits(x, how.round).into(),
        _ if x.is_nan() => 0x7fff_ffff,
        _ => {
            let x = round_to(x, F32, how.round);
            u64::from(((if how.ftz { flush(x) } else { x }) as f32).to_bits())
        }
    }
}

/// The register content of a result: the signed are extended to its size, 16 bits have zeros above.
fn fitted(value: u64, to: PtxType, d: AnyRegister) -> u64 {
    match d {
        AnyRegister::W(_) if to.bytes() <= 2 && !to.signed() => value & 0xffff,
        AnyRegister::W(_) if to.bytes() == 2 => value & 0xffff,
        _ => value,
    }
}

fn cvt(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    how: &ConvertMode,
    d: AnyRegister,
    a: AnyRegister,
) -> ExecResult {
    // The frequent ones.
    match (how.to, how.from, d, a, how.sat) {
        (PtxType::F32, PtxType::F16, AnyRegister::W(d), AnyRegister::W(a), false) => {
            let out = r.w(s, a)?.map(|x| {
                let y = half::f16::from_bits(x as u16).to_f32();
                if y.is_nan() { 0x7fff_ffff } else { y.to_bits() }
            });
            r.put_w(d, &out, s.m);
            return Ok(());
        }
        (PtxType::U64, PtxType::U32, AnyRegister::D(d), AnyRegister::W(a), _) => {
            let out = r.w(s, a)?.map(u64::from);
            r.put_d(d, &out, s.m);
            return Ok(());
        }
        (PtxType::U32, PtxType::U64, AnyRegister::W(d), AnyRegister::D(a), false) => {
            let out = r.d(s, a)?.map(|x| x as u32);
            r.put_w(d, &out, s.m);
            return Ok(());
        }
        (PtxType::F32, PtxType::S32, AnyRegister::W(d), AnyRegister::W(a), false)
            if how.round == RoundingMode::Nearest =>
        {
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
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    bf16: bool,
    round: RoundingMode,
    relu: bool,
    d: WordRegister,
    [a, b]: [WordRegister; 2],
) -> ExecResult {
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

pub fn execute(r: &mut RegisterFile, s: OperandSources<'_>, op: &PtxOp) -> ExecResult {
    match *op {
        PtxOp::Cvt { to, from, round, integral, ftz, sat, relu, d, a } => {
            let how = ConvertMode {
                to,
                from,
                round: round.unwrap_or(RoundingMode::Nearest),
                integral,
                ftz,
                sat,
                relu,
            };
            cvt(r, s, &how, d, a)
        }
        PtxOp::CvtPack { bf16, round, relu, d, a, b } => pack(r, s, bf16, round, relu, d, [a, b]),
        _ => Err(trouble(FaultKind::Undefined, None, "no conversion")),
    }
}

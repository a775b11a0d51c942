//! Half precision, f16 and bf16, one or two values in a register. Values are computed exactly and rounded
//! once.

use super::alu::put_setp;
use super::convert::{bf16_bits, bf16_value, f16_bits, f16_value};
use super::fault::{ExecResult, FaultKind, trouble};
use super::floats::{apply_one, holds, max, min};
use super::registers::{OperandSources, RegisterFile};
use crate::ptx::op::{FloatFn, FloatOne, HalfFormat, PtxOp, RoundingMode};

fn value(of: HalfFormat, bits: u32) -> f64 {
    if of.bf16 { bf16_value(bits) } else { f16_value(bits) }
}

fn bits(of: HalfFormat, x: f64) -> u32 {
    if of.bf16 { bf16_bits(x, RoundingMode::Nearest) } else { f16_bits(x, RoundingMode::Nearest) }
}

/// `.ftz` of f16: subnormal numbers of that format become zero.
fn flush(of: HalfFormat, x: f64) -> f64 {
    let smallest = if of.bf16 { f64::from(f32::MIN_POSITIVE) } else { 6.103_515_625e-5 };
    if x.abs() < smallest { 0f64.copysign(x) } else { x }
}

/// Applies `f` to each value of registers.
fn each<const N: usize>(of: HalfFormat, x: [u32; N], f: impl Fn([f64; N]) -> f64) -> u32 {
    let part = |shift: u32| bits(of, f(x.map(|x| value(of, x >> shift & 0xffff)))) & 0xffff;
    if of.two { part(0) | part(16) << 16 } else { part(0) }
}

fn two(f: FloatFn, x: f64, y: f64) -> Option<f64> {
    let extreme = |f: fn(f32, f32) -> f32| f64::from(f(x as f32, y as f32));
    let nan = x.is_nan() || y.is_nan();
    Some(match f {
        FloatFn::Add => x + y,
        FloatFn::Sub => x - y,
        FloatFn::Mul => x * y,
        FloatFn::Min => extreme(min),
        FloatFn::Max => extreme(max),
        FloatFn::MinNan => {
            if nan {
                f64::NAN
            } else {
                extreme(min)
            }
        }
        FloatFn::MaxNan => {
            if nan {
                f64::NAN
            } else {
                extreme(max)
            }
        }
        FloatFn::Div | FloatFn::DivApprox | FloatFn::DivFull | FloatFn::CopySign => return None,
    })
}

/// A product and a sum, rounded to odd in f64 so that the last rounding is right.
fn fused(x: f64, y: f64, z: f64) -> f64 {
    // The product of two values of at most 11 bits is exact.
    let product = x * y;
    let sum = product + z;
    let part = sum - product;
    let error = (product - (sum - part)) + (z - part);
    if error == 0.0 || !sum.is_finite() || sum.to_bits() & 1 == 1 {
        return sum;
    }
    let up = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if up { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}

pub fn execute(r: &mut RegisterFile, s: OperandSources<'_>, op: &PtxOp) -> ExecResult {
    match *op {
        PtxOp::HalfFn { of, f, ftz, sat, d, a, b } => {
            if two(f, 1.0, 1.0).is_none() {
                return Err(trouble(FaultKind::Undefined, None, "there is no such instruction of halves"));
            }
            let (a, b) = (r.w(s, a)?, r.w(s, b)?);
            let out = std::array::from_fn(|i| {
                each(of, [a[i], b[i]], |[x, y]| {
                    let (x, y) = if ftz { (flush(of, x), flush(of, y)) } else { (x, y) };
                    finish(of, two(f, x, y).unwrap_or(f64::NAN), ftz, sat, false)
                })
            });
            r.put_w(d, &out, s.m);
        }
        PtxOp::HalfFma { of, ftz, sat, relu, d, a, b, c } => {
            let (a, b, c) = (r.w(s, a)?, r.w(s, b)?, r.w(s, c)?);
            let out = std::array::from_fn(|i| {
                each(of, [a[i], b[i], c[i]], |x| {
                    let [x, y, z] = if ftz { x.map(|x| flush(of, x)) } else { x };
                    finish(of, fused(x, y, z), ftz, sat, relu)
                })
            });
            r.put_w(d, &out, s.m);
        }
        PtxOp::HalfOne { of, f, d, a, ftz } => {
            let sign = if of.two { 0x8000_8000 } else { 0x8000 };
            let a = *r.w(s, a)?;
            let out = match f {
                FloatOne::Neg => a.map(|x| x ^ sign),
                FloatOne::Abs => a.map(|x| x & !sign),
                _ => a.map(|x| each(of, [x], |[x]| f64::from(apply_one(f, x as f32)))),
            };
            let out = if ftz { out.map(|x| each(of, [x], |[x]| flush(of, x))) } else { out };
            r.put_w(d, &out, s.m);
        }
        PtxOp::SetpH { bf16, ftz, s: ref setp, a, b } => {
            let of = HalfFormat { bf16, two: false };
            let number = |x: u32| {
                let x = value(of, x & 0xffff);
                if ftz { flush(of, x) } else { x }
            };
            let (a, b) = (r.w(s, a)?.map(number), r.w(s, b)?.map(number));
            return put_setp(r, s, setp, |i| holds(setp.cmp, a[i] as f32, b[i] as f32));
        }
        _ => return Err(trouble(FaultKind::Undefined, None, "no instruction of halves")),
    }
    Ok(())
}

fn finish(of: HalfFormat, x: f64, ftz: bool, sat: bool, relu: bool) -> f64 {
    let x = match sat {
        true if x.is_nan() => 0.0,
        true => x.clamp(0.0, 1.0),
        false => x,
    };
    let x = if relu && x < 0.0 { 0.0 } else { x };
    if ftz {
        flush(
            of,
            super::convert::round_to(
                x,
                if of.bf16 { super::convert::BF16 } else { super::convert::F16 },
                RoundingMode::Nearest,
            ),
        )
    } else {
        x
    }
}

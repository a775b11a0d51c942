//! Single precision: IEEE 754 with results of NaN in one form, subnormal numbers kept unless `.ftz` flushes
//! them.

use super::alu::{compare, put_setp};
use super::approx;
use super::fault::{ExecResult, FaultKind, trouble};
use super::registers::{OperandSources, RegisterFile};
use super::{LANES, WarpLanes};
use crate::ptx::op::{FloatFn, FloatOne, PtxComparison, PtxOp, SetpOp, WordRegister};

/// The result of an operation that gives no number.
const NAN: u32 = 0x7fff_ffff;

#[inline(always)]
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

#[inline(always)]
fn bits_of(x: f32) -> u32 {
    if x.is_nan() { NAN } else { x.to_bits() }
}

#[inline(always)]
fn saturate(x: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) + 0.0 }
}

/// The smaller one, where -0 is below +0; a NaN loses against a number.
pub fn min(x: f32, y: f32) -> f32 {
    match (x.is_nan(), y.is_nan()) {
        (true, _) => y,
        (_, true) => x,
        _ if x < y || x == y && x.is_sign_negative() => x,
        _ => y,
    }
}

pub fn max(x: f32, y: f32) -> f32 {
    match (x.is_nan(), y.is_nan()) {
        (true, _) => y,
        (_, true) => x,
        _ if x > y || x == y && x.is_sign_positive() => x,
        _ => y,
    }
}

/// An operation of two numbers.
pub fn apply(f: FloatFn, x: f32, y: f32) -> f32 {
    match f {
        FloatFn::Add => x + y,
        FloatFn::Sub => x - y,
        FloatFn::Mul => x * y,
        FloatFn::Div => x / y,
        FloatFn::Min => min(x, y),
        FloatFn::Max => max(x, y),
        FloatFn::MinNan | FloatFn::MaxNan if x.is_nan() || y.is_nan() => f32::NAN,
        FloatFn::MinNan => min(x, y),
        FloatFn::MaxNan => max(x, y),
        FloatFn::DivApprox => approx::div(x, y),
        FloatFn::DivFull => approx::div_full(x, y),
        FloatFn::CopySign => x.copysign(y),
    }
}

pub fn apply_one(f: FloatOne, x: f32) -> f32 {
    match f {
        FloatOne::Neg => -x,
        FloatOne::Abs => x.abs(),
        FloatOne::Sqrt => x.sqrt(),
        FloatOne::Rcp => 1.0 / x,
        FloatOne::SqrtApprox => approx::sqrt(x),
        FloatOne::RcpApprox => approx::rcp(x),
        FloatOne::RsqrtApprox => approx::rsqrt(x),
        FloatOne::Ex2Approx => approx::ex2(x),
        FloatOne::Lg2Approx => approx::lg2(x),
        FloatOne::SinApprox => approx::sin(x),
        FloatOne::CosApprox => approx::cos(x),
        FloatOne::TanhApprox => approx::tanh(x),
    }
}

#[inline(always)]
fn loop2(a: &WarpLanes<u32>, b: &WarpLanes<u32>, f: impl Fn(f32, f32) -> f32) -> WarpLanes<u32> {
    let mut out = [0; LANES];
    for i in 0..LANES {
        out[i] = bits_of(f(f32::from_bits(a[i]), f32::from_bits(b[i])));
    }
    out
}

fn two(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    f: FloatFn,
    ftz: bool,
    sat: bool,
    d: WordRegister,
    [a, b]: [WordRegister; 2],
) -> ExecResult {
    let (a, b) = (r.w(s, a)?, r.w(s, b)?);
    let out = match (f, ftz, sat) {
        (FloatFn::Add, false, false) => loop2(a, b, |x, y| x + y),
        (FloatFn::Sub, false, false) => loop2(a, b, |x, y| x - y),
        (FloatFn::Mul, false, false) => loop2(a, b, |x, y| x * y),
        (FloatFn::CopySign, ..) => std::array::from_fn(|i| a[i] & 0x7fff_ffff | b[i] & 0x8000_0000),
        _ => loop2(a, b, |x, y| {
            let (x, y) = if ftz { (flush(x), flush(y)) } else { (x, y) };
            let z = apply(f, x, y);
            let z = if ftz { flush(z) } else { z };
            if sat { saturate(z) } else { z }
        }),
    };
    r.put_w(d, &out, s.m);
    Ok(())
}

#[inline(always)]
fn fma_loop(a: &WarpLanes<u32>, b: &WarpLanes<u32>, c: &WarpLanes<u32>) -> WarpLanes<u32> {
    let mut out = [0; LANES];
    for i in 0..LANES {
        out[i] = bits_of(f32::from_bits(a[i]).mul_add(f32::from_bits(b[i]), f32::from_bits(c[i])));
    }
    out
}

/// The same where the processor has the instruction.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fma_instruction(a: &WarpLanes<u32>, b: &WarpLanes<u32>, c: &WarpLanes<u32>) -> WarpLanes<u32> {
    fma_loop(a, b, c)
}

fn fma_lanes(a: &WarpLanes<u32>, b: &WarpLanes<u32>, c: &WarpLanes<u32>) -> WarpLanes<u32> {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("fma") && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has both.
        return unsafe { fma_instruction(a, b, c) };
    }
    fma_loop(a, b, c)
}

fn fma(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    ftz: bool,
    sat: bool,
    d: WordRegister,
    [a, b, c]: [WordRegister; 3],
) -> ExecResult {
    let (a, b, c) = (r.w(s, a)?, r.w(s, b)?, r.w(s, c)?);
    let flushed = |x: &WarpLanes<u32>| x.map(|x| flush(f32::from_bits(x)).to_bits());
    let out = match ftz {
        true => flushed(&fma_lanes(&flushed(a), &flushed(b), &flushed(c))),
        false => fma_lanes(a, b, c),
    };
    let out = if sat { out.map(|x| saturate(f32::from_bits(x)).to_bits()) } else { out };
    r.put_w(d, &out, s.m);
    Ok(())
}

fn one(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    f: FloatOne,
    ftz: bool,
    d: WordRegister,
    a: WordRegister,
) -> ExecResult {
    let a = r.w(s, a)?;
    let mut out = [0; LANES];
    for i in 0..LANES {
        let x = f32::from_bits(a[i]);
        let y = apply_one(f, if ftz { flush(x) } else { x });
        out[i] = bits_of(if ftz { flush(y) } else { y });
    }
    r.put_w(d, &out, s.m);
    Ok(())
}

/// A comparison of numbers; the unordered ones hold where an operand is NaN.
pub fn holds(cmp: PtxComparison, x: f32, y: f32) -> bool {
    let unordered = x.is_nan() || y.is_nan();
    match cmp {
        PtxComparison::Num => !unordered,
        PtxComparison::Nan => unordered,
        PtxComparison::Equ
        | PtxComparison::Neu
        | PtxComparison::Ltu
        | PtxComparison::Leu
        | PtxComparison::Gtu
        | PtxComparison::Geu => unordered || compare(cmp, x, y),
        PtxComparison::Eq
        | PtxComparison::Ne
        | PtxComparison::Lt
        | PtxComparison::Le
        | PtxComparison::Gt
        | PtxComparison::Ge => !unordered && compare(cmp, x, y),
    }
}

fn setp(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    ftz: bool,
    setp: &SetpOp,
    a: WordRegister,
    b: WordRegister,
) -> ExecResult {
    let number = |bits: u32| {
        let x = f32::from_bits(bits);
        if ftz { flush(x) } else { x }
    };
    let (a, b) = (r.w(s, a)?.map(number), r.w(s, b)?.map(number));
    put_setp(r, s, setp, |i| holds(setp.cmp, a[i], b[i]))
}

pub fn execute(r: &mut RegisterFile, s: OperandSources<'_>, op: &PtxOp) -> ExecResult {
    match *op {
        PtxOp::Float { f, ftz, sat, d, a, b } => two(r, s, f, ftz, sat, d, [a, b]),
        PtxOp::FloatOne { f, ftz, d, a } => one(r, s, f, ftz, d, a),
        PtxOp::Fma { ftz, sat, d, a, b, c } => fma(r, s, ftz, sat, d, [a, b, c]),
        PtxOp::SetpF { ftz, s: ref of, a, b } => setp(r, s, ftz, of, a, b),
        _ => Err(trouble(FaultKind::Undefined, None, "no instruction of floats")),
    }
}

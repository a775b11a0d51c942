//! Integers, moves and selections.

use super::fault::{ExecResult, FaultKind, trouble};
use super::registers::{OperandSources, RegisterFile};
use super::{LANES, lanes};
use crate::ptx::op::{
    DoubleRegister, IntFn, IntOne, LogicOp, PtxComparison, PtxOp, PtxType, SetpOp, WordRegister,
};

fn w1(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    d: WordRegister,
    a: WordRegister,
    f: impl Fn(u32) -> u32,
) -> ExecResult {
    let a = r.w(s, a)?;
    let mut out = [0; LANES];
    for (o, a) in out.iter_mut().zip(a) {
        *o = f(*a);
    }
    r.put_w(d, &out, s.m);
    Ok(())
}

fn w2(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    d: WordRegister,
    a: WordRegister,
    b: WordRegister,
    f: impl Fn(u32, u32) -> u32,
) -> ExecResult {
    let (a, b) = (r.w(s, a)?, r.w(s, b)?);
    let mut out = [0; LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    r.put_w(d, &out, s.m);
    Ok(())
}

fn w3(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    d: WordRegister,
    [a, b, c]: [WordRegister; 3],
    f: impl Fn(u32, u32, u32) -> u32,
) -> ExecResult {
    let (a, b, c) = (r.w(s, a)?, r.w(s, b)?, r.w(s, c)?);
    let mut out = [0; LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i], c[i]);
    }
    r.put_w(d, &out, s.m);
    Ok(())
}

fn d2(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    d: DoubleRegister,
    a: DoubleRegister,
    b: DoubleRegister,
    f: impl Fn(u64, u64) -> u64,
) -> ExecResult {
    let (a, b) = (r.d(s, a)?, r.d(s, b)?);
    let mut out = [0; LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    r.put_d(d, &out, s.m);
    Ok(())
}

fn d1(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    d: DoubleRegister,
    a: DoubleRegister,
    f: impl Fn(u64) -> u64,
) -> ExecResult {
    let out = r.d(s, a)?.map(f);
    r.put_d(d, &out, s.m);
    Ok(())
}

/// Sign-extends 16 bits.
fn short(x: u32) -> i32 {
    i32::from(x as u16 as i16)
}

/// An integer operation of 32 bits.
pub fn int32(f: IntFn, signed: bool, x: u32, y: u32) -> u32 {
    let (i, j) = (x as i32, y as i32);
    match (f, signed) {
        (IntFn::Add, _) => x.wrapping_add(y),
        (IntFn::Sub, _) => x.wrapping_sub(y),
        (IntFn::MulLo, _) => x.wrapping_mul(y),
        (IntFn::MulHi, false) => ((u64::from(x) * u64::from(y)) >> 32) as u32,
        (IntFn::MulHi, true) => ((i64::from(i) * i64::from(j)) >> 32) as u32,
        (IntFn::Div, false) => x.checked_div(y).unwrap_or(u32::MAX),
        (IntFn::Div, true) => i.checked_div(j).unwrap_or(i) as u32,
        (IntFn::Rem, false) => x.checked_rem(y).unwrap_or(x),
        (IntFn::Rem, true) => i.checked_rem(j).unwrap_or(0) as u32,
        (IntFn::Min, false) => x.min(y),
        (IntFn::Min, true) => i.min(j) as u32,
        (IntFn::Max, false) => x.max(y),
        (IntFn::Max, true) => i.max(j) as u32,
        (IntFn::And, _) => x & y,
        (IntFn::Or, _) => x | y,
        (IntFn::Xor, _) => x ^ y,
    }
}

fn int64(f: IntFn, signed: bool, x: u64, y: u64) -> u64 {
    let (i, j) = (x as i64, y as i64);
    match (f, signed) {
        (IntFn::Add, _) => x.wrapping_add(y),
        (IntFn::Sub, _) => x.wrapping_sub(y),
        (IntFn::MulLo, _) => x.wrapping_mul(y),
        (IntFn::MulHi, false) => ((u128::from(x) * u128::from(y)) >> 64) as u64,
        (IntFn::MulHi, true) => ((i128::from(i) * i128::from(j)) >> 64) as u64,
        (IntFn::Div, false) => x.checked_div(y).unwrap_or(u64::MAX),
        (IntFn::Div, true) => i.checked_div(j).unwrap_or(i) as u64,
        (IntFn::Rem, false) => x.checked_rem(y).unwrap_or(x),
        (IntFn::Rem, true) => i.checked_rem(j).unwrap_or(0) as u64,
        (IntFn::Min, false) => x.min(y),
        (IntFn::Min, true) => i.min(j) as u64,
        (IntFn::Max, false) => x.max(y),
        (IntFn::Max, true) => i.max(j) as u64,
        (IntFn::And, _) => x & y,
        (IntFn::Or, _) => x | y,
        (IntFn::Xor, _) => x ^ y,
    }
}

/// An integer operation of 16 bits, whose registers hold zeros above.
fn int16(f: IntFn, signed: bool, x: u32, y: u32) -> u32 {
    let wide = match (f, signed) {
        (IntFn::MulHi, true) => ((short(x) * short(y)) >> 16) as u32,
        (IntFn::MulHi, false) => (x * y) >> 16,
        (_, true) => int32(f, true, short(x) as u32, short(y) as u32),
        (_, false) => int32(f, false, x, y),
    };
    wide & 0xffff
}

fn int_w(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    f: IntFn,
    ty: PtxType,
    d: WordRegister,
    a: WordRegister,
    b: WordRegister,
) -> ExecResult {
    if matches!(f, IntFn::Div | IntFn::Rem) {
        let divisors = r.w(s, b)?;
        no_zero(s, |lane| divisors[lane] == 0)?;
    }
    let signed = ty.signed();
    if ty.bytes() == 2 {
        return w2(r, s, d, a, b, |x, y| int16(f, signed, x & 0xffff, y & 0xffff));
    }
    // Each its own loop, so that lanes are computed side by side.
    match f {
        IntFn::Add => w2(r, s, d, a, b, u32::wrapping_add),
        IntFn::Sub => w2(r, s, d, a, b, u32::wrapping_sub),
        IntFn::MulLo => w2(r, s, d, a, b, u32::wrapping_mul),
        IntFn::And => w2(r, s, d, a, b, |x, y| x & y),
        IntFn::Or => w2(r, s, d, a, b, |x, y| x | y),
        IntFn::Xor => w2(r, s, d, a, b, |x, y| x ^ y),
        _ => w2(r, s, d, a, b, |x, y| int32(f, signed, x, y)),
    }
}

fn int_d(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    f: IntFn,
    signed: bool,
    d: DoubleRegister,
    a: DoubleRegister,
    b: DoubleRegister,
) -> ExecResult {
    if matches!(f, IntFn::Div | IntFn::Rem) {
        let divisors = r.d(s, b)?;
        no_zero(s, |lane| divisors[lane] == 0)?;
    }
    match f {
        IntFn::Add => d2(r, s, d, a, b, u64::wrapping_add),
        IntFn::MulLo => d2(r, s, d, a, b, u64::wrapping_mul),
        IntFn::Or => d2(r, s, d, a, b, |x, y| x | y),
        _ => d2(r, s, d, a, b, |x, y| int64(f, signed, x, y)),
    }
}

fn no_zero(s: OperandSources<'_>, zero: impl Fn(usize) -> bool) -> ExecResult {
    match lanes(s.m).find(|lane| zero(*lane)) {
        Some(lane) => Err(trouble(FaultKind::Undefined, Some(lane), "a division by zero")),
        None => Ok(()),
    }
}

/// The field of `length` bits at `position`, with zeros above.
fn bfe(x: u64, bits: u32, position: u32, length: u32) -> u64 {
    let (position, length) = (position & 255, length & 255);
    let shifted = if position >= bits { 0 } else { x >> position };
    if length >= 64 { shifted } else { shifted & ((1 << length) - 1) }
}

/// `bfe.s`: the sign is that of the field's own highest bit.
fn bfe_signed(x: i64, bits: u32, position: u32, length: u32) -> i64 {
    let (position, length) = (position & 255, length & 255);
    if length == 0 {
        return 0;
    }
    let top = (position + length - 1).min(bits - 1);
    let negative = x >> top & 1 == 1;
    let mut out = 0i64;
    for i in 0..bits {
        let from = position + i;
        let bit = if i < length && from < bits { x >> from & 1 == 1 } else { negative };
        out |= i64::from(bit) << i;
    }
    out
}

fn bfi(a: u64, b: u64, bits: u32, position: u32, length: u32) -> u64 {
    let (position, length) = (position & 255, length & 255);
    let length = length.min(bits.saturating_sub(position));
    if length == 0 {
        return b;
    }
    let ones = if length == 64 { u64::MAX } else { (1 << length) - 1 };
    b & !(ones << position) | (a & ones) << position
}

fn prmt(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    (0..4).fold(0, |out, i| {
        let nibble = selector >> (4 * i) & 15;
        let byte = (bytes >> (8 * (nibble & 7))) as u8;
        // The highest bit of a nibble asks for copies of the byte's sign.
        let byte = if nibble & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
        out | u32::from(byte) << (8 * i)
    })
}

fn lop3(a: u32, b: u32, c: u32, table: u8) -> u32 {
    (0..8u32).filter(|row| table >> row & 1 != 0).fold(0, |out, row| {
        let pick = |x: u32, bit: u32| if row >> bit & 1 != 0 { x } else { !x };
        out | pick(a, 2) & pick(b, 1) & pick(c, 0)
    })
}

fn dp4a(signed_a: bool, signed_b: bool, a: u32, b: u32, c: u32) -> u32 {
    let part = |x: u8, signed: bool| if signed { i32::from(x as i8) } else { i32::from(x) };
    let pairs = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
    pairs.fold(c, |sum, (x, y)| sum.wrapping_add((part(x, signed_a) * part(y, signed_b)) as u32))
}

fn funnel(left: bool, wrap: bool, a: u32, b: u32, c: u32) -> u32 {
    let n = if wrap { c & 31 } else { c.min(32) };
    let both = u64::from(b) << 32 | u64::from(a);
    if left { (both << n >> 32) as u32 } else { (both >> n) as u32 }
}

fn shift32(left: bool, ty: PtxType, x: u32, n: u32) -> u32 {
    let bits = ty.bytes() * 8;
    let mask = if bits == 16 { 0xffff } else { u32::MAX };
    let x = x & mask;
    let out = match (left, ty.signed()) {
        (true, _) => x.checked_shl(n).unwrap_or(0),
        (false, false) => x.checked_shr(n).unwrap_or(0),
        (false, true) => {
            let wide = if bits == 16 { short(x) } else { x as i32 };
            (wide >> n.min(31)) as u32
        }
    };
    out & mask
}

pub fn compare<T: PartialOrd>(cmp: PtxComparison, x: T, y: T) -> bool {
    match cmp {
        PtxComparison::Eq | PtxComparison::Equ => x == y,
        PtxComparison::Ne | PtxComparison::Neu => x != y,
        PtxComparison::Lt | PtxComparison::Ltu => x < y,
        PtxComparison::Le | PtxComparison::Leu => x <= y,
        PtxComparison::Gt | PtxComparison::Gtu => x > y,
        PtxComparison::Ge | PtxComparison::Geu => x >= y,
        PtxComparison::Num => true,
        PtxComparison::Nan => false,
    }
}

/// Stores the results of a comparison.
pub fn put_setp(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    setp: &SetpOp,
    holds: impl Fn(usize) -> bool,
) -> ExecResult {
    let mut bits = 0;
    for lane in 0..LANES {
        bits |= u32::from(holds(lane)) << lane;
    }
    let with = match setp.with {
        Some((logic, p, negated)) => Some((logic, r.p(s, p)? ^ if negated { u32::MAX } else { 0 })),
        None => None,
    };
    let combined = |bits: u32| match with {
        Some((logic, other)) => logic_of(logic, bits, other),
        None => bits,
    };
    r.put_p(setp.d, combined(bits), s.m);
    if let Some(q) = setp.q {
        r.put_p(q, combined(!bits), s.m);
    }
    Ok(())
}

fn logic_of(f: LogicOp, x: u32, y: u32) -> u32 {
    match f {
        LogicOp::And => x & y,
        LogicOp::Or => x | y,
        LogicOp::Xor => x ^ y,
    }
}

fn setp_w(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    ty: PtxType,
    setp: &SetpOp,
    a: WordRegister,
    b: WordRegister,
) -> ExecResult {
    let (a, b) = (*r.w(s, a)?, *r.w(s, b)?);
    let cmp = setp.cmp;
    match (ty.bytes(), ty.signed()) {
        (2, true) => put_setp(r, s, setp, |i| compare(cmp, short(a[i]), short(b[i]))),
        (2, false) => put_setp(r, s, setp, |i| compare(cmp, a[i] as u16, b[i] as u16)),
        (_, true) => put_setp(r, s, setp, |i| compare(cmp, a[i] as i32, b[i] as i32)),
        _ => put_setp(r, s, setp, |i| compare(cmp, a[i], b[i])),
    }
}

fn one_w(f: IntOne, ty: PtxType, x: u32) -> u32 {
    let mask = if ty.bytes() == 2 { 0xffff } else { u32::MAX };
    let wide = if ty == PtxType::S16 { short(x) as u32 } else { x };
    let out = match f {
        IntOne::Neg => wide.wrapping_neg(),
        IntOne::Abs => (wide as i32).wrapping_abs() as u32,
        IntOne::Not => !x,
        IntOne::Popc => x.count_ones(),
        IntOne::Clz => x.leading_zeros(),
        IntOne::Brev => x.reverse_bits(),
    };
    out & mask
}

fn one_d(f: IntOne, x: u64) -> u64 {
    match f {
        IntOne::Neg => x.wrapping_neg(),
        IntOne::Abs => (x as i64).wrapping_abs() as u64,
        IntOne::Not => !x,
        IntOne::Popc => u64::from(x.count_ones()),
        IntOne::Clz => u64::from(x.leading_zeros()),
        IntOne::Brev => x.reverse_bits(),
    }
}

fn wide_d(
    r: &mut RegisterFile,
    s: OperandSources<'_>,
    signed: bool,
    d: DoubleRegister,
    [a, b]: [WordRegister; 2],
    c: Option<DoubleRegister>,
) -> ExecResult {
    let (a, b) = (r.w(s, a)?, r.w(s, b)?);
    let mut out = [0u64; LANES];
    for i in 0..LANES {
        out[i] = match signed {
            true => (i64::from(a[i] as i32) * i64::from(b[i] as i32)) as u64,
            false => u64::from(a[i]) * u64::from(b[i]),
        };
    }
    if let Some(c) = c {
        let c = r.d(s, c)?;
        for i in 0..LANES {
            out[i] = out[i].wrapping_add(c[i]);
        }
    }
    r.put_d(d, &out, s.m);
    Ok(())
}

fn wide_w(signed: bool, x: u32, y: u32) -> u32 {
    if signed { short(x).wrapping_mul(short(y)) as u32 } else { (x & 0xffff).wrapping_mul(y & 0xffff) }
}

/// Executes an instruction of this file.
pub fn execute(r: &mut RegisterFile, s: OperandSources<'_>, op: &PtxOp) -> ExecResult {
    match *op {
        PtxOp::MovW { d, a } => w1(r, s, d, a, |x| x),
        PtxOp::MovD { d, a } => d1(r, s, d, a, |x| x),
        PtxOp::IntW { f, ty, d, a, b } => int_w(r, s, f, ty, d, a, b),
        PtxOp::IntD { f, signed, d, a, b } => int_d(r, s, f, signed, d, a, b),
        PtxOp::OneW { f, ty, d, a } => w1(r, s, d, a, |x| one_w(f, ty, x)),
        PtxOp::OneD { f, d, a } => d1(r, s, d, a, |x| one_d(f, x)),
        PtxOp::CountD { f, d, a } => {
            let out = r.d(s, a)?.map(|x| one_d(f, x) as u32);
            r.put_w(d, &out, s.m);
            Ok(())
        }
        PtxOp::WideW { signed, d, a, b, c: None } => w2(r, s, d, a, b, |x, y| wide_w(signed, x, y)),
        PtxOp::WideW { signed, d, a, b, c: Some(c) } => {
            w3(r, s, d, [a, b, c], |x, y, z| wide_w(signed, x, y).wrapping_add(z))
        }
        PtxOp::WideD { signed, d, a, b, c } => wide_d(r, s, signed, d, [a, b], c),
        PtxOp::MadW { high, ty, d, a, b, c } => {
            let f = if high { IntFn::MulHi } else { IntFn::MulLo };
            let signed = ty.signed();
            w3(r, s, d, [a, b, c], |x, y, z| match ty.bytes() {
                2 => int16(f, signed, x, y).wrapping_add(z) & 0xffff,
                _ => int32(f, signed, x, y).wrapping_add(z),
            })
        }
        PtxOp::MadD { high, signed, d, a, b, c } => {
            let f = if high { IntFn::MulHi } else { IntFn::MulLo };
            let (a, b, c) = (r.d(s, a)?, r.d(s, b)?, r.d(s, c)?);
            let out = std::array::from_fn(|i| int64(f, signed, a[i], b[i]).wrapping_add(c[i]));
            r.put_d(d, &out, s.m);
            Ok(())
        }
        PtxOp::ShiftW { left, ty, d, a, b } => w2(r, s, d, a, b, |x, n| shift32(left, ty, x, n)),
        PtxOp::ShiftD { left, signed, d, a, b } => {
            let (a, b) = (r.d(s, a)?, r.w(s, b)?);
            let out = std::array::from_fn(|i| match (left, signed) {
                (true, _) => a[i].checked_shl(b[i]).unwrap_or(0),
                (false, false) => a[i].checked_shr(b[i]).unwrap_or(0),
                (false, true) => ((a[i] as i64) >> b[i].min(63)) as u64,
            });
            r.put_d(d, &out, s.m);
            Ok(())
        }
        PtxOp::Funnel { left, wrap, d, a, b, c } => {
            w3(r, s, d, [a, b, c], |x, y, n| funnel(left, wrap, x, y, n))
        }
        PtxOp::BfeW { signed: true, d, a, b, c } => {
            w3(r, s, d, [a, b, c], |x, at, n| bfe_signed(i64::from(x as i32), 32, at, n) as u32)
        }
        PtxOp::BfeW { signed: false, d, a, b, c } => {
            w3(r, s, d, [a, b, c], |x, at, n| bfe(u64::from(x), 32, at, n) as u32)
        }
        PtxOp::BfeD { signed, d, a, b, c } => {
            let (a, b, c) = (r.d(s, a)?, r.w(s, b)?, r.w(s, c)?);
            let out = std::array::from_fn(|i| match signed {
                true => bfe_signed(a[i] as i64, 64, b[i], c[i]) as u64,
                false => bfe(a[i], 64, b[i], c[i]),
            });
            r.put_d(d, &out, s.m);
            Ok(())
        }
        PtxOp::BfiW { d, a, b, c, e } => {
            let (a, b, c, e) = (r.w(s, a)?, r.w(s, b)?, r.w(s, c)?, r.w(s, e)?);
            let out = std::array::from_fn(|i| bfi(a[i].into(), b[i].into(), 32, c[i], e[i]) as u32);
            r.put_w(d, &out, s.m);
            Ok(())
        }
        PtxOp::BfiD { d, a, b, c, e } => {
            let (a, b, c, e) = (r.d(s, a)?, r.d(s, b)?, r.w(s, c)?, r.w(s, e)?);
            let out = std::array::from_fn(|i| bfi(a[i], b[i], 64, c[i], e[i]));
            r.put_d(d, &out, s.m);
            Ok(())
        }
        PtxOp::Lop3 { d, a, b, c, table } => w3(r, s, d, [a, b, c], |x, y, z| lop3(x, y, z, table)),
        PtxOp::Prmt { d, a, b, c } => w3(r, s, d, [a, b, c], prmt),
        PtxOp::Dp4a { signed_a, signed_b, d, a, b, c } => {
            w3(r, s, d, [a, b, c], |x, y, z| dp4a(signed_a, signed_b, x, y, z))
        }
        PtxOp::SplitW { lo, hi, a } => {
            let a = *r.w(s, a)?;
            r.put_w(lo, &a.map(|x| x & 0xffff), s.m);
            r.put_w(hi, &a.map(|x| x >> 16), s.m);
            Ok(())
        }
        PtxOp::SplitD { lo, hi, a } => {
            let a = *r.d(s, a)?;
            r.put_w(lo, &a.map(|x| x as u32), s.m);
            r.put_w(hi, &a.map(|x| (x >> 32) as u32), s.m);
            Ok(())
        }
        PtxOp::JoinW { d, lo, hi } => w2(r, s, d, lo, hi, |lo, hi| lo & 0xffff | hi << 16),
        PtxOp::JoinD { d, lo, hi } => {
            let (lo, hi) = (r.w(s, lo)?, r.w(s, hi)?);
            let out = std::array::from_fn(|i| u64::from(lo[i]) | u64::from(hi[i]) << 32);
            r.put_d(d, &out, s.m);
            Ok(())
        }
        PtxOp::SetpW { ty, s: ref setp, a, b } => setp_w(r, s, ty, setp, a, b),
        PtxOp::SetpD { signed, s: ref setp, a, b } => {
            let (a, b, cmp) = (*r.d(s, a)?, *r.d(s, b)?, setp.cmp);
            match signed {
                true => put_setp(r, s, setp, |i| compare(cmp, a[i] as i64, b[i] as i64)),
                false => put_setp(r, s, setp, |i| compare(cmp, a[i], b[i])),
            }
        }
        PtxOp::SelW { d, a, b, p } => {
            let p = r.p(s, p)?;
            // Only the chosen operand has to have a value.
            let (sa, sb) = (OperandSources { m: s.m & p, ..s }, OperandSources { m: s.m & !p, ..s });
            let (a, b) = (r.w(sa, a)?, r.w(sb, b)?);
            let out = std::array::from_fn(|i| if p >> i & 1 != 0 { a[i] } else { b[i] });
            r.put_w(d, &out, s.m);
            Ok(())
        }
        PtxOp::SelD { d, a, b, p } => {
            let p = r.p(s, p)?;
            let (sa, sb) = (OperandSources { m: s.m & p, ..s }, OperandSources { m: s.m & !p, ..s });
            let (a, b) = (r.d(sa, a)?, r.d(sb, b)?);
            let out = std::array::from_fn(|i| if p >> i & 1 != 0 { a[i] } else { b[i] });
            r.put_d(d, &out, s.m);
            Ok(())
        }
        PtxOp::Logic { f, d, a, b } => {
            let bits = logic_of(f, r.p(s, a)?, r.p(s, b)?);
            r.put_p(d, bits, s.m);
            Ok(())
        }
        PtxOp::NotP { d, a } => {
            let bits = !r.p(s, a)?;
            r.put_p(d, bits, s.m);
            Ok(())
        }
        PtxOp::MovP { d, a } => {
            let bits = r.p(s, a)?;
            r.put_p(d, bits, s.m);
            Ok(())
        }
        PtxOp::ConstP { d, value } => {
            r.put_p(d, if value { u32::MAX } else { 0 }, s.m);
            Ok(())
        }
        _ => Err(trouble(FaultKind::Undefined, None, "no integer instruction")),
    }
}

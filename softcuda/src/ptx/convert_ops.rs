//! Moves, conversions, comparisons and selections.

use super::decode::{DecodeResult, InstructionDecoder};
use super::op::{AnyRegister, IntFn, LogicOp, PtxComparison, PtxOp, PtxType, RoundingMode, SetpOp};
use super::scope::special;
use super::text::PtxOperand;

pub fn decode(cx: &mut InstructionDecoder<'_, '_>, name: &str) -> DecodeResult {
    match name {
        "mov" => mov(cx),
        "cvt" => cvt(cx),
        "selp" => selp(cx),
        "setp" => setp(cx),
        _ => cvta(cx),
    }
}

fn mov(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
    let ty = cx.m.ty()?;
    let [d, a] = cx.operands()?;
    let s = &mut *cx.scope;
    let n = ty.bytes();
    match (&d, &a) {
        (PtxOperand::Vector(parts), _) => {
            let [lo, hi] = parts.as_slice() else { return Err(cx.unknown()) };
            let (lo, hi) = (s.dw(lo)?, s.dw(hi)?);
            match ty {
                PtxType::B32 => Ok(PtxOp::SplitW { lo, hi, a: s.w(&a, n)? }),
                PtxType::B64 => Ok(PtxOp::SplitD { lo, hi, a: s.d(&a)? }),
                _ => Err(cx.unknown()),
            }
        }
        (_, PtxOperand::Vector(parts)) => {
            let [lo, hi] = parts.as_slice() else { return Err(cx.unknown()) };
            let (lo, hi) = (s.w(lo, n / 2)?, s.w(hi, n / 2)?);
            match ty {
                PtxType::B32 => Ok(PtxOp::JoinW { d: s.dw(&d)?, lo, hi }),
                PtxType::B64 => Ok(PtxOp::JoinD { d: s.dd(&d)?, lo, hi }),
                _ => Err(cx.unknown()),
            }
        }
        (_, PtxOperand::Name(name)) if name.starts_with('%') && special(name).is_some() => {
            let what = special(name).ok_or("no special register")?;
            match ty {
                PtxType::U32 | PtxType::B32 | PtxType::S32 => Ok(PtxOp::Special { d: s.dw(&d)?, what }),
                _ => Err(format!("{name} has 32 bits")),
            }
        }
        _ if ty == PtxType::Pred => match a {
            PtxOperand::Int(value) => Ok(PtxOp::ConstP { d: s.p(&d)?, value: value != 0 }),
            _ => Ok(PtxOp::MovP { d: s.p(&d)?, a: s.p(&a)? }),
        },
        _ if n == 8 => Ok(PtxOp::MovD { d: s.dd(&d)?, a: s.d(&a)? }),
        _ if n == 2 || n == 4 => Ok(PtxOp::MovW { d: s.dw(&d)?, a: s.w(&a, n)? }),
        _ => Err(cx.unknown()),
    }
}

/// Addresses of global memory are generic ones. Addresses of local memory are moved to where nothing else is:
/// no access by generic address is known, so they cannot be used.
fn cvta(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
    const NOWHERE: u64 = 1 << 60;
    let to = cx.m.take("to");
    cx.m.ty_in(&[PtxType::U64])?;
    let (global, local) = (cx.m.take("global"), cx.m.take("local"));
    let [d, a] = cx.operands()?;
    let s = &mut *cx.scope;
    let (d, a) = (s.dd(&d)?, s.d(&a)?);
    match (global, local, to) {
        (true, ..) => Ok(PtxOp::MovD { d, a }),
        (_, true, false) => Ok(PtxOp::IntD { f: IntFn::Add, signed: false, d, a, b: s.constant_d(NOWHERE) }),
        _ => Err(cx.unknown()),
    }
}

fn cvt(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
    const INTEGRAL: [(&str, RoundingMode); 4] = [
        ("rni", RoundingMode::Nearest),
        ("rzi", RoundingMode::Zero),
        ("rmi", RoundingMode::Down),
        ("rpi", RoundingMode::Up),
    ];
    let to = cx.m.ty()?;
    let from = cx.m.ty()?;
    let integral = cx.m.one_of(&INTEGRAL);
    let round = integral.or_else(|| cx.m.round());
    let (ftz, sat, relu) = (cx.m.take("ftz"), cx.m.take("sat"), cx.m.take("relu"));
    if matches!(to, PtxType::F16x2 | PtxType::BF16x2) {
        let (PtxType::F32, Some(round @ (RoundingMode::Nearest | RoundingMode::Zero)), None, false) =
            (from, round, integral, sat)
        else {
            return Err(cx.unknown());
        };
        let [d, a, b] = cx.operands()?;
        let s = &mut *cx.scope;
        let bf16 = to == PtxType::BF16x2;
        return Ok(PtxOp::CvtPack { bf16, round, relu, d: s.dw(&d)?, a: s.w(&a, 4)?, b: s.w(&b, 4)? });
    }
    let plain = |ty: PtxType| ty.integer() || matches!(ty, PtxType::F16 | PtxType::BF16 | PtxType::F32);
    if !plain(to) || !plain(from) {
        return Err(cx.unknown());
    }
    check_rounding(to, from, round.is_some(), integral.is_some())
        .map_err(|what| format!("`{}`: {what}", cx.m.opcode()))?;
    let [d, a] = cx.operands()?;
    let s = &mut *cx.scope;
    let d = s.dest(&d)?;
    let a = match &a {
        PtxOperand::Name(_) => s.dest(&a)?,
        _ if from.bytes() == 8 => AnyRegister::D(s.d(&a)?),
        _ => AnyRegister::W(s.w(&a, from.bytes())?),
    };
    // Registers may be wider than the types, not narrower.
    let fits = |register: AnyRegister, ty: PtxType| match register {
        AnyRegister::W(_) => ty.bytes() <= 4,
        AnyRegister::D(_) => true,
        AnyRegister::P(_) => false,
    };
    if !fits(d, to) || !fits(a, from) {
        return Err(format!("`{}`: a register is too narrow", cx.m.opcode()));
    }
    Ok(PtxOp::Cvt { to, from, round, integral: integral.is_some(), ftz, sat, relu, d, a })
}

/// The rules of the ISA: which conversions take a rounding modifier.
fn check_rounding(to: PtxType, from: PtxType, round: bool, integral: bool) -> Result<(), &'static str> {
    let needs_integral = from.float() && to.integer();
    let needs_float = from.integer() && to.float() || from.float() && to.float() && to.bytes() < from.bytes();
    if needs_integral && !integral {
        return Err("a float becomes an integer by .rni, .rzi, .rmi or .rpi");
    }
    if needs_float && (!round || integral) {
        return Err("it has to be rounded by .rn, .rz, .rm or .rp");
    }
    let may_be_integral = from.float() && to == from && integral;
    let takes_none = !needs_integral && !needs_float && !may_be_integral;
    if round && takes_none {
        return Err("it takes no rounding");
    }
    Ok(())
}

fn selp(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
    let ty = cx.m.ty()?;
    let [d, a, b, p] = cx.operands()?;
    let s = &mut *cx.scope;
    let p = s.p(&p)?;
    match ty.bytes() {
        8 => Ok(PtxOp::SelD { d: s.dd(&d)?, a: s.d(&a)?, b: s.d(&b)?, p }),
        n @ (2 | 4) => Ok(PtxOp::SelW { d: s.dw(&d)?, a: s.w(&a, n)?, b: s.w(&b, n)?, p }),
        _ => Err(cx.unknown()),
    }
}

fn setp(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
    const COMPARISONS: [(&str, PtxComparison); 18] = [
        ("eq", PtxComparison::Eq),
        ("ne", PtxComparison::Ne),
        ("lt", PtxComparison::Lt),
        ("le", PtxComparison::Le),
        ("gt", PtxComparison::Gt),
        ("ge", PtxComparison::Ge),
        ("lo", PtxComparison::Lt),
        ("ls", PtxComparison::Le),
        ("hi", PtxComparison::Gt),
        ("hs", PtxComparison::Ge),
        ("equ", PtxComparison::Equ),
        ("neu", PtxComparison::Neu),
        ("ltu", PtxComparison::Ltu),
        ("leu", PtxComparison::Leu),
        ("gtu", PtxComparison::Gtu),
        ("geu", PtxComparison::Geu),
        ("num", PtxComparison::Num),
        ("nan", PtxComparison::Nan),
    ];
    let Some(cmp) = cx.m.one_of(&COMPARISONS) else { return Err(cx.unknown()) };
    let logic = cx.m.one_of(&[("and", LogicOp::And), ("or", LogicOp::Or), ("xor", LogicOp::Xor)]);
    let ty = cx.m.ty()?;
    let ftz = ty.float() && cx.m.take("ftz");
    let (d, a, b, with) = match logic {
        Some(logic) => {
            let [d, a, b, p] = cx.operands()?;
            let (p, negated) = cx.scope.p_or_not(&p)?;
            (d, a, b, Some((logic, p, negated)))
        }
        None => {
            let [d, a, b] = cx.operands()?;
            (d, a, b, None)
        }
    };
    let (d, q) = match d {
        PtxOperand::Pair(d, q) => (cx.scope.pred(d)?, Some(cx.scope.pred(q)?)),
        d => (cx.scope.p(&d)?, None),
    };
    let s = SetpOp { cmp, d, q, with };
    let ordered = matches!(
        cmp,
        PtxComparison::Eq
            | PtxComparison::Ne
            | PtxComparison::Lt
            | PtxComparison::Le
            | PtxComparison::Gt
            | PtxComparison::Ge
    );
    if !ty.float() && (!ordered || !ty.integer() && !matches!(cmp, PtxComparison::Eq | PtxComparison::Ne)) {
        return Err(format!("`{}` does not fit its type", cx.m.opcode()));
    }
    let scope = &mut *cx.scope;
    match ty {
        PtxType::F32 => Ok(PtxOp::SetpF { ftz, s, a: scope.w(&a, 4)?, b: scope.w(&b, 4)? }),
        PtxType::F16 | PtxType::BF16 => {
            Ok(PtxOp::SetpH { bf16: ty == PtxType::BF16, ftz, s, a: scope.w(&a, 2)?, b: scope.w(&b, 2)? })
        }
        PtxType::U64 | PtxType::S64 | PtxType::B64 => {
            Ok(PtxOp::SetpD { signed: ty.signed(), s, a: scope.d(&a)?, b: scope.d(&b)? })
        }
        PtxType::U16 | PtxType::S16 | PtxType::B16 | PtxType::U32 | PtxType::S32 | PtxType::B32 => {
            let n = ty.bytes();
            Ok(PtxOp::SetpW { ty, s, a: scope.w(&a, n)?, b: scope.w(&b, n)? })
        }
        _ => Err(cx.unknown()),
    }
}

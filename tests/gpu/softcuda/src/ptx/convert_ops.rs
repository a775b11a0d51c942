//! Moves, conversions, comparisons and selections.

use super::decode::Decoder;
use super::op::{Any, Cmp, IntFn, Logic, Op, Round, Setp, Ty};
use super::scope::special;
use super::text::Operand;

type Decoded = Result<Op, String>;

pub fn decode(cx: &mut Decoder<'_, '_>, name: &str) -> Decoded {
    match name {
        "mov" => mov(cx),
        "cvt" => cvt(cx),
        "selp" => selp(cx),
        "setp" => setp(cx),
        _ => cvta(cx),
    }
}

fn mov(cx: &mut Decoder<'_, '_>) -> Decoded {
    let ty = cx.m.ty()?;
    let [d, a] = cx.operands()?;
    let s = &mut *cx.scope;
    let n = ty.bytes();
    match (&d, &a) {
        (Operand::Vector(parts), _) => {
            let [lo, hi] = parts.as_slice() else { return Err(cx.unknown()) };
            let (lo, hi) = (s.dw(lo)?, s.dw(hi)?);
            match ty {
                Ty::B32 => Ok(Op::SplitW { lo, hi, a: s.w(&a, n)? }),
                Ty::B64 => Ok(Op::SplitD { lo, hi, a: s.d(&a)? }),
                _ => Err(cx.unknown()),
            }
        }
        (_, Operand::Vector(parts)) => {
            let [lo, hi] = parts.as_slice() else { return Err(cx.unknown()) };
            let (lo, hi) = (s.w(lo, n / 2)?, s.w(hi, n / 2)?);
            match ty {
                Ty::B32 => Ok(Op::JoinW { d: s.dw(&d)?, lo, hi }),
                Ty::B64 => Ok(Op::JoinD { d: s.dd(&d)?, lo, hi }),
                _ => Err(cx.unknown()),
            }
        }
        (_, Operand::Name(name)) if name.starts_with('%') && special(name).is_some() => {
            let what = special(name).ok_or("no special register")?;
            match ty {
                Ty::U32 | Ty::B32 | Ty::S32 => Ok(Op::Special { d: s.dw(&d)?, what }),
                _ => Err(format!("{name} has 32 bits")),
            }
        }
        _ if ty == Ty::Pred => match a {
            Operand::Int(value) => Ok(Op::ConstP { d: s.p(&d)?, value: value != 0 }),
            _ => Ok(Op::MovP { d: s.p(&d)?, a: s.p(&a)? }),
        },
        _ if n == 8 => Ok(Op::MovD { d: s.dd(&d)?, a: s.d(&a)? }),
        _ if n == 2 || n == 4 => Ok(Op::MovW { d: s.dw(&d)?, a: s.w(&a, n)? }),
        _ => Err(cx.unknown()),
    }
}

/// Addresses of global memory are generic ones. Those of local memory are moved to where nothing else is: no access by generic
/// address is known, so they cannot be used.
fn cvta(cx: &mut Decoder<'_, '_>) -> Decoded {
    const NOWHERE: u64 = 1 << 60;
    let to = cx.m.take("to");
    cx.m.ty_in(&[Ty::U64])?;
    let (global, local) = (cx.m.take("global"), cx.m.take("local"));
    let [d, a] = cx.operands()?;
    let s = &mut *cx.scope;
    let (d, a) = (s.dd(&d)?, s.d(&a)?);
    match (global, local, to) {
        (true, ..) => Ok(Op::MovD { d, a }),
        (_, true, false) => Ok(Op::IntD { f: IntFn::Add, signed: false, d, a, b: s.constant_d(NOWHERE) }),
        _ => Err(cx.unknown()),
    }
}

fn cvt(cx: &mut Decoder<'_, '_>) -> Decoded {
    const INTEGRAL: [(&str, Round); 4] =
        [("rni", Round::Nearest), ("rzi", Round::Zero), ("rmi", Round::Down), ("rpi", Round::Up)];
    let to = cx.m.ty()?;
    let from = cx.m.ty()?;
    let integral = cx.m.one_of(&INTEGRAL);
    let round = integral.or_else(|| cx.m.round());
    let (ftz, sat, relu) = (cx.m.take("ftz"), cx.m.take("sat"), cx.m.take("relu"));
    if matches!(to, Ty::F16x2 | Ty::BF16x2) {
        let (Ty::F32, Some(round @ (Round::Nearest | Round::Zero)), None, false) =
            (from, round, integral, sat)
        else {
            return Err(cx.unknown());
        };
        let [d, a, b] = cx.operands()?;
        let s = &mut *cx.scope;
        let bf16 = to == Ty::BF16x2;
        return Ok(Op::CvtPack { bf16, round, relu, d: s.dw(&d)?, a: s.w(&a, 4)?, b: s.w(&b, 4)? });
    }
    let plain = |ty: Ty| ty.integer() || matches!(ty, Ty::F16 | Ty::BF16 | Ty::F32);
    if !plain(to) || !plain(from) {
        return Err(cx.unknown());
    }
    check_rounding(to, from, round.is_some(), integral.is_some())
        .map_err(|what| format!("`{}`: {what}", cx.m.opcode()))?;
    let [d, a] = cx.operands()?;
    let s = &mut *cx.scope;
    let d = s.dest(&d)?;
    let a = match &a {
        Operand::Name(_) => s.dest(&a)?,
        _ if from.bytes() == 8 => Any::D(s.d(&a)?),
        _ => Any::W(s.w(&a, from.bytes())?),
    };
    // Registers may be wider than the types, not narrower.
    let fits = |register: Any, ty: Ty| match register {
        Any::W(_) => ty.bytes() <= 4,
        Any::D(_) => true,
        Any::P(_) => false,
    };
    if !fits(d, to) || !fits(a, from) {
        return Err(format!("`{}`: a register is too narrow", cx.m.opcode()));
    }
    Ok(Op::Cvt { to, from, round, integral: integral.is_some(), ftz, sat, relu, d, a })
}

/// The rules of the ISA: which conversions take a rounding modifier.
fn check_rounding(to: Ty, from: Ty, round: bool, integral: bool) -> Result<(), &'static str> {
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

fn selp(cx: &mut Decoder<'_, '_>) -> Decoded {
    let ty = cx.m.ty()?;
    let [d, a, b, p] = cx.operands()?;
    let s = &mut *cx.scope;
    let p = s.p(&p)?;
    match ty.bytes() {
        8 => Ok(Op::SelD { d: s.dd(&d)?, a: s.d(&a)?, b: s.d(&b)?, p }),
        n @ (2 | 4) => Ok(Op::SelW { d: s.dw(&d)?, a: s.w(&a, n)?, b: s.w(&b, n)?, p }),
        _ => Err(cx.unknown()),
    }
}

fn setp(cx: &mut Decoder<'_, '_>) -> Decoded {
    const COMPARISONS: [(&str, Cmp); 18] = [
        ("eq", Cmp::Eq),
        ("ne", Cmp::Ne),
        ("lt", Cmp::Lt),
        ("le", Cmp::Le),
        ("gt", Cmp::Gt),
        ("ge", Cmp::Ge),
        ("lo", Cmp::Lt),
        ("ls", Cmp::Le),
        ("hi", Cmp::Gt),
        ("hs", Cmp::Ge),
        ("equ", Cmp::Equ),
        ("neu", Cmp::Neu),
        ("ltu", Cmp::Ltu),
        ("leu", Cmp::Leu),
        ("gtu", Cmp::Gtu),
        ("geu", Cmp::Geu),
        ("num", Cmp::Num),
        ("nan", Cmp::Nan),
    ];
    let Some(cmp) = cx.m.one_of(&COMPARISONS) else { return Err(cx.unknown()) };
    let logic = cx.m.one_of(&[("and", Logic::And), ("or", Logic::Or), ("xor", Logic::Xor)]);
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
        Operand::Pair(d, q) => (cx.scope.pred(d)?, Some(cx.scope.pred(q)?)),
        d => (cx.scope.p(&d)?, None),
    };
    let s = Setp { cmp, d, q, with };
    let ordered = matches!(cmp, Cmp::Eq | Cmp::Ne | Cmp::Lt | Cmp::Le | Cmp::Gt | Cmp::Ge);
    if !ty.float() && (!ordered || !ty.integer() && !matches!(cmp, Cmp::Eq | Cmp::Ne)) {
        return Err(format!("`{}` does not fit its type", cx.m.opcode()));
    }
    let scope = &mut *cx.scope;
    match ty {
        Ty::F32 => Ok(Op::SetpF { ftz, s, a: scope.w(&a, 4)?, b: scope.w(&b, 4)? }),
        Ty::F16 | Ty::BF16 => {
            Ok(Op::SetpH { bf16: ty == Ty::BF16, ftz, s, a: scope.w(&a, 2)?, b: scope.w(&b, 2)? })
        }
        Ty::U64 | Ty::S64 | Ty::B64 => {
            Ok(Op::SetpD { signed: ty.signed(), s, a: scope.d(&a)?, b: scope.d(&b)? })
        }
        Ty::U16 | Ty::S16 | Ty::B16 | Ty::U32 | Ty::S32 | Ty::B32 => {
            let n = ty.bytes();
            Ok(Op::SetpW { ty, s, a: scope.w(&a, n)?, b: scope.w(&b, n)? })
        }
        _ => Err(cx.unknown()),
    }
}

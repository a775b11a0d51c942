//! Control flow and what threads do together.

use super::decode::Decoder;
use super::op::{Any, Fragment, IntFn, Mma, Op, ShflMode, Ty, VoteMode, W};
use super::text::Operand;

type Decoded = Result<Op, String>;

pub fn decode(cx: &mut Decoder<'_, '_>, name: &str) -> Decoded {
    match name {
        "bra" => {
            cx.m.take("uni");
            let [to] = cx.operands()?;
            Ok(Op::Bra { to: cx.scope.label(&to)? })
        }
        "ret" | "exit" => {
            cx.m.take("uni");
            let [] = cx.operands()?;
            Ok(Op::Ret)
        }
        "trap" => Ok(Op::Trap),
        "bar" | "barrier" => bar(cx, name == "bar"),
        "membar" | "fence" => fence(cx),
        "shfl" => shfl(cx),
        "vote" => vote(cx),
        "activemask" => {
            cx.m.ty_in(&[Ty::B32])?;
            let [d] = cx.operands()?;
            Ok(Op::Activemask { d: cx.scope.dw(&d)? })
        }
        "redux" => redux(cx),
        "mma" => mma(cx),
        _ => Err(cx.unknown()),
    }
}

fn bar(cx: &mut Decoder<'_, '_>, always_aligned: bool) -> Decoded {
    cx.m.take("cta");
    if cx.m.take("warp") {
        let [mask] = cx.operands()?;
        return match cx.m.take("sync") {
            true => Ok(Op::WarpSync { mask: cx.scope.w(&mask, 4)? }),
            false => Err(cx.unknown()),
        };
    }
    let aligned = cx.m.take("aligned") || always_aligned;
    if !cx.m.take("sync") || !aligned {
        return Err(cx.unknown());
    }
    let operands = cx.all();
    if operands.is_empty() || operands.len() > 2 {
        return Err(cx.unknown());
    }
    let threads = operands.get(1).map(|n| cx.scope.w(n, 4)).transpose()?;
    Ok(Op::Bar { id: cx.scope.w(&operands[0], 4)?, threads })
}

fn fence(cx: &mut Decoder<'_, '_>) -> Decoded {
    for word in ["acq_rel", "sc"] {
        cx.m.take(word);
    }
    let scopes = [("cta", true), ("gl", false), ("gpu", false), ("sys", false)];
    let [] = cx.operands()?;
    cx.m.one_of(&scopes).map(|block| Op::Fence { block }).ok_or_else(|| cx.unknown())
}

fn shfl(cx: &mut Decoder<'_, '_>) -> Decoded {
    let modes =
        [("up", ShflMode::Up), ("down", ShflMode::Down), ("bfly", ShflMode::Bfly), ("idx", ShflMode::Idx)];
    let (sync, mode) = (cx.m.take("sync"), cx.m.one_of(&modes));
    let (Some(mode), true) = (mode, sync) else { return Err(cx.unknown()) };
    cx.m.ty_in(&[Ty::B32])?;
    let [d, a, b, c, mask] = cx.operands()?;
    let s = &mut *cx.scope;
    let (d, p) = match d {
        Operand::Pair(d, p) => (s.dw(&Operand::Name(d))?, Some(s.pred(p)?)),
        d => (s.dw(&d)?, None),
    };
    Ok(Op::Shfl { mode, d, p, a: s.w(&a, 4)?, b: s.w(&b, 4)?, c: s.w(&c, 4)?, mask: s.w(&mask, 4)? })
}

fn vote(cx: &mut Decoder<'_, '_>) -> Decoded {
    let modes = [
        ("all", VoteMode::All),
        ("any", VoteMode::Any),
        ("uni", VoteMode::Uni),
        ("ballot", VoteMode::Ballot),
    ];
    let (sync, mode) = (cx.m.take("sync"), cx.m.one_of(&modes));
    let (Some(mode), true) = (mode, sync) else { return Err(cx.unknown()) };
    let ty = cx.m.ty()?;
    let [d, a, mask] = cx.operands()?;
    let (a, negated) = cx.scope.p_or_not(&a)?;
    let d = cx.scope.dest(&d)?;
    let fits = match (mode, ty, d) {
        (VoteMode::Ballot, Ty::B32, Any::W(_)) => true,
        (VoteMode::Ballot, ..) => false,
        (_, Ty::Pred, Any::P(_)) => true,
        _ => false,
    };
    match fits {
        true => Ok(Op::Vote { mode, d, a, negated, mask: cx.scope.w(&mask, 4)? }),
        false => Err(cx.unknown()),
    }
}

fn redux(cx: &mut Decoder<'_, '_>) -> Decoded {
    let functions = [
        ("add", IntFn::Add),
        ("min", IntFn::Min),
        ("max", IntFn::Max),
        ("and", IntFn::And),
        ("or", IntFn::Or),
        ("xor", IntFn::Xor),
    ];
    let (sync, f) = (cx.m.take("sync"), cx.m.one_of(&functions));
    let (Some(f), true) = (f, sync) else { return Err(cx.unknown()) };
    let bits = matches!(f, IntFn::And | IntFn::Or | IntFn::Xor);
    let ty = cx.m.ty_in(if bits { &[Ty::B32] } else { &[Ty::U32, Ty::S32] })?;
    let [d, a, mask] = cx.operands()?;
    let s = &mut *cx.scope;
    Ok(Op::Redux { f, ty, d: s.dw(&d)?, a: s.w(&a, 4)?, mask: s.w(&mask, 4)? })
}

/// Types of a, b, the number k, and how many registers a and b have.
const SHAPES: [(&str, &[Fragment], usize, usize); 3] = [
    ("m16n8k16", &[Fragment::F16, Fragment::BF16], 4, 2),
    ("m16n8k8", &[Fragment::F16, Fragment::BF16], 2, 1),
    ("m16n8k32", &[Fragment::S8, Fragment::U8], 4, 2),
];

fn mma(cx: &mut Decoder<'_, '_>) -> Decoded {
    let plain = ["sync", "aligned", "row", "col"].iter().all(|word| cx.m.take(word));
    let shape = SHAPES.iter().find(|(name, ..)| cx.m.take(name));
    let (Some((name, allowed, a_count, b_count)), true) = (shape, plain) else { return Err(cx.unknown()) };
    let satfinite = cx.m.take("satfinite");
    let d_ty = cx.m.ty()?;
    let fragment = |ty| match ty {
        Ty::F16 => Some(Fragment::F16),
        Ty::BF16 => Some(Fragment::BF16),
        Ty::S8 => Some(Fragment::S8),
        Ty::U8 => Some(Fragment::U8),
        _ => None,
    };
    let (a_ty, b_ty, c_ty) = (fragment(cx.m.ty()?), fragment(cx.m.ty()?), cx.m.ty()?);
    let (Some(a_ty), Some(b_ty)) = (a_ty, b_ty) else { return Err(cx.unknown()) };
    let bytes = matches!(a_ty, Fragment::S8 | Fragment::U8);
    let sums = match d_ty {
        Ty::F32 => !bytes,
        Ty::F16 => a_ty == Fragment::F16,
        Ty::S32 => bytes,
        _ => false,
    };
    let same = a_ty == b_ty || bytes;
    if !sums
        || !same
        || c_ty != d_ty
        || !allowed.contains(&a_ty)
        || !allowed.contains(&b_ty)
        || satfinite && !bytes
    {
        return Err(cx.unknown());
    }
    let half_sums = d_ty == Ty::F16;
    let sum_count = if half_sums { 2 } else { 4 };
    let [d, a, b, c] = cx.operands()?;
    let k = name["m16n8k".len()..].parse().unwrap_or(0);
    let mut list = |operand: &Operand<'_>, count: usize, dest: bool| -> Result<Vec<W>, String> {
        let parts = match operand {
            Operand::Vector(parts) => parts.clone(),
            single => vec![single.clone()],
        };
        if parts.len() != count {
            return Err(format!("a fragment of {} registers, it has {count}", parts.len()));
        }
        parts
            .iter()
            .map(|part| match (dest, part) {
                (true, Operand::Name(name)) | (false, Operand::Name(name)) => {
                    match cx.scope.register(name)? {
                        Any::W(w) => Ok(w),
                        _ => Err(format!("{name} has not 32 bits")),
                    }
                }
                (false, Operand::Int(value)) => Ok(cx.scope.constant_w(*value as u32)),
                (false, Operand::Float(bits)) => Ok(cx.scope.constant_w(*bits)),
                _ => Err("a fragment consists of registers".into()),
            })
            .collect()
    };
    let (d, a, b) = (list(&d, sum_count, true)?, list(&a, *a_count, false)?, list(&b, *b_count, false)?);
    let c = list(&c, sum_count, false)?;
    Ok(Op::Mma(Box::new(Mma { k, a_ty, b_ty, half_sums, satfinite, d, a, b, c })))
}

//! Control flow and what threads do together.

use super::decode::{DecodeResult, InstructionDecoder};
use super::op::{AnyRegister, IntFn, MmaElement, MmaOp, PtxOp, PtxType, ShflMode, VoteMode, WordRegister};
use super::text::PtxOperand;

pub fn decode(cx: &mut InstructionDecoder<'_, '_>, name: &str) -> DecodeResult {
    match name {
        "bra" => {
            cx.m.take("uni");
            let [to] = cx.operands()?;
            Ok(PtxOp::Bra { to: cx.scope.label(&to)? })
        }
        "ret" | "exit" => {
            cx.m.take("uni");
            let [] = cx.operands()?;
            Ok(PtxOp::Ret)
        }
        "trap" => Ok(PtxOp::Trap),
        "bar" | "barrier" => bar(cx, name == "bar"),
        "membar" | "fence" => fence(cx),
        "shfl" => shfl(cx),
        "vote" => vote(cx),
        "activemask" => {
            cx.m.ty_in(&[PtxType::B32])?;
            let [d] = cx.operands()?;
            Ok(PtxOp::Activemask { d: cx.scope.dw(&d)? })
        }
        "redux" => redux(cx),
        "mma" => mma(cx),
        _ => Err(cx.unknown()),
    }
}

fn bar(cx: &mut InstructionDecoder<'_, '_>, always_aligned: bool) -> DecodeResult {
    cx.m.take("cta");
    if cx.m.take("warp") {
        let [mask] = cx.operands()?;
        return match cx.m.take("sync") {
            true => Ok(PtxOp::WarpSync { mask: cx.scope.w(&mask, 4)? }),
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
    Ok(PtxOp::Bar { id: cx.scope.w(&operands[0], 4)?, threads })
}

fn fence(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
    for word in ["acq_rel", "sc"] {
        cx.m.take(word);
    }
    let scopes = [("cta", true), ("gl", false), ("gpu", false), ("sys", false)];
    let [] = cx.operands()?;
    cx.m.one_of(&scopes).map(|block| PtxOp::Fence { block }).ok_or_else(|| cx.unknown())
}

fn shfl(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
    let modes =
        [("up", ShflMode::Up), ("down", ShflMode::Down), ("bfly", ShflMode::Bfly), ("idx", ShflMode::Idx)];
    let (sync, mode) = (cx.m.take("sync"), cx.m.one_of(&modes));
    let (Some(mode), true) = (mode, sync) else { return Err(cx.unknown()) };
    cx.m.ty_in(&[PtxType::B32])?;
    let [d, a, b, c, mask] = cx.operands()?;
    let s = &mut *cx.scope;
    let (d, p) = match d {
        PtxOperand::Pair(d, p) => (s.dw(&PtxOperand::Name(d))?, Some(s.pred(p)?)),
        d => (s.dw(&d)?, None),
    };
    Ok(PtxOp::Shfl { mode, d, p, a: s.w(&a, 4)?, b: s.w(&b, 4)?, c: s.w(&c, 4)?, mask: s.w(&mask, 4)? })
}

fn vote(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
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
        (VoteMode::Ballot, PtxType::B32, AnyRegister::W(_)) => true,
        (VoteMode::Ballot, ..) => false,
        (_, PtxType::Pred, AnyRegister::P(_)) => true,
        _ => false,
    };
    match fits {
        true => Ok(PtxOp::Vote { mode, d, a, negated, mask: cx.scope.w(&mask, 4)? }),
        false => Err(cx.unknown()),
    }
}

fn redux(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
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
    let ty = cx.m.ty_in(if bits { &[PtxType::B32] } else { &[PtxType::U32, PtxType::S32] })?;
    let [d, a, mask] = cx.operands()?;
    let s = &mut *cx.scope;
    Ok(PtxOp::Redux { f, ty, d: s.dw(&d)?, a: s.w(&a, 4)?, mask: s.w(&mask, 4)? })
}

/// Types of a, b, the number k, and how many registers a and b have.
const SHAPES: [(&str, &[MmaElement], usize, usize); 3] = [
    ("m16n8k16", &[MmaElement::F16, MmaElement::BF16], 4, 2),
    ("m16n8k8", &[MmaElement::F16, MmaElement::BF16], 2, 1),
    ("m16n8k32", &[MmaElement::S8, MmaElement::U8], 4, 2),
];

fn mma(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
    let plain = ["sync", "aligned", "row", "col"].iter().all(|word| cx.m.take(word));
    let shape = SHAPES.iter().find(|(name, ..)| cx.m.take(name));
    let (Some((name, allowed, a_count, b_count)), true) = (shape, plain) else { return Err(cx.unknown()) };
    let satfinite = cx.m.take("satfinite");
    let d_ty = cx.m.ty()?;
    let fragment = |ty| match ty {
        PtxType::F16 => Some(MmaElement::F16),
        PtxType::BF16 => Some(MmaElement::BF16),
        PtxType::S8 => Some(MmaElement::S8),
        PtxType::U8 => Some(MmaElement::U8),
        _ => None,
    };
    let (a_ty, b_ty, c_ty) = (fragment(cx.m.ty()?), fragment(cx.m.ty()?), cx.m.ty()?);
    let (Some(a_ty), Some(b_ty)) = (a_ty, b_ty) else { return Err(cx.unknown()) };
    let bytes = matches!(a_ty, MmaElement::S8 | MmaElement::U8);
    let sums = match d_ty {
        PtxType::F32 => !bytes,
        PtxType::F16 => a_ty == MmaElement::F16,
        PtxType::S32 => bytes,
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
    let half_sums = d_ty == PtxType::F16;
    let sum_count = if half_sums { 2 } else { 4 };
    let [d, a, b, c] = cx.operands()?;
    let k = name["m16n8k".len()..].parse().unwrap_or(0);
    let mut list =
        |operand: &PtxOperand<'_>, count: usize, dest: bool| -> Result<Vec<WordRegister>, String> {
            let parts = match operand {
                PtxOperand::Vector(parts) => parts.clone(),
                single => vec![single.clone()],
            };
            if parts.len() != count {
                return Err(format!("a fragment of {} registers, it has {count}", parts.len()));
            }
            parts
                .iter()
                .map(|part| match (dest, part) {
                    (true, PtxOperand::Name(name)) | (false, PtxOperand::Name(name)) => {
                        match cx.scope.register(name)? {
                            AnyRegister::W(w) => Ok(w),
                            _ => Err(format!("{name} has not 32 bits")),
                        }
                    }
                    (false, PtxOperand::Int(value)) => Ok(cx.scope.constant_w(*value as u32)),
                    (false, PtxOperand::Float(bits)) => Ok(cx.scope.constant_w(*bits)),
                    _ => Err("a fragment consists of registers".into()),
                })
                .collect()
        };
    let (d, a, b) = (list(&d, sum_count, true)?, list(&a, *a_count, false)?, list(&b, *b_count, false)?);
    let c = list(&c, sum_count, false)?;
    Ok(PtxOp::Mma(Box::new(MmaOp { k, a_ty, b_ty, half_sums, satfinite, d, a, b, c })))
}

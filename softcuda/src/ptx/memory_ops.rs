//! Loads, stores, atomics and copies.

use super::decode::{DecodeResult, InstructionDecoder};
use super::op::{AnyRegister, AtomFn, MemoryOrdering, PtxOp, PtxType, StateSpace};
use super::text::PtxOperand;

pub fn decode(cx: &mut InstructionDecoder<'_, '_>, name: &str) -> DecodeResult {
    match name {
        "ld" => ld(cx),
        "st" => st(cx),
        "atom" | "red" => atom(cx, name == "atom"),
        "cp" => cp(cx),
        "ldmatrix" => ldmatrix(cx),
        "prefetch" => {
            for word in ["global", "L1", "L2"] {
                cx.m.take(word);
            }
            let [at] = cx.operands()?;
            cx.scope.address(&at)?;
            Ok(PtxOp::Nothing)
        }
        _ => Err(cx.unknown()),
    }
}

fn space(cx: &mut InstructionDecoder<'_, '_>) -> Result<StateSpace, String> {
    let spaces = [
        ("global", StateSpace::Global),
        ("shared::cta", StateSpace::Shared),
        ("shared", StateSpace::Shared),
        ("local", StateSpace::Local),
        ("param", StateSpace::Param),
    ];
    let opcode = cx.m.opcode();
    cx.m.one_of(&spaces)
        .ok_or_else(|| format!("`{opcode}` goes to a state space that this driver does not know"))
}

/// Order of an access; its scope makes no difference here.
fn ordering(cx: &mut InstructionDecoder<'_, '_>) -> MemoryOrdering {
    let strong = ["relaxed", "release", "volatile"].map(|word| cx.m.take(word)).contains(&true);
    let acquire = ["acquire", "acq_rel"].map(|word| cx.m.take(word)).contains(&true);
    for scope in ["cta", "cluster", "gpu", "sys"] {
        cx.m.take(scope);
    }
    match (acquire, strong) {
        (true, _) => MemoryOrdering::Acquire,
        (_, true) => MemoryOrdering::Strong,
        _ => MemoryOrdering::Weak,
    }
}

fn parts<'a>(operand: &PtxOperand<'a>, count: usize, opcode: &str) -> Result<Vec<PtxOperand<'a>>, String> {
    let parts = match operand {
        PtxOperand::Vector(parts) => parts.clone(),
        single => vec![single.clone()],
    };
    match parts.len() == count {
        true => Ok(parts),
        false => Err(format!("`{opcode}` with {} elements", parts.len())),
    }
}

/// Registers of loads and stores may be wider than the type.
fn wide_enough(register: AnyRegister, ty: PtxType) -> bool {
    match register {
        AnyRegister::W(_) => ty.bytes() <= 4,
        AnyRegister::D(_) => ty.bytes() <= 8,
        AnyRegister::P(_) => false,
    }
}

fn ld(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
    let space = space(cx)?;
    let order = ordering(cx);
    let nc = cx.m.take("nc");
    cx.m.cache_hints();
    let vector = cx.m.vector();
    let ty = cx.m.ty()?;
    let [d, at] = cx.operands()?;
    let mut registers = vec![];
    for part in parts(&d, vector, cx.m.opcode())? {
        let register = cx.scope.dest(&part)?;
        if !wide_enough(register, ty) {
            return Err(format!("`{}`: {part:?} is too narrow", cx.m.opcode()));
        }
        registers.push(register);
    }
    if vector as u32 * ty.bytes() > 16 {
        return Err(format!("`{}` is wider than 16 bytes", cx.m.opcode()));
    }
    if space == StateSpace::Param {
        return Ok(PtxOp::LdParam { ty, d: registers, offset: cx.scope.param(&at)? });
    }
    Ok(PtxOp::Ld { space, nc, order, ty, d: registers, at: cx.scope.address(&at)? })
}

fn st(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
    let space = space(cx)?;
    if space == StateSpace::Param {
        return Err(cx.unknown());
    }
    let order = ordering(cx);
    cx.m.cache_hints();
    let vector = cx.m.vector();
    let ty = cx.m.ty()?;
    let [at, a] = cx.operands()?;
    let mut sources = vec![];
    for part in parts(&a, vector, cx.m.opcode())? {
        let source = match &part {
            PtxOperand::Name(_) => cx.scope.dest(&part)?,
            _ if ty.bytes() == 8 => AnyRegister::D(cx.scope.d(&part)?),
            _ => AnyRegister::W(cx.scope.w(&part, ty.bytes())?),
        };
        if !wide_enough(source, ty) {
            return Err(format!("`{}`: {part:?} is too narrow", cx.m.opcode()));
        }
        sources.push(source);
    }
    if vector as u32 * ty.bytes() > 16 {
        return Err(format!("`{}` is wider than 16 bytes", cx.m.opcode()));
    }
    Ok(PtxOp::St { space, order, ty, a: sources, at: cx.scope.address(&at)? })
}

fn atom(cx: &mut InstructionDecoder<'_, '_>, returns: bool) -> DecodeResult {
    let functions = [
        ("add", AtomFn::Add),
        ("min", AtomFn::Min),
        ("max", AtomFn::Max),
        ("and", AtomFn::And),
        ("or", AtomFn::Or),
        ("xor", AtomFn::Xor),
        ("exch", AtomFn::Exch),
        ("cas", AtomFn::Cas),
        ("inc", AtomFn::Inc),
        ("dec", AtomFn::Dec),
    ];
    ordering(cx);
    let space = space(cx)?;
    let Some(f) = cx.m.one_of(&functions) else { return Err(cx.unknown()) };
    let ty = cx.m.ty_in(&[
        PtxType::U32,
        PtxType::S32,
        PtxType::B32,
        PtxType::U64,
        PtxType::S64,
        PtxType::B64,
        PtxType::F32,
    ])?;
    let fits = match f {
        AtomFn::Add => ty.float() || ty.integer(),
        AtomFn::Min | AtomFn::Max => ty.integer(),
        AtomFn::Inc | AtomFn::Dec => ty == PtxType::U32,
        AtomFn::And | AtomFn::Or | AtomFn::Xor | AtomFn::Exch | AtomFn::Cas => !ty.float() && !ty.integer(),
    };
    if !fits || matches!(space, StateSpace::Param | StateSpace::Local) {
        return Err(cx.unknown());
    }
    let sources = if f == AtomFn::Cas { 2 } else { 1 };
    let (operands, opcode) = (cx.all(), cx.m.opcode());
    let expected = usize::from(returns) + 1 + sources;
    if operands.len() != expected {
        return Err(format!("`{opcode}` with {} operands, it takes {expected}", operands.len()));
    }
    let mut rest = operands.iter();
    let d = match returns {
        true => Some(cx.scope.dest(rest.next().ok_or("no destination")?)?),
        false => None,
    };
    let at = cx.scope.address(rest.next().ok_or("no address")?)?;
    let mut values = vec![];
    for operand in rest {
        values.push(match ty.bytes() {
            8 => AnyRegister::D(cx.scope.d(operand)?),
            _ => AnyRegister::W(cx.scope.w(operand, 4)?),
        });
    }
    Ok(PtxOp::Atom { space, f, ty, d, at, b: values[0], c: values.get(1).copied() })
}

fn cp(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
    if !cx.m.take("async") {
        return Err(cx.unknown());
    }
    if cx.m.take("commit_group") {
        let [] = cx.operands()?;
        return Ok(PtxOp::CpCommit);
    }
    if cx.m.take("wait_all") {
        let [] = cx.operands()?;
        return Ok(PtxOp::CpWait { groups: None });
    }
    if cx.m.take("wait_group") {
        let [groups] = cx.operands()?;
        let PtxOperand::Int(groups) = groups else { return Err(cx.unknown()) };
        let groups = u32::try_from(groups).map_err(|_| "a negative number of groups")?;
        return Ok(PtxOp::CpWait { groups: Some(groups) });
    }
    let (all, l2_only) = (cx.m.take("ca"), cx.m.take("cg"));
    let shared = cx.m.take("shared::cta") || cx.m.take("shared");
    if all == l2_only || !shared || !cx.m.take("global") {
        return Err(cx.unknown());
    }
    cx.m.cache_hints();
    let operands = cx.all();
    let (3, Some(PtxOperand::Int(bytes @ (4 | 8 | 16)))) = (operands.len().min(3), operands.get(2)) else {
        return Err(format!("`{}` copies 4, 8 or 16 bytes", cx.m.opcode()));
    };
    if l2_only && *bytes != 16 || operands.len() > 4 {
        return Err(format!("`{}` copies 16 bytes", cx.m.opcode()));
    }
    let (to, from) = (cx.scope.address(&operands[0])?, cx.scope.address(&operands[1])?);
    let from_bytes = operands.get(3).map(|size| cx.scope.w(size, 4)).transpose()?;
    Ok(PtxOp::CpAsync { bytes: *bytes as u32, to, from, from_bytes })
}

fn ldmatrix(cx: &mut InstructionDecoder<'_, '_>) -> DecodeResult {
    let sync = cx.m.take("sync") && cx.m.take("aligned") && cx.m.take("m8n8");
    let count = cx.m.one_of(&[("x1", 1), ("x2", 2), ("x4", 4)]);
    let (Some(count), true) = (count, sync) else { return Err(cx.unknown()) };
    let transposed = cx.m.take("trans");
    let shared = cx.m.take("shared::cta") || cx.m.take("shared");
    if !shared {
        return Err(cx.unknown());
    }
    cx.m.ty_in(&[PtxType::B16])?;
    let [d, at] = cx.operands()?;
    let mut registers = vec![];
    for part in parts(&d, count, cx.m.opcode())? {
        registers.push(cx.scope.dw(&part)?);
    }
    Ok(PtxOp::Ldmatrix { transposed, d: registers, at: cx.scope.address(&at)? })
}

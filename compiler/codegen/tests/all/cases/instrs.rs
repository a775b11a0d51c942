//! Rows of the instruction table.

use super::KernelCase;
use super::values::{any, tame};
use mlcc_interp::compare::Tolerance;
use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::instr::{InstrId, InstrSemantics};
use mlcc_ir::kernel::*;

/// Every instruction of the table that is an expression: with its spelling where a level has it, expanded
/// elsewhere.
pub fn instructions() -> Vec<KernelCase> {
    let expressions = InstrId::all().filter(|id| matches!(id.def().meaning, InstrSemantics::Expr(_)));
    expressions.filter_map(|id| Some(instr_case(id, id.def().ret?))).collect()
}

fn instr_case(id: InstrId, ret: ExprType) -> KernelCase {
    let def = id.def();
    let mut kb = KernelBuilder::new(def.name);
    let rounds = 16;
    let (mut params, mut buffers) = (Vec::new(), Vec::new());
    for (i, ty) in def.args.iter().enumerate() {
        let len = ty.lanes as usize * rounds;
        params.push(kb.param(&format!("a{i}"), ty.dtype, len, ParamAccess::In, 1));
        let random =
            if ty.dtype.is_float() { tame(ty.dtype, len, i as u64) } else { any(ty.dtype, len, i as u64) };
        buffers.push(random);
    }
    let out = kb.param("out", ret.dtype, ret.lanes as usize * rounds, ParamAccess::Out, 1);
    buffers.push(KernelBuffer::zeros(ret.dtype, ret.lanes as usize * rounds));
    let extent = kb.int(rounds as i64);
    kb.par("r", extent, |kb, r| {
        let args = def.args.iter().zip(&params).map(|(ty, &buf)| {
            let at = kb.mul_int(r, i64::from(ty.lanes));
            kb.load_vec(buf, at, ty.lanes)
        });
        let args: Vec<ExprId> = args.collect();
        let value = kb.instr(id, args);
        let at = kb.mul_int(r, i64::from(ret.lanes));
        kb.store_vec(out, at, value);
    });
    let mut case = KernelCase::new(kb.finish(), buffers);
    // dpbf16 flushes denormals and rounds in its own way.
    case.tolerance = Tolerance::relative(1e-5);
    case
}

//! Weight quantization: gives every parameter the storage type that the scheme and the per-tensor policy
//! choose, and puts `dequantize` after each use of one that is no longer f32. Numbers change here (that is
//! the point), and only here: later passes work on the same stored weights.

use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::entity::EntityId;
use mlcc_ir::module::ParamRole;
use mlcc_ir::ops::{Op, OpError};
use mlcc_ir::types::DType;
use std::collections::BTreeMap;

const PASS: &str = "quantize";

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let (scheme, policy) = (ctx.options.quant, ctx.options.policy.clone());
    policy.check_rules(&scheme, program.module.params.values())?;
    let mut changed = vec![false; program.module.params.len()];
    let mut kinds: BTreeMap<(ParamRole, DType), usize> = BTreeMap::new();
    for id in program.module.params.ids().collect::<Vec<_>>() {
        let param = &mut program.module.params[id];
        let (dtype, options) = policy.choose_format(&scheme, param);
        *kinds.entry((param.role, dtype)).or_default() += 1;
        if let Some(rule) = policy.rule_for(&param.name) {
            ctx.note(format!("{}: {dtype} by the rule for {}", param.name, rule.glob));
        }
        if param.ty.dtype == DType::F32 && dtype != DType::F32 {
            param.ty.dtype = dtype;
            changed[id.index()] = true;
            program.pack_options.insert(param.name.clone(), options);
        }
    }
    for ((role, dtype), n) in kinds {
        ctx.note(format!("{}: {n} {} parameters as {dtype}", scheme.name, role.name()));
    }
    for id in program.module.functions.ids().collect::<Vec<_>>() {
        let module = &program.module;
        let rebuilt = module.functions[id].rebuild(|out, _, op, _| match op {
            Op::Param(p) if changed[p.index()] => {
                let stored = out.append(module, op.clone(), &[])?[0];
                out.append(module, Op::Dequantize, &[stored]).map(Some)
            }
            _ => Ok::<_, OpError>(None),
        });
        program.module.functions[id] = rebuilt.map_err(PassError::op_error(PASS))?;
    }
    Ok(changed.iter().filter(|&&c| c).count())
}

//! Constant folding: elementwise ops on constants are computed by the interpreter now. Results that are not
//! finite stay computations, so that they show where they arise.

use crate::{LoweredProgram, PassContext, PassError};
use mlcc_interp::graph::{Interpreter, StateValues, Tensor};
use mlcc_ir::dim::SymValues;
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::module::Module;
use mlcc_ir::ops::{Op, OpError};
use mlcc_ir::types::DType;

const PASS: &str = "fold";

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let mut total = 0;
    for id in program.module.functions.ids().collect::<Vec<_>>() {
        let f = &program.module.functions[id];
        let mut count = 0;
        let rebuilt = f.rebuild(|out, _, op, inputs| {
            let constant = |&v| match out.defining_node(v).map(|n| &n.op) {
                Some(Op::Constant { value, dtype }) => Some((*value, *dtype)),
                _ => None,
            };
            let Some(operands) = inputs.iter().map(constant).collect::<Option<Vec<_>>>() else {
                return Ok(None);
            };
            if operands.is_empty() || !op.is_elementwise() {
                return Ok(None);
            }
            let Some((value, dtype)) = evaluate(op, &operands) else { return Ok(None) };
            count += 1;
            out.append(&program.module, Op::Constant { value, dtype }, &[]).map(Some)
        });
        let rebuilt = rebuilt.map_err(PassError::op_error(PASS))?;
        program.module.functions[id] = rebuilt;
        if count > 0 {
            ctx.note(format!("@{}: {count} ops on constants", program.module.functions[id].name));
        }
        total += count;
    }
    Ok(total)
}

/// Value and type of an op on constants; `None` if it is not finite.
fn evaluate(op: &Op, operands: &[(f64, DType)]) -> Option<(f64, DType)> {
    let mut module = Module::new("fold");
    let mut f = Function::new("f", FunctionKind::Entry);
    let inputs: Result<Vec<_>, OpError> = operands
        .iter()
        .map(|&(value, dtype)| Ok(f.append(&module, Op::Constant { value, dtype }, &[])?[0]))
        .collect();
    f.outputs = f.append(&module, op.clone(), &inputs.ok()?).ok()?;
    let id = module.functions.push(f);
    let mut states = StateValues::new(&module).ok()?;
    let interpreter = Interpreter::new(&module, |_| Tensor::f32(&[], &[0.0]));
    let result = interpreter.run(id, &[], &mut states, SymValues::for_tokens(1)).ok()?;
    let value = *result.first()?.data.first()?;
    value.is_finite().then(|| (value, result[0].dtype))
}

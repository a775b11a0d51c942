//! Replaces norms and softmax by the ops they are defined by, so that fusion sees elementwise ops and
//! reductions. Attention stays: it has its own kernels.

use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::ops::{Op, OpSemantics};
use mlcc_ir::types::TensorType;

const PASS: &str = "decompose";

pub fn run(program: &mut LoweredProgram, _: &mut PassContext) -> Result<usize, PassError> {
    let mut count = 0;
    for id in program.module.functions.ids().collect::<Vec<_>>() {
        let f = &program.module.functions[id];
        // Attention and quantized activations have kernels of their own.
        let decomposes = |op: &Op, types: &[&TensorType]| {
            let whole = matches!(op, Op::Attention(_) | Op::QuantizeRows { .. });
            matches!(op.semantics(types), OpSemantics::Decompose) && !whole
        };
        let rebuilt = f.rebuild(|out, _, op, inputs| {
            let types: Vec<&TensorType> = inputs.iter().map(|&v| out.ty(v)).collect();
            if !decomposes(op, &types) {
                return Ok(None);
            }
            count += 1;
            op.decompose(&program.module, out, inputs).map(Some).map_err(PassError::op_error(PASS))
        })?;
        program.module.functions[id] = rebuilt;
    }
    Ok(count)
}

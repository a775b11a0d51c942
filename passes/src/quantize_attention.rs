//! Products of attention on 16-bit codes (`AttentionOp::codes`), where the scheme asks for activations of 8
//! bits: for several queries, and for one query where rows are to have the same bits alone and together. For
//! CPUs.

use crate::scheme::ActivationType;
use crate::{LoweredProgram, PassContext, PassError};
use mlcc_ir::graph::GraphNode;
use mlcc_ir::ops::Op;
use mlcc_target::Arch;

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let on_gpu = ctx.options.levels.iter().any(|(_, target)| target.arch == Arch::Nvptx);
    if on_gpu || ctx.options.quant.activation != ActivationType::I8 {
        return Ok(0);
    }
    let of_one = ctx.options.levels.iter().any(|(_, target)| target.batch_invariant);
    let mut count = 0;
    for id in program.module.functions.ids().collect::<Vec<_>>() {
        let f = &mut program.module.functions[id];
        let of_several = |node: &GraphNode| match node.op {
            Op::Attention(_) => of_one || f.ty(node.inputs[0]).dims[0].as_const() != Some(1),
            _ => false,
        };
        let found: Vec<_> = f.live_nodes().filter(|(_, node)| of_several(node)).map(|(id, _)| id).collect();
        for id in found {
            if let Op::Attention(a) = &mut f.nodes[id].op {
                a.codes = true;
                count += 1;
            }
        }
    }
    Ok(count)
}

//! Graph level to kernel level, once per level of the target; all levels read the same packed weights.

use crate::{LevelCode, LoweredProgram, PassContext, PassError};
use mlcc_kernels::lower::{choose_packings, lower};

const PASS: &str = "lower";

pub fn run(program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let levels = ctx.options.levels.clone();
    let (_, best) = levels.first().ok_or_else(|| PassError::internal(PASS, "no target level"))?;
    program.levels.clear();
    program.memory = None;
    choose_packings(&mut program.module, best);
    for (name, target) in levels {
        let lowered = lower(&program.module, &target, ctx.options.chunk.max(ctx.options.batch))?;
        ctx.note(format!("{name}: {} kernels", lowered.kernels.len()));
        for (kernel, made) in lowered.kernels.iter().zip(&lowered.explanations) {
            ctx.note(format!("{name}: @{}: {made}", kernel.name));
        }
        program.levels.push(LevelCode { name, target, lowered, steps: Vec::new() });
    }
    Ok(program.levels.iter().map(|l| l.lowered.kernels.len()).sum())
}

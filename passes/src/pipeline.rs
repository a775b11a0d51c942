//! The list of passes.

use crate::verify::verify_program;
use crate::{LoweredProgram, PassContext, PassError};
use crate::{
    canonicalize, cse, dce, decompose, defer_logits, dynamic_shares, exchange_codes, fold, fuse,
    fuse_attention, fuse_dequantize, fuse_transpose_matmul, halve_activations, join_launches, legalize,
    lower,
};
use crate::{
    merge_projections, outline, plan_barriers, plan_memory, quantize, quantize_activations,
    quantize_attention, quantize_cache, recognize_scan, replicate, shard,
};
use mlcc_files::did_you_mean;
use mlcc_ir::verify::verify_module;

/// One transformation of the program.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    pub name: &'static str,
    /// One line for the help text.
    pub about: &'static str,
    /// True if the result is right without it.
    pub optional: bool,
    /// Returns how many places it changed.
    pub run: fn(&mut LoweredProgram, &mut PassContext) -> Result<usize, PassError>,
}

/// The order of compilation.
pub const PIPELINE: &[Pass] = &[
    Pass {
        name: "canonicalize",
        about: "movements that move nothing and neutral arithmetic are removed",
        optional: true,
        run: canonicalize::run,
    },
    Pass { name: "fold", about: "arithmetic on constants is done now", optional: true, run: fold::run },
    Pass {
        name: "fuse_transpose_matmul",
        about: "products with a transposed weight into the form that kernels read",
        optional: true,
        run: fuse_transpose_matmul::run,
    },
    Pass { name: "cse", about: "equal computations once", optional: true, run: cse::run },
    Pass {
        name: "fuse_attention",
        about: "softmax between two products as one attention",
        optional: true,
        run: fuse_attention::run,
    },
    Pass {
        name: "quantize",
        about: "weights into the storage types of the quantization scheme",
        optional: true,
        run: quantize::run,
    },
    Pass {
        name: "shard",
        about: "the model split among ranks, where it is compiled for several",
        optional: true,
        run: shard::run,
    },
    Pass {
        name: "quantize_cache",
        about: "keys and values into the storage type of the cache",
        optional: true,
        run: quantize_cache::run,
    },
    Pass {
        name: "quantize_activations",
        about: "products of packed weights on integer activations: 8 bits where the scheme asks for it, else 16 on CPUs with dot instructions; of bf16 weights on bf16 ones where it asks for that",
        optional: true,
        run: quantize_activations::run,
    },
    Pass {
        name: "exchange_codes",
        about: "ranks gather codes and scales for products on 8-bit activations if `--tp-mode codes` asks for it",
        optional: true,
        run: exchange_codes::run,
    },
    Pass {
        name: "quantize_attention",
        about: "attention of several queries on 16-bit codes, where the scheme asks for 8-bit activations; on CPUs",
        optional: true,
        run: quantize_attention::run,
    },
    Pass {
        name: "halve_activations",
        about: "products on activations in f16, and in bf16 where they are squares, where the scheme's name says f16; on GPUs",
        optional: true,
        run: halve_activations::run,
    },
    Pass {
        name: "fuse_dequantize",
        about: "products and gathers that read stored weights themselves",
        optional: true,
        run: fuse_dequantize::run,
    },
    Pass {
        name: "merge_projections",
        about: "products that read one input as one product",
        optional: true,
        run: merge_projections::run,
    },
    Pass {
        name: "recognize_scan",
        about: "stabilised pairs of exponentials in recurrences with one exponential",
        optional: true,
        run: recognize_scan::run,
    },
    Pass { name: "dce", about: "unused code is removed", optional: true, run: dce::run },
    Pass {
        name: "decompose",
        about: "norms and softmax as elementwise ops and reductions",
        optional: false,
        run: decompose::run,
    },
    Pass {
        name: "legalize",
        about: "what lowering needs; what no kernel can do is refused",
        optional: false,
        run: legalize::run,
    },
    Pass { name: "fuse", about: "neighbouring ops into one kernel", optional: true, run: fuse::run },
    Pass {
        name: "outline",
        about: "every remaining op into a kernel of its own",
        optional: false,
        run: outline::run,
    },
    Pass {
        name: "defer_logits",
        about: "what only logits need after all that states need, so that a prompt's chunk may end before it",
        optional: false,
        run: defer_logits::run,
    },
    Pass { name: "lower", about: "kernels as loops, per target level", optional: false, run: lower::run },
    Pass {
        name: "replicate",
        about: "small kernels are computed by every worker for itself instead of by one",
        optional: true,
        run: replicate::run,
    },
    Pass {
        name: "join_launches",
        about: "independent kernels share one launch; on GPUs",
        optional: true,
        run: join_launches::run,
    },
    Pass {
        name: "plan_memory",
        about: "addresses for weights, states and temporaries",
        optional: false,
        run: plan_memory::run,
    },
    Pass {
        name: "dynamic_shares",
        about: "large kernels in chunks, which idle workers take from others",
        optional: true,
        run: dynamic_shares::run,
    },
    Pass {
        name: "plan_barriers",
        about: "steps with barriers where data crosses workers",
        optional: false,
        run: plan_barriers::run,
    },
];

/// Sees the program after each pass, with the pass's number of changes.
pub type PassObserver<'a> = dyn FnMut(&Pass, &LoweredProgram, usize) + 'a;

/// Control of a run: which passes run, and who watches.
#[derive(Default)]
pub struct PipelineControl<'a> {
    /// Names of passes that are skipped.
    pub disabled: Vec<String>,
    /// The last pass to run.
    pub stop_after: Option<String>,
    /// Checks the module after each pass (always done in debug builds).
    pub verify: bool,
    /// Only the passes after the one that ran last ([`LoweredProgram::after`]).
    pub resume: bool,
    /// Called after each pass with its number of changes.
    pub after: Option<&'a mut PassObserver<'a>>,
}

/// The pass of that name.
pub fn find_pass(name: &str) -> Result<&'static Pass, PassError> {
    find_in(PIPELINE, name)
}

pub(crate) fn find_in<'p>(passes: &'p [Pass], name: &str) -> Result<&'p Pass, PassError> {
    let near = || did_you_mean(name, passes.iter().map(|p| p.name));
    passes
        .iter()
        .find(|p| p.name == name)
        .ok_or_else(|| PassError::Unknown { name: name.into(), near: near() })
}

/// True for the passes that change numbers on purpose; all others keep the meaning of the module.
pub fn changes_numbers(pass: &str) -> bool {
    let quantizes = ["quantize", "quantize_activations", "quantize_attention", "quantize_cache"];
    quantizes.contains(&pass) || pass == "halve_activations"
}

/// Runs one pass by name.
pub fn run_pass(name: &str, program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    let pass = find_pass(name)?;
    let changes = run_one(pass, program, ctx)?;
    // Graph passes may be tried in any order; a lowered program is at its place in the pipeline.
    if !program.levels.is_empty() {
        program.after = Some(pass.name);
    }
    Ok(changes)
}

/// The number of passes that a program has behind it.
pub fn passes_done(passes: &[Pass], program: &LoweredProgram) -> usize {
    program.after.and_then(|after| passes.iter().position(|p| p.name == after)).map_or(0, |at| at + 1)
}

/// Runs one pass.
pub fn run_one(pass: &Pass, program: &mut LoweredProgram, ctx: &mut PassContext) -> Result<usize, PassError> {
    ctx.pass = pass.name;
    (pass.run)(program, ctx)
}

/// Runs the pipeline.
pub fn run_pipeline(
    program: &mut LoweredProgram,
    ctx: &mut PassContext,
    control: PipelineControl,
) -> Result<(), PassError> {
    run_passes(PIPELINE, program, ctx, control)
}

/// Runs a list of passes, which is [`PIPELINE`] or a variant of it.
pub fn run_passes(
    passes: &[Pass],
    program: &mut LoweredProgram,
    ctx: &mut PassContext,
    mut control: PipelineControl,
) -> Result<(), PassError> {
    for name in control.disabled.iter().chain(&control.stop_after) {
        find_in(passes, name)?;
    }
    if let Some(name) = control.disabled.iter().find(|n| find_in(passes, n).is_ok_and(|p| !p.optional)) {
        return Err(PassError::Required { name: name.clone() });
    }
    let done = if control.resume { passes_done(passes, program) } else { 0 };
    if let (Some(stop), Some(after)) = (&control.stop_after, program.after)
        && passes[..done].iter().any(|p| p.name == *stop)
    {
        return Err(PassError::Behind { name: stop.clone(), after });
    }
    for pass in &passes[done..] {
        if control.disabled.iter().any(|d| d == pass.name) {
            continue;
        }
        let changes = run_one(pass, program, ctx)?;
        program.after = Some(pass.name);
        let verified = match control.verify {
            true => verify_program(program),
            false if cfg!(debug_assertions) => verify_module(&program.module),
            false => Ok(()),
        };
        verified.map_err(|e| {
            PassError::internal(pass.name, format!("it left a module that is not well formed: {e}"))
        })?;
        if let Some(after) = &mut control.after {
            after(pass, program, changes);
        }
        if control.stop_after.as_deref() == Some(pass.name) {
            break;
        }
    }
    Ok(())
}

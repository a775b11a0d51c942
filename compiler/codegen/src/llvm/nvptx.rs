//! GPU kernels to PTX text: one module per level, one `.visible .entry` per kernel.

use super::kernel::{ExecutionModel as Executes, KernelForm, emit_kernel};
use super::pipeline::LlvmPipeline;
use super::target::{EmitFormat, LlvmMachine};
use crate::cache::ObjectCache;
use crate::error::CodegenError;
use crate::launch::{blocks_of, threads_of};
use crate::model::{LevelInput, gpu_kernel_symbol};
use crate::objects::{ObjectKey, ObjectStore};
use crate::placement::placements;
use crate::prepare::{LevelCapabilities, prepare_kernel};
use inkwell::attributes::AttributeLoc;
use inkwell::context::Context;
use inkwell::module::{Linkage, Module};
use inkwell::values::FunctionValue;
use mlcc_target::{Arch, FeatureLevel};

/// Calling convention `ptx_kernel`.
const PTX_KERNEL: u32 = 71;

/// Compiles the kernels of one GPU level.
pub fn ptx_module(triple: &str, input: &LevelInput<'_>, output: EmitFormat) -> Result<Vec<u8>, CodegenError> {
    let objects = ObjectStore::new(None, None);
    let key = ptx_text(triple, input, output, &objects)?;
    Ok(objects.get(&key))
}

/// The same as PTX, unless there is some from an earlier call.
pub fn cached_ptx(
    triple: &str,
    input: &LevelInput<'_>,
    cache: &ObjectCache,
) -> Result<Vec<u8>, CodegenError> {
    let objects = ObjectStore::new(Some(cache), None);
    let key = ptx_text(triple, input, EmitFormat::Assembly, &objects)?;
    objects.finish();
    Ok(objects.get(&key))
}

/// Makes sure that the code of a GPU level is among `objects`.
pub(crate) fn ptx_text(
    triple: &str,
    input: &LevelInput<'_>,
    output: EmitFormat,
    objects: &ObjectStore<'_>,
) -> Result<ObjectKey, CodegenError> {
    let machine = LlvmMachine::new(Arch::Nvptx, triple, input.level)?;
    let ctx = Context::create();
    let module = module(&ctx, &machine, input)?;
    let (text, form) = (module.write_bitcode_to_memory(), format!("{output:?}"));
    let key = ObjectKey::from_parts(&[machine.identity().as_bytes(), form.as_bytes(), text.as_slice()]);
    objects.ensure_object(key, || {
        machine.optimize(&module, LlvmPipeline::Full)?;
        machine.emit(&module, output)
    })
}

fn module<'c>(
    ctx: &'c Context,
    machine: &LlvmMachine,
    input: &LevelInput<'_>,
) -> Result<Module<'c>, CodegenError> {
    let caps = LevelCapabilities::new(Arch::Nvptx, input.level);
    let module = machine.module(ctx, "mlcc");
    for kernel in input.kernels {
        let threads = threads_of(kernel)?;
        let prepared = prepare_kernel(kernel, &caps);
        for (number, placement) in placements(kernel, input.steps).iter().enumerate() {
            let name = gpu_kernel_symbol(&kernel.name, number);
            let machine = Executes::Gpu { threads, placement };
            let function =
                emit_kernel(ctx, &module, &prepared, &name, &caps, machine, &KernelForm::default())?;
            function.set_linkage(Linkage::External);
            function.set_call_conventions(PTX_KERNEL);
            let blocks = at_once(input.level, threads, blocks_of(kernel));
            launch_bounds(ctx, &module, function, threads, blocks)?;
        }
    }
    Ok(module)
}

const LARGE_BLOCK: u32 = 256;
/// Most blocks at once. Four leave 64 registers for each thread, less than ptxas chooses by itself: a token
/// of llama-3-8b in q4f16_2 was predicted at 514 tokens/s in place of 559.
const MOST_AT_ONCE: u32 = 3;

/// Large blocks of a launch that run at once on a multiprocessor of the level's device where all of the
/// launch do. Their threads may have the registers that this leaves: without it ptxas 12.9 was seen to spill
/// at 48 and at 64.
fn at_once(level: &FeatureLevel, [x, y, z]: [u32; 3], blocks: Option<i64>) -> Option<u32> {
    let sms = level.gpu.as_ref()?.device.sms;
    let of_each = u32::try_from(blocks?).ok()?.div_ceil(sms).max(1);
    (x * y * z == LARGE_BLOCK && of_each <= MOST_AT_ONCE).then_some(of_each)
}

/// States the block size, and how many blocks run at once at least: as metadata up to LLVM 20, as attributes
/// later.
fn launch_bounds<'c>(
    ctx: &'c Context,
    module: &Module<'c>,
    function: FunctionValue<'c>,
    [x, y, z]: [u32; 3],
    blocks: Option<u32>,
) -> Result<(), CodegenError> {
    let mut bounds = vec![("nvvm.maxntid", format!("{x},{y},{z}"))];
    bounds.extend(blocks.map(|blocks| ("nvvm.minctasm", blocks.to_string())));
    for (key, value) in bounds {
        function.add_attribute(AttributeLoc::Function, ctx.create_string_attribute(key, &value));
    }
    if cfg!(feature = "llvm22") {
        return Ok(());
    }
    let sizes = [("maxntidx", x), ("maxntidy", y), ("maxntidz", z)];
    for (key, count) in sizes.into_iter().chain(blocks.map(|blocks| ("minctasm", blocks))) {
        let pointer = function.as_global_value().as_pointer_value();
        let count = ctx.i32_type().const_int(u64::from(count), false);
        let key = ctx.metadata_string(key);
        let node = ctx.metadata_node(&[pointer.into(), key.into(), count.into()]);
        module
            .add_global_metadata("nvvm.annotations", &node)
            .map_err(|e| CodegenError::Llvm { what: "launch bounds".into(), message: e.to_string() })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_that_run_at_once_say_so() {
        let of = |level: &str, threads: [u32; 3], blocks| {
            at_once(&mlcc_target::level(level).unwrap().unwrap(), threads, blocks)
        };
        let large = |level: &str, blocks| of(level, [256, 1, 1], Some(blocks));
        // 132 and 108 multiprocessors.
        assert_eq!([1, 132, 133, 264, 396].map(|n| large("sm_90", n)), [1, 1, 2, 2, 3].map(Some));
        assert_eq!([108, 132, 256].map(|n| large("sm_80", n)), [1, 2, 3].map(Some));
        assert_eq!([large("sm_90", 397), large("sm_80", 325)], [None; 2]);
        assert_eq!(of("sm_90", [16, 16, 1], Some(64)), Some(1));
        assert_eq!(of("sm_90", [128, 1, 1], Some(64)), None, "small blocks");
        assert_eq!(of("sm_90", [256, 1, 1], None), None, "their number depends on the call");
        assert_eq!(large("x86-64-v3", 64), None);
    }
}

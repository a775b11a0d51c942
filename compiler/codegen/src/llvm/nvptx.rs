//! GPU kernels to PTX text: one module per level, one `.visible .entry` per kernel.

use super::kernel::{Form, Machine as Executes, emit_kernel};
use super::pipeline::Pipeline;
use super::target::{Machine, Output};
use crate::cache::ObjectCache;
use crate::error::CodegenError;
use crate::launch::{blocks_of, threads_of};
use crate::model::{LevelInput, gpu_kernel_symbol};
use crate::objects::{Key, Objects};
use crate::placement::placements;
use crate::prepare::{Caps, prepare};
use inkwell::attributes::AttributeLoc;
use inkwell::context::Context;
use inkwell::module::{Linkage, Module};
use inkwell::values::FunctionValue;
use mlcc_target::Arch;

/// Calling convention `ptx_kernel`.
const PTX_KERNEL: u32 = 71;

/// Compiles the kernels of one GPU level.
pub fn ptx_module(triple: &str, input: &LevelInput<'_>, output: Output) -> Result<Vec<u8>, CodegenError> {
    let objects = Objects::new(None);
    let key = ptx_text(triple, input, output, &objects)?;
    Ok(objects.get(&key))
}

/// The same as PTX, unless there is some from an earlier call.
pub fn cached_ptx(
    triple: &str,
    input: &LevelInput<'_>,
    cache: &ObjectCache,
) -> Result<Vec<u8>, CodegenError> {
    let objects = Objects::new(Some(cache));
    let key = ptx_text(triple, input, Output::Assembly, &objects)?;
    objects.finish();
    Ok(objects.get(&key))
}

/// Makes sure that the code of a GPU level is among `objects`.
pub(crate) fn ptx_text(
    triple: &str,
    input: &LevelInput<'_>,
    output: Output,
    objects: &Objects<'_>,
) -> Result<Key, CodegenError> {
    let machine = Machine::new(Arch::Nvptx, triple, input.level)?;
    let ctx = Context::create();
    let module = module(&ctx, &machine, input)?;
    let (text, form) = (module.write_bitcode_to_memory(), format!("{output:?}"));
    let key = Key::of(&[machine.identity().as_bytes(), form.as_bytes(), text.as_slice()]);
    objects.want(key, || {
        machine.optimize(&module, Pipeline::Full)?;
        machine.emit(&module, output)
    })
}

fn module<'c>(
    ctx: &'c Context,
    machine: &Machine,
    input: &LevelInput<'_>,
) -> Result<Module<'c>, CodegenError> {
    let caps = Caps::new(Arch::Nvptx, input.level);
    let module = machine.module(ctx, "mlcc");
    for kernel in input.kernels {
        let threads = threads_of(kernel)?;
        let prepared = prepare(kernel, &caps);
        for (number, placement) in placements(kernel, input.steps).iter().enumerate() {
            let name = gpu_kernel_symbol(&kernel.name, number);
            let machine = Executes::Gpu { threads, placement };
            let function = emit_kernel(ctx, &module, &prepared, &name, &caps, machine, &Form::default())?;
            function.set_linkage(Linkage::External);
            function.set_call_conventions(PTX_KERNEL);
            launch_bounds(ctx, &module, function, threads, blocks_of(kernel))?;
        }
    }
    Ok(module)
}

/// A launch of so many blocks of so many threads at most states that two of them run at once on a multiprocessor, which is all that there are on
/// a large GPU: they may have 128 registers then. Without it ptxas 12.9 was seen to spill at 48. Launches of more blocks lose by it: fewer of
/// them run at once.
const FEW_BLOCKS: i64 = 256;
const LARGE_BLOCK: u32 = 256;
const AT_ONCE: u32 = 2;

/// States the block size: as metadata up to LLVM 20, as an attribute later.
fn launch_bounds<'c>(
    ctx: &'c Context,
    module: &Module<'c>,
    function: FunctionValue<'c>,
    threads: [u32; 3],
    blocks: Option<i64>,
) -> Result<(), CodegenError> {
    let [x, y, z] = threads;
    let few = x * y * z == LARGE_BLOCK && blocks.is_some_and(|blocks| blocks <= FEW_BLOCKS);
    let blocks = few.then_some(AT_ONCE);
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

//! Whole modules: one object per CPU level.

use super::emit::Emit;
use super::kernel::{Machine as Executes, emit_kernel};
use super::step::{Kernels, emit_step};
use super::table::table_module;
use super::target::{Machine, Output};
use crate::error::{CodegenError, Fault};
use crate::model::{LevelInput, Limits, STATE_STEP, caller_symbol, entry_symbol, kernel_symbol, state_step};
use crate::prepare::{Caps, prepare};
use crate::table::{StateDesc, TableImage};
use inkwell::AddressSpace;
use inkwell::context::Context;
use inkwell::module::Linkage;
use inkwell::types::BasicTypeEnum;
use mlcc_ir::kernel::Kernel;
use mlcc_target::{Arch, Level};

/// Compiles the kernels and steps of one CPU level.
pub fn level_module(
    arch: Arch,
    triple: &str,
    input: &LevelInput<'_>,
    states: &[StateDesc],
    limits: Limits,
    output: Output,
) -> Result<Vec<u8>, CodegenError> {
    let level = input.level;
    let caps = Caps::new(arch, level);
    let machine = Machine::new(arch, triple, level)?;
    let ctx = Context::create();
    let module = machine.module(&ctx, &level.name);
    let (fills, state) = state_step(states)?;
    let mut functions = Kernels::new();
    for kernel in input.kernels.iter().chain(&fills) {
        let prepared = prepare(kernel, &caps);
        let symbol = kernel_symbol(&kernel.name, &level.name);
        let function = emit_kernel(&ctx, &module, &prepared, &symbol, &caps, Executes::Cpu)?;
        if functions.insert(kernel.name.clone(), function).is_some() {
            let what = "two kernels have this name".into();
            return Err(CodegenError::Internal { kernel: kernel.name.clone(), what });
        }
    }
    for step in input.steps {
        emit_step(&ctx, &module, step, &entry_symbol(&step.name, &level.name), &functions, limits)?;
    }
    emit_step(&ctx, &module, &state, &entry_symbol(STATE_STEP, &level.name), &functions, limits)?;
    machine.optimize(&module)?;
    machine.emit(&module, output)
}

/// Compiles the model table; `level` is the weakest one, as its code runs anywhere.
pub fn table_object(
    arch: Arch,
    triple: &str,
    level: &Level,
    image: &TableImage,
    output: Output,
) -> Result<Vec<u8>, CodegenError> {
    let machine = Machine::new(arch, triple, level)?;
    let ctx = Context::create();
    let module = table_module(&ctx, &machine, image)?;
    machine.optimize(&module)?;
    machine.emit(&module, output)
}

/// An object that exports every kernel under its own name, for tests and measurements.
pub fn kernels_object(
    arch: Arch,
    triple: &str,
    level: &Level,
    kernels: &[Kernel],
    output: Output,
) -> Result<Vec<u8>, CodegenError> {
    let caps = Caps::new(arch, level);
    let machine = Machine::new(arch, triple, level)?;
    let ctx = Context::create();
    let module = machine.module(&ctx, "kernels");
    for kernel in kernels {
        let prepared = prepare(kernel, &caps);
        let function = emit_kernel(&ctx, &module, &prepared, &kernel.name, &caps, Executes::Cpu)?;
        function.set_linkage(Linkage::External);
    }
    machine.optimize(&module)?;
    machine.emit(&module, output)
}

/// An object of functions `mlcc_call_<i>(const uint64_t *args)` that call the kernels of another object: pointers,
/// sizes, worker and workers lie one after the other in `args`.
pub fn callers_object(
    arch: Arch,
    triple: &str,
    level: &Level,
    kernels: &[Kernel],
) -> Result<Vec<u8>, CodegenError> {
    let machine = Machine::new(arch, triple, level)?;
    let ctx = Context::create();
    let module = machine.module(&ctx, "callers");
    for (i, kernel) in kernels.iter().enumerate() {
        emit_caller(&ctx, &module, i, kernel)
            .map_err(|f| CodegenError::Internal { kernel: kernel.name.clone(), what: f.0 })?;
    }
    machine.optimize(&module)?;
    machine.emit(&module, Output::Object)
}

fn emit_caller<'c>(
    ctx: &'c Context,
    module: &inkwell::module::Module<'c>,
    index: usize,
    kernel: &Kernel,
) -> Result<(), Fault> {
    let e = Emit::new(ctx, module);
    let pointer: BasicTypeEnum<'c> = ctx.ptr_type(AddressSpace::default()).into();
    let long: BasicTypeEnum<'c> = ctx.i64_type().into();
    let mut types = vec![pointer; kernel.params.len()];
    types.resize(kernel.params.len() + kernel.dims.len() + 2, long);
    let params: Vec<_> = types.iter().map(|&t| t.into()).collect();
    let callee = module.add_function(&kernel.name, ctx.void_type().fn_type(&params, false), None);
    let ty = ctx.void_type().fn_type(&[pointer.into()], false);
    let caller = module.add_function(&caller_symbol(index), ty, None);
    e.b.position_at_end(ctx.append_basic_block(caller, "entry"));
    let args = caller.get_nth_param(0).ok_or_else(|| Fault::new("no parameter"))?.into_pointer_value();
    let mut values = Vec::with_capacity(types.len());
    for (i, ty) in types.into_iter().enumerate() {
        let at = e.element(args, long, e.i64(i as i64), true)?;
        values.push(e.load(ty, at, 8)?);
    }
    e.call(callee, &values)?;
    e.b.build_return(None)?;
    Ok(())
}

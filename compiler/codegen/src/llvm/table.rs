//! The model table as an object: the exported data symbol.

use super::target::LlvmMachine;
use crate::error::{CodegenError, EmitError};
use crate::table::{ImageRun, RelocTarget, TableImage};
use inkwell::context::Context;
use inkwell::module::{Linkage, Module};
use inkwell::types::BasicTypeEnum;
use inkwell::values::{BasicValueEnum, GlobalValue};
use inkwell::{AddressSpace, GlobalVisibility};
use mlcc_abi::MODEL_SYMBOL;

/// Builds the module that defines [`MODEL_SYMBOL`].
pub fn table_module<'c>(
    ctx: &'c Context,
    machine: &LlvmMachine,
    image: &TableImage,
) -> Result<Module<'c>, CodegenError> {
    let module = machine.module(ctx, "mlcc");
    build(ctx, &module, image)
        .map_err(|f| CodegenError::Llvm { what: "the model table".into(), message: f.0 })?;
    Ok(module)
}

fn build<'c>(ctx: &'c Context, module: &Module<'c>, image: &TableImage) -> Result<(), EmitError> {
    let pieces = image.runs();
    let pointer = ctx.ptr_type(AddressSpace::default());
    let types: Vec<BasicTypeEnum<'c>> = pieces
        .iter()
        .map(|p| match p {
            ImageRun::Bytes(b) => ctx.i8_type().array_type(b.len() as u32).into(),
            ImageRun::Pointer(_) => pointer.into(),
        })
        .collect();
    let ty = ctx.struct_type(&types, true);
    let global = module.add_global(ty, None, MODEL_SYMBOL);
    let values: Vec<BasicValueEnum<'c>> = pieces
        .iter()
        .map(|p| match p {
            ImageRun::Bytes(b) => ctx.const_string(b, false).into(),
            ImageRun::Pointer(target) => address(ctx, module, global, target).into(),
        })
        .collect();
    global.set_initializer(&ctx.const_struct(&values, true));
    global.set_alignment(TableImage::ALIGN as u32);
    global.set_linkage(Linkage::External);
    Ok(())
}

fn address<'c>(
    ctx: &'c Context,
    module: &Module<'c>,
    table: GlobalValue<'c>,
    target: &RelocTarget,
) -> inkwell::values::PointerValue<'c> {
    match target {
        RelocTarget::Own(offset) => {
            let offset = ctx.i64_type().const_int(*offset, false);
            // SAFETY: a constant offset into the global itself.
            unsafe { table.as_pointer_value().const_in_bounds_gep(ctx.i8_type(), &[offset]) }
        }
        RelocTarget::Function(name) => {
            let function = module.get_function(name).unwrap_or_else(|| {
                // Only its address is taken: the type does not matter.
                let function = module.add_function(name, ctx.void_type().fn_type(&[], false), None);
                function.as_global_value().set_visibility(GlobalVisibility::Hidden);
                function
            });
            function.as_global_value().as_pointer_value()
        }
    }
}

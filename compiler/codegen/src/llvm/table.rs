//! The model table as an object: the exported data symbol and `get_metadata`.

use super::emit::LlvmBuilder;
use super::target::LlvmMachine;
use crate::error::{CodegenError, EmitError};
use crate::model::METADATA_FUNCTION;
use crate::table::{ImageRun, RelocTarget, TableImage};
use inkwell::attributes::AttributeLoc;
use inkwell::context::Context;
use inkwell::module::{Linkage, Module};
use inkwell::types::BasicTypeEnum;
use inkwell::values::{BasicValue, BasicValueEnum, GlobalValue};
use inkwell::{AddressSpace, GlobalVisibility};
use mlcc_abi::{MODEL_SYMBOL, ModelTable, Str};
use std::mem::offset_of;

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
    // Before the table's content, which refers to it.
    metadata_function(&LlvmBuilder::new(ctx, module), global)?;
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

/// `const uint8_t *get_metadata(uint64_t *len)`: reads the table's own field.
fn metadata_function<'c>(e: &LlvmBuilder<'c, '_>, table: GlobalValue<'c>) -> Result<(), EmitError> {
    let pointer = e.ctx.ptr_type(AddressSpace::default());
    let ty = pointer.fn_type(&[pointer.into()], false);
    let function = e.module.add_function(METADATA_FUNCTION, ty, Some(Linkage::External));
    function.as_global_value().set_visibility(GlobalVisibility::Hidden);
    function.add_attribute(AttributeLoc::Function, e.flag("nounwind"));
    e.b.position_at_end(e.ctx.append_basic_block(function, "entry"));
    let out = function.get_nth_param(0).ok_or_else(|| EmitError::new("no parameter"))?;
    let field = |offset: usize| {
        let at = e.i64((offset_of!(ModelTable, metadata) + offset) as i64);
        e.element(table.as_pointer_value(), e.ctx.i8_type().into(), at, true)
    };
    let len = e.load(e.ctx.i64_type().into(), field(offset_of!(Str, len))?, 8)?;
    e.store(len, out.into_pointer_value(), 8)?;
    let text = e.load(pointer.into(), field(offset_of!(Str, ptr))?, 8)?;
    e.b.build_return(Some(&text.as_basic_value_enum()))?;
    Ok(())
}

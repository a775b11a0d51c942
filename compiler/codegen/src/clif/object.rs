//! Object files: kernels alone, or a whole model with its entry points and the table `mlcc_model`.

use super::ClifError;
use super::emit::{kernel_function, kernel_signature};
use super::entry::{self, Callee};
use super::isa::Machine;
use crate::halfs::{HalfSupport, lower_halfs};
use crate::table::{RelocTarget, TableDesc, TableImage, VariantDesc};
use cranelift_codegen::Context;
use cranelift_codegen::FinalizedRelocTarget;
use cranelift_codegen::ir::{ExternalName, Function, Signature};
use cranelift_frontend::FunctionBuilderContext;
use cranelift_module::{DataDescription, FuncId, Linkage, Module, default_libcall_names};
use cranelift_object::{ObjectBuilder, ObjectModule};
use mlcc_ir::kernel::Kernel;
use mlcc_ir::rewrite::expand_instrs;
use mlcc_ir::step::Step;
use std::collections::BTreeMap;

/// An object that exports every kernel under its own name (for tests and inspection).
pub fn kernels_object(machine: Machine, kernels: &[Kernel]) -> Result<Vec<u8>, ClifError> {
    let mut object = Object::new(machine)?;
    for kernel in kernels {
        object.kernel(&kernel.name, kernel, Linkage::Export)?;
    }
    object.emit()
}

/// An object that exports the model table and nothing else. `variant` names the one variant of the table; the given
/// description's own variants are replaced by it.
pub fn model_object(
    machine: Machine,
    variant: &str,
    kernels: &[Kernel],
    steps: &[Step],
    table: &TableDesc,
) -> Result<Vec<u8>, ClifError> {
    let mut object = Object::new(machine)?;
    let mut callees = BTreeMap::new();
    for kernel in kernels {
        let id = object.kernel(&format!("kernel.{}", kernel.name), kernel, Linkage::Local)?;
        callees.insert(kernel.name.as_str(), Callee { kernel, id });
    }
    let mut functions = BTreeMap::new();
    let mut desc =
        VariantDesc { name: variant.into(), features: machine.used().features, ..VariantDesc::default() };
    for step in steps {
        *slot(&mut desc, &step.name)? = Some(step.name.clone());
        let id = object.step(step, table, &callees)?;
        functions.insert(step.name.clone(), id);
    }
    for name in ["create_kv_cache", "reset_kv_cache"] {
        let slot = slot(&mut desc, name)?;
        if slot.is_none() {
            *slot = Some(name.into());
            let function = entry::init_function(&table.states, machine, &mut object.builder)?;
            let id = object.define(name, entry::step_signature(), function, Linkage::Local)?;
            functions.insert(name.into(), id);
        }
    }
    desc.get_metadata = Some("get_metadata".into());
    let id = object.metadata(&table.metadata)?;
    functions.insert("get_metadata".into(), id);
    let table = TableDesc { variants: vec![desc], ..table.clone() };
    object.table(&table.image(), &functions)?;
    object.emit()
}

/// The place of an entry point's name in the variant.
fn slot<'a>(desc: &'a mut VariantDesc, name: &str) -> Result<&'a mut Option<String>, ClifError> {
    match name {
        "prefill" => Ok(&mut desc.prefill),
        "decode" => Ok(&mut desc.decode),
        "prefill_logits" => Ok(&mut desc.prefill_logits),
        "create_kv_cache" => Ok(&mut desc.create_kv_cache),
        "reset_kv_cache" => Ok(&mut desc.reset_kv_cache),
        "softmax_with_temperature" => Ok(&mut desc.softmax_with_temperature),
        _ => Err(ClifError::UnknownEntry(name.into())),
    }
}

struct Object {
    machine: Machine,
    module: ObjectModule,
    context: Context,
    builder: FunctionBuilderContext,
}

impl Object {
    fn new(machine: Machine) -> Result<Object, ClifError> {
        let error = |e: cranelift_module::ModuleError| ClifError::Machine {
            arch: machine.arch.name(),
            reason: e.to_string(),
        };
        let builder = ObjectBuilder::new(machine.isa()?, "mlcc", default_libcall_names()).map_err(error)?;
        let module = ObjectModule::new(builder);
        Ok(Object { machine, context: module.make_context(), module, builder: FunctionBuilderContext::new() })
    }

    fn kernel(&mut self, symbol: &str, kernel: &Kernel, linkage: Linkage) -> Result<FuncId, ClifError> {
        let expanded = expand_instrs(kernel, |_| false);
        let primitive = lower_halfs(&expanded, HalfSupport::default());
        let function = kernel_function(&primitive, self.machine, &mut self.builder)?;
        self.define(symbol, kernel_signature(kernel), function, linkage)
    }

    fn step(
        &mut self,
        step: &Step,
        table: &TableDesc,
        callees: &BTreeMap<&str, Callee<'_>>,
    ) -> Result<FuncId, ClifError> {
        let module = &mut self.module;
        let function =
            entry::step_function(step, &table.plan, callees, self.machine, &mut self.builder, |id, func| {
                module.declare_func_in_func(id, func)
            })?;
        self.define(&step.name, entry::step_signature(), function, Linkage::Local)
    }

    fn metadata(&mut self, text: &str) -> Result<FuncId, ClifError> {
        let mut data = DataDescription::new();
        // One byte more: an object needs something to point at even where the text is empty.
        data.define([text.as_bytes(), &[0]].concat().into());
        let id = self.module.declare_data("metadata", Linkage::Local, false, false);
        let id = id.map_err(|e| failed("metadata", &e))?;
        self.module.define_data(id, &data).map_err(|e| failed("metadata", &e))?;
        let module = &mut self.module;
        let function = entry::metadata_function(text.len(), self.machine, &mut self.builder, |func| {
            module.declare_data_in_func(id, func)
        })?;
        self.define("get_metadata", entry::metadata_signature(), function, Linkage::Local)
    }

    /// Compiles a function and checks that it calls nothing outside.
    fn define(
        &mut self,
        symbol: &str,
        signature: Signature,
        function: Function,
        linkage: Linkage,
    ) -> Result<FuncId, ClifError> {
        let id = self.module.declare_function(symbol, linkage, &signature).map_err(|e| failed(symbol, &e))?;
        self.context.clear();
        self.context.func = function;
        self.module.define_function(id, &mut self.context).map_err(|e| failed(symbol, &e))?;
        let relocs = self.context.compiled_code().map(|code| code.buffer.relocs()).unwrap_or_default();
        for reloc in relocs {
            if let FinalizedRelocTarget::ExternalName(ExternalName::LibCall(call)) = &reloc.target {
                return Err(ClifError::Import { function: symbol.into(), import: call.to_string() });
            }
        }
        Ok(id)
    }

    fn table(&mut self, image: &TableImage, functions: &BTreeMap<String, FuncId>) -> Result<(), ClifError> {
        let name = mlcc_abi::MODEL_SYMBOL;
        let id = self.module.declare_data(name, Linkage::Export, true, false);
        let id = id.map_err(|e| failed(name, &e))?;
        let mut data = DataDescription::new();
        data.define(image.bytes.clone().into());
        data.set_align(TableImage::ALIGN);
        let own = self.module.declare_data_in_data(id, &mut data);
        for reloc in &image.relocs {
            let at = reloc.at as u32;
            match &reloc.target {
                RelocTarget::Own(to) => data.write_data_addr(at, own, *to as i64),
                RelocTarget::Function(name) => {
                    let Some(&function) = functions.get(name) else {
                        return Err(ClifError::UnknownEntry(name.clone()));
                    };
                    let function = self.module.declare_func_in_data(function, &mut data);
                    data.write_function_addr(at, function);
                }
            }
        }
        self.module.define_data(id, &data).map_err(|e| failed(name, &e))
    }

    fn emit(self) -> Result<Vec<u8>, ClifError> {
        let product = self.module.finish();
        product.emit().map_err(|e| failed("the object file", &e))
    }
}

fn failed(function: &str, error: &dyn std::fmt::Debug) -> ClifError {
    ClifError::Cranelift { function: function.into(), reason: format!("{error:?}") }
}

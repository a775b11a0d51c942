//! Object files: one per kernel and step, one for the model table, and bare kernels for tests.

use super::emit::{kernel_function, kernel_signature};
use super::instr::LaneOperation;
use super::isa::CraneliftIsa;
use super::step::{self, CalleeTable, KernelCallee};
use crate::error::CodegenError;
use crate::halfs::{HalfSupport, lower_halfs};
use crate::model::{EntryLimits, caller_symbol, entry_symbol, kernel_symbol};
use crate::objects::{KERNEL_SYMBOL, ObjectKey, ObjectStore};
use crate::table::{RelocTarget, TableImage};
use crate::units::{CodeGenerator, ObjectUnit};
use cranelift_codegen::ir::{
    AbiParam, ExternalName, Function, InstBuilder, MemFlagsData, Signature, UserFuncName, types,
};
use cranelift_codegen::isa::CallConv;
use cranelift_codegen::{Context, FinalizedRelocTarget};
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext};
use cranelift_module::{DataDescription, FuncId, Linkage, Module, default_libcall_names};
use cranelift_object::{ObjectBuilder, ObjectModule};
use mlcc_abi::MODEL_SYMBOL;
use mlcc_ir::kernel::Kernel;
use mlcc_ir::rewrite::expand_instrs;
use mlcc_ir::step::StepProgram;
use mlcc_target::{Arch, FeatureLevel};

/// Cranelift for the CPUs of an artifact.
pub struct CraneliftGenerator {
    pub arch: Arch,
    pub limits: EntryLimits,
}

impl CodeGenerator for CraneliftGenerator {
    fn object(&self, unit: &ObjectUnit<'_>, objects: &ObjectStore<'_>) -> Result<ObjectKey, CodegenError> {
        match unit {
            ObjectUnit::Kernel { level, kernel, .. } => {
                let mut object = ObjectEmitter::new(self.arch, level)?;
                let function = object.kernel_function(kernel)?;
                let key = object.object_key(&function);
                objects.ensure_object(key, || {
                    object.define_function(
                        KERNEL_SYMBOL,
                        &kernel_signature(kernel),
                        function,
                        Linkage::Hidden,
                    )?;
                    object.emit()
                })
            }
            ObjectUnit::Step { level, step, kernels } => {
                let mut object = ObjectEmitter::new(self.arch, level)?;
                let mut callees = CalleeTable::new();
                let mut names = String::new();
                for (name, kernel) in kernels.launched_by(step) {
                    let symbol = kernel_symbol(name, &level.name);
                    let id = object.import_kernel(&symbol, kernel)?;
                    callees.insert(name, KernelCallee { kernel, id });
                    names.push_str(&symbol);
                    names.push('\n');
                }
                let symbol = entry_symbol(&step.name, &level.name);
                names.push_str(&symbol);
                let function = object.step_function(step, self.limits, &callees)?;
                let key = ObjectKey::from_parts(&[names.as_bytes(), &object.object_key(&function).bytes()]);
                objects.ensure_object(key, || {
                    object.define_function(&symbol, &step::step_signature(), function, Linkage::Hidden)?;
                    object.emit()
                })
            }
        }
    }
}

/// Compiles the model table; `level` is the weakest one, as its code runs anywhere.
pub fn table_object(arch: Arch, level: &FeatureLevel, image: &TableImage) -> Result<Vec<u8>, CodegenError> {
    let mut object = ObjectEmitter::new(arch, level)?;
    let error = |e| cranelift_error(MODEL_SYMBOL, &e);
    let id = object.module.declare_data(MODEL_SYMBOL, Linkage::Export, true, false).map_err(error)?;
    let mut data = DataDescription::new();
    data.define(image.bytes.clone().into());
    data.set_align(TableImage::ALIGN);
    let own = object.module.declare_data_in_data(id, &mut data);
    for reloc in &image.relocs {
        let at = reloc.at as u32;
        match &reloc.target {
            RelocTarget::Own(to) => data.write_data_addr(at, own, *to as i64),
            RelocTarget::Function(name) => {
                let function = object.function(name)?;
                let function = object.module.declare_func_in_data(function, &mut data);
                data.write_function_addr(at, function);
            }
        }
    }
    object.module.define_data(id, &data).map_err(error)?;
    object.emit()
}

/// An object that exports every kernel under its own name, for tests and measurements.
pub fn kernels_object(arch: Arch, level: &FeatureLevel, kernels: &[Kernel]) -> Result<Vec<u8>, CodegenError> {
    let mut object = ObjectEmitter::new(arch, level)?;
    for kernel in kernels {
        let function = object.kernel_function(kernel)?;
        object.define_function(&kernel.name, &kernel_signature(kernel), function, Linkage::Export)?;
    }
    object.emit()
}

/// An object of functions `mlcc_call_<i>(const uint64_t *args)` that call the kernels of another object:
/// pointers, sizes and the share are in `args`, in this order.
pub fn callers_object(arch: Arch, level: &FeatureLevel, kernels: &[Kernel]) -> Result<Vec<u8>, CodegenError> {
    let mut object = ObjectEmitter::new(arch, level)?;
    let mut signature = Signature::new(CallConv::SystemV);
    signature.params.push(AbiParam::new(types::I64));
    for (i, kernel) in kernels.iter().enumerate() {
        let types = kernel_signature(kernel);
        let callee = object.module.declare_function(&kernel.name, Linkage::Import, &types);
        let callee = callee.map_err(|e| cranelift_error(&kernel.name, &e))?;
        let mut func = Function::with_name_signature(UserFuncName::default(), signature.clone());
        let callee = object.module.declare_func_in_func(callee, &mut func);
        object.body(&mut func, |fb, args| {
            let flags = MemFlagsData::trusted();
            let slots = 0..types.params.len() as i32;
            let values: Vec<_> =
                slots.map(|slot| fb.ins().load(types::I64, flags, args[0], 8 * slot)).collect();
            fb.ins().call(callee, &values);
            fb.ins().return_(&[]);
        });
        object.define_function(&caller_symbol(i), &signature, func, Linkage::Export)?;
    }
    object.emit()
}

struct ObjectEmitter {
    machine: CraneliftIsa,
    module: ObjectModule,
    context: Context,
    builder: FunctionBuilderContext,
}

impl ObjectEmitter {
    fn new(arch: Arch, level: &FeatureLevel) -> Result<ObjectEmitter, CodegenError> {
        let machine = CraneliftIsa::new(arch, level)?;
        let builder = ObjectBuilder::new(machine.isa.clone(), "mlcc", default_libcall_names());
        let module = ObjectModule::new(builder.map_err(|e| cranelift_error("an object file", &e))?);
        let context = module.make_context();
        Ok(ObjectEmitter { machine, module, context, builder: FunctionBuilderContext::new() })
    }

    /// The key of a function's object: Cranelift's output depends on nothing else.
    fn object_key(&self, function: &Function) -> ObjectKey {
        let isa = &self.machine.isa;
        let flags: Vec<String> = isa.isa_flags().iter().map(ToString::to_string).collect();
        let machine = format!(
            "Cranelift {} {}\n{}{}",
            cranelift_codegen::VERSION,
            isa.triple(),
            isa.flags(),
            flags.join("\n")
        );
        ObjectKey::from_parts(&[machine.as_bytes(), function.display().to_string().as_bytes()])
    }

    fn kernel_function(&mut self, kernel: &Kernel) -> Result<Function, CodegenError> {
        let expanded = expand_instrs(kernel, |id| LaneOperation::for_instr(id, &self.machine).is_some());
        let primitive = lower_halfs(&expanded, HalfSupport::default());
        kernel_function(&primitive, &self.machine, &mut self.builder)
    }

    /// A kernel that another object of the artifact defines.
    fn import_kernel(&mut self, symbol: &str, kernel: &Kernel) -> Result<FuncId, CodegenError> {
        let id = self.module.declare_function(symbol, Linkage::Import, &kernel_signature(kernel));
        id.map_err(|e| cranelift_error(symbol, &e))
    }

    fn step_function(
        &mut self,
        step: &StepProgram,
        limits: EntryLimits,
        callees: &CalleeTable<'_>,
    ) -> Result<Function, CodegenError> {
        let ObjectEmitter { machine, module, builder, .. } = self;
        let declare = |id, func: &mut Function| {
            let callee = module.declare_func_in_func(id, func);
            // In the same library, if not in the same object.
            func.dfg.ext_funcs[callee].colocated = true;
            callee
        };
        step::step_function(step, limits, callees, machine, builder, declare)
    }

    /// A function of the table: one of this object, or a step of another.
    fn function(&mut self, name: &str) -> Result<FuncId, CodegenError> {
        if let Some(cranelift_module::FuncOrDataId::Func(id)) = self.module.get_name(name) {
            return Ok(id);
        }
        // Only its address is taken: the type does not matter.
        let found = self.module.declare_function(name, Linkage::Import, &step::step_signature());
        found.map_err(|e| cranelift_error(name, &e))
    }

    /// Fills a function of one block; the closure gets the arguments.
    fn body(
        &mut self,
        func: &mut Function,
        f: impl FnOnce(&mut FunctionBuilder<'_>, &[cranelift_codegen::ir::Value]),
    ) {
        let mut fb = FunctionBuilder::new(func, &mut self.builder);
        let block = fb.create_block();
        fb.append_block_params_for_function_params(block);
        fb.switch_to_block(block);
        fb.seal_block(block);
        let args = fb.block_params(block).to_vec();
        f(&mut fb, &args);
        fb.finalize(self.machine.isa.frontend_config());
    }

    /// Compiles a function and checks that it calls no library.
    fn define_function(
        &mut self,
        symbol: &str,
        signature: &Signature,
        function: Function,
        linkage: Linkage,
    ) -> Result<FuncId, CodegenError> {
        let id = self
            .module
            .declare_function(symbol, linkage, signature)
            .map_err(|e| cranelift_error(symbol, &e))?;
        self.context.clear();
        self.context.func = function;
        self.module.define_function(id, &mut self.context).map_err(|e| cranelift_error(symbol, &e))?;
        let relocs = self.context.compiled_code().map(|code| code.buffer.relocs()).unwrap_or_default();
        for reloc in relocs {
            if let FinalizedRelocTarget::ExternalName(ExternalName::LibCall(call)) = &reloc.target {
                let what = format!("the code would call {call}, but an artifact imports nothing");
                return Err(CodegenError::Internal { kernel: symbol.into(), what });
            }
        }
        Ok(id)
    }

    fn emit(self) -> Result<Vec<u8>, CodegenError> {
        self.module.finish().emit().map_err(|e| cranelift_error("the object file", &e))
    }
}

fn cranelift_error(what: &str, error: &dyn std::fmt::Debug) -> CodegenError {
    CodegenError::Cranelift { what: what.into(), message: format!("{error:?}") }
}

//! Modules of LLVM: one per kernel and one per step, so that they can be compiled side by side, and shared
//! where they are equal.

use super::emit::LlvmBuilder;
use super::kernel::{ExecutionModel as Executes, KernelForm, declare_kernel, emit_kernel};
use super::pipeline::LlvmPipeline;
use super::step::{KernelFunctions, emit_step};
use super::table::table_module;
use super::target::{EmitFormat, LlvmMachine};
use crate::cache::ObjectCache;
use crate::error::{CodegenError, EmitError};
use crate::model::{EntryLimits, caller_symbol, entry_symbol, kernel_symbol};
use crate::objects::{KERNEL_SYMBOL, ObjectKey, ObjectStore};
use crate::pool;
use crate::prepare::{LevelCapabilities, instrs_of, prepare_kernel};
use crate::table::TableImage;
use crate::units::{CodeGenerator, LevelUnits, ObjectUnit, largest_first};
use inkwell::context::Context;
use inkwell::memory_buffer::MemoryBuffer;
use inkwell::module::{Linkage, Module};
use inkwell::support::LLVMString;
use inkwell::types::BasicTypeEnum;
use inkwell::{AddressSpace, GlobalVisibility};
use mlcc_ir::kernel::{BinOp, Expr, Kernel};
use mlcc_target::{Arch, FeatureLevel};

/// LLVM for the CPUs of an artifact.
pub struct LlvmGenerator<'a> {
    pub arch: Arch,
    pub triple: &'a str,
    pub limits: EntryLimits,
}

impl CodeGenerator for LlvmGenerator<'_> {
    fn object(&self, unit: &ObjectUnit<'_>, objects: &ObjectStore<'_>) -> Result<ObjectKey, CodegenError> {
        let ctx = Context::create();
        let (machine, module, pipeline) = self.module(&ctx, unit, true)?;
        let text = module.write_bitcode_to_memory();
        let key = ObjectKey::from_parts(&[
            machine.identity().as_bytes(),
            pipeline.text().as_bytes(),
            text.as_slice(),
        ]);
        objects.ensure_object(key, || {
            machine.optimize(&module, pipeline)?;
            machine.emit(&module, EmitFormat::Object)
        })
    }
}

impl LlvmGenerator<'_> {
    /// Module of a unit, not optimized. With `shared`, a kernel's module says nothing that other kernels with
    /// the same code do not.
    fn module<'c>(
        &self,
        ctx: &'c Context,
        unit: &ObjectUnit<'_>,
        shared: bool,
    ) -> Result<(LlvmMachine, Module<'c>, LlvmPipeline), CodegenError> {
        match unit {
            ObjectUnit::Kernel { level, kernel, fixed } if shared => {
                let level = needed_level(level, kernel);
                self.kernel(
                    ctx,
                    &level,
                    kernel,
                    KERNEL_SYMBOL,
                    KernelForm { fixed: (*fixed).clone(), nameless: true },
                )
            }
            ObjectUnit::Kernel { level, kernel, fixed } => {
                let symbol = kernel_symbol(&kernel.name, &level.name);
                self.kernel(
                    ctx,
                    level,
                    kernel,
                    &symbol,
                    KernelForm { fixed: (*fixed).clone(), nameless: false },
                )
            }
            ObjectUnit::Step { level, step, kernels } => {
                let machine = LlvmMachine::new(self.arch, self.triple, level)?;
                let module = machine.module(ctx, "mlcc");
                let mut functions = KernelFunctions::new();
                for (name, kernel) in kernels.launched_by(step) {
                    let symbol = kernel_symbol(name, &level.name);
                    functions.insert(name.to_owned(), declare_kernel(ctx, &module, kernel, &symbol));
                }
                let symbol = entry_symbol(&step.name, &level.name);
                emit_step(ctx, &module, step, &symbol, &functions, self.limits)?;
                Ok((machine, module, LlvmPipeline::Calls))
            }
        }
    }

    fn kernel<'c>(
        &self,
        ctx: &'c Context,
        level: &FeatureLevel,
        kernel: &Kernel,
        symbol: &str,
        form: KernelForm,
    ) -> Result<(LlvmMachine, Module<'c>, LlvmPipeline), CodegenError> {
        let caps = LevelCapabilities::new(self.arch, level);
        let machine = LlvmMachine::new(self.arch, self.triple, level)?;
        let module = machine.module(ctx, "mlcc");
        let prepared = prepare_kernel(kernel, &caps);
        let function = emit_kernel(ctx, &module, &prepared, symbol, &caps, Executes::Cpu, &form)?;
        function.set_linkage(Linkage::External);
        function.as_global_value().set_visibility(GlobalVisibility::Hidden);
        Ok((machine, module, LlvmPipeline::of_kernel(function)))
    }

    /// The kernels and steps of a level as one module, in a form for people.
    pub fn level_text(
        &self,
        level: &LevelUnits<'_>,
        output: EmitFormat,
        threads: usize,
    ) -> Result<Vec<u8>, CodegenError> {
        let units = level.units();
        let optimized = pool::run(threads, &largest_first(&units), |i| {
            let ctx = Context::create();
            let (machine, module, pipeline) = self.module(&ctx, &units[i], false)?;
            machine.optimize(&module, pipeline)?;
            Ok::<_, CodegenError>(module.write_bitcode_to_memory().as_slice().to_vec())
        })?;
        let machine = LlvmMachine::new(self.arch, self.triple, level.level)?;
        let ctx = Context::create();
        let all = machine.module(&ctx, &level.level.name);
        let name = &level.level.name;
        for bitcode in optimized {
            let buffer = MemoryBuffer::create_from_memory_range_copy(&bitcode, "mlcc");
            let module = Module::parse_bitcode_from_buffer(&buffer, &ctx);
            link_in(&all, module.map_err(|e| link_error(name, e))?, name)?;
        }
        machine.emit(&all, output)
    }
}

/// The level without features that make no difference to a kernel, so that levels share its code.
fn needed_level(level: &FeatureLevel, kernel: &Kernel) -> FeatureLevel {
    let products = multiplies_integers(kernel);
    // LLVM makes no use of these unless a kernel names their instructions, or for sums of products.
    let only_named = |feature: &str| match feature {
        "avx512bf16" => true,
        "avx512vnni" => !products,
        "avxvnni" => !products || level.has("avx512vnni"),
        _ => false,
    };
    let used = instrs_of(kernel);
    let uses = |feature: &str| used.iter().any(|id| id.def().features.contains(&feature));
    let features = level.features.iter().filter(|f| !only_named(f) || uses(f)).cloned().collect();
    FeatureLevel { features, ..level.clone() }
}

/// True if vectors of integers are multiplied, or an instruction may do so.
fn multiplies_integers(kernel: &Kernel) -> bool {
    let multiplies = |id| match kernel.exprs.expr(id) {
        Expr::Binary(BinOp::Mul, ..) | Expr::Fma(..) => {
            let ty = kernel.exprs.ty(id);
            ty.lanes > 1 && ty.dtype.is_int()
        }
        Expr::Instr(..) => true,
        _ => false,
    };
    kernel.exprs.ids().any(multiplies)
}

/// Compiles the model table; `level` is the weakest one, as its code runs anywhere.
pub fn table_object(
    arch: Arch,
    triple: &str,
    level: &FeatureLevel,
    image: &TableImage,
    output: EmitFormat,
) -> Result<Vec<u8>, CodegenError> {
    let machine = LlvmMachine::new(arch, triple, level)?;
    let ctx = Context::create();
    let module = table_module(&ctx, &machine, image)?;
    machine.optimize(&module, LlvmPipeline::Full)?;
    machine.emit(&module, output)
}

/// An object that exports every kernel under its own name, for tests and measurements. Each is optimized as
/// in an artifact.
pub fn kernels_object(
    arch: Arch,
    triple: &str,
    level: &FeatureLevel,
    kernels: &[Kernel],
    output: EmitFormat,
) -> Result<Vec<u8>, CodegenError> {
    let ctx = Context::create();
    NamedKernels::new(&ctx, arch, triple, level, kernels)?.emit(output)
}

/// The same, unless there is one from an earlier call.
pub fn cached_kernels_object(
    arch: Arch,
    triple: &str,
    level: &FeatureLevel,
    kernels: &[Kernel],
    cache: &ObjectCache,
) -> Result<Vec<u8>, CodegenError> {
    let ctx = Context::create();
    let kernels = NamedKernels::new(&ctx, arch, triple, level, kernels)?;
    let objects = ObjectStore::new(Some(cache), None);
    let key = kernels.key();
    objects.ensure_object(key, || kernels.emit(EmitFormat::Object))?;
    objects.finish();
    Ok(objects.get(&key))
}

/// Kernels under their own names, not optimized.
struct NamedKernels<'c> {
    ctx: &'c Context,
    machine: LlvmMachine,
    level: String,
    modules: Vec<(Module<'c>, LlvmPipeline)>,
}

impl<'c> NamedKernels<'c> {
    fn new(
        ctx: &'c Context,
        arch: Arch,
        triple: &str,
        level: &FeatureLevel,
        kernels: &[Kernel],
    ) -> Result<NamedKernels<'c>, CodegenError> {
        let caps = LevelCapabilities::new(arch, level);
        let machine = LlvmMachine::new(arch, triple, level)?;
        let mut modules = Vec::new();
        for kernel in kernels {
            let module = machine.module(ctx, "kernels");
            let (prepared, form) = (prepare_kernel(kernel, &caps), KernelForm::default());
            let function = emit_kernel(ctx, &module, &prepared, &kernel.name, &caps, Executes::Cpu, &form)?;
            function.set_linkage(Linkage::External);
            modules.push((module, LlvmPipeline::of_kernel(function)));
        }
        Ok(NamedKernels { ctx, machine, level: level.name.clone(), modules })
    }

    fn key(&self) -> ObjectKey {
        let identity = self.machine.identity();
        let texts = self.modules.iter().map(|(module, pipeline)| {
            [pipeline.text().into_bytes(), module.write_bitcode_to_memory().as_slice().to_vec()]
        });
        let texts: Vec<Vec<u8>> = texts.flatten().collect();
        let parts = [b"kernels".as_slice(), identity.as_bytes()];
        ObjectKey::from_parts(&[&parts[..], &texts.iter().map(Vec::as_slice).collect::<Vec<_>>()].concat())
    }

    fn emit(self, output: EmitFormat) -> Result<Vec<u8>, CodegenError> {
        let all = self.machine.module(self.ctx, "kernels");
        for (module, pipeline) in self.modules {
            self.machine.optimize(&module, pipeline)?;
            link_in(&all, module, &self.level)?;
        }
        self.machine.emit(&all, output)
    }
}

fn link_in<'c>(all: &Module<'c>, module: Module<'c>, level: &str) -> Result<(), CodegenError> {
    all.link_in_module(module).map_err(|e| link_error(level, e))
}

fn link_error(level: &str, e: LLVMString) -> CodegenError {
    CodegenError::Llvm { what: format!("to link the modules of {level}"), message: e.to_string() }
}

/// An object of functions `mlcc_call_<i>(const uint64_t *args)` that call the kernels of another object:
/// pointers, sizes and the share are in `args`, in this order.
pub fn callers_object(
    arch: Arch,
    triple: &str,
    level: &FeatureLevel,
    kernels: &[Kernel],
) -> Result<Vec<u8>, CodegenError> {
    let machine = LlvmMachine::new(arch, triple, level)?;
    let ctx = Context::create();
    let module = machine.module(&ctx, "callers");
    for (i, kernel) in kernels.iter().enumerate() {
        emit_caller(&ctx, &module, i, kernel)
            .map_err(|f| CodegenError::Internal { kernel: kernel.name.clone(), what: f.0 })?;
    }
    machine.optimize(&module, LlvmPipeline::Full)?;
    machine.emit(&module, EmitFormat::Object)
}

fn emit_caller<'c>(
    ctx: &'c Context,
    module: &inkwell::module::Module<'c>,
    index: usize,
    kernel: &Kernel,
) -> Result<(), EmitError> {
    let e = LlvmBuilder::new(ctx, module);
    let pointer: BasicTypeEnum<'c> = ctx.ptr_type(AddressSpace::default()).into();
    let long: BasicTypeEnum<'c> = ctx.i64_type().into();
    let mut types = vec![pointer; kernel.params.len()];
    types.resize(kernel.params.len() + kernel.dims.len() + 3, long);
    let params: Vec<_> = types.iter().map(|&t| t.into()).collect();
    let callee = module.add_function(&kernel.name, ctx.void_type().fn_type(&params, false), None);
    let ty = ctx.void_type().fn_type(&[pointer.into()], false);
    let caller = module.add_function(&caller_symbol(index), ty, None);
    e.b.position_at_end(ctx.append_basic_block(caller, "entry"));
    let args = caller.get_nth_param(0).ok_or_else(|| EmitError::new("no parameter"))?.into_pointer_value();
    let mut values = Vec::with_capacity(types.len());
    for (i, ty) in types.into_iter().enumerate() {
        let at = e.element(args, long, e.i64(i as i64), true)?;
        values.push(e.load(ty, at, 8)?);
    }
    e.call(callee, &values)?;
    e.b.build_return(None)?;
    Ok(())
}

//! LLVM target machines, the optimization pipeline and output files.

use super::pipeline::LlvmPipeline;
use crate::error::CodegenError;
use inkwell::OptimizationLevel;
use inkwell::context::Context;
use inkwell::module::Module;
use inkwell::passes::PassBuilderOptions;
use inkwell::targets::{
    CodeModel, FileType, InitializationConfig, RelocMode, Target as LlvmTarget, TargetMachine, TargetTriple,
};
use mlcc_target::{Arch, FeatureLevel};
use std::sync::Once;

/// A machine to compile for; each thread makes its own.
pub struct LlvmMachine {
    tm: TargetMachine,
    what: String,
}

/// Form of the output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EmitFormat {
    /// Optimized LLVM IR, as text.
    Ir,
    /// Assembly; PTX for nvptx.
    Assembly,
    Object,
}

fn initialize() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let config = InitializationConfig::default();
        LlvmTarget::initialize_x86(&config);
        LlvmTarget::initialize_aarch64(&config);
        LlvmTarget::initialize_nvptx(&config);
    });
}

/// LLVM's name of a feature; `None` for those that are no matter of LLVM.
fn llvm_feature(name: &str) -> Option<&str> {
    match name {
        "bmi1" => Some("bmi"),
        "cmpxchg16b" => Some("cx16"),
        "fp16" => Some("fullfp16"),
        "cp.async" | "mma.sync" => None,
        other => Some(other),
    }
}

fn feature_string(arch: Arch, level: &FeatureLevel) -> String {
    let mut all: Vec<String> =
        level.features.iter().filter_map(|f| llvm_feature(f)).map(|f| format!("+{f}")).collect();
    if let Some(gpu) = &level.gpu {
        all.push(format!("+ptx{}", gpu.ptx));
    }
    if arch == Arch::Aarch64 {
        // Belongs to the system on Windows, macOS and Android.
        all.push("+reserve-x18".into());
    }
    all.join(",")
}

impl LlvmMachine {
    pub fn new(arch: Arch, triple: &str, level: &FeatureLevel) -> Result<LlvmMachine, CodegenError> {
        initialize();
        let error = |message: String| CodegenError::Machine {
            triple: triple.into(),
            cpu: level.llvm_cpu.clone(),
            message,
        };
        let llvm_triple = TargetTriple::create(triple);
        let target = LlvmTarget::from_triple(&llvm_triple).map_err(|e| error(e.to_string()))?;
        let reloc = if arch == Arch::Nvptx { RelocMode::Default } else { RelocMode::PIC };
        let tm = target
            .create_target_machine(
                &llvm_triple,
                &level.llvm_cpu,
                &feature_string(arch, level),
                OptimizationLevel::Aggressive,
                reloc,
                CodeModel::Default,
            )
            .ok_or_else(|| error("no target machine".into()))?;
        Ok(LlvmMachine { tm, what: format!("{triple} {}", level.name) })
    }

    /// An empty module for this machine. `name` ends up in the symbol table, so it must not be a path of this
    /// computer.
    pub fn module<'c>(&self, ctx: &'c Context, name: &str) -> Module<'c> {
        let module = ctx.create_module(name);
        module.set_triple(&self.tm.get_triple());
        module.set_data_layout(&self.tm.get_target_data().get_data_layout());
        module
    }

    /// The identity of the target: LLVM's output depends on it, the module and the pipeline.
    pub fn identity(&self) -> String {
        let (major, minor, patch) = inkwell::support::get_llvm_version();
        let tm = &self.tm;
        format!(
            "LLVM {major}.{minor}.{patch} {} {} {}",
            tm.get_triple().as_str().to_string_lossy(),
            tm.get_cpu().to_string_lossy(),
            tm.get_feature_string().to_string_lossy()
        )
    }

    /// Verifies and optimizes. The vectorizers are off: kernels say themselves what is a vector, and results
    /// must not depend on their judgement.
    pub fn optimize(&self, module: &Module<'_>, pipeline: LlvmPipeline) -> Result<(), CodegenError> {
        module.verify().map_err(|e| self.llvm_error("the module", e.to_string()))?;
        let options = PassBuilderOptions::create();
        options.set_loop_vectorization(false);
        options.set_loop_slp_vectorization(false);
        options.set_loop_interleaving(false);
        options.set_merge_functions(false);
        module
            .run_passes(&pipeline.text(), &self.tm, options)
            .map_err(|e| self.llvm_error("the optimization pipeline", e.to_string()))
    }

    pub fn emit(&self, module: &Module<'_>, output: EmitFormat) -> Result<Vec<u8>, CodegenError> {
        let kind = match output {
            EmitFormat::Ir => return Ok(module.print_to_string().to_string().into_bytes()),
            EmitFormat::Assembly => FileType::Assembly,
            EmitFormat::Object => FileType::Object,
        };
        let buffer = self
            .tm
            .write_to_memory_buffer(module, kind)
            .map_err(|e| self.llvm_error("to write the module", e.to_string()))?;
        let bytes = buffer.as_slice();
        // LLVM ends text with a NUL that is not part of it.
        let text = output == EmitFormat::Assembly;
        Ok(if text { bytes.strip_suffix(&[0]).unwrap_or(bytes).to_vec() } else { bytes.to_vec() })
    }

    fn llvm_error(&self, what: &str, message: String) -> CodegenError {
        CodegenError::Llvm { what: format!("{what} for {}", self.what), message }
    }
}

//! The builds of `mlcc tune`: artifacts of a model, at the level as it is or tuned.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use mlcc_codegen::folder::{TemporaryFolder, create_temporary};
use mlcc_driver::compile::{BuildHooks, BuildOptions, BuildReport, BuildSource, compile, write_program};
use mlcc_passes::LoweredProgram;
use mlcc_passes::text::print_program;
use mlcc_target::{CompileTarget, FeatureLevel};
use xxhash_rust::xxh3::xxh3_128;

use super::source::TuningSource;
use crate::error::BenchError;
use crate::host::BenchHost;

pub struct TrialBuilder {
    source: BuildSource,
    options: BuildOptions,
    target: CompileTarget,
    folder: TemporaryFolder,
    /// The program that was compiled last.
    program: Option<LoweredProgram>,
    written: usize,
    cancel: &'static AtomicBool,
}

impl TrialBuilder {
    pub fn open(
        origin: TuningSource,
        level: &FeatureLevel,
        host: &dyn BenchHost,
    ) -> Result<TrialBuilder, BenchError> {
        let options = BuildOptions { target: level.name.clone(), ..origin.options };
        let target = mlcc_target::resolve_target(&level.name)?;
        let source = BuildSource::open(&options)?;
        let options = options.for_source(&source);
        let folder = create_temporary("mlcc-tune").map_err(BenchError::io("create", std::env::temp_dir()))?;
        let cancel = host.cancel_flag();
        Ok(TrialBuilder { source, options, target, folder, program: None, written: 0, cancel })
    }

    pub fn model(&self) -> &str {
        &self.source.model.name
    }

    pub fn quant(&self) -> &'static str {
        self.options.quant.name
    }

    /// The file that is written unless another name is given.
    pub fn output_path(&self, level: &str) -> PathBuf {
        format!("{}-{}-{level}.toml", self.model(), self.options.quant_name).into()
    }

    pub fn is_interrupted(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    /// Most tokens of a sequence.
    pub fn max_tokens(&self) -> u64 {
        self.source.context_limit(&self.options).unwrap_or(u64::MAX)
    }

    /// Tokens of a prompt.
    pub fn prompt(&self) -> usize {
        (self.source.chunk as usize).min(usize::try_from(self.max_tokens()).unwrap_or(usize::MAX))
    }

    /// The code for this level, as a number that is equal where the code is.
    pub fn compile(&mut self, level: &FeatureLevel) -> Result<u128, BenchError> {
        self.target.levels = vec![level.clone()];
        let mut hooks = BuildHooks { event: &mut |_| {}, cancel: self.cancel };
        let (program, _) =
            compile(&self.source, &self.target, &self.options, &mut BuildReport::default(), &mut hooks)?;
        let code = xxh3_128(print_program(&program).as_bytes());
        self.program = Some(program);
        Ok(code)
    }

    /// The program that was compiled last.
    pub fn program(&self) -> Option<&LoweredProgram> {
        self.program.as_ref()
    }

    /// True if nothing was written yet.
    pub fn is_first(&self) -> bool {
        self.written == 0
    }

    /// Writes what was compiled last as an artifact.
    pub fn write(&mut self) -> Result<PathBuf, BenchError> {
        let Some(program) = self.program.take() else {
            return Err(BenchError::Failed(
                "internal error: an artifact is loaded before it is compiled".into(),
            ));
        };
        self.written += 1;
        let path = self.folder.path().join(format!("{}.so", self.written));
        // An interrupt ends the search, not a build of a few seconds.
        let mut hooks = BuildHooks { event: &mut |_| {}, cancel: &AtomicBool::new(false) };
        let mut report = BuildReport::default();
        write_program(&self.source, &self.target, &self.options, &program, &path, &mut report, &mut hooks)?;
        Ok(path)
    }
}

//! `--model module.mlc`: a program in text form in place of a model definition. Configuration, tokenizer and
//! weights come from `--weights`; the passes go on from the stage of the text.

use std::path::{Path, PathBuf};

use mlcc_models::{Architecture, ModelRequest};
use mlcc_passes::LoweredProgram;
use mlcc_passes::text::parse_program;
use mlcc_passes::verify::verify_program;
use mlcc_target::CompileTarget;

use super::{BuildError, BuildOptions};

pub struct ModuleText {
    pub path: PathBuf,
    pub program: LoweredProgram,
}

impl ModuleText {
    /// True if `--model` names a module in text form.
    pub fn is_named(model: &str) -> bool {
        let path = Path::new(model);
        path.extension().is_some_and(|e| e == "mlc") && path.is_file()
    }

    /// Reads and verifies what the request names, if it is a module in text form.
    pub fn open(request: &ModelRequest) -> Result<Option<ModuleText>, BuildError> {
        if !ModuleText::is_named(&request.model) {
            return Ok(None);
        }
        let path = PathBuf::from(&request.model);
        let text = mlcc_files::read_to_string(&path, mlcc_files::FileKind::Module)
            .map_err(|source| BuildError::Io { action: "read", path: path.clone(), source })?;
        let failed = |message: String| BuildError::Unsupported(format!("{}{message}", path.display()));
        let program = parse_program(&text).map_err(|e| failed(format!(":{e}")))?;
        verify_program(&program).map_err(|e| failed(format!(": the module is not well-formed: {e}")))?;
        Ok(Some(ModuleText { path, program }))
    }

    /// The request for everything that is not in the text.
    pub fn merge_request(&self, asked: &ModelRequest) -> Result<ModelRequest, BuildError> {
        let name = &self.program.module.name;
        let model = match (&asked.weights, asked.random_weights) {
            (Some(path), _) => path.display().to_string(),
            (None, Some(_)) => name.clone(),
            (None, None) => {
                let message = "a module in text form has no weights: give --weights with the folder or file of its \
                    checkpoint, or --random-weights";
                return Err(self.mismatch_error(message));
            }
        };
        Ok(ModelRequest { model, weights: None, ..asked.clone() })
    }

    fn mismatch_error(&self, message: impl std::fmt::Display) -> BuildError {
        BuildError::Unsupported(format!("{}: {message}", self.path.display()))
    }

    /// The `--target` of a program that was lowered.
    pub fn target(&self) -> Option<String> {
        let names: Vec<&str> = self.program.levels.iter().map(|l| l.name.as_str()).collect();
        (!names.is_empty()).then(|| names.join(","))
    }

    /// The options with what the text has decided; a flag that says something else is an error.
    pub fn merge_options(
        &self,
        options: &BuildOptions,
        target: &CompileTarget,
    ) -> Result<BuildOptions, BuildError> {
        let mut options = options.clone();
        let levels = self.program.levels.iter().map(|l| &l.name);
        if !self.program.levels.is_empty() && !levels.eq(target.levels.iter().map(|l| &l.name)) {
            let lowered = self.target().unwrap_or_default();
            return Err(self.mismatch_error(format_args!(
                "was lowered for {lowered}: build it with --target {lowered}"
            )));
        }
        if let Some(tuning) = options.tuning.as_ref().filter(|_| !self.program.levels.is_empty()) {
            let tuning = tuning.path.display();
            return Err(self.mismatch_error(format_args!(
                "its kernels are there already, so --tuning {tuning} would change nothing: leave the flag out"
            )));
        }
        if let Some(plan) = &self.program.memory {
            let flag = |name: &str, asked: Option<u32>, planned: i64| match u32::try_from(planned) {
                Ok(planned) if asked.is_none_or(|asked| asked == planned) => Ok(Some(planned)),
                _ => Err(self.mismatch_error(format_args!(
                    "memory is planned for {name} {planned}: leave the flag out"
                ))),
            };
            options.chunk = flag("--chunk", options.chunk, plan.chunk)?;
            options.batch = flag("--max-batch", options.batch, plan.batch)?;
        }
        Ok(options)
    }

    /// The rows of the caches, in place of what was asked for.
    pub fn cache_context(&self, options: &BuildOptions, context: usize) -> Result<usize, BuildError> {
        let Some(rows) = self.program.module.context_length().and_then(|c| usize::try_from(c).ok()) else {
            return Ok(context);
        };
        match options.context {
            Some(asked) if asked != rows as u64 => Err(self.mismatch_error(format_args!(
                "its caches have {rows} rows, so -c/--ctx-size {asked} is not possible"
            ))),
            _ => Ok(rows),
        }
    }

    /// Checks that the entry functions are those that callers of a model with this configuration expect.
    pub fn check_entries(&self, architecture: &Architecture) -> Result<(), BuildError> {
        let vocab = architecture.vocab() as i64;
        for name in ["prefill", "decode", "prefill_logits", "decode_batch", "step"] {
            let Some((_, f)) = self.program.module.function(name) else {
                if matches!(name, "decode_batch" | "step") {
                    continue;
                }
                return Err(self.mismatch_error(format_args!("the module has no entry function @{name}")));
            };
            let logits = f.outputs.first().map(|&v| f.ty(v));
            let found = logits.and_then(|ty| ty.dims.last()?.as_const());
            if found != Some(vocab) {
                let message = format!(
                    "@{name} must return f32 logits of the {vocab} tokens that the configuration has"
                );
                return Err(self.mismatch_error(message));
            }
        }
        Ok(())
    }
}

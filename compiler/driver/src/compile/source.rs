//! The input of a build: configuration, weights (opened, not read), tokenizer.

use mlcc_models::resolve::resolve;
use mlcc_models::{Checkpoint, ResolvedModel};
use mlcc_target::Arch;
use mlcc_text::ChatSource;

use super::text_files::{self, SourceTokenizer};
use super::{BuildError, BuildOptions, ModuleText};

/// Tokens in one call of prefill where the user asks for no number.
pub const CHUNK: u32 = 128;
/// The same where the rows of a prompt are divided among experts.
const LONG_CHUNK: u32 = 512;
/// The same on GPUs, which fewer rows leave half idle.
const GPU_CHUNK: u32 = 2048;
/// The same for whole texts, unless one may be longer: several are read in one call.
const TEXTS: u32 = 2048;
/// The same where a prompt has to come in one call, unless the context is shorter. Scratch memory for such
/// calls is address space until it is used.
const WHOLE_PROMPT: u32 = 2048;

pub struct BuildSource {
    /// `--model` was a module in text form: the program, in place of the architecture's definition.
    pub text: Option<ModuleText>,
    pub model: ResolvedModel,
    pub checkpoint: Checkpoint,
    /// Positions that caches get room for.
    pub context: usize,
    /// Most tokens in one call of prefill.
    pub chunk: u32,
    pub tokenizer: Option<SourceTokenizer>,
    /// `generation_config.json` as it is.
    pub generation_config: Option<Vec<u8>>,
    pub chat: Option<ChatSource>,
    /// Parts that were left out, and the reasons.
    pub warnings: Vec<String>,
}

/// True if the build is for GPUs; a name that is no target is reported elsewhere.
fn on_gpu(options: &BuildOptions) -> bool {
    mlcc_target::resolve_target(&options.target).is_ok_and(|target| target.arch == Arch::Nvptx)
}

impl BuildSource {
    /// Finds and opens everything and holds it against each other: tensors against the configuration, the
    /// tokenizer against the vocabulary.
    pub fn open(options: &BuildOptions) -> Result<BuildSource, BuildError> {
        let text = ModuleText::open(&options.request)?;
        let mut model = match &text {
            Some(text) => resolve(&text.merge_request(&options.request)?)?,
            None => resolve(&options.request)?,
        };
        let checkpoint = model.open_weights()?;
        let generation_config = text_files::read(model.files.generation_config.as_deref())?;
        let tokenizer =
            text_files::resolve_tokenizer(&model, &checkpoint, options, generation_config.as_deref())?;
        text_files::answer_with_tokens(&mut model, options, tokenizer.as_ref())?;
        apply_streaming(&mut model, options)?;
        let mut context = context_length(&model, options)?;
        if let Some(text) = &text {
            model.name = text.program.module.name.clone();
            context = text.cache_context(options, context)?;
            text.check_entries(&model.config.architecture)?;
        }
        let architecture = &model.config.architecture;
        let at_most = |chunk: u32| u32::try_from(context).map_or(chunk, |context| context.min(chunk));
        let planned = text.as_ref().and_then(|t| u32::try_from(t.program.memory.as_ref()?.chunk).ok());
        let longest = u32::try_from(context).unwrap_or(u32::MAX);
        let chunk = options.chunk.or(planned).unwrap_or(match architecture.needs_whole_prompts() {
            _ if architecture.pooling_head().is_some() => longest.max(TEXTS),
            true => at_most(WHOLE_PROMPT),
            false if on_gpu(options) => at_most(GPU_CHUNK),
            false if architecture.has_experts() => at_most(LONG_CHUNK),
            false => CHUNK,
        });
        let mut warnings = model.config.warnings.clone();
        let chat = text_files::resolve_chat_template(
            &model,
            &checkpoint,
            options,
            tokenizer.as_ref(),
            &mut warnings,
        )?;
        Ok(BuildSource {
            text,
            model,
            checkpoint,
            context,
            chunk,
            tokenizer,
            generation_config,
            chat,
            warnings,
        })
    }

    /// Most tokens of one sequence; `None` = no limit (recurrent models, unless one was asked for).
    pub fn context_limit(&self, options: &BuildOptions) -> Option<u64> {
        match self.model.config.architecture.has_cache() {
            true => Some(self.context as u64),
            false => options.context,
        }
    }
}

/// The window and the sinks that were asked for, in place of those of the configuration.
fn apply_streaming(model: &mut ResolvedModel, options: &BuildOptions) -> Result<(), BuildError> {
    let architecture = model.config.architecture.clone();
    let known = architecture.streaming_window();
    let window = options.sliding_window.or(known.map(|s| s.window));
    let sinks = options.attention_sinks.unwrap_or(known.map_or(0, |s| s.sinks));
    model.config.architecture = architecture.with_streaming_window(window, sinks)?;
    let asked_for = options.sliding_window.is_some() || sinks > 0;
    match (model.config.architecture.streaming_window(), options.context) {
        (Some(stream), Some(asked)) if asked_for && asked <= stream.window as u64 => {
            Err(BuildError::NoRoom { asked, window: stream.window })
        }
        _ => Ok(()),
    }
}

/// The requested context, within the length with which the model was trained; beyond that only with a window,
/// because distances are shorter then.
fn context_length(model: &ResolvedModel, options: &BuildOptions) -> Result<usize, BuildError> {
    let architecture = &model.config.architecture;
    let trained = match architecture.streaming_window() {
        // Positions are `i32` in kernels.
        Some(_) => i32::MAX as usize,
        None => architecture.context_length(),
    };
    match options.context {
        None => Ok(architecture.default_context()),
        Some(asked) if architecture.has_cache() && asked > trained as u64 => {
            Err(BuildError::Context { asked, trained, origin: model.config.origin.clone() })
        }
        Some(asked) => Ok(usize::try_from(asked).unwrap_or(usize::MAX)),
    }
}

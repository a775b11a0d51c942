//! Jinja templates as `transformers` renders them (`apply_chat_template` of its `PreTrainedTokenizerBase`):
//! `trim_blocks`, `lstrip_blocks`, loop controls, Python's methods of `str` and `dict`, `raise_exception`,
//! `strftime_now`, `tojson` as `json.dumps(ensure_ascii=False)`, the block tag `generation`.
//!
//! A template comes with a model from anywhere and runs for every request of a server, so it must neither end
//! nor stall the process ([`limits`]). The engine bounds steps and nested calls, not the cost of a step. Ways
//! to bound that:
//!
//! * A process for every rendering: `fork` copies the page tables of a process that has gigabytes mapped,
//!   which takes longer than rendering does, and is not allowed to allocate where there are threads; a
//!   library has no program to start.
//! * WebAssembly: an interpreter renders tens of times slower.
//! * Here: the syntax tree is rewritten before it is compiled ([`rewrite`]), so that every operation that
//!   makes values or looks at large ones is a function of ours, which counts and then lets the engine do it.
//!   Values know their depth and size ([`values`]), so no recursion of the engine is deep. A rendering has
//!   its own stack for nested calls ([`TemplateHost::run_on_stack`]).

mod filters;
mod json;
mod limits;
mod methods;
mod operators;
mod rewrite;
mod values;

use super::strftime::strftime;
use super::{ChatError, ChatMessage, StackError, TemplateHost, TemplateInputs, TemplateValue};
use limits::{MOST_STEPS, RenderLimit};
use minijinja::machinery::{self, CodeGenerator, Instructions};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Longest template, and the stack of its parser, which takes a frame for every operator of a chain: about
/// 400 bytes in optimized code (8 MiB were full at 20 400 operators), which are one byte of text at least.
/// Only what is used is ever memory.
const LONGEST_TEMPLATE: usize = 128 << 10;
const PARSER_STACK: usize = 512 << 20;
/// Stack of a rendering: the engine's nested calls, and values of at most [`limits::MOST_LEVELS`] levels.
const RENDER_STACK: usize = 64 << 20;
/// Bytes of an error's reason.
const LONGEST_REASON: usize = 1 << 10;
const DEFAULT: &str = "default";
/// The template that `transformers` takes when tools are given and a checkpoint has several.
const TOOL_USE: &str = "tool_use";

/// A compiled template borrows from its text.
struct TemplateCode<'a> {
    instructions: Instructions<'a>,
    blocks: BTreeMap<&'a str, Instructions<'a>>,
}

struct TemplateSource {
    name: String,
    text: String,
}

self_cell::self_cell!(
    struct TemplateProgram {
        owner: TemplateSource,
        #[covariant]
        dependent: TemplateCode,
    }
);

struct CompiledTemplate {
    program: TemplateProgram,
    /// Variables that it reads and does not set.
    variables: BTreeSet<String>,
    /// Attributes and constant texts in it.
    words: BTreeSet<String>,
}

pub(super) struct JinjaTemplates {
    environment: Environment<'static>,
    templates: Vec<CompiledTemplate>,
    /// `bos_token` and the like.
    tokens: BTreeMap<String, String>,
    host: &'static dyn TemplateHost,
}

impl std::fmt::Debug for JinjaTemplates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "JinjaTemplates({:?})",
            self.templates.iter().map(CompiledTemplate::name).collect::<Vec<_>>()
        )
    }
}

impl CompiledTemplate {
    fn name(&self) -> &str {
        &self.program.borrow_owner().name
    }

    /// Runs with [`PARSER_STACK`].
    fn compile(name: &str, text: String, syntax: &SyntaxConfig) -> Result<CompiledTemplate, ChatError> {
        let wrong = |reason| ChatError::Syntax { template: name.to_owned(), reason };
        let (mut variables, mut words) = (BTreeSet::new(), BTreeSet::new());
        let program = TemplateProgram::try_new(TemplateSource { name: name.to_owned(), text }, |source| {
            let tree = machinery::parse(&source.text, &source.name, syntax.clone());
            let tree = tree.map_err(|error| wrong(describe(&error)))?;
            let mut rewriter = rewrite::TemplateRewriter::new();
            let tree = rewriter
                .template(&tree)
                .map_err(|refused| wrong(format!("{} (line {})", refused.reason, refused.line)))?;
            variables = rewriter.undeclared.iter().map(|name| (*name).to_owned()).collect();
            words = rewriter.words;
            let mut generator = CodeGenerator::new(&source.name, &source.text);
            generator.compile_stmt(&tree);
            let (instructions, blocks) = generator.finish();
            Ok(TemplateCode { instructions, blocks })
        })?;
        Ok(CompiledTemplate { program, variables, words })
    }

    /// Runs with [`RENDER_STACK`].
    fn run(
        &self,
        environment: &Environment<'static>,
        context: TemplateValue,
        host: &'static dyn TemplateHost,
    ) -> Result<String, Error> {
        limits::enter_host(host);
        limits::begin_rendering(u64::from(u32::MAX));
        let context = values::part(&context)?;
        limits::begin_rendering(values::size(&context));
        let code = self.program.borrow_dependent();
        let mut text = String::new();
        let mut output = machinery::make_string_output(&mut text);
        machinery::eval(
            environment,
            &code.instructions,
            context,
            &code.blocks,
            &mut output,
            AutoEscape::None,
        )
        .map(drop)?;
        Ok(text)
    }
}

/// Runs on a stack of `stack` bytes. A panic of the engine becomes the error of the template that `wrong`
/// makes.
fn on_a_stack<T: Send>(
    host: &dyn TemplateHost,
    stack: usize,
    run: impl FnOnce() -> Result<T, ChatError> + Send,
    wrong: impl FnOnce(String) -> ChatError,
) -> Result<T, ChatError> {
    let (mut run, mut result) = (Some(run), None);
    let ran = host.run_on_stack(stack, &mut || result = run.take().map(|run| run()));
    match (ran, result) {
        (Ok(()), Some(result)) => result,
        (Err(StackError::NoStack(source)), _) => Err(ChatError::NoThread { mebibytes: stack >> 20, source }),
        _ => Err(wrong("the template engine stopped at a fault of its own".to_owned())),
    }
}

impl JinjaTemplates {
    /// `templates` are name and text; at least one.
    pub fn compile(
        templates: &[(String, String)],
        tokens: BTreeMap<String, String>,
        host: &'static dyn TemplateHost,
    ) -> Result<JinjaTemplates, ChatError> {
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let syntax =
            syntax.map_err(|e| ChatError::Syntax { template: "syntax".to_owned(), reason: e.to_string() })?;
        let mut compiled = Vec::with_capacity(templates.len());
        for (name, text) in templates {
            let wrong = |reason| ChatError::Syntax { template: name.clone(), reason };
            if text.len() > LONGEST_TEMPLATE {
                return Err(wrong(format!("it has {} bytes, {LONGEST_TEMPLATE} are permitted", text.len())));
            }
            let compile = || CompiledTemplate::compile(name, without_generation_tags(text), &syntax);
            compiled.push(on_a_stack(host, PARSER_STACK, compile, wrong)?);
        }
        Ok(JinjaTemplates { environment: environment(), templates: compiled, tokens, host })
    }

    fn choose(&self, extra: &TemplateInputs) -> Option<&CompiledTemplate> {
        let named = |name: &str| self.templates.iter().find(|template| template.name() == name);
        let tool_use = extra.tools.as_ref().and_then(|_| named(TOOL_USE));
        tool_use.or_else(|| named(DEFAULT)).or_else(|| self.templates.first())
    }

    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        extra: &TemplateInputs,
    ) -> Result<String, ChatError> {
        let none = || ChatError::Section { reason: "it holds no template".to_owned() };
        let template = self.choose(extra).ok_or_else(none)?;
        let name = template.name();
        let mut context: BTreeMap<String, TemplateValue> = BTreeMap::new();
        for (token, text) in &self.tokens {
            context.insert(token.clone(), TemplateValue::from(text.as_str()));
        }
        context.insert("messages".to_owned(), TemplateValue::from(Serde(messages)));
        context.insert("tools".to_owned(), extra.tools.clone().unwrap_or(TemplateValue::from(())));
        context.insert("documents".to_owned(), extra.documents.clone().unwrap_or(TemplateValue::from(())));
        context.insert("add_generation_prompt".to_owned(), TemplateValue::from(add_generation_prompt));
        let now = extra.now.unwrap_or_else(|| self.host.local_time());
        // A directive's text is at most a date and a time.
        let strftime_now = move |format: String| {
            limits::count_memory((format.len() as u64).saturating_mul(16)).map(|()| strftime(&format, now))
        };
        context.insert("strftime_now".to_owned(), TemplateValue::from_function(strftime_now));
        context.extend(extra.variables.iter().map(|(name, value)| (name.clone(), value.clone())));
        let context = TemplateValue::from(context);
        let run = || {
            let rendered = template.run(&self.environment, context, self.host);
            // The engine's version of the error may hide the limit.
            rendered.map_err(|error| {
                limit_error(name, limits::reached_limit()).unwrap_or_else(|| render_error(name, &error))
            })
        };
        let wrong = |reason| ChatError::Render { template: name.to_owned(), reason };
        on_a_stack(self.host, RENDER_STACK, run, wrong)
    }

    /// The text of the template without tools.
    pub fn text(&self) -> Option<&str> {
        let chosen = self.choose(&TemplateInputs::default())?;
        Some(&chosen.program.borrow_owner().text)
    }

    pub fn uses(&self, variable: &str) -> bool {
        self.templates.iter().any(|template| template.variables.contains(variable))
    }

    /// True if the template that `extra` chooses has a word as an attribute or as a constant text.
    pub fn has_word(&self, word: &str, extra: &TemplateInputs) -> bool {
        self.choose(extra).is_some_and(|template| template.words.contains(word))
    }
}

fn limit_error(template: &str, limit: Option<RenderLimit>) -> Option<ChatError> {
    let template = template.to_owned();
    Some(match limit? {
        RenderLimit::Memory { bytes } => ChatError::TooMuchMemory { template, bytes },
        RenderLimit::Text { bytes } => ChatError::TooLong { template, bytes },
        RenderLimit::Time { milliseconds } => ChatError::TooSlow { template, milliseconds },
        RenderLimit::Levels => ChatError::TooDeep { template, levels: limits::MOST_LEVELS },
    })
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::empty();
    environment.set_fuel(Some(MOST_STEPS));
    environment.set_unknown_method_callback(methods::unknown_method);
    operators::add_to(&mut environment);
    filters::add_to(&mut environment);
    environment.add_function("raise_exception", |message: &TemplateValue| -> Result<TemplateValue, Error> {
        let message = shortened(operators::as_text(message)?.into_owned(), filters::LONGEST_MESSAGE);
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(RaisedException(message)))
    });
    environment
}

fn shortened(mut text: String, bytes: usize) -> String {
    if text.len() > bytes {
        text.truncate(text.floor_char_boundary(bytes));
        text.push_str(" ...");
    }
    text
}

/// The message of a template's `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct RaisedException(String);

fn render_error(template: &str, error: &Error) -> ChatError {
    let template = template.to_owned();
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(inner) = cause {
        if let Some(RaisedException(message)) = inner.downcast_ref() {
            return ChatError::Raised { message: message.clone() };
        }
        if inner.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return ChatError::TooManySteps { template, steps: MOST_STEPS };
        }
        cause = inner.source();
    }
    ChatError::Render { template, reason: describe(error) }
}

/// Kind, detail and line.
fn describe(error: &Error) -> String {
    let mut text = error.kind().to_string();
    if let Some(detail) = error.detail() {
        let _ = write!(text, ": {}", shortened(detail.to_owned(), LONGEST_REASON));
    }
    if let Some(line) = error.line() {
        let _ = write!(text, " (line {line})");
    }
    text
}

/// `{% generation %}` ... `{% endgeneration %}` marks the assistant's text for training. It renders what is
/// inside, as an `if true` does, with the same rules for white space.
fn without_generation_tags(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        result.push_str(before);
        let inner = tag[2..].trim_start_matches(['-', '+']).trim_start();
        let replacement = [("generation", "if true"), ("endgeneration", "endif")]
            .into_iter()
            .find_map(|(name, instead)| inner.strip_prefix(name).map(|after| (instead, after)))
            .filter(|(_, after)| after.trim_start().trim_start_matches(['-', '+']).starts_with("%}"));
        match replacement {
            Some((instead, after)) => {
                let sign = tag[2..].chars().next().filter(|c| matches!(c, '-' | '+'));
                result.push_str("{%");
                result.extend(sign);
                result.push(' ');
                result.push_str(instead);
                result.push(' ');
                rest = after.trim_start();
            }
            None => {
                result.push_str("{%");
                rest = &tag[2..];
            }
        }
    }
    result.push_str(rest);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_blocks_with_the_same_signs() {
        let text = "a{%- generation -%}b{% endgeneration+%}c{% generationx %}{%";
        assert_eq!(without_generation_tags(text), "a{%- if true -%}b{% endif +%}c{% generationx %}{%");
    }
}

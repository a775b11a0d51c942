//! `--json-schema` and `--grammar`: what a text may be.

use std::path::{Path, PathBuf};

use mlcc_engine::GrammarCompiler;
use mlcc_engine::conversation::AnswerForm;
use mlcc_text::{GrammarError, GrammarSpec, Tokenizer};

use crate::commands::read_text;
use crate::error::CliError;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TextForm {
    /// File with a JSON schema that the generated text has to match
    #[arg(long, value_name = "FILE", conflicts_with = "grammar")]
    json_schema: Option<PathBuf>,
    /// File with a grammar in llguidance's variant of Lark's syntax that the generated text has to match
    #[arg(long, value_name = "FILE")]
    grammar: Option<PathBuf>,
}

/// A grammar, and what compiles it for the model. It is known to be one.
#[derive(Debug)]
pub(crate) struct KnownForm {
    pub spec: GrammarSpec,
    pub compiler: GrammarCompiler,
}

impl KnownForm {
    pub fn answers(&self) -> AnswerForm<'_> {
        AnswerForm { grammar: &self.spec, compiler: &self.compiler }
    }
}

impl TextForm {
    /// The form that the flags ask for. A file that cannot be enforced is an error that names it.
    pub fn read(&self, tokenizer: &Tokenizer, vocab: usize) -> Result<Option<KnownForm>, CliError> {
        let (path, spec) = match (&self.json_schema, &self.grammar) {
            (Some(path), _) => (path, GrammarSpec::JsonSchema(json_schema(path)?)),
            (None, Some(path)) => (path, GrammarSpec::Lark(read_text(path, mlcc_files::FileKind::Grammar)?)),
            (None, None) => return Ok(None),
        };
        let wrong = |source: GrammarError| CliError::Grammar { path: path.clone(), source };
        let compiler = GrammarCompiler::new(tokenizer, vocab).map_err(wrong)?;
        compiler.compile(&spec).map_err(wrong)?;
        Ok(Some(KnownForm { spec, compiler }))
    }
}

fn json_schema(path: &Path) -> Result<serde_json::Value, CliError> {
    let text = read_text(path, mlcc_files::FileKind::Grammar)?;
    let reason =
        |error: serde_json::Error| GrammarError::Invalid { reason: format!("the file is not JSON: {error}") };
    serde_json::from_str(&text)
        .map_err(|error| CliError::Grammar { path: path.to_owned(), source: reason(error) })
}

//! `mlcc embed`: vectors of texts.

use std::io::Write;
use std::path::{Path, PathBuf};

use mlcc_engine::embedding::{EmbedOptions, EmbeddingModel, EmbeddingVectors};
use mlcc_files::FileKind;
use serde_json::json;

use crate::commands::{load, print, print_json, read_stdin, run};
use crate::error::CliError;
use crate::ui::{self, Ui};

#[derive(Debug, clap::Args)]
#[command(after_help = "Example: mlcc embed bge-m3.so \"What is a monad?\" --json\n\
    The pooling is part of the artifact: `mlcc build --pooling` overrides that of the checkpoint's files.")]
pub struct EmbedArgs {
    /// A compiled embedding model, or what one is built of first: a preset name, hf:org/repo, a folder
    artifact: PathBuf,
    /// The texts [default: each line of standard input]
    texts: Vec<String>,
    /// Name of the model's prompt to put before each text (query, document, ...) [default: the model's own
    /// choice]
    #[arg(long, value_name = "NAME", conflicts_with = "prompt_text")]
    prompt: Option<String>,
    /// Prompt text to put before each text
    #[arg(long, value_name = "TEXT")]
    prompt_text: Option<String>,
    /// Keep only the first N numbers of each vector, normalized to length 1 again
    #[arg(long, value_name = "N")]
    dim: Option<usize>,
    /// Write the vectors as a NumPy array [texts, numbers] of f32 into this file
    #[arg(short, long, value_name = "FILE.npy", conflicts_with = "json")]
    output: Option<PathBuf>,
    #[command(flatten)]
    common: EmbeddingModelArgs,
}

/// What the commands over models of texts share.
#[derive(Debug, clap::Args)]
pub(super) struct EmbeddingModelArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Weight format if a checkpoint is compiled [default: one for this machine: q4i8 on CPUs, q4f16 on GPUs,
    /// q8i8 for models of texts; as stored if small or quantized]
    #[arg(long, value_name = "NAME")]
    quant: Option<String>,
    /// Worker threads [default: physical cores]
    #[arg(short, long, env = "MLCC_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Tokenizer file, instead of the one in the artifact
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
}

impl EmbeddingModelArgs {
    pub fn load(&self, artifact: &Path, ui: &Ui) -> Result<EmbeddingModel, CliError> {
        let artifact = super::checkpoint::artifact_for(artifact, self.quant.as_deref(), ui)?;
        text_model(&artifact, self.threads, self.tokenizer.as_deref())
    }
}

/// Texts that are given as arguments, or else are on the lines of standard input. `what` they are, for the
/// message that there are none.
pub(super) fn texts_or_lines(given: &[String], what: &str) -> Result<Vec<String>, CliError> {
    let texts: Vec<String> = match given.is_empty() {
        false => given.to_vec(),
        true => read_stdin(FileKind::Prompt)?.lines().map(str::to_string).collect(),
    };
    if texts.is_empty() {
        let message = format!("no {what}: give some as arguments, or one per line on standard input");
        return Err(CliError::usage(message));
    }
    Ok(texts)
}

pub fn run(args: &EmbedArgs, ui: &Ui) -> Result<(), CliError> {
    let mut model = args.common.load(&args.artifact, ui)?;
    let texts = texts_or_lines(&args.texts, "texts")?;
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let how = EmbedOptions {
        prompt: args.prompt.as_deref(),
        prompt_text: args.prompt_text.as_deref(),
        dim: args.dim,
    };
    let vectors = model.embed(&texts, &how)?;
    if let Some(path) = &args.output {
        mlcc_runtime::replace_file(path, |file| file.write_all(&npy(&vectors)))
            .map_err(CliError::io("write", path))?;
        let count = ui::pluralize(vectors.rows().len(), "vector");
        ui.note(format_args!("{count} of {} numbers", vectors.dim));
        return Ok(());
    }
    if args.common.json {
        let rows: Vec<&[f32]> = vectors.rows().collect();
        return print_json(&json!({ "dim": vectors.dim, "tokens": vectors.tokens, "embeddings": rows }));
    }
    let line = |row: &[f32]| row.iter().map(f32::to_string).collect::<Vec<_>>().join(" ") + "\n";
    print(&vectors.rows().map(line).collect::<String>())
}

/// A model of texts with its tokenizer.
pub(crate) fn text_model(
    artifact: &Path,
    threads: Option<u16>,
    tokenizer: Option<&Path>,
) -> Result<EmbeddingModel, CliError> {
    let model = load(artifact, threads.map(usize::from), false)?;
    if model.text_width() == 0 {
        return Err(mlcc_runtime::Error::NoTexts { path: artifact.to_path_buf() }.into());
    }
    let tokenizer = run::tokenizer(&model, tokenizer)?;
    Ok(EmbeddingModel::new(&model, tokenizer)?)
}

/// NumPy's format, version 1.0: magic, length of the header, a Python dictionary filled up to 64 bytes, the
/// elements.
fn npy(vectors: &EmbeddingVectors) -> Vec<u8> {
    let shape = format!("({}, {})", vectors.rows().len(), vectors.dim);
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
    const BEFORE: usize = 10;
    let length = (BEFORE + header.len() + 1).next_multiple_of(64) - BEFORE;
    header.push_str(&" ".repeat(length - header.len() - 1));
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend_from_slice(&(length as u16).to_le_bytes());
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend(vectors.values.iter().flat_map(|x| x.to_le_bytes()));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_of_numpy() {
        let bytes = npy(&EmbeddingVectors { dim: 2, values: vec![1.0, -2.0, 0.5, 0.25], tokens: 3 });
        assert_eq!(bytes[..10], *b"\x93NUMPY\x01\x00\x76\x00");
        let header = std::str::from_utf8(&bytes[10..128]).unwrap();
        assert!(header.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }  "));
        assert!(header.ends_with('\n'));
        assert_eq!(bytes[128..132], 1f32.to_le_bytes());
        assert_eq!(bytes.len(), 128 + 16);
    }
}

//! `mlcc rerank`: documents in the order in which they answer a query.

use std::path::PathBuf;

use mlcc_files::Kind;
use serde_json::json;

use crate::commands::embed::text_model;
use crate::commands::{print, print_json, read_stdin};
use crate::error::CliError;
use crate::ui::Ui;

#[derive(Debug, clap::Args)]
#[command(after_help = "Example: mlcc rerank bge-reranker-v2-m3.so \"What is a monad?\" < documents.txt\n\
    Prints `score`, number of the document from 0 on, and the document, with tabs between, the best one first.")]
pub struct Args {
    /// A compiled reranker
    artifact: PathBuf,
    /// What the documents are to answer
    query: String,
    /// The documents [default: each line of standard input]
    documents: Vec<String>,
    /// At most so many, the best ones
    #[arg(long, value_name = "N")]
    top: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Worker threads [default: physical cores]
    #[arg(short, long, env = "MLCC_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Tokenizer file, in place of the one in the artifact
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
}

pub fn run(args: &Args, _: &Ui) -> Result<(), CliError> {
    let mut model = text_model(&args.artifact, args.threads, args.tokenizer.as_deref())?;
    let read;
    let documents: Vec<&str> = match args.documents.is_empty() {
        false => args.documents.iter().map(String::as_str).collect(),
        true => {
            read = read_stdin(Kind::Prompt)?;
            read.lines().collect()
        }
    };
    if documents.is_empty() {
        return Err(CliError::usage(
            "no documents: give some as arguments, or one per line on standard input",
        ));
    }
    let scores = model.rerank(&args.query, &documents)?;
    let mut order: Vec<usize> = (0..documents.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(args.top.unwrap_or(usize::MAX));
    if args.json {
        let row = |&i: &usize| json!({ "index": i, "score": scores[i], "document": documents[i] });
        return print_json(&order.iter().map(row).collect::<Vec<_>>());
    }
    let line = |&i: &usize| format!("{}\t{i}\t{}\n", scores[i], documents[i]);
    print(&order.iter().map(line).collect::<String>())
}

//! `mlcc rerank`: documents in the order in which they answer a query.

use std::path::PathBuf;

use serde_json::json;

use crate::commands::embed::{EmbeddingModelArgs, texts_or_lines};
use crate::commands::{print, print_json};
use crate::error::CliError;
use crate::ui::Ui;

#[derive(Debug, clap::Args)]
#[command(after_help = "Example: mlcc rerank bge-reranker-v2-m3.so \"What is a monad?\" < documents.txt\n\
    Prints the score, the number of the document (from 0) and the document, separated by tabs, the best one first.")]
pub struct RerankArgs {
    /// A compiled reranker, or what one is built of first: hf:org/repo, a folder
    artifact: PathBuf,
    /// Query that the documents should answer
    query: String,
    /// The documents [default: each line of standard input]
    documents: Vec<String>,
    /// Instruction that says which documents are relevant, for rerankers that answer with a token [default:
    /// what the model was trained with]
    #[arg(long, value_name = "TEXT")]
    instruct: Option<String>,
    /// Print only the N best documents
    #[arg(long, value_name = "N")]
    top: Option<usize>,
    #[command(flatten)]
    common: EmbeddingModelArgs,
}

pub fn run(args: &RerankArgs, ui: &Ui) -> Result<(), CliError> {
    let mut model = args.common.load(&args.artifact, ui)?;
    let documents = texts_or_lines(&args.documents, "documents")?;
    let documents: Vec<&str> = documents.iter().map(String::as_str).collect();
    let scores = model.rerank_as(args.instruct.as_deref(), &args.query, &documents)?;
    let mut order: Vec<usize> = (0..documents.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(args.top.unwrap_or(usize::MAX));
    if args.common.json {
        let row = |&i: &usize| json!({ "index": i, "score": scores[i], "document": documents[i] });
        return print_json(&order.iter().map(row).collect::<Vec<_>>());
    }
    let line = |&i: &usize| format!("{}\t{i}\t{}\n", scores[i], documents[i]);
    print(&order.iter().map(line).collect::<String>())
}

//! The resources that a container requests from Kubernetes to serve a compiled model.

use std::path::Path;

use mlcc_runtime::{ModelRequirements, physical_cores};
use serde_json::{Value, json};

use crate::commands::{pages, print, print_json};
use crate::error::CliError;

/// Flags of `mlcc inspect --resources`; they mean what they do for `mlcc serve`.
#[derive(Debug, clap::Args)]
pub struct ResourceArgs {
    /// Print what `mlcc serve` needs for it, as Kubernetes requests and limits: the memory that a server
    /// computes at its start (loads the code)
    #[arg(long, conflicts_with_all = ["params", "metadata", "asm", "graph"])]
    pub resources: bool,
    /// With --resources: sequences that run together
    #[arg(long, value_name = "N", default_value_t = 16, requires = "resources", value_parser = clap::value_parser!(u16).range(1..=1024))]
    sequences: u16,
    /// With --resources: worker threads [default: physical cores]
    #[arg(short, long, requires = "resources", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// With --resources: capacity in tokens of the caches of all sequences together [default: enough for all
    /// sequences at full length]
    #[arg(long, value_name = "N", requires = "resources", value_parser = clap::value_parser!(u64).range(1..=1 << 31))]
    cache_tokens: Option<u64>,
    /// With --resources: the server keeps states in files
    #[arg(long, requires = "resources")]
    cache_dir: bool,
    /// With --resources: what each container needs if a split model runs with one rank per container
    #[arg(long, requires = "resources")]
    each_rank: bool,
}

/// Prints them for one artifact.
pub fn run(artifact: &Path, flags: &ResourceArgs, as_json: bool) -> Result<(), CliError> {
    let model = ModelRequirements::open(artifact, flags.cache_tokens.map(pages))?;
    let memory =
        mlcc_serve::container_memory(&model, usize::from(flags.sequences), flags.cache_dir, flags.each_rank);
    let threads = flags.threads.map_or_else(physical_cores, usize::from);
    let amounts = [("cpu", threads.to_string()), ("memory", format!("{}Mi", memory.limit.div_ceil(1 << 20)))];
    // Each rank has one of its own.
    let gpus = if flags.each_rank { 1 } else { model.plan.ranks };
    let gpus = (model.target == "cuda").then(|| ("nvidia.com/gpu", gpus.to_string()));
    let limits: Vec<(&str, String)> = amounts.iter().cloned().chain(gpus).collect();
    if !as_json {
        let mut text = format!("# {}; more for the program itself\nresources:\n", memory.sum);
        for (part, amounts) in [("requests", &amounts[..]), ("limits", &limits)] {
            text += &format!("  {part}:\n");
            amounts.iter().for_each(|(name, amount)| text += &format!("    {name}: \"{amount}\"\n"));
        }
        return print(&text);
    }
    let object = |amounts: &[(&str, String)]| -> Value {
        amounts.iter().map(|(name, amount)| ((*name).to_owned(), json!(amount))).collect()
    };
    print_json(&json!({
        "sequences": flags.sequences,
        "threads": threads,
        "weights_bytes": memory.weights,
        "need_bytes": memory.need,
        "requests_bytes": memory.requests,
        "limit_bytes": memory.limit,
        "resources": {"requests": object(&amounts), "limits": object(&limits)},
    }))
}

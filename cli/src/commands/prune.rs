//! `mlcc prune`: makes room in the cache of artifacts.

use crate::commands::artifact_cache::{self, ArtifactCache};
use crate::commands::build::parse_bytes;
use crate::error::CliError;
use crate::ui::{self, Ui};

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Removes the artifacts that were not used for the longest time until the others are within the limit, and \
    transfers that nobody went on with for a day. Checkpoints stay: `mlcc rm` removes them. Every build into the cache does \
    the same with the limit of MLCC_CACHE_LIMIT."
)]
pub struct PruneArgs {
    /// Bytes that artifacts may keep (2GB, 500MiB; 0 removes all) [default: MLCC_CACHE_LIMIT, else 50GB]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    limit: Option<u64>,
}

pub fn run(args: &PruneArgs, ui: &Ui) -> Result<(), CliError> {
    let Some(cache) = ArtifactCache::from_environment() else {
        ui.note("there is no cache: MLCC_CACHE_DIR is empty, or there is no home folder");
        return Ok(());
    };
    let limit = args.limit.map_or_else(artifact_cache::cache_limit, Ok)?;
    let folder = cache.artifacts();
    let artifacts = cache.remove_oldest(limit, None).map_err(CliError::io("remove files of", &folder))?;
    let transfers = cache.remove_abandoned().map_err(CliError::io("remove files of", &folder))?;
    ui.note(format_args!(
        "removed {} and {}, {}, from {}",
        ui::pluralize(artifacts.files as u64, "artifact"),
        ui::pluralize(transfers.files as u64, "unfinished download"),
        ui::bytes(artifacts.bytes + transfers.bytes),
        folder.display()
    ));
    Ok(())
}

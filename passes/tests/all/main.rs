//! All integration tests of the crate in one program, since linking it is most of a build: one module per subject.

mod appended_rows;
mod dynamic_shares;
mod join_launches;
mod lowering;
mod meaning;
mod mixers;
mod program_text;
mod quantize;
mod replicate;
mod shard;
mod shard_adapters;
mod shard_hybrids;
mod shard_sums;
mod shard_uneven;

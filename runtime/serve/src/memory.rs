//! The memory that a server of some sequences needs, and the memory that there is.

use std::path::{Path, PathBuf};

use mlcc_runtime::{Model, ModelPlan, ModelRequirements};

use crate::request_memory::USUAL_REQUESTS;
use crate::serve_options::ServeOptions;

/// The requirements with those of all ranks on this machine: its memory is theirs.
fn outline_on_this_machine(model: &Model) -> ModelRequirements {
    of_ranks(&model.requirements(), model.ranks_here())
}

fn of_ranks(model: &ModelRequirements, ranks: u64) -> ModelRequirements {
    ModelRequirements { plan: model.plan.for_ranks(ranks), ..model.clone() }
}

/// Most states in addition to those of the sequences, if there are fewer sequences.
const MOST_KEPT: usize = 64;

/// Bytes that a model needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryNeed {
    pub weights: u64,
    /// Scratch of the steps, once.
    pub scratch: u64,
    /// State and results of one sequence; with the caches of a full context, unless these are limited.
    pub sequence: u64,
    pub sequences: u64,
    /// The caches of all sequences together, if they may have fewer pages than full contexts.
    pub caches: Option<u64>,
    /// A state that is kept in addition to those of the sequences, without its rows of caches: these are
    /// among those of the sequences.
    pub snapshot: u64,
    pub snapshots: u64,
    /// The copy of a state on its way to a file.
    pub write_buffer: u64,
}

impl MemoryNeed {
    /// Memory for `sequences` sequences at a time; for a model of texts, which takes them in turns, whatever
    /// their number. With all ranks of this machine.
    pub fn to_serve(model: &Model, sequences: usize) -> MemoryNeed {
        MemoryNeed::on_ranks(&outline_on_this_machine(model), model.plan(), sequences)
    }

    /// The same, of some ranks of the model that `all` is the plan of.
    fn on_ranks(model: &ModelRequirements, all: &ModelPlan, sequences: usize) -> MemoryNeed {
        match model.plan.text_width {
            0 => MemoryNeed::for_sequences(model, sequences, prefix_cache_size(all, sequences)),
            _ => MemoryNeed::for_embeddings(model),
        }
    }

    fn for_sequences(model: &ModelRequirements, sequences: usize, snapshots: usize) -> MemoryNeed {
        let plan = &model.plan;
        let logits = plan.vocab.saturating_mul(4);
        let whole = plan.sequence_bytes().saturating_add(logits);
        let (sequences, pool) = (sequences as u64, model.cache_pages);
        let limited = pool < plan.pages().saturating_mul(sequences);
        MemoryNeed {
            weights: weights(model),
            sequence: if limited {
                plan.state_bytes.saturating_mul(plan.ranks).saturating_add(logits)
            } else {
                whole
            },
            caches: limited.then(|| pool.saturating_mul(plan.page_bytes)),
            scratch: plan.scratch_bytes(),
            sequences,
            snapshot: snapshot(plan),
            snapshots: snapshots as u64,
            write_buffer: 0,
        }
    }

    /// Memory of a model that drafts for `sequences` sequences: one that cannot roll back has a copy of its
    /// state for each.
    pub fn to_draft(model: &Model, sequences: usize) -> MemoryNeed {
        let table = model.table();
        let goes_back = table.recurrent_state().is_none() && table.sliding_window().is_none();
        MemoryNeed::for_sequences(
            &outline_on_this_machine(model),
            sequences,
            if goes_back { 0 } else { sequences },
        )
    }

    /// The same, where states go into files.
    pub fn with_files(self, plan: &ModelPlan, files: bool) -> MemoryNeed {
        let whole = || plan.sequence_bytes().saturating_add(plan.vocab.saturating_mul(4));
        MemoryNeed { write_buffer: if files { whole() } else { 0 }, ..self }
    }

    /// Memory of a model of texts, which has no sequences.
    fn for_embeddings(model: &ModelRequirements) -> MemoryNeed {
        let plan = &model.plan;
        // Tokens, the numbers of the requested outputs, and the vectors.
        let rows = plan.chunk.max(1).saturating_mul(8);
        let made = plan.text_width.saturating_mul(plan.batch).saturating_mul(4);
        let scratch = plan.scratch_bytes().saturating_add(rows).saturating_add(made);
        MemoryNeed { weights: weights(model), scratch, ..MemoryNeed::default() }
    }

    pub fn total(&self) -> u64 {
        let sequences = self.sequence.saturating_mul(self.sequences);
        let snapshots = self.snapshot.saturating_mul(self.snapshots);
        [self.scratch, sequences, self.caches.unwrap_or(0), snapshots, self.write_buffer]
            .into_iter()
            .fold(self.weights, u64::saturating_add)
    }

    /// The terms, without the sum.
    fn parts(&self) -> String {
        let (weights, scratch, sequence) = (mib(self.weights), mib(self.scratch), mib(self.sequence));
        let mut text = format!("{weights} of weights + {scratch} of scratch");
        if self.sequences > 0 {
            text += &format!(" + {} sequences of {sequence}", self.sequences);
        }
        if let Some(caches) = self.caches {
            text += &format!(" + caches of {} (--cache-tokens)", mib(caches));
        }
        if self.snapshots > 0 {
            text += &format!(" + {} kept states of {}", self.snapshots, mib(self.snapshot));
        }
        if self.write_buffer > 0 {
            text += &format!(" + {} for a state on its way to a file (--cache-dir)", mib(self.write_buffer));
        }
        text
    }
}

/// An additional state, with its results and the logits behind it.
fn snapshot(plan: &ModelPlan) -> u64 {
    plan.state_bytes.saturating_mul(plan.ranks).saturating_add(plan.vocab.saturating_mul(8))
}

/// The number of states that are kept in addition to those of the sequences: as many again, and up to
/// [`MOST_KEPT`] as long as all of them take no more than an eighth of the weights' memory.
pub fn prefix_cache_states(model: &Model, sequences: usize) -> usize {
    prefix_cache_size(model.plan(), sequences)
}

fn prefix_cache_size(plan: &ModelPlan, sequences: usize) -> usize {
    let fit = all_weights(plan) / 8 / snapshot(plan).max(1);
    usize::try_from(fit).unwrap_or(MOST_KEPT).min(MOST_KEPT).max(sequences)
}

/// Bytes of the weights in the artifact's file; others are in memory already.
fn weights(model: &ModelRequirements) -> u64 {
    if model.has_weights { all_weights(&model.plan) } else { 0 }
}

/// Bytes of the weights of all of these ranks, and of slots for adapters.
fn all_weights(plan: &ModelPlan) -> u64 {
    plan.weights_bytes.saturating_mul(plan.ranks).saturating_add(plan.adapter_bytes)
}

/// Memory of the program itself: code, tokenizer, the allocator. 15 to 54 MiB were seen (docs/serve.md).
const PROGRAM: u64 = 128 << 20;
/// Requests and kept answers of a server without flags for them.
const BESIDE: u64 = USUAL_REQUESTS + crate::responses::MOST_BYTES as u64;

/// Memory of a container in which one model is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerMemory {
    /// Bytes of weights: in pages of the artifact's file, which can be given back, or made when the model was
    /// loaded; they count in the limit of a container.
    pub weights: u64,
    /// The bytes that the server adds up at its start: weights, scratch memory, states, results and requests.
    pub need: u64,
    /// The part of it that is for requests and kept answers.
    pub requests: u64,
    /// The sum of `need`, as the server says it.
    pub sum: String,
    /// The sum with all weights, and what the program needs beside.
    pub limit: u64,
}

/// The memory that a container needs for `mlcc serve --sequences SEQUENCES`, with `files` for `--cache-dir`:
/// the sum that is checked when a server starts, and some room. `each_rank`: one of as many containers as the
/// model has ranks.
pub fn container_memory(
    model: &ModelRequirements,
    sequences: usize,
    files: bool,
    each_rank: bool,
) -> ContainerMemory {
    let here = of_ranks(model, if each_rank { 1 } else { model.plan.ranks });
    let need = MemoryNeed::on_ranks(&here, &model.plan, sequences).with_files(&model.plan, files);
    let weights = all_weights(&here.plan);
    // Weights that a server finds in memory already are in its container, too.
    let all = need.total().saturating_add(weights.saturating_sub(need.weights));
    // Ranks on GPUs are processes.
    let programs = if model.target == "cuda" { here.plan.ranks } else { 1 };
    let limit = all.saturating_add(PROGRAM.saturating_mul(programs)).saturating_add(BESIDE);
    let sum = format!("{need}, and {} for requests and kept answers", mib(BESIDE));
    ContainerMemory { weights, need: need.total().saturating_add(BESIDE), requests: BESIDE, sum, limit }
}

/// The sum, for people.
impl std::fmt::Display for MemoryNeed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} = {}", self.parts(), mib(self.total()))
    }
}

/// The needs of a model together with the one that drafts for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WithDraft {
    pub model: MemoryNeed,
    pub draft: Option<MemoryNeed>,
}

impl WithDraft {
    pub fn total(&self) -> u64 {
        self.model.total().saturating_add(self.draft.map_or(0, |draft| draft.total()))
    }
}

impl std::fmt::Display for WithDraft {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.draft {
            None => self.model.fmt(f),
            Some(draft) => {
                let (model, total) = (self.model.parts(), mib(self.total()));
                write!(f, "{model} + for drafts {} = {total}", draft.parts())
            }
        }
    }
}

/// The bytes that all requests to a server may need together: bodies, what is made of them, and answers.
pub fn request_memory(options: &ServeOptions) -> u64 {
    // A body takes a part of a quarter, with room for others.
    let least = (options.body_limit as u64).saturating_mul(16);
    options.request_memory.unwrap_or_else(|| least.max(USUAL_REQUESTS))
}

/// The bytes that a server may need besides its models: those of requests, and of answers that it keeps.
pub fn server_memory(options: &ServeOptions) -> u64 {
    request_memory(options).saturating_add(crate::responses::MOST_BYTES as u64)
}

pub fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

/// A limit and its origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLimit {
    pub bytes: u64,
    pub origin: String,
}

/// The tightest limit that is known: what was given, what the machine has free, what the control group
/// leaves; less what models can need that are there already, which is `committed`. `None` where nothing is
/// known.
pub fn limit_beside(given: Option<u64>, committed: u64) -> Option<MemoryLimit> {
    let given =
        given.map(|bytes| MemoryLimit { bytes: bytes.saturating_sub(committed), origin: "--memory".into() });
    let free =
        std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| kilobytes(&text, "MemAvailable:"));
    let free = free.map(|bytes| MemoryLimit { bytes, origin: "the machine's free memory".into() });
    // The part that the process has taken is not free any more.
    let own = std::fs::read_to_string("/proc/self/status").ok().and_then(|text| kilobytes(&text, "RssAnon:"));
    let to_come = committed.saturating_sub(own.unwrap_or(0));
    let left = |room: MemoryLimit| MemoryLimit { bytes: room.bytes.saturating_sub(to_come), ..room };
    given.into_iter().chain(free.into_iter().chain(group_rooms()).map(left)).min_by_key(|room| room.bytes)
}

/// Bytes, from a line of `/proc` in kilobytes.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kb| kb << 10)
}

/// The limits of the control group of this process and those around it (version 2, or the one of memory of
/// version 1).
fn group_rooms() -> Vec<MemoryLimit> {
    let Ok(groups) = std::fs::read_to_string("/proc/self/cgroup") else { return Vec::new() };
    let mut rooms = Vec::new();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(kinds), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (root, limit, used) = match kinds {
            "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
            kinds if kinds.split(',').any(|kind| kind == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        let mut folder = PathBuf::from(root).join(path.trim_start_matches('/'));
        while folder.starts_with(root) {
            rooms.extend(cgroup_limit(&folder, limit, used));
            if !folder.pop() {
                break;
            }
        }
    }
    rooms
}

/// Pages of files that are not in use are counted as used, but make room.
fn cgroup_limit(folder: &Path, limit: &str, used: &str) -> Option<MemoryLimit> {
    let number = |name: &str| std::fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let limit = number(limit)?;
    let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let of_files = |name: &str| {
        stat.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok())
            .unwrap_or(0)
    };
    let files = of_files("active_file") + of_files("inactive_file");
    let used = number(used).unwrap_or(0).saturating_sub(files);
    let origin = format!("the limit of the control group {}", folder.display());
    // Version 1 writes a huge number for no limit.
    (limit < 1 << 60).then(|| MemoryLimit { bytes: limit.saturating_sub(used), origin })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_shown() {
        let need = MemoryNeed {
            weights: 3 << 20,
            scratch: 1 << 20,
            sequence: 1 << 20,
            sequences: 4,
            caches: None,
            snapshot: 1 << 19,
            snapshots: 2,
            write_buffer: 0,
        };
        assert_eq!(need.total(), 9 << 20);
        let text = "3.0 MiB of weights + 1.0 MiB of scratch + 4 sequences of 1.0 MiB + 2 kept states of 0.5 MiB = 9.0 MiB";
        assert_eq!(need.to_string(), text);
        let files = MemoryNeed { write_buffer: 1 << 19, ..need };
        assert_eq!(files.total(), need.total() + (1 << 19));
        let text =
            "+ 2 kept states of 0.5 MiB + 0.5 MiB for a state on its way to a file (--cache-dir) = 9.5 MiB";
        assert!(files.to_string().ends_with(text), "{files}");
        let limited = MemoryNeed { caches: Some(2 << 20), snapshots: 0, ..need };
        assert_eq!(limited.total(), 10 << 20);
        let text = "3.0 MiB of weights + 1.0 MiB of scratch + 4 sequences of 1.0 MiB + caches of 2.0 MiB (--cache-tokens) = 10.0 MiB";
        assert_eq!(limited.to_string(), text);
        let draft = MemoryNeed { weights: 1 << 20, sequence: 1 << 19, sequences: 4, ..MemoryNeed::default() };
        let both = WithDraft { model: limited, draft: Some(draft) };
        assert_eq!(both.total(), 13 << 20);
        let drafts = "for drafts 1.0 MiB of weights + 0.0 MiB of scratch + 4 sequences of 0.5 MiB = 13.0 MiB";
        assert!(both.to_string().ends_with(drafts), "{both}");
        let texts = MemoryNeed { weights: 1 << 20, scratch: 1 << 20, ..MemoryNeed::default() };
        assert_eq!(texts.to_string(), "1.0 MiB of weights + 1.0 MiB of scratch = 2.0 MiB");
        let huge = MemoryNeed { sequence: u64::MAX, ..need };
        assert_eq!(huge.total(), u64::MAX);
    }

    #[test]
    fn free_memory_is_read() {
        let text = "MemTotal:       16318480 kB\nMemAvailable:    8159240 kB\n";
        assert_eq!(kilobytes(text, "MemAvailable:"), Some(8_159_240 << 10));
        assert_eq!(kilobytes("MemTotal: 1 kB\n", "MemAvailable:"), None);
        let given = |bytes| Some(MemoryLimit { bytes, origin: "--memory".into() });
        assert_eq!(limit_beside(Some(1), 0), given(1));
        assert_eq!((limit_beside(Some(5), 3), limit_beside(Some(5), 9)), (given(2), given(0)));
    }

    #[test]
    fn control_groups_leave_what_files_can_give_back() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("memory.max", "max\n");
        assert_eq!(cgroup_limit(folder.path(), "memory.max", "memory.current"), None);
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        write("memory.stat", "anon 100\nactive_file 300\ninactive_file 200\n");
        let room = cgroup_limit(folder.path(), "memory.max", "memory.current").unwrap();
        assert_eq!(room.bytes, 800);
        assert!(room.origin.contains("control group"), "{room:?}");
    }
}

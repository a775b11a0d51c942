//! Does it fit? What a server of so many sequences needs, and what there is.

use std::path::{Path, PathBuf};

use mlcc_abi::section;
use mlcc_runtime::Model;

/// Bytes that a server needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    pub weights: u64,
    /// State of a full context, scratch and results of one sequence.
    pub sequence: u64,
    pub sequences: u64,
    /// A recurrent state that is kept behind a prompt.
    pub snapshot: u64,
    pub snapshots: u64,
}

impl Need {
    pub fn of(model: &Model, sequences: usize, snapshots: usize) -> Need {
        let (plan, table) = (model.plan(), model.table());
        let recurrent =
            table.states.iter().any(|s| s.cache.is_none() && s.dropped_beyond.is_none() && !s.is_length);
        let logits = plan.vocab.saturating_mul(4);
        Need {
            // Those that are no part of the file are in memory already.
            weights: if model.section(section::WEIGHTS).is_some() { plan.weights_bytes } else { 0 },
            sequence: plan.state_bytes.saturating_add(plan.arena_bytes).saturating_add(logits),
            sequences: sequences as u64,
            snapshot: plan.state_bytes.saturating_add(logits),
            snapshots: if recurrent { snapshots as u64 } else { 0 },
        }
    }

    pub fn total(&self) -> u64 {
        let sequences = self.sequence.saturating_mul(self.sequences);
        let snapshots = self.snapshot.saturating_mul(self.snapshots);
        self.weights.saturating_add(sequences).saturating_add(snapshots)
    }
}

/// The sum, for people.
impl std::fmt::Display for Need {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (weights, sequence) = (mib(self.weights), mib(self.sequence));
        write!(f, "{weights} of weights + {} sequences of {sequence}", self.sequences)?;
        if self.snapshots > 0 {
            write!(f, " + {} kept states of {}", self.snapshots, mib(self.snapshot))?;
        }
        write!(f, " = {}", mib(self.total()))
    }
}

pub fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

/// Where a limit comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    pub bytes: u64,
    pub origin: String,
}

/// The tightest limit that is known: what was given, what the machine has free, what the control group leaves. `None` where
/// nothing is known.
pub fn room(given: Option<u64>) -> Option<Room> {
    let given = given.map(|bytes| Room { bytes, origin: "--memory".into() });
    let free = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text));
    let free = free.map(|bytes| Room { bytes, origin: "the machine's free memory".into() });
    given.into_iter().chain(free).chain(group_rooms()).min_by_key(|room| room.bytes)
}

fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kb| kb << 10)
}

/// Of the control group of this process and those around it (version 2, or the one of memory of version 1).
fn group_rooms() -> Vec<Room> {
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
            rooms.extend(group_room(&folder, limit, used));
            if !folder.pop() {
                break;
            }
        }
    }
    rooms
}

/// Pages of files that nobody uses now are counted as used, but make room.
fn group_room(folder: &Path, limit: &str, used: &str) -> Option<Room> {
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
    (limit < 1 << 60).then(|| Room { bytes: limit.saturating_sub(used), origin })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_shown() {
        let need =
            Need { weights: 3 << 20, sequence: 1 << 20, sequences: 4, snapshot: 1 << 19, snapshots: 2 };
        assert_eq!(need.total(), 8 << 20);
        let text = "3.0 MiB of weights + 4 sequences of 1.0 MiB + 2 kept states of 0.5 MiB = 8.0 MiB";
        assert_eq!(need.to_string(), text);
        let huge = Need { sequence: u64::MAX, ..need };
        assert_eq!(huge.total(), u64::MAX);
    }

    #[test]
    fn free_memory_is_read() {
        let text = "MemTotal:       16318480 kB\nMemAvailable:    8159240 kB\n";
        assert_eq!(available(text), Some(8_159_240 << 10));
        assert_eq!(available("MemTotal: 1 kB\n"), None);
        assert_eq!(room(Some(1)), Some(Room { bytes: 1, origin: "--memory".into() }));
    }

    #[test]
    fn control_groups_leave_what_files_can_give_back() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("memory.max", "max\n");
        assert_eq!(group_room(folder.path(), "memory.max", "memory.current"), None);
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        write("memory.stat", "anon 100\nactive_file 300\ninactive_file 200\n");
        let room = group_room(folder.path(), "memory.max", "memory.current").unwrap();
        assert_eq!(room.bytes, 800);
        assert!(room.origin.contains("control group"), "{room:?}");
    }
}

//! How many workers suit this machine.

use std::collections::BTreeSet;
use std::fs::read_to_string;

/// Physical cores that this process may use: affinity and cgroup limits respected. At least 1.
pub fn physical_cores() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, |n| n.get());
    cores_by_sysfs().map_or(logical, |cores| cores.min(logical)).max(1)
}

/// Distinct cores behind the logical CPUs of this process's affinity mask; `None` where Linux does not say.
fn cores_by_sysfs() -> Option<usize> {
    let status = read_to_string("/proc/self/status").ok()?;
    let allowed = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = BTreeSet::new();
    for cpu in parse_list(allowed)? {
        let folder = format!("/sys/devices/system/cpu/cpu{cpu}/topology");
        let siblings = read_to_string(format!("{folder}/core_cpus_list"))
            .or_else(|_| read_to_string(format!("{folder}/thread_siblings_list")));
        // The smallest sibling names the core. An offline CPU of the mask has no folder.
        let Ok(siblings) = siblings else { continue };
        cores.insert(*parse_list(&siblings)?.first()?);
    }
    (!cores.is_empty()).then_some(cores.len())
}

/// `0-3,8,10-11` as numbers.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut out = Vec::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to): (usize, usize) = (from.trim().parse().ok()?, to.trim().parse().ok()?);
        if to < from || to - from > 1 << 16 {
            return None;
        }
        out.extend(from..=to);
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!(parse_list("0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(parse_list("x"), None);
        assert_eq!(parse_list("5-1"), None);
    }

    #[test]
    fn at_least_one_core() {
        let cores = physical_cores();
        assert!(cores >= 1 && cores <= std::thread::available_parallelism().unwrap().get());
    }
}

//! Cores that this process may use, and their topology in Linux: sockets, NUMA nodes, kinds of cores, threads
//! of one core. Facts that no file tells, or tells in unknown words, are those of a plain machine: one
//! socket, one node, one thread per core, all cores alike.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::read_to_string;
use std::path::Path;

use crate::pool::{CpuSet, WorkerAffinity};

/// More logical CPUs than any machine has.
const MOST_CPUS: usize = 1 << 13;
/// A core with less than this part (in quarters) of the best one's capacity or clock is an efficiency core.
/// Among cores of one kind clocks differ by a tenth at most (favoured cores).
const EFFICIENCY_QUARTERS: u64 = 3;

/// Kinds of cores, the faster first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CoreKind {
    Performance,
    Efficiency,
}

/// A physical core of which this process may use at least one thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuCore {
    /// The logical CPUs of it that may be used, rising.
    pub cpus: Vec<usize>,
    pub socket: usize,
    pub node: usize,
    pub kind: CoreKind,
}

/// The cores that this process may use: affinity and cgroup cpusets respected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuTopology {
    /// Cores in the order in which workers take them: neighbours are on one socket, performance cores come
    /// first. At least one.
    cores: Vec<CpuCore>,
}

/// Workers that suit this machine: its physical cores that this process may use, at most as many as its CPU
/// quota pays for. At least 1.
pub fn physical_cores() -> usize {
    let quota = std::thread::available_parallelism().map_or(usize::MAX, |n| n.get());
    CpuTopology::detect_host().cores.len().min(quota)
}

impl CpuTopology {
    /// The topology of this machine.
    pub fn detect_host() -> Self {
        Self::read(Path::new("/")).unwrap_or_else(|| {
            let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
            Self::one_core_per_cpu(0..cpus)
        })
    }

    /// The topology of the machine whose `sys` and `proc` are in the folder `root`; `None` if they do not
    /// tell which CPUs there are.
    pub fn read(root: &Path) -> Option<Self> {
        let system = SystemFiles { root };
        let cpus = system.allowed_cpus()?;
        let known: Vec<usize> = cpus.iter().copied().filter(|&cpu| system.has_cpu(cpu)).collect();
        if known.is_empty() {
            return Some(Self::one_core_per_cpu(cpus));
        }
        let (nodes, kinds) = (system.nodes(), system.core_kinds(&known));
        let mut cores: BTreeMap<usize, CpuCore> = BTreeMap::new();
        for &cpu in &known {
            let core = cores.entry(system.first_sibling(cpu)).or_insert_with(|| CpuCore {
                cpus: Vec::new(),
                socket: system.socket(cpu),
                node: nodes.get(&cpu).copied().unwrap_or(0),
                kind: kinds.get(&cpu).copied().unwrap_or(CoreKind::Performance),
            });
            core.cpus.push(cpu);
        }
        // In the order of their names, which is that of core complexes.
        let mut cores: Vec<CpuCore> = cores.into_values().collect();
        cores.sort_by_key(|core| (core.kind, core.socket, core.node));
        Some(Self { cores })
    }

    /// Every CPU a core of its own.
    fn one_core_per_cpu(cpus: impl IntoIterator<Item = usize>) -> Self {
        let core = |cpu| CpuCore { cpus: vec![cpu], socket: 0, node: 0, kind: CoreKind::Performance };
        Self { cores: cpus.into_iter().map(core).collect() }
    }

    pub fn cores(&self) -> &[CpuCore] {
        &self.cores
    }

    /// Logical CPUs.
    pub fn threads(&self) -> usize {
        self.cores.iter().map(|core| core.cpus.len()).sum()
    }

    /// Numbers of the NUMA nodes, rising.
    pub fn nodes(&self) -> Vec<usize> {
        distinct(self.cores.iter().map(|core| core.node))
    }

    pub fn sockets(&self) -> usize {
        distinct(self.cores.iter().map(|core| core.socket)).len()
    }

    pub fn count_cores(&self, kind: CoreKind) -> usize {
        self.cores.iter().filter(|core| core.kind == kind).count()
    }

    /// The affinity of each of `workers` workers: its core, or all of the NUMA node of its core. Fewer
    /// workers than cores spread over all sockets, on performance cores first.
    pub(crate) fn worker_affinities(&self, workers: usize, within: AffinityScope) -> Vec<WorkerAffinity> {
        let place = |worker| {
            let core = &self.cores[self.worker_core(worker, workers)];
            let cpus = match within {
                AffinityScope::Core => core.cpus.iter().copied().collect(),
                AffinityScope::Node => self.node_cpus(core.node),
            };
            WorkerAffinity { cpus, node: core.node }
        };
        (0..workers).map(place).collect()
    }

    /// The number of a worker's core.
    fn worker_core(&self, worker: usize, workers: usize) -> usize {
        let (all, fast) = (self.cores.len(), self.count_cores(CoreKind::Performance));
        if workers <= fast {
            worker * fast / workers
        } else if workers > all {
            worker * all / workers
        } else if worker < fast {
            worker
        } else {
            fast + (worker - fast) * (all - fast) / (workers - fast)
        }
    }

    fn node_cpus(&self, node: usize) -> CpuSet {
        self.cores
            .iter()
            .filter(|core| core.node == node)
            .flat_map(|core| core.cpus.iter().copied())
            .collect()
    }
}

/// The scope that a worker is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AffinityScope {
    Core,
    Node,
}

/// The topology in words, for example `64 cores (128 threads), 2 sockets, 2 NUMA nodes`.
impl fmt::Display for CpuTopology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        let (cores, slow) = (self.cores.len(), self.count_cores(CoreKind::Efficiency));
        match slow {
            0 => f.write_str(&plural(cores, "core"))?,
            _ => write!(f, "{} performance and {}", cores - slow, plural(slow, "efficiency core"))?,
        }
        if self.threads() != cores {
            write!(f, " ({})", plural(self.threads(), "thread"))?;
        }
        write!(f, ", {}, {}", plural(self.sockets(), "socket"), plural(self.nodes().len(), "NUMA node"))
    }
}

fn distinct(numbers: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut numbers: Vec<usize> = numbers.collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// The files of one machine.
struct SystemFiles<'a> {
    root: &'a Path,
}

impl SystemFiles<'_> {
    fn read_text(&self, path: &str) -> Option<String> {
        read_to_string(self.root.join(path)).ok()
    }

    fn read_number(&self, path: &str) -> Option<u64> {
        self.read_text(path)?.trim().parse().ok()
    }

    fn read_list(&self, path: &str) -> Option<Vec<usize>> {
        parse_list(&self.read_text(path)?)
    }

    /// CPUs that this process may use. The affinity mask has those of the cgroup's cpuset only.
    fn allowed_cpus(&self) -> Option<Vec<usize>> {
        let of_process = || {
            let status = self.read_text("proc/self/status")?;
            parse_list(status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?)
        };
        let cpus = of_process().or_else(|| self.read_list("sys/devices/system/cpu/online"))?;
        (!cpus.is_empty()).then_some(cpus)
    }

    fn cpu_file(cpu: usize, file: &str) -> String {
        format!("sys/devices/system/cpu/cpu{cpu}/{file}")
    }

    /// An offline CPU of the mask has no such folder.
    fn has_cpu(&self, cpu: usize) -> bool {
        self.root.join(Self::cpu_file(cpu, "topology")).is_dir()
    }

    /// The smallest CPU of its core, which names the core.
    fn first_sibling(&self, cpu: usize) -> usize {
        let list =
            |file| self.read_list(&Self::cpu_file(cpu, file)).filter(|siblings| siblings.contains(&cpu));
        let siblings = list("topology/core_cpus_list").or_else(|| list("topology/thread_siblings_list"));
        siblings.and_then(|siblings| siblings.first().copied()).unwrap_or(cpu)
    }

    /// -1 where firmware does not tell.
    fn socket(&self, cpu: usize) -> usize {
        self.read_number(&Self::cpu_file(cpu, "topology/physical_package_id")).unwrap_or(0) as usize
    }

    /// The node of every CPU that has one.
    fn nodes(&self) -> BTreeMap<usize, usize> {
        let nodes = self.read_list("sys/devices/system/node/online").unwrap_or_default();
        let cpus = |&node: &usize| {
            let cpus =
                self.read_list(&format!("sys/devices/system/node/node{node}/cpulist")).unwrap_or_default();
            cpus.into_iter().map(move |cpu| (cpu, node))
        };
        nodes.iter().flat_map(cpus).collect()
    }

    /// Intel's hybrid processors have a device for each kind; Arm's tell capacities; of others the clock has
    /// to do.
    fn core_kinds(&self, cpus: &[usize]) -> BTreeMap<usize, CoreKind> {
        let device = |name: &str| self.read_list(&format!("sys/devices/{name}/cpus"));
        if let (Some(_), Some(slow)) = (device("cpu_core"), device("cpu_atom")) {
            let kind = |cpu| if slow.contains(&cpu) { CoreKind::Efficiency } else { CoreKind::Performance };
            return cpus.iter().map(|&cpu| (cpu, kind(cpu))).collect();
        }
        let all = |file: &str| -> Option<Vec<u64>> {
            cpus.iter().map(|&cpu| self.read_number(&Self::cpu_file(cpu, file))).collect()
        };
        let Some(speeds) = all("cpu_capacity").or_else(|| all("cpufreq/cpuinfo_max_freq")) else {
            return BTreeMap::new();
        };
        let best = speeds.iter().copied().max().unwrap_or(0);
        let is_slow = |speed: u64| u128::from(speed) * 4 < u128::from(best) * u128::from(EFFICIENCY_QUARTERS);
        let kind = |speed| if is_slow(speed) { CoreKind::Efficiency } else { CoreKind::Performance };
        cpus.iter().zip(speeds).map(|(&cpu, speed)| (cpu, kind(speed))).collect()
    }
}

/// `0-3,8,10-11` as numbers, rising.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut out = Vec::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to): (usize, usize) = (from.trim().parse().ok()?, to.trim().parse().ok()?);
        if to < from || to >= MOST_CPUS {
            return None;
        }
        out.extend(from..=to);
    }
    Some(distinct(out.into_iter()))
}

#[cfg(test)]
mod tests;

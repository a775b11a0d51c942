use std::fs;

use super::*;

/// A machine in a folder.
struct FakeMachine(tempfile::TempDir);

impl FakeMachine {
    fn new(allowed: &str) -> FakeMachine {
        FakeMachine(tempfile::tempdir().unwrap()).allow(allowed)
    }

    fn allow(self, cpus: &str) -> FakeMachine {
        self.write(
            "proc/self/status",
            &format!("Name:\tmlcc\nCpus_allowed_list:\t{cpus}\nMems_allowed:\t1\n"),
        )
    }

    fn write(self, path: &str, text: &str) -> FakeMachine {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    fn cpu(self, cpu: usize, siblings: &str, socket: &str) -> FakeMachine {
        self.write(&SystemFiles::cpu_file(cpu, "topology/core_cpus_list"), siblings)
            .write(&SystemFiles::cpu_file(cpu, "topology/physical_package_id"), socket)
    }

    fn read(&self) -> CpuTopology {
        CpuTopology::read(self.0.path()).unwrap()
    }
}

/// 2 sockets of 32 cores with two threads each, numbered as Linux does: all first threads, then all second
/// ones.
fn server() -> FakeMachine {
    let mut fake = FakeMachine::new("0-127").write("sys/devices/system/node/online", "0-1\n");
    for (node, cpus) in ["0-31,64-95\n", "32-63,96-127\n"].into_iter().enumerate() {
        fake = fake.write(&format!("sys/devices/system/node/node{node}/cpulist"), cpus);
    }
    (0..128).fold(fake, |fake, cpu| {
        let core = cpu % 64;
        fake.cpu(cpu, &format!("{core},{}\n", core + 64), &format!("{}\n", core / 32))
    })
}

/// The sockets of `workers` workers.
fn sockets(topology: &CpuTopology, workers: usize) -> Vec<usize> {
    (0..workers).map(|w| topology.cores()[topology.worker_core(w, workers)].socket).collect()
}

#[test]
fn two_sockets() {
    let server = server();
    let topology = server.read();
    assert_eq!(topology.to_string(), "64 cores (128 threads), 2 sockets, 2 NUMA nodes");
    assert_eq!(
        topology.cores()[33],
        CpuCore { cpus: vec![33, 97], socket: 1, node: 1, kind: CoreKind::Performance }
    );
    // Half of the workers is on each socket, and they are neighbours.
    for workers in [2, 8, 64, 128] {
        let sockets = sockets(&topology, workers);
        assert!((0..workers).all(|w| sockets[w] == usize::from(w >= workers / 2)), "{workers}: {sockets:?}");
    }
    let places = topology.worker_affinities(64, AffinityScope::Core);
    assert_eq!(places[40], WorkerAffinity { cpus: [40, 104].into_iter().collect(), node: 1 });
    let places = topology.worker_affinities(4, AffinityScope::Node);
    assert!((0..128).all(|cpu| places[3].cpus.contains(cpu) == (cpu % 64 >= 32)));
    // More workers than cores share them evenly.
    let cores: Vec<usize> = (0..128).map(|w| topology.worker_core(w, 128)).collect();
    assert!((0..64).all(|core| cores.iter().filter(|&&c| c == core).count() == 2));
    // A cpuset takes cores away: of core 0 one thread, of the second socket all but three cores.
    let server = server.allow("64,1,65,32-34");
    let topology = server.read();
    assert_eq!(topology.to_string(), "5 cores (6 threads), 2 sockets, 2 NUMA nodes");
    assert_eq!(topology.cores()[0].cpus, [64]);
    let one = server.allow("96-127").read();
    assert_eq!(one.to_string(), "32 cores, 1 socket, 1 NUMA node");
    assert_eq!(one.nodes(), [1], "the number that the system gives it");
}

/// 6 performance cores with two threads each, then 8 efficiency cores.
fn laptop() -> FakeMachine {
    let fake = (0..12).fold(FakeMachine::new("0-19"), |fake, cpu| {
        let first = cpu / 2 * 2;
        fake.cpu(cpu, &format!("{first}-{}", first + 1), "0")
    });
    (12..20).fold(fake, |fake, cpu| fake.cpu(cpu, &cpu.to_string(), "0"))
}

#[test]
fn hybrid_laptops() {
    let intel = laptop()
        .write("sys/devices/cpu_core/cpus", "0-11\n")
        .write("sys/devices/cpu_atom/cpus", "12-19\n")
        .read();
    let clock = |cpu: usize| if cpu < 12 { 5_100_000 - 100_000 * (cpu as u64 % 3) } else { 3_700_000 };
    let amd = (0..20)
        .fold(laptop(), |fake, cpu| {
            fake.write(&SystemFiles::cpu_file(cpu, "cpufreq/cpuinfo_max_freq"), &format!("{}\n", clock(cpu)))
        })
        .read();
    // The other way round, as Arm numbers them, and with a third kind.
    let capacity = |cpu: usize| [290, 930, 1024][usize::from(cpu >= 4) + usize::from(cpu >= 7)];
    let arm = (0..8)
        .fold(FakeMachine::new("0-7"), |fake, cpu| {
            fake.cpu(cpu, &cpu.to_string(), "-1")
                .write(&SystemFiles::cpu_file(cpu, "cpu_capacity"), &capacity(cpu).to_string())
        })
        .read();
    for hybrid in [&intel, &amd] {
        assert_eq!(
            hybrid.to_string(),
            "6 performance and 8 efficiency cores (20 threads), 1 socket, 1 NUMA node"
        );
        let cores = |workers| (0..workers).map(|w| hybrid.worker_core(w, workers)).collect::<Vec<_>>();
        assert_eq!(cores(6), [0, 1, 2, 3, 4, 5], "performance cores first");
        assert_eq!(cores(3), [0, 2, 4]);
        assert_eq!(cores(8), [0, 1, 2, 3, 4, 5, 6, 10]);
        assert_eq!(cores(14), (0..14).collect::<Vec<_>>());
    }
    assert_eq!(arm.to_string(), "4 performance and 4 efficiency cores, 1 socket, 1 NUMA node");
    assert_eq!(arm.cores()[0].cpus, [4]);
}

#[test]
fn machines_that_tell_little() {
    let bare = FakeMachine::new("0-3,6").read();
    assert_eq!(bare.to_string(), "5 cores, 1 socket, 1 NUMA node");
    assert_eq!(bare.worker_affinities(2, AffinityScope::Core)[1].cpus, [2].into_iter().collect());
    // Without a mask those that are online; an offline CPU has no folder.
    let fake = FakeMachine(tempfile::tempdir().unwrap()).write("sys/devices/system/cpu/online", "0-1\n");
    let fake = fake.cpu(0, "0-1", "0").cpu(1, "0-1", "0");
    assert_eq!(fake.read().to_string(), "1 core (2 threads), 1 socket, 1 NUMA node");
    let partly = FakeMachine::new("0-3").cpu(0, "0", "0").cpu(2, "2", "0").read();
    assert_eq!(partly.cores().len(), 2);
    assert_eq!(CpuTopology::read(tempfile::tempdir().unwrap().path()), None);
}

#[test]
fn garbage_is_taken_for_a_plain_machine() {
    for garbage in
        ["", "\n", "x", "-", "7-2", "0-99999999999", "-1", "1,,x", "\u{0}\u{ff}", "18446744073709551616"]
    {
        let mut fake = FakeMachine::new("0-1").write("sys/devices/system/node/online", garbage);
        for cpu in 0..2 {
            fake = fake.cpu(cpu, garbage, garbage);
            for file in ["cpu_capacity", "cpufreq/cpuinfo_max_freq"] {
                fake = fake.write(&SystemFiles::cpu_file(cpu, file), garbage);
            }
        }
        let fake = fake.write("sys/devices/system/node/node0/cpulist", garbage);
        let fake =
            fake.write("sys/devices/cpu_core/cpus", garbage).write("sys/devices/cpu_atom/cpus", garbage);
        assert_eq!(fake.read().to_string(), "2 cores, 1 socket, 1 NUMA node", "{garbage:?}");
        let masked = FakeMachine::new(garbage);
        assert_eq!(CpuTopology::read(masked.0.path()).map(|t| t.to_string()), None, "{garbage:?}");
    }
    // Siblings of others, one node that names a CPU twice.
    let fake = FakeMachine::new("0-1")
        .cpu(0, "1", "0")
        .cpu(1, "1", "0")
        .write("sys/devices/system/node/online", "0-1");
    let fake = fake
        .write("sys/devices/system/node/node0/cpulist", "0-1")
        .write("sys/devices/system/node/node1/cpulist", "1");
    assert_eq!(fake.read().to_string(), "2 cores, 1 socket, 2 NUMA nodes");
}

#[test]
fn lists() {
    assert_eq!(parse_list("0-2,8\n"), Some(vec![0, 1, 2, 8]));
    assert_eq!(parse_list("8,0-2,1"), Some(vec![0, 1, 2, 8]));
    assert_eq!(parse_list("x"), None);
    assert_eq!(parse_list("5-1"), None);
}

#[test]
fn this_machine_has_at_least_one_core() {
    let cores = physical_cores();
    assert!(cores >= 1 && cores <= std::thread::available_parallelism().unwrap().get());
    let host = CpuTopology::detect_host();
    assert_eq!(host.worker_affinities(3, AffinityScope::Core).len(), 3);
}

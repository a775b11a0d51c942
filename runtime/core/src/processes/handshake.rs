//! The first messages of processes: whether they have the same model, and the machines that they are on.

use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use super::{LOADING, ProcessGroup};
use crate::table::ModelPlan;
use crate::{Artifact, Error, Result, features};

/// Bytes of it.
const BYTES: usize = 256;
const VERSION: usize = 24;
const NAME: usize = 96;

/// A program, a model, and a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HandshakeMessage {
    /// Versions of the program, and of its ABI.
    version: String,
    abi: u64,
    /// Hash of the code and of all sections of the artifact.
    artifact: u128,
    plan: u128,
    features: u64,
    /// Hashes of the CPUs that the process may use, and of the machine.
    cpus: u64,
    machine: u64,
    name: String,
}

/// The values that all agree on.
pub(crate) struct RankAgreement {
    /// Features that all CPUs have.
    pub features: u64,
    /// Processes that may use the same CPUs as this one, which is one of them.
    pub processes_on_cpus: usize,
    /// Processes on this machine, likewise, and those of them before this one.
    pub processes_on_machine: usize,
    pub local_rank: usize,
}

impl HandshakeMessage {
    pub fn new(artifact: &Artifact, plan: &ModelPlan) -> HandshakeMessage {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let host = read("/proc/sys/kernel/hostname").trim().to_owned();
        let status = read("/proc/self/status");
        let allowed = status.lines().find(|line| line.starts_with("Cpus_allowed:")).unwrap_or_default();
        let hash = |text: &str| xxhash_rust::xxh3::xxh3_128(text.as_bytes());
        HandshakeMessage {
            version: env!("CARGO_PKG_VERSION").into(),
            abi: mlcc_abi::ABI_VERSION.into(),
            artifact: artifact_identity(artifact),
            plan: hash(&format!("{plan:?}")),
            features: features::host(),
            cpus: hash(&format!("{host} {allowed}")) as u64,
            machine: hash(&host) as u64,
            name: format!("process {} on {host}", std::process::id()),
        }
    }

    fn to_bytes(&self) -> [u8; BYTES] {
        let mut bytes = Vec::with_capacity(BYTES);
        for (text, room) in [(&self.version, VERSION), (&self.name, NAME)] {
            let end = text.floor_char_boundary(room.min(text.len()));
            bytes.extend_from_slice(&text.as_bytes()[..end]);
            bytes.resize(bytes.len() + room - end, 0);
        }
        [self.artifact, self.plan].iter().for_each(|v| bytes.extend_from_slice(&v.to_le_bytes()));
        let numbers = [self.abi, self.features, self.cpus, self.machine];
        numbers.iter().for_each(|v| bytes.extend_from_slice(&v.to_le_bytes()));
        bytes.resize(BYTES, 0);
        bytes.try_into().unwrap_or([0; BYTES])
    }

    fn from_bytes(bytes: &[u8; BYTES]) -> HandshakeMessage {
        let text = |at: usize, room: usize| {
            String::from_utf8_lossy(&bytes[at..at + room]).trim_end_matches('\0').to_owned()
        };
        let numbers = VERSION + NAME;
        let mut wide =
            bytes[numbers..numbers + 32].as_chunks::<16>().0.iter().map(|b| u128::from_le_bytes(*b));
        let mut rest = bytes[numbers + 32..].as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b));
        let mut hash = || wide.next().unwrap_or(0);
        let mut number = || rest.next().unwrap_or(0);
        HandshakeMessage {
            version: text(0, VERSION),
            name: text(VERSION, NAME),
            artifact: hash(),
            plan: hash(),
            abi: number(),
            features: number(),
            cpus: number(),
            machine: number(),
        }
    }

    /// Tells it to the others. All have the same model, and go on with what all their CPUs have.
    pub fn exchange_handshakes(&self, processes: &ProcessGroup, path: &Path) -> Result<RankAgreement> {
        let all = processes.all_gather(&self.to_bytes(), LOADING);
        let all: Vec<HandshakeMessage> =
            all.as_chunks::<BYTES>().0.iter().map(HandshakeMessage::from_bytes).collect();
        processes.set_names(all.iter().map(|hello| hello.name.clone()).collect());
        match first_difference(&all) {
            None => Ok(RankAgreement {
                features: all.iter().fold(u64::MAX, |bits, hello| bits & hello.features),
                processes_on_cpus: all.iter().filter(|hello| hello.cpus == self.cpus).count().max(1),
                local_rank: all.iter().take(processes.rank()).filter(|h| h.machine == self.machine).count(),
                processes_on_machine: all.iter().filter(|hello| hello.machine == self.machine).count().max(1),
            }),
            Some((rank, [what, wanted])) => Err(Error::RanksDiffer {
                path: path.to_path_buf(),
                rank: processes.name(rank),
                first: processes.name(0),
                what,
                wanted,
            }),
        }
    }
}

/// The first rank that has something else than rank 0: what, and what rank 0 has.
fn first_difference(all: &[HandshakeMessage]) -> Option<(usize, [String; 2])> {
    let first = all.first()?;
    let number = |hash: u128| format!("{:016x}", hash as u64);
    all.iter().enumerate().find_map(|(rank, hello)| {
        let both = [hello, first];
        let what = [
            both.map(|hello| format!("version {} of mlcc", hello.version)),
            both.map(|hello| format!("version {} of the ABI", hello.abi)),
            both.map(|hello| format!("the artifact {}", number(hello.artifact))),
            both.map(|hello| format!("the memory plan {}", number(hello.plan))),
        ];
        let same = [
            hello.version == first.version,
            hello.abi == first.abi,
            hello.artifact == first.artifact,
            hello.plan == first.plan,
        ];
        let [what, wanted] = what.into_iter().zip(same).find(|(_, same)| !same)?.0;
        Some((rank, [what, wanted]))
    })
}

fn artifact_identity(artifact: &Artifact) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(&artifact.code_hash().to_le_bytes());
    for section in artifact.sections() {
        hash.update(section.name.as_bytes());
        hash.update(&artifact.hash(&section.name).unwrap_or(0).to_le_bytes());
    }
    hash.digest128()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> HandshakeMessage {
        HandshakeMessage {
            version: "1.2.3".into(),
            abi: 7,
            artifact: (1 << 100) + 9,
            plan: 3,
            features: 0b1011,
            cpus: 5,
            machine: 6,
            name: "process 4711 on a machine".into(),
        }
    }

    #[test]
    fn what_is_told_is_heard() {
        assert_eq!(HandshakeMessage::from_bytes(&hello().to_bytes()), hello());
        let long = HandshakeMessage { name: "ü".repeat(100), ..hello() };
        assert_eq!(
            HandshakeMessage::from_bytes(&long.to_bytes()),
            HandshakeMessage { name: "ü".repeat(NAME / 2), ..hello() }
        );
    }

    #[test]
    fn the_first_difference_is_named() {
        assert_eq!(
            first_difference(&[
                hello(),
                HandshakeMessage { features: 1, cpus: 2, name: "x".into(), ..hello() }
            ]),
            None
        );
        let other = HandshakeMessage { artifact: 2, ..hello() };
        let told = |rank, what: &str, wanted: &str| Some((rank, [what.to_owned(), wanted.to_owned()]));
        let named = told(2, "the artifact 0000000000000002", "the artifact 0000000000000009");
        assert_eq!(first_difference(&[hello(), hello(), other]), named);
        let old = HandshakeMessage { version: "1.2.2".into(), abi: 6, artifact: 9, ..hello() };
        assert_eq!(
            first_difference(&[hello(), old]),
            told(1, "version 1.2.2 of mlcc", "version 1.2.3 of mlcc")
        );
        let abi = HandshakeMessage { abi: 8, artifact: 4, ..hello() };
        assert_eq!(
            first_difference(&[hello(), abi]),
            told(1, "version 8 of the ABI", "version 7 of the ABI")
        );
        let plan = HandshakeMessage { plan: 4, ..hello() };
        let named = told(1, "the memory plan 0000000000000004", "the memory plan 0000000000000003");
        assert_eq!(first_difference(&[hello(), plan]), named);
    }
}

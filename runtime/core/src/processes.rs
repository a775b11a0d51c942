//! Ranks that are processes, of one machine or of several. A launcher has started the same program several
//! times, and a plug-in carries their data ([`mlcc_abi::processes`]).
//!
//! Rank 0 has sessions, sampler and server. It sends each step with its tables to the others
//! ([`RankLeader`]), and they follow ([`crate::Model::follow_leader`]). A rank that is lost ends all: without
//! its part of the weights no rank can go on.

mod handshake;
mod leader;
mod wire;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use mlcc_abi::processes::{PROCESSES_SYMBOL, PROCESSES_VERSION, ProcessTable, outcome};

use crate::ranks::{AllGatherBuffers, Communicator};
use crate::{Error, Result};

pub(crate) use handshake::{HandshakeMessage, RankAgreement};
pub(crate) use leader::{RankLeader, StepGuard};
pub(crate) use wire::{MessageReader, MessageWriter, RankMessageKind, step_number};

/// File of the plug-in that is looked for.
const PLUGIN: &str = "libmlcc_mpi.so";
/// Environment variable with the path of a plug-in.
const PLUGIN_VARIABLE: &str = "MLCC_MPI";
/// Environment variable with the seconds after which a rank that does not come counts as lost.
const LIMIT_VARIABLE: &str = "MLCC_RANK_TIMEOUT";
/// Seconds if it is not set. Rank 0 is heard of every second or two.
const LIMIT: u64 = 8;
/// While a model is loaded, which takes as long as its weights are large.
pub(crate) const LOADING: Duration = Duration::from_secs(600);
/// Variables in which launchers give the number of processes that they have started.
const LAUNCHERS: [&str; 2] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"];

/// The processes that this one was started together with. Cloning is cheap and gives the same ones.
#[derive(Clone)]
pub struct ProcessGroup(Arc<ProcessGroupInner>);

struct ProcessGroupInner {
    table: ProcessTable,
    rank: usize,
    ranks: usize,
    limit: Duration,
    /// Some model is split among them.
    claimed: AtomicBool,
    /// Names by rank, for people.
    names: OnceLock<Vec<String>>,
    /// After the table, whose functions are its.
    _library: Library,
}

impl ProcessGroup {
    /// The processes that `mpirun` has started; `None` where it has not, or has started this one alone. To be
    /// asked for once.
    pub fn from_launcher() -> Result<Option<ProcessGroup>> {
        let size = |name: &&str| std::env::var(name).ok()?.trim().parse::<u32>().ok();
        match LAUNCHERS.iter().find_map(size) {
            Some(count) if count > 1 => Self::open(count).map(Some),
            _ => Ok(None),
        }
    }

    fn open(count: u32) -> Result<ProcessGroup> {
        let fail = |what: String| Error::NoPlugin { count, what };
        let limit = match std::env::var(LIMIT_VARIABLE) {
            Ok(text) => text.trim().parse().ok().filter(|&seconds| seconds > 0).ok_or_else(|| {
                fail(format!("{LIMIT_VARIABLE} is `{text}`, which is not a number of seconds"))
            })?,
            Err(_) => LIMIT,
        };
        let path = plugin_path();
        // Open MPI's own plug-ins look for its symbols among those of the process.
        // SAFETY: a library that the user has put there for this.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) };
        let library = library.map_err(|e| {
            let why = std::error::Error::source(&e).map_or_else(|| e.to_string(), |why| why.to_string());
            fail(format!("it cannot be loaded ({why})"))
        })?;
        // SAFETY: the symbol is data of this type; its first fields are checked before the rest is read.
        let table = unsafe { library.get::<*const ProcessTable>(PROCESSES_SYMBOL.as_bytes()) };
        let table = *table.map_err(|_| fail(format!("{} has no `{PROCESSES_SYMBOL}`", path.display())))?;
        // SAFETY: every version begins with these two.
        let [version, size] = unsafe { *table.cast::<[u32; 2]>() };
        if version != PROCESSES_VERSION || size as usize != size_of::<ProcessTable>() {
            let what =
                format!("{} has version {version}, this program wants {PROCESSES_VERSION}", path.display());
            return Err(fail(what));
        }
        // SAFETY: a table of this version, which is constant.
        let table = unsafe { *table };
        let (mut rank, mut ranks) = (0, 0);
        // SAFETY: places for two numbers.
        if unsafe { (table.join)(&mut rank, &mut ranks) } != outcome::OK || rank >= ranks {
            return Err(fail("the processes cannot join each other".into()));
        }
        Ok(ProcessGroup(Arc::new(ProcessGroupInner {
            table,
            rank: rank as usize,
            ranks: ranks as usize,
            limit: Duration::from_secs(limit),
            claimed: AtomicBool::new(false),
            names: OnceLock::new(),
            _library: library,
        })))
    }

    /// The number of this one.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.0.ranks
    }

    /// The time that a rank may take while the others wait for it.
    pub(crate) fn limit(&self) -> Duration {
        self.0.limit
    }

    /// False if they have a model already.
    pub(crate) fn claim(&self) -> bool {
        !self.0.claimed.swap(true, Ordering::SeqCst)
    }

    pub(crate) fn set_names(&self, names: Vec<String>) {
        // Once, since they are taken once.
        let _ = self.0.names.set(names);
    }

    /// `rank 1 (process 4711 on host)`.
    pub(crate) fn name(&self, rank: usize) -> String {
        match self.0.names.get().and_then(|names| names.get(rank)) {
            Some(name) => format!("rank {rank} ({name})"),
            None => format!("rank {rank}"),
        }
    }

    /// Ends all processes: there is no going on without one of them.
    pub(crate) fn abort_all(&self, what: &str) -> ! {
        eprintln!("error: {what}. All ranks end (reported by {}).", self.name(self.rank()));
        // SAFETY: the last call.
        unsafe { (self.0.table.abort)(1) };
        std::process::exit(1)
    }

    fn check_outcome(&self, result: i32, late: u32, limit: Duration) {
        match result {
            outcome::OK => {}
            outcome::LATE => {
                let (name, seconds) = (self.name(late as usize), limit.as_secs());
                self.abort_all(&format!("{name} did not respond for {seconds} s ({LIMIT_VARIABLE})"))
            }
            _ => self.abort_all("the library that carries messages has failed"),
        }
    }

    /// Every rank gives as many bytes, and gets those of all.
    pub(crate) fn all_gather(&self, own: &[u8], limit: Duration) -> Vec<u8> {
        let mut all = vec![0; own.len() * self.ranks()];
        let part = AllGatherBuffers {
            from: own.as_ptr(),
            gathered: all.as_mut_ptr(),
            rows: 1,
            row_bytes: own.len(),
        };
        // SAFETY: buffers of these sizes; all ranks call this with as many bytes.
        unsafe { self.all_gather_within(part, limit) };
        all
    }

    /// # Safety
    /// As [`Communicator::all_gather_rows`].
    unsafe fn all_gather_within(&self, part: AllGatherBuffers, limit: Duration) {
        let AllGatherBuffers { from, gathered: all, rows, row_bytes } = part;
        let (mut late, milliseconds) = (0, limit.as_millis() as u64);
        // SAFETY: by contract.
        let result = unsafe {
            (self.0.table.exchange)(from, all, rows as u64, row_bytes as u64, milliseconds, &mut late)
        };
        self.check_outcome(result, late, limit);
    }

    /// Gives bytes to all others.
    fn broadcast(&self, bytes: &[u8]) {
        let (mut late, limit) = (0, self.0.limit);
        // SAFETY: bytes of this length.
        let result = unsafe {
            (self.0.table.tell)(bytes.as_ptr(), bytes.len() as u64, limit.as_millis() as u64, &mut late)
        };
        self.check_outcome(result, late, limit);
    }

    /// Bytes that `from` tells.
    fn receive(&self, from: usize, bytes: &mut [u8]) {
        let (mut late, limit) = (0, self.0.limit);
        let (to, len) = (bytes.as_mut_ptr(), bytes.len() as u64);
        // SAFETY: room for as many bytes.
        let result =
            unsafe { (self.0.table.hear)(from as u32, to, len, limit.as_millis() as u64, &mut late) };
        self.check_outcome(result, late, limit);
    }

    /// Waits until all have finished loading, each with this many pages of the KV cache, and rank 0 may
    /// begin. An error, `what`, where it has more pages.
    pub(crate) fn finish_loading(
        &self,
        pages: u64,
        what: &'static str,
        lead: Option<&RankLeader>,
    ) -> Result<()> {
        let all = self.all_gather(&pages.to_le_bytes(), LOADING);
        let wanted = all.as_chunks::<8>().0.first().map_or(0, |first| u64::from_le_bytes(*first));
        if wanted > pages {
            return Err(Error::OutOfMemory { what, bytes: wanted });
        }
        lead.map_or(Ok(()), RankLeader::start_heartbeats)
    }

    /// Hears what rank 0 says until it has no use for the others any more.
    pub(crate) fn receive_messages(&self, mut hear: impl FnMut(&[u8]) -> Result<RankMessageKind>) {
        let mut message = Vec::new();
        loop {
            self.receive_message(&mut message);
            match hear(&message) {
                Ok(RankMessageKind::End) => break,
                Ok(_) => {}
                // The others wait for this rank in vain.
                Err(error) => self.abort_all(&format!("{}: {error}", self.name(self.rank()))),
            }
        }
        self.leave();
    }

    /// The last call.
    pub(crate) fn leave(&self) {
        // SAFETY: nothing is under way.
        unsafe { (self.0.table.leave)() };
    }
}

impl Communicator for ProcessGroup {
    unsafe fn all_gather_rows(&self, _: usize, part: AllGatherBuffers) {
        // SAFETY: by contract.
        unsafe { self.all_gather_within(part, self.0.limit) }
    }
}

/// True if they are the same ones.
impl PartialEq for ProcessGroup {
    fn eq(&self, other: &ProcessGroup) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for ProcessGroup {}

impl std::fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Processes({} of {})", self.rank(), self.ranks())
    }
}

/// The plug-in that the user names, or the one in the program's folder, or the one that the system knows by
/// its name.
fn plugin_path() -> PathBuf {
    if let Some(path) = std::env::var_os(PLUGIN_VARIABLE).filter(|path| !path.is_empty()) {
        return path.into();
    }
    let program = std::env::current_exe().unwrap_or_default();
    let beside = program.parent().map(|folder| folder.join(PLUGIN));
    beside.filter(|path| path.exists()).unwrap_or_else(|| Path::new(PLUGIN).into())
}

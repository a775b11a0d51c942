//! The thread that writes states to files: no step waits for a disk, and a process that is killed has lost
//! little.
//!
//! A state comes as a copy in memory, one at a time. Copying costs less than a step, which reads the whole
//! state too.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::SystemTime;

use mlcc_files::replace_private_file;

use crate::serving::disk_cache::{DiskEntry, is_cache_file};

/// A state on its way to its files.
pub(super) struct WriteJob {
    pub entry: DiskEntry,
    /// The contents of its two files.
    pub prefix: Vec<u8>,
    pub state: Vec<u8>,
    /// States that are not needed in addition to it.
    pub replaces: Vec<DiskEntry>,
}

/// The outcome of a write job.
pub(super) struct WriteReport {
    pub entry: DiskEntry,
    pub written: Result<(), String>,
    /// Stems of states that had to go.
    pub evicted: Vec<PathBuf>,
}

pub(super) struct DiskWriter {
    jobs: Option<Sender<WriteJob>>,
    reports: Receiver<WriteReport>,
    /// True while a write job is under way.
    is_writing: bool,
    thread: Option<JoinHandle<()>>,
}

impl DiskWriter {
    /// `most_bytes` is the limit for all files in the folder of a write job.
    pub fn start(most_bytes: u64) -> std::io::Result<DiskWriter> {
        let (parcels, incoming) = channel::<WriteJob>();
        let (outgoing, reports) = channel();
        let work = move || {
            for parcel in incoming {
                if outgoing.send(write_prefix(parcel, most_bytes)).is_err() {
                    break;
                }
            }
        };
        let thread = std::thread::Builder::new().name("mlcc-states".into()).spawn(work)?;
        Ok(DiskWriter { jobs: Some(parcels), reports, is_writing: false, thread: Some(thread) })
    }

    pub fn is_free(&self) -> bool {
        !self.is_writing
    }

    /// Gives it to the thread, which must be free.
    pub fn submit(&mut self, parcel: WriteJob) {
        self.is_writing = self.jobs.as_ref().is_some_and(|parcels| parcels.send(parcel).is_ok());
    }

    /// The outcome of the last write job, if it is known; with `wait` it will be.
    pub fn take_report(&mut self, wait: bool) -> Option<WriteReport> {
        if !self.is_writing {
            return None;
        }
        let report = if wait { self.reports.recv().ok() } else { self.reports.try_recv().ok() };
        // A thread that has ended gives none.
        self.is_writing = report.is_none() && !wait;
        report
    }
}

impl Drop for DiskWriter {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It told its reasons.
            let _ = thread.join();
        }
    }
}

fn write_prefix(parcel: WriteJob, most_bytes: u64) -> WriteReport {
    let WriteJob { entry, prefix, state, replaces } = parcel;
    let file = |path: &Path, bytes: &[u8]| {
        replace_private_file(path, |out| out.write_all(bytes)).map_err(|error| error.to_string())
    };
    // It is found by the second one.
    let written = file(&entry.state_path(), &state).and_then(|()| file(&entry.prefix_path(), &prefix));
    let mut gone = Vec::new();
    if written.is_ok() {
        replaces.iter().for_each(DiskEntry::remove_files);
        gone.extend(replaces.into_iter().map(|entry| entry.stem));
        // Finer than the clock of some file systems.
        entry.update_mtime();
        gone.extend(evict_oldest(&entry, most_bytes));
    } else {
        entry.remove_files();
    }
    WriteReport { entry, written, evicted: gone }
}

/// Removes the oldest states beside an entry, of whatever model, until the others fit. Their stems.
fn evict_oldest(entry: &DiskEntry, most_bytes: u64) -> Vec<PathBuf> {
    let folder = entry.stem.parent().and_then(|folder| std::fs::read_dir(folder).ok());
    let Some(folder) = folder else { return Vec::new() };
    let mut states: Vec<(SystemTime, PathBuf, u64)> = Vec::new();
    for path in folder.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| is_cache_file(path)) {
        let Ok(about) = std::fs::metadata(&path) else { continue };
        let (time, stem) = (about.modified().unwrap_or(SystemTime::UNIX_EPOCH), path.with_extension(""));
        match states.iter_mut().find(|(_, known, _)| *known == stem) {
            Some((newest, _, bytes)) => (*newest, *bytes) = (time.max(*newest), *bytes + about.len()),
            None => states.push((time, stem, about.len())),
        }
    }
    states.sort();
    let (mut room, mut gone) = (most_bytes, Vec::new());
    for (_, stem, bytes) in states.into_iter().rev() {
        match room.checked_sub(bytes) {
            Some(left) => room = left,
            None => {
                // Older ones must not stay in its place.
                room = 0;
                DiskEntry { tokens: Vec::new(), logits: 0, stem: stem.clone() }.remove_files();
                gone.push(stem);
            }
        }
    }
    gone
}

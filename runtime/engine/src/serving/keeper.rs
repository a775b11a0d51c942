//! The thread that writes states to files: no step waits for a disk, and a process that is killed has lost little.
//!
//! A state comes as a copy in memory, one at a time. Copying costs less than a step, which reads the whole state too.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::SystemTime;

use mlcc_files::replace_private_file;

use crate::serving::files::{DiskEntry, is_ours};

/// A state on its way to its files.
pub(super) struct WriteJob {
    pub entry: DiskEntry,
    /// What is written to each of its files.
    pub prefix: Vec<u8>,
    pub state: Vec<u8>,
    /// States that are not needed beside it.
    pub replaces: Vec<DiskEntry>,
}

/// What became of it.
pub(super) struct WriteReport {
    pub entry: DiskEntry,
    pub written: Result<(), String>,
    /// Stems of states that had to go.
    pub gone: Vec<PathBuf>,
}

pub(super) struct DiskWriter {
    parcels: Option<Sender<WriteJob>>,
    reports: Receiver<WriteReport>,
    /// A parcel is on its way.
    busy: bool,
    thread: Option<JoinHandle<()>>,
}

impl DiskWriter {
    /// `most_bytes` of all files in the folder of a parcel.
    pub fn start(most_bytes: u64) -> std::io::Result<DiskWriter> {
        let (parcels, incoming) = channel::<WriteJob>();
        let (outgoing, reports) = channel();
        let work = move || {
            for parcel in incoming {
                if outgoing.send(write(parcel, most_bytes)).is_err() {
                    break;
                }
            }
        };
        let thread = std::thread::Builder::new().name("mlcc-states".into()).spawn(work)?;
        Ok(DiskWriter { parcels: Some(parcels), reports, busy: false, thread: Some(thread) })
    }

    pub fn is_free(&self) -> bool {
        !self.busy
    }

    /// Gives it to the thread, which must be free.
    pub fn give(&mut self, parcel: WriteJob) {
        self.busy = self.parcels.as_ref().is_some_and(|parcels| parcels.send(parcel).is_ok());
    }

    /// What became of the last parcel, if that is known; with `wait` it will be.
    pub fn report(&mut self, wait: bool) -> Option<WriteReport> {
        if !self.busy {
            return None;
        }
        let report = if wait { self.reports.recv().ok() } else { self.reports.try_recv().ok() };
        // A thread that is gone gives none.
        self.busy = report.is_none() && !wait;
        report
    }
}

impl Drop for DiskWriter {
    fn drop(&mut self) {
        self.parcels = None;
        if let Some(thread) = self.thread.take() {
            // It told its reasons.
            let _ = thread.join();
        }
    }
}

fn write(parcel: WriteJob, most_bytes: u64) -> WriteReport {
    let WriteJob { entry, prefix, state, replaces } = parcel;
    let file = |path: &Path, bytes: &[u8]| {
        replace_private_file(path, |out| out.write_all(bytes)).map_err(|error| error.to_string())
    };
    // It is found by the second one.
    let written = file(&entry.state(), &state).and_then(|()| file(&entry.prefix(), &prefix));
    let mut gone = Vec::new();
    if written.is_ok() {
        replaces.iter().for_each(DiskEntry::remove);
        gone.extend(replaces.into_iter().map(|entry| entry.stem));
        // Finer than the clock of some file systems.
        entry.touch();
        gone.extend(trim(&entry, most_bytes));
    } else {
        entry.remove();
    }
    WriteReport { entry, written, gone }
}

/// Removes the oldest states beside an entry, of whatever model, until the others fit. Their stems.
fn trim(entry: &DiskEntry, most_bytes: u64) -> Vec<PathBuf> {
    let folder = entry.stem.parent().and_then(|folder| std::fs::read_dir(folder).ok());
    let Some(folder) = folder else { return Vec::new() };
    let mut states: Vec<(SystemTime, PathBuf, u64)> = Vec::new();
    for path in folder.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| is_ours(path)) {
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
                DiskEntry { tokens: Vec::new(), logits: 0, stem: stem.clone() }.remove();
                gone.push(stem);
            }
        }
    }
    gone
}

//! States that outlive the process: a folder of files, each pair of which is the state behind some tokens.
//!
//! `mlcc-IDENTITY-KEY.prefix` has the tokens, with the logits behind them where the model could not compute
//! them again, and `mlcc-IDENTITY-KEY.state` the state itself, as the model writes it. The key is a hash of
//! the tokens, so that the pair of two files is right whenever their names are. A file that is broken, or of
//! another model, is ignored, and so is one that went away.
//!
//! ```text
//! 0   "mlccPREF"
//! 8   version u32 = 1, number of logits u32
//! 16  identity of the model u128
//! 32  number of tokens u64, 0 u64
//! 48  xxh3-128 of what follows, u128
//! 64  tokens i32, logits f32
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use mlcc_files::unfinished;
use mlcc_text::TokenId;
use xxhash_rust::xxh3::xxh3_128;

use crate::serving::disk_writer::{DiskWriter, WriteJob, WriteReport};
use crate::serving::model_runner::ModelLimits;
use crate::serving::radix_tree::RadixTree;

const MAGIC: [u8; 8] = *b"mlccPREF";
const VERSION: u32 = 1;
const HEADER: usize = 64;
/// More tokens than any context has.
const MOST_TOKENS: u64 = 1 << 24;
/// Tokens that are worth a file.
pub(super) const WORTH_A_FILE: usize = 32;

/// The place of states behind prompts and texts for the next engine: those that have not been used for a
/// while are written, and the others when the engine ends.
#[derive(Debug, Clone)]
pub struct DiskCacheOptions {
    pub folder: PathBuf,
    /// Most bytes of all files together, those of other models included; the oldest are removed first.
    pub max_bytes: u64,
    /// The time without use after which a state is written.
    pub idle_time: Duration,
    /// Takes a sentence about faults of files.
    pub warn: fn(&str),
}

impl DiskCacheOptions {
    /// Makes the folder, for its owner alone. An existing one without other files becomes so too; for another
    /// one, whose permissions are its owner's decision, `warn` gets a line about what others can see: not the
    /// files, but their names.
    pub fn create_folder(&self) -> std::io::Result<()> {
        let mut made = std::fs::DirBuilder::new();
        made.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut made, 0o700);
        made.create(&self.folder)?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = std::fs::metadata(&self.folder)?.permissions().mode();
            let only_ours =
                std::fs::read_dir(&self.folder)?.all(|entry| entry.is_ok_and(|e| is_cache_file(&e.path())));
            let private = || std::fs::set_permissions(&self.folder, std::fs::Permissions::from_mode(0o700));
            if mode & 0o077 != 0 && !(only_ours && private().is_ok()) {
                let folder = self.folder.display();
                (self.warn)(&format!(
                    "{folder}: others can list this folder, and see names of files, which are hashes of prompts"
                ));
            }
        }
        Ok(())
    }
}

/// A state in a file.
#[derive(Clone)]
pub(super) struct DiskEntry {
    pub tokens: Vec<TokenId>,
    /// The number of logits behind them.
    pub logits: usize,
    pub stem: PathBuf,
}

impl DiskEntry {
    pub fn prefix_path(&self) -> PathBuf {
        self.stem.with_extension("prefix")
    }

    pub fn state_path(&self) -> PathBuf {
        self.stem.with_extension("state")
    }

    /// Marks it as used now, so that others are older.
    pub fn update_mtime(&self) {
        for path in [self.prefix_path(), self.state_path()] {
            let file = std::fs::File::options().append(true).open(path);
            // One that stays old goes earlier.
            let _ = file.and_then(|file| file.set_modified(SystemTime::now()));
        }
    }

    pub fn remove_files(&self) {
        // First the one by which they are found. Another process may have done it.
        let _ = std::fs::remove_file(self.prefix_path());
        let _ = std::fs::remove_file(self.state_path());
    }
}

/// The states of one model in a folder.
pub(super) struct DiskCache {
    options: DiskCacheOptions,
    identity: u128,
    limits: ModelLimits,
    /// True if the model can drop tokens, so that the begin of a state is as good.
    truncates: bool,
    entries: BTreeMap<u64, DiskEntry>,
    /// The tree of their tokens.
    tree: RadixTree,
    next: u64,
    /// `None` if it could not be started.
    writer: Option<DiskWriter>,
}

/// A state before it is read.
pub(super) struct DiskPrefix {
    pub tokens: Vec<TokenId>,
    pub logits: Vec<f32>,
    pub state: PathBuf,
}

impl DiskCache {
    /// Looks for files. States are read when they are needed.
    pub fn open_folder(
        files: DiskCacheOptions,
        identity: u128,
        limits: ModelLimits,
        rewinds: bool,
    ) -> DiskCache {
        let keeper = DiskWriter::start(files.max_bytes);
        if let Err(error) = &keeper {
            (files.warn)(&format!("no thread to write states to files: {error}; none are written"));
        }
        let (entries, tree, keeper) = (BTreeMap::new(), RadixTree::default(), keeper.ok());
        let mut shelf = DiskCache {
            options: files,
            identity,
            limits,
            truncates: rewinds,
            entries,
            tree,
            next: 0,
            writer: keeper,
        };
        unfinished::remove_leftovers(&shelf.options.folder, |name| is_cache_file(Path::new(name)));
        let begin = format!("mlcc-{identity:032x}-");
        let mut found: Vec<PathBuf> = match std::fs::read_dir(&shelf.options.folder) {
            Ok(entries) => entries.filter_map(|entry| Some(entry.ok()?.path())).collect(),
            Err(error) => {
                shelf.warn_about(&shelf.options.folder, &error.to_string());
                Vec::new()
            }
        };
        found.sort();
        for path in found {
            if is_cache_file(&path) {
                make_private(&path);
            }
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            if name.starts_with(&begin) && name.ends_with(".prefix") {
                match shelf.read_prefix(&path) {
                    Ok((tokens, logits)) => {
                        let (logits, stem) = (logits.len(), path.with_extension(""));
                        shelf.add_entry(DiskEntry { tokens, logits, stem });
                    }
                    Err(why) => shelf.warn_about(&path, &why),
                }
            }
        }
        shelf
    }

    fn add_entry(&mut self, entry: DiskEntry) {
        self.tree.insert(&entry.tokens, self.next);
        self.entries.insert(self.next, entry);
        self.next += 1;
    }

    fn remove_entry(&mut self, index: u64) -> Option<DiskEntry> {
        let entry = self.entries.remove(&index)?;
        self.tree.remove(&entry.tokens, index);
        Some(entry)
    }

    fn warn_about(&self, path: &Path, why: &str) {
        (self.options.warn)(&format!("{}: {why}; it is not used", path.display()));
    }

    /// Tokens and logits of a file of this model.
    fn read_prefix(&self, path: &Path) -> Result<(Vec<TokenId>, Vec<f32>), String> {
        let there = std::fs::metadata(path).map_err(|error| error.to_string())?;
        let most = HEADER as u64 + 4 * (MOST_TOKENS + self.limits.vocab as u64);
        if !there.is_file() || there.len() > most {
            return Err("it is not a file of a prefix, or too large for one".into());
        }
        let file = std::fs::read(path).map_err(|error| error.to_string())?;
        let (Some(header), Some(body)) = (file.get(..HEADER), file.get(HEADER..)) else {
            return Err("it is truncated".into());
        };
        let (logits, tokens) = (read_number(&header[12..16]), read_number(&header[32..40]));
        if header[..8] != MAGIC || read_number(&header[8..12]) != u128::from(VERSION) {
            return Err("it was written by another version".into());
        }
        if read_number(&header[16..32]) != self.identity {
            return Err("it belongs to another model, or to another build of this one".into());
        }
        let whole = 4 * (logits + tokens) == body.len() as u128;
        let spare = read_number(&header[40..48]);
        if !whole || spare != 0 || read_number(&header[48..64]) != xxh3_128(body) {
            return Err("it is broken".into());
        }
        if tokens == 0 || logits != 0 && logits != self.limits.vocab as u128 {
            return Err("it has no tokens, or logits of another vocabulary".into());
        }
        let (tokens, logits) = body.split_at(4 * tokens as usize);
        let words =
            |bytes: &[u8]| bytes.chunks_exact(4).map(|word| read_number(word) as u32).collect::<Vec<_>>();
        let tokens: Vec<TokenId> = words(tokens).into_iter().map(u32::cast_signed).collect();
        let inside = |&id: &TokenId| usize::try_from(id).is_ok_and(|id| id < self.limits.vocab);
        let fits = self.limits.context.is_none_or(|context| tokens.len() <= context);
        if !fits || !tokens.iter().all(inside) {
            return Err("its tokens are not of this model's vocabulary, or more than its context".into());
        }
        Ok((tokens, words(logits).into_iter().map(f32::from_bits).collect()))
    }

    /// The state that has most of a prompt, by its number, and how much. `most` tokens may be there before; a
    /// model that does not rewind goes on from a whole state, and from that of the whole prompt with its
    /// logits.
    pub fn find_longest(&self, prompt: &[TokenId], most: usize) -> Option<(u64, usize)> {
        if self.truncates {
            let nearest = self.tree.nearest(prompt).next();
            return nearest
                .map(|(tokens, index)| (index, tokens.min(most)))
                .filter(|&(_, tokens)| tokens > 0);
        }
        let has_logits = |index: u64| self.entries.get(&index).is_some_and(|entry| entry.logits > 0);
        let usable = |&(tokens, index): &(usize, u64)| {
            tokens > 0 && (tokens <= most || has_logits(index) && tokens == prompt.len() && most > 0)
        };
        self.tree.prefixes_of(prompt).find(usable).map(|(tokens, index)| (index, tokens))
    }

    /// The prefix of a state; `None` with a warning if it is lost. From now on it is one that was just used.
    pub fn take_prefix(&mut self, index: u64) -> Option<DiskPrefix> {
        let entry = self.entries.get(&index)?;
        let read = self.read_prefix(&entry.prefix_path());
        match read {
            Ok((tokens, logits)) if tokens == entry.tokens => {
                entry.update_mtime();
                Some(DiskPrefix { tokens, logits, state: entry.state_path() })
            }
            Ok(_) => self.reject_entry(index, "another file has come in its place"),
            Err(why) => self.reject_entry(index, &why),
        }
    }

    /// Looks no more at a state.
    pub fn reject_entry<T>(&mut self, index: u64, why: &str) -> Option<T> {
        if let Some(entry) = self.remove_entry(index) {
            self.warn_about(&entry.state_path(), why);
        }
        None
    }

    /// The time without use after which a state is written.
    pub fn idle_time(&self) -> Duration {
        self.options.idle_time
    }

    /// True if a state can be written now.
    pub fn is_free(&self) -> bool {
        self.writer.as_ref().is_some_and(DiskWriter::is_free)
    }

    /// True if a state has no files. The begin of a longer one needs none where the model rewinds.
    pub fn needs_write(&self, tokens: &[TokenId]) -> bool {
        self.tree.find_exact(tokens).is_empty() && !(self.truncates && self.tree.has_extension(tokens))
    }

    /// The state of these tokens is used now, if it is there.
    pub fn touch_prefix(&self, tokens: &[TokenId]) {
        self.tree
            .find_exact(tokens)
            .iter()
            .filter_map(|index| self.entries.get(index))
            .for_each(DiskEntry::update_mtime);
    }

    /// Keeps a state, `state` being what its file will have: another thread writes it, which must be free.
    pub fn write_prefix(&mut self, tokens: &[TokenId], logits: &[f32], state: Vec<u8>) {
        let Some(keeper) = &mut self.writer else { return };
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let stem = format!("mlcc-{:032x}-{:032x}", self.identity, xxh3_128(&bytes));
        let stem = self.options.folder.join(stem);
        let begins = self.tree.prefixes_of(tokens).filter_map(|(_, index)| self.entries.get(&index));
        let replaces: Vec<DiskEntry> = begins.filter(|_| self.truncates).cloned().collect();
        let prefix = encode_prefix(self.identity, tokens.len(), bytes, logits);
        let entry = DiskEntry { tokens: tokens.to_vec(), logits: logits.len(), stem };
        keeper.submit(WriteJob { entry, prefix, state, replaces });
    }

    /// Takes note of what was written; with `wait` also of what is on its way.
    pub fn collect_report(&mut self, wait: bool) {
        let report = self.writer.as_mut().and_then(|keeper| keeper.take_report(wait));
        let Some(WriteReport { entry, written, evicted: gone }) = report else { return };
        match written {
            Ok(()) => self.add_entry(entry),
            Err(why) => {
                (self.options.warn)(&format!("{}: {why}; the state is not kept", entry.stem.display()));
            }
        }
        let gone = self.entries.iter().filter(|(_, entry)| gone.contains(&entry.stem));
        let gone: Vec<u64> = gone.map(|(&index, _)| index).collect();
        gone.into_iter().for_each(|index| drop(self.remove_entry(index)));
    }

    /// A state cannot be copied for its file.
    pub fn warn_not_saved(&self, why: &str) {
        (self.options.warn)(&format!("a state is not kept: {why}"));
    }
}

/// The content of a `.prefix` file, `body` being the tokens.
fn encode_prefix(identity: u128, tokens: usize, mut body: Vec<u8>, logits: &[f32]) -> Vec<u8> {
    body.extend(logits.iter().flat_map(|logit| logit.to_le_bytes()));
    let mut file = Vec::with_capacity(HEADER + body.len());
    file.extend_from_slice(&MAGIC);
    file.extend_from_slice(&VERSION.to_le_bytes());
    file.extend_from_slice(&(logits.len() as u32).to_le_bytes());
    file.extend_from_slice(&identity.to_le_bytes());
    file.extend_from_slice(&(tokens as u64).to_le_bytes());
    file.extend_from_slice(&0_u64.to_le_bytes());
    file.extend_from_slice(&xxh3_128(&body).to_le_bytes());
    file.extend_from_slice(&body);
    file
}

/// Restricts a file to its owner, since it tells of prompts, also if an earlier version has made it.
fn make_private(path: &Path) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let others = |about: &std::fs::Metadata| about.permissions().mode() & 0o077 != 0;
        if std::fs::symlink_metadata(path).is_ok_and(|about| about.is_file() && others(&about)) {
            // If it is another's, it is not ours to do.
            let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600));
        }
    }
    #[cfg(not(unix))]
    let _ = path;
}

/// True if a file has a name that this module gives.
pub(super) fn is_cache_file(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let Some((stem, "prefix" | "state")) = name.rsplit_once('.') else { return false };
    let parts: Vec<&str> = stem.split('-').collect();
    let hex = |part: &str| part.len() == 32 && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    matches!(parts[..], ["mlcc", identity, key] if hex(identity) && hex(key))
}

/// A little-endian number.
fn read_number(bytes: &[u8]) -> u128 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u128::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: u128 = 0xabc;

    fn limits() -> ModelLimits {
        ModelLimits {
            vocab: 10,
            context: Some(100),
            prompt: None,
            chunk: 8,
            step_tokens: 8,
            rolls_back_drafts: true,
            truncates: true,
            adapters: false,
            decoder_start: None,
        }
    }

    fn shelf(folder: &Path, most_bytes: u64, rewinds: bool) -> DiskCache {
        DiskCache::open_folder(files(folder, most_bytes), IDENTITY, limits(), rewinds)
    }

    fn files(folder: &Path, most_bytes: u64) -> DiskCacheOptions {
        DiskCacheOptions {
            folder: folder.to_path_buf(),
            max_bytes: most_bytes,
            idle_time: Duration::ZERO,
            warn: |_| {},
        }
    }

    fn add(shelf: &mut DiskCache, tokens: &[TokenId], logits: &[f32]) {
        if shelf.needs_write(tokens) {
            shelf.write_prefix(tokens, logits, vec![7; 50]);
            assert!(!shelf.is_free());
            shelf.collect_report(true);
            assert!(shelf.is_free());
        }
    }

    fn names(folder: &Path) -> usize {
        std::fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn what_was_kept_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let mut first = shelf(folder.path(), 1 << 20, false);
        add(&mut first, &[1, 2, 3], &[0.5; 10]);
        add(&mut first, &[1, 2, 3, 4], &[]);
        add(&mut first, &[1, 2, 3], &[0.5; 10]);
        let mut second = shelf(folder.path(), 1 << 20, false);
        let mut rewinding = shelf(folder.path(), 1 << 20, true);
        let found = |shelf: &DiskCache, prompt: &[TokenId], most| {
            shelf.find_longest(prompt, most).map(|(_, tokens)| tokens)
        };
        assert_eq!(found(&second, &[1, 2, 3, 9], 3), Some(3));
        assert_eq!(found(&second, &[1, 2, 3, 4, 9], 4), Some(4));
        assert_eq!(found(&second, &[1, 2, 3, 4], 2), None, "no logits behind all of it");
        assert_eq!(found(&second, &[1, 2, 3], 2), Some(3), "logits behind all of it");
        assert_eq!(found(&rewinding, &[1, 2, 9, 9], 3), Some(2));
        assert_eq!(found(&rewinding, &[9, 1], 1), None);
        let (index, _) = second.find_longest(&[1, 2, 3], 2).unwrap();
        let wanted = second.take_prefix(index).unwrap();
        assert_eq!((wanted.tokens, wanted.logits), (vec![1, 2, 3], vec![0.5; 10]));
        assert_eq!(std::fs::read(wanted.state).unwrap(), [7; 50]);
        // Where the model rewinds the longest is enough.
        add(&mut rewinding, &[1, 2, 3, 4, 5], &[]);
        add(&mut rewinding, &[1, 2], &[]);
        assert_eq!((rewinding.entries.len(), names(folder.path())), (1, 2));
    }

    #[test]
    #[cfg(unix)]
    fn files_are_their_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let left = folder.path().join(format!(".mlcc-{:032x}-{:032x}.state.4000000000.7.partial", 1, 2));
        std::fs::write(&left, "of a process that was killed").unwrap();
        add(&mut shelf(folder.path(), 1 << 20, false), &[1, 2, 3], &[0.5; 10]);
        assert!(!left.exists());
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let paths: Vec<PathBuf> =
            std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(paths.len() == 2 && paths.iter().all(|path| mode(path) == 0o600));
        // Files of earlier versions too.
        let other = std::fs::Permissions::from_mode(0o644);
        paths.iter().for_each(|path| std::fs::set_permissions(path, other.clone()).unwrap());
        shelf(folder.path(), 1 << 20, false);
        assert!(paths.iter().all(|path| mode(path) == 0o600));
    }

    #[test]
    #[cfg(unix)]
    fn a_folder_with_nothing_else_becomes_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let of = |name: &str| files(&folder.path().join(name), 1 << 20);
        let mode =
            |files: &DiskCacheOptions| std::fs::metadata(&files.folder).unwrap().permissions().mode() & 0o777;
        let made = |files: &DiskCacheOptions| {
            files.create_folder().unwrap();
            mode(files)
        };
        let everybody = |files: &DiskCacheOptions| {
            std::fs::set_permissions(&files.folder, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        let new = of("a/b");
        assert_eq!(made(&new), 0o700);
        everybody(&new);
        add(&mut shelf(&new.folder, 1 << 20, false), &[1, 2, 3], &[]);
        assert_eq!(made(&new), 0o700);
        everybody(&new);
        std::fs::write(new.folder.join("notes.txt"), "another's").unwrap();
        assert_eq!(made(&new), 0o755);
    }

    #[test]
    fn the_oldest_go_first() {
        let folder = tempfile::tempdir().unwrap();
        let each = (HEADER + 4 + 50) as u64;
        let mut shelf = shelf(folder.path(), 2 * each, true);
        std::fs::write(folder.path().join("notes.txt"), [0; 500]).unwrap();
        for token in 1..6 {
            add(&mut shelf, &[token], &[]);
        }
        assert_eq!(names(folder.path()), 5, "two states and what is not ours");
        let left: Vec<&[TokenId]> = shelf.entries.values().map(|entry| &entry.tokens[..]).collect();
        assert_eq!(left, [[4], [5]]);
    }

    #[test]
    fn broken_and_foreign_files_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        add(&mut shelf(folder.path(), 1 << 20, false), &[1, 2, 3], &[0.5; 10]);
        let path = |end: &str| {
            let all = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
            all.into_iter().find(|path| path.extension().is_some_and(|found| found == end)).unwrap()
        };
        let good = std::fs::read(path("prefix")).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 4;
            std::fs::write(path("prefix"), &bad).unwrap();
            assert!(shelf(folder.path(), 0, false).entries.is_empty(), "flipped byte {at}");
            std::fs::write(path("prefix"), &good[..at]).unwrap();
            assert!(shelf(folder.path(), 0, false).entries.is_empty(), "cut at {at}");
        }
        std::fs::write(path("prefix"), &good).unwrap();
        let files = files(folder.path(), 0);
        assert!(DiskCache::open_folder(files.clone(), IDENTITY + 1, limits(), false).entries.is_empty());
        let small = ModelLimits { vocab: 3, ..limits() };
        assert!(DiskCache::open_folder(files.clone(), IDENTITY, small, false).entries.is_empty());
        assert!(
            DiskCache::open_folder(files, IDENTITY, ModelLimits { context: Some(2), ..limits() }, false)
                .entries
                .is_empty()
        );
        // One that goes away while the server runs.
        let mut shelf = shelf(folder.path(), 0, false);
        std::fs::remove_file(path("prefix")).unwrap();
        assert!(shelf.take_prefix(0).is_none() && shelf.entries.is_empty());
        let mut gone = self::shelf(&folder.path().join("gone"), 0, false);
        add(&mut gone, &[1], &[]);
        assert!(gone.entries.is_empty());
    }
}

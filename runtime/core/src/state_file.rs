//! A saved state: 64 bytes of header, then the states in the order of the table, of caches the rows in use.
//!
//! ```text
//! 0   "mlccSTAT"
//! 8   version u32 = 2, header bytes u32 = 64
//! 16  identity of weights and states, u128
//! 32  past u64, bytes after the header u64
//! 48  xxh3-128 of the states and of `past`, u128
//! ```

use std::borrow::Cow;
use std::io::{Read, Write};
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use crate::table::{ArtifactTable, live_bytes};
use crate::{Error, Result};
use mlcc_files::replace_file;

const MAGIC: [u8; 8] = *b"mlccSTAT";
const VERSION: u32 = 2;
const HEADER: usize = 64;

/// The content of a valid file.
pub(crate) struct SavedState {
    pub past: u64,
    file: Vec<u8>,
}

impl SavedState {
    pub fn state(&self) -> &[u8] {
        &self.file[HEADER..]
    }
}

/// Replaces the file as a whole, so that an interrupted save leaves the old one.
pub(crate) fn save(path: &Path, identity: u128, past: u64, pieces: &[Cow<'_, [u8]>]) -> Result<()> {
    let header = header(identity, past, pieces);
    let fail = |source| Error::Io { action: "write the state file", path: path.to_path_buf(), source };
    if !may_replace(path).map_err(fail)? {
        return Err(Error::NoStateFile { path: path.to_path_buf() });
    }
    let written = replace_file(path, |file| {
        file.write_all(&header)?;
        pieces.iter().try_for_each(|piece| file.write_all(piece))
    });
    written.map_err(fail)
}

/// The whole file.
pub(crate) fn encode_file(identity: u128, past: u64, pieces: &[Cow<'_, [u8]>]) -> Vec<u8> {
    let header = header(identity, past, pieces);
    let mut file = Vec::with_capacity(HEADER + pieces.iter().map(|piece| piece.len()).sum::<usize>());
    file.extend_from_slice(&header);
    pieces.iter().for_each(|piece| file.extend_from_slice(piece));
    file
}

fn header(identity: u128, past: u64, pieces: &[Cow<'_, [u8]>]) -> Vec<u8> {
    let bytes: u64 = pieces.iter().map(|p| p.len() as u64).sum();
    let mut header = Vec::with_capacity(HEADER);
    header.extend_from_slice(&MAGIC);
    header.extend_from_slice(&VERSION.to_le_bytes());
    header.extend_from_slice(&(HEADER as u32).to_le_bytes());
    header.extend_from_slice(&identity.to_le_bytes());
    header.extend_from_slice(&past.to_le_bytes());
    header.extend_from_slice(&bytes.to_le_bytes());
    header.extend_from_slice(&digest(past, pieces.iter().map(AsRef::as_ref)).to_le_bytes());
    header
}

/// True if there is nothing, or a state file (of any version), which a new one may replace. Anything else is
/// the user's.
fn may_replace(path: &Path) -> std::io::Result<bool> {
    // Of what is no file `replace_file` says so; a pipe would not even open.
    if !std::fs::metadata(path).is_ok_and(|there| there.is_file()) {
        return Ok(true);
    }
    let mut begin = Vec::new();
    std::fs::File::open(path)?.take(MAGIC.len() as u64).read_to_end(&mut begin)?;
    Ok(begin.is_empty() || begin == MAGIC)
}

/// Reads and validates a file for a model of this identity and table.
pub(crate) fn load(path: &Path, identity: u128, table: &ArtifactTable) -> Result<SavedState> {
    let refuse = |what: &str| Err(Error::StateFile { path: path.to_path_buf(), what: what.into() });
    let io = |source| Error::Io { action: "read the state file", path: path.to_path_buf(), source };
    let expected = |past| live_bytes(&table.states, past).saturating_add(HEADER as u64);
    // The size is looked at first: a huge wrong file is not read.
    let there = std::fs::metadata(path).map_err(io)?;
    if !there.is_file() {
        return refuse("it is not a regular file");
    }
    let size = there.len();
    if size > expected(u64::MAX) && size > 1 << 20 {
        return refuse("it is larger than this model's state: it belongs to another model");
    }
    let file = std::fs::read(path).map_err(io)?;
    let (Some(magic), Some(version)) = (file.get(..8), u32_at(&file, 8)) else {
        return refuse("it is truncated");
    };
    if magic != MAGIC {
        return refuse("it was not written by save_state");
    }
    if version != VERSION || u32_at(&file, 12) != Some(HEADER as u32) {
        return refuse("it was written by another version of the runtime; start from the prompt again");
    }
    let (Some(found), Some(past)) = (u128_at(&file, 16), u64_at(&file, 32)) else {
        return refuse("it is truncated");
    };
    if found != identity {
        return refuse(
            "it belongs to another model, to another build of this one with other weights, or to another adapter",
        );
    }
    // Before the size, which is bounded by the context: so a file from a larger context gets the better
    // message.
    let context = table.plan.context;
    if context != 0 && past > context {
        return refuse("it has more tokens than this model's context; build with a larger -c/--ctx-size");
    }
    if u64_at(&file, 40).and_then(|b| b.checked_add(HEADER as u64)) != Some(expected(past))
        || file.len() as u64 != expected(past)
    {
        return refuse("it is truncated");
    }
    let saved = SavedState { past, file };
    if u128_at(&saved.file, 48) != Some(digest(past, [saved.state()])) {
        return refuse("its hash does not match: it is corrupt");
    }
    Ok(saved)
}

fn digest<'a>(past: u64, pieces: impl IntoIterator<Item = &'a [u8]>) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(&past.to_le_bytes());
    pieces.into_iter().for_each(|piece| hash.update(piece));
    hash.digest128()
}

fn u32_at(file: &[u8], at: usize) -> Option<u32> {
    file.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

fn u64_at(file: &[u8], at: usize) -> Option<u64> {
    file.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
}

fn u128_at(file: &[u8], at: usize) -> Option<u128> {
    file.get(at..at + 16)?.try_into().ok().map(u128::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::table::{CacheShape, ModelPlan, StateInfo};

    fn table(context: u64) -> ArtifactTable {
        let piece = |name: &str, offset, bytes, cache| StateInfo {
            name: name.into(),
            offset,
            bytes,
            fill: None,
            format: "f32".into(),
            cache,
            dropped_beyond: None,
            is_length: false,
            is_slot: false,
            is_source: false,
        };
        let cache = CacheShape { rows: context.max(16), row_bytes: 3 };
        let states = vec![piece("h", 0, 8, None), piece("k", 64, cache.rows * 3, Some(cache))];
        let plan = ModelPlan {
            weights_bytes: 0,
            arena_bytes: 0,
            state_bytes: 64 + cache.rows * 3,
            alignment: 64,
            chunk: 1,
            context,
            batch: 1,
            vocab: 1,
            text_width: 0,
            ranks: 1,
            max_workers: 0,
            page_bytes: 0,
            adapter_slots: 0,
            adapter_rank: 0,
            adapter_bytes: 0,
            decoder_start: 0,
        };
        ArtifactTable {
            target: String::new(),
            compiler: String::new(),
            metadata: String::new(),
            variants: vec![],
            params: vec![],
            states,
            images: vec![],
            device_entries: vec![],
            plan,
            whole_prompts: false,
        }
    }

    fn pieces() -> [Cow<'static, [u8]>; 2] {
        [Cow::Borrowed(&b"12345678"[..]), Cow::Borrowed(&b"aaabbbcccdddeeefffggghhhiii"[..])]
    }

    #[test]
    fn round_trip_and_damage() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.state");
        save(&path, 5, 9, &pieces()).unwrap();
        let saved = load(&path, 5, &table(20)).unwrap();
        assert_eq!((saved.past, saved.state()), (9, &b"12345678aaabbbcccdddeeefffggghhhiii"[..]));
        let good = std::fs::read(&path).unwrap();
        assert_eq!(good, encode_file(5, 9, &pieces()));
        assert_eq!(good.len(), 64 + 8 + 27, "only rows in use");
        for i in 0..good.len() {
            let mut bad = good.clone();
            bad[i] ^= 4;
            std::fs::write(&path, &bad).unwrap();
            assert!(matches!(load(&path, 5, &table(20)), Err(Error::StateFile { .. })), "flipped byte {i}");
            std::fs::write(&path, &good[..i]).unwrap();
            assert!(matches!(load(&path, 5, &table(20)), Err(Error::StateFile { .. })), "cut at {i}");
        }
        std::fs::write(&path, &good).unwrap();
        assert!(load(&path, 5, &table(9)).is_ok(), "another context in which it fits");
        assert!(load(&path, 6, &table(20)).is_err_and(|e| e.to_string().contains("another model")));
        assert!(load(&path, 5, &table(8)).is_err_and(|e| e.to_string().contains("--ctx-size")));
        assert!(matches!(load(&folder.path().join("none"), 5, &table(20)), Err(Error::Io { .. })));
        assert!(matches!(save(&folder.path().join("a/b"), 5, 9, &[]), Err(Error::Io { .. })));
    }
}

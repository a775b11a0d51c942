//! A saved state: 64 bytes of header, then the state block.
//!
//! ```text
//! 0   "mlccSTAT"
//! 8   version u32 = 1, header bytes u32 = 64
//! 16  identity of weights and state layout, u128
//! 32  past u64, state bytes u64
//! 48  xxh3-128 of the state and of `past`, u128
//! ```

use std::fs::File;
use std::io::Write;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use crate::{Error, Result};

const MAGIC: [u8; 8] = *b"mlccSTAT";
const VERSION: u32 = 1;
const HEADER: usize = 64;

/// What a valid file holds.
pub(crate) struct Saved {
    pub past: u64,
    file: Vec<u8>,
}

impl Saved {
    pub fn state(&self) -> &[u8] {
        &self.file[HEADER..]
    }
}

/// Writes the file beside its final name and renames it, so that an interrupted save leaves the old one.
pub(crate) fn save(path: &Path, identity: u128, past: u64, state: &[u8]) -> Result<()> {
    let mut header = Vec::with_capacity(HEADER);
    header.extend_from_slice(&MAGIC);
    header.extend_from_slice(&VERSION.to_le_bytes());
    header.extend_from_slice(&(HEADER as u32).to_le_bytes());
    header.extend_from_slice(&identity.to_le_bytes());
    header.extend_from_slice(&past.to_le_bytes());
    header.extend_from_slice(&(state.len() as u64).to_le_bytes());
    header.extend_from_slice(&digest(past, state).to_le_bytes());
    let fail = |source| Error::Io { action: "write the state file", path: path.to_path_buf(), source };
    let name = path.file_name().ok_or_else(|| fail(std::io::ErrorKind::InvalidInput.into()))?;
    let temporary =
        path.with_file_name(format!(".{}.{}.partial", name.to_string_lossy(), std::process::id()));
    let written = File::create(&temporary)
        .and_then(|mut file| file.write_all(&header).and_then(|()| file.write_all(state)))
        .and_then(|()| std::fs::rename(&temporary, path));
    written.map_err(|e| {
        let _ = std::fs::remove_file(&temporary);
        fail(e)
    })
}

/// Reads and validates a file for a model of this identity.
pub(crate) fn load(path: &Path, identity: u128, state_bytes: u64, context: u64) -> Result<Saved> {
    let refuse = |what: &str| Err(Error::StateFile { path: path.to_path_buf(), what: what.into() });
    let io = |source| Error::Io { action: "read the state file", path: path.to_path_buf(), source };
    let expected = state_bytes.saturating_add(HEADER as u64);
    // The size is looked at first: a huge wrong file is not read.
    let size = std::fs::metadata(path).map_err(io)?.len();
    if size > expected && size > 1 << 20 {
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
        return refuse("it belongs to another model, or to another build of this one with other weights");
    }
    if u64_at(&file, 40) != Some(state_bytes) || file.len() as u64 != expected {
        return refuse("it is truncated");
    }
    let saved = Saved { past, file };
    if u128_at(&saved.file, 48) != Some(digest(past, saved.state())) {
        return refuse("its hash does not match: it is corrupt");
    }
    if context != 0 && past > context {
        return refuse("it has more tokens than this model's context");
    }
    Ok(saved)
}

fn digest(past: u64, state: &[u8]) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(&past.to_le_bytes());
    hash.update(state);
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

    #[test]
    fn round_trip_and_damage() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.state");
        save(&path, 5, 9, b"12345678").unwrap();
        let saved = load(&path, 5, 8, 0).unwrap();
        assert_eq!((saved.past, saved.state()), (9, &b"12345678"[..]));
        let good = std::fs::read(&path).unwrap();
        for i in 0..good.len() {
            let mut bad = good.clone();
            bad[i] ^= 4;
            std::fs::write(&path, &bad).unwrap();
            assert!(matches!(load(&path, 5, 8, 0), Err(Error::StateFile { .. })), "flipped byte {i}");
            std::fs::write(&path, &good[..i]).unwrap();
            assert!(matches!(load(&path, 5, 8, 0), Err(Error::StateFile { .. })), "cut at {i}");
        }
        std::fs::write(&path, &good).unwrap();
        assert!(load(&path, 6, 8, 0).is_err_and(|e| e.to_string().contains("another model")));
        assert!(load(&path, 5, 8, 4).is_err_and(|e| e.to_string().contains("context")));
        assert!(matches!(load(&folder.path().join("none"), 5, 8, 0), Err(Error::Io { .. })));
        assert!(matches!(save(&folder.path().join("a/b"), 5, 9, b""), Err(Error::Io { .. })));
    }
}

//! The folder of the objects of tests' builds, for those that need the same kernels.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use mlcc_codegen::cache::ObjectCache;
use xxhash_rust::xxh3::Xxh3;

/// Names a folder whose objects stay for later runs. Without it a run begins with none.
const VARIABLE: &str = "MLCC_TEST_OBJECTS";
/// The prefix of the names of folders in there.
const PREFIX: &str = "objects-";

pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| match std::env::var_os(VARIABLE).filter(|place| !place.is_empty()) {
        Some(place) => kept(&std::path::absolute(place).unwrap()),
        None => {
            let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("objects");
            // Removes those of earlier runs. Another run at the same time makes the objects anew that it
            // loses here.
            let _ = std::fs::remove_dir_all(&folder);
            folder
        }
    })
}

pub fn cache() -> ObjectCache {
    ObjectCache::new(folder(), ObjectCache::LIMIT)
}

/// The key of an object is all that it is made from, but not how: objects of another back end are not taken,
/// and go.
fn kept(place: &Path) -> PathBuf {
    let name = format!("{PREFIX}{:032x}", back_end().unwrap());
    for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
        let other = entry.file_name();
        if other.to_string_lossy().starts_with(PREFIX) && *other != *name {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    place.join(name)
}

/// Hash of the sources of code generation, and of the versions of all that they use.
fn back_end() -> io::Result<u128> {
    // Crates at different depths have this file.
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let workspace = above.find(|folder| folder.join("Cargo.lock").is_file()).unwrap();
    let mut files = vec![workspace.join("Cargo.lock"), workspace.join("compiler/codegen/Cargo.toml")];
    let mut folders = vec![workspace.join("compiler/codegen/src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    let mut hash = Xxh3::new();
    for file in files {
        let text = std::fs::read(file)?;
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(&text);
    }
    Ok(hash.digest128())
}

//! Hashes of files as they come from the hub.

use ring::digest::{Context, SHA256};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

const PIECE: usize = 1 << 20;

/// SHA-256 of a file in hexadecimal digits.
pub(super) fn file_sha256(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let (mut context, mut buffer) = (Context::new(&SHA256), vec![0; PIECE]);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => context.update(&buffer[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_abc() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("abc");
        std::fs::write(&path, b"abc").unwrap();
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(file_sha256(&path).unwrap(), expected);
    }
}

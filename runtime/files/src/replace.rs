//! Files that are replaced as a whole.

use std::fs::File;
use std::io::{BufWriter, Result, Write};
use std::path::Path;

use crate::unfinished::{self, FileAccess};

/// Writes a file beside `path` and gives it that name once it is on the disk: whatever happens meanwhile,
/// `path` is the old file or the new one. On an error nothing stays.
pub fn replace_file(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    replace(path, FileAccess::Usual, write)
}

/// The same with a file that only its owner may read and write.
pub fn replace_private_file(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<()>,
) -> Result<()> {
    replace(path, FileAccess::Owner, write)
}

fn replace(
    path: &Path,
    access: FileAccess,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<()>,
) -> Result<()> {
    let unfinished::TemporaryFile { file, temporary, registration: _registration } =
        unfinished::create_beside_for(path, access)?;
    let whole = || {
        let mut file = BufWriter::new(file);
        write(&mut file)?;
        file.flush()?;
        file.get_ref().sync_all()?;
        std::fs::rename(&temporary, path)
    };
    whole().inspect_err(|_| drop(std::fs::remove_file(&temporary)))
}

/// Writes a whole file by [`replace_file`]; what is there and is no regular file (a device, a pipe) is
/// written to as it is.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(there) if !there.is_file() => std::fs::write(path, bytes),
        _ => replace_file(path, |file| file.write_all(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    #[test]
    fn an_error_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        replace_file(&path, |file| file.write_all(b"old")).unwrap();
        let broken = |file: &mut BufWriter<File>| {
            file.write_all(b"ne")?;
            Err(ErrorKind::StorageFull.into())
        };
        assert_eq!(replace_file(&path, broken).unwrap_err().kind(), ErrorKind::StorageFull);
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        // Two at once.
        replace_file(&path, |outer| {
            replace_file(&path, |inner| inner.write_all(b"inner"))?;
            outer.write_all(b"outer")
        })
        .unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"outer");
        assert!(replace_file(Path::new("/"), |_| Ok(())).is_err());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            replace_private_file(&path, |file| file.write_all(b"mine")).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
        assert!(replace_file(folder.path(), |_| Ok(())).unwrap_err().to_string().contains("folder"));
    }
}

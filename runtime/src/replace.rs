//! Files that are replaced as a whole.

use std::fs::File;
use std::io::{BufWriter, Error, ErrorKind, Result, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// Writes a file beside `path` and gives it that name once it is on the disk: whatever happens meanwhile, `path` is the old file or the
/// new one. On an error nothing stays.
pub fn replace_file(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let refuse = |what| Error::new(ErrorKind::InvalidInput, what);
    let name = path.file_name().ok_or_else(|| refuse("it is no name of a file"))?;
    // A file takes the place of what is there, which would be the end of a device.
    if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(refuse("it is there and is no regular file"));
    }
    // Process and number keep two savers of one file apart.
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let temporary =
        path.with_file_name(format!(".{}.{}.{number}.partial", name.to_string_lossy(), std::process::id()));
    let whole = || {
        let mut file = BufWriter::new(File::create(&temporary)?);
        write(&mut file)?;
        file.flush()?;
        file.get_ref().sync_all()?;
        std::fs::rename(&temporary, path)
    };
    whole().inspect_err(|_| drop(std::fs::remove_file(&temporary)))
}

#[cfg(test)]
mod tests {
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
        assert!(replace_file(folder.path(), |_| Ok(())).unwrap_err().to_string().contains("no regular file"));
    }
}

//! Reading of whole files into memory, with a limit for each kind. A wrong name (a device, a file of weights)
//! is an error and not the end of the machine's memory.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// The purpose of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    Prompt,
    /// A text that models are measured on.
    EvalText,
    ChatTemplate,
    /// A grammar or a JSON schema.
    Grammar,
    QuantPolicy,
    /// Measured values of a level, for `--tuning`.
    Tuning,
    /// A module in text form.
    Module,
    /// Reference results of a model.
    Golden,
    /// Outputs of layers.
    Layers,
    Tokenizer,
    /// JSON beside a model's weights.
    Config,
    Conversation,
    /// A branch's name in a cache of checkpoints.
    Branch,
}

struct SizeLimit {
    what: &'static str,
    max_bytes: u64,
    /// Users name these, so that they may be pipes. A pipe among the files of a model would be waited for
    /// without end.
    pipes: bool,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

impl FileKind {
    /// The limits: several times what the largest known file of the kind has.
    const fn size_limit(self) -> SizeLimit {
        let (what, most, pipes) = match self {
            FileKind::Prompt => ("a prompt", 64 * MIB, true),
            FileKind::EvalText => ("a text to measure on", 256 * MIB, true),
            FileKind::ChatTemplate => ("a chat template", 16 * MIB, true),
            FileKind::Grammar => ("a grammar", 16 * MIB, true),
            FileKind::QuantPolicy => ("a quantization policy", 16 * MIB, true),
            FileKind::Tuning => ("a tuning", 16 * MIB, true),
            FileKind::Module => ("a module in text form", 256 * MIB, true),
            FileKind::Golden => ("a file of reference results", 512 * MIB, true),
            FileKind::Layers => ("a file of layers' outputs", 16 * GIB, false),
            FileKind::Tokenizer => ("a tokenizer", 256 * MIB, false),
            FileKind::Config => ("a JSON or template file of a model", 64 * MIB, false),
            FileKind::Conversation => ("a conversation", 256 * MIB, false),
            FileKind::Branch => ("a branch of a cache", 4 * KIB, false),
        };
        SizeLimit { what, max_bytes: most, pipes }
    }

    /// Most bytes of a file of this kind.
    pub const fn max_bytes(self) -> u64 {
        self.size_limit().max_bytes
    }
}

/// The bytes of a file; the error does not name it. Larger files than the kind may have, directories, and
/// (where the kind is one of files that a program finds by itself) everything that is no regular file are
/// errors. A pipe that a user named is waited for, a device is read up to the limit.
pub fn read(path: &Path, kind: FileKind) -> Result<Vec<u8>> {
    let there = std::fs::metadata(path)?;
    if there.is_dir() {
        return Err(ErrorKind::IsADirectory.into());
    }
    if !there.is_file() && !kind.size_limit().pipes {
        return Err(Error::new(ErrorKind::InvalidInput, "it is not a regular file"));
    }
    if there.is_file() && there.len() > kind.max_bytes() {
        return Err(too_large(kind));
    }
    read_from(File::open(path)?, kind)
}

/// Reads text like [`read`]; bytes that are no UTF-8 are an error.
pub fn read_to_string(path: &Path, kind: FileKind) -> Result<String> {
    let what = |_| Error::new(ErrorKind::InvalidData, "it is no UTF-8 text");
    String::from_utf8(read(path, kind)?).map_err(what)
}

/// Reads from a reader until its end, up to the limit.
pub fn read_from(reader: impl Read, kind: FileKind) -> Result<Vec<u8>> {
    read_up_to(reader, kind.max_bytes()).and_then(|found| found.ok_or_else(|| too_large(kind)))
}

/// `None` if there is more.
fn read_up_to(reader: impl Read, most: u64) -> Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    reader.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok(Some(bytes).filter(|bytes| bytes.len() as u64 <= most))
}

fn too_large(kind: FileKind) -> Error {
    let SizeLimit { what, max_bytes: most, .. } = kind.size_limit();
    let most = match most {
        GIB.. => format!("{} GiB", most / GIB),
        MIB.. => format!("{} MiB", most / MIB),
        _ => format!("{most} bytes"),
    };
    let text = format!("it has more than {most}, the maximum for {what}; is it the right file?");
    Error::new(ErrorKind::FileTooLarge, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_large_is_not_read() {
        assert_eq!(read_up_to(&b"abc"[..], 3).unwrap(), Some(b"abc".to_vec()));
        assert_eq!(read_up_to(&b"abcd"[..], 3).unwrap(), None);
        assert_eq!(read_up_to(std::io::repeat(0), 1 << 16).unwrap(), None);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("main");
        let long = vec![b'a'; FileKind::Branch.max_bytes() as usize];
        std::fs::write(&path, &long).unwrap();
        assert_eq!(read(&path, FileKind::Branch).unwrap(), long);
        // A file with a hole takes no room, whatever its size is.
        File::create(&path).unwrap().set_len(FileKind::Config.max_bytes() + 1).unwrap();
        let error = read(&path, FileKind::Config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
        assert!(error.to_string().contains("more than 64 MiB"), "{error}");
        assert!(read(&path, FileKind::Branch).unwrap_err().to_string().contains("4096 bytes"));
        assert_eq!(read(folder.path(), FileKind::Prompt).unwrap_err().kind(), ErrorKind::IsADirectory);
    }

    #[test]
    fn text_is_utf8() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policy.toml");
        std::fs::write(&path, b"caf\xe9").unwrap();
        assert_eq!(read_to_string(&path, FileKind::QuantPolicy).unwrap_err().kind(), ErrorKind::InvalidData);
    }

    #[test]
    #[cfg(unix)]
    fn devices_are_read_up_to_the_limit_where_users_name_them() {
        let (zero, null) = (Path::new("/dev/zero"), Path::new("/dev/null"));
        assert_eq!(read(zero, FileKind::ChatTemplate).unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert_eq!(read(null, FileKind::Prompt).unwrap(), b"");
        assert_eq!(read(zero, FileKind::Config).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}

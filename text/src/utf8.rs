//! Text that comes from outside.

use thiserror::Error;

/// Bytes that should have been UTF-8 text.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{origin} is not valid UTF-8: byte {offset} (counted from 0) is 0x{byte:02x}{}. \
     Convert the text first, for example with `iconv -f LATIN1 -t UTF-8`.",
    cut_note(.truncated)
)]
pub struct InvalidUtf8 {
    /// The source of the bytes, as the user knows it ("standard input", a file name).
    pub origin: String,
    pub offset: usize,
    pub byte: u8,
    /// The text ends inside a character.
    pub truncated: bool,
    /// The bytes as they were, so that a caller may still decide to read them lossily.
    pub bytes: Vec<u8>,
}

fn cut_note(truncated: &bool) -> &'static str {
    if *truncated { ", the start of a character that is cut off at the end" } else { "" }
}

/// The bytes as text, or an error that names the first offending byte and gives the bytes back.
pub fn utf8(origin: &str, bytes: Vec<u8>) -> Result<String, InvalidUtf8> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error();
        let offset = at.valid_up_to();
        let bytes = error.into_bytes();
        InvalidUtf8 {
            origin: origin.to_owned(),
            offset,
            byte: bytes.get(offset).copied().unwrap_or(0),
            truncated: at.error_len().is_none(),
            bytes,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_first_bad_byte() {
        let error = utf8("standard input", b"caf\xe9 noir".to_vec()).unwrap_err();
        assert_eq!((error.offset, error.byte, error.truncated), (3, 0xe9, false));
        assert_eq!(error.bytes, b"caf\xe9 noir");
        let message = error.to_string();
        assert!(message.contains("standard input") && message.contains("byte 3") && message.contains("0xe9"));
    }

    #[test]
    fn says_when_the_end_is_cut() {
        let error = utf8("x.txt", "naïve😀".as_bytes()[..9].to_vec()).unwrap_err();
        assert_eq!((error.offset, error.truncated), (6, true));
        assert!(error.to_string().contains("cut off"));
        assert_eq!(utf8("x.txt", "naïve😀".into()).unwrap(), "naïve😀");
    }
}

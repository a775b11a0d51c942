//! Why a request to the hub failed.

use thiserror::Error;

/// Bytes of an answer that an error repeats.
const LONGEST_QUOTE: usize = 80;

/// Why the hub did not give a file.
#[derive(Debug, Error)]
pub(super) enum HubError {
    #[error("its answer has {field} {found:?}, expected {expected}; check HF_ENDPOINT")]
    Answer { field: &'static str, found: String, expected: &'static str },
    #[error("status {0}")]
    Status(u16),
    #[error("{0}")]
    Request(Box<ureq::Error>),
    #[error("the transfer ended after {done} of {total} bytes: {detail}")]
    Broken { done: u64, total: u64, detail: String },
    #[error(
        "the {bytes} bytes that came are not those of the file (their SHA-256 is another), and were removed"
    )]
    Damaged { bytes: u64 },
    #[error("{path}: {source}")]
    Io { path: String, source: std::io::Error },
}

impl HubError {
    /// An answer that is not used; what was found is cut, as it is as long as the server likes.
    pub fn answer(field: &'static str, found: &str, expected: &'static str) -> HubError {
        let end =
            found.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|&end| end <= LONGEST_QUOTE);
        let cut = &found[..end.last().unwrap_or(0)];
        let dots = if cut.len() < found.len() { "..." } else { "" };
        HubError::Answer { field, found: format!("{cut}{dots}"), expected }
    }

    /// Whether the same request may succeed later.
    pub fn passes(&self) -> bool {
        match self {
            HubError::Broken { .. } => true,
            HubError::Request(error) => !matches!(**error, ureq::Error::BadUri(_) | ureq::Error::Http(_)),
            HubError::Status(status) => *status == 429 || *status >= 500,
            HubError::Answer { .. } | HubError::Io { .. } | HubError::Damaged { .. } => false,
        }
    }
}

impl From<ureq::Error> for HubError {
    fn from(error: ureq::Error) -> HubError {
        HubError::Request(Box::new(error))
    }
}

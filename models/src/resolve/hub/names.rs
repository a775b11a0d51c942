//! Names that a server gives and that become parts of paths: made only by checks, so that none leads out of the cache.

use super::failure::HubError;

/// Longest name of a file or blob, in bytes; file systems take 255, and a partial blob has an ending beside it.
const LONGEST_NAME: usize = 200;

/// A commit of a repository: 40 hexadecimal digits in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CommitId(String);

impl CommitId {
    /// The `field` is what of the answer it was read from.
    pub fn parse(field: &'static str, text: &str) -> Result<CommitId, HubError> {
        let is_commit = text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit());
        match is_commit {
            true => Ok(CommitId(text.to_ascii_lowercase())),
            false => Err(HubError::answer(field, text, "a commit of 40 hexadecimal digits")),
        }
    }
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The name of a blob in the cache, from an entity tag: letters, digits, and `-_.` behind the first of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct BlobName(String);

impl BlobName {
    /// Reads `"tag"`, `W/"tag"` and a tag without quotes.
    pub fn parse(field: &'static str, tag: &str) -> Result<BlobName, HubError> {
        let strong = tag.trim().strip_prefix("W/").unwrap_or(tag.trim());
        let inner = strong.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(strong);
        let is_inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        let is_name = inner.bytes().all(is_inner)
            && inner.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
            && inner.len() <= LONGEST_NAME
            && !inner.ends_with(PARTIAL);
        match is_name {
            true => Ok(BlobName(inner.to_string())),
            false => Err(HubError::answer(field, tag, "an entity tag of letters, digits, `-`, `_` and `.`")),
        }
    }
    pub fn as_str(&self) -> &str {
        &self.0
    }
    /// A name for a file whose server gives none: files of other sizes are told apart.
    pub fn of_size(bytes: u64) -> BlobName {
        BlobName(format!("{bytes}-bytes"))
    }
    /// The SHA-256 of the blob, where the name is one: so the hub names large files.
    pub fn sha256(&self) -> Option<String> {
        let is_hash = self.0.len() == 64 && self.0.bytes().all(|b| b.is_ascii_hexdigit());
        is_hash.then(|| self.0.to_ascii_lowercase())
    }
    /// The name while the blob is not complete.
    pub fn partial_file_name(&self) -> String {
        format!("{}{PARTIAL}", self.0)
    }
}

const PARTIAL: &str = ".part";

/// Whether a listed name is one of a file beside the others: no folder, not hidden, and nothing that a terminal would obey.
pub(super) fn is_plain(name: &str) -> bool {
    let is_inner = |c: char| !c.is_control() && !matches!(c, '/' | '\\');
    !name.is_empty() && name.len() <= LONGEST_NAME && !name.starts_with('.') && name.chars().all(is_inner)
}

/// The name as a part of an address.
pub(super) fn percent_encoded(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
            true => text.push(byte as char),
            false => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entity_tags_are_names_or_refused() {
        let sha = "b908f2b7227d4d31a2105dfa31095e28d304f9bc938bfaaa57ee2cacf1f62d32";
        for tag in [sha.to_string(), format!("\"{sha}\""), format!("W/\"{sha}\"")] {
            assert_eq!(BlobName::parse("ETag", &tag).unwrap().as_str(), sha, "{tag}");
        }
        assert_eq!(BlobName::parse("ETag", "\"5d41-2_a.b\"").unwrap().as_str(), "5d41-2_a.b");
        let long = "a".repeat(201);
        let bad = [
            "",
            "\"\"",
            "W/",
            "\"..\"",
            ".",
            "\".hidden\"",
            "\"../x\"",
            "/etc/passwd",
            "\"/etc/profile\"",
            "a/b",
            "a\\b",
            "W/W/\"a\"",
            "\"a\"b\"",
            "a\0b",
            "a\u{1b}[2J",
            "\"x.part\"",
            &long,
        ];
        for tag in bad {
            let error = BlobName::parse("ETag", tag).unwrap_err().to_string();
            assert!(error.contains("ETag") && error.contains("entity tag"), "{tag:?}: {error}");
            assert!(error.len() < 300 && !error.contains('\u{1b}'), "{error}");
        }
    }

    #[test]
    fn commits_are_hexadecimal_or_refused() {
        let commit = "0123456789ABCDEF0123456789abcdef01234567";
        assert_eq!(CommitId::parse("sha", commit).unwrap().as_str(), commit.to_ascii_lowercase());
        for bad in ["", "main", "../../x", "/abs", &commit[1..], &format!("{commit}0"), &"g".repeat(40)] {
            assert!(CommitId::parse("sha", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_of_files_stay_in_their_folder() {
        for good in ["config.json", "model-00001-of-00002.safetensors", "model (1).bin", "größe.json"] {
            assert!(is_plain(good), "{good}");
        }
        for bad in ["", ".", "..", "../a", "/a", "a/b", "a\\b", ".profile", "a\n", "a\u{1b}[2J", "a\0"] {
            assert!(!is_plain(bad), "{bad:?}");
        }
        assert_eq!(percent_encoded("a b?c#d%.json"), "a%20b%3Fc%23d%25.json");
    }
}

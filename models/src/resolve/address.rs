//! Files that an address names.

use super::download::{self, DownloadListener};
use crate::error::ResolveError;
use std::path::{Path, PathBuf};

/// Downloads the file of an address into a folder, where a later attempt goes on with what has come. What is there is kept.
pub fn download_file(
    address: &str,
    folder: &Path,
    listener: Option<&DownloadListener>,
) -> Result<PathBuf, ResolveError> {
    let name = url_file_name(address).ok_or_else(|| ResolveError::Unusable {
        path: address.to_string(),
        detail: "expected an address that ends with the name of a .gguf or .so file".to_string(),
    })?;
    let path = folder.join(name);
    if path.is_file() {
        return Ok(path);
    }
    fetch_file(address, &path, listener)?;
    Ok(path)
}

#[cfg(feature = "hub")]
fn fetch_file(address: &str, path: &Path, listener: Option<&DownloadListener>) -> Result<(), ResolveError> {
    match listener {
        Some(listener) => super::hub::download_file(address, path, listener),
        None => Err(not_fetched_error(address, path)),
    }
}

#[cfg(not(feature = "hub"))]
fn fetch_file(address: &str, path: &Path, _: Option<&DownloadListener>) -> Result<(), ResolveError> {
    Err(not_fetched_error(address, path))
}

fn not_fetched_error(address: &str, path: &Path) -> ResolveError {
    let detail = format!(
        "is not here. {} Fetch it where there is a network and put it at {}",
        download::no_downloads(),
        path.display()
    );
    ResolveError::Unusable { path: address.to_string(), detail }
}

/// Whether a name is an address of a file: `http://` or `https://`.
pub fn is_address(model: &str) -> bool {
    let is_http = |scheme: &str| scheme.eq_ignore_ascii_case("http") || scheme.eq_ignore_ascii_case("https");
    model.split_once("://").is_some_and(|(scheme, _)| is_http(scheme))
}

/// The name of the file at an address, if it is one that is read.
pub fn url_file_name(address: &str) -> Option<&str> {
    let path = address.split(['?', '#']).next()?.split_once("://")?.1.split_once('/')?.1;
    let name = path.rsplit('/').next()?;
    let is_inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '+');
    let is_name = !name.starts_with('.') && name.len() <= 200 && name.chars().all(is_inner);
    (is_name && (name.ends_with(".gguf") || name.ends_with(".so"))).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_end_with_the_name_of_a_file() {
        let good = "https://hub.example/org/x/resolve/main/tiny-Q4_K_M.gguf";
        assert!(is_address(good) && is_address("HTTP://a/b.so") && !is_address("hf://org/x"));
        assert_eq!(url_file_name(good), Some("tiny-Q4_K_M.gguf"));
        assert_eq!(url_file_name(&format!("{good}?download=true#x")), Some("tiny-Q4_K_M.gguf"));
        for bad in [
            "https://a",
            "https://a/",
            "https://a/x.zip",
            "https://a/.gguf",
            "https://a/%2e%2e.so",
            "https://x.gguf",
        ] {
            assert_eq!(url_file_name(bad), None, "{bad}");
        }
    }
}

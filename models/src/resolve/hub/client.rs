//! The few requests of the hub's protocol that a download needs. Nothing of an answer is used before it is checked: names that
//! become paths are types of [`super::names`], redirections are followed here, a body is read up to the size told.

use super::failure::HubError;
use super::names::{BlobName, CommitId, is_plain, percent_encoded};
use crate::resolve::RepoName;
use serde_json::Value;
use std::time::Duration;
use ureq::http::{HeaderMap, Uri};
use ureq::{Agent, Body, http::Response};

/// Bytes of a listing of a repository that are read.
const LONGEST_LISTING: u64 = 64 << 20;
/// Redirections of one request.
const MOST_REDIRECTS: usize = 10;

/// A repository at one commit.
#[derive(Debug)]
pub(super) struct RepoListing {
    pub commit: CommitId,
    /// Names of files in its root that are plain.
    pub files: Vec<String>,
}

/// What is known of a file before its bytes are.
#[derive(Debug)]
pub(super) struct RemoteFile {
    pub address: String,
    pub blob: BlobName,
    pub bytes: u64,
}

pub(super) struct HubClient {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

impl HubClient {
    /// Proxies are those that the environment names.
    pub fn new(endpoint: &str, token: Option<String>) -> HubClient {
        let config = Agent::config_builder()
            .user_agent(concat!("mlcc/", env!("CARGO_PKG_VERSION")))
            .max_redirects(0)
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(30)))
            .timeout_recv_response(Some(Duration::from_secs(120)))
            .build();
        HubClient { agent: config.new_agent(), endpoint: endpoint.trim_end_matches('/').to_string(), token }
    }

    pub fn list_repository(&self, repo: &RepoName) -> Result<RepoListing, HubError> {
        let address = format!("{}/api/models/{}/revision/{}", self.endpoint, repo.full_name(), repo.revision);
        let (_, mut response) = self.get(&address, None)?;
        check_status(&response)?;
        let bytes = response.body_mut().with_config().limit(LONGEST_LISTING).read_to_vec()?;
        let listing: Value = serde_json::from_slice(&bytes)
            .map_err(|_| HubError::answer("a listing", &String::from_utf8_lossy(&bytes), "JSON"))?;
        let commit = listing.get("sha").and_then(Value::as_str).unwrap_or_default();
        let siblings = listing.get("siblings").and_then(Value::as_array).into_iter().flatten();
        let names = siblings.filter_map(|file| file.get("rfilename")?.as_str());
        Ok(RepoListing {
            commit: CommitId::parse("sha", commit)?,
            files: names.filter(|name| is_plain(name)).map(str::to_string).collect(),
        })
    }

    /// Asks for the first byte, whose answer tells the rest.
    pub fn describe_file(
        &self,
        repo: &RepoName,
        commit: &CommitId,
        name: &str,
    ) -> Result<RemoteFile, HubError> {
        let (endpoint, repo, at) = (&self.endpoint, repo.full_name(), commit.as_str());
        let address = format!("{endpoint}/{repo}/resolve/{at}/{}", percent_encoded(name));
        let (told, response) = self.get(&address, Some("bytes=0-0".to_string()))?;
        // An empty file has no first byte.
        if response.status().as_u16() != 416 {
            check_status(&response)?;
        }
        if let Some(found) = header_value(&told, "x-repo-commit")
            && CommitId::parse("X-Repo-Commit", found)? != *commit
        {
            return Err(HubError::answer("X-Repo-Commit", found, "the commit that was asked for"));
        }
        let (field, tag) = match header_value(&told, "x-linked-etag") {
            Some(tag) => ("X-Linked-Etag", tag),
            None => ("ETag", header_value(&told, "etag").unwrap_or_default()),
        };
        let blob = BlobName::parse(field, tag)?;
        Ok(RemoteFile { address, blob, bytes: file_size(&response)? })
    }

    /// The same of any address, whose server need not name what it has.
    pub fn describe_address(&self, address: &str) -> Result<RemoteFile, HubError> {
        let (told, response) = self.get(address, Some("bytes=0-0".to_string()))?;
        check_status(&response)?;
        let bytes = file_size(&response)?;
        let tag = ["x-linked-etag", "etag"].iter().find_map(|name| header_value(&told, name));
        let blob = tag.and_then(|tag| BlobName::parse("ETag", tag).ok());
        let blob = blob.unwrap_or_else(|| BlobName::of_size(bytes));
        Ok(RemoteFile { address: address.to_string(), blob, bytes })
    }

    /// The bytes of a file from `start` on; from 0 on where the server does not take a range.
    pub fn bytes_from(&self, file: &RemoteFile, start: u64) -> Result<(u64, Body), HubError> {
        let (_, response) = self.get(&file.address, Some(format!("bytes={start}-")))?;
        check_status(&response)?;
        let first = match header_value(response.headers(), "content-range") {
            Some(range) if response.status().as_u16() == 206 => {
                let first = range.strip_prefix("bytes ").and_then(|range| range.split('-').next());
                let first = first.and_then(|first| first.trim().parse::<u64>().ok());
                first.ok_or_else(|| HubError::answer("Content-Range", range, "the first of its bytes"))?
            }
            _ => 0,
        };
        if first != start && first != 0 {
            let range = header_value(response.headers(), "content-range").unwrap_or_default();
            return Err(HubError::answer("Content-Range", range, "the bytes that were asked for"));
        }
        Ok((first, response.into_body()))
    }

    /// Follows redirections, to hosts other than the endpoint's without the token. Also gives the headers by which the hub
    /// itself describes a file: those of the last answer from its own host.
    fn get(&self, address: &str, range: Option<String>) -> Result<(HeaderMap, Response<Body>), HubError> {
        let mut address = parse_url(address, "the address")?;
        let mut told = HeaderMap::new();
        for _ in 0..=MOST_REDIRECTS {
            let ours = url_origin(&address) == url_origin(&parse_url(&self.endpoint, "HF_ENDPOINT")?);
            let mut request = self.agent.get(address.clone());
            if let Some(range) = &range {
                request = request.header("Range", range);
            }
            if let Some(token) = self.token.as_ref().filter(|_| ours) {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let response = request.call()?;
            if ours || told.is_empty() {
                told = response.headers().clone();
            }
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok((told, response));
            }
            address =
                resolve_redirect(&address, header_value(response.headers(), "location").unwrap_or_default())?;
        }
        Err(HubError::answer("Location", &address.to_string(), "an end of redirections after ten"))
    }
}

fn parse_url(address: &str, field: &'static str) -> Result<Uri, HubError> {
    let wrong = || HubError::answer(field, address, "an address with http:// or https://");
    let uri: Uri = address.parse().map_err(|_| wrong())?;
    let is_http = matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some();
    if is_http { Ok(uri) } else { Err(wrong()) }
}

fn url_origin(address: &Uri) -> (Option<&str>, Option<&str>) {
    (address.scheme_str(), address.authority().map(|authority| authority.as_str()))
}

/// Where a `Location` leads: to a path on the same host, or to another host, and never from https to http.
fn resolve_redirect(from: &Uri, location: &str) -> Result<Uri, HubError> {
    let is_path = location.starts_with('/') && !location.starts_with("//");
    let to = match (is_path, url_origin(from)) {
        (true, (Some(scheme), Some(authority))) => {
            parse_url(&format!("{scheme}://{authority}{location}"), "Location")?
        }
        _ => parse_url(location, "Location")?,
    };
    if from.scheme_str() == Some("https") && to.scheme_str() != Some("https") {
        return Err(HubError::answer("Location", location, "an address that is encrypted as this one"));
    }
    Ok(to)
}

fn header_value<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// The size of the file of which an answer has the first byte, or all.
fn file_size(response: &Response<Body>) -> Result<u64, HubError> {
    let (field, length) = match header_value(response.headers(), "content-range") {
        Some(range) => ("Content-Range", range.rsplit('/').next().unwrap_or_default()),
        None => ("Content-Length", header_value(response.headers(), "content-length").unwrap_or_default()),
    };
    length.parse().map_err(|_| HubError::answer(field, length, "the number of bytes"))
}

fn check_status(response: &Response<Body>) -> Result<(), HubError> {
    match response.status().as_u16() {
        200..=299 => Ok(()),
        other => Err(HubError::Status(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirections_keep_to_http() {
        let from: Uri = "https://hub.example/org/x".parse().unwrap();
        let to = |location| resolve_redirect(&from, location).map(|uri| uri.to_string());
        assert_eq!(to("/org/y?a=1").unwrap(), "https://hub.example/org/y?a=1");
        assert_eq!(to("https://cdn.example/z").unwrap(), "https://cdn.example/z");
        for bad in
            ["", "http://hub.example/z", "file:///etc/passwd", "//evil.example/x", "relative", "https://"]
        {
            let error = to(bad).unwrap_err().to_string();
            assert!(error.contains("Location"), "{bad}: {error}");
        }
    }

    #[test]
    fn what_a_server_says_is_quoted_cut() {
        let error = HubError::answer("ETag", &"ä\u{1b}".repeat(1000), "a tag").to_string();
        assert!(error.len() < 400 && error.contains("...") && !error.contains('\u{1b}'), "{error}");
    }
}

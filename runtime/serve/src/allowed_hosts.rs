//! Requests that pages of other sites make a browser send: they are refused.
//!
//! A page cannot read from a server that sends no CORS headers, but it can send requests, and where its name
//! was made to point to this machine (DNS rebinding) it reads, too. Browsers put the name into `Host` and the
//! page's site into `Origin`; no page can change these.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::{HeaderMap, Method, header};

use crate::error::ApiError;

/// The names that a server is called by.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedHosts {
    /// Names beside addresses and `localhost`; `*` is any name.
    names: Vec<String>,
    /// Requests for any name are answered, as another server has checked it.
    any: bool,
}

impl AllowedHosts {
    pub fn new(names: &[String]) -> AllowedHosts {
        let names = names.iter().map(|name| name.to_ascii_lowercase()).collect::<Vec<_>>();
        AllowedHosts { any: names.iter().any(|name| name == "*"), names }
    }

    /// The names of a server behind a proxy.
    pub fn any(self) -> AllowedHosts {
        AllowedHosts { any: true, ..self }
    }

    fn named(&self, name: &str) -> bool {
        self.names.iter().any(|known| known == name)
    }

    fn allows(&self, name: &str) -> bool {
        self.any || is_local(name) || self.named(name)
    }
}

/// An address cannot be rebound, and `localhost` is this machine (RFC 6761).
fn is_local(name: &str) -> bool {
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    let address = address.split('%').next().unwrap_or_default();
    name == "localhost" || name.ends_with(".localhost") || address.parse::<IpAddr>().is_ok()
}

/// Name and port of `name:port`; the name in lower case without the dot of the root.
fn name_and_port(authority: &str) -> (String, Option<&str>) {
    let (name, port) = match authority.rsplit_once(':') {
        // The colons of an IPv6 address are in brackets.
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        _ => (authority, None),
    };
    (name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase(), port)
}

/// Refuses what no program sends on purpose. Reads are answered for any origin: without CORS headers its page
/// does not see the answer.
pub fn check(request: &Request, hosts: &AllowedHosts) -> Result<(), ApiError> {
    let headers = request.headers();
    let host = one(headers, header::HOST)?;
    let asked = request.uri().authority().map(axum::http::uri::Authority::as_str);
    for authority in host.into_iter().chain(asked) {
        let (name, _) = name_and_port(authority);
        if !hosts.allows(&name) {
            return Err(ApiError::other_host(&name));
        }
    }
    let reads = [Method::GET, Method::HEAD, Method::OPTIONS].contains(request.method());
    if reads {
        return Ok(());
    }
    let origin = one(headers, header::ORIGIN)?;
    if origin.is_some_and(|origin| is_foreign(origin, host, hosts)) || is_of_other_site(headers) {
        return Err(ApiError::other_site());
    }
    check_type(headers, origin.is_some())
}

/// The value of a header that is there at most once, as text.
fn one(headers: &HeaderMap, name: header::HeaderName) -> Result<Option<&str>, ApiError> {
    let mut values = headers.get_all(&name).iter();
    let first = values.next().map(|value| value.to_str());
    match (first.transpose(), values.next()) {
        (Ok(value), None) => Ok(value),
        _ => Err(ApiError::request(
            "invalid_header",
            format!("the header `{name}` is not text, or occurs twice"),
        )),
    }
}

/// An origin is `null`, or scheme, name and port of a page. The origin of this server's page is its host;
/// behind a proxy it is a name from the server's options.
fn is_foreign(origin: &str, host: Option<&str>, hosts: &AllowedHosts) -> bool {
    let Some((scheme, authority)) = origin.split_once("://") else { return true };
    let usual = match scheme {
        "http" => "80",
        "https" => "443",
        _ => return true,
    };
    let (name, port) = name_and_port(authority);
    let (host_name, host_port) = name_and_port(host.unwrap_or_default());
    let same = name == host_name && port.unwrap_or(usual) == host_port.unwrap_or(usual);
    !same && !hosts.named(&name)
}

/// Newer browsers say it where they trust the address.
fn is_of_other_site(headers: &HeaderMap) -> bool {
    let site = headers.get("sec-fetch-site").and_then(|value| value.to_str().ok());
    site.is_some_and(|site| !["same-origin", "none"].contains(&site))
}

/// A body is JSON and says so: a page can send any other type without asking first. Programs that say nothing
/// are no pages.
fn check_type(headers: &HeaderMap, of_page: bool) -> Result<(), ApiError> {
    let length = headers.get(header::CONTENT_LENGTH).map(|length| length != "0");
    let has_body = length.unwrap_or(headers.contains_key(header::TRANSFER_ENCODING));
    match one(headers, header::CONTENT_TYPE)? {
        None if has_body && of_page => Err(ApiError::no_json("none")),
        Some(found) if has_body && !is_json(found) => Err(ApiError::no_json(found)),
        _ => Ok(()),
    }
}

fn is_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json")
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;

    fn code(method: &str, headers: &[(&str, &str)], names: &[&str]) -> &'static str {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        let mut request = Request::builder().method(method).uri("/models/unload");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        match check(&request.body(Body::empty()).unwrap(), &AllowedHosts::new(&names)) {
            Ok(()) => "taken",
            Err(error) => error.code.unwrap(),
        }
    }

    #[test]
    fn hosts_are_addresses_localhost_and_names_that_were_told() {
        for host in [
            "127.0.0.1:8080",
            "192.168.1.5",
            "[::1]:8080",
            "[fe80::1]",
            "LocalHost:1",
            "a.localhost",
            "localhost.",
        ] {
            assert_eq!(code("GET", &[("host", host)], &[]), "taken", "{host}");
        }
        for host in
            ["evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "", "1.2.3", "[::1"]
        {
            assert_eq!(code("GET", &[("host", host)], &[]), "other_host", "{host}");
        }
        assert_eq!(code("GET", &[("host", "Chat.Example:443")], &["chat.example"]), "taken");
        assert_eq!(code("GET", &[("host", "a.chat.example")], &["chat.example"]), "other_host");
        assert_eq!(code("GET", &[("host", "any.example")], &["*"]), "taken");
        assert_eq!(code("GET", &[], &[]), "taken", "no browser sends that");
        assert_eq!(code("GET", &[("host", "localhost"), ("host", "evil.example")], &[]), "invalid_header");
    }

    #[test]
    fn origins_are_the_host_or_names_that_were_told() {
        let post = |origin, host, names: &[&str]| code("POST", &[("origin", origin), ("host", host)], names);
        assert_eq!(post("http://127.0.0.1:8080", "127.0.0.1:8080", &[]), "taken");
        assert_eq!(post("https://localhost", "localhost:443", &[]), "taken");
        for origin in [
            "http://evil.example",
            "null",
            "http://127.0.0.1:8081",
            "http://127.0.0.1",
            "http://localhost:8080",
            "file://",
            "app://127.0.0.1:8080",
        ] {
            assert_eq!(post(origin, "127.0.0.1:8080", &[]), "other_site", "{origin}");
            let read = [("origin", origin), ("host", "127.0.0.1:8080")];
            assert_eq!(code("GET", &read, &[]), "taken", "{origin}");
            assert_eq!(code("DELETE", &read, &[]), "other_site", "{origin}");
        }
        // A proxy may send another host on.
        assert_eq!(post("https://chat.example", "127.0.0.1:8080", &["chat.example"]), "taken");
        assert_eq!(post("https://evil.example", "127.0.0.1:8080", &["*"]), "other_site");
        let site = |site| code("POST", &[("sec-fetch-site", site), ("host", "127.0.0.1:8080")], &[]);
        assert_eq!([site("cross-site"), site("same-site")], ["other_site"; 2]);
        assert_eq!([site("same-origin"), site("none")], ["taken"; 2]);
    }

    #[test]
    fn bodies_are_json() {
        let with = |kind: &str, more: &[(&str, &str)]| {
            let mut headers = vec![("host", "localhost"), ("content-length", "2")];
            headers.extend(more);
            if !kind.is_empty() {
                headers.push(("content-type", kind));
            }
            code("POST", &headers, &[])
        };
        for kind in ["application/json", "Application/JSON; charset=utf-8", ""] {
            assert_eq!(with(kind, &[]), "taken", "{kind}");
        }
        for kind in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data",
            "application/jsonx",
            "x",
        ] {
            assert_eq!(with(kind, &[]), "unsupported_media_type", "{kind}");
        }
        assert_eq!(with("", &[("origin", "http://localhost")]), "unsupported_media_type");
        let empty = [("host", "localhost"), ("content-length", "0"), ("content-type", "text/plain")];
        assert_eq!(code("POST", &empty, &[]), "taken");
        let chunks =
            [("host", "localhost"), ("transfer-encoding", "chunked"), ("content-type", "text/plain")];
        assert_eq!(code("POST", &chunks, &[]), "unsupported_media_type");
    }
}

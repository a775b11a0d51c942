//! Pages of other sites in a browser, and names that point here without being this server's.

use mlcc_serve::ServeOptions;

use crate::server::{TestResponse, TestServer, options};
use crate::toy::ToyModel;

fn server(allowed_hosts: Vec<String>) -> TestServer {
    TestServer::start(&ToyModel::new(false, None), 1, None, ServeOptions { allowed_hosts, ..options() })
}

/// Status and code of the answer to a request with exactly these headers.
fn asked(server: &TestServer, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
    use std::io::Write;
    let mut stream = std::net::TcpStream::connect(&server.address).unwrap();
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    let answer = TestResponse::read(std::io::BufReader::new(stream));
    let code = if answer.status < 300 { String::new() } else { answer.error().1 };
    (answer.status, code)
}

const TEXT: &str = r#"{"prompt": "a", "max_tokens": 1}"#;

#[test]
fn a_rebound_name_reads_and_asks_nothing() {
    let server = server(Vec::new());
    let evil = "Host: evil.example:8080\r\n";
    let refused = (403, "other_host".to_owned());
    for path in
        ["/", "/v1/models", "/slots", "/props", "/metrics", "/openapi.json", "/v1/responses/x", "/none"]
    {
        assert_eq!(asked(&server, "GET", path, evil, ""), refused, "{path}");
    }
    let same = format!("{evil}Origin: http://evil.example:8080\r\nContent-Type: application/json\r\n");
    for path in ["/v1/completions", "/models/unload", "/tokenize", "/none"] {
        assert_eq!(asked(&server, "POST", path, &same, TEXT), refused, "{path}");
    }
    // A balancer looks whether the server is there.
    assert_eq!(asked(&server, "GET", "/health", evil, "").0, 200);
    assert_eq!(asked(&server, "GET", "/v1/models", "", "").0, 200, "a program without a Host");
}

#[test]
fn pages_of_other_sites_start_nothing() {
    let server = server(Vec::new());
    let host = format!("Host: {}\r\n", server.address);
    let json = "Content-Type: application/json\r\n";
    let own = format!("{host}{json}Origin: http://{}\r\n", server.address);
    assert_eq!(asked(&server, "POST", "/v1/completions", &own, TEXT).0, 200);
    let refused = (403, "other_site".to_owned());
    for more in ["Origin: http://evil.example\r\n", "Origin: null\r\n", "Sec-Fetch-Site: cross-site\r\n"] {
        for path in ["/v1/completions", "/models/load", "/models/unload", "/load_lora_adapter", "/tokenize"] {
            let headers = format!("{host}{json}{more}");
            assert_eq!(asked(&server, "POST", path, &headers, TEXT), refused, "{path} {more}");
        }
        assert_eq!(
            asked(&server, "DELETE", "/v1/responses/x", &format!("{host}{more}"), ""),
            refused,
            "{more}"
        );
    }
    assert_eq!(
        asked(&server, "GET", "/v1/models", &format!("{host}Origin: http://evil.example\r\n"), "").0,
        200
    );
}

#[test]
fn bodies_that_need_no_preflight_are_refused() {
    let server = server(Vec::new());
    let ask =
        |kind: &str| asked(&server, "POST", "/v1/completions", &format!("Host: localhost\r\n{kind}"), TEXT);
    for kind in
        ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data"]
    {
        let told = ask(&format!("Content-Type: {kind}\r\n"));
        assert_eq!(told, (415, "unsupported_media_type".into()), "{kind}");
    }
    // A page that sends bytes has an origin; a program has none.
    assert_eq!(ask("Origin: http://localhost\r\n").0, 415);
    assert_eq!(ask("").0, 200);
    assert_eq!(ask("Content-Type: application/json; charset=utf-8\r\n").0, 200);
}

#[test]
fn names_that_the_server_was_told_are_its_own() {
    let server = server(vec!["chat.example".into()]);
    let json = "Content-Type: application/json\r\n";
    let ask = |headers: &str| asked(&server, "POST", "/v1/completions", &format!("{headers}{json}"), TEXT).0;
    assert_eq!(ask("Host: chat.example\r\nOrigin: https://chat.example\r\n"), 200);
    // The request of a proxy that keeps its own name for the server.
    assert_eq!(ask("Host: 127.0.0.1:8080\r\nOrigin: https://chat.example\r\n"), 200);
    assert_eq!(ask("Host: chat.example\r\nOrigin: https://evil.example\r\n"), 403);
    assert_eq!(ask("Host: other.example\r\n"), 403);
}

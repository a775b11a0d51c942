//! The page at `/`: its files, and their headers for browsers.

use mlcc_serve::ServeOptions;

use crate::server::{TestResponse, TestServer, options};
use crate::toy::ToyModel;

fn server() -> TestServer {
    TestServer::start(
        &ToyModel::new(false, None),
        1,
        None,
        ServeOptions { api_keys: vec!["key".into()], ..options() },
    )
}

/// The paths in quotation marks that begin with `begin`.
fn paths<'a>(text: &'a str, begin: &str) -> Vec<&'a str> {
    text.split('"').filter(|part| part.starts_with(begin)).collect()
}

#[test]
fn every_file_comes_with_its_type_and_a_strict_policy() {
    let server = server();
    let index = server.get("/");
    assert_eq!((index.status, index.header("content-type")), (200, Some("text/html; charset=utf-8")));
    let mut left: Vec<String> = paths(&index.body, "/page/").into_iter().map(str::to_owned).collect();
    let mut seen: Vec<String> = Vec::new();
    while let Some(path) = left.pop() {
        if seen.contains(&path) {
            continue;
        }
        let file = server.get(&path);
        assert_eq!(file.status, 200, "{path}");
        let kind = match path.rsplit('.').next() {
            Some("js") => "text/javascript; charset=utf-8",
            Some("css") => "text/css; charset=utf-8",
            Some("svg") => "image/svg+xml",
            other => panic!("{path}: {other:?}"),
        };
        assert_eq!(file.header("content-type"), Some(kind), "{path}");
        left.extend(paths(&file.body, "./").iter().map(|name| name.replace("./", "/page/")));
        // A second look brings nothing, as long as nothing has changed.
        let tag = file.header("etag").unwrap();
        let again =
            TestResponse::read(server.open("GET", &path, &format!("If-None-Match: \"x\", {tag}\r\n"), ""));
        assert_eq!((again.status, again.body.as_str(), again.header("etag")), (304, "", Some(tag)));
        let other = TestResponse::read(server.open("GET", &path, "If-None-Match: \"x\"\r\n", ""));
        assert_eq!((other.status, other.body), (200, file.body.clone()));
        for answer in [&index, &file, &again] {
            let policy = answer.header("content-security-policy").unwrap();
            assert!(policy.starts_with("default-src 'none'; script-src 'self'; "), "{policy}");
            assert!(policy.contains("require-trusted-types-for 'script'"), "{policy}");
            assert!(
                !policy.contains("unsafe") && !policy.contains('*') && !policy.contains("http"),
                "{policy}"
            );
            assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
            assert_eq!(answer.header("referrer-policy"), Some("no-referrer"));
        }
        assert!(!file.body.contains("innerHTML") && !file.body.contains("eval("), "{path}");
        let outside = file.body.replace("http://www.w3.org/2000/svg", "");
        assert!(!outside.contains("http:") && !outside.contains("https:"), "{path} names another server");
        seen.push(path);
    }
    assert_eq!(seen.len(), 10, "{seen:?}");
}

#[test]
fn the_page_needs_no_key_and_its_requests_do() {
    let server = server();
    assert_eq!(server.get("/").status, 200);
    assert_eq!(server.get("/v1/models").status, 401);
    for path in ["/page/none.js", "/page/..%2FCargo.toml", "/page/"] {
        assert!([401, 404].contains(&server.get(path).status), "{path}");
    }
}

/// The page's own code, where there is a Node to run it.
#[test]
fn markdown_is_read_in_one_pass() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("package.json", r#"{"type": "module"}"#);
    write("markdown.js", include_str!("../../page/markdown.js"));
    write("dom.js", "export const el = (tag, _, ...children) => ({ tag, children: children.flat() });");
    write("cases.mjs", include_str!("markdown.mjs"));
    let cases = [
        ("a `b *c*` d", "<p>a <code>b *c*</> d</>"),
        ("``a ` b`` `c``", "<p><code>a ` b</> `c``</>"),
        ("**a *b** c*", "<p><strong>a *b</> c*</>"),
        ("*a* 2*3*4 ** b ** *c", "<p><em>a</> 2*3*4 ** b ** *c</>"),
        ("***a** b*c* `", "<p>*<strong>a</> b*c* `</>"),
        (
            "# A `b`\n- c\n- **d**\n\n> e\n\n```js \n*f*\n```",
            "<h1>A <code>b</></><ul><li>c</><li><strong>d</></></><blockquote>e</><pre><code>*f*</></>",
        ),
        ("<b>&amp;</b>", "<p><b>&amp;</b></>"),
    ];
    let texts: Vec<&str> = cases.iter().map(|(text, _)| *text).collect();
    let ran = std::process::Command::new("node")
        .args(["cases.mjs", &serde_json::to_string(&texts).unwrap()])
        .current_dir(folder.path())
        .output();
    let Ok(ran) = ran else { return };
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let told = String::from_utf8(ran.stdout).unwrap();
    let found: Vec<String> = told.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(found, cases.map(|(_, wanted)| wanted));
}

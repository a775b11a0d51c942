//! A server on this machine that speaks as much of the Hugging Face hub as a client asks for.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// One repository, `org/tiny`.
#[derive(Clone, Default)]
pub struct FakeHub {
    pub files: BTreeMap<String, Vec<u8>>,
    /// Requests need this token.
    pub token: Option<&'static str>,
    /// The number of bytes after which answers end, the first time that a larger file is requested as a
    /// whole.
    pub breaks_after: Option<usize>,
    /// Its answers in place of the truth.
    pub lies: HubLies,
    /// `GET path range` of each request.
    pub requests: Arc<Mutex<Vec<String>>>,
}

/// Answers of a hub that tries to write elsewhere; `None` is the truth.
#[derive(Clone, Default)]
pub struct HubLies {
    pub sha: Option<String>,
    pub commit: Option<String>,
    pub etag: Option<String>,
    /// Names that are listed in addition to those of the files.
    pub names: Vec<String>,
    /// The location that is given for each file.
    pub location: Option<String>,
    /// Bytes that each file is said to have.
    pub size: Option<usize>,
}

impl FakeHub {
    pub fn of(folder: &Path) -> FakeHub {
        let files = ["config.json", "model.safetensors"]
            .map(|name| (name.to_string(), std::fs::read(folder.join(name)).expect("a file of the case")));
        FakeHub { files: files.into(), ..FakeHub::default() }
    }

    /// Serves for ever; gives the endpoint.
    pub fn serve(self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let broken = Arc::new(Mutex::new(false));
            for stream in listener.incoming().flatten() {
                let (hub, broken) = (self.clone(), broken.clone());
                std::thread::spawn(move || while hub.answer(&stream, &broken).is_some() {});
            }
        });
        endpoint
    }

    /// One request; `None` where the connection ends.
    fn answer(&self, stream: &TcpStream, broken: &Mutex<bool>) -> Option<()> {
        let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
        let path = lines.next()?.split(' ').nth(1)?.to_string();
        let headers: Vec<String> =
            lines.take_while(|line| !line.is_empty()).map(|l| l.to_lowercase()).collect();
        let header = |name: &str| headers.iter().find_map(|h| h.strip_prefix(name).map(str::trim));
        let range = header("range:").unwrap_or("").to_string();
        self.requests.lock().unwrap().push(format!("GET {path} {range}"));
        if self.token.is_some_and(|token| header("authorization:") != Some(&format!("bearer {token}"))) {
            return send(stream, "401 Unauthorized", "", b"", usize::MAX);
        }
        if path == "/api/models/org/tiny/revision/main" {
            let names = self.files.keys().chain(&self.lies.names);
            let names = names.map(|name| serde_json::json!({ "rfilename": name })).collect::<Vec<_>>();
            let info =
                serde_json::json!({ "sha": self.lies.sha.as_deref().unwrap_or(COMMIT), "siblings": names });
            return send(stream, "200 OK", "", info.to_string().as_bytes(), usize::MAX);
        }
        let name = path.strip_prefix(&format!("/org/tiny/resolve/{COMMIT}/")).unwrap_or_default();
        let Some(bytes) = self.files.get(name) else {
            return send(stream, "404 Not Found", "", b"", usize::MAX);
        };
        if let Some(location) = &self.lies.location {
            return send(stream, "302 Found", &format!("location: {location}\r\n"), b"", usize::MAX);
        }
        let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
        let first: usize = first.parse().ok()?;
        let last = last.parse().unwrap_or(bytes.len() - 1);
        let etag = self.lies.etag.clone().unwrap_or(format!("\"etag-{name}\""));
        let (commit, size) =
            (self.lies.commit.as_deref().unwrap_or(COMMIT), self.lies.size.unwrap_or(bytes.len()));
        let extra = format!(
            "content-range: bytes {first}-{last}/{size}\r\netag: {etag}\r\nx-repo-commit: {commit}\r\n"
        );
        let mut broken = broken.lock().unwrap();
        let most = self.breaks_after.filter(|most| !*broken && last - first > *most);
        *broken |= most.is_some();
        send(stream, "206 Partial Content", &extra, &bytes[first..=last], most.unwrap_or(usize::MAX))
    }
}

/// Sends at most `most` bytes of the body, and then ends the connection.
fn send(mut stream: &TcpStream, status: &str, extra: &str, body: &[u8], most: usize) -> Option<()> {
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n{extra}\r\n", body.len());
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(&body[..body.len().min(most)]).ok()?;
    if most < body.len() {
        stream.shutdown(std::net::Shutdown::Write).ok()?;
        let _ = stream.read(&mut [0]);
        return None;
    }
    Some(())
}

/// The environment of a program whose caches are in `home`, with the hub at `endpoint`.
pub fn at_home(command: &mut assert_cmd::Command, endpoint: &str, home: &Path) {
    command.current_dir(home).env("HF_HOME", home.join("hf")).env("HF_ENDPOINT", endpoint);
    command.env_remove("HF_HUB_OFFLINE");
    // The server is on this machine.
    for name in ["http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"] {
        command.env_remove(name);
    }
}

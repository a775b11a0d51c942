//! A running `mlcc serve`.

use std::io::{BufRead, BufReader};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

use crate::http::TestClient;
pub use crate::http::TestResponse;
use crate::program::{books, mlcc, program};

/// The trained model in a scheme whose logits do not depend on what runs beside a text; built once per test
/// program.
pub fn artifact() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let name = format!("serve-{}.so", std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let mut build = mlcc();
        build
            .arg("build")
            .arg("-m")
            .arg(books())
            .args(["--quant", "q4i8", "--max-batch", "4", "-o"])
            .arg(&path);
        build.assert().success();
        path
    })
}

pub struct ServerProcess {
    child: Child,
    _stdout: BufReader<ChildStdout>,
    client: TestClient,
    /// The content of the line of `--json`.
    pub ready: Value,
}

impl ServerProcess {
    /// Serves [`artifact`] as `books`.
    pub fn start(args: &[&str]) -> ServerProcess {
        ServerProcess::of(&[artifact()], &[&["--alias", "books", "-t", "1"], args].concat())
    }

    /// Serves artifacts.
    pub fn of(artifacts: &[&Path], args: &[&str]) -> ServerProcess {
        ServerProcess::with(artifacts, args, &[], Stdio::null())
    }

    /// The same with variables of the environment, and a place for standard error.
    pub fn with(
        artifacts: &[&Path],
        args: &[&str],
        variables: &[(&str, &str)],
        stderr: Stdio,
    ) -> ServerProcess {
        let mut command = program();
        command.arg("serve").args(artifacts).args(["--port", "0", "--json"]);
        command.args(args).envs(variables.iter().copied()).stdout(Stdio::piped()).stderr(stderr);
        let mut child = command.spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"));
        assert_eq!(ready["event"], "ready");
        let url = ready["url"].as_str().unwrap();
        let address = url.strip_prefix("http://").unwrap().to_owned();
        ServerProcess { child, _stdout: stdout, client: TestClient { address }, ready }
    }

    /// The number of its threads with a name.
    pub fn threads(&self, name: &str) -> usize {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let named = |task: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(task.unwrap().path().join("comm"))
                .is_ok_and(|found| found.starts_with(name))
        };
        tasks.map(named).filter(|&named| named).count()
    }

    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Deref for ServerProcess {
    type Target = TestClient;

    fn deref(&self) -> &TestClient {
        &self.client
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! The script that is process 1 of a container with all ranks (`deploy/ranks/ranks`), between this program
//! and a stand-in for `mpirun`.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::Value;

use crate::http::TestClient;
use crate::program::{program, workspace};
use crate::rank_processes::plugin;
use crate::rank_serving::{begin, split};

/// Starts its arguments as Open MPI does; SIGTERM ends all at once.
const MPIRUN: &str = r#"#!/bin/bash
[ "$1" = --bind-to ] && [ "$2" = none ] && [ "$3" = -n ] || { echo "mpirun $*" >&2; exit 2; }
export OMPI_COMM_WORLD_SIZE=$4
shift 4
ids=
for ((rank = 0; rank < OMPI_COMM_WORLD_SIZE; rank++)); do
    TEST_RANK=$rank "$@" &
    ids="$ids $!"
done
trap 'kill -KILL $ids; exit 1' TERM
code=0
for id in $ids; do wait "$id" || code=1; done
exit $code
"#;

struct RankContainer {
    process: Child,
    stdout: BufReader<ChildStdout>,
    client: TestClient,
}

fn start(folder: &Path, plugin: &Path, ranks: usize) -> RankContainer {
    let launcher = folder.join("mpirun");
    std::fs::write(&launcher, MPIRUN).unwrap();
    std::fs::set_permissions(&launcher, std::fs::Permissions::from_mode(0o755)).unwrap();
    let own = program();
    let mlcc = folder.join("mlcc");
    if !mlcc.exists() {
        std::os::unix::fs::symlink(own.get_program(), mlcc).unwrap();
    }
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new(workspace().join("deploy/ranks/ranks"));
    command.arg("serve").arg(split()).args(["--port", "0", "--json", "-t", "1", "--drain-timeout", "600"]);
    command.env("PATH", format!("{}:{path}", folder.display())).env("MLCC_RANKS", ranks.to_string());
    command.env("MLCC_MPI", plugin).env("TEST_RANKS", folder).env_remove("TEST_FAULT");
    command.env("MLCC_RANK_TIMEOUT", "20");
    let mut process =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
    let mut stdout = BufReader::new(process.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"));
    let address = ready["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
    RankContainer { process, stdout, client: TestClient { address } }
}

/// True if there is bash, for the script that starts ranks.
fn has_bash() -> bool {
    let found = Command::new("bash").arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: no bash on this machine");
    }
    found
}

/// Signals to a container are passed on to the ranks, whose texts are finished.
#[test]
fn a_container_of_ranks_drains() {
    if !has_bash() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let Some(plugin) = plugin(folder.path(), 1) else { return };
    let mut container = start(folder.path(), &plugin, 2);
    let (mut stream, mut text) = begin(&container.client, 120);
    let id = container.process.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    stream.read_to_string(&mut text).unwrap();
    assert!(text.contains("\"finish_reason\":\"length\"") && text.contains("[DONE]"), "{text}");
    container.stdout.read_to_string(&mut text).unwrap();
    assert_eq!(container.process.wait().unwrap().code(), Some(0), "{text}");
}

/// Writes a program of bash.
fn script(folder: &Path, name: &str, text: &str) {
    let path = folder.join(name);
    std::fs::write(&path, format!("#!/bin/bash\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// The first pod of a group waits for the others and tells `mpirun` of them; what is missing is an error that
/// names it.
#[test]
fn the_first_pod_of_a_group_starts_the_ranks_of_all() {
    if !has_bash() {
        return;
    }
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    script(folder, "ssh-keygen", "echo public");
    // The other pod does not answer at first.
    script(folder, "ssh", "cd \"${0%/*}\"; echo \"$*\" >>asked; [ $(wc -l <asked) -gt 1 ]");
    script(folder, "mpirun", "printf '%s\\n' \"$@\" >\"${0%/*}/told\"; exit 7");
    let path = std::env::var("PATH").unwrap_or_default();
    let run = |ranks: &str, keys: &str| {
        let mut command = Command::new(workspace().join("deploy/ranks/ranks"));
        command.args(["serve", "model.so"]).env("PATH", format!("{}:{path}", folder.display()));
        command.envs([("LWS_GROUP_SIZE", "2"), ("LWS_WORKER_INDEX", "0"), ("HOSTNAME", "group-0")]);
        command.envs([("LWS_LEADER_ADDRESS", "group-0.group.space"), ("MLCC_API_KEY", "secret")]);
        command.env("MLCC_RANKS", ranks).env("MLCC_RANK_KEYS", folder.join(keys));
        let done = command.output().unwrap();
        (done.status.code().unwrap(), String::from_utf8(done.stderr).unwrap())
    };
    let (code, error) = run("4", "none");
    assert!(code == 2 && error.contains("mount the Secret mlcc-rank-keys"), "{code}: {error}");
    std::fs::create_dir(folder.join("keys")).unwrap();
    std::fs::write(folder.join("keys/ssh-privatekey"), "private").unwrap();
    let (code, error) = run("3", "keys");
    assert!(code == 2 && error.contains("3 ranks cannot be divided among 2 machines"), "{code}: {error}");

    assert_eq!(run("4", "keys"), (7, String::new()), "it ends as mpirun does");
    let told = std::fs::read_to_string(folder.join("told")).unwrap();
    let told: Vec<&str> = told.lines().collect();
    let after = |flag: &str| told[told.iter().position(|arg| *arg == flag).unwrap() + 1];
    assert_eq!((after("-n"), after("--host")), ("4", "group-0:2,group-0-1.group.space:2"));
    assert_eq!(told[told.len() - 3..], ["mlcc", "serve", "model.so"]);
    assert!(told.contains(&"MLCC_RANKS") && !told.contains(&"MLCC_API_KEY"), "{told:?}");
    let agent = after("plm_rsh_agent");
    assert!(agent.starts_with("ssh ") && agent.contains(" StrictHostKeyChecking=yes "), "{agent}");
    let asked = std::fs::read_to_string(folder.join("asked")).unwrap();
    assert!(asked.lines().count() == 2 && asked.contains(" group-0-1.group.space true"), "{asked}");
}

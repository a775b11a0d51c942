//! Artifacts that are damaged where the loader and the runtime look, with hashes that were made to fit: none
//! may end a program by a signal, keep it busy for ever or take memory without bound. Machine code itself is
//! left alone: it cannot be checked.
//!
//! `MLCC_DAMAGED_TABLES=5000 cargo test -p mlcc damaged_tables` runs that many cases instead of a few
//! hundred; a number with `#` before it is the one case to look at.
#![cfg(target_os = "linux")]

use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::program::{case, mlcc};
use mlcc_abi::elf::{ElfFile, HEADER_BYTES, PROGRAM_HEADER_BYTES};
use mlcc_abi::section;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

const VARIABLE: &str = "MLCC_DAMAGED_TABLES";
const CASES: u64 = 300;
/// Address space of a program, in KiB: far more than these models need.
const MEMORY_KIB: u64 = 4 << 20;
/// A program that is busy for so long hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// Steele, Lea and Flood's SplitMix64.
struct TableRandom(u64);

impl TableRandom {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// The places of the parts of an artifact in its file.
struct ArtifactParts {
    /// The model table and what it points to.
    table: Range<usize>,
    /// Addresses that the loader writes into the table.
    relocations: Range<usize>,
    /// The rest of what the loader reads.
    loader: Vec<Range<usize>>,
}

/// The place of a section of the linker's, by its header.
fn place(file: &[u8], name: &str) -> Range<usize> {
    let elf = ElfFile::parse(file).unwrap();
    let found = elf.sections().find(|s| s.name == name.as_bytes()).unwrap_or_else(|| panic!("no {name}"));
    found.offset as usize..(found.offset + found.bytes) as usize
}

fn parts(file: &[u8]) -> ArtifactParts {
    let headers = ElfFile::parse(file).unwrap().segments().count() * PROGRAM_HEADER_BYTES;
    let mut loader = vec![0..HEADER_BYTES, HEADER_BYTES..HEADER_BYTES + headers];
    loader.extend([".dynamic", ".dynsym", ".dynstr", ".gnu.hash"].map(|name| place(file, name)));
    ArtifactParts { table: place(file, ".data"), relocations: place(file, ".rela.dyn"), loader }
}

/// Damages 1 to 3 places of one part, and says where.
fn damage(file: &mut [u8], parts: &ArtifactParts, random: &mut TableRandom) -> String {
    let part = match random.below(10) {
        0..6 => &parts.table,
        6..8 => &parts.relocations,
        _ => &parts.loader[random.below(parts.loader.len())],
    };
    // Fields come first, texts after them; most of the damage goes to fields.
    let fields = if random.below(4) > 0 { part.len().min(1024) } else { part.len() };
    let mut said = String::new();
    for _ in 0..1 + random.below(3) {
        let at = part.start + random.below(fields);
        let word = part.start + (at - part.start) / 8 * 8;
        if random.below(2) == 0 || word + 8 > part.end {
            file[at] ^= 1 << random.below(8);
            said += &format!("a bit of byte {at:#x}; ");
            continue;
        }
        let bytes: &mut [u8; 8] = (&mut file[word..word + 8]).try_into().unwrap();
        let old = u64::from_le_bytes(*bytes);
        let steps = [8, 64, 4096, old / 2, old, 1 << 20, 1 << 40];
        let new = match random.below(6) {
            0 => [0, 1, u64::MAX, 1 << 31, 1 << 32, 1 << 62, 1 << 63][random.below(7)],
            1 => old.wrapping_add(steps[random.below(7)]),
            2 => old.wrapping_sub(steps[random.below(7)]),
            3 => random.next(),
            4 => random.next() % (1 << 20),
            _ => old ^ (1 << random.below(64)),
        };
        *bytes = new.to_le_bytes();
        said += &format!("the word at {word:#x} from {old:#x} to {new:#x}; ");
    }
    said
}

/// Writes the hashes that the file has now. `None` where it is no ELF file any more.
fn seal(file: &mut [u8], hashes: &Range<usize>) -> Option<()> {
    let mut code = Xxh3::new();
    ElfFile::parse(file).ok()?.code_bytes(|bytes| code.update(bytes));
    let text = String::from_utf8(file[hashes.clone()].to_vec()).unwrap();
    let body = &text[..text.trim_end().rfind('\n').unwrap() + 1];
    let (head, rest) = body.split_once("\ncode ").unwrap();
    let rest = rest.split_once('\n').unwrap().1;
    let body = format!("{head}\ncode {:032x}\n{rest}", code.digest128());
    let sealed = format!("{body}self {:032x}\n", xxh3_128(body.as_bytes()));
    file[hashes.clone()].copy_from_slice(sealed.as_bytes());
    Some(())
}

/// Runs `mlcc` with little memory, not for ever.
fn run(args: &[&str]) -> Result<Output, String> {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("ulimit -c 0; ulimit -v {MEMORY_KIB}; exec \"$0\" \"$@\""));
    shell.arg(assert_cmd::cargo::cargo_bin!("mlcc")).args(args);
    let mut child = shell.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > PATIENCE {
            child.kill().unwrap();
            return Err("still busy after two minutes".into());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(child.wait_with_output().unwrap())
}

struct DamagedModel {
    good: Vec<u8>,
    golden: PathBuf,
}

fn model(name: &str, folder: &Path) -> DamagedModel {
    let path = folder.join(format!("{name}.so"));
    mlcc().arg("build").arg("-m").arg(case(name)).arg("-o").arg(&path).assert().success();
    DamagedModel { good: std::fs::read(&path).unwrap(), golden: case(name).join("golden.json") }
}

/// The fault of a case.
fn check(number: u64, models: &[DamagedModel], folder: &Path) -> Result<(), String> {
    let model = &models[number as usize % models.len()];
    let mut random = TableRandom(number);
    let mut file = model.good.clone();
    let hashes = place(&file, section::HASHES);
    let said = damage(&mut file, &parts(&model.good), &mut random);
    if seal(&mut file, &hashes).is_none() {
        return Ok(());
    }
    let path = folder.join(format!("{number}.so"));
    std::fs::write(&path, file).unwrap();
    let (path, golden) = (path.to_str().unwrap(), model.golden.to_str().unwrap());
    let result = match random.below(8) {
        0 => run(&["inspect", "--params", path]),
        _ => run(&["verify", path, "--golden", golden]),
    };
    std::fs::remove_file(path).unwrap();
    let wrong = |what: String| Err(format!("#{number}, damaged in {said}{what}"));
    let output = match result {
        Ok(output) => output,
        Err(what) => return wrong(what),
    };
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    match output.status.code() {
        None => wrong(format!("ended by signal {:?}", output.status.signal())),
        Some(0 | 1) if !message.contains("internal error") => Ok(()),
        code => wrong(format!("ended with {code:?}: {message}")),
    }
}

#[test]
fn no_damage_crashes_a_program() {
    let wanted = std::env::var(VARIABLE).unwrap_or_default();
    let cases = match wanted.strip_prefix('#') {
        Some(one) => one.parse().map(|n| n..n + 1).unwrap(),
        None => 0..wanted.parse().unwrap_or(CASES),
    };
    let folder = tempfile::tempdir().unwrap();
    let models = ["rwkv4-hf", "llama3-gqa-tied"].map(|name| model(name, folder.path()));
    let (next, wrong) = (AtomicU64::new(cases.start), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= cases.end {
                break;
            }
            if let Err(what) = check(number, &models, folder.path()) {
                wrong.lock().unwrap().push(what);
            }
        }
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(work))));
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {cases:?}:\n{}", wrong.len(), wrong.join("\n"));
}

/// Hashes that are made to fit do fit, so that the cases above are not all refused for them.
#[test]
fn a_sealed_artifact_is_as_good_as_before() {
    let folder = tempfile::tempdir().unwrap();
    let model = model("rwkv4-hf", folder.path());
    let mut file = model.good.clone();
    let hashes = place(&file, section::HASHES);
    // The compiler's name, which only messages show.
    let at = file.windows(5).position(|w| w == b"mlcc ").unwrap();
    file[at] ^= 0x20;
    let path = folder.path().join("sealed.so");
    let args = ["verify", path.to_str().unwrap(), "--golden", model.golden.to_str().unwrap()];
    std::fs::write(&path, &file).unwrap();
    assert_eq!(run(&args).unwrap().status.code(), Some(1));
    seal(&mut file, &hashes).unwrap();
    std::fs::write(&path, &file).unwrap();
    let output = run(&args).unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

//! Names of kernels for profilers, in the form that `perf` reads
//! (`tools/perf/Documentation/jit-interface.txt` of Linux): code that mlcc's own loader has mapped lies in no
//! file that `perf` knows of.

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;

use mlcc_loader::CodeImage;

/// Asks for the file by any value that is not empty.
const VARIABLE: &str = "MLCC_PERF_MAP";

/// Appends the functions of an image at `base` to `/tmp/perf-PID.map`, if the environment asks for it. A file
/// that cannot be written is no reason not to run.
pub(crate) fn append_functions(image: &CodeImage<'_>, base: *const u8) {
    if std::env::var_os(VARIABLE).is_none_or(|value| value.is_empty()) {
        return;
    }
    let mut lines = String::new();
    for function in image.functions() {
        let start = (base.addr() as u64).wrapping_add(function.address);
        let _ = writeln!(lines, "{start:x} {:x} {}", function.bytes, function.name);
    }
    // The folder is everybody's: a link of another user there is not followed.
    const O_NOFOLLOW: i32 = if cfg!(target_arch = "aarch64") { 0o100_000 } else { 0o400_000 };
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o644).custom_flags(O_NOFOLLOW);
    let name = format!("/tmp/perf-{}.map", std::process::id());
    let _ = options.open(name).and_then(|mut file| file.write_all(lines.as_bytes()));
}

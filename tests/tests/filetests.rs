//! One test per file of `filetests/`; see `mlcc_tests::filetest`. A program of its own, because it lists its
//! tests itself.

use libtest_mimic::{Arguments, Failed, Trial};
use mlcc_tests::filetest::run_file;
use std::path::{Path, PathBuf};

/// Files below `dir` that end in `.mlc`, sorted.
fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    let mut entries = std::fs::read_dir(dir)?.map(|e| Ok(e?.path())).collect::<std::io::Result<Vec<_>>>()?;
    entries.sort();
    for path in entries {
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "mlc") {
            files.push(path);
        }
    }
    Ok(())
}

fn main() {
    let arguments = Arguments::from_args();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("filetests");
    let bless = std::env::var_os("MLCC_BLESS").is_some_and(|v| v == "1");
    let mut files = Vec::new();
    if let Err(error) = collect(&root, &mut files) {
        eprintln!("cannot list {}: {error}", root.display());
        std::process::exit(2);
    }
    let trials = files.into_iter().map(|path| {
        let name = path.strip_prefix(&root).unwrap_or(&path).with_extension("");
        let name = name.to_string_lossy().replace(std::path::MAIN_SEPARATOR, "/");
        // These need LLVM.
        let ignored = name.starts_with("codegen/") && !cfg!(feature = "llvm");
        Trial::test(name, move || run_file(&path, bless).map_err(Failed::from)).with_ignored_flag(ignored)
    });
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

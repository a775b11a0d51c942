//! Artifacts of earlier versions of the ABI, and of this one (`tests/artifacts`): what a runtime promises of
//! them (docs/in-your-program.md, "Versions").

use std::path::{Path, PathBuf};

use mlcc_abi::ABI_VERSION;
use mlcc_runtime::{Error, LoadOptions, Model};

/// The first version that is kept.
const FIRST: u32 = 16;

/// Tokens that the artifact of this version is given.
const PROMPT: [i32; 6] = [3, 1, 4, 1, 5, 9];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/artifacts")
}

fn load(version: u32) -> (PathBuf, mlcc_runtime::Result<Model>) {
    let path = folder().join(format!("abi-{version}.so"));
    assert!(
        path.exists(),
        "tests/artifacts has no artifact of ABI version {version}: its README says how to make it"
    );
    let model = Model::load(&path, &LoadOptions::default());
    (path, model)
}

#[test]
fn earlier_versions_are_refused_with_the_command_that_rebuilds() {
    for version in FIRST..ABI_VERSION {
        let (path, model) = load(version);
        let error = model.err().unwrap_or_else(|| panic!("ABI version {version} loads"));
        assert!(matches!(error, Error::AbiVersion { found, .. } if found == version), "{error}");
        let command = format!(
            "mlcc build --model qwen2 --quant f32 --target x86-64-v2 --ctx-size 32 -o {}",
            path.display()
        );
        assert!(error.to_string().ends_with(&command), "{error}");
    }
}

/// Fails where the layout or a meaning has changed and the version has not.
#[test]
#[cfg(target_arch = "x86_64")]
fn this_version_gives_the_logits_that_are_kept() {
    let (path, model) = load(ABI_VERSION);
    let model = model.unwrap();
    let mut session = model.session().unwrap();
    let mut rows = session.prefill_logits(&PROMPT).unwrap().to_vec();
    rows.extend(session.decode(2).unwrap());
    let bits: Vec<u32> = rows.iter().map(|x| x.to_bits()).collect();
    let file = path.with_extension("logits");
    if std::env::var_os("MLCC_BLESS").is_some_and(|v| v == "1") {
        let lines: String = bits.iter().map(|bits| format!("{bits:08x}\n")).collect();
        std::fs::write(&file, lines).unwrap();
    }
    let kept = std::fs::read_to_string(&file).unwrap();
    let kept: Vec<u32> = kept.lines().map(|line| u32::from_str_radix(line, 16).unwrap()).collect();
    assert_eq!(bits, kept);
}

//! The artifact file: bytes, sections, strip, split weights, damage of every kind.

use crate::toy;
use std::path::Path;
use std::process::Command;

use mlcc_abi::section;
use mlcc_codegen::artifact::{ArtifactError, ArtifactWriter, WeightDestination};
use mlcc_runtime::{Artifact, Error, LoadOptions, Model};

fn load(path: &Path) -> Result<Model, Error> {
    Model::load(path, &LoadOptions { threads: Some(1), verify_hashes: true, ..LoadOptions::default() })
}

fn check(path: &Path) {
    let model = load(path).unwrap();
    assert_eq!(model.session().unwrap().prefill(&[1, 2, 3]).unwrap(), toy::reference(&[1, 2, 3])[2]);
    assert_eq!(model.tokenizer(), Some(&b"abc"[..]));
    assert_eq!(model.metadata(), "{\"model\":\"toy\"}");
    assert_eq!(model.table().params[0].name, "embedding");
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    names
}

#[test]
fn sections_are_aligned_hashed_and_equal_in_each_build() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = toy::artifact(folder.path(), &[]);
    let first = std::fs::read(&path).unwrap();
    let artifact = Artifact::open(&path).unwrap();
    let list: Vec<&str> = artifact.sections().iter().map(|s| s.name.as_str()).collect();
    assert_eq!(list, [section::METADATA, section::WEIGHTS, section::TOKENIZER, section::HASHES]);
    assert!(artifact.sections().iter().all(|s| s.offset % mlcc_abi::SECTION_ALIGN == 0));
    assert_eq!(artifact.section(section::WEIGHTS), Some(&toy::weights()[..]));
    assert_eq!(artifact.metadata(), Some("{\"model\":\"toy\"}"));
    artifact.verify(u64::MAX).unwrap();
    toy::artifact(folder.path(), &[]);
    assert!(first == std::fs::read(&path).unwrap(), "two builds differ");
    check(&path);
}

#[test]
fn strip_keeps_the_payload() {
    if !toy::can_compile() {
        return;
    }
    if Command::new("strip").arg("--version").output().is_err() {
        eprintln!("skipped: no `strip` on this machine");
        return;
    }
    for flags in [&["-g"][..], &["-Wl,--build-id=sha1", "-g"][..]] {
        let folder = tempfile::tempdir().unwrap();
        let path = toy::artifact(folder.path(), flags);
        let before = std::fs::metadata(&path).unwrap().len();
        let done = Command::new("strip").arg(&path).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        assert!(std::fs::metadata(&path).unwrap().len() < before, "nothing was stripped");
        check(&path);
    }
}

#[test]
fn split_weights_are_safetensors_and_belong_together() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (so, beside) = (folder.path().join("toy.so"), folder.path().join("toy.safetensors"));
    let linked = toy::linked(folder.path(), &[]);
    toy::pack(&linked, &so, toy::split(folder.path()));
    check(&so);
    assert_eq!(Artifact::open(&so).unwrap().weights_file(), Some(&*beside));

    let file = std::fs::read(&beside).unwrap();
    let header_bytes = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    assert_eq!((8 + header_bytes) % 4096, 0);
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + header_bytes]).unwrap();
    assert_eq!(header["embedding"]["data_offsets"], serde_json::json!([0, 96]));
    assert_eq!(header["odd \"name\""]["data_offsets"], serde_json::json!([96, 160]));
    assert_eq!(file[8 + header_bytes..], toy::weights());

    std::fs::write(&beside, &file[..file.len() - 1]).unwrap();
    assert!(load(&so).is_err_and(|e| e.to_string().contains("bytes, not")));
    let mut other = file.clone();
    let hash_at = file.windows(8).position(|w| w == b"xxh3_128").unwrap() + 11;
    other[hash_at] = if other[hash_at] == b'0' { b'1' } else { b'0' };
    std::fs::write(&beside, &other).unwrap();
    assert!(load(&so).is_err_and(|e| e.to_string().contains("another build")));
    let mut damaged = file.clone();
    *damaged.last_mut().unwrap() ^= 1;
    std::fs::write(&beside, &damaged).unwrap();
    assert!(matches!(load(&so), Err(Error::Corrupt { path, .. }) if path == beside));
    std::fs::remove_file(&beside).unwrap();
    let missing = load(&so).err().unwrap().to_string();
    assert!(missing.contains("toy.safetensors") && missing.contains("together"), "{missing}");
}

/// Weights that are made on load are those that were promised, or the artifact is refused.
#[test]
fn made_weights_are_held_against_their_hash() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let linked = toy::linked(folder.path(), &[]);
    let path = folder.path().join("a.so");
    let weights = toy::weights();
    let digits: String = weights.iter().map(|byte| format!("{byte:02x}")).collect();
    let recipe = format!("mlcc-recipe 1 0 {}\nbytes 0 {digits}\n", weights.len());
    let write = |recipe: Option<&str>, bytes: usize, hash: u128| {
        let mut writer = ArtifactWriter::create(&path, &linked, WeightDestination::Inside).unwrap();
        writer.write_section(section::METADATA, b"{\"model\":\"toy\"}").unwrap();
        writer.write_section(section::TOKENIZER, b"abc").unwrap();
        if let Some(recipe) = recipe {
            writer.write_section(section::RECIPE, recipe.as_bytes()).unwrap();
        }
        writer.add_generated_section(section::WEIGHTS, bytes as u64, hash);
        writer.finish().unwrap();
    };
    let hash = mlcc_runtime::weight_generator::WeightGenerator::parse(recipe.as_bytes()).unwrap().hash();
    write(Some(&recipe), weights.len(), hash);
    check(&path);
    assert_eq!(Artifact::open(&path).unwrap().section(section::WEIGHTS), None);
    let refused = |why: &str| {
        let error = load(&path).err().unwrap();
        assert!(matches!(error, Error::Corrupt { .. }) && error.to_string().contains(why), "{error}");
    };
    write(Some(&recipe), weights.len(), hash ^ 1);
    refused("the hash of its section .mlcc.weights does not match");
    write(Some(&recipe), weights.len() + 1, hash);
    refused("its recipe makes 160 bytes of weights, not 161");
    write(Some("mlcc-recipe 1 0 160\nwhat\n"), weights.len(), hash);
    refused("unknown line in its recipe: `what`");
    write(None, weights.len(), hash);
    refused("it has no recipe for .mlcc.weights");
    let few = "mlcc-recipe 1 0 8\nbytes 0 0000000000000000\n";
    write(
        Some(few),
        8,
        mlcc_runtime::weight_generator::WeightGenerator::parse(few.as_bytes()).unwrap().hash(),
    );
    refused("its weights have 8 bytes, its table says 160");
}

#[test]
fn nothing_half_written_stays() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let linked = toy::linked(folder.path(), &[]);
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("a.so");
    let mut writer = ArtifactWriter::create(&path, &linked, toy::split(out.path())).unwrap();
    writer.write_section(section::WEIGHTS, &[1; 100]).unwrap();
    assert_eq!(names(out.path()).len(), 2, "two temporary files");
    drop(writer);
    assert!(names(out.path()).is_empty(), "{:?}", names(out.path()));

    // Too few weights for the plan of the split file: an error, and again nothing.
    let mut writer = ArtifactWriter::create(&path, &linked, toy::split(out.path())).unwrap();
    writer.write_section(section::WEIGHTS, &[1; 100]).unwrap();
    assert!(matches!(writer.finish(), Err(ArtifactError::Misuse(_))));
    assert!(names(out.path()).is_empty());

    // A killed build's leftover goes with the next build; that of a living process stays.
    let dead = out.path().join(".a.so.4194304999.0.partial");
    let alive = out.path().join(".a.so.1.0.partial");
    std::fs::write(&dead, "x").unwrap();
    std::fs::write(&alive, "x").unwrap();
    ArtifactWriter::create(&path, &linked, WeightDestination::Inside).unwrap().finish().unwrap();
    assert_eq!(names(out.path()), [".a.so.1.0.partial", "a.so"]);
}

#[test]
fn the_writer_refuses_misuse_and_bad_places() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let linked = toy::linked(folder.path(), &[]);
    let path = folder.path().join("a.so");
    let mut writer = ArtifactWriter::create(&path, &linked, WeightDestination::Inside).unwrap();
    assert!(writer.write(b"x").is_err() && writer.end_section().is_err());
    for name in ["weights", ".mlcc.a b", section::HASHES] {
        assert!(matches!(writer.begin_section(name), Err(ArtifactError::Misuse(_))), "{name}");
    }
    writer.write_section(section::CHAT, b"x").unwrap();
    assert!(writer.begin_section(section::CHAT).is_err(), "twice");
    writer.begin_section(section::GOLDEN).unwrap();
    assert!(writer.begin_section(section::WEIGHTS).is_err(), "nested");

    let create =
        |path: &Path| ArtifactWriter::create(path, &linked, WeightDestination::Inside).err().unwrap();
    assert!(matches!(create(&folder.path().join("none/a.so")), ArtifactError::NoFolder { .. }));
    assert!(matches!(create(folder.path()), ArtifactError::Io { .. }));
    if Path::new("/sys/kernel").is_dir() {
        // Refuses even root.
        assert!(matches!(create(Path::new("/sys/kernel/a.so")), ArtifactError::NotWritable { .. }));
    }
    let text = folder.path().join("text");
    std::fs::write(&text, "no ELF file at all").unwrap();
    let refused = ArtifactWriter::create(&path, &text, WeightDestination::Inside).err().unwrap();
    assert!(matches!(refused, ArtifactError::Linked { .. }));
}

#[test]
fn imports_are_refused() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (source, so) = (folder.path().join("a.c"), folder.path().join("a.so"));
    std::fs::write(&source, "float expf(float); float f(float x) { return expf(x); }").unwrap();
    let refused = |flags: &[&str]| {
        toy::cc(&source, &so, flags);
        let out = folder.path().join("out.so");
        ArtifactWriter::create(&out, &so, WeightDestination::Inside).err().unwrap().to_string()
    };
    assert!(refused(&["-nostdlib", "-fno-builtin"]).contains("needs expf"));
    assert!(refused(&["-Wl,--no-as-needed", "-lc"]).contains("libc.so"));
}

#[test]
fn foreign_files_are_refused() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.so");
    assert!(matches!(load(&path), Err(Error::Io { action: "open", .. })));
    assert!(matches!(load(folder.path()), Err(Error::Io { action: "open", .. })));
    for (content, expected) in [(&b""[..], "truncated"), (b"hello", "not an ELF"), (b"\x7fELF", "truncated")]
    {
        std::fs::write(&path, content).unwrap();
        let error = load(&path).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let linked = toy::linked(folder.path(), &[]);
    assert!(matches!(load(&linked), Err(Error::NotArtifact { .. })));

    let folder = tempfile::tempdir().unwrap();
    let abi = toy::artifact(folder.path(), &["-DTOY_ABI=99"]);
    let error = load(&abi).err().unwrap();
    assert!(
        matches!(&error, Error::AbiVersion { found: 99, expected: mlcc_abi::ABI_VERSION, compiler, .. } if compiler == "toy 1")
    );

    // The same file for another machine: refused before the dynamic loader sees it.
    let folder = tempfile::tempdir().unwrap();
    let linked = toy::linked(folder.path(), &[]);
    let mut bytes = std::fs::read(&linked).unwrap();
    bytes[18..20].copy_from_slice(&243u16.to_le_bytes());
    std::fs::write(&linked, bytes).unwrap();
    let riscv = folder.path().join("riscv.so");
    toy::pack(&linked, &riscv, WeightDestination::Inside);
    let error = load(&riscv).err().unwrap().to_string();
    assert!(error.contains("ELF machine 243"), "{error}");
    assert_eq!(Artifact::open(&riscv).unwrap().section(section::TOKENIZER), Some(&b"abc"[..]));
}

#[test]
fn truncation_anywhere_is_an_error() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let good = std::fs::read(toy::artifact(folder.path(), &[])).unwrap();
    let cut = folder.path().join("cut.so");
    let lengths = (0..good.len()).step_by(97).chain([63, 64, 4096, good.len() - 1]);
    for n in lengths {
        std::fs::write(&cut, &good[..n]).unwrap();
        let error = load(&cut).err().unwrap_or_else(|| panic!("loads when cut at {n}"));
        assert!(matches!(error, Error::Elf { .. }), "cut at {n}: {error}");
    }
}

/// Flips bytes all over the file. Either it is found, or the byte means nothing (padding, the linker's old
/// table).
#[test]
fn flipped_bytes_are_found_or_harmless() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = toy::artifact(folder.path(), &[]);
    let good = std::fs::read(&path).unwrap();
    let payload: Vec<_> = Artifact::open(&path).unwrap().sections().to_vec();
    let bad = folder.path().join("bad.so");
    let headers_at = u64::from_le_bytes(good[40..48].try_into().unwrap()) as usize;
    let places = (0..good.len()).step_by(131).chain(0..64).chain((headers_at..good.len()).step_by(7));
    let mut found = 0;
    for at in places {
        let mut bytes = good.clone();
        bytes[at] ^= 0x10;
        std::fs::write(&bad, &bytes).unwrap();
        let inside = payload.iter().any(|s| (s.offset..s.offset + s.bytes).contains(&(at as u64)));
        match load(&bad) {
            Err(_) => found += 1,
            Ok(model) => {
                assert!(!inside, "byte {at} of the payload was flipped unnoticed");
                assert_eq!(model.session().unwrap().decode(1).unwrap(), toy::reference(&[1])[0], "byte {at}");
            }
        }
    }
    assert!(found > 100);
}

/// The part of `a_full_disk_leaves_nothing` that runs inside a file system of 256 KiB; nothing in the plain
/// test run.
#[test]
fn child_on_a_full_disk() {
    let Some(folder) = std::env::var_os("MLCC_TEST_FULL_DISK") else { return };
    let (folder, linked) = (Path::new(&folder), std::env::var("MLCC_TEST_LINKED").unwrap());
    for bytes in [200_000, 5_000_000] {
        let path = folder.join("a.so");
        let mut writer = ArtifactWriter::create(&path, linked.as_ref(), WeightDestination::Inside).unwrap();
        let written = writer.write_section(section::WEIGHTS, &vec![7; bytes]);
        let written = written.and_then(|()| writer.write_section(section::GOLDEN, &vec![7; bytes]));
        let error = match written {
            Ok(()) => writer.finish().err().unwrap(),
            Err(error) => {
                drop(writer);
                error
            }
        };
        assert!(matches!(error, ArtifactError::NoSpace { .. }), "{error}");
        assert!(names(folder).is_empty(), "{:?}", names(folder));
    }
    println!("child ran");
}

#[test]
fn a_full_disk_leaves_nothing() {
    if !toy::can_compile() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let linked = toy::linked(folder.path(), &[]);
    let small = folder.path().join("small");
    std::fs::create_dir(&small).unwrap();
    // A mount namespace of its own: the small file system exists for the child only.
    let script = "mount -t tmpfs -o size=256k none \"$MLCC_TEST_FULL_DISK\" || exit 99; \
                  exec \"$0\" --exact artifact::child_on_a_full_disk --nocapture";
    let out = Command::new("unshare")
        .args(["--mount", "--map-root-user", "sh", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .env("MLCC_TEST_FULL_DISK", &small)
        .env("MLCC_TEST_LINKED", linked)
        .output();
    match out {
        Ok(out) if String::from_utf8_lossy(&out.stdout).contains("child ran") => {}
        Ok(out) if out.status.code() == Some(101) => panic!("{}", String::from_utf8_lossy(&out.stderr)),
        _ => eprintln!("skipped: this machine does not allow a private tmpfs (unshare, mount)"),
    }
}

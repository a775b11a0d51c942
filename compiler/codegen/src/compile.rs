//! From a lowered model to a linked shared library.

#[cfg(feature = "cranelift")]
use crate::clif;
use crate::error::CodegenError;
use crate::launch::device_entries;
use crate::link::find_linker;
#[cfg(feature = "llvm")]
use crate::llvm::{self, Output};
use crate::model::{Input, LevelInput, Limits, variant};
use crate::table::{ImageDesc, TableDesc};
use mlcc_abi as abi;
use mlcc_target::{Arch, DeviceScope, Level, Spec};
use std::path::{Path, PathBuf};

/// A linked `.so` in a temporary folder that lives as long as this value.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    _folder: crate::folder::TemporaryFolder,
}

impl Library {
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A product of code generation before linking.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// The level's name, or `table`.
    pub name: String,
    pub bytes: Vec<u8>,
}

/// Compiles with LLVM and links. `soname` is recorded in the library; give the artifact's file name.
#[cfg(feature = "llvm")]
pub fn compile(input: &Input<'_>, soname: &str) -> Result<Library, CodegenError> {
    let (table, mut parts) = generate(input, |level| llvm_code(input, level, Output::Object))?;
    // Device code is inside the table.
    if input.target.arch == Arch::Nvptx {
        parts.clear();
    }
    parts.push(table_part(input, &table, Output::Object)?);
    link(&parts, host_arch(input)?, soname)
}

/// The same with Cranelift, which knows CPU targets only.
#[cfg(feature = "cranelift")]
pub fn compile_with_cranelift(input: &Input<'_>, soname: &str) -> Result<Library, CodegenError> {
    let arch = input.target.arch;
    let limits = Limits::of(&input.table);
    let (table, mut parts) =
        generate(input, |level| clif::level_object(arch, level, &input.table.states, limits))?;
    let spec = host_spec(input)?;
    let bytes = clif::table_object(arch, &spec.levels[0], &table.image())?;
    parts.push(Part { name: "table".into(), bytes });
    link(&parts, arch, soname)
}

/// The parts as text or objects, for `--emit`: one per level (LLVM IR, assembly or PTX, object), and the table.
#[cfg(feature = "llvm")]
pub fn emit(input: &Input<'_>, output: Output) -> Result<Vec<Part>, CodegenError> {
    let (table, mut parts) = generate(input, |level| llvm_code(input, level, output))?;
    parts.push(table_part(input, &table, output)?);
    Ok(parts)
}

/// Links objects into a library.
pub fn link(parts: &[Part], arch: Arch, soname: &str) -> Result<Library, CodegenError> {
    let linker = find_linker(arch)?;
    let folder = crate::folder::temporary("mlcc-link-").map_err(|source| CodegenError::Io {
        action: "create a temporary folder in",
        path: std::env::temp_dir(),
        source,
    })?;
    let mut objects = Vec::new();
    for (i, part) in parts.iter().enumerate() {
        let path = folder.path().join(format!("{i}.o"));
        std::fs::write(&path, &part.bytes).map_err(|source| CodegenError::Io {
            action: "write",
            path: path.clone(),
            source,
        })?;
        objects.push(path);
    }
    let path = folder.path().join("linked.so");
    linker.link(&objects, soname, &path)?;
    Ok(Library { path, _folder: folder })
}

/// Code of every level, in parallel, and the completed table.
fn generate(
    input: &Input<'_>,
    code: impl Fn(&LevelInput<'_>) -> Result<Vec<u8>, CodegenError> + Sync,
) -> Result<(TableDesc, Vec<Part>), CodegenError> {
    let mut table = input.table.clone();
    let gpu = input.target.arch == Arch::Nvptx;
    let code = &code;
    let results: Vec<Result<Vec<u8>, CodegenError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = input.levels.iter().map(|level| scope.spawn(move || code(level))).collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let mut parts = Vec::new();
    for (level, bytes) in input.levels.iter().zip(results) {
        let bytes = bytes?;
        match &level.level.gpu {
            Some(gpu) => {
                table.images.push(ImageDesc {
                    kind: "ptx".into(),
                    sm: gpu.sm,
                    scope: device_scope(level.level),
                    bytes: bytes.clone(),
                });
            }
            None => table.variants.push(variant(level)?),
        }
        parts.push(Part { name: level.level.name.clone(), bytes });
    }
    let limits = Limits::of(&input.table);
    if gpu && let Some(level) = input.levels.first() {
        table.device_entries = device_entries(level.steps, level.kernels, limits)?;
    }
    Ok((table, parts))
}

fn device_scope(level: &Level) -> u32 {
    match level.device_scope() {
        DeviceScope::Later => abi::device_scope::LATER,
        DeviceScope::Exact => abi::device_scope::EXACT,
        DeviceScope::Family => abi::device_scope::FAMILY,
    }
}

/// For a GPU, objects are PTX text as well.
#[cfg(feature = "llvm")]
fn llvm_code(input: &Input<'_>, level: &LevelInput<'_>, output: Output) -> Result<Vec<u8>, CodegenError> {
    let target = input.target;
    match (target.arch, output) {
        (Arch::Nvptx, Output::Object) => llvm::ptx_module(&target.triple, level, Output::Assembly),
        (Arch::Nvptx, _) => llvm::ptx_module(&target.triple, level, output),
        (arch, _) => {
            let limits = Limits::of(&input.table);
            llvm::level_module(arch, &target.triple, level, &input.table.states, limits, output)
        }
    }
}

#[cfg(feature = "llvm")]
fn table_part(input: &Input<'_>, table: &TableDesc, output: Output) -> Result<Part, CodegenError> {
    let spec = host_spec(input)?;
    let weakest = &spec.levels[0];
    let bytes = llvm::table_object(spec.arch, &spec.triple, weakest, &table.image(), output)?;
    Ok(Part { name: "table".into(), bytes })
}

#[cfg(feature = "llvm")]
fn host_arch(input: &Input<'_>) -> Result<Arch, CodegenError> {
    Ok(host_spec(input)?.arch)
}

/// The CPU side of the artifact: the target itself, or for a GPU this machine.
fn host_spec(input: &Input<'_>) -> Result<Spec, CodegenError> {
    let arch = match input.target.arch {
        Arch::Nvptx => Arch::of_host(),
        arch => Some(arch),
    };
    let specs = mlcc_target::specs().map_err(mlcc_target::TargetError::from)?;
    let found = specs.into_iter().find(|s| Some(s.arch) == arch && !s.levels.is_empty());
    found.ok_or_else(|| CodegenError::NoHost { arch: std::env::consts::ARCH.into() })
}

//! From a lowered model to a linked shared library.

use crate::cache::ObjectCache;
#[cfg(feature = "cranelift")]
use crate::clif;
use crate::error::CodegenError;
use crate::link::find_linker;
#[cfg(feature = "llvm")]
use crate::llvm::{self, Output};
use crate::model::{Input, Limits, variant};
use crate::objects::{CodeListener, Made, Objects};
use crate::table::TableDesc;
use crate::units::{Generator, LevelUnits, StateUnits, compile_units};
#[cfg(feature = "llvm")]
use crate::{launch::device_entries, pool, ptxas::assemble_for, table::ImageDesc};
#[cfg(feature = "llvm")]
use mlcc_abi as abi;
use mlcc_target::{Arch, Spec};
#[cfg(feature = "llvm")]
use mlcc_target::{DeviceScope, Level};
use std::path::{Path, PathBuf};

/// A linked `.so` in a temporary folder that lives as long as this value.
#[derive(Debug)]
pub struct Library {
    path: PathBuf,
    objects: Made,
    _folder: crate::folder::TemporaryFolder,
}

impl Library {
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// What was compiled for it.
    pub fn objects(&self) -> Made {
        self.objects
    }
}

/// A product of code generation before linking.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// The level's name, or `table`.
    pub name: String,
    pub bytes: Vec<u8>,
}

/// How objects are made. What comes of it does not depend on this.
#[derive(Debug)]
pub struct Jobs {
    pub threads: usize,
    /// Takes objects from there, and keeps new ones.
    pub cache: Option<ObjectCache>,
    pub listener: Option<CodeListener>,
}

impl Default for Jobs {
    /// A thread for each core.
    fn default() -> Jobs {
        Jobs {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            cache: None,
            listener: None,
        }
    }
}

/// Compiles with LLVM and links. `soname` is recorded in the library; give the artifact's file name.
#[cfg(feature = "llvm")]
pub fn compile(input: &Input<'_>, soname: &str) -> Result<Library, CodegenError> {
    compile_by(input, soname, &Jobs::default())
}

/// The same in other circumstances.
#[cfg(feature = "llvm")]
pub fn compile_by(input: &Input<'_>, soname: &str, jobs: &Jobs) -> Result<Library, CodegenError> {
    // Device code is inside the table.
    let objects = Objects::new(jobs.cache.as_ref(), jobs.listener.as_ref());
    let (table, mut parts) = if input.target.arch == Arch::Nvptx {
        (images(input, Output::Assembly, jobs, &objects)?.0, Vec::new())
    } else {
        (cpu_table(input)?, level_parts(input, &generator(input), jobs, &objects)?)
    };
    parts.push(table_part(input, &table, Output::Object)?);
    let library = link(&parts, host_arch(input)?, soname)?;
    Ok(Library { objects: objects.finish(), ..library })
}

/// The same with Cranelift, which knows CPU targets only.
#[cfg(feature = "cranelift")]
pub fn compile_with_cranelift(input: &Input<'_>, soname: &str) -> Result<Library, CodegenError> {
    compile_with_cranelift_by(input, soname, &Jobs::default())
}

#[cfg(feature = "cranelift")]
pub fn compile_with_cranelift_by(
    input: &Input<'_>,
    soname: &str,
    jobs: &Jobs,
) -> Result<Library, CodegenError> {
    let arch = input.target.arch;
    let generator = clif::Cranelift { arch, limits: Limits::of(&input.table) };
    let objects = Objects::new(jobs.cache.as_ref(), jobs.listener.as_ref());
    let mut parts = level_parts(input, &generator, jobs, &objects)?;
    let spec = host_spec(input)?;
    let bytes = clif::table_object(arch, &spec.levels[0], &cpu_table(input)?.image())?;
    parts.push(Part { name: "table".into(), bytes });
    let library = link(&parts, arch, soname)?;
    Ok(Library { objects: objects.finish(), ..library })
}

/// The code as text or objects, for `--emit`: one part per level (LLVM IR, assembly or PTX, object), and the table.
#[cfg(feature = "llvm")]
pub fn emit(input: &Input<'_>, output: Output) -> Result<Vec<Part>, CodegenError> {
    let jobs = Jobs::default();
    let (table, mut parts) = if input.target.arch == Arch::Nvptx {
        let text = if output == Output::Object { Output::Assembly } else { output };
        images(input, text, &jobs, &Objects::new(None, None))?
    } else {
        let generator = generator(input);
        let state = StateUnits::new(&input.table.states)?;
        let mut parts = Vec::new();
        for level in &input.levels {
            let bytes = generator.level_text(&LevelUnits::new(level, &state)?, output, jobs.threads)?;
            parts.push(Part { name: level.level.name.clone(), bytes });
        }
        (cpu_table(input)?, parts)
    };
    parts.push(table_part(input, &table, output)?);
    Ok(parts)
}

#[cfg(feature = "llvm")]
fn generator<'a>(input: &Input<'a>) -> llvm::Llvm<'a> {
    let target = input.target;
    llvm::Llvm { arch: target.arch, triple: &target.triple, limits: Limits::of(&input.table) }
}

/// The objects of all CPU levels.
fn level_parts(
    input: &Input<'_>,
    generator: &impl Generator,
    jobs: &Jobs,
    objects: &Objects<'_>,
) -> Result<Vec<Part>, CodegenError> {
    let state = StateUnits::new(&input.table.states)?;
    let levels = input.levels.iter().map(|level| LevelUnits::new(level, &state));
    let levels = levels.collect::<Result<Vec<_>, _>>()?;
    let all = compile_units(&levels, generator, jobs.threads, objects)?;
    let part = |(i, bytes)| Part { name: format!("{i}"), bytes };
    Ok(all.into_iter().enumerate().map(part).collect())
}

/// The table with its levels.
fn cpu_table(input: &Input<'_>) -> Result<TableDesc, CodegenError> {
    let mut table = input.table.clone();
    for level in &input.levels {
        table.variants.push(variant(level)?);
    }
    Ok(table)
}

/// Text of every GPU level, with machine code where that is wanted, and the table with them.
#[cfg(feature = "llvm")]
fn images(
    input: &Input<'_>,
    output: Output,
    jobs: &Jobs,
    objects: &Objects<'_>,
) -> Result<(TableDesc, Vec<Part>), CodegenError> {
    let triple = &input.target.triple;
    let order: Vec<usize> = (0..input.levels.len()).collect();
    let text = |i: usize| llvm::ptx_text(triple, &input.levels[i], output, objects);
    let keys = objects.run(jobs.threads, &order, text)?;
    let machine_code = |i: usize| -> Result<Option<Vec<u8>>, CodegenError> {
        let Some(assembler) = input.assembler.filter(|_| output == Output::Assembly) else { return Ok(None) };
        let (text, arch) = (objects.get(&keys[i]), &input.levels[i].level.name);
        Ok(Some(assemble_for(&assembler.path, &text, arch)?.cubin))
    };
    let cubins = pool::run(jobs.threads, &order, machine_code)?;
    let mut table = input.table.clone();
    let mut parts = Vec::new();
    for ((level, key), cubin) in input.levels.iter().map(|input| input.level).zip(&keys).zip(cubins) {
        let bytes = objects.get(key);
        let sm = level.gpu.as_ref().map_or(0, |gpu| gpu.sm);
        let scope = device_scope(level);
        table.images.push(ImageDesc { kind: "ptx".into(), sm, scope, bytes: bytes.clone() });
        table.images.extend(cubin.map(|bytes| ImageDesc { kind: "cubin".into(), sm, scope, bytes }));
        parts.push(Part { name: level.name.clone(), bytes });
    }
    if let Some(level) = input.levels.first() {
        table.device_entries = device_entries(level.steps, level.kernels, Limits::of(&input.table))?;
    }
    Ok((table, parts))
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
    Ok(Library { path, objects: Made::default(), _folder: folder })
}

#[cfg(feature = "llvm")]
fn device_scope(level: &Level) -> u32 {
    match level.device_scope() {
        DeviceScope::Later => abi::device_scope::LATER,
        DeviceScope::Exact => abi::device_scope::EXACT,
        DeviceScope::Family => abi::device_scope::FAMILY,
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

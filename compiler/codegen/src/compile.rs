//! Code generation, from a lowered model to a linked shared library.

use crate::cache::ObjectCache;
#[cfg(feature = "cranelift")]
use crate::clif;
use crate::error::CodegenError;
use crate::link::find_linker;
#[cfg(feature = "llvm")]
use crate::llvm::{self, EmitFormat};
use crate::model::{CodegenInput, EntryLimits, level_variant};
use crate::objects::{CodeListener, ObjectCounts, ObjectStore};
use crate::table::TableDesc;
use crate::units::{CodeGenerator, LevelUnits, StateUnits, compile_units};
#[cfg(feature = "llvm")]
use crate::{launch::device_entries, pool, ptxas::assemble_for, table::ImageDesc};
#[cfg(feature = "llvm")]
use mlcc_abi as abi;
use mlcc_target::{Arch, TargetSpec};
#[cfg(feature = "llvm")]
use mlcc_target::{DeviceScope, FeatureLevel};
use std::path::{Path, PathBuf};

/// A linked `.so` in a temporary folder that lives as long as this value.
#[derive(Debug)]
pub struct LinkedLibrary {
    path: PathBuf,
    objects: ObjectCounts,
    _folder: crate::folder::TemporaryFolder,
}

impl LinkedLibrary {
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// The number of objects that were compiled for it.
    pub fn object_counts(&self) -> ObjectCounts {
        self.objects
    }
}

/// A product of code generation before linking.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GeneratedCode {
    /// The level's name, or `table`.
    pub name: String,
    pub bytes: Vec<u8>,
}

/// Settings of the compilation. The objects do not depend on them.
#[derive(Debug)]
pub struct CompileJobs {
    pub threads: usize,
    /// Takes objects from there, and keeps new ones.
    pub cache: Option<ObjectCache>,
    pub listener: Option<CodeListener>,
}

impl Default for CompileJobs {
    /// A thread for each core.
    fn default() -> CompileJobs {
        CompileJobs {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            cache: None,
            listener: None,
        }
    }
}

/// Compiles with LLVM and links. `soname` is recorded in the library; give the artifact's file name.
#[cfg(feature = "llvm")]
pub fn compile(input: &CodegenInput<'_>, soname: &str) -> Result<LinkedLibrary, CodegenError> {
    compile_with_jobs(input, soname, &CompileJobs::default())
}

/// The same in other circumstances.
#[cfg(feature = "llvm")]
pub fn compile_with_jobs(
    input: &CodegenInput<'_>,
    soname: &str,
    jobs: &CompileJobs,
) -> Result<LinkedLibrary, CodegenError> {
    // Device code is inside the table.
    let objects = ObjectStore::new(jobs.cache.as_ref(), jobs.listener.as_ref());
    let (table, mut parts) = if input.target.arch == Arch::Nvptx {
        (compile_images(input, EmitFormat::Assembly, jobs, &objects)?.0, Vec::new())
    } else {
        (cpu_table(input)?, level_parts(input, &llvm_generator(input), jobs, &objects)?)
    };
    parts.push(table_part(input, &table, EmitFormat::Object)?);
    let library = link(&parts, host_arch(input)?, soname)?;
    Ok(LinkedLibrary { objects: objects.finish(), ..library })
}

/// The same with Cranelift, which knows CPU targets only.
#[cfg(feature = "cranelift")]
pub fn compile_with_cranelift(input: &CodegenInput<'_>, soname: &str) -> Result<LinkedLibrary, CodegenError> {
    compile_with_cranelift_jobs(input, soname, &CompileJobs::default())
}

#[cfg(feature = "cranelift")]
pub fn compile_with_cranelift_jobs(
    input: &CodegenInput<'_>,
    soname: &str,
    jobs: &CompileJobs,
) -> Result<LinkedLibrary, CodegenError> {
    let arch = input.target.arch;
    let generator = clif::CraneliftGenerator { arch, limits: EntryLimits::from_table(&input.table) };
    let objects = ObjectStore::new(jobs.cache.as_ref(), jobs.listener.as_ref());
    let mut parts = level_parts(input, &generator, jobs, &objects)?;
    let spec = host_spec(input)?;
    let bytes = clif::table_object(arch, &spec.levels[0], &cpu_table(input)?.lay_out())?;
    parts.push(GeneratedCode { name: "table".into(), bytes });
    let library = link(&parts, arch, soname)?;
    Ok(LinkedLibrary { objects: objects.finish(), ..library })
}

/// The code as text or objects, for `--emit`: one part per level (LLVM IR, assembly or PTX, object), and the
/// table.
#[cfg(feature = "llvm")]
pub fn emit(input: &CodegenInput<'_>, output: EmitFormat) -> Result<Vec<GeneratedCode>, CodegenError> {
    let jobs = CompileJobs::default();
    let (table, mut parts) = if input.target.arch == Arch::Nvptx {
        let text = if output == EmitFormat::Object { EmitFormat::Assembly } else { output };
        compile_images(input, text, &jobs, &ObjectStore::new(None, None))?
    } else {
        let generator = llvm_generator(input);
        let state = StateUnits::new(&input.table.states)?;
        let mut parts = Vec::new();
        for level in &input.levels {
            let bytes = generator.level_text(&LevelUnits::new(level, &state)?, output, jobs.threads)?;
            parts.push(GeneratedCode { name: level.level.name.clone(), bytes });
        }
        (cpu_table(input)?, parts)
    };
    parts.push(table_part(input, &table, output)?);
    Ok(parts)
}

#[cfg(feature = "llvm")]
fn llvm_generator<'a>(input: &CodegenInput<'a>) -> llvm::LlvmGenerator<'a> {
    let target = input.target;
    llvm::LlvmGenerator {
        arch: target.arch,
        triple: &target.triple,
        limits: EntryLimits::from_table(&input.table),
    }
}

/// The objects of all CPU levels.
fn level_parts(
    input: &CodegenInput<'_>,
    generator: &impl CodeGenerator,
    jobs: &CompileJobs,
    objects: &ObjectStore<'_>,
) -> Result<Vec<GeneratedCode>, CodegenError> {
    let state = StateUnits::new(&input.table.states)?;
    let levels = input.levels.iter().map(|level| LevelUnits::new(level, &state));
    let levels = levels.collect::<Result<Vec<_>, _>>()?;
    let all = compile_units(&levels, generator, jobs.threads, objects)?;
    let part = |(i, bytes)| GeneratedCode { name: format!("{i}"), bytes };
    Ok(all.into_iter().enumerate().map(part).collect())
}

/// The table with its levels.
fn cpu_table(input: &CodegenInput<'_>) -> Result<TableDesc, CodegenError> {
    let mut table = input.table.clone();
    for level in &input.levels {
        table.variants.push(level_variant(level)?);
    }
    Ok(table)
}

/// Text of every GPU level, with machine code where it is requested, and the table with them.
#[cfg(feature = "llvm")]
fn compile_images(
    input: &CodegenInput<'_>,
    output: EmitFormat,
    jobs: &CompileJobs,
    objects: &ObjectStore<'_>,
) -> Result<(TableDesc, Vec<GeneratedCode>), CodegenError> {
    let triple = &input.target.triple;
    let order: Vec<usize> = (0..input.levels.len()).collect();
    let text = |i: usize| llvm::ptx_text(triple, &input.levels[i], output, objects);
    let keys = objects.run(jobs.threads, &order, text)?;
    let machine_code = |i: usize| -> Result<Option<Vec<u8>>, CodegenError> {
        let Some(assembler) = input.assembler.filter(|_| output == EmitFormat::Assembly) else {
            return Ok(None);
        };
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
        parts.push(GeneratedCode { name: level.name.clone(), bytes });
    }
    if let Some(level) = input.levels.first() {
        table.device_entries =
            device_entries(level.steps, level.kernels, EntryLimits::from_table(&input.table))?;
    }
    Ok((table, parts))
}

/// Links objects into a library.
pub fn link(parts: &[GeneratedCode], arch: Arch, soname: &str) -> Result<LinkedLibrary, CodegenError> {
    let linker = find_linker(arch)?;
    let folder = crate::folder::create_temporary("mlcc-link-").map_err(|source| CodegenError::Io {
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
    Ok(LinkedLibrary { path, objects: ObjectCounts::default(), _folder: folder })
}

#[cfg(feature = "llvm")]
fn device_scope(level: &FeatureLevel) -> u32 {
    match level.device_scope() {
        DeviceScope::Later => abi::device_scope::LATER,
        DeviceScope::Exact => abi::device_scope::EXACT,
        DeviceScope::Family => abi::device_scope::FAMILY,
    }
}

#[cfg(feature = "llvm")]
fn table_part(
    input: &CodegenInput<'_>,
    table: &TableDesc,
    output: EmitFormat,
) -> Result<GeneratedCode, CodegenError> {
    let spec = host_spec(input)?;
    let weakest = &spec.levels[0];
    let bytes = llvm::table_object(spec.arch, &spec.triple, weakest, &table.lay_out(), output)?;
    Ok(GeneratedCode { name: "table".into(), bytes })
}

#[cfg(feature = "llvm")]
fn host_arch(input: &CodegenInput<'_>) -> Result<Arch, CodegenError> {
    Ok(host_spec(input)?.arch)
}

/// The CPU side of the artifact: the target itself, or for a GPU this machine.
fn host_spec(input: &CodegenInput<'_>) -> Result<TargetSpec, CodegenError> {
    let arch = match input.target.arch {
        Arch::Nvptx => Arch::of_host(),
        arch => Some(arch),
    };
    let specs = mlcc_target::specs().map_err(mlcc_target::TargetError::from)?;
    let found = specs.into_iter().find(|s| Some(s.arch) == arch && !s.levels.is_empty());
    found.ok_or_else(|| CodegenError::NoHost { arch: std::env::consts::ARCH.into() })
}

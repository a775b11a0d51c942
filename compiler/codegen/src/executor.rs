//! Runs bare kernels in this process: compile, link, load, call. For tests and measurements of kernels;
//! models go through the runtime.

#[cfg(feature = "llvm")]
use crate::cache::ObjectCache;
#[cfg(feature = "cranelift")]
use crate::clif;
use crate::compile::{GeneratedCode, LinkedLibrary, link};
use crate::error::CodegenError;
#[cfg(feature = "llvm")]
use crate::llvm::{self, EmitFormat};
use crate::model::caller_symbol;
use libloading::os::unix::{Library as Loaded, Symbol};
use mlcc_ir::dim::{SizeSymbol, SymValues};
use mlcc_ir::kernel::{BufDecl, Kernel};
use mlcc_target::{Arch, FeatureLevel};
use thiserror::Error;

#[derive(Error, Debug)]
pub enum ExecutorError {
    #[error(transparent)]
    Codegen(#[from] CodegenError),
    #[error("level {level} is not one that this machine runs (missing: {missing})")]
    Level { level: String, missing: String },
    #[error("cannot load the linked kernels: {0}")]
    Load(#[from] libloading::Error),
    #[error("no kernel `{0}` in this executor")]
    Unknown(String),
    #[error("kernel `{kernel}` takes {expected} {what}, got {found}")]
    Count { kernel: String, what: &'static str, expected: usize, found: usize },
    #[error("kernel `{kernel}`: buffer `{buffer}` must have {expected} bytes, got {found}")]
    Size { kernel: String, buffer: String, expected: usize, found: usize },
}

/// Memory aligned as the runtime aligns buffers.
#[derive(Clone, Debug)]
pub struct AlignedBytes {
    cells: Vec<AlignedBlock>,
    len: usize,
}

#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
struct AlignedBlock([u8; 64]);

impl AlignedBytes {
    pub fn zeroed(len: usize) -> AlignedBytes {
        AlignedBytes { cells: vec![AlignedBlock([0; 64]); len.div_ceil(64)], len }
    }
    pub fn from_bytes(bytes: &[u8]) -> AlignedBytes {
        let mut out = AlignedBytes::zeroed(bytes.len());
        out.bytes_mut().copy_from_slice(bytes);
        out
    }
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the cells are `len` rounded up to 64 initialised bytes without padding.
        unsafe { std::slice::from_raw_parts(self.cells.as_ptr().cast(), self.len) }
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.cells.as_mut_ptr().cast(), self.len) }
    }
}

type KernelCaller = unsafe extern "C" fn(*const u64);

/// Kernels, ready to be called.
pub struct KernelExecutor {
    kernels: Vec<Kernel>,
    callers: Vec<Symbol<KernelCaller>>,
    _loaded: Loaded,
    _library: LinkedLibrary,
}

impl KernelExecutor {
    /// Compiles `kernels` with LLVM for `level`, which this machine must be able to run.
    #[cfg(feature = "llvm")]
    pub fn new(kernels: &[Kernel], level: &FeatureLevel) -> Result<KernelExecutor, ExecutorError> {
        let (arch, triple) = (host()?, host_triple()?);
        check_level(level)?;
        let object = llvm::kernels_object(arch, &triple, level, kernels, EmitFormat::Object)?;
        KernelExecutor::from_object(kernels, object)
    }

    /// The same, with the code of an earlier call if there is one.
    #[cfg(feature = "llvm")]
    pub fn from_cache(
        kernels: &[Kernel],
        level: &FeatureLevel,
        cache: &ObjectCache,
    ) -> Result<KernelExecutor, ExecutorError> {
        let (arch, triple) = (host()?, host_triple()?);
        check_level(level)?;
        let object = llvm::cached_kernels_object(arch, &triple, level, kernels, cache)?;
        KernelExecutor::from_object(kernels, object)
    }

    /// The same with Cranelift.
    #[cfg(feature = "cranelift")]
    pub fn with_cranelift(kernels: &[Kernel], level: &FeatureLevel) -> Result<KernelExecutor, ExecutorError> {
        check_level(level)?;
        let object = clif::kernels_object(host()?, level, kernels)?;
        KernelExecutor::from_object(kernels, object)
    }

    /// Takes an object of any back end that exports `kernels` by their names, with the calling convention of
    /// kernels.
    pub fn from_object(kernels: &[Kernel], object: Vec<u8>) -> Result<KernelExecutor, ExecutorError> {
        let arch = host()?;
        let baseline =
            mlcc_target::specs().map_err(mlcc_target::TargetError::from).map_err(CodegenError::from)?;
        let baseline =
            baseline.into_iter().find(|s| s.arch == arch).and_then(|s| s.levels.into_iter().next());
        let baseline = baseline.ok_or_else(no_host)?;
        #[cfg(feature = "cranelift")]
        let callers = clif::callers_object(arch, &baseline, kernels)?;
        #[cfg(not(feature = "cranelift"))]
        let callers = llvm::callers_object(arch, &host_triple()?, &baseline, kernels)?;
        let part = |name: &str, bytes| GeneratedCode { name: name.into(), bytes };
        let library = link(&[part("kernels", object), part("callers", callers)], arch, "kernels.so")?;
        // SAFETY: the library has no initialisers; it was made from the objects above and imports nothing.
        let loaded = unsafe { Loaded::new(library.path()) }?;
        let mut callers = Vec::with_capacity(kernels.len());
        for i in 0..kernels.len() {
            // SAFETY: `callers_object` defines this symbol with this type.
            callers.push(unsafe { loaded.get::<KernelCaller>(caller_symbol(i).as_bytes()) }?);
        }
        Ok(KernelExecutor { kernels: kernels.to_vec(), callers, _loaded: loaded, _library: library })
    }

    /// Runs a kernel with that many workers, each on its own thread. `buffers` are the parameters in order.
    pub fn run(
        &self,
        kernel: &str,
        buffers: &mut [AlignedBytes],
        dims: &SymValues,
        workers: usize,
    ) -> Result<(), ExecutorError> {
        let index = self.kernels.iter().position(|k| k.name == kernel);
        let index = index.ok_or_else(|| ExecutorError::Unknown(kernel.into()))?;
        let decl = &self.kernels[index];
        check_buffers(decl, buffers, dims)?;
        let mut args: Vec<u64> = buffers.iter_mut().map(|b| b.bytes_mut().as_mut_ptr() as u64).collect();
        args.extend(decl.dims.iter().map(|(sym, _): &(SizeSymbol, _)| dims.get(*sym) as u64));
        let call = &self.callers[index];
        std::thread::scope(|scope| {
            for worker in 0..workers {
                let mut args = args.clone();
                args.extend([worker as u64, worker as u64 + 1, workers as u64]);
                // SAFETY: the arguments are those that the kernel declares, each buffer at least as long as
                // declared.
                let work = move || unsafe { call(args.as_ptr()) };
                if workers == 1 {
                    work();
                } else {
                    scope.spawn(work);
                }
            }
        });
        Ok(())
    }
}

fn no_host() -> CodegenError {
    CodegenError::NoHost { arch: std::env::consts::ARCH.into() }
}

fn host() -> Result<Arch, ExecutorError> {
    Ok(Arch::of_host().ok_or_else(no_host)?)
}

#[cfg(feature = "llvm")]
fn host_triple() -> Result<String, ExecutorError> {
    Ok(format!("{}-unknown-linux-gnu", host()?))
}

/// Refuses levels that would make this process execute an illegal instruction.
fn check_level(level: &FeatureLevel) -> Result<(), ExecutorError> {
    let have = mlcc_target::detected_features();
    let missing: Vec<&str> =
        level.features.iter().map(String::as_str).filter(|f| !have.contains(f)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(ExecutorError::Level { level: level.name.clone(), missing: missing.join(", ") })
}

fn check_buffers(kernel: &Kernel, buffers: &[AlignedBytes], dims: &SymValues) -> Result<(), ExecutorError> {
    if buffers.len() != kernel.params.len() {
        let (expected, found) = (kernel.params.len(), buffers.len());
        return Err(ExecutorError::Count { kernel: kernel.name.clone(), what: "buffers", expected, found });
    }
    for (&param, buffer) in kernel.params.iter().zip(buffers) {
        let decl: &BufDecl = &kernel.bufs[param];
        let expected = decl.len.eval(dims).max(0) as usize * decl.dtype.bytes().unwrap_or(0);
        if buffer.len < expected {
            let (kernel, buffer_name) = (kernel.name.clone(), decl.name.clone());
            return Err(ExecutorError::Size { kernel, buffer: buffer_name, expected, found: buffer.len });
        }
    }
    Ok(())
}

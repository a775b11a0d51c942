//! One GPU with a model's kernels and weights on it.

use std::ffi::{CString, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;

use mlcc_abi::{DimExpr, LaunchArg, MOST_BLOCKS, arg};

use super::batch::CudaBatch;
use super::device_pages::DevicePages;
use super::driver::{self, DevicePtr, Driver, Handle};
use super::graphs::Loaded;
use super::image;
use super::session::CudaSession;
use crate::device::{Device, DeviceBatch, DeviceSession};
use crate::page_pool::PagePool;
use crate::session::Step;
use crate::table::{DeviceEntry, Launch, MAX_LAUNCH_ARGS, Repeat, Table};
use crate::{CachePages, Error, LoadOptions, Model, Result};

/// Dynamic shared memory beyond this must be asked for.
const PLAIN_SHARED_BYTES: u32 = 48 << 10;
/// Weights go up in pieces, so that the driver's staging of mapped pages stays small.
const UPLOAD_BYTES: usize = 64 << 20;

/// The device's context; the last owner releases it.
pub(crate) struct Context {
    pub driver: Driver,
    handle: Handle,
    device: i32,
    virtual_memory: bool,
}

// SAFETY: a CUDA context may be used from any thread that makes it current, and the driver API is thread-safe.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes the context current on this thread; every operation begins with it.
    pub fn enter(&self) -> Result<&Driver> {
        // SAFETY: the context is alive.
        self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.f.context_set)(self.handle) })?;
        Ok(&self.driver)
    }

    /// The driver's name of the device.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// Bytes that nobody has.
    pub fn free_memory(&self) -> Result<u64> {
        let driver = self.enter()?;
        let (mut free, mut all) = (0, 0);
        // SAFETY: places for the results.
        driver.check("cuMemGetInfo", unsafe { (driver.f.memory_info)(&mut free, &mut all) })?;
        Ok(free as u64)
    }

    /// Whether memory can be mapped into reserved addresses.
    pub fn has_virtual_memory(&self) -> bool {
        self.virtual_memory
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `Gpu::open`.
        unsafe { (self.driver.f.context_release)(self.device) };
    }
}

/// Owned device memory.
pub(crate) struct DeviceBuffer {
    context: Arc<Context>,
    ptr: DevicePtr,
    bytes: usize,
}

impl DeviceBuffer {
    pub fn new(context: &Arc<Context>, what: &'static str, bytes: u64) -> Result<Self> {
        let driver = context.enter()?;
        let mut ptr = 0;
        // SAFETY: `ptr` is a place for the result.
        let status = unsafe { (driver.f.memory_alloc)(&mut ptr, (bytes as usize).max(1)) };
        driver.check_memory("cuMemAlloc", status, what, bytes)?;
        Ok(Self { context: Arc::clone(context), ptr, bytes: bytes as usize })
    }

    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    pub fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Ok(driver) = self.context.enter() {
            // SAFETY: allocated in `new`; sessions wait for their stream before they drop their buffers.
            unsafe { (driver.f.memory_free)(self.ptr) };
        }
    }
}

/// A launch with its kernel resolved.
pub(crate) struct Kernel {
    function: Handle,
    launch: Launch,
}

/// Lengths of the sequence before a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Span {
    pub first: i64,
    pub last: i64,
}

impl Span {
    /// One length.
    pub fn of(past: u64) -> Self {
        Self { first: past as i64, last: past as i64 }
    }
}

/// Where the arguments of a launch point, and the sizes that grids depend on.
#[derive(Clone, Copy, Default)]
pub(crate) struct Bases {
    pub arena: DevicePtr,
    pub state: DevicePtr,
    pub tokens: DevicePtr,
    pub logits: DevicePtr,
    pub probs: DevicePtr,
    pub control: DevicePtr,
    pub wanted: DevicePtr,
    pub sequences: DevicePtr,
    pub page_table: DevicePtr,
    pub n: i64,
    /// Grids have blocks enough for all of these.
    pub past: Span,
    pub batch: BatchSizes,
}

/// Of a call for several sequences.
#[derive(Clone, Copy, Default)]
pub(crate) struct BatchSizes {
    pub sequences: i64,
    /// The most rows of one of them.
    pub most_rows: i64,
    /// Rows whose logits are wanted.
    pub wanted: i64,
}

pub(crate) struct Gpu {
    name: String,
    entries: Vec<(String, Vec<Kernel>)>,
    pub decode_loaded: Loaded,
    weights: DeviceBuffer,
    pages: Option<Arc<PagePool<DevicePages>>>,
    module: Module,
    context: Arc<Context>,
}

// SAFETY: kernel handles are immutable after `open`; see `Context`.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

struct Module {
    context: Arc<Context>,
    handle: Handle,
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(driver) = self.context.enter() {
            // SAFETY: loaded once; no kernel of it runs any more.
            unsafe { (driver.f.module_unload)(self.handle) };
        }
    }
}

impl Device for Gpu {
    fn name(&self) -> &str {
        &self.name
    }

    fn session(self: Arc<Self>, model: &Model) -> Result<Box<dyn DeviceSession>> {
        Ok(Box::new(CudaSession::new(&self, model.table())?))
    }

    fn has_batch(&self, step: Step) -> bool {
        self.entry(step.name()).is_some()
    }

    fn batch(self: Arc<Self>, model: &Model) -> Result<Option<Box<dyn DeviceBatch>>> {
        Ok(Some(Box::new(CudaBatch::new(self, model.table())?)))
    }

    fn cache_pages(&self) -> CachePages {
        self.pages.as_ref().map_or(CachePages::default(), |pages| pages.pages())
    }

    fn copy_bandwidth(&self) -> Result<Option<f64>> {
        super::bandwidth::copy_bandwidth(&self.context).map(Some)
    }
}

impl Gpu {
    /// Opens the GPU that is asked for and puts the model on it.
    pub fn open(path: &Path, table: &Table, weights: &[u8], options: &LoadOptions) -> Result<Self> {
        let no_device = |what: String| Error::NoDevice { path: path.to_path_buf(), what };
        let driver = Driver::open().map_err(no_device)?;
        let (context, name, sm) = open_context(driver, options.device.unwrap_or(0), &no_device)?;
        let context = Arc::new(context);
        let image = image::choose(&table.images, sm).ok_or_else(|| {
            let has: Vec<String> = table.images.iter().map(image::describe).collect();
            no_device(format!("{name} is an sm_{sm} and the artifact has {}", has.join(", ")))
        })?;
        let module =
            Module { handle: context.enter()?.load_module(&image.bytes)?, context: Arc::clone(&context) };
        let resolve = |entry: &DeviceEntry| {
            let kernels = entry.launches.iter().map(|l| resolve(&context, module.handle, l));
            Ok((entry.name.clone(), kernels.collect::<Result<_>>()?))
        };
        let entries: Vec<_> = table.device_entries.iter().map(resolve).collect::<Result<_>>()?;
        if !entries.iter().any(|(name, _)| name == "decode") {
            return Err(Error::MissingEntry { path: path.to_path_buf(), entry: "decode" });
        }
        let weights = upload(&context, weights)?;
        let pages = DevicePages::pool(&context, &table.plan, options.cache_pages)?.map(Arc::new);
        Ok(Self { name, entries, decode_loaded: Loaded::default(), weights, pages, module, context })
    }

    /// Of the caches of all sequences, if the model has any.
    pub fn pages(&self) -> Option<&Arc<PagePool<DevicePages>>> {
        self.pages.as_ref()
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.module.context
    }

    /// The launch list of an entry point.
    pub fn entry(&self, name: &str) -> Option<&[Kernel]> {
        self.entries.iter().find(|(n, _)| n == name).map(|(_, kernels)| kernels.as_slice())
    }

    /// Puts every launch of an entry point on the stream.
    pub fn launch(&self, kernels: &[Kernel], bases: &Bases, stream: Handle) -> Result<()> {
        let driver = self.context.enter()?;
        for kernel in kernels {
            let Some(grid) = grid(&kernel.launch, bases)? else { continue };
            let mut addresses = [0 as DevicePtr; MAX_LAUNCH_ARGS];
            for (address, a) in addresses.iter_mut().zip(&kernel.launch.args) {
                *address = self.address(a, kernel.launch.repeat, bases);
            }
            let mut pointers = addresses.each_mut().map(|a| std::ptr::from_mut(a).cast::<c_void>());
            let [bx, by, bz] = kernel.launch.block;
            // SAFETY: one pointer per argument, in the order that the compiler recorded for this kernel; all are addresses.
            let status = unsafe {
                (driver.f.launch)(
                    kernel.function,
                    grid[0],
                    grid[1],
                    grid[2],
                    bx,
                    by,
                    bz,
                    kernel.launch.shared_bytes,
                    stream,
                    pointers.as_mut_ptr(),
                    null_mut(),
                )
            };
            driver.check("cuLaunchKernel", status).map_err(|e| match e {
                Error::Driver { call, what } => {
                    Error::Driver { call, what: format!("{}: {what}", kernel.launch.kernel) }
                }
                other => other,
            })?;
        }
        Ok(())
    }

    fn address(&self, a: &LaunchArg, repeat: Repeat, bases: &Bases) -> DevicePtr {
        let base = match a.kind {
            arg::WEIGHTS => self.weights.ptr(),
            arg::ARENA => bases.arena,
            // The kernel adds where those of its sequence begin.
            arg::STATE | arg::PAGE_TABLE if repeat == Repeat::EachSequence => 0,
            arg::STATE => bases.state,
            arg::PAGE_TABLE => bases.page_table,
            arg::PAGES => self.pages.as_ref().map_or(0, |pages| pages.memory().base()),
            arg::WANTED => bases.wanted,
            arg::SEQUENCES => bases.sequences,
            arg::TOKENS => bases.tokens,
            arg::LOGITS => bases.logits,
            arg::PROBS => bases.probs,
            // The table was checked: there are no other kinds.
            _ => bases.control,
        };
        base.wrapping_add(a.offset)
    }
}

impl Kernel {
    /// Whether the launch has more blocks for longer sequences.
    pub fn grows(&self) -> bool {
        self.launch.grid.iter().any(|g| g.coef_past != 0)
    }
}

/// The grid, `None` if it is empty.
fn grid(launch: &Launch, bases: &Bases) -> Result<Option<[u32; 3]>> {
    let mut out = [0; 3];
    let n = match launch.repeat {
        Repeat::Once => bases.n,
        Repeat::Wanted => bases.batch.wanted,
        Repeat::EachSequence => bases.batch.most_rows,
    };
    for (i, (to, expr)) in out.iter_mut().zip(&launch.grid).enumerate() {
        // A size that overflows is too large as well.
        let at = |past| dim(expr, n, past).unwrap_or(i64::MAX);
        let blocks = match (launch.repeat, i) {
            (Repeat::EachSequence, 2) => bases.batch.sequences,
            _ => at(bases.past.first).max(at(bases.past.last)),
        };
        let most = MOST_BLOCKS[i];
        *to = u32::try_from(blocks).ok().filter(|blocks| *blocks <= most).ok_or_else(|| Error::Grid {
            kernel: launch.kernel.clone(),
            axis: ['x', 'y', 'z'][i],
            blocks,
            most,
        })?;
    }
    Ok((!out.contains(&0)).then_some(out))
}

/// `ceil((coef_n * n + coef_past * past + constant) / div)`, `None` on overflow.
fn dim(e: &DimExpr, n: i64, past: i64) -> Option<i64> {
    let sum =
        e.coef_n.checked_mul(n)?.checked_add(e.coef_past.checked_mul(past)?)?.checked_add(e.constant)?;
    Some(sum.checked_add(e.div - 1)?.div_euclid(e.div))
}

fn open_context(
    driver: Driver,
    ordinal: u32,
    no_device: &dyn Fn(String) -> Error,
) -> Result<(Context, String, u32)> {
    let (mut count, mut device, mut major, mut minor, mut mapping) = (0, 0, 0, 0, 0);
    // SAFETY: every pointer is a place for the result.
    driver.check("cuDeviceGetCount", unsafe { (driver.f.device_count)(&mut count) })?;
    if count < 1 || ordinal >= count as u32 {
        return Err(no_device(format!("there are {count} NVIDIA GPUs and number {ordinal} was asked for")));
    }
    // SAFETY: as above; the name's buffer has the length given.
    unsafe {
        driver.check("cuDeviceGet", (driver.f.device_get)(&mut device, ordinal as i32))?;
        let attribute = driver.f.device_attribute;
        driver.check("cuDeviceGetAttribute", attribute(&mut major, driver::ATTRIBUTE_MAJOR, device))?;
        driver.check("cuDeviceGetAttribute", attribute(&mut minor, driver::ATTRIBUTE_MINOR, device))?;
        // A driver that does not know the attribute says so, and the memory is not mapped then.
        let status = attribute(&mut mapping, driver::ATTRIBUTE_VIRTUAL_MEMORY, device);
        mapping = if status == 0 { mapping } else { 0 };
    }
    let mut name = [0u8; 256];
    // SAFETY: as above.
    driver
        .check("cuDeviceGetName", unsafe { (driver.f.device_name)(name.as_mut_ptr().cast(), 256, device) })?;
    let end = name.iter().position(|&c| c == 0).unwrap_or(name.len());
    let name = String::from_utf8_lossy(&name[..end]).into_owned();
    let mut handle = null_mut();
    // SAFETY: as above.
    driver.check("cuDevicePrimaryCtxRetain", unsafe { (driver.f.context_retain)(&mut handle, device) })?;
    let virtual_memory = mapping != 0;
    Ok((Context { driver, handle, device, virtual_memory }, name, (major * 10 + minor) as u32))
}

fn resolve(context: &Context, module: Handle, launch: &Launch) -> Result<Kernel> {
    let driver = context.enter()?;
    let name = CString::new(launch.kernel.as_str()).unwrap_or_default();
    let mut function = null_mut();
    // SAFETY: the module is loaded, the name NUL-terminated.
    let status = unsafe { (driver.f.module_function)(&mut function, module, name.as_ptr()) };
    driver.check("cuModuleGetFunction", status).map_err(|e| match e {
        Error::Driver { call, what } => {
            Error::Driver { call, what: format!("kernel {}: {what}", launch.kernel) }
        }
        other => other,
    })?;
    if launch.shared_bytes > PLAIN_SHARED_BYTES {
        let bytes = launch.shared_bytes as i32;
        // SAFETY: the function is valid.
        let status = unsafe { (driver.f.function_attribute)(function, driver::FUNCTION_SHARED_BYTES, bytes) };
        driver.check("cuFuncSetAttribute", status)?;
    }
    Ok(Kernel { function, launch: launch.clone() })
}

fn upload(context: &Arc<Context>, weights: &[u8]) -> Result<DeviceBuffer> {
    let buffer =
        DeviceBuffer::new(context, "the weights on the GPU", weights.len() as u64).map_err(|e| match e {
            Error::OutOfMemory { bytes, .. } => Error::WeightsTooLarge { bytes },
            other => other,
        })?;
    let driver = context.enter()?;
    let default_stream = null_mut();
    let mut at = 0;
    for piece in weights.chunks(UPLOAD_BYTES) {
        // SAFETY: the piece lies inside the buffer.
        let status = unsafe {
            (driver.f.to_device)(buffer.ptr() + at, piece.as_ptr().cast(), piece.len(), default_stream)
        };
        driver.check("cuMemcpyHtoDAsync", status)?;
        at += piece.len() as u64;
    }
    // SAFETY: the default stream always exists.
    driver.check("cuStreamSynchronize", unsafe { (driver.f.stream_wait)(default_stream) })?;
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_round_up() {
        let e = DimExpr { coef_n: 3, coef_past: 1, constant: -1, div: 4 };
        assert_eq!(dim(&e, 2, 0), Some(2));
        assert_eq!(dim(&e, 2, 4), Some(3));
        assert_eq!(dim(&DimExpr { coef_n: i64::MAX, ..e }, 2, 0), None);
    }

    #[test]
    fn grids_have_blocks_for_every_length_of_a_span() {
        let one = DimExpr { coef_n: 0, coef_past: 0, constant: 1, div: 1 };
        let with = |coef_past, first, last| {
            let grown = DimExpr { coef_past, constant: 20, div: 4, ..one };
            let grid = [grown, one, one];
            let launch = launch_of(grid, Repeat::Once);
            super::grid(&launch, &Bases { past: Span { first, last }, ..Bases::default() }).unwrap()
        };
        assert_eq!(with(1, 4, 4), Some([6, 1, 1]));
        assert_eq!(with(1, 4, 7), Some([7, 1, 1]));
        assert_eq!(with(-1, 4, 7), Some([4, 1, 1]));
    }

    fn launch_of(grid: [DimExpr; 3], repeat: Repeat) -> Launch {
        Launch { kernel: "k".into(), grid, block: [1; 3], shared_bytes: 0, args: vec![], repeat }
    }

    #[test]
    fn grids_of_sequences_are_as_deep_as_there_are_some() {
        let one = DimExpr { coef_n: 0, coef_past: 0, constant: 1, div: 1 };
        let rows = DimExpr { coef_n: 1, constant: 0, ..one };
        let batch = BatchSizes { sequences: 3, most_rows: 5, wanted: 2 };
        let bases = Bases { n: 9, batch, ..Bases::default() };
        let with = |repeat| super::grid(&launch_of([rows, one, one], repeat), &bases).unwrap();
        assert_eq!(with(Repeat::Once), Some([9, 1, 1]));
        assert_eq!(with(Repeat::Wanted), Some([2, 1, 1]));
        assert_eq!(with(Repeat::EachSequence), Some([5, 1, 3]));
    }

    #[test]
    fn grids_that_a_gpu_cannot_launch_are_named() {
        let one = DimExpr { coef_n: 0, coef_past: 0, constant: 1, div: 1 };
        let rows = DimExpr { coef_n: 2, constant: 0, ..one };
        let with = |grid: [DimExpr; 3], n: i64| {
            let launch = launch_of(grid, Repeat::Once);
            let bases = Bases { n, ..Bases::default() };
            super::grid(&launch, &bases).map_err(|e| e.to_string())
        };
        assert_eq!(with([rows, one, one], 1 << 20).unwrap(), Some([1 << 21, 1, 1]));
        assert_eq!(with([one, rows, one], 32_767).unwrap(), Some([1, 65_534, 1]));
        assert_eq!(with([one, rows, one], 0).unwrap(), None);
        let text = with([one, rows, one], 32_768).unwrap_err();
        assert!(text.contains("kernel k would need 65536 blocks in y, a GPU has at most 65535"), "{text}");
        assert!(with([one, one, rows], 32_768).unwrap_err().contains("in z"));
        assert!(with([rows, one, one], i64::MAX).unwrap_err().contains("in x"));
    }
}

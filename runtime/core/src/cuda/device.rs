//! One GPU with a model's kernels and weights on it.

use std::ops::Range;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mlcc_abi::EntryPoint;

use super::batch::CudaBatch;
use super::device_pages::DevicePages;
use super::driver::{self, CudaDriver, DevicePtr, DriverHandle};
use super::executor::CudaExecutor;
use super::graphs::KernelsLoaded;
use super::image;
use super::launches::ResolvedLaunch;
use super::ranks::{GpuRanks, LocalRank, PageParts};
use super::session::CudaSession;
use super::upload::upload;
use crate::device::{Device, DeviceBatch, DeviceSession};
use crate::page_pool::PagePool;
use crate::table::{ArtifactTable, GpuImage, LaunchList};
use crate::{CachePages, Error, LoadOptions, Model, Result};

/// The device's context; the last owner releases it.
pub(crate) struct CudaContext {
    pub driver: CudaDriver,
    handle: DriverHandle,
    device: i32,
    virtual_memory: bool,
}

// SAFETY: a CUDA context may be used from any thread that makes it current, and the driver API is
// thread-safe.
unsafe impl Send for CudaContext {}
// SAFETY: as above.
unsafe impl Sync for CudaContext {}

impl CudaContext {
    /// Makes the context current on this thread; every operation begins with it.
    pub fn make_current(&self) -> Result<&CudaDriver> {
        // SAFETY: the context is alive.
        self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.functions.context_set)(self.handle) })?;
        Ok(&self.driver)
    }

    /// The driver's name of the device.
    pub fn device(&self) -> i32 {
        self.device
    }

    /// Free bytes.
    pub fn free_memory(&self) -> Result<u64> {
        let driver = self.make_current()?;
        let (mut free, mut all) = (0, 0);
        // SAFETY: places for the results.
        driver.check("cuMemGetInfo", unsafe { (driver.functions.memory_info)(&mut free, &mut all) })?;
        Ok(free as u64)
    }

    /// True if memory can be mapped into reserved addresses.
    pub fn has_virtual_memory(&self) -> bool {
        self.virtual_memory
    }
}

impl Drop for CudaContext {
    fn drop(&mut self) {
        // SAFETY: retained once in `CudaDevice::open`.
        unsafe { (self.driver.functions.context_release)(self.device) };
    }
}

/// Owned device memory.
pub(crate) struct DeviceBuffer {
    context: Arc<CudaContext>,
    ptr: DevicePtr,
    bytes: usize,
}

impl DeviceBuffer {
    pub fn new(context: &Arc<CudaContext>, what: &'static str, bytes: u64) -> Result<Self> {
        let driver = context.make_current()?;
        let mut ptr = 0;
        // SAFETY: `ptr` is a place for the result.
        let status = unsafe { (driver.functions.memory_alloc)(&mut ptr, (bytes as usize).max(1)) };
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
        if let Ok(driver) = self.context.make_current() {
            // SAFETY: allocated in `new`; sessions wait for their stream before they drop their buffers.
            unsafe { (driver.functions.memory_free)(self.ptr) };
        }
    }
}

/// The launches of an entry point, or of the one for calls with adapters.
struct LaunchEntry {
    point: EntryPoint,
    adapted: bool,
    kernels: Vec<ResolvedLaunch>,
}

pub(crate) struct CudaDevice {
    name: String,
    entries: Vec<LaunchEntry>,
    decode_loaded: KernelsLoaded,
    /// The same for tokens of sequences with adapters.
    adapted_loaded: KernelsLoaded,
    /// Launches of `decode`, and then of what finds the likeliest tokens.
    decode_top_k: Option<(Vec<ResolvedLaunch>, KernelsLoaded)>,
    /// The launches of `decode_batch` with the search for top-k candidates.
    batch_top_k: Option<Vec<ResolvedLaunch>>,
    executor: Mutex<CudaExecutor>,
    weights: DeviceBuffer,
    /// The slots for adapters, of a model that has some.
    adapters: Option<DeviceBuffer>,
    pages: Option<Arc<PagePool<DevicePages>>>,
    /// Ranks of a model that is split.
    ranks: Option<GpuRanks>,
    module: CudaModule,
}

// SAFETY: kernel handles are immutable after `open`; see `CudaContext`.
unsafe impl Send for CudaDevice {}
// SAFETY: as above.
unsafe impl Sync for CudaDevice {}

struct CudaModule {
    context: Arc<CudaContext>,
    handle: DriverHandle,
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        if let Ok(driver) = self.context.make_current() {
            // SAFETY: loaded once; no kernel of it runs any more.
            unsafe { (driver.functions.module_unload)(self.handle) };
        }
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn ready(&self) -> Result<()> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        let own = self.pages.as_ref().map_or(0, |pages| pages.pages().all as u64);
        let what = "pages of the KV cache on the GPU, of which rank 0 has more";
        ranks.processes.finish_loading(own, what, ranks.leader.as_deref())
    }

    fn follow_leader(self: Arc<Self>, model: &Model) -> Result<()> {
        super::rank_worker::receive_steps(&self, model)
    }

    fn session(self: Arc<Self>, model: &Model) -> Result<Box<dyn DeviceSession>> {
        Ok(Box::new(CudaSession::new(&self, model.table())?))
    }

    fn has_batch(&self, step: EntryPoint) -> bool {
        self.entry_kernels(step, false).is_some()
    }

    fn batch(self: Arc<Self>, _: &Model) -> Result<Option<Box<dyn DeviceBatch>>> {
        Ok(Some(Box::new(CudaBatch::new(self))))
    }

    fn write_adapters(&self, bytes: &[u8], _: &[Range<usize>]) -> Result<()> {
        let Some(adapters) = &self.adapters else { return Ok(()) };
        // Between two steps. What the sequences of others read stays as it is.
        let stream = &self.executor().stream;
        stream.send(adapters.ptr(), &bytes[..adapters.len().min(bytes.len())])?;
        stream.synchronize()
    }

    fn cache_pages(&self) -> CachePages {
        self.pages.as_ref().map_or(CachePages::default(), |pages| pages.pages())
    }

    fn copy_bandwidth(&self) -> Result<Option<f64>> {
        super::bandwidth::copy_bandwidth(self.context()).map(Some)
    }
}

impl CudaDevice {
    /// Opens the GPU that is asked for and puts the model on it.
    pub fn open(
        path: &Path,
        table: &ArtifactTable,
        weights: &[u8],
        together: Option<&LocalRank>,
        options: &LoadOptions,
    ) -> Result<Self> {
        let no_device = |what: String| Error::NoDevice { path: path.to_path_buf(), what };
        let driver = CudaDriver::open().map_err(no_device)?;
        let number = |count| {
            together.map_or(options.device.unwrap_or(0), |together| together.choose_device(options, count))
        };
        let (context, name, sm) = open_context(driver, number, &no_device)?;
        let context = Arc::new(context);
        let ranks = together.map(|together| GpuRanks::join(together, &context, table)).transpose()?;
        let load = || {
            let load = |image: &GpuImage| context.make_current()?.load_module(&image.bytes);
            let handle =
                image::load_first(&image::fitting_images(&table.images, sm), load).unwrap_or_else(|| {
                    let has: Vec<String> = table.images.iter().map(image::describe).collect();
                    Err(no_device(format!("{name} is an sm_{sm} and the artifact has {}", has.join(", "))))
                })?;
            Ok(CudaModule { handle, context: Arc::clone(&context) })
        };
        let (module, weights) = load_and_upload(load, || upload(&context, weights))?;
        let resolve = |entry: &LaunchList| {
            let (point, adapted) = EntryPoint::of_function(&entry.name)?;
            let kernels = entry.launches.iter().map(|l| ResolvedLaunch::resolve(&context, module.handle, l));
            Some(kernels.collect::<Result<_>>().map(|kernels| LaunchEntry { point, adapted, kernels }))
        };
        let entries: Vec<_> = table.device_entries.iter().filter_map(resolve).collect::<Result<_>>()?;
        let find = |point: EntryPoint| find_launches(&entries, point, false);
        if find(EntryPoint::Decode).is_none() {
            return Err(Error::MissingEntry { path: path.to_path_buf(), entry: EntryPoint::Decode.name() });
        }
        let with_top_k =
            |point| find(point).zip(find(EntryPoint::TopK)).map(|(step, top_k)| [step, top_k].concat());
        let decode_top_k = with_top_k(EntryPoint::Decode).map(|kernels| (kernels, KernelsLoaded::default()));
        let batch_top_k = with_top_k(EntryPoint::DecodeBatch);
        // Before the pages, which take most of what is left.
        let executor = CudaExecutor::new(&context, table)?;
        let adapters = match table.plan.adapter_bytes {
            0 => None,
            bytes => Some(DeviceBuffer::new(&context, "the slots for adapters on the GPU", bytes)?),
        };
        if let Some(adapters) = &adapters {
            executor.stream.clear(adapters.ptr(), adapters.len())?;
            executor.stream.synchronize()?;
        }
        let executor = Mutex::new(executor);
        let parts = PageParts::from_plan(&table.plan, ranks.as_ref());
        let processes = ranks.as_ref().map(|ranks| &ranks.processes);
        let pages = DevicePages::pool(&context, &table.plan, (parts, processes), options.cache_pages)?;
        let pages = pages.map(Arc::new);
        let (decode_loaded, adapted_loaded) = (KernelsLoaded::default(), KernelsLoaded::default());
        Ok(Self {
            name,
            entries,
            decode_loaded,
            adapted_loaded,
            decode_top_k,
            batch_top_k,
            executor,
            weights,
            adapters,
            pages,
            ranks,
            module,
        })
    }

    /// Pages of the caches of all sequences, if the model has any.
    pub fn pages(&self) -> Option<&Arc<PagePool<DevicePages>>> {
        self.pages.as_ref()
    }

    /// The other processes of a model that is split.
    pub fn ranks(&self) -> Option<&GpuRanks> {
        self.ranks.as_ref()
    }

    pub fn context(&self) -> &Arc<CudaContext> {
        &self.module.context
    }

    /// The executor of a step; steps wait for each other.
    pub fn executor(&self) -> MutexGuard<'_, CudaExecutor> {
        self.executor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The start of the weights.
    pub fn weights(&self) -> DevicePtr {
        self.weights.ptr()
    }

    /// The start of the slots for adapters.
    pub fn adapters(&self) -> DevicePtr {
        self.adapters.as_ref().map_or(0, DeviceBuffer::ptr)
    }

    /// Tells if all launches of `decode` have run.
    pub fn loaded(&self, adapted: bool) -> &KernelsLoaded {
        if adapted { &self.adapted_loaded } else { &self.decode_loaded }
    }

    /// Launches of `decode` that end with the likeliest tokens, and whether all have run.
    pub fn decode_top_k(&self) -> Option<(&[ResolvedLaunch], &KernelsLoaded)> {
        self.decode_top_k.as_ref().map(|(kernels, loaded)| (kernels.as_slice(), loaded))
    }

    /// Launches of `decode_batch` that end with the likeliest tokens of each row.
    pub fn batch_top_k(&self) -> Option<&[ResolvedLaunch]> {
        self.batch_top_k.as_deref()
    }

    /// The launch list of an entry point; in a call with adapters the adapted one, where the entry point has
    /// such.
    pub fn entry_kernels(&self, point: EntryPoint, adapted: bool) -> Option<&[ResolvedLaunch]> {
        find_launches(&self.entries, point, adapted && point.has_adapted())
    }
}

fn find_launches(entries: &[LaunchEntry], point: EntryPoint, adapted: bool) -> Option<&[ResolvedLaunch]> {
    let found = entries.iter().find(|entry| (entry.point, entry.adapted) == (point, adapted))?;
    Some(&found.kernels)
}

/// Both at once: the driver may have to compile the module, and weights take the bus meanwhile.
fn load_and_upload(
    load: impl FnOnce() -> Result<CudaModule>,
    upload: impl FnOnce() -> Result<DeviceBuffer> + Send,
) -> Result<(CudaModule, DeviceBuffer)> {
    std::thread::scope(|scope| {
        let upload = scope.spawn(upload);
        let module = load();
        let weights = upload.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok((module?, weights?))
    })
}

fn open_context(
    driver: CudaDriver,
    ordinal: impl Fn(u32) -> u32,
    no_device: &dyn Fn(String) -> Error,
) -> Result<(CudaContext, String, u32)> {
    let (mut count, mut device, mut major, mut minor, mut mapping) = (0, 0, 0, 0, 0);
    // SAFETY: every pointer is a place for the result.
    driver.check("cuDeviceGetCount", unsafe { (driver.functions.device_count)(&mut count) })?;
    let ordinal = ordinal(count.max(0) as u32);
    if count < 1 || ordinal >= count as u32 {
        return Err(no_device(format!("there are {count} NVIDIA GPUs and number {ordinal} was asked for")));
    }
    // SAFETY: as above; the name's buffer has the length given.
    unsafe {
        driver.check("cuDeviceGet", (driver.functions.device_get)(&mut device, ordinal as i32))?;
        let attribute = driver.functions.device_attribute;
        driver.check("cuDeviceGetAttribute", attribute(&mut major, driver::ATTRIBUTE_MAJOR, device))?;
        driver.check("cuDeviceGetAttribute", attribute(&mut minor, driver::ATTRIBUTE_MINOR, device))?;
        // A driver that does not know the attribute says so, and the memory is not mapped then.
        let status = attribute(&mut mapping, driver::ATTRIBUTE_VIRTUAL_MEMORY, device);
        mapping = if status == 0 { mapping } else { 0 };
    }
    let mut name = [0u8; 256];
    // SAFETY: as above.
    driver.check("cuDeviceGetName", unsafe {
        (driver.functions.device_name)(name.as_mut_ptr().cast(), 256, device)
    })?;
    let end = name.iter().position(|&c| c == 0).unwrap_or(name.len());
    let name = String::from_utf8_lossy(&name[..end]).into_owned();
    let mut handle = null_mut();
    // SAFETY: as above.
    driver.check("cuDevicePrimaryCtxRetain", unsafe {
        (driver.functions.context_retain)(&mut handle, device)
    })?;
    let virtual_memory = mapping != 0;
    Ok((CudaContext { driver, handle, device, virtual_memory }, name, (major * 10 + minor) as u32))
}

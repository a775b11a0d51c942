//! The few functions of the CUDA driver API that we use, bound at run time.
//!
//! Signatures from `cuda.h` of CUDA 12; every one of them exists since CUDA 11.4 or longer. `_v2` and the
//! like are the names that the header's macros give. The functions of [`VirtualMemory`] may be missing.

use std::ffi::{CStr, c_char, c_void};

use libloading::Library;

use crate::{Error, Result};

/// Names another driver library than `libcuda.so.1`.
const DRIVER_VARIABLE: &str = "MLCC_CUDA_DRIVER";
const DRIVER: &str = "libcuda.so.1";

pub type DevicePtr = u64;
/// `CUcontext`, `CUmodule`, `CUfunction`, `CUstream`, `CUevent`, `CUgraph`, `CUgraphExec`: opaque.
pub type DriverHandle = *mut c_void;
type CudaStatus = i32;

const OUT_OF_MEMORY: CudaStatus = 2;
pub const ATTRIBUTE_MAJOR: i32 = 75;
pub const ATTRIBUTE_MINOR: i32 = 76;
pub const ATTRIBUTE_VIRTUAL_MEMORY: i32 = 102;
pub const GRANULARITY_RECOMMENDED: i32 = 1;
pub const FUNCTION_SHARED_BYTES: i32 = 8;
pub const STREAM_NON_BLOCKING: u32 = 1;
pub const EVENT_WITHOUT_TIME: u32 = 2;
pub const CAPTURE_THREAD_LOCAL: i32 = 1;
const JIT_ERROR_LOG: i32 = 5;
const JIT_ERROR_LOG_BYTES: i32 = 6;

/// Declares the function table and its loading, one line per function.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident; $($field:ident = $symbol:literal ( $($arg:ty),* );)*) => {
        $(#[$doc])*
        pub struct $name {
            $(pub $field: unsafe extern "C" fn($($arg),*) -> CudaStatus,)*
        }

        impl $name {
            fn load(library: &Library) -> std::result::Result<Self, String> {
                // SAFETY: the symbols have these signatures in every driver that has them.
                Ok(unsafe { Self {
                    $($field: *library
                        .get::<unsafe extern "C" fn($($arg),*) -> CudaStatus>($symbol)
                        .map_err(|_| format!("it lacks {}", $symbol))?,)*
                } })
            }
        }
    };
}

functions! {
    /// Functions of every driver.
    Functions;
    init = "cuInit" (u32);
    device_count = "cuDeviceGetCount" (*mut i32);
    device_get = "cuDeviceGet" (*mut i32, i32);
    device_uuid = "cuDeviceGetUuid" (*mut u8, i32);
    device_name = "cuDeviceGetName" (*mut c_char, i32, i32);
    device_attribute = "cuDeviceGetAttribute" (*mut i32, i32, i32);
    context_retain = "cuDevicePrimaryCtxRetain" (*mut DriverHandle, i32);
    context_release = "cuDevicePrimaryCtxRelease_v2" (i32);
    context_set = "cuCtxSetCurrent" (DriverHandle);
    module_load = "cuModuleLoadDataEx" (*mut DriverHandle, *const c_void, u32, *mut i32, *mut *mut c_void);
    module_unload = "cuModuleUnload" (DriverHandle);
    module_function = "cuModuleGetFunction" (*mut DriverHandle, DriverHandle, *const c_char);
    function_attribute = "cuFuncSetAttribute" (DriverHandle, i32, i32);
    memory_alloc = "cuMemAlloc_v2" (*mut DevicePtr, usize);
    memory_free = "cuMemFree_v2" (DevicePtr);
    memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    host_alloc = "cuMemHostAlloc" (*mut *mut c_void, usize, u32);
    host_free = "cuMemFreeHost" (*mut c_void);
    to_device = "cuMemcpyHtoDAsync_v2" (DevicePtr, *const c_void, usize, DriverHandle);
    to_host = "cuMemcpyDtoHAsync_v2" (*mut c_void, DevicePtr, usize, DriverHandle);
    on_device = "cuMemcpyDtoDAsync_v2" (DevicePtr, DevicePtr, usize, DriverHandle);
    copy_2d = "cuMemcpy2DAsync_v2" (*const PitchedCopy, DriverHandle);
    fill_bytes = "cuMemsetD8Async" (DevicePtr, u8, usize, DriverHandle);
    fill_words = "cuMemsetD32Async" (DevicePtr, u32, usize, DriverHandle);
    launch = "cuLaunchKernel"
        (DriverHandle, u32, u32, u32, u32, u32, u32, u32, DriverHandle, *mut *mut c_void, *mut *mut c_void);
    stream_create = "cuStreamCreate" (*mut DriverHandle, u32);
    stream_wait = "cuStreamSynchronize" (DriverHandle);
    stream_destroy = "cuStreamDestroy_v2" (DriverHandle);
    event_create = "cuEventCreate" (*mut DriverHandle, u32);
    event_record = "cuEventRecord" (DriverHandle, DriverHandle);
    event_wait = "cuEventSynchronize" (DriverHandle);
    event_destroy = "cuEventDestroy_v2" (DriverHandle);
    capture_begin = "cuStreamBeginCapture_v2" (DriverHandle, i32);
    capture_end = "cuStreamEndCapture" (DriverHandle, *mut DriverHandle);
    graph_instantiate = "cuGraphInstantiateWithFlags" (*mut DriverHandle, DriverHandle, u64);
    graph_launch = "cuGraphLaunch" (DriverHandle, DriverHandle);
    graph_destroy = "cuGraphDestroy" (DriverHandle);
    graph_exec_destroy = "cuGraphExecDestroy" (DriverHandle);
    error_name = "cuGetErrorName" (CudaStatus, *mut *const c_char);
    error_text = "cuGetErrorString" (CudaStatus, *mut *const c_char);
}

functions! {
    /// Memory that is mapped into reserved addresses piece by piece.
    VirtualMemory;
    granularity = "cuMemGetAllocationGranularity" (*mut usize, *const DeviceMemory, i32);
    reserve = "cuMemAddressReserve" (*mut DevicePtr, usize, usize, DevicePtr, u64);
    unreserve = "cuMemAddressFree" (DevicePtr, usize);
    create = "cuMemCreate" (*mut u64, usize, *const DeviceMemory, u64);
    release = "cuMemRelease" (u64);
    map = "cuMemMap" (DevicePtr, usize, usize, u64, u64);
    unmap = "cuMemUnmap" (DevicePtr, usize);
    set_access = "cuMemSetAccess" (DevicePtr, usize, *const MemoryAccessDesc, usize);
}

/// `CUDA_MEMCPY2D`, between two places of the device.
#[repr(C)]
pub struct PitchedCopy {
    from: PitchedSide,
    to: PitchedSide,
    row_bytes: usize,
    rows: usize,
}

#[repr(C)]
struct PitchedSide {
    x: usize,
    y: usize,
    kind: i32,
    host: *const c_void,
    device: DevicePtr,
    array: DriverHandle,
    pitch: usize,
}

const _: () = assert!(size_of::<PitchedCopy>() == 128);

impl PitchedCopy {
    /// A copy of rows, with the start and the distance of rows on either side; bytes of a row, and rows.
    pub fn on_device(from: (DevicePtr, u64), to: (DevicePtr, u64), (row_bytes, rows): (u64, u64)) -> Self {
        const DEVICE: i32 = 2;
        let side = |(device, pitch): (DevicePtr, u64)| PitchedSide {
            x: 0,
            y: 0,
            kind: DEVICE,
            host: std::ptr::null(),
            device,
            array: std::ptr::null_mut(),
            pitch: pitch as usize,
        };
        Self { from: side(from), to: side(to), row_bytes: row_bytes as usize, rows: rows as usize }
    }
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemoryLocation {
    kind: i32,
    device: i32,
}

/// `CUmemAllocationProp` of plain memory on one device.
#[repr(C)]
pub struct DeviceMemory {
    kind: i32,
    handle_types: i32,
    location: MemoryLocation,
    win32_metadata: *mut c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub struct MemoryAccessDesc {
    location: MemoryLocation,
    flags: i32,
}

const _: () = assert!(size_of::<DeviceMemory>() == 32 && size_of::<MemoryAccessDesc>() == 12);

impl MemoryLocation {
    fn for_device(device: i32) -> Self {
        Self { kind: 1, device }
    }
}

impl DeviceMemory {
    pub fn for_device(device: i32) -> Self {
        let location = MemoryLocation::for_device(device);
        Self { kind: 1, handle_types: 0, location, win32_metadata: std::ptr::null_mut(), flags: [0; 8] }
    }
}

impl MemoryAccessDesc {
    pub fn read_write(device: i32) -> Self {
        Self { location: MemoryLocation::for_device(device), flags: 3 }
    }
}

/// The loaded driver library.
pub struct CudaDriver {
    pub functions: Functions,
    /// `None`: the driver lacks them.
    pub virtual_memory: Option<VirtualMemory>,
    /// The functions must not outlive it.
    _library: Library,
}

impl CudaDriver {
    /// Loads and initialises the driver; the error says what is missing.
    pub fn open() -> std::result::Result<Self, String> {
        let name =
            std::env::var(DRIVER_VARIABLE).ok().filter(|n| !n.is_empty()).unwrap_or_else(|| DRIVER.into());
        // SAFETY: loading the vendor's driver library runs its initialisers, as intended.
        let library = unsafe { Library::new(&name) }.map_err(|e| {
            format!("the NVIDIA driver library {name} cannot be loaded ({e}); install the NVIDIA driver")
        })?;
        let f = Functions::load(&library).map_err(|what| {
            format!("the NVIDIA driver library {name} is too old: {what}; CUDA 11.4 is needed")
        })?;
        let virtual_memory = VirtualMemory::load(&library).ok();
        let driver = Self { functions: f, virtual_memory, _library: library };
        // SAFETY: plain call.
        let status = unsafe { (driver.functions.init)(0) };
        if status != 0 {
            return Err(format!("the NVIDIA driver {name} does not start: {}", driver.describe(status)));
        }
        Ok(driver)
    }

    /// Turns a status into a result.
    pub fn check(&self, call: &'static str, status: CudaStatus) -> Result<()> {
        if status == 0 { Ok(()) } else { Err(Error::Driver { call, what: self.describe(status) }) }
    }

    /// The same for a call that takes `bytes` bytes of memory for `what`.
    pub fn check_memory(
        &self,
        call: &'static str,
        status: CudaStatus,
        what: &'static str,
        bytes: u64,
    ) -> Result<()> {
        match status {
            OUT_OF_MEMORY => Err(Error::OutOfMemory { what, bytes }),
            status => self.check(call, status),
        }
    }

    /// Loads PTX or a cubin. `image` ends with a NUL byte.
    pub fn load_module(&self, image: &[u8]) -> Result<DriverHandle> {
        let mut log = vec![0u8; 8192];
        let mut options = [JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
        let mut module = std::ptr::null_mut();
        // SAFETY: two options with their values; the log has the size given; the image is NUL-terminated.
        let status = unsafe {
            (self.functions.module_load)(
                &mut module,
                image.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        if status == 0 {
            return Ok(module);
        }
        let end = log.iter().position(|&c| c == 0).unwrap_or(log.len());
        let what = format!("{}\n{}", self.describe(status), String::from_utf8_lossy(&log[..end]).trim());
        Err(Error::Driver { call: "cuModuleLoadDataEx", what: what.trim().to_string() })
    }

    fn describe(&self, status: CudaStatus) -> String {
        let text = |f: unsafe extern "C" fn(CudaStatus, *mut *const c_char) -> CudaStatus| {
            let mut text = std::ptr::null();
            // SAFETY: on success the driver stores a static NUL-terminated text.
            unsafe {
                let found = f(status, &mut text) == 0 && !text.is_null();
                found.then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        match (text(self.functions.error_name), text(self.functions.error_text)) {
            (Some(name), Some(text)) => format!("{name}: {text}"),
            (Some(name), None) => name,
            _ => format!("error {status}"),
        }
    }
}

//! The few functions of the CUDA driver API that we use, bound at run time.
//!
//! Signatures from `cuda.h` of CUDA 12; every one of them exists since CUDA 11.4 or longer. `_v2` and the like are the
//! names that the header's macros give. The functions of [`VirtualMemory`] may be missing.

use std::ffi::{CStr, c_char, c_void};

use libloading::Library;

use crate::{Error, Result};

/// Names another driver library than `libcuda.so.1`.
const DRIVER_VARIABLE: &str = "MLCC_CUDA_DRIVER";
const DRIVER: &str = "libcuda.so.1";

pub type DevicePtr = u64;
/// `CUcontext`, `CUmodule`, `CUfunction`, `CUstream`, `CUevent`, `CUgraph`, `CUgraphExec`: opaque.
pub type Handle = *mut c_void;
type Status = i32;

const OUT_OF_MEMORY: Status = 2;
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
            $(pub $field: unsafe extern "C" fn($($arg),*) -> Status,)*
        }

        impl $name {
            fn load(library: &Library) -> std::result::Result<Self, String> {
                // SAFETY: the symbols have these signatures in every driver that has them.
                Ok(unsafe { Self {
                    $($field: *library
                        .get::<unsafe extern "C" fn($($arg),*) -> Status>($symbol)
                        .map_err(|_| format!("it lacks {}", $symbol))?,)*
                } })
            }
        }
    };
}

functions! {
    /// What every driver has.
    Functions;
    init = "cuInit" (u32);
    device_count = "cuDeviceGetCount" (*mut i32);
    device_get = "cuDeviceGet" (*mut i32, i32);
    device_uuid = "cuDeviceGetUuid" (*mut u8, i32);
    device_name = "cuDeviceGetName" (*mut c_char, i32, i32);
    device_attribute = "cuDeviceGetAttribute" (*mut i32, i32, i32);
    context_retain = "cuDevicePrimaryCtxRetain" (*mut Handle, i32);
    context_release = "cuDevicePrimaryCtxRelease_v2" (i32);
    context_set = "cuCtxSetCurrent" (Handle);
    module_load = "cuModuleLoadDataEx" (*mut Handle, *const c_void, u32, *mut i32, *mut *mut c_void);
    module_unload = "cuModuleUnload" (Handle);
    module_function = "cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    function_attribute = "cuFuncSetAttribute" (Handle, i32, i32);
    memory_alloc = "cuMemAlloc_v2" (*mut DevicePtr, usize);
    memory_free = "cuMemFree_v2" (DevicePtr);
    memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    host_alloc = "cuMemHostAlloc" (*mut *mut c_void, usize, u32);
    host_free = "cuMemFreeHost" (*mut c_void);
    to_device = "cuMemcpyHtoDAsync_v2" (DevicePtr, *const c_void, usize, Handle);
    to_host = "cuMemcpyDtoHAsync_v2" (*mut c_void, DevicePtr, usize, Handle);
    on_device = "cuMemcpyDtoDAsync_v2" (DevicePtr, DevicePtr, usize, Handle);
    copy_2d = "cuMemcpy2DAsync_v2" (*const Copy2d, Handle);
    fill_bytes = "cuMemsetD8Async" (DevicePtr, u8, usize, Handle);
    fill_words = "cuMemsetD32Async" (DevicePtr, u32, usize, Handle);
    launch = "cuLaunchKernel"
        (Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *mut *mut c_void, *mut *mut c_void);
    stream_create = "cuStreamCreate" (*mut Handle, u32);
    stream_wait = "cuStreamSynchronize" (Handle);
    stream_destroy = "cuStreamDestroy_v2" (Handle);
    event_create = "cuEventCreate" (*mut Handle, u32);
    event_record = "cuEventRecord" (Handle, Handle);
    event_wait = "cuEventSynchronize" (Handle);
    event_destroy = "cuEventDestroy_v2" (Handle);
    capture_begin = "cuStreamBeginCapture_v2" (Handle, i32);
    capture_end = "cuStreamEndCapture" (Handle, *mut Handle);
    graph_instantiate = "cuGraphInstantiateWithFlags" (*mut Handle, Handle, u64);
    graph_launch = "cuGraphLaunch" (Handle, Handle);
    graph_destroy = "cuGraphDestroy" (Handle);
    graph_exec_destroy = "cuGraphExecDestroy" (Handle);
    error_name = "cuGetErrorName" (Status, *mut *const c_char);
    error_text = "cuGetErrorString" (Status, *mut *const c_char);
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
    set_access = "cuMemSetAccess" (DevicePtr, usize, *const Access, usize);
}

/// `CUDA_MEMCPY2D`, between two places of the device.
#[repr(C)]
pub struct Copy2d {
    from: Side2d,
    to: Side2d,
    row_bytes: usize,
    rows: usize,
}

#[repr(C)]
struct Side2d {
    x: usize,
    y: usize,
    kind: i32,
    host: *const c_void,
    device: DevicePtr,
    array: Handle,
    pitch: usize,
}

const _: () = assert!(size_of::<Copy2d>() == 128);

impl Copy2d {
    /// Where rows begin and how far they lie apart, on either side; bytes of a row, and rows.
    pub fn on_device(from: (DevicePtr, u64), to: (DevicePtr, u64), (row_bytes, rows): (u64, u64)) -> Self {
        const DEVICE: i32 = 2;
        let side = |(device, pitch): (DevicePtr, u64)| Side2d {
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
pub struct Location {
    kind: i32,
    device: i32,
}

/// `CUmemAllocationProp` of plain memory on one device.
#[repr(C)]
pub struct DeviceMemory {
    kind: i32,
    handle_types: i32,
    location: Location,
    win32_metadata: *mut c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub struct Access {
    location: Location,
    flags: i32,
}

const _: () = assert!(size_of::<DeviceMemory>() == 32 && size_of::<Access>() == 12);

impl Location {
    fn of(device: i32) -> Self {
        Self { kind: 1, device }
    }
}

impl DeviceMemory {
    pub fn of(device: i32) -> Self {
        let location = Location::of(device);
        Self { kind: 1, handle_types: 0, location, win32_metadata: std::ptr::null_mut(), flags: [0; 8] }
    }
}

impl Access {
    pub fn read_write(device: i32) -> Self {
        Self { location: Location::of(device), flags: 3 }
    }
}

/// The loaded driver library.
pub struct Driver {
    pub f: Functions,
    /// `None`: the driver lacks them.
    pub virtual_memory: Option<VirtualMemory>,
    /// The functions must not outlive it.
    _library: Library,
}

impl Driver {
    /// Loads and initialises the driver; the error says what is missing.
    pub fn open() -> std::result::Result<Self, String> {
        let name =
            std::env::var(DRIVER_VARIABLE).ok().filter(|n| !n.is_empty()).unwrap_or_else(|| DRIVER.into());
        // SAFETY: loading the vendor's driver library runs its initialisers, which is what it is made for.
        let library = unsafe { Library::new(&name) }.map_err(|e| {
            format!("the NVIDIA driver library {name} cannot be loaded ({e}); install the NVIDIA driver")
        })?;
        let f = Functions::load(&library).map_err(|what| {
            format!("the NVIDIA driver library {name} is too old: {what}; CUDA 11.4 is needed")
        })?;
        let virtual_memory = VirtualMemory::load(&library).ok();
        let driver = Self { f, virtual_memory, _library: library };
        // SAFETY: plain call.
        let status = unsafe { (driver.f.init)(0) };
        if status != 0 {
            return Err(format!("the NVIDIA driver {name} does not start: {}", driver.describe(status)));
        }
        Ok(driver)
    }

    /// Turns a status into a result.
    pub fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == 0 { Ok(()) } else { Err(Error::Driver { call, what: self.describe(status) }) }
    }

    /// The same for a call that takes `bytes` bytes of memory for `what`.
    pub fn check_memory(
        &self,
        call: &'static str,
        status: Status,
        what: &'static str,
        bytes: u64,
    ) -> Result<()> {
        match status {
            OUT_OF_MEMORY => Err(Error::OutOfMemory { what, bytes }),
            status => self.check(call, status),
        }
    }

    /// Loads PTX or a cubin. `image` ends with a NUL byte.
    pub fn load_module(&self, image: &[u8]) -> Result<Handle> {
        let mut log = vec![0u8; 8192];
        let mut options = [JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES];
        let mut values = [log.as_mut_ptr().cast::<c_void>(), log.len() as *mut c_void];
        let mut module = std::ptr::null_mut();
        // SAFETY: two options with their values; the log has the size given; the image is NUL-terminated.
        let status = unsafe {
            (self.f.module_load)(
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

    fn describe(&self, status: Status) -> String {
        let text = |f: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
            let mut text = std::ptr::null();
            // SAFETY: on success the driver stores a static NUL-terminated text.
            unsafe {
                let found = f(status, &mut text) == 0 && !text.is_null();
                found.then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        match (text(self.f.error_name), text(self.f.error_text)) {
            (Some(name), Some(text)) => format!("{name}: {text}"),
            (Some(name), None) => name,
            _ => format!("error {status}"),
        }
    }
}

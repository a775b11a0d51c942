//! The few functions of NCCL that we use, bound at run time as the driver's are.
//!
//! Signatures from `nccl.h` of NCCL 2. Its streams are those of the driver.

use std::ffi::{CStr, c_char, c_void};

use libloading::Library;

use super::driver::{DevicePtr, DriverHandle};
use crate::{Error, Result};

/// Names another library than `libnccl.so.2`.
const LIBRARY_VARIABLE: &str = "MLCC_NCCL";
const LIBRARY: &str = "libnccl.so.2";
/// 2.9.6, the first one whose calls can be recorded in a CUDA graph; as `ncclGetVersion` counts.
const OLDEST: i32 = 20_906;
/// `ncclUint8`.
const BYTES: i32 = 1;

type NcclStatus = i32;

/// `ncclUniqueId`: what rank 0 makes and all others get from it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub [u8; 128]);

struct NcclFunctions {
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> NcclStatus,
    init_rank: unsafe extern "C" fn(*mut DriverHandle, i32, UniqueId, i32) -> NcclStatus,
    all_gather: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        i32,
        DriverHandle,
        DriverHandle,
    ) -> NcclStatus,
    destroy: unsafe extern "C" fn(DriverHandle) -> NcclStatus,
    abort: unsafe extern "C" fn(DriverHandle) -> NcclStatus,
    error_text: unsafe extern "C" fn(NcclStatus) -> *const c_char,
}

/// The loaded library.
pub(super) struct NcclLibrary {
    functions: NcclFunctions,
    /// The functions must not outlive it.
    _library: Library,
}

impl NcclLibrary {
    /// The error says what is missing.
    pub fn open() -> Result<NcclLibrary> {
        let name = std::env::var(LIBRARY_VARIABLE).ok().filter(|n| !n.is_empty());
        let name = name.unwrap_or_else(|| LIBRARY.into());
        // SAFETY: loading the vendor's library runs its initialisers, as intended.
        let library = unsafe { Library::new(&name) }
            .map_err(|e| Error::NoNccl { what: format!("{name} cannot be loaded ({e})") })?;
        let lacks = |symbol: &str| Error::NoNccl { what: format!("{name} lacks {symbol}") };
        /// A function of the library.
        macro_rules! function {
            ($symbol:literal) => {
                // SAFETY: the symbol has the signature of its field in every version.
                *unsafe { library.get($symbol.as_bytes()) }.map_err(|_| lacks($symbol))?
            };
        }
        let version_of: unsafe extern "C" fn(*mut i32) -> NcclStatus = function!("ncclGetVersion");
        let mut version = 0;
        // SAFETY: a place for the result.
        if unsafe { version_of(&mut version) } != 0 || version < OLDEST {
            return Err(Error::NoNccl { what: format!("{name} is version {}", version_text(version)) });
        }
        let f = NcclFunctions {
            unique_id: function!("ncclGetUniqueId"),
            init_rank: function!("ncclCommInitRank"),
            all_gather: function!("ncclAllGather"),
            destroy: function!("ncclCommDestroy"),
            abort: function!("ncclCommAbort"),
            error_text: function!("ncclGetErrorString"),
        };
        Ok(NcclLibrary { functions: f, _library: library })
    }

    /// The id that rank 0 makes.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: a place for the result.
        self.check("ncclGetUniqueId", unsafe { (self.functions.unique_id)(&mut id) })?;
        Ok(id)
    }

    /// Joins the others, all of which call this with the same id, each with another GPU current.
    pub fn join(self, id: UniqueId, rank: usize, ranks: usize) -> Result<NcclCommunicator> {
        let mut group = std::ptr::null_mut();
        // SAFETY: a place for the result.
        let status = unsafe { (self.functions.init_rank)(&mut group, ranks as i32, id, rank as i32) };
        self.check("ncclCommInitRank", status)?;
        Ok(NcclCommunicator {
            nccl: self,
            communicator: group,
            failed: std::sync::atomic::AtomicBool::new(false),
        })
    }

    fn check(&self, call: &'static str, status: NcclStatus) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: it gives a static text.
        let text = unsafe { (self.functions.error_text)(status) };
        let what = match text.is_null() {
            true => format!("error {status}"),
            // SAFETY: a text with a NUL byte at its end.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        Err(Error::Driver { call, what: format!("{what} (NCCL_DEBUG=WARN says more)") })
    }
}

/// `2.8.4` of 2804, `2.27.3` of 22703.
fn version_text(version: i32) -> String {
    let (major, rest) = if version < 10_000 {
        (version / 1000, version % 1000)
    } else {
        (version / 10_000, version % 10_000)
    };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}

/// A communicator: the GPUs that have joined each other.
pub(super) struct NcclCommunicator {
    nccl: NcclLibrary,
    communicator: DriverHandle,
    /// Something was refused, so others may wait for what does not come.
    failed: std::sync::atomic::AtomicBool,
}

// SAFETY: a communicator may be used by any thread, by one at a time; the executor's lock sees to that.
unsafe impl Send for NcclCommunicator {}
// SAFETY: as above.
unsafe impl Sync for NcclCommunicator {}

impl NcclCommunicator {
    /// Puts on the stream: every rank gives `bytes` bytes from `from`, and gets those of all, in the order of
    /// ranks, at `to`.
    ///
    /// # Safety
    /// Device memory of these sizes, and all ranks reach the same gathers in the same order.
    pub unsafe fn all_gather(
        &self,
        from: DevicePtr,
        to: DevicePtr,
        bytes: u64,
        stream: DriverHandle,
    ) -> Result<()> {
        let (from, to) = (from as usize as *const c_void, to as usize as *mut c_void);
        // SAFETY: by contract.
        let status = unsafe {
            (self.nccl.functions.all_gather)(from, to, bytes as usize, BYTES, self.communicator, stream)
        };
        self.nccl.check("ncclAllGather", status).inspect_err(|_| {
            self.failed.store(true, std::sync::atomic::Ordering::Relaxed);
        })
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        // SAFETY: joined once; it is not running any more, or never will.
        unsafe {
            match *self.failed.get_mut() {
                true => (self.nccl.functions.abort)(self.communicator),
                false => (self.nccl.functions.destroy)(self.communicator),
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_nccl_counts_them() {
        let of = [(2304, "2.3.4"), (2804, "2.8.4"), (20_906, "2.9.6"), (22_703, "2.27.3")];
        for (version, text) in of {
            assert_eq!(version_text(version), text);
        }
    }
}

//! The contract between the runtime and a plug-in through which ranks that are processes exchange their data.
//!
//! The plug-in is a shared library that exports one data symbol, [`PROCESSES_SYMBOL`], a [`ProcessTable`]. It
//! has a version of its own: artifacts do not depend on it.

use core::ffi::c_char;

/// The one symbol that the runtime looks for.
pub const PROCESSES_SYMBOL: &str = "mlcc_processes";
/// Raised with every change of layout or meaning. The first two fields keep their place.
pub const PROCESSES_VERSION: u32 = 1;

/// Return values of the functions of a [`ProcessTable`]. After one that is not [`OK`](outcome::OK) the
/// process may call [`ProcessTable::abort`] and nothing else, and leaves what it gave where it is.
pub mod outcome {
    pub const OK: i32 = 0;
    /// A process did not come within the time; its number was written.
    pub const LATE: i32 = 1;
    /// The library below has failed.
    pub const FAILED: i32 = 2;
}

/// The functions by which processes communicate. All may be called by any thread, one at a time. `limit` is
/// in milliseconds; 0 is no limit.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ProcessTable {
    /// [`PROCESSES_VERSION`].
    pub version: u32,
    /// Bytes of this struct.
    pub struct_size: u32,
    /// The name of the library below, for people: UTF-8 with a NUL byte at the end.
    pub name: *const c_char,
    /// Joins the others, once: writes the number of this process and how many there are.
    pub join: unsafe extern "C" fn(rank: *mut u32, ranks: *mut u32) -> i32,
    /// Joins rows as [`crate::AllGatherFn`] does: each process gives `[rows, row_bytes]` and gets `[rows,
    /// ranks, row_bytes]`.
    pub exchange: unsafe extern "C" fn(
        from: *const u8,
        all: *mut u8,
        rows: u64,
        row_bytes: u64,
        limit: u64,
        late: *mut u32,
    ) -> i32,
    /// Gives bytes to all other processes, which hear them.
    pub tell: unsafe extern "C" fn(bytes: *const u8, len: u64, limit: u64, late: *mut u32) -> i32,
    /// Waits for as many bytes as the process `from` tells.
    pub hear: unsafe extern "C" fn(from: u32, bytes: *mut u8, len: u64, limit: u64, late: *mut u32) -> i32,
    /// Leaves, as all do; the last call.
    pub leave: unsafe extern "C" fn() -> i32,
    /// Ends all processes with this exit code.
    pub abort: unsafe extern "C" fn(code: i32),
}

// SAFETY: the text at `name` is constant.
unsafe impl Sync for ProcessTable {}
// SAFETY: as above.
unsafe impl Send for ProcessTable {}

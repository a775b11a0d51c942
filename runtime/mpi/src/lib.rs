//! `libmlcc_mpi.so`: processes that `mpirun` has started are the ranks of a model ([`mlcc_abi::processes`]).
//!
//! The runtime loads this library when it finds itself started so; nothing else of mlcc knows MPI. Messages
//! go from process to process and not through collective calls: a waiting rank then knows for which one, and
//! can say so.

mod channel;

use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

use mlcc_abi::processes::{PROCESSES_VERSION, ProcessTable, outcome};
use mpi::Threading;
use mpi::environment::Universe;
use mpi::traits::Communicator;

use channel::{MpiChannel, WaitError};

/// The state between joining and leaving.
struct MpiWorld {
    /// Leaves MPI when it is dropped.
    universe: Universe,
    channel: MpiChannel,
}

static JOINED: Mutex<Option<MpiWorld>> = Mutex::new(None);

fn joined() -> MutexGuard<'static, Option<MpiWorld>> {
    JOINED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[unsafe(no_mangle)]
pub static mlcc_processes: ProcessTable = ProcessTable {
    version: PROCESSES_VERSION,
    struct_size: size_of::<ProcessTable>() as u32,
    name: c"MPI".as_ptr(),
    join,
    exchange,
    tell,
    hear,
    leave,
    abort,
};

/// # Safety
/// As in [`ProcessTable`]; also below.
unsafe extern "C" fn join(rank: *mut u32, ranks: *mut u32) -> i32 {
    let mut joined = joined();
    if joined.is_some() {
        return outcome::FAILED;
    }
    // Threads take turns: the mutex sees to that.
    let Some((universe, threading)) = mpi::initialize_with_threading(Threading::Serialized) else {
        return outcome::FAILED;
    };
    if threading < Threading::Serialized {
        return outcome::FAILED;
    }
    let world = universe.world();
    let line = MpiChannel::new(world.rank(), world.size());
    // SAFETY: by contract.
    unsafe {
        *rank = world.rank() as u32;
        *ranks = world.size() as u32;
    }
    *joined = Some(MpiWorld { universe, channel: line });
    outcome::OK
}

/// Calls `f` with the line, and says which rank was late.
///
/// # Safety
/// `late` may be written to.
unsafe fn with_channel(late: *mut u32, f: impl FnOnce(&mut MpiChannel) -> Result<(), WaitError>) -> i32 {
    let Some(MpiWorld { channel: line, .. }) = &mut *joined() else { return outcome::FAILED };
    match f(line) {
        Ok(()) => outcome::OK,
        Err(WaitError::Failed) => outcome::FAILED,
        Err(WaitError::Late(rank)) => {
            // SAFETY: by contract.
            unsafe { *late = rank };
            outcome::LATE
        }
    }
}

unsafe extern "C" fn exchange(
    from: *const u8,
    all: *mut u8,
    rows: u64,
    row_bytes: u64,
    limit: u64,
    late: *mut u32,
) -> i32 {
    // SAFETY: by contract.
    unsafe { with_channel(late, |line| line.all_gather(from, all, rows as usize, row_bytes as usize, limit)) }
}

unsafe extern "C" fn tell(bytes: *const u8, len: u64, limit: u64, late: *mut u32) -> i32 {
    // SAFETY: by contract.
    unsafe { with_channel(late, |line| line.broadcast(bytes, len as usize, limit)) }
}

unsafe extern "C" fn hear(from: u32, bytes: *mut u8, len: u64, limit: u64, late: *mut u32) -> i32 {
    // SAFETY: by contract.
    unsafe { with_channel(late, |line| line.receive_from(from, bytes, len as usize, limit)) }
}

unsafe extern "C" fn leave() -> i32 {
    match joined().take() {
        Some(MpiWorld { universe, .. }) => {
            drop(universe);
            outcome::OK
        }
        None => outcome::FAILED,
    }
}

unsafe extern "C" fn abort(code: i32) {
    // Another thread may wait inside for a rank that will not come, and has the mutex. SAFETY: MPI was
    // started, or this ends the process too.
    unsafe { mpi::ffi::MPI_Abort(mpi::ffi::RSMPI_COMM_WORLD, code as c_int) };
}

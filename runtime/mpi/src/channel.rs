//! Messages between two processes, and waiting for them.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use mpi::ffi::{
    MPI_Comm, MPI_Datatype, MPI_Irecv, MPI_Isend, MPI_Request, MPI_Status, MPI_Test, RSMPI_COMM_WORLD,
    RSMPI_UINT8_T,
};

/// Tags: what is exchanged in steps, and what one process tells.
const EXCHANGED: c_int = 1;
const TOLD: c_int = 2;
/// Longest message: MPI counts with 32 bits.
const MOST: usize = 1 << 30;

/// Times of a waiting thread: it looks again at once, then lets others run, then sleeps.
const BUSY: u32 = 4000;
const POLITE: Duration = Duration::from_millis(20);
const NAP: Duration = Duration::from_micros(100);

/// The reasons why a message did not come.
pub enum WaitError {
    /// The number of a process that did not come in time.
    Late(u32),
    Failed,
}

pub struct MpiChannel {
    rank: usize,
    ranks: usize,
    requests: Vec<PendingRequest>,
    /// Bytes of others, where they cannot go to their place at once.
    staging: Vec<u8>,
}

struct PendingRequest {
    request: MPI_Request,
    peer: u32,
}

// SAFETY: MPI was started for threads that take turns, and a request is no thread's own.
unsafe impl Send for PendingRequest {}

fn world() -> MPI_Comm {
    // SAFETY: a constant, once MPI has started, and a line exists only then.
    unsafe { RSMPI_COMM_WORLD }
}

fn byte() -> MPI_Datatype {
    // SAFETY: as above.
    unsafe { RSMPI_UINT8_T }
}

impl MpiChannel {
    pub fn new(rank: i32, ranks: i32) -> MpiChannel {
        MpiChannel { rank: rank as usize, ranks: ranks as usize, requests: Vec::new(), staging: Vec::new() }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.ranks).filter(move |&rank| rank != own)
    }

    /// See [`mlcc_abi::processes::ProcessTable::all_gather`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn all_gather(
        &mut self,
        from: *const u8,
        all: *mut u8,
        rows: usize,
        row_bytes: usize,
        limit: u64,
    ) -> Result<(), WaitError> {
        let bytes = rows * row_bytes;
        // A single row goes to its place at once.
        let direct = rows == 1;
        if !direct && self.staging.len() < bytes * self.ranks {
            self.staging.resize(bytes * self.ranks, 0);
        }
        let base = if direct { all } else { self.staging.as_mut_ptr() };
        for other in self.others() {
            // SAFETY: by contract there is room for the parts of all, or there is in `staging`, which stays
            // as it is until all have come.
            unsafe { self.receive(other, EXCHANGED, base.add(other * bytes), bytes) }?;
        }
        for other in self.others() {
            // SAFETY: by contract the part is not written meanwhile.
            unsafe { self.send(other, EXCHANGED, from, bytes) }?;
        }
        // SAFETY: inside of the room for all; callers give a part that is not in there.
        unsafe { scatter_rows(from, all, rows, row_bytes, self.ranks, self.rank) };
        self.wait_for_all(limit)?;
        if !direct {
            for other in self.others() {
                // SAFETY: as above, and the parts have come.
                unsafe { scatter_rows(base.add(other * bytes), all, rows, row_bytes, self.ranks, other) };
            }
        }
        Ok(())
    }

    /// # Safety
    /// `len` bytes that are not written meanwhile.
    pub unsafe fn broadcast(&mut self, bytes: *const u8, len: usize, limit: u64) -> Result<(), WaitError> {
        for other in self.others() {
            // SAFETY: by contract.
            unsafe { self.send(other, TOLD, bytes, len) }?;
        }
        self.wait_for_all(limit)
    }

    /// # Safety
    /// Room for `len` bytes.
    pub unsafe fn receive_from(
        &mut self,
        from: u32,
        bytes: *mut u8,
        len: usize,
        limit: u64,
    ) -> Result<(), WaitError> {
        // SAFETY: by contract.
        unsafe { self.receive(from as usize, TOLD, bytes, len) }?;
        self.wait_for_all(limit)
    }

    /// # Safety
    /// The bytes stay until [`MpiChannel::wait_for_all`] has ended without an error.
    unsafe fn send(&mut self, to: usize, tag: c_int, bytes: *const u8, len: usize) -> Result<(), WaitError> {
        for (at, len) in message_chunks(len) {
            let mut request = MaybeUninit::<MPI_Request>::uninit();
            // SAFETY: by contract; MPI does not write to what is sent.
            let code = unsafe {
                let from = bytes.add(at).cast::<c_void>();
                MPI_Isend(from, len, byte(), to as c_int, tag, world(), request.as_mut_ptr())
            };
            // SAFETY: MPI has written it if it has not failed.
            self.requests.push(PendingRequest {
                request: unsafe { started_request(code, request) }?,
                peer: to as u32,
            });
        }
        Ok(())
    }

    /// # Safety
    /// As [`MpiChannel::send`]; the bytes have no other user.
    unsafe fn receive(
        &mut self,
        from: usize,
        tag: c_int,
        bytes: *mut u8,
        len: usize,
    ) -> Result<(), WaitError> {
        for (at, len) in message_chunks(len) {
            let mut request = MaybeUninit::<MPI_Request>::uninit();
            // SAFETY: by contract.
            let code = unsafe {
                let to = bytes.add(at).cast::<c_void>();
                MPI_Irecv(to, len, byte(), from as c_int, tag, world(), request.as_mut_ptr())
            };
            // SAFETY: as above.
            self.requests.push(PendingRequest {
                request: unsafe { started_request(code, request) }?,
                peer: from as u32,
            });
        }
        Ok(())
    }

    /// Waits until all messages have been sent and received.
    fn wait_for_all(&mut self, limit: u64) -> Result<(), WaitError> {
        let (mut looks, mut begin) = (0, None);
        while let Some(last) = self.requests.last_mut() {
            if test_request(&mut last.request)? {
                self.requests.pop();
                continue;
            }
            let with = last.peer;
            looks += 1;
            if looks < BUSY {
                std::hint::spin_loop();
                continue;
            }
            let waited = begin.get_or_insert_with(Instant::now).elapsed();
            if limit > 0 && waited > Duration::from_millis(limit) {
                return Err(WaitError::Late(with));
            }
            match waited < POLITE {
                true => std::thread::yield_now(),
                false => std::thread::sleep(NAP),
            }
        }
        Ok(())
    }
}

/// # Safety
/// MPI has written the request if `code` is that of success.
unsafe fn started_request(code: c_int, request: MaybeUninit<MPI_Request>) -> Result<MPI_Request, WaitError> {
    // SAFETY: by contract.
    if code == 0 { Ok(unsafe { request.assume_init() }) } else { Err(WaitError::Failed) }
}

fn test_request(request: &mut MPI_Request) -> Result<bool, WaitError> {
    let (mut done, mut status) = (0, MaybeUninit::<MPI_Status>::uninit());
    // SAFETY: a request that has started, and places for what MPI writes.
    let code = unsafe { MPI_Test(request, &mut done, status.as_mut_ptr()) };
    if code == 0 { Ok(done != 0) } else { Err(WaitError::Failed) }
}

/// The begin and the length of each message of `len` bytes in all.
fn message_chunks(len: usize) -> impl Iterator<Item = (usize, c_int)> {
    (0..len).step_by(MOST).map(move |at| (at, (len - at).min(MOST) as c_int))
}

/// Copies the rows of a rank to where the rows of all are.
///
/// # Safety
/// `rows * row_bytes` bytes at `from`, as many for each rank at `all`.
unsafe fn scatter_rows(
    from: *const u8,
    all: *mut u8,
    rows: usize,
    row_bytes: usize,
    ranks: usize,
    rank: usize,
) {
    for row in 0..rows {
        // SAFETY: by contract.
        unsafe {
            let to = all.add((row * ranks + rank) * row_bytes);
            std::ptr::copy_nonoverlapping(from.add(row * row_bytes), to, row_bytes);
        }
    }
}

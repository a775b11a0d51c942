//! Memory, plain and mapped, and copies.
#![allow(non_snake_case)]

use std::ffi::c_void;
use std::sync::Arc;

use super::device::has_context;
use super::{CuHandle, CuResult, put, usable};
use crate::driver::host::HostRange;
use crate::driver::streams::StreamWork;
use crate::driver::{DriverResult, SoftDriver, Status, fail};

/// `CUmemAllocationProp`.
#[repr(C)]
pub struct AllocationProperties {
    kind: i32,
    handle_types: i32,
    location_kind: i32,
    device: i32,
    win32: *const c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub struct AccessDescriptor {
    location_kind: i32,
    device: i32,
    flags: i32,
}

fn current(f: impl FnOnce(&mut SoftDriver) -> DriverResult<()>) -> CuResult {
    usable(|driver| {
        has_context()?;
        f(driver)
    })
}

/// Calls that a stream of this thread does not permit while it records.
fn blocking(f: impl FnOnce(&mut SoftDriver) -> DriverResult<()>) -> CuResult {
    current(|driver| match driver.streams.recording() {
        true => fail(Status::StreamCaptureUnsupported, "memory cannot be managed while a stream records"),
        false => f(driver),
    })
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(to: *mut u64, bytes: usize) -> CuResult {
    blocking(|driver| {
        let at = driver.space.allocate(bytes as u64)?;
        // SAFETY: the caller's promise.
        unsafe { put(to, at) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(at: u64) -> CuResult {
    blocking(|driver| {
        driver.wait_for_all()?;
        driver.space.free(at)
    })
}

/// # Safety
/// Places for the results.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CuResult {
    current(|driver| {
        // SAFETY: the caller's promise.
        unsafe {
            put(free, driver.space.free_bytes() as usize)?;
            put(total, driver.options.memory as usize)
        }
    })
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, _flags: u32) -> CuResult {
    blocking(|driver| {
        let at = driver.space.pin(bytes);
        // SAFETY: the caller's promise.
        unsafe { put(to, at.cast()) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(at: *mut c_void) -> CuResult {
    blocking(|driver| {
        driver.wait_for_all()?;
        driver.space.unpin(at as usize)
    })
}

/// # Safety
/// `from` has `bytes` bytes; pinned ones stay until the stream was waited for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    bytes: usize,
    stream: CuHandle,
) -> CuResult {
    current(|driver| {
        if from.is_null() || bytes == 0 {
            return if bytes == 0 {
                Ok(())
            } else {
                fail(Status::InvalidValue, "a copy from a null pointer")
            };
        }
        // SAFETY: the caller's promise; pageable memory is read here and now.
        let from = unsafe { HostRange::new(from as usize, bytes) };
        let work = match driver.space.is_pinned(from.begin(), bytes) {
            true => StreamWork::FromHost { to, from },
            false => StreamWork::Staged { to, data: Arc::new(from.read()) },
        };
        driver.enqueue(stream, work)
    })
}

/// # Safety
/// `to` has `bytes` bytes; pinned ones stay until the stream was waited for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    bytes: usize,
    stream: CuHandle,
) -> CuResult {
    current(|driver| {
        if to.is_null() || bytes == 0 {
            return if bytes == 0 { Ok(()) } else { fail(Status::InvalidValue, "a copy to a null pointer") };
        }
        // SAFETY: the caller's promise; a copy to pageable memory is over when this call returns.
        let to = unsafe { HostRange::new(to as usize, bytes) };
        let pinned = driver.space.is_pinned(to.begin(), bytes);
        driver.enqueue(stream, StreamWork::ToHost { to, from })?;
        if pinned { Ok(()) } else { driver.wait(stream) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: CuHandle) -> CuResult {
    current(|driver| driver.enqueue(stream, StreamWork::Copy { to, from, bytes: bytes as u64 }))
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
pub struct MemcpyDescriptor {
    from: MemcpySide,
    to: MemcpySide,
    row_bytes: usize,
    rows: usize,
}

#[repr(C)]
struct MemcpySide {
    x: usize,
    y: usize,
    kind: i32,
    host: *const c_void,
    device: u64,
    array: *const c_void,
    pitch: usize,
}

/// # Safety
/// A description, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const MemcpyDescriptor, stream: CuHandle) -> CuResult {
    current(|driver| {
        // SAFETY: the caller's promise.
        let Some(copy) = (unsafe { copy.as_ref() }) else {
            return fail(Status::InvalidValue, "a copy without a description");
        };
        let plain =
            |side: &MemcpySide| (side.x, side.y, side.kind) == (0, 0, 2) && side.pitch >= copy.row_bytes;
        if !plain(&copy.from) || !plain(&copy.to) {
            return fail(Status::InvalidValue, "this driver copies rows between places of the device");
        }
        let side = |side: &MemcpySide| (side.device, side.pitch as u64);
        let (to, from) = (side(&copy.to), side(&copy.from));
        let (row, rows) = (copy.row_bytes as u64, copy.rows as u64);
        driver.enqueue(stream, StreamWork::Rows { to, from, row, rows })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: CuHandle) -> CuResult {
    current(|driver| {
        driver.enqueue(stream, StreamWork::Fill { to, element: vec![value], count: count as u64 })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(to: u64, value: u32, count: usize, stream: CuHandle) -> CuResult {
    current(|driver| {
        if !to.is_multiple_of(4) {
            return fail(Status::InvalidValue, format!("words at {to:#x}"));
        }
        let element = value.to_le_bytes().to_vec();
        driver.enqueue(stream, StreamWork::Fill { to, element, count: count as u64 })
    })
}

/// # Safety
/// `properties` is null or points at them.
unsafe fn plain_memory(properties: *const AllocationProperties) -> DriverResult<()> {
    // SAFETY: the caller's promise.
    match unsafe { properties.as_ref() } {
        Some(AllocationProperties { kind: 1, location_kind: 1, device: 0, handle_types: 0, .. }) => Ok(()),
        _ => fail(Status::InvalidValue, "this driver knows plain memory of device 0 only"),
    }
}

/// # Safety
/// A place for the result, and properties.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationGranularity(
    to: *mut usize,
    of: *const AllocationProperties,
    _option: i32,
) -> CuResult {
    current(|driver| {
        // SAFETY: the caller's promise.
        unsafe {
            plain_memory(of)?;
            put(to, driver.space.granule() as usize)
        }
    })
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressReserve(
    to: *mut u64,
    bytes: usize,
    _align: usize,
    _at: u64,
    _flags: u64,
) -> CuResult {
    blocking(|driver| {
        let at = driver.space.reserve(bytes as u64)?;
        // SAFETY: the caller's promise.
        unsafe { put(to, at) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(at: u64, bytes: usize) -> CuResult {
    blocking(|driver| driver.space.unreserve(at, bytes as u64))
}

/// # Safety
/// A place for the result, and properties.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(
    to: *mut u64,
    bytes: usize,
    of: *const AllocationProperties,
    _flags: u64,
) -> CuResult {
    blocking(|driver| {
        // SAFETY: the caller's promise.
        unsafe { plain_memory(of)? };
        let handle = driver.space.create(bytes as u64)?;
        // SAFETY: as above.
        unsafe { put(to, handle) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: u64) -> CuResult {
    blocking(|driver| driver.space.release(handle))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(at: u64, bytes: usize, offset: usize, handle: u64, _flags: u64) -> CuResult {
    blocking(|driver| match offset {
        0 => driver.space.map(at, bytes as u64, handle),
        _ => fail(Status::InvalidValue, "this driver maps whole memory only"),
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(at: u64, bytes: usize) -> CuResult {
    blocking(|driver| driver.space.unmap(at, bytes as u64))
}

/// # Safety
/// `descriptions` are `count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemSetAccess(
    at: u64,
    bytes: usize,
    descriptions: *const AccessDescriptor,
    count: usize,
) -> CuResult {
    blocking(|driver| {
        // SAFETY: the caller's promise.
        match (unsafe { descriptions.as_ref() }, count) {
            (Some(AccessDescriptor { location_kind: 1, device: 0, flags }), 1) => {
                driver.space.set_access(at, bytes as u64, *flags == 3)
            }
            _ => fail(Status::InvalidValue, "one description, of device 0"),
        }
    })
}

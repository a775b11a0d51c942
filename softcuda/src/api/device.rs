//! Start, devices, contexts, errors.
#![allow(non_snake_case)]

use std::cell::Cell;
use std::ffi::{CStr, c_char};

use super::{CuHandle, CuResult, put, text_of, usable, with};
use crate::driver::{DriverResult, SoftDriver, Status, fail};

const NAME: &CStr = c"Software GPU";
/// The primary context of device 0.
const CONTEXT: CuHandle = 0x5c00_0010;

thread_local! {
    static CURRENT: Cell<CuHandle> = const { Cell::new(0) };
}

/// Checks that the thread has a context.
pub fn has_context() -> DriverResult<()> {
    match CURRENT.get() {
        0 => fail(Status::InvalidContext, "no context is current on this thread"),
        _ => Ok(()),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: u32) -> CuResult {
    with(|driver| {
        if flags != 0 {
            return fail(Status::InvalidValue, "flags of cuInit are 0");
        }
        if driver.options.devices == 0 {
            return fail(Status::NoDevice, "there is no device (SOFTCUDA_DEVICES)");
        }
        driver.initialised = true;
        Ok(())
    })
}

/// # Safety
/// A place for the result, as for all functions here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut i32) -> CuResult {
    // SAFETY: the caller's promise.
    with(|driver| unsafe { put(version, driver.options.version as i32) })
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut i32) -> CuResult {
    // SAFETY: the caller's promise.
    usable(|driver| unsafe { put(count, driver.options.devices) })
}

fn exists(driver: &SoftDriver, device: i32) -> DriverResult<()> {
    match (0..driver.options.devices).contains(&device) {
        true => Ok(()),
        false => fail(Status::InvalidDevice, format!("there is no device {device}")),
    }
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut i32, ordinal: i32) -> CuResult {
    usable(|driver| {
        exists(driver, ordinal)?;
        // SAFETY: the caller's promise.
        unsafe { put(device, ordinal) }
    })
}

/// # Safety
/// `name` has `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: i32, device: i32) -> CuResult {
    usable(|driver| {
        exists(driver, device)?;
        if name.is_null() || length < 1 {
            return fail(Status::InvalidValue, "no place for a name");
        }
        let text = NAME.to_bytes();
        let n = text.len().min(length as usize - 1);
        // SAFETY: `n` bytes and a zero fit into the caller's `length`.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast::<u8>(), n);
            name.add(n).write(0);
        }
        Ok(())
    })
}

/// # Safety
/// Room for 16 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32) -> CuResult {
    usable(|driver| {
        exists(driver, device)?;
        let mut bytes = *b"softcuda........";
        bytes[8..12].copy_from_slice(&driver.options.uuid.to_le_bytes());
        bytes[12..].copy_from_slice(&device.to_le_bytes());
        // SAFETY: the caller's promise.
        unsafe { put(uuid, bytes) }
    })
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32) -> CuResult {
    usable(|driver| {
        exists(driver, device)?;
        // SAFETY: the caller's promise.
        unsafe { put(bytes, driver.options.memory as usize) }
    })
}

/// Values of `CUdevice_attribute`.
fn attribute(driver: &SoftDriver, number: i32) -> Option<i32> {
    let sm = driver.options.sm as i32;
    Some(match number {
        1 => 1024,                                // MAX_THREADS_PER_BLOCK
        2 | 3 => 1024,                            // MAX_BLOCK_DIM_X, Y
        4 => 64,                                  // MAX_BLOCK_DIM_Z
        5 => i32::MAX,                            // MAX_GRID_DIM_X
        6 | 7 => 65_535,                          // MAX_GRID_DIM_Y, Z
        8 => 48 << 10,                            // MAX_SHARED_MEMORY_PER_BLOCK
        10 => 32,                                 // WARP_SIZE
        12 | 82 => 65_536,                        // MAX_REGISTERS_PER_BLOCK, PER_MULTIPROCESSOR
        16 => 2,                                  // MULTIPROCESSOR_COUNT
        39 => 2048,                               // MAX_THREADS_PER_MULTIPROCESSOR
        75 => sm / 10,                            // COMPUTE_CAPABILITY_MAJOR
        76 => sm % 10,                            // COMPUTE_CAPABILITY_MINOR
        81 => driver.most_shared() as i32 + 1024, // MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        97 => driver.most_shared() as i32,        // MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        102 => driver.options.mapping.into(),     // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        _ => return None,
    })
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut i32, number: i32, device: i32) -> CuResult {
    usable(|driver| {
        exists(driver, device)?;
        match attribute(driver, number) {
            // SAFETY: the caller's promise.
            Some(found) => unsafe { put(value, found) },
            None => fail(Status::InvalidValue, format!("attribute {number} is not known to this driver")),
        }
    })
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut CuHandle, device: i32) -> CuResult {
    usable(|driver| {
        exists(driver, device)?;
        if device != 0 {
            return fail(Status::InvalidDevice, "this driver works with device 0 only");
        }
        driver.hold();
        // SAFETY: the caller's promise.
        unsafe { put(context, CONTEXT) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(device: i32) -> CuResult {
    with(|driver| {
        exists(driver, device)?;
        driver.release()
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: CuHandle) -> CuResult {
    with(|driver| {
        if context != 0 && (context != CONTEXT || driver.contexts == 0) {
            return fail(Status::InvalidContext, "no such context");
        }
        CURRENT.set(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> CuResult {
    usable(|driver| {
        has_context()?;
        driver.wait_for_all()
    })
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(status: i32, text: *mut *const c_char) -> CuResult {
    let Some(known) = Status::of(status) else { return Status::InvalidValue as CuResult };
    // SAFETY: the caller's promise.
    let stored = unsafe { put(text, known.name().as_ptr()) };
    stored.map_or_else(|e| e.status as CuResult, |()| 0)
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(status: i32, text: *mut *const c_char) -> CuResult {
    let Some(known) = text_of(status) else { return Status::InvalidValue as CuResult };
    // SAFETY: the caller's promise.
    let stored = unsafe { put(text, known.as_ptr()) };
    stored.map_or_else(|e| e.status as CuResult, |()| 0)
}

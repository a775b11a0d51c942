//! The C functions, as `cuda.h` of CUDA 12 declares them. They convert pointers to values and back; the work
//! is done in [`crate::driver`].

mod device;
mod memory;
mod modules;
mod streams;

use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{LazyLock, Mutex};

use crate::driver::{DriverFailure, DriverResult, SoftDriver, Status};
use crate::options::DeviceOptions;

/// `CUresult`.
pub type CuResult = i32;
/// Pointers to opaque things, and device addresses.
pub type CuHandle = u64;

static DRIVER: LazyLock<std::result::Result<Mutex<SoftDriver>, String>> =
    LazyLock::new(|| DeviceOptions::from_environment().map(|options| Mutex::new(SoftDriver::new(options))));

/// Calls the driver, one call at a time, and keeps the text of what failed.
fn with(f: impl FnOnce(&mut SoftDriver) -> DriverResult<()>) -> CuResult {
    let Ok(driver) = &*DRIVER else { return Status::Unknown as CuResult };
    let mut driver = driver.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let answer = catch_unwind(AssertUnwindSafe(|| f(&mut driver)));
    let broken = |_| {
        Err(DriverFailure { status: Status::Unknown, what: "a fault of the software driver itself".into() })
    };
    match answer.unwrap_or_else(broken) {
        Ok(()) => 0,
        Err(failure) => {
            let number = failure.status as CuResult;
            keep_text(&mut driver, number, &failure.what);
            number
        }
    }
}

/// The same for calls that need a context without a fault.
fn usable(f: impl FnOnce(&mut SoftDriver) -> DriverResult<()>) -> CuResult {
    with(|driver| {
        driver.usable()?;
        f(driver)
    })
}

/// Texts live as long as the process: callers may keep them.
fn keep_text(driver: &mut SoftDriver, number: CuResult, what: &str) {
    let before = driver.texts.get(&number);
    if before.is_none_or(|text| text.to_bytes() != what.as_bytes()) {
        let text = CString::new(what.replace('\0', " ")).unwrap_or_default();
        driver.texts.insert(number, Box::leak(text.into_boxed_c_str()));
    }
}

/// The text of a result: what went wrong, where this driver knows it.
fn text_of(number: CuResult) -> Option<&'static CStr> {
    let driver = match &*DRIVER {
        Ok(driver) => driver,
        Err(what) => {
            static TEXT: std::sync::OnceLock<CString> = std::sync::OnceLock::new();
            return Some(TEXT.get_or_init(|| CString::new(what.as_str()).unwrap_or_default()));
        }
    };
    let driver = driver.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    driver.texts.get(&number).copied().or_else(|| Status::of(number).map(Status::text))
}

/// Stores a result at the caller's address.
///
/// # Safety
/// `to` is null or a place for a value.
unsafe fn put<T>(to: *mut T, value: T) -> DriverResult<()> {
    if to.is_null() {
        return crate::driver::fail(Status::InvalidValue, "a null pointer in place of a result");
    }
    // SAFETY: not null, so it is a place for a value.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

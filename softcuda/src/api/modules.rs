//! Modules, functions, launches.
#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_void};

use super::device::has_context;
use super::{CuHandle, CuResult, put, usable};
use crate::driver::streams::QueuedLaunch;
use crate::driver::{Status, fail};

/// `CU_JIT_ERROR_LOG_BUFFER` and its size, of `CUjit_option`.
const ERROR_LOG: i32 = 5;
const ERROR_LOG_BYTES: i32 = 6;

/// # Safety
/// The image ends with a zero; there are `count` options with values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut CuHandle,
    image: *const c_void,
    count: u32,
    options: *const i32,
    values: *const *mut c_void,
) -> CuResult {
    usable(|driver| {
        has_context()?;
        if image.is_null() {
            return fail(Status::InvalidValue, "no image");
        }
        // SAFETY: the caller's promise. Machine code has zeros inside, and what comes before them tells what
        // it is.
        let image = unsafe { CStr::from_ptr(image.cast()) }.to_bytes();
        let loaded = driver.load_module(image);
        let (mut log, mut bytes) = (None, 0);
        for i in 0..if options.is_null() || values.is_null() { 0 } else { count as usize } {
            // SAFETY: there are `count` of both.
            match unsafe { (*options.add(i), *values.add(i)) } {
                (ERROR_LOG, place) => log = Some(place.cast::<u8>()),
                (ERROR_LOG_BYTES, size) => bytes = size as usize,
                _ => {}
            }
        }
        if let (Err(failure), Some(log), 1..) = (&loaded, log, bytes) {
            let text = failure.what.as_bytes();
            let n = text.len().min(bytes - 1);
            // SAFETY: the log has `bytes` bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr(), log, n);
                log.add(n).write(0);
            }
        }
        // SAFETY: the caller's promise.
        unsafe { put(module, loaded?) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: CuHandle) -> CuResult {
    usable(|driver| {
        driver.wait_for_all()?;
        driver.unload_module(module)
    })
}

/// # Safety
/// A place for the result, and a name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    to: *mut CuHandle,
    module: CuHandle,
    name: *const c_char,
) -> CuResult {
    usable(|driver| {
        if name.is_null() {
            return fail(Status::InvalidValue, "no name");
        }
        // SAFETY: the caller's promise.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let function = driver.module_function(module, &name)?;
        // SAFETY: as above.
        unsafe { put(to, function) }
    })
}

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES` and `..._PREFERRED_SHARED_MEMORY_CARVEOUT`.
const DYNAMIC_SHARED: i32 = 8;
const CARVEOUT: i32 = 9;

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(function: CuHandle, attribute: i32, value: i32) -> CuResult {
    usable(|driver| match (attribute, u32::try_from(value)) {
        (DYNAMIC_SHARED, Ok(bytes)) => driver.function_shared(function, bytes),
        (CARVEOUT, _) => driver.functions.get(function).map(|_| ()),
        _ => fail(Status::InvalidValue, format!("attribute {attribute} of a function")),
    })
}

/// # Safety
/// One pointer per parameter, each to a value of its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: CuHandle,
    gx: u32,
    gy: u32,
    gz: u32,
    bx: u32,
    by: u32,
    bz: u32,
    shared_bytes: u32,
    stream: CuHandle,
    params: *const *const c_void,
    extra: *const *const c_void,
) -> CuResult {
    usable(|driver| {
        has_context()?;
        let constants = driver.functions.get(function)?;
        let (kernel, constants) = (constants.kernel.clone(), constants.constants.clone());
        if !extra.is_null() || params.is_null() && !kernel.params.is_empty() {
            return fail(Status::InvalidValue, "parameters come as pointers");
        }
        let mut bytes = vec![0u8; kernel.param_bytes as usize];
        for (i, (offset, size)) in kernel.params.iter().enumerate() {
            // SAFETY: the caller gives as many pointers as the kernel has parameters.
            let from = unsafe { *params.add(i) };
            if from.is_null() {
                return fail(Status::InvalidValue, format!("parameter {i} is a null pointer"));
            }
            let to = &mut bytes[*offset as usize..(offset + size) as usize];
            // SAFETY: each points at a value of its parameter's size.
            unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.as_mut_ptr(), to.len()) };
        }
        let call = QueuedLaunch {
            kernel,
            constants,
            grid: [gx, gy, gz],
            block: [bx, by, bz],
            shared_bytes,
            params: bytes,
        };
        driver.launch(function, stream, call)
    })
}

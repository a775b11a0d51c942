//! Streams, graphs, events.
#![allow(non_snake_case)]

use super::device::has_context;
use super::{CuHandle, CuResult, put, usable};
use crate::driver::streams::{HostFunction, StreamWork};
use crate::driver::{Status, fail};

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(to: *mut CuHandle, _flags: u32) -> CuResult {
    usable(|driver| {
        has_context()?;
        let stream = driver.create_stream();
        // SAFETY: the caller's promise.
        unsafe { put(to, stream) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: CuHandle) -> CuResult {
    usable(|driver| {
        has_context()?;
        driver.wait(stream)
    })
}

/// Works after a fault too, as far as the handle goes.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: CuHandle) -> CuResult {
    super::with(|driver| driver.destroy_stream(stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: CuHandle, _mode: i32) -> CuResult {
    usable(|driver| driver.begin_capture(stream))
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: CuHandle, to: *mut CuHandle) -> CuResult {
    usable(|driver| {
        let graph = driver.end_capture(stream)?;
        // SAFETY: the caller's promise.
        unsafe { put(to, graph) }
    })
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    to: *mut CuHandle,
    graph: CuHandle,
    flags: u64,
) -> CuResult {
    usable(|driver| {
        if flags != 0 {
            return fail(Status::InvalidValue, "flags of a graph");
        }
        let executable = driver.instantiate(graph)?;
        // SAFETY: the caller's promise.
        unsafe { put(to, executable) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(executable: CuHandle, stream: CuHandle) -> CuResult {
    usable(|driver| driver.launch_graph(executable, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: CuHandle) -> CuResult {
    super::with(|driver| driver.destroy_graph(graph))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(executable: CuHandle) -> CuResult {
    super::with(|driver| driver.destroy_executable(executable))
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: CuHandle, to: *mut i32) -> CuResult {
    usable(|driver| {
        let recording = driver.streams.get(stream)?.recording.is_some();
        // SAFETY: the caller's promise.
        unsafe { put(to, i32::from(recording)) }
    })
}

/// # Safety
/// The function may be called with its argument whenever the stream, or a graph that it is recorded in, runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchHostFunc(
    stream: CuHandle,
    function: Option<HostFunction>,
    argument: usize,
) -> CuResult {
    usable(|driver| {
        has_context()?;
        match function {
            Some(function) => driver.enqueue(stream, StreamWork::Host { function, argument }),
            None => fail(Status::InvalidValue, "no function"),
        }
    })
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(to: *mut CuHandle, _flags: u32) -> CuResult {
    usable(|driver| {
        let event = driver.create_event();
        // SAFETY: the caller's promise.
        unsafe { put(to, event) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: CuHandle, stream: CuHandle) -> CuResult {
    usable(|driver| driver.record_event(event, stream))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: CuHandle) -> CuResult {
    usable(|driver| driver.wait_event(event))
}

/// # Safety
/// A place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(to: *mut f32, first: CuHandle, last: CuHandle) -> CuResult {
    usable(|driver| {
        let milliseconds = driver.elapsed(first, last)?;
        // SAFETY: the caller's promise.
        unsafe { put(to, milliseconds) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(event: CuHandle) -> CuResult {
    super::with(|driver| driver.destroy_event(event))
}

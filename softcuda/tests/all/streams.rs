//! Promises of a driver about streams, recordings and memory.

use std::sync::Arc;

use crate::machine::kernel;
use softcuda::driver::streams::{QueuedLaunch, StreamWork};
use softcuda::driver::{SoftDriver, Status};
use softcuda::options::DeviceOptions;

fn driver(switches: &[(&str, &str)]) -> SoftDriver {
    let mut options = DeviceOptions::default();
    for (name, value) in switches {
        options.set(name, value).expect("a known switch");
    }
    let mut driver = SoftDriver::new(options);
    driver.initialised = true;
    driver.hold();
    driver
}

/// Adds one to the word at its argument.
fn counter(driver: &mut SoftDriver) -> (u64, u64, QueuedLaunch) {
    let text =
        kernel(1, "ld.global.u32 %r0, [%rd0];\nadd.s32 %r0, %r0, 1;\nst.global.u32 [%rd0], %r0;\nret;");
    let module = driver.load_module(text.as_bytes()).unwrap();
    let function = driver.module_function(module, "k").unwrap();
    let at = driver.space.allocate(4).unwrap();
    driver.space.write(at, &[0; 4]).unwrap();
    let entry = driver.functions.get(function).unwrap().clone();
    let (kernel, constants) = (entry.kernel, entry.constants);
    let params = at.to_le_bytes().to_vec();
    (function, at, QueuedLaunch { kernel, constants, grid: [1; 3], block: [1; 3], shared_bytes: 0, params })
}

fn word(driver: &SoftDriver, at: u64) -> u32 {
    let mut data = [0; 4];
    driver.space.read(at, &mut data).unwrap();
    u32::from_le_bytes(data)
}

#[test]
fn work_is_done_when_it_is_waited_for() {
    let mut driver = driver(&[]);
    let (function, at, call) = counter(&mut driver);
    let (first, second) = (driver.create_stream(), driver.create_stream());
    driver.launch(function, first, call.clone()).unwrap();
    assert_eq!(word(&driver, at), 0, "nobody has waited");
    driver.wait(second).unwrap();
    assert_eq!(word(&driver, at), 0, "streams know nothing of each other");
    driver.wait(first).unwrap();
    assert_eq!(word(&driver, at), 1);
    let (begin, end) = (driver.create_event(), driver.create_event());
    driver.record_event(begin, first).unwrap();
    driver.launch(function, first, call).unwrap();
    driver.record_event(end, first).unwrap();
    assert_eq!(driver.elapsed(begin, end).unwrap_err().status, Status::NotReady);
    driver.wait_event(end).unwrap();
    assert_eq!(word(&driver, at), 2);
    assert!(driver.elapsed(begin, end).unwrap() >= 0.0);
    driver.destroy_stream(first).unwrap();
    assert_eq!(driver.wait(first).unwrap_err().status, Status::InvalidHandle);
}

#[test]
fn a_recording_becomes_a_graph() {
    let mut driver = driver(&[("REFUSE_CAPTURES", "1")]);
    let (function, at, call) = counter(&mut driver);
    let stream = driver.create_stream();
    driver.begin_capture(stream).unwrap();
    assert_eq!(driver.end_capture(stream).unwrap_err().status, Status::StreamCaptureInvalidated);
    // A kernel that was never launched cannot be recorded.
    driver.begin_capture(stream).unwrap();
    assert!(driver.launch(function, stream, call.clone()).unwrap_err().what.contains("never launched"));
    assert_eq!(driver.end_capture(stream).unwrap_err().status, Status::StreamCaptureInvalidated);
    driver.launch(function, stream, call.clone()).unwrap();
    driver.wait(stream).unwrap();
    driver.begin_capture(stream).unwrap();
    driver.launch(function, stream, call.clone()).unwrap();
    driver.launch(function, stream, call).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    let executable = driver.instantiate(graph).unwrap();
    driver.destroy_graph(graph).unwrap();
    driver.wait(stream).unwrap();
    assert_eq!(word(&driver, at), 1, "what was recorded is not executed");
    driver.launch_graph(executable, stream).unwrap();
    driver.launch_graph(executable, stream).unwrap();
    driver.wait(stream).unwrap();
    assert_eq!(word(&driver, at), 5);
    driver.begin_capture(stream).unwrap();
    assert_eq!(driver.wait(stream).unwrap_err().status, Status::StreamCaptureUnsupported);
    assert!(driver.end_capture(stream).unwrap_err().what.contains("waited for"));
    driver.destroy_executable(executable).unwrap();
    assert_eq!(driver.launch_graph(executable, stream).unwrap_err().status, Status::InvalidHandle);
}

#[test]
fn a_fault_stays_until_the_context_goes() {
    let mut driver = driver(&[]);
    let (function, at, call) = counter(&mut driver);
    driver.launch(function, 0, QueuedLaunch { params: vec![0; 8], ..call.clone() }).unwrap();
    let failure = driver.wait(0).unwrap_err();
    assert_eq!(failure.status, Status::IllegalAddress);
    assert_eq!(driver.wait(0).unwrap_err(), failure);
    driver.release().unwrap();
    driver.hold();
    driver.launch(function, 0, call).unwrap();
    driver.wait(0).unwrap();
    assert_eq!(word(&driver, at), 1);
}

#[test]
fn launches_that_a_gpu_cannot_do_are_refused() {
    let mut driver = driver(&[]);
    let (function, _, call) = counter(&mut driver);
    let mut refused = |call: QueuedLaunch, part: &str| {
        let failure = driver.launch(function, 0, call).unwrap_err();
        assert_eq!(failure.status, Status::InvalidValue);
        assert!(failure.what.contains(part), "{}", failure.what);
    };
    refused(QueuedLaunch { block: [1025, 1, 1], ..call.clone() }, "threads");
    refused(QueuedLaunch { grid: [1, 65_536, 1], ..call.clone() }, "blocks");
    refused(QueuedLaunch { grid: [0, 1, 1], ..call.clone() }, "blocks");
    refused(QueuedLaunch { shared_bytes: 49_153, ..call.clone() }, "shared memory");
    assert_eq!(driver.function_shared(function, 300_000).unwrap_err().status, Status::InvalidValue);
    driver.function_shared(function, 100_000).unwrap();
    driver.launch(function, 0, QueuedLaunch { shared_bytes: 100_000, ..call }).unwrap();
}

#[test]
fn memory_is_counted_and_mapped_as_it_has_to_be() {
    let mut driver = driver(&[("MEMORY", "20000"), ("GRANULE", "4096")]);
    let space = &mut driver.space;
    let first = space.allocate(10_000).unwrap();
    let failure = space.allocate(10_001).unwrap_err();
    assert_eq!(failure.status, Status::OutOfMemory);
    assert!(failure.what.contains("10000 of 20000 are free"), "{}", failure.what);
    space.free(first).unwrap();
    assert_eq!(space.free(first).unwrap_err().status, Status::InvalidValue);
    let base = space.reserve(8192).unwrap();
    assert!(space.write(base, &[1]).is_err(), "nothing is mapped");
    let memory = space.create(4096).unwrap();
    space.map(base, 4096, memory).unwrap();
    space.release(memory).unwrap();
    assert!(space.write(base, &[1]).unwrap_err().what.contains("given no access"));
    space.set_access(base, 4096, true).unwrap();
    space.write(base, &[1, 2, 3, 4, 5]).unwrap();
    assert!(space.write(base + 4094, &[1, 2, 3]).is_err(), "the second granule has no memory");
    assert!(space.unreserve(base, 8192).unwrap_err().what.contains("mapped"));
    assert_eq!(space.free_bytes(), 20_000 - 4096);
    space.unmap(base, 4096).unwrap();
    assert_eq!(space.free_bytes(), 20_000);
    space.unreserve(base, 8192).unwrap();
    assert!(space.create(1000).is_err(), "no multiple of a granule");
}

#[test]
fn copies_and_fills() {
    let mut driver = driver(&[]);
    let (a, b) = (driver.space.allocate(64).unwrap(), driver.space.allocate(64).unwrap());
    driver.enqueue(0, StreamWork::Fill { to: a, element: 7u32.to_le_bytes().to_vec(), count: 16 }).unwrap();
    driver.enqueue(0, StreamWork::Staged { to: a + 5, data: Arc::new(vec![1, 2, 3]) }).unwrap();
    driver.enqueue(0, StreamWork::Copy { to: b, from: a, bytes: 64 }).unwrap();
    driver.wait(0).unwrap();
    assert_eq!([word(&driver, b), word(&driver, b + 4), word(&driver, b + 60)], [7, 0x0302_0107, 7]);
    driver.enqueue(0, StreamWork::Copy { to: a + 4, from: a, bytes: 8 }).unwrap();
    assert!(driver.wait(0).unwrap_err().what.contains("overlap"));
}

#[test]
fn numbers_of_launches_begin_anew_without_false_races() {
    let mut driver = driver(&[]);
    let (function, at, call) = counter(&mut driver);
    for _ in 0..3 {
        driver.launch(function, 0, call.clone()).unwrap();
        driver.wait(0).unwrap();
        driver.space.forget_launches();
    }
    assert_eq!(word(&driver, at), 3);
}

//! Kernels as PTX on the driver in software.

use std::sync::OnceLock;

use crate::objects;
use mlcc_codegen::LevelInput;
use mlcc_codegen::launch::{SharedMemory, threads_of};
use mlcc_codegen::llvm::cached_ptx;
use mlcc_codegen::ptxas::{PtxAssembler, ResourceUsage, assemble, find_ptxas};
use mlcc_interp::kernel::{ExecutionOptions, ExecutionOrder, KernelBuffer, run_with};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::*;
use serde_json::json;
use softcuda::driver::streams::QueuedLaunch;
use softcuda::driver::{DriverResult, SoftDriver};
use xxhash_rust::xxh3::xxh3_128;

const ORDERS: [&str; 3] = ["turns", "backwards", "random:1"];

pub fn ptx(kernel: &Kernel, level: &str) -> String {
    let target = mlcc_target::resolve_target(level).unwrap();
    let input = LevelInput { level: &target.levels[0], kernels: std::slice::from_ref(kernel), steps: &[] };
    String::from_utf8(cached_ptx(&target.triple, &input, &objects::cache()).unwrap()).unwrap()
}

/// The report of NVIDIA's assembler; `None` where there is none. Equal versions give the same report for the
/// same text, so it is asked once.
pub fn assembled(text: &str, sm: u32) -> Option<ResourceUsage> {
    static FOUND: OnceLock<Option<PtxAssembler>> = OnceLock::new();
    let found = || find_ptxas().map(|_| PtxAssembler::find().unwrap_or_else(|e| panic!("{e}")));
    let assembler = FOUND.get_or_init(found).as_ref()?;
    let key = xxh3_128(format!("{} {sm} {text}", assembler.version).as_bytes());
    let answer = objects::folder().join(format!("{key:032x}.usage"));
    if let Some(usage) = std::fs::read(&answer).ok().and_then(|answer| usage_of(&answer)) {
        return Some(usage);
    }
    let done = assemble(&assembler.path, text.as_bytes(), sm).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let usage = done.usage.into_iter().next()?;
    let written = json!([usage.kernel, usage.registers, usage.spill_bytes, usage.shared_bytes]);
    let _ = std::fs::create_dir_all(objects::folder());
    let _ = std::fs::write(answer, written.to_string());
    Some(usage)
}

/// The stored report; `None` where it is not whole.
fn usage_of(answer: &[u8]) -> Option<ResourceUsage> {
    let (kernel, registers, spill_bytes, shared_bytes) = serde_json::from_slice(answer).ok()?;
    Some(ResourceUsage { kernel, registers, spill_bytes, shared_bytes })
}

/// Counts of a launch: the entry of the kernel in the driver's report.
pub fn counted(
    kernel: &Kernel,
    level: &str,
    grid: [u32; 3],
    buffers: &[KernelBuffer],
    dims: &SymValues,
) -> serde_json::Value {
    let mut options = softcuda::options::DeviceOptions::default();
    options.set("COUNTS", "/dev/null").expect("a known switch");
    let (driver, _) = executed((kernel, &ptx(kernel, level)), grid, buffers, dims, options)
        .unwrap_or_else(|e| panic!("{}", e.what));
    driver.report()["kernels"][0].clone()
}

/// Runs the PTX of a kernel.
fn launch(
    code: (&Kernel, &str),
    grid: [u32; 3],
    buffers: &[KernelBuffer],
    dims: &SymValues,
    order: &str,
) -> DriverResult<Vec<KernelBuffer>> {
    let mut options = softcuda::options::DeviceOptions::default();
    options.set("ORDER", order).expect("a known switch");
    let (driver, params) = executed(code, grid, buffers, dims, options)?;
    let read = |(buffer, at): (&KernelBuffer, &u64)| {
        let mut bytes = vec![0; buffer.bytes.len()];
        driver.space.read(*at, &mut bytes)?;
        Ok(KernelBuffer::new(buffer.dtype, bytes))
    };
    buffers.iter().zip(&params).map(read).collect()
}

/// The driver afterwards, and where the buffers lie.
fn executed(
    (kernel, text): (&Kernel, &str),
    grid: [u32; 3],
    buffers: &[KernelBuffer],
    dims: &SymValues,
    options: softcuda::options::DeviceOptions,
) -> DriverResult<(SoftDriver, Vec<u64>)> {
    let mut driver = SoftDriver::new(options);
    driver.initialised = true;
    driver.hold();
    let module = driver.load_module(text.as_bytes())?;
    let function = driver.module_function(module, &format!("k_{}", kernel.name))?;
    let mut params = vec![];
    for (buffer, buf) in buffers.iter().zip(&kernel.params) {
        let at = driver.space.allocate(buffer.bytes.len() as u64)?;
        if kernel.bufs[*buf].access.reads() {
            driver.space.write(at, &buffer.bytes)?;
        }
        params.push(at);
    }
    for (sym, _) in &kernel.dims {
        let at = driver.space.allocate(8)?;
        driver.space.write(at, &dims.get(*sym).to_le_bytes())?;
        params.push(at);
    }
    let entry = driver.functions.get(function)?.clone();
    let shared_bytes = SharedMemory::for_kernel(kernel).dynamic_bytes;
    let call = QueuedLaunch {
        kernel: entry.kernel,
        constants: entry.constants,
        grid,
        block: threads_of(kernel).expect("thread loops of constant extent"),
        shared_bytes,
        params: params.iter().flat_map(|at| at.to_le_bytes()).collect(),
    };
    if shared_bytes > 0 {
        driver.function_shared(function, shared_bytes)?;
    }
    driver.launch(function, 0, call)?;
    driver.wait(0)?;
    Ok((driver, params))
}

/// The last buffer after the kernel: by the interpreter, which agrees with itself in three orders of blocks,
/// and by PTX in three orders of warps, which agree, too.
pub fn both(
    kernel: &Kernel,
    level: &str,
    grid: [u32; 3],
    buffers: &[KernelBuffer],
    dims: &SymValues,
) -> [Result<KernelBuffer, String>; 2] {
    let interpreted =
        [ExecutionOrder::Forward, ExecutionOrder::Reverse, ExecutionOrder::Shuffled(1)].map(|order| {
            let mut after = buffers.to_vec();
            let options = ExecutionOptions { workers: 1, order };
            let run = run_with(kernel, &mut after, dims, &options);
            run.map(|()| after.pop().unwrap()).map_err(|e| e.to_string())
        });
    let text = ptx(kernel, level);
    let executed = ORDERS.map(|order| {
        let run = launch((kernel, &text), grid, buffers, dims, order);
        run.map(|mut after| after.pop().unwrap()).map_err(|e| e.what)
    });
    [agreed(interpreted), agreed(executed)]
}

/// All results are equal; faults are faults in each.
fn agreed(all: [Result<KernelBuffer, String>; 3]) -> Result<KernelBuffer, String> {
    let [first, rest @ ..] = all;
    for other in rest {
        match (&first, &other) {
            (Ok(a), Ok(b)) => assert_eq!(a, b),
            (Err(_), Err(_)) => {}
            (Ok(_), Err(e)) | (Err(e), Ok(_)) => panic!("in some orders only: {e}"),
        }
    }
    first
}

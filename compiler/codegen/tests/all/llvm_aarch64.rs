//! The same kernels for AArch64, run by an emulator where one is installed: cross code generation and cross
//! linking.
#![cfg(feature = "llvm")]

use crate::aarch64::{EmulatedDriver, KernelCall};
use crate::cases::{arithmetic, control, instrs, memory, prepare};
use crate::objects::cache;
use mlcc_codegen::llvm::{cached_kernels_object, callers_object};
use mlcc_ir::kernel::Kernel;
use mlcc_target::Arch;

const TRIPLE: &str = "aarch64-unknown-linux-gnu";

#[test]
fn kernels_mean_the_same_on_aarch64() {
    let Some(emulator) = EmulatedDriver::find() else { return };
    let mut all = arithmetic::float_arithmetic();
    all.extend(arithmetic::integer_arithmetic());
    all.extend(arithmetic::casts());
    all.extend(memory::lanes_move());
    all.extend(memory::memory_accesses());
    all.extend(control::loops_and_registers());
    all.extend(instrs::instructions());
    let cases = prepare(all);
    let kernels: Vec<Kernel> = cases.iter().map(|(c, _)| c.kernel.clone()).collect();
    let calls: Vec<KernelCall<'_>> = cases
        .iter()
        .map(|(c, _)| KernelCall { kernel: &c.kernel, dims: &c.dims, buffers: &c.buffers })
        .collect();
    let specs = mlcc_target::specs().unwrap();
    let spec = specs.iter().find(|s| s.arch == Arch::Aarch64).unwrap();
    for level in &spec.levels {
        let code = cached_kernels_object(Arch::Aarch64, TRIPLE, level, &kernels, &cache()).unwrap();
        let callers = callers_object(Arch::Aarch64, TRIPLE, &spec.levels[0], &kernels).unwrap();
        let results = emulator.run(code, callers, &calls, 3);
        for ((case, want), got) in cases.iter().zip(&results) {
            case.check(&level.name, got, want);
        }
    }
}

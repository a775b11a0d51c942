//! The cases that the LLVM back end is compared with.

use super::harness::host_levels;
use crate::aarch64::{EmulatedDriver, KernelCall};
use crate::cases::{self, arithmetic, control, instrs, memory, prepare};
use mlcc_codegen::clif::{callers_object, kernels_object};
use mlcc_codegen::executor::{AlignedBytes, KernelExecutor};
use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::Kernel;
use mlcc_ir::testing::{KernelOptions, random_arguments, random_kernel};
use mlcc_target::Arch;

fn check(cases: Vec<cases::KernelCase>) {
    let cases = prepare(cases);
    let kernels: Vec<Kernel> = cases.iter().map(|(c, _)| c.kernel.clone()).collect();
    for (_, level) in host_levels() {
        let executor = KernelExecutor::with_cranelift(&kernels, &level).unwrap();
        for (case, want) in &cases {
            let mut buffers: Vec<AlignedBytes> =
                case.buffers.iter().map(|b| AlignedBytes::from_bytes(&b.bytes)).collect();
            executor.run(&case.kernel.name, &mut buffers, &case.dims, 2).unwrap();
            let got: Vec<Vec<u8>> = buffers.iter().map(|b| b.bytes().to_vec()).collect();
            case.check(&level.name, &got, want);
        }
    }
    check_on_aarch64(&cases, &kernels);
}

fn check_on_aarch64(cases: &[(cases::KernelCase, Vec<KernelBuffer>)], kernels: &[Kernel]) {
    let specs = mlcc_target::specs().unwrap();
    let level = &specs.iter().find(|s| s.arch == Arch::Aarch64).unwrap().levels[0];
    let code = kernels_object(Arch::Aarch64, level, kernels).unwrap();
    let Some(emulator) = EmulatedDriver::find() else { return };
    let callers = callers_object(Arch::Aarch64, level, kernels).unwrap();
    let calls: Vec<KernelCall<'_>> = cases
        .iter()
        .map(|(c, _)| KernelCall { kernel: &c.kernel, dims: &c.dims, buffers: &c.buffers })
        .collect();
    for ((case, want), got) in cases.iter().zip(emulator.run(code, callers, &calls, 3)) {
        case.check("aarch64", &got, want);
    }
}

#[test]
fn arithmetic_cases() {
    check(arithmetic::integer_arithmetic());
    check(arithmetic::float_arithmetic());
    check(arithmetic::casts());
    check(arithmetic::half_conversions());
}

#[test]
fn memory_cases() {
    check(memory::lanes_move());
    check(memory::memory_accesses());
}

#[test]
fn control_cases() {
    check(control::loops_and_registers());
}

#[test]
fn instruction_cases() {
    check(instrs::instructions());
}

/// Kernels with loops, branches and local buffers, by seed.
#[test]
fn random_kernels() {
    let mut cases = Vec::new();
    for seed in 0..40 {
        let kernel = random_kernel(seed, &KernelOptions { instrs: true, ..KernelOptions::EXACT });
        let dims = SymValues::for_tokens(1 + (seed % 5) as i64);
        let bytes = random_arguments(&kernel, &dims, seed);
        let buffers = kernel.params.iter().zip(bytes);
        let buffers = buffers.map(|(id, bytes)| KernelBuffer::new(kernel.bufs[*id].dtype, bytes)).collect();
        let mut case = cases::KernelCase::new(kernel, buffers);
        case.dims = dims;
        cases.push(case);
    }
    check(cases);
}

//! Random kernels run without faults, and give the same in every order, with every number of workers, and after
//! printing and parsing.

use mlcc_interp::kernel::{Buffer, Options, Order, run_with};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::Kernel;
use mlcc_ir::testing::{KernelOptions, random_arguments, random_kernel};
use mlcc_ir::text::{Lexer, parse_kernel, print_kernel};

fn results(kernel: &Kernel, seed: u64, n: i64, options: &Options) -> Vec<Buffer> {
    let dims = SymValues::tokens(n);
    let bytes = random_arguments(kernel, &dims, seed);
    let mut buffers: Vec<Buffer> = kernel
        .params
        .iter()
        .zip(bytes)
        .map(|(id, bytes)| Buffer::new(kernel.bufs[*id].dtype, bytes))
        .collect();
    run_with(kernel, &mut buffers, &dims, options)
        .unwrap_or_else(|e| panic!("seed {seed}, {options:?}: {e}\n{}", print_kernel(kernel)));
    buffers
}

fn check(kernel: &Kernel, seed: u64) {
    let n = 1 + (seed % 5) as i64;
    let first = results(kernel, seed, n, &Options::default());
    for (workers, order) in [(1, Order::Shuffled(seed)), (2, Order::Forward), (3, Order::Reverse)] {
        assert_eq!(results(kernel, seed, n, &Options { workers, order }), first, "seed {seed}");
    }
    let text = print_kernel(kernel);
    let again = parse_kernel(&mut Lexer::new(&text).unwrap()).unwrap();
    assert_eq!(
        results(&again, seed, n, &Options::default()),
        first,
        "seed {seed} after printing and parsing"
    );
}

#[test]
fn random_cpu_kernels() {
    for seed in 0..150 {
        check(&random_kernel(seed, &KernelOptions::ALL), seed);
    }
}

#[test]
fn random_gpu_kernels() {
    for seed in 0..60 {
        check(&random_kernel(seed, &KernelOptions::GPU), seed);
    }
}

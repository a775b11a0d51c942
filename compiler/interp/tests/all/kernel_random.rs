//! Random kernels run without faults, and give the same in every order, with every number of workers, and
//! after printing and parsing.

use mlcc_interp::kernel::{ExecutionOptions, ExecutionOrder, KernelBuffer, run_with};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::Kernel;
use mlcc_ir::testing::{KernelOptions, TestRng, random_arguments, random_kernel};
use mlcc_ir::text::{Lexer, parse_kernel, print_kernel};
use mlcc_ir::verify::verify_kernel;

fn results(kernel: &Kernel, seed: u64, n: i64, options: &ExecutionOptions) -> Vec<KernelBuffer> {
    let dims = SymValues::for_tokens(n);
    let bytes = random_arguments(kernel, &dims, seed);
    let mut buffers: Vec<KernelBuffer> = kernel
        .params
        .iter()
        .zip(bytes)
        .map(|(id, bytes)| KernelBuffer::new(kernel.bufs[*id].dtype, bytes))
        .collect();
    run_with(kernel, &mut buffers, &dims, options)
        .unwrap_or_else(|e| panic!("seed {seed}, {options:?}: {e}\n{}", print_kernel(kernel)));
    buffers
}

fn check(kernel: &Kernel, seed: u64) {
    let n = 1 + (seed % 5) as i64;
    let first = results(kernel, seed, n, &ExecutionOptions::default());
    for (workers, order) in
        [(1, ExecutionOrder::Shuffled(seed)), (2, ExecutionOrder::Forward), (3, ExecutionOrder::Reverse)]
    {
        assert_eq!(results(kernel, seed, n, &ExecutionOptions { workers, order }), first, "seed {seed}");
    }
    let text = print_kernel(kernel);
    let again = parse_kernel(&mut Lexer::new(&text).unwrap()).unwrap();
    assert_eq!(
        results(&again, seed, n, &ExecutionOptions::default()),
        first,
        "seed {seed} after printing and parsing"
    );
}

#[test]
fn random_cpu_kernels() {
    for seed in 0..80 {
        check(&random_kernel(seed, &KernelOptions::ALL), seed);
    }
}

#[test]
fn random_gpu_kernels() {
    for seed in 0..60 {
        check(&random_kernel(seed, &KernelOptions::GPU), seed);
    }
}

/// Kernels that are still well formed after a change of their text may fail, but never panic.
#[test]
fn changed_kernels_fail_without_panic() {
    let words =
        ["0", "1", "-1", "5", "17", "%i", "%n", "%v", "1:i32", "2.5:f32", "f32", "i64", "add", "rem", "shr"];
    let (mut ran, mut failed) = (0, 0);
    for seed in 0..60 {
        let options = if seed % 3 == 0 { KernelOptions::GPU } else { KernelOptions::ALL };
        let text = print_kernel(&random_kernel(seed, &options));
        let mut rng = TestRng(seed);
        for _ in 0..25 {
            let starts: Vec<usize> = text.match_indices([' ', '(', ':', '[']).map(|(at, _)| at + 1).collect();
            let start = rng.pick(&starts);
            let end =
                text[start..].find([' ', ',', ')', '(', ']', '[']).map_or(text.len(), |len| start + len);
            let changed = format!("{}{}{}", &text[..start], rng.pick(&words), &text[end..]);
            let Ok(mut lexer) = Lexer::new(&changed) else { continue };
            let Ok(kernel) = parse_kernel(&mut lexer) else { continue };
            if verify_kernel(&kernel).is_err() {
                continue;
            }
            let dims = SymValues::for_tokens(2);
            let bytes = random_arguments(&kernel, &dims, seed);
            let dtypes = kernel.params.iter().map(|id| kernel.bufs[*id].dtype);
            let mut buffers: Vec<KernelBuffer> =
                dtypes.zip(bytes).map(|(d, b)| KernelBuffer::new(d, b)).collect();
            ran += 1;
            failed += u32::from(
                run_with(&kernel, &mut buffers, &dims, &ExecutionOptions::with_workers(2)).is_err(),
            );
        }
    }
    assert!(ran > 100 && failed > 10 && failed < ran, "{failed} of {ran} failed");
}

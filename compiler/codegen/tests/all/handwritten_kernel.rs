//! The worked example of docs/add-a-kernel.md: a kernel written by hand, held against the meaning of its ops
//! in the kernel interpreter and as machine code.
#![cfg(any(feature = "llvm", feature = "cranelift"))]

// docs: begin
use mlcc_ir::dim::{Dim, SizeSymbol};
use mlcc_ir::kernel::{ExprType, Kernel};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::Recorder;

/// `out = gate * max(x, 0)^2` for matrices `f32[n, width]`: rows are shared among the workers, `lanes`
/// columns at a time.
fn gated_square(width: i64, lanes: u32) -> Kernel {
    let k = Recorder::new("gated_square");
    let (n, shape) = (Dim::sym(SizeSymbol::N), [Dim::sym(SizeSymbol::N), width.into()]);
    let x = k.input("x", DType::F32, shape.clone());
    let gate = k.input("gate", DType::F32, shape.clone());
    let out = k.output("out", DType::F32, shape);
    let columns = |at, lanes: u32| {
        let positive = x.load(at, lanes).max(k.literal(0.0, ExprType::vector(DType::F32, lanes)));
        out.set(at, gate.load(at, lanes) * (positive * positive));
    };
    let whole = width / i64::from(lanes);
    k.par("row", &n, |row| {
        k.serial("vector", whole, |vector| columns([row, vector * i64::from(lanes)], lanes));
        // Columns that fill no vector, one by one.
        let first = whole * i64::from(lanes);
        k.serial("column", width - first, |column| columns([row, column + first], 1));
    });
    k.finish()
}
// docs: end

use mlcc_codegen::executor::{AlignedBytes, KernelExecutor};
use mlcc_interp::compare::{Tolerance, compare};
use mlcc_interp::equivalence::random_inputs;
use mlcc_interp::graph::{Interpreter, StateValues, Tensor};
use mlcc_interp::kernel::{ExecutionOptions, KernelBuffer, run_with};
use mlcc_ir::dim::SymValues;
use mlcc_ir::graph::FunctionKind;
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::Module;
use mlcc_ir::types::TensorType;
use mlcc_ir::verify::verify_kernel;
use mlcc_target::{Arch, FeatureLevel};

const WIDTH: i64 = 100;

/// The ops that the kernel stands for.
fn ops() -> Module {
    let ty = TensorType::new(DType::F32, [Dim::sym(SizeSymbol::N), Dim::from(WIDTH)]);
    let mut b = GraphBuilder::new("ops");
    b.function("ops", FunctionKind::Group, &[ty.clone(), ty], |b, inputs| {
        let positive = b.relu(inputs[0]);
        let square = b.square(positive);
        vec![b.mul(inputs[1], square)]
    });
    b.finish().unwrap()
}

/// Random inputs for `n` rows, and what the ops make of them.
fn reference(n: i64) -> (Vec<Tensor>, Vec<f32>) {
    let (module, sizes) = (ops(), SymValues::for_tokens(n));
    let (_, f) = module.function("ops").unwrap();
    let inputs = random_inputs(f, &sizes, 7);
    let interpreter = Interpreter::new(&module, |_| unreachable!("there are no weights"));
    let mut states = StateValues::new(&module).unwrap();
    let outputs = interpreter.run_named("ops", &inputs, &mut states, sizes).unwrap();
    (inputs, outputs[0].to_f32())
}

fn buffers(inputs: &[Tensor], n: i64) -> Vec<KernelBuffer> {
    let mut buffers: Vec<KernelBuffer> = inputs.iter().map(|t| KernelBuffer::from_f32(&t.to_f32())).collect();
    buffers.push(KernelBuffer::zeros(DType::F32, (n * WIDTH) as usize));
    buffers
}

#[test]
fn the_kernel_means_its_ops() {
    for n in [1, 7] {
        let (inputs, expected) = reference(n);
        for lanes in [1, 8, 16] {
            let kernel = gated_square(WIDTH, lanes);
            verify_kernel(&kernel).unwrap();
            for workers in [1, 3] {
                let mut buffers = buffers(&inputs, n);
                // Also finds reads of unwritten memory, accesses out of bounds and races.
                run_with(
                    &kernel,
                    &mut buffers,
                    &SymValues::for_tokens(n),
                    &ExecutionOptions::with_workers(workers),
                )
                .unwrap();
                compare(buffers[2].to_f32(), expected.clone(), Tolerance::EXACT).unwrap();
            }
        }
    }
}

fn best_level() -> Option<FeatureLevel> {
    let have = mlcc_target::detected_features();
    let specs = mlcc_target::specs().unwrap();
    let levels = specs.into_iter().filter(|s| Some(s.arch) == Arch::of_host()).flat_map(|s| s.levels);
    levels.rev().find(|l| l.features.iter().all(|f| have.contains(&f.as_str())))
}

#[test]
fn its_machine_code_means_them_too() {
    let Some(level) = best_level() else {
        println!("skipped: no level of the target specs is for this machine");
        return;
    };
    let (n, kernels) = (7, [gated_square(WIDTH, 16)]);
    let (inputs, expected) = reference(n);
    let mut executors = Vec::new();
    #[cfg(feature = "llvm")]
    executors.push(KernelExecutor::new(&kernels, &level).unwrap());
    #[cfg(feature = "cranelift")]
    executors.push(KernelExecutor::with_cranelift(&kernels, &level).unwrap());
    for executor in executors {
        let mut memory: Vec<AlignedBytes> =
            buffers(&inputs, n).iter().map(|b| AlignedBytes::from_bytes(&b.bytes)).collect();
        executor.run("gated_square", &mut memory, &SymValues::for_tokens(n), 3).unwrap();
        let found = KernelBuffer::new(DType::F32, memory[2].bytes().to_vec()).to_f32();
        compare(found, expected.clone(), Tolerance::EXACT).unwrap();
    }
}

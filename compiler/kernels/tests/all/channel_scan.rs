//! Scans over channels through the kernel interpreter against the graph interpreter: a running maximum with
//! weighted sums, as in RWKV-4, for channels that fill blocks of threads and that do not, and lengths around
//! the steps that a GPU takes together, and around the parts that it divides them into. Each alone, and with
//! ops on its results.

use mlcc_interp::compare::{Tolerance, compare};
use mlcc_interp::equivalence::random_inputs;
use mlcc_interp::graph::{Interpreter, StateValues, Tensor};
use mlcc_interp::kernel::{ExecutionOptions, ExecutionOrder, KernelBuffer, run_with};
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph::{FunctionKind, ValueId};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::kernel::{Kernel, UnOp};
use mlcc_ir::module::Module;
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernels::lower::group::lower_group;
use mlcc_kernels::params::KernelTarget;

const GPUS: [&str; 2] = ["sm_70", "sm_80"];

/// Two carries, two sequences, the decay a constant of its channel or one of all; two stacked results. With
/// `gated`, one of them is computed on in the kernel, with rows in f32 and f16 and with one of the sequences.
fn module(channels: usize, own_decay: bool, gated: bool) -> Module {
    let mut b = GraphBuilder::new("channels");
    let c = TensorType::new(DType::F32, [channels]);
    let own = usize::from(own_decay);
    let body = b.function("body", FunctionKind::Body, &vec![c.clone(); 4 + own], |b, inputs| {
        let &[sum, top, k, v] = &inputs[..4] else { unreachable!("four inputs are declared") };
        let decay = if own_decay { inputs[4] } else { b.constant(-0.25) };
        let faded = b.add(top, decay);
        let new_top = b.max(faded, k);
        let (old, new) = (b.sub(faded, new_top), b.sub(k, new_top));
        let (old, new) = (b.exp(old), b.exp(new));
        let (kept, added) = (b.mul(sum, old), b.mul(new, v));
        let sum = b.add(kept, added);
        let one = b.constant(1.0);
        let length = b.mul(v, v);
        let length = b.add(length, one);
        vec![sum, new_top, b.div(sum, length), kept]
    });
    let rows = TensorType::new(DType::F32, [Dim::sym(SizeSymbol::N), Dim::from(channels)]);
    let halves = TensorType { dtype: DType::F16, ..rows.clone() };
    let mut inputs = vec![c.clone(), c.clone(), rows.clone(), rows.clone()];
    inputs.extend([c, rows, halves].into_iter().skip(1 - own).take(if gated { 3 } else { own }));
    b.function("f", FunctionKind::Entry, &inputs, |b, inputs| {
        let mut results = b.scan(body, &inputs[..2], &inputs[2..4], &inputs[4..4 + own]);
        if gated {
            let &[gate, shift] = &inputs[4 + own..] else { unreachable!("two inputs are declared") };
            let (gate, shift) = (b.sigmoid(gate), b.cast(shift, DType::F32));
            let y = b.mul(gate, results[2]);
            let y = b.add(y, shift);
            let y = b.mul(y, inputs[3]);
            results[2] = b.cast(y, DType::F16);
        }
        results
    });
    b.finish().unwrap()
}

/// Variants of bodies of RWKV-4.
#[derive(Clone, Copy, PartialEq, Debug)]
enum WeightVariant {
    Exponentials,
    /// One exponential and choices, as the passes make it.
    Chosen,
    /// Exponentials, faded by what a sequence says: such steps are not joined.
    Varying,
}

/// The step of RWKV-4: sums with and without `v`, and a result of the carries before the step. Inputs: three
/// carries, k and v, decay and bonus.
fn wkv(channels: usize, weights: WeightVariant) -> Module {
    let mut b = GraphBuilder::new("wkv");
    let c = TensorType::new(DType::F32, [channels]);
    let body = b.function("body", FunctionKind::Body, &vec![c.clone(); 7], |b, inputs| {
        let &[num, den, p, k, v, decay, bonus] = inputs else { unreachable!("seven inputs are declared") };
        let step = |b: &mut GraphBuilder, old: ValueId, new: ValueId| {
            let top = b.max(old, new);
            let (old, new) = if weights == WeightVariant::Chosen {
                let one = b.constant(1.0);
                let distance = b.sub(old, new);
                let distance = b.unary(UnOp::Abs, distance);
                let negative = b.unary(UnOp::Neg, distance);
                let small = b.exp(negative);
                (b.select_ge(old, new, one, small), b.select_ge(old, new, small, one))
            } else {
                let (old, new) = (b.sub(old, top), b.sub(new, top));
                (b.exp(old), b.exp(new))
            };
            let (kept, added) = (b.mul(old, num), b.mul(new, v));
            let num = b.add(kept, added);
            let kept = b.mul(old, den);
            (num, b.add(kept, new), top)
        };
        let boosted = b.add(bonus, k);
        let (above, below, _) = step(b, p, boosted);
        let result = b.div(above, below);
        let fade = if weights == WeightVariant::Varying { b.mul(decay, v) } else { decay };
        let faded = b.add(p, fade);
        let (num, den, p) = step(b, faded, k);
        vec![num, den, p, result]
    });
    let rows = TensorType::new(DType::F32, [Dim::sym(SizeSymbol::N), Dim::from(channels)]);
    let inputs = [c.clone(), c.clone(), c.clone(), rows.clone(), rows, c.clone(), c];
    b.function("f", FunctionKind::Entry, &inputs, |b, inputs| {
        b.scan(body, &inputs[..3], &inputs[3..5], &inputs[5..])
    });
    b.finish().unwrap()
}

/// Inputs of that: nothing seen before, and decays as models have them.
fn wkv_inputs(module: &Module, n: usize, empty: f64) -> Vec<Tensor> {
    let (_, f) = module.function("f").unwrap();
    let mut inputs = random_inputs(f, &SymValues::for_tokens(n as i64), n as u64);
    for (carry, first) in [(0, 0.0), (1, 0.0), (2, empty)] {
        inputs[carry].data.fill(first);
    }
    inputs[3].data.iter_mut().for_each(|k| *k *= 8.0);
    // From almost nothing to more than an exponential can tell; the first is added up without rounding, which
    // over many steps would differ from one product.
    let decays = [-1.0 / 1024.0, -0.05, -0.7, -20.0, -400.0, -1e30];
    inputs[5]
        .data
        .iter_mut()
        .zip(decays.iter().cycle())
        .for_each(|(decay, of)| *decay = f64::from(*of as f32));
    inputs
}

fn kernel(module: &Module, machine: &str) -> Kernel {
    let (_, f) = module.function("f").unwrap();
    let target = mlcc_target::resolve_target(machine).unwrap();
    let target = KernelTarget::new(target.arch, &target.levels[0]);
    lower_group(module, f, "scan", &vec![None; f.inputs.len()], &target).unwrap().kernel
}

/// True for a kernel that divides steps into parts.
fn has_parts(module: &Module, machine: &str) -> bool {
    kernel(module, machine).bufs.values().any(|buf| buf.name.starts_with("made"))
}

/// The outputs of the kernel of a machine.
fn run_on(
    module: &Module,
    inputs: &[Tensor],
    n: usize,
    machine: &str,
    options: &ExecutionOptions,
) -> Vec<KernelBuffer> {
    let (_, f) = module.function("f").unwrap();
    let syms = SymValues::for_tokens(n as i64);
    let given = inputs.iter().zip(&f.inputs);
    let mut buffers: Vec<KernelBuffer> =
        given.map(|(t, v)| KernelBuffer::from_floats(f.ty(*v).dtype, &t.to_f32())).collect();
    let elements = |v: &ValueId| f.ty(*v).dims.iter().map(|d| d.eval(&syms) as usize).product();
    buffers.extend(f.outputs.iter().map(|v| KernelBuffer::zeros(f.ty(*v).dtype, elements(v))));
    run_with(&kernel(module, machine), &mut buffers, &syms, options)
        .unwrap_or_else(|e| panic!("{n} steps, {machine}: {e}"));
    buffers.split_off(inputs.len())
}

/// Kernels of machines against the interpreter.
fn check(module: &Module, inputs: &[Tensor], n: usize, machines: &[&str], what: &str) {
    let (_, f) = module.function("f").unwrap();
    let syms = SymValues::for_tokens(n as i64);
    let interpreter = Interpreter::new(module, |_| unreachable!("no parameters"));
    let want = interpreter.run_named("f", inputs, &mut StateValues::new(module).unwrap(), syms).unwrap();
    for name in machines {
        for options in [
            ExecutionOptions::with_workers(3),
            ExecutionOptions { workers: 2, order: ExecutionOrder::Reverse },
        ] {
            let found = run_on(module, inputs, n, name, &options);
            for (i, (found, want)) in found.iter().zip(&want).enumerate() {
                let found = found.to_f32().into_iter().map(f64::from);
                // Half of the distance between two halves.
                let rounding = if f.ty(f.outputs[i]).dtype == DType::F16 { 5e-4 } else { 0.0 };
                let tolerance = Tolerance { absolute: 1e-5, relative: 1e-5 + rounding };
                compare(found, want.data.iter().copied(), tolerance)
                    .unwrap_or_else(|e| panic!("{what}, {n} steps, {name}, output {i}: {e}"));
            }
        }
    }
}

#[test]
fn channels_run_through_time_on_every_machine() {
    let shapes = [(64, 1), (64, 7), (128, 8), (128, 9), (100, 1), (100, 17), (130, 16), (1, 25), (30, 24)];
    for ((channels, n), gated) in shapes.into_iter().flat_map(|shape| [(shape, false), (shape, true)]) {
        let module = module(channels, channels != 128, gated);
        let (_, f) = module.function("f").unwrap();
        let inputs = random_inputs(f, &SymValues::for_tokens(n as i64), channels as u64);
        let what = format!("{channels} channels, gated: {gated}");
        check(&module, &inputs, n, &["x86-64-v2", "x86-64-v4", "sm_70", "sm_80"], &what);
    }
}

#[test]
fn steps_in_parts_make_what_all_in_turn_make() {
    for n in [1, 3, 4, 7, 16, 63, 64, 65, 130, 513] {
        for gated in [false, true] {
            let module = module(5, false, gated);
            assert!(GPUS.iter().all(|name| has_parts(&module, name)));
            let (_, f) = module.function("f").unwrap();
            let inputs = random_inputs(f, &SymValues::for_tokens(n as i64), n as u64);
            check(&module, &inputs, n, &GPUS, &format!("gated: {gated}"));
        }
    }
}

#[test]
fn the_step_of_rwkv4_in_parts() {
    for (weights, parts) in
        [(WeightVariant::Exponentials, true), (WeightVariant::Chosen, true), (WeightVariant::Varying, false)]
    {
        let module = wkv(6, weights);
        GPUS.iter().for_each(|name| assert_eq!(has_parts(&module, name), parts, "{weights:?}, {name}"));
        for (n, empty) in [(1, -1e30), (9, -1e38), (64, -1e38), (65, f64::from(f32::MIN)), (200, -1e30)] {
            let inputs = wkv_inputs(&module, n, empty);
            check(&module, &inputs, n, &GPUS, &format!("{weights:?}, beginning with {empty}"));
        }
    }
}

#[test]
fn carries_go_on_from_call_to_call() {
    let (module, channels, n) = (wkv(6, WeightVariant::Chosen), 6, 90);
    let inputs = wkv_inputs(&module, n, -1e38);
    let options = ExecutionOptions::with_workers(1);
    for name in GPUS {
        let whole = run_on(&module, &inputs, n, name, &options);
        for first in [1, 6, 64, 77] {
            let rows = |range: std::ops::Range<usize>, carries: Option<&[KernelBuffer]>| {
                let mut of = inputs.clone();
                for seq in &mut of[3..5] {
                    let data = seq.data[range.start * channels..range.end * channels].to_vec();
                    *seq = Tensor::new(seq.dtype, &[range.len(), channels], data);
                }
                for (input, carry) in of.iter_mut().zip(carries.unwrap_or_default()) {
                    input.data = carry.to_f32().into_iter().map(f64::from).collect();
                }
                run_on(&module, &of, range.len(), name, &options)
            };
            let before = rows(0..first, None);
            let after = rows(first..n, Some(&before[..3]));
            let results = [&before[3], &after[3]].map(|b| b.to_f32()).concat();
            let found = after[..3].iter().map(|b| b.to_f32()).chain([results]);
            for (i, (found, want)) in found.zip(&whole).enumerate() {
                let floats = |values: Vec<f32>| values.into_iter().map(f64::from);
                compare(floats(found), floats(want.to_f32()), Tolerance { absolute: 1e-5, relative: 1e-5 })
                    .unwrap_or_else(|e| panic!("{name}, output {i} after {first} steps: {e}"));
            }
        }
    }
}

//! Scans over channels through the kernel interpreter against the graph interpreter: a running maximum with a weighted sum beside it, as in
//! RWKV-4, for channels that fill blocks of threads and that do not, and lengths around the steps that a GPU copies together. Alone, and with
//! what is computed of its results.

use mlcc_interp::compare::{Tolerance, compare};
use mlcc_interp::graph::{Interpreter, States};
use mlcc_interp::kernel::{Buffer, Options, Order, run_with};
use mlcc_ir::dim::{Dim, Sym, SymValues};
use mlcc_ir::graph::{FunctionKind, ValueId};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::Module;
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernels::lower::group::lower_group;
use mlcc_kernels::params::KernelTarget;

/// Two carries, two sequences, the decay a constant of its channel or one of all; two stacked results. With `gated`, one of them is
/// computed on in the kernel, with rows in f32 and f16 and with one of the sequences.
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
    let rows = TensorType::new(DType::F32, [Dim::sym(Sym::N), Dim::from(channels)]);
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

#[test]
fn channels_run_through_time_on_every_machine() {
    let shapes = [(64, 1), (64, 7), (128, 8), (128, 9), (100, 1), (100, 17), (130, 16), (1, 25), (30, 24)];
    for ((channels, n), gated) in shapes.into_iter().flat_map(|shape| [(shape, false), (shape, true)]) {
        let module = module(channels, channels != 128, gated);
        let (_, f) = module.function("f").unwrap();
        let syms = SymValues::tokens(n);
        let inputs = mlcc_interp::equivalence::random_inputs(f, &syms, channels as u64);
        let interpreter = Interpreter::new(&module, |_| unreachable!("no parameters"));
        let want = interpreter.run_named("f", &inputs, &mut States::new(&module).unwrap(), syms).unwrap();
        for name in ["x86-64-v2", "x86-64-v4", "sm_70", "sm_80"] {
            let target = mlcc_target::resolve(name).unwrap();
            let target = KernelTarget::new(target.arch, &target.levels[0]);
            let group = lower_group(&module, f, "scan", &vec![None; f.inputs.len()], &target).unwrap();
            for options in [Options::workers(3), Options { workers: 2, order: Order::Reverse }] {
                let dtypes = |values: &[ValueId]| values.iter().map(|&v| f.ty(v).dtype).collect::<Vec<_>>();
                let given = inputs.iter().zip(dtypes(&f.inputs));
                let mut buffers: Vec<Buffer> =
                    given.map(|(t, dtype)| Buffer::from_floats(dtype, &t.to_f32())).collect();
                let made = want.iter().zip(dtypes(&f.outputs));
                buffers.extend(made.map(|(t, dtype)| Buffer::zeros(dtype, t.data.len())));
                let what = format!("{channels} channels, {n} steps, {name}, gated: {gated}");
                run_with(&group.kernel, &mut buffers, &syms, &options)
                    .unwrap_or_else(|e| panic!("{what}: {e}"));
                for (i, (found, want)) in buffers[inputs.len()..].iter().zip(&want).enumerate() {
                    let found = found.to_f32().into_iter().map(f64::from);
                    // Half of the distance between two halves.
                    let rounding = if f.ty(f.outputs[i]).dtype == DType::F16 { 5e-4 } else { 0.0 };
                    let tolerance = Tolerance { absolute: 1e-5, relative: 1e-5 + rounding };
                    compare(found, want.data.iter().copied(), tolerance)
                        .unwrap_or_else(|e| panic!("{what}, output {i}: {e}"));
                }
            }
        }
    }
}

//! Scans that are linear in a matrix state, in chunks on tensor cores, through the kernel interpreter against
//! the graph interpreter: the recurrences of RWKV-5 to -7, of gated delta rules and of state-space models,
//! with lengths around chunks and decays that vanish; and bodies that are not of that form.

use mlcc_interp::compare::{Tolerance, compare};
use mlcc_interp::graph::{Interpreter, StateValues, Tensor};
use mlcc_interp::kernel::{ExecutionOptions, ExecutionOrder, KernelBuffer, run_with};
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph::{FunctionKind, ValueId};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::Module;
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernels::lower::group::lower_group;
use mlcc_kernels::lower::kernel::GroupKernel;
use mlcc_kernels::params::KernelTarget;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum UpdateRule {
    /// RWKV-5 and -6.
    Bonus,
    /// RWKV-7.
    Replaced,
    /// A gated delta rule with queries and keys that neighbouring heads share.
    GatedDelta,
    StateSpace,
}

/// Heads, and how many of them share queries and keys; rows; columns.
type ChunkScanSizes = [usize; 4];

const KEYS: [bool; 2] = [false, true];
const VALUES: [bool; 2] = [true, false];
const NUMBER: [bool; 2] = [false, false];

fn tensor([heads, shared, rows, columns]: ChunkScanSizes, [r, c]: [bool; 2], of_groups: bool) -> TensorType {
    let size = |on: bool, size: usize| if on { size } else { 1 };
    let lead = match shared {
        1 => vec![heads],
        _ => vec![heads / shared, if of_groups { 1 } else { shared }],
    };
    TensorType::new(DType::F32, lead.into_iter().chain([size(r, rows), size(c, columns)]))
}

/// Extents of the inputs of a step after the state.
fn inputs(rule: UpdateRule) -> Vec<[bool; 2]> {
    match rule {
        UpdateRule::Bonus => vec![KEYS, KEYS, VALUES, KEYS, KEYS],
        UpdateRule::Replaced => vec![KEYS, KEYS, VALUES, KEYS, KEYS, KEYS],
        UpdateRule::GatedDelta => vec![KEYS, KEYS, VALUES, NUMBER, NUMBER],
        UpdateRule::StateSpace => vec![KEYS, KEYS, VALUES, NUMBER],
    }
}

fn step(b: &mut GraphBuilder, rule: UpdateRule, axis: usize, x: &[ValueId]) -> Vec<ValueId> {
    let &[state, r, k, v, w] = &x[..5] else { unreachable!("every rule has four inputs") };
    let read = |b: &mut GraphBuilder, state: ValueId, of: ValueId| {
        let products = b.mul(state, of);
        b.reduce(RedOp::Sum, products, axis)
    };
    match rule {
        UpdateRule::Bonus => {
            let new = b.mul(v, k);
            let boosted = b.mul(new, x[5]);
            let seen = b.add(state, boosted);
            let y = read(b, seen, r);
            let kept = b.mul(state, w);
            vec![b.add(kept, new), y]
        }
        UpdateRule::Replaced => {
            let found = read(b, state, x[5]);
            let kept = b.mul(state, w);
            let new = b.mul(v, k);
            let kept = b.add(kept, new);
            let replaced = b.mul(found, x[6]);
            let state = b.add(kept, replaced);
            vec![state, read(b, state, r)]
        }
        UpdateRule::GatedDelta => {
            let kept = b.mul(state, w);
            let found = read(b, kept, k);
            let missing = b.sub(v, found);
            let change = b.mul(missing, x[5]);
            let added = b.mul(change, k);
            let state = b.add(kept, added);
            vec![state, read(b, state, r)]
        }
        UpdateRule::StateSpace => {
            let kept = b.mul(state, w);
            let added = b.mul(v, k);
            let state = b.add(kept, added);
            vec![state, read(b, state, r)]
        }
    }
}

fn module(rule: UpdateRule, sizes: ChunkScanSizes) -> Module {
    let mut b = GraphBuilder::new("chunks");
    let matrix = tensor(sizes, [true, true], false);
    let axis = matrix.dims.len() - 1;
    let of_step = inputs(rule).into_iter().map(|e| tensor(sizes, e, e == KEYS)).collect::<Vec<_>>();
    let types = [vec![matrix.clone()], of_step.clone()].concat();
    let body = b.function("body", FunctionKind::Body, &types, |b, x| step(b, rule, axis, x));
    let stacked = of_step.into_iter().map(|ty| {
        let dims = std::iter::once(Dim::sym(SizeSymbol::N)).chain(ty.dims);
        TensorType::new(DType::F32, dims)
    });
    let types: Vec<TensorType> = std::iter::once(matrix).chain(stacked).collect();
    b.function("f", FunctionKind::Entry, &types, |b, x| b.scan(body, &x[..1], &x[1..], &[]));
    b.finish().unwrap()
}

/// Values as models have them: decays between nothing and one, corrections that keep the state in bounds.
fn values(rule: UpdateRule, module: &Module, n: i64, seed: u64) -> Vec<Tensor> {
    let (_, f) = module.function("f").unwrap();
    let mut all = mlcc_interp::equivalence::random_inputs(f, &SymValues::for_tokens(n), seed);
    let mut decays = all[4].data.iter().map(|x| 1.0 / (1.0 + (3.0 - 2.0 * x).exp())).collect::<Vec<f64>>();
    // Some forget everything.
    decays.iter_mut().step_by(7).for_each(|w| *w = 1e-38);
    decays.iter_mut().step_by(5).for_each(|w| *w = 1.0 - *w);
    all[4].data = decays.into_iter().map(|w| f64::from(w as f32)).collect();
    let scaled = |x: &mut Tensor, by: f64| {
        x.data.iter_mut().for_each(|x| *x = f64::from((*x * by) as f32));
    };
    match rule {
        UpdateRule::Replaced => {
            scaled(&mut all[5], 0.2);
            scaled(&mut all[6], 0.2);
        }
        UpdateRule::GatedDelta => scaled(&mut all[2], 0.1),
        UpdateRule::Bonus | UpdateRule::StateSpace => {}
    }
    all
}

fn lowered(module: &Module, name: &str) -> GroupKernel {
    let (_, f) = module.function("f").unwrap();
    let target = mlcc_target::resolve_target(name).unwrap();
    let target = KernelTarget::new(target.arch, &target.levels[0]);
    lower_group(module, f, "scan", &vec![None; f.inputs.len()], &target).unwrap()
}

fn check(rule: UpdateRule, sizes: ChunkScanSizes, n: i64) {
    let module = module(rule, sizes);
    let inputs = values(rule, &module, n, n as u64 + sizes[3] as u64);
    let syms = SymValues::for_tokens(n);
    let interpreter = Interpreter::new(&module, |_| unreachable!("no parameters"));
    let want = interpreter.run_named("f", &inputs, &mut StateValues::new(&module).unwrap(), syms).unwrap();
    let group = lowered(&module, "sm_80");
    let what = format!("{rule:?}, {sizes:?}, {n} steps");
    let merge = group.merge.as_ref().unwrap_or_else(|| panic!("{what}: no chunks"));
    assert_eq!(merge.reads, [0]);
    let given: Vec<KernelBuffer> = inputs.iter().map(|t| KernelBuffer::from_f32(&t.to_f32())).collect();
    for options in
        [ExecutionOptions::with_workers(3), ExecutionOptions { workers: 2, order: ExecutionOrder::Reverse }]
    {
        let mut buffers = given.clone();
        buffers.push(KernelBuffer::zeros(DType::BF16, merge.bytes.eval(&syms) as usize / 2));
        run_with(&group.kernel, &mut buffers, &syms, &options).unwrap_or_else(|e| panic!("{what}: {e}"));
        let mut buffers = vec![buffers.pop().unwrap(), given[0].clone()];
        buffers.extend(want.iter().map(|t| KernelBuffer::zeros(DType::F32, t.data.len())));
        run_with(&merge.kernel.kernel, &mut buffers, &syms, &options)
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        for (i, (found, want)) in buffers[2..].iter().zip(&want).enumerate() {
            let found = found.to_f32().into_iter().map(f64::from);
            let tolerance = Tolerance { absolute: 1e-4, relative: 1e-4 };
            compare(found, want.data.iter().copied(), tolerance)
                .unwrap_or_else(|e| panic!("{what}, output {i}: {e}"));
        }
    }
}

#[test]
fn chunks_are_what_steps_are() {
    let rules = [UpdateRule::Bonus, UpdateRule::Replaced, UpdateRule::GatedDelta, UpdateRule::StateSpace];
    for (i, rule) in rules.into_iter().enumerate() {
        for (sizes, n) in
            [([2, 1, 64, 64], 33), ([1, 1, 16, 128], 16), ([3, 1, 32, 16], 2), ([2, 1, 48, 32], 15)]
        {
            check(rule, sizes, n + i as i64);
        }
        check(rule, [4, 2, 16, 32], 17);
    }
}

#[test]
fn other_states_and_machines_go_step_by_step() {
    for (sizes, name) in [
        ([2, 1, 64, 64], "sm_70"),
        ([2, 1, 24, 64], "sm_80"),
        ([2, 1, 16, 48], "sm_80"),
        ([2, 1, 16, 256], "sm_80"),
        ([2, 1, 16, 8], "sm_80"),
    ] {
        assert!(lowered(&module(UpdateRule::Replaced, sizes), name).merge.is_none(), "{sizes:?}, {name}");
    }
}

/// Bodies near the form that are not of it.
#[test]
fn other_bodies_go_step_by_step() {
    type Build = fn(&mut GraphBuilder, &[ValueId]) -> Vec<ValueId>;
    let taken = |build: Build| {
        let sizes = [2, 1, 16, 16];
        let mut b = GraphBuilder::new("m");
        let types: Vec<TensorType> =
            [[true, true], KEYS, VALUES, KEYS].map(|extents| tensor(sizes, extents, false)).into();
        let body = b.function("body", FunctionKind::Body, &types, build);
        let stacked = types[1..].iter().map(|ty| {
            TensorType::new(
                DType::F32,
                std::iter::once(Dim::sym(SizeSymbol::N)).chain(ty.dims.iter().cloned()),
            )
        });
        let types: Vec<TensorType> = std::iter::once(types[0].clone()).chain(stacked).collect();
        b.function("f", FunctionKind::Entry, &types, |b, x| b.scan(body, &x[..1], &x[1..], &[]));
        lowered(&b.finish().unwrap(), "sm_80").merge.is_some()
    };
    fn sum(b: &mut GraphBuilder, state: ValueId, of: ValueId) -> ValueId {
        let products = b.mul(state, of);
        b.reduce(RedOp::Sum, products, 2)
    }
    let linear: Build = |b, x| {
        let (kept, new) = (b.mul(x[0], x[3]), b.mul(x[2], x[1]));
        let state = b.add(kept, new);
        vec![state, sum(b, state, x[1])]
    };
    assert!(taken(linear), "a body of the form");
    let decays_of_rows: Build = |b, x| {
        let (kept, new) = (b.mul(x[0], x[2]), b.mul(x[2], x[1]));
        let state = b.add(kept, new);
        vec![state, sum(b, state, x[1])]
    };
    let not_linear: Build = |b, x| {
        let (kept, new) = (b.tanh(x[0]), b.mul(x[2], x[1]));
        let state = b.add(kept, new);
        vec![state, sum(b, state, x[1])]
    };
    let squared: Build = |b, x| {
        let (found, kept) = (sum(b, x[0], x[1]), b.mul(x[0], x[3]));
        let found = b.mul(found, found);
        let new = b.mul(found, x[1]);
        let state = b.add(kept, new);
        vec![state, sum(b, state, x[1])]
    };
    let found_twice: Build = |b, x| {
        let (found, other, kept) = (sum(b, x[0], x[1]), sum(b, x[0], x[3]), b.mul(x[0], x[3]));
        let both = b.add(found, other);
        let new = b.mul(both, x[1]);
        let state = b.add(kept, new);
        vec![state, sum(b, state, x[1])]
    };
    let most: Build = |b, x| {
        let (kept, new) = (b.mul(x[0], x[3]), b.mul(x[2], x[1]));
        let state = b.add(kept, new);
        let products = b.mul(state, x[1]);
        vec![state, b.reduce(RedOp::Max, products, 2)]
    };
    let other_values: Build = |b, x| {
        let (kept, new) = (b.mul(x[0], x[3]), b.mul(x[2], x[1]));
        let state = b.add(kept, new);
        let square = b.mul(x[2], x[2]);
        let boosted = b.mul(square, x[1]);
        let seen = b.add(x[0], boosted);
        vec![state, sum(b, seen, x[1])]
    };
    for (what, body) in [
        ("decays of rows", decays_of_rows),
        ("not linear", not_linear),
        ("squared", squared),
        ("two sums", found_twice),
        ("a maximum", most),
        ("other values", other_values),
    ] {
        assert!(!taken(body), "{what}");
    }
}

//! Scans over the rows of matrix states through the kernel interpreter, on CPUs with several workers and in
//! GPU blocks, against the graph interpreter: random bodies of the structure that the template takes, and
//! bodies that it does not.

use mlcc_interp::compare::{Tolerance, compare};
use mlcc_interp::graph::{Interpreter, StateValues, Tensor};
use mlcc_interp::kernel::{ExecutionOptions, ExecutionOrder, KernelBuffer, run_with};
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph::{FunctionKind, ValueId};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::kernel::{BinOp, Kernel, MemorySpace, ParamAccess, UnOp};
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::testing::TestRng;
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernels::lower::group::lower_group;
use mlcc_kernels::lower::plan::Partition;
use mlcc_kernels::params::KernelTarget;
use mlcc_kernels::scan::matrix::{StateShape, shape_of};
use mlcc_target::Arch;

/// Axes of heads, rows, columns.
type RowScanSizes<'a> = (&'a [usize], usize, usize);

/// A module with a body and the function `f` that scans with it over sequences of length n.
struct MatrixScanCase {
    module: Module,
    carries: usize,
}

/// Extents along heads, rows and columns.
type ValueExtents = [bool; 3];

fn tensor((heads, rows, columns): RowScanSizes, [h, r, c]: ValueExtents) -> TensorType {
    let size = |on: bool, size: usize| if on { size } else { 1 };
    let dims = heads.iter().map(|&d| size(h, d)).chain([size(r, rows), size(c, columns)]);
    TensorType::new(DType::F32, dims)
}

/// Builds the body from random ops on random inputs: the new states are kept in bounds. With `vectors` only
/// states are matrices, as in the models: what the form with lanes over rows takes.
fn random_case(seed: u64, sizes: RowScanSizes, vectors: bool) -> MatrixScanCase {
    let mut rng = TestRng(seed);
    let any = |rng: &mut TestRng| {
        let columns = rng.chance(2);
        [rng.chance(2), rng.chance(2) && !(vectors && columns), columns]
    };
    let mut carries: Vec<ValueExtents> = vec![[true; 3]];
    carries.extend((rng.chance(2) && !vectors).then_some([true, true, false]));
    carries.extend(rng.chance(4).then_some([true; 3]));
    let seqs: Vec<ValueExtents> = (0..1 + rng.below(4)).map(|_| any(&mut rng)).collect();
    let consts: Vec<ValueExtents> = (0..rng.below(3)).map(|_| any(&mut rng)).collect();
    let types = |extents: &[ValueExtents]| extents.iter().map(|&e| tensor(sizes, e)).collect::<Vec<_>>();
    let slices = [types(&carries), types(&seqs), types(&consts)].concat();

    let mut b = GraphBuilder::new("case");
    let count = carries.len();
    let body = b.function("body", FunctionKind::Body, &slices, |b, inputs| {
        let mut pool = inputs.to_vec();
        pool.push(b.constant(0.75));
        for _ in 0..2 + rng.below(8) {
            let node = random_node(b, &mut rng, &pool);
            pool.push(node);
        }
        let (last, matrix) = (pool[pool.len() - 1], inputs[0]);
        let row = b.reduce(RedOp::Sum, matrix, sizes.0.len() + 1);
        // A value that extends along heads and rows, whatever `last` does: a part of the states goes into
        // everything. The sum itself would let an error of rounding grow from step to step, up to the number
        // of columns times as large.
        let mean = b.scale(row, 1.0 / sizes.2 as f64);
        let per_row = |b: &mut GraphBuilder, v: ValueId| {
            let both = b.mul(mean, v);
            b.tanh(both)
        };
        let mut outputs = Vec::new();
        for &carry in &inputs[..count] {
            let new = per_row(b, last);
            let is_narrow = b.ty(carry).dims.last() == Some(&Dim::from(1));
            let new = if is_narrow { b.reduce(RedOp::Max, new, sizes.0.len() + 1) } else { new };
            let kept = b.scale(carry, 0.5);
            outputs.push(b.add(kept, new));
        }
        let middle = per_row(b, pool[pool.len() / 2]);
        let is_wide = b.ty(middle).dims.last() != Some(&Dim::from(1));
        outputs.push(if vectors && is_wide {
            b.reduce(RedOp::Sum, middle, sizes.0.len() + 1)
        } else {
            middle
        });
        outputs.push(row);
        outputs
    });
    let stacked = types(&seqs).into_iter().map(|ty| {
        let dims = std::iter::once(Dim::sym(SizeSymbol::N)).chain(ty.dims);
        TensorType::new(DType::F32, dims)
    });
    let inputs: Vec<TensorType> = types(&carries).into_iter().chain(stacked).chain(types(&consts)).collect();
    b.function("f", FunctionKind::Entry, &inputs, |b, inputs| {
        let (first, rest) = inputs.split_at(count);
        let (seqs, consts) = rest.split_at(seqs.len());
        b.scan(body, first, seqs, consts)
    });
    MatrixScanCase { module: b.finish().unwrap(), carries: count }
}

fn random_node(b: &mut GraphBuilder, rng: &mut TestRng, pool: &[ValueId]) -> ValueId {
    let [x, y, z] = [rng.pick(pool), rng.pick(pool), rng.pick(pool)];
    match rng.below(10) {
        0 | 1 => b.mul(x, y),
        2 => b.add(x, y),
        3 => b.op(Op::Binary(rng.pick(&[BinOp::Sub, BinOp::Max, BinOp::Min])), &[x, y]),
        4 => b.unary(rng.pick(&[UnOp::Sigmoid, UnOp::Tanh, UnOp::Neg, UnOp::Abs]), x),
        5 => b.op(Op::SelectGe, &[x, y, z, x]),
        // A product that is added to something: what becomes a fused multiply-add.
        6 | 7 => {
            let product = b.mul(x, y);
            b.add(product, z)
        }
        _ if b.ty(x).rank() == 0 => b.tanh(x),
        kind => {
            let op = if kind == 8 { RedOp::Sum } else { RedOp::Max };
            let product = b.mul(x, x);
            let axis = b.ty(x).rank() - 1;
            let sum = b.reduce(op, product, axis);
            b.tanh(sum)
        }
    }
}

fn target(name: &str) -> KernelTarget {
    let target = mlcc_target::resolve_target(name).unwrap();
    KernelTarget::new(target.arch, &target.levels[0])
}

/// All workers, orders and machines on one case.
fn check(seed: u64, sizes: RowScanSizes, n: i64, targets: &[&str]) {
    for vectors in [false, true] {
        check_case(&random_case(seed, sizes, vectors), seed, (sizes, n), targets, vectors);
    }
}

/// True if a kernel keeps its states on the stack, transposed.
fn has_lanes_over_rows(kernel: &Kernel) -> bool {
    kernel.bufs.iter().any(|(_, buf)| buf.space == MemorySpace::Stack && buf.name == "state")
}

fn check_case(
    case: &MatrixScanCase,
    seed: u64,
    (sizes, n): (RowScanSizes, i64),
    targets: &[&str],
    vectors: bool,
) {
    let MatrixScanCase { module, carries } = case;
    let carries = *carries;
    let (_, f) = module.function("f").unwrap();
    let (_, body) = module.function("body").unwrap();
    let expected = StateShape {
        heads: sizes.0.iter().product::<usize>() as i64,
        rows: sizes.1 as i64,
        columns: sizes.2 as i64,
    };
    assert_eq!(shape_of(body, carries), Some(expected), "seed {seed}");
    let syms = SymValues::for_tokens(n);
    let inputs = mlcc_interp::equivalence::random_inputs(f, &syms, seed);
    let interpreter = Interpreter::new(module, |_| unreachable!("no parameters"));
    let want = interpreter.run_named("f", &inputs, &mut StateValues::new(module).unwrap(), syms).unwrap();
    for name in targets {
        let target = target(name);
        let group = lower_group(module, f, "scan", &vec![None; f.inputs.len()], &target).unwrap();
        let fits = sizes.1 as i64 % i64::from(target.f32_lanes()) == 0 && sizes.2 > 1;
        if vectors {
            let expected = target.arch != Arch::Nvptx && fits;
            assert_eq!(has_lanes_over_rows(&group.kernel), expected, "seed {seed}, {sizes:?}, {name}");
        }
        for options in [
            ExecutionOptions::with_workers(3),
            ExecutionOptions { workers: 2, order: ExecutionOrder::Reverse },
        ] {
            let mut buffers: Vec<KernelBuffer> =
                inputs.iter().map(|t| KernelBuffer::from_f32(&t.to_f32())).collect();
            buffers.extend(want.iter().map(|t| KernelBuffer::zeros(DType::F32, t.data.len())));
            let what = format!("seed {seed}, {sizes:?}, n = {n}, {name}, vectors {vectors}");
            run_with(&group.kernel, &mut buffers, &syms, &options).unwrap_or_else(|e| panic!("{what}: {e}"));
            for (i, (found, want)) in buffers[inputs.len()..].iter().zip(&want).enumerate() {
                close(&format!("{what}, output {i}"), found, want);
            }
        }
    }
}

fn close(what: &str, found: &KernelBuffer, want: &Tensor) {
    let found = found.to_f32().into_iter().map(f64::from);
    let tolerance = Tolerance { absolute: 1e-4, relative: 1e-4 };
    compare(found, want.data.iter().copied(), tolerance).unwrap_or_else(|e| panic!("{what}: {e}"));
}

const CPUS: [&str; 3] = ["x86-64-v2", "x86-64-v3", "x86-64-v4"];

#[test]
fn random_bodies_on_heads_of_published_sizes() {
    for (seed, size, n) in [(1, 32, 1), (2, 32, 70), (3, 64, 1), (7, 64, 9), (5, 128, 1), (6, 128, 3)] {
        check(seed, (&[2], size, size), n, &["x86-64-v2", "x86-64-v4", "sm_80"]);
    }
}

#[test]
fn random_bodies_of_every_shape() {
    let shapes: [RowScanSizes; 8] = [
        (&[3], 16, 20),
        (&[2], 5, 7),
        (&[], 32, 16),
        (&[2, 2], 16, 8),
        (&[1], 1, 12),
        (&[4], 6, 1),
        (&[2, 1], 48, 33),
        (&[1], 130, 4),
    ];
    for seed in 0..48 {
        let shape = shapes[seed as usize % shapes.len()];
        let n = [1, 2, 5, 19][seed as usize / shapes.len() % 4];
        let gpu = ["sm_70", "sm_80"][seed as usize % 2];
        check(100 + seed, shape, n, &[CPUS[seed as usize % 3], gpu]);
    }
}

/// Rows of 16 go to the same worker as the columns of a product do; what others read as well does not.
#[test]
fn results_are_sliced_as_those_of_products() {
    let MatrixScanCase { module, carries } = random_case(7, (&[2], 32, 32), false);
    let (_, f) = module.function("f").unwrap();
    let group = lower_group(&module, f, "scan", &vec![None; f.inputs.len()], &target("x86-64-v3")).unwrap();
    let outputs = &group.args[f.inputs.len()..];
    assert!(outputs.iter().all(|a| a.access == ParamAccess::Out));
    // The last output is a number per row, the first is the matrix, which takes its old place.
    assert_eq!(outputs.last().unwrap().partition, Some(Partition::Tiles(4)));
    assert_eq!((&outputs[0].partition, outputs[0].in_place.as_slice()), (&None, &[0][..]));
    assert!(carries >= 1);
}

#[test]
fn bodies_that_mix_rows_are_not_taken() {
    let refused = |what: &str, build: &dyn Fn(&mut GraphBuilder, &[ValueId]) -> Vec<ValueId>| {
        let sizes: RowScanSizes = (&[2], 4, 8);
        let inputs = [[true; 3], [true, false, true], [true, true, false]].map(|e| tensor(sizes, e));
        let mut b = GraphBuilder::new("m");
        let body = b.function("body", FunctionKind::Body, &inputs, |b, inputs| build(b, inputs));
        let module = b.finish().unwrap();
        assert_eq!(shape_of(&module.functions[body], 1), None, "{what}");
    };
    refused("a sum over rows", &|b, v| {
        let sum = b.reduce(RedOp::Sum, v[0], 1);
        vec![b.add(v[0], sum)]
    });
    refused("a sum over heads", &|b, v| {
        let sum = b.reduce(RedOp::Sum, v[0], 0);
        vec![b.add(v[0], sum)]
    });
    refused("a permutation", &|b, v| {
        let turned = b.permute(v[0], &[0, 1, 2]);
        vec![turned]
    });
    refused("a result that is the same for all rows", &|b, v| {
        let wide = b.mul(v[1], v[1]);
        vec![v[0], wide]
    });
}

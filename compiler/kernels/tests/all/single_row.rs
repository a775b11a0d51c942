//! Products of one row on a GPU with what is around them in their kernel: a norm before, and gates and
//! residuals behind, against the graph interpreter.

use mlcc_interp::compare::{Tolerance, compare};
use mlcc_interp::graph::{Interpreter, StateValues};
use mlcc_interp::kernel::{ExecutionOptions, ExecutionOrder, KernelBuffer, run_with};
use mlcc_ir::compute::RedOp;
use mlcc_ir::dim::{Dim, SymValues};
use mlcc_ir::graph::FunctionKind;
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::kernel::UnOp;
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, Packing, TensorType};
use mlcc_kernels::lower::group::{KernelTemplate, choose_template, lower_group};
use mlcc_kernels::params::KernelTarget;
use mlcc_quant::{FragmentSizes, PackOptions, dequantize, pack};

/// The ops around a product in a case.
#[derive(Clone, Copy, Debug)]
struct FusedOps {
    norm: bool,
    /// Activations are rounded to f16.
    rounded: bool,
    /// Parts of the result that are multiplied, the first of them through a sigmoid.
    parts: usize,
    residual: bool,
}

/// Checks a product with weights `[n, k]`; the plan has the words `says`.
fn check(weight: DType, (n, k): (usize, usize), around: FusedOps, says: &[&str]) {
    let columns = n / around.parts;
    let dims = |dims: &[usize]| dims.iter().map(|&d| Dim::from(d)).collect::<Vec<_>>();
    let ty = |dtype, of: &[usize]| TensorType { dtype, dims: dims(of) };
    let f32 = |of: &[usize]| ty(DType::F32, of);
    let x = if around.rounded && !around.norm { DType::F16 } else { DType::F32 };
    let inputs = [ty(x, &[1, k]), f32(&[k]), ty(weight, &[n, k]), f32(&[1, columns])];
    let mut b = GraphBuilder::new("case");
    b.function("f", FunctionKind::Group, &inputs, |b, inputs| {
        let mut x = inputs[0];
        if around.norm {
            let squares = b.mul(x, x);
            let sum = b.reduce(RedOp::Sum, squares, 1);
            let mean = b.scale(sum, 1.0 / k as f64);
            let scale = b.unary(UnOp::Rsqrt, mean);
            let scaled = b.mul(x, scale);
            x = b.mul(scaled, inputs[1]);
        }
        if around.rounded && around.norm {
            x = b.cast(x, DType::F16);
        }
        let mut y = b.op(Op::MatMul { transpose_b: true }, &[x, inputs[2]]);
        if around.parts > 1 {
            let part = |i: usize| b.slice(y, 1, (i * columns).into(), columns.into());
            let parts: Vec<_> = (0..around.parts).map(part).collect();
            y = b.unary(UnOp::Sigmoid, parts[0]);
            for part in parts {
                y = b.mul(y, part);
            }
        }
        if around.residual {
            y = b.add(y, inputs[3]);
        }
        vec![y]
    });
    against_interpreter(
        &b.finish().unwrap(),
        (weight, n, k),
        says,
        &format!("{weight} {n} x {k}, {around:?}"),
    );
}

/// Runs the function `f`, whose third input is a weight `[n, k]`, and compares.
fn against_interpreter(module: &Module, (weight, n, k): (DType, usize, usize), says: &[&str], what: &str) {
    let (_, f) = module.function("f").unwrap();
    let syms = SymValues::for_tokens(1);
    let rounded = f
        .live_nodes()
        .any(|(_, node)| matches!(node.op, Op::MatMul { .. }) && f.ty(node.inputs[0]).dtype == DType::F16);
    let packing = match FragmentSizes::new(weight, n, k) {
        Ok(_) if rounded => Packing::Fragments,
        _ => Packing::RowMajor,
    };
    let mut values = mlcc_interp::equivalence::random_inputs(f, &syms, 7);
    // The values of packed weights.
    let packed = matches!(weight, DType::Packed(_)).then(|| {
        let bytes = pack(weight, packing, n, k, &values[2].to_f32(), PackOptions::default()).unwrap();
        let floats = dequantize(weight, packing, n, k, &bytes).unwrap();
        values[2].data = floats.into_iter().map(f64::from).collect();
        bytes
    });
    let interpreter = Interpreter::new(module, |_| unreachable!("no parameters"));
    let want = interpreter.run_named("f", &values, &mut StateValues::new(module).unwrap(), syms).unwrap();

    let spec = mlcc_target::resolve_target("sm_80").unwrap();
    let target = KernelTarget::new(spec.arch, &spec.levels[0]);
    let packings: Vec<_> = (0..f.inputs.len()).map(|i| (i == 2).then_some(packing)).collect();
    assert!(matches!(choose_template(f, &packings, &target), KernelTemplate::Contraction(_)), "{what}");
    let group = lower_group(module, f, "row", &packings, &target).unwrap();
    for word in says {
        assert!(group.made.plan.contains(word), "{what}: no {word:?} in {}", group.made.plan);
    }
    for options in [
        ExecutionOptions::with_workers(1),
        ExecutionOptions { workers: 1, order: ExecutionOrder::Shuffled(3) },
    ] {
        let mut buffers: Vec<KernelBuffer> = values
            .iter()
            .zip(&f.inputs)
            .map(|(t, &v)| match (&packed, f.ty(v).dtype) {
                (Some(bytes), DType::Packed(_)) => KernelBuffer::from_u8(bytes),
                (_, dtype) => KernelBuffer::from_floats(dtype, &t.to_f32()),
            })
            .chain([KernelBuffer::zeros(DType::F32, want[0].data.len())])
            .collect();
        run_with(&group.kernel, &mut buffers, &syms, &options).unwrap_or_else(|e| panic!("{what}: {e}"));
        let found = buffers[f.inputs.len()].to_f32().into_iter().map(f64::from);
        let tolerance = Tolerance { absolute: 1e-4, relative: 1e-4 };
        compare(found, want[0].data.iter().copied(), tolerance).unwrap_or_else(|e| panic!("{what}: {e}"));
    }
}

#[test]
fn products_with_what_is_around_them() {
    let norm = ["activations computed by each block"];
    // 512 columns come in rounds and in halves of 16 bytes, others leave pieces and columns over.
    for k in [512, 256, 100, 37] {
        for weight in [DType::F32, DType::F16] {
            let plain = FusedOps { norm: false, rounded: false, parts: 1, residual: true };
            check(weight, (12, k), plain, &["per 2 rows"]);
            check(weight, (9, k), plain, &["per row"]);
            check(weight, (22, k), FusedOps { norm: true, ..plain }, &norm);
            check(
                weight,
                (24, k),
                FusedOps { norm: true, parts: 2, residual: false, ..plain },
                &["2 parts joined"],
            );
            check(weight, (27, k), FusedOps { parts: 3, ..plain }, &["3 parts joined"]);
        }
    }
    // Enough rows that blocks take several turns, the last of them with rows for some.
    let both = FusedOps { norm: true, rounded: false, parts: 2, residual: true };
    check(DType::F16, (2 * 8 * 1030, 32), both, &["2 times"]);
}

/// Weights in fragments and f16 activations, on tensor cores: columns for some warps only, for all, and in
/// several rounds; blocks with one tile of rows and with two, the last of them with one.
#[test]
fn products_on_tensor_cores() {
    let weight = DType::parse("q4g32").unwrap();
    let plain = FusedOps { norm: false, rounded: true, parts: 1, residual: true };
    let norm = FusedOps { norm: true, ..plain };
    for k in [128, 1152, 4224] {
        check(weight, (48, k), plain, &["tensor cores, 1 x 16", "8 warps"]);
        check(weight, (48, k), norm, &["tensor cores", "computed by each block"]);
        check(weight, (64, k), FusedOps { parts: 2, ..norm }, &["tensor cores", "2 parts joined"]);
        check(weight, (64, k), FusedOps { parts: 4, residual: false, ..plain }, &["tensor cores", "4 parts"]);
    }
    check(weight, (16 * 513, 128), plain, &["tensor cores, 2 x 16", "4 warps"]);
    check(weight, (16 * 514, 256), FusedOps { parts: 2, ..norm }, &["tensor cores, 2 x 16", "4 warps"]);
    for (weight, k) in [("q8g32", 128), ("q4g64", 192), ("q4g128", 384), ("q4g32_f32", 128)] {
        let weight = DType::parse(weight).unwrap();
        check(weight, (64, k), FusedOps { parts: 2, ..norm }, &["tensor cores", "2 parts joined"]);
    }
    // Others are multiplied lane by lane; those in fragments too where parts are no whole tiles.
    for (rows, k, weight, around) in [
        (40, 128, "q4g32", plain),
        (48, 96, "q4g32", plain),
        (48, 128, "q4g32", FusedOps { rounded: false, ..plain }),
        (48, 128, "q4g32", FusedOps { parts: 3, ..plain }),
        (48, 128, "q8g32", FusedOps { parts: 2, ..plain }),
        (48, 128, "q4g32_min", plain),
    ] {
        check(DType::parse(weight).unwrap(), (rows, k), around, &["a warp per"]);
    }
}

/// Heads of a row are normalized, as behind the recurrences of RWKV, and are the activations: heads for some
/// threads of a block, for all, and for some in the last of several rounds.
#[test]
fn activations_of_heads() {
    let computed = ["activations computed by each block"];
    for (heads, size) in [(3, 4), (8, 128), (4, 64), (40, 64), (34, 32)] {
        for (weight, rounded) in [(DType::F16, false), (DType::parse("q4g32").unwrap(), true)] {
            let (n, k) = (48, heads * size);
            if weight != DType::F16 && k % 128 != 0 {
                continue;
            }
            let f32 = |dims: &[usize]| TensorType::new(DType::F32, dims.iter().copied());
            let w = TensorType { dtype: weight, ..f32(&[n, k]) };
            let inputs = [f32(&[1, heads, size]), f32(&[heads, size]), w, f32(&[1, heads, size])];
            let mut b = GraphBuilder::new("case");
            b.function("f", FunctionKind::Group, &inputs, |b, inputs| {
                let sum = b.reduce(RedOp::Sum, inputs[0], 2);
                let mean = b.scale(sum, 1.0 / size as f64);
                let centred = b.sub(inputs[0], mean);
                let squares = b.square(centred);
                let sum = b.reduce(RedOp::Sum, squares, 2);
                let one = b.constant(1.0);
                let sum = b.add(sum, one);
                let scale = b.unary(UnOp::Rsqrt, sum);
                let unit = b.mul(centred, scale);
                let scaled = b.mul(unit, inputs[1]);
                let mut x = b.mul(scaled, inputs[3]);
                if rounded {
                    x = b.cast(x, DType::F16);
                }
                let x = b.reshape(x, [1, k]);
                vec![b.op(Op::MatMul { transpose_b: true }, &[x, inputs[2]])]
            });
            let what = format!("{weight} {n} x {k}, {heads} heads");
            against_interpreter(&b.finish().unwrap(), (weight, n, k), &computed, &what);
        }
    }
}

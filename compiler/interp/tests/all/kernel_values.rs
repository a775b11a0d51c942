//! Values of expressions: arithmetic, casts, lanes, masks, instructions, on CPU kernels with one worker.

use mlcc_interp::kernel::{KernelBuffer, KernelFault, run};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{SizeSymbol, SymValues};
use mlcc_ir::instr::InstrId;
use mlcc_ir::kernel::*;
use mlcc_ir::types::DType;

const ONE: SymValues = SymValues { n: 1, b: 1, past: 0 };

/// Applies `f` to all elements of `input` in one vector and returns what it stores.
fn apply(
    input: &KernelBuffer,
    out: DType,
    f: impl FnOnce(&mut KernelBuilder, ExprId) -> ExprId,
) -> KernelBuffer {
    let mut kb = KernelBuilder::new("apply");
    let x = kb.param("x", input.dtype, input.len(), ParamAccess::In, 64);
    let y = kb.param("y", out, input.len(), ParamAccess::Out, 64);
    let zero = kb.int(0);
    let value = kb.load_vec(x, zero, input.len() as u32);
    let value = f(&mut kb, value);
    kb.store_vec(y, zero, value);
    let mut buffers = [input.clone(), KernelBuffer::zeros(out, input.len())];
    run(&kb.finish(), &mut buffers, &ONE).expect("runs");
    let [_, y] = buffers;
    y
}

fn fails(f: impl FnOnce(&mut KernelBuilder, BufId)) -> KernelFault {
    let mut kb = KernelBuilder::new("bad");
    let x = kb.param("x", DType::I32, 4, ParamAccess::InOut, 64);
    f(&mut kb, x);
    let mut buffers = [KernelBuffer::from_i32(&[1, 2, 3, 4])];
    run(&kb.finish(), &mut buffers, &ONE).expect_err("must fail").fault
}

#[test]
fn integers_wrap_and_shift_by_signedness() {
    let add = apply(&KernelBuffer::from_i8(&[127, -128, 3, 0]), DType::I8, |kb, x| {
        let one = kb.constant(1.0, ExprType::scalar(DType::I8));
        kb.add(x, one)
    });
    assert_eq!(add.to_i64(), [-128, -127, 4, 1]);
    let signed = apply(&KernelBuffer::from_i32(&[-8, 8]), DType::I32, |kb, x| {
        let two = kb.constant(2.0, ExprType::scalar(DType::I32));
        kb.binary(BinOp::Shr, x, two)
    });
    assert_eq!(signed.to_i64(), [-2, 2]);
    let unsigned = apply(&KernelBuffer::from_u8(&[0xf8, 8]), DType::U8, |kb, x| {
        let two = kb.constant(2.0, ExprType::scalar(DType::U8));
        kb.binary(BinOp::Shr, x, two)
    });
    assert_eq!(unsigned.to_i64(), [0x3e, 2]);
    let product = apply(&KernelBuffer::from_i64(&[i64::MAX, -3]), DType::I64, |kb, x| kb.mul(x, x));
    assert_eq!(product.to_i64(), [1, 9]);
    let quotient = apply(&KernelBuffer::from_i32(&[-7, 7]), DType::I32, |kb, x| {
        let two = kb.constant(2.0, ExprType::scalar(DType::I32));
        kb.div(x, two)
    });
    assert_eq!(quotient.to_i64(), [-3, 3]);
}

#[test]
fn casts_saturate_wrap_and_round() {
    let x = KernelBuffer::from_f32(&[-1.9, 300.0, f32::NAN, -1e20, 1e20]);
    assert_eq!(apply(&x, DType::I8, |kb, x| kb.cast(x, DType::I8)).to_i64(), [-1, 127, 0, -128, 127]);
    assert_eq!(apply(&x, DType::U8, |kb, x| kb.cast(x, DType::U8)).to_i64(), [0, 255, 0, 0, 255]);
    let i = KernelBuffer::from_i32(&[-1, 300, 127, 0]);
    assert_eq!(apply(&i, DType::U8, |kb, x| kb.cast(x, DType::U8)).to_i64(), [255, 44, 127, 0]);
    assert_eq!(apply(&i, DType::Bool, |kb, x| kb.cast(x, DType::Bool)).to_i64(), [1, 1, 1, 0]);
    // Halfway between two bf16 and two f16 values: to even.
    let x = KernelBuffer::from_f32(&[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 65520.0]);
    let b = apply(&x, DType::BF16, |kb, x| kb.cast(x, DType::BF16));
    assert_eq!(b.to_f32(), [1.0, 1.0 + 4.0 / 256.0, 65536.0]);
    let h = apply(&x, DType::F16, |kb, x| kb.cast(x, DType::F16));
    assert_eq!(h.to_f32(), [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, f32::INFINITY]);
}

#[test]
fn fma_rounds_once_and_halfs_round_each_operation() {
    let x = KernelBuffer::from_f32(&[1.0 + f32::EPSILON]);
    let fused = apply(&x, DType::F32, |kb, x| {
        let minus = kb.float(f64::from(-1.0 - 2.0 * f32::EPSILON));
        kb.fma(x, x, minus)
    });
    let separate = apply(&x, DType::F32, |kb, x| {
        let minus = kb.float(f64::from(-1.0 - 2.0 * f32::EPSILON));
        let square = kb.mul(x, x);
        kb.add(square, minus)
    });
    assert_eq!((fused.to_f32()[0], separate.to_f32()[0]), (f32::EPSILON * f32::EPSILON, 0.0));
    let h = KernelBuffer::from_floats(DType::F16, &[2048.0]);
    let sum = apply(&h, DType::F16, |kb, x| {
        let one = kb.constant(1.0, ExprType::scalar(DType::F16));
        let y = kb.add(x, one);
        kb.add(y, one)
    });
    assert_eq!(sum.to_f32(), [2048.0], "2048 + 1 rounds to even in f16, twice");
}

#[test]
fn min_and_max_ignore_nan_and_comparisons_with_nan_are_false() {
    let x = KernelBuffer::from_f32(&[f32::NAN, 2.0]);
    let m = apply(&x, DType::F32, |kb, x| {
        let one = kb.constant(1.0, ExprType::F32);
        kb.max(x, one)
    });
    assert_eq!(m.to_f32(), [1.0, 2.0]);
    let less = apply(&x, DType::Bool, |kb, x| kb.binary(BinOp::Le, x, x));
    assert_eq!(less.to_i64(), [0, 1]);
}

#[test]
fn transcendentals_are_right_to_half_an_ulp() {
    let values = [-80.0f32, -2.5, -0.1, 0.0, 0.7, 3.0, 60.0];
    let x = KernelBuffer::from_f32(&values);
    let check = |op: UnOp, f: fn(f64) -> f64| {
        let got = apply(&x, DType::F32, |kb, x| kb.unary(op, x)).to_f32();
        for (g, v) in got.iter().zip(values) {
            let want = f(f64::from(v)) as f32;
            let ulp = f64::from(want.abs()) * f64::from(f32::EPSILON);
            assert!(
                (*g == want)
                    || (g.is_nan() && want.is_nan())
                    || (f64::from(*g) - f64::from(want)).abs() <= ulp,
                "{}({v}) = {g}, want {want}",
                op.name()
            );
        }
    };
    check(UnOp::Exp, f64::exp);
    check(UnOp::Log, f64::ln);
    check(UnOp::Tanh, f64::tanh);
    check(UnOp::Sigmoid, |v| 1.0 / (1.0 + (-v).exp()));
    check(UnOp::Sin, f64::sin);
    check(UnOp::Cos, f64::cos);
    check(UnOp::Rsqrt, |v| 1.0 / v.sqrt());
    check(UnOp::Recip, |v| 1.0 / v);
    let erf = apply(&x, DType::F32, |kb, x| kb.unary(UnOp::Erf, x)).to_f32();
    assert!((erf[4] - 0.677_801_2).abs() < 1e-6 && erf[0] == -1.0 && erf[3] == 0.0, "{erf:?}");
}

#[test]
fn lanes_are_moved_by_shuffle_bitcast_ramp_and_splat() {
    let x = KernelBuffer::from_i32(&[10, 11, 12, 13]);
    let pairs = apply(&x, DType::I32, |kb, x| {
        let offset = kb.int_of(100, DType::I32);
        let step = kb.int_of(-1, DType::I32);
        let ramp = kb.ramp(offset, step, 4);
        kb.shuffle(x, Some(ramp), vec![3, 4, 7, 0])
    });
    assert_eq!(pairs.to_i64(), [13, 100, 97, 10]);
    let bytes = apply(&KernelBuffer::from_u8(&[1, 2, 3, 4, 5, 6, 7, 8]), DType::U8, |kb, x| {
        let words = kb.bitcast(x, ExprType::vector(DType::U32, 2));
        let swapped = kb.shuffle(words, None, vec![1, 0]);
        kb.bitcast(swapped, ExprType::vector(DType::U8, 8))
    });
    assert_eq!(bytes.to_i64(), [5, 6, 7, 8, 1, 2, 3, 4]);
}

#[test]
fn masked_lanes_neither_read_nor_write() {
    let mut kb = KernelBuilder::new("masked");
    let n = kb.sym(SizeSymbol::N);
    let x = kb.param("x", DType::F32, SizeSymbol::N, ParamAccess::In, 64);
    let y = kb.param("y", DType::F32, SizeSymbol::N, ParamAccess::InOut, 64);
    let (zero, one) = (kb.int(0), kb.int(1));
    let index = kb.ramp(zero, one, 8);
    let mask = kb.lt(index, n);
    let value = kb.load_masked(x, index, Some(mask));
    let twice = kb.add(value, value);
    kb.store_masked(y, index, twice, Some(mask));
    let kernel = kb.finish();
    let mut buffers = [KernelBuffer::from_f32(&[1.0, 2.0, 3.0]), KernelBuffer::from_f32(&[0.0; 3])];
    run(&kernel, &mut buffers, &SymValues::for_tokens(3)).unwrap();
    assert_eq!(buffers[1].to_f32(), [2.0, 4.0, 6.0]);
}

#[test]
fn instructions_run_their_meaning() {
    let dot = InstrId::by_name("sdot_128").unwrap();
    let mut kb = KernelBuilder::new("dot");
    let a = kb.param("a", DType::I8, 16, ParamAccess::In, 64);
    let y = kb.param("y", DType::I32, 4, ParamAccess::Out, 64);
    let zero = kb.int(0);
    let v = kb.load_vec(a, zero, 16);
    let acc = kb.constant(1000.0, ExprType::vector(DType::I32, 4));
    let sum = kb.instr(dot, vec![acc, v, v]);
    kb.store_vec(y, zero, sum);
    let values: Vec<i8> = (0..16).map(|i| i - 8).collect();
    let mut buffers = [KernelBuffer::from_i8(&values), KernelBuffer::zeros(DType::I32, 4)];
    run(&kb.finish(), &mut buffers, &ONE).unwrap();
    let want: Vec<i64> =
        values.chunks(4).map(|c| 1000 + c.iter().map(|v| i64::from(*v).pow(2)).sum::<i64>()).collect();
    assert_eq!(buffers[1].to_i64(), want);
}

/// Asks for line `at` of results that are not written yet.
fn asks_for_results(at: i64) -> Kernel {
    let mut kb = KernelBuilder::new("ask");
    let y = kb.param("y", DType::F32, 4, ParamAccess::Out, 64);
    let (zero, at, one) = (kb.int(0), kb.int(at), kb.float(1.0));
    let line = kb.load(y, at);
    let instr = InstrId::by_name("prefetch_f32").unwrap();
    kb.push(Stmt::Instr { instr, args: vec![line] });
    kb.store(y, zero, one);
    kb.finish()
}

#[test]
fn a_hint_reads_nothing_but_names_a_place_in_its_buffer() {
    let mut y = [KernelBuffer::zeros(DType::F32, 4)];
    run(&asks_for_results(3), &mut y, &ONE).expect("no element is read");
    assert_eq!(y[0].to_f32()[0], 1.0);
    let beyond = run(&asks_for_results(4), &mut y, &ONE).expect_err("after the end").fault;
    assert!(matches!(beyond, KernelFault::OutOfBounds { index: 4, len: 4, .. }), "{beyond}");
}

#[test]
fn buffers_lie_where_their_kernel_relies_on_them_to_lie() {
    let copy = |align: u32, gpu: bool| {
        let mut kb = KernelBuilder::new("copy");
        let x = kb.param("x", DType::I32, 8, ParamAccess::In, align);
        let y = kb.param("y", DType::I32, 8, ParamAccess::Out, 64);
        let extent = kb.int(2);
        kb.for_("i", extent, if gpu { ForKind::Block(0) } else { ForKind::Serial }, |kb, i| {
            let at = kb.mul_int(i, 4);
            let v = kb.load_vec(x, at, 4);
            kb.store_vec(y, at, v);
        });
        kb.finish()
    };
    for gpu in [false, true] {
        let from = |align, address| {
            let input = KernelBuffer::from_i32(&[1, 2, 3, 4, 5, 6, 7, 8]).at_address(address);
            let mut buffers = [input, KernelBuffer::zeros(DType::I32, 8)];
            run(&copy(align, gpu), &mut buffers, &ONE).map_err(|e| e.to_string())
        };
        assert_eq!(from(64, 128), Ok(()));
        assert_eq!(from(16, 48), Ok(()));
        let text = from(64, 48).unwrap_err();
        let expected = "kernel copy: buffer x begins at byte 48: the kernel relies on a multiple of 64";
        assert_eq!(text, expected);
        // Elements are aligned whatever a kernel declares.
        assert_eq!(from(1, 20), Ok(()));
        assert!(from(1, 18).unwrap_err().contains("begins at byte 18: the kernel relies on a multiple of 4"));
    }
}

#[test]
fn bad_kernels_are_refused_with_the_place() {
    let out = fails(|kb, x| {
        let (four, one) = (kb.int(4), kb.int(1));
        kb.serial("i", four, |kb, i| {
            let next = kb.add(i, one);
            let v = kb.load(x, next);
            kb.store(x, i, v);
        });
    });
    assert!(matches!(out, KernelFault::OutOfBounds { index: 4, len: 4, .. }), "{out}");
    let poison = fails(|kb, x| {
        let acc = kb.alloc("acc", DType::I32, 2, MemorySpace::Local);
        let (zero, one) = (kb.int(0), kb.int(1));
        let v = kb.load(x, zero);
        kb.store(acc, zero, v);
        let v = kb.load(acc, one);
        kb.store(x, zero, v);
    });
    assert!(matches!(poison, KernelFault::Poison { index: 1, .. }), "{poison}");
    let again = fails(|kb, x| {
        let (zero, two) = (kb.int(0), kb.int(2));
        kb.serial("i", two, |kb, i| {
            let acc = kb.alloc("acc", DType::I32, 1, MemorySpace::Stack);
            let first = kb.binary(BinOp::Eq, i, zero);
            kb.if_(first, |kb| {
                let v = kb.load(x, zero);
                kb.store(acc, zero, v);
            });
            let v = kb.load(acc, zero);
            kb.store(x, zero, v);
        });
    });
    assert!(matches!(again, KernelFault::Poison { .. }), "each Alloc poisons: {again}");
    let division = fails(|kb, x| {
        let zero = kb.int(0);
        let v = kb.load(x, zero);
        let nothing = kb.sub(v, v);
        let bad = kb.div(v, nothing);
        kb.store(x, zero, bad);
    });
    assert!(matches!(division, KernelFault::Undefined { op: "div", .. }), "{division}");
    let shift = fails(|kb, x| {
        let zero = kb.int(0);
        let v = kb.load(x, zero);
        let amount = kb.int_of(32, DType::I32);
        let bad = kb.binary(BinOp::Shl, v, amount);
        kb.store(x, zero, bad);
    });
    assert!(matches!(shift, KernelFault::Undefined { op: "shl", .. }), "{shift}");
    let scope = fails(|kb, x| {
        let (zero, two) = (kb.int(0), kb.int(2));
        let mut leaked = zero;
        kb.serial("i", two, |_, i| leaked = i);
        let v = kb.load(x, leaked);
        kb.store(x, zero, v);
    });
    assert!(matches!(&scope, KernelFault::Malformed(what) if what.contains("scope")), "{scope}");
}

#[test]
fn errors_name_the_loops_around_them() {
    let mut kb = KernelBuilder::new("deep");
    let x = kb.param("x", DType::I32, 8, ParamAccess::In, 64);
    let y = kb.param("y", DType::I32, 1, ParamAccess::Out, 64);
    let (three, zero) = (kb.int(3), kb.int(0));
    kb.serial("row", three, |kb, i| {
        kb.serial("col", three, |kb, j| {
            let row = kb.mul_int(i, 4);
            let at = kb.add(row, j);
            let v = kb.load(x, at);
            kb.store(y, zero, v);
        });
    });
    let mut buffers = [KernelBuffer::zeros(DType::I32, 8), KernelBuffer::zeros(DType::I32, 1)];
    let error = run(&kb.finish(), &mut buffers, &ONE).unwrap_err();
    assert_eq!(
        error.to_string(),
        "kernel deep: read of x[8] is out of bounds: the buffer has 8 elements (at row=2, col=0)"
    );
    assert_eq!(buffers[0].len(), 8, "buffers come back after an error");
}

#[test]
fn arguments_are_checked() {
    let mut kb = KernelBuilder::new("args");
    kb.param("x", DType::F32, SizeSymbol::N, ParamAccess::In, 64);
    let kernel = kb.finish();
    let message = |buffers: &mut [KernelBuffer]| {
        run(&kernel, buffers, &SymValues::for_tokens(4)).expect_err("must fail").to_string()
    };
    assert_eq!(
        message(&mut [KernelBuffer::from_f32(&[0.0; 3])]),
        "kernel args: argument x: expected 4 elements of f32, found 3 of f32"
    );
    assert!(message(&mut [KernelBuffer::from_i32(&[0; 4])]).contains("found 4 of i32"));
    assert!(message(&mut []).contains("expected 1 buffers, found 0"));
}

//! The expansions of transcendental functions against f64, over sweeps of the floats.

use mlcc_interp::kernel::{KernelBuffer, run};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::{Expr, Kernel, UnOp};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::math::{QuotientMethod, exp_below_zero, exp2_below_zero, expand_math};
use mlcc_kernel_lang::{Recorder, Val};

const LANES: usize = 16;

/// `len` values of y, each `function` of one of x.
fn elementwise(
    dtype: DType,
    len: usize,
    lanes: usize,
    function: impl for<'k> FnOnce(Val<'k>) -> Val<'k>,
) -> Kernel {
    let k = Recorder::new("elementwise");
    let (x, y) = (k.input("x", dtype, [len]), k.output("y", dtype, [len]));
    k.par("i", (len / lanes) as i64, |i| {
        let at = [i * lanes as i64];
        y.set(at, function(x.load(at, lanes as u32)));
    });
    k.finish()
}

fn kernel(op: UnOp, dtype: DType, len: usize, lanes: usize) -> Kernel {
    elementwise(dtype, len, lanes, |x| x.unary(op))
}

const QUOTIENTS: [QuotientMethod; 2] = [QuotientMethod::Polynomial, QuotientMethod::Division];

fn apply(op: UnOp, dtype: DType, lanes: usize, values: &[f32]) -> Vec<f32> {
    apply_with(QuotientMethod::Polynomial, op, dtype, lanes, values)
}

fn apply_with(quotient: QuotientMethod, op: UnOp, dtype: DType, lanes: usize, values: &[f32]) -> Vec<f32> {
    let mut padded = values.to_vec();
    padded.resize(values.len().next_multiple_of(lanes), 1.0);
    let kernel = expand_math(&kernel(op, dtype, padded.len(), lanes), quotient);
    for id in kernel.exprs.ids() {
        if let Expr::Unary(op, _) = kernel.exprs.expr(id) {
            assert!(op.is_primitive(), "{} left after expansion", op.name());
        }
    }
    let mut buffers = [KernelBuffer::from_floats(dtype, &padded), KernelBuffer::zeros(dtype, padded.len())];
    run(&kernel, &mut buffers, &SymValues::for_tokens(1)).unwrap();
    buffers[1].to_f32()[..values.len()].to_vec()
}

/// erf to about 1e-15: its power series, or the continued fraction of erfc in the tail.
fn erf(x: f64) -> f64 {
    let a = x.abs();
    let value = if a.is_nan() {
        a
    } else if a < 3.0 {
        let (mut term, mut sum) = (a, a);
        for n in 1..200 {
            term *= -a * a / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    } else {
        let mut tail = 0.0;
        for n in (1..100).rev() {
            tail = f64::from(n) / 2.0 / (a + tail);
        }
        1.0 - (-a * a).exp() / (a + tail) / std::f64::consts::PI.sqrt()
    };
    value.copysign(x)
}

fn reference(op: UnOp, x: f64) -> f64 {
    match op {
        UnOp::Exp => x.exp(),
        UnOp::Log => x.ln(),
        UnOp::Tanh => x.tanh(),
        UnOp::Sigmoid => {
            // In f64 exp(-x) / (1 + exp(-x)) would lose the left tail.
            if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) }
        }
        UnOp::Erf => erf(x),
        UnOp::Rsqrt => 1.0 / x.sqrt(),
        UnOp::Recip => 1.0 / x,
        UnOp::Sin => x.sin(),
        UnOp::Cos => x.cos(),
        UnOp::Neg | UnOp::Abs | UnOp::Not | UnOp::Sqrt | UnOp::Floor | UnOp::Round => {
            unreachable!("primitive")
        }
    }
}

/// Distance in units of the last place of the correctly rounded result.
fn ulps(got: f32, want: f64) -> f64 {
    let rounded = want as f32;
    if got == rounded || got.is_nan() && rounded.is_nan() {
        return 0.0;
    }
    if !got.is_finite() || !rounded.is_finite() {
        // Infinity one step early or late.
        let (g, w) = (got.clamp(-f32::MAX, f32::MAX), rounded.clamp(-f32::MAX, f32::MAX));
        return if g == w { 1.0 } else { f64::INFINITY };
    }
    let exponent = ((rounded.abs().to_bits() >> 23) as i32).max(1) - 150;
    (f64::from(got) - want).abs() / 2.0_f64.powi(exponent)
}

/// Floats of every exponent and sign, specials, and a dense walk through [-20, 20].
fn sweep() -> Vec<f32> {
    let specials =
        [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45];
    let coarse = (0..u32::MAX / 29_989).map(|i| f32::from_bits(i * 29_989));
    let dense = (-100_000..100_000).map(|i| i as f32 * 2.000_3e-4);
    let wide = (-20_000..20_000).map(|i| i as f32 * 5.303e-3);
    specials.into_iter().chain(coarse).chain(dense).chain(wide).collect()
}

#[test]
fn errors_stay_within_the_stated_bounds() {
    let all = sweep();
    let bounds = [
        (UnOp::Exp, 1.5),
        (UnOp::Log, 2.0),
        (UnOp::Tanh, 2.5),
        (UnOp::Sigmoid, 3.0),
        (UnOp::Erf, 2.0),
        (UnOp::Rsqrt, 1.5),
        (UnOp::Recip, 0.501),
    ];
    for ((op, bound), quotient) in bounds.into_iter().flat_map(|b| QUOTIENTS.map(|q| (b, q))) {
        let got = apply_with(quotient, op, DType::F32, LANES, &all);
        let errors = all.iter().zip(&got).map(|(&x, &y)| (ulps(y, reference(op, x.into())), x, y));
        let (worst, x, y) = errors.fold((0.0, 0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a });
        println!("{}, {quotient:?}: {worst:.3} ulp at {x:e}", op.name());
        let want = reference(op, x.into());
        assert!(worst <= bound, "{}({x:e}) = {y:e}, want {want:e}: {worst} ulp", op.name());
    }
}

#[test]
fn exp_of_what_is_at_most_zero() {
    powers_below_zero("exp", exp_below_zero, f64::exp, -69.0);
    powers_below_zero("exp2", exp2_below_zero, f64::exp2, -100.0);
}

/// `function` against `reference` for numbers that are at most zero; 0 below `low`.
fn powers_below_zero(
    name: &str,
    function: for<'k> fn(Val<'k>) -> Val<'k>,
    reference: fn(f64) -> f64,
    low: f32,
) {
    let values: Vec<f32> = sweep().into_iter().filter(|x| *x <= 0.0 || x.is_nan()).collect();
    let len = values.len().next_multiple_of(LANES);
    let mut padded = values.clone();
    padded.resize(len, 0.0);
    let kernel = elementwise(DType::F32, len, LANES, function);
    let mut buffers = [KernelBuffer::from_floats(DType::F32, &padded), KernelBuffer::zeros(DType::F32, len)];
    run(&kernel, &mut buffers, &SymValues::for_tokens(1)).unwrap();
    for (&x, y) in values.iter().zip(buffers[1].to_f32()) {
        if x < low {
            assert_eq!(y, 0.0, "{name}({x:e})");
        } else {
            assert!(ulps(y, reference(x.into())) <= 1.5, "{name}({x:e}) = {y:e}");
        }
    }
}

/// `exp(factor * sigmoid(x))` of some x.
fn exp_of_sigmoid(factor: f64, len: usize) -> Kernel {
    let kernel = elementwise(DType::F32, len, LANES, |x| (x.unary(UnOp::Sigmoid) * factor).exp());
    expand_math(&kernel, QuotientMethod::Polynomial)
}

/// An exponential that is known to stay a normal number needs no limits.
#[test]
fn exp_of_what_has_a_range() {
    let choices = |kernel: &Kernel| {
        let all = kernel.exprs.ids().map(|id| kernel.exprs.expr(id));
        all.filter(|expr| matches!(expr, Expr::Select(..))).count()
    };
    let mut values = sweep();
    values.resize(values.len().next_multiple_of(LANES), f32::NAN);
    let sigmoids = apply(UnOp::Sigmoid, DType::F32, LANES, &values);
    for (factor, limits) in [(-0.606531, 0), (-87.0, 0), (88.0, 0), (-88.0, 2), (89.0, 2)] {
        let kernel = exp_of_sigmoid(factor, values.len());
        let plain = self::kernel(UnOp::Sigmoid, DType::F32, LANES, LANES);
        let of_sigmoid = choices(&expand_math(&plain, QuotientMethod::Polynomial));
        assert_eq!(choices(&kernel), of_sigmoid + limits, "{factor}");
        let mut buffers = [KernelBuffer::from_f32(&values), KernelBuffer::zeros(DType::F32, values.len())];
        run(&kernel, &mut buffers, &SymValues::for_tokens(1)).unwrap();
        for (s, y) in sigmoids.iter().zip(buffers[1].to_f32()) {
            let x = s * factor as f32;
            assert!(ulps(y, f64::from(x).exp()) <= 1.5, "exp({x:e}) = {y:e}");
        }
    }
}

#[test]
fn sine_and_cosine() {
    let near: Vec<f32> = (-60_000..60_000).map(|i| i as f32 * 1.3e-4).collect();
    let far: Vec<f32> = (-60_000..60_000).map(|i| i as f32 * 1.666_6).collect();
    for op in [UnOp::Sin, UnOp::Cos] {
        for values in [&near, &far] {
            let got = apply(op, DType::F32, LANES, values);
            let errors =
                values.iter().zip(&got).map(|(&x, &y)| ((f64::from(y) - reference(op, x.into())).abs(), x));
            let (worst, x) = errors.fold((0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a });
            println!("{}: {worst:.3e} at {x}", op.name());
            assert!(worst <= 1.2e-7, "{}({x}) is off by {worst:e}", op.name());
        }
        let limits = apply(op, DType::F32, 1, &[0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
        assert_eq!(limits[0], reference(op, 0.0) as f32);
        assert!(limits[1..].iter().all(|y| y.is_nan()), "{limits:?}");
    }
    let tiny: Vec<f32> = (1..1000).map(|i| i as f32 * 1e-6).collect();
    for (x, y) in tiny.iter().zip(apply(UnOp::Sin, DType::F32, 1, &tiny)) {
        assert!(ulps(y, f64::from(*x).sin()) <= 1.0, "sin({x}) = {y}");
    }
}

#[test]
fn limits() {
    let inf = f32::INFINITY;
    let cases: [(UnOp, &[(f32, f32)]); 6] = [
        (UnOp::Exp, &[(0.0, 1.0), (-inf, 0.0), (inf, inf), (-1e30, 0.0), (89.0, inf), (1e30, inf)]),
        (UnOp::Log, &[(1.0, 0.0), (0.0, -inf), (-0.0, -inf), (inf, inf)]),
        (UnOp::Tanh, &[(0.0, 0.0), (inf, 1.0), (-inf, -1.0), (20.0, 1.0), (-20.0, -1.0)]),
        (UnOp::Sigmoid, &[(0.0, 0.5), (inf, 1.0), (-inf, 0.0), (-1e30, 0.0), (100.0, 1.0)]),
        (UnOp::Erf, &[(0.0, 0.0), (inf, 1.0), (-inf, -1.0), (5.0, 1.0)]),
        (UnOp::Recip, &[(inf, 0.0), (0.0, inf), (-0.0, -inf)]),
    ];
    for (op, pairs) in cases {
        let inputs: Vec<f32> = pairs.iter().map(|p| p.0).collect();
        let want: Vec<f32> = pairs.iter().map(|p| p.1).collect();
        for quotient in QUOTIENTS {
            assert_eq!(apply_with(quotient, op, DType::F32, 1, &inputs), want, "{} {quotient:?}", op.name());
        }
    }
    for op in UnOp::ALL.into_iter().filter(|op| !op.is_primitive()) {
        for quotient in QUOTIENTS {
            assert!(apply_with(quotient, op, DType::F32, 1, &[f32::NAN])[0].is_nan(), "{}", op.name());
        }
    }
    let negative = apply(UnOp::Log, DType::F32, 1, &[-1.0, -inf, -1e-40]);
    assert!(negative.iter().all(|y| y.is_nan()), "{negative:?}");
    assert!(apply(UnOp::Rsqrt, DType::F32, 1, &[-1.0])[0].is_nan());
}

/// Half types are computed in f32 and rounded once.
#[test]
fn half_types() {
    let values: Vec<f32> = (-200..200).map(|i| i as f32 / 32.0).collect();
    for op in [UnOp::Exp, UnOp::Tanh, UnOp::Sigmoid] {
        for (dtype, ulp) in [(DType::F16, 2.0_f32.powi(-11)), (DType::BF16, 2.0_f32.powi(-8))] {
            for (x, y) in values.iter().zip(apply(op, dtype, 4, &values)) {
                let want = reference(op, (*x).into()) as f32;
                assert!(
                    (y - want).abs() <= ulp * want.abs() * 1.01 + 1e-7,
                    "{dtype} {}({x}) = {y}",
                    op.name()
                );
            }
        }
    }
}

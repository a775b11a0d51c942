//! The kernel of `quantize_rows` on every CPU level: codes, scales and starts in the order that products
//! read, with blocks of rows, rows left over, short groups, groups of zeros, tiny groups, and values that are
//! no numbers.

use mlcc_interp::kernel::{ExecutionOptions, ExecutionOrder, KernelBuffer, run_with};
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::kernel::{Kernel, UnOp};
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernels::lower::group::lower_group;
use mlcc_kernels::matmul::code_block;
use mlcc_kernels::params::KernelTarget;
use mlcc_kernels::quantize::CodeBlock;
use mlcc_target::Arch;

const ZERO: usize = 7;

/// The result of a kernel for `x: [m, k]`, brought back to rows.
struct RestoredRows {
    codes: Vec<Vec<i32>>,
    scales: Vec<Vec<f32>>,
    starts: Vec<i32>,
}

fn quantize(target: &KernelTarget, x: &[f32], shape: (usize, usize), codes: (usize, usize)) -> RestoredRows {
    run_codes(target, &kernel(target, shape, codes, None), x, shape, codes)
}

/// The kernel that quantizes `activation(x)` of `x: [m, k]`.
fn kernel(
    target: &KernelTarget,
    (m, k): (usize, usize),
    (group, bits): (usize, usize),
    activation: Option<UnOp>,
) -> Kernel {
    let module = Module::new("m");
    let mut f = Function::new("codes", FunctionKind::Group);
    let rows = if m == 1 { Dim::from(1) } else { Dim::sym(SizeSymbol::N) };
    let mut x = f.add_input(TensorType::new(DType::F32, [rows, Dim::from(k)]));
    if let Some(op) = activation {
        x = f.append(&module, Op::Unary(op), &[x]).unwrap()[0];
    }
    let op = Op::QuantizeRows { group, bits, part: 32, zero: ZERO };
    f.outputs = f.append(&module, op, &[x]).unwrap();
    lower_group(&module, &f, "codes", &[None], target).unwrap().kernel
}

fn run_codes(
    target: &KernelTarget,
    kernel: &Kernel,
    x: &[f32],
    (m, k): (usize, usize),
    (group, bits): (usize, usize),
) -> RestoredRows {
    let (padded, planes) = (k.next_multiple_of(32), bits / 8);
    let code_type = if bits == 8 { DType::I8 } else { DType::I16 };
    let mut buffers = [
        KernelBuffer::from_f32(x),
        KernelBuffer::zeros(code_type, m * padded),
        KernelBuffer::zeros(DType::F32, m * k.div_ceil(group)),
        KernelBuffer::zeros(DType::I32, m * k.div_ceil(32)),
    ];
    let options = ExecutionOptions { workers: 2, order: ExecutionOrder::Reverse };
    run_with(kernel, &mut buffers, &SymValues::for_tokens(m as i64), &options).unwrap();

    let together = if m == 1 { CodeBlock::SINGLE } else { code_block(target) };
    let (block, run) = (together.rows as usize, together.columns as usize);
    let bytes: Vec<i8> = buffers[1].bytes.iter().map(|&b| b as i8).collect();
    let mut codes = vec![vec![0; padded]; m];
    for (row, codes) in codes.iter_mut().enumerate() {
        let whole = row / block * block + block <= m;
        let (first, rows) = if whole { (row / block * block, block) } else { (row, 1) };
        let run = if whole { run } else { 32 };
        for (c, code) in codes.iter_mut().enumerate() {
            for plane in 0..planes {
                let plane = (c / 32 * planes + plane) * 32;
                let before = plane + c % 32 / run * run;
                let at = first * padded * planes + before * rows + (row - first) * run + c % run;
                *code = *code * 256 + i32::from(bytes[at]);
            }
        }
    }
    // The first place holds the last scale, the others ratios.
    let ratios = buffers[2].to_f32();
    let scales = ratios.chunks(k.div_ceil(group)).map(|row| {
        let mut scale = row[0];
        let mut scales = vec![scale];
        for ratio in row[1..].iter().rev() {
            scale *= ratio;
            scales.push(scale);
        }
        scales.reverse();
        scales
    });
    let scales = scales.collect();
    let starts = buffers[3].bytes.chunks(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
    RestoredRows { codes, scales, starts }
}

fn targets() -> Vec<KernelTarget> {
    let mut targets: Vec<KernelTarget> = Vec::new();
    for spec in mlcc_target::specs().unwrap().iter().filter(|s| s.arch != Arch::Nvptx) {
        for level in &spec.levels {
            let target = KernelTarget::new(spec.arch, level);
            let kind = |t: &KernelTarget| (t.arch, t.f32_lanes(), code_block(t));
            if targets.iter().all(|t| kind(t) != kind(&target)) {
                targets.push(target);
            }
        }
    }
    targets
}

fn noise(count: usize) -> Vec<f32> {
    let mut seed = 5_u32;
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Quotients of `n + 0.5` take the upper code however the values before them were rounded.
#[test]
fn halves_are_far_from_the_borders() {
    let halves = (0..64).map(|i| if i == 0 { 127.0 } else { (i - 32) as f32 + 0.5 });
    let halves: Vec<f32> = halves.collect();
    let want: Vec<i32> = halves.iter().map(|v| (v + 0.5).floor() as i32).collect();
    for target in targets() {
        for rounding in [-3, -1, 0, 1, 3] {
            let factor = 0.037 * (1.0 + rounding as f32 * f32::EPSILON);
            let mut x: Vec<f32> = halves.iter().map(|v| v * 0.037).collect();
            x[1..].iter_mut().zip(&halves[1..]).for_each(|(x, v)| *x = v * factor);
            assert_eq!(quantize(&target, &x, (1, 64), (64, 8)).codes[0], want, "{rounding}");
        }
    }
}

/// Every value is met within half a step (and a rounding) of the scale of its group.
#[test]
fn codes_stand_for_the_values() {
    for target in targets() {
        for (m, k, group, bits) in [(1, 100, 64, 8), (6, 75, 32, 8), (9, 160, 128, 8), (5, 100, 64, 16)] {
            let mut x = noise(m * k);
            // A group of zeros between others, and one far smaller than the one before it.
            x[..k.min(32)].fill(0.0);
            x[(m - 1) * k..(m - 1) * k + 32].iter_mut().for_each(|v| *v *= 1e6);
            let made = quantize(&target, &x, (m, k), (group, bits));
            for row in 0..m {
                for c in 0..k.next_multiple_of(32) {
                    let (code, scale) = (made.codes[row][c], made.scales[row][c / group]);
                    let want = if c < k { x[row * k + c] } else { 0.0 };
                    let off = (f64::from(code) * f64::from(scale) - f64::from(want)).abs();
                    assert!(
                        off <= f64::from(scale) * 0.501 + 1e-12,
                        "{m} x {k}, {bits} bits, row {row}, column {c}"
                    );
                }
                for (p, codes) in made.codes[row].chunks(32).enumerate() {
                    let sum: i32 = codes.iter().sum();
                    assert_eq!(made.starts[row * k.div_ceil(32) + p], -(ZERO as i32) * sum);
                }
            }
        }
    }
}

/// NaN and infinities must not turn into numbers, and touch no other row.
/// Values that take many steps are computed several vectors at a time, where whole groups allow it.
#[test]
fn activations_are_computed_side_by_side() {
    for target in targets() {
        let widest = |kernel: &Kernel| {
            let all = kernel.exprs.ids().map(|id| kernel.exprs.ty(id));
            all.filter(|ty| ty.dtype == DType::F32).map(|ty| ty.lanes).max().unwrap()
        };
        let (codes, lanes) = ((128, 8), target.f32_lanes());
        let wide = if lanes == 16 { 64 } else { lanes };
        let activation = Some(UnOp::Sigmoid);
        assert_eq!(widest(&kernel(&target, (5, 384), codes, None)), lanes, "{target:?}");
        assert_eq!(widest(&kernel(&target, (5, 384), codes, activation)), wide, "{target:?}");
        for shape in [(5, 384), (5, 344), (1, 256)] {
            let x: Vec<f32> = noise(shape.0 * shape.1).into_iter().map(|x| x * 8.0).collect();
            let kernel = kernel(&target, shape, codes, activation);
            let made = run_codes(&target, &kernel, &x, shape, codes);
            for (row, x) in x.chunks(shape.1).enumerate() {
                for (c, x) in x.iter().enumerate() {
                    let (code, scale) = (made.codes[row][c], made.scales[row][c / codes.0]);
                    let want = 1.0 / (1.0 + f64::from(-x).exp());
                    let error = f64::from(code as f32 * scale) - want;
                    assert!(error.abs() <= f64::from(scale) * 0.501, "row {row}, column {c}: {error}");
                }
            }
        }
    }
}

#[test]
fn what_is_no_number_stays_none() {
    let (m, k) = (3, 64);
    for target in targets() {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = noise(m * k);
            x[k + 40] = bad;
            let made = quantize(&target, &x, (m, k), (32, 8));
            let numbers: Vec<bool> = made.scales.iter().map(|s| s.iter().any(|s| !s.is_nan())).collect();
            assert_eq!(numbers, [true, false, true]);
        }
    }
}

/// Codes by themselves, which ranks send to each other, are those that products get: also next to the borders
/// between codes, where another rounding gives others.
#[test]
fn codes_alone_are_those_of_products() {
    let (m, k, group) = (6, 256, 128);
    let step = |x: f32, by: i32| f32::from_bits(x.to_bits().wrapping_add_signed(by));
    let (mut x, mut scales) = (Vec::new(), Vec::new());
    for number in 0..m * k / group {
        let largest = 127.0 * (0.037 + 0.0013 * number as f32);
        let scale = largest * (1.0 / 127.0);
        let border = |i: usize| (i as f32 - 63.5 - 1.0 / 3000.0) * scale;
        x.extend((0..group).map(|i| if i == 77 { largest } else { step(border(i), i as i32 % 7 - 3) }));
        scales.push(scale);
    }
    let divided =
        x.iter().enumerate().map(|(i, x)| (x / scales[i / group] + 1.0 / 3000.0).round_ties_even() as i32);
    let divided: Vec<i32> = divided.collect();
    for target in targets() {
        let wanted = quantize(&target, &x, (m, k), (group, 8)).codes.concat();
        assert!(wanted != divided, "{target:?}: there is nothing to tell apart");
        let mut buffers = [
            KernelBuffer::from_f32(&x),
            KernelBuffer::from_f32(&scales),
            KernelBuffer::zeros(DType::I8, m * k),
        ];
        let options = ExecutionOptions { workers: 2, order: ExecutionOrder::Reverse };
        run_with(&codes_alone(&target, k, group), &mut buffers, &SymValues::for_tokens(m as i64), &options)
            .unwrap();
        let found: Vec<i32> = buffers[2].bytes.iter().map(|&b| i32::from(b as i8)).collect();
        assert!(found == wanted, "{target:?}");
    }
}

/// The kernel that makes codes of `x: [n, k]` and scales.
fn codes_alone(target: &KernelTarget, k: usize, group: usize) -> Kernel {
    let module = Module::new("m");
    let mut f = Function::new("codes", FunctionKind::Group);
    let inputs = [k, k / group].map(|columns| {
        f.add_input(TensorType::new(DType::F32, [Dim::sym(SizeSymbol::N), Dim::from(columns)]))
    });
    f.outputs = f.append(&module, Op::GroupQuantize { group, bits: 8, part: 32 }, &inputs).unwrap();
    lower_group(&module, &f, "codes", &[None, None], target).unwrap().kernel
}

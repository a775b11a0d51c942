//! Long values that are neighbours are interleaved, without a change of the results.

use mlcc_interp::kernel::{KernelBuffer, run};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::{Kernel, Stmt, UnOp};
use mlcc_ir::types::DType;
use mlcc_kernel_lang::math::{QuotientMethod, expand_math};
use mlcc_kernel_lang::{BufferView, Recorder, Val, interleave_steps};

const LANES: usize = 16;

/// `count` vectors of sigmoids, of which every other one also goes through the one before it if `chained`.
fn sigmoids(count: usize, chained: bool) -> Kernel {
    let k = Recorder::new("sigmoids");
    let rows = |buf: BufferView<'_, 1>| k.view(buf.buf(), [count as i64, LANES as i64]);
    let x = rows(k.input("x", DType::F32, [count * LANES]));
    let y = rows(k.output("y", DType::F32, [count * LANES]));
    let mut values: Vec<Val> = Vec::new();
    for i in 0..count {
        let mut value = x.load((i as i64, 0), LANES as u32);
        if let Some(&before) = values.last().filter(|_| chained && i % 2 == 1) {
            value = value + before;
        }
        values.push(value.unary(UnOp::Sigmoid).named("value"));
    }
    for (i, value) in values.into_iter().enumerate() {
        y.set((i as i64, 0), value);
    }
    expand_math(&k.finish(), QuotientMethod::Polynomial)
}

fn results(kernel: &Kernel, count: usize) -> Vec<u8> {
    let x: Vec<f32> = (0..count * LANES).map(|i| (i as f32 - 40.0) * 0.37).collect();
    let mut buffers = [KernelBuffer::from_f32(&x), KernelBuffer::zeros(DType::F32, x.len())];
    run(kernel, &mut buffers, &SymValues::for_tokens(1)).unwrap();
    buffers[1].bytes.clone()
}

/// Names of the variables in order, without the numbers that make them different.
fn names(kernel: &Kernel) -> Vec<&str> {
    let name = |stmt: &Stmt| match stmt {
        Stmt::Let { var, .. } => Some(kernel.vars[*var].name.as_str()),
        _ => None,
    };
    kernel.body.iter().filter_map(name).collect()
}

#[test]
fn neighbours_are_interleaved() {
    let plain = sigmoids(6, false);
    let interleaved = interleave_steps(plain.clone());
    assert_eq!(results(&interleaved, 6), results(&plain, 6));
    let names = names(&interleaved);
    // Four together, then the two that are left.
    let values: Vec<usize> = (0..names.len()).filter(|&i| names[i] == "value").collect();
    let first = values[0];
    assert!(first > 4 * 20, "{names:?}");
    assert_eq!(values[..4], [first, first + 1, first + 2, first + 3]);
    assert!(values[4] > first + 4 + 2 * 20 && values[5] == values[4] + 1, "{names:?}");
}

#[test]
fn what_reads_its_neighbour_waits_for_it() {
    for count in [2, 5] {
        let plain = sigmoids(count, true);
        assert_eq!(results(&interleave_steps(plain.clone()), count), results(&plain, count));
    }
    // Here nothing is interleaved.
    let plain = sigmoids(2, true);
    assert_eq!(names(&interleave_steps(plain.clone())), names(&plain));
}

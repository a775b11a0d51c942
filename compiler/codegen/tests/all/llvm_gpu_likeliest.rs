//! The largest elements of long rows: PTX on the driver in software and the interpreter against a sort, and
//! what NVIDIA's assembler says.
#![cfg(feature = "llvm")]

use crate::software::{assembled, both, ptx};
use mlcc_interp::kernel::KernelBuffer;
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, TensorType};
use mlcc_kernels::lower::group::lower_group;
use mlcc_kernels::lower::kernel::GroupKernel;
use mlcc_kernels::params::KernelTarget;

const COUNT: usize = 64;

/// Output `result` of the choice alone: values, or their numbers.
fn choice(columns: usize, result: usize, level: &str) -> GroupKernel {
    let mut f = Function::new("top", FunctionKind::Group);
    let x = f.add_input(TensorType::new(DType::F32, [Dim::sym(SizeSymbol::N), Dim::from(columns)]));
    let results = f.append(&Module::new("m"), Op::TopK { k: COUNT }, &[x]).unwrap();
    f.outputs = vec![results[result]];
    let target = mlcc_target::resolve_target(level).unwrap();
    let target = KernelTarget::new(target.arch, &target.levels[0]);
    lower_group(&Module::new("m"), &f, "top", &[None], &target).unwrap()
}

/// Logits with equal ones far apart, both zeros, infinities and NaN.
fn rows(count: usize, columns: usize) -> Vec<f32> {
    let odd = [f32::NAN, f32::NEG_INFINITY, -0.0, 0.0, 1e-40, -1e-40, f32::MAX, -f32::NAN];
    let value = |i: usize| match i % 37 {
        0 => odd[i / 37 % odd.len()],
        _ => ((i * 2_654_435_761) % 3001) as f32 / 50.0 - 50.0,
    };
    (0..count * columns).map(value).collect()
}

/// The numbers of the largest, as the sampler sorts.
fn sorted(row: &[f32]) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..row.len() as i32).collect();
    let at = |id: &i32| row[*id as usize] + 0.0;
    ids.sort_by(|a, b| {
        let (x, y) = (at(a), at(b));
        x.is_nan().cmp(&y.is_nan()).then(if x.is_nan() { a.cmp(b) } else { y.total_cmp(&x).then(a.cmp(b)) })
    });
    ids.truncate(COUNT);
    ids
}

#[test]
fn ptx_and_interpreter_find_what_a_sort_finds() {
    for (count, columns) in [(3, 64), (2, 300), (1, 4096), (2, 4097), (1, 20_000)] {
        let x = rows(count, columns);
        let ids: Vec<i32> = x.chunks(columns).flat_map(sorted).collect();
        let values: Vec<f32> =
            ids.iter().enumerate().map(|(i, id)| x[i / COUNT * columns + *id as usize] + 0.0).collect();
        let sizes = SymValues { n: count as i64, b: 1, past: 0 };
        let tiles = columns.div_ceil(4096) as u32;
        for (result, dtype) in [(0, DType::F32), (1, DType::I32)] {
            let GroupKernel { kernel, merge, .. } = choice(columns, result, "sm_80");
            let out = KernelBuffer::zeros(dtype, count * COUNT);
            let input = KernelBuffer::from_f32(&x);
            let [found, executed] = match merge {
                None => both(&kernel, "sm_80", [1, count as u32, 1], &[input, out], &sizes),
                Some(merge) => {
                    let keys = KernelBuffer::zeros(DType::I64, count * COUNT * tiles as usize);
                    let [found, executed] =
                        both(&kernel, "sm_80", [tiles, count as u32, 1], &[input, keys], &sizes);
                    let keys = found.unwrap();
                    assert_eq!(keys, executed.unwrap(), "{columns}");
                    both(&merge.kernel.kernel, "sm_80", [count as u32, 1, 1], &[keys, out], &sizes)
                }
            };
            let found = found.unwrap();
            assert_eq!(found, executed.unwrap(), "{columns}");
            match dtype {
                DType::I32 => assert_eq!(words(&found.bytes, i32::from_le_bytes), ids, "{columns}"),
                _ => {
                    // NaN is another one.
                    let found = words(&found.bytes, f32::from_le_bytes);
                    let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                    assert!(found.iter().zip(&values).all(same), "{columns}: {found:?}");
                }
            }
        }
    }
}

fn words<T>(bytes: &[u8], of: impl Fn([u8; 4]) -> T) -> Vec<T> {
    bytes.as_chunks::<4>().0.iter().map(|&word| of(word)).collect()
}

#[test]
fn what_is_assembled() {
    for (level, sm) in [("sm_75", 75), ("sm_90", 90)] {
        let GroupKernel { kernel, merge, .. } = choice(128_256, 1, level);
        for kernel in [&kernel, &merge.unwrap().kernel.kernel] {
            let text = ptx(kernel, level);
            assert!(!text.contains(".local"), "{text}");
            let Some(usage) = assembled(&text, sm) else { continue };
            eprintln!("{level} {}: {} registers", kernel.name, usage.registers);
            assert_eq!(usage.spill_bytes, 0);
        }
    }
}

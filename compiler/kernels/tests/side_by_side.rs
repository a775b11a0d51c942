//! Long values that are neighbours are computed in turns, without a change of the results.

use mlcc_interp::kernel::{Buffer, run};
use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::dim::{Dim, Sym, SymValues};
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::kernel::{Access, BinOp, Kernel, Stmt, UnOp};
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, Packing, TensorType};
use mlcc_kernels::lower::group::lower_group;
use mlcc_kernels::math::{Quotient, expand_math};
use mlcc_kernels::params::KernelTarget;
use mlcc_kernels::side_by_side::side_by_side;
use mlcc_target::Arch;

const LANES: usize = 16;

/// `count` vectors of sigmoids, of which every other one also goes through the one before it if `chained`.
fn sigmoids(count: usize, chained: bool) -> Kernel {
    let mut kb = KernelBuilder::new("sigmoids");
    let x = kb.param("x", DType::F32, count * LANES, Access::In, 64);
    let y = kb.param("y", DType::F32, count * LANES, Access::Out, 64);
    let mut values = Vec::new();
    for i in 0..count {
        let at = kb.int((i * LANES) as i64);
        let mut value = kb.load_vec(x, at, LANES as u32);
        if let Some(&before) = values.last().filter(|_| chained && i % 2 == 1) {
            value = kb.add(value, before);
        }
        let value = kb.unary(UnOp::Sigmoid, value);
        values.push(kb.let_("value", value));
    }
    for (i, value) in values.into_iter().enumerate() {
        let at = kb.int((i * LANES) as i64);
        kb.store_vec(y, at, value);
    }
    expand_math(&kb.finish(), Quotient::Polynomial)
}

fn results(kernel: &Kernel, count: usize) -> Vec<u8> {
    let x: Vec<f32> = (0..count * LANES).map(|i| (i as f32 - 40.0) * 0.37).collect();
    let mut buffers = [Buffer::from_f32(&x), Buffer::zeros(DType::F32, x.len())];
    run(kernel, &mut buffers, &SymValues::tokens(1)).unwrap();
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
fn neighbours_take_turns() {
    let plain = sigmoids(6, false);
    let turned = side_by_side(plain.clone());
    assert_eq!(results(&turned, 6), results(&plain, 6));
    let names = names(&turned);
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
        assert_eq!(results(&side_by_side(plain.clone()), count), results(&plain, count));
    }
    // Nothing stands beside anything else here.
    let plain = sigmoids(2, true);
    assert_eq!(names(&side_by_side(plain.clone())), names(&plain));
}

/// The kernel of `op(x W^T)`, or of `x W^T + y` without an op.
fn product(op: Option<UnOp>) -> Kernel {
    let spec = mlcc_target::specs().unwrap().into_iter().find(|s| s.arch == Arch::X86_64).unwrap();
    let level = spec.levels.iter().find(|l| l.name == "x86-64-v4").unwrap();
    let target = KernelTarget::new(Arch::X86_64, level);
    let module = Module::new("m");
    let mut f = Function::new("product", FunctionKind::Group);
    let matrix = |rows: Dim, columns: usize| TensorType::new(DType::F32, [rows, Dim::from(columns)]);
    let x = f.add_input(matrix(Dim::sym(Sym::N), 64));
    let w = f.add_input(matrix(Dim::from(96), 64));
    let y = f.add_input(matrix(Dim::sym(Sym::N), 96));
    let sum = f.append(&module, Op::MatMul { transpose_b: true }, &[x, w]).unwrap()[0];
    f.outputs = match op {
        Some(op) => f.append(&module, Op::Unary(op), &[sum]).unwrap(),
        None => f.append(&module, Op::Binary(BinOp::Add), &[sum, y]).unwrap(),
    };
    lower_group(&module, &f, "product", &[None, Some(Packing::Tile16), None], &target).unwrap().kernel
}

#[test]
fn products_compute_long_epilogues_so() {
    let steps = |kernel: &Kernel| kernel.vars.iter().filter(|(_, v)| v.name == "step").count();
    assert!(steps(&product(Some(UnOp::Sigmoid))) > 24 * 20);
    assert_eq!(steps(&product(None)), 0);
    assert_eq!(steps(&product(Some(UnOp::Neg))), 0);
}

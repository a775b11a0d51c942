//! Products whose epilogues take many steps interleave those of several results.

use mlcc_ir::dim::{Dim, SizeSymbol};
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::kernel::{BinOp, Kernel, UnOp};
use mlcc_ir::module::Module;
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, Packing, TensorType};
use mlcc_kernels::lower::group::lower_group;
use mlcc_kernels::params::KernelTarget;
use mlcc_target::Arch;

/// The kernel of `op(x W^T)`, or of `x W^T + y` without an op.
fn product(op: Option<UnOp>) -> Kernel {
    let spec = mlcc_target::specs().unwrap().into_iter().find(|s| s.arch == Arch::X86_64).unwrap();
    let level = spec.levels.iter().find(|l| l.name == "x86-64-v4").unwrap();
    let target = KernelTarget::new(Arch::X86_64, level);
    let module = Module::new("m");
    let mut f = Function::new("product", FunctionKind::Group);
    let matrix = |rows: Dim, columns: usize| TensorType::new(DType::F32, [rows, Dim::from(columns)]);
    let x = f.add_input(matrix(Dim::sym(SizeSymbol::N), 64));
    let w = f.add_input(matrix(Dim::from(96), 64));
    let y = f.add_input(matrix(Dim::sym(SizeSymbol::N), 96));
    let sum = f.append(&module, Op::MatMul { transpose_b: true }, &[x, w]).unwrap()[0];
    f.outputs = match op {
        Some(op) => f.append(&module, Op::Unary(op), &[sum]).unwrap(),
        None => f.append(&module, Op::Binary(BinOp::Add), &[sum, y]).unwrap(),
    };
    lower_group(&module, &f, "product", &[None, Some(Packing::Tile16), None], &target).unwrap().kernel
}

#[test]
fn only_long_epilogues_are_interleaved() {
    let steps = |kernel: &Kernel| kernel.vars.iter().filter(|(_, v)| v.name == "step").count();
    assert!(steps(&product(Some(UnOp::Sigmoid))) > 24 * 20);
    assert_eq!(steps(&product(None)), 0);
    assert_eq!(steps(&product(Some(UnOp::Neg))), 0);
}

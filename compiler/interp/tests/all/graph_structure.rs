//! Parameters, states, calls, scans, and what is refused.

use mlcc_interp::graph::{EvaluationFault, GraphError, Interpreter, StateValues, Tensor};
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::kernel::BinOp;
use mlcc_ir::module::{FuncId, ModelParam, ModelState, Module, ParamRole, ParamSource};
use mlcc_ir::ops::Op;
use mlcc_ir::types::{DType, TensorType};

fn f32s(dims: &[i64]) -> TensorType {
    TensorType::new(DType::F32, dims.iter().copied())
}

/// `s' = s + w * x` with `s` returned as it was: `f(x: f32[2]) -> f32[2]`.
fn accumulator() -> (Module, FuncId) {
    let mut module = Module::new("m");
    let state = module.states.push(ModelState { name: "s".into(), ty: f32s(&[2]), init: 10.0 });
    let param = module.params.push(ModelParam {
        name: "w".into(),
        ty: f32s(&[2]),
        role: ParamRole::Vector,
        source: ParamSource::Tensor("w".into()),
        packing: None,
    });
    let mut f = Function::new("f", FunctionKind::Entry);
    let x = f.add_input(f32s(&[2]));
    let w = f.append(&module, Op::Param(param), &[]).unwrap()[0];
    let old = f.append(&module, Op::StateRead(state), &[]).unwrap()[0];
    let scaled = f.append(&module, Op::Binary(BinOp::Mul), &[w, x]).unwrap()[0];
    let new = f.append(&module, Op::Binary(BinOp::Add), &[old, scaled]).unwrap()[0];
    f.append(&module, Op::StateWrite(state), &[new]).unwrap();
    // Reading after the write still gives the value from before the step.
    let again = f.append(&module, Op::StateRead(state), &[]).unwrap()[0];
    f.outputs = vec![again];
    let id = module.functions.push(f);
    (module, id)
}

#[test]
fn states_are_read_before_and_written_after_the_step() {
    let (module, id) = accumulator();
    let interpreter = Interpreter::new(&module, |_| Tensor::f32(&[2], &[1.0, -1.0]));
    let mut states = StateValues::new(&module).unwrap();
    let x = [Tensor::f32(&[2], &[3.0, 4.0])];
    let first = interpreter.run(id, &x, &mut states, SymValues::for_tokens(1)).unwrap();
    assert_eq!(first[0].data, [10.0, 10.0]);
    let second = interpreter.run(id, &x, &mut states, SymValues::for_tokens(1)).unwrap();
    assert_eq!(second[0].data, [13.0, 6.0]);
    assert_eq!(states.get(mlcc_ir::module::StateId(0)).unwrap().data, [16.0, 2.0]);
}

#[test]
fn a_call_runs_the_function_of_the_module() {
    let mut module = Module::new("m");
    let mut g = Function::new("double", FunctionKind::Group);
    let x = g.add_input(f32s(&[2]));
    g.outputs = g.append(&module, Op::Binary(BinOp::Add), &[x, x]).unwrap();
    let g = module.functions.push(g);
    let mut f = Function::new("f", FunctionKind::Entry);
    let x = f.add_input(f32s(&[2]));
    let y = f.append(&module, Op::Call(g), &[x]).unwrap();
    f.outputs = f.append(&module, Op::Call(g), &y).unwrap();
    module.functions.push(f);
    let interpreter = Interpreter::new(&module, |_| unreachable!());
    let mut states = StateValues::new(&module).unwrap();
    let x = [Tensor::f32(&[2], &[1.0, 2.0])];
    let out = interpreter.run_named("f", &x, &mut states, SymValues::for_tokens(1)).unwrap();
    assert_eq!(out[0].data, [4.0, 8.0]);
}

/// Running sums of `x: f32[n, 2]` times a constant vector: `c' = c + k * x`, giving `c` before.
fn scan_module() -> Module {
    let mut module = Module::new("m");
    let mut body = Function::new("body", FunctionKind::Body);
    let (c, x, k) = (body.add_input(f32s(&[2])), body.add_input(f32s(&[2])), body.add_input(f32s(&[2])));
    let scaled = body.append(&module, Op::Binary(BinOp::Mul), &[x, k]).unwrap()[0];
    let next = body.append(&module, Op::Binary(BinOp::Add), &[c, scaled]).unwrap()[0];
    body.outputs = vec![next, c];
    let body = module.functions.push(body);
    let mut f = Function::new("f", FunctionKind::Entry);
    let c = f.add_input(f32s(&[2]));
    let x = f.add_input(TensorType::new(DType::F32, [Dim::sym(SizeSymbol::N), Dim::from(2)]));
    let k = f.add_input(f32s(&[2]));
    f.outputs = f.append(&module, Op::Scan { body, carries: 1, seqs: 1 }, &[c, x, k]).unwrap();
    module.functions.push(f);
    module
}

#[test]
fn a_scan_carries_along_axis_0() {
    let module = scan_module();
    let interpreter = Interpreter::new(&module, |_| unreachable!());
    let mut states = StateValues::new(&module).unwrap();
    let c = Tensor::f32(&[2], &[100.0, 200.0]);
    let k = Tensor::f32(&[2], &[1.0, 10.0]);
    let x = Tensor::f32(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let inputs = [c.clone(), x, k.clone()];
    let out = interpreter.run_named("f", &inputs, &mut states, SymValues::for_tokens(3)).unwrap();
    assert_eq!(out[0].data, [109.0, 320.0]);
    assert_eq!(out[1].dims, [3, 2]);
    assert_eq!(out[1].data, [100.0, 200.0, 101.0, 220.0, 104.0, 260.0]);

    let empty = [c.clone(), Tensor::f32(&[0, 2], &[]), k];
    let out = interpreter.run_named("f", &empty, &mut states, SymValues::for_tokens(0)).unwrap();
    assert_eq!((out[0].data.as_slice(), out[1].dims.as_slice()), (c.data.as_slice(), [0, 2].as_slice()));
}

#[test]
fn an_index_out_of_range_names_the_op_and_the_axis() {
    let mut module = Module::new("m");
    let mut f = Function::new("f", FunctionKind::Entry);
    let table = f.add_input(f32s(&[4, 2]));
    let ids = f.add_input(TensorType::new(DType::I32, [1]));
    f.outputs = f.append(&module, Op::Gather, &[table, ids]).unwrap();
    module.functions.push(f);
    let interpreter = Interpreter::new(&module, |_| unreachable!());
    let mut states = StateValues::new(&module).unwrap();
    let inputs = [Tensor::full(DType::F32, &[4, 2], 0.0), Tensor::ids(&[4])];
    let error = interpreter.run_named("f", &inputs, &mut states, SymValues::for_tokens(1)).unwrap_err();
    let expected = EvaluationFault::Index { arg: 0, axis: 0, index: 4, size: 4 };
    assert!(matches!(&error, GraphError::Fault { fault, .. } if *fault == expected), "{error}");
    assert_eq!(
        error.to_string(),
        "function @f, %2 = gather: reads input 0 at index 4 of axis 0, which has size 4"
    );
}

#[test]
fn wrong_inputs_are_refused() {
    let (module, id) = accumulator();
    let interpreter = Interpreter::new(&module, |_| Tensor::f32(&[3], &[1.0; 3]));
    let mut states = StateValues::new(&module).unwrap();
    let before = states.clone();
    let none = interpreter.run(id, &[], &mut states, SymValues::for_tokens(1)).unwrap_err();
    assert_eq!(none.to_string(), "function @f takes 1 inputs, not 0");
    let x = [Tensor::f32(&[3], &[0.0; 3])];
    let shape = interpreter.run(id, &x, &mut states, SymValues::for_tokens(1)).unwrap_err();
    assert_eq!(shape.to_string(), "input 0 of @f: expected f32[2], found f32[3]");
    let x = [Tensor::f32(&[2], &[0.0; 2])];
    let param = interpreter.run(id, &x, &mut states, SymValues::for_tokens(1)).unwrap_err();
    assert_eq!(param.to_string(), "parameter @w: expected f32[2], found f32[3]");
    assert_eq!(states, before);
    let missing = interpreter.run_named("g", &x, &mut states, SymValues::for_tokens(1)).unwrap_err();
    assert_eq!(missing.to_string(), "the module has no function @g");
}

#[test]
fn an_ill_typed_node_is_refused_before_it_runs() {
    let mut module = Module::new("m");
    let mut f = Function::new("f", FunctionKind::Entry);
    let x = f.add_input(f32s(&[2]));
    f.outputs = f.append_typed(Op::Binary(BinOp::Add), &[x, x], vec![f32s(&[3])]);
    module.functions.push(f);
    let interpreter = Interpreter::new(&module, |_| unreachable!());
    let mut states = StateValues::new(&module).unwrap();
    let inputs = [Tensor::f32(&[2], &[1.0, 2.0])];
    let error = interpreter.run_named("f", &inputs, &mut states, SymValues::for_tokens(1)).unwrap_err();
    assert_eq!(error.to_string(), "function @f, %1 = add: gives f32[2]");
}

//! Random modules: fast and plain evaluation agree to the bit, and the comparison of modules notices changes.

use mlcc_interp::compare::Tolerance;
use mlcc_interp::equivalence::{RandomWeights, random_inputs, same_meaning};
use mlcc_interp::graph::{EvaluationMode, Interpreter, StateValues, Tensor, param_value};
use mlcc_ir::dim::SymValues;
use mlcc_ir::kernel::{BinOp, UnOp};
use mlcc_ir::module::{ModelParam, ParamRole, ParamSource, RowBlocks};
use mlcc_ir::ops::Op;
use mlcc_ir::testing::graph::{GraphOptions, random_module};
use mlcc_ir::text::{parse_module, print_module};
use mlcc_ir::types::{DType, QuantFormat, TensorType};

#[test]
fn fast_and_plain_evaluation_agree() {
    for seed in 0..150 {
        let module = random_module(seed, &GraphOptions { sources: false, ..GraphOptions::ALL });
        let weights = RandomWeights::new(&module, seed).values(&module).unwrap();
        let syms = SymValues::for_tokens(1 + seed as i64 % 3);
        let (main, f) = module.function("main").unwrap();
        let inputs = random_inputs(f, &syms, seed);
        let run = |mode| {
            let interpreter = Interpreter::new(&module, |id| weights[id.0 as usize].clone()).with_mode(mode);
            let mut states = StateValues::new(&module).unwrap();
            let outputs = interpreter.run(main, &inputs, &mut states, syms);
            let outputs = outputs.unwrap_or_else(|e| panic!("seed {seed}: {e}\n{}", print_module(&module)));
            (outputs, states)
        };
        let bits = |tensors: &[Tensor]| -> Vec<Vec<u64>> {
            tensors.iter().map(|t| t.data.iter().map(|v| v.to_bits()).collect()).collect()
        };
        let (fast, plain) = (run(EvaluationMode::Fast), run(EvaluationMode::Plain));
        assert_eq!(bits(&fast.0), bits(&plain.0), "seed {seed}\n{}", print_module(&module));
        for id in module.states.ids() {
            let [a, b] = [&fast.1, &plain.1].map(|s| bits(std::slice::from_ref(s.get(id).unwrap())));
            assert_eq!(a, b, "seed {seed}, state {id}");
        }
    }
}

#[test]
fn a_printed_module_means_the_same() {
    for seed in 0..30 {
        let module = random_module(seed, &GraphOptions::SMOOTH);
        let again = parse_module(&print_module(&module)).unwrap();
        same_meaning(&module, &again, seed, Tolerance::EXACT).unwrap();
    }
}

#[test]
fn a_changed_meaning_is_noticed() {
    let (mut changes, mut noticed) = (0, 0);
    for seed in 0..30 {
        let module = random_module(seed, &GraphOptions::SMOOTH);
        let mut other = module.clone();
        let main = other.function("main").unwrap().0;
        let f = &mut other.functions[main];
        let last = f.outputs[0];
        let Some(node) = f.def_id(last) else { continue };
        match &mut f.nodes[node].op {
            Op::Unary(op @ (UnOp::Tanh | UnOp::Sigmoid | UnOp::Erf)) => *op = UnOp::Neg,
            Op::Binary(op @ (BinOp::Add | BinOp::Sub)) => *op = BinOp::Mul,
            _ => continue,
        }
        changes += 1;
        noticed += usize::from(same_meaning(&module, &other, seed, Tolerance::relative(1e-6)).is_err());
    }
    assert!(changes >= 3 && noticed == changes, "{noticed} of {changes}");
}

#[test]
fn parameters_are_made_from_their_sources() {
    let tensor = |name: &str| match name {
        "a" => Some(Tensor::f32(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
        "b" => Some(Tensor::f32(&[1, 2], &[0.0, -1.0])),
        _ => None,
    };
    let named = |name: &str| ParamSource::Tensor(name.into());
    let param = |ty, source| {
        let name = "p".into();
        ModelParam { name, ty, role: ParamRole::Linear, source, packing: None }
    };
    let transposed = ParamSource::Transpose(Box::new(named("a")));
    let joined = ParamSource::Concat(vec![transposed.clone(), ParamSource::NegExp(Box::new(named("b")))]);
    let p = param(TensorType::new(DType::F32, [4, 2]), joined.clone());
    let e = f64::from(-(1.0f64 / 1.0f64.exp()) as f32);
    assert_eq!(param_value(&p, &tensor).unwrap().data, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0, -1.0, e]);
    let source = |source: ParamSource| {
        let rows = param_value(&param(TensorType::new(DType::F32, [2]), source), &tensor).unwrap();
        rows.data
    };
    let every_other = RowBlocks { start: 1, len: 1, stride: 2, count: 2, of: 4 };
    let column = ParamSource::Values(vec![1.0, 2.0, 3.0, 4.0]);
    assert_eq!(source(ParamSource::Rows(every_other, Box::new(column))), [2.0, 4.0]);
    assert_eq!(source(ParamSource::Offset(1.5, Box::new(named("b")))), [1.5, 0.5]);
    let [a, b] = [source(named("b")), source(ParamSource::Columns(vec![1, 0], Box::new(named("b"))))];
    assert_eq!(b, [a[1], a[0]]);
    let unit = source(ParamSource::UnitRows(Box::new(ParamSource::Values(vec![3.0, -4.0]))));
    assert_eq!(unit, [f64::from(0.6f32), f64::from(-0.8f32)]);
    // One of two matrices that are stored together, transposed.
    let three_axes =
        |name: &str| (name == "w").then(|| Tensor::f32(&[2, 1, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    let rows = ParamSource::Rows(RowBlocks::range(1, 1, 2), Box::new(named("w")));
    let turned = ParamSource::Transpose(Box::new(ParamSource::Exp(Box::new(rows))));
    let p = param(TensorType::new(DType::F32, [3, 1]), turned);
    let e = [4.0f64, 5.0, 6.0].map(|x| f64::from(x.exp() as f32));
    assert_eq!(param_value(&p, &three_axes).unwrap().data, e);
    // A single-element axis may be squeezed.
    let p = param(TensorType::new(DType::F16, [2]), ParamSource::Scale(0.1, Box::new(named("b"))));
    assert_eq!(param_value(&p, &tensor).unwrap().data[1], half::f16::from_f32(-0.1).to_f64());
    let packed = |source| param(TensorType::new(DType::Packed(QuantFormat::Q8G32), [3, 2]), source);
    // Small integers are on a grid of 8 bits and come back as they were; powers of e are on none.
    let values = param_value(&packed(transposed.clone()), &tensor).unwrap();
    assert_eq!(values.data, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    let values = param_value(&packed(ParamSource::Exp(Box::new(transposed))), &tensor).unwrap();
    let (found, exact) = (values.data[2], f64::from(2.0f64.exp() as f32));
    // Half a step of the largest value of the row.
    assert!((found - exact).abs() < 5.0f64.exp() / 254.0 && found != exact, "{:?}", values.data);
    let refused = |ty, source| param_value(&param(ty, source), &tensor).unwrap_err().to_string();
    assert_eq!(
        refused(TensorType::new(DType::F32, [3]), named("b")),
        "parameter @p: expected f32[3], its source gives f32[1, 2]"
    );
    assert_eq!(
        refused(TensorType::new(DType::F32, [3]), named("c")),
        "parameter @p needs the tensor c, which is not there"
    );
    let uneven = ParamSource::Concat(vec![named("a"), named("b")]);
    let message = refused(TensorType::new(DType::F32, [3]), uneven);
    assert_eq!(message, "parameter @p: cannot join f32[1, 2] to f32[2, 3]");
}

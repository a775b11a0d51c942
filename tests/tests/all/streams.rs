//! Sequences without end in the graph interpreter: what is seen does not depend on how much went by before.

use mlcc_interp::graph::{Interpreter, StateValues, Tensor, param_value};
use mlcc_ir::dim::{Dim, SizeSymbol, SymValues};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::sequences::RowBatching;
use mlcc_ir::types::DType;
use mlcc_models::resolve::{ModelRequest, resolve};
use mlcc_models::transformer::DROPPED_ROWS;
use mlcc_models::{EntrySpec, LogitScope};
use std::path::Path;

#[test]
fn angles_stay_exact() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/llama-linear");
    let resolved = resolve(&ModelRequest::new(dir.to_str().unwrap())).unwrap();
    let checkpoint = resolved.open_weights().unwrap();
    let architecture = resolved.config.architecture.with_streaming_window(Some(16), 0).unwrap();
    let mut b = GraphBuilder::new("case");
    let (n, stream) = (Dim::sym(SizeSymbol::N), architecture.streaming_window());
    architecture.build(
        &mut b,
        &EntrySpec {
            name: "prefill",
            n,
            logits: LogitScope::Last,
            context: 64,
            streaming: stream,
            batching: RowBatching::Single,
            pooling_head: None,
            adapters: None,
            is_encoder_input: false,
        },
    );
    let module = b.finish().unwrap();
    let tensor = |name: &str| {
        let data = checkpoint.read(name).ok()?;
        Some(Tensor::f32(data.shape(), &data.to_f32().ok()?))
    };
    let interpreter = Interpreter::new(&module, |id| param_value(&module.params[id], &tensor).unwrap());
    let counter = module.states.iter().find(|(_, s)| s.name == DROPPED_ROWS).unwrap().0;
    let ids: Vec<i32> = (0..40).map(|i| 1 + (i * i) % 61).collect();
    let logits_after = |dropped: i32| {
        let mut states = StateValues::new(&module).unwrap();
        assert!(states.set(counter, Tensor::new(DType::I32, &[1], vec![f64::from(dropped)])));
        let sizes = SymValues::for_tokens(ids.len() as i64);
        let out = interpreter.run_named("prefill", &[Tensor::ids(&ids)], &mut states, sizes).unwrap();
        out[0].to_f32()
    };
    let expected = logits_after(0);
    let largest = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
    for dropped in [1, 2_000, 1_000_003, 50_000_000, 2_000_000_011] {
        let found = logits_after(dropped);
        let worst = expected.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(worst < 2e-3 * largest, "{worst} of {largest} with {dropped} tokens before");
    }
}

//! The graph module of a model: all its entry functions.

use mlcc_abi::{ADAPTED, EntryForm, EntryPoint};
use mlcc_ir::dim::{Dim, SizeSymbol};
use mlcc_ir::graph::{Function, FunctionKind};
use mlcc_ir::graph_builder::GraphBuilder;
use mlcc_ir::module::Module;
use mlcc_ir::ops::{Op, OpError};
use mlcc_ir::sequences::RowBatching;
use mlcc_ir::types::{DType, TensorType};
use mlcc_models::{AdapterSlots, Architecture, EntrySpec, LogitScope};
use mlcc_passes::plan_memory::{SOFTMAX, TOP_K_STEP};

/// Builds the entry functions of a model: of one that makes vectors of texts `step` alone, which takes whole
/// texts; else `prefill`, `decode`, `prefill_logits` and `softmax_with_temperature`, of an encoder-decoder
/// model `encode`, and `decode_batch` and `step` too if more than one sequence is to be computed together.
/// Caches get room for `context` positions.
pub fn build_module(
    name: &str,
    architecture: &Architecture,
    context: usize,
    batch: u32,
) -> Result<Module, OpError> {
    build_with(GraphBuilder::new(name), architecture, context, batch, None)
}

/// [`build_module`] with slots for adapters: the entry functions that take tokens are there once more, with
/// names that begin with `adapted_`, for calls in which some sequence has an adapter. The others are as they
/// are without slots.
pub fn build_module_with_slots(
    name: &str,
    architecture: &Architecture,
    context: usize,
    batch: u32,
    adapters: AdapterSlots,
) -> Result<Module, OpError> {
    build_with(GraphBuilder::new(name), architecture, context, batch, Some(adapters))
}

/// [`build_module`], with entry functions that also return every layer's output.
pub fn build_module_with_taps(
    name: &str,
    architecture: &Architecture,
    context: usize,
    batch: u32,
) -> Result<Module, OpError> {
    build_with(GraphBuilder::with_taps(name), architecture, context, batch, None)
}

fn build_with(
    mut b: GraphBuilder,
    architecture: &Architecture,
    context: usize,
    batch: u32,
    slots: Option<AdapterSlots>,
) -> Result<Module, OpError> {
    let embeds_texts = architecture.pooling_head().is_some();
    let is_built = |point: &EntryPoint| match point.kind() {
        EntryForm::Ragged if embeds_texts => true,
        _ if embeds_texts => false,
        EntryForm::LastLogits | EntryForm::AllLogits => true,
        EntryForm::Source => architecture.decoder_start_token_id().is_some(),
        EntryForm::Batch | EntryForm::Ragged => batch > 1,
        EntryForm::State | EntryForm::Rows => false,
    };
    for adapters in std::iter::once(None).chain(slots.map(Some)) {
        for point in EntryPoint::all().filter(is_built) {
            if adapters.is_none() || point.has_adapted() {
                build_entry(&mut b, architecture, context, point, adapters);
            }
        }
    }
    if !embeds_texts {
        b.set_batching(RowBatching::Single);
        softmax_with_temperature(&mut b, architecture.vocab());
    }
    b.finish()
}

/// Adds the entry function of an entry point that takes tokens.
fn build_entry(
    b: &mut GraphBuilder,
    architecture: &Architecture,
    context: usize,
    point: EntryPoint,
    adapters: Option<AdapterSlots>,
) {
    let (logits, batching) = match point.kind() {
        EntryForm::AllLogits => (LogitScope::All, RowBatching::Single),
        EntryForm::Batch => (LogitScope::All, RowBatching::OneEach),
        EntryForm::Ragged => (LogitScope::OutputRows, RowBatching::Ragged),
        _ => (LogitScope::Last, RowBatching::Single),
    };
    let prefix = if adapters.is_some() { ADAPTED } else { "" };
    let spec = EntrySpec {
        name: &format!("{prefix}{}", point.name()),
        n: if point == EntryPoint::Decode { Dim::from(1) } else { Dim::sym(SizeSymbol::N) },
        logits,
        context,
        streaming: architecture.streaming_window(),
        batching,
        pooling_head: architecture.pooling_head(),
        adapters,
        is_encoder_input: point.kind() == EntryForm::Source,
    };
    architecture.build(b, &spec);
}

/// Adds the entry function that finds the largest of `n` rows of logits, so that a device need not send them
/// all to the host. Text models have no logits, and very small vocabularies are sent as they are.
pub fn add_top_k(module: &mut Module) -> Result<(), OpError> {
    let Some(softmax) = module.functions.values().find(|f| f.name == SOFTMAX) else { return Ok(()) };
    let logits = softmax.ty(softmax.inputs[0]).clone();
    if logits.dims[1].as_const().is_none_or(|vocab| vocab < mlcc_abi::TOP_K as i64) {
        return Ok(());
    }
    let mut f = Function::new(TOP_K_STEP, FunctionKind::Entry);
    let logits = f.add_input(logits);
    f.outputs = f.append(module, Op::TopK { k: mlcc_abi::TOP_K }, &[logits])?;
    module.functions.push(f);
    Ok(())
}

/// `softmax(logits / temperature)` of `n` rows of logits.
fn softmax_with_temperature(b: &mut GraphBuilder, vocab: usize) {
    let logits = TensorType::new(DType::F32, [Dim::sym(SizeSymbol::N), Dim::from(vocab as i64)]);
    let temperature = TensorType::new(DType::F32, [1]);
    b.function(SOFTMAX, FunctionKind::Entry, &[logits, temperature], |b, inputs| {
        let scaled = b.div(inputs[0], inputs[1]);
        vec![b.softmax(scaled)]
    });
}

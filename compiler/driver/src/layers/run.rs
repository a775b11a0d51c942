//! Executors of modules with taps.

use std::collections::BTreeMap;

use mlcc_interp::graph::{Interpreter, StateValues, Tensor};
use mlcc_ir::dim::SymValues;
use mlcc_ir::entity::EntityId;
use mlcc_ir::module::Module;
use mlcc_models::Checkpoint;
use mlcc_quant::PackOptions;
use mlcc_runtime::Session;

use super::{BoxedError, LOGITS, LayerModel, TapCall, TapOutput};
use crate::compile::taps::{TapPlace, TapPlaces};
use crate::interpret::StepModel;
use crate::weights::stored_value;

/// Pack options of parameters, by name; others take the default.
pub type ParamPacking = BTreeMap<String, PackOptions>;

/// The graph interpreter on the values of the stored weights.
pub struct GraphLayers<'m> {
    interpreter: Interpreter<'m>,
    states: StateValues,
}

impl<'m> GraphLayers<'m> {
    /// Reads all weights: 8 bytes of memory for each.
    pub fn new(
        module: &'m Module,
        checkpoint: &Checkpoint,
        packs: &ParamPacking,
    ) -> Result<Self, BoxedError> {
        let mut values = Vec::with_capacity(module.params.len());
        for param in module.params.values() {
            let options = packs.get(&param.name).copied().unwrap_or_default();
            values.push(stored_value(checkpoint, param, options)?);
        }
        let interpreter = Interpreter::new(module, move |id| values[id.index()].clone());
        Ok(GraphLayers { interpreter, states: StateValues::new(module)? })
    }

    /// All outputs of the entry function that the call goes to.
    pub fn outputs(&mut self, call: &TapCall) -> Result<Vec<Tensor>, BoxedError> {
        self.outputs_from(call, Vec::new())
    }

    /// The same with further inputs after the tokens.
    fn outputs_from(&mut self, call: &TapCall, more: Vec<Tensor>) -> Result<Vec<Tensor>, BoxedError> {
        let sizes = SymValues { n: call.tokens.len() as i64, b: 1, past: call.start as i64 };
        let inputs: Vec<Tensor> = [Tensor::ids(&call.tokens)].into_iter().chain(more).collect();
        Ok(self.interpreter.run_named(call.entry(), &inputs, &mut self.states, sizes)?)
    }
}

impl GraphLayers<'_> {
    /// The taps of a call whose entry function has `more` inputs after the tokens.
    pub fn taps(&mut self, call: &TapCall, more: Vec<Tensor>) -> Result<Vec<TapOutput>, BoxedError> {
        let outputs = self.outputs_from(call, more)?;
        let names = self.interpreter.module().taps_of(call.entry());
        let tap = |name: &str, t: &Tensor| TapOutput {
            name: name.into(),
            width: t.dims.last().copied().unwrap_or(1),
            values: t.to_f32(),
        };
        let mut taps: Vec<TapOutput> =
            names.iter().zip(outputs.iter().skip(1)).map(|(n, t)| tap(n, t)).collect();
        taps.extend(outputs.first().map(|logits| tap(LOGITS, logits)));
        Ok(taps)
    }
}

impl LayerModel for GraphLayers<'_> {
    fn run_call(&mut self, call: &TapCall) -> Result<Vec<TapOutput>, BoxedError> {
        self.taps(call, Vec::new())
    }
}

/// Values at their places in scratch memory.
fn read(
    places: &[TapPlace],
    scratch: &[u8],
    call: &TapCall,
    logits: &[f32],
) -> Result<Vec<TapOutput>, BoxedError> {
    let mut taps = Vec::with_capacity(places.len() + 1);
    for place in places {
        let values = place.read(scratch, call.tokens.len());
        let values = values.ok_or_else(|| format!("tap {} lies outside of scratch memory", place.name))?;
        taps.push(TapOutput { name: place.name.clone(), width: place.width as usize, values });
    }
    taps.push(TapOutput { name: LOGITS.into(), width: logits.len(), values: logits.to_vec() });
    Ok(taps)
}

fn of_entry<'p>(places: &'p TapPlaces, call: &TapCall) -> &'p [TapPlace] {
    places.get(call.entry()).map_or(&[], Vec::as_slice)
}

/// The kernel interpreter.
pub struct KernelLayers<'p> {
    pub model: StepModel<'p>,
    pub places: TapPlaces,
}

impl LayerModel for KernelLayers<'_> {
    fn run_call(&mut self, call: &TapCall) -> Result<Vec<TapOutput>, BoxedError> {
        let logits = self.model.run_entry(call.entry(), &call.tokens)?.to_vec();
        read(of_entry(&self.places, call), self.model.scratch(), call, &logits)
    }
}

/// Compiled code.
pub struct ArtifactLayers {
    pub session: Session,
    pub places: TapPlaces,
}

impl LayerModel for ArtifactLayers {
    fn run_call(&mut self, call: &TapCall) -> Result<Vec<TapOutput>, BoxedError> {
        let logits = match call.tokens.as_slice() {
            [token] => self.session.decode(*token)?,
            tokens => self.session.prefill(tokens)?,
        };
        let logits = logits.to_vec();
        read(of_entry(&self.places, call), &self.session.scratch()?, call, &logits)
    }
}

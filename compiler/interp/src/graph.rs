//! Reference execution of graph functions: the meaning of everything.
//!
//! Ops are evaluated from their compute definitions in f64 and rounded to the output's type; decomposed ops
//! by running their decomposition; `param`, `state.*`, `call` and `scan` by the module. A `state.read` gives
//! the value from before the step wherever it is; writes become visible when the step has succeeded. Integers
//! are exact up to 2^53.

mod batch;
mod error;
mod exec;
mod fast;
mod place;
mod plan;
mod program;
mod ranks;
mod scalar;
mod step;
mod tensor;
mod weights;

pub use batch::SequenceRows;
pub use error::GraphError;
pub use exec::EvaluationFault;
pub use ranks::{AllGatherFault, FaultInjector, RankError, RankMessage, RankedModel};
pub use tensor::{StateValues, Tensor};
pub use weights::{WeightLoadError, param_value, param_value_of_rank};

use mlcc_ir::dim::SymValues;
use mlcc_ir::entity::EntityId;
use mlcc_ir::module::{FuncId, Module, ParamId};
use std::sync::{Arc, OnceLock};

/// The way in which compute definitions are evaluated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EvaluationMode {
    /// Plain loops where a definition has a common form.
    #[default]
    Fast,
    /// Always by the register program: slow, used to check `Fast`.
    Plain,
}

/// Runs functions of one module. Parameters are asked for once, when a function first uses them.
pub struct Interpreter<'m> {
    module: &'m Module,
    source: Box<dyn Fn(ParamId) -> Tensor + 'm>,
    params: Vec<OnceLock<Arc<Tensor>>>,
    mode: EvaluationMode,
    /// The link to the other ranks; none where the module runs alone.
    link: Option<ranks::SimulatedLink<'m>>,
}

impl<'m> Interpreter<'m> {
    /// `params` gives the value of each parameter; of a packed one, the dequantized values.
    pub fn new(module: &'m Module, params: impl Fn(ParamId) -> Tensor + 'm) -> Self {
        Interpreter {
            module,
            source: Box::new(params),
            params: module.params.ids().map(|_| OnceLock::new()).collect(),
            mode: EvaluationMode::default(),
            link: None,
        }
    }
    pub fn with_mode(mut self, mode: EvaluationMode) -> Self {
        self.mode = mode;
        self
    }
    pub fn module(&self) -> &'m Module {
        self.module
    }
    /// The number of this rank, in [`RankedModel::run`]; 0 where the module runs alone.
    pub fn rank(&self) -> usize {
        self.link.as_ref().map_or(0, ranks::SimulatedLink::rank)
    }

    /// Runs a function; `states` changes only if it succeeds.
    pub fn run(
        &self,
        function: FuncId,
        inputs: &[Tensor],
        states: &mut StateValues,
        syms: SymValues,
    ) -> Result<Vec<Tensor>, GraphError> {
        let mut step = step::StepEvaluator::new(self, states, syms);
        let inputs: Vec<Arc<Tensor>> = inputs.iter().map(|t| Arc::new(t.clone())).collect();
        let outputs = step.call(function, inputs)?;
        *states = step.finish();
        Ok(outputs.into_iter().map(|t| Arc::try_unwrap(t).unwrap_or_else(|t| (*t).clone())).collect())
    }

    /// Runs a function that decodes a token of each of `states.len()` sequences, which have seen `pasts`
    /// tokens; `states` change only if it succeeds.
    pub fn run_batch(
        &self,
        function: FuncId,
        inputs: &[Tensor],
        states: &mut [StateValues],
        pasts: &[i64],
    ) -> Result<Vec<Tensor>, GraphError> {
        let pieces: Vec<SequenceRows> = pasts.iter().map(|&past| SequenceRows { past, rows: 1 }).collect();
        batch::run(self, function, inputs, states, &pieces, pieces.len())
    }

    /// Runs a function that takes rows of several sequences, `pieces` of them, with `wanted` output rows;
    /// `states` change only if it succeeds.
    pub fn run_sequences(
        &self,
        function: FuncId,
        inputs: &[Tensor],
        states: &mut [StateValues],
        pieces: &[SequenceRows],
        wanted: usize,
    ) -> Result<Vec<Tensor>, GraphError> {
        batch::run(self, function, inputs, states, pieces, wanted)
    }

    /// [`Interpreter::run`] of the function with that name.
    pub fn run_named(
        &self,
        function: &str,
        inputs: &[Tensor],
        states: &mut StateValues,
        syms: SymValues,
    ) -> Result<Vec<Tensor>, GraphError> {
        match self.module.function(function) {
            Some((id, _)) => self.run(id, inputs, states, syms),
            None => Err(GraphError::NoFunction(format!("@{function}"))),
        }
    }

    fn param(&self, id: ParamId) -> Result<Arc<Tensor>, GraphError> {
        let (Some(slot), Some(param)) = (self.params.get(id.index()), self.module.params.get(id)) else {
            let place = format!("parameter {id}");
            let (expected, found) = ("a parameter of the module".into(), "none".into());
            return Err(GraphError::Shape { place, expected, found });
        };
        let tensor = slot.get_or_init(|| Arc::new((self.source)(id)));
        step::check(|| format!("parameter @{}", param.name), &param.ty, tensor, &SymValues::for_tokens(1))?;
        Ok(tensor.clone())
    }
}

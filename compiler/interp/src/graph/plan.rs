//! Preparation that happens once per function and step: sizes and compiled definitions of its nodes.

use super::EvaluationMode;
use super::GraphError;
use super::exec::EvaluationFault;
use super::fast::{EvaluationDomain, FastPath};
use super::place::concrete_dims;
use super::program::{InputShape, ScalarProgram};
use super::tensor::Tensor;
use mlcc_ir::dim::SymValues;
use mlcc_ir::graph::{Function, FunctionKind, GraphNode, NodeId};
use mlcc_ir::module::Module;
use mlcc_ir::ops::{Op, OpSemantics};
use mlcc_ir::text::node_label;
use mlcc_ir::types::{DType, TensorType};
use std::borrow::Cow;
use std::rc::Rc;
use std::sync::Arc;

/// A function with one plan per live node.
pub(super) struct FunctionPlan<'m> {
    pub function: Cow<'m, Function>,
    pub nodes: Vec<NodePlan>,
}

pub(super) enum NodePlan {
    /// One per output.
    Compute(Vec<PlannedOutput>),
    Decomposed(Rc<FunctionPlan<'static>>),
    Structural,
}

/// An output with the way to compute it.
pub(super) struct PlannedOutput {
    dtype: DType,
    dims: Vec<usize>,
    how: EvaluationMethod,
}

enum EvaluationMethod {
    /// The elements of input 0 in the same order.
    Same,
    Fast(FastPath),
    Program(ScalarProgram),
}

impl PlannedOutput {
    pub fn evaluate(&self, args: &[Arc<Tensor>]) -> Result<Tensor, EvaluationFault> {
        let slices: Vec<&[f64]> = args.iter().map(|t| t.data.as_slice()).collect();
        let data = match &self.how {
            EvaluationMethod::Same => slices[0].to_vec(),
            EvaluationMethod::Fast(fast) => fast.run(&self.dims, self.dtype, &slices),
            EvaluationMethod::Program(program) => program.run(&self.dims, self.dtype, &slices)?,
        };
        Ok(Tensor { dtype: self.dtype, dims: self.dims.clone(), data })
    }
}

/// Everything a plan depends on.
#[derive(Clone, Copy)]
pub(super) struct FunctionPlanner<'m> {
    pub module: &'m Module,
    pub syms: SymValues,
    pub mode: EvaluationMode,
}

impl<'m> FunctionPlanner<'m> {
    pub fn function<'f>(&self, function: Cow<'f, Function>) -> Result<FunctionPlan<'f>, GraphError> {
        let nodes = function
            .live_nodes()
            .map(|(id, node)| self.node(&function, id, node))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(FunctionPlan { function, nodes })
    }

    fn node(&self, function: &Function, id: NodeId, node: &GraphNode) -> Result<NodePlan, GraphError> {
        let types: Vec<&TensorType> = node.inputs.iter().map(|&v| function.ty(v)).collect();
        // Definitions rely on valid inputs: this is the check of the verifier.
        let inferred = node.op.infer(self.module, &types);
        let outputs: Vec<&TensorType> = node.outputs.iter().map(|&v| function.ty(v)).collect();
        match inferred {
            Ok(types) if types.iter().eq(outputs.iter().copied()) => {}
            Ok(types) => {
                let types: Vec<String> = types.iter().map(ToString::to_string).collect();
                return Err(malformed(function, id, format!("gives {}", types.join(", "))));
            }
            Err(error) => return Err(malformed(function, id, error.message)),
        }
        match node.op.semantics(&types) {
            OpSemantics::Structural => Ok(NodePlan::Structural),
            OpSemantics::Decompose => self.decomposed(node, &types).map(NodePlan::Decomposed),
            OpSemantics::Compute(definitions) => {
                let args = types
                    .iter()
                    .map(|ty| Ok(InputShape { dims: self.dims(function, ty)?, dtype: ty.dtype }))
                    .collect::<Result<Vec<_>, GraphError>>()?;
                let mut plans = Vec::with_capacity(outputs.len());
                for (definition, ty) in definitions.iter().zip(outputs) {
                    let dims = self.dims(function, ty)?;
                    let domain =
                        EvaluationDomain { dims: &dims, dtype: ty.dtype, args: &args, syms: &self.syms };
                    let fast = match (self.mode, &node.op) {
                        (EvaluationMode::Plain, _) => None,
                        (EvaluationMode::Fast, Op::Reshape { .. }) => Some(EvaluationMethod::Same),
                        (EvaluationMode::Fast, _) => {
                            FastPath::recognise(definition, &domain).map(EvaluationMethod::Fast)
                        }
                    };
                    let how = match fast {
                        Some(how) => how,
                        None => ScalarProgram::compile(definition, dims.len(), &args, &self.syms)
                            .map(EvaluationMethod::Program)
                            .map_err(|message| malformed(function, id, message))?,
                    };
                    plans.push(PlannedOutput { dtype: ty.dtype, dims, how });
                }
                Ok(NodePlan::Compute(plans))
            }
        }
    }

    fn dims(&self, function: &Function, ty: &TensorType) -> Result<Vec<usize>, GraphError> {
        concrete_dims(ty, &self.syms)
            .ok_or_else(|| GraphError::Size { place: format!("function @{}", function.name), ty: ty.clone() })
    }

    /// The decomposition as a function of its own.
    fn decomposed(
        &self,
        node: &GraphNode,
        types: &[&TensorType],
    ) -> Result<Rc<FunctionPlan<'static>>, GraphError> {
        let mut scratch = Function::new(node.op.name(), FunctionKind::Group);
        let inputs: Vec<_> = types.iter().map(|ty| scratch.add_input((*ty).clone())).collect();
        scratch.outputs = node.op.decompose(self.module, &mut scratch, &inputs)?;
        self.function(Cow::Owned(scratch)).map(Rc::new)
    }
}

pub(super) fn malformed(function: &Function, id: NodeId, message: String) -> GraphError {
    GraphError::Malformed { function: function.name.clone(), node: node_label(function, id), message }
}

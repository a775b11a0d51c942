//! Errors in the evaluation of graph functions.

use super::exec::EvaluationFault;
use super::ranks::AllGatherFault;
use mlcc_ir::ops::OpError;
use mlcc_ir::types::TensorType;

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GraphError {
    #[error("the module has no function {0}")]
    NoFunction(String),
    #[error("{place}: {ty} has a negative size, or more than 2^30 elements, for the symbols of this call")]
    Size { place: String, ty: TensorType },
    #[error("{place}: expected {expected}, found {found}")]
    Shape { place: String, expected: String, found: String },
    #[error("function @{function} takes {expected} inputs, not {found}")]
    Arity { function: String, expected: usize, found: usize },
    /// `node` as the printed function shows it: `%3 = gather`.
    #[error("function @{function}, {node}: {fault}")]
    Fault { function: String, node: String, fault: EvaluationFault },
    /// The graph is not well formed; the verifier would have said so.
    #[error("function @{function}, {node}: {message}")]
    Malformed { function: String, node: String, message: String },
    #[error("function @{function}, {node}: {fault}")]
    Exchange { function: String, node: String, fault: Box<AllGatherFault> },
    #[error("decomposition: {0}")]
    Decompose(#[from] OpError),
}

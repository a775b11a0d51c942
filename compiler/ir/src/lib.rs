//! The two IRs of mlcc in one [`module::Module`]: graph IR (SSA ops on tensors with symbolic sizes) and
//! kernel IR (explicit loops on buffers), with builders, and the table of target instructions.

pub mod builder;
pub mod compute;
pub mod dim;
pub mod draw;
pub mod entity;
pub mod format;
pub mod fragment;
pub mod graph;
pub mod graph_builder;
pub mod horizontal_fusion;
pub mod instr;
pub mod kernel;
pub mod module;
pub mod ops;
pub mod rewrite;
pub mod sequences;
pub mod step;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod text;
pub mod types;
pub mod verify;
pub mod visit;

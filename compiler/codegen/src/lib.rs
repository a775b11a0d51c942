//! mlcc-codegen

pub mod artifact;
pub mod table;

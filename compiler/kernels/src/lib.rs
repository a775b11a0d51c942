//! mlcc-kernels

pub mod math;

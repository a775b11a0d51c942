//! Kernels for scans: a body that is run for every step, with values that it carries from one to the next.

pub mod channels;
pub mod matrix;
mod ring;

pub use channels::{CHANNELS, ChannelScan, ScanEpilogue, is_channelwise};
pub use matrix::{MatrixScan, shape_of};

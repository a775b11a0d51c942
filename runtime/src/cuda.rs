//! The CUDA device: the driver library, the model's kernels and weights on one GPU, and the execution of launch lists.
//!
//! The driver is loaded by name at run time; nothing is needed at build time. All work of a session goes through its
//! own stream, copies included, so that order needs no further synchronisation. `decode` is captured once as a CUDA
//! graph when none of its launches depends on `past`.

mod bandwidth;
mod device;
mod driver;
mod session;
mod state_memory;

pub(crate) use bandwidth::copy_bandwidth;
pub(crate) use device::Device;
pub(crate) use session::CudaSession;

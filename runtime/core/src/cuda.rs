//! The CUDA device: the driver library, the model's kernels and weights on one GPU, and the execution of
//! launch lists.
//!
//! The driver is loaded by name at run time; nothing is needed at build time. All work of a model goes
//! through one stream, copies included, so that order needs no further synchronisation ([`executor`]). What
//! changes from call to call lies in memory that kernels read ([`control`]), and `decode` is recorded as a
//! CUDA graph ([`graphs`]).

mod bandwidth;
mod batch;
mod control;
mod device;
mod device_pages;
mod driver;
mod executor;
mod graphs;
mod image;
mod launches;
mod nccl;
mod rank_worker;
mod ranks;
mod session;
mod session_pages;
mod stream;
mod top_k;
mod upload;

pub(crate) use device::CudaDevice;
pub(crate) use ranks::LocalRank;

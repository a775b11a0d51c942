//! A CUDA driver in software. The runtime loads it in place of `libcuda.so.1` (`MLCC_CUDA_DRIVER`), and it
//! executes the PTX of the artifact as NVIDIA's "Parallel Thread Execution ISA" defines it. Behaviour that
//! the ISA leaves undefined is an error that names kernel, line, block and lane: reads of bytes that were
//! never written, races, accesses beyond an allocation or off their alignment, threads that part where they
//! have to act together. It knows nothing of the kernel IR that the PTX was made from.
//!
//! `ptx` reads the text, `exec` executes, `memory` holds the device's memory, `driver` is the driver behind
//! the C functions in `api`. Switches, all in the environment, are in [`options`].

mod api;
pub mod count;
pub mod driver;
pub mod exec;
pub mod memory;
pub mod options;
pub mod ptx;

//! mlcc-kernels

//! mlcc-runtime

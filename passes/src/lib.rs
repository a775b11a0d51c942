//! mlcc-passes

//! mlcc-ir

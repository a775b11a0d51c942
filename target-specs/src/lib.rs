//! mlcc-target

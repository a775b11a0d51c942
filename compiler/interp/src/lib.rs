//! mlcc-interp

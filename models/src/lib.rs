//! mlcc-models

//! mlcc-engine

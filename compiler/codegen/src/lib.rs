//! mlcc-codegen

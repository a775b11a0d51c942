//! mlcc-tests

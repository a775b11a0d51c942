//! mlcc-abi

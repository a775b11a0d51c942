//! The software driver: what instructions compute, and that mistakes are found.

mod faults;
mod instructions;
mod machine;
mod order;
mod streams;
mod strictness;
mod tensor;

//! All integration tests of the crate in one program, since linking it is most of a build: one module per
//! subject.

mod common;
mod elf;
mod header;

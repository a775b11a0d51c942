//! The command line ([`cli`]) over the compiler (`mlcc_driver`), the runtime and the engine: one file per
//! command in [`commands`].

mod allocator;
pub mod cli;
pub mod commands;
mod disk;
pub mod error;
pub mod interrupt;
mod signals;
pub mod ui;
